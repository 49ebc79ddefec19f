"""Read a stream, apply the stream to a device, and report how much of it is on the disk."""

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
    """Reads one stream frame by frame. Raises BadStream if the stream was altered.

    `totals` counts the frames that were read so far, and `read_bytes` counts the bytes that this
    object has read. Raises StreamEnded, which is a BadStream, if the stream ends before its end
    mark.
    """

    def __init__(self, source: BufferedIOBase, first_bytes: bytes = b"") -> None:
        """Read the stream's header.

        `first_bytes` has the stream's first bytes, if the caller has read them already.
        """
        self.totals = Totals()
        self.read_bytes = 0
        self._source = source
        prefix = first_bytes + self._take(form.PREFIX_BYTES - len(first_bytes))
        self.header, self._proof = form.header(prefix, self._take(form.header_bytes(prefix)))

    def frames(self) -> Iterator[Frame]:
        """Yield the frames of the stream in their order, and end after the end mark was verified.

        The heading of a frame is verified before the frame is yielded. The payload of a frame is
        verified by `Frame.data`. A payload is valid only until the frame has passed through
        `form.ordered`, because the payload's memory area is then used for another frame. Raises
        BadStream, StreamEnded.
        """
        expected_offset = self.header.offset_bytes
        rooms = form.rooms(form.MOST_BYTES)
        while True:
            kind, frame, payload_bytes, self._proof = form.parsed(
                self._proof, self._take(form.HEADING_BYTES)
            )
            if payload_bytes:
                # Take a memory area only for a frame with a payload. A frame of zeroes may never
                # reach `form.ordered`, whose progress frees the areas.
                room = next(rooms)
                frame = replace(frame, payload=self._fill(room[:payload_bytes]), room=room)
            if (
                not expected_offset
                <= frame.offset_bytes
                <= frame.end_bytes
                <= self.header.size_bytes
            ):
                raise errors.BadStream(
                    f"after byte {expected_offset} comes byte {frame.offset_bytes}"
                )
            if kind == form.END:
                is_end = frame.offset_bytes == self.header.size_bytes
                if frame.data() != self.totals.pack() or not is_end:
                    raise errors.BadStream("its end mark is of another stream")
                return
            expected_offset = frame.end_bytes
            self.totals.add(frame.length_bytes, is_zeroes=frame.is_zeroes)
            yield frame

    def _take(self, length: int) -> bytes:
        data = self._source.read(length) if length else b""
        self._count(len(data), length)
        return data

    def _fill(self, room: memoryview) -> memoryview:
        self._count(self._source.readinto(room), len(room))
        return room

    def _count(self, read_bytes: int, wanted_bytes: int) -> None:
        self.read_bytes += read_bytes
        if read_bytes < wanted_bytes:
            raise errors.StreamEnded(self.read_bytes)


def streams(source: BufferedIOBase) -> Iterator[Reader]:
    """Yield a reader for each stream in a source, such as a whole volume and then its increments.

    The caller has to read all frames of a stream before it asks for the next reader.
    """
    while first_byte := source.read(1):
        yield Reader(source, first_byte)


# Interval at which it is recorded how much of a stream is on the disk, in seconds. After a crash,
# the data that were received since the last record have to be sent again.
RECORD_SECONDS = 20.0
# Maximum number of zeroes written by one system call, in bytes, so that no call takes long.
_ZERO_BYTES = 128 << 20


@dataclass(frozen=True)
class Target:
    """The device that a stream is applied to; `size_bytes` is the size of the device.

    `blank` is true if the device reads as zeroes where it was never written, as a new thin volume
    does.
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
    is_compared: bool = False,
) -> None:
    """Apply a whole stream to a device; return when all data of the stream are on the disk.

    Only data whose digest was verified are written.

    - With `is_compared`, the stream leaves out what is on the device already, so nothing is
      written to ranges without a frame.
    - `record` is called every RECORD_SECONDS with the offset up to which the stream is on the disk,
      if that has changed, and before BadStream is raised. A stream that is cut off can continue at
      that offset.
    - `note` is called with the range of each frame.
    - `tell` is called with the offset up to which the stream was written, for a progress bar.

    Raises BadStream if the stream was altered, StreamEnded if the stream ends before its end mark,
    OSError if the device cannot be written, and what `record` raises.
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

    record_at = time.monotonic() + RECORD_SECONDS
    try:
        kept_bytes = header.size_bytes if is_compared else header.base_size_bytes
        for frame in form.ordered(write, _parts(noted(), target, header, kept_bytes)):
            written_bytes = frame.end_bytes
            tell(min(written_bytes, header.size_bytes))
            if time.monotonic() >= record_at:
                write_down()
                record_at = time.monotonic() + RECORD_SECONDS
    except errors.BadStream:
        # The frames before the bad one are good. Record the offset where they end, so that they
        # need not be sent again.
        write_down()
        raise
    device.flush()


def _parts(
    frames: Iterable[Frame], target: Target, header: Header, kept_bytes: int
) -> Iterator[Frame]:
    """Yield the frames to write, and frames of zeroes for ranges that may hold old data.

    In a stream of a whole volume, any range without a frame may hold old data. In an increment,
    only the range by which the volume grew since the base may hold old data. `kept_bytes` is the
    offset up to which a range without a frame is as it should be.

    If the device reads as zeroes where it was never written (`Target.blank`), no zeroes are written
    for ranges without a frame. In a stream of a whole volume, the frames of zeroes are then left
    out as well. Frames of zeroes are split into frames of at most `_ZERO_BYTES`.
    """
    offset = max(header.offset_bytes, kept_bytes)
    for frame in frames:
        yield from _zeroes(offset, frame.offset_bytes, target)
        if not frame.is_zeroes:
            yield frame
        elif not (target.blank and header.is_whole):
            yield from _zeroes(frame.offset_bytes, frame.end_bytes, target, needed=True)
        offset = max(offset, frame.end_bytes)
    # Zero the device up to its end, as the device may be larger than the volume that was sent.
    yield from _zeroes(offset, target.size_bytes, target)


def _zeroes(start: int, end: int, target: Target, *, needed: bool = False) -> Iterator[Frame]:
    if target.blank and not needed:
        return
    for offset in range(start, end, _ZERO_BYTES):
        yield Frame(offset, min(_ZERO_BYTES, end - offset))
