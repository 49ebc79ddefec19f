"""The plan of an evacuation: which volumes of a node move to which nodes, and which stay, and why.

`plan` is a pure function: it reads nothing and changes nothing. cluster_view.py reads its input.

A *unit* is a set of volumes that move to the same node: those that one pod uses, and those with
snapshots in the same group snapshot, both transitively. A unit has one target, or it stays, with a
reason.

The algorithm:

1. Join the volumes of the node into units. A pod uses the volumes of its claims unless it has
   ended. Claims that no pod uses are joined, too, if by their names and labels they belong to one
   replica of a StatefulSet, which may be scaled down or wait for another replica. The volume of a
   generic ephemeral claim is a unit of its own, which stays: the volume is deleted with its pod,
   and made anew for the next one.
2. A unit stays if one of its volumes cannot be moved, or if one of its pods would not be made anew
   on another node (`_volume_problem`, `_pod_problem`).
   If volumes of a unit move to different nodes, those that were handed over are units of their own
   (`_parts`). A volume whose claim is gone or being deleted is a unit of its own, which stays, also
   if it was handed over: its move is taken back (`PlannedVolume.is_abandoned`).
3. A unit with a move under way keeps the node of that move as its target, unless that is
   evacuated itself. If one of its volumes has
   been handed over, the unit also goes on if step 2 says that it stays: its claims can be used by
   no pod before all are rebound.
4. For each other unit, find the nodes that may be its target (`_Candidates`): allowed by `--to`,
   ready, schedulable, served by Carver, with each class of the unit, and allowed to each pod of the
   unit by taints, node affinity, the node affinity of the pod's other PersistentVolumes unless they
   are moved there, too, and required anti-affinity. No new volume goes to a node that is being
   evacuated itself.
5. Assign the units of step 3 first. Then assign the others by several orders: the largest first or
   the smallest first, each to the node that then has the most space for it. Space of a node is
   subtracted per volume group or thin pool (`Room.pool`). Pods that were assigned count as on
   their target for the anti-affinity of the next ones. The order by which the most units go wins;
   after that, the first order.
6. If not all units go, assign them again for the oldest node alone, for the two oldest, and so on,
   up to 64 nodes. Each of these assignments is compared with the one before, extended by the next
   node. So a new node, or one more node in `--to`, never makes fewer units go.
7. Order the units: first those under way, then those that no pod uses, then the smaller before the
   larger. Then name in plain sentences what an operator should know (`notes`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from agent.core import ids
from agent.extras.evacuation import scheduling
from agent.extras.evacuation.scheduling import NodeAffinity, PodTerm, Taint, Toleration

# Maximum number of names in a sentence.
_MOST_NAMED = 5
# Kind of the controller of a DaemonSet's pods.
_DAEMON_SET = "DaemonSet"
# Prefix of the taints that Kubernetes itself sets on a Node by its state.
_OF_STATE = "node.kubernetes.io/"
# Taint of a node that is cordoned. The scheduler's plugin NodeUnschedulable places a pod that
# tolerates this taint on a cordoned node.
_CORDONED = Taint("node.kubernetes.io/unschedulable", scheduling.NO_SCHEDULE)
_EVACUATED = "is being evacuated itself"
# Maximum number of nodes that are planned for one after the other (step 6 of the module).
_MOST_PREFIXES = 64
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
    `left` has what volumes of the evacuated node have left on the node, from which they came.
    `has_label` is whether the Node has Carver's topology label, without which no pod with a volume
    of Carver's is placed on it.
    """

    name: str
    created: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_ready: bool = True
    is_schedulable: bool = True
    is_evacuated: bool = False
    has_label: bool = True
    problem: str = ""
    rooms: Mapping[str, Room] = field(default_factory=dict)
    left: "Sequence[Volume]" = ()

    def has_space_of(self, volume: "PlannedVolume") -> bool:
        """Return whether a volume that comes back takes the place of what it has left here."""
        name = ids.readable_name(volume.volume_id)
        return any(
            ids.readable_name(one.volume_id) == name
            and one.device_class == volume.device_class
            and one.size_bytes >= volume.size_bytes
            for one in self.left
        )


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

    `is_of_pod` is whether a pod owns the claim, as for a generic ephemeral volume. A StatefulSet
    gives its claims the labels of its selector.
    """

    namespace: str
    name: str
    uid: str
    volume: str = ""
    is_being_deleted: bool = False
    is_of_pod: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class PersistentVolume:
    """A PersistentVolume of any driver.

    `handle` is the volume's id; empty for another driver's. `claim_*` are the fields of claimRef.
    `is_for_one_node` is whether its node affinity is the one that Carver gives: a claim can be
    rebound from no other one. `moves_to` is the node to which its volume is moved by an evacuation;
    empty if it is not.
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
    is_for_one_node: bool = True
    moves_to: str = ""


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
    """A volume of a unit. `claim` is None without a claim; `snapshots` stay on the node.

    `is_abandoned` is whether its claim is gone or being deleted, and was not rebound: no pod will
    use the volume on another node, so a move that was begun is to be taken back.
    """

    volume_id: str
    size_bytes: int
    device_class: str
    persistent_volume: PersistentVolume | None = None
    claim: Claim | None = None
    snapshots: tuple[str, ...] = ()
    move: Moving | None = None
    is_abandoned: bool = False


