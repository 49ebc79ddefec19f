"""Find where two devices differ: by COW tables, and by comparing block by block."""

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import SpooledTemporaryFile

from agent.extras.changed_blocks.extents import BLOCK_BYTES, Extent, clipped, merged
from agent.work.pace import Work
from lvm.active_devices import Exceptions
from mount.block_io import PIECE_BYTES, Reader

# 32 MiB of bits: at 4 KiB a chunk, 1 TiB of the origin. A multiple of 8.
_PART_CHUNKS = 1 << 28
# A run of bytes with all bits set, or one byte with some.
_SOME = re.compile(rb"\xff+|[^\0]")
_ALL = 0xFF


def ranges(
    tables: Sequence[Exceptions],
    start_bytes: int,
    end_bytes: int,
    check: Callable[[], None],
) -> Iterator[Extent]:
    """The ranges between two offsets that any table has, sorted and merged.

    A table has the chunks in the order in which they were overwritten. A list of 16 TiB in chunks
    of 4 KiB would take gigabytes, so the tables are read once for each part of the origin that has
    chunks, and a part is a bit for each chunk.

    All tables have the same chunk size. `check` may raise to end it.
    """
    found = _chunks(tables, start_bytes, end_bytes, check)
    return clipped(merged(found), start_bytes, end_bytes)


