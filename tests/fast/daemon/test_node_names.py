"""Nodes with names as long as Kubernetes allows: their topology value fits in a label."""

import re
from collections.abc import Iterator
from dataclasses import replace

import expect
import pytest
import serving
from fakes.host import FakeHost
from hypothesis import given
from hypothesis import strategies as st

from agent.core import ids
from agent.csi.client import Client, block
from agent.extras.tls import certificates
from agent.settings.settings import TOPOLOGY_KEY, Config
from proto import csi_pb2 as csi

MIB = 1 << 20
# Labels of a domain name have at most 63 characters each, the whole 253.
LONGEST = ".".join(["n" * 62, "o" * 62, "p" * 62, "q" * 62, "r"])
# As apimachinery has it, IsValidLabelValue.
LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
NAMES = {
    "64": "n" * 64,
    "a dot where it is cut": f"{'n' * 45}.{'o' * 40}",
    "128": "n" * 128,
    "253": LONGEST,
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return NAMES[request.param]


@pytest.fixture
def client(config: Config, fake: FakeHost, name: str) -> Iterator[Client]:
    running = serving.start(replace(config, node_id=name), fake)
    with Client(config.endpoint) as made:
        yield made
    running.stop()


def here(client: Client) -> csi.Topology:
    return client.node.NodeGetInfo(csi.NodeGetInfoRequest()).accessible_topology


def create(client: Client, where: csi.Topology) -> csi.Volume:
    """As external-provisioner asks for it."""
    return client.controller.CreateVolume(
        csi.CreateVolumeRequest(
            name="pvc-1",
            capacity_range=csi.CapacityRange(required_bytes=4 * MIB),
            volume_capabilities=[block()],
            accessibility_requirements=csi.TopologyRequirement(
                requisite=[where], preferred=[where]
            ),
        )
    ).volume


def test_a_long_node_name_is_whole_as_the_id_and_a_valid_label_as_the_topology(
    client: Client, name: str
) -> None:
    info = client.node.NodeGetInfo(csi.NodeGetInfoRequest())
    assert info.node_id == name
    assert len(info.node_id.encode()) <= 256
    [(key, value)] = info.accessible_topology.segments.items()
    assert key == TOPOLOGY_KEY
    assert len(value) <= 63
    assert LABEL.fullmatch(value)


def test_volumes_and_snapshots_are_made_where_the_label_names_such_a_node(client: Client) -> None:
    where = here(client)
    volume = create(client, where)
    assert list(volume.accessible_topology) == [where]
    taken = client.controller.CreateSnapshot(
        csi.CreateSnapshotRequest(
            name="snap",
            source_volume_id=volume.volume_id,
            accessibility_requirements=csi.TopologyRequirement(requisite=[where]),
        )
    ).snapshot
    assert list(taken.accessible_topology) == [where]
    request = csi.GetCapacityRequest(accessible_topology=where)
    assert client.controller.GetCapacity(request).available_capacity > 0


def test_a_node_whose_name_begins_with_the_same_63_characters_is_another(
    client: Client, name: str
) -> None:
    there = csi.Topology(segments={TOPOLOGY_KEY: ids.node_segment(f"{name[:-1]}x")})
    assert there != here(client)
    with expect.code("RESOURCE_EXHAUSTED", "topologies"):
        create(client, there)
    request = csi.GetCapacityRequest(accessible_topology=there)
    assert client.controller.GetCapacity(request).available_capacity == 0


def test_the_value_is_the_same_in_every_version() -> None:
    """The volumes' PersistentVolumes have it; docs/configuration.md says how it is made."""
    assert ids.node_segment("n" * 63) == "n" * 63
    assert ids.node_segment("n" * 64) == f"{'n' * 46}-ce068a195ab380a8"


@pytest.mark.parametrize("length", [64, 70, 235, 236, 253])
def test_no_node_has_the_segment_or_the_certificate_of_another(length: int) -> None:
    """Whatever a Node is called: 63 characters are a name, too, such as a shortened one."""
    name = "n" * length
    names, twin = [name], name
    for _ in range(3):
        names.append(twin := ids.node_segment(twin))
        assert len(twin) == 63
    assert len(set(map(ids.node_segment, names))) == len(names)
    assert len({certificates.node_name(one, "lvm.csi.carver") for one in names}) == len(names)


@given(st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,80}[a-z0-9])?", fullmatch=True))
def test_a_short_name_is_its_own_segment_unless_it_looks_like_a_shortened_one(name: str) -> None:
    segment = ids.node_segment(name)
    looks = re.fullmatch(r".{46}-[0-9a-f]{16}", name) is not None
    assert (segment == name) is (len(name) <= 63 and not looks)
    assert len(segment) <= 63
