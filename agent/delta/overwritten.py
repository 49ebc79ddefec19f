"""Which ranges of their origin copy-on-write snapshots have copies of, in order.

A table has them in the order in which they were overwritten. Of 16 TiB in chunks of 4 KiB a list
would take gigabytes, so the table is read once for each part of the origin that has any, and a part
is a bit for each chunk.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from agent.delta.extents import Extent, clipped, merged
from lvm.devices import Exceptions

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
