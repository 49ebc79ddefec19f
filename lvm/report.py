"""LVM's state as frozen records: volume groups, physical and logical volumes, read by one command.

The command is `lvm fullreport` (lvmreport(7)). A successful report without a name is the only
proof that a group or volume of that name is absent: lvm2's exit code is 5 for nearly every error.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lvm import lvm_errors, raid, tags, tuning
from lvm.lvm2 import Lvm
from lvm.tuning import PLAIN, Tuning
from mount import mount_errors as mount_errors

Row = Mapping[str, str]

# Ending of a hidden volume's name: one or several suffixes of the hidden volumes that a volume
# consists of (lvm(8), lvmcache(7)). These are a RAID's images and their metadata, a thin pool's
# data and metadata, the slow volume below a cache, and the cache.
_PART = re.compile(r"(_r(image|meta)_\d+|_t(data|meta)|_w?corig|_cache_cvol)+$")
# Part of the name of the metadata volume of a RAID image.
_IMAGE_METADATA = "_rmeta_"
# Name of a RAID image's data or metadata, with the volume's name and the image's number.
_IMAGE = re.compile(r"(.+)_r(?:image|meta)_(\d+)")
# Suffixes of the hidden volume with a thin pool's data below a cache, and the kind of that cache.
_BELOW_CACHE = {"_tdata_corig": "cache", "_tdata_wcorig": "writecache"}
# Tag of a physical volume that is reserved for caches (pvchange(8)).
FAST = "carver.fast"
# Tags of a volume group that say which free extents must be overwritten before they are allocated:
# those of all disks (SWEEP), or of the disks with these UUIDs (SWEEP_DISKS, separated by BETWEEN).
SWEEP, SWEEP_DISKS, BETWEEN = "sweep", "sweepDisks", "+"
# Name of a volume group's spare volume for repairs of thin pools' metadata
# (lib/metadata/pool_manip.c of lvm2).
_SPARE = "[lvol0_pmspare]"
# Name of the temporary volume of a pvmove(8) (tools/pvmove.c of lvm2).
_MOVE = re.compile(r"pvmove\d+")
# Allocation policies of a volume group with which lvm2 gives one volume less than all free extents
# (lvm(8), ALLOCATION): `contiguous` and the two kinds of `cling`.
CONTIGUOUS = "contiguous"
_CLING = ("cling", "cling_by_tags")


def visible_name(hidden_name: str) -> str:
    """The name of the volume that a hidden volume is a part of; other names are unchanged."""
    return _PART.sub("", hidden_name)


@dataclass(frozen=True)
class PhysicalVolume:
    """A physical volume of a volume group. lvm/room.py says what may be allocated on it."""

    name: str
    uuid: str
    extents: int
    allocated_extents: int
    missing: bool
    allocatable: bool
    fast: bool = False
    # Whether the disk's free extents hold data, so that they must be overwritten before they are
    # allocated.
    unclean: bool = False
    # The size of the disk's metadata area, which has room for two texts, in bytes; 0 where no area
    # is in use.
    metadata_bytes: int = 0
    # The longest run of free extents on the disk, where the volume group's allocation policy is
    # `contiguous`, so that lvm2 gives a volume one run alone; None for other policies.
    longest_extents: int | None = None

    @property
    def unallocated_extents(self) -> int:
        """The number of free extents. lvm/room.py says what may be allocated from them."""
        return self.extents - self.allocated_extents

    @cached_property
    def extents_in_one_go(self) -> int:
        """The number of free extents that one volume or image may have.

        That is the longest run of free extents where the volume group's allocation policy is
        `contiguous`.
        """
        free = self.unallocated_extents
        return free if self.longest_extents is None else min(free, self.longest_extents)


@dataclass(frozen=True)
class LogicalVolume:
    """A logical volume of a volume group."""

    group: str
    name: str
    uuid: str
    size_bytes: int
    tags: frozenset[str]
    # Whether the volume is active on this node.
    active: bool
    # The words of lv_layout; for a thin pool with a cache below its data also the kind of that
    # cache.
    layout: frozenset[str]
    # The names of the volume's thin pool, and of the volume's origin if the volume is a snapshot;
    # empty for none.
    pool: str
    origin: str
    health: str
    # The UUIDs of the disks on which the volume lies.
    disks: frozenset[str] = frozenset()
    # How full a thin pool, or the COW store of a snapshot, is, in percent; None for other and for
    # inactive volumes.
    data_percent: float | None = None
    metadata_percent: float | None = None
    # Whether a snapshot's contents are lost because its COW store was once full, or failed; None
    # where this is unknown.
    overflowed: bool | None = False
    read_only: bool = False
    # Whether the volume's device is suspended, so that reads and writes wait.
    suspended: bool = False
    # The number of a thin volume in its pool. lvm2 gives a new volume a number above all existing
    # numbers (get_free_pool_device_id in lib/metadata/thin_manip.c), so the order of the numbers is
    # the order of creation.
    thin_id: int | None = None
    # For a pool, how many volumes lvm2 has made and removed in the pool, by the pool's metadata.
    # For a thin volume, that number of its pool just before the volume was made.
    transaction_id: int | None = None
    # The size of a thin pool's metadata, in bytes.
    metadata_size_bytes: int = 0
    # The name of the volume's cachevol (lvmcache(7)); empty for none.
    cachevol: str = ""
    tuning: Tuning = PLAIN
    # The extents of a volume that lies directly on disks, in the form of lvcreate(8) and
    # lvextend(8): `disk:first-last` for each contiguous range.
    ranges: tuple[str, ...] = ()

    # The number of stripes, or of a RAID's images. It is 0 where the volume's segments differ in
    # that number, and where the volume lies neither on disks nor on images.
    stripes: int = 0
    # The UUIDs of the disks of each RAID image, in the order of the images.
    images: tuple[frozenset[str], ...] = ()

    @cached_property
    def own_tags(self) -> Mapping[str, str]:
        """Carver's own tags, by their keys (lvm/tags.py)."""
        return tags.decode(self.tags)

    @property
    def is_copy_on_write(self) -> bool:
        """Whether the volume is a snapshot with a COW store, and not a thin snapshot."""
        return bool(self.origin) and not self.pool


