"""A volume whose device is open only for a moment is not in use."""

from types import SimpleNamespace
from typing import Any

import pytest
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel

from agent.core import errors, trace
from agent.core.trace import WAIT, Trace
from agent.volumes import backing, users
from lvm.active_devices import Device

VOLUME: Any = SimpleNamespace(
    id="data@00000000/vol-a", backing=backing.of_id("data@00000000/vol-a"), is_encrypted=False
)


class Known:
    """Of a volume that is not mounted, and whose device is open at so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def device(self, _volume: object) -> None:
        return None

    def is_closed(self, _volume: object) -> bool:
        return False

    def is_open(self, _volume: object) -> bool:
        self.looks -= 1
        return self.looks >= 0


def require_unused(looks: int) -> None:
    known: Any = Known(looks)
    users.require_unused(FakeKernel(FakeDevices()), known, VOLUME)


def test_a_device_that_udev_looks_at_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "OPEN_SECONDS", 60.0)
    monkeypatch.setattr(users, "_LOOK_SECONDS", 0.0)
    made = Trace("DeleteVolume", VOLUME.id)
    with trace.within(made):
        require_unused(looks=0)
        assert WAIT not in made.by_kind
        require_unused(looks=5)
        assert WAIT in made.by_kind


def test_a_device_that_stays_open_is_in_use() -> None:
    with pytest.raises(errors.VolumeInUse, match="a process has its device open"):
        require_unused(looks=1000)


class Standing(Known):
    """An activator that has an active volume's device, which stays open."""

    def __init__(self, path: str) -> None:
        super().__init__(1000)
        self.path = path

    def device(self, _volume: object) -> Any:
        return Device(self.path, (253, 0), "", "")


def test_what_stands_on_a_device_is_named_up_to_the_top() -> None:
    devices = FakeDevices()
    volume = devices.add("/dev/mapper/data-vol--db", 4 << 20)
    kernel = FakeKernel(devices)
    kernel.loop_configure("/dev/loop3", volume.path, read_only=False, direct_io=True, name="x")
    guests = devices.add("/dev/mapper/vg0-root", 4 << 20)
    devices.get("/dev/loop3").holders.append(guests.node.removeprefix("/dev/"))
    known: Any = Standing(volume.path)
    with pytest.raises(errors.VolumeInUse) as raised:
        users.require_unused(kernel, known, VOLUME)
    for word in ("/dev/loop3, /dev/mapper/vg0-root", "A guest's volume group", "operations.md"):
        assert word in str(raised.value)


def test_a_device_on_which_nothing_stands_is_held_by_a_process() -> None:
    devices = FakeDevices()
    volume = devices.add("/dev/mapper/data-vol--db", 4 << 20)
    known: Any = Standing(volume.path)
    with pytest.raises(errors.VolumeInUse, match="has its device open"):
        users.require_unused(FakeKernel(devices), known, VOLUME)
