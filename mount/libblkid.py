"""What a device bears, read by libblkid in this process: the same as `blkid --probe` tells of it.

It is called without the interpreter's lock (ctypes), so a disk that does not answer holds its own
caller only. The library is that of util-linux's blkid; a node may lack it.
"""

import ctypes
import errno
import functools
import os

# <blkid/blkid.h>
_LABEL, _UUID, _TYPE, _USAGE = 1 << 1, 1 << 3, 1 << 5, 1 << 7
_ONLY_IN = 2
_FILE_SYSTEM, _RAID, _CRYPTO, _OTHER = 1 << 1, 1 << 2, 1 << 3, 1 << 4
_NAMES = ("TYPE", "USAGE", "UUID", "LABEL", "PTTYPE", "PTUUID")
# What blkid_do_safeprobe() returns; anything else is a failure.
_FOUND, _NOTHING, _AMBIVALENT = 0, 1, -2

# What is read first: of a device of which nothing can be read, libblkid may tell that it is blank.
_BLOCK_BYTES = 4096


@functools.cache
def _library() -> ctypes.CDLL:
    """libblkid; raises OSError with ENOSYS where it is not on this node."""
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
        "blkid_do_safeprobe": [probe],
        "blkid_probe_lookup_value": [
            *(probe, ctypes.c_char_p),
            *(ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t)),
        ],
    }.items():
        getattr(library, name).argtypes = arguments
    return library


def signatures(device: str) -> dict[str, str]:
    """The tags TYPE, USAGE, UUID and LABEL, PTTYPE and PTUUID; none of a blank device.

    Raises OSError: ENOSYS where there is no libblkid, ENOTUNIQ where the device bears the
    signatures of more than one thing.
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
            return _probed(library, probe, descriptor, device)
        finally:
            library.blkid_free_probe(probe)
    finally:
        os.close(descriptor)


def _probed(library: ctypes.CDLL, probe: int, descriptor: int, device: str) -> dict[str, str]:
    usages = _FILE_SYSTEM | _RAID | _CRYPTO | _OTHER
    prepared = (
        library.blkid_probe_set_device(probe, descriptor, 0, 0),
        library.blkid_probe_enable_partitions(probe, 1),
        library.blkid_probe_enable_superblocks(probe, 1),
        library.blkid_probe_set_superblocks_flags(probe, _LABEL | _UUID | _TYPE | _USAGE),
        library.blkid_probe_filter_superblocks_usage(probe, _ONLY_IN, usages),
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
    found = {name: _value(library, probe, name) for name in _NAMES}
    return {name: value for name, value in found.items() if value is not None}


def _value(library: ctypes.CDLL, probe: int, name: str) -> str | None:
    data, length = ctypes.c_char_p(), ctypes.c_size_t()
    if library.blkid_probe_lookup_value(
        probe, name.encode(), ctypes.byref(data), ctypes.byref(length)
    ):
        return None
    return (data.value or b"").decode(errors="backslashreplace")
