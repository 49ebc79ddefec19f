"""One process, one unix socket: claimed, served until a signal, and given back.

It ends in time though a thread waits for a disk for ever: whoever started Carver starts it again.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent.core import errors, group_definitions, quiesce, secret, sockets
from agent.core.background import run_all
from agent.core.group_definitions import GroupDefinitions
from agent.core.host import Host
from agent.core.settings import Config
from agent.daemon import monitor
from agent.daemon.refresh import Watch
from agent.daemon.registration import Registration
from agent.daemon.server import Service, resume
from agent.daemon.startup import Recovery, startup
from agent.operations import preflight
from mount.command import Finished

if TYPE_CHECKING:
    from agent.daemon.metrics import Metrics

_log = logging.getLogger(__name__)

# How soon a deleted socket is noticed.
_LOOK_SECONDS = 5.0
# What the service's own end takes at most, with some to spare; systemd's TimeoutStopSec and
# kubelet's grace period are longer.
_STOP_SECONDS = 54.0
# What is served beside the socket is gone by then.
_PAGES_SECONDS = 3.0
# How long a process whose service has ended has to end by itself: Python waits for its threads.
_LEAVING_SECONDS = 2.0
_LAST_WORDS_SECONDS = 1.0


def run(config: Config, host: Host) -> None:
    """The same as `serve`, for a process that has nothing else to do: it is over soon after.

    Once that has ended, or is told to and does not, the process ends, whatever hangs in it.
    """
    leaving = _Leaving()
    leaving.start()
    try:
        serve(config, host, leaving.is_told.set)
        leaving.exit_code = 0
    finally:
        leaving.is_over.set()
        leaving.is_told.set()


class _Leaving(threading.Thread):
    """Ends the process: no signal ends a thread that waits for a disk, and Python waits for it.

    Started early, as there may be no thread to be had when it is needed.
    """

    def __init__(self) -> None:
        super().__init__(name="leaving", daemon=True)
        self.is_told, self.is_over = threading.Event(), threading.Event()
        self.exit_code = 1

    def run(self) -> None:
        """Wait for the end, and a little longer."""
        self.is_told.wait()
        if self.is_over.wait(_STOP_SECONDS):
            # Whoever called tells why it ended, and leaves: then this thread is no more.
            time.sleep(_LEAVING_SECONDS)
        last = threading.Thread(target=_tell_what_hangs, daemon=True)
        with contextlib.suppress(RuntimeError):
            last.start()
            # Nobody may read the log.
            last.join(_LAST_WORDS_SECONDS)
        os._exit(self.exit_code)


def _tell_what_hangs() -> None:
    hanging = sorted(one.name for one in threading.enumerate() if not one.daemon)
    _log.warning("the process ends though this has not: %s", ", ".join(hanging))
    for stream in (sys.stderr, sys.stdout):
        stream.flush()


def serve(config: Config, host: Host, is_told: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT, of which `is_told` is told. Raises SocketTaken, NotReady.

    What does not end in time is left behind: threads that wait for a disk.
    """
    secret.forbid_dumps()
    with claimed(config.endpoint), contextlib.ExitStack() as ending:
        metrics = None
        if config.metrics_address is not None:
            metrics = _metrics()
            host = _counted(host, metrics)
        observe = metrics.count_call if metrics else None
        lvm, definitions = (
            group_definitions.on_node(host.run, config),
            GroupDefinitions(host.kernel),
        )
        service = Service(config, host, lvm, observe, definitions)

        def take_up(group: str) -> bool:
            group_definitions.lay(lvm, definitions, config, service.volume_groups, group)
            return resume(service, group)

        resumption = Recovery(service.volume_groups, take_up)
        release = quiesce.Release(host.devices)
        ended = _until_signal()

        def begin() -> None:
            with (
                quiesce.left(host.devices, config.groups, release) as held,
                service.inventory.holding(held),
            ):
                resumption.begin()

        group_definitions.begin(lvm, definitions, config, service.volume_groups)
        service.context.admission.close()
        service.start(config.endpoint)
        served = sockets.inode(config.endpoint)
        ending.callback(service.stop)
        # Registration with them: kubelet sends no more calls then.
        beside: dict[str, Callable[[], None]] = {}
        ending.callback(run_all, beside, _PAGES_SECONDS)
        registration = Registration(
            config.registration_directory, config.endpoint, driver_name=config.driver_name
        )
        if config.metrics_address is not None and metrics is not None:
            metrics.watch(service, registration)
            pages = monitor.Monitor(
                config.metrics_address, _pages(config, service, registration, metrics)
            )
            pages.start()
            beside["the page of metrics"] = pages.stop
        if config.health_address is not None:
            health = monitor.Monitor(config.health_address, _health(config, service, registration))
            health.start()
            beside["the page of health"] = health.stop
        if config.registration == "self":
            # Kubelet calls the endpoint before it registers it.
            registration.start()
            beside["registration"] = registration.stop

        def turn() -> None:
            service.volume_groups.rest()
            resumption.step()

        watch = Watch(service.inventory, then=turn)
        ending.callback(watch.stop)
        _log.info("serving %s on %s", ", ".join(config.groups), config.endpoint)
        notify("READY=1")
        beginning = startup(begin, service.context.admission, partial(_after, service, watch))
        beginning.start()
        ending.callback(beginning.stop)
        ending.callback(is_told)
        # gRPC can bind nothing while it serves: a new socket takes a new process.
        while not ended.wait(_LOOK_SECONDS):
            if sockets.inode(config.endpoint) != served:
                raise errors.SocketGone(config.endpoint)
        notify("STOPPING=1")
    _log.info("stopped")


def _metrics() -> "Metrics":
    # Imported here: who does not ask for metrics need not have prometheus-client.
    from agent.daemon.metrics import Metrics

    return Metrics()


def _counted(host: Host, metrics: "Metrics") -> Host:
    """The same machine, with each command counted, whoever carries it out."""

    def observe(finished: Finished) -> None:
        host.observe(finished)
        metrics.count_command(finished)

    stream = metrics.counted_stream(host.stream)
    return replace(host, run=metrics.counted(host.run), observe=observe, stream=stream)


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
    service.autoextender.start()
    service.auto_repair.start()
    watch.start()
    for extra in service.extras.values():
        extra.start()
    notify("STATUS=ready")
    _check(service.node)


def _check(node: preflight.Node) -> None:
    """Log what the preflight finds; Probe refuses where it must."""
    for one in preflight.everything(node):
        if one.verdict != preflight.PASS:
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
