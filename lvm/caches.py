"""Volumes and pools on slow disks with a cache on fast ones (lvmcache(7)): made, mended, parted.

A group's fast disks are those with the tag FAST; nothing but caches lies on them. A cache is a
"cachevol": one linear volume that holds data and metadata of a dm-cache or a dm-writecache. Of a
thin pool the data have one; its metadata lie on slow disks, or the loss of a fast one would lose
the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from lvm import devicemapper, layout, tags
from lvm.devicemapper import Status, WriteCache
from lvm.layout import Reserve
from lvm.lvm2 import Lvm
from lvm.report import Group, LogicalVolume
from lvm.volumes import New

CACHE, WRITECACHE = KINDS = ("cache", "writecache")
WRITETHROUGH, WRITEBACK = MODES = ("writethrough", "writeback")
# lvm2 takes 8 MiB of a small cachevol for metadata.
LEAST_BYTES = 16 << 20

_TENTH = Reserve(percent=10)

# What of a pool has a cache: lvm2 parts a writecache from it by that name only.
_POOL_DATA = "_tdata"

# lvm2 calls a cachevol so, and adds _cvol while it is in use. names.py makes no volume's like it.
_SUFFIX, _HIDDEN = "_cache", "_cvol"


@dataclass(frozen=True)
class Cache:
    """How large a cache is, beside its volume or its pool's group, and what it does with writes."""

    kind: str = CACHE
    mode: str = WRITETHROUGH
    size: Reserve = _TENTH

    def __post_init__(self) -> None:
        if self.kind == WRITECACHE and self.mode != WRITEBACK:
            raise ValueError("a writecache is writeback; there is no other")

    @classmethod
    def parse(cls, tag_value: str) -> Self | None:
        """The cache that `tag_value` gave the text of; None for any other text."""
        kind, mode, size = (tag_value.split(":") + [""] * 3)[:3]
        size_bytes = tags.number(size)
        if kind not in KINDS or mode not in MODES or not size_bytes:
            return None
        if kind == WRITECACHE and mode != WRITEBACK:
            return None
        return cls(kind, mode, Reserve(size_bytes=size_bytes))

    def extents(self, volume_extents: int, extent_size_bytes: int) -> int:
        """The cache of a volume, in whole extents."""
        wish = self.size.of(volume_extents * extent_size_bytes)
        return -(-max(wish, LEAST_BYTES) // extent_size_bytes)

    def of_pool(self, group: Group) -> int:
        """The cache of a pool, in extents: of all that the pool might grow to, the slow disks."""
        return self.extents(group.extents, group.extent_size_bytes)

    def tag_value(self, volume_bytes: int, extent_size_bytes: int) -> str:
        """What is kept of it with a volume."""
        extents = self.extents(volume_bytes // extent_size_bytes, extent_size_bytes)
        return f"{self.kind}:{self.mode}:{extents * extent_size_bytes}"


def maximum_bytes(group: Group, cache: Cache, reserve_extents: int = 0) -> int:
    """The largest volume whose data the slow disks hold and whose cache the fast ones do."""
    extent = group.extent_size_bytes
    least, most = 0, layout.maximum_bytes(group, reserve_extents=reserve_extents) // extent
    while least < most:
        middle = (least + most + 1) // 2
        if cache.extents(middle, extent) <= group.fast_free_extents:
            least = middle
        else:
            most = middle - 1
    return least * extent


def create(lvm: Lvm, group: Group, new: New, cache: Cache) -> None:
    """Make, tag and activate a volume with its cache (lvcreate(8)).

    lvm2 writes its metadata for the volume, then for the cachevol, then for both. It undoes that by
    itself where the cache does not fit; killed in between, it leaves what `attach` makes good.
    Raises NoSpace, NameTaken.
    """
    extents = new.size_bytes // group.extent_size_bytes
    _with_mode(lvm, cache)(
        "lvcreate",
        *("--yes", "--wipesignatures", "y", "--zero", "y", "--type", cache.kind),
        *_on_fast(group, cache.extents(extents, group.extent_size_bytes)),
        *("--size", f"{new.size_bytes}b"),
        *new.words(),
        *("--", group.name, *layout.placement(group, layout.LINEAR)),
    )


def has_room(group: Group, pool: str, cache: Cache) -> bool:
    """Whether a pool has its cache, or can get it: the one that was parted from it, or another."""
    made = group.volumes.get(pool)
    if (made is not None and is_cached(made)) or parted(group, pool):
        return True
    return cache.of_pool(group) <= group.fast_free_extents


def attach(lvm: Lvm, group: Group, name: str, cache: Cache, extents: int) -> None:
    """Give a volume or a pool its cache: the one that was parted from it, or a new one.

    lvm2 writes its metadata for a new one, then for both: killed in between, it leaves a parted
    one. Raises NoSpace.
    """
    found = parted(group, name)
    own = ("--cachevol", found) if found else _on_fast(group, extents)
    path = f"{group.name}/{name}"
    _with_mode(lvm, cache)("lvconvert", "--yes", "--type", cache.kind, *own, "--", path)


def split(lvm: Lvm, volume: LogicalVolume) -> None:
    """Part a volume or a pool from its cache, which is written back first and stays as a volume.

    It must be active.
    """
    part = _POOL_DATA if "pool" in volume.layout else ""
    lvm("lvconvert", "--yes", "--splitcache", "--", f"{volume.group}/{volume.name}{part}")


def clean(lvm: Lvm, volume: LogicalVolume) -> None:
    """Have the kernel write back what only the cache holds, and take in no more (lvmcache(7)).

    The command does not wait for it: `is_clean` tells of its end.
    """
    how = ("--cachepolicy", "cleaner")
    if WRITECACHE in volume.layout:
        how = ("--cachesettings", "cleaner=1")
    lvm("lvchange", "--yes", *how, "--", f"{volume.group}/{volume.name}")


def is_clean(status: Sequence[Status]) -> bool:
    """Whether device-mapper says of a volume that its cache holds nothing alone."""
    return not any(
        (isinstance(one, devicemapper.Cache) and one.dirty_blocks)
        or (isinstance(one, WriteCache) and not one.error and one.free_blocks < one.blocks)
        for one in status
    )


def can_be_origin(volume: LogicalVolume) -> bool:
    """Whether a copy-on-write snapshot can be taken of a volume, by the cache that it has now.

    Not with a dm-cache. Below a snapshot's origin lvm2 2.03.16 gives the two parts of its cachevol
    tables twice as long as they are, and so overlapping: what is read changes from read to read. It
    stops before that only because it has cache_check(8) look at metadata that are in use.
    """
    return CACHE not in volume.layout


def is_cached(volume: LogicalVolume) -> bool:
    """Whether the volume, or the pool, has a cache now.

    What is done to data goes by this alone: a tag says what was wanted, and an operator may have
    attached a cache, or taken it away (lvconvert(8)).
    """
    return not volume.layout.isdisjoint(KINDS)


def attached(volume: LogicalVolume) -> str:
    """The name that the cache has once it is parted; empty where there is none.

    Also for a cache pool, as only others make: its parts cannot be overwritten.
    """
    is_one = volume.cachevol.endswith(_HIDDEN)
    return volume.cachevol.removesuffix(_HIDDEN) if is_one else ""


def parted(group: Group, name: str) -> str:
    """The cache that was parted from it, or never joined with it; empty for none.

    lvm2 does not record what it was parted from, so the name tells, and all else must agree: it is
    linear, without tags, and lies on fast disks alone. A thin volume lies on none.
    """
    found = group.volumes.get(name + _SUFFIX)
    fast = {disk.uuid for disk in group.disks if disk.fast}
    if found is None or found.tags or found.layout != {"linear"} or found.origin:
        return ""
    return found.name if found.disks and found.disks <= fast else ""


def _with_mode(lvm: Lvm, cache: Cache) -> Lvm:
    if cache.kind != CACHE:
        return lvm
    # lvm2 2.03.16 refuses --cachemode together with --cachedevice.
    return replace(lvm, settings=(*lvm.settings, f'allocation/cache_mode="{cache.mode}"'))


def _on_fast(group: Group, extents: int) -> Sequence[str]:
    usable = (disk for disk in group.disks if disk.fast and not disk.unclean)
    disks = [disk.name for disk in usable if disk.unallocated_extents]
    named = [word for disk in disks for word in ("--cachedevice", disk)]
    return (*named, "--cachesize", f"{extents * group.extent_size_bytes}b")
