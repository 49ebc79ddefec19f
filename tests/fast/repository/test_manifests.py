"""What is committed in deploy/kubernetes is valid, whole, and no more than Carver needs.

Whether it is what the chart renders is seen by `deploy/render.py --check`, which needs helm.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import configured
import kubernetes_validate
import manifest
import pytest
import serving
from fakes.host import FakeHost
from manifest import (
    KUBERNETES_VERSION,
    container,
    containers,
    host_paths,
    mounts,
    names,
    node_pod,
    objects,
    of_kind,
    pod_specs,
    the,
)

from agent.core import settings
from agent.core.requests import ModifyVolume
from proto import csi_pb2 as csi

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
VALUES = ROOT / "deploy" / "helm" / "values"
SETS = sorted(KUBERNETES.glob("*.yaml"))
EXAMPLES = sorted((KUBERNETES / "examples").glob("*.yaml"))

every_set = pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
every_file = pytest.mark.parametrize("path", [*SETS, *EXAMPLES], ids=lambda path: path.stem)


def accepted(path: Path, tmp_path: Path) -> settings.Config:
    """What Carver reads from the ConfigMap, the container's arguments and its environment."""
    [(_, loaded)] = manifest.configurations(path, tmp_path)
    return loaded


# Schemas


@every_file
def test_every_object_is_as_its_schema_says(path: Path) -> None:
    manifest.check_schemas(path)
    # kubernetes-csi/external-snapshotter, client/config/crd, v8.7.0
    fields = {
        "VolumeSnapshotClass": {"driver", "deletionPolicy", "parameters"},
        "VolumeSnapshot": {"spec"},
        "VolumeGroupSnapshot": {"spec"},
    }
    sources = {
        "VolumeSnapshot": {"volumeSnapshotClassName": "persistentVolumeClaimName"},
        "VolumeGroupSnapshot": {"volumeGroupSnapshotClassName": "selector"},
    }
    for one in objects(path):
        if one["kind"] in fields:
            group = "groupsnapshot" if one["kind"] == "VolumeGroupSnapshot" else "snapshot"
            assert one["apiVersion"] == f"{group}.storage.k8s.io/v1"
            assert one.keys() - {"apiVersion", "kind", "metadata"} <= fields[one["kind"]]
        if one["kind"] in sources:
            [(of_class, source)] = sources[one["kind"]].items()
            assert one["spec"].keys() <= {of_class, "source"}
            assert one["spec"]["source"].keys() == {source}


@every_set
def test_snapshots_have_a_class_where_they_have_a_sidecar_and_groups_are_off(path: Path) -> None:
    has_sidecar = "snapshotter" in {one["name"] for one in containers(path)}
    classes = of_kind(path, "VolumeSnapshotClass")
    assert has_sidecar is bool(classes) is (path.stem != "kind")
    assert "groupsnapshot.storage.k8s.io" not in path.read_text()
    for one in classes:
        assert (one["driver"], one["deletionPolicy"]) == (settings.DRIVER_NAME, "Delete")
        flags = manifest.flags(container(path, "snapshotter"))
        assert flags["node-deployment"] == "true"
        # The snapshotter has had them on by default since 8.7.
        assert flags["feature-gates"] == "CSIVolumeGroupSnapshot=false"


