"""RAID volumes repaired unasked, where their class says `repair = "auto"`.

A disk that is missing may be back in a moment: a cable, a reboot, a slow controller. A rebuild is
begun only when a volume has lacked the same disks for as long as its class says, without a pause,
and only where the group has room on other disks, beside what its pools promised. Nothing is taken
out of the group. A restart of the service begins to count anew.

Each group has a thread: one in which a repair does not come off keeps no other's waiting.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from agent import errors, fact
from agent.config.classes import AUTO
from agent.engine.means import Means
from agent.engine.records import Volume
from agent.engine.rounds import Rounds
from agent.workers.repairing import Repairer
from lvm import command
from lvm import errors as lvm_errors

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 30.0
_RETRY_SECONDS = 300.0
_PATIENCE_SECONDS = 60.0
# A service that ends waits so long for what is under way.
_ENDING_SECONDS = 10.0
_FAILURE = "volume group %s: whether a volume is to be repaired is not known: %s"


@dataclass
class _OfGroup:
    """What was seen of a group's volumes, by their ids."""

    # Since when volumes lack these disks, and when one is tried again (monotonic, seconds).
    since: dict[tuple[str, frozenset[str]], float] = field(default_factory=dict)
    later: dict[str, float] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)


class AutoRepair:
    """Begins the repair of what has been degraded for long enough."""

    def __init__(self, means: Means, repairer: Repairer) -> None:
        self._inventory = means.inventory
        self._repairer = repairer
        # How long a volume of a class waits, in seconds.
        self._after: Mapping[str, float] = {
            one.name: one.repair_after_seconds for one in means.config.classes if one.repair == AUTO
        }
        groups = {one.group for one in means.config.classes if one.repair == AUTO}
        self._seen = {one: _OfGroup() for one in sorted(groups)}
        self.rounds = Rounds("repair", tuple(self._seen), self.look, _FAILURE)

    @property
    def is_alive(self) -> bool:
        """Whether it looks."""
        return self.rounds.is_alive

    def start(self) -> None:
        """Look from now on, where a class asks for it."""
        self.rounds.start(_LOOK_SECONDS)

    def stop(self) -> None:
        """Begin no more; what was begun goes on in the kernel."""
        self.rounds.stop()
        self.rounds.join(_ENDING_SECONDS)

    def step(self, now_seconds: float) -> None:
        """Look once at each group, as if it were then."""
        for one in self._seen:
            self.look(one, lambda: now_seconds)

    def look(self, group: str, clock: Callable[[], float] = time.monotonic) -> bool:
        """Look once, at what was seen at most a minute ago, and begin the repairs that are due.

        False: the next look is not at once.
        """
        seen, now_seconds = self._seen[group], clock()
        degraded = {str(one.id): one for one in self._degraded(group)}
        lacking = {(key, frozenset(one.missing_disks)) for key, one in degraded.items()}
        seen.since = {one: seen.since.get(one, now_seconds) for one in lacking}
        for kept in (seen.later, seen.told):
            for key in kept.keys() - degraded.keys():
                kept.pop(key)
        for (key, _), since_seconds in sorted(seen.since.items(), key=lambda one: one[1]):
            wait_seconds = self._after[degraded[key].facts[fact.CLASS]]
            is_due = now_seconds - since_seconds >= wait_seconds
            if is_due and seen.later.get(key, now_seconds) <= now_seconds:
                self._repair(key, seen)
                # From the end of the attempt, which may have taken long.
                seen.later[key] = clock() + _RETRY_SECONDS
        return False

    def _degraded(self, group: str) -> Iterator[Volume]:
        """A group's volumes of these classes that lack a disk; none where no group answers."""
        try:
            known, _ = self._inventory.recent()
        except (errors.AgentError, lvm_errors.LvmError, OSError):
            return
        for volume in self._inventory.present(known):
            if volume.group.name != group or volume.facts.get(fact.CLASS, "") not in self._after:
                continue
            if volume.is_listed and volume.layout.is_raid and volume.missing_disks:
                yield volume

    def _repair(self, volume_id: str, seen: _OfGroup) -> None:
        try:
            with command.time_limit(_PATIENCE_SECONDS):
                told = self._repairer.repair(volume_id).message
        except (errors.AgentError, lvm_errors.LvmError) as error:
            told = f"it is not repaired yet: {error}"
        except Exception as error:
            # The next volume may well be repaired.
            told = f"it is not repaired yet: {error!r}"
        if seen.told.get(volume_id) != told:
            _log.warning("volume %s has lacked a disk for long: %s", volume_id, told)
        seen.told[volume_id] = told
