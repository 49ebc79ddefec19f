"""Rebuild RAID volumes and pools: on request, and unasked after a while."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from agent.core import errors, ids, tag, users
from agent.core.allocation import Allocators
from agent.core.background import PeriodicTask
from agent.core.classes import AUTO
from agent.core.context import Context
from agent.core.inventory import MONITOR_AGE_SECONDS, Inventory
from agent.core.records import Volume
from agent.operations.erase import ErasePolicy, mark_for_erase
from lvm import groups, report, thin, volumes
from lvm.devicemapper import Raid
from mount import command
from mount import errors as mount_errors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Whether all is done, and what was done, or is waited for."""

    done: bool
    message: str


def rebuilding(known: Inventory, group: report.Group) -> str:
    """Which RAID volumes of a group are not in sync, and how far that is; empty where all are."""
    told = []
    for name, logical in sorted(group.volumes.items()):
        status = raid_of(known, group.name, name) if "raid" in logical.layout else None
        if status is not None and "a" in status.health:
            told.append(f"{name} {status.synced_percent:.0f} %")
    return ", ".join(told)


def raid_of(known: Inventory, group: str, name: str) -> Raid | None:
    """What device-mapper says of an active RAID volume; no command."""
    told = known.status(group, name)
    return next((one for one in told if isinstance(one, Raid)), None)


