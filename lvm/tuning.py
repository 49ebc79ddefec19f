"""Settings that change while a volume is in use: read-ahead, RAID recovery rates, I/O limits.

All are recorded in LVM's metadata. Read-ahead and recovery rates are properties of the logical
volume, which lvm2 passes to the kernel at once and at each activation (lvchange(8), lvmraid(7)).
I/O limits are tags of Carver's, which Carver applies by a cgroup.

A node may have a bound for RAID recovery. The bound takes the place of a volume's own maximum rate
if that maximum is higher, or if the volume has none; a tag keeps the volume's own maximum. The
bound is set before any disk fails, since lvm2 changes no rates while a disk is missing.
"""

import mmap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from lvm import tags
from lvm.lvm2 import Lvm
from mount.cgroups import IoMax

# Value of read-ahead that leaves the size to the kernel.
AUTO: Literal["auto"] = "auto"

# Unit of read-ahead, in bytes, as lvm2 rounds up to whole pages ("Overriding readahead to 8
# sectors, a multiple of 4K page size.").
READ_AHEAD_UNIT_BYTES = mmap.PAGESIZE
# Limit of read-ahead: far more than any disk profits from. lvm2 would accept a terabyte.
MOST_READ_AHEAD_BYTES = 1 << 30
# Limit of recovery rates, in KiB a second: an int in drivers/md/dm-raid.c. lvm2 2.03.16 silently
# truncates larger rates.
MOST_RECOVERY_KIB = (1 << 31) - 1

_SECTOR_BYTES = 512
# Key of the tag that keeps a volume's own maximum recovery rate while lvm2 has the node's bound in
# place of that maximum. The tag's value is in KiB a second; 0 for no maximum.
OWN_MAXIMUM = "ownRecoveryRate"

# Smallest I/O limits that are allowed. With lower limits a pod's last writes would take hours, and
# so would the end of the pod.
LEAST_IOPS = 10
LEAST_BANDWIDTH_BYTES = 64 << 10
# Largest I/O limits that are allowed: an unsigned int of the kernel's block/blk-throttle.c, and a
# bandwidth above that of any disk.
MOST_IOPS = (1 << 32) - 1
MOST_BANDWIDTH_BYTES = 1 << 50


