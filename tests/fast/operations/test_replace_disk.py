"""Replace a disk: what is moved and rebuilt, what is refused; kills at every step."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import configured
import expect
import grpc
import pytest
import serving
from fakes.host import FakeHost
from model import operations as do
from model.machine import Machine
from model.operations import Use
from model.stopping import Switch, stops

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import groups, report
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
pytestmark = [pytest.mark.groups(data=[60, 50, 40]), pytest.mark.settings(classes=CLASSES)]


@pytest.fixture
def new(fake: FakeHost) -> str:
    """A vacant disk, larger than those of the group."""
    return fake.new_device(61 * EXTENT)


def replaced(client: Client, old: str, new: str) -> list[str]:
    """Call until all is done, as `carver group replace-disk` does; the messages on the way."""
    messages = []
    for _ in range(30):
        done, message = client.replace_disk(old, new)
        messages.append(message)
        if done:
            return messages
    raise AssertionError(messages)


def disks(fake: FakeHost) -> list[str]:
    return [one.name for one in fake.lvm2.groups["data"].disks]


def make(client: Client, fake: FakeHost, name: str, device_class: str, extents: int = 4) -> str:
    volume = client.create(name, extents * EXTENT, block(), parameters={"class": device_class})
    fake.write_bytes(f"/dev/mapper/data-vol--{name}", 0, MARKER)
    return volume.volume_id


def lose(fake: FakeHost, *numbers: int) -> list[str]:
    """Lose these disks of the group; returns their UUIDs."""
    for number in numbers:
        fake.lose_disk("data", number)
    return [fake.lvm2.groups["data"].disks[number].uuid for number in numbers]


def test_a_readable_disk_is_emptied_while_its_volumes_are_in_use(
    client: Client, fake: FakeHost, new: str
) -> None:
    for name, device_class in (("a", "plain"), ("b", "raid"), ("c", "thin")):
        make(client, fake, name, device_class)
    messages = replaced(client, OLD, new)
    assert any("moved" in one and "%" in one for one in messages), messages
    assert disks(fake) == ["/dev/fake-data-1", "/dev/fake-data-2", new]
    for name in "abc":
        assert fake.read_bytes(f"/dev/mapper/data-vol--{name}", 0, 4096) == MARKER
    assert client.replace_disk(OLD, new) == (True, "data is whole"), "and once more"


def test_a_start_has_lvm2_watch_a_move_again(
    client: Client, fake: FakeHost, service: Service, config: Config, new: str
) -> None:
    make(client, fake, "a", "plain")
    client.replace_disk(OLD, new)
    service.stop()
    fake.commands.clear()
    following = serving.start(config, fake)
    moves = [words for words in fake.commands if words[1] == "pvmove"]
    assert [words[-2:] for words in moves] == [("--background", "--")]
    with Client(config.endpoint) as caller:
        replaced(caller, OLD, new)
    following.stop()


def test_a_disk_is_not_emptied_while_another_is_missing(
    client: Client, fake: FakeHost, new: str
) -> None:
    make(client, fake, "a", "plain")
    with expect.code("FAILED_PRECONDITION", *lose(fake, 1)):
        client.replace_disk(OLD, new)
    assert len(disks(fake)) == 3


def test_nothing_is_allocated_on_a_disk_that_is_being_emptied(
    client: Client, fake: FakeHost, new: str
) -> None:
    make(client, fake, "a", "plain")
    client.replace_disk(OLD, new)
    make(client, fake, "b", "plain", 90)
    assert OLD not in fake.lvm2.groups["data"].volumes["vol-b"].extents
    replaced(client, OLD, new)


def test_raid_volumes_of_a_lost_disk_are_rebuilt_on_the_new_one(
    client: Client, fake: FakeHost, new: str
) -> None:
    make(client, fake, "a", "raid")
    make(client, fake, "b", "raid5")
    [lost] = lose(fake, 0)
    messages = replaced(client, lost, new)
    assert any("rebuilt" in one and "%" in one for one in messages), messages
    assert disks(fake) == ["/dev/fake-data-1", "/dev/fake-data-2", new]
    assert all(new in one.extents for one in fake.lvm2.groups["data"].volumes.values())
    assert client.capacity().available_capacity, "the group takes new volumes again"


def test_volumes_without_a_copy_are_named_and_nothing_is_begun(
    client: Client, fake: FakeHost, new: str
) -> None:
    for name, device_class in (("a", "raid"), ("b", "plain"), ("c", "thin")):
        make(client, fake, name, device_class)
    deleted = make(client, fake, "d", "plain")
    [lost] = lose(fake, 0)
    client.delete(deleted)
    with expect.code("FAILED_PRECONDITION", lost, "vol-b, vol-c", "vol-d", "deleted"):
        client.replace_disk(lost, new)
    assert new not in disks(fake)


def test_a_raid_that_lost_too_many_images_is_named(
    client: Client, fake: FakeHost, new: str
) -> None:
    make(client, fake, "a", "raid")
    lost, _ = lose(fake, 0, 1)
    with expect.code("FAILED_PRECONDITION", "vol-a"):
        client.replace_disk(lost, new)


def test_two_lost_disks_are_removed_once_nothing_lies_on_either(
    client: Client, fake: FakeHost, new: str
) -> None:
    make(client, fake, "a", "raid", 4)
    client.create("b", 4 * EXTENT, block(), parameters={"class": "raid"})
    group = fake.lvm2.groups["data"]
    group.volumes["vol-b"].extents = {disks(fake)[1]: 5, disks(fake)[2]: 5}
    first, second = lose(fake, 0, 2)
    other = fake.new_device(61 * EXTENT)
    for _ in range(5):
        done, message = client.replace_disk(first, new)
    assert not done
    assert second in message
    replaced(client, second, other)
    assert client.replace_disk(first, new)[0]
    assert disks(fake) == ["/dev/fake-data-1", new, other]


def test_spare_pool_metadata_on_a_lost_disk_are_removed(
    client: Client, fake: FakeHost, new: str
) -> None:
    make(client, fake, "a", "raid")
    group = fake.lvm2.groups["data"]
    group.spare = {OLD: 1}
    [lost] = lose(fake, 0)
    replaced(client, lost, new)
    assert group.spare == {}


def test_a_disk_for_caches_is_replaced_by_one(client: Client, fake: FakeHost, new: str) -> None:
    fake.lvm2.groups["data"].disks[2].tags = {report.FAST}
    replaced(client, "/dev/fake-data-2", new)
    assert fake.lvm2.groups["data"].disks[-1].tags == {report.FAST}


def test_a_new_disk_must_be_vacant_and_large_enough(client: Client, fake: FakeHost) -> None:
    make(client, fake, "a", "plain", 30)
    small, full, used = (fake.new_device(size * EXTENT) for size in (20, 61, 61))
    fake.write(full, "ext4")
    fake.lvm2.add_group("other", [])
    fake.lvm2(["lvm", "vgextend", "--", "other", used])
    for old, new, code, *words in (
        (OLD, small, "FAILED_PRECONDITION", small, str(30 * EXTENT)),
        (OLD, full, "FAILED_PRECONDITION", full, "ext4"),
        (OLD, used, "FAILED_PRECONDITION", used, "other"),
        (OLD, "/dev/nothing", "FAILED_PRECONDITION", "is not there"),
        (OLD, OLD, "INVALID_ARGUMENT", "new_disk"),
        ("", full, "INVALID_ARGUMENT", "old_disk"),
        ("/dev/other", "/dev/another", "NOT_FOUND", "/dev/other", OLD),
    ):
        with expect.code(code, *words):
            client.replace_disk(old, new)
    assert len(disks(fake)) == 3


def areas(fake: FakeHost) -> dict[str, int]:
    return {one.name: one.metadata_bytes for one in fake.lvm2.groups["data"].disks}


def test_a_disk_with_a_small_metadata_area_is_replaced_by_one_with_the_largest(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "plain")
    wide = 8 * MIB - groups.LABEL_BYTES
    for one in fake.lvm2.groups["data"].disks[1:]:
        one.metadata_bytes = wide
    fake.lvm2.groups["data"].seqno += 1
    new = fake.new_device(100 * EXTENT)
    replaced(client, OLD, new)
    assert set(areas(fake).values()) == {wide}


def test_a_disk_without_room_for_the_largest_area_gets_the_smallest(
    client: Client, fake: FakeHost
) -> None:
    make(client, fake, "a", "plain", 30)
    for one in fake.lvm2.groups["data"].disks[1:]:
        one.metadata_bytes = 400 * MIB - groups.LABEL_BYTES
    fake.lvm2.groups["data"].seqno += 1
    new = fake.new_device(40 * EXTENT)
    replaced(client, OLD, new)
    assert areas(fake)[new] == MIB - groups.LABEL_BYTES


def test_a_labelled_disk_in_no_group_is_accepted(client: Client, fake: FakeHost, new: str) -> None:
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


ABORT = ("pvmove", "--abort", "--")
OPEN = ("pvchange", "--allocatable", "y", "--")


def require_not_shown(client: Client, fake: FakeHost, when: str, name: str = "data") -> None:
    """A new volume that takes all of the group's room shows nothing of what was moved."""
    made = client.create("all", client.capacity().available_capacity, block())
    blocks = fake.lvm2.groups[name].volumes["vol-all"].media.blocks
    assert MARKER not in b"".join(blocks.values()), when
    client.delete(made.volume_id)


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_a_replacement_abandoned_at_vgreduce_shows_nothing(
    client: Client, fake: FakeHost, service: Service, new: str, steps: int
) -> None:
    make(client, fake, "a", "plain")
    group = fake.lvm2.groups["data"]
    fake.intercept = lambda words: Result(5, "", "no\n") if words[1] == "vgreduce" else None
    for _ in range(steps):
        with suppress(grpc.RpcError):
            client.replace_disk(OLD, new)
    fake.lvm(*ABORT)
    fake.lvm(*OPEN, OLD)
    assert group.stale, "there is something to be seen"
    before = client.capacity().available_capacity
    require_not_shown(client, fake, f"after {steps} calls")
    # Meanwhile the other disks can be used, and a new one that was filled without a pause.
    assert before == (90 if steps < 30 else 90 + 60 - 4) * EXTENT
    serving.again(service)
    assert (group.tags, set(group.volumes), group.stale) == (set(), {"vol-a"}, {})
    assert client.capacity().available_capacity == (60 + 50 + 40 + 60 - 4) * EXTENT


