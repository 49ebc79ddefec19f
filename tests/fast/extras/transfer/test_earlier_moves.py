"""Moves that an earlier version began, or left unfinished, are brought to their end.

tests/data has the lvm2 commands and the writes of that version's. A chain of streams names volumes
by their LVM UUIDs, which no command sets: hence only on the fake.
"""

import base64
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import configured
import expect
import nodes
import pytest
from fakes.host import FakeHost
from nodes import Node, Stand

from agent.core import tag
from agent.csi.client import block
from agent.extras.transfer.move_command import Options, move_of
from proto import csi_pb2 as csi

DATA = Path(__file__).parents[3] / "data"
MOVES = [
    one
    for path in sorted(DATA.glob("transfer-format-*.json"))
    for one in json.loads(path.read_text())["moves"]
]


@pytest.fixture
def here(fake: FakeHost, tmp_path: Path) -> Iterator[Node]:
    # The groups of the kept commands are group1 and group2.
    fake.new_group(1)
    with nodes.made(fake, configured.carver(tmp_path), tmp_path, "here") as node:
        yield node


def data_of(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def replay(fake: FakeHost, kept: dict[str, Any]) -> None:
    """Leave both groups as the earlier version did."""
    for step in kept["steps"]:
        if step[0] == "write":
            fake.write_bytes(step[1], step[2], data_of(step[3]))
        else:
            fake.lvm(*step)
    for offset, content in kept["there"]:
        fake.write_bytes("/dev/mapper/group2-vol--db", offset, data_of(content))
    for group, uuids in kept["uuids"].items():
        fake.lvm2.groups[group].uuid = uuids.pop("group")
        for name, uuid in uuids.items():
            fake.lvm2.groups[group].volumes[name].uuid = uuid


@pytest.mark.parametrize("kept", MOVES, ids=lambda kept: str(kept["state"]))
def test_an_earlier_version_s_move_is_finished(
    fake: FakeHost, here: Node, there: Node, kept: dict[str, Any]
) -> None:
    replay(fake, kept)
    expected = {offset: data_of(content) for offset, content in kept["there"]}
    here.restart()
    there.restart()
    volume = csi.Volume(volume_id=kept["volume_id"])
    progress: list[str] = []
    move = move_of(here.at, Stand(there), volume.volume_id, Options("db"), progress.append)

    assert move.run()["state"] == tag.READY
    assert not {"sending all of it"} & set(progress)
    with expect.code("FAILED_PRECONDITION", "moved to there"):
        here.client.stage(volume, here.directory / "staging", block())
    content = there.content("vol-db")
    assert {at: content[at : at + len(data)] for at, data in expected.items()} == expected
    move.finish()
    assert here.names() == set()
    assert there.names() == {"vol-db"}
