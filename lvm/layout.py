"""The arithmetic of extents: how a volume lies on a group's disks, and what the group can hold.

CreateVolume, GetCapacity and expansion share it, so what is reported can be made. A volume that is
spread over n disks is given the n with the most free extents and no others: lvm2 then has no
choice left, and the arithmetic is exact.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from lvm import raid, tags
from lvm.raid import SegmentType
from lvm.report import Group, LogicalVolume, PhysicalVolume

# lvcreate(8), --chunksize: the least there is, so that little is copied for a little write.
COPY_ON_WRITE_CHUNK_BYTES = 4096
# struct disk_exception, drivers/md/dm-snap-persistent.c.
_EXCEPTION_BYTES = 16

# The RAID levels that Carver makes.
RAIDS = tuple(one.name for one in raid.LEVELS.values() if not one.by_hand)
_KINDS: Mapping[str, SegmentType] = {
    "linear": SegmentType("linear"),
    "striped": SegmentType("striped", least_stripes=2, striped=True),
    **{name: raid.LEVELS[name] for name in RAIDS},
    # In a pool, which lies on the disks: lvm/thin.py.
    "thin": SegmentType("thin", module="dm-thin-pool"),
}
KINDS = tuple(_KINDS)


def is_mirrored(kind: str) -> bool:
    """Whether volumes of that kind have further copies, as many as their layout's `mirrors`."""
    return _KINDS[kind].mirrored


@dataclass(frozen=True)
class Layout:
    """How a volume lies on disks: `stripes` of data, each with `mirrors` further copies.

    `stripe_size_bytes` 0 leaves lvm2's own (64 KiB), as the 0 of each further field does; the tag
    follows the fields. Raises ValueError.
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
            # "RAID10 currently supports only 2-way mirroring" (lvm2 2.03.16).
            raise ValueError(f"{self.kind} has 1 mirror, and no more")
        if self.stripe_size_bytes and not kind.striped:
            raise ValueError(f"{self.kind} has no stripes, so no stripe size")
        if self.stripe_size_bytes and self.stripe_size_bytes not in {
            4096 << one for one in range(20)
        }:
            raise ValueError("a stripe size is 4 KiB times a power of two")

    @property
    def disks(self) -> int:
        """How many disks a volume lies on; a linear one on as many as it takes."""
        return _KINDS[self.kind].disks(self.stripes, self.mirrors)

    @property
    def is_linear(self) -> bool:
        """Whether a volume may lie on any disks, one after the other."""
        return self.kind == "linear"

    @property
    def is_thin(self) -> bool:
        """Whether a volume lies in a pool and takes what it uses."""
        return self.kind == "thin"

    @property
    def is_raid(self) -> bool:
        """Whether a volume has copies or parity, and is brought in sync again after a loss."""
        return self.kind in RAIDS

    @property
    def module(self) -> str:
        """The kernel module that it needs; empty for none."""
        return _KINDS[self.kind].module

    @property
    def metadata_extents(self) -> int:
        """Extents on each disk beside the data's."""
        return _KINDS[self.kind].metadata_extents

    def words(self) -> list[str]:
        """Its options for lvcreate(8)."""
        words = ["--type", self.kind]
        if _KINDS[self.kind].striped:
            words += ["--stripes", str(self.stripes)]
        if self.stripe_size_bytes:
            words += ["--stripesize", f"{self.stripe_size_bytes}b"]
        if self.mirrors:
            words += ["--mirrors", str(self.mirrors)]
        return words

    def __str__(self) -> str:
        """The text of the tag on disks: all fields, without those after the fourth that are 0."""
        texts = [str(one) for one in vars(self).values()]
        while len(texts) > 4 and texts[-1] == "0":
            texts.pop()
        return ":".join(texts)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The layout that `str` gave the text of; None for any other text, never a guess.

        Fields of a newer version are passed over: lvm2 keeps by itself what lvcreate was given, and
        what a volume is grown and repaired by is in the first. 0.2.0 took such a one for linear.
        """
        kind, *numbers = text.split(":")
        own = [tags.number(one) for one in numbers[: len(cls.__match_args__) - 1]]
        known = [one for one in own if one is not None]
        if len(known) < len(own):
            return None
        try:
            return cls(kind, *known)
        except (ValueError, KeyError):
            return None


LINEAR = Layout()


def recognize(volume: LogicalVolume) -> Layout | None:
    """The layout of a volume that may be another program's; None if Carver makes none like it.

    A stripe size is not reported, so it is left to lvm2, which keeps it when the volume grows.
    """
    try:
        return _recognized(volume)
    except ValueError:
        # Such as a RAID that has one image left.
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
    """The kind of a volume by lvm2's report; empty for one that Carver makes none of."""
    if volume.pool:
        return "thin" if volume.layout == {"thin", "sparse"} else ""
    if volume.layout in ({"linear"}, {"striped"}):
        return next(iter(volume.layout))
    level = raid.level(volume.layout)
    return "" if level is None or level.by_hand else level.name


def actual(volume: LogicalVolume, recorded: Layout | None) -> Layout | None:
    """The layout that a volume has, which was made with the `recorded` one; None if not known.

    Where lvm2 reports another it counts: a volume may have been converted by hand (lvconvert(8)).
    What is recorded tells more where both agree, as of the size of stripes.
    """
    if recorded is None or recorded.kind != _kind(volume):
        return recognize(volume)
    return recorded if volume.stripes in (0, recorded.disks) else recognize(volume)


