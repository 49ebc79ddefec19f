"""What a file of Kubernetes' objects says: read as kubelet and Carver would, and checked."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from agent.cli import main as cli
from agent.settings import settings

# The newest that the schemas' package knows is what the sidecars' newest releases are made for.
KUBERNETES_VERSION = "1.37"

Object = dict[str, Any]


# libyaml's, if it is there, takes a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def objects(path: Path) -> list[Object]:
    """Read once, as that takes long, and made anew for each caller, who may change them."""
    read: list[Object] = json.loads(_as_json(path.read_text()))
    return read


@cache
def _as_json(text: str) -> str:
    return json.dumps([one for one in yaml.load_all(text, _LOADER) if one])


def of_kind(path: Path, kind: str) -> list[Object]:
    return [one for one in objects(path) if one["kind"] == kind]


def the(path: Path, kind: str) -> Object:
    [found] = of_kind(path, kind)
    return found


def names(path: Path, kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in of_kind(path, kind)}


def pod_specs(path: Path) -> Iterator[Object]:
    for one in objects(path):
        if one["kind"] in {"DaemonSet", "Deployment", "StatefulSet"}:
            yield one["spec"]["template"]["spec"]
        elif one["kind"] == "Pod":
            yield one["spec"]


def containers(path: Path) -> list[Object]:
    return [one for pod in pod_specs(path) for one in pod["containers"]]


def container(path: Path, name: str) -> Object:
    [found] = [one for one in containers(path) if one["name"] == name]
    return found


def node_pod(path: Path) -> Object:
    """The pod of the only DaemonSet."""
    return dict(the(path, "DaemonSet")["spec"]["template"]["spec"])


def host_paths(pod: Mapping[str, Any]) -> dict[str, str]:
    """Where the host's folders are: the volume's name, the path."""
    return {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}


def mounts(one: Mapping[str, Any]) -> dict[str, Object]:
    return {mount["mountPath"]: mount for mount in one["volumeMounts"]}


def configurations(path: Path, tmp_path: Path) -> Iterator[tuple[Object, settings.Config]]:
    """Each DaemonSet's pod, and what Carver makes of its ConfigMap, arguments and environment."""
    files = {one["metadata"]["name"]: one["data"] for one in of_kind(path, "ConfigMap")}
    for daemon_set in of_kind(path, "DaemonSet"):
        pod = daemon_set["spec"]["template"]["spec"]
        [one] = [one for one in pod["containers"] if one["name"] == "carver"]
        [name] = [one["configMap"]["name"] for one in pod["volumes"] if one["name"] == "config"]
        file = tmp_path / f"{name}.toml"
        file.write_text(files[name]["config.toml"])
        arguments = cli.parser().parse_args([*one["args"], "--config", str(file)])
        environment = {one["name"]: one.get("value", "node-1") for one in one["env"]}
        yield pod, settings.load(arguments, environment)


_STRANGERS = (
    "snapshot.storage.k8s.io",
    "monitoring.coreos.com",
    "cbt.storage.k8s.io",
    "security.openshift.io",
)


def check_schemas(path: Path) -> None:
    """Every object that Kubernetes itself knows is as its schema says."""
    for one in objects(path):
        group = one["apiVersion"].partition("/")[0]
        if not group.endswith(_STRANGERS):
            kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)


# Flags of the sidecars: cmd/*/*.go of each repository at the release that is pinned, and
# kubernetes-csi/csi-lib-utils standardflags and k8s.io/component-base logs/api/v1, which all have.
_TEXT, _TRUTH, _NUMBER, _DURATION = r".+", r"true|false", r"-?[0-9.]+", r"([0-9.]+(ms|s|m|h))+|0"


def _flags(text: str = "", truth: str = "", number: str = "", duration: str = "") -> dict[str, str]:
    kinds = ((text, _TEXT), (truth, _TRUTH), (number, _NUMBER), (duration, _DURATION))
    return {name: value for listed, value in kinds for name in listed.split()}


