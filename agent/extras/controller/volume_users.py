"""The users of a volume in the cluster: the claim that is bound to it, and the claim's pods."""

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
    """Finds the claims and pods of volumes in the cluster, with each list read at most once.

    An object of this class serves for one round of Events. All methods wait for the API server, and
    raise ClusterRefused or ClusterSilent if it refuses or does not answer.
    """

    def __init__(self, objects: Objects, lists: Lists, driver_name: str, topology_key: str) -> None:
        self._objects, self._lists = objects, lists
        self._driver_name, self._topology_key = driver_name, topology_key
        # All PersistentVolumes of the driver, by their volume ids; None until the list is needed.
        self._listed: Mapping[str, Object] | None = None
        # The pods of each node, by the node's name, as far as they were read.
        self._pods: dict[str, Sequence[Object]] = {}

    def of(
        self, volume_id: str, node: str, segment: str = "", *, is_watched: bool = False
    ) -> Sequence[Subject]:
        """Return the claim of a volume, then the pods on `node` that use the claim.

        Empty for a volume without a bound claim. If `segment` is given, empty also if the
        PersistentVolume does not name that topology segment. No pods are returned if `is_watched`
        is true, or if a pod of the node has volume health in its status: kubelet on such a node
        writes volume health to pods itself.
        """
        volume = self._volume(volume_id)
        if volume is None or (volume.get("status") or {}).get("phase") != "Bound":
            return ()
        spec = volume["spec"]
        if segment and segment not in set(references.nodes_of(spec, self._topology_key)):
            return ()
        reference = spec.get("claimRef") or {}
        claim = Subject(
            "PersistentVolumeClaim",
            *(str(reference.get(key) or "") for key in ("namespace", "name", "uid")),
        )
        if not claim.uid:
            return ()
        return (claim,) if is_watched else (claim, *self._users(claim, node))

    def _volume(self, volume_id: str) -> Object | None:
        # Look for the PersistentVolume by the name that the provisioner gives it. A person may have
        # given it another name, so search the list if it is not found.
        name = ids.readable_name(volume_id)
        volume = find_named(self._objects, VOLUMES, name, "PersistentVolume")
        if volume is not None and self._handle(volume) == volume_id:
            return volume
        if self._listed is None:
            volumes = self._lists.whole(VOLUMES, "PersistentVolumeList", keep=self._own).items
            self._listed = {self._handle(volume): volume for volume in volumes}
        return self._listed.get(volume_id)

    def _own(self, volume: Object) -> Object:
        """Return what is kept in memory of a PersistentVolume: the fields that `of` reads.

        Empty for another driver's PersistentVolume.
        """
        if not self._handle(volume):
            return {}
        spec = volume["spec"]
        kept_spec = {key: spec.get(key) for key in ("csi", "claimRef", "nodeAffinity")}
        return {"spec": kept_spec, "status": {"phase": (volume.get("status") or {}).get("phase")}}

    def _handle(self, volume: Object) -> str:
        """Return the volume id in a PersistentVolume; empty for another driver's."""
        source = (volume.get("spec") or {}).get("csi") or {}
        return str(source.get("volumeHandle")) if source.get("driver") == self._driver_name else ""

    def _users(self, claim: Subject, node: str) -> Iterator[Subject]:
        """Yield the pods on a node that use a claim.

        Nothing is yielded if kubelet on the node writes volume health to pods itself.
        """
        if node not in self._pods:
            listing = self._lists.whole(_PODS, "PodList", fieldSelector=f"spec.nodeName={node}")
            self._pods[node] = listing.items
        if any(map(_has_health, self._pods[node])):
            return
        for pod in self._pods[node]:
            metadata = pod["metadata"]
            if metadata.get("namespace") == claim.namespace and claim.name in claims_of(pod):
                yield Subject("Pod", claim.namespace, metadata["name"], metadata["uid"])


def _has_health(pod: Object) -> bool:
    """Return whether kubelet wrote volume health to a pod's status (feature CSIVolumeHealth).

    The node, too, reports that kubelet asks for volume health (`is_watched`), but not in the first
    minute after Carver started on the node. Kubelet calls NodeGetVolumeHealth for the volumes of
    all its pods, and an entry in the status stays when its conditions are over (SetPodVolumeHealth
    of Kubernetes 1.37.2, pkg/kubelet/status/status_manager.go).
    """
    return bool((pod.get("status") or {}).get("volumeHealth"))
