"""The cached state is refreshed when a disk changed, and with time."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import configured
import pytest
import pyudev
from fakes.host import FakeHost

from agent.daemon import startup
from agent.daemon.startup import Watch
from agent.groups.node_groups import VolumeGroups
from agent.volumes.reports import Reports
from lvm import udev_events as module
from lvm.report import Group
from lvm.udev_events import DiskEvent, DiskEvents


class Events:
    """udev's events, one answer for each wait; then it is over."""

    def __init__(self, *answers: set[DiskEvent] | Exception) -> None:
        self.answers = list(answers)
        self.over = threading.Event()
        self.go_on = threading.Event()

    def wait(self, _seconds: float) -> set[DiskEvent]:
        if not self.answers:
            self.over.set()
            self.go_on.wait(20)
            return set()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Known(Reports):
    """Counts the calls of the background threads."""

    def __init__(self, fake: FakeHost) -> None:
        super().__init__(VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups()))
        self.outdated: list[str | None] = []
        self.renewed: list[float] = []
        self.turned = threading.Event()

    def outdate(self, written: str | None = None) -> None:
        self.outdated.append(written)

    def refresh(self, max_age: float) -> list[Future[Group | None]]:
        self.renewed.append(max_age)
        self.turned.set()
        return []


@pytest.fixture
def known(tmp_path: Path) -> Known:
    return Known(FakeHost(tmp_path))


def run(watch: Watch, until: threading.Event, then: Callable[[], object]) -> None:
    watch.start()
    assert until.wait(20)
    watch.stop()
    then()
    for task in watch._tasks:
        task.join(20)
        assert not task.is_alive


def test_a_changed_disk_outdates_the_state(known: Known) -> None:
    events: Any = Events({DiskEvent()}, set(), {DiskEvent("/dev/sdb")})
    run(Watch(known, lambda: events), events.over, events.go_on.set)
    assert known.outdated == [None, "/dev/sdb"]
    assert set(known.renewed) == {60.0}


def test_without_udev_the_state_is_refreshed_with_time(known: Known) -> None:
    run(Watch(known, lambda: None), known.turned, lambda: None)
    assert known.outdated == []
    assert set(known.renewed) == {60.0}


def test_errors_of_udev_s_library_do_not_stop_the_refresh(
    known: Known, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_INTERVAL_SECONDS", 0.01)
    events: Any = Events(ValueError("an odd device"), {DiskEvent("/dev/sdb")})
    run(Watch(known, lambda: events), events.over, events.go_on.set)
    assert known.outdated == [None, "/dev/sdb"], "earlier events may be lost"
    assert "an odd device" in caplog.text

    def fail() -> DiskEvents | None:
        raise AttributeError("an odd library")

    known.turned.clear()
    run(Watch(known, fail), known.turned, lambda: None)


def test_a_group_that_hangs_does_not_delay_the_other_s_refresh(tmp_path: Path) -> None:
    fake, over = FakeHost(tmp_path), threading.Event()
    for one in ("sick", "sound"):
        fake.lvm2.add_group(one)
    volume_groups = VolumeGroups(
        fake.lvm, fake.disks, fake.devices, configured.on_groups("sick", "sound")
    )
    known = Reports(volume_groups)
    known.fresh()
    for group in volume_groups:
        group.tried_seconds -= 61
        fake.lvm2.groups[group.name].seqno += 1
    [sick] = volume_groups.lvm("sick").devices

    def hang(words: Sequence[str]) -> None:
        assert sick not in " ".join(words) or over.wait(20)

    fake.intercept = hang
    known.keep_fresh()
    hanging, other = known.refresh(60.0)
    other.result(20)
    assert not hanging.done()
    over.set()
    hanging.result(20)


# udev


class Changed(dict[str, str]):
    """pyudev's device of an event, with its properties."""

    def __init__(self, action: str, node: str, **properties: str) -> None:
        super().__init__(properties)
        self.action, self.device_node = action, node
        self.sys_name = Path(node).name


class Monitor:
    """pyudev's, with the devices of its events."""

    def __init__(self, *devices: Changed | OSError | None) -> None:
        self.devices = list(devices)
        self.started = False
        self.problem: OSError | None = None

    def filter_by(self, subsystem: str) -> None:
        assert subsystem == "block"

    def start(self) -> None:
        self.started = True

    def poll(self, timeout: float) -> Changed | None:
        # An error stays on the socket, as pyudev raises before anything is received.
        if self.problem is None and self.devices:
            device = self.devices.pop(0)
            if not isinstance(device, OSError):
                return device
            self.problem = device
        if self.problem is not None:
            raise self.problem
        return None


Listen = Callable[..., DiskEvents]


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Listen:
    """Events by the first of the monitors given, and by the next where that fails."""

    def by(*monitors: Monitor | OSError) -> DiskEvents:
        left = list(monitors)

        def from_netlink(_context: object) -> Monitor:
            monitor = left.pop(0)
            if isinstance(monitor, OSError):
                raise monitor
            return monitor

        (tmp_path / "control").write_bytes(b"")
        monkeypatch.setattr(pyudev, "Context", lambda: "context")
        monkeypatch.setattr(pyudev.Monitor, "from_netlink", from_netlink)
        events = DiskEvents.open(tmp_path / "control")
        assert events is not None
        return events

    return by


def lost() -> OSError:
    return OSError(105, "No buffer space available")


def test_events_of_logical_volumes_do_not_count(listen: Listen) -> None:
    monitor = Monitor(
        Changed("add", "/dev/sdb"),
        None,
        Changed("change", "/dev/dm-0", DM_UUID="LVM-abc"),
        None,
        Changed("change", "/dev/dm-1", DM_UUID="CRYPT-abc"),
    )
    events = listen(monitor)
    assert monitor.started
    found = [events.wait(0.0) for _ in range(4)]
    assert found == [{DiskEvent()}, set(), {DiskEvent("/dev/dm-1")}, set()]


def test_all_pending_events_are_read_at_once(listen: Listen) -> None:
    sent = [Changed("change", f"/dev/sd{n % 3}") for n in range(300)]
    events = listen(Monitor(*sent, Changed("remove", "/dev/sda")))
    every = {DiskEvent("/dev/sd0"), DiskEvent("/dev/sd1"), DiskEvent("/dev/sd2"), DiskEvent()}
    assert events.wait(0.0) == every
    assert events.wait(0.0) == set()


def test_a_wait_ends_though_events_do_not(monkeypatch: pytest.MonkeyPatch, listen: Listen) -> None:
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.05)
    monitor = Monitor()
    monkeypatch.setattr(monitor, "poll", lambda timeout: Changed("change", "/dev/sda"))
    events = listen(monitor)
    assert events.wait(0.0) == {DiskEvent("/dev/sda")}


