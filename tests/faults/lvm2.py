"""lvm2 is killed, stopped, or waits for ever: as processes, and as a shell that is kept open."""

import contextlib
import fcntl
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
from csi_client import Client
from faults import load
from faults.bench import Bench
from faults.process import Fault, Process, Trial, class_of, until
from model import operations as do
from model.expected import Model
from model.operations import MIB, Use

from agent.core.ids import VolumeId
from agent.csi.client import block
from lvm import report
from lvm.active_devices import Device
from lvm.lvm_errors import InUse
from proto import csi_pb2 as csi

BLOCK = Use("block", do.MULTI_WRITER)
# A shell that was given up is followed by another a minute later, under load at the next call.
_SHELL_SECONDS = 120


def lvm2_killed(bench: Bench) -> tuple[int, str]:
    """lvm2 is killed in its work."""
    times, hits = bench.times(12, 3), 0
    calls: tuple[do.Call, ...] = (
        do.Create("a", 16 * MIB, 0, BLOCK),
        do.Expand("a", 32 * MIB),
        do.Delete("a"),
    )
    for sessions in (False, True):
        with bench.trial(40, sessions=sessions) as trial:
            # Each of them starts two commands, or has a shell do them.
            each = 1 if sessions else 2
            commands = [seconds_of(trial, call) / each for call in calls]
            for _ in range(times):
                for call, seconds in zip(calls, commands, strict=True):
                    with killing_lvm2(trial, bench.random.uniform(0, seconds)) as killed:
                        answer = trial.machine.call(call)
                    hits += bool(killed)
                    if answer.code not in ("OK", "INTERNAL", "ABORTED", "UNAVAILABLE"):
                        raise Fault(f"{call}: {answer}")
                    trial.patiently(call)
                    trial.compare(resting=True)
    return times * 6, f"{hits} lvm2 died; each call succeeded when repeated"


def lvm2_killed_in_layouts(bench: Bench) -> tuple[int, str]:
    """lvm2 is killed while it makes, activates or removes a RAID, a thin pool, a thin volume."""
    times, hits = bench.times(10, 2), 0
    for layout in ("raid1", "thin"):
        with bench.host() as host:
            group = host.new_group(30, 30)
            machine = Process(
                host,
                group,
                host.directory.parent,
                classes=class_of(group, layout),
                sessions=False,
            )
            trial = Trial(machine, Model(0))
            try:
                usual = [_seconds(call) for call in _life(trial)]
                _await_empty(trial)
                for _ in range(times):
                    for call, seconds in zip(_life(trial), usual, strict=True):
                        # Each starts two or three commands.
                        delay = bench.random.uniform(0, seconds / 2)
                        with (
                            killing_lvm2(trial, delay) as killed,
                            contextlib.suppress(grpc.RpcError),
                        ):
                            call()
                        hits += bool(killed)
                        _patiently(call)
                    _await_empty(trial)
            except Exception:
                print(machine.said(), file=sys.stderr)
                raise
            finally:
                machine.stop()
    return 2 * 3 * times, f"{hits} lvm2 died; each call succeeded when repeated, nothing was left"


def _life(trial: Trial) -> Iterator[Callable[[], object]]:
    """A volume is made, staged after its device was taken away, and deleted."""
    client, machine = trial.machine.client, trial.machine
    identity = str(VolumeId.of(report.read(machine.host.lvm).group(machine.group), "vol-a"))
    volume = csi.Volume(volume_id=identity)
    yield lambda: client.create("a", 16 * MIB, block())
    try:
        machine.host.deactivate(machine.group, "vol-a")
    except InUse:
        # A thin volume's device that a killed lvm2 left without a table is gone by now: lvm2
        # removed it, and then took its pool's device for one to be removed, too.
        machine.host.deactivate(machine.group, "vol-a")
    yield lambda: client.stage(volume, machine.host.directory / "staging", block())
    yield lambda: client.delete(identity)


def _seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def _patiently(call: Callable[[], object]) -> None:
    """Make a call until it succeeds, as a CO does."""
    deadline = time.monotonic() + 90
    while True:
        try:
            call()
        except grpc.RpcError as error:
            if time.monotonic() > deadline:
                raise Fault(f"{error.code().name}: {error.details()}") from error
            time.sleep(0.5)
        else:
            return


def _await_empty(trial: Trial) -> None:
    """Until all is free again; of a pool's spare lvm2 may leave a volume without any tag."""
    machine = trial.machine

    def is_empty() -> bool:
        left = set(report.read(machine.host.lvm).group(machine.group).volumes)
        if left == {"lvol0"}:
            machine.host.lvm("lvremove", "--yes", "--", f"{machine.group}/lvol0")
        return not left

    until(is_empty, "volumes are left", 150)


def lvm2_killed_while_suspended(bench: Bench) -> tuple[int, str]:
    """lvm2 is killed while a device is suspended."""
    times, hits = bench.times(8, 2), 0
    for sessions in (False, True):
        with bench.trial(40, sessions=sessions) as trial:
            for _ in range(times):
                trial.make(do.Create("a", 16 * MIB, 0, BLOCK))
                device = trial.machine.host.devices.find(trial.machine.group, "vol-a")
                assert device is not None
                with killing_suspended_lvm2(trial, device) as killed:
                    answer = trial.machine.call(do.Expand("a", 32 * MIB))
                if answer.code not in ("OK", "INTERNAL", "UNAVAILABLE"):
                    raise Fault(f"expand: {answer}")
                hits += bool(killed)
                trial.patiently(do.Expand("a", 32 * MIB))
                if is_suspended(device):
                    raise Fault("the device is still suspended")
                trial.compare()
                trial.make(do.Delete("a"))
    return 2 * times, f"the repeated call resumed the device, {hits} times"


