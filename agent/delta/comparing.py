"""Two devices compared block by block, or one with zeroes: what is told to differ does differ."""

from collections.abc import Callable, Iterable, Iterator

from agent.delta.extents import BLOCK_BYTES, Extent, merged
from mount.reading import PIECE_BYTES, Reader

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
