"""Mount, bind and unmount directories and device nodes, exactly as requested or with an error."""

import errno
import os
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from mount import filesystem, mount_errors, table, target
from mount.kernel import ATIME, Kernel
from mount.options import CONTEXT, Options, is_same_context
from mount.table import DeviceNumber, Mount, Table

# Error numbers that file systems return for damage: EUCLEAN for the kernel's EFSCORRUPTED, EBADMSG
# for EFSBADCRC.
_DAMAGE = (errno.EUCLEAN, errno.EBADMSG)
# Options in mountinfo that must equal the requested ones. Options of the file system itself are not
# compared, as the kernel shows them in other words than were given.
_COMPARED = {"nosuid", "nodev", "noexec", "noatime", "relatime", "nodiratime", "nosymfollow"}


def ensure_mounted(
    kernel: Kernel,
    device: str,
    path: str,
    fs_type: str,
    options: Options,
    read_only: bool = False,
    mount_table: table.Table | None = None,
) -> None:
    """Mount the file system on `device` at the directory `path`, unless it is mounted there.

    `mount_table` is the mount table if the caller has read it. Raises BadOption, Busy, Damaged,
    DeviceMissing, ForeignMount, MountConflict, MountFailed, OtherContext, UnsupportedFileSystem.
    """
    file_system = filesystem.supported(fs_type)
    number = device_number(kernel, device)
    attributes = options.attributes | ({"ro"} if read_only else set())
    expected_options = _words(attributes, {"relatime"})
    mount_table = table.read(kernel) if mount_table is None else mount_table
    if _is_mounted(mount_table, path, number, expected_options):
        _check_context(mount_table.at(path)[-1], options.context)
        return
    # Check the SELinux context here: for a different context, and for any context without SELinux,
    # the kernel returns EINVAL without a reason.
    for mount in mount_table.of_device(number):
        _require_context(mount, options.context)
    if options.context and not kernel.has_selinux():
        raise mount_errors.BadOption(
            f"{CONTEXT}{options.context}", "is for SELinux, which is off on this node"
        )
    # The superblock of a read-only mount must be read-only, too: otherwise the kernel would write
    # to the device (log recovery, atime).
    flags = options.superblock | ({"ro"} if "ro" in attributes else set())
    context = [f"{CONTEXT}{options.context}"] if options.context else []
    parameters = (*sorted(flags), *options.data, *context)
    try:
        with target.unchanged(path):
            _mount(
                kernel, device, path, fs_type, attributes, parameters, file_system.duplicate_data
            )
    except OSError as error:
        if error.errno in _DAMAGE:
            raise mount_errors.Damaged(device, fs_type, _why(error), file_system.repair) from error
        # EBUSY: a mount of the file system has the other access, ro or rw, and the superblock has
        # one access for all mounts; or another driver uses the device.
        if error.errno == errno.EBUSY:
            raise mount_errors.Busy(device) from error
        raise mount_errors.MountFailed(device, path, _why(error)) from error
    with _undoing(kernel, device, path):
        if not _is_mounted(table.read(kernel), path, number, expected_options):
            raise mount_errors.MountFailed(device, path, "the mount table does not show it")


def ensure_bound(
    kernel: Kernel,
    source: str,
    path: str,
    options: Options,
    read_only: bool = False,
    mount_table: table.Table | None = None,
) -> None:
    """Bind `source`, a directory or block device node, to `path`, unless it is bound there.

    Both paths are resolved. A read-only bind is read-only from its first moment, and no bind is
    stacked on another mount. A given context must equal the context of the file system.
    `mount_table` is the mount table if the caller has read it. Raises NotMounted,
    ForeignMount, MountConflict, MountFailed, OtherContext.
    """
    mount_table = table.read(kernel) if mount_table is None else mount_table
    holder = mount_table.holding(source)
    if holder is None:
        raise mount_errors.NotMounted(source)
    attributes = options.attributes | ({"ro"} if read_only else set())
    expected_options = _words(attributes, frozenset(holder.options))
    root = _root_of(holder, source)
    if _is_bound(kernel, mount_table, path, source, holder, root, expected_options):
        if options.context:
            _check_context(mount_table.at(path)[-1], options.context)
        return
    if options.context:
        _require_context(holder, options.context)
    try:
        with target.unchanged(path):
            kernel.bind(source, path, attributes)
    except OSError as error:
        raise mount_errors.MountFailed(source, path, _why(error)) from error
    with _undoing(kernel, source, path):
        if not _is_bound(kernel, table.read(kernel), path, source, holder, root, expected_options):
            raise mount_errors.MountFailed(source, path, "the mount table does not show it")


