"""The marked commands of docs/operations.md and docs/runbooks, on services with own groups.

A block of commands is marked by comments, `<!-- name: begin -->` and `<!-- name: end -->`. Its
lines are run as they are written, with the names of the test's own group, disks and volumes.
"""

import configparser
import io
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import api_server
import configured
import expect
import grpc
import nodes
import pytest
import serving
import yaml
from api_server import kubeconfig
from binding import Cluster
from nodes import Node, Stand
from real.any import AnyHost, device
from real.host import RealHost
from serving import machine, served

from agent.cli import status, terminal, volume_verbs
from agent.core import errors, ids
from agent.csi.client import Client, block, mounted
from agent.extras.transfer import claim_moves, move_command, streams_command
from agent.groups import group_definitions
from agent.settings.settings import BackingFile, Config, GroupDefinition
from lvm import report
from mount import loop, mounts, options
from mount.mount_errors import CommandFailed
from proto import csi_pb2 as csi

MIB = 1 << 20
DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = [DOCS / "operations.md", *sorted((DOCS / "runbooks").glob("*.md"))]


def runbook(name: str) -> list[str]:
    """The lines of a runbook."""
    marked = rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->"
    text = "".join(one.read_text() for one in DOCUMENTS)
    [found] = re.findall(marked, text, re.S)
    return [line.strip() for line in found.splitlines() if line.strip()]


def block_of(name: str) -> str:
    """The text of a marked block, without its indentation."""
    marked = rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->"
    [found] = re.findall(marked, "".join(one.read_text() for one in DOCUMENTS), re.S)
    return textwrap.dedent(found)


def files_of(page: str) -> dict[str, configparser.ConfigParser]:
    """The files of systemd's that a page shows, by what their name ends with."""
    found = {}
    text = (DOCS / page).read_text()
    for shown in re.findall(r"^ +\[Unit\]\n(?:(?: +.*)?\n)+?(?=^ {0,3}\S)", text, re.M):
        parsed = configparser.ConfigParser(interpolation=None, delimiters="=")
        parsed.optionxform = str  # type: ignore[assignment,method-assign]
        parsed.read_string(textwrap.dedent(shown))
        found["timer" if "Timer" in parsed else "service"] = parsed
    return found


def lvm2(host: AnyHost, line: str, **names: str) -> None:
    """Run a line of lvm2's as a shell on the node does, with these names for those in it."""
    for old, new in names.items():
        line = line.replace(old.replace("__", "/dev/"), new)
    words = shlex.split(line)
    # Carver's own commands separate options from names; what people type does not.
    first = next(at for at, one in enumerate(words[1:], 1) if one.startswith((*names.values(),)))
    host.lvm(*words[:first], "--", *words[first:])


def use(node: Node, volume: csi.Volume) -> None:
    """Stage a volume, which has a file system then, and unstage it."""
    node.client.stage(volume, node.directory / "staging", mounted("ext4"))
    node.client.unstage(volume.volume_id, node.directory / "staging")


@pytest.fixture
def there(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Node]:
    with nodes.made(host, config, tmp_path, "node-b") as node:
        yield node


def type_in(node: Node, line: str, backups: Path, stand: Stand | None = None) -> None:
    """Run a line as a shell on that node does."""
    [default_class] = (one.name for one in node.config.classes if one.default)
    line = line.replace("/backup", str(backups)).replace("CLASS", default_class)
    words = shlex.split(line.replace("/etc/carver/admin.conf", f"{backups}/kubeconfig"))
    assert words.pop(0) == "carver"
    out = words[words.index(">") + 1] if ">" in words else ""
    source = words[words.index("<") + 1] if "<" in words else ""
    redirections = ("<", ">", out, source)
    parsed = nodes.command_line().parse_args([one for one in words if one not in redirections])
    noun, verb = words[:2]
    match noun, verb:
        case "snapshot", "send":
            with Path(out).open("wb") as file:
                streams_command.send(
                    node.at, parsed.name, file, since=parsed.since or "", compress=parsed.compress
                )
        case "volume", "receive":
            with Path(source or "/dev/null").open("rb") as file:
                if parsed.kubeconfig:
                    claim_moves.finish(node.at, parsed)
                else:
                    streams_command.received(node.at, parsed, file)
        case "volume", "move":
            assert stand is not None
            move_command.carry_out(node.at, parsed, lambda _node: stand)
        case _:
            parsed.action(node.at, parsed)


@pytest.mark.variation
def test_backups_of_each_night_are_restored_on_a_bare_node(
    here: Node, there: Node, tmp_path: Path
) -> None:
    backups = tmp_path / "backup"
    backups.mkdir()
    use(here, here.client.create("db", 64 * MIB, mounted("ext4")))
    chance = random.Random(9)
    for line in runbook("backup"):
        if " create " in line:
            # Behind the file system's own blocks.
            path = here.device("vol-db")
            at = (chance.randrange(40 * MIB) + 20 * MIB) // 4096 * 4096
            here.host.write_bytes(path, at, chance.randbytes(8192))
        type_in(here, line, backups)
    content = here.content("snap-tuesday", 64 * MIB)
    assert len(list(backups.iterdir())) == 3
    for line in runbook("restore")[:-1]:
        type_in(there, line, backups)
    assert there.content("vol-db", 64 * MIB) == content
    type_in(there, runbook("restore")[-1], backups)
    [restored] = there.client.volumes()
    use(there, restored)


