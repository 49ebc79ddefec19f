"""A disk of a group in another's place: taken in, filled, and the old one taken out.

What lies on a disk that is there is moved, online; of a disk that is lost, the images of RAID
volumes are built anew from the others. Where anything would be lost with it nothing is begun, and
the volumes are named.

Each call looks how far it is and goes on from there: taken in, nothing new on the old one, moved or
rebuilt, taken out, in sync. So what a kill left is gone on with by the same call, and the call that
is made once more than needed finds all done. What runs behind it the kernel does.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from agent.core import errors, tag
from agent.core.allocation import is_own_pool
from agent.core.context import Context
from agent.operations import erase
from agent.operations.repair import Progress, Repairer, rebuilding
from lvm import errors as lvm_errors
from lvm import groups, report, tags, thin
from lvm import groups as repairs
from lvm.devicemapper import Mirror
from lvm.labels import PhysicalLabel
from mount import errors as mount_errors
from mount import in_use
from mount.table import DeviceNumber

# lvm2's process that watches a move is started again so often: it may have been killed.
_WATCH_SECONDS = 60.0


class Replacement:
    """Puts disks in the place of others."""

    def __init__(
        self, context: Context, repairer: Repairer, *, freed: Callable[[str], object]
    ) -> None:
        self._volume_groups, self._kernel, self._run = (
            context.volume_groups,
            context.kernel,
            context.run,
        )
        self._inventory = context.inventory
        self._repairer = repairer
        self._policy, self._freed = erase.ErasePolicy(context), freed
        # What a disk has once all of another lies on it, by the UUIDs of both, where nothing but
        # that was ever moved to it: what is free on it then is as it was.
        self._filled: dict[tuple[str, str], int] = {}
        # When a move was begun, or gone on with, by this process (monotonic, seconds).
        self._watched: dict[str, float] = {}

    def replace(self, old: str, new: str) -> Progress:
        """Go on with it. `old` is a path, or the UUID of a disk that is missing; `new` is a path.

        Raises NoSuchDisk, WouldBeLost, DiskTooSmall, NotVacant, BadField, and what the repair of a
        volume raises.
        """
        name = self._group_of(old, new)
        with self._volume_groups.hold(name):
            group = self._look(name)
            leaving, coming = self._find(group, old), self._find(group, new)
            if leaving is None:
                return self._settled(group)
            if leaving == coming:
                raise errors.BadField("new_disk", f"{new} is the disk that it shall replace")
            if leaving.missing:
                self._require_copies(group, leaving)
            elif gone := ", ".join(disk.uuid for disk in group.disks if disk.missing):
                why = f"lvm2 moves nothing while the disk {gone} is missing; replace that one first"
                raise errors.NotRepairable(leaving.name, why)
            if coming is None:
                self._take_in(group, leaving, new)
                group = self._look(name)
                leaving, coming = self._own(group, leaving.uuid), self._find(group, new)
            if coming is None:
                raise errors.NoSuchDisk(new, [one.name for one in group.disks], [])
            if leaving.fast and not coming.fast:
                groups.mark_fast(self._volume_groups.lvm(name), [coming.name])
            step = self._rebuild if leaving.missing else self._move
            return step(group, leaving, coming)

    def resume(self, *groups: str) -> int:
        """Have moves watched in these groups, or in all; returns in how many there are any.

        Who watched them ended with the service, or with the node. One command for each.
        """
        own = groups or self._volume_groups.names
        known = self._inventory.state(*own)
        left = [
            one.name for one in self._inventory.own_groups(known) if one.name in own and one.moves
        ]
        for name in left:
            repairs.watch_moves(self._volume_groups.lvm(name))
        return len(left)

    def _group_of(self, old: str, new: str) -> str:
        """The group that has the old disk, or had it: then it has the new one."""
        known = self._inventory.state()
        own = list(self._inventory.own_groups(known))
        for disk in (old, new):
            for group in own:
                if self._find(group, disk) is not None:
                    return group.name
        every = [disk for group in own for disk in group.disks]
        raise errors.NoSuchDisk(
            old,
            [disk.name for disk in every if not disk.missing],
            [disk.uuid for disk in every if disk.missing],
        )

    def _look(self, name: str) -> report.Group:
        return self._inventory.group(self._inventory.state(name, resume=True), name)

    def _find(self, group: report.Group, disk: str) -> report.PhysicalVolume | None:
        """A disk of the group, by its UUID or any path of its device."""
        for one in group.disks:
            if one.uuid == disk:
                return one
        number = self._number(disk)
        there = [one for one in group.disks if not one.missing]
        if number is None:
            return next((one for one in there if one.name == disk), None)
        return next((one for one in there if self._number(one.name) == number), None)

    def _number(self, path: str) -> DeviceNumber | None:
        try:
            return self._kernel.device_number(path)
        except OSError:
            return None

    @staticmethod
    def _own(group: report.Group, uuid: str) -> report.PhysicalVolume:
        return next(one for one in group.disks if one.uuid == uuid)

    def _require_copies(self, group: report.Group, leaving: report.PhysicalVolume) -> None:
        """Raise WouldBeLost for what lies on a missing disk and nowhere else."""
        lost: list[str] = []
        waiting: list[str] = []
        for name, one in sorted(group.volumes.items()):
            holder = group.volumes.get(one.pool, one)
            if leaving.uuid not in holder.disks:
                continue
            if group.survives(holder):
                continue
            inside = thin.members(group, name)
            if inside and is_own_pool(one):
                continue  # what is in it tells
            if erase.is_sweep(group, name):
                continue  # nobody's
            is_deleted = is_own_pool(one) or tags.decode(one.tags).get(tag.STATE) == tag.WIPING
            (waiting if is_deleted else lost).append(name)
        if lost or waiting:
            raise errors.WouldBeLost(leaving.uuid, lost, waiting)

    def _take_in(self, group: report.Group, leaving: report.PhysicalVolume, new: str) -> None:
        """Make a vacant disk the group's."""
        if not self._volume_groups.allows(new):
            raise errors.BadField(
                "new_disk",
                f"{new} is not among the configured `devices`, or a filter of lvm.conf rejects it",
            )
        in_use.require_unused(self._kernel, new)
        path = self._kernel.real_path(new)
        label = self._volume_groups.scan().get(path)
        if not isinstance(label, PhysicalLabel):
            in_use.require_blank(self._run, new)
        elif label.is_used or label.group is not None:
            name = label.group.name if label.group is not None else "another group"
            raise mount_errors.NotVacant(new, f"is a disk of {name}", "name another")
        self._require_equal_blocks(group, new)
        extent = group.extent_size_bytes
        before = groups.LABEL_BYTES + group.metadata_bytes
        room = max(0, self._kernel.device_size_bytes(new) - before) // extent
        if room < leaving.allocated_extents:
            raise errors.DiskTooSmall(new, room * extent, leaving.allocated_extents * extent)
        lvm = self._volume_groups.lvm_with(group.name, path)
        repairs.extend(lvm, group.name, path, group.metadata_bytes)
        self._volume_groups.outdate()

    def _require_equal_blocks(self, group: report.Group, new: str) -> None:
        """Raise NotVacant for a disk of 4 KiB where the group's are of 512 bytes, or the reverse.

        lvm2 refuses it too, with the disk labelled already.
        """
        own = set()
        for one in group.disks:
            with suppress(OSError):  # it is missing, or has gone by now
                own.add(self._kernel.logical_block_bytes(one.name))
        size = self._kernel.logical_block_bytes(new)
        if own and size not in own:
            told = " and ".join(str(one) for one in sorted(own))
            found = f"has logical blocks of {size} bytes, and {group.name}'s disks such of {told}"
            raise mount_errors.NotVacant(new, found, "name a disk with blocks like theirs")

    def _move(
        self,
        group: report.Group,
        leaving: report.PhysicalVolume,
        coming: report.PhysicalVolume,
    ) -> Progress:
        """Empty a disk that is there.

        What a move frees holds tenants' data: on the old disk, and where the move is broken off on
        the new one. So both are on record before, and nobody gets what is free there. While the old
        one is closed nothing is overwritten either; if the replacement is given up, it is.
        """
        lvm = self._volume_groups.lvm(group.name)
        pair = leaving.uuid, coming.uuid
        if leaving.allocatable:
            repairs.close(lvm, leaving.name)
        if leaving.allocated_extents or not coming.allocatable:
            is_owed = self._policy.erases_any(group.volumes.values())
            if is_owed and erase.mark_for_erase(lvm, group, set(pair)):
                self._freed(group.name)
        if not coming.allocatable:
            # It was to be replaced, by the other one perhaps.
            repairs.reopen(lvm, coming.name)
        if leaving.allocated_extents:
            if not (group.moves or coming.unclean):
                self._filled[pair] = leaving.allocated_extents + coming.allocated_extents
            elif not group.moves:
                self._filled.pop(pair, None)
            since = time.monotonic() - self._watched.get(leaving.uuid, -_WATCH_SECONDS)
            if not group.moves or since >= _WATCH_SECONDS:
                repairs.move(lvm, leaving.name, coming.name)
                self._watched[leaving.uuid] = time.monotonic()
            return Progress(False, f"{leaving.name} is moved: {self._how_far(group)}")
        if self._filled.pop(pair, None) == coming.allocated_extents:
            erase.unmark_disk(lvm, group, coming.uuid)
        repairs.reduce(lvm, group.name, leaving.name)
        self._volume_groups.outdate()
        return self._settled(self._look(group.name))

    def _how_far(self, group: report.Group) -> str:
        told = [
            f"{one.synced_percent:.0f} %"
            for name in sorted(group.moves)
            for one in self._inventory.status(group.name, name)
            if isinstance(one, Mirror)
        ]
        return ", ".join(told) or "begun"

    def _rebuild(
        self,
        group: report.Group,
        leaving: report.PhysicalVolume,
        coming: report.PhysicalVolume,
    ) -> Progress:
        """Have nothing lie on a disk that is lost, and take it out."""
        lvm, told = self._volume_groups.lvm(group.name), []
        erase.remove_partial_sweep(lvm, group)
        for name, one in sorted(group.volumes.items()):
            if "raid" in one.layout and leaving.uuid in one.disks:
                told.append(self._mend(group, name, coming))
        if leaving.uuid in group.spare_disks:
            repairs.remove_spare(lvm, group.name)
        group = self._look(group.name)
        if self._own(group, leaving.uuid).allocated_extents:
            return Progress(False, "; ".join(told) or "a repair is awaited")
        others = [one for one in group.disks if one.missing and one.allocated_extents]
        if others:
            return Progress(
                False,
                f"nothing lies on {leaving.uuid} any more; it is taken out with"
                f" {', '.join(one.uuid for one in others)}, which are missing too: replace them",
            )
        repairs.reduce_missing(lvm, group.name)
        self._volume_groups.outdate()
        return self._settled(self._look(group.name))

    def _mend(self, group: report.Group, name: str, coming: report.PhysicalVolume) -> str:
        """Go on with a RAID volume of which images are lost; how far it is.

        Of several that are lost lvm2 builds any on the new disk, and a disk has one image only.
        """
        own, disks = group.volume(name).disks, [coming.name]
        if coming.uuid in own:
            disks += [one.name for one in group.disks if one.uuid not in own and one.image_extents]
        try:
            return self._repairer.mend(group, name, disks).message
        except lvm_errors.NoSpace:
            if coming.uuid not in own:
                raise
        return f"{group.name}/{name} lacks more than one disk: replace each, then this one again"

    def _settled(self, group: report.Group) -> Progress:
        """The old disk is out; whether another may be lost by now."""
        # A change of the group behind the answer might meet that other disk's loss, and have lvm2
        # take the disk for missing for good.
        if not erase.unmark_if_erased(self._volume_groups.lvm(group.name), group):
            self._freed(group.name)
        if told := rebuilding(self._inventory, group):
            return Progress(False, f"volumes are rebuilt: {told}")
        return Progress(True, f"{group.name} is whole")
