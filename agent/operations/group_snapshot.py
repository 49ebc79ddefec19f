"""CreateVolumeGroupSnapshot, and its Get and Delete: snapshots of several volumes at one moment.

Active volumes are suspended together meanwhile. The snapshots count only once all were taken and
have the tag `committed`; without it, an error or the next start undoes those that were. What an
error could not undo is retried each minute.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.groups.node_groups import HeldGroups
from agent.groups.quiesce import Quiesce
from agent.operations.erase_deleted import Eraser
from agent.operations.snapshot import Snapshotter
from agent.requests.requests import CreateGroupSnapshot, KnownGroupSnapshot
from agent.volumes import backing, records, users
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import Every, Fresh, Known
from agent.volumes.volume_states import Call
from agent.work.background import Attempts
from agent.work.group_worker import Job, Jobs
from lvm import names, tags, volumes
from lvm.active_devices import Device
from mount import command, loop, table

_log = logging.getLogger(__name__)

# How many snapshots one command marks, which a start may have to do for many group snapshots.
_MOST_MARKED = 100
# The time limit to undo what failed, also after the caller's deadline.
_UNDOING_SECONDS = 60.0
# How long after a failed call what it left is undone: by then the call has answered.
_ANSWERED_SECONDS = 1.0
_NOT_UNDONE = "cannot undo the half-made group snapshot %s yet: %s"


@dataclass(kw_only=True)
class _Undo(Job):
    """The key is the id of a group snapshot, of which a failed call may have left parts."""

    # The groups of its sources.
    groups: Set[str]


@dataclass(frozen=True)
class GroupSnapshot:
    """Snapshots of one moment, in the order of their ids."""

    id: str
    snapshots: tuple[Snapshot, ...]

    @property
    def time_nanoseconds(self) -> int:
        """The moment, in nanoseconds of the epoch."""
        return self.snapshots[0].time_nanoseconds

    @property
    def is_ready(self) -> bool:
        """Whether volumes can be made of all of them."""
        return all(one.is_ready for one in self.snapshots)


class GroupSnapshotter:
    """Takes, finds and deletes group snapshots."""

    def __init__(self, context: Context, snapshotter: Snapshotter, eraser: Eraser) -> None:
        self._configuration, self._kernel = context.configuration, context.kernel
        self._limiter, self._conflicts = context.limiter, context.conflicts
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._devices = context.devices
        self._snapshotter = snapshotter
        self._eraser = eraser
        self._locks = context.locks
        # Longer than lvm2 needs for many volumes, shorter than a wait that suggests a dead disk.
        self.quiesce_seconds = 20.0
        # What failed calls could not undo at once.
        self.undone: Jobs[_Undo] = Jobs(context.workers, "undo", self._undo_again, _NOT_UNDONE)

    @staticmethod
    def logical_name(name: str) -> str:
        """The name that calls on one group snapshot lock; no logical volume has it."""
        return names.logical_volume(ids.GROUP_SNAPSHOT_PREFIX, name)

    def create(self, call: CreateGroupSnapshot) -> GroupSnapshot:
        """Take snapshots of all sources at one moment, or find those that an earlier call took.

        One command for each source, and a report. Raises NotTogether, QuiesceOver, NoRoom,
        NotSnapshotted.
        """
        sources = {ids.group_of(one) for one in call.source_ids}
        for one in call.source_ids:
            source = backing.of_id(one)
            with self._limiter.lifted(source):
                users.flush(self._kernel, self._activator, source)
        own_name = self.logical_name(call.name)
        groups = self._groups(sources, lambda known: self._named(known, own_name))
        with ExitStack() as undo, self._volume_groups.hold(*groups) as turns:
            known = self._mender.mend(*groups)
            every = self._reports.everywhere(known)
            found = self._named(every, own_name)
            if not found:
                return self._make(call, known, undo, turns)
            if records.is_whole(found) and not self._is_to_be_undone(found):
                same = _same(_group_snapshot(found), call)
                self._commit(found)
                return same
            if not records.is_whole(found):
                self._require_half_made(every, found)
        # Crash point: some of the snapshots are there, or an error could not be undone.
        self._discard(known, found[0].group_snapshot_id)
        return self.create(call)

    def get(self, call: KnownGroupSnapshot) -> GroupSnapshot:
        """The group snapshot of that id; raises NoSuchGroupSnapshot. A report of its groups."""
        if not _is_one(call.id):
            raise errors.NoSuchGroupSnapshot(call.id)
        every = self._reports.everywhere(self._reports.fresh(*self._groups_of(call.id)))
        found = self._find(every, call.id)
        if not records.is_whole(found):
            self._require_half_made(every, found)
            raise errors.NoSuchGroupSnapshot(call.id)
        _compare(call, found)
        return _group_snapshot(found)

    def delete(self, call: KnownGroupSnapshot) -> None:
        """Delete all snapshots of a group; no such group snapshot is no error.

        A report, one command that removes the record, and for each snapshot the commands of
        DeleteSnapshot without its report. If a part is lost, the rest is deleted, unless a group
        that may have the part can still come back: then it raises NotWhole.
        """
        if not _is_one(call.id):
            return
        groups = self._groups_of(call.id)
        with self._volume_groups.hold(*groups):
            known = self._mender.mend(*groups)
            every = self._reports.everywhere(known)
            found = self._find(every, call.id)
            if records.is_whole(found):
                _compare(call, found)
            elif found and (awaited := self._reports.awaited(every, found)):
                raise errors.NotWhole(call.id, _why_awaited(awaited))
            for one in found:
                every.require_not_copied(str(one.id))
                self._snapshotter.require_unread(str(one.id))
        self._discard(known, call.id)

    def resume(self, *groups: str) -> int:
        """Undo half-made group snapshots of these groups, or of all; returns how many.

        Those on record as complete cost nothing, and all others one report together. Raises an
        ExceptionGroup once each was tried.
        """
        with ExitStack() as turns:
            mine = set()
            for identity in self._unrecorded(self._everywhere(groups)):
                # A call on the same group snapshot does the same.
                with suppress(errors.OperationPending):
                    turns.enter_context(self._locks.hold(ids.logical_name(identity)))
                    mine.add(identity)
            every = self._everywhere(groups) if mine else Every({})
            left = {k: one for k, one in self._unrecorded(every).items() if k in mine}
            # Crash point: all were taken and the record is missing; or a version without it.
            whole = {k for k, members in left.items() if records.is_whole(members)}
            half = {k for k in left.keys() - whole if self._reports.is_half_made(every, left[k])}
            with Attempts() as attempts:
                for identity in sorted(half):
                    with attempts.one():
                        self._discard(every, identity)
                with attempts.one():
                    self._commit([one for identity in sorted(whole) for one in left[identity]])
        return len(half)

    def _everywhere(self, groups: Iterable[str]) -> Every:
        return self._reports.everywhere(self._reports.fresh(*groups))

    def _unrecorded(self, known: Every) -> Mapping[str, list[Snapshot]]:
        """The group snapshots that are not on record as complete, with their snapshots.

        Without those of which only a newer version knows a part.
        """
        found: dict[str, list[Snapshot]] = {}
        for identity, members in known.group_snapshots().items():
            own = [one for one in members if isinstance(one, Snapshot)]
            if own == members and any(tag.COMMITTED not in one.own_tags for one in own):
                found[identity] = own
        return found

    def _make(
        self, call: CreateGroupSnapshot, known: Fresh, undo: ExitStack, turns: HeldGroups
    ) -> GroupSnapshot:
        """Take snapshots of all sources; a failure is undone once the groups are unlocked."""
        sources = [known.usable(one, Call.SNAPSHOT) for one in call.source_ids]
        for source_id in call.source_ids:
            self._conflicts.check(Call.SNAPSHOT, source_id)
        own = self.logical_name(call.name)
        identity = str(VolumeId.of(sources[0].group, own))
        planned = {ids.group_member(call.name, str(one.id)): one for one in sources}
        places = records.places_of(sources)
        if not tags.fits(tag.MEMBER_GROUPS, places):
            raise errors.BadField("source_volume_ids", "are in too many volume groups")
        self._snapshotter.require_free(known, *planned)
        held = self._choose_held(sources)
        # Errors of room come before the volumes are suspended.
        needed, members = Counter[str](), Counter[str]()
        for one in sources:
            needed[one.group.name] += self._snapshotter.needed_bytes(
                one,
                call.size,
                copy_on_write=str(one.id) in held,
                beside_bytes=needed[one.group.name],
                beside=members[one.group.name],
            )
            members[one.group.name] += 1
        self._snapshotter.make_room(*sources)
        own_tags = {
            tag.NAME: call.name,
            tag.GROUP_SNAPSHOT: identity,
            tag.MEMBERS: str(len(sources)),
            tag.MEMBER_GROUPS: places,
            tag.ASKED: _asked(call),
            **call.about,
        }
        left = command.remaining_seconds()
        patience = min(self.quiesce_seconds, self.quiesce_seconds if left is None else left)
        with (
            command.time_limit(patience),
            self._quiesced(list(held.values()), patience, turns) as quiesce,
        ):
            for one in held.values():
                try:
                    quiesce.suspend(one.group.name, one.name)
                except OSError as error:
                    why = f"device-mapper says {error.strerror}; see `dmesg`"
                    raise errors.NotTogether(str(one.id), why) from None
            own_tags |= {tag.TIME: str(time.time_ns())}
            undo.callback(self._undo, identity, {one.group.name for one in sources})
            taken = [
                self._snapshotter.take(
                    name, one, own_tags, call.size, copy_on_write=str(one.id) in held
                )
                for name, one in planned.items()
            ]
            quiesce.check()
        self._commit(taken)
        undo.pop_all()
        return _group_snapshot(taken)

    def _commit(self, members: list[Snapshot]) -> None:
        """Record that all were taken: one command for each group, none where it is recorded."""
        lacking = [one for one in members if tag.COMMITTED not in one.own_tags]
        if lacking:
            self._mark(lacking, new={tag.COMMITTED: "yes"})

    def _mark(self, members: list[Snapshot], **change: Mapping[str, str]) -> None:
        """Change tags of all, by one command a group. Crash point: some have the change."""
        names_of = [(one.group.name, one.name) for one in members]
        for group in sorted({group for group, _ in names_of}):
            own = [one for one in names_of if one[0] == group]
            for at in range(0, len(own), _MOST_MARKED):
                few = own[at : at + _MOST_MARKED]
                volumes.mark_all(self._volume_groups.lvm(group), few, **change)

    def _require_half_made(self, known: Every, found: list[Snapshot]) -> None:
        """Raise NotWhole for one that may be whole, or was, and so is neither undone nor absent."""
        if not found or self._reports.is_half_made(known, found):
            return
        why = _why_awaited(self._reports.awaited(known, found)) or (
            f"{len(found)} of its {found[0].own_tags.get(tag.MEMBERS, 'many')} snapshots are"
            " left; volumes can be made of them, and DeleteVolumeGroupSnapshot removes them"
        )
        raise errors.NotWhole(found[0].group_snapshot_id, why)

    @contextmanager
    def _quiesced(self, held: list[Volume], seconds: float, turns: HeldGroups) -> Iterator[Quiesce]:
        """Suspend volumes within the `with`; a group stays locked while one of its volumes is.

        The disk of a volume that is not resumed in time does not answer. lvm2 must not find its
        device suspended, and resumed in the middle of a change. Other groups are unlocked with the
        call.
        """
        for one in held:
            turns.enter(
                one.group.name, self._activator.keep_suspended([(one.group.name, one.name)])
            )
        quiesce = Quiesce(self._devices, seconds)
        try:
            with self._limiter.lifted(*(one.backing for one in held)), quiesce:
                yield quiesce
        finally:
            for (group, _), free in quiesce.free.items():
                turns.keep(group, free)

    def _choose_held(self, volumes: list[Volume]) -> Mapping[str, Volume]:
        """The volumes to suspend, by their ids: those that are active.

        None for a single volume, which lvm2 suspends itself.
        """
        if len(volumes) == 1:
            return {}
        mounts = table.read(self._kernel)
        held = {}
        for one in volumes:
            device = self._activator.device(one.backing)
            if device is not None:
                self._require_holdable(one, device, mounts)
                held[str(one.id)] = one
        return held

    def _require_holdable(self, volume: Volume, device: Device, mounts: table.Table) -> None:
        """Raise NotTogether for a volume that lvm2 or Carver may use while it is suspended."""
        # lvm2 reads all devices that may be a physical volume, and would wait for this one.
        if loops := loop.over(self._kernel, device.number):
            raise errors.NotTogether(
                str(volume.id),
                f"{', '.join(loops)} shows it, as a raw block volume that is published read-only;"
                " lvm2 reads loop devices. Unpublish it there first",
            )
        if stacked := self._kernel.device_holders(device.path):
            raise errors.NotTogether(
                str(volume.id), f"{', '.join(stacked)} is made of it; take that away first"
            )
        if self._kernel.device_is_swap(device.path):
            raise errors.NotTogether(str(volume.id), "the kernel swaps to it")
        config = self._configuration.now
        inside = [f"{self._kernel.real_path(one).rstrip('/')}/" for one in config.kubelet_dir]
        files = config.definitions
        own = [config.endpoint.parent, *(one.file.path for one in files if one.file)]
        needed = {mounts.holding(self._kernel.real_path(str(one))) for one in own}
        for mount in mounts.of_device(device.number):
            if mount in needed or not mount.path.startswith(tuple(inside)):
                raise errors.NotTogether(
                    str(volume.id),
                    f"it is mounted at {mount.path}, where Carver or lvm2 may have to write",
                )

    def _groups_of(self, group_snapshot_id: str) -> Set[str]:
        """The groups that may have parts of one; its id names the group of its first source."""
        own = ids.group_of(group_snapshot_id)
        return self._groups([own], lambda known: known.members(group_snapshot_id))

    def _groups(self, own: Iterable[str], find: Callable[[Every], list[Snapshot]]) -> Set[str]:
        """These groups, and those that may have further parts of what `find` finds in any."""
        groups, state = frozenset(own), self._reports.fresh
        while more := self._places(find(self._reports.everywhere(state(*groups)))) - groups:
            groups |= more
        return groups

    def _places(self, members: list[Snapshot]) -> Set[str]:
        """The groups of Carver's that may have parts of a group snapshot with these members."""
        if any(tag.MEMBER_GROUPS not in one.own_tags for one in members):
            # Older versions did not record them.
            return set(self._configuration.now.groups)
        found = [place for one in members for place in one.own_tags[tag.MEMBER_GROUPS].split(",")]
        # One that no class names any more may be here still.
        return set(filter(self._volume_groups.of, (one.partition("@")[0] for one in found)))

    def _named(self, known: Every, own_name: str) -> list[Snapshot]:
        """The snapshots of a group of that name, in whichever of Carver's groups it is."""
        for identity in known.group_snapshots():
            if ids.logical_name(identity) == own_name:
                return known.members(identity)
        return []

    def _find(self, known: Every, group_snapshot_id: str) -> list[Snapshot]:
        """The snapshots of a group; raises OtherGroup where neither one nor its group is here."""
        found = known.members(group_snapshot_id)
        if not found:
            known.require_group_of(group_snapshot_id)
        return found

    def _undo(self, group_snapshot_id: str, groups: Set[str]) -> None:
        """Discard what a failed call made; if that fails too, it is retried until it is done."""
        try:
            with command.time_limit(_UNDOING_SECONDS):
                self._discard(self._reports.fresh(*groups), group_snapshot_id)
        except Exception as error:
            _log.error(_NOT_UNDONE, group_snapshot_id, error)
            # Crash point: the next start undoes it.
            job = _Undo(key=group_snapshot_id, logged=str(error), groups=groups)
            # Until this call has answered it holds the name, without which nothing is undone.
            self.undone.start(job, after_seconds=_ANSWERED_SECONDS)

    def _undo_again(self, job: _Undo) -> None:
        """Discard what a failed call left, unless a later call has completed it."""
        # The call that failed holds the name until its answer.
        with self._locks.hold(ids.logical_name(job.key)), command.time_limit(_UNDOING_SECONDS):
            self._reports.await_others(*job.groups)
            with self._volume_groups.hold(*job.groups):
                every = self._everywhere(job.groups)
                found = every.members(job.key)
                if records.is_whole(found):
                    if not self._is_to_be_undone(found):
                        self._commit(found)
                        return
                    for one in found:
                        every.require_not_copied(str(one.id))
                        self._snapshotter.require_unread(str(one.id))
                else:
                    self._require_half_made(every, found)
            self._discard(every, job.key)

    def _is_to_be_undone(self, found: list[Snapshot]) -> bool:
        """Whether a failed call of this process left them: perhaps all, and not of one moment."""
        is_recorded = any(tag.COMMITTED in one.own_tags for one in found)
        return self.undone.has(found[0].group_snapshot_id) and not is_recorded

    def _discard(self, known: Known, group_snapshot_id: str) -> None:
        members = known.members(group_snapshot_id)
        if any(tag.COMMITTED in one.own_tags for one in members):
            # Crash point: without the record, what is left is half-made. So the record is removed
            # before the first snapshot.
            with self._volume_groups.hold(*(one.group.name for one in members)):
                self._mark(members, old={tag.COMMITTED: "yes"})
        # Last the snapshots in the group that the id names: without them the id finds nothing.
        own = group_snapshot_id.partition("@")[0]
        for one in sorted(members, key=lambda one: one.group.name == own):
            self._snapshotter.discard(one)
        # Also COW stores without an origin, which a failed lvcreate left.
        for volume in known.doomed():
            if volume.own_tags.get(tag.GROUP_SNAPSHOT) == group_snapshot_id:
                self._eraser.finish(volume)


