#!/usr/bin/env python3
"""The tests of the rooms that were edited: `make quick`, or `make quick ROOMS="lvm agent/core"`.

Edited is what differs from the last commit. At most a minute for a room; `make fast` runs all.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A room, and the tests that show first what broke in it.
TESTS = {
    "mount": ("fast/mount", "fast/programs", "contract/test_mount_*.py"),
    "lvm": ("fast/lvm", "contract/test_lvm_*.py"),
    "agent/core": ("fast/core", "contract/test_classes.py"),
    "agent/operations": (
        "fast/operations",
        *("contract/test_lifecycle.py", "contract/test_node.py", "contract/test_snapshots.py"),
    ),
    "agent/csi": ("contract/test_controller.py", "contract/test_node.py"),
    "agent/daemon": ("fast/daemon", "contract/test_registration.py"),
    "agent/cli": ("fast/cli", "contract/test_by_hand.py"),
    "agent/extras/changed_blocks": (
        "fast/extras/changed_blocks",
        "contract/test_activations.py",
    ),
    "agent/extras/streams": ("fast/extras/streams",),
    "agent/extras/transfer": ("fast/extras/transfer",),
    "agent/extras/orphans": ("fast/extras/orphans",),
    "agent/extras/kubernetes": ("fast/extras/kubernetes",),
    "agent/extras/controller": (
        "fast/extras/controller",
        *("contract/test_cluster.py", "callers/test_central.py"),
    ),
    "docs": ("fast/repository/test_docs.py",),
    "deploy": ("fast/repository", "fast/programs"),
}


def edited() -> list[str]:
    """The files that differ from the last commit, or are new."""
    found: list[str] = []
    for words in (("diff", "--name-only", "HEAD"), ("ls-files", "--others", "--exclude-standard")):
        told = subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        found += told.stdout.decode().splitlines()
    return found


def chosen(rooms: Iterable[str], files: Iterable[str]) -> list[str]:
    """The tests of these rooms, and of those that these files are in; edited tests themselves."""
    names = list(files)
    wanted = {one for one in TESTS if any(name.startswith(f"{one}/") for name in names)}
    patterns = [one for room in TESTS if room in {*wanted, *rooms} for one in TESTS[room]]
    own = [one for one in names if Path(one).match("tests/[fc]*/**/test_*.py")]
    paths = [path for one in patterns for path in sorted((ROOT / "tests").glob(one))]
    found = [*(str(one.relative_to(ROOT)) for one in paths), *own]
    return [*dict.fromkeys(found), "tests/fast/repository/test_layers.py"]


def main(rooms: list[str]) -> int:
    """Run them; unknown rooms are refused."""
    if unknown := set(rooms) - TESTS.keys():
        print(f"no room {', '.join(sorted(unknown))}; there are {', '.join(TESTS)}")
        return 2
    tests = chosen(rooms, [] if rooms else edited())
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "worksteal"]
    return subprocess.run([*words, *tests], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
