"""Create, activate, tag, grow, snapshot and remove logical volumes, by one lvm2 command each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lvm import tags
from lvm.layout import COPY_ON_WRITE_CHUNK_BYTES, LINEAR, Layout
from lvm.lvm2 import Lvm
from lvm.tuning import AS_IT_IS, Tuning

NO_TAGS: Mapping[str, str] = {}


@dataclass(frozen=True)
class New:
    """A volume that is to be made, of whole extents, with its tags."""

    name: str
    size_bytes: int
    own_tags: Mapping[str, str]
    tuning: Tuning = AS_IT_IS

    def words(self) -> list[str]:
        """Its options for lvcreate(8), except the size, which has an option for each kind.

        Its activation is set to be skipped, so the system never activates it by itself at boot:
        Carver activates what is staged. (The newer --setautoactivation n is refused for RAID by
        lvm2 2.03.16.)
        """
        return [
            *("--setactivationskip", "y", "--activate", "y", "--ignoreactivationskip"),
            *self.tuning.words(),
            *tags.words("--addtag", self.own_tags),
            *("--name", self.name),
        ]


def create(
    lvm: Lvm, group: str, new: New, *, layout: Layout = LINEAR, disks: Sequence[str] = ()
) -> None:
    """Make, tag and activate a volume (lvcreate(8)), on `disks` if any are named.

    Stale signatures are wiped and the first sectors zeroed. Raises NoSpace, NameTaken.
    """
    lvm(
        "lvcreate",
        *("--yes", "--wipesignatures", "y", "--zero", "y"),
        *layout.words(),
        *("--size", f"{new.size_bytes}b"),
        *new.words(),
        *("--", group, *disks),
    )


def activate(lvm: Lvm, group: str, name: str, *, partial: bool = False) -> None:
    """Activate a volume (lvchange(8)), even where activation is set to be skipped.

    With `partial` also where disks are missing: reads and writes of what is there fail (EIO).
    """
    mode = ("--activationmode", "partial") if partial else ()
    lvm("lvchange", "--activate", "y", "--ignoreactivationskip", *mode, "--", f"{group}/{name}")


def deactivate(lvm: Lvm, group: str, *names: str) -> None:
    """Deactivate volumes (lvchange(8)); raises InUse while something has one open."""
    lvm("lvchange", "--activate", "n", "--", *(f"{group}/{name}" for name in names))


def refresh(lvm: Lvm, group: str, name: str) -> None:
    """Load an active volume's table anew, and resume its device (lvchange(8))."""
    lvm("lvchange", "--refresh", "--", f"{group}/{name}")


def allow_writing(lvm: Lvm, group: str, name: str) -> None:
    """Make a read-only volume writable (lvchange(8)); lvm2 refuses for one that is."""
    lvm("lvchange", "--permission", "rw", "--", f"{group}/{name}")


def mark(lvm: Lvm, group: str, name: str, *, old: tags.Tags, new: Mapping[str, str]) -> None:
    """Replace tags in one metadata write: all of them change, or none (lvchange(8))."""
    changes = [*tags.words("--deltag", old), *tags.words("--addtag", new)]
    lvm("lvchange", *changes, "--", f"{group}/{name}")


def mark_all(
    lvm: Lvm,
    named: Iterable[tuple[str, str]],
    *,
    old: Mapping[str, str] = NO_TAGS,
    new: Mapping[str, str] = NO_TAGS,
) -> None:
    """Replace tags of several volumes, each a group's name and its own (lvchange(8)).

    One command; killed, it has changed some of them, and others not. What one has not, or has
    already, is no error.
    """
    changes = [*tags.words("--deltag", old), *tags.words("--addtag", new)]
    lvm("lvchange", *changes, "--", *(f"{group}/{name}" for group, name in named))


def add_tags(lvm: Lvm, group: str, names: Iterable[str], new: Iterable[str]) -> None:
    """Add tags to volumes of a group (lvchange(8)). One command."""
    added = [word for tag in sorted(new) for word in ("--addtag", tag)]
    lvm("lvchange", *added, "--", *(f"{group}/{name}" for name in names))


def extend(lvm: Lvm, group: str, name: str, *, size_bytes: int, disks: Sequence[str] = ()) -> None:
    """Grow the volume to a size in whole extents (lvextend(8)), on `disks` if any are named.

    The file system is not touched. Raises NoSpace.
    """
    lvm("lvextend", "--size", f"{size_bytes}b", "--", f"{group}/{name}", *disks)


def rename(lvm: Lvm, group: str, name: str, new: str) -> None:
    """Rename a volume and its device, also an active one (lvrename(8)). Raises NameTaken."""
    lvm("lvrename", "--", group, name, new)


def remove(lvm: Lvm, group: str, *names: str) -> None:
    """Deactivate and remove volumes (lvremove(8)); raises InUse while something has one open."""
    lvm("lvremove", "--yes", "--", *(f"{group}/{name}" for name in names))


def remove_lost(lvm: Lvm, group: str, name: str) -> None:
    """Remove what lies on missing disks, with all that is in it or is a snapshot of it.

    Twice forced, lvm2 removes what is in a thin pool that cannot be activated (lv_manip.c).
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
    """Take a read-only snapshot with a COW store of so many bytes (lvcreate(8)).

    A mounted file system is brought to rest by the kernel while its device is suspended, so what
    was written and not yet on disk is in the snapshot (lock_fs in drivers/md/dm.c). lvm2 writes its
    metadata twice: killed in between, it leaves a volume with these tags that has no origin.
    Raises NoSpace, NameTaken.
    """
    lvm(
        "lvcreate",
        *("--yes", "--type", "snapshot", "--permission", "r", "--setactivationskip", "y"),
        *("--chunksize", f"{COPY_ON_WRITE_CHUNK_BYTES}b", "--size", f"{size_bytes}b"),
        *tags.words("--addtag", own_tags),
        *("--name", name, "--", f"{group}/{origin}", *disks),
    )


def split(lvm: Lvm, group: str, name: str) -> None:
    """Split a snapshot off its origin (lvconvert(8)); its COW store stays as a volume, with tags.

    Raises InUse while something has the snapshot open.
    """
    lvm("lvconvert", "--yes", "--splitsnapshot", "--", f"{group}/{name}")
