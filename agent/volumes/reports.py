"""What finds: reports of the volume groups, read as fresh as each decision needs.

`Reports` runs no command but lvm2's reports. agent/volumes/report_age.py has what a report answers:
volumes, snapshots and group snapshots. agent/volumes/activator.py has their devices, and
agent/volumes/mender.py repairs what lvm2 left when it was killed.
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
from agent.volumes.records import Newer, Snapshot, Volume
from agent.volumes.report_age import Every, Fresh, Known, Seen
from agent.work import locks
from lvm import report
from mount import mount_errors as mount_errors
from mount.kernel import Kernel

# Metrics and health checks: how old a state may be, and how long they wait for a new one.
MONITOR_AGE_SECONDS = 60.0
_MONITOR_WAIT_SECONDS = 5.0


class Reports:
    """Reads volume groups, and finds what several of them have together.

    A call reads the fresh state of the groups that it decides about, which is seldom a command
    (agent.groups.metadata_cache). Monitoring uses the cached state.
    """

    def __init__(
        self,
        volume_groups: VolumeGroups,
        definitions: GroupDefinitions | None = None,
    ) -> None:
        self._volume_groups = volume_groups
        # Without definitions all groups are the operator's.
        self._definitions = definitions or GroupDefinitions(volume_groups.configuration, Kernel())
        # The groups whose cached state was used since `refresh` had them read.
        self._in_use: set[str] = set()

    @property
    def _groups(self) -> Sequence[str]:
        """The names of the groups of the configuration."""
        return self._volume_groups.names

    def fresh(self, *groups: str) -> Fresh:
        """The state of these groups now, or of all where none is named; of no other group.

        One command for each group that was written to since it was read.
        Raises CommandError, GroupRefused, GroupSilent, TooManyCalls, Starting.
        """
        locks.enter(*groups)
        every = self._groups
        asked = groups or every
        own = {name: self._volume_groups.of(name) for name in asked}
        states = {name: one.state() for name, one in own.items() if one is not None}
        return Fresh(
            self._present(states),
            asked=frozenset(asked),
            unasked=frozenset(every).difference(asked),
        )

    def everywhere(self, known: Fresh) -> Every:
        """All groups, where any may matter: the fresh ones, and the others as Carver left them.

        No command and no wait for a group that Carver did not change since it was read: an idle
        group that hangs keeps no call of another. One that was changed, or never read, is read, for
        three seconds at most, and is `silent` where it does not answer. So is one that is refused,
        which is not read here: a call about it, or the next retry, reads it.
        """
        others = [one for one in self._volume_groups if one.name not in known.asked]
        read = begin_states(filter(_is_to_be_read, others))()
        left = {one.name: one.cached for one in others}
        silent = frozenset(one.name for one in others if not one.has_own_changes)
        unread = frozenset(one.name for one in others if one.status == "unknown")
        return Every(
            self._present({**left, **read, **known.groups}),
            silent=silent,
            unread=unread,
            problems=known.problems,
        )

    def await_others(self, *groups: str) -> None:
        """Read what `everywhere` would, before these groups are held: no hold waits for another's.

        A group that does not answer in three seconds is not waited for again for a minute.
        """
        locks.enter(*groups)
        others = (one for one in self._volume_groups if one.name not in groups)
        begin_states(filter(_is_to_be_read, others))()

    def lists(self) -> Every:
        """All groups for a list: fresh, or as Carver left one that takes long, see `begin_states`.

        Raises GroupBusy, GroupSilent, GroupAwaited where that lacks something, GroupRefused.
        """
        locks.enter()
        return Every(self._present(begin_states(self._volume_groups, complete=True)()))

    def hint(self) -> Seen:
        """All groups as they are, or were when one that takes longer was read last."""
        locks.enter()
        return Seen(self._present(begin_states(self._volume_groups)()))

    def search(self, is_it: Callable[[Volume], bool]) -> Volume | None:
        """The volume that `is_it` is true of, by the fresh state of its group, or of all groups.

        So a volume in one group is found while another group hangs. Raises as `fresh` does.
        """
        hint = next(filter(is_it, self.hint().volumes()), None)
        if hint is not None:
            known = self.fresh(hint.group.name)
            if (volume := next(filter(is_it, known.volumes()), None)) is not None:
                return volume
        return next(filter(is_it, self.fresh().volumes()), None)

    def group(self, known: report.Report, name: str) -> report.Group:
        """A group to create volumes in; raises GroupMissing, GroupRefused."""
        return self._definitions.group(known, name)

    def require_groups(self, known: report.Report) -> None:
        """Raise GroupMissing, GroupRefused for one of Carver's groups that cannot be used."""
        for name in self._groups:
            self.group(known, name)

    def snapshot(self, known: Known, snapshot_id: str) -> Snapshot:
        """The snapshot of an id for a caller; raises NoSuchSnapshot, OtherGroup or NeedsOther.

        One of a group snapshot that is not on record as complete is looked at with all groups.
        """
        snapshot = known.taken_snapshot(snapshot_id)
        own = snapshot.group_snapshot_id
        if own and tag.COMMITTED not in snapshot.own_tags:
            every = known if isinstance(known, Every) else self.everywhere(known)
            if self.is_half_made(every, every.members(own)):
                raise errors.NoSuchSnapshot(snapshot_id)
        return snapshot

    def listed_snapshots(self, known: Known) -> Iterator[Snapshot]:
        """Every snapshot that a caller asked for, also those that only newer versions use.

        Those of group snapshots that are not on record as complete are looked at with all groups.
        """
        half_made: set[str] | None = None
        for one in known.every_snapshot():
            snapshot = one.shown if isinstance(one, Newer) else one
            if snapshot.is_bridge:
                continue
            if snapshot.group_snapshot_id and tag.COMMITTED not in snapshot.own_tags:
                if half_made is None:
                    every = known if isinstance(known, Every) else self.everywhere(known)
                    half_made = self.half_made(every)
                if snapshot.group_snapshot_id in half_made:
                    continue
            yield snapshot

    def half_made(self, known: Every) -> set[str]:
        """The group snapshots that never were complete; callers do not get their snapshots.

        That is proved: no snapshot has the tag that all were taken, and no group is absent that may
        hold another.
        """
        return {
            identity
            for identity, members in known.group_snapshots().items()
            if (own := [one for one in members if isinstance(one, Snapshot)]) == members
            and self.is_half_made(known, own)
        }

    def is_half_made(self, known: Every, members: Sequence[Snapshot]) -> bool:
        """Whether these snapshots of a group snapshot are not all, and never were."""
        if records.is_whole(members) or any(tag.COMMITTED in one.own_tags for one in members):
            return False
        return not self._away(known, members)

    def awaited(self, known: Every, members: Sequence[Snapshot]) -> list[str]:
        """The groups that may hold further snapshots of a group snapshot, and may yet appear here.

        Not a group that no class names any more, nor one replaced by another of its name.
        """
        away = self._away(known, members)
        return sorted(one for one in away if (one in self._groups) != self._volume_groups.has(one))

    def _away(self, known: Every, members: Sequence[Snapshot]) -> set[str]:
        """The groups that may hold further snapshots of a group snapshot, and are absent."""
        here = {
            records.place_of(str(VolumeId.of(one, records.UNKNOWN)))
            for one in known.groups.values()
        }
        named = {records.place_of(one.group_snapshot_id) for one in members}
        for one in members:
            named |= set(filter(None, one.own_tags.get(tag.MEMBER_GROUPS, "").split(",")))
        away = {one.partition("@")[0] for one in named - here}
        if any(tag.MEMBER_GROUPS not in one.own_tags for one in members):
            # Snapshots of older versions do not say: others may be in any group.
            away |= set(self._groups) - set(known.groups)
        return away

    def seen(self, max_age: float) -> Seen:
        """The cached state, refreshed where it is older than `max_age` (seconds).

        However many ask, each group is read once in that time, and not at all where calls read it
        anyway. A group that does not answer has its last state. Where no group answers, the error
        is raised, again for as long. Raises CommandTimedOut after five seconds, GroupSilent.
        """
        every = list(self._volume_groups)
        refreshing = [
            one.refresh() for one in every if not 0 <= time.time() - one.tried_seconds < max_age
        ]
        wait(refreshing, _MONITOR_WAIT_SECONDS)
        # A group that is refused was read, and is as good as absent.
        refused = errors.GroupRefused
        problems = [p for one in every if (p := one.problem) and not isinstance(p, refused)]
        answers = any(one.cached is not None and one.problem is None for one in every)
        if problems and not answers:
            # The same error each time: without the traces of earlier callers.
            raise problems[0].with_traceback(None)
        if every and not any(one.time_seconds for one in every):
            raise mount_errors.CommandTimedOut(("lvm", "fullreport"), _MONITOR_WAIT_SECONDS)
        return self._cached()

    def cached(self, volume_id: str) -> Volume | None:
        """A volume by the cached state, which is refreshed when it is due; None proves nothing."""
        self.keep_fresh()
        logical = backing.of_id(volume_id)
        for group in filter(logical.may_be_in, self._cached().groups.values()):
            if logical.name in group.volumes:
                volume = records.volume(group, group.volumes[logical.name])
                if isinstance(volume, Volume):
                    return volume
        return None

    def _cached(self) -> Seen:
        return Seen(self._present({one.name: one.cached for one in self._volume_groups}))

    def keep_fresh(self) -> None:
        """Have the next `refresh` read all groups: a caller goes by their cached state."""
        self._in_use.update(self._groups)

    def outdate(self, written: str | None = None) -> None:
        """Have all disks scanned; see `VolumeGroups.outdate`."""
        self._volume_groups.outdate(written)

    def refresh(self, max_age: float) -> "list[Future[report.Group | None]]":
        """Begin to read each group whose cached state is used and older than that (seconds).

        Returns at once. A read that failed counts, so that it is not repeated at once. Begins
        deferred work that had no thread, too.
        """
        self._volume_groups.catch_up()
        begun = []
        for one in self._volume_groups:
            is_due = abs(time.time() - one.tried_seconds) >= max_age
            if is_due and one.name in self._in_use:
                begun.append(one.refresh())
                self._in_use.discard(one.name)
        return begun

    @property
    def time_seconds(self) -> float:
        """When the oldest cached state of a group was read (epoch); 0 where none was."""
        times = (one.time_seconds for one in self._volume_groups if one.time_seconds)
        return min(times, default=0.0)

    @property
    def refused(self) -> Mapping[str, errors.GroupRefused]:
        """Why groups that are here are not used, by their names; from the cached state."""
        problems = {one.name: one.problem for one in self._volume_groups}
        return {name: one for name, one in problems.items() if isinstance(one, errors.GroupRefused)}

    @property
    def ignored(self) -> Mapping[str, Sequence[str]]:
        """The disks that only claim to be a group's, by the groups; from the cached state."""
        return {
            volume_group.name: tuple(
                f"{path} is not used: it {why}" for path, why in volume_group.metadata.ignored
            )
            for volume_group in self._volume_groups
        }

    @property
    def problem(self) -> Exception | None:
        """Why the last read of a group failed; no command."""
        return next((one.problem for one in self._volume_groups if one.problem is not None), None)

    def _present(self, states: Mapping[str, report.Group | None]) -> dict[str, report.Group]:
        """The groups that are present: Carver's in the configuration's order, then the others."""
        ordered = dict.fromkeys((*self._groups, *states))
        return {name: group for name in ordered if (group := states.get(name)) is not None}


def _is_to_be_read(volume_group: VolumeGroup) -> bool:
    """Whether the cached state lacks something that Carver did, and a read may help."""
    return not volume_group.has_own_changes and volume_group.status != "refused"
