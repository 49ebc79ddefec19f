"""Volumes are suspended for a bounded time, whatever happens inside."""

import errno
import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field

import expect
import pytest

from agent.core import errors
from agent.groups import quiesce
from agent.groups.quiesce import Quiesce, Resumer
from lvm.active_devices import Devices


@dataclass
class Suspendable(Devices):
    """Volumes that can be suspended."""

    names: tuple[str, ...] = ("vol-a", "vol-b")
    suspended: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    resumed: threading.Event = field(default_factory=threading.Event)
    # Those whose disk does not answer until `answers`, and each resume.
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


@pytest.mark.parametrize("stuck", [set[str](), {"vol-a"}])
def test_all_that_can_be_are_resumed_at_the_end(
    stuck: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    devices = Suspendable(stuck=stuck)
    with Quiesce(devices, 60) as held:
        held.suspend("data", "vol-a")
        held.suspend("data", "vol-b")
        assert devices.suspended == {"vol-a", "vol-b"}
        held.check()
    assert devices.suspended == stuck
    assert ("data/vol-a cannot be resumed" in caplog.text) is bool(stuck)


def test_a_volume_that_another_suspended_is_left_so() -> None:
    devices = Suspendable(suspended={"vol-b"})
    with Quiesce(devices, 60) as held:
        held.suspend("data", "vol-a")
        with pytest.raises(OSError, match="Invalid"):
            held.suspend("data", "vol-b")
    assert devices.suspended == {"vol-b"}


def test_a_disk_that_hangs_at_resume_delays_no_other_volume() -> None:
    devices = Suspendable()
    with Quiesce(devices, 60) as held:
        held.suspend("data", "vol-a")
        held.suspend("data", "vol-b")
        devices.hanging.add("vol-a")
    expect.soon(lambda: devices.suspended == {"vol-a"})
    assert not held.free["data", "vol-a"].done()
    assert held.free["data", "vol-b"].done()
    devices.answers.set()
    expect.soon(held.free["data", "vol-a"].done)
    assert devices.suspended == set()


def test_a_volume_suspended_too_late_is_resumed_at_once() -> None:
    devices = Suspendable(hanging={"vol-b"})
    with Quiesce(devices, 1) as held:
        held.suspend("data", "vol-a")
        with pytest.raises(errors.QuiesceOver, match="the 1 s"):
            held.suspend("data", "vol-b")
    assert devices.suspended == set()
    assert not held.free["data", "vol-b"].done()
    devices.answers.set()
    expect.soon(held.free["data", "vol-b"].done)
    assert devices.suspended == set()
    assert "vol-b" in devices.tries, "it was held after all"


def test_without_a_thread_all_are_resumed() -> None:
    devices = Suspendable()
    with ExitStack() as lacks, Quiesce(devices, 60) as held:
        held.suspend("data", "vol-a")
        lacks.enter_context(expect.no_threads())
        with pytest.raises(RuntimeError):
            held.suspend("data", "vol-b")
    assert devices.suspended == set()
    assert all(one.done() for one in held.free.values())


def test_a_start_does_not_wait_for_a_disk_that_hangs() -> None:
    devices = Suspendable(suspended={"vol-a", "vol-b"}, hanging={"vol-a"})
    release = Resumer(devices)
    for _ in range(3):
        with quiesce.resume_left(devices, ["data"], release):
            pass
        assert devices.suspended == {"vol-a"}
    assert devices.tries.count("vol-a") == 1, "one thread, however often the start is retried"
    devices.answers.set()
    expect.soon(lambda: not devices.suspended)


def test_volumes_left_suspended_are_resumed_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with quiesce.resume_left(Suspendable(), ["data"]):
        pass
    assert not caplog.records
    devices = Suspendable(("vol-a", "vol-b", "other"), {"vol-b", "other"})
    with quiesce.resume_left(devices, ["data"]):
        assert "vol-b" in devices.suspended
    assert devices.suspended == {"other"}, "it is not a volume of Carver's"
    assert "data/vol-b" in caplog.text


def test_volumes_left_suspended_are_resumed_though_lvm2_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quiesce, "_LEFT_SECONDS", 0.01)
    devices = Suspendable(suspended={"vol-a", "vol-b"})
    with quiesce.resume_left(devices, ["data"]):
        assert devices.resumed.wait(10)
        assert devices.suspended == set()
