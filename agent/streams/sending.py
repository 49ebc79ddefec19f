"""Sends what a device holds as a stream: the parts that are named, zeroes left out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from agent.delta.extents import Extent
from agent.streams import form, pipeline
from agent.streams.form import Header, Packed, Totals
from agent.streams.writing import Writer
from mount.blocks import Bytes, Opened

# What is read at once: large enough to cost little each, small enough to find zeroes by.
PIECE_BYTES = 1 << 20
# bytearray compares with any memory by memcmp(3), a memoryview byte by byte.
_ZEROES = bytearray(PIECE_BYTES)


@dataclass(frozen=True)
class _Piece:
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
    tell: Callable[[int], None] = lambda _offset_bytes: None,
) -> Totals:
    """Send parts of a device, in the order in which they lie; what the stream had.

    `tell` is told how far it is in the volume. What lies before the header's offset is left out.
    `prove` is asked when all was read, and raises where that was not what it should have been: then
    there is no end mark. Raises OSError.
    """

    def read(piece: tuple[Extent, memoryview]) -> _Piece:
        extent, place = piece
        data = place[: extent.length_bytes]
        device.read_into(extent.offset_bytes, data)
        return _Piece(extent, None if is_zeroes(data) else form.pack(data, compress=compress))

    writer = Writer(write, header)
    zeroes = Extent(0, 0)
    pieces = pipeline.lent(_pieces(extents, header), PIECE_BYTES)
    for piece in pipeline.ordered(read, pieces):
        extent = piece.extent
        if piece.packed is None and extent.offset_bytes == zeroes.end_bytes:
            zeroes = Extent(zeroes.offset_bytes, zeroes.length_bytes + extent.length_bytes)
        else:
            _put(writer, zeroes)
            zeroes = extent if piece.packed is None else Extent(0, 0)
        if piece.packed is not None:
            writer.data(extent.offset_bytes, extent.length_bytes, piece.packed)
        tell(extent.end_bytes)
    _put(writer, zeroes)
    prove()
    writer.end()
    return writer.totals


def is_zeroes(data: memoryview) -> bool:
    """Whether so much of a volume, at most PIECE_BYTES, holds nothing else."""
    zeroes = _ZEROES if len(data) == len(_ZEROES) else bytearray(len(data))
    return zeroes == data


def _put(writer: Writer, zeroes: Extent) -> None:
    if zeroes.length_bytes:
        writer.zeroes(zeroes.offset_bytes, zeroes.length_bytes)


def _pieces(extents: Iterable[Extent], header: Header) -> Iterator[Extent]:
    """The same in pieces that can be read at once, from the header's offset on."""
    for one in extents:
        at = max(one.offset_bytes, header.offset_bytes)
        end = min(one.end_bytes, header.size_bytes)
        while at < end:
            # At whole pieces of the volume, so that both sides' pieces are the same.
            length = min(PIECE_BYTES - at % PIECE_BYTES, end - at)
            yield Extent(at, length)
            at += length
