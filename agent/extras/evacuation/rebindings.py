"""Rebindings outside of a plan: the last steps of one, and one whose source node was deleted."""

import logging

from agent.extras.evacuation import evacuation_events as reasons
from agent.extras.evacuation.drive import Drive
from agent.extras.evacuation.evacuation_context import Context
from agent.extras.evacuation.move_notes import MoveNote, NotedVolume
from agent.extras.kubernetes.events import Subject
from agent.extras.kubernetes.rebinding import Place, Rebinding
from agent.extras.transfer.move import is_own, is_receiving

_log = logging.getLogger(__name__)


class RestOfRebinding:
    """The last steps of a rebinding; `run` is the work of a Drive."""

    def __init__(self, context: Context, note: MoveNote, place: Place) -> None:
        self._context, self._note, self._place = context, note, place

    def run(self, drive: Drive) -> None:
        """Take the steps that are left."""
        context, note = self._context, self._note
        rebinding = Rebinding(context.server, note.volume_id, self._place, left_node=note.source)
        rebinding.run(
            lambda _text: not drive.is_ending,
            lambda text: _log.info("%s: %s", self._note.volume_id, text),
        )


class RebindingOfLost:
    """Rebinds a claim whose volume the target has, after the source was lost."""

    def __init__(self, context: Context, volume: NotedVolume, note: MoveNote) -> None:
        self._context, self._volume, self._note = context, volume, note

    def run(self, drive: Drive) -> None:
        """Rebind the claim if the target has the volume as its own; else say that it waits.

        That the target has it proves that the source had let it go, as only then does the target
        get the word to finish it; or that an operator on the target has said that the source is
        lost.
        """
        note, context = self._note, self._context
        move = context.moves.move(note.volume_id, note.source, note.target)
        there_state = move.destination.status()
        if is_own(there_state) and there_state["received"] == note.volume_id:
            drive.require_wanted()
            place = Place(str(there_state["volume_id"]), note.target, context.driver_name)
            RestOfRebinding(context, note, place).run(drive)
        elif is_receiving(there_state) and there_state["received"] == note.volume_id:
            subject = Subject("PersistentVolume", "", self._volume.name, self._volume.uid)
            text = (
                f"node {note.source} was deleted while volume {note.volume_id} moved to"
                f" {note.target}, which cannot finish what it has received, and keeps it: the move"
                f" goes on if {note.source} comes back with its disks; if they are lost, see"
                " docs/evacuation.md, The source is lost during the move"
            )
            context.events.of(subject, reasons.WAITS, text)
