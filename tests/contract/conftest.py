"""The same tests on a machine in memory and, with --real, on this one."""

from collections.abc import Iterator
from pathlib import Path

import configured
import pytest
from real.any import AnyHost

from agent.config.settings import Config
from agent.csi.client import Client, mounted
from agent.engine.host import Host
from agent.service.server import Service
from proto import csi_pb2 as csi


@pytest.fixture
def group(host: AnyHost) -> str:
    """A group of two disks, 100 and 60 extents of 4 MiB."""
    return host.new_group(100, 60)


@pytest.fixture
def config(group: str, tmp_path: Path) -> Config:
    """One class on that group, and a node called `here`."""
    return configured.carver(tmp_path, group)


@pytest.fixture
def service(host: AnyHost, config: Config) -> Iterator[Service]:
    """Carver, serving on a socket of the test's own."""
    running = Service(
        config, Host(host.run, host.kernel, host.devices, host.disks, stream=host.stream), host.lvm
    )
    # A delete has ended when it answers, however slow the disk: what is left is the test's to see.
    running.wiper.grace_seconds = running.copier.grace_seconds = 600
    running.start(config.endpoint)
    yield running
    running.stop()


@pytest.fixture
def client(service: Service, config: Config) -> Iterator[Client]:
    """Kubelet's and the provisioner's side of the socket."""
    with Client(config.endpoint) as caller:
        yield caller


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    """A volume of 64 MiB, to be mounted with ext4."""
    return client.create("pvc-1", 64 << 20, mounted("ext4"))


@pytest.fixture
def staging(host: AnyHost) -> Path:
    """Where kubelet has a volume staged."""
    return host.directory / "staging"


@pytest.fixture
def target(host: AnyHost) -> Path:
    """Where kubelet has a volume published."""
    return host.directory / "target"
