"""What is wrong with a volume is reported, with a remedy."""

import errno
import os
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
from csi_client import Client
from fakes.host import FakeHost
from fakes.kernel import FakeKernel
from fakes.lvm import FakeDisk

from agent.csi.client import block, mounted
from agent.daemon.server import Service
from agent.volumes.reports import MONITOR_AGE_SECONDS
from mount.command import Result
from mount.mount_errors import CommandError
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


def seen(
    client: Client, volume_id: str, reason: str, status: "csi.VolumeHealthErrorType.ValueType"
) -> str:
    """The message of the only problem, as all three calls report it."""
    [listed] = client.unhealthy()
    every = (client.volume_health(volume_id), client.node_health(volume_id), listed)
    for health in every:
        assert health.volume_id == volume_id
        [found] = health.health_statuses
        assert (found.reason, found.status) == (reason, status)
    return every[0].health_statuses[0].message


@pytest.mark.parametrize("words", [("ro",), ("rw", "emergency_ro"), ("rw", "shutdown")])
def test_a_file_system_that_turned_read_only_is_reported(
    client: Client, staged: csi.Volume, kernel: Kernel, tmp_path: Path, words: tuple[str, ...]
) -> None:
    kernel.remount_read_only("/dev/mapper/data-vol--pvc--1", *words)
    found = seen(client, staged.volume_id, "FileSystemReadOnly", csi.INACCESSIBLE)
    assert "turned read-only" in found
    assert client.stats(staged.volume_id, tmp_path / "staging").usage


def test_a_volume_published_read_only_is_healthy(
    client: Client, staged: csi.Volume, tmp_path: Path
) -> None:
    client.publish(staged, tmp_path / "staging", tmp_path / "target", read_only=True)
    assert not client.node_health(staged.volume_id, tmp_path / "target").health_statuses


@pytest.mark.parametrize(
    ("fs_type", "reason", "status", "remedy"),
    [
        ("ext4", "FileSystemErrors", csi.DEGRADED, "staged again"),
        ("btrfs", "MediumErrors", csi.DATA_LOSS, "scrub"),
    ],
)
def test_errors_that_the_file_system_counted_are_reported(
    client: Client,
    fake: FakeHost,
    tmp_path: Path,
    fs_type: str,
    reason: str,
    status: "csi.VolumeHealthErrorType.ValueType",
    remedy: str,
) -> None:
    volume = client.create("pvc-1", 320 * MIB, mounted(fs_type))
    client.stage(volume, tmp_path / "staging", mounted(fs_type))
    fake.block.get("/dev/mapper/data-vol--pvc--1").media.errors = 3
    found = seen(client, volume.volume_id, reason, status)
    assert "errors_count 3" in found
    assert remedy in found


def test_a_file_system_that_does_not_answer_is_reported_and_fails_no_call(
    client: Client, staged: csi.Volume, kernel: Kernel, tmp_path: Path
) -> None:
    kernel.dead = str(tmp_path / "staging")
    message = seen(client, staged.volume_id, "FileSystemNotResponding", csi.INACCESSIBLE)
    assert "does not answer: Input/output error" in message
    found = client.stats(staged.volume_id, tmp_path / "staging")
    assert [one.total for one in found.usage] == [320 * MIB]


@pytest.mark.parametrize(
    ("health", "reason", "status", "remedy"),
    [
        ("partial", "DiskMissing", csi.INACCESSIBLE, "attach it again"),
        ("refresh needed", "RaidDegraded", csi.DEGRADED, "lvchange --refresh data/vol-pvc-1"),
        ("mismatches exist", "RaidMismatches", csi.DEGRADED, "--syncaction repair data/vol-pvc-1"),
        ("failed", "CacheFailing", csi.DEGRADED, "lv_health_status"),
        ("strange", "LvmReports", csi.DEGRADED, "lv_health_status"),
    ],
)
def test_what_lvm_reports_against_a_volume_is_reported(
    client: Client,
    service: Service,
    staged: csi.Volume,
    fake: FakeHost,
    health: str,
    reason: str,
    status: "csi.VolumeHealthErrorType.ValueType",
    remedy: str,
) -> None:
    fake.lvm2.groups["data"].volumes["vol-pvc-1"].health = health
    service.reports.fresh()
    message = seen(client, staged.volume_id, reason, status)
    assert health in message
    assert remedy in message
    assert "(seen 0 s ago, at " in message