def test_the_schemas_refuse_an_unknown_field() -> None:
    driver = the(SETS[0], "CSIDriver")
    driver["spec"]["storageCapacities"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(driver, KUBERNETES_VERSION, strict=True)


def test_there_is_a_manifest_for_each_set_of_values_and_no_other() -> None:
    assert [path.name for path in SETS] == sorted(path.name for path in VALUES.glob("*.yaml"))


# Carver itself


@every_set
def test_carver_accepts_its_configuration(path: Path, tmp_path: Path) -> None:
    loaded = accepted(path, tmp_path)
    assert loaded.node_id == "node-1"
    assert loaded.endpoint == settings.DEFAULT_SOCKET
    assert loaded.device_class("") is not None
    assert not loaded.controller_expand
    own = container(path, "carver")
    assert str(settings.DEFAULT_FILE.parent) in mounts(own)
    [variable] = own["env"]
    assert variable["name"] == "CARVER_NODE_ID"
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


@every_set
def test_each_set_runs_the_lvm2_that_it_is_named_for(path: Path, tmp_path: Path) -> None:
    on_host, pod = accepted(path, tmp_path).lvm == "host", node_pod(path)
    assert on_host == (path.stem == "host-lvm2")
    assert pod.get("hostPID", False) == on_host
    # lvm2's locks and configuration are the host's either way.
    assert ("/run/lock/lvm" in host_paths(pod).values()) != on_host
    # Where it waits for udev it shares the host's semaphores.
    sees_udev = "/run/udev" in host_paths(pod).values()
    assert sees_udev == bool(pod.get("hostIPC") or pod.get("hostPID"))


# Mounts


@every_set
def test_what_carver_mounts_is_seen_by_kubelet(path: Path) -> None:
    one = container(path, "carver")
    passed_on = {
        place: mount["mountPropagation"]
        for place, mount in mounts(one).items()
        if "mountPropagation" in mount
    }
    shared = ("/var/lib/kubelet/plugins", "/var/lib/kubelet/pods")
    assert passed_on == dict.fromkeys(shared, "Bidirectional")
    assert one["securityContext"]["privileged"]
    # A directory that is not kubelet's keeps the pod from starting.
    volumes = {one["name"]: one for one in node_pod(path)["volumes"]}
    for name in ("plugins", "pods", "registry"):
        assert volumes[name]["hostPath"]["type"] == "Directory"


@every_set
def test_the_sidecars_talk_to_the_socket_that_carver_serves(path: Path, tmp_path: Path) -> None:
    endpoint = accepted(path, tmp_path).endpoint
    for name in ("provisioner", "resizer"):
        one = container(path, name)
        assert f"--csi-address={endpoint}" in one["args"]
        assert str(endpoint.parent) in mounts(one)


@every_set
def test_pods_are_as_their_sidecars_and_volumes_need_them(path: Path) -> None:
    manifest.check_pods(path)


# Sidecars


@every_set
def test_the_provisioner_serves_its_own_node(path: Path) -> None:
    """Also immediate binding; and a node's capacity goes with its pod."""
    one = container(path, "provisioner")
    wanted = {
        "node-deployment-immediate-binding": "true",
        "strict-topology": "true",
        "immediate-topology": "false",
        "capacity-ownerref-level": "0",
    }
    assert wanted.items() <= manifest.flags(one).items()
    assert "POD_NAME" in {variable["name"] for variable in one["env"]}


@every_set
def test_pods_run_only_where_they_can_work(path: Path) -> None:
    node, controller = the(path, "DaemonSet"), the(path, "Deployment")
    labels = node["spec"]["template"]["metadata"]["labels"]
    pod = controller["spec"]["template"]["spec"]
    [term] = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "node"
    assert [one.get("tolerations") for one in pod_specs(path)] == [None, None]
    affinity = node_pod(path)["affinity"]["nodeAffinity"]
    [expressions] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    processors = {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]}
    assert expressions == {"matchExpressions": [processors]}
    for one in (node, controller):
        made = one["spec"]["template"]["metadata"]["labels"].items()
        assert one["spec"]["selector"]["matchLabels"].items() <= made


# References


@every_set
def test_every_object_that_is_named_is_there(path: Path) -> None:
    for pod in pod_specs(path):
        assert pod["serviceAccountName"] in names(path, "ServiceAccount")
        # Kubernetes has these two of its own.
        assert pod["priorityClassName"] in {"system-node-critical", "system-cluster-critical"}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in names(path, "ConfigMap")
    for kind in ("ClusterRole", "Role"):
        bindings = of_kind(path, f"{kind}Binding")
        assert {one["roleRef"]["name"] for one in bindings} == names(path, kind)
        for one in bindings:
            assert one["roleRef"]["kind"] == kind
            for subject in one["subjects"]:
                assert subject["name"] in names(path, "ServiceAccount")
                assert subject["namespace"] in names(path, "Namespace")


@every_set
def test_everything_that_has_a_namespace_is_in_carver_s(path: Path) -> None:
    [namespace] = names(path, "Namespace")
    cluster_wide = {"Namespace", "CSIDriver", "StorageClass", "ClusterRole", "ClusterRoleBinding"}
    cluster_wide |= {"VolumeSnapshotClass"}
    for one in objects(path):
        assert (one["kind"] in cluster_wide) != (one["metadata"].get("namespace") == namespace)


