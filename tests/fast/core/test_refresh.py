"""The report that those who watch glimpse at is read anew when a disk changed, or with time."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import expect
import pytest
import pyudev
from fakes.host import FakeHost
from fakes.known import inventory

from agent.core.inventory import Inventory
from agent.core.volume_groups import VolumeGroups
from agent.daemon import startup
from agent.daemon.startup import Watch
from lvm import events as module
from lvm.events import DiskEvent, DiskEvents
from lvm.report import Group
from mount.command import Result


class Events:
    """What udev tells, one answer for each wait; then it is over."""

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


class Known(Inventory):
    """Counts what the thread asks of it."""

    def __init__(self, fake: FakeHost) -> None:
        super().__init__(VolumeGroups(fake.lvm, fake.disks, fake.devices, []), fake.devices)
        self.outdated: list[str | None] = []
        self.renewed: list[float] = []
        self.turned = threading.Event()
        self.fails = False

    def outdate(self, written: str | None = None) -> None:
        self.outdated.append(written)

    def refresh(self, max_age: float) -> list[Future[Group | None]]:
        self.renewed.append(max_age)
        self.turned.set()
        if self.fails:
            raise RuntimeError("no thread can be made")
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


def test_a_disk_that_changed_makes_the_report_old(known: Known) -> None:
    events: Any = Events({DiskEvent()}, set(), {DiskEvent("/dev/sdb")})
    run(Watch(known, lambda: events), events.over, events.go_on.set)
    assert known.outdated == [None, "/dev/sdb"]
    assert set(known.renewed) == {60.0}


def test_without_udev_the_clock_alone_tells(known: Known) -> None:
    run(Watch(known, lambda: None), known.turned, lambda: None)
    assert known.outdated == []
    assert set(known.renewed) == {60.0}


def test_a_group_that_is_not_there_is_told_once_and_once_that_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeHost(tmp_path)
    fake.lvm2.add_group("data")
    known = inventory(fake.lvm2, "data", "other")
    for _ in range(3):
        known.state()
    assert caplog.text.count("volume group other is not on this node") == 1
    assert "data" not in caplog.text
    fake.lvm2.add_group("other")
    for _ in range(3):
        known.state()
    assert caplog.text.count("volume group other is on this node again") == 1


def test_a_look_that_fails_is_logged_and_tried_again(
    known: Known, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_TURN_SECONDS", 0.01)
    known.fails = True
    events: Any = Events(set(), set(), set())
    turns: list[None] = []
    watch = Watch(known, lambda: events, lambda: turns.append(None))
    watch.start()
    # What else is to be done is done all the same.
    expect.soon(lambda: len(known.renewed) >= 3 and len(turns) >= 3)
    watch.stop()
    events.go_on.set()
    assert len([one for one in caplog.messages if "LVM is not watched" in one]) == 1


def test_whatever_udev_s_library_raises_the_clock_goes_on(
    known: Known, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_TURN_SECONDS", 0.01)
    events: Any = Events(ValueError("an odd device"), {DiskEvent("/dev/sdb")})
    run(Watch(known, lambda: events), events.over, events.go_on.set)
    assert known.outdated == [None, "/dev/sdb"], "what it told before may be lost"
    assert "an odd device" in caplog.text

    def fail() -> DiskEvents | None:
        raise AttributeError("an odd library")

    known.turned.clear()
    run(Watch(known, fail), known.turned, lambda: None)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[FakeHost, VolumeGroups, Inventory]]:
    """Two groups, looked at a minute ago, of which somebody glimpses."""
    fake = FakeHost(tmp_path)
    fake.lvm2.add_group("sick")
    fake.lvm2.add_group("sound")
    volume_groups = VolumeGroups(fake.lvm, fake.disks, fake.devices, ["sick", "sound"])
    known = Inventory(volume_groups, fake.devices)
    known.state()
    for one in volume_groups:
        one.time_seconds -= 61
        one.tried_seconds -= 61
        fake.lvm2.groups[one.name].seqno += 1
    fake.commands.clear()
    yield fake, volume_groups, known
    volume_groups.stop()


def test_a_group_that_fails_at_once_is_asked_once_a_minute_as_one_that_answers(
    two: tuple[FakeHost, VolumeGroups, Inventory],
) -> None:
    fake, volume_groups, known = two
    asked: list[Sequence[str]] = []
    [sick] = volume_groups.lvm("sick").devices

    def refuse(words: Sequence[str]) -> Result | None:
        if sick not in " ".join(words):
            return None
        asked.append(words)
        return Result(5, "", "  Cannot process volume group sick")

    fake.intercept = refuse
    for _ in range(30):
        known.keep_fresh()
        wait(known.refresh(60.0), 20)
    assert len(asked) == 1
    assert len(fake.commands) == 1


def test_while_a_group_hangs_the_other_is_looked_at_and_nothing_waits(
    two: tuple[FakeHost, VolumeGroups, Inventory],
) -> None:
    fake, volume_groups, known = two
    over = threading.Event()
    [sick] = volume_groups.lvm("sick").devices

    def hang(words: Sequence[str]) -> None:
        if sick in " ".join(words):
            assert over.wait(20)

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
    """pyudev's, with the devices that it will tell of."""

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


