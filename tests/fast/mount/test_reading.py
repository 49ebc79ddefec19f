"""A device that is read past the page cache: whole blocks, as far as it goes."""

import errno
from pathlib import Path

import pytest

from mount import blocks
from mount.blocks import PIECE_BYTES
from mount.kernel import Kernel


@pytest.fixture(autouse=True)
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    # Disks have it, not each file system.
    monkeypatch.setattr("os.O_DIRECT", 0)


def test_any_part_is_read_from_a_block_on(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    held = bytes(range(256)) * (PIECE_BYTES // 128)
    disk.write_bytes(held)
    with Kernel().reader(str(disk)) as reader:
        assert reader.device == str(disk)
        assert reader.read(0, PIECE_BYTES) == held[:PIECE_BYTES]
        assert reader.read(4096, 512) == held[4096:4608]
        assert reader.read(PIECE_BYTES, PIECE_BYTES) == held[PIECE_BYTES:]


def test_what_is_behind_the_end_is_an_error(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(4096 + 512))
    with blocks.opened(str(disk)) as reader:
        # The last block is none.
        assert reader.read(4096, 512) == bytes(512)
        with pytest.raises(OSError, match="512 of 4096 bytes at 4096") as caught:
            reader.read(4096, 4096)
    assert caught.value.errno == errno.EIO
