"""One loop for each volume group: it does all of the group's background work, a step at a time.

What is to be done stands in LVM's metadata, as tags. So a kind of work says which jobs are due in a
group by a fresh report (`due`), and does one of them step by step (`steps`); the loop takes the
most urgent job, does one step of it, and looks again. The loop is level-triggered, as the
reconcilers of Kubernetes' controllers are: a job is derived from the state and from no event, so a
start has only to look, and a job that failed is looked for again a minute later. Only if the state
still has it, it is begun anew, from the beginning.

Of jobs that are equally urgent the smallest and the oldest take turns: a small deletion does not
wait behind the copy of a terabyte, and what is large comes to its end. I/O to the disks is paced
within the steps (agent/work/pace.py). A step that takes longer than two seconds may hang: another
thread then goes on with the loop, and up to two steps of one kind are left behind so. A group waits
for no other group, as each has its own loop.

What cannot be done in steps is beside the loop, in agent/work/background.py: mkfs, and probes of
what may hang.
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

_log = logging.getLogger(__name__)

# Time limit of a step, after which another thread goes on with the loop of its group.
_SLOW_SECONDS = 2.0
# Number of steps of one kind that may hang in a group: where these hang, so would another.
_MOST_HANGING = 2
# Time after which the thread of a group without any job ends.
_IDLE_SECONDS = 60.0
# Time limit within which a job that is called off reaches a safe point, unless its disk hangs.
_ENDING_SECONDS = 10.0
# Time limit of the search for failed jobs of a group by its fresh state.
_LOOKING_SECONDS = 60.0
# Part of the retry interval within which failed jobs of a kind are retried together.
_TOGETHER = 0.1
# Errors that have a sentence of their own: their trace adds nothing.
_EXPECTED = (errors.AgentError, mount_errors.CommandError, OSError)

# The steps of a job. Each ends at a `yield`, a safe point, where the job can end for good: no lock,
# no turn of the pace and no time limit is held across it. What is yielded is after how many seconds
# the next step is due.
Steps = Iterator[float]
# What is yielded where the next step is due at once; other jobs have their turns first.
AGAIN = 0.0


class Stopping(errors.OperationPending):
    """The service ends, or the job was called off; the caller has to start it again."""


@dataclass(eq=False)
class Job:
    """Work on the volume, pool or group with the id `key`; `ended` has the outcome.

    `on_record`: tags record it, and its caller has had an answer, so the loop has to retry it.
    `size_bytes` is what it erases or copies.
    """

    key: str
    size_bytes: int = 0
    on_record: bool = True
    # The last error, which is not logged again, and how many there were in a row.
    logged: str = ""
    failures: int = 0
    # These are new where a job is begun anew.
    progress: Progress = field(default_factory=Progress, init=False)
    cancelled: threading.Event = field(default_factory=threading.Event, init=False)
    ended: Future[None] = field(default_factory=Future, init=False)
    # The loop's own: when the next step, or after a failure the retry, is due (monotonic, seconds);
    # the steps, once they have begun; whether a thread does one of them now; the place in the row.
    due_seconds: float = field(default=math.inf, init=False)
    steps: Steps | None = field(default=None, init=False)
    at_work: bool = field(default=False, init=False)
    number: int = field(default=0, init=False)

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended, or failed and is retried."""
        return self.on_record or not self.ended.done()

    @property
    def left_bytes(self) -> int:
        """What is left to be erased or copied."""
        return max(0, self.size_bytes - self.progress.done_bytes)

    def check(self) -> None:
        """Raise Stopping where the job has to end: while a step waits, and between two steps."""
        if self.cancelled.is_set():
            raise Stopping(self.key)

    def end(self, stopping: Stopping) -> None:
        """End at a safe point, for good; a job that has ended stays as it is."""
        if isinstance(self.steps, Generator):
            self.steps.close()
        with suppress(InvalidStateError):
            self.ended.set_exception(stopping)


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The jobs of one kind of work: one for each key, each done by the loop of its group.

    `steps` does a job; what needs one step alone is a plain function. `due` gives the jobs that are
    due in a group by its fresh state, each of which is taken before the next one is asked for, so
    that a lock may be held meanwhile. It raises where the state cannot tell, as where the group is
    not here. `gone` gets a failed job that the state does not have any more; without `due` a failed
    job is repeated as it was. `failure` is the log line of an error, with %s for the key and for
    the error. What is `urgent` goes before all else; what is `last` is still done when the service
    ends.
    """

    def __init__(
        self,
        workers: "GroupWorkers",
        kind: str,
        steps: Callable[[J], Steps | None],
        failure: str,
        *,
        due: Callable[[str], Iterable[J]] | None = None,
        gone: Callable[[J], None] = lambda _job: None,
        urgent: bool = False,
        last: bool = False,
        retry_seconds: float = 60.0,
        level: int = logging.ERROR,
    ) -> None:
        self.kind, self.steps, self.urgent, self.last = kind, steps, urgent, last
        self._workers, self._due, self._gone = workers, due, gone
        self._failure, self._level = failure, level
        # How long after a failure a job is retried; and after an outcome that is unknown, which the
        # fresh state shows.
        self.retry_seconds, self.soon_seconds = retry_seconds, 1.0
        self._failures: Counter[str] = Counter()

    def start(self, job: J, after_seconds: float = 0.0) -> J:
        """Have a job done, so much later; return the one under way for the same key, if any.

        Raises Stopping while a call has it halted, and RuntimeError where no thread can be had.
        Once the service ends no job begins: it has ended with Stopping.
        """
        worker = self._worker(job.key)
        with worker.guard:
            running = self._of(worker, job.key)
            if (self.kind, job.key) in worker.barred:
                raise Stopping(job.key)
            if running is not None and not running.ended.done():
                return running
            job.due_seconds = time.monotonic() + after_seconds if after_seconds else -math.inf
            worker.add(self, job)
            return job

    def wake(self, job: J, after_seconds: float) -> None:
        """Have the next step of a job, which is started if need be, done in so many seconds.

        A wake during a step has one more step follow. Where no thread can be had, that is logged,
        and it is done once there is one.
        """
        worker = self._worker(job.key)
        with worker.guard:
            running = self._of(worker, job.key) or job
            try:
                worker.wake(self, running, time.monotonic() + after_seconds)
            except RuntimeError as error:
                self._log(running, error)

    def wait(self, job: J, seconds: float) -> bool:
        """Wait so long for the end of a job; whether it has ended.

        A step of the same group, for which that would wait in vain, does the job itself meanwhile.
        """
        worker = self._worker(job.key)
        if not worker.is_own_thread:
            return bool(wait([job.ended], seconds).done)
        until_seconds = time.monotonic() + seconds
        while time.monotonic() < until_seconds and worker.do_now(self, job):
            pass
        return job.ended.done()

    def has(self, key: str) -> bool:
        """Whether a job for the key has not succeeded yet."""
        return self.of(key) is not None

    def of(self, key: str) -> J | None:
        """The job for the key that has not succeeded yet, if any."""
        worker = self._worker(key)
        with worker.guard:
            return self._of(worker, key)

    def unfinished(self) -> list[J]:
        """The jobs that have not succeeded yet."""
        found: list[J] = []
        for worker in self._workers.every():
            with worker.guard:
                found += (one for place, one in worker.jobs.items() if place[0] == self.kind)
        return found

    def progress(self) -> Mapping[str, str]:
        """How far jobs that have not succeeded yet are, by their keys."""
        return {one.key: str(one.progress) for one in self.unfinished()}

    def counts(self) -> Mapping[str, int]:
        """How many jobs have not begun, have begun, and failed and will be retried."""
        states = Counter(_state(one) for one in self.unfinished())
        return {state: states[state] for state in ("queued", "running", "failed")}

    def failures(self) -> Mapping[str, int]:
        """How many jobs of each group failed until now, retries included."""
        return dict(self._failures)

    @contextmanager
    def halted(self, key: str) -> Iterator[None]:
        """Call the job of a key off, and let none begin within the `with`.

        Raises Stopping where it does not end within ten seconds: then the disk does not answer.
        """
        worker, place = self._worker(key), (self.kind, key)
        try:
            with worker.guard:
                worker.barred[place] += 1
                job = self._of(worker, key)
                if job is not None:
                    job.cancelled.set()
                at_work = job is not None and job.at_work and not job.ended.done()
            if job is not None and at_work and not wait([job.ended], _ENDING_SECONDS).done:
                raise Stopping(key)
            self.forget(key)
            yield
        finally:
            with worker.guard:
                worker.barred[place] -= 1
                # Without those of zero.
                worker.barred = +worker.barred

    def forget(self, key: str) -> None:
        """Call the job of a key off for good; a step that is under way goes on to its end."""
        worker = self._worker(key)
        with worker.guard:
            job = worker.jobs.pop((self.kind, key), None)
        if job is not None:
            worker.call_off(job)

    def look(self, group: str) -> int:
        """Start all jobs that are due in a group by its fresh state; return how many are.

        Raises an ExceptionGroup, once each was tried.
        """
        found = 0
        with Attempts() as attempts, attempts.one():
            for job in () if self._due is None else self._due(group):
                with attempts.one():
                    self.start(job)
                found += 1
        return found

    def do_step(self, worker: "GroupWorker", job: J) -> None:
        """Do the next step of a job: called by the loop alone."""
        try:
            if job.ended.done():
                self._look_again(worker, job)
                return
            job.check()
            if job.steps is None:
                job.steps = iter(self.steps(job) or ())
            pause_seconds = next(job.steps)
        except StopIteration:
            worker.drop(self, job)
            job.ended.set_result(None)
        except BaseException as error:
            if isinstance(error, Stopping) and job.cancelled.is_set():
                job.end(error)
            else:
                self._fail(worker, job, error)
        else:
            with worker.guard:
                # Not later than a wake during the step asked for.
                due_seconds = time.monotonic() + pause_seconds
                job.due_seconds = min(job.due_seconds, due_seconds)

    def _fail(self, worker: "GroupWorker", job: J, error: BaseException) -> None:
        # Once: an outcome that stays unknown is not cleared up by the state.
        is_doubt = isinstance(error, mount_errors.OutcomeUnknown) and not job.logged
        seconds = self.soon_seconds if is_doubt else self.retry_seconds
        self._failures[_group_of(job.key)] += 1
        job.failures += 1
        self._log(job, error)
        # First: a call that has it put on record meanwhile finds that it ended, or it is retried.
        job.ended.set_exception(error)
        with worker.guard:
            # A wake during the step has it retried sooner.
            if job.on_record:
                job.due_seconds = min(job.due_seconds, time.monotonic() + seconds)

    def _look_again(self, worker: "GroupWorker", failed: J) -> None:
        """Begin failed jobs of a group anew where the fresh state has them still, else drop them.

        One look does for all that are due soon.
        """
        until_seconds = time.monotonic() + _TOGETHER * self.retry_seconds
        with worker.guard:
            left = {
                one.key: one
                for place, one in worker.jobs.items()
                if place[0] == self.kind
                and one.ended.done()
                and (one is failed or (not one.at_work and one.due_seconds <= until_seconds))
            }
        if self._due is None:
            self._replace(worker, failed, replace(failed))
            return
        try:
            with command.time_limit(_LOOKING_SECONDS):
                for job in self._due(_group_of(failed.key)):
                    if (before := left.pop(job.key, None)) is not None:
                        job.logged, job.failures = before.logged, before.failures
                        self._replace(worker, before, job)
        except BaseException as error:
            self._log(failed, error)
            with worker.guard:
                for one in left.values():
                    one.due_seconds = time.monotonic() + self.retry_seconds
        else:
            for one in left.values():
                worker.drop(self, one)
                self._gone(one)

    def _replace(self, worker: "GroupWorker", before: J, job: J) -> None:
        """Put a job in the place of a failed one; not where a call halted that, and forgets it."""
        with worker.guard:
            place = (self.kind, job.key)
            if worker.jobs.get(place) is before and place not in worker.barred:
                job.due_seconds = -math.inf
                worker.put(self, job)
                worker.guard.notify()

    def _log(self, job: J, error: BaseException) -> None:
        if job.logged != (problem := reasons(error)):
            trace = None if isinstance(error, (*_EXPECTED, ExceptionGroup)) else error
            _log.log(self._level, self._failure, job.key, problem, exc_info=trace)
        job.logged = problem

    def _worker(self, key: str) -> "GroupWorker":
        return self._workers.of(_group_of(key))

    def _of(self, worker: "GroupWorker", key: str) -> J | None:
        return worker.jobs.get((self.kind, key))


class Looks:
    """Work that is repeated in each of some groups: one job for each.

    `groups` gives their names at each moment; the job of a group that is no longer among them ends
    at its next look. `look` is called `interval_seconds` after the start, then so long after each
    call, or at once where it returns True. `failure` is logged with %s for the group and the error.
    """

    def __init__(
        self,
        workers: "GroupWorkers",
        kind: str,
        groups: Callable[[], Iterable[str]],
        look: Callable[[str], bool | None],
        interval_seconds: float,
        failure: str,
    ) -> None:
        self.kind, self._groups, self._look = kind, groups, look
        self._interval_seconds = interval_seconds
        self._jobs: Jobs[Job] = Jobs(
            workers, kind, self._steps, failure, urgent=True, retry_seconds=interval_seconds
        )

    @property
    def is_alive(self) -> bool:
        """Whether any group is looked at."""
        return bool(self._jobs.unfinished())

    def failures(self) -> Mapping[str, int]:
        """How many looks failed until now, by the group."""
        return {one: self._jobs.failures().get(one, 0) for one in self._groups()}

    def start(self) -> None:
        """Begin in each group where it has not begun, after the interval.

        Raises RuntimeError where no thread can be had.
        """
        for one in self._groups():
            self._jobs.start(Job(one), self._interval_seconds)

    def stop(self) -> None:
        """Begin no further look; one that is under way goes on."""
        for one in self._jobs.unfinished():
            self._jobs.forget(one.key)

    def _steps(self, job: Job) -> Steps:
        while job.key in self._groups():
            is_due = self._look(job.key)
            if job.failures:
                _log.warning(
                    "%s %s: well again after %d failures", self.kind, job.key, job.failures
                )
            job.failures, job.logged = 0, ""
            yield AGAIN if is_due else self._interval_seconds


class _Found(NamedTuple):
    """A job with its kind."""

    kind: Jobs[Any]
    job: Any


class GroupWorker:
    """The jobs of one group, and the thread that does them; `guard` is held for all of it."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.guard = threading.Condition()
        # By kind and key: the jobs that have not succeeded, and how many calls have each halted.
        self.jobs: dict[tuple[str, str], Any] = {}
        self.barred: Counter[tuple[str, str]] = Counter()
        self._kinds: dict[str, Jobs[Any]] = {}
        # The kinds of the steps that are under way: of more than one, all but the last may hang.
        self._under_way: list[str] = []
        self._threads: set[threading.Thread] = set()
        self._is_ending = False
        # The thread that goes on with the loop, and since when it does a step (monotonic, seconds).
        self._leader: threading.Thread | None = None
        self._since_seconds = math.inf
        self._turns, self._numbers = count(), count()

    def add(self, kind: Jobs[J], job: J) -> None:
        """Add a job; raises RuntimeError, with nothing added, where no thread can be had."""
        if self._is_ending:
            job.end(Stopping(job.key))
            return
        self._ensure_thread()
        self.put(kind, job)
        self._relieve()
        self.guard.notify()

    def wake(self, kind: Jobs[J], job: J, due_seconds: float) -> None:
        """Have a job done then, or earlier; it is added if need be. Raises as `add` does, after it.

        Until the end of the service, also what is done last is woken.
        """
        if due_seconds >= job.due_seconds:
            return
        job.due_seconds = due_seconds
        if (kind.kind, job.key) not in self.jobs:
            self.put(kind, job)
        if not self._is_ending:
            self._ensure_thread()
        self.guard.notify()

    def put(self, kind: Jobs[J], job: J) -> None:
        """Put a job in its place, also where no thread does it yet."""
        self._kinds[kind.kind] = kind
        job.number = next(self._numbers)
        self.jobs[kind.kind, job.key] = job

    def drop(self, kind: Jobs[J], job: J) -> None:
        """Take a job away that is over, unless there is another in its place by now."""
        with self.guard:
            if self.jobs.get((kind.kind, job.key)) is job:
                del self.jobs[kind.kind, job.key]

    def call_off(self, job: Job) -> None:
        """Have a job end that has no place any more: now, or at the end of its step."""
        with self.guard:
            job.cancelled.set()
            if job.at_work:
                return
        job.end(Stopping(job.key))

    def oversee(self) -> None:
        """Have another thread go on where a step takes long, or there is none."""
        with self.guard, suppress(RuntimeError):
            if self._is_any_left():
                self._ensure_thread()
            self._relieve()

    def halt(self) -> None:
        """Call all jobs off but those that are done last, which are due now; let none begin."""
        with self.guard:
            self._is_ending = True
            every = dict(self.jobs)
            self.jobs = {place: one for place, one in every.items() if self._kinds[place[0]].last}
            for one in self.jobs.values():
                if one.due_seconds < math.inf:
                    one.due_seconds = -math.inf
            self.guard.notify_all()
        for place, one in every.items():
            if place not in self.jobs:
                self.call_off(one)

    def finish(self, until_seconds: float) -> bool:
        """After `halt`, wait until then (monotonic) for the end of all steps; whether it came."""
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
        """Whether a thread is needed: for what is due last alone, once the service ends."""
        return bool(self._ready(time.monotonic()) if self._is_ending else self.jobs)

    def _ensure_thread(self) -> None:
        if self._leader is None:
            self._lead()

    def _lead(self) -> None:
        thread = threading.Thread(target=self._run, name=f"work {self.group}", daemon=True)
        thread.start()
        self._leader, self._since_seconds = thread, math.inf

    def _relieve(self) -> None:
        """Let another thread lead where a step takes long, and there is something to do."""
        now_seconds = time.monotonic()
        is_slow = now_seconds - self._since_seconds >= _SLOW_SECONDS
        if is_slow and self._ready(now_seconds):
            with suppress(RuntimeError):
                self._lead()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is a step of this loop."""
        return threading.current_thread() in self._threads

    def do_now(self, kind: Jobs[J], job: J) -> bool:
        """Do the next step of a job if it is due, and no thread does it; whether it was done."""
        with self.guard:
            is_here = self.jobs.get((kind.kind, job.key)) is job and not job.ended.done()
            if not is_here or job.at_work or job.due_seconds > time.monotonic():
                return False
            self._begin(found := _Found(kind, job))
        self._do(found)
        return True

    def _run(self) -> None:
        me = threading.current_thread()
        with self.guard:
            self._threads.add(me)
        while (found := self._next(me)) is not None:
            try:
                self._do(found)
            except BaseException:
                # A mistake of the loop itself; it goes on with the other jobs.
                _log.exception("%s %s is not seen to", found.kind.kind, found.job.key)
        with self.guard:
            self._threads.discard(me)

    def _begin(self, found: _Found) -> None:
        found.job.at_work, found.job.due_seconds = True, math.inf
        self._under_way.append(found.kind.kind)

    def _do(self, found: _Found) -> None:
        try:
            found.kind.do_step(self, found.job)
        finally:
            with self.guard:
                found.job.at_work = False
                self._under_way.remove(found.kind.kind)
                if is_called_off := found.job.cancelled.is_set():
                    found.job.due_seconds = math.inf
                # The leader, which may be another by now, may wait for just that job.
                self.guard.notify_all()
            if is_called_off:
                found.job.end(Stopping(found.job.key))

    def _next(self, me: threading.Thread) -> _Found | None:
        """Wait for the job that is due next; None where the thread is no longer needed."""
        with self.guard:
            while self._leader is me:
                now_seconds = time.monotonic()
                if ready := self._ready(now_seconds):
                    found = self._most_urgent(ready)
                    self._begin(found)
                    self._since_seconds = now_seconds
                    return found
                self._since_seconds = math.inf
                if not self._wait(now_seconds):
                    self._leader = None
                    self.guard.notify_all()
        return None

    def _wait(self, now_seconds: float) -> bool:
        """Wait until something is due, or changes; False where the thread may end."""
        if self._is_ending:
            return False
        if not self.jobs:
            return self.guard.wait(_IDLE_SECONDS) or bool(self.jobs)
        due = (one.due_seconds for one in self.jobs.values() if one.due_seconds > now_seconds)
        first_seconds = min(due, default=math.inf)
        self.guard.wait(None if first_seconds == math.inf else first_seconds - now_seconds)
        return True

    def _ready(self, now_seconds: float) -> list[_Found]:
        """The jobs of which a step can be done now."""
        return [
            _Found(self._kinds[kind], one)
            for (kind, _), one in self.jobs.items()
            if one.due_seconds <= now_seconds
            and not one.at_work
            and self._under_way.count(kind) < _MOST_HANGING
        ]

    def _most_urgent(self, ready: list[_Found]) -> _Found:
        if urgent := [one for one in ready if one.kind.urgent]:
            return min(urgent, key=lambda one: one.job.due_seconds)
        if next(self._turns) % 2:
            return min(ready, key=lambda one: one.job.number)
        return min(ready, key=lambda one: (one.job.left_bytes, one.job.number))


class GroupWorkers:
    """The loops of all groups, by the groups' names."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._workers: dict[str, GroupWorker] = {}
        self._is_ending = False

    @property
    def is_ending(self) -> bool:
        """Whether the service ends."""
        return self._is_ending

    def of(self, group: str) -> GroupWorker:
        """The loop of a group, also of one that no class names."""
        with self._guard:
            if group not in self._workers:
                self._workers[group] = GroupWorker(group)
            return self._workers[group]

    def let_go(self, group: str) -> None:
        """Call the jobs of a group off at their next safe points, but those that are done last.

        A call that names the group later begins a new loop.
        """
        with self._guard:
            worker = self._workers.pop(group, None)
        if worker is not None:
            worker.halt()
            worker.oversee()

    def every(self) -> list[GroupWorker]:
        """The loops of all groups that were ever asked for."""
        with self._guard:
            return list(self._workers.values())

    def oversee(self) -> None:
        """Have another thread go on where a step takes long; call it every few seconds.

        Also where no thread could be had.
        """
        for one in self.every():
            one.oversee()

    def halt(self) -> None:
        """Call all jobs off at their next safe points, but those that are done last."""
        self._is_ending = True
        for one in self.every():
            one.halt()

    def stop(self, seconds: float = _ENDING_SECONDS) -> None:
        """Call all jobs off, and wait so long for that; a step that hangs is left behind."""
        self.halt()
        until_seconds = time.monotonic() + seconds
        for one in self.every():
            if not one.finish(until_seconds):
                _log.warning("volume group %s: background work has not ended in time", one.group)


def _group_of(key: str) -> str:
    return re.split("[@/]", key)[0]


def _state(job: Job) -> str:
    if job.ended.done():
        # A job that succeeded is not kept.
        return "failed"
    return "queued" if job.steps is None and not job.at_work else "running"
