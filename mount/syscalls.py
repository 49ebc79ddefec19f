"""The kernel's mount, block and loop operations.

`Kernel` is the seam to the kernel: every method is one operation, starts no process, and raises
OSError with the kernel's errno and the paths. Tests put a stateful fake in its place, and a switch
that fails at the n-th call can wrap it.

Numbers are from the kernel's headers <linux/mount.h>, <linux/fs.h>, <linux/loop.h>,
<linux/btrfs.h>, fs/ext4/ext4.h and fs/xfs/libxfs/xfs_fs.h, for the architectures with the generic
ioctl encoding (x86, arm, riscv, s390). System calls from 424 on have one number on all of these.
"""

import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mount import blocks, libblkid, reading
from mount.blocks import Opened
from mount.reading import Reader

_SWAPS = Path("/proc/swaps")
_FILE_SYSTEMS = Path("/proc/filesystems")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS = 2, 4
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_UMOUNT_NOFOLLOW = 8

_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_PRIVATE = 1, 32, 4096, 1 << 18
_ATTR_ATIME = 0x70

# Per-mount attributes by the words of /proc/self/mountinfo: MOUNT_ATTR_*, MS_*.
ATTRIBUTES: Final = {
    "ro": (0x1, 1),
    "nosuid": (0x2, 2),
    "nodev": (0x4, 4),
    "noexec": (0x8, 8),
    "relatime": (0x0, 1 << 21),
    "noatime": (0x10, 1024),
    "strictatime": (0x20, 1 << 24),
    "nodiratime": (0x80, 2048),
    "nosymfollow": (0x200000, 256),
}
_ATIME_WORDS = {"relatime", "noatime", "strictatime"}
# Superblock flags for mount(2); the new calls take them by name.
_SUPERBLOCK_MS = {"ro": 1, "sync": 16, "mand": 64, "dirsync": 128, "lazytime": 1 << 25}
# What statvfs(3) reports and a bind remount would otherwise clear. ST_* and MS_* agree on all but
# the last, ST_NOSYMFOLLOW of <linux/statfs.h>.
_KEPT_BY_REMOUNT = 1 | 2 | 4 | 8 | 1024 | 2048
_ST_NOSYMFOLLOW, _MS_NOSYMFOLLOW = 0x2000, 256


def _ioc(direction: int, kind: int, number: int, size: int) -> int:
    """An ioctl number by <asm-generic/ioctl.h>; direction is 0 none, 1 write, 2 read, 3 both."""
    return direction << 30 | size << 16 | kind << 8 | number


_BLKROGET = _ioc(0, 0x12, 94, 0)
_BLKGETSIZE64 = _ioc(2, 0x12, 114, 8)
_BLKSSZGET = _ioc(0, 0x12, 104, 0)
_BLKPBSZGET = _ioc(0, 0x12, 123, 0)
_BLKDISCARD = _ioc(0, 0x12, 119, 0)
_EXT4_RESIZE_FS = _ioc(1, ord("f"), 16, 8)
# struct xfs_fsop_geom_v1: eight u32, four u64, a uuid, seven 32-bit fields, padded to 112.
_XFS_GEOMETRY = struct.Struct("=8I4Q16s7I4x")
_XFS_FSGEOMETRY_V1 = _ioc(2, ord("X"), 100, _XFS_GEOMETRY.size)
# struct xfs_growfs_data: u64 newblocks, u32 imaxpct, padded to 16.
_XFS_GROWFS = struct.Struct("=QI4x")
_XFS_FSGROWFSDATA = _ioc(1, ord("X"), 110, _XFS_GROWFS.size)
# struct btrfs_ioctl_vol_args: s64 fd, char name[4088].
_BTRFS_VOL_ARGS = struct.Struct("=q4088s")
_BTRFS_SYNC = _ioc(0, 0x94, 8, 0)
_BTRFS_RESIZE = _ioc(1, 0x94, 3, _BTRFS_VOL_ARGS.size)