class Typed:
    """The command `carver` of a shell, as a program that a test answers.

    The program writes its words to a pipe, and gives out what comes back by another one, with the
    exit code.
    """

    PROGRAM = """#!/bin/bash
    printf '%s\\0' "$@" > {0}/words
    cat {0}/said
    exit "$(cat {0}/code)"
    """

    def __init__(self, node: Node, directory: Path) -> None:
        self._node, self._directory = node, directory
        # What becomes of an answer, before it is given.
        self.change: Callable[[Sequence[str], int, bytes], tuple[int, bytes]]
        self.change = lambda _words, code, said: (code, said)
        directory.mkdir()
        for one in ("words", "said", "code"):
            os.mkfifo(directory / one)
        program = directory / "carver"
        program.write_text(textwrap.dedent(self.PROGRAM.format(directory)))
        program.chmod(0o700)
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while words := (self._directory / "words").read_bytes().decode().split("\0")[:-1]:
            out = io.BytesIO()
            try:
                self._carry_out(words, out)
                code = 0
            except (errors.AgentError, grpc.RpcError) as error:
                code, out = 1, io.BytesIO(str(error).encode())
            code, said = self.change(words, code, out.getvalue())
            (self._directory / "said").write_bytes(said)
            (self._directory / "code").write_text(str(code))

    def _carry_out(self, words: Sequence[str], out: io.BytesIO) -> None:
        node, parsed = self._node, nodes.command_line().parse_args(words)
        if words[:2] == ["snapshot", "send"]:
            streams_command.send(
                node.at, parsed.name, out, since=parsed.since or "", compress=parsed.compress
            )
            return
        text = io.StringIO()
        with redirect_stdout(text):
            if words[0] == "status":
                config = replace(node.config, devices=node.host.lvm.devices)
                print(json.dumps(asdict(status.read(config, machine(node.host)))))
            else:
                parsed.action(node.at, parsed)
        out.write(text.getvalue().encode())


def chains(place: Path) -> list[list[Path]]:
    """The streams of a directory of backups: each whole one with the changes after it."""
    found: list[list[Path]] = []
    for one in sorted(place.glob("*.stream")):
        if "whole" in one.name:
            found.append([])
        found[-1].append(one)
    return found


