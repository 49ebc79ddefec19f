"""Commands on volume groups: create, extend, reduce; move extents and rebuild RAID images."""

from collections.abc import Mapping, Sequence

from lvm import lvm2, report, tags
from lvm.lvm2 import Lvm
from lvm.report import Group
from lvm.volumes import NO_TAGS

# Command that messages and documents give for adding a disk to a volume group. Without the option
# lvm2 makes a metadata area of 1 MiB, and the smallest area limits the metadata of the whole group.
VGEXTEND = "vgextend --metadatasize 80m"
# Number of bytes before the metadata area on a disk: a page with the label.
LABEL_BYTES = 4096
_MIB = 1 << 20
# Size of the header of a metadata area, and unit to which lvm2 rounds each of the area's two texts,
# in bytes.
_SECTOR_BYTES = 512


def suitable_metadata_bytes(size_bytes: int) -> int:
    """The size of the metadata area on each disk of a new volume group of `size_bytes`, in bytes.

    The area has room for 10,000 volumes. A group of less than 40 GiB cannot have so many volumes,
    so its area has room for one volume on each extent of 4 MiB. Such an area takes 8 KiB for each
    extent, a five hundredth of the group. Label and area together are whole MiB, as lvm2 aligns the
    first extent to a MiB.
    """
    # A volume of two images takes 4 KiB of the text, and the area has room for two texts: lvm2
    # writes a new text beside the old one.
    volumes = min(10_000, size_bytes // (4 * _MIB))
    total_bytes = max(1, -(-2 * 4096 * volumes // _MIB)) * _MIB
    return total_bytes - LABEL_BYTES


def text_room_bytes(group: Group) -> int:
    """The maximum length of a volume group's metadata text, in bytes (lvm2's _vg_write_raw).

    The smallest metadata area on the group's disks limits the text.
    """
    return max(0, (group.metadata_bytes - _SECTOR_BYTES) // 2 - _SECTOR_BYTES)


def widest_area_bytes(group: Group) -> int:
    """The size of the largest metadata area of a volume group's disks, in bytes.

    A further disk should have an area of this size, as the smallest area limits the whole group.
    """
    return max((group.metadata_bytes, *(disk.metadata_bytes for disk in group.disks)))


def vgextend(group: Group) -> str:
    """Return the command that messages give for adding a disk to a volume group (vgextend(8)).

    With this command, the metadata area of the new disk is as large as the largest in the group;
    80 MiB if no area of the group is in use.
    """
    size_bytes = widest_area_bytes(group)
    return (
        f"vgextend --metadatasize {size_bytes >> 10}k {group.name}"
        if size_bytes
        else f"{VGEXTEND} {group.name}"
    )


def narrow_disks(group: Group) -> Mapping[str, int]:
    """The disks whose metadata area is smaller by a MiB or more than the volume group's largest.

    The result has the sizes of these areas, in bytes, by the names of the disks.
    """
    widest = widest_area_bytes(group)
    areas = {disk.name: disk.metadata_bytes for disk in group.disks if disk.metadata_bytes}
    return {name: size for name, size in areas.items() if widest - size >= _MIB}


def about_area(group: Group) -> str:
    """The first words of a message about a volume group's metadata area.

    The words name the disks whose smaller areas limit the metadata of the whole group.
    """
    area_title = f"the metadata area of volume group {group.name}"
    if not (narrow := narrow_disks(group)):
        return area_title
    disks = ", ".join(f"{name} has {_in_mib(size)}" for name, size in narrow.items())
    return (
        f"{area_title} (the smallest counts: {disks}, others {_in_mib(widest_area_bytes(group))})"
    )


def _in_mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.1f} MiB"


def text_percent(group: Group) -> float:
    """How full the metadata text of a volume group is, in percent of the longest text that fits."""
    room = text_room_bytes(group)
    return 100 * max(0, room - group.metadata_free_bytes) / room if room else 0.0


def is_text_full(group: Group) -> bool:
    """Whether a volume group's metadata text is too full for new volumes, snapshots or tags.

    The last sixteenth of the maximum length, and at least 16 KiB, is for deletions, wipes and
    repairs.
    """
    room = text_room_bytes(group)
    return bool(room) and group.metadata_free_bytes < max(room // 16, 16 << 10)


def create(
    lvm: Lvm,
    name: str,
    devices: Sequence[str],
    own_tags: Mapping[str, str],
    metadata_bytes: int,
) -> None:
    """Create a volume group of block devices that the caller has found to be blank (vgcreate(8)).

    One command makes all of the devices the group's disks, or none. Raises NameTaken if a group of
    that name exists.
    """
    # --quiet twice answers no to each question of lvm2's (lvm(8)). lvm2 itself searches the devices
    # for signatures, and must not wipe a signature that was written since the caller's check.
    words = ("--metadatasize", f"{metadata_bytes}b", *tags.words("--addtag", own_tags))
    lvm("vgcreate", "--quiet", "--quiet", *words, "--", name, *devices)


def mark(
    lvm: Lvm,
    name: str,
    *,
    old_tags: Mapping[str, str] = NO_TAGS,
    new_tags: Mapping[str, str] = NO_TAGS,
) -> None:
    """Delete the tags `old_tags` of a volume group and add the tags `new_tags` (vgchange(8)).

    Deleting a tag that the group lacks, or adding a tag that it has, is no error.
    """
    lvm2.change(lvm, "vgchange", tags.change(old_tags, new_tags), name)


def mark_fast(lvm: Lvm, disks: Sequence[str]) -> None:
    """Tag disks as fast, which reserves them for caches (pvchange(8))."""
    lvm("pvchange", "--addtag", report.FAST, "--", *disks)


# Settings of pvmove(8) with which pvmove's own process watches the move until it has ended. The
# alternative, lvmpolld(8), would search all disks for the volume group.
_WATCHED_BY_ITSELF = ("global/use_lvmpolld=0",)


def extend(lvm: Lvm, group: str, disk: str, metadata_bytes: int) -> None:
    """Add a disk that the caller has found to be blank to a volume group (vgextend(8)).

    The disk gets a metadata area of `metadata_bytes`, as each area must have room for the group's
    text. `lvm` must see the new disk beside the group's own disks.
    """
    # --quiet twice answers no to each question of lvm2's, so lvm2 wipes no signature.
    words = ("--quiet", "--quiet", "--metadatasize", f"{metadata_bytes}b")
    lvm("vgextend", *words, "--", group, disk)


def allow_allocation(lvm: Lvm, disk: str, *, allowed: bool) -> None:
    """Allow or forbid lvm2 to allocate extents on a disk (pvchange(8))."""
    lvm("pvchange", "--allocatable", "y" if allowed else "n", "--", disk)


def replace_images(lvm: Lvm, group: str, name: str, disks: Sequence[str]) -> None:
    """Replace the images of a RAID volume on missing disks by new ones on `disks` (lvconvert(8)).

    The volume must be active, and its remaining images in sync. The command does not wait for the
    rebuild.
    """
    lvm("lvconvert", "--yes", "--repair", "--", f"{group}/{name}", *disks)


def make_alike(lvm: Lvm, group: str, name: str) -> None:
    """Start to compare the images of a RAID volume and repair differences (lvchange(8))."""
    lvm("lvchange", "--syncaction", "repair", "--", f"{group}/{name}")


def move(lvm: Lvm, old_disk: str, new_disk: str) -> None:
    """Start or continue to move all extents of a disk to another disk (pvmove(8)).

    The command does not wait: a background process of lvm2's remains, and commits each moved
    segment.
    """
    lvm("pvmove", "--background", "--", old_disk, new_disk, settings=_WATCHED_BY_ITSELF)


def watch_moves(lvm: Lvm) -> None:
    """Restart the background processes of all unfinished moves on the disks that lvm2 sees."""
    lvm("pvmove", "--background", "--", settings=_WATCHED_BY_ITSELF)


def reduce(lvm: Lvm, group: str, disk: str) -> None:
    """Remove an empty disk from its volume group (vgreduce(8))."""
    lvm("vgreduce", "--", group, disk)


def reduce_missing(lvm: Lvm, group: str) -> None:
    """Remove the missing disks from a volume group.

    lvm2 refuses while a volume lies on one of these disks.
    """
    lvm("vgreduce", "--removemissing", "--", group)


def remove_spare(lvm: Lvm, group: str) -> None:
    """Remove a volume group's spare volume for repairs of thin pools.

    lvm2 makes a new spare volume when it needs one.
    """
    lvm("lvremove", "--yes", "--", f"{group}/lvol0_pmspare")


def repair_pool(lvm: Lvm, group: str, pool: str) -> None:
    """Rewrite the metadata of an inactive thin pool, as far as they are readable (lvmthin(7)).

    No volume of the pool may be active either. The old metadata stay, as the volume `pool_meta0`.
    """
    lvm("lvconvert", "--yes", "--repair", "--", f"{group}/{pool}")
