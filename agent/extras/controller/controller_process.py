"""The process of the cluster's controller: serves the sidecars in one event loop until a signal."""

import asyncio
import logging
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import grpc

from agent.core import errors, extras
from agent.daemon import monitor
from agent.daemon.extra import Extra
from agent.daemon.service_process import ProcessEnder, claimed, process_ender
from agent.extras.controller import nodes
from agent.extras.controller.call_records import Call, Observe, unobserved
from agent.extras.controller.claims import ClaimQuestions
from agent.extras.controller.membership import Record, Serving
from agent.extras.controller.node_moves import NodeMoves
from agent.extras.controller.nodes import Nodes
from agent.extras.controller.router import Router
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.settings.settings import Config
from mount import calls
from mount.text import counted
from proto import carver_pb2 as carver

_log = logging.getLogger(__name__)

# Seconds between two calls of the source's `look`, which reads nodes and certificates; also between
# two checks which nodes are due for a GetPluginInfo call.
_LOOK_SECONDS = 1.0
# Time, in seconds, for which calls in flight may go on when the process stops.
_DRAIN_SECONDS = 25.0
# Time limit, in seconds, from the signal that stops the process to its end, also while the API
# server does not answer. Kubelet's grace period is longer.
_STOP_SECONDS = 28.0
# Seconds from the start of the process to the first search for orphans. In this time, nodes enrol.
_ORPHANS_SECONDS = 60.0


class Source(Protocol):
    """The source of the controller's nodes and certificates: files, or a cluster."""

    @property
    def serving(self) -> Mapping[str, Serving]:
        """The nodes of the cluster by name, with their addresses and the UIDs of their Nodes."""

    @property
    def certificates(self) -> Certificates:
        """The controller's certificate and key, and the authorities that the controller trusts."""

    @property
    def record(self) -> Record:
        """What the API server says about members and volume groups; empty without an API server."""

    @property
    def questions(self) -> ClaimQuestions | None:
        """The queue of look-ups of claims at the API server; None without an API server."""

    async def start(self) -> None:
        """Read nodes and certificates for the first time, and start the source's server, if any."""

    async def look(self) -> None:
        """Read nodes and certificates again, each if it is due.

        After an AgentError, what was read last stays in use.
        """

    async def stop(self) -> None:
        """Stop reading, and stop the source's server, if any."""


class Files:
    """A source that reads nodes and certificates from files, for nodes under systemd."""

    record, questions = Record(), None

    def __init__(self, config: Config) -> None:
        """Read the files with nodes and certificates.

        Raises BadConfig if a setting is missing, or a file cannot be read or parsed.
        """
        self._file = _required(config, "nodes_file")
        self._directory = _required(config, "tls_directory")
        self._read()

    def _read(self) -> None:
        read_certificates = Certificates.read(self._directory)
        addresses = nodes.read(self._file)
        self.serving: Mapping[str, Serving] = {
            name: Serving(address) for name, address in addresses.items()
        }
        self.certificates = read_certificates

    async def start(self) -> None:
        """Do nothing: the files were read when this object was made."""

    async def look(self) -> None:
        """Read the files again. Raises BadConfig if one cannot be read or parsed."""
        self._read()

    async def stop(self) -> None:
        """Do nothing: a source of files has nothing to stop."""


