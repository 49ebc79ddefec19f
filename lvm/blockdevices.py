"""Which block devices may be physical volumes: sysfs, and the filters of lvm.conf."""

import enum
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lvm import labels, lvm2
from lvm.labels import Kind, dashed
from mount.block_devices import LoopDevices, attribute

_CLOSING = {"(": ")", "[": "]", "{": "}"}
# What udev(7) keeps of each device, beside other lines its links in /dev.
_LINK = re.compile(r"^S:(.+)$", re.MULTILINE)

# Whether a pattern accepts what it matches, and the pattern.
Pattern = tuple[bool, re.Pattern[str]]


def read(root: Path) -> Callable[[str], bool] | None:
    """Whether the node's filters accept a disk of that path; None where there are none.

    `root` is where lvm2's own root directory is seen.
    """
    settings = lvm2.configured(root)
    found = (settings.get(("devices", one), "") for one in ("global_filter", "filter"))
    filters = [list(_patterns(one)) for one in found if one]
    if not filters:
        return None
    return lambda path: all(_accepts(one, _names(root, path)) for one in filters)


def _patterns(value: str) -> Iterator[Pattern]:
    """Each text of a list: `a` or `r`, a pattern between two characters that are not in it."""
    for text in labels.strings(value):
        kind, opening, rest = text[:1], text[1:2], text[2:]
        closing = _CLOSING.get(opening, opening)
        if kind in ("a", "r") and opening and rest.endswith(closing):
            try:
                yield kind == "a", re.compile(rest.removesuffix(closing))
            except re.error:
                continue


def _accepts(patterns: Sequence[Pattern], names: Sequence[str]) -> bool:
    """As lvm2 decides (lib/filters/filter-regex.c): the first pattern that matches a name counts.

    One name that is accepted is enough; what no pattern matches is accepted.
    """
    verdicts = [next((ok for ok, one in patterns if one.search(name)), None) for name in names]
    return True in verdicts or False not in verdicts


def _names(root: Path, path: str) -> Sequence[str]:
    """What a disk is called: its node, its links, its name in device-mapper."""
    names = [path]
    device = f"/sys/class/block/{Path(path).name}"
    if mapper := attribute(f"{device}/dm/name"):
        names.append(f"/dev/mapper/{mapper}")
    if number := attribute(f"{device}/dev"):
        try:
            kept = (root / "run/udev/data" / f"b{number}").read_text(errors="replace")
        except OSError:
            return names
        names += [f"/dev/{link}" for link in _LINK.findall(kept)]
    return names


_VOLUME_UUID = "LVM-"
# Devices that other storage drivers and hypervisors give to pods and guests.
_FOREIGN = ("rbd", "nbd", "drbd", "zd")
_SESSION = re.compile(r"session\d+")


def is_foreign(path: str) -> bool:
    """Whether a disk is of a driver whose disks belong to guests or other machines, by its name."""
    return path.removeprefix("/dev/").startswith(_FOREIGN)


class Why(enum.Enum):
    """Why a block device is not looked into; the words go on with the other device's name."""

    EMPTY = "nothing is attached to it"
    NO_DISK = "it is not made to keep data"
    PATH = "it is a path of a disk that has a device of its own"
    VOLUME = "it is the logical volume"
    ON_A_VOLUME = "it stands on the logical volume"
    SECOND_VIEW = "it is another view of"
    PARTITIONED = "it has partitions"
    TAKEN = "it is in use by"
    UNKNOWN = "it is not known what is under"


@dataclass(frozen=True)
class Excluded:
    """A block device that can be no physical volume, and what is in its way."""

    why: Why
    # Another device's name, where the reason is one.
    by: str = ""

    def __str__(self) -> str:
        return f"{self.why.value} {self.by}".strip()


def backing(path: str) -> int:
    """The number of the device that a loop device is over, 0 where that is a file. Raises OSError.

    By ioctl, as sysfs tells a name only, and kubelet attaches its loop devices to bind mounts of
    nodes (volumeDevices/…/dev/POD). A server that keeps the file may have to be asked.
    """
    return LoopDevices().loop_status(path).backing_device


