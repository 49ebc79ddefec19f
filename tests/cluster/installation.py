"""The Carver that a cluster has: its driver, its nodes, its pods, and what it lacks for a check."""

import json
import os
import shutil
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.kubectl import (
    ATTRIBUTES,
    GROUP_CLASSES,
    GROUP_SNAPSHOTS,
    SNAPSHOTS,
    Kubectl,
    Object,
    Refused,
    path,
)

# lvm2 where the pod has the node's, by `lvm2: host` of the chart.
_HOST_LVM = "nsenter --target 1 --mount --uts --ipc -- lvm"
_GROUPS = "--feature-gates=CSIVolumeGroupSnapshot=true"
_DISTRIBUTED = "--enable-distributed-snapshotting"


class Unusable(Exception):
    """The checks cannot be run at all."""


@dataclass(frozen=True)
class Held:
    """A volume, as Carver tells of it: the claim, as namespace/name, and where it is mounted."""

    claim: str
    places: tuple[str, ...]


@dataclass(frozen=True)
class Installation:
    """What was found. `daemonsets` are Carver's; there are none where nodes run it by systemd.

    `controllers` are the Deployments that run `carver controller`: one, or none. `kinds` are those
    of VolumeAttributesClasses, snapshots and group snapshots that the API server knows.
    """

    driver: str
    server: str
    version: str
    nodes: tuple[str, ...]
    tolerations: tuple[Object, ...]
    daemonsets: tuple[Object, ...]
    controllers: tuple[Object, ...]
    kinds: frozenset[str]
    like: Object
    image: str
    inline: bool
    # Why snapshots cannot be made here; empty where they can.
    no_snapshots: str
    no_groups: str
    # Whether Carver's snapshotter is installed so that it makes group snapshots.
    groups: bool

    @property
    def is_encrypted(self) -> bool:
        """Whether the volumes of the StorageClass are encrypted."""
        return path(self.like, "parameters", "carver/encryption") is not None

    def pods(self, kubectl: Kubectl, *, controllers: bool = False) -> list[Object]:
        """Carver's pods on the nodes, or with those of the controller."""
        return _pods_of(kubectl, *self.daemonsets, *(self.controllers if controllers else ()))

    def controller_pods(self, kubectl: Kubectl) -> list[Object]:
        """The controllers' pods: none that is on its way out."""
        every = _pods_of(kubectl, *self.controllers)
        return [one for one in every if "deletionTimestamp" not in one["metadata"]]

    def pod_on(self, kubectl: Kubectl, node: str) -> Object | None:
        """Carver's pod on a node: not one that is on its way out."""
        for one in self.pods(kubectl):
            if path(one, "spec", "nodeName") == node and "deletionTimestamp" not in one["metadata"]:
                return one
        return None

    def held(self, kubectl: Kubectl, node: str) -> dict[str, Held] | None:
        """What Carver says that a node holds: volumes and snapshots, by their ids.

        None where it cannot be asked: by systemd, or not ready.
        """
        if (pod := self.pod_on(kubectl, node)) is None:
            return None
        try:
            found = json.loads(inside(kubectl, pod, "carver", "status", "--json"))
        except (Refused, json.JSONDecodeError):
            return None
        volumes = {
            one["id"]: Held(one["claim"], tuple(it["path"] for it in one["places"]))
            for one in found["volumes"]
        }
        return volumes | {one["id"]: Held("", ()) for one in found["snapshots"]}


def environment() -> None:
    """See that there is a kubectl and a KUBECONFIG; raises Unusable.

    kubectl's default, ~/.kube/config, is not taken: no cluster is met that was not named.
    """
    if shutil.which("kubectl") is None:
        raise Unusable("there is no kubectl on PATH")
    if not (named := os.environ.get("KUBECONFIG", "")):
        raise Unusable("KUBECONFIG is not set: let it name the file that says which cluster")
    if not any(Path(one).is_file() for one in named.split(os.pathsep) if one):
        raise Unusable(f"KUBECONFIG names no file that is there: {named}")


def reach(kubectl: Kubectl) -> tuple[str, str]:
    """The cluster's address and version; raises Unusable where it does not answer."""
    try:
        found = json.loads(kubectl("version", "--output=json", "--request-timeout=20s"))
        shown = kubectl("config", "view", "--minify", "--output=json")
    except Refused as error:
        text = f"the cluster that KUBECONFIG names does not answer: {error.text}"
        raise Unusable(text) from error
    server = path(json.loads(shown), "clusters", 0, "cluster", "server", default="")
    return str(server), str(path(found, "serverVersion", "gitVersion", default="unknown"))


