"""The process of the service: claim the socket, serve until a signal, give the socket back.

It ends in time even if a thread waits for a disk for ever, so systemd or kubelet can restart it.
"""

import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from agent.core import errors, sockets
from agent.daemon import monitor
from agent.daemon.host import Host
from agent.daemon.registration import Registration
from agent.daemon.reload import Reloader
from agent.daemon.server import Service, resume
from agent.daemon.startup import Recovery, Watch, startup
from agent.groups import group_definitions, quiesce
from agent.operations import preflight
from agent.settings.settings import Config
from agent.work.background import run_all
from mount import calls
from mount.command import Finished

if TYPE_CHECKING:
    from agent.daemon.node_metrics import Metrics

_log = logging.getLogger(__name__)

# How soon a deleted socket is noticed.
_LOOK_SECONDS = 5.0
# The service stops within this; systemd's TimeoutStopSec and kubelet's grace period are longer.
_STOP_SECONDS = 54.0
# The pages and the registration stop within this.
_PAGES_SECONDS = 3.0
# How long the process may take to exit after its service has stopped: Python joins its threads.
_EXIT_SECONDS = 2.0
_LAST_LOG_SECONDS = 1.0
# The signals that end the service.
_ENDS = (signal.SIGTERM, signal.SIGINT)


