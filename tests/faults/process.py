"""A machine of the model's that a process of its own serves, and that may be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from csi_client import Client, wait_until_served
from model import operations as do
from model.expected import Model
from model.machine import Machine
from model.operations import Outcome, State
from model.stopping import Switch

from agent.csi.client import Client as Caller

_KILLABLE = Path(__file__).with_name("killable.py")
_START_SECONDS = 120
_LOG_CHARACTERS = 4000
# The codes where the service has died, or does not answer in time.
GONE = frozenset({"UNAVAILABLE", "CANCELLED", "UNKNOWN"})


class Fault(AssertionError):
    """Something was other than the model says."""


def until(is_so: Callable[[], object], problem: str, seconds: float = 60) -> None:
    """Wait until it is so; raises Fault with the problem."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise Fault(problem)
        time.sleep(0.2)


def await_begun(client: Caller) -> None:
    """Wait until a service that was just started admits calls that need lvm2."""

    def is_admitted() -> bool:
        try:
            client.capacity()
        except grpc.RpcError as error:
            return error.code().name not in GONE
        return True

    until(is_admitted, "no call is admitted", _START_SECONDS)


def class_of(group: str, layout: str = "linear") -> str:
    """The configuration of the one class, `plain`."""
    settings = f'group = "{group}"\nlayout = "{layout}"\ndefault = true\n'
    return f'[[classes]]\nname = "plain"\n{settings}'


@dataclass
class Process(Machine):
    """Carver as a process on a group of its own; `devices` are the disks that lvm2 may see."""

    classes: str = ""
    # Whether lvm2's commands are said to a shell that is kept open, as by default.
    sessions: bool = True
    log: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> Path:
        return self.sockets / "csi.sock"

    @property
    def configuration(self) -> Path:
        return self.sockets / "config.toml"

    def words(self) -> list[str]:
        return [
            *("--config", str(self.configuration)),
            *("--endpoint", str(self.endpoint)),
            *("--kubelet-dir", str(self.host.directory)),
            *("--devices", ",".join(self.host.lvm.devices)),
            *("--node-id", "here", "--registration", "none"),
            *("--lvm-session", str(self.sessions).lower()),
        ]

    def start(self, switch: Switch) -> None:
        text = self.classes or class_of(self.group)
        # A disk that is full has room for what is there already only.
        if not self.configuration.exists() or self.configuration.read_text() != text:
            self.configuration.write_text(text)
        self.process = self.launch()
        wait_until_served(self.endpoint, _START_SECONDS)
        self.client = Client(self.endpoint)
        # What it does at its start are no steps of the call that comes next.
        await_begun(self.client)

    def launch(self) -> subprocess.Popen[bytes]:
        """A process, whether or not it comes to serve."""
        words = [sys.executable, str(_KILLABLE), str(self.sockets / "plan"), *self.words()]
        environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
        with (self.sockets / "log").open("ab") as log:
            return subprocess.Popen(words, stderr=log, env=environment)

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def said(self) -> str:
        return (self.sockets / "log").read_text(errors="replace")[-_LOG_CHARACTERS:]

    def stop(self) -> None:
        self.client.__exit__(None, None, None)
        if code := self.end():
            raise Fault(f"the process ended with {code} at SIGTERM")

    def restart(self, switch: Switch | None = None) -> None:
        self.stop()
        self.start(switch or self.switch)

    def kill(self) -> None:
        """End the process as kill -9 does, and start another."""
        self.process.kill()
        self.died()

    def died(self) -> None:
        """Start another process in place of one that is dead."""
        self.process.wait(60)
        self.client.__exit__(None, None, None)
        self.start(self.switch)

    def arm(self, step: int, before: bool) -> None:
        """Have the process killed at a step, counted from now on."""
        plan = self.sockets / "plan"
        plan.write_text(json.dumps([step, before]))
        self.process.send_signal(signal.SIGUSR1)
        while plan.exists():
            time.sleep(0.01)


@dataclass
class Trial:
    """A process, what the model expects of its machine, and what was found other than that."""

    machine: Process
    model: Model
    lost: int = 0
    leaked: int = 0

    def make(self, call: do.Call) -> Outcome:
        """Make a call, whose answer and effect are as the model says."""
        answer, expected = self.machine.call(call), self.model.apply(call)
        if not self.machine.same(call, answer, expected):
            raise Fault(f"{call}: {answer}, {expected} was expected")
        return answer

    def refused(self, call: do.Call, *codes: str) -> None:
        """Make a call that fails with one of these codes, and changes nothing."""
        answer = self.machine.call(call)
        if answer.code not in codes:
            raise Fault(f"{call}: {answer}, one of {', '.join(codes)} was expected")

    def patiently(self, call: do.Call) -> None:
        """Repeat a call, as a CO does, until it is as the model says."""
        deadline = time.monotonic() + 300
        expected = self.model.apply(call)
        while not self.machine.same(call, answer := self.machine.call(call), expected):
            if time.monotonic() > deadline:
                raise Fault(f"{call}: {answer}, {expected} was expected")
            time.sleep(0.5)

    def compare(self, *, resting: bool = False) -> None:
        """Count what is not there though it should be, and what is there though it should not.

        With `resting` a volume may be inactive where the model has it active: lvm2 died between its
        metadata and the device, and staging makes that good.
        """
        as_compared = _awake if resting else _as_it_is
        expected, deadline = as_compared(self.model.state()), time.monotonic() + 120
        while True:
            seen = as_compared(self.machine.state())
            lost, leaked = list(_less(expected, seen)), list(_less(seen, expected))
            if not (lost or leaked) or time.monotonic() > deadline:
                break
            # What goes on behind an answer: the rest of a deletion, the tag of a new file system.
            time.sleep(0.5)
        self.lost += len(lost)
        self.leaked += len(leaked)
        if lost or leaked:
            raise Fault(f"lost {lost}, leaked {leaked}")

    def undo(self) -> None:
        """What a CO does that gives up; then nothing may be left."""
        places = {path: one.volume for path, one in self.model.places.items()}
        # Where a volume is staged goes last.
        for path in sorted({**places, **self.model.entries}, key=lambda path: path == "staging"):
            call = do.Unpublish(places.get(path, "a"), path)
            self.machine.let_go(call)
            self.patiently(call)
        for snapshot in list(self.model.snapshots):
            self.patiently(do.DeleteSnapshot(snapshot))
        for volume in list(self.model.volumes):
            self.patiently(do.Delete(volume))
        self.compare()


def _as_it_is(state: State) -> State:
    return state


def _awake(state: State) -> State:
    """The same, were all volumes active."""
    volumes = tuple((*one[:4], True, *one[5:]) for one in state.volumes)
    return replace(state, volumes=volumes)


def _less(state: State, other: State) -> Iterable[object]:
    for name in ("volumes", "places", "loops", "entries"):
        yield from (one for one in getattr(state, name) if one not in getattr(other, name))
    if state.free_bytes < other.free_bytes:
        yield f"{other.free_bytes - state.free_bytes} bytes"
