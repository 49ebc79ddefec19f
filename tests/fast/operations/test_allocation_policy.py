"""A volume group whose own policy has lvm2 give less to one volume than is free (lvm(8))."""

from pathlib import Path

import configured
import expect
import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.csi.client import block
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm.layout import Layout, Reserve
from lvm.thin import Policy

EXTENT = 4 << 20
CLASSES = ("thick", "mirrored", "thin")


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    """Two disks: of the one 40 extents are in one piece, of the other all."""
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [100, 70])
    host.lvm2.groups["data"].runs["/dev/fake-data-0"] = 40
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    policy = Policy(over_provisioning=1.0, size=Reserve(size_bytes=10 * EXTENT))
    classes = (
        DeviceClass("thick", "data", default=True),
        DeviceClass("mirrored", "data", layout=Layout("raid1", mirrors=1)),
        DeviceClass("thin", "data", layout=Layout("thin"), pool=policy),
    )
    return configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)


def choose(fake: FakeHost, service: Service, policy: str) -> None:
    fake.lvm("vgchange", "--alloc", policy, "--", "data")
    service.reports.fresh()


def room(client: Client, device_class: str) -> int:
    found = client.capacity({"class": device_class})
    assert found.available_capacity == found.maximum_volume_size.value
    return found.available_capacity // EXTENT


@pytest.mark.parametrize(
    ("policy", "thick", "mirrored"),
    [
        # An image takes one extent more for its metadata.
        ("normal", 170, 69),
        ("anywhere", 170, 69),
        ("cling", 100, 69),
        ("cling_by_tags", 100, 69),
        ("contiguous", 70, 39),
    ],
)
def test_no_more_is_promised_than_lvm2_gives_to_one_volume(
    client: Client, service: Service, fake: FakeHost, policy: str, thick: int, mirrored: int
) -> None:
    choose(fake, service, policy)
    assert [room(client, one) for one in ("thick", "mirrored")] == [thick, mirrored]
    most = thick * EXTENT
    with expect.code("RESOURCE_EXHAUSTED", *(("--alloc normal",) if thick < 170 else ())):
        client.create("more", most + EXTENT, block())
    client.delete(client.create("most", most, block()).volume_id)


def test_a_refusal_names_the_policy_and_what_changes_it(
    client: Client, service: Service, fake: FakeHost
) -> None:
    choose(fake, service, "contiguous")
    words = ("in one piece", "contiguous", "vgchange --alloc normal data")
    with expect.code("RESOURCE_EXHAUSTED", *words):
        client.create("1", 71 * EXTENT, block())
    choose(fake, service, "normal")
    client.create("1", 71 * EXTENT, block())


@pytest.mark.parametrize("policy", ["cling", "contiguous"])
def test_of_a_pool_that_may_not_be_able_to_grow_no_growth_is_promised(
    client: Client, service: Service, fake: FakeHost, policy: str
) -> None:
    choose(fake, service, policy)
    assert room(client, "thin") > 0
    client.create("1", 4 * EXTENT, block(), parameters={"class": "thin"})
    # The pool has ten.
    assert room(client, "thin") == 6
    choose(fake, service, "normal")
    assert room(client, "thin") > 6
