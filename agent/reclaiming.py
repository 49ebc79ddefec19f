"""Pools that lost their last volume: overwritten, then given back to their group.

A pool zeroes what it gives out, so a deleted thin volume needs no wipe. But the pool's own extents
hold the data of all that was ever in it, and would be anyone's. So before an empty pool is removed,
a volume as large as the pool's data is made in it and overwritten whole: each chunk of it takes one
of the pool's, and there are no others.

That volume is tagged `wiping`, as is all that a restart must go on with. Killed before it is made,
the pool is empty; killed afterwards, it holds nothing else: both are found by `resume`. A pool that
is wanted meanwhile is kept: the wipe ends at its next chunk, its volume is removed.
"""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from agent import inventory
from agent.carving import CHUNK, CLASS, wipe_name
from agent.inventory import Inventory, Snapshot, Volume
from agent.locks import GroupLocks
from lvm import pools, report, tags, thin, volumes
from lvm.lvm2 import Lvm
from mount.syscalls import Kernel

_log = logging.getLogger(__name__)

# CreateVolume waits for one of these at most.
_PIECE_BYTES = 32 << 20


@dataclass
class _Job:
    group: str
    pool: str
    # Set under the group's lock: a pool that is kept is not removed.
    kept: bool = False
    # Held while the device is open.
    writing: threading.Lock = field(default_factory=threading.Lock)
    ended: Future[None] = field(default_factory=Future)


class Reclaimer:
    """Gives empty pools back, one at a time."""

    def __init__(
        self,
        lvm: Lvm,
        kernel: Kernel,
        known: Inventory,
        groups: GroupLocks,
        *,
        zero: bool = True,
        retry_seconds: float = 60.0,
    ) -> None:
        self._lvm = lvm
        self._kernel = kernel
        self._inventory = known
        self._groups = groups
        self._zero = zero
        self.retry_seconds = retry_seconds
        self._stopping = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="reclaim")
        self._guard = threading.Lock()
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._timers: list[threading.Timer] = []

    def after(self, removed: Volume | Snapshot, wait_seconds: float) -> None:
        """Give a pool back that lost its last volume, and wait a moment for it.

        The volume, or snapshot, is removed, and the group was locked from its report until then.
        """
        pool = removed.group.volume(removed.name).pool
        others = [one for one in pools.members(removed.group, pool) if one.name != removed.name]
        if all(_is_wiping(one) for one in others):
            wait([self.give_back(removed.group.name, pool)], wait_seconds)

    def give_back(self, group: str, pool: str) -> Future[None]:
        """Wipe and remove a pool in the background, if it is empty by then."""
        with self._guard:
            running = self._jobs.get((group, pool))
            if running is not None and not running.kept and not running.ended.done():
                return running.ended
            job = self._jobs[group, pool] = _Job(group, pool)
            if not self._stopping.is_set():
                self._worker.submit(self._work, job)
        return job.ended

    def keep(self, group: report.Group, pool: str) -> None:
        """Have a pool for a new volume: what wipes it ends, and its volume is gone.

        The caller holds the group's lock, and read the report within.
        """
        with self._guard:
            job = self._jobs.pop((group.name, pool), None)
        if job is not None:
            job.kept = True
            # Whoever wrote has closed the device afterwards.
            with job.writing:
                pass
        for one in pools.members(group, pool):
            if _is_wiping(one):
                volumes.remove(self._lvm, group.name, one.name)

    def resume(self) -> int:
        """Go on with what an earlier process left; returns how many pools that is."""
        known, _ = self._inventory.recent()
        left = [
            (group.name, pool)
            for group in self._inventory.own_groups(known)
            for pool in _abandoned(group)
        ]
        for group_name, pool in left:
            self.give_back(group_name, pool)
        return len(left)

    def stop(self) -> None:
        """End at the next piece; the next start goes on."""
        self._stopping.set()
        with self._guard:
            for timer in self._timers:
                timer.cancel()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _work(self, job: _Job) -> None:
        try:
            self._wipe_and_remove(job)
        except Exception as error:
            _log.error("pool %s/%s is empty, but not given back: %s", job.group, job.pool, error)
            job.ended.set_exception(error)
            self._try_again(job)
        else:
            job.ended.set_result(None)

    def _try_again(self, job: _Job) -> None:
        timer = threading.Timer(self.retry_seconds, self.give_back, [job.group, job.pool])
        timer.daemon = True
        with self._guard:
            self._timers = [one for one in self._timers if one.is_alive()] + [timer]
            if not self._stopping.is_set():
                timer.start()

    def _wipe_and_remove(self, job: _Job) -> None:
        with self._groups.hold(job.group):
            if job.kept or (group := self._if_empty(job)) is None:
                return
            pool = group.volume(job.pool)
            device = self._wiping_device(group, pool) if self._zero else ""
        if device and not self._overwritten(job, pool, device):
            return
        with self._groups.hold(job.group):
            # What is in the pool goes with it, so it is looked at anew: nothing but the wipe may.
            if not job.kept and self._if_empty(job) is not None:
                volumes.remove(self._lvm, job.group, job.pool)

    def _if_empty(self, job: _Job) -> report.Group | None:
        """A fresh report of the group, if the pool is there and holds no volume of anyone's."""
        group = self._inventory.read().group(job.group)
        wipes = [one for one in pools.members(group, job.pool) if _is_wiping(one)]
        if len(wipes) == len(pools.members(group, job.pool)):
            return group if job.pool in group.volumes else None
        for one in wipes:
            volumes.remove(self._lvm, group.name, one.name)
        return None

    def _wiping_device(self, group: report.Group, pool: report.LogicalVolume) -> str:
        """The device of a volume as large as the pool's data, which is made where it is not."""
        device_class = tags.decode(pool.tags)[CLASS]
        name = wipe_name(device_class)
        if name not in group.volumes:
            facts = {inventory.STATE: inventory.WIPING, CLASS: device_class}
            size_bytes = pool.size_bytes
            thin.create(self._lvm, group.name, pool.name, name, size_bytes=size_bytes, facts=facts)
        return self._inventory.ensure_active(group.name, name).path

    def _overwritten(self, job: _Job, pool: report.LogicalVolume, device: str) -> bool:
        """Overwrite every whole chunk of the pool; False where it is to end before."""
        chunk = int(tags.decode(pool.tags)[CHUNK])
        # What is no whole chunk is never given out.
        size_bytes = pool.size_bytes // chunk * chunk
        for offset in range(0, size_bytes, _PIECE_BYTES):
            with job.writing:
                if job.kept or self._stopping.is_set():
                    return False
                self._kernel.zero_out(device, offset, min(_PIECE_BYTES, size_bytes - offset))
        return True


def _is_wiping(logical: report.LogicalVolume) -> bool:
    """Whether it is what overwrites a pool, and no volume of anyone's."""
    facts = tags.decode(logical.tags)
    return inventory.NAME not in facts and facts.get(inventory.STATE) == inventory.WIPING


def _abandoned(group: report.Group) -> list[str]:
    """Carver's pools of a group that are empty, or were being overwritten."""
    return [
        pool.name
        for pool in group.volumes.values()
        if CHUNK in tags.decode(pool.tags)
        and (not (held := pools.members(group, pool.name)) or any(_is_wiping(one) for one in held))
    ]
