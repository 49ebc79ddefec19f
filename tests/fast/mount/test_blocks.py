"""Devices that are kept open: read and written past the page cache, at any offset."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from mount import block_io, calls
from mount.block_io import PIECE_BYTES, By
from mount.kernel import Kernel

KIB, MIB = 1 << 10, 1 << 20
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


def test_what_is_past_the_end_is_neither_read_nor_written(disk: Path) -> None:
    before = disk.read_bytes()
    with Kernel().opened(str(disk), to_write=True) as opened:
        for offset in (SIZE - 512, SIZE - 100, SIZE):
            with pytest.raises(OSError, match=f"{SIZE - offset} of 1000 bytes"):
                opened.read(offset, 1000)
        with pytest.raises(OSError, match="Invalid argument"):
            opened.write(SIZE - 100, b"x" * 1000)
    assert disk.read_bytes() == before


class Zeroing:
    """A block device, by what the kernel is asked to do with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hole: int, zeroes: int = 0) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr("mount.block_io.stat.S_ISBLK", lambda _mode: True)
        monkeypatch.setattr(calls, "punch_hole", lambda *_: self._ask("hole", hole))
        self._failures = {0x1277: ("discard", hole), 0x127F: ("zeroes", zeroes)}
        ioctl = "mount.block_io.fcntl.ioctl"
        monkeypatch.setattr(ioctl, lambda _, request, __: self._ask(*self._failures[request]))

    def _ask(self, what: str, failure: int) -> None:
        self.asked.append(what)
        if failure:
            raise OSError(failure, os.strerror(failure))


def zero_out(disk: Path, by: By = By.HOLE, length: int = 4096) -> None:
    descriptor = os.open(disk, os.O_RDWR | (os.O_DIRECT if by.is_direct else 0))
    with block_io.closing(descriptor):
        block_io.zero_out(descriptor, str(disk), 0, length, by)


@pytest.mark.parametrize(
    ("by", "asked"), [(By.HOLE, "hole"), (By.DISCARD, "discard"), (By.ZEROES, "zeroes")]
)
@pytest.mark.parametrize("failure", [0, errno.EOPNOTSUPP, errno.EINVAL, errno.EREMOTEIO])
def test_where_a_device_refuses_the_kernel_zeroes(
    disk: Path, monkeypatch: pytest.MonkeyPatch, failure: int, by: By, asked: str
) -> None:
    device = Zeroing(monkeypatch, failure)
    zero_out(disk, by)
    refused = failure and by is not By.ZEROES
    assert device.asked == ([asked, "zeroes"] if refused else [asked])


def test_a_device_that_takes_neither_is_an_error(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Zeroing(monkeypatch, errno.EOPNOTSUPP, errno.EIO)
    with pytest.raises(OSError, match="disk") as caught:
        zero_out(disk)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("by", [By.HOLE, By.DISCARD, By.ZEROES])
def test_nothing_but_a_block_device_is_zeroed_by_the_kernel(disk: Path, by: By) -> None:
    before = disk.read_bytes()
    with pytest.raises(OSError, match="disk"):
        zero_out(disk, by)
    assert disk.read_bytes() == before


@pytest.mark.parametrize("length", [4096, SIZE, 3 * MIB + 4096])
def test_zeroes_are_written_as_data_up_to_the_end_of_the_range(tmp_path: Path, length: int) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(b"x" * (length + 8192))
    zero_out(disk, By.WRITES, length)
    assert disk.read_bytes() == bytes(length) + b"x" * 8192


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without direct I/O, which disks have, but not each file system."""
    monkeypatch.setattr("os.O_DIRECT", 0)


@pytest.mark.usefixtures("cached")
def test_a_reader_reads_from_any_block_on(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    held = bytes(range(256)) * (PIECE_BYTES // 128)
    disk.write_bytes(held)
    with Kernel().reader(str(disk)) as reader:
        assert reader.device == str(disk)
        assert reader.read(0, PIECE_BYTES) == held[:PIECE_BYTES]
        assert reader.read(4096, 512) == held[4096:4608]
        assert reader.read(PIECE_BYTES, PIECE_BYTES) == held[PIECE_BYTES:]


@pytest.mark.usefixtures("cached")
def test_a_read_past_the_end_is_an_error(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(4096 + 512))
    with block_io.opened(str(disk)) as reader:
        # The last block is not whole.
        assert reader.read(4096, 512) == bytes(512)
        with pytest.raises(OSError, match="512 of 4096 bytes at 4096") as caught:
            reader.read(4096, 4096)
    assert caught.value.errno == errno.EIO
