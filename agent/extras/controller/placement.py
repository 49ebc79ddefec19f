"""Which node a new volume goes to, and how much room there is.

With a content source it is the source's node, whatever the scheduler chose: the answer's topology
becomes the PersistentVolume's, and the scheduler puts the pod there in its next cycle (binder.go of
its plugin volumebinding, checkBindings). Without one it is the first preferred node, and no other:
the pod might not be able to follow. Without a requirement (Immediate) it is the node with the most
room of those that answer, and that one again until it says how the call ended: if it no longer
answers the volume may be there. Another controller does not know that: asked at the same time, or
later while that node does not answer, it may choose another node, and one volume is an orphan.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from agent.core import ids
from agent.core.ids import VolumeId
from agent.extras.controller import routes
from agent.extras.controller.nodes import Node, Nodes, Refused, unavailable
from lvm import names
from proto import csi_pb2 as csi

# After these a volume is on the node that was called, or on none.
_KNOWN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
# How long a node is waited for that is asked what it has.
_PATIENCE_SECONDS = 5.0
# Volumes whose outcome is not known; the provisioner repeats the calls of all, a hundred at once.
_MOST_ATTEMPTS = 10_000

# Sends a request to a node: the call's name, the node, the request; returns the answer.
Ask = Callable[[str, Node, Any], Awaitable[Any]]


class Attempts:
    """Where volumes that may be anywhere are being created, until their outcome is known."""

    def __init__(self) -> None:
        # The name of the node by the volume's; the oldest first.
        self._nodes: dict[str, str] = {}
        self._under_way: set[str] = set()

    @asynccontextmanager
    async def only(self, name: str) -> AsyncIterator[None]:
        """Run the only call about a volume. Raises Refused for a second one at the same time."""
        if name in self._under_way:
            raise Refused(grpc.StatusCode.ABORTED, f"{name!r} is being created by another call")
        self._under_way.add(name)
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() in _KNOWN:
                self._nodes.pop(name, None)
            raise
        else:
            self._nodes.pop(name, None)
        finally:
            self._under_way.discard(name)

    def node(self, name: str) -> str:
        """The node that an earlier call was sent to; empty if there was none."""
        return self._nodes.get(name, "")

    def begin(self, name: str, node: str) -> None:
        """Keep the node that a call is sent to."""
        self._nodes[name] = node
        if len(self._nodes) > _MOST_ATTEMPTS:
            del self._nodes[next(iter(self._nodes))]


class Placement:
    """Chooses nodes for CreateVolume, and answers GetCapacity."""

    def __init__(self, nodes: Nodes, attempts: Attempts, ask: Ask) -> None:
        self._nodes, self._attempts, self._ask = nodes, attempts, ask

    async def of(self, request: csi.CreateVolumeRequest) -> Node:
        """The node for a new volume. Raises Refused."""
        source, field = routes.source_of(request)
        if field:
            return await self._nodes.owner(source, field)
        wanted = request.accessibility_requirements
        if wanted.preferred:
            return self._nodes.of_segments(wanted.preferred[0].segments)
        node = self._nodes.get(self._attempts.node(request.name)) or await self._roomiest(request)
        self._attempts.begin(request.name, node.name)
        return node

    async def _roomiest(self, request: csi.CreateVolumeRequest) -> Node:
        """The node that has the volume from an earlier call, or else the one with the most room."""
        allowed = [dict(one.segments) for one in request.accessibility_requirements.requisite]
        nodes = [
            one
            for one in self._nodes.answering()
            if not allowed or any(each.items() <= one.segments.items() for each in allowed)
        ]
        if not nodes:
            raise unavailable("accessibility_requirements: no node that is allowed answers")
        name = names.logical_volume(ids.VOLUME_PREFIX, request.name)
        seen = await asyncio.gather(*(self._has(one, name) for one in nodes))
        for node, has in zip(nodes, seen, strict=True):
            if has:
                return node
        wanted = csi.GetCapacityRequest(
            volume_capabilities=request.volume_capabilities, parameters=request.parameters
        )
        rooms = await asyncio.gather(*(self._room(one, wanted) for one in nodes))
        room, node = max(zip(rooms, nodes, strict=True), key=lambda one: one[0])
        if room < 0:
            raise unavailable("none of the nodes said how much room it has")
        return node

    async def _has(self, node: Node, name: str) -> bool:
        """Whether one of a node's groups has a logical volume of that name."""
        for uuid, group in node.groups.items():
            wanted = csi.ControllerGetVolumeRequest(volume_id=str(VolumeId(group, uuid, name)))
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._ask("ControllerGetVolume", node, wanted)
            except TimeoutError:
                # It is asked whether it answers at all; if not it is passed over next time.
                raise unavailable(
                    f"node {node.name} does not say in time whether it has {name!r}; ask again"
                ) from None
            except (Refused, grpc.aio.AioRpcError):
                continue
            return True
        return False

    async def _room(self, node: Node, wanted: csi.GetCapacityRequest) -> int:
        """The largest volume that a node has room for, in bytes; -1 if it does not say."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                answer = await self._ask("GetCapacity", node, wanted)
            return int(answer.maximum_volume_size.value)
        except (TimeoutError, Refused, grpc.aio.AioRpcError):
            return -1

    async def capacity(self, request: csi.GetCapacityRequest) -> csi.GetCapacityResponse:
        """The capacity of the node that a topology names, or of all nodes that answer together."""
        if request.HasField("accessible_topology"):
            node = self._nodes.of_segments(request.accessible_topology.segments)
            answer: csi.GetCapacityResponse = await self._ask("GetCapacity", node, request)
            return answer
        found: Sequence[Any] = await asyncio.gather(
            *(self._ask("GetCapacity", one, request) for one in self._nodes.require_all())
        )
        answer = csi.GetCapacityResponse(
            available_capacity=sum(one.available_capacity for one in found)
        )
        if found:
            answer.maximum_volume_size.value = max(one.maximum_volume_size.value for one in found)
            answer.minimum_volume_size.value = min(one.minimum_volume_size.value for one in found)
        return answer
