"""Allocate volumes from a group: thick, or thin from a pool, each with or without a cache.

Capacity is computed as volumes are created and extended. The extents that a pool has promised and
not yet got stay free.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from agent.core import errors, ids, tag
from agent.settings.classes import DeviceClass
from agent.settings.configuration import Configuration
from agent.volumes import records, volume_states
from agent.volumes.activator import Activator
from agent.volumes.records import Volume
from agent.volumes.volume_states import Ender
from lvm import caches, groups, layout, names, report, tags, thin, volumes
from lvm import thin as pools
from lvm.caches import Cache
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.room import Room
from lvm.thin import Policy, Pool
from lvm.volumes import New

# The number of a group's extents that must stay free.
Kept = Callable[[report.Group], int]


def pool_name(device_class: str) -> str:
    """The logical volume's name of a class's pool."""
    return names.logical_volume(ids.POOL_PREFIX, device_class)


def wipe_name(device_class: str) -> str:
    """The name of the thin volume that fills a class's pool to zero it."""
    return names.logical_volume(ids.WIPE_PREFIX, device_class)


def is_own_pool(pool: report.LogicalVolume) -> bool:
    """Whether Carver made the pool, by its tags and layout; a name alone proves nothing."""
    return _is_tagged_as_pool(pool) and {"thin", "pool"} <= pool.layout


def is_half_made_pool(pool: report.LogicalVolume) -> bool:
    """Whether lvm2 died while creating this pool.

    lvm2 commits it with its tags as a linear volume first; it has no data.
    """
    is_ready = volume_states.is_recorded(pool.own_tags, Ender.CALLER)
    return is_ready and _is_tagged_as_pool(pool) and pool.layout == {"linear"}


def _is_tagged_as_pool(pool: report.LogicalVolume) -> bool:
    """Whether it has the tags of a pool of Carver's, and the name that they imply."""
    is_usable = bool(chunk_bytes(pool)) and not records.unknown_needs(pool)
    # By the size of its chunks it is zeroed, and none is chosen of two.
    is_usable = is_usable and not records.faults(pool)
    return is_usable and pool.name == pool_name(pool.own_tags.get(tag.CLASS, ""))


def is_pool(pool: report.LogicalVolume) -> bool:
    """Whether Carver made the pool, be some of its tags lost, changed or not understood.

    What its volumes were promised is theirs in any case, and it grows, since their writers wait for
    that. New volumes are made only in what `is_own_pool` finds.
    """
    is_called_so = names.is_of(ids.POOL_PREFIX, pool.name) and bool(pool.own_tags)
    return is_called_so and {"thin", "pool"} <= pool.layout


def chunk_bytes(pool: report.LogicalVolume) -> int:
    """The bytes of a pool's chunks by its tag; 0 for what lvm2 makes no chunks of (lvmthin(7))."""
    found = tags.number(pool.own_tags.get(tag.CHUNK, "")) or 0
    is_one = pools.LEAST_CHUNK_BYTES <= found <= pools.MOST_CHUNK_BYTES
    return found if is_one and not found % pools.LEAST_CHUNK_BYTES else 0


def closed(room: Room) -> str:
    """Why nothing can be created or extended in a group now; empty if it can.

    lvm2 refuses both while a disk is missing ("Cannot change VG while PVs are
    missing"), also on the disks that are there.
    """
    if not room.group.missing_disks:
        is_closed = room.is_unclean and not room.takes_unclean
        return "while what is free in it is being overwritten" * is_closed
    gone = ", ".join(room.group.missing_uuids)
    return f"while its disk {gone} is missing; see `A disk is replaced` in docs/operations.md"


def closed_to_new(group: report.Group) -> str:
    """Why no volume can be created, or expanded by request; empty if it can.

    Pools and COW stores are extended all the same, since writers wait for that.
    """
    if not (why := closed(Room(group))) and groups.is_text_full(group):
        return (
            f"while {groups.about_area(group)} is {groups.text_percent(group):.0f} % full; see"
            " `A group's metadata area is full` in docs/operations.md"
        )
    return why


