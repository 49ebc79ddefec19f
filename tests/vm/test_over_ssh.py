"""Volumes move from one service to another by real ssh, cut off on the way and resumed."""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from real.host import RealHost
from vm import over_ssh
from vm.over_ssh import HOST, Line, Node

from agent.csi.client import block
from proto import csi_pb2 as csi

MIB = 1 << 20
SIZE, HELD = 48 * MIB, 40 * MIB
# Behind some of the pieces that are put on the disk, and before the last.
STALLED = 24 * MIB


def node(host: RealHost, directory: Path, name: str, extents: int) -> Iterator[Node]:
    """A service on a group of its own; each of another size, or the lab gives the same again."""
    before = set(host.lvm.devices)
    group = host.new_group(30, extents)
    devices = [one for one in host.lvm.devices if one not in before]
    made = Node(directory / name, name, group, devices)
    made.prepare()
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def here(host: RealHost, tmp_path: Path) -> Iterator[Node]:
    yield from node(host, tmp_path, "here", 31)


@pytest.fixture
def there(host: RealHost, here: Node, tmp_path: Path) -> Iterator[Node]:
    yield from node(host, tmp_path, "there", 32)


@pytest.fixture
def line(there: Node, tmp_path: Path) -> Iterator[Line]:
    with over_ssh.reached(tmp_path / "ssh", there) as made:
        yield made


@pytest.fixture
def volume(here: Node) -> csi.Volume:
    """A volume in no use, with content that does not compress."""
    made: csi.Volume = here.client.create("db", SIZE, block())
    staging = here.directory / "staging"
    here.client.stage(made, staging, block())
    here.write(made, os.urandom(HELD))
    here.client.unstage(made.volume_id, staging)
    return made


def move(here: Node, line: Line, *words: str, ssh: str = "") -> list[str]:
    to = ["volume", "move", "db", "--to", HOST, "--ssh", ssh or line.ssh, "--yes", *words]
    return [str(here.carver), *to, "--remote-carver", str(line.to.carver)]


def done(words: list[str]) -> None:
    ended = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr


def require_at(node: Node, other: Node, content: bytes) -> None:
    """One has the volume, whole and usable, and the other has none."""
    [found] = node.client.volumes()
    assert list(other.client.volumes()) == []
    assert node.content(found) == content


@pytest.mark.variation
@pytest.mark.parametrize("said", ["once", "twice"])
def test_a_volume_moves_by_ssh_and_its_remains_are_deleted(
    here: Node, there: Node, line: Line, volume: csi.Volume, said: str
) -> None:
    content = here.content(volume)
    done(move(here, line))
    require_at(there, here, content)
    if said == "twice":
        # It is so already.
        done(move(here, line))
    done(move(here, line, "--finish"))
    assert here.run("volume", "list", "--json") == []
    require_at(there, here, content)


VICTIMS = ("sender", "receiver", "line", "service here", "service there")


@pytest.mark.variation
@pytest.mark.parametrize("victim", VICTIMS)
def test_after_a_kill_within_a_stream_exactly_one_volume_is_usable(
    here: Node, there: Node, line: Line, volume: csi.Volume, victim: str
) -> None:
    content = here.content(volume)
    stall = line.stalling(STALLED)
    words = move(here, line, ssh=stall.ssh)
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as moving:
        stall.wait()
        if victim == "sender":
            moving.kill()
        elif victim == "service here":
            here.kill()
        elif victim == "service there":
            there.kill()
        else:
            mark = "ssh -F" if victim == "line" else "-m agent volume receive"
            kill(line.processes(mark, " receive "), but=moving.pid)
        stall.end()
        _, said = moving.communicate(timeout=600)
    if victim in ("sender", "receiver", "line"):
        assert moving.returncode != 0, said
    # Whatever came of it: never both.
    assert len(here.client.volumes()) + len(there.client.volumes()) == 1
    if victim in ("sender", "line"):
        status = there.run("volume", "receive", "db", "--status", "--json")
        assert status["offset_bytes"] > 0, "it is not resumed where it was"
    if victim in ("receiver", "service here"):
        done(move(here, line, "--undo"))
        require_at(here, there, content)
    else:
        done(move(here, line))
        require_at(there, here, content)
        done(move(here, line, "--finish"))
        require_at(there, here, content)


def kill(those: list[psutil.Process], but: int) -> None:
    those = [one for one in those if one.pid != but]
    assert those, "no process to kill"
    for one in those:
        one.kill()


@pytest.mark.variation
def test_snapshots_are_sent_through_a_pipe_and_resumed_after_a_cut(
    here: Node, there: Node, line: Line, volume: csi.Volume
) -> None:
    staging = here.directory / "staging"
    here.run("snapshot", "create", "db", "monday")
    here.client.stage(volume, staging, block())
    here.write(volume, os.urandom(MIB), 8 * MIB)
    here.run("snapshot", "create", "db", "tuesday")
    here.write(volume, os.urandom(MIB), 16 * MIB)
    here.client.unstage(volume.volume_id, staging)

    def piped(send: str, between: str = "") -> int:
        receive = shlex.join(line.there("volume", "receive", "copy"))
        text = f"set -o pipefail; {here.carver} snapshot send {send} {between} | {receive}"
        return subprocess.run(
            ["bash", "-c", text], stdin=subprocess.DEVNULL, capture_output=True, timeout=600
        ).returncode

    def there_is(*words: str) -> dict[str, object]:
        asked = line.there("volume", "receive", "copy", *words, "--json")
        ended = subprocess.run(asked, check=True, capture_output=True, timeout=300)
        printed = json.loads(ended.stdout)
        assert isinstance(printed, dict)
        return printed

    assert piped("monday", f"| head --bytes {STALLED}") != 0
    assert list(there.client.volumes()) == []
    offset = there_is("--status")["offset_bytes"]
    assert offset
    assert piped(f"monday --offset {offset}") == 0
    assert piped("tuesday --since monday --compress") == 0
    sent = here.run("snapshot", "send", "tuesday", "--checksum", "--json")
    assert there_is("--checksum")["sha256"] == sent["sha256"]
    there_is("--finish")
    [copy] = there.client.volumes()
    assert copy.capacity_bytes == volume.capacity_bytes
    content = there.content(copy)
    for snapshot in ("monday", "tuesday"):
        here.run("snapshot", "delete", snapshot, "--yes")
    # What was written after the last snapshot is not there.
    assert content[: 16 * MIB] == (own := here.content(volume))[: 16 * MIB]
    assert content[16 * MIB : 17 * MIB] != own[16 * MIB : 17 * MIB]
    assert content[17 * MIB :] == own[17 * MIB :]
