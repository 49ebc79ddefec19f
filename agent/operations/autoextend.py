"""Extend thin pools and the COW stores of snapshots before they are full.

The background thread of each volume group checks the group's pools and COW stores every two
seconds, by ioctls only. So an idle node runs no command, and a group that hangs delays no other
group. A COW store is queried only if it was written to: /proc/diskstats has the write counters of
all COW stores.

A pool's data or metadata, or a COW store, that is fuller than its threshold is extended by its
configured share. If the share is not enough to bring the pool or store below the threshold, it is
extended by as much as is needed. The reserve of the device class limits both. Crash points do no
harm, since each step is one lvextend.

If an extension fails, a warning is logged once, and the extension is retried every ten seconds: the
kernel holds writes to a full pool for a minute, and the obstacle may be gone by then.
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
from agent.work.group_worker import PeriodicJobs
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

# Interval, in seconds, at which thin pools and COW stores are checked.
_LOOK_SECONDS = 2.0
# Delay, in seconds, before the extension of a thin pool or COW store is retried, if there was no
# room or lvm2 failed.
_RETRY_SECONDS = 10.0
# Delay, in seconds, before the extension of a thin pool or COW store is retried after another
# error, such as a failed fork(2).
_SOON_SECONDS = 2.0
# Time limit, in seconds, of one extension of a thin pool or COW store.
_PATIENCE_SECONDS = 60.0
# Log message of a check that failed to read how full a volume group's pools and snapshots are.
_FAILURE = "volume group %s: cannot tell how full its pools and snapshots are: %s"
# Interval, in seconds, at which all COW stores are queried, even if their write counters did not
# change: an operator may have switched the kernel's I/O counters off (queue/iostats).
_ALL_SECONDS = 60.0
# Threshold and share by which COW stores are extended: the defaults, as device classes have no
# setting for COW stores.
_OF_SNAPSHOTS = Policy()
# Size to which a COW store may grow: ten times the size of the origin, which
# `layout.copy_on_write_bytes` reduces to the size that the store can use.
_ALL_OF_IT = Reserve(percent=1000)

# Kinds of what is extended: a thin pool's data, a thin pool's metadata, a snapshot's COW store.
KINDS = DATA, METADATA, AREA = ("data", "metadata", "snapshot")
# Outcomes of the extension of a thin pool or COW store, for the metrics.
OUTCOMES = EXTENDED, NO_ROOM, FAILED = ("extended", "no room", "failed")


@dataclass(frozen=True)
class _Growable:
    """A thin pool's data or metadata, or a COW store, that may have to be extended.

    `extend` is called with lvm2, the free room of the volume group, and how full the data, metadata
    or store is, in percent. `extend` returns the number of bytes that it added: 0 if there is
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
    """Fill levels and write counters of a volume group's COW stores at the last query."""

    percents: dict[str, float] = field(default_factory=dict)
    written: Mapping[str, Written] = field(default_factory=dict)
    # Time (monotonic, seconds) at which all COW stores were last queried.
    asked_seconds: float = float("-inf")


