"""A volume's id says what callers name it by, its backing where its data are."""

from dataclasses import replace

import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.core import errors
from agent.csi.client import block, mounted
from agent.daemon.server import Service
from agent.volumes import backing, users
from agent.volumes.backing import Backing
from agent.volumes.records import Volume
from lvm import volumes

MIB = 1 << 20


@pytest.fixture
def moved(service: Service, client: Client) -> Volume:
    """The volume `a`, as if its data lay on the logical volume of `b`."""
    volume_id = client.create("a", 16 * MIB, block()).volume_id
    client.create("b", 16 * MIB, block())
    volume = service.reports.fresh("data").volume(volume_id)
    return replace(volume, backing=backing.of(volume.group, "vol-b"))


def test_a_device_is_that_of_the_backing(service: Service, moved: Volume, fake: FakeHost) -> None:
    activator, volume_id = service.context.activator, str(moved.id)
    own = activator.device(backing.of_id(volume_id))
    device = activator.device(moved.backing)
    assert own is not None
    assert device is not None
    assert (own.path, device.path) == ("/dev/mapper/data-vol--a", "/dev/mapper/data-vol--b")
    activator.require_same(moved, device)
    with pytest.raises(errors.NoSuchVolume, match="vol-a"):
        activator.require_same(moved, own)
    volumes.deactivate(service.volume_groups.lvm("data"), "data", "vol-b")
    assert activator.device(moved.backing) is None
    assert activator.activate(moved).path == "/dev/mapper/data-vol--b"


def test_a_volume_is_in_use_where_its_backing_is(
    service: Service, client: Client, fake: FakeHost
) -> None:
    used = client.create("used", 16 * MIB, mounted("ext4"))
    staging = fake.directory / "staging"
    staging.mkdir()
    client.stage(used, staging)
    idle = client.create("idle", 16 * MIB, block())
    kernel, activator = service.context.kernel, service.context.activator
    volume = service.reports.fresh("data").volume(idle.volume_id)
    users.require_unused(kernel, activator, volume)
    moved = replace(volume, backing=backing.of(volume.group, "vol-used"))
    with pytest.raises(errors.VolumeInUse, match=rf"{idle.volume_id}.*{staging}"):
        users.require_unused(kernel, activator, moved)


def test_a_copy_on_write_snapshot_is_activated_by_its_origin_whatever_its_source_is_called(
    service: Service, client: Client, fake: FakeHost
) -> None:
    volume_id = client.create("a", 16 * MIB, block()).volume_id
    snapshot_id = client.snapshot("s", volume_id).snapshot_id
    snapshot = service.reports.fresh("data").taken_snapshot(snapshot_id)
    assert snapshot.origin == "vol-a"
    other = replace(snapshot.source_id, name="vol-gone")
    volumes.deactivate(service.volume_groups.lvm("data"), "data", "vol-a")
    device = service.context.activator.activate_snapshot(replace(snapshot, source_id=other))
    assert device.path == "/dev/mapper/data-snap--s"


def test_an_id_says_the_logical_volume_that_was_made_for_it() -> None:
    assert backing.of_id("data@01234567/vol-a") == Backing("data", "01234567", "vol-a")
    inline = backing.of_id("csi-0")
    assert (inline.group, inline.group_uuid) == ("", "")
    assert inline.name == "eph-csi-0"


def test_only_the_group_of_its_name_and_uuid_has_it(service: Service) -> None:
    group = service.reports.fresh("data").group("data")
    own = backing.of(group, "vol-a")
    assert own.may_be_in(group)
    assert not replace(own, group_uuid="01234567").may_be_in(group)
    assert not replace(own, group="other").may_be_in(group)
    assert backing.of_id("csi-0").may_be_in(group)
