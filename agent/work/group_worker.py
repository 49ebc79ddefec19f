"""Background work of volume groups: one loop for each group, which does one step at a time.

A loop runs in a background thread of its volume group.

The state in LVM's metadata, as tags, says what work is due. A kind of work (`Jobs`) has two
functions: `due_jobs` finds the jobs that are due in a group by a fresh report of lvm2's, and
`steps` does one job in steps. The loop repeats:

1. Take the most urgent job that has a step due.
2. Do one step of that job.

The loop is level-triggered, as the reconcilers of Kubernetes' controllers are: a job is derived
from the state, never from an event. So the start of the service only has to search for due jobs. A
minute after a job failed, the state is read again. If the job is still due by the state, it is
begun anew, from the beginning.

Among equally urgent jobs, the smallest job, the oldest job and the job whose last step is longest
ago get a step in turn. So a small deletion does not wait for the copy of a terabyte, a large job
comes to its end, and a job of unknown size keeps no other job from its steps. I/O to the disks is
paced within the steps (agent/work/pace.py).

A step that takes longer than two seconds may hang: another thread then continues the loop. Up to
two steps of one kind may hang in a group. Groups do not wait for each other, since each has its own
loop.

Work that cannot be done in steps, namely mkfs and probes of things that may hang, is not done by
the loop but in agent/work/background.py.
"""

import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from agent.core import errors
from agent.work.background import Attempts, reasons
from agent.work.progress import Progress
from mount import command
from mount import mount_errors as mount_errors
from mount.text import counted

_log = logging.getLogger(__name__)

# Time limit of a step of background work, in seconds. If a step takes longer, another thread
# continues the loop of the volume group.
_SLOW_SECONDS = 2.0
# Maximum number of steps of one kind of work that may hang in a volume group. If so many hang, a
# further step would hang too.
_MOST_HANGING = 2
# Time after which the idle background thread of a volume group without jobs ends, in seconds.
_IDLE_SECONDS = 60.0
# Time limit of the wait until a cancelled job reaches a safe point, in seconds. A job that takes
# longer waits for a disk that hangs.
_ENDING_SECONDS = 10.0
# Time limit for finding by a volume group's fresh state which failed jobs are still due, in
# seconds.
_LOOKING_SECONDS = 60.0
# Part of the retry interval: failed jobs of one kind whose retries are due within this part of the
# interval are retried together.
_TOGETHER = 0.1
# Errors that are logged without a stack trace, because the message says enough.
_EXPECTED = (errors.AgentError, mount_errors.CommandError, OSError)

# Type of the steps of a job: a generator that ends each step by a `yield`. A `yield` is a safe
# point, where the job can be stopped for good: no lock, no I/O slot of the pace and no time limit
# is held across a `yield`. The yielded value is the time until the next step is due, in seconds.
Steps = Iterator[float]
# Value that a step yields if the job's next step is due at once. Other jobs may get a step first.
AGAIN = 0.0


class Stopping(errors.OperationPending):
    """Raised when a background job was cancelled, or cannot begin because the service ends."""


