"""The pages for probes and scrapers: what they answer, and that they can harm nobody."""

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import islice
from pathlib import Path

import configured
import pytest
from fakes import known as fake_known
from fakes.disks import FakeDisks
from fakes.host import FakeHost

from agent.core import errors, inventory
from agent.core.host import Host
from agent.core.inventory import MONITOR_AGE_SECONDS, Inventory
from agent.core.locks import Admission
from agent.core.settings import Config
from agent.core.values import Address
from agent.core.volume_groups import VolumeGroups
from agent.daemon import monitor, process
from agent.daemon.monitor import Monitor, Page
from agent.daemon.server import Service
from agent.operations import preflight
from agent.operations.storage_health import Readiness
from mount import errors as mount_errors
from mount.command import Result

HERE = Address("127.0.0.1", 0)
Serve = Callable[..., int]
Whole = Callable[[Config], tuple[list[int], Callable[[], None]]]


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


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_a_page_is_made_anew_for_each_caller(serve: Serve) -> None:
    count = iter(range(10))
    port = serve(count=lambda: str(next(count)).encode())
    assert [get(port, "/count"), get(port, "/count?x=1")] == [(200, "0"), (200, "1")]


def test_a_page_that_is_none_names_those_that_are(serve: Serve) -> None:
    port = serve(metrics=lambda: b"")
    assert get(port, "/") == (404, "see /metrics\n")


