#!/usr/bin/env python3
"""Try Carver in the cluster that KUBECONFIG names, check by check, and print one table.

Needs kubectl and Python 3.11, nothing else, and downloads nothing. What it makes is in a namespace
of its own, and is removed in the end, also after a failure and after Ctrl-C.

Exit codes: 0 all well; 1 a check failed, or something was left; 2 the checks could not be run;
3 all well, but the cluster lacks what some checks need; 130 interrupted.
"""

import argparse
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import checks, diagnosis, installation, lab_checks, objects, record, removal
from cluster.installation import Unusable
from cluster.kubectl import Kubectl, Refused, path
from cluster.site import Clock, Failed, Lab, NotHere, Off, Site

PASSED, FAILED, NOT_HERE, OFF = "passed", "FAILED", "not here", "off"
WELL, WRONG, UNUSABLE, PARTLY, INTERRUPTED = 0, 1, 2, 3, 130
_INTERRUPTED = "interrupted: what was made is removed; once more, and it is left"


@dataclass(frozen=True)
class Row:
    """How a check came out."""

    check: str
    outcome: str
    seconds: float
    note: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; the exit code."""
    parsed = parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _as_interrupt)
    try:
        installation.environment()
        return (clean if parsed.clean else try_all)(parsed, Kubectl())
    except (Unusable, Refused) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("run.py: interrupted", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    head, _, rest = (__doc__ or "").partition("\n")
    made = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--only",
        action="append",
        choices=[*checks.ALL, *lab_checks.ALL],
        metavar="CHECK",
        default=[],
        help=f"this check, and others so named: {', '.join(checks.ALL)}; with --lab:"
        f" {', '.join(lab_checks.ALL)}",
    )
    made.add_argument(
        "--lab",
        action="store_true",
        help="the cluster is that of `make cluster`: also cut nodes' power, pause them, add one",
    )
    made.add_argument(
        "--record",
        action="store_true",
        help="in the cluster of `make cluster`: write the outcomes into tests/cluster/trials.json"
        " and the table of docs/testing.md",
    )
    made.add_argument(
        "--image",
        default="",
        help="of the pods; any with sh, cat, dd, df, sleep and sync. As given, Carver's own, which "
        "every node that has Carver has already",
    )
    made.add_argument(
        "--like",
        default="",
        metavar="STORAGECLASS",
        help="whose parameters and mount options are used; Carver's only one, if not given",
    )
    made.add_argument("--driver", default="lvm.csi.carver", help="the CSIDriver's name")
    made.add_argument(
        "--size-mib",
        type=_size,
        default=512,
        help="of a volume; a check needs up to six times so much on one node (%(default)s)",
    )
    made.add_argument(
        "--limit",
        type=float,
        default=300,
        metavar="SECONDS",
        help="how long each thing that is waited for may take (%(default)s)",
    )
    made.add_argument(
        "--keep", action="store_true", help="leave what a failed check has made, to look at"
    )
    made.add_argument(
        "--clean", action="store_true", help="remove what earlier runs have left, and check nothing"
    )
    return made


def _size(text: str) -> int:
    if (size := int(text)) < 64:
        raise argparse.ArgumentTypeError("at least 64, and with xfs 300 (mkfs.xfs(8))")
    return size


def _as_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def the_lab() -> Lab:
    """The lab's cluster of this checkout; raises Unusable where there is none."""
    # Only here: without a lab nothing is needed but Python's own library.
    sys.path.append(str(record.ROOT))
    from vagrant import cluster
    from vagrant.control_plane import ControlPlaneError

    try:
        return cluster.present()
    except ControlPlaneError as error:
        raise Unusable(str(error)) from error


def try_all(
    parsed: argparse.Namespace, kubectl: Kubectl, clock: Clock = time, lab: Lab | None = None
) -> int:
    """Run the checks, print how each came out, remove everything; the exit code."""
    if (parsed.lab or parsed.record) and lab is None:
        lab = the_lab()
    every = {**checks.ALL, **(lab_checks.ALL if parsed.lab else {})}
    if unknown := set(parsed.only) - every.keys():
        raise Unusable(f"these checks want a lab (--lab): {', '.join(sorted(unknown))}")
    if left := removal.runs_left(kubectl):
        print(f"earlier runs have left something, or are under way: {', '.join(left)} (--clean)")
    place = installation.find(kubectl, parsed.driver, parsed.image, parsed.like)
    if lab is not None and place.server != lab.server:
        raise Unusable(f"KUBECONFIG names {place.server}, the lab's cluster is {lab.server}")
    run = secrets.token_hex(3)
    print(f"{place.driver} at {place.server}, Kubernetes {place.version}, run {run}")
    print(f"nodes: {', '.join(place.nodes)}; image: {place.image}; ", end="")
    print(f"parameters: {place.like.get('parameters') or 'none'}; limit: {parsed.limit:.0f} s")
    whole = Site(kubectl, place, run, "", parsed.size_mib, parsed.limit, clock)
    rows: list[Row] = []
    interrupted = False
    try:
        _prepare(whole)
        for name in [one for one in every if one in (parsed.only or every)]:
            site = Site(kubectl, place, run, name, parsed.size_mib, parsed.limit, clock, lab)
            rows.append(_try(site, every[name], parsed.keep))
            print(_line(rows[-1]), flush=True)
            if parsed.record and lab is not None:
                _record(place, lab, rows[-1])
    except (Failed, Refused) as error:
        rows.append(Row("prepare", FAILED, 0, str(error)))
    except KeyboardInterrupt:
        interrupted = True
        print(_INTERRUPTED, flush=True)
    if parsed.keep and any(one.outcome == FAILED for one in rows):
        print(f"kept: namespace and StorageClass {objects.named(run)}; remove them with --clean")
    else:
        # The first interrupt ends the checks, or else it is no reason to leave anything yet.
        row, interrupted = _removed(whole, interrupted)
        rows.append(row)
    print("\n" + "\n".join(map(_line, rows)))
    return INTERRUPTED if interrupted else _code(rows)


