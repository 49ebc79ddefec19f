"""End the quarantine of what moved volumes left on evacuated nodes, after the time of grace.

The grace is counted from the creation of the PersistentVolume that the volume has now. The API
server wrote that time, and its clock may differ from this one. What is left is erased only after
the target has answered that it has the volume as its own.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from agent.extras.evacuation.evacuation_context import EXPECTED, Context, text_of
from agent.extras.evacuation.move_notes import MoveNote, NotedVolume
from agent.extras.evacuation.unit_drive import erase

_log = logging.getLogger(__name__)

# Seconds until the end of a quarantine is tried again whose answer was lost or that a node refused,
# such as one that has snapshots of the volume; doubled with each further error up to the second
# number.
_AGAIN_SECONDS, _LONGEST_SECONDS = 10.0, 600.0


@dataclass(frozen=True)
class _Stays:
    """What is left of a volume, and stays for now, because of `problem`.

    Its erasure is tried again at `due_seconds` of a monotonic clock, and `wait_seconds` after a
    further error.
    """

    problem: str
    due_seconds: float
    wait_seconds: float


class Quarantine:
    """Finds and ends quarantines."""

    def __init__(self, context: Context, grace_seconds: float) -> None:
        self._context, self._grace_seconds = context, grace_seconds
        # Drives write to it while the evacuator reads it, so each reader copies it by one call.
        self._stays: dict[MoveNote, _Stays] = {}

    @property
    def problems(self) -> Mapping[MoveNote, str]:
        """Why quarantines could not be ended so far."""
        return {note: stays.problem for note, stays in list(self._stays.items())}

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
        for note in set(self._stays) - present:
            del self._stays[note]
        for volume in volumes:
            if volume.is_rebinding or not self._is_over(volume):
                continue
            for note in volume.left[:1]:
                is_kept = note.source in kept_nodes and not note.is_back
                stays = self._stays.get(note)
                if not is_kept and (stays is None or stays.due_seconds <= now):
                    yield volume, note

    def end(self, volume: NotedVolume, note: MoveNote) -> None:
        """Erase what is left of a volume, and remove its note; a problem is noted, not raised."""
        try:
            erase(self._context, note, volume)
            self._context.notes.remove(volume.name, note)
        except EXPECTED as error:
            known, text = self._stays.get(note), text_of(error)
            wait_seconds = known.wait_seconds if known else _AGAIN_SECONDS
            due_seconds = self._context.monotonic() + wait_seconds
            longer_seconds = min(2 * wait_seconds, _LONGEST_SECONDS)
            self._stays[note] = _Stays(text, due_seconds, longer_seconds)
            if known is None or known.problem != text:
                _log.warning(
                    "what is left of %s on %s stays: %s", note.volume_id, note.source, text
                )

    def _is_over(self, volume: NotedVolume) -> bool:
        try:
            created = datetime.fromisoformat(volume.created)
        except ValueError:
            return False
        if created.tzinfo is None:
            return False
        return self._context.clock() - created.timestamp() >= self._grace_seconds