@dataclass(frozen=True)
class Group:
    """A volume group with its physical and logical volumes."""

    name: str
    uuid: str
    extent_size_bytes: int
    tags: frozenset[str]
    missing_disks: int
    # All physical volumes of the volume group, missing ones included.
    disks: tuple[PhysicalVolume, ...] = ()
    # All logical volumes of the volume group, by their names.
    volumes: Mapping[str, LogicalVolume] = field(default_factory=dict)
    # The size of lvm2's spare volume for repairs of thin pools' metadata, in extents, and the UUIDs
    # of the disks of that volume.
    spare_extents: int = 0
    spare_disks: frozenset[str] = frozenset()
    # The names of the temporary volumes of pvmove(8).
    moves: frozenset[str] = frozenset()
    # Whether vgexport(8) made the volume group ready for another node.
    exported: bool = False
    # The lock manager by which nodes share the volume group (lvmlockd(8)); empty for none.
    lock_type: str = ""
    # The size of the smallest metadata area on the volume group's disks, in bytes; 0 in tests
    # alone.
    metadata_bytes: int = 0
    # How much the text of the metadata can grow, in bytes, as each area has room for two texts.
    metadata_free_bytes: int = 0
    # Limit of the number of the volume group's logical volumes (vgcreate(8)); 0 for no limit.
    most_volumes: int = 0
    # The volume group's allocation policy, by which lvm2 allocates unless a command has another
    # (lvm(8)).
    policy: str = "normal"

    @cached_property
    def own_tags(self) -> Mapping[str, str]:
        """Carver's own tags, by their keys (lvm/tags.py)."""
        return tags.decode(self.tags)

    @property
    def is_one_node_s(self) -> bool:
        """Whether the volume group belongs to this node alone: not exported, no lock manager."""
        return not self.exported and self.lock_type in ("", "none")

    def may_add(self, volumes: int) -> bool:
        """Whether the volume group's limit allows `volumes` further visible volumes."""
        return not self.most_volumes or len(self.volumes) + volumes <= self.most_volumes

    @property
    def missing_uuids(self) -> tuple[str, ...]:
        """The UUIDs of the volume group's missing disks."""
        return tuple(disk.uuid for disk in self.disks if disk.missing)

    def lost_images(self, volume: LogicalVolume) -> tuple[bool, ...]:
        """For each image of a RAID volume, in order, whether the image lies on a missing disk."""
        return tuple(not image.isdisjoint(self.missing_uuids) for image in volume.images)

    def survives(self, volume: LogicalVolume) -> bool:
        """Whether a volume is a RAID whose data are complete without the missing disks."""
        level = raid.level(volume.layout)
        return level is not None and level.survives(self.lost_images(volume))

    @property
    def keeps_to_one_disk(self) -> bool:
        """Whether the allocation policy requires one disk for all extents of an allocation."""
        return self.policy in (CONTIGUOUS, *_CLING)

    def copy_on_write_of(self, origin: str) -> list[LogicalVolume]:
        """The copy-on-write snapshots of a volume, whose data are incomplete without the volume."""
        return [snapshot for snapshot in self.made_of(origin) if snapshot.is_copy_on_write]

    @cached_property
    def readable_copy_on_write(self) -> Sequence[str]:
        """The names of all copy-on-write snapshots whose COW store did not overflow."""
        volumes = self.volumes.values()
        return tuple(
            volume.name for volume in volumes if volume.is_copy_on_write and not volume.overflowed
        )

    def made_of(self, origin: str) -> Sequence[LogicalVolume]:
        """The snapshots of a volume, both copy-on-write and thin ones."""
        return self._by_origin.get(origin, ())

    @cached_property
    def _by_origin(self) -> Mapping[str, list[LogicalVolume]]:
        snapshots: defaultdict[str, list[LogicalVolume]] = defaultdict(list)
        for volume in self.volumes.values():
            if volume.origin:
                snapshots[volume.origin].append(volume)
        return snapshots

    def in_pool(self, pool: str) -> Sequence[LogicalVolume]:
        """The thin volumes of a pool."""
        return self._by_pool.get(pool, ())

    def bytes_in_pool(self, pool: str) -> int:
        """The sum of the sizes of a thin pool's volumes, in bytes; calculated once per report."""
        return self._pool_bytes.get(pool, 0)

    @cached_property
    def _by_pool(self) -> Mapping[str, list[LogicalVolume]]:
        members: defaultdict[str, list[LogicalVolume]] = defaultdict(list)
        for volume in self.volumes.values():
            if volume.pool:
                members[volume.pool].append(volume)
        return members

    @cached_property
    def _pool_bytes(self) -> Mapping[str, int]:
        return {
            pool: sum(volume.size_bytes for volume in volumes)
            for pool, volumes in self._by_pool.items()
        }

    def is_bare(self, name: str, images: int) -> bool:
        """Whether the metadata volumes of a RAID's first `images` images are visible, not hidden.

        While lvm2 makes a RAID, the metadata volumes of all images are visible until lvm2 has
        cleared them; while lvm2 adds an image, only the metadata volume of that image. An lvm2 that
        is killed meanwhile leaves the RAID in this state, in which lvm2 refuses to activate the
        RAID ("with visible SubLVs").
        """
        return all(f"{name}{_IMAGE_METADATA}{number}" in self.volumes for number in range(images))

    def only(self, *names: str) -> "Group":
        """A copy of the volume group with the named volumes alone, to keep less in memory."""
        volumes = {name: self.volumes[name] for name in names if name in self.volumes}
        return replace(self, volumes=volumes)

    def volume(self, name: str) -> LogicalVolume:
        """The volume with this name. Raises VolumeMissing if the volume group has none."""
        try:
            return self.volumes[name]
        except KeyError:
            raise lvm_errors.VolumeMissing(self.name, name) from None


