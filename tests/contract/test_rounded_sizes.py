"""A size that Carver rounded up is not held against the caller who asked for less."""

from dataclasses import replace

import configured
import expect
import pytest
from real.any import AnyHost

from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from agent.settings.classes import DeviceClass
from lvm.layout import Layout
from proto import csi_pb2 as csi

MIB = 1 << 20
KEY = {"passphrase": "correct horse battery staple"}
# 100 MB is no whole number of extents; 100 MiB is, but below the least xfs; 1 is below everything.
ASKED = (100_000_000, 100 * MIB, 1)
CLASSES = ("linear", "striped", "sealed")
pytestmark = [
    # Carver's record decides here; lvm2 is asked for nothing that other tests do not ask it for.
    pytest.mark.variation,
    pytest.mark.groups(data=[220, 220, 220]),
    pytest.mark.settings(
        classes=(
            replace(configured.PLAIN, name="linear"),
            DeviceClass("striped", "data", layout=Layout("striped", stripes=3)),
            configured.SEALED,
        )
    ),
]


def requested(client: Client, source: csi.Volume, by: str) -> tuple[csi.VolumeContentSource, int]:
    """A source as the provisioner names it, and the least that it lets a claim of it ask for."""
    if by == "volume":
        # getPVCSource compares the claims' requests.
        return of_volume(source.volume_id), 0
    snapshot = client.snapshot("snap-1", source.volume_id)
    assert client.snapshots() == [snapshot]
    # getSnapshotSource compares the claim's request with the snapshot's size.
    return of_snapshot(snapshot.snapshot_id), snapshot.size_bytes


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", ["ext4", "xfs", "block"])
@pytest.mark.parametrize("by", ["volume", "snapshot"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_copy_may_ask_for_what_its_source_asked_for(
    client: Client, asked: int, kind: str, by: str, name: str
) -> None:
    capability = block() if kind == "block" else mounted(kind)
    parameters = {"class": name}
    source = client.create("pvc-1", asked, capability, parameters=parameters)
    of, least = requested(client, source, by)
    assert least <= asked
    copy = client.create("pvc-2", asked, capability, parameters=parameters, source=of)
    assert copy.capacity_bytes >= source.capacity_bytes
    again = client.create("pvc-2", asked, capability, parameters=parameters, source=of)
    assert again == copy


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("asked", [150_000_000, 144 * MIB])
def test_a_copy_of_a_grown_volume_may_ask_for_what_was_asked_last(
    client: Client, asked: int, name: str
) -> None:
    parameters = {"class": name}
    source = client.create("pvc-1", 100_000_000, block(), parameters=parameters)
    grown = client.expand(source.volume_id, asked).capacity_bytes
    assert grown >= asked
    of, least = requested(client, source, "snapshot")
    assert 100_000_000 < least <= asked
    copy = client.create("pvc-2", asked, block(), parameters=parameters, source=of)
    assert copy.capacity_bytes >= grown


def test_a_size_that_was_not_rounded_is_what_a_snapshot_has(client: Client) -> None:
    source = client.create("pvc-1", 64 * MIB, block())
    assert client.snapshot("snap-1", source.volume_id).size_bytes == 64 * MIB
    none = client.create("pvc-2", 0, block(), limit_bytes=50_000_000)
    assert client.snapshot("snap-2", none.volume_id).size_bytes == none.capacity_bytes


def test_a_limit_below_the_source_is_still_refused(client: Client) -> None:
    source = client.create("pvc-1", 100_000_000, block())
    most = source.capacity_bytes - 1
    with expect.code("OUT_OF_RANGE", str(source.capacity_bytes)):
        client.create(
            "pvc-2", 100_000_000, block(), limit_bytes=most, source=of_volume(source.volume_id)
        )
    assert len(client.volumes()) == 1


def test_a_copy_of_a_volume_that_grew_at_a_stage_may_ask_for_what_was_asked_last(
    client: Client, host: AnyHost
) -> None:
    staging, target = host.directory / "staging", host.directory / "target"
    source = client.create("pvc-1", 64 * MIB, mounted("ext4"))
    client.stage(source, staging)
    client.publish(source, staging, target)
    client.snapshot("before", source.volume_id)
    with expect.code("FAILED_PRECONDITION"):
        client.expand(source.volume_id, 100_000_000)
    client.unpublish(source.volume_id, target)
    client.unstage(source.volume_id, staging)
    client.stage(source, staging)
    client.publish(source, staging, target)
    # As kubelet does, and the resizer.
    client.node_expand(source.volume_id, target, 100_000_000)
    client.expand(source.volume_id, 100_000_000)
    assert client.snapshot("after", source.volume_id).size_bytes == 100_000_000
