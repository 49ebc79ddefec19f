"""The cluster's objects that refer to volumes: PersistentVolumes, claims, pods, nodes."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent.core import errors, ids
from agent.extras.kubernetes.objects import NODES, VOLUMES, Listing, Lists

# Kubernetes' own: the prefix of provisioned volumes, and a mirror pod's annotation with the UID of
# its static pod.
_PROVISIONED = "pvc-"
_STATIC_POD = "kubernetes.io/config.hash"
_HOSTNAME = "kubernetes.io/hostname"
# A claim's annotations: the node that the scheduler chose, and the driver that provisions its
# volume, set by the controller-manager (component-helpers, storage/volume/pv_helpers.go).
_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_PROVISIONERS = (
    "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner",
)


@dataclass(frozen=True)
class PersistentVolume:
    """One of the driver's. `nodes` are those that it may be used on, empty if it names none.

    `claim` is namespace/name of the claim that it is bound to, if any.
    """

    name: str
    uid: str
    handle: str
    nodes: frozenset[str]
    claim: str


@dataclass(frozen=True)
class OfNode:
    """A CSIStorageCapacity of the driver's, or a claim that waits for its selected node's volume.

    `name` is namespace/name.
    """

    name: str
    uid: str
    node: str


@dataclass(frozen=True)
class References:
    """All references, with the resource version of each list.

    `unready` are the nodes whose Ready condition is not true. `spoken_for` are the names that
    volumes in use may have: those of PersistentVolumes, of the logical volumes in their handles,
    and of claims' volumes, bound or not yet.
    """

    volumes: tuple[PersistentVolume, ...]
    capacities: tuple[OfNode, ...]
    waiting_claims: tuple[OfNode, ...]
    spoken_for: frozenset[str]
    handle_digests: frozenset[str]
    pods: frozenset[str]
    nodes: frozenset[str]
    unready: frozenset[str]
    versions: Mapping[str, str]

    def names(self, *names: str) -> bool:
        """Whether anything refers to a volume, by one of its names."""
        return not self.spoken_for.isdisjoint(names)


def read(
    lists: Lists,
    driver_name: str,
    topology_key: str,
    node_ids: Collection[str],
    *,
    pods_on: str = "",
) -> References:
    """Read the lists, and with `pods_on` that of the pods on that node.

    Raises ClusterSilent if one is incomplete, or of another cluster: one without these nodes.
    """
    try:
        return _read(lists, driver_name, topology_key, node_ids, pods_on)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # What a malformed object refers to is unknown.
        problem = f"an object cannot be parsed: {type(error).__name__}: {error}"
        raise errors.ClusterSilent("its lists", problem) from error


def _read(
    lists: Lists, driver_name: str, topology_key: str, node_ids: Collection[str], pods_on: str
) -> References:
    nodes = lists.whole(NODES, "NodeList")
    known = frozenset(names_of_nodes(nodes.items, topology_key))
    for one in sorted(node_ids):
        if one not in known:
            # The API server is of another cluster, or has lost its data.
            which = "this node" if pods_on else "a node of the controller"
            raise errors.ClusterSilent("nodes", f"{which}, {one}, is not among them")
    pods = Listing((), "")
    if pods_on:
        pods = lists.whole("/api/v1/pods", "PodList", fieldSelector=f"spec.nodeName={pods_on}")
    claims = lists.whole("/api/v1/persistentvolumeclaims", "PersistentVolumeClaimList")
    volumes = lists.whole(VOLUMES, "PersistentVolumeList")
    capacities = lists.whole(
        "/apis/storage.k8s.io/v1/csistoragecapacities", "CSIStorageCapacityList"
    )
    every = [(one, _table(_table(one, "spec"), "csi")) for one in volumes.items]
    handles = {str(csi.get("volumeHandle", "")) for _, csi in every} - {""}
    return References(
        volumes=tuple(
            _volume(one, csi, topology_key)
            for one, csi in every
            if csi.get("driver") == driver_name
        ),
        capacities=tuple(_capacities(capacities.items, topology_key)),
        waiting_claims=tuple(_waiting_claims(claims.items, driver_name)),
        spoken_for=frozenset(
            # Of any driver: an object of a renamed driver refers to its volume, too.
            {one["metadata"]["name"] for one in volumes.items}
            | {ids.logical_name(one) for one in handles}
            | set(_names_of_claims(claims.items))
        ),
        handle_digests=frozenset(digest(one) for one in handles),
        pods=frozenset(_uids_of_pods(pods.items)),
        nodes=known,
        unready=frozenset(one["metadata"]["name"] for one in nodes.items if _is_unready(one)),
        versions={
            "nodes": nodes.version,
            "pods": pods.version,
            "claims": claims.version,
            "volumes": volumes.version,
            "capacities": capacities.version,
        },
    )


def digest(volume_handle: str) -> str:
    """Return the name of kubelet's staging directory of a volume."""
    return hashlib.sha256(volume_handle.encode()).hexdigest()


