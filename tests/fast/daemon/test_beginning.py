"""What is served while lvm2 does not answer, or too many calls wait for it."""

import http.client
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
import serving
from fakes.host import FakeHost
from fakes.kubelet import FakeKubelet

from agent.core import background, errors, locks
from agent.core.host import Host
from agent.core.locks import Admission
from agent.core.settings import Config
from agent.core.values import Address
from agent.csi.client import Client, block, mounted
from agent.daemon import process, server, startup
from agent.daemon.monitor import Monitor
from agent.operations import preflight
from mount import errors as mount_errors
from mount.command import Result, time_limit
from proto import csi_pb2 as csi

MIB = 1 << 20
STAGES = 40


class Started:
    """`serve` in a thread, until it is ended as SIGTERM ends it."""

    def __init__(self, config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = 0
        self.served, self.begun, self._ended = (threading.Event() for _ in range(3))
        start = Monitor.start

        def noting(one: Monitor) -> int:
            self.port = start(one)
            return self.port

        monkeypatch.setattr(Monitor, "start", noting)
        monkeypatch.setattr(process, "notify", self._notify)
        monkeypatch.setattr(process, "_until_signal", lambda: self._ended)
        host = Host(fake.run, fake.kernel, fake.devices, fake.disks)
        self._thread = threading.Thread(target=process.serve, args=(config, host))
        self._thread.start()
        assert self.served.wait(20)

    def _notify(self, state: str) -> None:
        if state == "STATUS=ready":
            self.begun.set()
        if state == "READY=1":
            self.served.set()

    def page(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


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


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured.carver(tmp_path, kubelet_dir=("/",), metrics_address=Address("127.0.0.1", 0))


@pytest.fixture(autouse=True)
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node on which all is well that lvm2 is not asked about."""
    monkeypatch.setattr(preflight, "CHEAP", ())
    monkeypatch.setattr(preflight, "CHECKS", {})


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


@pytest.fixture
def start(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Started]]:
    started: list[Started] = []

    def one() -> Started:
        started.append(Started(config, fake, monkeypatch))
        return started[-1]

    yield one
    for running in started:
        running.end()


def test_what_needs_no_lvm2_is_served_while_it_hangs_at_the_start(
    config: Config,
    fake: FakeHost,
    used: tuple[csi.Volume, Path, Path],
    start: Callable[[], Started],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE_SECONDS", 0.1)
    volume, staging, target = used
    lvm2 = Hanging(fake, "lvm")
    running = start()
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
        # It was asked once, by the start: nobody else adds to what hangs.
        assert not lvm2.asked.acquire(blocking=False)

        lvm2.answering.set()
        assert running.begun.wait(20)
        assert client.probe().ready.value
        assert client.create("new", 16 * MIB, block()).volume_id
        expect.soon(lambda: "vol-deleted" not in fake.lvm2.groups["data"].volumes)
        assert running.page("/readyz") == (200, "ok\n")


def test_calls_that_come_a_moment_too_early_wait_for_the_start(
    config: Config, fake: FakeHost, start: Callable[[], Started]
) -> None:
    lvm2 = Hanging(fake, "lvm")
    start()
    with Client(config.endpoint) as client, ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(client.create, "new", 16 * MIB, block())
        assert lvm2.asked.acquire(timeout=20)
        lvm2.answering.set()
        assert waiting.result(20).volume_id


def test_what_was_left_is_gone_on_with_when_lvm2_answers_at_last(
    config: Config,
    fake: FakeHost,
    used: tuple[csi.Volume, Path, Path],
    start: Callable[[], Started],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(startup, "_FIRST_RETRY_SECONDS", 0.01)
    fails = iter([Result(5, "", "  a disk hangs\n")] * 3)
    fake.intercept = lambda words: next(fails, None) if words[0] == "lvm" else None
    running = start()
    assert running.begun.wait(20)
    expect.soon(lambda: "vol-deleted" not in fake.lvm2.groups["data"].volumes)
    assert caplog.text.count("no volume group can be used yet") == 1
    expect.soon(lambda: "startup: well again after" in caplog.text)


def test_a_call_is_refused_at_once_where_the_start_has_failed(
    config: Config, fake: FakeHost, start: Callable[[], Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_FIRST_RETRY_SECONDS", 60.0)
    fake.intercept = lambda words: Result(5, "", "  a disk hangs\n")
    start()
    with Client(config.endpoint) as client, expect.code("UNAVAILABLE", "a disk hangs"):
        client.capacity()


def test_what_lvm2_refuses_of_what_was_left_keeps_no_call_waiting(
    config: Config, fake: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    running = serving.start(config, fake)

    def refused(*_groups: str) -> int:
        raise mount_errors.CommandFailed(("lvm", "lvremove"), 5, "no")

    running.group_snapshotter.resume = refused  # type: ignore[method-assign]
    server.resume(running)
    assert "half-made group snapshots that were left are not seen to" in caplog.text
    running.stop()


def test_forty_stages_whose_mkfs_hangs_leave_probe_unpublish_statistics_and_health_their_threads(
    config: Config,
    fake: FakeHost,
    used: tuple[csi.Volume, Path, Path],
    start: Callable[[], Started],
    tmp_path: Path,
) -> None:
    volume, staging, target = used
    running = start()
    assert running.begun.wait(20)
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
    config: Config, fake: FakeHost, start: Callable[[], Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "THREADS", 2)
    lvm2 = Hanging(fake, "nothing")
    running = start()
    assert running.begun.wait(20)
    lvm2._program = "lvm"
    with Client(config.endpoint) as client, ThreadPoolExecutor(4) as callers:
        waiting = [callers.submit(client.create, f"new-{one}", 4 * MIB) for one in range(4)]
        assert lvm2.asked.acquire(timeout=20)
        assert running.page("/healthz") == (200, "ok\n")
        assert client.probe().ready.value
        lvm2.answering.set()
        assert all(one.result(20).volume_id for one in waiting)


# Who is admitted


def test_a_call_too_many_is_told_to_come_again_and_one_that_asks_no_group_is_not() -> None:
    admitting = Admission(places=1)

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
    admitting = Admission(places=16)
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
    assert admitting._with == {}


def test_a_call_of_two_groups_is_counted_for_both_and_for_each_once() -> None:
    admitting = Admission(places=8)
    with ExitStack() as ending:
        for _ in range(3):
            assert admitted(admitting, ending, "a", "b")
            locks.enter("a")
        assert admitting._with == {"a": 3, "b": 3}
    with admitting.call():
        locks.enter("a")
        locks.enter("a", "b")
        assert admitting._with == {"a": 1, "b": 1}
    assert admitting._with == {}


def test_who_was_not_admitted_keeps_no_place() -> None:
    admitting = Admission(places=1)
    admitting.close()
    for _ in range(2):
        with admitting.call(), time_limit(0.01), pytest.raises(errors.Starting, match="not ans"):
            locks.enter()
    admitting.open()
    with admitting.call():
        locks.enter()


def test_work_that_no_call_waits_for_is_not_held_back() -> None:
    Admission().close()
    locks.enter()


def test_a_node_is_not_ready_before_kubelet_has_registered_it(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kubelet = FakeKubelet(tmp_path / "r")
    own = replace(config, registration="self", registration_directory=kubelet.directory)
    running = Started(own, fake, monkeypatch)
    assert running.begun.wait(20)
    expect.soon(lambda: "waiting" in running.page("/readyz")[1])
    assert running.page("/readyz")[0] == 503
    assert running.page("/healthz") == (200, "ok\n")
    kubelet.look()
    assert running.page("/readyz") == (200, "ok\n")
    running.end()


def test_a_node_that_asks_for_no_metrics_starts_so_too(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Started(replace(config, metrics_address=None), fake, monkeypatch)
    assert running.begun.wait(20)
    running.end()
