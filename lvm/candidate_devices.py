"""Choose the block devices that may be physical volumes, by sysfs and the filters of lvm.conf(5).

Why: what is read as a physical volume decides which disks lvm2 gets. A pod can write anything to
its volume, also an LVM label with the UUID of a volume group of the node. So a device that stands
on a logical volume must never be read. Other devices are further views of a disk that has a device
of its own, such as a path of a multipath disk or a loop device over the disk: read as well, they
would look like copies of that disk.

Idea: sysfs shows how devices are stacked, and is read without touching a disk. A device is excluded
by what it is, by what is below it, and by what uses it:

    /sys/class/block/
      sda          disk, has partitions                          excluded: PARTITIONED
      sda1         partition                                     a candidate
      sdb          disk                                          a candidate
      dm-3         LVM-... logical volume, on sdb                excluded: VOLUME
      loop0        attached to dm-3, as kubelet does for pods    excluded: ON_A_VOLUME
      loop1        attached to a file                            a candidate, but less trusted
      dm-5         multipath, on sdc and sdd                     a candidate
      sdc, sdd     held by dm-5                                  excluded: TAKEN

1. Read the stack of all devices from sysfs, and by an ioctl what each loop device is attached to
   (`BlockDevices`, `backing`).
2. Exclude each device that cannot be a physical volume, with the reason, for messages (`Excluded`).
3. Say of each other device who may have written it (`Kind`): the node, the owner of a file or of a
   network disk, or a guest. Of two disks with the same UUID, that decides which one is used
   (agent/groups/disk_search.py).
4. Apply the operator's filters in lvm.conf(5), as lvm2 does (`read`).

What it would cost to do without: a pod could write a forged label to its volume, and so take a
group from the node, or have lvm2 write to the pod's copy of a disk.
"""

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

# Closing delimiter of the regular expression in an entry of an lvm.conf(5) filter, by its opening
# delimiter. An opening delimiter that is not listed here is also the closing one.
_CLOSING = {"(": ")", "[": "]", "{": "}"}
# Line with one of a device's links in /dev, in the device's file in udev's database.
_LINK = re.compile(r"^S:(.+)$", re.MULTILINE)

# Entry of an lvm.conf(5) filter: whether the entry accepts the names of disks that it matches, and
# the regular expression.
Pattern = tuple[bool, re.Pattern[str]]


def read(root: Path) -> Callable[[str], bool] | None:
    """Read the node's filters from lvm.conf(5); return a function that applies them to a disk.

    The function says, by a disk's path, whether all filters accept the disk. None where lvm.conf(5)
    has no filters. `root` is where lvm2's root directory is seen.
    """
    settings = lvm2.configured(root)
    values = (settings.get(("devices", kind), "") for kind in ("global_filter", "filter"))
    filters = [list(_patterns(value)) for value in values if value]
    if not filters:
        return None
    return lambda path: all(_accepts(patterns, _names(root, path)) for patterns in filters)


def _patterns(value: str) -> Iterator[Pattern]:
    """Parse the entries of an lvm.conf(5) filter: `a` or `r`, then a delimited expression.

    Entries that cannot be parsed are skipped.
    """
    for text in labels.strings(value):
        kind, opening, delimited = text[:1], text[1:2], text[2:]
        closing = _CLOSING.get(opening, opening)
        if kind in ("a", "r") and opening and delimited.endswith(closing):
            try:
                yield kind == "a", re.compile(delimited.removesuffix(closing))
            except re.error:
                continue


def _accepts(patterns: Sequence[Pattern], names: Sequence[str]) -> bool:
    """Whether an lvm.conf(5) filter accepts a disk with these names, by the same rules as lvm2.

    For each name the first matching pattern decides. The disk is accepted if any name is accepted,
    or if no name is rejected (lib/filters/filter-regex.c).
    """
    verdicts = [
        next((ok for ok, pattern in patterns if pattern.search(name)), None) for name in names
    ]
    return True in verdicts or False not in verdicts


def _names(root: Path, path: str) -> Sequence[str]:
    """All names of a disk in /dev: its device node, its links, and its name in /dev/mapper."""
    names = [path]
    device = f"/sys/class/block/{Path(path).name}"
    if mapper := attribute(f"{device}/dm/name"):
        names.append(f"/dev/mapper/{mapper}")
    if number := attribute(f"{device}/dev"):
        try:
            udev_data = (root / "run/udev/data" / f"b{number}").read_text(errors="replace")
        except OSError:
            return names
        names += [f"/dev/{link}" for link in _LINK.findall(udev_data)]
    return names


