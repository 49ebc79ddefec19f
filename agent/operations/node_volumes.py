"""Volumes in use on this node: find them by id and path, measure and unmount them.

No method here starts a process: the kernel's mount table and sysfs have all that is needed.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from agent.core import errors, trace
from agent.requests.requests import VolumePath
from agent.volumes import backing, users
from agent.volumes.context import Context
from agent.volumes.volume_states import Call
from lvm.active_devices import Device
from mount import filesystem_health, loop, mounts, table, target
from mount import mount_errors as mount_errors

# Remedy in the error for a volume that is to grow and is not staged.
_GROWS_WHEN_STAGED = "it grows when it is staged or published next"


@dataclass(frozen=True)
class Statistics:
    """Size and usage of a volume.

    `usage` is None for a raw block volume, and for a file system that does not answer.
    """

    total_bytes: int
    usage: filesystem_health.Usage | None


class NodeVolumes:
    """Finds the devices and mounts of volumes on this node."""

    def __init__(self, context: Context) -> None:
        self._kernel = context.kernel
        self._activator, self._mender = context.activator, context.mender
        self._conflicts = context.conflicts
        self._configuration = context.configuration

    @property
    def kubelet_directories(self) -> Sequence[str]:
        """The directories in which kubelet may have volumes mounted."""
        return self._configuration.now.kubelet_dir

    def resolve(self, path: str) -> str:
        """Return a request's path, resolved; raise BadPath if it is outside kubelet's directory."""
        return target.resolve(self._kernel, path, self.kubelet_directories)

    def device(self, volume_id: str) -> Device | None:
        """Return the device of a volume that CreateVolume made; None if the volume is inactive.

        Runs no command. Raises NoSuchVolume, Copying, Receiving or Moved if this process knows that
        the volume cannot be used now. Raises NoSuchVolume for an inline volume, too.
        """
        logical = backing.of_id(volume_id)
        if logical.is_inline:
            raise errors.NoSuchVolume(volume_id)
        self._conflicts.check(Call.USE, volume_id)
        return self._activator.device(logical)

    def statistics(self, request: VolumePath) -> Statistics:
        """Return the size and usage of a volume that is staged or published at a path.

        Raises NoSuchPath if the volume is not mounted at the path, and NotStaged if the mount is of
        a device that went away.
        """
        device, mounted = self._device_and_mount(request, table.read(self._kernel))
        if mounted.device == device.number:
            # Return no usage for a file system that does not answer; the volume's health says so.
            with suppress(mount_errors.TargetError):
                usage = filesystem_health.of(self._kernel, mounted.path)
                return Statistics(usage.total_bytes, usage)
        return Statistics(filesystem_health.device_size_bytes(self._kernel, device.path), None)

    def size_bytes(self, request: VolumePath) -> int:
        """Return the size, in bytes, of the device of a volume that is staged or published.

        The volume may be mounted at the path of the call or at another path.
        """
        device, _ = self.find_mount(request, table.read(self._kernel))
        return filesystem_health.device_size_bytes(self._kernel, device.path)

    def find_mount(
        self, request: VolumePath, mount_table: table.Table
    ) -> tuple[Device, table.Mount]:
        """Return a volume's device, and its mount at the path of the call, or else any other mount.

        The method is for the growth of volumes. For a raw block volume in several pods, kubelet
        sends the path of the last pod, even after that pod ended (DevicePath in kubelet's actual
        state of the world). For a volume that is not mounted at all the method raises NotStaged,
        because NOT_FOUND would mark the claim as one that cannot grow. Raises NoSuchVolume if the
        volume does not exist.
        """
        try:
            return self._device_and_mount(request, mount_table)
        except (errors.NoSuchPath, errors.NotStaged):
            device = self._activator.device(backing.of_id(request.volume_id))
            present_mounts = (
                [] if device is None else users.mounts_of_volume(self._kernel, mount_table, device)
            )
            if device is not None and present_mounts:
                return device, present_mounts[0]
            # Read a report, which raises NoSuchVolume for a volume that does not exist.
            self._mender.mended_volume(request.volume_id, Call.USE)
            why = "it is mounted and published nowhere on this node"
            raise errors.NotStaged(request.volume_id, why, _GROWS_WHEN_STAGED) from None

    def _device_and_mount(
        self, request: VolumePath, mount_table: table.Table
    ) -> tuple[Device, table.Mount]:
        """Return a volume's device and its mount at the path; raise NoSuchPath if there is none.

        Raises NotStaged if the mount is of a device that went away.
        """
        logical = backing.of_id(request.volume_id)
        if logical.is_inline:
            device = self._activator.device(logical)
        else:
            device = self.device(request.volume_id)
        try:
            mounted = mount_table.top(self.resolve(request.path))
        except mount_errors.BadPath:
            mounted = None
        if device is not None and mounted is not None:
            if mounted.device == device.number:
                return device, mounted
            if mounts.node(self._kernel, mounted.path) in users.device_numbers(
                self._kernel, device
            ):
                return device, mounted
        if mounted is not None and mounted.is_stale_node:
            raise errors.NotStaged(
                request.volume_id,
                f"{mounted.path} shows a device that went away",
                "look at `dmesg`, and have it unpublished first",
            )
        raise errors.NoSuchPath(request.volume_id, request.path)

    def ensure_unmounted(self, request: VolumePath) -> None:
        """Unmount a volume from a path; a path without a mount is no error.

        Raises ForeignMount if the mount is another volume's.
        """
        device = self._activator.device(backing.of_id(request.volume_id))
        if device is None:
            # Unmount nothing but a stale node of a device that went away, since the volume is not
            # active.
            mounts.ensure_unmounted(self._kernel, request.path, [])
            return
        mount_table = table.read(self._kernel)
        if mount_table.top_of(request.path, device.number) is not None:
            # Unmount a file system; read-only loop devices are used for raw block volumes only.
            mounts.ensure_unmounted(self._kernel, request.path, [device.number], mount_table)
            return
        loops = loop.loop_devices_over(self._kernel, device.number)
        numbers = users.device_numbers(self._kernel, device, loops)
        mounts.ensure_unmounted(self._kernel, request.path, numbers, mount_table)
        self.detach_unused(loops)

    def detach_unused(self, loops: Sequence[str]) -> None:
        """Detach read-only loop devices that are not published anywhere."""
        for loop_device in loops:
            bound = mounts.bound_nodes(self._kernel, table.read(self._kernel))
            if self._kernel.device_number(loop_device) not in (number for _, number in bound):
                loop.detach(self._kernel, loop_device, partial(trace.step, trace.WAIT, "udev"))
