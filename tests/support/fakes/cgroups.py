"""Cgroups in memory."""

from collections.abc import Mapping
from pathlib import Path

from fakes.devices import FakeDevices

from mount import mount_errors
from mount.cgroups import Cgroups, IoCount, IoMax
from mount.table import DeviceNumber


class FakeCgroups(Cgroups):
    """Stands in for Cgroups: one cgroup, whose limits the kernel forgets with their devices.

    `missing`: why there is none.
    """

    def __init__(self, devices: FakeDevices) -> None:
        super().__init__()
        self.missing = ""
        self.done: dict[DeviceNumber, IoCount] = {}
        self._devices, self._limits = devices, dict[DeviceNumber, IoMax]()
        self._given: Mapping[DeviceNumber, IoMax] = {}

    def prepare(self) -> Path:
        if self.missing:
            raise mount_errors.NoCgroup(self.missing)
        return Path("/sys/fs/cgroup/kubepods")

    def limits(self) -> Mapping[DeviceNumber, IoMax]:
        there = {one.number for one in self._devices}
        self._limits = {number: one for number, one in self._limits.items() if number in there}
        if self._limits != self._given:
            self._given = dict(self._limits)
        return self._given

    def limit(self, number: DeviceNumber, io_max: IoMax) -> None:
        self.prepare()
        self._limits.pop(number, None)
        if io_max and number in {one.number for one in self._devices}:
            self._limits[number] = io_max

    def counts(self) -> Mapping[DeviceNumber, IoCount]:
        return self.done

    def reset(self) -> None:
        """What systemd does when it reloads: the controller is off, and with it all limits."""
        self._limits.clear()
