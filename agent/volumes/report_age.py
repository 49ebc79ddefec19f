"""Reports in three types, by the decisions that their age allows; and the volumes found in them.

A report of a volume group may be older than the group's present state. A call that changes
something has to know the present state of each group that its decision is about. There are three
types, so that mypy finds a decision by a report that is too old:

- `Fresh` has the groups that the call names, each read after the call began.
- `EveryGroup` has all groups with all changes by Carver, for decisions in which any group may
  matter.
- `Seen` has the groups as they were read last, for metrics, health and hints.

agent/volumes/reports.py reads them; the code here runs no command.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.volumes import records, volume_states
from agent.volumes.records import MadeByNewerVersion, Snapshot, Volume, to_use
from agent.volumes.volume_states import Call, EndedBy
from lvm import names, report


class Contents(report.Report):
    """Carver's volumes and snapshots in the groups of a report, which may be fresh or old."""

    def volumes(self) -> Iterator[Volume]:
        """Yield the volumes that this version can use, including those that are being erased."""
        for group in self.groups.values():
            yield from (
                volume for volume in records.volumes_of(group) if isinstance(volume, Volume)
            )

    def shown(self) -> Iterator[Volume]:
        """Yield all volumes, also those that this version must not use (`MadeByNewerVersion`).

        What such a volume depends on must not be removed.
        """
        for group in self.groups.values():
            for volume in records.volumes_of(group):
                yield volume.shown if isinstance(volume, MadeByNewerVersion) else volume

    def listed(self) -> list[Volume]:
        """Return the volumes that the CO knows as volumes, to be shown.

        Volumes that this version of Carver must not use (`MadeByNewerVersion`) are included.
        """
        return [volume for volume in self.shown() if volume.is_listed]

    def copies(self) -> Iterator[Volume]:
        """Yield the volumes that are being filled by a copy, or with zeroes.

        Volumes that this version of Carver must not use (`MadeByNewerVersion`) are included.
        """
        return (volume for volume in self.shown() if volume.ended_by is EndedBy.COPIER)

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield the snapshots that this version can use, including temporary ones (bridges)."""
        return (snapshot for snapshot in self.every_snapshot() if isinstance(snapshot, Snapshot))

    def every_snapshot(self) -> Iterator[Snapshot | MadeByNewerVersion[Snapshot]]:
        """Yield all snapshots; a `MadeByNewerVersion` for each that this version must not use."""
        for group, logical in self._logical():
            if (snapshot := records.snapshot(group, logical)) is not None:
                yield snapshot

    def group_snapshots(self) -> Mapping[str, list[Snapshot | MadeByNewerVersion[Snapshot]]]:
        """Return the present snapshots of each group snapshot, by the group snapshot's id."""
        members: defaultdict[str, list[Snapshot | MadeByNewerVersion[Snapshot]]] = defaultdict(list)
        for snapshot in self.every_snapshot():
            shown = snapshot.shown if isinstance(snapshot, MadeByNewerVersion) else snapshot
            if shown.group_snapshot_id:
                members[shown.group_snapshot_id].append(snapshot)
        return members

    def _logical(self) -> Iterator[tuple[report.Group, report.LogicalVolume]]:
        """Yield each logical volume of each group."""
        for group in self.groups.values():
            yield from ((group, logical) for logical in records.every(group))


