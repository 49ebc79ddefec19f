"""Looks that are had again and again behind the answers: a thread for each group, until a stop.

What hangs for one group is met by no other's thread. Nothing that a look raises ends one: it is
told, counted, and had again at its next time.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from agent import errors
from lvm import errors as lvm_errors

_log = logging.getLogger(__name__)

# What is no wonder needs no trace to be understood.
_KNOWN = (errors.AgentError, lvm_errors.LvmError, OSError)


class Rounds:
    """Has `look` at each of these groups, which says whether it is to be had again at once.

    `failure` is what the log says of a look that failed, of the group's name and the error.
    """

    def __init__(
        self, kind: str, groups: Sequence[str], look: Callable[[str], bool], failure: str
    ) -> None:
        self.kind, self._groups = kind, tuple(groups)
        self._look, self._failure = look, failure
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        # By the groups; each is written by its own thread only.
        self._failures = dict.fromkeys(self._groups, 0)

    @property
    def is_alive(self) -> bool:
        """Whether any group is looked at."""
        return any(one.is_alive() for one in self._threads)

    def failures(self) -> Mapping[str, int]:
        """How many looks at each group failed until now."""
        return dict(self._failures)

    def start(self, pause_seconds: float) -> None:
        """Look from now on, so many seconds after the look before, and at first after as many."""
        for group in self._groups:
            words = (group, pause_seconds)
            name = f"{self.kind} {group}"
            thread = threading.Thread(target=self._run, args=words, name=name, daemon=True)
            thread.start()
            # Last: a stop that comes meanwhile joins no thread that was not started.
            self._threads.append(thread)

    def stop(self) -> None:
        """Begin no look any more."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        """Wait so long at most until those that are under way have ended."""
        until = time.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, group: str, pause_seconds: float) -> None:
        failures, told = 0, ""
        while not self._stopping.wait(pause_seconds):
            try:
                while self._look(group) and not self._stopping.is_set():
                    pass
            except Exception as error:
                failures += 1
                self._failures[group] += 1
                # The same again each time is told once.
                if told != (problem := str(error) or type(error).__name__):
                    trace = None if isinstance(error, _KNOWN) else error
                    _log.error(self._failure, group, problem, exc_info=trace)
                told = problem
            else:
                if failures:
                    _log.warning("%s %s: well again after %d failures", self.kind, group, failures)
                failures, told = 0, ""