class Repairer:
    """Repairs volumes."""

    def __init__(self, context: Context, *, freed: Callable[[str], object]) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._inventory = context.inventory
        self._allocators = Allocators(context.config.classes, context.inventory)
        self._policy, self._freed = ErasePolicy(context), freed

    def repair(self, volume_id: str, *, pool_metadata: bool = False) -> Progress:
        """Go on with the repair of a volume; of a thin one, of its pool, if that is said.

        Four commands at most; those of a pool are as many more as it has volumes in use of it.
        Raises NotRepairable, NoRoom, VolumeInUse.
        """
        with self._volume_groups.hold(group := ids.group_of(volume_id)):
            volume = self._inventory.usable(self._inventory.state(group, resume=True), volume_id)
            logical = volume.group.volume(volume.name)
            if logical.pool:
                return self._repair_pool(volume, logical.pool, told=pool_metadata)
            if "raid" not in logical.layout:
                return self._without_copies(volume)
            if any(volume.group.lost_images(logical)) and volume.group.survives(logical):
                self._require_room(volume, logical)
            return self.mend(volume.group, volume.name, self._candidates(volume, logical))

    def mend(self, group: report.Group, name: str, disks: list[str]) -> Progress:
        """Go on with the repair of a RAID volume, whose new images are made on these disks.

        To be called with the group held, and a report that was read within.
        """
        logical, path = group.volume(name), f"{group.name}/{name}"
        lvm = self._volume_groups.lvm(group.name)
        lost = sum(group.lost_images(logical))
        if lost and not group.survives(logical):
            why = f"{lost} of its images are on missing disks, and data are on none of the others"
            raise errors.NotRepairable(path, why)
        if lost:
            self._inventory.ensure_active(group.name, name)
        # The kernel's word, not lvm2's of it: what a refresh mends leaves no trace in the metadata,
        # so that the report is as it was.
        status = raid_of(self._inventory, group.name, name)
        if status is not None and "a" in status.health:
            # lvm2 replaces no image meanwhile, and neither is there anything to do but wait.
            return Progress(False, f"{path} is rebuilt: {status.synced_percent:.0f} %")
        if lost:
            if self._policy.erases_any([logical]):
                # What the old images hold is on nobody's extents from then on, and lvm2 takes such
                # a disk as whole when it is back. All that are missing: the same by any report.
                gone = {disk.uuid for disk in group.disks if disk.missing}
                mark_for_erase(lvm, group, gone)
            groups.replace_images(lvm, group.name, name, disks)
            self._freed(group.name)
            return Progress(False, f"{path} is rebuilt on {', '.join(disks)}")
        if status is not None and "D" in status.health:
            volumes.refresh(lvm, group.name, name)
            return Progress(
                False, f"{path} has a RAID image that failed for a while and is refreshed"
            )
        if status is not None and status.action == "repair":
            return Progress(False, f"{path} has its copies made alike")
        if status is not None and status.mismatches:
            groups.make_alike(lvm, group.name, name)
            return Progress(False, f"{path} has copies that differ, which are made alike")
        return Progress(True, f"{path} is whole")

    def _candidates(self, volume: Volume, logical: report.LogicalVolume) -> list[str]:
        """The disks that new images may lie on: each has room, and none of it."""
        return [
            disk.name
            for disk in volume.group.disks
            if disk.uuid not in logical.disks and disk.image_extents >= _image_extents(volume)
        ]

    def _require_room(self, volume: Volume, logical: report.LogicalVolume) -> None:
        """Raise NoRoom where not every lost image has a disk, or pools would lack it."""
        group, extent = volume.group, volume.group.extent_size_bytes
        lost, each = sum(group.lost_images(logical)), _image_extents(volume)
        free = sum(disk.image_extents for disk in group.disks)
        free -= self._allocators.promised_extents(group)
        room = min(len(self._candidates(volume, logical)), max(0, free) // each)
        if room < lost:
            raise errors.NoRoom(
                group.name,
                *(lost * each * extent, room * each * extent),
                "on disks that have no image of the volume yet, for its lost images (add one:"
                " `carver group replace-disk`)",
            )

    def _without_copies(self, volume: Volume) -> Progress:
        path = f"{volume.group.name}/{volume.name}"
        if gone := volume.missing_disks:
            raise errors.NotRepairable(
                path,
                f"a part of it was on the missing disk {', '.join(gone)} alone; attach that again,"
                " or restore the volume from a backup",
            )
        return Progress(True, f"{path} is whole")

    def _repair_pool(self, volume: Volume, pool: str, *, told: bool) -> Progress:
        """Have the metadata of a pool written anew, once nothing of it is in use."""
        group, path = volume.group, f"{volume.group.name}/{pool}"
        if gone := volume.missing_disks:
            raise errors.NotRepairable(
                path,
                f"a part of it was on the missing disk {', '.join(gone)} alone; attach that again,"
                " or restore its volumes from a backup",
            )
        if (why := self._damage(group, pool)) == "":
            return Progress(True, f"the thin pool {path} is whole")
        members = thin.members(group, pool)
        if not told:
            held = ", ".join(one.name for one in members)
            raise errors.NotRepairable(
                path,
                f"{why}. Have a backup of what can be read, stop what uses {held}, and say"
                " `--pool-metadata`: the metadata are written anew as far as they can be read",
            )
        lvm = self._volume_groups.lvm(group.name)
        known = self._inventory.state(group.name)
        for one in self._inventory.present(known):
            if one.group.name == group.name and one.name in {member.name for member in members}:
                users.require_unused(self._kernel, self._inventory, one)
        for member in members:
            if self._inventory.is_active(group.name, member.name):
                volumes.deactivate(lvm, group.name, member.name)
        if self._inventory.is_active(group.name, pool):
            volumes.deactivate(lvm, group.name, pool)
        groups.repair_pool(lvm, group.name, pool)
        if why := self._damage(group, pool):
            raise errors.NotRepairable(path, f"after the repair, {why}; see `dmesg`")
        return Progress(
            True,
            f"the metadata of {path} are written anew; the old ones are {path}_meta0, to be removed"
            " by `lvremove` once all volumes were looked at",
        )

    def _damage(self, group: report.Group, pool: str) -> str:
        """What is wrong with a pool's metadata: the kernel says so, or it cannot be activated."""
        if not self._inventory.is_active(group.name, pool):
            try:
                volumes.activate(self._volume_groups.lvm(group.name), group.name, pool)
            except mount_errors.OutcomeUnknown:
                raise
            except mount_errors.CommandFailed as error:
                # lvm2 has thin_check(8) look at them before that.
                return f"it cannot be activated: {error}"
        status = thin.status_of(self._inventory.status(group.name, pool))
        if status is None or (
            status.mode in ("rw", "out_of_data_space") and not status.needs_check
        ):
            return ""
        return f"the kernel says of it {status.mode}{', needs_check' * status.needs_check}"


def _image_extents(volume: Volume) -> int:
    """What an image of a RAID takes on its disk, with its metadata."""
    shape = volume.layout
    data = volume.size_bytes // volume.group.extent_size_bytes // shape.stripes
    return data + shape.metadata_extents


_LOOK_SECONDS = 30.0
_RETRY_SECONDS = 300.0
_PATIENCE_SECONDS = 60.0
# A service that ends waits so long for what is under way.
_ENDING_SECONDS = 10.0
_FAILURE = "volume group %s: whether a volume is to be repaired is not known: %s"


@dataclass
class _OfGroup:
    """What was seen of a group's volumes, by their ids."""

    # Since when volumes lack these disks, and when one is tried again (monotonic, seconds).
    since: dict[tuple[str, frozenset[str]], float] = field(default_factory=dict)
    later: dict[str, float] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)