@dataclass(frozen=True)
class Report:
    """All volume groups that lvm2 sees, and the paths of the physical volumes without a group.

    These paths are `orphans`.
    """

    groups: Mapping[str, Group]
    orphans: tuple[str, ...] = ()

    def group(self, name: str) -> Group:
        """The volume group with this name. Raises GroupMissing if the report has none."""
        try:
            return self.groups[name]
        except KeyError:
            raise lvm_errors.GroupMissing(name) from None


# Columns of each part of the report.
_COLUMNS = {
    "vg": "vg_name,vg_uuid,vg_extent_size,vg_tags,vg_missing_pv_count,vg_exported,vg_lock_type,"
    "vg_mda_size,vg_mda_free,max_lv,vg_allocation_policy",
    "pv": "pv_name,pv_uuid,pv_pe_count,pv_pe_alloc_count,pv_missing,pv_allocatable,pv_in_use,"
    "pv_tags,pe_start,pv_mda_size,pv_mda_used_count",
    "lv": "lv_name,lv_uuid,lv_size,lv_tags,lv_active,lv_layout,pool_lv,origin,"
    "lv_health_status,data_percent,metadata_percent,lv_snapshot_invalid,lv_permissions,"
    "lv_metadata_size,lv_suspended," + ",".join(tuning.COLUMNS),
    # The volumes, hidden ones included, to which each range of a disk's extents belongs.
    "pvseg": "pv_uuid,lv_name,pvseg_size",
    # The segments of each volume: where a segment begins in the volume, its extents on disks, and
    # its stripes or images; for thin volumes and pools their numbers.
    "seg": "lv_name,seg_start,seg_pe_ranges,stripes,thin_id,transaction_id",
}

