"""Loop devices: a file as a block device, attached once however often it is asked for (loop(4)).

The file may be a block device itself: a read-only loop device is the one way to hand out a device
that cannot be written, since a read-only bind of a node only protects the node.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from mount import errors
from mount.block_devices import LoopStatus
from mount.kernel import Kernel
from mount.table import DeviceNumber

# What tells our read-only devices from everyone else's: lo_file_name is free text, which the kernel
# tells back for as long as the device is attached, also to the next process.
_MARK = "carver:"
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
    """Carver's read-only loop devices over the block device (major, minor).

    All others belong to their makers: kubelet has one of its own over each device that a pod
    uses, unread, which keeps the device from going away (volume_path_handler_linux.go).
    """
    return tuple(device for device, _ in _own(kernel, number))


def standing_on(kernel: Kernel, device: str) -> list[str]:
    """Everything that stands on a block device, at any height: device-mapper, MD, loop devices.

    Each by the name that people know it by, a device below those on it. No process.
    """
    found: list[str] = []
    left = [device]
    while left:
        below = left.pop(0)
        wanted = os.makedev(*kernel.device_number(below))
        over_it = [f"/dev/{one}" for one in kernel.device_holders(below)]
        for one in kernel.loop_devices():
            status = _status(kernel, one)
            if status is not None and status.backing_device == wanted:
                over_it.append(one)
        for one in over_it:
            name = kernel.device_title(one)
            if name not in found:
                found.append(name)
                left.append(one)
    return found


def attach(kernel: Kernel, file: str) -> str:
    """The path of a loop device on `file`; the one that is there already, or a new one.

    Direct I/O is used where the file's file system can do it. Raises LoopFailed.
    """
    if device := find(kernel, file):
        return _writable(kernel, file, device)
    device = _configure(kernel, file, read_only=False, name=file)
    # Another process may have attached the same file between our look and now. Two devices on one
    # file corrupt it, so the lower number stays, and both sides find the same one.
    first = find(kernel, file)
    if first is not None and first != device:
        detach(kernel, device)
        return _writable(kernel, file, first)
    return device


def attach_read_only(kernel: Kernel, device: str) -> str:
    """The path of Carver's read-only loop device over a block device; one there is, or a new one.

    One call at a time asks for a device. Raises LoopFailed.
    """
    try:
        number, blocks = kernel.device_number(device), kernel.logical_block_bytes(device)
    except OSError as error:
        raise errors.LoopFailed(device, str(error.strerror)) from error
    for one, status in _own(kernel, number):
        if not status.leaving:
            return one
    name = _MARK + device
    return _configure(kernel, device, read_only=True, name=name, block_bytes=blocks)


def detach(
    kernel: Kernel,
    device: str,
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Have nothing attached to the loop device. Raises Busy, LoopFailed.

    Where it has to wait for a reader of the device, it does so inside `waiting`.
    """
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
    if _status(kernel, device) is None:
        return
    with waiting():
        for _ in range(_PATIENCE_SECONDS * _LOOKS_A_SECOND):
            time.sleep(1 / _LOOKS_A_SECOND)
            if _status(kernel, device) is None:
                return
    raise errors.Busy(device)


def grow(kernel: Kernel, device: str) -> None:
    """Have the loop device as large as its file is now. Raises LoopFailed."""
    try:
        kernel.loop_set_capacity(device)
    except OSError as error:
        raise errors.LoopFailed(device, str(error.strerror)) from error


def _own(kernel: Kernel, number: DeviceNumber) -> Iterator[tuple[str, LoopStatus]]:
    """Carver's read-only loop devices over a block device, in their order."""
    wanted = os.makedev(*number)
    for device in kernel.loop_devices():
        status = _status(kernel, device)
        if status is None or status.backing_device != wanted:
            continue
        if status.read_only and status.name.startswith(_MARK):
            yield device, status


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


def _writable(kernel: Kernel, file: str, device: str) -> str:
    status = _status(kernel, device)
    if status is None or status.read_only:
        found = "detached meanwhile" if status is None else "attached read-only"
        raise errors.LoopFailed(file, f"{device} is {found}; detach it first, then try again")
    return device


def _configure(
    kernel: Kernel, file: str, *, read_only: bool, name: str, block_bytes: int = 0
) -> str:
    direct_io = True
    for _ in range(_ATTEMPTS):
        try:
            device = kernel.loop_free()
            kernel.loop_configure(
                device,
                file,
                read_only=read_only,
                direct_io=direct_io,
                name=name,
                block_bytes=block_bytes,
            )
        except OSError as error:
            if error.errno == errno.EBUSY:
                continue  # someone else took the free one
            if error.errno == errno.EINVAL and direct_io:
                direct_io = False  # a file system without direct I/O, such as tmpfs
                continue
            raise errors.LoopFailed(file, str(error.strerror)) from error
        return device
    raise errors.LoopFailed(file, f"{_ATTEMPTS} free devices in a row were taken by others")
