"""What LVM says, kept recent for those who only glimpse at it, by the clock; and events of disks.

Nothing is read while nobody asks: an idle node runs no command.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agent.core.inventory import Inventory
from lvm.events import DiskEvents

_log = logging.getLogger(__name__)

_TURN_SECONDS = 2.0
# A look costs a process only where something was written to the group.
_DUE_SECONDS = 60.0


class Watch:
    """A thread that has the inventory read anew when its report is due.

    At each of its turns it does `then`, which has to return at once, as all else that it does:
    udev's events come however long a group hangs.
    """

    def __init__(
        self,
        known: Inventory,
        listen: Callable[[], DiskEvents | None] = DiskEvents.open,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._inventory = known
        self._listen = listen
        self._then = then
        # Why not, as it was told last, by what was to be looked at.
        self._told: dict[str, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End at the next turn; a command of lvm2's that is at work is left to end by itself."""
        self._stopping.set()

    def _run(self) -> None:
        events: DiskEvents | None = None
        with self._going_on("udev"):
            events = self._listen()
        while not self._stopping.is_set():
            with self._going_on("udev"):
                self._hear(events)
            with self._going_on("LVM"):
                self._inventory.refresh(_DUE_SECONDS)
            with self._going_on("volume groups"):
                self._then()

    def _hear(self, events: DiskEvents | None) -> None:
        """Wait for events, or where there are none for the clock."""
        if events is None:
            self._stopping.wait(_TURN_SECONDS)
            return
        try:
            told = events.wait(_TURN_SECONDS)
        except Exception:
            # What was heard before that is lost with it.
            self._inventory.outdate()
            raise
        for event in told:
            self._inventory.outdate(event.written)

    @contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """Nothing that is raised inside ends the thread, or has it turn without a pause."""
        try:
            yield
        except Exception as error:
            # The same again at each turn is told once.
            if self._told.get(what) != (problem := str(error) or type(error).__name__):
                _log.error("%s could not be looked at: %s", what, problem)
            self._told[what] = problem
            self._stopping.wait(_TURN_SECONDS)
        else:
            self._told.pop(what, None)
