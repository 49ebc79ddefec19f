"""Volume groups: made once, then only looked at."""

from collections.abc import Mapping, Sequence

from lvm import tags
from lvm.lvm2 import Lvm


def create(lvm: Lvm, name: str, devices: Sequence[str], facts: Mapping[str, str]) -> None:
    """Make a group of block devices that the caller has proved to be blank (vgcreate(8)).

    Raises NameTaken when a group of that name exists.
    """
    tagging = [word for tag in tags.encode(facts) for word in ("--addtag", tag)]
    # --yes answers nothing here that was not proved before: the devices are blank.
    lvm("vgcreate", "--yes", *tagging, "--", name, *devices)
