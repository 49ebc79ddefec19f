"""The devices of Carver's logical volumes: find, activate, ask for their status."""

import time
from collections.abc import Iterator

from agent.core import errors, ids
from agent.core.background import Probes
from agent.core.ids import VolumeId
from agent.core.records import Snapshot, Volume
from agent.core.volume_groups import VolumeGroups
from lvm import devicemapper, devices, names, thin, volumes
from lvm import errors as lvm_errors
from lvm.devicemapper import ThinPool
from mount import command

# How long a call waits for the status of a pool, which takes a moment as a rule.
_POOL_SECONDS = 5.0


class Activation:
    """Activates logical volumes, and asks the kernel for their status without lvm2."""

    def __init__(self, volume_groups: VolumeGroups, kernel_devices: devices.Devices) -> None:
        self._volume_groups = volume_groups
        self._devices = kernel_devices
        self._groups = volume_groups.names
        self._pools: Probes[ThinPool | None] = Probes()

    def device(self, volume_id: str) -> devices.Device | None:
        """The device of an active volume, found without a command; None proves nothing.

        For an open encrypted volume it is the dm-crypt device; for a closed one the logical
        volume's, which callers must not publish.
        """
        parsed = VolumeId.parse(volume_id)
        if parsed is None:
            name = names.logical_volume(ids.INLINE_PREFIX, volume_id)
            found_in = (self._devices.find(group, name) for group in self._groups)
            found = next(filter(None, found_in), None)
        else:
            found = self._devices.find(parsed.group, parsed.name)
            if found is not None and not parsed.is_of(found.group_uuid):
                return None
        return found if found is None else self._devices.mapping(found) or found

    def require_same(self, volume: Volume, device: devices.Device) -> None:
        """Raise NoSuchVolume where a volume's device is no longer the same."""
        there = self.device(str(volume.id))
        if there is None or there.logical.uuid != device.logical.uuid:
            raise errors.NoSuchVolume(str(volume.id))

    def activate(self, volume: Volume, *, partial: bool = False) -> devices.Device:
        """The volume's device; a command only where it is not active. Raises Inactive."""
        return self.ensure_active(volume.group.name, volume.name, partial=partial)

    def ensure_active(
        self, group: str, name: str, by: str = "", *, partial: bool = False
    ) -> devices.Device:
        """The device of any logical volume; a command only where it is not active.

        `by` names another volume whose activation activates it; `partial` activates what is left
        of a volume on missing disks. Raises Inactive.
        """
        found = self._devices.find(group, name)
        if found is None:
            volumes.activate(self._volume_groups.lvm(group), group, by or name, partial=partial)
            found = self._devices.find(group, name)
        if found is None:
            raise lvm_errors.Inactive(group, name)
        return found

    def is_active(self, group: str, name: str) -> bool:
        """Whether a logical volume, or a pool, is active; no command."""
        return bool(self._devices.find(group, name) or self._devices.status(group, name))

    def is_open(self, volume: Volume) -> bool:
        """Whether something has an active volume's device open; no command.

        For an encrypted volume, whether something has its dm-crypt device open.
        """
        mapping = self.mapping(volume)
        if mapping is not None:
            return self._devices.is_mapping_open(mapping)
        return self._devices.is_open(volume.group.name, volume.name)

    def mapping(self, volume: Volume) -> devices.Device | None:
        """The dm-crypt device over an encrypted volume that is open; no command."""
        found = self._devices.find(volume.group.name, volume.name)
        return None if found is None else self._devices.mapping(found)

    def close_leftovers(self, volume: Volume) -> None:
        """Remove what a killed cryptsetup left on an active volume; no command."""
        found = self._devices.find(volume.group.name, volume.name)
        if found is not None:
            self._devices.close_leftovers(found)

    def active(self, prefix: str, *groups: str) -> Iterator[tuple[str, str]]:
        """Group and name of each active logical volume with a prefix, in these or all groups.

        No command.
        """
        for group in groups or self._groups:
            for name in self._devices.active(group):
                if names.is_of(prefix, name):
                    yield group, name

    def is_any_active(self, group: str) -> bool:
        """Whether any logical volume of a group is active; no command."""
        return bool(self._devices.active(group))

    def status(self, group: str, name: str) -> tuple[devices.Status, ...]:
        """device-mapper's status of an active logical volume, and of all that it stands on."""
        return self._devices.status(group, name)

    def status_of(self, volume_id: str) -> tuple[devices.Status, ...]:
        """device-mapper's status of an active volume, by the CO's id."""
        parsed = VolumeId.parse(volume_id)
        name = ids.logical_name(volume_id)
        found_in = (self.status(one, name) for one in ([parsed.group] if parsed else self._groups))
        return next(filter(None, found_in), ())

    def pool_status(self, group: str, name: str) -> ThinPool | None:
        """device-mapper's status of a thin pool; None for one that is not active.

        Waits until the caller's deadline, five seconds at most, and not at all where the kernel has
        kept earlier callers waiting for as long. Raises PoolSilent.
        """
        remaining = command.remaining_seconds()
        patience = _POOL_SECONDS if remaining is None else min(_POOL_SECONDS, remaining)
        seen = self._pools.probe(
            f"{group}/{name}",
            lambda: thin.status_of(self.status(group, name)),
            time.monotonic() + patience,
            f"{group}/{name}",
        )
        if seen.hanging_seconds:
            raise errors.PoolSilent(group, name, seen.hanging_seconds)
        return seen.value

    def activate_snapshot(self, snapshot: Snapshot) -> devices.Device:
        """The snapshot's device, which is there whenever its source's is. Raises Inactive."""
        # For a copy-on-write snapshot lvm2 would ask whether its origin may be activated, too.
        by = "" if snapshot.is_thin else snapshot.source_id.name
        return self.ensure_active(snapshot.group.name, snapshot.name, by)

    def has_overflowed(self, snapshot: Snapshot) -> bool:
        """Whether an active snapshot has overflowed, by device-mapper; no command."""
        status = self._devices.own_status(snapshot.group.name, snapshot.name)
        return devicemapper.has_overflowed(status)
