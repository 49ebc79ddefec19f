"""Groups made, and what was left in them taken up, as soon as each answers: wipes, copies.

By an earlier process, or because the group was away: at the start for all groups, later for one
that did not answer then, or went and is back. Each in a thread of its own, so that one whose disk
hangs keeps none waiting. By then calls may be at work on the group; so each step looks while it
holds the group, and begins nothing that a call has begun.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from agent.engine.engines import Engines
from lvm import command, threads

_log = logging.getLogger(__name__)

# Whoever waits for a disk shall not hold what the next attempt needs.
_PATIENCE_SECONDS = 60.0
# How long a start waits for the other groups once one was taken up.
_OTHERS_SECONDS = 3.0
# So often one that does not answer is tried again: soon where a disk came, went or changed.
_RETRY_SECONDS = 60.0
_SOON_SECONDS = 5.0


class Resumption:
    """Has `take_up` done for each group that answers, once each time that it begins to.

    `take_up` says whether the group was there when it looked.
    """

    def __init__(self, engines: Engines, take_up: Callable[[str], bool]) -> None:
        self._engines = engines
        self._take_up = take_up
        # Those that are to be taken up when they answer, and how the last attempts came out.
        self._waiting = set(engines.names)
        self._tries: dict[str, Future[None]] = {}
        # Why not, as it was told last: the same again each minute is told once.
        self._told: dict[str, str] = {}
        self._tried_at: dict[str, float] = {}

    def begin(self) -> None:
        """Try all; ends soon after one was taken up. Raises what they raise where none was.

        A group that is not here, or may not be used, keeps no start.
        """
        tries = [self._try(one) for one in self._engines.names]
        wait(tries, _OTHERS_SECONDS)
        pending = set(tries)
        while pending and not any(one.done() and not one.exception() for one in tries):
            _, pending = wait(pending, return_when=FIRST_COMPLETED)
        problems = [one.exception() for one in tries if one.done()]
        if problems and all(problems) and problems[0] is not None:
            raise problems[0]

    def step(self) -> None:
        """Try those whose turn it is; returns at once, and no command where all answer."""
        for one in self._engines:
            if not one.answers:
                self._waiting.add(one.name)
            age_seconds = time.monotonic() - self._tried_at.get(one.name, -_RETRY_SECONDS)
            due_seconds = _SOON_SECONDS if one.is_outdated else _RETRY_SECONDS
            if one.name in self._waiting and age_seconds >= due_seconds:
                self._try(one.name)

    def _try(self, name: str) -> Future[None]:
        """Have a group taken up in a thread: once at a time, however long it takes.

        Raises RuntimeError where none can be had.
        """
        trying = self._tries.get(name)
        if trying is None or trying.done():
            trying = threads.begin(f"resume {name}", lambda: self._run(name))
            # Not before: where no thread can be had, the next step asks for one again.
            self._tries[name], self._tried_at[name] = trying, time.monotonic()
        return trying

    def _run(self, name: str) -> None:
        # Before: what goes away meanwhile is waited for again.
        self._waiting.discard(name)
        try:
            with command.time_limit(_PATIENCE_SECONDS):
                was_there = self._take_up(name)
        except Exception as error:
            self._waiting.add(name)
            if self._told.get(name) != (problem := str(error)):
                _log.warning("volume group %s is not taken up yet: %s", name, problem)
            self._told[name] = problem
            raise
        self._told.pop(name, None)
        if not was_there:
            # It may have come since, and a call have seen it: then no step finds it silent.
            self._waiting.add(name)