@pytest.mark.long_on_lvm
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is the operator's, not Carver's")
def test_all_claims_are_saved_each_night_and_each_chain_is_restored(
    here: Node, there: Node, tmp_path: Path
) -> None:
    size = 16 * MIB
    for name in ("pvc-1", "pvc-2"):
        about = {**ABOUT, "csi.storage.k8s.io/pv/name": name, "csi.storage.k8s.io/pvc/name": name}
        use(here, here.client.create(name, size, mounted("ext4"), parameters=about))
    here.client.create("no-claim", size, block())
    typed = Typed(here, tmp_path / "bin")
    program = tmp_path / "bin" / "carver-backup"
    program.write_text(block_of("carver-backup"))
    program.chmod(0o700)
    backups = tmp_path / "backup"
    backups.mkdir()
    service = files_of("runbooks/backup-schedule.md")["service"]
    command = service["Service"]["ExecStart"].replace("/usr/local/sbin", str(program.parent))
    assert runbook("backup by hand") == ['carver-backup "/backup/$(uname -n)"']
    # systemd's %H is the host's name: both have the same chain.
    assert command.split() == [str(program), "/backup/%H"]
    chance = random.Random(5)
    contents: dict[str, bytes] = {}
    said: list[str] = []

    def night(day: str) -> int:
        for name in ("pvc-1", "pvc-2"):
            at = (10 * MIB + chance.randrange(4 * MIB)) // 4096 * 4096
            path = here.device(f"vol-{name}")
            here.host.write_bytes(path, at, chance.randbytes(8192))
            contents[f"{name} {day}"] = here.content(f"vol-{name}", size)
        path = os.environ["PATH"]
        ran = subprocess.run(
            [program, backups],
            env={"PATH": f"{program.parent}:{path}", "DAY": day, "NIGHTS": "3"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        said[:] = ran.stderr.splitlines()
        return ran.returncode

    def kept(name: str) -> list[str]:
        place = backups / f"shop_{name}_{name}"
        return [one.name.removesuffix(".stream") for one in sorted(place.glob("*.stream"))]

    assert night("2026-11-01") == night("2026-11-02") == 0
    assert kept("pvc-1") == kept("pvc-2") == ["2026-11-01-whole", "2026-11-02-changes"]
    assert len(list(backups.iterdir())) == 2
    assert here.client.snapshots_here().entries
    # Of pvc-1 a stream breaks off: that one is not saved, the other is, and no file is left.
    as_is = typed.change
    typed.change = lambda words, code, said: (
        (1, said[:-100])
        if words[:2] == ["snapshot", "send"] and "pvc-1" in words[2]
        else (code, said)
    )
    assert night("2026-11-03") != 0
    typed.change = as_is
    assert kept("pvc-1") == ["2026-11-01-whole", "2026-11-02-changes"]
    assert kept("pvc-2")[-1] == "2026-11-03-changes"
    assert list(backups.rglob("*.part")) == []
    # The next one is of the changes since the last that was saved. The same night again is none.
    assert night("2026-11-04") == night("2026-11-04") == 0
    assert kept("pvc-1")[-1] == "2026-11-04-changes"
    assert kept("pvc-2")[-1] == "2026-11-04-whole"
    assert night("2026-11-05") == 0
    assert kept("pvc-1")[0] == "2026-11-01-whole"
    assert kept("pvc-1")[-1] == "2026-11-05-whole"
    assert said == []
    # Its snapshot is lost: a whole one again, which is reported.
    typed.change = lambda words, code, said: (
        (code, said.replace(b'"ready": true', b'"ready": false'))
        if words[:2] == ["snapshot", "list"]
        else (code, said)
    )
    assert night("2026-11-06") == 0
    assert [one for one in said if one.startswith("<4>WHOLE AGAIN: pvc-1:")] != []
    typed.change = as_is
    here.at.delete_snapshot("backup-pvc-2-2026-11-06", confirmed=True)
    assert night("2026-11-07") == 0
    # So many streams as the chain may have can always be gone back by.
    assert kept("pvc-1")[0] == "2026-11-01-whole"
    assert kept("pvc-1")[-3:] == ["2026-11-05-whole", "2026-11-06-whole", "2026-11-07-changes"]
    assert kept("pvc-2")[0] == "2026-11-04-whole"
    assert kept("pvc-2")[-2:] == ["2026-11-06-whole", "2026-11-07-whole"]
    taken = {one.snapshot_id.rpartition("/")[2] for one in here.client.snapshots_here().entries}
    assert taken == {"snap-backup-pvc-1-2026-11-07", "snap-backup-pvc-2-2026-11-07"}
    # Each night's snapshot overflows: the streams of three nights before the last stay.
    typed.change = lambda words, code, said: (
        (code, said.replace(b'"ready": true', b'"ready": false'))
        if words[:2] == ["snapshot", "list"]
        else (code, said)
    )
    for day in ("2026-11-08", "2026-11-09", "2026-11-10"):
        assert night(day) == 0
        assert len(said) == 2
    typed.change = as_is
    for name in ("pvc-1", "pvc-2"):
        assert [chain[0].name[8:16] for chain in chains(backups / f"shop_{name}_{name}")][-3:] == [
            "08-whole",
            "09-whole",
            "10-whole",
        ]
    assert kept("pvc-1")[0] == "2026-11-06-whole"
    assert kept("pvc-2")[0] == "2026-11-07-whole"

    for name in ("pvc-1", "pvc-2"):
        place = backups / f"shop_{name}_{name}"
        sums: list[str | Path] = [
            "sha256sum",
            "--check",
            "--quiet",
            *sorted(place.glob("*.sha256")),
        ]
        assert subprocess.run(sums, cwd=place, check=False).returncode == 0
        for number, chain in enumerate(chains(place)):
            restored = f"{name}-{number}"
            for one in chain:
                nodes.receive(there, restored, one.read_bytes())
            day = chain[-1].name[:10]
            assert there.content(f"vol-{restored}", size) == contents[f"{name} {day}"]
            streams_command.abort(there.at, restored, confirmed=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_understands_the_timer_and_its_service(tmp_path: Path) -> None:
    found = files_of("runbooks/backup-schedule.md")
    assert found.keys() == {"service", "timer"}
    for kind, parsed in found.items():
        with (tmp_path / f"carver-backup.{kind}").open("w") as file:
            parsed.write(file, space_around_delimiters=False)
    program = tmp_path / "carver-backup"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    unit = tmp_path / "carver-backup.service"
    unit.write_text(unit.read_text().replace("/usr/local/sbin", str(tmp_path)))
    verify: list[str | Path] = [
        "systemd-analyze",
        "verify",
        *sorted(tmp_path.glob("carver-backup.*")),
    ]
    ran = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert "carver-backup" not in ran.stderr, ran.stderr


def test_a_restored_volume_gets_another_claim(
    here: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed(here)
    here.at.take_snapshot("pvc-1", "sunday", "")
    nodes.receive(here, "trial", nodes.stream(here, "sunday"))
    streams_command.finish(here.at, "trial")
    capsys.readouterr()
    [line] = runbook("trial")
    type_in(here, line, tmp_path)
    shown = json.loads(capsys.readouterr().out)
    page = (DOCS / "runbooks" / "backup-schedule.md").read_text()
    [text] = re.findall(r"^       apiVersion: v1\n(?: {7}.*\n)+", page, re.M)
    names = {"SIZE": str(shown["size_bytes"]), "HANDLE": shown["id"], "NODE": "here"}
    for old, new in {**names, "CLASS": shown["carver/class"]}.items():
        text = text.replace(old, new)
    pv, claim = yaml.safe_load_all(textwrap.dedent(text))
    [volume] = (one for one in here.client.volumes() if "vol-trial" in one.volume_id)
    assert pv["spec"]["csi"]["volumeHandle"] == volume.volume_id
    assert pv["spec"]["csi"]["volumeAttributes"] == dict(volume.volume_context)
    assert int(pv["spec"]["capacity"]["storage"]) == volume.capacity_bytes
    [term] = pv["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    [at] = term["matchExpressions"]
    assert {at["key"]: at["values"][0]} == dict(volume.accessible_topology[0].segments)
    assert claim["spec"]["volumeName"] == pv["metadata"]["name"]
    assert pv["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
    use(here, volume)


ABOUT = {
    "csi.storage.k8s.io/pv/name": "pvc-1",
    "csi.storage.k8s.io/pvc/name": "data",
    "csi.storage.k8s.io/pvc/namespace": "shop",
}


def claimed(node: Node) -> csi.Volume:
    """An unused volume of a claim, with a file system."""
    volume = node.client.create("pvc-1", 24 * MIB, mounted("ext4"), parameters=ABOUT)
    use(node, volume)
    return volume


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions of the commands; each is answered with yes."""
    found: list[str] = []

    def yes(question: str) -> bool:
        found.append(question)
        return True

    monkeypatch.setattr(terminal, "confirmed", yes)
    return found


def require_bound(cluster: Cluster, volume: csi.Volume, node: str) -> None:
    """The claim has the volume on that node, and nothing else of it is left."""
    cluster.settle()
    [found] = cluster.volumes.values()
    assert found["spec"]["csi"]["volumeHandle"] == volume.volume_id
    assert found["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    [term] = found["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == [node]
    assert cluster.claim["spec"]["volumeName"] == found["metadata"]["name"]
    assert cluster.claim["status"]["phase"] == "Bound"
    assert (cluster.deleted, cluster.dangers, cluster.blank) == ([], [], [])


@pytest.mark.variation
def test_a_node_is_drained_with_its_data(
    here: Node, there: Node, tmp_path: Path, asked: list[str]
) -> None:
    volume = claimed(here)
    with api_server.running(Cluster(volume.volume_id, nodes=("here", "node-b"))) as cluster:
        kubeconfig(tmp_path / "kubeconfig", cluster.url)
        for line in runbook("drain"):
            type_in(here, line, tmp_path, Stand(there))
        [moved] = there.client.volumes()
        require_bound(cluster, moved, "node-b")
        assert len(asked) == 6
        there.client.stage(moved, there.directory / "staging", mounted("ext4"))
        for line in runbook("drained"):
            type_in(here, line, tmp_path, Stand(there))
        assert here.names() == set()
        there.client.unstage(moved.volume_id, there.directory / "staging")


@pytest.mark.variation
def test_a_drain_is_undone_while_the_claim_is_as_it_was(
    here: Node, there: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = claimed(here)
    answers = iter([True, True, False])
    monkeypatch.setattr(terminal, "confirmed", lambda _question: next(answers))
    with api_server.running(Cluster(volume.volume_id, nodes=("here", "node-b"))) as cluster:
        kubeconfig(tmp_path / "kubeconfig", cluster.url)
        with pytest.raises(errors.NotConfirmed):
            type_in(here, runbook("drain")[0], tmp_path, Stand(there))
        assert len(cluster.volumes) == 2
        undo = "carver volume move pvc-1 --undo --kubeconfig /etc/carver/admin.conf --yes"
        type_in(here, undo, tmp_path, Stand(there))
        require_bound(cluster, volume, "here")
    assert there.names() == set()
    assert list(here.client.volumes()) == [volume]
    use(here, volume)


@pytest.mark.variation
def test_a_move_without_a_kubeconfig_prints_how_to_rebind_the_claim(
    here: Node, there: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed(here)
    type_in(here, "carver volume move pvc-1 --to node-b", tmp_path, Stand(there))
    printed = capsys.readouterr().err
    [moved] = there.client.volumes()
    assert moved.volume_id in printed
    assert '"values": ["node-b"]' in printed
    steps = ["Retain", "pv.json |", "delete pvc data", "pvc.json |", 'delete pv "$PV"']
    order = [printed.index(one) for one in (*steps, "here: carver")]
    assert order == sorted(order)


@pytest.mark.variation
def test_a_running_node_is_replaced(
    here: Node, there: Node, tmp_path: Path, asked: list[str]
) -> None:
    volume = claimed(here)
    here.client.create("scratch", 24 * MIB, mounted("ext4"))
    with api_server.running(Cluster(volume.volume_id, nodes=("here", "node-b"))) as cluster:
        kubeconfig(tmp_path / "kubeconfig", cluster.url)
        for line in (*runbook("replace"), *runbook("replaced")):
            type_in(here, line, tmp_path, Stand(there))
        assert here.names() == set()
        assert there.names() == {"vol-pvc-1", "vol-scratch"}
        [moved] = (one for one in there.client.volumes() if "pvc-1" in one.volume_id)
        require_bound(cluster, moved, "node-b")
    assert asked


@pytest.mark.long_on_lvm
def test_a_lost_node_is_replaced_from_backups(
    here: Node, there: Node, tmp_path: Path, asked: list[str]
) -> None:
    volume = claimed(here)
    backups = tmp_path / "backup"
    backups.mkdir()
    content = here.content("vol-pvc-1", 24 * MIB)
    here.at.take_snapshot("pvc-1", "sunday", "")
    stream = backups / "pvc-1-sunday.stream"
    stream.write_bytes(nodes.stream(here, "sunday"))
    with api_server.running(Cluster(volume.volume_id, nodes=("here", "node-b"))) as cluster:
        kubeconfig(backups / "kubeconfig", cluster.url)
        first, *others = runbook("replace-lost")
        type_in(there, first, backups)
        assert there.content("vol-pvc-1", 24 * MIB) == content
        for line in others:
            type_in(there, line, backups)
        [restored] = there.client.volumes()
        require_bound(cluster, restored, "node-b")
        use(there, restored)
    assert len(asked) == 6


@contextmanager
def mounted_by_hand(host: AnyHost, line: str, **names: str) -> Iterator[Path]:
    """Run `mount --options OPTIONS DEVICE PLACE`; yields the place, of the test's own."""
    for old, new in names.items():
        line = line.replace(old, new)
    program, option, words, path, _ = shlex.split(line)
    assert (program, option) == ("mount", "--options")
    _, group, name = path.removeprefix("/").split("/")
    place = host.directory / "by-hand"
    place.mkdir(exist_ok=True)
    mount_options = options.parse(words.split(","), "ext4")
    mounts.ensure_mounted(host.kernel, device(host, group, name), str(place), "ext4", mount_options)
    yield place
    host.kernel.unmount(str(place))


def used_once(client: Client, staging: Path) -> csi.Volume:
    """A claim's volume that has a file system, and is not in use any more."""
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4"), parameters=ABOUT)
    client.stage(volume, staging, mounted("ext4"))
    client.unstage(volume.volume_id, staging)
    return volume


@pytest.mark.variation
def test_a_volume_is_read_without_carver_and_served_again(
    host: AnyHost, config: Config, group: str, staging: Path
) -> None:
    with served(host, config) as (_, client):
        volume = used_once(client, staging)
        path = device(host, group, "vol-pvc-1")
        host.write_bytes(path, 40 * MIB, b"kept" * 1024)
    host.deactivate(group, "vol-pvc-1")
    names = {"GROUP": group, "vol-NAME": "vol-pvc-1"}

    activate, directory, mount = runbook("by hand without Carver")
    assert directory == f"mkdir --parents {mount.split()[-1]}"
    lvm2(host, activate, **names)
    assert host.read_bytes(device(host, group, "vol-pvc-1"), 40 * MIB, 4096) == b"kept" * 1024
    unmount, deactivate = runbook("by hand without Carver, afterwards")
    assert unmount == f"umount {mount.split()[-1]}"
    with mounted_by_hand(host, mount, **names) as place:
        if isinstance(host, RealHost):
            with pytest.raises(OSError, match="Read-only"):
                (place / "new").touch()
    lvm2(host, deactivate, **names)
    assert host.devices.find(group, "vol-pvc-1") is None

    with served(host, config) as (_, client):
        assert list(client.volumes()) == [volume]
        client.stage(volume, staging, mounted("ext4"))
        path = device(host, group, "vol-pvc-1")
        assert host.read_bytes(path, 40 * MIB, 4096) == b"kept" * 1024
        client.unstage(volume.volume_id, staging)
        client.delete(volume.volume_id)


@pytest.mark.variation
def test_a_volume_is_read_by_hand_while_carver_runs(
    host: AnyHost, config: Config, group: str, staging: Path
) -> None:
    with served(host, config) as (_, client):
        volume = used_once(client, staging)
        names = {"GROUP": group, "vol-NAME": "vol-pvc-1"}
        activate, _, mount = runbook("by hand without Carver")
        _, deactivate = runbook("by hand without Carver, afterwards")
        lvm2(host, activate, **names)
        with mounted_by_hand(host, mount, **names), expect.code("FAILED_PRECONDITION"):
            client.delete(volume.volume_id)
        lvm2(host, deactivate, **names)
        client.delete(volume.volume_id)


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is the operator's, not Carver's")
def test_saved_objects_are_made_fit_for_another_cluster(tmp_path: Path) -> None:
    """A fake of Kubernetes' binder binds what the filter leaves, without a new volume."""
    old = Cluster("data@x/vol-pvc-1")
    old.settle()
    [volume], claim = old.volumes.values(), old.claim
    other = {"metadata": {"name": "other"}, "spec": {"csi": {"driver": "another"}}}
    unbound = {"metadata": {"name": "waits", "namespace": "shop"}, "spec": {}}
    files = {"volumes": [volume, other], "claims": [claim, unbound]}
    for name, items in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"items": items}))
    (tmp_path / "saved.jq").write_text(block_of("saved objects.jq"))
    words = [word for name in files for word in ("--slurpfile", name, f"{name}.json")]
    jq = ("jq", "--null-input", *words, "--from-file", "saved.jq")
    made = subprocess.run(jq, check=True, capture_output=True, cwd=tmp_path).stdout
    pv, pvc = json.loads(made)["items"]
    assert pv["spec"] == {
        **volume["spec"],
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {
            key: value
            for key, value in volume["spec"]["claimRef"].items()
            if key not in ("uid", "resourceVersion")
        },
    }
    assert pv["metadata"].keys() <= {"name", "labels", "annotations"}
    assert pvc["spec"] == claim["spec"]
    assert pvc["metadata"]["name"] == "data"
    assert pvc["metadata"].get("annotations", {}) == {}
    assert "status" not in pv.keys() | pvc.keys()


class Kubectl:
    """What lines for kubectl do to a fake of the API server, for the kinds that they name here."""

    KINDS = ("persistentvolume", "persistentvolumeclaim")

    def __init__(self, cluster: Cluster, **names: str) -> None:
        self.cluster, self._names = cluster, names

    def type_in(self, line: str) -> None:
        words = shlex.split(self.named(line))[1:]
        if words[0] not in ("patch", "delete"):
            return
        options = [at for at, one in enumerate(words) if one.startswith("--")]
        for name in words[2 : options[0]]:
            path = self._path(words[1], name)
            _, present = self.cluster.answer(path, {})
            about = present["metadata"]
            if words[0] == "delete":
                body = {"preconditions": {"uid": about["uid"]}}
                code, answer = self.cluster.write("DELETE", path, body)
            else:
                body = json.loads(words[words.index("--patch") + 1])
                body["metadata"] = {"resourceVersion": about["resourceVersion"]}
                code, answer = self.cluster.write("PATCH", path, body)
            assert code == 200, answer
            self.cluster.settle()

    def apply(self, text: str) -> None:
        made = yaml.safe_load(self.named(text))
        path = self._path(made["kind"].lower(), "").removesuffix("/")
        code, answer = self.cluster.write("POST", path, made)
        assert code == 201, answer
        self.cluster.settle()

    def named(self, text: str) -> str:
        for old, new in self._names.items():
            text = re.sub(rf"(?<![\w-]){old.replace('_', '-')}(?![\w-])", new, text)
        return text

    def _path(self, kind: str, name: str) -> str:
        namespace = "" if kind == "persistentvolume" else "namespaces/shop/"
        assert kind in self.KINDS
        return f"/api/v1/{namespace}{kind}s/{name}"


def test_a_copy_comes_under_the_old_name_and_no_volume_is_ever_in_danger() -> None:
    page = (DOCS / "runbooks" / "migrate.md").read_text()
    step = page.partition("5. **Have the copy under the old name**")[2].partition("\n6. ")[0]
    lines = re.findall(r"^ +(kubectl .+)$", step, re.M)
    [manifest_text] = re.findall(r"^ +apiVersion: v1\n(?: {7}.*\n)+", step, re.M)
    applied = lines.index(next(one for one in lines if "jsonpath='{.status.phase}" in one))
    cluster = Cluster("data@x/vol-pvc-1")
    kubectl = Kubectl(
        cluster, PV="pvc-1", NEWPV="pvc-2", CLAIM="data", CLAIM_new="data-new", NAMESPACE="shop"
    )
    # The copy, as a provisioner leaves it, with its claim.
    old_claim, old_volume = json.loads(json.dumps([cluster.claim, cluster.volume("pvc-1")]))
    for one, name in ((old_volume, "pvc-2"), (old_claim, "data-new")):
        one["metadata"] = {"name": name, "namespace": "shop"}
        del one["status"]
    old_volume["spec"] |= {
        "claimRef": {"namespace": "shop", "name": "data-new"},
        "csi": {**old_volume["spec"]["csi"], "volumeHandle": "data@x/vol-pvc-2"},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    old_claim["spec"]["volumeName"] = "pvc-2"
    assert cluster.write("POST", "/api/v1/persistentvolumes", old_volume)[0] == 201
    kubectl.apply(yaml.safe_dump(old_claim))
    kubectl.type_in(
        "kubectl patch persistentvolume NEWPV --patch"
        """ '{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}'"""
    )
    cluster.dangers.clear()

    for line in lines[:applied]:
        kubectl.type_in(line)
        if "delete" in line:
            assert {one["status"]["phase"] for one in cluster.volumes.values()} == {"Released"}
    kubectl.apply(textwrap.dedent(manifest_text))
    assert cluster.claim["spec"]["volumeName"] == "pvc-2"
    assert cluster.claim["status"]["phase"] == "Bound"
    assert {*cluster.volumes} == {"pvc-1", "pvc-2"}
    assert (cluster.deleted, cluster.dangers, cluster.blank) == ([], [], [])


@pytest.fixture
def own_group(host: AnyHost, tmp_path: Path) -> Iterator[str]:
    """A group that a test may change for good, with a metadata area as operators make it."""
    name = f"runbook-{tmp_path.parent.name[-6:]}"
    with host.own_group(name, [host.new_device(65 * MIB)]):
        yield name


def of_group(config: Config, group: str) -> Config:
    """The settings, with all classes on this group."""
    placed = tuple(replace(one, group=group) for one in config.classes)
    return replace(config, classes=placed)


@pytest.mark.variation
def test_a_full_group_gets_a_disk_and_gives_it_back(
    host: AnyHost, config: Config, own_group: str
) -> None:
    disk = host.new_device(200 * MIB)
    names = {"GROUP": own_group, "__NEW": disk}
    with served(host, of_group(config, own_group)) as (service, client):
        whole = client.capacity().available_capacity
        first = client.create("pvc-1", whole, block())
        with expect.code("RESOURCE_EXHAUSTED"):
            client.create("pvc-2", 32 * MIB, block())
        [line] = runbook("group full")
        lvm2(host, line, **names)
        second = client.create("pvc-2", 32 * MIB, block())
        known = report.read(host.lvm).group(own_group)
        [added] = (one for one in known.disks if one.name == disk)
        assert added.metadata_bytes >= 80 * MIB

        [back] = runbook("group full, back")
        with pytest.raises(CommandFailed):
            lvm2(host, back, **names)
        client.delete(second.volume_id)
        serving.again(service)
        lvm2(host, back, **names)
        assert client.capacity().available_capacity == 0
        client.delete(first.volume_id)
        assert client.capacity().available_capacity == whole


@pytest.mark.variation
def test_a_used_disk_leaves_its_group_for_another_disk_of_it(
    host: AnyHost, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_verbs, "_LOOK_SECONDS", 0.1)
    disks, name = [host.new_device(100 * MIB) for _ in range(2)], "runbook-used"
    with host.own_group(name, disks):
        node = Node(host, of_group(config, name), name, tmp_path)
        node.start()
        volume = node.client.create("pvc-1", 64 * MIB, mounted("ext4"))
        use(node, volume)
        [old] = report.read(host.lvm).group(name).volume("vol-pvc-1").disks
        known = {one.uuid: one.name for one in report.read(host.lvm).group(name).disks}
        [new] = {*known.values()} - {known[old]}
        [line] = runbook("group full, take a disk out")
        line = line.replace("/dev/OLD", known[old]).replace("/dev/NEW", new)
        type_in(node, f"{line} --yes", tmp_path)
        assert disks_of(host, name) == [new]
        use(node, volume)
        node.client.delete(volume.volume_id)
        node.stop()


@pytest.mark.variation
def test_a_group_goes_to_another_node(host: AnyHost, config: Config, own_group: str) -> None:
    of_old = of_group(config, own_group)
    with served(host, of_old) as (_, client):
        volume = client.create("pvc-1", 8 * MIB, block())
    for line in (*runbook("export"), *runbook("import")):
        lvm2(host, line, GROUP=own_group)
    with served(host, replace(of_old, node_id="node-b")) as (_, client):
        [found] = client.volumes()
        assert found.volume_id == volume.volume_id
        assert [*found.accessible_topology[0].segments.values()] == ["node-b"]
        client.delete(found.volume_id)


@pytest.mark.variation
def test_a_copied_group_gets_another_uuid(host: AnyHost, config: Config, own_group: str) -> None:
    settings = of_group(config, own_group)
    with served(host, settings) as (_, client):
        before = client.create("pvc-1", 8 * MIB, block())
    for line in runbook("another uuid"):
        lvm2(host, line, GROUP=own_group)
    with served(host, settings) as (_, client):
        [now] = client.volumes()
        assert ids.logical_name(now.volume_id) == ids.logical_name(before.volume_id)
        assert now.volume_id != before.volume_id
        client.delete(now.volume_id)


def printed_objects(
    node: Node, lines: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The PersistentVolume and the claim that the only line of a runbook prints."""
    [line] = lines
    capsys.readouterr()
    type_in(node, line, directory)
    volume, claim = yaml.safe_load_all(capsys.readouterr().out)
    return volume, claim


def as_kubelet_has_it(volume: dict[str, Any]) -> csi.Volume:
    """The volume of a PersistentVolume, by what kubelet passes on."""
    source = volume["spec"]["csi"]
    return csi.Volume(
        volume_id=source["volumeHandle"],
        volume_context=source["volumeAttributes"],
        capacity_bytes=int(volume["spec"]["capacity"]["storage"]),
    )


@pytest.mark.variation
def test_objects_that_a_restored_database_lacks_are_printed(
    here: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = claimed(here)
    volume, claim = printed_objects(here, runbook("database restored"), tmp_path, capsys)
    assert claim["metadata"] == {"namespace": "shop", "name": "data"}
    assert volume["metadata"]["name"] == claim["spec"]["volumeName"] == "pvc-1"
    assert as_kubelet_has_it(volume) == csi.Volume(
        volume_id=made.volume_id,
        volume_context=made.volume_context,
        capacity_bytes=made.capacity_bytes,
    )
    use(here, as_kubelet_has_it(volume))


@pytest.mark.variation
def test_volumes_are_served_under_another_name_of_the_driver(
    here: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = claimed(here)
    assert [*made.accessible_topology[0].segments] == ["topology.lvm.csi.carver/node"]
    here.host.write_bytes(here.device("vol-pvc-1"), 20 * MIB, b"kept" * 1024)
    here.stop()
    here.config = replace(here.config, driver_name="storage.example.org")
    here.start()
    assert here.client.identity.GetPluginInfo(csi.GetPluginInfoRequest()).name == (
        "storage.example.org"
    )
    [listed] = here.client.volumes()
    assert listed.volume_id == made.volume_id
    volume, claim = printed_objects(here, runbook("renamed"), tmp_path, capsys)
    assert claim["metadata"] == {"namespace": "shop", "name": "data"}
    assert volume["spec"]["csi"]["driver"] == "storage.example.org"
    assert volume["metadata"]["annotations"] == {
        "pv.kubernetes.io/provisioned-by": "storage.example.org"
    }
    [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    [expression] = term["matchExpressions"]
    assert (expression["key"], expression["values"]) == (
        "topology.storage.example.org/node",
        ["here"],
    )
    renamed = as_kubelet_has_it(volume)
    # As the first provisioner left it in a PersistentVolume that is edited by hand.
    renamed.volume_context["storage.kubernetes.io/csiProvisionerIdentity"] = "1-lvm.csi.carver"
    use(here, renamed)
    assert here.host.read_bytes(here.device("vol-pvc-1"), 20 * MIB, 4096) == b"kept" * 1024
    snapshot = here.client.snapshot("1", renamed.volume_id)
    here.client.delete_snapshot(snapshot.snapshot_id)
    assert here.client.expand(renamed.volume_id, 48 * MIB).capacity_bytes == 48 * MIB
    here.client.delete(renamed.volume_id)
    assert here.names() == set()


@pytest.mark.variation
def test_a_group_on_a_file_goes_to_a_disk(
    host: AnyHost,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(volume_verbs, "_LOOK_SECONDS", 0.1)
    name = f"file-{tmp_path.parent.name[-6:]}"
    disk = host.new_device(200 * MIB)
    file = BackingFile(tmp_path / "carver.img", 96 * MIB)
    on_file = configured.carver(tmp_path, name, definitions=(GroupDefinition(name, file=file),))
    node = Node(host, on_file, name, tmp_path)
    start_with_groups(node)
    volume = node.client.create("pvc-1", 64 * MIB, mounted("ext4"))
    node.client.stage(volume, tmp_path / "staging", mounted("ext4"))
    host.write_bytes(node.device("vol-pvc-1"), 40 * MIB, b"kept" * 1024)
    loop_device = loop.find(host.kernel, str(file.path))
    assert loop_device is not None

    def type_it() -> None:
        [line] = runbook("file to disks")
        line = line.replace("LOOP", loop_device).replace("DISK", disk)
        type_in(node, f"{line} --yes", tmp_path)

    with expect.code("INVALID_ARGUMENT", "is not among the configured `devices`"):
        type_it()
    assert disks_of(host, name) == [loop_device]
    node.stop()
    # Step 2; a restart in place of a reload.
    node.config = replace(on_file, devices=(disk,))
    start_with_groups(node)
    type_it()
    assert capsys.readouterr().out.endswith(f"{name} is whole\n")
    assert disks_of(host, name) == [disk]
    # Between steps 3 and 5 a restart makes nothing.
    node.stop()
    start_with_groups(node)
    assert disks_of(host, name) == [disk]
    node.stop()
    node.config = replace(on_file, definitions=(GroupDefinition(name, (disk,)),))
    start_with_groups(node)
    node.stop()
    loop.detach(host.kernel, loop_device)
    start_with_groups(node)
    assert disks_of(host, name) == [disk]
    assert host.read_bytes(node.device("vol-pvc-1"), 40 * MIB, 4096) == b"kept" * 1024
    node.client.unstage(volume.volume_id, tmp_path / "staging")
    use(node, volume)
    node.client.delete(volume.volume_id)
    node.stop()


def start_with_groups(node: Node) -> None:
    """Start Carver, and have it make the groups of its configuration, as its process does."""
    node.start()
    service = node.service
    group_definitions.begin(service.definitions, service.volume_groups)
    group_definitions.create(service.definitions, service.volume_groups, node.group)
    assert service.definitions.failures == {}


def disks_of(host: AnyHost, group: str) -> list[str]:
    return [one.name for one in report.read(host.lvm).group(group).disks]


@pytest.mark.variation
def test_another_driver_s_volume_is_adopted_and_given_back(
    here: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "pvc-0b1e2d7a-52c1-4c7e-9f0f-6f2f8f1f9a01"
    old = f"{here.group}/{name}"
    made = ("--yes", "--wipesignatures", "y", "--zero", "y", "--activate", "y", "--type", "linear")
    here.host.lvm("lvcreate", *made, "--size", f"{64 * MIB}b", "--name", name, "--", here.group)
    here.host.write(here.device(name), "ext4")
    here.host.write_bytes(here.device(name), 40 * MIB, b"kept" * 1024)

    def type_it(block: str) -> str:
        [line] = runbook(block)
        line = line.replace("GROUP/LV", old).replace("NAMESPACE/CLAIM", "shop/data-db-0")
        type_in(here, line, tmp_path)
        return capsys.readouterr().out

    looked_at = type_it("adopt, look")
    assert here.names() == {name}
    printed = type_it("adopt")
    assert printed == looked_at
    assert here.names() == {f"vol-{name}"}
    pv, claim = yaml.safe_load_all(printed)
    assert pv["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert claim["metadata"] == {"namespace": "shop", "name": "data-db-0"}
    assert claim["spec"]["volumeName"] == pv["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == "carver"
    [volume] = here.client.volumes()
    use(here, volume)
    content = here.host.read_bytes(here.device(f"vol-{name}"), 40 * MIB, 4096)
    assert content == b"kept" * 1024
    type_it("adopt, back")
    assert here.names() == {name}


@pytest.mark.variation
def test_objects_are_made_anew_of_what_carver_shows(
    here: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(here, here.client.create("pvc-1", 24 * MIB, mounted("ext4"), parameters=ABOUT))
    raw = {**ABOUT, "csi.storage.k8s.io/pvc/name": "raw", "csi.storage.k8s.io/pv/name": "pvc-2"}
    here.client.create("pvc-2", 24 * MIB, block(), parameters=raw)
    [line] = runbook("objects")
    for volume in here.client.volumes():
        name = ids.logical_name(volume.volume_id).removeprefix("vol-")
        pv, claim = printed_objects(here, [line.replace("pvc-1", name)], tmp_path, capsys)
        manifest_file = tmp_path / "objects.yaml"
        manifest_file.write_text(yaml.safe_dump_all([pv, claim]))
        if not isinstance(here.host, RealHost):
            # The schemas are not in the lab's machine.
            from manifest import check_schemas

            check_schemas(manifest_file)
        assert pv["spec"]["csi"]["volumeHandle"] == volume.volume_id
        assert pv["spec"]["csi"]["volumeAttributes"] == dict(volume.volume_context)
        assert int(pv["spec"]["capacity"]["storage"]) == volume.capacity_bytes
        [term] = pv["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        [at] = term["matchExpressions"]
        segments = dict(volume.accessible_topology[0].segments)
        assert {at["key"]: at["values"][0]} == segments
        assert pv["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        reference = {key: pv["spec"]["claimRef"][key] for key in ("namespace", "name")}
        assert reference == claim["metadata"]
        assert claim["spec"]["volumeName"] == pv["metadata"]["name"]
        is_raw = name == "pvc-2"
        assert claim["metadata"]["name"] == ("raw" if is_raw else "data")
        assert pv["spec"]["volumeMode"] == ("Block" if is_raw else "Filesystem")
        assert pv["spec"]["csi"].get("fsType", "") == ("" if is_raw else "ext4")


@pytest.mark.variation
def test_a_fast_disk_is_replaced_by_a_fast_one(host: AnyHost, config: Config) -> None:
    """Nothing but caches is put on the new disk: it is marked in the call that adds it."""
    slow, old, new = (host.new_device(65 * MIB) for _ in range(3))
    name = "runbook-fast"
    with host.own_group(name, [slow, old]):
        host.lvm("pvchange", "--addtag", report.FAST, "--", old)
        with served(host, of_group(config, name)) as (_, client):
            while not client.replace_disk(old, new)[0]:
                known = {one.name: one for one in report.read(host.lvm).group(name).disks}
                assert new not in known or known[new].fast
            known = {one.name: one for one in report.read(host.lvm).group(name).disks}
            assert {path: one.fast for path, one in known.items()} == {slow: False, new: True}
