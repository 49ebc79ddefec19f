"""A job that fails is retried until it is done, or proved to be gone."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from itertools import count

import expect
import pytest

from agent.core import errors
from agent.core import task_queue as module
from agent.core.task_queue import Job, Stopping, TaskQueue
from mount import command
from mount import errors as mount_errors

FAILURE = OSError(5, "Input/output error")


class Work:
    """Jobs, how often each was looked for and done, and what comes of that."""

    def __init__(self) -> None:
        self.fails = True
        self.failed: set[str] = set()
        self.looked: list[str] = []
        self.done: list[str] = []
        self.look: Callable[[str], None] = lambda _key: None
        self.jobs = TaskQueue("test", self._do, self._find, "%s failed: %s", workers=2)
        self.jobs.retry_seconds = 1

    def _do(self, job: Job) -> None:
        if self.fails:
            self.failed.add(job.key)
            raise FAILURE
        self.done.append(job.key)

    def _find(self, key: str) -> Job:
        self.looked.append(key)
        self.look(key)
        return Job(key)

    def fail(self, *keys: str) -> None:
        """Have these jobs fail, and their retries succeed."""
        for one in keys:
            self.jobs.start(Job(one))
        expect.soon(lambda: self.failed >= set(keys))
        self.fails = False


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.jobs.stop()


@pytest.mark.parametrize(
    "doubt",
    [
        errors.GroupBusy("volume group data", "30 calls wait for it already"),
        errors.GroupSilent("data", ["/dev/sdb"]),
        errors.GroupAwaited("data"),
        errors.GroupRefused("data", "2 of that name"),
        errors.TooManyCalls(80),
        errors.OtherGroup("data@1/vol-a", "group data is not on this node"),
        errors.SourceLost("data@1/snap-a", "it ran full"),
        mount_errors.CommandTimedOut(("lvm", "fullreport"), 1.0),
        mount_errors.CommandFailed(("lvm", "fullreport"), 5, ""),
        OSError(5, "Input/output error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_job_is_retried_until_it_is_done(work: Work, doubt: Exception) -> None:
    doubts = iter([doubt] * 3)

    def look(_key: str) -> None:
        if (error := next(doubts, None)) is not None:
            raise error

    work.jobs.retry_seconds = 0.02
    work.look = look
    keys = [f"data@1/vol-{number}" for number in range(3)]
    work.fail(*keys)
    expect.soon(lambda: sorted(work.done) == keys)
    assert work.jobs.counts()["failed"] == 0


def test_a_job_proved_gone_is_not_retried(work: Work) -> None:
    def look(key: str) -> None:
        raise errors.NoSuchVolume(key)

    work.jobs.retry_seconds = 0.02
    work.look = look
    work.fail("data@1/vol-a")
    expect.soon(lambda: not work.jobs.has("data@1/vol-a"))
    assert work.looked == ["data@1/vol-a"]
    assert work.done == []


def test_a_group_that_cannot_be_read_is_read_once_for_all_jobs(
    work: Work,
) -> None:
    numbers = count()

    def look(_key: str) -> None:
        if next(numbers) < 2:
            raise errors.GroupBusy("volume group data", "30 calls wait for it already")

    work.look = look
    keys = {f"data@1/vol-{number}" for number in range(5)}
    work.fail(*keys)
    expect.soon(lambda: set(work.done) == keys)
    assert len(work.looked) == 2 + len(keys)
    assert len(set(work.looked[:2])) == 2, "another is first next time"


def test_all_jobs_are_found_before_one_begins(work: Work) -> None:
    keys = [f"data@1/vol-{number}" for number in range(5)]
    seen: list[int] = []
    work.look = lambda _key: seen.append(len(work.done))
    work.fail(*keys)
    expect.soon(lambda: len(work.done) == len(keys))
    assert seen == [0] * len(keys)


def test_a_group_that_hangs_delays_no_retry_of_another(work: Work) -> None:
    over = threading.Event()
    work.look = lambda key: None if key.startswith("b@") else [over.wait(20)].clear()
    work.fail("a@1/vol", "b@1/vol")
    expect.soon(lambda: work.done == ["b@1/vol"])
    over.set()
    expect.soon(lambda: work.done == ["b@1/vol", "a@1/vol"])


def test_a_job_without_a_thread_is_refused_and_begun_by_the_next_call(
    work: Work,
) -> None:
    work.fails = False
    with expect.no_threads(), pytest.raises(RuntimeError):
        work.jobs.start(Job("data@1/vol-a"))
    assert not work.jobs.has("data@1/vol-a")
    work.jobs.start(Job("data@1/vol-a")).ended.result(20)
    assert work.done == ["data@1/vol-a"]


def test_a_job_is_retried_also_without_a_new_thread(work: Work) -> None:
    work.jobs.retry_seconds = 0.02
    fail, lacks = work._do, ExitStack()

    def first(_job: Job) -> None:
        lacks.enter_context(expect.no_threads())
        work.jobs._work = fail
        raise FAILURE

    work.jobs._work = first
    with lacks:
        job = work.jobs.start(Job("data@1/vol-a"))
        assert job.ended.exception(20) is FAILURE
        work.fails = False
        expect.soon(lambda: len(work.looked) >= 2)
    expect.soon(lambda: work.done == ["data@1/vol-a"])


def test_nothing_is_retried_after_the_end(work: Work) -> None:
    work.fail("data@1/vol-a")
    work.jobs.stop()
    for one in threading.enumerate():
        if one.name == "again data":
            one.join(20)
            assert not one.is_alive()
    assert work.looked == []


def test_the_time_to_find_jobs_is_bounded(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    monkeypatch.setattr(module, "_LOOKING_SECONDS", 7.0)
    work.look = lambda _key: limits.append(command.remaining_seconds())
    work.fail("data@1/vol-a")
    expect.soon(lambda: work.done)
    assert limits[0] is not None
    assert 0 < limits[0] <= 7.0


def test_long_jobs_do_not_keep_a_short_one_waiting(work: Work) -> None:
    work.fails, goes_on = False, threading.Event()
    do = work.jobs._work

    def wait_if_long(job: Job) -> None:
        assert job.size_bytes <= module.LONG_BYTES or goes_on.wait(20)
        do(job)

    work.jobs._work = wait_if_long
    long = [
        work.jobs.start(Job(f"data/{one}", size_bytes=module.LONG_BYTES + 1)) for one in range(3)
    ]
    work.jobs.start(Job("data/short", size_bytes=module.LONG_BYTES)).ended.result(20)
    assert [one.ended.done() for one in long] == [False] * 3
    goes_on.set()
    for one in long:
        one.ended.result(20)


def test_no_retry_begins_while_a_call_has_it_halted(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.jobs.retry_seconds = 3600
    work.fail("data@1/vol-a")
    failed = work.jobs.of("data@1/vol-a")
    assert failed is not None
    looked = threading.Event()

    def retried_meanwhile(ended: list[Future[None]], seconds: float) -> object:
        # The minute is over after the call looked at the job, and before it forgets it.
        work.jobs._retry_now(failed)
        assert work.jobs.of("data@1/vol-a") is failed
        looked.set()
        return wait(ended, seconds)

    monkeypatch.setattr(module, "wait", retried_meanwhile)
    with work.jobs.halted("data@1/vol-a"):
        assert looked.is_set()
        assert not work.jobs.has("data@1/vol-a")
    work.jobs._retry_now(failed)
    assert work.done == []


def test_what_is_halted_twice_does_not_begin_before_both_have_ended(work: Work) -> None:
    work.fails = False
    with work.jobs.halted("data@1/vol-a"):
        with work.jobs.halted("data@1/vol-a"):
            pass
        with pytest.raises(Stopping):
            work.jobs.start(Job("data@1/vol-a"))
    work.jobs.start(Job("data@1/vol-a")).ended.result(20)
