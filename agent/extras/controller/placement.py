"""The choice of a new volume's node, and the free capacity of nodes.

There are three cases:

1. A volume with a content source is made on the source's node, whatever the scheduler chose. The
   topology in the answer becomes the PersistentVolume's, and the scheduler puts the pod on that
   node in its next cycle (checkBindings in binder.go of its plugin volumebinding).
2. A volume without a source is made on the first preferred node, which the scheduler chose, and on
   no other node: the pod could not follow. If the cluster has no such Node any more, the answer is
   RESOURCE_EXHAUSTED, which makes the scheduler choose again; after other errors the
   external-provisioner repeats the call for the same node. The answer is RESOURCE_EXHAUSTED also if
   another volume of the same pod is, or will be, on another node: once that volume is bound, the
   scheduler puts the pod on that node.
3. With immediate binding the scheduler chooses no node: the preferred nodes come from the
   StorageClass' allowedTopologies, in the order of a hash. The volume is made on the allowed node
   that answers and has the most free capacity.

In the third case, if the outcome of CreateVolume is not known, the volume may be on the node that
was called. So a repeated call goes to the same node, until that node says how the call ended. A
controller that starts does not know the calls of an earlier controller. So it waits two minutes for
nodes that have not answered it yet, and asks all nodes that answer whether they have the volume,
also nodes on which no new volume may be made. Two controllers that are called at the same time may
still choose different nodes, and so may a new controller while the first node does not answer. One
of the two volumes is then an orphan.
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

# gRPC codes of CreateVolume's errors after which the outcome is known: either the node that was
# called has the volume, or no node has it.
_KNOWN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
# gRPC codes of ControllerGetVolume's errors after which the node may have the volume.
_UNKNOWN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Time limit, in seconds, of one call that asks a node for a volume or for the node's free capacity.
_PATIENCE_SECONDS = 5.0
# Maximum value of the field available_capacity. The sum over all nodes could exceed it.
_MOST_BYTES = (1 << 63) - 1
# Maximum number of volumes whose node is kept because the outcome of CreateVolume is not known. The
# provisioner repeats the calls for all these volumes, a hundred at once.
_MOST_ATTEMPTS = 10_000

# Type of a function that sends a request to a node and returns the answer. Its arguments are the
# RPC's name, the node, and the request.
Ask = Callable[[str, Node, Any], Awaitable[Any]]


class Attempts:
    """The nodes to which CreateVolume was sent, until the outcome of each call is known.

    A node is kept so that a repeated call goes to the same node. It is kept only for volumes that
    any node may have.
    """

    def __init__(self) -> None:
        # The name of the node to which CreateVolume was sent, by the volume's name. The oldest
        # entry comes first.
        self._nodes: dict[str, str] = {}
        # The names of the volumes for which a CreateVolume call is in flight.
        self._under_way: set[str] = set()

    @asynccontextmanager
    async def only(self, name: str) -> AsyncIterator[None]:
        """Let the `with` block run CreateVolume as the only such call for a volume.

        When the call has ended, the volume's node is forgotten if the outcome is known: after
        success, and after an error in _KNOWN. Raises Refused (ABORTED) if another call for the
        volume is in flight.
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
        """The name of the node to which an earlier CreateVolume call for a volume was sent.

        Empty if there was no such call, or if its outcome is known. `name` is the volume's name.
        """
        return self._nodes.get(name, "")

    def begin(self, name: str, node: str) -> None:
        """Keep the name of the node to which CreateVolume is sent, by the volume's name."""
        self._nodes[name] = node
        if len(self._nodes) > _MOST_ATTEMPTS:
            del self._nodes[next(iter(self._nodes))]


