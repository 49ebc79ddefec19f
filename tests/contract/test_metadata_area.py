"""The room for a group's own metadata: made large enough, reported, and never used up."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import chosen
import configured
import expect
import pytest
from csi_client import Client
from real.any import AnyHost

from agent.csi.client import block, of_volume
from agent.daemon.server import Service
from agent.groups.node_groups import VolumeGroups
from lvm import groups, report

MIB, GIB = 1 << 20, 1 << 30
EXTENT = 4 * MIB
# What a tag takes of the text beside itself, and what one says: `carver.fill0001=aaa…`.
_TAG_BYTES, _WORD = 1000, "a" * 975


@contextmanager
def made(host: AnyHost, name: str, device: str, metadata_bytes: int) -> Iterator[report.Group]:
    """A group as Carver makes one."""
    groups.create(host.lvm, name, [device], {}, metadata_bytes)
    try:
        yield report.read(host.lvm).group(name)
    finally:
        host.lvm("vgremove", "--yes", "--", name)


def fill(host: AnyHost, group: str, left_bytes: int) -> dict[str, str]:
    """Have the group's text so long, by tags of its own, that so many bytes are left; the tags."""
    free = report.read(host.lvm).group(group).metadata_free_bytes
    own_tags = {f"fill{number:04}": _WORD for number in range((free - left_bytes) // _TAG_BYTES)}
    groups.mark(host.lvm, group, new_tags=own_tags)
    return own_tags


@pytest.fixture
def filled(host: AnyHost, group: str) -> Iterator[Callable[[int], None]]:
    """Has the group's text so long that so many bytes are left."""
    tags: dict[str, str] = {}
    yield lambda left_bytes: tags.update(fill(host, group, left_bytes))
    groups.mark(host.lvm, group, old_tags=tags)


@pytest.mark.parametrize(
    ("size_bytes", "area_bytes"),
    [(64 * MIB, MIB), (GIB, 2 * MIB), (40 * GIB, 79 * MIB), (400 * GIB, 79 * MIB)],
)
def test_a_group_that_carver_makes_has_room_for_as_many_volumes_as_it_has_extents(
    host: AnyHost, size_bytes: int, area_bytes: int
) -> None:
    wanted = groups.suitable_metadata_bytes(size_bytes)
    device = host.new_device(size_bytes)
    with made(host, f"room_{size_bytes // MIB}", device, wanted) as group:
        assert group.metadata_bytes == wanted == area_bytes - groups.LABEL_BYTES
        [disk] = group.disks
        assert disk.extents == (size_bytes - area_bytes) // EXTENT
        volumes = min(10_000, disk.extents)
        assert groups.text_room_bytes(group) >= 4000 * volumes
        assert groups.text_percent(group) < 1


@pytest.mark.variation
def test_nothing_new_is_made_before_the_text_has_no_room_any_more(
    host: AnyHost, group: str, client: Client, service: Service, filled: Callable[[int], None]
) -> None:
    volume = client.create("pvc-1", EXTENT, block())
    filled(20 << 10)
    assert client.capacity().available_capacity == 0
    for call in (
        lambda: client.create("pvc-2", EXTENT, block()),
        lambda: client.create("pvc-2", EXTENT, block(), source=of_volume(volume.volume_id)),
        lambda: client.snapshot("snap-1", volume.volume_id),
    ):
        with expect.code("RESOURCE_EXHAUSTED", "metadata area of", " is 9", "docs/operations.md"):
            call()
    # Existing volumes are served.
    assert client.create("pvc-1", EXTENT, block()) == volume
    service.reports.fresh()
    assert "GroupMetadataFull" in {one.reason for one in client.storage_health()}


@pytest.mark.long_on_lvm
def test_a_deletion_never_wants_room_for_the_text(
    host: AnyHost, group: str, client: Client, filled: Callable[[int], None]
) -> None:
    volumes = [client.create(f"pvc-{number}", EXTENT, block()) for number in range(3)]
    snapshot = client.snapshot("snap-1", volumes[0].volume_id)
    filled(1500)
    client.delete_snapshot(snapshot.snapshot_id)
    for one in volumes:
        client.delete(one.volume_id)
    expect.soon(lambda: not report.read(host.lvm).group(group).volumes)


@pytest.mark.variation
def test_there_is_room_again_when_volumes_were_deleted(
    host: AnyHost, group: str, client: Client
) -> None:
    free = client.capacity().available_capacity
    tags = fill(host, group, 20 << 10)
    assert client.capacity().available_capacity == 0
    groups.mark(host.lvm, group, old_tags=tags)
    assert client.capacity().available_capacity == free


def test_a_disk_that_is_added_has_an_area_as_large_as_the_others(host: AnyHost) -> None:
    area = 8 * MIB - groups.LABEL_BYTES
    first, second = host.new_device(64 * MIB), host.new_device(64 * MIB)
    with made(host, "room_two", first, area):
        groups.extend(host.lvm, "room_two", second, area)
        found = report.read(host.lvm).group("room_two")
        assert len(found.disks) == 2
        assert found.metadata_bytes == area


@contextmanager
def of_two(host: AnyHost, name: str, *areas: int) -> Iterator[Sequence[str]]:
    """A group of disks with areas of so many MiB; yields the disks."""
    disks = [host.new_device(256 * MIB) for _ in areas]
    with made(host, name, disks[0], areas[0] * MIB - groups.LABEL_BYTES):
        for disk, area in zip(disks[1:], areas[1:], strict=True):
            host.lvm("vgextend", "--metadatasize", f"{area * MIB - 4096}b", "--", name, disk)
        yield disks


AREAS = {"the second": (8, 1), "the first": (1, 8), "one of three": (8, 1, 16)}


@pytest.mark.parametrize("kind", chosen.kinds(AREAS, usual=["the second"]))
def test_the_disk_whose_area_bounds_the_group_is_named(host: AnyHost, kind: str) -> None:
    areas = AREAS[kind]
    with of_two(host, "room_narrow", *areas) as disks:
        group = report.read(host.lvm).group("room_narrow")
        assert group.metadata_bytes == MIB - groups.LABEL_BYTES
        widest = max(areas)
        expected = {
            disk: area * MIB - groups.LABEL_BYTES
            for disk, area in zip(disks, areas, strict=True)
            if area < widest
        }
        assert groups.narrow_disks(group) == expected
        assert groups.widest_area_bytes(group) == widest * MIB - groups.LABEL_BYTES
        about = groups.about_area(group)
        assert all(disk in about for disk in expected)
        assert "1.0 MiB" in about
        host.lvm("vgreduce", "--", "room_narrow", disks[areas.index(1)])
        if len(areas) == 2:
            group = report.read(host.lvm).group("room_narrow")
            assert groups.narrow_disks(group) == {}
            assert "smallest" not in groups.about_area(group)


def test_a_group_of_equal_areas_is_not_called_narrow(host: AnyHost, group: str) -> None:
    assert groups.narrow_disks(report.read(host.lvm).group(group)) == {}


@pytest.mark.variation
def test_a_text_longer_than_lvm2_s_buffer_is_read_and_written(host: AnyHost) -> None:
    device = host.new_device(128 * MIB)
    with made(host, "room_long", device, 40 * MIB - groups.LABEL_BYTES):
        known = VolumeGroups(host.lvm, host.disks, host.devices, configured.on_groups("room_long"))
        volume_group = known.of("room_long")
        assert volume_group is not None
        for part in range(12):
            own_tags = {f"part{part}.{number}": _WORD for number in range(800)}
            assert volume_group.state() is not None
            groups.mark(volume_group.lvm, "room_long", new_tags=own_tags)
        found = volume_group.state()
        assert found is not None
        assert len(found.tags) == 12 * 800
        if found.metadata_bytes - 2 * found.metadata_free_bytes > 16 * MIB:
            assert "global/io_memory_size=32768" in volume_group.lvm.settings
