"""Killed before and after each step of each call: the next process completes or undoes it."""

import io
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import chosen
import configured
import expect
import grpc
import in_background
import laying
import nodes
import pytest
from changed_blocks import blocks
from fakes.devices import Media
from fakes.host import FakeHost
from fakes.kernel import CHANGING, DECIDING, LOOKING, FakeKernel
from fakes.lvm import FakePool
from model import operations as do
from model import stopping
from model.cases import AHEAD, CASES, EXTENTS, INLINE, Case, reboot
from model.expected import EXTENT_BYTES, Model
from model.machine import Machine, behind, try_soon
from model.operations import MIB, Use
from model.stopping import Cut, Killed, Switch, stops
from nodes import Node, Stand, volume_of, write
from real.any import AnyHost

from agent.core import errors, tag
from agent.daemon.server import Service
from agent.extras.changed_blocks.extents import Extent, UserExtent
from agent.extras.streams import reading
from agent.extras.transfer import streams_command
from agent.extras.transfer.move import Move
from agent.extras.transfer.move_command import Options, OtherNode, move_of
from agent.groups.group_definitions import GroupDefinitions
from agent.settings.classes import DeviceClass
from agent.settings.settings import BackingFile, Config, GroupDefinition
from lvm import report, tags
from lvm.caches import Cache
from lvm.layout import Layout, Reserve
from lvm.room import Room
from lvm.thin import Policy
from lvm.tuning import AUTO, PLAIN, Tuning
from mount.block_io import Opened
from mount.command import Result
from mount.kernel import Kernel
from proto import carver_pb2
from proto import csi_pb2 as csi

# gRPC drops the stream of a dead caller, and what it does then may be the step that dies.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object Interceptor"
    ":pytest.PytestUnraisableExceptionWarning"
)

# Looking costs one command, and changes nothing that could be left half done.
UNSTOPPED = (do.Stats, do.Health)


class Trial:
    """A machine, its model, and a case's call that is about to be made on both."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.where = directory.name
        (directory / "mounts").mkdir(parents=True)
        host = FakeHost(directory / "mounts")
        self.case = case
        group = host.new_group(EXTENTS)
        self.machine = Machine(host, group, directory)
        self.model = Model(EXTENTS * EXTENT_BYTES)
        for one in case.before:
            self.do(one)
        case.arrange(self.machine, self.model)

    def do(self, call: do.Call) -> None:
        assert self.machine.by_kubelet(call) == self.model.apply(call), call
        # In a program (tests/faults) what is put off is behind the answer.
        self.machine.service.volume_groups.run_deferred()
        assert self.machine.state() == self.model.state(), call

    def start(self, switch: Switch) -> None:
        """A new process, with the case's kind of wipe."""
        if self.case.long_wipe:
            recorded = threading.Event()

            def gate(name: str) -> None:
                if name == "zero_out":
                    while not (recorded.is_set() or switch.dead.wait(0.005)):
                        pass
                if name == "lvm lvchange":
                    recorded.set()

            switch.gate = gate
            self.machine.grace_seconds = 0.0
        self.machine.start(switch)
        try_soon(self.machine.service)
        # Someone wrote to the group since the start looked: calls that only look ask lvm2, too.
        assert isinstance(self.machine.host, FakeHost)
        for group in self.machine.host.lvm2.groups.values():
            group.seqno += 1

    def kill(self, stop_at: int, before: bool) -> None:
        """Make the call, and end the process at a step of it."""
        self.machine.stop()
        switch = Switch(stop_at, before=before)
        # A call waits this long for erasing that died with the process.
        self.machine.grace_seconds = 2
        self.start(switch)
        answer = self.machine.by_kubelet(self.case.call)
        assert switch.dead.wait(10), f"step {stop_at} was never taken: {switch.taken}"
        if not (self.case.long_wipe or (self.case.behind and answer.code == "OK")):
            assert answer.code in ("CANCELLED", "UNAVAILABLE"), answer
        self.machine.revive()

    def settle(self) -> None:
        """Let copies and wipes that a new process took up come to their end."""
        deadline = time.monotonic() + 100
        every = behind(self.machine.service)
        while any(jobs.unfinished() for jobs in every) and time.monotonic() < deadline:
            time.sleep(0.005)
        in_background.ended(self.machine.service.pool_remover.jobs)

    def repeat(self) -> None:
        """Make the call again, in the process that follows."""
        call, expected = self.case.call, self.model.apply(self.case.call)
        outcome = self.machine.by_kubelet(call)
        if outcome.code == "ABORTED" != expected.code:
            # What the killed process left is being removed. Callers repeat a call then.
            self.settle()
            outcome = self.machine.by_kubelet(call)
        assert outcome == expected, self.where
        assert expected.code == self.case.code
        if isinstance(call, do.Stage) and not call.use.is_block:
            # Its file system is as large as it should be.
            self.do(do.Stats(call.volume, call.path))
        # A copy's bridge is erased after the answer, and so is what a killed delete had begun.
        self.settle()
        assert self.machine.state() == self.model.state(), self.where

    def undo(self) -> None:
        """What a CO does that gives up; then nothing may be left."""
        self.machine.give_up(self.case.call)
        self.settle()
        assert self.machine.state() == Model(self.model.total_bytes).state()


