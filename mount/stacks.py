"""The disks below a block device, by sysfs: whether a request or a discard zeroes their blocks.

Directories of sysfs are strings here, and are resolved only to find a name: each erase reads the
stack, and resolving a path takes longer than reading an attribute.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Prefix of the device-mapper UUIDs of logical volumes and of their parts.
_VOLUME_UUID = "LVM-"
# Magic numbers of file systems (<linux/magic.h>) in whose files fallocate(2) always makes a hole
# when asked to, and a hole reads as zeroes: ext4, XFS, btrfs, tmpfs.
_WITH_HOLES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994})
# Values of a SCSI disk's zeroing_mode with which a discard zeroes. The kernel has such a mode only
# if the disk promises that unmapped blocks read as zeroes (LBPRZ), and the command WRITE SAME with
# UNMAP writes zeroes to blocks that it does not unmap (SBC-3; drivers/scsi/sd.c,
# sd_config_write_same()).
_ZEROING = frozenset({"writesame_16_unmap", "writesame_10_unmap"})
# Values of a SCSI disk's provisioning_mode with which a discard zeroes. With others the kernel
# sends the command UNMAP, which may leave blocks unchanged.
_UNMAPPING = frozenset({"writesame_16", "writesame_10"})


@dataclass(frozen=True)
class Stack:
    """A block device with the devices below it."""

    # Whether each device of the stack accepts REQ_OP_WRITE_ZEROES.
    has_write_zeroes: bool
    # Whether each block of the device is exactly one block of a disk: the device is no RAID, no
    # thin or cached volume, and has no snapshots.
    is_plain: bool = True
    # The names of the disks at the bottom.
    disks: frozenset[str] = frozenset()


def read(directory: Path) -> Stack:
    """Read the stack of a device by its directory in sysfs, such as /sys/dev/block/253:3."""
    # The volumes that are not plain stand on hidden logical volumes (dm-raid, dm-thin, dm-cache,
    # dm-writecache, snapshots).
    parts = (_word(below, "dm/uuid").startswith(_VOLUME_UUID) for below in _below(str(directory)))
    return Stack(
        # The kernel gives a stack the smallest limit of its devices (blk_stack_limits()), and 0 if
        # a device-mapper target lacks the request (dm_table_supports_write_zeroes()): RAID, thin,
        # cache and crypt lack it.
        has_write_zeroes=_queue(str(directory), "write_zeroes_max_bytes") not in ("", "0"),
        is_plain=not any(parts),
        disks=disks(directory),
    )


def disks(directory: Path) -> frozenset[str]:
    """The names of the whole disks and loop devices at the bottom of a device's stack."""
    return frozenset(map(_name, bottom_devices(str(directory))))


def logical_block_bytes(directory: Path) -> int:
    """The logical block size of a device, or of a partition's disk; 0 if sysfs does not show it."""
    size_bytes = _queue(str(directory), "logical_block_size")
    return int(size_bytes) if size_bytes.isascii() and size_bytes.isdigit() else 0


# Function that returns the magic number (statfs(2)) of the file system of a loop device's backing
# file, from the loop device's node and the file's path. The function raises OSError if the file is
# not regular or not reachable.
LoopFile = Callable[[str, str], int]


def bottom_devices(directory: str) -> Iterator[str]:
    """Yield the directories of the whole disks and loop devices at the bottom of a stack."""
    whole_disk = _whole(directory)
    lower_devices = _below(whole_disk)
    for child in lower_devices:
        yield from bottom_devices(child)
    if not lower_devices:
        yield whole_disk


def discard_doubts(directory: Path, file_system: LoopFile) -> Mapping[str, str]:
    """The disks that may not read as zeroes after a discard, by name, each with the reason.

    The disks are those below a logical volume, or the disk itself. A disk is left out
    only if the kernel's attributes prove that a discard zeroes it.
    """
    directory_path = str(directory)
    is_volume = _word(directory_path, "dm/uuid").startswith(_VOLUME_UUID)
    judged = [
        Path(_whole(disk)).resolve()
        for disk in (_below(directory_path) if is_volume else [directory_path])
    ]
    return {disk.name: why for disk in judged if (why := _doubt(disk, file_system))}


def _doubt(disk: Path, file_system: LoopFile) -> str:
    """The reason why a disk may not read as zeroes after a discard; empty if it certainly does.

    The kernel itself promises nothing: discard_zeroes_data in sysfs is always 0 since Linux 4.12,
    and BLKDISCARD succeeds even if the device refused (blkdev_issue_discard()).
    """
    if _queue(str(disk), "discard_max_bytes") in ("", "0"):
        return "it takes no discards"
    if (disk / "dm").exists() or (disk / "md").exists():
        return "it is made of other devices"
    if (disk / "loop").exists():
        return _doubt_of_loop(disk, file_system)
    if scsi := next(iter((disk / "device").glob("scsi_disk/*")), None):
        if _word(str(scsi), "zeroing_mode") not in _ZEROING:
            return "it does not promise that unmapped blocks read as zeroes (LBPRZ)"
        if _word(str(scsi), "provisioning_mode") not in _UNMAPPING:
            return "it is unmapped by UNMAP, which may leave blocks as they are"
        return ""
    if disk.name.startswith("nvme"):
        # NVM Command Set, Dataset Management: DLFEAT says what a deallocated block reads as, but
        # does not promise that a block is deallocated. Only Write Zeroes with DEAC promises both.
        return "an NVMe disk may ignore a discard (Dataset Management is advisory)"
    return "nothing tells what discarded blocks read as"


def _doubt_of_loop(disk: Path, file_system: LoopFile) -> str:
    # At a discard the driver punches a hole into the file (drivers/block/loop.c, lo_fallocate()).
    try:
        kind = file_system(f"/dev/{disk.name}", _word(str(disk), "loop/backing_file"))
    except OSError:
        return "it is over no file that can be seen from here"
    return "" if kind in _WITH_HOLES else "its file may not have holes"


def _below(directory: str) -> list[str]:
    try:
        names = os.listdir(f"{directory}/slaves")  # noqa: PTH208
    except OSError:
        return []
    return [f"{directory}/slaves/{name}" for name in sorted(names)]


def _whole(directory: str) -> str:
    """The directory of a partition's disk, which has the queue; any other directory unchanged."""
    # The kernel resolves symbolic links before it applies `..`.
    return f"{directory}/.." if os.path.exists(f"{directory}/partition") else directory  # noqa: PTH110


def _name(path: str) -> str:
    """The kernel's name of a device, by a path below `slaves` or by its resolved directory."""
    above, _, name = path.rpartition("/")
    is_below = above.endswith("/slaves")
    return name if is_below else os.path.basename(os.path.realpath(path))  # noqa: PTH119


def _queue(directory: str, name: str) -> str:
    return _word(_whole(directory), f"queue/{name}")


def _word(directory: str, name: str) -> str:
    try:
        with open(f"{directory}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
            # An attribute of sysfs has a page at most (Documentation/filesystems/sysfs.rst).
            return file.read(4096).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""
