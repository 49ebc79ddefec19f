"""Two nodes, each with its Carver, under one Kubernetes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from callers import machines
from callers.cluster import Cluster
from callers.machines import Machine
from callers.objects import FS_TYPE, StorageClass

MIB = 1 << 20


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Cluster, dict[str, Machine]]]:
    cluster, made = machines.pair(tmp_path)
    yield cluster, made
    for machine in made.values():
        machine.stop()


@pytest.fixture
def cluster(nodes: tuple[Cluster, dict[str, Machine]]) -> Cluster:
    return nodes[0]


@pytest.fixture
def a(nodes: tuple[Cluster, dict[str, Machine]]) -> Machine:
    return nodes[1]["a"]


@pytest.fixture
def b(nodes: tuple[Cluster, dict[str, Machine]]) -> Machine:
    return nodes[1]["b"]


def test_a_pod_runs_where_its_claim_is_and_nothing_is_left_in_the_end(
    cluster: Cluster, a: Machine, b: Machine
) -> None:
    for node in "ab":
        cluster.start(cluster.claim(), node)
    assert [one.node for one in cluster.pods] == ["a", "b"]
    cluster.delete_everything()
    assert cluster.run_until(cluster.is_empty)
    assert a.left() + b.left() == []
    assert [str(one) for one in cluster.answers if one.code != "OK"] == []


def test_a_claim_that_no_longer_fits_where_it_was_to_be_is_made_elsewhere(cluster: Cluster) -> None:
    cluster.start(cluster.claim(size_bytes=1000 * MIB), "a")
    late = cluster.claim(size_bytes=1000 * MIB, selected_node="a")
    cluster.start(late)
    assert late.volume is not None
    assert late.volume.node == "b"


@pytest.mark.parametrize("of", ["snapshot", "clone"])
def test_a_copy_whose_pod_lands_on_the_wrong_node_ends_bound_on_the_right_one(
    of: str, cluster: Cluster
) -> None:
    claim = cluster.claim()
    cluster.pod(claim, "a")
    source = cluster.snapshot(claim) if of == "snapshot" else claim
    cluster.settle()
    copy = cluster.claim(source=source, selected_node="b")
    cluster.start(copy)
    assert copy.volume is not None
    assert copy.volume.node == "a"


def test_a_group_that_goes_missing_harms_no_other(cluster: Cluster, a: Machine) -> None:
    cluster.start(cluster.claim("slow"), "b")
    a.lose("group1")
    a.restart()
    fast, slow = cluster.claim("fast"), cluster.claim("slow", selected_node="a")
    cluster.pod(fast, "a")
    cluster.start(slow)
    assert fast.volume is not None
    assert slow.volume is not None
    assert (fast.volume.node, slow.volume.node) == ("a", "b")
    assert cluster.capacities["a", "slow"] == 0


def test_a_class_with_the_sidecars_own_keys_is_scheduled(tmp_path: Path) -> None:
    parameters = {
        "carver/class": "fast",
        FS_TYPE: "xfs",
        "csi.storage.k8s.io/node-stage-secret-name": "key",
        "csi.storage.k8s.io/node-stage-secret-namespace": "shop",
    }
    cluster, nodes = machines.pair(tmp_path, {"xfs": StorageClass("xfs", parameters)})
    try:
        cluster.start(cluster.claim("xfs", size_bytes=300 * MIB))
    finally:
        for node in nodes.values():
            node.stop()
