"""Thin volumes on a lost disk, and snapshots while one is missing: deleted, and given up."""

from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
import serving
from fakes.host import FakeHost
from model import operations as do
from model.machine import Machine
from model.operations import Use
from model.stopping import Switch

from agent.core import errors
from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm.layout import Layout
from lvm.thin import Policy

MIB = 1 << 20
EXTENT = 4 * MIB
MARKER = b"a secret".ljust(4096, b"!")
GIVE_UP = ("lvchange", "--addtag", "carver.givenUp=yes", "--")
pytestmark = [
    pytest.mark.usefixtures("waiting_eraser"),
    pytest.mark.groups(data=[60, 60, 60]),
    pytest.mark.settings(classes=(configured.PLAIN, configured.RAID, configured.THIN)),
]


def make(client: Client, fake: FakeHost, name: str, device_class: str = "thin") -> str:
    volume = client.create(name, 8 * EXTENT, block(), parameters={"class": device_class})
    fake.write_bytes(f"/dev/mapper/data-vol--{name}", 0, MARKER)
    return volume.volume_id


def names(fake: FakeHost) -> set[str]:
    return set(fake.lvm2.groups["data"].volumes)


def reduce(fake: FakeHost) -> None:
    fake.lvm("vgreduce", "--removemissing", "--", "data")


def lose(client: Client, fake: FakeHost, service: Service | None = None) -> None:
    """Delete a thin volume on a lost disk; with the service, give its pool up, too."""
    volume = make(client, fake, "a")
    fake.lose_disk("data", 0)
    client.delete(volume)
    if service is not None:
        fake.lvm(*GIVE_UP, "data/pool-thin")
        serving.again(service)


def snapshot_of(client: Client, fake: FakeHost) -> tuple[str, str]:
    """The ids of a plain volume and of its snapshot."""
    volume = make(client, fake, "a", "plain")
    return volume, client.snapshot("1", volume).snapshot_id