def full(group: report.Group, added: int = 1) -> str:
    """Why so many logical volumes cannot be added to a group, be there room; empty if they can."""
    if group.may_add(added):
        return ""
    return (
        f"while it has {len(group.volumes)} logical volumes, of {group.most_volumes} that it may"
        f" have by its max_lv, and this takes {added} more; lift that limit by `vgchange"
        f" --logicalvolume 0 {group.name}`"
    )


def _of_policy(group: report.Group) -> str:
    """What a group's allocation policy takes from the room; empty where it takes nothing."""
    if not group.keeps_to_one_disk:
        return ""
    piece = "in one piece" if group.policy == report.CONTIGUOUS else "on one disk"
    return (
        f" ({piece}, by the group's allocation policy {group.policy}; `vgchange --alloc normal"
        f" {group.name}` changes it)"
    )


@dataclass(frozen=True)
class Thick:
    """Volumes that have all their extents from the start.

    Sizes are in bytes, of whole extents. A group's lock is held for `create` and `extend`, and its
    report was read under it. `finish` completes a volume whose `create` was killed.
    """

    layout: Layout
    kept: Kept

    def maximum_bytes(self, group: report.Group) -> int:
        """The size of the largest volume that can be created now."""
        if closed_to_new(group) or self.full(group):
            return 0
        return layout.maximum_bytes(self.room(group), self.layout)

    def room(self, group: report.Group) -> Room:
        """What the class may have of a group."""
        return Room(group, self.kept(group))

    def full(self, group: report.Group, beside: int = 0) -> str:
        """Why the group may not have another volume, and so many logical volumes beside it.

        Empty if it may.
        """
        return full(group, 1 + beside)

    def maximum_growth_bytes(self, volume: Volume) -> int:
        """The bytes that a volume can grow by, on its disks."""
        group, logical = volume.group, volume.group.volume(volume.name)
        if closed_to_new(group):
            return 0
        return layout.maximum_growth_bytes(self.room(group), logical, self.layout)

    def purpose(self, group: report.Group) -> str:
        """The layout, and the disks it needs."""
        if why := closed_to_new(group):
            return why
        room = self.room(group)
        disks = sum(1 for disk in room.slow if room.free_on(disk))
        unclean = ", ".join(disk.name for disk in group.disks if disk.unclean)
        beside = f" ({unclean} is overwritten first where it is free)" if unclean else ""
        what = f"for {self.layout.kind} on {self.layout.disks} of {disks} disks with room{beside}"
        return f"{what}{_of_policy(group)}"

    def create(self, lvm: Lvm, group: report.Group, new: New) -> None:
        """One command."""
        disks = layout.placement(Room(group), self.layout)
        volumes.create(lvm, group.name, new, layout=self.layout, disks=disks)

    def extend(self, lvm: Lvm, volume: Volume, size_bytes: int) -> None:
        """One command, on the volume's disks."""
        group = volume.group
        disks = layout.growth_placement(Room(group), group.volume(volume.name), self.layout)
        volumes.extend(lvm, group.name, volume.name, size_bytes=size_bytes, disks=disks)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """Do nothing: one command creates all of a volume."""

    def make_room(self, lvm: Lvm, group: report.Group) -> None:
        """Do nothing: a volume has all its extents."""


