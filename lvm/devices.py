"""Devices of active volumes (sysfs), their status (device-mapper), and COW stores on disk."""

import os
import stat
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lvm import errors, names
from lvm.devicemapper import TARGETS, DeviceMapper
from lvm.devicemapper import Events as Events
from lvm.devicemapper import Status as Status
from mount import block_devices, blocks
from mount import errors as mount_errors
from mount.block_devices import attribute

# struct disk_header, drivers/md/dm-snap-persistent.c: magic, valid, version, size of a chunk.
_HEADER = struct.Struct("<4I")
_MAGIC = 0x70416E53
_VERSION = 1
# struct disk_exception: the chunk of the origin, and the one that it was copied to.
_EXCEPTION_BYTES = 16
_SECTOR_BYTES = 512


class Exceptions:
    """The chunks of its origin that a snapshot has copied, read from its COW store on disk.

    The kernel completes a write to the origin when the chunk was copied, and that is recorded here
    (drivers/md/dm-snap-persistent.c, persistent_commit_exception). So the table has each chunk that
    was overwritten before the reading began; it may have some of those overwritten meanwhile.
    Raises BadReport where this is no COW store that can be read, OSError.
    """

    chunk_bytes: int

    def __init__(self, device: str) -> None:
        self._device = device
        with blocks.opened(device) as reader:
            magic, valid, version, sectors = _HEADER.unpack(reader.read(0, _HEADER.size))
        if (magic, valid, version) != (_MAGIC, 1, _VERSION) or not sectors or sectors % 8:
            raise mount_errors.BadReport(
                f"{device} is no store of a snapshot that can be read: magic {magic:#x}, valid"
                f" {valid}, version {version}, chunks of {sectors} sectors"
            )
        self.chunk_bytes = sectors * _SECTOR_BYTES

    def chunks(self) -> Iterator["array[int]"]:
        """Their numbers, each once, in the order of the copies, a table's chunk at a time."""
        each = self.chunk_bytes // _EXCEPTION_BYTES
        # Behind the header: one chunk that tells of as many as follow it, and so on.
        with blocks.opened(self._device) as reader:
            at, is_full = 1, True
            while is_full:
                table = array("Q", reader.read_to_end(at * self.chunk_bytes, self.chunk_bytes))
                if sys.byteorder == "big":
                    table.byteswap()
                # A copy is never where the header is: a zero, or the store's end, ends the entries.
                copies = table[1::2]
                used = copies.index(0) if 0 in copies else len(copies)
                yield table[: 2 * used : 2]
                at, is_full = at + each + 1, used == each


def is_lost(header: bytes) -> bool:
    """Whether the area's first bytes are not those of a snapshot that can be read."""
    if len(header) < _HEADER.size:
        return True
    magic, valid, _, _ = _HEADER.unpack_from(header)
    # Zeroes, by lvm2, are a snapshot that was never active.
    return bool(magic) and (magic, valid) != (_MAGIC, 1)


_SYS_BLOCK = Path("/sys/block")
_SYS_BY_NUMBER = Path("/sys/dev/block")
_MAPPER = Path("/dev/mapper")
# The uuid that lvm2 gives a device-mapper device: "LVM-", the group's UUID, the volume's.
_UUID_PREFIX = "LVM-"
_UUID_LENGTH = 32
# What lvm2 appends to a thin pool's name for the pool itself (lib/activate/dev_manager.c).
_POOL_LAYER = "-tpool"
# The names of the dm-crypt devices that Carver has cryptsetup make, and what that puts before the
# UUID of the LUKS2 header in theirs.
_MAPPING_PREFIX = "carver-luks-"
_CRYPT_PREFIX = "CRYPT-LUKS2-"
# The same of those that it has for itself while it is at work (lib/utils_storage_wrappers.c).
_OWN_CRYPT_PREFIX = "CRYPT-TEMP-"
# The same for a copy-on-write snapshot's store; and what a pool's data and metadata are called.
_STORE_LAYER = "-cow"
_DATA_PART, _METADATA_PART = "_tdata", "_tmeta"
# The number of a snapshot's store, and the sectors that were written there.
Written = tuple[tuple[int, int], int] | None


