"""Which processes use a mount, and whether a block device is in use. Imports psutil."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from mount import errors, filesystem, table
from mount.kernel import Kernel
from mount.table import DeviceNumber

_PROC = Path("/proc")
# Working directory, root and program; open files; what is mapped into memory (proc(5)).
_SINGLE = ("cwd", "root", "exe")
_MANY = ("fd", "map_files")


def of(kernel: Kernel, place: str) -> tuple[str, ...]:
    """The processes that use the topmost mount at a place, each as `name (pid)`.

    A mount that was propagated into a container is found by what it shows, for there it lies at
    another path. A process that ends meanwhile is left out.
    """
    stack = table.Table(kernel.mountinfo()).at(place)
    shown = (stack[-1].device, stack[-1].root) if stack else None
    own = os.readlink(_PROC / "self/ns/mnt")  # noqa: PTH115
    found = []
    for process in psutil.process_iter(["name"]):
        directory = _PROC / str(process.pid)
        with suppress(OSError, ValueError):
            is_here = os.readlink(directory / "ns/mnt") == own  # noqa: PTH115
            places = {place} if is_here else _showing(directory, shown)
            if places and any(_is_in(link, places) for link in _links(directory)):
                found.append(f"{process.info['name']} ({process.pid})")
    return tuple(found)


def _showing(process: Path, shown: tuple[DeviceNumber, str] | None) -> set[str]:
    """Where a process in another mount namespace sees the same part of the same file system."""
    text = (process / "mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    if shown is None:
        return set()
    device, root = shown
    return {one.path for one in table.Table(text).of_device(device) if one.root == root}


def _links(process: Path) -> Iterator[str]:
    several = (one for name in _MANY for one in _listed(process / name))
    for link in (*(process / name for name in _SINGLE), *several):
        with suppress(OSError):
            yield os.readlink(link)  # noqa: PTH115 - a path library would normalise what it says


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _is_in(link: str, places: set[str]) -> bool:
    return any(link == place or link.startswith(place.rstrip("/") + "/") for place in places)


def require_unused(kernel: Kernel, device: str) -> None:
    """Require a device that is not in use and can be written; raises NotVacant. No process."""
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


def require_blank(kernel: Kernel, device: str) -> None:
    """Require a device without any signature. Raises NotVacant, ProbeFailed."""
    if (found := filesystem.probe(kernel, device)) is not None:
        raise errors.NotVacant(device, f"holds {found}", _emptied(device))


def _emptied(device: str) -> str:
    return f"if nothing on it is needed, empty it with `wipefs --all {device}`"
