"""What is read from a manifest to run its pod without Kubernetes."""

import collections
import itertools
from pathlib import Path

import pytest
from container import pod, privileges

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
    variables = options(words, "--env")
    assert (variables[0], variables[-1]) == ("CARVER_NODE_ID=node-1", "CARVER_LOG_LEVEL=debug")
    assert "CARVER_CONTROLLERS=carver-controller.carver-system.svc:9811" in variables
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


@pytest.mark.parametrize("manifest", ["container-lvm2", "host-lvm2"])
def test_a_pod_without_a_privilege_is_the_same_but_for_that(manifest: str) -> None:
    this = pod.of(KUBERNETES / f"{manifest}.yaml")
    whole = collections.Counter(this.words("node-1"))
    granted = this.granted()
    assert len(granted) == len(set(granted)) > 8
    for privilege in granted:
        less = this.without(privilege)
        # A folder that nothing of the node's is in has nothing to pass on, either.
        own = {one for one in granted if one.startswith(f"{privilege}: ")}
        assert set(granted) - set(less.granted()) == {privilege} | own
        words = collections.Counter(less.words("node-1"))
        assert (whole - words).total() <= 2
        assert words != whole
        assert this.granted() == granted


def test_a_pod_without_a_folder_of_the_node_has_an_empty_one() -> None:
    less = pod.of(KUBERNETES / "container-lvm2.yaml").without("/etc/lvm")
    mounts = [one for one in options(less.words("node-1"), "--mount") if "/etc/lvm" in one]
    assert mounts == ["type=tmpfs,src=tmpfs,dst=/etc/lvm,options=nosuid:nodev"]


def test_a_pod_without_root_is_started_as_nobody() -> None:
    words = pod.of(KUBERNETES / "host-lvm2.yaml").without("runAsUser").words("node-1")
    start = words.index(pod.NAME) + 1
    assert words[start : start + 3] == ["setpriv", "--reuid", str(pod.NOBODY)]
    assert words[-2:] == ["carver", "serve"]


def test_a_pod_with_classes_of_a_case_keeps_the_settings_of_its_own() -> None:
    this = pod.of(KUBERNETES / "host-lvm2.yaml")
    [classes] = {one.classes for one in privileges.CASES if one.classes}
    text = this.configured(classes).files["config.toml"]
    assert text.endswith(classes)
    assert text.removesuffix(classes) in this.files["config.toml"]
    assert 'lvm = "host"' in text
