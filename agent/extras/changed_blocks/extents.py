"""Byte ranges of volumes: allocated in a snapshot, or changed since another snapshot.

The data of an encrypted volume begin behind its LUKS header, so a byte has two offsets: one in the
logical volume, which LVM and Carver's streams use, and one in the decrypted device that the pod has
open, which CSI uses. Each kind of offset has its own type, and mypy refuses one for the other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType

# Type of an offset from the first byte of the logical volume, in bytes. A LUKS header at the start
# of the volume counts.
LogicalOffset = NewType("LogicalOffset", int)
# Type of an offset from the first byte of the device that the volume's user reads, in bytes.
UserOffset = NewType("UserOffset", int)
# Offset 0 in the logical volume, and offset 0 in the user's device.
LOGICAL_START, USER_START = LogicalOffset(0), UserOffset(0)

# Size of the blocks that are compared, in bytes: a page of memory, and a sector of most disks.
BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Extent:
    """A range of bytes of a logical volume, counted from the volume's first byte."""

    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """The offset of the first byte behind this range, in bytes."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True)
class UserExtent:
    """A range of bytes of the device that the volume's user reads."""

    offset_bytes: UserOffset
    length_bytes: int


def merged(extents: Iterable[Extent], most_bytes: int | None = None) -> Iterator[Extent]:
    """Merge sorted ranges that are adjacent or overlap; yield the resulting ranges.

    With `most_bytes`, each resulting range has at most that length, in bytes.
    """
    last: Extent | None = None
    for extent in extents:
        if last is not None and extent.offset_bytes <= last.end_bytes:
            end = max(last.end_bytes, extent.end_bytes)
            last = Extent(last.offset_bytes, end - last.offset_bytes)
        else:
            if last is not None:
                yield last
            last = extent
        while most_bytes is not None and last is not None and last.length_bytes >= most_bytes:
            yield Extent(last.offset_bytes, most_bytes)
            rest = last.length_bytes - most_bytes
            last = Extent(last.offset_bytes + most_bytes, rest) if rest else None
    if last is not None:
        yield last


def clipped(extents: Iterable[Extent], start_bytes: int, end_bytes: int) -> Iterator[Extent]:
    """Clip sorted ranges to the bytes from `start_bytes` up to, but not including, `end_bytes`."""
    for extent in extents:
        if extent.offset_bytes >= end_bytes:
            return
        start, end = max(extent.offset_bytes, start_bytes), min(extent.end_bytes, end_bytes)
        if start < end:
            yield Extent(start, end - start)
