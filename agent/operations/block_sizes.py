"""Logical block sizes of disks, which decide on which disks a volume's contents can be used.

A file system reads and writes in units of its own (ext4: blocks, xfs: sectors). The kernel refuses
to mount a file system whose unit is smaller than the logical block of its device. Users of a raw
block volume count in the logical blocks that the volume shows, as partition tables do. Therefore
contents may be copied to disks with smaller logical blocks, but not to disks with larger ones.
"""

from collections.abc import Mapping
from contextlib import suppress

from agent.core import tag
from agent.volumes import records
from lvm import report
from mount import filesystem, luks
from mount.kernel import Kernel


def of_group(kernel: Kernel, group: report.Group) -> int:
    """Return the largest logical block size, in bytes, of the disks of a volume group.

    No volume of the group has a larger logical block. Disks whose size cannot be read are left out;
    the result is 0 if no disk's size can be read.
    """
    sizes = [0]
    for disk in group.disks:
        with suppress(OSError):
            sizes.append(kernel.logical_block_bytes(disk.name))
    return max(sizes)


def of_contents(kernel: Kernel, own_tags: Mapping[str, str], device: str) -> int:
    """Return the largest logical block size, in bytes, with which contents can be used.

    The result is 0 if the contents can be used with any logical block size. The contents are those
    of a volume or snapshot with these tags; `device` is its path while it is active. The file
    system of an encrypted volume cannot be read without its key; for such a volume the result
    follows from the LUKS2 header and from Carver's tags. Raises OSError or ProbeFailed if the
    device cannot be read.
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
    file_system = filesystem.find(kernel, device, fs_type) if fs_type else None
    return 0 if file_system is None else file_system.block_bytes


def problem(contents_bytes: int, group: report.Group, group_bytes: int) -> str:
    """Return why contents cannot be used on a volume group's disks; empty if they can.

    The reason ends with a remedy. `contents_bytes` is the result of `of_contents`, and
    `group_bytes` that of `of_group`.
    """
    if not 0 < contents_bytes < group_bytes:
        return ""
    return (
        f"its contents have blocks of {contents_bytes} bytes, and the disks of volume group"
        f" {group.name} logical blocks of {group_bytes} bytes, on which they could not be used;"
        f" use a class whose disks have logical blocks of {contents_bytes} bytes, or copy the files"
        " to a new volume"
    )
