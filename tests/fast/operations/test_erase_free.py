"""What is free on a disk that was lost, or beside what was given up: overwritten before use."""

import errno
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import configured
import expect
import in_background
import pytest
import serving
from fakes.host import FakeHost
from fakes.lvm.records import FakeGroup
from model import operations as do
from model.machine import Machine
from model.operations import Use
from model.stopping import Killed, Switch, stops

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.settings import Config
from mount.command import Result

EXTENT = 4 << 20
MARKER = b"a secret".ljust(4096, b"!")
GIVE_UP = ("lvchange", "--addtag", "carver.givenUp=yes", "--")
CLASSES = (
    configured.PLAIN,
    configured.RAID,
    replace(configured.RAID, name="auto", repair="auto", repair_after_seconds=600),
    replace(configured.RAID, name="sealed", encryption="luks2"),
    configured.THIN,
    replace(configured.THIN, name="thin2"),
)
pytestmark = [
    pytest.mark.usefixtures("waiting_eraser"),
    pytest.mark.groups(data=[60, 60, 60, 60]),
    pytest.mark.settings(classes=CLASSES),
]


@pytest.fixture
def group(fake: FakeHost) -> FakeGroup:
    return fake.lvm2.groups["data"]


def make(client: Client, name: str, device_class: str) -> str:
    parameters = {"class": device_class}
    return client.create(name, 4 * EXTENT, block(), parameters=parameters).volume_id


def repaired(client: Client, volume: str) -> None:
    assert any(client.repair(volume)[0] for _ in range(20))


def replaced(client: Client, lost: str, new: str) -> None:
    assert any(client.replace_disk(lost, new)[0] for _ in range(20))


@pytest.fixture
def volume(client: Client, fake: FakeHost) -> str:
    """A RAID volume that was repaired when the first disk was lost."""
    made = make(client, "a", "raid")
    fake.lose_disk("data", 0)
    repaired(client, made)
    return made


def swept_extents(group: FakeGroup) -> int:
    return sum(end - start for start, end in group.swept) // EXTENT


def owed(*uuids: str) -> set[str]:
    return {f"carver.sweepDisks={'+'.join(sorted(uuids))}"}