class ClusterController:
    """The controller: its nodes, its router, and the server that the sidecars call."""

    def __init__(
        self,
        config: Config,
        source: Source,
        observe: Observe = unobserved,
    ) -> None:
        self.config, self._source = config, source
        self._certificates = source.certificates
        self._problem = ""
        self.nodes = Nodes(config.driver_name, self._connect, source.record)
        self._router = Router(
            *(self.nodes, config.driver_name, version("carver"), observe),
            questions=source.questions,
            attach=config.attach,
        )
        # The moves of volumes from node to node; only with the setting `evacuation` do nodes serve
        # them.
        self.moves = NodeMoves(self.nodes, config.driver_name, lambda: self._certificates, observe)
        self._server: grpc.aio.Server | None = None
        # Handlers of further services on the controller's socket; to be added before the start.
        self.handlers: list[grpc.GenericRpcHandler] = []

    @property
    def record(self) -> Record:
        """What the API server says about members and volume groups; empty without an API server."""
        return self._source.record

    async def start(self) -> None:
        """Start the source of nodes, ask all nodes for volume groups, and serve on a unix socket.

        Only root can connect to the socket. The answers of the nodes are not waited for.
        """
        await self._source.start()
        self.moves.start()
        self.take()
        server = self._server = grpc.aio.server()
        self._router.add_to(server)
        methods: dict[str, Any] = {"Nodes": grpc.unary_unary_rpc_method_handler(self._shown)}
        handler: Any = grpc.method_handlers_generic_handler("carver.v2.Cluster", methods)
        server.add_generic_rpc_handlers((handler, *self.handlers))
        umask = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix://{self.config.endpoint}")
        finally:
            os.umask(umask)
        await server.start()

    async def stop(self) -> None:
        """Stop the controller's server and its source of nodes, and close the nodes' connections.

        Calls in flight may go on for _DRAIN_SECONDS, and are then cancelled.
        """
        self.moves.stop()
        if self._server is not None:
            await self._server.stop(_DRAIN_SECONDS)
        await self._source.stop()
        await self.nodes.close()

    async def look(self) -> None:
        """Read nodes and certificates again by the source, and take them over.

        Each new error is logged, and so is the first success after an error. No error is raised.
        The main loop does not wait for this method: an API server that does not answer delays
        nothing else.
        """
        problem, unexpected = "", None
        try:
            await self._source.look()
        except Exception as error:
            problem = str(error) or type(error).__name__
            unexpected = None if isinstance(error, errors.AgentError) else error
        if problem and problem != self._problem:
            text = "the nodes and certificates stay as they were: %s"
            _log.warning(text, problem, exc_info=unexpected)
        elif self._problem and not problem:
            _log.info("the nodes and certificates can be read again")
        self._problem = problem
        self.take()

    def take(self) -> None:
        """Take over the source's nodes and certificates, and send GetPluginInfo to nodes if due.

        If the certificate has changed, the connections to all nodes are replaced.
        """
        if self._source.certificates != self._certificates:
            self._certificates = self._source.certificates
            self.nodes.reconnect()
            _log.info("connecting to the nodes with another certificate")
        self.nodes.set(self._source.serving)
        self.nodes.ask_due()

    def _connect(self, name: str, address: str) -> grpc.aio.Channel:
        server_name = certificates.node_name(name, self.config.driver_name)
        credentials = self._certificates.for_client()
        # Write the scheme `dns:` out. The address comes from the node, and gRPC must not take a
        # part of the address for a scheme.
        target = f"dns:///{address}"
        return grpc.aio.secure_channel(target, credentials, certificates.options(server_name))

    async def _shown(self, _request: bytes, _context: Any) -> bytes:
        """Answer the call of `carver controller status`: return the state of all nodes."""
        now, monotonic = time.time(), time.monotonic()
        answer = carver.NodesResponse(certificate_ends_seconds=self._certificates.ends_seconds)
        for node in self.nodes:
            answered_at = (
                now - (monotonic - node.answered_seconds) if node.answered_seconds else 0.0
            )
            answer.nodes.add(
                name=node.name,
                address=node.address,
                version=node.version,
                problem=node.problem or self.nodes.conflict(node),
                answered_seconds=answered_at,
                groups=node.groups,
            )
        return answer.SerializeToString()


