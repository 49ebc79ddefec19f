"""The places that mounts are made at: directories and files, made and removed with care.

A path is resolved once, by `resolve`; everything else in this package takes the place that it gave,
and follows no symbolic link, so a link that is put on the way meanwhile leads nowhere. Nothing here
changes the mode of what exists, or removes anything that holds data.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from mount import errors, table
from mount.kernel import Kernel

_PATH_MAX_BYTES = 4095  # PATH_MAX of <linux/limits.h> counts the closing NUL
_NAME_MAX_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DIRECTORY_MODE = 0o750
_FILE_MODE = 0o640


def check(path: str) -> str:
    """`path` itself, if it is absolute, normalised, printable and short enough; else BadPath."""
    if not path.startswith("/"):
        raise errors.BadPath(path, "is not absolute")
    if _CONTROL.search(path):
        raise errors.BadPath(path, "holds control characters")
    if path == "/" or path != os.path.normpath(path) or path.startswith("//"):
        raise errors.BadPath(path, "is not normalised")
    try:
        encoded = path.encode()
    except UnicodeEncodeError as error:
        raise errors.BadPath(path, "is not valid UTF-8") from error
    if len(encoded) > _PATH_MAX_BYTES:
        raise errors.BadPath(path, f"is longer than {_PATH_MAX_BYTES} bytes")
    if max(map(len, encoded.split(b"/"))) > _NAME_MAX_BYTES:
        raise errors.BadPath(path, f"has a part longer than {_NAME_MAX_BYTES} bytes")
    return path


def resolve(kernel: Kernel, path: str, inside: Sequence[str] = ("/",)) -> str:
    """The path under which the kernel's mount table knows `path`: links in its parents resolved.

    /var/lib/kubelet is often a link, and mountinfo names what it leads to. The place must lie below
    one of the directories `inside`, and must not be a link itself (BadPath).
    """
    parent, _, name = check(path).rpartition("/")
    place = os.path.join(kernel.real_path(parent or "/"), name)  # noqa: PTH118 - strings all along
    # A mount whose file system was shut down answers EIO; it must be found all the same.
    with suppress(OSError):
        if stat.S_ISLNK(kernel.lstat(place).st_mode):
            raise errors.BadPath(path, "is a symbolic link")
    if not is_inside(kernel, place, inside):
        raise errors.BadPath(
            path, f"leads out of {' and '.join(inside)}, where mounts may be (kubelet_dir)"
        )
    return place


def is_inside(kernel: Kernel, place: str, directories: Sequence[str]) -> bool:
    """Whether a place lies below one of the directories, which may be links themselves."""

    def is_below(directory: str) -> bool:
        return place.startswith(directory.rstrip("/") + "/")

    # A place has no links on its way: a directory that it begins with is its own real path.
    return any(map(is_below, directories)) or any(
        is_below(kernel.real_path(one)) for one in directories
    )


@contextmanager
def unchanged(path: str) -> Iterator[None]:
    """Around the kernel's operations: a link met in a resolved path was put there (PathChanged)."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise errors.PathChanged(path) from error
        raise


def check_directory(kernel: Kernel, path: str) -> None:
    """Raise NotADirectory where something else lies at `path`; nothing at all is as well."""
    found = _lstat(kernel, path)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise errors.NotADirectory(path)


def ensure_directory(kernel: Kernel, path: str) -> None:
    """Have a directory at `path`; its parent exists. Raises NotADirectory, TargetError."""
    found = _there(kernel, path, lambda: kernel.make_directory(path, _DIRECTORY_MODE))
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise errors.NotADirectory(path)


def ensure_file(kernel: Kernel, path: str) -> None:
    """Have a file at `path` that a device node can be bound to. Raises NotAFile, TargetError.

    A device node there is one that is bound already.
    """
    found = _there(kernel, path, lambda: kernel.make_file(path, _FILE_MODE))
    if found is not None and not (stat.S_ISREG(found.st_mode) or stat.S_ISBLK(found.st_mode)):
        raise errors.NotAFile(path)


def ensure_absent(kernel: Kernel, path: str) -> None:
    """Have nothing at `path`. Only an empty directory or an empty file goes; else TargetInUse."""
    found = _lstat(kernel, path)
    if found is None:
        return
    try:
        if stat.S_ISDIR(found.st_mode):
            with unchanged(path):
                kernel.remove_directory(path)
        elif stat.S_ISREG(found.st_mode) and found.st_size == 0:
            with unchanged(path):
                kernel.remove_file(path)
        else:
            _require_unmounted(kernel, path)
            raise errors.TargetInUse(path, "is not an empty file or directory; it is left alone")
    except FileNotFoundError:
        return
    except OSError as error:
        # EBUSY: something is mounted here, which the kernel does not remove (rmdir(2), unlink(2)).
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            _require_unmounted(kernel, path)
            why = "is not empty or still in use; it is left alone"
            raise errors.TargetInUse(path, why) from error
        raise errors.TargetError(path, f"cannot be removed: {error.strerror}") from error


def _require_unmounted(kernel: Kernel, path: str) -> None:
    if mounted := table.read(kernel).at(path):
        raise errors.TargetInUse(path, f"{mounted[-1]} is still mounted here; unmount it first")


def _there(kernel: Kernel, path: str, make: Callable[[], None]) -> os.stat_result | None:
    """What lies at `path`; None for what was made there now, for nothing did."""
    if (found := _lstat(kernel, path)) is not None:
        return found
    try:
        with unchanged(path):
            make()
    except FileExistsError:
        return _lstat(kernel, path)
    except OSError as error:
        raise errors.TargetError(path, f"cannot be made: {error.strerror}") from error
    return None


def _lstat(kernel: Kernel, path: str) -> os.stat_result | None:
    try:
        with unchanged(path):
            return kernel.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise errors.TargetError(path, f"cannot be looked at: {error.strerror}") from error
