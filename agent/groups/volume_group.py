"""One volume group: its lvm2, cached state, lock and deferred work.

Nothing here knows another group, so a group whose disk hangs stops no other.
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

# How long `begin_states` waits, and for how long it then does not wait for that group again.
_SHORT_WAIT_SECONDS = 3.0
# How many times as long where no answer but the group's own will do.
_NEEDED_WAIT_TIMES = 5
_REST_SECONDS = 60.0
# Errors that prove nothing about a group: it may answer the next time.
_SILENCE = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited),
    mount_errors.OutcomeUnknown,
)
# Those of a read to which neither lvm2 nor the disks had an answer.
_NO_ANSWER = (errors.GroupSilent, mount_errors.OutcomeUnknown)
_BACKGROUND_SECONDS = 60.0
# Time from when deferred work is asked for until it begins: the call that asked is answered first,
# and what others ask for by then, such as twenty volumes staged at once, is done with it.
_SOON_SECONDS = 0.1


@dataclass(frozen=True)
class _Stuck:
    """A command that does not end: no change runs beside it, and no report beside a report."""

    words: tuple[str, ...]
    ended: Callable[[], bool]
    since_seconds: float

    @property
    def seconds(self) -> float:
        """For how long."""
        return time.monotonic() - self.since_seconds


class VolumeGroup:
    """The group that `metadata` reads, by commands that are watched from now on."""

    def __init__(self, metadata: MetadataCache, workers: GroupWorkers) -> None:
        self.metadata = metadata
        name = self.name = metadata.name
        self.lock = GroupLock(f"volume group {name}")
        # The state that was read last, and when (epoch, seconds).
        self.cached: report.Group | None = None
        self.time_seconds = 0.0
        # Whether Carver has yet to create it or attach its disks: then it is not just absent.
        self.is_awaited = False
        # The last state in which the group was on this node, and when it was read.
        self.last_seen: report.Group | None = None
        self.last_seen_seconds = 0.0
        # When a state was last read or failed to be read (epoch, seconds).
        self.tried_seconds = 0.0
        self.problem: Exception | None = None
        # When the first read began since which none has ended with an answer (monotonic, seconds).
        self._unanswered_since: float | None = None
        self._run = metadata.node.run
        metadata.node = replace(metadata.node, run=self._watched)
        # Held by the one thread that reads the state.
        self._readers = GroupLock(f"volume group {name}", MOST_READING)
        self._guard = threading.Lock()
        # A refresh that has not begun yet.
        self._next: Future[report.Group | None] | None = None
        # Commands that have not ended, the oldest first.
        self._stuck: tuple[_Stuck, ...] = ()
        # Tags that are still to be written, by the UUIDs of their volumes.
        self._unwritten_tags: dict[str, frozenset[str]] = {}
        self._workers = workers
        self._deferred: Jobs[Job] = Jobs(
            workers,
            "deferred",
            self._deferred_steps,
            "volume group %s, deferred work: %s",
            urgent=True,
            last=True,
            level=logging.WARNING,
        )
        # Whether a command that changes it ended since the last read began.
        self._changed = False
        # Whether `cached` lacks what such a command did: before the first read, all of it.
        self._is_stale = True
        # Until when `begin_states` does not wait for it (monotonic, seconds).
        self._rests_until = 0.0

    @property
    def lvm(self) -> Lvm:
        """lvm2, which sees this group's disks and no others."""
        return self.metadata.lvm

    @property
    def status(self) -> Status:
        """What the state that was read last says."""
        if isinstance(self.problem, errors.GroupRefused):
            return "refused"
        if self.cached is None:
            return "absent" if self.time_seconds else "unknown"
        return "partial" if self.cached.missing_disks else "ready"

    @property
    def answers(self) -> bool:
        """Whether it was here and usable when it was read last."""
        return self.problem is None and self.status in ("ready", "partial")

    @property
    def is_changed(self) -> bool:
        """Whether something may have changed it since it was read with success."""
        return self._changed or bool(self._stuck) or self.problem is not None

    @property
    def has_own_changes(self) -> bool:
        """Whether the cached state has all that Carver's commands did until now.

        Not before the first read that succeeds: an earlier process may have left anything.
        """
        return not (self._is_stale or self._stuck)

    @property
    def silent_seconds(self) -> float:
        """For how long reads of it have been without an answer; 0 where the last one had one.

        Also while the first of them goes on. An error of lvm2's is an answer.
        """
        since = self._unanswered_since
        return 0.0 if since is None else time.monotonic() - since

    def state(self) -> report.Group | None:
        """The group as it is now; None where it is not on this node.

        One command where something was written to the group since it was read last, else none.
        Raises CommandError, GroupRefused, GroupSilent, GroupAwaited, GroupBusy.
        """
        with self._readers.hold():
            return self._read()

    def _read(self) -> report.Group | None:
        before, self._changed = self.status, False
        if self._unanswered_since is None:
            self._unanswered_since = time.monotonic()
        # Before the read: tags that are written meanwhile are in it, or still here.
        unwritten = dict(self._unwritten_tags)
        try:
            self.cached = _with_tags(self._report(), unwritten)
        except errors.GroupRefused as error:
            self.cached, self.problem, self.time_seconds = None, error, time.time()
            # What Carver did there is in no state, and may be there.
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
            self._log_change(before)
        return self.cached

    def refresh(self) -> "Future[report.Group | None]":
        """Read the state in a background thread, after now; callers share a read not begun yet.

        Raises RuntimeError where no thread can be had.
        """
        with self._guard:
            if self._next is None:
                self._next = command.begin("refresh", self._refresh)
            return self._next

    def _refresh(self) -> report.Group | None:
        with command.time_limit(_BACKGROUND_SECONDS), ExitStack() as turn:
            try:
                turn.enter_context(self._readers.hold())
            finally:
                with self._guard:
                    self._next = None
            return self._read()

    @property
    def _may_lack(self) -> bool:
        """Whether the cached state may lack something that Carver did, or there is none."""
        return self.cached is None or self._is_stale

    def _begin(self, complete: bool) -> "Future[report.Group | None] | None":
        """Begin the refresh that `begin_states` waits for; None where the cache will do."""
        if time.monotonic() < self._rests_until:
            needs_refresh = complete and self._may_lack
        else:
            # A read under way may be older than a change that the caller's decision is about.
            needs_refresh = complete or not self._readers.is_taken or not self.has_own_changes
        return self.refresh() if needs_refresh else None

    def _end(
        self, refreshing: "Future[report.Group | None] | None", complete: bool
    ) -> report.Group | None:
        """The state after that wait; after one in vain the next callers do not wait."""
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
        """The error that says why it does not answer."""
        if self.problem is None or isinstance(self.problem, mount_errors.OutcomeUnknown):
            why = str(self.problem or "it has not answered")
            return errors.GroupBusy(f"volume group {self.name}", why)
        return self.problem.with_traceback(None)

    def add_tags_later(self, name: str, own_tags: Mapping[str, str]) -> None:
        """Add tags to a volume: in its state from now on, and on disk soon.

        The caller holds the volume. They are lost if the process is killed before. Reads the state
        where the volume was created since the last read.
        """
        found = self.cached.volumes.get(name) if self.cached is not None else None
        if found is None and (group := self.state()) is not None:
            found = group.volumes.get(name)
        if found is None:
            raise lvm_errors.VolumeMissing(self.name, name)
        with self._guard:
            before = self._unwritten_tags.get(found.uuid, frozenset())
            self._unwritten_tags[found.uuid] = before | frozenset(tags.encode(own_tags))
        self.wake()

    def refresh_later(self) -> None:
        """Refresh a changed group in the background, so that the next call need not."""
        if self._changed:
            self.wake()

    def wake(self) -> None:
        """Have the deferred work done soon, by the loop of the group."""
        self._deferred.wake(Job(self.name), _SOON_SECONDS)

    def _deferred_steps(self, job: Job) -> Steps:
        while True:
            with command.stall_limit(_BACKGROUND_SECONDS):
                self.run_deferred(self._workers.is_ending)
            job.logged = ""
            yield math.inf

    def run_deferred(self, is_ending: bool = False) -> None:
        """Write the tags that are to be written, and refresh a changed group.

        Raises as `state` does, and an ExceptionGroup of the tags that were not written.
        """
        if self._unwritten_tags:
            with self.lock.hold():
                self._write_tags()
        # A caller that changes or reads it refreshes it anyway.
        is_free = not self.lock.is_taken and not self._readers.is_taken
        if is_free and not is_ending:
            self.state()

    def _write_tags(self) -> None:
        """Write tags, equal ones by one command; by UUIDs, as a name may be another's by now.

        Where lvm2 refuses some, the others are written. Raises an ExceptionGroup of why, then.
        """
        unwritten = dict(self._unwritten_tags)
        if (group := self.state()) is None:
            raise lvm_errors.GroupMissing(self.name)
        there = {one.uuid: one for one in group.volumes.values()}
        names: defaultdict[frozenset[str], list[str]] = defaultdict(list)
        for uuid, new in unwritten.items():
            if uuid in there:
                names[new].append(there[uuid].name)
        refused = set(names)
        with Attempts() as attempts:
            for new, those in names.items():
                with attempts.one():
                    volumes.add_tags(self.lvm, self.name, those, new)
                    refused.remove(new)
            with self._guard:
                for uuid, new in unwritten.items():
                    if self._unwritten_tags.get(uuid) == new and new not in refused:
                        del self._unwritten_tags[uuid]

    def _report(self) -> report.Group | None:
        found = self.metadata.state(is_refused=isinstance(self.problem, errors.GroupRefused))
        if found is None and self.is_awaited:
            raise errors.GroupAwaited(self.name)
        return found

    def _log_change(self, before: Status) -> None:
        """Log a change of status since the read before."""
        match before, self.status:
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
        """Run a command; after one of unknown outcome, forget the cache."""
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
            # It may have failed half way, before a commit or after a device was suspended.
            if result.exit_code and is_change:
                self.metadata.forget()
            if not result.exit_code:
                command.progressed()
            return result
        finally:
            # Not before: a read beside it may have seen the state before it.
            if is_change:
                self._changed = self._is_stale = True

    def _require_none_stuck(self, words: tuple[str, ...]) -> None:
        """Raise StillRunning for a change while any command hangs, CommandStuck for a report.

        A report beside one that hangs would hang as well, and each leaves a process behind.
        """
        if not self._stuck:
            return
        with self._guard:
            self._stuck = tuple(one for one in self._stuck if not one.ended())
            stuck = self._stuck
        if stuck and not is_report(words):
            raise lvm_errors.StillRunning(stuck[0].words[1], stuck[0].seconds)
        for one in stuck:
            if is_report(one.words):
                raise mount_errors.CommandStuck(one.words, one.seconds, one.ended)


