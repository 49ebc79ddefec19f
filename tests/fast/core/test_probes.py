"""Nobody waits for a look that hangs, and what was seen before is told meanwhile."""

import threading
import time

import pytest

from agent.core import background
from agent.core.background import Probes, Seen


def soon() -> float:
    """Later than any look that does not hang."""
    return time.monotonic() + 20


def test_what_is_looked_at_is_told() -> None:
    assert Probes[int]().probe("a", lambda: 7, soon()) == Seen(7)


def test_what_a_look_raises_is_raised_and_the_next_one_is_made() -> None:
    made = Probes[int]()

    def fail() -> int:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        made.probe("a", fail, soon())
    assert made.probe("a", lambda: 7, soon()) == Seen(7)


def test_a_look_that_hangs_is_made_once_and_keeps_no_other_and_ends_with_what_it_saw() -> None:
    made, go_on, begun = Probes[int](), threading.Event(), threading.Semaphore(0)

    def hang() -> int:
        begun.release()
        assert go_on.wait(20)
        return 8

    made.probe("a", lambda: 7, soon())
    for _ in range(3):
        seen = made.probe("a", hang, time.monotonic())
        assert seen.value == 7
        assert seen.hanging_seconds > 0
    assert made.probe("never seen", hang, time.monotonic()).value is None
    assert made.probe("b", lambda: 9, soon()) == Seen(9)
    assert begun.acquire(timeout=20)
    assert begun.acquire(timeout=20)
    assert not begun.acquire(blocking=False)
    go_on.set()
    assert made.probe("a", lambda: 8, soon()) == Seen(8)


def test_only_so_much_is_kept_of_what_is_not_looked_at_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "_MOST_KEPT", 3)
    made = Probes[int]()
    for number in range(6):
        made.probe(f"{number}", lambda: 1, soon())
    assert list(made._last) == ["3", "4", "5"]


def test_a_look_for_which_there_is_no_thread_is_none_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Probes[int]()

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            made.probe("a", lambda: 7, soon())
    assert made.probe("a", lambda: 7, soon()) == Seen(7)


def test_where_a_few_looks_hang_the_others_there_have_no_threads_and_hang_too() -> None:
    made, go_on, begun = Probes[int](), threading.Event(), threading.Semaphore(0)

    def hang() -> int:
        begun.release()
        assert go_on.wait(20)
        return 8

    for number in range(20):
        seen = made.probe(f"{number}", hang, time.monotonic(), "pool")
        assert seen.value is None
        assert seen.hanging_seconds > 0
    for _ in range(background._MOST_AT_ONCE):
        assert begun.acquire(timeout=20)
    assert not begun.acquire(blocking=False)
    assert made.probe("elsewhere", lambda: 9, soon(), "another pool") == Seen(9)
    go_on.set()
    assert made.probe("19", lambda: 9, soon(), "pool") == Seen(9)


def test_what_does_not_hang_is_looked_at_though_what_hangs_took_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, go_on = Probes[bool](), threading.Event()
    until = time.monotonic() + 0.01
    for number in range(9):
        made.probe(f"hangs {number}", lambda: go_on.wait(60), until, "pool")
    monkeypatch.setattr(background, "_LEAST_SECONDS", 20.0)
    for number in range(99):
        assert made.probe(f"{number}", lambda: True, until, "another pool") == Seen(value=True)
    go_on.set()


def test_who_comes_when_a_few_are_looked_at_has_the_next_look() -> None:
    made, go_on = Probes[int](), threading.Event()
    for number in range(background._MOST_AT_ONCE):
        made.probe(f"{number}", lambda: int(go_on.wait(20)), time.monotonic(), "pool")
    threading.Timer(0.05, go_on.set).start()
    assert made.probe("one more", lambda: 9, soon(), "pool") == Seen(9)


def test_nobody_waits_for_a_look_that_hangs_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    made, go_on = Probes[bool](), threading.Event()
    monkeypatch.setattr(background, "_PATIENCE_SECONDS", 0.01)
    for number in range(background._MOST_AT_ONCE):
        made.probe(f"{number}", lambda: go_on.wait(60), time.monotonic() + 0.01, "pool")
    began = time.monotonic()
    for number in range(9):
        assert made.probe(f"{number}", lambda: True, soon(), "pool").hanging_seconds
    assert time.monotonic() - began < 10
    go_on.set()
