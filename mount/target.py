"""Check and resolve the target paths of mounts; make and remove their directories and files.

`resolve` resolves the symbolic links of a path once. All other functions of this package take the
resolved path and follow no symbolic link, so that a link that is put there later is an error and
leads nowhere. No function here changes the mode of an existing file or removes anything with data.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from mount import mount_errors, table
from mount.kernel import Kernel

# Length limits of a path and of each of its parts, in bytes.
_PATH_MAX_BYTES = 4095  # PATH_MAX of <linux/limits.h> counts the closing NUL
_NAME_MAX_BYTES = 255
# Pattern of a control character.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Modes of the directories and files that are made as mount points.
_DIRECTORY_MODE = 0o750
_FILE_MODE = 0o640


def check(path: str) -> str:
    """Return `path`, or raise BadPath unless it is absolute, normalised, printable and short."""
    if not path.startswith("/"):
        raise mount_errors.BadPath(path, "is not absolute")
    if _CONTROL.search(path):
        raise mount_errors.BadPath(path, "holds control characters")
    if path == "/" or path != os.path.normpath(path) or path.startswith("//"):
        raise mount_errors.BadPath(path, "is not normalised")
    try:
        encoded = path.encode()
    except UnicodeEncodeError as error:
        raise mount_errors.BadPath(path, "is not valid UTF-8") from error
    if len(encoded) > _PATH_MAX_BYTES:
        raise mount_errors.BadPath(path, f"is longer than {_PATH_MAX_BYTES} bytes")
    if max(map(len, encoded.split(b"/"))) > _NAME_MAX_BYTES:
        raise mount_errors.BadPath(path, f"has a part longer than {_NAME_MAX_BYTES} bytes")
    return path


def resolve(kernel: Kernel, path: str, allowed_directories: Sequence[str] = ("/",)) -> str:
    """Resolve the symbolic links in a path's parents, as in the kernel's mount table.

    /var/lib/kubelet is often a link, and mountinfo has the path that it leads to. Raises BadPath
    unless the resolved path lies below one of `allowed_directories` and is no link itself.
    """
    parent, _, name = check(path).rpartition("/")
    resolved = os.path.join(kernel.real_path(parent or "/"), name)  # noqa: PTH118 - strings all along
    # EIO from a mount whose file system was shut down is ignored: unmounting needs its path, too.
    with suppress(OSError):
        if stat.S_ISLNK(kernel.lstat(resolved).st_mode):
            raise mount_errors.BadPath(path, "is a symbolic link")
    if not is_inside(kernel, resolved, allowed_directories):
        raise mount_errors.BadPath(
            path,
            f"leads out of {' and '.join(allowed_directories)}, where mounts may be (kubelet_dir)",
        )
    return resolved


def is_inside(kernel: Kernel, path: str, directories: Sequence[str]) -> bool:
    """Whether a resolved path lies below one of the directories, which may be symbolic links."""

    def is_below(directory: str) -> bool:
        return path.startswith(directory.rstrip("/") + "/")

    # If the path begins with a directory as it is written, the directory has no links, since the
    # path is resolved. Links are resolved only in the directories for which this is not so.
    return any(map(is_below, directories)) or any(
        is_below(kernel.real_path(directory)) for directory in directories
    )


@contextmanager
def unchanged(path: str) -> Iterator[None]:
    """Turn ELOOP within a `with` block into PathChanged.

    A resolved path has no symbolic link. So a link that the kernel meets was put there after the
    path was resolved.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise mount_errors.PathChanged(path) from error
        raise


def check_directory(kernel: Kernel, path: str) -> None:
    """Raise NotADirectory for an existing path that is not a directory."""
    status = _lstat(kernel, path)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise mount_errors.NotADirectory(path)


def ensure_directory(kernel: Kernel, path: str) -> None:
    """Make a directory at `path` unless there is one.

    Raises NotADirectory if another file is at the path, TargetError if the kernel refuses.

    The parent must exist.
    """
    status = _ensure_existing(kernel, path, lambda: kernel.make_directory(path, _DIRECTORY_MODE))
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise mount_errors.NotADirectory(path)


def ensure_file(kernel: Kernel, path: str) -> None:
    """Make a file at `path`, for the bind of a device node, unless there is one.

    A device node at the path is a bind that exists already. Raises NotAFile if a directory or other
    file is at the path, TargetError if the kernel refuses.
    """
    status = _ensure_existing(kernel, path, lambda: kernel.make_file(path, _FILE_MODE))
    if status is not None and not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise mount_errors.NotAFile(path)


def ensure_absent(kernel: Kernel, path: str) -> None:
    """Remove the empty directory or empty file at `path`, if there is one.

    Raises TargetInUse for a directory or file with contents, and for a mount point. Raises
    TargetError if the kernel refuses.
    """
    status = _lstat(kernel, path)
    if status is None:
        return
    try:
        if stat.S_ISDIR(status.st_mode):
            with unchanged(path):
                kernel.remove_directory(path)
        elif stat.S_ISREG(status.st_mode) and status.st_size == 0:
            with unchanged(path):
                kernel.remove_file(path)
        else:
            _require_unmounted(kernel, path)
            raise mount_errors.TargetInUse(
                path, "is not an empty file or directory; it is left alone"
            )
    except FileNotFoundError:
        return
    except OSError as error:
        # EBUSY: the path is a mount point, which the kernel does not remove (rmdir(2), unlink(2)).
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            _require_unmounted(kernel, path)
            why = "is not empty or still in use; it is left alone"
            raise mount_errors.TargetInUse(path, why) from error
        raise mount_errors.TargetError(path, f"cannot be removed: {error.strerror}") from error


def _require_unmounted(kernel: Kernel, path: str) -> None:
    if mounted := table.read(kernel).at(path):
        raise mount_errors.TargetInUse(
            path, f"{mounted[-1]} is still mounted here; unmount it first"
        )


def _ensure_existing(kernel: Kernel, path: str, make: Callable[[], None]) -> os.stat_result | None:
    """The status of the existing file at `path`; None after `make` made an absent one."""
    if (status := _lstat(kernel, path)) is not None:
        return status
    try:
        with unchanged(path):
            make()
    except FileExistsError:
        return _lstat(kernel, path)
    except OSError as error:
        raise mount_errors.TargetError(path, f"cannot be made: {error.strerror}") from error
    return None


def _lstat(kernel: Kernel, path: str) -> os.stat_result | None:
    try:
        with unchanged(path):
            return kernel.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise mount_errors.TargetError(path, f"cannot be looked at: {error.strerror}") from error
