"""What LVM says, kept recent for those who only glimpse at it: by events of disks and the clock.

Nothing is read while nobody asks: an idle node runs no command.
"""

import logging
import threading
from collections.abc import Callable

from agent.engine.inventory import Inventory
from lvm.events import DiskEvents

_log = logging.getLogger(__name__)

_TURN_SECONDS = 2.0
# Without udev nothing tells of a change but looking.
_SLOW_SECONDS = 300.0
_SLOW_WITHOUT_EVENTS_SECONDS = 60.0


class Watch:
    """A thread that has the inventory read anew when its report is due.

    At each of its turns it does `then`, which has to return at once.
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
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End at the next turn; a command of lvm2's that is at work is left to end by itself."""
        self._stopping.set()

    def _run(self) -> None:
        events = self._listen()
        slow_seconds = _SLOW_SECONDS if events else _SLOW_WITHOUT_EVENTS_SECONDS
        while not self._stopping.is_set():
            if events is None:
                self._stopping.wait(_TURN_SECONDS)
            elif (event := events.wait(_TURN_SECONDS)) is not None:
                self._inventory.outdate(event.written)
            try:
                self._inventory.renew(slow_seconds)
                self._then()
            except Exception as error:
                _log.error("LVM could not be looked at: %s", error)
