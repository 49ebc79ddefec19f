"""Who may work on what at the same time."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from agent import errors


class VolumeLocks:
    """One call per volume; a second is refused at once, as the CSI spec advises ("Concurrency")."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: set[str] = set()

    @contextmanager
    def hold(self, volume: str) -> Iterator[None]:
        """Hold a volume; raises OperationPending while another call does."""
        with self._guard:
            if volume in self._held:
                raise errors.OperationPending(volume)
            self._held.add(volume)
        try:
            yield
        finally:
            with self._guard:
                self._held.discard(volume)


class GroupLocks:
    """One change of a group at a time, so that what a report said still holds at the change.

    Held around lvm2 commands only: never over mkfs, a wipe or a copy.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def hold(self, group: str) -> Iterator[None]:
        """Hold a group, after any other call that does."""
        with self._guard:
            lock = self._locks[group]
        with lock:
            yield
