"""The disks below a block device, by sysfs: what zeroes them, and what a discard leaves on them.

Each erase looks at them, so no path is resolved but where its name is wanted.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# A UUID of device-mapper that begins so is that of a logical volume, or of a part of one.
_VOLUME_UUID = "LVM-"
# <linux/magic.h>: ext4, XFS, btrfs, tmpfs. In their files a hole reads as zeroes, and each of them
# makes one wherever it is asked to (fallocate(2)).
_WITH_HOLES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994})
# Of a SCSI disk: the kernel zeroes by unmapping only where the disk promises that unmapped blocks
# read as zeroes (LBPRZ), and WRITE SAME with UNMAP writes zeroes where it unmaps nothing (SBC-3;
# drivers/scsi/sd.c, sd_config_write_same()). The command UNMAP may leave blocks as they are.
_ZEROING = frozenset({"writesame_16_unmap", "writesame_10_unmap"})
_UNMAPPING = frozenset({"writesame_16", "writesame_10"})


@dataclass(frozen=True)
class Stack:
    """A block device and what is below it.

    `has_write_zeroes` says that all of the stack takes REQ_OP_WRITE_ZEROES. `is_plain` says that
    its blocks are blocks of disks, one for one: it is no RAID, thin or cached volume, and has no
    snapshots.
    """

    has_write_zeroes: bool
    is_plain: bool = True
    disks: frozenset[str] = frozenset()


def read(place: Path) -> Stack:
    """The stack of a device by its directory in sysfs, such as /sys/dev/block/253:3."""
    # dm-raid, dm-thin, dm-cache, dm-writecache and snapshots stand on logical volumes of their own.
    parts = (_word(one, "dm/uuid").startswith(_VOLUME_UUID) for one in _below(str(place)))
    return Stack(
        # Of a stack the least (blk_stack_limits()), and 0 where a target of device-mapper has it
        # not (dm_table_supports_write_zeroes()), as those of RAID, thin, cache and crypt.
        has_write_zeroes=_queue(str(place), "write_zeroes_max_bytes") not in ("", "0"),
        is_plain=not any(parts),
        disks=disks(place),
    )


def disks(place: Path) -> frozenset[str]:
    """The names of the whole disks, and loop devices, at the bottom of a device."""
    return frozenset(map(_name, leaves(str(place))))


def logical_block_bytes(place: Path) -> int:
    """The logical block of a device, or of the disk of a partition; 0 where it is not shown."""
    found = _queue(str(place), "logical_block_size")
    return int(found) if found.isascii() and found.isdigit() else 0


# By a loop device's node and its file's path: the magic number of that file's file system
# (statfs(2)). OSError where it is no regular file, or cannot be seen from here.
LoopFile = Callable[[str, str], int]


def leaves(place: str) -> Iterator[str]:
    """The whole disks, and loop devices, at the bottom of a device, by their directories."""
    whole = _whole(place)
    below = _below(whole)
    for one in below:
        yield from leaves(one)
    if not below:
        yield whole


def discard_doubts(place: Path, file_system: LoopFile) -> Mapping[str, str]:
    """Why it is not certain that a discard leaves zeroes on a disk, or on those below a volume.

    By the disks' names. Only what can be looked up here is certain.
    """
    own = str(place)
    is_volume = _word(own, "dm/uuid").startswith(_VOLUME_UUID)
    judged = [Path(_whole(one)).resolve() for one in (_below(own) if is_volume else [own])]
    return {one.name: why for one in judged if (why := _doubt(one, file_system))}


def _doubt(disk: Path, file_system: LoopFile) -> str:
    """Why zeroes after a discard of a disk are not certain; empty where they are.

    The kernel itself promises nothing (discard_zeroes_data in sysfs is always 0 since Linux 4.12),
    and BLKDISCARD succeeds where the device refused (blkdev_issue_discard()).
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
        # NVM Command Set, Dataset Management. DLFEAT says what a deallocated block reads as, not
        # that a block is deallocated. Write Zeroes with DEAC promises both.
        return "an NVMe disk may ignore a discard (Dataset Management is advisory)"
    return "nothing tells what discarded blocks read as"


def _doubt_of_loop(disk: Path, file_system: LoopFile) -> str:
    # The driver punches a hole in the file for a discard (drivers/block/loop.c, lo_fallocate()).
    try:
        kind = file_system(f"/dev/{disk.name}", _word(str(disk), "loop/backing_file"))
    except OSError:
        return "it is over no file that can be seen from here"
    return "" if kind in _WITH_HOLES else "its file may not have holes"


def _below(place: str) -> list[str]:
    try:
        names = os.listdir(f"{place}/slaves")  # noqa: PTH208
    except OSError:
        return []
    return [f"{place}/slaves/{name}" for name in sorted(names)]


def _whole(place: str) -> str:
    """The disk of a partition: only that has a queue."""
    # The kernel follows the links before it goes up.
    return f"{place}/.." if os.path.exists(f"{place}/partition") else place  # noqa: PTH110


def _name(place: str) -> str:
    """What sysfs calls a device: the last word of a path below `slaves`, else of its directory."""
    above, _, name = place.rpartition("/")
    is_below = above.endswith("/slaves")
    return name if is_below else os.path.basename(os.path.realpath(place))  # noqa: PTH119


def _queue(place: str, name: str) -> str:
    return _word(_whole(place), f"queue/{name}")


def _word(place: str, name: str) -> str:
    try:
        with open(f"{place}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
            # A page at most (Documentation/filesystems/sysfs.rst).
            return file.read(4096).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""
