"""What helm makes of the chart: of its defaults, and of ten files that use each value once.

`make conformance` runs these, as helm is built first. What is committed in deploy/kubernetes is
checked in the fast tier.
"""

import copy
import json
import re
from pathlib import Path

import manifest
import pytest
import yaml
from chart import documented
from chart.documented import CHART, Place
from chart.rendering import (
    DEMO,
    FILES,
    Refused,
    Template,
    Values,
    both_modes,
    every_file,
    in_mode,
    read,
)
from cluster import monitoring

from agent.operations import plan
from agent.requests import parameters
from agent.settings import settings, values

PODS = ("DaemonSet", "Deployment")
SNAPSHOTS = "snapshot.storage.k8s.io/v1"

DISTRIBUTED: Values = DEMO | {"controller": {"enabled": False}}
METADATA: Values = {"enabled": True, "tlsSecret": "changed-blocks", "caCert": "cGVt"}


def without(values: Values, place: Place) -> Values:
    left = copy.deepcopy(values)
    for found, key in documented.at(left, place):
        del found[key]
    return left


def the_configuration(path: Path, tmp_path: Path) -> settings.Config:
    """What Carver reads of the only DaemonSet's."""
    [(_, loaded)] = manifest.configurations(path, tmp_path)
    return loaded


def kinds(path: Path) -> set[str]:
    return {one["kind"] for one in manifest.objects(path)}


def sidecars(path: Path) -> set[str]:
    return {one["name"] for one in manifest.containers(path)}


# Every value


def test_there_are_ten_files_that_use_every_value() -> None:
    assert len(FILES) == 10
    given, offered = [read(file) for file in FILES], set(documented.places())
    used = {place for place in offered if any(documented.at(one, place) for one in given)}
    assert used == offered


@both_modes
@every_file
def test_the_rendered_objects_are_valid_and_fit_together(
    file: Path, central: bool, template: Template, tmp_path: Path
) -> None:
    made = template(in_mode(read(file), central), "carver", SNAPSHOTS)
    assert manifest.is_central(made) is central
    manifest.check_schemas(made)
    if central is read(file).get("controller", {}).get("enabled", True):
        # In the other mode its volumes are another pod's.
        manifest.check_pods(made)
    if central:
        check_controller(made)
    for pod, loaded in manifest.configurations(made, tmp_path):
        assert loaded.controller_expand is central
        # The sidecars' socket is the one that Carver serves.
        assert central or str(loaded.endpoint.parent) in manifest.host_paths(pod).values()
        [driver] = manifest.names(made, "CSIDriver")
        assert loaded.driver_name == driver
        assert (loaded.endpoint.parent.name, loaded.endpoint.name) == (driver, "csi.sock")
        assert all(str(one.file.path).startswith("/") for one in loaded.definitions if one.file)
        address = loaded.metrics_address or loaded.health_address
        assert address is not None
        [carver] = [one for one in pod["containers"] if one["name"] == "carver"]
        ports = [one["containerPort"] for one in carver["ports"]]
        assert ports == [address.port, *[9810] * central]
        if central:
            assert loaded.controllers == values.Address("carver-controller.storage.svc", 9811) or (
                "fullnameOverride" in read(file)
            )
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert carver[probe]["httpGet"]["port"] == carver["ports"][0]["name"]


def check_controller(made: Path) -> None:
    """The controller's settings are those of its nodes, ports and sidecars."""
    loaded, own = manifest.controller(made), manifest.container(made, "controller")
    [driver] = manifest.names(made, "CSIDriver")
    assert loaded.driver_name == driver
    address = loaded.metrics_address or loaded.health_address
    assert address is not None
    assert [one["containerPort"] for one in own["ports"]] == [9811, address.port]
    for probe in ("livenessProbe", "readinessProbe"):
        assert own[probe]["httpGet"] == {"path": "/healthz", "port": own["ports"][1]["name"]}
    [deployment] = manifest.of_kind(made, "Deployment")
    assert loaded.controller_authority == deployment["metadata"]["name"]
    for one in deployment["spec"]["template"]["spec"]["containers"]:
        assert str(loaded.endpoint.parent) in manifest.mounts(one)
        assert one["name"] == "controller" or f"--csi-address={loaded.endpoint}" in one["args"]
    for pod in [one["spec"]["template"]["spec"] for one in manifest.of_kind(made, "DaemonSet")]:
        assert pod["serviceAccountName"] == loaded.node_account
        assert pod["automountServiceAccountToken"] is False
        assert [one["name"] for one in pod["containers"]] == ["carver"]
        # No role is bound to it.
        for kind in ("ClusterRoleBinding", "RoleBinding"):
            for one in manifest.of_kind(made, kind):
                assert loaded.node_account not in {it["name"] for it in one["subjects"]}


@every_file
def test_every_value_makes_a_difference(file: Path, template: Template) -> None:
    values = read(file)
    whole = template(values).read_text()
    for place in documented.places():
        if documented.at(values, place):
            try:
                assert template(without(values, place)).read_text() != whole, place
            except Refused:
                # Others in the file need it.
                continue


