"""The values for each platform, by what its documentation and sources say of its nodes.

None was tried on its platform but Debian's; docs/install.md says so at its table.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import jsonschema
import manifest
import pytest
import yaml
from chart import documented
from chart.documented import CHART
from chart.rendering import (
    DEMO,
    FILES,
    Template,
    Values,
    both_modes,
    every_file,
    in_mode,
    read,
)
from manifest import OWN, Object

PLATFORMS = sorted((CHART / "platforms").glob("*.yaml"))
ROOT = CHART.parents[2]


@dataclass(frozen=True)
class Platform:
    """What a platform's nodes are like."""

    # Where kubelet keeps its files.
    kubelet_dir: str = "/var/lib/kubelet"
    # Folders that no pod can write in, or that do not outlive a reboot.
    read_only: tuple[str, ...] = ("/usr",)
    # Whether the node's udev has device-mapper's rules, and kubelet sees /run/udev.
    has_udev: bool = True
    has_lvm2: bool = True
    # What the sidecars beside a privileged container are labelled, where SELinux may be enforced.
    label: str | None = None
    # Whether pods need SecurityContextConstraints.
    has_constraints: bool = False
    # Whether a node is a container, with a /dev of its own.
    is_container: bool = False


KNOWN: Mapping[str, Platform] = {
    "openshift": Platform(label="spc_t", has_constraints=True),
    "rhel": Platform(label="spc_t", read_only=()),
    "debian": Platform(read_only=()),
    "k3s": Platform(label="spc_t", read_only=()),
    "rke2": Platform(label="spc_t", read_only=()),
    "microk8s": Platform(
        kubelet_dir="/var/snap/microk8s/common/var/lib/kubelet", read_only=("/snap",)
    ),
    "k0s": Platform(kubelet_dir="/var/lib/k0s/kubelet", read_only=()),
    # Talos' own policy has no spc_t; kubelet is a container without /run/udev.
    "talos": Platform(read_only=("/usr", "/etc", "/opt"), has_udev=False, label=""),
    "flatcar": Platform(label=""),
    "bottlerocket": Platform(
        read_only=("/usr", "/etc", "/opt"), has_udev=False, has_lvm2=False, label="spc_t"
    ),
    "kind": Platform(read_only=(), has_udev=False, has_lvm2=False, is_container=True),
    # A root in memory, but for folders that are named in its documentation.
    "minikube": Platform(read_only=("/usr", "/etc", "/var/lib/carver"), has_udev=False),
}
SIDECARS = {"provisioner", "snapshotter", "resizer"}

every_platform = pytest.mark.parametrize("file", PLATFORMS, ids=lambda file: file.stem)


def values_of(file: Path, central: bool) -> Values:
    """The platform's values, with snapshots and a class as a user would add them."""
    mine = {"sidecars": {"snapshotter": {"enabled": True}}}
    given = read(file)
    given["sidecars"] = {**given.get("sidecars", {}), **mine["sidecars"]}
    return in_mode(DEMO | given, central)


def hosts(pod: Object) -> Iterator[tuple[str, str, bool]]:
    """What a pod's containers have of the node: the path, what makes it there, whether to write."""
    volumes = {one["name"]: one["hostPath"] for one in pod["volumes"] if "hostPath" in one}
    for container in pod["containers"]:
        for mount in container["volumeMounts"]:
            if mount["name"] in volumes:
                host = volumes[mount["name"]]
                yield host["path"], host["type"], not mount.get("readOnly", False)


def test_every_platform_is_known_and_has_a_file() -> None:
    assert [file.stem for file in PLATFORMS] == sorted(KNOWN)