class Autoextender:
    """Extends thin pools and COW stores that are fuller than their thresholds."""

    def __init__(self, context: Context, sweeper: FreedSpaceEraser) -> None:
        self._sweeper = sweeper
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._devices = context.devices
        self._allocators = context.allocators
        self._counting = threading.Lock()
        self._counts = Counter({(kind, outcome): 0 for kind in KINDS for outcome in OUTCOMES})
        # Times (monotonic, seconds) at which failed extensions are retried, by volume group and by
        # `_Growable` (a pool's data or metadata, or a COW store).
        self._due: defaultdict[str, dict[_Growable, float]] = defaultdict(dict)
        self._areas: defaultdict[str, _Areas] = defaultdict(_Areas)
        self.scans = PeriodicJobs(
            context.workers,
            "grow",
            lambda: context.config.groups,
            self.check_group,
            _LOOK_SECONDS,
            _FAILURE,
        )

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return how often extensions succeeded, found no room, or failed, by kind and outcome."""
        with self._counting:
            return dict(self._counts)

    def step(self, now_seconds: float) -> bool:
        """Check the thin pools and COW stores of each volume group once; tests call it.

        `now_seconds` (monotonic) is taken as the present time. Returns whether anything was
        extended.
        """
        extended = [
            self.check_group(group, lambda: now_seconds) for group in self._volume_groups.names
        ]
        return any(extended)

    def check_group(self, group: str, clock: Callable[[], float] = time.monotonic) -> bool:
        """Check a volume group once, and extend its thin pools and COW stores that are too full.

        A pool or COW store whose last extension failed is left out until its retry is due. Returns
        whether anything was extended. After True the next check follows at once, to keep pace with
        a writer.
        """
        grown, full, earlier_due = False, dict(self._full(group, clock)), self._due[group]
        due_seconds = self._due[group] = {
            growable: earlier_due[growable] for growable in full if growable in earlier_due
        }
        for growable, percent in full.items():
            if growable not in due_seconds or due_seconds[growable] <= clock():
                grown |= self._extend(growable, percent, clock)
        return grown

    def _full(self, group: str, clock: Callable[[], float]) -> Iterator[tuple[_Growable, float]]:
        """Yield the pools' data and metadata, and the COW stores, that are too full.

        Each is yielded with how full it is, in percent.
        """
        for name, percent in self._full_areas(group, clock()):
            yield (
                _Growable(group, name, AREA, _OF_SNAPSHOTS, partial(self._extend_area, name)),
                percent,
            )
        volume_group = self._volume_groups.known(group)
        for pool_allocator in self._allocators.pools_to_grow(
            group, None if volume_group is None else volume_group.cached
        ):
            pool = pool_name(pool_allocator.device_class)
            try:
                status = self._activator.pool_status(group, pool)
            except errors.PoolSilent:
                # The other parts of the group are extended all the same. Health reports the pool.
                continue
            for kind, extend in (
                (DATA, pool_allocator.extend_data),
                (METADATA, pool_allocator.extend_metadata),
            ):
                percent = _percent(kind, [] if status is None else [status])
                if percent > pool_allocator.policy.autoextend_threshold:
                    yield _Growable(group, pool, kind, pool_allocator.policy, extend), percent

    def _full_areas(self, group: str, now_seconds: float) -> Iterator[tuple[str, float]]:
        """Yield the snapshots of a volume group whose COW stores are too full, with percentages.

        A COW store is queried if it was written to since the last query, or was too full then; once
        a minute each COW store is queried. The results are kept for the next call.
        """
        areas, threshold = self._areas[group], _OF_SNAPSHOTS.autoextend_threshold
        if now_seconds - areas.asked_seconds >= _ALL_SECONDS:
            areas = _Areas(asked_seconds=now_seconds)
        # Read the write counters before the stores are queried, so that the next check queries
        # snapshots again that are written to meanwhile.
        written, percents = self._devices.written(group), dict[str, float]()
        for name, counter in written.items():
            if not any(
                names.is_of(prefix, name) for prefix in (ids.SNAPSHOT_PREFIX, ids.BRIDGE_PREFIX)
            ):
                continue
            percent = areas.percents.get(name, threshold + 1)
            if percent > threshold or counter is None or areas.written.get(name) != counter:
                percent = _percent(AREA, self._devices.own_status(group, name))
            percents[name] = percent
            if percent > threshold:
                yield name, percent
        self._areas[group] = _Areas(percents, written, areas.asked_seconds)

    def _extend(self, growable: _Growable, percent: float, clock: Callable[[], float]) -> bool:
        due_seconds = self._due[growable.group]
        try:
            with command.time_limit(_PATIENCE_SECONDS):
                more_bytes, is_swept = self._grow(growable, percent)
                if more_bytes == 0 and is_swept:
                    with self._sweeper.without_sweep(growable.group):
                        more_bytes, _ = self._grow(growable, percent)
        except (errors.AgentError, mount_errors.CommandError) as error:
            self._give_up(growable, percent, FAILED, str(error))
        except Exception as error:
            # Retry after two seconds: an unexpected error, such as a failed fork(2), may pass
            # quickly, and programs that write to the full pool or store wait.
            self._give_up(growable, percent, FAILED, repr(error))
            due_seconds[growable] = clock() + _SOON_SECONDS
            return False
        else:
            if more_bytes:
                self._count(growable, EXTENDED)
                due_seconds.pop(growable, None)
                _log.info("%s: %.0f %% full, extended by %d bytes", growable, percent, more_bytes)
                return True
            if more_bytes is not None:
                why = f"group {growable.group} has no room for it"
                self._give_up(growable, percent, NO_ROOM, why)
        # Count the delay before the retry from the end of the attempt, which may have taken as long
        # as the delay.
        due_seconds[growable] = clock() + _RETRY_SECONDS
        return False

    def _grow(self, growable: _Growable, percent: float) -> tuple[int | None, bool]:
        """Extend a pool or COW store; return the added bytes, and whether extents are being zeroed.

        The bytes are 0 for no room and None for nothing to extend. Free extents are zeroed in a
        logical volume, the sweep, which holds them meanwhile; the second result is False if the
        pool or store may not use such extents. If no clean extents are free, the pool or store is
        extended into free extents that are still to be zeroed; a pool gets the tag `unclean` first.
        """
        with self._volume_groups.hold(growable.group):
            group = self._reports.fresh(growable.group).group(growable.group)
            lvm, room = self._volume_groups.lvm(growable.group), Room(group)
            more_bytes = growable.extend(lvm, room, percent)
            is_unclean_left = room.for_overwriting.free_extents > room.free_extents
            if more_bytes == 0 and self._may_be_unclean(growable) and is_unclean_left:
                if (
                    growable.kind != AREA
                    and tag.UNCLEAN not in group.volume(growable.name).own_tags
                ):
                    volumes.mark(
                        lvm, group.name, growable.name, old_tags={}, new_tags={tag.UNCLEAN: "yes"}
                    )
                more_bytes = growable.extend(lvm, room.for_overwriting, percent)
            return more_bytes, self._may_be_unclean(growable) and erase_deleted.is_sweep(
                group, ids.SWEEP
            )

    def _may_be_unclean(self, growable: _Growable) -> bool:
        """Whether a pool or COW store may get free extents that are still to be zeroed.

        Such extents are zeroed once the pool or store is removed: always for a pool, and for a COW
        store if the erase policy zeroes.
        """
        return growable.kind != AREA or self._sweeper.policy.zeroes

    def _give_up(self, growable: _Growable, percent: float, outcome: str, reason: str) -> None:
        if growable not in self._due[growable.group]:
            self._count(growable, outcome)
            _log.warning("%s: %.0f %% full, and cannot grow: %s", growable, percent, reason)

    def _count(self, growable: _Growable, outcome: str) -> None:
        with self._counting:
            self._counts[growable.kind, outcome] += 1

    def _extend_area(self, name: str, lvm: Lvm, room: Room, percent: float) -> int | None:
        """Extend the COW store of a snapshot, at most to the size that it can use.

        Whether the logical volume is a snapshot, and of which origin, is read from lvm2's report: a
        damaged tag of the snapshot or its origin must not let the store overflow. Only the reserve
        follows from the tags. Returns the bytes by which the store was extended: 0 if there is no
        room, None if there is nothing to extend.
        """
        group = room.group
        snapshot = group.volumes.get(name)
        if snapshot is None or not snapshot.own_tags or erase_deleted.is_deleted(snapshot):
            return None
        if not snapshot.is_copy_on_write or (origin := group.volumes.get(snapshot.origin)) is None:
            return None
        extent, present_bytes = group.extent_size_bytes, snapshot.size_bytes
        useful_bytes = layout.copy_on_write_bytes(origin.size_bytes, _ALL_OF_IT, group)
        wanted_extents = thin.wanted_extents(present_bytes // extent, percent, _OF_SNAPSHOTS)
        beside_bytes = self._allocators.available_cow_bytes(
            room, origin.own_tags.get(tag.CLASS, "")
        )
        most_bytes = min(beside_bytes, useful_bytes - present_bytes)
        more_bytes = max(0, min(wanted_extents * extent, most_bytes))
        if more_bytes:
            size, disks = present_bytes + more_bytes, room.disk_arguments()
            volumes.extend(lvm, group.name, name, size_bytes=size, disks=disks)
        return more_bytes


def _percent(kind: str, statuses: Sequence[Status]) -> float:
    """Return how full a pool's data or metadata, or a COW store, is, in percent.

    `statuses` are the kernel's. The result is 0 if the pool or snapshot is inactive, or broken in a
    way that more room would not mend.
    """
    for status in statuses:
        match status:
            case ThinPool(mode="rw" | "out_of_data_space", needs_check=False) if kind == DATA:
                return status.data_percent
            case ThinPool(mode="rw" | "out_of_data_space", needs_check=False) if kind == METADATA:
                return status.metadata_percent
            case Snapshot(state="") if kind == AREA:
                return status.percent
    return 0.0
