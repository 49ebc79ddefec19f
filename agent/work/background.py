"""Background work that is not done by the threads of volume groups (agent/work/group_worker.py).

It is periodic tasks, mkfs and fsck, and probes. A probe is an operation that may hang, such as
statfs(2) on a broken disk. An error of a periodic task does not end the task's thread: the error is
logged and counted, and the work is retried. Errors of mkfs, fsck and probes are raised to the
callers that wait for them.
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
from mount.text import counted

_log = logging.getLogger(__name__)


def run_all(functions: Mapping[str, Callable[[], object]], seconds: float) -> None:
    """Run several functions, each in its own thread; wait at most `seconds` until all have ended.

    `functions` are by the names under which they are logged. An error of a function
    is logged, and so is a function that has not ended in time; no error is raised.
    """
    futures = {name: _start_thread(name, work) for name, work in functions.items()}
    wait(futures.values(), seconds)
    for name, future in futures.items():
        if not future.done():
            _log.warning("%s has not ended after %g s, and is left to itself", name, seconds)
        elif (error := future.exception()) is not None:
            _log.error("%s has not ended well: %s", name, error)


class Attempts:
    """Context manager for several attempts, each of which is made even if an earlier one failed.

    At the end of the `with`, an ExceptionGroup of the errors of all attempts is raised, if there
    are any.
    """

    def __init__(self) -> None:
        self._failed: list[Exception] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None and self._failed:
            raise ExceptionGroup("not all attempts succeeded", self._failed)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run the body as one attempt; suppress its error until the end of all attempts."""
        try:
            yield
        except Exception as error:
            self._failed.append(error)


def reasons(error: BaseException) -> str:
    """Return the message of an error; for an ExceptionGroup, the messages of its errors."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(map(reasons, error.exceptions)))
    return str(error) or repr(error)


def _start_thread(name: str, function: Callable[[], object]) -> Future[object]:
    """Run a function in a new thread; return a future of the function's result.

    If no thread can be started, the function is not run, and the future has the error.
    """
    try:
        return command.begin(f"end {name}", function)
    except RuntimeError as error:
        # Do not run the function in the present thread, although no other thread can be started:
        # the function could hang, and delay the other functions.
        future = Future[object]()
        future.set_exception(error)
        return future


# Errors that are logged without a stack trace, because the message says enough.
_EXPECTED = (errors.AgentError, mount_errors.CommandError, OSError)


class PeriodicTask:
    """Work that a background thread repeats until `stop`.

    `work` runs `first_seconds` after `start`, then `interval_seconds` after each run, or at once
    after a run that returned True. An error of `work` is counted in `failures`, and logged with the
    message `failure_message` (with %s for the error) unless the same error was logged last. After
    an error `work` is retried after `retry_seconds`, which doubles with each further error up to
    `longest_retry_seconds`. Both are `interval_seconds` by default.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], bool | None],
        interval_seconds: float,
        failure_message: str,
        *,
        first_seconds: float = 0.0,
        retry_seconds: float | None = None,
        longest_retry_seconds: float | None = None,
    ) -> None:
        self.failures = 0
        self._name, self._work, self._failure_message = name, work, failure_message
        self._interval_seconds = interval_seconds
        self._first_seconds = first_seconds
        self._retry_seconds = interval_seconds if retry_seconds is None else retry_seconds
        self._longest_retry_seconds = longest_retry_seconds or self._retry_seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # The number of runs in a row that failed, and the message of the last failure.
        self._in_a_row, self._problem = 0, ""
        # Time until the retry after the next failure of the task, in seconds.
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
        """Let no further run of the task begin; a run in progress continues."""
        self._stopping.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the task's thread, at most `seconds`; without a limit by default."""
        if self._thread is not None:
            self._thread.join(seconds)

    def run_once(self) -> float:
        """Do the task's work once; return the seconds until the next run.

        An error of the work is counted and logged, and not raised.
        """
        try:
            is_due_again = self._work()
        except Exception as error:
            self.failures += 1
            self._in_a_row += 1
            if self._problem != (problem := reasons(error)):
                trace = None if isinstance(error, _EXPECTED) else error
                _log.error(self._failure_message, problem, exc_info=trace)
            self._problem = problem
            pause_seconds = self._pause_seconds
            self._pause_seconds = min(2 * pause_seconds, self._longest_retry_seconds)
            return pause_seconds
        if self._in_a_row:
            _log.warning("%s: well again after %s", self._name, counted(self._in_a_row, "failure"))
        self._in_a_row, self._problem, self._pause_seconds = 0, "", self._retry_seconds
        return 0.0 if is_due_again else self._interval_seconds

    def _run(self) -> None:
        """Repeat the task's work until `stop`; this is the function of the task's thread."""
        pause_seconds = self._first_seconds
        while not self._stopping.wait(pause_seconds):
            pause_seconds = self.run_once()


