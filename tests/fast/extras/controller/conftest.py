"""An API server in the test's process, and an event loop beside it."""

from collections.abc import Iterator
from pathlib import Path

import api_server
import pytest
from clustered import Loop
from enrolled import Cluster

from agent.extras.kubernetes import access


@pytest.fixture
def api() -> Iterator[Cluster]:
    with api_server.running(Cluster()) as made:
        yield made


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.stop()


@pytest.fixture
def server(api: Cluster, tmp_path: Path) -> access.Server:
    return access.of_file(api_server.kubeconfig(tmp_path / "kubeconfig", api.url))
