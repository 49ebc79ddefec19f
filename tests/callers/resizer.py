"""external-resizer where the driver has no ControllerExpandVolume (`trivial_resizer.go`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from callers.cluster import Cluster


class Resizer:
    """Changes the PersistentVolume and leaves the rest to kubelet; has that try again at once."""

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
