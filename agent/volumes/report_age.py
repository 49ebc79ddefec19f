"""Reports by what may be decided by their age, as three types; and the volumes found in each.

A report of a group may be older than what is in it. A call that changes something decides by the
state of each group that the decision is about: by `Fresh` for the groups that it names, by `Every`
where any group may matter. `Seen` is for metrics, health and hints. agent/volumes/reports.py reads
them; nothing here runs a command.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.volumes import records, volume_states
from agent.volumes.records import Newer, Snapshot, Volume, to_use
from agent.volumes.volume_states import Call, Ender
from lvm import names, report


class Contents(report.Report):
    """Carver's volumes and snapshots in the groups of a report, be it fresh or old."""

    def volumes(self) -> Iterator[Volume]:
        """Every volume that this version uses, also those that are being erased."""
        for group in self.groups.values():
            yield from (one for one in records.volumes_of(group) if isinstance(one, Volume))

    def shown(self) -> Iterator[Volume]:
        """Every volume, also those that only newer versions use: what they stand on stays."""
        for group in self.groups.values():
            for one in records.volumes_of(group):
                yield one.shown if isinstance(one, Newer) else one

    def listed(self) -> list[Volume]:
        """What the CO has as volumes, to be shown; also those that only newer versions use."""
        return [one for one in self.shown() if one.is_listed]

    def copies(self) -> Iterator[Volume]:
        """Every volume that is being filled, also those that only newer versions use."""
        return (one for one in self.shown() if one.ended_by is Ender.COPIER)

    def snapshots(self) -> Iterator[Snapshot]:
        """Every snapshot that this version uses, also those that volumes are copied from."""
        return (one for one in self.every_snapshot() if isinstance(one, Snapshot))

    def every_snapshot(self) -> Iterator[Snapshot | Newer[Snapshot]]:
        """Every snapshot, also those that only newer versions use, each as what it is here."""
        for group, logical in self._logical():
            if (snapshot := records.snapshot(group, logical)) is not None:
                yield snapshot

    def group_snapshots(self) -> Mapping[str, list[Snapshot | Newer[Snapshot]]]:
        """The snapshots of each group snapshot that are present, by its id."""
        members: defaultdict[str, list[Snapshot | Newer[Snapshot]]] = defaultdict(list)
        for one in self.every_snapshot():
            shown = one.shown if isinstance(one, Newer) else one
            if shown.group_snapshot_id:
                members[shown.group_snapshot_id].append(one)
        return members

    def _logical(self) -> Iterator[tuple[report.Group, report.LogicalVolume]]:
        for group in self.groups.values():
            yield from ((group, logical) for logical in records.every(group))


@dataclass(frozen=True)
class Current(Contents):
    """A report that a decision may go by.

    `problems` has why what lvm2 left when it was killed could not be repaired, by the group and the
    logical volume; only agent/volumes/mender.py tries to.
    """

    problems: Mapping[tuple[str, str], Exception] = field(default_factory=dict)

    def volume(self, volume_id: str) -> Volume:
        """The volume of an id, even one that is being erased.

        Raises NoSuchVolume where the report proves its absence, OtherGroup where its group is not
        here, so that nothing is proved, and NeedsOther, TagsDamaged.
        """
        place = self._find(volume_id)
        volume = None if place is None else records.volume(*place)
        if volume is None:
            raise errors.NoSuchVolume(volume_id)
        return to_use(volume)

    def usable(self, volume_id: str, call: Call) -> Volume:
        """The volume of an id for a call, if its record lets the call have it.

        Raises as `volume` and `volume_states.require`.
        """
        volume = self.volume(volume_id)
        volume_states.require(call, volume)
        return volume

    def taken_snapshot(self, snapshot_id: str) -> Snapshot:
        """The snapshot of an id, also of a group snapshot that is not complete; no bridge.

        Raises NoSuchSnapshot, OtherGroup or NeedsOther, as `volume` does. `Reports.snapshot` is for
        callers, who do not get one of a group snapshot that is not complete.
        """
        place = self._find(snapshot_id)
        either = None if place is None else records.snapshot(*place)
        snapshot = None if either is None else to_use(either)
        if snapshot is None or snapshot.is_bridge:
            raise errors.NoSuchSnapshot(snapshot_id)
        return snapshot

    def members(self, group_snapshot_id: str) -> list[Snapshot]:
        """The snapshots of a group snapshot that are present, be it complete or not.

        Raises NeedsOther.
        """
        return [to_use(one) for one in self.group_snapshots().get(group_snapshot_id, ())]

    def doomed(self) -> Iterator[Volume]:
        """Every volume that is recorded as deleted, and has yet to be erased.

        Without those that only a newer version knows how to erase.
        """
        for group, logical in self._logical():
            volume = records.volume(group, logical) or records.remains(group, logical)
            if isinstance(volume, Volume) and volume.is_doomed:
                yield volume

    def doomed_volume(self, identity: str) -> Volume:
        """The volume recorded as deleted under an id; raises as `volume` does."""
        place = self._find(identity)
        either = None if place is None else records.volume(*place) or records.remains(*place)
        volume = None if either is None else to_use(either)
        if volume is None or not volume.is_doomed:
            raise errors.NoSuchVolume(identity)
        return volume

    def require_none_named(self, name: str, prefix: str) -> None:
        """Raise NeedsOther, TagsDamaged for one of that name, which a search leaves out."""
        for group in self.groups.values():
            records.named(group, name, prefix)

    def require_group_of(self, identity: str) -> None:
        """Raise OtherGroup for an id of a group that is not here: nothing is proved."""
        self._find(identity)

    def require_repaired(self, volume: Volume) -> None:
        """Raise why what lvm2 left of a volume, or of what it depends on, is not repaired."""
        self._require_repaired(volume.group, volume.group.volume(volume.name))

    def _require_repaired(self, group: report.Group, logical: report.LogicalVolume) -> None:
        for name in filter(None, (logical.name, logical.origin, logical.pool)):
            if problem := self.problems.get((group.name, name)):
                raise problem.with_traceback(None)

    def _find(self, identity: str) -> tuple[report.Group, report.LogicalVolume] | None:
        """The logical volume of an id; None for an impossible id, and where its absence is proved.

        Raises OtherGroup where the group is not here: nothing is proved then; and why what lvm2
        left of it is not repaired.
        """
        parsed = VolumeId.parse(identity)
        if parsed is None:
            return None
        group = self.groups.get(parsed.group)
        if group is None:
            raise errors.OtherGroup(identity, f"group {parsed.group} is not on this node")
        if not parsed.is_of(group.uuid):
            raise errors.OtherGroup(identity, f"group {parsed.group} here has another UUID")
        logical = group.volumes.get(parsed.name)
        if logical is None:
            return None
        self._require_repaired(group, logical)
        return group, logical


