"""What LVM knows, read in one command into frozen records.

`lvm fullreport` (lvmreport(7)) gives groups, physical and logical volumes in one process. That a
successful report lacks a name is the only proof that the name is not there: lvm2's exit code 5
means many things.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lvm import errors, raid, tags, tuning
from lvm.lvm2 import Lvm
from lvm.tuning import PLAIN, Tuning
from mount import errors as mount_errors

Row = Mapping[str, str]

# lvm(8): what lvm2 appends to a volume's name for the images of a RAID volume, and their metadata,
# for a pool's data and metadata, and for what a cached one holds its data in; lvmcache(7) for its
# cache.
_PART = re.compile(r"(_r(image|meta)_\d+|_t(data|meta)|_w?corig|_cache_cvol)+$")
_IMAGE_METADATA = "_rmeta_"
# The data of a RAID's image, or its metadata: the volume and the image's number.
_IMAGE = re.compile(r"(.+)_r(?:image|meta)_(\d+)")
# What a pool's data are called below a cache of either kind.
_BELOW_CACHE = {"_tdata_corig": "cache", "_tdata_wcorig": "writecache"}
# The tag of a disk on which nothing but caches is made (pvchange(8)).
FAST = "carver.fast"
# The tags of a group by which its free extents, or those of these disks by their UUIDs, are to be
# overwritten before anyone gets them.
SWEEP, SWEEP_DISKS, BETWEEN = "sweep", "sweepDisks", "+"
# lib/metadata/pool_manip.c of lvm2: the one spare of a group.
_SPARE = "[lvol0_pmspare]"
# tools/pvmove.c of lvm2.
_MOVE = re.compile(r"pvmove\d+")
# Policies of a group by which lvm2 gives less to one volume than is free.
CONTIGUOUS = "contiguous"
_CLING = ("cling", "cling_by_tags")


def whole(part: str) -> str:
    """The volume that a part is of, by its name; the name itself where it is no part's."""
    return _PART.sub("", part)


@dataclass(frozen=True)
class PhysicalVolume:
    """A disk of a group."""

    name: str
    uuid: str
    extents: int
    allocated_extents: int
    missing: bool
    allocatable: bool
    fast: bool = False
    # What is free on it holds data that are to be overwritten before anyone gets it.
    unclean: bool = False
    # Its metadata area, which has two copies of the group's text; 0 where none is in use.
    metadata_bytes: int = 0
    # The most extents of it that lvm2 gives in one piece; None where several pieces will do.
    longest_extents: int | None = None

    @property
    def unallocated_extents(self) -> int:
        """Extents that lvm2 may allocate."""
        usable = self.allocatable and not self.missing
        return self.extents - self.allocated_extents if usable else 0

    @property
    def free_extents(self) -> int:
        """Extents that new volumes may use: none of a disk that is for caches, or unclean."""
        return 0 if self.unclean else self.image_extents

    @property
    def image_extents(self) -> int:
        """Extents that images of RAIDs may be built anew on, by which they are overwritten."""
        return 0 if self.fast else self.given_extents

    @property
    def given_extents(self) -> int:
        """Extents that lvm2 gives to one volume or image: not more than one piece, if asked."""
        free = self.unallocated_extents
        return free if self.longest_extents is None else min(free, self.longest_extents)


