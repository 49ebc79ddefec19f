"""One process, one unix socket: the parts put together, served, and ended in order."""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from agent import errors, founding, monitor, preflight, sockets, standstill
from agent.access import Access
from agent.config import Config
from agent.controller import Controller
from agent.copying import Copier
from agent.diagnosis import Diagnosis
from agent.ephemeral import Ephemeral
from agent.founding import Foundations
from agent.groupcontroller import GroupController
from agent.groupsnapshots import GroupSnapshotter
from agent.growing import Grower
from agent.host import Host
from agent.identity import Identity
from agent.interceptor import Interceptor
from agent.inventory import Inventory
from agent.locks import GroupLocks, VolumeLocks
from agent.means import Means
from agent.node import Node
from agent.provision import Provisioner
from agent.readiness import Readiness
from agent.reclaiming import Reclaimer
from agent.registration import Registration
from agent.snapshots import Snapshotter
from agent.watching import Watch
from agent.wiping import Wiper
from lvm import errors as lvm_errors
from lvm.lvm2 import Lvm
from proto import csi_pb2_grpc

if TYPE_CHECKING:
    from agent.metrics import Metrics, Parts

_log = logging.getLogger(__name__)

# Calls that wait for a lock or for lvm2 hold a thread each; Probe must still get one.
_THREADS = 32
# systemd's TimeoutStopSec and kubelet's grace period are longer.
_DRAIN_SECONDS = 25
# How soon a deleted socket is noticed.
_LOOK_SECONDS = 5.0


class Service:
    """Carver's services on one gRPC server."""

    def __init__(
        self,
        config: Config,
        host: Host,
        lvm: Lvm,
        observe: Callable[[str, str, float], None] | None = None,
        foundations: Foundations = founding.NONE,
    ) -> None:
        known = self.inventory = Inventory(lvm, host.devices, config.groups, foundations)
        self.node = preflight.Node(config, host.kernel, host.run, lambda: known.recent()[0])
        self.readiness = Readiness(known, self.node)
        means, locks = Means(config, host.run, host.kernel, lvm, known, GroupLocks()), VolumeLocks()
        self.wiper = Wiper(means)
        self.reclaimer = Reclaimer(means)
        self.grower = Grower(means)
        snapshotter = Snapshotter(means, self.wiper, self.reclaimer)
        self.group_snapshotter = GroupSnapshotter(means, host.devices, snapshotter, self.wiper)
        self.copier = Copier(means, snapshotter)
        provision = Provisioner(means, self.wiper, self.reclaimer, self.copier)
        diagnosis = self.diagnosis = Diagnosis(host.kernel, known)
        access = Access(means, self.wiper, self.copier, diagnosis)
        self.ephemeral = Ephemeral(means, provision, access, locks)
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="rpc"),
            interceptors=[Interceptor(observe)],
        )
        csi_pb2_grpc.add_IdentityServicer_to_server(Identity(self.readiness), self._server)
        csi_pb2_grpc.add_ControllerServicer_to_server(
            Controller(config, provision, snapshotter, diagnosis, locks), self._server
        )
        csi_pb2_grpc.add_GroupControllerServicer_to_server(
            GroupController(self.group_snapshotter, locks), self._server
        )
        csi_pb2_grpc.add_NodeServicer_to_server(
            Node(config, provision, access, self.ephemeral, locks), self._server
        )

    def start(self, path: Path) -> None:
        """Serve on a unix socket that only root can reach."""
        # Between bind and chmod anyone could connect: the umask leaves no such moment.
        umask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix://{path}")
        finally:
            os.umask(umask)
        self._server.start()
        self.ephemeral.start()

    def stop(self) -> None:
        """Let calls in flight end, then background work at its next safe point."""
        self.ephemeral.stop()
        self._server.stop(_DRAIN_SECONDS).wait()
        self.grower.stop()
        self.copier.stop()
        self.wiper.stop()
        self.reclaimer.stop()


def serve(config: Config, host: Host) -> None:
    """Serve until SIGTERM or SIGINT. Raises SocketTaken, NotReady."""
    with claimed(config.endpoint), contextlib.ExitStack() as ending:
        metrics = None
        if config.metrics_address is not None:
            metrics = _metrics()
            host = replace(host, run=metrics.counted(host.run))
        observe = metrics.count_call if metrics else None
        with standstill.left(host.devices, config.groups) as held:
            lvm, foundations = founding.lay(host.run, host.kernel, config)
            service = Service(config, host, lvm, observe, foundations)
            ended = _until_signal()
            with service.inventory.holding(held):
                _resume(service)
        service.start(config.endpoint)
        served = sockets.inode(config.endpoint)
        ending.callback(service.stop)
        service.grower.start()
        registration = Registration(config.registration_directory, config.endpoint)
        if config.metrics_address is not None and metrics is not None:
            metrics.watch(_measured(config, service, registration))
            pages = monitor.Monitor(config.metrics_address, _pages(config, service, metrics))
            pages.start()
            ending.callback(pages.stop)
        if config.registration == "self":
            # Kubelet calls the endpoint before it registers it.
            registration.start()
            ending.callback(registration.stop)
        watch = Watch(service.inventory)
        watch.start()
        ending.callback(watch.stop)
        _log.info("serving %s on %s", ", ".join(config.groups), config.endpoint)
        notify("READY=1")
        # It takes a while and refuses nothing: nobody has to wait for it.
        threading.Thread(target=_check, args=[service.node], name="check", daemon=True).start()
        # gRPC can bind nothing while it serves: a new socket takes a new process.
        while not ended.wait(_LOOK_SECONDS):
            if sockets.inode(config.endpoint) != served:
                raise errors.SocketGone(config.endpoint)
        notify("STOPPING=1")
    _log.info("stopped")


def _metrics() -> "Metrics":
    # Imported here: who does not ask for metrics need not have prometheus-client.
    from agent.metrics import Metrics

    return Metrics()


def _measured(config: Config, service: Service, registration: Registration) -> "Parts":
    from agent.metrics import Parts

    return Parts(
        config.classes,
        service.inventory,
        service.diagnosis,
        service.wiper,
        service.copier,
        service.grower,
        registration,
    )


def _pages(config: Config, service: Service, metrics: "Metrics") -> Mapping[str, monitor.Page]:
    return {
        "/metrics": monitor.Page(metrics.text, metrics.CONTENT_TYPE),
        "/healthz": monitor.Page(monitor.healthz(config.endpoint)),
        "/readyz": monitor.Page(monitor.readyz(service.readiness)),
    }


def _check(node: preflight.Node) -> None:
    """Log what the preflight finds; Probe refuses where it must."""
    for one in preflight.everything(node):
        if one.verdict != preflight.PASS:
            _log.warning(
                "preflight %s, %s: %s; %s", one.verdict, one.check, one.message, one.remedy
            )


def _resume(service: Service) -> None:
    """Take up the wipes and copies that are left; where lvm2 does not answer, Probe will say so."""
    try:
        wipes = service.wiper.resume() + service.reclaimer.resume()
        undone = service.group_snapshotter.resume()
        copies = service.copier.resume()
    except lvm_errors.LvmError as error:
        _log.warning("wipes and copies that are left are not gone on with: %s", error)
        return
    if wipes or copies or undone:
        _log.info(
            "going on with %d wipes and %d copies; %d half-made group snapshots undone",
            *(wipes, copies, undone),
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
