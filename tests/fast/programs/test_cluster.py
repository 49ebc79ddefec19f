"""The checks of tests/cluster, against a cluster in memory: what they find, and what they leave.

Nothing that a run has made may be there after it, however it ended.
"""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import kubernetes_validate
import manifest
import pytest
from cluster import (
    checks,
    installation,
    lab_checks,
    lying,
    nodes,
    objects,
    releasing,
    removal,
    run,
    site,
)
from cluster.kubectl import Kubectl, Object, Refused, path
from fakes import cluster as fake_cluster
from fakes.cluster import DRIVER, FakeCluster, FakeLab, Key

from agent.extras.controller import enrolment
from agent.extras.evacuation import lost_claims

PROGRAM = Path(run.__file__)
REFUSED = 'Error from server (Forbidden): pods is forbidden: User "x" cannot'
PASSING = "The connection to the server fake:6443 was refused - did you specify the right host?"


class Clock:
    """Time that passes where it is slept, and a little at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    return FakeCluster(tmp_path)


def code_of(cluster: FakeCluster, *arguments: str) -> int:
    """The exit code of a run."""
    parsed = run.parser().parse_args(["--limit", "20", *arguments])
    act = run.clean if "--clean" in arguments else run.try_all
    return act(parsed, Kubectl(cluster.execute), Clock())


class Tried(Protocol):
    """Run the program; check its exit code and return what it printed."""

    def __call__(self, code: int, *arguments: str) -> str: ...


@pytest.fixture
def tried(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> Tried:
    def check(code: int, *arguments: str) -> str:
        assert code_of(cluster, *arguments) == code
        return capsys.readouterr().out

    return check


def left(cluster: FakeCluster) -> list[str]:
    """What a run has left: objects with its label or in its place, labels, cordons, volumes."""
    found = [
        f"{kind} {name}"
        for (kind, namespace, name), one in cluster.objects.items()
        if objects.PREFIX in f"{namespace} {name}"
        or kind.startswith(("persistentvolume", "volumesnapshotcontent"))
        or objects.CORDONED in one["metadata"]["labels"]
        or (kind == "nodes" and is_kept_apart(cluster, (kind, namespace, name)))
    ]
    return found + [f"volume {name}" for name in cluster.held]


def is_kept_apart(cluster: FakeCluster, node: Key) -> bool:
    """Whether a node is cordoned, or Carver was taken from it."""
    one = cluster.objects[node]
    taints = [it["key"] for it in one["spec"].get("taints", [])]
    return bool(one["spec"].get("unschedulable")) or objects.WITHOUT_CARVER in taints


def outcomes(printed: str) -> dict[str, str]:
    """The table's outcomes, by the check."""
    table = printed.rpartition("\n\n")[2]
    rows = re.findall(r"^(\S+) +(passed|FAILED|not here|off) ", table, re.MULTILINE)
    return dict(rows)


# The checks


def test_every_check_passes_where_all_is_well(cluster: FakeCluster, tried: Tried) -> None:
    printed = tried(run.WELL)
    assert outcomes(printed) == dict.fromkeys([*checks.ALL, "removed"], "passed")
    assert left(cluster) == []


@pytest.mark.parametrize("check", checks.ALL)
def test_each_check_can_be_run_alone(cluster: FakeCluster, check: str, tried: Tried) -> None:
    printed = tried(run.WELL, "--only", check)
    assert outcomes(printed) == {check: "passed", "removed": "passed"}
    assert left(cluster) == []