def test_a_thin_volume_on_a_missing_disk_is_deleted_and_stays_on_record(
    client: Client, service: Service, fake: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    volume = make(client, fake, "a")
    fake.lose_disk("data", 0)
    client.delete(volume)
    serving.again(service)
    client.delete(volume)
    assert client.volumes() == []
    assert names(fake) == {"pool-thin", "vol-a"}
    [logged] = {one for one in caplog.messages if "givenUp" in one}
    assert "lvchange --addtag carver.givenUp=yes data/pool-thin" in logged


def test_it_goes_with_its_pool_when_the_disk_is_back(
    client: Client, service: Service, fake: FakeHost
) -> None:
    lose(client, fake)
    fake.bring_disk("data", 0)
    serving.again(service)
    assert names(fake) == set()
    assert MARKER not in fake.freed_bytes("data")


def test_a_given_up_pool_goes_when_all_its_volumes_were_deleted(
    client: Client, service: Service, fake: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = make(client, fake, "a"), make(client, fake, "b")
    snapshot = client.snapshot("1", one).snapshot_id
    lost = fake.lvm2.groups["data"].disks[0]
    fake.lose_disk("data", 0)
    client.delete_snapshot(snapshot)
    client.delete(one)
    fake.lvm(*GIVE_UP, "data/pool-thin")
    serving.again(service)
    assert names(fake) == {"pool-thin", "vol-a", "vol-b", "snap-1"}, "b is in use"
    assert client.snapshots() == []
    client.delete(other)
    serving.again(service)
    assert names(fake) == set()
    [_] = [one for one in caplog.messages if "given up" in one and lost.uuid in one]


def test_given_up_extents_are_erased_before_their_next_use(
    client: Client, service: Service, fake: FakeHost
) -> None:
    lose(client, fake, service)
    group = fake.lvm2.groups["data"]
    assert "carver.sweep=yes" in group.tags
    reduce(fake)
    assert client.capacity().available_capacity == 0
    with expect.code("RESOURCE_EXHAUSTED", "overwritten"):
        client.create("b", 8 * EXTENT, block())
    serving.again(service)
    assert group.tags == set()
    assert names(fake) == set()
    assert sum(end - start for start, end in group.swept) == 120 * EXTENT
    client.create("b", 8 * EXTENT, block())


def test_a_snapshot_deleted_while_a_disk_is_missing_is_erased_later(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume, snapshot = snapshot_of(client, fake)
    fake.lose_disk("data", 2)
    client.delete_snapshot(snapshot)
    assert client.snapshots() == []
    client.delete_snapshot(snapshot)
    assert names(fake) == {"vol-a", "snap-1"}
    fake.bring_disk("data", 2)
    serving.again(service)
    assert names(fake) == {"vol-a"}
    assert MARKER not in fake.freed_bytes("data")
    client.delete(volume)
    assert names(fake) == set()


def test_a_volume_is_erased_after_its_deleted_snapshot(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume, snapshot = snapshot_of(client, fake)
    fake.lose_disk("data", 0)
    with expect.code("FAILED_PRECONDITION", "snap-1"):
        client.delete(volume)
    client.delete_snapshot(snapshot)
    client.delete(volume)
    assert names(fake) == {"vol-a", "snap-1"}
    fake.bring_disk("data", 0)
    serving.again(service)
    assert names(fake) == set()
    assert MARKER not in fake.freed_bytes("data")


def test_a_volume_with_a_deleted_snapshot_is_deleted_also_without_erase(
    client: Client, service: Service, fake: FakeHost, config: Config
) -> None:
    volume, snapshot = snapshot_of(client, fake)
    fake.lose_disk("data", 2)
    client.delete_snapshot(snapshot)
    service.stop()
    other = replace(config, wipe="none", endpoint=config.endpoint.with_name("2.sock"))
    following = serving.start(other, fake, eraser=20)
    with Client(other.endpoint) as caller:
        caller.delete(volume)
        assert caller.volumes() == []
    fake.bring_disk("data", 2)
    serving.again(following)
    following.stop()
    assert names(fake) == set()


def test_a_volume_that_is_there_is_never_reported_as_deleted(
    client: Client, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = make(client, fake, "a", "plain")

    def lost(*_: object) -> None:
        raise errors.NoSuchVolume(volume)

    monkeypatch.setattr(service.eraser, "_detached", lost)
    with expect.code("FAILED_PRECONDITION", "not on record"):
        client.delete(volume)
    assert names(fake) == {"vol-a"}


def test_a_given_up_volume_goes_with_its_deleted_snapshots(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume, snapshot = snapshot_of(client, fake)
    fake.lose_disk("data", 0)
    client.delete_snapshot(snapshot)
    client.delete(volume)
    fake.lvm(*GIVE_UP, "data/vol-a")
    serving.again(service)
    assert names(fake) == set()
    assert "carver.sweep=yes" in fake.lvm2.groups["data"].tags
    reduce(fake)
    serving.again(service)
    assert fake.lvm2.groups["data"].tags == set()


def test_a_disk_with_a_given_up_pool_can_be_replaced(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = make(client, fake, "a")
    lost = fake.lvm2.groups["data"].disks[0]
    fake.lose_disk("data", 0)
    new = fake.new_device(61 * EXTENT)
    with expect.code("FAILED_PRECONDITION", "vol-a"):
        client.replace_disk(lost.uuid, new)
    client.delete(volume)
    with expect.code("FAILED_PRECONDITION", "deleted", "vol-a"):
        client.replace_disk(lost.uuid, new)
    fake.lvm(*GIVE_UP, "data/pool-thin")
    serving.again(service)
    assert client.replace_disk(lost.uuid, new)[0]
    serving.again(service)
    assert client.capacity({"class": "thin"}).available_capacity


@pytest.mark.parametrize("name", ["plain", "raid", "thin"])
def test_a_group_that_lacks_a_disk_has_no_room(client: Client, fake: FakeHost, name: str) -> None:
    """lvm2 creates and extends nothing there."""
    volume = client.create("pvc-1", 32 * MIB, block(), parameters={"class": name})
    fake.lose_disk("data", 2)
    assert client.capacity({"class": name}).available_capacity == 0
    with expect.code("RESOURCE_EXHAUSTED", "disk", "is missing"):
        client.create("pvc-2", 32 * MIB, block(), parameters={"class": name})
    with expect.code("OUT_OF_RANGE", "is missing"):
        client.expand(volume.volume_id, 64 * MIB)
    with expect.code("RESOURCE_EXHAUSTED", "is missing"):
        client.snapshot("1", volume.volume_id)
    fake.bring_disk("data", 2)
    client.create("pvc-2", 32 * MIB, block(), parameters={"class": name})


class Trial:
    """A machine whose only volume was deleted, and given up with its pool."""

    def __init__(self, directory: Path) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        name = self.host.new_group(20, 20, 20)
        self.group = self.host.lvm2.groups[name]
        thin = DeviceClass("plain", name, default=True, layout=Layout("thin"), pool=Policy())
        self.machine = Machine(self.host, name, directory, settings={"classes": (thin,)})
        create = do.Create("a", 8 * EXTENT, 0, Use("block", do.WRITER))
        assert self.machine.call(create).code == "OK"
        self.host.lose_disk(name, 0)
        assert self.machine.call(do.Delete("a")).code == "OK"
        self.host.lvm(*GIVE_UP, f"{name}/pool-plain")
        self.machine.stop()

    def run(self, switch: Switch) -> None:
        """A process that does all there is to do, twice: while the disk is missing, and after."""
        self.machine.start(switch)
        switch.counting = True
        for _ in range(2):
            ended = self.machine.service.freed_eraser.start(self.group.name)
            while not (switch.dead.is_set() or wait([ended], 0.05).done):
                pass
            if not self.group.volumes and any(one.missing for one in self.group.disks):
                self.host.lvm("vgreduce", "--removemissing", "--", self.group.name)


def test_after_a_kill_at_any_step_all_is_erased(tmp_path: Path) -> None:
    whole, counting = Trial(tmp_path / "whole"), Switch()
    whole.run(counting)
    whole.machine.stop()
    assert {"lvm vgchange", "lvm lvremove", "lvm lvcreate", "zero_out"} <= set(counting.taken)
    killed = 0
    for stop_at in range(len(counting.taken)):
        for before in (True, False):
            trial = Trial(tmp_path / f"{stop_at}{before}")
            switch = Switch(stop_at, before=before)
            trial.run(switch)
            # Jobs take turns, so a run may take a step less than the first one.
            if switch.dead.wait(10):
                killed += 1
                trial.machine.client.__exit__(None, None, None)
            else:
                trial.machine.stop()
            trial.run(Switch())
            trial.machine.stop()
            assert trial.group.volumes == {}, (stop_at, before)
            assert trial.group.tags == set(), (stop_at, before)
            assert sum(end - start for start, end in trial.group.swept) >= 40 * EXTENT
    assert killed >= 2 * len(counting.taken) - 6