@dataclass(frozen=True)
class LogicalVolume:
    """A volume of a group. `active` is this node's; `disks` are the disks' UUIDs."""

    group: str
    name: str
    uuid: str
    size_bytes: int
    tags: frozenset[str]
    active: bool
    # lv_layout's words; of a pool whose data have a cache, the cache's kind as well.
    layout: frozenset[str]
    # The thin pool that it lies in, and what it is a snapshot of.
    pool: str
    origin: str
    health: str
    disks: frozenset[str] = frozenset()
    # How full a pool or a snapshot's copy-on-write area is; None where it is neither, or inactive.
    data_percent: float | None = None
    metadata_percent: float | None = None
    # A copy-on-write snapshot whose area was full once: what it holds is no snapshot any more. None
    # where that is not known.
    overflowed: bool | None = False
    read_only: bool = False
    # Its device is suspended: reads and writes wait.
    suspended: bool = False
    # Of a thin volume: its number in its pool. lvm2 gives a new one the number above all that are
    # there (get_free_pool_device_id in lib/metadata/thin_manip.c), so they tell the order.
    thin_id: int | None = None
    # Of a pool: how many volumes were made and removed in it, as lvm2's metadata have it. Of a thin
    # volume: how many before it was made.
    transaction_id: int | None = None
    # Of a pool.
    metadata_size_bytes: int = 0
    # Of a volume with a cache, or a pool: the volume that its cache is.
    cachevol: str = ""
    tuning: Tuning = PLAIN
    # Where it lies, in the form that lvcreate(8) and lvextend(8) take: a disk, then the first and
    # the last of each piece. Of what lies on disks itself.
    ranges: tuple[str, ...] = ()

    # How many stripes each of its pieces has, of a RAID how many images; 0 where pieces differ, or
    # where it lies on nothing itself.
    stripes: int = 0
    # Of a RAID: the UUIDs of the disks that each image lies on, in the order of the images.
    images: tuple[frozenset[str], ...] = ()

    @cached_property
    def own_tags(self) -> Mapping[str, str]:
        """Carver's own tags, by their keys (lvm/tags.py)."""
        return tags.decode(self.tags)

    @property
    def is_copy_on_write(self) -> bool:
        """Whether it is a snapshot that keeps what its origin overwrites; a thin one shares."""
        return bool(self.origin) and not self.pool