@pytest.fixture
def lab(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeLab:
    made = FakeLab(cluster)
    monkeypatch.setattr(run, "the_lab", lambda: made)
    return made


@pytest.mark.parametrize("check", lab_checks.ALL)
def test_each_check_that_wants_a_lab_can_be_run_alone(
    cluster: FakeCluster, lab: FakeLab, check: str, tried: Tried
) -> None:
    printed = tried(run.WELL, "--lab", "--only", check)
    assert outcomes(printed) == {check: "passed", "removed": "passed"}
    assert left(cluster) == []
    assert cluster.off == set()
    assert cluster.carver_nodes() in (["one", "two"], ["two", "one"])


def test_where_kubelet_says_to_the_pod_what_is_wrong_no_event_does(
    cluster: FakeCluster, lab: FakeLab, tried: Tried
) -> None:
    cluster.wrong.add("kubelet asks")
    assert "was said of claim and pod, by the pod's status" in tried(
        run.WELL, "--lab", "--only", "sick-disk"
    )
    cluster.wrong.add("said twice")
    assert "the pod hears of DiskMissing twice: by the pod's status and by an Event" in tried(
        run.WRONG, "--lab", "--only", "sick-disk"
    )


@pytest.mark.parametrize("check", lab_checks.ALL)
def test_without_a_lab_no_check_touches_a_machine(
    cluster: FakeCluster, lab: FakeLab, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(installation.Unusable, match="--lab"):
        code_of(cluster, "--only", check)
    assert lab.done == []
    assert code_of(cluster, "--only", "claim") == run.WELL
    assert lab.done == []


@pytest.mark.parametrize(
    ("wrong", "check", "note"),
    [
        ("lines lost", "power-cut", "lines were acknowledged, 2 are there"),
        ("gap", "reboot", "are not all there, or not in order"),
        ("data lost", "clock", "reads ''"),
        ("stays silent", "pause", "pod pause-waiting is ready"),
        ("mode stays", "modes", "the controller is still installed"),
        ("never scheduled", "dead-node", "not within"),
        ("never ready", "controller-killed", "is ready"),
        ("unsaid", "sick-disk", "not within 20 s: Carver on one is not ready"),
        ("no event", "sick-disk", "not within 20 s: an Event says DiskMissing"),
        ("unsaid to the pod", "sick-disk", "not within 20 s: the pod hears of DiskMissing"),
        ("survives", "controller-killed", "no process of `carver controller` was found"),
        ("left out", "quiet-node", "not within 20 s: two is silent"),
        ("shorter", "quiet-node", "lists the volumes of a cluster without two"),
        ("never enrolled", "authority-lost", "every controller reaches every node"),
        ("same authority", "authority-lost", "trust the authority that was lost"),
        ("believed", "lying-node", "by a lie of one"),
        ("drawn", "lying-node", "that claims the topology of two was asked for"),
        ("uncounted", "lying-node", "0 refused answers of one were counted, not 2"),
        ("made on the copy", "cloned-group", "was given a node, and must not be"),
        ("deleted on the copy", "cloned-group", "was deleted, and is on two still"),
        ("forgotten soon", "forgotten-node", "is silent a controller says of data@x/pvc-"),
        ("never forgotten", "forgotten-node", "not within 320 s: PersistentVolume pvc-"),
        ("last line lost", "evacuation", "evacuation-db-0 had written "),
        ("gap", "evacuation", "lines of evacuation-db-0 are not all there, or not in order"),
        ("left behind", "evacuation", "not within 20 s: the writers of one run elsewhere"),
        ("never erased", "evacuation", "not within 20 s: what was left is erased"),
        ("released soon", "released-claim", "is not what it was: 870 s after three was deleted"),
        ("both released", "released-claim", "on one is not what it was: data-released-claim-db-0"),
        ("never released", "released-claim", "claim data-released-claim-db-0 is released and made"),
        ("not kept", "released-claim", "of the released claim is not kept"),
        ("not retained", "released-claim", "of the released claim is Delete, not Retain"),
        ("no note", "released-claim", "has no note that it was Delete"),
        ("not empty", "released-claim", "goes on where it was on three: its volume was not empty"),
        ("unsaid", "released-claim", "data-released-claim-db-0 says ReleasedOnNodeLoss"),
        (
            "gap",
            "released-claim",
            "lines of released-claim-db-0 are not all there, or not in order",
        ),
    ],
)
def test_a_failed_check_gives_the_lab_back_as_it_was(
    cluster: FakeCluster, lab: FakeLab, tried: Tried, wrong: str, check: str, note: str
) -> None:
    cluster.wrong.add(wrong)
    printed = tried(run.WRONG, "--lab", "--only", check)
    assert outcomes(printed)[check] == "FAILED"
    assert note in printed
    assert cluster.off == set()
    words = [word for word, _ in lab.done]
    removed = {node for word, node in lab.done if word == "remove"}
    off, on = ([it for word, it in lab.done if word == power] for power in ("off", "on"))
    assert [node for node in off if node not in removed] == on
    assert [node for word, node in lab.done if word == "install"][-1:] in ([], [""])
    assert words.count("pause") == words.count("resume")
    assert [one for one in words if one.startswith("clock")][-1:] in ([], ["clock 0"])
    assert words.count("add") == words.count("remove")
    assert words.count("make disk") == words.count("unmake disk")
    assert cluster.disks | cluster.hung == set()
    assert cluster.carver_nodes() in (["one", "two"], ["two", "one"])
    kept_from = [
        key for key in cluster.objects if key[0] == "nodes" and is_kept_apart(cluster, key)
    ]
    assert kept_from == []
    assert not [key for key in cluster.objects if key[2].endswith("-liar")]


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        *(("never ready", "added-node"), ("never released", "released-claim")),
        *(("not retained", "released-claim"), ("no note", "released-claim")),
    ],
)
def test_a_check_that_fails_on_an_added_node_leaves_nothing(
    cluster: FakeCluster, lab: FakeLab, tried: Tried, wrong: str, check: str
) -> None:
    cluster.wrong.add(wrong)
    printed = tried(run.WRONG, "--lab", "--only", check)
    assert outcomes(printed) == {check: "FAILED", "removed": "passed"}
    # The node is not asked what it holds, once it is removed.
    assert "says what it holds" not in printed
    assert left(cluster) == []


