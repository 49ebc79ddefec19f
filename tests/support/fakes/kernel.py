"""The kernel in memory: a mount table, superblocks, loop devices; target paths are real.

Tests look at `mounts` and at the devices. What the real kernel refuses, this one refuses with the
same errno: the contract tests hold both to it.
"""

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from fakes import filesystems
from fakes.cryptsetup import Sealed
from fakes.devices import (
    BLOCK_BYTES,
    BTRFS_SUPERBLOCK_AT,
    LOOP_MAJOR,
    FakeDevice,
    FakeDevices,
    Media,
)

from mount.block_devices import MARK, SAMPLE_BYTES, LoopStatus
from mount.block_io import PIECE_BYTES, By, Bytes, Opened, Reader
from mount.disk_load import DiskLoad
from mount.filesystem import FILE_SYSTEMS
from mount.kernel import Kernel, XfsGeometry
from mount.options import CONTEXT, SUPERBLOCK
from mount.stacks import Stack
from mount.table import Mount

_DEVTMPFS = (0, 6)
_USED_BYTES = 1024 * 1024

# The kernel's calls that change something, and those that only look.
CHANGING = frozenset(
    {
        *("make_directory", "make_file", "remove_directory", "remove_file"),
        *("mount", "bind", "unmount", "grow_ext4", "grow_xfs", "grow_btrfs"),
        *("zero_out", "flush", "copy", "write", "sync_btrfs", "sync", "discard", "mark"),
        *("loop_configure", "loop_clear", "loop_set_capacity"),
    }
)
# Those that decide by what others say.
DECIDING = frozenset({"zeroing", "is_distrusted", "distrust"})
LOOKING = frozenset(
    {
        *(
            "version",
            "device_title",
            "mountinfo",
            "lstat",
            "real_path",
            "statvfs",
            "xfs_geometry",
            "device_number",
        ),
        *("device_size_bytes", "device_is_read_only", "device_is_held", "device_is_swap", "read"),
        *("device_partitions", "device_holders", "signatures", "superblock"),
        "physical_block_bytes",
        *("logical_block_bytes", "reader", "has_new_mount_calls", "has_selinux"),
        *("loop_devices", "loop_free", "loop_status", "error_counters"),
        *("disks_below", "disk_load"),
        *("stack", "discard_doubts", "are_zero", *DECIDING),
        # Opened by commands, which the trials of streams kill.
        "opened",
    }
)


@dataclass(frozen=True)
class _Attached:
    """A loop device's backing file."""

    status: LoopStatus
    file: str
    backing: FakeDevice | None