@every_file
@both_modes
def test_every_account_that_is_named_is_there_or_given(
    file: Path, central: bool, template: Template
) -> None:
    made = template(in_mode(read(file), central))
    for pod in manifest.pod_specs(made):
        accounts = manifest.names(made, "ServiceAccount") | {"given"}
        assert pod["serviceAccountName"] in accounts
    for kind in ("ClusterRole", "Role"):
        bindings = manifest.of_kind(made, f"{kind}Binding")
        assert {one["roleRef"]["name"] for one in bindings} == manifest.names(made, kind)


def test_without_a_choice_of_storage_nothing_is_installed(template: Template) -> None:
    texts = ("# [[classes]]\n", "classes = []\n", 'devices = ["/dev/sdb"]\n')
    nothing: list[Values] = [{}, {"settings": {"log_level": "debug"}}]
    for given in nothing + [{"config": one} for one in texts]:
        with pytest.raises(Refused, match="no storage is configured: give `config` with"):
            template(given)
    pool: Values = {"node": {"nodeSelector": {"a": "b"}}}
    groups = '[[groups]]\nname = "carver"\ndevices = ["/dev/sdb"]\n'
    pools: list[Values] = [{"name": "a", "config": groups} | pool, {"name": "b"} | pool]
    with pytest.raises(Refused, match="no storage is configured for the pool b"):
        template({"pools": pools})
    pools[1]["demo"] = True
    template({"pools": pools})
    template({"config": 'classes = [\n  {name = "fast", group = "nvme", default = true},\n]\n'})


# Defaults


def test_the_default_comes_up_without_the_snapshot_crds(template: Template) -> None:
    made = template(DEMO)
    assert sidecars(made) == {"carver", "controller", "provisioner", "resizer"}
    assert "snapshot.storage.k8s.io" not in made.read_text()
    flags = manifest.flags(manifest.container(made, "provisioner"))
    assert flags["snapshot-orphan-sweep-interval"] == "0"


def test_snapshots_come_with_their_crds(template: Template) -> None:
    made = template(DEMO, "carver", SNAPSHOTS)
    assert "snapshotter" in sidecars(made)
    assert "VolumeSnapshotClass" in kinds(made)
    assert "VolumeGroupSnapshotClass" not in kinds(made)
    off = template(DEMO | {"sidecars": {"snapshotter": {"enabled": False}}}, "carver", SNAPSHOTS)
    assert "snapshotter" not in sidecars(off)


@both_modes
@pytest.mark.parametrize("groups", [True, False])
def test_the_snapshotter_sees_all_but_on_nodes_without_groups(
    groups: bool, central: bool, template: Template
) -> None:
    values = {"sidecars": {"snapshotter": {"enabled": True, "groups": groups}}}
    made = template(in_mode(DEMO | values, central))
    flags = manifest.flags(manifest.container(made, "snapshotter"))
    assert flags["feature-gates"] == f"CSIVolumeGroupSnapshot={str(groups).lower()}"
    # With it the sidecar sees only what has a label that groups never have.
    assert ("node-deployment" in flags) is not (groups or central)
    assert ("leader-election" in flags) is central
    [account] = {
        pod["serviceAccountName"]
        for pod in manifest.pod_specs(made)
        if "snapshotter" in {one["name"] for one in pod["containers"]}
    }
    assert account == ("carver-controller" if central else "carver-node")


def test_group_snapshots_have_a_class_where_they_are_wanted(template: Template) -> None:
    values = {"sidecars": {"snapshotter": {"enabled": True, "groups": True}}}
    made = template(DEMO | values)
    one = manifest.the(made, "VolumeGroupSnapshotClass")
    assert one["apiVersion"] == "groupsnapshot.storage.k8s.io/v1"
    with pytest.raises(Refused, match=r"snapshotter\.enabled"):
        template(DEMO | {"sidecars": {"snapshotter": {"groups": True}}})