def steps(case: Case, directory: Path) -> list[str]:
    """The steps that the call takes when nothing ends it."""
    trial = Trial(case, directory)
    trial.machine.stop()
    switch = Switch()
    trial.start(switch)
    trial.machine.call(case.call)
    trial.settle()
    trial.machine.stop()
    taken = switch.taken
    # The call and the wipe behind it end at the same time: whether the call reads one report more
    # differs from run to run.
    while case.long_wipe and taken[-1] == "lvm fullreport":
        taken = taken[:-1]
    return taken


def killed(case: Case, directory: Path, stride: int = 1) -> Iterator[Trial]:
    """The case after its call was killed at each step, or at each so many."""
    every = stops(steps(case, directory / "count"))
    for stop_at, before in itertools.islice(every, 0, None, stride):
        trial = Trial(case, directory / f"{stop_at}{before}")
        trial.kill(stop_at, before)
        yield trial
        trial.machine.stop()


REPEATED, GIVEN_UP, REBOOTED = "repeated", "given up", "repeated after a reboot"


def varies(name: str) -> bool:
    """Whether a case varies another, as `stage, read-only` does."""
    return ", " in name and not name.endswith((", encrypted", ", inline", ", raw"))


LONG = (pytest.mark.long,)
HOW = [
    # Given up in the end, too; without `--every` at every other step at once.
    *((name, REPEATED) for name in CASES),
    *(pytest.param(name, GIVEN_UP, marks=LONG) for name in CASES),
    *((name, REBOOTED) for name in CASES if name.startswith("stage") and "encrypted" in name),
]


def is_repeated(how: str, step: int) -> bool:
    """Whether a call that was killed at that step is repeated, or given up at once."""
    return how == REBOOTED or (how == REPEATED and (chosen.every or step % 2 == 0))


@pytest.mark.parametrize(("name", "how"), HOW)
def test_a_killed_call_is_completed_or_undone(name: str, how: str, tmp_path: Path) -> None:
    # What is repeated in the same boot is killed at each step.
    stride = 2 if how == REBOOTED and not chosen.every else 1
    for step, trial in enumerate(killed(CASES[name], tmp_path, stride)):
        if how == REBOOTED:
            reboot(trial.machine, trial.model)
        if is_repeated(how, step):
            trial.repeat()
        trial.undo()


def test_a_killed_and_failing_inline_publish_leaves_nothing(tmp_path: Path) -> None:
    """Kubelet repeats the call, and else forgets it: nothing comes to undo it."""
    case = Case(INLINE)

    def trial(name: str) -> Trial:
        made = Trial(case, tmp_path / name)
        made.machine.host.intercept = lambda words: (
            Result(1, "", "no luck") if words[0] == "mkfs.ext4" else None
        )
        return made

    counted = trial("count")
    counted.machine.stop()
    switch = Switch()
    counted.start(switch)
    assert counted.machine.call(INLINE).code == "INTERNAL"
    counted.machine.stop()
    assert "lvm lvremove" in switch.taken
    for stop_at, before in stops(switch.taken):
        one = trial(f"{stop_at}{before}")
        one.kill(stop_at, before)
        assert one.machine.call(INLINE).code == "INTERNAL", one.where
        one.settle()
        assert one.machine.state() == one.model.state(), one.where
        one.machine.stop()


LISTS = ("list", "list snapshots")
CUT = [
    pytest.param(name, marks=LONG if varies(name) else ())
    for name, case in CASES.items()
    if not case.long_wipe
]