# LVM's problems, by the last report


def problems(client: Client, volume: csi.Volume, path: Path) -> str:
    """All messages of the node's."""
    found = client.node_health(volume.volume_id, staging_path=path).health_statuses
    return "; ".join(one.message for one in found)


def report_partial(fake: FakeHost, service: Service, name: str = "vol-pvc-1") -> None:
    """Have a volume lack a disk, and the service read that."""
    fake.lvm2.groups["data"].volumes[name].health = "partial"
    fake.lvm2.groups["data"].seqno += 1
    service.reports.fresh()


def renew(service: Service) -> None:
    """Refresh the state, as the monitor does periodically."""
    for volume_group in service.volume_groups:
        volume_group.tried_seconds = 0.0
    wait(service.reports.refresh(60.0))


def test_health_is_by_the_last_report_and_starts_no_process(
    client: Client, service: Service, staged: csi.Volume, fake: FakeHost, tmp_path: Path
) -> None:
    group = fake.lvm2.groups["data"]
    # Without its only disk the group would not be here.
    group.disks.append(FakeDisk("/dev/other", "other", 10))
    service.reports.fresh()
    group.disks[0].missing = True
    group.volumes["vol-pvc-1"].health = "partial"
    before = len(fake.commands)
    assert problems(client, staged, tmp_path / "staging") == ""
    assert len(fake.commands) == before

    renew(service)
    message = problems(client, staged, tmp_path / "staging")
    assert f"the disk {group.disks[0].uuid} is missing" in message
    assert "restore the volume from a backup" in message
    assert len(fake.commands) == before + 1

    group.disks[0].missing = False
    group.volumes["vol-pvc-1"].health = ""
    renew(service)
    assert problems(client, staged, tmp_path / "staging") == ""


def test_while_lvm_does_not_answer_its_last_report_counts(
    client: Client, service: Service, staged: csi.Volume, fake: FakeHost, tmp_path: Path
) -> None:
    report_partial(fake, service)
    fake.intercept = lambda words: Result(5, "", "a disk hangs")
    fake.lvm2.groups["data"].seqno += 1
    renew(service)
    assert "partial" in problems(client, staged, tmp_path / "staging")
    with pytest.raises(CommandError, match="a disk hangs"):
        service.reports.seen(MONITOR_AGE_SECONDS)


def test_a_volume_that_no_report_has_yet_is_diagnosed_by_the_kernel_alone(
    client: Client, service: Service, staged: csi.Volume, fake: FakeHost, tmp_path: Path
) -> None:
    for volume_group in service.volume_groups:
        assert volume_group.cached is not None
        volume_group.cached = replace(volume_group.cached, volumes={})
    fake.commands.clear()
    assert problems(client, staged, tmp_path / "staging") == ""
    fake.lvm2.suspend("data", "vol-pvc-1")
    suspended = problems(client, staged, tmp_path / "staging")
    assert "is suspended" in suspended
    assert "dmsetup resume" in suspended
    assert fake.commands == []


def test_state_is_refreshed_only_while_it_is_in_use_and_old(
    client: Client, service: Service, staged: csi.Volume, fake: FakeHost, tmp_path: Path
) -> None:
    before = len(fake.commands)
    service.reports._in_use.clear()
    renew(service)
    assert len(fake.commands) == before

    client.node_health(staged.volume_id)
    service.reports.fresh()
    wait(service.reports.refresh(60.0))
    assert len(fake.commands) == before + 1, "the report is new"

    fake.lvm2.groups["data"].seqno += 1
    service.reports.outdate()
    wait(service.reports.refresh(60.0))
    assert len(fake.commands) == before + 1, "new enough, though a disk changed since"

    for volume_group in service.volume_groups:
        volume_group.tried_seconds = time.time() - 70
    wait(service.reports.refresh(60.0))
    assert len(fake.commands) == before + 2, "too old"


def test_an_encrypted_raw_block_volume_that_is_staged_is_healthy(
    client: Client, tmp_path: Path
) -> None:
    encrypted = {"carver/encryption": "luks2"}
    volume = client.create("pvc-1", 48 * MIB, block(), parameters=encrypted)
    client.stage(volume, tmp_path / "staging", block(), {"passphrase": "sesame"})
    assert client.unhealthy() == []
