"""Who uses a volume on this node: to be asked before it is taken away, or a snapshot of it."""

from agent import errors
from agent.inventory import Inventory, Volume
from mount import nodes, table
from mount.syscalls import Kernel


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
        mounted = table.read(kernel).of_device(device.number)
        published = nodes.bound(kernel, device.number)
        paths = [one.path for one in (*mounted, *published)]
        if paths:
            raise errors.VolumeInUse(str(volume.id), f"it is mounted at {', '.join(paths)}")
    if volume.open:
        raise errors.VolumeInUse(str(volume.id), "a process has its device open")
