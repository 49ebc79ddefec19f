"""Volume groups: made once, then only looked at."""

from collections.abc import Mapping, Sequence

from lvm import report, tags
from lvm.lvm2 import Lvm


def create(lvm: Lvm, name: str, devices: Sequence[str], facts: Mapping[str, str]) -> None:
    """Make a group of block devices that the caller has proved to be blank (vgcreate(8)).

    All of them become the group's disks by one command, or none does. Raises NameTaken when a group
    of that name exists.
    """
    # --quiet twice answers no to whatever lvm2 asks (lvm(8)): it looks for signatures itself, and
    # one that came after the caller's look must not be wiped.
    lvm("vgcreate", "--quiet", "--quiet", *tags.words("--addtag", facts), "--", name, *devices)


def mark(
    lvm: Lvm,
    name: str,
    *,
    old: Mapping[str, str] | None = None,
    new: Mapping[str, str] | None = None,
) -> None:
    """Replace facts of a group (vgchange(8)); what it has not, or has already, is no error."""
    changes = [*tags.words("--deltag", old or {}), *tags.words("--addtag", new or {})]
    lvm("vgchange", *changes, "--", name)


def mark_fast(lvm: Lvm, disks: Sequence[str]) -> None:
    """Have disks hold caches from now on, and nothing else that is new (pvchange(8))."""
    lvm("pvchange", "--addtag", report.FAST, "--", *disks)
