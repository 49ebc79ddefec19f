"""How volumes are cut from a group: thick, or thin out of a pool. Each class does it in one way.

Both say how much there is by the arithmetic that they make and grow volumes by. What a pool
promised and has not got yet is kept free by all others of its group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from agent.core import ids, tag
from agent.core.classes import DeviceClass
from agent.core.inventory import Inventory
from agent.core.records import Volume
from lvm import caches, groups, layout, names, report, tags, thin, volumes
from lvm import thin as pools
from lvm.caches import Cache
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.thin import Policy, Pool
from lvm.volumes import New

# Extents of a group that are not to be taken.
Kept = Callable[[report.Group], int]


def pool_name(device_class: str) -> str:
    """The logical volume's name of a class's pool."""
    return names.logical_volume(ids.POOL_PREFIX, device_class)


def wipe_name(device_class: str) -> str:
    """The name of the volume that a class's pool is overwritten through."""
    return names.logical_volume(ids.WIPE_PREFIX, device_class)


def is_own_pool(pool: report.LogicalVolume) -> bool:
    """Whether Carver made it, as its tags and its layout tell: its name alone proves nothing."""
    return _is_told_as_pool(pool) and {"thin", "pool"} <= pool.layout


def is_half_made_pool(pool: report.LogicalVolume) -> bool:
    """Whether it is what Carver had lvm2 make a pool, over which lvm2 died.

    It has all the tags of a pool of Carver's, which lvm2 commits before it is one, and nobody ever
    had it.
    """
    is_ready = tags.decode(pool.tags).get(tag.STATE) == tag.READY
    return is_ready and _is_told_as_pool(pool) and pool.layout == {"linear"}


def _is_told_as_pool(pool: report.LogicalVolume) -> bool:
    """Whether the tags say that it is a pool of Carver's, and its name is that one's."""
    own_tags = tags.decode(pool.tags)
    made_for = pool_name(own_tags.get(tag.CLASS, ""))
    return pool.name == made_for and own_tags.get(tag.CHUNK, "").isdigit()


def closed(group: report.Group) -> str:
    """Why nothing is made or extended in a group now, whatever is free; empty where it is.

    lvm2 changes nothing of the kind while a disk is missing ("Cannot change VG while PVs are
    missing"), also on the disks that are there.
    """
    if not group.missing_disks:
        usable = [disk for disk in group.disks if disk.allocatable and not disk.fast]
        is_unclean = bool(usable) and all(disk.unclean for disk in usable)
        return "while what is free in it is being overwritten" * is_unclean
    gone = ", ".join(group.missing_uuids)
    return f"while its disk {gone} is missing; see `A disk is replaced` in docs/operations.md"


def closed_to_new(group: report.Group) -> str:
    """Why nothing new is made in a group, and nothing grows by request; empty where it is.

    What fills up by itself is extended all the same: a writer waits for that.
    """
    if not (why := closed(group)) and groups.is_text_full(group):
        return (
            f"while its metadata area is {groups.text_percent(group):.0f} % full; delete volumes or"
            " snapshots, or see `A group's metadata area is full` in docs/operations.md"
        )
    return why


class Allocator(Protocol):
    """One way to take volumes from a group. Sizes are in bytes and whole extents."""

    def maximum_bytes(self, group: report.Group) -> int:
        """The largest volume that can be made now; one extent more cannot. Raises PoolSilent."""
        ...

    def maximum_growth_bytes(self, volume: Volume) -> int:
        """By how much a volume can grow. Raises PoolSilent."""
        ...

    def purpose(self, group: report.Group) -> str:
        """What room is asked for, for the error that there is too little. Raises PoolSilent."""
        ...

    def create(self, lvm: Lvm, group: report.Group, new: New) -> None:
        """Make, tag and activate a volume; the group's lock is held, the report read within."""
        ...

    def extend(self, lvm: Lvm, volume: Volume, size_bytes: int) -> None:
        """Grow a volume, as `create` makes one."""
        ...

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """Make good what a `create` left that was killed."""
        ...


