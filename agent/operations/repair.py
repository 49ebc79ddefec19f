"""Repair RAID volumes and thin pools: on request, and automatically after a delay.

Each call reads the volume's state, takes the next step, and reports the progress. The kernel
rebuilds images in the background, so repeating the call completes the repair, also after a crash.
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
from agent.work.group_worker import PeriodicJobs
from lvm import groups, layout, report, thin, volumes
from lvm.devicemapper import Raid
from lvm.room import Room
from mount import command
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Progress of a repair: whether it is done, and a message about its last or next step."""

    done: bool
    message: str


def rebuilding(activator: Activator, group: report.Group) -> str:
    """Return the RAID volumes of a volume group that are not in sync, with percentages, as a text.

    The result is empty if all active RAID volumes are in sync.
    """
    entries = []
    for logical in sorted(records.all_logical_volumes(group), key=attrgetter("name")):
        is_raid = "raid" in logical.layout
        status = _raid(activator, group.name, logical.name) if is_raid else None
        if status is not None and status.is_syncing:
            entries.append(f"{logical.name} {status.synced_percent:.0f} %")
    return ", ".join(entries)


def _raid(activator: Activator, group: str, name: str) -> Raid | None:
    """Return the kernel's status of an active RAID volume, or None; runs no command."""
    return next(
        (target for target in activator.status(group, name) if isinstance(target, Raid)), None
    )


