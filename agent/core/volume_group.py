"""One volume group: its lvm2, what was seen of it, what it shall bear, and whose turn it is.

Nothing in here knows another group, so that one whose disk hangs stops no other.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from agent.core import errors
from agent.core.background import DeferredWork
from agent.core.locks import MOST_LOOKING, GroupLock
from agent.core.metadata_cache import MetadataCache
from lvm import errors as lvm_errors
from lvm import report, tags, volumes
from lvm.devices import Devices
from lvm.disks import Disks, Found
from lvm.lvm2 import Lvm
from lvm.session import only_looks
from mount import command
from mount import errors as mount_errors
from mount.command import Result, Run

_log = logging.getLogger(__name__)

Status = Literal["unknown", "ready", "partial", "absent", "refused"]

# How long `begin_states` waits, and for how long it then does not wait for that group again.
_SHORT_WAIT_SECONDS = 3.0
_REST_SECONDS = 60.0
# What a look raises that proves nothing, and may be had again.
_SILENCE = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited),
    mount_errors.OutcomeUnknown,
)
_BACKGROUND_SECONDS = 60.0


@dataclass(frozen=True)
class _Stuck:
    """A command that does not end: nothing is changed beside it, nor looked beside a look."""

    words: tuple[str, ...]
    ended: Callable[[], bool]
    since_seconds: float

    @property
    def seconds(self) -> float:
        """For how long."""
        return time.monotonic() - self.since_seconds


class VolumeGroup:
    """A volume group by its name. `node` is how lvm2 is called on this node.

    `scan` tells of the node's disks, `listed` which of them the operator named for the group. `run`
    runs lvm2 for this group: by a session, if any, which `renew` has another shell for.
    """

    def __init__(
        self,
        name: str,
        node: Lvm,
        run: Run,
        disks: Disks,
        devices: Devices,
        scan: Callable[[], Mapping[str, Found]],
        renew: Callable[[], None] | None = None,
        listed: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.name = name
        self.lock = GroupLock(f"volume group {name}")
        # What it was when it was looked at last, and when that was (epoch, seconds).
        self.cached: report.Group | None = None
        self.time_seconds = 0.0
        # Whether Carver has not made it yet, or brought its disks: till then it is not just absent.
        self.is_awaited = False
        # What it was when it was here last, and when it was seen so.
        self.seen: report.Group | None = None
        self.seen_seconds = 0.0
        # When that was tried last, whatever came of it.
        self.tried_seconds = 0.0
        self.problem: Exception | None = None
        self._run = run
        node = replace(node, run=self._watched)
        self._cache = MetadataCache(name, node, disks, devices, scan, renew, listed)
        # Who looks: one at a time.
        self._readers = GroupLock(f"volume group {name}", MOST_LOOKING)
        self._guard = threading.Lock()
        # A refresh that has not begun yet.
        self._next: Future[report.Group | None] | None = None
        # All that have not ended, the oldest first.
        self._stuck: tuple[_Stuck, ...] = ()
        # The tags that volumes shall bear, by the volumes' UUIDs, until they are written.
        self._promised: dict[str, frozenset[str]] = {}
        self._behind = DeferredWork(name, self.settle)
        # Whether a command that changes it ended since a look at it began.
        self._changed = False
        # Whether `last` lacks what such a command did.
        self._is_stale = False
        # Until when nobody waits for it who does not need it (monotonic, seconds).
        self._rests_until = 0.0

    @property
    def lvm(self) -> Lvm:
        """lvm2, which sees this group's disks and no others."""
        return self._cache.lvm

    def lvm_with(self, disk: str) -> Lvm:
        """The same, which sees a disk more: one that is to become the group's."""
        return self._cache.lvm_with(disk)

    @property
    def status(self) -> Status:
        """As it was seen last."""
        if isinstance(self.problem, errors.GroupRefused):
            return "refused"
        if self.cached is None:
            return "absent" if self.time_seconds else "unknown"
        return "partial" if self.cached.missing_disks else "ready"

    @property
    def answers(self) -> bool:
        """Whether it was there, and could be used, when it was looked at last."""
        return self.problem is None and self.status in ("ready", "partial")

    @property
    def is_changed(self) -> bool:
        """Whether something may have changed it since it was looked at with success."""
        return self._changed or bool(self._stuck) or self.problem is not None

    @property
    def ignored(self) -> Sequence[tuple[str, str]]:
        """The disks that claim to be the group's and are not, each with the reason."""
        return self._cache.ignored

    @property
    def is_outdated(self) -> bool:
        """Whether a disk came, went or changed since it was looked at."""
        return self._cache.is_outdated

    def outdate(self) -> None:
        """A disk came or went, or may have."""
        self._cache.is_outdated = True

    def has(self, disk: str) -> bool:
        """Whether that path was a disk of the group when it was looked at last."""
        return self._cache.has(disk)

    def state(self) -> report.Group | None:
        """The group as it is now; None where it is not on this node.

        One command where something was written to the group since it was read last, else none.
        Raises CommandError, GroupRefused, GroupSilent, GroupAwaited, GroupBusy.
        """
        with self._readers.turn():
            return self._read()

    def _read(self) -> report.Group | None:
        before, self._changed = self.status, False
        # Before the look: what is written meanwhile is in it, or still here.
        promised = dict(self._promised)
        try:
            self.cached = _with_tags(self._report(), promised)
        except errors.GroupRefused as error:
            self.cached, self.problem, self.time_seconds = None, error, time.time()
            raise
        except Exception as error:
            self.problem = error
            raise
        else:
            self.problem, self.time_seconds, self._rests_until = None, time.time(), 0.0
            self._is_stale = self._changed
            if self.cached is not None:
                self.seen, self.seen_seconds = self.cached, self.time_seconds
        finally:
            self.tried_seconds = time.time()
            self._tell(before)
        return self.cached

    def refresh(self) -> "Future[report.Group | None]":
        """Read the state in a background thread, after now; callers share a read not begun yet.

        Raises RuntimeError where no thread can be had.
        """
        with self._guard:
            if self._next is None:
                self._next = command.begin("look", self._refresh)
            return self._next

    def _refresh(self) -> report.Group | None:
        with command.time_limit(_BACKGROUND_SECONDS), ExitStack() as turn:
            try:
                turn.enter_context(self._readers.turn())
            finally:
                with self._guard:
                    self._next = None
            return self._read()

    def _begin(self, complete: bool) -> "Future[report.Group | None] | None":
        """Begin the refresh that `begin_states` waits for; None where the cache will do."""
        if self._rests:
            needs_refresh = complete and (self.cached is None or self._is_stale)
        else:
            needs_refresh = complete or not self._readers.is_taken
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
        if complete and (self.cached is None or self._is_stale):
            raise self.silence
        return self.cached

    @property
    def silence(self) -> Exception:
        """Why it does not answer, for callers to repeat."""
        if self.problem is None or isinstance(self.problem, mount_errors.OutcomeUnknown):
            why = str(self.problem or "it has not answered")
            return errors.GroupBusy(f"volume group {self.name}", why)
        return self.problem.with_traceback(None)

    def promise(self, name: str, own_tags: Mapping[str, str]) -> None:
        """Add tags to a volume: from now on for whoever looks, and on disk soon.

        The caller holds the volume. One look where it was made since the last one. A process that
        is killed before has promised nothing.
        """
        found = self.cached.volumes.get(name) if self.cached is not None else None
        if found is None and (group := self.state()) is not None:
            found = group.volumes.get(name)
        if found is None:
            raise lvm_errors.VolumeMissing(self.name, name)
        new = frozenset(tags.encode(own_tags))
        with self._guard:
            self._promised[found.uuid] = self._promised.get(found.uuid, frozenset()) | new
        self._behind.wake()

    def wake(self) -> None:
        """Look behind the answers at what was changed, so that the next call need not."""
        if self._changed:
            self._behind.wake()

    def catch_up(self) -> None:
        """Begin what was put off and has no thread; returns at once."""
        self._behind.catch_up()

    def settle(self, is_ending: bool = False) -> None:
        """Do what was put off: write the tags that were promised, look at what was changed.

        Raises what a look or lvm2 raises.
        """
        if self._promised:
            with self.lock.turn():
                self._write_promised()
        # Where somebody waits to change it, or looks, the look is his.
        is_free = not self.lock.is_taken and not self._readers.is_taken
        if is_free and not is_ending:
            self.state()

    def stop(self) -> None:
        """Do what was put off, unless that takes long, and put nothing off any more."""
        self._behind.stop()

    def _write_promised(self) -> None:
        """Write tags, the same of several volumes by one command; the caller holds the group.

        A name may be another volume's by now: a UUID is not.
        """
        promised = dict(self._promised)
        if (group := self.state()) is None:
            raise lvm_errors.GroupMissing(self.name)
        there = {one.uuid: one for one in group.volumes.values()}
        names: defaultdict[frozenset[str], list[str]] = defaultdict(list)
        for uuid, new in promised.items():
            if uuid in there:
                names[new].append(there[uuid].name)
        for new, those in names.items():
            volumes.add_tags(self.lvm, self.name, those, new)
        with self._guard:
            for uuid, new in promised.items():
                if self._promised.get(uuid) == new:
                    del self._promised[uuid]

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until

    def _report(self) -> report.Group | None:
        is_refused = isinstance(self.problem, errors.GroupRefused)
        found = self._cache.state(is_refused=is_refused)
        if found is None and self.is_awaited:
            raise errors.GroupAwaited(self.name)
        return found

    def _tell(self, before: Status) -> None:
        """Say once what became of the group since it was looked at before."""
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
        """The seam `mount.command.Run`: after a command that may have done anything, look anew."""
        self._require_none_stuck(words)
        is_change = not only_looks(words)
        try:
            result = self._run(*words)
        except mount_errors.CommandStuck as error:
            self._cache.forget()
            with self._guard:
                self._stuck += (_Stuck(words, error.ended, time.monotonic()),)
            raise
        except (mount_errors.OutcomeUnknown, lvm_errors.StillRunning):
            self._cache.forget()
            raise
        else:
            # It may have failed half way, before a commit or after a device was suspended.
            if result.exit_code and is_change:
                self._cache.forget()
            return result
        finally:
            # Not before: a look beside it may have seen what was there until then.
            if is_change:
                self._changed = self._is_stale = True

    def _require_none_stuck(self, words: tuple[str, ...]) -> None:
        """Raise StillRunning for a change while any command does not end.

        And CommandStuck for a look while a look does not: another would hang as well, and each
        leaves a process behind.
        """
        if not self._stuck:
            return
        with self._guard:
            self._stuck = tuple(one for one in self._stuck if not one.ended())
            stuck = self._stuck
        if stuck and not only_looks(words):
            raise lvm_errors.StillRunning(stuck[0].words[1], stuck[0].seconds)
        for one in stuck:
            if only_looks(one.words):
                raise mount_errors.CommandStuck(one.words, one.seconds, one.ended)


