"""Open block devices by their descriptors: read past the page cache, write, zero."""

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

# Ioctl numbers of <linux/fs.h>.
_BLKDISCARD, _BLKZEROOUT = 0x1277, 0x127F

# Unit of direct I/O that suits all disks, in bytes (open(2), O_DIRECT).
_BLOCK_BYTES = 4096
# Number of attempts to open a busy device, and the pause between them, in seconds.
_BUSY_TRIES = 50
_BUSY_SECONDS = 0.1

# Type of the data of a write.
Bytes = bytes | memoryview


class closing:  # noqa: N801 - as contextlib.closing
    """Context manager that closes a descriptor.

    It is a class and not a generator, as a class is faster: each RPC opens some twenty
    descriptors.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def open_exclusively(device: str, directory: int | None = None, mode: int = os.O_WRONLY) -> int:
    """Open a device for writing, unless the device is mounted or used by another driver (open(2)).

    Raises OSError (EBUSY) for such a device, if it stays busy for five seconds. Between a fork and
    its exec, a child of this process has all of this process's descriptors open, and keeps the
    device busy for that moment, which is long on a busy node.
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
    """Read a whole range (pread(2)). Raises OSError (EIO) if the device ends within the range."""
    data = os.pread(descriptor, length_bytes, offset_bytes)
    _require(len(data), length_bytes, offset_bytes, device)
    return data


def write(descriptor: int, device: str, offset_bytes: int, data: Bytes) -> None:
    """Write all data (pwrite(2)). Raises OSError (EIO) if the kernel wrote less."""
    written = os.pwrite(descriptor, data, offset_bytes)
    _require(written, len(data), offset_bytes, device)


def _require(done_bytes: int, length_bytes: int, offset_bytes: int, device: str) -> None:
    if done_bytes != length_bytes:
        raise OSError(errno.EIO, f"{done_bytes} of {length_bytes} bytes at {offset_bytes}", device)


class By(enum.Enum):
    """Methods to zero a range of a block device."""

    # BLKDISCARD: the device decides what the range reads as afterwards (mount.stacks).
    DISCARD = "a discard"
    # fallocate(2) with FALLOC_FL_PUNCH_HOLE: the device zeroes the range, and may unmap it.
    HOLE = "write zeroes"
    # BLKZEROOUT: the device zeroes the range without unmapping, or the kernel writes zeroes.
    ZEROES = "zeroes written by the kernel"
    # Zeroes that are written like any data.
    WRITES = "zeroes written as data"

    @property
    def is_proved(self) -> bool:
        """Whether the success of the method proves zeroes; otherwise the range is read back."""
        return self in (By.ZEROES, By.WRITES)

    @property
    def is_direct(self) -> bool:
        """Whether the method needs a descriptor for direct I/O, past the page cache."""
        return self is By.WRITES


def zero_out(
    descriptor: int, device: str, offset_bytes: int, length_bytes: int, method: By
) -> None:
    """Zero a range of a block device by a method; an empty range is allowed.

    Where a discard or a hole fails, BLKZEROOUT follows. Each method drops the range from the page
    cache. The zeroes are durable after fsync(2). For `WRITES` by a descriptor for direct I/O, the
    range must be whole logical blocks.
    """
    if not length_bytes:
        return
    if method is By.WRITES:
        _write_zeroes(descriptor, device, offset_bytes, length_bytes)
        return
    # fallocate(2) would punch a hole into any regular file; BLKZEROOUT fails for a file.
    if stat.S_ISBLK(os.fstat(descriptor).st_mode) and method is not By.ZEROES:
        ask = calls.punch_hole if method is By.HOLE else discard
        with suppress(OSError):
            ask(descriptor, device, offset_bytes, length_bytes)
            return
    _ask(_BLKZEROOUT, descriptor, device, offset_bytes, length_bytes)


def discard(descriptor: int, device: str, offset_bytes: int, length_bytes: int) -> None:
    """BLKDISCARD: tell the disk that a range is unused; the contents are then undefined.

    Raises OSError (EOPNOTSUPP) for a disk without this command.
    """
    _ask(_BLKDISCARD, descriptor, device, offset_bytes, length_bytes)


def _ask(request: int, descriptor: int, device: str, offset_bytes: int, length_bytes: int) -> None:
    span = struct.pack("=2Q", offset_bytes, length_bytes)
    try:
        fcntl.ioctl(descriptor, request, bytearray(span))
    except OSError as error:
        raise OSError(error.errno, error.strerror, device) from error


# Zeroes for a single write, which is one request of most disks (max_sectors_kb in sysfs).
_ZEROES = memoryview(mmap.mmap(-1, 1 << 20))


def _write_zeroes(descriptor: int, device: str, offset_bytes: int, length_bytes: int) -> None:
    end = offset_bytes + length_bytes
    for offset in range(offset_bytes, end, len(_ZEROES)):
        write(descriptor, device, offset, _ZEROES[: end - offset])


