"""Progress of a background job: the bytes done, the rate, and the estimated time left."""

import math
import time
from collections import deque
from collections.abc import Callable

# Minimum time over which the rate of a job is measured, in seconds, once the job has run so long.
_RATE_SECONDS = 10.0


class Progress:
    """Progress of a background job, shown as `3.2 of 8 GiB, about 40 s at the present rate`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.done_bytes, self.total_bytes = 0, 0
        self._clock = clock
        # Measurements of the job: a time by the clock, and the bytes that were done by that time.
        self._marks: deque[tuple[float, int]] = deque()

    def begin(self, total_bytes: int, done_bytes: int = 0) -> None:
        """Set the job's total number of bytes, and the number of bytes that are done already.

        Earlier measurements of the rate are dropped.
        """
        self.done_bytes, self.total_bytes = done_bytes, total_bytes
        self._marks.clear()
        self._marks.append((self._clock(), done_bytes))

    def add(self, done_bytes: int) -> None:
        """Add `done_bytes` to the bytes that are done, and measure the rate."""
        self.done_bytes += done_bytes
        self._marks.append((self._clock(), self.done_bytes))
        while len(self._marks) > 2 and self._marks[-1][0] - self._marks[1][0] >= _RATE_SECONDS:
            self._marks.popleft()

    @property
    def left_seconds(self) -> float | None:
        """Estimated time until the job is done, in seconds; None if no rate was measured yet."""
        marks = list(self._marks)
        if not marks or (bytes_since_mark := self.done_bytes - marks[0][1]) <= 0:
            return None
        return (
            (self.total_bytes - self.done_bytes) * (self._clock() - marks[0][0]) / bytes_since_mark
        )

    def __str__(self) -> str:
        if not self.total_bytes:
            return "it has not begun"
        unit, name = next((entry for entry in _UNITS if self.total_bytes >= entry[0]), (1, "bytes"))
        done_amount, total_amount = (
            round(amount / unit, 1) for amount in (self.done_bytes, self.total_bytes)
        )
        text = f"{done_amount:.12g} of {total_amount:.12g} {name}"
        left_seconds = self.left_seconds
        return (
            text
            if left_seconds is None
            else f"{text}, about {_duration(left_seconds)} at the present rate"
        )


_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


def _duration(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{math.ceil(seconds)} s"