def all_or_each(names: Sequence[str], action: Callable[[Sequence[str]], object]) -> None:
    """Call `action` for several volumes by one command; if lvm2 fails, call it for each volume.

    So one volume that lvm2 refuses does not keep the others from the action. Raises an
    ExceptionGroup of the errors for single volumes, or CommandFailed if only one volume is named.
    """
    try:
        action(names)
    except mount_errors.CommandFailed:
        if len(names) == 1:
            raise
        with Attempts() as attempts:
            for name in names:
                with attempts.attempt():
                    action([name])


T = TypeVar("T")

# Maximum number of probed things, such as thin pools, whose last results are kept.
_MOST_KEPT = 4096
# Maximum number of probes that may run, or hang, at the same time in one pool or volume group. If
# so many hang, a further probe would hang too.
_MOST_AT_ONCE = 4
# Age of a running probe, in seconds, from which callers that did not begin the probe no longer wait
# for its end.
_PATIENCE_SECONDS = 2.0
# Minimum time limit of the wait for a probe that the caller began, in seconds. It applies even if
# earlier probes took all of the caller's time. Most probes end sooner.
_LEAST_SECONDS = 0.1


@dataclass(frozen=True)
class ProbeResult(Generic[T]):
    """The result of a probe, or an earlier result if the probe did not end in time.

    `value` is the result. If the probe did not end in time, it is the last earlier result of a
    probe of the same thing, or None. `hanging_seconds` is the time since the probe began, in
    seconds, or 0 if the probe ended in time.
    """

    value: T | None
    hanging_seconds: float = 0.0


@dataclass(frozen=True)
class _Probe(Generic[T]):
    target: str
    pool_or_group: str
    began_seconds: float
    result: "Future[T]"


