"""Attributes of the kernel's objects (sysfs(5)), read as cheaply as Python can: calls read many."""

import os

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
