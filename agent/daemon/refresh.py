"""Background refresh of the cached state: by the clock, and by udev's events of disks.

Only what callers use is refreshed, so an idle node runs no command.
"""

from collections.abc import Callable

from agent.core.background import PeriodicTask
from agent.core.inventory import Inventory
from lvm.events import DiskEvents

_TURN_SECONDS = 2.0
# A refresh costs a process only where something was written to the group.
_MAX_AGE_SECONDS = 60.0


class Watch:
    """Refreshes the inventory, marks it outdated at events of disks, and does `then` regularly.

    `then` has to return at once, as a refresh does: it begins what may hang in other threads.
    """

    def __init__(
        self,
        known: Inventory,
        listen: Callable[[], DiskEvents | None] = DiskEvents.open,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._inventory = known
        self._listen = listen
        self._events: DiskEvents | None = None
        failure = "%s is not watched: %%s"
        # Waiting for events is its pause.
        self._udev = PeriodicTask(
            "udev", self._hear, 0.0, failure % "udev", retry_seconds=_TURN_SECONDS
        )
        self._tasks = (
            self._udev,
            PeriodicTask("refresh", self._refresh, _TURN_SECONDS, failure % "LVM"),
            PeriodicTask("volume groups", then, _TURN_SECONDS, "volume groups are not tried: %s"),
        )

    def start(self) -> None:
        """Begin."""
        for one in self._tasks:
            one.start()

    def stop(self) -> None:
        """Begin no further run; a command of lvm2's under way is left to end by itself."""
        for one in self._tasks:
            one.stop()

    def _refresh(self) -> None:
        self._inventory.refresh(_MAX_AGE_SECONDS)

    def _hear(self) -> None:
        """Wait for events; where there is no udev, leave it to the clock."""
        if self._events is None and (events := self._listen()) is not None:
            self._events = events
        if self._events is None:
            self._udev.stop()
            return
        try:
            heard = self._events.wait(_TURN_SECONDS)
        except Exception:
            # Events before that are lost.
            self._inventory.outdate()
            raise
        for event in heard:
            self._inventory.outdate(event.written)