class Failing:
    """Zeroing of free extents fails while `fails` is set."""

    def __init__(self, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = True
        zero_out = fake.kernel.zero_out

        def refuse(device: str, offset: int, length: int, **how: Any) -> None:
            if self.fails and device.endswith("-sweep"):
                raise OSError(errno.EIO, "I/O error", device)
            zero_out(device, offset, length, **how)

        monkeypatch.setattr(fake.kernel, "zero_out", refuse)


@pytest.fixture
def failing(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(fake, monkeypatch)


def test_returned_disk_is_zeroed(
    client: Client,
    volume: str,
    service: Service,
    fake: FakeHost,
    group: FakeGroup,
    failing: Failing,
) -> None:
    assert group.tags == owed(group.disks[0].uuid)
    client.delete(volume)
    serving.again(service)
    assert group.volumes == {}
    fake.bring_disk("data", 0)
    serving.again(service)
    assert client.capacity().available_capacity == 180 * EXTENT, "of the other disks"
    with expect.code("RESOURCE_EXHAUSTED", group.disks[0].name, "overwritten first"):
        client.create("b", 181 * EXTENT, block())
    failing.fails = False
    serving.again(service)
    assert (group.tags, group.volumes) == (set(), {})
    assert swept_extents(group) == 60, "of that disk, and not of the others"
    make(client, "b", "plain")


def test_auto_repair_marks_the_disk(
    client: Client, service: Service, fake: FakeHost, group: FakeGroup
) -> None:
    make(client, "a", "auto")
    fake.lose_disk("data", 0)
    for now in (0, 600):
        service.reports.fresh()
        service.auto_repair.step(now)
    assert group.tags == owed(group.disks[0].uuid)


@pytest.mark.parametrize("way", ["replaced", "removed by hand"])
def test_disk_that_left_the_group_is_not_marked(
    client: Client, service: Service, fake: FakeHost, group: FakeGroup, way: str
) -> None:
    volume, lost = make(client, "a", "raid"), group.disks[0].uuid
    fake.lose_disk("data", 0)
    if way == "replaced":
        replaced(client, lost, fake.new_device(61 * EXTENT))
    else:
        repaired(client, volume)
        fake.lvm("vgreduce", "--removemissing", "--", "data")
    assert client.capacity().available_capacity
    serving.again(service)
    assert (group.tags, group.swept) == (set(), [])


def test_failed_repair_marks_the_disk(
    client: Client, service: Service, fake: FakeHost, group: FakeGroup
) -> None:
    volume = make(client, "a", "raid")
    fake.lose_disk("data", 0)

    refused = Result(5, "", "  no luck\n")
    fake.intercept = lambda words: refused if words[1] == "lvconvert" else None
    with expect.code("INTERNAL"):
        repaired(client, volume)
    assert group.tags == owed(group.disks[0].uuid)
    fake.intercept = lambda _: None
    in_background.look(service, service.freed_eraser.jobs)
    fake.bring_disk("data", 0)
    serving.again(service)
    assert (group.tags, set(group.volumes)) == (set(), {"vol-a"})
    assert swept_extents(group) == 55


def test_two_lost_disks(client: Client, service: Service, fake: FakeHost, group: FakeGroup) -> None:
    volume = make(client, "a", "raid")
    first = group.disks[0].uuid
    fake.lose_disk("data", 0)
    repaired(client, volume)
    lies_on = next(
        i for i, one in enumerate(group.disks) if one.name in group.volumes["vol-a"].extents
    )
    second = group.disks[lies_on].uuid
    fake.lose_disk("data", lies_on)
    repaired(client, volume)
    assert group.tags == owed(first, second)
    group.disks = [one for one in group.disks if one.uuid != first]
    fake.bring_disk("data", lies_on - 1)
    serving.again(service)
    assert (group.tags, swept_extents(group)) == (set(), 60)


@pytest.mark.parametrize(("name", "is_owed"), [("raid", False), ("sealed", True)])
def test_wipe_none_zeroes_headers(
    fake: FakeHost, config: Config, group: FakeGroup, name: str, *, is_owed: bool
) -> None:
    service = serving.start(replace(config, wipe="none"), fake)
    with Client(config.endpoint) as client:
        volume = make(client, "a", name)
        fake.lose_disk("data", 0)
        repaired(client, volume)
    service.stop()
    assert bool(group.tags) == is_owed


def given_up(client: Client, fake: FakeHost, service: Service, volume: str, number: int) -> None:
    """The pool of a volume goes, and the disk that it lacks is out of the group."""
    held = fake.lvm2.groups["data"].volumes
    pool = held[volume.partition("/")[2]].pool  # type: ignore[attr-defined]
    fake.lose_disk("data", number)
    client.delete(volume)
    fake.lvm(*GIVE_UP, f"data/{pool}")
    serving.again(service)
    assert pool not in held
    fake.lvm("vgreduce", "--removemissing", "--", "data")
    serving.again(service)


def test_sweep_without_a_disk_is_made_anew(
    client: Client, service: Service, fake: FakeHost, group: FakeGroup, failing: Failing
) -> None:
    given_up(client, fake, service, make(client, "a", "thin"), 0)
    assert set(group.volumes) == {"sweep"}
    fake.lose_disk("data", 0)
    failing.fails = False
    serving.again(service)
    assert (group.tags, group.volumes) == ({"carver.sweep=yes"}, {})
    fake.bring_disk("data", 0)
    serving.again(service)
    assert (group.tags, group.volumes) == (set(), {})
    assert swept_extents(group) == 180


def test_disk_with_only_the_sweep_is_replaced(
    client: Client, service: Service, fake: FakeHost, group: FakeGroup, failing: Failing
) -> None:
    given_up(client, fake, service, make(client, "a", "thin"), 0)
    lost = group.disks[0].uuid
    fake.lose_disk("data", 0)
    assert client.replace_disk(lost, fake.new_device(61 * EXTENT))[0]
    failing.fails = False
    serving.again(service)
    assert (group.tags, group.volumes) == (set(), {})
    assert swept_extents(group) == 180


def test_sweep_is_extended(
    client: Client, service: Service, fake: FakeHost, group: FakeGroup, failing: Failing
) -> None:
    one, other = make(client, "a", "thin"), make(client, "b", "thin2")
    pool = group.volumes["pool-thin2"]
    pool.metadata = {"/dev/fake-data-1": 1}  # type: ignore[attr-defined]
    pool.extents = {"/dev/fake-data-2": 60, "/dev/fake-data-1": 10}
    group.spare = {"/dev/fake-data-1": 1}
    given_up(client, fake, service, one, 0)
    before = group.volumes["sweep"].length
    given_up(client, fake, service, other, 1)
    failing.fails = False
    serving.again(service)
    assert (group.tags, group.volumes) == (set(), {})
    assert before < swept_extents(group) == 120


def test_repair_can_use_the_room_of_the_sweep(
    client: Client,
    volume: str,
    service: Service,
    fake: FakeHost,
    group: FakeGroup,
    failing: Failing,
) -> None:
    fake.bring_disk("data", 0)
    serving.again(service)
    assert group.volumes["sweep"].extents == {"/dev/fake-data-0": 60}
    lies_on = [one.name in group.volumes["vol-a"].extents for one in group.disks].index(True)
    for disk in group.disks[1:]:
        disk.allocatable = False
    fake.lose_disk("data", lies_on)
    serving.again(service)
    repaired(client, volume)
    assert "/dev/fake-data-0" in group.volumes["vol-a"].extents


def test_sweep_waits_for_a_closed_disk(
    client: Client,
    service: Service,
    fake: FakeHost,
    group: FakeGroup,
    caplog: pytest.LogCaptureFixture,
) -> None:
    group.disks[2].allocatable = False
    given_up(client, fake, service, make(client, "a", "thin"), 0)
    assert group.tags == {"carver.sweep=yes"}
    assert [one for one in caplog.messages if "/dev/fake-data-2 takes nothing new" in one]
    group.disks[1].allocatable = True
    serving.again(service)
    assert (group.tags, swept_extents(group)) == (set(), 180)


class Trial:
    """A machine with a RAID volume that lacks a disk."""

    def __init__(self, directory: Path) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        name = self.host.new_group(20, 20, 20)
        self.group = self.host.lvm2.groups[name]
        raid = replace(configured.RAID, name="plain", group=name, default=True)
        self.machine = Machine(self.host, name, directory, settings={"classes": (raid,)})
        create = do.Create("a", 4 * EXTENT, 0, Use("block", do.WRITER))
        assert self.machine.call(create).code == "OK"
        [listed] = self.machine.client.volumes()
        self.volume = listed.volume_id
        self.lost = next(iter(self.group.volumes["vol-a"].extents))
        self.host.lose_disk(name, self.number)
        self.machine.stop()

    @property
    def number(self) -> int:
        return [one.name for one in self.group.disks].index(self.lost)

    def run(self, switch: Switch) -> None:
        """A process that repairs it, and overwrites what is free on the disk when that is back."""
        self.machine.start(switch)
        switch.counting = True
        repairer = self.machine.service.replacement._repairer
        while not switch.dead.is_set() and self.lost in self.group.volumes["vol-a"].extents:
            with suppress(Killed):
                repairer.repair(self.volume)
        if not switch.dead.is_set() and self.group.disks[self.number].missing:
            self.host.bring_disk(self.group.name, self.number)
        while not switch.dead.is_set() and self.group.tags:
            wait([self.machine.service.freed_eraser.start(self.group.name)], 0.05)


def test_kill_at_each_step(tmp_path: Path) -> None:
    whole, counting = Trial(tmp_path / "whole"), Switch()
    whole.run(counting)
    whole.machine.stop()
    assert {"lvm vgchange", "lvm lvconvert", "lvm lvcreate", "zero_out"} <= set(counting.taken)
    changes = [one for one in counting.taken if one != "lvm fullreport"]
    for stop_at, before in stops(counting.taken):
        trial = Trial(tmp_path / f"{stop_at}{before}")
        switch = Switch(stop_at, before=before)
        trial.run(switch)
        if switch.dead.wait(10 if stop_at < len(changes) else 1):
            trial.machine.client.__exit__(None, None, None)
        else:
            # How often it is looked at behind the answers is different each time.
            assert stop_at >= len(changes), f"never taken: {switch.taken}"
            with suppress(Killed):
                trial.machine.stop()
        trial.run(Switch())
        trial.machine.stop()
        assert set(trial.group.volumes) == {"vol-a"}, (stop_at, before)
        assert trial.group.tags == set(), (stop_at, before)
        assert sum(end - start for start, end in trial.group.swept) >= 20 * EXTENT


def test_replacement_is_complete_when_answered(
    client: Client, service: Service, fake: FakeHost, group: FakeGroup
) -> None:
    make(client, "a", "raid")
    lost = group.disks[0].uuid
    fake.lose_disk("data", 0)
    in_background.ended(service.freed_eraser.jobs)
    replaced(client, lost, fake.new_device(61 * EXTENT))
    assert group.tags == set()