class _FakeReader(Reader):
    """Reads a device as it is, and no further than it goes."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device.path
        self._found = device

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        assert not offset_bytes % BLOCK_BYTES
        assert 0 < length_bytes <= PIECE_BYTES
        found = self._found
        is_short = offset_bytes + length_bytes > found.size_bytes
        if is_short or found.media.unreadable or found.is_missing(offset_bytes, length_bytes):
            _fail(errno.EIO, found.path)
        whole = -(-length_bytes // BLOCK_BYTES) * BLOCK_BYTES
        return found.media.read(offset_bytes, whole)[:length_bytes]


class FakeKernel(Kernel):
    """Stands in for Kernel. `busy` paths do not unmount, nor do those with an open file below."""

    def __init__(self, devices: FakeDevices) -> None:
        super().__init__()
        self.devices = devices
        self.busy: set[str] = set()
        self.selinux = False
        self._loops: dict[str, _Attached] = {}
        self._files: dict[tuple[int, int], Media] = {}
        self._nodes: dict[int, FakeDevice] = {}
        self._next_id = 3
        shared = ("shared:1",)
        root = Mount(1, 1, (254, 0), "/", "/", ("rw",), shared, "ext4", "/dev/vda", ("rw",))
        dev = Mount(2, 1, _DEVTMPFS, "/", "/dev", ("rw",), (), "devtmpfs", "devtmpfs", ("rw",))
        self.mounts: list[Mount] = [root, dev]

    def version(self) -> tuple[int, int]:
        return (6, 1)

    # The mount table and paths

    def mountinfo(self) -> str:
        return "".join(render(self._seen(mount)) + "\n" for mount in self.mounts)

    def lstat(self, path: str) -> os.stat_result:
        device = self._node_at(path)
        if device is None:
            return super().lstat(path)
        number = os.makedev(*device.number)
        return os.stat_result(
            (stat.S_IFBLK | 0o660, device.minor, 6, 1, 0, 6, 0, 0, 0, 0), {"st_rdev": number}
        )

    def real_path(self, path: str) -> str:
        if self.devices.knows(path):
            return self.devices.get(path).node
        return super().real_path(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        Path(path).lstat()
        mount = self._seen_through(path)
        if mount.mount_id not in self._nodes:
            return super().statvfs(path)
        media = self._nodes[mount.mount_id].media
        blocks, used = media.fs_size_bytes // BLOCK_BYTES, _USED_BYTES // BLOCK_BYTES
        inodes = 0 if mount.fs_type == "btrfs" else blocks // 4
        free = (blocks - used, blocks - used)
        return os.statvfs_result(
            (BLOCK_BYTES, BLOCK_BYTES, blocks, *free, inodes, inodes, inodes, 0, 255)
        )

    def error_counters(self, fs_type: str, device: tuple[int, int]) -> dict[str, int]:
        if fs_type == "xfs":
            return {}
        [found] = [one for one in self.devices if one.number == device]
        return {"errors_count": found.media.errors}

    def remove_directory(self, path: str) -> None:
        self._refuse_mounted(path)
        super().remove_directory(path)

    def remove_file(self, path: str) -> None:
        self._refuse_mounted(path)
        super().remove_file(path)

    # Mounts

    def has_new_mount_calls(self) -> bool:
        return True

    def has_selinux(self) -> bool:
        return self.selinux

    def mount(
        self, device: str, path: str, fs_type: str, attributes: Set[str], parameters: Sequence[str]
    ) -> None:
        if not stat.S_ISDIR(self._lstat_mode(path)):
            _fail(errno.ENOTDIR, path)
        found = self.devices.get(device)
        known = {*FILE_SYSTEMS[fs_type].mount_options.split(), *SUPERBLOCK, "ro"}
        contexts = [word.removeprefix(CONTEXT) for word in parameters if word.startswith(CONTEXT)]
        if self.selinux:
            parameters = [word for word in parameters if not word.startswith(CONTEXT)]
        for word in parameters:
            name, equals, _ = word.partition("=")
            if word not in known and name + equals not in known:
                raise OSError(errno.EINVAL, f"{fs_type}: Unknown parameter '{name}'", device)
        if found.contents is None or found.contents.fs_type != fs_type:
            _fail(errno.EINVAL, device)
        if found.read_only and "ro" not in parameters:
            _fail(errno.EACCES, device)
        if 0 < found.contents.block_bytes < found.block_bytes:
            _fail(errno.EINVAL, device)
        if found.media.damage:
            _fail(errno.EUCLEAN, device)
        access = "ro" if "ro" in parameters else "rw"
        super_options = (access, *(word for word in parameters if word != "ro"))
        others = [mount for mount in self.mounts if self._holds(mount, found)]
        # As show_sid writes it, whose quotes are for the commas.
        super_options += (
            tuple(f'{CONTEXT}"{one}"' for one in contexts) or ("seclabel",) * self.selinux
        )
        if others:
            if super_options[-1] != others[0].super_options[-1] and self.selinux:
                _fail(errno.EINVAL, device)
            if access != others[0].super_options[0]:
                _fail(errno.EBUSY, device)
            super_options = others[0].super_options
        elif fs_type == "xfs" and "nouuid" not in parameters and self._is_copy(found):
            _fail(errno.EINVAL, device)
        elif fs_type == "btrfs" and self._is_copy(found):
            _fail(errno.EEXIST, device)
        # btrfs shows a number of its own in mountinfo, not its device's.
        number = (0, 100 + found.minor) if fs_type == "btrfs" else found.number
        words = _words(attributes, {"relatime"})
        self._add(number, "/", path, words, fs_type, device, super_options, found)
        found.mounted += not others

    def bind(self, source: str, path: str, attributes: Set[str]) -> None:
        origin = self.devices.get(source).node if self.devices.knows(source) else source
        is_directory = stat.S_ISDIR(self._lstat_mode(origin))
        if is_directory != stat.S_ISDIR(self._lstat_mode(path)):
            _fail(errno.ENOTDIR, path)
        holder = self._seen_through(origin)
        inside = origin[len(holder.path.rstrip("/")) :]
        root = (holder.root.rstrip("/") + inside) or "/"
        device = self._node_at(origin) or self._nodes.get(holder.mount_id)
        words = _words(attributes, set(holder.options) - {"rw"})
        fs = (holder.fs_type, holder.source, holder.super_options)
        self._add(holder.device, root, path, words, *fs, device)

    def unmount(self, path: str) -> None:
        self._lstat_mode(path)
        stack = [mount for mount in self.mounts if mount.path == path]
        if not stack:
            _fail(errno.EINVAL, path)
        top = stack[-1]
        if self._is_in_use(path) or any(mount.parent_id == top.mount_id for mount in self.mounts):
            _fail(errno.EBUSY, path)
        self.mounts.remove(top)
        device = self._nodes.pop(top.mount_id, None)
        if device and not any(self._holds(mount, device) for mount in self.mounts):
            device.mounted = 0

    # Growing

    def grow_ext4(self, path: str, blocks: int) -> None:
        self._grow(path, "ext4", blocks)

    def xfs_geometry(self, path: str) -> XfsGeometry:
        device = self._file_system(path, "xfs")
        return XfsGeometry(BLOCK_BYTES, device.media.fs_size_bytes // BLOCK_BYTES, 25)

    def grow_xfs(self, path: str, blocks: int, max_inode_percent: int) -> None:
        assert max_inode_percent == 25
        self._grow(path, "xfs", blocks)

    def grow_btrfs(self, path: str) -> None:
        self._grow(path, "btrfs", self._file_system(path, "btrfs").size_bytes // BLOCK_BYTES)

    def sync_btrfs(self, path: str) -> None:
        self._file_system(path, "btrfs")

    def sync(self, path: str) -> None:
        assert self._nodes[self._mounted_at(path).mount_id]

    # Block devices

    def device_number(self, path: str) -> tuple[int, int]:
        return self._block_device(path).number

    def device_size_bytes(self, device: str) -> int:
        return self._present(device).size_bytes

    def physical_block_bytes(self, device: str) -> int:
        return BLOCK_BYTES if self._block_device(device) else 0

    def logical_block_bytes(self, device: str) -> int:
        return self._present(device).block_bytes

    def device_is_read_only(self, device: str) -> bool:
        return self._block_device(device).read_only

    def device_is_held(self, device: str) -> bool:
        return self.devices.is_open(self._block_device(device).path)

    def device_partitions(self, device: str) -> list[str]:
        return self._block_device(device).partitions

    def disks_below(self, device: str) -> frozenset[str]:
        self._present(device)
        return frozenset()

    def disk_load(self, disk: str) -> DiskLoad:
        raise NotImplementedError(disk)  # no device stands on a disk here

    def device_holders(self, device: str) -> list[str]:
        return self._block_device(device).holders

    def device_title(self, device: str) -> str:
        return self.devices.get(device).path if self.devices.knows(device) else device

    def device_is_swap(self, device: str) -> bool:
        return self._block_device(device).swap

    def signatures(self, device: str, length_bytes: int = 0) -> Mapping[str, str]:
        return filesystems.signatures(self._probed(device), length_bytes)

    def superblock(self, device: str, fs_type: str) -> Mapping[str, str]:
        found = filesystems.tags(self._probed(device))
        return found if found.get("TYPE") == fs_type else {}

    def _probed(self, device: str) -> FakeDevice:
        if not self.devices.knows(device):
            _fail(errno.ENOENT, device)
        if self.devices.get(device).unreadable:
            _fail(errno.EIO, device)
        return self.devices.get(device)

    def stack(self, device: str) -> Stack:
        return self._block_device(device).stack

    def discard_doubts(self, device: str) -> Mapping[str, str]:
        return self._block_device(device).doubts

    def zero_out(
        self,
        device: str,
        offset_bytes: int,
        length_bytes: int,
        *,
        allow_in_use: bool = False,
        method: By | None = None,
    ) -> None:
        found = self._writable(device, held=allow_in_use)
        if (offset_bytes | length_bytes) % 512 or offset_bytes + length_bytes > found.size_bytes:
            _fail(errno.EINVAL, device)
        if found.is_missing(offset_bytes, length_bytes):
            _fail(errno.EIO, device)
        found.media.zeroed.append((offset_bytes, length_bytes))
        if (method or self.zeroing(device)) in found.lies:
            return
        found.media.erase(offset_bytes, length_bytes)
        if offset_bytes == 0:
            found.contents = None

    def mark(self, device: str, offsets: Iterable[int], *, allow_in_use: bool = False) -> None:
        media = self._writable(device, held=allow_in_use).media
        for offset in offsets:
            if offset // BLOCK_BYTES not in media.blocks:
                media.write(offset, MARK)

    def are_zero(self, device: str, offsets: Iterable[int], size_bytes: int = SAMPLE_BYTES) -> bool:
        found = self._present(device)
        parts = (_part(found.media, one, size_bytes) for one in offsets)
        return not found.unreadable and all(part == bytes(len(part)) for part in parts)

    def discard(self, device: str, offset_bytes: int, length_bytes: int) -> None:
        found = self._present(device)
        if isinstance(found.media, Sealed):
            # As dm-crypt has it: what is below forgets it, and there noise is read.
            if not found.media.passes_discards:
                _fail(errno.EOPNOTSUPP, device)
            found.media.forget(offset_bytes, length_bytes)
            return
        self.zero_out(device, offset_bytes, length_bytes)

    def flush(self, device: str) -> None:
        self._present(device).media.flush()

    def read(self, device: str, offset_bytes: int, length_bytes: int) -> bytes:
        return _part(self._block_device(device).media, offset_bytes, length_bytes)

    def reader(self, device: str) -> AbstractContextManager[Reader]:
        return self._reading(device)

    @contextmanager
    def _reading(self, device: str) -> Iterator[Reader]:
        found = self._present(device)
        found.held += 1
        try:
            yield _FakeReader(found)
        finally:
            found.held -= 1

    def write(self, device: str, offset_bytes: int, data: bytes) -> None:
        found = self._writable(device)
        found.media.write(offset_bytes, data)
        if offset_bytes == BTRFS_SUPERBLOCK_AT and found.contents:
            identity = str(uuid.UUID(bytes=data[0x20:0x30]))
            found.contents = replace(found.contents, uuid=identity)

    def copy(
        self, source: str, target: str, offset_bytes: int, length_bytes: int, *, blank: bool
    ) -> None:
        read, written = self._block_device(source), self._writable(target)
        end = offset_bytes + length_bytes
        if read.media.unreadable or end > min(read.size_bytes, written.size_bytes):
            _fail(errno.EIO, source)
        if not blank and self.zeroing(target) not in written.lies:
            written.media.erase(offset_bytes, length_bytes)
        written.media.blocks |= read.media.part(offset_bytes, length_bytes)
        written.media.flush()
        if offset_bytes == 0:
            for fact in ("contents", "fs_size_bytes", "damage"):
                setattr(written.media, fact, getattr(read.media, fact))
            inner = read.media.inner
            written.media.inner = None if inner is None else inner.copy()

    @contextmanager
    def opened(self, device: str, *, to_write: bool = False) -> Iterator[Opened]:
        found = self._present(device)
        if to_write:
            self._writable(device)
        found.held += to_write
        found.readers += not to_write
        try:
            yield _Opened(found)
        finally:
            found.held -= to_write
            found.readers -= not to_write

    # Loop devices

    def loop_devices(self) -> list[str]:
        return sorted(self._loops, key=lambda path: int(path.removeprefix("/dev/loop")))

    def loop_free(self) -> str:
        number = 0
        while f"/dev/loop{number}" in self._loops:
            number += 1
        return f"/dev/loop{number}"

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
        if device in self._loops:
            _fail(errno.EBUSY, device)
        found = self.lstat(self.real_path(file))
        backing = self._node_at(file)
        if backing:
            size_bytes, media, number = backing.size_bytes, backing.media, found.st_rdev
            backing.held += 1
        else:
            key = (found.st_dev, found.st_ino)
            size_bytes, media, number = found.st_size, self._files.setdefault(key, Media()), 0
        minor = int(device.removeprefix("/dev/loop"))
        node = self.devices.add(device, size_bytes, media, LOOP_MAJOR, minor)
        node.read_only, node.block_bytes = read_only, block_bytes or 512
        # LO_NAME_SIZE of <linux/loop.h> counts the closing NUL.
        called = os.fsdecode(os.fsencode(name)[:63])
        numbers = (found.st_dev, found.st_ino, number)
        status = LoopStatus(*numbers, read_only, direct_io, name=called)
        self._loops[device] = _Attached(status, file, backing)

    def loop_status(self, device: str) -> LoopStatus:
        return self._attached(device).status

    def loop_clear(self, device: str) -> None:
        attached = self._attached(device)
        node = self.devices.get(device)
        if node.mounted or node.held:
            return  # the kernel says yes, and waits for the last user
        if attached.backing:
            attached.backing.held -= 1
        self.devices.remove(device)
        del self._loops[device]

    def loop_set_capacity(self, device: str) -> None:
        attached = self._attached(device)
        backing = attached.backing
        size_bytes = backing.size_bytes if backing else Path(attached.file).stat().st_size
        self.devices.resize(device, size_bytes)

    # What the tests set up

    def override(self, **operations: Callable[..., object]) -> None:
        """Have other operations in place of the ones of these names."""
        vars(self).update(operations)

    def follow(self, name: str, then: Callable[..., None] | None = None) -> None:
        """Have another process act right after an operation; without `then` it does the same."""
        own = getattr(self, name)

        def both(*arguments: object) -> None:
            own(*arguments)
            (then or own)(*arguments)

        self.override(**{name: both})

    def remount_read_only(self, device: str, *words: str) -> None:
        """As a file system does by itself after an error: the superblock, not its mounts.

        Since Linux 6.14 ext4 has other `words` for it.
        """
        self.mounts = [
            replace(mount, super_options=(*(words or ["ro"]), *mount.super_options[1:]))
            if mount.source == device and mount.fs_type != "devtmpfs"
            else mount
            for mount in self.mounts
        ]

    def mount_foreign(self, path: str, source: str = "tmpfs") -> None:
        self._add((0, 90 + self._next_id), "/", path, ("rw",), "tmpfs", source, ("rw",), None)

    def _add(
        self,
        device: tuple[int, int],
        root: str,
        path: str,
        options: tuple[str, ...],
        fs_type: str,
        source: str,
        super_options: tuple[str, ...],
        node: FakeDevice | None,
    ) -> None:
        parent = self._seen_through(path).mount_id
        mount = Mount(
            self._next_id, parent, device, root, path, options, (), fs_type, source, super_options
        )
        if node:
            self._nodes[mount.mount_id] = node
        self.mounts.append(mount)
        self._next_id += 1

    def _seen(self, mount: Mount) -> Mount:
        """A mount as the table has it: the bind of a node that is gone says so."""
        node = self._nodes.get(mount.mount_id)
        if mount.fs_type != "devtmpfs" or node is None or self._is_there(node):
            return mount
        return replace(mount, root=f"{mount.root}//deleted")

    def _seen_through(self, path: str) -> Mount:
        """The topmost mount at a path or its nearest parent."""
        place = Path(path)
        for parent in (place, *place.parents):
            stack = [mount for mount in self.mounts if mount.path == str(parent)]
            if stack:
                return stack[-1]
        raise AssertionError(f"{path} is under no mount")

    def _mounted_at(self, path: str) -> Mount:
        self._lstat_mode(path)
        return self._seen_through(path)

    def _holds(self, mount: Mount, device: FakeDevice) -> bool:
        """Whether a mount is of the file system on a device, not a bind of its node."""
        return self._nodes.get(mount.mount_id) is device and mount.fs_type != "devtmpfs"

    def _is_copy(self, device: FakeDevice) -> bool:
        """Whether a file system with the same UUID is mounted from another device."""
        assert device.contents
        mounted = [other for other in self._nodes.values() if other is not device and other.mounted]
        return any(
            other.contents and other.contents.uuid == device.contents.uuid for other in mounted
        )

    def _node_at(self, path: str) -> FakeDevice | None:
        """The device whose node is seen at a path, in /dev or bound elsewhere."""
        stack = [mount for mount in self.mounts if mount.path == path]
        if stack and stack[-1].fs_type == "devtmpfs":
            return self._nodes.get(stack[-1].mount_id)
        return self.devices.get(path) if self.devices.knows(path) else None

    def _block_device(self, path: str) -> FakeDevice:
        device = self._node_at(path)
        if device is None:
            Path(path).lstat()
            _fail(errno.ENOTBLK, path)
        return device

    def _writable(self, path: str, *, held: bool = False) -> FakeDevice:
        """A device that can be opened for writing, also where it is `held`."""
        device = self._block_device(path)
        if device.mounted or (device.held and not held):
            _fail(errno.EBUSY, path)
        if device.read_only:
            _fail(errno.EACCES, path)
        return device

    def _present(self, path: str) -> FakeDevice:
        device = self._block_device(path)
        if not self._is_there(device):
            _fail(errno.ENXIO, path)
        return device

    def _is_there(self, device: FakeDevice) -> bool:
        return any(one is device for one in self.devices)

    def _lstat_mode(self, path: str) -> int:
        return self.lstat(path).st_mode

    def _refuse_mounted(self, path: str) -> None:
        if any(mount.path == path for mount in self.mounts):
            _fail(errno.EBUSY, path)

    def _is_in_use(self, path: str) -> bool:
        """Marked busy, or a loop device or this process has something open at or below the path."""
        opened = [Path(one.file) for one in self._loops.values()]
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the one that lists them
                opened.append(link.readlink())
        return path in self.busy or any(one.is_relative_to(path) for one in opened)

    def _file_system(self, path: str, fs_type: str) -> FakeDevice:
        mount = self._mounted_at(path)
        if mount.fs_type != fs_type:
            _fail(errno.ENOTTY, path)
        return self._nodes[mount.mount_id]

    def _grow(self, path: str, fs_type: str, blocks: int) -> None:
        device = self._file_system(path, fs_type)
        if self._mounted_at(path).read_only:
            _fail(errno.EROFS, path)
        size_bytes = blocks * BLOCK_BYTES
        if not device.media.fs_size_bytes <= size_bytes <= device.size_bytes:
            _fail(errno.EINVAL, path)
        device.media.fs_size_bytes = size_bytes

    def _attached(self, device: str) -> _Attached:
        if device not in self._loops:
            _fail(errno.ENXIO, device)
        return self._loops[device]


class _Opened(Opened):
    """A device in memory that is open. Its first block tells what file system it has, if any."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device.path, -1)
        self._node = device

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        place[:] = self.read(offset_bytes, len(place))

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        media = self._node.media
        if media.unreadable or offset_bytes + length_bytes > self._node.size_bytes:
            _fail(errno.EIO, self._node.path)
        head = b""
        if offset_bytes < BLOCK_BYTES and media.contents is not None:
            head = filesystems.superblock(media)
        return _part(media, offset_bytes, length_bytes, head)

    def write(self, offset_bytes: int, data: Bytes) -> None:
        assert self._node.held
        data = bytes(data)
        if offset_bytes + len(data) > self._node.size_bytes:
            _fail(errno.ENOSPC, self._node.path)
        if not offset_bytes:
            data = filesystems.restore(self._node.media, data[:BLOCK_BYTES]) + data[BLOCK_BYTES:]
        self._node.media.write(offset_bytes, data)

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        assert self._node.held
        if offset_bytes + length_bytes > self._node.size_bytes:
            _fail(errno.EINVAL, self._node.path)
        self._node.media.erase(offset_bytes, length_bytes)
        if not offset_bytes:
            self._node.contents = None

    def flush(self) -> None:
        self._node.media.flush()


