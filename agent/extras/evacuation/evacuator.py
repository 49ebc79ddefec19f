"""Evacuate nodes: a periodic task of the controller that carries out the requests on Nodes.

Each look reads the Nodes. For a Node with a request to evacuate it: cordon it, read the cluster,
plan, and drive up to AT_ONCE units at the same time, each in a thread. For a Node with the request
`stop`, or without one, only units that were handed over in part are driven to their end. For the
request `undo`: take back what is not rebound, and move back what is.

Nothing is stored but tags on the nodes and the cluster's own objects, from which another controller
goes on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from agent.daemon.extra import Extra, Gauge
from agent.extras.controller.node_moves import NodeMoves
from agent.extras.controller.nodes import Nodes
from agent.extras.evacuation import evacuation_events as reasons
from agent.extras.evacuation import evacuation_metrics
from agent.extras.evacuation.cluster_view import ClusterView
from agent.extras.evacuation.drive import Drive, Wish
from agent.extras.evacuation.evacuated_nodes import EvacuatedNode
from agent.extras.evacuation.evacuation_context import EXPECTED, Context, text_of
from agent.extras.evacuation.evacuation_request import BadRequest, Kind, Request
from agent.extras.evacuation.move_notes import MoveNote, NotedVolume
from agent.extras.evacuation.plan import Plan, PlannedVolume, Unit, View, plan
from agent.extras.evacuation.progress import AT_ONCE, Progress, Stage
from agent.extras.evacuation.quarantine import Quarantine
from agent.extras.evacuation.rebindings import RebindingOfLost, RestOfRebinding
from agent.extras.evacuation.take_back import TakeBack, VanishedTakeBack
from agent.extras.evacuation.unit_drive import UnitDrive
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import Lists
from agent.extras.kubernetes.rebinding import Place
from agent.settings.settings import Config
from agent.work.background import PeriodicTask
from mount import command
from mount.text import counted

_log = logging.getLogger(__name__)

# Seconds between two looks, and from the start of the task to the first one: nodes enrol meanwhile.
_LOOK_SECONDS, _FIRST_SECONDS = 10.0, 15.0
# Seconds between two plans for a node, and between two looks at the notes of all PersistentVolumes.
_PLAN_SECONDS = 60.0
# Seconds between two plans for a node that has nothing left to move and on which nothing stays.
# Each plan lists all pods of the cluster, in many requests.
_IDLE_SECONDS = 600.0
# Seconds for which an undo must have been requested before it begins. Another controller, which is
# ending, may take a step of the evacuation meanwhile.
_SETTLE_SECONDS = 60.0


@dataclass
class _Known:
    """What this process knows of a node with a request, or with moves that were begun."""

    kind: str = ""
    # When the request was first seen, and when the node was planned last; of a monotonic clock.
    since: float = 0.0
    planned: float = float("-inf")
    drives: list[Drive] = field(default_factory=list)
    is_started: bool = False
    # Whether the last plan had no volume at all.
    is_idle: bool = False


class Evacuator:
    """Carries out the requests; `look` is used by one thread at a time."""

    def __init__(
        self, context: Context, view: Callable[[str, Sequence[str]], View], grace_seconds: float
    ) -> None:
        """Make an evacuator.

        `view` reads the cluster for the evacuation of a node, with the nodes that may be targets
        (ClusterView.view). `grace_seconds` is the time of quarantine.
        """
        self._context, self._view = context, view
        self._quarantine = Quarantine(context, grace_seconds)
        self._known: dict[str, _Known] = {}
        self._noted: Sequence[NotedVolume] = ()
        self._noted_seconds = float("-inf")
        self._others: list[Drive] = []
        # The moves that no PersistentVolume notes any more, or not yet; taken back if it is gone.
        self._vanished: set[MoveNote] = set()

    def end(self) -> None:
        """Have all drives end before their next steps."""
        for drive in self._drives():
            drive.end()

    def stand_by(self) -> None:
        """End all drives, and forget all that is known: another process evacuates the nodes."""
        self.end()
        for name in self._known:
            self._context.progress.end(name, forget=True)
        # A later look begins no drive for the volumes of those that are still ending.
        self._others = [drive for drive in self._drives() if not drive.is_over]
        self._known.clear()
        self._vanished.clear()
        self._noted, self._noted_seconds = (), float("-inf")

    @property
    def is_idle(self) -> bool:
        """Whether no drive is in progress."""
        return all(drive.is_over for drive in self._drives())

    def _drives(self) -> list[Drive]:
        drives = [drive for known in self._known.values() for drive in known.drives]
        return [*drives, *self._others]

    def look(self) -> None:
        """Read the requests, and begin and end what they ask for.

        Waits for the API server and for nodes. Raises ClusterSilent if the API server does not list
        its Nodes; all other problems are shown in the progress.
        """
        nodes = {node.name: node for node in self._context.nodes.read()}
        kinds = {name: _kind(node) for name, node in nodes.items()}
        now = self._context.monotonic()
        is_changed = self._note_kinds(kinds, now)
        begun = self._begun()
        have_ended = self._forget_ended()
        if is_changed or have_ended or now - self._noted_seconds >= _PLAN_SECONDS:
            self._read_notes(begun)
            self._noted_seconds = now
            self._finish_rebindings()
            self._take_back_vanished()
            self._rebind_handed_over(nodes)
            undone = [name for name, kind in kinds.items() if kind == Kind.UNDO]
            self._end_quarantines(undone)
        cordons = {node.cordoned_for for node in nodes.values()} - {""}
        for name in sorted(kinds.keys() | self._known.keys() | cordons):
            node = nodes.get(name)
            try:
                if node is None:
                    self._end_deleted(name, nodes)
                    continue
                self._carry_out(node, nodes)
                self._context.progress.problem(name, self._problem_of(name))
            except EXPECTED as error:
                self._context.progress.problem(name, text_of(error))
                _log.info("the evacuation of node %s waits: %s", name, text_of(error))

    def _begun(self) -> Set[MoveNote]:
        """Return the moves that are under way by what this process knows, also of ended drives."""
        driven = {
            MoveNote(drive.source, volume_id, drive.target, is_back=drive.is_back)
            for drive in self._drives()
            if isinstance(drive, _UnitOf)
            for volume_id in drive.volume_ids
        }
        return driven.union(self._under_way())

    def _read_notes(self, begun: Set[MoveNote]) -> None:
        """Read the notes of all PersistentVolumes, and find those that were deleted meanwhile.

        `begun` are the moves that were under way before. The volume of a claim that is deleted is
        deleted, too, and its PersistentVolume with the note. What the target has received by then
        is known to this process alone.
        """
        self._noted = self._context.notes.read()
        self._vanished |= begun - {note for volume in self._noted for note in volume.notes}

    def _note_kinds(self, kinds: Mapping[str, str], now: float) -> bool:
        """Note what is requested for each node; return whether that has changed."""
        is_changed = False
        # A Node that was deleted requests nothing.
        for name in sorted(kinds.keys() | self._known.keys()):
            kind, known = kinds.get(name, ""), self._known.get(name)
            if known is None and kind:
                known = self._known[name] = _Known()
            if known is not None and known.kind != kind:
                known.kind, known.since, known.planned = kind, now, float("-inf")
                known.is_idle = False
                known.is_started, is_changed = False, True
        return is_changed

    def _forget_ended(self) -> bool:
        """Forget the drives that have ended; return whether there were any."""
        has_ended = False
        for known in self._known.values():
            running = [drive for drive in known.drives if not drive.is_over]
            if len(running) < len(known.drives):
                known.drives, known.planned, has_ended = running, float("-inf"), True
        running = [drive for drive in self._others if not drive.is_over]
        has_ended = has_ended or len(running) < len(self._others)
        self._others = running
        return has_ended

    def _moving(self) -> Sequence[tuple[NotedVolume, MoveNote]]:
        """Return the volumes whose moves are under way, with the notes of these."""
        return [(volume, note) for volume in self._noted if (note := volume.under_way)]

    def _under_way(self) -> Iterable[MoveNote]:
        return (note for _, note in self._moving())

    def _kind_of(self, name: str) -> str:
        """Return the kind of the request on a Node; empty without one."""
        known = self._known.get(name)
        return known.kind if known is not None else ""

    def _busy(self) -> frozenset[str]:
        """Return the ids of the volumes that a drive works for."""
        return frozenset[str]().union(
            *(drive.volume_ids for drive in self._drives() if not drive.is_over)
        )

    def _problem_of(self, name: str) -> str:
        """Return the problem of the evacuation of a node as a whole; empty without one.

        That is the problem of work for the node that is no unit's, or of what is under quarantine.
        """
        of_drives = [
            drive.problem for drive in self._drives() if drive.node == name and not drive.is_over
        ]
        problems = self._quarantine.problems
        of_quarantine = [text for note, text in problems.items() if note.source == name]
        return next(filter(None, (*of_drives, *of_quarantine)), "")

    def _carry_out(self, node: EvacuatedNode, nodes: Mapping[str, EvacuatedNode]) -> None:
        """Carry out the request of a node, or what is left to do without one."""
        known = self._known.setdefault(node.name, _Known(since=self._context.monotonic()))
        request = node.request
        if isinstance(request, BadRequest):
            # The same as stop, so that a claim between both nodes is rebound.
            self._context.events.node(node.name, reasons.REFUSED, str(request))
            self._complete_only(node, known, Request(Kind.STOP), nodes)
            self._uncordon(node.name, nodes)
            raise request
        if request is not None and request.kind is Kind.UNDO:
            self._undo(node, known, nodes)
        elif request is not None and request.kind is Kind.EVACUATE:
            self._evacuate(node, known, request, nodes)
        else:
            self._complete_only(node, known, request, nodes)
        self._uncordon(node.name, nodes)

    def _end_deleted(self, name: str, nodes: Mapping[str, EvacuatedNode]) -> None:
        """Forget the request of a Node that was deleted, and lift the cordons set for it."""
        drives = self._known.get(name, _Known()).drives
        for drive in drives:
            drive.end()
        if all(drive.is_over for drive in drives):
            self._uncordon(name, nodes)
            self._known.pop(name, None)
            self._context.progress.end(name, forget=True)

    def _is_due(self, known: _Known) -> bool:
        now = self._context.monotonic()
        if now - known.planned < (_IDLE_SECONDS if known.is_idle else _PLAN_SECONDS):
            return False
        known.planned = now
        return True

    # Evacuating

    def _evacuate(
        self,
        node: EvacuatedNode,
        known: _Known,
        request: Request,
        nodes: Mapping[str, EvacuatedNode],
    ) -> None:
        # Take over a cordon that was set for the undo of another node, which will not lift it.
        if node.is_schedulable or node.cordoned_for not in ("", node.name):
            self._context.nodes.cordon(node.name, node.name)
        if not known.is_started:
            text = f"its volumes move to {', '.join(request.to) or 'other nodes'}: {request.text}"
            self._context.events.node(node.name, reasons.STARTED, text)
            self._context.progress.begin(node.name, str(Kind.EVACUATE))
            known.is_started = True
        if not self._is_due(known):
            return
        known.is_idle = False
        made = self._plan(node.name, request)
        self._context.progress.begin(node.name, str(Kind.EVACUATE), made)
        self._drive(node.name, node.name, known, made.going, Kind.EVACUATE)
        self._say_staying(made.staying)
        coming = [
            (volume, note)
            for volume, note in self._moving()
            if note.target == node.name
            and self._kind_of(note.source) not in (Kind.EVACUATE, Kind.UNDO)
        ]
        if self._context.monotonic() - known.since >= _SETTLE_SECONDS:
            # An undo of this evacuation has begun to move them back, and was given up.
            self._take_back(node.name, known, coming, Kind.EVACUATE)
        self._take_back_abandoned(node.name, known, made, nodes)
        is_rebinding = any(
            volume.is_rebinding and note.source == node.name
            for volume in self._noted
            for note in volume.notes
        )
        if not (
            made.going or coming or is_rebinding or any(not drive.is_over for drive in known.drives)
        ):
            count = sum(len(unit.volumes) for unit in made.staying)
            text = f"nothing is left to move; on the node stays: {counted(count, 'volume')}"
            self._context.events.node(node.name, reasons.FINISHED, text)
            self._context.progress.end(node.name)
            known.is_idle = not made.staying

    def _plan(self, name: str, request: Request) -> Plan:
        return plan(self._view(name, request.to), request.to, force=request.force)

    def _complete_only(
        self,
        node: EvacuatedNode,
        known: _Known,
        request: Request | None,
        nodes: Mapping[str, EvacuatedNode],
    ) -> None:
        """End what may end, and drive units that were handed over in part to their end.

        So are those of a pod whose other volume is on the target, as after an undo that was
        stopped.
        """
        kind = str(Kind.STOP)
        if request is not None and not known.is_started:
            self._context.progress.begin(node.name, kind)
            known.is_started = True
        notes = [
            note
            for note in self._under_way()
            if note.source == node.name
            and self._kind_of(note.target) != Kind.EVACUATE
            and not self._is_move_back(note)
        ]
        if not notes:
            if all(drive.is_over for drive in known.drives):
                if request is None:
                    self._context.progress.end(node.name, forget=True)
                    self._known.pop(node.name, None)
                else:
                    self._context.progress.end(node.name)
            return
        if not self._is_due(known):
            return
        made = self._plan(node.name, Request())
        units, stuck = (
            [
                unit
                for unit in planned
                if unit.is_torn
                or any(volume.move and volume.move.is_handed_over for volume in unit.volumes)
            ]
            for planned in (made.going, made.staying)
        )
        if units or stuck:
            shown = Plan(node.name, tuple(units), tuple(stuck))
            self._context.progress.begin(node.name, kind, shown)
        self._say_staying(stuck)
        self._drive(node.name, node.name, known, units, Kind.STOP)
        self._take_back_abandoned(node.name, known, made, nodes)

    def _say_staying(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for volume in unit.volumes:
                self._context.events.claim(volume, reasons.STAYS, unit.reason)

    def _drive(
        self,
        source: str,
        asking: str,
        known: _Known,
        units: Sequence[Unit],
        kind: Kind,
        *,
        cordon: bool = False,
    ) -> None:
        """Begin drives of units from `source`, for the request on the Node `asking`.

        Drives of units that are planned otherwise by now are ended first.
        """
        wanted = {(_ids(unit), unit.target) for unit in units}
        running = [drive for drive in known.drives if not drive.is_over]
        for drive in running:
            if not isinstance(drive, _UnitOf) or drive.source != source:
                continue
            if (drive.volume_ids, drive.target) not in wanted:
                drive.end()
        for unit in units:
            if len(running) >= AT_ONCE:
                return
            if _ids(unit) & self._busy():
                continue
            work = UnitDrive(
                self._context,
                source,
                unit,
                lambda: self._wish(asking, kind),
                shown_node=asking,
                cordon=(lambda: self._cordon(source, asking)) if cordon else lambda: None,
            )
            drive = _UnitOf(self._context, unit.name, _ids(unit), tell=work.tell)
            drive.source, drive.target = source, unit.target
            drive.is_back = kind is Kind.UNDO
            known.drives.append(drive)
            running.append(drive)
            drive.start(work.run)

    def _wish(self, asking: str, kind: Kind) -> Wish:
        """Return what is wanted of a unit that is driven for the request on a Node, as of now.

        A request that has changed to `stop` lets a unit go on that was handed over in part, but an
        undo ends the drive of an evacuation, and the other way round.
        """
        found = self._context.nodes.find(asking)
        now = _kind(found) if found is not None else ""
        if now == kind:
            return Wish.GO if kind is not Kind.STOP else Wish.ONLY_IF_HANDED_OVER
        if Kind.UNDO in (now, kind):
            # An undo that was stopped leaves no volume between both nodes either.
            is_stopped = kind is Kind.UNDO and now in ("", Kind.STOP)
            return Wish.ONLY_IF_HANDED_OVER if is_stopped else Wish.END
        return Wish.ONLY_IF_HANDED_OVER

    def _cordon(self, name: str, asking: str) -> None:
        """Let no further pods onto a node that is evacuated for the request of another Node."""
        found = self._context.nodes.find(name)
        if found is not None and found.is_schedulable:
            self._context.nodes.cordon(name, asking)

    def _uncordon(self, name: str, nodes: Mapping[str, EvacuatedNode]) -> None:
        """Lift the cordons that an undo set on other nodes, once it has nothing left to move.

        `name` is that of the Node whose request it was; the Node may have been deleted since.
        """
        if any(not drive.is_over for drive in self._known.get(name, _Known()).drives):
            return
        if any(note.target == name and self._is_move_back(note) for note in self._under_way()):
            return
        node = nodes.get(name)
        if node and node.request is None and node.cordoned_for == name and node.is_schedulable:
            self._context.nodes.forget(name)
        for other in nodes.values():
            if other.cordoned_for != name or other.name == name:
                continue
            if isinstance(other.request, Request) and other.request.kind is Kind.EVACUATE:
                continue
            self._context.nodes.uncordon(other.name)

    # Rebindings that only their last steps are missing of

    def _finish_rebindings(self) -> None:
        """Take the last steps of rebindings that cannot be undone any more.

        The claim is bound to the new PersistentVolume, or the old one is gone.
        """
        handles = {volume.handle for volume in self._noted}
        busy = self._busy()
        for volume in self._noted:
            if not volume.is_rebinding or not volume.left:
                continue
            note = volume.left[-1]
            if note.volume_id in busy or (note.volume_id in handles and not volume.is_bound):
                continue
            place = Place(volume.handle, note.target, self._context.driver_name)
            drive = Drive(
                self._context,
                note.volume_id,
                frozenset({note.volume_id}),
                node=note.source,
            )
            self._others.append(drive)
            drive.start(RestOfRebinding(self._context, note, place).run)

    def _rebind_handed_over(self, nodes: Mapping[str, EvacuatedNode]) -> None:
        """Rebind the claims of volumes that their targets have, and whose sources were deleted.

        No plan can be made for a source that is not there any more.
        """
        for volume, note in self._moving():
            if note.source in nodes or note.volume_id in self._busy():
                continue
            drive = Drive(
                self._context, note.volume_id, frozenset({note.volume_id}), node=note.target
            )
            self._others.append(drive)
            drive.start(RebindingOfLost(self._context, volume, note).run)

    def _end_quarantines(self, undone: Sequence[str]) -> None:
        """End quarantines whose time is over, a few at once, but for nodes that are undone."""
        for volume, note in self._quarantine.due(self._noted, undone):
            erasing = sum(
                isinstance(drive, _Erasure) and not drive.is_over for drive in self._others
            )
            if erasing >= AT_ONCE:
                return
            if {note.volume_id, volume.handle} & self._busy():
                continue
            drive = _Erasure(
                self._context, note.volume_id, frozenset({note.volume_id}), tell=_log.info
            )
            self._others.append(drive)
            drive.start(partial(self._end_quarantine, volume, note))

    def _end_quarantine(self, volume: NotedVolume, note: MoveNote, _drive: Drive) -> None:
        self._quarantine.end(volume, note)

    # Undoing

    def _is_move_back(self, note: MoveNote) -> bool:
        """Return whether a move that is under way is driven by the undo of its target."""
        return note.is_back and self._kind_of(note.target) == Kind.UNDO

    def _home_of(self, volume: NotedVolume) -> str:
        """Return the node to which the undo of an evacuation moves a volume; empty if none does.

        If it left several nodes that are undone, it is the first of them: the volumes of a pod,
        which were on one node then, are on one node again.
        """
        left = (note.source for note in volume.left if not note.is_back)
        return next((name for name in left if self._kind_of(name) == Kind.UNDO), "")

    def _undo(self, node: EvacuatedNode, known: _Known, nodes: Mapping[str, EvacuatedNode]) -> None:
        """Take back what is not rebound, and move back what is."""
        name, context = node.name, self._context
        if not known.is_started:
            context.progress.begin(name, str(Kind.UNDO))
            known.is_started = True
        evacuating = [
            drive
            for drive in known.drives
            if isinstance(drive, _UnitOf) and not drive.is_back and not drive.is_over
        ]
        for drive in evacuating:
            drive.end()
        if evacuating or context.monotonic() - known.since < _SETTLE_SECONDS:
            return
        if not node.is_schedulable and node.cordoned_for == name:
            context.nodes.uncordon(name)
            known.planned = float("-inf")
            return
        if not self._is_due(known):
            return
        going = [(volume, note) for volume, note in self._moving() if note.source == name]
        is_left = bool(going)
        turning: list[NotedVolume] = []
        back: dict[str, list[MoveNote]] = {}
        for volume in self._noted:
            note = volume.under_way
            if note is not None and note.target == name and note.is_back:
                back.setdefault(note.source, []).append(note)
            elif note is None and name == self._home_of(volume):
                # A volume without a claim stays where it is: no claim could follow it.
                is_left = is_left or volume.is_rebinding or volume.is_bound
                if volume.is_bound and not volume.is_rebinding:
                    turning.append(volume)
        self._turn_round(turning, name, known)
        # Take nothing back before the other volumes of its namespace are noted, of which a pod may
        # use one, too: if the undo is stopped in between, the notes say where the pod's volumes
        # are to be (`Unit.is_torn`).
        noted_first = {volume.claim[0] for volume in turning}
        going = [(volume, note) for volume, note in going if volume.claim[0] not in noted_first]
        self._take_back(name, known, going, Kind.UNDO)
        for source, notes in back.items():
            is_left = True
            self._move_back(name, source, known, notes, nodes)
        if not (is_left or any(not drive.is_over for drive in known.drives)):
            context.events.node(name, reasons.FINISHED, "the evacuation is undone")
            context.progress.end(name)

    def _take_back(
        self,
        name: str,
        known: _Known,
        going: Sequence[tuple[NotedVolume, MoveNote]],
        kind: Kind | None,
    ) -> None:
        """Begin to take back volumes that are not rebound, a few at once.

        `kind` is what the Node `name` asks for, and goes on asking for meanwhile; None if they are
        taken back whatever it asks for.
        """
        for volume, note in going:
            running = sum(not drive.is_over for drive in known.drives)
            if running >= AT_ONCE or note.volume_id in self._busy():
                continue
            self._context.progress.volume(name, note.volume_id, Stage.UNDOING)
            work = TakeBack(
                self._context,
                volume,
                note,
                lambda: kind is None or self._wish(name, kind) is Wish.GO,
            )
            drive = Drive(
                self._context,
                note.volume_id,
                frozenset({note.volume_id}),
                node=name,
            )
            known.drives.append(drive)
            drive.start(work.run)

    def _take_back_abandoned(
        self, name: str, known: _Known, made: Plan, nodes: Mapping[str, EvacuatedNode]
    ) -> None:
        """Take back the moves that cannot go on.

        These are the moves of volumes whose claim was deleted, so that they can be deleted, too;
        and those to a node that was deleted meanwhile, or is evacuated itself, unless the volume
        was handed over.
        """

        def has_no_target(volume: PlannedVolume) -> bool:
            move = volume.move
            if move is None or move.is_handed_over:
                return False
            return move.node not in nodes or self._kind_of(move.node) == Kind.EVACUATE

        abandoned = {
            volume.volume_id
            for unit in made.staying
            for volume in unit.volumes
            if volume.is_abandoned or has_no_target(volume)
        }
        going = [(volume, note) for volume, note in self._moving() if note.volume_id in abandoned]
        self._take_back(name, known, going, None)

    def _take_back_vanished(self) -> None:
        """Have what is left of moves removed whose volumes were deleted with their claims."""
        for note in list(self._vanished):
            if note.volume_id in self._busy():
                continue
            self._vanished.remove(note)
            drive = Drive(
                self._context, note.volume_id, frozenset({note.volume_id}), node=note.source
            )
            self._others.append(drive)
            drive.start(VanishedTakeBack(self._context, note).run)

    def _turn_round(self, volumes: Sequence[NotedVolume], name: str, known: _Known) -> None:
        """Note that volumes move back to the node `name`."""
        turned = {
            volume: next(left for left in volume.left if left.source == name and not left.is_back)
            for volume in volumes
        }
        busy = self._busy()
        for volume, note in list(turned.items()):
            if {note.volume_id, volume.handle} & busy:
                del turned[volume]
        if not turned:
            return

        def work(drive: Drive) -> None:
            for volume, note in turned.items():
                found = self._context.notes.find(volume.name)
                if found is None or found.handle != volume.handle or note not in found.notes:
                    continue
                drive.require_wanted()
                if self._wish(name, Kind.UNDO) is not Wish.GO:
                    return
                if found.under_way is None:
                    self._context.notes.write(found, found.noted_back(note))

        volume_ids = [
            one for volume, note in turned.items() for one in (note.volume_id, volume.handle)
        ]
        drive = Drive(self._context, volume_ids[0], frozenset(volume_ids), node=name)
        known.drives.append(drive)
        drive.start(work)

    def _move_back(
        self,
        name: str,
        source: str,
        known: _Known,
        notes: Sequence[MoveNote],
        nodes: Mapping[str, EvacuatedNode],
    ) -> None:
        """Drive the units of volumes that move back from a node."""
        volume_ids = {note.volume_id for note in notes}
        made = plan(self._view(source, [name]), [name])
        units = [unit for unit in made.going if _ids(unit) & volume_ids]
        stuck = [unit for unit in made.staying if _ids(unit) & volume_ids]
        shown = Plan(name, tuple(units), tuple(stuck))
        self._context.progress.begin(name, str(Kind.UNDO), shown)
        self._say_staying(stuck)
        self._drive(source, name, known, units, Kind.UNDO, cordon=True)
        self._take_back_abandoned(name, known, made, nodes)


class _UnitOf(Drive):
    """The drive of a unit from `source` to `target`; `is_back` is whether an undo drives it."""

    source = target = ""
    is_back = False


class _Erasure(Drive):
    """The end of a quarantine."""


def _kind(node: EvacuatedNode) -> str:
    """Return the kind of a Node's request; empty without one."""
    if isinstance(node.request, BadRequest):
        return "bad"
    return str(node.request.kind) if node.request else ""


