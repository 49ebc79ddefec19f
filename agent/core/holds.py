"""Volumes that nobody may use now, and why: known at once, before a report says so."""

import secrets
import threading
import time
from dataclasses import dataclass, replace

from agent.core import errors, tag
from agent.core.inventory import Inventory


@dataclass(frozen=True)
class _Lease:
    """Held by whom, until when (monotonic), what is said, and what was in the group before.

    That are LVM UUIDs: of what was there when nobody used it any more; None until it is known.
    """

    word: str
    until_seconds: float
    why: errors.AgentError
    before: frozenset[str] | None = None


class Holds:
    """Those that come as streams, those that were moved, and those that are held for a while.

    The first two are so by their tags. What is held is so for as long as this process lives, and
    whoever holds it asks for it: if that ends, the volume may be used again.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._why: dict[str, errors.AgentError] = {}
        self._held: dict[str, _Lease] = {}

    def require_free(self, volume_id: str) -> None:
        """Raise Receiving or Moved where nobody may use the volume; no command."""
        with self._guard:
            lease = self._lease(volume_id)
            why = self._why.get(volume_id) or (lease.why if lease is not None else None)
        if why is not None:
            raise why.with_traceback(None)

    def receiving(self, volume_id: str) -> None:
        """It comes as a stream."""
        with self._guard:
            self._why[volume_id] = errors.Receiving(volume_id)

    def moved(self, volume_id: str, node: str) -> None:
        """It is another node's."""
        with self._guard:
            self._why[volume_id] = errors.Moved(volume_id, node)

    def allow(self, volume_id: str) -> None:
        """It is this node's, whole."""
        with self._guard:
            self._why.pop(volume_id, None)

    def hold(self, volume_id: str, node: str, seconds: float, word: str = "") -> str:
        """Nobody may use it for so long; gives the word by which that is asked for again in time.

        Raises Receiving, Moved where it is withheld already, or the word's time is over.
        """
        why = errors.Moved(volume_id, node, "is being sent for the last time")
        with self._guard:
            now, found = time.monotonic(), self._lease(volume_id)
            if final := self._why.get(volume_id):
                raise final.with_traceback(None)
            if (found.word if found else "") != word:
                raise why
            if found is None:
                found = _Lease(secrets.token_hex(8), now + seconds, why)
            self._held[volume_id] = replace(found, until_seconds=now + seconds)
            return found.word

    def release(self, volume_id: str, word: str) -> None:
        """It is not held any more, if it is by that word."""
        with self._guard:
            found = self._lease(volume_id)
            if found is not None and found.word == word:
                del self._held[volume_id]

    def note(self, volume_id: str, word: str, before: frozenset[str]) -> None:
        """Nobody uses what is held by that word; `before` are the LVM UUIDs of what is there."""
        with self._guard:
            found = self._lease(volume_id)
            if found is not None and found.word == word and found.before is None:
                self._held[volume_id] = replace(found, before=before)

    def has_all(self, volume_id: str, word: str, snapshot_uuid: str) -> bool:
        """Whether a snapshot was taken since it is held by that word, without a pause.

        By what was there then, and not by the time: clocks step.
        """
        with self._guard:
            found = self._lease(volume_id)
            if found is None or found.word != word or found.before is None:
                return False
            return snapshot_uuid not in found.before

    def resume(self, inventory: Inventory, *groups: str) -> None:
        """See which volumes of these groups, or of all, are so by their tags."""
        for one in inventory.present(inventory.state(*groups)):
            if one.receiving:
                self.receiving(str(one.id))
            elif one.moved:
                self.moved(str(one.id), one.own_tags.get(tag.MOVE_TO, "another node"))

    def _lease(self, volume_id: str) -> _Lease | None:
        found = self._held.get(volume_id)
        return found if found is not None and time.monotonic() < found.until_seconds else None