@every_set
def test_the_probes_ask_where_carver_answers(path: Path, tmp_path: Path) -> None:
    address = accepted(path, tmp_path).metrics_address
    assert address is not None
    [port] = container(path, "carver")["ports"]
    assert (port["name"], port["containerPort"]) == ("metrics", address.port)
    for one in containers(path):
        probes = {key: one[key]["httpGet"] for key in one if key.endswith("Probe")}
        ports = {port["name"] for port in one.get("ports", [])}
        assert {probe["port"] for probe in probes.values()} <= ports
        if one["name"] == "carver":
            assert {key: probe["path"] for key, probe in probes.items()} == {
                "startupProbe": "/healthz",
                "livenessProbe": "/healthz",
                "readinessProbe": "/readyz",
            }


@every_set
def test_the_service_has_room_for_each_storage_class_s_parameters(
    path: Path, tmp_path: Path
) -> None:
    wanted, host = accepted(path, tmp_path), FakeHost(tmp_path)
    for group in wanted.groups:
        host.lvm2.add_group(group, [200])
    own = configured.carver(tmp_path, classes=wanted.classes)
    with serving.served(host, own) as (_, client):
        for one in of_kind(path, "StorageClass"):
            assert one["provisioner"] == settings.DRIVER_NAME
            assert one["volumeBindingMode"] == "WaitForFirstConsumer"
            assert one["allowVolumeExpansion"]
            parameters = one.get("parameters", {})
            # As the chart writes it where a class of its values has fsType.
            for more in ({}, {"csi.storage.k8s.io/fstype": "xfs"}):
                assert client.capacity({**parameters, **more}).available_capacity


