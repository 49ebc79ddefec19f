"""One volume group: its disks, its lvm2, what is known of it, and whose turn it is.

Nothing in here knows another group, so that one whose disk hangs stops no other.

What lvm2 reported is kept, and is as good as a new report for as long as nothing was written to the
group: each commit of metadata moves the place on the disks where they are (lvm.labels), and looking
there takes microseconds, and no process. So absence is proved too, by a look after the question.
The report is read anew after a commit, whoever made it; after a command of which nobody knows what
it did; where a disk came or went; where a device was left suspended, or a snapshot is not active;
and when it is old. What the metadata do not say, such as whether a volume is active, is asked of
the kernel.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Literal

from agent import errors
from agent.engine.behind import Behind
from agent.engine.disks import Location, locate
from agent.engine.queue import MOST_LOOKING, Queue
from lvm import command, devicemapper, report, tags, volumes
from lvm import errors as lvm_errors
from lvm.command import Result, Run
from lvm.devices import Devices
from lvm.disks import Disks, Fingerprint, Found
from lvm.lvm2 import Lvm
from lvm.shell import only_looks

_log = logging.getLogger(__name__)

State = Literal["unknown", "ready", "partial", "absent", "refused"]

# What is wrong without a trace in the metadata is found out this late.
_LASTS_SECONDS = 600.0
# So often the disks' labels are read where udev tells of none that came or went.
_BLIND_SECONDS = 60.0
# How long those wait for it who have to do with another group, and how long then not again.
_GLANCE_SECONDS = 5.0
_REST_SECONDS = 60.0
# How long those wait who make a list, where their callers say nothing.
_LIST_SECONDS = 10.0
# What is looked at behind everyone's back keeps nobody waiting.
_BEHIND_SECONDS = 60.0
# A path that is no disk: lvm2 that is confined to it sees no group.
_NO_DISK = "/dev/null"


@dataclass(frozen=True)
class _Known:
    """A report of the group, and the proof by which it is still true."""

    group: report.Group
    location: Location
    fingerprint: Fingerprint
    time_seconds: float


@dataclass(frozen=True)
class _Stuck:
    """A command that does not end; nothing is changed beside it."""

    subcommand: str
    ended: Callable[[], bool]
    since_seconds: float


class Engine:
    """A volume group by its name. `node` is how lvm2 is called on this node.

    `scan` tells of the node's disks. `run` runs lvm2 for this group: by a session, if any, which
    `renew` has another shell for.
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
    ) -> None:
        self.name = name
        self.queue = Queue(f"volume group {name}")
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
        self._node = node
        self._run = run
        self._disks = disks
        self._devices = devices
        self._scan = scan
        self._renew = renew
        # Who looks: one at a time.
        self._looks = Queue(f"volume group {name}", MOST_LOOKING)
        self._guard = threading.Lock()
        self._looking: Future[None] | None = None
        self._location: Location | None = None
        # When its disks were looked for last (monotonic, seconds).
        self._located = 0.0
        self._known: _Known | None = None
        self._stuck: _Stuck | None = None
        # The tags that volumes shall bear, by the volumes' UUIDs, until they are written.
        self._promised: dict[str, frozenset[str]] = {}
        self._behind = Behind(name, self.settle)
        # Whether a command that changes it ended since a look at it began.
        self._changed = False
        # Until when nobody waits for it who does not need it (monotonic, seconds).
        self._rests_until = 0.0
        # Whether a disk came, went or moved, perhaps.
        self._moved = True

    @property
    def lvm(self) -> Lvm:
        """lvm2, which sees this group's disks and no others."""
        return self._lvm_at(self._location)

    def lvm_with(self, disk: str) -> Lvm:
        """The same, which sees a disk more: one that is to become the group's."""
        # A group that is not here has no disk to be put beside.
        own = self._location.disks if self._location is not None else ()
        return replace(self.lvm, devices=(*own, disk))

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
        return self._changed or self._stuck is not None or self.problem is not None

    @property
    def is_outdated(self) -> bool:
        """Whether a disk came, went or changed since it was looked at."""
        return self._moved

    def outdate(self) -> None:
        """A disk came or went, or may have."""
        self._moved = True

    def has(self, disk: str) -> bool:
        """Whether that path was a disk of the group when it was looked at last."""
        return self._location is not None and disk in self._location.disks

    def look(self) -> report.Group | None:
        """The group as it is now; None where it is not on this node.

        One command where something was written to it since it was looked at last, else none.
        Raises LvmError, GroupRefused, GroupSilent, GroupAwaited, GroupBusy.
        """
        with self._looks.turn():
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
        if self._looks.is_taken or self._rests:
            return self.last
        remaining = command.remaining_seconds()
        looking = self.look_behind()
        wait([looking], _GLANCE_SECONDS if remaining is None else min(_GLANCE_SECONDS, remaining))
        if not looking.done() or self.problem is not None:
            self._rests_until = time.monotonic() + _REST_SECONDS
        return self.last

    def look_or_last(self) -> report.Group | None:
        """The same as `look`; of a group that does not answer, what it was last, if it was seen.

        For lists: while a group does not answer nobody changes it. Waits for half of the caller's
        time at most, and then for nothing for a while.
        """
        if self._rests and self.last is not None:
            return self.last
        remaining = command.remaining_seconds()
        try:
            with command.time_limit(_LIST_SECONDS if remaining is None else remaining / 2):
                return self.look()
        except (
            errors.GroupBusy,
            errors.GroupSilent,
            errors.GroupAwaited,
            lvm_errors.OutcomeUnknown,
        ):
            self._rests_until = time.monotonic() + _REST_SECONDS
            if self.last is None:
                raise
            return self.last

    def promise(self, name: str, facts: Mapping[str, str]) -> None:
        """Have a volume bear facts: from now on for whoever looks, and on disk soon.

        The caller holds the volume. One look where it was made since the last one. A process that
        is killed before has promised nothing.
        """
        found = self.last.volumes.get(name) if self.last is not None else None
        if found is None and (group := self.look()) is not None:
            found = group.volumes.get(name)
        if found is None:
            raise lvm_errors.VolumeMissing(self.name, name)
        new = frozenset(tags.encode(facts))
        with self._guard:
            self._promised[found.uuid] = self._promised.get(found.uuid, frozenset()) | new
        self._behind.wake()

    def wake(self) -> None:
        """Look behind the answers at what was changed, so that the next call need not."""
        if self._changed:
            self._behind.wake()

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
        """Have it looked at in a thread of its own: once at a time, however long it takes."""
        with self._guard:
            if self._looking is None or self._looking.done():
                self._looking = Future()
                threading.Thread(
                    target=self._look_for, args=[self._looking], name="look", daemon=True
                ).start()
            return self._looking

    def _look_for(self, looking: Future[None]) -> None:
        try:
            with command.time_limit(_BEHIND_SECONDS):
                self.look()
        except BaseException as error:
            # Whoever waits looks at `problem`.
            looking.set_exception(error)
        else:
            looking.set_result(None)

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until

    def _look(self) -> report.Group | None:
        known, self._known = self._known, None
        if known is not None and not self._may_have_moved(known):
            mark = self._fingerprint(known.location)
            if self._still_holds(known, mark):
                return self._as_it_is(known)
            # lvm2 sees these disks only: after a commit that was about disks it shows others.
            group = None if mark is None else self._shown(known.location)
            # What was exported meanwhile it shows too; the disks tell whose it is then.
            if group is not None and group.is_one_node_s and _is_whole_on(group, known.location):
                return self._remembered(group, known.location, mark)
        location = self._locate()
        if location is None:
            if self.is_awaited:
                raise errors.GroupAwaited(self.name)
            return None
        mark = self._fingerprint(location)
        if known is not None and location == known.location and self._still_holds(known, mark):
            return self._as_it_is(known)
        group = self._shown(location)
        if group is None and self._renew and not isinstance(self.problem, errors.GroupRefused):
            # The disks bear it: before a shell is believed that it is not, another is asked.
            self._renew()
            group = self._shown(location)
        if group is None:
            raise errors.GroupRefused(self.name, _why_hidden(location))
        return self._remembered(group, location, mark)

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

    def _may_have_moved(self, known: _Known) -> bool:
        """Whether disks of the group may have come or gone since it was looked at."""
        is_old = time.monotonic() - self._located >= _BLIND_SECONDS
        return self._moved or is_old or bool(known.location.missing)

    def _still_holds(self, known: _Known, mark: Fingerprint | None) -> bool:
        """Whether what is known of the group is true, where its disks have that proof."""
        is_old = time.monotonic() - known.time_seconds >= _LASTS_SECONDS
        return mark == known.fingerprint and not is_old and self._can_be_asked(known.group)

    def _can_be_asked(self, group: report.Group) -> bool:
        """Whether the kernel tells of all snapshots whether they are lost: of inactive ones not."""
        every = group.volumes.values()
        return all(self._devices.find(self.name, one.name) for one in every if one.is_copy_on_write)

    def _locate(self) -> Location | None:
        # Before the look: what changes meanwhile may be in it, or not.
        self._moved, self._located = False, time.monotonic()
        try:
            found = locate(self._scan(), self.name)
        except errors.GroupRefused:
            self._moved, self._location = True, None
            raise
        except BaseException:
            self._moved = True
            raise
        # In one step: a command that others begin meanwhile sees the disks as they were.
        self._location = found
        return found

    def _shown(self, location: Location) -> report.Group | None:
        """What lvm2 says of the group there; None where it says of none, or of one on others."""
        told = report.read(self._lvm_at(location), self._devices.overflowed)
        group = told.groups.get(self.name)
        return group if group is not None and group.uuid == location.uuid else None

    def _remembered(
        self, group: report.Group, location: Location, mark: Fingerprint | None
    ) -> report.Group:
        """The group, which is known from now on if nothing was committed while lvm2 read it."""
        if mark is not None and mark == self._fingerprint(location) and not _suspended(group):
            self._known = _Known(group, location, mark, time.monotonic())
        return group

    def _fingerprint(self, location: Location) -> Fingerprint | None:
        remaining = command.remaining_seconds()
        if remaining is None:
            return self._disks.fingerprint(location.disks)
        return self._disks.fingerprint(location.disks, remaining)

    def _as_it_is(self, known: _Known) -> report.Group:
        """The group that is known, with what came over its snapshots since, without a commit."""
        self._known, group = known, known.group
        lost = {
            one.name: replace(one, overflowed=True)
            for one in group.volumes.values()
            if one.is_copy_on_write and not one.overflowed and self._has_overflowed(one.name)
        }
        return replace(group, volumes={**group.volumes, **lost}) if lost else group

    def _has_overflowed(self, name: str) -> bool:
        told = self._devices.status(self.name, name)
        return devicemapper.has_overflowed(told)

    def _lvm_at(self, location: Location | None) -> Lvm:
        disks = (_NO_DISK,) if location is None else location.disks
        return replace(self._node, run=self._watched, devices=disks)

    def _watched(self, *words: str) -> Result:
        """The seam `lvm.command.Run`: after a command that may have done anything, look anew."""
        stuck = self._stuck
        if stuck is not None and not only_looks(words):
            if not stuck.ended():
                seconds = time.monotonic() - stuck.since_seconds
                raise lvm_errors.StillRunning(stuck.subcommand, seconds)
            self._stuck = None
        try:
            return self._run(*words)
        except lvm_errors.CommandStuck as error:
            self._known, self._stuck = None, _Stuck(words[1], error.ended, time.monotonic())
            raise
        except (lvm_errors.OutcomeUnknown, lvm_errors.StillRunning):
            self._known = None
            raise
        finally:
            # Not before: a look beside it may have seen what was there until then.
            if not only_looks(words):
                self._changed = True


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


def _is_whole_on(group: report.Group, location: Location) -> bool:
    """Whether lvm2 shows the group on all these disks, and none of it anywhere else."""
    return not group.missing_disks and len(group.disks) == len(location.disks)


def _why_hidden(location: Location) -> str:
    """Why lvm2 may not show a group that is on disks here: only lvm2 knows whose it takes it for.

    This node's own system id has five sources (lvmsystemid(7)), some elsewhere in a container.
    """
    if not location.system_id:
        bearers = ", ".join(location.disks)
        return f"{bearers} bear it, and lvm2 does not show it: see `pvs -a` and lvm.conf(5)"
    return (
        f"it is the node's with the system id {location.system_id}, and lvm2 keeps it from this one"
        " (`lvm systemid`); `vgexport` it there and `vgimport` it here, or see `A group of another"
        " node` in docs/lvm2.md"
    )


def _suspended(group: report.Group) -> bool:
    """Whether a device was left suspended: whatever ends that writes no metadata."""
    return any(one.suspended for one in group.volumes.values())
