"""Where a volume is used on this node: to be asked before it is taken away, or put elsewhere."""

from agent import errors
from agent.inventory import Inventory, Volume
from lvm.devices import Device
from mount import loop, nodes, table
from mount.syscalls import Kernel
from mount.table import DeviceNumber, Mount, Table


def numbers(kernel: Kernel, device: Device) -> list[DeviceNumber]:
    """The device's number, and that of the loop device through which it is read only."""
    loops = loop.over(kernel, device.number)
    return [device.number, *(kernel.device_number(one) for one in loops)]


def places(kernel: Kernel, mounts: Table, device: Device) -> list[Mount]:
    """Everywhere that an active volume is mounted or its node bound, the first mount first.

    A part of the volume, bound elsewhere by kubelet for a subPath, is no place of its own.
    """
    whole = [one for one in mounts.of_device(device.number) if one.root == "/"]
    return [*whole, *nodes.bound(kernel, mounts, numbers(kernel, device))]


def flush(kernel: Kernel, known: Inventory, volume_id: str) -> None:
    """Have a mounted btrfs write what it holds in memory.

    Of the other file systems the kernel does that by itself, when it suspends the device for a
    snapshot. It does not know which btrfs a device is of (s_bdev is not set, fs/btrfs/super.c).
    """
    device = known.device(volume_id)
    if device is None:
        return
    for mounted in table.read(kernel).of_device(device.number):
        if mounted.fs_type == "btrfs":
            kernel.sync_btrfs(mounted.path)
            return


def require_unused(kernel: Kernel, known: Inventory, volume: Volume) -> None:
    """Raise VolumeInUse where the volume is mounted, published or open."""
    device = known.device(str(volume.id))
    if device is not None:
        mounts = table.read(kernel)
        parts = mounts.of_device(device.number)
        if paths := {one.path for one in (*parts, *places(kernel, mounts, device))}:
            raise errors.VolumeInUse(str(volume.id), f"it is mounted at {', '.join(sorted(paths))}")
    if volume.open:
        raise errors.VolumeInUse(str(volume.id), "a process has its device open")
