"""The kernel's operations, as one class that tests replace: paths, mounts, devices, growth."""

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

from mount import block_io, calls
from mount.disk_load import DiskLoads

# Numbers and structures of ioctl(2) requests that grow and sync file systems.
_EXT4_RESIZE_FS = calls.ioctl_number(1, ord("f"), 16, 8)
# Structure xfs_fsop_geom_v1: eight u32, four u64, a uuid, seven 32-bit fields, padded to 112 bytes.
_XFS_GEOMETRY = struct.Struct("=8I4Q16s7I4x")
_XFS_FSGEOMETRY_V1 = calls.ioctl_number(2, ord("X"), 100, _XFS_GEOMETRY.size)
# Structure xfs_growfs_data: u64 newblocks, u32 imaxpct, padded to 16 bytes.
_XFS_GROWFS = struct.Struct("=QI4x")
_XFS_FSGROWFSDATA = calls.ioctl_number(1, ord("X"), 110, _XFS_GROWFS.size)
# Structure btrfs_ioctl_vol_args: s64 fd, char name[4088].
_BTRFS_VOL_ARGS = struct.Struct("=q4088s")
_BTRFS_SYNC = calls.ioctl_number(0, 0x94, 8, 0)
_BTRFS_RESIZE = calls.ioctl_number(1, 0x94, 3, _BTRFS_VOL_ARGS.size)


@dataclass(frozen=True)
class XfsGeometry:
    """The part of an xfs file system's geometry that is needed to grow it."""

    block_size_bytes: int
    blocks: int
    max_inode_percent: int


