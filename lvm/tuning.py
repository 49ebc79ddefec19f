"""What may change while a volume is in use: read-ahead, rates of recovery, limits of its I/O.

LVM's metadata hold it: as properties that lvm2 gives to the kernel at once and at activation
(lvchange(8), lvmraid(7)), and the limits as Carver's tags.

A bound on RAID recovery takes the place of the volume's maximum where that is higher, or none; a
tag keeps the maximum then. It is there before a disk fails: with a disk missing lvm2 changes no
rates.
"""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from lvm import tags
from lvm.lvm2 import Lvm
from mount.cgroups import IoMax

# The kernel's own choice.
AUTO: Literal["auto"] = "auto"

# lvm2 rounds to pages by itself: "Overriding readahead to 8 sectors, a multiple of 4K page size."
READ_AHEAD_UNIT_BYTES = mmap.PAGESIZE
# Far more than any disk gains by; lvm2 would take a terabyte.
MOST_READ_AHEAD_BYTES = 1 << 30
# An int of drivers/md/dm-raid.c; lvm2 2.03.16 silently records what is left of more.
MOST_RECOVERY_KIB = (1 << 31) - 1

_SECTOR_BYTES = 512
# Keeps a volume's maximum rate of recovery, in KiB, 0 for none, where lvm2 has a bound for it.
_OWN_MAXIMUM = "ownRecoveryRate"

# The least limits: with fewer, a pod's last writes, and so its end, would take hours.
LEAST_IOPS = 10
LEAST_BANDWIDTH_BYTES = 64 << 10
# An unsigned int of the kernel's block/blk-throttle.c. What is more is no limit on any disk.
MOST_IOPS = (1 << 32) - 1
MOST_BANDWIDTH_BYTES = 1 << 50


