#!/usr/bin/env python3
"""Try what can go wrong, and print one table: `make faults`. The lab VM is up.

The seed is printed; the same seed, and the name of a fault, try it again.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from faults.row import Row
from rich import box
from rich.console import Console
from rich.table import Table

from vagrant import guest

_HERE = f"{guest.TREE}/tests/faults"
_POWER = "power_loss"
_WIPE = "wipe_power_loss"


def in_guest(seed: int, cut: bool, names: list[str]) -> Iterator[Row]:
    """The faults that are tried in the guest, as they end."""
    options = ["--seed", str(seed), *(["--cut"] if cut else [])]
    words = [*guest.PYTHON, f"{_HERE}/inside.py", *options, *names]
    with subprocess.Popen(guest.ssh(words), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield Row(**json.loads(line))
    if process.returncode:
        yield Row("the faults in the guest", 1, f"FAILED: exit code {process.returncode}", 0, 0)


def power_loss(seed: int, times: int, *, after_deletion: bool = False) -> Row:
    """Reset the machine at random moments of a load, and see what is left of it.

    Or `after_deletion`: when the caller hears that a volume is deleted.
    """
    title = "power loss after a deletion" if after_deletion else "power loss under load"
    chance, started = random.Random(seed), time.monotonic()
    lost, leaked, volumes, deleted = [], [], 0, 0
    for number in range(times):
        words = [*guest.PYTHON, f"{_HERE}/power.py", "load", str(seed + number)]
        with subprocess.Popen(
            guest.ssh(words, "-o", "ControlPath=none"), stdout=subprocess.PIPE, text=True
        ) as loading:
            assert loading.stdout is not None
            if not loading.stdout.readline():
                return Row(title, number, "FAILED: no load", 0, 0)
            if after_deletion:
                for _ in range(chance.randrange(1, 4)):
                    loading.stdout.readline()
            else:
                # Long enough for some to be deleted as well.
                time.sleep(chance.uniform(3, 30))
            guest.reset()
            loading.kill()
        ended = guest.run([*guest.PYTHON, f"{_HERE}/power.py", "judge"], check=False)
        if ended.returncode:
            return Row(title, number, f"FAILED: {ended.stderr}", 0, 0)
        verdict = json.loads(ended.stdout)
        lost += verdict["lost"]
        leaked += verdict["leaked"]
        volumes += verdict["volumes"]
        deleted += verdict["deleted"]
    outcome = f"{volumes} volumes came back with their data, {deleted} were deleted and stayed so"
    if lost or leaked:
        outcome = f"FAILED: lost {lost}, leaked {leaked}"
    seconds = time.monotonic() - started
    return Row(title, times, outcome, len(lost), len(leaked), seconds)


def table(rows: list[Row]) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD)
    for title in ("fault", "times", "outcome", "lost", "leaked", "s"):
        drawn.add_column(title, justify="left" if title in {"fault", "outcome"} else "right")
    for row in rows:
        cells = (str(row.times), row.outcome, str(row.lost), str(row.leaked), f"{row.seconds:.0f}")
        drawn.add_row(row.fault, *cells, style="" if row.is_well else "bold red")
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--cut", action="store_true", help="a few of the times only")
    parser.add_argument("--power-losses", type=int, help="default: 10, or 1 with --cut")
    parser.add_argument("names", nargs="*", help=f"only these, such as {_POWER}; default: all")
    chosen = parser.parse_args()
    console = Console(width=120 if not sys.stdout.isatty() else None)
    console.print(f"seed {chosen.seed}")
    rows = []
    names = [one for one in chosen.names if one not in (_POWER, _WIPE)]
    if names or not chosen.names:
        for row in in_guest(chosen.seed, chosen.cut, names):
            rows.append(row)
            left = f"{row.lost} lost, {row.leaked} leaked"
            console.print(
                f"{row.fault}: {row.outcome}; {left} ({row.seconds:.0f} s)", highlight=False
            )
    if _POWER in chosen.names or not chosen.names:
        times = chosen.power_losses or (1 if chosen.cut else 10)
        rows.append(power_loss(chosen.seed, times))
    if _WIPE in chosen.names or not chosen.names:
        times = chosen.power_losses or (1 if chosen.cut else 30)
        rows.append(power_loss(chosen.seed, times, after_deletion=True))
    console.print(table(rows))
    return 0 if all(row.is_well for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
