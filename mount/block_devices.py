"""Block and loop devices: the kernel's operations on them, and their state in sysfs(5)."""

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

from mount import block_io, calls, stacks
from mount.block_io import By, Opened, Reader
from mount.calls import Calls

# File with the kernel's I/O counters of each block device, and the field of the sectors written
# (Documentation/admin-guide/iostats.rst).
_STATISTICS = "/proc/diskstats"
_SECTORS_WRITTEN = 9
# Numbers that make the names of nodes in `_unmounted` unique among threads.
_numbers = itertools.count()


@functools.cache
def _unmounted() -> int:
    """A descriptor of an empty tmpfs that is mounted nowhere, made once for the process.

    A new tmpfs for each range that is zeroed would take longer than the zeroing itself.
    """
    context = calls.fsopen("tmpfs")
    with block_io.closing(context):
        calls.fsconfig(context, calls.CREATE)
        return calls.fsmount(context)


def attribute(path: str) -> str:
    """Read an attribute in sysfs, without its newline; empty for an absent attribute or object."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with block_io.closing(descriptor):
            # An attribute of sysfs has a page at most (Documentation/filesystems/sysfs.rst).
            return os.read(descriptor, 4096).decode().strip()
    except OSError:
        return ""


def written_sectors() -> Mapping[tuple[int, int], int]:
    """The sectors written to each block device since boot, by device number; empty at an error."""
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


# Numbers of ioctl(2) requests about loop devices, and their flags (<linux/loop.h>).
_LOOP_CLR_FD, _LOOP_GET_STATUS64, _LOOP_SET_CAPACITY = 0x4C01, 0x4C05, 0x4C07
_LOOP_CONFIGURE, _LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
_LO_FLAGS_READ_ONLY, _LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 1, 4, 16
# Structure loop_info64, and the structure loop_config around it.
_LOOP_INFO = struct.Struct("=5Q4I64s64s32s2Q")
_LOOP_CONFIG = struct.Struct(f"=2I{_LOOP_INFO.size}s64x")


@dataclass(frozen=True)
class LoopStatus:
    """The status of a loop device: the backing file's st_dev, st_ino and st_rdev, and flags.

    `backing_device` (st_rdev) is not zero if the backing file is a block device itself. A loop
    device that is `leaving` is detached once its last user closes it. `name` is a text of its
    creator's, up to 63 bytes.
    """

    device: int
    inode: int
    backing_device: int
    read_only: bool
    direct_io: bool
    leaving: bool = False
    name: str = ""


class LoopDevices:
    """Part of `mount.kernel.Kernel`: loop devices."""

    def loop_devices(self) -> list[str]:
        """The paths of all attached loop devices, sorted by number."""
        # os.listdir is used, as pathlib is slower: each NodeUnpublishVolume lists loop devices.
        loops = [name for name in os.listdir("/sys/block") if name.startswith("loop")]  # noqa: PTH208
        attached = [name for name in loops if os.access(f"/sys/block/{name}/loop", os.F_OK)]
        return [f"/dev/{name}" for name in sorted(attached, key=lambda name: int(name[4:]))]

    def loop_free(self) -> str:
        """LOOP_CTL_GET_FREE: the path of a free loop device, which others may attach first."""
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        with block_io.closing(control):
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
        """LOOP_CONFIGURE: attach `file` to a loop device.

        Raises OSError (EBUSY) if another process has attached the loop device meanwhile.

        `block_bytes` is the loop device's logical block size. 0 is the kernel's choice, which is
        512 over a block device, even one with larger blocks.
        """
        mode = os.O_RDONLY if read_only else os.O_RDWR
        flags = read_only * _LO_FLAGS_READ_ONLY | direct_io * _LO_FLAGS_DIRECT_IO
        called = os.fsencode(name)[:63]
        info = _LOOP_INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, called, b"", b"", 0, 0)
        backing = os.open(file, mode | os.O_CLOEXEC)
        with block_io.closing(backing):
            calls.ioctl(
                device, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(backing, block_bytes, info), mode
            )

    def loop_status(self, device: str) -> LoopStatus:
        """LOOP_GET_STATUS64: the status of a loop device.

        Raises OSError (ENXIO) if no file is attached to the device.
        """
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
        """LOOP_CLR_FD: detach a loop device; succeeds at once even if others have the device open.

        The kernel then detaches the device at their last close.
        """
        calls.ioctl(device, _LOOP_CLR_FD)

    def loop_set_capacity(self, device: str) -> None:
        """LOOP_SET_CAPACITY: give a loop device the present size of its backing file."""
        calls.ioctl(device, _LOOP_SET_CAPACITY)


# File with the devices and files that are used as swap.
_SWAPS = Path("/proc/swaps")

# Numbers of ioctl(2) requests about block devices (<linux/fs.h>).
_BLKROGET = calls.ioctl_number(0, 0x12, 94, 0)
_BLKGETSIZE64 = calls.ioctl_number(2, 0x12, 114, 8)
_BLKPBSZGET = calls.ioctl_number(0, 0x12, 123, 0)

# Size of a block, in bytes, that is read back as a sample, to check whether a disk zeroed a range.
SAMPLE_BYTES = 4096
# Contents that are written to sampled blocks before the range is zeroed: blocks that were zero
# before would prove nothing.
MARK = b"deleted data".ljust(SAMPLE_BYTES, b"\xff")

# Unit of a copy, in bytes. A unit that is zero is not copied. The unit is as large as the smallest
# chunk of a thin pool (lvmthin(7)).
_PIECE_BYTES = 64 << 10


def _asked(device: str, request: int, form: str) -> int:
    (number,) = struct.unpack(form, calls.ioctl(device, request, bytes(struct.calcsize(form))))
    return int(number)


@contextmanager
def _buffer(size_bytes: int) -> Iterator[tuple[mmap.mmap, memoryview]]:
    """Memory that begins at a page, as direct I/O requires, and a view of that memory."""
    with mmap.mmap(-1, size_bytes) as buffer, memoryview(buffer) as view:
        yield buffer, view


def _file_system_below(loop: str, path: str) -> int:
    """The magic number of the file system of a loop device's backing file. Raises OSError.

    `path` is the file's path in sysfs, which in this process's mounts may be that of another file,
    which is an OSError, too.
    """
    status, file = LoopDevices().loop_status(loop), os.stat(path)  # noqa: PTH116
    if (file.st_dev, file.st_ino) != (status.device, status.inode) or not stat.S_ISREG(
        file.st_mode
    ):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return calls.file_system_kind(path)


class BlockDevices(Calls):
    """Part of `mount.kernel.Kernel`: block devices, by the paths of their nodes."""

    def __init__(self, *, old_calls: bool = False) -> None:
        super().__init__(old_calls=old_calls)
        # Pairs of a disk and a method that left a range of that disk not zero.
        self._distrusted: set[tuple[str, By]] = set()

    def device_number(self, path: str) -> tuple[int, int]:
        """The (major, minor) of the block device whose node is at `path`.

        Raises OSError (ENOTBLK) for any other file.

        Symbolic links are followed.
        """
        status = os.stat(path)  # noqa: PTH116
        if not stat.S_ISBLK(status.st_mode):
            raise OSError(errno.ENOTBLK, os.strerror(errno.ENOTBLK), path)
        return os.major(status.st_rdev), os.minor(status.st_rdev)

    def device_size_bytes(self, device: str) -> int:
        """BLKGETSIZE64: the size of a block device in bytes."""
        return _asked(device, _BLKGETSIZE64, "=Q")

    def physical_block_bytes(self, device: str) -> int:
        """BLKPBSZGET: the unit in which the disk writes, in bytes: whole logical blocks."""
        return _asked(device, _BLKPBSZGET, "=I")

    def logical_block_bytes(self, device: str) -> int:
        """The smallest unit of I/O of a block device, 512 bytes or 4 KiB.

        Raises OSError (ENXIO) if sysfs does not have the size.

        The size is read from sysfs, without opening the device: a device that hangs may keep an
        open(2) waiting.
        """
        if size_bytes := stacks.logical_block_bytes(self._sysfs(device)):
            return size_bytes
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), device)

    def device_is_read_only(self, device: str) -> bool:
        """BLKROGET: whether a block device is read-only."""
        return bool(_asked(device, _BLKROGET, "=i"))

    def device_is_held(self, device: str) -> bool:
        """Whether a block device is mounted, or used by another driver (device-mapper, loop)."""
        try:
            # O_EXCL on a block device requests exclusive use, which mounts and drivers have
            # (open(2)).
            os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return True
            raise
        return False

    def device_partitions(self, device: str) -> list[str]:
        """The names of a disk's partitions, by sysfs, such as sda1 and sda2."""
        return sorted(path.parent.name for path in self._sysfs(device).glob("*/partition"))

    def device_holders(self, device: str) -> list[str]:
        """The names of the devices directly over a device, by sysfs, such as dm-0 and md1."""
        return sorted(path.name for path in self._sysfs(device).glob("holders/*"))

    def device_title(self, device: str) -> str:
        """The path of a device to show to people: in /dev/mapper for a device-mapper device."""
        name = attribute(str(self._sysfs(device) / "dm/name"))
        return f"/dev/mapper/{name}" if name else device

    def device_is_swap(self, device: str) -> bool:
        """Whether a block device is used as swap (/proc/swaps)."""
        number = self.device_number(device)
        for line in _SWAPS.read_text().splitlines()[1:]:
            # A swap file is no block device, and raises an error here.
            with suppress(OSError):
                if self.device_number(line.split()[0]) == number:
                    return True
        return False

    def signatures(self, device: str, length_bytes: int = 0) -> Mapping[str, str]:
        """All tags that libblkid finds on a device, or in its first `length_bytes`.

        See calls.signatures.
        """
        return calls.signatures(device, length_bytes=length_bytes)

    def superblock(self, device: str, fs_type: str) -> Mapping[str, str]:
        """The tags that libblkid finds of one file system on a device (calls.signatures)."""
        return calls.signatures(device, fs_type=fs_type)

    def stack(self, device: str) -> stacks.Stack:
        """The stack of devices below a device, by sysfs; without disks if sysfs cannot be read."""
        try:
            return stacks.read(self._sysfs(device))
        except OSError:
            return stacks.Stack(has_write_zeroes=False, is_plain=False)

    def discard_doubts(self, device: str) -> Mapping[str, str]:
        """The disks that may not read as zeroes after a discard (stacks.discard_doubts)."""
        return stacks.discard_doubts(self._sysfs(device), _file_system_below)

    def zeroing(self, device: str, stack: stacks.Stack | None = None) -> By:
        """The method to zero a device: `HOLE` if its whole stack accepts REQ_OP_WRITE_ZEROES.

        If the stack does not accept that request, the method is `ZEROES`.

        If a disk of the stack was seen not to zero by that request, zeroes are written as data:
        BLKZEROOUT would send the same request.
        """
        stack = stack or self.stack(device)
        if not stack.has_write_zeroes:
            return By.ZEROES
        return By.WRITES if self.is_distrusted(stack, By.HOLE) else By.HOLE

    def is_distrusted(self, stack: stacks.Stack, method: By) -> bool:
        """Whether a disk of the stack was seen not to zero by a method."""
        return any((disk, method) in self._distrusted for disk in stack.disks)

    def distrust(self, disks: Iterable[str], method: By) -> Sequence[str]:
        """Record that these disks must not be zeroed by a method again; return the new ones."""
        new_disks = sorted(disk for disk in disks if (disk, method) not in self._distrusted)
        self._distrusted.update((disk, method) for disk in new_disks)
        return new_disks

    def zero_out(
        self,
        device: str,
        offset_bytes: int,
        length_bytes: int,
        *,
        allow_in_use: bool = False,
        method: By | None = None,
    ) -> None:
        """Zero a range of a device, by the method of `zeroing` unless another is given.

        See block_io.zero_out. Raises OSError (EBUSY) for a device that is mounted or used by
        another driver. With `allow_in_use` such a device is zeroed, too, as is the device below a
        device of device-mapper.
        """
        method = method or self.zeroing(device)
        mode = os.O_WRONLY | (os.O_DIRECT if method.is_direct else 0)
        with self._writing(device, mode, allow_in_use=allow_in_use) as descriptor:
            block_io.zero_out(descriptor, device, offset_bytes, length_bytes, method)

    def mark(self, device: str, offsets: Iterable[int], *, allow_in_use: bool = False) -> None:
        """Overwrite with MARK each block of 4 KiB at `offsets` that is zero, past the page cache.

        A block that reads as zeroes later has been zeroed in between. Blocks that cannot be read or
        written are skipped. Raises OSError (EBUSY) as `zero_out` does.
        """
        with self._writing(
            device, os.O_RDWR | os.O_DIRECT, allow_in_use=allow_in_use
        ) as descriptor:
            opened, zeroes = Opened(device, descriptor), bytes(SAMPLE_BYTES)
            with _buffer(SAMPLE_BYTES) as (buffer, view):
                for offset in offsets:
                    with suppress(OSError):
                        opened.read_into(offset, view)
                        if buffer[:] == zeroes:
                            view[:] = MARK
                            opened.write(offset, view)

    def are_zero(self, device: str, offsets: Iterable[int], size_bytes: int = SAMPLE_BYTES) -> bool:
        """Whether all blocks at `offsets` can be read, past the page cache, and are zero."""
        zeroes = bytes(size_bytes)
        with self.opened(device) as opened, _buffer(size_bytes) as (buffer, view):
            for offset in offsets:
                try:
                    opened.read_into(offset, view)
                except OSError:
                    return False
                if buffer[:] != zeroes:
                    return False
        return True

    @contextmanager
    def _writing(self, device: str, mode: int, *, allow_in_use: bool) -> Iterator[int]:
        """Open a device for writing within the `with`, without notice by udev; yield a descriptor.

        udev would probe the device at the close. Where lvm2 is about to deactivate the volume, it
        would find the device open, and retry only 0.2 s later (retry_deactivation, lvm.conf(5)).
        """
        with self._unwatched(device) as (node, directory):
            try:
                descriptor = (
                    os.open(node, mode | os.O_CLOEXEC, dir_fd=directory)
                    if allow_in_use
                    else block_io.open_exclusively(node, directory, mode)
                )
            except OSError as error:
                raise OSError(error.errno, error.strerror, device) from error
            with block_io.closing(descriptor):
                yield descriptor

    def discard(self, device: str, offset_bytes: int, length_bytes: int) -> None:
        """BLKDISCARD: tell the disk that a range is unused; the contents are then undefined.

        Raises OSError: EBUSY for a device that is mounted or used by another driver, EOPNOTSUPP for
        a disk without this command.
        """
        descriptor = block_io.open_exclusively(device)
        with block_io.closing(descriptor):
            block_io.discard(descriptor, device, offset_bytes, length_bytes)

    def flush(self, device: str) -> None:
        """fsync(2): make all completed writes and zeroing survive a power failure.

        After zeroing, the zeroes may still be in the disk's volatile cache, or, for a loop device,
        in the page cache of its backing file.
        """
        # The device is opened for reading, as udev would probe it after the close of a writer.
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        with block_io.closing(descriptor):
            os.fsync(descriptor)

    def read(self, device: str, offset_bytes: int, length_bytes: int) -> bytes:
        """pread(2): read a range of a block device."""
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        with block_io.closing(descriptor):
            return block_io.read(descriptor, device, offset_bytes, length_bytes)

    def reader(self, device: str) -> AbstractContextManager[Reader]:
        """Keep a block device open for many reads that bypass the page cache."""
        return block_io.opened(device)

    def write(self, device: str, offset_bytes: int, data: bytes) -> None:
        """pwrite(2) and fsync(2) on a block device.

        Raises OSError (EBUSY) for a device that is mounted or used by another driver.
        """
        descriptor = block_io.open_exclusively(device)
        with block_io.closing(descriptor):
            block_io.write(descriptor, device, offset_bytes, data)
            os.fsync(descriptor)

    def copy(
        self, source: str, target: str, offset_bytes: int, length_bytes: int, *, blank: bool
    ) -> None:
        """Copy a range of one block device to the same offset of another, and flush the target.

        Ranges of 64 KiB that are zero are not copied: the target is zeroed there, or left alone if
        it is `blank`. Raises OSError (EBUSY) for a target that is mounted or used by another
        driver. The write is hidden from udev, which would probe the target after each range.
        """
        reading, method = os.open(source, os.O_RDONLY | os.O_CLOEXEC), self.zeroing(target)
        with (
            block_io.closing(reading),
            self._writing(target, os.O_WRONLY, allow_in_use=False) as writing,
        ):
            offset, end = offset_bytes, offset_bytes + length_bytes
            zeroes = (
                0  # The number of bytes directly before `at` that are zero and not written yet.
            )
            while offset < end:
                data = block_io.read(reading, source, offset, min(_PIECE_BYTES, end - offset))
                if data == bytes(len(data)):
                    zeroes += len(data)
                else:
                    if not blank:
                        block_io.zero_out(writing, target, offset - zeroes, zeroes, method)
                    block_io.write(writing, target, offset, data)
                    zeroes = 0
                offset += len(data)
            if not blank:
                block_io.zero_out(writing, target, end - zeroes, zeroes, method)
            os.fsync(writing)
            # Drop the pages of both devices from the page cache, in favour of the workloads' pages.
            for descriptor in (reading, writing):
                os.posix_fadvise(descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def opened(self, device: str, *, to_write: bool = False) -> Iterator[Opened]:
        """Open a device for the time of a `with` block; the end does not flush writes.

        For writing, raises OSError (EBUSY) if the device is mounted or used by another driver.
        """
        method = By.ZEROES
        if to_write:
            method = self.zeroing(device)
            descriptor = block_io.open_exclusively(device, mode=os.O_RDWR | os.O_DIRECT)
        else:
            descriptor = os.open(device, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        with block_io.closing(descriptor):
            yield Opened(device, descriptor, method)

    def _sysfs(self, device: str) -> Path:
        major, minor = self.device_number(device)
        return Path(f"/sys/dev/block/{major}:{minor}")

    @contextmanager
    def _unwatched(self, device: str) -> Iterator[tuple[str, int | None]]:
        """A node of a device that udev does not watch, as name and directory descriptor.

        udev watches the inodes of nodes in /dev (udev(7), OPTIONS+="watch"). So a further node is
        made in a file system that is mounted nowhere. Where this is impossible, such as before
        Linux 5.2, the result is the node in /dev and None.
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