@dataclass(frozen=True)
class Group:
    """A volume group, with all that is in it."""

    name: str
    uuid: str
    extent_size_bytes: int
    tags: frozenset[str]
    missing_disks: int
    # Missing ones included.
    disks: tuple[PhysicalVolume, ...] = ()
    volumes: Mapping[str, LogicalVolume] = field(default_factory=dict)
    # What lvm2 keeps for the repair of pools' metadata, and the UUIDs of the disks that it is on.
    spare_extents: int = 0
    spare_disks: frozenset[str] = frozenset()
    # The names of the volumes by which lvm2 moves what lies on a disk (pvmove(8)).
    moves: frozenset[str] = frozenset()
    # Whether it was made ready for another node (vgexport(8)), and what shares it (lvmlockd(8)).
    exported: bool = False
    lock_type: str = ""
    # The smallest of its metadata areas, each of which has two copies of the text, and by how much
    # the text can grow; of a group that only a test has, no size.
    metadata_bytes: int = 0
    metadata_free_bytes: int = 0
    # How many logical volumes it may have (vgcreate(8)); 0 for any number.
    most_volumes: int = 0
    # How lvm2 allocates in it, as Carver's commands do not say otherwise (lvm(8), ALLOCATION).
    policy: str = "normal"

    @cached_property
    def own_tags(self) -> Mapping[str, str]:
        """Carver's own tags, by their keys (lvm/tags.py)."""
        return tags.decode(self.tags)

    @property
    def is_one_node_s(self) -> bool:
        """Whether it is not exported, and no lock manager shares it with others."""
        return not self.exported and self.lock_type in ("", "none")

    def may_add(self, volumes: int) -> bool:
        """Whether it may have so many logical volumes more; parts of one do not count."""
        return not self.most_volumes or len(self.volumes) + volumes <= self.most_volumes

    @property
    def missing_uuids(self) -> tuple[str, ...]:
        """The UUIDs of its missing disks."""
        return tuple(disk.uuid for disk in self.disks if disk.missing)

    def lost_images(self, volume: LogicalVolume) -> tuple[bool, ...]:
        """Which images of a RAID lie on missing disks, in the order of the images."""
        return tuple(not image.isdisjoint(self.missing_uuids) for image in volume.images)

    def survives(self, volume: LogicalVolume) -> bool:
        """Whether it is a RAID, and has all that it lost with missing disks on other disks."""
        level = raid.level(volume.layout)
        return level is not None and level.survives(self.lost_images(volume))

    @property
    def extents(self) -> int:
        """Extents of the disks that are there, but for those of caches."""
        return sum(disk.extents for disk in self.disks if not (disk.missing or disk.fast))

    @property
    def free_extents(self) -> int:
        """Extents that new volumes may use, over all disks."""
        return sum(disk.free_extents for disk in self.disks)

    @property
    def keeps_to_one_disk(self) -> bool:
        """Whether lvm2 lets what it allocates in one go lie on one disk alone."""
        return self.policy in (CONTIGUOUS, *_CLING)

    @property
    def linear_extents(self) -> int:
        """Of `free_extents` those that one linear volume may have."""
        return self._together(disk.free_extents for disk in self.disks)

    @property
    def fast_free_extents(self) -> int:
        """Extents that a new cache may use."""
        usable = (disk for disk in self.disks if disk.fast and not disk.unclean)
        return self._together(disk.given_extents for disk in usable)

    def _together(self, extents: Iterable[int]) -> int:
        """What one volume may have of the extents of several disks."""
        return max(extents, default=0) if self.keeps_to_one_disk else sum(extents)

    def copy_on_write_of(self, origin: str) -> list[LogicalVolume]:
        """The copy-on-write snapshots of a volume. Without it they are nothing."""
        return [one for one in self.made_of(origin) if one.is_copy_on_write]

    @cached_property
    def readable_copy_on_write(self) -> Sequence[str]:
        """The names of all copy-on-write snapshots that were not lost."""
        every = self.volumes.values()
        return tuple(one.name for one in every if one.is_copy_on_write and not one.overflowed)

    def made_of(self, origin: str) -> Sequence[LogicalVolume]:
        """The snapshots of a volume, those that share a pool with it too."""
        return self._by_origin.get(origin, ())

    @cached_property
    def _by_origin(self) -> Mapping[str, list[LogicalVolume]]:
        found: defaultdict[str, list[LogicalVolume]] = defaultdict(list)
        for one in self.volumes.values():
            if one.origin:
                found[one.origin].append(one)
        return found

    def in_pool(self, pool: str) -> Sequence[LogicalVolume]:
        """The volumes that lie in a pool."""
        return self._by_pool.get(pool, ())

    def bytes_in_pool(self, pool: str) -> int:
        """The sizes of all of them; added up once for a report, however many ask."""
        return self._pool_bytes.get(pool, 0)

    @cached_property
    def _by_pool(self) -> Mapping[str, list[LogicalVolume]]:
        found: defaultdict[str, list[LogicalVolume]] = defaultdict(list)
        for one in self.volumes.values():
            if one.pool:
                found[one.pool].append(one)
        return found

    @cached_property
    def _pool_bytes(self) -> Mapping[str, int]:
        return {pool: sum(one.size_bytes for one in held) for pool, held in self._by_pool.items()}

    def is_bare(self, name: str, images: int) -> bool:
        """Whether the metadata of each of a RAID's first images are a volume of their own.

        While lvm2 makes a RAID, they are until they are cleared; while it adds an image, only those
        of that image are. lvm2 refuses to activate either ("with visible SubLVs").
        """
        return all(f"{name}{_IMAGE_METADATA}{number}" in self.volumes for number in range(images))

    def only(self, *names: str) -> "Group":
        """The same with these of its volumes: what can be kept for long, and by many."""
        kept = {name: self.volumes[name] for name in names if name in self.volumes}
        return replace(self, volumes=kept)

    def volume(self, name: str) -> LogicalVolume:
        """The volume of that name; raises VolumeMissing."""
        try:
            return self.volumes[name]
        except KeyError:
            raise errors.VolumeMissing(self.name, name) from None


