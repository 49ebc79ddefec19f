"""The arithmetic of extents: what a group can hold, by layout. Create and capacity share it."""

from lvm.report import Group


def round_up(size_bytes: int, extent_size_bytes: int) -> int:
    """A size as whole extents, at least one."""
    extents = max(1, -(-size_bytes // extent_size_bytes))
    return extents * extent_size_bytes


def available_bytes(group: Group) -> int:
    """The sum of the sizes of linear volumes that the group can still hold."""
    return group.free_extents * group.extent_size_bytes


def maximum_volume_bytes(group: Group) -> int:
    """The largest linear volume that can be made now; one extent more cannot.

    A linear volume may lie on several disks, so that is all that is free.
    """
    return available_bytes(group)
