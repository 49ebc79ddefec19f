"""Take back a volume whose claim is not rebound yet: undo its move, as far as it went."""

import logging
from collections.abc import Callable

from agent.core import errors
from agent.extras.evacuation import evacuation_events as reasons
from agent.extras.evacuation.drive import Drive
from agent.extras.evacuation.evacuation_context import EXPECTED, Context
from agent.extras.evacuation.move_notes import MoveNote, NotedVolume
from agent.extras.evacuation.unit_drive import is_not_found
from agent.extras.kubernetes.rebinding import Place, Rebinding
from agent.extras.transfer.move import ABSENT, Move, is_moved, is_receiving

_log = logging.getLogger(__name__)


class TakeBack:
    """Undoes the move of one volume; `run` is the work of a Drive.

    `volume` is the PersistentVolume with the note; None if it does not exist any more.
    `is_wanted` reads the request anew, and returns whether it still asks for that.
    """

    def __init__(
        self,
        context: Context,
        volume: NotedVolume | None,
        note: MoveNote,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._context, self._volume, self._note = context, volume, note
        self._is_wanted = is_wanted

    def run(self, drive: Drive) -> None:
        """Undo the rebinding, then the move; remove the note at the end.

        If the claim has the new PersistentVolume already, or is between both, the rebinding is
        completed instead. The volume is then moved back like any other.
        """
        context, note = self._context, self._note
        move = context.moves.move(note.volume_id, note.source, note.target)
        drive.require_wanted()
        if not self._is_wanted():
            return
        try:
            own_state = move.source.state()
        except EXPECTED as error:
            if not is_not_found(error):
                raise
            # The volume was deleted with its claim.
            self._abort(move)
            self._forget()
            return
        # The node itself knows best where the volume goes: another controller may have noted a plan
        # before its move was refused.
        target = own_state.node or note.target
        move = context.moves.move(note.volume_id, note.source, target)
        if own_state.node and not is_moved(own_state) and context.nodes.find(target) is None:
            # The target was deleted. It can never finish what it has received.
            move.take_back(own_state.release, only_begun=True)
        elif own_state.node:
            there_state = move.destination.status()
            is_theirs = there_state["release"] == own_state.release
            # No claim is rebound before its volume was handed over.
            if is_moved(own_state) and there_state["state"] != ABSENT and is_theirs:
                place = Place(str(there_state["volume_id"]), target, context.driver_name)
                if not self._undo_rebinding(move, place):
                    return
            move.undo(confirmed=self._is_unused, is_nowhere=self._is_nowhere)
        self._forget()
        text = f"volume {note.volume_id} is this node's again"
        context.events.node(note.source, reasons.TAKEN_BACK, text)

    def _forget(self) -> None:
        if self._volume is not None:
            self._context.notes.remove(self._volume.name, self._note)

    def _abort(self, move: Move) -> None:
        """Remove what the target has received of a volume that does not exist any more."""
        there_state = move.destination.status()
        is_of_it = there_state["received"] == self._note.volume_id
        if is_of_it and is_receiving(there_state):
            move.destination.abort(there_state["release"])

    def _undo_rebinding(self, move: Move, place: Place) -> bool:
        """Undo the steps of a rebinding; if it is too late for that, complete it.

        Returns whether the claim has the old PersistentVolume.
        """
        context, note = self._context, self._note
        rebinding = Rebinding(context.server, note.volume_id, place, left_node=note.source)
        try:
            rebinding.undo(_yes, self._report)
        except errors.NotRebound as error:
            _log.info("the rebinding of %s is completed: %s", self._note.volume_id, error)
            move.complete()
            self._evict_waiting()
            rebinding.run(_yes, self._report)
            return False
        return True

    def _evict_waiting(self) -> None:
        """Evict the pods that were placed on the source, where they wait for the volume.

        The claim, which is being deleted, does not end before them.
        """
        evictions, volume = self._context.evictions, self._volume
        claims = [volume.claim] if volume is not None and all(volume.claim) else []
        for pod in evictions.users(claims, self._note.source):
            if not pod.is_being_deleted and (why := evictions.evict(pod)):
                _log.info("pod %s cannot be evicted yet: %s", pod, why)

    def _report(self, text: str) -> None:
        _log.info("%s: %s", self._note.volume_id, text)

    def _is_unused(self, _question: str) -> bool:
        """Return True: no claim was rebound to the copy there, so no pod has written to it."""
        return True

    def _is_nowhere(self, _question: str) -> bool:
        return self._context.is_nowhere(self._note.volume_id, self._note.source)


class VanishedTakeBack(TakeBack):
    """Removes what is left of a move whose PersistentVolume was deleted."""

    def __init__(self, context: Context, note: MoveNote) -> None:
        super().__init__(context, None, note, lambda: True)

    def run(self, drive: Drive) -> None:
        """Take the volume back, unless it was handed over: no object says whose it is then.

        Does nothing if a PersistentVolume names the volume, on any node.
        """
        drive.require_wanted()
        context, note = self._context, self._note
        if context.is_named(note.volume_id):
            return
        move = context.moves.move(note.volume_id, note.source, note.target)
        try:
            is_handed_over = is_moved(move.source.state())
        except EXPECTED as error:
            if not is_not_found(error):
                raise
            is_handed_over = False
        if not is_handed_over:
            super().run(drive)


def _yes(_question: str) -> bool:
    return True