def _part(media: Media, offset_bytes: int, length_bytes: int, head: bytes = b"") -> bytes:
    """Any part of a medium, whose first block is `head`, if that is given."""
    first, end = offset_bytes // BLOCK_BYTES, -(-(offset_bytes + length_bytes) // BLOCK_BYTES)
    data = media.read(first * BLOCK_BYTES, (end - first) * BLOCK_BYTES)
    start = offset_bytes - first * BLOCK_BYTES
    if head:
        data = head + data[len(head) :]
    return data[start : start + length_bytes]


def render(mount: Mount) -> str:
    """A mount as a line of mountinfo."""
    major, minor = mount.device
    fields = (
        str(mount.mount_id),
        str(mount.parent_id),
        f"{major}:{minor}",
        _escaped(mount.root),
        _escaped(mount.path),
        ",".join(mount.options),
        *mount.propagation,
        "-",
        _escaped(mount.fs_type),
        _escaped(mount.source),
        ",".join(_escaped(option) for option in mount.super_options),
    )
    return " ".join(fields)


def _escaped(text: str) -> str:
    return "".join(f"\\{ord(one):03o}" if one in " \t\n\\#" else one for one in text)


def _words(attributes: Set[str], inherited: Set[str]) -> tuple[str, ...]:
    times = {"noatime", "relatime", "strictatime"}
    atime = (attributes & times) or (inherited & times)
    words = ((attributes | inherited) - times) | (atime - {"strictatime"})
    return ("ro" if "ro" in words else "rw", *sorted(words - {"ro", "rw"}))


def failing(number: int) -> Callable[..., NoReturn]:
    """An operation that the kernel refuses with this errno."""

    def fail(*_: object, **_options: object) -> NoReturn:
        _fail(number, "it")

    return fail


def _fail(number: int, path: str) -> NoReturn:
    raise OSError(number, os.strerror(number), path)
