"""Pools' data and metadata, and the COW stores of snapshots, are extended before they are full."""

from collections.abc import Iterator
from dataclasses import replace

import configured
import pytest
from real.any import AnyHost, device

from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm import report
from lvm.layout import Reserve
from lvm.room import Room
from lvm.thin import Policy

MIB = 1 << 20
EXTENT = 4 * MIB
# One of a size that no other test's group has: it is extended.
DISKS = (16,)


@pytest.fixture
def spare(host: AnyHost) -> str:
    """A disk in no group."""
    return host.new_device(33 * MIB)


@pytest.fixture
def group(host: AnyHost, spare: str) -> Iterator[str]:
    """Sixteen extents; afterwards without what was added."""
    name = host.new_group(*DISKS)
    yield name
    if spare in [disk.name for disk in report.read(host.lvm).group(name).disks]:
        host.lvm("vgreduce", "--", name, spare)


POOL = Reserve(size_bytes=4 * EXTENT)
# Of a pool that is new some eleven per cent of the metadata are used.
SOON = Policy(size=POOL, autoextend_threshold=15.0)
pytestmark = pytest.mark.settings(
    classes=(
        configured.PLAIN,
        replace(configured.THIN, pool=Policy(over_provisioning=2.0, size=POOL)),
        replace(configured.THIN, name="soon", pool=SOON),
    )
)


@pytest.fixture(autouse=True)
def nothing_is_left(host: AnyHost, group: str, client: Client) -> Iterator[None]:
    yield
    for snapshot in client.snapshots():
        client.delete_snapshot(snapshot.snapshot_id)
    for volume in client.volumes():
        client.delete(volume.volume_id)
    assert set(report.read(host.lvm).group(group).volumes) == set()


def logical(host: AnyHost, group: str, name: str) -> report.LogicalVolume:
    return report.read(host.lvm).group(group).volume(name)


