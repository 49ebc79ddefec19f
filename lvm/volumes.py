"""Logical volumes: made, activated, marked, grown and removed, one lvm2 command each."""

from collections.abc import Mapping, Sequence

from lvm import tags
from lvm.layout import LINEAR, Layout
from lvm.lvm2 import Lvm
from lvm.tuning import AS_IT_IS, Tuning


def create(
    lvm: Lvm,
    group: str,
    name: str,
    *,
    size_bytes: int,
    facts: Mapping[str, str],
    layout: Layout = LINEAR,
    disks: Sequence[str] = (),
    tuning: Tuning = AS_IT_IS,
) -> None:
    """Make, tag and activate a volume of whole extents (lvcreate(8)), on `disks` if any are named.

    Stale signatures are wiped and the first sectors zeroed. Its activation is set to be skipped, so
    the system never activates it by itself at boot: Carver activates what is staged. (The newer
    --setautoactivation n is refused for RAID by lvm2 2.03.16.) Raises NoSpace, NameTaken.
    """
    tagging = [word for tag in tags.encode(facts) for word in ("--addtag", tag)]
    lvm(
        "lvcreate",
        "--yes",
        *("--wipesignatures", "y"),
        *("--zero", "y"),
        *("--setactivationskip", "y"),
        *("--activate", "y", "--ignoreactivationskip"),
        *layout.words(),
        *tuning.words(),
        *("--size", f"{size_bytes}b"),
        *tagging,
        *("--name", name),
        "--",
        group,
        *disks,
    )


def activate(lvm: Lvm, group: str, name: str) -> None:
    """Give the volume its device (lvchange(8)), even where activation is set to be skipped."""
    lvm("lvchange", "--activate", "y", "--ignoreactivationskip", "--", f"{group}/{name}")


def deactivate(lvm: Lvm, group: str, name: str) -> None:
    """Take the volume's device away (lvchange(8)); raises InUse while something has it open."""
    lvm("lvchange", "--activate", "n", "--", f"{group}/{name}")


def refresh(lvm: Lvm, group: str, name: str) -> None:
    """Load an active volume's table anew, and resume its device (lvchange(8))."""
    lvm("lvchange", "--refresh", "--", f"{group}/{name}")


def allow_writing(lvm: Lvm, group: str, name: str) -> None:
    """Make a read-only volume writable (lvchange(8)); lvm2 refuses for one that is."""
    lvm("lvchange", "--permission", "rw", "--", f"{group}/{name}")


def mark(
    lvm: Lvm, group: str, name: str, *, old: Mapping[str, str], new: Mapping[str, str]
) -> None:
    """Replace facts in one metadata write: all of them change, or none (lvchange(8))."""
    removed = [word for tag in tags.encode(old) for word in ("--deltag", tag)]
    added = [word for tag in tags.encode(new) for word in ("--addtag", tag)]
    lvm("lvchange", *removed, *added, "--", f"{group}/{name}")


def extend(lvm: Lvm, group: str, name: str, *, size_bytes: int, disks: Sequence[str] = ()) -> None:
    """Grow the volume to a size in whole extents (lvextend(8)), on `disks` if any are named.

    The file system is not touched. Raises NoSpace.
    """
    lvm("lvextend", "--size", f"{size_bytes}b", "--", f"{group}/{name}", *disks)


def remove(lvm: Lvm, group: str, *names: str) -> None:
    """Deactivate and remove volumes (lvremove(8)); raises InUse while something has one open."""
    lvm("lvremove", "--yes", "--", *(f"{group}/{name}" for name in names))