@dataclass(frozen=True)
class Fresh(Current):
    """Groups that a call named, each read after the call began; `asked` has their names.

    It says nothing of another group, which is not the same as that it is absent; `unasked` has the
    names of Carver's other groups, which no id may be looked for in.
    """

    asked: frozenset[str] = frozenset()
    unasked: frozenset[str] = frozenset()

    def _find(self, identity: str) -> tuple[report.Group, report.LogicalVolume] | None:
        parsed = VolumeId.parse(identity)
        if parsed is not None and parsed.group in self.unasked:
            raise AssertionError(f"{identity}: {parsed.group} was not read")
        return super()._find(identity)


@dataclass(frozen=True)
class Every(Current):
    """Each group that this process ever read, with all that Carver did there until now.

    What others did in a group since, such as an operator, may be missing. `silent` has the names of
    groups that Carver changed and that have not answered since, where what it did last may be
    missing, and of those that this process never read, or that are refused, where all of it is.
    `unread` has those that have not answered yet.
    """

    silent: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()

    def named(self, name: str, prefix: str = ids.VOLUME_PREFIX) -> Volume | None:
        """The volume that the CO calls `name`, in whichever of Carver's groups it is.

        Raises NeedsOther, and why what lvm2 left of it is not repaired.
        """
        every = (records.named(group, name, prefix) for group in self.groups.values())
        volume = next(filter(None, every), None)
        if volume is not None:
            self.require_repaired(volume)
        return volume

    def require_not_copied(self, source_id: str) -> None:
        """Raise VolumeInUse for a snapshot or a volume from which a volume is being copied.

        The source's group is held, which each new copy takes as well. Raises GroupBusy for a
        snapshot while a group was never read, which may have such a volume. A volume itself is not
        read: a copy has its bridge, which is not removed while the copy's group is silent.
        """
        if names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(source_id)):
            self.require_read()
        copies = [str(one.id) for one in self.copies() if one.own_tags.get(tag.FROM) == source_id]
        if copies:
            raise errors.VolumeInUse(source_id, f"{', '.join(copies)} is copied from it")

    def is_known_unused(self, bridge: Snapshot) -> bool:
        """Whether a bridge that no volume here needs is needed by none of a silent group.

        Its own tag has the group of the one volume that it was taken for.
        """
        return not self.unanswered(*_groups_of_copy(bridge))

    def require_known_unused(self, bridge: Snapshot) -> None:
        """Raise GroupBusy where `is_known_unused` is false."""
        self.require_answered(*_groups_of_copy(bridge))

    def unanswered(self, *groups: str) -> frozenset[str]:
        """Those of these groups, or of all where none is named, that are `silent`."""
        return self.silent & set(groups) if groups else self.silent

    def require_answered(self, *groups: str) -> None:
        """Raise GroupBusy while what Carver did last in one of these groups may be missing.

        Of all groups where none is named.
        """
        if silent := self.unanswered(*groups):
            named = ", ".join(sorted(silent))
            raise errors.GroupBusy(f"volume group {named}", "it has not answered")

    def require_read(self) -> None:
        """Raise GroupBusy while a group was never read: an earlier process may have begun a copy.

        What this process began, also in a group that hangs, its jobs know.
        """
        if self.unread:
            named = ", ".join(sorted(self.unread))
            raise errors.GroupBusy(f"volume group {named}", "it has not answered since the start")


@dataclass(frozen=True)
class Seen(Contents):
    """Groups as they were when they were read last, perhaps long ago: no decision goes by it."""

    def volume(self, volume_id: str) -> Volume:
        """The volume of an id, to be shown; raises as `usable` of the others for Call.USE."""
        return Fresh(self.groups, asked=frozenset(self.groups)).usable(volume_id, Call.USE)


# The reports that a decision may go by.
Known = Fresh | Every


def fresh(groups: Iterable[report.Group]) -> Fresh:
    """The state of groups that the caller just read, and holds."""
    every = {one.name: one for one in groups}
    return Fresh(every, asked=frozenset(every))


def _groups_of_copy(bridge: Snapshot) -> list[str]:
    """The groups that may have the volume that a bridge was taken for; none where any may."""
    return [ids.group_of(bridge.copy_id)] if bridge.copy_id else []
