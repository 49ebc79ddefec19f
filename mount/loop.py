"""Loop devices (loop(4)): attach a file or block device once, however often that is requested.

A read-only loop device over a block device is the only way to give a pod a device that it cannot
write: a read-only bind of a device node protects the node, not the device.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from mount import mount_errors
from mount.block_devices import LoopStatus
from mount.kernel import Kernel
from mount.table import DeviceNumber

# Prefix of the name (lo_file_name) of Carver's read-only loop devices. The name is free text that
# the kernel keeps while the device is attached, so that a later process recognizes the device.
_MARK = "carver:"
# Number of attempts to attach a free loop device, as another process may take it first.
_ATTEMPTS = 16
# Time limit of a detach that other users of the device delay, in seconds.
_PATIENCE_SECONDS = 3
# Number of checks per second whether a loop device is detached.
_LOOKS_A_SECOND = 50


def find(kernel: Kernel, file: str) -> str | None:
    """The path of the loop device that is attached to `file`; None if there is none.

    A loop device that is being detached does not count. The device and inode of the file decide.
    Raises LoopFailed.
    """
    try:
        file_status = kernel.lstat(kernel.real_path(file))
    except OSError as error:
        raise mount_errors.LoopFailed(file, str(error.strerror)) from error
    for device in kernel.loop_devices():
        status = _status(kernel, device)
        if status and _is_on(status, file_status) and not status.leaving:
            return device
    return None


def loop_devices_over(kernel: Kernel, number: DeviceNumber) -> tuple[str, ...]:
    """The paths of Carver's read-only loop devices over the block device `number`.

    Other loop devices are left to their makers. For example, kubelet attaches one over each device
    that a pod uses, so that the device cannot be removed (volume_path_handler_linux.go).
    """
    return tuple(device for device, _ in _own_loop_devices(kernel, number))


def standing_on(kernel: Kernel, device: str) -> list[str]:
    """The devices that stand on a block device, directly or not: device-mapper, MD, loop devices.

    The devices are named as in messages (`device_title`), lower devices first. No program is run.
    """
    names: list[str] = []
    remaining = [device]
    while remaining:
        lower_device = remaining.pop(0)
        device_number = os.makedev(*kernel.device_number(lower_device))
        uppers = [f"/dev/{upper}" for upper in kernel.device_holders(lower_device)]
        for upper in kernel.loop_devices():
            status = _status(kernel, upper)
            if status is not None and status.backing_device == device_number:
                uppers.append(upper)
        for upper in uppers:
            name = kernel.device_title(upper)
            if name not in names:
                names.append(name)
                remaining.append(upper)
    return names


def attach(kernel: Kernel, file: str) -> str:
    """Attach a loop device to `file`, unless one is attached; returns its path. Raises LoopFailed.

    The loop device uses direct I/O if the file's file system supports that.
    """
    if device := find(kernel, file):
        return _writable(kernel, file, device)
    device = _configure(kernel, file, read_only=False, name=file)
    # Another process may have attached the same file meanwhile. Writes by two loop devices would
    # corrupt the file. So both processes search again, and keep the device with the lower number.
    first_device = find(kernel, file)
    if first_device is not None and first_device != device:
        detach(kernel, device)
        return _writable(kernel, file, first_device)
    return device


def attach_read_only(kernel: Kernel, device: str) -> str:
    """Attach Carver's read-only loop device over a block device, unless one is attached.

    Returns the loop device's path. Two calls for the same device must not run at the same time.
    Raises LoopFailed.
    """
    try:
        number, blocks = kernel.device_number(device), kernel.logical_block_bytes(device)
    except OSError as error:
        raise mount_errors.LoopFailed(device, str(error.strerror)) from error
    for existing, status in _own_loop_devices(kernel, number):
        if not status.leaving:
            return existing
    name = _MARK + device
    return _configure(kernel, device, read_only=True, name=name, block_bytes=blocks)


def detach(
    kernel: Kernel,
    device: str,
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Detach a loop device, if it is attached.

    Raises Busy if the device stays in use, LoopFailed if the kernel refuses.

    Where other users have the device open, this function waits within the context manager
    `waiting`, for three seconds at most.
    """
    if _status(kernel, device) is None:
        return
    try:
        # LOOP_CLR_FD succeeds for a device in use, and the kernel then detaches the device at its
        # last close: so the use is checked first.
        if kernel.device_is_held(device):
            raise mount_errors.Busy(device)
        kernel.loop_clear(device)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise mount_errors.LoopFailed(device, str(error.strerror)) from error
    # A process that only has the device open delays the detach as well: udev probes a device for a
    # moment after each change.
    if _status(kernel, device) is None:
        return
    with waiting():
        for _ in range(_PATIENCE_SECONDS * _LOOKS_A_SECOND):
            time.sleep(1 / _LOOKS_A_SECOND)
            if _status(kernel, device) is None:
                return
    raise mount_errors.Busy(device)


def grow(kernel: Kernel, device: str) -> None:
    """Give a loop device the present size of its file. Raises LoopFailed."""
    try:
        kernel.loop_set_capacity(device)
    except OSError as error:
        raise mount_errors.LoopFailed(device, str(error.strerror)) from error


def _own_loop_devices(kernel: Kernel, number: DeviceNumber) -> Iterator[tuple[str, LoopStatus]]:
    """Yield Carver's read-only loop devices over a block device, with their status."""
    device_number = os.makedev(*number)
    for device in kernel.loop_devices():
        status = _status(kernel, device)
        if status is None or status.backing_device != device_number:
            continue
        if status.read_only and status.name.startswith(_MARK):
            yield device, status


def _is_on(status: LoopStatus, file: os.stat_result) -> bool:
    if stat.S_ISBLK(file.st_mode):
        return status.backing_device == file.st_rdev
    return (status.device, status.inode) == (file.st_dev, file.st_ino)


def _status(kernel: Kernel, device: str) -> LoopStatus | None:
    """The status of a loop device; None if no file is attached to the device now."""
    try:
        return kernel.loop_status(device)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return None
        raise mount_errors.LoopFailed(device, str(error.strerror)) from error


def _writable(kernel: Kernel, file: str, device: str) -> str:
    status = _status(kernel, device)
    if status is None or status.read_only:
        state = "detached meanwhile" if status is None else "attached read-only"
        raise mount_errors.LoopFailed(file, f"{device} is {state}; detach it first, then try again")
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
                continue  # another process took the free device
            if error.errno == errno.EINVAL and direct_io:
                direct_io = False  # a file system without direct I/O, such as tmpfs
                continue
            raise mount_errors.LoopFailed(file, str(error.strerror)) from error
        return device
    raise mount_errors.LoopFailed(file, f"{_ATTEMPTS} free devices in a row were taken by others")
