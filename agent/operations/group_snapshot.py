"""Create, get and delete group snapshots: snapshots of several volumes at one moment.

Active volumes are suspended together while the snapshots are taken. The snapshots count only once
all of them were taken and have the tag `committed`. Without that tag, the failing call or the next
start of Carver removes the snapshots that were taken. A removal that fails is retried each minute.
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
from agent.volumes.report_age import EveryGroup, Fresh, Known
from agent.volumes.volume_states import Call
from agent.work.background import Attempts
from agent.work.group_worker import Job, Jobs
from lvm import names, tags, volumes
from lvm.active_devices import Device
from mount import command, loop, table

_log = logging.getLogger(__name__)

# Maximum number of snapshots that one command tags; a start of Carver may have to tag the snapshots
# of many group snapshots.
_MOST_MARKED = 100
# Time limit, in seconds, of removing the snapshots that a failed call took. The limit applies also
# after the caller's deadline.
_UNDOING_SECONDS = 60.0
# Delay, in seconds, before the snapshots of a failed call are removed in the background: until the
# call has ended, it holds the lock that the removal needs.
_ANSWERED_SECONDS = 1.0
# Log message for snapshots of a failed call that could not be removed.
_NOT_UNDONE = "cannot undo the half-made group snapshot %s yet: %s"


@dataclass(kw_only=True)
class _Undo(Job):
    """A job that removes the snapshots that a failed call may have left of a group snapshot.

    The key is the id of the group snapshot.
    """

    # Names of the volume groups of the source volumes.
    groups: Set[str]


@dataclass(frozen=True)
class GroupSnapshot:
    """A group snapshot: snapshots of several volumes at one moment, sorted by their ids."""

    id: str
    snapshots: tuple[Snapshot, ...]

    @property
    def time_nanoseconds(self) -> int:
        """The moment of the snapshots, as Unix time in nanoseconds."""
        return self.snapshots[0].time_nanoseconds

    @property
    def is_ready(self) -> bool:
        """Whether volumes can be created from all of the snapshots."""
        return all(snapshot.is_ready for snapshot in self.snapshots)


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
        # Time limit, in seconds, for which volumes are suspended: longer than lvm2 needs for many
        # volumes, and shorter than a wait that suggests a dead disk.
        self.quiesce_seconds = 20.0
        # Jobs that remove snapshots which failed calls could not remove at once.
        self.undone: Jobs[_Undo] = Jobs(context.workers, "undo", self._undo_again, _NOT_UNDONE)

    @staticmethod
    def logical_name(name: str) -> str:
        """Return the name by which calls lock a group snapshot; no logical volume has the name."""
        return names.logical_volume(ids.GROUP_SNAPSHOT_PREFIX, name)

    def create(self, request: CreateGroupSnapshot) -> GroupSnapshot:
        """Take snapshots of all sources at one moment, or find those that an earlier call took.

        Incomplete snapshots of an earlier call are removed first. Runs a report, one command for
        each source, and one for each volume group, which adds the tag `committed`. Raises
        NotTogether if a source cannot be suspended, QuiesceOver if the sources were not suspended
        long enough, NoRoom, NotSnapshotted.
        """
        sources = {ids.group_of(source_id) for source_id in request.source_ids}
        for source_id in request.source_ids:
            source = backing.of_id(source_id)
            with self._limiter.lift(source):
                users.flush(self._kernel, self._activator, source)
        own_name = self.logical_name(request.name)
        groups = self._groups(sources, lambda report: self._find_members(report, own_name))
        with ExitStack() as undo, self._volume_groups.hold(*groups) as locked_groups:
            state = self._mender.mend(*groups)
            all_groups = self._reports.every_group(state)
            members = self._find_members(all_groups, own_name)
            if not members:
                return self._make(request, state, undo, locked_groups)
            if records.is_complete(members):
                existing = _require_same(_group_snapshot(members), request)
                self._commit(members)
                return existing
            self._require_half_made(all_groups, members)
            self._require_not_copied(all_groups, members)
        # Remove the snapshots of an earlier call, and start again. Crash point: some of the
        # snapshots exist, or an earlier call failed and could not remove them.
        self._discard(state, members[0].group_snapshot_id)
        return self.create(request)

    def get(self, request: KnownGroupSnapshot) -> GroupSnapshot:
        """Return the group snapshot that has an id; raises NoSuchGroupSnapshot.

        Raises NotWhole if a part of the group snapshot is lost, or perhaps on an absent volume
        group. Runs a report of the group snapshot's volume groups.
        """
        if not _is_group_snapshot_id(request.id):
            raise errors.NoSuchGroupSnapshot(request.id)
        all_groups = self._reports.every_group(self._reports.fresh(*self._groups_of(request.id)))
        members = self._find(all_groups, request.id)
        if not records.is_complete(members):
            self._require_half_made(all_groups, members)
            raise errors.NoSuchGroupSnapshot(request.id)
        _compare(request, members)
        return _group_snapshot(members)

    def delete(self, request: KnownGroupSnapshot) -> None:
        """Delete all snapshots of a group snapshot; a missing group snapshot is no error.

        Runs a report, one command that removes the tag `committed`, and for each snapshot the
        commands of DeleteSnapshot without its report. If some snapshots are lost, the others are
        deleted, unless a volume group that may have a lost snapshot can come back: in that case
        raises NotWhole.
        """
        if not _is_group_snapshot_id(request.id):
            return
        groups = self._groups_of(request.id)
        with self._volume_groups.hold(*groups):
            state = self._mender.mend(*groups)
            all_groups = self._reports.every_group(state)
            members = self._find(all_groups, request.id)
            if records.is_complete(members):
                _compare(request, members)
            elif members and (awaited := self._reports.awaited(all_groups, members)):
                raise errors.NotWhole(request.id, _why_awaited(awaited))
            self._require_not_copied(all_groups, members)
        self._discard(state, request.id)

    def resume(self, *groups: str) -> int:
        """Remove half-made group snapshots of the named volume groups, or of all.

        Returns how many were half-made (`Reports.is_half_made`), even if no snapshot is missing. If
        some snapshots of a group snapshot have the tag `committed`, all of them get the tag. A
        group snapshot that a call has locked is left to that call. A group snapshot without
        snapshots in the named groups is left to the recovery of its own groups. Group snapshots
        with the tag `committed` cost no command, and all others together one report of the named
        groups. Raises an ExceptionGroup after each of them was tried; it has a VolumeInUse for a
        half-made group snapshot of which a volume is copied.
        """
        with ExitStack() as locks:
            locked_ids = set()
            for identity in self._unrecorded(self._everywhere(groups)):
                # Skip a group snapshot that a call has locked: that call completes the group
                # snapshot, or removes its snapshots.
                with suppress(errors.OperationPending):
                    locks.enter_context(self._locks.hold(ids.logical_name(identity)))
                    locked_ids.add(identity)
            all_groups = self._everywhere(groups) if locked_ids else EveryGroup({})
            read_groups = set(groups) or set(all_groups.groups)
            # Complete the tag `committed`. Crash point: some of the snapshots lack the tag; or a
            # version of Carver without that tag took the snapshots.
            completed, groups_of_others = list[Snapshot](), dict[str, Set[str]]()
            for identity, members in self._unrecorded(all_groups).items():
                member_groups = self._member_groups(members) | {ids.group_of(identity)}
                if identity not in locked_ids or read_groups.isdisjoint(member_groups):
                    continue
                if member_groups <= read_groups and records.is_complete(members):
                    completed += members
                else:
                    groups_of_others[identity] = member_groups
            removed_count = 0
            with Attempts() as attempts:
                with attempts.attempt():
                    self._commit(completed)
                for identity, member_groups in sorted(groups_of_others.items()):
                    # NotWhole: nothing is decided while a group is absent that may have a part.
                    with (
                        attempts.attempt(),
                        suppress(errors.NotWhole),
                        command.time_limit(_UNDOING_SECONDS),
                    ):
                        removed_count += self._complete_or_remove(identity, member_groups)
        return removed_count

    def _everywhere(self, groups: Iterable[str]) -> EveryGroup:
        return self._reports.every_group(self._reports.fresh(*groups))

    def _unrecorded(self, all_groups: EveryGroup) -> Mapping[str, list[Snapshot]]:
        """Return the group snapshots without the tag `committed`, with their snapshots.

        Group snapshots are left out if a part of them is known only to a newer version of Carver.
        """
        uncommitted: dict[str, list[Snapshot]] = {}
        for identity, members in all_groups.group_snapshots().items():
            snapshots = [member for member in members if isinstance(member, Snapshot)]
            if snapshots == members and any(
                tag.COMMITTED not in snapshot.own_tags for snapshot in snapshots
            ):
                uncommitted[identity] = snapshots
        return uncommitted

    def _make(
        self, request: CreateGroupSnapshot, state: Fresh, undo: ExitStack, held_groups: HeldGroups
    ) -> GroupSnapshot:
        """Take snapshots of all sources; on failure, have them removed after the call's locks.

        `undo` runs the removal, after the locks of the volume groups are released; `held_groups`
        holds these locks.
        """
        sources = [state.usable(source_id, Call.SNAPSHOT) for source_id in request.source_ids]
        for source_id in request.source_ids:
            self._conflicts.check(Call.SNAPSHOT, source_id)
        own_name = self.logical_name(request.name)
        identity = str(VolumeId.of(sources[0].group, own_name))
        planned = {ids.group_member(request.name, str(volume.id)): volume for volume in sources}
        places = records.places_of(sources)
        if not tags.fits(tag.MEMBER_GROUPS, places):
            raise errors.BadField("source_volume_ids", "are in too many volume groups")
        self._snapshotter.require_free(state, *planned)
        suspended = self._choose_held(sources)
        # Check the free space before the volumes are suspended.
        needed_bytes, member_counts = Counter[str](), Counter[str]()
        for volume in sources:
            needed_bytes[volume.group.name] += self._snapshotter.needed_bytes(
                volume,
                request.size,
                copy_on_write=str(volume.id) in suspended,
                further_bytes=needed_bytes[volume.group.name],
                further_count=member_counts[volume.group.name],
            )
            member_counts[volume.group.name] += 1
        self._snapshotter.make_room(*sources)
        own_tags = {
            tag.NAME: request.name,
            tag.GROUP_SNAPSHOT: identity,
            tag.MEMBERS: str(len(sources)),
            tag.MEMBER_GROUPS: places,
            tag.ASKED: _size_text(request),
            **request.object_tags,
        }
        remaining_seconds = command.remaining_seconds()
        limit_seconds = min(
            self.quiesce_seconds,
            self.quiesce_seconds if remaining_seconds is None else remaining_seconds,
        )
        with (
            command.time_limit(limit_seconds),
            self._quiesced(list(suspended.values()), limit_seconds, held_groups) as quiesce,
        ):
            for volume in suspended.values():
                try:
                    quiesce.suspend(volume.group.name, volume.name)
                except OSError as error:
                    why = f"device-mapper says {error.strerror}; see `dmesg`"
                    raise errors.NotTogether(str(volume.id), why) from None
            own_tags |= {tag.TIME: str(time.time_ns())}
            undo.callback(self._undo, identity, {volume.group.name for volume in sources})
            snapshots = [
                self._snapshotter.take_snapshot(
                    name, volume, own_tags, request.size, copy_on_write=str(volume.id) in suspended
                )
                for name, volume in planned.items()
            ]
            quiesce.check()
        self._commit(snapshots)
        undo.pop_all()
        return _group_snapshot(snapshots)

    def _commit(self, members: list[Snapshot]) -> None:
        """Tag snapshots as committed: all snapshots of their group snapshot were taken.

        Runs one command for each volume group, and none for snapshots that have the tag.
        """
        lacking = [snapshot for snapshot in members if tag.COMMITTED not in snapshot.own_tags]
        if lacking:
            self._change_tags(lacking, new_tags={tag.COMMITTED: "yes"})

    def _change_tags(self, members: list[Snapshot], **change: Mapping[str, str]) -> None:
        """Change tags of several snapshots, by one command for each volume group.

        Crash point: some of the snapshots have the change.
        """
        names_of = [(snapshot.group.name, snapshot.name) for snapshot in members]
        for group in sorted({group for group, _ in names_of}):
            group_names = [name for name in names_of if name[0] == group]
            for start in range(0, len(group_names), _MOST_MARKED):
                batch = group_names[start : start + _MOST_MARKED]
                volumes.mark_all(self._volume_groups.lvm(group), batch, **change)

    def _require_half_made(self, all_groups: EveryGroup, snapshots: list[Snapshot]) -> None:
        """Raise NotWhole for a group snapshot with missing parts that is or was complete, perhaps.

        Such a group snapshot must be neither removed nor answered as missing. The method returns
        for a group snapshot that was never complete, and for a group snapshot without snapshots.
        """
        if not snapshots or self._reports.is_half_made(all_groups, snapshots):
            return
        why = _why_awaited(self._reports.awaited(all_groups, snapshots)) or (
            f"only {len(snapshots)} of its {snapshots[0].own_tags.get(tag.MEMBERS, 'many')} can be"
            " found; volumes can be made of what is there, and DeleteVolumeGroupSnapshot removes it"
        )
        raise errors.NotWhole(snapshots[0].group_snapshot_id, why)

    def _require_not_copied(self, all_groups: EveryGroup, snapshots: list[Snapshot]) -> None:
        """Raise VolumeInUse while a volume is copied from one of these snapshots.

        No copy of a half-made group snapshot's snapshots begins, but one may be in progress: a
        version up to 0.2.0 handed these snapshots out, and so does this version while a volume
        group is absent that may have further ones.
        """
        for snapshot in snapshots:
            all_groups.require_not_copied(str(snapshot.id))
            self._snapshotter.require_unread(str(snapshot.id))

    @contextmanager
    def _quiesced(
        self, suspended_volumes: list[Volume], seconds: float, held_groups: HeldGroups
    ) -> Iterator[Quiesce]:
        """Suspend volumes within the `with`, and lock their volume groups until they are resumed.

        A volume that is not resumed in time is on a disk that does not answer. Its group stays
        locked, because lvm2 must not find the device suspended, and resumed in the middle of a
        change. The other groups are unlocked when the call ends.
        """
        for volume in suspended_volumes:
            held_groups.enter(
                volume.group.name,
                self._activator.keep_suspended([(volume.group.name, volume.name)]),
            )
        quiesce = Quiesce(self._devices, seconds)
        try:
            with self._limiter.lift(*(volume.backing for volume in suspended_volumes)), quiesce:
                yield quiesce
        finally:
            for (group, _), resumed in quiesce.free.items():
                held_groups.keep(group, resumed)

    def _choose_held(self, volumes: list[Volume]) -> Mapping[str, Volume]:
        """Return the active volumes, by their ids: these have to be suspended by Carver.

        The result is empty for a single volume, which lvm2 suspends itself. Raises NotTogether for
        a volume that must not be suspended.
        """
        if len(volumes) == 1:
            return {}
        mounts = table.read(self._kernel)
        active = {}
        for volume in volumes:
            device = self._activator.device(volume.backing)
            if device is not None:
                self._require_suspendable(volume, device, mounts)
                active[str(volume.id)] = volume
        return active

    def _require_suspendable(self, volume: Volume, device: Device, mounts: table.Table) -> None:
        """Raise NotTogether for a volume that lvm2 or Carver may use while it is suspended."""
        # Refuse a volume with a loop device: lvm2 reads all devices that may be physical volumes,
        # and would wait for the loop device of a suspended volume.
        if loops := loop.loop_devices_over(self._kernel, device.number):
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
        kubelet_dirs = [
            f"{self._kernel.real_path(directory).rstrip('/')}/" for directory in config.kubelet_dir
        ]
        definitions = config.definitions
        own_paths = [
            config.endpoint.parent,
            *(definition.file.path for definition in definitions if definition.file),
        ]
        own_mounts = {mounts.holding(self._kernel.real_path(str(path))) for path in own_paths}
        for mount in mounts.of_device(device.number):
            if mount in own_mounts or not mount.path.startswith(tuple(kubelet_dirs)):
                raise errors.NotTogether(
                    str(volume.id),
                    f"it is mounted at {mount.path}, where Carver or lvm2 may have to write",
                )

    def _groups_of(self, group_snapshot_id: str) -> Set[str]:
        """Return the volume groups that may have snapshots of a group snapshot.

        The id of the group snapshot names the group of its first source.
        """
        id_group = ids.group_of(group_snapshot_id)
        return self._groups([id_group], lambda report: report.members(group_snapshot_id))

    def _groups(
        self, group_names: Iterable[str], find_members: Callable[[EveryGroup], list[Snapshot]]
    ) -> Set[str]:
        """Return the named volume groups, and all others that have snapshots of a group snapshot.

        `find_members` returns the snapshots of the group snapshot in all volume groups that were
        read. Each round reads the volume groups that the snapshots' tags name, until no group is
        added.
        """
        groups, fresh = frozenset(group_names), self._reports.fresh
        while (
            more_groups := self._member_groups(
                find_members(self._reports.every_group(fresh(*groups)))
            )
            - groups
        ):
            groups |= more_groups
        return groups

    def _member_groups(self, members: list[Snapshot]) -> Set[str]:
        """Return the volume groups of Carver that may have snapshots of a group snapshot.

        `members` are snapshots of the group snapshot that were found.
        """
        if any(tag.MEMBER_GROUPS not in snapshot.own_tags for snapshot in members):
            # Return all volume groups for a group snapshot of an older version, which did not
            # record them.
            return set(self._configuration.now.groups)
        places = [
            place
            for snapshot in members
            for place in snapshot.own_tags[tag.MEMBER_GROUPS].split(",")
        ]
        # Include volume groups that no device class names any more, but that are still on this
        # node.
        return set(filter(self._volume_groups.of, (place.partition("@")[0] for place in places)))

    def _find_members(self, all_groups: EveryGroup, own_name: str) -> list[Snapshot]:
        """Return the snapshots, in all groups, of the group snapshot whose id has this name.

        The groups are the volume groups in `all_groups`.
        """
        for identity in all_groups.group_snapshots():
            if ids.logical_name(identity) == own_name:
                return all_groups.members(identity)
        return []

    def _find(self, all_groups: EveryGroup, group_snapshot_id: str) -> list[Snapshot]:
        """Return the snapshots of the group snapshot that has an id.

        Raises OtherGroup if this node has no snapshot of the group snapshot, and not the volume
        group that the id names.
        """
        members = all_groups.members(group_snapshot_id)
        if not members:
            all_groups.require_group_of(group_snapshot_id)
        return members

    def _undo(self, group_snapshot_id: str, groups: Set[str]) -> None:
        """Remove the snapshots that a failed call took; on failure, retry in the background."""
        try:
            with command.time_limit(_UNDOING_SECONDS):
                self._discard(self._reports.fresh(*groups), group_snapshot_id)
        except Exception as error:
            _log.error(_NOT_UNDONE, group_snapshot_id, error)
            # Crash point: the next start of Carver removes the snapshots.
            job = _Undo(key=group_snapshot_id, logged=str(error), groups=groups)
            # Start the job with a delay: until this call ends, the call holds the lock that the job
            # needs.
            self.undone.start(job, after_seconds=_ANSWERED_SECONDS)

    def _undo_again(self, job: _Undo) -> None:
        """Remove the snapshots that a failed call left, unless a later call has completed them."""
        # Lock the name of the group snapshot, which the failed call holds until it ends.
        with self._locks.hold(ids.logical_name(job.key)), command.time_limit(_UNDOING_SECONDS):
            self._complete_or_remove(job.key, job.groups)

    def _complete_or_remove(self, group_snapshot_id: str, groups: Set[str]) -> bool:
        """Complete the tag `committed` of a group snapshot, or remove it; return whether removed.

        `groups` are the volume groups that may have its snapshots. The decision is made by what is
        read while these groups are locked, because a state from before may lack the tag. The caller
        has locked the name of the group snapshot. Raises NotWhole or VolumeInUse if the group
        snapshot can neither be completed nor removed now.
        """
        self._reports.await_others(*groups)
        with self._volume_groups.hold(*groups):
            all_groups = self._everywhere(groups)
            members = all_groups.members(group_snapshot_id)
            if records.is_complete(members):
                self._commit(members)
                return False
            self._require_half_made(all_groups, members)
            self._require_not_copied(all_groups, members)
        self._discard(all_groups, group_snapshot_id)
        return bool(members)

    def _discard(self, state: Known, group_snapshot_id: str) -> None:
        members = state.members(group_snapshot_id)
        if any(tag.COMMITTED in snapshot.own_tags for snapshot in members):
            # Remove the tag `committed` before the first snapshot is deleted. Crash point: without
            # the tag, the remaining snapshots count as an incomplete group snapshot, which the next
            # start of Carver removes.
            with self._volume_groups.hold(*(snapshot.group.name for snapshot in members)):
                self._change_tags(members, old_tags={tag.COMMITTED: "yes"})
        # Delete the snapshots in the volume group that the id names last: if these were deleted
        # first, a call with the id would not find the other snapshots.
        id_group = group_snapshot_id.partition("@")[0]
        for snapshot in sorted(members, key=lambda snapshot: snapshot.group.name == id_group):
            self._snapshotter.discard(snapshot)
        # Erase COW stores without an origin, too, which a failed lvcreate left.
        for volume in state.doomed():
            if volume.own_tags.get(tag.GROUP_SNAPSHOT) == group_snapshot_id:
                self._eraser.finish(volume)


def _is_group_snapshot_id(group_snapshot_id: str) -> bool:
    """Whether an id has the form of a group snapshot's id."""
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
    ordered = sorted(members, key=lambda snapshot: str(snapshot.id))
    return GroupSnapshot(ordered[0].group_snapshot_id, tuple(ordered))


