"""Prometheus metrics of the controller: counters, histograms and gauges of calls and nodes."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from agent.daemon import node_metrics
from agent.daemon.extra import Gauge
from agent.extras.controller.call_records import Call
from agent.extras.controller.nodes import Nodes

# Bounds, in seconds, of the buckets of the histogram of a node's answer times. The buckets are few,
# as each node has its own histogram.
_NODE_BUCKETS = (0.01, 0.05, 0.25, 1, 5, 30)
# Bounds, in seconds, of the buckets of the histograms of call durations.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The controller's Prometheus metrics of CSI calls and of nodes.

    Calls are counted as they end, by method, node and gRPC code. The state of the nodes is read at
    each scrape. The counters of a node that has left the cluster are removed at the next scrape.
    """

    CONTENT_TYPE = node_metrics.Metrics.CONTENT_TYPE

    def __init__(self, nodes: Nodes, gauges: Callable[[], Iterable[Gauge]] = tuple) -> None:
        registry = self._registry = CollectorRegistry()
        self._nodes = nodes
        # The label values (method, node, code) with which calls were counted, by the node's name.
        self._labels: dict[str, set[tuple[str, str, str]]] = {}
        self._calls = Counter(
            "carver_controller_calls",
            "Calls that ended, by the node that they were passed on to.",
            ["method", "node", "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            "carver_controller_call_duration_seconds",
            "Duration of calls, with what the nodes took.",
            ["method"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._own_seconds = Histogram(
            "carver_controller_routing_duration_seconds",
            "Duration of calls without what the nodes took.",
            ["method"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._node_seconds = Histogram(
            "carver_controller_node_answer_duration_seconds",
            "How long the node took to answer a call.",
            ["node"],
            buckets=_NODE_BUCKETS,
            registry=registry,
        )
        registry.register(_OfNodes(nodes, gauges))
        ProcessCollector(registry=registry)

    def count_call(self, call: Call) -> None:
        """Count a call that ended, and record its durations in the histograms."""
        labels = call.method, call.node, call.code.name
        self._calls.labels(*labels).inc()
        self._labels.setdefault(call.node, set()).add(labels)
        for node, seconds in call.nodes_seconds:
            self._node_seconds.labels(node).observe(seconds)
            self._labels.setdefault(node, set())
        self._seconds.labels(call.method).observe(call.seconds)
        self._own_seconds.labels(call.method).observe(max(0.0, call.seconds - call.node_seconds))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format.

        First removes the metrics of nodes that have left the cluster.
        """
        for node in [name for name in list(self._labels) if name and self._nodes.get(name) is None]:
            for labels in self._labels.pop(node):
                self._calls.remove(*labels)
            self._node_seconds.remove(node)
        return generate_latest(self._registry)


class _OfNodes(Collector):
    """Collects the metrics of nodes, and the gauges of extras, at each scrape."""

    def __init__(self, nodes: Nodes, gauges: Callable[[], Iterable[Gauge]]) -> None:
        self._nodes, self._gauges = nodes, gauges

    def collect(self) -> Iterator[Metric]:
        answers = GaugeMetricFamily(
            "carver_controller_node_answers",
            "1 if the node answered when it was asked last, else 0.",
            labels=["node"],
        )
        age = GaugeMetricFamily(
            "carver_controller_node_answer_age_seconds",
            "How long ago the node answered last.",
            labels=["node"],
        )
        refused = CounterMetricFamily(
            "carver_controller_refused_answers",
            "Answers of the node that were not passed on, as they cannot be true.",
            labels=["node"],
        )
        contested = GaugeMetricFamily(
            "carver_controller_node_contested_groups",
            "Volume groups of the node that other nodes have, too.",
            labels=["node"],
        )
        now = time.monotonic()
        for node in self._nodes:
            answers.add_metric([node.name], 0.0 if node.problem else 1.0)
            refused.add_metric([node.name], node.refused_answers)
            contested.add_metric([node.name], self._nodes.contested(node))
            if node.answered_seconds:
                age.add_metric([node.name], now - node.answered_seconds)
        yield answers
        yield age
        yield refused
        yield contested
        yield from map(node_metrics.of_extra, self._gauges())
