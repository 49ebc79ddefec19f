"""Attributes of the kernel's objects (sysfs(5)), read as cheaply as Python can: calls read many.

And what it counts of all block devices, in one file.
"""

import os
from collections.abc import Mapping

# What the kernel counted of each block device (Documentation/admin-guide/iostats.rst).
_STATISTICS = "/proc/diskstats"
_SECTORS_WRITTEN = 9
_PIECE_BYTES = 1 << 20
_LONGEST_BYTES = 4096  # an attribute is a page at most (Documentation/filesystems/sysfs.rst)


def word(path: str) -> str:
    """An attribute without its line's end; empty where it, or what it is of, is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _LONGEST_BYTES).decode().strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def written_sectors() -> Mapping[tuple[int, int], int]:
    """The sectors that were written to each block device, by its number; empty where not known."""
    try:
        descriptor = os.open(_STATISTICS, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        text = b"".join(iter(lambda: os.read(descriptor, _PIECE_BYTES), b""))
    finally:
        os.close(descriptor)
    rows = (line.split(None, _SECTORS_WRITTEN + 1) for line in text.splitlines())
    return {
        (int(row[0]), int(row[1])): int(row[_SECTORS_WRITTEN])
        for row in rows
        if len(row) > _SECTORS_WRITTEN
    }
