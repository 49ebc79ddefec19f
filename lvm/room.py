"""Room: which disks of a group may serve for what, and how much is free there, by one report.

A disk is slow or fast (its tag FAST), open or closed (pvchange(8), --allocatable), present or
missing, clean or unclean. The free extents of an unclean disk hold deleted data. They may be had by

| of a disk that is            | volumes, pools, COW stores | caches | what overwrites all it gets |
| ---------------------------- | -------------------------- | ------ | --------------------------- |
| slow, open, present, clean   | yes                        |        | yes                         |
| slow, open, present, unclean | after they are zeroed      |        | yes                         |
| fast, open, present, clean   |                            | yes    |                             |
| anything else                |                            |        |                             |

What overwrites all it gets is a rebuilt image of a RAID, and a pool or a COW store whose writers
wait for room. A disk that is being emptied is closed. While a disk is missing lvm2 allocates for
rebuilt images alone (`allocation.closed`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lvm import lvm_errors
from lvm.report import Group, LogicalVolume, PhysicalVolume


@dataclass(frozen=True)
class Room:
    """The free extents of a group, of which `kept_extents` are to stay free on slow disks.

    These are a class's reserve and what pools were promised. `takes_unclean` is for what overwrites
    all that it gets.
    """

    group: Group
    kept_extents: int = 0
    takes_unclean: bool = False

    def keeping(self, extents: int) -> "Room":
        """The same room, of which so many extents are to stay free."""
        return replace(self, kept_extents=extents)

    @property
    def overwriting(self) -> "Room":
        """The same room, for what overwrites all that it gets.

        A pool and a COW store show no user what was there: dm-thin zeroes what it allocates, and
        dm-snapshot writes what it reads. A rebuilt image of a RAID is written as a whole.
        """
        return replace(self, takes_unclean=True)

    @cached_property
    def slow(self) -> tuple[PhysicalVolume, ...]:
        """The disks that take volumes, pools and COW stores, in report order; also full ones."""
        slow = (disk for disk in self._open if not disk.fast)
        return tuple(disk for disk in slow if self.takes_unclean or not disk.unclean)

    @cached_property
    def fast(self) -> tuple[PhysicalVolume, ...]:
        """The disks that take caches, in report order; also full ones."""
        return tuple(disk for disk in self._open if disk.fast and not disk.unclean)

    @property
    def unclean(self) -> tuple[PhysicalVolume, ...]:
        """The disks with free extents that must be zeroed, also where a disk is closed or missing.

        Until they are zeroed the group stays marked, whether or not its disks can be written to.
        """
        return tuple(disk for disk in self.group.disks if disk.unclean and disk.unallocated_extents)

    @property
    def is_unclean(self) -> bool:
        """Whether there are open slow disks, and deleted data are on all of them."""
        return not Room(self.group).slow and bool(self.overwriting.slow)

    def free_on(self, disk: PhysicalVolume) -> int:
        """The number of extents of a disk that one volume, or image, may have; 0 for a fast disk.

        Where the group's policy is `contiguous` that is the longest run of free extents.
        """
        return disk.extents_in_one_go if disk in self.slow else 0

    @property
    def free_extents(self) -> int:
        """The number of free extents of the slow disks, also those that are to stay free."""
        return sum(disk.extents_in_one_go for disk in self.slow)

    @property
    def available_extents(self) -> int:
        """The number of free extents of the slow disks that need not stay free."""
        return max(0, self.free_extents - self.kept_extents)

    @property
    def linear_extents(self) -> int:
        """Of `free_extents` those that one linear volume may have."""
        return self._together(self.slow)

    @cached_property
    def fast_extents(self) -> int:
        """The number of free extents of the fast disks that one cache may have."""
        return self._together(self.fast)

    @property
    def extents(self) -> int:
        """The number of extents of the slow disks that are present, free or not."""
        return sum(disk.extents for disk in self._all_slow if not disk.missing)

    @property
    def planned_extents(self) -> int:
        """The number of extents of all slow disks: reserves and pools' metadata are sized by it.

        A missing disk counts: it comes back or is replaced, and pools' promises are kept then.
        """
        return sum(disk.extents for disk in self._all_slow)

    def roomiest(self, count: int) -> list[PhysicalVolume]:
        """The slow disks with the most free extents, in descending order; equals as reported."""
        return sorted(self.slow, key=lambda disk: -self.free_on(disk))[:count]

    def for_images(self, volume: LogicalVolume, extents: int) -> list[PhysicalVolume]:
        """The disks on which an image of a RAID can be rebuilt: no part of the RAID is on them."""
        room = self.overwriting
        vacant = (disk for disk in room.slow if disk.uuid not in volume.disks)
        return [disk for disk in vacant if room.free_on(disk) >= extents]

    def names(self, disks: Iterable[PhysicalVolume]) -> tuple[str, ...]:
        """The names of disks as lvm2 is given them. Raises NoDiskServes where there are none.

        Given no disk at all, lvm2 would take any.
        """
        if names := tuple(disk.name for disk in disks):
            return names
        raise lvm_errors.NoDiskServes(self.group.name)

    def anywhere(self) -> tuple[str, ...]:
        """The names of the slow disks; empty if lvm2 would take no others. Raises NoDiskServes.

        Full disks are named, too: lvm2 takes any disk where none is named.
        """
        return () if self.slow == self._open else self.names(self.slow)

    @cached_property
    def _open(self) -> tuple[PhysicalVolume, ...]:
        """The disks from which lvm2 allocates."""
        return tuple(one for one in self.group.disks if one.allocatable and not one.missing)

    @property
    def _all_slow(self) -> Iterable[PhysicalVolume]:
        return (disk for disk in self.group.disks if not disk.fast)

    def _together(self, disks: Sequence[PhysicalVolume]) -> int:
        """What one volume may have of several disks."""
        extents = [disk.extents_in_one_go for disk in disks]
        return max(extents, default=0) if self.group.keeps_to_one_disk else sum(extents)
