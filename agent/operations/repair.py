"""Repair RAID volumes and thin pools: on request, and automatically after a delay.

Each call looks, takes the next step, and reports how far the repair is. The kernel rebuilds in the
background, so repeating the call completes the repair, also after a kill.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from agent.core import errors, ids, tag
from agent.operations.erase_deleted import mark_for_erase
from agent.settings.classes import AUTO, DeviceClass
from agent.volumes import records, users
from agent.volumes.activator import Activator
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.reports import MONITOR_AGE_SECONDS
from agent.volumes.volume_states import Call
from agent.work.group_worker import Looks
from lvm import groups, layout, report, thin, volumes
from lvm.devicemapper import Raid
from lvm.room import Room
from mount import command
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Whether all is done, and a sentence that says what was done, or what is awaited."""

    done: bool
    message: str


def rebuilding(activator: Activator, group: report.Group) -> str:
    """The RAID volumes of a group that are not in sync, with percentages; empty if all are."""
    found = []
    for logical in sorted(records.every(group), key=attrgetter("name")):
        is_raid = "raid" in logical.layout
        status = _raid(activator, group.name, logical.name) if is_raid else None
        if status is not None and status.is_syncing:
            found.append(f"{logical.name} {status.synced_percent:.0f} %")
    return ", ".join(found)


def _raid(activator: Activator, group: str, name: str) -> Raid | None:
    """The kernel's status of an active RAID volume; no command."""
    return next((one for one in activator.status(group, name) if isinstance(one, Raid)), None)


