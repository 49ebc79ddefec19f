"""What happens when a call meets background work: one table, which all calls go by.

Work that tags record is also met where no job of this process knows it, as after a restart; then
the operation finds it in the report, and answers as the table says. Work that failed and is not on
record is over, and no call meets it, unless it left the volume in part erased.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from agent.core import errors
from agent.core.background import DetachedTasks
from agent.core.group_worker import Job, Jobs


class Work(StrEnum):
    """Background work."""

    ERASE = "the volume was deleted and is overwritten"
    COPY = "the volume is filled, from its source or with zeroes"
    COPIED = "another volume is filled from it, by a temporary snapshot"
    GROWTH = "the extents that it grows by are zeroed"
    LEFT_GROWTH = "extents that an earlier process reserved for its growth are overwritten"
    FORMAT = "mkfs of an earlier call makes its file system"
    SWEEP = "free extents of its group are overwritten"
    EMPTY_POOL = "the empty pool of its class is overwritten, to be removed"


class Call(StrEnum):
    """Calls, and what Carver does by itself as one."""

    CREATE = "CreateVolume of its name; for a pool, of its class"
    COPY_FROM = "CreateVolume with it as the source"
    SNAPSHOT = "CreateSnapshot, CreateVolumeGroupSnapshot"
    EXPAND = "ControllerExpandVolume, NodeExpandVolume, a stage with a size on record"
    EXPAND_OTHER = "an expansion to another size than the one under way"
    USE = "NodeStageVolume, NodePublishVolume, NodeGetVolumeStats"
    UNSTAGE = "NodeUnstageVolume"
    DELETE = "DeleteVolume"
    GROW = "a pool or a COW store must grow"


class Outcome(StrEnum):
    """What happens."""

    BESIDE = "both go on"
    JOINS = "the call waits a moment, and is OK: the work is on record"
    WAITS = "the call waits for the work, and is ABORTED with the progress where that takes longer"
    ABORTED = "the call is ABORTED with the progress"
    ABSENT = "the call does not find the volume, or is ABORTED until its deletion is on record"
    REFUSED = "the call is FAILED_PRECONDITION"
    HALTS = "the work ends at its next safe point, and then the call goes on"


def _row(**others: Outcome) -> Mapping[Call, Outcome]:
    """The outcomes of a work; both go on where nothing else is said."""
    return MappingProxyType({one: others.get(one.name, Outcome.BESIDE) for one in Call})


TABLE: Mapping[Work, Mapping[Call, Outcome]] = MappingProxyType(
    {
        Work.ERASE: _row(
            CREATE=Outcome.ABORTED,
            COPY_FROM=Outcome.ABSENT,
            SNAPSHOT=Outcome.ABSENT,
            EXPAND=Outcome.ABSENT,
            EXPAND_OTHER=Outcome.ABSENT,
            USE=Outcome.ABSENT,
            DELETE=Outcome.JOINS,
        ),
        Work.COPY: _row(
            CREATE=Outcome.WAITS,
            COPY_FROM=Outcome.ABORTED,
            SNAPSHOT=Outcome.ABORTED,
            EXPAND=Outcome.ABORTED,
            EXPAND_OTHER=Outcome.ABORTED,
            USE=Outcome.ABORTED,
            DELETE=Outcome.HALTS,
        ),
        Work.COPIED: _row(
            # In use it grows once the temporary snapshot is gone. A pod starts meanwhile: to
            # kubelet it is FAILED_PRECONDITION, and the next stage grows it.
            EXPAND=Outcome.ABORTED,
            EXPAND_OTHER=Outcome.ABORTED,
            DELETE=Outcome.REFUSED,
        ),
        Work.GROWTH: _row(
            EXPAND=Outcome.WAITS,
            EXPAND_OTHER=Outcome.HALTS,
            DELETE=Outcome.HALTS,
        ),
        Work.LEFT_GROWTH: _row(
            EXPAND=Outcome.HALTS,
            EXPAND_OTHER=Outcome.HALTS,
            DELETE=Outcome.HALTS,
        ),
        # A snapshot of half a file system stays that, while its volume becomes a whole one.
        Work.FORMAT: _row(
            COPY_FROM=Outcome.ABORTED,
            SNAPSHOT=Outcome.ABORTED,
            USE=Outcome.WAITS,
            DELETE=Outcome.ABORTED,
        ),
        Work.SWEEP: _row(GROW=Outcome.HALTS),
        Work.EMPTY_POOL: _row(CREATE=Outcome.HALTS),
    }
)

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
    """Applies the table to the jobs of this process.

    A call is about a volume's id, or for Call.GROW a group.
    """

    def __init__(self) -> None:
        self._queues: dict[Work, _Queue] = {}

    def add(
        self,
        work: Work,
        jobs: Jobs[Any],
        *,
        key_of: Callable[[str], str] = str,
        aborted: Aborted = _pending,
    ) -> None:
        """Have the jobs of a queue met; `key_of` gives the key of one from what a call is about."""
        self._queues[work] = _Queue(jobs.of, jobs, key_of, aborted)

    def add_mkfs(self, detached: DetachedTasks) -> None:
        """Have each mkfs met that outlives its call."""
        self._queues[Work.FORMAT] = _Queue(detached.mkfs_of, None, str, lambda task: task.problem())

    def check(self, call: Call, subject: str) -> None:
        """Raise NoSuchVolume, or what says that work is under way, where the table says so."""
        for work, queue in self._queues.items():
            outcome = TABLE[work][call]
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
        """As `check`; within the `with`, what the table halts is halted, and does not begin.

        No group is held to enter. Raises Stopping where a job does not end within ten seconds.
        """
        self.check(call, subject)
        with ExitStack() as halted:
            for work, queue in self._queues.items():
                if queue.jobs is not None and TABLE[work][call] is Outcome.HALTS:
                    halted.enter_context(queue.jobs.halted(queue.key_of(subject)))
            yield
