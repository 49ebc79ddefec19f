"""The interface of extras: optional parts of the service, listed in agent/core/extras.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from proto import csi_pb2 as csi


@dataclass(frozen=True)
class Gauge:
    """A gauge for Prometheus.

    `values` has a number for the values of the labels whose names are in `labels`; for a gauge
    without labels, the key is empty.
    """

    name: str
    help: str
    values: Mapping[tuple[str, ...], float]
    labels: tuple[str, ...] = ()


class Extra:
    """An optional part of a running service; by default each method does nothing."""

    # CSI services that the extra adds to the services of the plugin (csi.v1.PluginCapability).
    offered: Sequence[csi.PluginCapability.Service.Type.ValueType] = ()

    def add_services(self, server: grpc.Server) -> None:
        """Register the extra's gRPC services with the server, before the server starts."""

    def recoveries(self) -> Mapping[str, Callable[..., int]]:
        """Return functions that resume interrupted work, by the name of the work.

        Each function takes names of volume groups, or no name for all groups, and returns the
        number of jobs that were resumed. Log lines use the name of the work.
        """
        return {}

    def start(self) -> None:
        """Start the extra's background work; called once start-up is complete."""

    def stop(self) -> None:
        """Stop background work and streams; called before the service waits for RPCs in flight."""

    def gauges(self) -> Iterable[Gauge]:
        """Measure and return the extra's gauges; called at each scrape of the metrics."""
        return ()
