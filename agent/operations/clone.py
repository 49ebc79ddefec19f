"""Clones and restores: new volumes, filled in the background with a source's data or with zeroes.

The volume is made first, with the tags `copying` and its source. Only when its last byte is on the
disk the tag becomes `ready`, and only then it counts as a volume. CreateVolume waits for that until
its deadline, without a lock or one of the places for calls; then it answers with the progress, and
the CO repeats the call. Crash point: the tag `copying`; the next start copies from the beginning.

A volume in use is copied from a snapshot of one moment, the bridge, which is taken before the new
volume is made and removed when that is ready. Where the source is in another group than the new
volume, one of the two groups is held at a time, so that a disk that hangs holds up its own alone:
in between the source is promised to the volume, and nothing removes it. The promise ends with the
process, which leaves a bridge at most. A bridge without an incomplete volume is unused:
its removal is retried each minute, and at the next start. It stays while the group of its volume,
which its tag `copy` names, does not answer: only there the volume may be. A call that finds one
meanwhile copies from it, if it never had a volume, and else waits until it is removed. Bridges of
several groups may have one name; a volume's own is one of its source, taken at the time that its
tags record.
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
from agent.volumes.report_age import Every, Known
from agent.volumes.reports import Reports
from agent.volumes.volume_states import Call, Ender
from agent.work import locks
from agent.work.background import Attempts
from agent.work.group_worker import AGAIN, Job, Jobs, Steps
from lvm import names, report, thin, volumes
from lvm.lvm2 import Lvm
from lvm.tuning import Tuning
from mount import command, filesystem
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

# Time limit of a report within a hold: a group that answered a moment ago needs no longer.
_LOOK_SECONDS = 10.0
# How long a call waits until an unused bridge is removed.
_DISMISS_SECONDS = 10.0
# Answer so long before the deadline, with the progress.
_MARGIN_SECONDS = 1.0


def source_of(own_tags: Mapping[str, str]) -> Source | None:
    """The source of a volume with these tags; None where it was made empty."""
    parsed = VolumeId.parse(own_tags.get(tag.FROM, ""))
    if parsed is None:
        return None
    is_snapshot = names.is_of(ids.SNAPSHOT_PREFIX, parsed.name)
    return Source(SNAPSHOT if is_snapshot else VOLUME, str(parsed))


def find(within: Reports, known: Known, source: Source) -> Snapshot | Volume:
    """The snapshot or volume that a new volume is to be made of, if it can be.

    Raises NoSuchSnapshot, NoSuchVolume, OtherGroup, Copying, SourceLost, NotSnapshotted.
    """
    if source.kind == SNAPSHOT:
        found = within.snapshot(known, source.id)
        if found.problem:
            raise errors.SourceLost(source.id, found.problem)
        return found
    return known.usable(source.id, Call.COPY_FROM)


def as_taken(origin: Snapshot | Volume, source: Snapshot) -> Snapshot | Volume:
    """The origin of a copy as it was when `source`, its bridge, was taken, perhaps by another call.

    Since then it may have grown, been formatted, or had its key changed; the bridge has not.
    """
    if isinstance(origin, Snapshot):
        return origin
    kept = {key: text for key, text in origin.own_tags.items() if key not in INHERITED}
    taken = {key: source.own_tags[key] for key in INHERITED if key in source.own_tags}
    return replace(origin, size_bytes=source.size_bytes, own_tags={**kept, **taken})


def is_in(origin: Snapshot | Volume, group: report.Group, pool: str) -> bool:
    """Whether a source is in a group's thin pool, so that a volume in it can share its blocks."""
    return origin.group.uuid == group.uuid and group.volume(origin.name).pool == pool


def share(
    lvm: Lvm,
    origin: Snapshot | Volume,
    name: str,
    size_bytes: int,
    own_tags: Mapping[str, str],
    tuning: Tuning,
) -> Volume:
    """Make a thin volume that shares the blocks of its source: one command, no copy.

    It is ready at once, unless it has to grow, or to get a file system's id of its own.
    """
    group = origin.group
    present_bytes = group.volume(origin.name).size_bytes
    if present_bytes == size_bytes and not may_hold_btrfs(own_tags):
        own_tags = {**own_tags, **volume_states.tags_for(Ender.CALLER)}
    thin.snapshot(
        lvm, group.name, name, origin=origin.name, own_tags=own_tags, read_only=False, tuning=tuning
    )
    return Volume(VolumeId.of(group, name), backing.of(group, name), group, present_bytes, own_tags)


