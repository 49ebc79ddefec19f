"""The node's side: CSI for the cluster's controller over mutual TLS, beside the unix socket.

Identity, Controller, GroupController and SnapshotMetadata only: never Node, nor Carver's own calls.
"""

import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from agent.core import errors, ids, locks
from agent.csi.identity import Identity
from agent.daemon.extra import Extra
from agent.daemon.server import Service
from agent.extras.controller import certificates, nodes
from lvm.labels import PhysicalLabel
from mount import errors as mount_errors
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

_log = logging.getLogger(__name__)

# As the service's own server.
_DRAIN_SECONDS = 25.0


class Listener(Extra):
    """The extra of a running service: does nothing unless `controller_address` is set."""

    def __init__(self, service: Service) -> None:
        """Raises BadConfig without certificates: at the start, before any call is served."""
        self._service, config = service, service.context.config
        self._address = config.controller_address
        self._server: grpc.Server | None = None
        # Where it listens, after its start.
        self.port = 0
        if self._address is None:
            return
        if config.tls_directory is None:
            raise errors.BadConfig(
                "controller_address", "tls_directory", "is required: only TLS is served there"
            )
        self._credentials = certificates.server_credentials(config.tls_directory)

    def start(self) -> None:
        """Listen. An address that cannot be had is logged."""
        if self._address is None:
            return
        service, name = self._service, self._service.context.config.driver_name
        self._find_other_groups()
        only = certificates.OnlyFrom(certificates.controller_name(name))
        server = grpc.server(
            ThreadPoolExecutor(locks.THREADS, thread_name_prefix="controller"),
            interceptors=[only, service.interceptor],
        )
        csi_pb2_grpc.add_IdentityServicer_to_server(_Routed(service), server)
        csi_pb2_grpc.add_ControllerServicer_to_server(service.controller, server)
        csi_pb2_grpc.add_GroupControllerServicer_to_server(service.group_controller, server)
        if (changed_blocks := service.extras.get("changed_blocks")) is not None:
            changed_blocks.add_services(server)
        try:
            self.port = server.add_secure_port(str(self._address), self._credentials)
        except RuntimeError as error:
            _log.error("cannot serve the cluster's controller: %s", error)
            return
        server.start()
        self._server = server
        _log.info("serving the cluster's controller on %s", self._address)

    def _find_other_groups(self) -> None:
        """Locate groups with Carver's tags that no class names, so that calls reach them, too."""
        groups = self._service.volume_groups
        for one in groups.scan().values():
            found = one.group if isinstance(one, PhysicalLabel) else None
            if found is None or not found.has_own_tags or groups.known(found.name) is not None:
                continue
            try:
                if (volume_group := groups.of(found.name)) is not None:
                    volume_group.state()
            except (errors.AgentError, mount_errors.CommandError) as error:
                _log.warning("volume group %s is not served: %s", found.name, error)

    def stop(self) -> None:
        """Let calls in flight end."""
        if self._server is not None:
            self._server.stop(_DRAIN_SECONDS).wait(_DRAIN_SECONDS + 1)


class _Routed(Identity):
    """Identity, which also says what the controller must know of a node."""

    def __init__(self, service: Service) -> None:
        self._config = service.context.config
        self._volume_groups = service.volume_groups
        offered = [one for extra in service.extras.values() for one in extra.offered]
        super().__init__(service.readiness, self._config.driver_name, offered)

    def GetPluginInfo(  # noqa: N802
        self, request: csi.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginInfoResponse:
        """Name and version; in the manifest the node, its topology and its groups. No command."""
        answer = super().GetPluginInfo(request, context)
        answer.manifest[nodes.NODE_ID] = self._config.node_id
        answer.manifest[nodes.SEGMENTS] = json.dumps(self._config.here)
        answer.manifest[nodes.GROUPS] = json.dumps(self._groups())
        return answer

    def _groups(self) -> Mapping[str, str]:
        """The names of the groups that are here, by the start of their UUIDs as ids have it."""
        return {ids.start_of(uuid): name for name, uuid in self._volume_groups.uuids().items()}


def add(service: Service) -> Listener:
    """Make the extra of a service."""
    return Listener(service)
