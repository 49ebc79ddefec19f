"""Prepare reading of a thin snapshot: reserve its pool's metadata snapshot, and activate it."""

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

_RESERVED = {tag.METADATA_SNAPSHOT: "reserved"}
_RELEASE_SECONDS = 60.0


@dataclass
class _Turn:
    """The readers of a pool's metadata snapshot; `begun` counts the snapshots taken."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    begun: int = 0
    readers: int = 0
    is_changing: bool = False


class Reservations:
    """Reserves and releases metadata snapshots of thin pools.

    A pool has at most one, and it outlives the process and the boot. While it is there, deleted
    blocks are not freed. So a tag on the pool says that it is Carver's, from before it is made
    until after it is gone: the next start releases what a kill left, and one without the tag is
    left alone. It is kept only while a program reads by it.
    """

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._devices = context.devices
        self._turns: defaultdict[tuple[str, str], _Turn] = defaultdict(_Turn)

    @contextmanager
    def held(self, group: str, pool: str) -> Iterator[str]:
        """Inside, an active pool's metadata can be read from this device, as of the call or later.

        A call that comes while others read waits until they have ended; the waiting ones then
        share a new snapshot. Two commands, for the tag. Raises MetadataReserved, OperationPending
        at the deadline.
        """
        turn = self._turns[group, pool]
        self._join(turn, group, pool)
        try:
            yield self._devices.pool_metadata(group, pool)
        finally:
            self._leave(turn, group, pool)

    def resume(self, *groups: str) -> int:
        """Release what an earlier process left in these groups, or in all; return how many."""
        count = 0
        with Attempts() as attempts:
            for name in groups or self._volume_groups.names:
                with attempts.one(), self._volume_groups.hold(name):
                    found = self._reports.fresh(name).groups.get(name)
                    for pool in _marked(found) if found is not None else ():
                        with attempts.one():
                            count += self._resume(name, pool)
        return count

    def _resume(self, group: str, pool: str) -> bool:
        """Release what an earlier process left of a pool; whether it was released."""
        if self._turns[group, pool].readers:
            return False
        if not self._activator.is_active(group, pool):
            volumes.activate(self._volume_groups.lvm(group), group, pool)
        self._release(group, pool)
        return True

    def _join(self, turn: _Turn, group: str, pool: str) -> None:
        with turn.changed:
            wanted = turn.begun + 1
            while True:
                if not turn.is_changing and turn.readers and turn.begun >= wanted:
                    turn.readers += 1
                    return
                if not turn.is_changing and not turn.readers:
                    turn.is_changing = True
                    break
                if not turn.changed.wait(command.remaining_seconds()):
                    raise errors.OperationPending(f"{group}/{pool}")
        try:
            self._reserve(group, pool)
        except BaseException:
            self._changed(turn, readers=0)
            raise
        self._changed(turn, readers=1)

    def _leave(self, turn: _Turn, group: str, pool: str) -> None:
        with turn.changed:
            turn.readers -= 1
            if turn.readers:
                return
            turn.is_changing = True
        try:
            # Without the caller's deadline and place among the calls, which may be used up.
            contextvars.Context().run(self._let_go, group, pool)
        except (errors.AgentError, mount_errors.CommandError, OSError) as error:
            _log.error("thin pool %s/%s keeps old metadata for now: %s", group, pool, error)
        finally:
            self._changed(turn, readers=0)

    def _let_go(self, group: str, pool: str) -> None:
        with command.time_limit(_RELEASE_SECONDS):
            # First, as it slows the pool down; then the tag.
            self._devices.release_metadata(group, pool)
            with self._volume_groups.hold(group):
                volumes.mark(self._volume_groups.lvm(group), group, pool, old=_RESERVED, new={})

    @staticmethod
    def _changed(turn: _Turn, readers: int) -> None:
        with turn.changed:
            turn.begun += readers
            turn.readers, turn.is_changing = readers, False
            turn.changed.notify_all()

    def _reserve(self, group: str, pool: str) -> None:
        with self._volume_groups.hold(group):
            found = self._reports.fresh(group).group(group)
            if pool in _marked(found):
                # Left by a reading that could not release it.
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
        """Release a metadata snapshot, if there is one, then remove the tag; the group is held."""
        if self._has(group, pool):
            self._devices.release_metadata(group, pool)
        volumes.mark(self._volume_groups.lvm(group), group, pool, old=_RESERVED, new={})

    def _has(self, group: str, pool: str) -> bool:
        status = self._activator.status(group, pool)
        return any(isinstance(one, ThinPool) and one.has_metadata_snapshot for one in status)


def _deactivate(lvm: Lvm, group: str, names: Sequence[str]) -> None:
    # One that another program just opened keeps its tag.
    with suppress(lvm_errors.InUse):
        volumes.deactivate(lvm, group, *names)


def _marked(group: report.Group) -> list[str]:
    """The pools of a group whose metadata snapshot, if any, is Carver's."""
    return [one.name for one in records.usable(group) if tag.METADATA_SNAPSHOT in one.own_tags]