@dataclass(frozen=True)
class Cached(Thick):
    """Volumes on the slow disks of their group, with a cache on its fast ones."""

    cache: Cache

    def maximum_bytes(self, group: report.Group) -> int:
        """The size of the largest volume that slow and fast disks have room for."""
        if closed_to_new(group) or self.full(group):
            return 0
        return caches.maximum_bytes(self.room(group), self.cache)

    def full(self, group: report.Group, beside: int = 0) -> str:
        """Why the group may not have another volume and its cache, which is one until they join."""
        return full(group, 2 + beside)

    def purpose(self, group: report.Group) -> str:
        """The cache, and the room of fast disks."""
        if why := closed_to_new(group):
            return why
        fast = Room(group).fast_extents * group.extent_size_bytes
        return f"for linear with a {self.cache.kind} on fast disks, which have {fast} bytes free,"

    def create(self, lvm: Lvm, group: report.Group, new: New) -> None:
        """One command."""
        caches.create(lvm, group, new, self.cache)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """Attach the cache if it is missing; not with snapshots, with which it was in use."""
        logical = volume.group.volume(volume.name)
        if not caches.is_cached(logical) and not volume.group.copy_on_write_of(volume.name):
            extent = volume.group.extent_size_bytes
            extents = self.cache.extents(logical.size_bytes // extent, extent)
            caches.attach(lvm, volume.group, volume.name, self.cache, extents)


@dataclass(frozen=True)
class Thin:
    """Volumes that allocate from their class's pool when they are written to.

    Has all that `Thick` has. What needs the pool's status raises PoolSilent.
    """

    device_class: str
    group: str
    policy: Policy
    kept: Kept
    activator: Activator

    def pool(self, group: report.Group) -> Pool:
        """The class's pool as it is, or as it will be created."""
        name = pool_name(self.device_class)
        made = group.volumes.get(name)
        if made is None or not is_pool(made):
            return Pool(name, pools.chunk_size_bytes(group, self.policy))
        chunk = chunk_bytes(made) or pools.chunk_size_bytes(group, self.policy)
        return pools.find(group, name, chunk, wipe_name(self.device_class))

    def outstanding_extents(self, group: report.Group) -> int:
        """The extents that the pool has promised and not yet got."""
        return pools.outstanding_extents(group, self.pool(group), self.policy)

    def maximum_bytes(self, group: report.Group) -> int:
        """The bytes that may still be promised; 0 while the pool is too full."""
        return 0 if self.full(group) else self._maximum_bytes(group)

    def full(self, group: report.Group, beside: int = 0) -> str:
        """Why the group may not have another volume, and its pool if that is missing."""
        return full(group, beside + (1 if pool_name(self.device_class) in group.volumes else 2))

    def maximum_growth_bytes(self, volume: Volume) -> int:
        """The bytes that may still be promised."""
        return self._maximum_bytes(volume.group)

    def _maximum_bytes(self, group: report.Group) -> int:
        if self._refusal(group):
            return 0
        return pools.maximum_bytes(self.room(group), self.pool(group), self.policy)

    def room(self, group: report.Group) -> Room:
        """What the class may have of a group."""
        return Room(group, self.kept(group))

    def purpose(self, group: report.Group) -> str:
        """The pool's limit, or why it takes no volume."""
        why = self._refusal(group)
        times = f"{self.policy.over_provisioning:g} times what the pool can grow to"
        times += _of_policy(group)
        return f"for thin volumes: {why or times}"

    def create(self, lvm: Lvm, group: report.Group, new: New) -> None:
        """One command, and one more if the pool is missing."""
        pool = self.pool(group)
        self._ensure_made(lvm, group, pool)
        thin.create(lvm, group.name, pool.name, new)

    def extend(self, lvm: Lvm, volume: Volume, size_bytes: int) -> None:
        """One command; the pool is extended when it fills, and before where it has."""
        with suppress(errors.NoRoom):
            self.make_room(lvm, volume.group)
        volumes.extend(lvm, volume.group.name, volume.name, size_bytes=size_bytes)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """Do nothing: a pool without volumes is used by the next one."""

    def make_room(self, lvm: Lvm, group: report.Group) -> None:
        """Extend a pool that is too full, before a command that suspends one of its volumes.

        A suspend waits for writes, and writes to a full pool for room, which nothing else can give
        them while the group is locked. No command where there is room. Raises NoRoom where the pool
        is full and cannot grow, PoolSilent.
        """
        name = pool_name(self.device_class)
        if (status := self.activator.pool_status(group.name, name)) is None:
            return
        parts = (
            (status.data_percent, self.extend_data),
            (status.metadata_percent, self.extend_metadata),
        )
        for percent, extend in parts:
            if percent <= self.policy.autoextend_threshold:
                continue
            if not extend(lvm, Room(group), percent) and percent >= 100:
                extent = group.extent_size_bytes
                raise errors.NoRoom(group.name, extent, 0, f"more in its full pool {name}")

    def extend_data(self, lvm: Lvm, room: Room, percent: float) -> int | None:
        """Extend the data of a pool that is `percent` full; returns the bytes, 0 without room.

        What the room keeps is what the class keeps. None for a pool without volumes, which is full
        only because it is zeroed to be removed.
        """
        group, extent = room.group, room.group.extent_size_bytes
        if not (pool := self.pool(group)).promised_bytes:
            return None
        growth = pools.room_extents(room.keeping(self.kept(group)), pool)
        most = 0 if closed(room) else growth
        more = min(most, pools.wanted_extents(pool.data_extents, percent, self.policy))
        if more:
            size = (pool.data_extents + more) * extent
            disks = room.anywhere()
            volumes.extend(lvm, group.name, pool.name, size_bytes=size, disks=disks)
        return more * extent

    def extend_metadata(self, lvm: Lvm, room: Room, percent: float) -> int | None:
        """Extend the pool's metadata, as `extend_data` its data."""
        group, extent = room.group, room.group.extent_size_bytes
        if not (pool := self.pool(group)).promised_bytes:
            return None
        growth = pools.metadata_growth_extents(room.keeping(self.kept(group)), pool)
        most = 0 if closed(room) else growth
        more = min(most, pools.wanted_extents(pool.metadata_extents, percent, self.policy))
        if more:
            disks = room.anywhere()
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
            data_extents=pools.first_extents(self.room(group), pool, self.policy),
            metadata_extents=pools.suitable_metadata_extents(group, pool.chunk_size_bytes),
            extent_size_bytes=group.extent_size_bytes,
            chunk_size_bytes=pool.chunk_size_bytes,
            own_tags={
                **volume_states.tags_for(Ender.CALLER),
                tag.CLASS: self.device_class,
                tag.CHUNK: str(pool.chunk_size_bytes),
                **self._cache_tags(group),
            },
            disks=Room(group).anywhere(),
        )

    def _cache_tags(self, _group: report.Group) -> Mapping[str, str]:
        """The tags of a pool's cache."""
        return {}

    def _refusal(self, group: report.Group) -> str:
        if why := closed_to_new(group):
            return why
        pool = self.pool(group)
        made = group.volumes.get(pool.name)
        if made is not None and (needs := records.unknown_needs(made)):
            return f"{errors.NeedsOther(f'{group.name}/{made.name}', needs)}"
        if made is not None and not (is_own_pool(made) or is_half_made_pool(made)):
            return (
                f"{group.name}/{pool.name} is there and is no pool of Carver's, or lost a tag that"
                f" says so (see `lvs -o +tags`); if it is yours, rename it (`lvrename`)"
            )
        status = self.activator.pool_status(group.name, pool.name)
        return pools.refusal(self.room(group), pool, self.policy, status)


