"""Start-up and recovery: what is served meanwhile, what is admitted, what an idle node costs."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import configured
import expect
import in_background
import pytest
import serving
from fakes.host import FakeHost
from fakes.kubelet import FakeKubelet
from fast.daemon.conftest import Start

from agent.core import errors
from agent.csi.client import Client, block, mounted
from agent.daemon import server, startup
from agent.daemon.node_metrics import Metrics
from agent.daemon.registration import Registration
from agent.daemon.server import Service
from agent.daemon.startup import Recovery
from agent.groups.node_groups import VolumeGroups
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.settings.values import Address
from agent.work import background, locks
from agent.work.group_worker import Job
from agent.work.locks import Admission
from lvm import report
from mount import command
from mount import mount_errors as mount_errors
from mount.command import Result, time_limit
from proto import csi_pb2 as csi

MIB = 1 << 20
STAGES = 40


class Hanging:
    """A program that does not answer until it is let go; others do."""

    def __init__(self, fake: FakeHost, program: str) -> None:
        self._program = program
        self.asked = threading.Semaphore(0)
        self.answering = threading.Event()
        fake.intercept = self

    def __call__(self, words: Sequence[str]) -> None:
        if words[0] == self._program and not self.answering.is_set():
            self.asked.release()
            assert self.answering.wait(120)


pytestmark = [
    pytest.mark.usefixtures("well"),
    pytest.mark.settings(metrics_address=Address("127.0.0.1", 0)),
]


@pytest.fixture
def used(config: Config, fake: FakeHost, tmp_path: Path) -> tuple[csi.Volume, Path, Path]:
    """A volume that pods use, since an earlier process; and one whose wipe it left."""
    running = serving.start(config, fake)
    staging, target = tmp_path / "staging", tmp_path / "target"
    with Client(config.endpoint) as client:
        volume = client.create("used", 16 * MIB, mounted("ext4"))
        client.stage(volume, staging, mounted("ext4"))
        client.publish(volume, staging, target, mounted("ext4"))
        client.create("deleted", 16 * MIB, block())
    running.stop()
    deleted = fake.lvm2.groups["data"].volumes["vol-deleted"]
    deleted.tags = {one.replace("state=ready", "state=wiping") for one in deleted.tags}
    return volume, staging, target


def test_what_needs_no_lvm2_is_served_while_it_hangs_at_the_start(
    config: Config,
    fake: FakeHost,
    used: tuple[csi.Volume, Path, Path],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE_SECONDS", 0.1)
    volume, staging, target = used
    lvm2 = Hanging(fake, "lvm")
    running = start(recovers=False)
    assert lvm2.asked.acquire(timeout=20)
    with Client(config.endpoint) as client:
        assert client.info().name
        assert not client.probe().ready.value
        assert client.stats(volume.volume_id, target).usage
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        with expect.code("UNAVAILABLE", "waits for lvm2"):
            client.create("new", 16 * MIB, block())
        with expect.code("UNAVAILABLE", "waits for lvm2"):
            client.capacity()
        assert running.page("/healthz") == (200, "ok\n")
        status, text = running.page("/readyz")
        assert (status, "waits for lvm2" in text) == (503, True)
        assert "carver_lvm_up 0.0" in running.page("/metrics")[1]
        # It was asked once, by the start: no call adds to what hangs.
        assert not lvm2.asked.acquire(blocking=False)

        lvm2.answering.set()
        assert running.begun.wait(20)
        assert client.probe().ready.value
        assert client.create("new", 16 * MIB, block()).volume_id
        expect.soon(lambda: "vol-deleted" not in fake.lvm2.groups["data"].volumes)
        assert running.page("/readyz") == (200, "ok\n")


def test_calls_that_arrive_early_wait_for_the_start(
    config: Config, fake: FakeHost, start: Start
) -> None:
    lvm2 = Hanging(fake, "lvm")
    start(recovers=False)
    with Client(config.endpoint) as client, ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(client.create, "new", 16 * MIB, block())
        assert lvm2.asked.acquire(timeout=20)
        lvm2.answering.set()
        assert waiting.result(20).volume_id


def test_recovery_follows_once_lvm2_answers(
    config: Config,
    fake: FakeHost,
    used: tuple[csi.Volume, Path, Path],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(startup, "_FIRST_RETRY_SECONDS", 0.01)
    fails = iter([Result(5, "", "  a disk hangs\n")] * 3)
    fake.intercept = lambda words: next(fails, None) if words[0] == "lvm" else None
    start()
    expect.soon(lambda: "vol-deleted" not in fake.lvm2.groups["data"].volumes)
    assert caplog.text.count("the start is not complete") == 1
    expect.soon(lambda: "startup: well again after" in caplog.text)


def test_background_work_that_could_not_be_started_is_started_later_without_a_second_start() -> (
    None
):
    began, firsts, fails = [0], [0], iter([RuntimeError("can't start new thread")])
    started, checked = threading.Event(), threading.Event()

    def begin() -> None:
        began[0] += 1

    def first() -> None:
        firsts[0] += 1

    def background_work() -> None:
        if (error := next(fails, None)) is not None:
            raise error
        started.set()

    admission = Admission()
    admission.close()
    task = startup.startup(begin, admission, [first, background_work], checked.set)
    task._pause_seconds = 0.01
    task.start()
    assert started.wait(20)
    task.join(20)
    assert not task.is_alive
    assert (began, firsts) == ([1], [1])
    assert checked.is_set()
    assert admission.is_open


def test_a_call_is_refused_at_once_where_the_start_has_failed(
    config: Config, fake: FakeHost, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_FIRST_RETRY_SECONDS", 60.0)
    fake.intercept = lambda words: Result(5, "", "  a disk hangs\n")
    start(recovers=False)
    with Client(config.endpoint) as client, expect.code("UNAVAILABLE", "a disk hangs"):
        client.capacity()


@pytest.mark.parametrize(
    "error",
    [
        mount_errors.CommandFailed(("lvm", "lvremove"), 5, "no"),
        mount_errors.CommandTimedOut(("lvm", "lvremove"), 60.0),
        errors.NeedsOther("snap-1", {"moonlight"}),
        OSError(95, "Operation not supported"),
        KeyError("mode"),
        ExceptionGroup("several", [OSError(5, "Input/output error"), KeyError("mode")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_step_of_recovery_that_fails_blocks_no_call_and_no_other_step_and_is_retried(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    tried: list[str] = []
    parts = ("eraser", "pool_remover", "group_snapshotter", "copier", "replacement")

    def step(name: str, *_groups: str) -> int:
        tried.append(name)
        if failing:
            raise error
        return 0

    failing = True
    for name in parts:
        part = getattr(service, name)
        at, act = (part, "resume") if hasattr(part, "resume") else (part.jobs, "start_due")
        monkeypatch.setattr(at, act, partial(step, name))
    for _ in range(2):
        assert not in_background.resume(service)
    assert sorted(tried) == sorted(parts * 2)
    assert caplog.text.count("half-made group snapshots that were left are not seen to yet") == 1
    failing = False
    assert in_background.resume(service)
    assert service.unrecovered == {}


def test_a_group_that_is_not_all_recovered_is_recovered_again_while_calls_are_admitted(
    volume_groups: VolumeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_RETRY_SECONDS", 0.0)
    tried: list[str] = []

    def recover(name: str) -> bool:
        tried.append(name)
        return tried.count(name) > 2

    own = Recovery(volume_groups, recover)
    own.begin()

    def step() -> bool:
        own.step()
        return tried.count("a") >= 3

    expect.soon(step)


def test_forty_hanging_mkfs_leave_other_calls_their_threads(
    config: Config,
    fake: FakeHost,
    used: tuple[csi.Volume, Path, Path],
    start: Start,
    tmp_path: Path,
) -> None:
    volume, staging, target = used
    running = start()
    with Client(config.endpoint) as client, ThreadPoolExecutor(STAGES) as callers:
        made = [client.create(f"new-{one}", 4 * MIB, mounted("ext4")) for one in range(STAGES)]
        mkfs = Hanging(fake, "mkfs.ext4")
        stages: list[Future[None]] = [
            callers.submit(client.stage, one, tmp_path / f"staging-{number}", mounted("ext4"))
            for number, one in enumerate(made)
        ]
        # Of so many at once the disks would be no faster, and one that hangs holds no more.
        for _ in range(background._AT_ONCE):
            assert mkfs.asked.acquire(timeout=60)
        assert client.probe().ready.value
        assert client.stats(volume.volume_id, target).usage
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        assert running.page("/healthz") == (200, "ok\n")
        assert not mkfs.asked.acquire(blocking=False)
        assert client.capacity().available_capacity
        assert not any(one.done() for one in stages)
        mkfs.answering.set()
        assert not wait(stages, 60).not_done
        assert [one.exception() for one in stages] == [None] * STAGES


def test_health_needs_no_thread_that_other_calls_use(
    config: Config, fake: FakeHost, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_CALLS", 2)
    monkeypatch.setattr(locks, "THREADS", 3)
    lvm2 = Hanging(fake, "nothing")
    running = start()
    lvm2._program = "lvm"
    with Client(config.endpoint) as client, ThreadPoolExecutor(4) as callers:
        waiting = [callers.submit(client.create, f"new-{one}", 4 * MIB) for one in range(4)]
        assert lvm2.asked.acquire(timeout=20)
        # The two that get no thread do not wait for one.
        refused = list(islice(as_completed(waiting, 20), 2))
        assert running.page("/healthz") == (200, "ok\n")
        assert client.probe().ready.value
        for one in refused:
            with expect.code("UNAVAILABLE", "2 calls are at work"):
                one.result()
        lvm2.answering.set()
        assert all(one.result(20).volume_id for one in waiting if one not in refused)
        assert all(client.create(f"new-{one}", 4 * MIB).volume_id for one in range(4))


# Admission


def test_a_call_too_many_is_refused() -> None:
    admitting = Admission(slots=1)

    def one_more() -> None:
        with admitting.call(), pytest.raises(errors.TooManyCalls, match="1 calls are at work"):
            locks.enter()

    with (
        admitting.call(),
        ThreadPoolExecutor(1) as caller,
    ):
        for _ in range(2):
            locks.enter()
        caller.submit(one_more).result(20)
    with admitting.call():
        locks.enter()


def admitted(admitting: Admission, ending: ExitStack, *groups: str) -> bool:
    """Whether one more call finds a place with these groups, which it keeps."""
    with ExitStack() as call:
        call.enter_context(admitting.call())
        try:
            locks.enter(*groups)
        except errors.TooManyCalls:
            return False
        ending.enter_context(call.pop_all())
        return True


def test_a_group_s_calls_leave_places_to_the_others_however_many_groups_hang() -> None:
    admitting = Admission(slots=16)
    with ExitStack() as ending:
        for groups, places in ((["a"], 12), ([], 3), (["c"], 1)):
            calls = [admitted(admitting, ending, *groups) for _ in range(99)]
            assert sum(calls) == places, groups
    with ExitStack() as ending:
        turns = [(one, admitted(admitting, ending, one)) for _ in range(99) for one in "ab"]
        assert [turns.count((one, True)) for one in "ab"] == [7, 7]
        # What is with no group, or with another, has a place.
        assert admitted(admitting, ending)
        assert admitted(admitting, ending, "c")
    assert admitting.slots.taken == {}


def test_a_call_of_two_groups_is_counted_for_both_and_for_each_once() -> None:
    admitting = Admission(slots=8)
    with ExitStack() as ending:
        for _ in range(3):
            assert admitted(admitting, ending, "a", "b")
            locks.enter("a")
        assert admitting.slots.taken == {"a": 3, "b": 3}
    with admitting.call():
        locks.enter("a")
        locks.enter("a", "b")
        assert admitting.slots.taken == {"a": 1, "b": 1}
    assert admitting.slots.taken == {}


def test_a_call_that_was_not_admitted_keeps_no_place() -> None:
    admitting = Admission(slots=1)
    admitting.close()
    for _ in range(2):
        with admitting.call(), time_limit(0.01), pytest.raises(errors.Starting, match="not ans"):
            locks.enter()
    admitting.open()
    with admitting.call():
        locks.enter()


def test_background_work_is_not_held_back() -> None:
    Admission().close()
    locks.enter()


def test_a_node_is_not_ready_before_kubelet_has_registered_it(
    config: Config, start: Start, tmp_path: Path
) -> None:
    kubelet = FakeKubelet(tmp_path / "r")
    own = replace(config, registration="self", registration_directory=kubelet.directory)
    running = start(own)
    expect.soon(lambda: "waiting" in running.page("/readyz")[1])
    assert running.page("/readyz")[0] == 503
    assert running.page("/healthz") == (200, "ok\n")
    kubelet.look()
    assert running.page("/readyz") == (200, "ok\n")


# Recovery of each group


@pytest.fixture
def volume_groups(tmp_path: Path) -> VolumeGroups:
    fake = FakeHost(tmp_path)
    for one in ("a", "b"):
        fake.lvm2.add_group(one)
    return VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups("a", "b"))


def test_a_group_without_a_thread_is_recovered_by_the_next_step(
    volume_groups: VolumeGroups,
) -> None:
    recovered: list[str] = []

    def recover(name: str) -> bool:
        recovered.append(name)
        return True

    own = Recovery(volume_groups, recover)

    with expect.no_threads():
        with pytest.raises(RuntimeError):
            own.begin()
        own.step()
    assert recovered == []
    volume_groups.catch_up()
    expect.soon(lambda: sorted(recovered) == ["a", "b"])


def test_a_group_that_appears_during_an_attempt_is_recovered_by_a_later_step(
    volume_groups: VolumeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_RETRY_SECONDS", 0.0)
    tried: list[str] = []

    def recover(name: str) -> bool:
        tried.append(name)
        was_there = tried.count(name) > 1
        # A call reads the group just then, and finds it.
        for one in volume_groups:
            one.state()
        return was_there

    own = Recovery(volume_groups, recover)
    own.begin()
    expect.soon(lambda: sorted(tried) == ["a", "b"])
    assert all(one.is_answering for one in volume_groups)

    def step_until_both_are_recovered() -> bool:
        own.step()
        return sorted(tried) == ["a", "a", "b", "b"]

    expect.soon(step_until_both_are_recovered)
    own.step()
    assert len(tried) == 4


def test_a_recovery_that_comes_further_is_not_cut_off_however_long_it_takes(
    volume_groups: VolumeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off in the middle, it would begin anew each minute, and never end."""
    now, done, cut = [1000.0], list[str](), list[str]()
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def recover(name: str) -> bool:
        found = volume_groups.of(name)
        assert found is not None
        for _ in range(5 if name == "a" else 1):
            # A command that takes long on its slow disk; that of the other group hangs.
            now[0] += 40 if name == "a" else 90
            if command.remaining_seconds() == 0:
                cut.append(name)
                raise errors.GroupBusy(name, "it does not answer")
            report.read(found.lvm)
        done.append(name)
        return True

    own = Recovery(volume_groups, recover)
    for name in ("a", "b"):
        with suppress(errors.GroupBusy):
            own._try(Job(name))
    assert (done, cut) == (["a"], ["b"])


