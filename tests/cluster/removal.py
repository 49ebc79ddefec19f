"""What is left of a run, and its end: objects, volumes on the nodes, nodes that are kept apart."""

from collections.abc import Callable, Container, Mapping

from cluster import objects
from cluster.installation import Held
from cluster.kubectl import (
    ATTRIBUTES,
    CONTENTS,
    GROUP_CLASSES,
    GROUP_SNAPSHOTS,
    SNAPSHOT_CLASSES,
    SNAPSHOTS,
    Kubectl,
    Object,
    path,
)
from cluster.site import Failed, Site

_OF_PODS = ("deployments.apps", "statefulsets.apps", "pods")
_CLAIMS = "persistentvolumeclaims"


def clear(site: Site) -> None:
    """End what a check has made, or all of a run where the site has no check.

    Raises Failed with what does not go. A PersistentVolume goes after DeleteVolume has succeeded;
    Carver is asked all the same whether the volume is gone. Of what was on a node that a check had
    added, and that is removed, the objects are removed.
    """
    selector = site.mine if site.check else f"{objects.RUN}={site.run}"
    nodes = _nodes(site, selector) if site.check else site.place.nodes
    for kind in _OF_PODS:
        _end(site, kind, selector)
    members = site.until("the snapshots are listed", lambda: _contents_of_groups(site))
    handles = _handles(site, selector, members)
    if GROUP_SNAPSHOTS in site.place.kinds:
        _end(site, GROUP_SNAPSHOTS, selector)
    if SNAPSHOTS in site.place.kinds:
        _end(site, SNAPSHOTS, selector)
        # Those of snapshots that were there; they do not go with their snapshots.
        _end(site, CONTENTS, selector)
        _wait(site, "contents of snapshots", lambda: contents_left(site, members))
    _end(site, _CLAIMS, selector)
    site.persist("volumes of removed nodes are forgotten", lambda: _forget_volumes(site))
    _wait(site, "PersistentVolumes", lambda: volumes_left(site))
    for node in nodes:
        _wait(site, f"volumes on node {node}", lambda: _still_there(site, node, handles))  # noqa: B023
    for kind in (GROUP_CLASSES, ATTRIBUTES):
        if kind in site.place.kinds:
            _end(site, kind, selector)


def end(site: Site) -> None:
    """End all of a run; raises Failed with what does not go."""
    site.persist("nodes are given back", lambda: give_back(site.kubectl, site.run))
    for where in sorted({one["metadata"]["namespace"] for one in site.place.daemonsets}):
        # What takes Carver's place on a node (lying.py).
        _end(site, "pods", f"{objects.RUN}={site.run}", where)
    clear(site)
    name = objects.named(site.run)
    classes = ["storageclasses.storage.k8s.io"]
    classes += [SNAPSHOT_CLASSES] if SNAPSHOTS in site.place.kinds else []
    for kind in ("namespaces", *classes):
        site.persist(f"{kind} are deleted", lambda: site.kubectl.delete(kind, name))  # noqa: B023
        _wait(site, kind, lambda: [name] if site.kubectl.find(kind, name) else [])  # noqa: B023


def runs_left(kubectl: Kubectl) -> list[str]:
    """The runs that ended without removing what they had made, and those that are under way."""
    kinds = ("namespaces", "storageclasses.storage.k8s.io")
    found = {
        str(path(one, "metadata", "labels", objects.RUN))
        for kind in kinds
        for one in kubectl.all(kind, selector=objects.RUN)
    }
    for node in kubectl.all("nodes"):
        cordoned_by = str(path(node, "metadata", "labels", objects.CORDONED, default=""))
        found |= {cordoned_by, _taker(node)} - {""}
    return sorted(found)


def give_back(kubectl: Kubectl, run: str) -> None:
    """Let pods, and Carver, onto the nodes again that a run has kept them from."""
    uncordon(kubectl, run)
    untaint(kubectl, run)


def untaint(kubectl: Kubectl, run: str) -> None:
    """Have Carver on the nodes again that a run has taken it from, and on no others."""
    for node in kubectl.all("nodes"):
        if _taker(node) == run:
            kubectl("taint", "nodes", node["metadata"]["name"], f"{objects.WITHOUT_CARVER}-")


def _taker(node: Object) -> str:
    """The run that has taken Carver from a node; empty if none has."""
    taints = path(node, "spec", "taints", default=[]) or []
    found = [one.get("value") for one in taints if one["key"] == objects.WITHOUT_CARVER]
    return str(found[0]) if found else ""


def uncordon(kubectl: Kubectl, run: str) -> None:
    """Let pods onto the nodes again that a run has cordoned, and no others."""
    for one in kubectl.all("nodes", selector=f"{objects.CORDONED}={run}"):
        kubectl("uncordon", one["metadata"]["name"])
        kubectl("label", "nodes", one["metadata"]["name"], f"{objects.CORDONED}-")


def volumes_left(site: Site) -> list[str]:
    """PersistentVolumes that were made for claims of the run."""
    return _of_namespace(site, "persistentvolumes", "claimRef")


def contents_left(site: Site, members: Container[str] = ()) -> list[str]:
    """VolumeSnapshotContents that were made for snapshots of the run, and of its groups."""
    return _of_namespace(site, CONTENTS, "volumeSnapshotRef", members)