class Growth:
    """Part of `mount.kernel.Kernel`: file systems, by the path of a mount."""

    def grow_ext4(self, path: str, blocks: int) -> None:
        """EXT4_IOC_RESIZE_FS: grow an ext4 to a size of `blocks` blocks of the file system."""
        calls.ioctl(path, _EXT4_RESIZE_FS, struct.pack("=Q", blocks))

    def xfs_geometry(self, path: str) -> XfsGeometry:
        """XFS_IOC_FSGEOMETRY_V1: the geometry of an xfs."""
        geometry = calls.ioctl(path, _XFS_FSGEOMETRY_V1, bytes(_XFS_GEOMETRY.size))
        fields = _XFS_GEOMETRY.unpack(geometry)
        return XfsGeometry(
            block_size_bytes=fields[0], blocks=fields[8], max_inode_percent=fields[7]
        )

    def grow_xfs(self, path: str, blocks: int, max_inode_percent: int) -> None:
        """XFS_IOC_FSGROWFSDATA: grow an xfs to a size of `blocks` blocks of the file system."""
        calls.ioctl(path, _XFS_FSGROWFSDATA, _XFS_GROWFS.pack(blocks, max_inode_percent))

    def grow_btrfs(self, path: str) -> None:
        """BTRFS_IOC_RESIZE: grow a btrfs to the size of its device 1.

        EBUSY while a balance or the like runs or is paused: btrfs then does nothing, and answers
        with a positive number of its own, which ioctl(2) does not treat as an error.
        """
        argument = bytearray(_BTRFS_VOL_ARGS.pack(0, b"max"))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with block_io.closing(descriptor):
            # A resize gets a single code of enum btrfs_err_code (<linux/btrfs.h>): that of a
            # running exclusive operation.
            if calls.ioctl_of(descriptor, path, _BTRFS_RESIZE, argument):
                why = "a balance, or another operation like it, is under way or paused"
                raise OSError(errno.EBUSY, why, path)

    def sync_btrfs(self, path: str) -> None:
        """BTRFS_IOC_SYNC: write back all data of a btrfs, and empty its log."""
        calls.ioctl(path, _BTRFS_SYNC)

    def sync(self, path: str) -> None:
        """syncfs(2): write back all data of the file system at a path to its device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with block_io.closing(descriptor):
            calls.syncfs(descriptor, path)


# Numbers of system calls, equal on all architectures, and their flags (<linux/mount.h>,
# <linux/openat2.h>, <linux/fcntl.h>).
_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS = 2, 4
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40

# Flags of mount(2), and the attributes of access time of mount_setattr(2).
_MS_REMOUNT, _MS_BIND, _MS_PRIVATE = 32, 4096, 1 << 18
_ATTR_ATIME = 0x70

# Attributes of a mount, by their words in /proc/self/mountinfo; each as MOUNT_ATTR_* and as MS_*.
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
# Words of the attributes of access time, of which a mount has one.
ATIME: Final = frozenset({"noatime", "relatime", "strictatime"})
# Superblock flags of mount(2), by the words that fsconfig(2), the newer call, takes instead.
_SUPERBLOCK_MS = {"ro": 1, "sync": 16, "mand": 64, "dirsync": 128, "lazytime": 1 << 25}
# Flags of a mount that a bind remount would clear unless they are given again, as statvfs(3)
# reports them: all ST_* equal MS_* except ST_NOSYMFOLLOW of <linux/statfs.h>.
_KEPT_BY_REMOUNT = 1 | 2 | 4 | 8 | 1024 | 2048
_ST_NOSYMFOLLOW, _MS_NOSYMFOLLOW = 0x2000, 256


Version = tuple[int, int]
# Oldest version of Linux that Carver runs on. Before 5.8 a mount table of more than a page may lack
# an existing mount, if another mount is removed between two read(2) of the table (9f6c61f96f2d,
# "proc/mounts: add cursor"). LOOP_CONFIGURE came with 5.8, too.
OLDEST: Version = (5, 8)


class Kernel(DiskLoads, Growth):
    """The running kernel.

    Methods that take a path follow no symbolic link, except `real_path`. Callers pass resolved
    paths, so a symbolic link in the path was put there after it was resolved, and raises ELOOP.
    """

    def version(self) -> Version:
        """The version of Linux; (0, 0) for a release without the usual form (uname(2))."""
        match = re.match(r"(\d+)\.(\d+)", os.uname().release)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    # The mount table, and files and directories by their paths.

    def mountinfo(self) -> str:
        """Read the mount table (/proc/self/mountinfo); invalid UTF-8 becomes surrogates."""
        # read_text would turn a carriage return in a path into a newline. The file is opened
        # without pathlib and without a buffer, as each RPC reads the table, and either would take
        # longer than the kernel.
        with open("/proc/self/mountinfo", "rb", buffering=0) as file:  # noqa: PTH123
            return file.read().decode("utf-8", "surrogateescape")

    def lstat(self, path: str) -> os.stat_result:
        """The status of the file at `path`, in the topmost mount; links are not followed."""
        directory, name = self._parent(path)
        with directory as parent:
            return os.stat(name, dir_fd=parent, follow_symlinks=False)

    def real_path(self, path: str) -> str:
        """Resolve all symbolic links of a path; parts that do not exist are kept."""
        # The kernel resolves the whole path at once, which is faster than realpath(3): each call
        # resolves a path.
        with suppress(OSError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            with block_io.closing(descriptor):
                resolved = os.readlink(_descriptor(descriptor))  # noqa: PTH115 - strings all along
            # The kernel's path has no leading slash for a file outside of the process's root, and
            # ends in "(deleted)" for a file that was removed meanwhile (d_path(9)).
            if resolved.startswith("/") and not resolved.endswith(" (deleted)"):
                return resolved
        return os.path.realpath(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        """The size and the use of the file system at `path` (statvfs(3))."""
        with self._at(path) as descriptor:
            return os.statvfs(descriptor)

    def error_counters(self, fs_type: str, device: tuple[int, int]) -> dict[str, int]:
        """The error counters of the file system on a block device, by sysfs; none for xfs.

        ext4: Documentation/ABI/testing/sysfs-fs-ext4; btrfs: btrfs(5), since Linux 5.14.
        """
        counters: dict[str, int] = {}
        link = f"/sys/dev/block/{device[0]}:{device[1]}"
        with suppress(FileNotFoundError):
            node = os.readlink(link).rpartition("/")[2]  # noqa: PTH115 - NodeGetVolumeStats asks
            if fs_type == "ext4":
                errors = Path(f"/sys/fs/ext4/{node}/errors_count")
                counters["errors_count"] = int(errors.read_text())
            elif fs_type == "btrfs":
                for used in Path("/sys/fs/btrfs").glob(f"*/devices/{node}"):
                    for stats in used.parent.parent.glob("devinfo/*/error_stats"):
                        lines = (line.split() for line in stats.read_text().splitlines())
                        counters |= {name: int(count) for name, count in lines}
        return counters

    def make_directory(self, path: str, mode: int) -> None:
        """mkdir(2): make a directory."""
        directory, name = self._parent(path)
        with directory as parent:
            os.mkdir(name, mode, dir_fd=parent)

    def make_file(self, path: str, mode: int) -> None:
        """open(2) with O_CREAT and O_EXCL: make an empty file that must not exist."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        directory, name = self._parent(path)
        with directory as parent:
            os.close(os.open(name, flags, mode, dir_fd=parent))

    def remove_directory(self, path: str) -> None:
        """rmdir(2): remove an empty directory."""
        directory, name = self._parent(path)
        with directory as parent:
            os.rmdir(name, dir_fd=parent)

    def remove_file(self, path: str) -> None:
        """unlink(2): remove a file."""
        directory, name = self._parent(path)
        with directory as parent:
            os.unlink(name, dir_fd=parent)

    # Mounting and unmounting.

    def has_new_mount_calls(self) -> bool:
        """Whether the kernel has mount_setattr(2) (Linux 5.12), which `bind` needs to be atomic."""
        try:
            self._new_calls()
            calls.syscall(_MOUNT_SETATTR, -1, b"", 0, None, 0)
        except OSError as error:
            # The arguments are invalid: an existing system call fails with another error.
            return error.errno != errno.ENOSYS
        return True

    def has_selinux(self) -> bool:
        """Whether SELinux is on: only if it is, the kernel registers selinuxfs (init_sel_fs)."""
        return "selinuxfs" in Path("/proc/filesystems").read_text().split()

    def mount(
        self,
        device: str,
        path: str,
        fs_type: str,
        attributes: Set[str],
        parameters: Sequence[str],
    ) -> None:
        """Mount the file system on `device` at `path`.

        `attributes` are those of this mount, as words of ATTRIBUTES. `parameters` are superblock
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
        with block_io.closing(context):
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
        with block_io.closing(tree):
            self._move(tree, device, path)

    def bind(self, source: str, path: str, attributes: Set[str]) -> None:
        """Bind `source`, a directory, file or device node, to `path`.

        The attributes are added to those of the source's mount. Since Linux 5.12 the bind has them
        before it is visible (mount_setattr(2) on a detached tree). On older kernels the bind is
        visible without them until a remount adds them.

        The bind of a device node is private. A shared one would be a peer of the mount of /dev, and
        a mount over the bind would appear in /dev as well (mount_namespaces(7)).
        """
        with self._at(source) as origin:
            private = not stat.S_ISDIR(os.fstat(origin).st_mode)
            try:
                self._new_calls()
                flags = _OPEN_TREE_CLONE | _AT_EMPTY_PATH | os.O_CLOEXEC
                tree = calls.syscall(_OPEN_TREE, origin, b"", flags)
                with block_io.closing(tree):
                    if attributes or private:
                        _set_attributes(tree, attributes, private=private)
                    self._move(tree, source, path)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise OSError(error.errno, error.strerror, source, None, path) from error
                self._bind_by_old_call(origin, path, attributes, private=private)

    def unmount(self, path: str) -> None:
        """umount2(2): unmount the topmost mount at `path`, neither lazily nor by force."""
        # The path is given by its parent's descriptor: a descriptor of the mount itself would keep
        # the mount busy.
        directory, name = self._parent(path)
        with directory as parent:
            calls.unmount(f"{_descriptor(parent)}/{name}", path)

    # Descriptors of paths, and the steps of mounting.

    def _at(self, path: str) -> block_io.closing:
        """A descriptor (O_PATH) of the file at a path.

        Raises OSError (ELOOP) for a symbolic link in any part of the path.
        """
        try:
            return block_io.closing(self._opened(path))
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error

    def _parent(self, path: str) -> tuple[block_io.closing, str]:
        """A descriptor of a path's parent directory, and the path's last part."""
        directory, _, name = path.rpartition("/")
        return self._at(directory or "/"), name or "."

    def _opened(self, path: str) -> int:
        resolve = _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
        open_how = struct.pack("=3Q", os.O_PATH | os.O_CLOEXEC, 0, resolve)
        try:
            self._new_calls()
            return calls.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), open_how, len(open_how))
        except OSError as error:
            # EPERM is the answer of a seccomp(2) filter that is older than openat2(2).
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
        return _walked(path)

    def _move(self, tree: int, source: str, path: str) -> None:
        flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
        with self._at(path) as descriptor:
            try:
                calls.syscall(_MOVE_MOUNT, tree, b"", descriptor, b"", flags)
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
        with self._at(path) as descriptor:
            calls.mount(device, _descriptor(descriptor), fs_type, flags, data)

    def _bind_by_old_call(
        self, origin: int, path: str, attributes: Set[str], *, private: bool
    ) -> None:
        with self._at(path) as descriptor:
            calls.mount(_descriptor(origin), _descriptor(descriptor), None, _MS_BIND)
        try:
            # The path is opened again, as the descriptor above is of the file below the bind.
            with self._at(path) as descriptor:
                if attributes:
                    _remount_2(descriptor, attributes)
                if private:
                    calls.mount("none", _descriptor(descriptor), None, _MS_PRIVATE)
        except OSError as error:
            # Unmount the bind, as no bind is better than one without its attributes. A process that
            # uses the bind at this moment prevents the unmount.
            try:
                self.unmount(path)
            except OSError:
                why = f"{error.strerror}, and the bind is left without its attributes"
                raise OSError(error.errno, why, path) from error
            raise


def _quoted(parameter: str) -> str:
    """Quote a parameter for the comma list of mount(2), if its value has commas."""
    name, equals, value = parameter.partition("=")
    return f'{name}{equals}"{value}"' if "," in value else parameter


def _bits(attributes: Set[str]) -> int:
    return sum(ATTRIBUTES[word][0] for word in attributes)


def _flags(attributes: Set[str]) -> int:
    return sum(ATTRIBUTES[word][1] for word in attributes)


def _messages(context: int) -> str:
    """The messages of a file system: each read(2) returns one, such as `e ext4: bad option`."""
    lines = []
    with suppress(OSError):
        while line := os.read(context, 8192):
            lines.append(line.decode("utf-8", "replace")[2:].strip())
    return "; ".join(lines)


def _set_attributes(tree: int, attributes: Set[str], *, private: bool) -> None:
    # To set an access-time attribute, clear all access-time attributes in the same call; otherwise
    # mount_setattr(2) returns EINVAL.
    clear = _ATTR_ATIME if attributes & ATIME else 0
    propagation = _MS_PRIVATE if private else 0
    attr = struct.pack("=4Q", _bits(attributes), clear, propagation, 0)
    calls.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attr, len(attr))


def _remount_2(descriptor: int, attributes: Set[str]) -> None:
    # A bind remount clears all flags that are not given again (mount(2), MS_REMOUNT).
    flags_before = os.statvfs(descriptor).f_flag
    kept_flags = (
        flags_before & _KEPT_BY_REMOUNT | bool(flags_before & _ST_NOSYMFOLLOW) * _MS_NOSYMFOLLOW
    )
    flags = _MS_REMOUNT | _MS_BIND | kept_flags | _flags(attributes)
    calls.mount("none", _descriptor(descriptor), None, flags)


def _descriptor(number: int) -> str:
    """The path of an open descriptor, for system calls that take only paths (proc(5))."""
    return f"/proc/self/fd/{number}"


def _walked(path: str) -> int:
    """Open a path that has no symbolic links, part by part, in place of openat2(2)."""
    directory = os.open("/", os.O_PATH | os.O_CLOEXEC)
    for name in filter(None, path.split("/")):
        with block_io.closing(directory):
            child = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        directory = child
        if stat.S_ISLNK(os.fstat(directory).st_mode):
            os.close(directory)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return directory
