"""Volumes that are overwritten before they are anyone's, killed before and after every step."""

from pathlib import Path

import pytest
from fakes.host import FakeHost
from model import operations as do
from model.machine import Machine
from model.operations import MIB, Use
from model.stopping import Switch

from agent.core.classes import DeviceClass

BLOCK = Use("block", do.MULTI_WRITER)
CREATE = do.Create("a", 32 * MIB, 0, BLOCK)
OTHER = do.Create("b", 16 * MIB, 0, BLOCK)
CLONE = do.Create("a", 32 * MIB, 0, BLOCK, source=(do.OF_VOLUME, "b"))
MARK = b"an earlier owner's"

# A call, and those before it.
CASES: dict[str, tuple[do.Call, tuple[do.Call, ...]]] = {
    "create": (CREATE, ()),
    "create of a volume": (CLONE, (OTHER,)),
    "expand": (do.Expand("a", 64 * MIB), (CREATE,)),
    "expand further": (do.Expand("a", 96 * MIB), (CREATE, do.Expand("a", 64 * MIB))),
}


class Trial:
    """A machine with free extents that hold something, and a case's call, about to be made."""

    def __init__(self, name: str, directory: Path) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        group = self.host.new_group(40)
        self.group = self.host.lvm2.groups[group]
        self.host.mark_free(group, MARK)
        classes = (DeviceClass("plain", group, default=True, zero="fully"),)
        self.machine = Machine(self.host, group, directory, settings={"classes": classes})
        self.call, before = CASES[name]
        for one in before:
            assert self.machine.call(one).code == "OK"

    def run(self, switch: Switch) -> list[str]:
        """Make the call in a process of its own; the steps that it took."""
        self.machine.restart(switch)
        self.machine.service.growth_zeroer.grace_seconds = self.machine.grace_seconds
        self.machine.call(self.call)
        return switch.taken

    def shows_mark(self) -> bool:
        """Whether what is a volume for its callers shows what was there before."""
        volumes = self.group.volumes.values()
        ready = [one for one in volumes if "carver.state=ready" in one.tags]
        return any(MARK in data for one in ready for data in one.media.blocks.values())


@pytest.mark.parametrize("again", [True, False], ids=["made again", "given up"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_was_killed_at_any_step_is_made_good(
    name: str, again: bool, tmp_path: Path
) -> None:
    for stop_at in range(len(Trial(name, tmp_path / "count").run(Switch()))):
        for before in (True, False):
            trial = Trial(name, tmp_path / f"{stop_at}{before}")
            switch = Switch(stop_at, before=before)
            trial.run(switch)
            assert switch.dead.wait(10), f"step {stop_at} was never taken: {switch.taken}"
            assert not trial.shows_mark(), (stop_at, before)
            trial.machine.revive()
            if again:
                assert trial.machine.call(trial.call).code == "OK", (stop_at, before)
                assert "vol-a" in trial.group.volumes
                assert not trial.shows_mark(), (stop_at, before)
            for one in (do.Delete("a"), do.Delete("b")):
                assert trial.machine.call(one).code == "OK"
            trial.machine.stop()
            assert trial.group.volumes == {}, (stop_at, before)


def test_a_volume_that_is_deleted_while_it_waits_to_grow_leaves_nothing(tmp_path: Path) -> None:
    trial = Trial("expand", tmp_path)
    trial.machine.service.growth_zeroer.jobs.stop()
    trial.machine.service.growth_zeroer.grace_seconds = 0
    assert trial.machine.call(trial.call).code == "ABORTED"
    assert sorted(trial.group.volumes) == ["grow-vol-a", "vol-a"]
    assert trial.machine.call(do.Delete("a")).code == "OK"
    assert trial.group.volumes == {}
    trial.machine.stop()


def test_an_expansion_to_another_size_begins_anew(tmp_path: Path) -> None:
    trial = Trial("expand", tmp_path)
    growth_zeroer = trial.machine.service.growth_zeroer
    grace, growth_zeroer.grace_seconds = growth_zeroer.grace_seconds, 0
    for size in (64, 96):
        trial.machine.call(do.Expand("a", size * MIB))
    growth_zeroer.grace_seconds = grace
    assert trial.machine.call(do.Expand("a", 96 * MIB)).code == "OK"
    assert trial.group.volumes["vol-a"].length == 24
    assert not trial.shows_mark()
    trial.machine.stop()