@every_set
def test_the_driver_is_announced_as_it_is(path: Path) -> None:
    driver = the(path, "CSIDriver")
    assert driver["metadata"]["name"] == settings.DRIVER_NAME
    assert driver["spec"] == {
        "attachRequired": False,
        "podInfoOnMount": True,
        "storageCapacity": True,
        "fsGroupPolicy": "File",
        "seLinuxMount": False,
        # A user who may make pods may make inline volumes, so an operator must want them.
        "volumeLifecycleModes": ["Persistent", *["Ephemeral"] * (path.stem == "kind")],
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_use_a_storage_class_that_every_set_or_they_have(path: Path) -> None:
    used = set(re.findall(r"storageClassName: (\S+)", path.read_text()))
    assert used or path.stem in {"inline", "groupsnapshot"}
    for one in SETS:
        assert used <= names(one, "StorageClass") | names(path, "StorageClass")


# Containers


@every_set
def test_each_container_is_pinned_and_has_no_more_than_it_needs(path: Path) -> None:
    assert not any(pod.get("hostNetwork") for pod in pod_specs(path))
    for one in containers(path):
        assert re.fullmatch(r"[a-z0-9.]+/[a-z0-9./-]+:v?\d+\.\d+\.\d+", one["image"])
        assert one["resources"]["requests"].keys() == {"cpu", "memory"}
        # fsck of a large volume would meet a limit of Carver's, and the container die with it;
        # a sidecar's that of all claims and snapshots of a large cluster.
        assert "memory" not in one["resources"].get("limits", {})
        security = one["securityContext"]
        assert security["readOnlyRootFilesystem"]
        if one["name"] != "carver":
            # Those whose rights were read.
            assert one["image"].partition(":")[2] == TAGS[one["name"]]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security["allowPrivilegeEscalation"]
            assert not security.get("privileged")
            # SELinux: no other type may open the socket of a privileged container.
            assert security["seLinuxOptions"] == {"type": "spc_t"}


# Rights

Right = tuple[str, str, str]


def rights(*rules: tuple[str, str, str]) -> set[Right]:
    """Group, resource and verb, one by one, from lines with several verbs."""
    return {(group, resource, verb) for group, resource, verbs in rules for verb in verbs.split()}


READ = "get list watch"

# deploy/kubernetes/rbac.yaml of each sidecar's own repository, at the release that is pinned.
ASKED_FOR: Mapping[str, Mapping[str, set[Right]]] = {
    # kubernetes-csi/external-provisioner, v6.4.0
    "provisioner": {
        "ClusterRole": rights(
            ("", "persistentvolumes", f"{READ} create patch delete"),
            ("", "persistentvolumeclaims", f"{READ} update"),
            ("storage.k8s.io", "storageclasses", READ),
            # Not in that file, but read for a claim that names one: pkg/controller/controller.go.
            ("storage.k8s.io", "volumeattributesclasses", "get"),
            ("", "events", "list watch create update patch"),
            ("snapshot.storage.k8s.io", "volumesnapshots", f"{READ} update"),
            ("snapshot.storage.k8s.io", "volumesnapshotcontents", "get list"),
            ("storage.k8s.io", "csinodes", READ),
            ("", "nodes", READ),
            ("storage.k8s.io", "volumeattachments", READ),
        ),
        "Role": rights(
            ("coordination.k8s.io", "leases", f"{READ} delete update create"),
            ("storage.k8s.io", "csistoragecapacities", f"{READ} create update patch delete"),
            ("", "pods", "get"),
            ("apps", "replicasets", "get"),
        ),
    },
    # kubernetes-csi/external-resizer, v2.3.0
    "resizer": {
        "ClusterRole": rights(
            ("", "persistentvolumes", f"{READ} patch"),
            ("", "persistentvolumeclaims", READ),
            ("", "pods", READ),
            ("", "persistentvolumeclaims/status", "patch"),
            ("", "events", "list watch create update patch"),
            ("storage.k8s.io", "volumeattributesclasses", READ),
        ),
        "Role": rights(("coordination.k8s.io", "leases", f"{READ} delete update create")),
    },
    # kubernetes-csi/external-snapshotter, v8.7.0, without groups of snapshots
    "snapshotter": {
        "ClusterRole": rights(
            ("", "events", "list watch create update patch"),
            ("snapshot.storage.k8s.io", "volumesnapshotclasses", READ),
            ("snapshot.storage.k8s.io", "volumesnapshotcontents", f"{READ} update patch"),
            ("snapshot.storage.k8s.io", "volumesnapshotcontents/status", "update patch"),
        ),
        "Role": rights(("coordination.k8s.io", "leases", f"{READ} delete update create")),
    },
}
TAGS = {"provisioner": "v6.4.0", "resizer": "v2.3.0", "snapshotter": "v8.7.0"}


def granted(path: Path, kind: str, account: str) -> set[Right]:
    """What the roles of a kind allow a service account."""
    roles = {one["metadata"]["name"]: one["rules"] for one in of_kind(path, kind)}
    return {
        (group, resource, verb)
        for binding in of_kind(path, f"{kind}Binding")
        if account in {subject["name"] for subject in binding["subjects"]}
        for rule in roles[binding["roleRef"]["name"]]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@every_set
@pytest.mark.parametrize("kind", ["ClusterRole", "Role"])
def test_no_account_has_a_right_that_none_of_its_sidecars_asks_for(path: Path, kind: str) -> None:
    for pod in pod_specs(path):
        sidecars = {one["name"] for one in pod["containers"]} & ASKED_FOR.keys()
        held = granted(path, kind, pod["serviceAccountName"])
        assert held
        assert held <= set[Right]().union(*(ASKED_FOR[one][kind] for one in sidecars))


@every_set
def test_volumes_are_modified_by_the_one_resizer_only_where_there_is_one_node(path: Path) -> None:
    """It would call the Carver of its own node, whichever has the volume."""
    # Every node can make one with a VolumeAttributesClass.
    account = node_pod(path)["serviceAccountName"]
    made = ("storage.k8s.io", "volumeattributesclasses", "get")
    assert made in granted(path, "ClusterRole", account)
    right = ("storage.k8s.io", "volumeattributesclasses", "watch")
    off = "--feature-gates=VolumeAttributesClass=false" in container(path, "resizer")["args"]
    assert off is (path.stem != "kind")
    for pod in pod_specs(path):
        if "resizer" in {one["name"] for one in pod["containers"]}:
            assert (right in granted(path, "ClusterRole", pod["serviceAccountName"])) is not off


def test_the_example_s_attributes_are_such_as_a_volume_may_have() -> None:
    [path] = [one for one in EXAMPLES if one.stem == "attributes"]
    for one in of_kind(path, "VolumeAttributesClass"):
        assert one["driverName"] == settings.DRIVER_NAME
        wire = csi.ControllerModifyVolumeRequest(
            volume_id="x", mutable_parameters=one["parameters"]
        )
        assert ModifyVolume.from_proto(wire).tuning.read_ahead_bytes is not None
