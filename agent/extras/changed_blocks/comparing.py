"""Find where two devices differ: by COW tables, and by comparing their blocks."""

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

# Chunks of the origin that one pass over the COW tables looks at; a multiple of 8. One bit for each
# is 32 MiB of memory, and at 4 KiB a chunk the pass covers 1 TiB of the origin.
_PART_CHUNKS = 1 << 28
# Pattern of a run of bytes with all bits set, or of one byte with some bits set.
_SOME = re.compile(rb"\xff+|[^\0]")
# A byte with all bits set.
_ALL = 0xFF


def ranges(
    tables: Sequence[Exceptions],
    start_bytes: int,
    end_bytes: int,
    check: Callable[[], None],
) -> Iterator[Extent]:
    """The sorted and merged ranges between two offsets that any of the COW tables contains.

    A table lists the chunks in the order in which they were overwritten, so they have to be sorted.
    The list of an origin of 16 TiB in chunks of 4 KiB would take gigabytes, so instead:

    1. Divide the origin into parts of `_PART_CHUNKS` chunks.
    2. Read all tables, and set one bit for each chunk of the first part that a table contains. Note
       the numbers of the later parts that have chunks in a table.
    3. Yield the runs of set bits, and repeat from 2 with the next part noted, until none is left.

    All tables have the same chunk size. `check` is called for each block of a table, and may raise
    to end the search.
    """
    overwritten = _chunks(tables, start_bytes, end_bytes, check)
    return clipped(merged(overwritten), start_bytes, end_bytes)


