"""The lock of a volume group: in order, bounded, no longer than the RPC's deadline."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import expect
import pytest

from agent.core import errors, locks
from agent.core.locks import MOST_READING, MOST_WAITING, GroupLock
from mount.command import time_limit

LONG = 20.0


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
        with time_limit(limit), self.queue.hold():
            self.order.append(title)


@pytest.fixture
def turns() -> Turns:
    return Turns(GroupLock("volume group data"))


def test_the_calls_of_a_group_leave_places_to_others() -> None:
    # One that changes and one that looks are not waiting.
    assert MOST_WAITING + 1 + MOST_READING + 1 < locks.PLACES


def test_waiters_get_the_lock_in_their_order(turns: Turns) -> None:
    with turns.queue.hold():
        calls = [turns.wait(str(number)) for number in range(5)]
        assert turns.queue.is_taken
    for one in calls:
        one.result(LONG)
    assert turns.order == ["0", "1", "2", "3", "4"]
    assert not turns.queue.is_taken


def test_one_waiter_too_many_is_refused_at_once(turns: Turns) -> None:
    with turns.queue.hold():
        calls = [turns.wait(str(number)) for number in range(MOST_WAITING)]
        with pytest.raises(errors.GroupBusy, match=r"volume group data: \d+ calls wait"):
            turns._take("too many", None)
    for one in calls:
        one.result(LONG)
    assert "too many" not in turns.order


def test_a_waiter_gives_up_at_its_deadline_and_the_next_gets_the_lock(turns: Turns) -> None:
    with turns.queue.hold():
        hasty = turns.wait("hasty", 0.05)
        patient = turns.wait("patient")
        with pytest.raises(errors.GroupBusy, match="at work on it all the time"):
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
    with time_limit(LONG), queue.hold():
        assert queue.is_taken
    assert not queue.is_taken
    with queue.hold():
        pass


def test_many_hasty_callers_leave_the_lock_free(turns: Turns) -> None:
    def call(number: int) -> None:
        try:
            with time_limit(0.0005 * (number % 7)), turns.queue.hold():
                pass
        except errors.GroupBusy:
            pass

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, range(800)))
    assert not turns.queue.is_taken
    assert not turns.queue._waiting
