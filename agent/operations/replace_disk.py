"""Replace a disk of a volume group: add the new disk, move or rebuild data, remove the old disk.

The extents of a disk that is present are moved online. The RAID images of a missing disk are
rebuilt from the other images. If any data would be lost, nothing is begun, and the error names the
volumes.

Each call reads the group, takes the next step, and reports the progress. The steps are:

1. Add the new disk to the group.
2. Stop allocation on the old disk, if it is present.
3. Move the extents of the old disk, or rebuild its RAID images, on the new disk.
4. Remove the old disk from the group.
5. Wait until all volumes are in sync.

Repeating the call completes a replacement that a crash interrupted, and a call after the last step
reports that the replacement is done. The kernel does the long work in the background.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter

from agent.core import errors, tag
from agent.operations import erase_deleted, modify
from agent.operations.repair import Progress, Repairer, candidates, rebuilding
from agent.volumes import records
from agent.volumes.allocation import is_own_pool
from agent.volumes.context import Context
from agent.work.background import Attempts, Probes, reasons
from lvm import groups
from lvm import lvm_errors as lvm_errors
from lvm.devicemapper import Mirror
from lvm.labels import PhysicalLabel
from lvm.report import Group, PhysicalVolume
from mount import command, mounts
from mount import mount_errors as mount_errors
from mount.table import DeviceNumber

_log = logging.getLogger(__name__)

# Interval, in seconds, at which lvm2's process that watches a move is started again, as the process
# may have been killed.
_WATCH_SECONDS = 60.0
# Time limit, in seconds, of reading a disk that is to be added to a volume group; a healthy disk
# takes a moment.
_LOOK_SECONDS = 5.0


class Replacement:
    """Replaces disks of volume groups.

    `freed` is called with the name of a volume group in which extents were freed that must be
    zeroed.
    """

    def __init__(
        self, context: Context, repairer: Repairer, *, freed: Callable[[str], object]
    ) -> None:
        self._kernel = context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._volume_groups, self._lvm = context.volume_groups, context.volume_groups.lvm
        self._context, self._repairer = context, repairer
        self._policy, self._freed = context.erase_policy, freed
        self._looks: Probes[int] = Probes()
        self._numbers = itertools.count()
        # Time (monotonic, seconds) at which this process last started each disk's move or its
        # watcher, by the UUID of the old disk.
        self._watched: dict[str, float] = {}

    def replace(self, old_name: str, new_path: str) -> Progress:
        """Take the next step of replacing a disk, and return the progress.

        `old_name` is the path of a disk, or the UUID of a missing disk; `new_path` is a path.
        Raises NoSuchDisk if no group has the old disk, WouldBeLost if data are on the missing disk
        alone, DiskTooSmall or NotVacant for an unfit new disk, BadField for a new disk that Carver
        may not use, NotRepairable if another disk is missing, and the errors of repairing a volume.
        """
        name = self._group_of(old_name, new_path)
        with self._volume_groups.hold(name):
            group = self._look(name)
            old_disk, new_disk = self._find(group, old_name), self._find(group, new_path)
            if old_disk is None and new_disk is None:
                # Raise an error if neither the old nor the new disk is in the volume group any
                # more: both were removed after the group was found.
                raise _no_such_disk(old_name, [group])
            if old_disk is None:
                return self._finish_removed(group)
            if old_disk == new_disk:
                raise errors.BadField("new_disk", f"{new_path} is the disk that it is to replace")
            if old_disk.missing:
                _require_copies(group, old_disk)
            elif missing_uuids := ", ".join(group.missing_uuids):
                why = (
                    f"lvm2 moves nothing while the disk {missing_uuids} is missing; replace that"
                    " one first"
                )
                raise errors.NotRepairable(old_disk.name, why)
            if new_disk is None:
                self._add(group, old_disk, new_path)
                group = self._look(name)
                old_disk, new_disk = _by_uuid(group, old_disk.uuid), self._find(group, new_path)
            if new_disk is None:
                raise errors.NoSuchDisk(new_path, [disk.name for disk in group.disks], [])
            if old_disk.fast and not new_disk.fast:
                groups.mark_fast(self._lvm(name), [new_disk.name])
            if old_disk.missing:
                return self._rebuild(group, old_disk, new_disk)
            return self._move(group, old_disk, new_disk)

    def resume(self, *names: str) -> int:
        """Start lvm2's watcher of pvmove in the named volume groups, or in all if none is named.

        The earlier watcher ended with the service or with the node. Runs one command for each group
        that has moves, and returns the number of these groups.
        """
        moving_groups = [
            group for group in list(self._reports.fresh(*names).groups.values()) if group.moves
        ]
        with Attempts() as attempts:
            for group in moving_groups:
                with attempts.attempt():
                    groups.watch_moves(self._lvm(group.name))
        return len(moving_groups)

    def _group_of(self, old_name: str, new_path: str) -> str:
        """Return the name of the volume group that has the old disk, or else the new disk.

        Only the new disk is found if the old one was removed already. The cached state decides
        where possible, so that a group that does not answer delays no other group; the caller reads
        the group again. If no group has either disk, raises NoSuchDisk, or the error of a group
        that cannot be read. Raises GroupBusy if the old disk may be in a group that was never read.
        """
        known_groups = list(self._reports.hint().groups.values())
        if (group := self._having(known_groups, old_name)) is not None:
            return group.name
        if (group := self._having(known_groups, new_path)) is not None:
            all_groups = self._reports.every_group(self._reports.fresh(group.name))
            all_groups.require_read()
            known_groups = list(all_groups.groups.values())
        else:
            known_groups = list(self._reports.fresh().groups.values())
        group = self._having(known_groups, old_name) or self._having(known_groups, new_path)
        if group is None:
            raise _no_such_disk(old_name, known_groups)
        return group.name

    def _having(self, groups: Iterable[Group], disk: str) -> Group | None:
        return next((group for group in groups if self._find(group, disk) is not None), None)

    def _look(self, name: str) -> Group:
        return self._reports.group(self._mender.mend(name), name)

    def _find(self, group: Group, disk: str) -> PhysicalVolume | None:
        """Return the disk of a volume group that has a UUID or a path; None if there is none.

        Any path of the disk's device will do. A missing disk is found by its UUID only.
        """
        if (
            by_uuid := next(
                (
                    physical_volume
                    for physical_volume in group.disks
                    if physical_volume.uuid == disk
                ),
                None,
            )
        ) is not None:
            return by_uuid
        number = self._number(disk)
        for physical_volume in group.disks:
            is_same = (
                physical_volume.name == disk
                if number is None
                else self._number(physical_volume.name) == number
            )
            if is_same and not physical_volume.missing:
                return physical_volume
        return None

    def _number(self, path: str) -> DeviceNumber | None:
        try:
            return self._kernel.device_number(path)
        except OSError:
            return None

    def _add(self, group: Group, old_disk: PhysicalVolume, new_path: str) -> None:
        """Add a vacant disk to a volume group.

        Raises BadField for a disk that Carver may not use, NotVacant for a disk that is in use, and
        DiskTooSmall if the extents of `old_disk` do not fit.
        """
        if not self._volume_groups.allows(new_path):
            why = "is not among the configured `devices`, or a filter of lvm.conf rejects it"
            raise errors.BadField("new_disk", f"{new_path} {why}")
        path = self._kernel.real_path(new_path)
        label = self._volume_groups.scan().get(path)
        if isinstance(label, PhysicalLabel) and (label.is_used or label.group is not None):
            name = label.group.name if label.group is not None else "another group"
            raise mount_errors.NotVacant(new_path, f"is a disk of {name}", "name another")
        size_bytes = self._vacant_bytes(new_path, is_labelled=isinstance(label, PhysicalLabel))
        self._require_equal_blocks(group, new_path)
        extent = group.extent_size_bytes
        # Choose the largest metadata area of the new disk that leaves room for the extents of the
        # old disk, so that the group's metadata may grow.
        for area_bytes in (groups.widest_area_bytes(group), group.metadata_bytes):
            free_extents = max(0, size_bytes - groups.LABEL_BYTES - area_bytes) // extent
            if free_extents >= old_disk.allocated_extents:
                break
        else:
            raise errors.DiskTooSmall(
                new_path, free_extents * extent, old_disk.allocated_extents * extent
            )
        lvm = self._volume_groups.lvm_with(group.name, path)
        groups.extend(lvm, group.name, path, area_bytes)
        self._volume_groups.outdate()

    def _vacant_bytes(self, new_path: str, *, is_labelled: bool) -> int:
        """Return the size, in bytes, of a vacant disk.

        Reading the disk has a time limit, because the group's lock is held. Raises NotVacant,
        ProbeFailed.
        """

        def look() -> int:
            mounts.require_unused(self._kernel, new_path)
            if not is_labelled:
                mounts.require_blank(self._kernel, new_path)
            return self._kernel.device_size_bytes(new_path)

        deadline = time.monotonic() + command.patience_seconds(_LOOK_SECONDS, 0.5)
        # Read the disk anew, by a probe with a new key: the result of an earlier call's probe may
        # be outdated.
        result = self._looks.probe(f"{new_path} {next(self._numbers)}", look, deadline, new_path)
        if result.value is None or result.hanging_seconds:
            problem = f"has not answered for {result.hanging_seconds:.0f} s"
            raise mount_errors.NotVacant(new_path, problem, "see `dmesg`, and name another")
        return result.value

    def _require_equal_blocks(self, group: Group, new_path: str) -> None:
        """Raise NotVacant if a new disk's logical block size differs from the volume group's.

        The size is 512 bytes or 4 KiB. lvm2 refuses such a disk, too, but only after it has
        labelled the disk.
        """
        group_sizes = set()
        for disk in group.disks:
            # Skip a disk that is missing, or that was just removed.
            with suppress(OSError):
                group_sizes.add(self._kernel.logical_block_bytes(disk.name))
        size = self._kernel.logical_block_bytes(new_path)
        if group_sizes and size not in group_sizes:
            sizes = " and ".join(str(block_bytes) for block_bytes in sorted(group_sizes))
            problem = f"has logical blocks of {size} bytes, and {group.name}'s disks have {sizes}"
            raise mount_errors.NotVacant(new_path, problem, "name a disk with blocks like theirs")

    def _move(self, group: Group, old_disk: PhysicalVolume, new_disk: PhysicalVolume) -> Progress:
        """Stop allocation on a present disk, move its extents, and remove it from the volume group.

        A move frees extents with users' data: on the old disk, and on the new disk if the move is
        aborted. So both disks are marked before the move, and nothing is allocated from their free
        extents until these are zeroed. The old disk's free extents are not zeroed while allocation
        on it is stopped; if the replacement is abandoned, they are zeroed. Returns the progress:
        the call that finds no extents left removes the disk.
        """
        lvm, pair = self._lvm(group.name), (old_disk.uuid, new_disk.uuid)
        filled = {key: value for key, value in group.own_tags.items() if key == tag.FILLED}
        is_first = old_disk.allocated_extents and not (group.moves or new_disk.unclean)
        will_have = old_disk.allocated_extents + new_disk.allocated_extents
        if old_disk.allocatable:
            groups.allow_allocation(lvm, old_disk.name, allowed=False)
        if old_disk.allocated_extents or not new_disk.allocatable:
            erases = self._policy.erases_any(records.all_logical_volumes(group))
            filled_tag = {tag.FILLED: _filled(pair, will_have)} if is_first else {}
            if erases and erase_deleted.mark_for_erase(
                lvm, group, set(pair), further_tags=filled_tag
            ):
                self._freed(group.name)
        if not new_disk.allocatable:
            # Allow allocation on the new disk: an earlier call stopped it in order to replace that
            # disk.
            groups.allow_allocation(lvm, new_disk.name, allowed=True)
        if old_disk.allocated_extents:
            if filled and not (group.moves or is_first):
                # Remove the tag `filled`, which says how full the new disk was to become: a move
                # was aborted, and may have left data on the new disk.
                groups.mark(lvm, group.name, old_tags=filled)
            elapsed_seconds = time.monotonic() - self._watched.get(old_disk.uuid, -_WATCH_SECONDS)
            if not group.moves or elapsed_seconds >= _WATCH_SECONDS:
                groups.move(lvm, old_disk.name, new_disk.name)
                self._watched[old_disk.uuid] = time.monotonic()
            statuses = [self._activator.status(group.name, name) for name in sorted(group.moves)]
            moves = [
                target for status in statuses for target in status if isinstance(target, Mirror)
            ]
            how_far = ", ".join(f"{mirror.synced_percent:.0f} %" for mirror in moves) or "begun"
            return Progress(False, f"{old_disk.name} is moved: {how_far}")
        if filled.get(tag.FILLED) == _filled(pair, new_disk.allocated_extents):
            # Remove the new disk from the erase marks: the move filled the disk as planned, so its
            # free extents are as clean as before.
            erase_deleted.unmark_disk(lvm, group, new_disk.uuid, filled)
        elif filled:
            groups.mark(lvm, group.name, old_tags=filled)
        groups.reduce(lvm, group.name, old_disk.name)
        self._volume_groups.outdate()
        return self._finish_removed(self._look(group.name))

    def _rebuild(
        self, group: Group, old_disk: PhysicalVolume, new_disk: PhysicalVolume
    ) -> Progress:
        """Take the next step of rebuilding a missing disk's RAID images; return the progress.

        When nothing is allocated on the missing disk any more, it is removed from the group, unless
        other missing disks still have extents.
        """
        lvm, steps = self._lvm(group.name), []
        erase_deleted.remove_partial_sweep(lvm, group)
        for logical in sorted(records.all_logical_volumes(group), key=attrgetter("name")):
            if "raid" in logical.layout and old_disk.uuid in logical.disks:
                steps.append(self._repair(group, logical.name, new_disk))
        if old_disk.uuid in group.spare_disks:
            groups.remove_spare(lvm, group.name)
        group = self._look(group.name)
        if _by_uuid(group, old_disk.uuid).allocated_extents:
            return Progress(False, "; ".join(steps) or "a repair is awaited")
        missing = [disk for disk in group.disks if disk.missing and disk.allocated_extents]
        if other_disks := ", ".join(disk.uuid for disk in missing):
            return Progress(
                False,
                f"nothing lies on {old_disk.uuid} any more; it is taken out with {other_disks},"
                " which are missing too: replace them",
            )
        groups.reduce_missing(lvm, group.name)
        self._volume_groups.outdate()
        return self._finish_removed(self._look(group.name))

    def _repair(self, group: Group, name: str, new_disk: PhysicalVolume) -> str:
        """Take the next step of a RAID volume's repair, and return a message about its progress.

        If several images are lost, lvm2 may rebuild any of them on the new disk, and a disk holds
        only one image of a volume.
        """
        image_disks, disks = group.volume(name).disks, [new_disk.name]
        if new_disk.uuid in image_disks:
            disks += candidates(group, group.volume(name))
        try:
            return self._repairer.next_step(group, name, disks).message
        except lvm_errors.NoSpace:
            if new_disk.uuid not in image_disks:
                raise
        return f"{group.name}/{name} lacks more than one disk: replace each, then this one again"

    def _finish_removed(self, group: Group) -> Progress:
        """Finish a replacement whose old disk is removed, and return the progress.

        The replacement is done when all volumes are in sync, so that another disk may be lost.
        """
        # Remove the volume group's erase marks within this call, if nothing is left to zero: if
        # another disk is lost before a later change of the group, that change would have lvm2 mark
        # the lost disk as missing for good.
        if not erase_deleted.unmark_if_erased(self._lvm(group.name), group):
            self._freed(group.name)
        # Limit RAID recovery to the present setting: a volume may be older than the setting, and
        # lvm2 could not change the volume while a disk was missing.
        try:
            modify.bound(self._context, group)
        except ExceptionGroup as error:
            # Only log the error: the disk is removed all the same, and the next start of Carver
            # sets the limits.
            _log.warning("RAID recovery in %s is not bounded yet: %s", group.name, reasons(error))
        if unsynced := rebuilding(self._activator, group):
            return Progress(False, f"volumes are rebuilt: {unsynced}")
        return Progress(True, f"{group.name} is whole")


def _filled(disk_uuids: tuple[str, str], extents: int) -> str:
    """Return the value of the tag `filled`: both disks' UUIDs, and the extents to be allocated."""
    return tag.BETWEEN.join((*disk_uuids, str(extents)))


