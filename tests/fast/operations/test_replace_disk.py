"""A disk in another's place: what is moved and rebuilt, what is refused; kills at every step."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import configured
import expect
import grpc
import pytest
import serving
from fakes.host import FakeHost
from fakes.lvm.records import FakeGroup
from model import operations as do
from model.machine import Machine
from model.operations import Use
from model.stopping import Switch

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm import report
from lvm.layout import Layout
from lvm.thin import Policy
from mount.command import Result

MIB = 1 << 20
EXTENT = 4 * MIB
MARKER = b"what a tenant wrote".ljust(4096, b"!")
OLD = "/dev/fake-data-0"
CLASSES = (
    DeviceClass("plain", "data", default=True),
    DeviceClass("raid", "data", layout=Layout("raid1", mirrors=1)),
    DeviceClass("raid5", "data", layout=Layout("raid5", stripes=2)),
    DeviceClass("thin", "data", layout=Layout("thin"), pool=Policy()),
)


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [60, 50, 40])
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured.carver(tmp_path, classes=CLASSES)


def replaced(client: Client, old: str, new: str) -> list[str]:
    """Call until all is done, as `carver group replace-disk` does; what was told on the way."""
    told = []
    for _ in range(30):
        done, message = client.replace_disk(old, new)
        told.append(message)
        if done:
            return told
    raise AssertionError(told)


def disks(fake: FakeHost) -> list[str]:
    return [one.name for one in fake.lvm2.groups["data"].disks]


def make(client: Client, fake: FakeHost, name: str, device_class: str, extents: int = 4) -> str:
    volume = client.create(name, extents * EXTENT, block(), parameters={"class": device_class})
    fake.write_bytes(f"/dev/mapper/data-vol--{name}", 0, MARKER)
    return volume.volume_id


def test_what_lies_on_a_disk_that_still_reads_is_moved_while_it_is_in_use(
    client: Client, fake: FakeHost
) -> None:
    for name, device_class in (("a", "plain"), ("b", "raid"), ("c", "thin")):
        make(client, fake, name, device_class)
    new = fake.new_device(61 * EXTENT)
    told = replaced(client, OLD, new)
    assert any("moved" in one and "%" in one for one in told), told
    assert disks(fake) == ["/dev/fake-data-1", "/dev/fake-data-2", new]
    for name in "abc":
        assert fake.read_bytes(f"/dev/mapper/data-vol--{name}", 0, 4096) == MARKER
    assert client.replace_disk(OLD, new) == (True, "data is whole"), "and once more"


def test_a_start_has_a_move_watched_again(
    client: Client, fake: FakeHost, service: Service, config: Config
) -> None:
    make(client, fake, "a", "plain")
    new = fake.new_device(61 * EXTENT)
    client.replace_disk(OLD, new)
    service.stop()
    fake.commands.clear()
    following = serving.start(config, fake)
    moves = [words for words in fake.commands if words[1] == "pvmove"]
    assert [words[-2:] for words in moves] == [("--background", "--")]
    with Client(config.endpoint) as caller:
        replaced(caller, OLD, new)
    following.stop()


def test_a_disk_is_not_emptied_while_another_is_missing(client: Client, fake: FakeHost) -> None:
    make(client, fake, "a", "plain")
    gone = fake.lvm2.groups["data"].disks[1]
    fake.lose_disk("data", 1)
    with expect.code("FAILED_PRECONDITION", gone.uuid):
        client.replace_disk(OLD, fake.new_device(61 * EXTENT))
    assert len(disks(fake)) == 3


def test_nothing_new_lies_on_a_disk_that_is_being_emptied(client: Client, fake: FakeHost) -> None:
    make(client, fake, "a", "plain")
    new = fake.new_device(61 * EXTENT)
    client.replace_disk(OLD, new)
    make(client, fake, "b", "plain", 90)
    assert OLD not in fake.lvm2.groups["data"].volumes["vol-b"].extents
    replaced(client, OLD, new)


def test_raid_volumes_are_rebuilt_on_the_disk_in_place_of_one_that_is_lost(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "raid")
    make(client, fake, "b", "raid5")
    lost = fake.lvm2.groups["data"].disks[0]
    fake.lose_disk("data", 0)
    new = fake.new_device(61 * EXTENT)
    told = replaced(client, lost.uuid, new)
    assert any("rebuilt" in one and "%" in one for one in told), told
    assert disks(fake) == ["/dev/fake-data-1", "/dev/fake-data-2", new]
    assert all(new in one.extents for one in fake.lvm2.groups["data"].volumes.values())
    assert client.capacity().available_capacity, "the group takes new volumes again"


def test_what_lay_on_a_lost_disk_alone_is_named_and_nothing_is_begun(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "raid")
    make(client, fake, "b", "plain")
    make(client, fake, "c", "thin")
    doomed = make(client, fake, "d", "plain")
    lost = fake.lvm2.groups["data"].disks[0]
    fake.lose_disk("data", 0)
    client.delete(doomed)
    new = fake.new_device(61 * EXTENT)
    with expect.code("FAILED_PRECONDITION", lost.uuid, "vol-b, vol-c", "vol-d", "deleted"):
        client.replace_disk(lost.uuid, new)
    assert new not in disks(fake)


def test_a_raid_that_lost_more_than_it_has_to_spare_is_named(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "raid")
    lost = fake.lvm2.groups["data"].disks[0]
    for number in (0, 1):
        fake.lose_disk("data", number)
    with expect.code("FAILED_PRECONDITION", "vol-a"):
        client.replace_disk(lost.uuid, fake.new_device(61 * EXTENT))


def test_two_lost_disks_are_taken_out_when_nothing_lies_on_either(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "raid", 4)
    client.create("b", 4 * EXTENT, block(), parameters={"class": "raid"})
    group = fake.lvm2.groups["data"]
    group.volumes["vol-b"].extents = {disks(fake)[1]: 5, disks(fake)[2]: 5}
    first, second = group.disks[0], group.disks[2]
    for number in (0, 2):
        fake.lose_disk("data", number)
    one, other = fake.new_device(61 * EXTENT), fake.new_device(61 * EXTENT)
    for _ in range(5):
        done, message = client.replace_disk(first.uuid, one)
    assert not done
    assert second.uuid in message
    replaced(client, second.uuid, other)
    assert client.replace_disk(first.uuid, one)[0]
    assert disks(fake) == ["/dev/fake-data-1", one, other]


def test_the_spare_metadata_of_pools_on_a_lost_disk_keep_it_not(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "raid")
    group = fake.lvm2.groups["data"]
    group.spare = {OLD: 1}
    lost = group.disks[0]
    fake.lose_disk("data", 0)
    replaced(client, lost.uuid, fake.new_device(61 * EXTENT))
    assert group.spare == {}


def test_a_disk_for_caches_is_replaced_by_one(client: Client, fake: FakeHost) -> None:
    fake.lvm2.groups["data"].disks[2].tags = {report.FAST}
    new = fake.new_device(61 * EXTENT)
    replaced(client, "/dev/fake-data-2", new)
    assert fake.lvm2.groups["data"].disks[-1].tags == {report.FAST}


def test_a_new_disk_must_be_vacant_and_large_enough(client: Client, fake: FakeHost) -> None:
    make(client, fake, "a", "plain", 30)
    small, full, used = (fake.new_device(size * EXTENT) for size in (20, 61, 61))
    fake.write(full, "ext4")
    fake.lvm2.add_group("other", [])
    fake.lvm2(["lvm", "vgextend", "--", "other", used])
    with expect.code("FAILED_PRECONDITION", small, str(30 * EXTENT)):
        client.replace_disk(OLD, small)
    with expect.code("FAILED_PRECONDITION", full, "ext4"):
        client.replace_disk(OLD, full)
    with expect.code("FAILED_PRECONDITION", used, "other"):
        client.replace_disk(OLD, used)
    with expect.code("FAILED_PRECONDITION", "is not there"):
        client.replace_disk(OLD, "/dev/nothing")
    with expect.code("INVALID_ARGUMENT", "new_disk"):
        client.replace_disk(OLD, OLD)
    with expect.code("INVALID_ARGUMENT", "old_disk"):
        client.replace_disk("", full)
    with expect.code("NOT_FOUND", "/dev/other", OLD):
        client.replace_disk("/dev/other", "/dev/another")
    assert len(disks(fake)) == 3


def test_a_labelled_disk_in_no_group_is_taken(client: Client, fake: FakeHost) -> None:
    new = fake.new_device(61 * EXTENT)
    fake.label(new)
    replaced(client, OLD, new)
    assert new in disks(fake)


def test_a_disk_that_lvm2_may_not_see_is_refused(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [10, 10])
    host.lvm.devices = ("/dev/fake-data-0", "/dev/fake-data-1")
    config = configured.carver(tmp_path)
    running = serving.start(config, host)
    with Client(config.endpoint) as client, expect.code("INVALID_ARGUMENT", "`devices`"):
        client.replace_disk(OLD, host.new_device(20 * EXTENT))
    running.stop()


BLOCK = Use("block", do.MULTI_WRITER)
PLAIN = do.Create("a", 4 * EXTENT, 0, BLOCK)
RAID = do.Create("b", 4 * EXTENT, 0, BLOCK, (("class", "raid"),))


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "there"])
def test_a_replacement_that_is_killed_at_any_step_is_gone_on_with(
    lost: bool, tmp_path: Path
) -> None:
    stop_at, taken = 0, 1
    while stop_at < taken:
        for before in (True, False):
            trial = _Trial(tmp_path / f"{stop_at}{before}", lost)
            switch = Switch(stop_at, before=before)
            trial.run(switch)
            if stop_at == 0 and before:
                whole = _Trial(tmp_path / "whole", lost)
                counting = Switch()
                whole.run(counting)
                whole.machine.stop()
                taken = len(counting.taken)
            assert switch.dead.wait(10), (stop_at, switch.taken)
            trial.machine.client.__exit__(None, None, None)
            trial.machine.start(Switch())
            replaced(trial.machine.client, trial.old, trial.new)
            assert trial.disks() == {trial.new, *trial.others}, (stop_at, before)
            for call in (PLAIN, RAID):
                volume = trial.group.volumes.get(f"vol-{call.volume}")
                assert volume is None or trial.old not in volume.extents
            trial.machine.stop()
        stop_at += 1


ABORT = ("pvmove", "--abort", "--")
OPEN = ("pvchange", "--allocatable", "y", "--")


def shown(client: Client, fake: FakeHost, name: str = "data") -> bytes:
    """What a new volume shows that takes all that the group has."""
    client.create("all", client.capacity().available_capacity, block())
    blocks = fake.lvm2.groups[name].volumes["vol-all"].media.blocks
    return b"".join(blocks.values())


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_a_replacement_that_is_abandoned_leaves_nothing_that_a_new_volume_shows(
    client: Client, fake: FakeHost, service: Service, steps: int
) -> None:
    make(client, fake, "a", "plain")
    group, new = fake.lvm2.groups["data"], fake.new_device(61 * EXTENT)
    fake.intercept = lambda words: Result(5, "", "no\n") if words[1] == "vgreduce" else None
    for _ in range(steps):
        with suppress(grpc.RpcError):
            client.replace_disk(OLD, new)
    fake.lvm(*ABORT)
    fake.lvm(*OPEN, OLD)
    assert group.stale, "there is something to be seen"
    before = client.capacity().available_capacity
    assert MARKER not in shown(client, fake)
    others = 90 if steps < 30 else 90 + 60 - 4
    assert before == others * EXTENT, "the other disks are had meanwhile, and one that is filled"
    client.delete(client.volumes()[-1].volume_id)
    serving.again(service)
    assert (group.tags, set(group.volumes), group.stale) == (set(), {"vol-a"}, {})
    assert client.capacity().available_capacity == (60 + 50 + 40 + 60 - 4) * EXTENT
    assert MARKER not in shown(client, fake)


def test_a_replacement_is_taken_back_by_its_reverse(
    client: Client, fake: FakeHost, service: Service
) -> None:
    make(client, fake, "a", "plain")
    group, new = fake.lvm2.groups["data"], fake.new_device(61 * EXTENT)
    client.replace_disk(OLD, new)
    fake.lvm(*ABORT)
    replaced(client, new, OLD)
    assert new not in disks(fake)
    serving.again(service)
    assert (group.tags, group.stale.keys() - {new}) == (set(), set())
    assert MARKER not in shown(client, fake)


def test_a_disk_that_was_filled_without_a_pause_is_not_overwritten(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "plain")
    group, new = fake.lvm2.groups["data"], fake.new_device(61 * EXTENT)
    replaced(client, OLD, new)
    assert (group.tags, group.swept) == (set(), [])
    assert client.capacity().available_capacity == (50 + 40 + 60 - 4) * EXTENT


def test_one_that_a_move_to_was_broken_off_is_overwritten_where_it_is_free(
    client: Client, fake: FakeHost, service: Service
) -> None:
    make(client, fake, "a", "plain")
    group, new = fake.lvm2.groups["data"], fake.new_device(61 * EXTENT)
    client.replace_disk(OLD, new)
    fake.lvm(*ABORT)
    replaced(client, OLD, new)
    serving.again(service)
    assert (group.tags, group.stale.keys() - {OLD}) == (set(), set())
    assert swept_extents(group) == 56


def test_a_move_that_an_earlier_version_began_is_put_on_record(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "plain")
    group, new = fake.lvm2.groups["data"], fake.new_device(61 * EXTENT)
    client.replace_disk(OLD, new)
    group.tags.clear()
    client.replace_disk(OLD, new)
    assert group.tags == {f"carver.sweepDisks={'+'.join(sorted(map(uuid_of(group), (OLD, new))))}"}


def test_where_nothing_is_overwritten_nothing_is_put_on_record(
    fake: FakeHost, config: Config
) -> None:
    running = serving.start(replace(config, wipe="none"), fake)
    with Client(config.endpoint) as client:
        make(client, fake, "a", "plain")
        client.replace_disk(OLD, fake.new_device(61 * EXTENT))
    running.stop()
    assert fake.lvm2.groups["data"].tags == set()


def swept_extents(group: FakeGroup) -> int:
    return sum(end - start for start, end in group.swept) // EXTENT


def uuid_of(group: FakeGroup) -> Callable[[str], str]:
    return lambda name: next(one.uuid for one in group.disks if one.name == name)


def test_a_replacement_that_is_killed_at_any_step_and_abandoned_shows_nothing(
    tmp_path: Path,
) -> None:
    stop_at, taken = 0, 1
    while stop_at < taken:
        for before in (True, False):
            trial = _Trial(tmp_path / f"{stop_at}{before}", False)
            for volume in trial.group.volumes.values():
                volume.media.write(0, MARKER)
            switch = Switch(stop_at, before=before)
            trial.run(switch)
            if stop_at == 0 and before:
                whole = _Trial(tmp_path / "whole", False)
                counting = Switch()
                whole.run(counting)
                whole.machine.stop()
                taken = len(counting.taken)
            assert switch.dead.wait(10), (stop_at, switch.taken)
            trial.machine.client.__exit__(None, None, None)
            trial.host.lvm(*ABORT)
            trial.host.lvm(*OPEN, trial.old)
            trial.machine.start(Switch())
            client, name = trial.machine.client, trial.group.name
            assert MARKER not in shown(client, trial.host, name), (stop_at, before)
            all_of_it = next(one for one in client.volumes() if one.volume_id.endswith("vol-all"))
            client.delete(all_of_it.volume_id)
            serving.again(trial.machine.service)
            is_there = {one.name for one in trial.group.disks}
            assert not is_there & trial.group.stale.keys(), (stop_at, before)
            assert trial.group.tags == set(), (stop_at, before)
            assert MARKER not in shown(client, trial.host, name), (stop_at, before)
            trial.machine.stop()
        stop_at += 1


class _Trial:
    """A machine whose first disk is to be replaced."""

    def __init__(self, directory: Path, lost: bool) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        name = self.host.new_group(20, 20, 20)
        self.group = self.host.lvm2.groups[name]
        classes = tuple(
            DeviceClass(one.name, name, default=one.default, layout=one.layout)
            for one in CLASSES[:2]
        )
        self.machine = Machine(self.host, name, directory, settings={"classes": classes})
        for call in (RAID,) if lost else (PLAIN, RAID):
            assert self.machine.call(call).code == "OK"
        first, *others = self.group.disks
        self.old, self.others = (first.uuid if lost else first.name), {d.name for d in others}
        if lost:
            self.host.lose_disk(name, 0)
        self.new = self.host.new_device(22 * EXTENT)

    def run(self, switch: Switch) -> None:
        self.machine.stop()
        self.machine.start(switch)
        for _ in range(20):
            try:
                if self.machine.client.replace_disk(self.old, self.new)[0]:
                    return
            except grpc.RpcError:
                return

    def disks(self) -> set[str]:
        return {one.name for one in self.group.disks}
