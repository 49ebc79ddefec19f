"""Zero free extents before volumes get them: for a growth, and where deleted data are left."""

import logging
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass

from agent.core import errors, ids, tag
from agent.operations import erase_deleted
from agent.operations.erase_deleted import erase_marks, is_deleted, is_given_up, is_sweep
from agent.volumes import backing, records, volume_states
from agent.volumes.allocation import Allocator, is_own_pool
from agent.volumes.context import Context
from agent.volumes.erase_policy import Purpose
from agent.volumes.luks_mappings import Mappings
from agent.volumes.records import Volume
from agent.volumes.volume_states import Call, EndedBy, Work
from agent.work.group_worker import Job, Jobs, Steps
from lvm import layout, report, volumes
from lvm.layout import LINEAR, Layout
from lvm.room import Room
from lvm.volumes import New
from mount import command
from mount.mount_errors import CommandError

_log = logging.getLogger(__name__)

# Number of steps in which a sweep (the logical volume in which free extents are zeroed) takes a
# volume group's free extents. Thin pools and COW stores can grow into the extents that the sweep
# has not taken yet.
_SLICES = 32
# Minimum size, in bytes, of the free extents that a sweep, in which they are zeroed, takes at a
# time.
_SMALLEST_SLICE_BYTES = 1 << 30


@dataclass(kw_only=True)
class _Growth(Job):
    """A job that zeroes the extents reserved for a volume's growth; its key is the volume's id."""

    group: str
    # Name and UUID of the logical volume that reserves the extents.
    name: str
    uuid: str


class AnotherSize(errors.Overwriting):
    """Raised while extents for the growth of a volume to another size are being zeroed.

    `GrowthZeroer.withdraw` cancels that growth.
    """