def _chunks(
    tables: Sequence[Exceptions],
    start_bytes: int,
    end_bytes: int,
    check: Callable[[], None],
) -> Iterator[Extent]:
    size = tables[0].chunk_bytes
    last = -(-end_bytes // size)
    # Parts that are left to do; the first pass over the tables finds them all.
    part, left = start_bytes // size // _PART_CHUNKS, set[int]()
    while part * _PART_CHUNKS < last:
        base = part * _PART_CHUNKS
        chunks = min(_PART_CHUNKS, last - base)
        for number, count in _runs(_marked(tables, base, chunks, left, check)):
            yield Extent((base + number) * size, count * size)
        left.discard(part)
        if not left:
            return
        part = min(left)


def _marked(
    tables: Sequence[Exceptions],
    base: int,
    chunks: int,
    left: set[int],
    check: Callable[[], None],
) -> bytearray:
    """A bit for each chunk of a part; later parts that have chunks are added to `left`."""
    bits = bytearray(-(-chunks // 8))
    for copied in chain.from_iterable(one.chunks() for one in tables):
        check()
        if not copied:
            continue
        first, last = min(copied) - base, max(copied) - base
        if 0 <= first <= last < chunks and last - first == len(copied) - 1:
            # A chunk is in a table once, so this is a contiguous run, as most writes are.
            _mark(bits, first, last + 1)
            continue
        for chunk in copied:
            at = chunk - base
            if 0 <= at < chunks:
                bits[at >> 3] |= 1 << (at & 7)
            elif at >= _PART_CHUNKS:
                left.add(chunk // _PART_CHUNKS)
    return bits


def _mark(bits: bytearray, start: int, end: int) -> None:
    """Set the bits from `start` to before `end`."""
    first, last = min(-(-start // 8), end // 8), end // 8
    bits[first:last] = bytes([_ALL]) * (last - first)
    edges = (*range(start, min(8 * first, end)), *range(max(8 * last, start), end))
    for at in edges:
        bits[at >> 3] |= 1 << (at & 7)


def _runs(bits: bytearray) -> Iterator[tuple[int, int]]:
    """Runs of set bits: the first bit and the count; adjacent runs are not merged."""
    for some in _SOME.finditer(bits):
        at, byte = 8 * some.start(), bits[some.start()]
        if byte == _ALL:
            yield at, 8 * (some.end() - some.start())
        else:
            yield from ((at + bit, 1) for bit in range(8) if byte >> bit & 1)


_ZEROES = bytes(PIECE_BYTES)
# Of both devices: half of it is MAX_RANGE_BYTES.
_TURN_BYTES = 32 << 20
# The longest range of a comparison: the caller can fetch it without waiting for the rest.
MAX_RANGE_BYTES = 16 << 20


def differing(
    base: Reader | None,
    base_bytes: int,
    target: Reader,
    work: Work,
    extents: Iterable[Extent],
) -> Iterator[Extent]:
    """The blocks of sorted ranges that differ, as ranges of at most MAX_RANGE_BYTES.

    The base reads as zeroes from `base_bytes` on, and where it is None. Read in turns of `work`,
    none of which lasts while the caller has a range. Raises OSError, and what `work.check` raises
    before each piece of at most PIECE_BYTES.
    """
    return merged(_differing(base, base_bytes, target, work, extents), MAX_RANGE_BYTES)


def _differing(
    base: Reader | None,
    base_bytes: int,
    target: Reader,
    work: Work,
    extents: Iterable[Extent],
) -> Iterator[Extent]:
    ahead = _Ahead(extents)
    while ahead.any():
        found = list[Extent]()
        with work.piece(_TURN_BYTES) as turn:
            left_bytes, turn.length_bytes = turn.length_bytes // (1 if base is None else 2), 0
            while left_bytes > 0 and ahead.any():
                work.check()
                one = ahead.take(min(left_bytes, PIECE_BYTES))
                at, length = one.offset_bytes, one.length_bytes
                here = target.read(at, length)
                there = _ZEROES if length == PIECE_BYTES else bytes(length)
                known = max(0, min(length, base_bytes - at)) if base is not None else 0
                if base is not None and known:
                    there = base.read(at, known) + bytes(length - known)
                if here != there:
                    unequal = _unequal(here, there)
                    found += (Extent(at + start, end - start) for start, end in unequal)
                left_bytes -= length
                turn.length_bytes += length + known
        yield from found


def _unequal(here: bytes, there: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each run of blocks that differ."""
    begun = -1
    for start in range(0, len(here), BLOCK_BYTES):
        end = start + BLOCK_BYTES
        if here[start:end] != there[start:end]:
            begun = start if begun < 0 else begun
        elif begun >= 0:
            yield begun, start
            begun = -1
    if begun >= 0:
        yield begun, len(here)


class _Ahead:
    """Sorted ranges, taken piece by piece, from block boundaries on."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._next = iter(extents)
        self._start = self._end = 0

    def any(self) -> bool:
        """Whether there is more."""
        while self._start >= self._end:
            if (one := next(self._next, None)) is None:
                return False
            self._start, self._end = one.offset_bytes // BLOCK_BYTES * BLOCK_BYTES, one.end_bytes
        return True

    def take(self, most_bytes: int) -> Extent:
        """The next piece, in whole blocks but for the end; there is more."""
        length = max(most_bytes // BLOCK_BYTES, 1) * BLOCK_BYTES
        piece = Extent(self._start, min(length, self._end - self._start))
        self._start = piece.end_bytes
        return piece


_RECORD = struct.Struct("=2Q")
_PIECE_BYTES = 4096 * _RECORD.size
_IN_MEMORY_BYTES = 4 << 20
# On a disk; /tmp often is not (file-hierarchy(7)).
_ON_DISK = Path("/var/tmp")  # noqa: S108 - the file has no name there


class Spool:
    """Sorted ranges in a file, 16 bytes each."""

    def __init__(self, file: "SpooledTemporaryFile[bytes]") -> None:
        self._file = file

    def fill(self, extents: Iterable[Extent]) -> None:
        """Append ranges."""
        piece = bytearray()
        for one in extents:
            piece += _RECORD.pack(one.offset_bytes, one.length_bytes)
            if len(piece) >= _PIECE_BYTES:
                self._file.write(piece)
                piece.clear()
        self._file.write(piece)

    def add(self, extent: Extent) -> None:
        """Append one range."""
        self.fill([extent])

    def __iter__(self) -> Iterator[Extent]:
        at = 0
        while True:
            self._file.seek(at)
            piece = self._file.read(_PIECE_BYTES)
            if not piece:
                return
            at += len(piece)
            yield from (Extent(*one) for one in _RECORD.iter_unpack(piece))


@contextmanager
def opened(otherwise: Path) -> Iterator[Spool]:
    """A spool that is deleted on exit; in `otherwise` where /var/tmp is read-only, as in a pod."""
    directory = _ON_DISK if os.access(_ON_DISK, os.W_OK) else otherwise
    with SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(directory)) as file:
        yield Spool(file)
