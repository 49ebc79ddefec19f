"""Looks at what may hang, such as device-mapper over a disk that is dead: nobody waits long."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from lvm import threads

T = TypeVar("T")

# What was seen is kept of so many things.
_MOST_KEPT = 4096
# So many threads may hang over one pool, or over one group: where these do, so would the next.
_MOST_AT_ONCE = 4
# Who comes later waits until a look is so old, and not at all for one that hangs.
_PATIENCE_SECONDS = 2.0
# Each new look has so long, though those before it took all the time: most take a moment.
_LEAST_SECONDS = 0.1


@dataclass(frozen=True)
class Seen(Generic[T]):
    """What a look saw; while one is under way what the one before saw, None if there was none.

    `hanging_seconds` is how long the one that is under way takes already, 0 if it ended in time.
    """

    value: T | None
    hanging_seconds: float = 0.0


@dataclass(frozen=True)
class _Look(Generic[T]):
    what: str
    place: str
    began_seconds: float
    seen: "Future[T]"


class Looks(Generic[T]):
    """Each look has a thread, as one that hangs cannot be ended; of each thing one at a time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: dict[str, _Look[T]] = {}
        self._last: OrderedDict[str, T] = OrderedDict()

    def at(
        self, what: str, look: Callable[[], T], until_seconds: float, place: str = ""
    ) -> Seen[T]:
        """Have a look, and wait for it until then (monotonic, seconds). Raises what it raises.

        Of what is in one `place` a few are looked at at once. While all of these hang, the others
        there are told as if they hung, too, and are not looked at.
        """
        while True:
            awaited, is_new = self._awaited(what, look, place)
            began = max(one.began_seconds for one in awaited)
            if is_new:
                end = max(until_seconds, began + _LEAST_SECONDS)
            else:
                end = min(until_seconds, began + _PATIENCE_SECONDS)
            left = max(0.0, end - time.monotonic())
            if not wait([one.seen for one in awaited], left, FIRST_COMPLETED).done:
                with self._guard:
                    return Seen(self._last.get(what), time.monotonic() - began)
            if awaited[0].what == what:
                return Seen(awaited[0].seen.result())

    def _awaited(
        self, what: str, look: Callable[[], T], place: str
    ) -> tuple[Sequence[_Look[T]], bool]:
        """The look at it, and whether that begins now; or those that it has to wait for."""
        with self._guard:
            if (running := self._running.get(what)) is not None:
                return [running], False
            others = [one for one in self._running.values() if one.place == place]
            if len(others) >= _MOST_AT_ONCE:
                return others, False
            return [self._begin(what, look, place)], True

    def _begin(self, what: str, look: Callable[[], T], place: str) -> _Look[T]:
        """Begin a look; the caller holds the guard."""
        began_seconds = time.monotonic()
        seen = threads.begin("look at", lambda: self._do(what, look))
        made = self._running[what] = _Look(what, place, began_seconds, seen)
        return made

    def _do(self, what: str, look: Callable[[], T]) -> T:
        try:
            value = look()
        except BaseException:
            with self._guard:
                del self._running[what]
            raise
        with self._guard:
            del self._running[what]
            self._last[what] = value
            self._last.move_to_end(what)
            while len(self._last) > _MOST_KEPT:
                self._last.popitem(last=False)
        return value
