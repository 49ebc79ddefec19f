"""What is wrong with a file system that is mounted: read from the kernel, without a process.

Each finding is a sentence that says what is wrong and what to do.
"""

from mount import table
from mount.syscalls import Kernel
from mount.table import Mount


def problems(kernel: Kernel, mounts: table.Table, mount: Mount) -> tuple[str, ...]:
    """What the kernel knows against a file system, seen through one of its mounts; else nothing."""
    found = []
    if _turned_read_only(mounts, mount):
        found.append(
            f"the {mount.fs_type} on {mount.source} turned read-only after an error; see the kernel"
            " log (journalctl -k), stop the workload, and have the volume unstaged and staged again"
        )
    try:
        counters = kernel.error_counters(mount.fs_type, mount.device)
        kernel.lstat(mount.path)  # xfs answers EIO here once it was shut down (xfs_vn_getattr)
    except OSError as error:
        found.append(
            f"the {mount.fs_type} on {mount.source} does not answer: {error.strerror}; see whether"
            " its disk is there and the kernel log (journalctl -k)"
        )
    else:
        counted = [f"{name} {count}" for name, count in counters.items() if count]
        if counted:
            found.append(
                f"the {mount.fs_type} on {mount.source} has met errors ({', '.join(counted)}); see"
                f" the kernel log (journalctl -k), back the data up, {_REMEDIES[mount.fs_type]}"
            )
    return tuple(found)


_REMEDIES = {
    "ext4": "then have the volume unstaged and staged again, which checks it",
    "btrfs": "then scrub it, and reset the counters with `btrfs device stats --reset`",
}


def _turned_read_only(mounts: table.Table, mount: Mount) -> bool:
    """Whether the superblock is read-only though one of its mounts was made for writing."""
    return "ro" in mount.super_options and any(
        "rw" in one.options for one in mounts.of_device(mount.device)
    )