class Opened:
    """An open device for reads and writes that bypass the page cache (O_DIRECT).

    lvm2 cannot deactivate the device while it is open; the opener closes it. Several threads may
    use an object at once. Direct I/O copies nothing in memory, and leaves the workloads' pages in
    the page cache.
    """

    def __init__(self, device: str, descriptor: int, method: By = By.ZEROES) -> None:
        self._device = device
        self._descriptor = descriptor
        self._method = method
        self._odd = threading.Lock()

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range. Raises OSError (EIO) if the device ends within the range."""
        buffer = mmap.mmap(-1, length_bytes)
        self.read_into(offset_bytes, memoryview(buffer))
        return buffer[:]

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        """Read a range into memory. Raises OSError (EIO) if the device ends within the range.

        A range of whole blocks into memory that begins at a page, such as an mmap, takes one
        read(2); any other range takes a buffer as well.
        """
        try:
            done_bytes = os.preadv(self._descriptor, [target], offset_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            start = offset_bytes % _BLOCK_BYTES
            part = self._read_blocks_around(offset_bytes, len(target))[start : start + len(target)]
            done_bytes = len(part)
            target[:done_bytes] = part
        _require(done_bytes, len(target), offset_bytes, self._device)

    def write(self, offset_bytes: int, data: Bytes) -> None:
        """Write data at an offset; the data are durable after `flush`.

        Data of whole blocks, in memory that begins at a page, take one write(2). Any other data
        take a read of the blocks around them first.
        """
        try:
            write(self._descriptor, self._device, offset_bytes, data)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            start = offset_bytes % _BLOCK_BYTES
            # Two threads may write data that end in the same block, so one thread waits here. Data
            # of whole blocks share no block with other data, and need not wait.
            with self._odd:
                around = self._read_blocks_around(offset_bytes, len(data))
                if start + len(data) > len(around):
                    raise
                around[start : start + len(data)] = data
                write(self._descriptor, self._device, offset_bytes - start, around)

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        """Zero a range, by the method that was chosen when the device was opened."""
        zero_out(self._descriptor, self._device, offset_bytes, length_bytes, self._method)

    def flush(self) -> None:
        """Make completed writes durable (fsync(2))."""
        os.fsync(self._descriptor)

    def _read_blocks_around(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Read the whole blocks around a range, up to the end of the device."""
        start = offset_bytes % _BLOCK_BYTES
        blocks = -(-(start + length_bytes) // _BLOCK_BYTES)
        buffer = mmap.mmap(-1, blocks * _BLOCK_BYTES)
        return memoryview(buffer)[: os.preadv(self._descriptor, [buffer], offset_bytes - start)]


# Size of the reads of a device, in bytes: large enough to keep a disk busy, small enough for
# many readers at once. A read of a snapshot is split at its chunks; for reads of more than 256
# pages the kernel merges the parts again before they reach the disk (blk_start_plug, block/fops.c),
# which saves most of the time of reading a snapshot.
PIECE_BYTES = 2 << 20


class Reader:
    """An open device, or image of a device, for reads by one thread that bypass the page cache.

    The page cache may have stale data: lvm2 and the kernel's snapshots write directly to the disk,
    and a page that is cached during such a write stays (generic_file_direct_write(),
    mm/filemap.c). Data that a process has written through the page cache are written back before a
    direct read.
    """

    def __init__(self, device: str, descriptor: int) -> None:
        self.device = device
        self._descriptor = descriptor
        self._buffer = mmap.mmap(-1, PIECE_BYTES)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range. Raises OSError (EIO) if the device ends within the range."""
        data = self.read_to_end(offset_bytes, length_bytes)
        _require(len(data), length_bytes, offset_bytes, self.device)
        return data

    def read_to_end(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range, or the part of the range before the end of the device. Raises OSError."""
        leading_bytes = offset_bytes % _BLOCK_BYTES
        whole_bytes = -(-(leading_bytes + length_bytes) // _BLOCK_BYTES) * _BLOCK_BYTES
        if whole_bytes > len(self._buffer):
            self._buffer = mmap.mmap(-1, whole_bytes)
        with memoryview(self._buffer) as view, view[:whole_bytes] as part:
            read_bytes = os.preadv(self._descriptor, [part], offset_bytes - leading_bytes)
        return self._buffer[leading_bytes : min(read_bytes, leading_bytes + length_bytes)]


@contextmanager
def opened(device: str) -> Iterator[Reader]:
    """Open a device for direct reads, for the time of a `with` block. Raises OSError.

    udev does not react, as it probes a device only after a writer has closed the device.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(device, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Open without O_DIRECT: the device is a file in a file system without direct I/O, such as
        # tmpfs.
        descriptor = os.open(device, flags)
    with closing(descriptor):
        yield Reader(device, descriptor)
