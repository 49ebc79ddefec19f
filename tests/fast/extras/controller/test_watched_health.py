"""A node's kubelet that asks for its volumes' health tells its pods; the controller does not."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clustered import Cluster, cluster
from fakes.host import FakeHost

from agent.csi.client import block
from agent.settings.settings import Config


@pytest.fixture
def one(fake: FakeHost, config: Config, tmp_path: Path) -> Iterator[Cluster]:
    """The controller before one node."""
    with cluster(fake, config, tmp_path, names=["a"]) as made:
        yield made


def watched(cluster: Cluster) -> bool:
    """Whether the controller takes the node for one whose kubelet asks."""
    cluster.ask()
    [node] = cluster.controller.nodes
    return node.is_watched


def test_only_a_kubelet_that_asked_lately_is_taken_for_one_that_tells_pods(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks each minute by default, also while no volume is used."""
    [node] = one.nodes.values()
    assert not watched(one)
    # What is asked of the volumes by others, such as `carver volume show`, is no kubelet.
    volume_id = node.client.create("pvc-1", 24 << 20, block()).volume_id
    node.client.node_health(volume_id)
    assert not watched(one)
    node.client.storage_health()
    assert watched(one)
    true = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: true() + 150)
    assert watched(one)
    monkeypatch.setattr(time, "monotonic", lambda: true() + 200)
    assert not watched(one)
