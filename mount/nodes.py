"""Binds of block device nodes: how a raw block volume is published."""

from mount import mounts, table
from mount.syscalls import Kernel
from mount.table import DeviceNumber, Mount

# The file systems that hold device nodes.
_HOLDERS = frozenset({"devtmpfs", "tmpfs"})


def bound(kernel: Kernel, number: DeviceNumber) -> tuple[Mount, ...]:
    """Every bind of a node of that device."""
    binds = (one for one in table.read(kernel).mounts if one.root != "/")
    return tuple(
        one for one in binds if one.fs_type in _HOLDERS and mounts.node(kernel, one.path) == number
    )
