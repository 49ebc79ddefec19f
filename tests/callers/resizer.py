"""external-resizer where the driver has no ControllerExpandVolume (`trivial_resizer.go`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from callers.cluster import Cluster


class Resizer:
    """Changes the PersistentVolume and leaves the rest to kubelet; has that try again, too."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster

    def step(self) -> None:
        """Have each PersistentVolume as large as its claim asks (`expand_and_recover.go`)."""
        backoff = self._cluster.backoff
        for claim in self._cluster.claims:
            if claim.volume is None:
                continue
            if claim.size_bytes != claim.asked_bytes:
                claim.asked_bytes = claim.size_bytes
                claim.volume.size_bytes = max(claim.size_bytes, claim.capacity_bytes)
                claim.is_infeasible = False
            elif claim.is_infeasible and backoff.is_due(self, claim):
                claim.is_infeasible = False
                backoff.failed(self, claim)