class BlockDevices:
    """The block devices that sysfs listed a moment ago, and how they are stacked."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        places = sorted((root / "class/block").iterdir())
        self._devices = {place.name: _Device(place) for place in places}

    @property
    def names(self) -> tuple[str, ...]:
        """The kernel's names for all of them, with partitions."""
        return tuple(self._devices)

    def loops_under(self, names: Iterable[str]) -> tuple[str, ...]:
        """The loop devices in use among these, or below them: with their files, all is known.

        A loop device over another device is excluded, whatever that is.
        """
        known, every = [one for one in names if one in self._devices], set()
        while known:
            every.update(known)
            above = [self._devices[one] for one in known]
            below = {name for one in above for name in (one.disk, *one.slaves)}
            known = [one for one in below if one in self._devices and one not in every]
        loops = (name for name, one in self._devices.items() if one.is_loop and one.has_size)
        return tuple(name for name in loops if name in every)

    def excluded(self, backings: Mapping[str, int]) -> Mapping[str, Excluded]:
        """The devices that may be no physical volumes, by their names.

        `backings` has what `backing` said of the loop devices; of what it lacks nothing is known.
        """
        return dict(self._judged(backings))

    def kind(self, name: str, backings: Mapping[str, int]) -> Kind:
        """Which kind of writer a device may have had, by all that is below it."""
        return max(one.kind for one in _Stacks(self._devices, backings).every(name))

    def sequence(self, name: str) -> str:
        """By which number a device was attached: another each time; empty where it is not there."""
        device = self._devices.get(name)
        if device is None or not device.has_size:
            return ""
        return self._devices.get(device.disk, device).sequence

    def active_groups(self, name: str) -> frozenset[str]:
        """The UUIDs of the groups that have active volumes directly on a device."""
        holders = (self._devices.get(one) for one in self._devices[name].holders)
        return frozenset(one.group_uuid for one in holders if one and one.is_volume)

    def _judged(self, backings: Mapping[str, int]) -> Iterator[tuple[str, Excluded]]:
        partitioned = {one.disk for one in self._devices.values() if one.disk}
        stacks = _Stacks(self._devices, backings)
        for name, device in self._devices.items():
            if not device.has_size:
                yield name, Excluded(Why.EMPTY)
            elif device.is_volume:
                yield name, Excluded(Why.VOLUME, device.mapper_name)
            elif volume := stacks.first(name, lambda one: one.is_volume):
                yield name, Excluded(Why.ON_A_VOLUME, volume.mapper_name)
            elif loop := stacks.first(name, stacks.is_opaque):
                yield name, Excluded(Why.UNKNOWN, loop.name)
            elif device.is_loop and (below := stacks.below(device)):
                yield name, Excluded(Why.SECOND_VIEW, below[0].name)
            elif device.is_path:
                yield name, Excluded(Why.PATH)
            elif device.is_no_disk:
                yield name, Excluded(Why.NO_DISK)
            elif name in partitioned:
                yield name, Excluded(Why.PARTITIONED)
            elif holder := stacks.stranger(device):
                yield name, Excluded(Why.TAKEN, holder)


class _Device:
    """A directory of sysfs, read as far as it is asked for; empty words where it went away."""

    def __init__(self, place: Path) -> None:
        self.name = place.name
        self._place = place

    @cached_property
    def number(self) -> tuple[str, ...]:
        return tuple(self._word("dev").split(":"))

    @cached_property
    def has_size(self) -> bool:
        return self._word("size") not in ("", "0")

    @cached_property
    def is_volume(self) -> bool:
        return self.name.startswith("dm-") and self._word("dm/uuid").startswith(_VOLUME_UUID)

    @property
    def sequence(self) -> str:
        # Linux before 5.15 has none.
        return self._word("diskseq") or "unknown"

    @property
    def group_uuid(self) -> str:
        """The group's, which lvm2 puts before a logical volume's own (build_dm_uuid())."""
        return dashed(self._word("dm/uuid").removeprefix(_VOLUME_UUID)[:32])

    @cached_property
    def kind(self) -> Kind:
        """The kind of writer it may have had, by itself."""
        if is_foreign(self.name):
            return Kind.FOREIGN
        # iSCSI: /sys/devices/platform/hostN/sessionN/…
        is_iscsi = any(_SESSION.fullmatch(part) for part in self._place.resolve().parts)
        return Kind.ATTACHED if self.is_loop or is_iscsi else Kind.LOCAL

    @cached_property
    def mapper_name(self) -> str:
        return self._word("dm/name")

    @cached_property
    def disk(self) -> str:
        """The disk that it is a partition of."""
        is_partition = (self._place / "partition").exists()
        return self._place.resolve().parent.name if is_partition else ""

    @property
    def is_loop(self) -> bool:
        return self.name.startswith("loop") and not self.disk

    @property
    def is_path(self) -> bool:
        """Of NVMe's own multipath."""
        return self._word("hidden") == "1"

    @property
    def is_no_disk(self) -> bool:
        # Documentation/admin-guide/devices.txt: floppy disks, CD-ROMs.
        return self.number[0] in ("2", "11") or self.name.startswith("zram")

    @cached_property
    def slaves(self) -> tuple[str, ...]:
        return self._names("slaves")

    @property
    def holders(self) -> tuple[str, ...]:
        return self._names("holders")

    def _word(self, name: str) -> str:
        return attribute(f"{self._place}/{name}")

    def _names(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(one.name for one in (self._place / name).iterdir()))
        except OSError:
            return ()


class _Stacks:
    """Which device is on top of which."""

    def __init__(self, devices: Mapping[str, _Device], backings: Mapping[str, int]) -> None:
        self._devices = devices
        self._backings = backings
        self._by_number = {one.number: one for one in devices.values()}

    def below(self, device: _Device) -> list[_Device]:
        """The devices directly below a device."""
        names = (device.disk, *device.slaves)
        found = [self._devices[name] for name in names if name in self._devices]
        if number := self._backings.get(device.name, 0):
            of_loop = self._by_number.get((str(os.major(number)), str(os.minor(number))))
            found += [of_loop] if of_loop else []
        return found

    def first(self, name: str, wanted: Callable[[_Device], bool]) -> _Device | None:
        """The first such device in the stack, from the top."""
        return next(filter(wanted, self.every(name)), None)

    def every(self, name: str) -> Iterator[_Device]:
        """A device and all below it, from the top."""
        stack, seen = [self._devices[name]], {name}
        for one in stack:
            yield one
            new = [other for other in self.below(one) if other.name not in seen]
            seen |= {other.name for other in new}
            stack += new

    def is_opaque(self, device: _Device) -> bool:
        """A loop device of which it is not known, or no longer to be seen, what it is over."""
        number = self._backings.get(device.name)
        return device.is_loop and (number is None or (number > 0 and not self.below(device)))

    def stranger(self, device: _Device) -> str:
        """A holder that is no logical volume, such as crypt, multipath and MD: it has it alone."""
        holders = (self._devices.get(name) for name in device.holders)
        return next((one.name for one in holders if one and not one.is_volume), "")
