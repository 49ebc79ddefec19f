"""Calls on volumes with a cache, killed before and after every step: nothing of either is left."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.devices import Media
from fakes.host import FakeHost
from model import operations as do
from model.machine import Machine
from model.operations import MIB, Use
from model.stopping import Switch

from agent.core.classes import DeviceClass
from lvm import report
from lvm.caches import Cache

BLOCK = Use("block", do.MULTI_WRITER)
CREATE = do.Create("a", 40 * MIB, 0, BLOCK)
WRITES = do.Create("a", 40 * MIB, 0, BLOCK, (("class", "writes"),))
OTHER = do.Create("b", 40 * MIB, 0, BLOCK, (("class", "linear"),))
CLONE = do.Create("a", 44 * MIB, 0, BLOCK, source=(do.OF_VOLUME, "b"))
SNAPSHOT = do.Snapshot("a", "snap")
DATA = b"what is to be copied".ljust(4096)
AHEAD = replace(CREATE, mutable=(("carver/readAhead", "1MiB"),))

# A call, and those before it.
CASES: dict[str, tuple[do.Call, tuple[do.Call, ...]]] = {
    "create": (CREATE, ()),
    "create, with its read-ahead": (AHEAD, ()),
    "expand": (do.Expand("a", 64 * MIB), (CREATE,)),
    "delete": (do.Delete("a"), (CREATE,)),
    "create of a volume": (CLONE, (OTHER,)),
    "snapshot": (SNAPSHOT, (WRITES,)),
    "delete a snapshot": (do.DeleteSnapshot("snap"), (WRITES, SNAPSHOT)),
}


class Trial:
    """A machine with a cached class, and a case's call that is about to be made."""

    def __init__(self, name: str, directory: Path) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        group = self.host.new_group(40, 20)
        self.group = self.host.lvm2.groups[group]
        self.group.disks[1].tags = {report.FAST}
        classes = (
            DeviceClass("plain", group, default=True, cache=Cache()),
            DeviceClass("writes", group, cache=Cache("writecache", "writeback")),
            DeviceClass("linear", group),
        )
        self.machine = Machine(self.host, group, directory, settings={"classes": classes})
        self.call, before = CASES[name]
        for one in before:
            assert self.machine.call(one).code == "OK"
        if OTHER in before:
            self.group.volumes["vol-b"].media.write(0, DATA)

    def run(self, switch: Switch) -> list[str]:
        """Make the call in a process of its own; the steps that it took."""
        self.machine.restart(switch)
        self.machine.call(self.call)
        return switch.taken

    def media(self) -> list[Media]:
        """What holds the data of the volume: itself, and its cache."""
        found = self.group.volumes.get("vol-a")
        cache = found.cache if found else None
        return [one.media for one in (found, cache) if one]


@pytest.mark.parametrize("again", [True, False], ids=["made again", "given up"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_was_killed_at_any_step_is_made_good(
    name: str, again: bool, tmp_path: Path
) -> None:
    for stop_at in range(len(Trial(name, tmp_path / "count").run(Switch()))):
        for before in (True, False):
            trial = Trial(name, tmp_path / f"{stop_at}{before}")
            media = trial.media()
            switch = Switch(stop_at, before=before)
            trial.run(switch)
            assert switch.dead.wait(10), f"step {stop_at} was never taken: {switch.taken}"
            trial.machine.revive()
            if again:
                assert trial.machine.call(trial.call).code == "OK", (stop_at, before)
            if again and name != "delete":
                assert trial.group.volumes["vol-a"].cache
            if again and trial.call == CLONE:
                assert trial.group.volumes["vol-a"].media.read(0, len(DATA)) == DATA
            if again and trial.call is AHEAD:
                assert trial.group.volumes["vol-a"].tuning.read_ahead_bytes == MIB
            media += trial.media()
            for one in (do.DeleteSnapshot("snap"), do.Delete("a"), do.Delete("b")):
                assert trial.machine.call(one).code == "OK"
            assert trial.group.volumes == {}
            assert all(one.zeroed for one in media), "data and cache are overwritten"
            trial.machine.stop()
