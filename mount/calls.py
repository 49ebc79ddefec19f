"""System calls, ioctls and libblkid by ctypes, for which Python has no functions."""

import ctypes
import errno
import functools
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.fallocate64.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64

# Command of prctl(2).
_PR_SET_DUMPABLE = 4
# Numbers of system calls, equal on all architectures, and their flags (<linux/mount.h>).
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
# Commands of fsconfig(2): FSCONFIG_*.
SET_FLAG, SET_STRING, CREATE = 0, 1, 6
_UMOUNT_NOFOLLOW = 8
# Flags of fallocate(2): FALLOC_FL_* of <linux/falloc.h>.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class Calls:
    """Base of classes that use new system calls; on kernels before 5.12 they use older ones."""

    def __init__(self, *, old_calls: bool = False) -> None:
        # For tests on newer kernels: whether to use only the system calls of kernels before 5.12.
        self._old_calls = old_calls

    def _new_calls(self) -> None:
        if self._old_calls:
            raise OSError(errno.ENOSYS, "the old calls were asked for")


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call. Raises OSError."""
    # syscall(2) is variadic and reads whole registers, so integers are passed as longs.
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def forbid_dumps() -> None:
    """Disable core dumps of this process (prctl(2), PR_SET_DUMPABLE)."""
    if _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def fsopen(fs_type: str) -> int:
    """Start to configure a new instance of a file system; returns its descriptor."""
    return syscall(_FSOPEN, fs_type.encode(), _FSOPEN_CLOEXEC)


def fsconfig(context: int, command: int, name: str = "", value: str = "") -> None:
    """Set a parameter of a new file system instance, or make the instance (CREATE)."""
    key = name.encode() if name else None
    data = os.fsencode(value) if command == SET_STRING else None
    syscall(_FSCONFIG, context, command, key, data, 0)


def fsmount(context: int, attributes: int = 0) -> int:
    """Mount a configured file system instance without a path; returns the mount's descriptor.

    `attributes` are MOUNT_ATTR_*.
    """
    return syscall(_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)


def mount(source: str, path: str, fs_type: str | None, flags: int, data: str = "") -> None:
    """Mount, remount or bind by the old system call, as `flags` say."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(path),
        fs_type.encode() if fs_type else None,
        ctypes.c_ulong(flags),
        os.fsencode(data) if data else None,
    )
    if result == -1:
        raise _error(source, path)


def unmount(target: str, path: str) -> None:
    """umount2(2): remove the topmost mount at `target`, a path that follows no symbolic link.

    Errors name `path` instead of `target`.
    """
    if _libc.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW) == -1:
        raise _error(path)


def syncfs(descriptor: int, path: str) -> None:
    """Write back all data of a descriptor's file system to its device."""
    if _libc.syncfs(descriptor):
        raise _error(path)


def file_system_kind(path: str) -> int:
    """statfs(2): the magic number (f_type) of the file system in which a file lies."""
    # Structure statfs begins with f_type, a long, and is shorter than this array on any platform.
    statistics = (ctypes.c_ulong * 64)()
    if _libc.statfs(os.fsencode(path), statistics) == -1:
        raise _error(path)
    return int(statistics[0])


def punch_hole(descriptor: int, path: str, offset_bytes: int, length_bytes: int) -> None:
    """fallocate(2) with FALLOC_FL_PUNCH_HOLE: zero a range without writing zeroes.

    A block device gets REQ_OP_WRITE_ZEROES, and may unmap the range. Without that request
    (write_zeroes_max_bytes is 0 in sysfs) the call fails with EOPNOTSUPP: the kernel does not write
    zeroes in its place (BLKDEV_ZERO_NOFALLBACK, blkdev_fallocate() of block/fops.c, both in Linux
    4.18 and 6.17).
    """
    mode = _PUNCH_HOLE | _KEEP_SIZE
    if _libc.fallocate64(descriptor, mode, offset_bytes, length_bytes) == -1:
        raise _error(path)


def ioctl_number(direction: int, kind: int, number: int, size: int) -> int:
    """An ioctl number (<asm-generic/ioctl.h>); direction is 0 none, 1 write, 2 read, 3 both."""
    return direction << 30 | size << 16 | kind << 8 | number


def ioctl(path: str, request: int, argument: bytes = b"", mode: int = os.O_RDONLY) -> bytes:
    """Make one ioctl on the file at a path; return the argument as the driver changed it."""
    descriptor = os.open(path, mode | os.O_CLOEXEC)
    try:
        buffer = bytearray(argument)
        ioctl_of(descriptor, path, request, buffer)
        return bytes(buffer)
    finally:
        os.close(descriptor)


def ioctl_of(descriptor: int, path: str, request: int, buffer: bytearray) -> int:
    """Make an ioctl(2) on an open file; the kernel may change the buffer. Raises OSError.

    Returns the kernel's answer, 0 as a rule; some drivers have positive numbers for failures.
    fcntl.ioctl is not used: with a buffer of more than 1,024 bytes it keeps Python's global lock
    during the call, and would stop all threads while a dead disk keeps the ioctl waiting.
    """
    argument = (ctypes.c_char * len(buffer)).from_buffer(buffer) if buffer else None
    answer = int(_libc.ioctl(descriptor, ctypes.c_ulong(request), argument))
    if answer == -1:
        raise _error(path)
    return answer


