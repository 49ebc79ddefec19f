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

# Time limit of the wait of `begin_states` for groups, in seconds.
_SHORT_WAIT_SECONDS = 3.0
# Factor by which the time limit of the wait of `begin_states` is multiplied if the caller needs a
# fresh state.
_NEEDED_WAIT_TIMES = 5
# Time, in seconds, for which `begin_states` does not wait again for a group that was waited for in
# vain.
_REST_SECONDS = 60.0
# Errors that prove nothing about a group, since the group may answer at the next attempt.
_SILENCE = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited),
    mount_errors.OutcomeUnknown,
)
# Errors of a read to which neither lvm2 nor the disks had an answer.
_NO_ANSWER = (errors.GroupSilent, mount_errors.OutcomeUnknown)
# Time limit of a read in the background, and of a stall of deferred work, in seconds.
_BACKGROUND_SECONDS = 60.0
# Delay of deferred work, in seconds. The call that asked for the work is answered first, and the
# requests of other calls by then, such as twenty volumes staged at once, are served together.
_SOON_SECONDS = 0.1


@dataclass(frozen=True)
class _Stuck:
    """A command of lvm2's that does not end.

    While it hangs, no command that changes the group is run, and no report beside a hanging report.
    """

    words: tuple[str, ...]
    ended: Callable[[], bool]
    since_seconds: float

    @property
    def seconds(self) -> float:
        """Time since the command was given up as hanging, in seconds."""
        return time.monotonic() - self.since_seconds