@dataclass(eq=False)
class Job:
    """A job: background work on the volume, pool or volume group with the id `key`.

    `future` has the outcome. `on_record` means that LVM tags record the job, and that
    the call which began it was answered: if the job fails, it is retried in the background.
    `size_bytes` is the number of bytes that the job erases or copies.
    """

    key: str
    size_bytes: int = 0
    on_record: bool = True
    # The message of the job's last error, which is not logged again, and the number of errors in a
    # row.
    logged: str = ""
    failures: int = 0
    # The next three fields are made anew for the job that replaces a failed one.
    progress: Progress = field(default_factory=Progress, init=False)
    cancelled: threading.Event = field(default_factory=threading.Event, init=False)
    future: Future[None] = field(default_factory=Future, init=False)
    # The time at which the job's next step is due, or after a failure the retry (monotonic,
    # seconds). This field and the next ones are changed only under the `guard` of the job's
    # GroupWorker, except `steps`, which only the thread that does the job's step sets.
    due_seconds: float = field(default=math.inf, init=False)
    # The steps of the job, once the first step has begun.
    steps: Steps | None = field(default=None, init=False)
    # Whether a thread is in a step of the job now.
    at_work: bool = field(default=False, init=False)
    # Number in the order in which the jobs of the group were added.
    number: int = field(default=0, init=False)
    # Number of the job's last step in the order of all steps of the group; -1 before the first.
    last_step: int = field(default=-1, init=False)

    @property
    def goes_on(self) -> bool:
        """Whether the job is still to be done: it has not ended, or will be retried."""
        return self.on_record or not self.future.done()

    @property
    def left_bytes(self) -> float:
        """Number of bytes that the job has yet to erase or copy; infinity if that is unknown."""
        total_bytes = max(self.size_bytes, self.progress.total_bytes)
        return max(0, total_bytes - self.progress.done_bytes) if total_bytes else math.inf

    def check(self) -> None:
        """Raise Stopping if the job was cancelled.

        Called before each step, and now and then by steps that wait.
        """
        if self.cancelled.is_set():
            raise Stopping(self.key)

    def end(self, stopping: Stopping) -> None:
        """End the job at a safe point, for good, with the error `stopping` as its outcome.

        The outcome of a job that has ended already is left unchanged.
        """
        if isinstance(self.steps, Generator):
            self.steps.close()
        with suppress(InvalidStateError):
            self.future.set_exception(stopping)


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The background jobs of one kind: at most one for each key, done by the key's volume group.

    The key is the id of a volume or pool, or the name of a volume group; the job is done by the
    background loop of that group. `steps` does a job; a plain function does a job that has one step
    only. `due_jobs` returns an iterator of the jobs that are due in a volume group by its fresh
    state. It raises if the state cannot be read, for instance because the group is not on this
    node. Each job is started before the iterator is asked for the next one, so `due_jobs` may hold
    a lock in between.

    `clear_failed` is called with a failed job that is no longer due by the state. Without
    `due_jobs`, a failed job is retried unchanged. `failure_message` is the log line of an error,
    with %s for the key and for the error. `urgent` jobs are done before all other jobs. Jobs of a
    kind with `survives_halt` are still done when the service ends.
    """

    def __init__(
        self,
        workers: "GroupWorkers",
        kind: str,
        steps: Callable[[J], Steps | None],
        failure_message: str,
        *,
        due_jobs: Callable[[str], Iterable[J]] | None = None,
        clear_failed: Callable[[J], None] = lambda _job: None,
        urgent: bool = False,
        survives_halt: bool = False,
        retry_seconds: float = 60.0,
        level: int = logging.ERROR,
    ) -> None:
        self.kind, self.steps, self.urgent, self.survives_halt = kind, steps, urgent, survives_halt
        self._workers, self._due_jobs, self._clear_failed = workers, due_jobs, clear_failed
        self._failure_message, self._level = failure_message, level
        # Time until the retry of a failed job, in seconds; and the shorter time until the retry of
        # a job whose outcome is unknown, since a fresh state shows the outcome.
        self.retry_seconds, self.soon_seconds = retry_seconds, 1.0
        self._failures: Counter[str] = Counter()

    def start(self, job: J, after_seconds: float = 0.0) -> J:
        """Start a job, after a delay if one is given; return the job that the caller waits for.

        If a job with the same key has not ended yet, that job is returned, and `job` is not
        started. Raises Stopping while a call has halted the key (`halted`), and RuntimeError if no
        thread can be started. When the service ends, no job begins: the returned job has ended with
        Stopping.
        """
        worker = self._worker(job.key)
        with worker.guard:
            running = self._of(worker, job.key)
            if (self.kind, job.key) in worker.barred:
                raise Stopping(job.key)
            if running is not None and not running.future.done():
                return running
            job.due_seconds = time.monotonic() + after_seconds if after_seconds else -math.inf
            worker.add(self, job)
            return job

    def wake(self, job: J, after_seconds: float) -> None:
        """Make the next step of the job with the key of `job` due after a delay, or earlier.

        If there is no job with that key, `job` is started. A wake during a step causes one more
        step. If no thread can be started, that is logged, and the step is done once a thread is
        available.
        """
        worker = self._worker(job.key)
        with worker.guard:
            running = self._of(worker, job.key) or job
            try:
                worker.wake(self, running, time.monotonic() + after_seconds)
            except RuntimeError as error:
                self._log(running, error)

    def wait(self, job: J, seconds: float) -> bool:
        """Wait at most `seconds` for the end of a job; return whether the job has ended.

        A caller that is itself a step of a job of the same volume group would wait in vain, because
        it occupies the group's thread. Such a caller does the steps of the awaited job itself.
        """
        worker = self._worker(job.key)
        if not worker.is_own_thread:
            return bool(wait([job.future], seconds).done)
        until_seconds = time.monotonic() + seconds
        while time.monotonic() < until_seconds and worker.do_step_now(self, job):
            pass
        return job.future.done()

    def has(self, key: str) -> bool:
        """Whether a job for this key has not succeeded yet: it is queued, running or failed."""
        return self.of(key) is not None

    def of(self, key: str) -> J | None:
        """Return the job for this key that is queued, running or failed; None if there is none."""
        if (worker := self._workers.find(_group_of(key))) is None:
            return None
        with worker.guard:
            return self._of(worker, key)

    def unfinished(self) -> list[J]:
        """Return the jobs of this kind, in all volume groups, that have not succeeded yet."""
        jobs: list[J] = []
        for worker in self._workers.every():
            with worker.guard:
                jobs += (job for entry_key, job in worker.jobs.items() if entry_key[0] == self.kind)
        return jobs

    def progress(self) -> Mapping[str, str]:
        """Return the progress of each job that has not succeeded yet, as text, by the job's key."""
        return {job.key: str(job.progress) for job in self.unfinished()}

    def counts(self) -> Mapping[str, int]:
        """Return the numbers of jobs by their state: queued, running, or failed.

        A failed job may be retried.
        """
        states = Counter(_state(job) for job in self.unfinished())
        return {state: states[state] for state in ("queued", "running", "failed")}

    def failures(self) -> Mapping[str, int]:
        """Return the number of failures of such jobs until now, by the name of the volume group.

        Failures of retries count as well.
        """
        return dict(self._failures)

    @contextmanager
    def halted(self, key: str) -> Iterator[None]:
        """Cancel the job of a key, and let no job for the key begin within the `with`.

        The body begins when the job has ended at a safe point. If the body fails, a job that is on
        record begins anew, if it is still due by the volume group's state. Raises Stopping if the
        job does not end within ten seconds, as when its disk does not answer.
        """
        worker, entry_key = self._worker(key), (self.kind, key)
        has_failed = True
        try:
            with worker.guard:
                worker.barred[entry_key] += 1
                job = self._of(worker, key)
                if job is not None:
                    job.cancelled.set()
                    worker.halted.setdefault(entry_key, job)
                at_work = job is not None and job.at_work and not job.future.done()
            if job is not None and at_work and not wait([job.future], _ENDING_SECONDS).done:
                raise Stopping(key)
            self.forget(key)
            yield
            has_failed = False
        finally:
            with worker.guard:
                worker.barred[entry_key] -= 1
                # Remove the entries of keys that no call halts any more.
                worker.barred = +worker.barred
                # Other calls may have the job halted, too. The last one decides.
                if entry_key not in worker.barred:
                    halted_job = worker.halted.pop(entry_key, None)
                    if has_failed and halted_job is not None:
                        self._restore(worker, halted_job)

    def _restore(self, worker: "GroupWorker", halted_job: J) -> None:
        """Put a job that was halted for a failed call back, as a failed job that is due at once."""
        entry_key = (self.kind, halted_job.key)
        if halted_job.on_record and self._due_jobs is not None and entry_key not in worker.jobs:
            failed_job = replace(halted_job)
            failed_job.future.set_exception(Stopping(failed_job.key))
            with suppress(RuntimeError):
                worker.wake(self, failed_job, -math.inf)

    def cancel(self, job: J) -> None:
        """Have a job end: at the end of its step in progress, or at once if there is none."""
        worker = self._worker(job.key)
        with worker.guard:
            job.cancelled.set()
            if not job.at_work:
                worker.drop(self, job)
        worker.cancel(job)

    def forget(self, key: str) -> None:
        """Drop the job of a key, and cancel it for good; a step in progress is not interrupted."""
        if (worker := self._workers.find(_group_of(key))) is None:
            return
        with worker.guard:
            job = worker.jobs.pop((self.kind, key), None)
        if job is not None:
            worker.cancel(job)

    def start_due(self, group: str) -> int:
        """Start all jobs of this kind that are due in a volume group by its fresh state.

        Returns the number of the group's due jobs. Raises an ExceptionGroup of the errors, after it
        tried to start each job.
        """
        number = 0
        with Attempts() as attempts, attempts.attempt():
            for job in () if self._due_jobs is None else self._due_jobs(group):
                with attempts.attempt():
                    self.start(job)
                number += 1
        return number

    def do_step(self, worker: "GroupWorker", job: J) -> None:
        """Do the next step of a job; only the loop of the job's volume group calls this.

        For a failed job whose retry is due, find out whether the job is still due
        (`_retry_failed`). No error of the step is raised: it becomes the job's outcome.
        """
        try:
            if job.future.done():
                self._retry_failed(worker, job)
                return
            job.check()
            if job.steps is None:
                job.steps = iter(self.steps(job) or ())
            pause_seconds = next(job.steps)
        except StopIteration:
            worker.drop(self, job)
            job.future.set_result(None)
        except BaseException as error:
            if isinstance(error, Stopping) and job.cancelled.is_set():
                job.end(error)
            else:
                self._fail(worker, job, error)
        else:
            with worker.guard:
                # Keep an earlier time that a wake during the step has set.
                due_seconds = time.monotonic() + pause_seconds
                job.due_seconds = min(job.due_seconds, due_seconds)

    def _fail(self, worker: "GroupWorker", job: J, error: BaseException) -> None:
        """Count and log the failure of a job, and end the job with its error.

        A job with `on_record` is retried later.
        """
        # Retry a job whose outcome is unknown soon, but only once in a row: if the outcome is
        # unknown again, the state does not show it.
        is_doubt = isinstance(error, mount_errors.OutcomeUnknown) and not job.logged
        seconds = self.soon_seconds if is_doubt else self.retry_seconds
        self._failures[_group_of(job.key)] += 1
        job.failures += 1
        self._log(job, error)
        # Complete the future before `on_record` is read. So a call that sets `on_record` at the
        # same time either finds that the job has ended, or the job is retried.
        job.future.set_exception(error)
        with worker.guard:
            # Keep an earlier time that a wake during the step has set.
            if job.on_record:
                job.due_seconds = min(job.due_seconds, time.monotonic() + seconds)

    def _retry_failed(self, worker: "GroupWorker", due_job: J) -> None:
        """Begin failed jobs of a volume group anew if they are due by the group's fresh state.

        Jobs that are no longer due are dropped, and passed to `clear_failed`. The state is read
        once for the job `due_job` and for all failed jobs of this kind whose retries are due soon.
        If the state cannot be read, that is logged and the jobs are retried later. Without
        `due_jobs`, only `due_job` is begun anew.
        """
        until_seconds = time.monotonic() + _TOGETHER * self.retry_seconds
        with worker.guard:
            remaining = {
                job.key: job
                for entry_key, job in worker.jobs.items()
                if entry_key[0] == self.kind
                and job.future.done()
                and (job is due_job or (not job.at_work and job.due_seconds <= until_seconds))
            }
        if self._due_jobs is None:
            self._replace(worker, due_job, replace(due_job))
            return
        try:
            with command.time_limit(_LOOKING_SECONDS):
                for job in self._due_jobs(_group_of(due_job.key)):
                    if (failed_job := remaining.pop(job.key, None)) is not None:
                        job.logged, job.failures = failed_job.logged, failed_job.failures
                        self._replace(worker, failed_job, job)
        except BaseException as error:
            self._log(due_job, error)
            with worker.guard:
                for old_job in remaining.values():
                    old_job.due_seconds = time.monotonic() + self.retry_seconds
        else:
            for old_job in remaining.values():
                worker.drop(self, old_job)
                self._clear_failed(old_job)

    def _replace(self, worker: "GroupWorker", failed_job: J, job: J) -> None:
        """Replace a failed job by a new one that is due at once.

        Nothing is done if a call has halted or forgotten the failed job meanwhile.
        """
        with worker.guard:
            entry_key = (self.kind, job.key)
            if worker.jobs.get(entry_key) is failed_job and entry_key not in worker.barred:
                job.due_seconds = -math.inf
                worker.enqueue(self, job)
                worker.guard.notify()

    def _log(self, job: J, error: BaseException) -> None:
        """Log an error of a job, unless the same error of the job was logged last."""
        if job.logged != (problem := reasons(error)):
            trace = None if isinstance(error, (*_EXPECTED, ExceptionGroup)) else error
            _log.log(self._level, self._failure_message, job.key, problem, exc_info=trace)
        job.logged = problem

    def _worker(self, key: str) -> "GroupWorker":
        return self._workers.of(_group_of(key))

    def _of(self, worker: "GroupWorker", key: str) -> J | None:
        return worker.jobs.get((self.kind, key))