@pytest.mark.parametrize("name", CUT)
def test_a_call_cut_off_by_its_deadline_at_any_command_succeeds_when_repeated(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    for before in (True, False) if chosen.every else (False,):
        for stop_at in itertools.count():
            trial = Trial(case, tmp_path / f"{stop_at}{before}")
            trial.machine.stop()
            cut = Cut(stop_at, before=before)
            trial.start(cut)
            answer = trial.machine.by_kubelet(case.call)
            if not cut.is_over:
                trial.machine.stop()
                break
            # A list answers from the cache.
            assert answer.code == ("OK" if name in LISTS else "DEADLINE_EXCEEDED"), trial.where
            cut.is_over = False
            expected = trial.model.apply(case.call)
            again = trial.machine.by_kubelet(case.call)
            if again.code == "ABORTED":
                # It met work in the background of the first call.
                trial.settle()
                again = trial.machine.by_kubelet(case.call)
            assert again == expected, trial.where
            assert expected.code == case.code
            trial.settle()
            assert trial.machine.state() == trial.model.state(), trial.where
            trial.undo()
            trial.machine.stop()


def test_a_start_killed_while_making_groups_is_completed_by_the_next(tmp_path: Path) -> None:
    def machine(name: str) -> tuple[FakeHost, Config]:
        host = FakeHost(tmp_path)
        disks = [host.new_device(40 * MIB) for _ in range(3)]
        classes = tuple(DeviceClass(name=one, group=one) for one in ("disks", "other", "file"))
        definitions = (
            GroupDefinition("disks", tuple(disks[:2]), fast=(disks[1],)),
            GroupDefinition("other", tuple(disks[2:])),
            GroupDefinition("file", file=BackingFile(tmp_path / name, 64 * MIB)),
        )
        return host, configured.carver(tmp_path, classes=classes, definitions=definitions)

    def start(host: FakeHost, config: Config, switch: Switch) -> GroupDefinitions:
        switch.counting = True
        _, laid = laying.lay(host, config, switch.run(host.run), switch.kernel(host.kernel))
        return laid

    whole = Switch()
    start(*machine("whole"), whole)
    assert whole.taken.count("lvm vgcreate") == 3
    for stop_at, before in stops(whole.taken):
        host, config = machine(f"{stop_at}{before}")
        with pytest.raises(Killed):
            start(host, config, Switch(stop_at, before=before))
        laid = start(host, config, Switch())
        assert laid.failures == {}
        sizes = {name: len(group.disks) for name, group in host.lvm2.groups.items()}
        assert sizes == {"disks": 2, "other": 1, "file": 1}
        tags = [bool(disk.tags) for disk in host.lvm2.groups["disks"].disks]
        assert tags == [False, True]
        assert len(host.kernel.loop_devices()) == 1


def test_every_call_of_the_model_is_killed() -> None:
    assert {type(case.call) for case in CASES.values()} | set(UNSTOPPED) == do.CALLS


def test_every_operation_of_the_kernel_is_faked_and_changes_or_looks() -> None:
    public = {name for name in dir(Kernel) if not name.startswith("_")}
    real = {name for name in public if getattr(FakeKernel, name) is getattr(Kernel, name)}
    # Target paths are real, and how a device is zeroed follows from what is faked.
    assert real == {"make_directory", "make_file", *DECIDING}, (
        "FakeKernel of tests/support/fakes/kernel.py"
    )
    assert public == CHANGING | LOOKING, "CHANGING, LOOKING of tests/support/fakes/kernel.py"


def test_a_dead_process_does_nothing_more_from_any_thread() -> None:
    done: list[tuple[str, ...]] = []

    def run(*words: str, stdin: bytearray | None = None) -> Result:
        done.append(words)
        return Result(0, "", "")

    switch = Switch(0, before=False)
    switch.counting = True
    through = switch.run(run)
    with pytest.raises(Killed):
        through("lvm", "lvcreate")
    failures: list[BaseException] = []

    def other() -> None:
        try:
            through("lvm", "lvremove")
        except Killed as killed:
            failures.append(killed)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert done == [("lvm", "lvcreate")]
    assert len(failures) == 1


BLOCK = Use("block", do.MULTI_WRITER)
CREATE = do.Create("a", 32 * MIB, 0, BLOCK)
OTHER = do.Create("b", 32 * MIB, 0, BLOCK)
COPY = do.Create("a", 36 * MIB, 0, BLOCK, source=(do.OF_VOLUME, "b"))
AHEAD_CREATE = replace(CREATE, mutable=AHEAD)
EXPAND, DELETE = do.Expand("a", 64 * MIB), do.Delete("a")
SNAPSHOT = do.Snapshot("a", "snap")
LINEAR = (("class", "linear"),)
WRITES = replace(CREATE, parameters=(("class", "writes"),))
RATE = (("carver/minimumRecoveryRate", "1MiB"), ("carver/readAhead", "auto"))
DATA = b"what is to be copied".ljust(4096)
MARK = b"data of an earlier owner"


@dataclass(frozen=True)
class Arrangement:
    """The extents of a group's disks, the second of them fast or not, and its classes."""

    disks: tuple[int, ...]
    classes: Callable[[str], tuple[DeviceClass, ...]]
    has_fast_disk: bool = False


def classes_with_cache(group: str) -> tuple[DeviceClass, ...]:
    return (
        DeviceClass("plain", group, default=True, cache=Cache()),
        DeviceClass("writes", group, cache=Cache("writecache", "writeback")),
        DeviceClass("linear", group),
    )


def one_class(group: str, **settings: Any) -> tuple[DeviceClass, ...]:
    return (DeviceClass("plain", group, default=True, **settings),)


THIN_CLASS = partial(one_class, layout=Layout("thin"))
POOL = Policy(size=Reserve(size_bytes=96 * MIB))
CACHED = Arrangement((40, 20), classes_with_cache, has_fast_disk=True)
OVERWRITTEN = Arrangement((40,), partial(one_class, zero="fully"))
RAID = Arrangement((40, 40), partial(one_class, layout=Layout("raid1", mirrors=1)))
THIN = {
    name: Arrangement((40, 8), partial(THIN_CLASS, pool=POOL, cache=cache), has_fast_disk=True)
    for name, cache in {
        "without a cache": None,
        "cache": Cache(),
        "writecache": Cache("writecache", "writeback"),
    }.items()
}


@dataclass(frozen=True)
class Row:
    """A call, those before it, and what else comes before it and after its repetition."""

    arrangement: Arrangement
    call: "do.Call | Callable[[Arranged], object]"
    before: tuple[do.Call, ...] = ()
    prepare: "Callable[[Arranged], object]" = field(default=lambda _trial: None)
    check: "Callable[[Arranged], object]" = field(default=lambda _trial: None)


class Arranged:
    """A machine with a group that is arranged for a call."""

    def __init__(self, row: Row, directory: Path) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.row, self.where = row, directory.name
        self.host = FakeHost(directory / "mounts")
        name = self.host.new_group(*row.arrangement.disks)
        self.group = self.host.lvm2.groups[name]
        if row.arrangement.has_fast_disk:
            self.group.disks[1].tags = {report.FAST}
        if row.arrangement is OVERWRITTEN:
            self.host.mark_free(name, MARK)
        settings = {"classes": row.arrangement.classes(name)}
        self.machine = Machine(self.host, name, directory, settings=settings)
        for one in row.before:
            # As a caller does: a busy service may be UNAVAILABLE at first.
            expect.soon(lambda: self.machine.call(one).code == "OK")  # noqa: B023
        self.names_before = self.names()
        self.made: Any = row.prepare(self)
        self.media = self.media_of_a()
        # The steps of the call when it is not killed; whether it failed.
        self.whole: list[str] = []
        self.failed = False

    def run(self, switch: Switch) -> list[str]:
        """Make the call in a new process; return its steps, those in the background too."""
        self.machine.restart(switch)
        self.machine.service.growth_zeroer.grace_seconds = self.machine.grace_seconds
        if callable(self.row.call):
            try:
                self.row.call(self)
            except grpc.RpcError:
                self.failed = True
        else:
            self.machine.call(self.row.call)
        if switch.stop_at < 0:
            in_background.ended(self.machine.service.pool_remover.jobs)
        return switch.taken

    def names(self) -> set[str]:
        return set(self.group.volumes)

    def media_of_a(self) -> list[Media]:
        """What holds the data of volume a: itself, and its cache."""
        found = self.group.volumes.get("vol-a")
        cache = found.cache if found else None
        return [one.media for one in (found, cache) if one]

    def require_no_mark(self) -> None:
        """Fail if a volume that callers can see has what was on the disk before."""
        ready = [one for one in self.group.volumes.values() if "carver.state=ready" in one.tags]
        assert not any(MARK in data for one in ready for data in one.media.blocks.values())

    def undo(self) -> None:
        """Do what a CO does that gives up; then nothing may be left."""
        media = [*self.media, *self.media_of_a()]
        for one in (do.DeleteSnapshot("snap"), DELETE, do.Delete("b")):
            assert self.machine.call(one).code == "OK", self.where
        in_background.ended(self.machine.service.pool_remover.jobs)
        self.machine.stop()
        assert self.names() == set(), self.where
        left, disks = self.machine._report(), self.row.arrangement.disks
        assert Room(left).free_extents + Room(left).fast_extents == sum(disks), self.where
        if self.row.arrangement is CACHED:
            assert all(one.zeroed for one in media), "data and cache are overwritten"


def kills(row: Row, directory: Path) -> Iterator[Arranged]:
    """The row after its call was killed at each step, and another process started."""
    whole = Arranged(row, directory / "count").run(Switch())
    for stop_at, before in stops(whole):
        trial = Arranged(row, directory / f"{stop_at}{before}")
        trial.whole = whole
        switch = Switch(stop_at, before=before)
        trial.run(switch)
        assert switch.dead.wait(10), f"step {stop_at} was never taken: {switch.taken}"
        trial.require_no_mark()
        trial.machine.revive()
        yield trial


def has_cache(trial: Arranged) -> None:
    assert trial.group.volumes["vol-a"].cache


def has_data(trial: Arranged) -> None:
    has_cache(trial)
    assert trial.group.volumes["vol-a"].media.read(0, len(DATA)) == DATA


def write_data(trial: Arranged) -> None:
    trial.group.volumes["vol-b"].media.write(0, DATA)


def reads_ahead(trial: Arranged) -> None:
    assert trial.group.volumes["vol-a"].tuning.read_ahead_bytes == MIB


def reads_ahead_by_cache(trial: Arranged) -> None:
    has_cache(trial)
    reads_ahead(trial)


def has_rate(trial: Arranged) -> None:
    # A RAID volume with a minimum rate alone is made in two commands.
    assert [one for one in trial.whole if one != "lvm fullreport"] == [
        "lvm lvcreate",
        "lvm lvchange",
    ]
    assert trial.machine._report().volume("vol-a").tuning == Tuning(AUTO, 1024).applied_to(PLAIN)


def is_left(*names: str) -> Callable[[Arranged], None]:
    """Check that the group of a thin class has these volumes, and the pool the class's cache."""

    def check(trial: Arranged) -> None:
        if not names:
            # Wait for what was taken up at the start by asking for it again.
            trial.machine.service.pool_remover.remove_if_empty(
                trial.group.name, "pool-plain"
            ).result(20)
        assert trial.names() == set(names), trial.where
        pool = trial.group.volumes.get("pool-plain")
        [thin] = trial.machine.settings["classes"]
        assert pool is None or bool(pool.cache) == bool(thin.cache), trial.where
        if trial.row.call is AHEAD_CREATE:
            reads_ahead(trial)

    return check


def leak_chunk(trial: Arranged) -> None:
    trial.host.leak_chunk(trial.group.name, "pool-plain", "vol-a")


def exists(trial: Arranged) -> None:
    assert "vol-a" in trial.names()
    trial.require_no_mark()


LINEAR_OTHER = replace(OTHER, parameters=LINEAR)
THIN_CALLS: dict[str, tuple[do.Call, tuple[do.Call, ...], tuple[str, ...]]] = {
    "create, with the pool": (CREATE, (), ("vol-a", "pool-plain")),
    "create, in a pool": (CREATE, (OTHER,), ("vol-a", "vol-b", "pool-plain")),
    "create, with its read-ahead": (AHEAD_CREATE, (), ("vol-a", "pool-plain")),
    "expand": (EXPAND, (CREATE,), ("vol-a", "pool-plain")),
    "delete, with the pool": (DELETE, (CREATE,), ()),
    "delete, from a pool": (DELETE, (CREATE, OTHER), ("vol-b", "pool-plain")),
}
ROWS = {
    "cache: create": Row(CACHED, CREATE, check=has_cache),
    "cache: create, with its read-ahead": Row(CACHED, AHEAD_CREATE, check=reads_ahead_by_cache),
    "cache: expand": Row(CACHED, EXPAND, (CREATE,), check=has_cache),
    "cache: delete": Row(CACHED, DELETE, (CREATE,)),
    "cache: create of a volume": Row(CACHED, COPY, (LINEAR_OTHER,), write_data, has_data),
    "cache: snapshot": Row(CACHED, SNAPSHOT, (WRITES,), check=has_cache),
    "cache: delete a snapshot": Row(
        CACHED, do.DeleteSnapshot("snap"), (WRITES, SNAPSHOT), check=has_cache
    ),
    "overwritten: create": Row(OVERWRITTEN, CREATE, check=exists),
    "overwritten: create of a volume": Row(OVERWRITTEN, COPY, (OTHER,), check=exists),
    "overwritten: expand": Row(OVERWRITTEN, EXPAND, (CREATE,), check=exists),
    "overwritten: expand further": Row(
        OVERWRITTEN, do.Expand("a", 96 * MIB), (CREATE, EXPAND), check=exists
    ),
    "raid: create, with a minimum rate": Row(RAID, replace(CREATE, mutable=RATE), check=has_rate),
}
for _name, _arrangement in THIN.items():
    for _what, (_call, _before, _left) in THIN_CALLS.items():
        ROWS[f"thin, {_name}: {_what}"] = Row(_arrangement, _call, _before, check=is_left(*_left))
    ROWS[f"thin, {_name}: delete, with a pool that leaked a chunk"] = Row(
        _arrangement, DELETE, (CREATE,), leak_chunk, is_left()
    )


@pytest.mark.parametrize("how", [REPEATED, pytest.param(GIVEN_UP, marks=LONG)])
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=LONG if "writecache" in one else ()) for one in ROWS]
)
def test_a_killed_call_on_an_arranged_group_is_completed_or_undone(
    name: str, how: str, tmp_path: Path
) -> None:
    for step, trial in enumerate(kills(ROWS[name], tmp_path)):
        if is_repeated(how, step):
            assert not callable(trial.row.call)
            assert trial.machine.call(trial.row.call).code == "OK", trial.where
            trial.row.check(trial)
        trial.undo()


