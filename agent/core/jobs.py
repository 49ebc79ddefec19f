"""Work that goes on behind the answers: a few jobs at a time, ended at a safe point, tried again.

What has to survive the process is on record elsewhere, as tags; here is only what runs now.
"""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agent.core import errors
from mount import command
from mount.errors import CommandError, OutcomeUnknown

_log = logging.getLogger(__name__)

# A job that was called off is at a safe point by then, unless the disk hangs.
_ENDING_SECONDS = 10.0
# How long a group is waited for, of which several are to be tried again.
_LOOKING_SECONDS = 60.0
# Of the pause before that: who would be tried within it is tried at once, by the same look.
_TOGETHER = 0.1
# What keeps a group from being looked at at all; who asks next for another volume meets it, too.
_OF_THE_GROUP = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.TooManyCalls),
    *(errors.Starting, errors.NotReady, CommandError),
)


class Stopping(errors.OperationPending):
    """The service ends, or the job was called off; who needs it done starts it again."""


@dataclass
class Job:
    """A piece of work on what has the id `key`, such as a volume; `ended` says how it came out.

    What is on record has been answered, so that nobody else will ask for it again.
    """

    key: str
    on_record: bool = True
    running: bool = False
    # How it failed last: the same again each minute is told once.
    told: str = ""
    called_off: threading.Event = field(default_factory=threading.Event)
    ended: Future[None] = field(default_factory=Future)


J = TypeVar("J", bound=Job)