# Settings that could change the form of a JSON report, at their defaults, so that the node's
# lvm.conf(5) does not matter: omitted columns (compact), the words for yes and no, the brackets
# around hidden volumes, the separator of tags (tools/reporter.c, lib/report/report.c).
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

# Function that reads whether a COW store overflowed; None where this is unknown. The arguments are
# the path of a disk, and the offset in bytes at which the store begins on that disk.
Overflowed = Callable[[str, int], bool | None]


def read(lvm: Lvm, overflowed: Overflowed = lambda _disk, _offset_bytes: None) -> Report:
    """Read the state of LVM by one command.

    Raises CommandFailed if the command failed, BadReport if its output cannot be parsed.

    lvm2 reports no overflow of an inactive snapshot; `overflowed` reads that from its COW store.
    """
    words = ["--reportformat", "json", "--units", "b", "--nosuffix"]
    for part, columns in _COLUMNS.items():
        words += ["--configreport", part, "--options", columns]
    try:
        document = json.loads(lvm("fullreport", *words, settings=_SETTINGS))
        parts = document["report"]
        groups = [_group(part, overflowed) for part in parts if part.get("vg")]
        # The report has disks without a volume group in an entry of their own, with "pv" and
        # "pvseg" only. Such a disk whose label says that it is used belongs to a group that lvm2
        # cannot read.
        free = [disk for part in parts if not part.get("vg") for disk in part["pv"]]
        orphans = [disk["pv_name"] for disk in free if not disk["pv_in_use"]]
    except (KeyError, ValueError, TypeError) as error:
        raise mount_errors.BadReport(f"{type(error).__name__}: {error}") from error
    return Report({group.name: group for group in groups}, tuple(orphans))


def _group(group_report: Mapping[str, Any], overflowed: Overflowed) -> Group:
    (row,) = group_report["vg"]
    name = row["vg_name"]
    own_tags = tags.decode(_words(row["vg_tags"]))
    unclean = own_tags.get(SWEEP_DISKS, "").split(BETWEEN)
    disks = _disks_by_volume(group_report["pvseg"])
    is_contiguous = row["vg_allocation_policy"] == CONTIGUOUS
    longest = _longest_free(group_report["pvseg"]) if is_contiguous else None
    cached = _cached_pools(group_report["pvseg"])
    ranges, stripes = _ranges(group_report["seg"]), _stripes(group_report["seg"])
    thin_segments = {row["lv_name"]: row for row in group_report["seg"] if row["transaction_id"]}
    images = _images(group_report["pvseg"])
    volumes = [
        _logical_volume(name, volume, disks, cached, ranges, stripes, thin_segments, images)
        for volume in group_report["lv"]
    ]
    if any(volume.overflowed is None for volume in volumes):
        begins = _beginnings(group_report, int(row["vg_extent_size"]))
        volumes = [
            replace(volume, overflowed=overflowed(*begins[volume.name]))
            if volume.overflowed is None and volume.name in begins
            else volume
            for volume in volumes
        ]
    group = Group(
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
            for disk in group_report["pv"]
        ),
        volumes={volume.name: volume for volume in volumes},
        spare_extents=sum(
            int(row["pvseg_size"]) for row in group_report["pvseg"] if row["lv_name"] == _SPARE
        ),
        spare_disks=frozenset(
            row["pv_uuid"] for row in group_report["pvseg"] if row["lv_name"] == _SPARE
        ),
        moves=frozenset(name for name in disks if _MOVE.fullmatch(name)),
    )
    # Set the cached property, as the tags are decoded here already.
    vars(group)["own_tags"] = own_tags
    return group


def _longest_free(segments: Iterable[Row]) -> Mapping[str, int]:
    """The longest run of free extents of each disk that has free extents, by the disk's UUID."""
    longest: defaultdict[str, int] = defaultdict(int)
    for row in segments:
        if not row["lv_name"]:
            longest[row["pv_uuid"]] = max(longest[row["pv_uuid"]], int(row["pvseg_size"]))
    return longest


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
    """The UUIDs of the disks of each volume and of its hidden parts, by the volume's name."""
    disks: defaultdict[str, set[str]] = defaultdict(set)
    for row in segments:
        name = visible_name(row["lv_name"].strip("[]"))
        if name:
            disks[name].add(row["pv_uuid"])
    return disks


