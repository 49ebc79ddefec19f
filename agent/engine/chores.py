"""Work that may outlast the call that needs it: mkfs and fsck of a large volume.

A call waits for it as long as its caller does. Then the work goes on, and the next call waits for
the same work: cut off and begun anew each time, it would never end.

So much of it is done at a time in each volume group: more would only make its disks seek, and disks
of one that hang keep none in another waiting. What waits for its turn is called off with its
volume, whose name may be another's when the turn comes.
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
    volume_id: str
    what: str
    look: Callable[[], None]
    work: Callable[[], None]
    turn: threading.Semaphore
    # It has begun when this runs, and never begins once it is cancelled.
    ended: Future[None] = field(default_factory=Future)
    started_seconds: float = field(default_factory=time.monotonic)

    def carry_out(self) -> None:
        had_to_wait = not self.turn.acquire(blocking=False)
        if had_to_wait:
            self.turn.acquire()
        try:
            if not self.ended.set_running_or_notify_cancel():
                return
            try:
                if had_to_wait:
                    self.look()
                self.work()
            except BaseException as error:
                # Whatever it is: the call that waits shall see it.
                self.ended.set_exception(error)
            else:
                self.ended.set_result(None)
        finally:
            self.turn.release()

    def problem(self) -> errors.StillAtWork:
        seconds = time.monotonic() - self.started_seconds
        return errors.StillAtWork(self.volume_id, self.what, seconds)


class Chores:
    """One piece of work for each volume at a time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._chores: dict[str, _Chore] = {}
        self._turns: defaultdict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(_AT_ONCE)
        )

    def do(
        self,
        volume_id: str,
        group: str,
        what: str,
        work: Callable[[], None],
        look: Callable[[], None],
    ) -> None:
        """Do it and wait; raises what it raises, or StillAtWork where the caller's time is over.

        No deadline holds for the work itself. Where it had to wait for its turn, it is preceded by
        a `look` whether what the caller saw is so still, which raises where it is not.
        """
        with self._guard:
            chore = _Chore(volume_id, what, look, work, self._turns[group])
            self._chores[volume_id] = chore
        # A context of its own, in which no caller's time runs out.
        context = contextvars.Context()
        threading.Thread(
            target=context.run, args=(chore.carry_out,), name="chore", daemon=True
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
            raise chore.problem()
        self._forget(volume_id)
        chore.ended.result()

    def call_off(self, volume_id: str) -> None:
        """Have nothing be done for a volume that goes; raises StillAtWork for what has begun."""
        with self._guard:
            chore = self._chores.get(volume_id)
        if chore is not None and not (chore.ended.cancel() or chore.ended.done()):
            raise chore.problem()
        self._forget(volume_id)

    def _forget(self, volume_id: str) -> None:
        with self._guard:
            self._chores.pop(volume_id, None)
