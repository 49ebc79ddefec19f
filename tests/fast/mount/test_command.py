"""Limits of time: by the clock, and by the time without progress."""

from types import SimpleNamespace

import pytest

from mount import command


class Clock:
    """A clock that a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: self.seconds))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("steps", [0, 1, 5, 100])
def test_work_that_comes_further_is_not_cut_off_by_the_clock(clock: Clock, steps: int) -> None:
    with command.stall_limit(60):
        for _ in range(steps):
            clock.seconds += 59
            assert command.remaining_seconds() == 1
            command.progressed()
        assert command.remaining_seconds() == 60
        clock.seconds += 61
        assert command.remaining_seconds() == 0
    assert command.remaining_seconds() is None


def test_a_caller_s_deadline_is_extended_by_no_progress(clock: Clock) -> None:
    with command.time_limit(10):
        clock.seconds += 9
        command.progressed()
        assert command.remaining_seconds() == 1


def test_progress_within_a_limit_extends_the_stall_limit_around_it(clock: Clock) -> None:
    with command.stall_limit(60):
        with command.time_limit(50):
            clock.seconds += 40
            command.progressed()
            assert command.remaining_seconds() == 10
        assert command.remaining_seconds() == 60
