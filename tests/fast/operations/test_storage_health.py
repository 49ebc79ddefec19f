"""What NodeGetStorageHealth tells of the groups, of lvm2, and of what Carver needs beside them."""

from dataclasses import replace
from pathlib import Path

import configured
import pytest
from csi_client import Client
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from fakes.lvm import FakePool
from fakes.sysfs import Sysfs

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import block
from agent.daemon.server import Service
from lvm.disks import DiskErrors
from lvm.layout import Layout
from lvm.thin import Policy
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
PROGRAMS = ("mkfs.ext4", "fsck.ext4", "e2fsck", "mkfs.xfs", "xfs_repair")
GROUPS = ("data", "fast")


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    for name in GROUPS:
        host.lvm2.add_group(name, [100, 100])
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    classes = (
        DeviceClass("plain", "data", default=True),
        DeviceClass("fast", "fast"),
        DeviceClass("thin", "fast", layout=Layout("thin"), pool=Policy()),
    )
    return configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)


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


def look(service: Service) -> None:
    service.inventory.outdate()
    for one in service.volume_groups:
        one.refresh().exception(20)


def test_storage_that_is_well_has_no_entry_and_costs_no_process(
    client: Client, fake: FakeHost
) -> None:
    client.create("pvc-1", 16 * MIB, block())
    fake.commands.clear()
    assert client.storage_health() == []
    assert fake.commands == []


def test_a_disk_that_is_missing_is_told_until_it_is_back(
    client: Client, service: Service, fake: FakeHost
) -> None:
    fake.lose_disk("data", 1)
    look(service)
    [found] = client.storage_health()
    assert (found.status, found.reason) == (csi.STORAGE_DEGRADED, "DiskMissing")
    assert fake.lvm2.groups["data"].disks[1].uuid in found.message
    assert "seen 0 s ago" in found.message
    assert not found.HasField("volume_capability")
    fake.bring_disk("data", 1)
    look(service)
    assert client.storage_health() == []


def test_what_is_wrong_with_two_groups_is_one_entry_that_names_both(
    client: Client, service: Service, fake: FakeHost
) -> None:
    for name in GROUPS:
        fake.lose_disk(name, 0)
    look(service)
    [found] = client.storage_health()
    assert found.reason == "DiskMissing"
    assert all(f"volume group {name} misses a disk" in found.message for name in GROUPS)


def test_a_group_that_is_gone_is_unreachable_and_one_that_never_was_here_is_not_missed(
    client: Client, service: Service, fake: FakeHost, root: Path
) -> None:
    gone = fake.lvm2.groups.pop("data")
    look(service)
    assert words(client) == [(csi.STORAGE_UNREACHABLE, "GroupMissing")]
    for one in service.volume_groups:
        one.last_seen = None
    assert client.storage_health() == []
    # As after a start of Carver's: lvm2 remembers.
    (root / "etc/lvm/backup").mkdir(parents=True)
    (root / "etc/lvm/backup/data").write_text("contents = ...")
    assert words(client) == [(csi.STORAGE_UNREACHABLE, "GroupMissing")]
    fake.lvm2.groups["data"] = gone
    look(service)
    assert client.storage_health() == []


def test_a_disk_that_does_not_answer_is_told_and_not_waited_for(
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


def test_lvm2_that_gives_no_report_is_told_with_its_words(
    client: Client, service: Service, fake: FakeHost
) -> None:
    fake.intercept = lambda words: Result(5, "", "a lock file cannot be written")
    for name in GROUPS:
        fake.lvm2.groups[name].seqno += 1
    look(service)
    [found] = client.storage_health()
    assert (found.status, found.reason) == (csi.STORAGE_UNREACHABLE, "LvmNotAnswering")
    assert "a lock file cannot be written" in found.message
    assert "volume group fast" in found.message
    fake.intercept = lambda words: None
    look(service)
    assert client.storage_health() == []


def test_a_start_that_does_not_come_off_is_told_though_no_call_is_admitted(
    client: Client, service: Service
) -> None:
    service.context.admission.close()
    service.context.admission.refuse(RuntimeError("lvm is not installed"))
    [found] = client.storage_health()
    assert (found.status, found.reason) == (csi.STORAGE_UNREACHABLE, "LvmNotAnswering")
    assert "lvm is not installed" in found.message
    service.context.admission.open()
    assert client.storage_health() == []


@pytest.mark.parametrize(
    ("share", "mode", "reason"),
    [(0.95, "rw", "PoolNearlyFull"), (1.0, "out_of_data_space", "PoolFull")],
)
def test_a_pool_that_is_full_or_nearly_so_is_told_as_the_kernel_has_it(
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


def test_errors_of_a_disk_are_told_of_its_group(
    client: Client, service: Service, tmp_path: Path
) -> None:
    sysfs = Sysfs(tmp_path / "sys")
    sysfs.add("fake-data-0", "8:0", badblocks="100 8")
    service.storage.disk_errors = DiskErrors(sysfs.root)
    [found] = client.storage_health()
    assert (found.status, found.reason) == (csi.STORAGE_DEGRADED, "MediumErrors")
    assert "a disk of volume group data: fake-data-0 has 1 range(s)" in found.message
    (sysfs.root / "class/block/fake-data-0/badblocks").write_text("")
    assert client.storage_health() == []


def test_what_lacks_for_one_kind_of_use_names_that_kind(client: Client, root: Path) -> None:
    (root / "usr/sbin/mkfs.ext4").unlink()
    (root / "dev/loop-control").unlink()
    tools, loops = client.storage_health()
    assert (tools.status, tools.reason) == (csi.STORAGE_DEGRADED, "FileSystemToolsMissing")
    assert tools.volume_capability.WhichOneof("access_type") == "mount"
    assert "install e2fsprogs" in tools.message
    assert (loops.status, loops.reason) == (csi.STORAGE_DEGRADED, "LoopDevicesMissing")
    assert loops.volume_capability.WhichOneof("access_type") == "block"


def test_no_two_entries_have_one_status_reason_and_capability(
    client: Client, service: Service, fake: FakeHost, root: Path
) -> None:
    (root / "usr/sbin/mkfs.ext4").unlink()
    (root / "dev/loop-control").unlink()
    for name in GROUPS:
        fake.lose_disk(name, 0)
    look(service)
    found = client.storage_health()
    keys = [(one.status, one.reason, str(one.volume_capability)) for one in found]
    assert len(set(keys)) == len(keys) == 3
