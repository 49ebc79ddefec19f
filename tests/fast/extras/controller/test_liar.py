"""The program of tests/cluster that lies in Carver's place, before a controller of this process."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import grpc
import pytest
from cluster import controller, liar
from cluster.liar import Liar, Lies
from clustered import Loop
from csi_client import Client
from enrolled import MAP, SPACE, Cluster, Token, add_volume, central, free_port

from agent.cli.main import main
from agent.core import ids
from agent.csi.client import block
from agent.daemon.registration import Registration
from agent.extras.controller import membership
from agent.extras.controller.controller_metrics import Metrics
from agent.extras.controller.controller_process import ClusterController
from agent.extras.controller.enrolment import Enrolment
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import Lists, Objects
from agent.settings.settings import DRIVER_NAME, Config
from agent.settings.values import Address
from proto import csi_pb2 as csi

SIZE = 4 << 20
OTHER = "data@ijklmnop"
ROOT = Path(__file__).parents[4]


class Lied:
    """A controller that the liar enrolled at as node `here`, and a client of the controller."""

    def __init__(self, made: ClusterController, source: Enrolment, loop: Loop, own: Config) -> None:
        self.central, self.source, self.loop, self.own = made, source, loop, own
        self.asked: list[str] = []
        self.volume = ""

    def lie(self, node: Config, *, as_other: bool) -> Liar:
        lies = Lies({"abcdefgh": "data"}, ids.topology("there", DRIVER_NAME), self.volume, as_other)
        made = Liar(node, lies, self.asked.append)
        made.enroller.task.run_once()
        self.loop.run(self.central.look())

        async def asked() -> None:
            known = [one for one in self.central.nodes if one.address]
            await asyncio.gather(*map(self.central.nodes.ask, known))

        self.loop.run(asked())
        return made

    def shown(self, *words: str) -> str:
        """What `carver controller` prints, and the error with which it ends."""
        with redirect_stdout(StringIO()) as out, redirect_stderr(out):
            main(["controller", *words, "--endpoint", str(self.own.endpoint)])
        return out.getvalue()

    def metric(self, name: str, node: str) -> float | None:
        page = Metrics(self.central.nodes).text().decode()
        return controller.metric_in(page, name, node)

    def create(self, name: str, node: str) -> tuple[grpc.StatusCode, str]:
        """How a claim that was scheduled to a node is refused."""
        request = csi.CreateVolumeRequest(
            name=name,
            capacity_range=csi.CapacityRange(required_bytes=SIZE),
            volume_capabilities=[block()],
        )
        request.accessibility_requirements.preferred.add(segments=ids.topology(node, DRIVER_NAME))
        with Client(self.own.endpoint) as client, pytest.raises(grpc.RpcError) as raised:
            client.controller.CreateVolume(request)
        error: grpc.Call = raised.value  # type: ignore[assignment]
        return error.code(), error.details() or ""

    def settle(self) -> None:
        """Have PersistentVolumes read after the claims to groups, which count only then."""
        self.create("pvc-0", "here")
        self.loop.run(self.central.look())


@pytest.fixture
def lied(
    api: Cluster, config: Config, server: access.Server, loop: Loop, tmp_path: Path
) -> Iterator[Lied]:
    api.tokens["stolen"] = Token()
    api.join("here", "there")
    own = central(config, tmp_path)
    source = Enrolment(own, Objects(server), Lists(server), SPACE)
    made = ClusterController(own, source)
    lied = Lied(made, source, loop, own)
    lied.volume = add_volume(api, "pvc-theirs", "there", OTHER)
    loop.run(made.start())
    yield lied
    loop.run(made.stop())


@pytest.fixture
def node(
    api: Cluster,
    lied: Lied,
    config: Config,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Config:
    """The settings of the node that the liar speaks for, as its pod has them."""
    directory = tmp_path / "enrolment"
    directory.mkdir()
    (directory / "token").write_text("stolen\n")
    (directory / "ca.crt").write_text(api.single[MAP]["data"]["ca.crt"])
    return replace(
        config,
        node_id="here",
        endpoint=tmp_path / "csi.sock",
        # The path of a socket has at most 107 bytes (unix(7)).
        registration_directory=tmp_path_factory.mktemp("registry"),
        controllers=Address("127.0.0.1", lied.source.port),
        controller_address=Address("127.0.0.1", free_port()),
        advertised_host="127.0.0.1",
        enrolment_directory=directory,
    )


def test_its_answers_are_refused_one_for_its_id_and_one_for_its_topology(
    lied: Lied, node: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_CLAIM_SECONDS", 0.0)
    with ExitStack() as ending:
        ending.callback(lied.lie(node, as_other=False).stop)
        found = controller.by_node(lied.shown("status", "--json"))
        assert (found["here"]["problem"], found["here"]["groups"]) == ("", {"abcdefgh": "data"})
        lied.settle()
        for number, field in enumerate(("volume.volume_id", "volume.accessible_topology"), 1):
            code, why = lied.create("pvc-1", "here")
            assert code is grpc.StatusCode.INTERNAL
            assert f"cannot pass on the answer of node here to CreateVolume: {field} is" in why
            assert lied.metric(controller.REFUSED_ANSWERS, "here") == number
        assert lied.asked == ["pvc-1", "pvc-1"]
        # As kubelet finds it.
        socket = Registration(node.registration_directory, node.endpoint).socket
        deadline = time.monotonic() + 30
        while not socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with Client(node.endpoint) as kubelet:
            said = kubelet.node.NodeGetInfo(csi.NodeGetInfoRequest())
        assert (said.node_id, dict(said.accessible_topology.segments)) == ("here", node.here)
    assert not socket.exists()


def test_as_another_node_it_is_not_asked_for_anything(lied: Lied, node: Config) -> None:
    with ExitStack() as ending:
        ending.callback(lied.lie(node, as_other=True).stop)
        found = controller.by_node(lied.shown("status", "--json"))
        assert "its topology is" in found["here"]["problem"]
        assert found["there"]["problem"] != ""
        assert lied.metric(controller.NODE_ANSWERS, "here") == 0
        assert "node here" in lied.shown("orphans")
        for claim in ("here", "there"):
            code, _ = lied.create("pvc-1", claim)
            assert code is grpc.StatusCode.UNAVAILABLE
        assert lied.asked == []
        assert not node.endpoint.exists()


@pytest.mark.starts_programs
def test_as_a_program_it_takes_its_settings_from_the_pod_and_ends_when_it_is_asked_to(
    tmp_path: Path,
) -> None:
    lies = {"groups": {"abcdefgh": "data"}, "topology": {}, "volume_id": "", "as_other": True}
    words = [sys.executable, "-c", Path(liar.__file__).read_text(), json.dumps(lies)]
    settings = {
        "CARVER_NODE_ID": "here",
        "CARVER_CONTROLLER_ADDRESS": "[::]:9810",
        "CARVER_ADVERTISED_HOST": "10.0.0.1",
        "CARVER_CONTROLLERS": f"127.0.0.1:{free_port()}",
        "CARVER_ENROLMENT_DIRECTORY": str(tmp_path),
    }
    given = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=given, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        assert "this node has not enrolled" in program.stderr.readline()
        program.terminate()
        assert program.wait(30) == 0


@pytest.mark.starts_programs
def test_the_checks_can_have_a_controller_delete_a_volume(lied: Lied) -> None:
    words = [sys.executable, "-c", controller.DELETE, lied.volume]
    given = {**os.environ, "CARVER_ENDPOINT": str(lied.own.endpoint), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("UNAVAILABLE ")
    assert "node there has not enrolled" in done.stdout
