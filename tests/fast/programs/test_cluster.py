"""The checks of tests/cluster, against a cluster in memory: what they find, and what they leave.

Nothing that a run has made may be there after it, however it ended.
"""

import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import kubernetes_validate
import pytest
from cluster import checks, installation, objects, run, site
from cluster.kubectl import Kubectl, Object, Refused
from fakes import cluster as fake_cluster
from fakes.cluster import DRIVER, FakeCluster

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


def tried(cluster: FakeCluster, *arguments: str) -> int:
    """The exit code of a run."""
    parsed = run.parser().parse_args(["--limit", "20", *arguments])
    return run.try_all(parsed, Kubectl(cluster.execute), Clock())


def cleaned(cluster: FakeCluster) -> int:
    parsed = run.parser().parse_args(["--limit", "20", "--clean"])
    return run.clean(parsed, Kubectl(cluster.execute), Clock())


def left(cluster: FakeCluster) -> list[str]:
    """What a run has left: objects with its label or in its place, labels, cordons, volumes."""
    found = [
        f"{kind} {name}"
        for (kind, namespace, name), one in cluster.objects.items()
        if objects.PREFIX in f"{namespace} {name}"
        or kind.startswith(("persistentvolume", "volumesnapshotcontent"))
        or objects.CORDONED in one["metadata"]["labels"]
        or one.get("spec", {}).get("unschedulable")
    ]
    return found + [f"volume {name}" for name in cluster.held]


def outcomes(printed: str) -> dict[str, str]:
    """The table's outcomes, by the check."""
    table = printed.rpartition("\n\n")[2]
    rows = re.findall(r"^(\S+) +(passed|FAILED|not here|off) ", table, re.MULTILINE)
    return dict(rows)


# The checks