def _images(segments: Iterable[Row]) -> Mapping[str, tuple[frozenset[str], ...]]:
    """The UUIDs of the disks of each image, in the order of the images, by the RAID's name."""
    disks: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in segments:
        if image_name := _IMAGE.fullmatch(row["lv_name"].strip("[]")):
            disks[image_name[1]][int(image_name[2])].add(row["pv_uuid"])
    return {
        name: tuple(frozenset(images.get(number, ())) for number in range(max(images) + 1))
        for name, images in disks.items()
    }


def _ranges(segments: Iterable[Row]) -> Mapping[str, list[str]]:
    """The extents of each volume on disks, in the volume's order, by the volume's name."""
    ranges: defaultdict[str, list[str]] = defaultdict(list)
    for row in sorted(segments, key=lambda row: int(row["seg_start"])):
        ranges[row["lv_name"]] += row["seg_pe_ranges"].split()
    return ranges


def _stripes(segments: Iterable[Row]) -> Mapping[str, set[int]]:
    """The numbers of stripes, or images, of each volume's segments, by the volume's name."""
    stripes: defaultdict[str, set[int]] = defaultdict(set)
    for row in segments:
        stripes[row["lv_name"]].add(int(row["stripes"] or 0))
    return stripes


def _cached_pools(segments: Iterable[Row]) -> Mapping[str, str]:
    """The kind of the cache below each cached thin pool's data, by the pool's name.

    The row of the pool itself does not show its cache; the rows of hidden volumes do.
    """
    kinds = {}
    for row in segments:
        for ending, kind in _BELOW_CACHE.items():
            if (name := row["lv_name"].strip("[]")).endswith(ending):
                kinds[name.removesuffix(ending)] = kind
    return kinds


def _beginnings(
    group_report: Mapping[str, Any], extent_size_bytes: int
) -> Mapping[str, tuple[str, int]]:
    """The disk at which each volume begins, with the offset in bytes, by the volume's name.

    Only volumes that lie directly on disks are in the result.
    """
    starts = {disk["pv_name"]: int(disk["pe_start"]) for disk in group_report["pv"]}
    beginnings = {}
    for row in group_report["seg"]:
        disk, _, extents = row["seg_pe_ranges"].partition(":")
        if row["seg_start"] == "0" and disk in starts:
            first_extent, _, _ = extents.partition("-")
            beginnings[row["lv_name"]] = (
                disk,
                starts[disk] + int(first_extent) * extent_size_bytes,
            )
    return beginnings


def _logical_volume(
    group: str,
    row: Row,
    disks: Mapping[str, set[str]],
    cached_pools: Mapping[str, str],
    ranges: Mapping[str, Sequence[str]],
    stripes: Mapping[str, set[int]],
    thin_segments: Mapping[str, Row],
    images: Mapping[str, tuple[frozenset[str], ...]],
) -> LogicalVolume:
    name, all_tags = row["lv_name"], _words(row["lv_tags"])
    own_tags = tags.decode(all_tags)
    volume = LogicalVolume(
        group=group,
        name=name,
        uuid=row["lv_uuid"],
        size_bytes=int(row["lv_size"]),
        tags=all_tags,
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
        thin_id=_number(thin_segments.get(name), "thin_id"),
        transaction_id=_number(thin_segments.get(name), "transaction_id"),
        stripes=max(stripes[name]) if len(stripes.get(name, ())) == 1 else 0,
        images=images.get(name, ()),
    )
    # Set the cached property, as the tags are decoded here already.
    vars(volume)["own_tags"] = own_tags
    return volume


def _number(row: Row | None, column: str) -> int | None:
    return int(row[column]) if row and row[column] else None


def _overflowed(row: Row) -> bool | None:
    """Whether a snapshot's contents are lost, by the kernel; None for an inactive snapshot."""
    if row["lv_snapshot_invalid"] == "unknown" and _visible(row["origin"]) and not row["pool_lv"]:
        return None
    return row["lv_snapshot_invalid"] == "snapshot invalid"


def _visible(name: str) -> str:
    """The name of a visible volume; empty for a hidden volume, which lvm2 puts in brackets."""
    return "" if name.startswith("[") else name


def _hidden(name: str) -> str:
    """The name of a hidden volume, without its brackets; empty for a visible volume."""
    return name.strip("[]") if name.startswith("[") else ""


def _percent(column: str) -> float | None:
    return float(column) if column else None


def _words(column: str) -> frozenset[str]:
    return frozenset(filter(None, column.split(",")))
