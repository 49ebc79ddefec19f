"""Thin snapshots that are active only to be read: deactivated when nobody reads them any more.

Each costs the kernel a device and every look at the group a row, and a backup reads many. Which of
them Carver activated stands on them as a tag from before they are active until they are not any
more: what a kill leaves is deactivated by the next start, or after the next reading in its group.
One that was active before has no such tag, and is left alone. A copy-on-write snapshot is active
for as long as its origin is.
"""

import contextvars
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agent import errors, fact
from agent.engine.means import Means
from agent.engine.records import Snapshot
from lvm import command, devices, report, volumes
from lvm import errors as lvm_errors

_log = logging.getLogger(__name__)

_OWN = {fact.ACTIVATED: "reading"}
# How long an activated snapshot is waited for to be opened by a command that asked for it.
_LEASE_SECONDS = 60.0
# How long a reading that ended waits for the group and for lvm2; what is left is done by the next.
_END_SECONDS = 30.0


class Activations:
    """Activates snapshots for readings, and deactivates them after."""

    def __init__(self, means: Means) -> None:
        self._engines, self._inventory = means.engines, means.inventory
        self._devices = means.devices
        self._guard = threading.Lock()
        # By group and name: how many read it; by a random word: whom it is activated for, until
        # when (monotonic).
        self._readers: Counter[tuple[str, str]] = Counter()
        self._leases: dict[str, tuple[tuple[str, str], float]] = {}

    @contextmanager
    def held(self, snapshot: Snapshot) -> Iterator[devices.Device]:
        """Inside, a snapshot's device is there; the group is held to enter. Raises Inactive.

        At most two commands. `end` is to follow, once all that was read in the group is closed.
        """
        key = (snapshot.group.name, snapshot.name)
        with self._guard:
            self._readers[key] += 1
        try:
            yield self._activate(snapshot)
        finally:
            with self._guard:
                self._readers[key] -= 1
                # Else there would be an entry for each that was ever read.
                if not self._readers[key]:
                    del self._readers[key]

    def lease(self, snapshot: Snapshot) -> str:
        """Activate a snapshot that another process is to open; the word by which it is ended.

        Empty where there is nothing to end. The group is held. The device stays for as long as it
        is open there. At most two commands.
        """
        self._activate(snapshot)
        if not snapshot.is_thin:
            return ""
        word = secrets.token_hex(8)
        with self._guard:
            until = time.monotonic() + _LEASE_SECONDS
            self._leases[word] = ((snapshot.group.name, snapshot.name), until)
        return word

    def end_lease(self, group: str, word: str) -> None:
        """The process has closed the snapshot."""
        with self._guard:
            self._leases.pop(word, None)
        self.end(group)

    def end(self, *groups: str) -> None:
        """Deactivate what nobody reads any more in these groups. Raises nothing."""

        def sweep() -> None:
            with command.time_limit(_END_SECONDS):
                self.resume(*groups)

        try:
            # Whoever read has perhaps no time left, nor a place among the calls.
            contextvars.Context().run(sweep)
        except (errors.AgentError, lvm_errors.LvmError, OSError) as error:
            _log.warning("snapshots in %s stay active for now: %s", ", ".join(groups), error)

    def resume(self, *groups: str) -> int:
        """The same, or in all groups; returns how many. Three commands at most for each group."""
        count = 0
        for name in groups or self._engines.names:
            with self._engines.hold(name):
                known = self._inventory.read(name)
                if unread := self._unread(known):
                    self._deactivate(name, unread)
                    count += len(unread)
        return count

    def _activate(self, snapshot: Snapshot) -> devices.Device:
        group, name = snapshot.group.name, snapshot.name
        is_own = fact.ACTIVATED in snapshot.facts
        if snapshot.is_thin and not is_own and not self._inventory.is_active(group, name):
            volumes.mark(self._engines.lvm(group), group, name, old={}, new=_OWN)
        return self._inventory.activate_snapshot(snapshot)

    def _unread(self, known: report.Report) -> list[str]:
        """The names of those that bear the tag, and nobody reads or copies."""
        now = time.monotonic()
        with self._guard:
            self._leases = {word: one for word, one in self._leases.items() if one[1] > now}
            read = {*self._readers, *(key for key, _ in self._leases.values())}
        own = [one for one in self._inventory.all_snapshots(known) if fact.ACTIVATED in one.facts]
        unread = [one for one in own if (one.group.name, one.name) not in read]
        if not unread:
            return []
        # A copy, which may be in another group, opens it for a moment at a time.
        every = self._inventory.present(self._inventory.glance())
        copied = {one.facts.get(fact.FROM) for one in every if one.copying}
        return [
            one.name
            for one in unread
            if str(one.id) not in copied and not self._devices.is_open(one.group.name, one.name)
        ]

    def _deactivate(self, group: str, names: list[str]) -> None:
        lvm = self._engines.lvm(group)
        if active := [one for one in names if self._inventory.is_active(group, one)]:
            # Opened just now, by nobody of Carver's: it keeps its tag.
            with suppress(lvm_errors.InUse):
                volumes.deactivate(lvm, group, *active)
        done = [(group, one) for one in names if not self._inventory.is_active(group, one)]
        if done:
            volumes.mark_all(lvm, done, old=_OWN)
