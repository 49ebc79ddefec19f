"""Take copy-on-write snapshots and split them off, by one lvm2 command each."""

from collections.abc import Mapping, Sequence

from lvm import tags
from lvm.layout import COPY_ON_WRITE_CHUNK_BYTES
from lvm.lvm2 import Lvm


def create(
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
        "--yes",
        *("--type", "snapshot"),
        *("--permission", "r"),
        *("--setactivationskip", "y"),
        *("--chunksize", f"{COPY_ON_WRITE_CHUNK_BYTES}b"),
        *("--size", f"{size_bytes}b"),
        *tags.words("--addtag", own_tags),
        *("--name", name),
        "--",
        f"{group}/{origin}",
        *disks,
    )


def split(lvm: Lvm, group: str, name: str) -> None:
    """Split a snapshot off its origin (lvconvert(8)); its COW store stays as a volume, with tags.

    Raises InUse while something has the snapshot open.
    """
    lvm("lvconvert", "--yes", "--splitsnapshot", "--", f"{group}/{name}")
