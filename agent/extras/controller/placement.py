"""Which node a new volume goes to, and how much room there is.

With a content source it is the source's node, whatever the scheduler chose: the answer's topology
becomes the PersistentVolume's, and the scheduler puts the pod there in its next cycle (binder.go of
its plugin volumebinding, checkBindings). Without one it is the first preferred node, and no other:
the pod might not be able to follow. Without a requirement (Immediate) it is the node with the most
room of those that answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from agent.core import ids
from agent.core.ids import VolumeId
from agent.extras.controller.nodes import Node, Nodes, Refused, unavailable
from lvm import names
from proto import csi_pb2 as csi

# Sends a request to a node: the call's name, the node, the request; returns the answer.
Ask = Callable[[str, Node, Any], Awaitable[Any]]


class Placement:
    """Chooses nodes for CreateVolume, and answers GetCapacity."""

    def __init__(self, nodes: Nodes, ask: Ask) -> None:
        self._nodes, self._ask = nodes, ask

    async def of(self, request: csi.CreateVolumeRequest) -> Node:
        """The node for a new volume. Raises Refused."""
        source = request.volume_content_source
        for kind in ("snapshot", "volume"):
            if source.WhichOneof("type") == kind:
                field = f"{kind}_id"
                where = f"volume_content_source.{kind}.{field}"
                return await self._nodes.owner(getattr(getattr(source, kind), field), where)
        wanted = request.accessibility_requirements
        if wanted.preferred:
            return self._nodes.of_segments(wanted.preferred[0].segments)
        return await self._roomiest(request)

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
                await self._ask("ControllerGetVolume", node, wanted)
            except (Refused, grpc.aio.AioRpcError):
                continue
            return True
        return False

    async def _room(self, node: Node, wanted: csi.GetCapacityRequest) -> int:
        """The largest volume that a node has room for, in bytes; -1 if it does not say."""
        try:
            return int((await self._ask("GetCapacity", node, wanted)).maximum_volume_size.value)
        except (Refused, grpc.aio.AioRpcError):
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
