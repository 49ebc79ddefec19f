"""What is read from a manifest to run its pod without Kubernetes."""

import itertools
from pathlib import Path

import pytest
from container import pod

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"


def options(words: list[str], name: str) -> list[str]:
    return [value for option, value in itertools.pairwise(words) if option == name]


@pytest.mark.parametrize(
    ("manifest", "namespace"),
    [("container-lvm2", "ipc:/proc/1/ns/ipc"), ("host-lvm2", "pid:/proc/1/ns/pid")],
)
def test_the_command_has_the_mounts_and_the_privileges_of_the_manifest(
    manifest: str, namespace: str
) -> None:
    this = pod.of(KUBERNETES / f"{manifest}.yaml")
    words = this.words("node-1", CARVER_LOG_LEVEL="debug")

    assert {"--privileged", "--read-only"} <= set(words)
    assert options(words, "--with-ns") == [namespace]
    assert options(words, "--env") == ["CARVER_NODE_ID=node-1", "CARVER_LOG_LEVEL=debug"]
    mounts = options(words, "--mount")
    kubelet = "/var/lib/kubelet/plugins"
    assert f"type=bind,src={kubelet},dst={kubelet},options=rbind:rshared:rw" in mounts
    assert "type=bind,src=/dev,dst=/dev,options=rbind:rprivate:rw" in mounts
    assert f"type=bind,src={pod.FOLDER}/config,dst=/etc/carver,options=rbind:rprivate:ro" in mounts
    assert len(mounts) == len(this.container["volumeMounts"])
    assert words[-2:] == ["carver", "serve"]
    assert {"/var/lib/carver", "/var/lib/kubelet/pods"} <= set(this.folders())
    assert "/dev" not in this.folders()
    assert "group" in this.files["config.toml"]
