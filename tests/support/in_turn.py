"""The pieces of background I/O, each done in its turn."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager


def each(
    pieces: Iterable[AbstractContextManager[tuple[int, int]]],
) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of pieces; each has ended when the caller comes for the next one."""
    for piece in pieces:
        with piece as where:
            yield where
