"""RAID levels (lvmraid(7)): what each needs, and which of its images may be lost.

The one table of them: layouts, health, repair, `carver doctor` and the classes of tests go by it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentType:
    """What a volume of a type (lvcreate(8), --type) needs."""

    name: str
    least_stripes: int = 1
    striped: bool = False
    mirrored: bool = False
    # Images beside those of the data: as many may be lost.
    parity: int = 0
    # Extents of metadata on each disk.
    metadata_extents: int = 0
    # The kernel module of its device-mapper target; linear and striped are in device-mapper itself.
    module: str = ""

    def disks(self, stripes: int, mirrors: int) -> int:
        """How many disks a volume lies on."""
        return stripes * (mirrors + 1) + self.parity


@dataclass(frozen=True)
class RaidLevel(SegmentType):
    """A RAID level, each of whose disks holds one image. Carver makes those not `by_hand`."""

    striped: bool = True
    # lvm2 gives each image one extent of metadata (RAID_METADATA_AREA_LEN).
    metadata_extents: int = 1
    module: str = "dm-raid"
    by_hand: bool = False

    def spread(self, images: int) -> tuple[int, int]:
        """The stripes and mirrors of a volume with so many images: the inverse of `disks`."""
        if not self.mirrored:
            return images - self.parity, 0
        return (images // 2, 1) if self.striped else (1, images - 1)

    def survives(self, lost: Sequence[bool]) -> bool:
        """Whether the images that are left hold all data; `lost` has a flag for each, in order."""
        if not self.mirrored:
            return sum(lost) <= self.parity
        # Each stripe of a raid10 is a pair of neighbours: lvm2 makes two copies, "near" (md(4)). By
        # the same pairs validate_raid_redundancy (drivers/md/dm-raid.c) refuses to begin, and
        # lv_raid_replace (lib/metadata/raid_manip.c of lvm2) to repair.
        copies = 2 if self.striped else len(lost)
        groups = (lost[at : at + copies] for at in range(0, len(lost), copies))
        return not any(map(all, groups))


LEVELS = {
    one.name: one
    for one in (
        RaidLevel("raid0", least_stripes=2, by_hand=True),
        RaidLevel("raid1", striped=False, mirrored=True),
        RaidLevel("raid4", least_stripes=2, parity=1, by_hand=True),
        RaidLevel("raid5", least_stripes=2, parity=1),
        RaidLevel("raid6", least_stripes=3, parity=2),
        RaidLevel("raid10", least_stripes=2, mirrored=True),
    )
}


def level(words: Iterable[str]) -> RaidLevel | None:
    """The level named by lv_layout or by the kernel; None for what is no RAID.

    Both may add how parity or copies are arranged: raid5_ls, raid6_zr, raid10_near. A layout is
    recognized by this alone.
    """
    names = (one.partition("_")[0] for one in words)
    return next((LEVELS[one] for one in names if one in LEVELS), None)