@both_modes
def test_changed_blocks_are_served_under_the_certificate_s_name(
    central: bool, template: Template
) -> None:
    assert "cbt.storage.k8s.io" not in template(in_mode(DEMO, central)).read_text()
    made = template(in_mode(DEMO | {"sidecars": {"snapshotMetadata": METADATA}}, central))
    flags = manifest.flags(manifest.container(made, "snapshot-metadata"))
    own = manifest.container(made, "snapshot-metadata")
    [path] = [one["mountPath"] for one in own["volumeMounts"] if one["name"] == "snapshot-metadata"]
    assert flags["tls-cert"].startswith(f"{path}/")
    announced = manifest.the(made, "SnapshotMetadataService")
    assert announced["apiVersion"] == "cbt.storage.k8s.io/v1beta1"
    [driver] = manifest.names(made, "CSIDriver")
    assert announced["metadata"]["name"] == driver
    assert announced["spec"] == {
        "address": "carver-snapshot-metadata.storage:6443",
        "audience": driver,
        "caCert": "cGVt",
    }
    services = {one["metadata"]["name"]: one for one in manifest.of_kind(made, "Service")}
    service = services["carver-snapshot-metadata"]
    pod = manifest.the(made, "Deployment" if central else "DaemonSet")["spec"]["template"]
    # The certificate's key is nowhere else.
    secrets = [
        volume["secret"]["secretName"]
        for spec in manifest.pod_specs(made)
        for volume in spec["volumes"]
        if "secret" in volume
    ]
    assert secrets == ["changed-blocks"]
    assert "changed-blocks" in str(pod)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [port] = service["spec"]["ports"]
    [_, of_pod] = own["ports"]
    assert (port["port"], port["targetPort"]) == (6443, of_pod["name"])
    assert of_pod["containerPort"] == int(flags["port"])
    roles = {one["metadata"]["name"]: one for one in manifest.of_kind(made, "ClusterRole")}
    verbs = {
        verb for rule in roles[f"{driver}-snapshot-metadata"]["rules"] for verb in rule["verbs"]
    }
    assert verbs == {"get", "create"}


# Pools and releases


def test_pools_have_configurations_of_their_own_under_one_driver(
    template: Template, tmp_path: Path
) -> None:
    made = template(read(Path(__file__).parent / "values" / "pools.yaml"))
    assert len(manifest.of_kind(made, "CSIDriver")) == 1
    nvme, bulk = manifest.of_kind(made, "DaemonSet")
    names = [one["metadata"]["name"] for one in (nvme, bulk)]
    assert names == ["carver-node-nvme", "carver-node-bulk"]
    selectors = [one["spec"]["selector"]["matchLabels"] for one in (nvme, bulk)]
    assert selectors[0] != selectors[1]
    [(fast_pod, fast), (bulk_pod, slow)] = manifest.configurations(made, tmp_path)
    assert [one.name for one in fast.classes] == ["fast"]
    assert [one.name for one in slow.classes] == ["bulk"]
    assert (fast.log_level, slow.log_level) == ("debug", "warning")
    assert (fast.lvm, slow.lvm) == ("direct", "host")
    assert fast_pod["nodeSelector"]["disks"] == "nvme"
    assert fast_pod["nodeSelector"]["kubernetes.io/os"] == "linux"
    assert fast_pod["tolerations"] == [{"key": "storage", "operator": "Exists"}]
    # What is false or empty in a pool outweighs, too.
    assert "tolerations" not in bulk_pod
    assert (fast_pod.get("hostIPC"), bulk_pod["hostPID"]) == (None, True)
    assert "/run/udev" not in manifest.host_paths(fast_pod).values()
    assert bulk_pod["containers"][0]["image"] == "localhost/carver:0.1.0-bulk"
    # The one controller asks both, and the resizer of nodes without one asks either.
    assert (
        fast.controllers
        == slow.controllers
        == values.Address("carver-controller.storage.svc", 9811)
    )
    distributed = in_mode(read(Path(__file__).parent / "values" / "pools.yaml"), central=False)
    pod = manifest.the(template(distributed), "Deployment")["spec"]["template"]["spec"]
    [term] = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for one in (nvme, bulk):
        labels = one["spec"]["template"]["metadata"]["labels"].items()
        assert term["labelSelector"]["matchLabels"].items() <= labels


def test_two_releases_have_nothing_in_common(template: Template, tmp_path: Path) -> None:
    def shared(path: Path) -> set[tuple[str, str]]:
        """What the whole cluster, or a node, has once of a name."""
        found = {
            (one["kind"], one["metadata"]["name"])
            for one in manifest.objects(path)
            if "namespace" not in one["metadata"]
        }
        common = {"/dev", "/sys/fs/cgroup", "/run/udev", "/etc/lvm", "/run/lock/lvm"}
        kubelet = {f"/var/lib/kubelet/{name}" for name in ("plugins", "pods", "plugins_registry")}
        hosts = {
            place for pod in manifest.pod_specs(path) for place in manifest.host_paths(pod).values()
        }
        return found | {("path", place) for place in hosts - common - kubelet}

    first = template(DEMO, "carver", SNAPSHOTS)
    second = template(DEMO | {"driverName": "two.csi.carver"}, "two", SNAPSHOTS)
    assert shared(first) & shared(second) == set()
    one, two = (the_configuration(path, tmp_path) for path in (first, second))
    assert one.endpoint != two.endpoint
    assert one.topology_key != two.topology_key
    assert [one.definitions[0].file, two.definitions[0].file] == [
        settings.BackingFile(Path("/var/lib/carver/carver.img")),
        settings.BackingFile(Path("/var/lib/two.csi.carver/carver.img")),
    ]
    # In one namespace, too.
    names = [
        {(found["kind"], found["metadata"]["name"]) for found in manifest.objects(path)}
        for path in (first, second)
    ]
    assert names[0] & names[1] == set()


