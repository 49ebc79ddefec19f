"""Where a volume is used on this node: to be asked before it is taken away, or put elsewhere."""

import time
from collections.abc import Iterator, Sequence

from agent.core import errors
from agent.core.inventory import Inventory
from agent.core.records import Volume
from lvm.devices import Device
from mount import command, loop, table, target
from mount import mounts as nodes
from mount.kernel import Kernel
from mount.table import DeviceNumber, Mount, Table

# A device that is open for no longer is not in use.
OPEN_SECONDS = 2.0
_LOOK_SECONDS = 0.02


def numbers(
    kernel: Kernel, device: Device, loops: Sequence[str] | None = None
) -> list[DeviceNumber]:
    """The device's number, and that of the loop device through which it is read only.

    `loops` are those over it, where the caller has asked for them.
    """
    if loops is None:
        loops = loop.over(kernel, device.number)
    return [device.number, *(kernel.device_number(one) for one in loops)]


def places(kernel: Kernel, mounts: Table, device: Device) -> list[Mount]:
    """Everywhere that an active volume is mounted or its node bound, the first mount first.

    A part of the volume, bound elsewhere by kubelet for a subPath, is no place of its own.
    """
    whole = [one for one in mounts.of_device(device.number) if one.root == "/"]
    return [*whole, *nodes.bound(kernel, mounts, numbers(kernel, device))]


def targets(kernel: Kernel, mounts: Table, device: Device, inside: Sequence[str]) -> Iterator[str]:
    """The places of an active volume that a caller can have asked for: those inside `inside`.

    Where kubelet's directory can be seen at another path as well, each mount in it is seen there,
    too (mount_namespaces(7), shared subtrees). That is no place of its own.
    """
    for one in places(kernel, mounts, device):
        if target.is_inside(kernel, one.path, inside):
            yield one.path


def flush(kernel: Kernel, known: Inventory, volume_id: str) -> None:
    """Have a mounted btrfs, or what is mounted of an encrypted volume, write what is in memory.

    Of the other file systems the kernel does that by itself, when it suspends the device for a
    snapshot. It does not know which btrfs a device is of (s_bdev is not set, fs/btrfs/super.c), and
    of an encrypted volume the device that is suspended is not the one that is mounted.
    """
    device = known.device(volume_id)
    if device is None:
        return
    for mounted in table.read(kernel).of_device(device.number):
        if device.below is not None and mounted.fs_type != "btrfs":
            kernel.sync(mounted.path)
            return
        if mounted.fs_type == "btrfs":
            kernel.sync_btrfs(mounted.path)
            return


def mounted_at(kernel: Kernel, known: Inventory, volume_id: str) -> set[str]:
    """The paths where a volume, or a part of it, is mounted or published; no command."""
    device = known.device(volume_id)
    if device is None:
        return set()
    mounts = table.read(kernel)
    parts = mounts.of_device(device.number)
    return {one.path for one in (*parts, *places(kernel, mounts, device))}


def require_unused(kernel: Kernel, known: Inventory, volume: Volume) -> None:
    """Raise VolumeInUse where the volume is mounted, published or open.

    What a cryptsetup that was killed left on it is nobody's, and is taken away.
    """
    if volume.is_encrypted:
        known.close_leftovers(volume)
    if paths := mounted_at(kernel, known, str(volume.id)):
        raise errors.VolumeInUse(str(volume.id), f"it is mounted at {', '.join(sorted(paths))}")
    # udev has a look at a device after each close of it by a writer, such as the last unmount's.
    remaining = command.remaining_seconds()
    end = time.monotonic() + (OPEN_SECONDS if remaining is None else min(OPEN_SECONDS, remaining))
    while known.is_open(volume):
        if time.monotonic() >= end:
            raise errors.VolumeInUse(str(volume.id), "a process has its device open")
        time.sleep(_LOOK_SECONDS)