@pytest.mark.variation
def test_a_pool_grows_while_there_is_room_and_again_when_a_disk_is_added(
    client: Client, host: AnyHost, group: str, service: Service, spare: str
) -> None:
    client.create("pvc-1", 28 * EXTENT, block(), parameters={"class": "thin"})
    path, written, now = device(host, group, "vol-pvc-1"), 0, 0

    def fill(extents: float) -> None:
        nonlocal written
        while written < extents * EXTENT:
            host.write_bytes(path, written, b"contents" * (MIB // 8))
            written += MIB

    fill(3)
    assert service.autoextender.step(now)
    assert logical(host, group, "pool-thin").size_bytes == 5 * EXTENT
    # All that the group has, beside the metadata and their spare.
    for size in range(5, 15):
        fill(size * 0.75)
        while service.autoextender.step(now := now + 1):
            pass
    assert logical(host, group, "pool-thin").size_bytes == 14 * EXTENT
    assert Room(report.read(host.lvm).group(group)).free_extents == 0
    fill(13)
    assert not service.autoextender.step(now + 60)
    assert service.autoextender.counts()["data", "no room"] == 1

    host.lvm("vgextend", "--", group, spare)
    assert not service.autoextender.step(now + 61)
    assert service.autoextender.step(now + 120)
    assert logical(host, group, "pool-thin").size_bytes > 14 * EXTENT
    fill(14.5)


def test_the_metadata_of_a_pool_are_extended_with_their_spare(
    client: Client, host: AnyHost, group: str, service: Service
) -> None:
    client.create("pvc-1", EXTENT, block(), parameters={"class": "soon"})
    assert not service.autoextender.step(0)
    host.fill_metadata(group, "pool-soon", 60)
    assert service.autoextender.step(0)
    assert logical(host, group, "pool-soon").metadata_size_bytes == 2 * EXTENT
    assert report.read(host.lvm).group(group).spare_extents == 2
    assert service.autoextender.counts()["metadata", "extended"] == 1
    assert not service.autoextender.step(1)
    # And it serves.
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, data := b"contents" * 512)
    assert host.read_bytes(device(host, group, "vol-pvc-1"), 0, len(data)) == data


@pytest.mark.variation
def test_the_store_of_a_snapshot_is_extended_in_time_up_to_what_it_can_use(
    client: Client, host: AnyHost, group: str, service: Service
) -> None:
    volume = client.create("pvc-1", 4 * EXTENT, block())
    path = device(host, group, "vol-pvc-1")
    host.write_bytes(path, 0, b"before  " * (4 * EXTENT // 8))
    client.snapshot("1", volume.volume_id, {"size": "4MiB"})
    assert not service.autoextender.step(0)
    for at in range(16):
        host.write_bytes(path, at * MIB, b"after   " * (MIB // 8))
        while service.autoextender.step(at):
            pass
    # Every chunk of the origin, and the metadata for them.
    assert logical(host, group, "snap-1").size_bytes == 5 * EXTENT
    assert client.snapshots()[0].ready_to_use
    taken = device(host, group, "snap-1")
    assert host.read_bytes(taken, 15 * MIB, 4096) == b"before  " * 512
    assert host.read_bytes(path, 15 * MIB, 4096) == b"after   " * 512
    assert service.autoextender.counts()["snapshot", "extended"] >= 2


def retag(host: AnyHost, path: str, lost: set[str], added: set[str]) -> None:
    words = [word for one in lost for word in ("--deltag", one)]
    host.lvm("lvchange", *words, *(word for one in added for word in ("--addtag", one)), "--", path)


@pytest.mark.variation
@pytest.mark.parametrize(
    ("name", "lost", "added"),
    [
        ("vol-pvc-1", {"carver.state=ready"}, {"carver.state=odd"}),
        ("vol-pvc-1", {"carver.name=pvc-1"}, set()),
        ("vol-pvc-1", set(), {"carver.needs=something"}),
        ("snap-1", set(), {"carver.class=other"}),
    ],
)
def test_a_snapshot_is_not_lost_by_what_became_of_a_tag(
    client: Client,
    host: AnyHost,
    group: str,
    service: Service,
    name: str,
    lost: set[str],
    added: set[str],
) -> None:
    """Neither of its own nor of its origin's: lvm2 knows whose snapshot it is."""
    volume = client.create("pvc-1", 4 * EXTENT, block())
    client.snapshot("1", volume.volume_id, {"size": "4MiB"})
    retag(host, f"{group}/{name}", lost, added)
    path = device(host, group, "vol-pvc-1")
    for at in range(16):
        host.write_bytes(path, at * MIB, b"after   " * (MIB // 8))
        while service.autoextender.step(at * 11):
            pass
    assert logical(host, group, "snap-1").overflowed is False
    retag(host, f"{group}/{name}", added, lost)
    assert client.snapshots()[0].ready_to_use


@pytest.mark.variation
@pytest.mark.parametrize(
    ("lost", "added"),
    [
        ({"carver.class=thin"}, set()),
        (set(), {"carver.class=other"}),
        (set(), {"carver.chunk=131072"}),
        (set(), {"carver.needs=something"}),
    ],
)
def test_a_pool_is_not_left_full_by_what_became_of_a_tag(
    client: Client, host: AnyHost, group: str, service: Service, lost: set[str], added: set[str]
) -> None:
    client.create("pvc-1", 8 * EXTENT, block(), parameters={"class": "thin"})
    room = client.capacity().available_capacity
    retag(host, f"{group}/pool-thin", lost, added)
    # What it has promised stays its own, too.
    assert client.capacity().available_capacity == room
    path = device(host, group, "vol-pvc-1")
    for at in range(14):
        host.write_bytes(path, at * MIB, b"contents" * (MIB // 8))
    assert service.autoextender.step(0)
    assert logical(host, group, "pool-thin").size_bytes > 4 * EXTENT
    retag(host, f"{group}/pool-thin", added, lost)
