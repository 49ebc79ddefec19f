"""A tenant writes the metadata of the group itself into his raw volume: nothing changes for it."""

from pathlib import Path

import pytest
from fakes.host import FakeHost
from real.any import AnyHost, device

from agent.csi.client import Client, block, mounted
from lvm import report
from mount import loop

MIB = 1 << 20


def write_own_label(host: AnyHost, group: str, path: str) -> None:
    """What `dd` of the first MiB of the group's own disk does: its label and its metadata."""
    if isinstance(host, FakeHost):
        host.label(path)
        return
    disk = report.read(host.lvm).group(group).disks[0].name
    host.write_bytes(path, 0, host.read_bytes(disk, 0, MIB))


@pytest.mark.parametrize("read_only", [False, pytest.param(True, marks=pytest.mark.variation)])
def test_raw_volume_with_the_group_s_label_changes_nothing(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path, read_only: bool
) -> None:
    tenant = client.create("tenant", 16 * MIB, block())
    name = tenant.volume_id.rpartition("/")[2]
    client.stage(tenant, staging, block())
    write_own_label(host, group, device(host, group, name))
    client.publish(tenant, staging, target, block(), read_only=read_only)
    # As kubelet attaches one to what is published (pkg/volume/util/volumepathhandler).
    over = None if read_only else loop.attach(host.kernel, str(target))
    try:
        other = client.create("other", 16 * MIB, mounted("ext4"))
        assert client.capacity().available_capacity
        assert {one.volume_id for one in client.volumes()} == {tenant.volume_id, other.volume_id}
        client.expand(other.volume_id, 32 * MIB)
    finally:
        if over is not None:
            loop.detach(host.kernel, over)
    client.unpublish(tenant.volume_id, target)
    client.unstage(tenant.volume_id, staging)
    # As after a reboot: it is activated anew, with what is on it.
    host.deactivate(group, name)
    client.stage(tenant, staging, block())
    client.delete(other.volume_id)
    client.unstage(tenant.volume_id, staging)
    client.delete(tenant.volume_id)
    assert client.volumes() == []
