"""One volume group: how lvm2 is called for it, its cached state, its lock and its deferred work.

No code here knows another group, so a group whose disk hangs stops no other group.
"""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from agent.core import errors, trace
from agent.groups.metadata_cache import MetadataCache
from agent.work.background import Attempts
from agent.work.group_worker import GroupWorkers, Job, Jobs, Steps
from agent.work.locks import MOST_READING, GroupLock
from lvm import lvm_errors as lvm_errors
from lvm import report, tags, volumes
from lvm.lvm2 import Lvm
from lvm.session import is_report
from mount import command
from mount import mount_errors as mount_errors
from mount.command import Result

_log = logging.getLogger(__name__)

Status = Literal["unknown", "ready", "partial", "absent", "refused"]

# Time limit of the wait of `begin_states` for all volume groups together, in seconds.
_SHORT_WAIT_SECONDS = 3.0
# Factor by which the time limit of the wait of `begin_states` is multiplied for volume groups whose
# cached state may lack changes by Carver, if the caller needs a complete state.
_NEEDED_WAIT_TIMES = 5
# Time, in seconds, for which `begin_states` does not wait again for a volume group that did not
# answer within the time limit.
_REST_SECONDS = 60.0
# Errors of a read that prove nothing about a volume group, since the next read may succeed.
_SILENCE = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited),
    mount_errors.OutcomeUnknown,
)
# Errors of a read of a volume group that lvm2, or a disk, did not answer.
_NO_ANSWER = (errors.GroupSilent, mount_errors.OutcomeUnknown)
# Time limit of a read of a volume group in the background, and of a stall of the group's deferred
# work, in seconds.
_BACKGROUND_SECONDS = 60.0
# Delay of a volume group's deferred work, in seconds. The call that asked for the work is answered
# first. The requests of all calls in this time, such as twenty volumes staged at once, are served
# together.
_SOON_SECONDS = 0.1


@dataclass(frozen=True)
class _Stuck:
    """A command of lvm2's that hangs.

    While such a command hangs, no command that changes the volume group is run. While a report
    hangs, no further report is run either.
    """

    words: tuple[str, ...]
    ended: Callable[[], bool]
    since_seconds: float

    @property
    def seconds(self) -> float:
        """Time since the caller of the command stopped waiting for its end, in seconds."""
        return time.monotonic() - self.since_seconds


