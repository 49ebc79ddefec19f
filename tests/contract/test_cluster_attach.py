"""Attaching by the cluster's controller: two nodes with a group each, over TLS."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import clustered
import expect
import pytest
from clustered import Cluster, cluster
from real.any import AnyHost

from agent.csi.client import Mode, block, mounted
from agent.extras.controller import attachments
from agent.settings.settings import Config
from proto import csi_pb2 as csi

# Carver's own record decides here; lvm2 is asked for nothing that other tests do not ask it for.
pytestmark = pytest.mark.variation

MIB = 1 << 20
READERS = mounted(mode=Mode.MULTI_NODE_READER_ONLY)


@pytest.fixture
def two(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(host, replace(config, attach=True), tmp_path) as made:
        yield made


def create(two: Cluster, node: str) -> csi.Volume:
    segments = two.nodes[node].config.here
    request = csi.CreateVolumeRequest(
        name="pvc-1",
        capacity_range=csi.CapacityRange(required_bytes=24 * MIB),
        volume_capabilities=[mounted()],
        accessibility_requirements=csi.TopologyRequirement(
            preferred=[csi.Topology(segments=segments)]
        ),
    )
    return two.client.controller.CreateVolume(request).volume


def take_down(two: Cluster, node: str) -> None:
    """A node is powered off, and the controller has noticed."""
    clustered.listener(two.nodes[node]).stop()
    two.ask()


def test_a_volume_is_attached_to_its_own_node_and_to_no_other(two: Cluster) -> None:
    volume = create(two, "b")
    request = csi.ControllerGetCapabilitiesRequest()
    offered = two.client.controller.ControllerGetCapabilities(request).capabilities
    assert csi.ControllerServiceCapability.RPC.LIST_VOLUMES_PUBLISHED_NODES in {
        one.rpc.type for one in offered
    }
    for capability in (mounted(), READERS, block()):
        with expect.code("FAILED_PRECONDITION", "node 'a'", "node 'b'"):
            two.client.attach(volume.volume_id, "a", capability)
    with expect.code("NOT_FOUND", "no node 'c'"):
        two.client.attach(volume.volume_id, "c")
    for _ in range(2):
        assert two.client.attach(volume.volume_id, "b") == {}
    with expect.code("ALREADY_EXISTS", "SINGLE_NODE_WRITER:rw:b"):
        two.client.attach(volume.volume_id, "b", read_only=True)
    found = two.client.controller.ListVolumes(csi.ListVolumesRequest()).entries
    assert [list(one.status.published_node_ids) for one in found] == [["b"]]
    for node in ("a", "c"):
        two.client.detach(volume.volume_id, node)
        assert two.client.attached_to(volume.volume_id) == ["b"]
    for _ in range(2):
        two.client.detach(volume.volume_id, "b")
        assert two.client.attached_to(volume.volume_id) == []
    two.client.attach(volume.volume_id, "b")
    two.client.detach(volume.volume_id, "")
    assert two.client.attached_to(volume.volume_id) == []


def test_what_does_not_exist_is_not_attached_and_counts_as_detached(two: Cluster) -> None:
    volume = create(two, "b")
    two.client.delete(volume.volume_id)
    for identity in (volume.volume_id, "made up"):
        with expect.code("NOT_FOUND", "no volume"):
            two.client.attach(identity, "b")
        two.client.detach(identity, "b")
    request = csi.ControllerPublishVolumeRequest(volume_id=volume.volume_id)
    with expect.code("INVALID_ARGUMENT", "node_id"):
        two.client.controller.ControllerPublishVolume(request)
    for call in (two.client.attach, two.client.detach):
        with expect.code("INVALID_ARGUMENT", "volume_id"):
            call("", "b")


def test_a_node_that_is_down_attaches_nothing(two: Cluster) -> None:
    volume = create(two, "b")
    take_down(two, "b")
    with expect.code("UNAVAILABLE", "node b"):
        two.client.attach(volume.volume_id, "b")
    # It is not known any more that it was there.
    two.restart()
    with expect.code("UNAVAILABLE", "do not answer: b"):
        two.client.attach(volume.volume_id, "b")


@pytest.mark.parametrize("restarts", [False, True], ids=["as it was", "by another controller"])
def test_a_forced_detach_waits_a_minute_for_a_node_that_is_down_and_no_longer(
    two: Cluster, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    volume = create(two, "b")
    two.client.attach(volume.volume_id, "b")
    take_down(two, "b")
    if restarts:
        two.restart()
    with expect.code("UNAVAILABLE", "b"):
        two.client.detach(volume.volume_id, "b")
    # From what answers it is detached in any case.
    two.client.detach(volume.volume_id, "a")
    monkeypatch.setattr(attachments, "_PATIENCE_SECONDS", 0.0)
    for _ in range(2):
        two.client.detach(volume.volume_id, "b")


def test_after_a_forced_detach_the_node_that_comes_back_attaches_as_before(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = create(two, "b")
    two.client.attach(volume.volume_id, "b")
    take_down(two, "b")
    monkeypatch.setattr(attachments, "_PATIENCE_SECONDS", 0.0)
    two.client.detach(volume.volume_id, "b")
    node = clustered.listener(two.nodes["b"])
    node._server = None
    node.serve()
    two.write_nodes()
    two.restart()
    # The record is on its disks still: in the same way it is attached again, in another it is not.
    two.client.attach(volume.volume_id, "b")
    with expect.code("ALREADY_EXISTS", "detach it first"):
        two.client.attach(volume.volume_id, "b", READERS)
    two.client.detach(volume.volume_id, "b")
    two.client.attach(volume.volume_id, "b", READERS)


def test_a_volume_is_detached_from_a_node_that_left_the_cluster(two: Cluster) -> None:
    volume = create(two, "b")
    two.client.attach(volume.volume_id, "b")
    take_down(two, "b")
    two.write_nodes("a")
    two.restart()
    two.client.detach(volume.volume_id, "b")
    with expect.code("NOT_FOUND", "no node 'b'"):
        two.client.attach(volume.volume_id, "b")


@pytest.mark.variation
def test_a_controller_that_is_not_set_so_attaches_nothing(two: Cluster, host: AnyHost) -> None:
    volume = create(two, "a")
    two.config = replace(two.config, attach=False)
    two.restart()
    for call in (two.client.attach, two.client.detach):
        with expect.code("UNIMPLEMENTED"):
            call(volume.volume_id, "a")
