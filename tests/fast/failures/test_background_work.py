"""Two groups, one of which hangs: background work goes on in the other."""

import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import configured
import expect
import grpc
import pytest
import serving
from csi_client import Client
from fakes.host import FakeHost
from fakes.lvm import FakePool
from fast.failures.test_isolation import Trouble

from agent.csi.client import block
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm.devicemapper import Status
from lvm.layout import Layout, Reserve
from lvm.thin import Policy
from mount.command import Result

MIB = 1 << 20
EXTENT = 4 * MIB
GROUPS = ("a", "b")
POOL = Policy(over_provisioning=4, size=Reserve(size_bytes=10 * EXTENT))
# In each group a class of each kind that has background work.
CLASSES = tuple(
    one
    for group in GROUPS
    for one in (
        DeviceClass(f"thin-{group}", group, layout=Layout("thin"), pool=POOL),
        replace(
            configured.RAID,
            name=f"raid-{group}",
            group=group,
            repair="auto",
            repair_after_seconds=0,
        ),
        DeviceClass(f"plain-{group}", group, default=group == "a"),
    )
)
pytestmark = [
    pytest.mark.groups(a=[100, 100, 100], b=[100, 100, 100]),
    pytest.mark.settings(classes=CLASSES),
]


@pytest.fixture
def config(config: Config, tmp_path: Path) -> Config:
    """The directory of all pods lies in the test's own."""
    return replace(config, kubelet_dir=(str(tmp_path),))


