"""Which node a new volume goes to, and how much room there is.

With a content source it is the source's node, whatever the scheduler chose: the answer's topology
becomes the PersistentVolume's, and the scheduler puts the pod there in its next cycle (binder.go of
its plugin volumebinding, checkBindings). Without one it is the first preferred node, and no other:
the pod might not be able to follow. If the cluster has no such Node any more the scheduler is to
choose again (RESOURCE_EXHAUSTED), as the provisioner asks for the same node until a final answer.
It is to choose again also where another volume of the same pod is, or will be, on another node:
once that one is bound, the scheduler puts the pod there.

A class that binds immediately has no such choice, and the preferred nodes of its allowedTopologies
are in the order of a hash: it is the node with the most room of those that answer and are allowed,
and that one again until it says how the call ended: if it no longer answers the volume may be
there. Another controller does not know that. So one that starts waits two minutes for nodes that
have not answered it yet, and asks all that answer whether they have the volume, also those on which
no other is made by now. Asked at the same time, or later while that node does not answer, it may
choose another node, and one volume is an orphan.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from agent.core import ids
from agent.core.ids import VolumeId
from agent.extras.controller import routes
from agent.extras.controller.claims import ClaimName, ClaimQuestions, OtherVolume
from agent.extras.controller.nodes import Node, Nodes, Refused, problem_of, unavailable
from lvm import names
from proto import csi_pb2 as csi

# After these a volume is on the node that was called, or on none.
_KNOWN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
# After these, of ControllerGetVolume, a volume may be there.
_UNKNOWN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# How long a node is waited for that is asked what it has.
_PATIENCE_SECONDS = 5.0
# The largest number of the field, which nodes may reach together.
_MOST_BYTES = (1 << 63) - 1
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


@dataclass(frozen=True)
class _Apart:
    """Another volume of a pod, which is, or will be, on another node than the new one."""

    other: OtherVolume
    # Its node's topology segments or name; empty if no node that answers has its source.
    place: frozenset[str]

    @property
    def pod(self) -> str:
        return self.other.pod

    def __str__(self) -> str:
        where = f"node {', '.join(sorted(self.place))}" if self.place else "no node that answers"
        source = self.other.source
        what = "has its volume" if source is None else f"is made of {source}, which is"
        return f"pod {self.pod} also uses claim {self.other.claim}, which {what} on {where}"


class Placement:
    """Chooses nodes for CreateVolume, and answers GetCapacity.

    Without `questions` the API server is not asked: preferred nodes are the scheduler's choice, and
    a pod's other volumes are not known. So it is where the API server refuses a question for good;
    where it does not answer one Refused is raised.
    """

    def __init__(
        self, nodes: Nodes, attempts: Attempts, ask: Ask, questions: ClaimQuestions | None = None
    ) -> None:
        self._nodes, self._attempts, self._ask = nodes, attempts, ask
        self._questions = questions

    async def given(self, request: csi.CreateVolumeRequest) -> Node | None:
        """The node that the source is on, or that the scheduler chose; None without either.

        Raises Refused also where a pod could not use the volume there.
        """
        source, field = routes.source_of(request)
        claim, preferred = ClaimName.of(request), request.accessibility_requirements.preferred
        if field:
            node = self._undisputed(await self._nodes.owner(source, field))
            if apart := await self._apart(request, claim, node):
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"cannot make claim {claim} on node {node.name}, where its source is: {apart},"
                    f" and no node can have both: let pod {apart.pod} use volumes of one node",
                )
            return node
        if not preferred or not await self._is_scheduled(request, claim):
            return None
        node = await self._preferred(preferred[0].segments, claim)
        await self._require_new(node, request)
        if apart := await self._apart(request, claim, node):
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"cannot make claim {claim} on node {node.name}: {apart}. Once that claim is bound"
                " the scheduler chooses its node for both",
            )
        return node

    async def anywhere(self, request: csi.CreateVolumeRequest) -> Node:
        """The node for a new volume that may be on any, or on any that is allowed. Raises Refused.

        Only one call about a volume may be under way.
        """
        node = self._nodes.get(self._attempts.node(request.name)) or await self._roomiest(request)
        node = self._undisputed(node)
        self._attempts.begin(request.name, node.name)
        return node

    def _undisputed(self, node: Node) -> Node:
        """The node, unless another may have its groups. Raises Refused."""
        if problem := self._nodes.no_new(node):
            raise unavailable(problem)
        self._nodes.require_own(node)
        return node

    async def _require_new(self, node: Node, request: csi.CreateVolumeRequest) -> None:
        """Raise Refused if no volume is made on the scheduler's choice, which may choose another.

        Not if the volume is there, or may be, by an earlier call: it would stay as an orphan.
        """
        if problem := self._nodes.no_new(node):
            name = names.logical_volume(ids.VOLUME_PREFIX, request.name)
            if await self._has(node, name):
                raise unavailable(problem)
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
        self._nodes.require_own(node)

    async def _is_scheduled(
        self, request: csi.CreateVolumeRequest, claim: ClaimName | None
    ) -> bool:
        """Whether the first preferred node is the scheduler's choice, not one of several by a hash.

        Where the API server refuses to say, it is taken for the scheduler's.
        """
        several = len(request.accessibility_requirements.preferred) > 1
        if self._questions is None or claim is None or not several:
            return True
        is_scheduled = self._questions.claims.is_scheduled
        return await self._questions.ask(claim.namespace, is_scheduled, claim) is not False

    async def _preferred(self, segments: Mapping[str, str], claim: ClaimName | None) -> Node:
        """The node that the scheduler chose. Raises Refused if it is silent, or has left."""
        try:
            return self._nodes.of_segments(segments)
        except Refused as error:
            named = ", ".join(segments.values())
            if await self._has_left(segments, claim):
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"node {named} has left the cluster: the scheduler is to choose another",
                ) from None
            raise unavailable(
                f"{error}. The claim waits for node {named}: start it; if it will not come back,"
                " delete its Node object, and the scheduler chooses another"
            ) from None

    async def _has_left(self, segments: Mapping[str, str], claim: ClaimName | None) -> bool:
        """Whether the cluster has no such node: no Node object, or none in the file of nodes."""
        if self._questions is not None:
            claims = self._questions.claims
            if not (segment := segments.get(claims.topology_key, "")):
                return False
            namespace = claim.namespace if claim is not None else ""
            asked = claims.has_node, segment, time.monotonic()
            return await self._questions.ask(namespace, *asked) is False
        known = list(self._nodes)
        is_one_of_them = any(segments.items() <= one.segments.items() for one in known)
        return bool(known) and all(one.segments for one in known) and not is_one_of_them

    async def _apart(
        self, request: csi.CreateVolumeRequest, claim: ClaimName | None, node: Node
    ) -> "_Apart | None":
        """Another volume of the same pod that is not on this node; None if there is none.

        Also None where several pods use the claim and one of them has its others on this node: no
        node serves all. And where the new volume is on the node already, by an earlier call.
        """
        if self._questions is None or claim is None:
            return None
        asked = self._questions.claims.others
        others = await self._questions.ask(claim.namespace, asked, claim) or ()
        apart: dict[str, _Apart] = {}
        for one in others:
            place = await self._place(one)
            if node.name not in place and place.isdisjoint(node.segments.values()):
                apart.setdefault(one.pod, _Apart(one, place))
        if not apart or len(apart) < len({one.pod for one in others}):
            return None
        name = names.logical_volume(ids.VOLUME_PREFIX, request.name)
        is_there = await self._has(node, name)
        return None if is_there else next(iter(apart.values()))

    async def _place(self, other: OtherVolume) -> frozenset[str]:
        """The topology segments, or the names, of the nodes of a volume; empty if none has it."""
        if other.source is None:
            return other.segments
        with suppress(Refused):  # it asks all nodes, if none is known to have the group
            await self._nodes.owner(str(other.source), "source")
        uuid = other.source.group_uuid
        return frozenset(one.name for one in self._nodes if uuid in one.groups)

    async def _roomiest(self, request: csi.CreateVolumeRequest) -> Node:
        """The node that has the volume from an earlier call, or else the one with the most room.

        It may have it, too, though no other volume is made there by now. Raises Refused.
        """
        allowed = [dict(one.segments) for one in request.accessibility_requirements.requisite]
        nodes = [
            one
            for one in self._nodes.answering()
            if not allowed or any(each.items() <= one.segments.items() for each in allowed)
        ]
        if not nodes:
            raise unavailable("accessibility_requirements: no node that is allowed answers")
        self._nodes.require_asked()
        name = names.logical_volume(ids.VOLUME_PREFIX, request.name)
        asked = (self._has(one, name) for one in nodes)
        # One that has it counts, whatever others do not say.
        said = await asyncio.gather(*asked, return_exceptions=True)
        seen = list(zip(nodes, said, strict=True))
        for node, has in seen:
            if has is True:
                return node
        unknown = [(node, error) for node, error in seen if isinstance(error, BaseException)]
        nodes = [node for node, has in seen if has is False]
        for node, error in unknown:
            # An earlier controller may have begun it there. Later a group that hangs holds up none.
            if not nodes or not isinstance(error, Refused) or self._nodes.is_new(node.name):
                raise error
        problems = [self._nodes.no_new(one) for one in nodes]
        nodes = [one for one, problem in zip(nodes, problems, strict=True) if not problem]
        if not nodes:
            raise unavailable(f"no volume is made on any node that is allowed: {problems[0]}")
        wanted = csi.GetCapacityRequest(
            volume_capabilities=request.volume_capabilities, parameters=request.parameters
        )
        rooms = await asyncio.gather(*(self._room(one, wanted) for one in nodes))
        room, node = max(zip(rooms, nodes, strict=True), key=lambda one: one[0])
        if room < 0:
            raise unavailable("none of the nodes said how much room it has")
        return node

    async def _has(self, node: Node, name: str) -> bool:
        """Whether one of a node's groups has a logical volume of that name, also an unfinished one.

        Raises Refused where it may be there.
        """
        unknown: Refused | None = None
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
            except (Exception, asyncio.CancelledError) as error:
                problem = problem_of(error)
                if _code(error) in _UNKNOWN:
                    unknown = unavailable(
                        f"node {node.name} does not say whether it has {name!r}: {problem}; ask"
                        " again"
                    )
                if _code(error) is not grpc.StatusCode.ABORTED:
                    continue
                # It is there, and is being filled.
            return True
        if unknown is not None:
            raise unknown
        return False

    async def _room(self, node: Node, wanted: csi.GetCapacityRequest) -> int:
        """The largest volume that a node has room for, in bytes; -1 if it does not say."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                answer = await self._ask("GetCapacity", node, wanted)
            return int(answer.maximum_volume_size.value)
        except (Exception, asyncio.CancelledError) as error:
            problem_of(error)
            return -1

    async def capacity(self, request: csi.GetCapacityRequest) -> csi.GetCapacityResponse:
        """The capacity of the node that a topology names, or of all nodes that answer together."""
        if request.HasField("accessible_topology"):
            node = self._nodes.of_segments(request.accessible_topology.segments)
            if self._nodes.has_no_room(node):
                return _no_capacity()
            answer: csi.GetCapacityResponse = await self._ask("GetCapacity", node, request)
            return answer
        found: Sequence[Any] = await asyncio.gather(
            *(
                self._ask("GetCapacity", one, request)
                for one in self._nodes.require_all()
                if not self._nodes.has_no_room(one)
            )
        )
        answer = csi.GetCapacityResponse(
            available_capacity=min(_MOST_BYTES, sum(one.available_capacity for one in found))
        )
        if found:
            answer.maximum_volume_size.value = max(one.maximum_volume_size.value for one in found)
            answer.minimum_volume_size.value = min(one.minimum_volume_size.value for one in found)
        return answer


def _code(error: BaseException) -> grpc.StatusCode:
    """The code of a node's error; UNAVAILABLE for one without."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code()
    return grpc.StatusCode.UNAVAILABLE


def _no_capacity() -> csi.GetCapacityResponse:
    answer = csi.GetCapacityResponse(available_capacity=0)
    answer.maximum_volume_size.value = 0
    return answer