def round_up(size_bytes: int, extent_size_bytes: int, layout: Layout = LINEAR) -> int:
    """A size as whole extents on every stripe, at least one."""
    unit = extent_size_bytes * layout.stripes
    return max(1, -(-size_bytes // unit)) * unit


def allocated_bytes(size_bytes: int, extent_size_bytes: int, layout: Layout = LINEAR) -> int:
    """What a volume of a size in whole extents takes on its disks: all images, with their metadata.

    A thin volume may take its whole size of its pool.
    """
    on_each = size_bytes // layout.stripes + layout.metadata_extents * extent_size_bytes
    return on_each * layout.disks


def maximum_bytes(group: Group, layout: Layout = LINEAR, reserve_extents: int = 0) -> int:
    """The largest volume that can be made now, in bytes; one extent more cannot.

    Linear: all that is free, on one disk if the group's policy wants that. Others: as many stripes
    as the layout has, each as long as the last of the disks that it takes has room for, less its
    metadata. The reserve stays free in the group.
    """
    spare = max(0, group.free_extents - reserve_extents)
    if layout.is_linear:
        return min(spare, group.linear_extents) * group.extent_size_bytes
    chosen = _roomiest(group.disks, layout.disks)
    if len(chosen) < layout.disks:
        return 0
    on_each = min(chosen[-1].free_extents, spare // layout.disks) - layout.metadata_extents
    return max(0, on_each) * layout.stripes * group.extent_size_bytes


def placement(group: Group, layout: Layout) -> tuple[str, ...]:
    """The disks that a new volume is made on; none named for one that may lie on any."""
    if layout.is_linear:
        return anywhere(group)
    return tuple(disk.name for disk in _roomiest(group.disks, layout.disks))


def maximum_growth_bytes(
    group: Group, volume: LogicalVolume, layout: Layout = LINEAR, reserve_extents: int = 0
) -> int:
    """By how many bytes a volume can grow; a volume that is not linear stays on its disks."""
    spare = max(0, group.free_extents - reserve_extents)
    if layout.is_linear:
        return min(spare, group.linear_extents) * group.extent_size_bytes
    own = [disk.free_extents for disk in group.disks if disk.uuid in volume.disks]
    # Fewer disks than the layout has are what a degraded or converted volume has left.
    on_each = min(min(own), spare // layout.disks) if len(own) == layout.disks else 0
    return on_each * layout.stripes * group.extent_size_bytes


def growth_placement(group: Group, volume: LogicalVolume, layout: Layout) -> tuple[str, ...]:
    """The disks that a volume grows on; none named for one that may lie on any."""
    if layout.is_linear:
        return anywhere(group)
    return tuple(disk.name for disk in group.disks if disk.uuid in volume.disks)


def anywhere(group: Group) -> tuple[str, ...]:
    """The disks to name for what may lie on any but fast or unclean ones; none where all may do.

    Full ones are among them: with none named, lvm2 would take the others.
    """
    if not any(disk.fast or disk.unclean for disk in group.disks):
        return ()
    left_out = {one.name for one in group.disks if one.fast or one.unclean or one.missing}
    return tuple(disk.name for disk in group.disks if disk.name not in left_out)


def copy_on_write_bytes(origin_bytes: int, wish: "Reserve", group: Group) -> int:
    """The area that a copy-on-write snapshot gets: whole extents, and no more than it can use.

    lvm2 reduces a larger one by itself (cow_max_extents, lib/metadata/snapshot_manip.c): a header,
    every chunk of the origin, and a chunk of exceptions for as many chunks as it has entries, one
    more to end the last.
    """
    chunk = COPY_ON_WRITE_CHUNK_BYTES
    chunks = -(-origin_bytes // chunk)
    in_one = chunk // _EXCEPTION_BYTES
    useful = (1 + chunks + (chunks + in_one) // in_one) * chunk
    return round_up(min(wish.of(origin_bytes), useful), group.extent_size_bytes)


@dataclass(frozen=True)
class Reserve:
    """An amount, or a part of a whole: what stays free in a group, or is kept for a snapshot."""

    size_bytes: int = 0
    percent: float = 0.0

    def extents(self, group: Group) -> int:
        """The reserve of a group, rounded up."""
        total = sum(disk.extents for disk in group.disks if not disk.fast)
        return -(-self.of(total * group.extent_size_bytes) // group.extent_size_bytes)

    def of(self, whole_bytes: int) -> int:
        """The reserve of so many bytes, rounded up."""
        return max(-int(-whole_bytes * self.percent // 100), self.size_bytes)


NO_RESERVE = Reserve()


def parse_percent(text: str) -> float | None:
    """The number in `12.5%`, 0 to 100; None for what is no such text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    return float(match[1]) if match and float(match[1]) <= 100 else None


def _roomiest(disks: Sequence[PhysicalVolume], count: int) -> list[PhysicalVolume]:
    """The usable disks with the most free extents, roomiest first; of equals, the first."""
    present = (disk for disk in disks if disk.allocatable and not disk.missing)
    usable = [disk for disk in present if not (disk.fast or disk.unclean)]
    return sorted(usable, key=lambda disk: -disk.free_extents)[:count]
