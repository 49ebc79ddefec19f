"""Create, activate, tag, grow, snapshot and remove logical volumes, by one lvm2 command each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lvm import lvm2, tags
from lvm.layout import COPY_ON_WRITE_CHUNK_BYTES, LINEAR, Layout
from lvm.lvm2 import Lvm
from lvm.tuning import AS_IT_IS, Tuning

# Default of parameters with tags: no tags.
NO_TAGS: Mapping[str, str] = {}


@dataclass(frozen=True)
class New:
    """A logical volume to be created, with a size in whole extents."""

    name: str
    size_bytes: int
    own_tags: Mapping[str, str]
    tuning: Tuning = AS_IT_IS

    def words(self) -> list[str]:
        """The options of lvcreate(8) for the volume, except its size: that option varies by kind.

        The volume is activated now, but never by the system at boot (--setactivationskip): Carver
        activates the volumes that are staged. (lvm2 2.03.16 refuses the newer --setautoactivation n
        for RAID.)
        """
        return [
            *("--setactivationskip", "y", "--activate", "y", "--ignoreactivationskip"),
            *self.tuning.words(),
            *tags.words("--addtag", self.own_tags),
            *("--name", self.name),
        ]


# Option of lvcreate(8) and lvextend(8) for a volume that may lie on any disks, in any number of
# ranges, whatever the allocation policy of its volume group.
_IN_PIECES = ("--alloc", "normal")


def create(
    lvm: Lvm,
    group: str,
    volume: New,
    *,
    layout: Layout = LINEAR,
    disks: Sequence[str] = (),
    in_pieces: bool = False,
) -> None:
    """Make, tag and activate a volume (lvcreate(8)), on `disks` if any are named.

    With `in_pieces` the volume group's allocation policy does not matter. lvm2 wipes old signatures
    and zeroes the first sectors. Raises NoSpace if the volume does not fit, NameTaken if its name
    is taken.
    """
    lvm(
        "lvcreate",
        *("--yes", "--wipesignatures", "y", "--zero", "y"),
        *(_IN_PIECES if in_pieces else ()),
        *layout.words(),
        *("--size", f"{volume.size_bytes}b"),
        *volume.words(),
        *("--", group, *disks),
    )


def activate(lvm: Lvm, group: str, name: str, *, partial: bool = False) -> None:
    """Activate a volume (lvchange(8)), in spite of its flag to skip activation.

    With `partial`, lvm2 activates a volume although disks are missing; reads and writes of the
    missing parts fail (EIO).
    """
    mode = ("--activationmode", "partial") if partial else ()
    lvm("lvchange", "--activate", "y", "--ignoreactivationskip", *mode, "--", f"{group}/{name}")


def deactivate(lvm: Lvm, group: str, *names: str) -> None:
    """Deactivate volumes (lvchange(8)); raises InUse while one of the volumes is open."""
    lvm("lvchange", "--activate", "n", "--", *(f"{group}/{name}" for name in names))


def refresh(lvm: Lvm, group: str, name: str) -> None:
    """Load an active volume's table anew, and resume its device (lvchange(8))."""
    lvm("lvchange", "--refresh", "--", f"{group}/{name}")


def allow_writing(lvm: Lvm, group: str, name: str) -> None:
    """Make a read-only volume writable (lvchange(8)); lvm2 fails for a writable volume."""
    lvm("lvchange", "--permission", "rw", "--", f"{group}/{name}")


def mark(
    lvm: Lvm, group: str, name: str, *, old_tags: tags.Tags, new_tags: Mapping[str, str]
) -> None:
    """Delete the tags `old_tags` of a volume and add the tags `new_tags` (lvchange(8)).

    One write of the metadata changes all tags, so either all tags change or none.
    """
    lvm2.change(lvm, "lvchange", tags.change(old_tags, new_tags), f"{group}/{name}")