class Repairer:
    """Repairs volumes; `freed` is called with a group in which lost images were replaced."""

    def __init__(self, context: Context, *, freed: Callable[[str], object]) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._lvm = context.volume_groups.lvm
        self._allocators = context.allocators
        self._policy, self._freed = context.erase_policy, freed

    def repair(self, volume_id: str, *, pool_metadata: bool = False) -> Progress:
        """Take the next step of a volume's repair; with `pool_metadata` also of its thin pool's.

        At most four commands, and for a pool one more for each active volume in it. Raises
        NotRepairable, NoRoom, VolumeInUse.
        """
        with self._volume_groups.hold(group := ids.group_of(volume_id)):
            volume = self._mender.mended_volume(volume_id, Call.MANAGE)
            logical = volume.group.volume(volume.name)
            if "raid" in logical.layout and not logical.pool:
                if any(volume.group.lost_images(logical)) and volume.group.survives(logical):
                    self._require_room(volume.group, logical)
                disks = candidates(volume.group, logical)
                return self.next_step(volume.group, volume.name, disks)
            path = f"{group}/{logical.pool or volume.name}"
            if gone := ", ".join(volume.missing_disks):
                lost = "its volumes" if logical.pool else "the volume"
                raise errors.NotRepairable(
                    path,
                    f"a part of it was on the missing disk {gone} alone; attach that again, or"
                    f" restore {lost} from a backup",
                )
            if logical.pool:
                return self._repair_pool(volume.group, logical.pool, is_confirmed=pool_metadata)
            return Progress(True, f"{path} is whole")

    def next_step(self, group: report.Group, name: str, disks: list[str]) -> Progress:
        """Take the next step of a RAID volume's repair; new images are made on these disks.

        Call it with the group locked, and a report that was read since.
        """
        logical, path, lvm = group.volume(name), f"{group.name}/{name}", self._lvm(group.name)
        lost = sum(group.lost_images(logical))
        if lost and not group.survives(logical):
            why = f"{lost} of its images are on missing disks, and data are on none of the others"
            raise errors.NotRepairable(path, why)
        if lost:
            self._activator.ensure_active(group.name, name)
        # The kernel's status: a refresh leaves no trace in lvm2's metadata, so the report would be
        # as before.
        status = _raid(self._activator, group.name, name)
        if status is not None and status.is_syncing:
            # lvm2 replaces no image meanwhile.
            return Progress(False, f"{path} is rebuilt: {status.synced_percent:.0f} %")
        if lost:
            if self._policy.erases_any([logical]):
                # The old images become free extents with data, and lvm2 takes their disk as whole
                # when it is back. All missing disks: the same mark by any report.
                mark_for_erase(lvm, group, group.missing_uuids)
            groups.replace_images(lvm, group.name, name, disks)
            self._freed(group.name)
            return Progress(False, f"{path} is rebuilt on {', '.join(disks)}")
        if status is None:
            return Progress(True, f"{path} is whole")
        if "D" in status.health:
            volumes.refresh(lvm, group.name, name)
            return Progress(False, f"{path} has an image that failed for a while; it is resynced")
        if status.action == "repair":
            return Progress(False, f"{path} has copies that differed; they are synchronised")
        if status.mismatches:
            groups.make_alike(lvm, group.name, name)
            return Progress(False, f"{path} has copies that differ; they are synchronised now")
        return Progress(True, f"{path} is whole")

    def _require_room(self, group: report.Group, logical: report.LogicalVolume) -> None:
        """Raise NoRoom unless each lost image has a disk, without the room promised to pools.

        No class's reserve is kept: a volume is not to be lost for it.
        """
        extent = group.extent_size_bytes
        lost, each = sum(group.lost_images(logical)), layout.image_extents(logical, extent)
        room = Room(group, self._allocators.promised_extents(group)).overwriting
        images = min(len(candidates(group, logical)), room.available_extents // each)
        if images < lost:
            where = (
                "on disks that have no image of the volume yet, for its lost images (add one:"
                " `carver group replace-disk`)"
            )
            raise errors.NoRoom(group.name, lost * each * extent, images * each * extent, where)

    def _repair_pool(self, group: report.Group, pool: str, *, is_confirmed: bool) -> Progress:
        """Have lvm2 rewrite the metadata of a thin pool, none of whose volumes is in use."""
        path, lvm = f"{group.name}/{pool}", self._lvm(group.name)
        if (why := self._damage(group, pool)) == "":
            return Progress(True, f"the thin pool {path} is whole")
        members = [one.name for one in group.in_pool(pool)]
        if not is_confirmed:
            raise errors.NotRepairable(
                path,
                f"{why}. Back up what can be read, stop the workloads of {', '.join(members)}, and"
                " call again with `--pool-metadata`: the metadata are written anew as far as they"
                " can be read",
            )
        known = self._reports.fresh(group.name)
        for one in known.volumes():
            if one.group.name == group.name and one.name in members:
                users.require_unused(self._kernel, self._activator, one)
        for name in (*members, pool):
            if self._activator.is_active(group.name, name):
                volumes.deactivate(lvm, group.name, name)
        groups.repair_pool(lvm, group.name, pool)
        if why := self._damage(group, pool):
            raise errors.NotRepairable(path, f"after the repair, {why}; see `dmesg`")
        return Progress(
            True,
            f"the metadata of {path} are written anew; the old ones are {path}_meta0: remove them"
            " (`lvremove`) once you have checked all volumes",
        )

    def _damage(self, group: report.Group, pool: str) -> str:
        """What is wrong with a pool's metadata, by the kernel or by its activation; or empty."""
        if not self._activator.is_active(group.name, pool):
            try:
                volumes.activate(self._lvm(group.name), group.name, pool)
            except mount_errors.OutcomeUnknown:
                raise
            except mount_errors.CommandFailed as error:
                # lvm2 has thin_check(8) look at them first.
                return f"it cannot be activated: {error}"
        status = thin.status_of(self._activator.status(group.name, pool))
        if status is None:
            return ""
        if status.mode in ("rw", "out_of_data_space") and not status.needs_check:
            return ""
        return f"the kernel reports {status.mode}{', needs_check' * status.needs_check}"


def candidates(group: report.Group, logical: report.LogicalVolume) -> list[str]:
    """The disks for new images of a RAID: each has room for one, and no part of the volume."""
    each = layout.image_extents(logical, group.extent_size_bytes)
    return [disk.name for disk in Room(group).for_images(logical, each)]


_LOOK_SECONDS = 30.0
_RETRY_SECONDS = 300.0
_PATIENCE_SECONDS = 60.0
_FAILURE = "volume group %s: cannot look for volumes to repair: %s"


@dataclass
class _Seen:
    """What was seen of a group's degraded volumes, by their ids."""

    # When a volume was first seen without these disks, and when its next attempt is due
    # (monotonic, seconds).
    since: dict[tuple[str, frozenset[str]], float] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    logged: dict[str, str] = field(default_factory=dict)


class AutoRepair:
    """Repairs volumes that lack a disk for longer than their class allows (`repair = "auto"`)."""

    def __init__(self, context: Context, repairer: Repairer) -> None:
        self._reports = context.reports
        self._repairer = repairer
        self._configuration = context.configuration
        # By the group.
        self._seen: defaultdict[str, _Seen] = defaultdict(_Seen)
        self.looks = Looks(
            context.workers, "repair", self._groups, self.look, _LOOK_SECONDS, _FAILURE
        )

    def _classes(self) -> list[DeviceClass]:
        return [one for one in self._configuration.now.classes if one.repair == AUTO]

    def _groups(self) -> list[str]:
        return sorted({one.group for one in self._classes()})

    def step(self, now_seconds: float) -> None:
        """Look once at each group, as if it were then."""
        for one in self._groups():
            self.look(one, lambda: now_seconds)

    def look(self, group: str, clock: Callable[[], float] = time.monotonic) -> bool:
        """Look once, at state at most a minute old, and take the next step of repairs due.

        Returns False: the next look is not at once.
        """
        seen, now_seconds = self._seen[group], clock()
        # The delays in seconds, by class.
        after = {one.name: one.repair_after_seconds for one in self._classes()}
        degraded = {str(one.id): one for one in self._degraded(group, after)}
        lacking = {(key, frozenset(one.missing_disks)) for key, one in degraded.items()}
        seen.since = {one: seen.since.get(one, now_seconds) for one in lacking}
        seen.due = {key: at for key, at in seen.due.items() if key in degraded}
        seen.logged = {key: text for key, text in seen.logged.items() if key in degraded}
        for (key, _), since_seconds in sorted(seen.since.items(), key=lambda one: one[1]):
            wait_seconds = after[degraded[key].own_tags[tag.CLASS]]
            is_late = now_seconds - since_seconds >= wait_seconds
            if is_late and seen.due.get(key, now_seconds) <= now_seconds:
                self._repair(key, seen)
                # Counted from the end of the attempt, which may have taken long.
                seen.due[key] = clock() + _RETRY_SECONDS
        return False

    def _degraded(self, group: str, classes: Collection[str]) -> Iterator[Volume]:
        """The volumes of these classes in a group that lack a disk; none if no group answers."""
        try:
            seen = self._reports.seen(MONITOR_AGE_SECONDS)
        except (errors.AgentError, mount_errors.CommandError, OSError):
            return
        for one in seen.volumes():
            is_own = one.group.name == group and one.own_tags.get(tag.CLASS, "") in classes
            # By lvm2's report: the tag of one may be lost, which keeps no other.
            is_raid = "raid" in one.group.volume(one.name).layout
            if is_own and one.is_listed and is_raid and one.missing_disks:
                yield one

    def _repair(self, volume_id: str, seen: _Seen) -> None:
        try:
            with command.stall_limit(_PATIENCE_SECONDS):
                message = self._repairer.repair(volume_id).message
        except Exception as error:
            # The next volume may well be repaired.
            is_known = isinstance(error, errors.AgentError | mount_errors.CommandError)
            message = f"it is not repaired yet: {error if is_known else repr(error)}"
        if seen.logged.get(volume_id) != message:
            _log.warning("volume %s has lacked a disk for long: %s", volume_id, message)
        seen.logged[volume_id] = message