def ensure_unmounted(
    kernel: Kernel,
    path: str,
    devices: Collection[DeviceNumber] | None = None,
    mounts: Table | None = None,
) -> None:
    """Unmount all mounts that are stacked at `path`, neither lazily nor by force.

    Each mount must be of one of `devices` (None: all must be of the same device), or the node of a
    removed device; otherwise nothing is unmounted, and ForeignMount is raised. `mounts` is the
    mount table if the caller has read it. Raises Busy, UnmountFailed.
    """
    stack = (mounts or table.read(kernel)).at(path)
    for mount in stack:
        if not (mount.is_stale_node or _is_of(kernel, mount, stack[-1], devices)):
            raise mount_errors.ForeignMount(path, str(mount))
    for _ in stack:
        _unmount(kernel, path)
    if remaining := table.read(kernel).at(path):
        raise mount_errors.UnmountFailed(
            path, f"{remaining[-1]} is mounted here again; try once more"
        )


def device_number(kernel: Kernel, device: str) -> DeviceNumber:
    """The (major, minor) of the block device whose node is at `device`. Raises DeviceMissing."""
    try:
        return kernel.device_number(device)
    except OSError as error:
        raise mount_errors.DeviceMissing(device, str(error.strerror)) from error


@contextmanager
def _undoing(kernel: Kernel, source: str, path: str) -> Iterator[None]:
    """Unmount a new mount if the `with` block raises MountConflict; then raise MountFailed."""
    try:
        yield
    except mount_errors.MountConflict as error:
        kernel.unmount(path)
        raise mount_errors.MountFailed(
            source, path, f"the kernel made it {error.found_options}"
        ) from error


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
        # xfs returns a bare EINVAL if a file system with the same UUID is mounted (xfs_uuid_mount):
        # the origin of this snapshot or clone. If the reason is another one, the second mount fails
        # with the same error.
        missing_options = [word for word in duplicate_data if word not in parameters]
        if error.errno != errno.EINVAL or not missing_options:
            raise
        kernel.mount(device, path, fs_type, attributes, (*parameters, *missing_options))


def _unmount(kernel: Kernel, path: str) -> None:
    if _try_to_unmount(kernel, path):
        return
    # A system call on a path in a mount, such as statfs(2), keeps the mount busy for a moment. If
    # no process is found, either that moment is over, or another mount keeps this one busy.
    users = processes(kernel, path)
    if users or not _try_to_unmount(kernel, path):
        raise mount_errors.Busy(path, users)


def _try_to_unmount(kernel: Kernel, path: str) -> bool:
    """Unmount the topmost mount at `path`; False if it is busy. Raises UnmountFailed."""
    try:
        with target.unchanged(path):
            kernel.unmount(path)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        # EINVAL: the path is no mount point, as another process has unmounted it meanwhile.
        if error.errno != errno.EINVAL:
            raise mount_errors.UnmountFailed(path, _why(error)) from error
    return True


def _is_mounted(
    mounts: table.Table, path: str, number: DeviceNumber, expected_options: Set[str]
) -> bool:
    """Whether a device's file system is mounted at `path` with the expected options.

    Raises ForeignMount, MountConflict.
    """
    stack = mounts.at(path)
    for mount in stack:
        if mount.device != number or mount.root != "/":
            raise mount_errors.ForeignMount(path, str(mount))
    if stack:
        _check_words(stack[-1], expected_options)
    return bool(stack)


