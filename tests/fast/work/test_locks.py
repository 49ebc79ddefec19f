"""Locks of volumes and of groups: calls wait a moment for others, and never take all threads."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import expect
import pytest
from fakes.host import FakeHost

from agent.core.errors import GroupBusy, OperationPending
from agent.csi.client import Client, block, mounted
from agent.daemon.server import Service
from agent.work import locks as admission
from agent.work.locks import MOST_CALLS_WAITING, MOST_READING, MOST_WAITING, GroupLock, VolumeLocks
from mount import command
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
# As good as for ever: what is waited for comes, or the test has failed.
LONG = 60.0


@pytest.fixture
def locks() -> VolumeLocks:
    made = VolumeLocks()
    made.grace_seconds = LONG
    return made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(MOST_CALLS_WAITING + 2) as threads:
        yield threads


def waiting(locks: VolumeLocks, calls: int) -> None:
    expect.soon(lambda: len(locks._waiting) == calls)


class Calls:
    """Calls that hold volumes for a moment, and the order in which they did."""

    def __init__(self, locks: VolumeLocks, pool: ThreadPoolExecutor) -> None:
        self.order: list[str] = []
        self._locks, self._pool = locks, pool
        self._made: list[Future[None]] = []

    def make(self, title: str, *names: str) -> None:
        """One that has to wait."""
        self._made.append(self._pool.submit(self._call, title, names))
        waiting(self._locks, len(self._made))

    def end(self) -> None:
        for one in self._made:
            one.result(LONG)

    def _call(self, title: str, names: tuple[str, ...]) -> None:
        with self._locks.hold(*names):
            self.order.append(title)


def test_calls_wait_no_longer_than_a_caller_s_first_back_offs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    # external-provisioner gives a call ten seconds.
    assert 1 < VolumeLocks().grace_seconds <= 5
    # The rest is for unpublishing, statistics and the like, whatever else is at work.
    others = admission.THREADS - admission.ADMISSION_SLOTS - admission._ASIDE
    assert others >= 2 * MOST_CALLS_WAITING


def test_calls_get_a_volume_in_their_order(locks: VolumeLocks, pool: ThreadPoolExecutor) -> None:
    calls = Calls(locks, pool)
    with locks.hold("a"):
        for title in ("first", "second", "third"):
            calls.make(title, "a")
    calls.end()
    assert calls.order == ["first", "second", "third"]
    assert not locks._waiting


def test_a_call_that_wants_two_volumes_is_not_overtaken(
    locks: VolumeLocks, pool: ThreadPoolExecutor
) -> None:
    calls = Calls(locks, pool)
    with locks.hold("a"):
        calls.make("both", "a", "b")
        # Nobody holds b, and one who came earlier wants it.
        calls.make("b", "b")
        with locks.hold("c"):
            pass
    calls.end()
    assert calls.order == ["both", "b"]


def test_a_call_is_refused_when_its_wait_ends_and_holds_nothing(locks: VolumeLocks) -> None:
    locks.grace_seconds = 0
    with locks.hold("a"), pytest.raises(OperationPending, match="'a'"), locks.hold("b", "a"):
        pass
    with locks.hold("a", "b"):
        assert not locks._waiting


def test_the_wait_leaves_half_of_the_time_for_the_work(
    locks: VolumeLocks,
) -> None:
    began = time.monotonic()
    with locks.hold("a"), command.time_limit(2):
        with pytest.raises(OperationPending), locks.hold("a"):
            pass
        assert 1 <= time.monotonic() - began < 2


def test_waiting_calls_are_bounded(locks: VolumeLocks, pool: ThreadPoolExecutor) -> None:
    calls = Calls(locks, pool)
    with ExitStack() as held:
        held.enter_context(locks.hold("a"))
        for number in range(MOST_CALLS_WAITING):
            calls.make(str(number), "a")
        with pytest.raises(OperationPending), locks.hold("a"):
            pass
        locks.wait_until(lambda: False)
        # A free volume is had at once.
        with locks.hold("b"):
            pass
    calls.end()
    assert len(calls.order) == MOST_CALLS_WAITING


def test_wait_until_holds_no_lock(locks: VolumeLocks, pool: ThreadPoolExecutor) -> None:
    is_unmounted = threading.Event()
    waits = pool.submit(locks.wait_until, is_unmounted.is_set)
    waiting(locks, 1)
    with locks.hold("a"):
        is_unmounted.set()
    waits.result(LONG)
    locks.grace_seconds = 0
    locks.wait_until(lambda: False)
    assert not locks._waiting


# The lock of a group


class Turns:
    """Calls that wait for their turn, each in a thread, begun one after the other."""

    def __init__(self, queue: GroupLock) -> None:
        self.queue, self.order = queue, list[str]()
        self._pool = ThreadPoolExecutor(MOST_WAITING + 1)

    def wait(self, title: str, limit: float | None = None) -> Future[None]:
        before = len(self.queue._waiting)
        call = self._pool.submit(self._take, title, limit)
        expect.soon(lambda: len(self.queue._waiting) > before)
        return call

    def _take(self, title: str, limit: float | None) -> None:
        with command.time_limit(limit), self.queue.hold():
            self.order.append(title)


@pytest.fixture
def turns() -> Turns:
    return Turns(GroupLock("volume group data"))


def test_the_calls_of_a_group_leave_places_to_others() -> None:
    # One that changes and one that looks are not waiting.
    assert MOST_WAITING + 1 + MOST_READING + 1 < admission.ADMISSION_SLOTS


def test_waiters_get_the_lock_in_their_order(turns: Turns) -> None:
    with turns.queue.hold():
        calls = [turns.wait(str(number)) for number in range(5)]
        assert turns.queue.is_taken
    for one in calls:
        one.result(LONG)
    assert turns.order == ["0", "1", "2", "3", "4"]
    assert not turns.queue.is_taken


def test_a_lock_says_when_it_was_held_last() -> None:
    queue, begun = GroupLock("volume group data"), time.monotonic()
    assert queue.held_at < begun
    with queue.hold():
        assert begun <= queue.held_at <= time.monotonic()
    ended = time.monotonic()
    assert begun <= queue.held_at <= ended


def test_a_lock_with_several_places_has_one_wait_once_they_are_taken() -> None:
    """As that of a group for mkfs and fsck."""
    turns = Turns(GroupLock("volume group data", slots=3))
    with ExitStack() as held:
        for _ in range(3):
            assert not turns.queue.is_taken
            assert held.enter_context(turns.queue.hold()) is False
        assert turns.queue.is_taken
        calls = [turns.wait(str(number)) for number in range(4)]
    for one in calls:
        one.result(LONG)
    assert sorted(turns.order) == ["0", "1", "2", "3"]
    with turns.queue.hold(), turns.queue.hold(), turns.queue.hold() as had_to_wait:
        assert had_to_wait is False


def test_who_had_to_wait_for_a_lock_learns_that() -> None:
    queue, waited = GroupLock("volume group data"), list[bool]()

    def take() -> None:
        with queue.hold() as had_to_wait:
            waited.append(had_to_wait)

    with ThreadPoolExecutor(1) as pool:
        with queue.hold():
            call = pool.submit(take)
            expect.soon(lambda: len(queue._waiting) == 1)
        call.result(LONG)
        pool.submit(take).result(LONG)
    assert waited == [True, False]


def test_one_waiter_too_many_is_refused_at_once(turns: Turns) -> None:
    with turns.queue.hold():
        calls = [turns.wait(str(number)) for number in range(MOST_WAITING)]
        with pytest.raises(GroupBusy, match=r"volume group data: \d+ calls wait"):
            turns._take("too many", None)
    for one in calls:
        one.result(LONG)
    assert "too many" not in turns.order


def test_a_waiter_gives_up_at_its_deadline_and_the_next_gets_the_lock(turns: Turns) -> None:
    with turns.queue.hold():
        hasty = turns.wait("hasty", 0.05)
        patient = turns.wait("patient")
        with pytest.raises(GroupBusy, match="at work on it all the time"):
            hasty.result(LONG)
    patient.result(LONG)
    assert turns.order == ["patient"]


def test_an_error_inside_passes_the_lock_on(turns: Turns) -> None:
    def fail() -> None:
        with turns.queue.hold():
            waits.append(turns.wait("next"))
            raise ZeroDivisionError

    waits: list[Future[None]] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    waits[0].result(LONG)
    assert turns.order == ["next"]
    assert not turns.queue.is_taken


def test_a_lock_that_comes_at_the_deadline_is_taken_and_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = GroupLock("volume group data")
    holder = queue.hold()
    holder.__enter__()

    class Late(threading.Event):
        """Its time is over in the moment in which it is set."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            holder.__exit__(None, None, None)
            return False

    monkeypatch.setattr(threading, "Event", Late)
    with command.time_limit(LONG), queue.hold():
        assert queue.is_taken
    assert not queue.is_taken
    with queue.hold():
        pass


