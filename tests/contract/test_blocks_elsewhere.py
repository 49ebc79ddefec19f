"""Streams and moves to a node whose disks have larger logical blocks."""

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import expect
import grpc
import nodes
import pytest
from nodes import MIB, Node, Stand
from real.any import AnyHost

from agent.core import errors
from agent.csi.client import mounted
from agent.extras.transfer import stream_descriptions, streams_command
from agent.extras.transfer.move_command import Options, move_of
from agent.settings.settings import Config
from proto import csi_pb2 as csi

# Carver's own record decides here; lvm2 is asked for nothing that other tests do not ask it for.
pytestmark = pytest.mark.variation

EXT4 = mounted("ext4")
DISK = 241 * MIB


@pytest.fixture
def there(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Node]:
    """A node whose disk has logical blocks of 4 KiB."""
    name = f"zz4096_{os.getpid()}"
    with (
        host.disk("4 KiB", DISK) as disk,
        host.own_group(name, [disk]),
        nodes.made(host, config, tmp_path, "there", name) as node,
    ):
        yield node


def formatted(node: Node, options: str) -> csi.Volume:
    parameters = {"mkfsOptions": options} if options else {}
    volume = node.client.create("db", 32 * MIB, EXT4, parameters=parameters)
    node.client.stage(volume, node.directory / "staging", EXT4)
    node.client.unstage(volume.volume_id, node.directory / "staging")
    return volume


def stream(node: Node, snapshot: csi.Snapshot, *, is_earlier: bool = False) -> bytes:
    """A stream of a snapshot; an earlier version's does not tell about blocks."""
    out = io.BytesIO()
    with streams_command.outgoing(node.at, snapshot.snapshot_id) as source:
        facts = dict(source.header.facts)
        assert facts[stream_descriptions.BLOCKS]
        if is_earlier:
            del facts[stream_descriptions.BLOCKS]
        replace(source, header=replace(source.header, facts=facts)).send(out.write)
    return out.getvalue()


def test_a_stream_is_refused_before_anything_is_made(here: Node, there: Node) -> None:
    volume = formatted(here, "-b 1024")
    sent = stream(here, here.client.snapshot("1", volume.volume_id))
    with expect.code("FAILED_PRECONDITION", "blocks of 1024 bytes", "4096 bytes", "use a class"):
        nodes.receive(there, "copy", sent)
    assert there.names() == set()


def test_a_stream_of_a_raw_volume_is_refused(here: Node, there: Node) -> None:
    volume = nodes.volume_of(here)
    sent = stream(here, here.client.snapshot("1", volume.volume_id))
    with expect.code("FAILED_PRECONDITION", "blocks of 512 bytes"):
        nodes.receive(there, "copy", sent)
    assert there.names() == set()


def test_a_stream_whose_blocks_fit_is_received_and_used(here: Node, there: Node) -> None:
    volume = formatted(here, "")
    nodes.receive(there, "copy", stream(here, here.client.snapshot("1", volume.volume_id)))
    streams_command.finish(there.at, "copy")
    [copy] = there.client.volumes()
    there.client.stage(copy, there.directory / "staging", EXT4)


def test_an_earlier_versions_stream_is_refused_when_it_is_finished(here: Node, there: Node) -> None:
    volume = formatted(here, "-b 1024")
    sent = stream(here, here.client.snapshot("1", volume.volume_id), is_earlier=True)
    nodes.receive(there, "copy", sent)
    with expect.code("FAILED_PRECONDITION", "blocks of 1024 bytes"):
        streams_command.finish(there.at, "copy")
    assert list(there.client.volumes()) == []


def test_a_volume_is_not_moved_and_stays_where_it_is(here: Node, there: Node) -> None:
    volume = formatted(here, "-b 1024")
    move = move_of(here.at, Stand(there), volume.volume_id, Options("db"), lambda _text: None)
    with pytest.raises((errors.AgentError, grpc.RpcError), match="blocks of 1024 bytes"):
        move.run()
    assert there.names() == set()
    here.client.stage(volume, here.directory / "staging", EXT4)