@every_platform
def test_a_platform_s_values_are_values_of_the_chart(file: Path) -> None:
    given = yaml.safe_load(file.read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(given, schema)
    offered = set(documented.places())

    def places(section: Values, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for key, value in section.items():
            place = (*above, key)
            if isinstance(value, dict) and place not in offered:
                yield from places(value, place)
            else:
                yield place

    assert set(places(given)) <= offered
    # A choice of storage or of mode is the user's.
    assert not given.keys() & {"config", "demo", "pools", "controller", "storageClasses"}


@every_platform
@both_modes
def test_a_platform_s_objects_are_valid(file: Path, central: bool, template: Template) -> None:
    made = template(values_of(file, central))
    assert manifest.is_central(made) is central
    manifest.check_schemas(made)
    manifest.check_pods(made)
    sidecars = {one["name"] for one in manifest.containers(made)} - OWN
    assert sidecars == SIDECARS


@every_platform
@both_modes
def test_carver_is_where_the_platform_s_kubelet_looks(
    file: Path, central: bool, template: Template, tmp_path: Path
) -> None:
    kubelet = PurePosixPath(KNOWN[file.stem].kubelet_dir)
    made = template(values_of(file, central))
    [(pod, loaded)] = manifest.configurations(made, tmp_path)
    wanted = {str(kubelet / name) for name in ("plugins", "pods", "plugins_registry")}
    paths = {path: kind for path, kind, _ in hosts(pod)}
    assert {path for path in paths if "kubelet" in path} - {str(loaded.endpoint.parent)} == wanted
    # None is made where kubelet is elsewhere.
    assert {paths[path] for path in wanted} == {"Directory"}
    assert loaded.endpoint == Path(kubelet / "plugins" / loaded.driver_name / "csi.sock")
    assert [str(one) for one in loaded.kubelet_dir] == [str(kubelet)]
    assert str(loaded.registration_directory) == str(kubelet / "plugins_registry")


@every_platform
@both_modes
def test_nothing_is_written_where_the_platform_s_nodes_cannot_be(
    file: Path, central: bool, template: Template
) -> None:
    for pod in manifest.pod_specs(template(values_of(file, central))):
        for path, kind, is_written in hosts(pod):
            if is_written or kind == "DirectoryOrCreate":
                above = {str(one) for one in (PurePosixPath(path), *PurePosixPath(path).parents)}
                assert not above & set(KNOWN[file.stem].read_only), path


@every_platform
@both_modes
def test_lvm2_waits_for_udev_only_where_the_node_has_its_rules(
    file: Path, central: bool, template: Template
) -> None:
    known = KNOWN[file.stem]
    pod = manifest.node_pod(template(values_of(file, central)))
    runs_the_hosts = bool(pod.get("hostPID"))
    assert known.has_lvm2 or not runs_the_hosts
    waits = bool(pod.get("hostIPC")) or runs_the_hosts
    assert waits is known.has_udev
    assert ("/run/udev" in {path for path, _, _ in hosts(pod)}) is known.has_udev
    # The container's lvm2 has the node's locks, and an /etc/lvm that outlives the pod.
    places = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert {"/etc/lvm", "/run/lock/lvm"} <= places or runs_the_hosts


@every_platform
@both_modes
def test_sidecars_beside_carver_are_labelled_as_the_platform_s_selinux_has_it(
    file: Path, central: bool, template: Template
) -> None:
    label = KNOWN[file.stem].label
    for one in manifest.containers(template(values_of(file, central))):
        given = one["securityContext"].get("seLinuxOptions")
        if central or one["name"] in OWN:
            # The controller's socket is its own pod's.
            assert given is None
        elif label is None:
            # It means nothing without SELinux.
            assert given in (None, {"type": "spc_t"})
        else:
            assert given == ({"type": label} if label else None)


@every_platform
def test_a_node_that_is_a_container_has_the_host_s_devices(file: Path, template: Template) -> None:
    if KNOWN[file.stem].is_container:
        cluster = yaml.safe_load((ROOT / "deploy" / "kind" / "cluster.yaml").read_text())
        [node] = cluster["nodes"]
        brought = {one["containerPath"] for one in node["extraMounts"]}
        pod = manifest.node_pod(template(values_of(file, central=True)))
        assert {"/dev", "/run/lock/lvm"} <= brought & {path for path, _, _ in hosts(pod)}
        # The committed manifest is of these values, too.
        rendered = read(ROOT / "deploy" / "helm" / "values" / f"{file.stem}.yaml")
        assert (rendered["lvm2"], rendered["udev"]) == (read(file)["lvm2"], read(file)["udev"])


@every_platform
def test_every_platform_has_a_row_in_the_documentation(file: Path) -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    [row] = re.findall(rf"^\| `{file.stem}` .*$", text, re.MULTILINE)
    given = read(file)
    # What differs from the chart's defaults is said.
    defaults = read(documented.VALUES)
    for key in ("kubeletDir", "lvmDir"):
        assert (f"`{given[key]}`" in row) is (given[key] != defaults[key])
    assert ("`udev: false`" in row) is not given["udev"]


# SecurityContextConstraints: OpenShift's own documentation of security.openshift.io/v1.


def wanted(pods: list[Object], component: str) -> Object:
    """What pods ask of the node, as a SecurityContextConstraints has it."""
    containers = [one for pod in pods for one in pod["containers"]]
    every = containers + [one for pod in pods for one in pod.get("initContainers", [])]
    contexts = [one.get("securityContext", {}) for one in every]
    own = [one["securityContext"] for one in containers]
    kinds = {kind for pod in pods for one in pod["volumes"] for kind in one if kind != "name"}
    privileged = any(one.get("privileged", False) for one in contexts)
    # Kubernetes adds the account's token to each pod that may have it.
    token = any(pod.get("automountServiceAccountToken", True) for pod in pods)
    profiles = {json.dumps(one.get("seccompProfile")) for one in own}
    runtime = json.dumps({"type": "RuntimeDefault"})
    seccomp = {
        frozenset([runtime]): ["runtime/default"],
        frozenset(["null"]): [],
        # Some with and some without.
        frozenset(["null", runtime]): ["*"],
    }
    hosts_network = any(pod.get("hostNetwork", False) for pod in pods)
    labelled = any("seLinuxOptions" in one for one in contexts)
    assert {one.get("runAsUser", 0) for one in contexts} == {0}
    assert not any(one.get("capabilities", {}).get("add") for one in contexts)
    drops = all(one.get("capabilities") == {"drop": ["ALL"]} for one in own)
    return {
        "allowPrivilegedContainer": privileged,
        "allowPrivilegeEscalation": any(one.get("allowPrivilegeEscalation", True) for one in own),
        "allowHostDirVolumePlugin": "hostPath" in kinds,
        "allowHostIPC": any(pod.get("hostIPC", False) for pod in pods),
        "allowHostNetwork": hosts_network,
        "allowHostPorts": hosts_network,
        "allowHostPID": any(pod.get("hostPID", False) for pod in pods),
        "allowedCapabilities": [],
        "defaultAddCapabilities": [],
        "requiredDropCapabilities": ["ALL"] * drops,
        "readOnlyRootFilesystem": all(one.get("readOnlyRootFilesystem", False) for one in contexts),
        "runAsUser": {"type": "MustRunAs", "uid": 0},
        # A privileged container has the label of its runtime: none is given to it.
        "seLinuxContext": {"type": "RunAsAny" if privileged or labelled else "MustRunAs"},
        "fsGroup": {"type": "RunAsAny"},
        "supplementalGroups": {"type": "RunAsAny"},
        "seccompProfiles": seccomp[frozenset(profiles)],
        "volumes": sorted(kinds | {"projected"} if token else kinds),
    }


@pytest.mark.parametrize("file", [*FILES, *PLATFORMS], ids=lambda file: file.stem)
@both_modes
def test_the_constraints_allow_what_the_pods_ask_for_and_no_more(
    file: Path, central: bool, template: Template
) -> None:
    given = in_mode(DEMO | read(file), central) | {"securityContextConstraints": {"enabled": True}}
    made = template(given)
    [driver] = manifest.names(made, "CSIDriver")
    found = {
        one["metadata"]["name"]: one for one in manifest.of_kind(made, "SecurityContextConstraints")
    }
    components = {"DaemonSet": "node", "Deployment": "controller" if central else "resizer"}
    assert found.keys() == {f"{driver}-{component}" for component in components.values()}
    for kind, component in components.items():
        one = found[f"{driver}-{component}"]
        pods = [it["spec"]["template"]["spec"] for it in manifest.of_kind(made, kind)]
        [account] = {pod["serviceAccountName"] for pod in pods}
        assert one["users"] == [f"system:serviceaccount:storage:{account}"]
        assert one["groups"] == []
        about = {"apiVersion", "kind", "metadata", "users", "groups"}
        assert {key: it for key, it in one.items() if key not in about} == wanted(pods, component)


@every_file
def test_there_are_no_constraints_where_none_are_wanted(file: Path, template: Template) -> None:
    given = read(file) | {"securityContextConstraints": {"enabled": False}}
    assert "security.openshift.io" not in template(given).read_text()


def test_only_the_platform_with_constraints_has_them() -> None:
    for file in PLATFORMS:
        enabled = read(file).get("securityContextConstraints", {}).get("enabled", False)
        assert enabled is KNOWN[file.stem].has_constraints
