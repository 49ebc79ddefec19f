"""kube-scheduler, as far as volumes go: the plugin VolumeBinding (`volumebinding/binder.go`)."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from callers.objects import Pod

if TYPE_CHECKING:
    from callers.cluster import Cluster


class Scheduler:
    """Chooses among the nodes that can be: nothing makes it prefer the one with the snapshot."""

    def __init__(self, cluster: "Cluster", chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance

    def step(self) -> None:
        """Choose nodes for claims, and for pods whose claims are bound."""
        for pod in self._cluster.pods:
            if not pod.node and not pod.is_deleted and not pod.claim.is_deleted:
                self._schedule(pod)

    def _schedule(self, pod: Pod) -> None:
        claim = pod.claim
        if claim.volume is not None:
            if not pod.nodes or claim.volume.node in pod.nodes:
                pod.node = claim.volume.node
        elif not claim.selected_node and (nodes := self._nodes_for(pod)):
            claim.selected_node = self._chance.choice(nodes)

    def _nodes_for(self, pod: Pod) -> Sequence[str]:
        """Those that the pod may be on and whose CSIStorageCapacity is large enough."""
        claim, capacities = pod.claim, self._cluster.capacities
        return [
            node
            for node in self._cluster.nodes
            if (not pod.nodes or node in pod.nodes)
            and claim.size_bytes <= capacities.get((node, claim.storage_class), -1)
        ]