def _size_text(request: CreateGroupSnapshot) -> str:
    """Return the size in a request as text, to compare a repeated request with."""
    return "" if request.size is None else f"{request.size.size_bytes}:{request.size.percent:g}"


def _require_same(existing: GroupSnapshot, request: CreateGroupSnapshot) -> GroupSnapshot:
    """Return the existing group snapshot; raise Incompatible if the request asks for another."""
    sources = sorted(str(snapshot.source_id) for snapshot in existing.snapshots)
    if sources != list(request.source_ids):
        raise errors.Incompatible(
            f"cannot take group snapshot {request.name!r}: it exists, of {', '.join(sources)}, not"
            f" of {', '.join(request.source_ids)}; use another name"
        )
    if existing.snapshots[0].own_tags.get(tag.ASKED, "") != _size_text(request):
        raise errors.Incompatible(
            f"cannot take group snapshot {request.name!r}: it exists with another size; use"
            " another name"
        )
    return existing


def _compare(request: KnownGroupSnapshot, snapshots: list[Snapshot]) -> None:
    """Raise BadField unless a request names exactly the snapshots of the group snapshot."""
    snapshot_ids = {str(snapshot.id) for snapshot in snapshots}
    if not request.snapshot_ids:
        raise errors.BadField("snapshot_ids", f"is required: {', '.join(sorted(snapshot_ids))}")
    if different_ids := snapshot_ids ^ set(request.snapshot_ids):
        raise errors.BadField(
            "snapshot_ids",
            f"{', '.join(sorted(different_ids))}: the snapshots of {request.id!r} are"
            f" {', '.join(sorted(snapshot_ids))}",
        )
