"""RAID volumes repaired unasked, where their class says `repair = "auto"`.

A disk that is missing may be back in a moment: a cable, a reboot, a slow controller. A rebuild is
begun only when a volume has lacked the same disks for as long as its class says, without a pause,
and only where the group has room on other disks, beside what its pools promised. Nothing is taken
out of the group. A restart of the service begins to count anew.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping

from agent import errors, fact
from agent.config.classes import AUTO
from agent.engine.means import Means
from agent.engine.records import Volume
from agent.workers.repairing import Repairer
from lvm import command
from lvm import errors as lvm_errors

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 30.0
_RETRY_SECONDS = 300.0
_PATIENCE_SECONDS = 60.0


class AutoRepair:
    """Begins the repair of what has been degraded for long enough."""

    def __init__(self, means: Means, repairer: Repairer) -> None:
        self._inventory = means.inventory
        self._repairer = repairer
        # How long a volume of a class waits, in seconds.
        self._after: Mapping[str, float] = {
            one.name: one.repair_after_seconds for one in means.config.classes if one.repair == AUTO
        }
        # Since when volumes lack these disks, and when one is tried again (monotonic, seconds).
        self._since: dict[tuple[str, frozenset[str]], float] = {}
        self._later: dict[str, float] = {}
        self._told: dict[str, str] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on, where a class asks for it."""
        if self._after:
            thread = threading.Thread(target=self._watch, name="repair", daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Begin no more; what was begun goes on in the kernel."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def step(self, now_seconds: float) -> None:
        """Look once, at what was seen at most a minute ago, and begin the repairs that are due."""
        degraded = {str(one.id): one for one in self._degraded()}
        lacking = {(key, frozenset(one.missing_disks)) for key, one in degraded.items()}
        self._since = {one: self._since.get(one, now_seconds) for one in lacking}
        for kept in (self._later, self._told):
            for key in kept.keys() - degraded.keys():
                kept.pop(key)
        for (key, _), since_seconds in sorted(self._since.items(), key=lambda one: one[1]):
            wait_seconds = self._after[degraded[key].facts[fact.CLASS]]
            is_due = now_seconds - since_seconds >= wait_seconds
            if is_due and self._later.get(key, now_seconds) <= now_seconds:
                self._repair(key, now_seconds)

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            self.step(time.monotonic())

    def _degraded(self) -> Iterator[Volume]:
        """The volumes of these classes that lack a disk; none where no group answers."""
        try:
            known, _ = self._inventory.recent()
        except (errors.AgentError, lvm_errors.LvmError):
            return
        for volume in self._inventory.present(known):
            is_meant = volume.facts.get(fact.CLASS, "") in self._after
            if is_meant and volume.is_listed and volume.layout.is_raid and volume.missing_disks:
                yield volume

    def _repair(self, volume_id: str, now_seconds: float) -> None:
        self._later[volume_id] = now_seconds + _RETRY_SECONDS
        try:
            with command.time_limit(_PATIENCE_SECONDS):
                told = self._repairer.repair(volume_id).message
        except (errors.AgentError, lvm_errors.LvmError) as error:
            told = f"it is not repaired yet: {error}"
        if self._told.get(volume_id) != told:
            _log.warning("volume %s has lacked a disk for long: %s", volume_id, told)
        self._told[volume_id] = told
