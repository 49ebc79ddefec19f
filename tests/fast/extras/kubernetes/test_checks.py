"""What `carver doctor --cluster` finds wrong with a cluster."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_server
import pytest
from api_server import ApiServer, Object, kubeconfig

from agent.cli import main as cli
from agent.extras.kubernetes.checks import DEPLOYMENTS, REVIEWS

ACCOUNT = "system:serviceaccount:kube-system:snapshot-controller"


class Cluster(ApiServer):
    """One that has deployments, and says what an account may do to nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.objects[DEPLOYMENTS] = []
        self.allowed: set[tuple[str, str]] = set()

    def collection(self, path: str) -> tuple[str, list[Object]] | None:
        if path == DEPLOYMENTS:
            return "DeploymentList", self.objects[path]
        return super().collection(path)

    def write(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        if (method, path) != ("POST", REVIEWS):
            return super().write(method, path, body)
        spec = body["spec"]
        assert "system:serviceaccounts:kube-system" in spec["groups"]
        asked = spec["resourceAttributes"]
        assert asked["resource"] == "nodes"
        return 201, body | {"status": {"allowed": (spec["user"], asked["verb"]) in self.allowed}}

    def run_controller(self, *arguments: str) -> None:
        """Have a snapshot-controller with these arguments."""
        image = "registry.k8s.io/sig-storage/snapshot-controller:v8.7.0"
        containers = [{"name": "it", "image": image, "args": list(arguments)}]
        pod = {"serviceAccountName": "snapshot-controller", "containers": containers}
        about = {"namespace": "kube-system"}
        spec = {"template": {"spec": pod}}
        self.add(DEPLOYMENTS, "snapshot-controller", metadata=about, spec=spec)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    made.start()
    yield made
    made.stop()


def found(
    cluster: Cluster, directory: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the checks."""
    file = kubeconfig(directory / "kubeconfig", cluster.url)
    (directory / "config.toml").write_text("")
    words = ["--cluster", "--json", "--config", str(directory / "config.toml")]
    code = cli.main(["doctor", *words, "--kubeconfig", str(file)])
    return code, json.loads(capsys.readouterr().out)["checks"]


def test_without_a_snapshot_controller_there_are_no_snapshots(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, [one] = found(cluster, tmp_path, capsys)
    assert (code, one["verdict"]) == (0, "warn")
    assert "there is none" in one["message"]


def test_a_snapshot_controller_that_is_not_distributed_is_told(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run_controller("--v=5", "--enable-distributed-snapshotting=false")
    code, [one] = found(cluster, tmp_path, capsys)
    assert (code, one["verdict"]) == (0, "warn")
    assert "without --enable-distributed-snapshotting" in one["message"]


@pytest.mark.parametrize("flag", ["", "=true"])
def test_a_distributed_snapshot_controller_needs_the_right_to_watch_nodes(
    flag: str, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run_controller("--v=5", f"--enable-distributed-snapshotting{flag}")
    cluster.allowed = {(ACCOUNT, "get")}
    code, [one] = found(cluster, tmp_path, capsys)
    assert (code, one["verdict"]) == (1, "fail")
    assert "may not list, watch nodes" in one["message"]
    assert ACCOUNT in one["remedy"]

    cluster.allowed |= {(ACCOUNT, "list"), (ACCOUNT, "watch")}
    code, [one] = found(cluster, tmp_path, capsys)
    assert (code, one["verdict"]) == (0, "pass")


def test_a_cluster_that_does_not_answer_is_told(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.lie(DEPLOYMENTS, api_server.status(403))
    file = kubeconfig(tmp_path / "kubeconfig", cluster.url)
    assert cli.main(["doctor", "--cluster", "--kubeconfig", str(file)]) == 1
    assert "403" in capsys.readouterr().err
