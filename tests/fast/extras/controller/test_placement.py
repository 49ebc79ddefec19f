"""What the controller makes of a node that does not say whether it has a volume."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from agent.extras.controller.nodes import Node, Nodes, Refused, unavailable
from agent.extras.controller.placement import Attempts, Placement

NODE = Node("a", "", groups={"abcdefgh": "data"})
NOTHING = grpc.aio.Metadata()


def placement(error: Exception) -> Placement:
    """One whose node ends each call with an error."""

    async def ask(_method: str, _node: Node, _request: Any) -> Any:
        raise error

    return Placement(cast(Nodes, None), Attempts(), ask)


def of_node(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, NOTHING, NOTHING, "why")


@pytest.mark.parametrize(
    "error",
    [
        of_node(grpc.StatusCode.ABORTED),
        of_node(grpc.StatusCode.DEADLINE_EXCEEDED),
        of_node(grpc.StatusCode.UNAVAILABLE),
        unavailable("it does not answer"),
    ],
)
def test_a_volume_that_may_be_there_is_not_taken_for_absent(error: Exception) -> None:
    of = placement(error)
    with pytest.raises(Refused, match="does not say whether it has 'vol-pvc-1'") as raised:
        asyncio.run(of._has(NODE, "vol-pvc-1", must_know=True))
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_node_that_says_so_does_not_have_a_volume() -> None:
    of = placement(of_node(grpc.StatusCode.NOT_FOUND))
    assert not asyncio.run(of._has(NODE, "vol-pvc-1", must_know=True))


def test_for_a_volume_that_may_be_anywhere_a_silent_node_is_passed_over() -> None:
    of = placement(of_node(grpc.StatusCode.UNAVAILABLE))
    assert not asyncio.run(of._has(NODE, "vol-pvc-1"))
