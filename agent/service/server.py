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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from agent import admission, errors, secret, sockets
from agent.admission import Admission
from agent.config.settings import Config
from agent.csi.controller import Controller
from agent.csi.group_controller import GroupController
from agent.csi.identity import Identity
from agent.csi.interceptor import Interceptor
from agent.csi.node import Node
from agent.csi.operator import Operator
from agent.csi.snapshot_metadata import SnapshotMetadata
from agent.csi.transfer import Transfer
from agent.delta.delta import Delta
from agent.engine import sources, suspension
from agent.engine.engines import Engines
from agent.engine.host import Host
from agent.engine.inventory import Inventory
from agent.engine.means import Means
from agent.engine.refresh import Watch
from agent.engine.sources import Foundations
from agent.engine.withheld import Withheld
from agent.health import preflight, verdicts
from agent.health.conditions import Diagnosis
from agent.health.readiness import Readiness
from agent.health.storage_health import StorageHealth
from agent.health.volume_health import VolumesHealth
from agent.locks import VolumeLocks
from agent.publish.inline import Ephemeral
from agent.publish.staging import Access
from agent.service import monitor
from agent.service.beginning import Beginning
from agent.service.registration import Registration
from agent.service.resumption import Resumption
from agent.transfer.moving import Mover
from agent.transfer.receiving import Receiver
from agent.transfer.sending import Sender
from agent.volumes.copying import Copier
from agent.volumes.expansion import Expander
from agent.volumes.group_snapshots import GroupSnapshotter
from agent.volumes.provisioning import Provisioner
from agent.volumes.snapshots import Snapshotter
from agent.workers.auto_repair import AutoRepair
from agent.workers.autoextend import Grower
from agent.workers.disk_replacement import Replacement
from agent.workers.giving_up import GivingUp
from agent.workers.pool_removal import Reclaimer
from agent.workers.reencryption import Reencrypter
from agent.workers.repairing import Repairer
from agent.workers.wiping import Wiper
from agent.workers.zeroing import Zeroer
from lvm import errors as lvm_errors
from lvm.command import Converse, Finished, Run
from lvm.lvm2 import Lvm
from lvm.session import Session
from proto import csi_pb2_grpc

if TYPE_CHECKING:
    from agent.orphans.watch import OrphanWatch
    from agent.service.metrics import Metrics, Parts

