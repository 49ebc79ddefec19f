"""Ranges of bytes, in order: what is allocated in a snapshot, or changed since another."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from agent.engine.records import Snapshot, Volume

# What is compared at once, and so the unit of what changed: a page, and a sector of most disks.
BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Extent:
    """A range of bytes of a volume or a snapshot."""

    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte behind it."""
        return self.offset_bytes + self.length_bytes


class Reading(Protocol):
    """A snapshot, or a volume, that is held for as long as it is read."""

    @property
    def of(self) -> Snapshot | Volume:
        """What is read: of two, the target."""
        ...

    @property
    def size_bytes(self) -> int:
        """How large that is; its device may be larger, where its volume grew since."""
        ...

    @property
    def device(self) -> str:
        """The path of its block device, which is active, and open until the reading ends."""
        ...

    def extents(self, starting_offset: int = 0) -> Iterator[Extent]:
        """The ranges that end behind an offset: sorted, the first one cut to begin there.

        Merged, but for what is found by comparing: that is told before all of it was compared.

        Whole blocks of BLOCK_BYTES, but for the last one of a volume that is no multiple of it. May
        be asked again, for another offset too. Raises SourceLost, DeltaFailed, OSError.
        """
        ...


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
