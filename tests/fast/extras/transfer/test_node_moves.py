"""Volumes that the controller moves from node to node over TLS, as the evacuation does."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import clustered
import configured
import histories
import pytest
from clustered import Cluster
from fakes.host import FakeHost

from agent.core import tag
from agent.csi.client import block
from agent.extras.transfer.move import Move, Progress


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    config = replace(configured.carver(tmp_path), evacuation=True)
    with clustered.cluster(FakeHost(tmp_path), config, tmp_path) as made:
        yield made


def move(two: Cluster, volume_id: str, layout: str = "linear", **more: object) -> Move:
    return two.controller.moves.move(volume_id, "a", "b", device_class=layout, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["linear", "thin", "sealed-linear", "sealed-thin"])
def test_a_volume_moves_whole(two: Cluster, layout: str) -> None:
    a, b = two.nodes["a"], two.nodes["b"]
    disk = histories.Disk(a.client, a.service, a.host, layout, "db")
    histories.write_some(disk, random.Random(1))
    told: list[str] = []
    shown: list[Progress] = []
    moving = move(two, disk.id, layout, tell=told.append, show=shown.append)
    with a.host.kernel.opened(disk.device):
        first = moving.approach()
        assert (first.is_moved, first.in_use, first.rounds) == (False, True, 1)
        assert first.is_caught_up
        assert first.changed_bytes > 0
        assert not moving.hand_over()
    histories.write_some(disk, random.Random(2))
    disk.deactivate()
    assert moving.hand_over()
    assert moving.hand_over()
    there = moving.complete()
    assert there["state"] == tag.READY
    assert moving.complete() == there
    size = a.service.reports.fresh(a.group).group(a.group).volume("vol-db").size_bytes
    assert b.content("vol-db", size) == a.content("vol-db", size)
    moving.finish()
    assert a.names() == set()
    [moved] = b.client.volumes()
    assert moved.volume_id == there["volume_id"]
    secrets = histories.KEY if layout.startswith(histories.SEALED) else {}
    b.client.stage(moved, b.directory / "staging", block(), secrets)