def _prepare(site: Site) -> None:
    place = site.place
    site.apply(
        objects.namespace(site.run),
        objects.storage_class(site.run, place.driver, place.like),
        *([] if place.no_snapshots else [objects.snapshot_class(site.run, place.driver)]),
    )


def _try(site: Site, check: checks.Check, keep: bool) -> Row:
    """Run a check, and remove what it made; that it goes is part of it."""
    started = site.clock.monotonic()
    outcome, note = _outcome(site, check)
    if outcome == FAILED:
        print(f"\n{site.check}: {note}")
        for line in diagnosis.tell(site, site.clock.monotonic() - started + 10):
            print(f"    {line}")
    if outcome != FAILED or not keep:
        try:
            removal.clear(site)
        except (Failed, Refused) as error:
            note = f"{note}; and {error}" if outcome == FAILED else str(error)
            outcome = FAILED
    return Row(site.check, outcome, site.clock.monotonic() - started, note)


def _outcome(site: Site, check: checks.Check) -> tuple[str, str]:
    try:
        return PASSED, check(site)
    except NotHere as error:
        return NOT_HERE, str(error)
    except Off as error:
        return OFF, str(error)
    except (Failed, Refused) as error:
        return FAILED, str(error)
    except Exception as error:
        # A mistake of the check's own must not leave behind what the check has made.
        return FAILED, f"{type(error).__name__}: {error}"


def _record(place: installation.Installation, lab: Lab, row: Row) -> None:
    """Record how a check came out, in which cluster, with which Carver.

    Each is recorded when it has ended: what the rest takes may be hours, and be cut off.
    """
    configuration = record.Configuration(
        kubernetes=place.version,
        mode="controller" if place.controllers else "sidecars on each node",
        nodes=len(place.nodes),
        storage_class=str(path(place.like, "metadata", "name", default="none")),
        values=record.with_effect(lab.values),
        gates=tuple(lab.gates),
    )
    carver = f"{place.image.rpartition(':')[2]}, image {lab.image}"
    record.add(configuration, carver, time.strftime("%Y-%m-%d"), {row.check: row.outcome})


def _removed(site: Site, interrupted: bool) -> tuple[Row, bool]:
    """Remove the run, until there was a second interrupt; whether there was one at all."""
    for _ in range(1 if interrupted else 2):
        try:
            return _end(site), interrupted
        except KeyboardInterrupt:
            print(_INTERRUPTED, flush=True)
            interrupted = True
    note = f"interrupted; the rest of {site.namespace} goes by run.py --clean"
    return Row("removed", FAILED, 0, note), interrupted


def _end(site: Site) -> Row:
    """Remove the run; what does not go is named."""
    started = site.clock.monotonic()
    try:
        removal.end(site)
    except (Failed, Refused) as error:
        outcome, note = FAILED, f"{error}; look, then: run.py --clean"
    else:
        outcome, note = PASSED, "nothing is left"
    return Row("removed", outcome, site.clock.monotonic() - started, note)


def clean(parsed: argparse.Namespace, kubectl: Kubectl, clock: Clock = time) -> int:
    """Remove all runs that have left something; the exit code."""
    runs = removal.runs_left(kubectl)
    # First: where every node is cordoned, the rest could not be done.
    for run in runs:
        removal.give_back(kubectl, run)
    # An image and a StorageClass are of no account here, and must not stop it.
    place = installation.find(kubectl, parsed.driver, image="-", like=None)
    rows = []
    for run in runs:
        rows.append(_end(Site(kubectl, place, run, "", parsed.size_mib, parsed.limit, clock)))
        print(f"{run}: {_line(rows[-1])}")
    if not rows:
        print("no run has left anything")
    return _code(rows)


def _line(row: Row) -> str:
    return f"{row.check:17} {row.outcome:9} {row.seconds:7.1f} s  {row.note}".rstrip()


def _code(rows: Sequence[Row]) -> int:
    outcomes = {one.outcome for one in rows}
    if FAILED in outcomes:
        return WRONG
    return PARTLY if NOT_HERE in outcomes else WELL


if __name__ == "__main__":
    sys.exit(main())