def _contents_of_groups(site: Site) -> list[str]:
    """The names of the contents of group snapshots' snapshots."""
    if GROUP_SNAPSHOTS not in site.place.kinds:
        return []
    names = [path(one, "status", "boundVolumeSnapshotContentName") for one in site.members()]
    return [str(one) for one in names if one]


def _of_namespace(site: Site, kind: str, reference: str, others: Container[str] = ()) -> list[str]:
    return [
        one["metadata"]["name"]
        for one in site.kubectl.all(kind)
        if path(one, "spec", reference, "namespace") == site.namespace
        and (
            site.is_mine(str(path(one, "spec", reference, "name")))
            or one["metadata"]["name"] in others
        )
    ]


def _forget_volumes(site: Site) -> None:
    """Remove the objects of PersistentVolumes that are on no node any more.

    The disks of a node that a check had added went with its machine. So no deletion of the volume
    succeeds, and one whose claim Carver has released is Retain. First the policy is set to Retain,
    so that the removal of the object asks for no deletion.
    """
    mine, there = volumes_left(site), _nodes_there(site)
    for one in site.kubectl.all("persistentvolumes"):
        name, nodes = one["metadata"]["name"], _nodes_of(site, one)
        if name in mine and nodes and nodes.isdisjoint(there):
            change: Object = {"spec": {"persistentVolumeReclaimPolicy": "Retain"}}
            change["metadata"] = {"finalizers": None}
            site.kubectl.patch("persistentvolumes", name, change)
            site.kubectl.delete("persistentvolumes", name)


def _nodes_of(site: Site, volume: Object) -> set[str]:
    """The nodes that the node affinity of a PersistentVolume names."""
    terms = path(volume, "spec", "nodeAffinity", "required", "nodeSelectorTerms", default=[])
    return {
        value
        for term in terms
        for one in term.get("matchExpressions", [])
        if one["key"] == _topology_key(site)
        for value in one["values"]
    }


def _nodes_there(site: Site) -> set[str]:
    """The nodes that the run began with, and those that have a Node object.

    These are their names, and what PersistentVolumes call a node whose name is too long. A node
    that the run began with may be away for a while, also its Node object.
    """
    found = [one["metadata"] for one in site.kubectl.all("nodes")]
    labels = {path(one, "labels", _topology_key(site)) for one in found} - {None}
    return {*site.place.nodes} | {str(one["name"]) for one in found} | labels


def _topology_key(site: Site) -> str:
    return f"topology.{site.place.driver}/node"


def _handles(site: Site, selector: str, members: Container[str]) -> set[str]:
    """What Carver calls the volumes and snapshots that are about to go."""
    found: set[str] = set()

    def look() -> bool:
        names = {
            path(one, "spec", "volumeName")
            for one in site.kubectl.all(_CLAIMS, site.namespace, selector)
        }
        for one in site.kubectl.all("persistentvolumes") if names - {None} else []:
            if one["metadata"]["name"] in names:
                found.add(str(path(one, "spec", "csi", "volumeHandle")))
        if SNAPSHOTS in site.place.kinds:
            contents = set(contents_left(site, members))
            for one in site.kubectl.all(CONTENTS) if contents else []:
                if one["metadata"]["name"] in contents:
                    found.add(str(path(one, "status", "snapshotHandle")))
        return True

    site.until("the cluster tells of volumes", look)
    return found


def _nodes(site: Site, selector: str) -> set[str]:
    """The nodes of pods that are about to go, where their volumes are. In the end all are asked.

    A node that a check had added, and that is removed, is not asked.
    """
    pods = site.until("the pods are listed", lambda: _pods(site, selector))
    there = site.until("the nodes are listed", lambda: _nodes_there(site))
    return there & {str(path(one, "spec", "nodeName")) for one in pods}


def _pods(site: Site, selector: str) -> list[Object]:
    return site.kubectl.all("pods", site.namespace, selector)


def _still_there(site: Site, node: str, handles: Container[str]) -> list[str]:
    """What a node holds of the site's, by what it is called or by the claim it was made for.

    A volume whose making was interrupted can be there without a PersistentVolume.
    """
    held: Mapping[str, Held] = {}
    if site.place.daemonsets:
        asked = f"Carver on {node} says what it holds"
        held = site.until(asked, lambda: site.place.held(site.kubectl, node))
    return sorted(key for key, it in held.items() if key in handles or _is_for_mine(site, it))


def _is_for_mine(site: Site, held: Held) -> bool:
    """Whether a volume was made for a claim of the check's."""
    namespace, _, claim = held.claim.partition("/")
    return namespace == site.namespace and site.is_mine(claim)


def _end(site: Site, kind: str, selector: str, namespace: str = "") -> None:
    where = {"namespace": namespace or site.namespace, "selector": selector}
    site.persist(f"{kind} are deleted", lambda: site.kubectl.delete(kind, **where))

    def left() -> list[str]:
        return [one["metadata"]["name"] for one in site.kubectl.all(kind, **where)]

    _wait(site, kind, left)


def _wait(site: Site, what: str, left: Callable[[], list[str]]) -> None:
    """Wait until nothing is left; raises Failed that names it."""
    last: list[str] = []

    def gone() -> bool | None:
        last[:] = left()
        return None if last else True

    try:
        site.until(f"{what} go", gone)
    except Failed as error:
        raise Failed(f"{error}: {', '.join(last)}") from error