# Single values


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"lvm2": "host", "udev": False}, "udev must be true"),
        ({"settings": {"metrics_address": ":1"}}, "settings.metrics_address"),
        ({"settings": {"controllers": "a:1"}}, "settings.controllers"),
        ({"settings": {"controller_address": ":1"}}, "settings.controller_address"),
        # Of a chart before the controller's.
        ({"resizer": {"replicas": 1}}, "resizer"),
        ({"pools": [{"name": "a"}]}, "nodeSelector"),
        (
            {"pools": [{"name": "a", "node": {"nodeSelector": {"a": "b"}}}] * 2},
            "a is there twice",
        ),
        ({"podMonitor": {"enabled": True}, "metrics": {"enabled": False}}, "need metrics"),
        ({"sidecars": {"snapshotMetadata": {"enabled": True}}}, "tlsSecret and caCert"),
        ({"attach": True, "controller": {"enabled": False}}, "attach needs controller.enabled"),
        ({"settings": {"attach": True}}, "settings.attach"),
        ({"inlinePolicy": {"enabled": True}}, "limits nothing"),
        # Carver's 10G is 10Gi, Kubernetes' is not.
        ({"inlinePolicy": {"enabled": True, "maximumSize": "10G"}}, "maximumSize"),
        ({"inlinePolicy": {"enabled": True, "serviceAccounts": ["cache"]}}, "serviceAccounts"),
        (
            {
                "controller": {"enabled": False},
                "sidecars": {"snapshotMetadata": METADATA},
                "pools": [{"name": "a", "node": {"nodeSelector": {"a": "b"}}}],
            },
            "clusters of one node",
        ),
        ({"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}, "enable one"),
        # A typo.
        ({"node": {"nodeselector": {}}}, "nodeselector"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_contradicting_values_are_refused(values: Values, word: str, template: Template) -> None:
    with pytest.raises(Refused, match=re.escape(word)):
        template(DEMO | values)


@both_modes
def test_the_cluster_is_listed_only_where_orphans_are_looked_for(
    central: bool, template: Template, tmp_path: Path
) -> None:
    name = "lvm.csi.carver-orphans"
    assert name not in manifest.names(template(in_mode(DEMO, central)), "ClusterRole")
    made = template(in_mode(DEMO | {"orphans": {"enabled": True}}, central))
    roles = manifest.of_kind(made, "ClusterRole")
    [role] = [one for one in roles if one["metadata"]["name"] == name]
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list"}
    assert ("pods" in role["rules"][0]["resources"]) is not central
    bindings = manifest.of_kind(made, "ClusterRoleBinding")
    [subjects] = [one["subjects"] for one in bindings if one["roleRef"]["name"] == name]
    account = "carver-controller" if central else "carver-node"
    assert [one["name"] for one in subjects] == [account]
    node = the_configuration(made, tmp_path)
    assert node.orphan_interval_seconds == (0 if central else 600)
    if central:
        assert manifest.controller(made).orphan_interval_seconds == 600


@both_modes
def test_pods_are_listed_only_by_a_controller(central: bool, template: Template) -> None:
    """For the places of their other volumes, also where no Events tell of volumes' health."""

    def rights(seconds: int) -> set[tuple[str, str]]:
        values = DEMO | {"controller": {"healthIntervalSeconds": seconds}}
        made = template(in_mode(values, central))
        if central:
            assert manifest.controller(made).health_interval_seconds == seconds
        rules = [rule for one in manifest.of_kind(made, "ClusterRole") for rule in one["rules"]]
        return {
            (verb, what) for rule in rules for verb in rule["verbs"] for what in rule["resources"]
        }

    assert rights(60) == rights(0)
    assert (("list", "pods") in rights(0)) is central


def test_volumes_are_attached_only_where_that_is_wanted(template: Template, tmp_path: Path) -> None:
    def found(attach: bool) -> set[tuple[str, str]]:
        made = template(DEMO | {"attach": attach})
        own = manifest.controller(made).attach, the_configuration(made, tmp_path).attach
        driver = manifest.the(made, "CSIDriver")["spec"]["attachRequired"]
        assert (*own, driver, "attacher" in sidecars(made)) == (attach,) * 4
        rules = [rule for one in manifest.of_kind(made, "ClusterRole") for rule in one["rules"]]
        return {
            (verb, what) for rule in rules for verb in rule["verbs"] for what in rule["resources"]
        }

    # kubernetes-csi/external-attacher, v4.13.0, deploy/kubernetes/rbac.yaml.
    assert found(True) - found(False) == {
        *((verb, "volumeattachments") for verb in ("get", "list", "watch", "patch")),
        ("patch", "volumeattachments/status"),
    }
    for right in ("get", "list", "watch", "patch"):
        assert (right, "persistentvolumes") in found(True)
    for right in ("get", "list", "watch"):
        assert (right, "csinodes") in found(True)


# Inline volumes


def the_policy(made: Path) -> Values:
    """What the only policy says, its expressions in one line each."""
    policy = manifest.the(made, "ValidatingAdmissionPolicy")
    binding = manifest.the(made, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    return dict(policy["spec"])


def test_inline_volumes_are_limited_only_where_that_is_wanted(template: Template) -> None:
    assert "ValidatingAdmissionPolicy" not in template(DEMO).read_text()
    made = template(DEMO | {"inlinePolicy": {"enabled": True, "maximumSize": "10Gi"}})
    spec = the_policy(made)
    # Else a pod that the policy could not judge would have them.
    assert spec["failurePolicy"] == "Fail"
    [rule] = spec["matchConstraints"]["resourceRules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE"], ["pods"])
    # Other pods, and other drivers', are not judged.
    [driver] = manifest.names(made, "CSIDriver")
    [condition] = spec["matchConditions"]
    assert condition["expression"] == (
        "has(object.spec.volumes) && object.spec.volumes.exists(volume, "
        f'has(volume.csi) && volume.csi.driver == "{driver}")'
    )


def test_an_inline_volume_s_size_is_what_carver_would_make(template: Template) -> None:
    made = template(DEMO | {"inlinePolicy": {"enabled": True, "maximumSize": "512Mi"}})
    spec = the_policy(made)
    [driver] = manifest.names(made, "CSIDriver")
    [sizes] = spec["variables"]
    text = sizes["expression"]
    assert text.startswith(
        "object.spec.volumes.filter(volume, "
        f'has(volume.csi) && volume.csi.driver == "{driver}").map(volume, '
    )
    # With and without Carver's prefix, and the default where there is none.
    assert re.findall(r'"([^"]+)" in ', text) == [
        parameters.PREFIX + parameters.SIZE,
        parameters.SIZE,
    ]
    defaults = set(re.findall(r'[?:] "([0-9][^"]*)"', text))
    assert {values.parse_size(one) for one in defaults} == {plan.DEFAULT_SIZE_BYTES}
    [validation] = spec["validations"]
    found = re.fullmatch(
        r'variables\.sizes\.all\(size, size\.matches\("(.+)"\) && '
        r'quantity\(size\)\.compareTo\(quantity\("512Mi"\)\) <= 0\)',
        validation["expression"],
    )
    assert found is not None
    # What it lets through means the same to both.
    units = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
    for unit, size_bytes in units.items():
        assert re.search(found[1], f"3{unit}")
        assert values.parse_size(f"3{unit}") == 3 * size_bytes
    for text in ("", "10G", "10GB", "10GiB", " 1Gi", "1Gi ", "1.5Gi", "-1Gi", "1e3", "1Gi\n2Gi"):
        assert not re.search(found[1], text)
    assert "512Mi" in validation["message"]


@pytest.mark.parametrize(
    ("namespaces", "accounts"),
    [(["build"], []), ([], ["web/cache"]), (["build", "test"], ["web/cache"])],
)
def test_only_named_namespaces_and_accounts_may_have_inline_volumes(
    namespaces: list[str], accounts: list[str], template: Template
) -> None:
    given = {"enabled": True, "namespaces": namespaces, "serviceAccounts": accounts}
    spec = the_policy(template(DEMO | {"inlinePolicy": given}))
    assert "variables" not in spec
    [validation] = spec["validations"]
    found = re.fullmatch(
        r"request\.namespace in (\[.*\]) \|\| request\.namespace \+ \"/\" \+ "
        r"\(has\(object\.spec\.serviceAccountName\) \? object\.spec\.serviceAccountName : "
        r'"default"\) in (\[.*\])',
        validation["expression"],
    )
    assert found is not None
    assert [json.loads(one) for one in found.groups()] == [namespaces, accounts]
    assert validation["reason"] == "Forbidden"


# Between controller and nodes


def test_without_a_controller_no_pod_serves_another(template: Template, tmp_path: Path) -> None:
    made = template(DISTRIBUTED)
    node = the_configuration(made, tmp_path)
    assert (node.controller_address, node.controllers) == (None, None)
    assert manifest.of_kind(made, "Service") == []
    assert "enrolment" not in made.read_text()
    # A right for each account, and the nodes' token as any pod has it.
    assert "automountServiceAccountToken" not in manifest.node_pod(made)


@pytest.mark.parametrize("hosts", [(), ("node",), ("controller",)])
def test_controller_and_nodes_reach_each_other_and_no_others_reach_them(
    hosts: tuple[str, ...], template: Template
) -> None:
    given = {one: {"hostNetwork": True} for one in hosts}
    made = template(DEMO | {"networkPolicy": {"enabled": True}} | given)
    policies = manifest.of_kind(made, "NetworkPolicy")
    component = "app.kubernetes.io/component"
    rules = {
        one["spec"]["podSelector"]["matchLabels"][component]: one["spec"]["ingress"]
        for one in policies
    }
    assert rules.keys() == {"node", "controller"}
    for of, peer, port in (
        ("node", "controller", "controller"),
        ("controller", "node", "enrolment"),
    ):
        [rule] = rules[of]
        assert [one["port"] for one in rule["ports"]] == [port]
        # A pod with its node's network has no address of its own.
        assert ("from" in rule) is (peer not in hosts)
        for one in rule.get("from", []):
            assert one.keys() == {"podSelector"}
            assert one["podSelector"]["matchLabels"][component] == peer
            pods = [it["spec"]["template"] for it in manifest.objects(made) if it["kind"] in PODS]
            chosen = [
                it
                for it in pods
                if one["podSelector"]["matchLabels"].items() <= it["metadata"]["labels"].items()
            ]
            assert len(chosen) == 1


def test_deleted_nodes_are_forgotten_only_where_that_is_wanted(template: Template) -> None:
    assert not manifest.controller(template(DEMO)).forget_deleted_nodes
    wanted = DEMO | {"controller": {"forgetDeletedNodes": True}}
    assert manifest.controller(template(wanted)).forget_deleted_nodes


@pytest.mark.parametrize("has_snapshotter", [True, False])
def test_contents_are_listed_where_deleted_nodes_are_forgotten(
    has_snapshotter: bool, template: Template
) -> None:
    """The snapshotter may do so anyway."""

    def rights(forget: bool) -> set[tuple[str, str]]:
        values = DEMO | {
            "controller": {"forgetDeletedNodes": forget},
            "sidecars": {"snapshotter": {"enabled": has_snapshotter}},
        }
        rules = manifest.of_kind(template(values), "ClusterRole")
        return {
            (verb, what)
            for one in rules
            for rule in one["rules"]
            for verb in rule["verbs"]
            for what in rule["resources"]
        }

    more = set() if has_snapshotter else {("list", "volumesnapshotcontents")}
    assert rights(forget=True) - rights(forget=False) == more


FORGETS: Values = {"controller": {"forgetDeletedNodes": True}}
CLAIMS_GO = {("delete", "persistentvolumeclaims"), ("create", "pods/eviction")}


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, set()),
        (FORGETS | {"releaseLostClaims": {"enabled": True}}, CLAIMS_GO),
        (
            {"evacuation": {"enabled": True}},
            {*CLAIMS_GO, ("create", "persistentvolumeclaims"), ("patch", "nodes")},
        ),
        (
            FORGETS | {"evacuation": {"enabled": True}, "releaseLostClaims": {"enabled": True}},
            {*CLAIMS_GO, ("create", "persistentvolumeclaims"), ("patch", "nodes")},
        ),
    ],
    ids=["neither", "release", "evacuation", "both"],
)
def test_claims_go_only_by_the_rights_of_evacuation_and_release(
    given: Values, more: set[tuple[str, str]], template: Template
) -> None:
    """The account's rights grow by no others, and the nodes' account has none."""

    def rights(values: Values) -> set[tuple[str, str]]:
        made = template(DEMO | values)
        accounts = {
            subject["name"]
            for kind in ("ClusterRoleBinding", "RoleBinding")
            for binding in manifest.of_kind(made, kind)
            for subject in binding["subjects"]
        }
        assert accounts == {"carver-controller"}
        return {
            (verb, what)
            for one in manifest.of_kind(made, "ClusterRole")
            for rule in one["rules"]
            for verb in rule["verbs"]
            for what in rule["resources"]
        }

    usual = rights({key: given[key] for key in given if key == "controller"})
    assert rights(given) - usual == more
    assert not usual & {*CLAIMS_GO, ("create", "persistentvolumeclaims"), ("patch", "nodes")}


