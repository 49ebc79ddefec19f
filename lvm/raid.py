"""RAID levels (lvmraid(7)): the disks that each needs, and the images that each may lose.

Layouts, health, repair, `carver doctor` and the storage classes of tests all use this one table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentType:
    """A type of logical volumes (lvcreate(8), --type), with its stripes, disks and module."""

    name: str
    least_stripes: int = 1
    striped: bool = False
    mirrored: bool = False
    # The number of images with parity, which is the number of images that may be lost.
    parity: int = 0
    # The number of metadata extents on each disk.
    metadata_extents: int = 0
    # The kernel module of the device-mapper target; empty for linear and striped, which are in
    # device-mapper itself.
    module: str = ""

    def disks(self, stripes: int, mirrors: int) -> int:
        """The number of disks of a volume with these numbers of stripes and further copies."""
        return stripes * (mirrors + 1) + self.parity


@dataclass(frozen=True)
class RaidLevel(SegmentType):
    """A RAID level; each disk of a volume has one image.

    Carver makes no volumes of a level that is `by_hand`; an operator may have made them.
    """

    striped: bool = True
    # lvm2 gives each image one extent of metadata (RAID_METADATA_AREA_LEN).
    metadata_extents: int = 1
    module: str = "dm-raid"
    by_hand: bool = False

    def spread(self, images: int) -> tuple[int, int]:
        """The stripes and further copies of a volume with `images` images; inverse of `disks`."""
        if not self.mirrored:
            return images - self.parity, 0
        return (images // 2, 1) if self.striped else (1, images - 1)

    def survives(self, is_lost: Sequence[bool]) -> bool:
        """Whether the remaining images of a RAID have all data; `is_lost` has a flag for each."""
        if not self.mirrored:
            return sum(is_lost) <= self.parity
        # lvm2 makes raid10 with two "near" copies (md(4)): each stripe is a pair of neighbouring
        # images. validate_raid_redundancy (drivers/md/dm-raid.c) and lv_raid_replace
        # (lib/metadata/raid_manip.c of lvm2) check the same pairs before activation and repair.
        copies = 2 if self.striped else len(is_lost)
        mirrors = (
            is_lost[first_image : first_image + copies]
            for first_image in range(0, len(is_lost), copies)
        )
        return not any(map(all, mirrors))


LEVELS = {
    level.name: level
    for level in (
        RaidLevel("raid0", least_stripes=2, by_hand=True),
        RaidLevel("raid1", striped=False, mirrored=True),
        RaidLevel("raid4", least_stripes=2, parity=1, by_hand=True),
        RaidLevel("raid5", least_stripes=2, parity=1),
        RaidLevel("raid6", least_stripes=3, parity=2),
        RaidLevel("raid10", least_stripes=2, mirrored=True),
    )
}


def level(words: Iterable[str]) -> RaidLevel | None:
    """The RAID level among the words of lv_layout, or of the kernel; None for no RAID.

    lvm2 and the kernel may append the arrangement of parity or copies: raid5_ls, raid6_zr,
    raid10_near.
    """
    names = (word.partition("_")[0] for word in words)
    return next((LEVELS[name] for name in names if name in LEVELS), None)
