"""Device-mapper by ioctl: the status of targets (how full, in sync, failed), suspend and resume.

linux/dm-ioctl.h has the structures, Documentation/admin-guide/device-mapper the status lines. A
status is read without a flush of the target, as lvm2 reads it, so that it needs no disk I/O. It may
still take long: a thin pool that is writing its metadata answers only after the write. Callers that
must not wait use another thread.
"""

import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lvm import raid
from mount import calls

_CONTROL = Path("/dev/mapper/control")

# Structure dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr,
# padding, dev, name, uuid, seven bytes of padding; and the offsets of some of these fields.
_HEADER = struct.Struct("=3I I I I i I I I Q 128s 129s 7x")
_DATA_SIZE_AT, _DATA_START_AT, _TARGET_COUNT_AT, _OPEN_COUNT_AT, _FLAGS_AT = 12, 16, 20, 24, 28
_DEVICE_AT = 40
# Structure dm_name_list: dev, next. The name follows, and, at the next multiple of eight bytes, the
# number of events.
_NAME = struct.Struct("=Q I")
# Structure dm_target_spec: sector_start, length, status, next, target_type. The line follows.
_TARGET = struct.Struct("=Q Q i I 16s")
_VERSION = (4, 0, 0)
_FIRST_BUFFER_BYTES = 16 << 10
_SECTOR_BYTES = 512

# Numbers of ioctl(2) requests (linux/dm-ioctl.h); `_REQUEST` is the part that is common to all.
_REQUEST = calls.ioctl_number(3, 0xFD, 0, _HEADER.size)
_LIST_DEVICES = _REQUEST | 2
_DEVICE_REMOVE = _REQUEST | 4
_DEVICE_SUSPEND = _REQUEST | 6
_DEVICE_STATUS = _REQUEST | 7
_TABLE_DEPS = _REQUEST | 11
_TABLE_STATUS = _REQUEST | 12
_TARGET_MESSAGE = _REQUEST | 14
_GET_TARGET_VERSION = _REQUEST | 17
# Flags of the structure dm_ioctl: DM_SUSPEND_FLAG, DM_STATUS_TABLE_FLAG (the answer is the table,
# not the status), DM_BUFFER_FULL_FLAG, DM_NOFLUSH_FLAG.
_SUSPENDED = 1 << 1
_TABLE = 1 << 4
_BUFFER_FULL = 1 << 8
_NO_FLUSH = 1 << 11

# Mode of a failed thin pool or cache, through which no I/O goes any more.
FAILED = "fail"
# Types of device-mapper targets that keep working when a device below the target fails.
_SURVIVING = frozenset({"raid", "mirror", "multipath"})

# Targets, and the cache policy `smq`, that the kernel must have before lvm2 makes or activates a
# volume.
TARGETS = (
    *("snapshot", "mirror", "raid", "thin-pool", "cache", "cache-smq", "writecache", "crypt"),
)


@dataclass(frozen=True)
class ThinPool:
    """The status of a thin pool (thin-provisioning.rst). Metadata blocks have 4096 bytes."""

    size_bytes: int
    # The thin pool's mode: rw, ro, out_of_data_space, or fail. In a failed pool, all numbers of
    # blocks are 0.
    mode: str
    needs_check: bool = False
    used_data_blocks: int = 0
    data_blocks: int = 0
    used_metadata_blocks: int = 0
    metadata_blocks: int = 0
    # Whether some program has reserved the metadata snapshot, to read the metadata by it.
    has_metadata_snapshot: bool = False
    # The transaction that lvm2 passed to the kernel last; None in a failed thin pool.
    transaction_id: int | None = None

    @property
    def data_percent(self) -> float:
        """How full the thin pool's data are, in percent."""
        return _percent(self.used_data_blocks, self.data_blocks)

    @property
    def metadata_percent(self) -> float:
        """How full the thin pool's metadata are, in percent."""
        return _percent(self.used_metadata_blocks, self.metadata_blocks)

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """Parse the status line of a thin pool."""
        words = line.split()
        if len(words) == 1:
            return cls(size_bytes, FAILED)
        (used_metadata, metadata), (used_data, data) = map(_fraction, words[1:3])
        numbers = (used_data, data, used_metadata, metadata)
        needs_check, is_reserved = "needs_check" in words[5:], words[3] != "-"
        return cls(size_bytes, words[4], needs_check, *numbers, is_reserved, int(words[0]))


@dataclass(frozen=True)
class Snapshot:
    """The status of a copy-on-write snapshot (snapshot.rst). Sectors are those of its COW store."""

    size_bytes: int
    # Empty while the snapshot can be read; else the kernel's word: Invalid (the store overflowed or
    # failed), Overflow, Merge failed, Unknown.
    state: str = ""
    used_sectors: int = 0
    sectors: int = 0
    metadata_sectors: int = 0

    @property
    def percent(self) -> float:
        """How full the snapshot's COW store is, in percent."""
        return _percent(self.used_sectors, self.sectors)

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """Parse the status line of a snapshot."""
        if "/" not in line:
            return cls(size_bytes, line)
        fraction, metadata = line.split()
        return cls(size_bytes, "", *_fraction(fraction), int(metadata))