class TaskQueue(Generic[J]):
    """Jobs of one kind: `work` does one, and one that fails is logged in the words of `failure`.

    If it is on record it is tried again: `find` tells by a fresh look what is to be done under a
    key then, and raises NoSuchVolume where nothing is, which alone ends it. Those of one group are
    tried together, so that one look tells of all. `workers` are so many for each group.
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
        # The same where it is not known what a command did, which a look can tell.
        self.soon_seconds = 1.0
        self._stopping = threading.Event()
        self._workers = _Workers(kind, workers)
        self._guard = threading.Lock()
        self._jobs: dict[str, J] = {}
        self._barred: set[str] = set()
        # Those that failed, by group and key, with when they are due (monotonic, seconds).
        self._failed: dict[str, dict[str, tuple[float, J]]] = {}
        self._fails = threading.Condition(self._guard)
        # The groups of which a thread tries those again.
        self._tried: set[str] = set()

    def start(self, job: J) -> J:
        """Have a job done; where one for the same volume is under way, it is that one.

        Nothing begins once the service stops. Raises Stopping for a volume whose jobs were called
        off.
        """
        with self._guard:
            if job.key in self._barred:
                raise Stopping(job.key)
            running = self._jobs.get(job.key)
            if running is not None and not running.ended.done():
                return running
            return self._submit(job)

    def has(self, key: str) -> bool:
        """Whether there is a job for the volume that has not succeeded yet."""
        with self._guard:
            return key in self._jobs

    def of(self, key: str) -> J | None:
        """The job for the volume, if one was begun that has not succeeded yet."""
        with self._guard:
            return self._jobs.get(key)

    def check(self, job: J) -> None:
        """Raise Stopping where the job shall end; to be asked at every safe point."""
        if self._stopping.is_set() or job.called_off.is_set():
            raise Stopping(job.key)

    def call_off(self, key: str) -> None:
        """End the volume's job, and let none begin until `allow`.

        Raises Stopping where it does not end soon: then the disk does not answer.
        """
        with self._guard:
            self._barred.add(key)
            job = self._jobs.get(key)
        if job is not None:
            job.called_off.set()
            if job.running and not wait([job.ended], _ENDING_SECONDS).done:
                raise Stopping(key)
        self.forget(key)

    def allow(self, key: str) -> None:
        """Jobs for the volume may begin again."""
        with self._guard:
            self._barred.discard(key)

    def forget(self, key: str) -> J | None:
        """Another volume has the id now: the job for an earlier one ends at its next safe point."""
        with self._guard:
            job = self._jobs.pop(key, None)
        if job is not None:
            job.called_off.set()
        return job

    def try_again(self, failed: J) -> None:
        """Do it once more, later, unless it was done until then.

        Raises RuntimeError where no thread can be had for that.
        """
        self._try_in(self.retry_seconds, failed)

    def _try_in(self, seconds: float, failed: J) -> None:
        group = _group_of(failed.key)
        with self._fails:
            if self._stopping.is_set():
                return
            due_seconds = time.monotonic() + seconds
            self._failed.setdefault(group, {})[failed.key] = (due_seconds, failed)
            if group in self._tried:
                self._fails.notify_all()
                return
            threading.Thread(
                target=self._try_failed, args=[group], name=f"again {group}", daemon=True
            ).start()
            self._tried.add(group)

    def _try_failed(self, group: str) -> None:
        """Try those of a group when they are due, until none is left."""
        try:
            while due := self._due(group):
                self._look_again(*due)
        except BaseException:
            with self._fails:
                self._tried.discard(group)
            raise

    def _due(self, group: str) -> list[J]:
        """Wait for those that are to be tried next; none where none is left, or it all ends."""
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
            self._tried.discard(group)
            return []

    def counts(self) -> Mapping[str, int]:
        """How many jobs wait for a worker, are under way, and failed and will be tried again."""
        with self._guard:
            states = Counter(_state(job) for job in self._jobs.values())
        return {state: states[state] for state in ("queued", "running", "failed")}

    def stop(self) -> None:
        """End at the next safe point."""
        with self._fails:
            self._stopping.set()
            self._fails.notify_all()
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: J) -> None:
        job.running = True
        try:
            self.check(job)
            self._work(job)
        except Stopping as stopping:
            job.ended.set_exception(stopping)
        except Exception as error:
            # Once: what comes out so again and again is no doubt that a look ends.
            is_first_doubt = isinstance(error, OutcomeUnknown) and not job.told
            self._tell(job, error)
            job.ended.set_exception(error)
            if job.on_record:
                self._try_later(self.soon_seconds if is_first_doubt else self.retry_seconds, job)
        else:
            self._drop(job)
            job.ended.set_result(None)

    def _try_later(self, seconds: float, failed: J) -> None:
        try:
            self._try_in(seconds, failed)
        except RuntimeError:
            # No thread can be had: this one waits for it, then. Nobody else would try it again.
            group = _group_of(failed.key)
            with self._fails:
                self._tried.add(group)
            self._try_failed(group)

    def _look_again(self, *failed: J) -> None:
        """The disk may answer again, or volumes be gone, or have been done since: of one group."""
        left = [one for one in failed if self.of(one.key) is one]
        found: list[tuple[J, J]] = []
        later: list[J] = []
        # All are looked for before one is begun, which changes the group: it is looked at once.
        with command.time_limit(_LOOKING_SECONDS):
            while left:
                one = left.pop(0)
                try:
                    found.append((one, self._find(one.key)))
                except errors.NoSuchVolume:
                    self._drop(one)
                except Exception as error:
                    self._tell(one, error)
                    if isinstance(error, _OF_THE_GROUP):
                        # Another is the first next time, should it be this one's fault alone.
                        later, left = [*later, *left], []
                    later.append(one)
        for one, job in found:
            try:
                self._begin_again(one, job)
            except RuntimeError as error:
                self._tell(one, error)
                later.append(one)
        for one in later:
            self.try_again(one)

    def _begin_again(self, failed: J, job: J) -> None:
        job.told = failed.told
        with self._guard:
            if self._jobs.get(failed.key) is failed:
                self._submit(job)

    def _tell(self, job: J, error: Exception) -> None:
        if job.told != str(error):
            _log.error(self._failure, job.key, error)
        job.told = str(error)

    def _submit(self, job: J) -> J:
        """Have a worker do it; raises RuntimeError, and nothing is begun, where none can be had."""
        before = self._jobs.get(job.key)
        self._jobs[job.key] = job
        if self._stopping.is_set():
            return job
        try:
            self._workers.submit(job.key, self._run, job)
        except RuntimeError:
            # The pool may come to it for all that, when it has a thread.
            job.called_off.set()
            del self._jobs[job.key]
            if before is not None:
                self._jobs[job.key] = before
            raise
        return job

    def _drop(self, job: J) -> None:
        with self._guard:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]


class _Workers:
    """A few threads for each volume group: one whose disk hangs keeps no other's jobs waiting."""

    def __init__(self, kind: str, each: int) -> None:
        self._kind, self._each = kind, each
        self._of: dict[str, ThreadPoolExecutor] = {}

    def submit(self, key: str, work: Callable[[J], None], job: J) -> None:
        """Have a thread of the key's group do it; the caller holds the guard of the jobs."""
        group = _group_of(key)
        if group not in self._of:
            self._of[group] = ThreadPoolExecutor(self._each, f"{self._kind} {group}")
        self._of[group].submit(work, job)

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Begin no more; those that are at work end first where it is waited for."""
        for one in list(self._of.values()):
            one.shutdown(wait=wait, cancel_futures=cancel_futures)


def _group_of(key: str) -> str:
    return re.split("[@/]", key)[0]


def _state(job: Job) -> str:
    if job.ended.done():
        # One that succeeded is not kept.
        return "failed"
    return "running" if job.running else "queued"
