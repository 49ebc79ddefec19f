"""The API server of a cluster in memory, as far as the controller asks it about claims."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from callers.objects import NAMESPACE, Claim, PersistentVolume, Pod, Snapshot

from agent.core import errors
from agent.extras.kubernetes.objects import Listing, Lists, Object, Objects
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY

if TYPE_CHECKING:
    from callers.cluster import Cluster

_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_SNAPSHOTS = "snapshot.storage.k8s.io"


class Api:
    """Shows the cluster's objects as they are by now. `asked` are the paths of all requests."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.asked: list[str] = []
        # Whether it answers, and whether it refuses all, as without a right.
        self.is_up, self.refuses = True, False

    @property
    def objects(self) -> Objects:
        return _Objects(self)

    @property
    def lists(self) -> Lists:
        return _Lists(self)

    def find(self, path: str, kind: str) -> Object | None:
        self._ask(path)
        found = dict(self._named(path.split("/")[-2]))
        made = found.get(path.rpartition("/")[2])
        return None if made is None else {"kind": kind, **made}

    def whole(self, path: str, query: Mapping[str, str]) -> Listing:
        self._ask(path)
        items = [made for _, made in self._named(path.rpartition("/")[2])]
        if field := query.get("fieldSelector"):
            where, _, value = field.partition("=")
            section, _, key = where.partition(".")
            items = [one for one in items if one[section][key] == value]
        return Listing(items, "1")

    def _ask(self, path: str) -> None:
        self.asked.append(path)
        if not self.is_up:
            raise errors.ClusterSilent(path, "it is down")
        if self.refuses:
            raise errors.ClusterSilent(path, "it answers 403", is_refusal=True)

    def _named(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """All objects of a kind, by name."""
        cluster = self._cluster
        if kind == "nodes":
            # Each cluster has a Node, if only for the API server.
            yield "control-plane", {"metadata": _about("control-plane")}
            yield from ((one, _node(one)) for one in cluster.nodes)
        elif kind == "pods":
            yield from ((one.name, _pod(one)) for one in cluster.pods)
        elif kind == "persistentvolumeclaims":
            yield from ((one.name, _claim(one)) for one in cluster.claims)
        elif kind == "persistentvolumes":
            bound = [(one, one.volume) for one in cluster.claims if one.volume is not None]
            yield from ((volume.name, _volume(volume, one)) for one, volume in bound)
        elif kind == "volumesnapshots":
            yield from ((one.name, _snapshot(one)) for one in cluster.snapshots)
        elif kind == "volumesnapshotcontents":
            yield from ((f"content-{one.name}", _content(one)) for one in cluster.snapshots)
        else:
            raise AssertionError(kind)


class _Objects(Objects):
    def __init__(self, api: Api) -> None:
        self._api = api

    def find(self, path: str, kind: str) -> Object | None:
        return self._api.find(path, kind)


class _Lists(Lists):
    def __init__(self, api: Api) -> None:
        self._api = api

    def whole(self, path: str, kind: str, **query: Any) -> Listing:
        return self._api.whole(path, query)

    def metadata(self, path: str, **query: str) -> Listing:
        return self._api.whole(path, query)


def _about(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "uid": f"uid-{name}", "namespace": NAMESPACE, **more}


def _node(name: str) -> dict[str, Any]:
    return {"metadata": _about(name, labels={TOPOLOGY_KEY: name})}


def _pod(one: Pod) -> dict[str, Any]:
    volumes = [
        {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim.name}}
        for number, claim in enumerate(one.claims)
    ]
    deleted = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if one.is_deleted else {}
    return {
        "metadata": _about(one.name, **deleted),
        "spec": {"nodeName": one.node, "volumes": volumes},
        "status": {"phase": "Running" if one.is_running else "Pending"},
    }


def _claim(one: Claim) -> dict[str, Any]:
    spec: dict[str, Any] = {"storageClassName": one.storage_class}
    if one.volume is not None:
        spec["volumeName"] = one.volume.name
    if isinstance(one.source, Claim):
        spec["dataSourceRef"] = {"kind": "PersistentVolumeClaim", "name": one.source.name}
    elif isinstance(one.source, Snapshot):
        kind = {"apiGroup": _SNAPSHOTS, "kind": "VolumeSnapshot"}
        spec["dataSourceRef"] = {**kind, "name": one.source.name}
    chosen = {_SELECTED_NODE: one.selected_node} if one.selected_node else {}
    return {"metadata": _about(one.name, annotations=chosen), "spec": spec}


def _volume(one: PersistentVolume, claim: Claim) -> dict[str, Any]:
    term = {"key": TOPOLOGY_KEY, "operator": "In", "values": [one.node]}
    terms = [{"matchExpressions": [term]}]
    return {
        "metadata": _about(one.name),
        "spec": {
            "claimRef": {"namespace": NAMESPACE, "name": claim.name},
            "csi": {"driver": DRIVER_NAME, "volumeHandle": one.id},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        },
    }


def _snapshot(one: Snapshot) -> dict[str, Any]:
    return {
        "metadata": _about(one.name),
        "spec": {"source": {"persistentVolumeClaimName": one.claim.name}},
        "status": {"boundVolumeSnapshotContentName": f"content-{one.name}"} if one.id else {},
    }


def _content(one: Snapshot) -> dict[str, Any]:
    return {
        "metadata": _about(f"content-{one.name}"),
        "spec": {
            "driver": DRIVER_NAME,
            "source": {},
            "volumeSnapshotRef": {"namespace": NAMESPACE, "name": one.name},
        },
        "status": {"snapshotHandle": one.id} if one.id else {},
    }
