"""What is left of a run, and its end: objects, volumes on the nodes, a node that is cordoned."""

from collections.abc import Callable, Container

from cluster import objects
from cluster.bench import Bench, Failed
from cluster.kubectl import CONTENTS, SNAPSHOT_CLASSES, SNAPSHOTS, Kubectl, Object, path

_OF_PODS = ("deployments.apps", "pods")
_CLAIMS = "persistentvolumeclaims"


def clear(bench: Bench) -> None:
    """End what a check has made, or all of a run where the bench has no check.

    Raises Failed with what does not go. A PersistentVolume goes after DeleteVolume has succeeded;
    Carver is asked all the same whether the volume is gone.
    """
    selector = bench.mine if bench.check else f"{objects.RUN}={bench.run}"
    nodes = _nodes(bench, selector) if bench.check else bench.place.nodes
    for kind in _OF_PODS:
        _end(bench, kind, selector)
    handles = _handles(bench, selector)
    if not bench.place.no_snapshots:
        _end(bench, SNAPSHOTS, selector)
        _wait(bench, "contents of snapshots", lambda: contents_left(bench))
    _end(bench, _CLAIMS, selector)
    _wait(bench, "PersistentVolumes", lambda: volumes_left(bench))
    for node in nodes:
        _wait(bench, f"volumes on node {node}", lambda: _still_there(bench, node, handles))  # noqa: B023


def end(bench: Bench) -> None:
    """End all of a run; raises Failed with what does not go."""
    bench.persist("nodes are uncordoned", lambda: uncordon(bench.kubectl, bench.run))
    clear(bench)
    name = objects.named(bench.run)
    classes = ["storageclasses.storage.k8s.io"]
    classes += [] if bench.place.no_snapshots else [SNAPSHOT_CLASSES]
    for kind in ("namespaces", *classes):
        bench.persist(f"{kind} are deleted", lambda: bench.kubectl.delete(kind, name))  # noqa: B023
        _wait(bench, kind, lambda: [name] if bench.kubectl.find(kind, name) else [])  # noqa: B023


def runs_left(kubectl: Kubectl) -> list[str]:
    """The runs that ended without removing what they had made, and those that are under way."""
    kinds = ("namespaces", "storageclasses.storage.k8s.io")
    found = {
        str(path(one, "metadata", "labels", objects.RUN))
        for kind in kinds
        for one in kubectl.all(kind, selector=objects.RUN)
    }
    cordoned = kubectl.all("nodes", selector=objects.CORDONED)
    return sorted(found | {str(one["metadata"]["labels"][objects.CORDONED]) for one in cordoned})


def uncordon(kubectl: Kubectl, run: str) -> None:
    """Let pods onto the nodes again that a run has cordoned, and no others."""
    for one in kubectl.all("nodes", selector=f"{objects.CORDONED}={run}"):
        kubectl("uncordon", one["metadata"]["name"])
        kubectl("label", "nodes", one["metadata"]["name"], f"{objects.CORDONED}-")


def volumes_left(bench: Bench) -> list[str]:
    """PersistentVolumes that were made for claims of the run."""
    return _of_namespace(bench, "persistentvolumes", "claimRef")


def contents_left(bench: Bench) -> list[str]:
    """VolumeSnapshotContents that were made for snapshots of the run."""
    return _of_namespace(bench, CONTENTS, "volumeSnapshotRef")


def _of_namespace(bench: Bench, kind: str, reference: str) -> list[str]:
    start = f"{bench.check}-" if bench.check else ""
    return [
        one["metadata"]["name"]
        for one in bench.kubectl.all(kind)
        if path(one, "spec", reference, "namespace") == bench.namespace
        and str(path(one, "spec", reference, "name")).startswith(start)
    ]


def _handles(bench: Bench, selector: str) -> set[str]:
    """What Carver calls the volumes and snapshots that are about to go."""
    found: set[str] = set()

    def look() -> bool:
        names = {
            path(one, "spec", "volumeName")
            for one in bench.kubectl.all(_CLAIMS, bench.namespace, selector)
        }
        for one in bench.kubectl.all("persistentvolumes") if names - {None} else []:
            if one["metadata"]["name"] in names:
                found.add(str(path(one, "spec", "csi", "volumeHandle")))
        if not bench.place.no_snapshots:
            contents = set(contents_left(bench))
            for one in bench.kubectl.all(CONTENTS) if contents else []:
                if one["metadata"]["name"] in contents:
                    found.add(str(path(one, "status", "snapshotHandle")))
        return True

    bench.until("the cluster tells of volumes", look)
    return found


def _nodes(bench: Bench, selector: str) -> set[str]:
    """The nodes of pods that are about to go, where their volumes are. In the end all are asked."""
    pods = bench.until("the pods are listed", lambda: _pods(bench, selector))
    return {str(node) for one in pods if (node := path(one, "spec", "nodeName"))}


def _pods(bench: Bench, selector: str) -> list[Object]:
    return bench.kubectl.all("pods", bench.namespace, selector)


def _still_there(bench: Bench, node: str, handles: Container[str]) -> list[str]:
    """What a node holds of the bench's, by what it is called or by the claim it was made for.

    A volume whose making was interrupted can be there without a PersistentVolume.
    """
    held = bench.place.held(bench.kubectl, node) or {}
    start = f"{bench.namespace}/{bench.check}"
    return sorted(key for key, one in held.items() if key in handles or one.claim.startswith(start))


def _end(bench: Bench, kind: str, selector: str) -> None:
    """Delete objects, and wait until they are gone."""
    where = {"namespace": bench.namespace, "selector": selector}
    bench.persist(f"{kind} are deleted", lambda: bench.kubectl.delete(kind, **where))

    def left() -> list[str]:
        return [one["metadata"]["name"] for one in bench.kubectl.all(kind, **where)]

    _wait(bench, kind, left)


def _wait(bench: Bench, what: str, left: Callable[[], list[str]]) -> None:
    """Wait until nothing is left; raises Failed that names it."""
    last: list[str] = []

    def gone() -> bool | None:
        last[:] = left()
        return None if last else True

    try:
        bench.until(f"{what} go", gone)
    except Failed as error:
        raise Failed(f"{error}: {', '.join(last)}") from error
