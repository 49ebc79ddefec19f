"""Allocate volumes from a volume group: thick, or thin from a pool, each with or without a cache.

The free space that Carver reports is computed by the rules by which volumes are created and
extended. A thin pool promises extents to its volumes: as many as the volumes can fill, within the
limit of over-provisioning. The extents that a pool has promised and does not have yet are kept free
in the volume group.
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
from agent.volumes.volume_states import EndedBy
from lvm import caches, groups, layout, names, report, tags, thin, volumes
from lvm import thin as pools
from lvm.caches import Cache
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.room import Room
from lvm.thin import Policy, Pool
from lvm.volumes import New
from mount.text import counted

# Type of a function that returns how many extents of a volume group must stay free.
Kept = Callable[[report.Group], int]


def pool_name(device_class: str) -> str:
    """Return the name of the logical volume that is the thin pool of a device class."""
    return names.logical_volume(ids.POOL_PREFIX, device_class)


def wipe_name(device_class: str) -> str:
    """Return the name of the thin volume that fills a device class's pool in order to zero it."""
    return names.logical_volume(ids.WIPE_PREFIX, device_class)


def is_own_pool(pool: report.LogicalVolume) -> bool:
    """Whether a logical volume is a thin pool of Carver's in which volumes may be created.

    The tags and the layout decide; a name alone proves nothing.
    """
    return _is_tagged_as_pool(pool) and {"thin", "pool"} <= pool.layout


def is_half_made_pool(pool: report.LogicalVolume) -> bool:
    """Whether a logical volume is a thin pool that lvm2 was creating when lvm2 was killed.

    lvm2 first commits the pool, with its tags, as a linear volume. Such a pool has no data.
    """
    is_ready = volume_states.is_recorded(pool.own_tags, EndedBy.CALLER)
    return is_ready and _is_tagged_as_pool(pool) and pool.layout == {"linear"}


def _is_tagged_as_pool(pool: report.LogicalVolume) -> bool:
    """Whether a logical volume has the tags of a thin pool of Carver's, and the name by its class.

    False also if this version of Carver must not use the pool.
    """
    is_usable = bool(chunk_bytes(pool)) and not records.unknown_needs(pool)
    # Leave out a pool with faulty tags: it is zeroed by its chunk size, and if that tag has two
    # values, none can be chosen.
    is_usable = is_usable and not records.faults(pool)
    return is_usable and pool.name == pool_name(pool.own_tags.get(tag.CLASS, ""))


def is_pool(pool: report.LogicalVolume) -> bool:
    """Whether a logical volume is a thin pool of Carver's, even if some of its tags are faulty.

    The name of the pool, a tag of Carver's and the layout decide. The extents that such a pool has
    promised stay reserved, and the pool is extended, since writers of its volumes wait for that.
    New volumes are created only in a pool for which `is_own_pool` is true.
    """
    # Look at the layout first: most logical volumes are no pools.
    is_thin_pool = {"thin", "pool"} <= pool.layout
    return is_thin_pool and names.is_of(ids.POOL_PREFIX, pool.name) and bool(pool.own_tags)


def chunk_bytes(pool: report.LogicalVolume) -> int:
    """Return the chunk size of a thin pool by its tag, in bytes.

    0 if the tag is missing, or has a size that lvm2 does not allow (lvmthin(7)).
    """
    size_bytes = tags.number(pool.own_tags.get(tag.CHUNK, "")) or 0
    is_in_range = pools.LEAST_CHUNK_BYTES <= size_bytes <= pools.MOST_CHUNK_BYTES
    return size_bytes if is_in_range and not size_bytes % pools.LEAST_CHUNK_BYTES else 0