_OWN = {tag.ACTIVATED: "reading"}
# How long a snapshot stays active for a command that is to open it.
_LEASE_SECONDS = 60.0
# The deadline for deactivation after a reading; the next reading does what is left.
_END_SECONDS = 30.0


class Activations:
    """Activates thin snapshots for readings, and deactivates them after.

    Each active one costs the kernel a device and every refresh a row, and a backup reads many. A
    tag marks those that Carver activated, from before until after they are active: the next start,
    or the next reading in the group, deactivates what a kill left. One that was active before has
    no tag and is left alone. A COW snapshot is active for as long as its origin is.
    """

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._devices = context.devices
        self._guard = threading.Lock()
        # By group and name: the number of readers. By lease: the snapshot, and the lease's end
        # (monotonic).
        self._readers: Counter[tuple[str, str]] = Counter()
        self._leases: dict[str, tuple[tuple[str, str], float]] = {}

    @contextmanager
    def held(self, snapshot: Snapshot) -> Iterator[active_devices.Device]:
        """Inside, a snapshot's device is active; the group is held to enter. Raises Inactive.

        At most two commands. Call `end` once everything read in the group is closed.
        """
        key = (snapshot.group.name, snapshot.name)
        with self._guard:
            self._readers[key] += 1
        try:
            yield self._activate(snapshot)
        finally:
            with self._guard:
                self._readers[key] -= 1
                # Or an entry would stay for each snapshot ever read.
                if not self._readers[key]:
                    del self._readers[key]

    def lease(self, snapshot: Snapshot) -> str:
        """Activate a snapshot for another process to open; return the lease for `end_lease`.

        Empty where there is nothing to end. The group is held. The device stays active for as long
        as it is open there. At most two commands.
        """
        self._activate(snapshot)
        if not snapshot.is_thin:
            return ""
        lease = secrets.token_hex(8)
        with self._guard:
            until = time.monotonic() + _LEASE_SECONDS
            self._leases[lease] = ((snapshot.group.name, snapshot.name), until)
        return lease

    def end_lease(self, group: str, lease: str) -> None:
        """The process has closed the snapshot."""
        with self._guard:
            self._leases.pop(lease, None)
        self.end(group)

    def end(self, *groups: str) -> None:
        """Deactivate the snapshots in these groups that are no longer read. Raises nothing."""

        def sweep() -> None:
            with command.time_limit(_END_SECONDS):
                self.resume(*groups)

        try:
            # Without the caller's deadline and place among the calls, which may be used up.
            contextvars.Context().run(sweep)
        except Exception as error:
            _log.warning("snapshots in %s stay active for now: %s", ", ".join(groups), error)

    def resume(self, *groups: str) -> int:
        """Deactivate as `end`, or in all groups; return how many. Three commands a group."""
        count = 0
        with Attempts() as attempts:
            for name in groups or self._volume_groups.names:
                with attempts.one(), self._volume_groups.hold(name):
                    known = self._reports.fresh(name)
                    if unread := self._unread(known):
                        self._deactivate(name, unread)
                        count += len(unread)
        return count

    def _activate(self, snapshot: Snapshot) -> active_devices.Device:
        group, name = snapshot.group.name, snapshot.name
        is_own = tag.ACTIVATED in snapshot.own_tags
        if snapshot.is_thin and not is_own and not self._activator.is_active(group, name):
            volumes.mark(self._volume_groups.lvm(group), group, name, old={}, new=_OWN)
        return self._activator.activate_snapshot(snapshot)

    def _unread(self, known: Fresh) -> list[str]:
        """The names of snapshots that have the tag and are neither read nor copied."""
        now = time.monotonic()
        with self._guard:
            self._leases = {lease: one for lease, one in self._leases.items() if one[1] > now}
            read = {*self._readers, *(key for key, _ in self._leases.values())}
        own = [one for one in known.snapshots() if tag.ACTIVATED in one.own_tags]
        unread = [one for one in own if (one.group.name, one.name) not in read]
        if not unread:
            return []
        # A copy, which may be in another group, opens it only for moments.
        everywhere = self._reports.everywhere(known)
        everywhere.require_read()
        copied = {one.own_tags.get(tag.FROM) for one in everywhere.copies()}
        return [
            one.name
            for one in unread
            if str(one.id) not in copied and not self._devices.is_open(one.group.name, one.name)
        ]

    def _deactivate(self, group: str, names: list[str]) -> None:
        lvm = self._volume_groups.lvm(group)
        active = [one for one in names if self._activator.is_active(group, one)]
        # First those that an earlier try deactivated: one that fails again keeps no other's tag.
        self._forget(group, [one for one in names if one not in active])
        if active:
            all_or_each(active, lambda those: _deactivate(lvm, group, those))
            self._forget(group, active)

    def _forget(self, group: str, names: Sequence[str]) -> None:
        """Take the tag from those of these snapshots that are not active."""
        done = [(group, one) for one in names if not self._activator.is_active(group, one)]
        if done:
            volumes.mark_all(self._volume_groups.lvm(group), done, old=_OWN)
