"""Places that the calls of all volume groups have together, of which each leaves the others some.

A call on a disk that hangs keeps its place for as long as the disk likes. So of the places that are
taken a group has so many times what is left at most: the more is taken, the less another gets.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from agent import errors

# A group alone gets three quarters; of three that hang each some three tenths, and a tenth is left.
TIMES_LEFT = 3


class Shares:
    """So many places; `most` of them for a group, be they all free."""

    def __init__(self, places: int, most: int | None = None) -> None:
        self._left = places
        self._most = places if most is None else most
        self._taken: Counter[str] = Counter()
        self._guard = threading.Lock()

    @contextmanager
    def one(self, group: str) -> Iterator[None]:
        """Inside, a place is taken for a group; raises TooManyCalls where it gets none."""
        with self._guard:
            taken = self._taken[group]
            if taken >= min(self._most, TIMES_LEFT * self._left):
                raise errors.TooManyCalls(taken, group)
            self._taken[group] += 1
            self._left -= 1
        try:
            yield
        finally:
            with self._guard:
                self._left += 1
                self._taken[group] -= 1
                # Ids name groups as their callers like.
                self._taken = +self._taken
