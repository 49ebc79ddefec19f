"""Make reports of the volume groups, each as fresh as a decision needs.

`Reports` runs no command but lvm2's reports. agent/volumes/report_age.py finds volumes, snapshots
and group snapshots in a report. agent/volumes/activator.py finds the devices of volumes, and
agent/volumes/mender.py repairs what a killed lvm2 left.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait

from agent.core import errors, tag
from agent.core.ids import VolumeId
from agent.groups.group_definitions import GroupDefinitions
from agent.groups.node_groups import VolumeGroups
from agent.groups.volume_group import VolumeGroup, begin_states
from agent.volumes import backing, records
from agent.volumes.records import MadeByNewerVersion, Snapshot, Volume
from agent.volumes.report_age import CachedReport, EveryGroup, Fresh, Known
from agent.work import locks
from lvm import report
from mount import mount_errors as mount_errors
from mount.kernel import Kernel

# Maximum age of the state of a volume group that metrics and health checks use, in seconds.
MONITOR_AGE_SECONDS = 60.0
# Time limit of the wait of metrics and health checks for a newer state of volume groups, in
# seconds.
_MONITOR_WAIT_SECONDS = 5.0


class Reports:
    """Makes reports of volume groups, and finds snapshots that may lie in several groups.

    A call reads the fresh state of the groups that its decision is about, which seldom takes a
    command (agent/groups/metadata_cache.py). Metrics and health checks use the cached state.
    """

    def __init__(
        self,
        volume_groups: VolumeGroups,
        definitions: GroupDefinitions | None = None,
    ) -> None:
        self._volume_groups = volume_groups
        # The volume groups that Carver creates. Without definitions it creates none: all groups are
        # the operator's.
        self._definitions = definitions or GroupDefinitions(volume_groups.configuration, Kernel())
        # The names of the volume groups whose cached state was used since `refresh` last read them.
        self._in_use: set[str] = set()

    @property
    def _groups(self) -> Sequence[str]:
        """Names of the volume groups in the configuration."""
        return self._volume_groups.names

    def fresh(self, *groups: str) -> Fresh:
        """Return a report of these volume groups as they are now, or of all configured groups.

        Groups that are not on this node are left out of the report. Runs one command for each group
        that was written to since its last read. Admits the call of this thread (`locks.enter`),
        which raises TooManyCalls or Starting. Raises as `VolumeGroup.state` if a group cannot be
        read.
        """
        locks.enter(*groups)
        configured = self._volume_groups.names
        group_names = groups or configured
        states: dict[str, report.Group | None] = {}
        for name in dict.fromkeys(group_names):
            if (volume_group := self._volume_groups.of(name)) is not None:
                states[name] = volume_group.state()
        return Fresh(
            _present(configured, states),
            named_groups=frozenset(group_names),
            other_groups=frozenset(configured).difference(group_names),
        )

    def every_group(self, state: Fresh) -> EveryGroup:
        """Return a report of all volume groups: those of `state`, and others as Carver left them.

        A group that Carver did not change since its last read is not read here, so an idle group
        that hangs delays no call on another group. A group that Carver changed, or that was never
        read, is read for three seconds at most; it is `silent` if it does not answer. A refused
        group is `silent` as well, and is not read here: a call about that group, or the next
        retry, reads it.
        """
        configured = self._volume_groups.names
        other_groups = [
            group for group in self._volume_groups if group.name not in state.named_groups
        ]
        read = _read_changed(other_groups)
        cached = {group.name: group.cached for group in other_groups}
        silent = frozenset(group.name for group in other_groups if not group.has_own_changes)
        unread = frozenset(group.name for group in other_groups if group.status == "unknown")
        return EveryGroup(
            _present(configured, {**cached, **read, **state.groups}),
            silent=silent,
            unread=unread,
            problems=state.problems,
        )

    def await_others(self, *groups: str) -> None:
        """Read the volume groups that `every_group` would read, but for `groups`.

        Callers do so before they take the locks of `groups`. So no caller holds the lock of a
        volume group while it waits for another group. A group that does not answer in three seconds
        is not waited for again for a minute. Raises TooManyCalls or Starting.
        """
        locks.enter(*groups)
        _read_changed([group for group in self._volume_groups if group.name not in groups])

    def for_lists(self) -> EveryGroup:
        """Return a report of all volume groups, for RPCs that list objects.

        The state of each group is fresh or, if the read takes long, cached with all changes by
        Carver (`begin_states`). Raises GroupBusy, GroupSilent or GroupAwaited if the cached state
        of such a group may lack changes by Carver; and GroupRefused or CommandError if the read of
        a group failed so.
        """
        locks.enter()
        states = begin_states(self._volume_groups, complete=True)()
        return EveryGroup(_present(self._groups, states))

    def hint(self) -> CachedReport:
        """Return a report of all volume groups; from the cache where a read fails or is slow.

        A read is slow if it takes more than three seconds. Raises TooManyCalls or Starting.
        """
        locks.enter()
        return CachedReport(_present(self._groups, begin_states(self._volume_groups)()))

    def search(self, matches: Callable[[Volume], bool]) -> Volume | None:
        """Return the volume for which `matches` is true, by fresh reports; None if there is none.

        If `hint` shows the volume, only the volume's group is read, so the volume is found while
        another group hangs. If the volume is not found so, all groups are read. Raises as `fresh`.
        """
        hint = next(filter(matches, self.hint().volumes()), None)
        if hint is not None:
            fresh = self.fresh(hint.group.name)
            if (volume := next(filter(matches, fresh.volumes()), None)) is not None:
                return volume
        return next(filter(matches, self.fresh().volumes()), None)

    def group(self, state: report.Report, name: str) -> report.Group:
        """Return the volume group called `name` in a report, if Carver may create volumes in it.

        Raises GroupMissing if the group is absent, and GroupRefused if Carver could not create it
        or if another group has its name.
        """
        return self._definitions.group(state, name)

    def require_groups(self, state: report.Report) -> None:
        """Raise GroupMissing or GroupRefused if a configured volume group cannot be used."""
        for name in self._groups:
            self.group(state, name)

    def snapshot(self, state: Known, snapshot_id: str) -> Snapshot:
        """Return the snapshot with an id for the caller of an RPC.

        If the snapshot belongs to a group snapshot that is not recorded as complete, all groups are
        read, as by `every_group`. Raises NoSuchSnapshot if the snapshot is absent, or if its group
        snapshot is half-made (`is_half_made`); else raises as `Current.taken_snapshot`.
        """
        snapshot = state.taken_snapshot(snapshot_id)
        group_snapshot_id = snapshot.group_snapshot_id
        if group_snapshot_id and tag.COMMITTED not in snapshot.own_tags:
            all_groups = state if isinstance(state, EveryGroup) else self.every_group(state)
            if self.is_half_made(all_groups, all_groups.members(group_snapshot_id)):
                raise errors.NoSuchSnapshot(snapshot_id)
        return snapshot

    def listed_snapshots(self, state: Known) -> Iterator[Snapshot]:
        """Yield the snapshots in a report that callers asked for, to be listed.

        Left out are temporary snapshots, and snapshots of half-made group snapshots (`half_made`).
        Snapshots that this version of Carver must not use (`MadeByNewerVersion`) are included. If a
        snapshot belongs to a group snapshot that is not recorded as complete, all groups are read,
        as by `every_group`.
        """
        half_made: set[str] | None = None
        for entry in state.every_snapshot():
            snapshot = entry.shown if isinstance(entry, MadeByNewerVersion) else entry
            if snapshot.is_bridge:
                continue
            if snapshot.group_snapshot_id and tag.COMMITTED not in snapshot.own_tags:
                if half_made is None:
                    all_groups = state if isinstance(state, EveryGroup) else self.every_group(state)
                    half_made = self.half_made(all_groups)
                if snapshot.group_snapshot_id in half_made:
                    continue
            yield snapshot

    def half_made(self, all_groups: EveryGroup) -> set[str]:
        """Return the ids of the half-made group snapshots (`is_half_made`).

        Callers do not get the snapshots of such a group snapshot. Group snapshots with a snapshot
        that this version of Carver must not use are left out.
        """
        return {
            identity
            for identity, members in all_groups.group_snapshots().items()
            if (usable_members := [member for member in members if isinstance(member, Snapshot)])
            == members
            and self.is_half_made(all_groups, usable_members)
        }

    def is_half_made(self, all_groups: EveryGroup, members: Sequence[Snapshot]) -> bool:
        """Whether the group snapshot of these snapshots certainly never was complete.

        `members` are all its snapshots in the report. Nothing says that they are of one moment
        (`records.is_of_one_moment`), and no volume group is absent that may have a further one,
        whose tags may say so.
        """
        if records.is_of_one_moment(members):
            return False
        return records.is_whole(members) or not self._away(all_groups, members)

    def awaited(self, all_groups: EveryGroup, members: Sequence[Snapshot]) -> list[str]:
        """Return the absent volume groups that may have further snapshots of a group snapshot.

        Left out are groups that no class names and no disk of this node has, and groups that were
        replaced by another group of the same name.
        """
        absent_groups = self._away(all_groups, members)
        return sorted(
            group
            for group in absent_groups
            if (group in self._groups) != self._volume_groups.has(group)
        )

    def _away(self, all_groups: EveryGroup, members: Sequence[Snapshot]) -> set[str]:
        """Return the names of absent volume groups that may have snapshots of a group snapshot.

        They are the groups that the id and the tags of the group snapshot's snapshots name and that
        are not in the report. A group with the same name and another UUID counts as absent.
        """
        present = {
            records.place_of(str(VolumeId.of(group, records.UNKNOWN)))
            for group in all_groups.groups.values()
        }
        places = {records.place_of(snapshot.group_snapshot_id) for snapshot in members}
        for snapshot in members:
            places |= set(filter(None, snapshot.own_tags.get(tag.MEMBER_GROUPS, "").split(",")))
        absent_groups = {place.partition("@")[0] for place in places - present}
        if any(tag.MEMBER_GROUPS not in snapshot.own_tags for snapshot in members):
            # Add all absent groups: a snapshot taken by an older version has no tag with the groups
            # of its group snapshot, so a further snapshot may be in any group.
            absent_groups |= set(self._groups) - set(all_groups.groups)
        return absent_groups

    def seen(self, max_age_seconds: float) -> CachedReport:
        """Return the cached state of all volume groups, after a refresh where it is too old.

        It is too old after `max_age_seconds`. Each group is read at most once in that time, however
        many callers ask, and not at all if calls read the group anyway. The wait is five seconds at
        most. A group that does not answer has its last state, which may be older. If no group
        answers, the error of a read is raised, and raised again to each caller for
        `max_age_seconds`. Raises CommandTimedOut if no group was ever read.
        """
        groups = list(self._volume_groups)
        refreshing = [
            group.refresh()
            for group in groups
            if not 0 <= time.time() - group.tried_seconds < max_age_seconds
        ]
        wait(refreshing, _MONITOR_WAIT_SECONDS)
        # Leave out the errors of refused groups: such a group was read, and is like an absent one.
        refused = errors.GroupRefused
        problems = [
            problem
            for group in groups
            if (problem := group.problem) and not isinstance(problem, refused)
        ]
        answers = any(group.cached is not None and group.problem is None for group in groups)
        if problems and not answers:
            # Remove the stack traces of earlier callers: the same error object is raised to each
            # caller.
            raise problems[0].with_traceback(None)
        if groups and not any(group.status_seconds for group in groups):
            raise mount_errors.CommandTimedOut(("lvm", "fullreport"), _MONITOR_WAIT_SECONDS)
        return self._cached()

    def cached(self, volume_id: str) -> Volume | None:
        """Return the volume with an id by the cached state; None if the state does not show it.

        None does not prove that the volume is absent. Also calls `keep_fresh`, so that the cached
        state is refreshed in the background. Runs no command.
        """
        backing_volume = backing.of_id(volume_id)
        self.keep_fresh()
        for volume_group in self._volume_groups:
            group = volume_group.cached
            logical = None if group is None else group.volumes.get(backing_volume.name)
            if group is not None and logical is not None and backing_volume.may_be_in(group):
                volume = records.volume(group, logical)
                if isinstance(volume, Volume):
                    return volume
        return None

    def _cached(self) -> CachedReport:
        """Return a report of all volume groups with their cached states."""
        states = {group.name: group.cached for group in self._volume_groups}
        return CachedReport(_present(self._groups, states))

    def keep_fresh(self) -> None:
        """Note that the cached state of all groups is in use, so that `refresh` renews it."""
        self._in_use.update(self._groups)

    def outdate(self, written_path: str | None = None) -> None:
        """Make the next read of each volume group scan all disks (`VolumeGroups.outdate`)."""
        self._volume_groups.outdate(written_path)

    def refresh(self, max_age_seconds: float) -> "list[Future[report.Group | None]]":
        """Begin to read each volume group whose cached state is in use and too old.

        Returns the futures of the reads.

        A cached state is in use if `keep_fresh` was called since the last such read, and too old
        `max_age_seconds` after the last read. A read that failed counts as a read, so that it is
        not repeated at once. Also starts threads of volume groups that are missing or hang
        (`VolumeGroups.catch_up`).
        """
        self._volume_groups.catch_up()
        refreshing = []
        for group in self._volume_groups:
            is_due = abs(time.time() - group.tried_seconds) >= max_age_seconds
            if is_due and group.name in self._in_use:
                refreshing.append(group.refresh())
                self._in_use.discard(group.name)
        return refreshing

    @property
    def time_seconds(self) -> float:
        """Time of the read of the volume groups' oldest cached state, in seconds since the epoch.

        Groups without a cached state do not count, as those that are absent or refused; 0 if no
        group has one.
        """
        times = (group.time_seconds for group in self._volume_groups if group.cached is not None)
        return min(times, default=0.0)

    @property
    def refused(self) -> Mapping[str, errors.GroupRefused]:
        """The errors that say why volume groups are refused, by the groups' names.

        They are those of the groups' last reads.
        """
        problems = {group.name: group.problem for group in self._volume_groups}
        return {
            name: problem
            for name, problem in problems.items()
            if isinstance(problem, errors.GroupRefused)
        }

    @property
    def ignored(self) -> Mapping[str, Sequence[str]]:
        """Messages about ignored disks that claim to be in a volume group, by the groups' names.

        They are by the last search for the groups' disks.
        """
        return {
            volume_group.name: tuple(
                f"{path} is not used: it {why}" for path, why in volume_group.metadata.ignored
            )
            for volume_group in self._volume_groups
        }

    @property
    def problem(self) -> Exception | None:
        """The error of the first volume group whose last read failed; None if all succeeded.

        Runs no command.
        """
        return next(
            (group.problem for group in self._volume_groups if group.problem is not None), None
        )


def _present(
    configured: Sequence[str], states: Mapping[str, report.Group | None]
) -> dict[str, report.Group]:
    """Return those of these volume groups that are present, by their names.

    Groups in `configured` come first, in that order.
    """
    ordered = dict.fromkeys((*configured, *states))
    return {name: group for name in ordered if (group := states.get(name)) is not None}


def _read_changed(volume_groups: Sequence[VolumeGroup]) -> dict[str, report.Group | None]:
    """Read those volume groups that may have changes by Carver that their cached states lack.

    Refused groups are left out: a read of such a group shows nothing. The wait is three seconds at
    most (`begin_states`).
    """
    changed = [
        volume_group
        for volume_group in volume_groups
        if not volume_group.has_own_changes and volume_group.status != "refused"
    ]
    return begin_states(changed)() if changed else {}
