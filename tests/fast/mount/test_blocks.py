"""Devices that are kept open: read and written past the page cache, wherever one begins."""

import mmap
from pathlib import Path

import pytest

from mount.syscalls import Kernel

KIB = 1 << 10
SIZE = 64 * KIB


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A file in the place of one: direct I/O is for a file what it is for a disk."""
    made = tmp_path / "disk"
    made.write_bytes(bytes(at % 251 for at in range(SIZE)))
    return made


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 8192), (4096, 4096), (512, 512), (100, 5000), (SIZE - 700, 700)]
)
def test_any_range_is_read_and_written_and_what_is_around_it_stays(
    disk: Path, offset: int, length: int
) -> None:
    before = disk.read_bytes()
    new = b"\xff" * length
    # Such memory as the kernel takes at once, and such as it does not.
    for data in (memoryview(mmap.mmap(-1, length + 1))[:length], memoryview(bytearray(length + 1))):
        place = data[1:] if len(data) > length else data
        place[:] = new
        with Kernel().opened(str(disk), to_write=True) as opened:
            opened.write(offset, place)
            opened.flush()
            assert opened.read(offset, length) == new
            opened.read_into(0, place)
            assert place == (before[:offset] + new + before[offset + length :])[:length]
        assert disk.read_bytes() == before[:offset] + new + before[offset + length :]
        disk.write_bytes(before)


def test_what_is_behind_the_end_is_neither_read_nor_written(disk: Path) -> None:
    before = disk.read_bytes()
    with Kernel().opened(str(disk), to_write=True) as opened:
        for offset in (SIZE - 512, SIZE - 100, SIZE):
            with pytest.raises(OSError, match=f"{SIZE - offset} of 1000 bytes"):
                opened.read(offset, 1000)
        with pytest.raises(OSError, match="Invalid argument"):
            opened.write(SIZE - 100, b"x" * 1000)
    assert disk.read_bytes() == before
