"""Prepare reading of a thin snapshot: reserve its pool's metadata snapshot, activate its device.

A program such as thin_delta(8) cannot read the metadata of an active thin pool, which change while
they are read. It reads a metadata snapshot of the pool instead, which `Reservations` makes and
removes. `Activations` activates the snapshots themselves, and deactivates them after the reading.
"""

import contextvars
import errno
import logging
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from agent.core import errors, tag
from agent.volumes import records
from agent.volumes.context import Context
from agent.volumes.records import Snapshot
from agent.volumes.report_age import Fresh
from agent.work.background import Attempts, all_or_each
from lvm import active_devices, report, volumes
from lvm import lvm_errors as lvm_errors
from lvm.devicemapper import ThinPool
from lvm.lvm2 import Lvm
from mount import command
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)

# Tag on a thin pool whose metadata snapshot, if there is one, was reserved by Carver.
_RESERVED = {tag.METADATA_SNAPSHOT: "reserved"}
# Time limit of the release of a metadata snapshot after a reading, in seconds.
_RELEASE_SECONDS = 60.0


@dataclass
class MetadataReaders:
    """The readers that share one thin pool's metadata snapshot, and its state.

    - `changed` is notified when `is_changing` becomes false.
    - `begun` counts the metadata snapshots that were reserved in this pool by this process.
    - `readers` is the number of readers of the present metadata snapshot.
    - `is_changing` is true while a thread reserves or releases the metadata snapshot.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    begun: int = 0
    readers: int = 0
    is_changing: bool = False


class Reservations:
    """Reserves and releases metadata snapshots of thin pools.

    A thin pool has at most one metadata snapshot. The snapshot survives this process and a reboot,
    and as long as it exists the pool does not free blocks of deleted volumes. Therefore it is kept
    only while a program reads it.

    A tag on the pool says that the metadata snapshot is Carver's. The tag is set before the
    metadata snapshot is reserved and removed after it is released. So the next start of Carver
    releases what a killed process left, and a metadata snapshot in a pool without the tag, which
    another program reserved, is left alone.
    """

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._devices = context.devices
        self._pool_readers: defaultdict[tuple[str, str], MetadataReaders] = defaultdict(
            MetadataReaders
        )

    @contextmanager
    def held(self, group: str, pool: str) -> Iterator[str]:
        """Reserve a metadata snapshot of an active thin pool for the `with`; yield its device.

        The device holds the pool's metadata as of this call or later. A call that comes while
        other readers use an older metadata snapshot waits until those readers have ended; all the
        waiting calls then share one new metadata snapshot.

        Runs two lvm2 commands, which set and remove the tag. Raises MetadataReserved where another
        program has reserved a metadata snapshot, OperationPending at the caller's deadline.
        """
        pool_readers = self._pool_readers[group, pool]
        self._join(pool_readers, group, pool)
        try:
            yield self._devices.pool_metadata(group, pool)
        finally:
            self._leave(pool_readers, group, pool)

    def resume(self, *groups: str) -> int:
        """Release metadata snapshots that an earlier process left; return the number released.

        Looks in these groups, or in all groups of the node if none is named.
        """
        count = 0
        with Attempts() as attempts:
            for name in groups or self._volume_groups.names:
                with attempts.one(), self._volume_groups.hold(name):
                    volume_group = self._reports.fresh(name).groups.get(name)
                    for pool in _marked(volume_group) if volume_group is not None else ():
                        with attempts.one():
                            count += self._resume(name, pool)
        return count

    def _resume(self, group: str, pool: str) -> bool:
        """Release the metadata snapshot that an earlier process left; say whether it was released.

        Does nothing while this process reads the pool's metadata.
        """
        if self._pool_readers[group, pool].readers:
            return False
        if not self._activator.is_active(group, pool):
            volumes.activate(self._volume_groups.lvm(group), group, pool)
        self._release(group, pool)
        return True

    def _join(self, pool_readers: MetadataReaders, group: str, pool: str) -> None:
        """Wait for a metadata snapshot newer than this call; reserve the snapshot if needed.

        Raises OperationPending at the caller's deadline.
        """
        with pool_readers.changed:
            wanted_number = pool_readers.begun + 1
            while True:
                if (
                    not pool_readers.is_changing
                    and pool_readers.readers
                    and pool_readers.begun >= wanted_number
                ):
                    pool_readers.readers += 1
                    return
                if not pool_readers.is_changing and not pool_readers.readers:
                    pool_readers.is_changing = True
                    break
                if not pool_readers.changed.wait(command.remaining_seconds()):
                    raise errors.OperationPending(f"{group}/{pool}")
        try:
            self._reserve(group, pool)
        except BaseException:
            self._changed(pool_readers, readers=0)
            raise
        self._changed(pool_readers, readers=1)

    def _leave(self, pool_readers: MetadataReaders, group: str, pool: str) -> None:
        """Remove a reader; release the metadata snapshot after the last one, and log a failure."""
        with pool_readers.changed:
            pool_readers.readers -= 1
            if pool_readers.readers:
                return
            pool_readers.is_changing = True
        try:
            # Run in an empty context: without the caller's deadline, which may have passed, and
            # without the caller's position in the queue for the group's lock.
            contextvars.Context().run(self._let_go, group, pool)
        except (errors.AgentError, mount_errors.CommandError, OSError) as error:
            _log.error("thin pool %s/%s keeps old metadata for now: %s", group, pool, error)
        finally:
            self._changed(pool_readers, readers=0)

    def _let_go(self, group: str, pool: str) -> None:
        with command.time_limit(_RELEASE_SECONDS):
            # The metadata snapshot is released before the tag is removed, as it slows the pool
            # down; and after a crash in between, the tag makes the next start look again.
            self._devices.release_metadata(group, pool)
            with self._volume_groups.hold(group):
                volumes.mark(self._volume_groups.lvm(group), group, pool, old=_RESERVED, new={})

    @staticmethod
    def _changed(pool_readers: MetadataReaders, readers: int) -> None:
        """Record the end of a reservation or of a release, and wake all waiting threads."""
        with pool_readers.changed:
            pool_readers.begun += readers
            pool_readers.readers, pool_readers.is_changing = readers, False
            pool_readers.changed.notify_all()

    def _reserve(self, group: str, pool: str) -> None:
        with self._volume_groups.hold(group):
            volume_group = self._reports.fresh(group).group(group)
            if pool in _marked(volume_group):
                # The metadata snapshot was reserved by an earlier reading of Carver that failed to
                # release it.
                self._release(group, pool)
            elif self._has(group, pool):
                raise errors.MetadataReserved(group, pool)
            volumes.mark(self._volume_groups.lvm(group), group, pool, old={}, new=_RESERVED)
            try:
                self._devices.reserve_metadata(group, pool)
            except OSError as error:
                volumes.mark(self._volume_groups.lvm(group), group, pool, old=_RESERVED, new={})
                if error.errno == errno.EBUSY:
                    raise errors.MetadataReserved(group, pool) from error
                raise

    def _release(self, group: str, pool: str) -> None:
        """Release a pool's metadata snapshot, if the pool has one, and then remove Carver's tag.

        The caller holds the group's lock.
        """
        if self._has(group, pool):
            self._devices.release_metadata(group, pool)
        volumes.mark(self._volume_groups.lvm(group), group, pool, old=_RESERVED, new={})

    def _has(self, group: str, pool: str) -> bool:
        """Return whether an active thin pool has a metadata snapshot."""
        status = self._activator.status(group, pool)
        return any(
            isinstance(target, ThinPool) and target.has_metadata_snapshot for target in status
        )


def _deactivate(lvm: Lvm, group: str, names: Sequence[str]) -> None:
    # A snapshot that another program has just opened stays active and keeps its tag.
    with suppress(lvm_errors.InUse):
        volumes.deactivate(lvm, group, *names)


def _marked(group: report.Group) -> list[str]:
    """The names of a group's thin pools that have Carver's tag for a metadata snapshot."""
    return [pool.name for pool in records.usable(group) if tag.METADATA_SNAPSHOT in pool.own_tags]


# Tag on a snapshot that Carver activated only to read it.
_OWN = {tag.ACTIVATED: "reading"}
# Time for which an activated snapshot waits to be opened by another process, in seconds.
_LEASE_SECONDS = 60.0
# Time limit of the deactivation after a reading, in seconds. The next reading in the group
# deactivates what is still active after the limit.
_END_SECONDS = 30.0


class Activations:
    """Activates thin snapshots in order to read them, and deactivates them afterwards.

    Each active snapshot costs a device in the kernel and a row in each refresh of the device list,
    and a backup reads many snapshots. So a snapshot is active only while it is read.

    A tag marks the snapshots that Carver activated. The tag is set before the snapshot is activated
    and removed after it is deactivated. So the next start of Carver, or the next reading in the
    group, deactivates what a killed process left active. A snapshot that was active before the
    reading has no tag and is left alone. A COW snapshot is active as long as its origin is, and is
    neither activated nor deactivated here.
    """

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._devices = context.devices
        self._guard = threading.Lock()
        # The number of readers of each snapshot, by group and name.
        self._readers: Counter[tuple[str, str]] = Counter()
        # For each lease: group and name of its snapshot, and the lease's end (time.monotonic()).
        self._leases: dict[str, tuple[tuple[str, str], float]] = {}

    @contextmanager
    def held(self, snapshot: Snapshot) -> Iterator[active_devices.Device]:
        """Activate a snapshot for the `with`; yield its device.

        The caller holds the group's lock when it enters the `with`. Runs at most two lvm2 commands.
        The caller calls `end` after it has closed everything that it read in the group, which
        deactivates the snapshot. Raises Inactive.
        """
        key = (snapshot.group.name, snapshot.name)
        with self._guard:
            self._readers[key] += 1
        try:
            yield self._activate(snapshot)
        finally:
            with self._guard:
                self._readers[key] -= 1
                # Remove the entry, so that the table does not grow with each snapshot ever read.
                if not self._readers[key]:
                    del self._readers[key]

    def lease(self, snapshot: Snapshot) -> str:
        """Activate a snapshot for another process to open; return the lease for `end_lease`.

        Returns "" for a COW snapshot, whose activation need not be ended. The caller holds the
        group's lock. The device stays active for `_LEASE_SECONDS`, and beyond for as long as the
        other process has it open. Runs at most two lvm2 commands.
        """
        self._activate(snapshot)
        if not snapshot.is_thin:
            return ""
        lease = secrets.token_hex(8)
        with self._guard:
            end_seconds = time.monotonic() + _LEASE_SECONDS
            self._leases[lease] = ((snapshot.group.name, snapshot.name), end_seconds)
        return lease

    def end_lease(self, group: str, lease: str) -> None:
        """End the lease of a snapshot that the other process has closed; deactivate the snapshot.

        Raises nothing.
        """
        with self._guard:
            self._leases.pop(lease, None)
        self.end(group)

    def end(self, *groups: str) -> None:
        """Deactivate the snapshots in these groups that are no longer read. Raises nothing.

        A failure is logged, and the next reading or the next start deactivates the snapshots.
        """

        def sweep() -> None:
            with command.time_limit(_END_SECONDS):
                self.resume(*groups)

        try:
            # Run in an empty context: without the caller's deadline, which may have passed, and
            # without the caller's position in the queue for the group's lock.
            contextvars.Context().run(sweep)
        except Exception as error:
            _log.warning("snapshots in %s stay active for now: %s", ", ".join(groups), error)

    def resume(self, *groups: str) -> int:
        """Deactivate Carver's unread snapshots in these groups, or in all; return how many.

        Runs at most three lvm2 commands in each group. Raises an ExceptionGroup of the failures.
        """
        count = 0
        with Attempts() as attempts:
            for name in groups or self._volume_groups.names:
                with attempts.one(), self._volume_groups.hold(name):
                    fresh_report = self._reports.fresh(name)
                    if unread := self._unread(fresh_report):
                        self._deactivate(name, unread)
                        count += len(unread)
        return count

    def _activate(self, snapshot: Snapshot) -> active_devices.Device:
        group, name = snapshot.group.name, snapshot.name
        is_own = tag.ACTIVATED in snapshot.own_tags
        if snapshot.is_thin and not is_own and not self._activator.is_active(group, name):
            volumes.mark(self._volume_groups.lvm(group), group, name, old={}, new=_OWN)
        return self._activator.activate_snapshot(snapshot)

    def _unread(self, fresh_report: Fresh) -> list[str]:
        """The names of snapshots of a group that Carver activated and that are not in use.

        In use are snapshots that are read, have a lease, are open, or are being copied.
        """
        now = time.monotonic()
        with self._guard:
            self._leases = {lease: entry for lease, entry in self._leases.items() if entry[1] > now}
            keys_in_use = {*self._readers, *(key for key, _ in self._leases.values())}
        own_snapshots = [
            snapshot for snapshot in fresh_report.snapshots() if tag.ACTIVATED in snapshot.own_tags
        ]
        unread = [
            snapshot
            for snapshot in own_snapshots
            if (snapshot.group.name, snapshot.name) not in keys_in_use
        ]
        if not unread:
            return []
        # A copy in progress opens its snapshot only for moments at a time, so the snapshot may be
        # closed now. The copy may be in another group, so all groups are searched for copies.
        all_groups = self._reports.every_group(fresh_report)
        all_groups.require_read()
        copied_ids = {copy.own_tags.get(tag.FROM) for copy in all_groups.copies()}
        return [
            snapshot.name
            for snapshot in unread
            if str(snapshot.id) not in copied_ids
            and not self._devices.is_open(snapshot.group.name, snapshot.name)
        ]

    def _deactivate(self, group: str, names: list[str]) -> None:
        lvm = self._volume_groups.lvm(group)
        active = [name for name in names if self._activator.is_active(group, name)]
        # First remove the tags of snapshots that an earlier attempt deactivated, so that a
        # deactivation that fails again does not keep their tags.
        self._forget(group, [name for name in names if name not in active])
        if active:
            all_or_each(active, lambda snapshots: _deactivate(lvm, group, snapshots))
            self._forget(group, active)

    def _forget(self, group: str, names: Sequence[str]) -> None:
        """Remove Carver's tag from each of these snapshots that is not active."""
        inactive = [(group, name) for name in names if not self._activator.is_active(group, name)]
        if inactive:
            volumes.mark_all(self._volume_groups.lvm(group), inactive, old=_OWN)