@dataclass(frozen=True)
class Report:
    """All groups that lvm2 sees. `orphans` are disks that lvm2 has labelled and no group has."""

    groups: Mapping[str, Group]
    orphans: tuple[str, ...] = ()

    def group(self, name: str) -> Group:
        """The group of that name; raises GroupMissing."""
        try:
            return self.groups[name]
        except KeyError:
            raise errors.GroupMissing(name) from None


_COLUMNS = {
    "vg": "vg_name,vg_uuid,vg_extent_size,vg_tags,vg_missing_pv_count,vg_exported,vg_lock_type,"
    "vg_mda_size,vg_mda_free,max_lv,vg_allocation_policy",
    "pv": "pv_name,pv_uuid,pv_pe_count,pv_pe_alloc_count,pv_missing,pv_allocatable,pv_in_use,"
    "pv_tags,pe_start,pv_mda_size,pv_mda_used_count",
    "lv": "lv_name,lv_uuid,lv_size,lv_tags,lv_active,lv_layout,pool_lv,origin,"
    "lv_health_status,data_percent,metadata_percent,lv_snapshot_invalid,lv_permissions,"
    "lv_metadata_size,lv_suspended," + ",".join(tuning.COLUMNS),
    # What lies on each disk, parts of a volume by names of their own.
    "pvseg": "pv_uuid,lv_name,pvseg_size",
    # Where each piece of a volume begins, of the volume and on a disk; its stripes or images; a
    # thin one's numbers.
    "seg": "lv_name,seg_start,seg_pe_ranges,stripes,thin_id,transaction_id",
}

# What of lvm.conf(5) changes the rows of a JSON report with columns that are named: which of them
# are there (compact), what stands for yes and no, around a part of a volume, and between tags
# (tools/reporter.c, lib/report/report.c). As lvm2 has it where lvm.conf says nothing.
_SETTINGS = (
    "report/compact_output=0",
    'report/compact_output_cols=""',
    "report/binary_values_as_numeric=0",
    "report/mark_hidden_devices=1",
    'report/list_item_separator=","',
    "report/buffered=1",
    "report/columns_as_rows=0",
    "report/prefixes=0",
    "report/two_word_unknown_device=0",
    "log/report_command_log=0",
)

# Whether the copy-on-write snapshot whose area begins on a disk, so many bytes in, is lost.
Overflowed = Callable[[str, int], bool | None]


def read(lvm: Lvm, overflowed: Overflowed = lambda _disk, _offset_bytes: None) -> Report:
    """Ask lvm2 for everything, in one command; and `overflowed`, of what lvm2 does not know.

    Raises CommandFailed when there is no report, BadReport when it is not understood.
    """
    words = ["--reportformat", "json", "--units", "b", "--nosuffix"]
    for part, columns in _COLUMNS.items():
        words += ["--configreport", part, "--options", columns]
    try:
        document = json.loads(lvm("fullreport", *words, settings=_SETTINGS))
        parts = document["report"]
        groups = [_group(part, overflowed) for part in parts if part.get("vg")]
        # Disks in no group are a part of their own, which has only "pv" and "pvseg". Where a label
        # says that a group uses it, that is a group that lvm2 cannot read.
        free = [disk for part in parts if not part.get("vg") for disk in part["pv"]]
        orphans = [disk["pv_name"] for disk in free if not disk["pv_in_use"]]
    except (KeyError, ValueError, TypeError) as error:
        raise mount_errors.BadReport(f"{type(error).__name__}: {error}") from error
    return Report({group.name: group for group in groups}, tuple(orphans))


