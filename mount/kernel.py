"""The kernel's operations as one seam: paths, mounts, block and loop devices, growth."""

import errno
import os
import re
import stat
import struct
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mount import blocks, calls
from mount.disk_load import DiskLoads

_EXT4_RESIZE_FS = calls.ioctl_number(1, ord("f"), 16, 8)
# struct xfs_fsop_geom_v1: eight u32, four u64, a uuid, seven 32-bit fields, padded to 112.
_XFS_GEOMETRY = struct.Struct("=8I4Q16s7I4x")
_XFS_FSGEOMETRY_V1 = calls.ioctl_number(2, ord("X"), 100, _XFS_GEOMETRY.size)
# struct xfs_growfs_data: u64 newblocks, u32 imaxpct, padded to 16.
_XFS_GROWFS = struct.Struct("=QI4x")
_XFS_FSGROWFSDATA = calls.ioctl_number(1, ord("X"), 110, _XFS_GROWFS.size)
# struct btrfs_ioctl_vol_args: s64 fd, char name[4088].
_BTRFS_VOL_ARGS = struct.Struct("=q4088s")
_BTRFS_SYNC = calls.ioctl_number(0, 0x94, 8, 0)
_BTRFS_RESIZE = calls.ioctl_number(1, 0x94, 3, _BTRFS_VOL_ARGS.size)


@dataclass(frozen=True)
class XfsGeometry:
    """The part of an xfs's geometry that growing it needs."""

    block_size_bytes: int
    blocks: int
    max_inode_percent: int


