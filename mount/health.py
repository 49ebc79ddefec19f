"""How full a mounted file system is, and what is wrong with it."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from mount import errors, filesystem, table
from mount.kernel import Kernel
from mount.table import Mount


@dataclass(frozen=True)
class Inodes:
    """Counts of inodes."""

    total: int
    used: int
    available: int


@dataclass(frozen=True)
class Usage:
    """A file system's use in bytes; `inodes` is None where they are not counted (btrfs)."""

    total_bytes: int
    used_bytes: int
    available_bytes: int
    inodes: Inodes | None


def of(kernel: Kernel, path: str) -> Usage:
    """The use of the file system at `path`. Raises NotMounted, TargetError.

    Used and available do not add up to the total where blocks are reserved for root.
    """
    try:
        found = kernel.statvfs(path)
    except FileNotFoundError as error:
        raise errors.NotMounted(path) from error
    except OSError as error:
        raise errors.TargetError(path, f"cannot be measured: {error.strerror}") from error
    unit_bytes = found.f_frsize
    inodes = Inodes(found.f_files, found.f_files - found.f_ffree, found.f_favail)
    return Usage(
        total_bytes=found.f_blocks * unit_bytes,
        used_bytes=(found.f_blocks - found.f_bfree) * unit_bytes,
        available_bytes=found.f_bavail * unit_bytes,
        inodes=inodes if found.f_files else None,
    )


def device_size_bytes(kernel: Kernel, device: str) -> int:
    """The size of the block device at `device`, also a published target. Raises DeviceMissing."""
    try:
        return kernel.device_size_bytes(device)
    except OSError as error:
        raise errors.DeviceMissing(device, str(error.strerror)) from error


class Kind(enum.Enum):
    """The kind of a problem, and whether a check and a new mount may mend it."""

    READ_ONLY = "it takes no writes", True
    SILENT = "it does not answer", True
    ERRORS = "it has met errors in what it keeps", True
    MEDIUM_ERRORS = "its disk has failed it", False

    def __init__(self, meaning: str, is_mended_by_mount: bool) -> None:
        self.meaning = meaning
        self.is_mended_by_mount = is_mended_by_mount


@dataclass(frozen=True)
class Problem:
    """What is wrong, in a sentence that says what to do."""

    kind: Kind
    message: str


def problems(kernel: Kernel, mounts: table.Table, mount: Mount) -> Iterator[Problem]:
    """What the kernel knows against a file system, seen through one of its mounts; else nothing."""
    named = f"the {mount.fs_type} on {mount.source}"
    # The superblock takes no writes, though one of its mounts was made for writing.
    made_to_write = ("rw" in one.options for one in mounts.of_device(mount.device))
    if mount.takes_no_writes and any(made_to_write):
        yield Problem(
            Kind.READ_ONLY,
            f"{named} turned read-only, as after an error; see the kernel log (journalctl -k), stop"
            " the workload, and have the volume unstaged and staged again",
        )
    try:
        counters = kernel.error_counters(mount.fs_type, mount.device)
        kernel.lstat(mount.path)  # xfs answers EIO here once it was shut down (xfs_vn_getattr)
    except OSError as error:
        yield Problem(
            Kind.SILENT,
            f"{named} does not answer: {error.strerror}; see whether its disk is there and the"
            " kernel log (journalctl -k)",
        )
        return
    if counted := [f"{name} {count}" for name, count in counters.items() if count]:
        made = filesystem.known(mount.fs_type)
        yield Problem(
            Kind.MEDIUM_ERRORS if made.errors_of_medium else Kind.ERRORS,
            f"{named} has met errors ({', '.join(counted)}); see the kernel log (journalctl -k),"
            f" back the data up, {made.error_remedy}",
        )


def is_over_when_mounted_anew(kernel: Kernel, mounts: table.Table, mount: Mount) -> bool:
    """Whether something is wrong that a check and a new mount may mend."""
    found = problems(kernel, mounts, mount)
    return any(one.kind.is_mended_by_mount for one in found)