def _is_one(group_snapshot_id: str) -> bool:
    """Whether an id can be a group snapshot's."""
    return names.is_of(ids.GROUP_SNAPSHOT_PREFIX, ids.logical_name(group_snapshot_id))


def _why_awaited(groups: list[str]) -> str:
    if not groups:
        return ""
    return (
        f"a part of it may be in volume group {', '.join(groups)}, which is not on this node or in"
        " none of Carver's classes; attach its disks. If it is lost for good, take its classes out"
        " of the configuration and restart Carver"
    )


def _group_snapshot(members: list[Snapshot]) -> GroupSnapshot:
    ordered = sorted(members, key=lambda one: str(one.id))
    return GroupSnapshot(ordered[0].group_snapshot_id, tuple(ordered))


def _asked(call: CreateGroupSnapshot) -> str:
    """The request without its sources, to compare a repeated one with."""
    return "" if call.size is None else f"{call.size.size_bytes}:{call.size.percent:g}"


def _same(found: GroupSnapshot, call: CreateGroupSnapshot) -> GroupSnapshot:
    """The group snapshot that is there; raises Incompatible where the call asks for another."""
    sources = sorted(str(one.source_id) for one in found.snapshots)
    if sources != list(call.source_ids):
        raise errors.Incompatible(
            f"cannot take group snapshot {call.name!r}: it exists, of {', '.join(sources)}, not of"
            f" {', '.join(call.source_ids)}; use another name"
        )
    if found.snapshots[0].own_tags.get(tag.ASKED, "") != _asked(call):
        raise errors.Incompatible(
            f"cannot take group snapshot {call.name!r}: it exists with another size; use"
            " another name"
        )
    return found


def _compare(call: KnownGroupSnapshot, found: list[Snapshot]) -> None:
    """Raise BadField where the call names other snapshots."""
    own = {str(one.id) for one in found}
    if not call.snapshot_ids:
        raise errors.BadField("snapshot_ids", f"is required: {', '.join(sorted(own))}")
    if odd := own ^ set(call.snapshot_ids):
        raise errors.BadField(
            "snapshot_ids",
            f"{', '.join(sorted(odd))}: the snapshots of {call.id!r} are {', '.join(sorted(own))}",
        )
