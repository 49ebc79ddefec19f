"""Who uses a volume in the cluster: the claim that is bound to it, and the claim's pods."""

from collections.abc import Iterator, Mapping, Sequence

from agent.core import ids
from agent.extras.kubernetes.events import Subject
from agent.extras.kubernetes.objects import (
    VOLUMES,
    Lists,
    Object,
    Objects,
    claims_of,
    find_named,
)
from agent.extras.orphans import references

_PODS = "/api/v1/pods"


class VolumeUsers:
    """Finds claims and pods, for one look: what was read once is not read again.

    All methods raise ClusterRefused, ClusterSilent.
    """

    def __init__(self, objects: Objects, lists: Lists, driver_name: str, topology_key: str) -> None:
        self._objects, self._lists = objects, lists
        self._driver_name, self._topology_key = driver_name, topology_key
        # The PersistentVolumes by their handles, where the list had to be read.
        self._listed: Mapping[str, Object] | None = None
        self._pods: dict[str, Sequence[Object]] = {}

    def of(
        self, volume_id: str, node: str, segment: str = "", *, is_watched: bool = False
    ) -> Sequence[Subject]:
        """The claim, then the pods on that node that use it; empty for a volume without a claim.

        With `segment` it is empty also unless the PersistentVolume names that topology segment.
        No pods are named where kubelet tells them itself, as it does on a node that `is_watched`.
        """
        found = self._volume(volume_id)
        if found is None or (found.get("status") or {}).get("phase") != "Bound":
            return ()
        spec = found["spec"]
        if segment and segment not in set(references.nodes_of(spec, self._topology_key)):
            return ()
        bound = spec.get("claimRef") or {}
        claim = Subject(
            "PersistentVolumeClaim",
            *(str(bound.get(key) or "") for key in ("namespace", "name", "uid")),
        )
        if not claim.uid:
            return ()
        return (claim,) if is_watched else (claim, *self._users(claim, node))

    def _volume(self, volume_id: str) -> Object | None:
        # The provisioner names a PersistentVolume as its volume; a person may name it otherwise.
        name = ids.readable_name(volume_id)
        found = find_named(self._objects, VOLUMES, name, "PersistentVolume")
        if found is not None and self._handle(found) == volume_id:
            return found
        if self._listed is None:
            every = self._lists.whole(VOLUMES, "PersistentVolumeList", keep=self._own).items
            self._listed = {self._handle(one): one for one in every}
        return self._listed.get(volume_id)

    def _own(self, volume: Object) -> Object:
        """What is kept of a PersistentVolume: what `of` reads, and nothing of another driver's."""
        if not self._handle(volume):
            return {}
        spec = volume["spec"]
        kept = {key: spec.get(key) for key in ("csi", "claimRef", "nodeAffinity")}
        return {"spec": kept, "status": {"phase": (volume.get("status") or {}).get("phase")}}

    def _handle(self, volume: Object) -> str:
        """The volume id in a PersistentVolume; empty for another driver's."""
        source = (volume.get("spec") or {}).get("csi") or {}
        return str(source.get("volumeHandle")) if source.get("driver") == self._driver_name else ""

    def _users(self, claim: Subject, node: str) -> Iterator[Subject]:
        """The pods that use a claim; none on a node whose kubelet writes to pods itself."""
        if node not in self._pods:
            on_node = self._lists.whole(_PODS, "PodList", fieldSelector=f"spec.nodeName={node}")
            self._pods[node] = on_node.items
        if any(map(_has_health, self._pods[node])):
            return
        for one in self._pods[node]:
            about = one["metadata"]
            if about.get("namespace") == claim.namespace and claim.name in claims_of(one):
                yield Subject("Pod", claim.namespace, about["name"], about["uid"])


def _has_health(pod: Object) -> bool:
    """Whether a kubelet with the feature CSIVolumeHealth wrote to a pod's status.

    The node says so as well, but not in the first minute of its Carver. Kubelet asks
    NodeGetVolumeHealth of the volumes of all of its pods, and an entry stays when its conditions
    are over (SetPodVolumeHealth of Kubernetes 1.37.2, pkg/kubelet/status/status_manager.go).
    """
    return bool((pod.get("status") or {}).get("volumeHealth"))
