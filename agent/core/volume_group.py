"""One volume group: its lvm2, what was seen of it, what it shall bear, and whose turn it is.

Nothing in here knows another group, so that one whose disk hangs stops no other.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from agent.core import errors
from agent.core.background import DeferredWork
from agent.core.locks import MOST_LOOKING, GroupLock
from agent.core.metadata_cache import MetadataCache
from lvm import command, report, tags, volumes
from lvm import errors as lvm_errors
from lvm.command import Result, Run
from lvm.devices import Devices
from lvm.disks import Disks, Found
from lvm.lvm2 import Lvm
from lvm.session import only_looks

_log = logging.getLogger(__name__)

State = Literal["unknown", "ready", "partial", "absent", "refused"]

# How long those wait for it who have to do with another group, or make a list of all, and how long
# then not again.
_GLANCE_SECONDS = 3.0
_REST_SECONDS = 60.0
# What a look raises that proves nothing, and may be had again.
_SILENCE = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited),
    lvm_errors.OutcomeUnknown,
)
# What is looked at behind everyone's back keeps nobody waiting.
_BEHIND_SECONDS = 60.0


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
        self.queue = GroupLock(f"volume group {name}")
        # What it was when it was looked at last, and when that was (epoch, seconds).
        self.last: report.Group | None = None
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
        self._sight = MetadataCache(name, node, disks, devices, scan, renew, listed)
        # Who looks: one at a time.
        self._looks = GroupLock(f"volume group {name}", MOST_LOOKING)
        self._guard = threading.Lock()
        self._looking: Future[None] | None = None
        # A look that has not begun yet.
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
        return self._sight.lvm

    def lvm_with(self, disk: str) -> Lvm:
        """The same, which sees a disk more: one that is to become the group's."""
        return self._sight.lvm_with(disk)

    @property
    def state(self) -> State:
        """As it was seen last."""
        if isinstance(self.problem, errors.GroupRefused):
            return "refused"
        if self.last is None:
            return "absent" if self.time_seconds else "unknown"
        return "partial" if self.last.missing_disks else "ready"

    @property
    def answers(self) -> bool:
        """Whether it was there, and could be used, when it was looked at last."""
        return self.problem is None and self.state in ("ready", "partial")

    @property
    def is_changed(self) -> bool:
        """Whether something may have changed it since it was looked at with success."""
        return self._changed or bool(self._stuck) or self.problem is not None

    @property
    def ignored(self) -> Sequence[tuple[str, str]]:
        """The disks that claim to be the group's and are not, each with the reason."""
        return self._sight.ignored

    @property
    def is_outdated(self) -> bool:
        """Whether a disk came, went or changed since it was looked at."""
        return self._sight.is_outdated

    def outdate(self) -> None:
        """A disk came or went, or may have."""
        self._sight.is_outdated = True

    def has(self, disk: str) -> bool:
        """Whether that path was a disk of the group when it was looked at last."""
        return self._sight.has(disk)

    def look(self) -> report.Group | None:
        """The group as it is now; None where it is not on this node.

        One command where something was written to it since it was looked at last, else none.
        Raises LvmError, GroupRefused, GroupSilent, GroupAwaited, GroupBusy.
        """
        with self._looks.turn():
            return self._look_in_turn()

    def _look_in_turn(self) -> report.Group | None:
        before, self._changed = self.state, False
        # Before the look: what is written meanwhile is in it, or still here.
        promised = dict(self._promised)
        try:
            self.last = _with_tags(self._look(), promised)
        except errors.GroupRefused as error:
            self.last, self.problem, self.time_seconds = None, error, time.time()
            raise
        except Exception as error:
            self.problem = error
            raise
        else:
            self.problem, self.time_seconds, self._rests_until = None, time.time(), 0.0
            self._is_stale = self._changed
            if self.last is not None:
                self.seen, self.seen_seconds = self.last, self.time_seconds
        finally:
            self.tried_seconds = time.time()
            self._tell(before)
        return self.last

    def glance(self) -> report.Group | None:
        """The same, or what it was when it was looked at last, where that would take long.

        For those who have to do with another group, and ask of this one only what it has, too. A
        command that does not end though its time is over does not hold them either.
        """
        return Glances([self]).end()[self.name]

    def begin_glance(self) -> Future[None] | None:
        """The look that a glance waits for; None where it waits for none."""
        return None if self._looks.is_taken or self._rests else self.look_behind()

    def end_glance(self, looking: Future[None] | None) -> report.Group | None:
        """What it is, or was, after that wait; where it was in vain, the next are spared it."""
        if looking is not None and (not looking.done() or self.problem is not None):
            self._rests_until = time.monotonic() + _REST_SECONDS
        return self.last

    def begin_list(self) -> "Future[report.Group | None] | None":
        """The look that a list waits for; None where it waits for none.

        It begins after now, as a list must have what was made before. Who asks before it begins has
        the same one.
        """
        if self._rests and self.last is not None and not self._is_stale:
            return None
        with self._guard:
            if self._next is None:
                self._next = command.begin("look", self._look_next)
            return self._next

    def end_list(self, looking: "Future[report.Group | None] | None") -> report.Group | None:
        """The group after that wait; as it was last where it did not answer.

        Raises what keeps a list from being whole: GroupBusy, GroupSilent, GroupAwaited where the
        group was never seen, or not since something was changed in it; GroupRefused, LvmError.
        """
        if looking is None:
            return self.last
        if looking.done() and not isinstance(looking.exception(), _SILENCE):
            return looking.result()
        self._rests_until = time.monotonic() + _REST_SECONDS
        if self.last is None or self._is_stale:
            raise self.silence
        return self.last

    @property
    def silence(self) -> Exception:
        """Why it does not answer, for callers to repeat."""
        if self.problem is None or isinstance(self.problem, lvm_errors.OutcomeUnknown):
            why = str(self.problem or "it has not answered")
            return errors.GroupBusy(f"volume group {self.name}", why)
        return self.problem.with_traceback(None)

    def _look_next(self) -> report.Group | None:
        try:
            with command.time_limit(_BEHIND_SECONDS), self._looks.turn():
                self._forget_next()
                return self._look_in_turn()
        finally:
            self._forget_next()

    def _forget_next(self) -> None:
        with self._guard:
            self._next = None

    def promise(self, name: str, own_tags: Mapping[str, str]) -> None:
        """Add tags to a volume: from now on for whoever looks, and on disk soon.

        The caller holds the volume. One look where it was made since the last one. A process that
        is killed before has promised nothing.
        """
        found = self.last.volumes.get(name) if self.last is not None else None
        if found is None and (group := self.look()) is not None:
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
            with self.queue.turn():
                self._write_promised()
        # Where somebody waits to change it, or looks, the look is his.
        is_free = not self.queue.is_taken and not self._looks.is_taken
        if is_free and not is_ending:
            self.look()

    def stop(self) -> None:
        """Do what was put off, unless that takes long, and put nothing off any more."""
        self._behind.stop()

    def _write_promised(self) -> None:
        """Write tags, the same of several volumes by one command; the caller holds the group.

        A name may be another volume's by now: a UUID is not.
        """
        promised = dict(self._promised)
        if (group := self.look()) is None:
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

    def look_behind(self) -> Future[None]:
        """Have it looked at in a thread of its own: once at a time, however long it takes.

        Raises RuntimeError where none can be had.
        """
        with self._guard:
            if self._looking is None or self._looking.done():
                self._looking = command.begin("look", self._look_for)
            return self._looking

    def _look_for(self) -> None:
        # What it raises whoever waits sees by `problem`.
        with command.time_limit(_BEHIND_SECONDS):
            self.look()

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until

    def _look(self) -> report.Group | None:
        is_refused = isinstance(self.problem, errors.GroupRefused)
        found = self._sight.look(is_refused=is_refused)
        if found is None and self.is_awaited:
            raise errors.GroupAwaited(self.name)
        return found

    def _tell(self, before: State) -> None:
        """Say once what became of the group since it was looked at before."""
        match before, self.state:
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
        """The seam `lvm.command.Run`: after a command that may have done anything, look anew."""
        self._require_none_stuck(words)
        is_change = not only_looks(words)
        try:
            result = self._run(*words)
        except lvm_errors.CommandStuck as error:
            self._sight.forget()
            with self._guard:
                self._stuck += (_Stuck(words, error.ended, time.monotonic()),)
            raise
        except (lvm_errors.OutcomeUnknown, lvm_errors.StillRunning):
            self._sight.forget()
            raise
        else:
            # It may have failed half way, before a commit or after a device was suspended.
            if result.exit_code and is_change:
                self._sight.forget()
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
                raise lvm_errors.CommandStuck(one.words, one.seconds, one.ended)


