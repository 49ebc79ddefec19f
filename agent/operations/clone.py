"""Clones and restores: new volumes, filled in the background with a source's data or with zeroes.

The volume is created first, with the tag `copying` and a tag with its source. When its last byte is
on the disk, the tag becomes `ready`; only then it counts as a volume. CreateVolume waits for that
until its deadline, without a lock and without counting as a call under way. At the deadline it
answers with the progress, and the CO repeats the call. Crash point: the volume has the tag
`copying`; the next start of Carver copies from the beginning.

A volume is copied from a snapshot of one moment, since the source volume may be in use. This
temporary snapshot is the bridge. The bridge is taken before the new volume is created, and removed
when the new volume is ready.

If the source is in another volume group than the new volume, only one of the two groups is locked
at a time, so that a disk that hangs delays its own group only. Between the two locks, a note in
this process (`Copier.keep_source`) keeps the source from being removed. If the process dies, the
note is lost, and at most a bridge is left.

A bridge is unused if no incomplete volume is copied from it. Carver removes an unused bridge; a
removal that fails is retried each minute, and at the next start. But an unused bridge stays while
the volume group of its volume, which the tag `copy` of the bridge names, does not answer, because
the volume may be in that group. If CreateVolume finds an unused bridge that this process took, and
that never had a volume, CreateVolume copies from that bridge. If it finds any other bridge of that
name, it starts to remove the bridge, and is answered with ABORTED.

Bridges in several volume groups may have the same name. A volume's own bridge is a snapshot of the
volume's source, taken at the time that the volume's tags record.
"""

import logging
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.operations.snapshot import INHERITED, Snapshotter
from agent.requests.requests import SNAPSHOT, VOLUME, Source
from agent.volumes import backing, records, volume_states
from agent.volumes.context import Context
from agent.volumes.erase_policy import Purpose
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import EveryGroup, Known
from agent.volumes.reports import Reports
from agent.volumes.volume_states import Call, EndedBy
from agent.work import locks
from agent.work.background import Attempts
from agent.work.group_worker import AGAIN, Job, Jobs, Steps
from lvm import names, report, thin, volumes
from lvm.lvm2 import Lvm
from lvm.tuning import Tuning
from mount import command, filesystem
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

# Time limit, in seconds, of reading a report while the lock of a volume group is held; a healthy
# group takes less.
_LOOK_SECONDS = 10.0
# Time limit, in seconds, for which a failed CreateVolume call or a deletion waits until a bridge
# snapshot is removed.
_DISMISS_SECONDS = 10.0
# Time before the caller's deadline, in seconds, at which a call that waits for a copy answers with
# the progress.
_MARGIN_SECONDS = 1.0


def source_of(own_tags: Mapping[str, str]) -> Source | None:
    """Return the source of a volume with these tags; None if the volume was created empty."""
    source_id = own_tags.get(tag.FROM)
    parsed = None if source_id is None else VolumeId.parse(source_id)
    if parsed is None:
        return None
    is_snapshot = names.is_of(ids.SNAPSHOT_PREFIX, parsed.name)
    return Source(SNAPSHOT if is_snapshot else VOLUME, str(parsed))


def find(reports: Reports, state: Known, source: Source) -> Snapshot | Volume:
    """Return the snapshot or volume that is the source of a new volume.

    Raises NoSuchSnapshot, NoSuchVolume, OtherGroup, Copying, SourceLost, NotSnapshotted if nothing
    can be copied from the source.
    """
    if source.kind == SNAPSHOT:
        snapshot = reports.snapshot(state, source.id)
        if snapshot.problem:
            raise errors.SourceLost(source.id, snapshot.problem)
        return snapshot
    return state.usable(source.id, Call.COPY_FROM)


