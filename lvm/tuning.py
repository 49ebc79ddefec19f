"""How a volume is read ahead and how fast its RAID is rebuilt: what may change while it is in use.

LVM's metadata hold it (lvchange(8), lvmraid(7)); the kernel gets it at once and at activation.
"""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from lvm.lvm2 import Lvm

# The kernel's own choice.
AUTO: Literal["auto"] = "auto"

# lvm2 rounds to pages by itself: "Overriding readahead to 8 sectors, a multiple of 4K page size."
READ_AHEAD_UNIT_BYTES = mmap.PAGESIZE
# Far more than any disk gains by; lvm2 would take a terabyte.
MOST_READ_AHEAD_BYTES = 1 << 30
# An int of drivers/md/dm-raid.c; lvm2 2.03.16 silently records what is left of more.
MOST_RECOVERY_KIB = (1 << 31) - 1

_SECTOR_BYTES = 512


@dataclass(frozen=True)
class Tuning:
    """Settings of a volume; None is not said. Rates are KiB a second on each disk, 0 for none."""

    read_ahead_bytes: int | Literal["auto"] | None = None
    minimum_recovery_kib: int | None = None
    maximum_recovery_kib: int | None = None

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

    def lacking_in(self, present: Self) -> Self:
        """What of this a volume has not."""
        changed = {key: value for key, value in self._said().items() if value != vars(present)[key]}
        return type(self)(**changed)

    def for_new(self) -> Self:
        """What of this lvcreate takes: 2.03.16 finds a minimum without a maximum to be above it."""
        return self if self.maximum_recovery_kib else replace(self, minimum_recovery_kib=None)

    def words(self) -> list[str]:
        """Its options for lvcreate(8) and lvchange(8)."""
        said = self._said()
        given = [one for one in SETTINGS if one.part in said]
        return [word for one in given for word in (one.option, one.write(said[one.part]))]

    def _said(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Setting:
    """A field of Tuning in lvm2: the column that reports it, and the option that sets it."""

    part: str
    column: str
    option: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str
    of_raid: bool = False


def _read_ahead(column: str) -> int | str:
    return AUTO if column == AUTO else int(column)


def _sectors(ahead: int | str) -> str:
    return ahead if isinstance(ahead, str) else str(ahead // _SECTOR_BYTES)


def _rate(column: str) -> int:
    """Empty where there is none, and where it is no RAID volume."""
    return int(column or 0)


_MINIMUM, _MAXIMUM = "raid_min_recovery_rate", "raid_max_recovery_rate"
# Report, lvcreate and lvchange go by rows. One that a tag keeps would have lv_tags and
# --addtag, and `change` would first take its present tag away.
SETTINGS: Sequence[Setting] = (
    Setting("read_ahead_bytes", "lv_read_ahead", "--readahead", _read_ahead, _sectors),
    Setting("minimum_recovery_kib", _MINIMUM, "--minrecoveryrate", _rate, of_raid=True),
    Setting("maximum_recovery_kib", _MAXIMUM, "--maxrecoveryrate", _rate, of_raid=True),
)


def reported(row: Mapping[str, str]) -> Tuning:
    """What a row of a report says."""
    return Tuning(**{one.part: one.read(row[one.column]) for one in SETTINGS})


AS_IT_IS = Tuning()
# What a volume has of which nothing was said.
PLAIN = Tuning(AUTO, 0, 0)


def change(lvm: Lvm, group: str, name: str, tuning: Tuning) -> None:
    """Give a volume what it lacks, in one metadata write: all of it, or nothing (lvchange(8)).

    lvm2 refuses a read-ahead that the volume has already, and for the origin of copy-on-write
    snapshots any.
    """
    lvm("lvchange", *tuning.words(), "--", f"{group}/{name}")
