"""The ends of an encrypted device, where signatures stand: blank before anything is written there.

What was never written through a master key reads as noise. libblkid knows some file systems by two
bytes (hfsplus, minix), so one device in some ten thousand reads as if it had one of them, and what
is somebody's is not touched.

The ends are zeroed beneath before there is a master key, and through it before it is used. In
between a crash does no harm: a block that is all zeroes beneath was written by nobody, for nothing
that is written through the key becomes that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

from mount import errors
from mount.blocks import Opened
from mount.syscalls import Kernel

# Signatures of few bytes stand within 64 KiB of either end (libblkid/src/superblocks).
_END_BYTES = 256 << 10
_BLOCK_BYTES = 4096
_ZEROES = bytes(_BLOCK_BYTES)


def erase(kernel: Kernel, device: str, offset_bytes: int) -> None:
    """Zero the ends of what begins at an offset of a device that has no header yet.

    What makes the header flushes it. Raises ProbeFailed.
    """
    with _told_of(device):
        size_bytes = kernel.device_size_bytes(device) - offset_bytes
        with kernel.opened(device, to_write=True) as below:
            for start, length_bytes in _runs(below, offset_bytes, size_bytes, blank=False):
                below.zero_out(offset_bytes + start, length_bytes)


def blank(kernel: Kernel, device: str, offset_bytes: int, mapping: str) -> None:
    """Have the ends of the device that begins there, by its key, read as zeroes where none wrote.

    Nothing where they are written. Raises ProbeFailed.
    """
    with _told_of(mapping):
        size_bytes = kernel.device_size_bytes(mapping)
        with kernel.opened(device) as below, kernel.opened(mapping, to_write=True) as inside:
            for start, length_bytes in _runs(below, offset_bytes, size_bytes, blank=True):
                inside.zero_out(start, length_bytes)
            inside.flush()


def _runs(
    below: Opened, offset_bytes: int, size_bytes: int, *, blank: bool
) -> Iterator[tuple[int, int]]:
    """The blocks at both ends that are all zeroes, or that are not: starts and lengths."""
    whole = size_bytes // _BLOCK_BYTES * _BLOCK_BYTES
    first = min(_END_BYTES, whole)
    last = max(first, whole - _END_BYTES)
    for begin, length_bytes in ((0, first), (last, whole - last)):
        start = begin
        # Past the page cache, which may have what was there before.
        data = below.read(offset_bytes + begin, length_bytes) if length_bytes else b""
        blocks = [data[at : at + _BLOCK_BYTES] for at in range(0, length_bytes, _BLOCK_BYTES)]
        for is_blank, run in groupby(blocks, _ZEROES.__eq__):
            run_bytes = len(list(run)) * _BLOCK_BYTES
            if is_blank == blank:
                yield start, run_bytes
            start += run_bytes


@contextmanager
def _told_of(device: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise errors.ProbeFailed(device, str(error.strerror)) from error
