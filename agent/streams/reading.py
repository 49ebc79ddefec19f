"""Reads a stream, and refuses what is not one: another version, altered, cut off, out of order."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from agent import errors
from agent.streams import form, pipeline
from agent.streams.form import Frame, Totals


class Source(Protocol):
    """Where a stream comes from: any file that is read as binary, and waits for what comes."""

    def read(self, length: int, /) -> bytes:
        """So many bytes, or as many as there are before the end."""
        ...

    def readinto(self, place: memoryview, /) -> int:
        """The same, into memory that is there; how many."""
        ...


class Reader:
    """A stream on its way in. Raises BadStream, StreamEnded."""

    def __init__(self, source: Source, begun: bytes = b"") -> None:
        """`begun` are the stream's first bytes, where they were read already."""
        self.totals = Totals()
        # How much of it was read.
        self.read_bytes = 0
        self._source = source
        prefix = begun + self._take(form.PREFIX_BYTES - len(begun))
        self.header, self._proof = form.header(prefix, self._take(form.header_bytes(prefix)))

    @property
    def size_bytes(self) -> int:
        """How large the volume is that it is of."""
        return self.header.size_bytes

    def frames(self) -> Iterator[Frame]:
        """The parts in their order; when this ends, the stream was whole.

        A frame's place is proved here, its data where they are asked for; and those are there for
        no longer than it is on its way through `pipeline.ordered`.
        """
        at = self.header.offset_bytes
        rooms = pipeline.rooms(form.MOST_BYTES)
        while True:
            kind, frame, stored, self._proof = form.parsed(
                self._proof, self._take(form.HEADING_BYTES)
            )
            if stored:
                # No other: a frame of zeroes may be left out on the way.
                room = next(rooms)
                frame = replace(frame, payload=self._fill(room[:stored]), room=room)
            if not at <= frame.offset_bytes <= frame.end_bytes <= self.size_bytes:
                raise errors.BadStream(f"it goes from byte {at} to {frame.offset_bytes}")
            if kind == form.END:
                if frame.data() != self.totals.pack() or frame.offset_bytes != self.size_bytes:
                    raise errors.BadStream("its end mark is of another stream")
                return
            at = frame.end_bytes
            self.totals.add(frame.length_bytes, is_zeroes=frame.is_zeroes)
            yield frame

    def _take(self, length: int) -> bytes:
        taken = self._source.read(length) if length else b""
        self._count(len(taken), length)
        return taken

    def _fill(self, place: memoryview) -> memoryview:
        self._count(self._source.readinto(place), len(place))
        return place

    def _count(self, taken: int, wanted: int) -> None:
        self.read_bytes += taken
        if taken < wanted:
            raise errors.StreamEnded(self.read_bytes)


def streams(source: Source) -> Iterator[Reader]:
    """Each of the streams that stand one after another, such as a full one and what follows it.

    The next is begun when the frames of the one before were read.
    """
    while begun := source.read(1):
        yield Reader(source, begun)
