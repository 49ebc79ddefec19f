"""Groups that Carver makes where they are not there: of devices, or on a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import errors
from agent.config import tables, values
from agent.config.classes import DeviceClass


@dataclass(frozen=True)
class BackingFile:
    """A sparse file that a loop device turns into the one disk of a group.

    Without a size it is made half as large as what is free in its file system.
    """

    path: Path
    size_bytes: int | None = None


@dataclass(frozen=True)
class Foundation:
    """What a group is made of where it is not there yet: block devices, or a file.

    Those of its devices that are `fast` are for caches, whether or not Carver made the group.
    """

    group: str
    devices: tuple[str, ...] = ()
    file: BackingFile | None = None
    fast: tuple[str, ...] = ()


GROUP_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "name": values.parse_lvm_name,
    "devices": values.parse_device_names,
    "fast": values.parse_device_names,
    "file": values.parse_absolute_path,
    "file_size": values.parse_file_size,
}


def parse(source: str, listed: object, classes: Sequence[DeviceClass]) -> tuple[Foundation, ...]:
    """The tables [[groups]], each of a group that some class uses; raises BadConfig."""
    used = {one.group for one in classes}
    found: list[Foundation] = []
    places: set[str] = set()
    for where, table in tables.read(source, "groups", listed, GROUP_KEYS, ("name",)):
        one = _foundation(source, where, table)
        if one.group not in used:
            raise errors.BadConfig(source, f"{where}.name", f"no class uses the group {one.group}")
        if one.group in {other.group for other in found}:
            raise errors.BadConfig(source, f"{where}.name", f"{one.group} is listed twice")
        for place in (str(one.file.path),) if one.file else one.devices:
            if place in places:
                raise errors.BadConfig(source, where, f"{place} is listed twice")
            places.add(place)
        found.append(one)
    return tuple(found)


def _foundation(source: str, where: str, table: Mapping[str, Any]) -> Foundation:
    devices, file = table.get("devices", ()), table.get("file")
    if bool(devices) == bool(file):
        raise errors.BadConfig(source, where, "has either devices or a file")
    if file is None and "file_size" in table:
        raise errors.BadConfig(source, f"{where}.file_size", "is for a group on a file")
    fast = table.get("fast", ())
    if not set(fast) <= set(devices):
        raise errors.BadConfig(source, f"{where}.fast", "are some of the group's `devices`")
    backing = BackingFile(file, table.get("file_size")) if file else None
    return Foundation(table["name"], tuple(devices), backing, tuple(fast))