class VolumeGroup:
    """A volume group: its cached state, its lock, and its deferred work.

    Each lvm2 command on the group is run by `_watched`, which notes what the command may have
    changed.
    """

    def __init__(self, metadata: MetadataCache, workers: GroupWorkers) -> None:
        self.metadata = metadata
        name = self.name = metadata.name
        self.lock = GroupLock(f"volume group {name}")
        # The state that was read last; None if the group was absent or refused.
        self.cached: report.Group | None = None
        # The time of the last read that gave `status` (epoch, seconds); 0 before.
        self.status_seconds = 0.0
        # Whether Carver has yet to create the group or to attach its loop device. A read of an
        # absent group then raises GroupAwaited.
        self.is_awaited = False
        # The last state in which the group was on this node, and the time of its read (epoch,
        # seconds): the last read that succeeded and found the group.
        self.last_seen: report.Group | None = None
        self.time_seconds = 0.0
        # The time of the last attempt to read the group's state, with or without success (epoch,
        # seconds).
        self.tried_seconds = 0.0
        self.problem: Exception | None = None
        # The time since which no read of the state has had an answer: the start of the first such
        # read (monotonic, seconds). None if the last read had an answer.
        self._unanswered_since: float | None = None
        self._run = metadata.node.run
        metadata.node = replace(metadata.node, run=self._watched)
        # Lock for reads of the group's state: one thread at a time reads.
        self._readers = GroupLock(f"volume group {name}", MOST_READING)
        self._guard = threading.Lock()
        # The future of the next refresh of the group, which has not begun yet; None if there is
        # none.
        self._next: Future[report.Group | None] | None = None
        # Commands of lvm2's that hang, the oldest first.
        self._stuck: tuple[_Stuck, ...] = ()
        # Tags that are still to be written to the metadata, by the UUIDs of their volumes.
        self._unwritten_tags: dict[str, frozenset[str]] = {}
        self._workers = workers
        self._deferred: Jobs[Job] = Jobs(
            workers,
            "deferred",
            self._deferred_steps,
            "volume group %s, deferred work: %s",
            urgent=True,
            survives_halt=True,
            level=logging.WARNING,
        )
        # Whether a command that changes the group has ended since the last read began.
        self._changed = False
        # Whether `cached` may lack changes by Carver's commands. True before the first read.
        self._is_stale = True
        # The time until which `begin_states` does not wait for the group (monotonic, seconds).
        self._rests_until = 0.0

    @property
    def lvm(self) -> Lvm:
        """lvm2 as called for this volume group: it sees the disks of this group and no others."""
        return self.metadata.lvm

    @property
    def status(self) -> Status:
        """Status of the volume group, by the state that was read last."""
        if isinstance(self.problem, errors.GroupRefused):
            return "refused"
        if self.cached is None:
            return "absent" if self.status_seconds else "unknown"
        return "partial" if self.cached.missing_disks else "ready"

    @property
    def is_answering(self) -> bool:
        """Whether the last read succeeded and found the volume group; disks may be missing."""
        return self.problem is None and self.status in ("ready", "partial")

    @property
    def is_changed(self) -> bool:
        """Whether Carver may have changed the volume group since its last successful read.

        Changes by others, such as an operator, are not noticed. True also if the last read failed.
        """
        return self._changed or bool(self._stuck) or self.problem is not None

    @property
    def has_own_changes(self) -> bool:
        """Whether the cached state has all changes that Carver's commands made until now.

        False before the first successful read, since an earlier process may have left any change;
        while a command of lvm2's hangs; and while the group is refused.
        """
        return not (self._is_stale or self._stuck)

    @property
    def silent_seconds(self) -> float:
        """Time for which reads of the volume group got no answer of lvm2 or the disks, in seconds.

        0 if the last read had an answer; an error of lvm2's is an answer. While a read is in
        progress after one that had an answer, it is the time since the start of that read.
        """
        since = self._unanswered_since
        return 0.0 if since is None else time.monotonic() - since

    def state(self) -> report.Group | None:
        """Return the volume group as it is now; None if the group is not on this node.

        Runs one command if the group's metadata may have changed since the last read, else none.
        Waits for a read by another thread. Raises as `MetadataCache.state`; GroupAwaited if Carver
        has yet to create the group; and GroupBusy at the deadline, or if too many callers wait.
        """
        with self._readers.hold():
            return self._read()

    def _read(self) -> report.Group | None:
        """Read the volume group's state, and note the result or the error.

        The caller holds `_readers`.
        """
        previous_status, self._changed = self.status, False
        if self._unanswered_since is None:
            self._unanswered_since = time.monotonic()
        # Copy the unwritten tags before the read. So tags that are written during the read are in
        # the result of the read, in this copy, or in both.
        unwritten = dict(self._unwritten_tags)
        try:
            self.cached = _with_tags(self._report(), unwritten)
        except errors.GroupRefused as error:
            self.cached, self.problem, self.status_seconds = None, error, time.time()
            # Count a refused group as stale: it has no state, although changes by Carver may be on
            # its disks.
            self._is_stale, self._unanswered_since = True, None
            raise
        except Exception as error:
            self.problem = error
            if not isinstance(error, _NO_ANSWER):
                self._unanswered_since = None
            raise
        else:
            self._unanswered_since = None
            self.problem, self.status_seconds, self._rests_until = None, time.time(), 0.0
            self._is_stale = self._changed
            if self.cached is not None:
                self.last_seen, self.time_seconds = self.cached, self.status_seconds
        finally:
            self.tried_seconds = time.time()
            self._log_change(previous_status)
        return self.cached

    def refresh(self) -> "Future[report.Group | None]":
        """Read the volume group's state in a background thread; return a future of the result.

        The read begins after this call. Callers share a read that has not begun yet. Raises
        RuntimeError if no thread can be started.
        """
        with self._guard:
            if self._next is None:
                self._next = command.begin("refresh", self._refresh)
            return self._next

    def _refresh(self) -> report.Group | None:
        """Read the volume group's state once no other thread does; runs in a background thread."""
        with command.time_limit(_BACKGROUND_SECONDS), ExitStack() as lock:
            try:
                lock.enter_context(self._readers.hold())
            finally:
                with self._guard:
                    self._next = None
            return self._read()

    @property
    def _may_lack(self) -> bool:
        """Whether the volume group has no cached state, or one that may lack changes by Carver."""
        return self.cached is None or self._is_stale

    def _begin(self, complete: bool) -> "Future[report.Group | None] | None":
        """Begin to refresh the volume group for `begin_states`; None if no refresh is needed.

        In the minute after a wait in vain, a refresh is begun only if a complete state is needed
        and the cached state may lack changes by Carver. While another thread reads the state, a
        refresh is begun only if one of the two is the case.
        """
        if time.monotonic() < self._rests_until:
            needs_refresh = complete and self._may_lack
        else:
            # While another thread reads the state, begin a further read only if the caller needs
            # it: the read in progress may be older than a change that matters to the caller.
            needs_refresh = complete or not self._readers.is_taken or not self.has_own_changes
        return self.refresh() if needs_refresh else None

    def _end(
        self, refreshing: "Future[report.Group | None] | None", complete: bool
    ) -> report.Group | None:
        """Return the volume group's new or cached state, after the wait of `begin_states`.

        If the refresh failed or has not ended, the next callers do not wait for the group for a
        minute. If a complete state is needed, raises the error of a failed refresh. But if the
        refresh has not ended, or failed because the group does not answer (`_SILENCE`), raises
        `silence_error`, and only if the cached state may lack changes by Carver.
        """
        if refreshing is None:
            return self.cached
        error = refreshing.exception() if refreshing.done() else None
        if refreshing.done() and (error is None or (complete and not isinstance(error, _SILENCE))):
            return refreshing.result()
        self._rests_until = time.monotonic() + _REST_SECONDS
        if complete and self._may_lack:
            raise self.silence_error
        return self.cached

    @property
    def silence_error(self) -> Exception:
        """The error for a caller that needs a volume group which does not answer.

        It is the error of the last read, or GroupBusy if there is none or its outcome is unknown.
        """
        if self.problem is None or isinstance(self.problem, mount_errors.OutcomeUnknown):
            why = str(self.problem or "it has not answered")
            return errors.GroupBusy(f"volume group {self.name}", why)
        return self.problem.with_traceback(None)

    def add_tags_later(self, name: str, own_tags: Mapping[str, str]) -> None:
        """Add tags to a volume soon, in the background; each read from now on has the tags.

        The caller holds the volume's lock. The tags are lost if the process is killed before they
        are written to the metadata. Reads the state if the volume was created since the last read.
        Raises VolumeMissing if the group has no logical volume of this name.
        """
        volume = self.cached.volumes.get(name) if self.cached is not None else None
        if volume is None and (group := self.state()) is not None:
            volume = group.volumes.get(name)
        if volume is None:
            raise lvm_errors.VolumeMissing(self.name, name)
        with self._guard:
            earlier_tags = self._unwritten_tags.get(volume.uuid, frozenset())
            self._unwritten_tags[volume.uuid] = earlier_tags | frozenset(tags.encode(own_tags))
        self.wake()

    def refresh_later(self) -> None:
        """Refresh the volume group in the background if Carver changed it since the last read.

        So the next call need not wait for a read.
        """
        if self._changed:
            self.wake()

    def wake(self) -> None:
        """Make the volume group's deferred work due soon (`run_deferred`), in the background."""
        self._deferred.wake(Job(self.name), _SOON_SECONDS)

    def _deferred_steps(self, job: Job) -> Steps:
        """Do the volume group's deferred work in one step, each time the job is woken."""
        while True:
            with command.stall_limit(_BACKGROUND_SECONDS):
                self.run_deferred(self._workers.is_ending)
            job.logged = ""
            yield math.inf

    def run_deferred(self, is_ending: bool = False) -> None:
        """Write the tags of `add_tags_later` to the metadata, and refresh the volume group's state.

        The refresh is left out if another caller changes or reads the group, or if the service
        stops. Raises as `state` does, and an ExceptionGroup of the errors of tags that were not
        written; such tags are kept for the next attempt.
        """
        if self._unwritten_tags:
            with self.lock.hold():
                self._write_tags()
        # Refresh only if no other caller is at work: one that changes or reads the group refreshes
        # the state anyway.
        is_free = not self.lock.is_taken and not self._readers.is_taken
        if is_free and not is_ending:
            self.state()

    def _write_tags(self) -> None:
        """Write the tags of `add_tags_later`, by one command for all volumes with equal new tags.

        The caller holds the group's lock. Volumes are found by their UUIDs, since another volume
        may have the name by now; tags of volumes that are gone are dropped. Tags that lvm2 refuses
        do not keep the other tags from being written: at the end an ExceptionGroup of the refusals
        is raised.
        """
        unwritten = dict(self._unwritten_tags)
        if (group := self.state()) is None:
            raise lvm_errors.GroupMissing(self.name)
        present = {volume.uuid: volume for volume in group.volumes.values()}
        names: defaultdict[frozenset[str], list[str]] = defaultdict(list)
        for uuid, new_tags in unwritten.items():
            if uuid in present:
                names[new_tags].append(present[uuid].name)
        refused = set(names)
        with Attempts() as attempts:
            for new_tags, volume_names in names.items():
                with attempts.attempt():
                    volumes.add_tags(self.lvm, self.name, volume_names, new_tags)
                    refused.remove(new_tags)
            with self._guard:
                for uuid, new_tags in unwritten.items():
                    if self._unwritten_tags.get(uuid) == new_tags and new_tags not in refused:
                        del self._unwritten_tags[uuid]

    def _report(self) -> report.Group | None:
        """Return the volume group's state by its metadata cache; None if the group is absent.

        Raises GroupAwaited for an absent group that Carver has yet to create.
        """
        group = self.metadata.state(is_refused=isinstance(self.problem, errors.GroupRefused))
        if group is None and self.is_awaited:
            raise errors.GroupAwaited(self.name)
        return group

    def _log_change(self, previous_status: Status) -> None:
        """Log that the volume group has become absent or refused, or is back."""
        match previous_status, self.status:
            case "absent" | "refused", "ready" | "partial":
                _log.warning("volume group %s is on this node again", self.name)
            case (("unknown" | "ready" | "partial"), "absent"):
                _log.warning(
                    "volume group %s is not on this node: its classes have no room here, and its"
                    " volumes cannot be used; `carver doctor` says what to do",
                    self.name,
                )
            case (("unknown" | "ready" | "partial" | "absent"), "refused"):
                _log.error("%s", self.problem)

    def _watched(self, *words: str) -> Result:
        """Run a command of lvm2's on the volume group, and note that it may have changed the group.

        After a command of unknown outcome, and after a failed command that changes the group, the
        metadata cache is dropped. A command that hangs is noted. Raises StillRunning or
        CommandStuck if an earlier command hangs (`_require_none_stuck`), and the runner's errors.
        """
        self._require_none_stuck(words)
        is_change = not is_report(words)
        try:
            result = self._run(*words)
        except mount_errors.CommandStuck as error:
            self.metadata.forget()
            with self._guard:
                self._stuck += (_Stuck(words, error.ended, time.monotonic()),)
            raise
        except (mount_errors.OutcomeUnknown, lvm_errors.StillRunning):
            self.metadata.forget()
            raise
        else:
            # Drop the cache after a failed command: the command may have stopped half way, before a
            # commit or after a device was suspended.
            if result.exit_code and is_change:
                self.metadata.forget()
            if not result.exit_code:
                command.progressed()
            return result
        finally:
            # Set the flags after the command, since a read during the command may have seen the
            # earlier state.
            if is_change:
                self._changed = self._is_stale = True

    def _require_none_stuck(self, command_words: tuple[str, ...]) -> None:
        """Raise StillRunning or CommandStuck if this command must wait for one that hangs.

        A command that changes the group is refused with StillRunning while any command hangs. A
        report is refused with CommandStuck while another report hangs: the new report would hang as
        well, and leave another process behind.
        """
        if not self._stuck:
            return
        with self._guard:
            self._stuck = tuple(running for running in self._stuck if not running.ended())
            stuck = self._stuck
        if stuck and not is_report(command_words):
            raise lvm_errors.StillRunning(stuck[0].words[1], stuck[0].seconds)
        for running in stuck:
            if is_report(running.words):
                raise mount_errors.CommandStuck(running.words, running.seconds, running.ended)


