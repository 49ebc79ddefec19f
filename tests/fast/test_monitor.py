"""The pages for probes and scrapers: what they answer, and that they can harm nobody."""

import http.client
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import configured
import pytest
from fakes.host import FakeHost

from agent import errors, monitor, preflight, server
from agent.config import Address, Config
from agent.host import Host
from agent.inventory import Inventory
from agent.monitor import Monitor, Page
from agent.readiness import Readiness
from agent.server import Service
from lvm.command import Result

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

    service = Service(config, Host(fake.run, fake.kernel, fake.devices), fake.lvm)
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
    known = Inventory(fake.lvm, fake.devices, ["data"])
    node = preflight.Node(config, fake.kernel, fake.run, known.read, tmp_path)
    port = serve(readyz=monitor.readyz(Readiness(known, node)))
    for _ in range(3):
        assert get(port, "/readyz") == (200, "ok\n")
    assert len(fake.commands) == 1

    fake.lvm2.groups.clear()
    known.read()
    status, text = get(port, "/readyz")
    assert (status, "data" in text) == (503, True)


def test_a_sick_lvm2_is_the_reason_for_not_being_ready(config: Config, fake: FakeHost) -> None:
    fake.intercept = lambda words: Result(5, "", "a disk hangs")
    known = Inventory(fake.lvm, fake.devices, ["data"])
    readiness = Readiness(known, preflight.Node(config, fake.kernel, fake.run, known.read))
    for _ in range(2):
        with pytest.raises(errors.NotReady, match="a disk hangs"):
            readiness.check_recent()


# The whole


def test_the_service_serves_the_three_pages_until_it_ends(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, ended, ports = threading.Event(), threading.Event(), list[int]()
    start = Monitor.start
    monkeypatch.setattr(Monitor, "start", lambda self: ports.append(start(self)))
    monkeypatch.setattr(server, "notify", lambda state: ready.set())
    monkeypatch.setattr(server, "_until_signal", lambda: ended)
    watched = replace(config, metrics_address=HERE)
    host = Host(fake.run, fake.kernel, fake.devices)
    running = threading.Thread(target=server.serve, args=(watched, host))
    running.start()
    assert ready.wait(20)

    [port] = ports
    assert get(port, "/healthz") == (200, "ok\n")
    status, text = get(port, "/metrics")
    assert status == 200
    assert 'carver_commands_total{outcome="OK",program="lvm",subcommand="fullreport"} 1.0' in text
    assert 'carver_calls_total{code="OK",method="GetPluginInfo"} 1.0' in text
    assert 'carver_registration{state="off"} 1.0' in text
    assert get(port, "/readyz")[0] in (200, 503)

    ended.set()
    running.join()
    with pytest.raises(ConnectionRefusedError):
        get(port, "/healthz")
