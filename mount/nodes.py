"""Binds of block device nodes: how a raw block volume is published."""

from collections.abc import Container

from mount import mounts
from mount.syscalls import Kernel
from mount.table import DeviceNumber, Mount, Table

# The file systems that hold device nodes.
_HOLDERS = frozenset({"devtmpfs", "tmpfs"})


def bound(kernel: Kernel, known: Table, numbers: Container[DeviceNumber]) -> tuple[Mount, ...]:
    """Every bind of a node of one of the devices."""
    binds = (one for one in known.of_types(_HOLDERS) if one.root != "/")
    return tuple(one for one in binds if mounts.node(kernel, one.path) in numbers)
