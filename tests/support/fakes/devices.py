"""Block devices in memory. Shared by the fakes of LVM, of the kernel and of mkfs."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from mount.block_io import By
from mount.filesystem import Signature
from mount.stacks import Stack

DEVICE_MAPPER_MAJOR = 253
LOOP_MAJOR = 7
BLOCK_BYTES = 4096
_ZEROES = bytes(BLOCK_BYTES)
# What cryptsetup has for itself while it is at work.
LEFTOVER = "/dev/mapper/temporary-cryptsetup-"
BTRFS_SUPERBLOCK_AT = 64 << 10


class Below(Protocol):
    """What a medium has its room from."""

    def erase(self, offset_bytes: int, length_bytes: int) -> None:
        """Write zeroes; OSError where there is no more room."""

    def flush(self) -> None: ...


@dataclass
class Media:
    """What is written: it stays when a loop device is detached, and two loops may share it."""

    contents: Signature | None = None
    fs_size_bytes: int = 0
    # What is wrong with the file system: "little", which fsck mends by itself, or "much".
    damage: str = ""
    # How many errors the file system has counted.
    errors: int = 0
    zeroed: list[tuple[int, int]] = field(default_factory=list)
    # No read succeeds: an overflowed snapshot's.
    unreadable: bool = False
    # What programs wrote, by the number of the block.
    blocks: dict[int, bytes] = field(default_factory=dict)
    # What the disk still has of it where zeroes are in its volatile cache alone.
    cached_over: dict[int, bytes] = field(default_factory=dict)
    # What a thin volume's chunks are of: those of its pool.
    below: Below | None = None
    # What is in it by the key of its LUKS2 header, but for the blocks: those are here, encrypted.
    inner: "Media | None" = None

    @property
    def looks_like(self) -> Signature | None:
        """What a probe finds where there is no file system."""
        return None

    def copy(self) -> "Media":
        """The same, and from now on apart."""
        inner = None if self.inner is None else self.inner.copy()
        return replace(self, zeroed=[], blocks=dict(self.blocks), cached_over={}, inner=inner)

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Whole blocks of data."""
        assert not (offset_bytes | len(data)) % BLOCK_BYTES
        for start in range(0, len(data), BLOCK_BYTES):
            # An object of its own each time, which tells what was written since.
            block = bytes(bytearray(data[start : start + BLOCK_BYTES]))
            self.blocks[(offset_bytes + start) // BLOCK_BYTES] = block

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Whole blocks of data, zeroes where nothing was written."""
        numbers = range(offset_bytes // BLOCK_BYTES, (offset_bytes + length_bytes) // BLOCK_BYTES)
        if self.blocks.keys().isdisjoint(numbers):
            return bytes(length_bytes)
        return b"".join([self.blocks.get(one, _ZEROES) for one in numbers])

    def part(self, offset_bytes: int, length_bytes: int) -> dict[int, bytes]:
        """The blocks that were written in a range, by their numbers."""
        first, last = offset_bytes // BLOCK_BYTES, (offset_bytes + length_bytes) // BLOCK_BYTES
        # A copy: several threads write at once, and a list of items is not made in one step (gc).
        every = self.blocks.copy().items()
        return {number: data for number, data in every if first <= number < last}

    def erase(self, offset_bytes: int, length_bytes: int) -> None:
        """Zeroes in place of data, in the disk's cache."""
        for number, data in self.part(offset_bytes, length_bytes).items():
            self.cached_over[number] = data
            del self.blocks[number]
        if self.below is not None:
            # Each chunk that is written takes one of the pool's.
            self.below.erase(offset_bytes, length_bytes)

    def flush(self) -> None:
        """What the cache has is on the disk."""
        self.cached_over.clear()
        if self.below is not None:
            self.below.flush()

    def cut_power(self) -> None:
        """What was in the cache alone is lost."""
        self.blocks |= self.cached_over
        self.cached_over.clear()


@dataclass
class FakeDevice:
    """One block device. `held` counts who has it open, `mounted` the superblocks on it."""

    path: str
    size_bytes: int
    major: int
    minor: int
    read_only: bool = False
    # The smallest piece that it reads and writes.
    block_bytes: int = 512
    unreadable: bool = False
    held: int = 0
    # How many have it open to read, which keeps nobody from having it alone.
    readers: int = 0
    mounted: int = 0
    swap: bool = False
    partitions: list[str] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    media: Media = field(default_factory=Media)
    # What of it lies on a missing disk: offset and length.
    missing: list[tuple[int, int]] = field(default_factory=list)
    # It stands on a disk that went away; none of it can be read or written.
    has_lost_disk: bool = False
    # What sysfs tells of it.
    stack: Stack = field(default_factory=lambda: Stack(has_write_zeroes=True))
    # Why zeroes after a discard are not certain, by disk.
    doubts: dict[str, str] = field(default_factory=dict)
    # Ways of zeroing that succeed, and leave what was there.
    lies: set[By] = field(default_factory=set)
    # Suspended by device-mapper: writers wait.
    suspended: bool = False
    # Of a dm-crypt device: what it is of.
    of: "FakeDevice | None" = None
    _flow: threading.Condition = field(default_factory=threading.Condition)

    def suspend(self) -> None:
        """What is being written is done first."""
        with self._flow:
            if self.suspended:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self.path)
            self.suspended = True

    def resume(self) -> None:
        """Whoever waits goes on."""
        with self._flow:
            self.suspended = False
            self._flow.notify_all()

    def write(self, offset_bytes: int, data: bytes) -> None:
        """What the program does that has it open."""
        with self._flow:
            assert self._flow.wait_for(lambda: not self.suspended, 60), "it was never resumed"
            self.media.write(offset_bytes, data)

    def is_missing(self, offset_bytes: int, length_bytes: int) -> bool:
        """Whether a part of a range lies on a missing disk."""
        end = offset_bytes + length_bytes
        return any(start < end and offset_bytes < start + size for start, size in self.missing)

    @property
    def number(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def node(self) -> str:
        """The node itself, where `path` may be a link that udev makes (/dev/data/web)."""
        return f"/dev/dm-{self.minor}" if self.major == DEVICE_MAPPER_MAJOR else self.path

    @property
    def contents(self) -> Signature | None:
        return self.media.contents

    @contents.setter
    def contents(self, contents: Signature | None) -> None:
        self.media.contents = contents


class FakeDevices:
    """All block devices by path; a device can be found by its node and its links, too.

    Calls, tasks and programs use them side by side, as they do the kernel's.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._devices: dict[str, FakeDevice] = {}
        self._links: dict[str, str] = {}

    def __iter__(self) -> Iterator[FakeDevice]:
        return iter(list(self._devices.values()))

    def add(
        self,
        path: str,
        size_bytes: int,
        media: Media | None = None,
        major: int = DEVICE_MAPPER_MAJOR,
        minor: int | None = None,
    ) -> FakeDevice:
        """A new device, blank unless `media` of an earlier one is given (an LV activated again)."""
        with self._changing:
            assert path not in self._devices, f"{path} is there already"
            if minor is None:
                taken = {device.minor for device in self._devices.values() if device.major == major}
                minor = next(number for number in range(len(taken) + 1) if number not in taken)
            device = FakeDevice(path, size_bytes, major, minor, media=media or Media())
            self._devices[path] = device
        return device

    def link(self, link: str, path: str) -> None:
        """Another name for a device."""
        self._links[link] = self.get(path).path

    def get(self, path: str) -> FakeDevice:
        """The device at a path, node or link; FileNotFoundError as the kernel has it."""
        path = self._links.get(path, path)
        for device in self:
            if path in (device.path, device.node):
                return device
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def knows(self, path: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(self.get(path))
        return False

    def is_open(self, path: str) -> bool:
        one = self.get(path)
        return bool(one.mounted or one.held or one.readers or one.swap or one.holders)

    def remove(self, path: str) -> None:
        """The device goes with its links; EBUSY while it is mounted or held."""
        with self._changing:
            device = self.get(path)
            if self.is_open(path):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            del self._devices[device.path]
            self._links = {link: to for link, to in self._links.items() if to != device.path}

    def resize(self, path: str, size_bytes: int) -> None:
        self.get(path).size_bytes = size_bytes
