"""Who may work on what at the same time."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from agent import errors


class VolumeLocks:
    """One call per volume; a second is refused at once, as the CSI spec advises ("Concurrency")."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: set[str] = set()

    @contextmanager
    def hold(self, *names: str) -> Iterator[None]:
        """Hold a volume, and the path it is put at: two volumes at one path would cover each other.

        Raises OperationPending while another call holds one of them.
        """
        with self._guard:
            for name in names:
                if name in self._held:
                    raise errors.OperationPending(name)
            self._held.update(names)
        try:
            yield
        finally:
            with self._guard:
                self._held.difference_update(names)


class GroupLocks:
    """One change of a group at a time, so that what a report said still holds at the change.

    Held around lvm2 commands only: never over mkfs, a wipe or a copy.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def hold(self, *groups: str) -> Iterator[None]:
        """Hold groups, after any other call that does; all take them in the same order."""
        with self._guard:
            locks = [self._locks[one] for one in sorted(set(groups))]
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            yield
