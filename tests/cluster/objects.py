"""What the checks make in a cluster, as kubectl takes it. All of it bears the label of its run."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.kubectl import Object

# Objects of a run and of a check; a node that a run has cordoned.
RUN, CHECK, CORDONED = "carver-checks/run", "carver-checks/check", "carver-checks/cordoned-by"
# The taint of a node that Carver has been taken from; its value is the run.
WITHOUT_CARVER = "carver-checks/without-carver"
PREFIX = "carver-checks-"
# The claim template of a StatefulSet. The claim of a pod is called TEMPLATE-POD.
TEMPLATE = "data"
# Where a pod finds its volume.
PLACE, DEVICE = "/data", "/dev/carver"
# A user that owns nothing: what it can write was given to it by fsGroup.
_USER = 1000
# A service account that is given nothing.
NOBODY = f"{PREFIX}nobody"
IDLE = "while :; do sleep 3600; done"


_VERSIONS = {
    **dict.fromkeys(("Namespace", "PersistentVolumeClaim", "Pod"), "v1"),
    **dict.fromkeys(
        ("VolumeSnapshot", "VolumeSnapshotClass", "VolumeSnapshotContent"),
        "snapshot.storage.k8s.io/v1",
    ),
    **dict.fromkeys(
        ("VolumeGroupSnapshot", "VolumeGroupSnapshotClass"), "groupsnapshot.storage.k8s.io/v1"
    ),
    **dict.fromkeys(("StorageClass", "VolumeAttributesClass"), "storage.k8s.io/v1"),
    **dict.fromkeys(("Deployment", "StatefulSet"), "apps/v1"),
}


def _object(kind: str, metadata: Object, **fields: Any) -> Object:
    return {"apiVersion": _VERSIONS[kind], "kind": kind, "metadata": metadata, **fields}


def named(run: str) -> str:
    """What the namespace of a run and its classes are called."""
    return PREFIX + run


def namespace(run: str) -> Object:
    """Where all but the classes are. A raw block device is its pod's root's: no lesser level."""
    labels = {RUN: run, "pod-security.kubernetes.io/enforce": "privileged"}
    return _object("Namespace", {"name": named(run), "labels": labels})


def storage_class(run: str, driver: str, like: Object) -> Object:
    """A class that waits for the pod and may grow, with another's parameters and options."""
    return _object(
        "StorageClass",
        {"name": named(run), "labels": {RUN: run}},
        provisioner=driver,
        volumeBindingMode="WaitForFirstConsumer",
        allowVolumeExpansion=True,
        reclaimPolicy="Delete",
        **{key: like[key] for key in ("parameters", "mountOptions") if like.get(key)},
    )


def snapshot_class(run: str, driver: str) -> Object:
    """A class whose snapshots go with their objects."""
    about = {"name": named(run), "labels": {RUN: run}}
    return _object("VolumeSnapshotClass", about, driver=driver, deletionPolicy="Delete")


def _of_cluster(run: str, check: str, name: str) -> Object:
    """What is in no namespace has its run's name, too."""
    return {"name": f"{named(run)}-{name}", "labels": {RUN: run, CHECK: check}}


def attributes_class(
    run: str, check: str, name: str, driver: str, parameters: Mapping[str, str]
) -> Object:
    about = _of_cluster(run, check, name)
    fields = {"driverName": driver, "parameters": dict(parameters)}
    return _object("VolumeAttributesClass", about, **fields)


def group_snapshot_class(run: str, check: str, driver: str) -> Object:
    about = _of_cluster(run, check, "group")
    return _object("VolumeGroupSnapshotClass", about, driver=driver, deletionPolicy="Delete")


def group_snapshot(run: str, check: str, name: str) -> Object:
    """A group snapshot of all claims of the check."""
    spec = {
        "volumeGroupSnapshotClassName": _of_cluster(run, check, "group")["name"],
        "source": {"selector": {"matchLabels": {RUN: run, CHECK: check}}},
    }
    return _object("VolumeGroupSnapshot", _metadata(run, check, name), spec=spec)


def snapshot_content(
    run: str, check: str, name: str, driver: str, handle: str, snapshot_name: str
) -> Object:
    """The content of a snapshot that is there already, which is kept when its object goes."""
    spec = {
        "driver": driver,
        "deletionPolicy": "Retain",
        "source": {"snapshotHandle": handle},
        "sourceVolumeMode": "Filesystem",
        "volumeSnapshotRef": {"namespace": named(run), "name": snapshot_name},
    }
    return _object("VolumeSnapshotContent", _of_cluster(run, check, name), spec=spec)


