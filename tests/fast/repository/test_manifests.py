"""What is committed in deploy/kubernetes is valid, whole, and no more than Carver needs.

Whether it is what the chart renders is seen by `deploy/render.py --check`, which needs helm.
"""

import argparse
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
    host_paths,
    mounts,
    names,
    objects,
    of_kind,
    pod_specs,
    the,
)

from agent.cli import main as cli
from agent.core import settings
from agent.core.requests import ModifyVolume
from agent.csi.client import Client
from proto import csi_pb2 as csi

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
VALUES = ROOT / "deploy" / "helm" / "values"
SETS = sorted(KUBERNETES.glob("*.yaml"))
EXAMPLES = sorted((KUBERNETES / "examples").glob("*.yaml"))

every_set = pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
every_file = pytest.mark.parametrize("path", [*SETS, *EXAMPLES], ids=lambda path: path.stem)


def accepted(path: Path, tmp_path: Path) -> settings.Config:
    """What Carver makes of the ConfigMap, the container's arguments and its environment."""
    [(_, loaded)] = manifest.configurations(path, tmp_path)
    return loaded


# Schemas


@every_file
def test_every_object_is_as_kubernetes_own_schema_says(path: Path) -> None:
    manifest.check_schemas(path)


@every_file
def test_what_has_no_schema_there_is_as_the_snapshotter_s_own_says(path: Path) -> None:
    # kubernetes-csi/external-snapshotter, client/config/crd, v8.7.0
    fields = {
        "VolumeSnapshotClass": {"driver", "deletionPolicy", "parameters"},
        "VolumeSnapshot": {"spec"},
    }
    for one in objects(path):
        if one["apiVersion"].startswith("snapshot.storage.k8s.io/"):
            assert one["apiVersion"] == "snapshot.storage.k8s.io/v1"
            assert one.keys() - {"apiVersion", "kind", "metadata"} <= fields[one["kind"]]
            spec = one.get("spec", {"source": {"persistentVolumeClaimName": ""}})
            assert spec.keys() <= {"volumeSnapshotClassName", "source"}
            assert spec["source"].keys() == {"persistentVolumeClaimName"}


def test_the_group_snapshot_is_as_the_snapshotter_s_own_says() -> None:
    # kubernetes-csi/external-snapshotter, client/config/crd, v8.7.0
    [one] = objects(KUBERNETES / "examples" / "groupsnapshot.yaml")
    assert one["apiVersion"] == "groupsnapshot.storage.k8s.io/v1"
    assert one["kind"] == "VolumeGroupSnapshot"
    assert one["spec"].keys() == {"volumeGroupSnapshotClassName", "source"}
    assert one["spec"]["source"].keys() == {"selector"}


@every_set
def test_group_snapshots_are_off_and_the_sidecar_is_told_so(path: Path) -> None:
    # The snapshotter has had them on by default since 8.7.
    for pod in pod_specs(path):
        for one in pod["containers"]:
            if one["name"] == "snapshotter":
                assert manifest.flags(one)["feature-gates"] == "CSIVolumeGroupSnapshot=false"
    assert "groupsnapshot.storage.k8s.io" not in path.read_text()


@every_set
def test_snapshots_have_a_class_where_they_have_a_sidecar(path: Path) -> None:
    sidecars = {one["name"] for pod in pod_specs(path) for one in pod["containers"]}
    assert ("snapshotter" in sidecars) is bool(of_kind(path, "VolumeSnapshotClass"))
    assert ("snapshotter" in sidecars) is (path.stem != "kind")
    for one in of_kind(path, "VolumeSnapshotClass"):
        assert (one["driver"], one["deletionPolicy"]) == (settings.DRIVER_NAME, "Delete")
        assert "--node-deployment" in container(path, "snapshotter")["args"]


