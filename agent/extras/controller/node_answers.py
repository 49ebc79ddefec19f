"""Calls to nodes whose answers are checked: an answer that cannot be true is refused and counted.

The caller gets the bytes that the node sent, with the fields that this version does not know.
"""

import logging
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from agent.core.ids import VolumeId
from agent.extras.controller.answer_rules import RULES, Asked, Row, Untrue
from agent.extras.controller.nodes import Node, Nodes, Refused, unary
from proto import csi_pb2 as csi

_log = logging.getLogger(__name__)

# The rules of each RPC's answer, by the path of the RPC.
_ROWS = {
    f"/{service}/{method}": Row.of(service, method)
    for service, rows in RULES.items()
    for method in rows
}


class Answers:
    """Calls nodes, and checks their answers by the rules of answer_rules.py.

    A refused answer becomes the error INTERNAL, with the node's name and the field.
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
        """Call a node with the bytes of a request. Return the bytes of its answer, and the answer.

        `owned` are those ids in the request because of which this node is called. With `in_part`,
        entries that another node must list may be missing from the answer. Otherwise, Refused is
        raised if an entry was left out that no other node lists. Raises AioRpcError, Refused.
        """
        call = self.asked(node, request, owned)
        try:
            answer = await unary(node, path, data, timeout)
        except Untrue as error:
            raise _refused(node, path, error) from None
        parsed = await self.read(node, path, call, answer)
        for identity in () if in_part else call.left_out:
            self._nodes.require_elsewhere(node, identity, "the answer")
        return answer, parsed

    def asked(self, node: Node, request: Message, owned: Sequence[str] = ()) -> Asked:
        """Return the request, with what a node's answers to it are checked by.

        Call this before the request is sent: a volume group that the node has then counts as the
        node's own, even if it is moved to another node before the answer.
        """
        return Asked(
            request,
            node.name,
            csi.Topology(segments=node.segments),
            self._nodes.places(node).union(
                identity.rpartition("/")[0] for identity in owned if identity
            ),
            lambda identity: self._nodes.is_elsewhere(node, identity),
            # The ids because of which this node is called are left out: a newer reading decided
            # about them.
            lambda identity: str(identity) not in owned and self._nodes.is_anothers(node, identity),
        )

    async def read(self, node: Node, path: str, call: Asked, data: bytes) -> Any:
        """Check an answer, or a message of a stream, and return it parsed. Raises Refused.

        1. Apply the rules.
        2. If a rule refuses the answer, ask the node for its volume groups, and apply the rules
           again if the node has more groups than before.
        3. If the refused value is an id whose volume group other nodes may have, too, raise
           UNAVAILABLE with that conflict.
        4. Otherwise refuse the answer with INTERNAL.
        """
        try:
            return _judged(path, call, data)
        except Untrue as error:
            # Ask the node for its volume groups: it may have one that it did not have when it was
            # last asked. If the node does not report one now, the known groups count.
            await self._nodes.ask_anew(node)
            places, problem = call.places | self._nodes.places(node), error
        if places != call.places:
            call.places = places
            try:
                return _judged(path, call, data)
            except Untrue as error:
                problem = error
        parsed = VolumeId.parse(problem.value) if isinstance(problem.value, str) else None
        if parsed is not None and self._nodes.is_possible_holder(node, parsed):
            self._nodes.require_undisputed(parsed, "the answer")
        raise _refused(node, path, problem)


def _judged(path: str, call: Asked, data: bytes) -> Any:
    """Apply the rules of an RPC to an answer. Raises Untrue, also if a rule itself fails."""
    try:
        return _ROWS[path].judge(call, data)
    except Untrue:
        raise
    except Exception as error:
        _log.error("cannot judge an answer to %s", path, exc_info=error)
        raise Untrue("the answer", data, f"it cannot be judged: {type(error).__name__}") from None


def _refused(node: Node, path: str, error: Untrue) -> Refused:
    """Count a refused answer of a node, and return the error INTERNAL."""
    node.refused_answers += 1
    return Refused(
        grpc.StatusCode.INTERNAL,
        f"cannot pass on the answer of node {node.name} to {path.rpartition('/')[2]}: {error}. The"
        " call may have been carried out; see `A node's answer is refused` in"
        " docs/troubleshooting.md",
    )
