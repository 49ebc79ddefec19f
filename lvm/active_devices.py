"""Find the devices of active logical volumes, by sysfs and device-mapper; read COW stores."""

import os
import stat
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lvm import lvm_errors, names
from lvm.devicemapper import TARGETS, DeviceMapper
from lvm.devicemapper import Events as Events
from lvm.devicemapper import Status as Status
from mount import block_devices, block_io
from mount import mount_errors as mount_errors
from mount.block_devices import attribute
from mount.text import counted

# Header of a COW store (struct disk_header, drivers/md/dm-snap-persistent.c): magic, valid,
# version, chunk size in sectors.
_HEADER = struct.Struct("<4I")
# Magic number of a COW store's header, and the only version of a COW store.
_MAGIC = 0x70416E53
_VERSION = 1
# Size of an entry in the tables of a COW store, in bytes (struct disk_exception). An entry has the
# number of a chunk of the origin, and that of the chunk's copy in the store.
_EXCEPTION_BYTES = 16
_SECTOR_BYTES = 512


class Exceptions:
    """The chunks of an origin, by number, that a copy-on-write snapshot has copied to its store.

    The kernel completes a write to the origin only after it has copied the old chunk and recorded
    the copy in the store's tables (persistent_commit_exception, drivers/md/dm-snap-persistent.c).
    So the tables have each chunk that was overwritten before this object read them, and perhaps
    some that were overwritten since. Raises BadReport if the device has no valid header of a COW
    store, OSError if the device cannot be read.
    """

    chunk_bytes: int

    def __init__(self, device: str) -> None:
        self._device = device
        with block_io.opened(device) as reader:
            magic, valid, version, sectors = _HEADER.unpack(reader.read(0, _HEADER.size))
        if (magic, valid, version) != (_MAGIC, 1, _VERSION) or not sectors or sectors % 8:
            raise mount_errors.BadReport(
                f"{device} is no store of a snapshot that can be read: magic {magic:#x}, valid"
                f" {valid}, version {version}, chunks of {counted(sectors, 'sector')}"
            )
        self.chunk_bytes = sectors * _SECTOR_BYTES

    def chunks(self) -> Iterator["array[int]"]:
        """Yield the numbers of the copied chunks in the order of copying, one array for each table.

        The COW store is a header of one chunk, and then, over and over, a table of one chunk with
        the copies that the table lists:

            | header | table | copy | copy | ... | table | copy | ...

        1. Read a table.
        2. Its entries end at the first one whose copy has the number 0, which is the header's, or
           at the end of the table.
        3. A full table is followed by another, behind its copies; any other table is the last.
        """
        entries_per_table = self.chunk_bytes // _EXCEPTION_BYTES
        with block_io.opened(self._device) as reader:
            chunk, is_full = 1, True
            while is_full:
                table = array("Q", reader.read_to_end(chunk * self.chunk_bytes, self.chunk_bytes))
                if sys.byteorder == "big":
                    table.byteswap()
                store_chunks = table[1::2]
                used = store_chunks.index(0) if 0 in store_chunks else len(store_chunks)
                yield table[: 2 * used : 2]
                chunk, is_full = chunk + entries_per_table + 1, used == entries_per_table


def is_lost(header: bytes) -> bool:
    """Whether the first bytes of a COW store show that its snapshot's contents are lost.

    True also if `header` is too short. False for a new store, whose header is not written yet.
    """
    if len(header) < _HEADER.size:
        return True
    magic, valid, _, _ = _HEADER.unpack_from(header)
    # A new store has a header of zeroes, as lvm2 zeroes it and the kernel writes the header only at
    # the first activation. Such a store is not lost.
    return bool(magic) and (magic, valid) != (_MAGIC, 1)


