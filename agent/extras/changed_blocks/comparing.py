"""Where two devices differ: what a COW store has copies of, and blocks compared one by one."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from agent.core.extents import BLOCK_BYTES, Extent, clipped, merged
from lvm.devices import Exceptions
from mount.blocks import PIECE_BYTES, Reader

# 32 MiB of bits: at 4 KiB a chunk, 1 TiB of the origin.
_PART_CHUNKS = 1 << 28
# Bytes of which each bit is set, as many as there are; or one with some.
_SOME = re.compile(rb"\xff+|[^\0]")
_ALL = 0xFF


def ranges(
    tables: Sequence[Exceptions],
    start_bytes: int,
    end_bytes: int,
    check: Callable[[], None],
    part_chunks: int = _PART_CHUNKS,
) -> Iterator[Extent]:
    """The ranges between two places that any table has, sorted and merged.

    All tables have chunks of one size. `check` may end it, by an error. A part of the origin is
    `part_chunks` at most, a multiple of 8.
    """
    found = _chunks(tables, start_bytes, end_bytes, check, part_chunks)
    return clipped(merged(found), start_bytes, end_bytes)


def _chunks(
    tables: Sequence[Exceptions],
    start_bytes: int,
    end_bytes: int,
    check: Callable[[], None],
    part_chunks: int,
) -> Iterator[Extent]:
    size = tables[0].chunk_bytes
    last = -(-end_bytes // size)
    # The parts that are left, as far as is known: the first reading of the table tells them all.
    part, left = start_bytes // size // part_chunks, set[int]()
    while part * part_chunks < last:
        base = part * part_chunks
        chunks = min(part_chunks, last - base)
        for number, count in _runs(_marked(tables, base, chunks, part_chunks, left, check)):
            yield Extent((base + number) * size, count * size)
        left.discard(part)
        if not left:
            return
        part = min(left)


def _marked(
    tables: Sequence[Exceptions],
    base: int,
    chunks: int,
    part_chunks: int,
    left: set[int],
    check: Callable[[], None],
) -> bytearray:
    """A bit for each chunk of a part; the parts behind it that have some are put on the list."""
    bits = bytearray(-(-chunks // 8))
    for told in chain.from_iterable(one.chunks() for one in tables):
        check()
        if not told:
            continue
        first, last = min(told) - base, max(told) - base
        if 0 <= first <= last < chunks and last - first == len(told) - 1:
            # Each once in a table, so these are all between: written one after another, as most is.
            _mark(bits, first, last + 1)
            continue
        for chunk in told:
            at = chunk - base
            if 0 <= at < chunks:
                bits[at >> 3] |= 1 << (at & 7)
            elif at >= part_chunks:
                left.add(chunk // part_chunks)
    return bits


def _mark(bits: bytearray, start: int, end: int) -> None:
    """Set the bits from one to before another."""
    first, last = min(-(-start // 8), end // 8), end // 8
    bits[first:last] = bytes([_ALL]) * (last - first)
    edges = (*range(start, min(8 * first, end)), *range(max(8 * last, start), end))
    for at in edges:
        bits[at >> 3] |= 1 << (at & 7)


def _runs(bits: bytearray) -> Iterator[tuple[int, int]]:
    """The bits that are set: numbers, and how many follow each other, as far as is easily seen."""
    for some in _SOME.finditer(bits):
        at, byte = 8 * some.start(), bits[some.start()]
        if byte == _ALL:
            yield at, 8 * (some.end() - some.start())
        else:
            yield from ((at + bit, 1) for bit in range(8) if byte >> bit & 1)


_ZEROES = bytes(PIECE_BYTES)
# What differs is told when it comes to this: whoever fetches it need not wait for the rest.
TOLD_BYTES = 16 << 20


def differing(
    base: Reader | None,
    base_bytes: int,
    target: Reader,
    extents: Iterable[Extent],
    check: Callable[[], None],
) -> Iterator[Extent]:
    """What of sorted ranges differs, in whole blocks; no range has more than TOLD_BYTES.

    A base reads as zeroes behind so many bytes, and where there is none. `check` is called before
    each piece of at most PIECE_BYTES is read, and may end it by an error. Raises OSError.
    """
    return merged(_differing(base, base_bytes, target, extents, check), TOLD_BYTES)


def _differing(
    base: Reader | None,
    base_bytes: int,
    target: Reader,
    extents: Iterable[Extent],
    check: Callable[[], None],
) -> Iterator[Extent]:
    for piece in _pieces(extents):
        check()
        at, length = piece.offset_bytes, piece.length_bytes
        here = target.read(at, length)
        there = _ZEROES if length == PIECE_BYTES else bytes(length)
        known = max(0, min(length, base_bytes - at))
        if base is not None and known:
            there = base.read(at, known) + bytes(length - known)
        if here != there:
            yield from (Extent(at + start, end - start) for start, end in _unequal(here, there))


def _unequal(here: bytes, there: bytes) -> Iterator[tuple[int, int]]:
    """Where blocks that differ begin, and where the last of those that follow each other ends."""
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


def _pieces(extents: Iterable[Extent]) -> Iterator[Extent]:
    """The same in pieces that begin at whole blocks and are read at once."""
    for one in extents:
        start = one.offset_bytes // BLOCK_BYTES * BLOCK_BYTES
        for at in range(start, one.end_bytes, PIECE_BYTES):
            yield Extent(at, min(PIECE_BYTES, one.end_bytes - at))
