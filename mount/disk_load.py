"""What the disks below a block device are at, by sysfs: /sys/block/DISK/stat."""

from dataclasses import dataclass

from mount import stacks
from mount.block_devices import BlockDevices, LoopDevices, attribute

# Documentation/block/stat.rst: reads, writes, discards (since Linux 4.18), flushes (since 5.5).
_COMPLETED, _TICKS, _IN_FLIGHT = (0, 4, 11, 15), (3, 7, 14, 16), 8
_FIELDS = 17


@dataclass(frozen=True)
class DiskLoad:
    """I/O that a disk completed since it was attached, and how much is at its driver now.

    `waited_milliseconds` is the sum of the times from submission to completion.
    """

    completed: int = 0
    waited_milliseconds: int = 0
    in_flight: int = 0


class DiskLoads(BlockDevices, LoopDevices):
    """The disks of `mount.kernel.Kernel`, by their names in /sys/block."""

    def disks_below(self, device: str) -> frozenset[str]:
        """The whole disks that a block device stands on, through dm, md and partitions.

        A loop device is one: after each flush the file system of its file is busy with its journal,
        which on the disk below would pass for others' I/O.
        """
        try:
            return stacks.disks(self._sysfs(device))
        except OSError:
            return frozenset()

    def disk_load(self, disk: str) -> DiskLoad:
        """What a disk is at; nothing for one that is gone or has no statistics."""
        found = _statistics(f"/sys/block/{disk}")
        return DiskLoad(
            sum(found[at] for at in _COMPLETED), sum(found[at] for at in _TICKS), found[_IN_FLIGHT]
        )


def _statistics(device: str) -> list[int]:
    """The fields of a device's `stat`; older kernels have fewer, and count as 0."""
    found = [int(one) for one in attribute(f"{device}/stat").split()]
    return found + [0] * (_FIELDS - len(found))
