"""Two nodes of one machine template: their volume groups have one UUID."""

from collections.abc import Callable, Iterator
from pathlib import Path

import clustered
import grpc
import pytest
from clustered import Cluster, cluster
from fakes.host import FakeHost

from agent.core.ids import VolumeId
from agent.csi.client import block
from agent.extras.controller.membership import Record
from agent.settings.settings import Config
from proto import csi_pb2 as csi

SIZE = 24 << 20


class Volumes(Record):
    """PersistentVolumes: which node each is on."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        return frozenset(
            node
            for handle, node in self.nodes.items()
            if (parsed := VolumeId.parse(handle)) and parsed.group_uuid == group_uuid
        )

    def node_of(self, identity: VolumeId, begun: float) -> str | None:
        return self.nodes.get(str(identity))


@pytest.fixture
def two(config: Config, tmp_path: Path) -> Iterator[Cluster]:
    """Nodes `a` and `b`, on machines that are each other's copies."""
    hosts = {}
    for name in ("a", "b"):
        (tmp_path / f"host-{name}").mkdir()
        hosts[name] = FakeHost(tmp_path / f"host-{name}")
    with cluster(hosts["a"], config, tmp_path, hosts=hosts) as made:
        made.record = Volumes()
        made.restart()
        yield made


def create(two: Cluster, name: str, node: str) -> csi.Volume:
    """A claim's volume on a node, and its PersistentVolume."""
    segments = two.nodes[node].config.here
    request = csi.CreateVolumeRequest(
        name=name,
        capacity_range=csi.CapacityRange(required_bytes=SIZE),
        volume_capabilities=[block()],
    )
    request.accessibility_requirements.preferred.append(csi.Topology(segments=segments))
    return two.client.controller.CreateVolume(request).volume


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: grpc.Call = raised.value  # type: ignore[assignment]
    return error.code(), error.details()


def size_on(two: Cluster, node: str) -> int:
    """The size of a node's only volume."""
    [volume] = two.nodes[node].client.volumes()
    return volume.capacity_bytes


def copy_with_new_uuid(two: Cluster, name: str) -> None:
    """What docs/operations.md says, on one node; then Carver is restarted there."""
    node = two.nodes[name]
    listener = clustered.listener(node)
    listener.stop()
    for volume in list(node.names()):
        node.host.deactivate(node.group, volume)
    node.host.lvm("vgchange", "--uuid", "--", node.group)
    node.restart()
    node.service.reports.fresh()
    clustered.listener(node).find_other_groups()
    clustered.listener(node).serve()
    two.write_nodes()
    two.loop.run(two.controller.look())
    two.ask()


def test_no_volume_is_made_until_the_copy_has_another_uuid(two: Cluster) -> None:
    for name in ("a", "b"):
        code, why = refused(lambda name=name: create(two, "pvc-1", name))  # type: ignore[misc]
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "nodes a and b both claim volume group" in why
        assert two.nodes[name].names() == set()
    copy_with_new_uuid(two, "b")
    for name in ("a", "b"):
        volume = create(two, f"pvc-{name}", name)
        assert f"vol-pvc-{name}" in two.nodes[name].names()
        two.client.delete(volume.volume_id)
        assert two.nodes[name].names() == set()


@pytest.mark.parametrize("original", ["a", "b"])
@pytest.mark.parametrize("restarts", [True, False])
def test_calls_go_to_the_original_and_never_to_the_copy(
    two: Cluster, original: str, restarts: bool
) -> None:
    """The copy has volumes of the same names, as of a machine that was cloned with them."""
    copy = "b" if original == "a" else "a"
    on_original = two.nodes[original].client.create("pvc-1", SIZE, block())
    on_copy = two.nodes[copy].client.create("pvc-1", SIZE, block())
    assert on_original.volume_id == on_copy.volume_id
    two.record.nodes[on_original.volume_id] = original  # type: ignore[attr-defined]
    if restarts:
        # Whichever answers it first.
        two.restart()
    two.client.expand(on_original.volume_id, 2 * SIZE)
    assert size_on(two, original) == 2 * SIZE
    assert size_on(two, copy) == SIZE
    # The original's Carver ends: the copy does not stand in for it.
    clustered.listener(two.nodes[original]).stop()
    two.ask()
    code, why = refused(lambda: two.client.delete(on_original.volume_id))
    assert (code, f"node {original} " in why) == (grpc.StatusCode.UNAVAILABLE, True)
    assert two.nodes[copy].names() == {"vol-pvc-1"}
