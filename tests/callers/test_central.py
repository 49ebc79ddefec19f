"""Three nodes under one Kubernetes whose sidecars ask the cluster's controller."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import configured
import grpc
import pytest
from authority import Authority
from callers.cluster import Cluster, Node
from callers.controllers import CLASSES, Central, central
from callers.machines import Machine
from callers.objects import Claim, Resize
from callers.plugin import Answer, Plugin
from callers.sidecars import Provisioner, Snapshotter
from clustered import Loop
from simulated import SimulatedNode

from agent.core.settings import DRIVER_NAME
from agent.csi.client import Client, Mode, block, mounted
from agent.extras.controller import certificates
from agent.extras.controller.process import ClusterController, Files
from lvm import report
from proto import csi_pb2 as csi

MIB = 1 << 20
RAW = block(Mode.SINGLE_NODE_MULTI_WRITER)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Central]:
    with central(tmp_path) as made:
        yield made


@pytest.fixture
def cluster(three: Central) -> Cluster:
    return three.cluster


def test_a_pod_runs_where_it_was_put_and_nothing_is_left_in_the_end(
    three: Central, cluster: Cluster
) -> None:
    for node in three.machines:
        cluster.start(cluster.claim(), node)
    assert [one.node for one in cluster.pods] == list("abc")
    assert [one.cycles for one in cluster.pods] == [1, 1, 1]
    cluster.delete_everything()
    assert cluster.run_until(cluster.is_empty)
    assert [one.left() for one in three.machines.values()] == [[], [], []]
    assert [str(one) for one in cluster.answers if one.code != "OK"] == []


@pytest.mark.parametrize("of", ["snapshot", "clone"])
def test_a_copy_whose_pod_was_put_elsewhere_is_bound_in_one_further_cycle(
    of: str, cluster: Cluster
) -> None:
    claim = cluster.claim()
    cluster.start(claim, "b")
    source = cluster.snapshot(claim) if of == "snapshot" else claim
    cluster.settle()
    copy = cluster.claim(source=source, selected_node="c")
    pod = cluster.start(copy)
    assert (pod.node, pod.cycles) == ("b", 2)


def test_a_claim_that_binds_immediately_needs_no_pod(cluster: Cluster) -> None:
    claim = cluster.claim("now")
    cluster.settle()
    pod = cluster.start(claim)
    assert claim.volume is not None
    assert (pod.node, pod.cycles) == (claim.volume.node, 1)


def test_a_claim_that_no_longer_fits_is_scheduled_anew(cluster: Cluster) -> None:
    cluster.start(cluster.claim(size_bytes=1000 * MIB), "a")
    late = cluster.claim(size_bytes=1000 * MIB, selected_node="a")
    pod = cluster.start(late)
    assert (pod.node != "a", pod.cycles) == (True, 2)


def test_a_claim_whose_node_is_off_waits_for_it_and_the_others_do_not(
    three: Central, cluster: Cluster
) -> None:
    three.machines["a"].switch_off(300)
    claim = cluster.claim(selected_node="a")
    cluster.pod(claim)
    cluster.pod(cluster.claim(), "b")
    anywhere = cluster.claim("now")
    assert cluster.run_until(lambda: cluster.pods[1].is_running and bool(anywhere.volume), 60)
    assert (claim.volume, claim.selected_node) == (None, "a")
    cluster.settle()
    assert cluster.pods[0].node == "a"


def test_the_volumes_and_snapshots_of_a_node_that_is_off_are_deleted_when_it_is_back(
    three: Central, cluster: Cluster
) -> None:
    claim = cluster.claim()
    cluster.start(claim, "c")
    cluster.snapshot(claim)
    cluster.settle()
    three.machines["c"].switch_off(100)
    cluster.delete_everything()
    assert not cluster.run_until(cluster.is_empty, 90)
    assert cluster.run_until(cluster.is_empty)
    assert three.machines["c"].left() == []


def expansions(cluster: Cluster) -> list[Answer]:
    return [one for one in cluster.answers if one.rule.method == "ControllerExpandVolume"]


def test_a_claim_grows_on_its_node_before_its_persistent_volume(cluster: Cluster) -> None:
    claim = cluster.claim()
    cluster.start(claim, "b")
    cluster.expand(claim, 100 * MIB)
    cluster.settle()
    assert claim.volume is not None
    assert claim.capacity_bytes == claim.volume.size_bytes == 100 * MIB
    assert [one.code for one in expansions(cluster)] == ["OK"]


@pytest.mark.parametrize("capability", [RAW, mounted("ext4")], ids=["raw", "mounted"])
def test_what_cannot_grow_is_refused_before_its_persistent_volume_has_grown(
    capability: csi.VolumeCapability, cluster: Cluster
) -> None:
    claim = cluster.claim(capability=capability)
    pod = cluster.start(claim, "b")
    before = claim.capacity_bytes
    cluster.expand(claim, 1 << 40)
    assert cluster.run_until(lambda: claim.resize is Resize.INFEASIBLE, 30)
    assert expansions(cluster)[-1].code == "OUT_OF_RANGE"
    assert "node b: " in expansions(cluster)[-1].message
    assert claim.volume is not None
    assert claim.volume.size_bytes == before
    # The pod's successor starts, at the size that there is.
    pod.is_deleted = True
    cluster.start(claim, "b")
    assert claim.capacity_bytes == before
    # What fits is had, once people ask for no more.
    cluster.expand(claim, before + 16 * MIB)
    cluster.settle()
    assert claim.capacity_bytes == claim.volume.size_bytes == before + 16 * MIB


def read_ahead_bytes(machine: Machine, claim: Claim) -> object:
    return (
        report.read(machine.host.lvm)
        .group("group0")
        .volume(f"vol-pvc-{claim.name}")
        .tuning.read_ahead_bytes
    )


def test_a_volume_attributes_class_reaches_the_node(three: Central, cluster: Cluster) -> None:
    cluster.attributes_classes |= {
        "much": {"carver/readAhead": "1MiB"},
        "little": {"carver/readAhead": "128KiB"},
        "wrong": {"carver/readAhead": "a lot"},
    }
    claim = cluster.claim(attributes_class="much")
    cluster.start(claim, "c")
    assert read_ahead_bytes(three.machines["c"], claim) == MIB
    claim.attributes_class = "wrong"
    assert cluster.run_until(
        lambda: cluster.answers[-1].rule.method == "ControllerModifyVolume", 30
    )
    assert cluster.answers[-1].code == "INVALID_ARGUMENT"
    assert cluster.answers[-1].message.startswith("node c: ")
    assert read_ahead_bytes(three.machines["c"], claim) == MIB
    claim.attributes_class = "little"
    cluster.settle()
    assert read_ahead_bytes(three.machines["c"], claim) == MIB >> 3


def test_a_node_installed_anew_under_its_name_has_nothing_of_the_old_one(
    three: Central, cluster: Cluster
) -> None:
    old = cluster.claim(capability=RAW)
    pod = cluster.start(old, "a")
    snapshot = cluster.snapshot(old)
    cluster.settle()
    assert old.volume is not None
    three.install("a")
    pod.is_deleted = True
    cluster.pods.clear()  # the node's objects are gone, and its kubelet knows nothing
    # Its groups have the names of those that were lost, and a volume of the same name may be there.
    fresh = cluster.claim(capability=RAW)
    fresh.name = old.name
    cluster.start(fresh, "a")
    assert fresh.volume is not None
    assert fresh.volume.id != old.volume.id
    assert fresh.volume.id.partition("/")[2] == old.volume.id.partition("/")[2]
    copies = [cluster.claim(source=one, capability=RAW) for one in (old, snapshot)]
    for copy in copies:
        cluster.pod(copy)
    cluster.expand(old, 64 * MIB)
    cluster.snapshot(old)
    begun = len(cluster.answers)
    cluster.run_until(lambda: False, 20)
    assert [one.volume for one in copies] == [None, None]
    cluster.claims[:] = [fresh]
    cluster.released.append(old.volume)
    snapshot.is_deleted = True
    cluster.run_until(lambda: False, 200)
    about = [
        one
        for one in cluster.answers[begun:]
        if old.volume.id in str(one.request) or snapshot.id in str(one.request)
    ]
    assert {one.rule.method for one in about} == {
        *("CreateVolume", "CreateSnapshot", "ControllerExpandVolume"),
        *("DeleteVolume", "DeleteSnapshot"),
    }
    assert {one.code for one in about} == {"UNAVAILABLE"}
    assert all("no node that answers has volume group" in one.message for one in about)
    # As the snapshotter asks for one that was provisioned before.
    with pytest.raises(grpc.RpcError, match="no node that answers has volume group"):
        three.leader.client.snapshots(snapshot_id=snapshot.id)
    assert f"vol-pvc-{fresh.name}" in three.machines["a"].left()
    assert fresh.volume.id in {one.volume_id for one in three.leader.client.volumes()}


class Unused(Node):
    """A node on which no kubelet is needed."""

    def __init__(self) -> None:
        self.is_off = False

    def step(self) -> None:
        """Nothing is called there."""


def test_restores_in_a_cluster_of_100_nodes_are_bound_in_one_further_cycle(tmp_path: Path) -> None:
    simulated, authority, loop = [SimulatedNode(one) for one in range(100)], Authority(), Loop()
    lines = [
        f'"{one.name}" = "{loop.run(one.start(authority, tmp_path / "node"))}"\n'
        for one in simulated
    ]
    (tmp_path / "nodes.toml").write_text("[nodes]\n" + "".join(lines))
    config = configured.carver(
        tmp_path,
        tls_directory=authority.write(
            tmp_path / "controller", certificates.controller_name(DRIVER_NAME)
        ),
        nodes_file=tmp_path / "nodes.toml",
    )
    controller = ClusterController(config, Files(config))

    async def start() -> None:
        await controller.start()
        await asyncio.gather(*map(controller.nodes.ask, controller.nodes))

    loop.run(start())
    cluster = Cluster({"fast": CLASSES["fast"]}, is_central=True)
    cluster.nodes |= {one.name: Unused() for one in simulated}
    plugin = Plugin(Client(config.endpoint), cluster.answers.append)
    cluster.sidecars = [kind(cluster, "", plugin) for kind in (Provisioner, Snapshotter)]
    try:
        claim = cluster.claim()
        pod = cluster.pod(claim)
        snapshot = cluster.snapshot(claim)
        assert cluster.run_until(lambda: bool(pod.node) and snapshot.is_ready, 30)
        sources = (claim, snapshot) * 5
        restored = [cluster.pod(cluster.claim(source=one)) for one in sources]
        assert cluster.run_until(lambda: all(one.node for one in restored), 30)
        assert {one.node for one in restored} == {pod.node}
        # By chance one may be put on the right node at once.
        assert Counter(one.cycles for one in restored)[2] >= len(restored) - 1
        assert [str(one) for one in cluster.answers if one.code != "OK"] == []
    finally:
        plugin.client.__exit__(None, None, None)
        loop.run(controller.stop())
        for one in simulated:
            loop.run(one.stop())
        loop.stop()