def test_a_volume_deleted_while_it_waits_to_grow_leaves_nothing(tmp_path: Path) -> None:
    trial = Arranged(ROWS["overwritten: expand"], tmp_path)
    growth_zeroer = trial.machine.service.growth_zeroer
    growth_zeroer.grace_seconds = 0
    with growth_zeroer.jobs.halted(trial.machine.id_of("a")):
        assert trial.machine.call(EXPAND).code == "ABORTED"
    assert trial.names() == {"grow-vol-a", "vol-a"}
    trial.undo()


def test_an_expansion_to_another_size_starts_again(tmp_path: Path) -> None:
    trial = Arranged(ROWS["overwritten: expand"], tmp_path)
    growth_zeroer = trial.machine.service.growth_zeroer
    grace, growth_zeroer.grace_seconds = growth_zeroer.grace_seconds, 0
    for size in (64, 96):
        trial.machine.call(do.Expand("a", size * MIB))
    growth_zeroer.grace_seconds = grace
    assert trial.machine.call(do.Expand("a", 96 * MIB)).code == "OK"
    assert trial.group.volumes["vol-a"].length == 24
    trial.require_no_mark()
    trial.machine.stop()


MEMBERS = ("a", "b", "c")
THICK_GROUP = Arrangement((200,), one_class)
THIN_GROUP = Arrangement((200,), partial(THIN_CLASS, pool=Policy()))


