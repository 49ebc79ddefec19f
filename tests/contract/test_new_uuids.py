"""The remedy for two groups of one UUID: the copy gets another, and keeps its volumes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real.any import AnyHost
from serving import served

from agent.core.ids import VolumeId
from agent.csi.client import block
from agent.settings.settings import Config

MIB = 1 << 20


@pytest.fixture
def group(host: AnyHost, tmp_path: Path) -> Iterator[str]:
    """A group of the test's own: others keep their UUIDs."""
    name = f"copied-{tmp_path.parent.name[-6:]}"
    with host.own_group(name, [host.new_device(33 * MIB)]):
        yield name


def test_a_group_of_another_uuid_has_its_volumes_under_other_ids(
    host: AnyHost, config: Config, group: str, tmp_path: Path
) -> None:
    """docs/operations.md, Machine templates and restored disks."""
    with served(host, config) as (_, client):
        volume = client.create("pvc-1", 8 * MIB, block())
        client.stage(volume, tmp_path / "staging", block())
        device = host.devices.find(group, "vol-pvc-1")
        assert device is not None
        host.write_bytes(device.path, 0, b"kept" * 1024)
        client.unstage(volume.volume_id, tmp_path / "staging")
    host.deactivate(group, "vol-pvc-1")
    host.lvm("vgchange", "--uuid", "--", group)
    with served(host, config) as (service, client):
        service.reports.fresh()
        [found] = client.volumes()
        before, now = (VolumeId.parse(one.volume_id) for one in (volume, found))
        assert before is not None
        assert now is not None
        assert (now.group, now.name) == (before.group, before.name)
        assert now.group_uuid != before.group_uuid
        assert now.is_of(service.volume_groups.uuids()[group])
        client.stage(found, tmp_path / "staging", block())
        device = host.devices.find(group, "vol-pvc-1")
        assert device is not None
        assert host.read_bytes(device.path, 0, 4096) == b"kept" * 1024
        client.unstage(found.volume_id, tmp_path / "staging")
        client.delete(found.volume_id)