def find(kubectl: Kubectl, driver: str, image: str = "", like: str | None = "") -> Installation:
    """Look at the cluster; raises Unusable, and Refused where looking is not allowed.

    Without an image it is Carver's own; with None for `like`, StorageClasses are of no account.
    """
    server, version = reach(kubectl)
    announced = kubectl.find("csidrivers.storage.k8s.io", driver)
    if announced is None:
        raise Unusable(f"there is no CSIDriver {driver} in the cluster: install Carver (--driver)")
    modes = path(announced, "spec", "volumeLifecycleModes", default=["Persistent"])
    nodes = _nodes(kubectl, driver)
    daemonsets = tuple(one for one in kubectl.all("daemonsets.apps") if _is_carver(one, driver))
    controllers = tuple(one for one in kubectl.all("deployments.apps") if _controls(one, driver))
    kinds = frozenset(
        kind
        for group in ("storage", "snapshot.storage", "groupsnapshot.storage")
        for kind in _kinds(kubectl, f"{group}.k8s.io")
    )
    no_snapshots = _no_snapshots(kubectl, kinds, daemonsets, controllers)
    if not image:
        if not daemonsets:
            raise Unusable(f"no DaemonSet serves {driver}, whose image pods could have: --image")
        image = container(daemonsets[0]["spec"]["template"]["spec"])["image"]
    return Installation(
        driver=driver,
        server=server,
        version=version,
        nodes=tuple(one["metadata"]["name"] for one in nodes),
        tolerations=tuple(_tolerations(nodes)),
        daemonsets=daemonsets,
        controllers=controllers,
        kinds=kinds & {ATTRIBUTES, SNAPSHOTS, GROUP_SNAPSHOTS, GROUP_CLASSES},
        like={} if like is None else _like(kubectl, driver, like),
        image=image,
        inline="Ephemeral" in modes,
        no_snapshots=no_snapshots,
        no_groups=no_snapshots or _no_groups(kinds),
        groups=_makes_groups(controllers),
    )


def _pods_of(kubectl: Kubectl, *owners: Object) -> list[Object]:
    """The pods of DaemonSets and Deployments."""
    found = []
    for one in owners:
        labels = one["spec"]["selector"]["matchLabels"].items()
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels))
        found += kubectl.all("pods", one["metadata"]["namespace"], selector)
    return found


def container(spec: Object) -> Object:
    """Carver's own container among its pod's."""
    own = [one for one in spec["containers"] if one["name"] == "carver"]
    return dict((own or spec["containers"])[0])


def inside(kubectl: Kubectl, pod: Object, *words: str) -> str:
    """What a command prints within Carver's container of its pod; raises Refused."""
    about = pod["metadata"]
    return kubectl.inside(about["namespace"], about["name"], container(pod["spec"])["name"], *words)


def lvm_of(pod: Object) -> str:
    """How lvm2 is called within Carver's pod; the node's own where that serves (`lvm2: host`)."""
    return _HOST_LVM if path(pod, "spec", "hostPID") else "lvm"


def _nodes(kubectl: Kubectl, driver: str) -> list[Object]:
    """The nodes where kubelet knows the driver and pods may start."""
    registered = {
        one["metadata"]["name"]
        for one in kubectl.all("csinodes.storage.k8s.io")
        if driver in {it["name"] for it in path(one, "spec", "drivers", default=[]) or []}
    }
    if not registered:
        raise Unusable(f"no kubelet has registered {driver}: see docs/troubleshooting.md")
    found = [one for one in kubectl.all("nodes") if one["metadata"]["name"] in registered]
    open_ones = [one for one in found if not path(one, "spec", "unschedulable")]
    if not open_ones:
        raise Unusable(f"every node with {driver} is cordoned: {', '.join(sorted(registered))}")
    return open_ones


def _tolerations(nodes: Iterable[Object]) -> list[Object]:
    """What Carver's nodes are kept for, pods of the checks may have: a control plane of one, say.

    Not Kubernetes' own taints: a node that is cordoned or in trouble shall turn them away.
    """
    taints = [taint for node in nodes for taint in path(node, "spec", "taints", default=[]) or []]
    kept = {
        (one["key"], one["effect"])
        for one in taints
        if not one["key"].startswith("node.kubernetes.io/")
    }
    return [{"key": key, "operator": "Exists", "effect": effect} for key, effect in sorted(kept)]


