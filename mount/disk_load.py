"""The I/O statistics of the disks below a block device, by sysfs (/sys/block/DISK/stat)."""

from dataclasses import dataclass

from mount import stacks
from mount.block_devices import BlockDevices, LoopDevices, attribute

# Fields of a disk's statistics (Documentation/block/stat.rst): completed I/Os and their times for
# reads, writes, discards (since Linux 4.18) and flushes (since 5.5), and the I/Os in flight.
_COMPLETED, _TICKS, _IN_FLIGHT = (0, 4, 11, 15), (3, 7, 14, 16), 8
_FIELDS = 17


@dataclass(frozen=True)
class DiskLoad:
    """The I/O statistics of a disk.

    - `completed` is the number of I/Os completed since the disk was attached.
    - `waited_milliseconds` is the sum of these I/Os' times from submission to completion.
    - `in_flight` is the number of I/Os that were submitted and have not completed.
    """

    completed: int = 0
    waited_milliseconds: int = 0
    in_flight: int = 0


class DiskLoads(BlockDevices, LoopDevices):
    """Part of `mount.kernel.Kernel`: disks, by their names in /sys/block."""

    def disks_below(self, device: str) -> frozenset[str]:
        """The names of the whole disks below a block device, through dm, md and partitions.

        A loop device counts as a disk. Below the loop device's file is another disk, whose
        statistics would mislead: after each flush the file system of that file writes its journal
        to the disk, which would look like the I/O of other programs. Empty for an absent device.
        """
        try:
            return stacks.disks(self._sysfs(device))
        except OSError:
            return frozenset()

    def disk_load(self, disk: str) -> DiskLoad:
        """The load of a disk; zeroes for a disk that is absent or has no statistics."""
        statistics = _statistics(f"/sys/block/{disk}")
        return DiskLoad(
            sum(statistics[index] for index in _COMPLETED),
            sum(statistics[index] for index in _TICKS),
            statistics[_IN_FLIGHT],
        )


def _statistics(device: str) -> list[int]:
    """The fields of a device's `stat`; fields that an older kernel lacks are 0."""
    fields = [int(field) for field in attribute(f"{device}/stat").split()]
    return fields + [0] * (_FIELDS - len(fields))
