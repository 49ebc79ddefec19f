"""Snapshots of thick volumes: taken, found, listed, overflowed, deleted, and what they forbid."""

from pathlib import Path

import expect
import pytest
from csi_client import Client
from real.any import AnyHost, device

from agent.core.settings import TOPOLOGY_KEY
from agent.csi.client import block, mounted, of_snapshot
from agent.daemon.server import Service
from lvm import report, tags
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB


def logical(host: AnyHost, group: str, name: str) -> report.LogicalVolume:
    return report.read(host.lvm).group(group).volume(name)


def names(host: AnyHost, group: str) -> set[str]:
    return set(report.read(host.lvm).group(group).volumes)


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    return client.create("pvc-1", 64 * MIB, block())


def lvm2_commands(host: AnyHost) -> list[str]:
    return [words[1] for words in host.commands if words[0] == "lvm"]


def test_a_snapshot_is_made_tagged_and_ready_in_two_commands(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    host.commands.clear()
    snapshot = client.snapshot("snap-1", volume.volume_id)
    assert lvm2_commands(host) == ["fullreport", "lvcreate"]
    assert snapshot.ready_to_use
    assert snapshot.size_bytes == 64 * MIB
    assert snapshot.source_volume_id == volume.volume_id
    assert snapshot.creation_time.seconds > 0
    made = logical(host, group, "snap-snap-1")
    assert (made.origin, made.read_only) == ("vol-pvc-1", True)
    own_tags = tags.decode(made.tags)
    assert (own_tags["name"], own_tags["state"], own_tags["source"]) == (
        "snap-1",
        "ready",
        "vol-pvc-1",
    )


def segments(node: str) -> csi.Topology:
    return csi.Topology(segments={TOPOLOGY_KEY: node})


@pytest.mark.variation
def test_a_snapshot_is_where_its_volume_is_in_every_answer(
    client: Client, volume: csi.Volume
) -> None:
    taken = client.snapshot("snap-1", volume.volume_id)
    [listed] = client.snapshots()
    got = client.controller.GetSnapshot(csi.GetSnapshotRequest(snapshot_id=taken.snapshot_id))
    assert client.snapshots_here().entries == [listed]
    for one in (taken, listed, got.snapshot):
        assert list(one.accessible_topology) == list(volume.accessible_topology)
    assert list(taken.accessible_topology) == [segments("here")]


def test_a_snapshot_for_where_the_node_says_it_is_is_there_and_the_same_each_time(
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


@pytest.mark.parametrize("field", ["requisite", "preferred"])
@pytest.mark.variation
def test_a_snapshot_for_this_node_is_taken_and_one_for_another_is_not(
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
    # There it is not usable from, though it is here.
    request.accessibility_requirements.CopyFrom(elsewhere)
    with expect.code("RESOURCE_EXHAUSTED"):
        client.controller.CreateSnapshot(request)
    assert client.snapshots() == [taken]


def test_that_snapshots_are_on_a_node_is_a_capability_of_the_plugin(client: Client) -> None:
    told = client.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
    offered = [one.service.type for one in told.capabilities]
    assert csi.PluginCapability.Service.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS in offered


def test_a_snapshot_keeps_what_its_origin_overwrites(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    origin = device(host, group, "vol-pvc-1")
    host.write_bytes(origin, 8 * MIB, b"before  " * 512)
    client.snapshot("1", volume.volume_id)
    host.write_bytes(origin, 8 * MIB, b"after   " * 512)
    taken = device(host, group, "snap-1")
    assert host.read_bytes(taken, 8 * MIB, 4096) == b"before  " * 512
    assert host.read_bytes(origin, 8 * MIB, 4096) == b"after   " * 512


def test_a_snapshot_of_a_mounted_volume_is_of_what_was_written_without_a_freeze_of_ours(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = client.create("pvc-2", 16 * MIB, mounted("ext4"))
    client.stage(volume, host.directory / "staging", mounted("ext4"))
    assert client.snapshot("1", volume.volume_id).ready_to_use
    client.unstage(volume.volume_id, host.directory / "staging")


@pytest.mark.variation
def test_a_repeated_snapshot_is_the_same_and_one_of_another_source_is_refused(
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
def test_a_snapshot_of_a_missing_volume_is_not_found(client: Client, volume: csi.Volume) -> None:
    for missing in (volume.volume_id + "x", "no id at all"):
        with expect.code("NOT_FOUND"):
            client.snapshot("1", missing)
    elsewhere = f"{volume.volume_id.partition('@')[0]}@00000000/vol-pvc-1"
    with expect.code("FAILED_PRECONDITION"):
        client.snapshot("1", elsewhere)
    assert client.snapshots() == []


@pytest.mark.variation
def test_a_snapshot_is_no_volume_and_a_volume_is_no_snapshot(
    client: Client, volume: csi.Volume
) -> None:
    snapshot = client.snapshot("1", volume.volume_id)
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    client.delete(snapshot.snapshot_id)
    client.delete_snapshot(volume.volume_id)
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    assert client.snapshots() == [snapshot]
    with expect.code("NOT_FOUND"):
        client.snapshot("2", snapshot.snapshot_id)
    with expect.code("NOT_FOUND"):
        client.controller.GetSnapshot(csi.GetSnapshotRequest(snapshot_id=volume.volume_id))


@pytest.mark.parametrize("name", ["", "n" * 129, "a\x00b"])
@pytest.mark.variation
def test_a_name_that_the_spec_does_not_allow_is_refused(
    client: Client, volume: csi.Volume, name: str
) -> None:
    with expect.code("INVALID_ARGUMENT", "name"):
        client.snapshot(name, volume.volume_id)


@pytest.mark.parametrize("name", ["n" * 128, "snapshot-0b5c3c6e", "a/b", "vol-pvc-1"])
@pytest.mark.variation
def test_any_name_that_the_spec_allows_names_one_snapshot(
    client: Client, volume: csi.Volume, name: str
) -> None:
    assert client.snapshot(name, volume.volume_id) == client.snapshot(name, volume.volume_id)


@pytest.mark.variation
def test_the_source_and_the_id_are_required(client: Client) -> None:
    with expect.code("INVALID_ARGUMENT", "source_volume_id"):
        client.snapshot("1", "")
    with expect.code("INVALID_ARGUMENT", "snapshot_id"):
        client.delete_snapshot("")
    with expect.code("INVALID_ARGUMENT", "snapshot_id"):
        client.controller.GetSnapshot(csi.GetSnapshotRequest())


# What it takes


@pytest.mark.parametrize(
    ("size", "extents"),
    [("", 4), ("8MiB", 2), ("50%", 8), ("1", 1), ("100%", 16), ("10GiB", 17)],
)
@pytest.mark.variation
def test_the_area_is_as_asked_in_whole_extents_and_never_more_than_is_of_use(
    client: Client, volume: csi.Volume, host: AnyHost, group: str, size: str, extents: int
) -> None:
    before = report.read(host.lvm).group(group).free_extents
    client.snapshot("1", volume.volume_id, {"carver/size": size} if size else None)
    assert before - report.read(host.lvm).group(group).free_extents == extents


@pytest.mark.parametrize(
    ("parameters", "word"),
    [({"colour": "red"}, "carver/size"), ({"size": "much"}, "size"), ({"size": "0"}, "larger")],
)
@pytest.mark.variation
def test_wrong_parameters_are_refused_by_name(
    client: Client, volume: csi.Volume, parameters: dict[str, str], word: str
) -> None:
    with expect.code("INVALID_ARGUMENT", "parameters", word):
        client.snapshot("1", volume.volume_id, parameters)
    assert client.snapshots() == []


@pytest.mark.variation
def test_a_snapshot_that_has_no_room_is_refused(client: Client, volume: csi.Volume) -> None:
    client.create("pvc-2", client.capacity().maximum_volume_size.value - EXTENT, block())
    with expect.code("RESOURCE_EXHAUSTED", str(EXTENT)):
        client.snapshot("1", volume.volume_id, {"size": "8MiB"})
    assert client.snapshot("1", volume.volume_id, {"size": "4MiB"}).ready_to_use


@pytest.mark.variation
def test_what_the_snapshotter_tells_is_kept_as_tags(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    prefix = "csi.storage.k8s.io/volumesnapshot"
    told = {f"{prefix}/name": "nightly", f"{prefix}/namespace": "shop"}
    client.snapshot("1", volume.volume_id, {**told, f"{prefix}content/name": "content-1"})
    own_tags = tags.decode(logical(host, group, "snap-1").tags)
    assert (own_tags["snapshot"], own_tags["namespace"]) == ("nightly", "shop")
    assert own_tags["content"] == "content-1"


# Lists


@pytest.mark.variation
def test_snapshots_are_listed_all_by_source_and_by_id(client: Client, volume: csi.Volume) -> None:
    other = client.create("pvc-2", EXTENT, block())
    first, second = (client.snapshot(name, volume.volume_id) for name in ("1", "2"))
    third = client.snapshot("3", other.volume_id)
    assert client.snapshots() == [first, second, third]
    assert client.snapshots(volume_id=volume.volume_id) == [first, second]
    assert client.snapshots(volume_id="no-volume") == []
    assert client.snapshots(snapshot_id=second.snapshot_id) == [second]
    assert client.snapshots(snapshot_id="no-snapshot") == []
    got = client.controller.GetSnapshot(csi.GetSnapshotRequest(snapshot_id=third.snapshot_id))
    assert got.snapshot == third
    with expect.code("NOT_FOUND", "x"):
        client.controller.GetSnapshot(csi.GetSnapshotRequest(snapshot_id="x"))


@pytest.mark.variation
def test_a_list_comes_in_parts_and_a_strange_token_is_aborted(
    client: Client, volume: csi.Volume
) -> None:
    made = [client.snapshot(name, volume.volume_id) for name in "abc"]
    request = csi.ListSnapshotsRequest(max_entries=2)
    first = client.controller.ListSnapshots(request)
    rest = client.controller.ListSnapshots(
        csi.ListSnapshotsRequest(max_entries=2, starting_token=first.next_token)
    )
    assert [one.snapshot for one in (*first.entries, *rest.entries)] == made
    assert rest.next_token == ""
    with expect.code("ABORTED", "starting_token"):
        client.controller.ListSnapshots(csi.ListSnapshotsRequest(starting_token="3"))  # noqa: S106
    with expect.code("INVALID_ARGUMENT", "max_entries"):
        client.controller.ListSnapshots(csi.ListSnapshotsRequest(max_entries=-1))


# The end of one


def test_a_deleted_snapshot_costs_two_commands_and_its_area_is_wiped_before_it_is_free(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    before = report.read(host.lvm).group(group).free_extents
    snapshot = client.snapshot("1", volume.volume_id)
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, b"secret  " * 512)
    host.commands.clear()
    client.delete_snapshot(snapshot.snapshot_id)
    # The first two are the call's, the others the wipe's behind it.
    assert lvm2_commands(host) == ["fullreport", "lvconvert", "lvchange", "lvremove"]
    assert names(host, group) == {"vol-pvc-1"}
    assert report.read(host.lvm).group(group).free_extents == before
    client.delete_snapshot(snapshot.snapshot_id)
    assert client.snapshots() == []


def test_a_snapshot_of_an_inactive_volume_is_made_and_deleted_as_any_other(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    host.deactivate(group, "vol-pvc-1")
    snapshot = client.snapshot("1", volume.volume_id)
    assert snapshot.ready_to_use
    assert not logical(host, group, "snap-1").active
    client.delete_snapshot(snapshot.snapshot_id)
    assert names(host, group) == {"vol-pvc-1"}


@pytest.mark.variation
def test_deleting_a_snapshot_that_cannot_be_one_succeeds(
    client: Client, volume: csi.Volume
) -> None:
    for identity in ("no id", volume.volume_id + "x"):
        client.delete_snapshot(identity)


@pytest.mark.variation
def test_an_overflowed_snapshot_is_never_ready_again(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    snapshot = client.snapshot("1", volume.volume_id, {"size": "4MiB"})
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, b"x" * (8 * MIB))
    assert not client.snapshots()[0].ready_to_use
    assert not client.snapshot("1", volume.volume_id).ready_to_use
    assert logical(host, group, "snap-1").overflowed
    client.delete_snapshot(snapshot.snapshot_id)
    assert names(host, group) == {"vol-pvc-1"}


def test_an_overflowed_snapshot_is_known_as_such_while_it_is_not_active(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    """As after a reboot: lvm2 does not know of it."""
    other = client.create("pvc-2", 64 * MIB, block())
    client.snapshot("1", volume.volume_id, {"size": "4MiB"})
    client.snapshot("2", other.volume_id, {"size": "4MiB"})
    first, second = client.snapshots()
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, b"x" * (8 * MIB))
    host.write_bytes(device(host, group, "vol-pvc-2"), 0, b"x" * MIB)
    for name in ("vol-pvc-1", "vol-pvc-2"):
        host.deactivate(group, name)
    # Asked twice, since nothing may have been remembered from when they were active.
    for _ in range(2):
        assert [one.ready_to_use for one in client.snapshots()] == [False, True]
        assert not client.snapshot("1", volume.volume_id).ready_to_use
    host.commands.clear()
    with expect.code("FAILED_PRECONDITION", first.snapshot_id, "overflowed"):
        client.create("pvc-3", 0, block(), source=of_snapshot(first.snapshot_id))
    assert lvm2_commands(host) == ["fullreport"]
    client.create("pvc-3", 0, block(), source=of_snapshot(second.snapshot_id))
    client.delete_snapshot(first.snapshot_id)
    assert client.snapshots() == [second]


# What it forbids


@pytest.mark.variation
def test_a_volume_with_snapshots_is_not_deleted_and_the_error_names_them(
    client: Client, volume: csi.Volume
) -> None:
    snapshot = client.snapshot("1", volume.volume_id)
    with expect.code("FAILED_PRECONDITION", snapshot.snapshot_id, "delete them first"):
        client.delete(volume.volume_id)
    assert client.snapshots() == [snapshot]
    client.delete_snapshot(snapshot.snapshot_id)
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_a_volume_with_snapshots_grows_while_it_is_not_in_use(
    client: Client, host: AnyHost, group: str
) -> None:
    staging = host.directory / "staging"
    volume = client.create("pvc-1", 16 * MIB, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    snapshot = client.snapshot("1", volume.volume_id)
    with expect.code("FAILED_PRECONDITION", snapshot.snapshot_id, "scale what uses it to 0"):
        client.expand(volume.volume_id, 48 * MIB)
    client.unstage(volume.volume_id, staging)
    host.commands.clear()
    assert client.expand(volume.volume_id, 32 * MIB).capacity_bytes == 32 * MIB
    # The larger wish, which was on record, is withdrawn.
    assert lvm2_commands(host) == ["lvchange", "lvextend", "lvchange"]
    client.stage(volume, staging, mounted("ext4"))
    assert client.node_expand(volume.volume_id, staging, 32 * MIB).capacity_bytes == 32 * MIB
    client.unstage(volume.volume_id, staging)
    assert client.snapshots()[0].size_bytes == 16 * MIB


def stage_again(client: Client, volume: csi.Volume, staging: Path) -> None:
    """What kubelet does where no pod of the node has it any more, and one comes again."""
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, mounted("ext4"))


def test_a_volume_in_use_with_snapshots_grows_when_it_is_staged_again(
    client: Client, host: AnyHost, group: str
) -> None:
    staging = host.directory / "staging"
    volume = client.create("pvc-1", 16 * MIB, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    snapshot = client.snapshot("1", volume.volume_id)
    host.commands.clear()
    with expect.code("FAILED_PRECONDITION", snapshot.snapshot_id, str(32 * MIB), "staged next"):
        client.node_expand(volume.volume_id, staging, 31 * MIB)
    assert lvm2_commands(host) == ["fullreport", "lvchange", "fullreport"]
    host.commands.clear()
    with expect.code("FAILED_PRECONDITION"):
        client.node_expand(volume.volume_id, staging, 31 * MIB)
    # Nothing was written since.
    assert lvm2_commands(host) == []
    before = client.stats(volume.volume_id, staging)
    [listed] = client.unhealthy()
    asked = client.node_health(volume.volume_id), client.volume_health(volume.volume_id)
    for health in (listed, *asked):
        [pending] = health.health_statuses
        assert pending.reason == "ExpansionPending"
        assert str(32 * MIB) in pending.message
        assert "scale what uses it to 0" in pending.message

    host.commands.clear()
    stage_again(client, volume, staging)
    assert lvm2_commands(host) == ["lvchange", "lvextend", "lvchange"]
    after = client.stats(volume.volume_id, staging)
    assert after.usage[0].total > before.usage[0].total + 8 * MIB
    # Kubelet asks again, and the claim has what it asked for.
    assert client.node_expand(volume.volume_id, staging, 31 * MIB).capacity_bytes == 32 * MIB
    client.volume(volume.volume_id)
    asked = client.node_health(volume.volume_id), client.volume_health(volume.volume_id)
    assert not any(health.health_statuses for health in (*asked, *client.unhealthy()))
    assert client.snapshots() == [snapshot]
    client.unstage(volume.volume_id, staging)


@pytest.mark.variation
def test_a_raw_block_volume_in_use_with_snapshots_grows_when_it_is_staged_again(
    client: Client, host: AnyHost, group: str
) -> None:
    staging, target = host.directory / "staging", host.directory / "target"
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
def test_a_volume_is_staged_as_it_is_where_there_is_no_room_for_what_is_on_record(
    client: Client, host: AnyHost, group: str
) -> None:
    staging = host.directory / "staging"
    volume = client.create("pvc-1", 16 * MIB, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    client.snapshot("1", volume.volume_id)
    with expect.code("FAILED_PRECONDITION"):
        client.node_expand(volume.volume_id, staging, 32 * MIB)
    other = client.create("pvc-2", client.capacity().available_capacity, block())
    stage_again(client, volume, staging)
    # Of this code kubelet lets the pod start.
    with expect.code("FAILED_PRECONDITION", "Make room"):
        client.node_expand(volume.volume_id, staging, 32 * MIB)
    client.delete(other.volume_id)
    stage_again(client, volume, staging)
    assert client.node_expand(volume.volume_id, staging, 32 * MIB).capacity_bytes == 32 * MIB
    client.unstage(volume.volume_id, staging)


@pytest.mark.variation
def test_the_latest_expansion_is_the_one_on_record(
    client: Client, host: AnyHost, group: str
) -> None:
    staging = host.directory / "staging"
    volume = client.create("pvc-1", 16 * MIB, mounted("ext4"))
    client.stage(volume, staging, mounted("ext4"))
    snapshot = client.snapshot("1", volume.volume_id)
    for size in (64 * MIB, 24 * MIB):
        with expect.code("FAILED_PRECONDITION", str(size)):
            client.node_expand(volume.volume_id, staging, size)
    # Without the snapshot nothing is in its way; what is on record is made good all the same.
    client.delete_snapshot(snapshot.snapshot_id)
    stage_again(client, volume, staging)
    assert client.node_expand(volume.volume_id, staging, 24 * MIB).capacity_bytes == 24 * MIB
    client.unstage(volume.volume_id, staging)


# Between two steps


def test_what_a_killed_lvcreate_leaves_is_no_snapshot_and_goes_at_the_next_start(
    client: Client, volume: csi.Volume, host: AnyHost, group: str, service: Service
) -> None:
    """lvm2 writes its metadata twice: first the area alone, which bears the snapshot's tags."""
    snapshot = client.snapshot("1", volume.volume_id)
    host.lvm("lvconvert", "--yes", "--splitsnapshot", "--", f"{group}/snap-1")
    assert client.snapshots() == []
    with expect.code("ABORTED", "being erased"):
        client.snapshot("1", volume.volume_id)
    service.eraser.resume()
    service.eraser.jobs.shutdown()
    assert names(host, group) == {"vol-pvc-1"}
    assert client.snapshot("1", volume.volume_id).snapshot_id == snapshot.snapshot_id
