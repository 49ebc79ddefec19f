"""Reads a stream, and refuses what is not one: another version, altered, cut off, out of order."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from agent import errors
from agent.streams import form
from agent.streams.form import Frame, Totals

# Gives so many bytes, or as many as there are before the end.
Read = Callable[[int], bytes]


class Reader:
    """A stream on its way in. Raises BadStream, StreamEnded."""

    def __init__(self, read: Read, begun: bytes = b"") -> None:
        """`begun` are the stream's first bytes, where they were read already."""
        self.totals = Totals()
        # How much of it was read.
        self.read_bytes = 0
        self._read = read
        prefix = begun + self._take(form.PREFIX_BYTES - len(begun))
        self.header, self._proof = form.header(prefix, self._take(form.header_bytes(prefix)))

    @property
    def size_bytes(self) -> int:
        """How large the volume is that it is of."""
        return self.header.size_bytes

    def frames(self) -> Iterator[Frame]:
        """The parts in their order; when this ends, the stream was whole.

        A frame's place is proved here, its data where they are asked for.
        """
        at = self.header.offset_bytes
        while True:
            kind, frame, stored, self._proof = form.parsed(
                self._proof, self._take(form.HEADING_BYTES)
            )
            frame = replace(frame, payload=self._take(stored))
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
        taken = self._read(length) if length else b""
        self.read_bytes += len(taken)
        if len(taken) < length:
            raise errors.StreamEnded(self.read_bytes)
        return taken


def streams(read: Read) -> Iterator[Reader]:
    """Each of the streams that stand one after another, such as a full one and what follows it.

    The next is begun when the frames of the one before were read.
    """
    while begun := read(1):
        yield Reader(read, begun)
