"""The plan of an evacuation: which volumes of a node move to which nodes, and which stay, and why.

`plan` is a pure function: it reads nothing and changes nothing. cluster_view.py reads its input.

A *unit* is a set of volumes that move to the same node: those that one pod uses, and those with
snapshots in the same group snapshot, both transitively. A unit has one target, or it stays, with a
reason.

The algorithm:

1. Join the volumes of the node into units. A pod uses the volumes of its claims unless it has
   ended. The volume of a generic ephemeral claim is a unit of its own, which stays: the volume is
   deleted with its pod, and made anew for the next one.
2. A unit stays if one of its volumes cannot be moved, or if one of its pods would not be made anew
   on another node (`_volume_problem`, `_pod_problem`).
3. A unit with a move under way keeps the node of that move as its target. If one of its volumes has
   been handed over, the unit also goes on if step 2 says that it stays: its claims can be used by
   no pod before all are rebound.
4. For each other unit, find the nodes that may be its target (`_Candidates`): allowed by `--to`,
   ready, schedulable, served by Carver, with each class of the unit, and allowed to each pod of the
   unit by taints, node affinity, the node affinity of the pod's other PersistentVolumes, and
   required anti-affinity. No new volume goes to a node that is being evacuated itself.
5. Assign the units of step 3 first. Then assign the others by several orders: the largest first or
   the smallest first, each to the node that then has the most space for it. Space of a node is
   subtracted per volume group or thin pool (`Room.pool`). Pods that were assigned count as on
   their target for the anti-affinity of the next ones. The order by which the most units go wins;
   after that, the first order.
6. If not all units go, assign them again for the oldest node alone, for the two oldest, and so on.
   Each of these assignments is compared with the one before, extended by the next node. So a new
   node never makes fewer units go.
7. Order the units: first those under way, then those that no pod uses, then the smaller before the
   larger. Then name in plain sentences what an operator should know (`notes`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.extras.evacuation.scheduling import NodeAffinity, PodTerm, Taint, Toleration

# Maximum number of names in a sentence.
_MOST_NAMED = 5
# Kind of the controller of a DaemonSet's pods.
_DAEMON_SET = "DaemonSet"
# Prefix of the taints that Kubernetes itself sets on a Node by its state.
_OF_STATE = "node.kubernetes.io/"
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Room:
    """The space that a node has for new volumes of one device class.

    `pool` names what the space is taken from: a volume group, or a thin pool. `free_bytes` is the
    size of the largest volume that could be created (GetCapacity). The size of a volume is rounded
    up to a multiple of `step_bytes`. `encrypts` is whether the class encrypts its volumes.
    """

    pool: str
    free_bytes: int
    step_bytes: int = 1
    encrypts: bool = False


@dataclass(frozen=True)
class Node:
    """A Node of the cluster, and what Carver on that node answered.

    `created` is the Node's creationTimestamp. `problem` says why Carver on the node cannot receive
    volumes; empty if it can. `rooms` has the space for each device class of the evacuated volumes
    that the node has. `is_evacuated` is whether an evacuation of the node itself was requested.
    """

    name: str
    created: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_ready: bool = True
    is_schedulable: bool = True
    is_evacuated: bool = False
    problem: str = ""
    rooms: Mapping[str, Room] = field(default_factory=dict)


@dataclass(frozen=True)
class Pod:
    """A pod of the cluster.

    `node` is empty before the pod was scheduled. `claims` has the names of the claims that the pod
    uses. `controller` is the kind of the controller in its ownerReferences; empty without one.
    `is_static` is whether it shows a static pod of kubelet's (a mirror pod). `is_finished` is
    whether its phase is Succeeded or Failed. `spread_keys` has the topology keys of its spread
    constraints with DoNotSchedule. `needs_neighbours` is whether it has a required pod affinity.
    """

    namespace: str
    name: str
    uid: str
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    controller: str = ""
    is_static: bool = False
    is_being_deleted: bool = False
    is_finished: bool = False
    node_selector: Mapping[str, str] = field(default_factory=dict)
    node_affinity: NodeAffinity = None
    tolerations: tuple[Toleration, ...] = ()
    anti_affinity: tuple[PodTerm, ...] = ()
    spread_keys: tuple[str, ...] = ()
    needs_neighbours: bool = False

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim. `volume` is the name of its PersistentVolume; empty before binding.

    `is_of_pod` is whether a pod owns the claim, as for a generic ephemeral volume.
    """

    namespace: str
    name: str
    uid: str
    volume: str = ""
    is_being_deleted: bool = False
    is_of_pod: bool = False

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class PersistentVolume:
    """A PersistentVolume of any driver.

    `handle` is the volume's id; empty for another driver's. `claim_*` are the fields of claimRef.
    """

    name: str
    uid: str
    handle: str = ""
    phase: str = "Bound"
    is_being_deleted: bool = False
    reclaim_policy: str = "Delete"
    claim_namespace: str = ""
    claim_name: str = ""
    claim_uid: str = ""
    affinity: NodeAffinity = None