def _chunks(
    tables: Sequence[Exceptions],
    start_bytes: int,
    end_bytes: int,
    check: Callable[[], None],
) -> Iterator[Extent]:
    chunk_bytes = tables[0].chunk_bytes
    end_chunk = -(-end_bytes // chunk_bytes)
    # Numbers of the parts that are still to do; the first pass over the tables finds all of them.
    part, remaining = start_bytes // chunk_bytes // _PART_CHUNKS, set[int]()
    while part * _PART_CHUNKS < end_chunk:
        base = part * _PART_CHUNKS
        chunks = min(_PART_CHUNKS, end_chunk - base)
        for number, count in _runs(_marked(tables, base, chunks, remaining, check)):
            yield Extent((base + number) * chunk_bytes, count * chunk_bytes)
        remaining.discard(part)
        if not remaining:
            return
        part = min(remaining)


def _marked(
    tables: Sequence[Exceptions],
    base: int,
    chunks: int,
    later_parts: set[int],
    check: Callable[[], None],
) -> bytearray:
    """Set a bit for each chunk of one part that any table contains; return the bits.

    `base` is the part's first chunk, `chunks` its length. The numbers of later parts that have
    chunks in a table are added to `later_parts`.
    """
    bits = bytearray(-(-chunks // 8))
    for copied in chain.from_iterable(table.chunks() for table in tables):
        check()
        if not copied:
            continue
        first, last = min(copied) - base, max(copied) - base
        if 0 <= first <= last < chunks and last - first == len(copied) - 1:
            # A table contains a chunk only once, so these chunks are one contiguous run, as after
            # most writes. Set their bits together.
            _mark(bits, first, last + 1)
            continue
        for chunk in copied:
            bit = chunk - base
            if 0 <= bit < chunks:
                bits[bit >> 3] |= 1 << (bit & 7)
            elif bit >= _PART_CHUNKS:
                later_parts.add(chunk // _PART_CHUNKS)
    return bits


def _mark(bits: bytearray, start: int, end: int) -> None:
    """Set the bits with the numbers from `start` up to, but not including, `end`."""
    first, last = min(-(-start // 8), end // 8), end // 8
    bits[first:last] = bytes([_ALL]) * (last - first)
    edges = (*range(start, min(8 * first, end)), *range(max(8 * last, start), end))
    for bit in edges:
        bits[bit >> 3] |= 1 << (bit & 7)


def _runs(bits: bytearray) -> Iterator[tuple[int, int]]:
    """The runs of set bits, each as its first bit's number and its count of bits.

    Adjacent runs are not merged.
    """
    for run in _SOME.finditer(bits):
        first, byte = 8 * run.start(), bits[run.start()]
        if byte == _ALL:
            yield first, 8 * (run.end() - run.start())
        else:
            yield from ((first + number, 1) for number in range(8) if byte >> number & 1)


_ZEROES = bytes(PIECE_BYTES)
# Bytes that one I/O slot of a comparison reads, in total from both devices: twice MAX_RANGE_BYTES.
_TURN_BYTES = 32 << 20
# The longest range that a comparison yields, in bytes: the caller can read a range while the
# comparison of the rest has yet to be done.
MAX_RANGE_BYTES = 16 << 20


def differing(
    base: Reader | None,
    base_bytes: int,
    target: Reader,
    work: Work,
    extents: Iterable[Extent],
) -> Iterator[Extent]:
    """The blocks in which two devices differ, as ranges of at most MAX_RANGE_BYTES.

    Only the given ranges, which are sorted, are compared. The base counts as zeroes from
    `base_bytes` on, and as zeroes throughout if it is None.

    The devices are read in I/O slots of `work` (agent/work/pace.py). No slot is held while the
    caller has a range. Raises OSError, and what `work.check` raises, which is called before each
    piece of at most PIECE_BYTES.
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
        differences = list[Extent]()
        with work.piece(_TURN_BYTES) as io_slot:
            remaining_bytes, io_slot.length_bytes = (
                io_slot.length_bytes // (1 if base is None else 2),
                0,
            )
            while remaining_bytes > 0 and ahead.any():
                work.check()
                extent = ahead.take(min(remaining_bytes, PIECE_BYTES))
                offset, length = extent.offset_bytes, extent.length_bytes
                target_data = target.read(offset, length)
                base_data = _ZEROES if length == PIECE_BYTES else bytes(length)
                base_length = max(0, min(length, base_bytes - offset)) if base is not None else 0
                if base is not None and base_length:
                    base_data = base.read(offset, base_length) + bytes(length - base_length)
                if target_data != base_data:
                    unequal = _unequal(target_data, base_data)
                    differences += (Extent(offset + start, end - start) for start, end in unequal)
                remaining_bytes -= length
                io_slot.length_bytes += length + base_length
        yield from differences


def _unequal(target_data: bytes, base_data: bytes) -> Iterator[tuple[int, int]]:
    """The runs of blocks that differ, each as the run's start and end offset in the data."""
    run_start = -1
    for start in range(0, len(target_data), BLOCK_BYTES):
        end = start + BLOCK_BYTES
        if target_data[start:end] != base_data[start:end]:
            run_start = start if run_start < 0 else run_start
        elif run_start >= 0:
            yield run_start, start
            run_start = -1
    if run_start >= 0:
        yield run_start, len(target_data)


class _Ahead:
    """Sorted ranges from which the caller takes pieces, each range from its block's start on."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._next = iter(extents)
        self._start = self._end = 0

    def any(self) -> bool:
        """Say whether any range is left; `take` may be called only then."""
        while self._start >= self._end:
            if (extent := next(self._next, None)) is None:
                return False
            self._start, self._end = (
                extent.offset_bytes // BLOCK_BYTES * BLOCK_BYTES,
                extent.end_bytes,
            )
        return True

    def take(self, most_bytes: int) -> Extent:
        """Take the next piece: whole blocks of BLOCK_BYTES, but for the end of a range.

        The piece has at most `most_bytes`, or one block. The caller has checked `any`.
        """
        length = max(most_bytes // BLOCK_BYTES, 1) * BLOCK_BYTES
        piece = Extent(self._start, min(length, self._end - self._start))
        self._start = piece.end_bytes
        return piece


# A range in a spool file: offset and length, in bytes.
_RECORD = struct.Struct("=2Q")
# Bytes of a spool file that are read or written together.
_PIECE_BYTES = 4096 * _RECORD.size
# The most bytes of a spool that are kept in memory; a longer one goes to a file.
_IN_MEMORY_BYTES = 4 << 20
# Directory of spool files: on a disk, which /tmp often is not (file-hierarchy(7)).
_ON_DISK = Path("/var/tmp")  # noqa: S108 - the file has no name there


class Spool:
    """Sorted ranges in a temporary file, 16 bytes for each range."""

    def __init__(self, file: "SpooledTemporaryFile[bytes]") -> None:
        self._file = file

    def fill(self, extents: Iterable[Extent]) -> None:
        """Append ranges to the file."""
        piece = bytearray()
        for extent in extents:
            piece += _RECORD.pack(extent.offset_bytes, extent.length_bytes)
            if len(piece) >= _PIECE_BYTES:
                self._file.write(piece)
                piece.clear()
        self._file.write(piece)

    def add(self, extent: Extent) -> None:
        """Append one range to the file."""
        self.fill([extent])

    def __iter__(self) -> Iterator[Extent]:
        offset = 0
        while True:
            self._file.seek(offset)
            piece = self._file.read(_PIECE_BYTES)
            if not piece:
                return
            offset += len(piece)
            yield from (Extent(*record) for record in _RECORD.iter_unpack(piece))


@contextmanager
def opened(fallback_directory: Path) -> Iterator[Spool]:
    """Open a spool that is deleted on exit.

    The file is in /var/tmp. Where /var/tmp cannot be written, as in a pod, the file is in
    `fallback_directory`.
    """
    directory = _ON_DISK if os.access(_ON_DISK, os.W_OK) else fallback_directory
    with SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(directory)) as file:
        yield Spool(file)