@dataclass(frozen=True)
class Unit:
    """Volumes that move together to the node `target`; they stay if it is empty, for `reason`.

    `pods` are those that use the volumes and have not ended. `is_torn` is whether one of them has
    another volume that is on the target already, so that it can run nowhere before this unit is
    there, too.
    """

    volumes: tuple[PlannedVolume, ...]
    pods: tuple[Pod, ...] = ()
    target: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()
    is_torn: bool = False

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
    """The plan for a node: the units that go, in their order, and those that stay.

    `moved` are the volumes that were handed over, and that no PersistentVolume names any more. What
    is left of them on the node is under quarantine.
    """

    node: str
    going: tuple[Unit, ...] = ()
    staying: tuple[Unit, ...] = ()
    moved: tuple[PlannedVolume, ...] = ()


def plan(view: View, to: Sequence[str] = (), *, force: bool = False) -> Plan:
    """Plan the evacuation of `view.node`; the same input in any order has the same plan.

    `to` bounds the targets; without it, each other node may be one. With `force`, pods without a
    controller are evicted, too, as by `kubectl drain --force`: such a pod is gone for good.
    """
    drafts, moved = _drafts(view, force=force)
    cluster = _Cluster(view, to)
    open_drafts = list[_Draft]()
    state = _State(cluster)
    for draft in drafts:
        if draft.problem and not draft.is_handed_over:
            continue
        if not draft.pin:
            open_drafts.append(draft)
        elif problem := cluster.pin_problem(draft, state):
            draft.problem = problem
        else:
            state.assign(draft, draft.pin)
    state = _assigned(cluster, state, open_drafts)
    units = [_unit(cluster, state, draft) for draft in drafts]
    going = sorted(
        (unit for unit in units if unit.target),
        key=lambda unit: (not unit.is_under_way, bool(unit.pods), unit.size_bytes, unit.name),
    )
    staying = sorted((unit for unit in units if not unit.target), key=lambda unit: unit.name)
    return Plan(view.node, tuple(going), tuple(staying), moved)


# Units


@dataclass
class _Draft:
    """A unit before it has a target.

    `pin` is the target of a move that was begun; empty without one. `problem` says why the unit
    stays; empty if nothing is known that keeps it.
    """

    volumes: tuple[PlannedVolume, ...]
    pods: tuple[Pod, ...]
    encrypted: frozenset[str]
    problem: str = ""
    pin: str = ""
    is_handed_over: bool = False
    # The pods that the unit's pods exclude from their topology, or that exclude one of them, each
    # with the topology key.
    conflicts: tuple[tuple[Pod, str], ...] = ()
    # The other PersistentVolumes that the unit's pods use and that have a node affinity.
    other_volumes: tuple[PersistentVolume, ...] = ()

    @property
    def name(self) -> str:
        return self.volumes[0].volume_id

    @property
    def size_bytes(self) -> int:
        return sum(volume.size_bytes for volume in self.volumes)


