"""Snapshots of several volumes at one moment: quiesced together, whole or not there."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from agent.core import errors, ids, records, tag, users
from agent.core.context import Context
from agent.core.ids import VolumeId
from agent.core.quiesce import Standstill
from agent.core.records import Snapshot, Volume
from agent.core.requests import CreateGroupSnapshot, KnownGroupSnapshot
from agent.core.volume_groups import HeldGroups
from agent.operations.erase import Eraser
from agent.operations.snapshot import Snapshotter
from lvm import names, report, tags, volumes
from lvm.devices import Device
from mount import command, loop, table

_log = logging.getLogger(__name__)


class Holding:
    """Chooses what is held; refuses what lvm2, or Carver itself, may have to do with."""

    def __init__(self, context: Context) -> None:
        self._config, self._kernel = context.config, context.kernel
        self._inventory = context.inventory

    def choose(self, volumes: list[Volume]) -> Mapping[str, Volume]:
        """Those that may be written to meanwhile, by their ids; a single one lvm2 holds itself."""
        if len(volumes) == 1:
            return {}
        mounts = table.read(self._kernel)
        held = {}
        for one in volumes:
            device = self._inventory.device(str(one.id))
            if device is not None:
                self._require_holdable(one, device, mounts)
                held[str(one.id)] = one
        return held

    def _require_holdable(self, volume: Volume, device: Device, mounts: table.Table) -> None:
        """Raise NotTogether where lvm2, or Carver itself, may have to do with what is held."""
        # lvm2 reads whatever may be a disk of a group, and would wait for this one.
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
        inside = [self._kernel.real_path(one) for one in self._config.kubelet_dir]
        files = self._config.definitions
        own = [self._config.endpoint.parent, *(one.file.path for one in files if one.file)]
        needed = {mounts.holding(self._kernel.real_path(str(one))) for one in own}
        for mount in mounts.of_device(device.number):
            if mount in needed or not any(_is_in(mount.path, one) for one in inside):
                raise errors.NotTogether(
                    str(volume.id),
                    f"it is mounted at {mount.path}, where Carver or lvm2 may have to write",
                )


def _is_in(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


PREFIX = "gsnap"

# What fails is undone, whether or not its caller still waits.
_UNDOING_SECONDS = 60.0
_COMMITTED = {tag.COMMITTED: "yes"}


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
    """Carries out the GroupController's calls."""

    def __init__(
        self,
        context: Context,
        snapshotter: Snapshotter,
        eraser: Eraser,
    ) -> None:
        self._config, self._kernel, self._volume_groups = (
            context.config,
            context.kernel,
            context.volume_groups,
        )
        self._inventory = context.inventory
        self._devices, self._holding = context.devices, Holding(context)
        self._snapshotter = snapshotter
        self._eraser = eraser
        self._locks = context.locks
        # Longer than lvm2 needs for many volumes, shorter than anyone takes for a dead disk.
        self.standstill_seconds = 20.0

    @staticmethod
    def logical_name(name: str) -> str:
        """What calls on the same group snapshot have in common; no logical volume has it."""
        return names.logical_volume(PREFIX, name)

    def create(self, call: CreateGroupSnapshot) -> GroupSnapshot:
        """Take snapshots of all sources at one moment, or find those that an earlier call took.

        One command for each source, and a report. Raises NotTogether, StandstillOver, NoRoom,
        NotSnapshotted.
        """
        sources = {ids.group_of(one) for one in call.source_ids}
        for one in call.source_ids:
            users.flush(self._kernel, self._inventory, one)
        own_name = self.logical_name(call.name)
        groups = self._groups(sources, lambda known: self._named(known, own_name))
        with ExitStack() as undo, self._volume_groups.hold(*groups) as turns:
            known = self._inventory.state(*groups, resume=True)
            found = self._named(known, own_name)
            if not found:
                return self._make(call, known, undo, turns)
            if records.is_whole(found):
                same = _same(_group_snapshot(found), call)
                self._commit(found)
                return same
            self._require_half_made(known, found)
        # A process was killed, or could not undo it.
        self._discard(known, found[0].group_snapshot_id)
        return self.create(call)

    def get(self, call: KnownGroupSnapshot) -> GroupSnapshot:
        """The group snapshot of that id; raises NoSuchGroupSnapshot. A report of its groups."""
        if not _is_one(call.id):
            raise errors.NoSuchGroupSnapshot(call.id)
        known = self._inventory.state(*self._groups_of(call.id))
        found = self._find(known, call.id)
        if not records.is_whole(found):
            self._require_half_made(known, found)
            raise errors.NoSuchGroupSnapshot(call.id)
        _compare(call, found)
        return _group_snapshot(found)

    def delete(self, call: KnownGroupSnapshot) -> None:
        """Delete all snapshots of a group; no such group snapshot is no error.

        A report, one command that takes the record back, and for each snapshot what DeleteSnapshot
        costs without its own. Of one that lost a part the rest goes, unless a group may yet be seen
        here that holds the part: then it is none of the caller's business to forget it.
        """
        if not _is_one(call.id):
            return
        groups = self._groups_of(call.id)
        with self._volume_groups.hold(*groups):
            known = self._inventory.state(*groups, resume=True)
            found = self._find(known, call.id)
            if records.is_whole(found):
                _compare(call, found)
            elif found and (awaited := self._inventory.awaited(known, found)):
                raise errors.NotWhole(call.id, _why_awaited(awaited))
            for one in found:
                if copies := self._inventory.copies_of(known, str(one.id)):
                    raise errors.VolumeInUse(str(one.id), f"{', '.join(copies)} is copied from it")
        self._discard(known, call.id)

    def resume(self, *groups: str) -> int:
        """Undo what is half-made, as far as these groups tell, or all; returns how many."""
        undone = 0
        for one in self._inventory.group_snapshots(self._inventory.state(*groups)):
            # Of one that a call is at work on that call sees to all this.
            with suppress(errors.OperationPending), self._locks.hold(ids.logical_name(one)):
                undone += self._settle(one, groups)
        return undone

    def _settle(self, group_snapshot_id: str, groups: Sequence[str]) -> bool:
        """Undo a group snapshot if it was never whole, and say so; have it on record if it is."""
        known = self._inventory.state(*groups)
        members = self._inventory.members(known, group_snapshot_id)
        if records.is_whole(members):
            # Killed just before, or taken by a version that knew of no record.
            self._commit(members)
        elif members and self._inventory.is_half_made(known, members):
            self._discard(known, group_snapshot_id)
            return True
        return False

    def _make(
        self, call: CreateGroupSnapshot, known: report.Report, undo: ExitStack, turns: HeldGroups
    ) -> GroupSnapshot:
        """New snapshots of all sources; what failed is undone once the groups are free again."""
        sources = [self._source(known, one) for one in call.source_ids]
        own = self.logical_name(call.name)
        identity = str(VolumeId.of(sources[0].group, own))
        planned = {
            names.logical_volume(ids.SNAPSHOT_PREFIX, f"{call.name}\0{one.id}"): one
            for one in sources
        }
        self._snapshotter.require_free(known, *planned)
        held = self._holding.choose(sources)
        self._check_room(call, sources, held)
        own_tags = {
            tag.NAME: call.name,
            tag.GROUP_SNAPSHOT: identity,
            tag.MEMBERS: str(len(sources)),
            tag.MEMBER_GROUPS: _places(sources),
            tag.ASKED: _asked(call),
            **call.about,
        }
        left = command.remaining_seconds()
        patience = min(self.standstill_seconds, self.standstill_seconds if left is None else left)
        with (
            command.time_limit(patience),
            self._standing_still(list(held.values()), patience, turns) as standstill,
        ):
            for one in held.values():
                self._hold(standstill, one)
            own_tags |= {tag.TIME: str(time.time_ns())}
            undo.callback(self._undo, identity, {one.group.name for one in sources})
            taken = [
                self._snapshotter.take(
                    name, one, own_tags, call.size, copy_on_write=str(one.id) in held
                )
                for name, one in planned.items()
            ]
            standstill.check()
        self._commit(taken)
        undo.pop_all()
        return _group_snapshot(taken)

    def _commit(self, members: list[Snapshot]) -> None:
        """Have it on record that all were taken; one command, none where it is."""
        lacking = [one for one in members if tag.COMMITTED not in one.own_tags]
        if lacking:
            self._mark(lacking, new=_COMMITTED)

    def _mark(self, members: list[Snapshot], **change: Mapping[str, str]) -> None:
        """Change tags of all, by one command a group; killed, some have the change."""
        for group in sorted({one.group.name for one in members}):
            own = [one for one in _names(members) if one[0] == group]
            volumes.mark_all(self._volume_groups.lvm(group), own, **change)

    def _require_half_made(self, known: report.Report, found: list[Snapshot]) -> None:
        """Raise NotWhole for what may be whole, or was: it is not undone, nor said to be gone."""
        if not found or self._inventory.is_half_made(known, found):
            return
        why = _why_awaited(self._inventory.awaited(known, found)) or (
            f"{len(found)} of its {found[0].own_tags.get(tag.MEMBERS, 'many')} snapshots are"
            " left; volumes can be made of them, and DeleteVolumeGroupSnapshot removes them"
        )
        raise errors.NotWhole(found[0].group_snapshot_id, why)

    def _source(self, known: report.Report, volume_id: str) -> Volume:
        volume = self._inventory.usable(known, volume_id)
        if self._eraser.is_deleting(volume_id):
            raise errors.NoSuchVolume(volume_id)
        return volume

    @contextmanager
    def _standing_still(
        self, held: list[Volume], seconds: float, turns: HeldGroups
    ) -> Iterator[Standstill]:
        """Have volumes held inside; nothing changes a group of which one is held longer than that.

        Its disk does not answer: lvm2 would find a device suspended that is let go of under its
        hands. The other groups' turns end with the call.
        """
        for one in held:
            turns.enter(one.group.name, self._inventory.holding([(one.group.name, one.name)]))
        standstill = Standstill(self._devices, seconds)
        try:
            with standstill:
                yield standstill
        finally:
            for (group, _), free in standstill.free.items():
                turns.keep(group, free)

    def _hold(self, standstill: Standstill, volume: Volume) -> None:
        try:
            standstill.hold(volume.group.name, volume.name)
        except OSError as error:
            raise errors.NotTogether(
                str(volume.id), f"device-mapper says {error.strerror}; see `dmesg`"
            ) from None

    def _check_room(
        self,
        call: CreateGroupSnapshot,
        volumes: list[Volume],
        held: Mapping[str, Volume],
    ) -> None:
        """Raise what would be raised while the volumes are held."""
        needed: Counter[str] = Counter()
        for one in volumes:
            needed[one.group.name] += self._snapshotter.needed_bytes(
                one,
                call.size,
                copy_on_write=str(one.id) in held,
                beside_bytes=needed[one.group.name],
            )

    def _groups_of(self, group_snapshot_id: str) -> Set[str]:
        """The groups that may hold parts of one; its id names that of the first of its sources."""
        own = ids.group_of(group_snapshot_id)
        return self._groups([own], lambda known: self._inventory.members(known, group_snapshot_id))

    def _groups(
        self, own: Iterable[str], find: Callable[[report.Report], list[Snapshot]]
    ) -> Set[str]:
        """These groups, and those that may hold further parts of what is found there.

        Of all others what was seen last is enough: one of them may not answer.
        """
        groups = frozenset(own)
        while more := self._places(find(self._inventory.state(*groups))) - groups:
            groups |= more
        return groups

    def _places(self, members: list[Snapshot]) -> Set[str]:
        """Those of Carver's groups that may hold parts of a group snapshot with these."""
        if any(tag.MEMBER_GROUPS not in one.own_tags for one in members):
            # Older ones do not say.
            return set(self._config.groups)
        told = [place for one in members for place in one.own_tags[tag.MEMBER_GROUPS].split(",")]
        return {one.partition("@")[0] for one in told} & set(self._config.groups)

    def _named(self, known: report.Report, own_name: str) -> list[Snapshot]:
        """The snapshots of a group of that name, in whichever of Carver's groups it is."""
        for one in self._inventory.all_snapshots(known):
            parsed = VolumeId.parse(one.group_snapshot_id)
            if parsed is not None and parsed.name == own_name:
                return self._inventory.members(known, one.group_snapshot_id)
        return []

    def _find(self, known: report.Report, group_snapshot_id: str) -> list[Snapshot]:
        """The snapshots of a group; raises OtherGroup where none is here, and its group is not."""
        found = self._inventory.members(known, group_snapshot_id)
        if not found:
            self._inventory.require_group_of(known, group_snapshot_id)
        return found

    def _undo(self, group_snapshot_id: str, groups: Set[str]) -> None:
        """Have nothing stay of what failed; where that fails too, it goes later."""
        try:
            with command.time_limit(_UNDOING_SECONDS):
                self._discard(self._inventory.state(*groups), group_snapshot_id)
        except Exception as error:
            _log.error("group snapshot %s stays half made for now: %s", group_snapshot_id, error)

    def _discard(self, known: report.Report, group_snapshot_id: str) -> None:
        members = self._inventory.members(known, group_snapshot_id)
        if any(tag.COMMITTED in one.own_tags for one in members):
            # From here on what is left of it is half made. The record goes before any of them does.
            with self._volume_groups.hold(*(one.group.name for one in members)):
                self._mark(members, old=_COMMITTED)
        # Those in the group that its id names go last: while that has none, there are none.
        own = group_snapshot_id.partition("@")[0]
        for one in sorted(members, key=lambda one: one.group.name == own):
            self._snapshotter.discard(one)
        # What a failed lvcreate left without its origin.
        for volume in self._inventory.doomed(known):
            if volume.own_tags.get(tag.GROUP_SNAPSHOT) == group_snapshot_id:
                self._eraser.finish(volume)


