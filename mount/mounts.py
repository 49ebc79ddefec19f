"""Mounts and binds, of directories and device nodes: as asked, or an error."""

import errno
import os
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from mount import errors, filesystem, table, target
from mount.kernel import ATIME, Kernel
from mount.options import CONTEXT, Options, is_same_context
from mount.table import DeviceNumber, Mount, Table

# What file systems answer to damage: EFSCORRUPTED and EFSBADCRC by their public names.
_DAMAGE = (errno.EUCLEAN, errno.EBADMSG)
# Words of mountinfo that are compared; the kernel shows a file system's own options in other
# words than they were given in, so those are not.
_COMPARED = {"nosuid", "nodev", "noexec", "noatime", "relatime", "nodiratime", "nosymfollow"}


def ensure_mounted(
    kernel: Kernel,
    device: str,
    path: str,
    fs_type: str,
    options: Options,
    read_only: bool = False,
    before: table.Table | None = None,
) -> None:
    """Have the file system on `device` mounted at the directory `path`.

    Raises BadOption, Busy, Damaged, DeviceMissing, ForeignMount, MountConflict, MountFailed,
    OtherContext, UnsupportedFileSystem.
    """
    known = filesystem.known(fs_type)
    number = device_number(kernel, device)
    attributes = options.attributes | ({"ro"} if read_only else set())
    wanted = _words(attributes, {"relatime"})
    before = table.read(kernel) if before is None else before
    if _is_mounted(before, path, number, wanted):
        _check_context(before.at(path)[-1], options.context)
        return
    # The kernel answers EINVAL, and no more, to another context, and to any without SELinux.
    for other in before.of_device(number):
        _require_context(other, options.context)
    if options.context and not kernel.has_selinux():
        raise errors.BadOption(
            f"{CONTEXT}{options.context}", "is for SELinux, which is off on this node"
        )
    # A read-only mount of a superblock that writes (log recovery, atime) would not be read-only.
    flags = options.superblock | ({"ro"} if "ro" in attributes else set())
    context = [f"{CONTEXT}{options.context}"] if options.context else []
    parameters = (*sorted(flags), *options.data, *context)
    try:
        with target.unchanged(path):
            _mount(kernel, device, path, fs_type, attributes, parameters, known.duplicate_data)
    except OSError as error:
        if error.errno in _DAMAGE:
            raise errors.Damaged(device, fs_type, _why(error), known.repair) from error
        # Another mount of it has the other access, ro or rw, and a superblock has one for all; or
        # something else holds the device.
        if error.errno == errno.EBUSY:
            raise errors.Busy(device) from error
        raise errors.MountFailed(device, path, _why(error)) from error
    with _undoing(kernel, device, path):
        if not _is_mounted(table.read(kernel), path, number, wanted):
            raise errors.MountFailed(device, path, "the mount table does not show it")


def ensure_bound(
    kernel: Kernel,
    source: str,
    path: str,
    options: Options,
    read_only: bool = False,
    before: table.Table | None = None,
) -> None:
    """Have `source`, a directory or a block device node, appear at `path` as well.

    `source` is a place, too. A read-only bind is read-only from its first moment. It is never
    stacked on another: the same one is left alone. A context is the file system's; it is compared
    where one is given. Raises NotMounted, ForeignMount, MountConflict, MountFailed, OtherContext.
    """
    before = table.read(kernel) if before is None else before
    holder = before.holding(source)
    if holder is None:
        raise errors.NotMounted(source)
    attributes = options.attributes | ({"ro"} if read_only else set())
    wanted = _words(attributes, frozenset(holder.options))
    root = _root_of(holder, source)
    if _is_bound(kernel, before, path, source, holder, root, wanted):
        if options.context:
            _check_context(before.at(path)[-1], options.context)
        return
    if options.context:
        _require_context(holder, options.context)
    try:
        with target.unchanged(path):
            kernel.bind(source, path, attributes)
    except OSError as error:
        raise errors.MountFailed(source, path, _why(error)) from error
    with _undoing(kernel, source, path):
        if not _is_bound(kernel, table.read(kernel), path, source, holder, root, wanted):
            raise errors.MountFailed(source, path, "the mount table does not show it")


def ensure_unmounted(
    kernel: Kernel,
    path: str,
    devices: Collection[DeviceNumber] | None = None,
    known: Table | None = None,
) -> None:
    """Have nothing mounted at `path`. Never lazy, never forced. `known` is the table, if read.

    All mounts stacked there go, if each is of one of `devices` (None: all of one and the same), or
    the node of a device that is gone; one that is not means ForeignMount, and all stay. Raises
    Busy, UnmountFailed.
    """
    stack = (known or table.read(kernel)).at(path)
    for mount in stack:
        if not (mount.is_stale_node or _is_of(kernel, mount, stack[-1], devices)):
            raise errors.ForeignMount(path, str(mount))
    for _ in stack:
        _unmount(kernel, path)
    if left := table.read(kernel).at(path):
        raise errors.UnmountFailed(path, f"{left[-1]} is mounted here again; try once more")


