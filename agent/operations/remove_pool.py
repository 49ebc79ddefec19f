"""Pools that lost their last volume: overwritten, then given back to their group.

A pool zeroes what it gives out, so a deleted thin volume needs no wipe. But the pool's own extents
hold the data of all that was ever in it, and would be anyone's. So before an empty pool is removed,
a volume as large as the pool's data is made in it and overwritten whole: each chunk of it takes one
of the pool's, and there are no others.

Unless a chunk leaked: dm-thin never gives out again what it was giving out when the disk failed.
The volume then finds the pool full before its own end, and the pool's data are overwritten below
it, where they lie: a full pool gives nobody a chunk while that volume is there.

A cache on fast disks holds such data too: it is parted from the pool first, and overwritten too.

That volume is tagged `wiping`, as is all that a restart must go on with. Killed before it is made,
the pool is empty; killed afterwards, it holds nothing else: both are found by `resume`. A pool that
is wanted meanwhile is kept: the wipe ends at its next chunk, its volume is removed.
"""

import threading
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field

from agent.core import ids, tag
from agent.core.allocation import is_half_made_pool, is_own_pool, wipe_name
from agent.core.context import Context
from agent.core.jobs import Job, TaskQueue
from agent.core.records import Snapshot, Volume
from agent.operations.erase import ErasePolicy
from lvm import caches, names, report, tags, thin, volumes
from lvm import errors as lvm_errors
from lvm.volumes import New

# CreateVolume waits for one of these at most.
_PIECE_BYTES = 32 << 20


@dataclass
class _Reclaim(Job):
    """The key is `group/pool`."""

    # Held while the device is open.
    writing: threading.Lock = field(default_factory=threading.Lock)


