"""Dependencies shared by the parts of an evacuation."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from agent.core import errors, ids
from agent.extras.controller.nodes import Refused
from agent.extras.evacuation.evacuated_nodes import EvacuatedNodes
from agent.extras.evacuation.evacuation_events import EvacuationEvents
from agent.extras.evacuation.evictions import Evictions
from agent.extras.evacuation.move_notes import MoveNotes
from agent.extras.evacuation.progress import Progress
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.events import Subject
from agent.extras.kubernetes.objects import VOLUMES, Lists, Object, Objects
from agent.extras.transfer.move import ABSENT, Move
from agent.extras.transfer.move import Progress as StreamProgress

# Errors of a step after which the step is repeated: a node or the API server refuses or is silent.
EXPECTED = (errors.AgentError, grpc.RpcError, Refused)


class Moves(Protocol):
    """Makes the moves that are driven (NodeMoves of agent/extras/controller/node_moves.py)."""

    def move(
        self,
        volume_id: str,
        source: str,
        target: str,
        *,
        name: str = "",
        device_class: str = "",
        replaces: str = "",
        tell: Callable[[str], None] = lambda _text: None,
        show: Callable[[StreamProgress], None] = lambda _progress: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Move:
        """Return the move of a volume from the node `source` to the node `target`.

        With `replaces`, the digest of the word of the move by which the volume came from there,
        what it left there is replaced. Once `is_wanted` returns False, its calls are cut off.
        """

    def names(self) -> Sequence[str]:
        """Return the names of all nodes of the cluster that have Carver."""


@dataclass
class Context:
    """What the parts of an evacuation use.

    `clock` returns the seconds since the epoch, `monotonic` those of a clock that is never set.
    `wait` waits so many seconds, or until the event is set. `begin` runs work in a thread of its
    own.
    """

    driver_name: str
    server: Server
    moves: Moves
    progress: Progress
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    begin: Callable[[str, Callable[[], None]], Any]
    wait: Callable[[threading.Event, float], Any] = threading.Event.wait
    lists: Lists = field(init=False)
    objects: Objects = field(init=False)
    nodes: EvacuatedNodes = field(init=False)
    notes: MoveNotes = field(init=False)
    evictions: Evictions = field(init=False)
    events: EvacuationEvents = field(init=False)

    def __post_init__(self) -> None:
        """Make the clients of the API server."""
        self.lists, self.objects = Lists(self.server), Objects(self.server)
        self.nodes = EvacuatedNodes(self.lists, self.objects, self.driver_name)
        self.notes = MoveNotes(self.lists, self.objects, self.driver_name)
        self.evictions = Evictions(self.lists, self.objects)
        self.events = EvacuationEvents(self.objects, self.driver_name, self.clock, self.monotonic)

    def is_nowhere(self, volume_id: str, source: str) -> bool:
        """Return whether no node but `source` has a volume of the same name, in any state.

        Each node is asked, and so are the PersistentVolumes: one names the volume of another node
        if its claim was rebound. Raises NodeRefused if a node does not answer, or if a volume group
        is missing on it, which may have the volume.
        """
        name = ids.readable_name(volume_id)
        if self._names(volume_id) - {volume_id}:
            return False
        for node in self.moves.names():
            if node == source:
                continue
            state = self.moves.move(volume_id, source, node).destination.status()
            if state["state"] != ABSENT:
                return False
            if missing := state["missing_group"]:
                problem = f"volume group {missing} is missing there, and may have volume {name}"
                raise errors.NodeRefused(node, "ReceiveStatus", problem)
        return True

    def is_named(self, volume_id: str) -> bool:
        """Return whether a PersistentVolume names a volume, or the same volume on another node."""
        return bool(self._names(volume_id))

    def _names(self, volume_id: str) -> set[str]:
        """Return the ids of a volume, on any node, that PersistentVolumes have."""
        name = ids.readable_name(volume_id)
        items = self.lists.whole(VOLUMES, "PersistentVolumeList").items
        sources = [item["spec"].get("csi") or {} for item in items]
        return {
            str(source["volumeHandle"])
            for source in sources
            if source.get("driver") == self.driver_name
            and ids.readable_name(str(source["volumeHandle"])) == name
        }

    def claim(self, namespace: str, name: str) -> Object | None:
        """Return a claim as it is now; None if it does not exist."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"
        return self.objects.find(path, "PersistentVolumeClaim")

    def claim_subject(self, namespace: str, name: str) -> Subject | None:
        """Return the object of Events about a claim as it is now; None if it does not exist."""
        claim = self.claim(namespace, name)
        if claim is None:
            return None
        return Subject("PersistentVolumeClaim", namespace, name, str(claim["metadata"]["uid"]))


def text_of(error: BaseException) -> str:
    """Return the text of an error."""
    return str(error) or type(error).__name__
