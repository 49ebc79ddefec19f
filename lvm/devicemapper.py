"""What device-mapper says of its targets: how full, in sync or broken; by ioctl, without a process.

linux/dm-ioctl.h has the structures, Documentation/admin-guide/device-mapper the status lines. The
lines are asked for as lvm2 does, without having the target flush first: a look costs no disk
anything. Seldom does it wait for one: a thin pool that is writing its metadata tells nothing
before they are written, so who must not wait has a thread of its own look.
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

# struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr,
# padding, dev, name, uuid, and seven bytes that fill it up.
_HEADER = struct.Struct("=3I I I I i I I I Q 128s 129s 7x")
_DATA_SIZE_AT, _DATA_START_AT, _TARGET_COUNT_AT, _OPEN_COUNT_AT, _FLAGS_AT = 12, 16, 20, 24, 28
_DEVICE_AT = 40
# struct dm_name_list: dev, next; the name follows, and where it ends, in whole eights of bytes, the
# number of events.
_NAME = struct.Struct("=Q I")
# struct dm_target_spec: sector_start, length, status, next, target_type; the line follows.
_TARGET = struct.Struct("=Q Q i I 16s")
_VERSION = (4, 0, 0)
_FIRST_BUFFER_BYTES = 16 << 10
_SECTOR_BYTES = 512

_REQUEST = calls.ioctl_number(3, 0xFD, 0, _HEADER.size)
_LIST_DEVICES = _REQUEST | 2
_DEVICE_REMOVE = _REQUEST | 4
_DEVICE_SUSPEND = _REQUEST | 6
_DEVICE_STATUS = _REQUEST | 7
_TABLE_DEPS = _REQUEST | 11
_TABLE_STATUS = _REQUEST | 12
_TARGET_MESSAGE = _REQUEST | 14
_GET_TARGET_VERSION = _REQUEST | 17
_SUSPENDED = 1 << 1
# What a device was made of, in place of how it is: DM_STATUS_TABLE_FLAG.
_TABLE = 1 << 4
_BUFFER_FULL = 1 << 8
_NO_FLUSH = 1 << 11

FAILED = "fail"
# Targets that do without a device that they are made of.
_SURVIVING = frozenset({"raid", "mirror", "multipath"})

# Targets, and the policy of caches, that lvm2 looks for before it makes or activates a volume.
TARGETS = (
    *("snapshot", "mirror", "raid", "thin-pool", "cache", "cache-smq", "writecache", "crypt"),
)


@dataclass(frozen=True)
class ThinPool:
    """A thin pool (thin-provisioning.rst); metadata blocks have 4096 bytes.

    `mode` is rw, ro, out_of_data_space or, where no I/O goes through any more, fail. Then the
    numbers of blocks are 0. `has_metadata_snapshot`: someone reserved one, to read the metadata by.
    `transaction_id`: the last that lvm2 had the kernel count; None where it fails.
    """

    size_bytes: int
    mode: str
    needs_check: bool = False
    used_data_blocks: int = 0
    data_blocks: int = 0
    used_metadata_blocks: int = 0
    metadata_blocks: int = 0
    has_metadata_snapshot: bool = False
    transaction_id: int | None = None

    @property
    def data_percent(self) -> float:
        """How full the pool's data are."""
        return _percent(self.used_data_blocks, self.data_blocks)

    @property
    def metadata_percent(self) -> float:
        """How full the pool's metadata are."""
        return _percent(self.used_metadata_blocks, self.metadata_blocks)

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """The pool of a status line."""
        words = line.split()
        if len(words) == 1:
            return cls(size_bytes, FAILED)
        (used_metadata, metadata), (used_data, data) = map(_fraction, words[1:3])
        numbers = (used_data, data, used_metadata, metadata)
        needs_check, is_reserved = "needs_check" in words[5:], words[3] != "-"
        return cls(size_bytes, words[4], needs_check, *numbers, is_reserved, int(words[0]))


