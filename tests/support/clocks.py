"""A wall clock that steps, as NTP or an operator has it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """In the place of time.time_ns()."""

    def __init__(self) -> None:
        self._read = time.time_ns
        self._ahead = 0
        self._stands_at: int | None = None

    def step(self, seconds: float) -> None:
        self._ahead += int(seconds * 10**9)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Inside it does not go on: all is of one moment."""
        self._stands_at = self._read()
        yield
        self._stands_at = None

    def __call__(self) -> int:
        return (self._stands_at or self._read()) + self._ahead
