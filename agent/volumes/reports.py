"""Read reports of the volume groups, each as fresh as a decision needs.

`Reports` runs no command but lvm2's reports. agent/volumes/report_age.py finds volumes, snapshots
and group snapshots in a report. agent/volumes/activator.py finds their devices, and
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
from agent.volumes.report_age import EveryGroup, Fresh, Known, Seen
from agent.work import locks
from lvm import report
from mount import mount_errors as mount_errors
from mount.kernel import Kernel

# Maximum age of a state that metrics and health checks use, in seconds.
MONITOR_AGE_SECONDS = 60.0
# Time limit of the wait of metrics and health checks for a newer state, in seconds.
_MONITOR_WAIT_SECONDS = 5.0


class Reports:
    """Reads volume groups, and finds objects that may lie in several of them.

    A call reads the fresh state of the groups that its decision is about, which seldom takes a
    command (agent/groups/metadata_cache.py). Monitoring uses the cached state.
    """

    def __init__(
        self,
        volume_groups: VolumeGroups,
        definitions: GroupDefinitions | None = None,
    ) -> None:
        self._volume_groups = volume_groups
        # Without definitions Carver creates no group: all groups are the operator's.
        self._definitions = definitions or GroupDefinitions(volume_groups.configuration, Kernel())
        # The names of the groups whose cached state was used since `refresh` last had them read.
        self._in_use: set[str] = set()

    @property
    def _groups(self) -> Sequence[str]:
        """Names of the volume groups in the configuration."""
        return self._volume_groups.names

    def fresh(self, *groups: str) -> Fresh:
        """Read the state of these groups, or of all groups if none is named.

        Runs one command for each group that was written to since its last read. Raises
        CommandError, GroupRefused, GroupSilent, TooManyCalls, Starting.
        """
        locks.enter(*groups)
        configured = self._groups
        group_names = groups or configured
        volume_groups = {name: self._volume_groups.of(name) for name in group_names}
        states = {
            name: volume_group.state()
            for name, volume_group in volume_groups.items()
            if volume_group is not None
        }
        return Fresh(
            self._present(states),
            asked=frozenset(group_names),
            unasked=frozenset(configured).difference(group_names),
        )

    def every_group(self, state: Fresh) -> EveryGroup:
        """Return a report of all groups: the fresh ones of `state`, and others as Carver left them.

        Runs no command and does not wait for a group that Carver did not change since its last
        read. So an idle group that hangs delays no call on another group. A group that was changed,
        or was never read, is read for three seconds at most; it is `silent` if it does not answer.
        A refused group is `silent` as well, and is not read here: a call about that group, or the
        next retry, reads it.
        """
        other_groups = [group for group in self._volume_groups if group.name not in state.asked]
        read = begin_states(filter(_is_to_be_read, other_groups))()
        cached = {group.name: group.cached for group in other_groups}
        silent = frozenset(group.name for group in other_groups if not group.has_own_changes)
        unread = frozenset(group.name for group in other_groups if group.status == "unknown")
        return EveryGroup(
            self._present({**cached, **read, **state.groups}),
            silent=silent,
            unread=unread,
            problems=state.problems,
        )

    def await_others(self, *groups: str) -> None:
        """Read the groups that `every_group` would read, before the locks of `groups` are taken.

        So no caller holds the lock of a group while it waits for another group. A group that does
        not answer in three seconds is not waited for again for a minute.
        """
        locks.enter(*groups)
        other_groups = (group for group in self._volume_groups if group.name not in groups)
        begin_states(filter(_is_to_be_read, other_groups))()

    def lists(self) -> EveryGroup:
        """Return a report of all groups for a list.

        Each group is fresh, or if its read takes long, cached with all changes by Carver
        (`begin_states`). Raises GroupBusy, GroupSilent or GroupAwaited if the cached state of such
        a group lacks changes, and GroupRefused.
        """
        locks.enter()
        return EveryGroup(self._present(begin_states(self._volume_groups, complete=True)()))

    def hint(self) -> Seen:
        """Return a report of all groups: fresh, or cached for a group whose read takes long."""
        locks.enter()
        return Seen(self._present(begin_states(self._volume_groups)()))

    def search(self, matches: Callable[[Volume], bool]) -> Volume | None:
        """Return the volume for which `matches` is true, by fresh reports; None if there is none.

        If a hint shows the volume, only the volume's group is read, so the volume is found while
        another group hangs. Otherwise all groups are read. Raises as `fresh` does.
        """
        hint = next(filter(matches, self.hint().volumes()), None)
        if hint is not None:
            fresh = self.fresh(hint.group.name)
            if (volume := next(filter(matches, fresh.volumes()), None)) is not None:
                return volume
        return next(filter(matches, self.fresh().volumes()), None)

    def group(self, state: report.Report, name: str) -> report.Group:
        """Return a group in which volumes can be created; raise GroupMissing or GroupRefused."""
        return self._definitions.group(state, name)

    def require_groups(self, state: report.Report) -> None:
        """Raise GroupMissing or GroupRefused if one of the configured groups cannot be used."""
        for name in self._groups:
            self.group(state, name)

    def snapshot(self, state: Known, snapshot_id: str) -> Snapshot:
        """Return the snapshot with an id for the caller of an RPC.

        If the snapshot belongs to a group snapshot that is not recorded as complete, all groups are
        read. Raises NoSuchSnapshot, OtherGroup or NeedsOther.
        """
        snapshot = state.taken_snapshot(snapshot_id)
        group_snapshot_id = snapshot.group_snapshot_id
        if group_snapshot_id and tag.COMMITTED not in snapshot.own_tags:
            all_groups = state if isinstance(state, EveryGroup) else self.every_group(state)
            if self.is_half_made(all_groups, all_groups.members(group_snapshot_id)):
                raise errors.NoSuchSnapshot(snapshot_id)
        return snapshot

    def listed_snapshots(self, state: Known) -> Iterator[Snapshot]:
        """Yield the snapshots that callers asked for, to be listed.

        Snapshots that this version of Carver must not use (`MadeByNewerVersion`) are included. If a
        snapshot belongs to a group snapshot that is not recorded as complete, all groups are read.
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
        """Return the ids of the group snapshots that never were complete.

        Callers do not get the snapshots of such a group snapshot. Two facts prove that it never was
        complete: none of its snapshots has the tag `committed`, and no group is absent that may
        hold a further snapshot of it.
        """
        return {
            identity
            for identity, members in all_groups.group_snapshots().items()
            if (usable_members := [member for member in members if isinstance(member, Snapshot)])
            == members
            and self.is_half_made(all_groups, usable_members)
        }

    def is_half_made(self, all_groups: EveryGroup, members: Sequence[Snapshot]) -> bool:
        """Whether the group snapshot of these snapshots is, and always was, incomplete."""
        if records.is_whole(members) or any(
            tag.COMMITTED in snapshot.own_tags for snapshot in members
        ):
            return False
        return not self._away(all_groups, members)

    def awaited(self, all_groups: EveryGroup, members: Sequence[Snapshot]) -> list[str]:
        """Return the absent groups that may come back with further snapshots of a group snapshot.

        Left out are groups that no class names any more, and groups that were replaced by another
        group of the same name.
        """
        absent_groups = self._away(all_groups, members)
        return sorted(
            group
            for group in absent_groups
            if (group in self._groups) != self._volume_groups.has(group)
        )

    def _away(self, all_groups: EveryGroup, members: Sequence[Snapshot]) -> set[str]:
        """Return the absent groups that may hold further snapshots of a group snapshot."""
        present = {
            records.place_of(str(VolumeId.of(group, records.UNKNOWN)))
            for group in all_groups.groups.values()
        }
        places = {records.place_of(snapshot.group_snapshot_id) for snapshot in members}
        for snapshot in members:
            places |= set(filter(None, snapshot.own_tags.get(tag.MEMBER_GROUPS, "").split(",")))
        absent_groups = {place.partition("@")[0] for place in places - present}
        if any(tag.MEMBER_GROUPS not in snapshot.own_tags for snapshot in members):
            # Snapshots of older versions lack the tag with the groups, so further snapshots may be
            # in any group.
            absent_groups |= set(self._groups) - set(all_groups.groups)
        return absent_groups

    def seen(self, max_age_seconds: float) -> Seen:
        """Return the cached state, in which each group is at most `max_age_seconds` old.

        Each group is read at most once in that time, however many callers ask, and not at all if
        calls read it anyway. A group that does not answer has its last state. If no group answers,
        the error of a read is raised, and raised again to each caller for `max_age_seconds`. Raises
        GroupSilent, and CommandTimedOut after five seconds.
        """
        groups = list(self._volume_groups)
        refreshing = [
            group.refresh()
            for group in groups
            if not 0 <= time.time() - group.tried_seconds < max_age_seconds
        ]
        wait(refreshing, _MONITOR_WAIT_SECONDS)
        # The error of a refused group does not count: the group was read, and is like an absent
        # one.
        refused = errors.GroupRefused
        problems = [
            problem
            for group in groups
            if (problem := group.problem) and not isinstance(problem, refused)
        ]
        answers = any(group.cached is not None and group.problem is None for group in groups)
        if problems and not answers:
            # The same error is raised to each caller, so the stack traces of earlier callers are
            # removed.
            raise problems[0].with_traceback(None)
        if groups and not any(group.time_seconds for group in groups):
            raise mount_errors.CommandTimedOut(("lvm", "fullreport"), _MONITOR_WAIT_SECONDS)
        return self._cached()

    def cached(self, volume_id: str) -> Volume | None:
        """Return a volume by the cached state, and have that state refreshed when it is due.

        The result None does not prove that the volume is absent.
        """
        self.keep_fresh()
        logical = backing.of_id(volume_id)
        for group in filter(logical.may_be_in, self._cached().groups.values()):
            if logical.name in group.volumes:
                volume = records.volume(group, group.volumes[logical.name])
                if isinstance(volume, Volume):
                    return volume
        return None

    def _cached(self) -> Seen:
        """Return the cached state of all groups."""
        return Seen(self._present({group.name: group.cached for group in self._volume_groups}))

    def keep_fresh(self) -> None:
        """Note that a caller uses the cached state of all groups, so that `refresh` reads them."""
        self._in_use.update(self._groups)

    def outdate(self, written_path: str | None = None) -> None:
        """Have all disks scanned at the next read (`VolumeGroups.outdate`)."""
        self._volume_groups.outdate(written_path)

    def refresh(self, max_age_seconds: float) -> "list[Future[report.Group | None]]":
        """Begin to read each group whose cached state is in use and too old.

        A cached state is too old after `max_age_seconds`. Returns at once. A read that failed
        counts as a read, so that it is not repeated at once. Also starts deferred work for which no
        thread was available.
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
        """Time at which the oldest cached state of a group was read (epoch); 0 if none was read."""
        times = (group.time_seconds for group in self._volume_groups if group.time_seconds)
        return min(times, default=0.0)

    @property
    def refused(self) -> Mapping[str, errors.GroupRefused]:
        """The errors that say why present groups are not used, by the groups' names.

        By the cached state.
        """
        problems = {group.name: group.problem for group in self._volume_groups}
        return {
            name: problem
            for name, problem in problems.items()
            if isinstance(problem, errors.GroupRefused)
        }

    @property
    def ignored(self) -> Mapping[str, Sequence[str]]:
        """The disks that claim to be in a group but are not, as messages, by the groups' names.

        By the cached state.
        """
        return {
            volume_group.name: tuple(
                f"{path} is not used: it {why}" for path, why in volume_group.metadata.ignored
            )
            for volume_group in self._volume_groups
        }

    @property
    def problem(self) -> Exception | None:
        """The error of a group's last read, if a read failed. Runs no command."""
        return next(
            (group.problem for group in self._volume_groups if group.problem is not None), None
        )

    def _present(self, states: Mapping[str, report.Group | None]) -> dict[str, report.Group]:
        """Return the present groups: Carver's in the configuration's order, then the others."""
        ordered = dict.fromkeys((*self._groups, *states))
        return {name: group for name in ordered if (group := states.get(name)) is not None}


def _is_to_be_read(volume_group: VolumeGroup) -> bool:
    """Whether a group's cached state lacks changes by Carver that a read may show."""
    return not volume_group.has_own_changes and volume_group.status != "refused"