def test_an_absent_group_is_not_taken_for_recovered(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path)
    with serving.served(fake, configured.carver(tmp_path, "late")) as (service, _):
        assert not server.resume(service, "late")
        fake.lvm2.add_group("late")
        assert server.resume(service, "late")


# What an idle service costs


def test_ten_idle_minutes_cost_one_command_at_most(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    classes = (DeviceClass("plain", "data", default=True), DeviceClass("away", "gone"))
    config = configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)
    service = serving.start(config, fake)
    with Client(config.endpoint) as client:
        client.create("1", 4 << 20, block())
    metrics = Metrics()
    metrics.watch(service, Registration(tmp_path / "registry", config.endpoint))
    recovery = Recovery(service.volume_groups, lambda _name: True)
    metrics.text()
    fake.commands.clear()
    began, real = time.time(), time.monotonic()
    passed = [0.0]
    monkeypatch.setattr(time, "time", lambda: began + passed[0])
    monkeypatch.setattr(time, "monotonic", lambda: real + passed[0])
    for second in range(0, 600, 5):
        passed[0] = float(second)
        if second % 15 == 0:
            assert b'carver_group_present{group="data"} 1.0' in metrics.text()
        if second % 10 == 0:
            service.readiness.check()
        recovery.step()
        service.reports.refresh(60.0)
    assert len(fake.commands) <= 1
    monkeypatch.undo()
    service.stop()


def test_a_service_that_has_ended_leaves_no_thread(fake: FakeHost, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with serving.served(fake, configured.carver(tmp_path)) as (_, client):
        client.create("pvc-1", 8 << 20, block())
    expect.soon(lambda: set(threading.enumerate()) <= before, threading.enumerate)
