"""A disk goes away and comes back, and is another device to the kernel from then on."""

from pathlib import Path

import configured
import expect
import pytest
from fakes.host import FakeHost

from agent.csi.client import Client, block, mounted
from mount import table

MIB = 1 << 20
LAYOUTS = pytest.mark.parametrize("layout", ["plain", "thin"])
pytestmark = [
    # What is small lies on the first disk.
    pytest.mark.groups(data=[200, 20]),
    pytest.mark.settings(classes=(configured.PLAIN, configured.THIN)),
]


@LAYOUTS
def test_a_volume_that_is_not_in_use_can_be_staged_again(
    fake: FakeHost, client: Client, tmp_path: Path, layout: str
) -> None:
    parameters = {"class": layout}
    volume, other = (
        client.create(name, 64 * MIB, mounted("ext4"), parameters=parameters) for name in "ab"
    )
    for one in (volume, other):
        client.stage(one, tmp_path / "staging")
        client.unstage(one.volume_id, tmp_path / "staging")
    made = fake.lvm2.groups["data"].volumes["vol-a"].media.contents
    fake.replug_disk("data", 0)
    client.stage(volume, tmp_path / "staging")
    assert table.read(fake.kernel).at(str(tmp_path / "staging"))
    assert fake.lvm2.groups["data"].volumes["vol-a"].media.contents == made


@LAYOUTS
def test_the_next_pod_can_have_a_volume_that_stayed_staged(
    fake: FakeHost, client: Client, tmp_path: Path, layout: str
) -> None:
    """Kubelet does not unstage when one pod follows another."""
    staging, flags = tmp_path / "staging", ["errors=remount-ro"]
    how = mounted("ext4", flags)
    volume = client.create("a", 64 * MIB, how, parameters={"class": layout})
    client.stage(volume, staging, how)
    client.publish(volume, staging, tmp_path / "first", how)
    fake.replug_disk("data", 0)
    fake.break_file_system(table.read(fake.kernel).at(str(staging))[0].source)
    client.unpublish(volume.volume_id, tmp_path / "first")
    client.publish(volume, staging, tmp_path / "second", how)
    [mount] = table.read(fake.kernel).at(str(tmp_path / "second"))
    assert not mount.read_only
    assert not fake.block.get(mount.source).has_lost_disk


@LAYOUTS
def test_a_raw_volume_can_be_read_again(
    fake: FakeHost, client: Client, tmp_path: Path, layout: str
) -> None:
    volume = client.create("a", 64 * MIB, block(), parameters={"class": layout})
    client.stage(volume, tmp_path / "staging", block())
    client.unstage(volume.volume_id, tmp_path / "staging")
    fake.replug_disk("data", 0)
    client.stage(volume, tmp_path / "staging", block())
    device = fake.devices.find("data", "vol-a")
    assert device is not None
    assert not fake.block.get(device.path).has_lost_disk


def test_a_volume_can_be_deleted(fake: FakeHost, client: Client, waiting_eraser: None) -> None:
    volume = client.create("a", 64 * MIB, block())
    fake.replug_disk("data", 0)
    client.delete(volume.volume_id)
    assert not fake.lvm2.groups["data"].volumes


@LAYOUTS
def test_what_is_in_use_stays_as_it_is(
    fake: FakeHost, client: Client, tmp_path: Path, layout: str
) -> None:
    """A new device below a file system that met errors would not mend it."""
    parameters = {"class": layout}
    used, free = (
        client.create(name, 64 * MIB, mounted("ext4"), parameters=parameters) for name in "ab"
    )
    client.stage(used, tmp_path / "used")
    fake.replug_disk("data", 0)
    if layout == "plain":
        client.stage(free, tmp_path / "free")
    else:
        # Both have their pool's device.
        with expect.code("INTERNAL", "Input/output error"):
            client.stage(free, tmp_path / "free")
    device = fake.devices.find("data", "vol-a")
    assert device is not None
    assert fake.block.get(device.path).has_lost_disk


@LAYOUTS
def test_a_raw_volume_in_use_is_not_well(
    fake: FakeHost, client: Client, tmp_path: Path, layout: str
) -> None:
    """lvm2 reports nothing, and no file system is there to meet the errors."""
    volume = client.create("a", 64 * MIB, block(), parameters={"class": layout})
    client.stage(volume, tmp_path / "staging", block())
    client.publish(volume, tmp_path / "staging", tmp_path / "target", block())
    assert not client.volume_health(volume.volume_id).health_statuses
    fake.replug_disk("data", 0)
    [found] = client.volume_health(volume.volume_id).health_statuses
    assert found.reason == "DeviceGone"
    client.unpublish(volume.volume_id, tmp_path / "target")
    client.unstage(volume.volume_id, tmp_path / "staging")
    client.stage(volume, tmp_path / "staging", block())
    assert not client.volume_health(volume.volume_id).health_statuses


def test_while_the_disk_is_away_nothing_is_deactivated(
    fake: FakeHost, client: Client, tmp_path: Path
) -> None:
    volume = client.create("a", 64 * MIB, mounted("ext4"))
    fake.replug_disk("data", 0)
    fake.lvm2.groups["data"].disks[0].missing = True
    with expect.code("INTERNAL", "Input/output error"):
        client.stage(volume, tmp_path / "staging")
    assert fake.devices.find("data", "vol-a")
