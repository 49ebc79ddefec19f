"""Work beside the loops of groups: tasks of the process, mkfs and fsck, probes of what may hang.

Nothing that work raises ends a thread: it is logged once, counted and retried.
"""

import contextvars
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Generic, Self, TypeVar

from agent.core import errors, trace
from agent.work.locks import GroupLock
from mount import command
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)


def run_all(works: Mapping[str, Callable[[], object]], seconds: float) -> None:
    """Run all at once, each under its name; wait for them at most so long.

    An error of one is logged, and so is one that has not ended by then; neither delays the others.
    """
    begun = {name: _begun(name, work) for name, work in works.items()}
    wait(begun.values(), seconds)
    for name, ended in begun.items():
        if not ended.done():
            _log.warning("%s has not ended after %g s, and is left to itself", name, seconds)
        elif (error := ended.exception()) is not None:
            _log.error("%s has not ended well: %s", name, error)


class Attempts:
    """Several attempts, of which none that fails keeps the next from being made.

    Leaving the `with` raises an ExceptionGroup of what failed.
    """

    def __init__(self) -> None:
        self._failed: list[Exception] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None and self._failed:
            raise ExceptionGroup("not all attempts succeeded", self._failed)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Keep the error of one attempt."""
        try:
            yield
        except Exception as error:
            self._failed.append(error)


def reasons(error: BaseException) -> str:
    """What an error says; of an ExceptionGroup, which says none of it, what each in it says."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(map(reasons, error.exceptions)))
    return str(error) or repr(error)


def _begun(name: str, work: Callable[[], object]) -> Future[object]:
    try:
        return command.begin(f"end {name}", work)
    except RuntimeError as error:
        # No thread can be had. In this one it could hang, and the rest would wait for it.
        ended = Future[object]()
        ended.set_exception(error)
        return ended


# Errors with a sentence of their own: their trace adds nothing.
_EXPECTED = (errors.AgentError, mount_errors.CommandError, OSError)


class PeriodicTask:
    """Work repeated in a background thread until `stop`.

    `work` runs `first_seconds` after `start`, then `interval_seconds` after each run, or at once
    where it returns True. Whatever it raises is counted in `failures`, logged once as `failure`
    (with %s for the error) for as long as it stays the same, and retried after `retry_seconds`,
    doubled up to `longest_retry_seconds`; by default after `interval_seconds`.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], bool | None],
        interval_seconds: float,
        failure: str,
        *,
        first_seconds: float = 0.0,
        retry_seconds: float | None = None,
        longest_retry_seconds: float | None = None,
    ) -> None:
        self.failures = 0
        self._name, self._work, self._failure = name, work, failure
        self._interval_seconds = interval_seconds
        self._first_seconds = first_seconds
        self._retry_seconds = interval_seconds if retry_seconds is None else retry_seconds
        self._longest_retry_seconds = longest_retry_seconds or self._retry_seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # The failures in a row, and the last one.
        self._in_a_row, self._problem = 0, ""
        # How long the next retry waits.
        self._pause_seconds = self._retry_seconds

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin; raises RuntimeError where no thread can be had."""
        # A daemon: work that hangs must not keep the process from ending.
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Begin no further run; one that is under way goes on."""
        self._stopping.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait so long at most until the thread has ended; without a limit by default."""
        if self._thread is not None:
            self._thread.join(seconds)

    def run_once(self) -> float:
        """Do the work once; return after how many seconds it is due again. Raises nothing."""
        try:
            is_due = self._work()
        except Exception as error:
            self.failures += 1
            self._in_a_row += 1
            if self._problem != (problem := reasons(error)):
                trace = None if isinstance(error, _EXPECTED) else error
                _log.error(self._failure, problem, exc_info=trace)
            self._problem = problem
            pause_seconds = self._pause_seconds
            self._pause_seconds = min(2 * pause_seconds, self._longest_retry_seconds)
            return pause_seconds
        if self._in_a_row:
            _log.warning("%s: well again after %d failures", self._name, self._in_a_row)
        self._in_a_row, self._problem, self._pause_seconds = 0, "", self._retry_seconds
        return 0.0 if is_due else self._interval_seconds

    def _run(self) -> None:
        pause_seconds = self._first_seconds
        while not self._stopping.wait(pause_seconds):
            pause_seconds = self.run_once()


def all_or_each(names: Sequence[str], act: Callable[[Sequence[str]], object]) -> None:
    """Act on all of these volumes by one command; where lvm2 refuses it, on each by itself.

    So one that it refuses keeps no other. Raises an ExceptionGroup of what failed then.
    """
    try:
        act(names)
    except mount_errors.CommandFailed:
        if len(names) == 1:
            raise
        with Attempts() as attempts:
            for one in names:
                with attempts.one():
                    act([one])


T = TypeVar("T")

# How many last results are kept.
_MOST_KEPT = 4096
# How many threads may hang for one pool, or one group: where these hang, so would another.
_MOST_AT_ONCE = 4
# How old a running probe is when later callers no longer wait for it.
_PATIENCE_SECONDS = 2.0
# A new probe has this long, though earlier ones took all the time: most take a moment.
_LEAST_SECONDS = 0.1


@dataclass(frozen=True)
class Seen(Generic[T]):
    """The result of a probe; the last result while one is under way, None if there was none.

    `hanging_seconds` is for how long that has been under way, 0 if it ended in time.
    """

    value: T | None
    hanging_seconds: float = 0.0


@dataclass(frozen=True)
class _Probe(Generic[T]):
    what: str
    place: str
    began_seconds: float
    result: "Future[T]"


