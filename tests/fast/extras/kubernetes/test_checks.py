"""What `carver doctor --cluster` finds wrong with a cluster."""

import json
from collections.abc import Iterator
from pathlib import Path

import api_server
import manifest
import pytest
from api_server import ApiServer, Object, kubeconfig

from agent.cli import main as cli
from agent.extras.kubernetes.checks import DEPLOYMENTS, REVIEWS

ROOT = Path(__file__).parents[4]
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


DISTRIBUTED = "--enable-distributed-snapshotting"
VERBS = ("get", "list", "watch")


@pytest.mark.parametrize(
    ("arguments", "allowed", "code", "verdict", "message", "remedy"),
    [
        (None, VERBS, 0, "warn", "there is none", "docs/install.md"),
        ([f"{DISTRIBUTED}=false"], VERBS, 0, "warn", f"without {DISTRIBUTED}", DISTRIBUTED),
        ([DISTRIBUTED], ("get",), 1, "fail", "may not list, watch nodes", ACCOUNT),
        ([f"{DISTRIBUTED}=true"], ("get",), 1, "fail", "may not list, watch nodes", ACCOUNT),
        ([DISTRIBUTED], VERBS, 0, "pass", "is distributed", ""),
        ([f"{DISTRIBUTED}=true"], VERBS, 0, "pass", "is distributed", ""),
    ],
)
def test_the_snapshot_controller_is_checked(
    cluster: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str] | None,
    allowed: tuple[str, ...],
    code: int,
    verdict: str,
    message: str,
    remedy: str,
) -> None:
    if arguments is not None:
        cluster.run_controller("--v=5", *arguments)
    cluster.allowed = {(ACCOUNT, verb) for verb in allowed}
    file = kubeconfig(tmp_path / "kubeconfig", cluster.url)
    (tmp_path / "config.toml").write_text("")
    words = ["--cluster", "--json", "--config", str(tmp_path / "config.toml")]
    assert cli.main(["doctor", *words, "--kubeconfig", str(file)]) == code
    [one] = json.loads(capsys.readouterr().out)["checks"]
    assert one["verdict"] == verdict
    assert message in one["message"]
    assert remedy in one["remedy"]


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [([], 0, "pass"), ([DISTRIBUTED], 1, "fail")],
    ids=["as shipped", "distributed without rights"],
)
def test_with_carver_s_controller_the_snapshot_controller_needs_no_flag(
    cluster: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    verdict: str,
) -> None:
    own = manifest.the(ROOT / "deploy" / "kubernetes" / "container-lvm2.yaml", "Deployment")
    cluster.add(DEPLOYMENTS, "carver-controller", metadata=own["metadata"], spec=own["spec"])
    cluster.run_controller(*arguments)
    file = kubeconfig(tmp_path / "kubeconfig", cluster.url)
    words = ["doctor", "--cluster", "--json", "--kubeconfig", str(file)]
    assert cli.main(words) == code
    [one] = json.loads(capsys.readouterr().out)["checks"]
    assert one["verdict"] == verdict


def test_a_silent_cluster_is_reported(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.lie(DEPLOYMENTS, api_server.status(403))
    file = kubeconfig(tmp_path / "kubeconfig", cluster.url)
    assert cli.main(["doctor", "--cluster", "--kubeconfig", str(file)]) == 1
    assert "403" in capsys.readouterr().err
