"""Pages of metrics as Prometheus reads them: a node's on the fakes, a controller's, a sidecar's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import configured
import expect
from fakes.host import FakeHost
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from serving import machine

from agent.csi.client import Client, block
from agent.daemon.node_metrics import Metrics
from agent.daemon.registration import Registration
from agent.daemon.server import Service
from agent.extras.controller import controller_metrics as controller_metrics
from agent.extras.controller.call_records import Call
from agent.extras.controller.membership import Serving
from agent.extras.controller.nodes import Nodes
from agent.extras.evacuation import evacuation_metrics
from agent.extras.evacuation.progress import NodeProgress, Stage, UnitProgress, VolumeProgress
from agent.extras.orphans.look import OrphanWatch
from agent.extras.orphans.orphans_service import Orphans
from agent.settings.classes import DeviceClass
from lvm.layout import Layout, Reserve
from lvm.lvm2 import Lvm
from lvm.thin import Policy
from mount.command import Result

MIB = 1 << 20


@dataclass
class Measured:
    """A service that is counted, its machine, and what a scraper would read."""

    metrics: Metrics
    host: FakeHost
    client: Client
    service: Service
    registration: Registration

    def samples(self) -> dict[tuple[str, ...], float]:
        """Each sample's value, by its name and its labels' values, in the order of their names."""
        families = text_string_to_metric_families(self.metrics.text().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


@contextmanager
def measured(directory: Path) -> Iterator[Measured]:
    """A service on a machine in memory, with a group and four classes; one's group is missing."""
    host = FakeHost(directory)
    host.lvm2.add_group("data", [100, 60])
    config = configured.carver(
        directory,
        classes=(
            DeviceClass(name="plain", group="data", default=True),
            DeviceClass(name="kept", group="data", reserve=Reserve(percent=10)),
            DeviceClass(name="lost", group="gone"),
            DeviceClass(name="thin", group="data", layout=Layout("thin"), pool=Policy()),
        ),
    )
    metrics = Metrics()
    run = metrics.counted(host.run)
    lvm = Lvm(run, settings=())
    service = Service(config, replace(machine(host), run=run), lvm, metrics.count_call)
    kubelet = Registration(directory / "registry", config.endpoint)
    service.extras["orphans"] = Orphans(OrphanWatch(list, interval_seconds=600))
    metrics.watch(service, kubelet)
    service.start(config.endpoint)
    with Client(config.endpoint) as client:
        yield Measured(metrics, host, client, service, kubelet)
    service.stop()


def fill(measured: Measured) -> None:
    """Make volumes of each kind, so that the node has something of each metric but health's."""
    limit = {"writeIOPS": "100"}
    measured.client.delete(measured.client.create("pvc-0", 4 * MIB, block()).volume_id)
    volume = measured.client.create("pvc-1", 4 * MIB, block(), mutable=limit)
    directory = measured.host.directory
    measured.client.stage(volume, directory / "staging", block())
    measured.client.publish(volume, directory / "staging", directory / "target", block())
    measured.client.snapshot("1", volume.volume_id)
    how = {"class": "thin", "carver/encryption": "luks2"}
    measured.client.create("pvc-2", 4 * MIB, block(), parameters=how)


def spoil(measured: Measured) -> None:
    """Take a disk away from the node, and with it a volume."""
    measured.host.lvm2.groups["data"].volumes["vol-pvc-1"].health = "partial"
    measured.host.lvm2.groups["data"].disks[1].missing = True
    measured.client.capacity()


def call(measured: Measured) -> None:
    """Make calls that end well, and some that lvm2 or Carver refuses."""
    measured.client.capacity()
    with expect.code("INVALID_ARGUMENT"):
        measured.client.create("", 4 * MIB, block())
    failure = Result(5, "", "a failure")
    measured.host.intercept = lambda words: failure if "lvcreate" in words else None
    with expect.code("INTERNAL"):
        measured.client.create("refused", 4 * MIB, block())
    measured.host.intercept = lambda _words: None


def of_the_controller() -> controller_metrics.Metrics:
    """The metrics of a cluster's controller that has one node and had one call."""

    def connect(name: str, address: str) -> Any:
        raise AssertionError((name, address))

    nodes = Nodes("lvm.csi.carver", connect)
    nodes.set({"node-1": Serving("")})
    [node] = nodes
    node.answered_seconds = 1.0
    evacuated = VolumeProgress("data@0f0f0f0f/vol-pvc-1", "shop/data", Stage.COPYING, 4 * MIB)
    unit = UnitProgress(evacuated.volume_id, "node-2", Stage.COPYING, (evacuated,))
    evacuations = [NodeProgress(node.name, "evacuate", (unit,))]
    metrics = controller_metrics.Metrics(nodes, lambda: evacuation_metrics.gauges(evacuations))
    call = Call("CreateVolume", node=node.name, nodes_seconds=[(node.name, 0.1)])
    metrics.count_call(call)
    return metrics


class Sidecar:
    """A sidecar's metrics, by kubernetes-csi/csi-lib-utils (metrics/metrics.go, v0.25.0)."""

    def __init__(self, driver: str = "lvm.csi.carver") -> None:
        self._registry = CollectorRegistry()
        self._driver = driver
        self._seconds = Histogram(
            "csi_sidecar_operations_seconds",
            "Container Storage Interface operation duration with gRPC error code status total",
            ["driver_name", "method_name", "grpc_status_code"],
            registry=self._registry,
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600),
        )
        ProcessCollector(registry=self._registry)

    def call(self) -> None:
        """Count a volume that was created, and one that was not."""
        for code in ("OK", "ResourceExhausted"):
            labels = (self._driver, "/csi.v1.Controller/CreateVolume", code)
            self._seconds.labels(*labels).observe(0.3)

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)
