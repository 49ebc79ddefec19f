"""Volumes that may not be used now, and why; known before a report has their tags."""

import secrets
import threading
import time
from dataclasses import dataclass, replace

from agent.core import errors, tag
from agent.core.inventory import Inventory


@dataclass(frozen=True)
class _Lease:
    """A hold: its word, its end (monotonic), its error, and the group's contents before it.

    `before` has the LVM UUIDs of what the group held once the volume was unused; None until known.
    """

    word: str
    until_seconds: float
    why: errors.AgentError
    before: frozenset[str] | None = None


class Holds:
    """Volumes that are being received, were moved away, or are held for some seconds.

    Tags record the first two. A hold lasts as long as this process lives and the holder renews it;
    then the volume may be used again.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._why: dict[str, errors.AgentError] = {}
        self._held: dict[str, _Lease] = {}

    def require_free(self, volume_id: str) -> None:
        """Raise Receiving or Moved where the volume may not be used; no command."""
        with self._guard:
            lease = self._lease(volume_id)
            why = self._why.get(volume_id) or (lease.why if lease is not None else None)
        if why is not None:
            raise why.with_traceback(None)

    def receiving(self, volume_id: str) -> None:
        """Note that it is being received as a stream."""
        with self._guard:
            self._why[volume_id] = errors.Receiving(volume_id)

    def moved(self, volume_id: str, node: str) -> None:
        """Note that it was moved to another node."""
        with self._guard:
            self._why[volume_id] = errors.Moved(volume_id, node)

    def allow(self, volume_id: str) -> None:
        """Note that it is this node's and complete."""
        with self._guard:
            self._why.pop(volume_id, None)

    def hold(self, volume_id: str, node: str, seconds: float, word: str = "") -> str:
        """Hold a volume for so long; return the word that renews the hold.

        Raises Receiving, Moved where it is held already, or the hold of the word has ended.
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
        """End the hold of that word."""
        with self._guard:
            if self._lease(volume_id, word) is not None:
                del self._held[volume_id]

    def note(self, volume_id: str, word: str, before: frozenset[str]) -> None:
        """Note that a held volume is unused, and the LVM UUIDs of its group's contents."""
        with self._guard:
            found = self._lease(volume_id, word)
            if found is not None and found.before is None:
                self._held[volume_id] = replace(found, before=before)

    def has_all(self, volume_id: str, word: str, snapshot_uuid: str) -> bool:
        """Whether a snapshot was taken during the hold of that word, which had no pause.

        By the group's contents then, and not by the time: clocks step.
        """
        with self._guard:
            found = self._lease(volume_id, word)
            if found is None or found.before is None:
                return False
            return snapshot_uuid not in found.before

    def resume(self, inventory: Inventory, *groups: str) -> int:
        """Read from tags which volumes of these groups, or of all, are received or moved."""
        every = list(inventory.present(inventory.state(*groups)))
        for one in every:
            if one.receiving:
                self.receiving(str(one.id))
            elif one.moved:
                self.moved(str(one.id), one.own_tags.get(tag.MOVE_TO, "another node"))
        return sum(one.receiving or one.moved for one in every)

    def _lease(self, volume_id: str, word: str | None = None) -> _Lease | None:
        """The hold of a volume, of that word if given, if it has not ended."""
        found = self._held.get(volume_id)
        if (
            found is None
            or time.monotonic() >= found.until_seconds
            or word not in (None, found.word)
        ):
            return None
        return found