@dataclass(frozen=True)
class Snapshot:
    """A copy-on-write snapshot (snapshot.rst), in sectors of 512 bytes of its copies' store.

    `state` is empty while it can be read; else it is what the kernel says: Invalid (it overflowed,
    or its store failed), Overflow, Merge failed, Unknown.
    """

    size_bytes: int
    state: str = ""
    used_sectors: int = 0
    sectors: int = 0
    metadata_sectors: int = 0

    @property
    def percent(self) -> float:
        """How full the store is."""
        return _percent(self.used_sectors, self.sectors)

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """The snapshot of a status line."""
        if "/" not in line:
            return cls(size_bytes, line)
        fraction, metadata = line.split()
        return cls(size_bytes, "", *_fraction(fraction), int(metadata))


@dataclass(frozen=True)
class Raid:
    """A RAID volume (dm-raid.rst).

    `health` has a character for each image: A in sync, a not yet, D failed, - not there. `action`
    is idle, frozen, resync, recover, check, repair or reshape.
    """

    size_bytes: int
    kind: str
    health: str
    synced_sectors: int
    sectors: int
    action: str = "idle"
    mismatches: int = 0

    @property
    def synced_percent(self) -> float:
        """How much of it is in sync."""
        return _percent(self.synced_sectors, self.sectors)

    @property
    def failed(self) -> list[bool]:
        """Which of its images take no writes, in their order."""
        return [one in "D-" for one in self.health]

    @property
    def is_syncing(self) -> bool:
        """Whether an image is not in sync yet."""
        return "a" in self.health

    @property
    def survives(self) -> bool:
        """Whether the images that are left hold all data."""
        level = raid.level([self.kind])
        return level is not None and level.survives(self.failed)

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """The RAID volume of a status line."""
        kind, _, health, ratio, *more = line.split()
        # dm-raid before 1.5 tells no more.
        action, mismatches = more[:2] or ("idle", "0")
        return cls(size_bytes, kind, health, *_fraction(ratio), action, int(mismatches))


@dataclass(frozen=True)
class Cache:
    """A volume on a cache (cache.rst). `mode` is its metadata's: rw, ro, or fail."""

    size_bytes: int
    mode: str
    needs_check: bool = False
    dirty_blocks: int = 0

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """The cache of a status line."""
        words = line.split()
        if len(words) == 1:
            return cls(size_bytes, FAILED)
        mode, check = words[-2:]
        return cls(size_bytes, mode, check == "needs_check", int(words[10]))


@dataclass(frozen=True)
class WriteCache:
    """A volume on a writecache (writecache.rst); an error is a number, 0 for none."""

    size_bytes: int
    error: int
    blocks: int
    free_blocks: int
    written_back_blocks: int

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """The writecache of a status line."""
        return cls(size_bytes, *map(int, line.split()[:4]))


@dataclass(frozen=True)
class Mirror:
    """A mirror of the old kind, by which extents are moved (dm-mirror's mirror_status)."""

    size_bytes: int
    synced_regions: int
    regions: int

    @property
    def synced_percent(self) -> float:
        """How much of it is copied."""
        return _percent(self.synced_regions, self.regions)

    @classmethod
    def parse(cls, size_bytes: int, line: str) -> Self:
        """The mirror of a status line: its number of images, these, what is in sync, and more."""
        words = line.split()
        return cls(size_bytes, *_fraction(words[1 + int(words[0])]))


# A device's number, and how many events it had. A snapshot that is lost has one more
# (__invalidate_snapshot in drivers/md/dm-snap.c), one that only fills up has not.
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
    """Whether a copy-on-write snapshot is among these that cannot be read any more."""
    return any(isinstance(one, Snapshot) and one.state for one in status)