@pytest.mark.parametrize(
    ("wrong", "check", "note"),
    [
        ("data lost", "claim", "pod claim-second reads ''"),
        ("data lost", "two-pods", "reads ''"),
        ("data lost", "drain", "reads ''"),
        ("empty copy", "clone", "words: No such file or directory"),
        ("empty copy", "restore", "words: No such file or directory"),
        ("empty copy", "restore-anywhere", "words: No such file or directory"),
        ("by luck", "restore-anywhere", "pod restore-anywhere-pod-first is ready"),
        ("apart", "mixed-claims", "pod mixed-claims-pod-first is ready"),
        ("empty copy", "mixed-claims", "words: No such file or directory"),
        ("snapshots", "snapshot", "snapshot snapshot-monday is ready to use"),
        ("not found", "pre-provisioned", "snapshot pre-provisioned-found is ready to use"),
        ("empty copy", "pre-provisioned", "words: No such file or directory"),
        ("no group", "group-snapshot", "does the snapshot-controller have CSIVolumeGroupSnapshot"),
        ("half a group", "group-snapshot", "group snapshot group-snapshot-monday has 2 snapshots"),
        ("empty copy", "group-snapshot", "words: No such file or directory"),
        ("never modified", "attributes", "has the VolumeAttributesClass carver-checks-"),
        ("in name only", "attributes", "reads 4096 KiB ahead and then 4096, not 4096 and 0"),
        ("no reason", "expand-impossible", "claim expand-impossible-data says why it cannot grow"),
        ("enlarged", "expand-impossible", "bytes: data has no room for it"),
        ("stuck", "expand-impossible", "pod expand-impossible-second is ready"),
        ("never grows", "expand-impossible", "claim expand-impossible-data has 1024 MiB"),
        ("claim lost", "stopped", "pod stopped-waiting is ready"),
        ("says nothing", "stopped", "claim stopped-other says that two does not answer"),
        ("rights", "rights", "carver-system/carver-node, which nodes have, may in"),
        ("never grows", "expand-online", "claim expand-online-data has 1024 MiB"),
        ("small inside", "expand-online", "is larger than 486 MiB"),
        ("small inside", "expand-offline", "is larger than 486 MiB"),
        ("once", "once-pod", "pod once-pod-second was given a node, and must not be"),
        ("read-only", "read-only-block", "block-reader, which may only read, has written"),
        ("read-only", "read-only-many", "many-first, which may only read, has written"),
        ("empty copy", "read-only-many", "words: No such file or directory"),
        ("inline kept", "inline", "the volume of pod inline-pod goes"),
        ("writer dies", "restart", "pod restart-writer ended: Failed"),
        ("gap", "restart", "are not all there, or not in order"),
        ("not adopted", "adopt", "carver: cannot adopt it"),
        ("other handle", "adopt", "was adopted as another"),
        ("data lost", "adopt", "reads ''"),
        ("small device", "block", "the device has 511 MiB, 512 were claimed"),
        ("no image", "claim", "localhost/carver:0.1.0 is not on the node"),
    ],
)
def test_each_check_finds_what_it_is_for(
    cluster: FakeCluster, wrong: str, check: str, note: str, tried: Tried
) -> None:
    cluster.wrong = {wrong}
    printed = tried(run.WRONG, "--only", check)
    assert outcomes(printed) == {check: "FAILED", "removed": "passed"}
    assert note in printed
    cluster.held.pop(next((it for it in cluster.held if "csi-" in it), ""), None)
    assert left(cluster) == []


def test_a_claim_is_refused_while_its_node_is_away(cluster: FakeCluster, tried: Tried) -> None:
    assert "node two does not answer" in tried(run.WELL, "--only", "stopped")


def test_a_failure_shows_pods_events_and_logs(cluster: FakeCluster, tried: Tried) -> None:
    cluster.wrong = {"never ready"}
    printed = tried(run.WRONG, "--only", "claim", "--only", "inline")
    assert "claim: not within 20 s: pod claim-first is ready" in printed
    assert re.search(r'Pod claim-first: Running, two, waiting .*"ContainerCreating"', printed)
    assert "Warning FailedMount Pod claim-first (3x): mkfs failed: no room" in printed
    assert re.search(r'carver-\d+/carver: carver says "CreateVolume" of pvc-uid-\d+-', printed)
    assert "a line about something else" not in printed
    assert outcomes(printed) == {"claim": "FAILED", "inline": "FAILED", "removed": "passed"}
    assert left(cluster) == []


def test_a_failure_shows_snapshots_too(cluster: FakeCluster, tried: Tried) -> None:
    cluster.wrong = {"snapshots"}
    printed = tried(run.WRONG, "--only", "snapshot")
    assert "VolumeSnapshot snapshot-monday: ready to use: False" in printed
    assert re.search(r'/snapshotter: snapshotter says "CreateVolume" of snapcontent-uid-', printed)


def test_a_snapshot_that_no_node_takes_up_is_explained(cluster: FakeCluster, tried: Tried) -> None:
    cluster.distribute()
    cluster.wrong = {"snapshots"}
    printed = tried(run.WRONG, "--only", "snapshot")
    assert "--enable-distributed-snapshotting is missing" in printed


@pytest.mark.parametrize("wrong", ["volume kept", "no object"])
def test_a_volume_without_object_fails(cluster: FakeCluster, tried: Tried, wrong: str) -> None:
    cluster.wrong = {wrong}
    printed = tried(run.WRONG, "--only", "claim")
    assert outcomes(printed) == {"claim": "FAILED", "removed": "FAILED"}
    assert re.search(r"removed .* volumes on node two go: data@x/pvc-uid-\d+-", printed)


# What the cluster lacks


def no_snapshots(cluster: FakeCluster) -> None:
    cluster.snapshots = False


def no_rights_on_nodes(cluster: FakeCluster) -> None:
    """A distributed snapshot controller must be allowed to watch nodes."""
    cluster.wrong = {"nodes"}


