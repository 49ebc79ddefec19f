"""A node or a controller dies at each step of each call: the repeated call succeeds.

Nothing is left then, and nothing is lost. The calls are the sidecars', with what they do after each
answer (callers.md).
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from callers.controllers import Central
from callers.plugin import Answer, Plugin
from callers.rules import Reaction

from agent.csi.client import block, of_snapshot, of_volume
from agent.settings.settings import TOPOLOGY_KEY
from proto import csi_pb2 as csi

MIB = 1 << 20
SIZE = 24 * MIB
# Calls are repeated for so many seconds at most.
_PATIENCE = 60


class Trial:
    """The cluster with a volume and its snapshot on node a, and a call that is to be made."""

    def __init__(self, three: Central, kind: str) -> None:
        self.three = three
        self.volume = self.make("base", at="a").volume
        made = self.repeat(
            "CreateSnapshot",
            csi.CreateSnapshotRequest(name="snap-base", source_volume_id=self.volume.volume_id),
        )
        self.snapshot = made.snapshot
        self.method, self.request = getattr(self, kind)()

    def make(self, name: str, **how: Any) -> Any:
        return self.repeat("CreateVolume", self._create(name, **how))

    @staticmethod
    def _create(
        name: str, *, at: str = "", source: Any = None, size_bytes: int = SIZE
    ) -> csi.CreateVolumeRequest:
        every = [csi.Topology(segments={TOPOLOGY_KEY: one}) for one in "abc"]
        index = "abc".index(at or "a")
        wanted = csi.TopologyRequirement(requisite=every, preferred=every[index:] + every[:index])
        return csi.CreateVolumeRequest(
            name=f"pvc-{name}",
            capacity_range=csi.CapacityRange(required_bytes=size_bytes),
            volume_capabilities=[block()],
            parameters={"carver/class": "fast"},
            volume_content_source=source,
            accessibility_requirements=wanted if at else None,
        )

    def create(self) -> tuple[str, Any]:
        return "CreateVolume", self._create("new", at="a")

    def create_anywhere(self) -> tuple[str, Any]:
        """As for a class that binds immediately: the most room is on the node that dies."""
        for node in "bc":
            self.make(f"large-{node}", at=node, size_bytes=10 * SIZE)
        return "CreateVolume", self._create("new")

    def restore(self) -> tuple[str, Any]:
        source = of_snapshot(self.snapshot.snapshot_id)
        return "CreateVolume", self._create("new", at="b", source=source)

    def clone(self) -> tuple[str, Any]:
        source = of_volume(self.volume.volume_id)
        return "CreateVolume", self._create("new", at="c", source=source)

    def delete(self) -> tuple[str, Any]:
        made = self.make("new", at="a").volume
        return "DeleteVolume", csi.DeleteVolumeRequest(volume_id=made.volume_id)

    def take(self) -> tuple[str, Any]:
        request = csi.CreateSnapshotRequest(name="snap", source_volume_id=self.volume.volume_id)
        return "CreateSnapshot", request

    def delete_snapshot(self) -> tuple[str, Any]:
        request = csi.DeleteSnapshotRequest(snapshot_id=self.snapshot.snapshot_id)
        return "DeleteSnapshot", request

    def expand(self) -> tuple[str, Any]:
        made = self.make("new", at="a").volume
        wanted = csi.CapacityRange(required_bytes=2 * SIZE)
        return "ControllerExpandVolume", csi.ControllerExpandVolumeRequest(
            volume_id=made.volume_id, capacity_range=wanted, volume_capability=block()
        )

    def modify(self) -> tuple[str, Any]:
        made = self.make("new", at="a").volume
        return "ControllerModifyVolume", csi.ControllerModifyVolumeRequest(
            volume_id=made.volume_id, mutable_parameters={"carver/readAhead": "1MiB"}
        )

    def ask(self) -> Answer:
        return self.three.plugin.ask(self.method, self.request)

    def repeat(self, method: str, request: Any) -> Any:
        """As a sidecar does, each second, until the call succeeds."""
        for _ in range(_PATIENCE):
            answer = self.three.plugin.ask(method, request)
            if answer.reaction is Reaction.GOES_ON:
                return answer.response
            assert not answer.reaction.is_a_stop, answer
            self.three.cluster.step()
        raise AssertionError(self.three.cluster.answers[-1])

    def names(self) -> dict[str, list[str]]:
        """The logical volumes on each node."""
        return {name: sorted(one.left()) for name, one in self.three.machines.items()}

    def end(self, answer: Answer) -> None:
        """Repeat the call until it succeeds, and once more; delete all that there is."""
        first = answer.response or self.repeat(self.method, self.request)
        self.three.run_until_all_answer()
        assert self.repeat(self.method, self.request) == first
        client = self.three.leader.client
        for snapshot in client.snapshots():
            client.delete_snapshot(snapshot.snapshot_id)
        found = list(client.volumes())
        assert len({one.volume_id.partition("/")[2] for one in found}) == len(found)
        if self.method == "CreateVolume":
            assert first.volume.volume_id in {one.volume_id for one in found}
        for one in found:
            client.delete(one.volume_id)
        self.three.cluster.step()
        assert self.names() == {"a": [], "b": [], "c": []}


KINDS = (
    *("create", "create_anywhere", "restore", "clone", "delete", "take"),
    *("delete_snapshot", "expand", "modify"),
)


def but_long(*kinds: str) -> list[ParameterSet]:
    """All kinds, of which some are left to --every."""
    return [pytest.param(one, marks=[pytest.mark.long] if one in kinds else []) for one in KINDS]


@pytest.mark.parametrize("kind", but_long("clone", "delete_snapshot", "take", "modify"))
def test_a_node_dies_at_a_step(kind: str, three: Central) -> None:
    """Before it or after it; then the node is off for some seconds."""
    node = three.machines["a"]
    trial = Trial(three, kind)
    node.restart()
    three.cluster.step()
    begun = node.steps
    answer = trial.ask()
    assert answer.code == "OK", answer
    count = node.steps - begun
    trial.end(answer)
    for stop_at, before in itertools.product(range(count), (True, False)):
        trial = Trial(three, kind)
        node.kill(stop_at, before=before)
        three.cluster.step()
        answer = trial.ask()
        # Not where what follows the answer takes fewer steps than it did.
        if node.is_dead:
            node.switch_off(7)
        trial.end(answer)


@pytest.mark.parametrize("kind", but_long("create_anywhere"))
def test_the_controller_dies_at_a_step(kind: str, three: Central) -> None:
    """Before a call is sent to a node, or when its answer has come; then the other is asked."""
    trial = Trial(three, kind)
    begun = three.leader.steps
    answer = trial.ask()
    assert answer.code == "OK", answer
    count = three.leader.steps - begun
    assert count >= 2
    trial.end(answer)
    for stop_at in range(count):
        trial = Trial(three, kind)
        dying = three.leader
        dying.dies_after = dying.steps + stop_at
        answer = trial.ask()
        assert dying.is_dead
        assert answer.code != "OK"
        assert not answer.reaction.is_a_stop
        three.cluster.step()
        assert three.leader is not dying
        trial.end(answer)


@pytest.mark.parametrize("kind", KINDS)
def test_both_controllers_are_asked_the_same_at_once(kind: str, three: Central) -> None:
    """A leader that lost its lease has its call under way when the next one makes it."""
    trial = Trial(three, kind)
    plugins = [Plugin(one.client, three.cluster.answers.append) for one in three.controllers]
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(one.ask, trial.method, trial.request) for one in plugins]
        answers = [one.result() for one in made]
    assert not [str(one) for one in answers if one.reaction.is_a_stop]
    done = [one for one in answers if one.code == "OK"]
    assert done
    assert all(one.response == done[0].response for one in done)
    trial.end(done[0])
