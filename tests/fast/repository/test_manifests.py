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
    OWN,
    container,
    containers,
    host_paths,
    is_central,
    mounts,
    names,
    node_pod,
    objects,
    of_kind,
    pod_specs,
    the,
)

from agent.extras.tls import certificates
from agent.requests.requests import ModifyVolume
from agent.settings import settings
from proto import csi_pb2 as csi

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
VALUES = ROOT / "deploy" / "helm" / "values"
SETS = sorted(KUBERNETES.glob("*.yaml"))
EXAMPLES = sorted((KUBERNETES / "examples").glob("*.yaml"))

CENTRAL = [path for path in SETS if is_central(path)]

every_set = pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
every_central = pytest.mark.parametrize("path", CENTRAL, ids=lambda path: path.stem)
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
        assert ("node-deployment" in flags) is not is_central(path)
        # The snapshotter has had them on by default since 8.7.
        assert flags["feature-gates"] == "CSIVolumeGroupSnapshot=false"


def test_the_schemas_refuse_an_unknown_field() -> None:
    driver = the(SETS[0], "CSIDriver")
    driver["spec"]["storageCapacities"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(driver, KUBERNETES_VERSION, strict=True)


def test_there_is_a_manifest_for_each_set_of_values_and_no_other() -> None:
    assert [path.name for path in SETS] == sorted(path.name for path in VALUES.glob("*.yaml"))


def test_a_cluster_of_one_node_has_no_controller_and_others_have() -> None:
    assert [path.stem for path in CENTRAL] == ["container-lvm2", "host-lvm2"]


# Carver itself


@every_set
def test_carver_accepts_its_configuration(path: Path, tmp_path: Path) -> None:
    loaded = accepted(path, tmp_path)
    assert loaded.node_id == "node-1"
    assert loaded.endpoint == settings.DEFAULT_SOCKET
    assert loaded.device_class("") is not None
    # The one resizer of nodes without a controller would call the wrong node.
    assert loaded.controller_expand is is_central(path)
    own = container(path, "carver")
    assert str(settings.DEFAULT_FILE.parent) in mounts(own)
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in own["env"]
        if "valueFrom" in one
    }
    address = {"CARVER_ADVERTISED_HOST": "status.podIP"} if is_central(path) else {}
    assert fields == {"CARVER_NODE_ID": "spec.nodeName"} | address


# The controller


@every_central
def test_nodes_enrol_at_the_controllers_service(path: Path, tmp_path: Path) -> None:
    node, controller = accepted(path, tmp_path), manifest.controller(path)
    service, deployment = the(path, "Service"), the(path, "Deployment")
    about = service["metadata"]
    assert node.controllers is not None
    assert node.controllers.host == f"{about['name']}.{about['namespace']}.svc"
    # All controllers are to be reached, one by one, also those that are not ready.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    ports = {one["name"]: one["containerPort"] for one in container(path, "controller")["ports"]}
    assert controller.enrolment_address is not None
    assert ports["enrolment"] == controller.enrolment_address.port == node.controllers.port
    assert {"name": "enrolment", "port": 9811, "targetPort": "enrolment", "protocol": "TCP"} in (
        service["spec"]["ports"]
    )
    # gRPC refuses an address without a host.
    assert controller.enrolment_address.host
    assert node.controller_address is not None
    assert node.controller_address.host
    ports = {one["name"]: one["containerPort"] for one in container(path, "carver")["ports"]}
    assert ports["controller"] == node.controller_address.port