class Growth:
    """The file systems of `mount.kernel.Kernel`, by the path of a mount."""

    def grow_ext4(self, path: str, blocks: int) -> None:
        """EXT4_IOC_RESIZE_FS to so many of the file system's own blocks."""
        calls.ioctl(path, _EXT4_RESIZE_FS, struct.pack("=Q", blocks))

    def xfs_geometry(self, path: str) -> XfsGeometry:
        """XFS_IOC_FSGEOMETRY_V1."""
        geometry = calls.ioctl(path, _XFS_FSGEOMETRY_V1, bytes(_XFS_GEOMETRY.size))
        fields = _XFS_GEOMETRY.unpack(geometry)
        return XfsGeometry(
            block_size_bytes=fields[0], blocks=fields[8], max_inode_percent=fields[7]
        )

    def grow_xfs(self, path: str, blocks: int, max_inode_percent: int) -> None:
        """XFS_IOC_FSGROWFSDATA to so many blocks."""
        calls.ioctl(path, _XFS_FSGROWFSDATA, _XFS_GROWFS.pack(blocks, max_inode_percent))

    def grow_btrfs(self, path: str) -> None:
        """BTRFS_IOC_RESIZE of device 1 to the size of the device.

        EBUSY while a balance or the like is under way, or paused: btrfs answers with a number of
        its own then, which is no error to ioctl(2), and does nothing.
        """
        wanted = bytearray(_BTRFS_VOL_ARGS.pack(0, b"max"))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            # enum btrfs_err_code of <linux/btrfs.h>; only the one of these comes to a resize.
            if calls.ioctl_of(descriptor, path, _BTRFS_RESIZE, wanted):
                why = "a balance, or another operation like it, is under way or paused"
                raise OSError(errno.EBUSY, why, path)

    def sync_btrfs(self, path: str) -> None:
        """BTRFS_IOC_SYNC: what was written is on disk, and the log is empty."""
        calls.ioctl(path, _BTRFS_SYNC)

    def sync(self, path: str) -> None:
        """syncfs(2): what was written to the file system at a path is on its device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            calls.syncfs(descriptor, path)


_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS = 2, 4
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40

_MS_REMOUNT, _MS_BIND, _MS_PRIVATE = 32, 4096, 1 << 18
_ATTR_ATIME = 0x70

# Per-mount attributes by the words of /proc/self/mountinfo: MOUNT_ATTR_*, MS_*.
ATTRIBUTES: Final = {
    "ro": (0x1, 1),
    "nosuid": (0x2, 2),
    "nodev": (0x4, 4),
    "noexec": (0x8, 8),
    "noatime": (0x10, 1024),
    "nodiratime": (0x80, 2048),
    "relatime": (0x0, 1 << 21),
    "strictatime": (0x20, 1 << 24),
    "nosymfollow": (0x200000, 256),
}
ATIME: Final = frozenset({"noatime", "relatime", "strictatime"})
# Superblock flags for mount(2); the new calls take them by name.
_SUPERBLOCK_MS = {"ro": 1, "sync": 16, "mand": 64, "dirsync": 128, "lazytime": 1 << 25}
# What statvfs(3) reports and a bind remount would otherwise clear. ST_* and MS_* agree on all but
# the last, ST_NOSYMFOLLOW of <linux/statfs.h>.
_KEPT_BY_REMOUNT = 1 | 2 | 4 | 8 | 1024 | 2048
_ST_NOSYMFOLLOW, _MS_NOSYMFOLLOW = 0x2000, 256


Version = tuple[int, int]
# The oldest Linux that Carver runs on. Before 5.8 (9f6c61f96f2d, "proc/mounts: add cursor") a mount
# table that takes several read(2), as a page or so does, may lack a mount that is there all along,
# if another one goes in between; LOOP_CONFIGURE is of 5.8, too.
OLDEST: Version = (5, 8)


class Kernel(DiskLoads, Growth):
    """The running kernel.

    Whatever looks at, makes, removes or mounts something at a path follows no symbolic link on the
    way: a path that was resolved before has none, so one that is met was put there since (ELOOP).
    """

    def version(self) -> Version:
        """The version of Linux; (0, 0) where its release is not of the usual form (uname(2))."""
        found = re.match(r"(\d+)\.(\d+)", os.uname().release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    # The mount table and paths

    def mountinfo(self) -> str:
        """/proc/self/mountinfo, bytes that are not UTF-8 as surrogates."""
        # Not read_text: it would turn a carriage return in a path into the end of a line.
        # Without a buffer: each call asks, and pathlib's takes longer than the kernel.
        with open("/proc/self/mountinfo", "rb", buffering=0) as found:  # noqa: PTH123
            return found.read().decode("utf-8", "surrogateescape")

    def lstat(self, path: str) -> os.stat_result:
        """What lies at `path` itself, mounts applied, a symbolic link not followed."""
        place, name = self._parent(path)
        with place as parent:
            return os.stat(name, dir_fd=parent, follow_symlinks=False)

    def real_path(self, path: str) -> str:
        """`path` with every symbolic link resolved; parts that do not exist are kept."""
        # One walk by the kernel, in place of one for each part of the path: each call asks.
        with suppress(OSError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            with blocks.closing(place):
                found = os.readlink(_descriptor(place))  # noqa: PTH115 - strings all along
            # Otherwise it was removed meanwhile, or lies out of the process's root (d_path(9)).
            if found.startswith("/") and not found.endswith(" (deleted)"):
                return found
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
        link = f"/sys/dev/block/{device[0]}:{device[1]}"
        with suppress(FileNotFoundError):
            node = os.readlink(link).rpartition("/")[2]  # noqa: PTH115 - NodeGetVolumeStats asks
            if fs_type == "ext4":
                errors = Path(f"/sys/fs/ext4/{node}/errors_count")
                counted["errors_count"] = int(errors.read_text())
            elif fs_type == "btrfs":
                for used in Path("/sys/fs/btrfs").glob(f"*/devices/{node}"):
                    for stats in used.parent.parent.glob("devinfo/*/error_stats"):
                        lines = (line.split() for line in stats.read_text().splitlines())
                        counted |= {name: int(count) for name, count in lines}
        return counted

    def make_directory(self, path: str, mode: int) -> None:
        """mkdir(2)."""
        place, name = self._parent(path)
        with place as parent:
            os.mkdir(name, mode, dir_fd=parent)

    def make_file(self, path: str, mode: int) -> None:
        """open(2) with O_CREAT | O_EXCL, and close."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        place, name = self._parent(path)
        with place as parent:
            os.close(os.open(name, flags, mode, dir_fd=parent))

    def remove_directory(self, path: str) -> None:
        """rmdir(2): only an empty one goes."""
        place, name = self._parent(path)
        with place as parent:
            os.rmdir(name, dir_fd=parent)

    def remove_file(self, path: str) -> None:
        """unlink(2)."""
        place, name = self._parent(path)
        with place as parent:
            os.unlink(name, dir_fd=parent)

    # Mounts

    def has_new_mount_calls(self) -> bool:
        """Whether mount_setattr(2) is there (Linux 5.12), so that a bind is as asked at once."""
        try:
            self._new_calls()
            calls.syscall(_MOUNT_SETATTR, -1, b"", 0, None, 0)
        except OSError as error:
            # No size of attributes, no descriptor: what is there answers something else.
            return error.errno != errno.ENOSYS
        return True

    def has_selinux(self) -> bool:
        """Whether SELinux is on: without it no such file system is known (init_sel_fs)."""
        return "selinuxfs" in Path("/proc/filesystems").read_text().split()

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
            context = calls.fsopen(fs_type)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise OSError(error.errno, error.strerror, device, None, path) from error
            self._mount_by_old_call(device, path, fs_type, attributes, parameters)
            return
        with blocks.closing(context):
            try:
                calls.fsconfig(context, calls.SET_STRING, "source", device)
                for parameter in parameters:
                    name, equals, value = parameter.partition("=")
                    command = calls.SET_STRING if equals else calls.SET_FLAG
                    calls.fsconfig(context, command, name, value)
                calls.fsconfig(context, calls.CREATE)
                tree = calls.fsmount(context, _bits(attributes))
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
                tree = calls.syscall(_OPEN_TREE, origin, b"", flags)
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
        place, name = self._parent(path)
        with place as parent:
            calls.unmount(f"{_descriptor(parent)}/{name}", path)

    # Places, and how mounts come to be there

    def _at(self, path: str) -> blocks.closing:
        """A descriptor (O_PATH) of what is at the path; ELOOP for a link there or on the way."""
        try:
            return blocks.closing(self._opened(path))
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error

    def _parent(self, path: str) -> tuple[blocks.closing, str]:
        """A descriptor of the directory that the path's last part is in, and that part."""
        directory, _, name = path.rpartition("/")
        return self._at(directory or "/"), name or "."

    def _opened(self, path: str) -> int:
        resolve = _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
        how = struct.pack("=3Q", os.O_PATH | os.O_CLOEXEC, 0, resolve)
        try:
            self._new_calls()
            return calls.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), how, len(how))
        except OSError as error:
            # A filter of system calls that is older than this one (seccomp(2)).
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
        return _walked(path)

    def _move(self, tree: int, source: str, path: str) -> None:
        flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
        with self._at(path) as place:
            try:
                calls.syscall(_MOVE_MOUNT, tree, b"", place, b"", flags)
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
            calls.mount(device, _descriptor(place), fs_type, flags, data)

    def _bind_by_old_call(
        self, origin: int, path: str, attributes: Set[str], *, private: bool
    ) -> None:
        with self._at(path) as place:
            calls.mount(_descriptor(origin), _descriptor(place), None, _MS_BIND)
        try:
            # Opened anew: the descriptor above is of what the bind covers now.
            with self._at(path) as place:
                if attributes:
                    _remount_2(place, attributes)
                if private:
                    calls.mount("none", _descriptor(place), None, _MS_PRIVATE)
        except OSError as error:
            # Rather no mount than one without its attributes; a writer in that moment keeps both.
            try:
                self.unmount(path)
            except OSError:
                why = f"{error.strerror}, and the bind is left without its attributes"
                raise OSError(error.errno, why, path) from error
            raise


