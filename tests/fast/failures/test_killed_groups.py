"""Group snapshots, killed before and after every step: whole or gone, and no volume stays held."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from fakes.host import FakeHost
from model import operations as do
from model.machine import Machine
from model.operations import MIB, Use
from model.stopping import Switch

from agent.core.classes import DeviceClass
from lvm.layout import Layout
from lvm.thin import Policy
from proto import csi_pb2 as csi

BLOCK = Use("block", do.MULTI_WRITER)
THICK = DeviceClass("plain", "group0", default=True)
THIN = DeviceClass("plain", "group0", default=True, layout=Layout("thin"), pool=Policy())
VOLUMES = ("a", "b", "c")


class Trial:
    """A machine with three volumes, and a call of the GroupController's that is to be made."""

    def __init__(self, name: str, directory: Path) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        group = self.host.new_group(200)
        self.group = self.host.lvm2.groups[group]
        one, self.deletes = CASES[name]
        self.machine = Machine(self.host, group, directory, settings={"classes": (one,)})
        for volume in VOLUMES:
            assert self.machine.call(do.Create(volume, 32 * MIB, 0, BLOCK)).code == "OK"
        self.before = set(self.group.volumes)
        self.made = self.create() if self.deletes else csi.VolumeGroupSnapshot()

    def create(self) -> csi.VolumeGroupSnapshot:
        sources = [self.machine.id_of(one) for one in VOLUMES]
        return self.machine.client.group_snapshot("nightly", sources)

    def delete(self) -> None:
        ids = [one.snapshot_id for one in self.made.snapshots]
        self.machine.client.delete_group_snapshot(self.made.group_snapshot_id, ids)

    def run(self, switch: Switch) -> list[str]:
        """Make the call in a process of its own; the steps that it took."""
        self.machine.restart(switch)
        call: Callable[[], object] = self.delete if self.deletes else self.create
        with suppress(grpc.RpcError):  # a dead process answers nothing
            call()
        return switch.taken

    def settle(self) -> None:
        """Let wipes that a new process took up come to their end."""
        self.machine.service.eraser.jobs.shutdown()

    def held(self) -> list[str]:
        return [one for one in self.before if self.host.lvm2.is_suspended(self.group.name, one)]


CASES = {
    "create": (THICK, False),
    "create, thin": (THIN, False),
    "delete": (THICK, True),
    "delete, thin": (THIN, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_was_killed_at_any_step_is_made_good(name: str, tmp_path: Path) -> None:
    taken = Trial(name, tmp_path / "count").run(Switch())
    assert taken.count("suspend") == (0 if CASES[name][1] else 3)
    for stop_at in range(len(taken)):
        for before in (True, False):
            trial = Trial(name, tmp_path / f"{stop_at}{before}")
            switch = Switch(stop_at, before=before)
            trial.run(switch)
            assert switch.dead.wait(10), f"step {stop_at} was never taken: {switch.taken}"
            trial.machine.revive()
            assert trial.held() == [], (stop_at, before)
            listed = trial.machine.client.snapshots()
            assert len(listed) in (0, 3), "whole, or none for any caller"
            trial.settle()
            if not listed:
                assert set(trial.group.volumes) == trial.before, (stop_at, before)
            trial.machine.revive()
            if trial.deletes:
                trial.delete()
            else:
                made = trial.create()
                assert made.ready_to_use
                assert len({one.creation_time.nanos for one in made.snapshots}) == 1
                assert trial.create() == made
                trial.made = made
                trial.delete()
            assert trial.machine.client.snapshots() == []
            trial.settle()
            assert set(trial.group.volumes) == trial.before, (stop_at, before)
            trial.machine.stop()
