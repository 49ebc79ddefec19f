"""lvm2's shell is killed, stopped, garbled or starved at each command of each call.

Nothing is done twice, nothing is believed that was not seen, and the same call, made again, comes
to its end.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import chosen
import expect
import grpc
import in_background
import pytest
from changed_blocks import blocks
from fakes.host import FakeHost
from model.cases import CASES, EXTENTS, Case
from model.expected import EXTENT_BYTES, Model
from model.machine import Machine, behind, try_soon
from model.mishaps import MISHAPS, Shells
from model.operations import MIB, Outcome
from real.any import AnyHost

from agent.csi.client import block, of_snapshot, of_volume
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import session
from lvm.layout import Layout
from lvm.room import Room
from lvm.thin import Policy
from mount import mount_errors as mount_errors

# What a caller is told that is to call again.
UNFINISHED = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"}
STOPPED = {"stopped before", "stopped after"}
STARVED = {"starved", "starved within"}

NAMES = [name for name, case in CASES.items() if not case.long_wipe]
USUAL = ("delete",)


class Place:
    """A machine whose lvm2 is a shell for each engine, to which something can happen."""

    def __init__(self, host: AnyHost, directory: Path, one: DeviceClass | None = None) -> None:
        self.host = host
        group = host.new_group(EXTENTS)
        self.shells = Shells(host.converse)
        classes = {} if one is None else {"classes": (replace(one, group=group),)}
        self.machine = Machine(host, group, directory, settings=classes, converse=self.shells)
        host.intercept = self.shells.intercept

    def begin(self, arrange: Callable[[], object]) -> None:
        """What was done before the call, by a process with shells of its own."""
        self.machine.restart()
        self.machine.service.group_snapshotter.quiesce_seconds = 300
        try_soon(self.machine.service)
        arrange()
        self.settle()
        # As if someone had written to the group: calls that only look ask lvm2, too.
        volume_group = self.machine.service.volume_groups.of(self.machine.group)
        assert volume_group is not None
        volume_group.metadata.forget()

    def settle(self) -> None:
        """Let what is done behind the answers come to its end, or fail."""
        for jobs in behind(self.machine.service):
            in_background.ended(jobs, seconds=expect.PATIENCE_SECONDS)
        with suppress(mount_errors.CommandError):
            self.machine.service.volume_groups.run_deferred()

    def until(self, condition: Callable[[], bool], seen: Callable[[], object]) -> None:
        """What failed behind an answer is tried again."""
        deadline = time.monotonic() + expect.PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, seen()
            self.settle()
            time.sleep(0.05)

    def suffer(
        self,
        name: str,
        grace: Callable[[str], None],
        *,
        prepare: Callable[[], None],
        call: Callable[[], Outcome],
        is_done: Callable[[Outcome], bool],
        finish: Callable[[], None],
        undo: Callable[[], None],
    ) -> None:
        """Have mishaps at each command of a call.

        Nothing is changed before a look, nor beside a command that may still run. Then the call is
        finished, and undone.
        """
        for step, mishap in at_each(name, self.host):
            grace(mishap)
            prepare()
            self.shells.plan(MISHAPS[mishap], step)
            outcome = call()
            self.settle()
            if self.shells.victim is None:
                # The call has no such command.
                self.shells.cancel()
                undo()
                assert step, "no command of the call's was sent to a shell"
                break
            where = f"{step}, {mishap}: {outcome}, {self.shells.log}"
            # Refused by lvm2 itself, in other words than are known for want of memory.
            is_refused = mishap in STARVED and outcome.code == "INTERNAL"
            assert is_done(outcome) or is_refused or outcome.code in UNFINISHED, where
            assert is_refused or self.shells.was_looked_first, where
            if mishap in STOPPED:
                before = self.shells.changes
                call()
                assert self.shells.changes == before, where
                self.shells.victim.go_on()
            try:
                finish()
                undo()
            except AssertionError as error:
                raise AssertionError(where) from error
        self.machine.stop()


class Trial(Place):
    """The same, and a model of it."""

    def __init__(self, host: AnyHost, directory: Path) -> None:
        super().__init__(host, directory)
        self.model = Model(EXTENTS * EXTENT_BYTES)

    def prepare(self, case: Case) -> None:
        self.model = Model(EXTENTS * EXTENT_BYTES)

        def arrange() -> None:
            for one in case.before:
                outcome, expected = self.machine.by_kubelet(one), self.model.apply(one)
                assert self.machine.same(one, outcome, expected), one
            case.arrange(self.machine, self.model)

        self.begin(arrange)

    def finish(self, case: Case) -> None:
        """Make the same call again, until it is as the model says."""
        expected, last = self.model.apply(case.call), Outcome("")

        def is_done() -> bool:
            nonlocal last
            last = self.machine.by_kubelet(case.call)
            is_same = self.machine.same(case.call, last, expected)
            assert is_same or last.code in UNFINISHED, last
            return is_same

        self.until(is_done, lambda: last)
        self.await_state()

    def await_state(self) -> None:
        """Until the machine is as the model says."""
        self.until(lambda: self.machine.state() == self.model.state(), self.machine.state)

    def undo(self, case: Case) -> None:
        """What a CO does that gives up; then nothing is left."""
        self.machine.give_up(case.call)
        self.model = Model(self.model.total_bytes)
        self.await_state()


@pytest.fixture
def directory(host: AnyHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a service that has the shells; what the test itself asks is answered by processes."""
    monkeypatch.setattr(type(host), "sessions", False)
    if isinstance(host, FakeHost):
        root = property(lambda _config: tmp_path / "root")
        monkeypatch.setattr(Config, "lvm_root", root)
    return tmp_path


