"""Ranges of bytes, in order: what is allocated in a snapshot, or changed since another.

An encrypted volume lies behind its header in its logical volume, so the same place has two offsets:
in the logical volume, as LVM and streams count, and in the device that the volume's user has open,
as CSI's callers do. Each has a type of its own, and mypy refuses the one for the other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType, Protocol

from agent.core import errors
from agent.core.records import Snapshot, Volume

# From the first byte of a logical volume, the header's included; and of the device of its user.
LogicalOffset = NewType("LogicalOffset", int)
UserOffset = NewType("UserOffset", int)
LOGICAL_START, USER_START = LogicalOffset(0), UserOffset(0)

# What is compared at once, and so the unit of what changed: a page, and a sector of most disks.
BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Extent:
    """A range of bytes of a logical volume."""

    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte behind it."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True)
class UserExtent:
    """A range of bytes of the device that the volume's user reads."""

    offset_bytes: UserOffset
    length_bytes: int


class Reading(Protocol):
    """A snapshot, or a volume, that is held for as long as it is read."""

    @property
    def of(self) -> Snapshot | Volume:
        """What is read: of two, the target."""
        ...

    @property
    def size_bytes(self) -> int:
        """How large that is, its header included; its device may be larger, if it grew since."""
        ...

    @property
    def device(self) -> str:
        """The path of its block device, which is active, and open until the reading ends."""
        ...

    def extents(self, starting_offset: LogicalOffset = LOGICAL_START) -> Iterator[Extent]:
        """The ranges that end behind an offset: sorted, the first one cut to begin there.

        Merged, but for what is found by comparing: that is told before all of it was compared.

        Whole blocks of BLOCK_BYTES, but for the last one of a volume that is no multiple of it. May
        be asked again, for another offset too. Raises SourceLost, DeltaFailed, OSError.
        """
        ...

    def for_user(self) -> "UserReading":
        """The same as the volume's user sees it; raises BlocksUnknown where that is not known."""
        ...


@dataclass(frozen=True)
class UserReading:
    """A reading in the offsets of the volume's user, whose first byte is at `begins`."""

    logical: Reading
    begins: LogicalOffset

    @property
    def size_bytes(self) -> int:
        """How large the volume is to its user."""
        return self.logical.size_bytes - self.begins

    def extents(self, starting_offset: UserOffset = USER_START) -> Iterator[UserExtent]:
        """As those of the logical volume, but for its header."""
        if not 0 <= starting_offset <= self.size_bytes:
            raise errors.NotBeyond(starting_offset, self.size_bytes)
        return (
            UserExtent(UserOffset(one.offset_bytes - self.begins), one.length_bytes)
            for one in self.logical.extents(LogicalOffset(self.begins + starting_offset))
        )


def merged(extents: Iterable[Extent], most_bytes: int | None = None) -> Iterator[Extent]:
    """The same bytes in as few ranges as can be; `extents` are sorted by where they begin.

    A range that comes to `most_bytes` is not waited for any longer: the next one begins there.
    """
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
    """What of sorted ranges lies between two places."""
    for one in extents:
        if one.offset_bytes >= end_bytes:
            return
        start, end = max(one.offset_bytes, start_bytes), min(one.end_bytes, end_bytes)
        if start < end:
            yield Extent(start, end - start)
