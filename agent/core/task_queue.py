"""Retry queue: background jobs on volumes, a few at a time, stopped at safe points, retried.

Tags record what has to survive the process; a queue holds only what runs now.
"""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agent.core import errors
from agent.core.pace import Progress
from mount import command
from mount.errors import CommandError, OutcomeUnknown

_log = logging.getLogger(__name__)

# Jobs with more are long: two of them must not keep a short one waiting for hours.
LONG_BYTES = 4 << 30
# A cancelled job is at a safe point by then, unless the disk hangs.
_ENDING_SECONDS = 10.0
# How long `find` may take for all jobs of a group that are retried together.
_LOOKING_SECONDS = 60.0
# Jobs that are due within this part of the retry interval are retried together.
_TOGETHER = 0.1
# Errors of the whole group: `find` would raise them for its other volumes, too.
_OF_THE_GROUP = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.TooManyCalls),
    *(errors.Starting, errors.NotReady, CommandError),
)


class Stopping(errors.OperationPending):
    """The service ends, or the job was cancelled; the caller has to start it again."""


@dataclass
class Job:
    """Work on the volume, pool or group with the id `key`; `ended` has the outcome.

    `on_record`: tags record it, and its caller has had an answer, so the queue has to retry it.
    `size_bytes` is what it erases or copies; long jobs have workers of their own.
    """

    key: str
    size_bytes: int = 0
    on_record: bool = True
    running: bool = False
    progress: Progress = field(default_factory=Progress)
    # The last error: the same again is not logged again.
    logged: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: Future[None] = field(default_factory=Future)

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended, or failed and is retried."""
        return self.on_record or not self.ended.done()


J = TypeVar("J", bound=Job)


class TaskQueue(Generic[J]):
    """Jobs of one kind, one for each key: `work` does one; `failure` is the log line of an error.

    A failed job that is on record is retried: `find` gives the job that is due for a key by the
    fresh state, and raises NoSuchVolume where nothing is, which alone ends the retries. Failed jobs
    of one group are retried together, by one state. `workers` run at once for each group, and as
    many long ones beside them.
    """

    def __init__(
        self,
        kind: str,
        work: Callable[[J], None],
        find: Callable[[str], J],
        failure: str,
        *,
        workers: int,
    ) -> None:
        self._work = work
        self._find = find
        self._failure = failure
        self.retry_seconds = 60.0
        # Where the outcome of a command is unknown, which the fresh state shows.
        self.soon_seconds = 1.0
        self._stopping = threading.Event()
        self._kind, self._workers = kind, workers
        # A few threads for each group: a disk that hangs delays no other group's jobs.
        self._pools: dict[tuple[str, bool], ThreadPoolExecutor] = {}
        self._guard = threading.Lock()
        self._jobs: dict[str, J] = {}
        # By key, how many calls have halted it: a call may do so within another.
        self._barred: Counter[str] = Counter()
        # Failed jobs by group and key, with when they are due (monotonic, seconds).
        self._failed: dict[str, dict[str, tuple[float, J]]] = {}
        self._fails = threading.Condition(self._guard)
        # The groups that have a retry thread.
        self._retried: set[str] = set()

    def start(self, job: J) -> J:
        """Queue a job; return the one under way for the same key, if any.

        Nothing begins once the service stops. Raises Stopping for a volume whose jobs were
        cancelled.
        """
        with self._guard:
            running = self._jobs.get(job.key)
            if running is None or running.ended.done() or job.key in self._barred:
                return self._submit(job)
            return running

    def has(self, key: str) -> bool:
        """Whether a job for the volume has not succeeded yet."""
        with self._guard:
            return key in self._jobs

    def of(self, key: str) -> J | None:
        """The job for the volume that has not succeeded yet, if any."""
        with self._guard:
            return self._jobs.get(key)

    def unfinished(self) -> list[J]:
        """The jobs that have not succeeded yet."""
        with self._guard:
            return list(self._jobs.values())

    def progress(self) -> Mapping[str, str]:
        """How far jobs that have not succeeded yet are, by their keys."""
        with self._guard:
            return {key: str(job.progress) for key, job in self._jobs.items()}

    def check(self, job: J) -> None:
        """Raise Stopping where the job has to end; called at every safe point."""
        if self._stopping.is_set() or job.cancelled.is_set():
            raise Stopping(job.key)

    @contextmanager
    def halted(self, key: str) -> Iterator[None]:
        """Cancel the volume's job, and let none begin within the `with`.

        Raises Stopping where it does not end within ten seconds: then the disk does not answer.
        """
        try:
            with self._guard:
                self._barred[key] += 1
                job = self._jobs.get(key)
            if job is not None:
                job.cancelled.set()
                if job.running and not wait([job.ended], _ENDING_SECONDS).done:
                    raise Stopping(key)
            self.forget(key)
            yield
        finally:
            with self._guard:
                self._barred[key] -= 1
                # Without those of zero.
                self._barred = +self._barred

    def forget(self, key: str) -> J | None:
        """Drop the job of an earlier volume with the id; it ends at its next safe point."""
        with self._guard:
            job = self._jobs.pop(key, None)
        if job is not None:
            job.cancelled.set()
        return job

    def retry(self, failed: J, seconds: float | None = None) -> None:
        """Retry a job after so long, by default `retry_seconds`, unless it was done until then.

        Raises RuntimeError where no thread can be had.
        """
        group = _group_of(failed.key)
        with self._fails:
            if self._stopping.is_set():
                return
            due_seconds = time.monotonic() + (self.retry_seconds if seconds is None else seconds)
            self._failed.setdefault(group, {})[failed.key] = (due_seconds, failed)
            if group in self._retried:
                self._fails.notify_all()
                return
            threading.Thread(
                target=self._retry_failed, args=[group], name=f"again {group}", daemon=True
            ).start()
            self._retried.add(group)

    def _retry_failed(self, group: str) -> None:
        """Retry failed jobs of a group when they are due, until none is left."""
        try:
            while due := self._due(group):
                self._retry_now(*due)
        except BaseException:
            with self._fails:
                self._retried.discard(group)
            raise

    def _due(self, group: str) -> list[J]:
        """Wait for the jobs that are due next; none where none is left, or the service ends."""
        with self._fails:
            while (failed := self._failed.get(group)) and not self._stopping.is_set():
                first_seconds = min(due for due, _ in failed.values())
                if (wait_seconds := first_seconds - time.monotonic()) > 0:
                    self._fails.wait(wait_seconds)
                    continue
                until_seconds = first_seconds + _TOGETHER * self.retry_seconds
                due = [job for at, job in failed.values() if at <= until_seconds]
                for job in due:
                    del failed[job.key]
                return due
            self._retried.discard(group)
            return []

    def counts(self) -> Mapping[str, int]:
        """How many jobs wait for a worker, run, and failed and will be retried."""
        with self._guard:
            states = Counter(_state(job) for job in self._jobs.values())
        return {state: states[state] for state in ("queued", "running", "failed")}

    def stop(self) -> None:
        """End all jobs at their next safe point, and wait for that."""
        with self._fails:
            self._stopping.set()
            self._fails.notify_all()
        self.shutdown(cancel_futures=True)

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Take no more jobs, and wait for those at work, and those queued unless cancelled."""
        for one in list(self._pools.values()):
            one.shutdown(cancel_futures=cancel_futures)

    def _run(self, job: J) -> None:
        job.running = True
        try:
            self.check(job)
            self._work(job)
        except Stopping as stopping:
            job.ended.set_exception(stopping)
        except Exception as error:
            # Once: an outcome that stays unknown is not cleared up by the state.
            is_first_doubt = isinstance(error, OutcomeUnknown) and not job.logged
            self._log(job, error)
            job.ended.set_exception(error)
            if job.on_record:
                self._retry_surely(job, self.soon_seconds if is_first_doubt else None)
        else:
            self._drop(job)
            job.ended.set_result(None)

    def _retry_surely(self, failed: J, seconds: float | None) -> None:
        try:
            self.retry(failed, seconds)
        except RuntimeError:
            # No thread can be had: this one retries, as no other would.
            group = _group_of(failed.key)
            with self._fails:
                self._retried.add(group)
            self._retry_failed(group)

    def _retry_now(self, *failed: J) -> None:
        """Retry jobs of one group by its fresh state: a volume may be gone, or done, by now."""
        left = [one for one in failed if self.of(one.key) is one]
        found: list[tuple[J, J]] = []
        later: list[J] = []
        # Find all before one begins and changes the group: one state does for all.
        with command.time_limit(_LOOKING_SECONDS):
            while left:
                one = left.pop(0)
                try:
                    found.append((one, self._find(one.key)))
                except errors.NoSuchVolume:
                    self._drop(one)
                except Exception as error:
                    self._log(one, error)
                    if isinstance(error, _OF_THE_GROUP):
                        # Another is first next time, should this one alone cause it.
                        later, left = [*later, *left], []
                    later.append(one)
        for one, job in found:
            job.logged = one.logged
            try:
                with self._guard:
                    if self._jobs.get(one.key) is one:
                        self._submit(job)
            except Stopping:
                # The call that halted it forgets it.
                later.append(one)
            except RuntimeError as error:
                self._log(one, error)
                later.append(one)
        for one in later:
            self.retry(one)

    def _log(self, job: J, error: Exception) -> None:
        if job.logged != str(error):
            _log.error(self._failure, job.key, error)
        job.logged = str(error)

    def _submit(self, job: J) -> J:
        """Give it to a worker.

        Begins nothing, and raises Stopping where a call halted what has its key, or RuntimeError
        where no worker can be had.
        """
        if job.key in self._barred:
            raise Stopping(job.key)
        before = self._jobs.get(job.key)
        self._jobs[job.key] = job
        if self._stopping.is_set():
            return job
        try:
            lane = group, _ = _group_of(job.key), job.size_bytes > LONG_BYTES
            if lane not in self._pools:
                self._pools[lane] = ThreadPoolExecutor(self._workers, f"{self._kind} {group}")
            self._pools[lane].submit(self._run, job)
        except RuntimeError:
            # The pool keeps it, and may come to it when it has a thread.
            job.cancelled.set()
            del self._jobs[job.key]
            if before is not None:
                self._jobs[job.key] = before
            raise
        return job

    def _drop(self, job: J) -> None:
        with self._guard:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]


def _group_of(key: str) -> str:
    return re.split("[@/]", key)[0]


def _state(job: Job) -> str:
    if job.ended.done():
        # A job that succeeded is not kept.
        return "failed"
    return "running" if job.running else "queued"