def _is_one(group_snapshot_id: str) -> bool:
    """Whether an id can be a group snapshot's."""
    return names.is_of(PREFIX, ids.logical_name(group_snapshot_id))


def _names(members: list[Snapshot]) -> list[tuple[str, str]]:
    return [(one.group.name, one.name) for one in members]


def _places(sources: list[Volume]) -> str:
    """The groups of the sources, as they are kept; raises BadField for more than a tag holds."""
    places = records.places_of(sources)
    if not tags.fits(tag.MEMBER_GROUPS, places):
        raise errors.BadField("source_volume_ids", "are in too many volume groups")
    return places


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
    """What of a request, beside its sources, a repeated one is compared with."""
    return "" if call.size is None else f"{call.size.size_bytes}:{call.size.percent:g}"


def _same(found: GroupSnapshot, call: CreateGroupSnapshot) -> GroupSnapshot:
    """The group snapshot that is there, if it is what is asked for now."""
    sources = sorted(str(one.source_id) for one in found.snapshots)
    if sources != list(call.source_ids):
        raise errors.Incompatible(
            f"group snapshot {call.name!r} exists, of {', '.join(sources)}, not of"
            f" {', '.join(call.source_ids)}"
        )
    if found.snapshots[0].own_tags.get(tag.ASKED, "") != _asked(call):
        raise errors.Incompatible(f"group snapshot {call.name!r} exists with another size")
    return found


def _compare(call: KnownGroupSnapshot, found: list[Snapshot]) -> None:
    """Raise BadField where the caller has other snapshots in mind."""
    own = {str(one.id) for one in found}
    if not call.snapshot_ids:
        raise errors.BadField("snapshot_ids", f"is required: {', '.join(sorted(own))}")
    if odd := own ^ set(call.snapshot_ids):
        raise errors.BadField(
            "snapshot_ids",
            f"{', '.join(sorted(odd))}: the snapshots of {call.id!r} are {', '.join(sorted(own))}",
        )
