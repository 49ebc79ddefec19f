"""Block devices by descriptors: open, read past the page cache, write, zero."""

import enum
import errno
import fcntl
import itertools
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mount import calls

# <linux/fs.h>, by <asm-generic/ioctl.h>.
_BLKDISCARD, _BLKZEROOUT = 0x1277, 0x127F

# What direct I/O is in whole numbers of, on any disk (open(2), O_DIRECT).
_BLOCK_BYTES = 4096
# How often a device that is busy is tried again, and how long after.
_BUSY_TRIES = 50
_BUSY_SECONDS = 0.1

Bytes = bytes | memoryview


class closing:  # noqa: N801 - as contextlib.closing
    """Close a descriptor in the end. Not by a generator: a call opens some twenty."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def open_exclusively(device: str, directory: int | None = None, mode: int = os.O_WRONLY) -> int:
    """Open a device for writing that is neither mounted nor held; else EBUSY (open(2)).

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
    _require(len(data), length_bytes, offset_bytes, device)
    return data


def write(descriptor: int, device: str, offset_bytes: int, data: Bytes) -> None:
    """pwrite(2) of all of it."""
    written = os.pwrite(descriptor, data, offset_bytes)
    _require(written, len(data), offset_bytes, device)


def _require(done_bytes: int, length_bytes: int, offset_bytes: int, device: str) -> None:
    if done_bytes != length_bytes:
        raise OSError(errno.EIO, f"{done_bytes} of {length_bytes} bytes at {offset_bytes}", device)


class By(enum.Enum):
    """How a range of a block device is made to read as zeroes."""

    # BLKDISCARD: what is read afterwards is for the device to say (mount.stacks).
    DISCARD = "a discard"
    # fallocate(2), FALLOC_FL_PUNCH_HOLE: the device zeroes, and may unmap.
    HOLE = "write zeroes"
    # BLKZEROOUT: the device zeroes without unmapping, or the kernel writes zeroes.
    ZEROES = "zeroes written by the kernel"
    # Zeroes written like any data.
    WRITES = "zeroes written as data"

    @property
    def is_proved(self) -> bool:
        """Whether zeroes are certain where it succeeds; else the range is to be read back."""
        return self in (By.ZEROES, By.WRITES)

    @property
    def is_direct(self) -> bool:
        """Whether its descriptor is for direct I/O, past the page cache."""
        return self is By.WRITES


def zero_out(descriptor: int, device: str, offset_bytes: int, length_bytes: int, by: By) -> None:
    """Have a range of a block device read as zeroes; nothing where the range is empty.

    BLKZEROOUT follows where a hole or a discard fails. Each drops the range from the page cache,
    and is on the disk after fsync(2). By writes, the range is whole logical blocks if the
    descriptor is for direct I/O.
    """
    if not length_bytes:
        return
    if by is By.WRITES:
        _write_zeroes(descriptor, device, offset_bytes, length_bytes)
        return
    # Of a file the hole would be made whatever it is.
    if stat.S_ISBLK(os.fstat(descriptor).st_mode) and by is not By.ZEROES:
        ask = calls.punch_hole if by is By.HOLE else discard
        with suppress(OSError):
            ask(descriptor, device, offset_bytes, length_bytes)
            return
    _ask(_BLKZEROOUT, descriptor, device, offset_bytes, length_bytes)


def discard(descriptor: int, device: str, offset_bytes: int, length_bytes: int) -> None:
    """BLKDISCARD: the disk may forget the range; reads there are undefined.

    EOPNOTSUPP where the disk does not know it.
    """
    _ask(_BLKDISCARD, descriptor, device, offset_bytes, length_bytes)


def _ask(request: int, descriptor: int, device: str, offset_bytes: int, length_bytes: int) -> None:
    span = struct.pack("=2Q", offset_bytes, length_bytes)
    try:
        fcntl.ioctl(descriptor, request, bytearray(span))
    except OSError as error:
        raise OSError(error.errno, error.strerror, device) from error


# One request of most disks (max_sectors_kb in sysfs), in memory that no one writes to.
_ZEROES = memoryview(mmap.mmap(-1, 1 << 20))


