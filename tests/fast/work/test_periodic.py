"""Periodic tasks, and what is said of errors."""

from agent.work.background import PeriodicTask, reasons


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