def origin_at_snapshot(origin: Snapshot | Volume, source: Snapshot) -> Snapshot | Volume:
    """Return the origin of a copy as it was when its bridge snapshot, `source`, was taken.

    Another call may have taken the bridge. Since then the origin may have grown, been formatted, or
    had its key changed; the bridge has not. An origin that is itself a snapshot never changes, and
    is returned as it is.
    """
    if isinstance(origin, Snapshot):
        return origin
    other_tags = {key: text for key, text in origin.own_tags.items() if key not in INHERITED}
    inherited_tags = {key: source.own_tags[key] for key in INHERITED if key in source.own_tags}
    return replace(origin, size_bytes=source.size_bytes, own_tags={**other_tags, **inherited_tags})


def is_in(origin: Snapshot | Volume, group: report.Group, pool: str) -> bool:
    """Whether the source of a copy is in a certain thin pool of a volume group.

    A new volume in that pool can share the blocks of such a source.
    """
    return origin.group.uuid == group.uuid and group.volume(origin.name).pool == pool


def share(
    lvm: Lvm,
    origin: Snapshot | Volume,
    name: str,
    size_bytes: int,
    own_tags: Mapping[str, str],
    tuning: Tuning,
) -> Volume:
    """Create a thin volume that shares the blocks of its source: one command, no copy.

    The volume is ready at once, unless it has to grow, or may have a btrfs, which needs a new UUID.
    """
    group = origin.group
    present_bytes = group.volume(origin.name).size_bytes
    if present_bytes == size_bytes and not may_hold_btrfs(own_tags):
        own_tags = {**own_tags, **volume_states.tags_for(EndedBy.CALLER)}
    thin.snapshot(
        lvm, group.name, name, origin=origin.name, own_tags=own_tags, read_only=False, tuning=tuning
    )
    return Volume(VolumeId.of(group, name), backing.of(group, name), group, present_bytes, own_tags)


def may_hold_btrfs(own_tags: Mapping[str, str]) -> bool:
    """Whether a copy with these tags may hold a btrfs, which must be given a new UUID.

    The tag `formatted` may be missing if a crash came right after mkfs. The result is False for an
    encrypted copy, whose btrfs gets its UUID when the copy is opened.
    """
    if tag.ENCRYPTION in own_tags:
        return False
    return "btrfs" in (own_tags.get(tag.FORMATTED), own_tags.get(tag.FS_TYPE))


@dataclass(kw_only=True)
class Copy(Job):
    """A job that fills a new volume with the data of its source, or with zeroes."""

    volume: Volume
    # Id of the snapshot to copy from. Empty for a volume that shares the blocks of its source, or
    # that has no source.
    source_id: str
    # The snapshot to copy from: set once the job or its caller has found the snapshot, None again
    # after the copy.
    source: Snapshot | None = None
    # Whether the job still has to find the snapshot to copy from. While this is True, nothing may
    # remove that snapshot.
    awaits_source: bool = False

    def __str__(self) -> str:
        if not self.source_id and not _is_overwritten(self.volume):
            return "it is not grown yet"
        return str(self.progress)


