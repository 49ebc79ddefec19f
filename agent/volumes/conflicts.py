"""Conflicts between a call and background work of this process, by agent/volumes/volume_states.py.

Work that is recorded by tags may be in progress without a job of this process, for instance after a
restart. In that case the operation finds the work in the report, and answers by the same table.
Work that failed and is not recorded is over. No call conflicts with such work, unless it left the
volume partly erased.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from agent.core import errors
from agent.volumes import volume_states
from agent.volumes.holds import Holds
from agent.volumes.volume_states import Call, EndedBy, Outcome, Recorded, Work
from agent.work.background import DetachedTasks
from agent.work.group_worker import Job, Jobs

# Function that returns the error of a call which is ABORTED because of a job.
Aborted = Callable[[Any], errors.AgentError]


@dataclass(frozen=True)
class _Queue:
    """Where to find the jobs of one kind of work, by the subject of a call.

    `find` returns an object with `goes_on` and `on_record`. `jobs` are the jobs that can be halted,
    or None. `key_of` returns the key of a job, from the id of the call's volume or the name of its
    group. `aborted` makes the error of a call that is ABORTED.
    """

    find: Callable[[str], Any]
    jobs: Jobs[Any] | None
    key_of: Callable[[str], str]
    aborted: Aborted


def _pending(job: Job) -> errors.AgentError:
    """Return the error of a call that is ABORTED because of a job."""
    return errors.OperationPending(f"{job.key} ({job.progress})")


class Conflicts:
    """Decides whether a call conflicts with the jobs and the holds of this process.

    The decision follows the table in agent/volumes/volume_states.py.

    The `subject` of a call is the id of a volume, or for Call.GROW the name of a volume group.
    """

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._queues: dict[EndedBy | Work, _Queue] = {}

    def add(
        self,
        work: EndedBy | Work,
        jobs: Jobs[Any],
        *,
        key_of: Callable[[str], str] = str,
        aborted: Aborted = _pending,
    ) -> None:
        """Register the queue of jobs that do a kind of work: to end a state, or other work.

        `key_of` returns the key of a job from the subject of a call.
        """
        self._queues[work] = _Queue(jobs.of, jobs, key_of, aborted)

    def add_mkfs(self, detached_tasks: DetachedTasks) -> None:
        """Register the mkfs processes that outlive their calls."""
        self._queues[Work.FORMAT] = _Queue(
            detached_tasks.mkfs_of, None, str, lambda task: task.problem()
        )

    def require(self, call: Call, volume: Recorded) -> None:
        """Raise an error if a call must not use a volume now.

        The reason is the volume's record, or background work or a hold of this process.
        """
        volume_states.require(call, volume)
        self.check(call, str(volume.id))

    def check(self, call: Call, subject: str) -> None:
        """Raise an error if background work or a hold excludes a call now. Runs no command.

        Raises NoSuchVolume, Receiving, Moved, or an error that says that work is in progress.
        """
        self._holds.check(call, subject)
        self.check_jobs(call, subject)

    def check_jobs(self, call: Call, subject: str) -> None:
        """Raise an error if background work excludes a call now; ignore holds.

        A volume that is held may not exist, or may be about to be created anew.
        """
        for work, queue in self._queues.items():
            outcome = volume_states.outcome(call, work)
            if outcome not in (Outcome.ABSENT, Outcome.ABORTED):
                continue
            job = queue.find(queue.key_of(subject))
            if job is None or not job.goes_on:
                continue
            # While a deletion is not on record, the volume counts as present: the deletion may
            # fail.
            is_absent = outcome is Outcome.ABSENT and job.on_record
            raise errors.NoSuchVolume(subject) if is_absent else queue.aborted(job)

    @contextmanager
    def enter(self, call: Call, subject: str) -> Iterator[None]:
        """Halt the work that conflicts with a call and that the table says to halt.

        In the context, such work does not begin again. Raises as `check_jobs`, and Stopping if a
        job does not end within ten seconds. The caller must hold no lock of a volume group when the
        context is entered.
        """
        self.check_jobs(call, subject)
        with ExitStack() as halted:
            for work, queue in self._queues.items():
                is_halted = volume_states.outcome(call, work) is Outcome.HALTS
                if queue.jobs is not None and is_halted:
                    halted.enter_context(queue.jobs.halted(queue.key_of(subject)))
            yield
