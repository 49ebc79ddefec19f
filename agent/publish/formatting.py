"""Work that may outlast the call that needs it: mkfs and fsck of a large volume.

A call waits for it as long as its caller does. Then the work goes on, and the next call waits for
the same work: cut off and begun anew each time, it would never end.

So much of it is done at a time in each volume group: more would only make its disks seek, and disks
of one that hang keep none in another waiting.
"""

import contextvars
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from agent import errors
from lvm import command

_AT_ONCE = 8


@dataclass(frozen=True)
class _Chore:
    what: str
    ended: Future[None] = field(default_factory=Future)
    started_seconds: float = field(default_factory=time.monotonic)


class Chores:
    """One piece of work for each volume at a time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._chores: dict[str, _Chore] = {}
        self._turns: defaultdict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(_AT_ONCE)
        )

    def do(self, volume_id: str, group: str, what: str, work: Callable[[], None]) -> None:
        """Do it and wait; raises what it raises, or StillAtWork where the caller's time is over.

        No deadline holds for the work itself.
        """
        chore = _Chore(what)
        with self._guard:
            self._chores[volume_id] = chore
            turn = self._turns[group]
        # A context of its own, in which no caller's time runs out.
        context = contextvars.Context()
        threading.Thread(
            target=context.run, args=(_carry_out, chore, work, turn), name="chore", daemon=True
        ).start()
        self.finish(volume_id)

    def finish(self, volume_id: str) -> None:
        """Wait for what an earlier call began, if it began something; raises as `do` does."""
        with self._guard:
            chore = self._chores.get(volume_id)
        if chore is None:
            return
        wait([chore.ended], command.remaining_seconds())
        if not chore.ended.done():
            seconds = time.monotonic() - chore.started_seconds
            raise errors.StillAtWork(volume_id, chore.what, seconds)
        with self._guard:
            self._chores.pop(volume_id, None)
        chore.ended.result()


def _carry_out(chore: _Chore, work: Callable[[], None], turn: threading.Semaphore) -> None:
    try:
        with turn:
            work()
    except BaseException as error:
        # Whatever it is: the call that waits shall see it.
        chore.ended.set_exception(error)
    else:
        chore.ended.set_result(None)
