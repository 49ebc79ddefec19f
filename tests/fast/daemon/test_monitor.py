"""The pages for probes and scrapers: what they answer, and that callers cannot block them."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import configured
import expect
import pytest
from fakes import known as fake_known
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from fast.daemon.conftest import Start
from serving import machine
from started import page

from agent.core import errors
from agent.daemon import monitor
from agent.daemon.monitor import Monitor, Page
from agent.daemon.server import Service
from agent.groups.node_groups import VolumeGroups
from agent.operations import preflight
from agent.operations.storage_health import Readiness
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from agent.settings.values import Address
from agent.volumes import reports
from agent.volumes.reports import MONITOR_AGE_SECONDS, Reports
from agent.work.locks import Admission
from mount import mount_errors as mount_errors
from mount.command import Result

HERE = Address("127.0.0.1", 0)
Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve pages, each made by a function, and return the port."""
    started: list[Monitor] = []

    def one(address: Address = HERE, **pages: Callable[[], bytes]) -> int:
        named = {f"/{name}": Page(make) for name, make in pages.items()}
        started.append(Monitor(address, named))
        return started[-1].start()

    yield one
    for running in started:
        running.stop()


def test_a_page_is_made_anew_for_each_caller(serve: Serve) -> None:
    count = iter(range(10))
    port = serve(count=lambda: str(next(count)).encode())
    assert [page(port, "/count"), page(port, "/count?x=1")] == [(200, "0"), (200, "1")]


def test_an_unknown_page_names_the_known_ones(serve: Serve) -> None:
    port = serve(metrics=lambda: b"")
    assert page(port, "/") == (404, "see /metrics\n")


def test_a_page_that_fails_is_logged_and_the_next_is_answered(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise ValueError("a mistake")

    port = serve(broken=broken, well=lambda: b"ok\n")
    status, text = page(port, "/broken")
    assert status == 500
    assert "mistake" not in text
    assert "a mistake" in caplog.text
    assert page(port, "/well") == (200, "ok\n")


def test_an_address_that_cannot_be_used_is_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for address in (Address("127.0.0.1", port), Address("300.0.0.1", 0)):
            assert serve(address) == 0
            assert str(address) in caplog.text


def test_without_a_host_every_address_is_served(serve: Serve) -> None:
    port = serve(Address("", 0), well=lambda: b"ok\n")
    assert page(port, "/well") == (200, "ok\n")
    if socket.has_dualstack_ipv6():
        assert page(port, "/well", "::1") == (200, "ok\n")


@pytest.mark.parametrize(("callers", "seconds"), [(10, 60.0), (40, 0.2)])
def test_silent_callers_hold_few_threads_and_others_are_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, callers: int, seconds: float
) -> None:
    monkeypatch.setattr(monitor._Handler, "timeout", seconds)
    port = serve(well=lambda: b"ok\n")
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(callers)]
    assert page(port, "/well") == (200, "ok\n")
    workers = [one for one in threading.enumerate() if "process_request" in one.name]
    assert len(workers) <= monitor._READING + monitor._PER_PAGE
    for connection in idle:
        connection.close()


def test_a_caller_that_goes_away_is_not_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    gone = threading.Event()

    def slow() -> bytes:
        assert gone.wait(20)
        return b"x" * (8 << 20)

    port = serve(slow=slow, well=lambda: b"ok\n")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
    gone.set()
    assert page(port, "/well") == (200, "ok\n")
    assert caplog.text == ""


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """At the latest when the test ends."""
    ended = threading.Event()
    yield ended
    ended.set()


def test_callers_of_a_hanging_page_leave_the_others_answered(
    serve: Serve, over: threading.Event
) -> None:
    port = serve(metrics=lambda: b"late" * over.wait(60), healthz=lambda: b"ok\n")
    with ThreadPoolExecutor(2 * monitor._PER_PAGE) as scrapers:
        scrapes = [scrapers.submit(page, port, "/metrics") for _ in range(2 * monitor._PER_PAGE)]
        done = islice(as_completed(scrapes, 20), monitor._PER_PAGE)
        assert {one.result()[0] for one in done} == {503}
        for _ in range(9):
            assert page(port, "/healthz") == (200, "ok\n")
            assert page(port, "/metrics") == (503, "4 callers wait for it already\n")
        assert page(port, "/none")[0] == 404
        assert sum(not one.done() for one in scrapes) == monitor._PER_PAGE
        over.set()


