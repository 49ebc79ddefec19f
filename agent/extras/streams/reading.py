"""Read a stream and apply it to a device, and record how far it is on the disk."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from io import BufferedIOBase

from agent.core import errors
from agent.extras.changed_blocks.extents import Extent
from agent.extras.streams import form
from agent.extras.streams.form import Frame, Header, Totals
from mount.block_io import Opened


class Reader:
    """Reads a stream. Raises BadStream, StreamEnded."""

    def __init__(self, source: BufferedIOBase, begun: bytes = b"") -> None:
        """`begun` are the stream's first bytes, if they were read already."""
        self.totals = Totals()
        self.read_bytes = 0
        self._source = source
        prefix = begun + self._take(form.PREFIX_BYTES - len(begun))
        self.header, self._proof = form.header(prefix, self._take(form.header_bytes(prefix)))

    def frames(self) -> Iterator[Frame]:
        """The parts in their order; when this ends, the stream was whole.

        A frame's place is proved here, its data by `Frame.data`. The data are valid only while the
        frame is on its way through `form.ordered`.
        """
        at = self.header.offset_bytes
        rooms = form.rooms(form.MOST_BYTES)
        while True:
            kind, frame, stored, self._proof = form.parsed(
                self._proof, self._take(form.HEADING_BYTES)
            )
            if stored:
                # Only then, as a frame of zeroes may be left out on the way.
                room = next(rooms)
                frame = replace(frame, payload=self._fill(room[:stored]), room=room)
            if not at <= frame.offset_bytes <= frame.end_bytes <= self.header.size_bytes:
                raise errors.BadStream(f"after byte {at} comes byte {frame.offset_bytes}")
            if kind == form.END:
                is_end = frame.offset_bytes == self.header.size_bytes
                if frame.data() != self.totals.pack() or not is_end:
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


def streams(source: BufferedIOBase) -> Iterator[Reader]:
    """Streams one after another, such as a whole one and increments.

    Read all frames of one before the next.
    """
    while begun := source.read(1):
        yield Reader(source, begun)


# The interval of records: after a crash, at most so much is sent again.
RECORD_SECONDS = 20.0
# The part of a range of zeroes that one call writes, so that none takes long.
_ZERO_BYTES = 128 << 20


@dataclass(frozen=True)
class Target:
    """The device of `size_bytes` that a stream is applied to.

    A `blank` one reads as zeroes wherever it was never written.
    """

    device: Opened
    size_bytes: int
    blank: bool


def apply(
    reader: Reader,
    target: Target,
    *,
    record: Callable[[int], None],
    note: Callable[[Extent], None] = lambda _part: None,
    tell: Callable[[int], None] = lambda _offset_bytes: None,
) -> None:
    """Apply all of a stream; when this returns, it is on the disk.

    `record` is called now and then with the offset up to which it is on the disk, `tell` with the
    offset up to which it was written, `note` with each part that the stream names. Only proved data
    are written. Raises BadStream, OSError.
    """
    device, header = target.device, reader.header

    def write(frame: Frame) -> Frame:
        if frame.is_zeroes:
            device.zero_out(frame.offset_bytes, frame.length_bytes)
        else:
            device.write(frame.offset_bytes, frame.data())
        return frame

    def noted() -> Iterator[Frame]:
        for frame in reader.frames():
            note(Extent(frame.offset_bytes, frame.length_bytes))
            yield frame

    written_bytes = recorded_bytes = header.offset_bytes

    def write_down() -> None:
        nonlocal recorded_bytes
        if written_bytes > recorded_bytes:
            device.flush()
            recorded_bytes = written_bytes
            record(min(written_bytes, header.size_bytes))

    due = time.monotonic() + RECORD_SECONDS
    try:
        for frame in form.ordered(write, _parts(noted(), target, header)):
            written_bytes = frame.end_bytes
            tell(min(written_bytes, header.size_bytes))
            if time.monotonic() >= due:
                write_down()
                due = time.monotonic() + RECORD_SECONDS
    except errors.BadStream:
        # Everything before that is good, and need not be sent again.
        write_down()
        raise
    device.flush()


def _parts(frames: Iterable[Frame], target: Target, header: Header) -> Iterator[Frame]:
    """The frames, and zeroes for parts without a frame that may hold old data.

    In a whole volume that is anywhere; in an increment, only what the volume grew by since.
    """
    at = max(header.offset_bytes, header.base_size_bytes)
    for frame in frames:
        yield from _zeroes(at, frame.offset_bytes, target)
        if not frame.is_zeroes:
            yield frame
        elif not (target.blank and header.is_whole):
            yield from _zeroes(frame.offset_bytes, frame.end_bytes, target, needed=True)
        at = max(at, frame.end_bytes)
    # To the end of the device, which may be larger than what was sent.
    yield from _zeroes(at, target.size_bytes, target)


def _zeroes(start: int, end: int, target: Target, *, needed: bool = False) -> Iterator[Frame]:
    if target.blank and not needed:
        return
    for at in range(start, end, _ZERO_BYTES):
        yield Frame(at, min(_ZERO_BYTES, end - at))
