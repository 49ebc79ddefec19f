"""Erase deleted volumes before their extents are reused, and remove them.

Free extents are zeroed in erase_free.py, empty thin pools in remove_pool.py; all three go by
erase_policy.py.
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
from agent.volumes.volume_states import Ender, Work
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

# Free extents to erase are on record as tags of their group: `sweep`, all of them; `sweepDisks`,
# those on these disks. What is freed on a missing disk is free, with its data, once the disk is
# back: lvm2 takes a disk on which nothing lies as whole by itself. Until a mark is removed nothing
# is allocated there.


def mark_for_erase(
    lvm: Lvm,
    group: report.Group,
    disks: Collection[str] = (),
    *,
    also: Mapping[str, str] = NO_TAGS,
) -> bool:
    """Tag a group so that free extents on these disks (UUIDs; all by default) are zeroed first.

    Call it before they are freed, with the group locked and a report that was read since. One
    command, which adds other tags, too; none if the mark is there already. Returns whether it was
    added.
    """
    marks = erase_marks(group)
    if tag.SWEEP in marks:
        return False
    every = tag.BETWEEN.join(sorted({*_marked_disks(marks), *disks}))
    is_named = bool(disks) and tags.fits(tag.SWEEP_DISKS, every)
    new = {tag.SWEEP_DISKS: every} if is_named else {tag.SWEEP: "yes"}
    if new == marks:
        return False
    groups.mark(lvm, group.name, old=marks, new={**new, **also})
    return True


def unmark_disk(lvm: Lvm, group: report.Group, disk: str, also: Mapping[str, str]) -> None:
    """Remove a disk (UUID) on which nothing was freed from the mark; call as `mark_for_erase`.

    The same command removes other tags.
    """
    marks = erase_marks(group)
    if disk not in _marked_disks(marks):
        return
    left = tag.BETWEEN.join(sorted({*_marked_disks(marks)} - {disk}))
    rest = {key: one for key, one in marks.items() if key != tag.SWEEP_DISKS}
    new = {**rest, tag.SWEEP_DISKS: left} if left else rest
    groups.mark(lvm, group.name, old={**marks, **also}, new=new)


def unmark_if_erased(lvm: Lvm, group: report.Group) -> bool:
    """Remove the marks if nothing is left to erase; call as `mark_for_erase`.

    Returns whether the group has no mark then.
    """
    if not erase_marks(group):
        return True
    is_busy = bool(group.moves or group.missing_disks) or is_sweep(group, ids.SWEEP)
    if is_busy or Room(group).unclean:
        return False
    unmark(lvm, group)
    return True


def unmark(lvm: Lvm, group: report.Group) -> None:
    """Remove the marks, and what is on record beside them; call as `mark_for_erase`."""
    own_tags = group.own_tags
    keys = (tag.SWEEP, tag.SWEEP_DISKS, tag.FILLED)
    groups.mark(lvm, group.name, old={key: own_tags[key] for key in keys if key in own_tags})


def remove_partial_sweep(lvm: Lvm, group: report.Group) -> None:
    """Remove the sweep volume if it lacks a disk; call as `mark_for_erase`.

    It holds no user's data, and is made again as long as the group is marked.
    """
    disks = group.volume(ids.SWEEP).disks if is_sweep(group, ids.SWEEP) else frozenset()
    if not disks.isdisjoint(group.missing_uuids):
        volumes.remove(lvm, group.name, ids.SWEEP)


def is_sweep(group: report.Group, name: str) -> bool:
    """Whether it is the volume that takes free extents to zero them; its name alone is no proof."""
    made = group.volumes.get(name)
    return name == ids.SWEEP and made is not None and bool(erase_marks(group)) and is_deleted(made)


def is_deleted(logical: report.LogicalVolume) -> bool:
    """Whether its tags say that it was deleted and only its removal is left."""
    return volume_states.is_recorded(logical.own_tags, Ender.ERASER)


def is_given_up(logical: report.LogicalVolume) -> bool:
    """Whether an operator gave up the part of it that lies on missing disks."""
    return tag.GIVEN_UP in logical.own_tags


def erase_marks(group: report.Group) -> Mapping[str, str]:
    """The group's tags that say which free extents must be zeroed; empty if none must."""
    own_tags = group.own_tags
    return {key: own_tags[key] for key in (tag.SWEEP, tag.SWEEP_DISKS) if key in own_tags}


