"""Extend thin pools and the COW stores of snapshots before they are full.

The loop of each group looks every two seconds, by ioctl only: an idle node runs no command, and a
group that hangs delays no other's. Of many snapshots it asks those to whose COW stores something
was written, by one file that has all of them. Past its threshold a pool's data or metadata, or a
COW store, is extended by its share, or by as much more as brings it below the threshold, within the
room that the class's reserve leaves. A crash in between does no harm: each step is one lvextend.

If it cannot be extended, a warning is logged once, and it is retried every ten seconds: the kernel
holds writes to a full pool for a minute, and the obstacle may be gone by then.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agent.core import errors, ids, tag
from agent.operations import erase_deleted
from agent.operations.erase_free import FreedSpaceEraser
from agent.volumes.allocation import pool_name
from agent.volumes.context import Context
from agent.work.group_worker import Looks
from lvm import layout, names, thin, volumes
from lvm.active_devices import Written
from lvm.devicemapper import Snapshot, Status, ThinPool
from lvm.layout import Reserve
from lvm.lvm2 import Lvm
from lvm.room import Room
from lvm.thin import Policy
from mount import command
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_RETRY_SECONDS = 10.0
_SOON_SECONDS = 2.0
_PATIENCE_SECONDS = 60.0
_FAILURE = "volume group %s: cannot tell how full its pools and snapshots are: %s"
# How often all snapshots are asked: an operator may have the kernel count no I/O (queue/iostats).
_ALL_SECONDS = 60.0
# Classes have no setting for when snapshots grow.
_OF_SNAPSHOTS = Policy()
_ALL_OF_IT = Reserve(percent=1000)

KINDS = DATA, METADATA, AREA = ("data", "metadata", "snapshot")
OUTCOMES = EXTENDED, NO_ROOM, FAILED = ("extended", "no room", "failed")


@dataclass(frozen=True)
class _Part:
    """A pool's data or metadata, or a COW store.

    `extend` takes how full the part is. It returns by how many bytes it extended it: 0 if there is
    no room, None if there is nothing to extend.
    """

    group: str
    name: str
    kind: str
    policy: Policy = field(compare=False)
    extend: Callable[[Lvm, Room, float], int | None] = field(compare=False)

    def __str__(self) -> str:
        return f"the {self.kind} of {self.group}/{self.name}"


@dataclass
class _Areas:
    """How full the COW stores of a group were, and what had been written there by then."""

    percents: dict[str, float] = field(default_factory=dict)
    written: Mapping[str, Written] = field(default_factory=dict)
    # When all were asked last (monotonic, seconds).
    asked_seconds: float = float("-inf")


class Autoextender:
    """Extends pools and COW stores that are too full."""

    def __init__(self, context: Context, sweeper: FreedSpaceEraser) -> None:
        self._sweeper = sweeper
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._devices = context.devices
        self._allocators = context.allocators
        self._counting = threading.Lock()
        self._counts = Counter({(kind, outcome): 0 for kind in KINDS for outcome in OUTCOMES})
        # When the retry of a part that could not grow is due (monotonic, seconds), by group.
        self._due: defaultdict[str, dict[_Part, float]] = defaultdict(dict)
        self._areas: defaultdict[str, _Areas] = defaultdict(_Areas)
        self.looks = Looks(
            context.workers,
            "grow",
            lambda: context.configuration.now.groups,
            self.look,
            _LOOK_SECONDS,
            _FAILURE,
        )

    def counts(self) -> Mapping[tuple[str, str], int]:
        """How often each kind was extended, had no room, or failed."""
        with self._counting:
            return dict(self._counts)

    def step(self, now_seconds: float) -> bool:
        """Look once at each group, as if it were then; returns whether anything was extended."""
        grown = [self.look(one, lambda: now_seconds) for one in self._volume_groups.names]
        return any(grown)

    def look(self, group: str, clock: Callable[[], float] = time.monotonic) -> bool:
        """Look once, and extend what is too full; returns whether anything was extended.

        Then the next look is at once, to keep pace with a writer.
        """
        grown, full, before = False, dict(self._full(group, clock)), self._due[group]
        due = self._due[group] = {part: before[part] for part in full if part in before}
        for part, percent in full.items():
            if part not in due or due[part] <= clock():
                grown |= self._extend(part, percent, clock)
        return grown

    def _full(self, group: str, clock: Callable[[], float]) -> Iterator[tuple[_Part, float]]:
        """The parts of a group that are too full, with percentages."""
        for name, percent in self._full_areas(group, clock()):
            yield _Part(group, name, AREA, _OF_SNAPSHOTS, partial(self._extend_area, name)), percent
        known = self._volume_groups.known(group)
        for one in self._allocators.growing(group, None if known is None else known.cached):
            pool = pool_name(one.device_class)
            status = self._activator.status(group, pool)
            for kind, extend in ((DATA, one.extend_data), (METADATA, one.extend_metadata)):
                percent = _percent(kind, status)
                if percent > one.policy.autoextend_threshold:
                    yield _Part(group, pool, kind, one.policy, extend), percent

    def _full_areas(self, group: str, now_seconds: float) -> Iterator[tuple[str, float]]:
        """The snapshots whose COW stores are too full; these are asked each time."""
        seen, threshold = self._areas[group], _OF_SNAPSHOTS.autoextend_threshold
        if now_seconds - seen.asked_seconds >= _ALL_SECONDS:
            seen = _Areas(asked_seconds=now_seconds)
        # Read first: snapshots that are written to meanwhile are asked again.
        written, percents = self._devices.written(group), dict[str, float]()
        for name, so_much in written.items():
            if not any(names.is_of(one, name) for one in (ids.SNAPSHOT_PREFIX, ids.BRIDGE_PREFIX)):
                continue
            percent = seen.percents.get(name, threshold + 1)
            if percent > threshold or so_much is None or seen.written.get(name) != so_much:
                percent = _percent(AREA, self._devices.own_status(group, name))
            percents[name] = percent
            if percent > threshold:
                yield name, percent
        self._areas[group] = _Areas(percents, written, seen.asked_seconds)

    def _extend(self, part: _Part, percent: float, clock: Callable[[], float]) -> bool:
        due = self._due[part.group]
        try:
            with command.time_limit(_PATIENCE_SECONDS):
                more_bytes, is_swept = self._grow(part, percent)
                if more_bytes == 0 and is_swept:
                    with self._sweeper.giving_way(part.group):
                        more_bytes, _ = self._grow(part, percent)
        except (errors.AgentError, mount_errors.CommandError) as error:
            self._give_up(part, percent, FAILED, str(error))
        except Exception as error:
            # Such as a fork that failed: that passes, and writers do not wait.
            self._give_up(part, percent, FAILED, repr(error))
            due[part] = clock() + _SOON_SECONDS
            return False
        else:
            if more_bytes:
                self._count(part, EXTENDED)
                due.pop(part, None)
                _log.info("%s: %.0f %% full, extended by %d bytes", part, percent, more_bytes)
                return True
            if more_bytes is not None:
                why = f"group {part.group} has no room for it"
                self._give_up(part, percent, NO_ROOM, why)
        # Counted from the end of the attempt, which may have taken as long.
        due[part] = clock() + _RETRY_SECONDS
        return False

    def _grow(self, part: _Part, percent: float) -> tuple[int | None, bool]:
        """Extend a part; by how many bytes, as `_Part` says, and whether a sweep has extents.

        Where no clean extents are free it grows into those that are to be overwritten.
        """
        with self._volume_groups.hold(part.group):
            group = self._reports.fresh(part.group).group(part.group)
            lvm, room = self._volume_groups.lvm(part.group), Room(group)
            more_bytes = part.extend(lvm, room, percent)
            is_unclean_left = room.overwriting.free_extents > room.free_extents
            if more_bytes == 0 and self._may_be_unclean(part) and is_unclean_left:
                if part.kind != AREA and tag.UNCLEAN not in group.volume(part.name).own_tags:
                    volumes.mark(lvm, group.name, part.name, old={}, new={tag.UNCLEAN: "yes"})
                more_bytes = part.extend(lvm, room.overwriting, percent)
            return more_bytes, self._may_be_unclean(part) and erase_deleted.is_sweep(
                group, ids.SWEEP
            )

    def _may_be_unclean(self, part: _Part) -> bool:
        """Whether a part may have extents that were not overwritten: it is overwritten itself."""
        return part.kind != AREA or self._sweeper.policy.zeroes

    def _give_up(self, part: _Part, percent: float, outcome: str, why: str) -> None:
        if part not in self._due[part.group]:
            self._count(part, outcome)
            _log.warning("%s: %.0f %% full, and cannot grow: %s", part, percent, why)

    def _count(self, part: _Part, outcome: str) -> None:
        with self._counting:
            self._counts[part.kind, outcome] += 1

    def _extend_area(self, name: str, lvm: Lvm, room: Room, percent: float) -> int | None:
        """Extend the COW store of a snapshot, at most to what it can use.

        What it is and whose snapshot, lvm2 reports: a damaged tag of it, or of its origin, must not
        lose it. Tags give the reserve alone.
        """
        group = room.group
        found = group.volumes.get(name)
        if found is None or not found.own_tags or erase_deleted.is_deleted(found):
            return None
        if not found.is_copy_on_write or (origin := group.volumes.get(found.origin)) is None:
            return None
        extent, present = group.extent_size_bytes, found.size_bytes
        useful = layout.copy_on_write_bytes(origin.size_bytes, _ALL_OF_IT, group)
        wanted = thin.wanted_extents(present // extent, percent, _OF_SNAPSHOTS)
        beside_bytes = self._allocators.beside_bytes(room, origin.own_tags.get(tag.CLASS, ""))
        most = min(beside_bytes, useful - present)
        more = max(0, min(wanted * extent, most))
        if more:
            size, disks = present + more, room.anywhere()
            volumes.extend(lvm, group.name, name, size_bytes=size, disks=disks)
        return more


def _percent(kind: str, found: Sequence[Status]) -> float:
    """How full a part is; 0 if it is inactive, or broken so that room would not help."""
    for one in found:
        match one:
            case ThinPool(mode="rw" | "out_of_data_space", needs_check=False) if kind == DATA:
                return one.data_percent
            case ThinPool(mode="rw" | "out_of_data_space", needs_check=False) if kind == METADATA:
                return one.metadata_percent
            case Snapshot(state="") if kind == AREA:
                return one.percent
    return 0.0