def begin_states(
    volume_groups: Iterable[VolumeGroup], *, complete: bool = False
) -> Callable[[], dict[str, report.Group | None]]:
    """Begin to refresh groups; the function returned waits for all together and gives the states.

    It waits three seconds from now at most, or half of what is left of the deadline. A group
    that takes longer has its cached state, and is not waited for again for a minute. `complete`
    raises where that state may lack something: GroupBusy, GroupSilent, GroupAwaited for a group
    that was never read, or not since it was changed; GroupRefused, CommandError.
    """
    until = time.monotonic() + _SHORT_WAIT_SECONDS
    begun = [(one, one._begin(complete)) for one in volume_groups]

    def end() -> dict[str, report.Group | None]:
        left, remaining = until - time.monotonic(), command.remaining_seconds()
        patience = left if remaining is None else min(left, remaining / 2)
        wait([future for _, future in begun if future is not None], max(0.0, patience))
        return {one.name: one._end(future, complete) for one, future in begun}

    return end


def _with_tags(
    group: report.Group | None, promised: Mapping[str, frozenset[str]]
) -> report.Group | None:
    """The group with tags that its volumes shall bear, by the volumes' UUIDs."""
    if group is None or not promised:
        return group
    changed = {
        name: replace(one, tags=one.tags | promised[one.uuid])
        for name, one in group.volumes.items()
        if one.uuid in promised
    }
    return replace(group, volumes={**group.volumes, **changed})