# Directories of sysfs: of all block devices, and of the same devices by their numbers.
_SYS_BLOCK = Path("/sys/block")
_SYS_BY_NUMBER = Path("/sys/dev/block")
# Directory of the nodes of device-mapper's devices.
_MAPPER = Path("/dev/mapper")
# Prefix of a logical volume's device-mapper UUID. The UUID of the volume group and that of the
# logical volume follow, each of _UUID_LENGTH characters.
_UUID_PREFIX = "LVM-"
_UUID_LENGTH = 32
# Suffixes of lvm2's names for devices below a volume: a thin pool itself, the COW store of a
# snapshot (lib/activate/dev_manager.c), a pool's data and metadata.
_POOL_LAYER = "-tpool"
_STORE_LAYER = "-cow"
_DATA_PART, _METADATA_PART = "_tdata", "_tmeta"
# Prefix of the names of Carver's dm-crypt devices.
_MAPPING_PREFIX = "carver-luks-"
# Prefixes of cryptsetup's device-mapper UUIDs: of a LUKS2 device, and of a temporary device that
# cryptsetup uses while it runs (lib/utils_storage_wrappers.c).
_CRYPT_PREFIX = "CRYPT-LUKS2-"
_OWN_CRYPT_PREFIX = "CRYPT-TEMP-"
# Number of the device of a COW store, and the count of sectors written to that device; None if the
# count is unknown.
Written = tuple[tuple[int, int], int] | None


@dataclass(frozen=True)
class Device:
    """The block device of an active logical volume, or the dm-crypt device over it.

    `path` is in /dev/mapper, where it may be a symbolic link, or else /dev/dm-N: so two devices are
    compared by `number`, not by `path`. The UUIDs are lvm2's, without dashes. A dm-crypt device has
    a `name`, and the logical volume's device as `below`.
    """

    path: str
    number: tuple[int, int]
    group_uuid: str
    uuid: str = ""
    name: str = ""
    below: "Device | None" = None

    @property
    def logical(self) -> "Device":
        """The logical volume's device: this device, or the device below this dm-crypt device."""
        return self.below or self


def mapping_name(device: Device) -> str:
    """The device-mapper name of the dm-crypt device over a logical volume, which never changes."""
    return f"{_MAPPING_PREFIX}{device.logical.uuid}"


