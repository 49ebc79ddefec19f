"""Where a volume is mounted, published or open on this node."""

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

# A device that is open for a shorter time is not in use: udev reads it after each change.
OPEN_SECONDS = 2.0
_LOOK_SECONDS = 0.02


def numbers(
    kernel: Kernel, device: Device, loops: Sequence[str] | None = None
) -> list[DeviceNumber]:
    """The numbers of the device and of the read-only loop devices over it, `loops` if known."""
    if loops is None:
        loops = loop.over(kernel, device.number)
    return [device.number, *(kernel.device_number(one) for one in loops)]


def places(kernel: Kernel, mounts: Table, device: Device) -> list[Mount]:
    """All mounts of an active volume and bind mounts of its device node, in order.

    Without bind mounts of its directories, which kubelet makes for a subPath.
    """
    whole = [one for one in mounts.of_device(device.number) if one.root == "/"]
    if not (bound := nodes.bound_nodes(kernel, mounts)):
        return whole
    own = numbers(kernel, device)
    return [*whole, *(one for one, number in bound if number in own)]


def targets(kernel: Kernel, mounts: Table, device: Device, inside: Sequence[str]) -> Iterator[str]:
    """The paths of an active volume inside `inside`, the directories of the CO.

    If kubelet's directory is visible at another path, so are its mounts (mount_namespaces(7),
    shared subtrees); these copies do not count.
    """
    for one in places(kernel, mounts, device):
        if target.is_inside(kernel, one.path, inside):
            yield one.path


def flush(kernel: Kernel, activator: Activator, volume: Backing) -> None:
    """Sync a mounted btrfs, or the file system of an encrypted volume.

    The kernel syncs other file systems when it suspends the device for a snapshot. It cannot find
    a btrfs by its device (s_bdev is not set, fs/btrfs/super.c), and the suspended device of an
    encrypted volume is below the mounted one.
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


def mounted_at(kernel: Kernel, activator: Activator, volume: Backing) -> set[str]:
    """The paths where a volume, or a part of it, is mounted or published; no command.

    Device-mapper is asked first: what is mounted, and what a dm-crypt device stands on, is open. A
    bind mount of a device node alone is not.
    """
    mounts = table.read(kernel)
    if activator.is_closed(volume) and not nodes.bound_nodes(kernel, mounts):
        return set()
    device = activator.device(volume)
    if device is None:
        return set()
    parts = mounts.of_device(device.number)
    return {one.path for one in (*parts, *places(kernel, mounts, device))}


def require_unused(kernel: Kernel, activator: Activator, volume: Volume) -> None:
    """Raise VolumeInUse if the volume is mounted, published or open.

    Closes dm-crypt devices that a killed cryptsetup left.
    """
    if volume.is_encrypted:
        activator.close_leftovers(volume)
    if paths := mounted_at(kernel, activator, volume.backing):
        raise errors.VolumeInUse(str(volume.id), f"it is mounted at {', '.join(sorted(paths))}")
    if not activator.is_open(volume):
        return
    # udev reads a device after each close by a writer, such as the last unmount.
    end = time.monotonic() + command.patience_seconds(OPEN_SECONDS)
    with trace.step(trace.WAIT, "udev"):
        while activator.is_open(volume):
            if time.monotonic() >= end:
                raise errors.VolumeInUse(str(volume.id), _holders(kernel, activator, volume))
            time.sleep(_LOOK_SECONDS)


def _holders(kernel: Kernel, activator: Activator, volume: Volume) -> str:
    """Who has a volume's device open: the devices that stand on it, or else the processes."""
    device = activator.device(volume.backing)
    if device is None:
        return "a process has its device open"
    return holders(kernel, device)


def holders(kernel: Kernel, device: Device) -> str:
    """Who has a device open: the devices that stand on it, or else the processes; no command."""
    found: list[str] = []
    with suppress(OSError, mount_errors.MountError):
        found = loop.standing_on(kernel, device.path)
    if found:
        return (
            f"{', '.join(found)} stand on its device; `A guest's volume group` in"
            " docs/operations.md says what to do where the node's lvm2 has activated volumes inside"
            " it"
        )
    with suppress(OSError, ValueError):
        found = list(nodes.processes(kernel, kernel.real_path(device.path)))
    who = ", ".join(found) if found else "a process"
    return f"{who} has its device open"