def test_a_replacement_is_reversed(
    client: Client, fake: FakeHost, service: Service, new: str
) -> None:
    make(client, fake, "a", "plain")
    group = fake.lvm2.groups["data"]
    client.replace_disk(OLD, new)
    fake.lvm(*ABORT)
    replaced(client, new, OLD)
    assert new not in disks(fake)
    serving.again(service)
    assert (group.tags, group.stale.keys() - {new}) == (set(), set())
    require_not_shown(client, fake, "after the reverse")


def test_a_disk_that_was_filled_by_one_move_is_not_erased(
    client: Client, fake: FakeHost, new: str
) -> None:
    make(client, fake, "a", "plain")
    group = fake.lvm2.groups["data"]
    replaced(client, OLD, new)
    assert (group.tags, group.swept) == (set(), [])
    assert client.capacity().available_capacity == (50 + 40 + 60 - 4) * EXTENT


def test_a_disk_to_which_a_move_was_aborted_is_erased_where_it_is_free(
    client: Client, fake: FakeHost, service: Service, new: str
) -> None:
    make(client, fake, "a", "plain")
    group = fake.lvm2.groups["data"]
    client.replace_disk(OLD, new)
    fake.lvm(*ABORT)
    replaced(client, OLD, new)
    serving.again(service)
    assert (group.tags, group.stale.keys() - {OLD}) == (set(), set())
    assert sum(end - start for start, end in group.swept) // EXTENT == 56


