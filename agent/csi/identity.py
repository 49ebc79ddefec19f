"""CSI Identity: the plugin's name, version, capabilities and readiness."""
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
# Read from a file, so only once.
_version = cache(version)


def capabilities(
    offered: Iterable[csi.PluginCapability.Service.Type.ValueType] = (),
) -> csi.GetPluginCapabilitiesResponse:
    """The answer to GetPluginCapabilities; `offered` are services that not every Carver has."""
    services = (
        _Service.CONTROLLER_SERVICE,
        _Service.VOLUME_ACCESSIBILITY_CONSTRAINTS,
        _Service.GROUP_CONTROLLER_SERVICE,
        _Service.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS,
        *offered,
    )
    found = [csi.PluginCapability(service=_Service(type=service)) for service in services]
    found.append(csi.PluginCapability(volume_expansion=_Expansion(type=_Expansion.ONLINE)))
    return csi.GetPluginCapabilitiesResponse(capabilities=found)


class Identity(csi_pb2_grpc.IdentityServicer):
    """The Identity service."""

    def __init__(
        self,
        readiness: Readiness,
        driver_name: str,
        offered: Iterable[csi.PluginCapability.Service.Type.ValueType] = (),
    ) -> None:
        """`offered` are optional services, beside those that Carver always has."""
        self._readiness = readiness
        self._offered = tuple(offered)
        self._name = driver_name
        self._version = _version("carver")

    def GetPluginInfo(
        self, request: csi.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginInfoResponse:
        """Name and version."""
        return csi.GetPluginInfoResponse(name=self._name, vendor_version=self._version)

    def GetPluginCapabilities(
        self, request: csi.GetPluginCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginCapabilitiesResponse:
        """Optional services; volumes and snapshots belong to one node, and volumes grow in use."""
        return capabilities(self._offered)

    def Probe(self, request: csi.ProbeRequest, context: grpc.ServicerContext) -> csi.ProbeResponse:
        """Whether the start is over; NotReady says why nothing can be served.

        The sidecars' ProbeForever (csi-lib-utils, rpc) asks again where it is not, and ends where
        the call fails.
        """
        ready = self._readiness.probe()
        return csi.ProbeResponse(ready=wrappers_pb2.BoolValue(value=ready))
