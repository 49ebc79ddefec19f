"""What the controller makes of a node that does not say whether it has a volume."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from agent.extras.controller.nodes import Node, Nodes, Refused, unavailable
from agent.extras.controller.placement import Attempts, Placement
from proto import csi_pb2 as csi

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
        of_node(grpc.StatusCode.DEADLINE_EXCEEDED),
        of_node(grpc.StatusCode.UNAVAILABLE),
        unavailable("it does not answer"),
    ],
)
def test_a_volume_that_may_be_there_is_not_taken_for_absent(error: Exception) -> None:
    of = placement(error)
    with pytest.raises(Refused, match="does not say whether it has 'vol-pvc-1'") as raised:
        asyncio.run(of._has(NODE, "vol-pvc-1"))
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_node_that_says_so_does_not_have_a_volume() -> None:
    of = placement(of_node(grpc.StatusCode.NOT_FOUND))
    assert not asyncio.run(of._has(NODE, "vol-pvc-1"))


def test_a_volume_that_is_being_filled_is_there() -> None:
    of = placement(of_node(grpc.StatusCode.ABORTED))
    assert asyncio.run(of._has(NODE, "vol-pvc-1"))


@pytest.mark.parametrize("order", [1, -1])
def test_a_volume_in_one_group_is_there_whatever_the_node_does_not_say_of_another(
    order: int,
) -> None:
    async def ask(_method: str, _node: Node, request: csi.ControllerGetVolumeRequest) -> Any:
        if request.volume_id.startswith("silent@"):
            raise of_node(grpc.StatusCode.UNAVAILABLE)

    groups = {"abcdefgh": "data", "ijklmnop": "silent"}
    node = Node("a", "", groups=dict(list(groups.items())[::order]))
    assert asyncio.run(Placement(cast(Nodes, None), Attempts(), ask)._has(node, "vol-pvc-1"))
