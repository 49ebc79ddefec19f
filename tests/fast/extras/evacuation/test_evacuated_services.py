"""An evacuation of Carver's own services over TLS, with the pods that write to their volumes."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import clustered
import configured
import expect
import grpc
import histories
import pytest
from baton import Baton
from clustered import Cluster
from evacuation_histories import EPOCH, Connection
from evacuation_kube import Kube
from fakes.host import FakeHost
from moving_model import Refusal
from nodes import SIZE, Node

from agent.core import ids
from agent.csi.client import block
from agent.extras.evacuation import drive, evacuator, unit_drive
from agent.extras.evacuation.cluster_view import ClusterView
from agent.extras.evacuation.evacuation_context import EXPECTED, Context
from agent.extras.evacuation.evacuator import Evacuator
from agent.extras.evacuation.progress import Progress
from agent.extras.kubernetes import objects, rebinding
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import Lists
from agent.settings.settings import DRIVER_NAME
from mount import command
from proto import csi_pb2 as csi

# Size of the part of a volume in which its lines are.
_PART = 64 << 10


class Users(set[str]):
    """The pods that have a volume staged; the last one to go unstages it."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def discard(self, user: object) -> None:
        if user in self:
            super().discard(user)
            if not self:
                self._end()


class Volume:
    """A volume of a node as its pods have it."""

    def __init__(self, node: Node, made: csi.Volume) -> None:
        self._node, self.made, self.volume_id = node, made, made.volume_id
        self.users = Users(self._unstage)
        self._open = ExitStack()

    @property
    def device(self) -> str:
        host = self._node.host
        found = host.devices.find(self._node.group, ids.logical_name(self.volume_id))
        assert found is not None
        opened = host.devices.mapping(found)
        return opened.path if opened is not None else found.path

    def stage(self, user: str) -> None:
        context = dict(self.made.volume_context)
        is_sealed = context["carver/class"].startswith(histories.SEALED)
        secrets = histories.KEY if is_sealed else {}
        self._node.client.stage(self.made, self._staging, block(), secrets)
        self._open.enter_context(self._node.host.kernel.opened(self.device))
        self.users.add(user)

    @property
    def _staging(self) -> Path:
        return self._node.directory / f"staging-{ids.logical_name(self.volume_id)}"

    def _unstage(self) -> None:
        self._open.close()
        self._node.client.unstage(self.volume_id, self._staging)

    @property
    def content(self) -> tuple[str, ...]:
        data = self._node.host.read_bytes(self.device, 1 << 20, _PART).rstrip(b"\0")
        return tuple(json.loads(data or b"[]"))

    @content.setter
    def content(self, lines: tuple[str, ...]) -> None:
        data = json.dumps(lines).encode().ljust(_PART, b"\0")
        self._node.host.write_bytes(self.device, 1 << 20, data)


class Service:
    """A node with Carver's service, for the pods on it."""

    is_up = True

    def __init__(self, node: Node) -> None:
        self.node, self.name = node, node.config.node_id
        self.volumes: dict[str, Volume] = {}

    def make(self, name: str, device_class: str) -> Volume:
        parameters = {"class": device_class}
        made = self.node.client.create(name, SIZE, block(), parameters=parameters)
        volume = self.volumes[name] = Volume(self.node, made)
        volume.stage("setup")
        volume.content = ()
        volume.users.discard("setup")
        return volume

    def stage(self, volume_id: str, user: str) -> Volume:
        for made in self.node.client.volumes():
            if made.volume_id == volume_id:
                known = self.volumes.get(volume_id) or Volume(self.node, made)
                self.volumes = {
                    **{key: one for key, one in self.volumes.items() if one.volume_id != volume_id},
                    volume_id: known,
                }
                known.stage(user)
                return known
        raise Refusal(grpc.StatusCode.NOT_FOUND, volume_id)


class Locked(Kube):
    """A Kubernetes that several threads ask."""

    def __init__(self, services: Mapping[str, Any]) -> None:
        self.lock, self._written = threading.RLock(), 0.0
        super().__init__(services, Baton(random.Random(1)))

    def answer(self, method: str, url: str, body: bytes | None) -> tuple[int, Any]:
        with self.lock:
            return super().answer(method, url, body)

    def tick(self) -> None:
        # The fake's pools count each write.
        self.is_writing = time.monotonic() - self._written > 0.5
        with self.lock:
            super().tick()

    def _write(self) -> None:
        if self.is_writing:
            self._written = time.monotonic()
        super()._write()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    config = replace(configured.carver(tmp_path), evacuation=True)
    hosts = {}
    for number, name in enumerate("ab", 1):
        (tmp_path / f"machine-{name}").mkdir()
        hosts[name] = FakeHost(tmp_path / f"machine-{name}", number)
    with clustered.cluster(hosts["a"], config, tmp_path, hosts=hosts) as made:
        yield made


