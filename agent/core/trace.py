"""The trace of a call: what it waited for, and each step that it took, with their times.

A step is a program, an operation of the kernel (mount(2), ioctl(2), sysfs), or a wait:

| wait         | file: function                                                                |
| ------------ | ----------------------------------------------------------------------------- |
| start        | agent/work/locks.py: Admission.admit                                          |
| volume       | agent/work/locks.py: VolumeLocks.hold                                         |
| volume group | agent/work/locks.py: GroupLock.hold                                           |
| refresh      | agent/groups/volume_group.py: begin_states                                      |
| mkfs, fsck   | agent/work/background.py: DetachedTasks.finish, for agent/operations/stage.py |
| udev         | agent/volumes/users.py: require_unused                                           |
|              | agent/operations/node_volumes.py: NodeVolumes.detach_unused                   |

lvm2 and cryptsetup wait for udev inside their own step, also while a volume is staged. One more
step is `with trace.step(trace.WAIT, "udev"):` around what waits, and a row here. The debug log has
each call's trace, metrics sum the steps by kind, `carver trace` shows the slowest.
"""

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from mount.command import Finished, Result, Run

T = TypeVar("T")
R = TypeVar("R", bound=Run)

WAIT, PROGRAM, KERNEL = "wait", "program", "kernel"
KINDS = (WAIT, PROGRAM, KERNEL)
# Shorter steps, such as reading a file in sysfs, would only hide the others.
_SHORTEST_SECONDS = 0.0005
# A call that retries for minutes keeps its first steps; the sums by kind include all.
_MOST_STEPS = 64
# How many of the last calls are kept.
_MOST_CALLS = 256


@dataclass(frozen=True)
class Step:
    """One step of a call: its kind, its name, when it began after the call, and its duration."""

    kind: str
    what: str
    after_seconds: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} {self.what} {self.seconds * 1000:.1f} ms"


@dataclass
class Trace:
    """A call in progress or ended, and its steps."""

    method: str
    volume: str
    time_seconds: float = field(default_factory=time.time)
    began_seconds: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    code: str = ""
    steps: list[Step] = field(default_factory=list)
    by_kind: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, what: str, seconds: float) -> None:
        """Add a step that ended just now."""
        self.by_kind[kind] = self.by_kind.get(kind, 0.0) + seconds
        if seconds >= _SHORTEST_SECONDS and len(self.steps) < _MOST_STEPS:
            after_seconds = time.monotonic() - self.began_seconds - seconds
            self.steps.append(Step(kind, what, after_seconds, seconds))


class Traces:
    """The last calls that ended."""

    def __init__(self) -> None:
        self._ended: deque[Trace] = deque(maxlen=_MOST_CALLS)
        self._guard = threading.Lock()

    def end(self, ended: Trace, code: str) -> None:
        """Keep a call that ended, if it has any steps."""
        ended.seconds, ended.code = time.monotonic() - ended.began_seconds, code
        if ended.steps:
            with self._guard:
                self._ended.append(ended)

    def slowest(self, most: int) -> Sequence[Trace]:
        """Return the slowest calls that are kept, the slowest first."""
        with self._guard:
            kept = list(self._ended)
        return sorted(kept, key=lambda one: -one.seconds)[:most]


_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)


@contextmanager
def within(made: Trace) -> Iterator[None]:
    """Add the steps of this thread to a call's trace."""
    token = _current.set(made)
    try:
        yield
    finally:
        _current.reset(token)


class step:  # noqa: N801 - it is called like a function
    """Time the body as a step of this thread's call, if there is one.

    Not by a generator: a call has some thirty steps, and most are short.
    """

    __slots__ = ("_began_seconds", "_kind", "_made", "_what")

    def __init__(self, kind: str, what: str) -> None:
        self._kind, self._what = kind, what

    def __enter__(self) -> None:
        self._made, self._began_seconds = _current.get(), time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._made is not None:
            self._made.add(self._kind, self._what, time.monotonic() - self._began_seconds)


def traced_run(run: R) -> R:
    """Wrap `run`: each program is a step."""

    def tracing(*words: str, **more: Any) -> Result:
        with step(PROGRAM, _name(words)):
            return run(*words, **more)

    return cast(R, tracing)


def traced_observer(observe: Callable[[Finished], None]) -> Callable[[Finished], None]:
    """Wrap `observe`: each command that a shell of lvm2's carried out is a step."""

    def tracing(finished: Finished) -> None:
        if (trace := _current.get()) is not None:
            trace.add(PROGRAM, _name(finished.words), finished.seconds)
        observe(finished)

    return tracing


def traced(interface: T) -> T:
    """Wrap an interface to the kernel: each call of a method is a step."""
    return cast(T, _Traced(interface))


class _Traced:
    def __init__(self, interface: object) -> None:
        self._interface = interface

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._interface, name)
        if _current.get() is None or not callable(found):
            return found

        def tracing(*words: object, **named: object) -> object:
            with step(KERNEL, name):
                return found(*words, **named)

        return tracing


def program_of(words: Sequence[str]) -> tuple[str, str]:
    """A program, and the subcommand of lvm2 or cryptsetup, else empty; never an argument."""
    if words[0] == "env":
        words = words[2:]  # it only sets a variable for the program behind it
    return words[0], words[1] if words[0] in ("lvm", "cryptsetup") else ""


def _name(words: Sequence[str]) -> str:
    return " ".join(program_of(words)).rstrip()
