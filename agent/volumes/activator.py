"""What activates: devices of logical volumes, made where they are not, and asked for their status.

`Activator` runs no command but lvchange, and that only to activate, or to deactivate what keeps
lvm2 from it.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.groups.node_groups import VolumeGroups
from agent.volumes import records
from agent.volumes.backing import Backing
from agent.volumes.records import Snapshot, Volume
from agent.volumes.reports import Reports
from agent.work.background import Probes
from lvm import active_devices, devicemapper, names, report, thin, volumes
from lvm import lvm_errors as lvm_errors
from lvm.devicemapper import ThinPool
from mount import command
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

# How long a call waits for the status of a pool, which takes a moment as a rule.
_POOL_SECONDS = 5.0


class Activator:
    """Activates logical volumes, and finds their devices, which takes no command."""

    def __init__(
        self, volume_groups: VolumeGroups, kernel_devices: active_devices.Devices, reports: Reports
    ) -> None:
        self._volume_groups = volume_groups
        self._devices = kernel_devices
        self._reports = reports
        self._pools: Probes[ThinPool | None] = Probes()
        self._guard = threading.Lock()
        # Volumes that are suspended on purpose, by group and name.
        self._held: frozenset[tuple[str, str]] = frozenset()

    def device(self, volume: Backing) -> active_devices.Device | None:
        """The device of an active volume, found without a command; None proves nothing.

        For an open encrypted volume it is the dm-crypt device; for a closed one the logical
        volume's, which callers must not publish.
        """
        every = (self._devices.find(group, volume.name) for group in self._groups_of(volume))
        device = next(filter(None, every), None)
        if device is None or volume.group_uuid not in ("", ids.start_of(device.group_uuid)):
            return None
        return self._devices.mapping(device) or device

    def _groups_of(self, volume: Backing) -> Sequence[str]:
        """The names of the groups that may have a volume."""
        return (volume.group,) if volume.group else self._volume_groups.names

    def require_same(self, volume: Volume, device: active_devices.Device) -> None:
        """Raise NoSuchVolume where a volume's device is no longer the same."""
        there = self.device(volume.backing)
        if there is None or there.logical.uuid != device.logical.uuid:
            raise errors.NoSuchVolume(str(volume.id))

    def activate(self, volume: Volume, *, partial: bool = False) -> active_devices.Device:
        """The volume's device; a command only where it is not active. Raises Inactive."""
        return self.ensure_active(volume.group.name, volume.name, partial=partial)

    def ensure_active(
        self, group: str, name: str, by: str = "", *, partial: bool = False
    ) -> active_devices.Device:
        """The device of any logical volume; a command only where it is not active.

        If lvm2 fails, parts that a killed lvm2 left are deactivated, and it is retried once. `by`
        names another volume whose activation activates it; `partial` activates what is left of a
        volume on missing disks. A volume whose disk went away and is back is deactivated first.
        Raises Inactive.
        """
        found = self._devices.find(group, name)
        if found is not None and not self._deactivate_stranded(group, by or name):
            return found
        lvm = self._volume_groups.lvm
        try:
            volumes.activate(lvm(group), group, by or name, partial=partial)
        except mount_errors.CommandFailed:
            if not self.deactivate_parts(self._reports.fresh(group).group(group)):
                raise
            volumes.activate(lvm(group), group, by or name, partial=partial)
        if (found := self._devices.find(group, name)) is None:
            raise lvm_errors.Inactive(group, name)
        return found

    @contextmanager
    def activated(self, group: str, name: str) -> Iterator[active_devices.Device]:
        """The device of a logical volume, which is left inactive if it was.

        The caller holds the volume, which has no snapshot that may be used meanwhile. The group is
        held to activate and to deactivate it, and not within the `with`, where its disk may hang.
        """
        was_active = True
        try:
            with self._volume_groups.hold(group):
                was_active = self.is_active(group, name)
                device = self.ensure_active(group, name)
            yield device
        finally:
            if not was_active:
                with self._volume_groups.hold(group):
                    volumes.deactivate(self._volume_groups.lvm(group), group, name)

    def activate_snapshot(self, snapshot: Snapshot) -> active_devices.Device:
        """The snapshot's device, which is there whenever its source's is. Raises Inactive."""
        # For a copy-on-write snapshot lvm2 would ask whether its origin may be activated, too.
        by = "" if snapshot.is_thin else snapshot.origin
        return self.ensure_active(snapshot.group.name, snapshot.name, by)

    def _deactivate_stranded(self, group: str, name: str) -> bool:
        """Deactivate a volume that stands on what its disk was; whether it is inactive now.

        A disk that comes back is another device to the kernel. lvm2 calls the volume active and
        does nothing, while each of its reads and writes fails. Thin volumes have their pool's
        device, and are deactivated with it. What is in use stays as it is, and so does what lies on
        a disk that is not back. No command for any other volume.
        """
        if not self._devices.has_lost_disk(group, name):
            return False
        known = self._reports.fresh(group).group(group)
        logical = known.volume(name)
        holder = known.volumes.get(logical.pool, logical)
        own = [*(one.name for one in known.in_pool(logical.pool)), holder.name]
        is_away = not holder.disks.isdisjoint(known.missing_uuids)
        standing = [*own, *(one.name for one in known.copy_on_write_of(name))]
        if is_away or any(self._devices.is_open(group, one) for one in standing):
            return False
        _log.warning("%s/%s is activated anew: its disk went away, and is back", group, name)
        for one in own:
            if self.is_active(group, one):
                volumes.deactivate(self._volume_groups.lvm(group), group, one)
        return True

    def deactivate_parts(self, group: report.Group) -> bool:
        """Deactivate parts of inactive RAIDs and pools that a killed lvm2 left; whether any were.

        lvm2 refuses to activate a RAID or pool while a part is active by itself. One ioctl where
        there is such a volume.
        """
        own = {
            one.name
            for one in records.every(group)
            if not one.layout & {"linear", "striped"} and records.is_usable(group, one)
        }
        if not own:
            return False
        active = set(self._devices.active(group.name))
        parts = {one: report.whole(one) for one in active if names.is_part(one)}
        # A pool may be active without a device of its own name.
        left = [
            part
            for part, whole in sorted(parts.items())
            if whole in own - active and not self._devices.status(group.name, whole)
        ]
        if not left:
            return False
        # lvm2 refuses this for a part of a volume that was activated meanwhile.
        with suppress(mount_errors.CommandError):
            volumes.deactivate(self._volume_groups.lvm(group.name), group.name, *left)
        return True

    def is_active(self, group: str, name: str) -> bool:
        """Whether a logical volume, or a pool, is active; no command."""
        return bool(self._devices.find(group, name) or self._devices.status(group, name))

    def is_open(self, volume: Volume) -> bool:
        """Whether something has an active volume's device open; no command.

        For an encrypted volume, whether something has its dm-crypt device open.
        """
        if volume.is_encrypted and (mapping := self.mapping(volume)) is not None:
            return self._devices.is_mapping_open(mapping)
        return self._devices.is_open(volume.group.name, volume.name)

    def is_closed(self, volume: Backing) -> bool:
        """Whether nothing, no dm-crypt device either, has a volume open for certain. One ioctl.

        False for an inline volume of which no report says the group.
        """
        return bool(volume.group) and self._devices.is_closed(volume.group, volume.name)

    def mapping(self, volume: Volume) -> active_devices.Device | None:
        """The dm-crypt device over an encrypted volume that is open; no command."""
        found = self._devices.find(volume.group.name, volume.name)
        return None if found is None else self._devices.mapping(found)

    def close_leftovers(self, volume: Volume) -> None:
        """Remove what a killed cryptsetup left on an active volume; no command."""
        if (found := self._devices.find(volume.group.name, volume.name)) is not None:
            self._devices.close_leftovers(found)

    def active_ids(self, prefix: str, group: str) -> Iterator[VolumeId]:
        """The ids of active volumes with a prefix, also of a group never read; no command.

        Those that the volumes were made with: no report says them.
        """
        for name in self._devices.active(group):
            device = self._devices.find(group, name) if names.is_of(prefix, name) else None
            if device is not None:
                yield VolumeId(group, ids.start_of(device.group_uuid), name)

    def is_any_active(self, group: str) -> bool:
        """Whether any logical volume of a group is active; no command."""
        return bool(self._devices.active(group))

    def status(self, group: str, name: str) -> tuple[active_devices.Status, ...]:
        """device-mapper's status of an active logical volume, and of all that it stands on."""
        return self._devices.status(group, name)

    def status_of(self, volume: Backing) -> tuple[active_devices.Status, ...]:
        """The status of an active volume by its backing, which may lack the group."""
        every = (self.status(group, volume.name) for group in self._groups_of(volume))
        return next(filter(None, every), ())

    def pool_status(self, group: str, name: str) -> ThinPool | None:
        """device-mapper's status of a thin pool; None for one that is not active.

        Waits until the caller's deadline, five seconds at most, and not at all where the kernel has
        kept earlier callers waiting for as long. Raises PoolSilent.
        """
        path = f"{group}/{name}"
        until = time.monotonic() + command.patience_seconds(_POOL_SECONDS)
        seen = self._pools.probe(
            path, lambda: thin.status_of(self.status(group, name)), until, path
        )
        if seen.hanging_seconds:
            raise errors.PoolSilent(group, name, seen.hanging_seconds)
        return seen.value

    def has_overflowed(self, snapshot: Snapshot) -> bool:
        """Whether an active snapshot has overflowed, by device-mapper; no command."""
        status = self._devices.own_status(snapshot.group.name, snapshot.name)
        return devicemapper.has_overflowed(status)

    def has_lost_disk(self, volume: Volume) -> bool:
        """Whether an active volume stands on a disk that went away, be it back; no command."""
        return self._devices.has_lost_disk(volume.group.name, volume.name)

    @contextmanager
    def keep_suspended(self, volumes: Iterable[tuple[str, str]]) -> Iterator[None]:
        """Keep volumes, which are suspended on purpose, from being resumed by `Mender.mend`.

        Each is a group's name and a logical volume's; no two calls have the same.
        """
        own = frozenset(volumes)
        with self._guard:
            self._held |= own
        try:
            yield
        finally:
            with self._guard:
                self._held -= own

    def is_kept_suspended(self, group: str, name: str) -> bool:
        """Whether a logical volume is suspended on purpose (`keep_suspended`)."""
        return (group, name) in self._held
