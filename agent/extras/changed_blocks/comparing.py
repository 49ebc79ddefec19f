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
from agent.work.pace import IoTask
from lvm.active_devices import Exceptions
from mount.block_io import PIECE_BYTES, Reader

# Number of chunks of the origin that one pass over the COW tables covers; a multiple of 8. One bit
# for each chunk takes 32 MiB of memory. With chunks of 4 KiB, a pass covers 1 TiB of the origin.
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
    """Yield the ranges of an origin that any of the COW tables contains, sorted and merged.

    A COW table contains the chunks of the origin in the order in which they were overwritten, so
    the chunks have to be sorted. The list of all chunks of an origin of 16 TiB, in chunks of 4 KiB,
    would take gigabytes of memory. Therefore the search is done in these steps:

    1. Divide the origin into sections of `_PART_CHUNKS` chunks. Begin with the section of
       `start_bytes`.
    2. Read all tables, and set one bit for each chunk of the section that a table contains. Collect
       the numbers of the later sections that have chunks in a table.
    3. Yield the runs of set bits.
    4. Repeat steps 2 and 3 for the next section that was collected, until no section is left.

    Only ranges between `start_bytes` and `end_bytes` are yielded. All tables must have the same
    chunk size. `check` is called for each block of a table, and may raise an error to end the
    search.
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
    # `part` is the number of the present section of the origin; `remaining` has the numbers of the
    # sections that are still to be searched. The first pass over the tables finds all of these.
    part, remaining = start_bytes // chunk_bytes // _PART_CHUNKS, set[int]()
    while part * _PART_CHUNKS < end_chunk:
        base = part * _PART_CHUNKS
        chunks = min(_PART_CHUNKS, end_chunk - base)
        for number, count in _runs(_mark_chunks(tables, base, chunks, remaining, check)):
            yield Extent((base + number) * chunk_bytes, count * chunk_bytes)
        remaining.discard(part)
        if not remaining:
            return
        part = min(remaining)


def _mark_chunks(
    tables: Sequence[Exceptions],
    first_chunk: int,
    chunks: int,
    later_parts: set[int],
    check: Callable[[], None],
) -> bytearray:
    """Set a bit for each chunk that any COW table contains, in one section of the origin.

    Returns the bits. `first_chunk` is the number of the section's first chunk, `chunks` is the
    number of chunks in the section. The numbers of the later sections that have chunks in a table
    are added to `later_parts`. `check` is called for each block of a table, and may raise an error.
    """
    bits = bytearray(-(-chunks // 8))
    for copied in chain.from_iterable(table.chunks() for table in tables):
        check()
        if not copied:
            continue
        first, last = min(copied) - first_chunk, max(copied) - first_chunk
        if 0 <= first <= last < chunks and last - first == len(copied) - 1:
            # A table contains each chunk only once, so these chunks are one contiguous run, as
            # after most writes. Set their bits together.
            _set_bits(bits, first, last + 1)
            continue
        for chunk in copied:
            bit = chunk - first_chunk
            if 0 <= bit < chunks:
                bits[bit >> 3] |= 1 << (bit & 7)
            elif bit >= _PART_CHUNKS:
                later_parts.add(chunk // _PART_CHUNKS)
    return bits


def _set_bits(bits: bytearray, start: int, end: int) -> None:
    """Set the bits of `bits` with the numbers from `start` up to, but not including, `end`."""
    first, last = min(-(-start // 8), end // 8), end // 8
    bits[first:last] = bytes([_ALL]) * (last - first)
    edges = (*range(start, min(8 * first, end)), *range(max(8 * last, start), end))
    for bit in edges:
        bits[bit >> 3] |= 1 << (bit & 7)


def _runs(bits: bytearray) -> Iterator[tuple[int, int]]:
    """Yield the runs of set bits, each as the number of its first bit and its count of bits.

    Adjacent runs are not merged.
    """
    for run in _SOME.finditer(bits):
        first, byte = 8 * run.start(), bits[run.start()]
        if byte == _ALL:
            yield first, 8 * (run.end() - run.start())
        else:
            yield from ((first + number, 1) for number in range(8) if byte >> number & 1)


_ZEROES = bytes(PIECE_BYTES)
# Maximum number of bytes that a comparison reads in one I/O slot, in total from both devices: twice
# MAX_RANGE_BYTES.
_TURN_BYTES = 32 << 20
# Maximum length of a range that a comparison yields, in bytes. So the caller can read the data of
# one range before the rest of the device is compared.
MAX_RANGE_BYTES = 16 << 20


def differing(
    base_reader: Reader | None,
    base_bytes: int,
    target: Reader,
    task: IoTask,
    extents: Iterable[Extent],
) -> Iterator[Extent]:
    """Compare two devices; yield the blocks that differ, as ranges of at most MAX_RANGE_BYTES.

    Only `extents` are compared: ranges that are sorted by offset. A range that begins within a
    block is compared from the start of that block on. From `base_bytes` on, the base counts as
    zeroes. If `base_reader` is None, all of it counts as zeroes.

    The devices are read in I/O slots of `task` (agent/work/pace.py). No slot is held while the
    caller uses a range. `task.check` is called before each read of at most PIECE_BYTES. Raises
    OSError if a device cannot be read, and what `task.check` raises.
    """
    return merged(_differing(base_reader, base_bytes, target, task, extents), MAX_RANGE_BYTES)


def _differing(
    base_reader: Reader | None,
    base_bytes: int,
    target: Reader,
    task: IoTask,
    extents: Iterable[Extent],
) -> Iterator[Extent]:
    ahead = _Ahead(extents)
    while ahead.any():
        differences = list[Extent]()
        with task.piece(_TURN_BYTES) as io_slot:
            remaining_bytes, io_slot.length_bytes = (
                io_slot.length_bytes // (1 if base_reader is None else 2),
                0,
            )
            while remaining_bytes > 0 and ahead.any():
                task.check()
                extent = ahead.take(min(remaining_bytes, PIECE_BYTES))
                offset, length = extent.offset_bytes, extent.length_bytes
                target_data = target.read(offset, length)
                base_data = _ZEROES if length == PIECE_BYTES else bytes(length)
                base_length = (
                    max(0, min(length, base_bytes - offset)) if base_reader is not None else 0
                )
                if base_reader is not None and base_length:
                    base_data = base_reader.read(offset, base_length) + bytes(length - base_length)
                if target_data != base_data:
                    unequal = _unequal(target_data, base_data)
                    differences += (Extent(offset + start, end - start) for start, end in unequal)
                remaining_bytes -= length
                io_slot.length_bytes += length + base_length
        yield from differences


def _unequal(target_data: bytes, base_data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the runs of blocks that differ between two pieces of data, by start and end offset.

    Both pieces of data have the same length.
    """
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
    """Sorted ranges of bytes, from which the caller takes one piece after the other.

    Each range is taken from the start of its first block on, even if the range begins within that
    block.
    """

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._next = iter(extents)
        self._start = self._end = 0

    def any(self) -> bool:
        """Return whether any part of the ranges is left; `take` may be called only then."""
        while self._start >= self._end:
            if (extent := next(self._next, None)) is None:
                return False
            self._start, self._end = (
                extent.offset_bytes // BLOCK_BYTES * BLOCK_BYTES,
                extent.end_bytes,
            )
        return True

    def take(self, most_bytes: int) -> Extent:
        """Take the next piece of the ranges: whole blocks of BLOCK_BYTES, or less at a range's end.

        The piece has at most `most_bytes`, but at least one block if the range has one. The caller
        has checked that `any` is true.
        """
        length = max(most_bytes // BLOCK_BYTES, 1) * BLOCK_BYTES
        piece = Extent(self._start, min(length, self._end - self._start))
        self._start = piece.end_bytes
        return piece


# Encoding of a range in a spool file: offset and length, in bytes.
_RECORD = struct.Struct("=2Q")
# Number of bytes of a spool file that are read or written at once.
_PIECE_BYTES = 4096 * _RECORD.size
# Maximum size of a spool that is kept in memory, in bytes. A larger spool is written to a file.
_IN_MEMORY_BYTES = 4 << 20
# Directory of spool files. The directory is on a disk, which /tmp often is not (file-hierarchy(7)).
_ON_DISK = Path("/var/tmp")  # noqa: S108 - the file has no name there


class Spool:
    """A temporary store of sorted ranges, with 16 bytes for each range.

    The ranges are in memory up to `_IN_MEMORY_BYTES`, and in a file beyond that.
    """

    def __init__(self, file: "SpooledTemporaryFile[bytes]") -> None:
        self._file = file

    def fill(self, extents: Iterable[Extent]) -> None:
        """Append ranges to the spool."""
        piece = bytearray()
        for extent in extents:
            piece += _RECORD.pack(extent.offset_bytes, extent.length_bytes)
            if len(piece) >= _PIECE_BYTES:
                self._file.write(piece)
                piece.clear()
        self._file.write(piece)

    def add(self, extent: Extent) -> None:
        """Append one range to the spool."""
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
    """Open an empty spool for the `with`; the spool's file, if any, is deleted at the end.

    A large spool has a file in /var/tmp. If this process may not write to /var/tmp, as in a pod,
    the file is in `fallback_directory`.
    """
    directory = _ON_DISK if os.access(_ON_DISK, os.W_OK) else fallback_directory
    with SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(directory)) as file:
        yield Spool(file)
