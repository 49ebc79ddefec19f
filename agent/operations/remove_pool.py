"""Zero thin pools that lost their last volume, and remove them.

A thin pool zeroes each chunk that it allocates, so a deleted thin volume needs no erasing. But the
extents of a removed pool hold the data of all its volumes, and become free. So an empty pool is
zeroed before it is removed, unless the setting `wipe` is `none`. The steps are:

1. Detach the pool's cache on fast disks, if it has one.
2. Create a thin volume as large as the pool's data in the empty pool, with the tag `wiping`. As the
   pool has no other volumes, each chunk of this volume takes one of the pool's chunks.
3. Zero the whole volume, and with it all chunks of the pool.
4. If the pool is full before the end of the volume, zero the pool's data device directly. A chunk
   has leaked in that case: dm-thin never again allocates a chunk that it was allocating when the
   disk failed. A full pool allocates nothing while the volume exists, so nothing else is
   overwritten.
5. Zero the detached cache.
6. Remove the pool with the volume and the cache.

A restart resumes the work by the tag `wiping`: a process that was killed before step 2 left an
empty pool, and one that was killed later left a pool with only that volume. `_due_removals` finds
both. If a call needs the pool meanwhile, the pool is kept: the job ends at its next chunk, before
the call locks the group, and the zeroing volume is removed.
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
from agent.volumes.volume_states import Call, EndedBy, Work
from agent.work.group_worker import Job, Jobs, Steps, Stopping
from lvm import caches, names, report, thin, volumes
from lvm.volumes import New
from mount import mount_errors as mount_errors
from mount.block_io import By

_T = TypeVar("_T")


class PoolBeingZeroed(Exception):
    """Raised while the thin pool in which a volume is to be created is being zeroed."""


class PoolRemover:
    """Zeroes and removes empty thin pools in the background, one at a time for each volume group.

    `freed` is called with the name of a volume group in which extents were freed that must be
    zeroed.
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
            due_jobs=self._due_removals,
        )
        self._conflicts = context.conflicts
        self._conflicts.add(Work.EMPTY_POOL, self.jobs)
        # Keys, `group/pool`, of thin pools for which `remove_if_empty` found that calls keep them.
        # The pools are checked again when the last of these calls ends.
        self._kept_keys: set[str] = set()

    def remove(self, thin_volume: Volume | Snapshot) -> None:
        """Remove a thin volume by one command; on failure, check whether its pool is empty.

        The caller holds the group's lock, and read the report under that lock. If lvm2 fails, the
        volume may be gone all the same, and a repeated call would not find the volume.
        """
        group = thin_volume.group.name
        try:
            volumes.remove(self._lvm(group), group, thin_volume.name)
        except mount_errors.CommandError:
            self.remove_after(thin_volume, wait_seconds=0)
            raise

    def remove_after(self, removed_volume: Volume | Snapshot, wait_seconds: float) -> None:
        """Remove the thin pool of a removed volume if the volume was the last one in the pool.

        Waits up to `wait_seconds` for the job that removes the pool. The caller held the group's
        lock from the volume's report until the removal.
        """
        pool = removed_volume.group.volume(removed_volume.name).pool
        other_volumes = [
            volume
            for volume in removed_volume.group.in_pool(pool)
            if volume.name != removed_volume.name
        ]
        if all(_is_zeroing_volume(volume) for volume in other_volumes):
            self.remove_if_empty(removed_volume.group.name, pool)
            if (job := self.jobs.of(f"{removed_volume.group.name}/{pool}")) is not None:
                self.jobs.wait(job, wait_seconds)

    def remove_if_empty(self, group: str, pool: str) -> Future[None]:
        """Zero and remove a thin pool in the background, if the pool is empty when the job runs.

        Returns a future of the job's end. If calls keep the pool, the job starts when the last of
        these calls ends, and the returned future is already done.
        """
        key = f"{group}/{pool}"
        try:
            job = self.jobs.start(Job(key))
        except Stopping:
            self._kept_keys.add(key)
            try:
                # Try again: the last call that kept the pool may have ended before it could see the
                # key.
                job = self.jobs.start(Job(key))
            except Stopping:
                done_future = Future[None]()
                done_future.set_result(None)
                return done_future
        if job.cancelled.is_set():
            # The present job was cancelled, and has not ended because its disk does not answer:
            # start another job when the present one ends.
            job.future.add_done_callback(lambda _: self.remove_if_empty(group, pool))
        return job.future

    @contextmanager
    def keep_pool(self, group: str, pool: str) -> Iterator[None]:
        """Keep a thin pool within the `with`: no job zeroes it, so that a volume can be created.

        To be entered without the group's lock. Raises Stopping if the job of the pool takes longer
        than ten seconds to zero its present chunk. A pool that had a job is checked again
        afterwards.
        """
        key = f"{group}/{pool}"
        had_job = self.jobs.has(key)
        try:
            with self._conflicts.enter(Call.CREATE, key):
                yield
        finally:
            if had_job or key in self._kept_keys:
                self._kept_keys.discard(key)
                self.remove_if_empty(group, pool)

    def retry_holding(self, group: str, pool: str, create: Callable[[], _T]) -> _T:
        """Call `create` and return its result; if the pool is being zeroed, stop that, and retry.

        Only the second attempt, after PoolBeingZeroed, keeps the pool, so that a request that is
        refused anyway cancels no job.
        """
        try:
            return create()
        except PoolBeingZeroed:
            pass
        with self.keep_pool(group, pool):
            return create()

    def require_kept(self, group: str, pool: str) -> None:
        """Raise PoolBeingZeroed, before anything is created, if a thin pool is being zeroed."""
        if self.jobs.has(f"{group}/{pool}"):
            raise PoolBeingZeroed(pool)

    def remove_zeroing_volume(self, group: report.Group, pool: str) -> None:
        """Remove the volume that zeroes a thin pool, if it exists, so that a new volume has room.

        The caller keeps the pool by `keep_pool`, holds the group's lock, and read the report under
        that lock.
        """
        for volume in group.in_pool(pool):
            if _is_zeroing_volume(volume):
                volumes.remove(self._lvm(group.name), group.name, volume.name)

    def _due_removals(self, group: str) -> Iterator[Job]:
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
                thin_path = self._wiping_device(group, pool)
                cache_path = self._activator.ensure_active(group_name, cache).path if cache else ""
        if self._policy.zeroes:
            yield from self._zero_pool(job, pool, thin_path)
            if cache_path:
                yield from self._zero(job, cache_path, self._kernel.device_size_bytes(cache_path))
        with self._volume_groups.hold(group_name):
            job.check()
            # Read the volume group again: besides the zeroing volume, no volume may be removed with
            # the pool.
            if (group := self._if_empty(group_name, pool_name)) is not None:
                is_unclean = tag.UNCLEAN in (pool := group.volume(pool_name)).own_tags
                if is_unclean:
                    # Have the freed extents on the pool's disks zeroed later: zeroing the pool's
                    # data did not overwrite the pool's metadata, nor a partial chunk at the end of
                    # the data.
                    erase_deleted.mark_for_erase(self._lvm(group_name), group, pool.disks)
                # Remove the cache before the pool: a restart finds a pool without its cache, but no
                # cache whose pool is gone.
                doomed_names = [cache, pool_name] if cache else [pool_name]
                volumes.remove(self._lvm(group_name), group_name, *doomed_names)
                if is_unclean:
                    self._freed(group_name)

    def _detached_cache(self, group: report.Group, pool: report.LogicalVolume) -> str:
        """Detach a thin pool's cache, and return the name of the cache as a logical volume.

        The name is empty if there is no cache, or if the cache is removed with the pool without
        erasing.
        """
        if not caches.is_cached(pool):
            return caches.detached_cachevol(group, pool.name)
        if not self._policy.zeroes:
            # Leave the cache attached, because lvm2 removes it with its pool.
            return ""
        if not self._activator.is_active(group.name, pool.name):
            volumes.activate(self._lvm(group.name), group.name, pool.name)
        caches.split(self._lvm(group.name), pool)
        return caches.attached(pool)

    def _if_empty(self, group_name: str, pool: str) -> report.Group | None:
        """Return a fresh report of a volume group if a pool of it has no user's volume, else None.

        The pool may have the volume that zeroes it. The caller holds the group's lock. A pool whose
        creation was interrupted is removed. If the pool has a user's volume, its zeroing volume is
        removed.
        """
        group = self._mender.mend(group_name).group(group_name)
        existing = group.volumes.get(pool)
        if existing is not None and is_half_made_pool(existing):
            volumes.remove(self._lvm(group_name), group_name, pool)
        if existing is None or not is_own_pool(existing):
            return None
        zeroing_volumes = [volume for volume in group.in_pool(pool) if _is_zeroing_volume(volume)]
        if len(zeroing_volumes) == len(group.in_pool(pool)):
            return group
        for volume in zeroing_volumes:
            volumes.remove(self._lvm(group.name), group.name, volume.name)
        return None

    def _wiping_device(self, group: report.Group, pool: report.LogicalVolume) -> str:
        """Return the path of a thin volume as large as its pool's data; create it if needed.

        The volume is active. Writing to the whole volume overwrites all chunks of the pool.
        """
        device_class = pool.own_tags[tag.CLASS]
        name = wipe_name(device_class)
        # Create the zeroing volume if the pool is empty. If a logical volume outside the pool has
        # the name, lvm2 refuses.
        if not group.in_pool(pool.name):
            own_tags = {**volume_states.tags_for(EndedBy.ERASER), tag.CLASS: device_class}
            zeroing_volume = New(name, pool.size_bytes, own_tags)
            thin.create(self._lvm(group.name), group.name, pool.name, zeroing_volume)
        return self._activator.ensure_active(group.name, name).path

    def _zero_pool(self, job: Job, pool: report.LogicalVolume, thin_path: str) -> Steps:
        """Zero all that a thin pool ever allocated, by writing to a volume in the pool."""
        group_name, pool_name = job.key.split("/")
        chunk = chunk_bytes(pool)
        try:
            # Stop before a partial chunk at the end of the pool, which is never allocated.
            yield from self._zero(job, thin_path, pool.size_bytes // chunk * chunk)
        except OSError:
            # Zero the pool's data device instead if the pool is full. The error is ENOSPC, after
            # the kernel waited a minute for room (no_space_timeout), or EIO.
            if not self._is_full(group_name, pool_name):
                raise
            with self._volume_groups.hold(group_name):
                job.check()
                # Go on only if no user's volume is in the pool. The pool was full before this
                # report was read, so a user's volume that was created meanwhile has no chunk.
                if self._if_empty(group_name, pool_name) is None:
                    return
            data = self._devices.pool_data(group_name, pool_name)
            size_bytes = self._kernel.device_size_bytes(data)
            yield from self._zero(job, data, size_bytes, thin_path=thin_path)

    def _is_full(self, group: str, pool: str) -> bool:
        """Whether all chunks of an active thin pool are allocated or leaked; runs no command."""
        status = thin.status_of(self._activator.status(group, pool))
        return status is not None and 0 < status.data_blocks == status.used_data_blocks

    def _zero(self, job: Job, device: str, size_bytes: int, *, thin_path: str = "") -> Steps:
        """Zero the first `size_bytes` bytes of a device.

        `thin_path` is the path of a thin volume that is kept open meanwhile, if the device is the
        data device of its pool.
        """
        pace, is_held = self._paces.of(job.key.split("/")[0]), bool(thin_path)
        task = pace.task("erase", device, check=job.check, progress=job.progress)

        def writing() -> AbstractContextManager[object]:
            return self._kernel.opened(thin_path) if thin_path else nullcontext()

        def zero(offset: int, length: int, method: By) -> None:
            self._kernel.zero_out(device, offset, length, allow_in_use=is_held, method=method)
            # Flush the device; on a thin volume this also commits the pool's mapping of the zeroed
            # chunks.
            self._kernel.flush(device)

        yield from self._policy.overwrite(
            task,
            device,
            size_bytes,
            purpose=Purpose.DELETED,
            is_held=is_held,
            zero_piece=zero,
            piece_context=writing,
        )


def _is_zeroing_volume(logical: report.LogicalVolume) -> bool:
    """Whether a logical volume is the one by which its thin pool is zeroed, and not a user's."""
    own_tags = logical.own_tags
    is_named_so = names.is_of(ids.WIPE_PREFIX, logical.name)
    is_own = tag.NAME not in own_tags and erase_deleted.is_deleted(logical)
    return is_named_so and is_own and not records.unknown_needs(logical)


def _abandoned(group: report.Group) -> list[str]:
    """Return the names of Carver's thin pools to be removed in a volume group.

    The result has pools without volumes, pools that were being zeroed, and pools whose creation was
    interrupted.
    """
    logical_volumes = list(records.usable_logical_volumes(group))
    half_made = [logical.name for logical in logical_volumes if is_half_made_pool(logical)]
    own_pools = (
        (pool.name, group.in_pool(pool.name)) for pool in logical_volumes if is_own_pool(pool)
    )
    return half_made + [
        name for name, members in own_pools if not members or any(map(_is_zeroing_volume, members))
    ]
