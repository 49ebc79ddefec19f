"""A process's way to the machine, which can end at any step, as a kill ends it.

The two seams, programs and the kernel, are wrapped from outside: nothing in Carver knows of this.
A process that was killed does nothing more, whichever of its threads asks.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, TypeVar, cast

from fakes.kernel import CHANGING

from lvm.active_devices import Devices
from mount.cgroups import Cgroups
from mount.command import Conversation, Converse, Result, Runner, Stream
from mount.kernel import Kernel
from mount.mount_errors import CommandTimedOut

T = TypeVar("T")

# Those of the devices of volumes.
CHANGING_DEVICES = frozenset(
    {"suspend", "resume", "reserve_metadata", "release_metadata", "close_leftovers"}
)
# Of cgroups.
CHANGING_CGROUPS = frozenset({"limit"})


# Whether a process is also killed after a step that another follows: see `--every`.
kills_after_each = False


def stops(taken: Sequence[str]) -> Iterator[tuple[int, bool]]:
    """A call's steps, and whether the kill comes before it or after it.

    Killed after a step, a process leaves the machine as it does when killed before the next one.
    """
    assert taken, "the call takes no step"
    for number in range(len(taken)):
        yield number, True
        if kills_after_each or number == len(taken) - 1:
            yield number, False


def steps_of_a_command() -> Iterator[int]:
    """The steps at which a long command is ended, without end: every other one, see `--every`."""
    return itertools.count(0, 1 if kills_after_each else 2)


def _named(words: Sequence[str]) -> str:
    """What a step is called, by its program."""
    said = words[2:] if words[0] == "env" else words
    return " ".join(said[:2]) if said[0] in ("lvm", "cryptsetup") else said[0]


class Spoken:
    """The seam `mount.command.Conversation`; `say` sends each line and returns the answer."""

    def __init__(self, one: Conversation, say: Callable[[str, float | None], str]) -> None:
        self._one, self._say = one, say
        self.is_waiting, self.end = one.is_waiting, one.end
        self.resident_bytes = one.resident_bytes

    def exchange(self, line: str | None, seconds: float | None) -> str:
        if line is None:
            return self._one.exchange(None, seconds)
        return self._say(line, seconds)


class Killed(BaseException):
    """The process is dead. No Exception, so that no handler takes it for an error."""


class Switch:
    """Counts one process's steps, and ends it before or after one of them.

    A step is a program that is run, or a call of the kernel's that changes something. One step is
    taken at a time, so the machine behind needs no locks of its own. `waits` makes threads meet in
    other orders.
    """

    def __init__(
        self, stop_at: int = -1, *, before: bool = True, waits: random.Random | None = None
    ) -> None:
        self.taken: list[str] = []
        self.dead = threading.Event()
        # Called at the step itself, by any thread: may wait for nothing.
        self.on_death: Callable[[], object] = lambda: None
        # Asked before a step is taken, outside the lock: may wait for something.
        self.gate: Callable[[str], None] = lambda _name: None
        self.waits = waits
        # What a process does before it serves is not counted.
        self.counting = False
        self.stop_at = stop_at
        self._before = before
        self._lock = threading.RLock()

    def run(self, run: Runner) -> Runner:
        """The seam `mount.command.Runner`, through the switch."""

        def through(*words: str, stdin: bytearray | None = None) -> Result:
            return self._step(_named(words), lambda: run(*words, stdin=stdin))

        return through

    def stream(self, stream: Stream) -> Stream:
        """The seam `mount.command.Stream`, through the switch: what is read of it is no step."""

        @contextmanager
        def through(*words: str) -> Iterator[BinaryIO]:
            with ExitStack() as ending:
                begin = stream(*words)
                yield self._step(_named(words), lambda: ending.enter_context(begin))

        return through

    def converse(self, converse: Converse) -> Converse:
        """The seam `mount.command.Converse`, through the switch: each line is a step."""

        def start(
            *words: str, prompt: str, environment: Mapping[str, str], report: str
        ) -> Conversation:
            begun = converse(*words, prompt=prompt, environment=environment, report=report)

            def say(line: str, seconds: float | None) -> str:
                name = f"lvm {line.partition(' ')[0]}"
                return self._step(name, lambda: begun.exchange(line, seconds))

            return Spoken(begun, say)

        return start

    def kernel(self, kernel: Kernel) -> Kernel:
        """The seam `Kernel`, through the switch."""
        return cast(Kernel, _Through(kernel, self))

    def devices(self, devices: Devices) -> Devices:
        """The seam `lvm.active_devices.Devices`, through the switch."""
        return cast(Devices, _Through(devices, self))

    def cgroups(self, cgroups: Cgroups) -> Cgroups:
        """The seam `mount.cgroups.Cgroups`, through the switch."""
        return cast(Cgroups, _Through(cgroups, self))

    def _step(self, name: str, take: Callable[[], T], *, changes: bool = True) -> T:
        if not changes:
            # It may hang, on a disk that is dead: the others go on.
            if self.dead.is_set():
                raise Killed
            return take()
        self.gate(name)
        if self.waits is not None:
            time.sleep(self.waits.choice((0, 0, 0.0005, 0.002)))
        with self._lock:
            if self.dead.is_set():
                raise Killed
            if not self.counting:
                return take()
            is_last = len(self.taken) == self.stop_at
            self.taken.append(name)
            if is_last and self._before:
                self._die()
            try:
                return take()
            finally:
                # Also where it failed.
                if is_last:
                    self._die()

    def _die(self) -> None:
        self.dead.set()
        self.on_death()
        raise Killed


class Cut(Switch):
    """A process in which the caller's deadline ends at one of a call's programs.

    The program has done nothing, or all. What the call runs after it is cut off as well.
    """

    def __init__(self, stop_at: int = -1, *, before: bool = True) -> None:
        super().__init__()
        self.programs = 0
        self.is_over = False
        self._cut_at, self._cut_before = stop_at, before

    def run(self, run: Runner) -> Runner:
        """The seam `mount.command.Runner`: work behind the answers has no deadline."""
        whole = super().run(run)

        def through(*words: str, stdin: bytearray | None = None) -> Result:
            if not threading.current_thread().name.startswith("rpc"):
                return whole(*words, stdin=stdin)
            is_last = self.programs == self._cut_at
            self.programs += 1
            if (is_last and not self._cut_before) or not (is_last or self.is_over):
                result = whole(*words, stdin=stdin)
                if not is_last:
                    return result
            self.is_over = True
            raise CommandTimedOut(words, 0.0)

        return through


class _Through:
    """Every operation of a seam, through a switch."""

    def __init__(self, seam: object, switch: Switch) -> None:
        self._seam = seam
        self._switch = switch

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._seam, name)

        def through(*words: object, **named: object) -> object:
            return self._switch._step(
                name,
                lambda: operation(*words, **named),
                changes=name in CHANGING | CHANGING_DEVICES | CHANGING_CGROUPS,
            )

        return through