def mark_all(
    lvm: Lvm,
    volume_names: Iterable[tuple[str, str]],
    *,
    old_tags: Mapping[str, str] = NO_TAGS,
    new_tags: Mapping[str, str] = NO_TAGS,
) -> None:
    """Delete the tags `old_tags` of several volumes and add `new_tags`, by one lvchange(8).

    `volume_names` has a pair of the volume group and the name of each volume. A killed command has
    changed some of the volumes. Deleting a tag that a volume lacks, or adding a tag that it has, is
    no error.
    """
    paths = (f"{group}/{name}" for group, name in volume_names)
    lvm2.change(lvm, "lvchange", tags.change(old_tags, new_tags), *paths)


def add_tags(lvm: Lvm, group: str, names: Iterable[str], encoded_tags: Iterable[str]) -> None:
    """Add encoded tags to volumes of a volume group, by one lvchange(8)."""
    added = [word for tag in sorted(encoded_tags) for word in ("--addtag", tag)]
    lvm2.change(lvm, "lvchange", added, *(f"{group}/{name}" for name in names))


def extend(
    lvm: Lvm,
    group: str,
    name: str,
    *,
    size_bytes: int,
    disks: Sequence[str] = (),
    in_pieces: bool = False,
) -> None:
    """Grow a volume to `size_bytes`, a multiple of the extent size (lvextend(8)).

    `disks` has the disks to use, each with or without extents (`disk:first-last`); empty for any.
    With `in_pieces` the volume group's allocation policy does not matter. The file system is not
    grown. Raises NoSpace if there are too few free extents.
    """
    policy = _IN_PIECES if in_pieces else ()
    lvm("lvextend", *policy, "--size", f"{size_bytes}b", "--", f"{group}/{name}", *disks)


def rename(lvm: Lvm, group: str, name: str, new_name: str) -> None:
    """Rename a volume and its device, also an active one (lvrename(8)).

    Raises NameTaken if a volume has the new name.
    """
    lvm("lvrename", "--", group, name, new_name)


def remove(lvm: Lvm, group: str, *names: str) -> None:
    """Deactivate and remove volumes (lvremove(8)); raises InUse while one of them is open."""
    lvm("lvremove", "--yes", "--", *(f"{group}/{name}" for name in names))


def remove_lost(lvm: Lvm, group: str, name: str) -> None:
    """Remove a volume or thin pool on missing disks, with the pool's volumes and all snapshots.

    With --force twice lvm2 also removes the volumes of a thin pool that cannot be activated
    (lv_manip.c).
    """
    lvm("lvremove", "--yes", "--force", "--force", "--", f"{group}/{name}")


def create_snapshot(
    lvm: Lvm,
    group: str,
    name: str,
    *,
    origin: str,
    size_bytes: int,
    own_tags: Mapping[str, str],
    disks: Sequence[str] = (),
) -> None:
    """Take a read-only snapshot with a COW store of `size_bytes` (lvcreate(8)).

    The kernel freezes a mounted file system while lvm2 suspends the origin's device, so the
    snapshot has all that was written, also what was not on disk yet (lock_fs in drivers/md/dm.c).
    lvm2 commits twice: killed in between, it leaves a volume with these tags but without an
    origin. Raises NoSpace if the store does not fit, NameTaken if the snapshot's name is taken.
    """
    lvm(
        "lvcreate",
        *("--yes", "--type", "snapshot", "--permission", "r", "--setactivationskip", "y"),
        *("--chunksize", f"{COPY_ON_WRITE_CHUNK_BYTES}b", "--size", f"{size_bytes}b"),
        *tags.words("--addtag", own_tags),
        *("--name", name, "--", f"{group}/{origin}", *disks),
    )


def split(lvm: Lvm, group: str, name: str) -> None:
    """Split a snapshot off its origin (lvconvert(8)). Raises InUse while the snapshot is open.

    The COW store stays, as a volume with the snapshot's name and tags.
    """
    lvm("lvconvert", "--yes", "--splitsnapshot", "--", f"{group}/{name}")