def run(config: Config) -> None:
    """Serve as the cluster's controller until SIGTERM or SIGINT.

    Raises BadConfig for a wrong setting or file, SocketTaken if another process serves the socket.
    """
    # Forbid core dumps of this process, as its memory may hold the secrets of requests.
    calls.forbid_dumps()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (
        process_ender(_STOP_SECONDS) as ender,
        claimed(config.endpoint),
        ExitStack() as exit_stack,
    ):
        observers: list[Observe] = []
        pages = {"/healthz": monitor.Page(monitor.healthz(config.endpoint))}
        controller = ClusterController(config, _source(config), lambda call: _tell(observers, call))
        tasks = [orphan_watch(config), health_events(config, controller.nodes)]
        for _name, module in extras.modules("controller"):
            tasks += module.add(controller)
        if config.metrics_address is not None:
            from agent.extras.controller.controller_metrics import Metrics

            metrics = Metrics(
                controller.nodes, lambda: [gauge for task in tasks for gauge in task.gauges()]
            )
            observers.append(metrics.count_call)
            pages["/metrics"] = monitor.Page(metrics.text, metrics.CONTENT_TYPE)
        for address in (config.metrics_address, config.health_address):
            if address is not None:
                page_server = monitor.Monitor(address, pages)
                page_server.start()
                exit_stack.callback(page_server.stop)
        asyncio.run(_serve(controller, config, ender, tasks))


def _source(config: Config) -> Source:
    """Return the source of nodes and certificates: files that the settings name, or the cluster.

    The cluster is the source if `nodes_file` is not set. Raises BadConfig if a setting is missing,
    a file cannot be used, or the settings lead to no API server.
    """
    if config.nodes_file is not None:
        return Files(config)
    from agent.extras.controller.enrolment import Enrolment
    from agent.extras.kubernetes import access
    from agent.extras.kubernetes.objects import Lists, Objects

    server = access.find(config.kubeconfig, os.environ)
    return Enrolment(config, Objects(server), Lists(server), access.namespace())


def orphan_watch(config: Config) -> Extra:
    """Return the task that searches for orphans periodically.

    If the settings disable the search, return an extra that does nothing.
    """
    if not config.orphan_interval_seconds:
        return Extra()
    from agent.extras.controller.orphans import ClusterFinder
    from agent.extras.orphans.look import OrphanWatch
    from agent.extras.orphans.orphans_service import Orphans

    search, interval = ClusterFinder(config).search, config.orphan_interval_seconds
    return Orphans(OrphanWatch(search, interval, first_seconds=_ORPHANS_SECONDS))


def health_events(config: Config, cluster_nodes: Nodes) -> Extra:
    """Return the task that writes Events about unhealthy volumes.

    If the settings disable the task, return an extra that does nothing. Raises BadConfig if the
    settings lead to no API server.
    """
    if not config.health_interval_seconds:
        return Extra()
    from agent.extras.controller.health_events import HealthEvents
    from agent.extras.kubernetes import access
    from agent.extras.kubernetes.objects import Lists, Objects

    server = access.find(config.kubeconfig, os.environ)
    return HealthEvents(config, cluster_nodes, Objects(server), Lists(server))


def _tell(observers: Sequence[Observe], call: Call) -> None:
    for observer in observers:
        observer(call)


async def _serve(
    controller: ClusterController, config: Config, ender: ProcessEnder, tasks: Sequence[Extra]
) -> None:
    end_event, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        end_event.set()
        ender.is_stopping.set()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, end)
    await controller.start()
    for task in tasks:
        task.start()
    _log.info("serving %s on %s", counted(len(controller.nodes), "node"), config.endpoint)
    look_task: asyncio.Task[None] | None = None
    while not end_event.is_set():
        try:
            await asyncio.wait_for(end_event.wait(), _LOOK_SECONDS)
        except TimeoutError:
            if look_task is None or look_task.done():
                look_task = loop.create_task(controller.look())
            controller.take()
    for task in tasks:
        task.stop()
    await controller.stop()
    _log.info("stopped")
    # Let `ender` end the process: the end of the event loop would wait for a thread that waits for
    # the API server.
    ender.exit_code = 0
    ender.is_stopped.set()


def _required(config: Config, key: str) -> Path:
    value: Path | None = getattr(config, key)
    if value is None:
        raise errors.BadConfig("carver controller", key, "is required")
    return value
