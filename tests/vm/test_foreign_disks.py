"""The installed service beside disks of others that bear its group's name, UUID or a copy."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from csi_client import Client
from real.host import RealHost
from vm import foreign, privileges
from vm.conftest import Restart

from agent.csi.client import block, mounted

MIB = 1 << 20
GROUP = "carver_foreign"
# Without udev's word it would take a minute.
NOTICED_SECONDS = 100
SERVED = (
    f"ExecStart=\nExecStart=/opt/carver/venv/bin/carver serve --config {privileges.CONFIGURATION}"
)


@pytest.fixture
def group(host: RealHost, restart: Restart) -> Iterator[str]:
    """An operator's group, on two of the machine's disks, that the installed service serves."""
    disks = [host.new_device(101 * 4 * MIB) for _ in range(2)]
    with host.own_group(GROUP, disks, "--setautoactivation", "n"):
        privileges.CONFIGURATION.write_text(
            f'[[classes]]\nname = "default"\ngroup = "{GROUP}"\ndefault = true\n'
        )
        restart(SERVED)
        yield GROUP


@pytest.mark.variation
@pytest.mark.parametrize("is_running", [False, True], ids=["before", "running"])
@pytest.mark.parametrize("kind", foreign.KINDS)
def test_every_call_on_the_group_works_and_the_foreign_disk_is_reported(
    host: RealHost,
    client: Client,
    directory: Path,
    restart: Restart,
    group: str,
    kind: str,
    is_running: bool,
) -> None:
    disk = host.new_device(64 * MIB)
    volume = client.create("test-kept", 16 * MIB, block())
    take_away = foreign.put(host, group, disk, kind)
    try:
        if not is_running:
            restart(SERVED)
        until(client, disk, is_reported=True)
        every_call_works(client, directory, [volume.volume_id])
        assert disk in reasons(client)["DiskIgnored"]
    finally:
        take_away()
    until(client, disk, is_reported=False)
    client.delete(volume.volume_id)


def until(client: Client, disk: str, *, is_reported: bool) -> None:
    """Wait until the storage's health names the disk, or does not any more."""
    deadline = time.monotonic() + NOTICED_SECONDS
    while (disk in reasons(client).get("DiskIgnored", "")) is not is_reported:
        assert time.monotonic() < deadline, reasons(client)
        # A call that looks at the group.
        client.capacity()
        time.sleep(1)


def reasons(client: Client) -> Mapping[str, str]:
    """What is wrong with the storage; what the machine lacks that runs the test is not."""
    found = client.storage_health()
    return {one.reason: one.message for one in found if not one.HasField("volume_capability")}


def every_call_works(client: Client, place: Path, there: Sequence[str]) -> None:
    """A volume's life, beside volumes that are there; it is used below a directory."""
    staging, target = place / "staging", place / "target"
    before = client.capacity().available_capacity
    assert before
    made = client.create("test-new", 64 * MIB, mounted("ext4"))
    client.stage(made, staging, mounted("ext4"))
    client.publish(made, staging, target, mounted("ext4"))
    (target / "file").write_bytes(b"data")
    snapshot = client.snapshot("test-nightly", made.volume_id)
    assert [one.snapshot_id for one in client.snapshots()] == [snapshot.snapshot_id]
    client.delete_snapshot(snapshot.snapshot_id)
    assert client.expand(made.volume_id, 80 * MIB).capacity_bytes == 80 * MIB
    client.node_expand(made.volume_id, target, 80 * MIB)
    assert client.stats(made.volume_id, target).usage
    listed = [*there, made.volume_id]
    assert sorted(one.volume_id for one in client.volumes()) == sorted(listed)
    for one in listed:
        assert not client.volume_health(one).health_statuses
        assert not client.node_health(one).health_statuses
    assert client.unhealthy() == []
    assert (target / "file").read_bytes() == b"data"
    client.unpublish(made.volume_id, target)
    client.unstage(made.volume_id, staging)
    client.delete(made.volume_id)
    assert client.capacity().available_capacity == before
