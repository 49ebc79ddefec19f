"""Sends what a device holds as a stream: the parts that are named, zeroes left out."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from agent.delta.extents import Extent, clipped
from agent.streams import form, pipeline
from agent.streams.form import Header, Packed, Totals
from agent.streams.writing import Writer
from mount.blocks import Bytes, Opened

# What zeroes are found by.
PIECE_BYTES = 1 << 20
# What is read at once: much, for the same reason as in `mount.reading`.
READ_BYTES = form.MOST_BYTES
# bytearray compares with any memory by memcmp(3), a memoryview byte by byte.
_ZEROES = bytearray(PIECE_BYTES)


class _Part(NamedTuple):
    extent: Extent
    # None where it holds zeroes only.
    packed: Packed | None


def send(
    write: Callable[[Bytes], object],
    header: Header,
    device: Opened,
    extents: Iterable[Extent],
    *,
    compress: bool = False,
    prove: Callable[[], None] = lambda: None,
    note: Callable[[Extent], None] = lambda _part: None,
    tell: Callable[[int], None] = lambda _offset_bytes: None,
) -> Totals:
    """Send parts of a device, in the order in which they lie; what the stream had.

    `note` is told of each part, `tell` how far it is in the volume. What lies before the header's
    offset is left out.
    `prove` is asked when all was read, and raises where that was not what it should have been: then
    there is no end mark. Raises OSError.
    """

    def read(piece: tuple[Extent, memoryview]) -> list[_Part]:
        extent, place = piece
        data = place[: extent.length_bytes]
        device.read_into(extent.offset_bytes, data)
        parts = []
        for one, is_zero in _parts(extent, data):
            begun = one.offset_bytes - extent.offset_bytes
            some = data[begun : begun + one.length_bytes]
            parts.append(_Part(one, None if is_zero else form.pack(some, compress=compress)))
        return parts

    writer = Writer(write, header)
    zeroes = Extent(0, 0)
    pieces = pipeline.lent(_pieces(extents, header, note), READ_BYTES)
    for parts in pipeline.ordered(read, pieces):
        for extent, packed in parts:
            if packed is None and extent.offset_bytes == zeroes.end_bytes:
                zeroes = Extent(zeroes.offset_bytes, zeroes.length_bytes + extent.length_bytes)
            else:
                _put(writer, zeroes)
                zeroes = extent if packed is None else Extent(0, 0)
            if packed is not None:
                writer.data(extent.offset_bytes, extent.length_bytes, packed)
            tell(extent.end_bytes)
    _put(writer, zeroes)
    prove()
    writer.end()
    return writer.totals


def is_zeroes(data: memoryview) -> bool:
    """Whether so much of a volume, at most PIECE_BYTES, holds nothing else."""
    zeroes = _ZEROES if len(data) == len(_ZEROES) else bytearray(len(data))
    return zeroes == data


def pieces(start: int, end: int, most_bytes: int) -> Iterator[Extent]:
    """A range in parts that end at multiples of so many bytes."""
    while start < end:
        length = min(most_bytes - start % most_bytes, end - start)
        yield Extent(start, length)
        start += length


def _parts(extent: Extent, data: memoryview) -> Iterator[tuple[Extent, bool]]:
    """What was read of an extent, by what holds zeroes only and what does not."""
    begun = extent.offset_bytes

    def is_zero(one: Extent) -> bool:
        return is_zeroes(data[one.offset_bytes - begun : one.end_bytes - begun])

    for zero, those in groupby(pieces(begun, extent.end_bytes, PIECE_BYTES), is_zero):
        run = list(those)
        start = run[0].offset_bytes
        yield Extent(start, run[-1].end_bytes - start), zero


def _put(writer: Writer, zeroes: Extent) -> None:
    if zeroes.length_bytes:
        writer.zeroes(zeroes.offset_bytes, zeroes.length_bytes)


def _pieces(
    extents: Iterable[Extent], header: Header, note: Callable[[Extent], None]
) -> Iterator[Extent]:
    """The same in what is read at once, from the header's offset on."""
    for one in clipped(extents, header.offset_bytes, header.size_bytes):
        note(one)
        yield from pieces(one.offset_bytes, one.end_bytes, READ_BYTES)
