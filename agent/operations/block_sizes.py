"""The logical blocks of disks that a volume's contents can lie on.

A file system is read and written in pieces of a size of its own (ext4: blocks, xfs: sectors), and
the kernel mounts none whose pieces are smaller than its device's logical blocks. Users of a raw
block volume count in the blocks that it shows, as partition tables do. So contents may go to disks
with smaller blocks, and not to disks with larger ones.
"""

from collections.abc import Mapping
from contextlib import suppress

from agent.core import tag
from agent.volumes import records
from lvm import report
from mount import filesystem, luks
from mount.kernel import Kernel


def of_group(kernel: Kernel, group: report.Group) -> int:
    """The largest logical block of a group's disks, and so of its volumes; 0 if none answers."""
    sizes = [0]
    for disk in group.disks:
        with suppress(OSError):
            sizes.append(kernel.logical_block_bytes(disk.name))
    return max(sizes)


def of_contents(kernel: Kernel, own_tags: Mapping[str, str], device: str) -> int:
    """The largest logical block on which what an active device holds can be used; 0 for any.

    Of an encrypted one, whose file system cannot be looked at, by its header and its tags. Raises
    OSError, ProbeFailed.
    """
    blocks = kernel.logical_block_bytes(device)
    fs_type = own_tags.get(tag.FORMATTED) or own_tags.get(tag.FS_TYPE, "")
    if records.is_encrypted(own_tags):
        header = luks.read(kernel, device)
        if header is None:
            return 0
        blocks = max(blocks, header.sector_bytes)
        if not records.may_be_block(own_tags):
            options = own_tags.get(tag.MKFS_OPTIONS, "").split()
            blocks = max(blocks, filesystem.block_bytes(fs_type, options))
        return blocks
    if records.may_be_block(own_tags):
        return blocks
    found = filesystem.find(kernel, device, fs_type) if fs_type else None
    return 0 if found is None else found.block_bytes


def problem(contents_bytes: int, group: report.Group, group_bytes: int) -> str:
    """Why contents cannot lie on a group's disks, and what can be done; empty if they can."""
    if not 0 < contents_bytes < group_bytes:
        return ""
    return (
        f"its contents have blocks of {contents_bytes} bytes, and the disks of volume group"
        f" {group.name} logical blocks of {group_bytes} bytes, on which they could not be used;"
        f" use a class whose disks have logical blocks of {contents_bytes} bytes, or copy the files"
        " to a new volume"
    )