@dataclass(frozen=True)
class CachedThin(Thin):
    """Thin volumes from a pool on slow disks whose data have a cache on fast ones.

    The pool is created first, then its cache, then a volume. Killed in between, the pool is empty,
    and the next call completes it, or the next start removes it.
    """

    cache: Cache

    def maximum_bytes(self, group: report.Group) -> int:
        """The bytes that may still be promised; 0 without a cache and room for one."""
        if not caches.has_room(group, pool_name(self.device_class), self.cache):
            return 0
        return super().maximum_bytes(group)

    def purpose(self, group: report.Group) -> str:
        """The pool's limit, or the room that its cache needs."""
        if closed_to_new(group) or caches.has_room(group, pool_name(self.device_class), self.cache):
            return super().purpose(group)
        wanted, free = self.cache.of_pool(group), Room(group).fast_extents
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
            self._tag_cache(lvm, group, made)
        caches.attach(lvm, group, pool.name, self.cache, self.cache.of_pool(group))

    def _tag_cache(self, lvm: Lvm, group: report.Group, made: report.LogicalVolume) -> None:
        """Tag a pool with the cache that it is about to get."""
        own_tags, wanted = made.own_tags, self._cache_tags(group)
        old = {key: own_tags[key] for key in wanted if key in own_tags}
        if old != wanted:
            volumes.mark(lvm, group.name, made.name, old=old, new=wanted)

    def _cache_tags(self, group: report.Group) -> Mapping[str, str]:
        extent = group.extent_size_bytes
        return {tag.CACHE: self.cache.tag_value(Room(group).planned_extents * extent, extent)}


Allocator = Thick | Thin