@dataclass(frozen=True)
class Tuning:
    """Settings of a volume; None is not said. Rates are KiB a second on each disk, 0 for none.

    Limits of I/O are operations or bytes a second, and the same for each GiB of the volume's size;
    0 for none. Of both, the lower holds.
    """

    read_ahead_bytes: int | Literal["auto"] | None = None
    minimum_recovery_kib: int | None = None
    maximum_recovery_kib: int | None = None
    read_iops: int | None = None
    write_iops: int | None = None
    read_bandwidth: int | None = None
    write_bandwidth: int | None = None
    read_iops_per_gib: int | None = None
    write_iops_per_gib: int | None = None
    read_bandwidth_per_gib: int | None = None
    write_bandwidth_per_gib: int | None = None
    # What lvm2 has in place of the maximum; 0 where it has that.
    bound_recovery_kib: int | None = None

    @property
    def of_raid(self) -> Sequence[str]:
        """The fields that it sets and only a RAID volume can have."""
        return [one.part for one in SETTINGS if one.of_raid and one.part in self._said()]

    @property
    def refusal(self) -> str:
        """Why no volume can have it, as lvm2 sees it; empty where one can."""
        least, most = self.minimum_recovery_kib or 0, self.maximum_recovery_kib or 0
        if not most or least <= most:
            return ""
        return (
            f"the minimum recovery rate, {least}KiB a second, is more than the maximum, {most}KiB"
        )

    def over(self, present: Self) -> Self:
        """What a volume has once this is said of it."""
        return replace(present, **self._said())

    def bounded(self, present: Self, bound_kib: int) -> Self:
        """The same, with the bound that a RAID volume has once this is said of it, 0 for none.

        It is not below the volume's minimum, which lvm2 would refuse.
        """
        after = self.over(present)
        if bound_kib:
            bound_kib = max(bound_kib, after.minimum_recovery_kib or 0)
        is_lower = not after.maximum_recovery_kib or bound_kib < after.maximum_recovery_kib
        return replace(self, bound_recovery_kib=bound_kib if is_lower else 0)

    def lacking_in(self, present: Self) -> Self:
        """What of this a volume has not."""
        changed = {key: value for key, value in self._said().items() if value != vars(present)[key]}
        return type(self)(**changed)

    def for_new(self) -> Self:
        """What of this lvcreate takes: 2.03.16 finds a minimum without a maximum to be above it."""
        has_maximum = self.maximum_recovery_kib or self.bound_recovery_kib
        return self if has_maximum else replace(self, minimum_recovery_kib=None)

    @property
    def is_limited(self) -> bool:
        """Whether it limits I/O."""
        return bool(_LIMITS & {key for key, value in vars(self).items() if value})

    def io_max(self, size_bytes: int) -> IoMax:
        """The limits of a volume of that size."""
        return IoMax(
            read_bytes=self._limit("read_bandwidth", size_bytes, LEAST_BANDWIDTH_BYTES),
            write_bytes=self._limit("write_bandwidth", size_bytes, LEAST_BANDWIDTH_BYTES),
            reads=self._limit("read_iops", size_bytes, LEAST_IOPS),
            writes=self._limit("write_iops", size_bytes, LEAST_IOPS),
        )

    def _limit(self, part: str, size_bytes: int, least: int) -> int:
        limits = []
        if fixed := getattr(self, part):
            limits.append(fixed)
        if for_each := getattr(self, f"{part}_per_gib", 0):
            limits.append(max(least, for_each * size_bytes >> 30))
        return min(limits, default=0)

    def words(self) -> list[str]:
        """Its options for lvcreate(8) and lvchange(8), beside its tags."""
        said = self._said()
        if self.bound_recovery_kib:
            said["maximum_recovery_kib"] = self.bound_recovery_kib
        given = [one for one in SETTINGS if one.part in said and one.option]
        return [word for one in given for word in (one.option, one.write(said[one.part]))]

    def tags(self) -> dict[str, str]:
        """The tags that keep the rest of it."""
        said = self._said()
        kept = {one.tag: str(said[one.part]) for one in SETTINGS if one.tag and said.get(one.part)}
        if self.bound_recovery_kib:
            kept[_OWN_MAXIMUM] = str(self.maximum_recovery_kib or 0)
        return kept

    def _said(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Setting:
    """A field of Tuning in lvm2: the column that reports it, and the option that sets it.

    Or the `tag` that keeps it: Carver applies it.
    """

    part: str
    column: str = ""
    option: str = ""
    read: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    of_raid: bool = False
    tag: str = ""


def _read_ahead(column: str) -> int | str:
    return AUTO if column == AUTO else int(column)


def _sectors(ahead: int | str) -> str:
    return ahead if isinstance(ahead, str) else str(ahead // _SECTOR_BYTES)


def _rate(column: str) -> int:
    """Empty where there is none, and where it is no RAID volume."""
    return int(column or 0)


_MINIMUM, _MAXIMUM = "raid_min_recovery_rate", "raid_max_recovery_rate"
# Report, lvcreate and lvchange go by rows.
SETTINGS: Sequence[Setting] = (
    Setting("read_ahead_bytes", "lv_read_ahead", "--readahead", _read_ahead, _sectors),
    Setting("minimum_recovery_kib", _MINIMUM, "--minrecoveryrate", _rate, of_raid=True),
    Setting("maximum_recovery_kib", _MAXIMUM, "--maxrecoveryrate", _rate, of_raid=True),
    Setting("read_iops", tag="readIOPS"),
    Setting("write_iops", tag="writeIOPS"),
    Setting("read_bandwidth", tag="readBandwidth"),
    Setting("write_bandwidth", tag="writeBandwidth"),
    Setting("read_iops_per_gib", tag="readIOPSPerGiB"),
    Setting("write_iops_per_gib", tag="writeIOPSPerGiB"),
    Setting("read_bandwidth_per_gib", tag="readBandwidthPerGiB"),
    Setting("write_bandwidth_per_gib", tag="writeBandwidthPerGiB"),
)
_MAXIMUM_PARTS = {"maximum_recovery_kib", "bound_recovery_kib"}
COLUMNS = tuple(one.column for one in SETTINGS if one.column)
_LIMITS = {one.part for one in SETTINGS if one.tag}


def reported(row: Mapping[str, str], own_tags: Mapping[str, str]) -> Tuning:
    """What a row of a report says, and the volume's tags; a tag that is no number is none."""
    found = {one.part: one.read(row[one.column]) for one in SETTINGS if one.column}
    found["bound_recovery_kib"] = 0
    if (own := tags.number(own_tags.get(_OWN_MAXIMUM, ""))) is not None:
        found["bound_recovery_kib"] = found["maximum_recovery_kib"]
        found["maximum_recovery_kib"] = own
    return replace(limits(own_tags), **found)


def limits(own_tags: Mapping[str, str]) -> Tuning:
    """The limits of I/O that a volume's tags say; one that is no number is none."""
    texts = {one.part: own_tags.get(one.tag, "") for one in SETTINGS if one.tag}
    return Tuning(**{part: tags.number(one) or 0 for part, one in texts.items()})


AS_IT_IS = Tuning()
# What a volume has of which nothing was said.
PLAIN = replace(Tuning(**dict.fromkeys(vars(AS_IT_IS), 0)), read_ahead_bytes=AUTO)


def change(
    lvm: Lvm, group: str, names: Sequence[str], tuning: Tuning, present: Tuning = PLAIN
) -> None:
    """Give volumes what they lack, each in one metadata write: all of it, or nothing (lvchange(8)).

    One command; killed, it has changed some of them. lvm2 refuses a read-ahead that a volume has
    already, and for the origin of copy-on-write snapshots any.
    """
    kept, parts = present.tags(), set(tuning._said())
    if parts & _MAXIMUM_PARTS:
        # The option and the tag go by both.
        after = tuning.over(present)
        tuning = replace(tuning, **{part: vars(after)[part] for part in _MAXIMUM_PARTS})
    old = {one.tag: kept[one.tag] for one in SETTINGS if one.tag in kept and one.part in parts}
    if parts & _MAXIMUM_PARTS and _OWN_MAXIMUM in kept:
        old[_OWN_MAXIMUM] = kept[_OWN_MAXIMUM]
    new = tuning.tags()
    old = {key: text for key, text in old.items() if new.get(key) != text}
    changes = [*tags.words("--deltag", old), *tags.words("--addtag", new)]
    lvm("lvchange", *tuning.words(), *changes, "--", *(f"{group}/{name}" for name in names))