@every_central
def test_a_node_s_token_is_for_its_driver_s_controllers_only(path: Path, tmp_path: Path) -> None:
    node, controller, pod = accepted(path, tmp_path), manifest.controller(path), node_pod(path)
    [place] = [
        one["mountPath"]
        for one in container(path, "carver")["volumeMounts"]
        if one["name"] == "enrolment"
    ]
    assert Path(place) == node.enrolment_directory
    [volume] = [one["projected"] for one in pod["volumes"] if one["name"] == "enrolment"]
    token, authority = volume["sources"]
    assert token["serviceAccountToken"] == {
        "audience": certificates.controller_name(node.driver_name),
        "expirationSeconds": 3600,
        "path": "token",
    }
    assert authority["configMap"]["name"] == controller.controller_authority
    assert authority["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    # It is not there before the first controller.
    assert authority["configMap"]["optional"]
    assert controller.node_account == pod["serviceAccountName"]
    assert controller.driver_name == node.driver_name


@every_central
def test_a_node_s_pod_is_carver_alone_and_may_ask_the_cluster_nothing(path: Path) -> None:
    pod = node_pod(path)
    assert [one["name"] for one in pod["containers"]] == ["carver"]
    assert pod["automountServiceAccountToken"] is False
    for kind in ("ClusterRole", "Role"):
        assert granted(path, kind, pod["serviceAccountName"]) == set()
    # Nor is a secret put before it.
    for volume in pod["volumes"]:
        assert "secret" not in volume
        assert all("secret" not in one for one in volume.get("projected", {}).get("sources", ()))
    assert not any(
        "secretKeyRef" in one.get("valueFrom", {}) for one in pod["containers"][0]["env"]
    )
    subjects = {
        (subject["kind"], subject["name"])
        for kind in ("ClusterRoleBinding", "RoleBinding")
        for one in of_kind(path, kind)
        for subject in one["subjects"]
    }
    assert subjects == {("ServiceAccount", "carver-controller")}


@every_central
def test_the_controller_has_nothing_of_its_node(path: Path) -> None:
    pod = the(path, "Deployment")["spec"]["template"]["spec"]
    assert host_paths(pod) == {}
    assert {"hostPID", "hostIPC", "hostNetwork"} & pod.keys() == set()
    [socket] = pod["volumes"]
    assert "emptyDir" in socket
    own = container(path, "controller")["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert not own["allowPrivilegeEscalation"]
    assert not own.get("privileged")


@every_central
def test_each_sidecar_has_a_leader_and_serves_the_whole_cluster(path: Path) -> None:
    for name in ("provisioner", "snapshotter", "resizer"):
        flags = manifest.flags(container(path, name))
        assert flags["leader-election"] == "true"
        assert flags["leader-election-namespace"] == "$(NAMESPACE)"
        assert "NAMESPACE" in {one["name"] for one in container(path, name)["env"]}
        assert "node-deployment" not in flags
    flags = manifest.flags(container(path, "provisioner"))
    # With it a restore could not go to its source's node.
    assert "strict-topology" not in flags
    wanted = {
        "immediate-topology": "false",
        "enable-capacity": "true",
        # Pod, ReplicaSet, Deployment.
        "capacity-ownerref-level": "2",
        "extra-create-metadata": "true",
    }
    assert wanted.items() <= flags.items()
    assert the(path, "Deployment")["spec"]["replicas"] == 2
    assert the(path, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


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
    node = accepted(path, tmp_path)
    endpoint = manifest.controller(path).endpoint if is_central(path) else node.endpoint
    for name in ("provisioner", "resizer"):
        one = container(path, name)
        assert f"--csi-address={endpoint}" in one["args"]
        assert str(endpoint.parent) in mounts(one)


@every_set
def test_pods_are_as_their_sidecars_and_volumes_need_them(path: Path) -> None:
    manifest.check_pods(path)


# Sidecars


def test_without_a_controller_the_provisioner_serves_its_own_node() -> None:
    """Also immediate binding; and a node's capacity goes with its pod."""
    [path] = [path for path in SETS if not is_central(path)]
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
    if not is_central(path):
        # The resizer, beside a Carver to ask.
        [term] = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()
        assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "node"
    assert [one.get("tolerations") for one in pod_specs(path)] == [None, None]
    processors = {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]}
    for one in (node_pod(path), *[pod] * is_central(path)):
        required = one["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert required["nodeSelectorTerms"] == [{"matchExpressions": [processors]}]
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
    assert container(path, "carver")["ports"][0]["name"] == "metrics"
    assert container(path, "carver")["ports"][0]["containerPort"] == address.port
    if is_central(path):
        assert manifest.controller(path).metrics_address == address
    for one in containers(path):
        probes = {key: one[key]["httpGet"] for key in one if key.endswith("Probe")}
        ports = {port["name"] for port in one.get("ports", [])}
        assert {probe["port"] for probe in probes.values()} <= ports
        # Until a container has started, however long that takes, it is not restarted as dead.
        assert ("startupProbe" in probes) == ("livenessProbe" in probes), one["name"]
        if one["name"] == "controller":
            assert {key: probe["path"] for key, probe in probes.items()} == {
                "startupProbe": "/healthz",
                "livenessProbe": "/healthz",
                "readinessProbe": "/healthz",
            }
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
    assert used or path.stem in {"inline", "groupsnapshot", "restored"}
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
        if one["name"] not in OWN:
            # Those whose rights were read.
            assert one["image"].partition(":")[2] == TAGS[one["name"]]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security["allowPrivilegeEscalation"]
            assert not security.get("privileged")
            # SELinux: no other type may open the socket of a privileged container. The controller's
            # is its own pod's.
            spc = {"seLinuxOptions": {"type": "spc_t"}}
            assert spc.items() <= security.items() or is_central(path)
            assert "seLinuxOptions" not in security or not is_central(path)


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
# agent/extras/controller: enrolment.py and authority.py.
CONTROLLER: Mapping[str, set[Right]] = {
    "ClusterRole": rights(
        ("authentication.k8s.io", "tokenreviews", "create"), ("storage.k8s.io", "csinodes", "list")
    ),
    "Role": rights(
        ("", "pods", "get"),
        ("", "secrets", "create get update patch"),
        ("", "configmaps", "create get update patch"),
    ),
}
ASKED_FOR = {**ASKED_FOR, "controller": CONTROLLER}
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
        assert bool(held) is bool(sidecars)
        assert held <= set[Right]().union(*(ASKED_FOR[one][kind] for one in sidecars))


@every_central
def test_the_controller_reaches_one_secret_by_its_name(path: Path) -> None:
    authority = manifest.controller(path).controller_authority
    rules = [
        rule
        for kind in ("ClusterRole", "Role")
        for role in of_kind(path, kind)
        for rule in role["rules"]
        if {"secrets", "configmaps", "*"} & set(rule["resources"])
    ]
    [made, own] = rules
    # RBAC has no names for what is not there yet.
    assert (made["verbs"], "resourceNames" in made) == (["create"], False)
    assert own["resourceNames"] == [authority]
    assert rules == [rule for role in of_kind(path, "Role") for rule in role["rules"]][-2:]


@every_set
def test_volumes_are_modified_where_they_are(path: Path) -> None:
    """By a controller, or where there is one node: else the resizer would call the wrong one."""
    accounts = {
        one["name"]: pod["serviceAccountName"]
        for pod in pod_specs(path)
        for one in pod["containers"]
    }
    # A volume can be made with a VolumeAttributesClass.
    made = ("storage.k8s.io", "volumeattributesclasses", "get")
    assert made in granted(path, "ClusterRole", accounts["provisioner"])
    right = ("storage.k8s.io", "volumeattributesclasses", "watch")
    assert "feature-gates" not in manifest.flags(container(path, "resizer"))
    assert right in granted(path, "ClusterRole", accounts["resizer"])


def test_the_example_s_attributes_are_such_as_a_volume_may_have() -> None:
    [path] = [one for one in EXAMPLES if one.stem == "attributes"]
    for one in of_kind(path, "VolumeAttributesClass"):
        assert one["driverName"] == settings.DRIVER_NAME
        wire = csi.ControllerModifyVolumeRequest(
            volume_id="x", mutable_parameters=one["parameters"]
        )
        assert ModifyVolume.from_proto(wire).tuning.read_ahead_bytes is not None