class Repairer:
    """Repairs volumes and thin pools.

    `freed` is called with the name of a volume group in which lost RAID images were replaced, whose
    extents must be zeroed.
    """

    def __init__(self, context: Context, *, freed: Callable[[str], object]) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._lvm = context.volume_groups.lvm
        self._allocators = context.allocators
        self._policy, self._freed = context.erase_policy, freed

    def repair(
        self, volume_id: str, *, pool_metadata: bool = False, differing_images: bool = False
    ) -> Progress:
        """Take the next step of the repair of a volume, or of a thin volume's pool.

        `pool_metadata` confirms that the damaged metadata of a thin pool may be rewritten, and
        `differing_images` that images of a RAID that differ may be overwritten. Runs four commands
        at most, and for a thin pool one more for each active volume in it. Raises NotRepairable for
        data that were on missing disks alone and for damaged pool metadata without `pool_metadata`,
        ImagesDiffer for images that differ without `differing_images`, NoRoom if no disk has room
        for a new image, and VolumeInUse if a volume of the damaged pool is in use.
        """
        with self._volume_groups.hold(group := ids.group_of(volume_id)):
            volume = self._mender.mended_volume(volume_id, Call.MANAGE)
            logical = volume.group.volume(volume.name)
            if "raid" in logical.layout and not logical.pool:
                if any(volume.group.lost_images(logical)) and volume.group.survives(logical):
                    self._require_room(volume.group, logical)
                disks = candidates(volume.group, logical)
                return self.next_step(
                    volume.group, volume.name, disks, differing_images=differing_images
                )
            path = f"{group}/{logical.pool or volume.name}"
            if missing_disks := ", ".join(volume.missing_disks):
                lost_text = "its volumes" if logical.pool else "the volume"
                raise errors.NotRepairable(
                    path,
                    f"a part of it was on the missing disk {missing_disks} alone; attach that"
                    f" again, or restore {lost_text} from a backup",
                )
            if logical.pool:
                return self._repair_pool(volume.group, logical.pool, is_confirmed=pool_metadata)
            return Progress(True, f"{path} is whole")

    def next_step(
        self, group: report.Group, name: str, disks: list[str], *, differing_images: bool = False
    ) -> Progress:
        """Take the next step of a RAID volume's repair; new images are created on `disks`.

        Call the method with the group's lock held and a report that was read under that lock.
        Raises NotRepairable if the remaining images do not have all data, and ImagesDiffer if
        images differ and `differing_images` does not say that they may be overwritten.
        """
        logical, path, lvm = group.volume(name), f"{group.name}/{name}", self._lvm(group.name)
        lost_images = sum(group.lost_images(logical))
        if lost_images and not group.survives(logical):
            why = (
                f"missing disks had {lost_images} of its images, and data are on none of the others"
            )
            raise errors.NotRepairable(path, why)
        if lost_images:
            self._activator.ensure_active(group.name, name)
        # Read the kernel's status of the RAID, because lvm2's report does not show whether the RAID
        # was refreshed: a refresh leaves no trace in lvm2's metadata.
        status = _raid(self._activator, group.name, name)
        if status is not None and status.is_syncing:
            # Wait for the rebuild: lvm2 replaces no image meanwhile.
            return Progress(False, f"{path} is rebuilt: {status.synced_percent:.0f} %")
        if lost_images:
            if self._policy.erases_any([logical]):
                # Mark the extents of the lost RAID images for zeroing: these extents become free
                # with their data, and lvm2 accepts a lost disk again when the disk is attached. All
                # missing disks are marked, so that the mark is the same by any report.
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
            if not differing_images:
                raise errors.ImagesDiffer(path, status.mismatches)
            groups.make_alike(lvm, group.name, name)
            return Progress(False, f"{path} has copies that differ; they are synchronised now")
        return Progress(True, f"{path} is whole")

    def _require_room(self, group: report.Group, logical: report.LogicalVolume) -> None:
        """Raise NoRoom unless each lost image has a disk with room for a new one.

        Extents that are promised to thin pools do not count as room. The reserve of device classes
        does count: a volume is not to be lost for the sake of a reserve.
        """
        extent = group.extent_size_bytes
        lost_images, image_extents = (
            sum(group.lost_images(logical)),
            layout.image_extents(logical, extent),
        )
        room = Room(group, self._allocators.promised_extents(group)).for_overwriting
        images = min(len(candidates(group, logical)), room.available_extents // image_extents)
        if images < lost_images:
            purpose = (
                "on disks that have no image of the volume yet, for its lost images (add one:"
                " `carver group replace-disk`)"
            )
            raise errors.NoRoom(
                group.name,
                lost_images * image_extents * extent,
                images * image_extents * extent,
                purpose,
            )

    def _repair_pool(self, group: report.Group, pool: str, *, is_confirmed: bool) -> Progress:
        """Have lvm2 rewrite the damaged metadata of a thin pool whose volumes are not in use.

        The volumes and the pool are deactivated first. An undamaged pool is only activated. Raises
        VolumeInUse, and NotRepairable unless `is_confirmed`, or if the pool is still damaged
        afterwards.
        """
        path, lvm = f"{group.name}/{pool}", self._lvm(group.name)
        if (why := self._damage(group, pool)) == "":
            return Progress(True, f"the thin pool {path} is whole")
        members = [logical.name for logical in group.in_pool(pool)]
        if not is_confirmed:
            raise errors.NotRepairable(
                path,
                f"{why}. Back up what can be read, stop the workloads of {', '.join(members)}, and"
                " call again with `--pool-metadata`: the metadata are written anew as far as they"
                " can be read",
            )
        state = self._reports.fresh(group.name)
        for volume in state.volumes():
            if volume.group.name == group.name and volume.name in members:
                users.require_unused(self._kernel, self._activator, volume)
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
        """Return what is wrong with a thin pool's metadata; empty if nothing.

        An inactive pool is activated. The kernel reports the damage, or lvm2 when it activates the
        pool.
        """
        if not self._activator.is_active(group.name, pool):
            try:
                volumes.activate(self._lvm(group.name), group.name, pool)
            except mount_errors.OutcomeUnknown:
                raise
            except mount_errors.CommandFailed as error:
                # Report the damage that lvm2 found: at activation it runs thin_check(8) on the
                # metadata.
                return f"it cannot be activated: {error}"
        status = thin.status_of(self._activator.status(group.name, pool))
        if status is None:
            return ""
        if status.mode in ("rw", "out_of_data_space") and not status.needs_check:
            return ""
        return f"the kernel reports {status.mode}{', needs_check' * status.needs_check}"


def candidates(group: report.Group, logical: report.LogicalVolume) -> list[str]:
    """Return the disks on which new images of a RAID volume can be created.

    Each of them has room for an image, and no part of the volume.
    """
    image_extents = layout.image_extents(logical, group.extent_size_bytes)
    return [disk.name for disk in Room(group).for_images(logical, image_extents)]


# Interval, in seconds, of checks for volumes to repair.
_LOOK_SECONDS = 30.0
# Time between the end of an attempt to repair a volume and the next attempt, in seconds.
_RETRY_SECONDS = 300.0
# Time limit, in seconds, for which the commands of a step of an automatic repair may make no
# progress.
_PATIENCE_SECONDS = 60.0
# Log message of a failed check for volumes to repair.
_FAILURE = "volume group %s: cannot look for volumes to repair: %s"


@dataclass
class _DegradedVolumes:
    """Notes about the volumes of a volume group that lacked a disk at the last check.

    `logged` has the last message that was logged about each volume.
    """

    # Times (monotonic, seconds): `since` has, by volume id and missing disks, when a volume was
    # first seen without these disks; `due_seconds` has, by volume id, when the next attempt to
    # repair the volume is due.
    since: dict[tuple[str, frozenset[str]], float] = field(default_factory=dict)
    due_seconds: dict[str, float] = field(default_factory=dict)
    logged: dict[str, str] = field(default_factory=dict)


class AutoRepair:
    """Repairs RAID volumes that have lacked a disk for longer than their device class allows.

    These are the volumes of classes with `repair = "auto"`.
    """

    def __init__(self, context: Context, repairer: Repairer) -> None:
        self._reports = context.reports
        self._repairer = repairer
        self._configuration = context.configuration
        # Degraded volumes of each volume group at the last check, by the group's name.
        self._seen: defaultdict[str, _DegradedVolumes] = defaultdict(_DegradedVolumes)
        self.scans = PeriodicJobs(
            context.workers, "repair", self._groups, self.check_group, _LOOK_SECONDS, _FAILURE
        )

    def _classes(self) -> list[DeviceClass]:
        return [
            device_class
            for device_class in self._configuration.now.classes
            if device_class.repair == AUTO
        ]

    def _groups(self) -> list[str]:
        return sorted({device_class.group for device_class in self._classes()})

    def step(self, now_seconds: float) -> None:
        """Check each volume group once for volumes to repair; tests call it.

        `now_seconds` (monotonic) is taken as the present time.
        """
        for group in self._groups():
            self.check_group(group, lambda: now_seconds)

    def check_group(self, group: str, clock: Callable[[], float] = time.monotonic) -> bool:
        """Check a volume group for degraded volumes, and take the next step of each repair due.

        The state of the group is at most a minute old. Returns False, so that the next check runs
        after the usual interval.
        """
        degraded_state, now_seconds = self._seen[group], clock()
        # Delays before the automatic repair of a volume, in seconds, by the name of its device
        # class.
        delays = {
            device_class.name: device_class.repair_after_seconds for device_class in self._classes()
        }
        degraded = {str(volume.id): volume for volume in self._degraded(group, delays)}
        lacking = {(key, frozenset(volume.missing_disks)) for key, volume in degraded.items()}
        degraded_state.since = {key: degraded_state.since.get(key, now_seconds) for key in lacking}
        degraded_state.due_seconds = {
            key: due_seconds
            for key, due_seconds in degraded_state.due_seconds.items()
            if key in degraded
        }
        degraded_state.logged = {
            key: text for key, text in degraded_state.logged.items() if key in degraded
        }
        for (key, _), since_seconds in sorted(
            degraded_state.since.items(), key=lambda item: item[1]
        ):
            wait_seconds = delays[degraded[key].own_tags[tag.CLASS]]
            is_late = now_seconds - since_seconds >= wait_seconds
            if is_late and degraded_state.due_seconds.get(key, now_seconds) <= now_seconds:
                self._repair(key, degraded_state)
                # Count the time until the next attempt to repair the volume from the end of this
                # attempt, which may have taken long.
                degraded_state.due_seconds[key] = clock() + _RETRY_SECONDS
        return False

    def _degraded(self, group: str, classes: Collection[str]) -> Iterator[Volume]:
        """Yield the RAID volumes of these device classes, in a volume group, that lack a disk.

        Yields nothing if no volume group answers.
        """
        try:
            state = self._reports.seen(MONITOR_AGE_SECONDS)
        except (errors.AgentError, mount_errors.CommandError, OSError):
            return
        for volume in state.volumes():
            is_own = volume.group.name == group and volume.own_tags.get(tag.CLASS, "") in classes
            # Take the layout from lvm2's report: a volume whose layout tag is lost must not stop
            # the check of the other volumes.
            is_raid = "raid" in volume.group.volume(volume.name).layout
            if is_own and volume.is_listed and is_raid and volume.missing_disks:
                yield volume

    def _repair(self, volume_id: str, degraded_state: _DegradedVolumes) -> None:
        try:
            with command.stall_limit(_PATIENCE_SECONDS):
                message = self._repairer.repair(volume_id).message
        except Exception as error:
            # Log the error and go on, as the next volume may well be repaired.
            is_known = isinstance(error, errors.AgentError | mount_errors.CommandError)
            message = f"it is not repaired yet: {error if is_known else repr(error)}"
        if degraded_state.logged.get(volume_id) != message:
            _log.warning("volume %s has lacked a disk for long: %s", volume_id, message)
        degraded_state.logged[volume_id] = message