_log = logging.getLogger(__name__)

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
        foundations: Foundations = sources.NONE,
    ) -> None:
        sessions = _sessions(config, host, lvm.run, host.converse) if host.converse else None
        engines = self.engines = Engines(lvm, host.disks, host.devices, config.groups, sessions)
        known = self.inventory = Inventory(engines, host.devices, foundations)
        self.node = preflight.Node(
            config,
            host.kernel,
            host.run,
            lambda: known.recent()[0],
            refused=lambda: known.refused,
        )
        self.admission = Admission()
        self.readiness = Readiness(known, self.node, self.admission)
        means = Means(config, host.run, host.kernel, engines, known, host.devices, host.stream)
        locks = self.locks = VolumeLocks()
        self.wiper = Wiper(means)
        self.reclaimer = Reclaimer(means)
        self.giving_up = GivingUp(means)
        self.wiper.emptied = partial(self.reclaimer.after, wait_seconds=0)
        self.wiper.given_up = self.giving_up.start
        self.grower = Grower(means)
        snapshotter = Snapshotter(means, self.wiper, self.reclaimer)
        self.group_snapshotter = GroupSnapshotter(
            means, host.devices, snapshotter, self.wiper, locks
        )
        self.copier = Copier(means, snapshotter)
        withheld = self.withheld = Withheld()
        self.reencrypter = Reencrypter(means)
        provision = Provisioner(
            means, self.wiper, self.reclaimer, self.copier, self.reencrypter, withheld
        )
        diagnosis = self.diagnosis = Diagnosis(host.kernel, host.devices, known)
        self.zeroer = Zeroer(means)
        expander = Expander(means, self.zeroer)
        access = Access(means, self.wiper, self.copier, expander, self.reencrypter, withheld)
        self.delta = Delta(means)
        metadata = SnapshotMetadata(self.delta)
        transfer = Transfer(
            Sender(means),
            Receiver(means, provision, self.reclaimer, withheld),
            Mover(means, provision, withheld),
            metadata,
            locks,
        )
        health = VolumesHealth(
            host.kernel, engines, known, diagnosis, access.check, config.kubelet_dir
        )
        self.storage = StorageHealth(engines, known, diagnosis, self.node, self.admission)
        repairer = Repairer(means)
        self.auto_repair = AutoRepair(means, repairer)
        self.replacement = Replacement(means, repairer)
        operator = Operator(repairer, self.replacement, locks)
        self.ephemeral = Ephemeral(means, provision, access, locks)
        self.orphans = _orphans(config, host, known)
        self._server = grpc.server(
            ThreadPoolExecutor(admission.THREADS, thread_name_prefix="rpc"),
            interceptors=[Interceptor(observe, self.admission)],
        )
        self._server.add_generic_rpc_handlers((operator.handler(), transfer.handler()))
        csi_pb2_grpc.add_IdentityServicer_to_server(
            Identity(self.readiness, config.driver_name), self._server
        )
        csi_pb2_grpc.add_ControllerServicer_to_server(
            Controller(config, provision, expander, snapshotter, health, locks), self._server
        )
        csi_pb2_grpc.add_GroupControllerServicer_to_server(
            GroupController(config, self.group_snapshotter, locks), self._server
        )
        csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(metadata, self._server)
        csi_pb2_grpc.add_NodeServicer_to_server(
            Node(config, expander, access, self.ephemeral, health, self.storage, locks),
            self._server,
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
        if self.orphans is not None:
            self.orphans.stop()
        # Before the wait: a stream may last for hours.
        self.delta.stop()
        self._server.stop(_DRAIN_SECONDS).wait()
        self.grower.stop()
        self.auto_repair.stop()
        self.zeroer.stop()
        self.copier.stop()
        self.reencrypter.stop()
        self.wiper.stop()
        self.reclaimer.stop()
        self.giving_up.stop()
        self.engines.stop()


def _sessions(config: Config, host: Host, run: Run, converse: Converse) -> Callable[[str], Session]:
    """How an engine's session with lvm2 is made: in a directory that the host sees, too."""
    directory = config.endpoint.parent / "lvm"

    def begin(group: str) -> Session:
        return Session(run, converse, directory / group, root=config.lvm_root, observe=host.observe)

    return begin


def serve(config: Config, host: Host) -> None:
    """Serve until SIGTERM or SIGINT. Raises SocketTaken, NotReady."""
    secret.forbid_dumps()
    with claimed(config.endpoint), contextlib.ExitStack() as ending:
        metrics = None
        if config.metrics_address is not None:
            metrics = _metrics()
            host = _counted(host, metrics)
        observe = metrics.count_call if metrics else None
        lvm, foundations = Lvm(host.run), Foundations(host.kernel)
        service = Service(config, host, lvm, observe, foundations)

        def take_up(group: str) -> None:
            sources.lay(lvm, foundations, config, service.engines, group)
            resume(service, group)

        resumption = Resumption(service.engines, take_up)
        ended = _until_signal()

        def begin() -> None:
            with (
                suspension.left(host.devices, config.groups) as held,
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


def _orphans(config: Config, host: Host, known: Inventory) -> "OrphanWatch | None":
    if not config.orphan_interval_seconds:
        return None
    # Imported here: who does not ask for it reads no kubeconfig.
    from agent.orphans import look
    from agent.orphans.watch import OrphanWatch

    seeker = look.seeker(config, host.kernel, known)
    return OrphanWatch(seeker.look, config.orphan_interval_seconds)


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


def resume(service: Service, *groups: str) -> None:
    """Take up the wipes and copies that are left in these groups, or in all.

    Raises what a look at them raises. What lvm2 refuses is left to the next time: it must not keep
    all calls waiting.
    """
    try:
        service.inventory.read(*groups)
    except errors.GroupRefused:
        return  # told by the engine, and by each call
    service.withheld.resume(service.inventory, *groups)
    steps = {
        "wipes": service.wiper.resume,
        "empty pools": service.reclaimer.resume,
        "groups to be swept": service.giving_up.resume,
        "groups with a disk that is being emptied": service.replacement.resume,
        "half-made group snapshots": service.group_snapshotter.resume,
        "copies": service.copier.resume,
        "metadata snapshots": service.delta.reservations.resume,
    }
    for what, step in steps.items():
        try:
            count = step(*groups)
        except lvm_errors.OutcomeUnknown:
            raise
        except lvm_errors.LvmError as error:
            _log.error("%s that were left are not seen to before the next start: %s", what, error)
            continue
        if count:
            _log.info("going on with %d %s that were left", count, what)


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