@dataclass(frozen=True)
class Device:
    """The block device of an active logical volume, or the dm-crypt device that stands on it.

    `path` is in /dev/mapper, where it may be a symbolic link, or else /dev/dm-N: compare devices by
    `number`. The UUIDs are lvm2's, without dashes. `name` is a dm-crypt device's, and `below` what
    it is of.
    """

    path: str
    number: tuple[int, int]
    group_uuid: str
    uuid: str = ""
    name: str = ""
    below: "Device | None" = None

    @property
    def logical(self) -> "Device":
        """The logical volume's own device."""
        return self.below or self


def mapping_name(device: Device) -> str:
    """The device-mapper name of the dm-crypt device over a logical volume: one for its life."""
    return f"{_MAPPING_PREFIX}{device.logical.uuid}"


class Devices:
    """Devices of active volumes; tests put a subclass in its place. None runs a command."""

    def __init__(self, mapper: DeviceMapper | None = None) -> None:
        self._mapper = mapper or DeviceMapper()
        # Of each group the last list of all devices, and what of it is the group's.
        self._events: dict[str, tuple[Mapping[str, Events], Mapping[str, Events]]] = {}

    def load_targets(self) -> None:
        """Have the kernel load what lvm2 looks for, as far as this kernel has it."""
        for target in TARGETS:
            self._mapper.load_target(target)

    def find(self, group: str, name: str) -> Device | None:
        """Find a volume's device; None where it is not active on this node, or not there.

        None also where lvm2 calls it active, and died before the device could be used.
        """
        return self._named(names.device(group, name))

    def mapping(self, device: Device) -> Device | None:
        """Find the dm-crypt device that Carver opened over a volume's; None where it is closed.

        It is looked for among the devices on the volume's own: neither a name nor a node in
        /dev/mapper proves anything.
        """
        name = mapping_name(device)
        for holder in _holders(device):
            directory = f"{_SYS_BLOCK}/{holder}"
            is_ours = attribute(f"{directory}/dm/name") == name and _has_table(directory)
            number = _number(directory)
            if is_ours and number and attribute(f"{directory}/dm/uuid").startswith(_CRYPT_PREFIX):
                is_at_node = _node_number(f"{_MAPPER}/{name}") == number
                path = f"{_MAPPER}/{name}" if is_at_node else f"/dev/{holder}"
                return replace(device, path=path, number=number, name=name, below=device)
        return None

    def is_mapping_open(self, mapping: Device) -> bool:
        """Whether something has a dm-crypt device open. One ioctl."""
        return self._mapper.is_open(mapping.name)

    def close_leftovers(self, device: Device) -> None:
        """Remove the devices that a killed cryptsetup left on a volume's own.

        A device that a running cryptsetup has open stays.
        """
        for holder in _holders(device):
            directory = f"{_SYS_BLOCK}/{holder}"
            kind = attribute(f"{directory}/dm/uuid")
            is_half_made = kind.startswith(_CRYPT_PREFIX) and not _has_table(directory)
            if is_half_made or kind.startswith(_OWN_CRYPT_PREFIX):
                with suppress(OSError):  # EBUSY: it was not killed
                    self._mapper.remove(attribute(f"{directory}/dm/name"))

    def active(self, group: str) -> tuple[str, ...]:
        """The names of a group's active volumes, those of lvm2's own included. One ioctl."""
        return tuple(self.events(group))

    def events(self, group: str) -> Mapping[str, Events]:
        """The event counters of a group's active volumes, by name. One ioctl."""
        every = self._mapper.events()
        before, own = self._events.get(group, ({}, {}))
        if every is not before:
            named = ((names.of_device(group, one), events) for one, events in every.items())
            own = {name: events for name, events in named if name}
            self._events[group] = every, own
        return own

    def written(self, group: str) -> Mapping[str, Written]:
        """How much was written to the COW stores of a group's active snapshots; None if unknown.

        While that is equal, they are as full as before. One ioctl and one file for all of them.
        """
        prefix, areas_of = names.device(group, ""), {}
        for name, (device, _) in self._mapper.events().items():
            if name.startswith(prefix) and name.endswith(_STORE_LAYER):
                snapshot = names.of_device(group, name.removesuffix(_STORE_LAYER))
                areas_of[snapshot] = (os.major(device), os.minor(device))
        sectors = block_devices.written_sectors() if areas_of else {}
        return {
            one: (number, sectors[number]) if number in sectors else None
            for one, number in areas_of.items()
            if one
        }

    def status(self, group: str, name: str) -> tuple[Status, ...]:
        """Device-mapper's status of an active volume and of all that is below it. A few ioctls.

        A thin volume reports its pool too; a pool may be active without a device of its own name.
        Empty proves nothing.
        """
        dm_name = names.device(group, name)
        return self._mapper.status(dm_name) or self._mapper.status(dm_name + _POOL_LAYER)

    def own_status(self, group: str, name: str) -> tuple[Status, ...]:
        """Device-mapper's status of an active volume alone. One ioctl."""
        return self._mapper.own_status(names.device(group, name))

    def has_lost_disk(self, group: str, name: str) -> bool:
        """Whether an active volume stands on a disk that went away. A few ioctls.

        The kernel keeps the disk's number for it, and answers EIO, also when the disk is back: that
        is another device then.
        """
        numbers = self._mapper.disks(names.device(group, name))
        return any(not os.access(_by_number(one), os.F_OK) for one in numbers)

    def overflowed(self, disk: str, offset_bytes: int) -> bool | None:
        """Whether the COW snapshot whose area begins there is lost; None: unknown.

        Past the page cache, which may hold what was there before the kernel's own write.
        """
        try:
            with blocks.opened(disk) as reader:
                return is_lost(reader.read_to_end(offset_bytes, _HEADER.size))
        except OSError:
            return None

    def suspend(self, group: str, name: str) -> None:
        """Suspend an active volume: I/O waits, and a mounted file system is frozen.

        One ioctl; raises OSError.
        """
        self._mapper.suspend(names.device(group, name))

    def resume(self, group: str, name: str) -> None:
        """Resume a volume; one that is not suspended is no error. One ioctl; raises OSError."""
        self._mapper.resume(names.device(group, name))

    def is_suspended(self, group: str, name: str) -> bool:
        """Whether an active volume is suspended. One ioctl."""
        return self._mapper.is_suspended(names.device(group, name))

    def is_open(self, group: str, name: str) -> bool:
        """Whether something has an active volume open. One ioctl."""
        return self._mapper.is_open(names.device(group, name))

    def is_closed(self, group: str, name: str) -> bool:
        """Whether nothing has a volume open for certain, as one that is not active. One ioctl."""
        return self._mapper.is_closed(names.device(group, name))

    def thin_id(self, group: str, name: str) -> int | None:
        """The id that an active thin volume has in its pool; None for any other. One ioctl."""
        return self._mapper.thin_id(names.device(group, name))

    def pool_data(self, group: str, pool: str) -> str:
        """The device of an active pool's data, which the pool holds; raises Inactive."""
        return self._part(group, pool, _DATA_PART)

    def pool_metadata(self, group: str, pool: str) -> str:
        """The device of an active pool's metadata; raises Inactive."""
        return self._part(group, pool, _METADATA_PART)

    def reserve_metadata(self, group: str, pool: str) -> None:
        """Take a metadata snapshot of a pool, for reading; OSError where it has one already."""
        self._mapper.tell(names.device(group, pool) + _POOL_LAYER, "reserve_metadata_snap")

    def release_metadata(self, group: str, pool: str) -> None:
        """Drop the metadata snapshot of a pool; OSError where it has none."""
        self._mapper.tell(names.device(group, pool) + _POOL_LAYER, "release_metadata_snap")

    def exceptions(self, group: str, name: str) -> Exceptions:
        """The chunks that an active COW snapshot has copied; raises Inactive."""
        return Exceptions(self._part(group, name, _STORE_LAYER))

    def _part(self, group: str, name: str, part: str) -> str:
        """The device of what lvm2 made for an active volume beside the volume's own."""
        dm_name = names.device(group, name) + part
        found = self._named(dm_name)
        if found is None:
            raise errors.Inactive(group, name + part)
        return found.path

    def _named(self, dm_name: str) -> Device | None:
        """The device of that name: however many there are, that costs the same."""
        return self._by_node(dm_name) or self._by_driver(dm_name)

    def _by_node(self, dm_name: str) -> Device | None:
        """Through the node that udev, or lvm2 where there is no udev, made in /dev/mapper."""
        path = f"{_MAPPER}/{dm_name}"
        number = _node_number(path)
        return _device(_by_number(number), dm_name, path, number) if number else None

    def _by_driver(self, dm_name: str) -> Device | None:
        """Through device-mapper, where the node in /dev/mapper is missing or is another's.

        One ioctl.
        """
        try:
            number = self._mapper.number(dm_name)
        except OSError:
            return self._by_search(dm_name)
        if number is None:
            return None
        # The kernel names them so (alloc_dev in drivers/md/dm.c).
        path = f"/dev/dm-{number[1]}"
        return _device(_by_number(number), dm_name, path, number)

    def _by_search(self, dm_name: str) -> Device | None:
        """Through sysfs, where device-mapper does not answer."""
        for directory in _SYS_BLOCK.glob("dm-*"):
            number = _number(str(directory))
            path = f"/dev/{directory.name}"
            if number and (device := _device(str(directory), dm_name, path, number)):
                return device
        return None