def test_volumes_are_moved_and_claims_released_only_where_that_is_wanted(
    template: Template, tmp_path: Path
) -> None:
    made = template(DEMO)
    controller = manifest.controller(made)
    assert not controller.evacuation
    assert not controller.release_lost_claims
    assert not the_configuration(made, tmp_path).evacuation
    wanted = {
        "evacuation": {"enabled": True, "graceSeconds": 7200},
        "releaseLostClaims": {"enabled": True},
    }
    made = template(DEMO | FORGETS | wanted)
    controller = manifest.controller(made)
    assert controller.evacuation
    assert controller.evacuation_grace_seconds == 7200
    assert controller.release_lost_claims
    assert the_configuration(made, tmp_path).evacuation


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (DISTRIBUTED | {"evacuation": {"enabled": True}}, "needs controller.enabled"),
        (DISTRIBUTED | {"releaseLostClaims": {"enabled": True}}, "needs controller.enabled"),
        (DEMO | {"releaseLostClaims": {"enabled": True}}, "controller.forgetDeletedNodes"),
        (DEMO | {"settings": {"evacuation": True}}, "settings.evacuation"),
        (DEMO | {"settings": {"release_lost_claims": True}}, "settings.release_lost_claims"),
    ],
)
def test_what_evacuation_and_release_lack_is_refused(
    given: Values, word: str, template: Template
) -> None:
    with pytest.raises(Refused, match=re.escape(word)):
        template(given)