class AutoRepair:
    """Begins the repair of what has been degraded for long enough."""

    def __init__(self, context: Context, repairer: Repairer) -> None:
        self._inventory = context.inventory
        self._repairer = repairer
        # How long a volume of a class waits, in seconds.
        self._after: Mapping[str, float] = {
            one.name: one.repair_after_seconds
            for one in context.config.classes
            if one.repair == AUTO
        }
        groups = {one.group for one in context.config.classes if one.repair == AUTO}
        self._seen = {one: _OfGroup() for one in sorted(groups)}
        self.rounds = PeriodicTask("repair", tuple(self._seen), self.look, _FAILURE)

    @property
    def is_alive(self) -> bool:
        """Whether it looks."""
        return self.rounds.is_alive

    def start(self) -> None:
        """Look from now on, where a class asks for it."""
        self.rounds.start(_LOOK_SECONDS)

    def stop(self) -> None:
        """Begin no more; what was begun goes on in the kernel."""
        self.rounds.stop()
        self.rounds.join(_ENDING_SECONDS)

    def step(self, now_seconds: float) -> None:
        """Look once at each group, as if it were then."""
        for one in self._seen:
            self.look(one, lambda: now_seconds)

    def look(self, group: str, clock: Callable[[], float] = time.monotonic) -> bool:
        """Look once, at what was seen at most a minute ago, and begin the repairs that are due.

        False: the next look is not at once.
        """
        seen, now_seconds = self._seen[group], clock()
        degraded = {str(one.id): one for one in self._degraded(group)}
        lacking = {(key, frozenset(one.missing_disks)) for key, one in degraded.items()}
        seen.since = {one: seen.since.get(one, now_seconds) for one in lacking}
        for kept in (seen.later, seen.told):
            for key in kept.keys() - degraded.keys():
                kept.pop(key)
        for (key, _), since_seconds in sorted(seen.since.items(), key=lambda one: one[1]):
            wait_seconds = self._after[degraded[key].own_tags[tag.CLASS]]
            is_due = now_seconds - since_seconds >= wait_seconds
            if is_due and seen.later.get(key, now_seconds) <= now_seconds:
                self._repair(key, seen)
                # From the end of the attempt, which may have taken long.
                seen.later[key] = clock() + _RETRY_SECONDS
        return False

    def _degraded(self, group: str) -> Iterator[Volume]:
        """A group's volumes of these classes that lack a disk; none where no group answers."""
        try:
            known = self._inventory.state(max_age=MONITOR_AGE_SECONDS)
        except (errors.AgentError, mount_errors.CommandError, OSError):
            return
        for volume in self._inventory.present(known):
            if volume.group.name != group or volume.own_tags.get(tag.CLASS, "") not in self._after:
                continue
            if volume.is_listed and volume.layout.is_raid and volume.missing_disks:
                yield volume

    def _repair(self, volume_id: str, seen: _OfGroup) -> None:
        try:
            with command.time_limit(_PATIENCE_SECONDS):
                told = self._repairer.repair(volume_id).message
        except (errors.AgentError, mount_errors.CommandError) as error:
            told = f"it is not repaired yet: {error}"
        except Exception as error:
            # The next volume may well be repaired.
            told = f"it is not repaired yet: {error!r}"
        if seen.told.get(volume_id) != told:
            _log.warning("volume %s has lacked a disk for long: %s", volume_id, told)
        seen.told[volume_id] = told