def reason_closed(room: Room) -> str:
    """Return why nothing can be created or extended in a volume group now; empty if it can.

    There are two reasons. While a disk is missing, lvm2 refuses both, also on the disks that are
    present ("Cannot change VG while PVs are missing"). And while all free extents hold deleted data
    that is being overwritten, only allocations that may use such extents are possible.
    """
    if not room.group.missing_disks:
        is_closed = room.is_unclean and not room.takes_unclean
        return "while what is free in it is being overwritten" * is_closed
    missing_uuids = ", ".join(room.group.missing_uuids)
    return (
        f"while its disk {missing_uuids} is missing; see `A disk is replaced` in docs/operations.md"
    )


def reason_closed_to_new(group: report.Group) -> str:
    """Return why no volume can be created or expanded in a volume group now; empty if it can.

    Beside the reasons of `reason_closed`, the reason is a metadata area that is nearly full. Thin
    pools and COW stores are extended even then, since writers wait for that.
    """
    if not (why := reason_closed(Room(group))) and groups.is_text_full(group):
        return (
            f"while {groups.about_area(group)} is {groups.text_percent(group):.0f} % full; see"
            " `A group's metadata area is full` in docs/operations.md"
        )
    return why


def reason_full(group: report.Group, added_count: int = 1) -> str:
    """Return why a volume group has too many logical volumes for more of them; empty if it has not.

    `added_count` is the number of further logical volumes. The group's max_lv sets the limit. Free
    extents do not matter here.
    """
    if group.may_add(added_count):
        return ""
    return (
        f"while it has {counted(len(group.volumes), 'logical volume')}, of {group.most_volumes}"
        f" that it may have by its max_lv, and this takes {added_count} more; lift that limit by"
        f" `vgchange --logicalvolume 0 {group.name}`"
    )


def _of_policy(group: report.Group) -> str:
    """Return a text for error messages: how the volume group's allocation policy limits free space.

    Empty if it does not: only `contiguous` and the `cling` policies keep a volume on one disk.
    """
    if not group.keeps_to_one_disk:
        return ""
    piece = "in one piece" if group.policy == report.CONTIGUOUS else "on one disk"
    return (
        f" ({piece}, by the group's allocation policy {group.policy}; `vgchange --alloc normal"
        f" {group.name}` changes it)"
    )


@dataclass(frozen=True)
class ThickAllocator:
    """Allocator of volumes that have all their extents from the start.

    `layout` is the layout of the volumes. `kept_extents` returns the number of extents that must
    stay free in a volume group. All sizes are multiples of the extent size, in bytes. For `create`
    and `extend` the caller holds the group's lock, and has read the report under that lock.
    `finish` completes a volume whose `create` was killed.
    """

    layout: Layout
    kept_extents: Kept

    def maximum_bytes(self, group: report.Group, further_count: int = 0) -> int:
        """Return the size of the largest volume that can be created in a volume group, in bytes.

        `further_count` is as for `reason_full`.
        """
        if reason_closed_to_new(group) or self.reason_full(group, further_count):
            return 0
        return layout.maximum_bytes(self.room(group), self.layout)

    def room(self, group: report.Group) -> Room:
        """Return the free space of a volume group, of which `kept_extents` must stay free."""
        return Room(group, self.kept_extents(group))

    def reason_full(self, group: report.Group, further_count: int = 0) -> str:
        """Return why a group has too many logical volumes for another volume; empty if it has not.

        `further_count` is the number of other logical volumes that are to be created together with
        the volume.
        """
        return reason_full(group, 1 + further_count)

    def maximum_growth_bytes(self, volume: Volume) -> int:
        """Return the number of bytes by which a volume can grow now.

        A linear volume may grow onto any slow disk, a volume of another layout only on the disks
        that it has.
        """
        group, logical = volume.group, volume.group.volume(volume.name)
        if reason_closed_to_new(group):
            return 0
        return layout.maximum_growth_bytes(self.room(group), logical, self.layout)

    def purpose(self, group: report.Group) -> str:
        """Return a text for error messages: the layout, and the disks that it needs."""
        if why := reason_closed_to_new(group):
            return why
        room = self.room(group)
        disks = sum(1 for disk in room.slow if room.free_on(disk))
        unclean = ", ".join(disk.name for disk in group.disks if disk.unclean)
        remark = f" ({unclean} is overwritten first where it is free)" if unclean else ""
        purpose = (
            f"for {self.layout.kind} on {self.layout.disks} of {counted(disks, 'disk')} with"
            f" room{remark}"
        )
        return f"{purpose}{_of_policy(group)}"

    def create(self, lvm: Lvm, group: report.Group, new_volume: New) -> None:
        """Create a volume by one command."""
        disks = layout.placement(Room(group), self.layout)
        volumes.create(lvm, group.name, new_volume, layout=self.layout, disks=disks)

    def extend(self, lvm: Lvm, volume: Volume, size_bytes: int) -> None:
        """Extend a volume to a size in bytes, by one command.

        A linear volume grows on any slow disks, a volume of another layout only on the disks that
        it has.
        """
        group = volume.group
        disks = layout.growth_placement(Room(group), group.volume(volume.name), self.layout)
        volumes.extend(lvm, group.name, volume.name, size_bytes=size_bytes, disks=disks)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """Do nothing: `create` makes a whole volume by one command, or nothing."""

    def make_room(self, lvm: Lvm, group: report.Group) -> None:
        """Do nothing: a thick volume has all its extents."""