def device_number(kernel: Kernel, device: str) -> DeviceNumber:
    """(major, minor) of the block device at `device`. Raises DeviceMissing."""
    try:
        return kernel.device_number(device)
    except OSError as error:
        raise errors.DeviceMissing(device, str(error.strerror)) from error


@contextmanager
def _undoing(kernel: Kernel, source: str, place: str) -> Iterator[None]:
    """A mount just made goes again if it is other than asked: better none than a wrong one."""
    try:
        yield
    except errors.MountConflict as error:
        kernel.unmount(place)
        raise errors.MountFailed(source, place, f"the kernel made it {error.found}") from error


def _mount(
    kernel: Kernel,
    device: str,
    path: str,
    fs_type: str,
    attributes: Set[str],
    parameters: Sequence[str],
    duplicate_data: Sequence[str],
) -> None:
    try:
        kernel.mount(device, path, fs_type, attributes, parameters)
    except OSError as error:
        # xfs answers EINVAL, and no more, to the UUID of one that is mounted (xfs_uuid_mount). That
        # is a copy: a snapshot or a clone beside its origin. Where the reason is another one, the
        # same error comes again.
        more = [word for word in duplicate_data if word not in parameters]
        if error.errno != errno.EINVAL or not more:
            raise
        kernel.mount(device, path, fs_type, attributes, (*parameters, *more))


def _unmount(kernel: Kernel, path: str) -> None:
    if _try_to_unmount(kernel, path):
        return
    # A look at a mount, such as a statfs or a walk of a path in it, keeps it busy for a moment.
    # Where no process is found that moment is over, or another mount keeps it busy.
    found = processes(kernel, path)
    if found or not _try_to_unmount(kernel, path):
        raise errors.Busy(path, found)


def _try_to_unmount(kernel: Kernel, path: str) -> bool:
    """Unmount the topmost mount there; False where it is busy. Raises UnmountFailed."""
    try:
        with target.unchanged(path):
            kernel.unmount(path)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        # EINVAL: no mount point. Someone else unmounted it meanwhile, which is as well.
        if error.errno != errno.EINVAL:
            raise errors.UnmountFailed(path, _why(error)) from error
    return True


def _is_mounted(mounts: table.Table, place: str, number: DeviceNumber, wanted: Set[str]) -> bool:
    """Whether that is so; raises if something else is."""
    stack = mounts.at(place)
    for mount in stack:
        if mount.device != number or mount.root != "/":
            raise errors.ForeignMount(place, str(mount))
    if stack:
        _check_words(stack[-1], wanted)
    return bool(stack)


def _is_bound(
    kernel: Kernel,
    mounts: table.Table,
    place: str,
    origin: str,
    holder: Mount,
    root: str,
    wanted: Set[str],
) -> bool:
    stack = mounts.at(place)
    if not stack:
        return False
    top = stack[-1]
    same = (top.device, top.root) == (holder.device, root)
    # The node of one device may lie in another devtmpfs, or have been made anew since.
    if not same and node(kernel, place) != (node(kernel, origin) or (-1, -1)):
        raise errors.ForeignMount(place, str(top))
    _check_words(top, wanted)
    return True


def _is_of(
    kernel: Kernel, mount: Mount, top: Mount, devices: Collection[DeviceNumber] | None
) -> bool:
    if devices is None:
        return mount.device == top.device
    if mount.device in devices:
        return True
    # A bound device node is of devtmpfs by the table; the node at the top tells the device, and
    # those stacked under it are of the same device if they are of the same node.
    same_node = (mount.device, mount.root) == (top.device, top.root)
    return same_node and node(kernel, top.path) in devices


def node(kernel: Kernel, path: str) -> DeviceNumber | None:
    """The device whose node is at `path`; None if there is no such node."""
    try:
        return kernel.device_number(path)
    except OSError:
        return None


def _root_of(holder: Mount, path: str) -> str:
    """The part of the holder's file system that is seen at `path`."""
    inside = path[len(holder.path.rstrip("/")) :]
    return (holder.root.rstrip("/") + inside) or "/"


def _words(attributes: Set[str], inherited: Set[str]) -> frozenset[str]:
    """How mountinfo will show a mount with these attributes made from one with those inherited."""
    times = attributes & ATIME or inherited & ATIME
    rest = (attributes | inherited) - ATIME
    return frozenset((rest | times) - {"strictatime"})


def _check_words(mount: Mount, wanted: Set[str]) -> None:
    found = set(mount.options) | ({"ro"} if mount.read_only else set())
    if ("ro" in found, found & _COMPARED) != ("ro" in wanted, wanted & _COMPARED):
        raise errors.MountConflict(mount.path, _shown(found), _shown(wanted))


def _check_context(mount: Mount, context: str) -> None:
    if not is_same_context(mount.context, context):
        raise errors.MountConflict(
            mount.path, f"with {CONTEXT}{mount.context}", f"{CONTEXT}{context}"
        )