def of_controller(cluster: FakeCluster) -> Object:
    """The pod of the controller's Deployment."""
    one = cluster.objects["deployments", "carver-system", "carver-controller"]
    pod: Object = one["spec"]["template"]["spec"]
    return pod


def no_snapshotter(cluster: FakeCluster) -> None:
    spec = of_controller(cluster)
    spec["containers"] = spec["containers"][:2]


def no_group_kinds(cluster: FakeCluster) -> None:
    cluster.missing = {"groupsnapshot.storage"}


def no_groups(cluster: FakeCluster) -> None:
    del of_controller(cluster)["containers"][2]["args"]


def no_attributes(cluster: FakeCluster) -> None:
    cluster.missing = {"storage"}


def no_controller(cluster: FakeCluster) -> None:
    cluster.distribute()


def no_inline_volumes(cluster: FakeCluster) -> None:
    cluster.objects["csidrivers", "", DRIVER]["spec"]["volumeLifecycleModes"] = ["Persistent"]


SNAPSHOTS = {
    *("snapshot", "restore", "restore-anywhere", "pre-provisioned", "group-snapshot"),
    *("read-only-many", "mixed-claims"),
}
CENTRAL = {
    *("restore-anywhere", "pre-provisioned", "group-snapshot", "attributes", "expand-impossible"),
    *("stopped", "rights", "mixed-claims"),
}


@pytest.mark.parametrize(
    ("lack", "code", "outcome", "missing", "sentence"),
    [
        (
            *(no_snapshots, run.PARTLY, "not here", SNAPSHOTS),
            "the cluster has no CRDs of snapshot.storage.k8s.io/v1",
        ),
        (
            *(no_rights_on_nodes, run.PARTLY, "not here", SNAPSHOTS),
            "kube-system/snapshot-controller may not watch nodes",
        ),
        (no_snapshotter, run.PARTLY, "not here", SNAPSHOTS, "sidecars.snapshotter.enabled"),
        (no_group_kinds, run.PARTLY, "not here", {"group-snapshot"}, "no CRDs of groupsnapshot"),
        (no_groups, run.WELL, "off", {"group-snapshot"}, "sidecars.snapshotter.groups"),
        (no_attributes, run.PARTLY, "not here", {"attributes"}, "no VolumeAttributesClass"),
        (no_controller, run.WELL, "off", CENTRAL, "controller.enabled"),
        (no_inline_volumes, run.WELL, "off", {"inline"}, "does not allow Ephemeral"),
    ],
)
def test_checks_name_what_the_cluster_lacks(
    cluster: FakeCluster,
    tried: Tried,
    lack: Callable[[FakeCluster], None],
    code: int,
    outcome: str,
    missing: set[str],
    sentence: str,
) -> None:
    lack(cluster)
    printed = tried(code)
    assert {one for one, found in outcomes(printed).items() if found == outcome} == missing
    assert sentence in printed
    assert left(cluster) == []


@pytest.mark.parametrize("without", ["", "snapshotter"])
def test_a_cluster_with_a_controller_is_found_by_its_manifest(
    cluster: FakeCluster, without: str
) -> None:
    path = PROGRAM.parents[2] / "deploy" / "kubernetes" / "container-lvm2.yaml"
    for one in manifest.objects(path):
        about = one["metadata"]
        if one["kind"] in {"DaemonSet", "Deployment"}:
            pod = one["spec"]["template"]["spec"]
            pod["containers"] = [it for it in pod["containers"] if it["name"] != without]
            key = (f"{one['kind'].lower()}s", about["namespace"], about["name"])
            cluster.objects[key] = one
    found = installation.find(Kubectl(cluster.execute), DRIVER)
    assert [one["metadata"]["name"] for one in found.daemonsets] == ["carver-node"]
    assert [one["metadata"]["name"] for one in found.controllers] == ["carver-controller"]
    assert not found.groups
    assert ("snapshotter" in found.no_snapshots) is bool(without)


def test_nodes_that_run_carver_by_systemd_need_an_image(cluster: FakeCluster, tried: Tried) -> None:
    for key in [key for key in cluster.objects if key[2].startswith("carver-") and key[1]]:
        if key[2].startswith("carver-controller"):
            continue
        del cluster.objects[key]
    with pytest.raises(installation.Unusable, match="--image"):
        code_of(cluster)
    found = outcomes(tried(run.PARTLY, "--image", "shell:1"))
    assert {one for one, outcome in found.items() if outcome != "passed"} == {
        *("restart", "stopped", "adopt", "rights"),
    }
    assert {
        one["spec"]["containers"][0]["image"] for one in cluster.applied if one["kind"] == "Pod"
    } == {"shell:1"}


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (("csidrivers", DRIVER), "there is no CSIDriver lvm.csi.carver"),
        (("csinodes", "one", "two"), "no kubelet has registered lvm.csi.carver"),
    ],
)
def test_a_cluster_without_carver_is_not_tried(
    cluster: FakeCluster, tried: Tried, key: tuple[str, ...], sentence: str
) -> None:
    for name in key[1:]:
        del cluster.objects[key[0], "", name]
    with pytest.raises(installation.Unusable, match=sentence):
        code_of(cluster)
    assert cluster.applied == []


