"""What on this node keeps a volume from being taken away."""

from agent import errors
from agent.inventory import Inventory, Volume
from mount import nodes, table
from mount.syscalls import Kernel


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
