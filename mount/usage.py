"""How full a volume is: bytes and inodes, by statvfs(3), as df counts them. No process, no walk."""

from dataclasses import dataclass

from mount import errors
from mount.syscalls import Kernel


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
