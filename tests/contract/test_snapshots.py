"""Snapshots of thick volumes: taken, found, listed, overflowed, deleted, and what they forbid."""

from pathlib import Path

import expect
import in_background
import pytest
from csi_client import Client
from real.any import AnyHost, await_names, device, logical, lvm2_commands, names

from agent.csi.client import block, mounted, of_snapshot
from agent.daemon.server import Service
from agent.settings.settings import TOPOLOGY_KEY
from lvm import report
from lvm.room import Room
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    return client.create("pvc-1", 64 * MIB, block())


def find(client: Client, snapshot_id: str) -> csi.Snapshot:
    request = csi.GetSnapshotRequest(snapshot_id=snapshot_id)
    return client.controller.GetSnapshot(request).snapshot


def test_create_runs_two_commands(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    prefix = "csi.storage.k8s.io/volumesnapshot"
    given = {f"{prefix}/name": "nightly", f"{prefix}/namespace": "shop"}
    given[f"{prefix}content/name"] = "content-1"
    host.commands.clear()
    snapshot = client.snapshot("snap-1", volume.volume_id, given)
    assert lvm2_commands(host) == ["fullreport", "lvcreate"]
    assert (snapshot.ready_to_use, snapshot.size_bytes) == (True, 64 * MIB)
    assert snapshot.source_volume_id == volume.volume_id
    assert snapshot.creation_time.seconds > 0
    made = logical(host, group, "snap-snap-1")
    assert (made.origin, made.read_only) == ("vol-pvc-1", True)
    expected = {
        "name": "snap-1",
        "state": "ready",
        "source": "vol-pvc-1",
        "snapshot": "nightly",
        "namespace": "shop",
        "content": "content-1",
    }
    assert expected.items() <= made.own_tags.items()


def segments(node: str) -> csi.Topology:
    return csi.Topology(segments={TOPOLOGY_KEY: node})


@pytest.mark.variation
def test_each_answer_has_the_topology_of_the_volume(client: Client, volume: csi.Volume) -> None:
    taken = client.snapshot("snap-1", volume.volume_id)
    [listed] = client.snapshots()
    assert client.snapshots_here().entries == [listed]
    for one in (taken, listed, find(client, taken.snapshot_id)):
        assert list(one.accessible_topology) == list(volume.accessible_topology)
    assert list(taken.accessible_topology) == [segments("here")]


def test_topology_of_node_get_info_is_accepted(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    """In the place of csi-sanity's spec: see docs/testing.md."""
    here = client.node.NodeGetInfo(csi.NodeGetInfoRequest()).accessible_topology
    request = csi.CreateSnapshotRequest(
        name="s",
        source_volume_id=volume.volume_id,
        accessibility_requirements=csi.TopologyRequirement(requisite=[here], preferred=[here]),
    )
    taken = client.controller.CreateSnapshot(request).snapshot
    assert list(taken.accessible_topology) == [here]
    assert client.controller.CreateSnapshot(request).snapshot == taken
    assert len(names(host, group)) == 2
    plugin = client.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
    offered = [one.service.type for one in plugin.capabilities]
    assert csi.PluginCapability.Service.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS in offered


@pytest.mark.parametrize("field", ["requisite", "preferred"])
@pytest.mark.variation
def test_topology_of_another_node_is_refused(
    client: Client, volume: csi.Volume, host: AnyHost, group: str, field: str
) -> None:
    request = csi.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id)
    elsewhere = csi.TopologyRequirement(**{field: [segments("there")]})
    request.accessibility_requirements.CopyFrom(elsewhere)
    with expect.code("RESOURCE_EXHAUSTED", "accessibility_requirements", "here"):
        client.controller.CreateSnapshot(request)
    assert names(host, group) == {"vol-pvc-1"}
    both = csi.TopologyRequirement(**{field: [segments("there"), segments("here")]})
    request.accessibility_requirements.CopyFrom(both)
    taken = client.controller.CreateSnapshot(request).snapshot
    assert client.controller.CreateSnapshot(request).snapshot == taken
    # The snapshot exists, but cannot be used from there.
    request.accessibility_requirements.CopyFrom(elsewhere)
    with expect.code("RESOURCE_EXHAUSTED"):
        client.controller.CreateSnapshot(request)
    assert client.snapshots() == [taken]


def test_snapshot_keeps_overwritten_data(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    origin = device(host, group, "vol-pvc-1")
    host.write_bytes(origin, 8 * MIB, b"before  " * 512)
    client.snapshot("1", volume.volume_id)
    host.write_bytes(origin, 8 * MIB, b"after   " * 512)
    assert host.read_bytes(device(host, group, "snap-1"), 8 * MIB, 4096) == b"before  " * 512
    assert host.read_bytes(origin, 8 * MIB, 4096) == b"after   " * 512


@pytest.mark.variation
def test_repeated_create_is_ok_and_another_source_is_refused(
    client: Client, volume: csi.Volume, host: AnyHost
) -> None:
    other = client.create("pvc-2", EXTENT, block())
    snapshot = client.snapshot("1", volume.volume_id)
    host.commands.clear()
    assert client.snapshot("1", volume.volume_id) == snapshot
    assert lvm2_commands(host) == ["fullreport"]
    with expect.code("ALREADY_EXISTS", volume.volume_id):
        client.snapshot("1", other.volume_id)


@pytest.mark.variation
def test_missing_volume_is_not_found(client: Client, volume: csi.Volume) -> None:
    for missing in (volume.volume_id + "x", "no id at all"):
        with expect.code("NOT_FOUND"):
            client.snapshot("1", missing)
    with expect.code("FAILED_PRECONDITION"):
        client.snapshot("1", f"{volume.volume_id.partition('@')[0]}@00000000/vol-pvc-1")
    assert client.snapshots() == []


@pytest.mark.variation
def test_ids_of_snapshots_and_volumes_are_not_mixed(client: Client, volume: csi.Volume) -> None:
    snapshot = client.snapshot("1", volume.volume_id)
    client.delete(snapshot.snapshot_id)
    for identity in ("no id", volume.volume_id + "x", volume.volume_id):
        client.delete_snapshot(identity)
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    assert client.snapshots() == [snapshot]
    with expect.code("NOT_FOUND"):
        client.snapshot("2", snapshot.snapshot_id)
    with expect.code("NOT_FOUND"):
        find(client, volume.volume_id)


@pytest.mark.variation
def test_invalid_requests_are_refused(client: Client, volume: csi.Volume) -> None:
    for name in ("", "n" * 129, "a\x00b"):
        with expect.code("INVALID_ARGUMENT", "name"):
            client.snapshot(name, volume.volume_id)
    with expect.code("INVALID_ARGUMENT", "source_volume_id"):
        client.snapshot("1", "")
    for call in (client.delete_snapshot, lambda identity: find(client, identity)):
        with expect.code("INVALID_ARGUMENT", "snapshot_id"):
            call("")
    for parameters, word in (
        ({"colour": "red"}, "carver/size"),
        ({"size": "much"}, "size"),
        ({"size": "0"}, "larger"),
    ):
        with expect.code("INVALID_ARGUMENT", "parameters", word):
            client.snapshot("1", volume.volume_id, parameters)
    assert client.snapshots() == []


@pytest.mark.parametrize("name", ["n" * 128, "snapshot-0b5c3c6e", "a/b", "vol-pvc-1"])
@pytest.mark.variation
def test_each_valid_name_names_one_snapshot(client: Client, volume: csi.Volume, name: str) -> None:
    assert client.snapshot(name, volume.volume_id) == client.snapshot(name, volume.volume_id)


@pytest.mark.parametrize(
    ("size", "extents"),
    [("", 4), ("8MiB", 2), ("50%", 8), ("1", 1), ("100%", 16), ("10GiB", 17)],
)
@pytest.mark.variation
def test_cow_store_has_the_requested_size_up_to_the_useful_maximum(
    client: Client, volume: csi.Volume, host: AnyHost, group: str, size: str, extents: int
) -> None:
    before = Room(report.read(host.lvm).group(group)).free_extents
    client.snapshot("1", volume.volume_id, {"carver/size": size} if size else None)
    assert before - Room(report.read(host.lvm).group(group)).free_extents == extents


@pytest.mark.variation
def test_snapshot_without_room_is_refused(client: Client, volume: csi.Volume) -> None:
    client.create("pvc-2", client.capacity().maximum_volume_size.value - EXTENT, block())
    with expect.code("RESOURCE_EXHAUSTED", str(EXTENT)):
        client.snapshot("1", volume.volume_id, {"size": "8MiB"})
    assert client.snapshot("1", volume.volume_id, {"size": "4MiB"}).ready_to_use


# Lists


@pytest.mark.variation
def test_snapshots_are_listed_by_source_and_by_id(client: Client, volume: csi.Volume) -> None:
    other = client.create("pvc-2", EXTENT, block())
    first, second = (client.snapshot(name, volume.volume_id) for name in ("1", "2"))
    third = client.snapshot("3", other.volume_id)
    assert client.snapshots() == [first, second, third]
    assert client.snapshots(volume_id=volume.volume_id) == [first, second]
    assert client.snapshots(volume_id="no-volume") == []
    assert client.snapshots(snapshot_id=second.snapshot_id) == [second]
    assert client.snapshots(snapshot_id="no-snapshot") == []
    assert find(client, third.snapshot_id) == third
    with expect.code("NOT_FOUND", "x"):
        find(client, "x")


@pytest.mark.variation
def test_list_is_paged(client: Client, volume: csi.Volume) -> None:
    made = [client.snapshot(name, volume.volume_id) for name in "abc"]
    request = csi.ListSnapshotsRequest(max_entries=2)
    first = client.controller.ListSnapshots(request)
    request.starting_token = first.next_token
    rest = client.controller.ListSnapshots(request)
    assert [one.snapshot for one in (*first.entries, *rest.entries)] == made
    assert rest.next_token == ""
    with expect.code("ABORTED", "starting_token"):
        client.controller.ListSnapshots(csi.ListSnapshotsRequest(starting_token="3"))  # noqa: S106
    with expect.code("INVALID_ARGUMENT", "max_entries"):
        client.controller.ListSnapshots(csi.ListSnapshotsRequest(max_entries=-1))


# Deletion


def test_delete_runs_two_commands_and_erases_the_cow_store(
    client: Client, volume: csi.Volume, host: AnyHost, group: str, service: Service
) -> None:
    before = Room(report.read(host.lvm).group(group)).free_extents
    snapshot = client.snapshot("1", volume.volume_id)
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, b"secret  " * 512)
    host.commands.clear()
    client.delete_snapshot(snapshot.snapshot_id)
    in_background.ended(service.eraser.jobs)
    # The first two are the call's, the others erase in the background.
    assert lvm2_commands(host) == ["fullreport", "lvconvert", "lvchange", "lvremove"]
    assert names(host, group) == {"vol-pvc-1"}
    assert Room(report.read(host.lvm).group(group)).free_extents == before
    client.delete_snapshot(snapshot.snapshot_id)
    assert client.snapshots() == []


def test_snapshot_of_an_inactive_volume(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    host.deactivate(group, "vol-pvc-1")
    snapshot = client.snapshot("1", volume.volume_id)
    assert snapshot.ready_to_use
    assert not logical(host, group, "snap-1").active
    client.delete_snapshot(snapshot.snapshot_id)
    await_names(host, group, {"vol-pvc-1"})


@pytest.mark.variation
def test_overflowed_snapshot_is_not_ready(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    snapshot = client.snapshot("1", volume.volume_id, {"size": "4MiB"})
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, b"x" * (8 * MIB))
    assert not client.snapshots()[0].ready_to_use
    assert not client.snapshot("1", volume.volume_id).ready_to_use
    assert logical(host, group, "snap-1").overflowed
    client.delete_snapshot(snapshot.snapshot_id)
    await_names(host, group, {"vol-pvc-1"})


def test_overflow_is_detected_while_the_snapshot_is_inactive(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    """As after a reboot: lvm2 does not know of it."""
    other = client.create("pvc-2", 64 * MIB, block())
    client.snapshot("1", volume.volume_id, {"size": "4MiB"})
    client.snapshot("2", other.volume_id, {"size": "4MiB"})
    first, second = client.snapshots()
    for name, size in (("vol-pvc-1", 8 * MIB), ("vol-pvc-2", MIB)):
        host.write_bytes(device(host, group, name), 0, b"x" * size)
        host.deactivate(group, name)
    # Asked twice, since nothing may be remembered from when they were active.
    for _ in range(2):
        assert [one.ready_to_use for one in client.snapshots()] == [False, True]
        assert not client.snapshot("1", volume.volume_id).ready_to_use
    host.commands.clear()
    with expect.code("FAILED_PRECONDITION", first.snapshot_id, "overflowed"):
        client.create("pvc-3", 0, block(), source=of_snapshot(first.snapshot_id))
    assert set(lvm2_commands(host)) == {"fullreport"}
    client.create("pvc-3", 0, block(), source=of_snapshot(second.snapshot_id))
    client.delete_snapshot(first.snapshot_id)
    assert client.snapshots() == [second]


# What snapshots forbid


@pytest.mark.variation
def test_volume_with_snapshots_is_not_deleted(client: Client, volume: csi.Volume) -> None:
    snapshot = client.snapshot("1", volume.volume_id)
    with expect.code("FAILED_PRECONDITION", snapshot.snapshot_id, "deleted after them"):
        client.delete(volume.volume_id)
    assert client.snapshots() == [snapshot]
    client.delete_snapshot(snapshot.snapshot_id)
    client.delete(volume.volume_id)


@pytest.fixture
def used(client: Client, staging: Path) -> str:
    """A staged volume with a snapshot."""
    made = client.create("pvc-1", 16 * MIB, mounted("ext4"))
    client.stage(made, staging, mounted("ext4"))
    assert client.snapshot("1", made.volume_id).ready_to_use
    return made.volume_id


def stage_again(client: Client, volume_id: str, staging: Path) -> None:
    """As kubelet does when the last pod on the node ends and another starts."""
    client.unstage(volume_id, staging)
    client.stage(csi.Volume(volume_id=volume_id), staging, mounted("ext4"))


@pytest.mark.variation
def test_volume_with_snapshots_grows_while_not_in_use(
    client: Client, used: str, host: AnyHost, staging: Path
) -> None:
    [snapshot] = client.snapshots()
    with expect.code("FAILED_PRECONDITION", snapshot.snapshot_id, "scale what uses it to 0"):
        client.expand(used, 48 * MIB)
    client.unstage(used, staging)
    host.commands.clear()
    assert client.expand(used, 32 * MIB).capacity_bytes == 32 * MIB
    # The larger size on record is withdrawn.
    assert lvm2_commands(host) == ["lvchange", "lvextend", "lvchange"]
    client.stage(csi.Volume(volume_id=used), staging, mounted("ext4"))
    assert client.node_expand(used, staging, 32 * MIB).capacity_bytes == 32 * MIB
    client.unstage(used, staging)
    assert client.snapshots()[0].size_bytes == 16 * MIB


@pytest.mark.variation
def test_used_volume_with_snapshots_grows_at_the_next_stage(
    client: Client, used: str, host: AnyHost, staging: Path
) -> None:
    snapshot_id = used.replace("vol-pvc-1", "snap-1")
    host.commands.clear()
    with expect.code("FAILED_PRECONDITION", snapshot_id, str(32 * MIB), "staged next"):
        client.node_expand(used, staging, 31 * MIB)
    assert lvm2_commands(host) == ["fullreport", "lvchange", "fullreport"]
    host.commands.clear()
    with expect.code("FAILED_PRECONDITION"):
        client.node_expand(used, staging, 31 * MIB)
    # Nothing was written since.
    assert lvm2_commands(host) == []
    before = client.stats(used, staging)
    [listed] = client.unhealthy()
    for health in (listed, client.node_health(used), client.volume_health(used)):
        [pending] = health.health_statuses
        assert pending.reason == "ExpansionPending"
        assert str(32 * MIB) in pending.message
        assert "scale what uses it to 0" in pending.message

    host.commands.clear()
    stage_again(client, used, staging)
    assert lvm2_commands(host) == ["lvchange", "lvextend", "lvchange"]
    after = client.stats(used, staging)
    assert after.usage[0].total > before.usage[0].total + 8 * MIB
    # Kubelet repeats its call, and the claim has the requested size.
    assert client.node_expand(used, staging, 31 * MIB).capacity_bytes == 32 * MIB
    client.volume(used)
    healthy = (client.node_health(used), client.volume_health(used), *client.unhealthy())
    assert not any(health.health_statuses for health in healthy)
    assert [one.snapshot_id for one in client.snapshots()] == [snapshot_id]
    client.unstage(used, staging)


@pytest.mark.variation
def test_used_raw_volume_with_snapshots_grows_at_the_next_stage(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path
) -> None:
    volume = client.create("pvc-1", 16 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    host.write_bytes(device(host, group, "vol-pvc-1"), 8 * MIB, data := b"contents" * 512)
    client.snapshot("1", volume.volume_id)
    with expect.code("FAILED_PRECONDITION", "scale what uses it to 0"):
        client.node_expand(volume.volume_id, target, 32 * MIB)
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    assert client.node_expand(volume.volume_id, target, 32 * MIB).capacity_bytes == 32 * MIB
    assert host.read_bytes(device(host, group, "vol-pvc-1"), 8 * MIB, len(data)) == data
    client.unpublish(volume.volume_id, target)


@pytest.mark.variation
def test_volume_without_room_to_grow_is_staged_as_it_is(
    client: Client, used: str, staging: Path
) -> None:
    with expect.code("FAILED_PRECONDITION"):
        client.node_expand(used, staging, 32 * MIB)
    other = client.create("pvc-2", client.capacity().available_capacity, block())
    stage_again(client, used, staging)
    # After this code kubelet lets the pod start.
    with expect.code("FAILED_PRECONDITION", "Make room"):
        client.node_expand(used, staging, 32 * MIB)
    client.delete(other.volume_id)
    stage_again(client, used, staging)
    assert client.node_expand(used, staging, 32 * MIB).capacity_bytes == 32 * MIB
    client.unstage(used, staging)


@pytest.mark.variation
def test_the_latest_requested_size_counts(client: Client, used: str, staging: Path) -> None:
    for size in (64 * MIB, 24 * MIB):
        with expect.code("FAILED_PRECONDITION", str(size)):
            client.node_expand(used, staging, size)
    # Without the snapshot the recorded size is still applied.
    client.delete_snapshot(client.snapshots()[0].snapshot_id)
    stage_again(client, used, staging)
    assert client.node_expand(used, staging, 24 * MIB).capacity_bytes == 24 * MIB
    client.unstage(used, staging)


def test_remains_of_a_killed_lvcreate_are_erased_at_the_next_start(
    client: Client, volume: csi.Volume, host: AnyHost, group: str, service: Service
) -> None:
    """lvm2 writes its metadata twice: first the COW store alone, with the snapshot's tags."""
    snapshot = client.snapshot("1", volume.volume_id)
    host.lvm("lvconvert", "--yes", "--splitsnapshot", "--", f"{group}/snap-1")
    assert client.snapshots() == []
    with expect.code("ABORTED", "being erased"):
        client.snapshot("1", volume.volume_id)
    in_background.look(service, service.eraser.jobs)
    in_background.ended(service.eraser.jobs)
    assert names(host, group) == {"vol-pvc-1"}
    assert client.snapshot("1", volume.volume_id).snapshot_id == snapshot.snapshot_id