@dataclass(frozen=True)
class Thick:
    """Volumes that have all their extents from the start."""

    layout: Layout
    kept: Kept

    def maximum_bytes(self, group: report.Group) -> int:
        """The largest volume that can be made now; one extent more cannot."""
        if closed_to_new(group):
            return 0
        return layout.maximum_bytes(group, self.layout, self.kept(group))

    def maximum_growth_bytes(self, volume: Volume) -> int:
        """By how much a volume can grow, on its disks."""
        group, logical = volume.group, volume.group.volume(volume.name)
        if closed_to_new(group):
            return 0
        return layout.maximum_growth_bytes(group, logical, self.layout, self.kept(group))

    def purpose(self, group: report.Group) -> str:
        """The layout, and the disks it needs."""
        if why := closed_to_new(group):
            return why
        disks = sum(1 for disk in group.disks if disk.free_extents)
        unclean = ", ".join(disk.name for disk in group.disks if disk.unclean)
        beside = f" ({unclean} is overwritten first where it is free)" if unclean else ""
        return f"for {self.layout.kind} on {self.layout.disks} of {disks} disks with room{beside}"

    def create(self, lvm: Lvm, group: report.Group, new: New) -> None:
        """One command."""
        disks = layout.placement(group, self.layout)
        volumes.create(lvm, group.name, new, layout=self.layout, disks=disks)

    def extend(self, lvm: Lvm, volume: Volume, size_bytes: int) -> None:
        """One command, on the volume's disks."""
        group = volume.group
        disks = layout.growth_placement(group, group.volume(volume.name), self.layout)
        volumes.extend(lvm, group.name, volume.name, size_bytes=size_bytes, disks=disks)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """There is nothing half-made: a volume is there, or it is not."""