@pytest.mark.parametrize("hosts", [False, True])
def test_nodes_reach_each_other_only_to_move_volumes(hosts: bool, template: Template) -> None:
    def peers(enabled: bool) -> list[object]:
        given = {"evacuation": {"enabled": enabled}, "node": {"hostNetwork": hosts}}
        made = template(DEMO | {"networkPolicy": {"enabled": True}} | given)
        component = "app.kubernetes.io/component"
        [rule] = [
            one["spec"]["ingress"][0]
            for one in manifest.of_kind(made, "NetworkPolicy")
            if one["spec"]["podSelector"]["matchLabels"][component] == "node"
        ]
        assert [port["port"] for port in rule["ports"]] == ["controller"]
        return [one["podSelector"]["matchLabels"][component] for one in rule.get("from", [])]

    assert peers(enabled=False) == ["controller"]
    # A node with its host's network has no address of its own.
    assert peers(enabled=True) == ([] if hosts else ["controller", "node"])


def test_nodes_on_their_hosts_network_find_the_controllers_service(template: Template) -> None:
    pod = manifest.node_pod(template(DEMO | {"node": {"hostNetwork": True}}))
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    chosen = DEMO | {"node": {"hostNetwork": True, "dnsPolicy": "Default"}}
    assert manifest.node_pod(template(chosen))["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in manifest.node_pod(template(DEMO))
    distributed = DISTRIBUTED | {"node": {"hostNetwork": True}}
    assert "dnsPolicy" not in manifest.node_pod(template(distributed))


@pytest.mark.parametrize(
    ("central", "modify", "does"),
    [
        (True, "auto", True),
        (True, False, False),
        (False, "auto", False),
        (False, True, True),
    ],
)
def test_volumes_are_modified_in_any_cluster_with_a_controller(
    central: bool, modify: object, does: bool, template: Template
) -> None:
    made = template(in_mode(DEMO | {"sidecars": {"resizer": {"modify": modify}}}, central))
    flags = manifest.flags(manifest.container(made, "resizer"))
    assert flags.get("feature-gates") == (None if does else "VolumeAttributesClass=false")


def test_without_a_controller_a_provisioner_asks_its_own_node_only(template: Template) -> None:
    flags = manifest.flags(manifest.container(template(DISTRIBUTED), "provisioner"))
    assert {"node-deployment", "strict-topology"} <= flags.keys()
    assert flags["capacity-ownerref-level"] == "0"


def test_any_setting_and_argument_is_passed_through_as_it_is(
    template: Template, tmp_path: Path
) -> None:
    large = 10 << 40
    values = {"settings": {"file_size": large, "wipe": "none", "devices": ["/dev/sdb"]}}
    loaded = the_configuration(template(DEMO | values), tmp_path)
    assert (loaded.wipe, loaded.devices) == ("none", ("/dev/sdb",))
    file = loaded.definitions[0].file
    assert file is not None
    assert file.size_bytes == large
    made = template(read(Path(__file__).parent / "values" / "container.yaml"))
    loaded = the_configuration(made, tmp_path)
    assert (loaded.wipe, loaded.devices) == ("none", ("/dev/sdb", "/dev/sdc"))


def test_an_image_can_be_named_by_its_digest(template: Template) -> None:
    digest = "sha256:" + "0" * 64
    values = {"sidecars": {"provisioner": {"image": {"tag": "", "digest": digest}}}}
    name = manifest.container(template(DEMO | values), "provisioner")["image"]
    assert name == f"registry.k8s.io/sig-storage/csi-provisioner@{digest}"


def test_the_probes_need_no_metrics(template: Template, tmp_path: Path) -> None:
    made = template(DEMO | {"metrics": {"enabled": False}})
    loaded = the_configuration(made, tmp_path)
    assert loaded.metrics_address is None
    assert loaded.health_address == values.Address("", 9898)
    one = manifest.container(made, "carver")
    assert one["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert one["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}


def test_a_wanted_affinity_holds_on_the_processors_of_the_image(template: Template) -> None:
    made = template(read(Path(__file__).parent / "values" / "node.yaml"))
    pod = manifest.the(made, "DaemonSet")["spec"]["template"]["spec"]
    nodes = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    processors = {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]}
    first, second = nodes["nodeSelectorTerms"]
    assert [one["key"] for one in first["matchExpressions"]] == [
        "node-role.kubernetes.io/control-plane",
        "kubernetes.io/arch",
    ]
    assert second["matchExpressions"] == [processors]
    assert second["matchFields"][0]["values"] == ["node-1"]


