"""Byte ranges: allocated in a snapshot, or changed since another one.

The data of an encrypted volume begin behind its header, so a byte has two offsets: in the logical
volume, as LVM and streams count, and in the device that the user has open, as CSI counts. Each has
its own type, and mypy refuses one for the other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType

# From the first byte of the logical volume, header included; from that of the user's device.
LogicalOffset = NewType("LogicalOffset", int)
UserOffset = NewType("UserOffset", int)
LOGICAL_START, USER_START = LogicalOffset(0), UserOffset(0)

# The unit of comparison: a page, and a sector of most disks.
BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Extent:
    """A range of bytes of a logical volume."""

    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """The offset behind its last byte."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True)
class UserExtent:
    """A range of bytes of the device that the volume's user reads."""

    offset_bytes: UserOffset
    length_bytes: int


def merged(extents: Iterable[Extent], most_bytes: int | None = None) -> Iterator[Extent]:
    """Merge ranges that are sorted by their offsets, into ranges of at most `most_bytes`."""
    last: Extent | None = None
    for one in extents:
        if last is not None and one.offset_bytes <= last.end_bytes:
            end = max(last.end_bytes, one.end_bytes)
            last = Extent(last.offset_bytes, end - last.offset_bytes)
        else:
            if last is not None:
                yield last
            last = one
        while most_bytes is not None and last is not None and last.length_bytes >= most_bytes:
            yield Extent(last.offset_bytes, most_bytes)
            rest = last.length_bytes - most_bytes
            last = Extent(last.offset_bytes + most_bytes, rest) if rest else None
    if last is not None:
        yield last


def clipped(extents: Iterable[Extent], start_bytes: int, end_bytes: int) -> Iterator[Extent]:
    """Clip sorted ranges to those between two offsets."""
    for one in extents:
        if one.offset_bytes >= end_bytes:
            return
        start, end = max(one.offset_bytes, start_bytes), min(one.end_bytes, end_bytes)
        if start < end:
            yield Extent(start, end - start)
