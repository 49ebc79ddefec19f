"""A cluster of three nodes, the first of which has four volumes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import api_server
import pytest
from clustered import Loop
from evacuating import Api, Site

from agent.settings.settings import Config


@pytest.fixture
def api() -> Iterator[Api]:
    with api_server.running(Api(), page_items=500) as made:
        yield made


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.stop()


@pytest.fixture
def sizes() -> tuple[int, int]:
    """The numbers of nodes and of volumes; a test may have others by its parameter."""
    return 3, 4


@pytest.fixture
def site(
    config: Config, tmp_path: Path, api: Api, loop: Loop, sizes: tuple[int, int]
) -> Iterator[Site]:
    """The cluster."""
    own = replace(
        config,
        evacuation=True,
        endpoint=tmp_path / "controller.sock",
        tls_directory=tmp_path / "controller",
        nodes_file=tmp_path / "nodes.toml",
    )
    made = Site(own, tmp_path, api, loop, nodes=sizes[0], volumes=sizes[1])
    yield made
    made.stop()
