"""COW stores of snapshots: the kernel's header, read past the page cache, and the tables."""

import struct
from pathlib import Path

import pytest
from fakes.known import machine, reports

from lvm import active_devices, report, volumes
from lvm.active_devices import Devices
from mount import mount_errors as mount_errors

EXTENT = 4 << 20
SNAPSHOT = 0x70416E53


@pytest.fixture(autouse=True)
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks have direct I/O, not each file system."""
    monkeypatch.setattr("os.O_DIRECT", 0)


@pytest.mark.parametrize(
    ("header", "lost"),
    [
        (struct.pack("<4I", SNAPSHOT, 1, 1, 8), False),
        (struct.pack("<4I", SNAPSHOT, 0, 1, 8), True),
        # Made, and never active.
        (bytes(16), False),
        (struct.pack("<4I", 1, 1, 1, 8), True),
        (b"", True),
    ],
)
def test_a_header_shows_whether_its_snapshot_can_be_read(header: bytes, lost: bool) -> None:
    assert active_devices.is_lost(header) == lost


def test_a_header_is_read_where_the_area_begins(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(EXTENT) + struct.pack("<4I", SNAPSHOT, 0, 1, 8) + bytes(8192))
    assert Devices().overflowed(str(disk), EXTENT) is True
    assert Devices().overflowed(str(disk), 0) is False
    assert Devices().overflowed("[unknown]", EXTENT) is None


def store(chunk_bytes: int, *copied: int) -> bytes:
    """A store as drivers/md/dm-snap-persistent.c lays it out, without what was copied."""
    each = chunk_bytes // 16
    image = bytearray(chunk_bytes)
    struct.pack_into("<4I", image, 0, SNAPSHOT, 1, 1, chunk_bytes // 512)
    # One table more than is full: the kernel has zeroes in the next one first.
    for first in range(0, len(copied) + 1, each):
        own = copied[first : first + each]
        begins = 2 + first + first // each
        table = b"".join(struct.pack("<2Q", old, begins + n) for n, old in enumerate(own))
        image += table.ljust(chunk_bytes, b"\0") + bytes(each * chunk_bytes)
    return bytes(image)


@pytest.mark.parametrize("chunk_bytes", [4096, 8192])
@pytest.mark.parametrize("tables", [0, 1, 2.5])
def test_a_store_lists_the_chunks_that_it_has_copies_of(
    tmp_path: Path, chunk_bytes: int, tables: float
) -> None:
    count = int(tables * chunk_bytes // 16)
    copied = [(number * 7919) % 100_003 for number in range(count)]
    disk = tmp_path / "store"
    disk.write_bytes(store(chunk_bytes, *copied))
    table = active_devices.Exceptions(str(disk))
    assert table.chunk_bytes == chunk_bytes
    for _ in range(2):
        assert [one for part in table.chunks() for one in part] == copied


@pytest.mark.parametrize(
    "header",
    [(SNAPSHOT, 0, 1, 8), (SNAPSHOT, 1, 2, 8), (SNAPSHOT, 1, 1, 0), (0, 0, 0, 0), (1, 1, 1, 8)],
)
def test_a_store_that_cannot_be_read_is_refused(tmp_path: Path, header: tuple[int, ...]) -> None:
    disk = tmp_path / "store"
    disk.write_bytes(struct.pack("<4I", *header).ljust(8192, b"\0"))
    with pytest.raises(mount_errors.BadReport):
        active_devices.Exceptions(str(disk))


def test_a_snapshot_whose_disk_is_missing_is_not_ready_and_not_lost() -> None:
    lvm, fake = machine(10, 10)
    own_tags = {"name": "a", "source": "vol-a", "size": str(EXTENT), "time": "0"}
    first, second = (disk.name for disk in report.read(lvm).group("data").disks)
    volumes.create(lvm, "data", volumes.New("vol-a", EXTENT, {"name": "a"}), disks=[first])
    size = 2 * EXTENT
    volumes.create_snapshot(
        lvm, "data", "snap-a", origin="vol-a", size_bytes=size, own_tags=own_tags, disks=[second]
    )
    known = reports(fake, "data")
    fake.deactivate("data", "vol-a")
    [snapshot] = known.listed_snapshots(known.fresh())
    assert snapshot.is_ready
    fake.groups["data"].disks[1].missing = True
    [snapshot] = known.listed_snapshots(known.fresh())
    assert not snapshot.is_ready
    assert not snapshot.problem
