"""deploy/kind's scripts, with fake programs that record how they are called."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
KIND = ROOT / "deploy" / "kind"
LOOP = "/dev/loop7"

# What the programs do, by the words that they are called with, in the shell's patterns.
PROGRAMS = {
    "id": {"*": "echo 0"},
    "docker": {},
    "dmsetup": {},
    "modprobe": {"*dm_raid": "exit 1"},
    "kind": {
        "get clusters": 'cat "$STATE/clusters" 2>/dev/null || :',
        "create*": 'echo carver > "$STATE/clusters"; echo made > "$KUBECONFIG"',
        "delete*": 'rm "$STATE/clusters"',
        "export*": 'echo exported > "$KUBECONFIG"',
    },
    "kubectl": {"*get daemonset*": "exit 1", "apply --filename -": 'cat > "$STATE/applied"'},
    "losetup": {
        "--associated *carver.img*": 'cat "$STATE/loop" 2>/dev/null || :',
        "--find --show*": f'echo {LOOP} | tee "$STATE/loop"',
        f"--detach {LOOP}": 'rm "$STATE/loop"',
        "--associated /dev/dm-4*": "echo /dev/loop9",
    },
    "vgs": {"*": 'test -e "$STATE/group"'},
    "vgcreate": {"*": 'touch "$STATE/group"'},
    "lvs": {"*": "echo '  253:4'; echo '  -1:-1'"},
    "vgchange": {},
    "vgremove": {"*": 'rm "$STATE/group"'},
    "sleep": {},
    "uname": {"*": "echo x86_64"},
    "mkdir": {"*": '/bin/mkdir -p "$2"'},
    "find": {"/dev *": "echo /dev/dm-4; echo /dev/sda", "*": '/usr/bin/find "$@"'},
    "stat": {"*/dev/dm-4": "echo 0xfd 0x4", "*": "echo 0x8 0x0"},
}


class Machine:
    """Programs on a PATH of their own, a folder for the scripts' state, a project with an image."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.state = folder, folder / "bin", folder / "kind"
        self.bin.mkdir()
        for name, replies in PROGRAMS.items():
            self.reply(name, replies)
        self.project = folder / "project"
        (self.project / "dist").mkdir(parents=True)
        (self.project / "deploy").symlink_to(ROOT / "deploy")
        (self.project / "dist" / "carver-0.1.0-amd64.oci.tar").touch()

    def reply(self, name: str, replies: dict[str, str]) -> None:
        """Let a program do something; what it was asked is written down."""
        cases = "".join(
            f"{words.replace(' ', chr(92) + ' ')}) {what} ;;\n" for words, what in replies.items()
        )
        # Commands that others start in a pipe are written whole: one write each.
        log = f'printf "%s\\n" "{name} $*" >> "$LOG"'
        script = f'#!/bin/sh\n{log}\ncase "$*" in\n{cases}*) : ;;\nesac\n'
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
        """Run a script, with the machine's own programs first."""
        # As the script is found by its own path, it is copied to where the project is.
        text = (KIND / script).read_text().replace('$(readlink -f "$0")', "$0")
        return subprocess.run(
            ["/bin/bash", "-c", text, str(self.project / "deploy" / "kind" / script), *arguments],
            env={
                "PATH": path or f"{self.bin}:/usr/bin:/bin",
                "CARVER_KIND_STATE": str(self.state),
                "STATE": str(self.folder),
                "LOG": str(self.folder / "log"),
                "HOME": str(self.folder),
                "KUBECONFIG": str(self.folder / "mine"),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def succeed(self, script: str) -> str:
        ended = self.run(script)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    @property
    def asked(self) -> list[str]:
        """What was asked of the programs, but for looking about."""
        lines = (self.folder / "log").read_text().splitlines()
        return [
            one for one in lines if one.split()[0] not in {"id", "find", "stat", "mkdir", "uname"}
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_up_makes_a_cluster_with_carver_in_it(machine: Machine) -> None:
    output = machine.succeed("up.sh")
    assert f"export KUBECONFIG={machine.state}/kubeconfig" in output
    assert f"vgcreate --devices {LOOP} --metadatasize 8m carver-kind {LOOP}" in machine.asked
    assert any(one.startswith("kind load image-archive --name carver ") for one in machine.asked)
    assert (machine.state / "carver.img").stat().st_size == 10 << 30
    applied = (machine.folder / "applied").read_text()
    assert f'devices = ["{LOOP}"]' in applied
    assert "/dev/carver-kind" not in applied
    assert "no module dm_raid" in output


def test_up_again_changes_neither_the_cluster_nor_the_caller_s_kubeconfig(
    machine: Machine,
) -> None:
    (machine.folder / "mine").write_text("mine")
    machine.succeed("up.sh")
    machine.succeed("up.sh")
    for once in ("vgcreate", "losetup --find", "kind create"):
        assert len([one for one in machine.asked if one.startswith(once)]) == 1
    assert (machine.folder / "mine").read_text() == "mine"
    assert (machine.state / "kubeconfig").read_text() == "exported\n"
    assert (machine.state / "kubeconfig").stat().st_mode & 0o777 == 0o600


def test_up_with_a_controller_installs_what_the_chart_renders_and_waits_for_it(
    machine: Machine,
) -> None:
    rendered = ROOT / "deploy" / "kubernetes" / "kind.yaml"
    machine.reply("helm", {"template*": f"cat {rendered}"})
    ended = machine.run("up.sh", "--controller")
    assert ended.returncode == 0, ended.stderr
    [asked] = [one for one in machine.asked if one.startswith("helm template carver ")]
    assert asked.endswith("--set controller.enabled=true,sidecars.resizer.modify=auto")
    waited = [one for one in machine.asked if "rollout status" in one]
    assert [one.rpartition(" ")[2] for one in waited] == [
        "daemonset/carver-node",
        "deployment/carver-controller",
    ]
    machine.reply("kubectl", {"*status*deployment*": "exit 1", "apply --filename -": "cat"})
    ended = machine.run("up.sh", "--controller")
    assert ended.returncode == 1
    assert "Carver is not ready: deployment/carver-controller" in ended.stderr


def test_images_that_docker_has_are_loaded_and_the_others_are_named(machine: Machine) -> None:
    machine.reply("docker", {"image inspect *provisioner*": "exit 1"})
    ended = machine.run("up.sh")
    assert "docker has no registry.k8s.io/sig-storage/csi-provisioner" in ended.stdout
    assert [one for one in machine.asked if one.startswith("kind load docker-image")] == [
        next(one for one in machine.asked if "csi-resizer" in one and "kind load" in one)
    ]


@pytest.mark.parametrize(
    ("name", "replies", "sentence"),
    [
        ("id", {"*": "echo 1000"}, "run it as root"),
        ("docker", {"info*": "exit 1"}, "docker does not answer"),
        ("dmsetup", {"*": "exit 1"}, "device-mapper does not answer"),
        ("uname", {"*": "echo riscv64"}, "riscv64"),
    ],
)
def test_up_says_what_it_lacks_and_changes_nothing(
    machine: Machine, name: str, replies: dict[str, str], sentence: str
) -> None:
    machine.reply(name, replies)
    ended = machine.run("up.sh")
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert not machine.state.exists()


def test_up_fails_without_an_image(machine: Machine) -> None:
    complaint = "up.sh: there is no image for amd64 in dist/: run make image\n"
    [image] = (machine.project / "dist").iterdir()
    for remove in (image.unlink, image.parent.rmdir):
        remove()
        ended = machine.run("up.sh")
        assert (ended.returncode, ended.stderr) == (1, complaint)


@pytest.mark.parametrize(("processor", "own"), [("x86_64", "amd64"), ("aarch64", "arm64")])
def test_up_takes_the_newest_image_for_this_machine_s_processor(
    machine: Machine, processor: str, own: str
) -> None:
    for version in ("0.1.0", "0.9.0", "0.10.0"):
        for one in ("amd64", "arm64"):
            (machine.project / "dist" / f"carver-{version}-{one}.oci.tar").touch()
    machine.reply("uname", {"*": f"echo {processor}"})
    machine.succeed("up.sh")
    [loaded] = [one for one in machine.asked if one.startswith("kind load image-archive")]
    assert loaded.endswith(f"/carver-0.10.0-{own}.oci.tar")


@pytest.mark.parametrize("program", ["kind", "kubectl", "docker"])
def test_up_names_the_program_that_is_missing(machine: Machine, program: str) -> None:
    (machine.bin / program).unlink()
    # No other place is looked at, which might have it.
    (machine.bin / "dirname").symlink_to("/usr/bin/dirname")
    ended = machine.run("up.sh", path=str(machine.bin))
    assert (ended.returncode, ended.stderr) == (1, f"up.sh: {program} is missing\n")


@pytest.mark.parametrize("arguments", [["10G"], ["--size", "large"], ["--size"]])
def test_up_refuses_arguments_that_it_does_not_know(machine: Machine, arguments: list[str]) -> None:
    assert machine.run("up.sh", *arguments).returncode == 1
    assert not machine.state.exists()


def test_down_removes_all_that_up_made_and_then_finds_nothing_to_do(machine: Machine) -> None:
    machine.succeed("up.sh")
    before = len(machine.asked)
    machine.succeed("down.sh")
    assert not machine.state.exists()
    assert not [one for one in ("clusters", "loop", "group") if (machine.folder / one).exists()]
    done = machine.asked[before:]
    # In this order: each is in use until the one before it is gone.
    order = [
        "kind delete cluster --name carver",
        "losetup --detach /dev/loop9",
        f"vgchange --devices {LOOP} --activate n carver-kind",
        f"vgremove --devices {LOOP} --yes carver-kind",
        f"losetup --detach {LOOP}",
    ]
    assert [one for one in done if one in order] == order
    # Of the names in /dev only the volume's own.
    assert not [one for one in done if "/dev/sda" in one]
    before = len(machine.asked)
    machine.succeed("down.sh")
    assert machine.asked[before:] == ["kind get clusters"]


def test_down_leaves_everything_where_a_volume_is_in_use(machine: Machine) -> None:
    machine.succeed("up.sh")
    machine.reply("vgchange", {"*": "exit 5"})
    machine.reply("vgremove", {"*": "echo in use >&2; exit 5"})
    assert machine.run("down.sh").returncode == 5
    assert (machine.state / "carver.img").exists()
    assert (machine.folder / "loop").exists()


def test_mounts_of_the_node_are_not_propagated_to_the_machine() -> None:
    [node] = yaml.safe_load((KIND / "cluster.yaml").read_text())["nodes"]
    assert {one["hostPath"]: one["propagation"] for one in node["extraMounts"]} == {
        "/dev": "None",
        "/run/lock/lvm": "None",
    }


@pytest.mark.parametrize("script", ["up.sh", "down.sh"])
def test_the_scripts_are_executable(script: str) -> None:
    assert os.access(KIND / script, os.X_OK)
    subprocess.run(["bash", "-n", str(KIND / script)], check=True)