_LOOP_CLR_FD, _LOOP_GET_STATUS64, _LOOP_SET_CAPACITY = 0x4C01, 0x4C05, 0x4C07
_LOOP_CONFIGURE, _LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
_LO_FLAGS_READ_ONLY, _LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 1, 4, 16
# struct loop_info64, and struct loop_config around it.
_LOOP_INFO = struct.Struct("=5Q4I64s64s32s2Q")
_LOOP_CONFIG = struct.Struct(f"=2I{_LOOP_INFO.size}s64x")


@dataclass(frozen=True)
class XfsGeometry:
    """The part of an xfs's geometry that growing it needs."""

    block_size_bytes: int
    blocks: int
    max_inode_percent: int


# What is looked over for zeroes at once: the least chunk of a thin pool, lvmthin(7).
_PIECE_BYTES = 64 << 10


@dataclass(frozen=True)
class LoopStatus:
    """What a loop device is attached to: st_dev, st_ino and st_rdev of the backing file.

    `backing_device` is not zero where the backing file is a block device itself. `leaving` says
    that it is detached as soon as its last user closes it. `name` is whatever whoever attached it
    called it, up to 63 bytes.
    """

    device: int
    inode: int
    backing_device: int
    read_only: bool
    direct_io: bool
    leaving: bool = False
    name: str = ""