def lvm2_hangs(bench: Bench) -> tuple[int, str]:
    """lvm2 waits for a lock, or stops."""
    late = [_hung(bench, sessions=sessions) for sessions in (False, True)]
    outcome = f"DEADLINE_EXCEEDED or UNAVAILABLE, {max(late):.1f} s late"
    return 2 * len(late), f"{outcome}; no lock and no lvm2 left"


def _hung(bench: Bench, *, sessions: bool) -> float:
    """How long after its deadline a call ended, in seconds."""
    # What a terminated command did is unknown; a caller tries again after either.
    codes = ("DEADLINE_EXCEEDED", "UNAVAILABLE")
    with bench.trial(40, sessions=sessions) as trial:
        trial.make(do.Create("a", 16 * MIB, 0, BLOCK))
        # Looked at since: nothing goes on behind the answer, with more time than a call has.
        trial.make(do.Get("a"))
        machine = trial.machine
        usual = machine.client
        with Client(machine.endpoint, timeout_seconds=6) as machine.client:
            lock = Path("/run/lock/lvm", f"V_{machine.group}")
            with lock.open("a") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                before = lvm2_of(trial)
                started = time.monotonic()
                trial.refused(do.Create("b", 16 * MIB, 0, BLOCK), *codes)
                late_seconds = time.monotonic() - started - 6
                # lvm2 went by itself, before the lock was free.
                until(lambda: not at_work(trial, before), "lvm2 still runs", 30)
            trial.make(do.Get("a"))
            before = lvm2_of(trial)
            with stopping_lvm2(trial):
                trial.refused(do.Create("c", 16 * MIB, 0, BLOCK), *codes)
            until(lambda: not at_work(trial, before), "lvm2 still runs", 30)
        machine.client = usual
        for name in ("b", "c"):
            trial.patiently(do.Create(name, 16 * MIB, 0, BLOCK))
        trial.compare()
    return max(0.0, late_seconds)


def session_killed(bench: Bench) -> tuple[int, str]:
    """The session with lvm2 is killed, or stopped for a while, under load."""
    times, seed, stops = bench.times(6, 2), bench.random.randrange(1 << 30), 0
    load.start(seed)
    with load.clients(4, seed) as workers:
        for number in range(times):
            shell = _shell_of(load.main_pid())
            # Not at its prompt only: a client waits for it most of the time.
            time.sleep(bench.random.uniform(0, 2))
            with contextlib.suppress(psutil.NoSuchProcess):
                if number % 2:
                    stops += 1
                    shell.suspend()
                    time.sleep(bench.random.uniform(1, 15))
                    if bench.random.random() < 0.5:
                        shell.resume()
                        continue
                shell.kill()
    load.judged(bench)
    calls = sum(one.calls for one in workers)
    return times, f"4 clients, {calls} calls: each succeeded at last, data as written"


def _shell_of(pid: int) -> psutil.Process:
    """The shell that the service has open, once it has one."""
    found: list[psutil.Process] = []

    def is_open() -> bool:
        found[:] = filter(is_shell, psutil.Process(pid).children(recursive=True))
        return bool(found)

    until(is_open, "the service has no shell of lvm2's open", _SHELL_SECONDS)
    return found[0]


def is_shell(process: psutil.Process) -> bool:
    """Whether it is lvm2 as a shell: a command of its own has more words."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == "lvm" and len(process.cmdline()) == 1
    return False


def at_work(trial: Trial, before: list[psutil.Process]) -> list[psutil.Process]:
    """The lvm2 that runs, but for a shell that was opened since: that is at its prompt."""
    return [one for one in lvm2_of(trial) if one in before or not is_shell(one)]


def lvm2_of(trial: Trial) -> list[psutil.Process]:
    """The lvm2 commands that the process has running."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(trial.machine.process.pid).children(recursive=True)
        return [one for one in children if one.is_running() and one.name().startswith("lvm")]
    return []


@contextmanager
def at_lvm2(trial: Trial, act: Callable[[psutil.Process], None]) -> Iterator[list[psutil.Process]]:
    """Do something to each lvm2 command that is started meanwhile; yields those it was done to."""
    done: list[psutil.Process] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            for one in lvm2_of(trial):
                if one not in done:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        act(one)
                        done.append(one)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield done
    finally:
        over.set()
        watcher.join()


def seconds_of(trial: Trial, call: do.Call) -> float:
    """How long an undisturbed call takes."""
    started = time.monotonic()
    trial.make(call)
    return time.monotonic() - started


@contextmanager
def killing_lvm2(trial: Trial, delay_seconds: float) -> Iterator[list[psutil.Process]]:
    def kill(process: psutil.Process) -> None:
        time.sleep(delay_seconds)
        process.kill()

    with at_lvm2(trial, kill) as killed:
        yield killed


def is_suspended(device: Device) -> bool:
    major, minor = device.number
    return Path(f"/sys/dev/block/{major}:{minor}/dm/suspended").read_text().strip() == "1"


@contextmanager
def killing_suspended_lvm2(trial: Trial, device: Device) -> Iterator[list[psutil.Process]]:
    """Kill the lvm2 that suspends a device, in that moment."""
    over = threading.Event()

    def kill(process: psutil.Process) -> None:
        while process.is_running() and not is_suspended(device):
            if over.is_set():
                # A shell, that has no more to do.
                raise psutil.NoSuchProcess(process.pid)
        process.kill()

    with at_lvm2(trial, kill) as killed:
        try:
            yield killed
        finally:
            over.set()


@contextmanager
def stopping_lvm2(trial: Trial) -> Iterator[None]:
    with at_lvm2(trial, lambda process: process.send_signal(signal.SIGSTOP)) as stopped:
        yield
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