@dataclass(frozen=True)
class Current(Contents):
    """A report that is recent enough for decisions.

    `problems` has the errors of failed repairs, by the names of the group and of the logical
    volume. Only agent/volumes/mender.py repairs what a killed lvm2 left.
    """

    problems: Mapping[tuple[str, str], Exception] = field(default_factory=dict)

    def volume(self, volume_id: str) -> Volume:
        """Return the volume with an id, even if the volume is being erased.

        Raises NoSuchVolume if the report proves the volume's absence, and OtherGroup if the
        volume's group is not in the report, so that nothing is proved. Raises NeedsOther or
        TagsDamaged if this version must not use the volume.
        """
        location = self._find(volume_id)
        volume = None if location is None else records.volume(*location)
        if volume is None:
            raise errors.NoSuchVolume(volume_id)
        return to_use(volume)

    def usable(self, volume_id: str, call: Call) -> Volume:
        """Return the volume with an id, if the volume's record lets the call use the volume.

        Raises as `volume` and `volume_states.require`.
        """
        volume = self.volume(volume_id)
        volume_states.require(call, volume)
        return volume

    def taken_snapshot(self, snapshot_id: str) -> Snapshot:
        """Return the snapshot with an id, even of an incomplete group snapshot.

        Temporary snapshots (bridges) are not found. Raises NoSuchSnapshot, OtherGroup or
        NeedsOther, as `volume` does. Callers of RPCs get snapshots by `Reports.snapshot`, which
        leaves out the snapshots of incomplete group snapshots.
        """
        location = self._find(snapshot_id)
        record = None if location is None else records.snapshot(*location)
        snapshot = None if record is None else to_use(record)
        if snapshot is None or snapshot.is_bridge:
            raise errors.NoSuchSnapshot(snapshot_id)
        return snapshot

    def members(self, group_snapshot_id: str) -> list[Snapshot]:
        """Return the present snapshots of a group snapshot, which may be incomplete.

        Raises NeedsOther.
        """
        return [to_use(snapshot) for snapshot in self.group_snapshots().get(group_snapshot_id, ())]

    def doomed(self) -> Iterator[Volume]:
        """Yield the volumes that are recorded as deleted and have yet to be erased.

        Left out are volumes that only a newer version knows how to erase.
        """
        for group, logical in self._logical():
            volume = records.volume(group, logical) or records.remains(group, logical)
            if isinstance(volume, Volume) and volume.is_doomed:
                yield volume

    def doomed_volume(self, identity: str) -> Volume:
        """Return the volume with an id that is recorded as deleted; raise as `volume` does."""
        location = self._find(identity)
        record = (
            None if location is None else records.volume(*location) or records.remains(*location)
        )
        volume = None if record is None else to_use(record)
        if volume is None or not volume.is_doomed:
            raise errors.NoSuchVolume(identity)
        return volume

    def require_none_named(self, name: str, prefix: str) -> None:
        """Raise NeedsOther or TagsDamaged if a volume of that name must not be used.

        A search for the name leaves such a volume out.
        """
        for group in self.groups.values():
            records.named(group, name, prefix)

    def require_group_of(self, identity: str) -> None:
        """Raise OtherGroup if the volume group of an id is not in the report.

        Nothing about the id is proved then.
        """
        self._find(identity)

    def require_repaired(self, volume: Volume) -> None:
        """Raise the error of a failed repair of a volume, or of what the volume depends on."""
        self._require_repaired(volume.group, volume.group.volume(volume.name))

    def _require_repaired(self, group: report.Group, logical: report.LogicalVolume) -> None:
        """Raise the error of a failed repair of a logical volume, its origin or its thin pool."""
        for name in filter(None, (logical.name, logical.origin, logical.pool)):
            if problem := self.problems.get((group.name, name)):
                raise problem.with_traceback(None)

    def _find(self, identity: str) -> tuple[report.Group, report.LogicalVolume] | None:
        """Return the group and the logical volume of an id, or None if the volume does not exist.

        None also stands for an impossible id. Raises OtherGroup if the group is not in the report,
        so that nothing is proved; and the error of a failed repair of the volume.
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
    """A report of the volume groups that a call named, each read after the call began.

    `asked` has the names of these groups. A group that is not in the report is not proved to be
    absent. `unasked` has the names of Carver's other groups; to look for an id in one of these is
    an error of the program.
    """

    asked: frozenset[str] = frozenset()
    unasked: frozenset[str] = frozenset()

    def _find(self, identity: str) -> tuple[report.Group, report.LogicalVolume] | None:
        parsed = VolumeId.parse(identity)
        if parsed is not None and parsed.group in self.unasked:
            raise AssertionError(f"{identity}: {parsed.group} was not read")
        return super()._find(identity)


@dataclass(frozen=True)
class EveryGroup(Current):
    """A report of all volume groups with all changes by Carver until now.

    It has each group that this process ever read. Changes by others since, such as an operator, may
    be missing.

    `silent` has the names of groups in which changes by Carver may be missing: groups that Carver
    changed and that have not answered since, groups that this process never read, and groups that
    are refused. `unread` has the names of groups that have not answered yet.
    """

    silent: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()

    def named(self, name: str, prefix: str = ids.VOLUME_PREFIX) -> Volume | None:
        """Return the volume that the CO calls `name`, in whichever of Carver's groups it is.

        Raises NeedsOther, and the error of a failed repair of the volume.
        """
        candidates = (records.named(group, name, prefix) for group in self.groups.values())
        volume = next(filter(None, candidates), None)
        if volume is not None:
            self.require_repaired(volume)
        return volume

    def require_not_copied(self, source_id: str) -> None:
        """Raise VolumeInUse if a volume is being copied from this snapshot or volume.

        The caller holds the lock of the source's group, which each new copy takes as well. If the
        source is a snapshot, raises GroupBusy while a group was never read, because that group may
        have a copy. If the source is a volume, that check is not needed: the copy has a temporary
        snapshot (bridge) of the volume, which is not removed while the copy's group is silent.
        """
        if names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(source_id)):
            self.require_read()
        copies = [
            str(copy.id) for copy in self.copies() if copy.own_tags.get(tag.FROM) == source_id
        ]
        if copies:
            raise errors.VolumeInUse(source_id, f"{', '.join(copies)} is copied from it")

    def is_known_unused(self, bridge: Snapshot) -> bool:
        """Whether a bridge that no present volume needs is also not needed in a silent group.

        A bridge is a temporary snapshot from which a volume is copied. Its own tag has the group of
        that volume.
        """
        return not self.unanswered(*_groups_of_copy(bridge))

    def require_known_unused(self, bridge: Snapshot) -> None:
        """Raise GroupBusy if a volume in a silent group may need a bridge (`is_known_unused`)."""
        self.require_answered(*_groups_of_copy(bridge))

    def unanswered(self, *groups: str) -> frozenset[str]:
        """Return those of these groups that are `silent`; of all groups, if none is named."""
        return self.silent & set(groups) if groups else self.silent

    def require_answered(self, *groups: str) -> None:
        """Raise GroupBusy while changes by Carver in one of these groups may be missing.

        If no group is named, all groups count.
        """
        if silent := self.unanswered(*groups):
            group_names = ", ".join(sorted(silent))
            raise errors.GroupBusy(f"volume group {group_names}", "it has not answered")

    def require_read(self) -> None:
        """Raise GroupBusy while a volume group was never read.

        An earlier process may have begun a copy in such a group. Copies that this process began,
        also in a group that hangs, are known by their jobs.
        """
        if self.unread:
            group_names = ", ".join(sorted(self.unread))
            raise errors.GroupBusy(
                f"volume group {group_names}", "it has not answered since the start"
            )


@dataclass(frozen=True)
class Seen(Contents):
    """Volume groups as they were when they were read last, perhaps long ago; not for decisions."""

    def volume(self, volume_id: str) -> Volume:
        """Return the volume with an id, to be shown; raise as `Current.usable` for Call.USE."""
        return Fresh(self.groups, asked=frozenset(self.groups)).usable(volume_id, Call.USE)


# Types of the reports that are recent enough for decisions.
Known = Fresh | EveryGroup


def fresh(groups: Iterable[report.Group]) -> Fresh:
    """Return a report of groups that the caller has just read, and whose locks the caller holds."""
    by_name = {group.name: group for group in groups}
    return Fresh(by_name, asked=frozenset(by_name))


def _groups_of_copy(bridge: Snapshot) -> list[str]:
    """Return the groups that may have the volume that is copied from a bridge.

    An empty list stands for all groups.
    """
    return [ids.group_of(bridge.copy_id)] if bridge.copy_id else []
