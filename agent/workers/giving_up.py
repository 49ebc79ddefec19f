"""What an operator gave up with a lost disk, and cannot be overwritten where it lies.

A thin pool of which a part is lost cannot be used at all, and a volume with snapshots cannot be
taken apart while a disk is missing: lvm2 refuses. So once all of it was deleted, and the operator
gave it up, it is removed as it is. The extents that it had on other disks are overwritten before
anyone gets them: the group is tagged first (`sweep`), and has no room from then on. When no disk is
missing any more, all its free extents are taken by a logical volume, which is overwritten and
removed; then the tag goes.

Killed at any moment the tag, and that volume, tell the next start what is left.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future

from agent import errors, fact, ids
from agent.engine.allocation import is_own_pool
from agent.engine.jobs import Job, Jobs
from agent.engine.means import Means
from lvm import groups, pools, report, tags, volumes
from lvm.volumes import New

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 128 << 20
_SWEEP = {fact.SWEEP: "yes"}


def is_given_up(logical: report.LogicalVolume) -> bool:
    """Whether an operator said that what of it is lost is not waited for."""
    return fact.GIVEN_UP in tags.decode(logical.tags)


class GivingUp:
    """Removes what was given up, and overwrites what it leaves free. The keys are `group/sweep`."""

    def __init__(self, means: Means) -> None:
        self._engines, self._kernel = means.engines, means.kernel
        self._inventory = means.inventory
        self._zero = means.config.wipe == "zero"
        self.jobs = Jobs(
            "sweep",
            self._work,
            self._find,
            "%s: free extents are not overwritten yet: %s",
            workers=1,
        )

    def start(self, group: str) -> Future[None]:
        """Have it done in the background; where it is under way, that one."""
        return self.jobs.start(Job(f"{group}/{ids.SWEEP}")).ended

    def resume(self, *groups: str) -> int:
        """Go on with what is left in these groups, or in all; returns how many groups."""
        known = self._inventory.read(*groups)
        own = groups or self._engines.names
        every = [one for one in self._inventory.own_groups(known) if one.name in own]
        left = [one for one in every if _is_to_be_swept(one) or any(_roots(one))]
        for one in left:
            self.start(one.name)
        return len(left)

    def stop(self) -> None:
        """End at the next chunk; the next start goes on."""
        self.jobs.stop()

    def _find(self, key: str) -> Job:
        name = key.partition("/")[0]
        group = self._inventory.read(name).groups.get(name)
        if group is None or not (_is_to_be_swept(group) or any(_roots(group))):
            raise errors.NoSuchVolume(key)
        return Job(key)

    def _work(self, job: Job) -> None:
        name = job.key.partition("/")[0]
        with self._engines.hold(name):
            # What was put into a pool meanwhile would go with it: a report of now.
            group = self._inventory.read(name).group(name)
            for root in _roots(group):
                self._remove(group, root)
            if not _is_to_be_swept(group := self._inventory.read(name).group(name)):
                return
            if group.missing_disks:
                gone = ", ".join(disk.uuid for disk in group.disks if disk.missing)
                raise errors.NotSwept(name, f"its disk {gone} is missing; replace it, or attach it")
            if not self._reserved(group):
                self._finish(group)
                return
        device = self._inventory.ensure_active(name, ids.SWEEP).path
        size_bytes = self._kernel.device_size_bytes(device)
        for offset in range(0, size_bytes, _CHUNK_BYTES):
            self.jobs.check(job)
            self._kernel.zero_out(device, offset, min(_CHUNK_BYTES, size_bytes - offset))
        self._kernel.flush(device)
        with self._engines.hold(name):
            volumes.remove(self._engines.lvm(name), name, ids.SWEEP)
            self._finish(group)

    def _remove(self, group: report.Group, root: report.LogicalVolume) -> None:
        lvm, held = self._engines.lvm(group.name), [one.name for one in _with(group, root)]
        if self._zero and not _is_to_be_swept(group):
            groups.mark(lvm, group.name, new=_SWEEP)
        # What is in a pool, and what is a snapshot of it, goes with it: all of it was deleted.
        volumes.remove_lost(lvm, group.name, root.name)
        gone = ", ".join(disk.uuid for disk in group.disks if disk.missing)
        _log.warning(
            "%s/%s was given up and is removed with %s; what of it lies on the missing disks %s was"
            " not overwritten",
            *(group.name, root.name, ", ".join(held) or "nothing", gone),
        )

    def _reserved(self, group: report.Group) -> bool:
        """Take all free extents, unless that is done; whether there are any."""
        if ids.SWEEP in group.volumes:
            return True
        free = sum(disk.unallocated_extents for disk in group.disks)
        if free:
            new = New(ids.SWEEP, free * group.extent_size_bytes, {fact.STATE: fact.WIPING})
            volumes.create(self._engines.lvm(group.name), group.name, new)
        return free > 0

    def _finish(self, group: report.Group) -> None:
        groups.mark(self._engines.lvm(group.name), group.name, old=_SWEEP)


def _is_to_be_swept(group: report.Group) -> bool:
    return fact.SWEEP in tags.decode(group.tags)


def _roots(group: report.Group) -> Iterator[report.LogicalVolume]:
    """Pools, and volumes with snapshots, that were given up, lack a disk, and are all deleted."""
    gone = {disk.uuid for disk in group.disks if disk.missing}
    for one in group.volumes.values():
        if not is_given_up(one) or not one.disks & gone:
            continue
        upon = _with(group, one)
        is_whole_pool = is_own_pool(one)
        is_origin = bool(upon) and _is_deleted(one) and not one.pool
        if (is_whole_pool or is_origin) and all(map(_is_deleted, upon)):
            yield one


def _with(group: report.Group, root: report.LogicalVolume) -> list[report.LogicalVolume]:
    """What goes with it: what is in it, and copy-on-write snapshots of that, or of itself."""
    inside = pools.members(group, root.name)
    upon = [snap for one in (root, *inside) for snap in group.copy_on_write_of(one.name)]
    return [*inside, *upon]


def _is_deleted(logical: report.LogicalVolume) -> bool:
    return tags.decode(logical.tags).get(fact.STATE) == fact.WIPING
