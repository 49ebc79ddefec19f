"""What the fake lvm2 does about disks: new images for lost ones, extents moved, disks taken out."""

from collections.abc import Mapping, Sequence

from fakes.lvm.machine import Machine
from fakes.lvm.records import Failure, FakeDisk, FakeGroup, FakePool, FakeVolume

# How often device-mapper is asked until a rebuild, or a move, is over.
LOOKS = 3


def repair(lvm: Machine, group: FakeGroup, volume: FakeVolume, disks: Sequence[str]) -> str:
    """What lvconvert does with --repair."""
    if isinstance(volume, FakePool):
        return _repair_pool(lvm, group, volume)
    path = f"{group.name}/{volume.name}"
    assert volume.layout.is_raid, "not asked for so far"
    if not volume.active:
        raise Failure(f"{path} must be active to perform this operation.")
    if volume.rebuilding:
        raise Failure(f"Unable to replace devices in {path} while it is not in-sync.")
    missing = {disk.name for disk in group.disks if disk.missing}
    # Where not all lost images have room, lvm2 replaces as many as have, and the last ones first
    # (lv_raid_replace, _raid_extract_images).
    chosen: dict[str, str] = {}
    for disk in reversed(volume.extents):
        if disk in missing and (new := _another(group, volume, chosen, disk, disks)):
            chosen[disk] = new
    if not chosen:
        raise Failure(f"Insufficient suitable allocatable extents for logical volume {volume.name}")
    volume.extents = {chosen.get(one, one): length for one, length in volume.extents.items()}
    volume.rebuilding = dict.fromkeys(chosen.values(), LOOKS)
    volume.health = "partial" if missing & set(volume.extents) else ""
    return f"  Faulty devices in {path} successfully replaced.\n"


def _another(
    group: FakeGroup,
    volume: FakeVolume,
    chosen: Mapping[str, str],
    lost: str,
    disks: Sequence[str],
) -> str | None:
    for disk in group.disks:
        is_named = disk.name in disks or not disks
        usable = is_named and disk.allocatable and not disk.missing
        has_none = disk.name not in volume.extents and disk.name not in chosen.values()
        if usable and has_none and group.free(disk) >= volume.extents[lost]:
            return disk.name
    return None


def _repair_pool(lvm: Machine, group: FakeGroup, pool: FakePool) -> str:
    """The metadata are written anew to the spare, which takes their place."""
    if pool.active or any(one.active for one in group.thin(pool.name)):
        raise Failure(
            f"Cannot repair active pool {group.name}/{pool.name}. Use lvchange -an first."
        )
    assert sum(group.spare.values()) >= sum(pool.metadata.values())
    kept = FakeVolume(f"{pool.name}_meta0", lvm._uuid(), pool.metadata)
    pool.metadata, group.spare = group.spare, {}
    group.volumes[kept.name] = kept
    pool.damaged, pool.needs_check, pool.mode = False, False, "rw"
    return ""


def move(lvm: Machine, old: str, new: str) -> str:
    """What pvmove does with --background: a process of lvm2's waits for the kernel's copying."""
    group = next(one for one in lvm.groups.values() if any(d.name == old for d in one.disks))
    leaving, coming = _disk(group, old), _disk(group, new)
    if group.moving is not None:
        return f"  Detected pvmove in progress for {old}.\n"
    taken = leaving.extents - group.free(leaving)
    if not coming.allocatable or group.free(coming) < taken:
        raise Failure("Insufficient suitable allocatable extents for logical volume : 1 required")
    group.moving = [old, new]
    group.move_looks = LOOKS
    return ""


def moved(group: FakeGroup) -> None:
    """What the process does that waits for a move."""
    assert group.moving is not None
    old, new = group.moving
    for volume in group.volumes.values():
        places = [volume.extents, *([volume.metadata] if isinstance(volume, FakePool) else [])]
        for place in (*places, *([volume.cache.extents] if volume.cache else [])):
            kept = {(new if disk == old else disk): length for disk, length in place.items()}
            place.clear()
            place.update(kept)
    if old in group.spare:
        group.spare[new] = group.spare.pop(old)
    group.moving = None
    group.stale[old] = _moved_data(group)
    group.seqno += 1


def abort(lvm: Machine) -> str:
    """What pvmove does with --abort: all is as before, but that its copies are where they were."""
    for group in lvm.groups.values():
        if group.moving is not None:
            group.stale[group.moving[1]] = _moved_data(group)
            group.moving = None
            group.seqno += 1
    return ""


def _moved_data(group: FakeGroup) -> bytes:
    every = [data for one in group.volumes.values() for data in one.media.blocks.values()]
    return next(iter(every), b"moved")


def reduce_missing(group: FakeGroup) -> str:
    """What vgreduce does with --removemissing."""
    missing = [disk for disk in group.disks if disk.missing]
    if any(group.free(disk) < disk.extents for disk in missing):
        raise Failure(f"There are still partial LVs in VG {group.name}.")
    group.disks = [disk for disk in group.disks if not disk.missing]
    return ""


def _disk(group: FakeGroup, name: str) -> FakeDisk:
    return next(disk for disk in group.disks if disk.name == name)