def _drafts(view: View, *, force: bool) -> tuple[list[_Draft], tuple[PlannedVolume, ...]]:
    """Return the units of a node's volumes, and the volumes that have moved already.

    A volume that was handed over counts as moved once no PersistentVolume names it.
    """
    moves = {move.volume_id: move for move in view.moves}
    by_handle = defaultdict[str, list[PersistentVolume]](list)
    for persistent_volume in sorted(view.persistent_volumes, key=lambda volume: volume.name):
        if persistent_volume.handle:
            by_handle[persistent_volume.handle].append(persistent_volume)
    claims = {(claim.namespace, claim.name): claim for claim in view.claims}
    snapshots = defaultdict[str, list[str]](list)
    for snapshot in view.snapshots:
        snapshots[snapshot.volume_id].append(snapshot.snapshot_id)
    planned, moved, problems = dict[str, PlannedVolume](), list[PlannedVolume](), dict[str, str]()
    for volume in sorted(view.volumes, key=lambda volume: volume.volume_id):
        names = by_handle[volume.volume_id]
        owner = names[0] if names else None
        claim = claims.get((owner.claim_namespace, owner.claim_name)) if owner else None
        entry = PlannedVolume(
            volume.volume_id,
            volume.size_bytes,
            volume.device_class,
            owner,
            claim,
            tuple(sorted(snapshots[volume.volume_id])),
            moves.get(volume.volume_id),
        )
        if owner is None and entry.move and entry.move.is_handed_over:
            moved.append(entry)
            continue
        is_abandoned = _is_abandoned(entry, view.persistent_volumes)
        planned[volume.volume_id] = replace(entry, is_abandoned=is_abandoned)
        problems[volume.volume_id] = _volume_problem(entry, names)
    encrypted = frozenset(volume.volume_id for volume in view.volumes if volume.is_encrypted)
    users = _users(view.pods, planned.values())
    drafts = []
    for members in _joined(planned, users, view.snapshots):
        volumes = tuple(planned[volume_id] for volume_id in members)
        pods = {pod.uid: pod for volume_id in members for pod in users[volume_id]}
        draft = _Draft(
            volumes,
            tuple(sorted(pods.values(), key=lambda pod: (pod.namespace, pod.name, pod.uid))),
            encrypted,
            is_handed_over=any(
                volume.move and volume.move.is_handed_over and not volume.is_abandoned
                for volume in volumes
            ),
        )
        pins = sorted({volume.move.node for volume in volumes if volume.move})
        draft.pin = pins[0] if pins else ""
        reasons = [
            *(problems[volume_id] for volume_id in members),
            *(_pod_problem(pod, view.node, force=force) for pod in draft.pods),
        ]
        draft.problem = next(filter(None, reasons), "")
        if len(pins) > 1:
            draft.pin, draft.is_handed_over = "", False
            draft.problem = (
                f"its volumes move to different nodes, {_several(pins)}; take back those of one by"
                " `carver volume move --undo`"
            )
        drafts.append(draft)
    _note_neighbours(view, drafts, claims)
    return drafts, tuple(moved)


def _volume_problem(volume: PlannedVolume, names: Sequence[PersistentVolume]) -> str:
    """Return why a volume cannot be moved by itself; empty if it can.

    A volume can be moved if it is bound to a claim that can be made anew: `names`, the
    PersistentVolumes with its id, is one, Bound, and neither it nor its claim is being deleted. Its
    reclaim policy and its access modes do not matter: they stay what they are.
    """
    owner, claim = volume.persistent_volume, volume.claim
    if owner is None:
        return (
            f"no PersistentVolume names volume {volume.volume_id}; move it by `carver volume move`"
        )
    if len(names) > 1:
        return f"PersistentVolumes {_several([name.name for name in names])} name the same volume"
    if owner.is_being_deleted:
        return f"PersistentVolume {owner.name} is being deleted"
    if owner.phase != "Bound":
        return (
            f"PersistentVolume {owner.name} is {owner.phase or 'without a phase'}, and no claim"
            f" could follow it (its reclaim policy is {owner.reclaim_policy})"
        )
    full_name = f"{owner.claim_namespace}/{owner.claim_name}"
    if claim is None or claim.uid != owner.claim_uid:
        return f"claim {full_name}, to which PersistentVolume {owner.name} is bound, is gone"
    if claim.is_of_pod:
        return f"claim {full_name} belongs to a pod: it is deleted with the pod, and made anew"
    if claim.is_being_deleted:
        return f"claim {full_name} is being deleted"
    if claim.volume != owner.name:
        return f"claim {full_name} has another PersistentVolume, {claim.volume or 'none yet'}"
    if not owner.is_for_one_node:
        return (
            f"PersistentVolume {owner.name} has another node affinity than Carver gives; move it"
            " by `carver volume move`, and bind its claim by hand"
        )
    return ""


