"""Start-up and recovery of volume groups, and the refresh of their cached reports.

Reports are refreshed at intervals and after events of udev. Only reports that callers use are
refreshed, so an idle node runs no command.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait

from agent.groups.node_groups import VolumeGroups
from agent.volumes.reports import Reports
from agent.work.background import PeriodicTask
from agent.work.group_worker import Job, Jobs
from agent.work.locks import Admission
from lvm.udev_events import DiskEvents
from mount import command

_log = logging.getLogger(__name__)


# Interval of the background tasks of `Watch`, in seconds.
_INTERVAL_SECONDS = 2.0
# Age, in seconds, from which a cached report that callers use is refreshed. A refresh runs an lvm2
# command only if the volume group was written to.
_MAX_AGE_SECONDS = 60.0


class Watch:
    """Background tasks: refresh cached reports, scan disks after udev events, retry volume groups.

    `retry_groups` is called every two seconds. Like a refresh it has to return at once, and
    therefore starts other threads for work that may hang.
    """

    def __init__(
        self,
        reports: Reports,
        listen: Callable[[], DiskEvents | None] = DiskEvents.open,
        retry_groups: Callable[[], None] = lambda: None,
    ) -> None:
        self._reports = reports
        self._listen = listen
        self._events: DiskEvents | None = None
        failure = "%s is not watched: %%s"
        # The task of udev's events has an interval of 0, because it waits for the events itself.
        self._udev = PeriodicTask(
            "udev", self._handle_udev, 0.0, failure % "udev", retry_seconds=_INTERVAL_SECONDS
        )
        self._tasks = (
            self._udev,
            PeriodicTask("refresh", self._refresh, _INTERVAL_SECONDS, failure % "LVM"),
            PeriodicTask(
                "volume groups", retry_groups, _INTERVAL_SECONDS, "volume groups are not tried: %s"
            ),
        )

    def start(self) -> None:
        """Start the background tasks."""
        for task in self._tasks:
            task.start()

    def stop(self) -> None:
        """Stop the background tasks; an lvm2 command that runs is not interrupted."""
        for task in self._tasks:
            task.stop()

    def _refresh(self) -> None:
        self._reports.refresh(_MAX_AGE_SECONDS)

    def _handle_udev(self) -> None:
        """Wait for udev events and have the changed disks scanned; stop this task without udev."""
        if self._events is None and (events := self._listen()) is not None:
            self._events = events
        if self._events is None:
            self._udev.stop()
            return
        try:
            changes = self._events.wait(_INTERVAL_SECONDS)
        except Exception:
            # Have all disks scanned: events before the error may be lost.
            self._reports.outdate()
            raise
        for event in changes:
            self._reports.outdate(event.written)


# First and longest time, in seconds, before a failed start-up is retried; the time is doubled after
# each failure.
_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0
# Time limit, in seconds, for which an attempt of start-up or recovery may make no progress. An
# attempt that waits for a disk must not keep locks that the next attempt needs.
_PATIENCE_SECONDS = 60.0


def startup(
    begin: Callable[[], None],
    admission: Admission,
    starts: Iterable[Callable[[], object]],
    check: Callable[[], None],
) -> PeriodicTask:
    """Return a task that retries `begin` until it succeeds, and then admits RPCs.

    After the admission the task calls each of `starts`, which start the background work, then
    `check` once, and ends. An error of one of `starts` is retried; those before it are not called
    again. While `begin` fails, RPCs that need LVM are refused with the error of `begin`. `begin`
    checks the state before each step, so `begin` may fail, or be killed, at any step.
    """
    has_begun, remaining = threading.Event(), list(starts)

    def attempt() -> None:
        if not has_begun.is_set():
            try:
                with command.stall_limit(_PATIENCE_SECONDS):
                    begin()
            except Exception as error:
                admission.refuse(error)
                raise
            has_begun.set()
            admission.open()
        while remaining:
            remaining[0]()
            remaining.pop(0)
        task.stop()
        check()

    task = PeriodicTask(
        "startup",
        attempt,
        _LONGEST_RETRY_SECONDS,
        "the start is not complete, and is tried again: %s",
        retry_seconds=_FIRST_RETRY_SECONDS,
        longest_retry_seconds=_LONGEST_RETRY_SECONDS,
    )
    return task


# Time, in seconds, for which start-up waits for all volume groups; afterwards start-up waits only
# until one of the groups is recovered.
_OTHERS_SECONDS = 3.0
# Interval, in seconds, at which the recovery of a volume group that does not answer is retried.
_RETRY_SECONDS = 60.0
# Interval, in seconds, at which the recovery of a volume group is retried after a disk was
# attached, removed or changed.
_SOON_SECONDS = 5.0


class Recovery:
    """Recovers each volume group once the group answers, and again each time that it reappears.

    Recovery is the first job of the group's background worker (agent/work/group_worker.py), and
    finds the worker's other jobs. `recover` returns whether all work of the group is resumed; if
    not, as for an absent group, the recovery of the group is retried.
    """

    def __init__(self, volume_groups: VolumeGroups, recover: Callable[[str], bool]) -> None:
        self._volume_groups = volume_groups
        self._recover = recover
        # Names of the recovered volume groups, which are retried only after they stopped answering.
        self._recovered: set[str] = set()
        # Time of the last attempt for each volume group, in seconds of the monotonic clock.
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
        """Try to recover all volume groups, and wait until at least one attempt has succeeded.

        1. Start an attempt for each group.
        2. Wait up to three seconds for the end of all attempts.
        3. Wait until an attempt succeeds, or all have failed.

        The attempt for a group that is absent or refused counts as a success, so such a group does
        not delay the start. Raises the first group's error if all attempts fail, and RuntimeError
        where no thread can be started.
        """
        attempts = [self.jobs.start(self._job(name)).future for name in self._volume_groups.names]
        wait(attempts, _OTHERS_SECONDS)
        pending = set(attempts)
        while pending and not any(
            attempt.done() and not attempt.exception() for attempt in attempts
        ):
            _, pending = wait(pending, return_when=FIRST_COMPLETED)
        problems = [attempt.exception() for attempt in attempts if attempt.done()]
        if problems and all(problems) and problems[0] is not None:
            raise problems[0]

    def repeat(self) -> None:
        """Have all volume groups recovered again at the next `step`, as after a reload."""
        self._recovered.clear()
        self._tried_at.clear()

    def step(self) -> None:
        """Start the recovery of each volume group that is not recovered and is due for a retry.

        While all groups are recovered and answer, no command runs.
        """
        for group in self._volume_groups:
            if not group.is_answering:
                self._recovered.discard(group.name)
            age_seconds = time.monotonic() - self._tried_at.get(group.name, -_RETRY_SECONDS)
            # A refused group counts as outdated, too: each attempt scans all disks for it.
            is_changed = group.metadata.is_outdated and group.status != "refused"
            due_seconds = _SOON_SECONDS if is_changed else _RETRY_SECONDS
            if group.name not in self._recovered and age_seconds >= due_seconds:
                self.jobs.wake(self._job(group.name), 0.0)

    def _job(self, name: str) -> Job:
        # With `on_record=False` the volume group's worker does not retry a failed job; `step`
        # retries it.
        return Job(name, on_record=False)

    def _try(self, job: Job) -> None:
        self._tried_at[job.key] = time.monotonic()
        # Count the volume group as recovered before the attempt: if the group stops answering
        # during the attempt, `step` then has it recovered again.
        self._recovered.add(job.key)
        try:
            with command.stall_limit(_PATIENCE_SECONDS):
                is_done = self._recover(job.key)
        except BaseException:
            self._recovered.discard(job.key)
            raise
        if not is_done:
            # Have `step` retry the volume group. The group may have appeared since, and have
            # answered an RPC, so that `step` would never see it as one that does not answer.
            self._recovered.discard(job.key)
