"""Background work beside the loops of volume groups: periodic tasks, mkfs and fsck, probes.

A probe is an operation that may hang, such as statfs(2) on a broken disk. An error that such work
raises ends no thread: it is logged once, counted, and the work is retried.
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
    """Run several functions at the same time, each under its name, and wait for their end.

    The wait is at most `seconds`. An error of a function is logged, and so is a function that has
    not ended by then; neither delays the other functions.
    """
    futures = {name: _begun(name, work) for name, work in works.items()}
    wait(futures.values(), seconds)
    for name, future in futures.items():
        if not future.done():
            _log.warning("%s has not ended after %g s, and is left to itself", name, seconds)
        elif (error := future.exception()) is not None:
            _log.error("%s has not ended well: %s", name, error)


class Attempts:
    """Several attempts, each of which is made even if an earlier one failed.

    At the end of the context, an ExceptionGroup of the errors is raised.
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
        """Make one attempt in the context; keep its error to be raised after all attempts."""
        try:
            yield
        except Exception as error:
            self._failed.append(error)


def reasons(error: BaseException) -> str:
    """Return the message of an error; for an ExceptionGroup, the messages of its errors."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(map(reasons, error.exceptions)))
    return str(error) or repr(error)


def _begun(name: str, work: Callable[[], object]) -> Future[object]:
    """Begin a function in a thread; return a future of its end."""
    try:
        return command.begin(f"end {name}", work)
    except RuntimeError as error:
        # Without a thread the function is not run: in the present thread it could hang, and delay
        # the other functions.
        future = Future[object]()
        future.set_exception(error)
        return future


# Errors whose message says all; their stack trace is not logged.
_EXPECTED = (errors.AgentError, mount_errors.CommandError, OSError)


class PeriodicTask:
    """Work that a background thread repeats until `stop`.

    `work` runs `first_seconds` after `start`, then `interval_seconds` after each run, or at once
    after a run that returned True. An error of `work` is counted in `failures`, and logged with the
    message `failure` (with %s for the error) unless the same error was logged last. After an error
    `work` is retried after `retry_seconds`, which doubles with each further error up to
    `longest_retry_seconds`. Both are `interval_seconds` by default.
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
        # The number of failures in a row, and the message of the last failure.
        self._in_a_row, self._problem = 0, ""
        # Time until the next retry after a failure, in seconds.
        self._pause_seconds = self._retry_seconds

    @property
    def is_alive(self) -> bool:
        """Whether the task's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the task's thread, unless it runs; raise RuntimeError if none can be started."""
        if self.is_alive:
            return
        # The thread is a daemon, since work that hangs must not keep the process from ending.
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Let no further run begin; a run in progress continues."""
        self._stopping.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the task's thread, at most `seconds`; without a limit by default."""
        if self._thread is not None:
            self._thread.join(seconds)

    def run_once(self) -> float:
        """Do the work once; return the seconds until the next run. Raises no error."""
        try:
            is_due_again = self._work()
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
        return 0.0 if is_due_again else self._interval_seconds

    def _run(self) -> None:
        """Repeat the work until `stop`, in the task's thread."""
        pause_seconds = self._first_seconds
        while not self._stopping.wait(pause_seconds):
            pause_seconds = self.run_once()


def all_or_each(names: Sequence[str], action: Callable[[Sequence[str]], object]) -> None:
    """Act on several volumes by one command; if lvm2 refuses that, act on each volume by itself.

    So a volume that lvm2 refuses does not keep the action from the other volumes. Raises an
    ExceptionGroup of the errors for single volumes.
    """
    try:
        action(names)
    except mount_errors.CommandFailed:
        if len(names) == 1:
            raise
        with Attempts() as attempts:
            for name in names:
                with attempts.one():
                    action([name])


T = TypeVar("T")

# Maximum number of things whose last results are kept.
_MOST_KEPT = 4096
# Maximum number of probes that may run, or hang, at the same time in one pool or one group. If so
# many hang, a further probe would hang too.
_MOST_AT_ONCE = 4
# Age of a running probe, in seconds, above which later callers no longer wait for its end.
_PATIENCE_SECONDS = 2.0
# Minimum time limit of the wait for a new probe, in seconds, even if earlier probes took all of the
# caller's time. Most probes end sooner.
_LEAST_SECONDS = 0.1


@dataclass(frozen=True)
class Seen(Generic[T]):
    """The last result of a probe, and whether a probe hangs at present.

    `value` is the result, or the previous result while a probe is in progress, or None if there is
    no previous result. `hanging_seconds` is the time since that probe began, or 0 if it ended in
    time.
    """

    value: T | None
    hanging_seconds: float = 0.0


@dataclass(frozen=True)
class _Probe(Generic[T]):
    target: str
    place: str
    began_seconds: float
    result: "Future[T]"


