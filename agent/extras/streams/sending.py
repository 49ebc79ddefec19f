"""Write a stream from a device; compute checksums of devices, and of the parts of a stream."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from typing import NamedTuple

from agent.extras.changed_blocks.extents import Extent, clipped, merged
from agent.extras.streams import form
from agent.extras.streams.form import Header, Packed, Totals
from mount.block_io import Bytes, Opened


class Writer:
    """Writes one stream frame by frame.

    The function `write` gets the bytes of the stream, and has to write all bytes of each call.
    `totals` counts the frames that were written so far.
    """

    def __init__(self, write: Callable[[Bytes], object], header: Header) -> None:
        self.totals = Totals()
        self._write = write
        self._header = header
        text, self._proof = form.opening(header)
        self._write(text)

    def data(self, offset_bytes: int, length_bytes: int, packed: Packed) -> None:
        """Write a frame with data, which `form.pack` has encoded."""
        self._frame(form.DATA, offset_bytes, length_bytes, packed)
        self.totals.add(length_bytes, is_zeroes=False)

    def zeroes(self, offset_bytes: int, length_bytes: int) -> None:
        """Write a frame for a range of zeroes."""
        self._frame(form.ZEROES, offset_bytes, length_bytes)
        self.totals.add(length_bytes, is_zeroes=True)

    def end(self) -> None:
        """Write the stream's end mark; a reader refuses a stream without an end mark."""
        packed = form.pack(self.totals.pack(), compress=False)
        self._frame(form.END, self._header.size_bytes, 0, packed)

    def _frame(
        self, kind: bytes, offset_bytes: int, length_bytes: int, packed: Packed | None = None
    ) -> None:
        text, self._proof = form.heading(self._proof, kind, offset_bytes, length_bytes, packed)
        self._write(text)
        if packed is not None:
            self._write(packed.payload)


# Length of the pieces of a device that are tested for being all zeroes, in bytes.
PIECE_BYTES = 1 << 20
# Length of one read of a device, in bytes. The length is large, as in `mount.block_io`, so that a
# disk reads fast.
READ_BYTES = form.MOST_BYTES
# Maximum length of a frame of zeroes, in bytes. A reader knows by each frame how far the sender is,
# also in a part of a device that is all zeroes.
_MOST_ZEROES_BYTES = 64 << 20
# One piece of zeroes, with which data are compared. It is a bytearray, because a bytearray is
# compared with a memoryview by memcmp(3); two memoryviews are compared byte by byte.
_ZEROES = bytearray(PIECE_BYTES)
# Length of the digest of a piece in bytes, that of a SHA-256, and the digest of a piece of zeroes.
DIGEST_BYTES = 32
_OF_ZEROES = bytes(DIGEST_BYTES)
# Function that returns the digests of the next so many pieces of the volume that a stream is for,
# as one text of bytes (`digests_of`).
Digests = Callable[[int], bytes]


class _Piece(NamedTuple):
    """A range of a device that is read at once.

    If the range was never written, `is_written` is False: it is all zeroes and need not be read.
    `digests` has the digests of the same pieces of the volume that the stream is for. A piece that
    is equal there is left out of the stream. Without digests, each piece is sent.
    """

    extent: Extent
    is_written: bool = True
    digests: bytes = b""


