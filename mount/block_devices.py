"""Block and loop devices: the kernel's operations on them, and what sysfs(5) tells."""

import errno
import fcntl
import functools
import itertools
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mount import blocks, calls, stacks
from mount.blocks import By, Opened, Reader
from mount.calls import Calls

# What the kernel counted of each block device (Documentation/admin-guide/iostats.rst).
_STATISTICS = "/proc/diskstats"
_SECTORS_WRITTEN = 9
# Names of nodes in `_unmounted`, which several threads make at once.
_numbers = itertools.count()


@functools.cache
def _unmounted() -> int:
    """A directory in a file system that is mounted nowhere; it ends with the process.

    Making one for each piece that is zeroed would cost more than to zero it.
    """
    context = calls.fsopen("tmpfs")
    with blocks.closing(context):
        calls.fsconfig(context, calls.CREATE)
        return calls.fsmount(context)


def attribute(path: str) -> str:
    """An attribute in sysfs, without its newline; empty where it or its object is absent."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            # A page at most (Documentation/filesystems/sysfs.rst).
            return os.read(descriptor, 4096).decode().strip()
    except OSError:
        return ""


def written_sectors() -> Mapping[tuple[int, int], int]:
    """The sectors that were written to each block device, by its number; empty where not known."""
    try:
        text = Path(_STATISTICS).read_bytes()
    except OSError:
        return {}
    rows = (line.split(None, _SECTORS_WRITTEN + 1) for line in text.splitlines())
    return {
        (int(row[0]), int(row[1])): int(row[_SECTORS_WRITTEN])
        for row in rows
        if len(row) > _SECTORS_WRITTEN
    }


_LOOP_CLR_FD, _LOOP_GET_STATUS64, _LOOP_SET_CAPACITY = 0x4C01, 0x4C05, 0x4C07
_LOOP_CONFIGURE, _LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
_LO_FLAGS_READ_ONLY, _LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 1, 4, 16
# struct loop_info64, and struct loop_config around it.
_LOOP_INFO = struct.Struct("=5Q4I64s64s32s2Q")
_LOOP_CONFIG = struct.Struct(f"=2I{_LOOP_INFO.size}s64x")


@dataclass(frozen=True)
class LoopStatus:
    """What a loop device is attached to: st_dev, st_ino and st_rdev of the backing file.

    `backing_device` is not zero where the backing file is a block device itself. `leaving` says
    that it is detached as soon as its last user closes it. `name` is what its creator
    called it, up to 63 bytes.
    """

    device: int
    inode: int
    backing_device: int
    read_only: bool
    direct_io: bool
    leaving: bool = False
    name: str = ""


class LoopDevices:
    """The loop devices of `mount.kernel.Kernel`."""

    def loop_devices(self) -> list[str]:
        """Paths of the loop devices that are attached, by number."""
        # Each unpublishing asks, and pathlib takes longer than the kernel.
        loops = [name for name in os.listdir("/sys/block") if name.startswith("loop")]  # noqa: PTH208
        attached = [one for one in loops if os.access(f"/sys/block/{one}/loop", os.F_OK)]
        return [f"/dev/{name}" for name in sorted(attached, key=lambda one: int(one[4:]))]

    def loop_free(self) -> str:
        """LOOP_CTL_GET_FREE: the path of a loop device that is free just now."""
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        with blocks.closing(control):
            return f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"

    def loop_configure(
        self,
        device: str,
        file: str,
        *,
        read_only: bool,
        direct_io: bool,
        name: str,
        block_bytes: int = 0,
    ) -> None:
        """LOOP_CONFIGURE: attach `file` to the loop device. EBUSY if another was faster.

        `block_bytes` is the size of its logical blocks; 0 for the kernel's choice, which is 512
        over a block device, whatever that has.
        """
        mode = os.O_RDONLY if read_only else os.O_RDWR
        flags = read_only * _LO_FLAGS_READ_ONLY | direct_io * _LO_FLAGS_DIRECT_IO
        called = os.fsencode(name)[:63]
        info = _LOOP_INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, called, b"", b"", 0, 0)
        backing = os.open(file, mode | os.O_CLOEXEC)
        with blocks.closing(backing):
            calls.ioctl(
                device, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(backing, block_bytes, info), mode
            )

    def loop_status(self, device: str) -> LoopStatus:
        """LOOP_GET_STATUS64. ENXIO if nothing is attached."""
        fields = _LOOP_INFO.unpack(calls.ioctl(device, _LOOP_GET_STATUS64, bytes(_LOOP_INFO.size)))
        return LoopStatus(
            device=fields[0],
            inode=fields[1],
            backing_device=fields[2],
            read_only=bool(fields[8] & _LO_FLAGS_READ_ONLY),
            direct_io=bool(fields[8] & _LO_FLAGS_DIRECT_IO),
            leaving=bool(fields[8] & _LO_FLAGS_AUTOCLEAR),
            name=os.fsdecode(fields[9].rstrip(b"\0")),
        )

    def loop_clear(self, device: str) -> None:
        """LOOP_CLR_FD. The kernel answers 0 while others have it open, and detaches later."""
        calls.ioctl(device, _LOOP_CLR_FD)

    def loop_set_capacity(self, device: str) -> None:
        """LOOP_SET_CAPACITY: take over the backing file's present size."""
        calls.ioctl(device, _LOOP_SET_CAPACITY)