def _error(path: str, second_path: str | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path, None, second_path)


# Flags of <blkid/blkid.h>: BLKID_SUBLKS_*, BLKID_FLTR_ONLYIN, BLKID_USAGE_*.
_LABEL, _UUID, _TYPE, _USAGE = 1 << 1, 1 << 3, 1 << 5, 1 << 7
_ONLY_IN = 2
_FILE_SYSTEM, _RAID, _CRYPTO, _OTHER = 1 << 1, 1 << 2, 1 << 3, 1 << 4
_NAMES = ("TYPE", "USAGE", "UUID", "LABEL", "BLOCK_SIZE", "PTTYPE", "PTUUID")
# Results of blkid_do_safeprobe(); anything else is a failure.
_FOUND, _NOTHING, _AMBIVALENT = 0, 1, -2

# Size, in bytes, of the first read, which proves that the device can be read: libblkid may report
# an unreadable device as blank.
_BLOCK_BYTES = 4096


@functools.cache
def _library() -> ctypes.CDLL:
    """The loaded libblkid. Raises OSError (ENOSYS) on a node without libblkid."""
    try:
        library = ctypes.CDLL("libblkid.so.1", use_errno=True)
    except OSError as error:
        raise OSError(errno.ENOSYS, f"libblkid: {error}") from None
    probe, number = ctypes.c_void_p, ctypes.c_int
    library.blkid_new_probe.restype = probe
    for name, arguments in {
        "blkid_free_probe": [probe],
        "blkid_probe_set_device": [probe, number, ctypes.c_int64, ctypes.c_int64],
        "blkid_probe_enable_partitions": [probe, number],
        "blkid_probe_enable_superblocks": [probe, number],
        "blkid_probe_set_superblocks_flags": [probe, number],
        "blkid_probe_filter_superblocks_usage": [probe, number, number],
        "blkid_probe_filter_superblocks_type": [probe, number, ctypes.POINTER(ctypes.c_char_p)],
        "blkid_do_safeprobe": [probe],
        "blkid_probe_lookup_value": [
            *(probe, ctypes.c_char_p),
            *(ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t)),
        ],
    }.items():
        getattr(library, name).argtypes = arguments
    return library


def signatures(device: str, *, fs_type: str = "", length_bytes: int = 0) -> dict[str, str]:
    """The tags that libblkid finds on a device; empty for a blank device.

    The tags are TYPE, USAGE, UUID, LABEL, BLOCK_SIZE, PTTYPE and PTUUID. With `fs_type` libblkid
    looks for the superblock of that file system alone; with `length_bytes` in the device's first
    bytes alone. Raises OSError: ENOSYS without libblkid, ENOTUNIQ for more than one signature.
    """
    library = _library()
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not os.pread(descriptor, _BLOCK_BYTES, 0):
            raise OSError(errno.ENODATA, "it holds not a byte", device)
        probe = library.blkid_new_probe()
        if not probe:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), device)
        try:
            if library.blkid_probe_set_device(probe, descriptor, 0, length_bytes):
                raise OSError(ctypes.get_errno() or errno.EIO, "libblkid cannot read it", device)
            return _probed(library, probe, device, fs_type)
        finally:
            library.blkid_free_probe(probe)
    finally:
        os.close(descriptor)


def _probed(library: ctypes.CDLL, probe: int, device: str, fs_type: str) -> dict[str, str]:
    if fs_type:
        names = (ctypes.c_char_p * 2)(fs_type.encode(), None)
        filtered = library.blkid_probe_filter_superblocks_type(probe, _ONLY_IN, names)
    else:
        usages = _FILE_SYSTEM | _RAID | _CRYPTO | _OTHER
        filtered = library.blkid_probe_filter_superblocks_usage(probe, _ONLY_IN, usages)
    prepared = (
        filtered,
        library.blkid_probe_enable_partitions(probe, 0 if fs_type else 1),
        library.blkid_probe_enable_superblocks(probe, 1),
        library.blkid_probe_set_superblocks_flags(probe, _LABEL | _UUID | _TYPE | _USAGE),
    )
    ctypes.set_errno(0)
    result = library.blkid_do_safeprobe(probe) if not any(prepared) else -1
    if result == _NOTHING:
        return {}
    if result == _AMBIVALENT:
        raise OSError(errno.ENOTUNIQ, "it bears the signatures of more than one thing", device)
    if result != _FOUND:
        code = ctypes.get_errno() or errno.EIO
        raise OSError(code, os.strerror(code), device)
    values = {name: _value(library, probe, name) for name in _NAMES}
    return {name: value for name, value in values.items() if value is not None}


def _value(library: ctypes.CDLL, probe: int, name: str) -> str | None:
    data, length = ctypes.c_char_p(), ctypes.c_size_t()
    if library.blkid_probe_lookup_value(
        probe, name.encode(), ctypes.byref(data), ctypes.byref(length)
    ):
        return None
    return (data.value or b"").decode(errors="backslashreplace")
