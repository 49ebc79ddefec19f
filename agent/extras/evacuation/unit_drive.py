"""Drive the move of one unit of volumes to its target, with the pods that use them.

1. Note the move at each PersistentVolume.
2. Copy each volume while it is in use, until what is left to send is little.
3. Evict the pods, and wait until no pod with a node uses the claims.
4. Hand over each volume once it is not in use.
5. Complete each volume on the target, then rebind its claim.

Each step asks the nodes and the API server what is so, and does what is left. So a drive of another
process, or of a second controller at the same time, takes the same steps again without harm. Once a
volume was handed over, the unit is driven to its end also if the evacuation is stopped: the pods
can start nowhere before all claims are rebound.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.core import errors
from agent.extras.evacuation import evacuation_events as reasons
from agent.extras.evacuation.drive import Drive, Unwanted, Wish
from agent.extras.evacuation.evacuation_context import EXPECTED, Context
from agent.extras.evacuation.evictions import UsingPod
from agent.extras.evacuation.move_notes import MoveNote, NotedVolume
from agent.extras.evacuation.plan import PlannedVolume, Unit
from agent.extras.evacuation.progress import Stage
from agent.extras.kubernetes.rebinding import Place, Rebinding
from agent.extras.transfer.move import Approach, Move, is_own, is_receiving, is_usable
from agent.extras.transfer.move import Progress as StreamProgress

_log = logging.getLogger(__name__)

# Number of rounds that may not become shorter before the writes count as faster than the transfer,
# and the factor by which a round must be smaller than the smallest one before it to be shorter.
_MOST_ROUNDS, _SHORTER = 10, 0.9
# Seconds between two rounds of a volume whose writes are faster than the transfer; also the age of
# the last round after which another is sent while pods are not evicted.
_FOLLOW_SECONDS = 300.0
# Seconds between two rounds otherwise, so that no loop is hot; until a refused eviction is
# requested again; and between two looks whether pods have ended and volumes are unused.
_PAUSE_SECONDS, _EVICTION_SECONDS, _LOOK_SECONDS = 1.0, 10.0, 2.0
# Seconds until the rebinding of the claims is rehearsed again that the API server would refuse.
_REHEARSE_SECONDS = 60.0
# Seconds between two Events about the progress of a volume.
_SAID_SECONDS = 600.0
# Number of looks after which it is a problem that a pod has not ended, or that a volume is in use
# although no pod uses it.
_MOST_LOOKS = 30
# Number of pods that may be made anew on the source after an eviction, although it is cordoned,
# before further ones are evicted only each _FOLLOW_SECONDS.
_MOST_RETURNS = 3


@dataclass
class _Moving:
    """A volume of the unit, and its move."""

    planned: PlannedVolume
    move: Move
    is_handed_over: bool = False
    # When the last round ended, of a monotonic clock; None before the first one.
    copied_seconds: float | None = None
    # The number of bytes of the smallest round, and the number of rounds since that was sent.
    least_bytes: int = 0
    long_rounds: int = 0
    # The number of rounds that were sent, and of those whose progress was shown.
    rounds: int = 0
    shown_rounds: int = 0
    said_seconds: float = field(default=float("-inf"))

    @property
    def is_outrun(self) -> bool:
        return self.long_rounds >= _MOST_ROUNDS


class UnitDrive:
    """The move of one unit from the node `source`; `run` is the work of a Drive.

    `wish` returns what is wanted now, by reading the request anew; it may raise the errors of the
    API server. `shown_node` is the node under which the progress is shown.
    """

    def __init__(
        self,
        context: Context,
        source: str,
        unit: Unit,
        wish: Callable[[], Wish],
        *,
        shown_node: str = "",
        cordon: Callable[[], None] = lambda: None,
    ) -> None:
        self._context, self._source, self.unit = context, source, unit
        self._wish, self._cordon = wish, cordon
        self._shown = shown_node or source
        # Since when no pod has used the volumes, of a monotonic clock; None while one does.
        self._unused_seconds: float | None = None
        # Whether the drive is to end; set when it has begun.
        self._is_ending: Callable[[], bool] = lambda: False
        # At how many looks each pod used the volumes, by its UID; how many of these pods were made
        # since the first look; and when one was evicted last, of a monotonic clock.
        self._seen = Counter[str]()
        self._returns = 0
        self._evicted_seconds = float("-inf")
        # Why a claim could not be rebound, and when that is asked again, of a monotonic clock.
        self._claims_problem, self._rehearse_seconds = "", float("-inf")
        # At how many looks in a row a volume was in use although no pod used it.
        self._idle_looks = 0
        self._volumes = [
            _Moving(planned, self._move_of(planned), _is_handed_over(planned))
            for planned in unit.volumes
        ]

    def _move_of(self, planned: PlannedVolume, replaces: str = "") -> Move:
        volume_id = planned.volume_id

        def show(progress: StreamProgress) -> None:
            self._show(volume_id, progress)

        return self._context.moves.move(
            volume_id,
            self._source,
            self.unit.target,
            device_class=planned.device_class,
            replaces=replaces,
            tell=lambda text: _log.info("%s: %s", volume_id, text),
            show=show,
            is_wanted=lambda: not self._is_ending(),
        )

    @property
    def _claims(self) -> frozenset[tuple[str, str]]:
        owners = (volume.persistent_volume for volume in self.unit.volumes)
        return frozenset((owner.claim_namespace, owner.claim_name) for owner in owners if owner)

    @property
    def _is_handed_over(self) -> bool:
        return any(volume.is_handed_over for volume in self._volumes)

    def tell(self, problem: str) -> None:
        """Show a problem in the progress and, if there is one, as an Event."""
        self._context.progress.unit(self._shown, self.unit.name, self._stage, problem)
        if problem:
            self._context.events.claim(self.unit.volumes[0], reasons.WAITS, problem)

    _stage = Stage.WAITING

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        self._context.progress.unit(self._shown, self.unit.name, stage)

    def run(self, drive: Drive) -> None:
        """Take the steps that are left. Raises Unwanted if the drive is to end."""
        self._is_ending = lambda: drive.is_ending
        self._require(drive)
        self._note()
        while not all(volume.is_handed_over for volume in self._volumes):
            self._copy(drive)
            if self._evict(drive):
                self._hand_over(drive)
        completed = [(volume, self._complete(volume)) for volume in self._volumes]
        places = [(volume, place) for volume, place in completed if place is not None]
        if len(places) < len(completed):
            # Copy again what was lost.
            self.run(drive)
            return
        # A pod may have been placed on the source since, where it waits for its volumes, and one
        # may be placed there after each eviction.
        if problem := self._evict_all(self._users()):
            self.tell(problem)
        self._enter(Stage.REBINDING)
        for volume, place in places:
            self._require(drive)
            self._note_target(volume)
            self._forget_left(volume)
            self._rebind(drive, volume, place)
        self._enter(Stage.MOVED)

    def _require(self, drive: Drive) -> None:
        """Raise Unwanted if the unit is not to be moved on."""
        drive.require_wanted()
        wish = self._wish()
        can_stop = not (self._is_handed_over or self.unit.is_torn)
        if wish is Wish.END or (wish is Wish.ONLY_IF_HANDED_OVER and can_stop):
            raise Unwanted

    def _note(self) -> None:
        """Note the move at each PersistentVolume, and clear the way on the target.

        What is left on the target of an earlier move of a volume by an evacuation is replaced, or
        deleted: the target cannot have the volume twice. What it has received by a move that was
        undone is deleted.
        """
        notes = self._context.notes
        for volume in self._volumes:
            owner, volume_id = volume.planned.persistent_volume, volume.planned.volume_id
            if owner is None or (noted := notes.find(owner.name)) is None:
                continue
            if noted.handle != volume_id:
                continue
            if noted.is_rebinding:
                raise errors.NotMoved(volume_id, "its claim is still being rebound after a move")
            notes.ensure(noted.name, MoveNote(self._source, volume_id, self.unit.target))
            if not volume.is_handed_over:
                _remove_undone(volume.move, volume_id)
                for note in noted.left:
                    if note.source == self.unit.target:
                        self._clear(volume, note, noted)

    def _clear(self, volume: _Moving, note: MoveNote, noted: NotedVolume) -> None:
        """Have what is left on the target by an earlier move be replaced by this one, or erase it.

        It is replaced, so that only what differs is sent, if both nodes say that this is possible,
        and if this move is the way back of that one. The note stays then, as long as it is under
        quarantine. Does nothing if it is being replaced already.

        The target may have it under another name than the volume will have there, as the name of a
        logical volume with a digest is not that of its copy. It is erased then.
        """
        planned, context = volume.planned, self._context
        earlier = context.moves.move(note.volume_id, note.source, note.target)
        there_state = volume.move.destination.status()
        if is_receiving(there_state):
            return
        if (replaces := there_state["replaceable"]) and note.target == self._source:
            is_same_class = there_state["device_class"] == planned.device_class
            move = self._move_of(planned, replaces)
            if is_same_class and move.source.begin(self.unit.target).replaces == replaces:
                earlier.source.drop(())
                volume.move = move
                return
        erase(context, note, noted)
        context.notes.remove(noted.name, note)

    def _forget_left(self, volume: _Moving) -> None:
        """Remove the note of what was left on the target: it is the volume itself by now."""
        planned, notes = volume.planned, self._context.notes
        owner = planned.persistent_volume
        noted = notes.find(owner.name) if owner is not None else None
        if noted is not None and noted.handle == planned.volume_id:
            after_move = noted.notes_after_move
            if tuple(after_move) != tuple(noted.notes):
                notes.write(noted, after_move)

    def _note_target(self, volume: _Moving) -> None:
        """Note again where a volume went that was handed over, before the note is copied.

        Another controller may have noted its own plan before its move was refused.
        """
        owner, volume_id = volume.planned.persistent_volume, volume.planned.volume_id
        if owner is not None and owner.handle == volume_id:
            note = MoveNote(self._source, volume_id, self.unit.target)
            self._context.notes.ensure(owner.name, note)

    # Copying

    def _copy(self, drive: Drive) -> None:
        """Send rounds of each volume until little is left to send of each."""
        self._enter(Stage.COPYING)
        for volume in self._volumes:
            if not volume.is_handed_over:
                self._approach(drive, volume)
        self._enter(Stage.CAUGHT_UP)

    def _approach(self, drive: Drive, volume: _Moving) -> None:
        planned, progress = volume.planned, self._context.progress
        while True:
            self._say_moving(volume)
            approach = volume.move.approach()
            now = self._context.monotonic()
            if approach.is_moved:
                volume.is_handed_over = True
                return
            if approach.rounds > volume.rounds:
                progress.end_round(self._shown, planned.volume_id)
            self._count(volume, approach)
            volume.copied_seconds = now
            if approach.is_caught_up:
                volume.long_rounds = volume.least_bytes = 0
                progress.volume(self._shown, planned.volume_id, Stage.CAUGHT_UP)
                return
            drive.require_wanted()
            if not volume.is_outrun:
                drive.wait(_PAUSE_SECONDS)
                continue
            text = (
                f"more is written to volume {planned.volume_id} than is sent to"
                f" {self.unit.target}: the last {volume.long_rounds} rounds did not become shorter,"
                f" the last one had {approach.changed_bytes} bytes; a round is sent each"
                f" {_FOLLOW_SECONDS:.0f} s. Raise background_bandwidth of both volume groups, or"
                " write less"
            )
            self._context.events.claim(planned, reasons.OUTRUN, text)
            progress.volume(self._shown, planned.volume_id, Stage.FOLLOWING, text)
            drive.wait(_FOLLOW_SECONDS)

    def _count(self, volume: _Moving, approach: Approach) -> None:
        """Count the rounds that did not become shorter."""
        volume.rounds = approach.rounds
        if not volume.least_bytes or approach.changed_bytes < _SHORTER * volume.least_bytes:
            volume.least_bytes, volume.long_rounds = max(1, approach.changed_bytes), 0
        else:
            volume.long_rounds += 1

    def _show(self, volume_id: str, shown: StreamProgress) -> None:
        """Show the progress of a stream."""
        progress = self._context.progress
        volume = next(one for one in self._volumes if one.planned.volume_id == volume_id)
        if volume.shown_rounds <= volume.rounds:
            volume.shown_rounds = volume.rounds + 1
            progress.begin_round(self._shown, volume_id, shown.size_bytes, shown.done_bytes)
        reached_bytes = shown.checked_bytes or shown.done_bytes
        progress.sent(self._shown, volume_id, reached_bytes, shown.data_bytes)
        self._say_moving(volume, shown)

    def _say_moving(self, volume: _Moving, shown: StreamProgress | None = None) -> None:
        now = self._context.monotonic()
        if now - volume.said_seconds < _SAID_SECONDS:
            return
        volume.said_seconds = now
        text = f"volume {volume.planned.volume_id} moves to {self.unit.target}"
        if shown is not None and shown.size_bytes:
            action = "reading again" if shown.checked_bytes else shown.action
            reached_bytes = shown.checked_bytes or shown.done_bytes
            text += f": {action}, {100 * reached_bytes // shown.size_bytes} % of the round"
        self._context.events.claim(volume.planned, reasons.MOVING, text)

    # The cut

    def _users(self) -> Sequence[UsingPod]:
        """Return the pods with a node that use the claims, and cannot use them after the move.

        A pod on the target uses a claim that was rebound by an earlier drive. The pods of the whole
        namespaces are listed only if none on the source uses the claims.
        """
        evictions = self._context.evictions
        pods = evictions.users(self._claims, self._source) or evictions.users(self._claims)
        if not self._is_handed_over:
            return pods
        return [pod for pod in pods if pod.node != self.unit.target]

    def _evict(self, drive: Drive) -> bool:
        """Evict the pods that use the claims, and wait until there are none.

        No pod is evicted while the target can start none, or a claim could not be rebound. False if
        so much time has passed that the volumes are to be copied again first.
        """
        self._cordon()
        while True:
            self._require(drive)
            why, pods = self._why_target_waits() or self._why_claims_stay(), self._users()
            if not (why or pods):
                if self._unused_seconds is None:
                    self._unused_seconds = self._context.monotonic()
                return True
            if pods and not self._is_handed_over:
                self._unused_seconds = None
            self._enter(Stage.CAUGHT_UP if why else Stage.EVICTING)
            problem = why or self._evict_all(pods)
            if problem:
                self.tell(problem)
            drive.wait(_EVICTION_SECONDS if problem else _LOOK_SECONDS)
            if self._is_stale():
                return False

    def _why_target_waits(self) -> str:
        """Return why no pod could be started on the target now; empty if one could.

        It may have been cordoned since the move began. Empty also once a volume was handed over: no
        pod can be started on the source then.
        """
        if self._is_handed_over:
            return ""
        target = self._context.nodes.find(self.unit.target)
        problem = "is deleted" if target is None else target.problem
        return problem and f"the move waits for node {self.unit.target}, which {problem}"

    def _why_claims_stay(self) -> str:
        """Return why a claim could not be rebound after the hand-over; empty if all could.

        Until it is rebound, no pod can use a volume that was handed over.
        """
        now = self._context.monotonic()
        if self._is_handed_over:
            return ""
        if now >= self._rehearse_seconds:
            problems = (self._rehearsal_problem(volume) for volume in self._volumes)
            self._claims_problem = next(filter(None, problems), "")
            seconds = _REHEARSE_SECONDS if self._claims_problem else _FOLLOW_SECONDS
            self._rehearse_seconds = now + seconds
        return self._claims_problem

    def _rehearsal_problem(self, volume: _Moving) -> str:
        there_state, context = volume.move.destination.status(), self._context
        try:
            place = Place(str(there_state["volume_id"]), self.unit.target, context.driver_name)
            Rebinding(context.server, volume.planned.volume_id, place).rehearse()
        except errors.NotRebound as error:
            return str(error)
        return ""

    def _evict_all(self, pods: Sequence[UsingPod]) -> str:
        """Request the evictions of pods; return what keeps them, empty if they should end soon.

        Raises NotMoved if a pod on another node uses a claim.
        """
        problem, now = "", self._context.monotonic()
        if self._seen:
            self._returns += sum(pod.uid not in self._seen for pod in pods)
        is_spared = (
            self._returns >= _MOST_RETURNS
            and not self._is_handed_over
            and now - self._evicted_seconds < _FOLLOW_SECONDS
        )
        for pod in pods:
            self._seen[pod.uid] += 1
            if pod.is_being_deleted:
                if self._seen[pod.uid] > _MOST_LOOKS:
                    problem = (
                        f"pod {pod} is being deleted, and does not end: see its finalizers, and"
                        f" whether kubelet on {pod.node} answers"
                    )
                continue
            if pod.node != self._source:
                raise errors.NotMoved(
                    self.unit.name, f"pod {pod} on node {pod.node} uses its claim; end that pod"
                )
            if self._returns >= _MOST_RETURNS:
                problem = (
                    f"pods are made anew on {self._source} after each eviction, although it is"
                    f" cordoned; now it is pod {pod}: see its tolerations and what sets its"
                    " nodeName, or scale its controller to no pods. The next one is evicted"
                    f" {_FOLLOW_SECONDS:.0f} s after the last"
                )
            if is_spared:
                continue
            if why := self._context.evictions.evict(pod):
                problem = f"pod {pod} cannot be evicted yet: {why}; it is tried again"
                self._context.events.of(pod.subject, reasons.EVICTION_REFUSED, problem)
            else:
                self._evicted_seconds = now
        return problem

    def _is_stale(self) -> bool:
        """Return whether a volume that is not handed over was last copied a while ago."""
        oldest = self._context.monotonic() - _FOLLOW_SECONDS
        return any(
            not volume.is_handed_over
            and (volume.copied_seconds is None or volume.copied_seconds < oldest)
            for volume in self._volumes
        )

    def _hand_over(self, drive: Drive) -> None:
        """Hand over each volume that is not in use; return if one is still in use after a while.

        None is handed over if a claim could not be rebound by now, as after a VolumeSnapshot of it
        was begun; `_evict` then says so.
        """
        self._rehearse_seconds = float("-inf")
        if self._why_claims_stay():
            return
        for _ in range(_MOST_LOOKS):
            for volume in self._volumes:
                if not volume.is_handed_over:
                    # Read the request anew right before the step that cannot be taken back so
                    # easily.
                    self._require(drive)
                    self._enter(Stage.HANDING_OVER)
                    volume.is_handed_over = volume.move.hand_over()
            waiting = next((one for one in self._volumes if not one.is_handed_over), None)
            if waiting is None:
                return
            if self._users():
                self._idle_looks = 0
                return
            if self._is_stale():
                return
            self._idle_looks += 1
            if self._idle_looks >= _MOST_LOOKS:
                volume_id = waiting.planned.volume_id
                self.tell(f"volume {volume_id} is in use on {self._source}, though no pod uses it")
                drive.wait(_EVICTION_SECONDS)
            elif self._idle_looks > 1:
                drive.wait(_LOOK_SECONDS)

    def _complete(self, volume: _Moving) -> Place | None:
        """Finish a volume on the target; return where it is now, None if it is the source's again.

        That is so if its copy on the target was lost before it was used.
        """
        try:
            there = volume.move.complete()
        except errors.NotMoved:
            if not self._was_lost(volume):
                raise
            volume.is_handed_over = False
            return None
        return Place(str(there["volume_id"]), self.unit.target, self._context.driver_name)

    def _was_lost(self, volume: _Moving) -> bool:
        """Take a volume back whose copy on the target was removed before it could be used.

        That is certain if all nodes answer that they have no volume of that name, and no claim was
        rebound to it. Returns whether it was taken back.
        """
        planned = volume.planned
        owner, claim = planned.persistent_volume, planned.claim
        if owner is None or claim is None or claim.volume != owner.name:
            return False
        if not self._context.is_nowhere(planned.volume_id, self._source):
            return False
        volume.move.undo(confirmed=lambda _text: False, is_nowhere=lambda _text: True)
        _log.warning("the copy of %s was lost: it is taken back", planned.volume_id)
        return True

    # The claims

    def _rebind(self, drive: Drive, volume: _Moving, place: Place) -> None:
        """Rebind the claim of a volume, and say where it is by then."""
        planned, context = volume.planned, self._context

        def report(text: str) -> None:
            context.events.claim(planned, reasons.REBINDING, text)

        rebinding = Rebinding(context.server, planned.volume_id, place, left_node=self._source)
        try:
            rebinding.run(lambda _text: not drive.is_ending, report)
        except errors.NotConfirmed:
            raise Unwanted from None
        except errors.ClaimEnded as error:
            # The volume has lost its claim, and no other PersistentVolume is left: it is taken
            # back as any other whose claim was deleted.
            _log.info("%s: %s", planned.volume_id, error)
            rebinding.undo(lambda _text: True, report)
            raise Unwanted from None
        owner = planned.persistent_volume
        if owner is not None:
            subject = context.claim_subject(owner.claim_namespace, owner.claim_name)
            if subject is not None:
                text = f"its volume moved from {self._source} to {place.node}: {place.handle}"
                if self._unused_seconds is not None:
                    seconds = context.monotonic() - self._unused_seconds
                    text += f"; this took {seconds:.0f} s in which no pod could use it"
                context.events.of(subject, reasons.MOVED, text)


def erase(context: Context, note: MoveNote, volume: NotedVolume) -> None:
    """Delete what is left of a volume on the node that it moved from; do nothing if that is gone.

    The target of that move is asked first. If it has moved the volume on and has erased its rest,
    the node is asked that has the volume now. Raises what Move.finish raises, such as NotMoved if
    neither has the volume as its own.
    """
    move = context.moves.move(note.volume_id, note.source, note.target)

    def is_elsewhere() -> bool:
        present = context.moves.move(note.volume_id, note.source, volume.node).destination.status()
        return is_own(present) and bool(present["volume_id"] == volume.handle)

    try:
        target = move.source.state().node
    except EXPECTED as error:
        if is_not_found(error):
            return
        raise
    if target not in ("", note.target):
        # The node itself knows best where the volume went (_note_target).
        move = context.moves.move(note.volume_id, note.source, target)
    move.finish(is_elsewhere)
    context.events.node(
        note.source, reasons.ERASED, f"what was left of volume {note.volume_id} is erased"
    )


def _remove_undone(move: Move, volume_id: str) -> None:
    """Remove what a target has received of a volume by a move that its source has forgotten.

    It is left if the target's volume group was missing when that move was undone. The target can
    never finish it: the source had the word, and has forgotten it.
    """
    # Ask the target first: a move by which it has received something was begun before.
    there_state = move.destination.status()
    if not is_receiving(there_state) or there_state["received"] != volume_id:
        return
    own_state = move.source.state()
    if is_usable(own_state) and own_state.release != there_state["release"]:
        move.destination.abort(there_state["release"])


def is_not_found(error: BaseException) -> bool:
    """Return whether an error is a node's answer that it has no such volume."""
    code = getattr(error, "code", None)
    return callable(code) and getattr(code(), "name", "") == "NOT_FOUND"


def _is_handed_over(planned: PlannedVolume) -> bool:
    return planned.move is not None and planned.move.is_handed_over