class DeviceMapper:
    """The driver, spoken to through its control node."""

    def __init__(
        self,
        control: Path = _CONTROL,
        ioctl: Callable[[int, int, bytearray], object] | None = None,
    ) -> None:
        self._control = control
        self._ioctl = ioctl or self._real_ioctl
        # What the last list of all devices took, so that the next is had at once.
        self._list_bytes = _FIRST_BUFFER_BYTES
        # That list and what it says: among hundreds of snapshots most are equal to the last.
        self._last: tuple[bytes, Mapping[str, Events]] = b"", {}

    def events(self) -> Mapping[str, Events]:
        """The events of all devices, by their names; empty where there is no answer. One ioctl."""
        try:
            with self._opened() as control:
                answer = self._ask(control, _LIST_DEVICES, "", 0, size_bytes=self._list_bytes)
        except OSError:
            return {}
        self._list_bytes = len(answer)
        before, events = self._last
        if answer != before:
            events = dict(_listed(answer))
            self._last = bytes(answer), events
        return events

    def status(self, name: str) -> tuple[Status, ...]:
        """What stands out in a device and in all that it stands on, from above to below.

        So a thin volume tells of its pool, and a pool of the RAID that its data lie on. Empty where
        there is nothing to tell, no such device, or no answer: it proves nothing.
        """
        try:
            with self._opened() as control:
                return tuple(self._walk(control, name=name))
        except OSError:
            return ()

    def own_status(self, name: str) -> tuple[Status, ...]:
        """The same of the device alone, not of what it stands on. One ioctl."""
        try:
            with self._opened() as control:
                return tuple(_records(self._ask(control, _TABLE_STATUS, name, 0)))
        except OSError:
            return ()

    def disks(self, name: str) -> Set[tuple[int, int]]:
        """The numbers of the disks that a device stands on, if it needs each of them.

        Those below a RAID are not among them: it is repaired where one goes. Empty where there is
        no such device, or no answer: it proves nothing.
        """
        try:
            with self._opened() as control:
                return {(os.major(one), os.minor(one)) for one in self._needed(control, name=name)}
        except OSError:
            return frozenset()

    def number(self, name: str) -> tuple[int, int] | None:
        """A device's number, major and minor; None where there is none of the name.

        Raises OSError where there is no answer.
        """
        try:
            buffer = self._call(_DEVICE_STATUS, name)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise
        # As the kernel has it (huge_encode_dev), which is as the C library has it.
        (device,) = struct.unpack_from("=Q", buffer, _DEVICE_AT)
        return os.major(device), os.minor(device)

    def suspend(self, name: str) -> None:
        """Hold a device: what is written or read from now on waits, what was before is done.

        The file system that is mounted from it comes to rest first (lock_fs in drivers/md/dm.c).
        Raises OSError: EINVAL for one that is suspended, ENXIO where there is none.
        """
        self._call(_DEVICE_SUSPEND, name, _SUSPENDED)

    def resume(self, name: str) -> None:
        """Let go of a device; one that is not suspended is no error. Raises OSError, as above."""
        self._call(_DEVICE_SUSPEND, name)

    def remove(self, name: str) -> None:
        """Take a device away. Raises OSError: EBUSY for one that is open, ENXIO where none is."""
        self._call(_DEVICE_REMOVE, name)

    def is_suspended(self, name: str) -> bool:
        """Whether a device is suspended; not where there is none."""
        return bool((self._look(name, _FLAGS_AT) or 0) & _SUSPENDED)

    def is_open(self, name: str) -> bool:
        """Whether something has a device open, or is made of it; not where there is none."""
        return bool(self._look(name, _OPEN_COUNT_AT))

    def is_closed(self, name: str) -> bool:
        """Whether nothing has a device open for certain: not where there is no answer."""
        return self._look(name, _OPEN_COUNT_AT) == 0

    def load_target(self, target: str) -> bool:
        """Have the kernel load the module of a target; tell whether the kernel has that target.

        lvm2 would start modprobe(8) for it, which takes a capability, and in a container the node's
        modules and a modprobe. Asked for a target's version, the kernel loads the module by itself
        (dm_get_target_type in drivers/md/dm-target.c), on the node and by the node's modprobe. Of a
        policy of caches the module is loaded too, though it is no target.
        """
        try:
            self._call(_GET_TARGET_VERSION, target)
        except OSError:
            return False
        return True

    def thin_id(self, name: str) -> int | None:
        """The number that a thin volume has in its pool; None for what is none, or not there."""
        try:
            with self._opened() as control:
                lines = list(_targets(self._ask(control, _TABLE_STATUS, name, 0, _TABLE)))
        except OSError:
            return None
        # thin-provisioning.rst: the pool's device, and then the number.
        [found] = [line.split()[1] for kind, _, line in lines if kind == "thin"] or [""]
        return int(found) if found else None

    def tell(self, name: str, message: str) -> None:
        """Send a device's target a message (thin-provisioning.rst). Raises OSError."""
        # struct dm_target_msg: the sector that it is for, and the message.
        data = struct.pack("=Q", 0) + message.encode() + b"\0"
        self._call(_TARGET_MESSAGE, name, data=data)

    def _look(self, name: str, at: int) -> int | None:
        """A number of what device-mapper says of a device.

        0 where there is no such device, None where there is no answer.
        """
        try:
            return _number(self._call(_DEVICE_STATUS, name), at)
        except OSError as error:
            return 0 if error.errno == errno.ENXIO else None

    def _call(self, request: int, name: str, flags: int = 0, data: bytes = b"") -> bytearray:
        """One ioctl about a device, with its answer's header."""
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
        if (found := self._one_level(control, name, device)) is None:
            return
        lines, below = found
        yield from _records(lines)
        for one in below:
            yield from self._walk(control, device=one)

    def _needed(self, control: int, *, name: str = "", device: int = 0) -> Iterator[int]:
        if (found := self._one_level(control, name, device)) is None:
            yield device
            return
        lines, below = found
        if _SURVIVING.isdisjoint(kind for kind, _, _ in _targets(lines)):
            for one in below:
                yield from self._needed(control, device=one)

    def _one_level(
        self, control: int, name: str, device: int
    ) -> tuple[bytearray, tuple[int, ...]] | None:
        """The status of a device and what it stands on; None for one of another driver, a disk."""
        try:
            below = self._ask(control, _TABLE_DEPS, name, device)
            lines = self._ask(control, _TABLE_STATUS, name, device)
        except OSError as error:
            # What is below the last of device-mapper's devices is a disk.
            if error.errno == errno.ENXIO and not name:
                return None
            raise
        # struct dm_target_deps: how many, and the devices as the kernel numbers them.
        start = _number(below, _DATA_START_AT)
        return lines, struct.unpack_from(f"={_number(below, start)}Q", below, start + 8)

    def _ask(
        self,
        control: int,
        request: int,
        name: str,
        device: int,
        flags: int = 0,
        size_bytes: int = _FIRST_BUFFER_BYTES,
    ) -> bytearray:
        """The driver's answer, in a buffer that is large enough for it."""
        while True:
            buffer = _request(size_bytes, _NO_FLUSH | flags, name, device)
            self._ioctl(control, request, buffer)
            if not _number(buffer, _FLAGS_AT) & _BUFFER_FULL:
                return buffer
            size_bytes *= 2


