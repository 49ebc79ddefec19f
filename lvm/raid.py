"""RAID levels (lvmraid(7)): what each needs, and which of its images may be lost.

The one table of them: layouts, health, repair and `carver doctor` go by it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RaidLevel:
    """A RAID level. A volume has `stripes * copies + parity` images."""

    name: str
    least_stripes: int = 1
    striped: bool = True
    mirrored: bool = False
    # Images beside those of the data: as many may be lost.
    parity: int = 0
    # lvm2 gives each image one extent of metadata (RAID_METADATA_AREA_LEN).
    metadata_extents: int = 1
    # The kernel module of its device-mapper target.
    module: str = "dm-raid"

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


# raid0 and raid4 are made by hand only.
LEVELS = {
    one.name: one
    for one in (
        RaidLevel("raid0", least_stripes=2),
        RaidLevel("raid1", striped=False, mirrored=True),
        RaidLevel("raid4", least_stripes=2, parity=1),
        RaidLevel("raid5", least_stripes=2, parity=1),
        RaidLevel("raid6", least_stripes=3, parity=2),
        RaidLevel("raid10", least_stripes=2, mirrored=True),
    )
}


def level(words: Iterable[str]) -> RaidLevel | None:
    """The level that lv_layout's words or the kernel's name tell of; None where it is none.

    Both may add how parity or copies are arranged: raid5_ls, raid6_zr, raid10_near.
    """
    names = (one.partition("_")[0] for one in words)
    return next((LEVELS[one] for one in names if one in LEVELS), None)