@dataclass(frozen=True)
class Volume:
    """A volume on the evacuated node, as Carver on that node lists it.

    `size_bytes` is what a copy takes, with the LUKS2 header of an encrypted volume.
    """

    volume_id: str
    size_bytes: int
    device_class: str
    is_encrypted: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A snapshot on the evacuated node. `group_id` is that of its group snapshot, or empty."""

    snapshot_id: str
    volume_id: str
    group_id: str = ""


@dataclass(frozen=True)
class Moving:
    """A move of a volume that was begun. `node` is where it goes.

    `is_handed_over` is whether the volume is the other node's (state `moved`). `has_space` is
    whether the other node has made its volume, so that its space is taken already.
    """

    volume_id: str
    node: str
    is_handed_over: bool = False
    has_space: bool = False


@dataclass(frozen=True)
class View:
    """What is known of the cluster for the plan of one node's evacuation. `node` is its name.

    `volumes` are the volumes that Carver on the node lists; `persistent_volumes` those of the whole
    cluster that are of this driver, or have a node affinity; `pods` those of the whole cluster.
    """

    node: str
    nodes: Sequence[Node]
    volumes: Sequence[Volume]
    persistent_volumes: Sequence[PersistentVolume] = ()
    claims: Sequence[Claim] = ()
    pods: Sequence[Pod] = ()
    snapshots: Sequence[Snapshot] = ()
    moves: Sequence[Moving] = ()


@dataclass(frozen=True)
class PlannedVolume:
    """A volume of a unit. `claim` is None without a claim; `snapshots` stay on the node."""

    volume_id: str
    size_bytes: int
    device_class: str
    persistent_volume: PersistentVolume | None = None
    claim: Claim | None = None
    snapshots: tuple[str, ...] = ()
    move: Moving | None = None


@dataclass(frozen=True)
class Unit:
    """Volumes that move together to the node `target`; they stay if it is empty, for `reason`.

    `pods` are those that use the volumes and have not ended.
    """

    volumes: tuple[PlannedVolume, ...]
    pods: tuple[Pod, ...] = ()
    target: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the unit: the first of its volume ids in the order of texts."""
        return self.volumes[0].volume_id

    @property
    def size_bytes(self) -> int:
        """The sum of the sizes of the unit's volumes."""
        return sum(volume.size_bytes for volume in self.volumes)

    @property
    def is_under_way(self) -> bool:
        """Whether a move of one of the volumes was begun."""
        return any(volume.move for volume in self.volumes)


@dataclass(frozen=True)
class Plan:
    """The plan for a node: the units that go, in their order, and those that stay."""

    node: str
    going: tuple[Unit, ...] = ()
    staying: tuple[Unit, ...] = ()


def plan(view: View, to: Sequence[str] = (), *, force: bool = False) -> Plan:
    """Plan the evacuation of `view.node`; the same input in any order has the same plan.

    `to` bounds the targets; without it, each other node may be one. With `force`, pods without a
    controller are evicted, too, as by `kubectl drain --force`: such a pod is gone for good.
    """
    raise NotImplementedError