def test_every_check_passes_where_all_is_well(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried(cluster) == run.WELL
    assert outcomes(capsys.readouterr().out) == dict.fromkeys([*checks.ALL, "removed"], "passed")
    assert left(cluster) == []


@pytest.mark.parametrize("check", checks.ALL)
def test_each_check_can_be_run_alone(
    cluster: FakeCluster, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried(cluster, "--only", check) == run.WELL
    assert outcomes(capsys.readouterr().out) == {check: "passed", "removed": "passed"}
    assert left(cluster) == []


@pytest.mark.parametrize(
    ("wrong", "check", "note"),
    [
        ("data lost", "claim", "pod claim-second reads ''"),
        ("data lost", "two-pods", "reads ''"),
        ("data lost", "drain", "reads ''"),
        ("empty copy", "clone", "words: No such file or directory"),
        ("empty copy", "restore", "words: No such file or directory"),
        ("snapshots", "snapshot", "--enable-distributed-snapshotting is missing"),
        ("never grows", "expand-online", "claim expand-online-data has 1024 MiB"),
        ("small inside", "expand-online", "is larger than 486 MiB"),
        ("small inside", "expand-offline", "is larger than 486 MiB"),
        ("once", "once-pod", "pod once-pod-second was given a node, and must not be"),
        ("read-only", "read-only-block", "the pod that may only read has written"),
        ("inline kept", "inline", "the volume of pod inline-pod goes"),
        ("writer dies", "restart", "pod restart-writer ended: Failed"),
        ("gap", "restart", "are not all there, or not in order"),
        ("small device", "block", "the device has 511 MiB, 512 were claimed"),
        ("no image", "claim", "localhost/carver:0.1.0 is not on the node"),
    ],
)
def test_each_check_finds_what_it_is_for(
    cluster: FakeCluster, wrong: str, check: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong = {wrong}
    assert tried(cluster, "--only", check) == run.WRONG
    printed = capsys.readouterr().out
    assert outcomes(printed) == {check: "FAILED", "removed": "passed"}
    assert note in printed
    cluster.held.pop(next((it for it in cluster.held if "csi-" in it), ""), None)
    assert left(cluster) == []


def test_a_failure_tells_what_a_person_needs(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong = {"never ready"}
    assert tried(cluster, "--only", "claim", "--only", "inline") == run.WRONG
    printed = capsys.readouterr().out
    assert "claim: not within 20 s: pod claim-first is ready" in printed
    assert re.search(r'Pod claim-first: Running, two, waiting .*"ContainerCreating"', printed)
    assert "Warning FailedMount Pod claim-first (3x): mkfs failed: no room" in printed
    assert re.search(r'carver-\d+/carver: carver says "CreateVolume" of pvc-uid-\d+-', printed)
    assert "a line about something else" not in printed
    assert outcomes(printed) == {"claim": "FAILED", "inline": "FAILED", "removed": "passed"}
    assert left(cluster) == []


def test_a_failure_tells_of_snapshots_too(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong = {"snapshots"}
    assert tried(cluster, "--only", "snapshot") == run.WRONG
    printed = capsys.readouterr().out
    assert "VolumeSnapshot snapshot-monday: ready to use: False" in printed
    assert re.search(r'/snapshotter: snapshotter says "CreateVolume" of snapcontent-uid-', printed)


def test_what_carver_still_holds_is_a_failure_though_its_object_is_gone(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong = {"volume kept"}
    assert tried(cluster, "--only", "claim") == run.WRONG
    assert re.search(r"volumes on node two go: data@x/pvc-uid-\d+-", capsys.readouterr().out)


def test_a_volume_that_never_had_an_object_is_found_by_its_claim(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong = {"no object"}
    assert tried(cluster, "--only", "claim") == run.WRONG
    printed = capsys.readouterr().out
    assert outcomes(printed) == {"claim": "FAILED", "removed": "FAILED"}
    assert re.search(r"removed .* volumes on node two go: data@x/pvc-uid-\d+-", printed)


# What the cluster lacks


def test_checks_that_need_snapshots_say_so_where_there_are_none(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.snapshots = False
    assert tried(cluster) == run.PARTLY
    printed = capsys.readouterr().out
    missing = {one for one, outcome in outcomes(printed).items() if outcome == "not here"}
    assert missing == {"snapshot", "restore"}
    assert "the cluster has no CRDs of snapshot.storage.k8s.io/v1" in printed
    assert left(cluster) == []


def test_a_distributed_snapshot_controller_must_be_allowed_to_watch_nodes(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong = {"nodes"}
    assert tried(cluster, "--only", "snapshot") == run.PARTLY
    printed = capsys.readouterr().out
    assert "kube-system/snapshot-controller may not watch nodes" in printed


def test_checks_that_need_the_snapshotter_say_so_where_it_is_not_installed(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = cluster.objects["daemonsets", "carver-system", "carver-node"]["spec"]["template"]["spec"]
    spec["containers"] = spec["containers"][:2]
    assert tried(cluster, "--only", "snapshot") == run.PARTLY
    assert "sidecars.snapshotter.enabled" in capsys.readouterr().out


def test_inline_volumes_that_are_switched_off_are_no_failure(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.objects["csidrivers", "", DRIVER]["spec"]["volumeLifecycleModes"] = ["Persistent"]
    assert tried(cluster, "--only", "inline") == run.WELL
    printed = capsys.readouterr().out
    assert outcomes(printed)["inline"] == "off"
    assert "does not allow Ephemeral" in printed


def test_nodes_that_run_carver_by_systemd_are_checked_with_an_image_that_is_named(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in [key for key in cluster.objects if key[1] == "carver-system"]:
        del cluster.objects[key]
    with pytest.raises(installation.Unusable, match="--image"):
        tried(cluster)
    assert tried(cluster, "--image", "shell:1") == run.PARTLY
    found = outcomes(capsys.readouterr().out)
    assert {one for one, outcome in found.items() if outcome != "passed"} == {"restart"}
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
    cluster: FakeCluster, key: tuple[str, ...], sentence: str
) -> None:
    for name in key[1:]:
        del cluster.objects[key[0], "", name]
    with pytest.raises(installation.Unusable, match=sentence):
        tried(cluster)
    assert cluster.applied == []


def test_of_several_storage_classes_one_must_be_named(cluster: FakeCluster) -> None:
    other: Object = {"provisioner": DRIVER, "mountOptions": ["noatime"]}
    of = {"name": "slow", "namespace": "", "labels": {}}
    cluster.objects["storageclasses", "", "slow"] = {"metadata": of, **other}
    with pytest.raises(installation.Unusable, match="carver, slow"):
        tried(cluster)
    with pytest.raises(installation.Unusable, match="fast is no StorageClass"):
        tried(cluster, "--like", "fast")
    assert tried(cluster, "--like", "slow", "--only", "claim") == run.WELL
    [made] = [one for one in cluster.applied if one["kind"] == "StorageClass"]
    assert (made["mountOptions"], "parameters" in made) == (["noatime"], False)


# Errors of the API server


def test_an_api_server_that_is_away_for_a_moment_is_waited_for(cluster: FakeCluster) -> None:
    away = ("get pods", "apply", "exec", "delete", "patch", "uncordon")
    cluster.errors = [(words, 3, PASSING) for words in away]
    assert tried(cluster) == run.WELL
    assert [times for _, times, _ in cluster.errors] == [0] * len(away)
    assert left(cluster) == []


def test_a_refusal_ends_the_check_and_no_other(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.errors = [("cordon two", 1, REFUSED)]
    assert tried(cluster, "--only", "claim", "--only", "drain") == run.WRONG
    printed = capsys.readouterr().out
    assert outcomes(printed) == {"claim": "passed", "drain": "FAILED", "removed": "passed"}
    assert "kubectl cordon two: Error from server (Forbidden)" in printed
    assert left(cluster) == []


def test_an_api_server_that_stays_away_is_said_to_have_been_away(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.errors = [("exec", 1000, PASSING)]
    assert tried(cluster, "--only", "claim") == run.WRONG
    assert "not within 20 s: pod claim-first writes; kubectl exec" in capsys.readouterr().out
    cluster.errors = []
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
        assert tried(cluster, *arguments) == run.WELL
        return cluster.calls


@pytest.mark.parametrize(
    ("arguments", "stride"), [([], 97), (["--only", "drain"], 3), (["--only", "restore"], 5)]
)
def test_after_an_interrupt_at_whatever_moment_nothing_is_left(
    tmp_path: Path, arguments: list[str], stride: int
) -> None:
    for moment in range(1, calls(*arguments), stride):
        (folder := tmp_path / str(moment)).mkdir()
        cluster = FakeCluster(folder)
        cluster.interrupts = [moment]
        with suppress(KeyboardInterrupt):  # while nothing was made
            assert tried(cluster, *arguments) == run.INTERRUPTED
        assert cluster.interrupts == []
        assert left(cluster) == [], f"at call {moment}: {cluster.commands[moment - 1]}"


@pytest.mark.parametrize("words", ["apply", "exec", "cordon two", "drain two", "delete pods"])
def test_after_an_interrupt_the_exit_code_says_so(
    cluster: FakeCluster, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.interrupts = [words]
    assert tried(cluster, "--only", "drain") == run.INTERRUPTED
    assert "removed          passed" in capsys.readouterr().out
    assert left(cluster) == []


def test_a_second_interrupt_leaves_what_a_later_run_tells_of_and_removes(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.interrupts = ["exec", "delete persistentvolumeclaims"]
    assert tried(cluster, "--only", "claim") == run.INTERRUPTED
    assert "goes by run.py --clean" in capsys.readouterr().out
    assert left(cluster)

    assert tried(cluster, "--only", "claim") == run.WELL
    assert re.search(r"earlier runs have left .* [0-9a-f]{6} \(--clean\)", capsys.readouterr().out)
    assert left(cluster)

    assert cleaned(cluster) == run.WELL
    assert left(cluster) == []
    assert cleaned(cluster) == run.WELL
    assert "no run has left anything" in capsys.readouterr().out


def test_a_run_that_was_killed_while_every_node_was_cordoned_is_cleaned_up(
    cluster: FakeCluster,
) -> None:
    for node in ("one", "two"):
        one = cluster.objects["nodes", "", node]
        one["spec"]["unschedulable"] = True
        one["metadata"]["labels"] = {objects.CORDONED: "abcdef"}
    with pytest.raises(installation.Unusable, match="cordoned"):
        tried(cluster)
    assert cleaned(cluster) == run.WELL
    assert left(cluster) == []


def test_a_node_that_somebody_else_has_cordoned_stays_so(cluster: FakeCluster) -> None:
    spec = cluster.objects["nodes", "", "two"]["spec"]
    spec["unschedulable"] = True
    assert tried(cluster, "--only", "inline", "--only", "drain") == run.WELL
    assert spec["unschedulable"]


# Removal


def test_what_does_not_go_is_named_and_is_a_failure(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong = {"persistentvolumes"}
    assert tried(cluster, "--only", "claim") == run.WRONG
    printed = capsys.readouterr().out
    assert outcomes(printed) == {"claim": "FAILED", "removed": "FAILED"}
    assert re.search(r"not within 20 s: PersistentVolumes go: pvc-uid-\d+-", printed)


def test_what_a_failed_check_made_can_be_kept_and_removed_later(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong = {"once"}
    assert tried(cluster, "--keep", "--only", "claim", "--only", "once-pod") == run.WRONG
    assert "remove them with --clean" in capsys.readouterr().out
    kept = left(cluster)
    assert "pods once-pod-first" in kept
    assert not [one for one in kept if " claim-" in one]
    assert cleaned(cluster) == run.WELL
    assert left(cluster) == []


def test_a_mistake_of_a_check_s_own_leaves_nothing(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mistaken(one: site.Site) -> str:
        one.start("pod", one.claim("data"))
        raise KeyError("spec")

    monkeypatch.setitem(dict(checks.ALL), "claim", mistaken)
    monkeypatch.setattr(checks, "ALL", {**checks.ALL, "claim": mistaken})
    assert tried(cluster, "--only", "claim") == run.WRONG
    assert "KeyError: 'spec'" in capsys.readouterr().out
    assert left(cluster) == []


# What is applied


def test_everything_that_is_applied_is_as_kubernetes_own_schema_says(cluster: FakeCluster) -> None:
    assert tried(cluster) == run.WELL
    kinds = {one["kind"] for one in cluster.applied}
    assert kinds == {
        *("Namespace", "StorageClass", "VolumeSnapshotClass", "PersistentVolumeClaim", "Pod"),
        *("Deployment", "VolumeSnapshot"),
    }
    for one in cluster.applied:
        assert objects.RUN in one["metadata"]["labels"]
        # kubernetes-csi/external-snapshotter, client/config/crd, v8.7.0, has the others
        if one["kind"] == "VolumeSnapshotClass":
            assert one.keys() - {"apiVersion", "kind", "metadata"} == {"driver", "deletionPolicy"}
        elif one["kind"] == "VolumeSnapshot":
            assert one["spec"].keys() == {"volumeSnapshotClassName", "source"}
            assert one["spec"]["source"].keys() == {"persistentVolumeClaimName"}
        else:
            kubernetes_validate.validate(one, "1.37", strict=True)


def test_pods_have_no_more_rights_than_they_need(cluster: FakeCluster) -> None:
    assert tried(cluster) == run.WELL
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
    assert re.findall(r"^\| `(\S+)` \|", section("The checks"), re.MULTILINE) == [*checks.ALL]


def test_every_option_that_is_documented_there_is() -> None:
    known = run.parser().format_help()
    text = section("The checks") + section("How to read it") + section("When a check fails")
    named = set(re.findall(r"`(?:[^`]*run.py )?(--[a-z-]+)`", text))
    # An option of the snapshot-controller's.
    assert {one for one in named if one not in known} == {"--enable-distributed-snapshotting"}


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