def _marked_disks(marks: Mapping[str, str]) -> list[str]:
    return [one for one in marks.get(tag.SWEEP_DISKS, "").split(tag.BETWEEN) if one]


@dataclass(kw_only=True)
class _Wipe(Job):
    """The key is the volume's id."""

    volume: Volume
    # Set with the group locked: a volume that is gone is not tagged.
    removed: bool = False
    # A part of the volume may be overwritten, by this job or by an earlier one that failed.
    overwritten: bool = False

    @property
    def goes_on(self) -> bool:
        """Also where it failed, if the volume is not whole any more: it can only be deleted."""
        return super().goes_on or self.overwritten


class Eraser:
    """Erases and removes deleted volumes in the background.

    `emptied` is called after a thin volume or snapshot was removed, `given_up` with the name of a
    group in which an operator gave something up.
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
        # How long a job waits for a cache to be written back, and how often it looks.
        self.write_back_seconds = 2.0
        self.look_seconds = 0.5
        self.jobs: Jobs[_Wipe] = Jobs(
            context.workers,
            "wipe",
            self._steps,
            "volume %s is deleted, but not erased and removed yet: %s",
            due=self._due,
        )
        conflicts = context.conflicts
        conflicts.add(Ender.ERASER, self.jobs, aborted=_being_erased)
        conflicts.add(Work.LEFT_GROWTH, self.jobs, key_of=reservation_id)

    def delete(self, volume: Volume) -> None:
        """Erase and remove a volume; if that takes long, tag it and go on in the background.

        Raises VolumeInUse.
        """
        if volume.is_doomed:
            self._start(volume)
            return
        users.require_unused(self._kernel, self._activator, volume)
        if volume.is_encrypted:
            self._mappings.ensure_closed(volume)
        is_kept = self.policy.erases(volume) or volume.is_thin
        if volume.copy_on_write_snapshots or (volume.missing_disks and is_kept):
            # It may be long until the disk is back, or given up: the caller need not wait.
            self._put_on_record(self._wipe_of(volume))
            own_tags = {**volume.own_tags, **volume_states.tags_for(Ender.ERASER)}
            self._start(replace(volume, own_tags=own_tags))
            return
        job = self._start(volume)
        self.jobs.wait(job, self.grace_seconds)
        try:
            if not job.ended.done() and self._put_on_record(job):
                return
        except Exception:
            # The call fails, and its repetition starts a new job.
            job.cancelled.set()
            raise
        job.ended.result()

    def finish(self, volume: Volume) -> None:
        """Erase and remove a volume that is tagged already; waits a moment for it."""
        self.jobs.wait(self._start(volume), self.grace_seconds)

    def _put_on_record(self, job: _Wipe) -> bool:
        """Tag a volume as deleted, unless it is removed already."""
        group, name = job.volume.group.name, job.volume.name
        with self._volume_groups.hold(group):
            # A fresh report: the outcome of the job's own lvm2 commands may be unknown.
            if job.removed or name not in self._reports.fresh(group).group(group).volumes:
                return False
            own_tags = job.volume.own_tags
            volume_states.hand_over(self._lvm(group), group, name, own_tags, Ender.ERASER)
            job.on_record = True
        if job.ended.done():
            # It failed before it was on record, so the loop does not retry it by itself.
            self.jobs.wake(job, self.jobs.retry_seconds)
        return True

    def pending(self, volume: Volume) -> errors.OperationPending:
        """The error of a call that waits until the volume is erased, with the progress."""
        job = self.jobs.of(str(volume.id))
        if job is None:
            return errors.OperationPending(f"{volume.id} (being erased)")
        return _being_erased(job)

    def _start(self, volume: Volume) -> _Wipe:
        """Start a job, or find the one under way; raises Stopping while a called-off one ends."""
        job, earlier = self._wipe_of(volume), self.jobs.of(str(volume.id))
        job.overwritten = earlier is not None and earlier.overwritten
        job = self.jobs.start(job)
        if job.cancelled.is_set():
            raise Stopping(job.key)
        return job

    def _due(self, group: str) -> Iterator[_Wipe]:
        """A job for each deleted volume of a group.

        Raises an ExceptionGroup of why lvm2 left some suspended, which no job may write to.
        """
        # Held: a volume found is not removed and created anew before its job exists.
        with self._volume_groups.hold(group), Attempts() as attempts:
            known = self._mender.mend(group)
            known.group(group)
            for volume in known.doomed():
                with attempts.one():
                    known.require_repaired(volume)
                    yield self._wipe_of(volume)

    def _wipe_of(self, volume: Volume) -> _Wipe:
        # Many jobs may wait, and each would keep a report of all volumes.
        upon = [one.name for one in volume.group.made_of(volume.name)]
        found = volume.group.volumes.get(volume.name)
        pool = "" if found is None else found.pool
        parted = caches.parted(volume.group, volume.name)
        group = volume.group.only(volume.name, parted, pool, *upon)
        volume = replace(volume, group=group)
        is_overwritten = self.policy.erases(volume) and not pool
        return _Wipe(
            key=str(volume.id),
            volume=volume,
            size_bytes=self.policy.zeroed_bytes(volume, volume.size_bytes) * is_overwritten,
            on_record=volume.is_doomed,
        )

    def _steps(self, job: _Wipe) -> Steps:
        """Erase and remove; DeleteVolume takes NoSuchVolume for success, so it needs proof."""
        try:
            yield from self._erase_and_remove(job)
        except errors.NoSuchVolume:
            volume = job.volume
            group = self._reports.fresh(volume.group.name).group(volume.group.name)
            if volume.name in group.volumes:
                why = "it is there, and not on record as deleted; call again"
                raise errors.NotOverwritten(str(volume.id), why) from None

    def _erase_and_remove(self, job: _Wipe) -> Steps:
        """Detach the volume from its pool or origin, erase it, and remove it.

        Crash points: killed anywhere, its tag has the next start begin anew; a cache that was
        detached is found by its name, and the mark of free extents precedes the removal.
        """
        if job.volume.is_encrypted and job.volume.name in job.volume.group.volumes:
            # First of all: the copy of the header opens what is left of the volume.
            self._mappings.copies.forget(job.volume.group.volume(job.volume.name).uuid)
        volume = self._detached(job.volume)
        if volume is None:
            return
        group_name, erases = volume.group.name, self.policy.erases(volume)
        doomed, are_lost = [volume.name, *_detached_caches(volume)], True
        if erases:
            doomed, are_lost = yield from self._erase(job, volume)
        is_partial = erases and bool(volume.missing_disks)
        with self._volume_groups.hold(group_name):
            job.check()
            lvm = self._lvm(group_name)
            if is_partial:
                group = self._reports.fresh(group_name).group(group_name)
                mark_for_erase(lvm, group, volume.missing_disks if are_lost else ())
            volumes.remove(lvm, group_name, *doomed)
            job.removed = True
        if is_partial:
            _log.warning(
                "volume %s is removed; its part on the missing disks %s was not overwritten",
                *(volume.id, ", ".join(volume.missing_disks)),
            )
            self._given_up(group_name)

    def _erase(self, job: _Wipe, volume: Volume) -> Generator[float, None, tuple[list[str], bool]]:
        """Overwrite a volume, and the cache that it had.

        Returns the logical volumes to remove, and whether all that could not be overwritten lies on
        missing disks for certain. Raises NotOverwritten.
        """
        if self.policy.waits_for_disk(volume):
            raise errors.NotOverwritten(str(volume.id), _about_disks(volume))
        group = volume.group.name
        if volume.read_only:
            with self._volume_groups.hold(group):
                volumes.allow_writing(self._lvm(group), group, volume.name)
        self._activator.activate(volume, partial=bool(volume.missing_disks))
        doomed = [volume.name, *(yield from self._detach_cache(volume))]
        if self._dead_images(volume):
            # The disk may have failed only for a while (lvmraid(7)).
            with self._volume_groups.hold(group):
                volumes.refresh(self._lvm(group), group, volume.name)
        are_lost = []
        for name in doomed:
            # The volume, or its cache: a logical volume of its own for a while.
            part = replace(volume, backing=backing.of(volume.group, name))
            are_lost.append((yield from self._overwrite(job, part)))
        if dead := self._dead_images(volume):
            raise errors.NotOverwritten(
                str(volume.id),
                f"the health of its RAID images is {dead}, and D takes no writes (`lvs -a"
                f" {group}/{volume.name}`, `dmesg`). It is retried; repair or replace that disk",
            )
        return doomed, all(are_lost)

    def _detached(self, volume: Volume) -> Volume | None:
        """A volume with extents of its own, split from an origin; None if it is removed.

        It was deleted while a disk was missing, and could not be split or removed then.
        """
        found = volume.group.volumes.get(volume.name)
        if found is None or not (found.pool or volume.group.made_of(volume.name) or found.origin):
            return volume
        group = volume.group.name
        if volume.is_encrypted:
            with self._volume_groups.hold(group):
                volume = self._detachable(volume)
            if volume.group.volume(volume.name).pool:
                # Without the group, which a disk that hangs would hold up.
                self._mappings.erase(volume)
        with self._volume_groups.hold(group):
            volume = self._detachable(volume)
            logical, lvm = volume.group.volume(volume.name), self._lvm(group)
            if logical.pool:
                try:
                    volumes.remove(lvm, group, volume.name)
                finally:
                    # Even if the outcome is unknown: the pool is looked at, and no retry comes.
                    self._emptied(volume)
                return None
            if logical.is_copy_on_write:
                volumes.split(lvm, group, volume.name)
        return replace(volume, read_only=volume.read_only or logical.is_copy_on_write)

    def _detachable(self, volume: Volume) -> Volume:
        """The volume by a fresh report, if it can be detached; the group is held.

        Raises NoSuchVolume, NotOverwritten.
        """
        group = volume.group.name
        known = self._mender.mend(group)
        volume = known.doomed_volume(str(volume.id))
        if is_given_up(volume.on_disks) and volume.missing_disks:
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
        """The kernel's health characters of a RAID with failed images; empty if none failed.

        Images on missing disks do not count. No command.
        """
        logical = volume.group.volumes.get(volume.name)
        if logical is not None and logical.layout == {"linear"}:
            return ""
        status = self._activator.status(volume.group.name, volume.name)
        found, lost = (one for one in status if isinstance(one, Raid)), len(volume.missing_disks)
        return next((one.health for one in found if sum(one.failed) > lost), "")

    def _detach_cache(self, volume: Volume) -> Generator[float, None, list[str]]:
        """Make the cache a volume of its own: it holds data that was written, too.

        After a kill the volume has no cache, and the resumed job finds the detached one.
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

        lvm2 would do that within its command, with the group locked: hours, on a slow disk. The
        job raises NotOverwritten first; the kernel writes on, and the job is retried.
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

    def _overwrite(self, job: _Wipe, volume: Volume) -> Generator[float, None, bool]:
        """Overwrite a volume; returns whether all that failed lies on missing disks for certain."""
        device = self._activator.activate(volume).path
        purpose = self.policy.purpose(job.volume)
        is_partial = purpose is Purpose.PARTIAL
        whole_bytes, method = self._kernel.device_size_bytes(device), self.policy.method(job.volume)
        size_bytes = self.policy.zeroed_bytes(job.volume, whole_bytes)
        writing = partial(_overwriting, job, volume)
        if method not in classes.ERASE_HEADER_ONLY and job.volume.is_encrypted and not is_partial:
            # Without its header it cannot be read, however long the rest takes.
            with writing():
                self._mappings.erase(volume)
        are_lost = [True]

        def zero_present(offset: int, length: int, by: By) -> None:
            are_lost.append(self._zero_present(volume, device, offset, length, by))

        work = self._paces.of(volume.group.name).work(
            "erase",
            device,
            check=job.check,
            flush=partial(self._kernel.flush, device),
            progress=job.progress,
        )
        yield from self.policy.overwrite(
            work,
            device,
            size_bytes,
            purpose=purpose,
            zero=zero_present if is_partial else None,
            within=writing,
        )
        if method == classes.ERASE_DISCARD:
            with suppress(OSError):  # the disk does not support it
                self._kernel.discard(device, size_bytes, whole_bytes - size_bytes)
        return all(are_lost)

    def _zero_present(self, volume: Volume, device: str, offset: int, length: int, by: By) -> bool:
        """Zero the extents that lie on disks that are present; raises where one of these fails.

        Returns whether all that failed lie on missing disks for certain.
        """
        extent, end, are_lost = volume.group.extent_size_bytes, offset + length, True
        while offset < end:
            size = min(extent - offset % extent, end - offset)
            try:
                self._kernel.zero_out(device, offset, size, by=by)
            except OSError as error:
                is_lost = _is_lost(volume, offset // extent)
                if error.errno != errno.EIO or is_lost is False:
                    raise
                are_lost &= is_lost is True
            offset += size
        return are_lost


def reservation_id(volume_id: str) -> str:
    """The id of that logical volume; empty for the id of an inline volume."""
    parsed = VolumeId.parse(volume_id)
    if parsed is None:
        return ""
    return str(replace(parsed, name=records.reservation_name(parsed.name)))


def _being_erased(job: Job) -> errors.OperationPending:
    return errors.OperationPending(f"{job.key} (being erased: {job.progress})")


@contextmanager
def _overwriting(job: _Wipe, volume: Volume) -> Iterator[None]:
    """Write to a volume inside; raises VolumeInUse, with nothing written, where it is not free."""
    was_overwritten, job.overwritten = job.overwritten, True
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBUSY:
            job.overwritten = was_overwritten
            raise errors.VolumeInUse(str(volume.id), "its device is mounted or held") from None
        raise


def _detached_caches(volume: Volume) -> list[str]:
    """The cache that a killed job detached, if there is one."""
    found = caches.parted(volume.group, volume.name)
    return [found] if found else []


def _is_lost(volume: Volume, extent: int) -> bool | None:
    """Whether an extent of a volume lies on a missing disk; None if that is not certain.

    An extent of a striped or mirrored volume lies on several disks.
    """
    logical = volume.group.volumes.get(volume.name)
    if logical is None or logical.layout != {"linear"}:
        return None
    is_missing = {disk.name: disk.missing for disk in volume.group.disks}
    for piece in logical.ranges:
        disk, _, ends = piece.rpartition(":")
        first, _, last = ends.partition("-")
        extent -= int(last) - int(first) + 1
        if extent < 0:
            return is_missing.get(disk)
    return None


def _about_disks(volume: Volume) -> str:
    logical = volume.group.volumes.get(volume.name)
    root = logical.origin if logical is not None and logical.is_copy_on_write else ""
    holder = volume.group.volumes.get(root, volume.on_disks)
    path = f"{volume.group.name}/{holder.pool or holder.name}"
    if not volume.missing_disks:
        gone = ", ".join(volume.group.missing_uuids)
        return f"lvm2 takes nothing apart while the disk {gone} is missing; it goes on afterwards"
    return (
        f"a part of it lies on the missing disk {', '.join(volume.missing_disks)}. It goes on when"
        " the disk is back, or the volume is repaired. If the disk is lost for good, give that part"
        f" up: `lvchange --addtag {tags.format_one(tag.GIVEN_UP, 'yes')} {path}`"
    )
