"""Read manifests of PersistentVolumes and claims, and make those of a moved volume."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from agent.core import ids
from agent.extras.kubernetes.objects import Object

VOLUMES, NODES = "/api/v1/persistentvolumes", "/api/v1/nodes"
VOLUME, CLAIM = "PersistentVolume", "PersistentVolumeClaim"
RETAIN = "Retain"
# Annotations that Kubernetes' binder and scheduler set again.
_BINDING = (
    "pv.kubernetes.io/bind-completed",
    "pv.kubernetes.io/bound-by-controller",
    "volume.kubernetes.io/selected-node",
)
# Fields that differ between the old and the new PersistentVolume.
_OTHERWISE = ("claimRef", "persistentVolumeReclaimPolicy")
# A name is at most 253 characters (RFC 1123).
_SUFFIX = re.compile(r"-moved-[0-9a-f]{8}$")
_MOST_CHARACTERS = 230


@dataclass(frozen=True)
class Place:
    """Where a volume is: its id there, the node's name, the driver's name."""

    handle: str
    node: str
    driver: str

    @property
    def topology_key(self) -> str:
        """Return the label of the driver's topology."""
        return f"topology.{self.driver}/node"

    @property
    def segment(self) -> str:
        """Return the value of that label on the node."""
        return ids.node_segment(self.node)

    @property
    def affinity(self) -> dict[str, Any]:
        """Return the node affinity of a PersistentVolume for this node alone."""
        wanted = {"key": self.topology_key, "operator": "In", "values": [self.segment]}
        return {"required": {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}}

    @property
    def policy_key(self) -> str:
        """Return the annotation that keeps the old reclaim policy."""
        return f"move.{self.driver}/reclaim-policy"

    @property
    def claim_key(self) -> str:
        """Return the annotation that keeps the claim's manifest."""
        return f"move.{self.driver}/claim"


def volume_at(place: Place, old: Object, claim: Object) -> dict[str, Any]:
    """Make the new PersistentVolume: Retain, reserved for the claim, with its manifest kept."""
    made = _anew(VOLUME, old, moved_name(name(old), place.handle))
    kept = json.dumps(claim_of(claim, name(made)), sort_keys=True)
    made["metadata"].pop("ownerReferences", None)
    made["metadata"]["annotations"] = {**annotations(made), place.claim_key: kept}
    reference = {"apiVersion": "v1", "kind": CLAIM, "name": name(claim)}
    made["spec"] |= {
        "csi": {**old["spec"]["csi"], "volumeHandle": place.handle},
        "nodeAffinity": place.affinity,
        "claimRef": {**reference, "namespace": claim["metadata"]["namespace"]},
        "persistentVolumeReclaimPolicy": RETAIN,
    }
    return made


def moved_name(old: str, handle: str) -> str:
    """Return the name of the new PersistentVolume for the volume of that id."""
    digest = hashlib.sha256(handle.encode()).hexdigest()
    return f"{_SUFFIX.sub('', old)[:_MOST_CHARACTERS]}-moved-{digest[:8]}"


def claim_of(claim: Object, volume: str) -> dict[str, Any]:
    """Make the new claim, for a PersistentVolume."""
    made = _anew(CLAIM, claim, name(claim))
    made["metadata"]["namespace"] = claim["metadata"]["namespace"]
    made["spec"]["volumeName"] = volume
    return made


def _anew(kind: str, was: Object, called: str) -> dict[str, Any]:
    """Copy an object without the fields that the cluster sets."""
    about = was["metadata"]
    kept = {
        "name": called,
        "labels": about.get("labels"),
        "annotations": {k: v for k, v in annotations(was).items() if k not in _BINDING},
        "ownerReferences": about.get("ownerReferences"),
    }
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {key: value for key, value in kept.items() if value},
        "spec": dict(was["spec"]),
    }


def is_alike(volume: Object, made: Object) -> bool:
    """Whether a PersistentVolume matches the one that would be made."""
    return _essential(volume) == _essential(made)


def is_bound(volume: Object, claim: Object) -> bool:
    """Whether both say that they are bound to each other."""
    said = (at(claim, "status", "phase"), at(claim, "spec", "volumeName"))
    own: object = at(volume, "spec", "claimRef", "uid")
    return said == ("Bound", name(volume)) and own == claim["metadata"]["uid"]


def wanted_labels(volume: Object) -> Iterator[str]:
    """Return the labels of a PersistentVolume's node affinity."""
    for term in at(volume, "spec", "nodeAffinity", "required", "nodeSelectorTerms") or ():
        for wanted in (*(term.get("matchExpressions") or ()), *(term.get("matchFields") or ())):
            yield str(wanted.get("key"))


def claims_of(pod: Object) -> Iterator[str]:
    """Return the names of the claims that a pod uses."""
    for one in at(pod, "spec", "volumes") or ():
        if claim := at(one, "persistentVolumeClaim", "claimName"):
            yield str(claim)


def annotations(one: Object) -> Mapping[str, str]:
    """Return an object's annotations."""
    return at(one, "metadata", "annotations") or {}


def policy(volume: Object) -> str:
    """Return a PersistentVolume's reclaim policy."""
    return str(at(volume, "spec", "persistentVolumeReclaimPolicy") or "")


def name(one: Object) -> str:
    """Return an object's name."""
    return str(at(one, "metadata", "name") or "")


def is_going(one: Object) -> bool:
    """Whether it is being deleted."""
    return at(one, "metadata", "deletionTimestamp") is not None


def finalizers(one: Object) -> str:
    """Return an object's finalizers, for a message."""
    return ", ".join(at(one, "metadata", "finalizers") or ()) or "nothing that it names"


def volume_path(volume: Object) -> str:
    """Return a PersistentVolume's path."""
    return f"{VOLUMES}/{quote(name(volume), safe='')}"


def claims_path(namespace: str) -> str:
    """Return the path of a namespace's claims."""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/persistentvolumeclaims"


def claim_path(namespace: str, called: str) -> str:
    """Return a claim's path."""
    return f"{claims_path(namespace)}/{quote(called, safe='')}"


def pods_path(namespace: str) -> str:
    """Return the path of a namespace's pods."""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"


def at(one: Object, *keys: str) -> Any:
    """Return a nested field of an object, or None."""
    found: Any = one
    for key in keys:
        if not isinstance(found, dict):
            return None
        found = found.get(key)
    return found


def _essential(volume: Object) -> Mapping[str, Any]:
    return {key: value for key, value in volume["spec"].items() if key not in _OTHERWISE}