class _Part(NamedTuple):
    """A range of a device, and the encoded data of the range; None if the range is all zeroes."""

    extent: Extent
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
    digests: Digests | None = None,
) -> Totals:
    """Write a stream of a device's sorted ranges; return the counts in the stream's end mark.

    The stream covers the device from the offset in the header to the size in the header.

    - With `digests`, the stream has only pieces of PIECE_BYTES that differ from those with these
      digests, also pieces of zeroes outside of the ranges.
    - `note` is called with each range of that part, `tell` with the offset up to which the device
      was read.
    - `prove` is called after all data were read, before the end mark is written. `prove` raises an
      error if the data may be wrong. The stream then has no end mark, and a reader refuses it.

    Raises OSError if the device cannot be read, and what `prove` and `write` raise.
    """

    def read(work: tuple[_Piece, memoryview]) -> tuple[int, list[_Part]]:
        piece, buffer = work
        extent = piece.extent
        data = buffer[: extent.length_bytes]
        if piece.is_written:
            device.read_into(extent.offset_bytes, data)
        else:
            data[:] = bytes(len(data))
        packed_parts = []
        for run, is_zero in _parts(extent, data, piece.digests):
            start = run.offset_bytes - extent.offset_bytes
            run_data = data[start : start + run.length_bytes]
            packed_parts.append(
                _Part(run, None if is_zero else form.pack(run_data, compress=compress))
            )
        return extent.end_bytes, packed_parts

    writer = Writer(write, header)
    zeroes = Extent(0, 0)
    if digests is None:
        pieces = _pieces(extents, header, note)
    else:
        pieces = _compared_pieces(extents, header, digests)
    for end_bytes, parts in form.ordered(read, form.with_memory(pieces, READ_BYTES)):
        for extent, packed in parts:
            is_next = extent.offset_bytes == zeroes.end_bytes
            if packed is None and is_next and zeroes.length_bytes < _MOST_ZEROES_BYTES:
                zeroes = Extent(zeroes.offset_bytes, zeroes.length_bytes + extent.length_bytes)
            else:
                _put(writer, zeroes)
                zeroes = extent if packed is None else Extent(0, 0)
            if packed is not None:
                writer.data(extent.offset_bytes, extent.length_bytes, packed)
        tell(end_bytes)
    _put(writer, zeroes)
    prove()
    writer.end()
    return writer.totals


def is_zeroes(data: memoryview) -> bool:
    """Return whether these data, which are at most PIECE_BYTES, are all zeroes."""
    zeroes = _ZEROES if len(data) == len(_ZEROES) else bytearray(len(data))
    return zeroes == data


def pieces_of(start: int, end: int, most_bytes: int) -> Iterator[Extent]:
    """Split a range of bytes at the multiples of `most_bytes`; yield the parts."""
    while start < end:
        length = min(most_bytes - start % most_bytes, end - start)
        yield Extent(start, length)
        start += length


def _parts(extent: Extent, data: memoryview, digests: bytes) -> Iterator[tuple[Extent, bool]]:
    """Split a range that was read into runs that are all zeroes, and runs that are not.

    Yields each run, and whether the run is all zeroes. `data` has the contents of the range.
    Without the pieces whose digests are in `digests`, unless that is empty.
    """
    offset = extent.offset_bytes
    pieces = list(pieces_of(offset, extent.end_bytes, PIECE_BYTES))

    def data_of(piece: Extent) -> memoryview:
        return data[piece.offset_bytes - offset : piece.end_bytes - offset]

    def is_zero(numbered: tuple[int, Extent]) -> bool | None:
        """Return whether a piece is all zeroes; None if it is equal where the stream goes."""
        number, piece = numbered
        if not digests:
            return is_zeroes(data_of(piece))
        digest = _digest_of(data_of(piece))
        if digest == digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            return None
        return digest == _OF_ZEROES

    for zero, numbered in groupby(enumerate(pieces), is_zero):
        if zero is None:
            continue
        run = [piece for _, piece in numbered]
        start = run[0].offset_bytes
        yield Extent(start, run[-1].end_bytes - start), zero


def _digest_of(piece: memoryview) -> bytes:
    """Return the digest of a piece of a device: its SHA-256, or _OF_ZEROES if it is all zeroes."""
    return _OF_ZEROES if is_zeroes(piece) else hashlib.sha256(piece).digest()


def digests_of(device: Opened, start_bytes: int, end_bytes: int) -> Iterator[bytes]:
    """Read a range of a device; yield the digests of its pieces of PIECE_BYTES, in their order.

    A digest has DIGEST_BYTES. The digests of a read of at most READ_BYTES are yielded as one text
    of bytes. The range is read in parallel. Raises OSError if the device cannot be read.
    """

    def digests(read: tuple[Extent, memoryview]) -> bytes:
        extent, buffer = read
        start = extent.offset_bytes
        device.read_into(start, buffer[: extent.length_bytes])
        return b"".join(
            _digest_of(buffer[piece.offset_bytes - start : piece.end_bytes - start])
            for piece in pieces_of(start, extent.end_bytes, PIECE_BYTES)
        )

    reads = pieces_of(start_bytes, end_bytes, READ_BYTES)
    return form.ordered(digests, form.with_memory(reads, READ_BYTES))


def _put(writer: Writer, zeroes: Extent) -> None:
    if zeroes.length_bytes:
        writer.zeroes(zeroes.offset_bytes, zeroes.length_bytes)


