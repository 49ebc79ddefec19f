"""The node's server for the cluster's controller: CSI over mutual TLS, beside the unix socket.

The server offers CSI's services Identity, Controller, GroupController and SnapshotMetadata. It does
not offer CSI's Node service. With the setting `evacuation` it also offers those of Carver's own
RPCs by which volumes move from node to node.
"""

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import grpc

from agent.core import errors, ids
from agent.csi.identity import Identity
from agent.daemon.extra import Extra
from agent.daemon.grpc_servers import stop_server
from agent.daemon.server import Service
from agent.extras.controller import routes
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.settings.settings import Config
from agent.settings.values import Address
from agent.work import locks
from agent.work.background import PeriodicTask
from lvm.labels import PhysicalLabel
from mount import mount_errors as mount_errors
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

if TYPE_CHECKING:
    from agent.extras.controller.enrolling import Enroller
    from agent.extras.transfer.transfer_service import Transfer

_log = logging.getLogger(__name__)

# Time, in seconds, for which calls in flight may go on when the server stops. The time is the same
# for the server on the unix socket.
_DRAIN_SECONDS = 25.0
# Seconds until a failed task is first retried: listening on an address, which another process may
# use, and the search for other volume groups.
_TAKEN_SECONDS = 15.0
# Seconds between two searches for volume groups of Carver's that the service does not know; also
# the longest interval between retries of a failed search.
_GROUPS_SECONDS = 600.0
# Paths of the RPCs that other nodes call. Their handlers check the caller by the grant of the
# controller.
_OF_NODES = tuple(f"/carver.v2.Transfer/{name}" for name in ("Send", "SendDiffering"))


class NotListening(errors.AgentError):
    """Error: the server for the cluster's controller cannot listen on its address."""


class OtherGroups(errors.AgentError):
    """Error: volume groups of Carver's cannot be read, or a disk may have an unknown one."""


class Listener(Extra):
    """The node's server for the cluster's controller; does nothing without `controller_address`."""

    def __init__(self, service: Service) -> None:
        """Check the settings and certificates of the server, and make its background tasks.

        Raises BadConfig, before calls are served, if a setting is missing or tls_directory has no
        usable certificate.
        """
        self._service = service
        config, address = service.configuration.now, self._address
        self._server: grpc.Server | None = None
        self._threads: ThreadPoolExecutor
        self._enroller: Enroller | None = None
        failure = "not all volume groups on this node's disks are known: %s"
        # Search for other volume groups in a background task, so that a disk that hangs delays
        # neither the start nor enrolment.
        self._tasks = [
            PeriodicTask(
                *("other groups", self.find_other_groups, _GROUPS_SECONDS, failure),
                retry_seconds=_TAKEN_SECONDS,
                longest_retry_seconds=_GROUPS_SECONDS,
            )
        ]
        # The port on which the server listens; 0 before the server was started.
        self.port = 0
        # Whether the last search found that all volume groups of Carver's on the disks are known;
        # the values are those of routes.IS_WHOLE.
        self._is_whole = ""
        if address is None:
            return
        if config.controllers is not None:
            if not config.advertised_host:
                raise errors.BadConfig("controllers", "advertised_host", "is required beside it")
            advertised = Address(config.advertised_host, address.port)
            self._enroller = _enroller(config, str(advertised), self.serve)
            self._tasks.append(self._enroller.task)
        elif config.tls_directory is None:
            raise errors.BadConfig(
                "controller_address",
                "tls_directory",
                "is required, or controllers: only TLS is served there",
            )
        else:
            Certificates.read(config.tls_directory)
            failure = "cannot serve the cluster's controller: %s"
            task = PeriodicTask("listening", self.serve, _TAKEN_SECONDS, failure)
            self._tasks.append(task)

    @property
    def _address(self) -> Address | None:
        return self._service.configuration.now.controller_address

    def start(self) -> None:
        """Start the background tasks, which start the server once the node has a certificate.

        Without `controller_address` nothing is started.
        """
        if self._address is not None:
            for task in self._tasks:
                task.start()

    def _certificates(self) -> Certificates:
        """Return this node's certificate and key, and the authorities that it trusts.

        Raises BadConfig if a file cannot be read.
        """
        if self._enroller is not None:
            return self._enroller.certificates
        directory = self._service.configuration.now.tls_directory
        if directory is None:
            raise errors.BadConfig("default", "tls_directory", "is required")
        return Certificates.read(directory)

    def serve(self) -> None:
        """Start the server, unless it was started before.

        Raises NotListening if the server cannot listen on its address, BadConfig if the
        certificates cannot be read.
        """
        if self._server is not None:
            return
        service, name = self._service, self._service.configuration.now.driver_name
        transfer = self._transfer()
        only_controller = certificates.OnlyFrom(
            certificates.controller_name(name),
            checked_otherwise=() if transfer is None else _OF_NODES,
        )
        self._threads = ThreadPoolExecutor(locks.THREADS, thread_name_prefix="controller")
        server = grpc.server(
            self._threads,
            interceptors=[only_controller, service.interceptor],
            options=certificates.SERVER_OPTIONS,
        )
        csi_pb2_grpc.add_IdentityServicer_to_server(
            _RoutedIdentity(service, lambda: self._is_whole), server
        )
        csi_pb2_grpc.add_ControllerServicer_to_server(service.controller, server)
        csi_pb2_grpc.add_GroupControllerServicer_to_server(service.group_controller, server)
        if (changed_blocks := service.extras.get("changed_blocks")) is not None:
            changed_blocks.add_services(server)
        if transfer is not None:
            transfer.add_between_nodes(server, self._certificates)
        credentials = certificates.server_credentials(self._certificates)
        try:
            self.port = server.add_secure_port(str(self._address), credentials)
        except RuntimeError as error:
            raise NotListening(f"{self._address}: {error}") from None
        server.start()
        self._server = server
        _log.info("serving the cluster's controller on %s", self._address)

    def _transfer(self) -> "Transfer | None":
        """Return the extra that moves volumes from node to node; None if that is not to be."""
        extra = self._service.extras.get("transfer")
        if extra is None or not self._service.configuration.now.evacuation:
            return None
        return cast("Transfer", extra)

    def stop(self) -> None:
        """Stop the server for the cluster's controller, and its background tasks.

        Calls in flight may go on for _DRAIN_SECONDS, and are then cancelled.
        """
        for task in self._tasks:
            task.stop()
        if self._server is not None:
            stop_server(self._server, self._threads, _DRAIN_SECONDS, _DRAIN_SECONDS + 1)

    def find_other_groups(self) -> None:
        """Search the disks for volume groups with Carver's tags that the service does not know.

        The service then knows these volume groups, and calls reach their volumes. The service does
        not know a volume group that no class names, or that was not recovered since the start.

        Raises OtherGroups if a volume group cannot be read, or if a disk may have such a group. The
        node then reports to the controller that it may have further volume groups.
        """
        is_whole = routes.IN_PART
        try:
            self._find_other_groups()
            is_whole = routes.YES
        finally:
            self._is_whole = is_whole

    def _find_other_groups(self) -> None:
        groups, problems = self._service.volume_groups, []
        for label in groups.scan().values():
            group = label.group if isinstance(label, PhysicalLabel) else None
            if group is None or not group.has_own_tags or group.uuid in groups.uuids().values():
                continue
            try:
                if (volume_group := groups.of(group.name)) is not None:
                    volume_group.state()
            except (errors.AgentError, mount_errors.CommandError) as error:
                problems.append(f"{group.name}: {error}")
        problems += [f"{path}: {why}" for path, why in groups.unknown_disks()]
        if problems:
            raise OtherGroups("; ".join(sorted(set(problems))))


