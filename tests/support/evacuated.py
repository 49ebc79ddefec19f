"""Views of a cluster for the plan of an evacuation, with volumes of the node `source`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.extras.evacuation.plan import (
    Claim,
    Moving,
    Node,
    PersistentVolume,
    Pod,
    Room,
    Snapshot,
    View,
    Volume,
)
from agent.extras.evacuation.scheduling import NodeTerm, Requirement

GIB = 1 << 30
SOURCE = "source"
HOSTNAME = "kubernetes.io/hostname"
# The node affinity of the PersistentVolumes of the node.
HERE = (NodeTerm((Requirement("topology.lvm.csi.carver/node", "In", (SOURCE,)),)),)


def handle(name: str) -> str:
    """The id of a volume."""
    return f"data@abcdefgh/vol-{name}"


def node(name: str, gib: float = 100, *, classes: Sequence[str] = ("fast",), **more: Any) -> Node:
    """A node with so much space for each class, in a pool of its own."""
    rooms: Mapping[str, Room] = {one: Room(f"pool-{one}", int(gib * GIB)) for one in classes}
    labels = {HOSTNAME: name, **more.pop("labels", {})}
    return Node(name, labels=labels, **{"rooms": rooms, **more})


@dataclass
class Cluster:
    """A cluster that is made step by step; all is of the namespace shop."""

    nodes: list[Node] = field(default_factory=lambda: [node(SOURCE)])
    volumes: list[Volume] = field(default_factory=list)
    persistent_volumes: list[PersistentVolume] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    moves: list[Moving] = field(default_factory=list)

    def volume(self, name: str, gib: float = 10, *, device_class: str = "fast") -> None:
        """A volume with its claim of that name, which no pod uses."""
        self.volumes.append(Volume(handle(name), int(gib * GIB), device_class))
        self.claims.append(Claim("shop", name, f"uid-{name}", f"pv-{name}"))
        self.persistent_volumes.append(
            PersistentVolume(
                *(f"pv-{name}", f"uid-pv-{name}", handle(name)),
                claim_namespace="shop",
                claim_name=name,
                claim_uid=f"uid-{name}",
                affinity=HERE,
            )
        )

    def pod(self, name: str, *claims: str, **more: Any) -> None:
        """A pod of a StatefulSet on the node, which uses claims."""
        kept = {"node": SOURCE, "controller": "StatefulSet", "claims": claims, **more}
        self.pods.append(Pod("shop", name, f"uid-{name}", **kept))

    @property
    def view(self) -> View:
        return View(
            SOURCE,
            *(self.nodes, self.volumes, self.persistent_volumes, self.claims, self.pods),
            *(self.snapshots, self.moves),
        )