def _is_carver(daemonset: Object, driver: str) -> bool:
    """Whether its pods have the folder of the driver's socket, or a token for its controller."""
    volumes = path(daemonset, "spec", "template", "spec", "volumes", default=[]) or []
    places = [str(path(one, "hostPath", "path", default="")) for one in volumes]
    audiences = {
        path(source, "serviceAccountToken", "audience")
        for one in volumes
        for source in path(one, "projected", "sources", default=[]) or []
    }
    is_central = f"controller.{driver}" in audiences
    return is_central or any(place.rstrip("/").endswith(f"/plugins/{driver}") for place in places)


def _controls(deployment: Object, driver: str) -> bool:
    """Whether its pods run the driver's `carver controller`."""
    return any(
        "controller" in [*one.get("command", ()), *one.get("args", ())]
        and {"name": "CARVER_DRIVER_NAME", "value": driver} in one.get("env", ())
        for one in deployment["spec"]["template"]["spec"]["containers"]
    )


def _kinds(kubectl: Kubectl, group: str) -> list[str]:
    """The kinds of a group of the API's, of version v1."""
    try:
        found = json.loads(kubectl("get", f"--raw=/apis/{group}/v1"))
    except Refused as error:
        if error.passing or error.reason not in {"", "NotFound"}:
            raise
        return []
    return [f"{one['name']}.{group}" for one in found.get("resources", [])]


def _like(kubectl: Kubectl, driver: str, name: str) -> Object:
    """The StorageClass whose parameters the checks use; nothing at all where there is none."""
    found = {
        one["metadata"]["name"]: one
        for one in kubectl.all("storageclasses.storage.k8s.io")
        if one["provisioner"] == driver and not one["metadata"]["name"].startswith("carver-checks-")
    }
    if name and name not in found:
        there = ", ".join(sorted(found)) or "none"
        raise Unusable(f"{name} is no StorageClass of {driver}; there is: {there}")
    if not name and len(found) > 1:
        raise Unusable(f"say with --like which StorageClass is meant: {', '.join(sorted(found))}")
    return found[name] if name else next(iter(found.values()), {})


def _no_snapshots(
    kubectl: Kubectl,
    kinds: Container[str],
    daemonsets: Sequence[Object],
    controllers: Sequence[Object],
) -> str:
    """Why no snapshot can be made, as far as it can be seen beforehand."""
    if SNAPSHOTS not in kinds:
        return "the cluster has no CRDs of snapshot.storage.k8s.io/v1"
    images = {
        one["image"]
        for it in (*daemonsets, *controllers)
        for one in it["spec"]["template"]["spec"]["containers"]
    }
    if daemonsets and not any("snapshotter" in image for image in images):
        return "Carver runs without external-snapshotter (sidecars.snapshotter.enabled)"
    return _no_nodes_for_controller(kubectl)


def _no_groups(kinds: Container[str]) -> str:
    """Why no group snapshot can be made, as far as it can be seen beforehand."""
    if GROUP_SNAPSHOTS not in kinds:
        return "the cluster has no CRDs of groupsnapshot.storage.k8s.io/v1"
    return ""


def _makes_groups(controllers: Sequence[Object]) -> bool:
    containers = [one for it in controllers for one in it["spec"]["template"]["spec"]["containers"]]
    return any(_GROUPS in one.get("args", ()) for one in containers)


def _no_nodes_for_controller(kubectl: Kubectl) -> str:
    """Which distributed snapshot-controller may not list nodes: it serves no driver then."""
    for one in kubectl.all("deployments.apps"):
        spec = one["spec"]["template"]["spec"]
        words = [
            word
            for container in spec["containers"]
            if "snapshot-controller" in container["image"].rpartition("/")[2]
            for word in [*container.get("command", ()), *container.get("args", ())]
        ]
        if not {_DISTRIBUTED, f"{_DISTRIBUTED}=true"} & set(words):
            continue
        about = one["metadata"]
        account = spec.get("serviceAccountName", "default")
        controller = f"the snapshot-controller {about['namespace']}/{about['name']}"
        for verb in ("get", "list", "watch"):
            if not kubectl.may(verb, "nodes", about["namespace"], account):
                return f"{controller} may not {verb} nodes (docs/install.md)"
    return ""