def _is_bound(
    kernel: Kernel,
    mounts: table.Table,
    path: str,
    origin: str,
    holder: Mount,
    root: str,
    expected_options: Set[str],
) -> bool:
    stack = mounts.at(path)
    if not stack:
        return False
    top_mount = stack[-1]
    is_same_mount = (top_mount.device, top_mount.root) == (holder.device, root)
    # Compare the nodes' devices: a node of the same device may be in another devtmpfs, or may have
    # been made anew since.
    if not is_same_mount and node(kernel, path) != (node(kernel, origin) or (-1, -1)):
        raise mount_errors.ForeignMount(path, str(top_mount))
    _check_words(top_mount, expected_options)
    return True


def _is_of(
    kernel: Kernel, mount: Mount, top_mount: Mount, devices: Collection[DeviceNumber] | None
) -> bool:
    if devices is None:
        return mount.device == top_mount.device
    if mount.device in devices:
        return True
    # The mount table has a bound device node as a mount of devtmpfs. The topmost node is opened to
    # find its device; mounts of the same node below it are of the same device.
    is_same_node = (mount.device, mount.root) == (top_mount.device, top_mount.root)
    return is_same_node and node(kernel, top_mount.path) in devices


def node(kernel: Kernel, path: str) -> DeviceNumber | None:
    """The number of the block device whose node is at `path`; None for no such node."""
    try:
        return kernel.device_number(path)
    except OSError:
        return None


def _root_of(holder: Mount, path: str) -> str:
    """The path of the file at `path` within the file system of its mount, `holder`."""
    path_inside = path[len(holder.path.rstrip("/")) :]
    return (holder.root.rstrip("/") + path_inside) or "/"


def _words(attributes: Set[str], inherited: Set[str]) -> frozenset[str]:
    """The options that mountinfo will show for a mount with given and inherited attributes."""
    times = attributes & ATIME or inherited & ATIME
    other_options = (attributes | inherited) - ATIME
    return frozenset((other_options | times) - {"strictatime"})


def _check_words(mount: Mount, expected_options: Set[str]) -> None:
    words = set(mount.options) | ({"ro"} if mount.read_only else set())
    if ("ro" in words, words & _COMPARED) != (
        "ro" in expected_options,
        expected_options & _COMPARED,
    ):
        raise mount_errors.MountConflict(mount.path, _shown(words), _shown(expected_options))


def _check_context(mount: Mount, context: str) -> None:
    if not is_same_context(mount.context, context):
        raise mount_errors.MountConflict(
            mount.path, f"with {CONTEXT}{mount.context}", f"{CONTEXT}{context}"
        )


def _require_context(mount: Mount, context: str) -> None:
    """Raise OtherContext if a mounted file system has a different SELinux context, or none."""
    if not is_same_context(mount.context, context):
        raise mount_errors.OtherContext(mount.path, mount.context, context)


def _shown(words: Set[str]) -> str:
    return ",".join(["ro" if "ro" in words else "rw", *sorted(words & _COMPARED)])


def _why(error: OSError) -> str:
    if error.errno == errno.EEXIST:  # btrfs, fs/btrfs/volumes.c: device_list_add
        return "a file system of the same UUID is there (EEXIST); a copy needs one of its own"
    if error.errno == errno.ENODEV:  # mount(2): the type is not configured in the kernel
        return "the kernel has no such file system (ENODEV); load its module on the node"
    return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"


def bound_nodes(kernel: Kernel, mounts: Table) -> list[tuple[Mount, DeviceNumber]]:
    """All binds of block device nodes in a mount table, in the table's order, with the numbers."""
    binds = [bind for bind in mounts.of_types(table.NODE_HOLDERS) if bind.root != "/"]
    return [(bind, number) for bind in binds if (number := node(kernel, bind.path)) is not None]


# Directory of the kernel's information about processes (proc(5)).
_PROC = Path("/proc")


