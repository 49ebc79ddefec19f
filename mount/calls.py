"""System calls that Python has no function for, and ioctls. Each raises OSError with its errno.

Numbers are from the kernel's headers, for the architectures with the generic ioctl encoding (x86,
arm, riscv, s390). System calls from 424 on have one number on all of these.
"""

import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.fallocate64.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
# FSCONFIG_*: what a file system that is being configured is told.
SET_FLAG, SET_STRING, CREATE = 0, 1, 6
_UMOUNT_NOFOLLOW = 8
# FALLOC_FL_* of <linux/falloc.h>.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class Calls:
    """Which calls are made: the new ones, or those of kernels before 5.12."""

    def __init__(self, *, old_calls: bool = False) -> None:
        # True takes the way of kernels before 5.12, so that it can be tested on newer ones.
        self._old_calls = old_calls

    def _new_calls(self) -> None:
        if self._old_calls:
            raise OSError(errno.ENOSYS, "the old calls were asked for")


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call; integers go as longs, since a variadic callee reads full registers."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def fsopen(fs_type: str) -> int:
    """A descriptor of a new instance of a file system, to be configured."""
    return syscall(_FSOPEN, fs_type.encode(), _FSOPEN_CLOEXEC)


def fsconfig(context: int, command: int, name: str = "", value: str = "") -> None:
    """Tell a file system one thing, or to be made (CREATE)."""
    key = name.encode() if name else None
    data = os.fsencode(value) if command == SET_STRING else None
    syscall(_FSCONFIG, context, command, key, data, 0)


def fsmount(context: int, attributes: int = 0) -> int:
    """A descriptor of a mount that is at no path; `attributes` are MOUNT_ATTR_*."""
    return syscall(_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)


def mount(source: str, path: str, fs_type: str | None, flags: int, data: str = "") -> None:
    """Mount, remount or bind by the old call, as `flags` say."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(path),
        fs_type.encode() if fs_type else None,
        ctypes.c_ulong(flags),
        os.fsencode(data) if data else None,
    )
    if result == -1:
        raise _error(source, path)


def unmount(place: str, path: str) -> None:
    """Take the topmost mount at `place` away, which errors call `path`; no link is followed."""
    if _libc.umount2(os.fsencode(place), _UMOUNT_NOFOLLOW) == -1:
        raise _error(path)


def syncfs(descriptor: int, path: str) -> None:
    """What was written to the file system of a descriptor is on its device."""
    if _libc.syncfs(descriptor):
        raise _error(path)


def punch_hole(descriptor: int, path: str, offset_bytes: int, length_bytes: int) -> None:
    """Have a range read as zeroes without them being written (fallocate(2), FALLOC_FL_PUNCH_HOLE).

    EOPNOTSUPP for a block device that does not guarantee those zeroes (write_zeroes_max_bytes is 0
    in sysfs); the kernel writes none in its place (BLKDEV_ZERO_NOFALLBACK, block/fops.c).
    """
    mode = _PUNCH_HOLE | _KEEP_SIZE
    if _libc.fallocate64(descriptor, mode, offset_bytes, length_bytes) == -1:
        raise _error(path)


def ioctl_number(direction: int, kind: int, number: int, size: int) -> int:
    """An ioctl number by <asm-generic/ioctl.h>; direction is 0 none, 1 write, 2 read, 3 both."""
    return direction << 30 | size << 16 | kind << 8 | number


def ioctl(path: str, request: int, argument: bytes = b"", mode: int = os.O_RDONLY) -> bytes:
    """Ask a freshly opened file one thing; the kernel's copy of the argument comes back."""
    descriptor = os.open(path, mode | os.O_CLOEXEC)
    try:
        # Not fcntl.ioctl, which keeps all threads waiting where the argument has over 1024 bytes.
        buffer = ctypes.create_string_buffer(argument, len(argument))
        if _libc.ioctl(descriptor, ctypes.c_ulong(request), buffer if argument else None) == -1:
            raise _error(path)
        return buffer.raw
    finally:
        os.close(descriptor)


def _error(path: str, other: str | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path, None, other)