class Probes(Generic[T]):
    """Runs probes, which may hang, in threads: one at a time for each thing, four for each place.

    `target` names the thing that is probed, `place` its pool or volume group. A caller waits no
    longer than its time limit; then it gets the last result.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: dict[str, _Probe[T]] = {}
        self._last: OrderedDict[str, T] = OrderedDict()

    def probe(
        self, target: str, work: Callable[[], T], until_seconds: float, place: str = ""
    ) -> Seen[T]:
        """Run a probe and wait for its result until a time (monotonic, seconds).

        Raises what `work` raises. A probe of the same thing that is running is joined. In one
        `place` four probes run at the same time. While all of these hang, no further probe is
        begun, and the requested one counts as hanging.
        """
        while True:
            awaited, is_new = self._awaited(target, work, place)
            began = max(running.began_seconds for running in awaited)
            if is_new:
                end = max(until_seconds, began + _LEAST_SECONDS)
            else:
                end = min(until_seconds, began + _PATIENCE_SECONDS)
            left_seconds = max(0.0, end - time.monotonic())
            if not wait(
                [running.result for running in awaited], left_seconds, FIRST_COMPLETED
            ).done:
                with self._guard:
                    return Seen(self._last.get(target), time.monotonic() - began)
            if awaited[0].target == target:
                return Seen(awaited[0].result.result())

    def _awaited(
        self, target: str, work: Callable[[], T], place: str
    ) -> tuple[Sequence[_Probe[T]], bool]:
        """Return the probes to wait for, and whether a probe was begun now.

        The result is the running or new probe of `target`, or all probes of the same place if no
        further probe may run in that place.
        """
        with self._guard:
            if (running := self._running.get(target)) is not None:
                return [running], False
            probes_of_place = [probe for probe in self._running.values() if probe.place == place]
            if len(probes_of_place) >= _MOST_AT_ONCE:
                return probes_of_place, False
            began_seconds = time.monotonic()
            result = command.begin("probe", lambda: self._do(target, work))
            probe = self._running[target] = _Probe(target, place, began_seconds, result)
            return [probe], True

    def _do(self, target: str, work: Callable[[], T]) -> T:
        """Run a probe and keep its result."""
        try:
            value = work()
            with self._guard:
                self._last[target] = value
                self._last.move_to_end(target)
                while len(self._last) > _MOST_KEPT:
                    self._last.popitem(last=False)
            return value
        finally:
            with self._guard:
                del self._running[target]


# Maximum number of mkfs and fsck that run at the same time in one volume group. More would not make
# its disks faster.
_AT_ONCE = 8


@dataclass(frozen=True)
class _Detached:
    volume_id: str
    name: str
    recheck: Callable[[], None]
    work: Callable[[], None]
    place: GroupLock
    # The outcome. The future is running from the start of the work on; if it is cancelled before,
    # the work never starts.
    ended: Future[None] = field(default_factory=Future)
    # Whether a tag records the task. No tag does.
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
                # Each error, of whatever class, is raised by the call that waits for the task.
                self.ended.set_exception(error)
            else:
                self.ended.set_result(None)

    @property
    def goes_on(self) -> bool:
        """Whether the task may still write to its volume."""
        return not self.ended.done()

    def problem(self) -> errors.StillAtWork:
        seconds = time.monotonic() - self.started_seconds
        return errors.StillAtWork(self.volume_id, self.name, seconds)


# Name of the task that makes a volume's file system.
MKFS = "mkfs"


class DetachedTasks:
    """mkfs and fsck, which may outlive the RPC that began them; one task for each volume.

    The next RPC waits for the same task: a task that each RPC began anew would never end. Eight
    tasks run at the same time for one volume group, by a lock with eight slots for each group. So a
    group that hangs delays no other group. A task that waits for a slot is cancelled when its
    volume is deleted, because the name may be another volume's later. A task has no other limit.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._detached: dict[str, _Detached] = {}
        self._places: dict[str, GroupLock] = {}

    def do(
        self,
        volume_id: str,
        group: str,
        task_name: str,
        work: Callable[[], None],
        recheck: Callable[[], None],
    ) -> None:
        """Run a task for a volume and wait for its end; raise its error, or StillAtWork.

        StillAtWork is raised at the caller's deadline. The task itself has no deadline. If the task
        had to wait for a slot, `recheck` is called before `work`, and raises if the caller's view
        of the volume is no longer true.
        """
        with self._guard:
            if group not in self._places:
                place = GroupLock(f"volume group {group}", math.inf, places=_AT_ONCE)
                self._places[group] = place
            task = _Detached(volume_id, task_name, recheck, work, self._places[group])
            self._detached[volume_id] = task
        # The task runs in a context of its own, without the caller's deadline.
        try:
            command.begin(task_name, partial(contextvars.Context().run, task.run))
        except BaseException:
            # No thread could be started: the next call begins the task.
            self._forget(volume_id)
            raise
        self.finish(volume_id)

    def finish(self, volume_id: str) -> None:
        """Wait for the task that an earlier call began for a volume, if any; raise as `do` does."""
        with self._guard:
            task = self._detached.get(volume_id)
        if task is None:
            return
        # The call's trace has the wait as a step, but not the program that the task runs: the
        # program may outlive the call.
        with trace.step(trace.WAIT, task.name):
            wait([task.ended], command.remaining_seconds())
        if not task.ended.done():
            raise task.problem()
        self._forget(volume_id)
        task.ended.result()

    def mkfs_of(self, volume_id: str) -> _Detached | None:
        """Return a volume's mkfs that is running or waits for a slot; None if there is none."""
        with self._guard:
            task = self._detached.get(volume_id)
        return task if task is not None and task.name == MKFS else None

    def cancel(self, volume_id: str) -> None:
        """Cancel the task of a volume that is deleted; raise StillAtWork if the task is running."""
        with self._guard:
            task = self._detached.get(volume_id)
        if task is not None and not (task.ended.cancel() or task.ended.done()):
            raise task.problem()
        self._forget(volume_id)

    def _forget(self, volume_id: str) -> None:
        """Drop the task of a volume, which has ended or was cancelled."""
        with self._guard:
            self._detached.pop(volume_id, None)
