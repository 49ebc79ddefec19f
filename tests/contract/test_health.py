"""Health of volumes and storage, without a process, until the problem is over."""

import expect
import pytest
from csi_client import Client
from real.any import AnyHost

from agent.csi.client import block, mounted
from agent.daemon.server import Service
from proto import csi_pb2 as csi

MIB = 1 << 20


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    return client.create("pvc-1", 16 * MIB, block())


def reported(client: Client, volume: csi.Volume) -> list[tuple[int, str]]:
    """What is wrong with a volume, as all calls report it."""
    node = client.node_health(volume.volume_id)
    assert node.volume_id == volume.volume_id
    found: list[tuple[int, str]] = [(one.status, one.reason) for one in node.health_statuses]
    every = [client.volume_health(volume.volume_id)]
    every += [one for one in client.unhealthy() if one.volume_id == volume.volume_id]
    assert len(every) == 1 + bool(found)
    for health in every:
        assert [(one.status, one.reason) for one in health.health_statuses] == found
    return found


def test_a_volume_is_healthy_from_its_creation_and_not_found_once_deleted(
    client: Client, volume: csi.Volume, host: AnyHost
) -> None:
    host.commands.clear()
    assert reported(client, volume) == []
    staging, target = host.directory / "staging", host.directory / "target"
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    host.commands.clear()
    assert reported(client, volume) == []
    assert not client.node_health(volume.volume_id, target, staging).health_statuses
    # What this machine lacks is no fault of its groups.
    assert [one for one in client.storage_health() if not one.HasField("volume_capability")] == []
    assert host.commands == []
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    for ask in (client.volume_health, client.node_health):
        with expect.code("NOT_FOUND"):
            ask(volume.volume_id)
    assert client.unhealthy() == []


def test_a_suspended_device_is_reported_until_it_is_resumed(
    client: Client, service: Service, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    service.diagnosis.settling_seconds = 0.1
    service.reports.fresh()
    host.suspend(group, "vol-pvc-1")
    try:
        host.commands.clear()
        assert reported(client, volume) == [(csi.INACCESSIBLE, "DeviceSuspended")]
        assert host.commands == []
    finally:
        host.devices.resume(group, "vol-pvc-1")
    assert reported(client, volume) == []


def test_an_overflowed_snapshot_is_reported_of_its_volume_until_it_is_deleted(
    client: Client, service: Service, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    snapshot = client.snapshot("s", volume.volume_id, {"size": "4Mi"})
    service.reports.fresh()
    assert reported(client, volume) == []
    device = host.devices.find(group, "vol-pvc-1")
    assert device is not None
    host.write_bytes(device.path, 0, b"x" * (12 * MIB))
    assert reported(client, volume) == [(csi.DATA_LOSS, "SnapshotOverflowed")]
    [status] = client.volume_health(volume.volume_id).health_statuses
    assert f"snapshot {snapshot.snapshot_id} of it is of no use" in status.message
    assert "of no use" in status.message
    client.delete_snapshot(snapshot.snapshot_id)
    service.reports.fresh()
    assert reported(client, volume) == []


@pytest.mark.variation
def test_an_open_encrypted_volume_without_a_mount_is_reported_until_it_is_closed(
    client: Client, host: AnyHost
) -> None:
    encrypted, staging = {"carver/encryption": "luks2"}, host.directory / "staging"
    volume = client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters=encrypted)
    client.stage(volume, staging, mounted("ext4"), {"passphrase": "sesame"})
    assert reported(client, volume) == []
    # As a kill between opening and mounting leaves it.
    host.kernel.unmount(str(staging))
    assert reported(client, volume) == [(csi.DEGRADED, "EncryptionLeftOpen")]
    client.unstage(volume.volume_id, staging)
    assert reported(client, volume) == []
    client.delete(volume.volume_id)


@pytest.mark.variation
@pytest.mark.parametrize("how", ["sent for the last time", "moved", "received"])
def test_a_volume_that_may_not_be_used_keeps_no_other_from_the_list(
    client: Client, service: Service, volume: csi.Volume, host: AnyHost, group: str, how: str
) -> None:
    service.diagnosis.settling_seconds = 0.1
    other = client.create("pvc-2", 16 * MIB, block())
    service.reports.fresh()
    holds, held = service.context.holds, other.volume_id
    # Each is so before a report has its tag.
    if how == "moved":
        holds.note_moved(held, "there")
    elif how == "received":
        holds.note_receiving(held)
    else:
        holds.hold(held, "there", 60)
    host.suspend(group, "vol-pvc-1")
    try:
        assert [one.volume_id for one in client.unhealthy()] == [volume.volume_id]
    finally:
        host.devices.resume(group, "vol-pvc-1")
        holds.remove_note(held)