def test_of_several_storage_classes_one_must_be_named(cluster: FakeCluster, tried: Tried) -> None:
    other: Object = {"provisioner": DRIVER, "mountOptions": ["noatime"]}
    of = {"name": "slow", "namespace": "", "labels": {}}
    cluster.objects["storageclasses", "", "slow"] = {"metadata": of, **other}
    with pytest.raises(installation.Unusable, match="carver, slow"):
        code_of(cluster)
    with pytest.raises(installation.Unusable, match="fast is no StorageClass"):
        code_of(cluster, "--like", "fast")
    tried(run.WELL, "--like", "slow", "--only", "claim")
    [made] = [one for one in cluster.applied if one["kind"] == "StorageClass"]
    assert (made["mountOptions"], "parameters" in made) == (["noatime"], False)


# Errors of the API server


def test_an_api_server_away_briefly_is_waited_for(cluster: FakeCluster, tried: Tried) -> None:
    away = ("get pods", "apply", "exec", "delete", "patch", "uncordon")
    cluster.errors = [(words, 3, PASSING) for words in away]
    tried(run.WELL)
    assert [times for _, times, _ in cluster.errors] == [0] * len(away)
    assert left(cluster) == []


def test_a_refusal_ends_the_check_and_no_other(cluster: FakeCluster, tried: Tried) -> None:
    cluster.errors = [("cordon two", 1, REFUSED)]
    printed = tried(run.WRONG, "--only", "claim", "--only", "drain")
    assert outcomes(printed) == {"claim": "passed", "drain": "FAILED", "removed": "passed"}
    assert "kubectl cordon two: Error from server (Forbidden)" in printed
    assert left(cluster) == []


def test_an_api_server_that_stays_away_is_a_failure(cluster: FakeCluster, tried: Tried) -> None:
    cluster.errors = [("exec", 1000, PASSING)]
    printed = tried(run.WRONG, "--only", "claim")
    assert "not within 20 s: pod claim-first writes; kubectl exec" in printed
    assert "Carver on one says what it holds" in printed
    cluster.errors = []
    tried(run.WELL, "--clean")
    assert left(cluster) == []


@pytest.mark.parametrize(
    ("text", "passing"),
    [
        (PASSING, True),
        ("Unable to connect to the server: net/http: TLS handshake timeout", True),
        ("Error from server: etcdserver: leader changed", True),
        ("Error from server (InternalError): an error on the server", True),
        ("Error from server (Timeout): timed out", True),
        (REFUSED, False),
        ('Error from server (NotFound): pods "connection refused" not found', False),
        ("error: unknown flag: --nonsense", False),
        ("command terminated with exit code 1", False),
    ],
)
def test_what_may_be_otherwise_in_a_moment_is_known(
    cluster: FakeCluster, text: str, passing: bool
) -> None:
    cluster.errors = [("get", 1, text)]
    with pytest.raises(Refused) as refused:
        Kubectl(cluster.execute).all("pods")
    assert refused.value.passing is passing


# Interrupts


