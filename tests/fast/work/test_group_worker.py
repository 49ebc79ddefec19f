"""The loop of a group: its jobs take turns, a failed one is retried until it is done or gone."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from itertools import count

import expect
import pytest

from agent.core import errors
from agent.work import group_worker as module
from agent.work.group_worker import AGAIN, GroupWorkers, Job, Jobs, PeriodicJobs, Steps, Stopping
from lvm import lvm_errors as lvm_errors
from mount import command
from mount import mount_errors as mount_errors

FAILURE = OSError(5, "Input/output error")
GIB = 1 << 30


class Work:
    """Jobs, how often each was looked for and done, and what comes of that."""

    def __init__(self) -> None:
        self.workers = GroupWorkers()
        self.fails = True
        self.failed: set[str] = set()
        # What the state has, and how often it was asked.
        self.there: set[str] = set()
        self.looks = 0
        self.done: list[str] = []
        self.look: Callable[[str], None] = lambda _group: None
        self.do: Callable[[Job], Steps | None] = self._do
        self.jobs: Jobs[Job] = Jobs(
            self.workers, "test", lambda job: self.do(job), "%s failed: %s", due_jobs=self._due
        )
        self.jobs.retry_seconds = 1

    def _do(self, job: Job) -> None:
        if self.fails:
            self.failed.add(job.key)
            raise FAILURE
        self.done.append(job.key)
        self.there.discard(job.key)

    def _due(self, group: str) -> Iterator[Job]:
        self.looks += 1
        self.look(group)
        for one in sorted(self.there):
            if one.startswith(group):
                yield Job(one)

    def fail(self, *keys: str) -> None:
        """Have these jobs fail, and their retries succeed."""
        self.there |= set(keys)
        for one in keys:
            self.jobs.start(Job(one))
        expect.soon(lambda: self.failed >= set(keys))
        self.fails = False


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.workers.stop()


@pytest.mark.parametrize(
    "doubt",
    [
        errors.GroupBusy("volume group data", "30 calls wait for it already"),
        errors.GroupSilent("data", ["/dev/sdb"]),
        errors.GroupAwaited("data"),
        errors.GroupRefused("data", "2 of that name"),
        errors.TooManyCalls(80),
        lvm_errors.GroupMissing("data"),
        mount_errors.CommandTimedOut(("lvm", "fullreport"), 1.0),
        mount_errors.CommandFailed(("lvm", "fullreport"), 5, ""),
        OSError(5, "Input/output error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_job_is_retried_until_it_is_done(work: Work, doubt: Exception) -> None:
    doubts = iter([doubt] * 3)

    def look(_group: str) -> None:
        if (error := next(doubts, None)) is not None:
            raise error

    work.jobs.retry_seconds = 0.02
    work.look = look
    keys = [f"data@1/vol-{number}" for number in range(3)]
    work.fail(*keys)
    expect.soon(lambda: sorted(work.done) == keys)
    assert work.jobs.counts()["failed"] == 0


def test_a_job_that_the_state_does_not_have_any_more_is_not_retried(work: Work) -> None:
    work.jobs.retry_seconds = 0.02
    work.look = lambda _group: work.there.clear()
    work.fail("data@1/vol-a")
    expect.soon(lambda: not work.jobs.has("data@1/vol-a"))
    assert (work.looks, work.done) == (1, [])


def test_without_a_state_to_look_at_a_job_is_repeated_as_it_was() -> None:
    workers, problems, done = GroupWorkers(), [FAILURE], list[str]()

    def do(job: Job) -> None:
        if problems:
            raise problems.pop()
        done.append(job.key)

    jobs: Jobs[Job] = Jobs(workers, "test", do, "%s failed: %s", retry_seconds=0.01)
    failed = jobs.start(Job("data/a"))
    assert failed.future.exception(20) is FAILURE
    expect.soon(lambda: done == ["data/a"] and not jobs.has("data/a"))
    workers.stop()


def test_one_look_does_for_all_jobs_of_a_group_that_are_due(work: Work) -> None:
    keys = {f"data@1/vol-{number}" for number in range(5)}
    work.fail(*keys)
    expect.soon(lambda: set(work.done) == keys)
    assert work.looks == 1


def test_a_group_that_cannot_be_read_is_read_once_for_all_jobs(work: Work) -> None:
    numbers = count()

    def look(_group: str) -> None:
        if next(numbers) < 2:
            raise errors.GroupBusy("volume group data", "30 calls wait for it already")

    work.look = look
    keys = {f"data@1/vol-{number}" for number in range(5)}
    work.fail(*keys)
    expect.soon(lambda: set(work.done) == keys)
    assert work.looks == 3


def test_what_one_job_fails_with_delays_no_other(work: Work) -> None:
    def do(job: Job) -> None:
        if job.key.endswith("bad"):
            raise FAILURE
        work.done.append(job.key)

    work.do = do
    for one in ("bad", "a", "b"):
        work.jobs.start(Job(f"data/{one}"))
    expect.soon(lambda: work.done == ["data/a", "data/b"])
    assert work.jobs.counts() == {"queued": 0, "running": 0, "failed": 1}


def test_a_group_that_hangs_delays_no_other(work: Work) -> None:
    over = threading.Event()
    work.look = lambda group: None if group == "b" else [over.wait(20)].clear()
    work.jobs.retry_seconds = 0.05
    work.fail("a@1/vol", "b@1/vol")
    expect.soon(lambda: work.done == ["b@1/vol"])
    over.set()
    expect.soon(lambda: work.done == ["b@1/vol", "a@1/vol"])


@contextmanager
def overseen(workers: GroupWorkers) -> Iterator[None]:
    over = threading.Event()

    def replace_hanging_threads() -> None:
        while not over.wait(0.01):
            workers.replace_hanging_threads()

    thread = threading.Thread(target=replace_hanging_threads)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_step_that_hangs_delays_no_job_of_another_kind_and_one_of_its_own(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.05)
    over, begun = threading.Event(), list[str]()

    def hang(job: Job) -> None:
        begun.append(job.key)
        assert over.wait(60)

    hanging: Jobs[Job] = Jobs(work.workers, "hanging", hang, "%s failed: %s")
    with overseen(work.workers):
        jobs = [hanging.start(Job(f"data/{one}")) for one in range(4)]
        work.fails = False
        work.jobs.start(Job("data/a")).future.result(60)
        expect.soon(lambda: len(begun) == 2)
        work.jobs.start(Job("data/b")).future.result(60)
        # Where two of a kind hang, so would a third.
        assert begun == ["data/0", "data/1"]
        over.set()
        for one in jobs:
            one.future.result(60)
    expect.soon(lambda: threads("data") == 1)


def threads(group: str) -> int:
    return sum(one.name == f"work {group}" for one in threading.enumerate())


def test_the_smallest_and_the_oldest_job_take_turns(work: Work) -> None:
    go, order = threading.Event(), list[str]()

    def do(job: Job) -> Steps:
        assert go.wait(20)
        job.progress.begin(job.size_bytes)
        for _ in range(job.size_bytes // GIB):
            order.append(job.key)
            job.progress.add(GIB)
            yield AGAIN

    work.do = do
    work.jobs.start(Job("data/first", size_bytes=GIB))
    expect.soon(lambda: work.jobs.counts()["running"])
    rest = [
        work.jobs.start(Job(f"data/{one}", size_bytes=size * GIB))
        for one, size in (("large", 6), ("small", 2), ("same", 2))
    ]
    go.set()
    for one in rest:
        one.future.result(20)
    turns = ["data/first", *["data/large", "data/small"] * 2, *["data/large", "data/same"] * 2]
    assert sorted(order) == sorted([*turns, *["data/large"] * 2])
    assert order.index("data/small") < 4
    last = {
        one: len(order) - order[::-1].index(f"data/{one}") for one in ("small", "same", "large")
    }
    assert last["small"] < last["same"] < last["large"]


def test_what_is_urgent_goes_before_all_else(work: Work) -> None:
    go, order = threading.Event(), list[str]()

    def do(job: Job) -> Steps:
        assert go.wait(20)
        for _ in range(3):
            order.append(job.key)
            yield AGAIN

    work.do = do
    job = work.jobs.start(Job("data/long"))
    expect.soon(lambda: work.jobs.counts()["running"])
    urgent: Jobs[Job] = Jobs(
        work.workers, "urgent", lambda job: order.append(job.key), "%s: %s", urgent=True
    )
    urgent.start(Job("data/tags"))
    go.set()
    job.future.result(20)
    assert order == ["data/long", "data/tags", "data/long", "data/long"]


def test_a_step_may_be_due_later_and_others_go_on_meanwhile(work: Work) -> None:
    def do(job: Job) -> Steps:
        work.done.append(job.key)
        if job.key == "data/waits":
            yield 0.2
            work.done.append("waited")

    work.do = do
    waiting = work.jobs.start(Job("data/waits"))
    work.jobs.start(Job("data/b")).future.result(20)
    assert not waiting.future.done()
    waiting.future.result(20)
    assert work.done == ["data/waits", "data/b", "waited"]


def test_a_step_that_waits_for_a_job_of_its_group_does_it(work: Work) -> None:
    inner: Jobs[Job] = Jobs(
        work.workers, "inner", lambda job: work.done.append(job.key), "%s failed: %s"
    )
    slow: Jobs[Job] = Jobs(work.workers, "slow", lambda _job: iter([600.0]), "%s failed: %s")

    def do(job: Job) -> None:
        assert inner.wait(inner.start(Job("data/inner")), 20)
        assert inner.wait(inner.start(Job("other/inner")), 20)
        assert not slow.wait(slow.start(Job("data/slow")), 20), "it is due later"
        work.done.append(job.key)

    work.do = do
    job = work.jobs.start(Job("data/outer"))
    assert work.jobs.wait(job, 20)
    assert work.done == ["data/inner", "other/inner", "data/outer"]


def test_a_job_without_a_thread_is_refused_and_begun_by_the_next_call(work: Work) -> None:
    work.fails = False
    with expect.no_threads(), pytest.raises(RuntimeError):
        work.jobs.start(Job("data@1/vol-a"))
    assert not work.jobs.has("data@1/vol-a")
    work.jobs.start(Job("data@1/vol-a")).future.result(20)
    assert work.done == ["data@1/vol-a"]


def test_a_job_is_retried_also_without_a_new_thread(work: Work) -> None:
    work.jobs.retry_seconds = 0.02
    work.there.add("data@1/vol-a")
    lacks = ExitStack()

    def first(_job: Job) -> None:
        lacks.enter_context(expect.no_threads())
        work.do = work._do
        raise FAILURE

    work.do = first
    with lacks:
        job = work.jobs.start(Job("data@1/vol-a"))
        assert job.future.exception(20) is FAILURE
        work.fails = False
        expect.soon(lambda: work.looks)
    expect.soon(lambda: work.done == ["data@1/vol-a"])


def test_the_thread_of_a_group_without_work_ends(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.05)
    work.fails = False
    for one in ("a", "b"):
        work.jobs.start(Job(f"idle/{one}")).future.result(20)
        expect.soon(lambda: threads("idle") == 0)
    assert work.done == ["idle/a", "idle/b"]


def test_nothing_is_retried_after_the_end(work: Work) -> None:
    work.fail("data@1/vol-a")
    work.workers.stop()
    assert threads("data") == 0
    assert work.looks == 0
    late = work.jobs.start(Job("data@1/vol-b"))
    with pytest.raises(Stopping):
        late.future.result(0)


def test_at_the_end_a_job_ends_at_a_safe_point_and_what_is_last_is_done(work: Work) -> None:
    at_work, go, closed = threading.Event(), threading.Event(), list[str]()

    def do(job: Job) -> Steps:
        try:
            at_work.set()
            assert go.wait(20)
            yield AGAIN
            work.done.append(job.key)
        finally:
            closed.append(job.key)

    work.do = do
    job, waiting = work.jobs.start(Job("data/a")), work.jobs.start(Job("data/b"))
    assert at_work.wait(20)
    tags: Jobs[Job] = Jobs(
        work.workers, "tags", lambda job: closed.append(job.key), "%s: %s", survives_halt=True
    )
    tags.wake(Job("data"), 600)
    ending = threading.Thread(target=work.workers.stop)
    ending.start()
    assert job.cancelled.wait(20)
    with pytest.raises(Stopping):
        job.check()
    go.set()
    ending.join(20)
    for one in (job, waiting):
        with pytest.raises(Stopping):
            one.future.result(20)
    assert (work.done, closed) == ([], ["data/a", "data"])


def test_a_step_that_hangs_is_left_behind_at_the_end(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    over, at_work = threading.Event(), threading.Event()

    def hang(_job: Job) -> None:
        at_work.set()
        assert over.wait(60)

    work.do = hang
    work.jobs.start(Job("data/a"))
    assert at_work.wait(20)
    began = time.monotonic()
    work.workers.stop(0.1)
    assert time.monotonic() - began < 10
    assert "volume group data: background work has not ended" in caplog.text
    over.set()


def test_the_time_to_look_for_jobs_is_bounded(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    monkeypatch.setattr(module, "_LOOKING_SECONDS", 7.0)
    work.look = lambda _group: limits.append(command.remaining_seconds())
    work.fail("data@1/vol-a")
    expect.soon(lambda: work.done)
    assert limits[0] is not None
    assert 0 < limits[0] <= 7.0


def test_no_retry_begins_while_a_call_has_it_halted(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.jobs.retry_seconds = 3600
    work.fail("data@1/vol-a")
    failed = work.jobs.of("data@1/vol-a")
    assert failed is not None
    worker = work.workers.of("data")
    with work.jobs.halted("data@1/vol-a"):
        assert not work.jobs.has("data@1/vol-a")
        work.jobs._retry_failed(worker, failed)
        assert not work.jobs.has("data@1/vol-a")
    assert work.done == []


def test_a_look_that_is_under_way_begins_nothing_that_a_call_halts(work: Work) -> None:
    looking, go = threading.Event(), threading.Event()

    def look(_group: str) -> None:
        looking.set()
        assert go.wait(20)

    work.jobs.retry_seconds = 0.02
    work.look = look
    work.fail("data@1/vol-a")
    assert looking.wait(20)
    with work.jobs.halted("data@1/vol-a"):
        go.set()
        work.jobs.start(Job("data@1/vol-b")).future.result(20)
    assert work.done == ["data@1/vol-b"]


def test_what_is_halted_ends_at_its_safe_point_and_a_disk_that_hangs_is_not_waited_for(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, go = threading.Event(), threading.Event()

    def do(job: Job) -> Steps:
        at_work.set()
        assert go.wait(20)
        yield AGAIN
        work.done.append(job.key)

    work.do = do
    job = work.jobs.start(Job("data/a"))
    assert at_work.wait(20)
    monkeypatch.setattr(module, "_ENDING_SECONDS", 0.05)
    with pytest.raises(Stopping), work.jobs.halted("data/a"):
        pass
    assert work.jobs.start(Job("data/a")) is job, "it has not ended"
    go.set()
    with pytest.raises(Stopping):
        job.future.result(20)
    with work.jobs.halted("data/a"):
        pass
    work.jobs.start(Job("data/a")).future.result(20)
    assert work.done == ["data/a"]


def test_a_job_that_waits_for_its_turn_is_halted_at_once(work: Work) -> None:
    go = threading.Event()

    def do(job: Job) -> Steps:
        yield AGAIN
        assert go.wait(20)
        work.done.append(job.key)

    work.do = do
    first, second = (work.jobs.start(Job(f"data/{one}")) for one in "ab")
    expect.soon(lambda: first.at_work and first.steps is not None)
    with work.jobs.halted("data/b"), pytest.raises(Stopping):
        second.future.result(0)
    go.set()
    first.future.result(20)
    assert work.done == ["data/a"]


def test_what_is_halted_twice_does_not_begin_before_both_have_ended(work: Work) -> None:
    work.fails = False
    with work.jobs.halted("data@1/vol-a"):
        with work.jobs.halted("data@1/vol-a"):
            pass
        with pytest.raises(Stopping):
            work.jobs.start(Job("data@1/vol-a"))
    work.jobs.start(Job("data@1/vol-a")).future.result(20)


def test_a_look_begins_all_that_is_due_though_a_call_halts_one(work: Work) -> None:
    work.fails = False
    keys = [f"data/{one}" for one in "abc"]
    work.there |= set(keys)
    with work.jobs.halted("data/b"), pytest.raises(ExceptionGroup):
        work.jobs.start_due("data")
    expect.soon(lambda: work.done == ["data/a", "data/c"])
    assert work.jobs.start_due("data") == 1
    expect.soon(lambda: len(work.done) == 3)
    assert work.jobs.start_due("other") == 0


def test_a_wake_during_a_step_has_one_more_follow(work: Work) -> None:
    began, go, ended = threading.Semaphore(0), threading.Semaphore(0), Future[None]()

    def do(_job: Job) -> Steps:
        while True:
            began.release()
            assert go.acquire(timeout=20)
            yield float("inf")

    tags: Jobs[Job] = Jobs(work.workers, "tags", do, "%s: %s")
    tags.wake(Job("data"), 0)
    assert began.acquire(timeout=20)
    for _ in range(3):
        tags.wake(Job("data"), 0)
    go.release()
    assert began.acquire(timeout=20)
    go.release()
    assert not began.acquire(timeout=0.1)
    assert not wait([ended], 0).done


# Looks


LOOKED = "group %s is not looked at: %s"


class Look:
    """Counts the looks at each group, of which those of group a hang, or raise what is given."""

    def __init__(self, problem: BaseException | None = None, *, hangs: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.problem = problem
        self.over = threading.Event()
        if not hangs:
            self.over.set()

    def __call__(self, group: str) -> bool:
        self.counts[group] += 1
        if group == "a":
            assert self.over.wait(60)
            if self.problem is not None:
                raise self.problem
        return False


@pytest.fixture
def workers() -> Iterator[GroupWorkers]:
    made = GroupWorkers()
    yield made
    made.stop()


def test_a_look_that_hangs_in_one_group_delays_no_other(workers: GroupWorkers) -> None:
    hanging = Look(hangs=True)
    looks = PeriodicJobs(workers, "test", lambda: ["a", "b"], hanging, 0.001, LOOKED)
    looks.start()
    expect.soon(lambda: hanging.counts["b"] > 5)
    assert hanging.counts["a"] == 1
    looks.stop()
    hanging.over.set()
    assert not looks.is_alive
    time.sleep(0.01)
    assert hanging.counts["a"] == 1, "after a stop nothing begins"


@pytest.mark.parametrize(
    "problem",
    [
        BlockingIOError(11, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        SystemExit(),
        lvm_errors.GroupMissing("a"),
        ZeroDivisionError("a mistake"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_no_error_ends_the_looks(
    workers: GroupWorkers, problem: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    look = Look(problem)
    looks = PeriodicJobs(workers, "test", lambda: ["a"], look, 0.001, LOOKED)
    looks.start()
    expect.soon(lambda: look.counts["a"] > 5)
    assert len([one for one in caplog.messages if "group a is not looked at" in one]) == 1
    assert looks.failures()["a"] >= 5
    look.problem = None
    expect.soon(lambda: any("test a: well again after" in one for one in caplog.messages))
    looks.stop()
    assert not looks.is_alive


def test_a_mistake_is_logged_with_its_trace(
    workers: GroupWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    looks = PeriodicJobs(
        workers, "test", lambda: ["a"], Look(ZeroDivisionError("a mistake")), 0.001, LOOKED
    )
    looks.start()
    expect.soon(lambda: caplog.records)
    looks.stop()
    assert "test_group_worker.py" in caplog.text


def test_a_look_that_returns_true_is_repeated_at_once(workers: GroupWorkers) -> None:
    again, done = iter([True, True, False]), threading.Event()

    def look(_: str) -> bool:
        if not (is_again := next(again)):
            done.set()
        return is_again

    looks = PeriodicJobs(workers, "test", lambda: ["a"], look, 0.3, LOOKED)
    looks.start()
    assert done.wait(60)
    looks.stop()
    assert list(again) == []


def test_a_group_that_comes_is_looked_at_and_one_that_goes_is_not(workers: GroupWorkers) -> None:
    groups, look = ["a"], Look()
    looks = PeriodicJobs(workers, "test", lambda: groups, look, 0.001, LOOKED)
    looks.start()
    expect.soon(lambda: look.counts["a"])
    groups[:] = ["b"]
    looks.start()
    expect.soon(lambda: look.counts["b"] > 5)
    expect.soon(lambda: [one.key for one in looks._jobs.unfinished()] == ["b"])
    before = look.counts["a"]
    time.sleep(0.02)
    assert look.counts["a"] == before
    assert list(looks.failures()) == ["b"]
    looks.stop()


def test_a_group_that_is_let_go_of_has_its_jobs_called_off_and_what_is_last_done(
    work: Work,
) -> None:
    at_work, go, written = threading.Event(), threading.Event(), list[str]()

    def do(job: Job) -> Steps:
        at_work.set()
        assert go.wait(20)
        yield AGAIN
        work.done.append(job.key)

    work.do = do
    job, waiting = work.jobs.start(Job("data/a")), work.jobs.start(Job("data/b"))
    other = work.jobs.start(Job("other/a"))
    assert at_work.wait(20)
    tags: Jobs[Job] = Jobs(
        work.workers, "tags", lambda job: written.append(job.key), "%s: %s", survives_halt=True
    )
    tags.wake(Job("data"), 600)
    work.workers.cancel_jobs("data")
    go.set()
    for one in (job, waiting):
        with pytest.raises(Stopping):
            one.future.result(20)
    other.future.result(20)
    expect.soon(lambda: written == ["data"])
    assert work.done == ["other/a"]
    # A call that names the group by an id has its work done all the same.
    work.jobs.start(Job("data/c")).future.result(20)
    assert work.done == ["other/a", "data/c"]


def test_what_is_last_is_done_also_in_a_group_without_a_thread(work: Work) -> None:
    written = list[str]()
    tags: Jobs[Job] = Jobs(
        work.workers, "tags", lambda job: written.append(job.key), "%s: %s", survives_halt=True
    )
    with expect.no_threads():
        tags.wake(Job("data"), 600)
    work.workers.cancel_jobs("data")
    expect.soon(lambda: written == ["data"])


# What must not be lost, or done twice


@pytest.mark.parametrize("sized", [True, False], ids=["sizes known", "the first of unknown size"])
def test_no_job_takes_all_steps_whatever_the_sizes(work: Work, sized: bool) -> None:
    steps, begun = Counter[str](), threading.Event()

    def do(job: Job) -> Steps:
        while True:
            begun.wait(20)
            steps[job.key] += 1
            yield AGAIN

    work.do = do
    sizes = {"data/oldest": 4 * GIB if sized else 0, "data/small": 1, "data/large": 4 * GIB}
    for key, size_bytes in sizes.items():
        work.jobs.start(Job(key, size_bytes))
    begun.set()
    expect.soon(lambda: sum(steps.values()) > 300)
    work.workers.halt()
    assert min(steps[key] for key in sizes) > sum(steps.values()) // 12


def test_a_group_that_is_let_go_and_comes_back_has_no_job_done_twice_at_once(work: Work) -> None:
    at_once, most, go_on = [0], [0], threading.Event()

    def do(job: Job) -> Steps:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        go_on.wait(20)
        at_once[0] -= 1
        yield AGAIN

    work.do = do
    first = work.jobs.start(Job("data/vol"))
    expect.soon(lambda: at_once[0] == 1)
    work.workers.cancel_jobs("data")
    second = work.jobs.start(Job("data/vol"))
    work.workers.replace_hanging_threads()
    time.sleep(0.1)
    assert most[0] == 1
    go_on.set()
    wait([first.future, second.future], 20)
    assert isinstance(first.future.exception(), Stopping)
    assert second.future.exception() is None
    assert most[0] == 1


def test_a_deferred_job_that_failed_survives_that_its_group_is_let_go(work: Work) -> None:
    done, fails = threading.Event(), iter([FAILURE])

    def write(_job: Job) -> None:
        if (error := next(fails, None)) is not None:
            raise error
        done.set()

    tags: Jobs[Job] = Jobs(
        work.workers, "tags", write, "%s: %s", survives_halt=True, retry_seconds=0.3
    )
    job = tags.start(Job("data/tag"))
    wait([job.future], 20)
    work.workers.cancel_jobs("data")
    assert done.wait(20)


@pytest.mark.parametrize("fails", [True, False])
def test_a_job_that_was_halted_for_a_call_begins_anew_if_the_call_fails(
    work: Work, fails: bool
) -> None:
    work.fails, begun = False, threading.Event()

    def do(job: Job) -> Steps | None:
        if begun.is_set():
            work._do(job)
            return None
        begun.set()
        return iter(lambda: 0.01, None)

    work.do = do
    work.there.add("data/vol")
    work.jobs.start(Job("data/vol"))
    begun.wait(20)
    try:
        with work.jobs.halted("data/vol"):
            if fails:
                raise FAILURE
            work.there.discard("data/vol")
    except OSError:
        expect.soon(lambda: work.done == ["data/vol"])
    expect.soon(lambda: not work.jobs.has("data/vol"))
    assert work.done == ["data/vol"] * fails


def test_a_question_about_an_unknown_group_makes_no_loop(work: Work) -> None:
    assert work.jobs.of("nothing@00000000/vol-pvc-1") is None
    work.jobs.forget("nothing@00000000/vol-pvc-1")
    assert work.workers.every() == []


def test_no_job_begins_in_a_group_that_is_first_named_after_the_end(work: Work) -> None:
    work.workers.halt()
    job = work.jobs.start(Job("data/vol"))
    assert isinstance(job.future.exception(1), Stopping)
    assert not work.failed
