"""Byte ranges: allocated in a snapshot, or changed since another one.

The data of an encrypted volume begin behind its header, so a byte has two offsets: in the logical
volume, as LVM and streams count, and in the device that the user has open, as CSI counts. Each has
its own type, and mypy refuses one for the other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType, Protocol

from agent.core import errors
from agent.core.records import Snapshot, Volume

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


class Reading(Protocol):
    """A snapshot or a volume that is held while it is read."""

    @property
    def of(self) -> Snapshot | Volume:
        """The object that is read; of two, the target."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its size, header included; its device may have grown since."""
        ...

    @property
    def device(self) -> str:
        """The path of its active block device, which is open until the reading ends."""
        ...

    def extents(self, starting_offset: LogicalOffset = LOGICAL_START) -> Iterator[Extent]:
        """The sorted ranges from an offset on, in whole blocks of BLOCK_BYTES up to the end.

        Ranges are merged, but those found by comparing only in part, to be yielded early. May be
        called again, also with another offset. Raises SourceLost, DeltaFailed, OSError.
        """
        ...

    def for_user(self) -> "UserReading":
        """The reading in the user's offsets; raises BlocksUnknown."""
        ...


@dataclass(frozen=True)
class UserReading:
    """A reading in the user's offsets, which begin at `begins`."""

    logical: Reading
    begins: LogicalOffset

    @property
    def size_bytes(self) -> int:
        """The size that the user sees."""
        return self.logical.size_bytes - self.begins

    def extents(self, starting_offset: UserOffset = USER_START) -> Iterator[UserExtent]:
        """The ranges of the logical volume behind its header."""
        if not 0 <= starting_offset <= self.size_bytes:
            raise errors.NotBeyond(starting_offset, self.size_bytes)
        return (
            UserExtent(UserOffset(one.offset_bytes - self.begins), one.length_bytes)
            for one in self.logical.extents(LogicalOffset(self.begins + starting_offset))
        )


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
