"""Caches on fast disks for volumes and thin pools on slow disks (lvmcache(7)): attach and detach.

The fast disks of a volume group have the tag FAST, and nothing but caches lies on them. A cache is
a "cachevol": a linear volume with both data and metadata of a dm-cache or dm-writecache. A thin
pool's cache is below the pool's data. The pool's metadata have no cache: if they had one, the loss
of a fast disk would lose the pool.

A cachevol that is detached ("parted" below) is a visible volume. It is attached again, or removed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from lvm import devicemapper, layout, tags
from lvm.devicemapper import Status, WriteCache
from lvm.layout import Reserve
from lvm.lvm2 import Lvm
from lvm.report import Group, LogicalVolume
from lvm.room import Room
from lvm.volumes import New

# Kinds of caches: dm-cache, which speeds up reads and writes, and dm-writecache for writes alone.
CACHE, WRITECACHE = KINDS = ("cache", "writecache")
# Modes of a cache: a write ends once it is on the slow disk, or once it is in the cache.
WRITETHROUGH, WRITEBACK = MODES = ("writethrough", "writeback")
# Smallest size of a cache, in bytes. lvm2 takes 8 MiB of that for the cache's metadata.
LEAST_BYTES = 16 << 20

# Default size of a cache: a tenth of the size of the cached volume.
_TENTH = Reserve(percent=10)

# Suffix of the hidden volume with a pool's data. lvconvert(8) detaches the cache of a thin pool by
# the name of that hidden volume.
_POOL_DATA = "_tdata"

# Suffixes of a cachevol's name. The first follows the name of the cachevol's volume or thin pool;
# the second follows the first while the cachevol is attached. names.py gives no other volume such a
# name.
_SUFFIX, _HIDDEN = "_cache", "_cvol"


@dataclass(frozen=True)
class Cache:
    """The kind, mode and size of a cache.

    A size in percent is a share of the volume's size; for a thin pool, of all slow disks of the
    volume group.
    """

    kind: str = CACHE
    mode: str = WRITETHROUGH
    size: Reserve = _TENTH

    def __post_init__(self) -> None:
        if self.kind == WRITECACHE and self.mode != WRITEBACK:
            raise ValueError("a writecache is writeback; there is no other")

    @classmethod
    def parse(cls, tag_value: str) -> Self | None:
        """Parse the text of a tag that `tag_value` made; None for any other text."""
        kind, mode, size = (tag_value.split(":") + [""] * 3)[:3]
        size_bytes = tags.number(size)
        if kind not in KINDS or mode not in MODES or not size_bytes:
            return None
        if kind == WRITECACHE and mode != WRITEBACK:
            return None
        return cls(kind, mode, Reserve(size_bytes=size_bytes))

    def extents(self, volume_extents: int, extent_size_bytes: int) -> int:
        """The size of the cache of a volume with `volume_extents`, in extents."""
        wished_bytes = self.size.of(volume_extents * extent_size_bytes)
        return -(-max(wished_bytes, LEAST_BYTES) // extent_size_bytes)

    def of_pool(self, group: Group) -> int:
        """The size of a thin pool's cache, in extents.

        The size is calculated for a pool on all slow disks, as the pool may grow to that size.
        """
        return self.extents(Room(group).planned_extents, group.extent_size_bytes)

    def tag_value(self, volume_bytes: int, extent_size_bytes: int) -> str:
        """The value of the tag that records a volume's cache: kind, mode, and size in bytes."""
        extents = self.extents(volume_bytes // extent_size_bytes, extent_size_bytes)
        return f"{self.kind}:{self.mode}:{extents * extent_size_bytes}"


def maximum_bytes(room: Room, cache: Cache) -> int:
    """The size of the largest cached volume that can be created now, in bytes.

    The volume needs free extents on the slow disks, and its cache on the fast disks.
    """
    extent = room.group.extent_size_bytes
    smallest, largest = 0, layout.maximum_bytes(room) // extent
    while smallest < largest:
        middle = (smallest + largest + 1) // 2
        if cache.extents(middle, extent) <= room.fast_extents:
            smallest = middle
        else:
            largest = middle - 1
    return smallest * extent


def create(lvm: Lvm, group: Group, volume: New, cache: Cache) -> None:
    """Make, tag and activate a volume with a cache (lvcreate(8)).

    Raises NoSpace if volume or cache does not fit, NameTaken if the volume exists.

    lvm2 commits three times: the volume, the cachevol, and the attachment of both. Where the cache
    does not fit, lvm2 removes the volume again. A killed lvm2 leaves a volume, perhaps with a
    detached cachevol; `attach` completes either.
    """
    extents = volume.size_bytes // group.extent_size_bytes
    _with_mode(lvm, cache)(
        "lvcreate",
        *("--yes", "--wipesignatures", "y", "--zero", "y", "--type", cache.kind),
        *_on_fast(group, cache.extents(extents, group.extent_size_bytes)),
        *("--size", f"{volume.size_bytes}b"),
        *volume.words(),
        *("--", group.name, *Room(group).disk_arguments()),
    )


def has_room(group: Group, pool: str, cache: Cache) -> bool:
    """Whether a thin pool has a cache, or can get one.

    A new cache is the pool's detached cachevol, or a new cachevol on free extents of fast disks.
    """
    pool_volume = group.volumes.get(pool)
    if (pool_volume is not None and is_cached(pool_volume)) or detached_cachevol(group, pool):
        return True
    return cache.of_pool(group) <= Room(group).fast_extents


def attach(lvm: Lvm, group: Group, name: str, cache: Cache, extents: int) -> None:
    """Attach a cache to a volume or thin pool (lvconvert(8)).

    The cache is the volume's detached cachevol, if there is one, else a new cachevol of `extents`.
    lvm2 commits a new cachevol, and then its attachment: a killed lvm2 leaves a detached cachevol.
    Raises NoSpace if a new cachevol does not fit.
    """
    cachevol = detached_cachevol(group, name)
    cachevol_words = ("--cachevol", cachevol) if cachevol else _on_fast(group, extents)
    path = f"{group.name}/{name}"
    _with_mode(lvm, cache)("lvconvert", "--yes", "--type", cache.kind, *cachevol_words, "--", path)


def split(lvm: Lvm, volume: LogicalVolume) -> None:
    """Detach the cache of an active volume or thin pool (lvconvert(8)); the cachevol stays.

    lvm2 first writes back the data that are only in the cache.
    """
    part = _POOL_DATA if "pool" in volume.layout else ""
    lvm("lvconvert", "--yes", "--splitcache", "--", f"{volume.group}/{volume.name}{part}")


def clean(lvm: Lvm, volume: LogicalVolume) -> None:
    """Start to write back all data that only the cache of a volume has (lvmcache(7)).

    From then on the cache takes no further writes. The command does not wait: `is_clean` says
    when the writeback has ended.
    """
    policy_words = ("--cachepolicy", "cleaner")
    if WRITECACHE in volume.layout:
        policy_words = ("--cachesettings", "cleaner=1")
    lvm("lvchange", "--yes", *policy_words, "--", f"{volume.group}/{volume.name}")


def is_clean(status: Sequence[Status]) -> bool:
    """Whether a volume's device-mapper status shows that its cache has written back all data."""
    return not any(
        (isinstance(device, devicemapper.Cache) and device.dirty_blocks)
        or (
            isinstance(device, WriteCache)
            and not device.error
            and device.free_blocks < device.blocks
        )
        for device in status
    )


def can_be_origin(volume: LogicalVolume) -> bool:
    """Whether copy-on-write snapshots of a volume are allowed with its present cache.

    With a dm-cache they are not. Below the origin of a snapshot lvm2 2.03.16 loads tables of twice
    the right length for the two parts of a cachevol. The parts overlap, and repeated reads give
    different data. lvm2 usually fails before, as it runs cache_check(8) on metadata in use.
    """
    return CACHE not in volume.layout


def is_cached(volume: LogicalVolume) -> bool:
    """Whether a volume or thin pool has a cache now, by lvm2's report.

    Operations on data depend on this alone, and not on the tag. The tag says which cache was
    requested, and an operator may have attached or detached a cache since (lvconvert(8)).
    """
    return not volume.layout.isdisjoint(KINDS)


def attached(volume: LogicalVolume) -> str:
    """The name that a volume's attached cachevol gets when it is detached; empty for no cachevol.

    Empty also for a cache pool, which only operators make: the parts of a cache pool cannot be
    overwritten.
    """
    is_cachevol = volume.cachevol.endswith(_HIDDEN)
    return volume.cachevol.removesuffix(_HIDDEN) if is_cachevol else ""


def detached_cachevol(group: Group, name: str) -> str:
    """The name of the detached cachevol of a volume or thin pool; empty for none.

    lvm2 does not record to which volume a detached cachevol belonged. So the name decides, and the
    rest must agree: a linear volume, without tags, on fast disks alone.
    """
    cachevol = group.volumes.get(name + _SUFFIX)
    fast = {disk.uuid for disk in group.disks if disk.fast}
    if cachevol is None or cachevol.tags or cachevol.layout != {"linear"} or cachevol.origin:
        return ""
    return cachevol.name if cachevol.disks and cachevol.disks <= fast else ""


def _with_mode(lvm: Lvm, cache: Cache) -> Lvm:
    if cache.kind != CACHE:
        return lvm
    # lvm2 2.03.16 refuses --cachemode together with --cachedevice.
    return replace(lvm, settings=(*lvm.settings, f'allocation/cache_mode="{cache.mode}"'))


def _on_fast(group: Group, extents: int) -> Sequence[str]:
    room = Room(group)
    disks = room.names(disk for disk in room.fast if disk.unallocated_extents)
    device_words = [word for disk in disks for word in ("--cachedevice", disk)]
    return (*device_words, "--cachesize", f"{extents * group.extent_size_bytes}b")
