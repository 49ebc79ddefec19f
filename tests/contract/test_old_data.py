"""What free extents held before shows in no sector of what is made of them, where that is promised.

docs/security.md has the table of what is promised.
"""

from collections.abc import Iterator
from dataclasses import replace

import chosen
import configured
import pytest
from real.any import AnyHost, device

from agent.csi.client import Client, block, of_snapshot, of_volume
from lvm import report
from lvm.room import Room
from proto import csi_pb2 as csi

MIB = 1 << 20
MARK = b"an earlier owner's secret"
OWN = b"one's own".ljust(4096, b".")
# Whole extents on every stripe of each layout.
SIZE, GROWN, LARGER = 24 * MIB, 48 * MIB, 72 * MIB
LAYOUTS = configured.LAYOUTS


@pytest.fixture
def group(host: AnyHost) -> str:
    """A disk more than the widest layout takes; all free extents bear the mark."""
    made = host.new_group(*[24] * (configured.MOST_DISKS + 1))
    host.mark_free(made, MARK)
    return made


USUAL = configured.classes("data", LAYOUTS)
CLASSES = (
    *(replace(one, zero="first" if one.layout.is_thin else "fully") for one in USUAL),
    *(replace(one, name=f"usual-{one.name}", default=False) for one in USUAL),
)
pytestmark = pytest.mark.settings(classes=CLASSES)


@pytest.fixture
def whole(host: AnyHost, group: str) -> Iterator[None]:
    """The group's free extents are the same afterwards."""
    before = Room(report.read(host.lvm).group(group)).free_extents
    yield
    assert Room(report.read(host.lvm).group(group)).free_extents == before


def contents(host: AnyHost, client: Client, group: str, volume: csi.Volume) -> bytes:
    """All of a volume."""
    client.stage(volume, host.directory / "staging", block())
    path = device(host, group, volume.volume_id.rpartition("/")[2])
    size = host.kernel.device_size_bytes(path)
    return b"".join(host.read_bytes(path, at, MIB) for at in range(0, size, MIB))


@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["linear"]))
def test_new_volume_has_no_old_data(
    client: Client, host: AnyHost, group: str, name: str, whole: None
) -> None:
    parameters = {"class": name}
    volume = client.create("origin", SIZE, block(), parameters=parameters)
    assert contents(host, client, group, volume) == bytes(SIZE)

    client.expand(volume.volume_id, GROWN)
    assert contents(host, client, group, volume) == bytes(GROWN)

    host.write_bytes(device(host, group, "vol-origin"), 8 * MIB, OWN)
    expected = bytes(8 * MIB) + OWN + bytes(GROWN - 8 * MIB - len(OWN))
    snapshot = client.snapshot("1", volume.volume_id)
    source = of_snapshot(snapshot.snapshot_id)
    restored = client.create("restored", LARGER, block(), parameters=parameters, source=source)
    assert contents(host, client, group, restored) == expected + bytes(LARGER - GROWN)
    client.delete(restored.volume_id)
    client.delete_snapshot(snapshot.snapshot_id)

    source = of_volume(volume.volume_id)
    cloned = client.create("cloned", GROWN, block(), parameters=parameters, source=source)
    assert contents(host, client, group, cloned) == expected
    client.delete(cloned.volume_id)
    client.delete(volume.volume_id)


@pytest.mark.variation
@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["thin"], fast=["raid5"]))
def test_deleted_data_do_not_show_in_a_new_volume(
    client: Client, host: AnyHost, group: str, name: str, whole: None
) -> None:
    volume = client.create("origin", SIZE, block(), parameters={"class": f"usual-{name}"})
    client.stage(volume, host.directory / "staging", block())
    path = device(host, group, "vol-origin")
    for offset in range(0, SIZE, MIB):
        host.write_bytes(path, offset, OWN * (MIB // len(OWN)))
    snapshot = client.snapshot("1", volume.volume_id)
    for offset in range(0, 3 * MIB, MIB):
        host.write_bytes(path, offset, OWN[::-1] * (MIB // len(OWN)))
    client.delete_snapshot(snapshot.snapshot_id)
    client.delete(volume.volume_id)
    largest = client.capacity({"class": "usual-linear"}).maximum_volume_size.value
    volume = client.create("all", largest, block(), parameters={"class": "usual-linear"})
    shown = contents(host, client, group, volume)
    assert OWN[:9] not in shown
    assert OWN[::-1] not in shown
    client.delete(volume.volume_id)