def test_the_schemas_refuse_a_field_that_there_is_not() -> None:
    driver = the(SETS[0], "CSIDriver")
    driver["spec"]["storageCapacities"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(driver, KUBERNETES_VERSION, strict=True)


def test_there_is_a_manifest_for_each_set_of_values_and_no_other() -> None:
    assert [path.name for path in SETS] == sorted(path.name for path in VALUES.glob("*.yaml"))


# Carver itself


@every_set
def test_carver_understands_its_arguments(path: Path) -> None:
    # argparse ends the process where it does not.
    parsed = cli.parser().parse_args(container(path, "carver")["args"])
    assert isinstance(parsed, argparse.Namespace)


@every_set
def test_carver_accepts_its_configuration(path: Path, tmp_path: Path) -> None:
    loaded = accepted(path, tmp_path)
    assert loaded.node_id == "node-1"
    assert loaded.endpoint == settings.DEFAULT_SOCKET
    assert loaded.device_class("") is not None


@every_set
def test_the_controller_does_not_offer_expansion_in_a_cluster(path: Path, tmp_path: Path) -> None:
    assert not accepted(path, tmp_path).controller_expand


@every_set
def test_the_node_s_id_is_the_name_that_kubernetes_has_for_it(path: Path) -> None:
    [variable] = container(path, "carver")["env"]
    assert variable["name"] == "CARVER_NODE_ID"
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


@every_set
def test_the_configuration_is_mounted_where_carver_looks(path: Path) -> None:
    assert str(settings.DEFAULT_FILE.parent) in mounts(container(path, "carver"))


def test_each_set_runs_the_lvm2_that_it_is_named_for(tmp_path: Path) -> None:
    for path in SETS:
        on_host = accepted(path, tmp_path).lvm == "host"
        [pod] = [one["spec"]["template"]["spec"] for one in of_kind(path, "DaemonSet")]
        assert on_host == (path.stem == "host-lvm2")
        assert pod.get("hostPID", False) == on_host
        # lvm2's locks and configuration are the host's either way.
        assert ("/run/lock/lvm" in host_paths(pod).values()) != on_host


@every_set
def test_where_lvm2_waits_for_udev_it_shares_the_semaphores_of_the_host(path: Path) -> None:
    [pod] = [one["spec"]["template"]["spec"] for one in of_kind(path, "DaemonSet")]
    sees_udev = "/run/udev" in host_paths(pod).values()
    assert sees_udev == bool(pod.get("hostIPC") or pod.get("hostPID"))


# Mounts


@every_set
def test_what_carver_mounts_is_seen_by_kubelet(path: Path) -> None:
    one = container(path, "carver")
    shared = {place for place, mount in mounts(one).items() if "mountPropagation" in mount}
    assert shared == {"/var/lib/kubelet/plugins", "/var/lib/kubelet/pods"}
    for place in shared:
        assert mounts(one)[place]["mountPropagation"] == "Bidirectional"
    assert one["securityContext"]["privileged"]


@every_set
def test_a_folder_of_the_host_has_the_same_path_in_every_container(path: Path) -> None:
    for pod in pod_specs(path):
        paths = host_paths(pod)
        for one in pod["containers"]:
            for mount in one["volumeMounts"]:
                assert paths.get(mount["name"], mount["mountPath"]) == mount["mountPath"]


@every_set
def test_the_sidecars_talk_to_the_socket_that_carver_serves(path: Path, tmp_path: Path) -> None:
    endpoint = accepted(path, tmp_path).endpoint
    for name in ("provisioner", "resizer"):
        one = container(path, name)
        assert f"--csi-address={endpoint}" in one["args"]
        assert str(endpoint.parent) in mounts(one)


@every_set
def test_a_directory_that_is_not_kubelet_s_keeps_the_pod_from_starting(path: Path) -> None:
    [pod] = [one["spec"]["template"]["spec"] for one in of_kind(path, "DaemonSet")]
    types = {one["name"]: one["hostPath"]["type"] for one in pod["volumes"] if "hostPath" in one}
    assert {types[name] for name in ("plugins", "pods", "registry")} == {"Directory"}


# Sidecars


@every_set
def test_every_sidecar_has_the_flags_that_it_is_given(path: Path) -> None:
    for pod in pod_specs(path):
        for one in pod["containers"]:
            if one["name"] != "carver":
                manifest.check_flags(one)


@every_set
def test_immediate_binding_is_served_on_the_node_that_the_provisioner_took(path: Path) -> None:
    flags = manifest.flags(container(path, "provisioner"))
    assert flags["node-deployment-immediate-binding"] == "true"
    assert flags["strict-topology"] == "true"
    assert flags["immediate-topology"] == "false"


@every_set
def test_the_capacity_of_a_node_that_is_gone_goes_with_its_pod(path: Path) -> None:
    flags = manifest.flags(container(path, "provisioner"))
    assert flags["capacity-ownerref-level"] == "0"
    assert "POD_NAME" in {one["name"] for one in container(path, "provisioner")["env"]}


@every_set
def test_the_resizer_is_kept_to_nodes_with_a_carver(path: Path) -> None:
    labels = the(path, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    pod = the(path, "Deployment")["spec"]["template"]["spec"]
    [term] = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "node"


@every_set
def test_no_taint_is_tolerated_that_nobody_named(path: Path) -> None:
    assert [pod.get("tolerations") for pod in pod_specs(path)] == [None, None]


@every_set
def test_carver_is_on_the_processors_that_there_is_an_image_for(path: Path) -> None:
    pod = the(path, "DaemonSet")["spec"]["template"]["spec"]
    nodes = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert nodes["nodeSelectorTerms"] == [
        {
            "matchExpressions": [
                {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]}
            ]
        }
    ]


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
def test_every_mount_of_a_container_is_of_a_volume_and_every_volume_is_mounted(path: Path) -> None:
    for pod in pod_specs(path):
        mounted = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


@every_set
def test_selectors_choose_the_pods_that_are_made(path: Path) -> None:
    for one in [*of_kind(path, "DaemonSet"), *of_kind(path, "Deployment")]:
        labels = one["spec"]["template"]["metadata"]["labels"].items()
        assert one["spec"]["selector"]["matchLabels"].items() <= labels


@every_set
def test_probes_go_to_a_port_that_the_container_has(path: Path) -> None:
    for pod in pod_specs(path):
        for one in pod["containers"]:
            ports = {port["name"] for port in one.get("ports", [])}
            for key in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert key not in one or one[key]["httpGet"]["port"] in ports


@every_set
def test_the_probes_ask_where_carver_answers(path: Path, tmp_path: Path) -> None:
    one = container(path, "carver")
    address = accepted(path, tmp_path).metrics_address
    assert address is not None
    assert {port["name"]: port["containerPort"] for port in one["ports"]} == {
        "metrics": address.port
    }
    asked = {key: one[key]["httpGet"]["path"] for key in one if key.endswith("Probe")}
    assert asked == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }


