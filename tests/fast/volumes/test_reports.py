"""What finds changes nothing: what lvm2 left when it was killed stays until it is mended."""

import inspect
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace

import configured
import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.csi.client import block
from agent.daemon.server import Service
from agent.volumes.reports import Reports
from lvm.report import Report
from lvm.session import is_report

MIB = 1 << 20
pytestmark = pytest.mark.settings(
    classes=(configured.PLAIN, replace(configured.THIN, default=False)),
)
# Of a group that was changed, so that each of them reads it.
FINDING: dict[str, Callable[[Reports, str, str], object]] = {
    "fresh": lambda reports, *_: reports.fresh(),
    "every_group": lambda reports, *_: reports.every_group(reports.fresh("data")),
    "await_others": lambda reports, *_: reports.await_others(),
    "for_lists": lambda reports, *_: reports.for_lists(),
    "hint": lambda reports, *_: reports.hint(),
    "search": lambda reports, volume_id, _: reports.search(lambda one: str(one.id) == volume_id),
    "group": lambda reports, *_: reports.group(reports.fresh(), "data"),
    "require_groups": lambda reports, *_: reports.require_groups(reports.fresh()),
    "snapshot": lambda reports, _, snapshot_id: reports.snapshot(reports.fresh(), snapshot_id),
    "listed_snapshots": lambda reports, *_: list(reports.listed_snapshots(reports.fresh())),
    "half_made": lambda reports, *_: reports.half_made(reports.for_lists()),
    "is_half_made": lambda reports, *_: reports.is_half_made(reports.for_lists(), []),
    "awaited": lambda reports, *_: reports.awaited(reports.for_lists(), []),
    "seen": lambda reports, *_: reports.seen(0),
    "cached": lambda reports, volume_id, _: reports.cached(volume_id),
    "keep_fresh": lambda reports, *_: reports.keep_fresh(),
    "outdate": lambda reports, *_: (reports.outdate(), reports.fresh()),
    "refresh": lambda reports, *_: (reports.keep_fresh(), wait(reports.refresh(0))),
    "time_seconds": lambda reports, *_: reports.time_seconds,
    "refused": lambda reports, *_: reports.refused,
    "ignored": lambda reports, *_: reports.ignored,
    "problem": lambda reports, *_: reports.problem,
}


@pytest.fixture
def left(client: Client, fake: FakeHost) -> tuple[str, str]:
    """A suspended volume with a snapshot, by their ids, and a thin one that lvm2 did not make."""
    volume_id = client.create("a", 16 * MIB, block()).volume_id
    snapshot_id = client.snapshot("s", volume_id).snapshot_id
    for name in ("whole", "unmade"):
        client.create(name, 16 * MIB, block(), parameters={"class": "thin"})
    fake.unmake_thin("data", "pool-thin", "vol-unmade")
    fake.suspend("data", "vol-a")
    fake.lvm2.groups["data"].seqno += 1
    fake.commands.clear()
    return volume_id, snapshot_id


def changing(fake: FakeHost) -> list[str]:
    """The commands that ran and are no reports."""
    return [words[1] for words in fake.commands if not is_report(words)]


def is_left(fake: FakeHost) -> tuple[bool, bool]:
    return fake.is_suspended("data", "vol-a"), "vol-unmade" in fake.lvm2.groups["data"].volumes


@pytest.mark.parametrize("name", FINDING)
def test_what_finds_runs_no_command_but_reports(
    service: Service, fake: FakeHost, left: tuple[str, str], name: str
) -> None:
    FINDING[name](service.reports, *left)
    assert changing(fake) == []
    assert is_left(fake) == (True, True)


def test_what_a_report_answers_runs_no_command(
    service: Service, fake: FakeHost, left: tuple[str, str]
) -> None:
    volume_id, snapshot_id = left
    known, every, seen = (
        service.reports.fresh(),
        service.reports.for_lists(),
        service.reports.hint(),
    )
    fake.commands.clear()
    for found in (known, every, seen):
        assert {one.name for one in found.volumes()} == {"vol-a", "vol-whole", "vol-unmade"}
        assert [one.name for one in found.snapshots()] == ["snap-s"]
    assert str(known.taken_snapshot(snapshot_id).source_id) == str(seen.volume(volume_id).id)
    assert every.find_named("vol-a") == known.volume(volume_id)
    assert [*known.doomed(), *known.copies()] == []
    assert fake.commands == []
    assert is_left(fake) == (True, True)


def test_each_method_of_what_finds_is_tried() -> None:
    names = {name for name, _ in inspect.getmembers_static(Reports)}
    assert {name for name in names if not name.startswith("_")} == FINDING.keys()


def test_what_repairs_resumes_and_removes_what_lvm2_left(
    service: Service, fake: FakeHost, left: tuple[str, str]
) -> None:
    known: Report = service.context.mender.mend("data")
    assert sorted(changing(fake)) == ["lvchange", "lvremove"]
    assert is_left(fake) == (False, False)
    assert "vol-unmade" not in known.group("data").volumes
    # Once it is repaired, that costs no command.
    fake.commands.clear()
    service.context.mender.mend("data")
    assert fake.commands == []
