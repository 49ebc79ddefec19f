"""What nodes answer for the plan of an evacuation: volumes, snapshots, moves, and free space.

Each node is asked a few times, however many volumes it has: once for its moves and classes, and
once per class of the evacuated volumes for its space. The evacuated node is also asked for its
volumes and its snapshots, a page at a time.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from agent.core import tag
from agent.csi.client import block
from agent.extras.controller.node_answers import Answers
from agent.extras.controller.nodes import Node, Nodes, Refused, problem_of, unavailable
from agent.extras.evacuation.plan import Moving, Room, Snapshot, Volume
from agent.operations.plan import LEAST_BYTES as LEAST_HEADER_BYTES
from agent.requests.parameters import PREFIX
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

_CONTROLLER = "/csi.v1.Controller"
_MOVES = "/carver.v2.Transfer/Moves"
# Time limit, in seconds, of one call to a node.
_PATIENCE_SECONDS = 10.0
# Maximum number of nodes that are asked at the same time.
_AT_ONCE = 16
# Maximum number of entries of a page of a list, and of entries of a whole list.
_OF_A_PAGE, _MOST_ENTRIES = 500, 100_000
# Pattern of the ids of the snapshots that moves take (agent/extras/transfer/move.py).
_OF_MOVES = re.compile(r"[-.]move-[0-9a-f]{12}-[0-9a-f]{8}$")


@dataclass(frozen=True)
class Inventory:
    """What the nodes answered. `rooms`, `problems` and `left` are by the names of the candidates.

    `left` has what volumes have left on a candidate that moved from there to the evacuated node.
    """

    volumes: Sequence[Volume] = ()
    snapshots: Sequence[Snapshot] = ()
    moves: Sequence[Moving] = ()
    rooms: Mapping[str, Mapping[str, Room]] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, Sequence[Volume]] = field(default_factory=dict)


class NodeInventory:
    """Asks nodes over their connections; its methods run in the event loop that uses the nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._answers = nodes, Answers(nodes)

    async def read(self, name: str, candidates: Iterable[str]) -> Inventory:
        """Ask the evacuated node for what it has, and candidates for targets for their space.

        The nodes to which volumes move already are asked, too. Raises Refused if the evacuated node
        does not answer, or if its answer cannot be true. What is wrong with a candidate is in
        `Inventory.problems`.
        """
        source = self._nodes.get(name)
        if source is None:
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"no Carver on a node {name[:100]!r} is known here"
            )
        source.require_answering()
        try:
            moves = await self._moves(source)
            volumes = await self._volumes(source, moves)
            snapshots = await self._snapshots(source)
        except grpc.aio.AioRpcError as error:
            raise unavailable(f"node {name} does not say what it has: {_text(error)}") from None
        except TimeoutError:
            raise unavailable(f"node {name} does not say what it has in time") from None
        away = {move.volume_id: move for move in moves.moves if move.node}
        targets = {move.node for move in away.values()}
        asked = sorted({*candidates, *targets} - {name})
        classes = sorted({volume.device_class for volume in volumes})
        rooms, problems, moves_by_node = await self._candidates(asked, classes)
        received = {
            node: {move.received for move in moves} for node, moves in moves_by_node.items()
        }
        return Inventory(
            volumes,
            snapshots,
            [
                Moving(
                    *(volume_id, move.node, move.handed_over),
                    has_space=volume_id in received.get(move.node, ()),
                )
                for volume_id, move in sorted(away.items())
            ],
            rooms,
            problems,
            {
                node: [
                    Volume(move.volume_id, move.size_bytes, move.device_class, move.encrypted)
                    for move in moves
                    if move.handed_over and move.node == name and not move.ended
                ]
                for node, moves in moves_by_node.items()
            },
        )

    async def _candidates(
        self, asked: Sequence[str], classes: Sequence[str]
    ) -> tuple[
        Mapping[str, Mapping[str, Room]], Mapping[str, str], Mapping[str, Sequence[carver.NodeMove]]
    ]:
        """Ask candidates for their space; return it, their problems, and their moves.

        Each is by the names of the nodes.
        """
        limit = asyncio.Semaphore(_AT_ONCE)
        rooms, problems = dict[str, Mapping[str, Room]](), dict[str, str]()
        moves_by_node = dict[str, Sequence[carver.NodeMove]]()

        async def ask(name: str) -> None:
            node = self._nodes.get(name)
            if node is None:
                problems[name] = "has no Carver that the controller knows"
                return
            async with limit:
                try:
                    if node.problem:
                        problems[name] = f"does not answer: {node.problem}"
                    elif problem := self._nodes.why_no_new_volumes(node):
                        problems[name] = f"takes no new volumes: {problem}"
                    else:
                        moves = await self._moves(node)
                        moves_by_node[name] = moves.moves
                        rooms[name] = await self._rooms(node, moves.classes, classes)
                except (Exception, asyncio.CancelledError) as error:
                    problems[name] = f"does not say how much space it has: {_text(error)}"

        await asyncio.gather(*map(ask, asked))
        return rooms, problems, moves_by_node

    async def _rooms(
        self, node: Node, offered: Iterable[carver.MoveClass], classes: Sequence[str]
    ) -> Mapping[str, Room]:
        """Ask a node for its space for each of these classes that it has."""
        rooms = {}
        for device_class in offered:
            if device_class.name not in classes:
                continue
            # Ask for a block volume: its smallest size is the step by which sizes are rounded up,
            # not the smallest size of a file system.
            request = csi.GetCapacityRequest(
                volume_capabilities=[block()], parameters={tag.CLASS: device_class.name}
            )
            answer = await self._asked(node, f"{_CONTROLLER}/GetCapacity", request)
            rooms[device_class.name] = Room(
                device_class.pool,
                answer.maximum_volume_size.value,
                max(1, answer.minimum_volume_size.value),
                device_class.encrypts,
            )
        return rooms

    async def _volumes(self, node: Node, moves: carver.MovesResponse) -> Sequence[Volume]:
        """Return the volumes of a node: those that it lists, and those that have moved away."""
        volumes = {}
        request = csi.ListVolumesRequest(max_entries=_OF_A_PAGE)
        for entry in await self._listed(node, "ListVolumes", request):
            context = entry.volume.volume_context
            is_encrypted = bool(context.get(PREFIX + tag.ENCRYPTION))
            volumes[entry.volume.volume_id] = Volume(
                entry.volume.volume_id,
                entry.volume.capacity_bytes + is_encrypted * LEAST_HEADER_BYTES,
                context.get(PREFIX + tag.CLASS, ""),
                is_encrypted,
            )
        for move in moves.moves:
            # Take the size from here: a volume that has moved is in no list of volumes.
            if move.node:
                volumes[move.volume_id] = Volume(
                    *(move.volume_id, move.size_bytes, move.device_class, move.encrypted)
                )
        return list(volumes.values())

    async def _snapshots(self, node: Node) -> Sequence[Snapshot]:
        """Return the snapshots of a node, without those that moves have taken."""
        request = csi.ListSnapshotsRequest(max_entries=_OF_A_PAGE)
        entries = await self._listed(node, "ListSnapshots", request)
        return [
            Snapshot(
                entry.snapshot.snapshot_id,
                entry.snapshot.source_volume_id,
                entry.snapshot.group_snapshot_id,
            )
            for entry in entries
            if not _OF_MOVES.search(entry.snapshot.snapshot_id)
        ]

    async def _listed(self, node: Node, method: str, request: Any) -> Sequence[Any]:
        """Return the entries of all pages of a list. Raises Refused if the list does not end."""
        entries = list[Any]()
        while True:
            answer = await self._asked(node, f"{_CONTROLLER}/{method}", request)
            entries += answer.entries
            if not answer.next_token:
                return entries
            if len(entries) > _MOST_ENTRIES:
                raise unavailable(f"node {node.name} lists more than {_MOST_ENTRIES} entries")
            request.starting_token = answer.next_token

    async def _asked(self, node: Node, path: str, request: Message) -> Any:
        data = request.SerializeToString()
        async with asyncio.timeout(_PATIENCE_SECONDS + 1):
            _, answer = await self._answers.of(node, path, request, data, _PATIENCE_SECONDS)
        return answer

    async def _moves(self, node: Node) -> carver.MovesResponse:
        """Ask a node for its moves and classes. Raises Refused if the answer cannot be true."""
        answer: carver.MovesResponse = await self._asked(node, _MOVES, Empty())
        return answer


def _text(error: BaseException) -> str:
    """Return why a node did not answer, with advice for a node that serves no moves."""
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "Carver there does not serve moves: set `evacuation` on it, or update it"
    return problem_of(error)
