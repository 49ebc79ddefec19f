"""Events of udev about changed disks. The only module that imports pyudev.

After a write of LVM's metadata lvm2 closes the disk, and udev's watch rule sends a "change" event
(udev(7), OPTIONS+="watch"). A disk that is attached or removed has an "add" or "remove" event.
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
# Prefix of the device-mapper UUIDs of logical volumes. Events of logical volumes are ignored, as
# Carver's own commands cause them, and as they say nothing about disks.
_OF_A_VOLUME = "LVM-"
# Time, in seconds, by which a call of `wait` exceeds its time limit at most, while events come
# without a pause. The next call reads the other events.
_MOST_SECONDS = 2.0


@dataclass(frozen=True)
class DiskEvent:
    """An attachment or removal of a disk, or a write to a disk, or the loss of such an event."""

    # The path of a disk that was written to and is still attached; None for any other event.
    written: str | None = None


class DiskEvents:
    """Listens to udev's events of block devices that are not logical volumes.

    An object is for one thread, as libudev(3) requires. `listen` starts to listen and returns
    pyudev's monitor, or raises OSError.
    """

    def __init__(self, listen: Callable[[], Any]) -> None:
        self._listen = listen
        # pyudev's monitor; None while listening fails.
        self._monitor: Any = listen()
        # The device nodes of logical volumes, by the events so far.
        self._volumes: set[str] = set()

    @classmethod
    def open(cls, control: Path = _UDEV_CONTROL) -> Self | None:
        """Start to listen; None where udev does not run, as in many a container.

        Call this once in a process: to find its library, pyudev starts ldconfig
        (ctypes.util.find_library).
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
        """Wait for the next event, `seconds` at most; return all present events without repeats.

        Where events were lost, one event without a path stands for a change of any disk.
        """
        if self._monitor is None:
            time.sleep(seconds)
            return self._listen_anew()
        end_monotonic_seconds = time.monotonic() + seconds + _MOST_SECONDS
        events: set[DiskEvent] = set()
        try:
            device = self._monitor.poll(timeout=seconds)
            while device is not None:
                if not self._is_volume(device):
                    events.add(DiskEvent(device.device_node if device.action == "change" else None))
                device = (
                    self._monitor.poll(timeout=0)
                    if time.monotonic() < end_monotonic_seconds
                    else None
                )
        except OSError as error:
            _log.warning("events of udev's are lost, so every disk is looked at: %s", error)
            return self._listen_anew()
        return frozenset(events)

    def _listen_anew(self) -> frozenset[DiskEvent]:
        """Listen by a new socket, after an error such as an overflow (ENOBUFS).

        pyudev would never clear that error from the old socket. Events between the sockets are
        lost, so the result says that any disk may have changed. It is empty if a second attempt to
        listen fails, too.
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
        """Whether an event is about a logical volume, or about a device that is not usable yet.

        A device-mapper device has no UUID before its first "change" event, from which on it can be
        read (10-dm.rules). Of its last two events only the first has the UUID, so the nodes of
        logical volumes are remembered.
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
