"""A cluster in memory: nodes with Carver, those who call it, and a clock that steps move."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from callers.attaching import AttachDetachController, PodCollector
from callers.directories import Directories
from callers.kubelet import Kubelet
from callers.objects import (
    Claim,
    PersistentVolume,
    Pod,
    Snapshot,
    StorageClass,
    VolumeAttachment,
)
from callers.plugin import Answer, Plugin
from callers.sidecars import Provisioner, Sidecar, Snapshotter

from agent.csi.client import Mode, mounted


class Backoff:
    """When a caller tries again, by the clock of the cluster and no other.

    One second after the first failure, twice as long after each other, five minutes at most.
    """

    def __init__(self) -> None:
        self.now = 0
        self._due: dict[tuple[object, ...], tuple[int, int]] = {}

    def is_due(self, *what: object) -> bool:
        return self._due.get(what, (0, 0))[0] <= self.now

    def failed(self, *what: object, seconds: int = 0) -> None:
        """Wait twice as long as before, or as long as is given."""
        waited = self._due.get(what, (0, 0))[1]
        longer = seconds or min(300, 2 * waited or 1)
        self._due[what] = (self.now + longer, longer)

    def succeeded(self, *what: object) -> None:
        self._due.pop(what, None)


class Resizer:
    """external-resizer where the driver has no ControllerExpandVolume (`trivial_resizer.go`).

    It changes the PersistentVolume and leaves the rest to kubelet; has that try again at once.
    """

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster

    def step(self) -> None:
        """Have each PersistentVolume as large as its claim asks (`expand_and_recover.go`).

        What kubelet has to do yet is left to it. What kubelet found infeasible is pending again at
        once, at the size that the claim asks for by then.
        """
        for claim in self._cluster.claims:
            volume = claim.volume
            if volume is None:
                continue
            is_pending = claim.capacity_bytes < volume.size_bytes
            if claim.is_infeasible:
                claim.is_infeasible = False
                # A PersistentVolume grew before: it may be made as small as the claim.
                if claim.size_bytes <= volume.size_bytes:
                    volume.size_bytes = max(claim.size_bytes, claim.capacity_bytes)
            elif not is_pending and claim.size_bytes > volume.size_bytes:
                volume.size_bytes = claim.size_bytes


class Scheduler:
    """kube-scheduler, as far as volumes go: the plugin VolumeBinding (`volumebinding/binder.go`).

    It chooses among the nodes that can be: nothing makes it prefer the one with the snapshot.
    """

    def __init__(self, cluster: "Cluster", chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance

    def step(self) -> None:
        for pod in self._cluster.pods:
            if not pod.node and pod.is_wanted:
                self._schedule(pod)

    def _schedule(self, pod: Pod) -> None:
        """One cycle: filter the nodes, choose one, and have the claims provisioned there."""
        if pod.assumed_node:
            self._check_bindings(pod)
            return
        unbound = [one for one in pod.claims if one.volume is None]
        if any(self._cluster.classes[one.storage_class].is_immediate for one in unbound):
            return  # "pod has unbound immediate PersistentVolumeClaims"
        nodes = [
            one
            for one in self._cluster.nodes
            if (not pod.nodes or one in pod.nodes)
            and all(self._fits(claim, one) for claim in pod.claims)
        ]
        if nodes:
            pod.cycles += 1
            pod.assumed_node = self._chance.choice(nodes)
            # All at once, those that are to be made of something too (bindAPIUpdate).
            for claim in unbound:
                claim.selected_node = pod.assumed_node
            self._check_bindings(pod)

    def _fits(self, claim: Claim, node: str) -> bool:
        """Whether a node passes for one claim (FindPodVolumes).

        A bound one by its PersistentVolume's affinity. Others are only on the node that was chosen
        for them, if one was; and each by itself must be no larger than the CSIStorageCapacity.
        """
        if claim.volume is not None:
            # A node that is off has the taint node.kubernetes.io/not-ready.
            return claim.volume.node == node and not self._cluster.nodes[node].is_off
        if claim.selected_node not in ("", node):
            return False
        if (allowed := self._cluster.classes[claim.storage_class].allowed) and node not in allowed:
            return False
        return claim.size_bytes <= self._cluster.capacities.get((node, claim.storage_class), -1)

    def _check_bindings(self, pod: Pod) -> None:
        """Wait in PreBind for the claims' volumes; have another cycle if one is elsewhere."""
        node = pod.assumed_node
        is_lost = node not in self._cluster.nodes  # "failed to get node"
        for claim in pod.claims:
            # "pv node affinity doesn't match node", "provisioning failed for PVC"
            is_elsewhere = claim.volume is not None and claim.volume.node != node
            is_given_up = claim.volume is None and claim.selected_node != node
            is_lost = is_lost or is_elsewhere or is_given_up
        if is_lost:
            pod.assumed_node = ""
        elif len(pod.volumes) == len(pod.claims):
            pod.node = node


