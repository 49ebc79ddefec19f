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
    """Finds the claims and pods of volumes, for one round: each object is read once at most.

    All methods raise ClusterRefused, ClusterSilent.
    """

    def __init__(self, objects: Objects, lists: Lists, driver_name: str, topology_key: str) -> None:
        self._objects, self._lists = objects, lists
        self._driver_name, self._topology_key = driver_name, topology_key
        # The PersistentVolumes by their handles; None until the list must be read.
        self._listed: Mapping[str, Object] | None = None
        self._pods: dict[str, Sequence[Object]] = {}

    def of(
        self, volume_id: str, node: str, segment: str = "", *, is_watched: bool = False
    ) -> Sequence[Subject]:
        """Return the claim of a volume, then the pods on that node that use the claim.

        Empty for a volume without a bound claim. With `segment`, empty also unless the
        PersistentVolume names that topology segment. On a node that `is_watched`, kubelet itself
        shows volume health in the status of pods, so no pods are returned.
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
        # The provisioner names a PersistentVolume after its volume; a person may have given it
        # another name.
        name = ids.readable_name(volume_id)
        volume = find_named(self._objects, VOLUMES, name, "PersistentVolume")
        if volume is not None and self._handle(volume) == volume_id:
            return volume
        if self._listed is None:
            volumes = self._lists.whole(VOLUMES, "PersistentVolumeList", keep=self._own).items
            self._listed = {self._handle(volume): volume for volume in volumes}
        return self._listed.get(volume_id)

    def _own(self, volume: Object) -> Object:
        """Return what is kept of a PersistentVolume: the fields that `of` reads.

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
        """Yield the pods on a node that use a claim; none if kubelet writes to pods itself."""
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
    """Return whether kubelet, by its feature CSIVolumeHealth, wrote health to a pod's status.

    The node reports that as well (`is_watched`), but not in the first minute after Carver started
    there. Kubelet calls NodeGetVolumeHealth for the volumes of all its pods, and an entry in the
    status stays when its conditions are over (SetPodVolumeHealth of Kubernetes 1.37.2,
    pkg/kubelet/status/status_manager.go).
    """
    return bool((pod.get("status") or {}).get("volumeHealth"))
