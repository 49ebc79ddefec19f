"""A stateful lvm2: groups, volumes, tags and devices in memory, spoken to in lvm2's own words.

What is not understood is an AssertionError: a command that the fake does not know must not pass.
tests/contract holds it to what the real one does.
"""

import errno
import itertools
import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

from fakes.chunks import Chunks
from fakes.devices import BLOCK_BYTES, LEFTOVER, FakeDevice, FakeDevices, Media

from lvm import errors as lvm_errors
from lvm import names
from lvm.command import Result
from lvm.devicemapper import Cache, Mirror, Raid, Snapshot, Status, ThinPool, WriteCache
from lvm.devices import Device, Exceptions, mapping_name
from lvm.layout import LINEAR, Layout
from lvm.tuning import AUTO, PLAIN, Tuning
from mount.filesystem import Signature

_LABEL = "LVM2_member"
_PE_START_BYTES = 1 << 20
_UUID_GROUPS = (6, 4, 4, 4, 4, 4, 6)


@dataclass
class FakeDisk:
    """A physical volume."""

    name: str
    uuid: str
    extents: int
    missing: bool = False
    allocatable: bool = True
    tags: set[str] = field(default_factory=set)


# What of a volume is nowhere but in the kernel, or on the volume itself.
_OF_THE_KERNEL = {
    *("active", "media", "data_percent", "overflowed", "dirty_blocks", "cleaning"),
    *("failed", "used_data_blocks", "used_metadata_blocks", "mode", "needs_check"),
    *("rebuilding", "damaged", "held", "chunks"),
}


@dataclass
class FakeVolume:
    """A logical volume; `extents` by disk."""

    name: str
    uuid: str
    extents: dict[str, int]
    tags: set[str] = field(default_factory=set)
    active: bool = False
    activation_skipped: bool = False
    health: str = ""
    layout: Layout = LINEAR
    # What is written on it: stays when it is deactivated.
    media: Media = field(default_factory=Media)
    read_only: bool = False
    # Of a copy-on-write snapshot, whose extents are its area.
    origin: str = ""
    data_percent: float = 0.0
    overflowed: bool = False
    # Its cachevol, while it has one.
    cache: "FakeVolume | None" = None
    cache_kind: str = ""
    tuning: Tuning = PLAIN
    # How much of its cache is not written back, and whether that is being done.
    dirty_blocks: int = 0
    cleaning: bool = False
    # Of a RAID, by disk: what a leg that takes no writes has on it still.
    failed: dict[str, Media] = field(default_factory=dict)
    # The same: which legs are not in sync yet, and for how many looks.
    rebuilding: dict[str, int] = field(default_factory=dict)

    @property
    def is_copy_on_write(self) -> bool:
        return bool(self.origin) and not isinstance(self, FakeThin)

    @property
    def length(self) -> int:
        """The extents that it offers: what its data take on all disks, once."""
        if self.layout.is_linear:
            return sum(self.extents.values())
        on_each = max(self.extents.values(), default=0) - self.layout.metadata_extents
        return max(0, on_each) * self.layout.stripes

    @property
    def record(self) -> list[object]:
        """What lvm2 keeps of it on the disks."""
        kept = [one.name for one in fields(self) if one.name not in _OF_THE_KERNEL]
        told = [getattr(self, one) for one in kept]
        return [
            sorted(one.items())
            if isinstance(one, dict)
            else sorted(one)
            if isinstance(one, set)
            else _recorded(one)
            for one in told
        ]

    def taken(self, disk: str) -> int:
        """The extents that it has of a disk."""
        return self.extents.get(disk, 0) + (self.cache.taken(disk) if self.cache else 0)


def _recorded(one: object) -> object:
    return one.record if isinstance(one, FakeVolume) else one


@dataclass
class FakePool(FakeVolume):
    """A thin pool; its data are its extents. What is used of it is a test's to say."""

    metadata: dict[str, int] = field(default_factory=dict)
    chunk_size_bytes: int = 0
    used_data_blocks: int = 0
    # What a new pool of 1024 blocks has used.
    used_metadata_blocks: int = 110
    mode: str = "rw"
    needs_check: bool = False
    # So that thin_check(8) refuses it.
    damaged: bool = False
    chunks: Chunks = field(default_factory=Chunks)
    # What its metadata snapshot tells, if it has one: the blocks of each volume by its number.
    held: dict[int, dict[int, bytes]] | None = None

    def taken(self, disk: str) -> int:
        return super().taken(disk) + self.metadata.get(disk, 0)

    def status(self, extent_size_bytes: int) -> ThinPool:
        """What device-mapper says of it."""
        size = self.length * extent_size_bytes
        blocks, is_full = size // self.chunk_size_bytes, self.chunks.is_full
        metadata_blocks = sum(self.metadata.values()) * extent_size_bytes // 4096
        return ThinPool(
            size,
            "out_of_data_space" if is_full else self.mode,
            self.needs_check,
            blocks if is_full else self.used_data_blocks + self.chunks.leaked,
            blocks,
            self.used_metadata_blocks,
            metadata_blocks,
            self.held is not None,
        )


@dataclass
class FakeThin(FakeVolume):
    """A volume in a pool."""

    virtual_extents: int = 0
    pool: str = ""
    number: int = 0

    @property
    def length(self) -> int:
        return self.virtual_extents


@dataclass
class FakeGroup:
    """A volume group."""

    name: str
    uuid: str
    extent_size_bytes: int
    disks: list[FakeDisk]
    tags: set[str] = field(default_factory=set)
    volumes: dict[str, FakeVolume] = field(default_factory=dict)
    # What lvm2 keeps for the repair of pools' metadata, by disk.
    spare: dict[str, int] = field(default_factory=dict)
    # What is on the extents that removed volumes had.
    freed: list[Media] = field(default_factory=list)
    # What every free extent holds, and so what a new volume shows; empty for zeroes.
    old: bytes = b""
    # What was overwritten of a volume that had all that was free.
    swept: list[tuple[int, int]] = field(default_factory=list)
    # Of the extents that a volume had which was overwritten: they hold zeroes.
    clean: set[str] = field(default_factory=set)
    # From which disk to which all is being moved, and for how many looks still.
    moving: list[str] | None = None
    move_looks: int = 0
    # Of its metadata: counted up by each command that changes them.
    seqno: int = 1
    # Whose it is, if not anyone's: a node's, several nodes', nobody's for now.
    system_id: str = ""
    lock_type: str = ""
    exported: bool = False

    @property
    def checksum(self) -> int:
        """Of all that lvm2 would have in the metadata, also where a test changed it by hand."""
        told = [sorted(self.tags), self.disks, self.spare]
        told += [self.system_id, self.lock_type, self.exported]
        told += [volume.record for _, volume in sorted(self.volumes.items())]
        return zlib.crc32(repr(told).encode())

    def free(self, disk: FakeDisk) -> int:
        """The extents of a disk that no volume has."""
        taken = sum(one.taken(disk.name) for one in self.volumes.values())
        free = disk.extents - taken - self.spare.get(disk.name, 0)
        if self.moving is not None and disk.name == self.moving[1]:
            [source] = (one for one in self.disks if one.name == self.moving[0])
            free -= source.extents - self.free(source)
        return free

    def thin(self, pool: str) -> list[FakeThin]:
        """The volumes in a pool."""
        found = self.volumes.values()
        return [one for one in found if isinstance(one, FakeThin) and one.pool == pool]


@dataclass
class FakeExceptions:
    """What of an origin was written since a snapshot of it was taken."""

    origin: Media
    kept: Media
    chunk_bytes: int = BLOCK_BYTES

    def chunks(self) -> Iterator["array[int]"]:
        """In no order that helps, a few at a time."""
        those = self.origin.blocks.keys() | self.kept.blocks.keys()
        every = [
            one for one in those if self.origin.blocks.get(one) is not self.kept.blocks.get(one)
        ]
        for at in range(0, len(every), 256):
            yield array("Q", every[at : at + 256])


class Failure(Exception):
    """An lvm2 command that ends with exit code 5 and a message."""