class GrowthZeroer:
    """Zeroes the extents that a volume grows by, in a logical volume that reserves the extents."""

    def __init__(self, context: Context) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._lvm = context.volume_groups.lvm
        self._paces, self._policy = context.paces, context.erase_policy
        self.grace_seconds = 10.0
        # UUIDs of the reserving logical volumes that are zeroed, and whose extents are not taken
        # yet.
        self._done: set[str] = set()
        self.jobs: Jobs[_Growth] = Jobs(
            context.workers,
            "zero",
            self._overwrite,
            "the extents that volume %s grows by are not zeroed: %s",
        )
        self._conflicts = context.conflicts
        self._conflicts.add(Work.GROWTH, self.jobs)

    def take_extents(
        self, volume: Volume, growth_bytes: int, allocator: Allocator
    ) -> tuple[str, ...]:
        """Return free extents, already zeroed, for a volume to grow by.

        Call the method with the group's lock held and a report that was read under that lock, and
        extend the volume at once. The first call reserves the extents and starts a job that zeroes
        them. The call after the job's end frees them for the volume. Together these two calls run
        two commands and read one report more. Raises Overwriting while the extents are being
        zeroed, AnotherSize while extents for a growth to another size are being zeroed, and NoRoom.
        """
        group, reservation = volume.group, records.reservation_name(volume.name)
        lvm = self._lvm(group.name)
        reserved = records.reservation(group, volume.name)
        if reserved is not None and reserved.size_bytes != _taken_bytes(volume, growth_bytes):
            # Free the extents that an earlier call reserved for another size.
            self.require_none(volume)
            volumes.remove(lvm, group.name, reservation)
            reserved = None
        if reserved is None:
            if growth_bytes > (free_bytes := allocator.maximum_growth_bytes(volume)):
                raise errors.NoRoom(
                    group.name, growth_bytes, free_bytes, f"more {allocator.purpose(group)}"
                )
            reserved = self._reserve(volume, growth_bytes)
        if reserved.uuid not in self._done:
            growth = _Growth(
                key=str(volume.id),
                on_record=False,
                group=group.name,
                name=reservation,
                uuid=reserved.uuid,
            )
            job = self.jobs.start(growth)
            raise errors.Overwriting(job.key, str(job.progress))
        volumes.remove(lvm, group.name, reservation)
        self._done.discard(reserved.uuid)
        return reserved.ranges

    def require_none(self, volume: Volume) -> None:
        """Raise AnotherSize while extents for a volume's growth are being zeroed."""
        job = self.jobs.of(str(volume.id))
        if job is not None and not job.future.done():
            raise AnotherSize(job.key, str(job.progress))

    def withdraw(self, volume_id: str) -> None:
        """Cancel the growth of a volume, and free its reserved extents.

        Runs a report and a command. Raises Stopping if the job takes longer than ten seconds to
        zero its present chunk.
        """
        group = ids.group_of(volume_id)
        with self._conflicts.enter(Call.EXPAND_OTHER, volume_id), self._volume_groups.hold(group):
            state = self._reports.fresh(group).group(group)
            if (reserved := records.reservation(state, backing.of_id(volume_id).name)) is not None:
                volumes.remove(self._lvm(group), group, reserved.name)

    def wait(self, volume_id: str) -> bool:
        """Wait up to ten seconds for the job that `take_extents` started.

        Returns whether the job has ended; True if there is no job.
        """
        job = self.jobs.of(volume_id)
        patience = command.patience_seconds(self.grace_seconds)
        return job is None or bool(wait([job.future], patience).done)

    def problem(self, volume_id: str) -> Exception | None:
        """Return the error with which the zeroing of a volume's new extents failed.

        The result is None if the last job has not ended, has succeeded, or failed otherwise than by
        an error of a disk or of a command.
        """
        job = self.jobs.of(volume_id)
        if job is None or not job.future.done():
            return None
        error = job.future.exception()
        return error if isinstance(error, OSError | CommandError) else None

    def _reserve(self, volume: Volume, size_bytes: int) -> report.LogicalVolume:
        """Create the logical volume that reserves extents for the growth of a volume; return it.

        The extents are on the disks on which the volume grows. Runs a command and a report.
        """
        group, shape = volume.group, volume.layout
        disks = layout.growth_placement(Room(group), group.volume(volume.name), shape)
        # Reserve as many extents of each disk as the growing volume allocates on that disk,
        # including parity and mirror images.
        spread = LINEAR if shape.is_linear else Layout("striped", stripes=shape.disks)
        allocated_bytes = _taken_bytes(volume, size_bytes)
        deleted = volume_states.tags_for(EndedBy.ERASER)
        own_tags = {tag.NAME: volume.own_tags[tag.NAME], **deleted}
        reservation = New(records.reservation_name(volume.name), allocated_bytes, own_tags)
        volumes.create(self._lvm(group.name), group.name, reservation, layout=spread, disks=disks)
        return self._reports.fresh(group.name).group(group.name).volume(reservation.name)

    def _overwrite(self, job: _Growth) -> Steps:
        device = self._activator.ensure_active(job.group, job.name).path
        task = self._policy.task(self._paces.of(job.group), "zero", device, job)
        size_bytes = self._kernel.device_size_bytes(device)
        yield from self._policy.overwrite(task, device, size_bytes, purpose=Purpose.NEW)
        self._done.add(job.uuid)


def _taken_bytes(volume: Volume, size_bytes: int) -> int:
    """Return the bytes that `size_bytes` of a volume allocate on all of its disks together.

    Parity and mirror images are included.
    """
    shape = volume.layout
    return size_bytes if shape.is_linear else size_bytes // shape.stripes * shape.disks


