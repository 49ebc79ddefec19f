"""Start-up and recovery: before lvm2 has answered, and for each group when it answers."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from agent.core.background import PeriodicTask
from agent.core.locks import Admission
from agent.core.volume_groups import VolumeGroups
from mount import command

_log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0
# An attempt that waits for a disk must not hold what the next one needs.
_PATIENCE_SECONDS = 60.0


def startup(
    begin: Callable[[], None], admission: Admission, after: Callable[[], None]
) -> PeriodicTask:
    """Make a task that retries `begin` until it succeeds, then admits calls, then does `after`.

    `begin` looks before it acts, so it may fail, or be killed, at any step.
    """

    def attempt() -> None:
        try:
            with command.time_limit(_PATIENCE_SECONDS):
                begin()
        except Exception as error:
            admission.refuse(error)
            raise
        task.stop()
        admission.open()
        after()

    task = PeriodicTask(
        "startup",
        attempt,
        _LONGEST_RETRY_SECONDS,
        "no volume group can be used yet, and it is tried again: %s",
        retry_seconds=_FIRST_RETRY_SECONDS,
        longest_retry_seconds=_LONGEST_RETRY_SECONDS,
    )
    return task


# How long a start waits for the other groups once one was taken up.
_OTHERS_SECONDS = 3.0
# So often one that does not answer is tried again: soon where a disk came, went or changed.
_RETRY_SECONDS = 60.0
_SOON_SECONDS = 5.0


class Recovery:
    """Has `take_up` done for each group that answers, once each time that it begins to.

    `take_up` says whether the group was there when it looked.
    """

    def __init__(self, volume_groups: VolumeGroups, take_up: Callable[[str], bool]) -> None:
        self._volume_groups = volume_groups
        self._take_up = take_up
        # Those that are to be taken up when they answer, and how the last attempts came out.
        self._waiting = set(volume_groups.names)
        self._tries: dict[str, Future[None]] = {}
        # Why not, as it was told last: the same again each minute is told once.
        self._told: dict[str, str] = {}
        self._tried_at: dict[str, float] = {}

    def begin(self) -> None:
        """Try all; ends soon after one was taken up. Raises what they raise where none was.

        A group that is not here, or may not be used, keeps no start.
        """
        tries = [self._try(one) for one in self._volume_groups.names]
        wait(tries, _OTHERS_SECONDS)
        pending = set(tries)
        while pending and not any(one.done() and not one.exception() for one in tries):
            _, pending = wait(pending, return_when=FIRST_COMPLETED)
        problems = [one.exception() for one in tries if one.done()]
        if problems and all(problems) and problems[0] is not None:
            raise problems[0]

    def step(self) -> None:
        """Try those whose turn it is; returns at once, and no command where all answer."""
        for one in self._volume_groups:
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
            trying = command.begin(f"resume {name}", lambda: self._run(name))
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