def may_hold_btrfs(own_tags: Mapping[str, str]) -> bool:
    """Whether a copy with these tags may hold a btrfs, which needs an id of its own.

    The tag may be missing if a crash came right after mkfs. An encrypted copy gets its id when it
    is opened.
    """
    if tag.ENCRYPTION in own_tags:
        return False
    return "btrfs" in (own_tags.get(tag.FORMATTED), own_tags.get(tag.FS_TYPE))


@dataclass(kw_only=True)
class Copy(Job):
    """A volume that is being filled."""

    volume: Volume
    # The id of the snapshot to copy from; empty for a volume that shares the blocks of its source,
    # or has none.
    source_id: str
    # The snapshot itself, from when its group was held and it was found until it is read no more.
    source: Snapshot | None = None
    # Whether the job has yet to look for it, and it must stay until then.
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
        # The longest wait of a call, and that of one without a deadline.
        self.grace_seconds = 600.0
        self.jobs: Jobs[Copy] = Jobs(
            context.workers,
            "copy",
            self._copy,
            "cannot complete volume %s: %s",
            due=self._due,
            gone=self._clear_failed,
        )
        context.conflicts.add(
            Ender.COPIER, self.jobs, aborted=lambda job: errors.Copying(job.key, str(job))
        )
        # The removal of bridges that may be unused; it has no caller, and so no deadline.
        self.bridges: Jobs[Job] = Jobs(
            context.workers,
            "bridge",
            self._sweep,
            "cannot remove the unused snapshot %s yet: %s",
        )
        # When this process took each bridge that has no volume yet, by the bridge's id.
        self._unused: dict[str, int] = {}
        # The ids of snapshots from which a call is about to fill a volume, each with its name.
        self._promised: set[tuple[str, str]] = set()

    def takes_bridge(self, known: Known, name: str, origin: Snapshot | Volume) -> bool:
        """Whether `prepare` is going to take a bridge, which is a further logical volume."""
        identity = str(_bridge_for(name, origin))
        return isinstance(origin, Volume) and self._bridge(known, identity) is None

    def prepare(
        self, known: Known, name: str, origin: Snapshot | Volume, into: report.Group
    ) -> Snapshot:
        """The snapshot from which to copy the volume called `name`: the source, or a new bridge.

        To be called with the source's group held, and a report that was read within. The volume is
        to be made in the group `into`. One command for a bridge. Raises NoRoom, and
        OperationPending while one of that name is removed.
        """
        if isinstance(origin, Snapshot):
            return origin
        bridge = _bridge_for(name, origin)
        identity = str(bridge)
        copy_id = str(VolumeId.of(into, names.logical_volume(ids.VOLUME_PREFIX, name)))
        if (found := self._bridge(known, identity)) is not None:
            # Crash point: an earlier call ended before it made the volume.
            is_unused = self._unused.get(identity) == found.time_nanoseconds
            is_for_it = found.copy_id == copy_id and found.source_id == origin.id
            if is_unused and is_for_it and not found.problem:
                return found
            self.bridges.start(Job(identity))
            raise errors.OperationPending(f"{identity} (unused, being removed)")
        self._snapshotter.require_free(known, bridge.name)
        self._snapshotter.make_room(origin)
        try:
            taken = self._snapshotter.take(
                bridge.name, origin, {tag.NAME: name, tag.COPY: copy_id}, None
            )
        except mount_errors.CommandError:
            # lvm2 may have taken it before it was ended.
            self.bridges.start(Job(identity))
            raise
        self._unused[identity] = taken.time_nanoseconds
        return taken

    @contextmanager
    def promised(self, source: Snapshot, name: str) -> Iterator[None]:
        """Keep a snapshot within the `with` for the volume called `name`, which is made there.

        To be entered with the snapshot's group held, like `prepare`, and left with no group held.
        """
        promise = (str(source.id), name)
        self._promised.add(promise)
        try:
            yield
        finally:
            self._promised.discard(promise)

    def dismiss(self, *bridge_ids: str) -> None:
        """Have bridges removed in the background where unused, and wait a moment for it."""
        patience = command.patience_seconds(_DISMISS_SECONDS)
        wait([self.bridges.start(Job(one)).ended for one in bridge_ids], patience)

    def reading(self, snapshot_id: str) -> list[str]:
        """The volumes that are being filled from a snapshot, or will be; its group is held."""
        begun = (one for one in self.jobs.unfinished() if one.source or one.awaits_source)
        found = [one.key for one in begun if one.source_id == snapshot_id]
        return found + [name for one, name in list(self._promised) if one == snapshot_id]

    def start(self, volume: Volume, source: Snapshot | None) -> Copy:
        """Fill a volume in the background; the job, or the one that is under way.

        Their group is held, so that the source is not deleted before it is known to be read.
        """
        if source is None:
            return self.jobs.start(self._copy_of(volume, ""))
        job = self._copy_of(volume, str(source.id))
        job.source = replace(source, group=source.group.only(source.name))
        return self.jobs.start(job)

    def start_across(self, volume: Volume, source_id: str = "") -> Copy:
        """Fill a volume from a source in another group, of which only the volume's own is held.

        The job, or the one that is under way. It looks for the source itself, with that group held.
        `source_id` is said for a volume that is newer than its report.
        """
        job = self._copy_of(volume, source_id or _source_id(volume))
        job.awaits_source = True
        return self.jobs.start(job)

    def wait(self, job: Copy) -> Volume:
        """Wait until a volume is filled; to be called with no lock held.

        Raises Copying, with the progress, before the caller's deadline or where too many wait; or
        the job's error.
        """
        if not job.ended.done():
            remaining, seconds = command.remaining_seconds(), self.grace_seconds
            if remaining is not None:
                seconds = max(0.0, min(remaining - _MARGIN_SECONDS, seconds))
            with suppress(errors.TooManyCalls), locks.aside(ids.group_of(job.key)):
                wait([job.ended], seconds)
        if not job.ended.done():
            raise errors.Copying(job.key, str(job))
        job.ended.result()
        volume = job.volume
        own_tags = {**volume.own_tags, **volume_states.tags_for(Ender.CALLER)}
        return replace(volume, size_bytes=volume.made_bytes, own_tags=own_tags)

    def source_of(self, known: Known, volume: Volume) -> Snapshot | None:
        """The snapshot from which an incomplete volume is copied; None if it needs none.

        `known` has its source's group. Raises NoSuchSnapshot, OtherGroup or SourceLost where it can
        never be completed.
        """
        source_id = _source_id(volume)
        return self._source(known, volume, source_id) if source_id else None

    def _source(self, known: Known, volume: Volume, source_id: str) -> Snapshot:
        """The snapshot of that id, as it was when the volume was made; raises as `source_of`."""
        if names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(source_id)):
            found = self._reports.snapshot(known, source_id)
        elif (bridge := self._bridge_of(known, volume)) is not None:
            found = bridge
        else:
            was = volume.own_tags.get(tag.FROM, "")
            raise errors.SourceLost(was, "it was not kept; repeat the call")
        if found.problem:
            raise errors.SourceLost(str(found.id), found.problem)
        return found

    def clear(self, volume: Volume) -> None:
        """Have the bridge of a volume that was deleted removed, if it has one still.

        By the volume's tags: the source may be in another group, whose cached state may lack the
        bridge. A complete volume seldom has one, so there a hint decides whether to look.
        """
        if not (bridge_id := _bridge_id(volume)):
            return
        if volume.ended_by is Ender.COPIER:
            self.dismiss(bridge_id)
        elif self._is_seen(bridge_id):
            self.bridges.start(Job(bridge_id))

    def _is_seen(self, bridge_id: str) -> bool:
        """Whether the state read last has it; one that is left is removed by its own retry."""
        found = self._volume_groups.known(ids.group_of(bridge_id))
        seen = None if found is None else found.cached
        return seen is not None and backing.of_id(bridge_id).name in seen.volumes

    def resume(self, group: str) -> int:
        """Begin the unfinished copies of a group anew; returns how many there are."""
        with Attempts() as attempts:
            left = 0
            with attempts.one():
                left = self.jobs.look(group)
            known = self._reports.fresh(group)
            wanted = self._wanted(self._reports.everywhere(known))
            for one in known.snapshots():
                if one.is_bridge and str(one.id) not in wanted:
                    with attempts.one():
                        self.bridges.start(Job(str(one.id)))
        return left

    def _copy_of(self, volume: Volume, source_id: str) -> Copy:
        # Many jobs may wait, and each would keep a report of all volumes in memory.
        volume = replace(volume, group=volume.group.only(volume.name))
        self._unused.pop(source_id, None)
        made_bytes = volume.made_bytes
        return Copy(key=str(volume.id), volume=volume, source_id=source_id, size_bytes=made_bytes)

    def _due(self, group: str) -> Iterator[Copy]:
        # Held: no volume that is found is completed, and used, before its job exists.
        with self._volume_groups.hold(group):
            known = self._reports.fresh(group)
            known.group(group)
            for volume in known.volumes():
                if volume.ended_by is Ender.COPIER:
                    yield self._copy_of(volume, _source_id(volume))

    def _clear_failed(self, job: Copy) -> None:
        # The tag was written by a command that seemed to fail. The volume may be in use.
        if bridge_id := _bridge_id(job.volume):
            self.bridges.start(Job(bridge_id))

    def _bridge_of(self, known: Known, volume: Volume) -> Snapshot | None:
        """The bridge from which a volume is or was copied; another volume's may have its name."""
        bridge = self._bridge(known, bridge_id) if (bridge_id := _bridge_id(volume)) else None
        if bridge is None or str(bridge.source_id) != volume.own_tags[tag.FROM]:
            return None
        taken = str(bridge.time_nanoseconds)
        # Older versions did not record the time.
        return bridge if volume.own_tags.get(tag.BRIDGE, taken) == taken else None

    def _bridge(self, known: Known, identity: str) -> Snapshot | None:
        """The bridge of that id, if it is there."""
        own_name = backing.of_id(identity).name
        for group in known.groups.values():
            if group.name == ids.group_of(identity) and own_name in group.volumes:
                found = records.snapshot(group, group.volumes[own_name])
                return found if isinstance(found, Snapshot) and str(found.id) == identity else None
        return None

    def _copy(self, job: Copy) -> Steps:
        try:
            source = yield from self._fill(job)
        finally:
            job.source, job.awaits_source = None, False
        if source is not None:
            self._drop(source)

    def _fill(self, job: Copy) -> Generator[float, None, Snapshot | None]:
        """Fill a volume, and tag it as ready; the snapshot that it was filled from, if any."""
        source = None
        if job.source_id:
            source = yield from self._copy_all(job, job.volume)
        elif not _is_overwritten(job.volume):
            self._grow(job.volume)
        if _is_overwritten(job.volume):
            yield from self._overwrite(job, 0 if source is None else source.size_bytes)
        if may_hold_btrfs(job.volume.own_tags):
            self._renew(job.volume)
        job.check()
        group, name = job.volume.group.name, job.volume.name
        with self._volume_groups.hold(group):
            lvm = self._volume_groups.lvm(group)
            volume_states.hand_over(lvm, group, name, job.volume.own_tags, Ender.CALLER)
        return source

    def _renew(self, volume: Volume) -> None:
        """Give a copied btrfs, if there is one, an id of its own."""
        device = self._activator.activate(volume).path
        if tag.FORMATTED in volume.own_tags or filesystem.is_on(self._kernel, device):
            filesystem.renew(self._kernel, device)

    def _grow(self, volume: Volume) -> None:
        """Extend a volume that shares blocks, and so began with the size of its source."""
        group, size_bytes = volume.group.name, volume.made_bytes
        with self._volume_groups.hold(group):
            if volume.size_bytes < size_bytes:
                lvm = self._volume_groups.lvm(group)
                volumes.extend(lvm, group, volume.name, size_bytes=size_bytes)

    def _copy_all(self, job: Copy, volume: Volume) -> Generator[float, None, Snapshot]:
        """Copy all of a volume's source, which stays while this job is there; the source."""
        group = ids.group_of(job.source_id)
        with self._volume_groups.hold(group):
            if (source := job.source) is None:
                # What has its name may be left of it, and is erased: only a report tells.
                with command.time_limit(_LOOK_SECONDS):
                    source = self._source(self._reports.fresh(group), volume, job.source_id)
                job.source = source
            reading = self._activator.activate_snapshot(source).path
        with self._volume_groups.hold(volume.group.name):
            writing = self._activator.activate(volume).path
        # Unwritten blocks of a thin volume read as zeroes.
        blank = volume.is_thin
        work = self._paces.of(volume.group.name).work(
            "copy",
            reading,
            writing,
            check=job.check,
            progress=job.progress,
        )
        # Where the source has zeroes the copy has the device zero.
        self._policy.prove(writing, source.size_bytes)
        for piece in work.chunks(source.size_bytes):
            with piece as (offset, length):
                self._kernel.copy(reading, writing, offset, length, blank=blank)
            yield AGAIN
        if self._activator.has_overflowed(source):
            # It may have overflowed before the last reads.
            raise errors.SourceLost(str(source.id), replace(source, overflowed=True).problem)
        return source

    def _overwrite(self, job: Copy, start_bytes: int) -> Steps:
        """Write zeroes to the part of a new volume that no data were copied to."""
        device = self._activator.activate(job.volume).path
        work = self._paces.of(job.volume.group.name).work(
            "zero",
            device,
            check=job.check,
            flush=partial(self._kernel.flush, device),
            progress=job.progress,
        )
        size_bytes = job.volume.size_bytes
        yield from self._policy.overwrite(
            work, device, size_bytes, start_bytes, purpose=Purpose.NEW
        )

    def _drop(self, source: Snapshot) -> None:
        """Remove the bridge of a complete volume."""
        if not source.is_bridge:
            return
        try:
            # It is unused: a deletion of the volume, to make it anew, waits for this job.
            self._snapshotter.discard(source)
        except Exception as error:
            _log.error("cannot remove the unused snapshot %s yet: %s", source.id, error)
            self.bridges.start(Job(str(source.id)))

    def _sweep(self, job: Job) -> None:
        """Remove a bridge, if by a fresh report no volume is copied from it.

        Raises VolumeInUse where one is, or is about to be, and GroupBusy where one may be: then it
        is due again, since what needs the bridge now may end without it.
        """
        group = ids.group_of(job.key)
        # Any group may have such a volume. No lock is held while one that was changed may hang.
        self._reports.everywhere(self._reports.fresh(group))
        with self._volume_groups.hold(group):
            with command.time_limit(_LOOK_SECONDS):
                known = self._reports.everywhere(self._mender.mend(group))
            bridge = self._bridge(known, job.key)
            if bridge is None:
                self._snapshotter.go_on(known, job.key)
                return
            known.require_known_unused(bridge)
            if job.key in self._wanted(known):
                raise errors.VolumeInUse(job.key, "a volume is copied from it")
            self._snapshotter.require_unread(job.key)
            self._snapshotter.part(bridge)
            self._unused.pop(job.key, None)
        self._snapshotter.finish(bridge)

    def _wanted(self, known: Every) -> set[str]:
        """The ids of the bridges from which volumes are being copied."""
        left = list(known.copies())
        found = {str(one.id) for one in map(partial(self._bridge_of, known), left) if one}
        # Of one that lost its tag `from`, which may be put back, only the name tells.
        lost = {
            names.logical_volume(ids.BRIDGE_PREFIX, one.own_tags[tag.NAME])
            for one in left
            if not {tag.FROM, tag.ZERO} & one.own_tags.keys()
        }
        return found | {str(one.id) for one in known.snapshots() if one.name in lost}


def _bridge_for(name: str, origin: Snapshot | Volume) -> VolumeId:
    """The id of the bridge from which the volume called `name` is copied."""
    return VolumeId.of(origin.group, names.logical_volume(ids.BRIDGE_PREFIX, name))


def _bridge_id(volume: Volume) -> str:
    """The id of the bridge that a copy of a volume has or had; empty where it never had one."""
    source = source_of(volume.own_tags)
    if source is None or source.kind == SNAPSHOT or (parsed := VolumeId.parse(source.id)) is None:
        return ""
    name = names.logical_volume(ids.BRIDGE_PREFIX, volume.own_tags[tag.NAME])
    return str(replace(parsed, name=name))


def _source_id(volume: Volume) -> str:
    """The id of the snapshot that an incomplete volume is copied from; empty where there is none.

    By a report that has the volume: one that shares the blocks of its source has an origin.
    """
    if volume.group.volume(volume.name).origin or (source := source_of(volume.own_tags)) is None:
        return ""
    return source.id if source.kind == SNAPSHOT else _bridge_id(volume)


def _is_overwritten(volume: Volume) -> bool:
    """Whether the part without copied data is overwritten; not where blocks are shared."""
    return tag.ZERO in volume.own_tags and not volume.is_thin