class Probes(Generic[T]):
    """Runs probes in threads: operations that may hang, such as reading the status of a pool.

    At most one probe runs at a time for each `target`, the thing that is probed, and at most four
    for each `pool_or_group`, the pool or volume group of the things. A caller waits no longer than
    its time limit; then it gets the last earlier result.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: dict[str, _Probe[T]] = {}
        self._last: OrderedDict[str, T] = OrderedDict()

    def probe(
        self, target: str, work: Callable[[], T], until_seconds: float, pool_or_group: str = ""
    ) -> ProbeResult[T]:
        """Run `work` as a probe of `target`; wait for the result, or return an earlier result.

        The wait ends at `until_seconds` (monotonic). If a probe of `target` is running already, it
        is waited for instead, until it is two seconds old. At most four probes run at the same time
        for one `pool_or_group`. While four run, no further probe is begun, and the requested one
        counts as hanging if none of the four ends in time. Raises the error of a probe that ended
        in time.
        """
        while True:
            awaited, is_new = self._awaited(target, work, pool_or_group)
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
                    return ProbeResult(self._last.get(target), time.monotonic() - began)
            if awaited[0].target == target:
                return ProbeResult(awaited[0].result.result())

    def _awaited(
        self, target: str, work: Callable[[], T], pool_or_group: str
    ) -> tuple[Sequence[_Probe[T]], bool]:
        """Return the probes of which one has to end, and whether this method began the probe.

        The probes are the running or new probe of `target`, or all probes of the same pool or
        volume group if no further probe may run there.
        """
        with self._guard:
            if (running := self._running.get(target)) is not None:
                return [running], False
            probes_beside = [
                probe for probe in self._running.values() if probe.pool_or_group == pool_or_group
            ]
            if len(probes_beside) >= _MOST_AT_ONCE:
                return probes_beside, False
            began_seconds = time.monotonic()
            result = command.begin("probe", lambda: self._do(target, work))
            probe = self._running[target] = _Probe(target, pool_or_group, began_seconds, result)
            return [probe], True

    def _do(self, target: str, work: Callable[[], T]) -> T:
        """Run a probe of `target` in the present thread, and keep the result as the last one."""
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


# Maximum number of mkfs and fsck that run at the same time in one volume group. More at a time
# would not end sooner, since they share the group's disks.
_AT_ONCE = 8


@dataclass(frozen=True)
class _Detached:
    volume_id: str
    name: str
    recheck: Callable[[], None]
    work: Callable[[], None]
    lock: GroupLock
    # The future with the task's outcome. It is in the state "running" from the start of the work
    # on. If it is cancelled before the start, the work never starts.
    future: Future[None] = field(default_factory=Future)
    # Whether a tag records the task; always false. `Conflicts` reads this attribute of each job.
    on_record: ClassVar = False
    started_seconds: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        with self.lock.hold() as had_to_wait:
            if not self.future.set_running_or_notify_cancel():
                return
            try:
                if had_to_wait:
                    self.recheck()
                self.work()
            except BaseException as error:
                # Keep each error, of whatever class, for the call that waits for the task.
                self.future.set_exception(error)
            else:
                self.future.set_result(None)

    @property
    def goes_on(self) -> bool:
        """Whether the task has not ended, so that it may still write to its volume."""
        return not self.future.done()

    def problem(self) -> errors.StillAtWork:
        seconds = time.monotonic() - self.started_seconds
        return errors.StillAtWork(self.volume_id, self.name, seconds)


# Name of the detached task (`DetachedTasks`) that makes a volume's file system.
MKFS = "mkfs"


class DetachedTasks:
    """Runs of mkfs and fsck, which may outlive the RPC that began them; one for each volume.

    The next RPC for the volume waits for the same task: if each RPC began the task anew, the task
    would never end. At most eight tasks run at the same time for one volume group, by a lock of the
    group with eight slots. So a volume group that hangs delays no other group. A task that waits
    for a slot is cancelled when its volume is deleted, because another volume may get the name
    later. A task has no time limit.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._detached: dict[str, _Detached] = {}
        self._locks: dict[str, GroupLock] = {}

    def do(
        self,
        volume_id: str,
        group: str,
        task_name: str,
        work: Callable[[], None],
        recheck: Callable[[], None],
    ) -> None:
        """Run `work` for a volume in a new thread, and wait for its end; raise its error.

        Raises StillAtWork if the task has not ended at the caller's deadline; the task then goes
        on. If the task had to wait for a slot, `recheck` is called before `work`, and raises if the
        volume is no longer as the caller saw it.
        """
        with self._guard:
            if group not in self._locks:
                lock = GroupLock(f"volume group {group}", math.inf, slots=_AT_ONCE)
                self._locks[group] = lock
            task = _Detached(volume_id, task_name, recheck, work, self._locks[group])
            self._detached[volume_id] = task
        # Run the task in a new contextvars context, which does not have the caller's deadline.
        try:
            command.begin(task_name, partial(contextvars.Context().run, task.run))
        except BaseException:
            # No thread could be started: the next call begins the task.
            self._forget(volume_id)
            raise
        self.wait_for(volume_id)

    def wait_for(self, volume_id: str) -> None:
        """Wait for the task that an earlier call began for a volume; return at once without one.

        Raises the task's error, and StillAtWork if the task has not ended at the caller's deadline.
        """
        with self._guard:
            task = self._detached.get(volume_id)
        if task is None:
            return
        # Add the wait to the call's trace, and not the program that the task runs: the program may
        # outlive the call.
        with trace.step(trace.WAIT, task.name):
            wait([task.future], command.remaining_seconds())
        if not task.future.done():
            raise task.problem()
        self._forget(volume_id)
        task.future.result()

    def mkfs_of(self, volume_id: str) -> _Detached | None:
        """Return the mkfs that an RPC began for a volume; None if there is none.

        The mkfs is running, waits for a slot, or has ended and no later RPC has seen its outcome.
        """
        with self._guard:
            task = self._detached.get(volume_id)
        return task if task is not None and task.name == MKFS else None

    def cancel(self, volume_id: str) -> None:
        """Cancel the waiting task of a volume that is to be deleted, if there is one.

        Raises StillAtWork if the task is running. A task that has ended is dropped.
        """
        with self._guard:
            task = self._detached.get(volume_id)
        if task is not None and not (task.future.cancel() or task.future.done()):
            raise task.problem()
        self._forget(volume_id)

    def _forget(self, volume_id: str) -> None:
        """Drop the task of a volume, which has ended or was cancelled."""
        with self._guard:
            self._detached.pop(volume_id, None)
