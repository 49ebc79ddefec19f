"""The look at the file system of what came, which has to wait for its turn."""

import threading
from concurrent.futures import ThreadPoolExecutor

import expect
import nodes
import pytest
from fakes.host import FakeHost
from nodes import MIB, Node

from agent.core import background
from agent.csi.client import mounted
from agent.extras.transfer import streams_command
from proto import carver_pb2 as carver


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_queued_check_leaves_the_next_volume_of_its_name_alone(
    there: Node, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    monkeypatch.setattr(background, "_AT_ONCE", 1)
    source = there.client.create("db", 64 * MIB, mounted("ext4"))
    there.client.stage(source, there.directory / "staging", mounted("ext4"))
    there.client.snapshot("1", source.volume_id)
    nodes.receive(there, "copy", nodes.stream(there, "1"))
    identity = str(streams_command.status(there.at, "copy")["volume_id"])
    # Staging and receiving wait for the same turns.
    work = there.service.inline_volumes._stager._detached
    begun, over = threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert over.wait(60)

    with ThreadPoolExecutor(1) as another:
        another.submit(work.do, "another", there.group, "mkfs", long, lambda: None)
        assert begun.wait(60)
        with monkeypatch.context() as hasty:
            hasty.setattr(there.client.channel, "timeout_seconds", 3)
            with expect.code("ABORTED", "fsck"):
                streams_command.finish(there.at, "copy")
        queued = work._detached[identity]
        if by_hand:
            fake.deactivate(there.group, "vol-copy")
            fake.lvm("lvremove", "--yes", "--", f"{there.group}/vol-copy")
        else:
            there.transfer.AbortReceive(carver.VolumeRequest(volume_id=identity))
        there.client.create("copy", 64 * MIB, mounted("ext4"))
        fake.commands.clear()
        over.set()
        expect.soon(queued.ended.done)
    assert "fsck.ext4" not in {words[0] for words in fake.commands}
