"""What an operator gave up with a lost disk, and cannot be overwritten where it lies.

A thin pool of which a part is lost cannot be used at all, and a volume with snapshots cannot be
taken apart while a disk is missing: lvm2 refuses. So once all of it was deleted, and the operator
gave it up, it is removed as it is. The extents that it had on other disks are overwritten before
anyone gets them: the group is tagged first (`sweep`), and has no room from then on. When no disk is
missing any more, all its free extents are taken by a logical volume, which is overwritten and
removed; then the tag goes.

What is freed on a missing disk alone is free, with what it held, once that disk is back: lvm2 sees
a disk as whole by itself that nothing lies on. So another tag names such disks (`sweepDisks`), and
those that extents are moved between. Of those that are there the free extents are overwritten, and
until then nobody gets any; where none is in the group any more, there is nothing to do.

Killed at any moment the tag, and that volume, tell the next start what is left. The volume bears
nothing of anyone's: while a disk is missing it is removed, and made anew when none is.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future

from agent.core import errors, ids, tag
from agent.core.allocation import is_own_pool
from agent.core.context import Context
from agent.core.jobs import Job, TaskQueue
from agent.core.luks_devices import Mappings
from agent.core.records import is_encrypted
from lvm import groups, report, tags, thin, volumes
from lvm.lvm2 import Lvm
from lvm.volumes import New

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 128 << 20
_SWEEP = {tag.SWEEP: "yes"}


def is_given_up(logical: report.LogicalVolume) -> bool:
    """Whether an operator said that what of it is lost is not waited for."""
    return tag.GIVEN_UP in tags.decode(logical.tags)


def owe(lvm: Lvm, group: report.Group, disks: Collection[str] = ()) -> bool:
    """Have what is free on these disks, by their UUIDs, overwritten before anyone gets it.

    On all where none is named. To be called before it is freed, with the group held, and a report
    that was read within; one command, none where it is on record already: whether it was put there.
    """
    told = _owed(group)
    if tag.SWEEP in told:
        return False
    every = tag.BETWEEN.join(sorted({*_named(told), *disks}))
    is_named = bool(disks) and tags.fits(tag.SWEEP_DISKS, every)
    new = {tag.SWEEP_DISKS: every} if is_named else _SWEEP
    if new == told:
        return False
    groups.mark(lvm, group.name, old=told, new=new)
    return True


def take_off(lvm: Lvm, group: report.Group, disk: str) -> None:
    """Take a disk off the record, by its UUID, on which nothing was freed. Call it as `owe`."""
    told = _owed(group)
    if disk not in _named(told):
        return
    left = tag.BETWEEN.join(sorted({*_named(told)} - {disk}))
    rest = {key: one for key, one in told.items() if key != tag.SWEEP_DISKS}
    groups.mark(lvm, group.name, old=told, new={**rest, tag.SWEEP_DISKS: left} if left else rest)


def drop(lvm: Lvm, group: report.Group) -> None:
    """Remove what takes free extents to overwrite them, where it lacks a disk.

    To be called as `owe` is. It holds nobody's data, and the tag has it made anew.
    """
    gone = {disk.uuid for disk in group.disks if disk.missing}
    if is_sweep(group, ids.SWEEP) and group.volume(ids.SWEEP).disks & gone:
        volumes.remove(lvm, group.name, ids.SWEEP)


def settle(lvm: Lvm, group: report.Group) -> bool:
    """Take it off the record where nothing is left to overwrite; whether it is off.

    To be called as `owe` is.
    """
    if not (owed := _owed(group)):
        return True
    if group.moves or group.missing_disks or is_sweep(group, ids.SWEEP) or any(_to_sweep(group)):
        return False
    groups.mark(lvm, group.name, old=owed)
    return True


def is_sweep(group: report.Group, name: str) -> bool:
    """Whether it is what takes free extents to overwrite them; its name alone proves nothing."""
    made = group.volumes.get(name)
    return name == ids.SWEEP and made is not None and bool(_owed(group)) and _is_deleted(made)


class FreedSpaceEraser:
    """Removes what was given up, and overwrites what it leaves free. The keys are `group/sweep`."""

    def __init__(self, context: Context) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._inventory = context.inventory
        self._mappings = Mappings(context)
        self._zero = context.config.wipe == "zero"
        self.jobs = TaskQueue(
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
        own = groups or self._volume_groups.names
        every = [one for one in self._inventory.own_groups(known) if one.name in own]
        left = [one for one in every if _owed(one) or any(_roots(one))]
        for one in left:
            self.start(one.name)
        return len(left)

    def stop(self) -> None:
        """End at the next chunk; the next start goes on."""
        self.jobs.stop()

    def _find(self, key: str) -> Job:
        name = key.partition("/")[0]
        group = self._inventory.read(name).groups.get(name)
        if group is None or not (_owed(group) or any(_roots(group))):
            raise errors.NoSuchVolume(key)
        return Job(key)

    def _work(self, job: Job) -> None:
        name = job.key.partition("/")[0]
        uuid, done_bytes = "", 0
        while True:
            with self._volume_groups.hold(name):
                if (group := self._take(name)) is None:
                    return
                taken = group.volume(ids.SWEEP)
                if taken.uuid == uuid and taken.size_bytes == done_bytes:
                    # Nothing was freed meanwhile that is not overwritten.
                    volumes.remove(self._volume_groups.lvm(name), name, ids.SWEEP)
                    groups.mark(self._volume_groups.lvm(name), name, old=_owed(group))
                    return
            if taken.uuid != uuid:
                # Killed, it may be overwritten in part; nobody knows which.
                uuid, done_bytes = taken.uuid, 0
            device = self._inventory.ensure_active(name, ids.SWEEP).path
            for offset in range(done_bytes, taken.size_bytes, _CHUNK_BYTES):
                self.jobs.check(job)
                self._kernel.zero_out(device, offset, min(_CHUNK_BYTES, taken.size_bytes - offset))
            self._kernel.flush(device)
            done_bytes = taken.size_bytes

    def _take(self, name: str) -> report.Group | None:
        """Take what is free and to be overwritten; the group then, None where there is no such.

        Removes what was given up before. The caller holds the group. Raises NotSwept.
        """
        # What was put into a pool meanwhile would go with it: a report of now.
        group = self._inventory.read(name).group(name)
        for root in _roots(group):
            self._remove(group, root)
        group, lvm = self._inventory.read(name).group(name), self._volume_groups.lvm(name)
        if settle(lvm, group):
            return None
        if group.missing_disks:
            if is_sweep(group, ids.SWEEP):
                # What is to be repaired may need that room, and is overwritten by the repair.
                volumes.remove(lvm, name, ids.SWEEP)
            gone = ", ".join(disk.uuid for disk in group.disks if disk.missing)
            raise errors.NotSwept(name, f"its disk {gone} is missing; replace it, or attach it")
        if group.moves:
            why = "extents are moved (`pvmove`), and what they leave is overwritten afterwards"
            raise errors.NotSwept(name, why)
        meant = list(_to_sweep(group))
        if closed := ", ".join(one.name for one in meant if not one.allocatable):
            why = f"its disk {closed} takes nothing new; open it (pvchange(8)), or take it out"
            raise errors.NotSwept(name, why)
        if meant:
            self._reserve(group, meant)
            group = self._inventory.read(name).group(name)
        return group

    def _reserve(self, group: report.Group, disks: Collection[report.PhysicalVolume]) -> None:
        """Have all that is free on these disks in one logical volume, with what is in it."""
        lvm = self._volume_groups.lvm(group.name)
        own = [disk.name for disk in disks]
        size_bytes = sum(one.unallocated_extents for one in disks) * group.extent_size_bytes
        if is_sweep(group, ids.SWEEP):
            size_bytes += group.volume(ids.SWEEP).size_bytes
            volumes.extend(lvm, group.name, ids.SWEEP, size_bytes=size_bytes, disks=own)
        else:
            new = New(ids.SWEEP, size_bytes, {tag.STATE: tag.WIPING})
            volumes.create(lvm, group.name, new, disks=own)

    def _remove(self, group: report.Group, root: report.LogicalVolume) -> None:
        lvm, held = self._volume_groups.lvm(group.name), _with(group, root)
        if self._zero or any(is_encrypted(tags.decode(one.tags)) for one in (root, *held)):
            owe(lvm, group)
        for one in (root, *held):
            self._mappings.copies.forget(one.uuid)
        # What is in a pool, and what is a snapshot of it, goes with it: all of it was deleted.
        volumes.remove_lost(lvm, group.name, root.name)
        gone = ", ".join(disk.uuid for disk in group.disks if disk.missing)
        _log.warning(
            "%s/%s was given up and is removed with %s; what of it lies on the missing disks %s was"
            " not overwritten",
            *(group.name, root.name, ", ".join(one.name for one in held) or "nothing", gone),
        )


def _to_sweep(group: report.Group) -> Iterator[report.PhysicalVolume]:
    """The disks with free extents that are to be overwritten."""
    for one in group.disks:
        if one.extents > one.allocated_extents and one.unclean:
            yield one


def _owed(group: report.Group) -> Mapping[str, str]:
    """What is on record of what is to be overwritten; empty where nothing is."""
    own_tags = tags.decode(group.tags)
    return {key: own_tags[key] for key in (tag.SWEEP, tag.SWEEP_DISKS) if key in own_tags}


def _named(told: Mapping[str, str]) -> list[str]:
    """The disks that are on record by their UUIDs."""
    return [one for one in told.get(tag.SWEEP_DISKS, "").split(tag.BETWEEN) if one]


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
    inside = thin.members(group, root.name)
    upon = [snap for one in (root, *inside) for snap in group.copy_on_write_of(one.name)]
    return [*inside, *upon]


def _is_deleted(logical: report.LogicalVolume) -> bool:
    return tags.decode(logical.tags).get(tag.STATE) == tag.WIPING
