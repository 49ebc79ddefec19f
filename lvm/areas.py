"""What the area of a copy-on-write snapshot says on its disk: whether it is lost, what it copied.

The kernel writes there that a snapshot overflowed, and lvm2 only asks the kernel: of one that is
not active it tells nothing. Which chunks of the origin were overwritten since the snapshot, and so
copied, stands nowhere else at all: the kernel's status has their number only.
"""

import mmap
import os
import struct
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lvm import errors

# struct disk_header, drivers/md/dm-snap-persistent.c: magic, valid, version, size of a chunk.
_HEADER = struct.Struct("<4I")
_MAGIC = 0x70416E53
_VERSION = 1
# struct disk_exception: the chunk of the origin, and the one that it was copied to.
_EXCEPTION_BYTES = 16
_SECTOR_BYTES = 512
# What direct I/O is in whole numbers of.
_BLOCK_BYTES = 4096


class Exceptions(Protocol):
    """The chunks of its origin of which a snapshot has a copy."""

    @property
    def chunk_bytes(self) -> int:
        """How large a chunk is."""
        ...

    def chunks(self) -> Iterator["array[int]"]:
        """Their numbers, each once, in no order, a few at a time."""
        ...


class ExceptionTable:
    """The real `Exceptions`, read from a snapshot's store on its disk, past the page cache.

    The kernel completes a write to the origin when the chunk was copied, and that is on record
    here (drivers/md/dm-snap-persistent.c, persistent_commit_exception). So the table has each chunk
    that was overwritten before one began to read it; what is overwritten meanwhile may be in it.
    Raises BadReport where this is no store that can be read, OSError.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        with _opened(device, _BLOCK_BYTES) as read:
            magic, valid, version, sectors = _HEADER.unpack_from(read(0))
        if (magic, valid, version) != (_MAGIC, 1, _VERSION) or not sectors or sectors % 8:
            told = (
                f"magic {magic:#x}, valid {valid}, version {version}, chunks of {sectors} sectors"
            )
            raise errors.BadReport(f"{device} is no store of a snapshot that can be read: {told}")
        self._chunk_bytes: int = sectors * _SECTOR_BYTES

    @property
    def chunk_bytes(self) -> int:
        """How large a chunk is."""
        return self._chunk_bytes

    def chunks(self) -> Iterator["array[int]"]:
        """Their numbers, in the order in which they were overwritten, a table's chunk at a time."""
        each = self._chunk_bytes // _EXCEPTION_BYTES
        # Behind the header: one chunk that tells of as many as follow it, and so on.
        with _opened(self._device, self._chunk_bytes) as read:
            at, is_full = 1, True
            while is_full:
                told = array("Q", read(at * self._chunk_bytes))
                if sys.byteorder == "big":
                    told.byteswap()
                # A copy cannot be where the header is: that is the end.
                is_full = told[1::2].count(0) == 0
                used = each if is_full else told[1::2].index(0)
                yield told[: 2 * used : 2]
                at += each + 1


def overflowed(disk: str, offset_bytes: int) -> bool | None:
    """Whether the snapshot whose area begins there is lost; None where the disk cannot be read.

    Past the page cache: that may hold what was there before the kernel's own write.
    """
    try:
        with _opened(disk, _BLOCK_BYTES) as read:
            return is_lost(read(offset_bytes))
    except OSError:
        return None


def is_lost(header: bytes) -> bool:
    """Whether the area's first bytes are not those of a snapshot that can be read."""
    if len(header) < _HEADER.size:
        return True
    magic, valid, _, _ = _HEADER.unpack_from(header)
    # Zeroes, by lvm2, are a snapshot that was never active.
    return bool(magic) and (magic, valid) != (_MAGIC, 1)


class _Read(Protocol):
    def __call__(self, offset_bytes: int) -> bytes: ...


@contextmanager
def _opened(disk: str, length_bytes: int) -> Iterator[_Read]:
    """Reads of one length past the page cache; shorter at the end of the disk."""
    descriptor = os.open(disk, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, length_bytes) as block:
            yield lambda offset_bytes: block[: os.preadv(descriptor, [block], offset_bytes)]
    finally:
        os.close(descriptor)