class Kernel:
    """The running kernel.

    Whatever looks at, makes, removes or mounts something at a path follows no symbolic link on the
    way: a path that was resolved before has none, so one that is met was put there since (ELOOP).
    """

    def __init__(self, *, old_calls: bool = False) -> None:
        # True takes the way of kernels before 5.12, so that it can be tested on newer ones.
        self._old_calls = old_calls

    # The mount table and paths

    def mountinfo(self) -> str:
        """/proc/self/mountinfo, bytes that are not UTF-8 as surrogates."""
        # Not read_text: it would turn a carriage return in a path into the end of a line.
        return Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape")

    def lstat(self, path: str) -> os.stat_result:
        """What lies at `path` itself, mounts applied, a symbolic link not followed."""
        with self._parent(path) as (parent, name):
            return os.stat(name, dir_fd=parent, follow_symlinks=False)

    def real_path(self, path: str) -> str:
        """`path` with every symbolic link resolved; parts that do not exist are kept."""
        return os.path.realpath(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        """How large and how full the file system at `path` is (statvfs(3))."""
        with self._at(path) as place:
            return os.statvfs(place)

    def error_counters(self, fs_type: str, device: tuple[int, int]) -> dict[str, int]:
        """What the file system on a block device has counted of errors, by sysfs; xfs counts none.

        ext4: Documentation/ABI/testing/sysfs-fs-ext4; btrfs: btrfs(5), since Linux 5.14.
        """
        counted: dict[str, int] = {}
        if fs_type == "ext4":
            with suppress(FileNotFoundError):
                errors = Path(f"/sys/fs/ext4/{_kernel_name(device)}/errors_count")
                counted["errors_count"] = int(errors.read_text())
        if fs_type == "btrfs":
            node = _kernel_name(device)
            for used in Path("/sys/fs/btrfs").glob(f"*/devices/{node}"):
                for stats in used.parent.parent.glob("devinfo/*/error_stats"):
                    lines = (line.split() for line in stats.read_text().splitlines())
                    counted |= {name: int(count) for name, count in lines}
        return counted

    def make_directory(self, path: str, mode: int) -> None:
        """mkdir(2)."""
        with self._parent(path) as (parent, name):
            os.mkdir(name, mode, dir_fd=parent)

    def make_file(self, path: str, mode: int) -> None:
        """open(2) with O_CREAT | O_EXCL, and close."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        with self._parent(path) as (parent, name):
            os.close(os.open(name, flags, mode, dir_fd=parent))

    def remove_directory(self, path: str) -> None:
        """rmdir(2): only an empty one goes."""
        with self._parent(path) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    def remove_file(self, path: str) -> None:
        """unlink(2)."""
        with self._parent(path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    # Mounts

    def has_new_mount_calls(self) -> bool:
        """Whether mount_setattr(2) is there (Linux 5.12), so that a bind is as asked at once."""
        try:
            self._new_calls()
            _syscall(_MOUNT_SETATTR, -1, b"", 0, None, 0)
        except OSError as error:
            # No size of attributes, no descriptor: what is there answers something else.
            return error.errno != errno.ENOSYS
        return True

    def has_selinux(self) -> bool:
        """Whether SELinux is on: without it no such file system is known (init_sel_fs)."""
        return "selinuxfs" in _FILE_SYSTEMS.read_text().split()

    def mount(
        self,
        device: str,
        path: str,
        fs_type: str,
        attributes: Set[str],
        parameters: Sequence[str],
    ) -> None:
        """Mount a new instance of the file system on `device` at `path`.

        `attributes` are words of ATTRIBUTES and belong to this mount; `parameters` are superblock
        flags and the file system's own options, as `name` or `name=value`.
        """
        try:
            self._new_calls()
            context = _syscall(_FSOPEN, fs_type.encode(), _FSOPEN_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise OSError(error.errno, error.strerror, device, None, path) from error
            self._mount_by_old_call(device, path, fs_type, attributes, parameters)
            return
        with blocks.closing(context):
            try:
                _fsconfig(context, _SET_STRING, "source", device)
                for parameter in parameters:
                    name, equals, value = parameter.partition("=")
                    _fsconfig(context, _SET_STRING if equals else _SET_FLAG, name, value)
                _fsconfig(context, _CMD_CREATE)
                tree = _syscall(_FSMOUNT, context, _FSMOUNT_CLOEXEC, _bits(attributes))
            except OSError as error:
                why = _messages(context) or error.strerror
                raise OSError(error.errno, why, device, None, path) from error
        with blocks.closing(tree):
            self._move(tree, device, path)

    def bind(self, source: str, path: str, attributes: Set[str]) -> None:
        """Make `source`, a directory, file or device node, appear at `path` too.

        The attributes are added to those that the source's mount has. The mount has them before it
        can be seen (mount_setattr(2) on a detached tree, Linux 5.12). Older kernels cannot do that:
        there the bind is seen without its attributes until a remount adds them.

        The bind of a node is private: as a peer of /dev, as it would be otherwise, whatever is
        mounted over it would appear in /dev as well (mount_namespaces(7)).
        """
        with self._at(source) as origin:
            private = not stat.S_ISDIR(os.fstat(origin).st_mode)
            try:
                self._new_calls()
                flags = _OPEN_TREE_CLONE | _AT_EMPTY_PATH | os.O_CLOEXEC
                tree = _syscall(_OPEN_TREE, origin, b"", flags)
                with blocks.closing(tree):
                    if attributes or private:
                        _set_attributes(tree, attributes, private=private)
                    self._move(tree, source, path)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise OSError(error.errno, error.strerror, source, None, path) from error
                self._bind_by_old_call(origin, path, attributes, private=private)

    def unmount(self, path: str) -> None:
        """umount2(2) of the topmost mount at `path`: neither lazy nor forced."""
        # By way of the parent: a descriptor of the mount itself would keep it busy.
        with self._parent(path) as (parent, name):
            place = f"{_descriptor(parent)}/{name}"
            if _libc.umount2(os.fsencode(place), _UMOUNT_NOFOLLOW) == -1:
                raise _error(path)

    # Growing

    def grow_ext4(self, path: str, blocks: int) -> None:
        """EXT4_IOC_RESIZE_FS to so many of the file system's own blocks."""
        _ioctl(path, _EXT4_RESIZE_FS, struct.pack("=Q", blocks))

    def xfs_geometry(self, path: str) -> XfsGeometry:
        """XFS_IOC_FSGEOMETRY_V1."""
        fields = _XFS_GEOMETRY.unpack(_ioctl(path, _XFS_FSGEOMETRY_V1, bytes(_XFS_GEOMETRY.size)))
        return XfsGeometry(
            block_size_bytes=fields[0], blocks=fields[8], max_inode_percent=fields[7]
        )

    def grow_xfs(self, path: str, blocks: int, max_inode_percent: int) -> None:
        """XFS_IOC_FSGROWFSDATA to so many blocks."""
        _ioctl(path, _XFS_FSGROWFSDATA, _XFS_GROWFS.pack(blocks, max_inode_percent))

    def grow_btrfs(self, path: str) -> None:
        """BTRFS_IOC_RESIZE of device 1 to the size of the device."""
        _ioctl(path, _BTRFS_RESIZE, _BTRFS_VOL_ARGS.pack(0, b"max"))

    def sync_btrfs(self, path: str) -> None:
        """BTRFS_IOC_SYNC: what was written is on disk, and the log is empty."""
        _ioctl(path, _BTRFS_SYNC)

    def sync(self, path: str) -> None:
        """syncfs(2): what was written to the file system at a path is on its device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            if _libc.syncfs(descriptor):
                raise _error(path)

    # Block devices

    def device_number(self, path: str) -> tuple[int, int]:
        """(major, minor) of the block device node at `path`, links followed; else ENOTBLK."""
        found = os.stat(path)  # noqa: PTH116
        if not stat.S_ISBLK(found.st_mode):
            raise OSError(errno.ENOTBLK, os.strerror(errno.ENOTBLK), path)
        return os.major(found.st_rdev), os.minor(found.st_rdev)

    def device_size_bytes(self, device: str) -> int:
        """BLKGETSIZE64."""
        size: int = struct.unpack("=Q", _ioctl(device, _BLKGETSIZE64, bytes(8)))[0]
        return size

    def physical_block_bytes(self, device: str) -> int:
        """BLKPBSZGET: what the disk writes at once; a multiple of the logical block."""
        (size,) = struct.unpack("=I", _ioctl(device, _BLKPBSZGET, bytes(4)))
        return int(size)

    def logical_block_bytes(self, device: str) -> int:
        """BLKSSZGET: the smallest piece that can be asked of it, 512 bytes or 4 KiB."""
        size: int = struct.unpack("=i", _ioctl(device, _BLKSSZGET, bytes(4)))[0]
        return size

    def device_is_read_only(self, device: str) -> bool:
        """BLKROGET."""
        return bool(struct.unpack("=i", _ioctl(device, _BLKROGET, bytes(4)))[0])

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

    def device_is_swap(self, device: str) -> bool:
        """Whether the kernel swaps to it (/proc/swaps)."""
        number = self.device_number(device)
        for line in _SWAPS.read_text().splitlines()[1:]:
            # A file that is swapped to is no block device.
            with suppress(OSError):
                if self.device_number(line.split()[0]) == number:
                    return True
        return False

    def signatures(self, device: str) -> Mapping[str, str]:
        """What the device itself bears, as libblkid finds it there (libblkid.signatures)."""
        return libblkid.signatures(device)

    def zero_out(
        self, device: str, offset_bytes: int, length_bytes: int, *, held: bool = False
    ) -> None:
        """BLKZEROOUT: the range reads as zeroes afterwards. EBUSY while mounted or held.

        With `held` also where the kernel holds it, as device-mapper does what a device stands on.

        udev does not come to know: it would have a look at what is about to be removed, and lvm2,
        which meets that look, tries again 0.2 s later only (retry_deactivation, lvm.conf(5)).
        """
        with self._unwatched(device) as (node, directory):
            try:
                descriptor = (
                    os.open(node, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
                    if held
                    else blocks.open_exclusively(node, directory)
                )
            except OSError as error:
                raise OSError(error.errno, error.strerror, device) from error
            with blocks.closing(descriptor):
                blocks.zero_out(descriptor, device, offset_bytes, length_bytes)

    def discard(self, device: str, offset_bytes: int, length_bytes: int) -> None:
        """BLKDISCARD: the disk may forget the range; what reads there is not told. EBUSY as above.

        EOPNOTSUPP where the disk does not know it.
        """
        descriptor = blocks.open_exclusively(device)
        with blocks.closing(descriptor):
            span = struct.pack("=2Q", offset_bytes, length_bytes)
            try:
                fcntl.ioctl(descriptor, _BLKDISCARD, bytearray(span))
            except OSError as error:
                raise OSError(error.errno, error.strerror, device) from error

    def flush(self, device: str) -> None:
        """fsync(2): what was written or zeroed stays so when the power fails.

        BLKZEROOUT returns while that may be in the disk's volatile cache, or, under a loop device,
        in the memory of the file's own file system.
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
        return reading.opened(device)

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

        Where the source has zeroes nothing is written: the target is zeroed there by BLKZEROOUT, or
        left alone where it is `blank`. EBUSY while the target is mounted or held.
        """
        reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        with blocks.closing(reading):
            writing = blocks.open_exclusively(target)
            with blocks.closing(writing):
                at, end = offset_bytes, offset_bytes + length_bytes
                zeroes = 0  # so many bytes before `at`
                while at < end:
                    data = blocks.read(reading, source, at, min(_PIECE_BYTES, end - at))
                    if data == bytes(len(data)):
                        zeroes += len(data)
                    else:
                        if not blank:
                            blocks.zero_out(writing, target, at - zeroes, zeroes)
                        blocks.write(writing, target, at, data)
                        zeroes = 0
                    at += len(data)
                if not blank:
                    blocks.zero_out(writing, target, end - zeroes, zeroes)
                os.fsync(writing)
                # Neither is read again soon; the workloads' pages are worth more.
                for descriptor in (reading, writing):
                    os.posix_fadvise(descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def opened(self, device: str, *, to_write: bool = False) -> Iterator[Opened]:
        """A device that is open inside. To write, nobody else may have it mounted or held: EBUSY.

        What is written by it is not flushed at the end.
        """
        if to_write:
            descriptor = blocks.open_exclusively(device, mode=os.O_RDWR)
        else:
            descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            yield Opened(device, descriptor)

    # Loop devices

    def loop_devices(self) -> list[str]:
        """Paths of the loop devices that are attached, by number."""
        # Each unpublishing asks, and pathlib takes longer than the kernel.
        loops = [name for name in os.listdir("/sys/block") if name.startswith("loop")]  # noqa: PTH208
        attached = [one for one in loops if os.access(f"/sys/block/{one}/loop", os.F_OK)]
        return [f"/dev/{name}" for name in sorted(attached, key=_number)]

    def loop_free(self) -> str:
        """LOOP_CTL_GET_FREE: the path of a loop device that nobody has attached just now."""
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        with blocks.closing(control):
            return f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"

    def loop_configure(
        self, device: str, file: str, *, read_only: bool, direct_io: bool, name: str
    ) -> None:
        """LOOP_CONFIGURE: attach `file` to the loop device. EBUSY if another was faster."""
        mode = os.O_RDONLY if read_only else os.O_RDWR
        flags = read_only * _LO_FLAGS_READ_ONLY | direct_io * _LO_FLAGS_DIRECT_IO
        called = os.fsencode(name)[:63]
        info = _LOOP_INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, called, b"", b"", 0, 0)
        backing = os.open(file, mode | os.O_CLOEXEC)
        with blocks.closing(backing):
            _ioctl(device, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(backing, 0, info), mode)

    def loop_status(self, device: str) -> LoopStatus:
        """LOOP_GET_STATUS64. ENXIO if nothing is attached."""
        fields = _LOOP_INFO.unpack(_ioctl(device, _LOOP_GET_STATUS64, bytes(_LOOP_INFO.size)))
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
        _ioctl(device, _LOOP_CLR_FD)

    def loop_set_capacity(self, device: str) -> None:
        """LOOP_SET_CAPACITY: take over the backing file's present size."""
        _ioctl(device, _LOOP_SET_CAPACITY)

    def _sysfs(self, device: str) -> Path:
        major, minor = self.device_number(device)
        return Path(f"/sys/dev/block/{major}:{minor}")

    @contextmanager
    def _unwatched(self, device: str) -> Iterator[tuple[str, int | None]]:
        """Another node of a device, in a file system that is mounted nowhere, and its directory.

        udev watches the nodes in /dev (udev(7), OPTIONS+="watch"), each an inode. Where there can
        be no other, such as before Linux 5.2, it is the node itself.
        """
        with ExitStack() as kept:
            try:
                self._new_calls()
                context = _syscall(_FSOPEN, b"tmpfs", _FSOPEN_CLOEXEC)
                kept.enter_context(blocks.closing(context))
                _fsconfig(context, _CMD_CREATE)
                tree = _syscall(_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0)
                kept.enter_context(blocks.closing(tree))
                number = Path(device).stat().st_rdev
                os.mknod("node", stat.S_IFBLK | 0o600, number, dir_fd=tree)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EPERM):
                    raise
                yield device, None
            else:
                yield "node", tree

    # Places, and how mounts come to be there

    @contextmanager
    def _at(self, path: str) -> Iterator[int]:
        """A descriptor (O_PATH) of what is at the path; ELOOP for a link there or on the way."""
        try:
            place = self._opened(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        with blocks.closing(place):
            yield place

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the directory that the path's last part is in, and that part."""
        directory, _, name = path.rpartition("/")
        with self._at(directory or "/") as parent:
            yield parent, name or "."

    def _opened(self, path: str) -> int:
        resolve = _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
        how = struct.pack("=3Q", os.O_PATH | os.O_CLOEXEC, 0, resolve)
        try:
            self._new_calls()
            return _syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), how, len(how))
        except OSError as error:
            # Linux before 5.6; containers of that time have a filter that answers EPERM.
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
        return _walked(path)

    def _move(self, tree: int, source: str, path: str) -> None:
        flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
        with self._at(path) as place:
            try:
                _syscall(_MOVE_MOUNT, tree, b"", place, b"", flags)
            except OSError as error:
                raise OSError(error.errno, error.strerror, source, None, path) from error

    def _mount_by_old_call(
        self,
        device: str,
        path: str,
        fs_type: str,
        attributes: Set[str],
        parameters: Sequence[str],
    ) -> None:
        flags = _flags(attributes)
        for parameter in parameters:
            flags |= _SUPERBLOCK_MS.get(parameter, 0)
        data = ",".join(_quoted(word) for word in parameters if word not in _SUPERBLOCK_MS)
        with self._at(path) as place:
            _mount_2(device, _descriptor(place), fs_type, flags, data)

    def _bind_by_old_call(
        self, origin: int, path: str, attributes: Set[str], *, private: bool
    ) -> None:
        with self._at(path) as place:
            _mount_2(_descriptor(origin), _descriptor(place), None, _MS_BIND)
        try:
            # Opened anew: the descriptor above is of what the bind covers now.
            with self._at(path) as place:
                if attributes:
                    _remount_2(place, attributes)
                if private:
                    _mount_2("none", _descriptor(place), None, _MS_PRIVATE)
        except OSError as error:
            # Rather no mount than one without its attributes; a writer in that moment keeps both.
            try:
                self.unmount(path)
            except OSError:
                why = f"{error.strerror}, and the bind is left without its attributes"
                raise OSError(error.errno, why, path) from error
            raise

    def _new_calls(self) -> None:
        if self._old_calls:
            raise OSError(errno.ENOSYS, "the old calls were asked for")


