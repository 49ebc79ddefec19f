"""Disks put in the place of others, and what lost one made whole (lvmraid(7), pvmove(8)).

One command each. While a disk is missing lvm2 extends the group, repairs, and takes missing disks
out of it, but makes nothing. What a command begins here, the rebuild of an image or the move of
extents, the kernel carries on, and device-mapper tells how far it is.
"""

from collections.abc import Sequence

from lvm.lvm2 import Lvm

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


def close(lvm: Lvm, disk: str) -> None:
    """Have nothing new made on a disk (pvchange(8))."""
    lvm("pvchange", "--allocatable", "n", "--", disk)


def reopen(lvm: Lvm, disk: str) -> None:
    """Have new volumes made on a disk again, on which nothing new was made (pvchange(8))."""
    lvm("pvchange", "--allocatable", "y", "--", disk)


def replace_images(lvm: Lvm, group: str, name: str, disks: Sequence[str]) -> None:
    """Give a RAID volume new images for those on missing disks, on these disks (lvconvert(8)).

    It must be active and, what is left of it, in sync. The command does not wait for the rebuild.
    """
    lvm("lvconvert", "--yes", "--repair", "--", f"{group}/{name}", *disks)


def make_alike(lvm: Lvm, group: str, name: str) -> None:
    """Have the copies of a RAID volume compared, and made alike where they differ (lvchange(8))."""
    lvm("lvchange", "--syncaction", "repair", "--", f"{group}/{name}")


def move(lvm: Lvm, old: str, new: str) -> None:
    """Begin to move all that lies on a disk to another, or go on with it (pvmove(8)).

    The command does not wait; a process of lvm2's stays, which puts each piece on record.
    """
    lvm("pvmove", "--background", "--", old, new, settings=_WATCHED_BY_ITSELF)


def watch_moves(lvm: Lvm) -> None:
    """Have moves that are under way, on the disks that lvm2 sees, put on record as they go on."""
    lvm("pvmove", "--background", "--", settings=_WATCHED_BY_ITSELF)


def reduce(lvm: Lvm, group: str, disk: str) -> None:
    """Take a disk that nothing lies on out of its group (vgreduce(8))."""
    lvm("vgreduce", "--", group, disk)


def reduce_missing(lvm: Lvm, group: str) -> None:
    """Take the missing disks out of a group; lvm2 refuses while a volume lies on any of them."""
    lvm("vgreduce", "--removemissing", "--", group)


def remove_spare(lvm: Lvm, group: str) -> None:
    """Remove what lvm2 keeps for the repair of pools; it makes that anew when it needs it."""
    lvm("lvremove", "--yes", "--", f"{group}/lvol0_pmspare")


def repair_pool(lvm: Lvm, group: str, pool: str) -> None:
    """Write a thin pool's metadata anew as far as they can be read (lvmthin(7)).

    Nothing of it may be active. The old ones stay, as a volume called `pool_meta0`.
    """
    lvm("lvconvert", "--yes", "--repair", "--", f"{group}/{pool}")