def _request(size_bytes: int, flags: int, name: str, device: int) -> bytearray:
    """A buffer of that size that asks for a device, by its name or its number."""
    buffer = bytearray(size_bytes)
    _HEADER.pack_into(
        *(buffer, 0, *_VERSION, size_bytes, _HEADER.size, 0, 0, flags, 0, 0),
        *(device, name.encode(), b""),
    )
    return buffer


def _listed(buffer: bytearray) -> Iterator[tuple[str, Events]]:
    at = _number(buffer, _DATA_START_AT)
    while True:
        device, following = _NAME.unpack_from(buffer, at)
        # Where there is none, there is one that is 0.
        if device:
            begin = at + _NAME.size
            end = buffer.index(b"\0", begin)
            events = _number(buffer, end + 1 + -(end + 1) % 8)
            yield buffer[begin:end].decode(), (device, events)
        if not following:
            return
        at += following


def _records(buffer: bytearray) -> Iterator[Status]:
    for kind, size_bytes, line in _targets(buffer):
        if kind in _KINDS:
            yield _KINDS[kind].parse(size_bytes, line)


def _targets(buffer: bytearray) -> Iterator[tuple[str, int, str]]:
    """The kind, size in bytes and status line of each target in an answer."""
    start = at = _number(buffer, _DATA_START_AT)
    for _ in range(_number(buffer, _TARGET_COUNT_AT)):
        _, sectors, _, following, kind = _TARGET.unpack_from(buffer, at)
        line = _text(buffer[at + _TARGET.size :])
        yield _text(kind), sectors * _SECTOR_BYTES, line.strip()
        at = start + following


def _number(buffer: bytearray, at: int) -> int:
    (number,) = struct.unpack_from("=I", buffer, at)
    return int(number)


def _text(field: bytes | bytearray) -> str:
    return field.partition(b"\0")[0].decode()


def _fraction(text: str) -> tuple[int, int]:
    part, _, whole = text.partition("/")
    return int(part), int(whole)


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
