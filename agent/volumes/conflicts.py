"""Conflicts between a call and background work of this process.

The table in agent/volumes/volume_states.py says what happens in each case. Work that is recorded by
tags may be in progress without a job of this process, for instance after a restart. In that case
the operation finds the work in the report, and answers by the same table. Work that failed and is
not recorded is over. No call conflicts with such work, unless the work left the volume partly
erased.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from agent.core import errors
from agent.volumes import volume_states
from agent.volumes.holds import Holds
from agent.volumes.volume_states import Call, EndedBy, Outcome, Recorded, Work
from agent.work.background import DetachedTasks
from agent.work.group_worker import Job, Jobs

# Type of a function that returns the error of a call which is ABORTED because of a job.
Aborted = Callable[[Any], errors.AgentError]


@dataclass(frozen=True)
class _Queue:
    """How to find the jobs of one kind of background work that concern a call.

    `key_of` returns the key of the job from the call's subject: the id of its volume, or the name
    of its volume group. `find` returns the job with a key, an object with `goes_on` and
    `on_record`, or None. `jobs` are the jobs if they can be halted, else None. `aborted` makes the
    error of a call that is ABORTED because of the job. `outcomes` says what happens to each call.
    """

    outcomes: Mapping[Call, Outcome]
    find: Callable[[str], Any]
    jobs: Jobs[Any] | None
    key_of: Callable[[str], str]
    aborted: Aborted


def _pending(job: Job) -> errors.AgentError:
    """Return the error of a call that is ABORTED because of a job; it names the job's progress."""
    return errors.OperationPending(f"{job.key} ({job.progress})")


class Conflicts:
    """Decides whether a call conflicts with background jobs and holds of this process.

    The decision follows the table in agent/volumes/volume_states.py. The `subject` of a call is the
    id of its volume, or for Call.GROW the name of its volume group.
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
        """Register the jobs of one kind of background work, so that conflicts with them are found.

        `work` is the kind: the end of a state of a volume, or other work. `key_of` returns the key
        of a job from the subject of a call: a volume's id, or for Call.GROW a volume group's name.
        `aborted` returns the error of a call that is ABORTED because of a job.
        """
        self._queues[work] = _Queue(volume_states.outcomes(work), jobs.of, jobs, key_of, aborted)

    def add_mkfs(self, detached_tasks: DetachedTasks) -> None:
        """Register the mkfs processes that may outlive their calls, as Work.FORMAT."""
        self._queues[Work.FORMAT] = _Queue(
            volume_states.outcomes(Work.FORMAT),
            detached_tasks.mkfs_of,
            None,
            str,
            lambda task: task.problem(),
        )

    def require(self, call: Call, volume: Recorded) -> None:
        """Raise an error if a call must not use a volume now.

        The reason is the state in the volume's record, background work of this process, or a hold.
        Raises as `volume_states.require` and `check`. Runs no command.
        """
        volume_states.require(call, volume)
        self.check(call, str(volume.id))

    def check(self, call: Call, volume_or_group: str) -> None:
        """Raise an error if background work or a hold excludes a call now. Runs no command.

        `volume_or_group` is the id of the call's volume, or for Call.GROW the volume group's name.
        Raises NoSuchVolume for a volume that is deleted, Receiving, Moved, or an error that says
        that work is in progress.
        """
        self._holds.check(call, volume_or_group)
        self.check_jobs(call, volume_or_group)

    def check_jobs(self, call: Call, volume_or_group: str) -> None:
        """Raise an error if background work excludes a call now; ignore holds (`Holds`).

        `volume_or_group` is the id of the call's volume, or for Call.GROW the volume group's name.
        CreateVolume ignores holds: the volume that is held may not exist, or may be about to be
        created anew.
        """
        for queue in self._queues.values():
            outcome = queue.outcomes[call]
            if outcome not in (Outcome.ABSENT, Outcome.ABORTED):
                continue
            job = queue.find(queue.key_of(volume_or_group))
            if job is None or not job.goes_on:
                continue
            # Count the volume as present while its deletion is not recorded by tags: the deletion
            # may fail.
            is_absent = outcome is Outcome.ABSENT and job.on_record
            raise errors.NoSuchVolume(volume_or_group) if is_absent else queue.aborted(job)

    @contextmanager
    def enter(self, call: Call, volume_or_group: str) -> Iterator[None]:
        """Within the `with`, halt the background work that the table says to halt for a call.

        Such work is ended at its next safe point, and does not begin again before the end of the
        `with`. `volume_or_group` is the id of the call's volume, or for Call.GROW the volume
        group's name. Raises as `check_jobs` for other work that excludes the call, and Stopping if
        a job does not end within ten seconds. The caller must hold no lock of a volume group when
        the context is entered.
        """
        self.check_jobs(call, volume_or_group)
        with ExitStack() as halted:
            for queue in self._queues.values():
                is_halted = queue.outcomes[call] is Outcome.HALTS
                if queue.jobs is not None and is_halted:
                    halted.enter_context(queue.jobs.halted(queue.key_of(volume_or_group)))
            yield
