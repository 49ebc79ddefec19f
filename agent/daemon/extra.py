"""The interface of optional parts of the service (agent/core/extras.py lists them)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from proto import csi_pb2 as csi


@dataclass(frozen=True)
class Gauge:
    """A gauge for Prometheus: its values by the values of its label, or by "" without a label."""

    name: str
    help: str
    values: Mapping[str, float]
    label: str = ""


class Extra:
    """An extra of a running service; each method does nothing unless it is overridden."""

    # Optional CSI services that this extra adds to the plugin (csi.v1.PluginCapability).
    offered: Sequence[csi.PluginCapability.Service.Type.ValueType] = ()

    def add_services(self, server: grpc.Server) -> None:
        """Register gRPC services, before the server starts."""

    def recoveries(self) -> Mapping[str, Callable[..., int]]:
        """Return steps of recovery by a name of the work that they resume.

        Each takes names of groups, or none for all, and returns how many jobs it resumed.
        """
        return {}

    def start(self) -> None:
        """Start background work; called when the groups have answered."""

    def stop(self) -> None:
        """Stop background work and long streams; called before calls in flight are waited for."""

    def gauges(self) -> Iterable[Gauge]:
        """Measure; called at each scrape."""
        return ()
