"""Group snapshots: snapshots of several volumes as they were at one moment.

Each of their snapshots bears the group snapshot's id and how many there are, so a group snapshot is
there when all of them are. One that is not whole is none for any caller: it is undone by the call
that failed, or the next of its name or id, or the next start. It is never completed: the moment is
gone.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from agent import calls, errors, holders, inventory
from agent.ids import VolumeId
from agent.inventory import Snapshot, Volume
from agent.means import Means
from agent.snapshots import Snapshotter
from agent.standstill import Standstill
from agent.wiping import Wiper
from lvm import command, names, report
from lvm.devices import Device, Devices
from mount import loop, table

_log = logging.getLogger(__name__)

PREFIX = "gsnap"

# What fails is undone, whether or not its caller still waits.
_UNDOING_SECONDS = 60.0


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
        self, means: Means, devices: Devices, snapshotter: Snapshotter, wiper: Wiper
    ) -> None:
        self._config, self._kernel = means.config, means.kernel
        self._inventory, self._groups = means.inventory, means.groups
        self._devices = devices
        self._snapshotter = snapshotter
        self._wiper = wiper
        # Longer than lvm2 needs for many volumes, shorter than anyone takes for a dead disk.
        self.standstill_seconds = 20.0

    @staticmethod
    def logical_name(name: str) -> str:
        """What calls on the same group snapshot have in common; no logical volume has it."""
        return names.logical_volume(PREFIX, name)

    def create(self, call: calls.CreateGroupSnapshot) -> GroupSnapshot:
        """Take snapshots of all sources at one moment, or find those that an earlier call took.

        One command for each source, and a report. Raises NotTogether, StandstillOver, NoRoom,
        NotSnapshotted.
        """
        for one in call.source_ids:
            inventory.group_of(one)
            holders.flush(self._kernel, self._inventory, one)
        with ExitStack() as undo, self._groups.hold(*self._config.groups):
            known = self._inventory.awake()
            found = self._named(known, self.logical_name(call.name))
            if not found:
                return self._make(call, known, undo)
            if inventory.is_whole(found):
                return _same(_group_snapshot(found), call)
        # A process was killed, or could not undo it.
        self._discard(known, found[0].group_snapshot_id)
        return self.create(call)

    def get(self, call: calls.GroupSnapshot) -> GroupSnapshot:
        """The group snapshot of that id; raises NoSuchGroupSnapshot. One command."""
        found = self._find(self._inventory.read(), call.id)
        if not inventory.is_whole(found):
            raise errors.NoSuchGroupSnapshot(call.id)
        _compare(call, found)
        return _group_snapshot(found)

    def delete(self, call: calls.GroupSnapshot) -> None:
        """Delete all snapshots of a group; no such group snapshot is no error.

        A report, and for each snapshot what DeleteSnapshot costs without its own.
        """
        with self._groups.hold(*self._config.groups):
            known = self._inventory.awake()
            found = self._find(known, call.id)
            if inventory.is_whole(found):
                _compare(call, found)
            for one in found:
                if copies := self._inventory.copies_of(known, str(one.id)):
                    raise errors.VolumeInUse(str(one.id), f"{', '.join(copies)} is copied from it")
        self._discard(known, call.id)

    def resume(self) -> int:
        """Undo what an earlier process left half-made; returns how many group snapshots."""
        known, _ = self._inventory.recent()
        broken = self._inventory.half_made(known)
        for one in broken:
            self._discard(known, one)
        return len(broken)

    def _make(
        self, call: calls.CreateGroupSnapshot, known: report.Report, undo: ExitStack
    ) -> GroupSnapshot:
        """New snapshots of all sources; what failed is undone once the groups are free again."""
        volumes = [self._source(known, one) for one in call.source_ids]
        own = self.logical_name(call.name)
        identity = str(VolumeId.of(volumes[0].group, own))
        planned = {
            names.logical_volume(inventory.SNAPSHOT_PREFIX, f"{call.name}\0{one.id}"): one
            for one in volumes
        }
        for doomed in self._inventory.doomed(known):
            if doomed.name in planned:
                raise errors.OperationPending(f"{doomed.id} (being wiped)")
        held = self._to_be_held(volumes)
        self._check_room(call, volumes, held)
        facts = {
            inventory.NAME: call.name,
            inventory.GROUP_SNAPSHOT: identity,
            inventory.MEMBERS: str(len(volumes)),
            inventory.ASKED: _asked(call),
            **call.about,
        }
        left = command.remaining_seconds()
        patience = min(self.standstill_seconds, self.standstill_seconds if left is None else left)
        with (
            command.time_limit(patience),
            self._inventory.holding((one.group.name, one.name) for one in held.values()),
            Standstill(self._devices, patience) as standstill,
        ):
            for one in held.values():
                self._hold(standstill, one)
            facts |= {inventory.TIME: str(time.time_ns())}
            undo.callback(self._undo, identity)
            taken = [
                self._snapshotter.take(
                    name, one, facts, call.size, copy_on_write=str(one.id) in held
                )
                for name, one in planned.items()
            ]
            standstill.check()
        undo.pop_all()
        return _group_snapshot(taken)

    def _source(self, known: report.Report, volume_id: str) -> Volume:
        volume = self._inventory.usable(known, volume_id)
        if self._wiper.is_deleting(volume_id):
            raise errors.NoSuchVolume(volume_id)
        return volume

    def _to_be_held(self, volumes: list[Volume]) -> Mapping[str, Volume]:
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
        files = self._config.foundations
        own = [self._config.endpoint.parent, *(one.file.path for one in files if one.file)]
        needed = {mounts.holding(self._kernel.real_path(str(one))) for one in own}
        for mount in mounts.of_device(device.number):
            if mount in needed or not any(_is_in(mount.path, one) for one in inside):
                raise errors.NotTogether(
                    str(volume.id),
                    f"it is mounted at {mount.path}, where Carver or lvm2 may have to write",
                )

    def _hold(self, standstill: Standstill, volume: Volume) -> None:
        try:
            standstill.hold(volume.group.name, volume.name)
        except OSError as error:
            raise errors.NotTogether(
                str(volume.id), f"device-mapper says {error.strerror}; see `dmesg`"
            ) from None

    def _check_room(
        self,
        call: calls.CreateGroupSnapshot,
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

    def _named(self, known: report.Report, own_name: str) -> list[Snapshot]:
        """The snapshots of a group of that name, in whichever of Carver's groups it is."""
        for one in self._inventory.all_snapshots(known):
            parsed = VolumeId.parse(one.group_snapshot_id)
            if parsed is not None and parsed.name == own_name:
                return self._inventory.members(known, one.group_snapshot_id)
        return []

    def _find(self, known: report.Report, group_snapshot_id: str) -> list[Snapshot]:
        """The snapshots of a group; none where the id is no group snapshot's. Raises OtherGroup."""
        if not names.is_of(PREFIX, inventory.logical_name(group_snapshot_id)):
            return []
        self._inventory.require_group_of(known, group_snapshot_id)
        return self._inventory.members(known, group_snapshot_id)

    def _undo(self, group_snapshot_id: str) -> None:
        """Have nothing stay of what failed; where that fails too, it goes later."""
        try:
            with command.time_limit(_UNDOING_SECONDS):
                self._discard(self._inventory.read(), group_snapshot_id)
        except Exception as error:
            _log.error("group snapshot %s stays half made for now: %s", group_snapshot_id, error)

    def _discard(self, known: report.Report, group_snapshot_id: str) -> None:
        for one in self._inventory.members(known, group_snapshot_id):
            self._snapshotter.discard(one)
        # What a failed lvcreate left without its origin.
        for volume in self._inventory.doomed(known):
            if volume.facts.get(inventory.GROUP_SNAPSHOT) == group_snapshot_id:
                self._wiper.finish(volume)


