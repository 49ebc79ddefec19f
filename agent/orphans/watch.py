"""The service's looks for orphans, from time to time: for metrics and log, nothing is deleted."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from agent.orphans.candidates import Kind

if TYPE_CHECKING:
    from agent.orphans.look import Orphan

_log = logging.getLogger(__name__)


class OrphanWatch:
    """Looks each `interval_seconds` in a thread of its own."""

    def __init__(
        self,
        look: Callable[[], "Sequence[Orphan]"],
        interval_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._look = look
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._counts: Counter[Kind] = Counter()
        self._told: frozenset[str] = frozenset()
        self._problem = ""
        self._time_seconds = 0.0
        self._stopping = threading.Event()
        # A server that does not answer must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="orphans", daemon=True)

    @property
    def time_seconds(self) -> float:
        """When the last whole look was (epoch); 0 where none came to its end."""
        return self._time_seconds

    def counts(self) -> Mapping[Kind, int]:
        """How many of each kind there were at the last whole look, the sure ones only."""
        return {one: self._counts[one] for one in Kind}

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()

    def step(self) -> None:
        """Look once, and tell of what is new; of a look that failed once as long as it does."""
        try:
            found = [one.candidate for one in self._look() if one.sure]
        except Exception as error:
            # Nothing but a stop ends the looks.
            if (problem := str(error) or type(error).__name__) != self._problem:
                _log.warning("orphans are not looked for: %s", problem)
            self._problem = problem
            return
        self._problem = ""
        self._counts, self._time_seconds = Counter(one.kind for one in found), self._clock()
        for one in found:
            if one.key not in self._told:
                told = (one.kind, one.name, one.about, one.told_remedy)
                _log.warning("orphan: %s %s: %s; %s", *told)
        self._told = frozenset(one.key for one in found)

    def _run(self) -> None:
        while True:
            self.step()
            if self._stopping.wait(self._interval_seconds):
                return
