"""What NodeGetStorageHealth reports of groups, of lvm2, and of what else Carver needs."""

from dataclasses import replace
from pathlib import Path

import configured
import pytest
from csi_client import Client
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from fakes.lvm import FakePool
from fakes.sysfs import Sysfs

from agent.csi.client import block
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from lvm.disk_reader import DiskErrors
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
PROGRAMS = ("mkfs.ext4", "fsck.ext4", "e2fsck", "mkfs.xfs", "xfs_repair")
GROUPS = ("data", "fast")
pytestmark = [
    pytest.mark.groups(**{key: [100, 100] for key in GROUPS}),
    pytest.mark.settings(
        classes=(
            configured.PLAIN,
            DeviceClass("fast", "fast"),
            replace(configured.THIN, group="fast"),
        )
    ),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a node that lacks nothing."""
    made = tmp_path / "root"
    for program in PROGRAMS:
        (made / "usr/sbin").mkdir(parents=True, exist_ok=True)
        (made / "usr/sbin" / program).write_text("#!")
        (made / "usr/sbin" / program).chmod(0o755)
    (made / "dev").mkdir()
    (made / "dev/loop-control").touch()
    return made


@pytest.fixture
def service(service: Service, root: Path) -> Service:
    service.storage.node = replace(service.node, root=root)
    return service


def words(client: Client) -> list[tuple[int, str]]:
    return [(one.status, one.reason) for one in client.storage_health()]


def only(client: Client, status: int, reason: str) -> str:
    """The message of the only entry."""
    [found] = client.storage_health()
    assert (found.status, found.reason) == (status, reason)
    return found.message


def look(service: Service) -> None:
    service.reports.outdate()
    for one in service.volume_groups:
        one.refresh().exception(20)


def test_missing_disks_of_two_groups_are_one_entry_until_they_are_back(
    client: Client, service: Service, fake: FakeHost
) -> None:
    for name in GROUPS:
        fake.lose_disk(name, 1)
    look(service)
    message = only(client, csi.STORAGE_DEGRADED, "DiskMissing")
    for name in GROUPS:
        assert f"volume group {name} misses a disk" in message
        assert fake.lvm2.groups[name].disks[1].uuid in message
        fake.bring_disk(name, 1)
    assert "seen 0 s ago" in message
    assert not client.storage_health()[0].HasField("volume_capability")
    look(service)
    assert client.storage_health() == []


def test_a_missing_group_is_unreachable_unless_it_was_never_here(
    client: Client, service: Service, fake: FakeHost, root: Path
) -> None:
    gone = fake.lvm2.groups.pop("data")
    look(service)
    assert words(client) == [(csi.STORAGE_UNREACHABLE, "GroupMissing")]
    for one in service.volume_groups:
        one.last_seen = None
    assert client.storage_health() == []
    # As after a start of Carver: lvm2 has a backup of the metadata.
    (root / "etc/lvm/backup").mkdir(parents=True)
    (root / "etc/lvm/backup/data").write_text("contents = ...")
    assert words(client) == [(csi.STORAGE_UNREACHABLE, "GroupMissing")]
    fake.lvm2.groups["data"] = gone
    look(service)
    assert client.storage_health() == []


def test_a_disk_that_does_not_answer_is_reported_without_waiting(
    client: Client, service: Service, fake: FakeHost
) -> None:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-data-0")
    look(service)
    found = {one.reason: one for one in client.storage_health()}
    assert found["DiskNotResponding"].status == csi.STORAGE_UNREACHABLE
    assert "/dev/fake-data-0" in found["DiskNotResponding"].message
    fake.disks.hanging.clear()
    look(service)
    assert client.storage_health() == []


def test_a_failure_of_lvm2_is_reported_with_its_message(
    client: Client, service: Service, fake: FakeHost
) -> None:
    fake.intercept = lambda words: Result(5, "", "a lock file cannot be written")
    for name in GROUPS:
        fake.lvm2.groups[name].seqno += 1
    look(service)
    message = only(client, csi.STORAGE_UNREACHABLE, "LvmNotAnswering")
    assert "a lock file cannot be written" in message
    assert "volume group fast" in message
    fake.intercept = lambda words: None
    look(service)
    assert client.storage_health() == []


def test_a_failed_start_is_reported_though_no_call_is_admitted(
    client: Client, service: Service
) -> None:
    service.context.admission.close()
    service.context.admission.refuse(RuntimeError("lvm is not installed"))
    assert "lvm is not installed" in only(client, csi.STORAGE_UNREACHABLE, "LvmNotAnswering")
    service.context.admission.open()
    assert client.storage_health() == []


@pytest.mark.parametrize(
    ("share", "mode", "reason"),
    [(0.95, "rw", "PoolNearlyFull"), (1.0, "out_of_data_space", "PoolFull")],
)
def test_a_full_or_nearly_full_pool_is_reported_by_the_kernels_status(
    client: Client,
    service: Service,
    fake: FakeHost,
    share: float,
    mode: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.create("pvc-1", 400 * MIB, block(), parameters={"class": "thin"})
    look(service)
    assert client.storage_health() == []
    pool = fake.lvm2.groups["fast"].volumes["pool-thin"]
    assert isinstance(pool, FakePool)
    full = pool.status(4 * MIB)
    monkeypatch.setattr(
        pool,
        "status",
        lambda _extent: replace(full, mode=mode, used_data_blocks=int(full.data_blocks * share)),
    )
    found = {one.reason: one for one in client.storage_health()}
    assert found[reason].status == csi.STORAGE_DEGRADED
    assert "thin pool fast/pool-thin" in found[reason].message
    monkeypatch.undo()
    assert client.storage_health() == []


def test_errors_of_a_disk_are_reported_of_its_group(
    client: Client, service: Service, tmp_path: Path
) -> None:
    sysfs = Sysfs(tmp_path / "sys")
    sysfs.add("fake-data-0", "8:0", badblocks="100 8")
    service.storage.disk_errors = DiskErrors(sysfs.root)
    message = only(client, csi.STORAGE_DEGRADED, "MediumErrors")
    assert "a disk of volume group data: fake-data-0 has 1 range of" in message
    (sysfs.root / "class/block/fake-data-0/badblocks").write_text("")
    assert client.storage_health() == []


def test_an_entry_for_one_kind_of_use_names_that_kind_and_all_entries_differ(
    client: Client, service: Service, fake: FakeHost, root: Path
) -> None:
    (root / "usr/sbin/mkfs.ext4").unlink()
    (root / "dev/loop-control").unlink()
    tools, loops = client.storage_health()
    assert (tools.status, tools.reason) == (csi.STORAGE_DEGRADED, "FileSystemToolsMissing")
    assert tools.volume_capability.WhichOneof("access_type") == "mount"
    assert "install e2fsprogs" in tools.message
    assert (loops.status, loops.reason) == (csi.STORAGE_DEGRADED, "LoopDevicesMissing")
    assert loops.volume_capability.WhichOneof("access_type") == "block"
    for name in GROUPS:
        fake.lose_disk(name, 0)
    look(service)
    found = client.storage_health()
    keys = [(one.status, one.reason, str(one.volume_capability)) for one in found]
    assert len(set(keys)) == len(keys) == 3
