"""Loop devices: a file as a block device, attached once however often it is asked for (loop(4)).

The file may be a block device itself: a read-only loop device is the one way to hand out a device
that cannot be written, since a read-only bind of a node only protects the node.
"""

import errno
import os
import stat
import time

from mount import errors
from mount.syscalls import Kernel, LoopStatus
from mount.table import DeviceNumber

_ATTEMPTS = 16
_PATIENCE_SECONDS = 3
_LOOKS_A_SECOND = 50


def find(kernel: Kernel, file: str) -> str | None:
    """The loop device attached to `file`, recognised by what it is, not by its name."""
    try:
        wanted = kernel.lstat(kernel.real_path(file))
    except OSError as error:
        raise errors.LoopFailed(file, str(error.strerror)) from error
    for device in kernel.loop_devices():
        status = _status(kernel, device)
        if status and _is_on(status, wanted) and not status.leaving:
            return device
    return None


def over(kernel: Kernel, number: DeviceNumber) -> tuple[str, ...]:
    """The read-only loop devices attached to the block device (major, minor).

    A writable one is not of Carver's making: whoever has it keeps it.
    """
    wanted = os.makedev(*number)
    attached = ((device, _status(kernel, device)) for device in kernel.loop_devices())
    return tuple(
        device
        for device, status in attached
        if status and status.read_only and status.backing_device == wanted
    )


def attach(kernel: Kernel, file: str, read_only: bool = False) -> str:
    """The path of a loop device on `file`; the one that is there already, or a new one.

    Direct I/O is used where the file's file system can do it. Raises LoopFailed.
    """
    if device := find(kernel, file):
        return _checked(kernel, file, device, read_only)
    device = _configure(kernel, file, read_only)
    # Another process may have attached the same file between our look and now. Two devices on one
    # file corrupt it, so the lower number stays, and both sides find the same one.
    first = find(kernel, file)
    if first is not None and first != device:
        detach(kernel, device)
        return _checked(kernel, file, first, read_only)
    return device


def detach(kernel: Kernel, device: str) -> None:
    """Have nothing attached to the loop device. Raises Busy, LoopFailed."""
    if _status(kernel, device) is None:
        return
    try:
        # LOOP_CLR_FD on a held device answers 0 and marks it to go with its last user: look first.
        if kernel.device_is_held(device):
            raise errors.Busy(device)
        kernel.loop_clear(device)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise errors.LoopFailed(device, str(error.strerror)) from error
    # Someone who has it open without holding it delays it just the same: udev looks at a device for
    # a moment after each change of it.
    for _ in range(_PATIENCE_SECONDS * _LOOKS_A_SECOND):
        if _status(kernel, device) is None:
            return
        time.sleep(1 / _LOOKS_A_SECOND)
    raise errors.Busy(device)


def grow(kernel: Kernel, device: str) -> None:
    """Have the loop device as large as its file is now. Raises LoopFailed."""
    try:
        kernel.loop_set_capacity(device)
    except OSError as error:
        raise errors.LoopFailed(device, str(error.strerror)) from error


def _is_on(status: LoopStatus, file: os.stat_result) -> bool:
    if stat.S_ISBLK(file.st_mode):
        return status.backing_device == file.st_rdev
    return (status.device, status.inode) == (file.st_dev, file.st_ino)


def _status(kernel: Kernel, device: str) -> LoopStatus | None:
    """None if nothing is attached, also if it was detached since it was listed."""
    try:
        return kernel.loop_status(device)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return None
        raise errors.LoopFailed(device, str(error.strerror)) from error


def _checked(kernel: Kernel, file: str, device: str, read_only: bool) -> str:
    status = _status(kernel, device)
    if status is None or status.read_only != read_only:
        found = "detached meanwhile" if status is None else "attached with other access"
        raise errors.LoopFailed(file, f"{device} is {found}; detach it first, then try again")
    return device


def _configure(kernel: Kernel, file: str, read_only: bool) -> str:
    direct_io = True
    for _ in range(_ATTEMPTS):
        try:
            device = kernel.loop_free()
            kernel.loop_configure(device, file, read_only=read_only, direct_io=direct_io)
        except OSError as error:
            if error.errno == errno.EBUSY:
                continue  # someone else took the free one
            if error.errno == errno.EINVAL and direct_io:
                direct_io = False  # a file system without direct I/O, such as tmpfs
                continue
            raise errors.LoopFailed(file, str(error.strerror)) from error
        return device
    raise errors.LoopFailed(file, f"{_ATTEMPTS} free devices in a row were taken by others")
