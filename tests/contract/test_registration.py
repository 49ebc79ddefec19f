"""Kubelet finds and uses Carver; either of the two may be restarted."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import expect
import pytest
import serving
from fakes.kubelet import FakeKubelet
from real.any import AnyHost

from agent.csi.client import Client
from agent.daemon.registration import Registration, State
from agent.daemon.server import Service
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY, Config

MIB = 1 << 20


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "r"


@contextmanager
def carver(host: AnyHost, config: Config, registry: Path) -> Iterator[Registration]:
    """One run of the service, registered by itself."""
    service = Service(config, serving.machine(host), host.lvm)
    service.start(config.endpoint)
    registration = Registration(registry, config.endpoint, interval_seconds=0.02)
    registration.start()
    yield registration
    registration.stop()
    service.stop()


def life_cycle(endpoint: Path, name: str, directory: Path) -> None:
    """A volume's life, by calls to the endpoint that kubelet has."""
    staging, target = directory / "staging", directory / "target"
    with Client(endpoint) as client:
        volume = client.create(name, 64 * MIB)
        client.stage(volume, staging)
        client.publish(volume, staging, target)
        assert client.stats(volume.volume_id, target).usage[0].total > 0
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        client.delete(volume.volume_id)
        assert client.volumes() == []


@pytest.mark.variation
def test_kubelet_finds_registers_and_uses_carver(
    host: AnyHost, config: Config, registry: Path
) -> None:
    kubelet = FakeKubelet(registry)
    with carver(host, config, registry) as registration:
        expect.soon(lambda: kubelet.look() == [DRIVER_NAME])

        endpoint, node = kubelet.drivers[DRIVER_NAME]
        assert endpoint == config.endpoint
        assert node.node_id == "here"
        assert node.accessible_topology.segments[TOPOLOGY_KEY] == "here"
        assert registration.state is State.REGISTERED
        life_cycle(endpoint, "pvc-1", host.directory)
    assert kubelet.look() == []


@pytest.mark.parametrize("wiped", ["nothing", "socket", "directory"])
@pytest.mark.variation
def test_a_restarted_kubelet_finds_carver_again(
    host: AnyHost, config: Config, registry: Path, wiped: str
) -> None:
    kubelet = FakeKubelet(registry)
    with carver(host, config, registry) as registration:
        expect.soon(lambda: kubelet.look() == [DRIVER_NAME])

        if wiped == "socket":
            registration.socket.unlink()
        elif wiped == "directory":
            shutil.rmtree(registry)
        again = FakeKubelet(registry)
        if wiped == "nothing":
            assert again.look() == [DRIVER_NAME]
        expect.soon(lambda: again.look() == [DRIVER_NAME])
        expect.soon(lambda: registration.state is State.REGISTERED)
        life_cycle(again.drivers[DRIVER_NAME][0], "pvc-1", host.directory)


@pytest.mark.variation
def test_a_restarted_carver_is_registered_again(
    host: AnyHost, config: Config, registry: Path
) -> None:
    kubelet = FakeKubelet(registry)
    with carver(host, config, registry):
        expect.soon(lambda: kubelet.look() == [DRIVER_NAME])
    assert kubelet.look() == []
    assert list(registry.iterdir()) == []

    with carver(host, config, registry):
        expect.soon(lambda: kubelet.look() == [DRIVER_NAME])
        life_cycle(kubelet.drivers[DRIVER_NAME][0], "pvc-1", host.directory)