def test_a_move_begun_by_an_earlier_version_is_recorded(
    client: Client, fake: FakeHost, new: str
) -> None:
    make(client, fake, "a", "plain")
    group = fake.lvm2.groups["data"]
    client.replace_disk(OLD, new)
    group.tags.clear()
    client.replace_disk(OLD, new)
    both = sorted(one.uuid for one in group.disks if one.name in (OLD, new))
    assert group.tags == {f"carver.sweepDisks={'+'.join(both)}"}


def test_without_erasing_nothing_is_recorded(fake: FakeHost, config: Config, new: str) -> None:
    running = serving.start(replace(config, wipe="none"), fake)
    with Client(config.endpoint) as client:
        make(client, fake, "a", "plain")
        client.replace_disk(OLD, new)
    running.stop()
    assert fake.lvm2.groups["data"].tags == set()


BLOCK = Use("block", do.MULTI_WRITER)
PLAIN = do.Create("a", 4 * EXTENT, 0, BLOCK)
RAID = do.Create("b", 4 * EXTENT, 0, BLOCK, (("class", "raid"),))


class Trial:
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
        for volume in self.group.volumes.values():
            volume.media.write(0, MARKER)
        first, *others = self.group.disks
        self.old, self.others = (first.uuid if lost else first.name), {d.name for d in others}
        if lost:
            self.host.lose_disk(name, 0)
        self.new = self.host.new_device(22 * EXTENT)

    def run(self, switch: Switch) -> None:
        self.machine.stop()
        self.machine.start(switch)
        with suppress(grpc.RpcError):
            for _ in range(20):
                if self.machine.client.replace_disk(self.old, self.new)[0]:
                    return