@dataclass(frozen=True)
class Cached(Thick):
    """Volumes on the slow disks of their group, with a cache on its fast ones."""

    cache: Cache

    def maximum_bytes(self, group: report.Group) -> int:
        """The largest volume that slow and fast disks have room for."""
        if closed_to_new(group):
            return 0
        return caches.maximum_bytes(group, self.cache, self.kept(group))

    def purpose(self, group: report.Group) -> str:
        """The tier that is beside the data's."""
        if why := closed_to_new(group):
            return why
        fast = group.fast_free_extents * group.extent_size_bytes
        return f"for linear with a {self.cache.kind} on fast disks, which have {fast} bytes free,"

    def create(self, lvm: Lvm, group: report.Group, new: New) -> None:
        """One command."""
        caches.create(lvm, group, new, self.cache)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """A volume without its cache gets it; one with snapshots was in use without it."""
        logical = volume.group.volume(volume.name)
        if not caches.is_cached(logical) and not volume.group.copy_on_write_of(volume.name):
            extent = volume.group.extent_size_bytes
            extents = self.cache.extents(logical.size_bytes // extent, extent)
            caches.attach(lvm, volume.group, volume.name, self.cache, extents)


@dataclass(frozen=True)
class Thin:
    """Volumes that take from their class's pool what is written to them."""

    device_class: str
    group: str
    policy: Policy
    kept: Kept
    known: Inventory

    def pool(self, group: report.Group) -> Pool:
        """The class's pool as it is, or as it will be made."""
        name = pool_name(self.device_class)
        made = group.volumes.get(name)
        if made is None or not is_own_pool(made):
            return Pool(name, pools.chunk_size_bytes(group, self.policy))
        chunk = int(tags.decode(made.tags)[tag.CHUNK])
        return pools.find(group, name, chunk, wipe_name(self.device_class))

    def outstanding_extents(self, group: report.Group) -> int:
        """What the pool promised and has not got yet."""
        return pools.outstanding_extents(group, self.pool(group), self.policy)

    def maximum_bytes(self, group: report.Group) -> int:
        """What may still be promised; nothing while the pool is too full to grow out of it."""
        if self._refusal(group):
            return 0
        return pools.maximum_bytes(group, self.pool(group), self.policy, self.kept(group))

    def maximum_growth_bytes(self, volume: Volume) -> int:
        """The same: a larger volume is a larger promise."""
        return self.maximum_bytes(volume.group)

    def purpose(self, group: report.Group) -> str:
        """The pool, and what is wrong with it."""
        why = self._refusal(group)
        times = f"{self.policy.over_provisioning:g} times what the pool can grow to"
        return f"for thin volumes: {why or times}"

    def create(self, lvm: Lvm, group: report.Group, new: New) -> None:
        """One command, and one more for a pool that is not made yet."""
        pool = self.pool(group)
        self._ensure_made(lvm, group, pool)
        thin.create(lvm, group.name, pool.name, new)

    def extend(self, lvm: Lvm, volume: Volume, size_bytes: int) -> None:
        """One command; the pool grows when it is used."""
        volumes.extend(lvm, volume.group.name, volume.name, size_bytes=size_bytes)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """There is nothing half-made: a pool without volumes is made use of."""

    def extend_data(self, lvm: Lvm, group: report.Group, percent: float) -> int | None:
        """Grow the data of a pool that is so full; by how many bytes, 0 where there is no room.

        One that holds nothing is full because it is overwritten, to be removed: None.
        """
        pool, extent = self.pool(group), group.extent_size_bytes
        if not pool.promised_bytes:
            return None
        room = 0 if closed(group) else pools.growth_extents(group, pool, self.kept(group))
        more = min(room, pools.wanted_extents(pool.data_extents, percent, self.policy))
        if more:
            size = (pool.data_extents + more) * extent
            disks = layout.anywhere(group)
            volumes.extend(lvm, group.name, pool.name, size_bytes=size, disks=disks)
        return more * extent

    def extend_metadata(self, lvm: Lvm, group: report.Group, percent: float) -> int | None:
        """The same for the pool's metadata."""
        pool, extent = self.pool(group), group.extent_size_bytes
        if not pool.promised_bytes:
            return None
        growth = pools.metadata_growth_extents(group, pool, self.kept(group))
        room = 0 if closed(group) else growth
        more = min(room, pools.wanted_extents(pool.metadata_extents, percent, self.policy))
        if more:
            disks = layout.anywhere(group)
            thin.extend_metadata(lvm, group.name, pool.name, by_bytes=more * extent, disks=disks)
        return more * extent

    def _ensure_made(self, lvm: Lvm, group: report.Group, pool: Pool) -> None:
        if pool.data_extents:
            return
        made = group.volumes.get(pool.name)
        if made is not None and is_half_made_pool(made):
            volumes.remove(lvm, group.name, pool.name)
        thin.create_pool(
            lvm,
            group.name,
            pool.name,
            data_extents=pools.first_extents(group, pool, self.policy, self.kept(group)),
            metadata_extents=pools.suitable_metadata_extents(group, pool.chunk_size_bytes),
            extent_size_bytes=group.extent_size_bytes,
            chunk_size_bytes=pool.chunk_size_bytes,
            own_tags={
                tag.STATE: tag.READY,
                tag.CLASS: self.device_class,
                tag.CHUNK: str(pool.chunk_size_bytes),
                **self._about_cache(group),
            },
            disks=layout.anywhere(group),
        )

    def _about_cache(self, _group: report.Group) -> Mapping[str, str]:
        """What is kept of a pool's cache."""
        return {}

    def _refusal(self, group: report.Group) -> str:
        if why := closed_to_new(group):
            return why
        pool = self.pool(group)
        made = group.volumes.get(pool.name)
        if made is not None and not (is_own_pool(made) or is_half_made_pool(made)):
            return (
                f"{group.name}/{pool.name} is there and is no pool of Carver's, or lost a tag that"
                f" says so (see `lvs -o +tags`); if it is yours, rename it (`lvrename`)"
            )
        status = self.known.pool_status(group.name, pool.name)
        return pools.refusal(group, pool, self.policy, self.kept(group), status)


@dataclass(frozen=True)
class CachedThin(Thin):
    """Thin volumes out of a pool on slow disks whose data have a cache on fast ones.

    The pool is made first, then its cache, then a volume in it: killed in between, the pool is
    empty, and the next call gives it what it lacks, or the next start takes it away.
    """

    cache: Cache

    def maximum_bytes(self, group: report.Group) -> int:
        """What the pool may still promise; nothing while it has no cache and no room for one."""
        if not caches.has_room(group, pool_name(self.device_class), self.cache):
            return 0
        return super().maximum_bytes(group)

    def purpose(self, group: report.Group) -> str:
        """The pool, and its cache where that is what has no room."""
        if closed_to_new(group) or caches.has_room(group, pool_name(self.device_class), self.cache):
            return super().purpose(group)
        wanted, free = self.cache.of_pool(group), group.fast_free_extents
        return (
            f"for thin volumes: the {self.cache.kind} of their pool takes"
            f" {wanted * group.extent_size_bytes} bytes of fast disks, which have"
            f" {free * group.extent_size_bytes} bytes free;"
        )

    def _ensure_made(self, lvm: Lvm, group: report.Group, pool: Pool) -> None:
        super()._ensure_made(lvm, group, pool)
        made = group.volumes.get(pool.name)
        if made is not None and caches.is_cached(made):
            return
        if made is not None:
            self._tell_of_cache(lvm, group, made)
        caches.attach(lvm, group, pool.name, self.cache, self.cache.of_pool(group))

    def _tell_of_cache(self, lvm: Lvm, group: report.Group, made: report.LogicalVolume) -> None:
        """A pool that had none, or another, has the tags of the one that it gets."""
        own_tags, wanted = tags.decode(made.tags), self._about_cache(group)
        old = {key: own_tags[key] for key in wanted if key in own_tags}
        if old != wanted:
            volumes.mark(lvm, group.name, made.name, old=old, new=wanted)

    def _about_cache(self, group: report.Group) -> Mapping[str, str]:
        extent = group.extent_size_bytes
        return {tag.CACHE: self.cache.tag_value(group.extents * extent, extent)}


class Allocators:
    """The way of each class."""

    def __init__(self, classes: Sequence[DeviceClass], known: Inventory) -> None:
        self._classes = classes
        self._inventory = known

    def of(self, one: DeviceClass) -> Allocator:
        """How volumes of a class are made."""
        kept = partial(self._kept, one)
        match one.pool, one.cache:
            case None, None:
                return Thick(one.layout, kept)
            case None, Cache() as cache:
                return Cached(one.layout, kept, cache)
            case Policy() as policy, None:
                return self._thin(one, policy)
            case Policy() as policy, Cache() as cache:
                return CachedThin(one.name, one.group, policy, kept, self._inventory, cache)
        raise AssertionError(one)  # pragma: no cover - there is no other class

    def of_volume(self, volume: Volume) -> Allocator:
        """How a volume was made, by the rules of its class; one that is gone had no rules."""
        shape = volume.layout
        for one in self._classes:
            if (
                one.name == volume.own_tags.get(tag.CLASS)
                and (one.pool is not None) == shape.is_thin
            ):
                # Its data grow, on slow disks; its cache does not.
                return self.of(replace(one, layout=shape, cache=None))
        policy = Policy() if shape.is_thin else None
        gone = volume.own_tags.get(tag.CLASS, "")
        return self.of(DeviceClass(gone, volume.group.name, layout=shape, pool=policy))

    def _thin(self, one: DeviceClass, policy: Policy) -> Thin:
        kept = partial(self._kept, one)
        return Thin(one.name, one.group, policy, kept, self._inventory)

    def thin(self, group: str = "") -> list[Thin]:
        """The classes that have a pool, in one group or in any."""
        found = (one for one in self._classes if group in ("", one.group))
        return [self._thin(one, one.pool) for one in found if one.pool is not None]

    def beside_bytes(self, volume: Volume) -> int:
        """What its group has for snapshots of a volume, beside the reserve and all promises."""
        group = volume.group
        if closed(group):
            return 0
        kept = self._promised(group)
        for one in self._classes:
            if one.name == volume.own_tags.get(tag.CLASS):
                kept += one.reserve.extents(group)
        return layout.maximum_bytes(group, reserve_extents=kept)

    def promised_extents(self, group: report.Group) -> int:
        """What the pools of a group promised and have not got yet."""
        return self._promised(group)

    def _kept(self, one: DeviceClass, group: report.Group) -> int:
        """What a class leaves free: its reserve, and what the pools of others promised."""
        return one.reserve.extents(group) + self._promised(group, but=one.name)

    def _promised(self, group: report.Group, but: str = "") -> int:
        """What pools promised and have not got yet."""
        others = (one for one in self.thin(group.name) if one.device_class != but)
        return sum(one.outstanding_extents(group) for one in others)
