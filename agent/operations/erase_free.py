"""Zero free extents before a volume gets them: those of a growth, and those of lost disks."""

import logging
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from agent.core import errors, ids, tag
from agent.operations import erase_deleted
from agent.operations.erase_deleted import erase_marks, is_deleted, is_given_up, is_sweep
from agent.volumes import backing, records, volume_states
from agent.volumes.allocation import Allocator, is_own_pool
from agent.volumes.context import Context
from agent.volumes.erase_policy import Purpose
from agent.volumes.luks_mappings import Mappings
from agent.volumes.records import Volume
from agent.volumes.volume_states import Call, Ender, Work
from agent.work.group_worker import Job, Jobs, Steps
from lvm import layout, report, volumes
from lvm.layout import LINEAR, Layout
from lvm.room import Room
from lvm.volumes import New
from mount import command
from mount.mount_errors import CommandError

_log = logging.getLogger(__name__)

# A sweep takes what is to be zeroed in so many slices, so that pools and COW stores can grow into
# the rest meanwhile; in fewer where these would be smaller than that.
_SLICES = 32
_SMALLEST_SLICE_BYTES = 1 << 30


@dataclass(kw_only=True)
class _Growth(Job):
    """The key is the volume's id."""

    group: str
    # The logical volume that has the extents, and its UUID.
    name: str
    uuid: str


class AnotherSize(errors.Overwriting):
    """The extents of a growth to another size are being zeroed; `withdraw` ends that."""


class GrowthZeroer:
    """Zeroes the extents that a volume grows by, in a logical volume that reserves them."""

    def __init__(self, context: Context) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._lvm = context.volume_groups.lvm
        self._paces, self._policy = context.paces, context.erase_policy
        self.grace_seconds = 10.0
        # The UUIDs of reservations that are zeroed and not taken yet.
        self._done: set[str] = set()
        self.jobs: Jobs[_Growth] = Jobs(
            context.workers,
            "zero",
            self._overwrite,
            "the extents that volume %s grows by are not zeroed: %s",
        )
        self._conflicts = context.conflicts
        self._conflicts.add(Work.GROWTH, self.jobs)

    def take(self, volume: Volume, more_bytes: int, allocator: Allocator) -> tuple[str, ...]:
        """Free extents, zeroed, for a volume to grow by.

        Call it with the group locked and a report that was read since, and extend the volume at
        once. The first and the last call run two commands in all. Raises Overwriting until it is
        done, AnotherSize, NoRoom.
        """
        group, own = volume.group, records.reservation_name(volume.name)
        lvm = self._lvm(group.name)
        reserved = records.reservation(group, volume.name)
        if reserved is not None and reserved.size_bytes != _taken_bytes(volume, more_bytes):
            # An earlier call asked for another size.
            self.require_none(volume)
            volumes.remove(lvm, group.name, own)
            reserved = None
        if reserved is None:
            if more_bytes > (room := allocator.maximum_growth_bytes(volume)):
                raise errors.NoRoom(
                    group.name, more_bytes, room, f"more {allocator.purpose(group)}"
                )
            reserved = self._reserve(volume, more_bytes)
        if reserved.uuid not in self._done:
            growth = _Growth(
                key=str(volume.id),
                on_record=False,
                group=group.name,
                name=own,
                uuid=reserved.uuid,
            )
            job = self.jobs.start(growth)
            raise errors.Overwriting(job.key, str(job.progress))
        volumes.remove(lvm, group.name, own)
        self._done.discard(reserved.uuid)
        return reserved.ranges

    def require_none(self, volume: Volume) -> None:
        """Raise AnotherSize while extents for a volume are being zeroed, or may be."""
        job = self.jobs.of(str(volume.id))
        if job is not None and not job.ended.done():
            raise AnotherSize(job.key, str(job.progress))

    def withdraw(self, volume_id: str) -> None:
        """End a growth that is under way, and free its extents. A report and a command.

        Raises Stopping where a chunk takes longer than ten seconds to be zeroed.
        """
        group = ids.group_of(volume_id)
        with self._conflicts.enter(Call.EXPAND_OTHER, volume_id), self._volume_groups.hold(group):
            found = self._reports.fresh(group).group(group)
            if (reserved := records.reservation(found, backing.of_id(volume_id).name)) is not None:
                volumes.remove(self._lvm(group), group, reserved.name)

    def wait(self, volume_id: str) -> bool:
        """Wait a moment for the job that `take` started; returns whether it has ended."""
        job = self.jobs.of(volume_id)
        patience = command.patience_seconds(self.grace_seconds)
        return job is None or bool(wait([job.ended], patience).done)

    def problem(self, volume_id: str) -> Exception | None:
        """Why the last job for a volume failed, until another begins."""
        job = self.jobs.of(volume_id)
        if job is None or not job.ended.done():
            return None
        error = job.ended.exception()
        return error if isinstance(error, OSError | CommandError) else None

    def _reserve(self, volume: Volume, size_bytes: int) -> report.LogicalVolume:
        """Take the extents from the disks where the volume would grow."""
        group, shape = volume.group, volume.layout
        disks = layout.growth_placement(Room(group), group.volume(volume.name), shape)
        # As much of each disk as the volume takes there, parity and copies included.
        spread = LINEAR if shape.is_linear else Layout("striped", stripes=shape.disks)
        taken = _taken_bytes(volume, size_bytes)
        deleted = volume_states.tags_for(Ender.ERASER)
        own_tags = {tag.NAME: volume.own_tags[tag.NAME], **deleted}
        new = New(records.reservation_name(volume.name), taken, own_tags)
        volumes.create(self._lvm(group.name), group.name, new, layout=spread, disks=disks)
        return self._reports.fresh(group.name).group(group.name).volume(new.name)

    def _overwrite(self, job: _Growth) -> Steps:
        device = self._activator.ensure_active(job.group, job.name).path
        work = self._paces.of(job.group).work(
            "zero",
            device,
            check=job.check,
            flush=partial(self._kernel.flush, device),
            progress=job.progress,
        )
        size_bytes = self._kernel.device_size_bytes(device)
        yield from self._policy.overwrite(work, device, size_bytes, purpose=Purpose.NEW)
        self._done.add(job.uuid)


