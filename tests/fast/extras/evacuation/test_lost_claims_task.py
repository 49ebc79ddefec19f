"""The task asks the controller's own rule whether a volume is forgotten with its node."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
from member_histories import FIRST, GRACE, History

from agent.core.ids import VolumeId
from agent.extras.evacuation.lost_claims import LostClaimsTask
from agent.settings.settings import DRIVER_NAME

VOLUME = VolumeId("data", FIRST, f"vol-pvc-{FIRST}")
NOTHING = cast(Any, None)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture
def history(runner: asyncio.Runner) -> History:
    return History(runner.run)


def why(runner: asyncio.Runner, history: History) -> str:
    """What the task is answered about the volume of node `a`."""
    record, nodes = history.record, history.known
    task = LostClaimsTask(DRIVER_NAME, nodes, record, NOTHING, NOTHING)
    return runner.run(task._ask(VOLUME))


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


def test_a_look_asks_in_the_loop_of_the_nodes(history: History) -> None:
    """From its own thread, by the rule of the controller."""
    task = LostClaimsTask(DRIVER_NAME, history.known, history.record, NOTHING, NOTHING)

    async def looks() -> str:
        task.start()
        try:
            return await asyncio.to_thread(task._why_not_forgotten, VOLUME)
        finally:
            task.stop()

    assert asyncio.run(looks()) == "it is on node a"
