"""A volume moves to another node, is written to there, and comes back by what has changed."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nodes
import pytest
from clustered import Cluster, cluster
from nodes import MIB, SIZE, Node
from real.any import AnyHost

from agent.csi.client import block
from agent.extras.transfer.move import Move
from agent.settings.settings import Config


@pytest.fixture
def two(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(host, replace(config, evacuation=True), tmp_path) as made:
        yield made


def run(moving: Move) -> int:
    """Move an unused volume; return the number of bytes that the first round has sent."""
    sent_bytes = moving.approach().changed_bytes
    assert moving.hand_over()
    moving.complete()
    return sent_bytes


def uuid(node: Node) -> str:
    return node.service.reports.fresh(node.group).group(node.group).volume("vol-db").uuid


@pytest.mark.parametrize("layout", ["linear", "thin"])
def test_a_volume_comes_back_by_what_has_changed(two: Cluster, layout: str) -> None:
    a, b = two.nodes["a"], two.nodes["b"]
    volume = nodes.volume_of(a, layout)
    a.host.write_bytes(a.device("vol-db"), 0, random.Random(1).randbytes(8 * MIB))
    a.client.unstage(volume.volume_id, a.directory / "staging")
    left = uuid(a)
    moves = two.controller.moves
    away = moves.move(volume.volume_id, "a", "b", device_class=layout)
    assert run(away) >= 8 * MIB
    [there] = b.client.volumes()
    b.client.stage(there, b.directory / "staging", block())
    # Some blocks in two pieces, a piece that was never written, and one of zeroes.
    for offset, data in (
        *((MIB + 4096, b"x" * 4096), (2 * MIB - 4096, b"y" * 8192), (20 * MIB, b"z" * 4096)),
        (5 * MIB, bytes(MIB)),
    ):
        b.host.write_bytes(b.device("vol-db"), offset, data)
    b.client.unstage(there.volume_id, b.directory / "staging")
    content = b.content("vol-db")
    b.host.deactivate(b.group, "vol-db")
    back = moves.move(
        there.volume_id,
        *("b", "a"),
        device_class=layout,
        replaces=away.source.state().release,
    )
    assert run(back) == 3 * MIB
    assert (uuid(a), a.content("vol-db")) == (left, content)
    assert len(content) == SIZE
    a.host.deactivate(a.group, "vol-db")
    [volume] = nodes.usable(a)
    back.finish()
    assert (a.names(), b.names()) == ({"vol-db"}, set())
