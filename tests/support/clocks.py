"""A wall clock that steps, as NTP or an operator has it."""

import time


class Clock:
    """In the place of time.time_ns()."""

    def __init__(self) -> None:
        self._read = time.time_ns
        self._ahead = 0
        self._stands_at: int | None = None

    def step(self, seconds: float) -> None:
        """Step it, forward or back."""
        self._ahead += int(seconds * 10**9)

    def stand(self) -> None:
        """Have it not go on: all is of one moment."""
        self._stands_at = self._read()

    def __call__(self) -> int:
        return (self._stands_at or self._read()) + self._ahead
