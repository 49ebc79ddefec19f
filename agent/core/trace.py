"""Traces of RPCs: the steps and waits of each call, with their durations.

A step is a program, an operation of the kernel (mount(2), ioctl(2), sysfs), or a wait:

| wait         | file: function                                                                |
| ------------ | ----------------------------------------------------------------------------- |
| start        | agent/work/locks.py: Admission.admit                                          |
| volume       | agent/work/locks.py: VolumeLocks.hold                                         |
| volume group | agent/work/locks.py: GroupLock.hold                                           |
| refresh      | agent/groups/volume_group.py: begin_states                                      |
| mkfs, fsck   | agent/work/background.py: DetachedTasks.wait_for, for agent/operations/stage.py |
| udev         | agent/volumes/users.py: require_unused                                           |
|              | agent/operations/node_volumes.py: NodeVolumes.detach_unused                   |

The waits of lvm2 and cryptsetup for udev, also while a volume is staged, are part of the step of
the program that waits. To add a wait, put `with trace.step(trace.WAIT, "udev"):` around the code
that waits, and add a row here. The debug log has the trace of each call, metrics sum the steps by
kind, and `carver trace` shows the slowest calls.
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

# Kinds of steps.
WAIT, PROGRAM, KERNEL = "wait", "program", "kernel"
KINDS = (WAIT, PROGRAM, KERNEL)
# Minimum duration of an operation or a wait that a trace lists, in seconds. Shorter ones, such as
# reading a file in sysfs, would make the list hard to read. A program is always listed.
_SHORTEST_SECONDS = 0.0005
# Maximum number of steps that a trace lists. For a call that retries for minutes only the first
# steps are listed; the sums by kind include all steps.
_MOST_STEPS = 64
# Maximum number of kept traces: those of the calls that ended last.
_MOST_CALLS = 256


@dataclass(frozen=True)
class Step:
    """One step of a call: a program, an operation of the kernel, or a wait.

    `kind` is one of KINDS, `what` the name of the program, of the operation or of the wait. The
    fields have the names of the fields of the message TracedStep (carver.proto). `after_seconds` is
    the time between the start of the call and the start of the step; `seconds` is the duration of
    the step.
    """

    kind: str
    what: str
    after_seconds: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} {self.what} {self.seconds * 1000:.1f} ms"


@dataclass
class Trace:
    """The steps of one call, which is in progress or has ended."""

    method: str
    volume: str
    time_seconds: float = field(default_factory=time.time)
    began_seconds: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    code: str = ""
    steps: list[Step] = field(default_factory=list)
    by_kind: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, name: str, seconds: float) -> None:
        """Add to the trace a step that ended just now, with its duration in seconds."""
        self.by_kind[kind] = self.by_kind.get(kind, 0.0) + seconds
        is_listed = kind == PROGRAM or seconds >= _SHORTEST_SECONDS
        if is_listed and len(self.steps) < _MOST_STEPS:
            after_seconds = time.monotonic() - self.began_seconds - seconds
            self.steps.append(Step(kind, name, after_seconds, seconds))


class Traces:
    """The traces of the calls that ended last; calls without a step are left out."""

    def __init__(self) -> None:
        self._ended: deque[Trace] = deque(maxlen=_MOST_CALLS)
        self._guard = threading.Lock()

    def end(self, trace: Trace, code: str) -> None:
        """Keep the trace of a call that ended with this gRPC code, if the trace has any steps."""
        trace.seconds, trace.code = time.monotonic() - trace.began_seconds, code
        if trace.steps:
            with self._guard:
                self._ended.append(trace)

    def slowest(self, maximum_traces: int) -> Sequence[Trace]:
        """Return the traces of the slowest calls, the slowest call first.

        The result has at most `maximum_traces` traces.
        """
        with self._guard:
            traces = list(self._ended)
        return sorted(traces, key=lambda trace: -trace.seconds)[:maximum_traces]


_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)


@contextmanager
def within(trace: Trace) -> Iterator[None]:
    """Within the `with`, add the steps of the current thread to a trace."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


class step:  # noqa: N801 - it is called like a function
    """Context manager that times its body, and adds the time to the current call's trace, if any.

    It is a class and not a generator for speed: a call has some thirty steps, and most are short.
    """

    __slots__ = ("_began_seconds", "_kind", "_made", "_name")

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name

    def __enter__(self) -> None:
        self._made, self._began_seconds = _current.get(), time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._made is not None:
            self._made.add(self._kind, self._name, time.monotonic() - self._began_seconds)


def traced_run(run: R) -> R:
    """Wrap `run`, which runs a program, so that each program is a step of the current call."""

    def tracing(*words: str, **options: Any) -> Result:
        with step(PROGRAM, _name(words)):
            return run(*words, **options)

    return cast(R, tracing)


def traced_observer(observe: Callable[[Finished], None]) -> Callable[[Finished], None]:
    """Wrap `observe` so that each command of lvm2's shell is a step of the current call."""

    def tracing(finished: Finished) -> None:
        if (trace := _current.get()) is not None:
            trace.add(PROGRAM, _name(finished.words), finished.seconds)
        observe(finished)

    return tracing


def traced(interface: T) -> T:
    """Wrap an object, so that each call of one of its methods is a kernel step of the current RPC.

    The object is an interface to the kernel, such as mount.kernel.Kernel.
    """
    return cast(T, _Traced(interface))


class _Traced:
    def __init__(self, interface: object) -> None:
        self._interface = interface

    def __getattr__(self, name: str) -> Any:
        interface = self._interface
        attribute = getattr(interface, name)
        if not callable(attribute):
            return attribute

        def tracing(*words: object, **named: object) -> object:
            # Look the method up at each call: tests replace methods of the object.
            with step(KERNEL, name):
                return getattr(interface, name)(*words, **named)

        # Keep the function as an attribute, so that it is made once for each method.
        vars(self)[name] = tracing
        return tracing


def program_of(words: Sequence[str]) -> tuple[str, str]:
    """Return the name of a program and its subcommand, but no arguments, from a command line.

    The subcommand is that of lvm2 or cryptsetup, and empty for other programs.
    """
    if words[0] == "env":
        words = words[2:]  # env(1) sets a variable for the program whose name follows
    return words[0], words[1] if words[0] in ("lvm", "cryptsetup") else ""


def _name(words: Sequence[str]) -> str:
    return " ".join(program_of(words)).rstrip()
