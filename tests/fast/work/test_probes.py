"""Probes that hang are not waited for twice, and the last result is given meanwhile."""

import threading
import time
from collections.abc import Iterator

import expect
import pytest

from agent.work import background
from agent.work.background import ProbeResult, Probes


class Hang:
    """A probe that hangs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Semaphore(0), threading.Event()

    def __call__(self) -> int:
        self.begun.release()
        assert self.over.wait(20)
        return 8

    def has_begun(self, times: int) -> bool:
        """Whether it began so often since it was asked last, and no more."""
        is_so = all(self.begun.acquire(timeout=20) for _ in range(times))
        return is_so and not self.begun.acquire(blocking=False)


@pytest.fixture
def probes() -> Probes[int]:
    return Probes()


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.over.set()


def soon() -> float:
    """Later than any probe that does not hang."""
    return time.monotonic() + 20


def test_a_probe_raises_its_error_and_the_next_one_is_made(probes: Probes[int]) -> None:
    def fail() -> int:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        probes.probe("a", fail, soon())
    with expect.no_threads(), pytest.raises(RuntimeError, match="new thread"):
        probes.probe("a", lambda: 7, soon())
    assert probes.probe("a", lambda: 7, soon()) == ProbeResult(7)


def test_a_probe_that_hangs_is_made_once_and_delays_no_other(
    probes: Probes[int], hang: Hang
) -> None:
    probes.probe("a", lambda: 7, soon())
    for _ in range(3):
        seen = probes.probe("a", hang, time.monotonic())
        assert seen.value == 7
        assert seen.hanging_seconds > 0
    assert probes.probe("never seen", hang, time.monotonic()).value is None
    assert probes.probe("b", lambda: 9, soon()) == ProbeResult(9)
    assert hang.has_begun(2)
    hang.over.set()
    assert probes.probe("a", lambda: 8, soon()) == ProbeResult(8)


def test_only_the_last_results_are_kept(
    probes: Probes[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_MOST_KEPT", 3)
    for number in range(6):
        probes.probe(f"{number}", lambda: 1, soon())
    assert list(probes._last) == ["3", "4", "5"]


def test_while_four_probes_of_a_place_hang_no_other_begins_there(
    probes: Probes[int], hang: Hang
) -> None:
    for number in range(20):
        seen = probes.probe(f"{number}", hang, time.monotonic(), "pool")
        assert seen.value is None
        assert seen.hanging_seconds > 0
    assert hang.has_begun(background._MOST_AT_ONCE)
    assert probes.probe("elsewhere", lambda: 9, soon(), "another pool") == ProbeResult(9)
    hang.over.set()
    assert probes.probe("19", lambda: 9, soon(), "pool") == ProbeResult(9)


def test_a_probe_has_a_moment_though_others_took_all_the_time(
    probes: Probes[int], hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = time.monotonic() + 0.01
    for number in range(9):
        probes.probe(f"hangs {number}", hang, until, "pool")
    monkeypatch.setattr(background, "_LEAST_SECONDS", 20.0)
    for number in range(99):
        assert probes.probe(f"{number}", lambda: 9, until, "another pool") == ProbeResult(9)


def test_a_probe_waits_for_one_of_the_four_to_end(probes: Probes[int], hang: Hang) -> None:
    for number in range(background._MOST_AT_ONCE):
        probes.probe(f"{number}", hang, time.monotonic(), "pool")
    threading.Timer(0.05, hang.over.set).start()
    assert probes.probe("one more", lambda: 9, soon(), "pool") == ProbeResult(9)


def test_a_probe_that_hangs_for_long_is_not_waited_for(
    probes: Probes[int], hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_PATIENCE_SECONDS", 0.01)
    for number in range(background._MOST_AT_ONCE):
        probes.probe(f"{number}", hang, time.monotonic() + 0.01, "pool")
    began = time.monotonic()
    for number in range(9):
        assert probes.probe(f"{number}", lambda: 9, soon(), "pool").hanging_seconds
    assert time.monotonic() - began < 10
