"""The registration socket: whose it is, what is said over it, and what becomes of refusals."""

import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import expect
import pytest
from fakes.kubelet import FakeKubelet, asked

from agent.core import errors, sockets
from agent.core.settings import DRIVER_NAME
from agent.daemon.registration import Registration, State
from proto import pluginregistration_pb2 as wire

ENDPOINT = Path("/var/lib/kubelet/plugins/lvm.csi.carver/csi.sock")
Start = Callable[[], Registration]


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    directory = tmp_path / "r"
    directory.mkdir()
    return directory


@pytest.fixture
def registration(registry: Path) -> Iterator[Registration]:
    """Not started yet."""
    made = Registration(registry, ENDPOINT, interval_seconds=0.02, retry_seconds=0.05)
    yield made
    made.stop()


@pytest.fixture
def start(registration: Registration) -> Start:
    def started() -> Registration:
        registration.start()
        return registration

    return started


def notify(registration: Registration, *, error: str = "") -> None:
    with asked(registration.socket) as plugin:
        status = wire.RegistrationStatus(plugin_registered=not error, error=error)
        plugin.NotifyRegistrationStatus(status, timeout=20)


def waiting(registration: Registration) -> Callable[[], bool]:
    return lambda: registration.state is State.WAITING


def test_kubelet_is_told_a_csi_driver_with_its_name_endpoint_and_version(start: Start) -> None:
    registration = start()
    expect.soon(waiting(registration))
    with asked(registration.socket) as plugin:
        info = plugin.GetInfo(wire.InfoRequest(), timeout=20)
    assert (info.type, info.name) == ("CSIPlugin", DRIVER_NAME)
    assert info.endpoint == str(ENDPOINT)
    assert list(info.supported_versions) == ["1.0.0"]


def test_the_socket_has_kubelet_s_form_of_name_and_is_root_s_alone(
    start: Start, registry: Path
) -> None:
    registration = start()
    expect.soon(waiting(registration))
    assert [path.name for path in registry.iterdir()] == ["lvm.csi.carver-reg.sock"]
    assert stat.S_IMODE(registration.socket.stat().st_mode) == 0o600


def test_what_kubelet_said_is_kept_and_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    registration = start()
    expect.soon(waiting(registration))
    notify(registration)
    assert registration.state is State.REGISTERED
    assert f"kubelet has registered {DRIVER_NAME}" in caplog.text


