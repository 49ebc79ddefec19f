"""The CSI Identity service: the plugin's name, version, capabilities and readiness."""
# ruff: noqa: N802

from collections.abc import Iterable
from functools import cache
from importlib.metadata import version

import grpc
from google.protobuf import wrappers_pb2

from agent.operations.storage_health import Readiness
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

_Service = csi.PluginCapability.Service
_Expansion = csi.PluginCapability.VolumeExpansion
# Version of an installed package, cached: importlib.metadata reads it from a file.
_version = cache(version)


def capabilities(
    optional_services: Iterable[csi.PluginCapability.Service.Type.ValueType] = (),
) -> csi.GetPluginCapabilitiesResponse:
    """The response of GetPluginCapabilities; extras add the `optional_services`."""
    services = (
        _Service.CONTROLLER_SERVICE,
        _Service.VOLUME_ACCESSIBILITY_CONSTRAINTS,
        _Service.GROUP_CONTROLLER_SERVICE,
        _Service.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS,
        *optional_services,
    )
    supported = [csi.PluginCapability(service=_Service(type=service)) for service in services]
    supported.append(csi.PluginCapability(volume_expansion=_Expansion(type=_Expansion.ONLINE)))
    return csi.GetPluginCapabilitiesResponse(capabilities=supported)


class Identity(csi_pb2_grpc.IdentityServicer):
    """The CSI Identity service of this node."""

    def __init__(
        self,
        readiness: Readiness,
        driver_name: str,
        optional_services: Iterable[csi.PluginCapability.Service.Type.ValueType] = (),
    ) -> None:
        """Store the name, services and readiness that the RPCs return.

        The extras add the `optional_services`.
        """
        self._readiness = readiness
        self._optional_services = tuple(optional_services)
        self._name = driver_name
        self._version = _version("carver")

    def GetPluginInfo(
        self, request: csi.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginInfoResponse:
        """Return the plugin's name and version."""
        return csi.GetPluginInfoResponse(name=self._name, vendor_version=self._version)

    def GetPluginCapabilities(
        self, request: csi.GetPluginCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginCapabilitiesResponse:
        """Return the services and properties of the plugin.

        The properties are that a volume or snapshot is accessible on one node only, and that
        volumes can grow while they are in use.
        """
        return capabilities(self._optional_services)

    def Probe(self, request: csi.ProbeRequest, context: grpc.ServicerContext) -> csi.ProbeResponse:
        """Return whether start-up is complete; raise NotReady if the node can serve nothing.

        The function ProbeForever of the sidecars (csi-lib-utils, rpc) retries while start-up is not
        complete, and gives up if the RPC fails.
        """
        is_ready = self._readiness.probe()
        return csi.ProbeResponse(ready=wrappers_pb2.BoolValue(value=is_ready))