@pytest.mark.parametrize(
    ("kind", "value", "endpoints"),
    [
        ("PodMonitor", "podMonitor", "podMetricsEndpoints"),
        ("ServiceMonitor", "serviceMonitor", "endpoints"),
    ],
)
@both_modes
def test_alerts_and_dashboard_name_the_node(
    kind: str, value: str, endpoints: str, central: bool, template: Template
) -> None:
    more = {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "carver"}
    made = template(in_mode(DEMO | {value: {"enabled": True, "relabelings": [more]}}, central))
    node = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"}
    for endpoint in manifest.the(made, kind)["spec"][endpoints]:
        assert endpoint["relabelings"] == [node, more]


# What each container has at a port of its own, by the port's name.
SHOWN = {
    "carver": "metrics",
    "controller": "metrics",
    "provisioner": "provisioner",
    "resizer": "resizer",
    "attacher": "attacher",
    "snapshotter": "snapshotter",
    "snapshot-metadata": "cbt-metrics",
}
OBSERVED: Values = {
    "attach": True,
    "sidecars": {"snapshotter": {"enabled": True}, "snapshotMetadata": METADATA},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
}


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
@both_modes
def test_prometheus_asks_every_container_and_may(
    monitor: str, central: bool, template: Template
) -> None:
    made = template(in_mode(DEMO | OBSERVED | {monitor: {"enabled": True}}, central))
    kind, endpoints = monitor[0].upper() + monitor[1:], "podMetricsEndpoints"
    pods = [one["spec"]["template"] for one in manifest.objects(made) if one["kind"] in PODS]
    found = manifest.the(made, kind)["spec"]
    shown = set(SHOWN.values()) - (set() if central else {"attacher"})
    chosen, ports = found["selector"]["matchLabels"].items(), {name: name for name in SHOWN}
    if kind == "ServiceMonitor":
        endpoints = "endpoints"
        [service] = [
            one
            for one in manifest.of_kind(made, "Service")
            if chosen <= one["metadata"]["labels"].items()
        ]
        chosen = service["spec"]["selector"].items()
        ports = {one["name"]: one["targetPort"] for one in service["spec"]["ports"]}
        assert service["spec"]["publishNotReadyAddresses"]
        assert ports == {name: name for name in shown}
    assert sorted(one["port"] for one in found[endpoints]) == sorted(shown)
    assert {one["path"] for one in found[endpoints]} == {"/metrics"}
    policies = manifest.of_kind(made, "NetworkPolicy")
    for pod in pods:
        labels = pod["metadata"]["labels"].items()
        assert chosen <= labels
        [policy] = [
            one["spec"]
            for one in policies
            if one["spec"]["podSelector"]["matchLabels"].items() <= labels
        ]
        [open_to_prometheus] = [
            {port["port"] for port in rule["ports"]}
            for rule in policy["ingress"]
            if rule.get("from") == OBSERVED["networkPolicy"]["from"]
        ]
        for one in pod["spec"]["containers"]:
            assert SHOWN[one["name"]] in {port["name"] for port in one["ports"]}
            assert SHOWN[one["name"]] in open_to_prometheus


