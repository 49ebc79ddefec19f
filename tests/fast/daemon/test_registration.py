"""The registration socket: who serves it, what is said over it, and retries after refusals."""

import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import expect
import pytest
from fakes.kubelet import FakeKubelet, asked

from agent.core import errors, sockets
from agent.daemon.registration import Registration, State
from agent.settings.settings import DRIVER_NAME
from proto import pluginregistration_pb2 as wire

ENDPOINT = Path("/var/lib/kubelet/plugins/lvm.csi.carver/csi.sock")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    directory = tmp_path / "r"
    directory.mkdir()
    return directory


@pytest.fixture
def registration(registry: Path) -> Iterator[Registration]:
    made = Registration(registry, ENDPOINT, interval_seconds=0.02, retry_seconds=0.05)
    yield made
    made.stop()


@pytest.fixture
def waiting(registration: Registration) -> Registration:
    """Served; kubelet has not answered yet."""
    registration.start()
    expect_state(registration, State.WAITING)
    return registration


def expect_state(registration: Registration, state: State) -> None:
    expect.soon(lambda: registration.state is state)


@pytest.fixture
def other(registry: Path) -> Iterator[socket.socket]:
    """The registrar of another process, which serves the socket."""
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(registry / f"{DRIVER_NAME}-reg.sock"))
        served.listen(1000)
        yield served


def notify(registration: Registration, *, error: str = "") -> None:
    with asked(registration.socket) as plugin:
        status = wire.RegistrationStatus(plugin_registered=not error, error=error)
        plugin.NotifyRegistrationStatus(status, timeout=20)