@pytest.fixture
def service(config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr("agent.operations.autoextend._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("agent.operations.repair._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("agent.operations.inline._TURN_SECONDS", 0.05)
    monkeypatch.setattr("agent.groups.volume_group._SHORT_WAIT_SECONDS", 0.1)
    monkeypatch.setattr("agent.volumes.reports._MONITOR_WAIT_SECONDS", 0.1)
    running = serving.start(config, fake)
    yield running
    running.stop()


@pytest.fixture
def hang(fake: FakeHost) -> Iterator[Callable[[], threading.Event]]:
    """Have lvm2 hang for all that has to do with group a; the event says that it did."""
    troubles: list[Trouble] = []

    def begin() -> threading.Event:
        troubles.append(Trouble(fake, ends_in_time=True))
        return troubles[0].asked

    yield begin
    for one in troubles:
        one.over.set()


def filled(client: Client, fake: FakeHost, group: str) -> FakePool:
    """A pool that is to be extended."""
    parameters = {"class": f"thin-{group}"}
    client.create(f"thin-{group}", 100 * EXTENT, block(), parameters=parameters)
    pool = fake.lvm2.groups[group].volumes[f"pool-thin-{group}"]
    assert isinstance(pool, FakePool)
    pool.used_data_blocks = int(pool.length * EXTENT // pool.chunk_size_bytes * 0.9)
    return pool


@pytest.mark.parametrize("what", ["lvm2", "device-mapper"])
def test_a_pool_grows_while_another_group_hangs(
    client: Client,
    service: Service,
    fake: FakeHost,
    hang: Callable[[], threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    filled(client, fake, "a")
    pool = filled(client, fake, "b")
    before, over, real = pool.length, threading.Event(), fake.lvm2.status
    asked = hang() if what == "lvm2" else threading.Event()

    def status(group: str, name: str) -> tuple[Status, ...]:
        if group == "a" and what == "device-mapper":
            asked.set()
            over.wait(60)
        return real(group, name)

    monkeypatch.setattr(fake.lvm2, "status", status)
    service.autoextender.scans.start()
    try:
        assert asked.wait(60)
        expect.soon(lambda: pool.length > before)
    finally:
        over.set()


def test_a_retry_waits_from_the_end_of_the_failed_try(
    client: Client, service: Service, fake: FakeHost
) -> None:
    filled(client, fake, "a")
    now, tries = [0.0], list[float]()

    def slow(words: Sequence[str]) -> Result | None:
        if words[1] != "lvextend":
            return None
        tries.append(now[0])
        now[0] += 60
        return Result(5, "", "no")

    fake.intercept = slow
    for _ in range(200):
        service.autoextender.check_group("a", lambda: now[0])
        now[0] += 2
    assert tries[:3] == [0, 70, 140]


@pytest.mark.parametrize(
    "problem",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("can't start new thread"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_pool_grows_after_a_fork_that_failed(
    client: Client,
    service: Service,
    fake: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
) -> None:
    monkeypatch.setattr("agent.operations.autoextend._SOON_SECONDS", 0.01)
    pool = filled(client, fake, "b")
    before = pool.length
    fake.lvm2.groups["b"].seqno += 1

    def failures() -> int:
        return service.autoextender.counts()["data", "failed"]

    def fail_once(_words: Sequence[str]) -> None:
        # The same thread also looks for inline volumes, once since the start; that may fail before.
        if threading.current_thread().name.startswith("work") and not failures():
            raise problem

    fake.intercept = fail_once
    service.autoextender.scans.start()
    expect.soon(lambda: pool.length > before)
    assert failures() == 1


def test_a_raid_volume_is_repaired_while_another_group_hangs(
    client: Client, service: Service, fake: FakeHost, hang: Callable[[], threading.Event]
) -> None:
    for one in GROUPS:
        client.create(f"raid-{one}", EXTENT, block(), parameters={"class": f"raid-{one}"})
        fake.lose_disk(one, 0)
    service.reports.fresh()
    asked = hang()
    service.auto_repair.scans.start()
    assert asked.wait(60)
    expect.soon(lambda: fake.lvm2.groups["b"].volumes["vol-raid-b"].health == "")


def test_leftover_inline_volumes_are_deleted_while_another_group_hangs(
    client: Client,
    service: Service,
    fake: FakeHost,
    hang: Callable[[], threading.Event],
    tmp_path: Path,
) -> None:
    for one in GROUPS:
        target = tmp_path / "pods" / f"pod-{one}" / "volumes" / "mount"
        target.parent.mkdir(parents=True)
        size = {"size": "16Mi", "carver/class": f"plain-{one}"}
        client.publish_inline(f"csi-{one * 64}", target, size)
        fake.kernel.unmount(str(target))
    asked = hang()
    for one in GROUPS:
        shutil.rmtree(tmp_path / "pods" / f"pod-{one}")
    assert asked.wait(60)
    expect.soon(lambda: not fake.lvm2.groups["b"].volumes)
    assert fake.lvm2.groups["a"].volumes


def test_the_search_for_inline_volumes_is_bounded(
    service: Service,
    hang: Callable[[], threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("agent.operations.inline._PATIENCE_SECONDS", 0.1)
    for one in service.inline_volumes._sweeps.values():
        one.may_have_volumes = True
    hang()
    expect.soon(lambda: "volume group a: inline volumes that were left" in caplog.text)


def test_a_group_snapshot_blocks_only_the_group_whose_disk_hangs(
    client: Client,
    config: Config,
    service: Service,
    fake: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = {
        one: client.create(one, EXTENT, block(), parameters={"class": f"plain-{one}"}).volume_id
        for one in GROUPS
    }
    over, real = threading.Event(), fake.lvm2.suspend

    def suspend(group: str, name: str) -> None:
        assert group == "b" or over.wait(60)
        real(group, name)

    monkeypatch.setattr(fake.lvm2, "suspend", suspend)
    with Client(config.endpoint, timeout_seconds=1.5) as hasty:
        with expect.code("DEADLINE_EXCEEDED"):
            hasty.group_snapshot("hourly", list(ids.values()))
        parameters = {"class": "plain-b"}
        made = hasty.create("new", EXTENT, block(), parameters=parameters)
        hasty.expand(made.volume_id, 2 * EXTENT)
        # Until the suspend ends and is undone, nothing changes the group.
        with pytest.raises(grpc.RpcError):
            hasty.expand(ids["a"], 2 * EXTENT)
    assert not fake.lvm2.is_suspended("b", "vol-b")
    over.set()
    client.expand(ids["a"], 2 * EXTENT)
    assert not fake.lvm2.is_suspended("a", "vol-a")
    taken = client.group_snapshot("hourly", list(ids.values()))
    assert taken.ready_to_use
    assert service.context.activator.is_kept_suspended("a", "vol-a") is False