def _enroller(config: Config, address: str, begin: Callable[[], None]) -> "Enroller":
    # Import the module here: its library `cryptography` takes memory, and only enrolment needs it.
    from agent.extras.controller.enrolling import Enroller

    return Enroller(config, address, begin)


class _RoutedIdentity(Identity):
    """CSI's Identity service, which also reports the node's volume groups to the controller."""

    def __init__(self, service: Service, is_whole: Callable[[], str]) -> None:
        self._configuration, self._is_whole = service.configuration, is_whole
        self._volume_groups, self._storage = service.volume_groups, service.storage
        name = service.configuration.now.driver_name
        super().__init__(service.readiness, name, service.offered)

    def GetPluginInfo(  # noqa: N802
        self, request: csi.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginInfoResponse:
        """Return the driver's name and version, and facts about the node in the manifest.

        The facts are the node's id, its topology, its volume groups, whether these are all of them,
        and whether kubelet asks for volume health. The call runs no command.
        """
        answer = super().GetPluginInfo(request, context)
        answer.manifest[routes.NODE_ID] = self._configuration.now.node_id
        answer.manifest[routes.SEGMENTS] = json.dumps(self._configuration.now.here)
        answer.manifest[routes.IS_WATCHED] = routes.YES if self._storage.is_watched() else ""
        # Read IS_WHOLE before the volume groups: more groups may become known in between.
        answer.manifest[routes.IS_WHOLE] = self._is_whole()
        answer.manifest[routes.GROUPS] = json.dumps(self._groups())
        return answer

    def _groups(self) -> Mapping[str, str]:
        """Return the names of this node's known volume groups, by the start of their UUIDs."""
        return {ids.start_of(uuid): name for name, uuid in self._volume_groups.uuids().items()}


def add(service: Service) -> Listener:
    """Return the node's server for the cluster's controller, an extra of the service."""
    return Listener(service)