class VolumeGroup:
    """A volume group, by its metadata cache; each lvm2 command on the group goes through here."""

    def __init__(self, metadata: MetadataCache, workers: GroupWorkers) -> None:
        self.metadata = metadata
        name = self.name = metadata.name
        self.lock = GroupLock(f"volume group {name}")
        # The state that was read last, and the time of that read (epoch, seconds).
        self.cached: report.Group | None = None
        self.time_seconds = 0.0
        # Whether Carver has yet to create the group or to attach its loop device. An absent group
        # is then GroupAwaited.
        self.is_awaited = False
        # The last state in which the group was on this node, and the time of its read (epoch,
        # seconds).
        self.last_seen: report.Group | None = None
        self.last_seen_seconds = 0.0
        # The time of the last attempt to read the state, with or without success (epoch, seconds).
        self.tried_seconds = 0.0
        self.problem: Exception | None = None
        # The start of the first of the latest reads that all had no answer (monotonic, seconds).
        # None if the last read had an answer.
        self._unanswered_since: float | None = None
        self._run = metadata.node.run
        metadata.node = replace(metadata.node, run=self._watched)
        # The lock that the one thread which reads the state holds.
        self._readers = GroupLock(f"volume group {name}", MOST_READING)
        self._guard = threading.Lock()
        # The next refresh, which has not begun yet; None if none is queued.
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
        # Whether `cached` may lack changes by such a command. True before the first read.
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
            return "absent" if self.time_seconds else "unknown"
        return "partial" if self.cached.missing_disks else "ready"

    @property
    def answers(self) -> bool:
        """Whether the volume group was present and usable at the last read."""
        return self.problem is None and self.status in ("ready", "partial")

    @property
    def is_changed(self) -> bool:
        """Whether the volume group may have changed since its last successful read."""
        return self._changed or bool(self._stuck) or self.problem is not None

    @property
    def has_own_changes(self) -> bool:
        """Whether the cached state has all changes that Carver's commands made until now.

        False before the first successful read: an earlier process may have left any change.
        """
        return not (self._is_stale or self._stuck)

    @property
    def silent_seconds(self) -> float:
        """Time for which reads of the volume group have had no answer, in seconds.

        0 if the last read had an answer; an error of lvm2's is an answer. The time also counts
        while the first of these reads is in progress.
        """
        since = self._unanswered_since
        return 0.0 if since is None else time.monotonic() - since

    def state(self) -> report.Group | None:
        """Return the volume group as it is now; None if the group is not on this node.

        Runs one command if the group's metadata may have changed since the last read, else none.
        Raises CommandError, GroupRefused, GroupSilent, GroupAwaited, GroupBusy.
        """
        with self._readers.hold():
            return self._read()

    def _read(self) -> report.Group | None:
        """Read the state, and note the result in this object; the caller holds `_readers`."""
        previous_status, self._changed = self.status, False
        if self._unanswered_since is None:
            self._unanswered_since = time.monotonic()
        # The unwritten tags are copied before the read. Tags that are written during the read are
        # in the result of the read, in this copy, or in both.
        unwritten = dict(self._unwritten_tags)
        try:
            self.cached = _with_tags(self._report(), unwritten)
        except errors.GroupRefused as error:
            self.cached, self.problem, self.time_seconds = None, error, time.time()
            # A refused group has no state, although changes by Carver may be on its disks.
            self._is_stale, self._unanswered_since = True, None
            raise
        except Exception as error:
            self.problem = error
            if not isinstance(error, _NO_ANSWER):
                self._unanswered_since = None
            raise
        else:
            self._unanswered_since = None
            self.problem, self.time_seconds, self._rests_until = None, time.time(), 0.0
            self._is_stale = self._changed
            if self.cached is not None:
                self.last_seen, self.last_seen_seconds = self.cached, self.time_seconds
        finally:
            self.tried_seconds = time.time()
            self._log_change(previous_status)
        return self.cached

    def refresh(self) -> "Future[report.Group | None]":
        """Read the state in a background thread; return a future of a read that begins after now.

        Callers share a read that has not begun yet. Raises RuntimeError if no thread can be
        started.
        """
        with self._guard:
            if self._next is None:
                self._next = command.begin("refresh", self._refresh)
            return self._next

    def _refresh(self) -> report.Group | None:
        """Read the state once no other thread reads it; runs in the background thread."""
        with command.time_limit(_BACKGROUND_SECONDS), ExitStack() as lock:
            try:
                lock.enter_context(self._readers.hold())
            finally:
                with self._guard:
                    self._next = None
            return self._read()

    @property
    def _may_lack(self) -> bool:
        """Whether the cached state may lack changes by Carver, or does not exist."""
        return self.cached is None or self._is_stale

    def _begin(self, complete: bool) -> "Future[report.Group | None] | None":
        """Begin the refresh that `begin_states` waits for; None if the cached state suffices."""
        if time.monotonic() < self._rests_until:
            needs_refresh = complete and self._may_lack
        else:
            # While another thread reads the state, a further read is begun only if one is needed:
            # the read in progress may be older than a change that the caller's decision is about.
            needs_refresh = complete or not self._readers.is_taken or not self.has_own_changes
        return self.refresh() if needs_refresh else None

    def _end(
        self, refreshing: "Future[report.Group | None] | None", complete: bool
    ) -> report.Group | None:
        """Return the state after the wait of `begin_states`.

        If the refresh has not ended, the next callers do not wait for the group for a minute.
        Raises if a complete state is needed and the cached state may lack changes.
        """
        if refreshing is None:
            return self.cached
        error = refreshing.exception() if refreshing.done() else None
        if refreshing.done() and (error is None or (complete and not isinstance(error, _SILENCE))):
            return refreshing.result()
        self._rests_until = time.monotonic() + _REST_SECONDS
        if complete and self._may_lack:
            raise self.silence
        return self.cached

    @property
    def silence(self) -> Exception:
        """The error that says why the volume group does not answer."""
        if self.problem is None or isinstance(self.problem, mount_errors.OutcomeUnknown):
            why = str(self.problem or "it has not answered")
            return errors.GroupBusy(f"volume group {self.name}", why)
        return self.problem.with_traceback(None)

    def add_tags_later(self, name: str, own_tags: Mapping[str, str]) -> None:
        """Add tags to a volume: to the cached state at once, and to the metadata soon.

        The caller holds the volume's lock. The tags are lost if the process is killed before they
        are written. Reads the state if the volume was created since the last read.
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
        """Refresh a changed volume group in the background, so that the next call need not."""
        if self._changed:
            self.wake()

    def wake(self) -> None:
        """Have the group's background loop do the deferred work soon."""
        self._deferred.wake(Job(self.name), _SOON_SECONDS)

    def _deferred_steps(self, job: Job) -> Steps:
        """Do the deferred work each time the job is woken, as steps of the group's loop."""
        while True:
            with command.stall_limit(_BACKGROUND_SECONDS):
                self.run_deferred(self._workers.is_ending)
            job.logged = ""
            yield math.inf

    def run_deferred(self, is_ending: bool = False) -> None:
        """Write the tags that are still to be written, and refresh the group.

        The refresh is left out if another caller changes or reads the group, or if the service
        stops. Raises as `state` does, and an ExceptionGroup of the tags that were not written.
        """
        if self._unwritten_tags:
            with self.lock.hold():
                self._write_tags()
        # A caller that changes or reads the group refreshes the state anyway.
        is_free = not self.lock.is_taken and not self._readers.is_taken
        if is_free and not is_ending:
            self.state()

    def _write_tags(self) -> None:
        """Write the tags that are still to be written, equal tags of several volumes together.

        Volumes are found by their UUIDs, since a name may be another volume's by now. Tags that
        lvm2 refuses do not keep the other tags from being written: at the end an ExceptionGroup of
        the refusals is raised.
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
                with attempts.one():
                    volumes.add_tags(self.lvm, self.name, volume_names, new_tags)
                    refused.remove(new_tags)
            with self._guard:
                for uuid, new_tags in unwritten.items():
                    if self._unwritten_tags.get(uuid) == new_tags and new_tags not in refused:
                        del self._unwritten_tags[uuid]

    def _report(self) -> report.Group | None:
        """Read the group by its metadata cache; raise GroupAwaited if it is still to be created."""
        group = self.metadata.state(is_refused=isinstance(self.problem, errors.GroupRefused))
        if group is None and self.is_awaited:
            raise errors.GroupAwaited(self.name)
        return group

    def _log_change(self, previous_status: Status) -> None:
        """Log a change of the group's status between the previous read and the last one."""
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
        """Run a command of lvm2's on the group, and note what it may have changed.

        After a command of unknown outcome, and after a failed command that changes the group, the
        metadata cache is dropped.
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
            # A failed command may have stopped half way, before a commit or after a device was
            # suspended.
            if result.exit_code and is_change:
                self.metadata.forget()
            if not result.exit_code:
                command.progressed()
            return result
        finally:
            # The flags are set after the command, since a read during the command may have seen the
            # earlier state.
            if is_change:
                self._changed = self._is_stale = True

    def _require_none_stuck(self, command_words: tuple[str, ...]) -> None:
        """Raise StillRunning or CommandStuck if a command that hangs forbids this command.

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

    The function waits for all groups together, until three seconds after the call of
    `begin_states`, or for half of the time to the caller's deadline if that is less. A group that
    takes longer is returned with its cached state, and is not waited for again for a minute.

    With `complete`, a group whose cached state may lack changes by Carver is waited for until
    fifteen seconds have passed, since no other state will do. The function then raises GroupBusy,
    GroupSilent or GroupAwaited for a group that was never read, or not since Carver changed the
    group; and GroupRefused or CommandError if a read failed so.
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
            # Staleness is checked after the first wait, since a change may have ended during that
            # wait.
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
    """Return the group with the tags that are still to be written, by their volumes' UUIDs."""
    if group is None or not unwritten:
        return group
    changed = {
        name: replace(volume, tags=volume.tags | unwritten[volume.uuid])
        for name, volume in group.volumes.items()
        if volume.uuid in unwritten
    }
    return replace(group, volumes={**group.volumes, **changed})