def _group(part: Mapping[str, Any], overflowed: Overflowed) -> Group:
    (row,) = part["vg"]
    name = row["vg_name"]
    own_tags = tags.decode(_words(row["vg_tags"]))
    unclean = own_tags.get(SWEEP_DISKS, "").split(BETWEEN)
    disks = _disks_by_volume(part["pvseg"])
    is_contiguous = row["vg_allocation_policy"] == CONTIGUOUS
    longest = _longest_free(part["pvseg"]) if is_contiguous else None
    cached = _cached_pools(part["pvseg"])
    ranges, stripes = _ranges(part["seg"]), _stripes(part["seg"])
    thin = {row["lv_name"]: row for row in part["seg"] if row["transaction_id"]}
    images = _images(part["pvseg"])
    volumes = [
        _logical_volume(name, volume, disks, cached, ranges, stripes, thin, images)
        for volume in part["lv"]
    ]
    if any(one.overflowed is None for one in volumes):
        begins = _beginnings(part, int(row["vg_extent_size"]))
        volumes = [
            replace(one, overflowed=overflowed(*begins[one.name]))
            if one.overflowed is None and one.name in begins
            else one
            for one in volumes
        ]
    return Group(
        name=name,
        uuid=row["vg_uuid"],
        extent_size_bytes=int(row["vg_extent_size"]),
        tags=_words(row["vg_tags"]),
        missing_disks=int(row["vg_missing_pv_count"]),
        exported=bool(row["vg_exported"]),
        lock_type=row["vg_lock_type"],
        metadata_bytes=int(row["vg_mda_size"]),
        metadata_free_bytes=int(row["vg_mda_free"]),
        most_volumes=int(row["max_lv"]),
        policy=row["vg_allocation_policy"],
        disks=tuple(
            _physical_volume(
                disk,
                SWEEP in own_tags or disk["pv_uuid"] in unclean,
                longest.get(disk["pv_uuid"], 0) if longest is not None else None,
            )
            for disk in part["pv"]
        ),
        volumes={volume.name: volume for volume in volumes},
        spare_extents=sum(int(r["pvseg_size"]) for r in part["pvseg"] if r["lv_name"] == _SPARE),
        spare_disks=frozenset(r["pv_uuid"] for r in part["pvseg"] if r["lv_name"] == _SPARE),
        moves=frozenset(name for name in disks if _MOVE.fullmatch(name)),
    )


def _longest_free(segments: Iterable[Row]) -> Mapping[str, int]:
    """The longest run of free extents of each disk that has any, by its UUID."""
    found: defaultdict[str, int] = defaultdict(int)
    for row in segments:
        if not row["lv_name"]:
            found[row["pv_uuid"]] = max(found[row["pv_uuid"]], int(row["pvseg_size"]))
    return found


def _physical_volume(row: Row, unclean: bool, longest: int | None) -> PhysicalVolume:
    return PhysicalVolume(
        name=row["pv_name"],
        uuid=row["pv_uuid"],
        extents=int(row["pv_pe_count"]),
        allocated_extents=int(row["pv_pe_alloc_count"]),
        missing=bool(row["pv_missing"]),
        allocatable=bool(row["pv_allocatable"]),
        fast=FAST in _words(row["pv_tags"]),
        unclean=unclean,
        metadata_bytes=int(row["pv_mda_size"]) if int(row["pv_mda_used_count"]) else 0,
        longest_extents=longest,
    )


def _disks_by_volume(segments: Iterable[Row]) -> Mapping[str, set[str]]:
    """The UUIDs of the disks that each volume lies on, itself or by its RAID images."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for row in segments:
        name = whole(row["lv_name"].strip("[]"))
        if name:
            found[name].add(row["pv_uuid"])
    return found


def _images(segments: Iterable[Row]) -> Mapping[str, tuple[frozenset[str], ...]]:
    """The UUIDs of the disks that each image of each RAID lies on, in order."""
    found: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in segments:
        if named := _IMAGE.fullmatch(row["lv_name"].strip("[]")):
            found[named[1]][int(named[2])].add(row["pv_uuid"])
    return {
        name: tuple(frozenset(images.get(number, ())) for number in range(max(images) + 1))
        for name, images in found.items()
    }


def _ranges(segments: Iterable[Row]) -> Mapping[str, list[str]]:
    """The pieces of each volume on disks, in the order in which they make it up."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for row in sorted(segments, key=lambda one: int(one["seg_start"])):
        found[row["lv_name"]] += row["seg_pe_ranges"].split()
    return found


