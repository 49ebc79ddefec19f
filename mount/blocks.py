"""Block devices by descriptors: opened, read, written, zeroed.

Each raises OSError with the kernel's errno and the device's path.
"""

import errno
import fcntl
import itertools
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

# <linux/fs.h>, by <asm-generic/ioctl.h>.
_BLKZEROOUT = 0x127F

# How often a device that is busy is tried again, and how long after.
_BUSY_TRIES = 50
_BUSY_SECONDS = 0.1


@contextmanager
def closing(descriptor: int) -> Iterator[None]:
    """Close it in the end."""
    try:
        yield
    finally:
        os.close(descriptor)


def open_exclusively(device: str, directory: int | None = None, mode: int = os.O_WRONLY) -> int:
    """A descriptor to write to a device by, which nobody has mounted or held; else EBUSY (open(2)).

    A child between its fork and its exec has what this process had open, and for that moment holds
    the device like anyone else. On a busy node that is long, so EBUSY counts when it stays.
    """
    tries = itertools.count(1)
    while True:
        try:
            return os.open(device, mode | os.O_EXCL | os.O_CLOEXEC, dir_fd=directory)
        except OSError as error:
            if error.errno != errno.EBUSY or next(tries) == _BUSY_TRIES:
                raise
        time.sleep(_BUSY_SECONDS)


def read(descriptor: int, device: str, offset_bytes: int, length_bytes: int) -> bytes:
    """pread(2); EIO where there are fewer bytes."""
    data = os.pread(descriptor, length_bytes, offset_bytes)
    if len(data) != length_bytes:
        raise OSError(errno.EIO, f"{len(data)} of {length_bytes} bytes at {offset_bytes}", device)
    return data


def write(descriptor: int, device: str, offset_bytes: int, data: bytes) -> None:
    """pwrite(2) of all of it."""
    written = os.pwrite(descriptor, data, offset_bytes)
    if written != len(data):
        raise OSError(errno.EIO, f"{written} of {len(data)} bytes at {offset_bytes}", device)


def zero_out(descriptor: int, device: str, offset_bytes: int, length_bytes: int) -> None:
    """BLKZEROOUT; nothing where the range is empty."""
    if length_bytes:
        span = struct.pack("=2Q", offset_bytes, length_bytes)
        try:
            fcntl.ioctl(descriptor, _BLKZEROOUT, bytearray(span))
        except OSError as error:
            raise OSError(error.errno, error.strerror, device) from error


class Opened:
    """A device that is kept open, so that lvm2 does not take it away; whoever opened it closes it.

    Several threads may use it at once.
    """

    def __init__(self, device: str, descriptor: int) -> None:
        self._device = device
        self._descriptor = descriptor

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """So many bytes; EIO where there are fewer."""
        return read(self._descriptor, self._device, offset_bytes, length_bytes)

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Write these; they are on the disk after `flush`."""
        write(self._descriptor, self._device, offset_bytes, data)

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        """Have a range read as zeroes (BLKZEROOUT)."""
        zero_out(self._descriptor, self._device, offset_bytes, length_bytes)

    def flush(self) -> None:
        """What was written is on the disk (fsync(2))."""
        os.fsync(self._descriptor)

    def forget(self, offset_bytes: int, length_bytes: int) -> None:
        """The kernel need not keep a range in memory: the workloads' pages are worth more."""
        os.posix_fadvise(self._descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)
