"""A block device that is read from one end to the other, past the page cache."""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

# What direct I/O is in whole numbers of.
_BLOCK_BYTES = 4096
# Large enough to keep a disk at work, small enough that many may read at once. Of more than 256
# pages the kernel puts what a snapshot's chunks part a read into together again before a disk has
# it (block/fops.c: blk_start_plug), and that is most of what reading a snapshot costs.
PIECE_BYTES = 2 << 20


class Reader:
    """A device that stays open, so that it cannot be removed meanwhile."""

    def __init__(self, device: str, descriptor: int, buffer: mmap.mmap) -> None:
        self.device = device
        self._descriptor = descriptor
        self._buffer = buffer

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """At most PIECE_BYTES from a whole number of blocks on (preadv(2)).

        What a process writes there through the page cache is written back first. Raises OSError.
        """
        whole = -(-length_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        with memoryview(self._buffer) as view, view[:whole] as part:
            found = os.preadv(self._descriptor, [part], offset_bytes)
        if found < length_bytes:
            told = f"{found} of {length_bytes} bytes at {offset_bytes}"
            raise OSError(errno.EIO, told, self.device)
        return self._buffer[:length_bytes]


@contextmanager
def opened(device: str) -> Iterator[Reader]:
    """A reader of a device, which nobody is told of: it writes nothing. Raises OSError."""
    descriptor = os.open(device, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, PIECE_BYTES) as buffer:
            yield Reader(device, descriptor, buffer)
    finally:
        os.close(descriptor)
