"""Activate logical volumes, find their devices, and read their device-mapper status.

The only command that `Activator` runs beside lvm2's reports is lvchange(8): to activate a volume,
to deactivate it again, or to deactivate devices that keep lvm2 from activating one.
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

# Time limit of a call's wait for the status of a thin pool, in seconds. Usually the status takes
# some milliseconds.
_POOL_SECONDS = 5.0


class Activator:
    """Activates logical volumes, and finds the devices of active ones without a command."""

    def __init__(
        self, volume_groups: VolumeGroups, kernel_devices: active_devices.Devices, reports: Reports
    ) -> None:
        self._volume_groups = volume_groups
        self._devices = kernel_devices
        self._reports = reports
        self._pools: Probes[ThinPool | None] = Probes()
        self._guard = threading.Lock()
        # The volumes that Carver itself keeps suspended, by the names of the volume group and of
        # the logical volume.
        self._held: frozenset[tuple[str, str]] = frozenset()

    def device(self, volume: Backing) -> active_devices.Device | None:
        """Return the device of an active volume, without a command.

        For an open encrypted volume, the result is the dm-crypt device. For a closed encrypted
        volume it is the logical volume's device, which callers must not publish. None does not
        prove that the volume is inactive.
        """
        for group in self._groups_of(volume):
            if (device := self._devices.find(group, volume.name)) is not None:
                break
        else:
            return None
        if volume.group_uuid not in ("", ids.start_of(device.group_uuid)):
            return None
        return self._devices.mapping(device) or device

    def _groups_of(self, volume: Backing) -> Sequence[str]:
        """Return the names of the volume groups that may have a volume, by its backing.

        If the backing names no group, these are all configured groups.
        """
        return (volume.group,) if volume.group else self._volume_groups.names

    def require_same(self, volume: Volume, device: active_devices.Device) -> None:
        """Raise NoSuchVolume unless the volume's device is still that of the same logical volume.

        `device` was found before. The logical volumes are compared by their UUIDs.
        """
        present = self.device(volume.backing)
        if present is None or present.logical.uuid != device.logical.uuid:
            raise errors.NoSuchVolume(str(volume.id))

    def activate(self, volume: Volume, *, partial: bool = False) -> active_devices.Device:
        """Return a volume's device; activate the volume if it is inactive (`ensure_active`).

        With `partial`, a volume with missing disks is activated as far as possible. Raises Inactive
        if there is no device after the activation.
        """
        return self.ensure_active(volume.group.name, volume.backing.name, partial=partial)

    def ensure_active(
        self, group: str, name: str, activated_name: str = "", *, partial: bool = False
    ) -> active_devices.Device:
        """Return the device of any logical volume; activate the volume if it is inactive.

        1. If the volume is active and unused, and its disk was disconnected and is back, deactivate
           the volume.
        2. If the volume is inactive, activate it. `activated_name` names another volume whose
           activation activates this one. With `partial`, a volume with missing disks is activated
           as far as possible.
        3. If lvm2 fails, deactivate the parts of RAIDs and pools that a killed lvm2 left active,
           and retry the activation once; if there are none, raise lvm2's error.

        Runs no command for any other active volume. Raises Inactive if there is no device after the
        activation.
        """
        device = self._devices.find(group, name)
        if device is not None and not self._deactivate_stranded(group, activated_name or name):
            return device
        lvm = self._volume_groups.lvm
        try:
            volumes.activate(lvm(group), group, activated_name or name, partial=partial)
        except mount_errors.CommandFailed:
            if not self.deactivate_parts(self._reports.fresh(group).group(group)):
                raise
            volumes.activate(lvm(group), group, activated_name or name, partial=partial)
        if (device := self._devices.find(group, name)) is None:
            raise lvm_errors.Inactive(group, name)
        return device

    @contextmanager
    def activated(self, group: str, name: str) -> Iterator[active_devices.Device]:
        """Keep a logical volume active within the `with`, and yield its device.

        A volume that was inactive is deactivated at the end. The caller holds the volume's lock;
        the volume must have no snapshot that may be used meanwhile. The lock of the volume group is
        held to activate and to deactivate the volume, but not during the body, in which the
        volume's disk may hang.
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
        """Return a snapshot's device; activate the snapshot if it is inactive.

        A copy-on-write snapshot is active whenever its origin is, and is activated together with
        the origin. Raises Inactive if there is no device after the activation.
        """
        # Activate a copy-on-write snapshot by its origin's name. By the snapshot's name, lvm2 would
        # ask whether to activate the origin as well.
        activated_name = "" if snapshot.is_thin else snapshot.origin
        return self.ensure_active(snapshot.group.name, snapshot.name, activated_name)

    def _deactivate_stranded(self, group: str, name: str) -> bool:
        """Deactivate an active volume whose disk was disconnected and is back, if it is unused.

        Returns whether the volume was deactivated. To the kernel a disk that comes back is another
        device. lvm2 takes the volume for active and does nothing, while each read and write of the
        volume fails. Thin volumes use the device of their pool, and all of the pool are deactivated
        together with the pool. A volume that is in use is left unchanged, and so is a volume on a
        disk that is not back. Runs no command for a volume whose disks were not disconnected.
        """
        if not self._devices.has_lost_disk(group, name):
            return False
        group_state = self._reports.fresh(group).group(group)
        logical = group_state.volume(name)
        holder = group_state.volumes.get(logical.pool, logical)
        own_names = [*(volume.name for volume in group_state.in_pool(logical.pool)), holder.name]
        is_away = not holder.disks.isdisjoint(group_state.missing_uuids)
        dependents = [
            *own_names,
            *(snapshot.name for snapshot in group_state.copy_on_write_of(name)),
        ]
        if is_away or any(self._devices.is_open(group, dependent) for dependent in dependents):
            return False
        _log.warning("%s/%s is activated anew: its disk went away, and is back", group, name)
        for own_name in own_names:
            if self.is_active(group, own_name):
                volumes.deactivate(self._volume_groups.lvm(group), group, own_name)
        return True

    def deactivate_parts(self, group: report.Group) -> bool:
        """Deactivate parts of inactive RAIDs and pools that a killed lvm2 left active.

        Returns whether there were such parts. lvm2 refuses to activate a RAID or pool while one of
        its parts is active by itself. Runs one ioctl if the volume group has a RAID or pool, and a
        command only if such a part is active. An error of that command is ignored.
        """
        whole_names = {
            logical.name
            for logical in records.all_logical_volumes(group)
            if not logical.layout & {"linear", "striped"} and records.is_usable(group, logical)
        }
        if not whole_names:
            return False
        active = set(self._devices.active(group.name))
        parts = {name: report.visible_name(name) for name in active if names.is_part(name)}
        # Read the status as well, since a pool may be active without a device of its own name.
        leftovers = [
            part
            for part, whole_name in sorted(parts.items())
            if whole_name in whole_names - active
            and not self._devices.status(group.name, whole_name)
        ]
        if not leftovers:
            return False
        # Ignore an error: lvm2 refuses to deactivate a part of a volume that was activated
        # meanwhile.
        with suppress(mount_errors.CommandError):
            volumes.deactivate(self._volume_groups.lvm(group.name), group.name, *leftovers)
        return True

    def is_active(self, group: str, name: str) -> bool:
        """Whether a logical volume, or a thin pool, is active. Runs no command."""
        return bool(self._devices.find(group, name) or self._devices.status(group, name))

    def is_open(self, volume: Volume) -> bool:
        """Whether a program or another device has a volume's device open. Runs no command.

        For an encrypted volume that is open, the device is the dm-crypt device.
        """
        if volume.is_encrypted and (mapping := self.mapping(volume)) is not None:
            return self._devices.is_mapping_open(mapping)
        return self._devices.is_open(volume.group.name, volume.name)

    def is_closed(self, volume: Backing) -> bool:
        """Whether certainly no program and no device, such as dm-crypt's, has a volume open.

        Needs one ioctl. False for an inline volume whose volume group is unknown because no report
        was read.
        """
        return bool(volume.group) and self._devices.is_closed(volume.group, volume.name)

    def mapping(self, volume: Volume) -> active_devices.Device | None:
        """Return the dm-crypt device of an encrypted volume; None if it has none now.

        Runs no command.
        """
        device = self._devices.find(volume.group.name, volume.name)
        return None if device is None else self._devices.mapping(device)

    def close_leftovers(self, volume: Volume) -> None:
        """Remove the dm-crypt devices that a killed cryptsetup left on an active volume.

        Runs no command.
        """
        if (device := self._devices.find(volume.group.name, volume.name)) is not None:
            self._devices.close_leftovers(device)

    def active_ids(self, prefix: str, group: str) -> Iterator[VolumeId]:
        """Yield the ids of the active volumes of a volume group whose names have a prefix.

        Runs no command and reads no report, so the group may be one that does not answer. Each id
        is built from the names of the group and of the logical volume: it is the id of a volume
        whose data are in the logical volume with which the volume was created.
        """
        for name in self._devices.active(group):
            device = self._devices.find(group, name) if names.is_of(prefix, name) else None
            if device is not None:
                yield VolumeId(group, ids.start_of(device.group_uuid), name)

    def is_any_active(self, group: str) -> bool:
        """Whether any logical volume of a volume group is active. Runs no command."""
        return bool(self._devices.active(group))

    def status(self, group: str, name: str) -> tuple[active_devices.Status, ...]:
        """Return device-mapper's status of an active logical volume and of all devices below it."""
        return self._devices.status(group, name)

    def status_of(self, volume: Backing) -> tuple[active_devices.Status, ...]:
        """Return device-mapper's status of an active volume, by its backing.

        If the backing names no volume group, as that of an inline volume, all groups are searched.
        Empty if the volume is inactive.
        """
        statuses = (self.status(group, volume.name) for group in self._groups_of(volume))
        return next(filter(None, statuses), ())

    def pool_status(self, group: str, name: str) -> ThinPool | None:
        """Return device-mapper's status of a thin pool; None if the pool is inactive.

        Waits at most five seconds, or until the caller's deadline; less if an earlier caller waits
        already (`Probes`). Raises PoolSilent if the kernel has not reported the status by then.
        """
        path = f"{group}/{name}"
        until = time.monotonic() + command.patience_seconds(_POOL_SECONDS)
        result = self._pools.probe(
            path, lambda: thin.status_of(self.status(group, name)), until, path
        )
        if result.hanging_seconds:
            raise errors.PoolSilent(group, name, result.hanging_seconds)
        return result.value

    def has_overflowed(self, snapshot: Snapshot) -> bool:
        """Whether the COW store of an active snapshot has overflowed, or failed.

        Runs no command.
        """
        status = self._devices.own_status(snapshot.group.name, snapshot.name)
        return devicemapper.has_overflowed(status)

    def has_lost_disk(self, volume: Volume) -> bool:
        """Whether an active volume uses the device of a disk that was disconnected, back or not.

        Runs no command.
        """
        return self._devices.has_lost_disk(volume.group.name, volume.name)

    @contextmanager
    def keep_suspended(self, volumes: Iterable[tuple[str, str]]) -> Iterator[None]:
        """Within the `with`, keep `Mender.mend` from resuming volumes that the caller suspends.

        Each volume is a pair: the names of its volume group and of its logical volume. No two
        callers may name the same volume at the same time.
        """
        suspended = frozenset(volumes)
        with self._guard:
            self._held |= suspended
        try:
            yield
        finally:
            with self._guard:
                self._held -= suspended

    def is_kept_suspended(self, group: str, name: str) -> bool:
        """Whether a caller of `keep_suspended` keeps a logical volume suspended."""
        return (group, name) in self._held
