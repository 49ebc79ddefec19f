"""Volumes in use on this node: found by id and path, measured, unmounted.

No call here starts a process: the kernel's mount table and sysfs have all that is needed.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from agent.core import errors, ids, trace
from agent.requests.requests import VolumeAt
from agent.volumes import backing, users
from agent.volumes.context import Context
from agent.volumes.volume_states import Call
from lvm.active_devices import Device
from mount import filesystem_health, loop, mounts, table, target
from mount import mount_errors as mount_errors

_GROWS_WHEN_STAGED = "it grows when it is staged or published next"


@dataclass(frozen=True)
class Statistics:
    """Size and usage of a volume.

    `usage` is None for a raw block volume, and for a file system that does not answer.
    """

    total_bytes: int
    usage: filesystem_health.Usage | None


class NodeVolumes:
    """Finds the devices and mounts of volumes."""

    def __init__(self, context: Context) -> None:
        self._kernel = context.kernel
        self._activator, self._mender = context.activator, context.mender
        self._conflicts = context.conflicts
        self._configuration = context.configuration

    @property
    def inside(self) -> Sequence[str]:
        """The directories in which kubelet may have volumes mounted."""
        return self._configuration.now.kubelet_dir

    def place(self, path: str) -> str:
        """A path of a request, resolved; raises BadPath unless it is inside kubelet's directory."""
        return target.resolve(self._kernel, path, self.inside)

    def device(self, volume_id: str) -> Device | None:
        """The device of a volume that CreateVolume made; None where it is not active.

        No command. Raises NoSuchVolume, Copying, Receiving, Moved for what is not a volume now, by
        what this process has under way.
        """
        if ids.is_inline(volume_id):
            raise errors.NoSuchVolume(volume_id)
        self._conflicts.check(Call.USE, volume_id)
        return self._activator.device(backing.of_id(volume_id))

    def statistics(self, call: VolumeAt) -> Statistics:
        """How large and how full the volume is where it is staged or published."""
        device, mounted = self._at(call, table.read(self._kernel))
        if mounted.device == device.number:
            with suppress(mount_errors.TargetError):  # it does not answer; its health says so
                found = filesystem_health.of(self._kernel, mounted.path)
                return Statistics(found.total_bytes, found)
        return Statistics(filesystem_health.device_size_bytes(self._kernel, device.path), None)

    def size_bytes(self, call: VolumeAt) -> int:
        """The device's size, if the volume is staged or published, at the path or elsewhere."""
        device, _ = self.anywhere(call, table.read(self._kernel))
        return filesystem_health.device_size_bytes(self._kernel, device.path)

    def anywhere(self, call: VolumeAt, known: table.Table) -> tuple[Device, table.Mount]:
        """The volume's device, and its mount at the path or else any; raises NotStaged.

        For growth: of a raw block volume that several pods have, kubelet sends the path of the
        last pod, also after that pod ended (DevicePath in its actual state of the world). Of a
        volume that is mounted nowhere, NOT_FOUND would mark the claim as one that cannot grow.
        """
        try:
            return self._at(call, known)
        except (errors.NoSuchPath, errors.NotStaged):
            device = self._activator.device(backing.of_id(call.volume_id))
            found = [] if device is None else users.places(self._kernel, known, device)
            if device is not None and found:
                return device, found[0]
            # A report, which tells it from a volume that does not exist.
            self._mender.mended_volume(call.volume_id, Call.USE)
            why = "it is mounted and published nowhere on this node"
            raise errors.NotStaged(call.volume_id, why, _GROWS_WHEN_STAGED) from None

    def _at(self, call: VolumeAt, known: table.Table) -> tuple[Device, table.Mount]:
        """The volume's device and its mount at the path; raises NoSuchPath."""
        if ids.is_inline(call.volume_id):
            device = self._activator.device(backing.of_id(call.volume_id))
        else:
            device = self.device(call.volume_id)
        try:
            mounted = known.top(self.place(call.path))
        except mount_errors.BadPath:
            mounted = None
        if device is not None and mounted is not None:
            if mounted.device == device.number:
                return device, mounted
            if mounts.node(self._kernel, mounted.path) in users.numbers(self._kernel, device):
                return device, mounted
        if mounted is not None and mounted.is_stale_node:
            raise errors.NotStaged(
                call.volume_id,
                f"{mounted.path} shows a device that went away",
                "look at `dmesg`, and have it unpublished first",
            )
        raise errors.NoSuchPath(call.volume_id, call.path)

    def ensure_unmounted(self, call: VolumeAt) -> None:
        """Unmount the volume from a path; a path without a mount is no error.

        Raises ForeignMount for another volume's.
        """
        device = self._activator.device(backing.of_id(call.volume_id))
        if device is None:
            # Only the stale node of a device that went away may be unmounted.
            mounts.ensure_unmounted(self._kernel, call.path, [])
            return
        known = table.read(self._kernel)
        if known.top_of(call.path, device.number) is not None:
            # A file system: no read-only loop device has a part in it.
            mounts.ensure_unmounted(self._kernel, call.path, [device.number], known)
            return
        loops = loop.over(self._kernel, device.number)
        numbers = users.numbers(self._kernel, device, loops)
        mounts.ensure_unmounted(self._kernel, call.path, numbers, known)
        self.detach_unused(loops)

    def detach_unused(self, loops: Sequence[str]) -> None:
        """Detach those of the read-only loop devices that are published nowhere."""
        for one in loops:
            bound = mounts.bound_nodes(self._kernel, table.read(self._kernel))
            if self._kernel.device_number(one) not in (number for _, number in bound):
                loop.detach(self._kernel, one, partial(trace.step, trace.WAIT, "udev"))
