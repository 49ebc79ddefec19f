"""What is wrong with a volume is told, with what to do about it."""

import errno
import os
import time
from pathlib import Path

import pytest
from fakes.host import FakeHost
from fakes.kernel import FakeKernel
from fakes.lvm import FakeDisk

from agent.csi.client import Client, block, mounted
from agent.service.server import Service
from lvm.command import Result
from lvm.errors import LvmError
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
    assert isinstance(fake.kernel, Kernel)
    return fake.kernel


@pytest.fixture
def fake(fake: FakeHost) -> FakeHost:
    fake.kernel = Kernel(fake.block)
    return fake


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
    ("health", "remedy"),
    [
        ("partial", "attach it again"),
        ("refresh needed", "lvchange --refresh data/vol-pvc-1"),
        ("strange", "lv_health_status"),
    ],
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


# What NodeGetVolumeStats tells of LVM, by a report that was read before


def told(client: Client, volume: csi.Volume, path: Path) -> str:
    return client.stats(volume.volume_id, path).volume_condition.message


def renew(service: Service) -> None:
    """As the thread that watches does, when its time has come."""
    for engine in service.engines:
        engine.time_seconds = engine.tried_seconds = 0.0
    service.inventory.renew(300.0)


def test_statistics_tell_what_lvm_said_last_and_start_no_process(
    client: Client, service: Service, staged: csi.Volume, fake: FakeHost, tmp_path: Path
) -> None:
    group = fake.lvm2.groups["data"]
    # Without its only disk the group would not be here.
    group.disks.append(FakeDisk("/dev/other", "other", 10))
    service.inventory.read()
    group.disks[0].missing = True
    group.volumes["vol-pvc-1"].health = "partial"
    before = len(fake.commands)
    assert told(client, staged, tmp_path / "staging") == "no problem is known"
    assert len(fake.commands) == before

    renew(service)
    message = told(client, staged, tmp_path / "staging")
    assert f"the disk {group.disks[0].uuid} is missing" in message
    assert "restore the volume from a backup" in message
    assert len(fake.commands) == before + 1

    group.disks[0].missing = False
    group.volumes["vol-pvc-1"].health = ""
    renew(service)
    assert told(client, staged, tmp_path / "staging") == "no problem is known"


def test_a_raw_block_volume_has_a_condition_too(
    client: Client, service: Service, fake: FakeHost, tmp_path: Path
) -> None:
    volume = client.create("pvc-1", 16 * MIB, block())
    client.publish(volume, tmp_path / "staging", tmp_path / "target", block())
    fake.lvm2.groups["data"].volumes["vol-pvc-1"].health = "partial"
    service.inventory.read()
    found = client.stats(volume.volume_id, tmp_path / "target")
    assert "partial" in found.volume_condition.message
    assert found.usage[0].total == 16 * MIB


def test_an_inline_volume_has_a_condition_too(
    client: Client, service: Service, fake: FakeHost, tmp_path: Path
) -> None:
    client.publish_inline("csi-1", tmp_path / "target", {"size": "64Mi"})
    fake.lvm2.groups["data"].volumes["eph-csi-1"].health = "partial"
    service.inventory.read()
    message = client.stats("csi-1", tmp_path / "target").volume_condition.message
    assert "eph-csi-1 is partial" in message


def test_while_lvm_does_not_answer_what_it_said_before_is_told(
    client: Client, service: Service, staged: csi.Volume, fake: FakeHost, tmp_path: Path
) -> None:
    fake.lvm2.groups["data"].volumes["vol-pvc-1"].health = "partial"
    service.inventory.read()
    fake.intercept = lambda words: Result(5, "", "a disk hangs")
    fake.lvm2.groups["data"].seqno += 1
    renew(service)
    assert "partial" in told(client, staged, tmp_path / "staging")
    with pytest.raises(LvmError, match="a disk hangs"):
        service.inventory.recent()


def test_a_volume_that_no_report_has_yet_is_told_of_by_the_kernel_alone(
    client: Client, service: Service, staged: csi.Volume, tmp_path: Path
) -> None:
    for engine in service.engines:
        engine.last = None
        assert told(client, staged, tmp_path / "staging") == "no problem is known"


def test_nothing_is_read_behind_anyone_s_back_while_nobody_asks(
    client: Client, service: Service, staged: csi.Volume, fake: FakeHost, tmp_path: Path
) -> None:
    before = len(fake.commands)
    service.inventory._glimpsed = False
    renew(service)
    assert len(fake.commands) == before

    client.stats(staged.volume_id, tmp_path / "staging")
    service.inventory.read()
    service.inventory.renew(300.0)
    assert len(fake.commands) == before + 1, "the report is new"

    fake.lvm2.groups["data"].seqno += 1
    service.inventory.outdate()
    service.inventory.renew(300.0)
    assert len(fake.commands) == before + 1, "but not as new as that"

    for engine in service.engines:
        engine.time_seconds = time.time() - 70
    service.inventory.renew(300.0)
    assert len(fake.commands) == before + 2, "a disk changed since"


def test_a_snapshot_that_ran_full_is_told_of_its_volume(
    client: Client, staged: csi.Volume, fake: FakeHost
) -> None:
    request = csi.CreateSnapshotRequest(name="s", source_volume_id=staged.volume_id)
    snapshot = client.controller.CreateSnapshot(request).snapshot
    fake.lvm2.wrote("/dev/mapper/data-vol--pvc--1", 320 * MIB)
    asked = csi.ControllerGetVolumeRequest(volume_id=staged.volume_id)
    condition = client.controller.ControllerGetVolume(asked).status.volume_condition
    assert condition.abnormal
    assert f"snapshot {snapshot.snapshot_id} of it is of no use" in condition.message
    assert "delete it" in condition.message
