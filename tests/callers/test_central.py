"""Three nodes under one Kubernetes whose sidecars ask the cluster's controller."""

import asyncio
from collections import Counter
from pathlib import Path

import configured
import grpc
import pytest
from authority import Authority
from callers.cluster import Cluster, Node
from callers.controllers import CLASSES, Central
from callers.machines import Machine
from callers.objects import Claim, Resize, Snapshot
from callers.plugin import Answer, Plugin
from callers.sidecars import Provisioner, Snapshotter
from clustered import Loop
from simulated import SimulatedNode

from agent.csi.client import Client, Mode, block, mounted
from agent.extras.controller.controller_process import ClusterController, Files
from agent.extras.tls import certificates
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY
from lvm import report
from proto import csi_pb2 as csi

MIB = 1 << 20
RAW = block(Mode.SINGLE_NODE_MULTI_WRITER)


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
    assert cluster.run_until(lambda: bool(cluster.capacities), 10)
    cluster.pod(cluster.claim(size_bytes=1000 * MIB), "a")
    # By the capacity that there was both fit.
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


def creations(cluster: Cluster, claim: Claim) -> list[Answer]:
    """The answers to CreateVolume of a claim."""
    name = f"pvc-{claim.name}"
    of = [one for one in cluster.answers if one.rule.method == "CreateVolume"]
    return [one for one in of if one.request.name == name]


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "forgotten"])
def test_a_claim_that_waits_for_a_node_that_was_deleted_is_made_elsewhere(
    is_known: bool, three: Central, cluster: Cluster
) -> None:
    claim = cluster.claim(selected_node="a")
    three.machines["a"].switch_off(1000)
    pod = cluster.pod(claim)
    cluster.run_until(lambda: False, 20)
    waiting = creations(cluster, claim)[-1]
    assert waiting.code == "UNAVAILABLE"
    assert "node a" in waiting.message
    assert "delete its Node object" in waiting.message
    three.delete_node("a")
    if not is_known:
        three.forget_deleted()
    assert cluster.run_until(lambda: pod.is_running, 60), cluster.report()
    assert pod.node in "bc"
    # The provisioner asked for the deleted node until it got a final answer.
    given_up = creations(cluster, claim)[-2]
    assert given_up.code == "RESOURCE_EXHAUSTED"
    assert "node a has left the cluster" in given_up.message
    assert given_up.request.accessibility_requirements.preferred[0].segments[TOPOLOGY_KEY] == "a"


def test_a_claim_whose_node_exists_waits_though_another_was_selected(
    three: Central, cluster: Cluster
) -> None:
    claim = cluster.claim(selected_node="a")
    three.machines["a"].switch_off(200)
    pod = cluster.pod(claim)
    cluster.run_until(lambda: False, 20)
    claim.selected_node = ""  # kubectl annotate pvc CLAIM volume.kubernetes.io/selected-node-
    cluster.run_until(lambda: False, 100)
    # The scheduler may choose another node; the provisioner asks for the first one all the same.
    asked = creations(cluster, claim)
    first = {
        one.request.accessibility_requirements.preferred[0].segments[TOPOLOGY_KEY] for one in asked
    }
    assert (first, {one.code for one in asked}) == ({"a"}, {"UNAVAILABLE"})
    assert cluster.run_until(lambda: pod.is_running), cluster.report()
    assert claim.volume is not None
    assert claim.volume.node == "a"


def test_while_the_api_server_is_silent_a_claim_waits_for_its_node(
    three: Central, cluster: Cluster
) -> None:
    claim = cluster.claim(selected_node="a")
    three.machines["a"].switch_off(1000)
    pod = cluster.pod(claim)
    cluster.run_until(lambda: False, 5)
    three.api.is_up = False
    three.delete_node("a")
    cluster.run_until(lambda: False, 60)
    assert {one.code for one in creations(cluster, claim)} == {"UNAVAILABLE"}
    three.api.is_up = True
    assert cluster.run_until(lambda: pod.is_running), cluster.report()


def source_on(cluster: Cluster, node: str, kind: str) -> Claim | Snapshot:
    """A claim that is bound on a node, or a snapshot of one."""
    claim = cluster.claim()
    cluster.start(claim, node).is_deleted = True
    source = cluster.snapshot(claim) if kind == "snapshot" else claim
    cluster.settle()
    return source


