"""Who keeps a mount busy: the processes that have something open in it.

The only module that imports psutil. It reads links and mount tables in /proc and looks at no file
itself, since a file system that does not answer would hold it up.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from mount import table
from mount.syscalls import Kernel
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
