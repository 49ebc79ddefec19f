"""Volumes that may not be used now, and why; known before a report has their tags.

No call waits for a hold to end: it is refused.
"""

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent.core import errors, tag
from agent.volumes import volume_states
from agent.volumes.reports import Reports
from agent.volumes.volume_states import Call, Ender, Outcome


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
    """Notes of volumes that are not this node's yet, or any more, and of those held for seconds.

    Tags record the first. A hold lasts as long as this process lives and the holder renews it;
    then the volume may be used again.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._why: dict[str, tuple[Ender, errors.AgentError]] = {}
        self._held: dict[str, _Lease] = {}

    def check(self, call: Call, volume_id: str) -> None:
        """Raise Receiving or Moved where a call may not have the volume; no command."""
        with self._guard:
            found = self._why.get(volume_id)
            if found is None and (lease := self._lease(volume_id)) is not None:
                found = Ender.MOVE, lease.why
        if found is not None and volume_states.outcome(call, found[0]) is Outcome.NOT_OWN:
            raise found[1].with_traceback(None)

    def receiving(self, volume_id: str) -> None:
        """Note that it is being received as a stream."""
        self._note(volume_id, Ender.RECEIVER, {})

    def moved(self, volume_id: str, node: str) -> None:
        """Note that it was moved to another node."""
        self._note(volume_id, Ender.MOVER, {tag.MOVE_TO: node})

    def _note(self, volume_id: str, ender: Ender, own_tags: Mapping[str, str]) -> None:
        why = volume_states.row_of(ender).problem(volume_id, own_tags)
        with self._guard:
            self._why[volume_id] = ender, why

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
                raise final[1].with_traceback(None)
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

    def resume(self, reports: Reports, *groups: str) -> int:
        """Note by tags which volumes of these groups, or of all, calls must know so; how many."""
        every = reports.fresh(*groups).volumes()
        found = [one for one in every if volume_states.row_of(one.ended_by).is_noted]
        for one in found:
            self._note(str(one.id), one.ended_by, one.own_tags)
        return len(found)

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