def _write_zeroes(descriptor: int, device: str, offset_bytes: int, length_bytes: int) -> None:
    end = offset_bytes + length_bytes
    for at in range(offset_bytes, end, len(_ZEROES)):
        write(descriptor, device, at, _ZEROES[: end - at])


class Opened:
    """A device that is kept open, so that lvm2 does not deactivate it; its opener closes it.

    Several threads may use it at once. Past the page cache (O_DIRECT): the kernel copies nothing,
    and the workloads' pages stay where they are.
    """

    def __init__(self, device: str, descriptor: int, by: By = By.ZEROES) -> None:
        self._device = device
        self._descriptor = descriptor
        self._by = by
        self._odd = threading.Lock()

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """So many bytes; EIO where there are fewer."""
        found = mmap.mmap(-1, length_bytes)
        self.read_into(offset_bytes, memoryview(found))
        return found[:]

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        """Fill a place in memory; EIO where there are fewer bytes.

        Read at once where it begins at a page of memory, as an mmap does, and is whole blocks.
        """
        try:
            found = os.preadv(self._descriptor, [place], offset_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            begun = offset_bytes % _BLOCK_BYTES
            part = self._around(offset_bytes, len(place))[begun : begun + len(place)]
            found = len(part)
            place[:found] = part
        _require(found, len(place), offset_bytes, self._device)

    def write(self, offset_bytes: int, data: Bytes) -> None:
        """Write these; they are on the disk after `flush`. At once under the same conditions."""
        try:
            write(self._descriptor, self._device, offset_bytes, data)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            begun = offset_bytes % _BLOCK_BYTES
            # Two of these may have an end in one block; what is whole blocks has none in another's.
            with self._odd:
                around = self._around(offset_bytes, len(data))
                if begun + len(data) > len(around):
                    raise
                around[begun : begun + len(data)] = data
                write(self._descriptor, self._device, offset_bytes - begun, around)

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        """Have a range read as zeroes, as `zero_out` does."""
        zero_out(self._descriptor, self._device, offset_bytes, length_bytes, self._by)

    def flush(self) -> None:
        """What was written is on the disk (fsync(2))."""
        os.fsync(self._descriptor)

    def _around(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """The whole blocks that a range lies in, as far as the device goes."""
        begun = offset_bytes % _BLOCK_BYTES
        blocks = -(-(begun + length_bytes) // _BLOCK_BYTES)
        found = mmap.mmap(-1, blocks * _BLOCK_BYTES)
        return memoryview(found)[: os.preadv(self._descriptor, [found], offset_bytes - begun)]


# Large enough to keep a disk at work, small enough that many may read at once. Of more than 256
# pages the kernel puts what a snapshot's chunks part a read into together again before a disk has
# it (block/fops.c: blk_start_plug), and that is most of what reading a snapshot costs.
PIECE_BYTES = 2 << 20


class Reader:
    """A device, or an image of one, kept open for reads past the page cache by one thread.

    Past it, for lvm2 and the kernel's snapshots write directly, and the kernel does not drop after
    such a write what a reader had it cache meanwhile (generic_file_direct_write(), mm/filemap.c).
    What a process writes there through the page cache is written back before a read.
    """

    def __init__(self, device: str, descriptor: int) -> None:
        self.device = device
        self._descriptor = descriptor
        self._buffer = mmap.mmap(-1, PIECE_BYTES)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range; EIO where the device ends within it. Raises OSError."""
        data = self.read_to_end(offset_bytes, length_bytes)
        _require(len(data), length_bytes, offset_bytes, self.device)
        return data

    def read_to_end(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range as far as the device goes. Raises OSError."""
        before = offset_bytes % _BLOCK_BYTES
        whole = -(-(before + length_bytes) // _BLOCK_BYTES) * _BLOCK_BYTES
        if whole > len(self._buffer):
            self._buffer = mmap.mmap(-1, whole)
        with memoryview(self._buffer) as view, view[:whole] as part:
            found = os.preadv(self._descriptor, [part], offset_bytes - before)
        return self._buffer[before : min(found, before + length_bytes)]


@contextmanager
def opened(device: str) -> Iterator[Reader]:
    """Open a device for direct reads; udev does not see it, for nothing is written. OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(device, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A file whose file system has no direct I/O, such as tmpfs.
        descriptor = os.open(device, flags)
    with closing(descriptor):
        yield Reader(device, descriptor)