def test_kubelet_gets_name_endpoint_and_version_over_a_socket_for_root(
    waiting: Registration, registry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert [path.name for path in registry.iterdir()] == [waiting.socket.name]
    assert re.fullmatch(r"lvm\.csi\.carver-[0-9a-f]{3}\.sock", waiting.socket.name)
    assert stat.S_IMODE(waiting.socket.stat().st_mode) == 0o600
    with asked(waiting.socket) as plugin:
        info = plugin.GetInfo(wire.InfoRequest(), timeout=20)
    assert (info.type, info.name) == ("CSIPlugin", DRIVER_NAME)
    assert info.endpoint == str(ENDPOINT)
    assert list(info.supported_versions) == ["1.0.0"]
    notify(waiting)
    assert waiting.state is State.REGISTERED
    assert f"kubelet has registered {DRIVER_NAME}" in caplog.text


def test_a_refusal_is_logged_with_its_reason_and_tried_again_with_a_new_socket(
    registration: Registration, registry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet = FakeKubelet(registry)
    kubelet.refusal = "the API server does not answer"
    registration.start()

    def look_until_asked(times: int) -> bool:
        kubelet.look()
        return len(kubelet.asked) >= times

    expect.soon(lambda: look_until_asked(2))
    assert kubelet.drivers == {}
    assert "the API server does not answer" in caplog.text
    kubelet.refusal = ""
    # Kubelet calls the endpoint, which is not served here.
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


def test_readiness_waits_for_kubelet_s_answer(waiting: Registration, tmp_path: Path) -> None:
    with pytest.raises(errors.NotReady, match=r"has not registered lvm\.csi\.carver \(waiting"):
        waiting.check()
    notify(waiting, error="no such path")
    with pytest.raises(errors.NotReady, match=r"has not registered"):
        waiting.check()
    expect_state(waiting, State.WAITING)
    notify(waiting)
    waiting.check()
    # Under another name of the driver: the refusal names that one.
    renamed = Registration(tmp_path / "none", ENDPOINT, driver_name="fast.csi.carver")
    with pytest.raises(errors.NotReady, match=r"has not registered fast\.csi\.carver \(off"):
        renamed.check()
    # No directory of kubelet's.
    with pytest.raises(errors.NotReady, match=r"docs/troubleshooting\.md"):
        Registration(tmp_path / "none", ENDPOINT).check()


def test_a_stale_socket_is_replaced_and_the_state_is_waiting_only_then(
    registration: Registration, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that another process left is there before, and nothing can be said over it."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(registration.socket))
    said: list[tuple[State, bool]] = []
    real = Path.rename

    def rename(self: Path, target: Path) -> None:
        said.append((registration.state, sockets.is_served(target)))
        real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    registration.start()
    expect_state(registration, State.WAITING)
    assert said == [(State.OFF, False)]
    notify(registration)
    assert registration.state is State.REGISTERED


def left_by(path: Path) -> Path:
    """A socket that a process left when it was killed."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    return path


def test_after_a_power_cut_kubelet_gets_a_name_that_it_has_not_asked_in_vain(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet asks ever more rarely at a socket that no process serves, also once one does."""
    boot = tmp_path / "boot_id"
    monkeypatch.setattr("agent.core.boot._ID", boot)
    names = []
    for one in ("aaaa", "bbbb", "bbbb"):
        boot.write_text(one)
        registration = Registration(registry, ENDPOINT, interval_seconds=0.02)
        names.append(registration.socket.name)
        registration.start()
        expect_state(registration, State.WAITING)
        assert list(registry.iterdir()) == [registration.socket]
        registration.stop()
        left_by(registration.socket)
    assert names[0] != names[1] == names[2]


def test_what_kubelet_may_have_registered_since_its_start_is_not_removed(
    registration: Registration, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the driver, under whichever name of a socket it is served."""
    mine = left_by(registry / f"{DRIVER_NAME}-reg.sock")
    others = left_by(registry / "other-aaa.sock")
    registration.start()
    expect_state(registration, State.WAITING)
    assert set(registry.iterdir()) == {registration.socket, mine, others}
    registration.stop()
    # The same of an earlier boot.
    monkeypatch.setattr(time, "clock_gettime", lambda _: -60.0)
    again = Registration(registry, ENDPOINT, interval_seconds=0.02)
    again.start()
    expect_state(again, State.WAITING)
    assert set(registry.iterdir()) == {again.socket, others}
    again.stop()


def test_an_answer_as_soon_as_the_socket_exists_is_kept(
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


def test_another_registrar_is_left_alone_and_followed_when_it_goes(
    registration: Registration,
    registry: Path,
    other: socket.socket,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = registry / f"{DRIVER_NAME}-reg.sock"
    registration.start()
    expect_state(registration, State.FOREIGN)
    # Readiness is not asked for what only the other knows.
    registration.check()
    inode = path.stat().st_ino
    time.sleep(0.1)
    assert path.stat().st_ino == inode
    other.close()
    assert caplog.text.count("another process") == 1
    expect_state(registration, State.WAITING)
    notify(registration)


def test_a_registrar_that_takes_the_socket_over_keeps_it(
    waiting: Registration, registry: Path
) -> None:
    path = registry / "other"
    with socket.socket(socket.AF_UNIX) as taker:
        taker.bind(str(path))
        taker.listen(1000)
        path.rename(waiting.socket)
        expect_state(waiting, State.FOREIGN)
        waiting.stop()
        assert waiting.socket.exists()


def test_a_file_in_place_of_the_socket_is_left_untouched(
    registration: Registration, registry: Path
) -> None:
    path = registration.socket
    path.write_text("data")
    registration.start()
    expect_state(registration, State.FOREIGN)
    registration.stop()
    assert path.read_text() == "data"


def test_a_node_gets_the_socket_as_soon_as_kubelet_has_its_directory(
    registration: Registration, registry: Path
) -> None:
    registry.rmdir()
    registration.start()
    time.sleep(0.1)
    assert registration.state is State.OFF
    assert not registry.exists()
    registry.mkdir()
    expect_state(registration, State.WAITING)


def test_a_socket_that_cannot_be_made_is_logged_once_and_retried(
    registration: Registration,
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
        registration.start()
        expect.soon(lambda: len(failed) > 1)
        assert registration.state is State.OFF
    assert caplog.text.count("cannot make the registration socket") == 1
    expect_state(registration, State.WAITING)
    assert [path.name for path in registry.iterdir()] == [registration.socket.name]


def test_stopping_an_unstarted_registration_changes_nothing(registry: Path) -> None:
    Registration(registry, ENDPOINT).stop()
    assert list(registry.iterdir()) == []