def _metadata(run: str, check: str, name: str) -> Object:
    return {"name": name, "namespace": named(run), "labels": {RUN: run, CHECK: check}}


def claim(
    run: str,
    check: str,
    name: str,
    size: str,
    *,
    block: bool = False,
    mode: str = "ReadWriteOnce",
    source: Mapping[str, str] | None = None,
    attributes: str = "",
) -> Object:
    """A claim; `source` is a claim or a snapshot that it begins with, as dataSource has it.

    `attributes` is a VolumeAttributesClass.
    """
    spec = {
        "storageClassName": named(run),
        "volumeMode": "Block" if block else "Filesystem",
        "accessModes": [mode],
        "resources": {"requests": {"storage": size}},
        **({"dataSource": dict(source)} if source else {}),
        **({"volumeAttributesClassName": attributes} if attributes else {}),
    }
    return _object("PersistentVolumeClaim", _metadata(run, check, name), spec=spec)


def of_claim(name: str, *, read_only: bool = False) -> Object:
    source = {"claimName": name, **({"readOnly": True} if read_only else {})}
    return {"name": "data", "persistentVolumeClaim": source}


def inline(driver: str, size: str) -> Object:
    """A pod's volume that lives as long as the pod."""
    return {"name": "data", "csi": {"driver": driver, "volumeAttributes": {"size": size}}}


def affinity(terms: Sequence[Any]) -> Object:
    """Only nodes of one of the terms, which are those of a PersistentVolume's nodeAffinity."""
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
    return {"nodeAffinity": required}


def on_nodes(names: Sequence[str]) -> list[Object]:
    """The terms that mean any of the nodes, by their names."""
    field = {"key": "metadata.name", "operator": "In"}
    # A term with fields takes one name only: kubernetes/pkg/apis/core/validation.
    return [{"matchFields": [{**field, "values": [name]}]} for name in names]


def pod_spec(
    image: str,
    volume: Object,
    tolerations: Sequence[Object],
    *,
    block: bool = False,
    terms: Sequence[Any] = (),
    script: str = IDLE,
) -> Object:
    """One container with a shell, of an ordinary user; of root for a device, which is root's."""
    user = {"runAsUser": 0} if block else {"runAsUser": _USER, "runAsNonRoot": True}
    mount = {"name": "data", "devicePath" if block else "mountPath": DEVICE if block else PLACE}
    return {
        # A writer that fails shall stay where it is.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            **user,
            **({} if block else {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "main",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", script],
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeDevices" if block else "volumeMounts": [mount],
            }
        ],
        "volumes": [volume],
        **({"tolerations": [*tolerations]} if tolerations else {}),
        **({"affinity": affinity(terms)} if terms else {}),
    }


def pod(run: str, check: str, name: str, spec: Object) -> Object:
    return _object("Pod", _metadata(run, check, name), spec=spec)


def deployment(run: str, check: str, name: str, spec: Object) -> Object:
    """A pod that is made anew where it is evicted, once the old one is gone."""
    labels = {RUN: run, CHECK: check}
    template = {"metadata": {"labels": labels}, "spec": {**spec, "restartPolicy": "Always"}}
    of_pods = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": template,
    }
    return _object("Deployment", _metadata(run, check, name), spec=of_pods)


def stateful_set(
    run: str,
    check: str,
    name: str,
    spec: Object,
    *,
    count: int,
    size: str,
    is_spread: bool = False,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """Pods with a claim each, which are all made at once, and anew where they are evicted.

    With `is_spread` no node has two of the pods. `annotations` are those of the claims.
    """
    labels = {RUN: run, CHECK: check}
    template = {"metadata": {"labels": labels}, "spec": {**spec, "restartPolicy": "Always"}}
    template["spec"].pop("volumes")
    if is_spread:
        term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
        apart = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        template["spec"]["affinity"] = {"podAntiAffinity": apart}
    of_claims = claim(run, check, TEMPLATE, size)
    about = {"name": TEMPLATE, "labels": labels, "annotations": dict(annotations or {})}
    return _object(
        "StatefulSet",
        _metadata(run, check, name),
        spec={
            "replicas": count,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": template,
            "volumeClaimTemplates": [{"metadata": about, "spec": of_claims["spec"]}],
        },
    )


def snapshot(run: str, check: str, name: str, claim_name: str = "", content: str = "") -> Object:
    """A snapshot of a claim, or one of a content that is there."""
    source = {"persistentVolumeClaimName": claim_name}
    if content:
        source = {"volumeSnapshotContentName": content}
    spec = {"volumeSnapshotClassName": named(run), "source": source}
    return _object("VolumeSnapshot", _metadata(run, check, name), spec=spec)
