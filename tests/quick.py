#!/usr/bin/env python3
"""The tests of the rooms that were edited: `make quick`, or `make quick ROOMS="lvm agent/volumes"`.

Edited is what differs from the last commit. Whatever was edited, the tests of documents, lists,
schemas and packaging run, too. At most a minute for a room; `make fast` runs all.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests that show which document, list, schema or package was forgotten. They run after each edit.
COMPLETE = (
    "fast/repository",
    *(
        "fast/core/test_codes.py",
        "fast/settings/test_settings.py",
        "fast/settings/test_configuration.py",
        "fast/daemon/test_metrics.py",
    ),
    *("fast/operations/test_health_reasons.py", "fast/extras/controller/test_threats.py"),
    "fast/programs/test_quick.py",
    "fast/programs/test_cluster.py::test_every_check_is_documented_and_no_other",
    "fast/cli/test_volumes.py::test_the_document_s_example_works_as_it_stands",
    "chart/test_chart.py::test_there_are_ten_files_that_use_every_value",
    "chart/test_platforms.py::test_every_platform_is_known_and_has_a_file",
    "chart/test_platforms.py::test_a_platform_s_values_are_values_of_the_chart",
    "chart/test_platforms.py::test_every_platform_has_a_row_in_the_documentation",
)
# Tests that take too long for each edit: the core's contract, run anew without the extras.
LONG = "tests/fast/repository/test_without_extras.py"
# A room, and the tests that show first what broke in it.
TESTS = {
    "mount": ("fast/mount", "contract/test_mount_*.py"),
    "lvm": ("fast/lvm", "contract/test_lvm_*.py"),
    "agent/core": ("fast/core",),
    "agent/settings": ("fast/settings", "contract/test_classes.py"),
    "agent/requests": ("fast/requests", "contract/test_classes.py"),
    "agent/work": ("fast/work", "contract/test_autoextend.py"),
    "agent/groups": ("fast/groups", "contract/test_groups.py"),
    "agent/volumes": ("fast/volumes", "contract/test_conflicts.py"),
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
    "agent/extras/tls": ("fast/extras/controller", "fast/daemon/test_node_names.py"),
    "agent/extras/transfer": ("fast/extras/transfer",),
    "agent/extras/orphans": ("fast/extras/orphans",),
    "agent/extras/kubernetes": ("fast/extras/kubernetes",),
    "agent/extras/evacuation": ("fast/extras/evacuation",),
    "agent/extras/controller": (
        "fast/extras/controller",
        *("contract/test_cluster.py", "callers/test_central.py"),
    ),
    "docs": ("contract/test_runbooks.py", "contract/test_access_modes.py"),
    "deploy": ("fast/programs/test_kind.py", "fast/programs/test_monitoring.py"),
    "tests/cluster": ("fast/programs/test_cluster*.py",),
    "tests/conformance": ("fast/programs/test_conformance.py",),
    "tests/container": ("fast/programs/test_pod.py",),
    "tests/faults": ("fast/programs/test_faults.py",),
    "tests/performance": ("fast/programs/test_performance.py",),
    "vagrant": ("fast/programs/test_cluster_lab.py", "fast/programs/test_demo.py"),
}


def edited() -> list[str]:
    """The files that differ from the last commit, or are new; not those that were deleted."""
    found: list[str] = []
    changed = ("diff", "--name-only", "--diff-filter=d", "HEAD")
    for words in (changed, ("ls-files", "--others", "--exclude-standard")):
        listed = subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        found += listed.stdout.decode().splitlines()
    return found


def is_test(name: str) -> bool:
    """Whether a file is a test that needs no lab, root, helm or Prometheus."""
    path = Path(name)
    tiers = {"fast", "contract", "callers"}
    return path.match("test_*.py") and path.parts[0] == "tests" and path.parts[1] in tiers


def chosen(rooms: Iterable[str], files: Iterable[str]) -> list[str]:
    """The tests of these rooms, of the rooms that these files are in, and of what is complete.

    Edited tests run themselves.
    """
    names = list(files)
    wanted = {one for one in TESTS if any(name.startswith(f"{one}/") for name in names)}
    patterns = [one for room in TESTS if room in {*wanted, *rooms} for one in TESTS[room]]
    paths = [path for one in patterns for path in sorted((ROOT / "tests").glob(one))]
    found = [str(one.relative_to(ROOT)) for one in paths]
    always = [f"tests/{one}" for one in COMPLETE]
    return [*dict.fromkeys([*found, *filter(is_test, names), *always])]


def main(rooms: list[str]) -> int:
    """Run them; unknown rooms are refused."""
    if unknown := set(rooms) - TESTS.keys():
        print(f"no room {', '.join(sorted(unknown))}; there are {', '.join(TESTS)}")
        return 2
    files = edited()
    if any(one.startswith("deploy/helm/") for one in files):
        # Committed manifests are what the chart renders. The first time this compiles helm.
        rendered = subprocess.run([sys.executable, "deploy/render.py", "--check"], cwd=ROOT)
        if rendered.returncode != 0:
            return rendered.returncode
    tests = chosen(rooms, [] if rooms else files)
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "worksteal"]
    words += [] if LONG in files else ["--ignore", LONG]
    return subprocess.run([*words, *tests], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
