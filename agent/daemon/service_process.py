"""The process of the service: claim the socket, serve until a signal, release the socket.

The process ends in time even if a thread waits for a disk for ever, so that systemd or kubelet can
restart the process.
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
from collections.abc import Callable, Iterator, Sequence
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

# Interval, in seconds, at which the main thread checks whether the CSI socket was deleted.
_LOOK_SECONDS = 5.0
# Time limit, in seconds, of stopping the service; systemd's TimeoutStopSec and kubelet's grace
# period are longer.
_STOP_SECONDS = 54.0
# Time limit, in seconds, of stopping the HTTP pages and the registration with kubelet.
_PAGES_SECONDS = 3.0
# Time limit, in seconds, of the process's exit after the service has stopped. Python waits for all
# threads that are not daemons.
_EXIT_SECONDS = 2.0
# Time limit, in seconds, of logging the threads that hang, before the process is ended.
_LAST_LOG_SECONDS = 1.0
# Signals that end the service.
_ENDS = (signal.SIGTERM, signal.SIGINT)


def run(config: Config, host: Host, load: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT, then end the process within a minute, even if a thread hangs.

    At SIGHUP the configuration is loaded again by `load`.
    """
    with process_ender(_STOP_SECONDS) as ender:
        serve(config, host, load, ender.is_stopping)


@contextmanager
def process_ender(seconds: float) -> Iterator["ProcessEnder"]:
    """End the process soon after the event `is_stopping` is set, even if a thread hangs.

    Yields the thread that ends the process. The body of the `with` sets the thread's event
    `is_stopping` once the service begins to stop, and has `seconds` from that moment. The end of
    the `with` sets both events, `is_stopping` and `is_stopped`.
    """
    ender = ProcessEnder(seconds)
    ender.start()
    try:
        yield ender
        ender.exit_code = 0
    finally:
        ender.is_stopped.set()
        ender.is_stopping.set()


