"""The choice of a new volume's node, and the free capacity of nodes.

There are three cases:

1. A volume with a content source is made on the source's node, whatever the scheduler chose. The
   topology in the answer becomes the PersistentVolume's, and the scheduler puts the pod on that
   node in its next cycle (checkBindings in binder.go of its plugin volumebinding).
2. A volume without a source is made on the first preferred node, which the scheduler chose, and on
   no other: the pod could not follow. If the cluster has no such Node any more, the answer is
   RESOURCE_EXHAUSTED, which makes the scheduler choose again; after other errors the
   external-provisioner repeats the call for the same node. The answer is the same if another volume
   of the same pod is, or will be, on another node: once that volume is bound, the scheduler puts
   the pod there.
3. A class with immediate binding has no such choice: the preferred nodes come from its
   allowedTopologies, in the order of a hash. The volume is made on the allowed node that answers
   and has the most free capacity.

In the third case a volume whose outcome is not known may be on the node that was called. So a
repeated call goes to the same node, until that node says how the call ended. A controller that
starts does not know the calls of an earlier one. So it waits two minutes for nodes that have not
answered it yet, and asks all nodes that answer whether they have the volume, also those on which no
other volume may be made. Two controllers that are called at the same time may still choose
different nodes, and so may a new controller while the first node does not answer. One of the two
volumes is then an orphan.
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

# gRPC codes of CreateVolume's errors after which the outcome is known: the volume is on the node
# that was called, or on none.
_KNOWN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
# gRPC codes of ControllerGetVolume's errors after which the node may have the volume.
_UNKNOWN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Time limit, in seconds, of the questions to nodes about one volume or their free capacity.
_PATIENCE_SECONDS = 5.0
# Largest value of the field available_capacity, which the sum over all nodes could exceed.
_MOST_BYTES = (1 << 63) - 1
# Largest number of volumes whose node is kept because their outcome is not known. The provisioner
# repeats the calls of all of them, a hundred at once.
_MOST_ATTEMPTS = 10_000

# A function that sends a request to a node, by the call's name, the node and the request, and
# returns the answer.
Ask = Callable[[str, Node, Any], Awaitable[Any]]


class Attempts:
    """The nodes on which volumes are being created, until the outcome of the call is known.

    The node is kept only for volumes that any node may have, so that a repeated call goes to the
    same node.
    """

    def __init__(self) -> None:
        # The name of the node by the volume's name, the oldest first.
        self._nodes: dict[str, str] = {}
        self._under_way: set[str] = set()

    @asynccontextmanager
    async def only(self, name: str) -> AsyncIterator[None]:
        """Run the block as the only call about a volume; forget its node if the outcome is known.

        Raises Refused for a second call at the same time.
        """
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
        """The node that an earlier call about a volume was sent to; empty without one."""
        return self._nodes.get(name, "")

    def begin(self, name: str, node: str) -> None:
        """Keep the node that a call about a volume is sent to."""
        self._nodes[name] = node
        if len(self._nodes) > _MOST_ATTEMPTS:
            del self._nodes[next(iter(self._nodes))]


@dataclass(frozen=True)
class _VolumeElsewhere:
    """Another volume of the same pod, which is, or will be, on another node than the new volume."""

    other: OtherVolume
    # The topology segments, or the names, of the other volume's nodes. Empty if no node that
    # answers has the other volume's source.
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

    Without `questions` the API server is not asked. Preferred nodes then count as the scheduler's
    choice, and a pod's other volumes are not known. The same holds if the API server refuses a
    question for good. If it does not answer, Refused is raised.
    """

    def __init__(
        self, nodes: Nodes, attempts: Attempts, ask: Ask, questions: ClaimQuestions | None = None
    ) -> None:
        self._nodes, self._attempts, self._ask = nodes, attempts, ask
        self._questions = questions

    async def given(self, request: csi.CreateVolumeRequest) -> Node | None:
        """Return the node that the source is on, or that the scheduler chose; None without either.

        Raises Refused, also if a pod could not use the volume on that node.
        """
        source, field = routes.source_of(request)
        claim, preferred = ClaimName.of(request), request.accessibility_requirements.preferred
        if field:
            node = self._undisputed(await self._nodes.owner(source, field))
            if elsewhere := await self._apart(request, claim, node):
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"cannot make claim {claim} on node {node.name}, where its source is:"
                    f" {elsewhere}, and no node can have both: let pod {elsewhere.pod} use volumes"
                    " of one node",
                )
            return node
        if not preferred or not await self._is_scheduled(request, claim):
            return None
        node = await self._preferred(preferred[0].segments, claim)
        await self._require_new(node, request)
        if elsewhere := await self._apart(request, claim, node):
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"cannot make claim {claim} on node {node.name}: {elsewhere}. Once that claim is"
                " bound the scheduler chooses its node for both",
            )
        return node

    async def anywhere(self, request: csi.CreateVolumeRequest) -> Node:
        """Return the node for a new volume that any node, or any allowed node, may have.

        Only one call about a volume may be under way. Raises Refused.
        """
        node = self._nodes.get(self._attempts.node(request.name)) or await self._roomiest(request)
        node = self._undisputed(node)
        self._attempts.begin(request.name, node.name)
        return node

    def _undisputed(self, node: Node) -> Node:
        """Return the node, unless another node may have its volume groups.

        Raises Refused.
        """
        if problem := self._nodes.why_no_new_volumes(node):
            raise unavailable(problem)
        self._nodes.require_own(node)
        return node

    async def _require_new(self, node: Node, request: csi.CreateVolumeRequest) -> None:
        """Raise Refused if no new volume may be made on the node that the scheduler chose.

        The code is RESOURCE_EXHAUSTED, which makes the scheduler choose another node. If an earlier
        call made the volume on this node, or may have, the code is UNAVAILABLE: on another node the
        volume would be made twice, and this one would be an orphan.
        """
        if problem := self._nodes.why_no_new_volumes(node):
            name = names.logical_volume(ids.VOLUME_PREFIX, request.name)
            if await self._has(node, name):
                raise unavailable(problem)
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
        self._nodes.require_own(node)

    async def _is_scheduled(
        self, request: csi.CreateVolumeRequest, claim: ClaimName | None
    ) -> bool:
        """Return whether the first preferred node is the scheduler's choice.

        Otherwise it is only the first of several nodes in the order of a hash. If the API server
        refuses to say, the node counts as the scheduler's choice.
        """
        has_several = len(request.accessibility_requirements.preferred) > 1
        if self._questions is None or claim is None or not has_several:
            return True
        is_scheduled = self._questions.claims.is_scheduled
        return await self._questions.ask(claim.namespace, is_scheduled, claim) is not False

    async def _preferred(self, segments: Mapping[str, str], claim: ClaimName | None) -> Node:
        """Return the node that the scheduler chose. Raises Refused if it is silent, or has left."""
        try:
            return self._nodes.of_segments(segments)
        except Refused as error:
            where = ", ".join(segments.values())
            if await self._has_left(segments, claim):
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"node {where} has left the cluster: the scheduler is to choose another",
                ) from None
            raise unavailable(
                f"{error}. The claim waits for node {where}: start it; if it will not come back,"
                " delete its Node object, and the scheduler chooses another"
            ) from None

    async def _has_left(self, segments: Mapping[str, str], claim: ClaimName | None) -> bool:
        """Return whether the cluster has no node with these topology segments.

        With an API server: no Node object. Without: no node in the file of nodes, once all of these
        have answered.
        """
        if self._questions is not None:
            claims = self._questions.claims
            if not (segment := segments.get(claims.topology_key, "")):
                return False
            namespace = claim.namespace if claim is not None else ""
            question_parts = claims.has_node, segment, time.monotonic()
            return await self._questions.ask(namespace, *question_parts) is False
        nodes = list(self._nodes)
        is_one_of_them = any(segments.items() <= node.segments.items() for node in nodes)
        return bool(nodes) and all(node.segments for node in nodes) and not is_one_of_them

    async def _apart(
        self, request: csi.CreateVolumeRequest, claim: ClaimName | None, node: Node
    ) -> "_VolumeElsewhere | None":
        """Return another volume of the same pod that is not on this node; None if there is none.

        None also in two cases in which another node would be no better: several pods use the claim,
        and one of them has its other volumes on this node, so that no node serves all pods; or the
        new volume is on this node already, by an earlier call.
        """
        if self._questions is None or claim is None:
            return None
        question = self._questions.claims.others
        other_volumes = await self._questions.ask(claim.namespace, question, claim) or ()
        volumes_elsewhere: dict[str, _VolumeElsewhere] = {}
        for other_volume in other_volumes:
            place = await self._place(other_volume)
            if node.name not in place and place.isdisjoint(node.segments.values()):
                volumes_elsewhere.setdefault(
                    other_volume.pod, _VolumeElsewhere(other_volume, place)
                )
        if not volumes_elsewhere or len(volumes_elsewhere) < len(
            {other_volume.pod for other_volume in other_volumes}
        ):
            return None
        name = names.logical_volume(ids.VOLUME_PREFIX, request.name)
        is_there = await self._has(node, name)
        return None if is_there else next(iter(volumes_elsewhere.values()))

    async def _place(self, other_volume: OtherVolume) -> frozenset[str]:
        """Return the topology segments, or the names, of a volume's nodes; empty if none has it."""
        if other_volume.source is None:
            return other_volume.segments
        with suppress(Refused):  # if no node is known to have the volume group, all nodes are asked
            await self._nodes.owner(str(other_volume.source), "source")
        uuid = other_volume.source.group_uuid
        return frozenset(node.name for node in self._nodes if uuid in node.groups)

    async def _roomiest(self, request: csi.CreateVolumeRequest) -> Node:
        """Return the node that has the volume from an earlier call, or the one with most capacity.

        A node that has the volume counts, also if no other volume may be made on it. Raises
        Refused, also while new members have not answered this controller.

        1. Ask all allowed nodes that answer whether they have the volume; return the one that does.
        2. Leave out nodes that do not say. Raise the error of such a node if it is a new member, or
           if no node says that it lacks the volume.
        3. Leave out nodes on which no new volume may be made.
        4. Return the node that has space for the largest volume.
        """
        allowed = [
            dict(topology.segments) for topology in request.accessibility_requirements.requisite
        ]
        nodes = [
            node
            for node in self._nodes.answering()
            if not allowed or any(segments.items() <= node.segments.items() for segments in allowed)
        ]
        if not nodes:
            raise unavailable("accessibility_requirements: no node that is allowed answers")
        self._nodes.require_asked()
        name = names.logical_volume(ids.VOLUME_PREFIX, request.name)
        questions = (self._has(node, name) for node in nodes)
        # The node that has the volume counts, whatever other nodes fail to say.
        answers = await asyncio.gather(*questions, return_exceptions=True)
        node_answers = list(zip(nodes, answers, strict=True))
        for node, has_volume in node_answers:
            if has_volume is True:
                return node
        unknown = [
            (node, error) for node, error in node_answers if isinstance(error, BaseException)
        ]
        nodes = [node for node, has_volume in node_answers if has_volume is False]
        for node, error in unknown:
            # An earlier controller may have begun to make the volume on a new member. On other
            # nodes a volume group that hangs must not delay new volumes.
            if not nodes or not isinstance(error, Refused) or self._nodes.is_new(node.name):
                raise error
        problems = [self._nodes.why_no_new_volumes(node) for node in nodes]
        nodes = [node for node, problem in zip(nodes, problems, strict=True) if not problem]
        if not nodes:
            raise unavailable(f"no volume is made on any node that is allowed: {problems[0]}")
        capacity_request = csi.GetCapacityRequest(
            volume_capabilities=request.volume_capabilities, parameters=request.parameters
        )
        capacities = await asyncio.gather(*(self._room(node, capacity_request) for node in nodes))
        capacity_bytes, node = max(zip(capacities, nodes, strict=True), key=lambda pair: pair[0])
        if capacity_bytes < 0:
            raise unavailable("none of the nodes said how much room it has")
        return node

    async def _has(self, node: Node, name: str) -> bool:
        """Return whether a node has a logical volume of that name, finished or not, in any group.

        Raises Refused if the node may have the volume.
        """
        unknown: Refused | None = None
        for uuid, group in node.groups.items():
            request = csi.ControllerGetVolumeRequest(volume_id=str(VolumeId(group, uuid, name)))
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._ask("ControllerGetVolume", node, request)
            except TimeoutError:
                # The cancelled call makes the controller ask the node whether it still answers; a
                # node that does not answer is passed over next time.
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
                # ABORTED means that the volume exists, and is being filled.
            return True
        if unknown is not None:
            raise unknown
        return False

    async def _room(self, node: Node, request: csi.GetCapacityRequest) -> int:
        """Return the size, in bytes, of the largest volume a node has space for; -1 if unknown."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                answer = await self._ask("GetCapacity", node, request)
            return int(answer.maximum_volume_size.value)
        except (Exception, asyncio.CancelledError) as error:
            problem_of(error)
            return -1

    async def capacity(self, request: csi.GetCapacityRequest) -> csi.GetCapacityResponse:
        """Return the capacity of the node that a topology names, or the sum of all nodes'.

        Raises Refused if one of these nodes does not answer. Nodes on which no new volume may be
        made have no capacity.
        """
        if request.HasField("accessible_topology"):
            node = self._nodes.of_segments(request.accessible_topology.segments)
            if self._nodes.has_no_capacity(node):
                return _no_capacity()
            answer: csi.GetCapacityResponse = await self._ask("GetCapacity", node, request)
            return answer
        capacities: Sequence[Any] = await asyncio.gather(
            *(
                self._ask("GetCapacity", node, request)
                for node in self._nodes.require_all()
                if not self._nodes.has_no_capacity(node)
            )
        )
        answer = csi.GetCapacityResponse(
            available_capacity=min(
                _MOST_BYTES, sum(capacity.available_capacity for capacity in capacities)
            )
        )
        if capacities:
            answer.maximum_volume_size.value = max(
                capacity.maximum_volume_size.value for capacity in capacities
            )
            answer.minimum_volume_size.value = min(
                capacity.minimum_volume_size.value for capacity in capacities
            )
        return answer


def _code(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC code of a node's error; UNAVAILABLE for an error without a code."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code()
    return grpc.StatusCode.UNAVAILABLE


def _no_capacity() -> csi.GetCapacityResponse:
    answer = csi.GetCapacityResponse(available_capacity=0)
    answer.maximum_volume_size.value = 0
    return answer
