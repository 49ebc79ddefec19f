"""Prepare thin snapshots for reading: reserve metadata snapshots of pools, activate devices.

A program such as thin_delta(8) cannot read the metadata of an active thin pool, because the
metadata change while the program reads. The program reads a metadata snapshot of the pool instead.
`Reservations` makes and removes metadata snapshots. `Activations` activates the devices of the
snapshots themselves, and deactivates these devices after the reading.
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

# Tag of a thin pool in which Carver reserves a metadata snapshot. The tag is set first and removed
# last, so a pool may have the tag without a metadata snapshot.
_RESERVED = {tag.METADATA_SNAPSHOT: "reserved"}
# Time limit for the release of a pool's metadata snapshot after its last reader has ended, in
# seconds.
_RELEASE_SECONDS = 60.0


@dataclass
class MetadataReaders:
    """State of one thin pool's metadata snapshot, and the number of calls that read the snapshot.

    - `changed` is notified whenever `is_changing` becomes false.
    - `begun` is the number of metadata snapshots that this process has reserved in the pool so far.
    - `readers` is the number of calls that read the present metadata snapshot.
    - `is_changing` is true while a thread reserves or releases the metadata snapshot.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    begun: int = 0
    readers: int = 0
    is_changing: bool = False


class Reservations:
    """Reserves and releases metadata snapshots of thin pools.

    A thin pool has at most one metadata snapshot. A metadata snapshot survives this process and a
    reboot. As long as the metadata snapshot exists, the pool does not free the blocks of deleted
    volumes. Therefore Carver keeps a metadata snapshot only while a program reads it.

    A tag of the pool says that the metadata snapshot is Carver's. The tag is set before the
    metadata snapshot is reserved, and removed after it is released. So the next start of Carver can
    release the metadata snapshot of a killed process. A metadata snapshot in a pool without the tag
    was reserved by another program, and is left alone.
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
        """Reserve a thin pool's metadata snapshot for the `with`; yield the metadata device's path.

        The metadata snapshot is as of this call or later. If other calls still read an older
        metadata snapshot, this call waits until those calls have ended. All calls that wait share
        one new metadata snapshot.

        The pool must be active. The first call that uses a metadata snapshot sets the tag of the
        pool, and the last one removes the tag, each by one lvm2 command. A failure of the release
        is logged. Raises MetadataReserved if another program has reserved a metadata snapshot of
        the pool, and OperationPending if the wait lasts until the caller's deadline.
        """
        pool_readers = self._pool_readers[group, pool]
        self._join(pool_readers, group, pool)
        try:
            yield self._devices.pool_metadata(group, pool)
        finally:
            self._leave(pool_readers, group, pool)

    def resume(self, *groups: str) -> int:
        """Release metadata snapshots that a killed process or a failed call left; return how many.

        `groups` are the names of volume groups to search; without a name, all groups of this node
        are searched. A pool whose metadata this process reads now is left alone. The result is the
        number of pools whose tag was removed, even if a pool had the tag alone. Raises an
        ExceptionGroup of all failures.
        """
        count = 0
        with Attempts() as attempts:
            for name in groups or self._volume_groups.names:
                with attempts.attempt(), self._volume_groups.hold(name):
                    volume_group = self._reports.fresh(name).groups.get(name)
                    for pool in _reserved_pools(volume_group) if volume_group is not None else ():
                        with attempts.attempt():
                            count += self._resume(name, pool)
        return count

    def _resume(self, group: str, pool: str) -> bool:
        """Release a thin pool's metadata snapshot; return False while this process still reads it.

        The pool's tag is removed, too. An inactive pool is activated first. While this process
        reads the pool's metadata, nothing is done, and the result is False. The caller holds the
        volume group's lock.
        """
        if self._pool_readers[group, pool].readers:
            return False
        if not self._activator.is_active(group, pool):
            volumes.activate(self._volume_groups.lvm(group), group, pool)
        self._release(group, pool)
        return True

    def _join(self, pool_readers: MetadataReaders, group: str, pool: str) -> None:
        """Wait for a pool's metadata snapshot that is newer than this call, or reserve one.

        If no other thread reserves such a metadata snapshot, this call reserves it, once all calls
        that read an older one have ended. Raises OperationPending at the caller's deadline, and
        what `_reserve` raises.
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
        """End a read of a pool's metadata; after the last one, release the metadata snapshot.

        A failure of the release is logged.
        """
        with pool_readers.changed:
            pool_readers.readers -= 1
            if pool_readers.readers:
                return
            pool_readers.is_changing = True
        try:
            # Run in an empty context (contextvars). That context has neither the caller's deadline,
            # which may have passed, nor the caller's position in the queue for the volume group's
            # lock.
            contextvars.Context().run(self._release_reservation, group, pool)
        except (errors.AgentError, mount_errors.CommandError, OSError) as error:
            _log.error("thin pool %s/%s keeps old metadata for now: %s", group, pool, error)
        finally:
            self._changed(pool_readers, readers=0)

    def _release_reservation(self, group: str, pool: str) -> None:
        with command.time_limit(_RELEASE_SECONDS):
            # Release the metadata snapshot first, because it slows the pool down. Remove the tag
            # last: after a crash in between, the tag makes the next start of Carver check the pool
            # again.
            self._devices.release_metadata(group, pool)
            with self._volume_groups.hold(group):
                volumes.mark(
                    self._volume_groups.lvm(group), group, pool, old_tags=_RESERVED, new_tags={}
                )

    @staticmethod
    def _changed(pool_readers: MetadataReaders, readers: int) -> None:
        """Record that a metadata snapshot was reserved or released, and wake all waiting threads.

        `readers` is the number of readers from now on: 1 after a reservation, and 0 after a release
        or a failure.
        """
        with pool_readers.changed:
            pool_readers.begun += readers
            pool_readers.readers, pool_readers.is_changing = readers, False
            pool_readers.changed.notify_all()

    def _reserve(self, group: str, pool: str) -> None:
        with self._volume_groups.hold(group):
            volume_group = self._reports.fresh(group).group(group)
            if pool in _reserved_pools(volume_group):
                # Release the metadata snapshot of an earlier call, which failed to release it.
                self._release(group, pool)
            elif self._has(group, pool):
                raise errors.MetadataReserved(group, pool)
            volumes.mark(
                self._volume_groups.lvm(group), group, pool, old_tags={}, new_tags=_RESERVED
            )
            try:
                self._devices.reserve_metadata(group, pool)
            except OSError as error:
                volumes.mark(
                    self._volume_groups.lvm(group), group, pool, old_tags=_RESERVED, new_tags={}
                )
                if error.errno == errno.EBUSY:
                    raise errors.MetadataReserved(group, pool) from error
                raise

    def _release(self, group: str, pool: str) -> None:
        """Release a thin pool's metadata snapshot if there is one, and then remove Carver's tag.

        The caller holds the volume group's lock.
        """
        if self._has(group, pool):
            self._devices.release_metadata(group, pool)
        volumes.mark(self._volume_groups.lvm(group), group, pool, old_tags=_RESERVED, new_tags={})

    def _has(self, group: str, pool: str) -> bool:
        """Return whether a thin pool has a metadata snapshot; the pool must be active."""
        status = self._activator.status(group, pool)
        return any(
            isinstance(target, ThinPool) and target.has_metadata_snapshot for target in status
        )


