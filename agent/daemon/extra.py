"""What an optional part of the service may add to it (agent/core/extras.py has their list)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from proto import csi_pb2 as csi


@dataclass(frozen=True)
class Gauge:
    """A value for Prometheus, by the values of one label; by "" where it has no label."""

    name: str
    help: str
    values: Mapping[str, float]
    label: str = ""


class Extra:
    """An extra of a running service; each method does nothing unless it is overridden."""

    # Optional CSI services that the plugin has by this extra (csi.v1.PluginCapability).
    offered: Sequence[csi.PluginCapability.Service.Type.ValueType] = ()

    def add_services(self, server: grpc.Server) -> None:
        """Register gRPC services, before the server starts."""

    def recoveries(self) -> Mapping[str, Callable[..., int]]:
        """Steps of recovery by what they are about.

        Each takes names of groups, or none for all, and returns how much it found to go on with.
        """
        return {}

    def start(self) -> None:
        """Begin background work; called when the groups have answered."""

    def stop(self) -> None:
        """Stop background work and long streams; called before calls in flight are waited for."""

    def gauges(self) -> Iterable[Gauge]:
        """Measure; called at each scrape."""
        return ()