class ProcessEnder(threading.Thread):
    """A thread that ends the process by _exit(2) if the process does not stop in time.

    Without this thread the process might never end: at exit Python waits for all its threads, and
    no signal ends a thread that waits for a disk. This thread is started early, because later it
    may be impossible to start a thread.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(name="leaving", daemon=True)
        self._seconds = seconds
        self.is_stopping, self.is_stopped = threading.Event(), threading.Event()
        self.exit_code = 1

    def run(self) -> None:
        """Wait until the service stops and the process exits; end the process if either hangs."""
        self.is_stopping.wait()
        if self.is_stopped.wait(self._seconds):
            # Give the main thread time to log its error and to exit, which ends this thread, too.
            time.sleep(_EXIT_SECONDS)
        logging_thread = threading.Thread(target=_log_hanging_threads, daemon=True)
        with contextlib.suppress(RuntimeError):
            logging_thread.start()
            # Limit the time: writing to the log may block, as when the log's reader hangs.
            logging_thread.join(_LAST_LOG_SECONDS)
        os._exit(self.exit_code)


def _log_hanging_threads() -> None:
    hanging = sorted(thread.name for thread in threading.enumerate() if not thread.daemon)
    _log.warning("ending the process with threads that hang: %s", ", ".join(hanging))
    for stream in (sys.stderr, sys.stdout):
        stream.flush()


def _tune_garbage_collector() -> None:
    """Have Python's garbage collector ignore all objects that exist now, and run less often.

    The objects that exist now live as long as the process. With Python's defaults the collector
    took a tenth of the processor time of RPCs.
    """
    gc.freeze()
    gc.set_threshold(5000, 20, 20)


def serve(
    config: Config,
    host: Host,
    load: Callable[[], Config],
    is_stopping: threading.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; at the signal, set `is_stopping` and stop all parts.

    At SIGHUP the settings that can change without a restart get the values that `load` returns
    (Reloader). Threads that wait for a disk and do not end in time are abandoned. Raises
    SocketTaken and NotReady at the start, and SocketGone when the CSI socket was deleted or
    replaced.
    """
    calls.forbid_dumps()
    if why := preflight.too_old(host.kernel):
        raise errors.NotReady(f"cannot serve: {why}; use a newer kernel")
    # The exit stack stops all started parts, in reverse order of their start.
    with claimed(config.endpoint), contextlib.ExitStack() as ending:
        # Start the service; RPCs that need LVM are not admitted until a volume group is recovered.
        metrics = None
        if config.metrics_address is not None:
            # Import the module here, because only a service with metrics needs prometheus-client.
            from agent.daemon.node_metrics import Metrics

            metrics = Metrics()
            host = _counted(host, metrics)
        signals = _signals()
        lvm = group_definitions.on_node(host.run, config)
        observe = metrics.count_call if metrics else None
        service = Service(config, host, lvm, observe)
        _tune_garbage_collector()
        group_definitions.begin(service.definitions, service.volume_groups)
        service.context.admission.close()
        service.start(config.endpoint)
        served = sockets.inode(config.endpoint)
        ending.callback(service.stop)

        # Start the HTTP pages and the registration. The exit stack stops pages and registration
        # before the service, so that kubelet sends no more calls while the service stops.
        stops: dict[str, Callable[[], None]] = {}
        ending.callback(run_all, stops, _PAGES_SECONDS)
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
            stops["the page of metrics"] = metrics_pages.stop
        if config.health_address is not None:
            health_pages = monitor.Monitor(config.health_address, pages)
            health_pages.start()
            stops["the page of health"] = health_pages.stop
        if config.registration == "self":
            # Register only now that the service runs: kubelet calls the CSI endpoint of a driver
            # before it registers the driver.
            registration.start()
            stops["registration"] = registration.stop

        # Recover each volume group once the group answers; RPCs are admitted after the first.
        def recover(group: str) -> bool:
            group_definitions.create(service.definitions, service.volume_groups, group)
            return resume(service, group)

        recovery = Recovery(service.volume_groups, recover)
        release = quiesce.Resumer(host.devices)

        def begin() -> None:
            host.devices.load_targets()
            with (
                quiesce.resume_left(
                    host.devices, service.volume_groups.names, release
                ) as suspended,
                service.context.activator.keep_suspended(suspended),
            ):
                recovery.begin()

        def rest_and_retry() -> None:
            service.volume_groups.trim_idle_sessions()
            recovery.step()

        watch = Watch(service.reports, retry_groups=rest_and_retry)
        ending.callback(watch.stop)
        _log.info("serving %s on %s", ", ".join(config.groups), config.endpoint)
        notify("READY=1")
        starts: Sequence[Callable[[], object]] = [
            *(scan.start for scan in service.scans),
            service.context.limiter.task.start,
            watch.start,
            *(extra.start for extra in service.extras.values()),
        ]
        check = partial(_log_findings, service)
        beginning = startup(begin, service.context.admission, starts, check)
        beginning.start()
        ending.callback(beginning.stop)
        if is_stopping is not None:
            ending.callback(is_stopping.set)

        reloader = Reloader(service, recovery, load)
        # End the process if its socket was deleted or replaced: gRPC cannot bind a new socket while
        # it serves.
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


def _log_findings(service: Service) -> None:
    """Report to systemd that the service is ready, and log what `carver doctor` would find.

    A failed check does not stop the service here; Probe returns an error where nothing can be
    served.
    """
    notify("STATUS=ready")
    for finding in preflight.all_findings(service.node):
        if finding.verdict != preflight.PASS:
            _log.warning(
                "preflight %s, %s: %s; %s",
                finding.verdict,
                finding.check,
                finding.message,
                finding.remedy,
            )


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Claim the path of a Unix socket for this process, and remove the socket at the end.

    A stale socket is removed. Raises SocketTaken if another process serves the socket. A lock file
    (flock(2)) beside the socket decides, so of two processes that start at once only one succeeds.
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
    """Report the service's state to systemd (sd_notify(3)), if systemd set NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, contextlib.suppress(OSError):
        channel.sendto(state.encode(), address)


def _signals() -> SimpleQueue[int]:
    """Handle SIGTERM, SIGINT and SIGHUP from now on; return a queue of the signals that arrive.

    A signal handler may put into a SimpleQueue at any moment, even while the queue is in use.
    """
    arrived = SimpleQueue[int]()
    for number in (*_ENDS, signal.SIGHUP):
        signal.signal(number, lambda signal_number, _frame: arrived.put(signal_number))
    return arrived


def _next_signal(signals: SimpleQueue[int]) -> int | None:
    """Wait for the next signal and return its number; None after five seconds without a signal."""
    with contextlib.suppress(Empty):
        return signals.get(timeout=_LOOK_SECONDS)
    return None