def processes(kernel: Kernel, path: str) -> tuple[str, ...]:
    """The processes that use the topmost mount at a resolved path, each as `name (pid)`.

    A mount that was propagated into a container has another path there, and is found by its device
    and root. For a path that is no mount point but a device node (`kernel.real_path(device.path)`)
    the result has the processes of this mount namespace that opened the node. Processes that end
    meanwhile are left out.

    Other processes are visible only with CAP_SYS_PTRACE, which unit and pod have; a pod without
    `hostPID` sees its own processes alone.
    """
    stack = table.Table(kernel.mountinfo()).at(path)
    device_and_root = (stack[-1].device, stack[-1].root) if stack else None
    own_namespace = os.readlink(_PROC / "self/ns/mnt")  # noqa: PTH115
    users = []
    for process in psutil.process_iter(["name"]):
        directory = _PROC / str(process.pid)
        with suppress(OSError, ValueError):
            is_here = os.readlink(directory / "ns/mnt") == own_namespace  # noqa: PTH115
            paths = {path} if is_here else _showing(directory, device_and_root)
            if paths and any(_is_in(link, paths) for link in _links(directory)):
                users.append(f"{process.info['name']} ({process.pid})")
    return tuple(users)


def _showing(process: Path, device_and_root: tuple[DeviceNumber, str] | None) -> set[str]:
    """The paths of a mount in the mount namespace of another process.

    `device_and_root` has the device of the mount and the root of the mount within the file system;
    None for no mount.
    """
    text = (process / "mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    if device_and_root is None:
        return set()
    device, root = device_and_root
    return {mount.path for mount in table.Table(text).of_device(device) if mount.root == root}


def _links(process: Path) -> Iterator[str]:
    """Yield the paths of all files that a process uses (proc(5)).

    The files are its working directory, root, program, open files and mapped files.
    """
    links = [process / name for name in ("cwd", "root", "exe")]
    for name in ("fd", "map_files"):
        with suppress(OSError):
            links += (process / name).iterdir()
    for link in links:
        with suppress(OSError):
            yield os.readlink(link)  # noqa: PTH115 - a path library would normalise what it says


def _is_in(link: str, paths: set[str]) -> bool:
    return any(link == path or link.startswith(path.rstrip("/") + "/") for path in paths)


def require_unused(kernel: Kernel, device: str) -> None:
    """Raise NotVacant for a device that is in use or read-only. Runs no program."""
    try:
        number = kernel.device_number(device)
    except FileNotFoundError:
        raise mount_errors.NotVacant(
            device, "is not there", "attach it, or correct its name"
        ) from None
    except OSError as error:
        why = f"is not a usable block device ({error.strerror})"
        raise mount_errors.NotVacant(device, why, "correct its name") from None
    if kernel.device_is_read_only(device):
        raise mount_errors.NotVacant(device, "is read-only", "see `blockdev --getro`")
    if partitions := kernel.device_partitions(device):
        state = f"has partitions ({', '.join(partitions)})"
        raise mount_errors.NotVacant(device, state, f"name one of them; or {_emptied(device)}")
    if mounts := table.read(kernel).of_device(number):
        state = f"is mounted at {', '.join(mount.path for mount in mounts)}"
        raise mount_errors.NotVacant(device, state, "name another")
    if kernel.device_is_swap(device):
        raise mount_errors.NotVacant(device, "is used as swap", "name another")
    if holders := kernel.device_holders(device):
        state = f"is a part of {', '.join(holders)}"
        raise mount_errors.NotVacant(device, state, "name another, or that one; `lsblk` shows both")
    if kernel.device_is_held(device):
        raise mount_errors.NotVacant(
            device, "is in exclusive use by another process", "see `fuser -v`"
        )


def require_blank(kernel: Kernel, device: str) -> None:
    """Raise NotVacant for a device with any signature, ProbeFailed if it cannot be read."""
    if (signature := filesystem.probe(kernel, device)) is not None:
        raise mount_errors.NotVacant(device, f"holds {signature}", _emptied(device))


def _emptied(device: str) -> str:
    return (
        f"name another; `A disk that held something` in docs/install.md has how to clear {device}"
    )
