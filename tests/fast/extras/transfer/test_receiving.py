"""Volumes that come, where it is not known what lvm2 did, or what was begun is not ended."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import configured
import expect
import grpc
import nodes
import pytest
from fakes.disk import Disk
from fakes.host import FakeHost
from nodes import SIZE, Node, volume_of

from agent.core import errors
from agent.core.ids import VolumeId
from agent.csi.client import block
from agent.extras.transfer import streams_command
from lvm import errors as lvm_errors
from mount.command import Result
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

DATA = b"contents" * 512


@pytest.fixture
def here(fake: FakeHost, tmp_path: Path) -> Iterator[Node]:
    with nodes.made(fake, configured.carver(tmp_path), tmp_path, "here") as node:
        yield node


@pytest.fixture
def sent(here: Node, fake: FakeHost) -> bytes:
    """A whole snapshot, as a stream."""
    volume = volume_of(here)
    fake.write_bytes(here.device("vol-db"), 0, DATA)
    fake.write_bytes(here.device("vol-db"), SIZE - len(DATA), DATA)
    here.client.snapshot("1", volume.volume_id)
    return nodes.stream(here, "1")


def pretended(there: Node) -> csi.Volume:
    """What comes, as whoever guesses its id asks for it."""
    group = there.service.inventory.state(there.group).group(there.group)
    return csi.Volume(volume_id=str(VolumeId.of(group, "vol-copy")))


def lose(fake: FakeHost, *words: str, made: bool = True) -> None:
    """The answer to the next command of these words does not come, which was done, or was not."""
    left = [True]

    def intercept(command: Sequence[str]) -> Result | None:
        if left and set(words) <= set(command):
            left.clear()
            if made:
                fake.lvm2_program(command)
            raise lvm_errors.SessionLost(command, "it ended")
        return None

    fake.intercept = intercept


def test_a_volume_made_without_an_answer_is_held(there: Node, fake: FakeHost, sent: bytes) -> None:
    lose(fake, "lvcreate", "vol-copy")
    with pytest.raises(grpc.RpcError):
        nodes.receive(there, "copy", sent)
    assert there.names() == {"vol-copy"}
    place = there.directory / "staging"
    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.stage(pretended(there), place, block())
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.publish(pretended(there), place, there.directory / "raw", block())
        # The next stream is applied in part: there is a device, and its tags are known.
        with pytest.raises(errors.AgentError):
            nodes.receive(there, "copy", sent[: len(sent) // 2])
    nodes.receive(there, "copy", sent)
    streams_command.finish(there.at, "copy")
    there.client.stage(pretended(there), place, block())
    assert there.content("vol-copy").startswith(DATA)


def test_a_volume_found_receiving_is_held(there: Node, sent: bytes) -> None:
    with pytest.raises(errors.AgentError):
        nodes.receive(there, "copy", sent[: len(sent) // 2])
    there.service.context.holds.allow(pretended(there).volume_id)
    with pytest.raises(errors.AgentError):
        nodes.receive(there, "copy", sent[: len(sent) // 2])
    with expect.code("FAILED_PRECONDITION", "received"):
        there.client.stage(pretended(there), there.directory / "staging", block())


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_volume_that_was_not_made_holds_no_other_of_its_name(
    there: Node, fake: FakeHost, sent: bytes, is_removed: bool
) -> None:
    lose(fake, "lvcreate", "vol-copy", made=False)
    with pytest.raises(grpc.RpcError):
        nodes.receive(there, "copy", sent)
    place = there.directory / "staging"
    if is_removed:
        there.transfer.AbortReceive(carver.VolumeRequest(volume_id=pretended(there).volume_id))
        with expect.code("NOT_FOUND"):
            there.client.stage(pretended(there), place, block())
    made = there.client.create("copy", SIZE, block())
    there.client.stage(made, place, block())


def test_a_volume_finished_without_an_answer_is_usable_after_a_retry(
    there: Node, fake: FakeHost, sent: bytes
) -> None:
    nodes.receive(there, "copy", sent)
    lose(fake, "lvchange", "carver.state=ready")
    with pytest.raises(grpc.RpcError):
        streams_command.finish(there.at, "copy")
    streams_command.finish(there.at, "copy")
    there.client.stage(pretended(there), there.directory / "staging", block())


def test_a_partly_erased_volume_takes_no_stream_and_is_not_finished(
    there: Node, fake: FakeHost, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its removal failed, or was killed, before it was on record as deleted."""
    nodes.receive(there, "copy", sent)
    disk = Disk(fake, monkeypatch)
    disk.error = OSError(5, "Input/output error")
    disk.free.set()
    with expect.code("INTERNAL", "Input/output error"):
        there.transfer.AbortReceive(carver.VolumeRequest(volume_id=pretended(there).volume_id))
    there.restart()
    with expect.code("FAILED_PRECONDITION", "only to be removed"):
        nodes.receive(there, "copy", sent)
    with expect.code("FAILED_PRECONDITION", "only to be removed"):
        streams_command.finish(there.at, "copy")
    disk.error = None
    there.transfer.AbortReceive(carver.VolumeRequest(volume_id=pretended(there).volume_id))
    assert there.names() == set()