class PeriodicJobs:
    """Work that is repeated at an interval in each of several volume groups, by one job for each.

    `groups` returns the present names of these groups. The job of a group that is no longer among
    these ends at its next run. `work` is called with a group's name `interval_seconds` after the
    start, then `interval_seconds` after each run, or at once after a run that returned True.
    `failure_message` is logged for a failed run, with %s for the group and for the error.
    """

    def __init__(
        self,
        workers: "GroupWorkers",
        kind: str,
        groups: Callable[[], Iterable[str]],
        work: Callable[[str], bool | None],
        interval_seconds: float,
        failure_message: str,
    ) -> None:
        self.kind, self._groups, self._work = kind, groups, work
        self._interval_seconds = interval_seconds
        self._jobs: Jobs[Job] = Jobs(
            workers, kind, self._steps, failure_message, urgent=True, retry_seconds=interval_seconds
        )

    @property
    def is_alive(self) -> bool:
        """Whether the work is repeated in any volume group."""
        return bool(self._jobs.unfinished())

    def failures(self) -> Mapping[str, int]:
        """Return the number of failed runs until now, by the names of the volume groups."""
        return {group: self._jobs.failures().get(group, 0) for group in self._groups()}

    def start(self) -> None:
        """Start the work in each volume group in which it is not repeated yet.

        The first run is after one interval. Raises RuntimeError if no thread can be started.
        """
        for group in self._groups():
            self._jobs.start(Job(group), self._interval_seconds)

    def stop(self) -> None:
        """Let no further run of the work begin; a run in progress continues."""
        for job in self._jobs.unfinished():
            self._jobs.forget(job.key)

    def _steps(self, job: Job) -> Steps:
        """Call `work` at the interval, while the job's volume group is among `groups`."""
        while job.key in self._groups():
            is_due = self._work(job.key)
            if job.failures:
                failures_text = counted(job.failures, "failure")
                _log.warning("%s %s: well again after %s", self.kind, job.key, failures_text)
            job.failures, job.logged = 0, ""
            yield AGAIN if is_due else self._interval_seconds