class Allocators:
    """Returns the allocator of a class or a volume."""

    def __init__(self, configuration: Configuration, activator: Activator) -> None:
        self._configuration = configuration
        self._activator = activator

    @property
    def _classes(self) -> Sequence[DeviceClass]:
        return self._configuration.now.classes

    def of(self, one: DeviceClass) -> Allocator:
        """The allocator of a class."""
        kept = partial(self._kept, one)
        match one.pool, one.cache:
            case None, None:
                return Thick(one.layout, kept)
            case None, Cache() as cache:
                return Cached(one.layout, kept, cache)
            case Policy() as policy, None:
                return Thin(one.name, one.group, policy, kept, self._activator)
            case Policy() as policy, Cache() as cache:
                return CachedThin(one.name, one.group, policy, kept, self._activator, cache)
        raise AssertionError(one)  # pragma: no cover - there is no other class

    def of_volume(self, volume: Volume) -> Allocator:
        """The allocator that extends a volume; without limits if its class is gone.

        A thin one is extended in the pool that lvm2 has it in, whatever its tags say.
        """
        logical = volume.group.volumes.get(volume.name)
        pool = volume.group.volumes.get(logical.pool) if logical is not None else None
        if pool is not None and (called := self._called(pool)) is not None:
            return self._of_pool(called, volume.group.name)
        shape = volume.layout
        for one in self._classes:
            if (
                one.name == volume.own_tags.get(tag.CLASS)
                and (one.pool is not None) == shape.is_thin
            ):
                # Only its data grow, on slow disks.
                return self.of(replace(one, layout=shape, cache=None))
        policy = Policy() if shape.is_thin else None
        gone = volume.own_tags.get(tag.CLASS, "")
        return self.of(DeviceClass(gone, volume.group.name, layout=shape, pool=policy))

    def thin(self, group: report.Group) -> list[Thin]:
        """The allocators of the pools that are in a group, whatever the classes say by now.

        A class may be gone, or have no pool, or another group: its volumes are used all the same.
        """
        return [self._of_pool(one, group.name) for one in self._pooled(group)]

    def growing(self, group: str, seen: report.Group | None) -> list[Thin]:
        """The allocators of the pools that may have to grow: those of a state that may be old.

        And those of the group's classes, whose pools may be newer.
        """
        own = {one.name for one in self._classes if one.pool is not None and one.group == group}
        if seen is not None:
            own |= {*self._pooled(seen)}
        return [self._of_pool(one, group) for one in sorted(own)]

    def _pooled(self, group: report.Group) -> Iterator[str]:
        """The class of each pool of Carver's in a group."""
        yield from filter(None, map(self._called, filter(is_pool, records.every(group))))

    def _called(self, pool: report.LogicalVolume) -> str | None:
        """The class of a pool by its name, which is what it is found by; None where none has it.

        Its tag may be lost, or there twice.
        """
        tagged = tags.values(pool.tags, tag.CLASS)
        known = (one.name for one in self._classes)
        named = (*tagged, *known, names.readable(ids.POOL_PREFIX, pool.name))
        return next((one for one in named if pool_name(one) == pool.name), None)

    def _of_pool(self, name: str, group: str) -> Thin:
        """The allocator of a class's pool in a group; with the defaults of a class that is gone."""
        found = (one for one in self._classes if one.name == name and one.pool is not None)
        one = next(found, DeviceClass(name, group, pool=Policy()))
        return Thin(name, group, one.pool or Policy(), partial(self._kept, one), self._activator)

    def beside_bytes(self, room: Room, device_class: str) -> int:
        """The bytes for snapshots of a class's volumes, beside its reserve and pools' promises."""
        group = room.group
        if closed(room):
            return 0
        kept = self.promised_extents(group)
        for one in self._classes:
            if one.name == device_class:
                kept += one.reserve.extents(group)
        return layout.maximum_bytes(room.keeping(kept))

    def _kept(self, one: DeviceClass, group: report.Group) -> int:
        """The extents that a class leaves free: its reserve, and other pools' promises."""
        return one.reserve.extents(group) + self.promised_extents(group, but=one.name)

    def promised_extents(self, group: report.Group, but: str = "") -> int:
        """The extents that the pools of a group have promised and not yet got."""
        others = (one for one in self.thin(group) if one.device_class != but)
        return sum(one.outstanding_extents(group) for one in others)