def _is_abandoned(volume: PlannedVolume, persistent_volumes: Sequence[PersistentVolume]) -> bool:
    """Return whether a volume has lost its claim, and no PersistentVolume is made for it elsewhere.

    While a claim is rebound, it is deleted, too; then there is a PersistentVolume for the volume on
    the other node.
    """
    owner, claim = volume.persistent_volume, volume.claim
    if owner is None:
        return False
    has_claim = (
        owner.phase == "Bound"
        and not owner.is_being_deleted
        and claim is not None
        and claim.uid == owner.claim_uid
        and not claim.is_being_deleted
    )
    if has_claim:
        return False
    name = ids.readable_name(volume.volume_id)
    handles = {other.handle for other in persistent_volumes} - {"", volume.volume_id}
    return name not in map(ids.readable_name, handles)


def _pod_problem(pod: Pod, node: str, *, force: bool) -> str:
    """Return why a pod would not run on another node once its volumes are there; empty if it would.

    A pod that is being deleted ends by itself, so it needs no controller.
    """
    if pod.is_static:
        return f"pod {pod} is a static pod: kubelet on {node} starts it on that node only"
    if pod.controller == _DAEMON_SET:
        return f"pod {pod} belongs to a DaemonSet, which runs it on each node"
    if pod.node not in ("", node):
        return f"pod {pod} on node {pod.node} uses its claim, and cannot run there: end that pod"
    if pod.node and not (pod.controller or pod.is_being_deleted or force):
        return (
            f"pod {pod} has no controller that would make it anew after an eviction: end the pod,"
            " or evacuate with --force"
        )
    if pod.controller and scheduling.untolerated((_CORDONED,), pod.tolerations) is None:
        return (
            f"pod {pod} tolerates the taint {_CORDONED}: after each eviction it would run on {node}"
            f" again; take that toleration from its {pod.controller}, or scale that to no pods"
        )
    return ""


def _users(pods: Sequence[Pod], volumes: Iterable[PlannedVolume]) -> Mapping[str, Sequence[Pod]]:
    """Return the pods that use volumes by their claims and have not ended, by volume id."""
    by_claim = defaultdict[tuple[str, str], list[Pod]](list)
    for pod in pods:
        if not pod.is_finished:
            for name in pod.claims:
                by_claim[pod.namespace, name].append(pod)
    users = defaultdict[str, Sequence[Pod]](tuple)
    for volume in volumes:
        if owner := volume.persistent_volume:
            users[volume.volume_id] = by_claim.get((owner.claim_namespace, owner.claim_name), ())
    return users


def _joined(
    planned: Mapping[str, PlannedVolume],
    users: Mapping[str, Sequence[Pod]],
    snapshots: Sequence[Snapshot],
) -> Sequence[Sequence[str]]:
    """Return the volume ids of each unit, sorted."""
    roots = {volume_id: volume_id for volume_id in planned}

    def root(volume_id: str) -> str:
        while roots[volume_id] != volume_id:
            volume_id = roots[volume_id]
        return volume_id

    links = defaultdict[str, list[str]](list)
    for volume_id, volume in planned.items():
        if volume.is_abandoned:
            continue
        if volume.claim is None or not volume.claim.is_of_pod:
            for pod in users[volume_id]:
                links[f"pod {pod.uid}"].append(volume_id)
        if volume.claim is not None and not users[volume_id]:
            for name in _replica_names(volume.claim):
                links[f"replica {name}"].append(volume_id)
    for snapshot in snapshots:
        member = planned.get(snapshot.volume_id)
        if snapshot.group_id and member is not None and not member.is_abandoned:
            links[f"group {snapshot.group_id}"].append(snapshot.volume_id)
    for members in links.values():
        for volume_id in members:
            # Keep the smaller id as the root, so that the result does not depend on the order.
            first, second = sorted((root(volume_id), root(members[0])))
            roots[second] = first
    units = defaultdict[str, list[str]](list)
    for volume_id in sorted(planned):
        units[root(volume_id)].append(volume_id)
    return [part for name in sorted(units) for part in _parts(planned, units[name])]


