"""Streams that an earlier version sent, and a volume that it had half received, are served.

tests/data has the streams, and the tags that the version left; a new format has a file of its own.
"""

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import nodes
import pytest
from nodes import MIB, Node

from agent.core import tag
from agent.extras.transfer import streams_command

DATA = Path(__file__).parents[1] / "data"
FORMATS = sorted(DATA.glob("transfer-format-*.json"))

# For LVM it is a volume like any other.
pytestmark = pytest.mark.variation


@pytest.fixture(params=FORMATS, ids=lambda path: path.stem)
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    found = json.loads(request.param.read_text())
    assert isinstance(found, dict)
    return found


def data_of(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def digest(node: Node, name: str, size: int) -> str:
    return hashlib.sha256(node.content(name, size)).hexdigest()


def test_a_full_stream_and_an_increment_are_received(kept: dict[str, Any], there: Node) -> None:
    for name, snapshot in (("full", "1"), ("increment", "2")):
        nodes.receive(there, "copy", data_of(kept["streams"][name]))
        assert digest(there, "vol-copy", kept["size"]) == kept["sha256"][snapshot]
    streams_command.finish(there.at, "copy")
    [volume] = there.client.volumes()
    assert volume.capacity_bytes == kept["size"]


def test_a_half_received_volume_is_completed(kept: dict[str, Any], there: Node) -> None:
    words = (word.replace("{group}", there.group) for word in kept["half_received"]["command"])
    there.host.lvm(*words)
    for offset, content in kept["half_received"]["content"]:
        there.host.write_bytes(there.device("vol-copy"), offset, data_of(content))
    there.restart()
    [offset] = (
        int(word.rpartition("=")[2])
        for word in kept["half_received"]["command"]
        if word.startswith("carver.offset=")
    )
    state = streams_command.status(there.at, "copy")
    assert (state["state"], state["offset_bytes"]) == (tag.RECEIVING, offset)
    assert 0 < offset < 8 * MIB

    nodes.receive(there, "copy", data_of(kept["streams"]["rest"]))
    assert digest(there, "vol-copy", kept["size"]) == kept["sha256"]["2"]
    assert streams_command.finish(there.at, "copy")["state"] == tag.READY
