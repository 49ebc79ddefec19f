"""Who may work on what at the same time."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile

from agent import admission, errors
from lvm import command

# A back-off of a caller that is refused begins at a second and doubles; most calls end sooner.
GRACE_SECONDS = 5.0
MOST_WAITING = admission.MOST_WAITING
_LOOK_SECONDS = 0.1


class VolumeLocks:
    """One call per volume.

    Another waits a moment for its turn, and is refused then, as the CSI spec advises
    ("Concurrency"). What waits is given its turn in the order in which it came. Where too many wait
    already, it is refused at once: they must not take all threads.
    """

    def __init__(self) -> None:
        self.grace_seconds = GRACE_SECONDS
        self._changed = threading.Condition()
        self._held: set[str] = set()
        # What each waiting call wants, in the order in which they came.
        self._waiting: dict[object, frozenset[str]] = {}

    @contextmanager
    def hold(self, *names: str) -> Iterator[None]:
        """Hold a volume, and the path it is put at: two volumes at one path would cover each other.

        Raises OperationPending while another call holds one of them.
        """
        with self._changed:
            if self._taken(names):
                self._await_turn(names)
            self._held.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._held.difference_update(names)
                self._changed.notify_all()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait a moment, holding nothing, for what the end of other calls brings; it may not come.

        `is_so` is asked again and again, so it must be cheap.
        """
        end = time.monotonic() + self._patience_seconds()
        if is_so():
            return
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                return
            turn = self._line_up([])
        try:
            while not is_so() and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
        finally:
            with self._changed:
                del self._waiting[turn]

    def _await_turn(self, names: Iterable[str]) -> None:
        """Wait until all are free, and nobody who came earlier wants one of them."""
        if len(self._waiting) < MOST_WAITING:
            turn = self._line_up(names)
            try:
                is_free = self._changed.wait_for(
                    lambda: not self._taken(names, turn), self._patience_seconds()
                )
            finally:
                del self._waiting[turn]
                # Those who came later waited for this one, too.
                self._changed.notify_all()
            if is_free:
                return
        raise errors.OperationPending(next(one for one in names if one in self._taken(names)))

    def _line_up(self, names: Iterable[str]) -> object:
        turn = object()
        self._waiting[turn] = frozenset(names)
        return turn

    def _taken(self, names: Iterable[str], turn: object = None) -> set[str]:
        """Which of these are held, or wanted by those who wait; by those before a turn, if any."""
        before = takewhile(lambda one: one is not turn, self._waiting)
        return self._held.union(*(self._waiting[one] for one in before)).intersection(names)

    def _patience_seconds(self) -> float:
        """How long to wait: what is left of the caller's time must do for the work."""
        remaining = command.remaining_seconds()
        return self.grace_seconds if remaining is None else min(self.grace_seconds, remaining / 2)
