"""How volumes lie on the disks of a volume group: kinds, sizes in extents, and the choice of disks.

CreateVolume, GetCapacity and expansion use the same arithmetic, so a reported capacity can be
created. A volume over n disks is created on the n disks with the most free extents, which are named
to lvm2: lvm2 then has no choice, and the arithmetic is exact.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from lvm import raid, tags
from lvm.raid import SegmentType
from lvm.report import Group, LogicalVolume
from lvm.room import Room

# Chunk size of copy-on-write snapshots, in bytes: the smallest that lvcreate(8) allows
# (--chunksize), so that a small write copies little.
COPY_ON_WRITE_CHUNK_BYTES = 4096
# Size of an entry in a COW store's tables, in bytes (struct disk_exception of
# drivers/md/dm-snap-persistent.c).
_EXCEPTION_BYTES = 16

# Names of the RAID levels that Carver makes.
RAIDS = tuple(level.name for level in raid.LEVELS.values() if not level.by_hand)
_KINDS: Mapping[str, SegmentType] = {
    "linear": SegmentType("linear"),
    "striped": SegmentType("striped", least_stripes=2, striped=True),
    **{name: raid.LEVELS[name] for name in RAIDS},
    # A thin volume lies in a pool, and only the pool lies on disks (lvm/thin.py).
    "thin": SegmentType("thin", module="dm-thin-pool"),
}
KINDS = tuple(_KINDS)


def is_mirrored(kind: str) -> bool:
    """Whether volumes of a kind have copies of their data, which Layout.mirrors counts."""
    return _KINDS[kind].mirrored


@dataclass(frozen=True)
class Layout:
    """How a volume lies on disks: `stripes` of data, each with `mirrors` further copies.

    A `stripe_size_bytes` of 0 means lvm2's default (64 KiB). A field that is added here must have 0
    for its default, too, as the text of the tag has the fields in this order (`__str__`). Raises
    ValueError for a combination that lvm2 does not have.
    """

    kind: str = "linear"
    stripes: int = 1
    mirrors: int = 0
    stripe_size_bytes: int = 0

    def __post_init__(self) -> None:
        kind = _KINDS[self.kind]
        if not kind.striped and self.stripes != 1:
            raise ValueError(f"{self.kind} has no stripes")
        if self.stripes < kind.least_stripes:
            raise ValueError(f"{self.kind} needs {kind.least_stripes} stripes or more")
        if kind.mirrored != (self.mirrors > 0):
            needs = "needs 1 mirror or more" if kind.mirrored else "has no mirrors"
            raise ValueError(f"{self.kind} {needs}")
        if kind.mirrored and kind.striped and self.mirrors > 1:
            # lvm2 2.03.16 refuses more than one mirror ("RAID10 currently supports only 2-way
            # mirroring").
            raise ValueError(f"{self.kind} has 1 mirror, and no more")
        if self.stripe_size_bytes and not kind.striped:
            raise ValueError(f"{self.kind} has no stripes, so no stripe size")
        if self.stripe_size_bytes and self.stripe_size_bytes not in {
            4096 << power for power in range(20)
        }:
            raise ValueError("a stripe size is 4 KiB times a power of two")

    @property
    def disks(self) -> int:
        """The number of disks of a volume; 1 for a linear volume, which may lie on more."""
        return _KINDS[self.kind].disks(self.stripes, self.mirrors)

    @property
    def is_linear(self) -> bool:
        """Whether a volume may lie on any number of disks, one after the other."""
        return self.kind == "linear"

    @property
    def is_thin(self) -> bool:
        """Whether a volume lies in a thin pool and takes extents only as it is written."""
        return self.kind == "thin"

    @property
    def is_raid(self) -> bool:
        """Whether a volume has copies or parity, from which lvm2 rebuilds a lost image."""
        return self.kind in RAIDS

    @property
    def module(self) -> str:
        """The kernel module of the layout's device-mapper target; empty for targets built in."""
        return _KINDS[self.kind].module

    @property
    def metadata_extents(self) -> int:
        """The number of metadata extents on each disk, beside the data's."""
        return _KINDS[self.kind].metadata_extents

    def words(self) -> list[str]:
        """The options of lvcreate(8) for the layout."""
        words = ["--type", self.kind]
        if _KINDS[self.kind].striped:
            words += ["--stripes", str(self.stripes)]
        if self.stripe_size_bytes:
            words += ["--stripesize", f"{self.stripe_size_bytes}b"]
        if self.mirrors:
            words += ["--mirrors", str(self.mirrors)]
        return words

    def __str__(self) -> str:
        """The layout as the value of a tag: its fields, separated by colons.

        Zeroes at the end are left out, except in the first four fields.
        """
        texts = [str(field) for field in vars(self).values()]
        while len(texts) > 4 and texts[-1] == "0":
            texts.pop()
        return ":".join(texts)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the value of a tag that `str` made; None for any other text, never a guess.

        Further fields, which a newer Carver wrote, are ignored: growth and repair need the first
        fields alone, and lvm2 itself keeps what lvcreate was given. (Carver 0.2.0 took a layout
        with further fields for linear.)
        """
        kind, *numbers = text.split(":")
        parsed = [tags.number(number) for number in numbers[: len(cls.__match_args__) - 1]]
        valid = [number for number in parsed if number is not None]
        if len(valid) < len(parsed):
            return None
        try:
            return cls(kind, *valid)
        except (ValueError, KeyError):
            return None


LINEAR = Layout()


def recognize(volume: LogicalVolume) -> Layout | None:
    """Find the layout of a volume by lvm2's report; None if Carver makes no such volumes.

    Another program may have made the volume. The result has no stripe size, as the report has none;
    lvm2 keeps the volume's own when the volume grows.
    """
    try:
        return _recognized(volume)
    except ValueError:
        # The volume has an unusual number of images, such as a RAID with one image left.
        return None


def _recognized(volume: LogicalVolume) -> Layout | None:
    match _kind(volume):
        case "":
            return None
        case "striped" as kind:
            return Layout(kind, stripes=volume.stripes or len(volume.disks))
        case kind if kind in RAIDS:
            return Layout(kind, *raid.LEVELS[kind].spread(volume.stripes or len(volume.images)))
        case kind:
            return Layout(kind)


def _kind(volume: LogicalVolume) -> str:
    """The kind of a volume by lvm2's report; empty for a kind that Carver does not make."""
    if volume.pool:
        return "thin" if volume.layout == {"thin", "sparse"} else ""
    if volume.layout in ({"linear"}, {"striped"}):
        return next(iter(volume.layout))
    level = raid.level(volume.layout)
    return "" if level is None or level.by_hand else level.name


