"""Calls to nodes whose answers are checked: an answer that cannot be true is refused and counted.

The caller gets the bytes that the node sent, also with fields that this version does not know.
"""

import logging
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from agent.core.ids import VolumeId
from agent.extras.controller.answer_rules import RULES, Asked, Row, Untrue
from agent.extras.controller.nodes import Node, Nodes, Refused, unary
from agent.extras.controller.transfer_rules import TRANSFER, TRANSFER_RULES
from proto import csi_pb2 as csi

_log = logging.getLogger(__name__)

# The rules for the answer to each RPC, by the path of the RPC.
_ROWS = {
    f"/{service}/{method}": Row.of(service, method, rows)
    for service, rows in (*RULES.items(), (TRANSFER, TRANSFER_RULES))
    for method in rows
}


class Answers:
    """Calls nodes, and checks their answers by the rules of answer_rules.py.

    A refused answer becomes the error INTERNAL, with the node's name and the field. If the refused
    value is an id in a volume group that several nodes may have, the error is UNAVAILABLE.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def of(
        self,
        node: Node,
        path: str,
        request: Message,
        data: bytes,
        timeout: float | None,
        *,
        owned: Sequence[str] = (),
        in_part: bool = False,
    ) -> tuple[bytes, Any]:
        """Call a node, check its answer, and return the answer's bytes and the parsed answer.

        `data` are the bytes of `request`. `owned` are those ids in the request because of which
        this node is called. Entries of other nodes' volumes are removed from a parsed list of
        volume health. With `in_part` that is all; otherwise Refused is raised unless another node
        has the volume group of such an entry as its own.

        Raises AioRpcError if the call fails, Refused if the answer is refused, or if the node has
        no known address or left the cluster.
        """
        call = self.asked(node, request, owned)
        try:
            answer = await unary(node, path, data, timeout)
        except Untrue as error:
            raise refused_answer(node, path, error) from None
        parsed = await self.read(node, path, call, answer)
        for identity in () if in_part else call.left_out:
            self._nodes.require_elsewhere(node, identity, "the answer")
        return answer, parsed

    def asked(self, node: Node, request: Message, owned: Sequence[str] = ()) -> Asked:
        """Return a request with the facts by which a node's answers to the request are checked.

        Call this method before the request is sent: a volume group that the node has at that time
        then counts as the node's own, even if the group is moved to another node before the answer.
        """
        return Asked(
            request,
            node.name,
            csi.Topology(segments=node.segments),
            self._nodes.places(node).union(
                identity.rpartition("/")[0] for identity in owned if identity
            ),
            lambda identity: self._nodes.is_elsewhere(node, identity),
            # Return False for the ids because of which this node is called: a newer read of their
            # PersistentVolumes chose the node.
            lambda identity: str(identity) not in owned and self._nodes.is_anothers(node, identity),
        )

    async def read(self, node: Node, path: str, call: Asked, data: bytes) -> Any:
        """Check an answer, or a message of a stream, and return it parsed.

        Raises Refused if the answer is refused.

        1. Apply the rules. If they accept the answer, return it.
        2. Otherwise ask the node for its volume groups. If more groups are its own than before,
           apply the rules again.
        3. If the refused value is an id in a volume group that the node may have, and other nodes
           may have that group, too, raise the error UNAVAILABLE with that conflict.
        4. Otherwise count the refused answer, and raise the error INTERNAL.
        """
        try:
            return _accepted(path, call, data)
        except Untrue as error:
            # Ask the node for its volume groups: it may have a group that it did not have when it
            # was last asked. If the node does not answer now, the groups that it named before
            # count.
            await self._nodes.ask_anew(node)
            places, problem = call.places | self._nodes.places(node), error
        if places != call.places:
            call.places = places
            try:
                return _accepted(path, call, data)
            except Untrue as error:
                problem = error
        parsed = VolumeId.parse(problem.value) if isinstance(problem.value, str) else None
        if parsed is not None and self._nodes.is_possible_holder(node, parsed):
            self._nodes.require_undisputed(parsed, "the answer")
        raise refused_answer(node, path, problem)


def _accepted(path: str, call: Asked, data: bytes) -> Any:
    """Apply the rules to an answer, and note it for the rules of the next message of a stream."""
    call.previous = _judged(path, call, data)
    return call.previous


def _judged(path: str, call: Asked, data: bytes) -> Any:
    """Apply the rules of an RPC to an answer. Raises Untrue, also if a rule itself fails."""
    try:
        return _ROWS[path].judge(call, data)
    except Untrue:
        raise
    except Exception as error:
        _log.error("cannot judge an answer to %s", path, exc_info=error)
        raise Untrue("the answer", data, f"it cannot be judged: {type(error).__name__}") from None


def refused_answer(node: Node, path: str, error: Untrue) -> Refused:
    """Count a refused answer of a node, and return the error INTERNAL for the caller."""
    node.refused_answers += 1
    return Refused(
        grpc.StatusCode.INTERNAL,
        f"cannot pass on the answer of node {node.name} to {path.rpartition('/')[2]}: {error}. The"
        " call may have been carried out; see `A node's answer is refused` in"
        " docs/troubleshooting.md",
    )