def calls(*arguments: str) -> int:
    """How many a run makes."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = FakeCluster(Path(folder))
        assert code_of(cluster, *arguments) == run.WELL
        return cluster.calls


@pytest.mark.parametrize(
    ("arguments", "stride"),
    [
        *(([], 197), (["--only", "drain"], 3), (["--only", "restore"], 5)),
        *((["--only", "group-snapshot"], 9), (["--only", "pre-provisioned"], 9)),
        *((["--only", "attributes"], 9), (["--only", "stopped"], 9)),
    ],
)
def test_after_an_interrupt_at_any_call_nothing_is_left(
    tmp_path: Path, arguments: list[str], stride: int
) -> None:
    for moment in range(1, calls(*arguments), stride):
        (folder := tmp_path / str(moment)).mkdir()
        cluster = FakeCluster(folder)
        cluster.interrupts = [moment]
        with suppress(KeyboardInterrupt):  # while nothing was made
            assert code_of(cluster, *arguments) == run.INTERRUPTED
        assert cluster.interrupts == []
        assert left(cluster) == [], f"at call {moment}: {cluster.commands[moment - 1]}"


@pytest.mark.parametrize(
    "check",
    [
        *("lying-node", "quiet-node", "cloned-group", "evacuation", "evacuation-interrupted"),
        "released-claim",
    ],
)
def test_after_an_interrupt_at_any_call_the_lab_is_as_it_was(tmp_path: Path, check: str) -> None:
    moment = 1
    while True:
        (folder := tmp_path / str(moment)).mkdir()
        cluster = FakeCluster(folder)
        cluster.interrupts = [moment]
        parsed = run.parser().parse_args(["--limit", "20", "--lab", "--only", check])
        with suppress(KeyboardInterrupt):  # while nothing was made
            run.try_all(parsed, Kubectl(cluster.execute), Clock(), FakeLab(cluster))
        if cluster.interrupts:
            return  # it had ended before
        assert left(cluster) == [], f"at call {moment}: {cluster.commands[moment - 1]}"
        assert sorted(cluster.carver_nodes()) == ["one", "two"]
        moment += 23


@pytest.mark.parametrize(
    ("change", "is_removed"),
    [
        ({}, True),
        ({"node": "one"}, False),
        ({"node": "a-long-name"}, False),
        ({"node": "away"}, False),
        ({"node": ""}, False),
        ({"namespace": "of-another"}, False),
        ({"claim": "data-of-another-check-db-0"}, False),
    ],
)
def test_of_a_removed_node_nothing_is_left_but_what_is_another_s_stays(
    cluster: FakeCluster, change: dict[str, str], is_removed: bool
) -> None:
    """Only an object whose disks are gone may be removed without the deletion of its volume."""
    label = {fake_cluster.TOPOLOGY: "a-long-name"}
    cluster.objects["nodes", "", "two"]["metadata"]["labels"] = label
    kubectl = Kubectl(cluster.execute)
    place = replace(installation.find(kubectl, DRIVER), nodes=("one", "two", "away"))
    here = site.Site(kubectl, place, "abcdef", "released-claim", 512, 20, Clock())
    of = {"node": "three", "namespace": here.namespace, "claim": "data-released-claim-db-0"}
    of |= change
    terms = [{"matchExpressions": [{"key": fake_cluster.TOPOLOGY, "values": [of["node"]]}]}]
    spec: Object = {"claimRef": {"namespace": of["namespace"], "name": of["claim"]}}
    spec["persistentVolumeReclaimPolicy"] = "Delete"
    if of["node"]:
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": terms}}
    cluster._add("PersistentVolume", "pvc-1", spec=spec)
    about = cluster.objects["persistentvolumes", "", "pvc-1"]["metadata"]
    about["finalizers"] = ["kubernetes.io/pv-protection"]
    removal.clear(here) if is_removed else removal._forget_volumes(here)
    kubectl.all("persistentvolumes")
    assert (("persistentvolumes", "", "pvc-1") not in cluster.objects) is is_removed
    assert spec["persistentVolumeReclaimPolicy"] == ("Retain" if is_removed else "Delete")


@pytest.mark.parametrize("words", ["apply", "exec", "cordon two", "drain two", "delete pods"])
def test_after_an_interrupt_the_exit_code_says_so(
    cluster: FakeCluster, words: str, tried: Tried
) -> None:
    cluster.interrupts = [words]
    printed = tried(run.INTERRUPTED, "--only", "drain")
    assert "removed           passed" in printed
    assert left(cluster) == []


def test_leftovers_of_a_second_interrupt_go_later(cluster: FakeCluster, tried: Tried) -> None:
    cluster.interrupts = ["exec", "delete persistentvolumeclaims"]
    printed = tried(run.INTERRUPTED, "--only", "claim")
    assert "goes by run.py --clean" in printed
    assert left(cluster)

    printed = tried(run.WELL, "--only", "claim")
    assert re.search(r"earlier runs have left .* [0-9a-f]{6} \(--clean\)", printed)
    assert left(cluster)

    tried(run.WELL, "--clean")
    assert left(cluster) == []
    assert "no run has left anything" in tried(run.WELL, "--clean")


def test_a_run_killed_with_nodes_cordoned_goes(cluster: FakeCluster, tried: Tried) -> None:
    for node in ("one", "two"):
        one = cluster.objects["nodes", "", node]
        one["spec"]["unschedulable"] = True
        one["metadata"]["labels"] = {objects.CORDONED: "abcdef"}
    with pytest.raises(installation.Unusable, match="cordoned"):
        code_of(cluster)
    tried(run.WELL, "--clean")
    assert left(cluster) == []


def test_a_run_killed_while_a_program_is_in_carver_s_place_goes(
    cluster: FakeCluster, tried: Tried
) -> None:
    taint = {"key": objects.WITHOUT_CARVER, "value": "abcdef", "effect": "NoSchedule"}
    taints = cluster.objects["nodes", "", "two"]["spec"]["taints"]
    others = [*taints, {**taint, "key": "someone-else-s"}]
    taints[:] = [*others, taint]
    spec: Object = {"nodeName": "two", "containers": [{"name": "carver"}]}
    labels = {objects.RUN: "abcdef"}
    name = f"{objects.PREFIX}abcdef-liar"
    cluster._add("Pod", name, "carver-system", labels=labels, spec=spec)
    assert "abcdef (--clean)" in tried(run.WELL, "--only", "inline")
    tried(run.WELL, "--clean")
    assert taints == others
    assert left(cluster) == []


def test_a_node_cordoned_by_someone_else_stays_so(cluster: FakeCluster, tried: Tried) -> None:
    spec = cluster.objects["nodes", "", "two"]["spec"]
    spec["unschedulable"] = True
    tried(run.WELL, "--only", "inline", "--only", "drain")
    assert spec["unschedulable"]


# Removal


def test_what_does_not_go_is_named_and_is_a_failure(cluster: FakeCluster, tried: Tried) -> None:
    cluster.wrong = {"persistentvolumes"}
    printed = tried(run.WRONG, "--only", "claim")
    assert outcomes(printed) == {"claim": "FAILED", "removed": "FAILED"}
    assert re.search(r"not within 20 s: PersistentVolumes go: pvc-uid-\d+-", printed)


def test_objects_of_a_failed_check_can_be_kept(cluster: FakeCluster, tried: Tried) -> None:
    cluster.wrong = {"once"}
    printed = tried(run.WRONG, "--keep", "--only", "claim", "--only", "once-pod")
    assert "remove them with --clean" in printed
    kept = left(cluster)
    assert "pods once-pod-first" in kept
    assert not [one for one in kept if " claim-" in one]
    tried(run.WELL, "--clean")
    assert left(cluster) == []


def test_a_mistake_of_a_check_s_own_leaves_nothing(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    def mistaken(one: site.Site) -> str:
        one.start("pod", one.claim("data"))
        raise KeyError("spec")

    monkeypatch.setitem(dict(checks.ALL), "claim", mistaken)
    monkeypatch.setattr(checks, "ALL", {**checks.ALL, "claim": mistaken})
    printed = tried(run.WRONG, "--only", "claim")
    assert "KeyError: 'spec'" in printed
    assert left(cluster) == []


# What is applied


def test_all_objects_fit_the_schema_of_kubernetes(cluster: FakeCluster, tried: Tried) -> None:
    tried(run.WELL)
    kinds = {one["kind"] for one in cluster.applied}
    assert kinds == {
        *("Namespace", "StorageClass", "VolumeSnapshotClass", "PersistentVolumeClaim", "Pod"),
        *("Deployment", "VolumeSnapshot", "VolumeSnapshotContent", "VolumeAttributesClass"),
        *("VolumeGroupSnapshot", "VolumeGroupSnapshotClass"),
    }
    for one in cluster.applied:
        assert objects.RUN in one["metadata"]["labels"]
        # kubernetes-csi/external-snapshotter, client/config/crd, v8.7.0, has the others
        if one["kind"] in {"VolumeSnapshotClass", "VolumeGroupSnapshotClass"}:
            assert one.keys() - {"apiVersion", "kind", "metadata"} == {"driver", "deletionPolicy"}
        elif one["kind"] == "VolumeSnapshot":
            assert one["spec"].keys() == {"volumeSnapshotClassName", "source"}
            [source] = one["spec"]["source"]
            assert source in {"persistentVolumeClaimName", "volumeSnapshotContentName"}
        elif one["kind"] == "VolumeGroupSnapshot":
            assert one["spec"].keys() == {"volumeGroupSnapshotClassName", "source"}
            assert one["spec"]["source"].keys() == {"selector"}
        elif one["kind"] == "VolumeSnapshotContent":
            assert one["spec"].keys() == {
                *("deletionPolicy", "driver", "source", "sourceVolumeMode", "volumeSnapshotRef"),
            }
        else:
            kubernetes_validate.validate(one, "1.37", strict=True)


@pytest.mark.parametrize("check", ["evacuation", "released-claim"])
def test_the_stateful_sets_of_the_lab_fit_the_schema_of_kubernetes(
    cluster: FakeCluster, lab: FakeLab, check: str, tried: Tried
) -> None:
    tried(run.WELL, "--lab", "--only", check)
    [made] = [one for one in cluster.applied if one["kind"] == "StatefulSet"]
    kubernetes_validate.validate(made, "1.37", strict=True)
    pods = made["spec"]["template"]["metadata"]["labels"]
    assert made["spec"]["selector"]["matchLabels"] == pods
    terms = path(
        made["spec"]["template"]["spec"],
        *("affinity", "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
        default=[],
    )
    assert [one["labelSelector"]["matchLabels"] for one in terms] in ([], [pods])


def test_the_checks_wait_for_the_graces_that_carver_has() -> None:
    assert nodes.FORGOTTEN_SECONDS == enrolment._DELETED_SECONDS
    assert releasing.GRACE_SECONDS == lost_claims.GRACE_SECONDS


def test_what_takes_carver_s_place_is_a_pod_like_carver_s(cluster: FakeCluster) -> None:
    path = PROGRAM.parents[2] / "deploy" / "kubernetes" / "container-lvm2.yaml"
    [daemonset] = [one for one in manifest.objects(path) if one["kind"] == "DaemonSet"]
    place = installation.find(Kubectl(cluster.execute), DRIVER)
    found = replace(place, daemonsets=(daemonset,))
    here = site.Site(Kubectl(cluster.execute), found, "abcdef", "lying-node", 512, 20)
    pod = lying.program_in_place(here, "two", ["print()", "{}"])
    kubernetes_validate.validate(pod, "1.37", strict=True)
    template, spec = daemonset["spec"]["template"], pod["spec"]
    # By its token it proves the node that it is on, and no DaemonSet takes it for its own.
    assert (spec["nodeName"], pod["metadata"]["namespace"]) == ("two", "carver-system")
    assert spec["serviceAccountName"] == template["spec"]["serviceAccountName"]
    assert pod["metadata"]["labels"].keys().isdisjoint(template["metadata"]["labels"])
    [own], [other] = spec["containers"], template["spec"]["containers"]
    assert own["command"] == ["python", "-c", "print()", "{}"]
    for key in ("env", "volumeMounts", "securityContext", "terminationMessagePath"):
        assert own[key] == other[key]
    assert not [key for key in own if key.endswith("Probe")]


def test_pods_have_no_more_rights_than_they_need(cluster: FakeCluster, tried: Tried) -> None:
    tried(run.WELL)
    for one in cluster.applied:
        if one["kind"] == "Pod":
            [own] = one["spec"]["containers"]
            security = own["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security["allowPrivilegeEscalation"]
            assert one["spec"]["securityContext"].get("runAsNonRoot", "volumeDevices" in own)
            # As others keep the nodes for something, and not where a node is cordoned.
            [toleration] = one["spec"]["tolerations"]
            assert toleration == {"key": "mine", "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("text", "found"),
    [("1Gi", 1 << 30), ("512Mi", 1 << 29), ("1073741824", 1 << 30), ("1.5G", 1_500_000_000)],
)
def test_sizes_are_read_as_kubernetes_writes_them(text: str, found: int) -> None:
    assert site.quantity(text) == found


def test_the_writer_s_script_ends_where_it_can_write_no_more(tmp_path: Path) -> None:
    (tmp_path / "sleep").write_text(f"#!/bin/sh\nrm {tmp_path}/log; mkdir {tmp_path}/log\n")
    (tmp_path / "sleep").chmod(0o755)
    script = checks.WRITER.replace(objects.PLACE, str(tmp_path)).replace("rm", "cp log kept; rm")
    words = ["sh", "-c", script]
    path = f"{tmp_path}:/usr/bin:/bin"
    ended = subprocess.run(words, env={"PATH": path}, capture_output=True, check=False, timeout=60)
    assert ended.returncode == 1


# What people read


def section(heading: str) -> str:
    text = (PROGRAM.parents[2] / "docs" / "testing.md").read_text()
    [found] = re.findall(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def test_every_check_is_documented_and_no_other() -> None:
    documented = re.findall(r"^\| `(\S+)` \|", section("The checks"), re.MULTILINE)
    assert documented == [*checks.ALL, *lab_checks.ALL]


def test_every_option_that_is_documented_there_is() -> None:
    known = run.parser().format_help()
    text = section("The checks") + section("How to read it")
    named = set(re.findall(r"`(?:[^`]*run.py )?(--[a-z-]+)`", text))
    assert {one for one in named if one not in known} == set()


def test_every_exit_code_and_outcome_is_documented() -> None:
    first = re.findall(r"^\| (\S.*?) \|", section("How to read it"), re.MULTILINE)
    codes = [run.WELL, run.WRONG, run.UNUSABLE, run.PARTLY, run.INTERRUPTED]
    assert [one for one in first if one.isdigit()] == [str(one) for one in codes]
    assert {run.PASSED, run.FAILED, run.NOT_HERE, run.OFF} <= set(first)


# As a program


def program(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it with nothing on PATH but what a folder has."""
    given = {"PATH": f"{folder}:/usr/bin:/bin", "KUBECONFIG": str(folder / "config")}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env={key: value for key, value in (given | environment).items() if value},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.fixture