def _no_such_disk(disk: str, own_groups: Sequence[Group]) -> errors.NoSuchDisk:
    present_disks = [disk.name for group in own_groups for disk in group.disks if not disk.missing]
    return errors.NoSuchDisk(
        disk, present_disks, [uuid for group in own_groups for uuid in group.missing_uuids]
    )


def _by_uuid(group: Group, uuid: str) -> PhysicalVolume:
    return next(disk for disk in group.disks if disk.uuid == uuid)


def _require_copies(group: Group, old_disk: PhysicalVolume) -> None:
    """Raise WouldBeLost for volumes that have data on a missing disk and nowhere else."""
    lost_names: list[str] = []
    waiting_names: list[str] = []
    for logical in sorted(records.all_logical_volumes(group), key=attrgetter("name")):
        name = logical.name
        holder, is_pool = group.volumes.get(logical.pool, logical), is_own_pool(logical)
        if old_disk.uuid not in holder.disks or group.survives(holder):
            continue
        # Skip a thin pool that has volumes, since these are counted themselves, and the logical
        # volume in which free extents are zeroed, which holds no data.
        if not (is_pool and group.in_pool(name)) and not erase_deleted.is_sweep(group, name):
            (waiting_names if is_pool or erase_deleted.is_deleted(logical) else lost_names).append(
                name
            )
    if lost_names or waiting_names:
        raise errors.WouldBeLost(old_disk.uuid, lost_names, waiting_names)