@pytest.mark.parametrize("kind", ["snapshot", "clone"])
@pytest.mark.parametrize("copy_first", [True, False], ids=["copy_first", "copy_last"])
def test_a_pod_with_a_copy_and_new_claims_starts_where_the_source_is(
    copy_first: bool, kind: str, cluster: Cluster
) -> None:
    source = source_on(cluster, "b", kind)
    claims = [cluster.claim(source=source), cluster.claim(), cluster.claim("slow")]
    for one in claims:
        one.selected_node = "c"
    pod = cluster.start(claims if copy_first else claims[::-1])
    assert (pod.node, pod.cycles) == ("b", 2)
    refused = [one for one in cluster.answers if one.is_warned_of]
    assert {one.code for one in refused} == {"RESOURCE_EXHAUSTED"}
    assert all(f"pod {pod.name} also uses claim {claims[0].name}" in one.message for one in refused)
    assert all("on node b" in one.message for one in refused)


def test_pods_of_a_stateful_set_with_restored_and_new_claims_all_start(
    three: Central, cluster: Cluster
) -> None:
    sources = [source_on(cluster, node, "snapshot") for node in "abcabc"]
    pods = [cluster.pod([cluster.claim(), cluster.claim(source=one)]) for one in sources]
    cluster.run_until(lambda: False, 2)
    three.change_leader()
    cluster.settle()
    assert [one.node for one in pods] == list("abcabc")


def test_a_new_claim_waits_while_the_copy_beside_it_waits_for_its_node(
    three: Central, cluster: Cluster
) -> None:
    source = source_on(cluster, "b", "snapshot")
    three.machines["b"].switch_off(200)
    fresh = cluster.claim(selected_node="c")
    pod = cluster.pod([fresh, cluster.claim(source=source, selected_node="c")])
    cluster.run_until(lambda: False, 100)
    assert fresh.volume is None
    cluster.settle()
    assert pod.node == "b"


def test_a_new_claim_is_not_made_beside_a_copy_that_was_bound_elsewhere_meanwhile(
    three: Central, cluster: Cluster
) -> None:
    copy = cluster.claim(source=source_on(cluster, "b", "snapshot"), selected_node="c")
    assert cluster.run_until(lambda: copy.volume is not None, 30)
    fresh = cluster.claim(selected_node="c")
    pod = cluster.start([copy, fresh])
    assert (pod.node, creations(cluster, fresh)[0].code) == ("b", "RESOURCE_EXHAUSTED")


def test_a_new_claim_needs_no_snapshot_that_is_yet_to_be_taken_of_it(cluster: Cluster) -> None:
    """The snapshot waits for the claim, so the claim does not wait for the snapshot's place."""
    fresh = cluster.claim()
    copy = cluster.claim(source=cluster.snapshot(fresh))
    first, second = cluster.pod(fresh, "a"), cluster.pod([fresh, copy])
    cluster.settle()
    assert (first.node, second.node) == ("a", "a")


def test_two_copies_of_sources_on_two_nodes_are_refused_and_the_event_says_why(
    cluster: Cluster,
) -> None:
    sources = [source_on(cluster, node, "snapshot") for node in "ab"]
    claims = [cluster.claim(source=one) for one in sources]
    pod = cluster.pod(claims)
    cluster.run_until(lambda: False, 30)
    assert [one.volume for one in claims] == [None, None]
    for claim, other, node in zip(claims, claims[::-1], "ab", strict=True):
        answer = creations(cluster, claim)[-1]
        assert answer.code == "FAILED_PRECONDITION"
        assert f"cannot make claim shop/{claim.name} on node {node}" in answer.message
        assert f"pod {pod.name} also uses claim {other.name}" in answer.message
        assert "no node can have both" in answer.message
    # Two pods in its place run.
    pod.is_deleted = True
    each = [cluster.pod(one) for one in claims]
    cluster.settle()
    assert [one.node for one in each] == ["a", "b"]


