"""Find out where a volume is mounted, published or open on this node."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from agent.core import errors, trace
from agent.volumes.activator import Activator
from agent.volumes.backing import Backing
from agent.volumes.records import Volume
from lvm.active_devices import Device
from mount import command, loop, table, target
from mount import mount_errors as mount_errors
from mount import mounts as nodes
from mount.kernel import Kernel
from mount.table import DeviceNumber, Mount, Table

# Time for which a device has to stay open to count as in use, in seconds. udev opens a device for a
# shorter time after each change, to read it.
OPEN_SECONDS = 2.0
# Interval at which a device that is open is checked again, in seconds.
_LOOK_SECONDS = 0.02


def device_numbers(
    kernel: Kernel, device: Device, loop_paths: Sequence[str] | None = None
) -> list[DeviceNumber]:
    """Return the device numbers of a volume's device and of the read-only loop devices over it.

    `loop_paths` are the paths of these loop devices; without them, the loop devices are searched
    for.
    """
    if loop_paths is None:
        loop_paths = loop.loop_devices_over(kernel, device.number)
    return [device.number, *(kernel.device_number(path) for path in loop_paths)]


def mounts_of_volume(kernel: Kernel, mounts: Table, device: Device) -> list[Mount]:
    """Return all mounts of an active volume, and then all bind mounts of its device node.

    Bind mounts of the read-only loop devices over the volume count as bind mounts of its device
    node. Left out are bind mounts of the volume's directories, which kubelet makes for a subPath.
    """
    full_mounts = [mounted for mounted in mounts.of_device(device.number) if mounted.root == "/"]
    if not (bound := nodes.bound_nodes(kernel, mounts)):
        return full_mounts
    own_numbers = device_numbers(kernel, device)
    return [*full_mounts, *(mounted for mounted, number in bound if number in own_numbers)]


def target_paths(
    kernel: Kernel, mounts: Table, device: Device, directories: Sequence[str]
) -> Iterator[str]:
    """Yield the paths, inside the CO's directories, at which a volume is mounted or published.

    If kubelet's directory is also visible at another path, so are the mounts in the directory
    (mount_namespaces(7), shared subtrees). Such copies of mounts are left out.
    """
    for mounted in mounts_of_volume(kernel, mounts, device):
        if target.is_inside(kernel, mounted.path, directories):
            yield mounted.path


def flush(kernel: Kernel, activator: Activator, volume: Backing) -> None:
    """Sync a volume's mounted file system before a snapshot, if it is a btrfs or is encrypted.

    The kernel syncs other file systems when it suspends the device for a snapshot. It cannot find a
    btrfs by its device (s_bdev is not set, fs/btrfs/super.c). The device of an encrypted volume
    that is suspended is not the mounted one, but the one below.
    """
    device = activator.device(volume)
    if device is None:
        return
    for mounted in table.read(kernel).of_device(device.number):
        if device.below is not None and mounted.fs_type != "btrfs":
            kernel.sync(mounted.path)
            return
        if mounted.fs_type == "btrfs":
            kernel.sync_btrfs(mounted.path)
            return


def mount_paths(kernel: Kernel, activator: Activator, volume: Backing) -> set[str]:
    """Return the paths where a volume, or a directory of the volume, is mounted or published.

    The result is empty for an inactive volume. Runs no command. device-mapper is asked first: a
    device that is mounted, or that a dm-crypt device stands on, is open. A bind mount of a device
    node alone does not keep the device open.
    """
    mounts = table.read(kernel)
    if activator.is_closed(volume) and not nodes.bound_nodes(kernel, mounts):
        return set()
    device = activator.device(volume)
    if device is None:
        return set()
    parts = mounts.of_device(device.number)
    return {mounted.path for mounted in (*parts, *mounts_of_volume(kernel, mounts, device))}


def require_unused(kernel: Kernel, activator: Activator, volume: Volume) -> None:
    """Raise VolumeInUse if the volume is mounted, published or open.

    First closes the dm-crypt devices that a killed cryptsetup left. Waits up to two seconds for a
    device that is open and not mounted: udev opens a device for a moment.
    """
    if volume.is_encrypted:
        activator.close_leftovers(volume)
    if paths := mount_paths(kernel, activator, volume.backing):
        raise errors.VolumeInUse(str(volume.id), f"it is mounted at {', '.join(sorted(paths))}")
    if not activator.is_open(volume):
        return
    # Check a device that is open for two seconds: udev reads a device after each close by a writer,
    # such as the last unmount.
    end = time.monotonic() + command.patience_seconds(OPEN_SECONDS)
    with trace.step(trace.WAIT, "udev"):
        while activator.is_open(volume):
            if time.monotonic() >= end:
                raise errors.VolumeInUse(str(volume.id), _holders(kernel, activator, volume))
            time.sleep(_LOOK_SECONDS)


def _holders(kernel: Kernel, activator: Activator, volume: Volume) -> str:
    """Return a text for error messages: which devices or processes have a volume's device open."""
    device = activator.device(volume.backing)
    if device is None:
        return "a process has its device open"
    return holders(kernel, device)


def holders(kernel: Kernel, device: Device) -> str:
    """Return a text for error messages: which devices or processes have a device open.

    The devices on top of the device are named, or else the processes that have it open. Runs no
    command.
    """
    names: list[str] = []
    with suppress(OSError, mount_errors.MountError):
        names = loop.standing_on(kernel, device.path)
    if names:
        return (
            f"{', '.join(names)} stand on its device; `A guest's volume group` in"
            " docs/operations.md says what to do where the node's lvm2 has activated volumes inside"
            " it"
        )
    with suppress(OSError, ValueError):
        names = list(nodes.processes(kernel, kernel.real_path(device.path)))
    users = ", ".join(names) if names else "a process"
    return f"{users} has its device open"
