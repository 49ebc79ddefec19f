"""Volumes are held for a bounded time, whatever happens inside and to whom."""

import errno
import os
import threading
from dataclasses import dataclass, field

import expect
import pytest

from agent.core import errors, quiesce
from agent.core.quiesce import Quiesce, Resumer
from lvm.devices import Devices


@dataclass
class Suspendable(Devices):
    """As many volumes as one likes, which can be suspended."""

    names: tuple[str, ...] = ("vol-a", "vol-b")
    suspended: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    resumed: threading.Event = field(default_factory=threading.Event)
    # Those whose disk does not answer, until it does; and how often one was resumed.
    hanging: set[str] = field(default_factory=set)
    answers: threading.Event = field(default_factory=threading.Event)
    tries: list[str] = field(default_factory=list)

    def active(self, group: str) -> tuple[str, ...]:
        return self.names

    def suspend(self, group: str, name: str) -> None:
        if name in self.suspended:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if name in self.hanging:
            assert self.answers.wait(60)
        self.suspended.add(name)

    def resume(self, group: str, name: str) -> None:
        self.tries.append(name)
        if name in self.hanging:
            assert self.answers.wait(60)
        if name in self.stuck:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.suspended.discard(name)
        if not self.suspended - self.stuck:
            self.resumed.set()

    def is_suspended(self, group: str, name: str) -> bool:
        return name in self.suspended

    def is_open(self, group: str, name: str) -> bool:
        return False


def test_what_is_held_is_let_go_at_the_end() -> None:
    devices = Suspendable()
    with Quiesce(devices, 60) as still:
        still.suspend("data", "vol-a")
        still.suspend("data", "vol-b")
        assert devices.suspended == {"vol-a", "vol-b"}
        still.check()
    assert devices.suspended == set()


def test_what_another_suspended_is_neither_held_nor_let_go() -> None:
    devices = Suspendable(suspended={"vol-b"})
    with Quiesce(devices, 60) as still:
        still.suspend("data", "vol-a")
        with pytest.raises(OSError, match="Invalid"):
            still.suspend("data", "vol-b")
    assert devices.suspended == {"vol-b"}, "it was another who suspended it"


def test_what_is_held_is_let_go_in_time_and_whoever_held_it_hears_of_it() -> None:
    devices = Suspendable()
    with Quiesce(devices, 1) as still:
        still.suspend("data", "vol-a")
        assert devices.resumed.wait(10)
        assert devices.suspended == set()
        with pytest.raises(errors.QuiesceOver, match="the 1 s"):
            still.check()
        with pytest.raises(errors.QuiesceOver):
            still.suspend("data", "vol-b")
        assert devices.suspended == set()


def test_one_that_cannot_be_let_go_of_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices = Suspendable(stuck={"vol-a"})
    with Quiesce(devices, 60) as still:
        still.suspend("data", "vol-a")
        still.suspend("data", "vol-b")
    assert devices.suspended == {"vol-a"}
    assert "data/vol-a cannot be resumed" in caplog.text


def test_one_whose_disk_does_not_answer_keeps_no_other_held() -> None:
    devices = Suspendable()
    with Quiesce(devices, 60) as still:
        still.suspend("data", "vol-a")
        still.suspend("data", "vol-b")
        devices.hanging.add("vol-a")
    expect.soon(lambda: devices.suspended == {"vol-a"})
    assert not still.free["data", "vol-a"].done()
    assert still.free["data", "vol-b"].done()
    devices.answers.set()
    expect.soon(still.free["data", "vol-a"].done)
    assert devices.suspended == set()


def test_one_that_is_not_held_in_time_is_none_and_is_let_go_of_once_it_is() -> None:
    devices = Suspendable(hanging={"vol-b"})
    with Quiesce(devices, 1) as still:
        still.suspend("data", "vol-a")
        with pytest.raises(errors.QuiesceOver, match="the 1 s"):
            still.suspend("data", "vol-b")
    assert devices.suspended == set()
    assert not still.free["data", "vol-b"].done()
    devices.answers.set()
    expect.soon(still.free["data", "vol-b"].done)
    assert devices.suspended == set()
    assert "vol-b" in devices.tries, "it was held after all"


def test_where_no_thread_can_be_had_all_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Suspendable()
    real, lacks = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        if lacks.is_set():
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Quiesce(devices, 60) as still:
        still.suspend("data", "vol-a")
        lacks.set()
        with pytest.raises(RuntimeError):
            still.suspend("data", "vol-b")
    assert devices.suspended == set()
    assert all(one.done() for one in still.free.values())


def test_what_a_kill_left_on_a_disk_that_does_not_answer_keeps_no_start() -> None:
    devices = Suspendable(suspended={"vol-a", "vol-b"}, hanging={"vol-a"})
    release = Resumer(devices)
    for _ in range(3):
        with quiesce.resume_left(devices, ["data"], release):
            pass
        assert devices.suspended == {"vol-a"}
    assert devices.tries.count("vol-a") == 1, "one thread, however often a start begins anew"
    devices.answers.set()
    expect.soon(lambda: not devices.suspended)


def test_what_a_kill_left_is_let_go_after_what_is_done_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices = Suspendable(("vol-a", "vol-b", "other"), {"vol-b", "other"})
    with quiesce.resume_left(devices, ["data"]):
        assert "vol-b" in devices.suspended
    assert devices.suspended == {"other"}, "it is not a volume of Carver's"
    assert "data/vol-b" in caplog.text


def test_what_a_kill_left_is_let_go_though_lvm2_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quiesce, "_LEFT_SECONDS", 0.01)
    devices = Suspendable(suspended={"vol-a", "vol-b"})
    with quiesce.resume_left(devices, ["data"]):
        assert devices.resumed.wait(10)
        assert devices.suspended == set()


def test_a_start_after_which_nothing_is_held_does_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with quiesce.resume_left(Suspendable(), ["data"]):
        pass
    assert not caplog.records