_SWAPS = Path("/proc/swaps")

_BLKROGET = calls.ioctl_number(0, 0x12, 94, 0)
_BLKGETSIZE64 = calls.ioctl_number(2, 0x12, 114, 8)
_BLKPBSZGET = calls.ioctl_number(0, 0x12, 123, 0)

# What is read of a disk to see whether it is zero, and put there to know that it is not.
SAMPLE_BYTES = 4096
MARK = b"deleted data".ljust(SAMPLE_BYTES, b"\xff")

# What is looked over for zeroes at once: the least chunk of a thin pool, lvmthin(7).
_PIECE_BYTES = 64 << 10


def _asked(device: str, request: int, form: str) -> int:
    (number,) = struct.unpack(form, calls.ioctl(device, request, bytes(struct.calcsize(form))))
    return int(number)


@contextmanager
def _buffer(size_bytes: int) -> Iterator[tuple[mmap.mmap, memoryview]]:
    """Memory that direct I/O reads into at once, and a view of it for that."""
    with mmap.mmap(-1, size_bytes) as buffer, memoryview(buffer) as place:
        yield buffer, place


def _file_system_below(loop: str, path: str) -> int:
    """The magic number of the file system of a loop device's file; OSError if that is not there.

    The path is that of sysfs, and may lead to another file in this process's mounts.
    """
    status, found = LoopDevices().loop_status(loop), os.stat(path)  # noqa: PTH116
    if (found.st_dev, found.st_ino) != (status.device, status.inode) or not stat.S_ISREG(
        found.st_mode
    ):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return calls.file_system_kind(path)