@dataclass(frozen=True)
class Raid:
    """The status of a RAID volume (dm-raid.rst)."""

    size_bytes: int
    kind: str
    # A character for each image of the RAID: A in sync, a not in sync yet, D failed, - absent.
    health: str
    synced_sectors: int
    sectors: int
    # What the RAID does now: idle, frozen, resync, recover, check, repair, or reshape.
    action: str = "idle"
    mismatches: int = 0

    @property
    def synced_percent(self) -> float:
        """How much of the RAID volume is in sync, in percent."""
        return _percent(self.synced_sectors, self.sectors)

    @property
    def failed(self) -> list[bool]:
        """For each image of the RAID, in order, whether the image has failed or is absent."""
        return [state in "D-" for state in self.health]

    @property
    def is_syncing(self) -> bool:
        """Whether an image of the RAID volume is not in sync yet."""
        return "a" in self.health

    @property
    def survives(self) -> bool:
        """Whether the working images of the RAID volume together have all data."""
        level = raid.level([self.kind])
        return level is not None and level.survives(self.failed)

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """Parse the status line of a RAID volume."""
        kind, _, health, ratio, *newer_fields = line.split()
        # The line of a dm-raid before 1.5 ends here.
        action, mismatches = newer_fields[:2] or ("idle", "0")
        return cls(size_bytes, kind, health, *_fraction(ratio), action, int(mismatches))


@dataclass(frozen=True)
class Cache:
    """The status of a dm-cache (cache.rst). `mode` is the metadata's: rw, ro or fail."""

    size_bytes: int
    mode: str
    needs_check: bool = False
    dirty_blocks: int = 0

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """Parse the status line of a dm-cache."""
        words = line.split()
        if len(words) == 1:
            return cls(size_bytes, FAILED)
        mode, check = words[-2:]
        return cls(size_bytes, mode, check == "needs_check", int(words[10]))


@dataclass(frozen=True)
class WriteCache:
    """The status of a dm-writecache (writecache.rst). `error` is a number, 0 for none."""

    size_bytes: int
    error: int
    blocks: int
    free_blocks: int
    written_back_blocks: int

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """Parse the status line of a dm-writecache."""
        return cls(size_bytes, *map(int, line.split()[:4]))


@dataclass(frozen=True)
class Mirror:
    """The status of a dm-mirror (mirror_status()), by which pvmove(8) moves extents."""

    size_bytes: int
    synced_regions: int
    regions: int

    @property
    def synced_percent(self) -> float:
        """How much of the mirror is copied, in percent."""
        return _percent(self.synced_regions, self.regions)

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """Parse the status line of a mirror: number of images, images, regions in sync, etc."""
        words = line.split()
        return cls(size_bytes, *_fraction(words[1 + int(words[0])]))


# Number of a device, and the count of its events. The loss of a snapshot is an event
# (__invalidate_snapshot in drivers/md/dm-snap.c), while filling a COW store is not.
Events = tuple[int, int]
Status = ThinPool | Snapshot | Raid | Cache | WriteCache | Mirror
_KINDS: dict[str, type[Status]] = {
    "thin-pool": ThinPool,
    "snapshot": Snapshot,
    "raid": Raid,
    "cache": Cache,
    "writecache": WriteCache,
    "mirror": Mirror,
}


def has_overflowed(status: Iterable[Status]) -> bool:
    """Whether one of the statuses is of a copy-on-write snapshot whose contents are lost."""
    return any(isinstance(entry, Snapshot) and entry.state for entry in status)