def test_a_refusal_is_logged_with_its_reason_and_tried_again_with_a_new_socket(
    start: Start, registry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet = FakeKubelet(registry)
    kubelet.refusal = "the API server does not answer"
    registration = start()

    def look_until_asked(times: int) -> bool:
        kubelet.look()
        return len(kubelet.asked) >= times

    expect.soon(lambda: look_until_asked(2))
    assert kubelet.drivers == {}
    assert "the API server does not answer" in caplog.text
    kubelet.refusal = ""
    # Kubelet calls the endpoint, which nobody serves here.
    kubelet._take = lambda path, info: ""  # type: ignore[method-assign]
    expect.soon(lambda: look_until_asked(3))
    assert registration.state is State.REGISTERED


def test_each_refusal_doubles_the_wait_and_a_success_ends_that(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = Registration(registry, ENDPOINT, retry_seconds=100)
    now = time.monotonic()

    def refused() -> float:
        status = wire.RegistrationStatus(error="no")
        registration.NotifyRegistrationStatus(status, None)  # type: ignore[arg-type]
        assert registration._retry_at is not None
        return round(registration._retry_at - now, -2)

    assert [refused() for _ in range(4)] == [100, 200, 300, 300]
    done = wire.RegistrationStatus(plugin_registered=True)
    registration.NotifyRegistrationStatus(done, None)  # type: ignore[arg-type]
    assert registration._retry_at is None
    assert refused() == 100


def test_readiness_waits_for_kubelet_s_answer(start: Start, registry: Path, tmp_path: Path) -> None:
    registration = start()
    expect.soon(waiting(registration))
    with pytest.raises(errors.NotReady, match=r"has not registered lvm\.csi\.carver \(waiting"):
        registration.check()
    notify(registration, error="no such path")
    with pytest.raises(errors.NotReady, match=r"has not registered"):
        registration.check()
    expect.soon(waiting(registration))
    notify(registration)
    registration.check()


def test_readiness_does_not_ask_what_only_another_registrar_knows(
    start: Start, registry: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(registry / f"{DRIVER_NAME}-reg.sock"))
        other.listen()
        registration = start()
        expect.soon(lambda: registration.state is State.TAKEN)
        registration.check()


def test_a_node_without_kubelet_s_directory_is_not_ready(tmp_path: Path) -> None:
    registration = Registration(tmp_path / "none", ENDPOINT)
    with pytest.raises(errors.NotReady, match=r"docs/troubleshooting\.md"):
        registration.check()


def test_a_stale_socket_is_replaced(start: Start, registry: Path) -> None:
    path = registry / f"{DRIVER_NAME}-reg.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    registration = start()
    expect.soon(waiting(registration))
    notify(registration)
    assert registration.state is State.REGISTERED


def test_waiting_is_said_only_when_the_socket_is_served(
    registration: Registration, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that another process left is there before, and nothing can be said over it."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(registry / f"{DRIVER_NAME}-reg.sock"))
    said: list[tuple[State, bool]] = []
    real = Path.rename

    def rename(self: Path, target: Path) -> None:
        said.append((registration.state, sockets.is_served(target)))
        real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    registration.start()
    expect.soon(waiting(registration))
    assert said == [(State.OFF, False)]
    notify(registration)


def test_an_answer_that_comes_as_soon_as_the_socket_is_there_is_kept(
    registration: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[threading.Thread] = []
    real = Path.rename

    def rename(self: Path, target: Path) -> None:
        real(self, target)
        answers.append(threading.Thread(target=notify, args=[registration]))
        answers[0].start()
        answers[0].join(0.5)

    monkeypatch.setattr(Path, "rename", rename)
    registration.start()
    expect.soon(lambda: answers and registration.state is not State.OFF)
    answers[0].join()
    assert registration.state is State.REGISTERED


def test_a_registrar_that_serves_the_socket_is_left_alone_and_followed_when_it_goes(
    start: Start, registry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = registry / f"{DRIVER_NAME}-reg.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1000)
        registration = start()
        expect.soon(lambda: registration.state is State.TAKEN)
        inode = path.stat().st_ino
        time.sleep(0.1)
        assert path.stat().st_ino == inode
    assert caplog.text.count("another process") == 1
    expect.soon(waiting(registration))
    notify(registration)


def test_a_registrar_that_takes_the_socket_over_keeps_it(start: Start, registry: Path) -> None:
    registration = start()
    expect.soon(waiting(registration))
    other = registry / "other"
    with socket.socket(socket.AF_UNIX) as taker:
        taker.bind(str(other))
        taker.listen(1000)
        other.rename(registration.socket)
        expect.soon(lambda: registration.state is State.TAKEN)
        registration.stop()
        assert registration.socket.exists()


def test_what_is_no_socket_is_left_untouched(start: Start, registry: Path) -> None:
    path = registry / f"{DRIVER_NAME}-reg.sock"
    path.write_text("data")
    registration = start()
    expect.soon(lambda: registration.state is State.TAKEN)
    registration.stop()
    assert path.read_text() == "data"


def test_a_node_without_kubelet_is_left_as_it_is_until_it_has_one(
    start: Start, registry: Path
) -> None:
    registry.rmdir()
    registration = start()
    time.sleep(0.1)
    assert registration.state is State.OFF
    assert not registry.exists()
    registry.mkdir()
    expect.soon(waiting(registration))


def test_a_socket_that_cannot_be_made_is_told_once_and_tried_again(
    start: Start,
    registry: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed: list[Path] = []

    def refuse(self: Path, mode: int) -> None:
        failed.append(self)
        raise PermissionError(13, os.strerror(13), str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", refuse)
        registration = start()
        expect.soon(lambda: len(failed) > 1)
        assert registration.state is State.OFF
    assert caplog.text.count("cannot make the registration socket") == 1
    expect.soon(waiting(registration))
    assert [path.name for path in registry.iterdir()] == [registration.socket.name]


def test_stopping_what_was_never_started_is_nothing(registry: Path) -> None:
    Registration(registry, ENDPOINT).stop()
    assert list(registry.iterdir()) == []
