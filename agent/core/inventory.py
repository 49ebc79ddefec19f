"""Carver's volumes and snapshots, found by their LVM tags; and their devices."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from agent.core import errors, ids, locks, records, tag, volume_states
from agent.core.background import Probes
from agent.core.group_definitions import GroupDefinitions
from agent.core.ids import VolumeId
from agent.core.records import Newer, Snapshot, Volume
from agent.core.report_age import Every, Fresh, Known, Seen
from agent.core.volume_group import VolumeGroup, begin_states
from agent.core.volume_groups import VolumeGroups
from agent.core.volume_states import Call, Ender
from lvm import devicemapper, devices, names, report, tags, thin, volumes
from lvm import errors as lvm_errors
from lvm.devicemapper import ThinPool
from lvm.lvm2 import Lvm
from mount import command
from mount import errors as mount_errors
from mount.kernel import Kernel

_log = logging.getLogger(__name__)

_Record = TypeVar("_Record", Volume, Snapshot)
# Why lvm2 could not repair what it left, by the group and the logical volume.
_Problems = dict[tuple[str, str], Exception]

# How long a call waits for the status of a pool, which takes a moment as a rule.
_POOL_SECONDS = 5.0


# Metrics and health checks: how old a state may be, and how long they wait for a new one.
MONITOR_AGE_SECONDS = 60.0
_MONITOR_WAIT_SECONDS = 5.0


class Inventory:
    """Finds volumes and snapshots: by id, by name, all of them.

    A call reads the fresh state of the groups that it decides about, which is seldom a command
    (agent.core.metadata_cache). Monitoring uses the cached state.
    """

    def __init__(
        self,
        volume_groups: VolumeGroups,
        kernel_devices: devices.Devices,
        definitions: GroupDefinitions | None = None,
    ) -> None:
        self._volume_groups = volume_groups
        self._devices = kernel_devices
        # Without definitions all groups are the operator's.
        self._definitions = definitions or GroupDefinitions(volume_groups.configuration, Kernel())
        self._pools: Probes[ThinPool | None] = Probes()
        self._guard = threading.Lock()
        self._held: frozenset[tuple[str, str]] = frozenset()
        # Why lvm2 could not repair a volume: the same is not logged again.
        self._logged: dict[tuple[str, str], str] = {}
        # The volumes of each group's last state, by its name: lists are frequent.
        self._seen: dict[str, tuple[report.Group, Sequence[Volume | Newer[Volume]]]] = {}
        # The groups whose cached state was used since `refresh` had them read.
        self._in_use: set[str] = set()

    @property
    def _groups(self) -> Sequence[str]:
        """The names of the groups of the configuration."""
        return self._volume_groups.names

    def state(self, *groups: str, resume: bool = False) -> Fresh:
        """The state of these groups now, or of all where none is named; of no other group.

        One command for each group that was written to since it was read. `resume`: before a change,
        resume devices that a killed lvm2 left suspended, and remove thin volumes that it recorded
        and did not make. Where lvm2 refuses that of one volume, only calls about that volume fail.
        Raises CommandError, GroupRefused, GroupSilent, TooManyCalls, Starting.
        """
        locks.enter(*groups)
        every = self._groups
        wanted = groups or every
        found = {name: self._volume_groups.of(name) for name in wanted}
        states = {name: one.state() for name, one in found.items() if one is not None}
        unasked = frozenset(every).difference(wanted)
        known = Fresh(_present(states), asked=frozenset(wanted), unasked=unasked)
        if resume:
            own = list(self.own_groups(known))
            problems = self._resume(own)
            were_some, unmade = self._remove_unmade(own)
            if were_some:
                known = self.state(*groups)
            return replace(known, problems=problems | unmade)
        return known

    def everywhere(self, known: Fresh) -> Every:
        """All groups, where any may matter: the fresh ones, and the others as Carver left them.

        No command and no wait for a group that Carver did not change since it was read: an idle
        group that hangs keeps no call of another. One that was changed, or never read, is read, for
        three seconds at most, and is `silent` where it does not answer. So is one that is refused,
        which is not read here: a call about it, or the next retry, reads it.
        """
        others = [one for one in self._volume_groups if one.name not in known.asked]
        read = begin_states(filter(_is_to_be_read, others))()
        left = {one.name: one.cached for one in others}
        silent = frozenset(one.name for one in others if not one.has_own_changes)
        unread = frozenset(one.name for one in others if one.status == "unknown")
        return Every(
            {**_present(left | read), **known.groups},
            silent=silent,
            unread=unread,
            problems=known.problems,
        )

    def await_others(self, *groups: str) -> None:
        """Read what `everywhere` would, before these groups are held: no hold waits for another's.

        A group that does not answer in three seconds is not waited for again for a minute.
        """
        locks.enter(*groups)
        others = (one for one in self._volume_groups if one.name not in groups)
        begin_states(filter(_is_to_be_read, others))()

    def lists(self) -> Every:
        """All groups for a list: fresh, or as Carver left one that takes long, see `begin_states`.

        Raises GroupBusy, GroupSilent, GroupAwaited where that lacks something, GroupRefused.
        """
        locks.enter()
        return Every(_present(begin_states(self._volume_groups, complete=True)()))

    def hint(self) -> Seen:
        """All groups as they are, or were when one that takes longer was read last."""
        locks.enter()
        return Seen(_present(begin_states(self._volume_groups)()))

    def seen(self, max_age: float) -> Seen:
        """The cached state, refreshed where it is older than `max_age` (seconds).

        However many ask, each group is read once in that time, and not at all where calls read it
        anyway. A group that does not answer has its last state. Where no group answers, the error
        is raised, again for as long. Raises CommandTimedOut after five seconds, GroupSilent.
        """
        every = list(self._volume_groups)
        refreshing = [
            one.refresh() for one in every if not 0 <= time.time() - one.tried_seconds < max_age
        ]
        wait(refreshing, _MONITOR_WAIT_SECONDS)
        # A group that is refused was read, and is as good as absent.
        refused = errors.GroupRefused
        problems = [p for one in every if (p := one.problem) and not isinstance(p, refused)]
        answers = any(one.cached is not None and one.problem is None for one in every)
        if problems and not answers:
            # The same error each time: without the traces of earlier callers.
            raise problems[0].with_traceback(None)
        if every and not any(one.time_seconds for one in every):
            raise mount_errors.CommandTimedOut(("lvm", "fullreport"), _MONITOR_WAIT_SECONDS)
        return self._cached_report()

    def search(self, is_it: Callable[[Volume], bool]) -> Volume | None:
        """The volume that `is_it` is true of, by the fresh state of its group, or of all groups.

        So a volume in one group is found while another group hangs. Raises as `state` does.
        """
        hint = next(filter(is_it, self.seen_volumes(self.hint())), None)
        if hint is not None:
            known = self.state(hint.group.name)
            if (found := next(filter(is_it, self.present(known)), None)) is not None:
                return found
        return next(filter(is_it, self.present(self.state())), None)

    def _resume(self, groups: Collection[report.Group]) -> _Problems:
        """Resume devices that a killed lvm2 left suspended; one command for each.

        lvm2 suspends a device while it changes its table. Killed meanwhile (SIGKILL), it leaves it
        so, and reads and writes there wait for ever. lvm2 reports under the group's lock: a device
        that a report shows as suspended is left over, not under way. Returns why those that are
        left could not be resumed.
        """
        for group in groups:
            self._deactivate_parts(group)
        left = [
            (group.name, one.name)
            for group in groups
            for one in records.every(group)
            if one.suspended
            and not self.is_kept_suspended(group.name, one.name)
            and records.is_usable(group, one)
        ]
        return self._each(left, "resume", volumes.refresh)

    def _each(
        self,
        found: Iterable[tuple[str, str]],
        what: str,
        act: Callable[[Lvm, str, str], object],
    ) -> _Problems:
        """Repair what lvm2 left of each volume; why it refuses, by group and volume.

        A group that does not answer is raised: then no other volume can be repaired either.
        """
        problems: _Problems = {}
        for key in found:
            try:
                act(self._volume_groups.lvm(key[0]), *key)
            except mount_errors.CommandFailed as error:
                problems[key] = error
                if self._logged.get(key) != str(error):
                    _log.error("cannot %s %s/%s yet: %s", what, *key, error)
                self._logged[key] = str(error)
            else:
                self._logged.pop(key, None)
        return problems

    def _remove_unmade(self, groups: Collection[report.Group]) -> tuple[bool, _Problems]:
        """Remove thin volumes that a killed lvm2 recorded and did not make.

        Returns whether there were any, and why those that are left are not removed.

        lvm2 commits its metadata, has the kernel make the volume in the pool, and then counts both
        there as one transaction (thin-provisioning.rst). Killed in between (SIGKILL), it leaves a
        volume that cannot be activated (ENODATA) before the pool's next change; a snapshot would
        hold what is written until then. No data were ever in it: the repeated call makes it anew.
        """
        found = [
            (group.name, one.name)
            for group in groups
            for one in records.every(group)
            if self._is_unmade(group, one)
        ]
        for key in found:
            if key not in self._logged:
                _log.warning("removing %s/%s, which lvm2 died while making", *key)
        return bool(found), self._each(found, "remove", volumes.remove)

    def _is_unmade(self, group: report.Group, one: report.LogicalVolume) -> bool:
        """Whether the kernel's pool lacks the transaction that makes a thin volume.

        It is asked only for an inactive volume that was the last to be made in its pool. An
        inactive pool is activated first: lvm2 may have died before it activated the pool, and where
        it then fails to activate the volume, it deactivates the pool again.
        """
        pool = group.volumes.get(one.pool)
        if one.active or pool is None or one.transaction_id is None:
            return False
        if pool.transaction_id != one.transaction_id + 1:
            return False
        if {tag.FORMATTED, tag.SEALED} & one.own_tags.keys():
            return False
        if not records.is_usable(group, one):
            return False
        try:
            status = self.pool_status(group.name, pool.name)
            if status is None and pool.disks.isdisjoint(group.missing_uuids):
                volumes.activate(self._volume_groups.lvm(group.name), group.name, pool.name)
                status = self.pool_status(group.name, pool.name)
        except (errors.PoolSilent, mount_errors.CommandFailed):
            return False
        if status is None or status.mode != "rw" or status.needs_check:
            return False
        return status.transaction_id == one.transaction_id

    def device(self, volume_id: str) -> devices.Device | None:
        """The device of an active volume, found without a command; None proves nothing.

        For an open encrypted volume it is the dm-crypt device; for a closed one the logical
        volume's, which callers must not publish.
        """
        parsed = VolumeId.parse(volume_id)
        if parsed is None:
            name = names.logical_volume(ids.INLINE_PREFIX, volume_id)
            found_in = (self._devices.find(group, name) for group in self._groups)
            found = next(filter(None, found_in), None)
        else:
            found = self._devices.find(parsed.group, parsed.name)
            if found is not None and not parsed.is_of(found.group_uuid):
                return None
        return found if found is None else self._devices.mapping(found) or found

    def require_same(self, volume: Volume, device: devices.Device) -> None:
        """Raise NoSuchVolume where a volume's device is no longer the same."""
        there = self.device(str(volume.id))
        if there is None or there.logical.uuid != device.logical.uuid:
            raise errors.NoSuchVolume(str(volume.id))

    def activate(self, volume: Volume, *, partial: bool = False) -> devices.Device:
        """The volume's device; a command only where it is not active. Raises Inactive."""
        return self.ensure_active(volume.group.name, volume.name, partial=partial)

    def ensure_active(
        self, group: str, name: str, by: str = "", *, partial: bool = False
    ) -> devices.Device:
        """The device of any logical volume; a command only where it is not active.

        If lvm2 fails, parts that a killed lvm2 left are removed, and it is retried once. `by` names
        another volume whose activation activates it; `partial` activates what is left of a volume
        on missing disks. A volume whose disk went away and is back is deactivated first. Raises
        Inactive.
        """
        found = self._devices.find(group, name)
        if found is not None and not self._deactivate_stranded(group, by or name):
            return found
        lvm = self._volume_groups.lvm
        try:
            volumes.activate(lvm(group), group, by or name, partial=partial)
        except mount_errors.CommandFailed:
            if not self._deactivate_parts(self.state(group).group(group)):
                raise
            volumes.activate(lvm(group), group, by or name, partial=partial)
        if (found := self._devices.find(group, name)) is None:
            raise lvm_errors.Inactive(group, name)
        return found

    @contextmanager
    def activated(self, group: str, name: str) -> Iterator[devices.Device]:
        """The device of a logical volume, which is left inactive if it was.

        The caller holds the volume, which has no snapshot that may be used meanwhile. The group is
        held to activate and to deactivate it, and not within the `with`, where its disk may hang.
        """
        was_active = True
        try:
            with self._volume_groups.hold(group):
                was_active = self.is_active(group, name)
                device = self.ensure_active(group, name)
            yield device
        finally:
            if not was_active:
                with self._volume_groups.hold(group):
                    volumes.deactivate(self._volume_groups.lvm(group), group, name)

    def is_active(self, group: str, name: str) -> bool:
        """Whether a logical volume, or a pool, is active; no command."""
        return bool(self._devices.find(group, name) or self._devices.status(group, name))

    def is_open(self, volume: Volume) -> bool:
        """Whether something has an active volume's device open; no command.

        For an encrypted volume, whether something has its dm-crypt device open.
        """
        if volume.is_encrypted and (mapping := self.mapping(volume)) is not None:
            return self._devices.is_mapping_open(mapping)
        return self._devices.is_open(volume.group.name, volume.name)

    def is_closed(self, volume_id: str) -> bool:
        """Whether nothing, no dm-crypt device either, has a volume open for certain. One ioctl.

        False for an inline volume, whose id does not name its group.
        """
        parsed = VolumeId.parse(volume_id)
        return parsed is not None and self._devices.is_closed(parsed.group, parsed.name)

    def mapping(self, volume: Volume) -> devices.Device | None:
        """The dm-crypt device over an encrypted volume that is open; no command."""
        found = self._devices.find(volume.group.name, volume.name)
        return None if found is None else self._devices.mapping(found)

    def close_leftovers(self, volume: Volume) -> None:
        """Remove what a killed cryptsetup left on an active volume; no command."""
        if (found := self._devices.find(volume.group.name, volume.name)) is not None:
            self._devices.close_leftovers(found)

    def active(self, prefix: str, *groups: str) -> Iterator[tuple[str, str]]:
        """Active volumes with a prefix, in these groups or all: group and name; no command."""
        for group in groups or self._groups:
            for name in self._devices.active(group):
                if names.is_of(prefix, name):
                    yield group, name

    def active_ids(self, prefix: str, group: str) -> Iterator[VolumeId]:
        """The ids of active volumes with a prefix, also of a group never read; no command."""
        for _, name in self.active(prefix, group):
            if (found := self._devices.find(group, name)) is not None:
                yield VolumeId(group, ids.start_of(found.group_uuid), name)

    def is_any_active(self, group: str) -> bool:
        """Whether any logical volume of a group is active; no command."""
        return bool(self._devices.active(group))

    def status(self, group: str, name: str) -> tuple[devices.Status, ...]:
        """device-mapper's status of an active logical volume, and of all that it stands on."""
        return self._devices.status(group, name)

    def status_of(self, volume_id: str) -> tuple[devices.Status, ...]:
        """device-mapper's status of an active volume, by the CO's id."""
        parsed = VolumeId.parse(volume_id)
        name = ids.logical_name(volume_id)
        found_in = (self.status(one, name) for one in ([parsed.group] if parsed else self._groups))
        return next(filter(None, found_in), ())

    def pool_status(self, group: str, name: str) -> ThinPool | None:
        """device-mapper's status of a thin pool; None for one that is not active.

        Waits until the caller's deadline, five seconds at most, and not at all where the kernel has
        kept earlier callers waiting for as long. Raises PoolSilent.
        """
        path = f"{group}/{name}"
        until = time.monotonic() + command.patience_seconds(_POOL_SECONDS)
        seen = self._pools.probe(
            path, lambda: thin.status_of(self.status(group, name)), until, path
        )
        if seen.hanging_seconds:
            raise errors.PoolSilent(group, name, seen.hanging_seconds)
        return seen.value

    def activate_snapshot(self, snapshot: Snapshot) -> devices.Device:
        """The snapshot's device, which is there whenever its source's is. Raises Inactive."""
        # For a copy-on-write snapshot lvm2 would ask whether its origin may be activated, too.
        by = "" if snapshot.is_thin else snapshot.source_id.name
        return self.ensure_active(snapshot.group.name, snapshot.name, by)

    def has_overflowed(self, snapshot: Snapshot) -> bool:
        """Whether an active snapshot has overflowed, by device-mapper; no command."""
        status = self._devices.own_status(snapshot.group.name, snapshot.name)
        return devicemapper.has_overflowed(status)

    def has_lost_disk(self, volume: Volume) -> bool:
        """Whether an active volume stands on a disk that went away, be it back; no command."""
        return self._devices.has_lost_disk(volume.group.name, volume.name)

    def _deactivate_stranded(self, group: str, name: str) -> bool:
        """Deactivate a volume that stands on what its disk was; whether it is inactive now.

        A disk that comes back is another device to the kernel. lvm2 calls the volume active and
        does nothing, while each of its reads and writes fails. Thin volumes have their pool's
        device, and are deactivated with it. What is in use stays as it is, and so does what lies on
        a disk that is not back. No command for any other volume.
        """
        if not self._devices.has_lost_disk(group, name):
            return False
        known = self.state(group).group(group)
        logical = known.volume(name)
        holder = known.volumes.get(logical.pool, logical)
        own = [*(one.name for one in known.in_pool(logical.pool)), holder.name]
        is_away = not holder.disks.isdisjoint(known.missing_uuids)
        standing = [*own, *(one.name for one in known.copy_on_write_of(name))]
        if is_away or any(self._devices.is_open(group, one) for one in standing):
            return False
        _log.warning("%s/%s is activated anew: its disk went away, and is back", group, name)
        for one in own:
            if self.is_active(group, one):
                volumes.deactivate(self._volume_groups.lvm(group), group, one)
        return True

    def _deactivate_parts(self, group: report.Group) -> bool:
        """Deactivate parts of inactive RAIDs and pools that a killed lvm2 left; whether any were.

        lvm2 refuses to activate a RAID or pool while a part is active by itself. One ioctl where
        there is such a volume.
        """
        own = {
            one.name
            for one in records.every(group)
            if not one.layout & {"linear", "striped"} and records.is_usable(group, one)
        }
        if not own:
            return False
        active = set(self._devices.active(group.name))
        parts = {one: report.whole(one) for one in active if names.is_part(one)}
        # A pool may be active without a device of its own name.
        left = [
            part
            for part, whole in sorted(parts.items())
            if whole in own - active and not self._devices.status(group.name, whole)
        ]
        if not left:
            return False
        # lvm2 refuses this for a part of a volume that was activated meanwhile.
        with suppress(mount_errors.CommandError):
            volumes.deactivate(self._volume_groups.lvm(group.name), group.name, *left)
        return True

    @contextmanager
    def keep_suspended(self, volumes: Iterable[tuple[str, str]]) -> Iterator[None]:
        """Keep volumes, which are suspended on purpose, from being resumed by `state`.

        Each is a group's name and a logical volume's; no two calls have the same.
        """
        own = frozenset(volumes)
        with self._guard:
            self._held |= own
        try:
            yield
        finally:
            with self._guard:
                self._held -= own

    @property
    def time_seconds(self) -> float:
        """When the oldest cached state of a group was read (epoch); 0 where none was."""
        times = (one.time_seconds for one in self._volume_groups if one.time_seconds)
        return min(times, default=0.0)

    @property
    def refused(self) -> Mapping[str, errors.GroupRefused]:
        """Why groups that are here are not used, by their names; from the cached state."""
        problems = {one.name: one.problem for one in self._volume_groups}
        return {name: one for name, one in problems.items() if isinstance(one, errors.GroupRefused)}

    @property
    def ignored(self) -> Mapping[str, Sequence[str]]:
        """The disks that only claim to be a group's, by the groups; from the cached state."""
        return {
            volume_group.name: tuple(
                f"{path} is not used: it {why}" for path, why in volume_group.metadata.ignored
            )
            for volume_group in self._volume_groups
        }

    @property
    def problem(self) -> Exception | None:
        """Why the last read of a group failed; no command."""
        return next((one.problem for one in self._volume_groups if one.problem is not None), None)

    def cached(self, volume_id: str) -> Volume | None:
        """A volume by the cached state, which is refreshed when it is due; None proves nothing."""
        self.keep_fresh()
        seen, parsed = self._cached_report(), VolumeId.parse(volume_id)
        own_name = ids.logical_name(volume_id)
        for group in seen.groups.values():
            if parsed is not None and (group.name != parsed.group or not parsed.is_of(group.uuid)):
                continue
            logical = group.volumes.get(own_name)
            found = None if logical is None else records.volume(group, logical)
            if isinstance(found, Volume):
                return found
        return None

    def _cached_report(self) -> Seen:
        return Seen(_present({one.name: one.cached for one in self._volume_groups}))

    def is_kept_suspended(self, group: str, name: str) -> bool:
        """Whether a logical volume is suspended on purpose (`keep_suspended`)."""
        return (group, name) in self._held

    def keep_fresh(self) -> None:
        """Have the next `refresh` read all groups: a caller goes by their cached state."""
        self._in_use.update(self._groups)

    def outdate(self, written: str | None = None) -> None:
        """Have all disks scanned; see `VolumeGroups.outdate`."""
        self._volume_groups.outdate(written)

    def refresh(self, max_age: float) -> "list[Future[report.Group | None]]":
        """Begin to read each group whose cached state is used and older than that (seconds).

        Returns at once. A read that failed counts, so that it is not repeated at once. Begins
        deferred work that had no thread, too.
        """
        self._volume_groups.catch_up()
        begun = []
        for one in self._volume_groups:
            is_due = abs(time.time() - one.tried_seconds) >= max_age
            if is_due and one.name in self._in_use:
                begun.append(one.refresh())
                self._in_use.discard(one.name)
        return begun

    def require_group_of(self, known: Known, identity: str) -> None:
        """Raise OtherGroup for an id of a group that is not here: nothing is proved."""
        self._find(known, identity)

    def group(self, known: report.Report, name: str) -> report.Group:
        """A group to create volumes in; raises GroupMissing, GroupRefused."""
        return self._definitions.group(known, name)

    def require_groups(self, known: report.Report) -> None:
        """Raise GroupMissing, GroupRefused for one of Carver's groups that cannot be used."""
        for name in self._groups:
            self.group(known, name)

    def listed(self, known: report.Report) -> list[Volume]:
        """What the CO has as volumes, to be shown; also those that only newer versions use."""
        return [one for one in self.shown(known) if one.is_listed]

    def shown(self, known: report.Report) -> Iterator[Volume]:
        """Every volume, also those that only newer versions use: what they stand on stays."""
        for group in self.own_groups(known):
            for one in self._volumes_of(group):
                yield one.shown if isinstance(one, Newer) else one

    def copies(self, known: report.Report) -> Iterator[Volume]:
        """Every volume that is being filled, also those that only newer versions use."""
        return (one for one in self.shown(known) if one.ended_by is Ender.COPIER)

    def present(self, known: Known) -> Iterator[Volume]:
        """Every volume that this version uses, also those that are being erased."""
        yield from self._used(known)

    def seen_volumes(self, seen: Seen) -> Iterator[Volume]:
        """Every volume by a state that may be old: for monitoring, and for hints."""
        yield from self._used(seen)

    def seen_snapshots(self, seen: Seen) -> Iterator[Snapshot]:
        """Every snapshot by a state that may be old."""
        return (one for one in self._snapshots(seen) if isinstance(one, Snapshot))

    def seen_volume(self, seen: Seen, volume_id: str) -> Volume:
        """The volume of an id by a state that may be old; raises as `usable` for Call.USE."""
        # Its groups are asked as if they were fresh: this is for what is shown alone.
        known = Fresh(seen.groups, asked=frozenset(seen.groups))
        return self.usable(known, volume_id, Call.USE)

    def _used(self, known: report.Report) -> Iterator[Volume]:
        for group in self.own_groups(known):
            yield from (one for one in self._volumes_of(group) if isinstance(one, Volume))

    def _volumes_of(self, group: report.Group) -> Sequence[Volume | Newer[Volume]]:
        """The volumes of a group; its state is the same object until something changes."""
        seen, found = self._seen.get(group.name, (None, ()))
        if seen is not group:
            every = (records.volume(group, one) for one in records.every(group))
            found = tuple(one for one in every if one is not None)
            self._seen[group.name] = (group, found)
        return found

    def own_groups(self, known: report.Report) -> Iterator[report.Group]:
        """Carver's groups that are present, and those that a call named.

        No class may name such a one any more; what is Carver's there has its tags.
        """
        every = dict.fromkeys((*self._groups, *known.groups))
        return (known.groups[one] for one in every if one in known.groups)

    def fresh_groups(self, *groups: str) -> list[report.Group]:
        """The fresh state of these groups, or of all; without those that are absent."""
        return list(self.own_groups(self.state(*groups)))

    def named(self, known: Every, name: str, prefix: str = ids.VOLUME_PREFIX) -> Volume | None:
        """The volume that the CO calls `name`, in whichever of Carver's groups it is.

        Raises NeedsOther, and why lvm2 could not repair it.
        """
        every = (self.named_in(group, name, prefix) for group in self.own_groups(known))
        found = next(filter(None, every), None)
        if found is not None:
            _require_repaired(known, found.group, found.group.volume(found.name))
        return found

    def why_unsure(self, known: Every, own_name: str) -> str:
        """Why a logical volume may be in a group of which `known` has not all; empty if in none.

        It is if it is active there, or was there when lvm2 wrote to the group last.
        """
        for one in sorted(known.silent):
            if self.is_active(one, own_name) or self._volume_groups.was_in(one, own_name):
                found = self._volume_groups.known(one)
                problem = None if found is None else found.problem
                why = f", and does not answer: {problem}" if problem else ", and does not answer"
                return f"volume group {one} may have {own_name}{why}"
        return ""

    def group_left_with(self, own_name: str) -> str | None:
        """The group that no class names any more and that had a logical volume of that name.

        Raises GroupBusy where it may be on disks that cannot be read. No command.
        """
        for one in self._volume_groups.left():
            if not self._volume_groups.was_in(one, own_name):
                continue
            if self._volume_groups.of(one) is not None:
                return one
            if unknown := self._volume_groups.unknown_disks():
                disks = ", ".join(path for path, _ in unknown)
                why = f"it had {own_name}, and may be on {disks}, which cannot be read"
                raise errors.GroupBusy(f"volume group {one}", why)
        return None

    def require_none_named(self, known: Fresh, name: str, prefix: str) -> None:
        """Raise NeedsOther, TagsDamaged for one of that name, which `search` leaves out."""
        for group in self.own_groups(known):
            self.named_in(group, name, prefix)

    def named_in(
        self, group: report.Group, name: str, prefix: str = ids.VOLUME_PREFIX
    ) -> Volume | None:
        """The volume of a group that the CO calls `name`; raises NeedsOther."""
        logical = group.volumes.get(names.logical_volume(prefix, name))
        found = None if logical is None else records.volume(group, logical)
        return None if found is None else _usable(found)

    def get(self, known: Known, volume_id: str) -> Volume:
        """The volume of an id, even one that is being erased.

        Raises NoSuchVolume where the report proves its absence, OtherGroup where its group is not
        here, so that nothing is proved, and NeedsOther.
        """
        found = self._find(known, volume_id)
        volume = None if found is None else records.volume(*found)
        if volume is None:
            raise errors.NoSuchVolume(volume_id)
        return _usable(volume)

    def snapshot(self, known: Known, snapshot_id: str) -> Snapshot:
        """The snapshot of an id; raises NoSuchSnapshot, OtherGroup or NeedsOther, as `get` does.

        One of a group snapshot that is not on record as complete is looked at with all groups.
        """
        found = self._find(known, snapshot_id)
        either = None if found is None else records.snapshot(*found)
        snapshot = None if either is None else _usable(either)
        if snapshot is None or snapshot.is_bridge:
            raise errors.NoSuchSnapshot(snapshot_id)
        own = snapshot.group_snapshot_id
        if own and tag.COMMITTED not in snapshot.own_tags:
            every = known if isinstance(known, Every) else self.everywhere(known)
            if self.is_half_made(every, self.members(every, own)):
                raise errors.NoSuchSnapshot(snapshot_id)
        return snapshot

    def snapshots(self, known: Known) -> Iterator[Snapshot]:
        """Every snapshot that a caller asked for, also those that only newer versions use.

        Those of group snapshots that are not on record as complete are looked at with all groups.
        """
        half_made: set[str] | None = None
        for one in self._snapshots(known):
            snapshot = one.shown if isinstance(one, Newer) else one
            if snapshot.is_bridge:
                continue
            if snapshot.group_snapshot_id and tag.COMMITTED not in snapshot.own_tags:
                if half_made is None:
                    every = known if isinstance(known, Every) else self.everywhere(known)
                    half_made = self.half_made(every)
                if snapshot.group_snapshot_id in half_made:
                    continue
            yield snapshot

    def members(self, known: Known, group_snapshot_id: str) -> list[Snapshot]:
        """The snapshots of a group snapshot that are present, be it complete or not.

        Raises NeedsOther.
        """
        return [_usable(one) for one in self.group_snapshots(known).get(group_snapshot_id, ())]

    def group_snapshots(self, known: Known) -> Mapping[str, list[Snapshot | Newer[Snapshot]]]:
        """The snapshots of each group snapshot that are present, by its id."""
        found: defaultdict[str, list[Snapshot | Newer[Snapshot]]] = defaultdict(list)
        for one in self._snapshots(known):
            shown = one.shown if isinstance(one, Newer) else one
            if shown.group_snapshot_id:
                found[shown.group_snapshot_id].append(one)
        return found

    def half_made(self, known: Every) -> set[str]:
        """The group snapshots that never were complete; callers do not get their snapshots.

        That is proved: no snapshot has the tag that all were taken, and no group is absent that may
        hold another.
        """
        return {
            identity
            for identity, members in self.group_snapshots(known).items()
            if (own := [one for one in members if isinstance(one, Snapshot)]) == members
            and self.is_half_made(known, own)
        }

    def is_half_made(self, known: Every, members: Sequence[Snapshot]) -> bool:
        """Whether these snapshots of a group snapshot are not all, and never were."""
        if records.is_whole(members) or any(tag.COMMITTED in one.own_tags for one in members):
            return False
        return not self._away(known, members)

    def awaited(self, known: Every, members: Sequence[Snapshot]) -> list[str]:
        """The groups that may hold further snapshots of a group snapshot, and may yet appear here.

        Not a group that no class names any more, nor one replaced by another of its name.
        """
        away = self._away(known, members)
        return sorted(one for one in away if (one in self._groups) != self._volume_groups.has(one))

    def _away(self, known: Every, members: Sequence[Snapshot]) -> set[str]:
        """The groups that may hold further snapshots of a group snapshot, and are absent."""
        here = {
            records.place_of(str(VolumeId.of(one, records.UNKNOWN)))
            for one in self.own_groups(known)
        }
        named = {records.place_of(one.group_snapshot_id) for one in members}
        for one in members:
            named |= set(filter(None, one.own_tags.get(tag.MEMBER_GROUPS, "").split(",")))
        away = {one.partition("@")[0] for one in named - here}
        if any(tag.MEMBER_GROUPS not in one.own_tags for one in members):
            # Snapshots of older versions do not say: others may be in any group.
            away |= set(self._groups) - set(known.groups)
        return away

    def is_known_unused(self, known: Every, bridge: Snapshot) -> bool:
        """Whether a bridge that no volume of `known` needs is needed by none of a silent group.

        Its own tag has the group of the one volume that it was taken for.
        """
        return not known.unanswered(*_groups_of_copy(bridge))

    def require_known_unused(self, known: Every, bridge: Snapshot) -> None:
        """Raise GroupBusy where `is_known_unused` is false."""
        known.require_answered(*_groups_of_copy(bridge))

    def all_snapshots(self, known: Known) -> Iterator[Snapshot]:
        """Every snapshot that this version uses, also those that volumes are copied from."""
        return (one for one in self._snapshots(known) if isinstance(one, Snapshot))

    def _snapshots(self, known: report.Report) -> Iterator[Snapshot | Newer[Snapshot]]:
        for group, logical in self._logical(known):
            if (snapshot := records.snapshot(group, logical)) is not None:
                yield snapshot

    def require_not_copied(self, known: Every, source_id: str) -> None:
        """Raise VolumeInUse for a snapshot or a volume from which a volume is being copied.

        The source's group is held, which each new copy takes as well. Raises GroupBusy for a
        snapshot while a group was never read, which may have such a volume. A volume itself is not
        read: a copy has its bridge, which is not removed while the copy's group is silent.
        """
        if names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(source_id)):
            known.require_read()
        every = self.copies(known)
        copies = [str(one.id) for one in every if one.own_tags.get(tag.FROM) == source_id]
        if copies:
            raise errors.VolumeInUse(source_id, f"{', '.join(copies)} is copied from it")

    def doomed(self, known: Known) -> Iterator[Volume]:
        """Every volume that is recorded as deleted, and has yet to be erased.

        Without those that only a newer version knows how to erase.
        """
        for group, logical in self._logical(known):
            volume = records.volume(group, logical) or records.remains(group, logical)
            if isinstance(volume, Volume) and volume.is_doomed:
                yield volume

    def require_repaired(self, known: Known, volume: Volume) -> None:
        """Raise why lvm2 could not repair a volume that it left suspended; see `state`."""
        _require_repaired(known, volume.group, volume.group.volume(volume.name))

    def doomed_one(self, known: Known, identity: str) -> Volume:
        """The volume recorded as deleted under an id; raises as `get` does."""
        found = self._find(known, identity)
        either = None if found is None else records.volume(*found) or records.remains(*found)
        volume = None if either is None else _usable(either)
        if volume is None or not volume.is_doomed:
            raise errors.NoSuchVolume(identity)
        return volume

    def _find(
        self, known: Known, identity: str
    ) -> tuple[report.Group, report.LogicalVolume] | None:
        """The logical volume of an id; None for an impossible id, and where its absence is proved.

        Raises OtherGroup where the group is not here: nothing is proved then; and why lvm2 could
        not repair the volume, where `state` tried to.
        """
        parsed = VolumeId.parse(identity)
        if parsed is None:
            return None
        if isinstance(known, Fresh) and parsed.group in known.unasked:
            raise AssertionError(f"{identity}: {parsed.group} was not read")
        group = known.groups.get(parsed.group)
        if group is None:
            raise errors.OtherGroup(identity, f"group {parsed.group} is not on this node")
        if not parsed.is_of(group.uuid):
            raise errors.OtherGroup(identity, f"group {parsed.group} here has another UUID")
        logical = group.volumes.get(parsed.name)
        if logical is None:
            return None
        _require_repaired(known, group, logical)
        return group, logical

    def _logical(self, known: report.Report) -> Iterator[tuple[report.Group, report.LogicalVolume]]:
        for group in self.own_groups(known):
            yield from ((group, logical) for logical in records.every(group))

    def require(self, volume_id: str, call: Call) -> Volume:
        """The volume of an id by the fresh state, for a call; raises as `usable` does."""
        return self.usable(self.state(ids.group_of(volume_id), resume=True), volume_id, call)

    def replace_tags(
        self, group: str, name: str, keys: Collection[str], new: Mapping[str, str]
    ) -> None:
        """Have a volume's tags say `new` under these keys, and nothing else: one command, or none.

        Takes the group, and looks at it first. Raises what `read` raises, VolumeMissing; BadField
        for a value that is too long for a tag.
        """
        for key, text in new.items():
            tag.require_fits(key, key, text)
        with self._volume_groups.hold(group):
            found = self.state(group, resume=True).group(group).volume(name).tags
            # Several of one key, as only others write them, are all replaced.
            has = {(key, value) for key in keys for value in tags.values(found, key)}
            old, added = sorted(has - new.items()), dict(new.items() - has)
            if old or added:
                volumes.mark(self._volume_groups.lvm(group), group, name, old=old, new=added)

    @contextmanager
    def logging_refusals(self, volume_id: str, key: str) -> Iterator[None]:
        """Log lvm2's refusal to change a tag without which the call can succeed, and go on.

        In a full group, or one that lacks a disk, lvm2 writes no tag. A command of unknown outcome
        is raised: the caller repeats the call.
        """
        try:
            yield
        except (mount_errors.OutcomeUnknown, lvm_errors.StillRunning):
            raise
        except (errors.AgentError, mount_errors.CommandError) as error:
            _log.warning("volume %s: its tag `%s` is not changed: %s", volume_id, key, error)

    def usable(self, known: Known, volume_id: str, call: Call) -> Volume:
        """The volume of that id for a call, if its record lets the call have it.

        Raises OtherGroup, and as `volume_states.require`.
        """
        volume = self.get(known, volume_id)
        volume_states.require(call, volume)
        return volume


def _groups_of_copy(bridge: Snapshot) -> list[str]:
    """The groups that may have the volume that a bridge was taken for; none where any may."""
    return [ids.group_of(bridge.copy_id)] if bridge.copy_id else []


def _is_to_be_read(volume_group: VolumeGroup) -> bool:
    """Whether the cached state lacks something that Carver did, and a read may help."""
    return not volume_group.has_own_changes and volume_group.status != "refused"


def _require_repaired(known: Known, group: report.Group, logical: report.LogicalVolume) -> None:
    """Raise why lvm2 could not repair a volume, or what it depends on."""
    for name in filter(None, (logical.name, logical.origin, logical.pool)):
        if problem := known.problems.get((group.name, name)):
            raise problem.with_traceback(None)


def _usable(found: _Record | Newer[_Record]) -> _Record:
    """A volume or snapshot; raises NeedsOther or TagsDamaged for one that must not be used."""
    if isinstance(found, Newer):
        raise found.problem
    return found


def _present(groups: Mapping[str, report.Group | None]) -> dict[str, report.Group]:
    return {name: one for name, one in groups.items() if one is not None}