class DeviceMapper:
    """The device-mapper driver, by ioctls on its control node."""

    def __init__(
        self,
        control: Path = _CONTROL,
        ioctl: Callable[[int, int, bytearray], object] | None = None,
    ) -> None:
        self._control = control
        self._ioctl = ioctl or self._real_ioctl
        # The size in bytes of the last list of all devices, so that the next list fits at once.
        self._list_bytes = _FIRST_BUFFER_BYTES
        # The kernel's last list of all devices, and the events parsed from that list. Beside
        # hundreds of snapshots parsing takes long, and most lists equal the list before.
        self._last: tuple[bytes, Mapping[str, Events]] = b"", {}

    def events(self) -> Mapping[str, Events]:
        """The event counters of all devices, by their names. One ioctl.

        Empty also if the driver does not answer.
        """
        try:
            with self._opened() as control:
                answer = self._ask(control, _LIST_DEVICES, "", 0, size_bytes=self._list_bytes)
        except OSError:
            return {}
        self._list_bytes = len(answer)
        previous_answer, events = self._last
        if answer != previous_answer:
            events = dict(_listed(answer))
            self._last = bytes(answer), events
        return events

    def status(self, name: str) -> tuple[Status, ...]:
        """The statuses of a device and of all devices below it, from the top.

        So the result for a thin volume has its pool's status, too, and that of the RAID below the
        pool. An empty result proves nothing: the targets may have no status, the device may be
        absent, or the driver may not answer.
        """
        try:
            with self._opened() as control:
                return tuple(self._walk(control, name=name))
        except OSError:
            return ()

    def own_status(self, name: str) -> tuple[Status, ...]:
        """The status of a device, without the devices below it. One ioctl.

        An empty result proves nothing, as for `status`.
        """
        try:
            with self._opened() as control:
                return tuple(_records(self._ask(control, _TABLE_STATUS, name, 0)))
        except OSError:
            return ()

    def disks(self, name: str) -> Set[tuple[int, int]]:
        """The numbers (major, minor) of the disks whose loss would stop a device that lies on them.

        Disks below a RAID are not among them, as a RAID survives the loss of a disk. An empty
        result proves nothing: the device may be absent, or the driver may not answer.
        """
        try:
            with self._opened() as control:
                return {
                    (os.major(number), os.minor(number))
                    for number in self._needed(control, name=name)
                }
        except OSError:
            return frozenset()

    def number(self, name: str) -> tuple[int, int] | None:
        """The number of a device, major and minor; None for an absent device. Raises OSError."""
        try:
            buffer = self._call(_DEVICE_STATUS, name)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise
        # The kernel's encoding of device numbers (huge_encode_dev) equals the C library's.
        (device,) = struct.unpack_from("=Q", buffer, _DEVICE_AT)
        return os.major(device), os.minor(device)

    def suspend(self, name: str) -> None:
        """Suspend a device: I/O in flight completes, later I/O waits until `resume`.

        The kernel freezes a mounted file system first (lock_fs in drivers/md/dm.c). Raises OSError:
        EINVAL for a device that is suspended already, ENXIO for an absent one.
        """
        self._call(_DEVICE_SUSPEND, name, _SUSPENDED)

    def resume(self, name: str) -> None:
        """Resume a device; no error for a device that is not suspended. Raises OSError."""
        self._call(_DEVICE_SUSPEND, name)

    def remove(self, name: str) -> None:
        """Remove a device. Raises OSError: EBUSY for an open device, ENXIO for an absent device."""
        self._call(_DEVICE_REMOVE, name)

    def is_suspended(self, name: str) -> bool:
        """Whether a device is suspended; false if the device is absent or the driver silent."""
        return bool((self._look(name, _FLAGS_AT) or 0) & _SUSPENDED)

    def is_open(self, name: str) -> bool:
        """Whether a process or another device has a device open.

        False also if the device is absent, or the driver does not answer.
        """
        return bool(self._look(name, _OPEN_COUNT_AT))

    def is_closed(self, name: str) -> bool:
        """Whether it is certain that a device is not open; false if the driver does not answer.

        True for an absent device.
        """
        return self._look(name, _OPEN_COUNT_AT) == 0

    def load_target(self, target: str) -> bool:
        """Have the kernel load a target's module; returns whether the kernel has the target.

        lvm2 would run modprobe(8), which needs a capability, and in a container also a modprobe and
        the node's modules. Asked for the version of a target, the kernel itself runs the node's
        modprobe (dm_get_target_type in drivers/md/dm-target.c). The kernel loads the module of a
        cache policy this way, too, although a policy is no target.
        """
        try:
            self._call(_GET_TARGET_VERSION, target)
        except OSError:
            return False
        return True

    def thin_id(self, name: str) -> int | None:
        """The number of a thin volume in its pool.

        None for other devices, for an absent device, and if the driver does not answer.
        """
        try:
            with self._opened() as control:
                lines = list(_targets(self._ask(control, _TABLE_STATUS, name, 0, _TABLE)))
        except OSError:
            return None
        # The table of a thin volume has the pool's device, and the volume's number in the pool
        # (thin-provisioning.rst).
        [number] = [line.split()[1] for kind, _, line in lines if kind == "thin"] or [""]
        return int(number) if number else None

    def tell(self, name: str, message: str) -> None:
        """Send a message to a device's target (thin-provisioning.rst). Raises OSError."""
        # Structure dm_target_msg: the sector of the target that gets the message, and the message.
        data = struct.pack("=Q", 0) + message.encode() + b"\0"
        self._call(_TARGET_MESSAGE, name, data=data)

    def _look(self, name: str, field_offset: int) -> int | None:
        """Read a number in a device's header; 0 for an absent device, None without an answer."""
        try:
            return _number(self._call(_DEVICE_STATUS, name), field_offset)
        except OSError as error:
            return 0 if error.errno == errno.ENXIO else None

    def _call(self, request: int, name: str, flags: int = 0, data: bytes = b"") -> bytearray:
        """Make one ioctl about a device; return the header of the answer. Raises OSError."""
        buffer = _request(_HEADER.size, flags, name, 0) + data
        struct.pack_into("=I", buffer, _DATA_SIZE_AT, len(buffer))
        with self._opened() as control:
            self._ioctl(control, request, buffer)
        return buffer

    @contextmanager
    def _opened(self) -> Iterator[int]:
        control = os.open(self._control, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield control
        finally:
            os.close(control)

    def _real_ioctl(self, control: int, request: int, buffer: bytearray) -> None:
        calls.ioctl_of(control, str(self._control), request, buffer)

    def _walk(self, control: int, *, name: str = "", device: int = 0) -> Iterator[Status]:
        if (level := self._one_level(control, name, device)) is None:
            return
        lines, lower_devices = level
        yield from _records(lines)
        for device_below in lower_devices:
            yield from self._walk(control, device=device_below)

    def _needed(self, control: int, *, name: str = "", device: int = 0) -> Iterator[int]:
        if (level := self._one_level(control, name, device)) is None:
            yield device
            return
        lines, lower_devices = level
        if _SURVIVING.isdisjoint(kind for kind, _, _ in _targets(lines)):
            for device_below in lower_devices:
                yield from self._needed(control, device=device_below)

    def _one_level(
        self, control: int, name: str, device: int
    ) -> tuple[bytearray, tuple[int, ...]] | None:
        """The status of a device and the devices directly below it; None for a disk.

        A disk is here any device of another driver.
        """
        try:
            reply = self._ask(control, _TABLE_DEPS, name, device)
            lines = self._ask(control, _TABLE_STATUS, name, device)
        except OSError as error:
            # A number that is unknown to device-mapper is that of another driver's device.
            if error.errno == errno.ENXIO and not name:
                return None
            raise
        # Structure dm_target_deps: the count, padding, and the numbers of the devices.
        start = _number(reply, _DATA_START_AT)
        return lines, struct.unpack_from(f"={_number(reply, start)}Q", reply, start + 8)

    def _ask(
        self,
        control: int,
        request: int,
        name: str,
        device: int,
        flags: int = 0,
        size_bytes: int = _FIRST_BUFFER_BYTES,
    ) -> bytearray:
        """Make an ioctl with ever larger buffers until the kernel's answer fits; return it."""
        while True:
            buffer = _request(size_bytes, _NO_FLUSH | flags, name, device)
            self._ioctl(control, request, buffer)
            if not _number(buffer, _FLAGS_AT) & _BUFFER_FULL:
                return buffer
            size_bytes *= 2


def _request(size_bytes: int, flags: int, name: str, device: int) -> bytearray:
    """A buffer of `size_bytes` with a request about a device, by the device's name or number."""
    buffer = bytearray(size_bytes)
    _HEADER.pack_into(
        *(buffer, 0, *_VERSION, size_bytes, _HEADER.size, 0, 0, flags, 0, 0),
        *(device, name.encode(), b""),
    )
    return buffer


def _listed(buffer: bytearray) -> Iterator[tuple[str, Events]]:
    entry_offset = _number(buffer, _DATA_START_AT)
    while True:
        device, following = _NAME.unpack_from(buffer, entry_offset)
        # A list without devices has a single entry with the number 0.
        if device:
            begin = entry_offset + _NAME.size
            end = buffer.index(b"\0", begin)
            events = _number(buffer, end + 1 + -(end + 1) % 8)
            yield buffer[begin:end].decode(), (device, events)
        if not following:
            return
        entry_offset += following


def _records(buffer: bytearray) -> Iterator[Status]:
    for kind, size_bytes, line in _targets(buffer):
        if kind in _KINDS:
            yield _KINDS[kind].parse(size_bytes, line)


def _targets(buffer: bytearray) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, size in bytes and status line of each target in the kernel's answer."""
    start = target_offset = _number(buffer, _DATA_START_AT)
    for _ in range(_number(buffer, _TARGET_COUNT_AT)):
        _, sectors, _, following, kind = _TARGET.unpack_from(buffer, target_offset)
        line = _text(buffer[target_offset + _TARGET.size :])
        yield _text(kind), sectors * _SECTOR_BYTES, line.strip()
        target_offset = start + following


def _number(buffer: bytearray, offset: int) -> int:
    (number,) = struct.unpack_from("=I", buffer, offset)
    return int(number)


def _text(field: bytes | bytearray) -> str:
    return field.partition(b"\0")[0].decode()


def _fraction(text: str) -> tuple[int, int]:
    part, _, whole = text.partition("/")
    return int(part), int(whole)


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
