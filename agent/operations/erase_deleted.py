"""Erase deleted volumes before their extents are reused, and remove them.

agent/operations/erase_free.py zeroes free extents, and agent/operations/remove_pool.py zeroes empty
thin pools. agent/volumes/erase_policy.py decides for all three how data is erased.
"""

import errno
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.settings import classes
from agent.volumes import backing, records, users, volume_states
from agent.volumes.context import Context
from agent.volumes.erase_policy import Purpose
from agent.volumes.luks_mappings import Mappings
from agent.volumes.records import Volume
from agent.volumes.volume_states import EndedBy, Work
from agent.work.background import Attempts
from agent.work.group_worker import Job, Jobs, Steps, Stopping
from lvm import caches, groups, report, tags, volumes
from lvm.devicemapper import Raid
from lvm.lvm2 import Lvm
from lvm.room import Room
from lvm.volumes import NO_TAGS
from mount import mount_errors as mount_errors
from mount.block_io import By

_log = logging.getLogger(__name__)

# The functions below keep the erase marks of a volume group: tags that say which of its free
# extents must be zeroed before they are allocated. The tag `sweep` marks all free extents of the
# group, and the tag `sweepDisks` marks those on certain disks. Until a mark is removed, the marked
# extents are allocated only for thin pools and COW stores that find no other room, and for RAID
# images that replace lost ones. Extents freed on a missing disk are marked as well: when such a
# disk is attached again, lvm2 by itself accepts a disk without allocated extents, and its free
# extents still have the old data.


def mark_for_erase(
    lvm: Lvm,
    group: report.Group,
    disks: Collection[str] = (),
    *,
    further_tags: Mapping[str, str] = NO_TAGS,
) -> bool:
    """Tag a volume group so that free extents on these disks are zeroed before they are allocated.

    `disks` are UUIDs; none means all disks, and so do UUIDs that do not fit into a tag. Call the
    function before the extents are freed, with the group's lock held and a report that was read
    under that lock. The function runs one command, which adds the tags of `further_tags` as well,
    or none if the mark exists. Returns whether the mark was added.
    """
    marks = erase_marks(group)
    if tag.SWEEP in marks:
        return False
    disk_list = tag.BETWEEN.join(sorted({*_marked_disks(marks), *disks}))
    is_named = bool(disks) and tags.fits(tag.SWEEP_DISKS, disk_list)
    new_marks = {tag.SWEEP_DISKS: disk_list} if is_named else {tag.SWEEP: "yes"}
    if new_marks == marks:
        return False
    groups.mark(lvm, group.name, old_tags=marks, new_tags={**new_marks, **further_tags})
    return True


def unmark_disk(lvm: Lvm, group: report.Group, disk: str, further_tags: Mapping[str, str]) -> None:
    """Remove a disk, on which no extents were freed, from a volume group's erase marks.

    `disk` is a UUID. The same command removes the tags of `further_tags`. If the disk has no mark
    of its own, nothing is changed, and the further tags stay. Call the function with the group's
    lock held and a report that was read under that lock.
    """
    marks = erase_marks(group)
    if disk not in _marked_disks(marks):
        return
    remaining_disks = tag.BETWEEN.join(sorted({*_marked_disks(marks)} - {disk}))
    other_marks = {key: value for key, value in marks.items() if key != tag.SWEEP_DISKS}
    new_marks = (
        {**other_marks, tag.SWEEP_DISKS: remaining_disks} if remaining_disks else other_marks
    )
    groups.mark(lvm, group.name, old_tags={**marks, **further_tags}, new_tags=new_marks)


def unmark_if_erased(lvm: Lvm, group: report.Group) -> bool:
    """Remove a volume group's erase marks if no free extents are left to zero.

    The marks stay while extents are being moved, a disk is missing, or the group has a sweep
    volume. Returns True if the group has no mark afterwards. Call the function with the group's
    lock held and a report that was read under that lock.
    """
    if not erase_marks(group):
        return True
    is_busy = bool(group.moves or group.missing_disks) or is_sweep(group, ids.SWEEP)
    if is_busy or Room(group).unclean:
        return False
    unmark(lvm, group)
    return True


def unmark(lvm: Lvm, group: report.Group) -> None:
    """Remove a volume group's erase marks, and the tag `filled`, which depends on them.

    Call the function with the group's lock held and a report that was read under that lock.
    """
    own_tags = group.own_tags
    keys = (tag.SWEEP, tag.SWEEP_DISKS, tag.FILLED)
    groups.mark(lvm, group.name, old_tags={key: own_tags[key] for key in keys if key in own_tags})


