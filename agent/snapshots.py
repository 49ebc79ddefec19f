"""Snapshots as objects: taken, found, listed, deleted."""

import logging
import time

from agent import calls, errors, inventory, paging
from agent.carving import Carvings
from agent.config import SNAPSHOT_SIZE, Config
from agent.ids import VolumeId
from agent.inventory import Inventory, Snapshot, Volume
from agent.locks import GroupLocks
from agent.paging import Part
from agent.wiping import Wiper
from lvm import layout, names, report, snapshots, volumes
from lvm.lvm2 import Lvm

_log = logging.getLogger(__name__)

# What a volume that is made of a snapshot must know of the snapshot's origin.
_INHERITED = (inventory.ACCESS, inventory.FORMATTED, "class", "fsType")


class Snapshotter:
    """Carries out the Controller's calls for snapshots."""

    def __init__(
        self, config: Config, lvm: Lvm, known: Inventory, groups: GroupLocks, wiper: Wiper
    ) -> None:
        self._config = config
        self._lvm = lvm
        self._inventory = known
        self._groups = groups
        self._wiper = wiper
        self._carvings = Carvings(config.classes, known)

    @staticmethod
    def logical_name(name: str) -> str:
        """The logical volume's name for the snapshot that the CO calls `name`."""
        return names.logical_volume(inventory.SNAPSHOT_PREFIX, name)

    def create(self, call: calls.CreateSnapshot) -> Snapshot:
        """Take a snapshot, or find the one that an earlier call took.

        Two commands at most: a report, and lvcreate, which also tags.
        """
        name = self.logical_name(call.name)
        with self._groups.hold(inventory.group_of(call.source_id)):
            known = self._inventory.read()
            if (found := self._named(known, name)) is not None:
                return _same(found, call)
            volume = self._inventory.usable(known, call.source_id)
            if self._wiper.is_deleting(call.source_id):
                raise errors.NoSuchVolume(call.source_id)
            if inventory.CACHE in volume.facts:
                raise errors.NotSnapshotted(call.source_id, "it has a cache")
            group = volume.group
            area_bytes = self._area_bytes(call, volume)
            now = time.time_ns()
            facts = {
                inventory.NAME: call.name,
                inventory.STATE: inventory.READY,
                inventory.SIZE: str(volume.size_bytes),
                inventory.SOURCE: volume.name,
                inventory.TIME: str(now),
                **{key: volume.facts[key] for key in _INHERITED if key in volume.facts},
                **call.about,
            }
            snapshots.create(
                self._lvm,
                group.name,
                name,
                origin=volume.name,
                size_bytes=area_bytes,
                facts=facts,
                disks=layout.anywhere(group),
            )
        identity = VolumeId.of(group, name)
        return Snapshot(identity, group, name, volume.id, volume.size_bytes, now, area_bytes, facts)

    def delete(self, snapshot_id: str) -> None:
        """Part a snapshot from its origin, wipe and remove it; no such snapshot is no error.

        Two commands at most before the wipe, which goes on behind the answer if it takes long.
        """
        parsed = VolumeId.parse(snapshot_id)
        if parsed is None:
            return
        with self._groups.hold(parsed.group):
            try:
                snapshot = self._inventory.snapshot(self._inventory.read(), snapshot_id)
            except errors.NoSuchSnapshot:
                return
            if not self._wiper.zero:
                volumes.remove(self._lvm, parsed.group, snapshot.name)
                return
            # Its area holds what the origin held; it may not be anyone else's before it is wiped.
            snapshots.split(self._lvm, parsed.group, snapshot.name)
        self._wiper.finish(inventory.remains_of(snapshot))

    def get(self, snapshot_id: str) -> Snapshot:
        """The snapshot of that id; raises NoSuchSnapshot."""
        return self._inventory.snapshot(self._inventory.read(), snapshot_id)

    def list(self, call: calls.ListSnapshots) -> Part[Snapshot]:
        """A part of the snapshots, in the order of their ids."""
        paging.check(call.page)
        known = self._inventory.read()
        self._inventory.require_groups(known)
        found = {
            str(one.id): one
            for one in self._inventory.snapshots(known)
            if call.source_id in ("", str(one.source_id)) and call.snapshot_id in ("", str(one.id))
        }
        return paging.part(found, call.page)

    def _named(self, known: report.Report, name: str) -> Snapshot | None:
        """The snapshot with a logical volume's name, in whichever of Carver's groups it is."""
        for doomed in self._inventory.doomed(known):
            if doomed.name == name:
                raise errors.OperationPending(f"{doomed.id} (being wiped)")
        return next((one for one in self._inventory.snapshots(known) if one.name == name), None)

    def _area_bytes(self, call: calls.CreateSnapshot, volume: Volume) -> int:
        """What a copy-on-write snapshot of the volume gets; raises NoRoom."""
        one = self._config.device_class(volume.facts.get("class", ""))
        wish = call.size or (SNAPSHOT_SIZE if one is None else one.snapshot_size)
        group = volume.group
        size = layout.copy_on_write_bytes(volume.size_bytes, wish, group)
        if size > (room := self._carvings.beside_bytes(volume)):
            raise errors.NoRoom(group.name, size, room, f"for a snapshot of {volume.name}")
        return size


def _same(found: Snapshot, call: calls.CreateSnapshot) -> Snapshot:
    """The snapshot that is there, if it is of the volume that is asked for now."""
    if str(found.source_id) != call.source_id:
        raise errors.Incompatible(
            f"snapshot {call.name!r} exists, of {found.source_id}, not of {call.source_id}"
        )
    if found.problem:
        _log.warning("snapshot %s can no longer be used: %s", found.id, found.problem)
    return found
