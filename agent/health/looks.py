"""Looks at what may hang, such as device-mapper over a disk that is dead: nobody waits long."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# What was seen is kept of so many things.
_MOST_KEPT = 4096


@dataclass(frozen=True)
class Seen(Generic[T]):
    """What a look saw; while one is under way what the one before saw, None if there was none.

    `hanging_seconds` is how long the one that is under way takes already, 0 if it ended in time.
    """

    value: T | None
    hanging_seconds: float = 0.0


@dataclass(frozen=True)
class _Look(Generic[T]):
    began_seconds: float
    seen: "Future[T]"


class Looks(Generic[T]):
    """Each look has a thread, as one that hangs cannot be ended; of each thing one at a time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: dict[str, _Look[T]] = {}
        self._last: OrderedDict[str, T] = OrderedDict()

    def at(self, what: str, look: Callable[[], T], until_seconds: float) -> Seen[T]:
        """Have a look, and wait for it until then (monotonic, seconds). Raises what it raises."""
        with self._guard:
            running = self._running.get(what)
            if running is None:
                running = self._running[what] = _Look(time.monotonic(), Future())
                words = (what, look, running.seen)
                threading.Thread(target=self._do, args=words, name="health", daemon=True).start()
        wait([running.seen], max(0.0, until_seconds - time.monotonic()))
        if running.seen.done():
            return Seen(running.seen.result())
        with self._guard:
            return Seen(self._last.get(what), time.monotonic() - running.began_seconds)

    def _do(self, what: str, look: Callable[[], T], seen: "Future[T]") -> None:
        try:
            value = look()
        except BaseException as error:
            self._end(what)
            seen.set_exception(error)
            return
        with self._guard:
            self._last[what] = value
            self._last.move_to_end(what)
            while len(self._last) > _MOST_KEPT:
                self._last.popitem(last=False)
        self._end(what)
        seen.set_result(value)

    def _end(self, what: str) -> None:
        with self._guard:
            del self._running[what]
