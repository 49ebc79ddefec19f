"""What a fake lvm2 keeps: disks, groups, and the volumes in them."""

import zlib
from dataclasses import dataclass, field, fields

from fakes.chunks import Chunks
from fakes.devices import Media

from lvm.devicemapper import ThinPool
from lvm.layout import LINEAR, Layout
from lvm.tuning import PLAIN, Tuning

LABEL_BYTES = 4096
# What lvm2 gives a disk where it is not told.
METADATA_BYTES = (1 << 20) - LABEL_BYTES


@dataclass
class FakeDisk:
    """A physical volume."""

    name: str
    uuid: str
    extents: int
    missing: bool = False
    allocatable: bool = True
    tags: set[str] = field(default_factory=set)
    metadata_bytes: int = METADATA_BYTES

    @property
    def pe_start_bytes(self) -> int:
        """Where its first extent begins."""
        return LABEL_BYTES + self.metadata_bytes


_PART_TEXT_BYTES = 420
# What of a volume is nowhere but in the kernel, or on the volume itself.
_OF_THE_KERNEL = {
    *("active", "media", "data_percent", "overflowed", "dirty_blocks", "cleaning"),
    *("failed", "health", "used_data_blocks", "used_metadata_blocks", "mode", "needs_check"),
    *("rebuilding", "damaged", "held", "chunks", "left", "transaction_in_kernel"),
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
    # Whether dmeventd was asked to watch it.
    watched: bool = False
    # Of a RAID, by disk: what an image that takes no writes has on it still.
    failed: dict[str, Media] = field(default_factory=dict)
    # The same: which images are not in sync yet, and for how many looks.
    rebuilding: dict[str, int] = field(default_factory=dict)
    # What its parts have after its name, those that are active by themselves.
    left: tuple[str, ...] = ()

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
        return [_recorded(getattr(self, one)) for one in kept]

    @property
    def text_bytes(self) -> int:
        """About what it takes of the group's metadata: names, UUIDs, segments, and its tags.

        A RAID has two parts for each image, and the one for its metadata has all tags, too.
        """
        own = _PART_TEXT_BYTES + 2 * len(self.name) + 14 + sum(len(one) + 4 for one in self.tags)
        if self.is_copy_on_write:
            own += _PART_TEXT_BYTES
        images = self.layout.disks if self.layout.is_raid else 0
        return own + images * (own + _PART_TEXT_BYTES)

    def taken(self, disk: str) -> int:
        """The extents that it has of a disk."""
        return self.extents.get(disk, 0) + (self.cache.taken(disk) if self.cache else 0)


def _recorded(one: object) -> object:
    if isinstance(one, dict | set):
        return sorted(one.items() if isinstance(one, dict) else one)
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
    # How many volumes were made and removed in it, and what the kernel has of that.
    transaction: int = 0
    transaction_in_kernel: int = 0
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
            self.transaction_in_kernel,
        )

    def change(self) -> int:
        """Count a change of what is in it, and tell the kernel; returns how many were before."""
        self.transaction += 1
        self.transaction_in_kernel = self.transaction
        return self.transaction - 1


@dataclass
class FakeThin(FakeVolume):
    """A volume in a pool."""

    virtual_extents: int = 0
    pool: str = ""
    number: int = 0
    transaction: int = 0

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
    # The same by disk: what was moved from there, or was to be moved there.
    stale: dict[str, bytes] = field(default_factory=dict)
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
    # How many volumes it may have; 0 for any number.
    max_lv: int = 0
    # How it allocates; and the longest run of free extents of disks on which these are apart.
    policy: str = "normal"
    runs: dict[str, int] = field(default_factory=dict)

    @property
    def checksum(self) -> int:
        """Of all that lvm2 would have in the metadata, also where a test changed it by hand."""
        kept = [sorted(self.tags), self.disks, self.spare]
        kept += [self.system_id, self.lock_type, self.exported, self.max_lv, self.policy]
        kept += [volume.record for _, volume in sorted(self.volumes.items())]
        return zlib.crc32(repr(kept).encode())

    @property
    def text_bytes(self) -> int:
        """About how long its metadata are."""
        # As a list: commands run meanwhile.
        text = sum(one.text_bytes for one in list(self.volumes.values()))
        return 1500 + text + sum(len(one) + 4 for one in self.tags)

    @property
    def metadata_bytes(self) -> int:
        """The smallest of its metadata areas."""
        return min((disk.metadata_bytes for disk in self.disks), default=0)

    @property
    def metadata_free_bytes(self) -> int:
        """By how much its text can grow; below 0 lvm2 refuses."""
        return (self.metadata_bytes - 512) // 2 - 512 - self.text_bytes

    def free(self, disk: FakeDisk) -> int:
        """The extents of a disk that no volume has."""
        taken = sum(one.taken(disk.name) for one in [*self.volumes.values()])
        free = disk.extents - taken - self.spare.get(disk.name, 0)
        if self.moving is not None and disk.name == self.moving[1]:
            [source] = (one for one in self.disks if one.name == self.moving[0])
            free -= source.extents - self.free(source)
        return free

    def thin(self, pool: str) -> list[FakeThin]:
        """The volumes in a pool."""
        found = [*self.volumes.values()]
        return [one for one in found if isinstance(one, FakeThin) and one.pool == pool]


class Failure(Exception):
    """An lvm2 command that ends with exit code 5 and a message."""


def lost_ranges(group: FakeGroup, volume: FakeVolume) -> list[tuple[int, int]]:
    """What of a linear volume lies on missing disks, in bytes; of a RAID, other images have it."""
    if volume.layout.kind not in ("linear", "striped"):
        return []
    missing, found, at = {one.name for one in group.disks if one.missing}, [], 0
    for disk, extents in volume.extents.items():
        length = extents * group.extent_size_bytes
        if disk in missing:
            found.append((at, length))
        at += length
    return found


def is_lost(group: FakeGroup, pool: FakePool) -> bool:
    """Whether a part of a pool lies on a missing disk."""
    missing = {one.name for one in group.disks if one.missing}
    return bool(missing & {*pool.extents, *pool.metadata})


def first_extent(volume: FakeVolume) -> int:
    """Where a volume begins on its first disk: elsewhere than any other."""
    return int(volume.uuid.replace("-", "")[::-1])


def ranges_of(group: FakeGroup, volume: FakeVolume) -> str:
    """What a volume takes of each disk, as if in one piece; of a part of another, that part."""
    if not volume.extents or volume.cache or isinstance(volume, FakePool):
        return f"{volume.name}_part:0-0"
    gone = {one.name for one in group.disks if one.missing}
    first = first_extent(volume)
    return " ".join(
        f"{'[unknown]' if disk in gone else disk}:{first}-{first + extents - 1}"
        for disk, extents in volume.extents.items()
    )
