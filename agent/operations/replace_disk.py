"""Replace a disk of a group: add the new one, move or rebuild what lies on the old one, remove it.

Data on a present disk is moved, online; of a lost disk, RAID images are rebuilt from the others. If
any data would be lost, nothing is begun, and the error names the volumes.

Each call looks, takes the next step, and reports how far the replacement is: new disk added, old
one closed, moved or rebuilt, old one removed, in sync. So repeating the call completes what a kill
interrupted, and one call more finds it done. The kernel does the long work in the background.
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

# How often lvm2's process that watches a move is started again: it may have been killed.
_WATCH_SECONDS = 60.0
# How long a new disk is read, which takes a moment.
_LOOK_SECONDS = 5.0


class Replacement:
    """Replaces disks; `freed` is called with a group in which extents were freed."""

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
        # When this process last started a move, or its watcher (monotonic, seconds).
        self._watched: dict[str, float] = {}

    def replace(self, old: str, new: str) -> Progress:
        """Take the next step. `old` is a path, or a missing disk's UUID; `new` is a path.

        Raises NoSuchDisk, WouldBeLost, DiskTooSmall, NotVacant, BadField, and what the repair of a
        volume raises.
        """
        name = self._group_of(old, new)
        with self._volume_groups.hold(name):
            group = self._look(name)
            leaving, coming = self._find(group, old), self._find(group, new)
            if leaving is None and coming is None:
                # They left it since it was found.
                raise _no_such_disk(old, [group])
            if leaving is None:
                return self._settled(group)
            if leaving == coming:
                raise errors.BadField("new_disk", f"{new} is the disk that it is to replace")
            if leaving.missing:
                _require_copies(group, leaving)
            elif gone := ", ".join(group.missing_uuids):
                why = f"lvm2 moves nothing while the disk {gone} is missing; replace that one first"
                raise errors.NotRepairable(leaving.name, why)
            if coming is None:
                self._add(group, leaving, new)
                group = self._look(name)
                leaving, coming = _by_uuid(group, leaving.uuid), self._find(group, new)
            if coming is None:
                raise errors.NoSuchDisk(new, [one.name for one in group.disks], [])
            if leaving.fast and not coming.fast:
                groups.mark_fast(self._lvm(name), [coming.name])
            if leaving.missing:
                return self._rebuild(group, leaving, coming)
            return self._move(group, leaving, coming)

    def resume(self, *names: str) -> int:
        """Have lvm2 watch the moves in these groups, or in all; returns how many groups have any.

        The earlier watcher ended with the service, or with the node. One command for each group.
        """
        left = [one for one in list(self._reports.fresh(*names).groups.values()) if one.moves]
        with Attempts() as attempts:
            for one in left:
                with attempts.one():
                    groups.watch_moves(self._lvm(one.name))
        return len(left)

    def _group_of(self, old: str, new: str) -> str:
        """The group that has the old disk, or, if that is removed already, the new one.

        By what was read last, so that a group that does not answer keeps no other from it; the
        caller reads the group that is found. Raises what `state` raises where none has either, and
        GroupBusy where the old disk may be in one that was never read.
        """
        own = list(self._reports.hint().groups.values())
        if (found := self._having(own, old)) is not None:
            return found.name
        if (found := self._having(own, new)) is not None:
            every = self._reports.everywhere(self._reports.fresh(found.name))
            every.require_read()
            own = list(every.groups.values())
        else:
            own = list(self._reports.fresh().groups.values())
        found = self._having(own, old) or self._having(own, new)
        if found is None:
            raise _no_such_disk(old, own)
        return found.name

    def _having(self, groups: Iterable[Group], disk: str) -> Group | None:
        return next((one for one in groups if self._find(one, disk) is not None), None)

    def _look(self, name: str) -> Group:
        return self._reports.group(self._mender.mend(name), name)

    def _find(self, group: Group, disk: str) -> PhysicalVolume | None:
        """A disk of the group, by its UUID or any path of its device."""
        if (by_uuid := next((one for one in group.disks if one.uuid == disk), None)) is not None:
            return by_uuid
        number = self._number(disk)
        for one in group.disks:
            is_same = one.name == disk if number is None else self._number(one.name) == number
            if is_same and not one.missing:
                return one
        return None

    def _number(self, path: str) -> DeviceNumber | None:
        try:
            return self._kernel.device_number(path)
        except OSError:
            return None

    def _add(self, group: Group, leaving: PhysicalVolume, new: str) -> None:
        """Add a vacant disk to the group."""
        if not self._volume_groups.allows(new):
            why = "is not among the configured `devices`, or a filter of lvm.conf rejects it"
            raise errors.BadField("new_disk", f"{new} {why}")
        path = self._kernel.real_path(new)
        label = self._volume_groups.scan().get(path)
        if isinstance(label, PhysicalLabel) and (label.is_used or label.group is not None):
            name = label.group.name if label.group is not None else "another group"
            raise mount_errors.NotVacant(new, f"is a disk of {name}", "name another")
        size_bytes = self._vacant_bytes(new, is_labelled=isinstance(label, PhysicalLabel))
        self._require_equal_blocks(group, new)
        extent = group.extent_size_bytes
        # The widest area, so that a disk with a small one bounds the group's text no more, if there
        # is room for it.
        for area_bytes in (groups.widest_area_bytes(group), group.metadata_bytes):
            room = max(0, size_bytes - groups.LABEL_BYTES - area_bytes) // extent
            if room >= leaving.allocated_extents:
                break
        else:
            raise errors.DiskTooSmall(new, room * extent, leaving.allocated_extents * extent)
        lvm = self._volume_groups.lvm_with(group.name, path)
        groups.extend(lvm, group.name, path, area_bytes)
        self._volume_groups.outdate()

    def _vacant_bytes(self, new: str, *, is_labelled: bool) -> int:
        """The size of a vacant disk, which is read for some seconds at most: the group is held.

        Raises NotVacant, ProbeFailed.
        """

        def look() -> int:
            mounts.require_unused(self._kernel, new)
            if not is_labelled:
                mounts.require_blank(self._kernel, new)
            return self._kernel.device_size_bytes(new)

        until = time.monotonic() + command.patience_seconds(_LOOK_SECONDS, 0.5)
        # A look of its own: what an earlier call saw may not be so any more.
        seen = self._looks.probe(f"{new} {next(self._numbers)}", look, until, new)
        if seen.value is None or seen.hanging_seconds:
            found = f"has not answered for {seen.hanging_seconds:.0f} s"
            raise mount_errors.NotVacant(new, found, "see `dmesg`, and name another")
        return seen.value

    def _require_equal_blocks(self, group: Group, new: str) -> None:
        """Raise NotVacant for a disk of 4 KiB blocks if the group's have 512 bytes, or vice versa.

        lvm2 refuses it too, but has labelled the disk by then.
        """
        own = set()
        for one in group.disks:
            with suppress(OSError):  # it is missing, or has just gone
                own.add(self._kernel.logical_block_bytes(one.name))
        size = self._kernel.logical_block_bytes(new)
        if own and size not in own:
            others = " and ".join(str(one) for one in sorted(own))
            found = f"has logical blocks of {size} bytes, and {group.name}'s disks have {others}"
            raise mount_errors.NotVacant(new, found, "name a disk with blocks like theirs")

    def _move(self, group: Group, leaving: PhysicalVolume, coming: PhysicalVolume) -> Progress:
        """Close a present disk, move its extents, and remove it from the group.

        A move frees extents with users' data: on the old disk, and on the new one if the move is
        aborted. So both are marked first, and nothing is allocated on their free extents. While the
        old one is closed they are not zeroed either; if the replacement is abandoned, they are.
        """
        lvm, pair = self._lvm(group.name), (leaving.uuid, coming.uuid)
        filled = {key: one for key, one in group.own_tags.items() if key == tag.FILLED}
        is_first = leaving.allocated_extents and not (group.moves or coming.unclean)
        will_have = leaving.allocated_extents + coming.allocated_extents
        if leaving.allocatable:
            groups.allow_allocation(lvm, leaving.name, allowed=False)
        if leaving.allocated_extents or not coming.allocatable:
            erases = self._policy.erases_any(records.every(group))
            also = {tag.FILLED: _filled(pair, will_have)} if is_first else {}
            if erases and erase_deleted.mark_for_erase(lvm, group, set(pair), also=also):
                self._freed(group.name)
        if not coming.allocatable:
            # An earlier call closed it, to replace it.
            groups.allow_allocation(lvm, coming.name, allowed=True)
        if leaving.allocated_extents:
            if filled and not (group.moves or is_first):
                # A move was aborted, and may have left data on the new disk.
                groups.mark(lvm, group.name, old=filled)
            since = time.monotonic() - self._watched.get(leaving.uuid, -_WATCH_SECONDS)
            if not group.moves or since >= _WATCH_SECONDS:
                groups.move(lvm, leaving.name, coming.name)
                self._watched[leaving.uuid] = time.monotonic()
            found = [self._activator.status(group.name, name) for name in sorted(group.moves)]
            moves = [one for each in found for one in each if isinstance(one, Mirror)]
            how_far = ", ".join(f"{one.synced_percent:.0f} %" for one in moves) or "begun"
            return Progress(False, f"{leaving.name} is moved: {how_far}")
        if filled.get(tag.FILLED) == _filled(pair, coming.allocated_extents):
            # What is free there is as clean as before the move.
            erase_deleted.unmark_disk(lvm, group, coming.uuid, filled)
        elif filled:
            groups.mark(lvm, group.name, old=filled)
        groups.reduce(lvm, group.name, leaving.name)
        self._volume_groups.outdate()
        return self._settled(self._look(group.name))

    def _rebuild(self, group: Group, leaving: PhysicalVolume, coming: PhysicalVolume) -> Progress:
        """Rebuild the RAID images of a lost disk, and remove it from the group."""
        lvm, steps = self._lvm(group.name), []
        erase_deleted.remove_partial_sweep(lvm, group)
        for one in sorted(records.every(group), key=attrgetter("name")):
            if "raid" in one.layout and leaving.uuid in one.disks:
                steps.append(self._repair(group, one.name, coming))
        if leaving.uuid in group.spare_disks:
            groups.remove_spare(lvm, group.name)
        group = self._look(group.name)
        if _by_uuid(group, leaving.uuid).allocated_extents:
            return Progress(False, "; ".join(steps) or "a repair is awaited")
        missing = [one for one in group.disks if one.missing and one.allocated_extents]
        if others := ", ".join(one.uuid for one in missing):
            return Progress(
                False,
                f"nothing lies on {leaving.uuid} any more; it is taken out with {others}, which"
                " are missing too: replace them",
            )
        groups.reduce_missing(lvm, group.name)
        self._volume_groups.outdate()
        return self._settled(self._look(group.name))

    def _repair(self, group: Group, name: str, coming: PhysicalVolume) -> str:
        """Take the next step of a RAID volume's repair; returns how far it is.

        Of several lost images lvm2 may rebuild any on the new disk, and a disk has one image only.
        """
        own, disks = group.volume(name).disks, [coming.name]
        if coming.uuid in own:
            disks += candidates(group, group.volume(name))
        try:
            return self._repairer.next_step(group, name, disks).message
        except lvm_errors.NoSpace:
            if coming.uuid not in own:
                raise
        return f"{group.name}/{name} lacks more than one disk: replace each, then this one again"

    def _settled(self, group: Group) -> Progress:
        """The old disk is removed; done when all volumes are in sync, so another may be lost."""
        # Within the call: a later change of the group might meet the loss of that other disk, and
        # have lvm2 mark it as missing for good.
        if not erase_deleted.unmark_if_erased(self._lvm(group.name), group):
            self._freed(group.name)
        # A volume may be from before the setting, and lvm2 could not change it till now.
        try:
            modify.bound(self._context, group)
        except ExceptionGroup as error:
            # The disk is out all the same, and the next start bounds them.
            _log.warning("RAID recovery in %s is not bounded yet: %s", group.name, reasons(error))
        if unsynced := rebuilding(self._activator, group):
            return Progress(False, f"volumes are rebuilt: {unsynced}")
        return Progress(True, f"{group.name} is whole")


def _filled(pair: tuple[str, str], extents: int) -> str:
    """The value of the tag FILLED."""
    return tag.BETWEEN.join((*pair, str(extents)))


def _no_such_disk(disk: str, own: Sequence[Group]) -> errors.NoSuchDisk:
    there = [one.name for group in own for one in group.disks if not one.missing]
    return errors.NoSuchDisk(disk, there, [one for group in own for one in group.missing_uuids])


def _by_uuid(group: Group, uuid: str) -> PhysicalVolume:
    return next(one for one in group.disks if one.uuid == uuid)


def _require_copies(group: Group, leaving: PhysicalVolume) -> None:
    """Raise WouldBeLost for volumes of which data lies on a missing disk and nowhere else."""
    lost: list[str] = []
    waiting: list[str] = []
    for one in sorted(records.every(group), key=attrgetter("name")):
        name = one.name
        holder, is_pool = group.volumes.get(one.pool, one), is_own_pool(one)
        if leaving.uuid not in holder.disks or group.survives(holder):
            continue
        # The volumes in a pool count, and the sweep holds no data.
        if not (is_pool and group.in_pool(name)) and not erase_deleted.is_sweep(group, name):
            (waiting if is_pool or erase_deleted.is_deleted(one) else lost).append(name)
    if lost or waiting:
        raise errors.WouldBeLost(leaving.uuid, lost, waiting)
