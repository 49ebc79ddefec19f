"""lvm2's shell is killed, stopped, garbled or starved at each command of each call.

Nothing is done twice, nothing is believed that was not seen, and the same call, made again, comes
to its end.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import chosen
import pytest
from fakes.host import FakeHost
from model import operations as do
from model.cases import CASES, EXTENTS, Case
from model.expected import EXTENT_BYTES, Model
from model.machine import Machine
from model.mishaps import MISHAPS, Shells
from model.operations import Outcome
from real.any import AnyHost

from agent.config.settings import Config
from agent.engine.jobs import Jobs
from lvm import errors, session

# What a caller is told that is to call again.
UNFINISHED = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"}
STOPPED = {"stopped before", "stopped after"}
STARVED = {"starved", "starved within"}
_PATIENCE_SECONDS = 30.0

NAMES = [name for name, case in CASES.items() if not case.long_wipe]
USUAL = ("create", "delete", "stage")


class Trial:
    """A machine whose lvm2 is a shell, and a model of it."""

    def __init__(self, host: AnyHost, directory: Path) -> None:
        self.host = host
        group = host.new_group(EXTENTS)
        self.shells = Shells(host.converse)
        self.machine = Machine(host, group, directory, converse=self.shells)
        self.model = Model(EXTENTS * EXTENT_BYTES)
        host.intercept = self.shells.intercept

    def prepare(self, case: Case) -> None:
        """What was done before the call, by a process with shells of its own."""
        self.machine.restart()
        for jobs in self._jobs():
            jobs.retry_seconds = jobs.soon_seconds = 0.05
        self.model = Model(EXTENTS * EXTENT_BYTES)
        for one in case.before:
            told, expected = self.machine.by_kubelet(one), self.model.apply(one)
            assert self.machine.same(one, told, expected), one
        case.arrange(self.machine, self.model)
        self.settle()
        # As if someone had written to the group: calls that only look ask lvm2, too.
        engine = self.machine.service.engines.of(self.machine.group)
        assert engine is not None
        engine._known = None

    def settle(self) -> None:
        """Let what is done behind the answers come to its end."""
        for jobs in self._jobs():
            wait([job.ended for job in list(jobs._jobs.values())], _PATIENCE_SECONDS)
        with suppress(errors.LvmError):
            self.machine.service.engines.settle()

    def _jobs(self) -> Sequence[Jobs[Any]]:
        service = self.machine.service
        return service.copier.jobs, service.copier.bridges, service.wiper.jobs

    def finish(self, case: Case) -> None:
        """Make the same call again, until it is as the model says."""
        expected = self.model.apply(case.call)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.machine.same(
            case.call, told := self.machine.by_kubelet(case.call), expected
        ):
            assert told.code in UNFINISHED, told
            assert time.monotonic() < deadline, told
            self.settle()
        self.await_state()

    def await_state(self) -> None:
        """What failed behind an answer is tried again."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (seen := self.machine.state()) != self.model.state():
            assert time.monotonic() < deadline, seen
            self.settle()
            time.sleep(0.05)

    def undo(self, case: Case) -> None:
        """What a CO does that gives up; then nothing is left."""
        volume = getattr(case.call, "volume", "a")
        staged = next((name for _, name, _, _ in self.machine.state().places), volume)
        self.model = Model(self.model.total_bytes)
        undone: tuple[do.Call, ...] = (
            *(do.Unpublish(volume, path) for path in ("target", "other")),
            *(do.Unpublish(one, "staging") for one in (staged, volume)),
            *(do.Delete("copy"), do.DeleteSnapshot("snap"), do.Delete(volume), do.Delete("a")),
        )
        for call in undone:
            assert self.machine.by_kubelet(call) == Outcome("OK"), call
        self.await_state()


@pytest.fixture
def trial(host: AnyHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    # The service has the shells; what the test itself asks is answered by processes.
    monkeypatch.setattr(type(host), "sessions", False)
    if isinstance(host, FakeHost):
        root = property(lambda _config: tmp_path / "root")
        monkeypatch.setattr(Config, "lvm_root", root)
    made = Trial(host, tmp_path)
    yield made
    made.machine.stop()


def at_each(name: str, host: AnyHost) -> Iterator[tuple[int, str]]:
    """Steps, and what happens at each, some of it by chance: on real LVM one."""
    each = 4 if isinstance(host, FakeHost) else 1
    asked = chosen.numbers("CARVER_MISHAPS", seed=1, each=each)
    for step in itertools.count():
        chance = random.Random(f"{asked['seed']}-{name}-{step}")
        for mishap in chance.sample(sorted(MISHAPS), asked["each"]):
            yield step, mishap


@pytest.mark.parametrize("name", chosen.kinds(NAMES, usual=USUAL))
def test_whatever_happens_to_lvm2_s_shell_the_same_call_comes_to_its_end(
    name: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, shells, machine = CASES[name], trial.shells, trial.machine
    usual_seconds = session._GRACE_SECONDS
    for step, mishap in at_each(name, trial.host):
        is_stopped = mishap in STOPPED
        monkeypatch.setattr(session, "_GRACE_SECONDS", 0.2 if is_stopped else usual_seconds)
        trial.prepare(case)
        shells.plan(MISHAPS[mishap], step)
        told = machine.by_kubelet(case.call)
        trial.settle()
        if shells.victim is None:
            # The call takes no such step.
            shells.cancel()
            trial.undo(case)
            assert step, "no command of the call's was said to a shell"
            return
        where = f"{step}, {mishap}: {told}, {shells.log}"
        expected = trial.model.copy().apply(case.call)
        # Refused by lvm2 itself, in other words than are known for want of memory.
        is_refused = mishap in STARVED and told.code == "INTERNAL"
        is_done = machine.same(case.call, told, expected)
        assert is_done or is_refused or told.code in UNFINISHED, where
        assert is_refused or shells.was_looked_first, where
        if is_stopped:
            # While it may do something yet, nothing is changed beside it.
            before = shells.changes
            machine.by_kubelet(case.call)
            assert shells.changes == before, where
            shells.victim.go_on()
        try:
            trial.finish(case)
            trial.undo(case)
        except AssertionError as error:
            raise AssertionError(where) from error