class PoolRemover:
    """Gives empty pools back, one at a time."""

    def __init__(self, context: Context) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._inventory, self._devices = context.inventory, context.devices
        self._zero = ErasePolicy(context).zeroes
        self.jobs = TaskQueue(
            "reclaim",
            self._wipe_and_remove,
            _Reclaim,
            "pool %s is empty, but not given back: %s",
            workers=1,
        )

    def remove(self, thin_one: Volume | Snapshot) -> None:
        """Remove what is in a pool; the caller holds the group, and read the report within.

        Where that fails it may be gone all the same: whoever repeats the call finds nothing that he
        would look after then. So it is looked whether the pool is empty.
        """
        group = thin_one.group.name
        try:
            volumes.remove(self._volume_groups.lvm(group), group, thin_one.name)
        except lvm_errors.LvmError:
            self.after(thin_one, wait_seconds=0)
            raise

    def after(self, removed: Volume | Snapshot, wait_seconds: float) -> None:
        """Give a pool back that lost its last volume, and wait a moment for it.

        The volume, or snapshot, is removed, and the group was locked from its report until then.
        """
        pool = removed.group.volume(removed.name).pool
        others = [one for one in thin.members(removed.group, pool) if one.name != removed.name]
        if all(_is_wiping(one) for one in others):
            wait([self.give_back(removed.group.name, pool)], wait_seconds)

    def give_back(self, group: str, pool: str) -> Future[None]:
        """Wipe and remove a pool in the background, if it is empty by then."""
        return self.jobs.start(_Reclaim(f"{group}/{pool}")).ended

    def keep(self, group: report.Group, pool: str) -> None:
        """Have a pool for a new volume: what wipes it ends, and its volume is gone.

        The caller holds the group's lock, and read the report within.
        """
        job = self.jobs.forget(f"{group.name}/{pool}")
        if job is not None:
            # Whoever wrote has closed the device afterwards.
            with job.writing:
                pass
        for one in thin.members(group, pool):
            if _is_wiping(one):
                volumes.remove(self._volume_groups.lvm(group.name), group.name, one.name)

    def resume(self, *groups: str) -> int:
        """Go on with what is left in these groups, or in all; returns how many pools that is."""
        known = self._inventory.state(*groups)
        left = [
            (group.name, pool)
            for group in self._inventory.own_groups(known)
            if group.name in (groups or self._volume_groups.names)
            for pool in _abandoned(group)
        ]
        for group_name, pool in left:
            self.give_back(group_name, pool)
        return len(left)

    def stop(self) -> None:
        """End at the next piece; the next start goes on."""
        self.jobs.stop()

    def _wipe_and_remove(self, job: _Reclaim) -> None:
        group_name, pool_name = job.key.split("/")
        with self._volume_groups.hold(group_name):
            self.jobs.check(job)
            if (group := self._if_empty(group_name, pool_name)) is None:
                return
            pool = group.volume(pool_name)
            cache = self._parted_cache(group, pool)
            if self._zero:
                wiping = self._wiping_device(group, pool)
                parted = self._inventory.ensure_active(group_name, cache).path if cache else ""
        if self._zero:
            self._overwrite_pool(job, pool, wiping)
            if parted:
                self._overwrite(job, parted, self._kernel.device_size_bytes(parted))
        with self._volume_groups.hold(group_name):
            self.jobs.check(job)
            # What is in the pool goes with it, so it is looked at anew: nothing but the wipe may.
            if self._if_empty(group_name, pool_name) is not None:
                # The cache first: a pool without one is found by the next start, not a cache alone.
                volumes.remove(
                    self._volume_groups.lvm(group_name),
                    group_name,
                    *filter(None, [cache]),
                    pool_name,
                )

    def _parted_cache(self, group: report.Group, pool: report.LogicalVolume) -> str:
        """The pool's cache as a volume of its own, as it holds what was in the pool too."""
        if not caches.is_cached(pool):
            return caches.parted(group, pool.name)
        if not self._zero:
            return ""  # it goes with its pool
        if not self._inventory.is_active(group.name, pool.name):
            volumes.activate(self._volume_groups.lvm(group.name), group.name, pool.name)
        caches.split(self._volume_groups.lvm(group.name), pool)
        return caches.attached(pool)

    def _if_empty(self, group_name: str, pool: str) -> report.Group | None:
        """A fresh report of the group, if the pool is there and holds no volume of anyone's."""
        group = self._inventory.state(group_name, resume=True).group(group_name)
        made = group.volumes.get(pool)
        if made is not None and is_half_made_pool(made):
            volumes.remove(self._volume_groups.lvm(group_name), group_name, pool)
        if made is None or not is_own_pool(made):
            return None
        wipes = [one for one in thin.members(group, pool) if _is_wiping(one)]
        if len(wipes) == len(thin.members(group, pool)):
            return group
        for one in wipes:
            volumes.remove(self._volume_groups.lvm(group.name), group.name, one.name)
        return None

    def _wiping_device(self, group: report.Group, pool: report.LogicalVolume) -> str:
        """The device of a volume as large as the pool's data, which is made where it is not."""
        device_class = tags.decode(pool.tags)[tag.CLASS]
        name = wipe_name(device_class)
        # The pool holds nothing else. One of that name elsewhere is someone's: lvm2 refuses then.
        if not thin.members(group, pool.name):
            own_tags = {tag.STATE: tag.WIPING, tag.CLASS: device_class}
            thin.create(
                self._volume_groups.lvm(group.name),
                group.name,
                pool.name,
                New(name, pool.size_bytes, own_tags),
            )
        return self._inventory.ensure_active(group.name, name).path

    def _overwrite_pool(self, job: _Reclaim, pool: report.LogicalVolume, wiping: str) -> None:
        """Overwrite all that a pool ever gave out, by a volume in it; raises Stopping."""
        group_name, pool_name = job.key.split("/")
        chunk = int(tags.decode(pool.tags)[tag.CHUNK])
        try:
            # What is no whole chunk is never given out.
            self._overwrite(job, wiping, pool.size_bytes // chunk * chunk)
        except OSError:
            # ENOSPC, once the kernel waited a minute for room (no_space_timeout), or EIO.
            if not self._is_full(group_name, pool_name):
                raise
            with self._volume_groups.hold(group_name):
                self.jobs.check(job)
                # It was full before this look, so nobody else's volume in it can have a chunk.
                if self._if_empty(group_name, pool_name) is None:
                    return
            data = self._devices.pool_data(group_name, pool_name)
            size_bytes = self._kernel.device_size_bytes(data)
            self._overwrite(job, data, size_bytes, below=wiping)

    def _is_full(self, group: str, pool: str) -> bool:
        """Whether all chunks of an active pool are given out, or leaked; no command."""
        told = thin.status_of(self._inventory.status(group, pool))
        return told is not None and 0 < told.data_blocks == told.used_data_blocks

    def _overwrite(self, job: _Reclaim, device: str, size_bytes: int, *, below: str = "") -> None:
        """Overwrite so much of a device; raises Stopping.

        The pool holds what lies `below` another device, which is kept from being taken away.
        """
        for offset in range(0, size_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size_bytes - offset)
            with job.writing:
                self.jobs.check(job)
                with self._kernel.opened(below) if below else nullcontext():
                    self._kernel.zero_out(device, offset, length, held=bool(below))
        # Of a thin volume that writes the pool's own record of its chunks, too.
        with job.writing:
            self.jobs.check(job)
            self._kernel.flush(device)


def _is_wiping(logical: report.LogicalVolume) -> bool:
    """Whether it is what overwrites a pool, and no volume of anyone's."""
    own_tags = tags.decode(logical.tags)
    is_named_so = names.is_of(ids.WIPE_PREFIX, logical.name)
    state = own_tags.get(tag.STATE)
    return is_named_so and tag.NAME not in own_tags and state == tag.WIPING


def _abandoned(group: report.Group) -> list[str]:
    """Carver's pools of a group that are empty, or half made, or were being overwritten."""
    every = group.volumes.values()
    half_made = [one.name for one in every if is_half_made_pool(one)]
    own = ((one.name, thin.members(group, one.name)) for one in every if is_own_pool(one))
    return half_made + [name for name, held in own if not held or any(map(_is_wiping, held))]