class Copier:
    """Fills new volumes in the background."""

    def __init__(self, context: Context, snapshotter: Snapshotter) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._paces = context.paces
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._policy = context.erase_policy
        self._snapshotter = snapshotter
        # Maximum time, in seconds, for which a CreateVolume call waits until its volume is filled.
        # A call without a deadline waits as long.
        self.grace_seconds = 600.0
        self.jobs: Jobs[Copy] = Jobs(
            context.workers,
            "copy",
            self._copy,
            "cannot complete volume %s: %s",
            due_jobs=self._due_copies,
            clear_failed=self._clear_failed,
        )
        context.conflicts.add(
            EndedBy.COPIER, self.jobs, aborted=lambda job: errors.Copying(job.key, str(job))
        )
        # Jobs that remove bridge snapshots that may be unused. The jobs have no caller, and
        # therefore no deadline.
        self.bridges: Jobs[Job] = Jobs(
            context.workers,
            "bridge",
            self._sweep,
            "cannot remove the unused snapshot %s yet: %s",
        )
        # Times (Unix, in nanoseconds) at which this process took each bridge snapshot that has no
        # volume yet, by the bridge's id.
        self._unused: dict[str, int] = {}
        # Snapshots that must not be removed, because a call is about to fill a volume from them:
        # the snapshot's id, and the name of the volume.
        self._promised: set[tuple[str, str]] = set()

    def takes_bridge(self, state: Known, name: str, origin: Snapshot | Volume) -> bool:
        """Whether `prepare` will take a bridge snapshot for a new volume.

        A bridge snapshot is a further logical volume, for which the group needs room.
        """
        identity = str(_bridge_for(name, origin))
        return isinstance(origin, Volume) and self._bridge(state, identity) is None

    def prepare(
        self, state: Known, name: str, origin: Snapshot | Volume, new_group: report.Group
    ) -> Snapshot:
        """Return the snapshot from which to copy the volume called `name`.

        If the source is a volume, the snapshot is a bridge snapshot, which is taken by one command
        unless an earlier call took it. To be called with the source's group locked and a report
        that was read under that lock. The volume is to be created in the group `new_group`. Raises
        NoRoom, and NotSnapshotted for a source that lvm2 cannot take a snapshot of. If a bridge
        snapshot of that name exists and does not fit, its removal is started, and OperationPending
        is raised.
        """
        if isinstance(origin, Snapshot):
            return origin
        bridge = _bridge_for(name, origin)
        identity = str(bridge)
        copy_id = str(VolumeId.of(new_group, names.logical_volume(ids.VOLUME_PREFIX, name)))
        if (present := self._bridge(state, identity)) is not None:
            # Use the bridge snapshot of an earlier call, if this process took the bridge for this
            # volume. Crash point: the earlier call died before it created the volume.
            is_unused = self._unused.get(identity) == present.time_nanoseconds
            is_for_it = present.copy_id == copy_id and present.source_id == origin.id
            if is_unused and is_for_it and not present.problem:
                return present
            self.bridges.start(Job(identity))
            raise errors.OperationPending(f"{identity} (unused, being removed)")
        self._snapshotter.require_free(state, bridge.name)
        self._snapshotter.make_room(origin)
        try:
            new_bridge = self._snapshotter.take_snapshot(
                bridge.name, origin, {tag.NAME: name, tag.COPY: copy_id}, None
            )
        except mount_errors.CommandError:
            # Remove the bridge snapshot in the background: lvm2 may have taken it before the
            # command was ended.
            self.bridges.start(Job(identity))
            raise
        self._unused[identity] = new_bridge.time_nanoseconds
        return new_bridge

    @contextmanager
    def keep_source(self, source: Snapshot, name: str) -> Iterator[None]:
        """Prevent the removal of a snapshot while, in the `with`, a volume is created from it.

        The volume is called `name`. To be entered with the snapshot's group locked, like `prepare`,
        and left with no group locked.
        """
        promise = (str(source.id), name)
        self._promised.add(promise)
        try:
            yield
        finally:
            self._promised.discard(promise)

    def remove_bridges(self, *bridge_ids: str) -> None:
        """Remove unused bridge snapshots in the background; wait up to ten seconds for that."""
        patience = command.patience_seconds(_DISMISS_SECONDS)
        wait([self.bridges.start(Job(bridge_id)).future for bridge_id in bridge_ids], patience)

    def copies_from(self, snapshot_id: str) -> list[str]:
        """Return the volumes that this process fills, or is about to fill, from a snapshot.

        A volume that does not exist yet is returned by its name, other volumes by their ids. The
        caller holds the lock of the snapshot's group.
        """
        jobs = (job for job in self.jobs.unfinished() if job.source or job.awaits_source)
        volume_ids = [job.key for job in jobs if job.source_id == snapshot_id]
        return volume_ids + [
            name for promised_id, name in list(self._promised) if promised_id == snapshot_id
        ]

    def start(self, volume: Volume, source: Snapshot | None) -> Copy:
        """Start to fill a volume in the background; return the job, or the one under way.

        The caller holds the locks of the volume's and the source's groups, so that the source is
        not deleted before the job is known to read it. `source` is None if nothing has to be
        copied.
        """
        if source is None:
            return self.jobs.start(self._copy_of(volume, ""))
        job = self._copy_of(volume, str(source.id))
        job.source = replace(source, group=source.group.only(source.name))
        return self.jobs.start(job)

    def start_across(self, volume: Volume, source_id: str = "") -> Copy:
        """Start to fill a volume from a source in another volume group; return the job.

        A job that is under way is returned as it is. The caller holds the lock of the volume's
        group only. The job finds the source itself, with the source's group locked. `source_id` is
        passed for a volume that is newer than its report.
        """
        job = self._copy_of(volume, source_id or _source_id(volume))
        job.awaits_source = True
        return self.jobs.start(job)

    def wait(self, job: Copy) -> Volume:
        """Wait until a volume is filled, and return it; to be called with no lock held.

        Raises Copying, with the progress, if the volume is not filled one second before the
        caller's deadline, or at once if too many calls wait. If the job failed, raises the error of
        the job.
        """
        if not job.future.done():
            remaining, seconds = command.remaining_seconds(), self.grace_seconds
            if remaining is not None:
                seconds = max(0.0, min(remaining - _MARGIN_SECONDS, seconds))
            with suppress(errors.TooManyCalls), locks.without_slot(ids.group_of(job.key)):
                wait([job.future], seconds)
        if not job.future.done():
            raise errors.Copying(job.key, str(job))
        job.future.result()
        volume = job.volume
        own_tags = {**volume.own_tags, **volume_states.tags_for(EndedBy.CALLER)}
        return replace(volume, size_bytes=volume.made_bytes, own_tags=own_tags)

    def source_of(self, state: Known, volume: Volume) -> Snapshot | None:
        """Return the snapshot from which an incomplete volume is copied; None if nothing is copied.

        `state` includes the source's group. Raises NoSuchSnapshot, OtherGroup or SourceLost if the
        volume can never be completed.
        """
        source_id = _source_id(volume)
        return self._source(state, volume, source_id) if source_id else None

    def _source(self, state: Known, volume: Volume, source_id: str) -> Snapshot:
        """Return a snapshot that a volume is copied from, by the snapshot's id.

        Raises the errors of `source_of`, and GroupMissing for a bridge snapshot whose volume group
        is not on this node.
        """
        if names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(source_id)):
            # Go on with a copy that has begun, even if the snapshot is of a group snapshot that was
            # found to be half-made since. The snapshot alone shows one moment, and is kept until
            # the copy has ended.
            snapshot = state.taken_snapshot(source_id)
        elif (bridge := self._bridge_of(state, volume)) is not None:
            snapshot = bridge
        else:
            # A volume group that is missing for a moment has its bridge snapshots still.
            state.group(ids.group_of(source_id))
            origin_id = volume.own_tags.get(tag.FROM, "")
            raise errors.SourceLost(origin_id, "it was not kept; repeat the call")
        if snapshot.problem:
            raise errors.SourceLost(str(snapshot.id), snapshot.problem)
        return snapshot

    def remove_bridge_of(self, volume: Volume) -> None:
        """Remove the bridge snapshot of a deleted volume in the background, if the bridge is left.

        The volume's tags name the bridge: the source may be in another volume group, whose cached
        state may lack the bridge. For a volume that was incomplete, the method waits up to ten
        seconds for the removal. Few complete volumes still have a bridge, so for these the cached
        state decides whether a job is started.
        """
        if not (bridge_id := _bridge_id(volume)):
            return
        if volume.ended_by is EndedBy.COPIER:
            self.remove_bridges(bridge_id)
        elif self._is_in_cache(bridge_id):
            self.bridges.start(Job(bridge_id))

    def _is_in_cache(self, bridge_id: str) -> bool:
        """Whether the cached state of a volume group has a bridge snapshot.

        A bridge snapshot that the state lacks is removed by the retry of the job that failed to
        remove it.
        """
        volume_group = self._volume_groups.known(ids.group_of(bridge_id))
        cached_group = None if volume_group is None else volume_group.cached
        return cached_group is not None and backing.of_id(bridge_id).name in cached_group.volumes

    def resume(self, group: str) -> int:
        """Start the unfinished copies of a volume group anew; return how many there are.

        Jobs that remove unused bridge snapshots of the group are started, too. Raises an
        ExceptionGroup after each was tried.
        """
        with Attempts() as attempts:
            copies = 0
            with attempts.attempt():
                copies = self.jobs.start_due(group)
            state = self._reports.fresh(group)
            used_bridges = self._bridges_in_use(self._reports.every_group(state))
            for snapshot in state.snapshots():
                if snapshot.is_bridge and str(snapshot.id) not in used_bridges:
                    with attempts.attempt():
                        self.bridges.start(Job(str(snapshot.id)))
        return copies

    def _copy_of(self, volume: Volume, source_id: str) -> Copy:
        # Keep only this volume in the job's report: many jobs may wait, and each would keep a
        # report of all volumes in memory.
        volume = replace(volume, group=volume.group.only(volume.name))
        self._unused.pop(source_id, None)
        made_bytes = volume.made_bytes
        return Copy(key=str(volume.id), volume=volume, source_id=source_id, size_bytes=made_bytes)

    def _due_copies(self, group: str) -> Iterator[Copy]:
        # Hold the lock of the volume group, so that no volume in the report is completed, and used,
        # before its job exists.
        with self._volume_groups.hold(group):
            state = self._reports.fresh(group)
            state.group(group)
            for volume in state.volumes():
                if volume.ended_by is EndedBy.COPIER:
                    yield self._copy_of(volume, _source_id(volume))

    def _clear_failed(self, job: Copy) -> None:
        # Remove the bridge snapshot: the copy is complete, as its last command wrote the tag
        # although it seemed to fail. The volume may be in use.
        if bridge_id := _bridge_id(job.volume):
            self.bridges.start(Job(bridge_id))

    def _bridge_of(self, state: Known, volume: Volume) -> Snapshot | None:
        """Return the bridge snapshot from which a volume is or was copied; None if there is none.

        A bridge with the same name may be another volume's.
        """
        bridge = self._bridge(state, bridge_id) if (bridge_id := _bridge_id(volume)) else None
        if bridge is None or str(bridge.source_id) != volume.own_tags[tag.FROM]:
            return None
        time_text = str(bridge.time_nanoseconds)
        # Accept a volume whose tags lack the time of its bridge snapshot, which older versions did
        # not record.
        return bridge if volume.own_tags.get(tag.BRIDGE, time_text) == time_text else None

    def _bridge(self, state: Known, identity: str) -> Snapshot | None:
        """Return the bridge snapshot that has an id; None if it does not exist."""
        own_name = backing.of_id(identity).name
        for group in state.groups.values():
            if group.name == ids.group_of(identity) and own_name in group.volumes:
                snapshot = records.snapshot(group, group.volumes[own_name])
                return (
                    snapshot
                    if isinstance(snapshot, Snapshot) and str(snapshot.id) == identity
                    else None
                )
        return None

    def _copy(self, job: Copy) -> Steps:
        try:
            source = yield from self._fill(job)
        finally:
            job.source, job.awaits_source = None, False
        if source is not None:
            self._drop(source)

    def _fill(self, job: Copy) -> Generator[float, None, Snapshot | None]:
        """Fill a volume and tag it as ready; return the snapshot that was copied, if any."""
        source = None
        if job.source_id:
            source = yield from self._copy_all(job, job.volume)
        elif not _is_overwritten(job.volume):
            self._grow(job.volume)
        if _is_overwritten(job.volume):
            yield from self._overwrite(job, 0 if source is None else source.size_bytes)
        if may_hold_btrfs(job.volume.own_tags):
            self._renew(job.volume)
        group, name = job.volume.group.name, job.volume.name
        with self._volume_groups.hold(group):
            # Under the lock: a job that was cancelled while it waited for the lock must not tag a
            # volume that was created anew meanwhile.
            job.check()
            lvm = self._volume_groups.lvm(group)
            volume_states.hand_over(lvm, group, name, job.volume.own_tags, EndedBy.CALLER)
        return source

    def _renew(self, volume: Volume) -> None:
        """Give the btrfs on a copied volume a new UUID, if the volume has a btrfs."""
        device = self._activator.activate(volume).path
        if tag.FORMATTED in volume.own_tags or filesystem.is_on(self._kernel, device):
            filesystem.renew_uuid(self._kernel, device)

    def _grow(self, volume: Volume) -> None:
        """Extend a volume that shares the blocks of its source to its requested size.

        Such a volume begins with the size of its source.
        """
        group, size_bytes = volume.group.name, volume.made_bytes
        with self._volume_groups.hold(group):
            if volume.size_bytes < size_bytes:
                lvm = self._volume_groups.lvm(group)
                volumes.extend(lvm, group, volume.name, size_bytes=size_bytes)

    def _copy_all(self, job: Copy, volume: Volume) -> Generator[float, None, Snapshot]:
        """Copy a volume's source to the volume; return the source, which is a snapshot.

        While the job exists, nothing removes the source. Raises SourceLost if the COW store of the
        source overflowed meanwhile.
        """
        group = ids.group_of(job.source_id)
        with self._volume_groups.hold(group):
            if (source := job.source) is None:
                # Read a report: a logical volume with the snapshot's name may be only the rest of a
                # deleted snapshot that is being erased.
                with command.time_limit(_LOOK_SECONDS):
                    source = self._source(self._reports.fresh(group), volume, job.source_id)
                job.source = source
            reading = self._activator.activate_snapshot(source).path
        with self._volume_groups.hold(volume.group.name):
            writing = self._activator.activate(volume).path
        # Skip zeroes in the copy if the new volume is thin, since its unwritten blocks read as
        # zeroes.
        blank = volume.is_thin
        task = self._paces.of(volume.group.name).task(
            "copy",
            reading,
            writing,
            check=job.check,
            progress=job.progress,
        )
        # Prove that the device zeroes blocks correctly: where the source has zeroes, the copy has
        # the device zero the blocks instead of writing them.
        self._policy.prove(writing, source.size_bytes)
        for piece in task.chunks(source.size_bytes):
            with piece as (offset, length):
                self._kernel.copy(reading, writing, offset, length, blank=blank)
            yield AGAIN
        if self._activator.has_overflowed(source):
            # Check once more that the COW store of the source snapshot has not overflowed. After an
            # overflow, reads from the snapshot return wrong data, so the copy may be wrong.
            raise errors.SourceLost(str(source.id), replace(source, overflowed=True).problem)
        return source

    def _overwrite(self, job: Copy, start_bytes: int) -> Steps:
        """Write zeroes to a new volume from `start_bytes` on, behind the data that were copied."""
        device = self._activator.activate(job.volume).path
        task = self._policy.task(self._paces.of(job.volume.group.name), "zero", device, job)
        size_bytes = job.volume.size_bytes
        yield from self._policy.overwrite(
            task, device, size_bytes, start_bytes, purpose=Purpose.NEW
        )

    def _drop(self, source: Snapshot) -> None:
        """Remove the bridge snapshot of a complete volume; keep a source that is no bridge.

        An error is logged, and the removal is retried in the background.
        """
        if not source.is_bridge:
            return
        try:
            # Remove the bridge snapshot, which is unused: a deletion of the volume waits for this
            # job, so no new copy of that name can use the bridge yet.
            self._snapshotter.discard(source)
        except Exception as error:
            _log.error("cannot remove the unused snapshot %s yet: %s", source.id, error)
            self.bridges.start(Job(str(source.id)))

    def _sweep(self, job: Job) -> None:
        """Remove a bridge snapshot if a fresh report shows no volume that is copied from it.

        Raises VolumeInUse if a volume is copied from the bridge snapshot or is about to be, and
        GroupBusy if such a volume may be in a volume group that does not answer. After an error the
        job is retried, since the copy may end without removing its bridge snapshot.
        """
        group = ids.group_of(job.key)
        # Read all volume groups, since any may have a volume that is copied from the bridge
        # snapshot. No lock is held yet, because a group may hang.
        self._reports.every_group(self._reports.fresh(group))
        with self._volume_groups.hold(group):
            with command.time_limit(_LOOK_SECONDS):
                all_groups = self._reports.every_group(self._mender.mend(group))
            bridge = self._bridge(all_groups, job.key)
            if bridge is None:
                self._snapshotter.go_on(all_groups, job.key)
                return
            all_groups.require_known_unused(bridge)
            if job.key in self._bridges_in_use(all_groups):
                raise errors.VolumeInUse(job.key, "a volume is copied from it")
            self._snapshotter.require_unread(job.key)
            self._snapshotter.split_or_remove(bridge)
            self._unused.pop(job.key, None)
        self._snapshotter.erase_split(bridge)

    def _bridges_in_use(self, all_groups: EveryGroup) -> set[str]:
        """Return the ids of the bridge snapshots from which volumes are, or may be, copied."""
        copies = list(all_groups.copies())
        bridge_ids = {
            str(snapshot.id)
            for snapshot in map(partial(self._bridge_of, all_groups), copies)
            if snapshot
        }
        # Keep the bridge snapshot of a volume that lost its tag `from`, which may be put back; the
        # bridge's name is derived from the volume's.
        lost_names = {
            names.logical_volume(ids.BRIDGE_PREFIX, volume.own_tags[tag.NAME])
            for volume in copies
            if not {tag.FROM, tag.ZERO} & volume.own_tags.keys()
        }
        return bridge_ids | {
            str(snapshot.id) for snapshot in all_groups.snapshots() if snapshot.name in lost_names
        }


