"""That a disk changed, as udev tells it. The only module that imports pyudev.

Every write of LVM's metadata closes the disk, and udev's watch rule answers with a "change" event
(udev(7), OPTIONS+="watch"); a disk that goes or comes has events of its own.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyudev

_log = logging.getLogger(__name__)

_UDEV_CONTROL = Path("/run/udev/control")
# Logical volumes come and go with Carver's own calls, and say nothing of the disks under them.
_OF_A_VOLUME = "LVM-"
# What comes without end is left to the next wait, for who waits has other work.
_MOST_SECONDS = 2.0


@dataclass(frozen=True)
class DiskEvent:
    """A disk came, went or was written to, or may have.

    `written` is the path of one that is still there, and may have other contents.
    """

    written: str | None = None


class DiskEvents:
    """Events of block devices that are not logical volumes. For one thread: libudev(3).

    `listen` begins to listen, and returns pyudev's monitor; it raises OSError.
    """

    def __init__(self, listen: Callable[[], Any]) -> None:
        self._listen = listen
        # None while there is no listener.
        self._monitor: Any = listen()
        # The nodes of logical volumes, by the events about them.
        self._volumes: set[str] = set()

    @classmethod
    def open(cls, control: Path = _UDEV_CONTROL) -> Self | None:
        """Listen from now on; None where udev does not run, as in many a container.

        Once in a process: to find its library, pyudev starts ldconfig (ctypes.util.find_library).
        """
        if not control.exists():
            return None
        try:
            context = pyudev.Context()
            return cls(lambda: _listening(context))
        except (ImportError, OSError) as error:
            _log.warning("no events of udev's: %s", error)
            return None

    def wait(self, seconds: float) -> frozenset[DiskEvent]:
        """Wait for events, so long at most; all that are there by then, each once.

        Where some were lost it is one that tells of no disk by its path: any may have changed.
        """
        if self._monitor is None:
            time.sleep(seconds)
            return self._listen_anew()
        end = time.monotonic() + seconds + _MOST_SECONDS
        found: set[DiskEvent] = set()
        try:
            device = self._monitor.poll(timeout=seconds)
            while device is not None:
                if not self._is_volume(device):
                    found.add(DiskEvent(device.device_node if device.action == "change" else None))
                device = self._monitor.poll(timeout=0) if time.monotonic() < end else None
        except OSError as error:
            _log.warning("events of udev's are lost, so every disk is looked at: %s", error)
            return self._listen_anew()
        return frozenset(found)

    def _listen_anew(self) -> frozenset[DiskEvent]:
        """Have another socket: of one that overflowed (ENOBUFS) pyudev never reads the error.

        It reports nothing of what was lost before, so all disks must be scanned.
        """
        was_listening, self._monitor = self._monitor is not None, None
        try:
            self._monitor = self._listen()
        except OSError as error:
            if was_listening:
                _log.warning("no events of udev's until that can be mended: %s", error)
                return frozenset({DiskEvent()})
            return frozenset()
        return frozenset({DiskEvent()})

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


def _listening(context: Any) -> Any:
    monitor = pyudev.Monitor.from_netlink(context)
    monitor.filter_by("block")
    monitor.start()
    return monitor
