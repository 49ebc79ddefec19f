"""Whose turn it is to change a volume group: one at a time, in the order in which they came."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from agent import admission, errors
from lvm import command

# Of the server's threads that may be with volume groups, what one group may take: others find some.
MOST_WAITING = admission.PLACES // 2
MOST_LOOKING = admission.PLACES * 3 // 8


class Queue:
    """Turns at one group: fair, bounded, and nobody waits longer than his caller does.

    Held around lvm2 commands only: never over mkfs, a wipe or a copy.
    """

    def __init__(self, what: str, most: int = MOST_WAITING) -> None:
        self._what = what
        self._most = most
        self._guard = threading.Lock()
        self._taken = False
        # Each is set when its turn has come.
        self._waiting: deque[threading.Event] = deque()

    @property
    def is_taken(self) -> bool:
        """Whether it is someone's turn."""
        return self._taken

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be the one who changes the group.

        Raises GroupBusy where too many wait already, and at the end of the caller's time.
        """
        self._await()
        try:
            yield
        finally:
            self._pass_on()

    def _await(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            if len(self._waiting) >= self._most:
                raise errors.GroupBusy(self._what, f"{self._most} calls wait for it already")
            mine = threading.Event()
            self._waiting.append(mine)
        limit = command.remaining_seconds()
        if mine.wait(limit):
            return
        with self._guard:
            if not mine.is_set():
                self._waiting.remove(mine)
                raise errors.GroupBusy(self._what, "another call was at work on it all the time")
        # The turn came in the moment in which the time was over: the first command will say so.

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False