def test_many_hasty_callers_leave_the_lock_free(turns: Turns) -> None:
    def call(number: int) -> None:
        try:
            with command.time_limit(0.0005 * (number % 7)), turns.queue.hold():
                pass
        except GroupBusy:
            pass

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, range(800)))
    assert not turns.queue.is_taken
    assert not turns.queue._waiting


# Through the service


@pytest.fixture
def patient(service: Service) -> Service:
    service.context.locks.grace_seconds = LONG
    return service


def test_unstaging_waits_for_staging(
    client: Client, fake: FakeHost, patient: Service, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"))
    reached, allowed = threading.Event(), threading.Event()

    def slow(words: Sequence[str]) -> Result | None:
        if words[0].startswith("mkfs"):
            reached.set()
            assert allowed.wait(LONG)
        return None

    fake.intercept = slow
    staging = tmp_path / "staging"
    stages = pool.submit(client.stage, volume, staging, mounted("ext4"))
    assert reached.wait(LONG)
    unstages = pool.submit(client.unstage, volume.volume_id, staging)
    waiting(patient.context.locks, 1)
    allowed.set()
    stages.result(LONG)
    unstages.result(LONG)
    client.delete(volume.volume_id)


@pytest.mark.parametrize("capability", [mounted("ext4"), block()], ids=["mounted", "block"])
def test_deleting_waits_for_the_last_unmount(
    client: Client,
    fake: FakeHost,
    patient: Service,
    tmp_path: Path,
    pool: ThreadPoolExecutor,
    capability: csi.VolumeCapability,
) -> None:
    staging, target = tmp_path / "staging", tmp_path / "target"
    volume = client.create("pvc-1", 64 * MIB, capability)
    client.stage(volume, staging, capability)
    client.publish(volume, staging, target, capability)
    fake.commands.clear()
    deletes = pool.submit(client.delete, volume.volume_id)
    waiting(patient.context.locks, 1)
    if capability.HasField("mount"):
        client.unpublish(volume.volume_id, target)
        assert not deletes.done()
        assert fake.commands == []
        client.unstage(volume.volume_id, staging)
    else:
        client.unpublish(volume.volume_id, target)
    deletes.result(LONG)
    assert client.volumes() == []


def test_deleting_a_volume_that_stays_mounted_is_refused(
    client: Client, service: Service, tmp_path: Path
) -> None:
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"))
    client.stage(volume, tmp_path / "staging", mounted("ext4"))
    with expect.code("FAILED_PRECONDITION", "in use", "staging"):
        client.delete(volume.volume_id)
    assert not service.context.locks._waiting


def test_the_server_has_a_thread_for_all_that_may_wait_and_some_more() -> None:
    limits = admission._CALLS + admission.STREAMS + admission.EXCHANGES
    assert limits < admission.THREADS
    others = admission._OTHERS + admission._ASIDE + admission.MOST_CALLS_WAITING
    assert admission.ADMISSION_SLOTS + others <= admission._CALLS