def _stripes(segments: Iterable[Row]) -> Mapping[str, set[int]]:
    """How many stripes, or images, the pieces of each volume have."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for row in segments:
        found[row["lv_name"]].add(int(row["stripes"] or 0))
    return found


def _cached_pools(segments: Iterable[Row]) -> Mapping[str, str]:
    """The pools whose data have a cache, and its kind: lvm2 tells of it by their parts only."""
    found = {}
    for row in segments:
        for ending, kind in _BELOW_CACHE.items():
            if (name := row["lv_name"].strip("[]")).endswith(ending):
                found[name.removesuffix(ending)] = kind
    return found


def _beginnings(part: Mapping[str, Any], extent_size_bytes: int) -> Mapping[str, tuple[str, int]]:
    """Where each volume that lies on disks itself begins: the disk, and the bytes before."""
    starts = {disk["pv_name"]: int(disk["pe_start"]) for disk in part["pv"]}
    found = {}
    for row in part["seg"]:
        disk, _, extents = row["seg_pe_ranges"].partition(":")
        if row["seg_start"] == "0" and disk in starts:
            first, _, _ = extents.partition("-")
            found[row["lv_name"]] = (disk, starts[disk] + int(first) * extent_size_bytes)
    return found


def _logical_volume(
    group: str,
    row: Row,
    disks: Mapping[str, set[str]],
    cached_pools: Mapping[str, str],
    ranges: Mapping[str, Sequence[str]],
    stripes: Mapping[str, set[int]],
    thin: Mapping[str, Row],
    images: Mapping[str, tuple[frozenset[str], ...]],
) -> LogicalVolume:
    name, every = row["lv_name"], _words(row["lv_tags"])
    own_tags = tags.decode(every)
    made = LogicalVolume(
        group=group,
        name=name,
        uuid=row["lv_uuid"],
        size_bytes=int(row["lv_size"]),
        tags=every,
        active=row["lv_active"] == "active",
        layout=_words(row["lv_layout"]) | _words(cached_pools.get(name, "")),
        pool=_visible(row["pool_lv"]),
        origin=_visible(row["origin"]),
        health=row["lv_health_status"],
        disks=frozenset(disks.get(name, ())),
        data_percent=_percent(row["data_percent"]),
        metadata_percent=_percent(row["metadata_percent"]),
        overflowed=_overflowed(row),
        read_only=row["lv_permissions"] == "read-only",
        metadata_size_bytes=int(row["lv_metadata_size"] or 0),
        suspended=row["lv_suspended"] == "suspended",
        cachevol=f"{name}_cache_cvol" if name in cached_pools else _hidden(row["pool_lv"]),
        tuning=tuning.reported(row, own_tags),
        ranges=tuple(ranges.get(name, ())),
        thin_id=_number(thin.get(name), "thin_id"),
        transaction_id=_number(thin.get(name), "transaction_id"),
        stripes=max(stripes[name]) if len(stripes.get(name, ())) == 1 else 0,
        images=images.get(name, ()),
    )
    # Where a cached property is kept: decoded once for each report.
    vars(made)["own_tags"] = own_tags
    return made


def _number(row: Row | None, column: str) -> int | None:
    return int(row[column]) if row and row[column] else None


def _overflowed(row: Row) -> bool | None:
    """What lvm2 has from the kernel, of a snapshot that is active."""
    if row["lv_snapshot_invalid"] == "unknown" and _visible(row["origin"]) and not row["pool_lv"]:
        return None
    return row["lv_snapshot_invalid"] == "snapshot invalid"


def _visible(name: str) -> str:
    """The name of a volume; empty for a part of one, which stands in brackets."""
    return "" if name.startswith("[") else name


def _hidden(name: str) -> str:
    """The name of a part of a volume; empty for a volume."""
    return name.strip("[]") if name.startswith("[") else ""


def _percent(column: str) -> float | None:
    return float(column) if column else None


def _words(column: str) -> frozenset[str]:
    return frozenset(filter(None, column.split(",")))