def _pieces(
    extents: Iterable[Extent], header: Header, note: Callable[[Extent], None]
) -> Iterator[_Piece]:
    """Split the part of the ranges that a stream covers into reads of at most READ_BYTES.

    The stream covers the device from the offset in its header to the size in its header. `note` is
    called with each range of that part.
    """
    for extent in clipped(extents, header.offset_bytes, header.size_bytes):
        note(extent)
        yield from map(_Piece, pieces_of(extent.offset_bytes, extent.end_bytes, READ_BYTES))


def _compared_pieces(
    extents: Iterable[Extent], header: Header, digests: Digests
) -> Iterator[_Piece]:
    """Split all that a stream covers into reads of at most READ_BYTES, each with its digests.

    A read that none of the ranges touches, and that is all zeroes on the other side, too, is left
    out.
    """
    ranges = merged(clipped(extents, header.offset_bytes, header.size_bytes))
    written = next(ranges, None)
    for extent in pieces_of(header.offset_bytes, header.size_bytes, READ_BYTES):
        count = sum(1 for _ in pieces_of(extent.offset_bytes, extent.end_bytes, PIECE_BYTES))
        theirs = digests(count)
        while written is not None and written.end_bytes <= extent.offset_bytes:
            written = next(ranges, None)
        is_written = written is not None and written.offset_bytes < extent.end_bytes
        if is_written or any(theirs):
            yield _Piece(extent, is_written, theirs)


def of(
    device: Opened, size_bytes: int, tell: Callable[[int], None] = lambda _offset_bytes: None
) -> str:
    """Compute a checksum of the first `size_bytes` of a device, from the size and contents alone.

    The checksum is the SHA-256 over the size, and the offset and SHA-256 of each piece of 1 MiB
    that is not all zeroes. So equal contents have equal checksums, whatever the layout of the
    volumes. These bytes of the device are all read, in parallel. `tell` is called with the offset
    up to which the device was read. Raises OSError if the device cannot be read.
    """
    total = hashlib.sha256(size_bytes.to_bytes(8, "big"))
    for read, digests in _digests(device, pieces_of(0, size_bytes, READ_BYTES)):
        total.update(digests)
        tell(read.end_bytes)
    return total.hexdigest()


def checksum_of_parts(
    device: Opened,
    header: Header,
    parts: Iterable[Extent],
    tell: Callable[[int], None] = lambda _offset_bytes: None,
) -> str:
    """Compute a checksum of the ranges that a stream names, and of all beyond the stream's base.

    Suppose that two volumes held the same data before the stream was applied, and that nothing else
    changed the volumes. Then both hold the same data afterwards if their checksums are equal.
    `parts` are the ranges that the stream names, `header` is its header. `tell` is called with the
    offset up to which the ranges were read. Raises OSError if the device cannot be read.
    """
    base_bytes, size_bytes = header.base_size_bytes, header.size_bytes
    grown_range = Extent(base_bytes, size_bytes - base_bytes)
    ranges = chain(clipped(merged(parts), 0, base_bytes), [grown_range])
    pieces = (pieces_of(extent.offset_bytes, extent.end_bytes, READ_BYTES) for extent in ranges)
    total = hashlib.sha256(f"{header.base_chain} {header.chain} {size_bytes}".encode())
    for read, digests in _digests(device, chain.from_iterable(pieces)):
        # Add the offset and length of a range even if the range is all zeroes, because the range is
        # a part of the stream.
        total.update(read.offset_bytes.to_bytes(8, "big") + read.length_bytes.to_bytes(8, "big"))
        total.update(digests)
        tell(read.end_bytes)
    tell(size_bytes)
    return total.hexdigest()


def _digests(device: Opened, reads: Iterable[Extent]) -> Iterator[tuple[Extent, bytes]]:
    """Read ranges of a device; yield each with the digests of its pieces that are not all zeroes.

    The offset of each such piece precedes its digest. The ranges are read in parallel.
    """

    def digests(read: tuple[Extent, memoryview]) -> tuple[Extent, bytes]:
        extent, buffer = read
        start, digests = extent.offset_bytes, b""
        device.read_into(start, buffer[: extent.length_bytes])
        for piece in pieces_of(start, extent.end_bytes, PIECE_BYTES):
            data = buffer[piece.offset_bytes - start : piece.end_bytes - start]
            if not is_zeroes(data):
                digests += piece.offset_bytes.to_bytes(8, "big") + hashlib.sha256(data).digest()
        return extent, digests

    return form.ordered(digests, form.with_memory(reads, READ_BYTES))
