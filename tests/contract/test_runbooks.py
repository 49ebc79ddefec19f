"""The commands of docs/operations.md, on two services with groups of their own."""

import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import api_server
import nodes
import pytest
from api_server import kubeconfig
from binding import Cluster
from nodes import Node, Stand
from real.any import AnyHost

from agent.cli import terminal
from agent.core import errors
from agent.csi.client import mounted
from agent.extras.transfer import claim_moves, move_command, streams_command
from agent.settings.settings import Config
from proto import csi_pb2 as csi

MIB = 1 << 20
DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"


def runbook(name: str) -> list[str]:
    """The lines of a runbook."""
    marked = rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->"
    [found] = re.findall(marked, DOCUMENT.read_text(), re.S)
    return [line.strip() for line in found.splitlines() if line.strip()]


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
    line = line.replace("/backup", str(backups))
    words = shlex.split(line.replace("/etc/carver/admin.conf", f"{backups}/kubeconfig"))
    assert words.pop(0) == "carver"
    out = words[words.index(">") + 1] if ">" in words else ""
    source = words[words.index("<") + 1] if "<" in words else ""
    redirections = ("<", ">", out, source)
    parsed = nodes.command_line().parse_args([one for one in words if one not in redirections])
    noun, verb = words[:2]
    match noun, verb:
        case "snapshot", "create":
            node.at.take(parsed.volume, parsed.name, parsed.size)
        case "snapshot", "delete":
            node.at.drop(parsed.name, confirmed=parsed.yes)
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
            raise AssertionError(line)


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
        for line in runbook("replace"):
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
    here.at.take("pvc-1", "sunday", "")
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
