"""Start-up, recovery, and the refresh of the cached state: by the clock and by udev's events.

Only what callers use is refreshed, so an idle node runs no command.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait

from agent.groups.node_groups import VolumeGroups
from agent.volumes.reports import Reports
from agent.work.background import PeriodicTask
from agent.work.group_worker import Job, Jobs
from agent.work.locks import Admission
from lvm.udev_events import DiskEvents
from mount import command

_log = logging.getLogger(__name__)


_TURN_SECONDS = 2.0
# A refresh costs a process only where something was written to the group.
_MAX_AGE_SECONDS = 60.0


class Watch:
    """Refreshes the cached reports, has disks scanned at events, and does `then` regularly.

    `then` has to return at once, as a refresh does: it begins what may hang in other threads.
    """

    def __init__(
        self,
        reports: Reports,
        listen: Callable[[], DiskEvents | None] = DiskEvents.open,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._reports = reports
        self._listen = listen
        self._events: DiskEvents | None = None
        failure = "%s is not watched: %%s"
        # Waiting for events is its pause.
        self._udev = PeriodicTask(
            "udev", self._hear, 0.0, failure % "udev", retry_seconds=_TURN_SECONDS
        )
        self._tasks = (
            self._udev,
            PeriodicTask("refresh", self._refresh, _TURN_SECONDS, failure % "LVM"),
            PeriodicTask("volume groups", then, _TURN_SECONDS, "volume groups are not tried: %s"),
        )

    def start(self) -> None:
        """Begin."""
        for one in self._tasks:
            one.start()

    def stop(self) -> None:
        """Begin no further run; a command of lvm2's under way is left to end by itself."""
        for one in self._tasks:
            one.stop()

    def _refresh(self) -> None:
        self._reports.refresh(_MAX_AGE_SECONDS)

    def _hear(self) -> None:
        """Wait for events; where there is no udev, leave it to the clock."""
        if self._events is None and (events := self._listen()) is not None:
            self._events = events
        if self._events is None:
            self._udev.stop()
            return
        try:
            heard = self._events.wait(_TURN_SECONDS)
        except Exception:
            # Events before that are lost.
            self._reports.outdate()
            raise
        for event in heard:
            self._reports.outdate(event.written)


_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0
# How long an attempt may come no further: one that waits for a disk must not hold what the next
# one needs.
_PATIENCE_SECONDS = 60.0


def startup(
    begin: Callable[[], None], admission: Admission, after: Callable[[], None]
) -> PeriodicTask:
    """Make a task that retries `begin` until it succeeds, then admits calls, then does `after`.

    `begin` looks before it acts, so it may fail, or be killed, at any step.
    """

    def attempt() -> None:
        try:
            with command.stall_limit(_PATIENCE_SECONDS):
                begin()
        except Exception as error:
            admission.refuse(error)
            raise
        task.stop()
        admission.open()
        after()

    task = PeriodicTask(
        "startup",
        attempt,
        _LONGEST_RETRY_SECONDS,
        "no volume group can be used yet, and it is tried again: %s",
        retry_seconds=_FIRST_RETRY_SECONDS,
        longest_retry_seconds=_LONGEST_RETRY_SECONDS,
    )
    return task


# How long a start waits for other groups once one is recovered.
_OTHERS_SECONDS = 3.0
# How often a group that does not answer is retried: soon where a disk came, went or changed.
_RETRY_SECONDS = 60.0
_SOON_SECONDS = 5.0


class Recovery:
    """Recovers each group once it answers, and again each time that it comes back.

    That is the first job of a group's loop, which finds the others. `recover` returns whether the
    group was present.
    """

    def __init__(self, volume_groups: VolumeGroups, recover: Callable[[str], bool]) -> None:
        self._volume_groups = volume_groups
        self._recover = recover
        # The groups that need not be tried until they are silent, and when each was tried.
        self._recovered: set[str] = set()
        self._tried_at: dict[str, float] = {}
        self.jobs: Jobs[Job] = Jobs(
            volume_groups.workers,
            "recover",
            self._try,
            "volume group %s is not recovered yet: %s",
            urgent=True,
            level=logging.WARNING,
        )

    def begin(self) -> None:
        """Try all groups; return soon after one is recovered. Raises their error where none is.

        A group that is absent or refused does not delay the start. Raises RuntimeError where no
        thread can be had.
        """
        tries = [self.jobs.start(self._job(one)).ended for one in self._volume_groups.names]
        wait(tries, _OTHERS_SECONDS)
        pending = set(tries)
        while pending and not any(one.done() and not one.exception() for one in tries):
            _, pending = wait(pending, return_when=FIRST_COMPLETED)
        problems = [one.exception() for one in tries if one.done()]
        if problems and all(problems) and problems[0] is not None:
            raise problems[0]

    def repeat(self) -> None:
        """Have all groups recovered once more, also those that are new: after a reload."""
        self._recovered.clear()
        self._tried_at.clear()

    def step(self) -> None:
        """Have the groups that are due tried again; no command where all answer."""
        for one in self._volume_groups:
            if not one.answers:
                self._recovered.discard(one.name)
            age_seconds = time.monotonic() - self._tried_at.get(one.name, -_RETRY_SECONDS)
            due_seconds = _SOON_SECONDS if one.metadata.is_outdated else _RETRY_SECONDS
            if one.name not in self._recovered and age_seconds >= due_seconds:
                self.jobs.wake(self._job(one.name), 0.0)

    def _job(self, name: str) -> Job:
        # `step` says when it is tried again.
        return Job(name, on_record=False)

    def _try(self, job: Job) -> None:
        self._tried_at[job.key] = time.monotonic()
        # Before: a group that goes away meanwhile is waited for again.
        self._recovered.add(job.key)
        try:
            with command.stall_limit(_PATIENCE_SECONDS):
                was_there = self._recover(job.key)
        except BaseException:
            self._recovered.discard(job.key)
            raise
        if not was_there:
            # It may have come since, and answered a call: then no step would find it silent.
            self._recovered.discard(job.key)
