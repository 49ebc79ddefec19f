"""A stateful lvm2: groups, volumes, tags and devices in memory, spoken to in lvm2's own words.

What is not understood is an AssertionError: a command that the fake does not know must not pass.
tests/contract holds it to what the real one does.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fakes.devices import FakeDevices, Media

from lvm import names
from lvm.command import Result
from lvm.devices import Device

_UUID_GROUPS = (6, 4, 4, 4, 4, 4, 6)


@dataclass
class FakeDisk:
    """A physical volume."""

    name: str
    uuid: str
    extents: int
    missing: bool = False
    allocatable: bool = True


@dataclass
class FakeVolume:
    """A logical volume; `extents` by disk."""

    name: str
    uuid: str
    extents: dict[str, int]
    tags: set[str] = field(default_factory=set)
    active: bool = False
    autoactivation: bool = True
    health: str = ""
    # What is written on it: stays when it is deactivated.
    media: Media = field(default_factory=Media)

    @property
    def length(self) -> int:
        """Its extents on all disks."""
        return sum(self.extents.values())


@dataclass
class FakeGroup:
    """A volume group."""

    name: str
    uuid: str
    extent_size_bytes: int
    disks: list[FakeDisk]
    tags: set[str] = field(default_factory=set)
    volumes: dict[str, FakeVolume] = field(default_factory=dict)

    def free(self, disk: FakeDisk) -> int:
        """The extents of a disk that no volume has."""
        return disk.extents - sum(one.extents.get(disk.name, 0) for one in self.volumes.values())


class Failure(Exception):
    """An lvm2 command that ends with exit code 5 and a message."""


class FakeLvm:
    """The program `lvm`, and the devices that its volumes have while they are active."""

    def __init__(self, devices: FakeDevices) -> None:
        self.groups: dict[str, FakeGroup] = {}
        self._devices = devices
        self._serial = itertools.count(1)

    def add_group(
        self, name: str, disk_extents: Sequence[int] = (256,), extent_size_bytes: int = 4 << 20
    ) -> FakeGroup:
        """A group with so many extents on each of its disks."""
        disks = [
            FakeDisk(f"/dev/fake-{name}-{number}", self._uuid(), extents)
            for number, extents in enumerate(disk_extents)
        ]
        group = self.groups[name] = FakeGroup(name, self._uuid(), extent_size_bytes, disks)
        return group

    def find(self, group: str, name: str) -> Device | None:
        """The seam `lvm.devices.Devices`."""
        volume = self.groups[group].volumes.get(name) if group in self.groups else None
        if volume is None or not volume.active:
            return None
        device = self._devices.get(_node(group, name))
        uuid = self.groups[group].uuid.replace("-", "")
        return Device(device.path, (device.major, device.minor), uuid)

    def __call__(self, words: Sequence[str]) -> Result:
        """Carry out `lvm SUBCOMMAND …`."""
        arguments = _Arguments(words[2:])
        for option in ("--devices", "--config"):
            arguments.take(option)
        try:
            command = {
                "fullreport": self._fullreport,
                "vgcreate": self._vgcreate,
                "lvcreate": self._lvcreate,
                "lvchange": self._lvchange,
                "lvextend": self._lvextend,
                "lvremove": self._lvremove,
            }[words[1]]
        except KeyError:
            raise AssertionError(f"the fake does not know: {' '.join(words)}") from None
        try:
            output = command(arguments)
        except Failure as failure:
            return Result(5, "", f"  {failure}\n")
        arguments.require_empty(words)
        return Result(0, output, "")

    def _fullreport(self, arguments: "_Arguments") -> str:
        assert arguments.take("--reportformat") == "json"
        assert arguments.take("--units") == "b"
        assert arguments.flag("--nosuffix")
        columns = {}
        while part := arguments.take("--configreport"):
            columns[part] = arguments.take("--options").split(",")
        rows = [self._report(group) for group in self.groups.values()]
        chosen = [
            {
                part: [{key: row[key] for key in columns[part]} for row in rows_of_part]
                for part, rows_of_part in one.items()
            }
            for one in rows
        ]
        return json.dumps({"report": chosen})

    def _report(self, group: FakeGroup) -> dict[str, list[dict[str, str]]]:
        return {
            "vg": [
                {
                    "vg_name": group.name,
                    "vg_uuid": group.uuid,
                    "vg_extent_size": str(group.extent_size_bytes),
                    "vg_tags": ",".join(sorted(group.tags)),
                    "vg_missing_pv_count": str(sum(disk.missing for disk in group.disks)),
                }
            ],
            "pv": [
                {
                    "pv_name": "[unknown]" if disk.missing else disk.name,
                    "pv_uuid": disk.uuid,
                    "pv_pe_count": str(disk.extents),
                    "pv_pe_alloc_count": str(disk.extents - group.free(disk)),
                    "pv_missing": "missing" if disk.missing else "",
                    "pv_allocatable": "allocatable" if disk.allocatable else "",
                }
                for disk in group.disks
            ],
            "lv": [
                {
                    "lv_name": volume.name,
                    "lv_uuid": volume.uuid,
                    "lv_size": str(volume.length * group.extent_size_bytes),
                    "lv_tags": ",".join(sorted(volume.tags)),
                    "lv_active": "active" if volume.active else "",
                    "lv_device_open": "open" if self._is_open(group, volume) else "",
                    "lv_layout": "linear",
                    "pool_lv": "",
                    "origin": "",
                    "lv_health_status": volume.health,
                }
                for volume in group.volumes.values()
            ],
        }

    def _vgcreate(self, arguments: "_Arguments") -> str:
        assert arguments.flag("--yes")
        tags = set(arguments.take_all("--addtag"))
        name, *paths = arguments.rest()
        if name in self.groups:
            raise Failure(f"A volume group called {name} already exists.")
        extent = 4 << 20
        disks = []
        for path in paths:
            device = self._devices.get(path)
            # The first extent's worth holds the metadata, as with lvm2's default alignment.
            disks.append(FakeDisk(path, self._uuid(), (device.size_bytes - (1 << 20)) // extent))
        self.groups[name] = FakeGroup(name, self._uuid(), extent, disks, tags)
        return f'  Volume group "{name}" successfully created\n'

    def _lvcreate(self, arguments: "_Arguments") -> str:
        assert arguments.flag("--yes")
        assert (arguments.take("--wipesignatures"), arguments.take("--zero")) == ("y", "y")
        autoactivation = arguments.take("--setautoactivation") == "y"
        size, name = _bytes(arguments.take("--size")), arguments.take("--name")
        tags = set(arguments.take_all("--addtag"))
        (group_name,) = arguments.rest()
        group = self._group(group_name)
        if name in group.volumes:
            raise Failure(f'Logical Volume "{name}" already exists in volume group "{group_name}"')
        extents = -(-size // group.extent_size_bytes)
        volume = FakeVolume(name, self._uuid(), {}, tags, autoactivation=autoactivation)
        self._allocate(group, volume, extents)
        group.volumes[name] = volume
        self._activate(group, volume)
        return f'  Logical volume "{name}" created.\n'

    def _lvchange(self, arguments: "_Arguments") -> str:
        activate = arguments.take("--activate")
        arguments.flag("--ignoreactivationskip")
        removed, added = arguments.take_all("--deltag"), arguments.take_all("--addtag")
        group, volume = self._volume(arguments)
        volume.tags -= set(removed)
        volume.tags |= set(added)
        if activate:
            assert activate == "y"
            self._activate(group, volume)
        return ""

    def _lvextend(self, arguments: "_Arguments") -> str:
        size = _bytes(arguments.take("--size"))
        group, volume = self._volume(arguments)
        extents = -(-size // group.extent_size_bytes)
        if extents == volume.length:
            raise Failure(
                f"New size ({extents} extents) matches existing size ({extents} extents)."
            )
        assert extents > volume.length, "lvextend never shrinks"
        self._allocate(group, volume, extents - volume.length)
        if volume.active:
            self._devices.resize(
                _node(group.name, volume.name), volume.length * group.extent_size_bytes
            )
        return ""

    def _lvremove(self, arguments: "_Arguments") -> str:
        assert arguments.flag("--yes")
        group, volume = self._volume(arguments)
        if self._is_open(group, volume):
            raise Failure(f"Logical volume {group.name}/{volume.name} in use.")
        self.deactivate(group.name, volume.name)
        del group.volumes[volume.name]
        return ""

    def deactivate(self, group: str, name: str) -> None:
        """Take a volume's device away, as a reboot or an operator does."""
        volume = self.groups[group].volumes[name]
        if volume.active:
            self._devices.remove(_node(group, name))
            volume.active = False

    def _activate(self, group: FakeGroup, volume: FakeVolume) -> None:
        if not volume.active:
            size = volume.length * group.extent_size_bytes
            self._devices.add(_node(group.name, volume.name), size, volume.media)
            volume.active = True

    def _allocate(self, group: FakeGroup, volume: FakeVolume, extents: int) -> None:
        usable = [one for one in group.disks if one.allocatable and not one.missing]
        free = sum(group.free(disk) for disk in usable)
        if extents > free:
            raise Failure(
                f'Volume group "{group.name}" has insufficient free space ({free} extents):'
                f" {extents} required."
            )
        for disk in usable:
            # A new volume is not in the group yet: what it has so far counts as taken, too.
            taken = 0 if volume.name in group.volumes else volume.extents.get(disk.name, 0)
            part = min(extents, group.free(disk) - taken)
            volume.extents[disk.name] = volume.extents.get(disk.name, 0) + part
            extents -= part

    def _is_open(self, group: FakeGroup, volume: FakeVolume) -> bool:
        return volume.active and self._devices.is_open(_node(group.name, volume.name))

    def _group(self, name: str) -> FakeGroup:
        if name not in self.groups:
            raise Failure(f'Volume group "{name}" not found')
        return self.groups[name]

    def _volume(self, arguments: "_Arguments") -> tuple[FakeGroup, FakeVolume]:
        (path,) = arguments.rest()
        group_name, _, name = path.partition("/")
        group = self._group(group_name)
        if name not in group.volumes:
            raise Failure(f'Failed to find logical volume "{path}"')
        return group, group.volumes[name]

    def _uuid(self) -> str:
        # Unlike in the first characters, as LVM's own are.
        digits = f"{next(self._serial):032d}"[::-1]
        parts: Iterator[str] = iter(digits)
        return "-".join("".join(itertools.islice(parts, size)) for size in _UUID_GROUPS)


class _Arguments:
    """Words of a command line, taken one by one; what is left over was not understood."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)

    def take(self, option: str) -> str:
        if option not in self._words:
            return ""
        at = self._words.index(option)
        value = self._words[at + 1]
        del self._words[at : at + 2]
        return value

    def take_all(self, option: str) -> list[str]:
        values = []
        while option in self._words:
            values.append(self.take(option))
        return values

    def flag(self, option: str) -> bool:
        if option not in self._words:
            return False
        self._words.remove(option)
        return True

    def rest(self) -> list[str]:
        assert self._words[:1] == ["--"], f"not understood: {self._words}"
        rest, self._words = self._words[1:], []
        return rest

    def require_empty(self, words: Sequence[str]) -> None:
        assert not self._words, f"not understood: {self._words} in {' '.join(words)}"


def _node(group: str, name: str) -> str:
    return f"/dev/mapper/{names.device(group, name)}"


def _bytes(size: str) -> int:
    assert size.endswith("b"), size
    return int(size.removesuffix("b"))