class BlockDevices(Calls):
    """The block devices of `mount.kernel.Kernel`, by the paths of their nodes."""

    def __init__(self, *, old_calls: bool = False) -> None:
        super().__init__(old_calls=old_calls)
        # Which ways of zeroing are not to be used on which disks.
        self._distrusted: set[tuple[str, By]] = set()

    def device_number(self, path: str) -> tuple[int, int]:
        """(major, minor) of the block device node at `path`, links followed; else ENOTBLK."""
        found = os.stat(path)  # noqa: PTH116
        if not stat.S_ISBLK(found.st_mode):
            raise OSError(errno.ENOTBLK, os.strerror(errno.ENOTBLK), path)
        return os.major(found.st_rdev), os.minor(found.st_rdev)

    def device_size_bytes(self, device: str) -> int:
        """BLKGETSIZE64."""
        return _asked(device, _BLKGETSIZE64, "=Q")

    def physical_block_bytes(self, device: str) -> int:
        """BLKPBSZGET: what the disk writes at once; a multiple of the logical block."""
        return _asked(device, _BLKPBSZGET, "=I")

    def logical_block_bytes(self, device: str) -> int:
        """The smallest piece that can be asked of it, 512 bytes or 4 KiB.

        By sysfs, which opens no device: one that hangs may keep an open waiting. ENXIO where sysfs
        does not show it.
        """
        if found := stacks.logical_block_bytes(self._sysfs(device)):
            return found
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), device)

    def device_is_read_only(self, device: str) -> bool:
        """BLKROGET."""
        return bool(_asked(device, _BLKROGET, "=i"))

    def device_is_held(self, device: str) -> bool:
        """Whether it is mounted, or another driver (device-mapper, loop) holds it."""
        try:
            # O_EXCL on a block device asks for the exclusive use that holders have: open(2).
            os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return True
            raise
        return False

    def device_partitions(self, device: str) -> list[str]:
        """The names of its partitions, by sysfs: sda1, sda2."""
        return sorted(path.parent.name for path in self._sysfs(device).glob("*/partition"))

    def device_holders(self, device: str) -> list[str]:
        """The names of the devices that are made of it, by sysfs: dm-0, md1."""
        return sorted(path.name for path in self._sysfs(device).glob("holders/*"))

    def device_title(self, device: str) -> str:
        """What people know a device by: its name in /dev/mapper, or its node."""
        name = attribute(str(self._sysfs(device) / "dm/name"))
        return f"/dev/mapper/{name}" if name else device

    def device_is_swap(self, device: str) -> bool:
        """Whether the kernel swaps to it (/proc/swaps)."""
        number = self.device_number(device)
        for line in _SWAPS.read_text().splitlines()[1:]:
            # A file that is swapped to is no block device.
            with suppress(OSError):
                if self.device_number(line.split()[0]) == number:
                    return True
        return False

    def signatures(self, device: str, length_bytes: int = 0) -> Mapping[str, str]:
        """Everything that libblkid finds on a device, or in its first bytes (calls.signatures)."""
        return calls.signatures(device, length_bytes=length_bytes)

    def superblock(self, device: str, fs_type: str) -> Mapping[str, str]:
        """What libblkid finds on a device of one file system (calls.signatures); else nothing."""
        return calls.signatures(device, fs_type=fs_type)

    def stack(self, device: str) -> stacks.Stack:
        """What is below it, by sysfs; empty where sysfs does not show it."""
        try:
            return stacks.read(self._sysfs(device))
        except OSError:
            return stacks.Stack(has_write_zeroes=False, is_plain=False)

    def discard_doubts(self, device: str) -> Mapping[str, str]:
        """Why it is not certain that a discard leaves zeroes, by disk (stacks.discard_doubts)."""
        return stacks.discard_doubts(self._sysfs(device), _file_system_below)

    def zeroing(self, device: str, stack: stacks.Stack | None = None) -> By:
        """How it is zeroed: by a hole only where all of its stack takes REQ_OP_WRITE_ZEROES.

        Where the disks were seen not to zero so, BLKZEROOUT would have them do the same.
        """
        stack = stack or self.stack(device)
        if not stack.has_write_zeroes:
            return By.ZEROES
        return By.WRITES if self.is_distrusted(stack, By.HOLE) else By.HOLE

    def is_distrusted(self, stack: stacks.Stack, by: By) -> bool:
        """Whether a disk below is not to be zeroed in that way."""
        return any((disk, by) in self._distrusted for disk in stack.disks)

    def distrust(self, disks: Iterable[str], by: By) -> Sequence[str]:
        """Not zero these disks in that way, as long as this process runs; returns the new ones."""
        new = sorted(one for one in disks if (one, by) not in self._distrusted)
        self._distrusted.update((one, by) for one in new)
        return new

    def zero_out(
        self,
        device: str,
        offset_bytes: int,
        length_bytes: int,
        *,
        held: bool = False,
        by: By | None = None,
    ) -> None:
        """The range reads as zeroes afterwards, by `zeroing` unless another way is given.

        See blocks.zero_out. EBUSY while it is mounted or held; with `held` also where the kernel
        holds it, as device-mapper does what a device stands on.
        """
        by = by or self.zeroing(device)
        mode = os.O_WRONLY | (os.O_DIRECT if by.is_direct else 0)
        with self._writing(device, mode, held=held) as descriptor:
            blocks.zero_out(descriptor, device, offset_bytes, length_bytes, by)

    def mark(self, device: str, offsets: Iterable[int], *, held: bool = False) -> None:
        """Overwrite those of these blocks of 4 KiB that are zero, past the page cache.

        What then reads as zeroes was zeroed since. A block that cannot be read or written is left
        as it is. EBUSY as above.
        """
        with self._writing(device, os.O_RDWR | os.O_DIRECT, held=held) as descriptor:
            opened, zeroes = Opened(device, descriptor), bytes(SAMPLE_BYTES)
            with _buffer(SAMPLE_BYTES) as (buffer, place):
                for offset in offsets:
                    with suppress(OSError):
                        opened.read_into(offset, place)
                        if buffer[:] == zeroes:
                            place[:] = MARK
                            opened.write(offset, place)

    def are_zero(self, device: str, offsets: Iterable[int], size_bytes: int = SAMPLE_BYTES) -> bool:
        """Whether blocks of that size can be read, past the page cache, and are zero."""
        zeroes = bytes(size_bytes)
        with self.opened(device) as opened, _buffer(size_bytes) as (buffer, place):
            for offset in offsets:
                try:
                    opened.read_into(offset, place)
                except OSError:
                    return False
                if buffer[:] != zeroes:
                    return False
        return True

    @contextmanager
    def _writing(self, device: str, mode: int, *, held: bool) -> Iterator[int]:
        """A descriptor of a device for writing.

        udev does not come to know: it would have a look at what is about to be removed, and lvm2,
        which meets that look, tries again 0.2 s later only (retry_deactivation, lvm.conf(5)).
        """
        with self._unwatched(device) as (node, directory):
            try:
                descriptor = (
                    os.open(node, mode | os.O_CLOEXEC, dir_fd=directory)
                    if held
                    else blocks.open_exclusively(node, directory, mode)
                )
            except OSError as error:
                raise OSError(error.errno, error.strerror, device) from error
            with blocks.closing(descriptor):
                yield descriptor

    def discard(self, device: str, offset_bytes: int, length_bytes: int) -> None:
        """BLKDISCARD: the disk may forget the range; reads there are undefined. EBUSY as above.

        EOPNOTSUPP where the disk does not know it.
        """
        descriptor = blocks.open_exclusively(device)
        with blocks.closing(descriptor):
            blocks.discard(descriptor, device, offset_bytes, length_bytes)

    def flush(self, device: str) -> None:
        """fsync(2): what was written or zeroed stays so when the power fails.

        Zeroing returns while that may be in the disk's volatile cache, or, under a loop device, in
        the memory of the file's own file system.
        """
        # Not to write by: its close would have udev look at the device once more.
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            os.fsync(descriptor)

    def read(self, device: str, offset_bytes: int, length_bytes: int) -> bytes:
        """pread(2) of a part of a block device."""
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            return blocks.read(descriptor, device, offset_bytes, length_bytes)

    def reader(self, device: str) -> AbstractContextManager[Reader]:
        """A block device to be read in many pieces, past the page cache, and open meanwhile."""
        return blocks.opened(device)

    def write(self, device: str, offset_bytes: int, data: bytes) -> None:
        """pwrite(2) on a block device, and fsync(2). EBUSY while it is mounted or held."""
        descriptor = blocks.open_exclusively(device)
        with blocks.closing(descriptor):
            blocks.write(descriptor, device, offset_bytes, data)
            os.fsync(descriptor)

    def copy(
        self, source: str, target: str, offset_bytes: int, length_bytes: int, *, blank: bool
    ) -> None:
        """Copy a part of one block device to the same place on another; it is on the disk then.

        Where the source has zeroes nothing is written: the target is zeroed there, or left alone
        where it is `blank`. EBUSY while the target is mounted or held. udev does not come to know,
        as with `zero_out`: it would look at the target after each part.
        """
        reading, by = os.open(source, os.O_RDONLY | os.O_CLOEXEC), self.zeroing(target)
        with blocks.closing(reading), self._writing(target, os.O_WRONLY, held=False) as writing:
            at, end = offset_bytes, offset_bytes + length_bytes
            zeroes = 0  # so many bytes before `at`
            while at < end:
                data = blocks.read(reading, source, at, min(_PIECE_BYTES, end - at))
                if data == bytes(len(data)):
                    zeroes += len(data)
                else:
                    if not blank:
                        blocks.zero_out(writing, target, at - zeroes, zeroes, by)
                    blocks.write(writing, target, at, data)
                    zeroes = 0
                at += len(data)
            if not blank:
                blocks.zero_out(writing, target, end - zeroes, zeroes, by)
            os.fsync(writing)
            # Neither is read again soon; the workloads' pages are worth more.
            for descriptor in (reading, writing):
                os.posix_fadvise(descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def opened(self, device: str, *, to_write: bool = False) -> Iterator[Opened]:
        """Keep a device open inside; for writing, EBUSY where it is mounted or held.

        What is written by it is not flushed at the end.
        """
        by = By.ZEROES
        if to_write:
            by = self.zeroing(device)
            descriptor = blocks.open_exclusively(device, mode=os.O_RDWR | os.O_DIRECT)
        else:
            descriptor = os.open(device, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            yield Opened(device, descriptor, by)

    def _sysfs(self, device: str) -> Path:
        major, minor = self.device_number(device)
        return Path(f"/sys/dev/block/{major}:{minor}")

    @contextmanager
    def _unwatched(self, device: str) -> Iterator[tuple[str, int | None]]:
        """Another node of a device, in a file system that is mounted nowhere, and its directory.

        udev watches the nodes in /dev (udev(7), OPTIONS+="watch"), each an inode. Where there can
        be no other, such as before Linux 5.2, it is the node itself.
        """
        name = f"node{next(_numbers)}"
        try:
            self._new_calls()
            tree = _unmounted()
            os.mknod(name, stat.S_IFBLK | 0o600, Path(device).stat().st_rdev, dir_fd=tree)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            yield device, None
            return
        try:
            yield name, tree
        finally:
            os.unlink(name, dir_fd=tree)
