"""Zero thin pools that lost their last volume, and remove them.

A pool zeroes what it allocates, so a deleted thin volume needs no erasing. But the pool's extents
hold the data of all its volumes, and would be free. So a volume as large as the pool's data is made
in an empty pool and zeroed as a whole: each of its chunks takes one of the pool's, which has no
others.

Unless a chunk leaked: dm-thin never allocates again what it was allocating when the disk failed.
The pool is then full before the end of that volume, and its data device is zeroed below it: a full
pool allocates no chunk while that volume exists. A cache on fast disks is detached and zeroed, too.

The volume is tagged `wiping`, as all that a restart resumes. Killed before it is made, the pool is
empty; killed afterwards, it holds nothing else: `resume` finds both. A pool that is wanted
meanwhile is kept: the job ends at its next chunk, before the call holds the group, and its volume
is removed.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from agent.core import ids, tag
from agent.operations import erase_deleted
from agent.volumes import records, volume_states
from agent.volumes.allocation import chunk_bytes, is_half_made_pool, is_own_pool, wipe_name
from agent.volumes.context import Context
from agent.volumes.erase_policy import Purpose
from agent.volumes.records import Snapshot, Volume
from agent.volumes.volume_states import Call, Ender, Work
from agent.work.group_worker import Job, Jobs, Steps, Stopping
from lvm import caches, names, report, thin, volumes
from lvm.volumes import New
from mount import mount_errors as mount_errors
from mount.block_io import By

_T = TypeVar("_T")


class Removing(Exception):
    """A pool is being zeroed, and a volume is to be made in it."""


class PoolRemover:
    """Removes empty pools in the background, one at a time for each group.

    `freed` is called with a group in which extents were freed that must be overwritten.
    """

    def __init__(self, context: Context, *, freed: Callable[[str], object]) -> None:
        self._freed = freed
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._devices = context.devices
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._lvm, self._policy = context.volume_groups.lvm, context.erase_policy
        self._paces = context.paces
        self.jobs: Jobs[Job] = Jobs(
            context.workers,
            "reclaim",
            self._erase_and_remove,
            "pool %s is empty, but not removed yet: %s",
            due=self._due,
        )
        self._conflicts = context.conflicts
        self._conflicts.add(Work.EMPTY_POOL, self.jobs)
        # The keys of pools to be looked at once no call keeps them any more.
        self._kept_keys: set[str] = set()

    def remove(self, thin_one: Volume | Snapshot) -> None:
        """Remove a thin volume; the caller holds the group, and read the report since.

        If that fails the volume may be gone all the same, and a repeated call would find nothing
        to follow up. So the pool is looked at then, too.
        """
        group = thin_one.group.name
        try:
            volumes.remove(self._lvm(group), group, thin_one.name)
        except mount_errors.CommandError:
            self.after(thin_one, wait_seconds=0)
            raise

    def after(self, removed: Volume | Snapshot, wait_seconds: float) -> None:
        """Remove the pool of a removed volume if it was the last one, and wait a moment for it.

        The group was locked from the volume's report until its removal.
        """
        pool = removed.group.volume(removed.name).pool
        others = [one for one in removed.group.in_pool(pool) if one.name != removed.name]
        if all(_fills_pool(one) for one in others):
            self.give_back(removed.group.name, pool)
            if (job := self.jobs.of(f"{removed.group.name}/{pool}")) is not None:
                self.jobs.wait(job, wait_seconds)

    def give_back(self, group: str, pool: str) -> Future[None]:
        """Zero and remove a pool in the background, if it is empty by then.

        A pool that calls keep is looked at when the last of them is over, and not waited for.
        """
        key = f"{group}/{pool}"
        try:
            job = self.jobs.start(Job(key))
        except Stopping:
            self._kept_keys.add(key)
            try:
                # The last call that kept it may have ended before it could see that.
                job = self.jobs.start(Job(key))
            except Stopping:
                left = Future[None]()
                left.set_result(None)
                return left
        if job.cancelled.is_set():
            # Its disk does not answer yet.
            job.ended.add_done_callback(lambda _: self.give_back(group, pool))
        return job.ended

    @contextmanager
    def kept(self, group: str, pool: str) -> Iterator[None]:
        """Have no job of a pool within the `with`, for a new volume in it.

        The group is not held to enter. Raises Stopping where a chunk takes longer than ten seconds
        to be zeroed. Afterwards the pool is looked at again if it had a job.
        """
        key = f"{group}/{pool}"
        had_job = self.jobs.has(key)
        try:
            with self._conflicts.enter(Call.CREATE, key):
                yield
        finally:
            if had_job or key in self._kept_keys:
                self._kept_keys.discard(key)
                self.give_back(group, pool)

    def when_kept(self, group: str, pool: str, make: Callable[[], _T]) -> _T:
        """What `make` returns, which is called again with the pool kept where it raises Removing.

        So a call that is refused in any case ends no job.
        """
        try:
            return make()
        except Removing:
            pass
        with self.kept(group, pool):
            return make()

    def require_kept(self, group: str, pool: str) -> None:
        """Raise Removing for a pool that is being zeroed, before anything is made."""
        if self.jobs.has(f"{group}/{pool}"):
            raise Removing(pool)

    def empty(self, group: report.Group, pool: str) -> None:
        """Remove the volume that zeroes a pool, if there is one, so that a new volume has room.

        The pool is `kept`. The caller holds the group, and read the report since.
        """
        for one in group.in_pool(pool):
            if _fills_pool(one):
                volumes.remove(self._lvm(group.name), group.name, one.name)

    def _due(self, group: str) -> Iterator[Job]:
        for pool in _abandoned(self._reports.fresh(group).group(group)):
            yield Job(f"{group}/{pool}")

    def _erase_and_remove(self, job: Job) -> Steps:
        group_name, pool_name = job.key.split("/")
        with self._volume_groups.hold(group_name):
            job.check()
            if (group := self._if_empty(group_name, pool_name)) is None:
                return
            pool = group.volume(pool_name)
            cache = self._detached_cache(group, pool)
            if self._policy.zeroes:
                wiping = self._wiping_device(group, pool)
                parted = self._activator.ensure_active(group_name, cache).path if cache else ""
        if self._policy.zeroes:
            yield from self._zero_pool(job, pool, wiping)
            if parted:
                yield from self._zero(job, parted, self._kernel.device_size_bytes(parted))
        with self._volume_groups.hold(group_name):
            job.check()
            # Looked at again: only the volume that zeroes it may be removed with it.
            if (group := self._if_empty(group_name, pool_name)) is not None:
                is_unclean = tag.UNCLEAN in (pool := group.volume(pool_name)).own_tags
                if is_unclean:
                    # Its metadata, and the rest of a chunk, are not overwritten with its data.
                    erase_deleted.mark_for_erase(self._lvm(group_name), group, pool.disks)
                # The cache first: a restart finds a pool without its cache, but not a lone cache.
                doomed = [cache, pool_name] if cache else [pool_name]
                volumes.remove(self._lvm(group_name), group_name, *doomed)
                if is_unclean:
                    self._freed(group_name)

    def _detached_cache(self, group: report.Group, pool: report.LogicalVolume) -> str:
        """The pool's cache, as a volume of its own; empty if there is nothing to detach."""
        if not caches.is_cached(pool):
            return caches.parted(group, pool.name)
        if not self._policy.zeroes:
            return ""  # it is removed with its pool
        if not self._activator.is_active(group.name, pool.name):
            volumes.activate(self._lvm(group.name), group.name, pool.name)
        caches.split(self._lvm(group.name), pool)
        return caches.attached(pool)

    def _if_empty(self, group_name: str, pool: str) -> report.Group | None:
        """A fresh report of the group, if the pool exists and holds no user's volume."""
        group = self._mender.mend(group_name).group(group_name)
        made = group.volumes.get(pool)
        if made is not None and is_half_made_pool(made):
            volumes.remove(self._lvm(group_name), group_name, pool)
        if made is None or not is_own_pool(made):
            return None
        wipes = [one for one in group.in_pool(pool) if _fills_pool(one)]
        if len(wipes) == len(group.in_pool(pool)):
            return group
        for one in wipes:
            volumes.remove(self._lvm(group.name), group.name, one.name)
        return None

    def _wiping_device(self, group: report.Group, pool: report.LogicalVolume) -> str:
        """The device of a volume as large as the pool's data; makes the volume if needed."""
        device_class = pool.own_tags[tag.CLASS]
        name = wipe_name(device_class)
        # The pool holds nothing else. If the name is taken outside the pool, lvm2 refuses.
        if not group.in_pool(pool.name):
            own_tags = {**volume_states.tags_for(Ender.ERASER), tag.CLASS: device_class}
            new = New(name, pool.size_bytes, own_tags)
            thin.create(self._lvm(group.name), group.name, pool.name, new)
        return self._activator.ensure_active(group.name, name).path

    def _zero_pool(self, job: Job, pool: report.LogicalVolume, wiping: str) -> Steps:
        """Zero all that a pool ever allocated, by a volume in it."""
        group_name, pool_name = job.key.split("/")
        chunk = chunk_bytes(pool)
        try:
            # A partial chunk at the end is never allocated.
            yield from self._zero(job, wiping, pool.size_bytes // chunk * chunk)
        except OSError:
            # ENOSPC, once the kernel waited a minute for room (no_space_timeout), or EIO.
            if not self._is_full(group_name, pool_name):
                raise
            with self._volume_groups.hold(group_name):
                job.check()
                # It was full before this look, so no user's volume in it can have a chunk.
                if self._if_empty(group_name, pool_name) is None:
                    return
            data = self._devices.pool_data(group_name, pool_name)
            size_bytes = self._kernel.device_size_bytes(data)
            yield from self._zero(job, data, size_bytes, below=wiping)

    def _is_full(self, group: str, pool: str) -> bool:
        """Whether all chunks of an active pool are allocated, or leaked; no command."""
        status = thin.status_of(self._activator.status(group, pool))
        return status is not None and 0 < status.data_blocks == status.used_data_blocks

    def _zero(self, job: Job, device: str, size_bytes: int, *, below: str = "") -> Steps:
        """Zero so much of a device, one that the pool uses `below` another."""
        pace, held = self._paces.of(job.key.split("/")[0]), bool(below)
        work = pace.work("erase", device, check=job.check, progress=job.progress)

        def writing() -> AbstractContextManager[object]:
            return self._kernel.opened(below) if below else nullcontext()

        def zero(offset: int, length: int, by: By) -> None:
            self._kernel.zero_out(device, offset, length, held=held, by=by)
            # On a thin volume this writes the pool's mapping of its chunks, too.
            self._kernel.flush(device)

        yield from self._policy.overwrite(
            work,
            device,
            size_bytes,
            purpose=Purpose.DELETED,
            held=held,
            zero=zero,
            within=writing,
        )


def _fills_pool(logical: report.LogicalVolume) -> bool:
    """Whether it is the volume that zeroes a pool, and no user's."""
    own_tags = logical.own_tags
    is_named_so = names.is_of(ids.WIPE_PREFIX, logical.name)
    is_own = tag.NAME not in own_tags and erase_deleted.is_deleted(logical)
    return is_named_so and is_own and not records.unknown_needs(logical)


def _abandoned(group: report.Group) -> list[str]:
    """Carver's pools of a group that are empty, half made, or were being zeroed."""
    every = list(records.usable(group))
    half_made = [one.name for one in every if is_half_made_pool(one)]
    own = ((one.name, group.in_pool(one.name)) for one in every if is_own_pool(one))
    return half_made + [name for name, held in own if not held or any(map(_fills_pool, held))]