class Devices:
    """Finds devices of active volumes and asks device-mapper about them; runs no lvm2 command.

    Tests pass an object of a subclass instead.
    """

    def __init__(self, mapper: DeviceMapper | None = None) -> None:
        self._mapper = mapper or DeviceMapper()
        # For each volume group, the last events of all devices, and of these the events of the
        # volume group's devices, so that unchanged events are not searched again.
        self._events: dict[str, tuple[Mapping[str, Events], Mapping[str, Events]]] = {}

    def load_targets(self) -> None:
        """Have the kernel load the modules of all TARGETS; a missing module is no error."""
        for target in TARGETS:
            self._mapper.load_target(target)

    def find(self, group: str, name: str) -> Device | None:
        """Find the device of a volume; None for an inactive or absent volume.

        None also for a device without a table, which lvm2 leaves if it is killed at activation;
        lvm2 reports such a volume as active.
        """
        return self._device_named(names.device(group, name))

    def mapping(self, device: Device) -> Device | None:
        """Find Carver's open dm-crypt device over a volume's device; None if there is none.

        The device must be among the holders of the volume's device in sysfs: a name, or a node in
        /dev/mapper, could be that of another device.
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
        """Whether a process or another device has a dm-crypt device open. One ioctl."""
        return self._mapper.is_open(mapping.name)

    def close_leftovers(self, device: Device) -> None:
        """Remove the dm-crypt devices that a killed cryptsetup left over a volume's device.

        A device that is open, as its cryptsetup still runs, stays.
        """
        for holder in _holders(device):
            directory = f"{_SYS_BLOCK}/{holder}"
            kind = attribute(f"{directory}/dm/uuid")
            is_half_made = kind.startswith(_CRYPT_PREFIX) and not _has_table(directory)
            if is_half_made or kind.startswith(_OWN_CRYPT_PREFIX):
                with suppress(OSError):  # EBUSY: its cryptsetup still runs
                    self._mapper.remove(attribute(f"{directory}/dm/name"))

    def active(self, group: str) -> tuple[str, ...]:
        """The names of a volume group's active volumes, hidden ones included. One ioctl.

        Empty also if device-mapper does not answer.
        """
        return tuple(self.events(group))

    def events(self, group: str) -> Mapping[str, Events]:
        """The event counters of a volume group's active volumes, by the volumes' names. One ioctl.

        Empty also if device-mapper does not answer.
        """
        all_events = self._mapper.events()
        previous_events, events_by_name = self._events.get(group, ({}, {}))
        if all_events is not previous_events:
            events_of_group = (
                (names.of_device(group, dm_name), events) for dm_name, events in all_events.items()
            )
            events_by_name = {name: events for name, events in events_of_group if name}
            self._events[group] = all_events, events_by_name
        return events_by_name

    def written(self, group: str) -> Mapping[str, Written]:
        """The sectors written to the COW store of each active snapshot, by the snapshot's name.

        None stands for an unknown number. While the number stays equal, the store has not become
        fuller. All stores together take one ioctl and one read of /proc/diskstats.
        """
        prefix, areas_of = names.device(group, ""), {}
        for name, (device, _) in self._mapper.events().items():
            if name.startswith(prefix) and name.endswith(_STORE_LAYER):
                snapshot = names.of_device(group, name.removesuffix(_STORE_LAYER))
                areas_of[snapshot] = (os.major(device), os.minor(device))
        sectors = block_devices.written_sectors() if areas_of else {}
        return {
            snapshot: (number, sectors[number]) if number in sectors else None
            for snapshot, number in areas_of.items()
            if snapshot
        }

    def status(self, group: str, name: str) -> tuple[Status, ...]:
        """The device-mapper statuses of an active volume and of all devices below the volume's.

        Takes a few ioctls. The result for a thin volume also has the status of the volume's pool. A
        pool may be active without a device of the pool's own name. An empty result proves nothing.
        """
        dm_name = names.device(group, name)
        return self._mapper.status(dm_name) or self._mapper.status(dm_name + _POOL_LAYER)

    def own_status(self, group: str, name: str) -> tuple[Status, ...]:
        """The device-mapper status of a volume's device, without the devices below. One ioctl."""
        return self._mapper.own_status(names.device(group, name))

    def has_lost_disk(self, group: str, name: str) -> bool:
        """Whether an active volume stands on a disk that was removed. A few ioctls.

        The volume still refers to the removed disk, and I/O fails (EIO), even once the disk is
        attached again, as the disk is then a new device with another number.
        """
        numbers = self._mapper.disks(names.device(group, name))
        return any(not os.access(_by_number(number), os.F_OK) for number in numbers)

    def overflowed(self, disk: str, offset_bytes: int) -> bool | None:
        """Whether a snapshot's contents are lost, by the COW store at an offset of a disk.

        None where the disk cannot be read. The read bypasses the page cache, which may have the
        store's header as it was before the kernel wrote it last.
        """
        try:
            with block_io.opened(disk) as reader:
                return is_lost(reader.read_to_end(offset_bytes, _HEADER.size))
        except OSError:
            return None

    def suspend(self, group: str, name: str) -> None:
        """Suspend an active volume: I/O waits, and a mounted file system is frozen.

        One ioctl. Raises OSError.
        """
        self._mapper.suspend(names.device(group, name))

    def resume(self, group: str, name: str) -> None:
        """Resume a volume; no error if the volume is not suspended. One ioctl. Raises OSError."""
        self._mapper.resume(names.device(group, name))

    def is_suspended(self, group: str, name: str) -> bool:
        """Whether an active volume is suspended. One ioctl."""
        return self._mapper.is_suspended(names.device(group, name))

    def is_open(self, group: str, name: str) -> bool:
        """Whether a process or another device has an active volume open. One ioctl."""
        return self._mapper.is_open(names.device(group, name))

    def is_closed(self, group: str, name: str) -> bool:
        """Whether it is certain that no process or device has a volume open. One ioctl.

        True also for an inactive volume; false if device-mapper does not answer.
        """
        return self._mapper.is_closed(names.device(group, name))

    def thin_id(self, group: str, name: str) -> int | None:
        """The number of an active thin volume in its pool; None for any other volume. One ioctl."""
        return self._mapper.thin_id(names.device(group, name))

    def pool_data(self, group: str, pool: str) -> str:
        """The path of the device with a thin pool's data. Raises Inactive for an inactive pool."""
        return self._device_path(group, pool, _DATA_PART)

    def pool_metadata(self, group: str, pool: str) -> str:
        """The path of the device with a thin pool's metadata. Raises Inactive if the pool is."""
        return self._device_path(group, pool, _METADATA_PART)

    def reserve_metadata(self, group: str, pool: str) -> None:
        """Reserve the metadata snapshot of a thin pool, by which the metadata can be read.

        Raises OSError if the pool has a metadata snapshot already.
        """
        self._mapper.tell(names.device(group, pool) + _POOL_LAYER, "reserve_metadata_snap")

    def release_metadata(self, group: str, pool: str) -> None:
        """Release the metadata snapshot of a thin pool. Raises OSError if there is none."""
        self._mapper.tell(names.device(group, pool) + _POOL_LAYER, "release_metadata_snap")

    def exceptions(self, group: str, name: str) -> Exceptions:
        """The chunks that a copy-on-write snapshot has copied to its COW store.

        Raises Inactive if the store has no device, BadReport or OSError if it cannot be read.
        """
        return Exceptions(self._device_path(group, name, _STORE_LAYER))

    def _device_path(self, group: str, name: str, suffix: str) -> str:
        """Return the path of the device whose name is a volume's followed by `suffix`.

        Raises Inactive if there is no such device.
        """
        dm_name = names.device(group, name) + suffix
        device = self._device_named(dm_name)
        if device is None:
            raise lvm_errors.Inactive(group, name + suffix)
        return device.path

    def _device_named(self, dm_name: str) -> Device | None:
        """The device of a device-mapper name; None for no such logical volume.

        All devices in sysfs are searched only if device-mapper does not answer.
        """
        return self._by_node(dm_name) or self._by_driver(dm_name)

    def _by_node(self, dm_name: str) -> Device | None:
        """The device of a device-mapper name, found by its node in /dev/mapper.

        udev makes the node, or lvm2 where udev does not run.
        """
        path = f"{_MAPPER}/{dm_name}"
        number = _node_number(path)
        return _device(_by_number(number), dm_name, path, number) if number else None

    def _by_driver(self, dm_name: str) -> Device | None:
        """The device of a device-mapper name, found by one ioctl.

        Used for names whose node in /dev/mapper is absent or wrong.
        """
        try:
            number = self._mapper.number(dm_name)
        except OSError:
            return self._by_search(dm_name)
        if number is None:
            return None
        # The kernel names the device after its minor number (alloc_dev in drivers/md/dm.c).
        path = f"/dev/dm-{number[1]}"
        return _device(_by_number(number), dm_name, path, number)

    def _by_search(self, dm_name: str) -> Device | None:
        """The device of a device-mapper name, found by a search of sysfs.

        Used if device-mapper does not answer.
        """
        for directory in _SYS_BLOCK.glob("dm-*"):
            number = _number(str(directory))
            path = f"/dev/{directory.name}"
            if number and (device := _device(str(directory), dm_name, path, number)):
                return device
        return None