def _device(directory: str, dm_name: str, path: str, number: tuple[int, int]) -> Device | None:
    """The device of a directory of sysfs, if it is a volume's and bears the name.

    None also for no device-mapper device, for one that was removed while we looked, and for one
    that is not usable yet.
    """
    if attribute(f"{directory}/dm/name") != dm_name or not _has_table(directory):
        return None
    uuid = attribute(f"{directory}/dm/uuid")
    if not uuid.startswith(_UUID_PREFIX):
        return None
    uuids = uuid.removeprefix(_UUID_PREFIX)
    return Device(path, number, uuids[:_UUID_LENGTH], uuids[_UUID_LENGTH : 2 * _UUID_LENGTH])


def _has_table(directory: str) -> bool:
    """Whether a device-mapper device was ever given what it is made of.

    It is created, loaded and resumed in three steps (dmsetup(8)). Killed before the last, lvm2 or
    cryptsetup leaves one of no sectors, from which nothing is read and to which nothing is written;
    who activates the volume again makes it whole.
    """
    return attribute(f"{directory}/size") != "0"


def _holders(device: Device) -> list[str]:
    """What the kernel has on a device, by its names in sysfs."""
    try:
        return os.listdir(f"{_by_number(device.number)}/holders")  # noqa: PTH208 - each call asks
    except OSError:
        return []


def _by_number(number: tuple[int, int]) -> str:
    return f"{_SYS_BY_NUMBER}/{number[0]}:{number[1]}"


def _number(directory: str) -> tuple[int, int] | None:
    """The number of the device of a directory of sysfs; None where it went away."""
    major, _, minor = attribute(f"{directory}/dev").partition(":")
    return (int(major), int(minor)) if minor else None


def _node_number(path: str) -> tuple[int, int] | None:
    """The number of a node's block device; None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - each call asks, and a path library takes longer
    except OSError:
        return None
    number = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return number if stat.S_ISBLK(status.st_mode) else None