def killed_at_each_step(directory: Path, *, lost: bool) -> Iterator[tuple[Trial, str]]:
    """A replacement killed before and after each step, and started again; with when it was."""
    whole, counting = Trial(directory / "whole", lost), Switch()
    whole.run(counting)
    whole.machine.stop()
    for number, before in stops(counting.taken):
        trial, switch = Trial(directory / f"{number}{before}", lost), Switch(number, before=before)
        trial.run(switch)
        assert switch.dead.wait(expect.PATIENCE_SECONDS), (number, switch.taken)
        trial.machine.client.__exit__(None, None, None)
        yield trial, f"killed {'before' if before else 'after'} step {number}"
        trial.machine.stop()


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "present"])
def test_a_replacement_killed_at_any_step_is_completed_by_further_calls(
    lost: bool, tmp_path: Path
) -> None:
    for trial, when in killed_at_each_step(tmp_path, lost=lost):
        trial.machine.start(Switch())
        replaced(trial.machine.client, trial.old, trial.new)
        assert {one.name for one in trial.group.disks} == {trial.new, *trial.others}, when
        for call in (PLAIN, RAID):
            volume = trial.group.volumes.get(f"vol-{call.volume}")
            assert volume is None or trial.old not in volume.extents


def test_a_replacement_killed_at_any_step_and_abandoned_shows_nothing(tmp_path: Path) -> None:
    for trial, when in killed_at_each_step(tmp_path, lost=False):
        trial.host.lvm(*ABORT)
        trial.host.lvm(*OPEN, trial.old)
        trial.machine.start(Switch())
        client, name = trial.machine.client, trial.group.name
        require_not_shown(client, trial.host, when, name)
        serving.again(trial.machine.service)
        assert not {one.name for one in trial.group.disks} & trial.group.stale.keys(), when
        assert trial.group.tags == set(), when
        require_not_shown(client, trial.host, when, name)
