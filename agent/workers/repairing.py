"""Volumes made whole again: RAID volumes that lost a disk or a leg, pools with damaged metadata.

Each call looks, does what is to be done next, and says how far it is; the kernel rebuilds what lvm2
has begun. So a repair that is killed at any step is gone on with by the same call.
"""

from collections.abc import Callable
from dataclasses import dataclass

from agent import errors, ids
from agent.engine import users
from agent.engine.allocation import Carvings
from agent.engine.inventory import Inventory
from agent.engine.means import Means
from agent.engine.records import Volume, is_encrypted
from agent.workers import giving_up
from lvm import errors as lvm_errors
from lvm import pools, repairs, report, tags, volumes
from lvm.devicemapper import Raid


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

    def __init__(self, means: Means) -> None:
        self._engines, self._kernel = means.engines, means.kernel
        self._inventory = means.inventory
        self._carvings = Carvings(means.config.classes, means.inventory)
        self._zero = means.config.wipe == "zero"
        # Told of a group in which images on missing disks were replaced.
        self.freed: Callable[[str], object] = lambda _group: None

    def repair(self, volume_id: str, *, pool_metadata: bool = False) -> Progress:
        """Go on with the repair of a volume; of a thin one, of its pool, if that is said.

        Four commands at most; those of a pool are as many more as it has volumes in use of it.
        Raises NotRepairable, NoRoom, VolumeInUse.
        """
        with self._engines.hold(group := ids.group_of(volume_id)):
            volume = self._inventory.usable(self._inventory.awake(group), volume_id)
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
        lvm = self._engines.lvm(group.name)
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
            if self._zero or is_encrypted(tags.decode(logical.tags)):
                # What the old images hold is on nobody's extents from then on, and lvm2 takes such
                # a disk as whole when it is back. All that are missing: the same by any report.
                gone = {disk.uuid for disk in group.disks if disk.missing}
                giving_up.owe(lvm, group, gone)
            repairs.replace_images(lvm, group.name, name, disks)
            self.freed(group.name)
            return Progress(False, f"{path} is rebuilt on {', '.join(disks)}")
        if status is not None and "D" in status.health:
            volumes.refresh(lvm, group.name, name)
            return Progress(False, f"{path} has a leg that failed for a while, which is brought in")
        if status is not None and status.action == "repair":
            return Progress(False, f"{path} has its copies made alike")
        if status is not None and status.mismatches:
            repairs.make_alike(lvm, group.name, name)
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
        free -= self._carvings.promised_extents(group)
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
        members = pools.members(group, pool)
        if not told:
            held = ", ".join(one.name for one in members)
            raise errors.NotRepairable(
                path,
                f"{why}. Have a backup of what can be read, stop what uses {held}, and say"
                " `--pool-metadata`: the metadata are written anew as far as they can be read",
            )
        lvm = self._engines.lvm(group.name)
        known = self._inventory.read(group.name)
        for one in self._inventory.present(known):
            if one.group.name == group.name and one.name in {member.name for member in members}:
                users.require_unused(self._kernel, self._inventory, one)
        for member in members:
            if self._inventory.is_active(group.name, member.name):
                volumes.deactivate(lvm, group.name, member.name)
        if self._inventory.is_active(group.name, pool):
            volumes.deactivate(lvm, group.name, pool)
        repairs.repair_pool(lvm, group.name, pool)
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
                volumes.activate(self._engines.lvm(group.name), group.name, pool)
            except lvm_errors.OutcomeUnknown:
                raise
            except lvm_errors.CommandFailed as error:
                # lvm2 has thin_check(8) look at them before that.
                return f"it cannot be activated: {error}"
        status = pools.status_of(self._inventory.status(group.name, pool))
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