@dataclass(frozen=True)
class Tuning:
    """Settings of a volume, or changes of them; None means unspecified, 0 means no limit.

    Recovery rates are in KiB a second on each disk. I/O limits are in operations or bytes a second;
    a limit per GiB is multiplied by the volume's size. Of a fixed limit and a limit per GiB the
    lower one counts.
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
    # The node's bound of recovery, where lvm2 has the bound in place of `maximum_recovery_kib`; 0
    # where lvm2 has that maximum.
    bound_recovery_kib: int | None = None

    @property
    def of_raid(self) -> Sequence[str]:
        """The names of those specified settings that only a RAID volume can have."""
        return [
            setting.field_name
            for setting in SETTINGS
            if setting.of_raid and setting.field_name in self._said()
        ]

    @property
    def refusal(self) -> str:
        """Why lvm2 would refuse these settings for any volume; empty if it would accept them."""
        minimum_kib, maximum_kib = self.minimum_recovery_kib or 0, self.maximum_recovery_kib or 0
        if not maximum_kib or minimum_kib <= maximum_kib:
            return ""
        return (
            f"the minimum recovery rate, {minimum_kib}KiB a second, is more than the maximum,"
            f" {maximum_kib}KiB"
        )

    def applied_to(self, present_tuning: Self) -> Self:
        """The settings of a volume with the settings `present_tuning` after these are applied."""
        return replace(present_tuning, **self._said())

    def bounded(self, present_tuning: Self, bound_kib: int) -> Self:
        """Return these settings with a recovery bound, for a RAID volume with `present_tuning`.

        A bound is raised to the volume's minimum rate, as lvm2 would refuse a lower one. The bound
        is 0 where the volume's own maximum is as low as the bound.
        """
        applied = self.applied_to(present_tuning)
        if bound_kib:
            bound_kib = max(bound_kib, applied.minimum_recovery_kib or 0)
        is_lower = not applied.maximum_recovery_kib or bound_kib < applied.maximum_recovery_kib
        return replace(self, bound_recovery_kib=bound_kib if is_lower else 0)

    def missing_from(self, present_tuning: Self) -> Self:
        """The specified settings that differ from a volume's present settings, `present_tuning`."""
        changes = {
            key: value for key, value in self._said().items() if value != vars(present_tuning)[key]
        }
        return type(self)(**changes)

    def for_new(self) -> Self:
        """The settings that lvcreate(8) accepts for a new volume.

        lvcreate 2.03.16 refuses a minimum recovery rate without a maximum: it takes the missing
        maximum for 0. Such a minimum is left out.
        """
        has_maximum = self.maximum_recovery_kib or self.bound_recovery_kib
        return self if has_maximum else replace(self, minimum_recovery_kib=None)

    @property
    def is_limited(self) -> bool:
        """Whether these settings have an I/O limit."""
        return any(getattr(self, setting.field_name) for setting in SETTINGS if setting.limit)

    def io_max(self, size_bytes: int) -> IoMax:
        """The I/O limits of a volume of `size_bytes`, for its cgroup."""
        limits: defaultdict[str, list[int]] = defaultdict(list)
        for setting in SETTINGS:
            if setting.limit and (value := getattr(self, setting.field_name)):
                limits[setting.limit.of].append(setting.limit.at(value, size_bytes))
        return IoMax(**{kind: min(values) for kind, values in limits.items()})

    def words(self) -> list[str]:
        """The options of lvcreate(8) and lvchange(8) for these settings; `tags` has the others."""
        specified = self._said()
        if self.bound_recovery_kib:
            specified["maximum_recovery_kib"] = self.bound_recovery_kib
        settings = [
            setting for setting in SETTINGS if setting.field_name in specified and setting.option
        ]
        return [
            word
            for setting in settings
            for word in (setting.option, setting.write(specified[setting.field_name]))
        ]

    def tags(self) -> dict[str, str]:
        """The values of Carver's tags for these settings, by the tags' keys."""
        specified = self._said()
        tags_of_settings = {
            setting.tag: str(specified[setting.field_name])
            for setting in SETTINGS
            if setting.tag and specified.get(setting.field_name)
        }
        if self.bound_recovery_kib:
            tags_of_settings[OWN_MAXIMUM] = str(self.maximum_recovery_kib or 0)
        return tags_of_settings

    def _said(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Limit:
    """What a setting limits: the field of IoMax called `of`.

    A limit per GiB is at least `least` for a small volume; a fixed limit has no `least`.
    """

    of: str
    least: int = 0

    def at(self, value: int, size_bytes: int) -> int:
        """The limit of a volume of `size_bytes` by the value of the setting."""
        return max(self.least, value * size_bytes >> 30) if self.least else value


@dataclass(frozen=True)
class Setting:
    """How LVM's metadata record a field of Tuning, called `field_name`.

    lvm2's own property has a `column` of its report, read by `read`, and an `option` that sets the
    property, whose value `write` gives. A setting that Carver applies is kept in a `tag`, as a
    number. A setting that limits I/O says so by its `limit`.
    """

    field_name: str
    column: str = ""
    option: str = ""
    read: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    of_raid: bool = False
    tag: str = ""
    limit: Limit | None = None


def _read_ahead(column: str) -> int | str:
    return AUTO if column == AUTO else int(column)


def _sectors(read_ahead_bytes: int | str) -> str:
    return (
        read_ahead_bytes
        if isinstance(read_ahead_bytes, str)
        else str(read_ahead_bytes // _SECTOR_BYTES)
    )


def _rate(column: str) -> int:
    """The recovery rate in a column, which is empty for no rate and for volumes without RAID."""
    return int(column or 0)


_MINIMUM, _MAXIMUM = "raid_min_recovery_rate", "raid_max_recovery_rate"
# Table of all settings. By this table reports are parsed, and the options and tags for lvcreate and
# lvchange are made.
SETTINGS: Sequence[Setting] = (
    Setting("read_ahead_bytes", "lv_read_ahead", "--readahead", _read_ahead, _sectors),
    Setting("minimum_recovery_kib", _MINIMUM, "--minrecoveryrate", _rate, of_raid=True),
    Setting("maximum_recovery_kib", _MAXIMUM, "--maxrecoveryrate", _rate, of_raid=True),
    Setting("read_iops", tag="readIOPS", limit=Limit("reads")),
    Setting("write_iops", tag="writeIOPS", limit=Limit("writes")),
    Setting("read_bandwidth", tag="readBandwidth", limit=Limit("read_bytes")),
    Setting("write_bandwidth", tag="writeBandwidth", limit=Limit("write_bytes")),
    Setting("read_iops_per_gib", tag="readIOPSPerGiB", limit=Limit("reads", LEAST_IOPS)),
    Setting("write_iops_per_gib", tag="writeIOPSPerGiB", limit=Limit("writes", LEAST_IOPS)),
    Setting(
        "read_bandwidth_per_gib",
        tag="readBandwidthPerGiB",
        limit=Limit("read_bytes", LEAST_BANDWIDTH_BYTES),
    ),
    Setting(
        "write_bandwidth_per_gib",
        tag="writeBandwidthPerGiB",
        limit=Limit("write_bytes", LEAST_BANDWIDTH_BYTES),
    ),
)
# Fields of Tuning that together decide the option of the maximum recovery rate, and its tag.
_MAXIMUM_PARTS = {"maximum_recovery_kib", "bound_recovery_kib"}
# Columns of lvm2's report with the settings of a volume.
COLUMNS = tuple(setting.column for setting in SETTINGS if setting.column)
# The settings that are kept in tags, and those of them that are I/O limits.
_TAGGED = [setting for setting in SETTINGS if setting.tag]
_LIMITS = [setting for setting in SETTINGS if setting.limit]


def reported(row: Mapping[str, str], own_tags: Mapping[str, str]) -> Tuning:
    """The settings of a volume by its row of a report and its tags."""
    values = {
        setting.field_name: setting.read(row[setting.column])
        for setting in SETTINGS
        if setting.column
    }
    values["bound_recovery_kib"] = 0
    own_maximum = own_tags.get(OWN_MAXIMUM)
    if own_maximum and (own_maximum_kib := tags.number(own_maximum)) is not None:
        values["bound_recovery_kib"] = values["maximum_recovery_kib"]
        values["maximum_recovery_kib"] = own_maximum_kib
    return Tuning(**{**_tagged(_TAGGED, own_tags), **values})


def limits(own_tags: Mapping[str, str]) -> Tuning:
    """The I/O limits of a volume by its tags; a tag whose text is no number counts as no limit."""
    return Tuning(**_tagged(_LIMITS, own_tags))


def _tagged(settings: Sequence[Setting], own_tags: Mapping[str, str]) -> dict[str, int]:
    """The values of settings that are kept in tags, by their fields; 0 for no tag or no number."""
    values = dict.fromkeys((setting.field_name for setting in settings), 0)
    for setting in settings:
        if (text := own_tags.get(setting.tag)) is not None:
            values[setting.field_name] = tags.number(text) or 0
    return values


# Tuning without any setting specified: a change of nothing.
AS_IT_IS = Tuning()
# Settings of a volume that was created with no setting specified.
PLAIN = replace(Tuning(**dict.fromkeys(vars(AS_IT_IS), 0)), read_ahead_bytes=AUTO)


def change(
    lvm: Lvm, group: str, names: Sequence[str], tuning: Tuning, present_tuning: Tuning = PLAIN
) -> None:
    """Change settings of volumes that all have the settings `present_tuning`, by one lvchange(8).

    Each volume gets all changes in one metadata write; a killed command has changed some of the
    volumes. lvm2 refuses a read-ahead that equals the present one, and any for the origin of
    copy-on-write snapshots.
    """
    present_tags, parts = present_tuning.tags(), set(tuning._said())
    if parts & _MAXIMUM_PARTS:
        # The value of the option, and whether there is a tag, depend on maximum and bound together.
        applied = tuning.applied_to(present_tuning)
        tuning = replace(tuning, **{part: vars(applied)[part] for part in _MAXIMUM_PARTS})
    old_tags = {
        setting.tag: present_tags[setting.tag]
        for setting in SETTINGS
        if setting.tag in present_tags and setting.field_name in parts
    }
    if parts & _MAXIMUM_PARTS and OWN_MAXIMUM in present_tags:
        old_tags[OWN_MAXIMUM] = present_tags[OWN_MAXIMUM]
    new_tags = tuning.tags()
    old_tags = {key: text for key, text in old_tags.items() if new_tags.get(key) != text}
    changes = tags.change(old_tags, new_tags)
    lvm("lvchange", *tuning.words(), *changes, "--", *(f"{group}/{name}" for name in names))
