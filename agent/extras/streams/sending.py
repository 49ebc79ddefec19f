"""Write a stream from a device; compute checksums of devices and streams."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from typing import NamedTuple

from agent.extras.changed_blocks.extents import Extent, clipped, merged
from agent.extras.streams import form
from agent.extras.streams.form import Header, Packed, Totals
from mount.block_io import Bytes, Opened


class Writer:
    """Writes a stream. `write` takes all bytes that it is given."""

    def __init__(self, write: Callable[[Bytes], object], header: Header) -> None:
        self.totals = Totals()
        self._write = write
        self._header = header
        text, self._proof = form.opening(header)
        self._write(text)

    def data(self, offset_bytes: int, length_bytes: int, packed: Packed) -> None:
        """Write a part with data, packed by `form.pack`."""
        self._frame(form.DATA, offset_bytes, length_bytes, packed)
        self.totals.add(length_bytes, is_zeroes=False)

    def zeroes(self, offset_bytes: int, length_bytes: int) -> None:
        """Write a part of zeroes."""
        self._frame(form.ZEROES, offset_bytes, length_bytes)
        self.totals.add(length_bytes, is_zeroes=True)

    def end(self) -> None:
        """Write the end mark, without which a reader refuses the stream."""
        packed = form.pack(self.totals.pack(), compress=False)
        self._frame(form.END, self._header.size_bytes, 0, packed)

    def _frame(
        self, kind: bytes, offset_bytes: int, length_bytes: int, packed: Packed | None = None
    ) -> None:
        text, self._proof = form.heading(self._proof, kind, offset_bytes, length_bytes, packed)
        self._write(text)
        if packed is not None:
            self._write(packed.payload)


# The granularity in which zeroes are found.
PIECE_BYTES = 1 << 20
# One read: large, for the same reason as in `mount.block_io`.
READ_BYTES = form.MOST_BYTES
# bytearray compares with any memory by memcmp(3), a memoryview byte by byte.
_ZEROES = bytearray(PIECE_BYTES)


class _Part(NamedTuple):
    extent: Extent
    # None for zeroes.
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
    """Send sorted parts of a device from the header's offset on; return the stream's totals.

    `note` is called with each part, `tell` with the offset so far. `prove` is called when all was
    read, and raises if the data may be wrong: then there is no end mark. Raises OSError.
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
    pieces = form.lent(_pieces(extents, header, note), READ_BYTES)
    for parts in form.ordered(read, pieces):
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
    """Whether data of at most PIECE_BYTES are all zeroes."""
    zeroes = _ZEROES if len(data) == len(_ZEROES) else bytearray(len(data))
    return zeroes == data


def pieces_of(start: int, end: int, most_bytes: int) -> Iterator[Extent]:
    """Split a range at multiples of `most_bytes`."""
    while start < end:
        length = min(most_bytes - start % most_bytes, end - start)
        yield Extent(start, length)
        start += length


def _parts(extent: Extent, data: memoryview) -> Iterator[tuple[Extent, bool]]:
    """Split what was read into runs that are zeroes and runs that are not."""
    begun = extent.offset_bytes

    def is_zero(one: Extent) -> bool:
        return is_zeroes(data[one.offset_bytes - begun : one.end_bytes - begun])

    for zero, those in groupby(pieces_of(begun, extent.end_bytes, PIECE_BYTES), is_zero):
        run = list(those)
        start = run[0].offset_bytes
        yield Extent(start, run[-1].end_bytes - start), zero


def _put(writer: Writer, zeroes: Extent) -> None:
    if zeroes.length_bytes:
        writer.zeroes(zeroes.offset_bytes, zeroes.length_bytes)


def _pieces(
    extents: Iterable[Extent], header: Header, note: Callable[[Extent], None]
) -> Iterator[Extent]:
    """Split ranges from the header's offset on into reads."""
    for one in clipped(extents, header.offset_bytes, header.size_bytes):
        note(one)
        yield from pieces_of(one.offset_bytes, one.end_bytes, READ_BYTES)


def of(
    device: Opened, size_bytes: int, tell: Callable[[int], None] = lambda _offset_bytes: None
) -> str:
    """SHA-256 over offset and SHA-256 of each piece of 1 MiB that is not all zeroes.

    So it is the same for the same contents on any layout. Reads the whole device, in parallel.
    Raises OSError.
    """
    whole = hashlib.sha256(size_bytes.to_bytes(8, "big"))
    for read, found in _digests(device, pieces_of(0, size_bytes, READ_BYTES)):
        whole.update(found)
        tell(read.end_bytes)
    return whole.hexdigest()


def of_parts(device: Opened, header: Header, parts: Iterable[Extent]) -> str:
    """The checksum of the parts that a stream names, and of all behind its base's end.

    Two volumes that held the same before the stream hold the same after it where these are equal,
    if nothing else was changed. Raises OSError.
    """
    base_bytes, size_bytes = header.base_size_bytes, header.size_bytes
    behind = Extent(base_bytes, size_bytes - base_bytes)
    every = chain(clipped(merged(parts), 0, base_bytes), [behind])
    pieces = (pieces_of(one.offset_bytes, one.end_bytes, READ_BYTES) for one in every)
    whole = hashlib.sha256(f"{header.base_chain} {header.chain} {size_bytes}".encode())
    for read, found in _digests(device, chain.from_iterable(pieces)):
        # For zeroes as well: the range is one of the parts.
        whole.update(read.offset_bytes.to_bytes(8, "big") + read.length_bytes.to_bytes(8, "big"))
        whole.update(found)
    return whole.hexdigest()


def _digests(device: Opened, reads: Iterable[Extent]) -> Iterator[tuple[Extent, bytes]]:
    """Each read, with offset and digest of each of its pieces that is not all zeroes."""

    def digests(given: tuple[Extent, memoryview]) -> tuple[Extent, bytes]:
        extent, place = given
        begun, found = extent.offset_bytes, b""
        device.read_into(begun, place[: extent.length_bytes])
        for one in pieces_of(begun, extent.end_bytes, PIECE_BYTES):
            data = place[one.offset_bytes - begun : one.end_bytes - begun]
            if not is_zeroes(data):
                found += one.offset_bytes.to_bytes(8, "big") + hashlib.sha256(data).digest()
        return extent, found

    return form.ordered(digests, form.lent(reads, READ_BYTES))
