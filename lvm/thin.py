"""Thin pools and the volumes in them: made and extended, one lvm2 command each (lvmthin(7))."""

from collections.abc import Mapping, Sequence

from lvm import tags
from lvm.lvm2 import Lvm
from lvm.tuning import AS_IT_IS, Tuning
from lvm.volumes import New


def create_pool(
    lvm: Lvm,
    group: str,
    name: str,
    *,
    data_extents: int,
    metadata_extents: int,
    extent_size_bytes: int,
    chunk_size_bytes: int,
    facts: Mapping[str, str],
    disks: Sequence[str] = (),
) -> None:
    """Make a pool that zeroes each chunk before it gives it out, and passes discards down.

    Where it is full, writes wait for room before they fail: a minute, by the kernel's own limit.
    (That is lvm.conf(5)'s default; lvm2 2.03.16 refuses --errorwhenfull here.) The metadata lie in
    one piece on one disk. Raises NoSpace, NameTaken.
    """
    lvm(
        "lvcreate",
        "--yes",
        *("--type", "thin-pool"),
        *("--zero", "y"),
        *("--discards", "passdown"),
        *("--setactivationskip", "y"),
        *("--activate", "y", "--ignoreactivationskip"),
        *("--chunksize", f"{chunk_size_bytes}b"),
        *("--poolmetadatasize", f"{metadata_extents * extent_size_bytes}b"),
        *("--size", f"{data_extents * extent_size_bytes}b"),
        *tags.words("--addtag", facts),
        *("--name", name),
        "--",
        group,
        *disks,
    )


def create(lvm: Lvm, group: str, pool: str, new: New) -> None:
    """Make, tag and activate a volume in a pool (lvcreate(8)); it takes no room until it is used.

    Raises NameTaken.
    """
    lvm(
        "lvcreate",
        "--yes",
        *("--type", "thin"),
        *("--virtualsize", f"{new.size_bytes}b"),
        *("--thinpool", pool),
        *new.words(),
        "--",
        group,
    )


def snapshot(
    lvm: Lvm,
    group: str,
    name: str,
    *,
    origin: str,
    facts: Mapping[str, str],
    read_only: bool,
    tuning: Tuning = AS_IT_IS,
) -> None:
    """Make and tag a volume that shares all its blocks with another of its pool (lvcreate(8)).

    Both are whole without the other. It is made active only where it may be written to. Raises
    NameTaken.
    """
    active = ["--activate", "y", "--ignoreactivationskip"]
    lvm(
        "lvcreate",
        "--yes",
        "--snapshot",
        *("--permission", "r" if read_only else "rw"),
        *("--setactivationskip", "y"),
        *([] if read_only else active),
        *tuning.words(),
        *tags.words("--addtag", facts),
        *("--name", name),
        "--",
        f"{group}/{origin}",
    )


def extend_metadata(
    lvm: Lvm, group: str, pool: str, *, by_bytes: int, disks: Sequence[str] = ()
) -> None:
    """Grow a pool's metadata, and the group's spare where it is smaller; raises NoSpace."""
    lvm("lvextend", "--poolmetadatasize", f"+{by_bytes}b", "--", f"{group}/{pool}", *disks)