def actual(volume: LogicalVolume, recorded_layout: Layout | None) -> Layout | None:
    """The present layout of a volume that was made with `recorded_layout`; None if unknown.

    lvm2's report decides, as the volume may have been converted by hand (lvconvert(8)). Where the
    report agrees with the record, the record is returned, as it has more, such as the stripe
    size.
    """
    if recorded_layout is None or recorded_layout.kind != _kind(volume):
        return recognize(volume)
    return recorded_layout if volume.stripes in (0, recorded_layout.disks) else recognize(volume)


def round_up(size_bytes: int, extent_size_bytes: int, layout: Layout = LINEAR) -> int:
    """Round a size in bytes up to whole extents on each stripe, at least one extent."""
    unit = extent_size_bytes * layout.stripes
    return max(1, -(-size_bytes // unit)) * unit


def allocated_bytes(size_bytes: int, extent_size_bytes: int, layout: Layout = LINEAR) -> int:
    """The bytes that a volume takes on all of its disks, with copies, parity and RAID metadata.

    The size is a multiple of whole extents on each stripe. The result for a thin volume is the most
    that the volume may take from its pool.
    """
    on_each = size_bytes // layout.stripes + layout.metadata_extents * extent_size_bytes
    return on_each * layout.disks


def maximum_bytes(room: Room, layout: Layout = LINEAR) -> int:
    """The size of the largest volume that can be created now, exactly, in bytes.

    A linear volume can have all free extents, or those of one disk alone where the volume group's
    allocation policy keeps a volume on one disk. Any other volume lies on the disks with the most
    free extents. Of these disks, the one with the fewest free extents limits each stripe. Extents
    that `room` reserves are not counted.
    """
    extent = room.group.extent_size_bytes
    if layout.is_linear:
        return min(room.available_extents, room.linear_extents) * extent
    disks = room.roomiest(layout.disks)
    if len(disks) < layout.disks:
        return 0
    on_each = min(room.free_on(disks[-1]), room.available_extents // layout.disks)
    return max(0, on_each - layout.metadata_extents) * layout.stripes * extent


def placement(room: Room, layout: Layout) -> tuple[str, ...]:
    """The disks to name to lvcreate(8) for a new volume; empty if any disk may have the volume.

    Raises NoDiskServes if the volume needs disks by name, and there is none.
    """
    return room.disk_arguments() if layout.is_linear else room.names(room.roomiest(layout.disks))


def maximum_growth_bytes(room: Room, volume: LogicalVolume, layout: Layout = LINEAR) -> int:
    """The bytes by which a volume can grow now.

    A linear volume may grow onto any disk, any other volume stays on its disks. Where the volume
    group's allocation policy keeps a volume on one disk, lvm2 may refuse a linear volume this
    growth: the free extents need not be on the volume's disk.
    """
    extent = room.group.extent_size_bytes
    if layout.is_linear:
        return min(room.available_extents, room.linear_extents) * extent
    free_extents = [room.free_on(disk) for disk in room.group.disks if disk.uuid in volume.disks]
    # A degraded or converted volume may have fewer disks than its layout, and cannot grow.
    on_each = (
        min(*free_extents, room.available_extents // layout.disks)
        if len(free_extents) == layout.disks
        else 0
    )
    return on_each * layout.stripes * extent


def growth_placement(room: Room, volume: LogicalVolume, layout: Layout) -> tuple[str, ...]:
    """The disks to name to lvextend(8) for a volume; empty if the volume may grow on any disk.

    Raises NoDiskServes if the volume needs disks by name, and there is none.
    """
    if layout.is_linear:
        return room.disk_arguments()
    return room.names(disk for disk in room.group.disks if disk.uuid in volume.disks)


def image_extents(volume: LogicalVolume, extent_size_bytes: int) -> int:
    """The number of extents that one image of a RAID takes on its disk, RAID metadata included.

    For a RAID of a kind that Carver does not make the result is 1, the least possible.
    """
    if (layout := recognize(volume)) is None:
        return 1
    return volume.size_bytes // extent_size_bytes // layout.stripes + layout.metadata_extents


def copy_on_write_bytes(origin_bytes: int, reserve: "Reserve", group: Group) -> int:
    """The size of the COW store of a new snapshot, in bytes: whole extents, no more than useful.

    A COW store can use space for a header, a copy of each chunk of the origin, and the tables of
    the copies, which have one entry more than there are copies. lvm2 would reduce a larger store to
    that size (cow_max_extents, lib/metadata/snapshot_manip.c).
    """
    chunk = COPY_ON_WRITE_CHUNK_BYTES
    chunks = -(-origin_bytes // chunk)
    entries_per_table = chunk // _EXCEPTION_BYTES
    useful = (1 + chunks + (chunks + entries_per_table) // entries_per_table) * chunk
    return round_up(min(reserve.of(origin_bytes), useful), group.extent_size_bytes)


@dataclass(frozen=True)
class Reserve:
    """A size in bytes or a percentage of a whole; the larger of the two counts."""

    size_bytes: int = 0
    percent: float = 0.0

    def extents(self, group: Group) -> int:
        """The reserve in extents, where the whole is a volume group's slow disks; rounded up."""
        if self == NO_RESERVE:
            return 0
        total_bytes = Room(group).planned_extents * group.extent_size_bytes
        return -(-self.of(total_bytes) // group.extent_size_bytes)

    def of(self, whole_bytes: int) -> int:
        """The reserve in bytes, where the whole has `whole_bytes`; rounded up."""
        return max(-int(-whole_bytes * self.percent // 100), self.size_bytes)


NO_RESERVE = Reserve()


def parse_percent(text: str) -> float | None:
    """Parse a percentage from 0 to 100, such as `12.5%`; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    return float(match[1]) if match and float(match[1]) <= 100 else None
