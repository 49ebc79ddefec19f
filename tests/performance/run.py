#!/usr/bin/env python3
"""What each call costs, beside the bare commands: `make bench`. The lab VM is up.

Carver's own code is measured on this machine, all else in the guest. Writes dist/performance.json
and .svg, and prints the tables; with --record also what docs/performance.md shows. It never fails
on time.
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from performance import own, plot, tables
from performance.document import Document, Run
from rich.console import Console

from vagrant import guest
from vagrant.lab_host import PROJECT

# Beside these some two minutes go to the own code, to the machine, and to the last calls.
SECONDS, QUICK_SECONDS = 700.0, 130.0
PAGE = PROJECT / "docs" / "performance.md"
RECORD = PROJECT / "docs" / "performance.json"
PICTURE = PROJECT / "docs" / "images" / "performance.svg"
_DIST = PROJECT / "dist"
_OUTPUT = "/var/tmp/carver-bench.json"
# The last calls of a pass come to an end after its time.
_GRACE_SECONDS = 300


def passes(words: Sequence[str]) -> list[tuple[str, str]]:
    found = [("as configured", "")]
    for word in words:
        name, separator, settings = word.partition(":")
        if not separator:
            raise ValueError(f"{word} is no NAME:LINE, such as sessions off:lvm_session = false")
        found.append((name.strip(), settings.strip()))
    return found


def in_guest(name: str, settings: str, seconds: float) -> tuple[Run | None, bool]:
    """One pass in the guest, as far as it came, and whether it came to its end."""
    words = [
        # SIGINT: what hangs is left in good order.
        *("timeout", "--signal=INT", str(seconds + _GRACE_SECONDS), *guest.PYTHON),
        *(f"{guest.TREE}/tests/performance/measure.py", "--seconds", str(seconds)),
        *("--name", name, "--settings", settings, _OUTPUT),
    ]
    guest.run(["rm", "-f", _OUTPUT])
    ended = subprocess.run(guest.ssh(words), check=False)
    written = guest.run(["cat", _OUTPUT], check=False)
    found = None if written.returncode else Run.of_json(json.loads(written.stdout))
    return found, ended.returncode == 0


def write(found: Document, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "performance.json").write_text(found.text())
    (folder / "performance.svg").write_text(plot.svg(found.runs))


def record(found: Document | None) -> None:
    """Have docs/performance.md show what was measured, or that nothing was."""
    runs = [] if found is None else found.runs
    if found is not None:
        RECORD.write_text(found.text())
    PICTURE.write_text(plot.svg(runs))
    PAGE.write_text(tables.recorded(PAGE.read_text(), runs))


def main() -> int:
    """Measure all; 1 where a pass did not come to its end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three minutes, with fewer rounds")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME:LINE",
        help="another pass, with a line for the configuration's head",
    )
    parser.add_argument("--record", action="store_true", help="into docs/ too")
    chosen = parser.parse_args()
    console, wanted = Console(width=140, highlight=False), passes(chosen.also)
    seconds = QUICK_SECONDS if chosen.quick else SECONDS
    runs = [own.run(own.ROUNDS)]
    console.print(tables.on_terminal(runs[0]))
    in_vm = [in_guest(name, settings, seconds) for name, settings in wanted]
    found = Document(
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        [*(one for one, _ in in_vm if one is not None), *runs],
    )
    write(found, _DIST)
    console.print(f"written: {_DIST}/performance.json, performance.svg")
    if chosen.record:
        record(found)
    return int(not all(ended for _, ended in in_vm))


if __name__ == "__main__":
    sys.exit(main())
