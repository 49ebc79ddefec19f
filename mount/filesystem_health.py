"""The use and the problems of a mounted file system."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from mount import filesystem, mount_errors, table
from mount.kernel import Kernel
from mount.table import Mount


@dataclass(frozen=True)
class Inodes:
    """The numbers of a file system's inodes."""

    total: int
    used: int
    available: int


@dataclass(frozen=True)
class Usage:
    """The use of a file system. `inodes` is None for a type without a limit of inodes (btrfs)."""

    total_bytes: int
    used_bytes: int
    available_bytes: int
    inodes: Inodes | None


def of(kernel: Kernel, path: str) -> Usage:
    """The use of the file system at `path`.

    Raises NotMounted if the path does not exist, TargetError if the kernel gives no numbers.

    Used and available bytes are less than the total in sum if blocks are reserved for root.
    """
    try:
        status = kernel.statvfs(path)
    except FileNotFoundError as error:
        raise mount_errors.NotMounted(path) from error
    except OSError as error:
        raise mount_errors.TargetError(path, f"cannot be measured: {error.strerror}") from error
    unit_bytes = status.f_frsize
    inodes = Inodes(status.f_files, status.f_files - status.f_ffree, status.f_favail)
    return Usage(
        total_bytes=status.f_blocks * unit_bytes,
        used_bytes=(status.f_blocks - status.f_bfree) * unit_bytes,
        available_bytes=status.f_bavail * unit_bytes,
        inodes=inodes if status.f_files else None,
    )


def device_size_bytes(kernel: Kernel, device: str) -> int:
    """The size of a block device in bytes; `device` may be the path where it is published.

    Raises DeviceMissing if there is no usable block device at the path.
    """
    try:
        return kernel.device_size_bytes(device)
    except OSError as error:
        raise mount_errors.DeviceMissing(device, str(error.strerror)) from error


class Kind(enum.Enum):
    """A kind of problem of a file system.

    Each kind has its meaning, as a sentence, and says whether a check and a new mount may repair
    the problem.
    """

    READ_ONLY = "it takes no writes", True
    SILENT = "it does not answer", True
    ERRORS = "it has met errors in what it keeps", True
    MEDIUM_ERRORS = "its disk has failed it", False

    def __init__(self, meaning: str, is_mended_by_mount: bool) -> None:
        self.meaning = meaning
        self.is_mended_by_mount = is_mended_by_mount


@dataclass(frozen=True)
class Problem:
    """A problem of a file system; `message` says what is wrong and what to do."""

    kind: Kind
    message: str


def problems(kernel: Kernel, mounts: table.Table, mount: Mount) -> Iterator[Problem]:
    """Yield the problems of a mounted file system, by the mount table and the kernel's counters."""
    title = f"the {mount.fs_type} on {mount.source}"
    # "rw" in any mount's options shows that the superblock was once writable. If it takes no writes
    # now, an error has turned it read-only.
    if mount.takes_no_writes and any(
        "rw" in mount_of_device.options for mount_of_device in mounts.of_device(mount.device)
    ):
        yield Problem(
            Kind.READ_ONLY,
            f"{title} turned read-only, as after an error; see the kernel log (journalctl -k), stop"
            " the workload, and have the volume unstaged and staged again",
        )
    try:
        counters = kernel.error_counters(mount.fs_type, mount.device)
        kernel.lstat(mount.path)  # EIO from an xfs that was shut down (xfs_vn_getattr)
    except OSError as error:
        yield Problem(
            Kind.SILENT,
            f"{title} does not answer: {error.strerror}; see whether its disk is there and the"
            " kernel log (journalctl -k)",
        )
        return
    if counter_texts := [f"{name} {count}" for name, count in counters.items() if count]:
        file_system = filesystem.supported(mount.fs_type)
        yield Problem(
            Kind.MEDIUM_ERRORS if file_system.errors_of_medium else Kind.ERRORS,
            f"{title} has met errors ({', '.join(counter_texts)}); see the kernel log"
            f" (journalctl -k), back the data up, {file_system.error_remedy}",
        )


def is_over_when_mounted_anew(kernel: Kernel, mounts: table.Table, mount: Mount) -> bool:
    """Whether a mounted file system has a problem that a check and a new mount may repair."""
    problems_now = problems(kernel, mounts, mount)
    return any(problem.kind.is_mended_by_mount for problem in problems_now)