@every_set
def test_storage_classes_are_carver_s_and_wait_for_the_pod(path: Path) -> None:
    for one in of_kind(path, "StorageClass"):
        assert one["provisioner"] == settings.DRIVER_NAME
        assert one["volumeBindingMode"] == "WaitForFirstConsumer"
        assert one["allowVolumeExpansion"]


@every_set
def test_the_service_has_room_for_each_storage_class_s_parameters(
    path: Path, tmp_path: Path
) -> None:
    wanted, host = accepted(path, tmp_path), FakeHost(tmp_path)
    for group in wanted.groups:
        host.lvm2.add_group(group, [200])
    own = configured.carver(tmp_path, classes=wanted.classes)
    running = serving.start(own, host)
    try:
        with Client(own.endpoint) as caller:
            for one in of_kind(path, "StorageClass"):
                parameters = one.get("parameters", {})
                # As the chart writes it where a class of its values has fsType.
                for more in ({}, {"csi.storage.k8s.io/fstype": "xfs"}):
                    assert caller.capacity({**parameters, **more}).available_capacity
    finally:
        running.stop()


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
        # Whoever may make pods may make inline volumes, so an operator must want them.
        "volumeLifecycleModes": (
            ["Persistent", "Ephemeral"] if path.stem == "kind" else ["Persistent"]
        ),
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_use_a_storage_class_that_every_set_or_they_have(path: Path) -> None:
    used = set(re.findall(r"storageClassName: (\S+)", path.read_text()))
    assert used or path.stem in {"inline", "groupsnapshot"}
    for one in SETS:
        assert used <= names(one, "StorageClass") | names(path, "StorageClass")


# Images


@every_set
def test_every_image_is_pinned_and_of_a_named_host(path: Path) -> None:
    for pod in pod_specs(path):
        for one in pod["containers"]:
            assert re.fullmatch(r"[a-z0-9.]+/[a-z0-9./-]+:v?\d+\.\d+\.\d+", one["image"])


@every_set
def test_every_container_says_what_it_needs_and_writes_only_where_it_is_told(path: Path) -> None:
    for pod in pod_specs(path):
        for one in pod["containers"]:
            assert one["resources"]["requests"].keys() == {"cpu", "memory"}
            # fsck of a large volume would meet a limit of Carver's, and the container die with it;
            # a sidecar's that of all claims and snapshots of a large cluster.
            assert "memory" not in one["resources"].get("limits", {})
            assert one["securityContext"]["readOnlyRootFilesystem"]


@every_set
def test_no_container_but_carver_has_a_privilege(path: Path) -> None:
    for pod in pod_specs(path):
        assert not pod.get("hostNetwork")
        for one in pod["containers"]:
            security = one["securityContext"]
            if one["name"] != "carver":
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert not security["allowPrivilegeEscalation"]
                assert not security.get("privileged")
                # SELinux: who else may open the socket of a privileged container.
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
    right = ("storage.k8s.io", "volumeattributesclasses", "watch")
    off = "--feature-gates=VolumeAttributesClass=false" in container(path, "resizer")["args"]
    assert off is (path.stem != "kind")
    for pod in pod_specs(path):
        if "resizer" in {one["name"] for one in pod["containers"]}:
            assert (right in granted(path, "ClusterRole", pod["serviceAccountName"])) is not off


@every_set
def test_a_volume_can_be_made_with_a_volume_attributes_class(path: Path) -> None:
    account = the(path, "DaemonSet")["spec"]["template"]["spec"]["serviceAccountName"]
    right = ("storage.k8s.io", "volumeattributesclasses", "get")
    assert right in granted(path, "ClusterRole", account)


def test_the_example_s_attributes_are_such_as_a_volume_may_have() -> None:
    [path] = [one for one in EXAMPLES if one.stem == "attributes"]
    for one in of_kind(path, "VolumeAttributesClass"):
        assert one["driverName"] == settings.DRIVER_NAME
        wire = csi.ControllerModifyVolumeRequest(
            volume_id="x", mutable_parameters=one["parameters"]
        )
        assert ModifyVolume.from_proto(wire).tuning.read_ahead_bytes is not None


@every_set
def test_the_pinned_sidecars_are_those_whose_rights_were_read(path: Path) -> None:
    for pod in pod_specs(path):
        for one in pod["containers"]:
            if one["name"] != "carver":
                assert one["image"].partition(":")[2] == TAGS[one["name"]]