class FreedSpaceEraser:
    """Removes volumes that an operator gave up with a lost disk, and zeroes freed extents.

    A thin pool that lost a part cannot be used at all, and lvm2 refuses to take a volume with
    snapshots apart while a disk is missing. Such a pool or volume is removed in these steps:

    1. Wait until the pool or volume, and all volumes that depend on it, are deleted, and the
       operator gave it up (tag `givenUp`).
    2. Add the group's erase mark (erase_deleted.mark_for_erase). From now on nothing is allocated
       from the marked extents, except for thin pools and COW stores that must grow, and for RAID
       images that replace lost ones.
    3. Remove the pool or volume as it is, with all volumes that depend on it.
    4. Wait until no disk is missing.
    5. Take the marked free extents into one logical volume, the sweep, slice by slice, and zero
       each slice.
    6. When no marked extents are left outside the sweep, remove the sweep and then the mark.

    The sweep gives way to a pool or a COW store that finds no other room. After a crash at any step
    the mark and the sweep show what is left to do. The sweep holds no user's data: it is removed
    while a disk is missing, and created again afterwards. The key of a volume group's job is
    `group/sweep`.
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
            due_jobs=self._due_sweeps,
        )
        self._conflicts = context.conflicts
        self._conflicts.add(Work.SWEEP, self.jobs, key_of=lambda group: f"{group}/{ids.SWEEP}")

    def start(self, group: str) -> Future[None]:
        """Start the job that zeroes a volume group's marked free extents, or find the running one.

        Returns a future of the job's end.
        """
        return self.jobs.start(Job(f"{group}/{ids.SWEEP}")).future

    @contextmanager
    def without_sweep(self, group: str) -> Iterator[None]:
        """Free the extents that are being zeroed in a volume group, within the `with`.

        They are in a logical volume, the sweep, which is removed; the job creates the sweep anew
        afterwards. To be entered without the group's lock. Runs a report and a command. Raises
        Stopping if the job's present chunk takes too long.
        """
        job = self.jobs.of(f"{group}/{ids.SWEEP}")
        try:
            with self._conflicts.enter(Call.GROW, group):
                with self._volume_groups.hold(group):
                    if is_sweep(self._reports.fresh(group).group(group), ids.SWEEP):
                        volumes.remove(self._lvm(group), group, ids.SWEEP)
                yield
        finally:
            if job is None or job.future.done():
                self.start(group)
            else:
                # Start a new job that zeroes free extents when the cancelled job ends: that job's
                # disk does not answer yet.
                job.future.add_done_callback(lambda _: self.start(group))

    def _due_sweeps(self, name: str) -> Iterator[Job]:
        if _is_left(self._reports.fresh(name).group(name)):
            yield Job(f"{name}/{ids.SWEEP}")

    def _sweep(self, job: Job) -> Steps:
        name = job.key.partition("/")[0]
        uuid, done_bytes = "", 0
        while True:
            with self._volume_groups.hold(name):
                if (group := self._extend_sweep(name)) is None:
                    return
                sweep = group.volume(ids.SWEEP)
                if sweep.uuid == uuid and sweep.size_bytes == done_bytes:
                    # Remove the erase mark, and the sweep, the logical volume whose extents are
                    # zeroed now: no marked extents were freed while the last slice of the sweep was
                    # zeroed.
                    volumes.remove(self._lvm(name), name, ids.SWEEP)
                    erase_deleted.unmark(self._lvm(name), group)
                    return
            if sweep.uuid != uuid:
                # Zero the sweep, the logical volume with free extents, from its beginning: an
                # earlier process may have zeroed an unknown part of it.
                uuid, done_bytes = sweep.uuid, 0
            device = self._activator.ensure_active(name, ids.SWEEP).path
            task = self.policy.task(self._paces.of(name), "erase", device, job)
            yield from self.policy.overwrite(
                task, device, sweep.size_bytes, done_bytes, purpose=Purpose.DELETED
            )
            done_bytes = sweep.size_bytes

    def _extend_sweep(self, name: str) -> report.Group | None:
        """Remove volumes that an operator gave up, and take free extents into a sweep.

        An operator gives up volumes that lost data with a disk. The sweep is the logical volume in
        which free extents are zeroed; each call of this method adds one slice to the sweep. The
        caller holds the group's lock. Returns the group with the sweep, or None if there is nothing
        to zero. Raises FreeExtentsNotErased if the extents cannot be zeroed now: a disk is missing
        or takes no allocations, or extents are being moved.
        """
        # Read a fresh report: a volume that was created in a pool since the last report would be
        # removed with the pool.
        group = self._reports.fresh(name).group(name)
        for root in _removable_roots(group):
            self._remove(group, root)
        group, lvm = self._reports.fresh(name).group(name), self._lvm(name)
        if erase_deleted.unmark_if_erased(lvm, group):
            return None
        if group.missing_disks:
            if is_sweep(group, ids.SWEEP):
                # Remove the sweep, the logical volume in which free extents are zeroed: the repair
                # of a volume may need these extents, and overwrites them anyway.
                volumes.remove(lvm, name, ids.SWEEP)
            missing_uuids = ", ".join(group.missing_uuids)
            raise errors.FreeExtentsNotErased(
                name, f"its disk {missing_uuids} is missing; replace it, or attach it"
            )
        if group.moves:
            why = "extents are moved (`pvmove`), and what they leave is overwritten afterwards"
            raise errors.FreeExtentsNotErased(name, why)
        disks = Room(group).unclean
        if closed := ", ".join(disk.name for disk in disks if not disk.allocatable):
            why = f"its disk {closed} takes nothing new; open it (pvchange(8)), or take it out"
            raise errors.FreeExtentsNotErased(name, why)
        if disks:
            self._reserve(group, disks)
            group = self._reports.fresh(name).group(name)
        return group

    def _reserve(self, group: report.Group, disks: Collection[report.PhysicalVolume]) -> None:
        """Create or extend the logical volume in which a volume group's free extents are zeroed.

        The logical volume is the sweep; it gets one slice of the free extents of `disks`. The slice
        may consist of any pieces: a group's policy that wants one disk for one volume is for users'
        volumes only.
        """
        lvm = self._lvm(group.name)
        disk_names = [disk.name for disk in disks]
        free_extents = sum(disk.unallocated_extents for disk in disks)
        all_extents = free_extents + sum(disk.allocated_extents for disk in disks)
        smallest_slice = -(-_SMALLEST_SLICE_BYTES // group.extent_size_bytes)
        size_bytes = (
            min(free_extents, max(smallest_slice, all_extents // _SLICES)) * group.extent_size_bytes
        )
        if is_sweep(group, ids.SWEEP):
            size_bytes += group.volume(ids.SWEEP).size_bytes
            volumes.extend(
                lvm, group.name, ids.SWEEP, size_bytes=size_bytes, disks=disk_names, in_pieces=True
            )
        else:
            sweep = New(ids.SWEEP, size_bytes, volume_states.tags_for(EndedBy.ERASER))
            volumes.create(lvm, group.name, sweep, disks=disk_names, in_pieces=True)

    def _remove(self, group: report.Group, root: report.LogicalVolume) -> None:
        """Remove a thin pool or an origin that an operator gave up, with all volumes that need it.

        The caller knows that all of them are deleted. The volume group gets its erase mark first,
        if one of the volumes has to be erased.
        """
        lvm, dependents = self._lvm(group.name), _dependents(group, root)
        if self.policy.erases_any((root, *dependents)):
            erase_deleted.mark_for_erase(lvm, group)
        for logical in (root, *dependents):
            self._mappings.copies.forget(logical.uuid)
        volumes.remove_lost(lvm, group.name, root.name)
        missing_uuids = ", ".join(group.missing_uuids)
        _log.warning(
            "%s/%s was given up and is removed with %s; its part on the missing disks %s was not"
            " overwritten",
            *(
                group.name,
                root.name,
                ", ".join(dependent.name for dependent in dependents) or "nothing",
                missing_uuids,
            ),
        )


def _is_left(group: report.Group) -> bool:
    return bool(erase_marks(group)) or any(_removable_roots(group))


def _removable_roots(group: report.Group) -> Iterator[report.LogicalVolume]:
    """Yield the thin pools and origins of a volume group that an operator gave up, to be removed.

    Each of them was given up (tag `givenUp`), has a part on a missing disk, and is deleted with all
    its dependents. A thin pool counts as deleted if all its volumes are.
    """
    for logical in records.usable_logical_volumes(group):
        if not is_given_up(logical) or logical.disks.isdisjoint(group.missing_uuids):
            continue
        dependents = _dependents(group, logical)
        if not all(records.is_usable(group, dependent) for dependent in dependents):
            continue
        is_origin = bool(dependents) and is_deleted(logical) and not logical.pool
        if (is_own_pool(logical) or is_origin) and all(map(is_deleted, dependents)):
            yield logical


def _dependents(group: report.Group, root: report.LogicalVolume) -> list[report.LogicalVolume]:
    """Return the volumes that are lost with a thin pool or an origin, which is `root`.

    These are the volumes in the pool, and the copy-on-write snapshots of these and of `root`.
    """
    thin_volumes = group.in_pool(root.name)
    snapshots = [
        snapshot
        for logical in (root, *thin_volumes)
        for snapshot in group.copy_on_write_of(logical.name)
    ]
    return [*thin_volumes, *snapshots]
