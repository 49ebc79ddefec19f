"""What this process has under way, and what a call gets that meets it, by the table of states.

Work that tags record is also met where no job of this process knows it, as after a restart; then
the operation finds it in the report, and answers as the table says. Work that failed and is not on
record is over, and no call meets it, unless it left the volume in part erased.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from agent.core import errors
from agent.volumes import volume_states
from agent.volumes.holds import Holds
from agent.volumes.volume_states import Call, Ender, Outcome, Recorded, Work
from agent.work.background import DetachedTasks
from agent.work.group_worker import Job, Jobs

# The error of a call that is ABORTED by a job.
Aborted = Callable[[Any], errors.AgentError]


@dataclass(frozen=True)
class _Queue:
    """Where the jobs of a work are: by the key of what a call is about.

    `find` returns one that has `goes_on` and `on_record`; `jobs` are those that can be halted.
    """

    find: Callable[[str], Any]
    jobs: Jobs[Any] | None
    key_of: Callable[[str], str]
    aborted: Aborted


def _pending(job: Job) -> errors.AgentError:
    return errors.OperationPending(f"{job.key} ({job.progress})")


class Conflicts:
    """Applies the table to the jobs and the holds of this process.

    A call is about a volume's id, or for Call.GROW a group.
    """

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._queues: dict[Ender | Work, _Queue] = {}

    def add(
        self,
        work: Ender | Work,
        jobs: Jobs[Any],
        *,
        key_of: Callable[[str], str] = str,
        aborted: Aborted = _pending,
    ) -> None:
        """Have the jobs of a queue met: those that end a state, or other work.

        `key_of` gives the key of one from what a call is about.
        """
        self._queues[work] = _Queue(jobs.of, jobs, key_of, aborted)

    def add_mkfs(self, detached: DetachedTasks) -> None:
        """Have each mkfs met that outlives its call."""
        self._queues[Work.FORMAT] = _Queue(detached.mkfs_of, None, str, lambda task: task.problem())

    def require(self, call: Call, volume: Recorded) -> None:
        """Raise the error of a call that a volume stops: by its record, or by this process."""
        volume_states.require(call, volume)
        self.check(call, str(volume.id))

    def check(self, call: Call, subject: str) -> None:
        """Raise the error of a call that this process knows to be stopped, without a command.

        Raises NoSuchVolume, Receiving, Moved, or what says that work is under way.
        """
        self._holds.check(call, subject)
        self.check_jobs(call, subject)

    def check_jobs(self, call: Call, subject: str) -> None:
        """As `check`, by the jobs alone: what is held may not be there, or is made anew."""
        for work, queue in self._queues.items():
            outcome = volume_states.outcome(call, work)
            if outcome not in (Outcome.ABSENT, Outcome.ABORTED):
                continue
            job = queue.find(queue.key_of(subject))
            if job is None or not job.goes_on:
                continue
            # A deletion that is not on record may fail, and then the volume is there.
            is_absent = outcome is Outcome.ABSENT and job.on_record
            raise errors.NoSuchVolume(subject) if is_absent else queue.aborted(job)

    @contextmanager
    def enter(self, call: Call, subject: str) -> Iterator[None]:
        """Within the `with`, what the table halts is halted, and does not begin.

        Raises as `check_jobs`, and Stopping where a job does not end within ten seconds. No group
        is held to enter.
        """
        self.check_jobs(call, subject)
        with ExitStack() as halted:
            for work, queue in self._queues.items():
                is_halted = volume_states.outcome(call, work) is Outcome.HALTS
                if queue.jobs is not None and is_halted:
                    halted.enter_context(queue.jobs.halted(queue.key_of(subject)))
            yield
