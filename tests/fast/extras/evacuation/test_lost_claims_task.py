"""The task asks the controller's own rule whether a volume is forgotten with its node."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from evacuating import Site
from member_histories import FIRST, GRACE, History
from simulated import uuid_of

from agent.core import ids, tag
from agent.core.ids import VolumeId
from agent.extras.evacuation.claim_owners import Volume
from agent.extras.evacuation.lost_claims import LostClaimsTask
from agent.extras.transfer.move import ABSENT
from agent.settings.settings import DRIVER_NAME
from proto import carver_pb2 as carver

VOLUME = VolumeId("data", FIRST, f"vol-pvc-{FIRST}")
NOTHING = cast(Any, None)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture
def history(runner: asyncio.Runner) -> History:
    return History(runner.run)


def volume(identity: VolumeId = VOLUME, target: str = "") -> Volume:
    """The volume's PersistentVolume, with a move to a node under way if one is given."""
    key, value = f"topology.{DRIVER_NAME}/node", ids.node_segment("a")
    expression = {"key": key, "operator": "In", "values": [value]}
    note = json.dumps([{"from": "a", "volume": str(identity), "to": target}])
    made = Volume.of(
        {
            "metadata": {
                "name": "pv",
                "uid": "u",
                "annotations": {f"evacuate.{DRIVER_NAME}/moves": note} if target else {},
            },
            "spec": {
                "csi": {"driver": DRIVER_NAME, "volumeHandle": str(identity)},
                "nodeAffinity": {
                    "required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
                },
            },
        },
        DRIVER_NAME,
        key,
    )
    assert made is not None
    return made


def why(runner: asyncio.Runner, history: History) -> str:
    """What the task is answered about the volume of node `a`."""
    record, nodes = history.record, history.known
    task = LostClaimsTask(DRIVER_NAME, nodes, record, NOTHING, NOTHING)
    return runner.run(task._ask_about(volume()))


def test_a_volume_is_forgotten_after_the_grace_and_not_before(
    runner: asyncio.Runner, history: History
) -> None:
    assert why(runner, history) == "it is on node a"
    history.act("breaks", "a")
    assert "a" in why(runner, history)
    history.act("node_goes", "a")
    assert "unless the node comes back" in why(runner, history)
    history.wait(int(GRACE))
    assert why(runner, history) == ""
    history.act("node_comes", "a")
    assert why(runner, history) != ""


def test_while_a_member_is_silent_nothing_is_forgotten(
    runner: asyncio.Runner, history: History
) -> None:
    """It may have the lost node's disks."""
    history.act("node_goes", "a")
    history.act("breaks", "b")
    history.wait(int(GRACE))
    assert "once all nodes answer" in why(runner, history)


def test_disks_that_another_node_has_are_not_lost(runner: asyncio.Runner, history: History) -> None:
    history.act("node_goes", "a")
    history.wait(int(GRACE))
    history.act("steals", "b")
    assert "its volume group is on node b" in why(runner, history)


@pytest.mark.parametrize(
    ("state", "received", "expected"),
    [
        (tag.READY, True, "node node-00001 has it by a move"),
        (tag.MOVED, True, "node node-00001 has it by a move"),
        (tag.RECEIVING, True, ""),
        (tag.READY, False, ""),
        (ABSENT, False, ""),
    ],
)
def test_a_volume_that_another_node_has_by_a_move_is_not_lost(
    site: Site, state: str, expected: str, *, received: bool
) -> None:
    """An evacuation had handed it over, and did not get to rebind its claim."""
    identity = VolumeId.parse(site.source.handle(0))
    assert identity is not None
    answer = carver.ReceiveState(state=state)
    if state != ABSENT:
        answer.volume_id = f"data@{uuid_of(1)}/{identity.name}"
        answer.received = str(identity) if received else ""
    site.nodes[1].forged["ReceiveStatus"] = answer.SerializeToString()
    task = LostClaimsTask(
        *(DRIVER_NAME, site.controller.nodes, cast(Any, SimpleNamespace(forgets=True))),
        *(NOTHING, NOTHING),
    )
    moving = volume(identity, "node-00001")
    found = site.loop.run(task._why_moved(moving.identity, moving.target))
    assert found.startswith(expected) if expected else not found, found
    # While the target is silent, nothing is known.
    site.nodes[1].forged["ReceiveStatus"] = b"no answer"
    assert "does not say" in site.loop.run(task._why_moved(moving.identity, moving.target))
    assert not site.loop.run(task._why_moved(moving.identity, "node-that-is-forgotten"))


def test_only_a_volume_whose_node_is_forgotten_is_asked_for_at_the_target(
    runner: asyncio.Runner, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def moved(_self: object, _identity: VolumeId, target: str) -> str:
        return f"{target} has it"

    monkeypatch.setattr(LostClaimsTask, "_why_moved", moved)
    task = LostClaimsTask(DRIVER_NAME, history.known, history.record, NOTHING, NOTHING)
    assert runner.run(task._ask_about(volume(target="b"))) == "it is on node a"
    history.act("breaks", "a")
    history.act("node_goes", "a")
    assert runner.run(task._ask_about(volume(target="b"))) != "b has it"
    history.wait(int(GRACE))
    assert runner.run(task._ask_about(volume())) == ""
    assert runner.run(task._ask_about(volume(target="b"))) == "b has it"


def test_a_look_asks_in_the_loop_of_the_nodes(history: History) -> None:
    """From its own thread, by the rule of the controller."""
    task = LostClaimsTask(DRIVER_NAME, history.known, history.record, NOTHING, NOTHING)

    async def looks() -> str:
        task.start()
        try:
            return await asyncio.to_thread(task._why_not_lost, volume())
        finally:
            task.stop()

    assert asyncio.run(looks()) == "it is on node a"