def _device(directory: str, dm_name: str, path: str, number: tuple[int, int]) -> Device | None:
    """The device in a directory of sysfs, if it is a logical volume's and has the name `dm_name`.

    None for any other device, for a device that was removed meanwhile, and for a device without a
    table.
    """
    if attribute(f"{directory}/dm/name") != dm_name or not _has_table(directory):
        return None
    uuid = attribute(f"{directory}/dm/uuid")
    if not uuid.startswith(_UUID_PREFIX):
        return None
    uuids = uuid.removeprefix(_UUID_PREFIX)
    return Device(path, number, uuids[:_UUID_LENGTH], uuids[_UUID_LENGTH : 2 * _UUID_LENGTH])


def _has_table(directory: str) -> bool:
    """Whether a device-mapper device has a table, by its size in sysfs.

    A device is created, given a table and resumed, in three steps (dmsetup(8)). If lvm2 or
    cryptsetup is killed before the last step, it leaves a device of no sectors, which cannot be
    read or written. Activating the volume again completes the device.
    """
    return attribute(f"{directory}/size") != "0"


def _holders(device: Device) -> list[str]:
    """The kernel's names of the devices directly over a device; empty for a removed device."""
    try:
        return os.listdir(f"{_by_number(device.number)}/holders")  # noqa: PTH208 - each call asks
    except OSError:
        return []


def _by_number(number: tuple[int, int]) -> str:
    return f"{_SYS_BY_NUMBER}/{number[0]}:{number[1]}"


def _number(directory: str) -> tuple[int, int] | None:
    """The number of the device in a directory of sysfs; None for a removed device."""
    major, _, minor = attribute(f"{directory}/dev").partition(":")
    return (int(major), int(minor)) if minor else None


def _node_number(path: str) -> tuple[int, int] | None:
    """The number of the block device whose node is at a path; None for no such node."""
    try:
        status = os.stat(path)  # noqa: PTH116 - each call asks, and a path library takes longer
    except OSError:
        return None
    number = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return number if stat.S_ISBLK(status.st_mode) else None