class Glances:
    """Glances at several groups, begun at once: those that hang are waited for together."""

    def __init__(self, volume_groups: Iterable[VolumeGroup]) -> None:
        self._until_seconds = time.monotonic() + _GLANCE_SECONDS
        self._begun = [(one, one.begin_glance()) for one in volume_groups]

    def end(self) -> dict[str, report.Group | None]:
        """What `Engine.glance` tells of each, by their names."""
        left, remaining = self._until_seconds - time.monotonic(), command.remaining_seconds()
        patience = max(0.0, left if remaining is None else min(left, remaining))
        wait([looking for _, looking in self._begun if looking is not None], patience)
        return {one.name: one.end_glance(looking) for one, looking in self._begun}


def listed(
    volume_groups: Iterable[VolumeGroup],
) -> Iterator[tuple[str, Callable[[], report.Group | None]]]:
    """The names of groups, and what tells of each for a list (`Engine.end_list`).

    All are looked at at once. Those that hang are waited for together, for three seconds, or half
    of the caller's time.
    """
    begun = [(one, one.begin_list()) for one in volume_groups]
    remaining = command.remaining_seconds()
    patience = _GLANCE_SECONDS if remaining is None else min(_GLANCE_SECONDS, remaining / 2)
    wait([looking for _, looking in begun if looking is not None], patience)
    return ((one.name, partial(one.end_list, looking)) for one, looking in begun)


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
