"""Devices of active logical volumes, found in sysfs without asking lvm2.

The only module that imports pyudev.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyudev

from lvm import names

_SYS_BLOCK = Path("/sys/block")
_MAPPER = Path("/dev/mapper")
# include/linux/device-mapper uuid that lvm2 gives: "LVM-", the group's UUID, the volume's.
_UUID_PREFIX = "LVM-"
_UUID_LENGTH = 32


@dataclass(frozen=True)
class Device:
    """The block device of an active logical volume."""

    path: str
    number: tuple[int, int]
    group_uuid: str


class Devices(Protocol):
    """Find the device of an active volume; the seam at which tests stand in for sysfs."""

    def find(self, group: str, name: str) -> Device | None:
        """The device, or None where the volume is not active on this node (or not there)."""
        ...


class KernelDevices:
    """The real `Devices`."""

    def find(self, group: str, name: str) -> Device | None:
        """The device, or None where the volume is not active on this node (or not there)."""
        dm_name = names.device(group, name)
        return self._by_node(dm_name) or self._by_search(dm_name)

    def _by_node(self, dm_name: str) -> Device | None:
        """Through the node that udev, or lvm2 where there is no udev, made in /dev/mapper."""
        path = _MAPPER / dm_name
        try:
            status = path.stat()
            if not stat.S_ISBLK(status.st_mode):
                return None
            found = pyudev.Devices.from_device_number(_context(), "block", status.st_rdev)
        except (FileNotFoundError, pyudev.DeviceNotFoundError):
            return None
        return _device(found, dm_name, str(path))

    def _by_search(self, dm_name: str) -> Device | None:
        """Through sysfs, where the node in /dev/mapper is missing or is another's."""
        context = _context()
        for directory in _SYS_BLOCK.glob("dm-*"):
            try:
                found = pyudev.Devices.from_path(context, str(directory))
                device = _device(found, dm_name, found.device_node)
            except (pyudev.DeviceNotFoundError, KeyError):
                continue  # removed while we looked
            if device is not None:
                return device
        return None


def _context() -> pyudev.Context:
    """A context of the caller's own: libudev(3) allows no two threads in one."""
    return pyudev.Context()


def _device(found: pyudev.Device, dm_name: str, path: str) -> Device | None:
    try:
        if found.attributes.asstring("dm/name") != dm_name:
            return None
        uuid = found.attributes.asstring("dm/uuid")
    except KeyError:
        return None  # not a device-mapper device
    if not uuid.startswith(_UUID_PREFIX):
        return None
    number = found.device_number
    group_uuid = uuid.removeprefix(_UUID_PREFIX)[:_UUID_LENGTH]
    return Device(path, (os.major(number), os.minor(number)), group_uuid)
