"""A cluster whose CSIDriver has `attachRequired`: volumes are attached before they are staged."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from callers.cluster import Cluster
from callers.controllers import Central, central
from callers.machines import Machine
from callers.objects import Claim

from agent.core import tag
from agent.csi.client import Mode, block
from lvm import report, volumes
from mount import table

RAW = block(Mode.SINGLE_NODE_MULTI_WRITER)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Central]:
    with central(tmp_path, attach=True) as made:
        yield made


@pytest.fixture
def cluster(three: Central) -> Cluster:
    return three.cluster


def records(machine: Machine) -> list[str]:
    """What the volumes of a node say of how they are attached."""
    known = report.read(machine.host.lvm)
    return [
        one.own_tags[tag.ATTACHED]
        for group in known.groups.values()
        for one in group.volumes.values()
        if tag.ATTACHED in one.own_tags
    ]


def end(three: Central, cluster: Cluster) -> None:
    """Take everything away: nothing is left."""
    cluster.delete_everything()
    assert cluster.run_until(cluster.is_empty), cluster.report()
    assert [one.left() for one in three.machines.values()] == [[], [], []]


def refused(cluster: Cluster) -> list[str]:
    return [str(one) for one in cluster.answers if one.code != "OK"]


def test_a_pod_runs_once_its_volume_is_attached_and_nothing_is_left_in_the_end(
    three: Central, cluster: Cluster
) -> None:
    for node in three.machines:
        claim = cluster.claim(capability=RAW) if node == "b" else cluster.claim()
        cluster.start(claim, node)
        cluster.start(claim, node)
    assert [(one.node, one.is_attached) for one in cluster.attachments] == [
        (name, True) for name in "abc"
    ]
    assert [len(records(one)) for one in three.machines.values()] == [1, 1, 1]
    # The volume goes as soon as nothing uses it, and not before it is detached.
    end(three, cluster)
    methods = [one.rule.method for one in cluster.answers]
    assert methods.count("ControllerPublishVolume") == 3
    assert methods.index("DeleteVolume") > methods.index("ControllerUnpublishVolume")
    assert refused(cluster) == []


def test_a_persistent_volume_for_reading_is_mounted_read_only(
    three: Central, cluster: Cluster
) -> None:
    claim = cluster.claim()
    pod = cluster.start(claim, "a")
    assert claim.volume is not None
    pod.is_deleted = True
    assert cluster.run_until(lambda: not cluster.attachments)
    claim.volume.read_only = True
    pod = cluster.start(claim)
    path = three.machines["a"].node.kubelet.target(pod, claim.volume)
    [mounted] = table.read(three.machines["a"].host.kernel).at(path)
    assert mounted.read_only
    assert records(three.machines["a"]) == ["mount:SINGLE_NODE_MULTI_WRITER:ro:a"]
    end(three, cluster)


def test_a_pod_that_follows_another_finds_its_volume_attached(
    three: Central, cluster: Cluster
) -> None:
    claim = cluster.claim()
    for _ in range(3):
        pod = cluster.start(claim, "b")
        pod.is_deleted = True
        cluster.settle()
    assert refused(cluster) == []
    end(three, cluster)


def power_off(three: Central, cluster: Cluster, claim: Claim) -> None:
    """A node with a pod is off, its pod is deleted, and another one is made."""
    node = cluster.pods[0].node
    three.machines[node].switch_off(10**6)
    cluster.pods[0].is_deleted = True
    cluster.pod(claim)


@pytest.mark.parametrize("leader", ["stays", "changes"])
def test_a_volume_of_a_node_that_is_out_of_service_is_detached_within_two_minutes(
    three: Central, cluster: Cluster, leader: str
) -> None:
    claim = cluster.claim()
    cluster.start(claim, "b")
    power_off(three, cluster, claim)
    cluster.run_until(lambda: False, seconds=60)
    assert cluster.attachments
    cluster.out_of_service.add("b")
    if leader == "changes":
        three.change_leader()
    assert cluster.run_until(lambda: not cluster.attachments, 120)
    # The next pod waits for the node: its volume is on the node's disks.
    [pod] = cluster.pods
    assert pod.node == ""
    cluster.out_of_service.clear()
    three.machines["b"].switch_on()
    cluster.settle()
    assert (pod.node, pod.is_running) == ("b", True)
    assert len(records(three.machines["b"])) == 1
    end(three, cluster)


def test_a_volume_of_an_unhealthy_node_is_detached_after_six_minutes(
    three: Central, cluster: Cluster
) -> None:
    claim = cluster.claim()
    cluster.start(claim, "b")
    power_off(three, cluster, claim)
    # By `kubectl delete pod --force`.
    cluster.pods.clear()
    cluster.run_until(lambda: False, seconds=350)
    assert cluster.attachments
    assert cluster.run_until(lambda: not cluster.attachments, 120)
    three.machines["b"].switch_on()
    cluster.start(claim)
    end(three, cluster)


def test_a_record_that_was_lost_is_written_again_within_ten_minutes(
    three: Central, cluster: Cluster
) -> None:
    claim = cluster.claim()
    cluster.start(claim, "c")
    assert claim.volume is not None
    machine, path = three.machines["c"], claim.volume.id.partition("/")
    [written] = records(machine)
    volumes.mark(
        machine.host.lvm,
        *(path[0].partition("@")[0], path[2]),
        old_tags={tag.ATTACHED: written},
        new_tags={},
    )
    assert records(machine) == []
    assert cluster.run_until(lambda: records(machine) == [written], 700)
    end(three, cluster)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("step", range(0, 12, 2))
def test_a_node_that_dies_while_a_pod_starts_or_ends_keeps_nobody_waiting(
    three: Central, cluster: Cluster, step: int, before: bool
) -> None:
    claim = cluster.claim()
    old = cluster.start(claim, "a")
    three.machines["a"].kill(step, before=before)
    old.is_deleted = True
    cluster.pod(claim)
    cluster.settle()
    end(three, cluster)


@pytest.mark.parametrize("step", range(6))
def test_a_controller_that_dies_while_a_volume_is_attached_or_detached_keeps_nobody_waiting(
    three: Central, cluster: Cluster, step: int
) -> None:
    claim = cluster.claim()
    old = cluster.start(claim, "a")
    three.leader.dies_after = three.leader.steps + step
    old.is_deleted = True
    assert cluster.run_until(lambda: not cluster.attachments)
    cluster.start(claim)
    end(three, cluster)
