"""Replace a readable disk under volumes of each kind; what is refused."""

from collections.abc import Iterator
from time import sleep

import configured
import expect
import pytest
import serving
from real.any import AnyHost

from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm import report
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
SIZE = 24 * MIB
GROUP = "carver_replaced"
MARKER = b"what a tenant wrote".ljust(4096, b"!")
LAYOUTS = configured.layouts("linear", "striped", "raid1", "raid5", "thin")


@pytest.fixture
def disks(host: AnyHost) -> list[str]:
    """Three disks of the group, a vacant one, and one that is too small."""
    return [host.new_device(extents * EXTENT) for extents in (31, 31, 31, 41, 3)]


@pytest.fixture
def group(host: AnyHost, disks: list[str]) -> Iterator[str]:
    with host.own_group(GROUP, disks[:3]):
        yield GROUP


pytestmark = pytest.mark.settings(classes=configured.classes("data", LAYOUTS))


def device_of(host: AnyHost, name: str) -> str:
    found = host.devices.find(GROUP, name)
    assert found is not None
    return found.path


def names(host: AnyHost) -> set[str]:
    return {one.name for one in report.read(host.lvm).group(GROUP).disks}


@pytest.mark.variation
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_volume_is_moved_with_its_snapshot_while_it_is_in_use(
    client: Client, host: AnyHost, disks: list[str], name: str
) -> None:
    volume = client.create("pvc-1", SIZE, block(), parameters={"class": name})
    client.stage(volume, host.directory / "staging", block())
    device = device_of(host, "vol-pvc-1")
    data = b"what was there before".ljust(4096, b".")
    for offset in (0, SIZE - len(data)):
        host.write_bytes(device, offset, data)
    snapshot = client.snapshot("1", volume.volume_id)
    until_replaced(client, disks[0], disks[3])
    assert names(host) == {*disks[1:4]}
    for offset in (0, SIZE - len(data)):
        assert host.read_bytes(device, offset, len(data)) == data
    client.delete_snapshot(snapshot.snapshot_id)
    grown = client.expand(volume.volume_id, 2 * SIZE)
    assert grown.capacity_bytes == 2 * SIZE
    client.unstage(volume.volume_id, host.directory / "staging")
    client.delete(volume.volume_id)


@pytest.mark.variation
@pytest.mark.parametrize("is_taken_back", [False, True])
def test_an_abandoned_replacement_shows_nothing_of_what_was_moved(
    client: Client, service: Service, host: AnyHost, disks: list[str], is_taken_back: bool
) -> None:
    volume = client.create("pvc-1", SIZE, block())
    client.stage(volume, host.directory / "staging", block())
    device = device_of(host, "vol-pvc-1")
    for offset in range(0, SIZE, MIB):
        host.write_bytes(device, offset, MARKER)
    old = report.read(host.lvm).group(GROUP).volume("vol-pvc-1").ranges[0].partition(":")[0]
    client.replace_disk(old, disks[3])
    group = report.read(host.lvm).group(GROUP)
    assert {one.name for one in group.disks if one.unclean} >= {disks[3]}
    host.lvm("pvmove", "--abort", "--")
    if is_taken_back:
        until_replaced(client, disks[3], old)
    elif old in names(host):
        host.lvm("pvchange", "--allocatable", "y", "--", old)
    # There is room on the disks that need not be erased first.
    room = client.capacity().available_capacity
    assert room >= 31 * EXTENT
    require_nothing_shown(client, host, client.create("pvc-2", room, block()))
    serving.again(service)
    group = report.read(host.lvm).group(GROUP)
    assert not [one.name for one in group.disks if one.unclean or not one.allocatable]
    assert set(group.volumes) == {"vol-pvc-1"}
    every = client.create("pvc-2", client.capacity().available_capacity, block())
    assert every.capacity_bytes == (sum(one.extents for one in group.disks) * EXTENT) - SIZE
    require_nothing_shown(client, host, every)
    client.unstage(volume.volume_id, host.directory / "staging")
    client.delete(volume.volume_id)


def require_nothing_shown(client: Client, host: AnyHost, volume: csi.Volume) -> None:
    """That a new volume shows nothing of what was moved; it is deleted."""
    client.stage(volume, host.directory / "other", block())
    device = device_of(host, "vol-pvc-2")
    for offset in range(0, volume.capacity_bytes, EXTENT):
        assert MARKER not in host.read_bytes(device, offset, EXTENT)
    client.unstage(volume.volume_id, host.directory / "other")
    client.delete(volume.volume_id)


def until_replaced(client: Client, old: str, new: str) -> None:
    for _ in range(600):
        done, message = client.replace_disk(old, new)
        if done:
            return
        sleep(0.05)
    raise AssertionError(message)


@pytest.mark.long_on_lvm
def test_a_disk_that_is_too_small_or_in_use_is_refused(
    client: Client, host: AnyHost, disks: list[str]
) -> None:
    volume = client.create("pvc-1", 16 * EXTENT, block())
    lies_on = report.read(host.lvm).group(GROUP).volume("vol-pvc-1").disks
    old = next(d.name for d in report.read(host.lvm).group(GROUP).disks if d.uuid in lies_on)
    with expect.code("FAILED_PRECONDITION", disks[4]):
        client.replace_disk(old, disks[4])
    host.write(disks[3], "ext4")
    with expect.code("FAILED_PRECONDITION", "ext4"):
        client.replace_disk(old, disks[3])
    with expect.code("INVALID_ARGUMENT", "new_disk"):
        client.replace_disk(old, old)
    assert names(host) == {*disks[:3]}
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_a_whole_volume_is_left_alone(client: Client, group: str) -> None:
    for name in ("linear", "raid1", "thin"):
        volume = client.create(f"pvc-{name}", SIZE, block(), parameters={"class": name})
        for _ in range(600):
            # A new RAID is brought in sync first.
            done, _ = client.repair(volume.volume_id)
            if done:
                break
            sleep(0.05)
        assert done
        client.delete(volume.volume_id)