class Probes(Generic[T]):
    """A cap on calls that may hang: one at a time for each thing, four for each place.

    Each has a thread, and its caller waits no longer than it says: it gets the last result.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: dict[str, _Probe[T]] = {}
        self._last: OrderedDict[str, T] = OrderedDict()

    def probe(
        self, what: str, work: Callable[[], T], until_seconds: float, place: str = ""
    ) -> Seen[T]:
        """Do the work and wait until then (monotonic, seconds). Raises what it raises.

        In one `place` four probes run at once. While all of these hang, a further one is not
        begun, and counts as hanging too.
        """
        while True:
            awaited, is_new = self._awaited(what, work, place)
            began = max(one.began_seconds for one in awaited)
            if is_new:
                end = max(until_seconds, began + _LEAST_SECONDS)
            else:
                end = min(until_seconds, began + _PATIENCE_SECONDS)
            left = max(0.0, end - time.monotonic())
            if not wait([one.result for one in awaited], left, FIRST_COMPLETED).done:
                with self._guard:
                    return Seen(self._last.get(what), time.monotonic() - began)
            if awaited[0].what == what:
                return Seen(awaited[0].result.result())

    def _awaited(
        self, what: str, work: Callable[[], T], place: str
    ) -> tuple[Sequence[_Probe[T]], bool]:
        """The probe of it, and whether that begins now; or those that it has to wait for."""
        with self._guard:
            if (running := self._running.get(what)) is not None:
                return [running], False
            others = [one for one in self._running.values() if one.place == place]
            if len(others) >= _MOST_AT_ONCE:
                return others, False
            began_seconds = time.monotonic()
            result = command.begin("probe", lambda: self._do(what, work))
            made = self._running[what] = _Probe(what, place, began_seconds, result)
            return [made], True

    def _do(self, what: str, work: Callable[[], T]) -> T:
        try:
            value = work()
            with self._guard:
                self._last[what] = value
                self._last.move_to_end(what)
                while len(self._last) > _MOST_KEPT:
                    self._last.popitem(last=False)
            return value
        finally:
            with self._guard:
                del self._running[what]


# How many run at once for one group: more would not make its disks faster.
_AT_ONCE = 8


@dataclass(frozen=True)
class _Detached:
    volume_id: str
    what: str
    recheck: Callable[[], None]
    work: Callable[[], None]
    place: GroupLock
    # Running from when the work begins; cancelled, the work never begins.
    ended: Future[None] = field(default_factory=Future)
    # No tag says that it is under way.
    on_record: ClassVar = False
    started_seconds: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        with self.place.hold() as had_to_wait:
            if not self.ended.set_running_or_notify_cancel():
                return
            try:
                if had_to_wait:
                    self.recheck()
                self.work()
            except BaseException as error:
                # Any error is for the call that waits.
                self.ended.set_exception(error)
            else:
                self.ended.set_result(None)

    @property
    def goes_on(self) -> bool:
        """Whether it may write to its volume from now on."""
        return not self.ended.done()

    def problem(self) -> errors.StillAtWork:
        seconds = time.monotonic() - self.started_seconds
        return errors.StillAtWork(self.volume_id, self.what, seconds)


# What makes a volume's file system.
MKFS = "mkfs"


class DetachedTasks:
    """mkfs and fsck, which may outlive their RPC; one task a volume.

    The next call waits for the same task: cut off and begun anew each time, it would never end.
    Eight run at once for a group, by a lock of the group with eight places, so that a group that
    hangs delays no other. A task that waits for a place is cancelled with its volume, whose name
    may be another's by then; it has no other limit.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._detached: dict[str, _Detached] = {}
        self._places: dict[str, GroupLock] = {}

    def do(
        self,
        volume_id: str,
        group: str,
        what: str,
        work: Callable[[], None],
        recheck: Callable[[], None],
    ) -> None:
        """Do it and wait; raises what it raises, or StillAtWork at the caller's deadline.

        The work itself has no deadline. Where it had to wait for a place, `recheck` comes before
        it, and raises if the caller's view of the volume is no longer true.
        """
        with self._guard:
            if group not in self._places:
                place = GroupLock(f"volume group {group}", math.inf, places=_AT_ONCE)
                self._places[group] = place
            task = _Detached(volume_id, what, recheck, work, self._places[group])
            self._detached[volume_id] = task
        # A context of its own, without the caller's deadline.
        command.begin(what, partial(contextvars.Context().run, task.run))
        self.finish(volume_id)

    def finish(self, volume_id: str) -> None:
        """Wait for what an earlier call began, if any; raises as `do` does."""
        with self._guard:
            task = self._detached.get(volume_id)
        if task is None:
            return
        # The task's own program is none of the call's steps: it may outlive the call.
        with trace.step(trace.WAIT, task.what):
            wait([task.ended], command.remaining_seconds())
        if not task.ended.done():
            raise task.problem()
        self._forget(volume_id)
        task.ended.result()

    def mkfs_of(self, volume_id: str) -> _Detached | None:
        """The mkfs of a volume that is under way, or waits for a place, if any."""
        with self._guard:
            task = self._detached.get(volume_id)
        return task if task is not None and task.what == MKFS else None

    def cancel(self, volume_id: str) -> None:
        """Do nothing more for a volume that is deleted; raises StillAtWork for work under way."""
        with self._guard:
            task = self._detached.get(volume_id)
        if task is not None and not (task.ended.cancel() or task.ended.done()):
            raise task.problem()
        self._forget(volume_id)

    def _forget(self, volume_id: str) -> None:
        with self._guard:
            self._detached.pop(volume_id, None)
