"""Calls on thin volumes, killed before and after every step: of the volume, its pool, its cache."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.host import FakeHost
from model import operations as do
from model.machine import Machine
from model.operations import MIB, Outcome, Use
from model.stopping import Switch

from agent.core.classes import DeviceClass
from lvm import report
from lvm.caches import Cache
from lvm.layout import Layout, Reserve
from lvm.thin import Policy

BLOCK = Use("block", do.MULTI_WRITER)
EXTENTS, FAST_EXTENTS = 40, 8
CACHES = {"": None, "cache": Cache(), "writecache": Cache("writecache", "writeback")}
CREATE, ANOTHER = do.Create("a", 32 * MIB, 0, BLOCK), do.Create("b", 32 * MIB, 0, BLOCK)
AHEAD = replace(CREATE, mutable=(("carver/readAhead", "1MiB"),))

LEAKED = "delete, with a pool that leaked a chunk"

# A call, and those before it.
CASES: dict[str, tuple[do.Call, tuple[do.Call, ...]]] = {
    "create, with the pool": (CREATE, ()),
    "create, in a pool": (CREATE, (ANOTHER,)),
    "create, with its read-ahead": (AHEAD, ()),
    "expand": (do.Expand("a", 64 * MIB), (CREATE,)),
    "delete, with the pool": (do.Delete("a"), (CREATE,)),
    "delete, from a pool": (do.Delete("a"), (CREATE, ANOTHER)),
    LEAKED: (do.Delete("a"), (CREATE,)),
}


class Trial:
    """A machine with a thin class, and a case's call that is about to be made."""

    def __init__(self, name: str, cache: str, directory: Path) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        group = self.host.new_group(EXTENTS, FAST_EXTENTS)
        self.host.lvm2.groups[group].disks[1].tags = {report.FAST}
        self.cache = CACHES[cache]
        thin = DeviceClass(
            "plain",
            group,
            default=True,
            layout=Layout("thin"),
            pool=Policy(size=Reserve(size_bytes=96 * MIB)),
            cache=self.cache,
        )
        self.machine = Machine(self.host, group, directory, settings={"classes": (thin,)})
        self.call, before = CASES[name]
        for one in before:
            assert self.machine.call(one).code == "OK"
        if name == LEAKED:
            self.host.leak_chunk(group, "pool-plain", "vol-a")

    def kill(self, stop_at: int, before: bool) -> None:
        """Make the call, end the process at a step of it, and start another."""
        switch = Switch(stop_at, before=before)
        self.machine.restart(switch)
        self.machine.call(self.call)
        assert switch.dead.wait(10), f"step {stop_at} was never taken: {switch.taken}"
        self.machine.revive()

    def has_its_cache(self) -> bool:
        """Whether the pool, if it is there, has what its class says."""
        pool = self.host.lvm2.groups[self.machine.group].volumes.get("pool-plain")
        return pool is None or bool(pool.cache) == bool(self.cache)

    def names(self) -> set[str]:
        return set(self.host.lvm2.groups[self.machine.group].volumes)

    def undo(self) -> None:
        """What a CO does that gives up; then nothing may be left."""
        for volume in ("a", "b"):
            assert self.machine.call(do.Delete(volume)) == Outcome("OK")
        self.machine.service.pool_remover.jobs.shutdown()
        left = self.machine._report()
        assert (left.free_extents, left.fast_free_extents) == (EXTENTS, FAST_EXTENTS)
        assert self.names() == set()
        self.machine.stop()


def steps(name: str, cache: str, directory: Path) -> int:
    """How many steps the call takes when nothing ends it, with what goes on behind the answer."""
    trial = Trial(name, cache, directory)
    trial.machine.stop()
    switch = Switch()
    trial.machine.start(switch)
    trial.machine.call(trial.call)
    trial.machine.service.pool_remover.jobs.shutdown()
    trial.machine.stop()
    return len(switch.taken)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_was_killed_at_any_step_succeeds_when_it_is_made_again(
    name: str, cache: str, tmp_path: Path
) -> None:
    expected = {"vol-a", "pool-plain"}
    if name in ("delete, with the pool", LEAKED):
        expected = set()
    elif name.endswith("a pool"):
        expected = {"vol-b", "pool-plain"} | ({"vol-a"} if name.startswith("create") else set())
    for stop_at in range(steps(name, cache, tmp_path / "count")):
        for before in (True, False):
            trial = Trial(name, cache, tmp_path / f"{stop_at}{before}")
            trial.kill(stop_at, before)
            assert trial.machine.call(trial.call).code == "OK", (stop_at, before)
            # What was taken up at the start is waited for by asking for the same again.
            if not expected:
                service, group = trial.machine.service, trial.machine.group
                service.pool_remover.give_back(group, "pool-plain").result(20)
            assert trial.names() == expected, (stop_at, before)
            assert trial.has_its_cache(), (stop_at, before)
            if trial.call is AHEAD:
                made = trial.host.lvm2.groups[trial.machine.group].volumes["vol-a"]
                assert made.tuning.read_ahead_bytes == MIB
            trial.undo()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CASES)
def test_what_a_killed_call_left_can_be_undone_without_a_trace(
    name: str, cache: str, tmp_path: Path
) -> None:
    for stop_at in range(steps(name, cache, tmp_path / "count")):
        for before in (True, False):
            trial = Trial(name, cache, tmp_path / f"{stop_at}{before}")
            trial.kill(stop_at, before)
            trial.undo()