@both_modes
def test_the_lab_s_prometheus_scrapes_what_the_pod_monitor_names(
    central: bool, template: Template
) -> None:
    made = template(in_mode(DEMO | OBSERVED | {"podMonitor": {"enabled": True}}, central))
    found, lab = manifest.the(made, "PodMonitor"), monitoring.monitor(30)
    assert found["metadata"]["name"] == monitoring.MONITOR_NAME
    # Without a controller nothing is attached.
    every = lab["podMetricsEndpoints"]
    ports = [one for one in every if central or one["port"] != "attacher"]
    assert found["spec"] == {**lab, "podMetricsEndpoints": ports}


@both_modes
def test_each_sidecar_has_metrics_at_a_port_and_a_leader_its_health(
    central: bool, template: Template
) -> None:
    made = template(in_mode(DEMO | OBSERVED, central))
    for pod in manifest.pod_specs(made):
        ports = [port["containerPort"] for one in pod["containers"] for port in one["ports"]]
        assert len(ports) == len(set(ports))
        for one in pod["containers"]:
            if one["name"] in manifest.OWN:
                continue
            given, flags = one["ports"][0], manifest.flags(one)
            assert given["name"] == SHOWN[one["name"]]
            assert flags["http-endpoint"] == f":{given['containerPort']}"
            # kubernetes-csi/csi-lib-utils, leaderelection: there without a leader's election never.
            assert ("livenessProbe" in one) is ("leader-election" in flags)
            if "livenessProbe" in one:
                asked = {"path": "/healthz/leader-election", "port": given["name"]}
                assert one["livenessProbe"]["httpGet"] == asked
            # How much it logs is a value.
            assert flags["v"] == "1"


def test_alerts_and_dashboard_are_those_of_deploy_monitoring(template: Template) -> None:
    made = template(DEMO | {"prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}})
    monitoring = CHART.parents[1] / "monitoring"
    rules = manifest.the(made, "PrometheusRule")["spec"]
    assert rules == yaml.safe_load((monitoring / "alerts.yaml").read_text())
    [dashboard] = [
        one for one in manifest.of_kind(made, "ConfigMap") if "config.toml" not in one["data"]
    ]
    [text] = dashboard["data"].values()
    assert yaml.safe_load(text) == yaml.safe_load((monitoring / "dashboard.json").read_text())
