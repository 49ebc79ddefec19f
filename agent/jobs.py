"""Work that goes on behind the answers: a few jobs at a time, ended at a safe point, tried again.

What has to survive the process is on record elsewhere, as tags; here is only what runs now.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agent import errors

# A job that was called off is at a safe point by then, unless the disk hangs.
_ENDING_SECONDS = 10.0


class Stopping(errors.OperationPending):
    """The service ends, or the job was called off; who needs it done starts it again."""


@dataclass
class Job:
    """A piece of work on the volume with the id `key`; `ended` says how it came out."""

    key: str
    running: bool = False
    called_off: threading.Event = field(default_factory=threading.Event)
    ended: Future[None] = field(default_factory=Future)


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """Jobs of one kind. `work` does one; `again` is asked for it once more when that is due."""

    def __init__(
        self,
        kind: str,
        work: Callable[[J], None],
        again: Callable[[str], None],
        *,
        workers: int,
        retry_seconds: float,
    ) -> None:
        self._work = work
        self._again = again
        self.retry_seconds = retry_seconds
        self._stopping = threading.Event()
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix=kind)
        self._guard = threading.Lock()
        self._jobs: dict[str, J] = {}
        self._barred: set[str] = set()
        self._timers: list[threading.Timer] = []

    def start(self, job: J) -> J:
        """Have a job done; where one for the same volume is under way, it is that one.

        Raises Stopping for a volume whose jobs were called off.
        """
        with self._guard:
            if job.key in self._barred:
                raise Stopping(job.key)
            running = self._jobs.get(job.key)
            if running is not None and not running.ended.done():
                return running
            self._jobs[job.key] = job
        self._workers.submit(self._run, job)
        return job

    def has(self, key: str) -> bool:
        """Whether there is a job for the volume that has not succeeded yet."""
        with self._guard:
            return key in self._jobs

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

    def forget(self, key: str) -> None:
        """Another volume has the id now, or the job is done: what is known of it is void."""
        with self._guard:
            self._jobs.pop(key, None)

    def try_again(self, key: str) -> None:
        """Ask for the job once more, later."""
        timer = threading.Timer(self.retry_seconds, self._again, [key])
        timer.daemon = True
        with self._guard:
            self._timers = [one for one in self._timers if one.is_alive()] + [timer]
            if not self._stopping.is_set():
                timer.start()

    def counts(self) -> Mapping[str, int]:
        """How many jobs wait for a worker, are under way, and failed and will be tried again."""
        with self._guard:
            states = Counter(_state(job) for job in self._jobs.values())
        return {state: states[state] for state in ("queued", "running", "failed")}

    def stop(self) -> None:
        """End at the next safe point."""
        self._stopping.set()
        with self._guard:
            for timer in self._timers:
                timer.cancel()
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: J) -> None:
        job.running = True
        try:
            self.check(job)
            self._work(job)
        except Stopping as stopping:
            job.ended.set_exception(stopping)
        except Exception as error:
            job.ended.set_exception(error)
        else:
            self.forget(job.key)
            job.ended.set_result(None)


def _state(job: Job) -> str:
    if job.ended.done():
        # One that succeeded is not kept.
        return "failed"
    return "running" if job.running else "queued"