_COMMON = _flags(
    text="csi-address feature-gates http-endpoint kubeconfig leader-election-labels"
    " leader-election-namespace logging-format metrics-address metrics-path vmodule",
    truth="automaxprocs leader-election version",
    number="kube-api-burst kube-api-qps v",
    duration="leader-election-lease-duration leader-election-renew-deadline"
    " leader-election-retry-period log-flush-frequency retry-interval-max retry-interval-start"
    " timeout",
)
FLAGS: Mapping[str, Mapping[str, str]] = {
    # kubernetes-csi/external-provisioner, v6.4.0
    "provisioner": _COMMON
    | _flags(
        text="default-fstype master volume-name-prefix",
        truth="capacity-for-immediate-binding controller-publish-readonly enable-capacity"
        " enable-pprof extra-create-metadata immediate-topology node-deployment"
        " node-deployment-immediate-binding prevent-volume-mode-conversion strict-topology",
        number="capacity-ownerref-level capacity-threads cloning-protection-threads"
        " kube-api-capacity-burst kube-api-capacity-qps volume-name-uuid-length worker-threads",
        duration="capacity-poll-interval node-deployment-base-delay node-deployment-max-delay"
        " snapshot-orphan-sweep-interval",
    ),
    # kubernetes-csi/external-resizer, v2.3.0
    "resizer": _COMMON
    | _flags(
        text="master",
        truth="extra-modify-metadata handle-volume-inuse-error",
        number="workers",
        duration="modify-timeout resize-timeout resync-period",
    ),
    # kubernetes-csi/external-snapshotter, v8.7.0
    "snapshotter": _COMMON
    | _flags(
        text="groupsnapshot-name-prefix snapshot-name-prefix",
        truth="extra-create-metadata node-deployment",
        number="groupsnapshot-name-uuid-length snapshot-name-uuid-length worker-threads",
        duration="resync-period",
    ),
    # kubernetes-csi/external-attacher, v4.13.0
    "attacher": _COMMON
    | _flags(
        text="default-fstype",
        number="max-entries max-grpc-log-length worker-threads",
        duration="reconcile-sync resync",
    ),
    # kubernetes-csi/external-snapshot-metadata, v1.1.0, which has few of the others' in common
    "snapshot-metadata": _flags(
        text="audience csi-address http-endpoint kubeconfig metrics-path tls-cert tls-key",
        truth="disable-metrics version",
        number="kube-api-burst kube-api-qps max-streaming-duration-min port v",
        duration="timeout",
    ),
}
# pkg/features/features.go of each.
GATES: Mapping[str, set[str]] = {
    "attacher": {"MutableCSINodeAllocatableCount"},
    "provisioner": {"CrossNamespaceVolumeDataSource", "Topology", "VolumeAttributesClass"},
    "resizer": {"AnnotateFsResize", "VolumeAttributesClass"},
    "snapshotter": {"CSIVolumeGroupSnapshot"},
}


def controller(path: Path) -> settings.Config:
    """What `carver controller` makes of its container's arguments and environment."""
    one = container(path, "controller")
    arguments = cli.parser().parse_args([*one["args"], "--config", os.devnull])
    return settings.load(arguments, {one["name"]: one["value"] for one in one["env"]})


def is_central(path: Path) -> bool:
    """Whether one controller serves the whole cluster."""
    return any(one["name"] == "controller" for one in containers(path))


# Carver's own containers.
OWN = {"carver", "controller"}


def flags(one: Mapping[str, Any]) -> dict[str, str]:
    """A sidecar's arguments, each as it is at last."""
    pairs = (word.removeprefix("--").partition("=") for word in one["args"])
    return {name: value if equals else "true" for name, equals, value in pairs}


def check_pods(path: Path) -> None:
    """Sidecars have the flags that they are given; volumes and mounts fit together."""
    for pod in pod_specs(path):
        mounted, paths = [one["volumeMounts"] for one in pod["containers"]], host_paths(pod)
        mounts_of_pod = [mount for one in mounted for mount in one]
        assert {one["name"] for one in mounts_of_pod} == {one["name"] for one in pod["volumes"]}
        # A folder of the host has the same path in every container, but what lvm2 has as /etc/lvm.
        for mount in mounts_of_pod:
            same = paths.get(mount["name"], mount["mountPath"]) == mount["mountPath"]
            assert same or mount["mountPath"] == "/etc/lvm"
    for one in containers(path):
        if one["name"] not in OWN:
            check_flags(one)


def check_flags(one: Mapping[str, Any]) -> None:
    """Each of a sidecar's arguments is a flag that it has, with a value of its kind."""
    known = FLAGS[one["name"]]
    for word in one["args"]:
        assert word.startswith("--"), word
    for name, value in flags(one).items():
        assert name in known, f"{one['name']} has no --{name}"
        assert re.fullmatch(known[name], value), f"--{name}={value}"
        if name == "feature-gates":
            gates = dict(gate.split("=") for gate in value.split(","))
            assert gates.keys() <= GATES[one["name"]] | {"ReleaseLeaderElectionOnExit"}
            assert set(gates.values()) <= {"true", "false"}
