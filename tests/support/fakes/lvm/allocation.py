"""Which extents a new volume, or a part of one, gets."""

from collections.abc import Mapping, Sequence

from fakes.devices import BLOCK_BYTES
from fakes.lvm.records import Failure, FakeDisk, FakeGroup, FakeVolume

NOTHING: Mapping[str, int] = {}


def require_new(group: FakeGroup, name: str) -> None:
    if name in group.volumes:
        raise Failure(f'Logical Volume "{name}" already exists in volume group "{group.name}"')
    if 0 < group.max_lv <= len(group.volumes):
        most = f"Maximum number of logical volumes ({group.max_lv}) reached"
        raise Failure(f"{most} in volume group {group.name}")


def allocatable(group: FakeGroup, chosen: Sequence[str] = ()) -> list[FakeDisk]:
    """The disks that may be allocated from, of those that are named, if any are."""
    usable = [one for one in group.disks if one.allocatable and not one.missing]
    return [one for one in usable if one.name in chosen or not chosen]


def missing_spare(group: FakeGroup, metadata_extents: int) -> int:
    return max(0, metadata_extents - sum(group.spare.values()))


def allocate(
    group: FakeGroup, volume: FakeVolume, extents: int, names_: Sequence[str], policy: str = ""
) -> None:
    """With `policy` instead of the group's."""
    usable = allocatable(group, names_)
    if volume.layout.is_linear:
        append(group, volume.extents, extents, usable, policy)
    else:
        _spread(group, volume, extents, usable)


def append(
    group: FakeGroup,
    area: dict[str, int],
    extents: int,
    usable: Sequence[FakeDisk],
    policy: str = "",
) -> None:
    require_free(group, extents, usable)
    usable = _allowed(group, area, extents, usable, policy or group.policy)
    parts = {disk.name: group.free(disk) for disk in usable}
    for name, available in parts.items():
        if part := min(extents, available):
            area[name] = area.get(name, 0) + part
        extents -= part


def longest_run(group: FakeGroup, disk: FakeDisk) -> int:
    """The longest run of free extents of a disk."""
    return min(group.free(disk), group.runs.get(disk.name, group.free(disk)))


def _allowed(
    group: FakeGroup,
    area: Mapping[str, int],
    extents: int,
    usable: Sequence[FakeDisk],
    policy: str,
) -> Sequence[FakeDisk]:
    """The disks that an allocation policy lets a linear area, or what it grows by, have."""
    if policy in ("normal", "anywhere"):
        return usable
    room = longest_run if policy == "contiguous" else FakeGroup.free
    for disk in usable:
        if (not area or disk.name in area) and room(group, disk) >= extents:
            return [disk]
    raise Failure("Insufficient suitable contiguous allocatable extents for logical volume")


def require_free(group: FakeGroup, extents: int, usable: Sequence[FakeDisk]) -> None:
    free = sum(group.free(disk) for disk in usable)
    if extents > free:
        why = f"insufficient free space ({free} extents): {extents} required."
        raise Failure(f'Volume group "{group.name}" has {why}')


def _spread(group: FakeGroup, volume: FakeVolume, extents: int, usable: Sequence[FakeDisk]) -> None:
    layout = volume.layout
    assert extents % layout.stripes == 0, "lvm2 would round that up by itself"
    assert len(usable) <= layout.disks, "the caller names the disks"
    on_each = extents // layout.stripes + (0 if volume.extents else layout.metadata_extents)
    if len(usable) < layout.disks or any(group.free(disk) < on_each for disk in usable):
        raise Failure(
            f"Insufficient suitable allocatable extents for logical volume {volume.name}:"
            f" {on_each * layout.disks} more required"
        )
    for disk in usable:
        volume.extents[disk.name] = volume.extents.get(disk.name, 0) + on_each


def uncover(
    group: FakeGroup, volume: FakeVolume, first_extent: int, before: Mapping[str, int] = NOTHING
) -> None:
    """What was on the extents that a volume has new is on it; it had those `before`."""
    new_on = {disk for disk, extents in volume.extents.items() if extents > before.get(disk, 0)}
    stale = [data for disk, data in group.stale.items() if disk in new_on]
    if not group.old and not stale:
        return
    blocks = group.extent_size_bytes // BLOCK_BYTES
    block = (group.old or stale[0]).ljust(BLOCK_BYTES, b"\0")
    new = range(first_extent * blocks, volume.length * blocks)
    volume.media.blocks |= dict.fromkeys(new, block)
