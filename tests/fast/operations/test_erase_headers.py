"""What opens an encrypted volume that was deleted: kept copies of its header, copies in areas."""

from dataclasses import replace
from pathlib import Path

import configured
import in_background
import pytest
import serving
from fakes.host import FakeHost

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.settings.classes import ERASURES, DeviceClass
from agent.settings.settings import Config
from lvm.layout import Layout
from lvm.thin import Policy
from proto import csi_pb2 as csi

EXTENT = 4 << 20
KEY = {"passphrase": "correct horse battery staple"}
NEW_KEY = {"passphrase": "a new one", "previousPassphrase": KEY["passphrase"]}
GIVE_UP = ("lvchange", "--addtag", "carver.givenUp=yes", "--")
pytestmark = [pytest.mark.usefixtures("waiting_eraser"), pytest.mark.groups(data=[60, 60])]


@pytest.fixture(params=["zero", "none"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    thin = DeviceClass("thin", "data", encryption="luks2", layout=Layout("thin"), pool=Policy())
    classes = [DeviceClass(one, "data", encryption="luks2", erase=one) for one in ERASURES]
    return configured.carver(
        tmp_path,
        classes=(*classes, thin),
        kubelet_dir=("/",),
        header_backups=tmp_path / "headers",
        wipe=getattr(request, "param", "zero"),
    )


def make(client: Client, directory: Path, device_class: str) -> str:
    """A volume of which a copy of the header is kept."""
    volume = client.create("a", 8 * EXTENT, block(), parameters={"class": device_class})
    client.stage(volume, directory / "staged", block(), KEY)
    client.unstage(volume.volume_id, directory / "staged")
    assert len(kept(directory)) == 1
    return volume.volume_id


def kept(directory: Path) -> list[Path]:
    return list((directory / "headers").iterdir())


def until_done(service: Service) -> None:
    for jobs in (service.eraser.jobs, service.freed_eraser.jobs):
        in_background.ended(jobs)


@pytest.mark.parametrize("name", [*ERASURES, "thin"])
def test_header_copy_is_deleted_with_the_volume(
    client: Client, fake: FakeHost, tmp_path: Path, name: str
) -> None:
    client.delete(make(client, tmp_path, name))
    assert "vol-a" not in fake.lvm2.groups["data"].volumes
    assert kept(tmp_path) == []


@pytest.mark.parametrize("name", ERASURES)
def test_header_copy_is_deleted_while_a_disk_is_lost(
    client: Client, service: Service, fake: FakeHost, tmp_path: Path, name: str
) -> None:
    volume = make(client, tmp_path, name)
    fake.lose_disk("data", 0)
    client.delete(volume)
    until_done(service)
    assert "vol-a" in fake.lvm2.groups["data"].volumes
    assert kept(tmp_path) == []


def test_header_copy_is_deleted_with_the_pool(
    client: Client, service: Service, fake: FakeHost, tmp_path: Path
) -> None:
    volume = make(client, tmp_path, "thin")
    fake.lose_disk("data", 0)
    fake.lvm(*GIVE_UP, "data/pool-thin")
    client.delete(volume)
    for _ in range(3):
        until_done(service)
    assert fake.lvm2.groups["data"].volumes == {}
    assert kept(tmp_path) == []


def test_cow_store_is_erased_in_any_case(client: Client, fake: FakeHost, tmp_path: Path) -> None:
    volume_id = make(client, tmp_path, "zero")
    snapshot = client.snapshot("1", volume_id)
    # The COW store gets the header that the old key opens.
    client.stage(csi.Volume(volume_id=volume_id), tmp_path / "staged", block(), NEW_KEY)
    client.unstage(volume_id, tmp_path / "staged")
    client.delete_snapshot(snapshot.snapshot_id)
    assert "snap-1" not in fake.lvm2.groups["data"].volumes
    assert fake.freed_bytes("data") == b""


def test_snapshot_waits_for_a_lost_disk(
    client: Client, service: Service, fake: FakeHost, config: Config, tmp_path: Path
) -> None:
    volume = make(client, tmp_path, "zero")
    snapshot = client.snapshot("1", volume)
    fake.lose_disk("data", 1)
    client.delete_snapshot(snapshot.snapshot_id)
    assert client.snapshots() == []
    assert set(fake.lvm2.groups["data"].volumes) == {"vol-a", "snap-1"}
    service.stop()
    fake.bring_disk("data", 1)
    following = serving.start(replace(config, endpoint=tmp_path / "2.sock"), fake)
    until_done(following)
    following.stop()
    assert set(fake.lvm2.groups["data"].volumes) == {"vol-a"}
    assert fake.freed_bytes("data") == b""


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_thin_volume_that_lost_the_length_of_its_header_loses_all_of_that(
    client: Client, fake: FakeHost, tmp_path: Path, is_whole: bool
) -> None:
    volume = make(client, tmp_path, "thin")
    logical = fake.lvm2.groups["data"].volumes["vol-a"]
    [lost] = [one for one in logical.tags if one.startswith("carver.header=")]
    logical.tags.remove(lost)
    device = fake.devices.find("data", "vol-a")
    assert device is not None
    if not is_whole:
        fake.block.get(device.path).media.blocks.pop(0)
    media = fake.block.get(device.path).media
    media.zeroed.clear()
    client.delete(volume)
    assert max(end for start, end in media.zeroed if start == 0) >= int(lost.split("=")[1])