def _require_context(mount: Mount, context: str) -> None:
    """Raise OtherContext where a mounted file system has another SELinux context, or none."""
    if not is_same_context(mount.context, context):
        raise errors.OtherContext(mount.path, mount.context, context)


def _shown(words: Set[str]) -> str:
    return ",".join(["ro" if "ro" in words else "rw", *sorted(words & _COMPARED)])


def _why(error: OSError) -> str:
    if error.errno == errno.EEXIST:  # btrfs, fs/btrfs/volumes.c: device_list_add
        return "a file system of the same UUID is there (EEXIST); a copy needs one of its own"
    if error.errno == errno.ENODEV:  # mount(2): the type is not configured in the kernel
        return "the kernel has no such file system (ENODEV); load its module on the node"
    return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"


def bound_nodes(kernel: Kernel, known: Table) -> list[tuple[Mount, DeviceNumber]]:
    """Every bind of a block device's node, with the device's number, in the table's order."""
    binds = [one for one in known.of_types(table.NODE_HOLDERS) if one.root != "/"]
    return [(one, number) for one in binds if (number := node(kernel, one.path)) is not None]


_PROC = Path("/proc")


def processes(kernel: Kernel, place: str) -> tuple[str, ...]:
    """The processes that use the topmost mount at a place, each as `name (pid)`.

    A mount that was propagated into a container is found by what it shows, for there it lies at
    another path. Of a device node, those that opened it in this mount namespace; the place is then
    `kernel.real_path(device.path)`. A process that ends meanwhile is left out. It takes
    CAP_SYS_PTRACE, which unit and pod have; a pod without `hostPID` sees its own processes alone.
    """
    stack = table.Table(kernel.mountinfo()).at(place)
    shown = (stack[-1].device, stack[-1].root) if stack else None
    own = os.readlink(_PROC / "self/ns/mnt")  # noqa: PTH115
    found = []
    for process in psutil.process_iter(["name"]):
        directory = _PROC / str(process.pid)
        with suppress(OSError, ValueError):
            is_here = os.readlink(directory / "ns/mnt") == own  # noqa: PTH115
            places = {place} if is_here else _showing(directory, shown)
            if places and any(_is_in(link, places) for link in _links(directory)):
                found.append(f"{process.info['name']} ({process.pid})")
    return tuple(found)


def _showing(process: Path, shown: tuple[DeviceNumber, str] | None) -> set[str]:
    """Where a process in another mount namespace sees the same part of the same file system."""
    text = (process / "mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    if shown is None:
        return set()
    device, root = shown
    return {one.path for one in table.Table(text).of_device(device) if one.root == root}


def _links(process: Path) -> Iterator[str]:
    """Working directory, root and program; open files; what is mapped into memory (proc(5))."""
    links = [process / name for name in ("cwd", "root", "exe")]
    for name in ("fd", "map_files"):
        with suppress(OSError):
            links += (process / name).iterdir()
    for link in links:
        with suppress(OSError):
            yield os.readlink(link)  # noqa: PTH115 - a path library would normalise what it says


def _is_in(link: str, places: set[str]) -> bool:
    return any(link == place or link.startswith(place.rstrip("/") + "/") for place in places)


def require_unused(kernel: Kernel, device: str) -> None:
    """Require a device that is not in use and can be written; raises NotVacant. No process."""
    try:
        number = kernel.device_number(device)
    except FileNotFoundError:
        raise errors.NotVacant(device, "is not there", "attach it, or correct its name") from None
    except OSError as error:
        why = f"is not a usable block device ({error.strerror})"
        raise errors.NotVacant(device, why, "correct its name") from None
    if kernel.device_is_read_only(device):
        raise errors.NotVacant(device, "is read-only", "see `blockdev --getro`")
    if partitions := kernel.device_partitions(device):
        found = f"has partitions ({', '.join(partitions)})"
        raise errors.NotVacant(device, found, f"name one of them; or {_emptied(device)}")
    if mounts := table.read(kernel).of_device(number):
        found = f"is mounted at {', '.join(one.path for one in mounts)}"
        raise errors.NotVacant(device, found, "name another")
    if kernel.device_is_swap(device):
        raise errors.NotVacant(device, "is used as swap", "name another")
    if holders := kernel.device_holders(device):
        found = f"is a part of {', '.join(holders)}"
        raise errors.NotVacant(device, found, "name another, or that one; `lsblk` shows both")
    if kernel.device_is_held(device):
        raise errors.NotVacant(device, "is in exclusive use by another process", "see `fuser -v`")


def require_blank(kernel: Kernel, device: str) -> None:
    """Require a device without any signature. Raises NotVacant, ProbeFailed."""
    if (found := filesystem.probe(kernel, device)) is not None:
        raise errors.NotVacant(device, f"holds {found}", _emptied(device))


def _emptied(device: str) -> str:
    return (
        f"name another; `A disk that held something` in docs/install.md has how to clear {device}"
    )