def test_a_caller_without_a_thread_is_disconnected_and_the_next_is_answered(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    port = serve(well=lambda: b"ok\n")
    with expect.no_threads():
        for _ in range(2 * (monitor._READING + monitor._PER_PAGE)):
            with pytest.raises(OSError):  # noqa: PT011 - closed, or reset
                page(port, "/well")
    assert page(port, "/well") == (200, "ok\n")
    assert "cannot answer" in caplog.text


def test_the_end_does_not_wait_for_what_hangs(
    monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    monkeypatch.setattr(monitor._Handler, "timeout", 60)
    begun = threading.Event()

    def hang() -> bytes:
        begun.set()
        over.wait(60)
        return b""

    running = Monitor(HERE, {"/metrics": Page(hang)})
    port = running.start()
    # These wait for the page, and those say nothing.
    asking = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
    for one in asking:
        one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert begun.wait(20)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
    began = time.monotonic()
    running.stop()
    assert time.monotonic() - began < 20
    for one in (*asking, *silent):
        one.close()


# Health


pytestmark = pytest.mark.groups(data=[10])


def test_the_process_is_healthy_while_it_answers_over_its_socket(
    config: Config, fake: FakeHost, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_PATIENCE_SECONDS", 1.0)
    port = serve(healthz=monitor.healthz(config.endpoint))
    status, text = page(port, "/healthz")
    assert status == 503
    assert str(config.endpoint) in text

    service = Service(config, machine(fake), fake.lvm)
    service.start(config.endpoint)
    assert page(port, "/healthz") == (200, "ok\n")
    assert fake.commands == []
    service.stop()


def readiness(config: Config, fake: FakeHost, known: Reports, root: Path = Path("/")) -> Readiness:
    node = preflight.Node(Configuration(config), fake.kernel, fake.run, known.fresh, root)
    return Readiness(known, node, Admission())


def test_the_node_is_ready_when_its_groups_are_there_and_asked_once_a_minute(
    config: Config, fake: FakeHost, serve: Serve, tmp_path: Path
) -> None:
    known = fake_known.reports(fake.lvm2, "data", lvm=fake.lvm)
    node = readiness(config, fake, known, tmp_path)
    port = serve(readyz=monitor.readyz(node.check))
    control = tmp_path / "dev/mapper/control"
    control.parent.mkdir(parents=True)
    status, text = page(port, "/readyz")
    assert (status, "device-mapper does not answer" in text) == (503, True)
    control.write_bytes(b"")
    for _ in range(3):
        assert page(port, "/readyz") == (200, "ok\n")
    assert len(fake.commands) == 1
    node._admission.close()
    assert node.probe() is False
    assert "has not answered yet" in page(port, "/readyz")[1]


def test_an_absent_group_costs_no_command_until_a_disk_comes(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.lvm2.groups.clear()
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    known = fake_known.reports(fake.lvm2, "data", lvm=fake.lvm)
    for minute in range(1, 10):
        now[0] = 60.0 * minute
        known.seen(MONITOR_AGE_SECONDS)
    assert fake.commands == []
    # A disk came, and the group is there.
    known.outdate()
    fake.lvm2.add_group("data", [10])
    for _ in range(3):
        now[0] += 61
        assert "data" in known.seen(MONITOR_AGE_SECONDS).groups
    assert len(fake.commands) == 1


def test_a_hanging_disk_is_the_reason_why_the_node_is_not_ready(
    config: Config, fake: FakeHost, well: None
) -> None:
    disks = FakeDisks(fake.lvm2, fake.block)
    disks.hanging.add("/dev/sdb")
    fake.lvm2.groups.clear()
    known = Reports(VolumeGroups(fake.lvm, disks, fake.lvm2, configured.on_groups("data")))
    with pytest.raises(errors.NotReady, match="/dev/sdb"):
        readiness(config, fake, known).check()


def test_a_failing_lvm2_is_the_reason_why_the_node_is_not_ready(
    config: Config, fake: FakeHost, well: None
) -> None:
    fake.intercept = lambda words: Result(5, "", "a disk hangs")
    node = readiness(config, fake, fake_known.reports(fake.lvm2, "data", lvm=fake.lvm))
    for _ in range(2):
        with pytest.raises(errors.NotReady, match="a disk hangs"):
            node.check()
    assert node.probe()


def test_a_hanging_lvm2_delays_a_scrape_by_seconds_only(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering = threading.Event()
    asked: list[Sequence[str]] = []

    def hang(words: Sequence[str]) -> None:
        asked.append(words)
        assert answering.wait(60)

    fake.intercept = hang
    monkeypatch.setattr(reports, "_MONITOR_WAIT_SECONDS", 0.05)
    known = fake_known.reports(fake.lvm2, "data", lvm=fake.lvm)
    for _ in range(3):
        with pytest.raises(mount_errors.CommandTimedOut):
            known.seen(MONITOR_AGE_SECONDS)
    assert len(asked) == 1
    answering.set()
    monkeypatch.setattr(reports, "_MONITOR_WAIT_SECONDS", 20.0)
    assert "data" in known.seen(MONITOR_AGE_SECONDS).groups
    assert len(asked) == 1


# The whole


@pytest.mark.parametrize("setting", ["metrics_address", "health_address"])
def test_the_service_serves_its_pages_until_it_ends(
    config: Config, start: Start, setting: str
) -> None:
    address: dict[str, Any] = {setting: HERE}
    running = start(replace(config, **address), recovers=False)
    assert running.page("/healthz") == (200, "ok\n")
    status, text = running.page("/metrics")
    if setting == "metrics_address":
        assert status == 200
        count = 'carver_commands_total{outcome="OK",program="lvm",subcommand="fullreport"} 1.0'
        assert count in text
        assert 'carver_calls_total{code="OK",method="GetPluginInfo"} 1.0' in text
        assert 'carver_registration{state="off"} 1.0' in text
    else:
        assert status == 404
    assert running.page("/readyz")[0] in (200, 503)
    running.end()
    with pytest.raises(ConnectionRefusedError):
        running.page("/healthz")
