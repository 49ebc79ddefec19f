"""The report that those who watch glimpse at is read anew when a disk changed, or with time."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pyudev
from fakes.host import FakeHost
from fakes.known import inventory

from agent.engine.engines import Engines
from agent.engine.inventory import Inventory
from agent.engine.refresh import Watch
from lvm.events import DiskEvent, DiskEvents


class Events:
    """What udev tells, one answer for each wait; then it is over."""

    def __init__(self, *answers: DiskEvent | None) -> None:
        self.answers = list(answers)
        self.over = threading.Event()
        self.go_on = threading.Event()

    def wait(self, _seconds: float) -> DiskEvent | None:
        if not self.answers:
            self.over.set()
            self.go_on.wait(20)
            return None
        return self.answers.pop(0)


class Known(Inventory):
    """Counts what the thread asks of it."""

    def __init__(self, fake: FakeHost) -> None:
        super().__init__(Engines(fake.lvm, fake.disks, fake.devices, []), fake.devices)
        self.outdated: list[str | None] = []
        self.renewed: list[float] = []
        self.turned = threading.Event()
        self.fails = False

    def outdate(self, written: str | None = None) -> None:
        self.outdated.append(written)

    def renew(self, due_seconds: float) -> None:
        self.renewed.append(due_seconds)
        self.turned.set()
        if self.fails:
            raise RuntimeError("no thread can be made")


@pytest.fixture
def known(tmp_path: Path) -> Known:
    return Known(FakeHost(tmp_path))


def run(watch: Watch, until: threading.Event, then: Callable[[], object]) -> None:
    watch.start()
    assert until.wait(20)
    watch.stop()
    then()
    watch._thread.join(20)
    assert not watch._thread.is_alive()


def test_a_disk_that_changed_makes_the_report_old(known: Known) -> None:
    events: Any = Events(DiskEvent(), None, DiskEvent("/dev/sdb"))
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
        known.read()
    assert caplog.text.count("volume group other is not on this node") == 1
    assert "data" not in caplog.text
    fake.lvm2.add_group("other")
    for _ in range(3):
        known.read()
    assert caplog.text.count("volume group other is on this node again") == 1


def test_a_look_that_fails_is_logged_and_tried_again(
    known: Known, caplog: pytest.LogCaptureFixture
) -> None:
    known.fails = True
    events: Any = Events(None, None)
    run(Watch(known, lambda: events), events.over, events.go_on.set)
    assert len(known.renewed) >= 2
    assert "no thread can be made" in caplog.text


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

    def filter_by(self, subsystem: str) -> None:
        assert subsystem == "block"

    def start(self) -> None:
        self.started = True

    def poll(self, timeout: float) -> Changed | None:
        device = self.devices.pop(0)
        if isinstance(device, OSError):
            raise device
        return device


def listening(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> DiskEvents | None:
    (tmp_path / "control").write_bytes(b"")
    monkeypatch.setattr(pyudev, "Context", lambda: "context")
    monkeypatch.setattr(pyudev.Monitor, "from_netlink", lambda _context: monitor)
    return DiskEvents.open(tmp_path / "control")


def test_events_of_disks_count_and_those_of_logical_volumes_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monitor = Monitor(
        Changed("add", "/dev/sdb"),
        Changed("change", "/dev/dm-0", DM_UUID="LVM-abc"),
        Changed("change", "/dev/dm-1", DM_UUID="CRYPT-abc"),
        None,
        OSError(105, "No buffer space available"),
    )
    events = listening(monitor, monkeypatch, tmp_path)
    assert events is not None
    assert monitor.started
    found = [events.wait(0.0) for _ in range(5)]
    assert found == [DiskEvent(), None, DiskEvent("/dev/dm-1"), None, DiskEvent()]


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
    events = listening(Monitor(*told), monkeypatch, tmp_path)
    assert events is not None
    found = [events.wait(0.0) for _ in told]
    assert found == [None] * 5 + [DiskEvent("/dev/dm-6"), DiskEvent()]


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