def test_a_claim_of_two_pods_on_two_nodes_is_made_for_one_of_them(cluster: Cluster) -> None:
    """No node serves both, as each has a copy of its own."""
    shared = cluster.claim()
    sources = [source_on(cluster, node, "snapshot") for node in "ab"]
    pods = [cluster.pod([cluster.claim(source=one), shared]) for one in sources]
    assert cluster.run_until(lambda: any(one.is_running for one in pods), 60), cluster.report()


def test_a_claim_that_another_pod_uses_alone_is_made_where_both_can_run(cluster: Cluster) -> None:
    shared = cluster.claim()
    copy = cluster.claim(source=source_on(cluster, "b", "snapshot"))
    alone, both = cluster.pod(shared), cluster.pod([copy, shared])
    cluster.settle()
    assert (alone.node, both.node) == ("b", "b")


@pytest.mark.parametrize("copy_first", [True, False], ids=["copy_first", "copy_last"])
def test_while_the_api_server_is_silent_no_volume_of_a_pod_is_made_apart(
    copy_first: bool, three: Central, cluster: Cluster
) -> None:
    copy, fresh = cluster.claim(source=source_on(cluster, "b", "snapshot")), cluster.claim()
    copy.selected_node = fresh.selected_node = "c"
    three.api.is_up = False
    pod = cluster.pod([copy, fresh] if copy_first else [fresh, copy])
    cluster.run_until(lambda: False, 60)
    assert {one.code for one in creations(cluster, fresh)} == {"UNAVAILABLE"}
    assert fresh.volume is None
    three.api.is_up = True
    assert cluster.run_until(lambda: pod.is_running), cluster.report()
    assert pod.node == "b"


def test_where_the_api_server_refuses_volumes_are_made_where_the_scheduler_chose(
    three: Central, cluster: Cluster
) -> None:
    source = source_on(cluster, "b", "snapshot")
    three.api.refuses = True
    copy, fresh = cluster.claim(source=source), cluster.claim()
    copy.selected_node = fresh.selected_node = "c"
    pod = cluster.pod([copy, fresh])
    cluster.run_until(lambda: False, 60)
    # So the pod is stuck; what helps is in docs/volumes.md: the new claim was never written.
    assert [one.volume.node for one in (copy, fresh) if one.volume] == ["b", "c"]
    assert (pod.node, pod.assumed_node) == ("", "")
    three.api.refuses = False
    pod.is_deleted = fresh.is_deleted = True
    successor = cluster.start([copy, cluster.claim()])
    assert successor.node == "b"


def test_a_volume_that_is_apart_already_is_found_and_not_made_again(
    three: Central, cluster: Cluster
) -> None:
    source = source_on(cluster, "b", "snapshot")
    three.api.refuses = True
    claims = [cluster.claim(source=source, selected_node="c"), cluster.claim(selected_node="c")]
    cluster.pod(claims)
    assert cluster.run_until(lambda: all(one.volume for one in claims), 60), cluster.report()
    three.api.refuses = False
    # As after an answer that was lost: the volumes may be in use.
    for claim in claims:
        made = creations(cluster, claim)[-1]
        again = three.plugin.ask("CreateVolume", made.request)
        assert again.response == made.response


def test_a_claim_alone_costs_two_questions_and_each_other_claim_of_its_pod_one_more(
    three: Central, cluster: Cluster
) -> None:
    cluster.start(cluster.claim())
    assert [one.rpartition("/")[2] for one in three.api.asked] == ["claim-1", "pods"]
    three.api.asked.clear()
    cluster.start([cluster.claim(), cluster.claim()])
    # The second finds the first bound: one more, for its PersistentVolume.
    assert len(three.api.asked) == 2 * (2 + 1) + 1


def test_a_claim_that_binds_immediately_is_made_where_room_is_among_the_nodes_allowed(
    three: Central, cluster: Cluster
) -> None:
    cluster.start(cluster.claim(size_bytes=1500 * MIB), "b")
    for _ in range(4):
        cluster.claim("allowed", size_bytes=200 * MIB)
    cluster.settle()
    made = [one for one in cluster.claims if one.storage_class == "allowed"]
    assert [one.volume.node for one in made if one.volume] == ["a"] * 4
    asked = [creations(cluster, one)[0].request.accessibility_requirements for one in made]
    assert {one.preferred[0].segments[TOPOLOGY_KEY] for one in asked} == {"a", "b"}


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