def _ids(unit: Unit) -> frozenset[str]:
    return frozenset(volume.volume_id for volume in unit.volumes)


class EvacuatorTask(Extra):
    """The periodic background task of the controller that evacuates nodes."""

    def __init__(
        self,
        config: Config,
        nodes: Nodes,
        moves: NodeMoves,
        server: Server,
        progress: Progress,
        *,
        is_leader: Callable[[], bool],
    ) -> None:
        """Make the task, which `start` starts.

        It evacuates nodes while `is_leader` returns True. Two may do so at once for a while, as
        the tags on the nodes decide; it takes them longer.
        """
        self._config, self._nodes, self._lists = config, nodes, Lists(server)
        self._is_leader = is_leader
        self._context = Context(
            config.driver_name,
            server,
            moves,
            progress,
            time.time,
            time.monotonic,
            command.begin,
        )
        self._loop: asyncio.AbstractEventLoop
        self._evacuator = Evacuator(self._context, self._view, config.evacuation_grace_seconds)
        self.task = PeriodicTask(
            "evacuation",
            self._look,
            _LOOK_SECONDS,
            "cannot look for nodes that are to be evacuated: %s",
            first_seconds=_FIRST_SECONDS,
        )

    def _view(self, node: str, to: Sequence[str]) -> View:
        view = ClusterView(self._config.driver_name, self._nodes, self._lists, self._loop)
        return view.view(node, to)

    def _look(self) -> None:
        if self._is_leader():
            self._evacuator.look()
        else:
            self._evacuator.stand_by()

    def start(self) -> None:
        """Start the task. This method must be called in the event loop that uses the nodes."""
        self._loop = asyncio.get_running_loop()
        self.task.start()

    def stop(self) -> None:
        """Stop the task, and end the drives before their next steps."""
        self.task.stop()
        self._evacuator.end()

    def gauges(self) -> Iterable[Gauge]:
        """Return the gauges of the evacuations that this process drives."""
        return evacuation_metrics.gauges(self._context.progress.snapshot())