def _deactivate(lvm: Lvm, group: str, names: Sequence[str]) -> None:
    # A snapshot that another program has just opened stays active. The snapshot keeps its tag, so a
    # later call deactivates it.
    with suppress(lvm_errors.InUse):
        volumes.deactivate(lvm, group, *names)


def _reserved_pools(group: report.Group) -> list[str]:
    """Return the names of thin pools with the tag of a metadata snapshot that Carver reserved."""
    return [
        pool.name
        for pool in records.usable_logical_volumes(group)
        if tag.METADATA_SNAPSHOT in pool.own_tags
    ]


# Tag of a thin snapshot that Carver activated in order to read it, and has to deactivate.
_OWN = {tag.ACTIVATED: "reading"}
# Time for which a lease keeps a snapshot active, in seconds. Within that time, the other process
# has to open the snapshot's device.
_LEASE_SECONDS = 60.0
# Time limit for the deactivation of snapshots after they were read, in seconds. If a snapshot is
# still active at the limit, the next read of a snapshot in the same volume group deactivates it.
_END_SECONDS = 30.0


class Activations:
    """Activates snapshots in order to read them, and deactivates thin snapshots afterwards.

    Each active snapshot costs a device in the kernel and a row in each refresh of the device list,
    and a backup reads many snapshots. So a thin snapshot is active only while it is read.

    A tag marks the thin snapshots that Carver activated. The tag is set before the snapshot is
    activated, and removed after the snapshot is deactivated. So the next start of Carver, or the
    next read in the volume group, deactivates the snapshots that a killed process left active. A
    thin snapshot that was active before it was read has no tag, and stays active.

    A COW snapshot is active whenever its origin is active. If both are inactive, the origin is
    activated with the snapshot, and both stay active.
    """

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._devices = context.devices
        self._guard = threading.Lock()
        # The number of calls that read each snapshot now, by the names of its volume group and of
        # the snapshot.
        self._readers: Counter[tuple[str, str]] = Counter()
        # The leases, by their random ids. A lease has the names of the volume group and of the
        # leased snapshot, and the time when the lease ends (time.monotonic()).
        self._leases: dict[str, tuple[tuple[str, str], float]] = {}

    @contextmanager
    def held(self, snapshot: Snapshot) -> Iterator[active_devices.Device]:
        """Activate a snapshot for the `with`; yield the snapshot's device.

        The caller holds the volume group's lock when it enters the `with`. The end of the `with`
        does not deactivate the snapshot. For that, the caller has to call `end` once the caller has
        closed all devices that it read in the volume group. Runs at most two lvm2 commands. Raises
        Inactive if the kernel has no device of the snapshot after the activation.
        """
        key = (snapshot.group.name, snapshot.name)
        with self._guard:
            self._readers[key] += 1
        try:
            yield self._activate(snapshot)
        finally:
            with self._guard:
                self._readers[key] -= 1
                # Remove the snapshot's entry. Otherwise the table would grow with each snapshot
                # that is read.
                if not self._readers[key]:
                    del self._readers[key]

    def lease(self, snapshot: Snapshot) -> str:
        """Activate a snapshot for another process to open; return the id of a lease on it.

        The lease keeps the snapshot active for `_LEASE_SECONDS`. Afterwards the snapshot stays
        active for as long as the other process has it open. A COW snapshot need not be deactivated,
        so it gets no lease, and the result is empty. The caller holds the volume group's lock. Runs
        at most two lvm2 commands. Raises Inactive as `held`.
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
        """End a lease on a snapshot that the other process has closed; deactivate unused snapshots.

        All snapshots of the volume group are deactivated that Carver activated and that are no
        longer in use. A lease that has already ended is no error. Raises nothing.
        """
        with self._guard:
            self._leases.pop(lease, None)
        self.end(group)

    def end(self, *groups: str) -> None:
        """Deactivate unused snapshots that Carver activated to read them, in these volume groups.

        Raises nothing. A failure is logged, and the next read of a snapshot in the volume group, or
        the next start of Carver, deactivates the snapshots.
        """

        def sweep() -> None:
            with command.time_limit(_END_SECONDS):
                self.resume(*groups)

        try:
            # Run in an empty context (contextvars). That context has neither the caller's deadline,
            # which may have passed, nor the caller's position in the queue for the volume group's
            # lock.
            contextvars.Context().run(sweep)
        except Exception as error:
            _log.warning("snapshots in %s stay active for now: %s", ", ".join(groups), error)

    def resume(self, *groups: str) -> int:
        """Deactivate the snapshots that Carver activated and that nothing uses; return how many.

        `groups` are the names of volume groups to search; without a name, all groups of this node
        are searched. The result also counts snapshots that were inactive already, and snapshots
        that another program has just opened. Runs at most three lvm2 commands in each volume group,
        and more if lvm2 fails to deactivate a snapshot. Raises an ExceptionGroup of all failures.
        """
        count = 0
        with Attempts() as attempts:
            for name in groups or self._volume_groups.names:
                with attempts.attempt(), self._volume_groups.hold(name):
                    fresh_report = self._reports.fresh(name)
                    if unread := self._unread(fresh_report):
                        self._deactivate(name, unread)
                        count += len(unread)
        return count

    def _activate(self, snapshot: Snapshot) -> active_devices.Device:
        group, name = snapshot.group.name, snapshot.name
        is_own = tag.ACTIVATED in snapshot.own_tags
        if snapshot.is_thin and not is_own and not self._activator.is_active(group, name):
            volumes.mark(self._volume_groups.lvm(group), group, name, old_tags={}, new_tags=_OWN)
        return self._activator.activate_snapshot(snapshot)

    def _unread(self, fresh_report: Fresh) -> list[str]:
        """Return the names of a volume group's unused snapshots that Carver activated to read them.

        A snapshot is in use if a call reads it, if there is a lease on it, if its device is open,
        or if a volume is being copied from it. Leases that have expired are removed from the table.
        Raises GroupBusy while a volume group, which may have such a copy, was never read.
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
        # A copy in progress opens its source snapshot only for moments at a time, so the snapshot
        # may be closed now. The copy may be in another volume group than its source, so search all
        # volume groups for copies.
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
        # First remove the tags of the snapshots that are already inactive, because an earlier
        # attempt deactivated them. So a deactivation that fails again does not keep these tags.
        self._forget(group, [name for name in names if name not in active])
        if active:
            all_or_each(active, lambda snapshots: _deactivate(lvm, group, snapshots))
            self._forget(group, active)

    def _forget(self, group: str, names: Sequence[str]) -> None:
        """Remove the tag ACTIVATED from the snapshots in `names` that are inactive."""
        inactive = [(group, name) for name in names if not self._activator.is_active(group, name)]
        if inactive:
            volumes.mark_all(self._volume_groups.lvm(group), inactive, old_tags=_OWN)