@dataclass(frozen=True)
class Cached(ThickAllocator):
    """Allocator of volumes on slow disks of a volume group, each with a cache on fast disks."""

    cache: Cache

    def maximum_bytes(self, group: report.Group, further_count: int = 0) -> int:
        """Return the size of the largest volume that has room on the disks now, in bytes.

        The volume needs free extents on the slow disks, its cache on the fast disks.
        `further_count` is as for `reason_full`.
        """
        if reason_closed_to_new(group) or self.reason_full(group, further_count):
            return 0
        return caches.maximum_bytes(self.room(group), self.cache)

    def reason_full(self, group: report.Group, further_count: int = 0) -> str:
        """Return why a group has too many logical volumes for another volume; empty if it has not.

        The volume's cache counts as well: until it is attached, it is a logical volume of its own.
        """
        return reason_full(group, 2 + further_count)

    def purpose(self, group: report.Group) -> str:
        """Return a text for error messages: the cache, and the free space of the fast disks."""
        if why := reason_closed_to_new(group):
            return why
        fast_bytes = Room(group).fast_extents * group.extent_size_bytes
        return (
            f"for linear with a {self.cache.kind} on fast disks, which have {fast_bytes} bytes"
            " free,"
        )

    def create(self, lvm: Lvm, group: report.Group, new_volume: New) -> None:
        """Create a volume and its cache by one command."""
        caches.create(lvm, group, new_volume, self.cache)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """Create and attach the cache of a volume that has none.

        A volume with copy-on-write snapshots gets no cache here: it was in use without one.
        """
        logical = volume.group.volume(volume.name)
        if not caches.is_cached(logical) and not volume.group.copy_on_write_of(volume.name):
            extent = volume.group.extent_size_bytes
            extents = self.cache.extents(logical.size_bytes // extent, extent)
            caches.attach(lvm, volume.group, volume.name, self.cache, extents)


@dataclass(frozen=True)
class ThinAllocator:
    """Allocator of thin volumes, in the thin pool of their device class in one volume group.

    A thin volume gets extents from the pool when it is first written to. The class has all methods
    of `ThickAllocator`. Methods that need the pool's status raise PoolSilent if the kernel does not
    report it in time.
    """

    device_class: str
    group: str
    policy: Policy
    kept_extents: Kept
    activator: Activator

    def pool(self, group: report.Group) -> Pool:
        """Return the thin pool of the device class as it is, or as it would be created."""
        name = pool_name(self.device_class)
        existing = group.volumes.get(name)
        if existing is None or not is_pool(existing):
            return Pool(name, pools.chunk_size_bytes(group, self.policy))
        size_bytes = chunk_bytes(existing) or pools.chunk_size_bytes(group, self.policy)
        return pools.find(group, name, size_bytes, wipe_name(self.device_class))

    def outstanding_extents(self, group: report.Group) -> int:
        """Return how many extents the pool has promised to its volumes and does not have yet."""
        return pools.outstanding_extents(group, self.pool(group), self.policy)

    def maximum_bytes(self, group: report.Group, further_count: int = 0) -> int:
        """Return the size of the largest thin volume that can be created, in bytes.

        It is the number of bytes that the pool may still promise to volumes. 0 if the volume group
        or the pool takes no new volume now, for instance while the pool is too full.
        `further_count` is as for `reason_full`.
        """
        return 0 if self.reason_full(group, further_count) else self._maximum_bytes(group)

    def reason_full(self, group: report.Group, further_count: int = 0) -> str:
        """Return why a group has too many logical volumes for another volume; empty if it has not.

        If the pool is missing, it is to be created and counts as well. `further_count` is as for
        `ThickAllocator.reason_full`.
        """
        return reason_full(
            group, further_count + (1 if pool_name(self.device_class) in group.volumes else 2)
        )

    def maximum_growth_bytes(self, volume: Volume) -> int:
        """Return the number of bytes by which a thin volume can grow now.

        It is the number of bytes that the volume's pool may still promise to volumes.
        """
        return self._maximum_bytes(volume.group)

    def _maximum_bytes(self, group: report.Group) -> int:
        """Return how many bytes the pool may still promise to volumes.

        0 if the pool takes no new volume now (`_refusal`).
        """
        if self._refusal(group):
            return 0
        return pools.maximum_bytes(self.room(group), self.pool(group), self.policy)

    def room(self, group: report.Group) -> Room:
        """Return the free space of a volume group, of which `kept_extents` must stay free."""
        return Room(group, self.kept_extents(group))

    def purpose(self, group: report.Group) -> str:
        """Return a text for error messages: the pool's limit, or why the pool takes no volume."""
        why = self._refusal(group)
        times = f"{self.policy.over_provisioning:g} times what the pool can grow to"
        times += _of_policy(group)
        return f"for thin volumes: {why or times}"

    def create(self, lvm: Lvm, group: report.Group, new_volume: New) -> None:
        """Create a thin volume by one command; first create the pool if it is missing."""
        pool = self.pool(group)
        self._ensure_made(lvm, group, pool)
        thin.create(lvm, group.name, pool.name, new_volume)

    def extend(self, lvm: Lvm, volume: Volume, size_bytes: int) -> None:
        """Extend a thin volume to a size in bytes, by one command.

        First, a pool that is too full is extended. Otherwise the pool is extended in the background
        when it fills.
        """
        with suppress(errors.NoRoom):
            self.make_room(lvm, volume.group)
        volumes.extend(lvm, volume.group.name, volume.name, size_bytes=size_bytes)

    def finish(self, lvm: Lvm, volume: Volume) -> None:
        """Do nothing: `create` makes a whole volume by one command, or only an empty pool.

        The next volume of the device class is created in that pool.
        """

    def make_room(self, lvm: Lvm, group: report.Group) -> None:
        """Extend a pool that is too full, before a command that suspends one of its volumes.

        A pool is too full above `autoextend_threshold`. A suspend waits for the volume's writes,
        and writes to a full pool wait for more extents. Nothing else can extend the pool while the
        caller holds the group's lock, so both would wait for ever. Runs no command if the pool is
        not too full, or inactive. Raises PoolSilent if the kernel does not report the pool's
        status, and NoRoom if the pool is full and cannot grow.
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
        """Extend the data of the thin pool, which are `percent` full; return the added bytes.

        Returns 0 if the pool cannot grow. Returns None for a pool without volumes: such a pool is
        full only because it is being zeroed before its removal. The reserve of the device class
        stays free.
        """
        group, extent = room.group, room.group.extent_size_bytes
        if not (pool := self.pool(group)).promised_bytes:
            return None
        growth = pools.room_extents(room.keeping_free(self.kept_extents(group)), pool)
        more_extents = self._more_extents(room, growth, pool.data_extents, percent)
        if more_extents:
            size_bytes = (pool.data_extents + more_extents) * extent
            disks = room.disk_arguments()
            volumes.extend(lvm, group.name, pool.name, size_bytes=size_bytes, disks=disks)
        return more_extents * extent

    def extend_metadata(self, lvm: Lvm, room: Room, percent: float) -> int | None:
        """Extend the metadata of the thin pool, which are `percent` full; return the added bytes.

        Returns 0 if the metadata cannot grow. Returns None for a pool without volumes, which is
        being zeroed before its removal. The reserve of the device class stays free.
        """
        group, extent = room.group, room.group.extent_size_bytes
        if not (pool := self.pool(group)).promised_bytes:
            return None
        growth = pools.metadata_growth_extents(room.keeping_free(self.kept_extents(group)), pool)
        more_extents = self._more_extents(room, growth, pool.metadata_extents, percent)
        if more_extents:
            disks = room.disk_arguments()
            thin.extend_metadata(
                lvm, group.name, pool.name, added_bytes=more_extents * extent, disks=disks
            )
        return more_extents * extent

    def _more_extents(self, room: Room, growth: int, present: int, percent: float) -> int:
        """Return by how many extents a part of the thin pool is extended; 0 if it cannot grow.

        The part has `present` extents, is `percent` full, and has room for `growth` more extents.
        """
        if reason_closed(room):
            return 0
        return min(growth, pools.wanted_extents(present, percent, self.policy))

    def _ensure_made(self, lvm: Lvm, group: report.Group, pool: Pool) -> None:
        """Create the thin pool of the device class if it is missing.

        A pool that lvm2 was creating when it was killed (`is_half_made_pool`) is removed first.
        """
        if pool.data_extents:
            return
        existing = group.volumes.get(pool.name)
        if existing is not None and is_half_made_pool(existing):
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
                **volume_states.tags_for(EndedBy.CALLER),
                tag.CLASS: self.device_class,
                tag.CHUNK: str(pool.chunk_size_bytes),
                **self._cache_tags(group),
            },
            disks=Room(group).disk_arguments(),
        )

    def _cache_tags(self, _group: report.Group) -> Mapping[str, str]:
        """Return the tags that describe the pool's cache: none, since this pool has no cache."""
        return {}

    def _refusal(self, group: report.Group) -> str:
        """Return why the pool, or its volume group, takes no new volume now; empty if it does."""
        if why := reason_closed_to_new(group):
            return why
        pool = self.pool(group)
        existing = group.volumes.get(pool.name)
        if existing is not None and (needs := records.unknown_needs(existing)):
            return f"{errors.NeedsOther(f'{group.name}/{existing.name}', needs)}"
        if existing is not None and not (is_own_pool(existing) or is_half_made_pool(existing)):
            return (
                f"{group.name}/{pool.name} is there and is no pool of Carver's, or lost a tag that"
                f" says so (see `lvs -o +tags`); if it is yours, rename it (`lvrename`)"
            )
        status = self.activator.pool_status(group.name, pool.name)
        return pools.refusal(self.room(group), pool, self.policy, status)


@dataclass(frozen=True)
class CachedThin(ThinAllocator):
    """Allocator of thin volumes whose pool, on slow disks, has a cache of its data on fast disks.

    The pool is created first, then its cache, then the volume. If the process is killed before the
    volume exists, an empty pool is left. The next call completes that pool, or the next start of
    Carver removes it.
    """

    cache: Cache

    def maximum_bytes(self, group: report.Group, further_count: int = 0) -> int:
        """Return the size of the largest thin volume that can be created now, in bytes.

        0 if the pool has no cache and the fast disks have no room for one. Otherwise it is as for
        `ThinAllocator.maximum_bytes`.
        """
        if not caches.has_room(group, pool_name(self.device_class), self.cache):
            return 0
        return super().maximum_bytes(group, further_count)

    def purpose(self, group: report.Group) -> str:
        """Return a text for error messages: the pool's limit, or the space that its cache needs.

        The second is returned if the fast disks have too little room for the pool's cache.
        """
        if reason_closed_to_new(group) or caches.has_room(
            group, pool_name(self.device_class), self.cache
        ):
            return super().purpose(group)
        wanted_extents, free_extents = self.cache.of_pool(group), Room(group).fast_extents
        return (
            f"for thin volumes: the {self.cache.kind} of their pool takes"
            f" {wanted_extents * group.extent_size_bytes} bytes of fast disks, which have"
            f" {free_extents * group.extent_size_bytes} bytes free;"
        )

    def _ensure_made(self, lvm: Lvm, group: report.Group, pool: Pool) -> None:
        """Create the thin pool of the device class, and the pool's cache, if they are missing."""
        super()._ensure_made(lvm, group, pool)
        existing = group.volumes.get(pool.name)
        if existing is not None and caches.is_cached(existing):
            return
        if existing is not None:
            self._tag_cache(lvm, group, existing)
        caches.attach(lvm, group, pool.name, self.cache, self.cache.of_pool(group))

    def _tag_cache(self, lvm: Lvm, group: report.Group, pool: report.LogicalVolume) -> None:
        """Tag an existing pool with the cache that is about to be attached to it."""
        own_tags, new_tags = pool.own_tags, self._cache_tags(group)
        old_tags = {key: own_tags[key] for key in new_tags if key in own_tags}
        if old_tags != new_tags:
            volumes.mark(lvm, group.name, pool.name, old_tags=old_tags, new_tags=new_tags)

    def _cache_tags(self, group: report.Group) -> Mapping[str, str]:
        """Return the tag that describes the pool's cache, with the size that it will have."""
        extent = group.extent_size_bytes
        return {tag.CACHE: self.cache.tag_value(Room(group).planned_extents * extent, extent)}


Allocator = ThickAllocator | ThinAllocator


class Allocators:
    """Returns the allocator of a device class, of a volume, or of a pool."""

    def __init__(self, configuration: Configuration, activator: Activator) -> None:
        self._configuration = configuration
        self._activator = activator

    @property
    def _classes(self) -> Sequence[DeviceClass]:
        """The device classes of the present configuration."""
        return self._configuration.now.classes

    def of(self, device_class: DeviceClass) -> Allocator:
        """Return the allocator of a device class."""
        kept_extents = partial(self._kept_extents, device_class)
        match device_class.pool, device_class.cache:
            case None, None:
                return ThickAllocator(device_class.layout, kept_extents)
            case None, Cache() as cache:
                return Cached(device_class.layout, kept_extents, cache)
            case Policy() as policy, None:
                return ThinAllocator(
                    device_class.name, device_class.group, policy, kept_extents, self._activator
                )
            case Policy() as policy, Cache() as cache:
                return CachedThin(
                    device_class.name,
                    device_class.group,
                    policy,
                    kept_extents,
                    self._activator,
                    cache,
                )
        raise AssertionError(device_class)  # pragma: no cover - there is no other class

    def of_volume(self, volume: Volume) -> Allocator:
        """Return the allocator that extends a volume, by the volume's layout and device class.

        If the device class is gone, default settings apply: no reserve stays free. A thin volume is
        extended in the pool in which lvm2 reports it, whatever its tags say. Raises LayoutUnknown.
        """
        logical = volume.group.volumes.get(volume.name)
        pool = volume.group.volumes.get(logical.pool) if logical is not None else None
        if pool is not None and (called := self._class_of_pool(pool)) is not None:
            return self._of_pool(called, volume.group.name)
        shape = volume.layout
        for device_class in self._classes:
            if (
                device_class.name == volume.own_tags.get(tag.CLASS)
                and (device_class.pool is not None) == shape.is_thin
            ):
                # Return an allocator without a cache: only the volume's data grow, on slow disks.
                return self.of(replace(device_class, layout=shape, cache=None))
        policy = Policy() if shape.is_thin else None
        class_name = volume.own_tags.get(tag.CLASS, "")
        return self.of(DeviceClass(class_name, volume.group.name, layout=shape, pool=policy))

    def thin_allocators(self, group: report.Group) -> list[ThinAllocator]:
        """Return an allocator for each thin pool of Carver's in a volume group.

        The pool's device class may be gone, or have no pool by now, or be in another volume group:
        the pool's volumes stay in use.
        """
        return [self._of_pool(class_name, group.name) for class_name in self._pooled(group)]

    def pools_to_grow(self, group: str, last_state: report.Group | None) -> list[ThinAllocator]:
        """Return an allocator for each thin pool of a volume group that may have to grow.

        These are the pools in `last_state`, a state of the group that may be old, and the pools of
        the group's device classes, which may have been created since.
        """
        class_names = {
            device_class.name
            for device_class in self._classes
            if device_class.pool is not None and device_class.group == group
        }
        if last_state is not None:
            class_names |= {*self._pooled(last_state)}
        return [self._of_pool(class_name, group) for class_name in sorted(class_names)]

    def _pooled(self, group: report.Group) -> Iterator[str]:
        """Return the name of the device class of each pool of Carver's in a volume group."""
        yield from filter(
            None, map(self._class_of_pool, filter(is_pool, records.all_logical_volumes(group)))
        )

    def _class_of_pool(self, pool: report.LogicalVolume) -> str | None:
        """Return the name of the device class whose pool has this pool's name; None if unknown.

        The classes in the pool's tags are tried first, then the configured classes, then the rest
        of the pool's name. The pool's tag CLASS alone does not decide: it may be lost, or have two
        values.
        """
        tagged = tags.values(pool.tags, tag.CLASS)
        configured = (device_class.name for device_class in self._classes)
        candidates = (*tagged, *configured, names.readable(ids.POOL_PREFIX, pool.name))
        return next(
            (candidate for candidate in candidates if pool_name(candidate) == pool.name), None
        )

    def _of_pool(self, name: str, group: str) -> ThinAllocator:
        """Return the allocator of a device class's pool; with default settings for a missing class.

        `name` is the name of the device class, which may be gone or have no pool by now.
        """
        matching = (
            configured
            for configured in self._classes
            if configured.name == name and configured.pool is not None
        )
        device_class = next(matching, DeviceClass(name, group, pool=Policy()))
        return ThinAllocator(
            name,
            group,
            device_class.pool or Policy(),
            partial(self._kept_extents, device_class),
            self._activator,
        )

    def available_cow_bytes(self, room: Room, device_class: str) -> int:
        """Return how many bytes are available for the COW stores of a device class's snapshots.

        The class's reserve, and the extents that pools have promised, are not available. 0 if
        nothing can be allocated in the volume group now (`reason_closed`).
        """
        group = room.group
        if reason_closed(room):
            return 0
        kept_extents = self.promised_extents(group)
        for configured in self._classes:
            if configured.name == device_class:
                kept_extents += configured.reserve.extents(group)
        return layout.maximum_bytes(room.keeping_free(kept_extents))

    def _kept_extents(self, device_class: DeviceClass, group: report.Group) -> int:
        """Return how many extents of a volume group volumes of a device class must leave free.

        These are the class's reserve, and the extents that the pools of other classes have promised
        to volumes and do not have yet.
        """
        return device_class.reserve.extents(group) + self.promised_extents(
            group, excluded_class=device_class.name
        )

    def promised_extents(self, group: report.Group, excluded_class: str = "") -> int:
        """Return how many extents a volume group's thin pools have promised and do not have yet.

        The pool of the device class `excluded_class` is left out.
        """
        allocators = (
            pool for pool in self.thin_allocators(group) if pool.device_class != excluded_class
        )
        return sum(pool.outstanding_extents(group) for pool in allocators)
