"""End the quarantine of what moved volumes left on evacuated nodes, after the time of grace.

The grace is counted from the creation of the PersistentVolume that the volume has now. The API
server wrote that time, and its clock may differ from this one. What is left is erased only after
the target has answered that it has the volume as its own.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime

from agent.extras.evacuation.evacuation_context import EXPECTED, Context, text_of
from agent.extras.evacuation.move_notes import MoveNote, NotedVolume
from agent.extras.evacuation.unit_drive import erase

_log = logging.getLogger(__name__)

# Seconds until the end of a quarantine is tried again that a node refused, such as one that has
# snapshots of the volume.
_AGAIN_SECONDS = 600.0


class Quarantine:
    """Finds and ends quarantines."""

    def __init__(self, context: Context, grace_seconds: float) -> None:
        self._context, self._grace_seconds = context, grace_seconds
        # When the quarantine of a volume is tried again, of a monotonic clock, and what was wrong.
        self._due: dict[MoveNote, float] = {}
        self.problems: dict[MoveNote, str] = {}

    def due(
        self, volumes: Sequence[NotedVolume], kept_nodes: Collection[str]
    ) -> Iterator[tuple[NotedVolume, MoveNote]]:
        """Yield what has been under quarantine for long enough.

        On the nodes `kept_nodes`, which are undone, only what a move back has left is yielded.

        Of a volume, only the oldest note is yielded: a node is asked about the node that it moved
        the volume to, which must not have forgotten it.
        """
        now = self._context.monotonic()
        present = {note for volume in volumes for note in volume.left}
        for known in (self._due, self.problems):
            for note in [note for note in known if note not in present]:
                del known[note]
        for volume in volumes:
            if volume.is_rebinding or not self._is_over(volume):
                continue
            for note in volume.left[:1]:
                is_kept = note.source in kept_nodes and not note.is_back
                if not is_kept and self._due.get(note, now) <= now:
                    yield volume, note

    def end(self, volume: NotedVolume, note: MoveNote) -> None:
        """Erase what is left of a volume, and remove its note; a problem is noted, not raised."""
        try:
            erase(self._context, note, volume)
            self._context.notes.remove(volume.name, note)
        except EXPECTED as error:
            text = text_of(error)
            self._due[note] = self._context.monotonic() + _AGAIN_SECONDS
            if self.problems.get(note) != text:
                _log.warning(
                    "what is left of %s on %s stays: %s", note.volume_id, note.source, text
                )
            self.problems[note] = text

    def _is_over(self, volume: NotedVolume) -> bool:
        try:
            created = datetime.fromisoformat(volume.created)
        except ValueError:
            return False
        if created.tzinfo is None:
            return False
        return self._context.clock() - created.timestamp() >= self._grace_seconds