def take_group(trial: Arranged) -> csi.VolumeGroupSnapshot:
    sources = [trial.machine.id_of(one) for one in MEMBERS]
    return trial.machine.client.group_snapshot("nightly", sources)


def delete_group(trial: Arranged) -> None:
    members = [one.snapshot_id for one in trial.made.snapshots]
    trial.machine.client.delete_group_snapshot(trial.made.group_snapshot_id, members)


@pytest.mark.parametrize("arrangement", [THICK_GROUP, THIN_GROUP], ids=["thick", "thin"])
@pytest.mark.parametrize("is_deleted", [False, True], ids=["create", "delete"])
def test_a_killed_group_snapshot_is_whole_or_gone(
    is_deleted: bool, arrangement: Arrangement, tmp_path: Path
) -> None:
    before = tuple(do.Create(one, 32 * MIB, 0, BLOCK) for one in MEMBERS)
    row = Row(arrangement, take_group, before)
    if is_deleted:
        row = Row(arrangement, delete_group, before, take_group)
    for trial in kills(row, tmp_path):
        client, lvm2 = trial.machine.client, trial.host.lvm2
        assert trial.whole.count("suspend") == (0 if is_deleted else 3)
        assert not [one for one in trial.names() if lvm2.is_suspended(trial.group.name, one)]
        listed = client.snapshots()
        assert len(listed) in (0, 3), "whole, or none for any caller"
        in_background.ended(trial.machine.service.eraser.jobs)
        if not listed:
            assert trial.names() == trial.names_before, trial.where
        trial.machine.revive()
        if not is_deleted:
            trial.made = take_group(trial)
            assert trial.made.ready_to_use
            assert len({one.creation_time.nanos for one in trial.made.snapshots}) == 1
            assert take_group(trial) == trial.made
        delete_group(trial)
        assert trial.machine.client.snapshots() == []
        in_background.ended(trial.machine.service.eraser.jobs)
        assert trial.names() == trial.names_before, trial.where
        trial.machine.stop()


