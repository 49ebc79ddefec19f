"""A thin snapshot's blocks, asked for and killed before and after every step: nothing is kept."""

from pathlib import Path

import grpc
import pytest
from changed_blocks import blocks
from fakes.host import FakeHost
from fakes.lvm import FakePool
from model import operations as do
from model.machine import Machine
from model.operations import MIB, Use
from model.stopping import Switch

from agent.core.classes import DeviceClass
from agent.extras.changed_blocks.extents import Extent, UserExtent
from agent.extras.transfer import streams_command
from lvm import tags
from lvm.layout import Layout
from lvm.thin import Policy

# A stream whose caller died is dropped by gRPC, and what it does then may be the step that dies.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object Interceptor"
    ":pytest.PytestUnraisableExceptionWarning"
)

BLOCK = Use("block", do.MULTI_WRITER)


class Trial:
    """A machine with two snapshots of a thin volume, whose blocks are about to be asked for."""

    def __init__(self, directory: Path, what: str) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        group = self.host.new_group(100)
        thin = DeviceClass("plain", group, default=True, layout=Layout("thin"), pool=Policy())
        self.machine = Machine(self.host, group, directory, settings={"classes": (thin,)})
        assert self.machine.call(do.Create("a", 32 * MIB, 0, BLOCK)).code == "OK"
        volume_id = self.machine.id_of("a")
        device = self.host.devices.find(group, "vol-a")
        assert device is not None
        self.taken = []
        for number in range(2):
            self.taken.append(self.machine.client.snapshot(f"s-{number}", volume_id).snapshot_id)
            self.host.write_bytes(device.path, number * MIB, b"a" * 4096)
        self.what = what
        found = self.host.lvm2.groups[group].volumes["pool-plain"]
        assert isinstance(found, FakePool)
        self.pool = found

    def ask(self) -> list[UserExtent] | list[Extent]:
        base, target = self.taken
        if self.what == "written":
            return list(streams_command.extents(self.machine.client, target, base))
        return list(blocks(self.machine.client, target, "" if self.what == "allocated" else base))

    def begin(self, switch: Switch) -> None:
        self.machine.stop()
        self.machine.start(switch)

    @property
    def is_clean(self) -> bool:
        marked = "metadataSnapshot" in tags.decode(frozenset(self.pool.tags))
        return self.pool.held is None and not marked


def steps(directory: Path, what: str) -> int:
    trial = Trial(directory, what)
    switch = Switch()
    trial.begin(switch)
    trial.ask()
    trial.machine.stop()
    return len(switch.taken)


@pytest.mark.parametrize("what", ["allocated", "changed", "written"])
def test_a_question_that_was_killed_at_any_step_leaves_nothing_and_is_answered_when_repeated(
    tmp_path: Path, what: str
) -> None:
    count = steps(tmp_path / "count", what)
    assert count >= 6
    for stop_at in range(count):
        for before in (True, False):
            trial = Trial(tmp_path / f"{stop_at}{before}", what)
            switch = Switch(stop_at, before=before)
            trial.begin(switch)
            with pytest.raises(grpc.RpcError):
                trial.ask()
            assert switch.dead.wait(10), switch.taken
            trial.machine.revive()
            assert trial.is_clean, (switch.taken, before)
            [one] = trial.ask()
            length = 4096 if what == "changed" else 64 << 10
            assert (one.offset_bytes, one.length_bytes) == (0, length)
            assert trial.is_clean
            trial.machine.stop()