def names_of_nodes(items: Any, topology_key: str) -> Iterator[str]:
    """Return the names that Carver may know nodes by, and their topology segments."""
    for one in items:
        yield (name := one["metadata"]["name"])
        yield ids.node_segment(name)
        labels = _table(_table(one, "metadata"), "labels")
        # A node that was named anew for Carver has that in the label that kubelet made.
        yield from (str(labels[key]) for key in (topology_key, _HOSTNAME) if key in labels)


def _names_of_claims(items: Any) -> Iterator[str]:
    for one in items:
        yield f"{_PROVISIONED}{one['metadata']['uid']}"
        if name := _table(one, "spec").get("volumeName"):
            yield str(name)


def _is_unready(node: Mapping[str, Any]) -> bool:
    """Whether its Ready condition is not true; a new node has no condition."""
    conditions = _table(node, "status").get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") != "True" for one in conditions)


def selected_node(claim: Mapping[str, Any]) -> str:
    """Return the node that the scheduler chose for a claim; empty for none."""
    return str(_table(_table(claim, "metadata"), "annotations").get(_SELECTED_NODE) or "")


def _waiting_claims(items: Any, driver_name: str) -> Iterator[OfNode]:
    for one in items:
        about = one["metadata"]
        said = _table(about, "annotations")
        node, is_own = selected_node(one), driver_name in map(said.get, _PROVISIONERS)
        if node and is_own and _table(one, "status").get("phase") == "Pending":
            yield OfNode(_full_name(one), about["uid"], node)


def _uids_of_pods(items: Any) -> Iterator[str]:
    for one in items:
        yield one["metadata"]["uid"]
        # Kubelet knows a static pod by this UID.
        if uid := _table(_table(one, "metadata"), "annotations").get(_STATIC_POD):
            yield str(uid)


def _capacities(items: Any, topology_key: str) -> Iterator[OfNode]:
    for one in items:
        if node := _table(_table(one, "nodeTopology"), "matchLabels").get(topology_key):
            yield OfNode(_full_name(one), one["metadata"]["uid"], str(node))


def _full_name(one: Mapping[str, Any]) -> str:
    return f"{one['metadata'].get('namespace', '')}/{one['metadata']['name']}"


def _volume(one: Mapping[str, Any], csi: Mapping[str, Any], topology_key: str) -> PersistentVolume:
    about, spec = one["metadata"], _table(one, "spec")
    claim = _table(spec, "claimRef")
    return PersistentVolume(
        name=about["name"],
        uid=about["uid"],
        handle=str(csi.get("volumeHandle", "")),
        nodes=frozenset(nodes_of(spec, topology_key)),
        claim="/".join(str(claim[key]) for key in ("namespace", "name") if key in claim),
    )


def nodes_of(spec: Mapping[str, Any], topology_key: str) -> Iterator[str]:
    """Return the topology segments of the nodes that a PersistentVolume's terms name."""
    required = _table(_table(spec, "nodeAffinity"), "required")
    for term in required.get("nodeSelectorTerms") or ():
        for wanted in _table({"term": term}, "term").get("matchExpressions") or ():
            if wanted.get("key") == topology_key and wanted.get("operator") == "In":
                yield from map(str, wanted.get("values") or ())


def _table(one: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table in an object, or an empty one."""
    found = one.get(key)
    return found if isinstance(found, dict) else {}