def take_two(trial: Arranged) -> list[str]:
    """Take two snapshots of a volume, which is written to after each."""
    device = trial.host.devices.find(trial.group.name, "vol-a")
    assert device is not None
    taken = []
    for number in range(2):
        made = trial.machine.client.snapshot(f"s-{number}", trial.machine.id_of("a"))
        taken.append(made.snapshot_id)
        trial.host.write_bytes(device.path, number * MIB, b"a" * 4096)
    return taken


def read_blocks(what: str, trial: Arranged) -> list[UserExtent] | list[Extent]:
    base, target = trial.made
    if what == "written":
        return list(streams_command.extents(trial.machine.client, target, base))
    return list(blocks(trial.machine.client, target, "" if what == "allocated" else base))


def require_inactive(service: Service, host: AnyHost, group: str) -> None:
    """No snapshot is active, nor tagged as active."""
    found = service.reports.fresh(group).group(group).volumes.values()
    assert not [one.name for one in found if "carver.activated=reading" in one.tags]
    assert not [one for one in host.devices.active(group) if one.startswith("snap-")]


def require_nothing_held(trial: Arranged) -> None:
    require_inactive(trial.machine.service, trial.host, trial.group.name)
    pool = trial.group.volumes["pool-plain"]
    assert isinstance(pool, FakePool)
    assert pool.held is None, trial.where
    assert "metadataSnapshot" not in tags.decode(frozenset(pool.tags)), trial.where


@pytest.mark.parametrize("what", ["allocated", "changed", "written"])
def test_a_killed_reading_of_blocks_leaves_nothing_and_succeeds_when_repeated(
    what: str, tmp_path: Path
) -> None:
    row = Row(THIN_GROUP, partial(read_blocks, what), (CREATE,), take_two)
    for trial in kills(row, tmp_path):
        assert len(trial.whole) >= 6
        assert trial.failed, trial.where
        require_nothing_held(trial)
        [one] = read_blocks(what, trial)
        assert (one.offset_bytes, one.length_bytes) == (0, 4096 if what == "changed" else 64 << 10)
        require_nothing_held(trial)
        trial.machine.stop()


LAYOUTS = [nodes.PLAIN, pytest.param(nodes.THIN, marks=pytest.mark.long)]

# What a command ends with when the service that it asks dies.
DIED = (grpc.RpcError, errors.AgentError)


def yes(_question: str) -> bool:
    return True


class TwoNodes:
    """Two nodes, and a volume with two snapshots on the first."""

    def __init__(self, directory: Path, stack: ExitStack, layout: str) -> None:
        self.where = directory.name
        self.is_before = self.where.endswith("True")
        # The streams, where a trial needs them.
        self.given: list[bytes] = []
        directory.mkdir(parents=True)
        host = FakeHost(directory)
        config = configured.carver(directory)
        self.here = stack.enter_context(nodes.made(host, config, directory, "here"))
        self.there = stack.enter_context(nodes.made(host, config, directory, "there"))
        self.layout = layout
        self.volume = volume_of(self.here, layout)
        chance = random.Random(1)
        write(self.here, "vol-db", chance, 2, (1,))
        # What every trial of a move must keep.
        self.content = self.here.content("vol-db")
        self.here.client.unstage(self.volume.volume_id, self.here.directory / "staging")
        self.chance = chance

    def streams(self) -> list[bytes]:
        """A whole one, and what came after."""
        self.here.client.snapshot("1", self.volume.volume_id)
        write(self.here, "vol-db", self.chance, 1, (1,))
        self.here.client.snapshot("2", self.volume.volume_id)
        return [nodes.stream(self.here, "1"), nodes.stream(self.here, "2", since="1")]

    def move(self) -> Move:
        options = Options("db", self.layout)
        stand = Stand(self.there)
        return move_of(self.here.at, stand, self.volume.volume_id, options, lambda _text: None)