def remove_partial_sweep(lvm: Lvm, group: report.Group) -> None:
    """Remove a volume group's sweep, in which free extents are zeroed, if a part is missing.

    A part is missing if a disk of the sweep is. A sweep is a logical volume without a user's data,
    and is created again as long as the group has an erase mark. Call the function with the group's
    lock held and a report that was read under that lock.
    """
    disks = group.volume(ids.SWEEP).disks if is_sweep(group, ids.SWEEP) else frozenset()
    if not disks.isdisjoint(group.missing_uuids):
        volumes.remove(lvm, group.name, ids.SWEEP)


def is_sweep(group: report.Group, name: str) -> bool:
    """Whether a logical volume is its volume group's sweep, in which free extents are zeroed.

    The name alone is no proof: the group must have an erase mark, and the volume the tag of a
    deleted volume.
    """
    logical = group.volumes.get(name)
    return (
        name == ids.SWEEP
        and logical is not None
        and bool(erase_marks(group))
        and is_deleted(logical)
    )


def is_deleted(logical: report.LogicalVolume) -> bool:
    """Whether a logical volume's tags say that it was deleted, and has to be erased and removed."""
    return volume_states.is_recorded(logical.own_tags, EndedBy.ERASER)


def is_given_up(logical: report.LogicalVolume) -> bool:
    """Whether an operator gave up the part of a logical volume on missing disks (tag `givenUp`)."""
    return tag.GIVEN_UP in logical.own_tags


def erase_marks(group: report.Group) -> Mapping[str, str]:
    """Return the tags of a volume group that say which free extents must be zeroed.

    The result is empty if there is nothing to zero.
    """
    own_tags = group.own_tags
    return {key: own_tags[key] for key in (tag.SWEEP, tag.SWEEP_DISKS) if key in own_tags}


def _marked_disks(marks: Mapping[str, str]) -> list[str]:
    return [disk for disk in marks.get(tag.SWEEP_DISKS, "").split(tag.BETWEEN) if disk]