def begin_states(
    volume_groups: Iterable[VolumeGroup], *, complete: bool = False
) -> Callable[[], dict[str, report.Group | None]]:
    """Begin to refresh groups; the function returned waits for all together and gives the states.

    It waits three seconds from now at most, or half of what is left of the deadline. A group
    that takes longer has its cached state, and is not waited for again for a minute. `complete`
    waits fifteen seconds for a group whose cached state may lack something by then, as nothing else
    can be answered in its place; then it raises: GroupBusy, GroupSilent, GroupAwaited for a group
    that was never read, or not since it was changed; GroupRefused, CommandError.
    """
    every = tuple(volume_groups)
    began = time.monotonic()
    most_seconds = command.patience_seconds(_SHORT_WAIT_SECONDS * _NEEDED_WAIT_TIMES, 0.5)
    begun = [(one, one._begin(complete)) for one in every]

    def wait_for(refreshing: Iterable["Future[report.Group | None]"], seconds: float) -> None:
        left_seconds = began + min(seconds, most_seconds) - time.monotonic()
        wait(list(refreshing), max(0.0, left_seconds))

    def end() -> dict[str, report.Group | None]:
        with trace.step(trace.WAIT, "refresh"):
            wait_for((one for _, one in begun if one is not None), _SHORT_WAIT_SECONDS)
            # Looked at now: a change may have ended since the wait began.
            needed = [
                future
                for one, future in begun
                if complete and future is not None and not future.done() and one._may_lack
            ]
            wait_for(needed, most_seconds)
        return {one.name: one._end(future, complete) for one, future in begun}

    return end


def _with_tags(
    group: report.Group | None, unwritten: Mapping[str, frozenset[str]]
) -> report.Group | None:
    """The group with its unwritten tags, by the UUIDs of their volumes."""
    if group is None or not unwritten:
        return group
    changed = {
        name: replace(one, tags=one.tags | unwritten[one.uuid])
        for name, one in group.volumes.items()
        if one.uuid in unwritten
    }
    return replace(group, volumes={**group.volumes, **changed})
