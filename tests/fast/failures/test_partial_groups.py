"""While a disk of a group is missing, lvm2 creates and extends nothing: there is no room."""

from pathlib import Path

import configured
import expect
import pytest
from fakes.host import FakeHost

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm.layout import Layout
from lvm.thin import Policy

MIB = 1 << 20


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [60, 60, 60])
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    classes = (
        DeviceClass("plain", "data", default=True),
        DeviceClass("raid", "data", layout=Layout("raid1", mirrors=1)),
        DeviceClass("thin", "data", layout=Layout("thin"), pool=Policy()),
    )
    return configured.carver(tmp_path, classes=classes)


@pytest.mark.parametrize("name", ["plain", "raid", "thin"])
def test_a_group_that_lacks_a_disk_has_no_room(
    client: Client, fake: FakeHost, service: Service, name: str
) -> None:
    volume = client.create("pvc-1", 32 * MIB, block(), parameters={"class": name})
    fake.lose_disk("data", 2)
    assert client.capacity({"class": name}).available_capacity == 0
    with expect.code("RESOURCE_EXHAUSTED", "disk", "is missing"):
        client.create("pvc-2", 32 * MIB, block(), parameters={"class": name})
    with expect.code("OUT_OF_RANGE", "is missing"):
        client.expand(volume.volume_id, 64 * MIB)
    with expect.code("RESOURCE_EXHAUSTED", "is missing"):
        client.snapshot("1", volume.volume_id)
    fake.bring_disk("data", 2)
    client.create("pvc-2", 32 * MIB, block(), parameters={"class": name})