def run(config: Config, host: Host, load: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT, and end the process soon after, whatever hangs in it.

    At SIGHUP `load` reads the configuration again.
    """
    with ending_in_time(_STOP_SECONDS) as ender:
        serve(config, host, load, ender.is_stopping)


@contextmanager
def ending_in_time(seconds: float) -> Iterator["ProcessEnder"]:
    """End the process so long after `is_stopping` is set, whatever hangs in it."""
    ender = ProcessEnder(seconds)
    ender.start()
    try:
        yield ender
        ender.exit_code = 0
    finally:
        ender.is_stopped.set()
        ender.is_stopping.set()


class ProcessEnder(threading.Thread):
    """Ends the process: no signal ends a thread that waits for a disk, and Python joins it.

    Started early, as no thread may be available when it is needed.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(name="leaving", daemon=True)
        self._seconds = seconds
        self.is_stopping, self.is_stopped = threading.Event(), threading.Event()
        self.exit_code = 1

    def run(self) -> None:
        """Wait for the service to stop and the process to exit; then end it."""
        self.is_stopping.wait()
        if self.is_stopped.wait(self._seconds):
            # The caller logs the error and exits, which ends this thread, too.
            time.sleep(_EXIT_SECONDS)
        last = threading.Thread(target=_log_hanging_threads, daemon=True)
        with contextlib.suppress(RuntimeError):
            last.start()
            # The log may block, as when its reader hangs.
            last.join(_LAST_LOG_SECONDS)
        os._exit(self.exit_code)


def _log_hanging_threads() -> None:
    hanging = sorted(one.name for one in threading.enumerate() if not one.daemon)
    _log.warning("ending the process with threads that hang: %s", ", ".join(hanging))
    for stream in (sys.stderr, sys.stdout):
        stream.flush()


def _spare_collector() -> None:
    """Have Python's collector leave out what lives as long as the process, and come less often.

    By default it took a tenth of the processor time of calls.
    """
    gc.freeze()
    gc.set_threshold(5000, 20, 20)


def serve(
    config: Config,
    host: Host,
    load: Callable[[], Config],
    is_stopping: threading.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; set `is_stopping` then. Raises SocketTaken, NotReady.

    At SIGHUP the configuration is what `load` returns, as far as it may change (Reloader).

    Threads that wait for a disk and do not end in time are left behind.
    """
    calls.forbid_dumps()
    if why := preflight.too_old(host.kernel):
        raise errors.NotReady(f"cannot serve: {why}; use a newer kernel")
    # The exit stack stops what was started, the last first.
    with claimed(config.endpoint), contextlib.ExitStack() as ending:
        # The service, closed to calls that need LVM until the groups are recovered.
        metrics = None
        if config.metrics_address is not None:
            # Imported here: without metrics there is no need for prometheus-client.
            from agent.daemon.node_metrics import Metrics

            metrics = Metrics()
            host = _counted(host, metrics)
        signals = _signals()
        lvm = group_definitions.on_node(host.run, config)
        observe = metrics.count_call if metrics else None
        service = Service(config, host, lvm, observe)
        _spare_collector()
        group_definitions.begin(service.definitions, service.volume_groups)
        service.context.admission.close()
        service.start(config.endpoint)
        served = sockets.inode(config.endpoint)
        ending.callback(service.stop)

        # Pages and registration, stopped before the service: kubelet sends no more calls then.
        beside: dict[str, Callable[[], None]] = {}
        ending.callback(run_all, beside, _PAGES_SECONDS)
        registration = Registration(
            config.registration_directory, config.endpoint, driver_name=config.driver_name
        )
        checks = [service.readiness.check]
        if config.registration == "self":
            checks.append(registration.check)
        pages = {
            "/healthz": monitor.Page(monitor.healthz(config.endpoint)),
            "/readyz": monitor.Page(monitor.readyz(*checks)),
        }
        if config.metrics_address is not None and metrics is not None:
            metrics.watch(service, registration)
            text = {"/metrics": monitor.Page(metrics.text, metrics.CONTENT_TYPE)}
            metrics_pages = monitor.Monitor(config.metrics_address, text | pages)
            metrics_pages.start()
            beside["the page of metrics"] = metrics_pages.stop
        if config.health_address is not None:
            health_pages = monitor.Monitor(config.health_address, pages)
            health_pages.start()
            beside["the page of health"] = health_pages.stop
        if config.registration == "self":
            # Kubelet calls the endpoint before it registers it.
            registration.start()
            beside["registration"] = registration.stop

        # Recovery of each group when it answers; calls are admitted after the first.
        def recover(group: str) -> bool:
            group_definitions.create(service.definitions, service.volume_groups, group)
            return resume(service, group)

        recovery = Recovery(service.volume_groups, recover)
        release = quiesce.Resumer(host.devices)

        def begin() -> None:
            host.devices.load_targets()
            with (
                quiesce.resume_left(host.devices, service.volume_groups.names, release) as held,
                service.context.activator.keep_suspended(held),
            ):
                recovery.begin()

        def rest_and_retry() -> None:
            service.volume_groups.rest()
            recovery.step()

        watch = Watch(service.reports, then=rest_and_retry)
        ending.callback(watch.stop)
        _log.info("serving %s on %s", ", ".join(config.groups), config.endpoint)
        notify("READY=1")
        beginning = startup(
            begin, service.context.admission, partial(_start_background, service, watch)
        )
        beginning.start()
        ending.callback(beginning.stop)
        if is_stopping is not None:
            ending.callback(is_stopping.set)

        reloader = Reloader(service, recovery, load)
        # gRPC cannot bind a new socket while it serves: that takes a new process.
        while (signal_number := _next_signal(signals)) not in _ENDS:
            if signal_number == signal.SIGHUP:
                reloader.reload()
            if sockets.inode(config.endpoint) != served:
                raise errors.SocketGone(config.endpoint)
        notify("STOPPING=1")
    _log.info("stopped")


def _counted(host: Host, metrics: "Metrics") -> Host:
    def observe(finished: Finished) -> None:
        host.observe(finished)
        metrics.count_command(finished)

    stream = metrics.counted_stream(host.stream)
    return replace(host, run=metrics.counted(host.run), observe=observe, stream=stream)


def _start_background(service: Service, watch: Watch) -> None:
    """Start background work, then log what the preflight finds; Probe refuses where it must."""
    for look in service.looks:
        look.start()
    service.context.limiter.task.start()
    watch.start()
    for extra in service.extras.values():
        extra.start()
    notify("STATUS=ready")
    for one in preflight.everything(service.node):
        if one.verdict != preflight.PASS:
            _log.warning(
                "preflight %s, %s: %s; %s", one.verdict, one.check, one.message, one.remedy
            )


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Claim a socket for this process: remove a stale one, refuse a live one (SocketTaken).

    The lock file decides, so of two processes that start at once only one succeeds.
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
    """Report the service's state to systemd (sd_notify(3)), if systemd asked for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, contextlib.suppress(OSError):
        channel.sendto(state.encode(), address)


def _signals() -> SimpleQueue[int]:
    """The signals that come from now on; a handler may put into a SimpleQueue at any moment."""
    arrived = SimpleQueue[int]()
    for number in (*_ENDS, signal.SIGHUP):
        signal.signal(number, lambda one, _frame: arrived.put(one))
    return arrived


def _next_signal(signals: SimpleQueue[int]) -> int | None:
    """The next signal; None after some seconds without one."""
    with contextlib.suppress(Empty):
        return signals.get(timeout=_LOOK_SECONDS)
    return None
