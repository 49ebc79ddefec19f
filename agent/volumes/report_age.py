"""Reports of volume groups, in three types by their age, and the volumes that are found in reports.

A report of a volume group may be older than the group's present state. A call that changes
something has to know the present state of each group that its decision is about. The age of a
report decides for which decisions it may be used. There are three types, so that mypy finds a
decision by a report that is too old:

- `Fresh` has the groups that the call names, each read after the call began.
- `EveryGroup` has all configured groups with the changes by Carver, for decisions in which any
  group may matter. It names the groups in which such changes may be missing.
- `CachedReport` has the groups as they were read last, for metrics, health and hints.

agent/volumes/reports.py makes the reports; the code here runs no command.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.volumes import records, volume_states
from agent.volumes.records import MadeByNewerVersion, Snapshot, Volume, require_usable
from agent.volumes.volume_states import Call, EndedBy
from lvm import names, report


class Contents(report.Report):
    """A report of volume groups, fresh or old; its methods find Carver's volumes and snapshots."""

    def volumes(self) -> Iterator[Volume]:
        """Yield the volumes that this version of Carver may use, also those being erased."""
        for group in self.groups.values():
            yield from (
                volume for volume in records.volumes_of(group) if isinstance(volume, Volume)
            )

    def shown(self) -> Iterator[Volume]:
        """Yield all volumes, also those that this version must not use (`MadeByNewerVersion`).

        They are to be shown, and to be considered before something is removed: a snapshot from
        which such a volume is copied must not be removed.
        """
        for group in self.groups.values():
            for volume in records.volumes_of(group):
                yield volume.shown if isinstance(volume, MadeByNewerVersion) else volume

    def listed(self) -> list[Volume]:
        """Return the volumes that are shown in lists, such as that of ListVolumes.

        Volumes that this version of Carver must not use (`MadeByNewerVersion`) are included.
        """
        return [volume for volume in self.shown() if volume.is_listed]

    def copies(self) -> Iterator[Volume]:
        """Yield the volumes that are recorded as being filled, by a copy or with zeroes.

        Volumes that this version of Carver must not use (`MadeByNewerVersion`) are included.
        """
        return (volume for volume in self.shown() if volume.ended_by is EndedBy.COPIER)

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield the snapshots that this version of Carver may use, including temporary ones."""
        return (snapshot for snapshot in self.every_snapshot() if isinstance(snapshot, Snapshot))

    def every_snapshot(self) -> Iterator[Snapshot | MadeByNewerVersion[Snapshot]]:
        """Yield all snapshots, including temporary ones.

        A snapshot that this version of Carver must not use is yielded as a `MadeByNewerVersion`.
        """
        for group, logical in self._logical():
            if (snapshot := records.snapshot(group, logical)) is not None:
                yield snapshot

    def group_snapshots(self) -> Mapping[str, list[Snapshot | MadeByNewerVersion[Snapshot]]]:
        """Return the snapshots of each group snapshot in the report, by the group snapshot's id.

        The snapshots in groups that are not in the report are missing.
        """
        members: defaultdict[str, list[Snapshot | MadeByNewerVersion[Snapshot]]] = defaultdict(list)
        for snapshot in self.every_snapshot():
            shown = snapshot.shown if isinstance(snapshot, MadeByNewerVersion) else snapshot
            if shown.group_snapshot_id:
                members[shown.group_snapshot_id].append(snapshot)
        return members

    def _logical(self) -> Iterator[tuple[report.Group, report.LogicalVolume]]:
        """Yield each logical volume in the report, with its volume group."""
        for group in self.groups.values():
            yield from ((group, logical) for logical in records.all_logical_volumes(group))


@dataclass(frozen=True)
class Current(Contents):
    """A report of volume groups that is recent enough for decisions.

    `problems` has the errors of repairs that failed, by the names of the volume group and of the
    logical volume. Only agent/volumes/mender.py repairs, so only its reports have such errors.
    """

    problems: Mapping[tuple[str, str], Exception] = field(default_factory=dict)

    def volume(self, volume_id: str) -> Volume:
        """Return the volume with an id, even if the volume is being erased.

        Raises NoSuchVolume if the report proves the volume's absence, or the id is impossible.
        Raises OtherGroup if the volume's group is not in the report, so that nothing is proved.
        Raises NeedsOther or TagsDamaged if this version must not use the volume, and the error of a
        failed repair of the volume.
        """
        location = self._find(volume_id)
        volume = None if location is None else records.volume(*location)
        if volume is None:
            raise errors.NoSuchVolume(volume_id)
        return require_usable(volume)

    def usable(self, volume_id: str, call: Call) -> Volume:
        """Return the volume with an id, if its state lets a call use the volume.

        Raises as `volume`, and as `volume_states.require` if the state excludes the call.
        """
        volume = self.volume(volume_id)
        volume_states.require(call, volume)
        return volume

    def taken_snapshot(self, snapshot_id: str) -> Snapshot:
        """Return the snapshot with an id, even of an incomplete group snapshot.

        Raises NoSuchSnapshot if the report proves the snapshot's absence, or if it is a temporary
        one; else raises as `volume`. Callers of RPCs get snapshots by `Reports.snapshot`, which
        leaves out the snapshots of incomplete group snapshots.
        """
        location = self._find(snapshot_id)
        record = None if location is None else records.snapshot(*location)
        snapshot = None if record is None else require_usable(record)
        if snapshot is None or snapshot.is_bridge:
            raise errors.NoSuchSnapshot(snapshot_id)
        return snapshot

    def members(self, group_snapshot_id: str) -> list[Snapshot]:
        """Return the snapshots of a group snapshot in the report; the group snapshot may have more.

        Raises NeedsOther or TagsDamaged if this version must not use one of the snapshots.
        """
        return [
            require_usable(snapshot)
            for snapshot in self.group_snapshots().get(group_snapshot_id, ())
        ]

    def doomed(self) -> Iterator[Volume]:
        """Yield the volumes that are recorded as deleted and have yet to be erased.

        Deleted snapshots, and extents reserved for growth, are included as volumes. Left out are
        volumes that this version of Carver must not use (`MadeByNewerVersion`).
        """
        for group, logical in self._logical():
            volume = records.volume(group, logical) or records.remains(group, logical)
            if isinstance(volume, Volume) and volume.is_doomed:
                yield volume

    def doomed_volume(self, identity: str) -> Volume:
        """Return the volume with an id if it is recorded as deleted, and has yet to be erased.

        Deleted snapshots, and extents reserved for growth, count as volumes. Raises as `volume`,
        and NoSuchVolume if the volume is not recorded as deleted.
        """
        location = self._find(identity)
        record = (
            None if location is None else records.volume(*location) or records.remains(*location)
        )
        volume = None if record is None else require_usable(record)
        if volume is None or not volume.is_doomed:
            raise errors.NoSuchVolume(identity)
        return volume

    def require_none_named(self, own_name: str) -> None:
        """Raise NeedsOther or TagsDamaged if there is a volume of this name that must not be used.

        `own_name` is the name of the volume's logical volume.
        """
        for group in self.groups.values():
            records.find_named(group, own_name)

    def require_group_of(self, identity: str) -> None:
        """Raise OtherGroup if the volume group of an id is not in the report.

        Without this error, the report proves whether the object with the id exists. Also raises the
        error of a failed repair of that object.
        """
        self._find(identity)

    def require_repaired(self, volume: Volume) -> None:
        """Raise the error of a failed repair of a volume, of its origin or of its thin pool."""
        if self.problems:
            self._require_repaired(volume.group, volume.group.volume(volume.name))

    def _require_repaired(self, group: report.Group, logical: report.LogicalVolume) -> None:
        """Raise the error of a failed repair of a logical volume, its origin or its thin pool."""
        for name in filter(None, (logical.name, logical.origin, logical.pool)):
            if problem := self.problems.get((group.name, name)):
                raise problem.with_traceback(None)

    def _find(self, identity: str) -> tuple[report.Group, report.LogicalVolume] | None:
        """Return the volume group and the logical volume of an id; None if there is none.

        None also for an id that is none of Carver's. Raises OtherGroup if the group is not in the
        report, so that nothing is proved; and the error of a failed repair of the logical volume.
        """
        parsed = VolumeId.parse(identity)
        if parsed is None:
            return None
        self._require_read(parsed)
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

    def _require_read(self, identity: VolumeId) -> None:
        """Raise AssertionError for an id in a volume group that the report was not to have."""


@dataclass(frozen=True)
class Fresh(Current):
    """A report of the volume groups that a call named, each read after the call began.

    `named_groups` has the names of these groups; those that are not on this node are not in the
    report. `other_groups` has the names of the other configured groups. To search for an id in one
    of these is an error of the program.
    """

    named_groups: frozenset[str] = frozenset()
    other_groups: frozenset[str] = frozenset()

    def _require_read(self, identity: VolumeId) -> None:
        if identity.group in self.other_groups:
            raise AssertionError(f"{identity}: {identity.group} was not read")


@dataclass(frozen=True)
class EveryGroup(Current):
    """A report of all configured volume groups, with all changes by Carver but in `silent` ones.

    Each group is as it was when this process last read it. Changes by others since, such as an
    operator, may be missing. Groups that are absent, refused or unread are not in the report.

    `silent` has the names of the groups in which changes by Carver may be missing: groups that
    Carver changed and that have not answered since, groups that this process never read, and groups
    that are refused. `unread` has the names of the groups that this process never read.
    """

    silent: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()

    def find_named(self, own_name: str) -> Volume | None:
        """Return the volume whose logical volume is `own_name`, in any volume group; None for none.

        Raises NeedsOther or TagsDamaged if this version must not use the volume, and the error of a
        failed repair of the volume.
        """
        for group in self.groups.values():
            if (volume := records.find_named(group, own_name)) is not None:
                self.require_repaired(volume)
                return volume
        return None

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
        """Whether certainly no volume in a silent volume group is copied from a temporary snapshot.

        `bridge` is the snapshot, from which no volume in the report is copied. The snapshot's tag
        COPY names the group of the volume that was to be copied from it.
        """
        return not self.unanswered(*_groups_of_copy(bridge))

    def require_known_unused(self, bridge: Snapshot) -> None:
        """Raise GroupBusy if a volume in a silent group may be copied from a temporary snapshot.

        `bridge` is the snapshot (`is_known_unused`).
        """
        self.require_answered(*_groups_of_copy(bridge))

    def unanswered(self, *groups: str) -> frozenset[str]:
        """Return those of these volume groups in which changes by Carver may be missing (`silent`).

        If no group is named, all groups count.
        """
        return self.silent & set(groups) if groups else self.silent

    def require_answered(self, *groups: str) -> None:
        """Raise GroupBusy while changes by Carver in one of these volume groups may be missing.

        If no group is named, all groups count.
        """
        if silent := self.unanswered(*groups):
            group_names = ", ".join(sorted(silent))
            raise errors.GroupBusy(f"volume group {group_names}", "it has not answered")

    def require_read(self) -> None:
        """Raise GroupBusy while a volume group was never read.

        A group that was never read may have a copy that an earlier process began. Copies that this
        process began, also in a group that hangs, are known by their jobs.
        """
        if self.unread:
            group_names = ", ".join(sorted(self.unread))
            raise errors.GroupBusy(
                f"volume group {group_names}", "it has not answered since the start"
            )


@dataclass(frozen=True)
class CachedReport(Contents):
    """A report of volume groups as last read, perhaps long ago; not for decisions."""

    def volume(self, volume_id: str) -> Volume:
        """Return the volume with an id, to be shown.

        Raises as `Current.usable` for Call.USE, also if the absence of the volume is not proved.
        """
        return Fresh(self.groups, named_groups=frozenset(self.groups)).usable(volume_id, Call.USE)


# Union of the types of reports that are recent enough for decisions.
Known = Fresh | EveryGroup


def fresh(groups: Iterable[report.Group]) -> Fresh:
    """Return a report of volume groups that the caller has just read, and whose locks it holds."""
    by_name = {group.name: group for group in groups}
    return Fresh(by_name, named_groups=frozenset(by_name))


def _groups_of_copy(bridge: Snapshot) -> list[str]:
    """Return the volume groups that may have the volume that is copied from a temporary snapshot.

    `bridge` is the snapshot. An empty list stands for all groups.
    """
    return [ids.group_of(bridge.copy_id)] if bridge.copy_id else []
