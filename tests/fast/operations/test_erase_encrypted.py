"""What is left on a group's extents of an encrypted volume that was deleted."""

from collections.abc import Iterator
from pathlib import Path

import configured
import pytest
import serving
from fakes.host import FakeHost

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.classes import ERASURES, DeviceClass
from lvm.layout import Layout
from lvm.thin import Policy

MIB = 1 << 20
KEY = {"passphrase": "correct horse battery staple"}
HEADER_BLOCKS = 4 * MIB // 4096


@pytest.fixture
def client(host: FakeHost, tmp_path: Path) -> Iterator[Client]:
    group = host.new_group(100)
    classes = [
        *(DeviceClass(one, group, encryption="luks2", erase=one) for one in ERASURES),
        DeviceClass("thin", group, encryption="luks2", layout=Layout("thin"), pool=Policy()),
    ]
    config = configured.carver(tmp_path, group, classes=tuple(classes))
    service = Service(config, serving.machine(host), host.lvm)
    service.eraser.grace_seconds = 60
    service.start(config.endpoint)
    with Client(config.endpoint) as caller:
        yield caller
    service.stop()


@pytest.mark.parametrize("name", [*ERASURES, "thin"])
def test_the_header_is_overwritten_and_the_rest_as_the_class_says(
    host: FakeHost, client: Client, name: str
) -> None:
    [group] = host.lvm2.groups
    staging = host.directory / "staging"
    volume = client.create("pvc-1", 48 * MIB, block(), parameters={"class": name})
    client.stage(volume, staging, block(), KEY)
    device = host.devices.find(group, "vol-pvc-1")
    assert device is not None
    opened = host.devices.mapping(device)
    assert opened is not None
    host.write_bytes(opened.path, 0, b"secret".ljust(4096, b"\0"))
    media = host.block.get(device.path).media
    assert any(number < HEADER_BLOCKS for number in media.blocks)

    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)

    assert not any(number < HEADER_BLOCKS for number in media.blocks)
    assert bool(media.blocks) == (name in ("crypto", "thin"))
    assert not any(b"secret" in data for data in media.blocks.values())


def test_a_full_pool_keeps_no_volume_from_being_deleted(host: FakeHost, client: Client) -> None:
    [group] = host.lvm2.groups
    volume = client.create("pvc-1", 48 * MIB, block(), parameters={"class": "thin"})
    client.create("pvc-2", 48 * MIB, block(), parameters={"class": "thin"})
    host.lvm2.groups[group].volumes["pool-thin"].mode = "out_of_data_space"  # type: ignore[attr-defined]
    client.delete(volume.volume_id)
    assert "vol-pvc-1" not in host.lvm2.groups[group].volumes