def _error(path: str, other: str | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path, None, other)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    """syscall(2); integers go as longs, since a variadic callee reads full registers."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _ioctl(path: str, request: int, argument: bytes = b"", mode: int = os.O_RDONLY) -> bytes:
    """One ioctl(2) on a freshly opened file; the kernel's copy of the argument comes back."""
    descriptor = os.open(path, mode | os.O_CLOEXEC)
    with blocks.closing(descriptor):
        # fcntl.ioctl copies at most 1024 bytes of an immutable argument, so: a mutable one.
        buffer = bytearray(argument)
        try:
            fcntl.ioctl(descriptor, request, buffer if argument else 0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        return bytes(buffer)


def _quoted(parameter: str) -> str:
    """A parameter as mount(2) takes it among others: quotes where its value has commas."""
    name, equals, value = parameter.partition("=")
    return f'{name}{equals}"{value}"' if "," in value else parameter


def _kernel_name(device: tuple[int, int]) -> str:
    """What the kernel calls a block device; a word that is no name where there is none."""
    link = f"/sys/dev/block/{device[0]}:{device[1]}"
    try:
        return os.readlink(link).rpartition("/")[2]  # noqa: PTH115 - each NodeGetVolumeStats asks
    except FileNotFoundError:
        return "-"


def _number(name: str) -> int:
    digits = re.search(r"\d+$", name)
    return int(digits.group()) if digits else -1


def _bits(attributes: Set[str]) -> int:
    return sum(ATTRIBUTES[word][0] for word in attributes)


def _flags(attributes: Set[str]) -> int:
    return sum(ATTRIBUTES[word][1] for word in attributes)


def _fsconfig(context: int, command: int, name: str = "", value: str = "") -> None:
    key = name.encode() if name else None
    data = os.fsencode(value) if command == _SET_STRING else None
    _syscall(_FSCONFIG, context, command, key, data, 0)


def _messages(context: int) -> str:
    """What the file system said; each read(2) gives one line such as `e ext4: bad option`."""
    lines = []
    with suppress(OSError):
        while line := os.read(context, 8192):
            lines.append(line.decode("utf-8", "replace")[2:].strip())
    return "; ".join(lines)


def _set_attributes(tree: int, attributes: Set[str], *, private: bool) -> None:
    # EINVAL unless the whole access-time group is cleared when one of it is set: mount_setattr(2).
    clear = _ATTR_ATIME if attributes & _ATIME_WORDS else 0
    propagation = _MS_PRIVATE if private else 0
    attr = struct.pack("=4Q", _bits(attributes), clear, propagation, 0)
    _syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attr, len(attr))


def _mount_2(source: str, path: str, fs_type: str | None, flags: int, data: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(path),
        fs_type.encode() if fs_type else None,
        ctypes.c_ulong(flags),
        os.fsencode(data) if data else None,
    )
    if result == -1:
        raise _error(source, path)


def _remount_2(place: int, attributes: Set[str]) -> None:
    # A bind remount clears what it is not told to keep: mount(2), MS_REMOUNT.
    found = os.statvfs(place).f_flag
    kept = found & _KEPT_BY_REMOUNT | bool(found & _ST_NOSYMFOLLOW) * _MS_NOSYMFOLLOW
    flags = _MS_REMOUNT | _MS_BIND | kept | _flags(attributes)
    _mount_2("none", _descriptor(place), None, flags)


def _descriptor(number: int) -> str:
    """The path of an open descriptor, for the calls that take none (proc(5))."""
    return f"/proc/self/fd/{number}"


def _walked(path: str) -> int:
    """What openat2(2) does, by steps."""
    here = os.open("/", os.O_PATH | os.O_CLOEXEC)
    for name in filter(None, path.split("/")):
        with blocks.closing(here):
            there = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
        here = there
        if stat.S_ISLNK(os.fstat(here).st_mode):
            os.close(here)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return here
