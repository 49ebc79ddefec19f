"""Commands on volume groups: make, extend, reduce; move extents and rebuild RAID images."""

from collections.abc import Mapping, Sequence

from lvm import report, tags
from lvm.lvm2 import Lvm
from lvm.report import Group
from lvm.volumes import NO_TAGS

# The command by which people give a group a disk. Without the option lvm2 makes an area of 1 MiB
# there, and the smallest area bounds the metadata of the whole group.
VGEXTEND = "vgextend --metadatasize 80m"
# What lvm2 has on a disk before its metadata area: a page with the label.
LABEL_BYTES = 4096
_MIB = 1 << 20
# The header of a metadata area; each of its two texts begins with a sector.
_SECTOR_BYTES = 512


def suitable_metadata_bytes(size_bytes: int) -> int:
    """How large a metadata area a new group of so much has on each of its disks.

    lvm2 writes a new text beside the old one. A group of less than 40 GiB cannot have as many
    volumes, and an area of 8 KiB for each extent of 4 MiB is a five hundredth of it. The label and
    the area are whole MiB together, as lvm2 begins with the first extent there.
    """
    # So many volumes of two images each have room, of which each takes 4 KiB of the text.
    volumes = min(10_000, size_bytes // (4 * _MIB))
    whole = max(1, -(-2 * 4096 * volumes // _MIB)) * _MIB
    return whole - LABEL_BYTES


def text_room_bytes(group: Group) -> int:
    """The longest text that lvm2 writes into a group's metadata areas (_vg_write_raw)."""
    return max(0, (group.metadata_bytes - _SECTOR_BYTES) // 2 - _SECTOR_BYTES)


def widest_area_bytes(group: Group) -> int:
    """The largest metadata area of its disks; what a further disk should have.

    The smallest bounds the text of the whole group.
    """
    return max((group.metadata_bytes, *(one.metadata_bytes for one in group.disks)))


def vgextend(group: Group) -> str:
    """The command by which people give this group a disk, whose area is as large as the widest."""
    size_bytes = widest_area_bytes(group)
    return (
        f"vgextend --metadatasize {size_bytes >> 10}k {group.name}"
        if size_bytes
        else f"{VGEXTEND} {group.name}"
    )


def narrow_disks(group: Group) -> Mapping[str, int]:
    """The disks whose metadata areas are smaller than others' by more than rounding, in bytes."""
    widest = widest_area_bytes(group)
    areas = {one.name: one.metadata_bytes for one in group.disks if one.metadata_bytes}
    return {name: size for name, size in areas.items() if widest - size >= _MIB}


def about_area(group: Group) -> str:
    """The group's metadata area, with the disks that bound it, as the subject of a sentence."""
    whole = f"the metadata area of volume group {group.name}"
    if not (narrow := narrow_disks(group)):
        return whole
    disks = ", ".join(f"{name} has {_in_mib(size)}" for name, size in narrow.items())
    return f"{whole} (the smallest counts: {disks}, others {_in_mib(widest_area_bytes(group))})"


def _in_mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.1f} MiB"


def text_percent(group: Group) -> float:
    """How much of that room is used, in percent."""
    room = text_room_bytes(group)
    return 100 * max(0, room - group.metadata_free_bytes) / room if room else 0.0


def is_text_full(group: Group) -> bool:
    """Whether only the reserve for deletions, wipes and repairs is left: nothing new is made."""
    room = text_room_bytes(group)
    return bool(room) and group.metadata_free_bytes < max(room // 16, 16 << 10)


def create(
    lvm: Lvm,
    name: str,
    devices: Sequence[str],
    own_tags: Mapping[str, str],
    metadata_bytes: int,
) -> None:
    """Make a group of block devices that the caller has proved to be blank (vgcreate(8)).

    All of them become the group's disks by one command, or none does. Raises NameTaken when a group
    of that name exists.
    """
    # --quiet twice answers no to whatever lvm2 asks (lvm(8)): it looks for signatures itself, and
    # one that came after the caller's look must not be wiped.
    words = ("--metadatasize", f"{metadata_bytes}b", *tags.words("--addtag", own_tags))
    lvm("vgcreate", "--quiet", "--quiet", *words, "--", name, *devices)


def mark(
    lvm: Lvm, name: str, *, old: Mapping[str, str] = NO_TAGS, new: Mapping[str, str] = NO_TAGS
) -> None:
    """Replace tags of a group (vgchange(8)); what it has not, or has already, is no error."""
    changes = [*tags.words("--deltag", old), *tags.words("--addtag", new)]
    lvm("vgchange", *changes, "--", name)


def mark_fast(lvm: Lvm, disks: Sequence[str]) -> None:
    """Reserve disks for caches: nothing else new is put on them (pvchange(8))."""
    lvm("pvchange", "--addtag", report.FAST, "--", *disks)


# lvm2 watches a move itself until it has ended, rather than lvmpolld, which would look for the
# group on all disks.
_WATCHED_BY_ITSELF = ("global/use_lvmpolld=0",)


def extend(lvm: Lvm, group: str, disk: str, metadata_bytes: int) -> None:
    """Give a group a disk that the caller has proved to be blank (vgextend(8)).

    It has a metadata area of that size: the group's text must fit into each. `lvm` must see the
    disk, beside the group's own.
    """
    # --quiet twice answers no to whatever lvm2 asks: a signature that it finds is not wiped.
    words = ("--quiet", "--quiet", "--metadatasize", f"{metadata_bytes}b")
    lvm("vgextend", *words, "--", group, disk)


def allow_allocation(lvm: Lvm, disk: str, *, allowed: bool) -> None:
    """Have lvm2 allocate on a disk, or allocate nothing new there (pvchange(8))."""
    lvm("pvchange", "--allocatable", "y" if allowed else "n", "--", disk)


def replace_images(lvm: Lvm, group: str, name: str, disks: Sequence[str]) -> None:
    """Give a RAID volume new images for those on missing disks, on these disks (lvconvert(8)).

    It must be active and, what is left of it, in sync. The command does not wait for the rebuild.
    """
    lvm("lvconvert", "--yes", "--repair", "--", f"{group}/{name}", *disks)


def make_alike(lvm: Lvm, group: str, name: str) -> None:
    """Compare the copies of a RAID volume, and repair those that differ (lvchange(8))."""
    lvm("lvchange", "--syncaction", "repair", "--", f"{group}/{name}")


def move(lvm: Lvm, old: str, new: str) -> None:
    """Start to move all extents of a disk to another, or continue (pvmove(8)).

    The command does not wait; a process of lvm2's stays, which commits each piece.
    """
    lvm("pvmove", "--background", "--", old, new, settings=_WATCHED_BY_ITSELF)


def watch_moves(lvm: Lvm) -> None:
    """Restart the watchers of moves that are under way, on the disks that lvm2 sees."""
    lvm("pvmove", "--background", "--", settings=_WATCHED_BY_ITSELF)


def reduce(lvm: Lvm, group: str, disk: str) -> None:
    """Remove an empty disk from its group (vgreduce(8))."""
    lvm("vgreduce", "--", group, disk)


def reduce_missing(lvm: Lvm, group: str) -> None:
    """Remove the missing disks from a group; lvm2 refuses while a volume lies on any of them."""
    lvm("vgreduce", "--removemissing", "--", group)


def remove_spare(lvm: Lvm, group: str) -> None:
    """Remove what lvm2 keeps for the repair of pools; it makes that anew when it needs it."""
    lvm("lvremove", "--yes", "--", f"{group}/lvol0_pmspare")


def repair_pool(lvm: Lvm, group: str, pool: str) -> None:
    """Write a thin pool's metadata anew as far as they can be read (lvmthin(7)).

    Nothing of it may be active. The old ones stay, as a volume called `pool_meta0`.
    """
    lvm("lvconvert", "--yes", "--repair", "--", f"{group}/{pool}")
