#!/usr/bin/env python3
"""Volumes across versions: `make upgrade`, with the lab VM up.

    tests/upgrade/run.py [COMMIT ...]

For each released version (tests/upgrade/released.json), or each of these commits: what it made is
served by this tree, as after an upgrade, and what this tree made by it, as after a way back. Ends
with 1 where a step was not OK.
"""

import json
import subprocess
import sys
from pathlib import Path

# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vagrant import guest
from vagrant.lab_host import PROJECT

_RELEASED = Path(__file__).with_name("released.json")
_OLDER = "/var/tmp/carver-older"
_PROGRAM = f"{guest.TREE}/tests/upgrade/across.py"


def bring(commit: str) -> None:
    """Have the tree of a commit in the guest."""
    archive = subprocess.run(
        ["git", "archive", commit], cwd=PROJECT, check=True, capture_output=True
    ).stdout
    line = f"rm -rf {_OLDER} && mkdir {_OLDER} && tar -x -C {_OLDER}"
    subprocess.run(guest.ssh([line]), input=archive, check=True)


def main() -> int:
    """1 where a step was not OK."""
    named = {one: one for one in sys.argv[1:]} or json.loads(_RELEASED.read_text())
    failed = 0
    for version, commit in named.items():
        bring(commit)
        for maker, server in ((_OLDER, guest.TREE), (guest.TREE, _OLDER)):
            print(f"version {version}: made by {maker}, served by {server}", flush=True)
            words = [*guest.PYTHON, _PROGRAM, maker, server]
            failed |= subprocess.run(guest.ssh(words), check=False).returncode
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