# Prefix of the device-mapper UUIDs of logical volumes.
_VOLUME_UUID = "LVM-"
# Prefixes of the names of devices that other storage drivers and hypervisors give to pods and
# guests.
_FOREIGN = ("rbd", "nbd", "drbd", "zd")
# Pattern of a directory's name in the sysfs path of an iSCSI disk.
_SESSION = re.compile(r"session\d+")


def is_foreign(path: str) -> bool:
    """Whether a disk belongs to a guest or another machine, by the prefix of the disk's name."""
    return path.removeprefix("/dev/").startswith(_FOREIGN)


class ExclusionReason(enum.Enum):
    """Reason why a block device is not read as a physical volume.

    A message appends the name of another device to some of these texts.
    """

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
    """A block device that cannot be a physical volume, and the reason."""

    reason: ExclusionReason
    # The name of the other device that is the reason; empty where no other device is the reason.
    other_device: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value} {self.other_device}".strip()


def backing(path: str) -> int:
    """The number of the block device below a loop device; 0 over a regular file. Raises OSError.

    An ioctl is needed, as sysfs has only a path, and kubelet attaches its loop devices to bind
    mounts of device nodes (volumeDevices/…/dev/POD). The ioctl may wait for the server of a network
    file system that has the file.
    """
    return LoopDevices().loop_status(path).backing_device


class BlockDevices:
    """A snapshot of the block devices in sysfs, and how they are stacked."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        directories = sorted((root / "class/block").iterdir())
        self._devices = {directory.name: _Device(directory) for directory in directories}

    @property
    def names(self) -> tuple[str, ...]:
        """The kernel's names of all block devices, partitions included."""
        return tuple(self._devices)

    def loops_under(self, names: Iterable[str]) -> tuple[str, ...]:
        """The attached loop devices among the named devices and all devices below the named ones.

        Sysfs does not show which device a loop device is attached to, so `backing` must be called
        for the loop devices returned. The search does not go on below a loop device: a loop device
        over any block device is excluded anyway.
        """
        level, visited = [name for name in names if name in self._devices], set()
        while level:
            visited.update(level)
            devices = [self._devices[name] for name in level]
            lower_names = {name for device in devices for name in (device.disk, *device.slaves)}
            level = [name for name in lower_names if name in self._devices and name not in visited]
        loops = (
            name for name, device in self._devices.items() if device.is_loop and device.has_size
        )
        return tuple(name for name in loops if name in visited)

    def excluded(self, backings: Mapping[str, int]) -> Mapping[str, Excluded]:
        """The devices that cannot be physical volumes, by their names.

        `backings` has the results of `backing` by the names of loop devices; a loop device that is
        missing in `backings` is excluded as unknown.
        """
        return dict(self._judged(backings))

    def kind(self, name: str, backings: Mapping[str, int]) -> Kind:
        """Who may have written a device: the least trusted kind of it and the devices below."""
        return max(device.kind for device in _Stacks(self._devices, backings).every(name))

    def sequence(self, name: str) -> str:
        """The kernel's sequence number of a device's disk; "unknown" before Linux 5.15.

        The kernel gives a disk a new number whenever the disk is attached. The result is empty for
        an absent device, and for a device whose size is 0.
        """
        device = self._devices.get(name)
        if device is None or not device.has_size:
            return ""
        return self._devices.get(device.disk, device).sequence

    def active_groups(self, name: str) -> frozenset[str]:
        """The UUIDs of the volume groups that have active volumes directly on a device."""
        holders = (self._devices.get(holder) for holder in self._devices[name].holders)
        return frozenset(device.group_uuid for device in holders if device and device.is_volume)

    def _judged(self, backings: Mapping[str, int]) -> Iterator[tuple[str, Excluded]]:
        partitioned = {device.disk for device in self._devices.values() if device.disk}
        stacks = _Stacks(self._devices, backings)
        for name, device in self._devices.items():
            if not device.has_size:
                yield name, Excluded(ExclusionReason.EMPTY)
            elif device.is_volume:
                yield name, Excluded(ExclusionReason.VOLUME, device.mapper_name)
            elif volume := stacks.first(name, lambda lower: lower.is_volume):
                yield name, Excluded(ExclusionReason.ON_A_VOLUME, volume.mapper_name)
            elif loop := stacks.first(name, stacks.is_opaque):
                yield name, Excluded(ExclusionReason.UNKNOWN, loop.name)
            elif device.is_loop and (lower_devices := stacks.below(device)):
                yield name, Excluded(ExclusionReason.SECOND_VIEW, lower_devices[0].name)
            elif device.is_path:
                yield name, Excluded(ExclusionReason.PATH)
            elif device.is_no_disk:
                yield name, Excluded(ExclusionReason.NO_DISK)
            elif name in partitioned:
                yield name, Excluded(ExclusionReason.PARTITIONED)
            elif holder := stacks.exclusive_user(device):
                yield name, Excluded(ExclusionReason.TAKEN, holder)