def _taken_bytes(volume: Volume, size_bytes: int) -> int:
    """What so much of a volume takes on all of its disks."""
    shape = volume.layout
    return size_bytes if shape.is_linear else size_bytes // shape.stripes * shape.disks


class FreedSpaceEraser:
    """Removes what an operator gave up with a lost disk, and zeroes the extents that frees.

    A thin pool that lost a part cannot be used at all, and a volume with snapshots cannot be taken
    apart while a disk is missing: lvm2 refuses. So once all of it is deleted and given up it is
    removed as it is, after the group was marked (erase.mark_for_erase): from then on nothing is
    allocated there, but for pools and COW stores that must grow. When no disk is missing any more,
    one logical volume (the sweep) takes the free extents that are marked, slice by slice, each of
    which is zeroed; when it has all it is removed, then the mark goes. It gives way to a pool or a
    COW store that finds no other room.

    After a kill at any moment the mark, and the sweep, show what is left. The sweep holds no user's
    data: it is removed while a disk is missing, and made again afterwards. Keys: `group/sweep`.
    """

    def __init__(self, context: Context) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._lvm = context.volume_groups.lvm
        self._paces, self._mappings = context.paces, Mappings(context)
        self.policy = context.erase_policy
        self.jobs: Jobs[Job] = Jobs(
            context.workers,
            "sweep",
            self._sweep,
            "%s: free extents are not zeroed yet: %s",
            due=self._due,
        )
        self._conflicts = context.conflicts
        self._conflicts.add(Work.SWEEP, self.jobs, key_of=lambda group: f"{group}/{ids.SWEEP}")

    def start(self, group: str) -> Future[None]:
        """Start the job of a group, or find the running one."""
        return self.jobs.start(Job(f"{group}/{ids.SWEEP}")).ended

    @contextmanager
    def giving_way(self, group: str) -> Iterator[None]:
        """Have no sweep of a group within the `with`; it begins anew afterwards. Raises Stopping.

        The group is not held. A report and a command.
        """
        halted = self.jobs.of(f"{group}/{ids.SWEEP}")
        try:
            with self._conflicts.enter(Call.GROW, group):
                with self._volume_groups.hold(group):
                    if is_sweep(self._reports.fresh(group).group(group), ids.SWEEP):
                        volumes.remove(self._lvm(group), group, ids.SWEEP)
                yield
        finally:
            if halted is None or halted.ended.done():
                self.start(group)
            else:
                # Its disk does not answer yet.
                halted.ended.add_done_callback(lambda _: self.start(group))

    def _due(self, name: str) -> Iterator[Job]:
        if _is_left(self._reports.fresh(name).group(name)):
            yield Job(f"{name}/{ids.SWEEP}")

    def _sweep(self, job: Job) -> Steps:
        name = job.key.partition("/")[0]
        uuid, done_bytes = "", 0
        while True:
            with self._volume_groups.hold(name):
                if (group := self._take(name)) is None:
                    return
                taken = group.volume(ids.SWEEP)
                if taken.uuid == uuid and taken.size_bytes == done_bytes:
                    # Nothing was freed meanwhile.
                    volumes.remove(self._lvm(name), name, ids.SWEEP)
                    erase_deleted.unmark(self._lvm(name), group)
                    return
            if taken.uuid != uuid:
                # An earlier process may have zeroed an unknown part of it: all is zeroed again.
                uuid, done_bytes = taken.uuid, 0
            device = self._activator.ensure_active(name, ids.SWEEP).path
            work = self._paces.of(name).work(
                "erase",
                device,
                check=job.check,
                flush=partial(self._kernel.flush, device),
                progress=job.progress,
            )
            yield from self.policy.overwrite(
                work, device, taken.size_bytes, done_bytes, purpose=Purpose.DELETED
            )
            done_bytes = taken.size_bytes

    def _take(self, name: str) -> report.Group | None:
        """Remove what was given up, and take the free extents that must be zeroed.

        The caller holds the group. Returns the group with the sweep, None if there is nothing to
        zero. Raises NotSwept.
        """
        # A fresh report: a volume that was made in a pool since would go with the pool.
        group = self._reports.fresh(name).group(name)
        for root in _roots(group):
            self._remove(group, root)
        group, lvm = self._reports.fresh(name).group(name), self._lvm(name)
        if erase_deleted.unmark_if_erased(lvm, group):
            return None
        if group.missing_disks:
            if is_sweep(group, ids.SWEEP):
                # A repair may need that room, and overwrites it.
                volumes.remove(lvm, name, ids.SWEEP)
            gone = ", ".join(group.missing_uuids)
            raise errors.NotSwept(name, f"its disk {gone} is missing; replace it, or attach it")
        if group.moves:
            why = "extents are moved (`pvmove`), and what they leave is overwritten afterwards"
            raise errors.NotSwept(name, why)
        disks = Room(group).unclean
        if closed := ", ".join(one.name for one in disks if not one.allocatable):
            why = f"its disk {closed} takes nothing new; open it (pvchange(8)), or take it out"
            raise errors.NotSwept(name, why)
        if disks:
            self._reserve(group, disks)
            group = self._reports.fresh(name).group(name)
        return group

    def _reserve(self, group: report.Group, disks: Collection[report.PhysicalVolume]) -> None:
        """Make the sweep, or extend it, by a slice of the free extents of these disks.

        In any pieces: a group's policy that wants one disk for one volume is for users' volumes.
        """
        lvm = self._lvm(group.name)
        own = [disk.name for disk in disks]
        free = sum(one.unallocated_extents for one in disks)
        whole = free + sum(one.allocated_extents for one in disks)
        smallest = -(-_SMALLEST_SLICE_BYTES // group.extent_size_bytes)
        size_bytes = min(free, max(smallest, whole // _SLICES)) * group.extent_size_bytes
        if is_sweep(group, ids.SWEEP):
            size_bytes += group.volume(ids.SWEEP).size_bytes
            volumes.extend(
                lvm, group.name, ids.SWEEP, size_bytes=size_bytes, disks=own, in_pieces=True
            )
        else:
            new = New(ids.SWEEP, size_bytes, volume_states.tags_for(Ender.ERASER))
            volumes.create(lvm, group.name, new, disks=own, in_pieces=True)

    def _remove(self, group: report.Group, root: report.LogicalVolume) -> None:
        """Remove a pool or an origin with all that depends on it; all of it was deleted."""
        lvm, held = self._lvm(group.name), _dependents(group, root)
        if self.policy.erases_any((root, *held)):
            erase_deleted.mark_for_erase(lvm, group)
        for one in (root, *held):
            self._mappings.copies.forget(one.uuid)
        volumes.remove_lost(lvm, group.name, root.name)
        gone = ", ".join(group.missing_uuids)
        _log.warning(
            "%s/%s was given up and is removed with %s; its part on the missing disks %s was not"
            " overwritten",
            *(group.name, root.name, ", ".join(one.name for one in held) or "nothing", gone),
        )


def _is_left(group: report.Group) -> bool:
    return bool(erase_marks(group)) or any(_roots(group))


def _roots(group: report.Group) -> Iterator[report.LogicalVolume]:
    """Pools and volumes with snapshots that were given up, lack a disk, and are all deleted."""
    for one in records.usable(group):
        if not is_given_up(one) or one.disks.isdisjoint(group.missing_uuids):
            continue
        held = _dependents(group, one)
        if not all(records.is_usable(group, each) for each in held):
            continue
        is_origin = bool(held) and is_deleted(one) and not one.pool
        if (is_own_pool(one) or is_origin) and all(map(is_deleted, held)):
            yield one


def _dependents(group: report.Group, root: report.LogicalVolume) -> list[report.LogicalVolume]:
    """The volumes in a pool, and the copy-on-write snapshots of these or of the root itself."""
    inside = group.in_pool(root.name)
    upon = [snap for one in (root, *inside) for snap in group.copy_on_write_of(one.name)]
    return [*inside, *upon]