def folder(tmp_path: Path, cluster: FakeCluster) -> Path:
    """Where kubectl is, and its configuration."""
    (tmp_path / "config").write_text("")
    fake_cluster.on_path(cluster, tmp_path)
    return tmp_path


def test_the_program_finds_kubectl_and_the_cluster(folder: Path) -> None:
    ended = program(folder, "--clean")
    assert (ended.returncode, ended.stderr) == (run.WELL, "")
    assert ended.stdout == "no run has left anything\n"


# Each kubectl is a process, which takes its time where others are at work.
@pytest.mark.timeout(300)
def test_the_program_removes_everything_when_it_is_interrupted(
    folder: Path, cluster: FakeCluster
) -> None:
    cluster.interrupts, cluster.signal = ["get pods"], signal.SIGTERM
    fake_cluster.on_path(cluster, folder)
    ended = program(folder, "--only", "inline")
    assert (ended.returncode, ended.stderr) == (run.INTERRUPTED, "")
    assert outcomes(ended.stdout) == {"removed": "passed"}
    assert {one["kind"] for one in fake_cluster.kept(folder).applied} >= {"Namespace"}
    assert left(fake_cluster.kept(folder)) == []


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"PATH": "/nonexistent"}, "there is no kubectl on PATH"),
        ({"KUBECONFIG": ""}, "KUBECONFIG is not set"),
        ({"KUBECONFIG": "/nonexistent"}, "KUBECONFIG names no file that is there: /nonexistent"),
    ],
)
def test_the_program_says_what_it_lacks(
    folder: Path, environment: dict[str, str], sentence: str
) -> None:
    ended = program(folder, **environment)
    assert ended.returncode == run.UNUSABLE
    assert ended.stderr.startswith(f"run.py: {sentence}")
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_the_program_says_that_no_cluster_answers(folder: Path, cluster: FakeCluster) -> None:
    cluster.errors = [("version", 1, f"E1122 noise\n{PASSING}\n")]
    cluster.objects = {}
    fake_cluster.on_path(cluster, folder)
    # Once it was away, the next time it has no Carver.
    for sentence in ("KUBECONFIG names does not answer: The connection", "there is no CSIDriver"):
        ended = program(folder)
        assert ended.returncode == run.UNUSABLE
        assert sentence in ended.stderr
        assert ended.stderr.count("\n") == 1


def test_the_program_needs_nothing_but_python_s_own_library() -> None:
    words = [sys.executable, "-S", "-I", str(PROGRAM), "--help"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    # argparse breaks lines at the hyphens of the names.
    assert all(one in "".join(ended.stdout.split()) for one in checks.ALL)
