"""That a disk changed, as udev tells it. The only module that imports pyudev.

Every write of LVM's metadata closes the disk, and udev's watch rule answers with a "change" event
(udev(7), OPTIONS+="watch"); a disk that goes or comes has events of its own.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyudev

_log = logging.getLogger(__name__)

_UDEV_CONTROL = Path("/run/udev/control")
# Logical volumes come and go with Carver's own calls, and say nothing of the disks under them.
_OF_A_VOLUME = "LVM-"


@dataclass(frozen=True)
class DiskEvent:
    """A disk came, went or was written to, or may have.

    `written` is the path of one that is still there, and may have other contents.
    """

    written: str | None = None


class DiskEvents:
    """Events of block devices that are not logical volumes. For one thread: libudev(3)."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        # The nodes that were logical volumes when an event told what they are.
        self._volumes: set[str] = set()

    @classmethod
    def open(cls, control: Path = _UDEV_CONTROL) -> Self | None:
        """Listen from now on; None where udev does not run, as in many a container.

        Once in a process: to find its library, pyudev starts ldconfig (ctypes.util.find_library).
        """
        if not control.exists():
            return None
        try:
            monitor = pyudev.Monitor.from_netlink(pyudev.Context())
            monitor.filter_by("block")
            monitor.start()
        except (ImportError, OSError) as error:
            _log.warning("no events of udev's: %s", error)
            return None
        return cls(monitor)

    def wait(self, seconds: float) -> DiskEvent | None:
        """Wait for an event, so long at most; None where no disk changed."""
        try:
            device = self._monitor.poll(timeout=seconds)
        except OSError:
            return DiskEvent()  # more events than the socket could hold
        if device is None or self._is_volume(device):
            return None
        return DiskEvent(device.device_node if device.action == "change" else None)

    def _is_volume(self, device: Any) -> bool:
        """Whether it is a logical volume, or tells nothing of a disk yet.

        A device of device-mapper can be read from its first "change" on, and until then bears no
        UUID (10-dm.rules); of the two events with which it goes only the first one does.
        """
        if device.get("DM_UUID", "").startswith(_OF_A_VOLUME):
            self._volumes.add(device.device_node)
            return True
        if device.action == "add" and device.sys_name.startswith("dm-"):
            return True
        was_volume = device.device_node in self._volumes
        self._volumes.discard(device.device_node)
        return was_volume and device.action == "remove"
