"""A service for real callers, on a machine in memory and, with --real, on this one."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import configured
import pytest
import serving
from callers.directories import Directories
from callers.plugin import Answer, Plugin
from csi_client import Client
from real.any import AnyHost

from agent.daemon.server import Service
from agent.operations import preflight
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config

if TYPE_CHECKING:
    from callers.cluster import Cluster
    from callers.controllers import Central


@pytest.fixture(autouse=True)
def nothing_behind() -> None:
    """Callers meet Carver as it is: what is put off is put off."""


@pytest.fixture
def config(host: AnyHost, tmp_path: Path) -> Config:
    """One linear class, under the name that was recorded."""
    default = DeviceClass(name="default", group=host.new_group(100, 60), default=True)
    return configured.carver(tmp_path, classes=(default,))


@pytest.fixture
def answers() -> list[Answer]:
    return []


@pytest.fixture(autouse=True)
def any_machine(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine is in memory, Probe does not look at the one below."""
    if not real:
        monkeypatch.setattr(preflight, "QUICK_CHECKS", ())


@pytest.fixture(autouse=True)
def refused_at_once() -> None:
    """Not so here: a call that meets another waits, as in a cluster (tests/conftest.py)."""


@pytest.fixture
def plugin(host: AnyHost, config: Config, answers: list[Answer]) -> Iterator[Plugin]:
    """Carver, serving on a socket of the test's own."""
    running = Service(config, serving.machine(host), host.lvm)
    running.start(config.endpoint)
    with Client(config.endpoint) as client:
        yield Plugin(client, answers.append)
    running.stop()


@pytest.fixture
def directories(host: AnyHost) -> Directories:
    return Directories(host.directory, host.kernel)


@pytest.fixture
def three(tmp_path: Path) -> "Iterator[Central]":
    """Three nodes, and one controller for them."""
    # Imported here: the tests that also run in the lab's machine need no controller.
    from callers.controllers import central

    with central(tmp_path) as made:
        yield made


@pytest.fixture
def cluster(three: "Central") -> "Cluster":
    """The callers of the three nodes."""
    return three.cluster
