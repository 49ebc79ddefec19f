"""One process, one unix socket: claimed, served until a signal, and given back."""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent import errors, secret, sockets
from agent.config.settings import Config
from agent.engine import sources, suspension
from agent.engine.host import Host
from agent.engine.refresh import Watch
from agent.engine.sources import Foundations
from agent.health import preflight, verdicts
from agent.service import monitor
from agent.service.beginning import Beginning
from agent.service.registration import Registration
from agent.service.resumption import Resumption
from agent.service.server import Service, resume
from lvm.command import Finished

if TYPE_CHECKING:
    from agent.service.metrics import Metrics, Parts

_log = logging.getLogger(__name__)

# How soon a deleted socket is noticed.
_LOOK_SECONDS = 5.0


def serve(config: Config, host: Host) -> None:
    """Serve until SIGTERM or SIGINT. Raises SocketTaken, NotReady."""
    secret.forbid_dumps()
    with claimed(config.endpoint), contextlib.ExitStack() as ending:
        metrics = None
        if config.metrics_address is not None:
            metrics = _metrics()
            host = _counted(host, metrics)
        observe = metrics.count_call if metrics else None
        lvm, foundations = sources.on_node(host.run, config), Foundations(host.kernel)
        service = Service(config, host, lvm, observe, foundations)

        def take_up(group: str) -> None:
            sources.lay(lvm, foundations, config, service.engines, group)
            resume(service, group)

        resumption = Resumption(service.engines, take_up)
        release = suspension.Release(host.devices)
        ended = _until_signal()

        def begin() -> None:
            with (
                suspension.left(host.devices, config.groups, release) as held,
                service.inventory.holding(held),
            ):
                resumption.begin()

        sources.begin(lvm, foundations, config, service.engines)
        service.admission.close()
        service.start(config.endpoint)
        served = sockets.inode(config.endpoint)
        ending.callback(service.stop)
        registration = Registration(
            config.registration_directory, config.endpoint, driver_name=config.driver_name
        )
        if config.metrics_address is not None and metrics is not None:
            metrics.watch(_measured(config, service, registration))
            pages = monitor.Monitor(
                config.metrics_address, _pages(config, service, registration, metrics)
            )
            pages.start()
            ending.callback(pages.stop)
        if config.health_address is not None:
            health = monitor.Monitor(config.health_address, _health(config, service, registration))
            health.start()
            ending.callback(health.stop)
        if config.registration == "self":
            # Kubelet calls the endpoint before it registers it.
            registration.start()
            ending.callback(registration.stop)
        watch = Watch(service.inventory, then=resumption.step)
        ending.callback(watch.stop)
        _log.info("serving %s on %s", ", ".join(config.groups), config.endpoint)
        notify("READY=1")
        beginning = Beginning(begin, service.admission, partial(_after, service, watch))
        beginning.start()
        ending.callback(beginning.stop)
        # gRPC can bind nothing while it serves: a new socket takes a new process.
        while not ended.wait(_LOOK_SECONDS):
            if sockets.inode(config.endpoint) != served:
                raise errors.SocketGone(config.endpoint)
        notify("STOPPING=1")
    _log.info("stopped")


def _metrics() -> "Metrics":
    # Imported here: who does not ask for metrics need not have prometheus-client.
    from agent.service.metrics import Metrics

    return Metrics()


def _counted(host: Host, metrics: "Metrics") -> Host:
    """The same machine, with each command counted, whoever carries it out."""

    def observe(finished: Finished) -> None:
        host.observe(finished)
        metrics.count_command(finished)

    stream = metrics.counted_stream(host.stream)
    return replace(host, run=metrics.counted(host.run), observe=observe, stream=stream)


def _measured(config: Config, service: Service, registration: Registration) -> "Parts":
    from agent.service.metrics import Parts

    return Parts(
        config.classes,
        service.inventory,
        service.admission,
        service.diagnosis,
        service.storage,
        service.wiper,
        service.copier,
        service.reencrypter,
        service.grower,
        registration,
        service.orphans,
    )


def _pages(
    config: Config, service: Service, registration: Registration, metrics: "Metrics"
) -> Mapping[str, monitor.Page]:
    return {
        "/metrics": monitor.Page(metrics.text, metrics.CONTENT_TYPE),
        **_health(config, service, registration),
    }


def _health(
    config: Config, service: Service, registration: Registration
) -> Mapping[str, monitor.Page]:
    checks = [service.readiness.check]
    if config.registration == "self":
        checks.append(registration.check)
    return {
        "/healthz": monitor.Page(monitor.healthz(config.endpoint)),
        "/readyz": monitor.Page(monitor.readyz(*checks)),
    }


def _after(service: Service, watch: Watch) -> None:
    """What asks for groups by itself, and then what refuses nothing: nobody has to wait for it."""
    service.grower.start()
    service.auto_repair.start()
    watch.start()
    if service.orphans is not None:
        service.orphans.start()
    notify("STATUS=ready")
    _check(service.node)


def _check(node: preflight.Node) -> None:
    """Log what the preflight finds; Probe refuses where it must."""
    for one in preflight.everything(node):
        if one.verdict != verdicts.PASS:
            _log.warning(
                "preflight %s, %s: %s; %s", one.verdict, one.check, one.message, one.remedy
            )


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Be the one process that serves a socket; a stale socket goes, a live one is left alone.

    The lock file, not the socket, decides: two processes that start at once cannot both win.
    """
    path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    lock = os.open(
        path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
    )
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.SocketTaken(f"another Carver serves {path}; stop it first") from None
        _remove_stale(path)
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise errors.SocketTaken(f"{path} exists and is not a socket; it is left untouched")
    if not sockets.is_stale(path):
        raise errors.SocketTaken(f"another process serves {path}; stop it first")
    path.unlink()


def notify(state: str) -> None:
    """Tell systemd about the service's state (sd_notify(3)); nothing where systemd did not ask."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, contextlib.suppress(OSError):
        channel.sendto(state.encode(), address)


def _until_signal() -> threading.Event:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    return ended