class _Task(NamedTuple):
    """A job together with the `Jobs` of its kind."""

    jobs: Jobs[Any]
    job: Any


class GroupWorker:
    """The background jobs of one volume group, and the threads that do these jobs.

    `guard` protects all fields. At any time at most one thread, the leader, runs the loop; further
    threads are in steps that take long. Without jobs there is no thread.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self.guard = threading.Condition()
        # The jobs that have not succeeded, by their kinds and keys.
        self.jobs: dict[tuple[str, str], Any] = {}
        # The number of calls that let no job begin, by the job's kind and key (`Jobs.halted`).
        self.barred: Counter[tuple[str, str]] = Counter()
        # The jobs that those calls have cancelled.
        self.halted: dict[tuple[str, str], Any] = {}
        self._kinds: dict[str, Jobs[Any]] = {}
        # The kinds and keys of the jobs whose steps are in progress, in the order in which the
        # steps began. If there are several, all but the last may hang.
        self._under_way: list[tuple[str, str]] = []
        self._threads: set[threading.Thread] = set()
        self._is_ending = False
        # The leader, and the start of the step that the leader does (monotonic, seconds); infinity
        # while the leader does no step.
        self._leader: threading.Thread | None = None
        self._since_seconds = math.inf
        self._choices, self._numbers, self._steps = count(), count(), count()

    def add(self, jobs: Jobs[J], job: J) -> None:
        """Add a background job, and start a thread for it if need be; the caller holds `guard`.

        Raises RuntimeError, with nothing added, if no thread can be started. While the service
        ends, the job is not added, but ended with Stopping.
        """
        if self._is_ending:
            job.end(Stopping(job.key))
            return
        self._ensure_thread()
        self.enqueue(jobs, job)
        self._relieve()
        self.guard.notify()

    def wake(self, jobs: Jobs[J], job: J, due_seconds: float) -> None:
        """Make a job due at a time (monotonic, seconds) or earlier, and add the job if need be.

        The caller holds `guard`. If no thread can be started, raises RuntimeError after the job was
        added. While the service ends, jobs of a kind with `survives_halt` (see `Jobs`) can still be
        woken.
        """
        if due_seconds >= job.due_seconds:
            return
        job.due_seconds = due_seconds
        if (jobs.kind, job.key) not in self.jobs:
            self.enqueue(jobs, job)
        if not self._is_ending:
            self._ensure_thread()
        self.guard.notify()

    def enqueue(self, jobs: Jobs[J], job: J) -> None:
        """Add a job to `jobs`, in place of a job of the same kind and key; start no thread."""
        self._kinds[jobs.kind] = jobs
        job.number = next(self._numbers)
        self.jobs[jobs.kind, job.key] = job

    def drop(self, jobs: Jobs[J], job: J) -> None:
        """Remove a job that has ended from `jobs`, unless another job has replaced it there."""
        with self.guard:
            if self.jobs.get((jobs.kind, job.key)) is job:
                del self.jobs[jobs.kind, job.key]

    def cancel(self, job: Job) -> None:
        """End a job that was removed from `jobs`: now, or at the end of its present step."""
        with self.guard:
            job.cancelled.set()
            if job.at_work:
                return
        job.end(Stopping(job.key))

    def replace_hanging_threads(self) -> None:
        """Start another thread for the volume group's background loop, if one is needed.

        That is if there are jobs and no thread runs the loop, or if the step in progress takes long
        and another step is due. If no thread can be started, nothing is done.
        """
        with self.guard, suppress(RuntimeError):
            if self._is_any_left():
                self._ensure_thread()
            self._relieve()

    def halt(self) -> None:
        """Cancel the volume group's jobs as `cancel_jobs` does, and let no job begin any more."""
        with self.guard:
            self._is_ending = True
        self.cancel_jobs()

    def cancel_jobs(self) -> None:
        """Cancel all jobs except those of kinds with `survives_halt`, which are due at once.

        Jobs that are added later begin when the step of the cancelled job with the same key, if
        one is in progress, has ended.
        """
        with self.guard:
            old_jobs = dict(self.jobs)
            self.jobs = {
                entry_key: job
                for entry_key, job in old_jobs.items()
                if self._kinds[entry_key[0]].survives_halt
            }
            for job in self.jobs.values():
                if job.due_seconds < math.inf:
                    job.due_seconds = -math.inf
            self.guard.notify_all()
        for entry_key, job in old_jobs.items():
            if entry_key not in self.jobs:
                self.cancel(job)

    def finish(self, until_seconds: float) -> bool:
        """Wait, after `halt`, for the end of all steps; return whether all have ended in time.

        Remaining steps of jobs with `survives_halt` that are due are done before. `until_seconds`
        is the time limit (monotonic).
        """
        with self.guard:
            with suppress(RuntimeError):
                if self._is_any_left():
                    self._ensure_thread()
            while self._leader is not None or self._under_way:
                if (left_seconds := until_seconds - time.monotonic()) <= 0:
                    return False
                self._relieve()
                self.guard.wait(min(left_seconds, _SLOW_SECONDS))
            return True

    def _is_any_left(self) -> bool:
        """Whether the loop needs a thread: if there are jobs.

        While the service ends, a thread is needed only if a job is due: the remaining jobs are
        those of a kind with `survives_halt` (see `Jobs`).
        """
        return bool(self._ready(time.monotonic()) if self._is_ending else self.jobs)

    def _ensure_thread(self) -> None:
        """Start a thread that runs the loop, if none does."""
        if self._leader is None:
            self._lead()

    def _lead(self) -> None:
        """Start a new thread and make it the leader, which runs the loop."""
        thread = threading.Thread(target=self._run, name=f"work {self.group}", daemon=True)
        thread.start()
        self._leader, self._since_seconds = thread, math.inf

    def _relieve(self) -> None:
        """Start a new leader if the present leader's step takes long and another step is due."""
        now_seconds = time.monotonic()
        is_slow = now_seconds - self._since_seconds >= _SLOW_SECONDS
        if is_slow and self._ready(now_seconds):
            with suppress(RuntimeError):
                self._lead()

    @property
    def is_own_thread(self) -> bool:
        """Whether the present thread is one of this loop's, so that the caller runs in a step."""
        return threading.current_thread() in self._threads

    def do_step_now(self, jobs: Jobs[J], job: J) -> bool:
        """Do the next step of a job in this thread, if the step is due and no thread does it.

        Returns whether a step was done.
        """
        with self.guard:
            is_here = self.jobs.get((jobs.kind, job.key)) is job and not job.future.done()
            if not is_here or job.at_work or job.due_seconds > time.monotonic():
                return False
            self._begin(task := _Task(jobs, job))
        self._do(task)
        return True

    def _run(self) -> None:
        """Run the loop while this thread is the leader; this is the function of each thread."""
        this_thread = threading.current_thread()
        with self.guard:
            self._threads.add(this_thread)
        while (task := self._next(this_thread)) is not None:
            try:
                self._do(task)
            except BaseException:
                # Log the error, which is a fault of the loop itself, and continue with other jobs.
                _log.exception("%s %s is not seen to", task.jobs.kind, task.job.key)
        with self.guard:
            self._threads.discard(this_thread)

    def _begin(self, task: _Task) -> None:
        """Note that a thread does a step of a job from now on; the caller holds `guard`."""
        task.job.at_work, task.job.due_seconds = True, math.inf
        task.job.last_step = next(self._steps)
        self._under_way.append((task.jobs.kind, task.job.key))

    def _do(self, task: _Task) -> None:
        """Do a step of a job, then end the job if it was cancelled during the step."""
        try:
            task.jobs.do_step(self, task.job)
        finally:
            with self.guard:
                task.job.at_work = False
                self._under_way.remove((task.jobs.kind, task.job.key))
                if is_called_off := task.job.cancelled.is_set():
                    task.job.due_seconds = math.inf
                # Wake the thread that runs the loop. It may be another thread by now, and may wait
                # for this job.
                self.guard.notify_all()
            if is_called_off:
                task.job.end(Stopping(task.job.key))

    def _next(self, this_thread: threading.Thread) -> _Task | None:
        """Wait for a job with a step that is due; note that the thread does the step.

        Returns the job, or None if the thread is no longer needed as the leader.
        """
        with self.guard:
            while self._leader is this_thread:
                now_seconds = time.monotonic()
                if ready_tasks := self._ready(now_seconds):
                    task = self._most_urgent(ready_tasks)
                    self._begin(task)
                    self._since_seconds = now_seconds
                    return task
                self._since_seconds = math.inf
                if not self._wait(now_seconds):
                    self._leader = None
                    self.guard.notify_all()
        return None

    def _wait(self, now_seconds: float) -> bool:
        """Wait until a step is due or `jobs` changes; return False if the thread is to end.

        The thread is to end when the service ends, or if there was no job for a minute.
        """
        if self._is_ending:
            return False
        if not self.jobs:
            return self.guard.wait(_IDLE_SECONDS) or bool(self.jobs)
        due_times = (job.due_seconds for job in self.jobs.values() if job.due_seconds > now_seconds)
        first_seconds = min(due_times, default=math.inf)
        self.guard.wait(None if first_seconds == math.inf else first_seconds - now_seconds)
        return True

    def _ready(self, now_seconds: float) -> list[_Task]:
        """Return the jobs of which a step can be done now.

        Left out are kinds of work of which two steps are in progress already: these may hang. A job
        waits until the step of an earlier, cancelled job with its kind and key has ended.
        """
        hanging = Counter(kind for kind, _ in self._under_way)
        return [
            _Task(self._kinds[entry_key[0]], job)
            for entry_key, job in self.jobs.items()
            if job.due_seconds <= now_seconds
            and entry_key not in self._under_way
            and hanging[entry_key[0]] < _MOST_HANGING
        ]

    def _most_urgent(self, ready_tasks: list[_Task]) -> _Task:
        """Return the job of which the next step is done.

        1. If there are urgent jobs, it is the urgent job that is due first.
        2. Otherwise these jobs are chosen in turn: the oldest job, the job with the fewest bytes
           left, and the job whose last step is longest ago. By the last choice each job gets a step
           in the end, whatever the other jobs are.
        """
        if urgent := [entry for entry in ready_tasks if entry.jobs.urgent]:
            return min(urgent, key=lambda entry: entry.job.due_seconds)
        match next(self._choices) % 3:
            case 0:
                return min(ready_tasks, key=lambda entry: (entry.job.left_bytes, entry.job.number))
            case 1:
                return min(ready_tasks, key=lambda entry: entry.job.number)
            case _:
                return min(ready_tasks, key=lambda entry: (entry.job.last_step, entry.job.number))