class _Device:
    """A block device in sysfs.

    An attribute is read when it is first used, and is empty once the device has been removed.
    """

    def __init__(self, directory: Path) -> None:
        self.name = directory.name
        self._directory = directory

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
        # Linux before 5.15 has no diskseq.
        return self._word("diskseq") or "unknown"

    @property
    def group_uuid(self) -> str:
        """The UUID of the volume group, by the volume's device-mapper UUID (build_dm_uuid())."""
        return dashed(self._word("dm/uuid").removeprefix(_VOLUME_UUID)[:32])

    @cached_property
    def kind(self) -> Kind:
        """Who may have written the device, regardless of the devices below the device."""
        if is_foreign(self.name):
            return Kind.FOREIGN
        # The sysfs path of an iSCSI disk is /sys/devices/platform/hostN/sessionN/…
        is_iscsi = any(_SESSION.fullmatch(part) for part in self._directory.resolve().parts)
        return Kind.ATTACHED if self.is_loop or is_iscsi else Kind.LOCAL

    @cached_property
    def mapper_name(self) -> str:
        return self._word("dm/name")

    @cached_property
    def disk(self) -> str:
        """The name of the disk that the device is a partition of; empty for other devices."""
        is_partition = (self._directory / "partition").exists()
        return self._directory.resolve().parent.name if is_partition else ""

    @property
    def is_loop(self) -> bool:
        return self.name.startswith("loop") and not self.disk

    @property
    def is_path(self) -> bool:
        """Whether the device is a single path of an NVMe disk with several (NVMe multipath)."""
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
        return attribute(f"{self._directory}/{name}")

    def _names(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in (self._directory / name).iterdir()))
        except OSError:
            return ()


class _Stacks:
    """The stacking of block devices, loop devices included."""

    def __init__(self, devices: Mapping[str, _Device], backings: Mapping[str, int]) -> None:
        self._devices = devices
        self._backings = backings
        self._by_number = {device.number: device for device in devices.values()}

    def below(self, device: _Device) -> list[_Device]:
        """The devices directly below a device."""
        names = (device.disk, *device.slaves)
        devices = [self._devices[name] for name in names if name in self._devices]
        if number := self._backings.get(device.name, 0):
            of_loop = self._by_number.get((str(os.major(number)), str(os.minor(number))))
            devices += [of_loop] if of_loop else []
        return devices

    def first(self, name: str, condition: Callable[[_Device], bool]) -> _Device | None:
        """The first device, from the top of a device's stack, for which `condition` is true."""
        return next(filter(condition, self.every(name)), None)

    def every(self, name: str) -> Iterator[_Device]:
        """Yield a device and all devices below it, from the top."""
        stack, visited = [self._devices[name]], {name}
        for device in stack:
            yield device
            added = [lower for lower in self.below(device) if lower.name not in visited]
            visited |= {lower.name for lower in added}
            stack += added

    def is_opaque(self, device: _Device) -> bool:
        """Whether a loop device's backing device is unknown or removed; false for other devices."""
        number = self._backings.get(device.name)
        return device.is_loop and (number is None or (number > 0 and not self.below(device)))

    def exclusive_user(self, device: _Device) -> str:
        """The name of a device, other than a logical volume, that uses a device exclusively.

        Such holders are crypt, multipath and MD devices. Empty for none.
        """
        holders = (self._devices.get(name) for name in device.holders)
        return next((holder.name for holder in holders if holder and not holder.is_volume), "")
