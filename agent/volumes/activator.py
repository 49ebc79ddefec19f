"""Activate logical volumes, find their devices, and read their device-mapper status.

The only command that `Activator` runs is lvchange(8), to activate a volume, or to deactivate what
keeps lvm2 from activating one.
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
        # The volumes that are suspended on purpose, by the names of their group and of their
        # logical volume.
        self._held: frozenset[tuple[str, str]] = frozenset()

    def device(self, volume: Backing) -> active_devices.Device | None:
        """Return the device of an active volume, without a command.

        The result None does not prove that the volume is inactive. For an open encrypted
        volume it is the dm-crypt device. For a closed encrypted volume it is the logical volume's
        device, which callers must not publish.
        """
        devices = (self._devices.find(group, volume.name) for group in self._groups_of(volume))
        device = next(filter(None, devices), None)
        if device is None or volume.group_uuid not in ("", ids.start_of(device.group_uuid)):
            return None
        return self._devices.mapping(device) or device

    def _groups_of(self, volume: Backing) -> Sequence[str]:
        """Return the names of the volume groups that may have a volume."""
        return (volume.group,) if volume.group else self._volume_groups.names

    def require_same(self, volume: Volume, device: active_devices.Device) -> None:
        """Raise NoSuchVolume if the device of a volume is no longer the given one."""
        present = self.device(volume.backing)
        if present is None or present.logical.uuid != device.logical.uuid:
            raise errors.NoSuchVolume(str(volume.id))

    def activate(self, volume: Volume, *, partial: bool = False) -> active_devices.Device:
        """Return a volume's device; run a command only if the volume is inactive. Raises Inactive.

        `partial` activates what is left of a volume with missing disks.
        """
        return self.ensure_active(volume.group.name, volume.name, partial=partial)

    def ensure_active(
        self, group: str, name: str, activated_name: str = "", *, partial: bool = False
    ) -> active_devices.Device:
        """Return the device of any logical volume; run a command only if the volume is inactive.

        1. An active volume whose disk was disconnected and is back is deactivated.
        2. An inactive volume is activated. `activated_name` names another volume whose activation
           activates this one. `partial` activates what is left of a volume with missing disks.
        3. If lvm2 fails, the parts of RAIDs and pools that a killed lvm2 left active are
           deactivated, and the activation is retried once.

        Raises Inactive.
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
        """Keep a logical volume active in the context; at the end, restore its earlier state.

        Yields the volume's device. A volume that was inactive is deactivated at the end. The caller
        holds the volume's lock; the volume must have no snapshot that may be used meanwhile. The
        group's lock is held to activate and to deactivate the volume, but not in the context, where
        the volume's disk may hang.
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
        """Return a snapshot's device; activate the snapshot if need be. Raises Inactive.

        A copy-on-write snapshot is active whenever its source is.
        """
        # A copy-on-write snapshot is activated by its origin's name. By the snapshot's name, lvm2
        # would ask whether to activate the origin as well.
        activated_name = "" if snapshot.is_thin else snapshot.origin
        return self.ensure_active(snapshot.group.name, snapshot.name, activated_name)

    def _deactivate_stranded(self, group: str, name: str) -> bool:
        """Deactivate a volume that uses the old device of a disk that went away and came back.

        Returns whether the volume is inactive now. To the kernel a disk that comes back is another
        device. lvm2 takes the volume for active and does nothing, while each read and write of the
        volume fails. Thin volumes use the device of their pool, and are deactivated together with
        the pool. A volume that is in use is left unchanged, and so is a volume on a disk that is
        not back. Runs no command for any other volume.
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

        Returns whether there were any. lvm2 refuses to activate a RAID or pool while one of its
        parts is active by itself. Runs one ioctl if the group has a RAID or pool, and a command
        only if a part is active.
        """
        whole_names = {
            logical.name
            for logical in records.every(group)
            if not logical.layout & {"linear", "striped"} and records.is_usable(group, logical)
        }
        if not whole_names:
            return False
        active = set(self._devices.active(group.name))
        parts = {name: report.whole(name) for name in active if names.is_part(name)}
        # The status is read as well, since a pool may be active without a device of its own name.
        leftovers = [
            part
            for part, whole_name in sorted(parts.items())
            if whole_name in whole_names - active
            and not self._devices.status(group.name, whole_name)
        ]
        if not leftovers:
            return False
        # An error is ignored: lvm2 refuses to deactivate a part of a volume that was activated
        # meanwhile.
        with suppress(mount_errors.CommandError):
            volumes.deactivate(self._volume_groups.lvm(group.name), group.name, *leftovers)
        return True

    def is_active(self, group: str, name: str) -> bool:
        """Whether a logical volume, or a thin pool, is active. Runs no command."""
        return bool(self._devices.find(group, name) or self._devices.status(group, name))

    def is_open(self, volume: Volume) -> bool:
        """Whether a program or a device has the device of an active volume open. Runs no command.

        For an encrypted volume, whether its dm-crypt device is open.
        """
        if volume.is_encrypted and (mapping := self.mapping(volume)) is not None:
            return self._devices.is_mapping_open(mapping)
        return self._devices.is_open(volume.group.name, volume.name)

    def is_closed(self, volume: Backing) -> bool:
        """Whether it is certain that nothing, not even a dm-crypt device, has a volume open.

        Needs one ioctl. False for an inline volume whose group is unknown because no report was
        read.
        """
        return bool(volume.group) and self._devices.is_closed(volume.group, volume.name)

    def mapping(self, volume: Volume) -> active_devices.Device | None:
        """Return the dm-crypt device over an encrypted volume that is open. Runs no command."""
        device = self._devices.find(volume.group.name, volume.name)
        return None if device is None else self._devices.mapping(device)

    def close_leftovers(self, volume: Volume) -> None:
        """Remove the dm-crypt devices that a killed cryptsetup left on an active volume.

        Runs no command.
        """
        if (device := self._devices.find(volume.group.name, volume.name)) is not None:
            self._devices.close_leftovers(device)

    def active_ids(self, prefix: str, group: str) -> Iterator[VolumeId]:
        """Yield the ids of active volumes whose names have a prefix, even in a group never read.

        Runs no command and reads no report: each id is built from the names of the group and of the
        logical volume, so it is the id that the volume was created with.
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
        """Return device-mapper's status of an active volume by its backing.

        The backing may lack the group, as of an inline volume.
        """
        statuses = (self.status(group, volume.name) for group in self._groups_of(volume))
        return next(filter(None, statuses), ())

    def pool_status(self, group: str, name: str) -> ThinPool | None:
        """Return device-mapper's status of a thin pool; None if the pool is inactive.

        Waits until the caller's deadline, but at most five seconds. Does not wait if the kernel has
        already kept earlier callers waiting for so long. Raises PoolSilent.
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
        """Whether the COW store of an active snapshot has overflowed. Runs no command."""
        status = self._devices.own_status(snapshot.group.name, snapshot.name)
        return devicemapper.has_overflowed(status)

    def has_lost_disk(self, volume: Volume) -> bool:
        """Whether an active volume uses the device of a disk that was disconnected, back or not.

        Runs no command.
        """
        return self._devices.has_lost_disk(volume.group.name, volume.name)

    @contextmanager
    def keep_suspended(self, volumes: Iterable[tuple[str, str]]) -> Iterator[None]:
        """Keep `Mender.mend` from resuming volumes that are suspended on purpose.

        Each volume is a pair: the names of its volume group and of its logical volume. No two calls
        may have the same volume at the same time.
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
        """Whether a logical volume is suspended on purpose (`keep_suspended`)."""
        return (group, name) in self._held