@pytest.fixture
def grace(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Wait less for a shell that is stopped to end."""
    usual = session._GRACE_SECONDS
    return lambda mishap: monkeypatch.setattr(
        session, "_GRACE_SECONDS", 0.2 if mishap in STOPPED else usual
    )


def at_each(name: str, host: AnyHost) -> Iterator[tuple[int, str]]:
    """Steps, and what happens at each, some of it by chance: on real LVM one."""
    each = 4 if chosen.every and isinstance(host, FakeHost) else 1
    asked = chosen.numbers("CARVER_MISHAPS", seed=1, each=each)
    for step in itertools.count():
        chance = random.Random(f"{asked['seed']}-{name}-{step}")
        for mishap in chance.sample(sorted(MISHAPS), asked["each"]):
            yield step, mishap


@pytest.mark.parametrize("name", chosen.kinds(NAMES, usual=USUAL))
@pytest.mark.long_on_lvm
def test_a_call_repeated_after_a_mishap_of_the_shell_succeeds(
    name: str, host: AnyHost, directory: Path, grace: Callable[[str], None]
) -> None:
    case, trial = CASES[name], Trial(host, directory)

    def is_done(outcome: Outcome) -> bool:
        return trial.machine.same(case.call, outcome, trial.model.copy().apply(case.call))

    trial.suffer(
        name,
        grace,
        prepare=partial(trial.prepare, case),
        call=partial(trial.machine.by_kubelet, case.call),
        is_done=is_done,
        finish=partial(trial.finish, case),
        undo=partial(trial.undo, case),
    )


# What the model does not know: thin pools, group snapshots, changed blocks


THICK = DeviceClass("plain", "", default=True)
THIN = DeviceClass("plain", "", default=True, layout=Layout("thin"), pool=Policy())


@dataclass(frozen=True)
class Script:
    """A call, and those before it, on the volumes and snapshots of a class."""

    one: DeviceClass
    call: Callable[[Machine], object]
    before: tuple[Callable[[Machine], object], ...] = ()


def create(name: str, size: int = 32 * MIB) -> Callable[[Machine], object]:
    return lambda machine: machine.client.create(name, size, block())


def delete(name: str) -> Callable[[Machine], object]:
    return lambda machine: machine.client.delete(machine.id_of(name))


def expand(machine: Machine) -> object:
    return machine.client.expand(machine.id_of("a"), 64 * MIB)


def snapshot(name: str) -> Callable[[Machine], object]:
    return lambda machine: machine.client.snapshot(name, machine.id_of("a"))


def restore(machine: Machine) -> object:
    source = of_snapshot(machine.snapshot_id_of("snap"))
    return machine.client.create("copy", 32 * MIB, block(), source=source)


def clone(machine: Machine) -> object:
    source = of_volume(machine.id_of("a"))
    return machine.client.create("copy", 32 * MIB, block(), source=source)


def delete_snapshot(machine: Machine) -> None:
    machine.client.delete_snapshot(machine.snapshot_id_of("snap"))


def get_snapshot(machine: Machine) -> object:
    return machine.client.snapshots(snapshot_id=machine.snapshot_id_of("snap"))


def take_all(machine: Machine) -> object:
    made = machine.client.group_snapshot("nightly", [machine.id_of(one) for one in "ab"])
    members = " ".join(one.snapshot_id for one in made.snapshots)
    machine.contexts["nightly"] = {"id": made.group_snapshot_id, "members": members}
    return made


def of_all(machine: Machine) -> tuple[str, list[str]]:
    """The group snapshot's id, and its members'."""
    found = machine.contexts.get("nightly", {"id": machine.snapshot_id_of("none"), "members": ""})
    return found["id"], found["members"].split()


def find_all(machine: Machine) -> object:
    return machine.client.find_group_snapshot(*of_all(machine))


def delete_all(machine: Machine) -> None:
    machine.client.delete_group_snapshot(*of_all(machine))


def allocated(machine: Machine) -> object:
    return list(blocks(machine.client, machine.snapshot_id_of("snap")))


def changed(machine: Machine) -> object:
    later, snap = (machine.snapshot_id_of(one) for one in ("later", "snap"))
    return list(blocks(machine.client, later, snap))


A, B, SNAP = create("a"), create("b"), snapshot("snap")
SCRIPTS = {
    "thin: create, with the pool": Script(THIN, A),
    "thin: create, in the pool": Script(THIN, A, (B,)),
    "thin: expand": Script(THIN, expand, (A,)),
    "thin: delete, from the pool": Script(THIN, delete("a"), (A, B)),
    "thin: delete, with the pool": Script(THIN, delete("a"), (A,)),
    "thin: snapshot": Script(THIN, SNAP, (A,)),
    "thin: restore": Script(THIN, restore, (A, SNAP)),
    "thin: clone": Script(THIN, clone, (A,)),
    "thin: delete a snapshot": Script(THIN, delete_snapshot, (A, SNAP)),
    "thin: a group snapshot": Script(THIN, take_all, (A, B)),
    "thin: delete a group snapshot": Script(THIN, delete_all, (A, B, take_all)),
    "thin: what a snapshot has": Script(THIN, allocated, (A, SNAP)),
    "thin: what changed": Script(THIN, changed, (A, SNAP, snapshot("later"))),
    "a group snapshot": Script(THICK, take_all, (A, B)),
    "get a group snapshot": Script(THICK, find_all, (A, B, take_all)),
    "delete a group snapshot": Script(THICK, delete_all, (A, B, take_all)),
    "get a snapshot": Script(THICK, get_snapshot, (A, SNAP)),
    "what a snapshot has": Script(THICK, allocated, (A, SNAP)),
}


class Seen(Place):
    """A machine, and what lvm2 shows there."""

    def outcome(self, call: Callable[[Machine], object]) -> Outcome:
        try:
            call(self.machine)
        except grpc.RpcError as error:
            return Outcome(error.code().name)
        return Outcome("OK")

    def shown(self) -> tuple[object, ...]:
        """What there is, in words that are the same however often it was tried."""
        group = self.machine._report()
        found = group.volumes.values()
        names = sorted((one.name, one.size_bytes, one.active) for one in found)
        held = [one.name for one in found if one.suspended]
        tags = sorted((one.name, *_states(one.tags)) for one in found)
        return (*names, *tags, Room(group).free_extents, held)

    def finish(self, call: Callable[[Machine], object], expected: tuple[object, ...]) -> None:
        last = Outcome("")

        def is_done() -> bool:
            nonlocal last
            last = self.outcome(call)
            assert last.code in {"OK", *UNFINISHED}, last
            return last.code == "OK"

        self.until(is_done, lambda: last)
        self.until(lambda: self.shown() == expected, self.shown)

    def undo(self) -> None:
        """In the end nothing is left."""

        def is_gone() -> bool:
            client = self.machine.client
            client.delete(self.machine.id_of("copy"))
            delete_all(self.machine)
            for one in client.snapshots():
                client.delete_snapshot(one.snapshot_id)
            for volume in client.volumes():
                client.delete(volume.volume_id)
            self.settle()
            return self.shown() == (EXTENTS, [])

        self.until(is_gone, self.shown)


def _states(every: Iterable[str]) -> Iterator[str]:
    """The tags that tell what is done with a volume; others have a time or an id."""
    kinds = ("state", "metadata")
    return (one for one in sorted(every) if one.startswith(tuple(f"carver.{k}" for k in kinds)))


@pytest.mark.variation
@pytest.mark.parametrize("name", chosen.kinds(SCRIPTS, usual=("thin: create, in the pool",)))
def test_no_mishap_leaves_a_pool_a_snapshot_or_a_reading_half_made(
    name: str, host: AnyHost, directory: Path, grace: Callable[[str], None]
) -> None:
    script = SCRIPTS[name]
    seen = Seen(host, directory, script.one)

    def arrange() -> None:
        for one in script.before:
            one(seen.machine)

    seen.begin(arrange)
    assert seen.outcome(script.call).code == "OK"
    seen.settle()
    seen.until(lambda: not seen.shown()[-1], seen.shown)
    expected = seen.shown()
    seen.undo()
    seen.suffer(
        name,
        grace,
        prepare=partial(seen.begin, arrange),
        call=partial(seen.outcome, script.call),
        is_done=lambda outcome: outcome.code == "OK",
        finish=partial(seen.finish, script.call, expected),
        undo=seen.undo,
    )
