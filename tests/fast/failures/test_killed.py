"""Killed before and after every single step of every call: the next process makes it good."""

import itertools
import threading
import time
from pathlib import Path

import configured
import laying
import pytest
from fakes.host import FakeHost
from model import operations as do
from model.cases import CASES, EXTENTS, INLINE, Case, reboot
from model.expected import EXTENT_BYTES, Model
from model.machine import Machine, behind, try_soon
from model.operations import MIB
from model.stopping import CHANGING, Cut, Killed, Switch

from agent.core.classes import DeviceClass
from agent.core.group_definitions import GroupDefinitions
from agent.core.settings import BackingFile, Config, GroupDefinition
from mount.command import Result
from mount.kernel import Kernel

# Looking costs one command, and changes nothing that could be left half done.
UNSTOPPED = (do.Stats, do.Health)


class Trial:
    """A machine, its model, and a case's call that is about to be made on both."""

    def __init__(self, case: Case, directory: Path) -> None:
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
        # A call whose wipe died with the process waits this long for nothing.
        self.machine.grace_seconds = 2
        self.start(switch)
        told = self.machine.by_kubelet(self.case.call)
        assert switch.dead.wait(10), f"step {stop_at} was never taken: {switch.taken}"
        if not (self.case.long_wipe or (self.case.behind and told.code == "OK")):
            assert told.code in ("CANCELLED", "UNAVAILABLE"), told
        self.machine.revive()

    def settle(self) -> None:
        """Let copies and wipes that a new process took up come to their end."""
        deadline = time.monotonic() + 100
        every = behind(self.machine.service)
        while any(jobs._jobs for jobs in every) and time.monotonic() < deadline:
            time.sleep(0.005)
        self.machine.service.pool_remover.jobs.shutdown()

    def undo(self) -> None:
        """What a CO does that gives up; then nothing may be left."""
        self.machine.give_up(self.case.call)
        self.settle()
        assert self.machine.state() == Model(self.model.total_bytes).state()


def steps(case: Case, directory: Path) -> int:
    """How many steps the call takes when nothing ends it."""
    trial = Trial(case, directory)
    trial.machine.stop()
    switch = Switch()
    trial.start(switch)
    trial.machine.call(case.call)
    trial.settle()
    trial.machine.stop()
    return len(switch.taken)


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_was_killed_at_any_step_succeeds_when_it_is_made_again(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    count = steps(case, tmp_path / "count")
    assert count
    for stop_at in range(count):
        for before in (True, False):
            trial = Trial(case, tmp_path / f"{stop_at}{before}")
            trial.kill(stop_at, before)
            expected = trial.model.apply(case.call)
            assert trial.machine.by_kubelet(case.call) == expected, (stop_at, before)
            assert expected.code == case.code
            if isinstance(case.call, do.Stage) and not case.call.use.is_block:
                # Its file system is as large as it should be.
                trial.do(do.Stats(case.call.volume, case.call.path))
            # A copy's bridge is wiped behind the answer, and so is what a killed delete had begun.
            trial.settle()
            assert trial.machine.state() == trial.model.state(), (stop_at, before)
            trial.undo()
            trial.machine.stop()


REBOOTED = [name for name in CASES if name.startswith("stage") and "encrypted" in name]


@pytest.mark.parametrize("name", REBOOTED)
def test_an_encrypted_volume_whose_stage_was_killed_is_staged_after_a_reboot(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    for stop_at in range(steps(case, tmp_path / "count")):
        for before in (True, False):
            trial = Trial(case, tmp_path / f"{stop_at}{before}")
            trial.kill(stop_at, before)
            reboot(trial.machine, trial.model)
            expected = trial.model.apply(case.call)
            assert trial.machine.by_kubelet(case.call) == expected, (stop_at, before)
            trial.settle()
            assert trial.machine.state() == trial.model.state(), (stop_at, before)
            trial.undo()
            trial.machine.stop()


@pytest.mark.parametrize("name", CASES)
def test_what_a_killed_call_left_can_be_undone_without_a_trace(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for stop_at in range(steps(case, tmp_path / "count")):
        for before in (True, False):
            trial = Trial(case, tmp_path / f"{stop_at}{before}")
            trial.kill(stop_at, before)
            trial.undo()
            trial.machine.stop()


def test_an_inline_volume_whose_publish_fails_for_good_is_gone_wherever_it_was_killed(
    tmp_path: Path,
) -> None:
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
    for stop_at in range(len(switch.taken)):
        for before in (True, False):
            one = trial(f"{stop_at}{before}")
            one.kill(stop_at, before)
            assert one.machine.call(INLINE).code == "INTERNAL", (stop_at, before)
            one.settle()
            assert one.machine.state() == one.model.state(), (stop_at, before)
            one.machine.stop()


LISTS = ("list", "list snapshots")
CUT = [name for name, case in CASES.items() if not case.long_wipe]


@pytest.mark.parametrize("name", CUT)
def test_a_call_whose_time_was_over_at_any_command_succeeds_when_it_is_made_again(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    for before in (True, False):
        for stop_at in itertools.count():
            trial = Trial(case, tmp_path / f"{stop_at}{before}")
            trial.machine.stop()
            cut = Cut(stop_at, before=before)
            trial.start(cut)
            told = trial.machine.by_kubelet(case.call)
            if not cut.is_over:
                trial.machine.stop()
                break
            # A list tells what was seen last.
            assert told.code == ("OK" if name in LISTS else "DEADLINE_EXCEEDED"), (stop_at, before)
            cut.is_over = False
            expected = trial.model.apply(case.call)
            again = trial.machine.by_kubelet(case.call)
            if again.code == "ABORTED":
                # It met what is taken away behind the first one's answer, and is put off for that.
                trial.settle()
                again = trial.machine.by_kubelet(case.call)
            assert again == expected, (stop_at, before)
            assert expected.code == case.code
            trial.settle()
            assert trial.machine.state() == trial.model.state(), (stop_at, before)
            trial.undo()
            trial.machine.stop()


def test_a_start_that_was_killed_while_it_made_groups_is_made_good_by_the_next(
    tmp_path: Path,
) -> None:
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
    for stop_at in range(len(whole.taken)):
        for before in (True, False):
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


def test_every_operation_that_changes_something_is_a_step() -> None:
    public = {name for name in dir(Kernel) if not name.startswith("_")}
    looking = {
        *("mountinfo", "lstat", "real_path", "statvfs", "xfs_geometry", "device_number"),
        *("device_size_bytes", "device_is_read_only", "device_is_held", "device_is_swap", "read"),
        *("device_partitions", "device_holders", "signatures", "physical_block_bytes"),
        *("logical_block_bytes", "reader"),
        # Opened by a command, whose steps test_killed_streams.py has.
        "opened",
        *(
            "has_new_mount_calls",
            "has_selinux",
            "loop_devices",
            "loop_free",
            "loop_status",
            "error_counters",
        ),
    }
    assert public == CHANGING | looking


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