def listening(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *monitors: Monitor | OSError
) -> DiskEvents:
    """By the first of the monitors, then, if need be, by the next."""
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


def lost() -> OSError:
    return OSError(105, "No buffer space available")


def test_events_of_disks_count_and_those_of_logical_volumes_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monitor = Monitor(
        Changed("add", "/dev/sdb"),
        None,
        Changed("change", "/dev/dm-0", DM_UUID="LVM-abc"),
        None,
        Changed("change", "/dev/dm-1", DM_UUID="CRYPT-abc"),
    )
    events = listening(monkeypatch, tmp_path, monitor)
    assert monitor.started
    found = [events.wait(0.0) for _ in range(4)]
    assert found == [{DiskEvent()}, set(), {DiskEvent("/dev/dm-1")}, set()]


def test_all_events_that_are_there_are_heard_at_once_and_each_of_them_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = [Changed("change", f"/dev/sd{n % 3}") for n in range(300)]
    events = listening(monkeypatch, tmp_path, Monitor(*told, Changed("remove", "/dev/sda")))
    every = {DiskEvent("/dev/sd0"), DiskEvent("/dev/sd1"), DiskEvent("/dev/sd2"), DiskEvent()}
    assert events.wait(0.0) == every
    assert events.wait(0.0) == set()


def test_events_without_end_do_not_hold_who_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.05)
    monitor = Monitor()
    monkeypatch.setattr(monitor, "poll", lambda timeout: Changed("change", "/dev/sda"))
    events = listening(monkeypatch, tmp_path, monitor)
    assert events.wait(0.0) == {DiskEvent("/dev/sda")}


def test_after_more_events_than_the_socket_could_hold_others_are_heard_by_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Monitor(Changed("change", "/dev/sda"), lost()), Monitor(None)
    events = listening(monkeypatch, tmp_path, first, second)
    assert events.wait(0.0) == {DiskEvent()}, "any disk may have changed"
    second.devices += [Changed("change", "/dev/sdb"), None]
    assert [events.wait(0.0) for _ in range(3)] == [set(), {DiskEvent("/dev/sdb")}, set()]
    assert second.started
    assert caplog.text.count("are lost") == 1


def test_where_nobody_can_listen_anew_it_is_tried_at_each_turn_and_costs_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    none = OSError(24, "Too many open files")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    last = Monitor(Changed("change", "/dev/sdb"))
    events = listening(monkeypatch, tmp_path, Monitor(lost()), none, none, last)
    assert [events.wait(2.0) for _ in range(4)] == [
        {DiskEvent()},
        set(),
        {DiskEvent()},
        {DiskEvent("/dev/sdb")},
    ]
    assert slept == [2.0, 2.0]
    assert caplog.text.count("Too many open files") == 1


def test_the_events_of_a_logical_volume_that_comes_and_goes_do_not_count_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As udev told them of lvcreate and lvremove; then the node is another's.
    told = [
        Changed("add", "/dev/dm-6"),
        Changed("change", "/dev/dm-6", DM_UUID="LVM-abc"),
        Changed("remove", "/dev/dm-6", DM_UUID="LVM-abc"),
        Changed("remove", "/dev/dm-6"),
        Changed("add", "/dev/dm-6"),
        Changed("change", "/dev/dm-6", DM_UUID="mpath-abc"),
        Changed("remove", "/dev/dm-6"),
    ]
    one_by_one = [each for one in told for each in (one, None)]
    events = listening(monkeypatch, tmp_path, Monitor(*one_by_one))
    found: list[object] = [events.wait(0.0) for _ in told]
    assert found == [set()] * 5 + [{DiskEvent("/dev/dm-6")}, {DiskEvent()}]


def test_where_udev_does_not_run_there_are_no_events(tmp_path: Path) -> None:
    assert DiskEvents.open(tmp_path / "control") is None


def test_without_its_library_there_are_no_events(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise ImportError("No library named udev")

    (tmp_path / "control").write_bytes(b"")
    monkeypatch.setattr(pyudev, "Context", missing)
    assert DiskEvents.open(tmp_path / "control") is None
    assert "No library named udev" in caplog.text