class GroupWorkers:
    """The background loops of all volume groups, by the groups' names."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._workers: dict[str, GroupWorker] = {}
        self._is_ending = False

    @property
    def is_ending(self) -> bool:
        """Whether the service ends, that is, `halt` was called."""
        return self._is_ending

    def of(self, group: str) -> GroupWorker:
        """Return the background loop of a volume group, made at its first use.

        The group need not be one that a device class of the configuration names. A loop that is
        made while the service ends begins no job.
        """
        with self._guard:
            if group not in self._workers:
                self._workers[group] = GroupWorker(group)
                if self._is_ending:
                    self._workers[group].halt()
            return self._workers[group]

    def find(self, group: str) -> GroupWorker | None:
        """Return the loop of a volume group if there is one: ids may name groups that are not."""
        with self._guard:
            return self._workers.get(group)

    def cancel_jobs(self, group: str) -> None:
        """Cancel the jobs of a volume group that no class names, at their next safe points.

        Jobs of a kind with `survives_halt` (see `Jobs`) are not cancelled. The loop stays: if a
        class names the group again, no job begins beside a step that is still in progress.
        """
        if (worker := self.find(group)) is not None:
            worker.cancel_jobs()
            worker.replace_hanging_threads()

    def every(self) -> list[GroupWorker]:
        """Return the loops of all volume groups that have one."""
        with self._guard:
            return list(self._workers.values())

    def replace_hanging_threads(self) -> None:
        """Start another thread for each volume group whose background loop needs one.

        That is a loop with jobs and no thread, or a loop whose step takes long while another step
        is due. The service has to call this every few seconds.
        """
        for worker in self.every():
            worker.replace_hanging_threads()

    def halt(self) -> None:
        """Cancel all background jobs at their next safe points, but those with `survives_halt`.

        Those jobs are done when the service ends (see `Jobs`).
        """
        self._is_ending = True
        for worker in self.every():
            worker.halt()

    def stop(self, seconds: float = _ENDING_SECONDS) -> None:
        """Cancel all jobs as `halt` does, and wait at most `seconds` for the end of all steps.

        That a volume group has a step that has not ended in time, as one that hangs, is logged.
        """
        self.halt()
        until_seconds = time.monotonic() + seconds
        for worker in self.every():
            if not worker.finish(until_seconds):
                _log.warning("volume group %s: background work has not ended in time", worker.group)


def _group_of(key: str) -> str:
    """Return the name of the volume group in the key of a job: a volume id or a group's name."""
    return re.split("[@/]", key)[0]


def _state(job: Job) -> str:
    """Return whether a job is queued, running or failed."""
    if job.future.done():
        # A job that has ended is a failed one, because jobs that succeeded are not kept.
        return "failed"
    return "queued" if job.steps is None and not job.at_work else "running"