def _bridge_for(name: str, origin: Snapshot | Volume) -> VolumeId:
    """Return the id of the bridge snapshot from which the volume called `name` is copied."""
    return VolumeId.of(origin.group, names.logical_volume(ids.BRIDGE_PREFIX, name))


def _bridge_id(volume: Volume) -> str:
    """Return the id of the bridge snapshot of a volume's copy; empty if it never had one.

    The bridge snapshot may be removed already.
    """
    source = source_of(volume.own_tags)
    if source is None or source.kind == SNAPSHOT or (parsed := VolumeId.parse(source.id)) is None:
        return ""
    name = names.logical_volume(ids.BRIDGE_PREFIX, volume.own_tags[tag.NAME])
    return str(replace(parsed, name=name))


def _source_id(volume: Volume) -> str:
    """Return the id of the snapshot that an incomplete volume is copied from; empty if none.

    `volume` must have a report that contains the volume. A volume that shares the blocks of its
    source has an origin in the report, and needs no copy.
    """
    if volume.group.volume(volume.name).origin or (source := source_of(volume.own_tags)) is None:
        return ""
    return source.id if source.kind == SNAPSHOT else _bridge_id(volume)


def _is_overwritten(volume: Volume) -> bool:
    """Whether a new volume must be zeroed where no data are copied to it (tag `zero`).

    The result is False for a thin volume, whose unwritten blocks read as zeroes.
    """
    return tag.ZERO in volume.own_tags and not volume.is_thin