@pytest.fixture(autouse=True)
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame is put on record."""
    monkeypatch.setattr("agent.extras.streams.reading.RECORD_SECONDS", 0.0)
    # A dead command holds nothing, or a test says so: do not wait.
    monkeypatch.setattr("agent.extras.transfer.move._HELD_LOOKS", 0)
    # The order of steps is to be the same each time.
    monkeypatch.setattr("agent.extras.streams.form.WORKERS", 1)
    monkeypatch.setattr("agent.extras.streams.form._AHEAD", 2)


@contextmanager
def two_nodes(directory: Path, layout: str = nodes.PLAIN) -> Iterator[TwoNodes]:
    with ExitStack() as stack:
        yield TwoNodes(directory, stack, layout)


def is_over(switch: Switch) -> bool:
    """Whether it was killed; from now on it is not."""
    with switch._lock:
        switch.counting = False
        return switch.dead.is_set()


def usable(node: Node) -> int:
    return len(nodes.usable(node))


def receive_all(node: Node, given: list[bytes], layout: str = nodes.PLAIN) -> None:
    """As a person does who sees how far it is."""
    last = next(reading.streams(io.BytesIO(given[-1]))).header
    for one in given:
        if streams_command.status(node.at, "copy")["chain"] != last.chain:
            nodes.receive(node, "copy", one, layout)


def kills_of_service(
    directory: Path,
    prepare: Callable[[TwoNodes], object],
    act: Callable[[TwoNodes], object],
    who: str = "there",
    layout: str = nodes.PLAIN,
    least_steps: int = -1,
) -> Iterator[TwoNodes]:
    """Two nodes after one's service was killed at steps of `act`, and started again."""
    for step in stopping.steps_of_a_command():
        ended = False
        # Before the next step it is as after this one.
        for is_before in (True, False) if stopping.kills_after_each else (True,):
            with two_nodes(directory / f"{step}{is_before}", layout) as made:
                prepare(made)
                node = getattr(made, who)
                switch = Switch(step, before=is_before)
                node.restart(switch)
                with suppress(*DIED, StopIteration):
                    act(made)
                    ended = not is_over(switch)
                if is_over(switch):
                    node.kill()
                yield made
        if ended:
            assert step > least_steps
            return


def send_both(made: TwoNodes) -> None:
    made.given = made.streams()


def receive(made: TwoNodes) -> None:
    receive_all(made.there, made.given, made.layout)


def send_and_receive(made: TwoNodes) -> None:
    send_both(made)
    receive(made)


def finish(made: TwoNodes) -> None:
    streams_command.finish(made.there.at, "copy")