@dataclass(frozen=True)
class _VolumeElsewhere:
    """Another volume of the same pod, which is, or will be, on another node than the new volume."""

    other: OtherVolume
    # The topology segments in the other volume's PersistentVolume. Without a PersistentVolume, the
    # names of the nodes that have the volume group of its source; empty if no node has it.
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

    Without `questions` the API server is not asked. The first preferred node then counts as the
    scheduler's choice, and a pod's other volumes are not known. The same holds if the API server
    refuses a request for good. If the API server does not answer, Refused is raised.
    """

    def __init__(
        self, nodes: Nodes, attempts: Attempts, ask: Ask, questions: ClaimQuestions | None = None
    ) -> None:
        self._nodes, self._attempts, self._ask = nodes, attempts, ask
        self._questions = questions

    async def given(self, request: csi.CreateVolumeRequest) -> Node | None:
        """Return the node of a new volume's source, else the node that the scheduler chose.

        None if the volume has no source and the scheduler chose no node. Raises Refused if the node
        is not certain or does not answer, if no new volume may be made on the node, or if another
        volume of the pod is on another node.
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
        """Choose the node for a new volume that any node may have, or any allowed node.

        The node is kept in the attempts. A node to which an earlier call was sent is chosen again.
        The caller runs this method within `Attempts.only`. Raises Refused if no node can be chosen
        now.
        """
        node = self._nodes.get(self._attempts.node(request.name)) or await self._roomiest(request)
        node = self._undisputed(node)
        self._attempts.begin(request.name, node.name)
        return node

    def _undisputed(self, node: Node) -> Node:
        """Return the node; raise Refused while another node may have the node's volume groups."""
        if problem := self._nodes.why_no_new_volumes(node):
            raise unavailable(problem)
        self._nodes.require_own(node)
        return node

    async def _require_new(self, node: Node, request: csi.CreateVolumeRequest) -> None:
        """Raise Refused if no new volume may be made on the node that the scheduler chose.

        The code is RESOURCE_EXHAUSTED, which makes the scheduler choose another node. The code is
        UNAVAILABLE if an earlier call made the volume on this node, or may have: a second volume on
        another node would make this one an orphan. It is UNAVAILABLE also if none of the node's
        volume groups counts as its own yet.
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
        """Return whether the first preferred node of a request is the scheduler's choice.

        If it is not, the node is only the first of several in the order of a hash. A single
        preferred node counts as the scheduler's choice. So does the first of several nodes if the
        claim is not known, or if the API server is not asked or refuses for good.
        """
        has_several = len(request.accessibility_requirements.preferred) > 1
        if self._questions is None or claim is None or not has_several:
            return True
        is_scheduled = self._questions.claims.is_scheduled
        return await self._questions.ask(claim.namespace, is_scheduled, claim) is not False

    async def _preferred(self, segments: Mapping[str, str], claim: ClaimName | None) -> Node:
        """Return the node that the scheduler chose, by its topology segments.

        Raises Refused if the node does not answer (UNAVAILABLE), or if it has left the cluster
        (RESOURCE_EXHAUSTED, which makes the scheduler choose another node).
        """
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
        """Return whether it is certain that the cluster has no node with these topology segments.

        With an API server, no Node object may have a name that gives the segment. Without one, all
        nodes in the file of nodes must have answered, none with these segments.
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
        """Return another volume, not on this node, of the pod that uses a claim; None without one.

        None also in two cases in which another node would be no better. In the first, several pods
        use the claim, and one of them has all its other volumes on this node: then no node serves
        all pods. In the second, the new volume is on this node already, by an earlier call.

        None also if the claim is not known, or if the API server is not asked or refuses for good.
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
        """Return the topology segments in a volume's PersistentVolume, or the names of its nodes.

        The names are returned for a volume that is still to be made: those of the nodes that have
        the volume group of its source. Empty if no node has that group.
        """
        if other_volume.source is None:
            return other_volume.segments
        # Look for the node of the source, so that all nodes are asked if none is known to have the
        # volume group. Which node it is does not matter here.
        with suppress(Refused):
            await self._nodes.owner(str(other_volume.source), "source")
        uuid = other_volume.source.group_uuid
        return frozenset(node.name for node in self._nodes if uuid in node.groups)

    async def _roomiest(self, request: csi.CreateVolumeRequest) -> Node:
        """Return the node that has a new volume already, else the node with the most free capacity.

        A node may have the volume because of an earlier CreateVolume call. Raises Refused if no
        node can be chosen now, also while new members have not answered this controller.

        1. Ask all allowed nodes that answer whether they have the volume. If one has it, return
           that node, even if no new volume may be made there.
        2. Leave out nodes that do not say whether they have the volume. Raise the error of such a
           node if the node is a new member, or if no node says that it does not have the volume.
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
        # Ignore exceptions at first: if one node has the volume, errors of other nodes do not
        # matter.
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
            # Raise the error of a new member: an earlier controller may have begun to make the
            # volume on it. Leave out other nodes, so that a volume group that hangs does not delay
            # new volumes.
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
        """Return whether a node has a logical volume of that name in any of its volume groups.

        A volume that is still being filled counts. Raises Refused if the node does not answer for a
        group, and so may have the volume. Other errors of the node count as no.
        """
        unknown: Refused | None = None
        for uuid, group in node.groups.items():
            request = csi.ControllerGetVolumeRequest(volume_id=str(VolumeId(group, uuid, name)))
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._ask("ControllerGetVolume", node, request)
            except TimeoutError:
                # The router notices the cancelled call, and asks the node whether it still answers.
                # The next CreateVolume call leaves out a node that does not.
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
                # The code ABORTED of ControllerGetVolume means that the volume exists, and is being
                # filled.
            return True
        if unknown is not None:
            raise unknown
        return False

    async def _room(self, node: Node, request: csi.GetCapacityRequest) -> int:
        """Return the size, in bytes, of the largest volume for which a node has space.

        -1 if the node does not answer, or answers with an error.
        """
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                answer = await self._ask("GetCapacity", node, request)
            return int(answer.maximum_volume_size.value)
        except (Exception, asyncio.CancelledError) as error:
            problem_of(error)
            return -1

    async def capacity(self, request: csi.GetCapacityRequest) -> csi.GetCapacityResponse:
        """Return the capacity of the node that the request's topology names, or of all nodes.

        For all nodes, the available capacity is the sum; the maximum and the minimum size of a
        volume are those of any node. Nodes on which no new volume may be made have no capacity.
        Raises Refused if one of these nodes does not answer, or if the reason why no new volume may
        be made on it may soon be over.
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
