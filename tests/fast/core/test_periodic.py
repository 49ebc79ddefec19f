"""Periodic tasks: nothing but a stop ends them, and no group waits for another."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator

import expect
import pytest

from agent.core.background import GroupTasks, PeriodicTask, reasons
from lvm import errors as lvm_errors

FAILURE = "group %s is not looked at: %s"


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
def hanging() -> Iterator[Look]:
    look = Look(hangs=True)
    yield look
    look.over.set()


def test_a_task_that_hangs_in_one_group_delays_no_other(hanging: Look) -> None:
    tasks = GroupTasks("test", ["a", "b"], hanging, 0.001, FAILURE)
    tasks.start()
    expect.soon(lambda: hanging.counts["b"] > 5)
    assert hanging.counts["a"] == 1
    began = time.monotonic()
    tasks.stop(0.1)
    assert time.monotonic() - began < 5, "an end does not wait for what hangs"
    assert tasks.is_alive
    hanging.over.set()
    expect.soon(lambda: not tasks.is_alive)
    assert hanging.counts["a"] == 1, "after a stop nothing begins"


@pytest.mark.parametrize(
    "problem",
    [
        BlockingIOError(11, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        lvm_errors.GroupMissing("a"),
        ZeroDivisionError("a mistake"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_no_error_ends_a_task(problem: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    look = Look(problem)
    tasks = GroupTasks("test", ["a"], look, 0.001, FAILURE)
    tasks.start()
    expect.soon(lambda: look.counts["a"] > 5)
    assert len([one for one in caplog.messages if "group a is not looked at" in one]) == 1
    assert tasks.failures()["a"] >= 5
    look.problem = None
    expect.soon(lambda: any("test a: well again after" in one for one in caplog.messages))
    tasks.stop(60)
    assert not tasks.is_alive


def test_a_mistake_is_logged_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    look = Look(ZeroDivisionError("a mistake"))
    tasks = GroupTasks("test", ["a"], look, 0.001, FAILURE)
    tasks.start()
    expect.soon(lambda: caplog.records)
    tasks.stop()
    assert "test_periodic.py" in caplog.text


def test_a_task_that_returns_true_runs_again_at_once() -> None:
    looks = iter([True, True, False])
    done = threading.Event()

    def look(_: str) -> bool:
        again = next(looks)
        if not again:
            done.set()
        return again

    tasks = GroupTasks("test", ["a"], look, 0.3, FAILURE)
    tasks.start()
    assert done.wait(60)
    tasks.stop()
    assert list(looks) == []


def test_retries_wait_longer_up_to_a_limit_until_a_success() -> None:
    problems: list[Exception | None] = [OSError("no")] * 4 + [None, OSError("no")]

    def work() -> None:
        if (problem := problems.pop(0)) is not None:
            raise problem

    task = PeriodicTask("test", work, 600, "%s", retry_seconds=1, longest_retry_seconds=4)
    assert [task.run_once() for _ in range(6)] == [1, 2, 4, 4, 600, 1]
    assert task.failures == 5


def test_a_group_of_errors_says_what_each_in_it_says() -> None:
    several = ExceptionGroup("some", [OSError(5, "one"), ExceptionGroup("", [KeyError("two")])])
    assert reasons(several) == "[Errno 5] one; 'two'"
    assert reasons(ExceptionGroup("some", [ValueError("same"), ValueError("same")])) == "same"
    assert reasons(ValueError()) == "ValueError()"