def abort(made: TwoNodes) -> None:
    streams_command.abort(made.there.at, "copy", confirmed=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", [receive, finish, abort])
def test_a_killed_receiver_continues_or_leaves_nothing(
    act: Callable[[TwoNodes], None], layout: str, tmp_path: Path
) -> None:
    prepare = send_both if act is receive else send_and_receive
    for made in kills_of_service(tmp_path, prepare, act, layout=layout, least_steps=2):
        assert usable(made.there) <= (act is finish)
        if made.is_before or act is abort:
            act(made)
        elif streams_command.status(made.there.at, "copy")["state"] != tag.READY:
            abort(made)
        if act is abort or (act is receive and not made.is_before):
            assert made.there.names() == set()
        elif made.is_before:
            assert made.there.content("vol-copy") == made.here.content("snap-2")


def send(made: TwoNodes) -> object:
    return nodes.stream(made.here, "2", since="1")


def test_a_killed_sending_leaves_no_snapshot_active(tmp_path: Path) -> None:
    def prepare(made: TwoNodes) -> None:
        made.streams()
        send(made)

    for made in kills_of_service(tmp_path, prepare, send, "here", nodes.THIN, 7):
        require_inactive(made.here.service, made.here.host, made.here.group)


def require_moved(made: TwoNodes) -> None:
    assert (usable(made.here), usable(made.there)) == (0, 1), made.where
    assert made.there.content("vol-db") == made.content


def require_here(made: TwoNodes) -> None:
    assert (usable(made.here), usable(made.there)) == (1, 0), made.where
    assert made.here.content("vol-db") == made.content
    assert (made.here.names(), made.there.names()) == ({"vol-db"}, set())


def run_move(made: TwoNodes) -> None:
    made.move().run()


def finish_move(made: TwoNodes) -> None:
    made.move().finish()


def undo_move(made: TwoNodes) -> None:
    made.move().undo(confirmed=yes, is_nowhere=yes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("who", [pytest.param("here", marks=pytest.mark.long), "there"])
def test_a_move_with_a_killed_service_leaves_one_usable(
    who: str, layout: str, tmp_path: Path
) -> None:
    trials = kills_of_service(tmp_path, lambda _made: None, run_move, who, layout, 4)
    for number, made in enumerate(trials):
        assert usable(made.here) + usable(made.there) <= 1, made.where
        # Completed, or undone: each after every other step, and both ways of dying.
        if (number // 2 + made.is_before) % 2:
            run_move(made)
            require_moved(made)
            finish_move(made)
            assert made.here.names() == set()
        else:
            with suppress(errors.NotMoved):
                undo_move(made)
            require_here(made)


@pytest.mark.parametrize("act", [undo_move, finish_move])
@pytest.mark.parametrize("who", ["here", "there"])
def test_a_killed_end_of_a_move_is_completed_by_the_same_command(
    who: str, act: Callable[[TwoNodes], None], tmp_path: Path
) -> None:
    for made in kills_of_service(tmp_path, run_move, act, who):
        assert usable(made.here) + usable(made.there) <= 1, made.where
        with suppress(errors.NotMoved, grpc.RpcError):
            act(made)
        if act is undo_move:
            require_here(made)
        else:
            require_moved(made)
            assert (made.there.names(), made.here.names()) == ({"vol-db"}, set())


def calls_of(node: Node) -> list[tuple[object, str]]:
    """The calls by which a command changes something, with the object that has each."""
    calls = carver_pb2.DESCRIPTOR.services_by_name["Transfer"].methods
    once = [(node.transfer, one.name) for one in calls if not one.server_streaming]
    return [*once, (node.client, "snapshot"), (node.client, "delete_snapshot")]


Take = Callable[[Callable[[], Any]], Any]


def dying(step: int, is_before: bool) -> Take:
    """Return what takes the steps of a process that dies before or after one of them."""
    left = iter(range(step, -1000, -1))

    def take(act: Callable[[], Any]) -> Any:
        now = next(left)
        if now < 0 or (is_before and now == 0):
            raise Killed
        answer = act()
        if now == 0:
            raise Killed
        return answer

    return take


def step_of(take: Take, call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a call a step."""
    return lambda *words, **more: take(partial(call, *words, **more))


class Dying(nodes.Wrapped):
    """A device that is open in a process that dies at one of its steps."""

    def __init__(self, device: Opened, take: Take) -> None:
        super().__init__(device)
        self.write = step_of(take, device.write)  # type: ignore[method-assign]
        self.zero_out = step_of(take, device.zero_out)  # type: ignore[method-assign]
        self.flush = step_of(take, device.flush)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("is_before", "undone"),
    [
        (True, False),
        pytest.param(True, True, marks=pytest.mark.long),
        pytest.param(False, False, marks=pytest.mark.long),
        (False, True),
    ],
)
def test_a_killed_command_that_moves_is_continued_or_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool, undone: bool
) -> None:
    for step in stopping.steps_of_a_command():
        with two_nodes(tmp_path / str(step)) as made:
            moving, take = made.move(), dying(step, is_before)
            remote, ended = cast(OtherNode, moving.destination)._remote, False
            with monkeypatch.context() as patched, suppress(Killed):
                for owner, name in (*calls_of(made.here), (remote, "ask"), (remote, "feed")):
                    patched.setattr(owner, name, step_of(take, getattr(owner, name)))
                moving.run()
                ended = True
            # If it held the volume, the hold has expired.
            made.here.service.context.holds._held.clear()
            assert usable(made.here) + usable(made.there) <= 1, step
            if undone:
                with suppress(errors.NotMoved):
                    undo_move(made)
                require_here(made)
            else:
                run_move(made)
                require_moved(made)
                finish_move(made)
                assert made.here.names() == set()
        if ended:
            assert step > 15
            return


def test_a_killed_command_that_receives_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in stopping.steps_of_a_command():
        with two_nodes(tmp_path / str(step)) as made:
            given, take = made.streams(), dying(step, is_before=True)
            kernel, ended = made.there.at.host.kernel, False
            opened = kernel.opened

            @contextmanager
            def dying_device(
                device: str, *, to_write: bool = False, take: Take = take, opened: Any = opened
            ) -> Iterator[Opened]:
                with opened(device, to_write=to_write) as found:
                    yield Dying(found, take)

            with monkeypatch.context() as patched, suppress(Killed):
                for owner, name in calls_of(made.there):
                    if owner is made.there.transfer:
                        patched.setattr(owner, name, step_of(take, getattr(owner, name)))
                patched.setattr(kernel, "opened", dying_device)
                receive_all(made.there, given)
                ended = True
            found = streams_command.status(made.there.at, "copy")
            first = next(reading.streams(io.BytesIO(given[0]))).header
            if found["into"] == first.chain:
                # From there on only.
                rest = nodes.stream(made.here, "1", offset_bytes=found["offset_bytes"])
                nodes.receive(made.there, "copy", rest)
            receive_all(made.there, given)
            assert made.there.content("vol-copy") == made.here.content("snap-2")
        if ended:
            assert step > 10
            return
