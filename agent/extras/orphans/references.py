"""The cluster's objects that refer to volumes: PersistentVolumes, claims, pods, nodes."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent.core import errors, ids
from agent.extras.kubernetes.objects import NODES, VOLUMES, Listing, Lists

# Prefix of the names of provisioned PersistentVolumes, set by Kubernetes' external-provisioner.
_PROVISIONED = "pvc-"
# Annotation of a mirror pod, with the UID of the static pod that it shows.
_STATIC_POD = "kubernetes.io/config.hash"
# Label of a Node object with the node's host name, set by kubelet.
_HOSTNAME = "kubernetes.io/hostname"
# Annotation of a claim, with the node that the scheduler selected.
_SELECTED_NODE = "volume.kubernetes.io/selected-node"
# Annotations of a claim, with the driver that provisions the claim's volume; the second annotation
# is the older one. The controller-manager sets both (component-helpers,
# storage/volume/pv_helpers.go).
_PROVISIONERS = (
    "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner",
)


@dataclass(frozen=True)
class PersistentVolume:
    """A PersistentVolume that was provisioned by Carver's CSI driver.

    - `handle` is the volume's id.
    - `nodes` has the topology segments in the PersistentVolume's node affinity; may be empty.
    - `claim` is namespace/name of the claim that is bound to the PersistentVolume; empty if no
      claim is bound.
    """

    name: str
    uid: str
    handle: str
    nodes: frozenset[str]
    claim: str


@dataclass(frozen=True)
class NodeObject:
    """An object of the cluster that belongs to one node.

    The object is a CSIStorageCapacity of the driver's, or a claim whose volume has yet to be made
    on the node that the scheduler selected. `name` is namespace/name, and `node` is the node's
    name.
    """

    name: str
    uid: str
    node: str


@dataclass(frozen=True)
class References:
    """All objects of the cluster that may refer to a volume.

    - `volumes` and `capacities` are the driver's own PersistentVolumes and CSIStorageCapacities.
    - `waiting_claims` are the claims whose volume has yet to be made by the driver on a selected
      node.
    - `names_in_use` has the names that volumes in use may have: the names of PersistentVolumes of
      all drivers, of the logical volumes in their handles, and of the volumes of claims, bound or
      not yet.
    - `handle_digests` has the names of kubelet's staging directories for the PersistentVolumes.
    - `pods` has the UIDs of the pods on one node; empty if the pods were not listed.
    - `nodes` has all names by which Carver may know the nodes of the cluster.
    - `unready` has the names of the nodes whose Ready condition is not true.
    - `versions` has the resource version of each list.
    """

    volumes: tuple[PersistentVolume, ...]
    capacities: tuple[NodeObject, ...]
    waiting_claims: tuple[NodeObject, ...]
    names_in_use: frozenset[str]
    handle_digests: frozenset[str]
    pods: frozenset[str]
    nodes: frozenset[str]
    unready: frozenset[str]
    versions: Mapping[str, str]

    def names(self, *names: str) -> bool:
        """Return whether an object of the cluster refers to a volume with one of these names."""
        return not self.names_in_use.isdisjoint(names)


def read(
    lists: Lists,
    driver_name: str,
    topology_key: str,
    node_ids: Collection[str],
    *,
    pods_on: str = "",
) -> References:
    """Read the cluster's lists of nodes, claims, PersistentVolumes and CSIStorageCapacities.

    With `pods_on`, the list of the pods on that node is read, too.

    Raises ClusterSilent in three cases: a list is incomplete; a node of `node_ids` is not in the
    cluster, so the API server is of another cluster; or an object cannot be parsed.
    """
    try:
        return _read(lists, driver_name, topology_key, node_ids, pods_on)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # An object that cannot be parsed may refer to any volume, so no orphan can be proved: the
        # search fails.
        problem = f"an object cannot be parsed: {type(error).__name__}: {error}"
        raise errors.ClusterSilent("its lists", problem) from error


def _read(
    lists: Lists, driver_name: str, topology_key: str, node_ids: Collection[str], pods_on: str
) -> References:
    nodes = lists.whole(NODES, "NodeList")
    node_names = frozenset(names_of_nodes(nodes.items, topology_key))
    for node_id in sorted(node_ids):
        if node_id not in node_names:
            # A node that must be in the cluster is not in the list: the API server is of another
            # cluster, or has lost its data.
            node_text = "this node" if pods_on else "a node of the controller"
            raise errors.ClusterSilent("nodes", f"{node_text}, {node_id}, is not among them")
    pods = Listing((), "")
    if pods_on:
        pods = lists.whole("/api/v1/pods", "PodList", fieldSelector=f"spec.nodeName={pods_on}")
    claims = lists.whole("/api/v1/persistentvolumeclaims", "PersistentVolumeClaimList")
    volumes = lists.whole(VOLUMES, "PersistentVolumeList")
    capacities = lists.whole(
        "/apis/storage.k8s.io/v1/csistoragecapacities", "CSIStorageCapacityList"
    )
    volumes_and_csi = [(volume, _table(_table(volume, "spec"), "csi")) for volume in volumes.items]
    handles = {str(csi.get("volumeHandle", "")) for _, csi in volumes_and_csi} - {""}
    return References(
        volumes=tuple(
            _volume(volume, csi, topology_key)
            for volume, csi in volumes_and_csi
            if csi.get("driver") == driver_name
        ),
        capacities=tuple(_capacities(capacities.items, topology_key)),
        waiting_claims=tuple(_waiting_claims(claims.items, driver_name)),
        names_in_use=frozenset(
            # Take the names of the PersistentVolumes of all drivers: if a driver was renamed, the
            # objects of its old name still refer to its volumes.
            {volume["metadata"]["name"] for volume in volumes.items}
            | {ids.logical_name(handle) for handle in handles}
            | set(_names_of_claims(claims.items))
        ),
        handle_digests=frozenset(digest(handle) for handle in handles),
        pods=frozenset(_uids_of_pods(pods.items)),
        nodes=node_names,
        unready=frozenset(node["metadata"]["name"] for node in nodes.items if _is_unready(node)),
        versions={
            "nodes": nodes.version,
            "pods": pods.version,
            "claims": claims.version,
            "volumes": volumes.version,
            "capacities": capacities.version,
        },
    )


def digest(volume_handle: str) -> str:
    """Return the name of kubelet's staging directory of a volume: the SHA-256 of the volume's id.

    The digest is in hexadecimal.
    """
    return hashlib.sha256(volume_handle.encode()).hexdigest()


def names_of_nodes(items: Any, topology_key: str) -> Iterator[str]:
    """Yield all names by which Carver may know these nodes: names, topology segments, and labels.

    `items` are Node objects.
    """
    for node in items:
        yield (name := node["metadata"]["name"])
        yield ids.node_segment(name)
        labels = _table(_table(node, "metadata"), "labels")
        # A node whose id in Carver differs from its name in Kubernetes has that id in a label.
        yield from (str(labels[key]) for key in (topology_key, _HOSTNAME) if key in labels)


def _names_of_claims(items: Any) -> Iterator[str]:
    for claim in items:
        yield f"{_PROVISIONED}{claim['metadata']['uid']}"
        if name := _table(claim, "spec").get("volumeName"):
            yield str(name)


def _is_unready(node: Mapping[str, Any]) -> bool:
    """Return whether a node has a Ready condition that is not true."""
    conditions = _table(node, "status").get("conditions") or ()
    return any(
        condition.get("type") == "Ready" and condition.get("status") != "True"
        for condition in conditions
    )


def selected_node(claim: Mapping[str, Any]) -> str:
    """Return the node that the scheduler selected for a claim; empty if no node was selected."""
    return str(_table(_table(claim, "metadata"), "annotations").get(_SELECTED_NODE) or "")


def _waiting_claims(items: Any, driver_name: str) -> Iterator[NodeObject]:
    for claim in items:
        metadata = claim["metadata"]
        annotations = _table(metadata, "annotations")
        node, is_own = selected_node(claim), driver_name in map(annotations.get, _PROVISIONERS)
        if node and is_own and _table(claim, "status").get("phase") == "Pending":
            yield NodeObject(_full_name(claim), metadata["uid"], node)


def _uids_of_pods(items: Any) -> Iterator[str]:
    for pod in items:
        yield pod["metadata"]["uid"]
        # Kubelet knows a static pod by the UID in the annotation of the mirror pod, so yield that
        # UID, too.
        if uid := _table(_table(pod, "metadata"), "annotations").get(_STATIC_POD):
            yield str(uid)


def _capacities(items: Any, topology_key: str) -> Iterator[NodeObject]:
    for capacity in items:
        if node := _table(_table(capacity, "nodeTopology"), "matchLabels").get(topology_key):
            yield NodeObject(_full_name(capacity), capacity["metadata"]["uid"], str(node))


def _full_name(item: Mapping[str, Any]) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


def _volume(
    volume: Mapping[str, Any], csi: Mapping[str, Any], topology_key: str
) -> PersistentVolume:
    metadata, spec = volume["metadata"], _table(volume, "spec")
    claim = _table(spec, "claimRef")
    return PersistentVolume(
        name=metadata["name"],
        uid=metadata["uid"],
        handle=str(csi.get("volumeHandle", "")),
        nodes=frozenset(nodes_of(spec, topology_key)),
        claim="/".join(str(claim[key]) for key in ("namespace", "name") if key in claim),
    )


def nodes_of(spec: Mapping[str, Any], topology_key: str) -> Iterator[str]:
    """Yield the values of a topology key in the required node affinity of a PersistentVolume.

    `spec` is the spec of the PersistentVolume.
    """
    required = _table(_table(spec, "nodeAffinity"), "required")
    for term in required.get("nodeSelectorTerms") or ():
        for expression in _table({"term": term}, "term").get("matchExpressions") or ():
            if expression.get("key") == topology_key and expression.get("operator") == "In":
                yield from map(str, expression.get("values") or ())


def _table(item: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the JSON object under a key of an object; an empty dictionary if there is none."""
    value = item.get(key)
    return value if isinstance(value, dict) else {}