class FakeLvm:
    """The program `lvm`, and the devices that its volumes have while they are active."""

    # Of several machines: their groups have UUIDs of their own.
    number = 0

    def __init__(self, devices: FakeDevices) -> None:
        self.groups: dict[str, FakeGroup] = {}
        self.version = "2.03.16(2) (2022-05-18)"
        self.devices = devices
        self._confined: set[str] | None = None
        # The disks that the node's devices file lists; None where there is no such file.
        self.devices_file: set[str] | None = None
        self._settings: dict[str, str] = {}
        # What the node's lvm.conf has; of lists, a group's name or nothing.
        self.conf: dict[str, str] = {}
        self._serial = itertools.count(1)
        self._numbers = itertools.count(1)

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
        device = self.devices.get(_node(group, name))
        uuid = self.groups[group].uuid.replace("-", "")
        own = volume.uuid.replace("-", "")
        return Device(device.path, (device.major, device.minor), uuid, own)

    def mapping(self, device: Device) -> Device | None:
        """The seam `lvm.devices.Devices`."""
        name = mapping_name(device)
        for one in list(self.devices):
            if one.of is not None and one.of.path == device.path and one.path.endswith(f"/{name}"):
                return replace(device, path=one.path, number=one.number, name=name, below=device)
        return None

    def close_leftovers(self, device: Device) -> None:
        """The seam `lvm.devices.Devices`."""
        for one in list(self.devices):
            is_left = one.path.startswith(LEFTOVER) and not self.devices.is_open(one.path)
            if is_left and one.of is not None and one.of.path == device.path:
                self.devices.remove(one.path)
                one.of.held -= 1

    def is_mapping_open(self, mapping: Device) -> bool:
        """The seam `lvm.devices.Devices`."""
        return self.devices.knows(mapping.path) and self.devices.is_open(mapping.path)

    def active(self, group: str) -> tuple[str, ...]:
        """The seam `lvm.devices.Devices`."""
        found = self.groups[group].volumes.values() if group in self.groups else ()
        return tuple(one.name for one in found if one.active)

    def status(self, group: str, name: str) -> tuple[Status, ...]:
        """The seam `lvm.devices.Devices`."""
        if name.startswith("pvmove"):
            return self._move_status(self.groups[group])
        volume = self.groups[group].volumes.get(name) if group in self.groups else None
        if volume is None or not volume.active:
            return ()
        if isinstance(volume, FakeThin):
            volume = self.groups[group].volumes[volume.pool]
        if isinstance(volume, FakePool):
            return (volume.status(self.groups[group].extent_size_bytes),)
        if volume.is_copy_on_write:
            size = self._size(self.groups[group], volume)
            sectors = volume.length * self.groups[group].extent_size_bytes // 512
            used = int(volume.data_percent / 100 * sectors)
            return (Snapshot(size, "Invalid" if volume.overflowed else "", used, sectors),)
        if volume.cache:
            return (self._cache_status(group, volume),)
        if not volume.layout.metadata_extents:
            return ()
        missing = {disk.name for disk in self.groups[group].disks if disk.missing}
        dead = missing | set(volume.failed)
        size = volume.length * self.groups[group].extent_size_bytes
        health = "".join(
            "D" if disk in dead else "a" if disk in volume.rebuilding else "A"
            for disk in volume.extents
        )
        left = max(volume.rebuilding.values(), default=0)
        action = "recover" if left else "idle"
        volume.rebuilding = {disk: one - 1 for disk, one in volume.rebuilding.items() if one > 1}
        sectors = size // 512
        return (Raid(size, volume.layout.kind, health, sectors // (left + 1), sectors, action),)

    def _move_status(self, group: FakeGroup) -> tuple[Status, ...]:
        """Each look finds it further; then lvm2's process puts it on record."""
        from fakes import repairs

        if group.moving is None:
            return ()
        group.move_looks -= 1
        if not group.move_looks:
            repairs.moved(group)
            return ()
        return (Mirror(group.extent_size_bytes, repairs.LOOKS - group.move_looks, repairs.LOOKS),)

    def _cache_status(self, group: str, volume: FakeVolume) -> Cache | WriteCache:
        """Where it is written back, a block is done between two looks."""
        size = volume.length * self.groups[group].extent_size_bytes
        dirty = volume.dirty_blocks
        volume.dirty_blocks -= bool(volume.cleaning and dirty)
        if volume.cache_kind == "cache":
            return Cache(size, "rw", dirty_blocks=dirty)
        return WriteCache(size, 0, 4096, 4096 - dirty, 0)

    def overflowed(self, disk: str, offset_bytes: int) -> bool | None:
        """The seam `lvm.devices.Devices`."""
        for group in self.groups.values():
            for volume in group.volumes.values():
                begins = _PE_START_BYTES + _first_extent(volume) * group.extent_size_bytes
                if disk in volume.extents and begins == offset_bytes:
                    return volume.overflowed
        return None

    def suspend(self, group: str, name: str) -> None:
        """The seam `lvm.devices.Devices`."""
        self._active(group, name).suspend()

    def resume(self, group: str, name: str) -> None:
        """The seam `lvm.devices.Devices`."""
        self._active(group, name).resume()

    def is_suspended(self, group: str, name: str) -> bool:
        """The seam `lvm.devices.Devices`."""
        return self.find(group, name) is not None and self._active(group, name).suspended

    def is_open(self, group: str, name: str) -> bool:
        """The seam `lvm.devices.Devices`."""
        return self.find(group, name) is not None and self.devices.is_open(_node(group, name))

    def thin_id(self, group: str, name: str) -> int | None:
        """The seam `lvm.devices.Devices`."""
        volume = self.groups[group].volumes.get(name)
        return volume.number if isinstance(volume, FakeThin) and volume.active else None

    def pool_data(self, group: str, pool: str) -> str:
        """The seam `lvm.devices.Devices`."""
        self._active_pool(group, pool)
        return _data_node(group, pool)

    def pool_metadata(self, group: str, pool: str) -> str:
        """The seam `lvm.devices.Devices`."""
        self._active_pool(group, pool)
        return f"/dev/mapper/{group}-{pool}_tmeta"

    def reserve_metadata(self, group: str, pool: str) -> None:
        """The seam `lvm.devices.Devices`."""
        found = self._active_pool(group, pool)
        if found.held is not None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), pool)
        found.held = {
            one.number: dict(one.media.blocks) for one in self.groups[group].thin(found.name)
        }

    def release_metadata(self, group: str, pool: str) -> None:
        """The seam `lvm.devices.Devices`."""
        found = self._active_pool(group, pool)
        if found.held is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), pool)
        found.held = None

    def _active_pool(self, group: str, pool: str) -> FakePool:
        found = self.groups[group].volumes.get(pool)
        if not isinstance(found, FakePool) or not found.active:
            raise lvm_errors.Inactive(group, pool)
        return found

    def exceptions(self, group: str, name: str) -> Exceptions:
        """The seam `lvm.devices.Devices`."""
        volume = self.groups[group].volumes[name]
        if not volume.active or not volume.is_copy_on_write:
            raise lvm_errors.Inactive(group, name)
        if volume.overflowed:
            raise lvm_errors.BadReport("it is no store of a snapshot that can be read")
        return FakeExceptions(self.groups[group].volumes[volume.origin].media, volume.media)

    def _active(self, group: str, name: str) -> FakeDevice:
        if self.find(group, name) is None:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), f"{group}/{name}")
        return self.devices.get(_node(group, name))

    def __call__(self, words: Sequence[str]) -> Result:
        """Carry out `lvm SUBCOMMAND …`."""
        arguments = _Arguments(words[2:])
        self._settings = {**self.conf, **_settings(arguments.take("--config"))}
        self._confined = set(filter(None, arguments.take("--devices").split(","))) or None
        try:
            command = {
                "version": self._version,
                "fullreport": self._fullreport,
                "vgcreate": self._vgcreate,
                "vgextend": self._vgextend,
                "vgreduce": self._vgreduce,
                "lvcreate": self._lvcreate,
                "lvchange": self._lvchange,
                "lvextend": self._lvextend,
                "lvremove": self._lvremove,
                "pvchange": self._pvchange,
                "lvconvert": self._lvconvert,
                "pvmove": self._pvmove,
                "vgchange": self._vgchange,
                "vgexport": self._vgexport,
                "vgimport": self._vgimport,
                "vgremove": self._vgremove,
                "lvrename": self._lvrename,
                "vgrename": self._vgrename,
            }[words[1]]
        except KeyError:
            raise AssertionError(f"the fake does not know: {' '.join(words)}") from None
        if self._settings.get("global/test") == "1" and not _LOOKS.intersection(words):
            return Result(0, "", "  TEST MODE: Metadata will NOT be updated\n")
        try:
            self._refuse_partial(words)
            output = command(arguments)
        except Failure as failure:
            return Result(5, "", f"  {failure}\n")
        arguments.require_empty(words)
        self._commit(words)
        return Result(0, output, "")

    def _refuse_partial(self, words: Sequence[str]) -> None:
        """While a disk is missing lvm2 changes little (handles_missing_pvs in its tools)."""
        unsafe = {"--cachepolicy", "--cachesettings", "--minrecoveryrate", "--maxrecoveryrate"}
        is_safe = (
            words[1] in {"version", "fullreport", "lvremove", "vgextend", "vgchange"}
            or (words[1] == "lvchange" and not unsafe.intersection(words))
            or (words[1] == "lvconvert" and "--repair" in words)
            or (words[1] == "vgreduce" and "--removemissing" in words)
        )
        named = () if is_safe else words[words.index("--") + 1 :]
        for group in self.groups.values():
            is_meant = any(one.partition("/")[0] == group.name for one in named)
            if is_meant and any(disk.missing for disk in group.disks):
                raise Failure(
                    f"Cannot change VG {group.name} while PVs are missing.\n"
                    "  See vgreduce --removemissing and vgextend --restoremissing."
                )

    def _commit(self, words: Sequence[str]) -> None:
        """Groups whose metadata a command that succeeded changed have them anew."""
        changed = not _LOOKS.intersection(words) and (
            words[1] != "lvchange" or _CHANGES.intersection(words)
        )
        if not changed:
            return
        named = words[words.index("--") + 1 :]
        names_of_groups = {word.partition("/")[0] for word in named}
        for group in self.groups.values():
            if group.name in names_of_groups or any(disk.name in named for disk in group.disks):
                group.seqno += 1

    def wrote(self, device: str, length_bytes: int) -> None:
        """So many bytes were written on a device for the first time since its snapshots."""
        for group in self.groups.values():
            # As a list: programs write while lvm2 is at work.
            for volume in list(group.volumes.values()):
                if not volume.active or _node(group.name, volume.name) != device:
                    continue
                if isinstance(volume, FakeThin):
                    self._fill(group, volume, length_bytes)
                for one in self._snapshots(group, volume):
                    area = one.length * group.extent_size_bytes
                    one.data_percent += 100 * length_bytes / area
                    if one.data_percent >= 100:
                        one.overflowed = one.media.unreadable = True

    @staticmethod
    def _fill(group: FakeGroup, volume: FakeThin, length_bytes: int) -> None:
        pool = group.volumes[volume.pool]
        assert isinstance(pool, FakePool)
        pool.used_data_blocks += -(-length_bytes // pool.chunk_size_bytes)
        whole = pool.status(group.extent_size_bytes).data_blocks
        assert pool.used_data_blocks <= whole, "a writer would wait for room"

    def _version(self, arguments: "_Arguments") -> str:
        return f"  LVM version:     {self.version}\n  Driver version:  4.47.0\n"

    def _fullreport(self, arguments: "_Arguments") -> str:
        assert arguments.take("--reportformat") == "json"
        assert arguments.take("--units") == "b"
        assert arguments.flag("--nosuffix")
        columns = {}
        while part := arguments.take("--configreport"):
            columns[part] = arguments.take("--options").split(",")
        rows = [self._report(group) for group in self.groups.values() if self._sees(group)]
        if orphans := self._orphans():
            rows.append({"pv": orphans, "pvseg": []})
        chosen = [
            {
                part: [{key: row[key] for key in columns[part]} for row in rows_of_part]
                for part, rows_of_part in one.items()
            }
            for one in rows
        ]
        return json.dumps({"report": [_formatted(one, self._settings) for one in chosen]})

    def _report(self, group: FakeGroup) -> dict[str, list[dict[str, str]]]:
        missing = {one.name for one in group.disks if one.missing or not self._reaches(one)}
        return {
            "vg": [
                {
                    "vg_name": group.name,
                    "vg_uuid": group.uuid,
                    "vg_extent_size": str(group.extent_size_bytes),
                    "vg_tags": ",".join(sorted(group.tags)),
                    "vg_missing_pv_count": str(len(missing)),
                    "vg_exported": "exported" if group.exported else "",
                    "vg_lock_type": group.lock_type,
                }
            ],
            "pv": [
                {
                    "pv_name": "[unknown]" if disk.name in missing else disk.name,
                    "pv_uuid": disk.uuid,
                    "pv_pe_count": str(disk.extents),
                    "pv_pe_alloc_count": str(disk.extents - group.free(disk)),
                    "pv_missing": "missing" if disk.name in missing else "",
                    "pv_allocatable": "allocatable" if disk.allocatable else "",
                    "pv_in_use": "used",
                    "pv_tags": ",".join(sorted(disk.tags)),
                    "pe_start": str(_PE_START_BYTES),
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
                    "lv_layout": _layout_words(volume),
                    "pool_lv": _pool(volume),
                    "origin": volume.origin or _hidden_origin(volume),
                    "lv_health_status": volume.health,
                    "lv_suspended": "suspended"
                    if self.is_suspended(group.name, volume.name)
                    else "",
                    "lv_metadata_size": _metadata_size(volume, group.extent_size_bytes),
                    **_status(volume),
                    **_tuned(volume),
                }
                for volume in group.volumes.values()
            ],
            "pvseg": [
                {"pv_uuid": disk.uuid, "lv_name": name, "pvseg_size": str(size)}
                for disk in group.disks
                for name, size in _segments(group, disk.name)
                if size
            ],
            "seg": [
                {
                    "lv_name": volume.name,
                    "seg_start": "0",
                    "seg_pe_ranges": _ranges(group, volume),
                }
                for volume in group.volumes.values()
            ],
        }

    def _sees(self, group: FakeGroup) -> bool:
        """Whether reports show it: they leave out other nodes' (vgs(8), --foreign and --shared)."""
        is_there = any(self._reaches(disk) for disk in group.disks)
        return is_there and not self._is_foreign(group) and not group.lock_type

    def _reaches(self, disk: FakeDisk) -> bool:
        """Whether a disk is one that lvm2 may look at; it takes others for missing.

        lvmdevices(8): --devices outweighs a devices file, which Debian's lvm2 heeds if told.
        """
        heeded = self._settings.get("devices/use_devicesfile") == "1"
        seen = self._confined or (self.devices_file if heeded else None)
        return seen is None or disk.name in seen

    @property
    def system_id(self) -> str:
        """What this node has in lvmlocal.conf."""
        source = self._settings.get("global/system_id_source")
        return self._settings.get("local/system_id", "") if source == "lvmlocal" else ""

    def _is_foreign(self, group: FakeGroup) -> bool:
        return group.system_id not in ("", self.system_id)

    def _require_own(self, group: FakeGroup) -> None:
        """What lvm2 changes nothing of (lib/metadata/metadata.c: access_vg_…, vg_read())."""
        if group.exported:
            raise Failure(f"Volume group {group.name} is exported")
        if group.lock_type:
            told = f"{group.name} with lock type {group.lock_type}"
            raise Failure(f"Cannot access VG {told} that requires lvmlockd.")
        if self._is_foreign(group):
            own = f"local system ID {self.system_id}" if self.system_id else "unknown local system"
            told = f"{group.name} with system ID {group.system_id} with {own}"
            raise Failure(f"Cannot access VG {told}.")

    def _orphans(self) -> list[dict[str, str]]:
        """Disks that lvm2 has labelled, and no group has: they are reported without a group."""
        taken = {disk.name for group in self.groups.values() for disk in group.disks}
        return [
            {
                "pv_name": device.path,
                "pv_uuid": device.contents.uuid,
                "pv_pe_count": "0",
                "pv_pe_alloc_count": "0",
                "pv_missing": "",
                "pv_allocatable": "",
                # A label of a group that is not there any more.
                "pv_in_use": "used" if device.contents.label == "used" else "",
                "pv_tags": "",
                "pe_start": str(_PE_START_BYTES),
            }
            for device in self.devices
            if device.contents is not None
            and device.contents.fs_type == _LABEL
            and device.path not in taken
            and (not self._confined or device.path in self._confined)
        ]

    def _vgcreate(self, arguments: "_Arguments") -> str:
        assert arguments.flag("--quiet")
        assert arguments.flag("--quiet")
        tags = set(arguments.take_all("--addtag"))
        name, *paths = arguments.rest()
        if name in self.groups:
            raise Failure(f"A volume group called {name} already exists.")
        extent = 4 << 20
        disks = [self._labelled(path, extent) for path in paths]
        self.groups[name] = FakeGroup(name, self._uuid(), extent, disks, tags)
        return f'  Volume group "{name}" successfully created\n'

    def _labelled(self, path: str, extent_size_bytes: int) -> FakeDisk:
        """A disk that becomes one of a group's."""
        device = self.devices.get(path)
        assert device.contents is None or device.contents.fs_type == _LABEL, "not blank"
        device.contents = Signature(_LABEL, "raid", self._uuid())
        # The first extent's worth holds the metadata, as with lvm2's default alignment.
        extents = (device.size_bytes - _PE_START_BYTES) // extent_size_bytes
        return FakeDisk(path, self._uuid(), extents)

    def _pvmove(self, arguments: "_Arguments") -> str:
        from fakes import repairs

        assert arguments.flag("--background"), "it would wait for hours"
        assert self._settings["global/use_lvmpolld"] == "0", "that would look at all disks"
        disks = arguments.rest()
        return repairs.move(self, *disks) if disks else ""

    def _vgchange(self, arguments: "_Arguments") -> str:
        removed, added = arguments.take_all("--deltag"), arguments.take_all("--addtag")
        is_sure = arguments.flag("--yes")
        if arguments.given("--lock-type"):
            return self._unshare(arguments)
        is_given, system_id = arguments.given("--systemid"), arguments.take("--systemid")
        (name,) = arguments.rest()
        group = self._group(name)
        group.tags = (group.tags - set(removed)) | set(added)
        if is_given:
            assert is_sure, "lvm2 would ask"
            group.system_id = system_id
        return ""

    def _unshare(self, arguments: "_Arguments") -> str:
        """lvmlockd(8): by force, without one; lvm2 2.03.31 must be told to use one all the same."""
        assert arguments.take("--lock-type") == "none"
        is_forced = arguments.take("--lockopt") == "force"
        (name,) = arguments.rest()
        if is_forced and self._settings.get("global/use_lvmlockd") == "1":
            self.groups[name].lock_type = ""
        # It fails with success: "Using lock type requires lvmlockd."
        return ""

    def _vgexport(self, arguments: "_Arguments") -> str:
        (name,) = arguments.rest()
        group = self._group(name)
        if any(one.active for one in group.volumes.values()):
            raise Failure(f'Volume group "{name}" has active logical volumes')
        group.exported, group.system_id = True, ""
        return ""

    def _vgimport(self, arguments: "_Arguments") -> str:
        (name,) = arguments.rest()
        group = self.groups[name]
        if not group.exported:
            raise Failure(f'Volume group "{name}" is not exported')
        group.exported, group.system_id = False, self.system_id
        return ""

    def _vgremove(self, arguments: "_Arguments") -> str:
        assert arguments.flag("--yes")
        (name,) = arguments.rest()
        group = self._group(name)
        assert not group.volumes, "it would remove them too"
        del self.groups[name]
        for disk in group.disks:
            self._unlabel(disk)
        return ""

    def _lvrename(self, arguments: "_Arguments") -> str:
        name, old, new = arguments.rest()
        group = self._group(name)
        if new in group.volumes:
            raise Failure(f'Logical volume "{new}" already exists in volume group "{name}"')
        volume = group.volumes.pop(old)
        with self._renamed(group, volume):
            volume.name = new
        group.volumes[new] = volume
        return ""

    def _vgrename(self, arguments: "_Arguments") -> str:
        old, new = arguments.rest()
        group = self._group(old)
        with self._renamed(group, *group.volumes.values()):
            del self.groups[old]
            group.name = new
            self.groups[new] = group
        # By its old name it is not found when it is committed.
        group.seqno += 1
        return ""

    @contextmanager
    def _renamed(self, group: FakeGroup, *those: FakeVolume) -> Iterator[None]:
        """What is active has its device under the new name."""
        active = [one for one in those if one.active]
        for one in active:
            self._deactivate_one(group, one)
        yield
        for one in active:
            self._activate_one(group, one)

    def _vgextend(self, arguments: "_Arguments") -> str:
        while arguments.flag("--quiet"):
            pass
        name, *paths = arguments.rest()
        group = self._group(name)
        group.disks += [self._labelled(path, group.extent_size_bytes) for path in paths]
        return ""

    def _vgreduce(self, arguments: "_Arguments") -> str:
        from fakes import repairs

        if arguments.flag("--removemissing"):
            (name,) = arguments.rest()
            return repairs.reduce_missing(self._group(name))
        name, *paths = arguments.rest()
        group = self._group(name)
        for disk in [one for one in group.disks if one.name in paths]:
            if group.free(disk) < disk.extents:
                raise Failure(f'Physical volume "{disk.name}" still in use')
            group.disks.remove(disk)
            self._unlabel(disk)
        return ""

    def _unlabel(self, disk: FakeDisk) -> None:
        """It stays lvm2's, in no group."""
        if self.devices.knows(disk.name):
            self.devices.get(disk.name).contents = Signature(_LABEL, "raid", disk.uuid)

    def _lvcreate(self, arguments: "_Arguments") -> str:
        assert arguments.flag("--yes")
        if arguments.has("--type", "snapshot"):
            return self._snapshot(arguments)
        if arguments.flag("--snapshot"):
            return self._thin_snapshot(arguments)
        if arguments.has("--type", "thin-pool"):
            return self._lvcreate_pool(arguments)
        if arguments.has("--type", "thin"):
            return self._lvcreate_thin(arguments)
        if arguments.has("--type", "cache") or arguments.has("--type", "writecache"):
            return self._lvcreate_cached(arguments)
        activate, test = arguments.take("--activate"), arguments.flag("--test")
        # What is not active cannot be wiped.
        wiped = (arguments.take("--wipesignatures"), arguments.take("--zero"))
        assert wiped == (activate, activate)
        skipped = arguments.take("--setactivationskip") == "y"
        assert arguments.flag("--ignoreactivationskip") or not skipped
        size, name = _bytes(arguments.take("--size")), arguments.take("--name")
        tags = set(arguments.take_all("--addtag"))
        layout, tuning = _layout(arguments), _tuning(arguments).over(PLAIN)
        if (tuning.minimum_recovery_kib or 0) > (tuning.maximum_recovery_kib or 0):
            # Also where no maximum is named.
            raise Failure("Minimum recovery rate cannot be higher than maximum.")
        group_name, *disks = arguments.rest()
        group = self._group(group_name)
        _require_new(group, name)
        extents = -(-size // group.extent_size_bytes)
        volume = FakeVolume(name, self._uuid(), {}, tags, activation_skipped=skipped, layout=layout)
        volume.tuning = tuning
        self._allocate(group, volume, extents, disks)
        self._uncover(group, volume, 0)
        # The first sectors are zeroed.
        volume.media.blocks.pop(0, None)
        if not test:
            group.volumes[name] = volume
            if activate == "y":
                self._activate(group, volume)
                self._require_active(group, volume)
        return f'  Logical volume "{name}" created.\n'

    def _require_active(self, group: FakeGroup, volume: FakeVolume) -> None:
        """A volume that cannot be wiped is removed again, unless nothing is active anyway."""
        if not volume.active and self._settings.get("global/activation") != "0":
            del group.volumes[volume.name]
            why = "is not active locally (volume_list activation filter?)."
            raise Failure(f"Volume {group.name}/{volume.name} {why}")

    def _lvcreate_cached(self, arguments: "_Arguments") -> str:
        """The volume, its cachevol, then both in one; undone where the cachevol does not fit."""
        kind, cache_size = arguments.take("--type"), arguments.take("--cachesize")
        fast = arguments.take_all("--cachedevice")
        group_name, name = arguments.value("--"), arguments.value("--name")
        arguments.put("--type", "linear")
        arguments.put("--yes")
        self._lvcreate(arguments)
        group = self._group(group_name)
        volume = group.volumes[name]
        try:
            self._attach(group, volume, kind, self._cachevol(group, volume, cache_size, fast))
        except Failure:
            self.deactivate(group.name, name)
            del group.volumes[name]
            raise
        return f"  Logical volume {group.name}/{name} is now cached.\n"

    def _cachevol(
        self, group: FakeGroup, volume: FakeVolume, size: str, disks: Sequence[str]
    ) -> FakeVolume:
        made = FakeVolume(f"{volume.name}_cache", self._uuid(), {})
        _require_new(group, made.name)
        assert disks, "no --cachedevice"
        self._allocate(group, made, -(-_bytes(size) // group.extent_size_bytes), disks)
        return made

    @staticmethod
    def _attach(group: FakeGroup, volume: FakeVolume, kind: str, cache: FakeVolume) -> None:
        assert not volume.cache
        group.volumes.pop(cache.name, None)
        volume.cache, volume.cache_kind = cache, kind

    def _snapshot(self, arguments: "_Arguments") -> str:
        """A copy-on-write snapshot: its own extents are the area, its device is the origin's size.

        It is active whenever its origin is, whatever its own flags say.
        """
        assert arguments.take("--type") == "snapshot"
        read_only = arguments.take("--permission") == "r"
        skipped = arguments.take("--setactivationskip") == "y"
        assert arguments.take("--chunksize") == "4096b"
        size, name = _bytes(arguments.take("--size")), arguments.take("--name")
        tags = set(arguments.take_all("--addtag"))
        path, *disks = arguments.rest()
        group, origin = self._found(path)
        assert not origin.origin, "Snapshots of snapshots are not supported."
        assert not origin.cache or origin.cache_kind == "writecache", "lvm2 would damage its data"
        _require_new(group, name)
        area = FakeVolume(name, self._uuid(), {}, tags, activation_skipped=skipped)
        self._allocate(group, area, -(-size // group.extent_size_bytes), disks)
        area.read_only, area.origin, area.media = read_only, origin.name, origin.media.copy()
        group.volumes[name] = area
        if origin.active:
            self._activate_one(group, area)
            # lvm2 suspends it, unless it is, and resumes it.
            self.resume(group.name, origin.name)
        return f'  Logical volume "{name}" created.\n'

    def _lvconvert(self, arguments: "_Arguments") -> str:
        assert arguments.flag("--yes")
        if arguments.flag("--repair"):
            from fakes import repairs

            path, *disks = arguments.rest()
            return repairs.repair(self, *self._found(path), disks)
        if kind := arguments.take("--type"):
            return self._lvconvert_to_cached(arguments, kind)
        if arguments.flag("--splitcache"):
            (path,) = arguments.rest()
            group, volume = self._found(path.removesuffix("_tdata"))
            of_pool = isinstance(volume, FakePool)
            assert of_pool == path.endswith("_tdata"), 'lvm2: "Cannot find cache"'
            assert volume.cache, f"{volume.name} has no cache"
            assert volume.active, "what is in the cache cannot be written back"
            assert of_pool or not volume.dirty_blocks, "lvm2 would write it back under its lock"
            # What was written to the volume went through it.
            volume.cache.media.blocks |= dict(enumerate(volume.media.blocks.values()))
            group.volumes[volume.cache.name], volume.cache = volume.cache, None
            return ""
        assert arguments.flag("--splitsnapshot")
        group, volume = self._volume(arguments)
        assert volume.is_copy_on_write, f"{volume.name} is not a snapshot."
        if self._is_open(group, volume):
            raise Failure(f"Logical volume {group.name}/{volume.name} in use.")
        was_active = volume.active
        self._deactivate_one(group, volume)
        # What is in the area is no file system: chunks of the origin in the order of their copying.
        held = dict(enumerate(volume.media.blocks.values()))
        volume.origin, volume.media = "", Media(residue=True, blocks=held)
        if was_active:
            self._activate_one(group, volume)
        return f"  Logical Volume {group.name}/{volume.name} split from its origin.\n"

    def _lvconvert_to_cached(self, arguments: "_Arguments", kind: str) -> str:
        cachevol, size = arguments.take("--cachevol"), arguments.take("--cachesize")
        fast = arguments.take_all("--cachedevice")
        group, volume = self._volume(arguments)
        if cachevol:
            cache = group.volumes[cachevol]
            self.deactivate(group.name, cachevol)
        else:
            cache = self._cachevol(group, volume, size, fast)
        self._attach(group, volume, kind, cache)
        return ""

    def _thin_snapshot(self, arguments: "_Arguments") -> str:
        """A volume that shares a pool with its origin, and is whole without it."""
        read_only = arguments.take("--permission") == "r"
        assert arguments.take("--setactivationskip") == "y"
        activate = arguments.take("--activate")
        assert arguments.flag("--ignoreactivationskip") == (activate == "y")
        name, tags = arguments.take("--name"), set(arguments.take_all("--addtag"))
        tuning = _tuning(arguments).over(PLAIN)
        group, origin = self._volume(arguments)
        _require_new(group, name)
        assert isinstance(origin, FakeThin), "lvm2 would ask for a size"
        # lvm2 2.03.16 says yes, and does not tell the pool: it takes no more volumes afterwards.
        assert not self.is_suspended(group.name, origin.name), "the pool would be damaged"
        made = FakeThin(
            *(name, self._uuid(), {}, tags),
            activation_skipped=True,
            layout=origin.layout,
            media=origin.media.copy(),
            read_only=read_only,
            origin=origin.name,
            # Its origin's is not inherited.
            tuning=tuning,
            virtual_extents=origin.virtual_extents,
            pool=origin.pool,
            number=next(self._numbers),
        )
        group.volumes[name] = made
        if activate:
            self._activate(group, made)
        return f'  Logical volume "{name}" created.\n'

    def _lvcreate_pool(self, arguments: "_Arguments") -> str:
        assert arguments.take("--type") == "thin-pool"
        assert (arguments.take("--zero"), arguments.take("--discards")) == ("y", "passdown")
        assert arguments.take("--monitor") == "n"
        skipped = arguments.take("--setactivationskip") == "y"
        assert arguments.take("--activate") == "y"
        assert arguments.flag("--ignoreactivationskip") or not skipped
        chunk = _bytes(arguments.take("--chunksize"))
        metadata, size = (_bytes(arguments.take(one)) for one in ("--poolmetadatasize", "--size"))
        name, tags = arguments.take("--name"), set(arguments.take_all("--addtag"))
        group_name, *disks = arguments.rest()
        group = self._group(group_name)
        _require_new(group, name)
        assert metadata >= 2 << 20, "lvm2 would round that up by itself"
        assert size >= chunk, "lvm2 refuses a pool of less than a chunk"
        extents, of_metadata = (-(-one // group.extent_size_bytes) for one in (size, metadata))
        pool = FakePool(
            *(name, self._uuid(), {}, tags), activation_skipped=skipped, chunk_size_bytes=chunk
        )
        usable = _usable(group, disks)
        missing = self._missing_spare(group, of_metadata)
        free = [group.free(disk) for disk in usable]
        if extents + of_metadata + missing > sum(free) or of_metadata > max(free):
            raise Failure(f'Volume group "{group.name}" has insufficient free space')
        group.volumes[name] = pool
        # In one piece, on one disk.
        roomiest = max(usable, key=group.free)
        self._append(group, pool.metadata, of_metadata, [roomiest])
        self._append(group, pool.extents, extents, usable)
        self._append(group, group.spare, missing, usable)
        self._activate(group, pool)
        return f'  Logical volume "{name}" created.\n'

    @staticmethod
    def _missing_spare(group: FakeGroup, metadata_extents: int) -> int:
        return max(0, metadata_extents - sum(group.spare.values()))

    def _lvcreate_thin(self, arguments: "_Arguments") -> str:
        assert arguments.take("--type") == "thin"
        skipped = arguments.take("--setactivationskip") == "y"
        assert arguments.take("--activate") == "y"
        assert arguments.flag("--ignoreactivationskip") or not skipped
        size = _bytes(arguments.take("--virtualsize"))
        pool, name = arguments.take("--thinpool"), arguments.take("--name")
        tags, tuning = set(arguments.take_all("--addtag")), _tuning(arguments).over(PLAIN)
        (group_name,) = arguments.rest()
        group = self._group(group_name)
        _require_new(group, name)
        within = group.volumes.get(pool)
        if not isinstance(within, FakePool):
            raise Failure(f"Thin pool {group_name}/{pool} not found.")
        volume = FakeThin(
            *(name, self._uuid(), {}, tags),
            activation_skipped=skipped,
            layout=Layout("thin"),
            tuning=tuning,
            virtual_extents=-(-size // group.extent_size_bytes),
            pool=pool,
            number=next(self._numbers),
        )
        if name.startswith("wipe-"):
            size = within.length * group.extent_size_bytes
            within.chunks.begin(within.media, within.chunk_size_bytes, size)
            volume.media.below = within.chunks
        group.volumes[name] = volume
        self._activate(group, volume)
        return f'  Logical volume "{name}" created.\n'

    def _lvchange(self, arguments: "_Arguments") -> str:
        activate = arguments.take("--activate")
        ignored = arguments.flag("--ignoreactivationskip")
        removed, added = arguments.take_all("--deltag"), arguments.take_all("--addtag")
        permission, refreshed = arguments.take("--permission"), arguments.flag("--refresh")
        partial = arguments.take("--activationmode") == "partial"
        policy, settings = arguments.take("--cachepolicy"), arguments.take("--cachesettings")
        action = arguments.take("--syncaction")
        assert arguments.flag("--yes") == bool(policy or settings)
        tuning = _tuning(arguments)
        path, *further = arguments.rest()
        group, volume = self._found(path)
        assert not further or not (activate or permission or refreshed), "not needed so far"
        for _, one in map(self._found, further):
            one.tags = (one.tags - set(removed)) | set(added)
        self._tune(group, volume, tuning)
        if policy or settings:
            wanted = {"cache": ("cleaner", ""), "writecache": ("", "cleaner=1")}
            assert (policy, settings) == wanted[volume.cache_kind]
            volume.cleaning = True
        if refreshed:
            self.resume(group.name, volume.name)
            # It is brought in sync again, and so overwritten.
            volume.failed, volume.health = {}, volume.health.replace("refresh needed", "")
        if action:
            assert action == "repair"
            volume.health = volume.health.replace("mismatches exist", "")
        if permission:
            assert permission == "rw"
            if not volume.read_only:
                raise Failure(f'Logical volume "{group.name}/{volume.name}" is already writable.')
            volume.read_only = False
            if volume.active:
                self.devices.get(_node(group.name, volume.name)).read_only = False
        volume.tags -= set(removed)
        volume.tags |= set(added)
        if activate == "n":
            self._refuse_open(group, volume)
            self.deactivate(group.name, volume.name)
        elif activate:
            assert activate == "y"
            # "Change of snapshot will also change its origin. Proceed?"
            assert not volume.is_copy_on_write, "lvm2 would ask, and get no answer"
            if not partial and _gone(group, volume) and volume.layout.kind in ("linear", "striped"):
                path = f"{group.name}/{volume.name}"
                raise Failure(f"Refusing activation of partial LV {path}.")
            if ignored or not volume.activation_skipped:
                self._activate(group, volume)
        return ""

    def _tune(self, group: FakeGroup, volume: FakeVolume, tuning: Tuning) -> None:
        """All of it, or nothing."""
        path, ahead = f"{group.name}/{volume.name}", tuning.read_ahead_bytes
        if tuning.is_of_recovery and not volume.layout.is_raid:
            raise Failure(f"Command on LV {path} uses options that require LV types raid .")
        if ahead is not None and self._snapshots(group, volume):
            raise Failure(
                f"Command on LV {path} uses options that are invalid with LV properties:"
                " lv_is_thick_origin ."
            )
        if ahead == volume.tuning.read_ahead_bytes:
            raise Failure(f"Read ahead is already {ahead} for {path}.")
        if tuning.over(volume.tuning).refusal:
            raise Failure("Minimum recovery rate cannot be higher than maximum.")
        volume.tuning = tuning.over(volume.tuning)

    def _lvextend(self, arguments: "_Arguments") -> str:
        if more := arguments.take("--poolmetadatasize"):
            return self._extend_metadata(arguments, _bytes(more.removeprefix("+")))
        size = _bytes(arguments.take("--size"))
        path, *disks = arguments.rest()
        group, volume = self._found(path)
        extents = -(-size // group.extent_size_bytes)
        if extents == volume.length:
            raise Failure(
                f"New size ({extents} extents) matches existing size ({extents} extents)."
            )
        assert extents > volume.length, "lvextend never shrinks"
        if volume.active and self._snapshots(group, volume):
            raise Failure(
                "Snapshot origin volumes can be resized only while inactive: try lvchange -an."
            )
        if isinstance(volume, FakeThin):
            volume.virtual_extents = extents
        else:
            # What is in it stays, and is a lesser part of it.
            volume.data_percent *= volume.length / extents
            before = volume.length
            named = {one for one in disks if ":" in one}
            disks = [one.partition(":")[0] for one in disks]
            self._allocate(group, volume, extents - volume.length, disks)
            if not named or not named <= group.clean:
                self._uncover(group, volume, before)
            group.clean -= named
        if volume.active:
            shown = self._size(group, volume)
            self.devices.resize(_node(group.name, volume.name), shown)
            if isinstance(volume, FakePool):
                self.devices.resize(_data_node(group.name, volume.name), shown)
        return ""

    def _extend_metadata(self, arguments: "_Arguments", more_bytes: int) -> str:
        path, *disks = arguments.rest()
        group, pool = self._found(path)
        usable = _usable(group, disks)
        assert isinstance(pool, FakePool)
        more = -(-more_bytes // group.extent_size_bytes)
        missing = self._missing_spare(group, sum(pool.metadata.values()) + more)
        free = sum(group.free(disk) for disk in usable)
        if more + missing > free:
            raise Failure(f'Volume group "{group.name}" has insufficient free space')
        self._append(group, pool.metadata, more, usable)
        self._append(group, group.spare, missing, usable)
        return ""

    def _lvremove(self, arguments: "_Arguments") -> str:
        assert arguments.flag("--yes")
        forced = arguments.flag("--force") and arguments.flag("--force")
        if arguments.value("--").endswith("/lvol0_pmspare"):
            (path,) = arguments.rest()
            self._group(path.partition("/")[0]).spare.clear()
            return ""
        # With --yes the snapshots of an origin go with it, and with a pool what is in it.
        named = [self._found(path) for path in arguments.rest()]
        held = [
            (group, one) for group, volume in named for one in (*group.thin(volume.name), volume)
        ]
        for group, one in held:
            self._refuse_open(group, one)
        for group, one in held:
            self.deactivate(group.name, one.name)
            self._deactivate_one(group, one)
            for gone in (one, *self._snapshots(group, one)):
                del group.volumes[gone.name]
                self._free(group, gone)
            for other in group.volumes.values():
                # A thin snapshot is whole without its origin.
                other.origin = "" if other.origin == one.name else other.origin
            if not any(isinstance(other, FakePool) for other in group.volumes.values()):
                group.spare.clear()
        for group, one in held:
            pool = group.volumes.get(one.pool) if isinstance(one, FakeThin) else None
            if isinstance(pool, FakePool) and _is_lost(group, pool) and not forced:
                # It is gone from the metadata by then, and the pool has it still.
                raise Failure(f"Failed to update thin pool {group.name}/{pool.name}.")
        return ""

    @staticmethod
    def _free(group: FakeGroup, gone: FakeVolume) -> None:
        """What it held stays on its extents; of a thin one, in its pool."""
        if isinstance(gone, FakeThin):
            pool = group.volumes.get(gone.pool)
            if isinstance(pool, FakePool):
                chunks = pool.length * group.extent_size_bytes // BLOCK_BYTES
                held = gone.media.blocks if gone.media.below is None else {}
                pool.media.blocks |= {number % chunks: data for number, data in held.items()}
                pool.chunks.is_full = False
        else:
            group.freed += [gone.media, *([gone.cache.media] if gone.cache else [])]
            if not gone.media.blocks:
                group.clean |= set(_ranges(group, gone).split())
            group.freed += gone.failed.values()
            if gone.name == "sweep":
                group.swept += [(at, at + size) for at, size in gone.media.zeroed]

    def _pvchange(self, arguments: "_Arguments") -> str:
        allocatable = arguments.take("--allocatable")
        tags = arguments.take_all("--addtag")
        chosen = arguments.rest()
        for group in self.groups.values():
            for disk in group.disks:
                if disk.name in chosen:
                    disk.allocatable = allocatable == "y" if allocatable else disk.allocatable
                    disk.tags |= set(tags)
        return ""

    def deactivate(self, group: str, name: str) -> None:
        """Take a volume's device away, as a reboot or an operator does; a snapshot stays."""
        found = self.groups[group]
        volume = found.volumes[name]
        if not volume.is_copy_on_write:
            for one in (*self._snapshots(found, volume), volume):
                self._deactivate_one(found, one)

    def _deactivate_one(self, group: FakeGroup, volume: FakeVolume) -> None:
        if volume.active:
            self.devices.remove(_node(group.name, volume.name))
            volume.active = False
            if isinstance(volume, FakePool):
                self.devices.get(_data_node(group.name, volume.name)).held = 0
                self.devices.remove(_data_node(group.name, volume.name))

    def _activate(self, group: FakeGroup, volume: FakeVolume) -> None:
        """An origin and its snapshots are active together."""
        top = group.volumes[volume.origin] if volume.is_copy_on_write else volume
        for one in (top, *self._snapshots(group, top)):
            self._activate_one(group, one)

    def _activate_one(self, group: FakeGroup, volume: FakeVolume) -> None:
        if isinstance(volume, FakePool) and volume.damaged and not volume.active:
            path = f"{group.name}/{volume.name}"
            raise Failure(f"Check of pool {path} failed (status:64). Manual repair required!")
        if self._settings.get("activation/volume_list", group.name) != group.name:
            return  # and it succeeds
        if not volume.active and self._settings.get("global/activation") != "0":
            node, size = _node(group.name, volume.name), self._size(group, volume)
            device = self.devices.add(node, size, volume.media)
            listed = self._settings.get("activation/read_only_volume_list") == group.name
            device.read_only = volume.read_only or listed
            device.missing = _gone(group, volume)
            volume.active = True
            if isinstance(volume, FakePool):
                # Held by the pool, so that nobody has it alone.
                data = _data_node(group.name, volume.name)
                self.devices.add(data, size, volume.media).held = 1
            if isinstance(volume, FakeThin):
                self._activate(group, group.volumes[volume.pool])

    @staticmethod
    def _size(group: FakeGroup, volume: FakeVolume) -> int:
        """What its device has: a snapshot's is as large as its origin."""
        shown = group.volumes[volume.origin] if volume.is_copy_on_write else volume
        return shown.length * group.extent_size_bytes

    @staticmethod
    def _snapshots(group: FakeGroup, volume: FakeVolume) -> list[FakeVolume]:
        return [
            one
            for one in list(group.volumes.values())
            if one.is_copy_on_write and one.origin == volume.name
        ]

    def _refuse_open(self, group: FakeGroup, volume: FakeVolume) -> None:
        for one in (volume, *self._snapshots(group, volume)):
            if self._is_open(group, one):
                raise Failure(f"Logical volume {group.name}/{one.name} in use.")

    def _allocate(
        self, group: FakeGroup, volume: FakeVolume, extents: int, names_: Sequence[str]
    ) -> None:
        usable = _usable(group, names_)
        if volume.layout.is_linear:
            self._append(group, volume.extents, extents, usable)
        else:
            self._spread(group, volume, extents, usable)

    @staticmethod
    def _append(
        group: FakeGroup, area: dict[str, int], extents: int, usable: Sequence[FakeDisk]
    ) -> None:
        free = sum(group.free(disk) for disk in usable)
        if extents > free:
            raise Failure(
                f'Volume group "{group.name}" has insufficient free space ({free} extents):'
                f" {extents} required."
            )
        parts = {disk.name: group.free(disk) for disk in usable}
        for name, available in parts.items():
            if part := min(extents, available):
                area[name] = area.get(name, 0) + part
            extents -= part

    @staticmethod
    def _spread(
        group: FakeGroup, volume: FakeVolume, extents: int, usable: Sequence[FakeDisk]
    ) -> None:
        layout = volume.layout
        assert extents % layout.stripes == 0, "lvm2 would round that up by itself"
        assert len(usable) <= layout.disks, "the caller names the disks"
        on_each = extents // layout.stripes + (0 if volume.extents else layout.metadata_extents)
        if len(usable) < layout.disks or any(group.free(disk) < on_each for disk in usable):
            raise Failure(
                f"Insufficient suitable allocatable extents for logical volume {volume.name}:"
                f" {on_each * layout.disks} more required"
            )
        for disk in usable:
            volume.extents[disk.name] = volume.extents.get(disk.name, 0) + on_each

    @staticmethod
    def _uncover(group: FakeGroup, volume: FakeVolume, first_extent: int) -> None:
        """What was on the extents that a volume has new is on it."""
        if not group.old:
            return
        blocks = group.extent_size_bytes // BLOCK_BYTES
        block = group.old.ljust(BLOCK_BYTES, b"\0")
        new = range(first_extent * blocks, volume.length * blocks)
        volume.media.blocks |= dict.fromkeys(new, block)

    def _is_open(self, group: FakeGroup, volume: FakeVolume) -> bool:
        return volume.active and self.devices.is_open(_node(group.name, volume.name))

    def _group(self, name: str) -> FakeGroup:
        if name not in self.groups:
            raise Failure(f'Volume group "{name}" not found')
        self._require_own(self.groups[name])
        return self.groups[name]

    def _volume(self, arguments: "_Arguments") -> tuple[FakeGroup, FakeVolume]:
        path, *rest = arguments.rest()
        assert not rest, rest
        return self._found(path)

    def _found(self, path: str) -> tuple[FakeGroup, FakeVolume]:
        group_name, _, name = path.partition("/")
        group = self._group(group_name)
        if name not in group.volumes:
            raise Failure(f'Failed to find logical volume "{path}"')
        return group, group.volumes[name]

    def _uuid(self) -> str:
        # Unlike in the first characters, as LVM's own are.
        digits = f"{1000 * self.number + next(self._serial):032d}"[::-1]
        parts: Iterator[str] = iter(digits)
        return "-".join("".join(itertools.islice(parts, size)) for size in _UUID_GROUPS)


# Commands that change nothing, and what lvchange changes but whether a volume is active.
_LOOKS = {"version", "fullreport", "--test", "--syncaction"}
_CHANGES = {
    *("--addtag", "--deltag", "--permission", "--cachepolicy", "--cachesettings"),
    *("--readahead", "--minrecoveryrate", "--maxrecoveryrate"),
}


def _settings(told: str) -> dict[str, str]:
    """lvm.conf(5) settings on the command line, such as `report/buffered=1 backup/backup=0`."""
    pairs = (one.split("=", 1) for one in told.split())
    return {key: value.strip('"') for key, value in pairs}


# lib/report/values.h: what stands for yes, where a column knows yes and no only.
_BINARY = {
    *("vg_exported", "pv_missing", "pv_allocatable", "pv_in_use"),
    *("lv_suspended", "lv_snapshot_invalid"),
}
_LISTS = {"vg_tags", "pv_tags", "lv_tags", "lv_layout"}


def _formatted(
    part: dict[str, list[dict[str, str]]], settings: dict[str, str]
) -> dict[str, list[dict[str, str]]]:
    """The rows of a group in the form that lvm.conf's `report` section asks for."""

    def value(column: str, text: str) -> str:
        if settings.get("report/binary_values_as_numeric") == "1" and column in _BINARY:
            return "01"[bool(text)] if text != "unknown" else "-1"
        if settings.get("report/mark_hidden_devices") == "0":
            text = text.strip("[]")
        if column in _LISTS:
            text = text.replace(",", settings.get("report/list_item_separator", ","))
        return text

    compact = settings.get("report/compact_output") == "1"
    return {
        name: [
            {
                column: value(column, text)
                for column, text in row.items()
                if not compact or any(other[column] for other in rows)
            }
            for row in rows
        ]
        for name, rows in part.items()
    }


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

    def has(self, option: str, value: str) -> bool:
        return (option, value) in itertools.pairwise(self._words)

    def value(self, option: str) -> str:
        """What an option says; it stays."""
        return self._words[self._words.index(option) + 1]

    def put(self, *words: str) -> None:
        """Words more."""
        self._words[:0] = words

    def given(self, option: str) -> bool:
        """Whether an option is there, also one that says nothing; it stays."""
        return option in self._words

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


def _layout(arguments: _Arguments) -> Layout:
    kind = arguments.take("--type")
    size = arguments.take("--stripesize")
    return Layout(
        kind,
        stripes=int(arguments.take("--stripes") or 1),
        mirrors=int(arguments.take("--mirrors") or 0),
        stripe_size_bytes=_bytes(size) if size else 0,
    )


def _status(volume: FakeVolume) -> dict[str, str]:
    """What lvm2 asks the kernel; of what is not active it knows nothing."""
    if isinstance(volume, FakePool) and volume.active:
        told = volume.status(4 << 20)
        return {
            "data_percent": f"{told.data_percent:.2f}",
            "metadata_percent": f"{told.metadata_percent:.2f}",
            "lv_snapshot_invalid": "",
            "lv_permissions": "writeable",
        }
    known = volume.is_copy_on_write and volume.active
    percent = f"{100.0 if volume.overflowed else volume.data_percent:.2f}" if known else ""
    invalid = "snapshot invalid" if volume.overflowed else ""
    writable = "writeable" if volume.active else "unknown"
    return {
        "data_percent": percent,
        "metadata_percent": "",
        "lv_snapshot_invalid": invalid if known else "unknown",
        "lv_permissions": "read-only" if volume.read_only else writable,
    }


def _tuning(arguments: _Arguments) -> Tuning:
    """What options say of read-ahead, in sectors, and of recovery, in KiB."""
    ahead = arguments.take("--readahead")
    least, most = arguments.take("--minrecoveryrate"), arguments.take("--maxrecoveryrate")
    return Tuning(
        ahead if ahead == AUTO else int(ahead) * 512 if ahead else None,
        int(least) if least else None,
        int(most) if most else None,
    )


def _tuned(volume: FakeVolume) -> dict[str, str]:
    """A rate of 0 is none, and reported so."""
    one = volume.tuning
    return {
        "lv_read_ahead": str(one.read_ahead_bytes),
        "raid_min_recovery_rate": str(one.minimum_recovery_kib or ""),
        "raid_max_recovery_rate": str(one.maximum_recovery_kib or ""),
    }


def _require_new(group: FakeGroup, name: str) -> None:
    if name in group.volumes:
        raise Failure(f'Logical Volume "{name}" already exists in volume group "{group.name}"')


def _usable(group: FakeGroup, chosen: Sequence[str] = ()) -> list[FakeDisk]:
    """The disks that may be allocated from, of those that are named, if any are."""
    usable = [one for one in group.disks if one.allocatable and not one.missing]
    return [one for one in usable if one.name in chosen or not chosen]


def _origin(volume: FakeVolume) -> str:
    """What a cached volume, or a pool, holds its data in."""
    part = "_tdata" if isinstance(volume, FakePool) else ""
    if volume.cache:
        part += "_corig" if volume.cache_kind == "cache" else "_wcorig"
    return volume.name + part


def _hidden_origin(volume: FakeVolume) -> str:
    """What a report says: of a pool nothing, as not the pool but a part of it has the cache."""
    return f"[{_origin(volume)}]" if volume.cache and not isinstance(volume, FakePool) else ""


def _pool(volume: FakeVolume) -> str:
    if volume.cache and not isinstance(volume, FakePool):
        return f"[{volume.cache.name}_cvol]"
    return volume.pool if isinstance(volume, FakeThin) else ""


def _layout_words(volume: FakeVolume) -> str:
    if isinstance(volume, FakePool):
        return "thin,pool"
    if volume.cache:
        return volume.cache_kind
    if isinstance(volume, FakeThin):
        return "thin,sparse"
    return f"raid,{volume.layout.kind}" if volume.layout.is_raid else volume.layout.kind


def _metadata_size(volume: FakeVolume, extent_size_bytes: int) -> str:
    if not isinstance(volume, FakePool):
        return ""
    return str(sum(volume.metadata.values()) * extent_size_bytes)


def _segments(group: FakeGroup, disk: str) -> Iterator[tuple[str, int]]:
    """What lies on a disk, by the names that lvm2 reports, and how many extents of it."""
    if group.moving is not None and disk in group.moving:
        [source] = (one for one in group.disks if one.name == group.moving[0])
        yield "[pvmove0]", source.extents - group.free(source)
        if disk == source.name:
            return
    for volume in group.volumes.values():
        size = volume.extents.get(disk, 0)
        if isinstance(volume, FakePool):
            yield f"[{volume.name}_tmeta]", volume.metadata.get(disk, 0)
        if volume.layout.metadata_extents and size:
            index, of_metadata = list(volume.extents).index(disk), volume.layout.metadata_extents
            yield f"[{volume.name}_rimage_{index}]", size - of_metadata
            yield f"[{volume.name}_rmeta_{index}]", of_metadata
        else:
            name = _origin(volume)
            yield (name if name == volume.name else f"[{name}]"), size
        if volume.cache:
            yield f"[{volume.cache.name}_cvol]", volume.cache.taken(disk)
    yield "[lvol0_pmspare]", group.spare.get(disk, 0)


def _gone(group: FakeGroup, volume: FakeVolume) -> list[tuple[int, int]]:
    """What of a linear volume lies on missing disks, in bytes; of a RAID, other legs have it."""
    if volume.layout.kind not in ("linear", "striped"):
        return []
    missing, found, at = {one.name for one in group.disks if one.missing}, [], 0
    for disk, extents in volume.extents.items():
        length = extents * group.extent_size_bytes
        if disk in missing:
            found.append((at, length))
        at += length
    return found


def _is_lost(group: FakeGroup, pool: FakePool) -> bool:
    """Whether a part of a pool lies on a missing disk."""
    missing = {one.name for one in group.disks if one.missing}
    return bool(missing & {*pool.extents, *pool.metadata})


def _first_extent(volume: FakeVolume) -> int:
    """Where a volume begins on its first disk: elsewhere than any other."""
    return int(volume.uuid.replace("-", "")[::-1])


def _ranges(group: FakeGroup, volume: FakeVolume) -> str:
    """What a volume takes of each disk, as if in one piece; of a part of another, that part."""
    if not volume.extents or volume.cache or isinstance(volume, FakePool):
        return f"{volume.name}_part:0-0"
    gone = {one.name for one in group.disks if one.missing}
    first = _first_extent(volume)
    return " ".join(
        f"{'[unknown]' if disk in gone else disk}:{first}-{first + extents - 1}"
        for disk, extents in volume.extents.items()
    )


def _node(group: str, name: str) -> str:
    return f"/dev/mapper/{names.device(group, name)}"


def _data_node(group: str, pool: str) -> str:
    return f"{_node(group, pool)}_tdata"


def _bytes(size: str) -> int:
    assert size.endswith("b"), size
    return int(size.removesuffix("b"))