@pytest.fixture
def kube(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> Locked:
    made = Locked({name: Service(node) for name, node in two.nodes.items()})
    for number, layout in enumerate(("linear", "thin", "sealed-linear")):
        made.replica(f"db-{number}", {f"data-db-{number}": layout}, "a", "Delete")

    class Bound(Connection):
        kube = made

    monkeypatch.setattr(objects, "Connection", Bound)
    monkeypatch.setattr(rebinding, "sleep", lambda _seconds: time.sleep(0.05))
    for module, name in (
        *((unit_drive, one) for one in ("_PAUSE_SECONDS", "_EVICTION_SECONDS", "_LOOK_SECONDS")),
        *((evacuator, one) for one in ("_PLAN_SECONDS", "_SETTLE_SECONDS")),
        (drive, "_AGAIN_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.2)
    return made


class Operator:
    """Looks after the cluster: lets the evacuator look and the controllers act."""

    def __init__(self, two: Cluster, kube: Locked) -> None:
        self.kube, self.ahead = kube, 0.0
        server = Server("tests", "127.0.0.1", 1)
        self.progress = Progress()
        self.context = Context(
            *(DRIVER_NAME, server, cast(Any, two.controller.moves), self.progress),
            # The API server's clock stands.
            *(lambda: EPOCH + kube.baton.now + self.ahead, time.monotonic, command.begin),
        )
        view = ClusterView(DRIVER_NAME, two.controller.nodes, Lists(server), two.loop.loop)
        self.evacuator = Evacuator(self.context, view.view, 3600.0)

    def run(self, is_over: Callable[[], bool]) -> None:
        until, due = time.monotonic() + 4 * expect.PATIENCE_SECONDS, 0.0
        while not is_over():
            assert time.monotonic() < until, [
                (one.problem, [(unit.stage, unit.problem) for unit in one.units])
                for one in self.progress.snapshot()
            ]
            if time.monotonic() >= due:
                try:
                    self.evacuator.look()
                except EXPECTED as error:
                    print(error)
                due = time.monotonic() + 0.3
            self.kube.tick()
            time.sleep(0.005)

    def are_on(self, node: str, count: int = 3) -> bool:
        """Whether all pods run on a node."""
        pods = self.kube.all("pods")
        return len(pods) == count and all(
            pod["status"]["phase"] == "Running" and pod["spec"].get("nodeName") == node
            for pod in pods
        )


def uuids(node: Node) -> dict[str, str]:
    """The UUIDs of the logical volumes of a node's volumes."""
    found = node.service.reports.fresh(node.group).group(node.group)
    return {name: found.volume(name).uuid for name in node.names() if name.startswith("vol-")}


@pytest.mark.timeout(600)
def test_services_are_evacuated_and_the_evacuation_is_undone(two: Cluster, kube: Locked) -> None:
    operator = Operator(two, kube)
    try:
        operator.run(lambda: operator.are_on("a") and min(map(len, kube.lines.values())) > 3)
        kube.request("a", "{}")
        operator.run(lambda: operator.are_on("b"))
        # Each pod has read all its lines when it started, and writes on.
        lines = {claim: len(own) for claim, own in kube.lines.items()}
        operator.run(lambda: all(len(kube.lines[one]) > count for one, count in lines.items()))
        assert {kube.place_of(claim) for claim in kube.lines} == {"b"}
        assert two.nodes["a"].client.volumes() == []
        assert len(two.nodes["a"].names()) == 3
        left = uuids(two.nodes["a"])
        kube.request("a", '"undo"')
        operator.run(lambda: operator.are_on("a"))
        # Each came back to what it had left there.
        assert uuids(two.nodes["a"]) == left
        kube.request("a", None)
        operator.ahead = 2 * 86400.0
        operator.run(lambda: two.nodes["b"].names() == set())
        assert len(two.nodes["a"].client.volumes()) == 3
        for name in ("a", "b"):
            assert list(two.nodes[name].client.snapshots()) == []
    finally:
        end(operator)


def end(operator: Operator) -> None:
    """End what goes on."""
    operator.evacuator.end()
    operator.run(lambda: operator.evacuator.is_idle)
    for service in operator.kube.services.values():
        for volume in service.volumes.values():
            for user in list(volume.users):
                volume.users.discard(user)


@pytest.mark.timeout(600)
def test_nothing_is_left_of_a_volume_whose_name_is_a_digest(
    two: Cluster, kube: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy gets another name than what it left, which a move back does not find by its name."""
    for name in list(kube.replicas):
        kube.abandon(name)
    for kind in ("pods", "persistentvolumeclaims", "persistentvolumes"):
        kube.objects[kind].clear()
    for made in two.nodes["a"].client.volumes():
        two.nodes["a"].client.delete(made.volume_id)
    service = kube.services["a"]
    create = service.make
    monkeypatch.setattr(
        service, "make", lambda name, layout: create(f"{name}-{'long-' * 12}", layout)
    )
    kube.replica("db-0", {"data-db-0": "linear"}, "a", "Delete")
    [was] = two.nodes["a"].names()
    operator = Operator(two, kube)
    try:
        operator.run(lambda: operator.are_on("a", 1))
        kube.request("a", "{}")
        operator.run(lambda: operator.are_on("b", 1))
        kube.request("a", '"undo"')
        operator.run(lambda: operator.are_on("a", 1) and operator.evacuator.is_idle)
        kube.request("a", None)
        operator.ahead = 2 * 86400.0
        operator.run(lambda: two.nodes["b"].names() == set())
        operator.run(lambda: operator.evacuator.is_idle)
        [made] = two.nodes["a"].client.volumes()
        assert two.nodes["a"].names() == {ids.logical_name(made.volume_id)} != {was}
    finally:
        end(operator)
