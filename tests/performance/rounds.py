"""How often something is measured: as often as there is time for, and once at least."""

import time
from collections.abc import Callable, Iterator


class Time:
    """The time that a run has in all; its parts take shares of it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._ends = clock() + seconds

    def left_seconds(self) -> float:
        """What is left of it, 0 if it is over."""
        return max(0.0, self._ends - self._clock())

    def share(self, part: float) -> "Time":
        """A part of it, and no more than is left."""
        return Time(min(part * self._seconds, self.left_seconds()), self._clock)

    def rounds(self, most: int) -> Iterator[int]:
        """Numbers of rounds: the first always, another where one like the longest still fits."""
        longest = 0.0
        for number in range(most):
            if number and longest >= self.left_seconds():
                return
            started = self._clock()
            yield number
            longest = max(longest, self._clock() - started)