def test_a_page_that_fails_is_logged_and_the_next_is_answered(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise ValueError("what nobody thought of")

    port = serve(broken=broken, well=lambda: b"ok\n")
    status, text = get(port, "/broken")
    assert status == 500
    assert "nobody" not in text
    assert "what nobody thought of" in caplog.text
    assert get(port, "/well") == (200, "ok\n")


def test_an_address_that_is_taken_is_told_and_ends_nothing(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve(Address("127.0.0.1", port)) == 0
    assert f"127.0.0.1:{port}" in caplog.text


def test_a_host_that_has_no_address_is_told_and_ends_nothing(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    assert serve(Address("300.0.0.1", 0)) == 0
    assert "300.0.0.1" in caplog.text


def test_without_a_host_every_address_is_served(serve: Serve) -> None:
    port = serve(Address("", 0), well=lambda: b"ok\n")
    assert get(port, "/well") == (200, "ok\n")
    if socket.has_dualstack_ipv6():
        assert get(port, "/well", "::1") == (200, "ok\n")


def test_callers_who_say_nothing_hold_few_threads_and_are_hung_up_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor._Handler, "timeout", 0.2)
    port = serve(well=lambda: b"ok\n")
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
    assert get(port, "/well") == (200, "ok\n")
    workers = [one for one in threading.enumerate() if one.name.startswith("monitor_")]
    assert len(workers) <= 4
    for connection in idle:
        connection.close()


def test_a_caller_that_goes_away_is_nobody_s_trouble(
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
    assert get(port, "/well") == (200, "ok\n")
    assert caplog.text == ""


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """At the latest when the test ends."""
    ended = threading.Event()
    yield ended
    ended.set()


def test_however_many_wait_for_a_page_that_hangs_the_others_are_answered(
    serve: Serve, over: threading.Event
) -> None:
    port = serve(metrics=lambda: b"late" * over.wait(60), healthz=lambda: b"ok\n")
    with ThreadPoolExecutor(2 * monitor._PER_PAGE) as scrapers:
        scrapes = [scrapers.submit(get, port, "/metrics") for _ in range(2 * monitor._PER_PAGE)]
        # All that are too many are told so.
        done = islice(as_completed(scrapes, 20), monitor._PER_PAGE)
        assert {one.result()[0] for one in done} == {503}
        for _ in range(9):
            assert get(port, "/healthz") == (200, "ok\n")
            assert get(port, "/metrics") == (503, "4 callers wait for it already\n")
        assert get(port, "/none")[0] == 404
        assert sum(not one.done() for one in scrapes) == monitor._PER_PAGE
        over.set()


def test_a_caller_for_whom_there_is_no_thread_is_hung_up_on_and_the_next_is_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = serve(well=lambda: b"ok\n")

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        for _ in range(2 * monitor._READING):
            with pytest.raises(OSError):  # noqa: PT011 - closed, or reset
                get(port, "/well")
    assert get(port, "/well") == (200, "ok\n")
    assert "cannot answer" in caplog.text


def test_the_end_waits_for_those_who_are_answered_but_not_for_what_hangs(
    monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    monkeypatch.setattr(monitor, "_ENDING_SECONDS", 0.2)
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


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [10])
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured.carver(tmp_path)


def test_the_process_is_healthy_while_it_answers_over_its_socket(
    config: Config, fake: FakeHost, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_PATIENCE_SECONDS", 1.0)
    port = serve(healthz=monitor.healthz(config.endpoint))
    status, text = get(port, "/healthz")
    assert status == 503
    assert str(config.endpoint) in text

    service = Service(config, Host(fake.run, fake.kernel, fake.devices, fake.disks), fake.lvm)
    service.start(config.endpoint)
    assert get(port, "/healthz") == (200, "ok\n")
    assert fake.commands == []
    service.stop()


def test_the_node_is_ready_when_its_groups_are_there_and_asked_once_a_minute(
    config: Config, fake: FakeHost, serve: Serve, tmp_path: Path
) -> None:
    control = tmp_path / "dev/mapper/control"
    control.parent.mkdir(parents=True)
    control.write_bytes(b"")
    known = fake_known.inventory(fake.lvm2, "data", lvm=fake.lvm)
    node = preflight.Node(config, fake.kernel, fake.run, known.state, tmp_path)
    port = serve(readyz=monitor.readyz(Readiness(known, node, Admission()).check))
    for _ in range(3):
        assert get(port, "/readyz") == (200, "ok\n")
    assert len(fake.commands) == 1


def test_a_node_without_any_of_the_groups_is_ready_and_lvm2_is_not_asked(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.lvm2.groups.clear()
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    known = fake_known.inventory(fake.lvm2, "data", lvm=fake.lvm)
    for minute in range(1, 10):
        now[0] = 60.0 * minute
        known.state(max_age=MONITOR_AGE_SECONDS)
    assert fake.commands == []
    # A disk came, and the group is there.
    known.outdate()
    fake.lvm2.add_group("data", [10])
    for _ in range(3):
        now[0] += 61
        assert "data" in known.state(max_age=MONITOR_AGE_SECONDS).groups
    assert len(fake.commands) == 1


def test_a_disk_that_does_not_answer_is_a_reason_for_not_being_ready(
    config: Config, fake: FakeHost, well: None
) -> None:
    disks = FakeDisks(fake.lvm2, fake.block)
    disks.hanging.add("/dev/sdb")
    fake.lvm2.groups.clear()
    known = Inventory(VolumeGroups(fake.lvm, disks, fake.lvm2, ["data"]), fake.lvm2)
    node = preflight.Node(config, fake.kernel, fake.run, known.state)
    with pytest.raises(errors.NotReady, match="/dev/sdb"):
        Readiness(known, node, Admission()).check()


def test_a_sick_lvm2_is_the_reason_for_not_being_ready(
    config: Config, fake: FakeHost, well: None
) -> None:
    fake.intercept = lambda words: Result(5, "", "a disk hangs")
    known = fake_known.inventory(fake.lvm2, "data", lvm=fake.lvm)
    node = preflight.Node(config, fake.kernel, fake.run, known.state)
    readiness = Readiness(known, node, Admission())
    for _ in range(2):
        with pytest.raises(errors.NotReady, match="a disk hangs"):
            readiness.check()
    assert readiness.probe()


def test_an_lvm2_that_hangs_keeps_those_who_watch_waiting_for_seconds_only(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering = threading.Event()
    asked: list[Sequence[str]] = []

    def hang(words: Sequence[str]) -> None:
        asked.append(words)
        assert answering.wait(60)

    fake.intercept = hang
    monkeypatch.setattr(inventory, "_MONITOR_WAIT_SECONDS", 0.05)
    known = fake_known.inventory(fake.lvm2, "data", lvm=fake.lvm)
    for _ in range(3):
        with pytest.raises(mount_errors.CommandTimedOut):
            known.state(max_age=MONITOR_AGE_SECONDS)
    assert len(asked) == 1
    answering.set()
    monkeypatch.setattr(inventory, "_MONITOR_WAIT_SECONDS", 20.0)
    assert "data" in known.state(max_age=MONITOR_AGE_SECONDS).groups
    assert len(asked) == 1


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node on which all is well that lvm2 is not asked about."""
    monkeypatch.setattr(preflight, "CHEAP", ())


# The whole


@pytest.fixture
def whole(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Whole:
    """Start the service; returns the ports of its pages, and what ends it."""

    def start(watched: Config) -> tuple[list[int], Callable[[], None]]:
        ready, ended, ports = threading.Event(), threading.Event(), list[int]()
        listen = Monitor.start
        monkeypatch.setattr(Monitor, "start", lambda self: ports.append(listen(self)))
        monkeypatch.setattr(process, "notify", lambda state: ready.set())
        monkeypatch.setattr(process, "_until_signal", lambda: ended)
        host = Host(fake.run, fake.kernel, fake.devices, fake.disks)
        running = threading.Thread(target=process.serve, args=(watched, host))
        running.start()
        assert ready.wait(20)

        def end() -> None:
            ended.set()
            running.join()

        return ports, end

    return start


def test_health_is_served_without_metrics(config: Config, whole: Whole) -> None:
    [port], end = whole(replace(config, health_address=HERE))
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/readyz")[0] in (200, 503)
    assert get(port, "/metrics")[0] == 404
    end()
    with pytest.raises(ConnectionRefusedError):
        get(port, "/healthz")


def test_the_service_serves_the_three_pages_until_it_ends(config: Config, whole: Whole) -> None:
    [port], end = whole(replace(config, metrics_address=HERE))
    assert get(port, "/healthz") == (200, "ok\n")
    status, text = get(port, "/metrics")
    assert status == 200
    assert 'carver_commands_total{outcome="OK",program="lvm",subcommand="fullreport"} 1.0' in text
    assert 'carver_calls_total{code="OK",method="GetPluginInfo"} 1.0' in text
    assert 'carver_registration{state="off"} 1.0' in text
    assert get(port, "/readyz")[0] in (200, 503)

    end()
    with pytest.raises(ConnectionRefusedError):
        get(port, "/healthz")