class Node:
    """One node: kubelet and, where they are not the cluster's, the sidecars of one driver."""

    def __init__(
        self, cluster: "Cluster", name: str, plugin: Plugin, directories: Directories
    ) -> None:
        self.kubelet = Kubelet(cluster, name, plugin, directories)
        self.is_off = False
        self._sidecars: Sequence[Sidecar] = ()
        if not cluster.is_central:
            self._sidecars = (
                Provisioner(cluster, name, plugin),
                Snapshotter(cluster, name, plugin),
            )

    def step(self) -> None:
        if self.is_off:
            return
        self.kubelet.step()
        for one in self._sidecars:
            one.step()

    def driver_restarted(self) -> None:
        """Carver was started anew: the sidecars lost their connection to it."""
        for one in self._sidecars:
            one.lose()


class Cluster:
    """The API's objects, and one step after another."""

    def __init__(
        self,
        classes: Mapping[str, StorageClass],
        seed: int = 0,
        *,
        is_central: bool = False,
        attaches: bool = False,
    ) -> None:
        self.classes = classes
        # Whether the CSIDriver has attachRequired.
        self.attaches = attaches
        self.attachments: list[VolumeAttachment] = []
        # The nodes with the taint node.kubernetes.io/out-of-service.
        self.out_of_service: set[str] = set()
        # VolumeAttributesClasses, by name; and none.
        self.attributes_classes: dict[str, Mapping[str, str]] = {"": {}}
        # Whether the sidecars are those of the whole cluster: then they are in `sidecars`.
        self.is_central = is_central
        self.sidecars: Sequence[Sidecar] = ()
        self.backoff = Backoff()
        self.nodes: dict[str, Node] = {}
        self.claims: list[Claim] = []
        self.pods: list[Pod] = []
        self.snapshots: list[Snapshot] = []
        # Volumes whose claim is gone: to be deleted.
        self.released: list[PersistentVolume] = []
        # CSIStorageCapacity, by node and class: the largest volume there.
        self.capacities: dict[tuple[str, str], int] = {}
        self.answers: list[Answer] = []
        # What looks after the drivers' processes, each second.
        self.supervisors: list[Callable[[], None]] = []
        self._serial = itertools.count(1)
        self._resizer = Resizer(self)
        self._scheduler = Scheduler(self, random.Random(seed))
        self._collector = PodCollector(self)
        self._attach_detach = AttachDetachController(self)

    def add_node(self, name: str, plugin: Plugin, directories: Directories) -> Node:
        """A node whose driver is asked through `plugin`."""
        node = self.nodes[name] = Node(self, name, plugin, directories)
        return node

    def claim(self, storage_class: str = "", **more: Any) -> Claim:
        """A person makes a claim: 32 MiB, ReadWriteOnce, where nothing else is said."""
        one = self.classes[storage_class or next(iter(self.classes))]
        values: dict[str, Any] = {
            "size_bytes": 32 << 20,
            "capability": mounted(one.fs_type, mode=Mode.SINGLE_NODE_MULTI_WRITER),
        }
        made = Claim(f"claim-{next(self._serial)}", one.name, **values | more)
        self.claims.append(made)
        return made

    def pod(self, claims: Claim | Sequence[Claim], *nodes: str, **more: Any) -> Pod:
        """A person makes a pod of one claim or several, which may be on some nodes only."""
        of = (claims,) if isinstance(claims, Claim) else tuple(claims)
        made = Pod(f"pod-{next(self._serial)}", of, frozenset(nodes), **more)
        self.pods.append(made)
        return made

    def snapshot(self, claim: Claim) -> Snapshot:
        made = Snapshot(f"snap-{next(self._serial)}", claim)
        self.snapshots.append(made)
        return made

    def expand(self, claim: Claim, size_bytes: int) -> None:
        """A person changes a claim's size, back to less where it could not be had."""
        assert claim.volume is not None
        assert size_bytes >= claim.capacity_bytes
        claim.size_bytes = size_bytes

    def step(self) -> None:
        """A second goes by."""
        self.backoff.now += 1
        self._scheduler.step()
        if not self.is_central:
            self._resizer.step()
        self._collector.step()
        if self.attaches:
            self._attach_detach.step()
        for node in self.nodes.values():
            node.step()
        for sidecar in self.sidecars:
            sidecar.step()
        self._collect()
        for supervise in self.supervisors:
            supervise()

    def run_until(self, condition: Callable[[], bool], seconds: int = 3000) -> bool:
        for _ in range(seconds):
            if condition():
                return True
            self.step()
        return condition()

    def settle(self, seconds: int = 600) -> None:
        """Let time go by until everything is as people want it."""
        assert self.run_until(lambda: not self.waiting(), seconds), self.report()

    def start(self, claims: Claim | Sequence[Claim], *nodes: str, **more: Any) -> Pod:
        """A person makes a pod, and waits until all is as it should be."""
        made = self.pod(claims, *nodes, **more)
        self.settle()
        return made

    def _collect(self) -> None:
        """What finalizers let go: in use by no pod, and source of nothing that is being made."""
        snapshotted = {one.claim for one in self.snapshots if not one.is_ready}
        used = {claim for pod in self.pods for claim in pod.claims}
        for pod in [one for one in self.pods if one.is_deleted and not one.node]:
            self.pods.remove(pod)
        for claim in [one for one in self.claims if one.is_deleted]:
            if claim in used | snapshotted or self.is_source(claim) or claim.is_under_way:
                continue
            if claim.volume is not None:
                self.released.append(claim.volume)
            self.claims.remove(claim)
        for snapshot in [one for one in self.snapshots if one.is_deleted and not one.id]:
            self.snapshots.remove(snapshot)

    def is_source(self, one: Claim | Snapshot) -> bool:
        """Whether a claim that is not bound yet is to be made of it."""
        return any(
            claim.source is one and claim.volume is None and not claim.is_deleted
            for claim in self.claims
        )

    def waiting(self) -> list[str]:
        """What is not as people want it, though nothing is missing that they would have to do."""
        pods = [one for one in self.pods if one.is_wanted]
        bound = [one for one in self.claims if one.volume and not one.is_deleted]
        # With a copy-on-write snapshot it grows when it is next staged, and is not modified.
        snapshotted = {one.claim for one in self.snapshots}
        growing = {claim for pod in pods for claim in pod.claims} - snapshotted
        # A copy-on-write snapshot is nothing without its origin.
        kept = [one.claim.volume for one in self.snapshots]
        return [
            *(f"pod {one.name} does not run" for one in pods if not one.is_running),
            *(f"pod {one.name} is not gone" for one in self.pods if one.is_deleted),
            *(f"volume {one.id} is not deleted" for one in self.released if one not in kept),
            *(
                f"snapshot {one.name} is not ready"
                for one in self.snapshots
                if not one.is_ready and one.claim in bound
            ),
            *(
                f"claim {one.name} has not grown"
                for one in bound
                if one in growing and one.volume and one.capacity_bytes < one.volume.size_bytes
            ),
            *(
                f"claim {one.name} is not changed"
                for one in bound
                if (one not in snapshotted and one.attributes_class != one.current_attributes_class)
                or (self.is_central and one in growing and not one.has_size)
            ),
            *(
                f"claim {one.name} is not bound"
                for one in self.claims
                if self.classes[one.storage_class].is_immediate
                and not (one.volume or one.is_deleted)
            ),
        ]

    def report(self) -> list[str]:
        """What is waiting, and the last answers that were not OK."""
        refused = [str(one) for one in self.answers if one.code != "OK"]
        return [*self.waiting(), *refused[-3:]]

    def attachment(self, volume: PersistentVolume, node: str) -> VolumeAttachment | None:
        """The VolumeAttachment by which a volume may be used on a node."""
        for one in self.attachments:
            if (one.volume, one.node) == (volume, node) and one.is_attached and not one.is_deleted:
                return one
        return None

    def volumes(self) -> list[PersistentVolume]:
        """All PersistentVolumes, those that are being deleted as well."""
        return [*self.released, *(one.volume for one in self.claims if one.volume)]

    def delete_everything(self) -> None:
        made: list[Pod | Claim | Snapshot] = [*self.pods, *self.claims, *self.snapshots]
        for one in made:
            one.is_deleted = True

    def is_empty(self) -> bool:
        """Whether nothing is left to be done after that."""
        nothing_known = all(node.kubelet.knows_nothing() for node in self.nodes.values())
        objects = (self.pods, self.claims, self.snapshots, self.released, self.attachments)
        return nothing_known and not any(objects)
