"""Calculate the free extents of a volume group, by a report: on which disks, for which purpose.

"Room" in this code base is the free extents that may be allocated for one purpose.

A disk is slow or fast (its tag FAST), open or closed to allocation (pvchange(8), --allocatable),
present or missing, clean or unclean. The free extents of an unclean disk hold deleted data, and are
overwritten later by a background task. The table says what may be allocated on a disk:

| a disk that is               | volumes, pools, COW stores | caches | what is overwritten anyway  |
| ---------------------------- | -------------------------- | ------ | --------------------------- |
| slow, open, present, clean   | yes                        |        | yes                         |
| slow, open, present, unclean | after it was zeroed        |        | yes                         |
| fast, open, present, clean   |                            | yes    |                             |
| anything else                |                            |        |                             |

"What is overwritten anyway" is never read before it is written: a rebuilt image of a RAID, and
extents for a pool or a COW store whose writers wait for space. A disk that is being emptied is
closed. While a disk is missing, lvm2 allocates for rebuilt images alone
(`allocation.reason_closed`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lvm import lvm_errors
from lvm.report import Group, LogicalVolume, PhysicalVolume


@dataclass(frozen=True)
class Room:
    """The free extents of a volume group that may be allocated for one purpose.

    `kept_extents` must stay free on slow disks: the reserve of a storage class, and the extents
    that thin pools may still need for the sizes of their volumes. `takes_unclean` is true if
    everything allocated is overwritten before it is read.
    """

    group: Group
    kept_extents: int = 0
    takes_unclean: bool = False

    def keeping_free(self, extents: int) -> "Room":
        """Return a copy of this Room of which `extents` extents must stay free on slow disks."""
        return replace(self, kept_extents=extents)

    @property
    def for_overwriting(self) -> "Room":
        """Return a copy of this Room for extents that are overwritten before they are read.

        A pool and a COW store show no old data to a user: dm-thin zeroes what it allocates, and
        dm-snapshot reads only what it wrote. A rebuilt image of a RAID is written as a whole.
        """
        return replace(self, takes_unclean=True)

    @cached_property
    def slow(self) -> tuple[PhysicalVolume, ...]:
        """The slow disks on which volumes, thin pools and COW stores may be allocated.

        Full disks are included, and unclean disks if `takes_unclean`. The disks are in the order of
        lvm2's report.
        """
        slow = (disk for disk in self._open if not disk.fast)
        return tuple(disk for disk in slow if self.takes_unclean or not disk.unclean)

    @cached_property
    def fast(self) -> tuple[PhysicalVolume, ...]:
        """The fast disks on which caches may be allocated, in the order of lvm2's report.

        Full disks are included, unclean disks are not.
        """
        return tuple(disk for disk in self._open if disk.fast and not disk.unclean)

    @property
    def unclean(self) -> tuple[PhysicalVolume, ...]:
        """The disks with free extents that must be zeroed; also closed and missing disks.

        The volume group stays marked until these disks are zeroed, whether or not they can be
        written to.
        """
        return tuple(disk for disk in self.group.disks if disk.unclean and disk.unallocated_extents)

    @property
    def is_unclean(self) -> bool:
        """Whether lvm2 could allocate on slow disks, but all of these have unclean free extents."""
        return not Room(self.group).slow and bool(self.for_overwriting.slow)

    def free_on(self, disk: PhysicalVolume) -> int:
        """The number of extents of a disk that one volume or image may have.

        It is 0 for a disk on which nothing may be allocated (`slow`), such as a fast disk.

        Where the volume group's allocation policy is `contiguous`, that is the longest free run.
        """
        return disk.extents_in_one_go if disk in self.slow else 0

    @property
    def free_extents(self) -> int:
        """The number of free extents of the disks in `slow`, those that must stay free included."""
        return sum(disk.extents_in_one_go for disk in self.slow)

    @property
    def available_extents(self) -> int:
        """The number of free extents of the disks in `slow`, less those that must stay free."""
        return max(0, self.free_extents - self.kept_extents)

    @property
    def linear_extents(self) -> int:
        """The number of `free_extents` that one linear volume may have."""
        return self._single_volume_extents(self.slow)

    @cached_property
    def fast_extents(self) -> int:
        """The number of free extents of the fast disks that one cache may have."""
        return self._single_volume_extents(self.fast)

    @property
    def extents(self) -> int:
        """The number of extents, free or not, of the slow disks that are present."""
        return sum(disk.extents for disk in self._all_slow if not disk.missing)

    @property
    def planned_extents(self) -> int:
        """The number of extents of all slow disks, missing disks included.

        Reserves and the metadata of thin pools are sized by this number. A missing disk counts, as
        the disk may come back or be replaced, and thin pools must then be able to grow to the sizes
        of their volumes.
        """
        return sum(disk.extents for disk in self._all_slow)

    def roomiest(self, count: int) -> list[PhysicalVolume]:
        """The slow disks with the most free extents, in descending order, `count` at most.

        Disks with equally many free extents are in the order of lvm2's report.
        """
        return sorted(self.slow, key=lambda disk: -self.free_on(disk))[:count]

    def for_images(self, volume: LogicalVolume, extents: int) -> list[PhysicalVolume]:
        """The disks on which an image of a RAID can be rebuilt.

        No part of the RAID is on these disks, and each has enough free extents.
        """
        room = self.for_overwriting
        vacant = (disk for disk in room.slow if disk.uuid not in volume.disks)
        return [disk for disk in vacant if room.free_on(disk) >= extents]

    def names(self, disks: Iterable[PhysicalVolume]) -> tuple[str, ...]:
        """The names of disks as arguments for lvm2. Raises NoDiskServes if `disks` is empty.

        Without a disk's name among its arguments, lvm2 would allocate on any disk.
        """
        if names := tuple(disk.name for disk in disks):
            return names
        raise lvm_errors.NoDiskServes(self.group.name)

    def disk_arguments(self) -> tuple[str, ...]:
        """The names of the slow disks as arguments for lvm2. Raises NoDiskServes if there is none.

        Empty if lvm2 would allocate on these disks anyway. Full disks are named, too, as lvm2
        allocates on any disk where none is named.
        """
        return () if self.slow == self._open else self.names(self.slow)

    @cached_property
    def _open(self) -> tuple[PhysicalVolume, ...]:
        """The disks on which lvm2 may allocate: neither closed nor missing."""
        return tuple(disk for disk in self.group.disks if disk.allocatable and not disk.missing)

    @property
    def _all_slow(self) -> Iterable[PhysicalVolume]:
        return (disk for disk in self.group.disks if not disk.fast)

    def _single_volume_extents(self, disks: Sequence[PhysicalVolume]) -> int:
        """The number of free extents of `disks` that a single volume may have."""
        extents = [disk.extents_in_one_go for disk in disks]
        return max(extents, default=0) if self.group.keeps_to_one_disk else sum(extents)