def _group_snapshot(members: list[Snapshot]) -> GroupSnapshot:
    ordered = sorted(members, key=lambda one: str(one.id))
    return GroupSnapshot(ordered[0].group_snapshot_id, tuple(ordered))


def _asked(call: calls.CreateGroupSnapshot) -> str:
    """What of a request, beside its sources, a repeated one is compared with."""
    return "" if call.size is None else f"{call.size.size_bytes}:{call.size.percent:g}"


def _same(found: GroupSnapshot, call: calls.CreateGroupSnapshot) -> GroupSnapshot:
    """The group snapshot that is there, if it is what is asked for now."""
    sources = sorted(str(one.source_id) for one in found.snapshots)
    if sources != list(call.source_ids):
        raise errors.Incompatible(
            f"group snapshot {call.name!r} exists, of {', '.join(sources)}, not of"
            f" {', '.join(call.source_ids)}"
        )
    if found.snapshots[0].facts.get(inventory.ASKED, "") != _asked(call):
        raise errors.Incompatible(f"group snapshot {call.name!r} exists with another size")
    return found


def _compare(call: calls.GroupSnapshot, found: list[Snapshot]) -> None:
    """Raise BadField where the caller has other snapshots in mind."""
    own = {str(one.id) for one in found}
    if not call.snapshot_ids:
        raise errors.BadField("snapshot_ids", f"is required: {', '.join(sorted(own))}")
    if odd := own ^ set(call.snapshot_ids):
        raise errors.BadField(
            "snapshot_ids",
            f"{', '.join(sorted(odd))}: the snapshots of {call.id!r} are {', '.join(sorted(own))}",
        )


def _is_in(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")
