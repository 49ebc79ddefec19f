"""What nodes answer, read before it is passed on: what cannot be true is refused, and counted.

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

# By the path of an RPC.
_ROWS = {
    f"/{service}/{method}": Row.of(service, method)
    for service, rows in RULES.items()
    for method in rows
}


class Answers:
    """Calls nodes, and reads what they answer by the rules of agent/extras/controller/answer_rules.

    A refused answer is INTERNAL, with the node's name and the field.
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
        """Call a node with the bytes of a request: the bytes of its answer, and the answer.

        `owned` are the request's ids that the call goes to this node for.
        Raises AioRpcError, Refused; the latter also where what another node is to tell was left out
        and none does.
        """
        asked = self.asked(node, request, owned)
        try:
            answer = await unary(node, path, data, timeout)
        except Untrue as error:
            raise _refused(node, path, error) from None
        found = await self.read(node, path, asked, answer)
        for one in () if in_part else asked.left_out:
            self._nodes.require_elsewhere(node, one, "the answer")
        return answer, found

    def asked(self, node: Node, request: Message, owned: Sequence[str] = ()) -> Asked:
        """By what the answers of a node to a request are read; to be had before it is sent.

        What the node had then is its own, even if a group is moved to another node meanwhile.
        """
        return Asked(
            request,
            node.name,
            csi.Topology(segments=node.segments),
            self._nodes.places(node).union(one.rpartition("/")[0] for one in owned if one),
            lambda one: self._nodes.is_elsewhere(node, one),
            # What the call goes there for is decided by a newer reading.
            lambda one: str(one) not in owned and self._nodes.is_anothers(node, one),
        )

    async def read(self, node: Node, path: str, asked: Asked, data: bytes) -> Any:
        """An answer, or a message of a stream, that may be true. Raises Refused."""
        try:
            return _judged(path, asked, data)
        except Untrue as error:
            # The node may have a volume group that it did not have when it was asked last. If it
            # does not say so now, what is known counts.
            await self._nodes.ask_anew(node)
            places, problem = asked.places | self._nodes.places(node), error
        if places != asked.places:
            asked.places = places
            try:
                return _judged(path, asked, data)
            except Untrue as error:
                problem = error
        parsed = VolumeId.parse(problem.value) if isinstance(problem.value, str) else None
        if parsed is not None and self._nodes.may_have(node, parsed):
            self._nodes.require_undisputed(parsed, "the answer")
        raise _refused(node, path, problem)


def _judged(path: str, asked: Asked, data: bytes) -> Any:
    """An answer by its RPC's rules. Raises Untrue, also where a rule itself fails."""
    try:
        return _ROWS[path].judge(asked, data)
    except Untrue:
        raise
    except Exception as error:
        _log.error("cannot judge an answer to %s", path, exc_info=error)
        raise Untrue("the answer", data, f"it cannot be judged: {type(error).__name__}") from None


def _refused(node: Node, path: str, error: Untrue) -> Refused:
    """The refusal of a node's answer, which is counted."""
    node.refused_answers += 1
    return Refused(
        grpc.StatusCode.INTERNAL,
        f"cannot pass on the answer of node {node.name} to {path.rpartition('/')[2]}: {error}. The"
        " call may have been carried out; see `A node's answer is refused` in"
        " docs/troubleshooting.md",
    )
