"""What docs/operations.md has people type, on two services with groups of their own."""

import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import nodes
import pytest
from nodes import Node, Stand
from real.any import AnyHost

from agent.cli import main, moving, streams
from agent.config.settings import Config
from agent.csi.client import mounted

MIB = 1 << 20
DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"


def runbook(name: str, end: str = "end") -> list[str]:
    """The lines of it."""
    [found] = re.findall(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: {end} -->", text(), re.S)
    return [line.strip() for line in found.splitlines() if line.strip()]


def text() -> str:
    return DOCUMENT.read_text()


@pytest.fixture
def here(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Node]:
    with nodes.made(host, config, tmp_path, "here") as node:
        yield node


@pytest.fixture
def there(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Node]:
    with nodes.made(host, config, tmp_path, "node-b") as node:
        yield node


def type_in(node: Node, line: str, backups: Path, stand: Stand | None = None) -> None:
    """As a shell does on that node."""
    words = shlex.split(line.replace("/backup", str(backups)))
    assert words.pop(0) == "carver"
    out = words[words.index(">") + 1] if ">" in words else ""
    source = words[words.index("<") + 1] if "<" in words else ""
    parsed = main.parser().parse_args([one for one in words if one not in ("<", ">", out, source)])
    noun, verb = words[:2]
    match noun, verb:
        case "snapshot", "create":
            node.at.take(parsed.volume, parsed.name, parsed.size)
        case "snapshot", "delete":
            node.at.drop(parsed.name, confirmed=parsed.yes)
        case "snapshot", "send":
            with Path(out).open("wb") as file:
                streams.send(
                    node.at, parsed.name, file, since=parsed.since or "", compress=parsed.compress
                )
        case "volume", "receive":
            with Path(source or "/dev/null").open("rb") as file:
                streams.received(node.at, parsed, file)
        case "volume", "move":
            assert stand is not None
            moving.carry_out(node.at, parsed, lambda _node: stand)
        case _:
            raise AssertionError(line)


def test_backups_of_each_night_are_restored_on_a_bare_node(
    here: Node, there: Node, tmp_path: Path
) -> None:
    backups = tmp_path / "backup"
    backups.mkdir()
    volume = here.client.create("db", 64 * MIB, mounted("ext4"))
    staging = here.directory / "staging"
    here.client.stage(volume, staging, mounted("ext4"))
    here.client.unstage(volume.volume_id, staging)
    chance = random.Random(9)
    for line in runbook("backup"):
        if " create " in line:
            # Behind the file system's own blocks, of which nobody is told.
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
    there.client.stage(restored, there.directory / "staging", mounted("ext4"))
    there.client.unstage(restored.volume_id, there.directory / "staging")


def test_a_node_is_drained_with_its_data(
    here: Node, there: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {
        "csi.storage.k8s.io/pv/name": "pvc-1",
        "csi.storage.k8s.io/pvc/name": "data",
        "csi.storage.k8s.io/pvc/namespace": "shop",
    }
    volume = here.client.create("pvc-1", 24 * MIB, mounted("ext4"), parameters=about)
    here.client.stage(volume, here.directory / "staging", mounted("ext4"))
    here.client.unstage(volume.volume_id, here.directory / "staging")
    for line in runbook("drain"):
        type_in(here, line, tmp_path, Stand(there))
    told = capsys.readouterr().err
    [moved] = there.client.volumes()
    # What re-points the claim names it all.
    assert moved.volume_id in told
    assert '"values": ["node-b"]' in told
    order = [told.index(one) for one in ("Retain", "delete pvc data", "create --filename")]
    assert order == sorted(order)
    there.client.stage(moved, there.directory / "staging", mounted("ext4"))
    for line in runbook("drained"):
        type_in(here, line, tmp_path, Stand(there))
    assert here.names() == set()
    there.client.unstage(moved.volume_id, there.directory / "staging")