def _quoted(parameter: str) -> str:
    """A parameter as mount(2) takes it among others: quotes where its value has commas."""
    name, equals, value = parameter.partition("=")
    return f'{name}{equals}"{value}"' if "," in value else parameter


def _bits(attributes: Set[str]) -> int:
    return sum(ATTRIBUTES[word][0] for word in attributes)


def _flags(attributes: Set[str]) -> int:
    return sum(ATTRIBUTES[word][1] for word in attributes)


def _messages(context: int) -> str:
    """What the file system said; each read(2) gives one line such as `e ext4: bad option`."""
    lines = []
    with suppress(OSError):
        while line := os.read(context, 8192):
            lines.append(line.decode("utf-8", "replace")[2:].strip())
    return "; ".join(lines)


def _set_attributes(tree: int, attributes: Set[str], *, private: bool) -> None:
    # EINVAL unless the whole access-time group is cleared when one of it is set: mount_setattr(2).
    clear = _ATTR_ATIME if attributes & ATIME else 0
    propagation = _MS_PRIVATE if private else 0
    attr = struct.pack("=4Q", _bits(attributes), clear, propagation, 0)
    calls.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attr, len(attr))


def _remount_2(place: int, attributes: Set[str]) -> None:
    # A bind remount clears what it is not asked to keep: mount(2), MS_REMOUNT.
    found = os.statvfs(place).f_flag
    kept = found & _KEPT_BY_REMOUNT | bool(found & _ST_NOSYMFOLLOW) * _MS_NOSYMFOLLOW
    flags = _MS_REMOUNT | _MS_BIND | kept | _flags(attributes)
    calls.mount("none", _descriptor(place), None, flags)


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
