"""The keys of JSON output, of a stream's header and of metrics: added to, and never renamed.

Some of them are the names of a dataclass's fields, so a new name of a field would be a new key.
"""

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest
from fast.cli.conftest import Shell

from agent.cli import status
from agent.extras.orphans import orphan_verbs
from agent.extras.orphans.candidates import Candidate, Kind
from agent.extras.orphans.look import Orphan
from agent.extras.streams.form import Header
from agent.operations.preflight import Finding
from mount.cgroups import IoMax
from proto import carver_pb2 as carver

# The keys that are the names of a dataclass's fields, by the dataclass.
OF_DATACLASSES: dict[Any, str] = {
    # `carver status --json`
    status.Overview: "node driver version endpoint serving classes groups pools volumes snapshots",
    status.Class: "name group layout fs_type default largest_bytes",
    status.Group: "name present size_bytes free_bytes disks missing_disks problem ignored",
    status.Place: "path read_only",
    status.Health: "status reason message",
    status.Volume: "id name group size_bytes layout contents state claim places total_bytes"
    " used_bytes health encryption limits progress",
    status.Pool: "name group size_bytes data_percent metadata_percent",
    status.Snapshot: "id name volume group size_bytes taken_seconds area_bytes area_percent health",
    # `carver doctor --json`
    Finding: "check verdict message remedy",
    # The header of a stream.
    Header: "volume_id snapshot_id size_bytes taken_nanoseconds chain base_snapshot_id base_chain"
    " base_size_bytes offset_bytes release facts",
    # The label `kind` of the metric of limits.
    IoMax: "read_bytes write_bytes reads writes",
}
# The keys that are the names of a message's fields, by the message.
OF_MESSAGES: dict[Any, str] = {
    # `carver volume receive --status --json`
    carver.ReceiveState: "volume_id state chain content_bytes into offset_bytes received finishing"
    " blank release",
    # `carver trace --json`
    carver.TracedCall: "method volume code time_seconds seconds steps",
    carver.TracedStep: "kind what after_seconds seconds",
}
# The keys of an object that a command prints, by its words after `carver`.
OF_COMMANDS = {
    "volume list --json": "name id size_bytes health",
    "volume show db --json": "name id size_bytes health places",
    "snapshot list --json": "name id volume taken size_bytes ready",
    "trace --json": "method volume code time_seconds seconds steps",
}
# `carver orphans --json`, and `carver controller orphans --json`.
OF_ORPHANS = "kind name identity about handle path remedy seen_seconds sure"


def require(recorded: str, present: Iterable[str]) -> None:
    assert set(recorded.split()) - set(present) == set(), "a key was renamed or removed"


@pytest.mark.parametrize("kind", OF_DATACLASSES, ids=lambda kind: kind.__qualname__)
def test_the_fields_of_a_dataclass_keep_their_names(kind: Any) -> None:
    require(OF_DATACLASSES[kind], (field.name for field in fields(kind)))


@pytest.mark.parametrize("message", OF_MESSAGES, ids=lambda message: message.DESCRIPTOR.name)
def test_the_fields_of_a_message_keep_their_names(message: Any) -> None:
    require(OF_MESSAGES[message], message.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("line", OF_COMMANDS)
def test_the_output_of_a_command_keeps_its_keys(shell: Shell, line: str) -> None:
    shell("create db --size 64MiB")
    shell("create db 1", noun="snapshot")
    noun, _, words = line.partition(" ")
    shown = json.loads(shell(words, noun=noun))
    require(OF_COMMANDS[line], shown if isinstance(shown, dict) else shown[0])


def test_orphans_keep_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    candidate = Candidate(Kind.VOLUME, "id", "uuid", "64 bytes", handle="id")
    orphan_verbs.show([Orphan(candidate, 1.0, True)], 60, as_json=True)
    [shown] = json.loads(capsys.readouterr().out)
    require(OF_ORPHANS, shown)
    assert shown["about"] == "64 bytes"
