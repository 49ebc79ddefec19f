"""What is wrong with a volume is told, with what to do about it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import configured
import pytest
from fakes.host import FakeHost
from fakes.kernel import FakeKernel

from agent.client import Client, mounted
from agent.server import Host, Service
from proto import csi_pb2 as csi

MIB = 1 << 20


class Kernel(FakeKernel):
    """Has one file system that does not answer any more."""

    dead = ""

    def lstat(self, path: str) -> os.stat_result:
        self._refuse(path)
        return super().lstat(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        self._refuse(path)
        return super().statvfs(path)

    def _refuse(self, path: str) -> None:
        if path == self.dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)


@pytest.fixture
def kernel(fake: FakeHost) -> Kernel:
    fake.kernel = Kernel(fake.block)
    return fake.kernel


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [200])
    return host


@pytest.fixture
def client(fake: FakeHost, kernel: Kernel, tmp_path: Path) -> Iterator[Client]:
    config = configured.carver(tmp_path)
    running = Service(config, Host(fake.run, fake.kernel, fake.devices), fake.lvm)
    running.start(config.endpoint)
    with Client(config.endpoint) as caller:
        yield caller
    running.stop()


@pytest.fixture
def staged(client: Client, tmp_path: Path) -> csi.Volume:
    volume = client.create("pvc-1", 320 * MIB)
    client.stage(volume, tmp_path / "staging")
    return volume


def test_a_volume_in_order_says_so(client: Client, staged: csi.Volume, tmp_path: Path) -> None:
    for condition in (
        client.stats(staged.volume_id, tmp_path / "staging").volume_condition,
        client.controller.ListVolumes(csi.ListVolumesRequest()).entries[0].status.volume_condition,
    ):
        assert not condition.abnormal
        assert condition.message == "no problem is known"


def test_a_file_system_that_turned_read_only_is_told(
    client: Client, staged: csi.Volume, kernel: Kernel, tmp_path: Path
) -> None:
    kernel.remount_read_only("/dev/mapper/data-vol--pvc--1")
    found = client.stats(staged.volume_id, tmp_path / "staging")
    assert found.volume_condition.abnormal
    assert "turned read-only after an error" in found.volume_condition.message
    assert found.usage


def test_a_volume_that_was_asked_for_read_only_is_in_order(
    client: Client, staged: csi.Volume, tmp_path: Path
) -> None:
    client.publish(staged, tmp_path / "staging", tmp_path / "target", read_only=True)
    assert not client.stats(staged.volume_id, tmp_path / "target").volume_condition.abnormal


@pytest.mark.parametrize(("fs_type", "remedy"), [("ext4", "staged again"), ("btrfs", "scrub")])
def test_errors_that_the_file_system_counted_are_told(
    client: Client, fake: FakeHost, tmp_path: Path, fs_type: str, remedy: str
) -> None:
    volume = client.create("pvc-1", 320 * MIB, mounted(fs_type))
    client.stage(volume, tmp_path / "staging", mounted(fs_type))
    fake.block.get("/dev/mapper/data-vol--pvc--1").media.errors = 3
    found = client.stats(volume.volume_id, tmp_path / "staging").volume_condition
    assert found.abnormal
    assert "errors_count 3" in found.message
    assert remedy in found.message


def test_a_file_system_that_does_not_answer_is_told_and_no_failure_of_the_call(
    client: Client, staged: csi.Volume, kernel: Kernel, tmp_path: Path
) -> None:
    kernel.dead = str(tmp_path / "staging")
    found = client.stats(staged.volume_id, tmp_path / "staging")
    assert found.volume_condition.abnormal
    assert "does not answer: Input/output error" in found.volume_condition.message
    assert [one.total for one in found.usage] == [320 * MIB]


@pytest.mark.parametrize(
    ("health", "remedy"), [("partial", "attach the disk"), ("strange", "lv_health_status")]
)
def test_what_lvm_reports_against_a_volume_is_told_by_the_controller(
    client: Client, staged: csi.Volume, fake: FakeHost, health: str, remedy: str
) -> None:
    fake.lvm2.groups["data"].volumes["vol-pvc-1"].health = health
    listed = client.controller.ListVolumes(csi.ListVolumesRequest()).entries[0].status
    request = csi.ControllerGetVolumeRequest(volume_id=staged.volume_id)
    one = client.controller.ControllerGetVolume(request).status
    for condition in (listed.volume_condition, one.volume_condition):
        assert condition.abnormal
        assert health in condition.message
        assert remedy in condition.message
