"""Whether a block device is vacant: nothing is on it, in it or at it, so that it may be taken.

Asked of the kernel and of the device itself, never of udev's database.
"""

from mount import errors, filesystem, table
from mount.filesystem import Run
from mount.syscalls import Kernel


def require_unused(kernel: Kernel, device: str) -> None:
    """Nobody uses the device, and it can be written; raises NotVacant. Starts no process."""
    try:
        number = kernel.device_number(device)
    except FileNotFoundError:
        raise errors.NotVacant(device, "is not there", "attach it, or correct its name") from None
    except OSError as error:
        why = f"is not a usable block device ({error.strerror})"
        raise errors.NotVacant(device, why, "correct its name") from None
    if kernel.device_is_read_only(device):
        raise errors.NotVacant(device, "is read-only", "see `blockdev --getro`")
    if partitions := kernel.device_partitions(device):
        found = f"has partitions ({', '.join(partitions)})"
        raise errors.NotVacant(device, found, f"name one of them; or {_emptied(device)}")
    if mounts := table.read(kernel).of_device(number):
        found = f"is mounted at {', '.join(one.path for one in mounts)}"
        raise errors.NotVacant(device, found, "name another")
    if kernel.device_is_swap(device):
        raise errors.NotVacant(device, "is used as swap", "name another")
    if holders := kernel.device_holders(device):
        found = f"is a part of {', '.join(holders)}"
        raise errors.NotVacant(device, found, "name another, or that one; `lsblk` shows both")
    if kernel.device_is_held(device):
        raise errors.NotVacant(device, "is in exclusive use by another process", "see `fuser -v`")


def require_blank(run: Run, device: str) -> None:
    """No signature is on the device: one command. Raises NotVacant, ProbeFailed."""
    if (found := filesystem.probe(run, device)) is not None:
        raise errors.NotVacant(device, f"holds {found}", _emptied(device))


def _emptied(device: str) -> str:
    return f"if nothing on it is needed, empty it with `wipefs --all {device}`"