def begin_states(
    volume_groups: Iterable[VolumeGroup], *, complete: bool = False
) -> Callable[[], dict[str, report.Group | None]]:
    """Begin to refresh volume groups; return a function that waits and returns their states.

    The returned function waits for all groups together, until three seconds after the call of
    `begin_states`, or for half of the time to the caller's deadline if that is less. A group whose
    refresh fails or takes longer is returned with its cached state, and is not waited for again for
    a minute.

    With `complete`, a group whose cached state may lack changes by Carver is waited for until
    fifteen seconds have passed, since no other state will do. For such a group the function then
    raises GroupBusy, GroupSilent or GroupAwaited. With `complete`, it also raises GroupRefused or
    CommandError if the read of a group failed with that error.
    """
    groups = tuple(volume_groups)
    began = time.monotonic()
    most_seconds = command.patience_seconds(_SHORT_WAIT_SECONDS * _NEEDED_WAIT_TIMES, 0.5)
    pending_states = [(volume_group, volume_group._begin(complete)) for volume_group in groups]

    def wait_for(refreshing: Iterable["Future[report.Group | None]"], seconds: float) -> None:
        left_seconds = began + min(seconds, most_seconds) - time.monotonic()
        wait(list(refreshing), max(0.0, left_seconds))

    def end() -> dict[str, report.Group | None]:
        with trace.step(trace.WAIT, "refresh"):
            wait_for(
                (future for _, future in pending_states if future is not None), _SHORT_WAIT_SECONDS
            )
            # Check after the first wait which cached states lack changes, since a change may have
            # ended during that wait.
            needed_futures = [
                future
                for volume_group, future in pending_states
                if complete and future is not None and not future.done() and volume_group._may_lack
            ]
            wait_for(needed_futures, most_seconds)
        return {
            volume_group.name: volume_group._end(future, complete)
            for volume_group, future in pending_states
        }

    return end


def _with_tags(
    group: report.Group | None, unwritten: Mapping[str, frozenset[str]]
) -> report.Group | None:
    """Return the volume group with the unwritten tags added to its volumes.

    `unwritten` has these tags by the UUIDs of the volumes.
    """
    if group is None or not unwritten:
        return group
    changed = {
        name: replace(volume, tags=volume.tags | unwritten[volume.uuid])
        for name, volume in group.volumes.items()
        if volume.uuid in unwritten
    }
    return replace(group, volumes={**group.volumes, **changed})