def _parts(planned: Mapping[str, PlannedVolume], members: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the parts of a unit that are driven apart; usually the unit as a whole.

    A pod or a group snapshot may join volumes that are moving to different nodes. Those that were
    handed over go on to their nodes, as no pod can use them before their claims are rebound.
    """
    moves = {one: move for one in members if (move := planned[one].move) is not None}
    handed_over = defaultdict[str, list[str]](list)
    if len({move.node for move in moves.values()}) > 1:
        for volume_id, move in moves.items():
            if move.is_handed_over:
                handed_over[move.node].append(volume_id)
    apart = {volume_id for part in handed_over.values() for volume_id in part}
    yield from handed_over.values()
    if rest := [volume_id for volume_id in members if volume_id not in apart]:
        yield rest


def _replica_names(claim: Claim) -> Iterator[str]:
    """Yield what is equal for the claims of one replica of a StatefulSet, whose pod does not exist.

    The names of such claims are TEMPLATE-SET-ORDINAL, and their labels are equal. Where the name of
    the set begins is not known, so each possible beginning is yielded.
    """
    parts = claim.name.split("-")
    if not claim.labels or not parts[-1].isdigit():
        return
    labels = sorted(claim.labels.items())
    for start in range(1, len(parts) - 1):
        yield f"{claim.namespace} {labels} {'-'.join(parts[start:])}"


def _note_neighbours(
    view: View, drafts: Sequence[_Draft], claims: Mapping[tuple[str, str], Claim]
) -> None:
    """Note in each unit the pods with which its pods conflict, and its pods' other volumes."""
    by_name = {volume.name: volume for volume in view.persistent_volumes}
    others = sorted(
        (
            pod
            for pod in view.pods
            if not pod.is_finished and not (pod.is_being_deleted and pod.node in ("", view.node))
        ),
        key=lambda pod: (pod.namespace, pod.name, pod.uid),
    )
    excluding = [pod for pod in others if pod.anti_affinity]
    for draft in drafts:
        own_uids = {pod.uid for pod in draft.pods}
        own_volumes = {
            volume.persistent_volume.name for volume in draft.volumes if volume.persistent_volume
        }
        conflicts = dict[tuple[str, str], tuple[Pod, str]]()
        other_volumes = dict[str, PersistentVolume]()
        for pod in draft.pods:
            for other in others if pod.anti_affinity else excluding:
                if other.uid not in own_uids:
                    for key in _excluded_keys(pod, other):
                        conflicts[other.uid, key] = other, key
            for name in pod.claims:
                claim = claims.get((pod.namespace, name))
                volume = by_name.get(claim.volume) if claim and not claim.is_of_pod else None
                if volume and volume.name not in own_volumes and volume.affinity is not None:
                    other_volumes[volume.name] = volume
        draft.conflicts = tuple(conflicts.values())
        draft.other_volumes = tuple(sorted(other_volumes.values(), key=lambda other: other.name))


def _excluded_keys(pod: Pod, other: Pod) -> Iterator[str]:
    """Yield the topology keys for which one of two pods excludes the other."""
    for first, second in ((pod, other), (other, pod)):
        for term in first.anti_affinity:
            if term.selects(second.namespace, second.labels):
                yield term.topology_key


# Targets


class _Cluster:
    """The nodes that may be targets, and why a node cannot be the target of a unit."""

    def __init__(self, view: View, to: Sequence[str]) -> None:
        self.source = view.node
        self.nodes = {node.name: node for node in view.nodes}
        source = self.nodes.get(view.node)
        self._source_taints = frozenset(source.taints if source else ())
        ranks = {name: rank for rank, name in reversed(list(enumerate(to)))}
        self.named = frozenset(to)
        # The nodes that may be targets: in the order of `to`, or the oldest first.
        self.candidates = sorted(
            (
                node
                for node in view.nodes
                if node.name != view.node and (not to or node.name in ranks)
            ),
            key=lambda node: (ranks.get(node.name, 0), node.created, node.name),
        )

    def pin_problem(self, draft: _Draft, state: "_State") -> str:
        """Return why a unit with a move under way stays; empty if it goes on to the same node.

        A node that is not ready, is cordoned or does not answer stays the target: the move waits. A
        node that is evacuated itself does not, before the hand-over: nothing would go on there.
        """
        node = self.nodes.get(draft.pin)
        if node is None or draft.pin == self.source:
            if not draft.is_handed_over:
                return f"it moves to {draft.pin!r}, which is no other node of the cluster"
            return (
                f"it was handed over to {draft.pin!r}, which is no other node of the cluster: what"
                f" is left on {self.source} may be the last copy (docs/operations.md, The other"
                " node has no such volume any more)"
            )
        if draft.is_handed_over:
            return ""
        problem = _EVACUATED if node.is_evacuated else ""
        problem = problem or self.pods_problem(draft, node) or state.conflict(draft, node)
        if not problem and not node.problem:
            problem = self.class_problem(draft, node) or state.space_problem(draft, node)
        return problem and f"its move to {node.name} was begun, but {node.name} {problem}"

    def problem(self, draft: _Draft, node: Node) -> str:
        """Return why a unit cannot go to a node, whatever else goes there; empty if it can.

        The text follows on the node's name.
        """
        return (
            state_problem(node) or self.class_problem(draft, node) or self.pods_problem(draft, node)
        )

    def class_problem(self, draft: _Draft, node: Node) -> str:
        """Return why a node cannot have volumes of the unit's classes; empty if it can."""
        for volume in draft.volumes:
            room = node.rooms.get(volume.device_class)
            if room is None:
                return f"has no class {volume.device_class or '(default)'}"
            if room.encrypts and volume.volume_id not in draft.encrypted:
                return (
                    f"encrypts volumes of class {volume.device_class}, and"
                    f" {volume.volume_id} is not encrypted"
                )
        return ""

    def pods_problem(self, draft: _Draft, node: Node) -> str:
        """Return why the scheduler places a pod of the unit not on a node; empty if it may.

        A unit that no pod uses goes to a node without taints, or with taints that its present node
        has, too: pods that used it tolerate these.
        """
        if not node.has_label:
            return "has not the topology label of Carver: does kubelet there know the driver?"
        for pod in draft.pods:
            if pod.is_being_deleted and not pod.controller:
                continue
            if taint := scheduling.untolerated(node.taints, pod.tolerations):
                return f"has the taint {taint}, which pod {pod} does not tolerate"
            if any(node.labels.get(key) != value for key, value in pod.node_selector.items()):
                return f"has not the labels in the nodeSelector of pod {pod}"
            if not scheduling.satisfies(pod.node_affinity, node.name, node.labels):
                return f"does not satisfy the node affinity of pod {pod}"
        for other in draft.other_volumes:
            can_have = scheduling.satisfies(other.affinity, node.name, node.labels)
            if not can_have and other.moves_to != node.name:
                return f"cannot have PersistentVolume {other.name}, which its pods use, too"
        if not draft.pods:
            for taint in node.taints:
                if taint.repels and taint not in self._source_taints:
                    return f"has the taint {taint}, and {self.source} has not"
        return ""


def state_problem(node: Node) -> str:
    """Return why a node cannot be the target of any new move now; empty if it can."""
    if not node.is_ready:
        return "is not ready"
    if not node.is_schedulable:
        return "is cordoned"
    if node.is_evacuated:
        return _EVACUATED
    return node.problem


class _State:
    """The targets that were assigned so far, the space that they take, and where their pods run."""

    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster
        self.targets: dict[str, str] = {}
        # The share of each node's pool that is taken by what was assigned, by the names of the node
        # and of the pool.
        self._taken: dict[tuple[str, str], Fraction] = {}
        # The target of each pod of a unit that was assigned, by the pod's UID.
        self._pods: dict[str, str] = {}

    def copy(self) -> "_State":
        copy = _State(self._cluster)
        copy.targets, copy._taken = dict(self.targets), dict(self._taken)
        copy._pods = dict(self._pods)
        return copy

    def assign(self, draft: _Draft, name: str) -> None:
        """Make a node the target of a unit."""
        self.targets[draft.name] = name
        self._pods.update((pod.uid, name) for pod in draft.pods)
        if node := self._cluster.nodes.get(name):
            for pool, share in self._shares(draft, node).items():
                self._taken[name, pool] = self._taken.get((name, pool), Fraction(0)) + share

    def _shares(self, draft: _Draft, node: Node) -> Mapping[str, Fraction]:
        """Return the share of each pool of a node that a unit takes; may be more than 1.

        A share is of the largest volume that could be created, so it counts images of a RAID, too.
        Classes of which the node has no space are left out.
        """
        shares = defaultdict[str, Fraction](Fraction)
        for volume in draft.volumes:
            room = node.rooms.get(volume.device_class)
            has_space = volume.move and volume.move.has_space and volume.move.node == node.name
            if room is None or has_space or node.has_space_of(volume):
                continue
            # Count a pool without space as one of a byte, which no volume fits into.
            shares[room.pool] += Fraction(_rounded(volume.size_bytes, room), room.free_bytes or 1)
        return shares

    def free_share(self, draft: _Draft, node: Node) -> Fraction | None:
        """Return the share that stays free in the fullest pool of a node; None if no space is left.

        That is the share after a unit has got its space in the node's pools.
        """
        free = Fraction(1)
        for pool, share in self._shares(draft, node).items():
            free = min(free, 1 - self._taken.get((node.name, pool), Fraction(0)) - share)
        return free if free >= 0 else None

    def space_problem(self, draft: _Draft, node: Node) -> str:
        """Return that a node has no space left for a unit; empty if it has."""
        if self.free_share(draft, node) is not None:
            return ""
        needed = Counter[str]()
        for volume in draft.volumes:
            needed[volume.device_class] += _rounded(
                volume.size_bytes, node.rooms[volume.device_class]
            )
        texts = []
        for name, size_bytes in sorted(needed.items()):
            room = node.rooms[name]
            free = 1 - self._taken.get((node.name, room.pool), Fraction(0))
            free_bytes = int(max(Fraction(0), free) * room.free_bytes)
            texts.append(f"{_size(free_bytes)} left for class {name}, of {_size(size_bytes)}")
        return f"has {' and '.join(texts)} that it needs"

    def conflict(self, draft: _Draft, node: Node) -> str:
        """Return that a required anti-affinity forbids a node to a unit's pods; empty if none does.

        Pods of units that were assigned count as on their targets.
        """
        for other, key in draft.conflicts:
            place = self._cluster.nodes.get(self._pods.get(other.uid, other.node))
            topology = node.labels.get(key)
            if place is not None and topology is not None and place.labels.get(key) == topology:
                return f"is where pod {other} runs or will run, by an anti-affinity for {key}"
        return ""

    def fits(self, draft: _Draft, node: Node) -> bool:
        return self.free_share(draft, node) is not None and not self.conflict(draft, node)


def _rounded(size_bytes: int, room: Room) -> int:
    step_bytes = max(1, room.step_bytes)
    return -(-size_bytes // step_bytes) * step_bytes


def _assigned(cluster: _Cluster, start: _State, drafts: Sequence[_Draft]) -> _State:
    """Return the assignment by which the most of the units go (steps 5 and 6 of the module)."""
    allowed = {
        draft.name: frozenset(
            node.name
            for node in cluster.candidates
            if not cluster.problem(draft, node) and start.fits(draft, node)
        )
        for draft in drafts
    }
    drafts = [draft for draft in drafts if allowed[draft.name]]
    # Leave out nodes to which no unit can go.
    useful = frozenset[str]().union(*allowed.values())
    nodes = [node for node in cluster.candidates if node.name in useful]

    def assign(state: _State, nodes: Sequence[Node], order: Sequence[_Draft]) -> _State:
        """Assign the units in this order; again, as long as one more unit goes."""
        state = state.copy()
        is_changed = True
        while is_changed:
            is_changed = False
            for draft in order:
                if draft.name in state.targets:
                    continue
                choices = [
                    node
                    for node in nodes
                    if node.name in allowed[draft.name] and state.fits(draft, node)
                ]
                if choices:
                    state.assign(
                        draft, max(choices, key=lambda node: _roominess(state, draft, node)).name
                    )
                    is_changed = True
        return state

    largest = sorted(drafts, key=lambda draft: (-draft.size_bytes, draft.name))
    smallest = sorted(drafts, key=lambda draft: (draft.size_bytes, draft.name))

    def best(*states: _State) -> _State:
        return max(states, key=lambda state: len(state.targets))

    full = best(assign(start, nodes, largest), assign(start, nodes, smallest))
    most = len(start.targets) + len(drafts)
    if len(full.targets) == most:
        return full
    state = start
    for count in range(1, min(len(nodes), _MOST_PREFIXES) + 1):
        prefix = nodes[:count]
        state = best(
            assign(start, prefix, largest),
            assign(start, prefix, smallest),
            assign(state, prefix, largest),
        )
        if len(state.targets) == most:
            return state
    return state if len(nodes) <= _MOST_PREFIXES else best(full, assign(state, nodes, largest))


def _roominess(state: _State, draft: _Draft, node: Node) -> Fraction:
    """Return how much space a node has for the unit's classes after the unit got its space."""
    room = node.rooms[draft.volumes[0].device_class]
    return (state.free_share(draft, node) or Fraction(0)) * room.free_bytes


def _unit(cluster: _Cluster, state: _State, draft: _Draft) -> Unit:
    """Return a unit with its target, or with the reason why it stays, and with its notes."""
    target = state.targets.get(draft.name, "")
    unit = Unit(draft.volumes, draft.pods, target)
    if target:
        node = cluster.nodes[target]
        notes, is_torn = tuple(_notes(cluster, draft, node)), _is_torn(cluster, draft, node)
        return replace(unit, notes=notes, is_torn=is_torn)
    if draft.problem:
        return replace(unit, reason=draft.problem)
    texts = []
    for node in cluster.candidates:
        problem = (
            cluster.problem(draft, node)
            or state.space_problem(draft, node)
            or state.conflict(draft, node)
        )
        texts.append(f"{node.name} {problem}")
    if not texts:
        where = "none of the nodes that were named is an" if cluster.named else "there is no "
        return replace(unit, reason=f"{where}other node of the cluster")
    return replace(unit, reason=f"no node can take it: {_several(texts, '; ')}")


def _is_torn(cluster: _Cluster, draft: _Draft, target: Node) -> bool:
    """Return whether a pod of the unit has another volume that the target has, not the source."""
    source = cluster.nodes.get(cluster.source)
    return any(
        scheduling.satisfies(other.affinity, target.name, target.labels)
        and not (source and scheduling.satisfies(other.affinity, source.name, source.labels))
        for other in draft.other_volumes
    )


def _notes(cluster: _Cluster, draft: _Draft, node: Node) -> Iterator[str]:
    """Yield what an operator should know of a unit that goes to a node."""
    if draft.problem:
        yield f"it goes on, since it was handed over in part, although {draft.problem}"
    if draft.pin and cluster.named and node.name not in cluster.named:
        yield (
            f"its move to {node.name} was begun before, and goes on, although that is not among the"
            " nodes that were named: take it back by an undo first"
        )
    if draft.pin and (problem := state_problem(node)):
        yield f"its move waits for {node.name}, which {problem}"
    for volume in draft.volumes:
        if volume.snapshots:
            yield (
                f"snapshots of {volume.claim or volume.volume_id} stay on {cluster.source}:"
                f" {_several(volume.snapshots)}; they can be restored there, and what is left of"
                " the volume there is kept while they exist"
            )
    for pod in draft.pods:
        if pod.node and not (pod.controller or pod.is_being_deleted):
            yield f"pod {pod} has no controller: after its eviction it is gone for good"
        if pod.spread_keys:
            yield (
                f"pod {pod} is spread by {_several(pod.spread_keys)}: the scheduler may refuse"
                f" {node.name}"
            )
        if pod.needs_neighbours:
            yield f"pod {pod} must run beside other pods: the scheduler may refuse {node.name}"


def _several(names: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return separator.join(names[:_MOST_NAMED]) + more


def _size(size_bytes: int) -> str:
    """Return a number of bytes as a text in GiB or MiB."""
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.1f} GiB"
    return f"{size_bytes / _MIB:.0f} MiB"
