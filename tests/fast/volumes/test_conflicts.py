"""Calls that meet background work: each cell of the table is applied to the jobs of this process.

tests/contract/test_conflicts.py has the calls themselves.
"""

import threading
from collections.abc import Iterator

import expect
import pytest

from agent.core import errors
from agent.volumes.conflicts import Conflicts
from agent.volumes.holds import Holds
from agent.volumes.volume_states import WORK, Call, EndedBy, Outcome, Work, outcome
from agent.work.group_worker import AGAIN, GroupWorkers, Job, Jobs, Steps, Stopping

VOLUME = "data@20000000/vol-a"
# What has jobs: work, and what ends a state in the background.
ALL = (*Work, EndedBy.ERASER, EndedBy.COPIER)


class Working:
    """A job that is at work, and ends where it is called off."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.workers = GroupWorkers()
        self.jobs: Jobs[Job] = Jobs(self.workers, "test", self._work, "%s: %s")
        self.job = self.jobs.start(Job(VOLUME, on_record=False))
        assert self.began.wait(20)

    def _work(self, job: Job) -> Steps:
        self.began.set()
        expect.soon(lambda: job.cancelled.is_set() or self.go.is_set())
        yield AGAIN


@pytest.fixture
def working() -> Iterator[Working]:
    made = Working()
    yield made
    made.go.set()
    made.workers.stop()


def test_the_table_is_whole() -> None:
    assert set(WORK) == set(Work)
    assert all(set(row) == set(Call) for row in WORK.values())


@pytest.mark.parametrize("call", Call, ids=lambda call: call.name)
@pytest.mark.parametrize("work", ALL, ids=lambda work: work.name)
def test_each_cell_is_applied(working: Working, work: EndedBy | Work, call: Call) -> None:
    conflicts, expected = Conflicts(Holds()), outcome(call, work)
    conflicts.add(work, working.jobs)
    match expected:
        case Outcome.ABSENT:
            # Until it is on record the volume is not gone.
            with (
                pytest.raises(errors.OperationPending, match=VOLUME),
                conflicts.enter(call, VOLUME),
            ):
                pass
            working.job.on_record = True
            with pytest.raises(errors.NoSuchVolume), conflicts.enter(call, VOLUME):
                pass
        case Outcome.ABORTED:
            with (
                pytest.raises(errors.OperationPending, match=VOLUME),
                conflicts.enter(call, VOLUME),
            ):
                pass
        case _:
            with conflicts.enter(call, VOLUME):
                is_halted = working.job.future.done()
                if is_halted:
                    with pytest.raises(Stopping):
                        working.jobs.start(Job(VOLUME))
            assert is_halted is (expected is Outcome.HALTS)
            return
    assert not working.job.cancelled.is_set()


def test_a_call_about_something_else_meets_nothing(working: Working) -> None:
    conflicts = Conflicts(Holds())
    for work in ALL:
        conflicts.add(work, working.jobs)
    for call in Call:
        with conflicts.enter(call, "data@20000000/vol-b"):
            assert not working.job.cancelled.is_set()


@pytest.mark.parametrize("call", Call, ids=lambda call: call.name)
@pytest.mark.parametrize("work", ALL, ids=lambda work: work.name)
def test_work_that_failed_is_met_only_if_it_is_on_record(
    working: Working, work: EndedBy | Work, call: Call
) -> None:
    conflicts = Conflicts(Holds())
    conflicts.add(work, working.jobs)
    working.job.cancelled.set()
    with pytest.raises(Stopping):
        working.job.future.result(20)
    conflicts.check(call, VOLUME)
    working.job.on_record = True
    if outcome(call, work) in (Outcome.ABSENT, Outcome.ABORTED):
        with pytest.raises(errors.AgentError):
            conflicts.check(call, VOLUME)
    else:
        conflicts.check(call, VOLUME)