def test_after_lost_events_another_socket_is_opened(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Monitor(Changed("change", "/dev/sda"), lost()), Monitor(None)
    events = listen(first, second)
    assert events.wait(0.0) == {DiskEvent()}, "any disk may have changed"
    second.devices += [Changed("change", "/dev/sdb"), None]
    assert [events.wait(0.0) for _ in range(3)] == [set(), {DiskEvent("/dev/sdb")}, set()]
    assert second.started
    assert caplog.text.count("are lost") == 1


def test_a_socket_that_cannot_be_opened_is_retried_at_each_turn(
    monkeypatch: pytest.MonkeyPatch, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    none = OSError(24, "Too many open files")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    last = Monitor(Changed("change", "/dev/sdb"))
    events = listen(Monitor(lost()), none, none, last)
    assert [events.wait(2.0) for _ in range(4)] == [
        {DiskEvent()},
        set(),
        {DiskEvent()},
        {DiskEvent("/dev/sdb")},
    ]
    assert slept == [2.0, 2.0]
    assert caplog.text.count("Too many open files") == 1


def test_events_of_a_created_and_removed_logical_volume_do_not_count(listen: Listen) -> None:
    # As udev sent them of lvcreate and lvremove; then the node is another's.
    sent = [
        Changed("add", "/dev/dm-6"),
        Changed("change", "/dev/dm-6", DM_UUID="LVM-abc"),
        Changed("remove", "/dev/dm-6", DM_UUID="LVM-abc"),
        Changed("remove", "/dev/dm-6"),
        Changed("add", "/dev/dm-6"),
        Changed("change", "/dev/dm-6", DM_UUID="mpath-abc"),
        Changed("remove", "/dev/dm-6"),
    ]
    one_by_one = [each for one in sent for each in (one, None)]
    events = listen(Monitor(*one_by_one))
    found: list[object] = [events.wait(0.0) for _ in sent]
    assert found == [set()] * 5 + [{DiskEvent("/dev/dm-6")}, {DiskEvent()}]


def test_without_udev_or_its_library_there_are_no_events(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise ImportError("No library named udev")

    assert DiskEvents.open(tmp_path / "control") is None
    (tmp_path / "control").write_bytes(b"")
    monkeypatch.setattr(pyudev, "Context", missing)
    assert DiskEvents.open(tmp_path / "control") is None
    assert "No library named udev" in caplog.text