@dataclass(kw_only=True)
class EraseJob(Job):
    """A job that erases and removes a deleted volume; its key is the volume's id."""

    volume: Volume
    # Whether the volume was removed. The flag is set while the lock of the volume group is held, so
    # that no removed volume is tagged.
    removed: bool = False
    # Whether a part of the volume may be overwritten, by this job or by an earlier one that failed.
    overwritten: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether the job is unfinished, or has failed with a part of the volume overwritten.

        A volume that is overwritten in part can only be deleted.
        """
        return super().goes_on or self.overwritten


class Eraser:
    """Erases and removes deleted volumes in the background.

    `emptied` is called with each thin volume or snapshot after the command that removes it.
    `given_up` is called with the name of a volume group in which an operator gave up data on
    missing disks.
    """

    def __init__(
        self,
        context: Context,
        *,
        emptied: Callable[[Volume], object],
        given_up: Callable[[str], object],
    ) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._lvm = context.volume_groups.lvm
        self._paces, self._mappings = context.paces, Mappings(context)
        self.policy = context.erase_policy
        self._emptied, self._given_up = emptied, given_up
        self.grace_seconds = 2.0
        # Time for which a job waits until a cache is written back, in seconds; `look_seconds` is
        # the interval at which it checks.
        self.write_back_seconds = 2.0
        self.look_seconds = 0.5
        self.jobs: Jobs[EraseJob] = Jobs(
            context.workers,
            "wipe",
            self._steps,
            "volume %s is deleted, but not erased and removed yet: %s",
            due_jobs=self._due_jobs,
        )
        conflicts = context.conflicts
        conflicts.add(EndedBy.ERASER, self.jobs, aborted=_being_erased)
        conflicts.add(Work.LEFT_GROWTH, self.jobs, key_of=reservation_id)

    def delete(self, volume: Volume) -> None:
        """Erase and remove a volume; if that takes long, go on in the background.

        The call waits two seconds; after that the volume is tagged as deleted, and the job goes on.
        A volume that has copy-on-write snapshots, or that has to be erased and lacks a disk, is
        tagged at once and left to the background. For a volume that is tagged already, only the job
        is started. Raises VolumeInUse, and Stopping while a cancelled job of the volume has not
        ended.
        """
        if volume.is_doomed:
            self._start(volume)
            return
        users.require_unused(self._kernel, self._activator, volume)
        if volume.is_encrypted:
            self._mappings.ensure_closed(volume)
        is_kept = self.policy.erases(volume) or volume.is_thin
        if volume.copy_on_write_snapshots or (volume.missing_disks and is_kept):
            # Record the deletion and return: it may take long until the missing disk is attached
            # again or given up, or until the snapshots are erased.
            self._put_on_record(self._wipe_of(volume))
            own_tags = {**volume.own_tags, **volume_states.tags_for(EndedBy.ERASER)}
            self._start(replace(volume, own_tags=own_tags))
            return
        job = self._start(volume)
        self.jobs.wait(job, self.grace_seconds)
        try:
            if not job.future.done() and self._put_on_record(job):
                return
        except Exception:
            # Cancel the job, because the call fails; the repeated call starts a new job.
            self.jobs.cancel(job)
            raise
        job.future.result()

    def finish(self, volume: Volume) -> None:
        """Erase and remove a volume that is tagged as deleted; wait up to two seconds for that."""
        self.jobs.wait(self._start(volume), self.grace_seconds)

    def _put_on_record(self, job: EraseJob) -> bool:
        """Tag a volume as deleted; return False if it is already removed."""
        group, name = job.volume.group.name, job.volume.name
        with self._volume_groups.hold(group):
            # Read a fresh report, because the outcome of the lvm2 commands that the job ran may be
            # unknown.
            if job.removed or name not in self._reports.fresh(group).group(group).volumes:
                return False
            own_tags = job.volume.own_tags
            volume_states.hand_over(self._lvm(group), group, name, own_tags, EndedBy.ERASER)
            job.on_record = True
        if job.future.done():
            # Retry the job: the job failed before the volume was tagged as deleted, so the
            # background thread does not retry the job by itself.
            self.jobs.wake(job, self.jobs.retry_seconds)
        return True

    def pending(self, volume: Volume) -> errors.OperationPending:
        """Return the error for a call that has to wait for the erasure of a volume.

        The error has the progress, if this process erases the volume.
        """
        job = self.jobs.of(str(volume.id))
        if job is None:
            return errors.OperationPending(f"{volume.id} (being erased)")
        return _being_erased(job)

    def _start(self, volume: Volume) -> EraseJob:
        """Start the job that erases and removes a volume, or return the one under way.

        Raises Stopping while a cancelled job of the volume has not ended.
        """
        job, earlier = self._wipe_of(volume), self.jobs.of(str(volume.id))
        job.overwritten = earlier is not None and earlier.overwritten
        job = self.jobs.start(job)
        if job.cancelled.is_set():
            raise Stopping(job.key)
        return job

    def _due_jobs(self, group: str) -> Iterator[EraseJob]:
        """Yield a job for each deleted volume of a volume group.

        Raises an ExceptionGroup of the reasons why volumes that lvm2 left suspended cannot be
        repaired; no job may write to such a volume.
        """
        # Hold the lock of the volume group, so that no volume in the report is removed and created
        # anew before its job exists.
        with self._volume_groups.hold(group), Attempts() as attempts:
            state = self._mender.mend(group)
            state.group(group)
            for volume in state.doomed():
                with attempts.attempt():
                    state.require_repaired(volume)
                    yield self._wipe_of(volume)

    def _wipe_of(self, volume: Volume) -> EraseJob:
        # Keep only the logical volumes that the job needs: many jobs may wait, and each would keep
        # a report of all volumes in memory.
        snapshot_names = [logical.name for logical in volume.group.made_of(volume.name)]
        logical = volume.group.volumes.get(volume.name)
        pool = "" if logical is None else logical.pool
        detached_cache = caches.detached_cachevol(volume.group, volume.name)
        group = volume.group.only(volume.name, detached_cache, pool, *snapshot_names)
        volume = replace(volume, group=group)
        is_overwritten = self.policy.erases(volume) and not pool
        return EraseJob(
            key=str(volume.id),
            volume=volume,
            size_bytes=self.policy.zeroed_bytes(volume, volume.size_bytes) * is_overwritten,
            on_record=volume.is_doomed,
        )

    def _steps(self, job: EraseJob) -> Steps:
        """Erase and remove a volume; prove the volume's absence if it is not found.

        DeleteVolume answers NoSuchVolume with success, so a volume that exists must not cause that
        error; NotOverwritten is raised instead.
        """
        try:
            yield from self._erase_and_remove(job)
        except errors.NoSuchVolume:
            volume = job.volume
            group = self._reports.fresh(volume.group.name).group(volume.group.name)
            if volume.name in group.volumes:
                why = "it is there, and not on record as deleted; call again"
                raise errors.NotOverwritten(str(volume.id), why) from None

    def _erase_and_remove(self, job: EraseJob) -> Steps:
        """Detach a deleted volume from its pool or origin, erase it, and remove it.

        Crash points: after a crash at any step, the volume's tag has the next start of Carver begin
        anew. A cache that was detached is found by its name. The group gets its erase mark before
        extents that were not overwritten are freed.
        """
        if job.volume.is_encrypted and job.volume.name in job.volume.group.volumes:
            # Delete the backup of the LUKS header first, because the backup opens what is left of
            # the volume.
            self._mappings.copies.forget(job.volume.group.volume(job.volume.name).uuid)
        volume = self._detached(job.volume)
        if volume is None:
            return
        group_name, erases = volume.group.name, self.policy.erases(volume)
        doomed_names, are_lost = [volume.name, *_detached_caches(volume)], True
        if erases:
            doomed_names, are_lost = yield from self._erase(job, volume)
        is_partial = erases and bool(volume.missing_disks)
        with self._volume_groups.hold(group_name):
            job.check()
            lvm = self._lvm(group_name)
            if is_partial:
                group = self._reports.fresh(group_name).group(group_name)
                mark_for_erase(lvm, group, volume.missing_disks if are_lost else ())
            volumes.remove(lvm, group_name, *doomed_names)
            job.removed = True
        if is_partial:
            _log.warning(
                "volume %s is removed; its part on the missing disks %s was not overwritten",
                *(volume.id, ", ".join(volume.missing_disks)),
            )
            self._given_up(group_name)

    def _erase(
        self, job: EraseJob, volume: Volume
    ) -> Generator[float, None, tuple[list[str], bool]]:
        """Overwrite a volume and the cache that it had.

        Returns the logical volumes to remove, and whether all extents that could not be overwritten
        are certainly on missing disks. Raises NotOverwritten.
        """
        if self.policy.waits_for_disk(volume):
            raise errors.NotOverwritten(str(volume.id), _about_disks(volume))
        group = volume.group.name
        if volume.read_only:
            with self._volume_groups.hold(group):
                volumes.allow_writing(self._lvm(group), group, volume.name)
        self._activator.activate(volume, partial=bool(volume.missing_disks))
        doomed_names = [volume.name, *(yield from self._detach_cache(volume))]
        if self._dead_images(volume):
            # Refresh the volume, because its disk may have failed only for a while (lvmraid(7)).
            with self._volume_groups.hold(group):
                volumes.refresh(self._lvm(group), group, volume.name)
        are_lost = []
        for name in doomed_names:
            # Overwrite the volume and its detached cache, which is a separate logical volume until
            # it is removed.
            part = replace(volume, backing=backing.of(volume.group, name))
            are_lost.append((yield from self._overwrite(job, part)))
        if dead := self._dead_images(volume):
            raise errors.NotOverwritten(
                str(volume.id),
                f"the health of its RAID images is {dead}, and D takes no writes (`lvs -a"
                f" {group}/{volume.name}`, `dmesg`). It is retried; repair or replace that disk",
            )
        return doomed_names, all(are_lost)

    def _detached(self, volume: Volume) -> Volume | None:
        """Make a deleted volume independent of its pool or origin; None if it is removed.

        A thin volume is removed at once, and a copy-on-write snapshot is split from its origin. A
        volume gets here with a pool or origin if it was deleted while a disk was missing, when lvm2
        could neither split nor remove it.
        """
        reported = volume.group.volumes.get(volume.name)
        if reported is None or not (
            reported.pool or volume.group.made_of(volume.name) or reported.origin
        ):
            return volume
        group = volume.group.name
        if volume.is_encrypted:
            with self._volume_groups.hold(group):
                volume = self._detachable(volume)
            if volume.group.volume(volume.name).pool:
                # Erase the LUKS header without the lock of the volume group: a disk that hangs
                # would keep the lock.
                self._mappings.erase(volume)
        with self._volume_groups.hold(group):
            volume = self._detachable(volume)
            logical, lvm = volume.group.volume(volume.name), self._lvm(group)
            if logical.pool:
                try:
                    volumes.remove(lvm, group, volume.name)
                finally:
                    # Check the pool even if the outcome of the command is unknown, as no retry
                    # follows.
                    self._emptied(volume)
                return None
            if logical.is_copy_on_write:
                volumes.split(lvm, group, volume.name)
        return replace(volume, read_only=volume.read_only or logical.is_copy_on_write)

    def _detachable(self, volume: Volume) -> Volume:
        """Return a deleted volume by a fresh report, if its pool or origin lets lvm2 detach it.

        The caller holds the group's lock. Raises NoSuchVolume if the volume does not exist, and
        NotOverwritten while a disk is missing or the volume has snapshots. For a volume that an
        operator gave up, `given_up` is called before NotOverwritten is raised.
        """
        group = volume.group.name
        state = self._mender.mend(group)
        volume = state.doomed_volume(str(volume.id))
        if is_given_up(volume.allocated_volume) and volume.missing_disks:
            self._given_up(group)
            why = "it was given up, and goes when all that goes with it is deleted"
            raise errors.NotOverwritten(str(volume.id), why)
        is_thin = bool(volume.group.volume(volume.name).pool)
        if volume.missing_disks if is_thin else volume.group.missing_disks:
            raise errors.NotOverwritten(str(volume.id), _about_disks(volume))
        if volume.group.copy_on_write_of(volume.name):
            raise errors.NotOverwritten(
                str(volume.id), "its deleted snapshots are overwritten first"
            )
        return volume

    def _dead_images(self, volume: Volume) -> str:
        """Return the kernel's health characters of a RAID with failed images, else an empty string.

        A RAID with no more failed images than missing disks counts as one without failed images.
        Runs no command.
        """
        logical = volume.group.volumes.get(volume.name)
        if logical is not None and logical.layout == {"linear"}:
            return ""
        status = self._activator.status(volume.group.name, volume.name)
        raids, missing_count = (
            (target for target in status if isinstance(target, Raid)),
            len(volume.missing_disks),
        )
        return next((raid.health for raid in raids if sum(raid.failed) > missing_count), "")

    def _detach_cache(self, volume: Volume) -> Generator[float, None, list[str]]:
        """Detach a volume's cache, so that it is a separate logical volume; return its name.

        The result is a list, empty if the volume has no cache. The cache must be erased, too,
        because it holds data that was written. After a crash the volume has no cache, and the
        resumed job finds the detached one by its name.
        """
        group = volume.group
        logical = group.volumes.get(volume.name)
        if logical is None or not caches.is_cached(logical):
            return _detached_caches(volume)
        if not caches.attached(logical):
            raise errors.NotOverwritten(
                str(volume.id),
                "its cache is a pool, whose parts cannot be overwritten. Part it from the volume by"
                f" `lvconvert --splitcache {group.name}/{volume.name}`",
            )
        yield from self._write_back(volume)
        with self._volume_groups.hold(group.name):
            caches.split(self._lvm(group.name), logical)
        return [caches.attached(logical)]

    def _write_back(self, volume: Volume) -> Steps:
        """Have the kernel write a cache back before it is detached.

        lvm2 would write the cache back within its command, with the group's lock held; on a slow
        disk that takes hours. So the job raises NotOverwritten while the kernel still writes, and
        is retried. If lvm2 does not let the kernel write the cache back, the command that detaches
        the cache does.
        """
        group, name = volume.group.name, volume.name
        if caches.is_clean(self._activator.status(group, name)):
            return
        try:
            with self._volume_groups.hold(group):
                caches.clean(self._lvm(group), volume.group.volume(name))
        except mount_errors.CommandFailed as error:
            _log.warning("the cache of %s is written back by lvm2 instead: %s", volume.id, error)
            return
        deadline_seconds = time.monotonic() + self.write_back_seconds
        while not caches.is_clean(self._activator.status(group, name)):
            if time.monotonic() >= deadline_seconds:
                raise errors.NotOverwritten(
                    str(volume.id),
                    "its cache is written back first, and it is retried each minute. If the dirty"
                    f" blocks do not become fewer (`dmsetup status /dev/{group}/{name}`), look at"
                    " `dmesg`, and repair or replace the disk",
                )
            yield self.look_seconds

    def _overwrite(self, job: EraseJob, volume: Volume) -> Generator[float, None, bool]:
        """Overwrite a volume; return False if an extent that failed may be on a present disk.

        True means that all extents that could not be overwritten are certainly on missing disks.
        """
        device = self._activator.activate(volume).path
        purpose = self.policy.purpose(job.volume)
        is_partial = purpose is Purpose.PARTIAL
        whole_bytes, method = self._kernel.device_size_bytes(device), self.policy.method(job.volume)
        size_bytes = self.policy.zeroed_bytes(job.volume, whole_bytes)
        writing = partial(_overwriting, job, volume)
        if method not in classes.ERASE_HEADER_ONLY and job.volume.is_encrypted and not is_partial:
            # Erase the LUKS header first: without it the volume cannot be read, however long the
            # rest takes.
            with writing():
                self._mappings.erase(volume)
        are_lost = [True]

        def zero_present(offset: int, length: int, zeroing_method: By) -> None:
            are_lost.append(self._zero_present(volume, device, offset, length, zeroing_method))

        task = self.policy.task(self._paces.of(volume.group.name), "erase", device, job)
        yield from self.policy.overwrite(
            task,
            device,
            size_bytes,
            purpose=purpose,
            zero_piece=zero_present if is_partial else None,
            piece_context=writing,
        )
        if method == classes.ERASE_DISCARD:
            # Ignore errors, such as of a disk that does not support discards: this range need not
            # be erased, as only the LUKS header must be (ERASE_HEADER_ONLY).
            with suppress(OSError):
                self._kernel.discard(device, size_bytes, whole_bytes - size_bytes)
        return all(are_lost)

    def _zero_present(
        self, volume: Volume, device: str, offset: int, length: int, zeroing_method: By
    ) -> bool:
        """Zero the extents of a range that are on present disks.

        Raises OSError if a present disk fails. Returns whether all extents that failed are
        certainly on missing disks.
        """
        extent, end, are_lost = volume.group.extent_size_bytes, offset + length, True
        while offset < end:
            size = min(extent - offset % extent, end - offset)
            try:
                self._kernel.zero_out(device, offset, size, method=zeroing_method)
            except OSError as error:
                is_lost = _is_lost(volume, offset // extent)
                if error.errno != errno.EIO or is_lost is False:
                    raise
                are_lost &= is_lost is True
            offset += size
        return are_lost


def reservation_id(volume_id: str) -> str:
    """Return the id of the logical volume that reserves extents for a volume's growth.

    The result is empty for the id of an inline volume.
    """
    parsed = VolumeId.parse(volume_id)
    if parsed is None:
        return ""
    return str(replace(parsed, name=records.reservation_name(parsed.name)))


def _being_erased(job: Job) -> errors.OperationPending:
    return errors.OperationPending(f"{job.key} (being erased: {job.progress})")


@contextmanager
def _overwriting(job: EraseJob, volume: Volume) -> Iterator[None]:
    """Mark a job's volume as overwritten within the `with`, in which it is written to.

    Raises VolumeInUse if the volume's device is mounted or held, so that nothing was written.
    """
    was_overwritten, job.overwritten = job.overwritten, True
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBUSY:
            job.overwritten = was_overwritten
            raise errors.VolumeInUse(str(volume.id), "its device is mounted or held") from None
        raise


def _detached_caches(volume: Volume) -> list[str]:
    """Return the cache of a volume that a killed job detached; an empty list if there is none."""
    cache = caches.detached_cachevol(volume.group, volume.name)
    return [cache] if cache else []


def _is_lost(volume: Volume, extent: int) -> bool | None:
    """Whether an extent of a volume is on a missing disk; None if that is not certain.

    An extent of a striped or mirrored volume is on several disks, so the result is None.
    """
    logical = volume.group.volumes.get(volume.name)
    if logical is None or logical.layout != {"linear"}:
        return None
    is_missing = {disk.name: disk.missing for disk in volume.group.disks}
    for piece in logical.ranges:
        disk, _, ends = piece.rpartition(":")
        first_extent, _, last_extent = ends.partition("-")
        extent -= int(last_extent) - int(first_extent) + 1
        if extent < 0:
            return is_missing.get(disk)
    return None


def _about_disks(volume: Volume) -> str:
    logical = volume.group.volumes.get(volume.name)
    root = logical.origin if logical is not None and logical.is_copy_on_write else ""
    holder = volume.group.volumes.get(root, volume.allocated_volume)
    path = f"{volume.group.name}/{holder.pool or holder.name}"
    if not volume.missing_disks:
        missing_uuids = ", ".join(volume.group.missing_uuids)
        return (
            f"lvm2 takes nothing apart while the disk {missing_uuids} is missing; it goes on"
            " afterwards"
        )
    return (
        f"a part of it lies on the missing disk {', '.join(volume.missing_disks)}. It goes on when"
        " the disk is back, or the volume is repaired. If the disk is lost for good, give that part"
        f" up: `lvchange --addtag {tags.format_one(tag.GIVEN_UP, 'yes')} {path}`"
    )
