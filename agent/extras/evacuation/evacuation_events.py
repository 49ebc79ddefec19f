"""Kubernetes Events that say how an evacuation goes, on Nodes, claims and pods."""

import logging
import threading
from collections.abc import Callable

from agent.core import errors
from agent.extras.evacuation.plan import PlannedVolume
from agent.extras.kubernetes.events import NORMAL, WARNING, Event, Events, Said, Subject
from agent.extras.kubernetes.objects import Objects

_log = logging.getLogger(__name__)

# Reasons of the Events.
STARTED, FINISHED = "EvacuationStarted", "EvacuationFinished"
REFUSED = "EvacuationRefused"
MOVING, MOVED, STAYS = "VolumeMoving", "VolumeMoved", "VolumeStays"
REBINDING, WAITS = "ClaimRebinding", "VolumeMoveWaits"
OUTRUN, EVICTION_REFUSED = "WritesOutrunTransfer", "EvictionRefused"
TAKEN_BACK, ERASED = "VolumeTakenBack", "QuarantineEnded"
_WARNINGS = frozenset({REFUSED, STAYS, WAITS, OUTRUN, EVICTION_REFUSED})
# Reasons whose Events say what was done.
_SINGLE = frozenset({REBINDING, MOVED, TAKEN_BACK, ERASED})
# Maximum number of characters of an Event's text; a note in Kubernetes has at most 1,024.
_MOST_CHARACTERS = 1000
# Seconds between two Events about a volume that stays, as its reason has numbers that change with
# each plan, such as the free space of nodes.
_STAYS_SECONDS = 600.0


class EvacuationEvents:
    """Writes Events; one that cannot be written is logged, as no step depends on it.

    Several threads may use one object. `clock` returns the seconds since the epoch, `monotonic`
    those of a clock that is never set.
    """

    def __init__(
        self,
        objects: Objects,
        driver_name: str,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._events = Events(objects, driver_name, clock)
        self._lock = threading.Lock()
        self._said = Said(monotonic)

    def node(self, name: str, reason: str, text: str) -> None:
        """Write an Event about a Node, unless its last one for this reason has the same text.

        The Event of a warning is renewed while it is written again and again, as all others are.
        """
        # kubectl finds the Events of a Node by the Node's name in the place of a UID.
        self._say(Subject("Node", "", name, name), reason, text)

    def claim(self, volume: PlannedVolume, reason: str, text: str) -> None:
        """Write an Event about the claim of a volume; without a claim, on its PersistentVolume."""
        if (claim := volume.claim) is not None:
            subject = Subject("PersistentVolumeClaim", claim.namespace, claim.name, claim.uid)
            self._say(subject, reason, text)
        elif (owner := volume.persistent_volume) is not None:
            self._say(Subject("PersistentVolume", "", owner.name, owner.uid), reason, text)

    def of(self, subject: Subject, reason: str, text: str) -> None:
        """Write an Event about another object."""
        self._say(subject, reason, text)

    def _say(self, subject: Subject, reason: str, text: str) -> None:
        text = text[:_MOST_CHARACTERS]
        pause_seconds = _STAYS_SECONDS if reason == STAYS else 0.0
        with self._lock:
            if not self._said.is_due(
                (subject, reason), text, lasts=reason in _WARNINGS, pause_seconds=pause_seconds
            ):
                return
        kind = WARNING if reason in _WARNINGS else NORMAL
        # An Event is renewed if it occurs again; those of _SINGLE have one for each text.
        key = f"{reason} {text}" if reason in _SINGLE else reason
        try:
            self._events.ensure(subject, Event(kind, reason, text, key), is_new=True)
        except errors.ClusterRefused as error:
            _log.warning("cannot write the Event %s of %s: %s", reason, subject.name, error)
            with self._lock:
                self._said.forget((subject, reason))
