"""Thin pools and volumes: sizes, commands, and the block maps of thin_dump and thin_delta."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import BinaryIO
from xml.parsers import expat

from lvm import tags
from lvm.devicemapper import ThinPool
from lvm.layout import Reserve
from lvm.lvm2 import Lvm
from lvm.report import Group
from lvm.room import Room
from lvm.tuning import AS_IT_IS, Tuning
from lvm.volumes import New
from mount import mount_errors as mount_errors

_MIB, _GIB = 1 << 20, 1 << 30
# Limits of a thin pool's chunk size, in bytes (lvmthin(7)).
LEAST_CHUNK_BYTES = 64 << 10
MOST_CHUNK_BYTES = _GIB
# Size of the metadata of one chunk, in bytes: 64 at most (lvmthin(7)), and a quarter as headroom.
_METADATA_BYTES_OF_CHUNK = 80
# Limits of the size of a thin pool's metadata, in bytes: lvmthin(7) has 2 MiB to some 16 GiB.
_LEAST_METADATA_BYTES = 2 * _MIB
_MOST_METADATA_BYTES = 15 * _GIB
_METADATA_BLOCK_BYTES = 4096
# Default size of a new thin pool: a tenth of the volume group's slow disks.
_TENTH = Reserve(percent=10)
# Advice about a damaged thin pool. The advice names no command: lvm2's repair may lose data that
# could still be read before.
DAMAGED = "see `A thin pool's metadata are damaged` in docs/operations.md"
# Where the remedy for a thin pool that fills up is described. A move of its volumes is none: above
# `refuse_above` a pool takes no snapshots, which a move needs.
FULL = "`A thin pool fills up` in docs/runbooks/pool-full.md"


@dataclass(frozen=True)
class Policy:
    """How the thin pool of a storage class is created, over-provisioned and extended.

    A chunk size of 0 means the chunk size that suits the volume group (`chunk_size_bytes`).
    """

    over_provisioning: float = 1.0
    size: Reserve = _TENTH
    autoextend_threshold: float = 70.0
    autoextend_percent: float = 20.0
    refuse_above: float = 90.0
    chunk_size_bytes: int = 0

    @property
    def ratio(self) -> Fraction:
        """The over-provisioning as an exact fraction: with a float 1.15 times 100 is not 115."""
        return Fraction(str(self.over_provisioning))


@dataclass(frozen=True)
class Pool:
    """A thin pool in a report. All numbers of extents are 0 while the pool does not exist yet.

    `promised_bytes` is the sum of the sizes of the pool's volumes and their snapshots.
    """

    name: str
    chunk_size_bytes: int
    data_extents: int = 0
    metadata_extents: int = 0
    promised_bytes: int = 0


def find(group: Group, name: str, chunk_size_bytes: int, ignored: str = "") -> Pool:
    """The thin pool with this name, by a volume group's report; a pool of size 0 if there is none.

    If `ignored` names a volume of the pool, `promised_bytes` leaves out the size of this volume.
    """
    volume = group.volumes.get(name)
    if volume is None:
        return Pool(name, chunk_size_bytes)
    promised, ignored_volume = group.bytes_in_pool(name), group.volumes.get(ignored)
    if ignored_volume is not None and ignored_volume.pool == name:
        promised -= ignored_volume.size_bytes
    extent = group.extent_size_bytes
    data, metadata = volume.size_bytes // extent, volume.metadata_size_bytes // extent
    return Pool(name, chunk_size_bytes, data, metadata, promised)


def chunk_size_bytes(group: Group, policy: Policy) -> int:
    """The chunk size of a new thin pool: the policy's, or the smallest that suits the volume group.

    The smallest chunk size that suits is a power of two with which the metadata of a pool on all
    slow disks of the group take 1 GiB at most.
    """
    if policy.chunk_size_bytes:
        return policy.chunk_size_bytes
    chunk = LEAST_CHUNK_BYTES
    # The check of 1 GiB of metadata, when a thin pool is activated after a crash, takes seconds.
    while chunk < MOST_CHUNK_BYTES and _metadata_bytes(group, chunk) > _GIB:
        chunk *= 2
    return chunk


def suitable_metadata_extents(group: Group, chunk_bytes: int) -> int:
    """The number of extents of the metadata of a thin pool on all slow disks of a volume group."""
    size_bytes = max(_LEAST_METADATA_BYTES, _metadata_bytes(group, chunk_bytes))
    return _ceil(min(size_bytes, _MOST_METADATA_BYTES), group.extent_size_bytes)


def missing_metadata_extents(group: Group, pool: Pool) -> int:
    """The number of extents by which a thin pool's metadata and their spare should still grow.

    Metadata and spare should have the size that suits a pool on all slow disks
    (`suitable_metadata_extents`). lvm2 keeps one spare volume in the group, as large as the largest
    metadata of its pools.
    """
    suitable_extents = suitable_metadata_extents(group, pool.chunk_size_bytes)
    spare = max(suitable_extents, pool.metadata_extents) - group.spare_extents
    return max(0, suitable_extents - pool.metadata_extents) + max(0, spare)


def growth_extents(room: Room, pool: Pool) -> int:
    """The number of extents by which a thin pool can surely grow, or a new pool can be large.

    Where the volume group's allocation policy wants a volume's extents on one disk or in one range,
    the free extents need not be where an existing pool is. Then the result is 0, though lvm2 may
    find some.
    """
    is_fixed = room.group.keeps_to_one_disk and pool.data_extents
    return 0 if is_fixed else room_extents(room, pool)


def room_extents(room: Room, pool: Pool) -> int:
    """The number of extents by which a thin pool's data grow if the pool gets all free extents.

    It is 0 for a new pool if the free extents are fewer than one chunk.
    """
    spare = room.available_extents - missing_metadata_extents(room.group, pool)
    free = max(0, min(spare, room.linear_extents))
    enough = pool.data_extents or free * room.group.extent_size_bytes >= pool.chunk_size_bytes
    return free if enough else 0


def metadata_growth_extents(room: Room, pool: Pool) -> int:
    """The number of extents by which a thin pool's metadata can grow together with the spare."""
    free, group = room.available_extents, room.group
    # While the spare is larger than the metadata, growth by an extent takes one free extent; from
    # then on it takes two, as the spare grows too.
    spare_lead = max(0, group.spare_extents - pool.metadata_extents)
    spare_lag = max(0, pool.metadata_extents - group.spare_extents)
    growth = free if free <= spare_lead else (free - spare_lag + spare_lead) // 2
    maximum_growth = _MOST_METADATA_BYTES // group.extent_size_bytes - pool.metadata_extents
    return max(0, min(growth, maximum_growth))


def wanted_extents(extents: int, percent: float, policy: Policy) -> int:
    """The number of extents to add to a thin pool's data, or metadata, that are `percent` full.

    The number is the policy's share of the present size, or more if the fullness would still be
    above the policy's threshold.
    """
    share = _ceil(int(extents * policy.autoextend_percent), 100)
    enough = int(extents * percent / policy.autoextend_threshold) + 1 - extents
    return max(1, share, enough)


def first_extents(room: Room, pool: Pool, policy: Policy) -> int:
    """The number of extents of a new thin pool's data: the policy's size, or less without room."""
    one_chunk = _ceil(pool.chunk_size_bytes, room.group.extent_size_bytes)
    requested_extents = max(policy.size.extents(room.group), one_chunk)
    return min(requested_extents, growth_extents(room, pool))


def maximum_bytes(room: Room, pool: Pool, policy: Policy) -> int:
    """The largest volume, or growth of a volume, that over-provisioning allows now, in bytes.

    The result is the largest size of the thin pool's data, times the over-provisioning, less the
    sizes of the volumes that the pool has; a multiple of the extent size.
    """
    largest = pool.data_extents + growth_extents(room, pool)
    promises = int(largest * policy.ratio) * room.group.extent_size_bytes
    return max(0, promises - pool.promised_bytes)


def outstanding_extents(group: Group, pool: Pool, policy: Policy) -> int:
    """The number of extents that must stay free, so that a thin pool can grow for its volumes.

    A pool promises the sizes of its volumes, divided by the over-provisioning of the class.
    """
    if not pool.promised_bytes:
        return 0
    promised = _ceil(pool.promised_bytes, group.extent_size_bytes)
    data = max(0, -int(-promised // policy.ratio) - pool.data_extents)
    return data + missing_metadata_extents(group, pool)


def refusal(room: Room, pool: Pool, policy: Policy, status: ThinPool | None) -> str:
    """Why a thin pool may get no new volume and no growth of one, by its state in the kernel.

    The result is empty if the pool may get them.

    Fullness is relative to the size that the pool can grow to. Fullness does not matter for the
    data of a pool that is not over-provisioned, as the pool can grow to all that it has promised.
    An inactive pool has no `status`, and is not refused.
    """
    if status is None:
        return ""
    if status.mode not in ("rw", "out_of_data_space") or status.needs_check:
        return f"pool {pool.name} needs a repair; {DAMAGED}"
    group, extent = room.group, room.group.extent_size_bytes
    largest = (pool.data_extents + growth_extents(room, pool)) * extent
    used = status.used_data_blocks * pool.chunk_size_bytes
    if policy.ratio > 1 and used * 100 > largest * policy.refuse_above:
        return f"pool {pool.name} is {100 * used / largest:.0f} % full of what it can grow to"
    metadata = max(pool.metadata_extents, suitable_metadata_extents(group, pool.chunk_size_bytes))
    used = status.used_metadata_blocks * _METADATA_BLOCK_BYTES
    if used * 100 > metadata * extent * policy.refuse_above:
        percent = 100 * used / (metadata * extent)
        return f"the metadata of pool {pool.name} are {percent:.0f} % full"
    return ""


def _metadata_bytes(group: Group, chunk_bytes: int) -> int:
    total_bytes = Room(group).planned_extents * group.extent_size_bytes
    return _ceil(total_bytes, chunk_bytes) * _METADATA_BYTES_OF_CHUNK


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def status_of(statuses: Sequence[object]) -> ThinPool | None:
    """The status of the thin pool among the statuses of a volume's devices; None if none is."""
    return next((status for status in statuses if isinstance(status, ThinPool)), None)


def create_pool(
    lvm: Lvm,
    group: str,
    name: str,
    *,
    data_extents: int,
    metadata_extents: int,
    extent_size_bytes: int,
    chunk_size_bytes: int,
    own_tags: Mapping[str, str],
    disks: Sequence[str] = (),
) -> None:
    """Make and activate a thin pool (lvcreate(8)).

    Raises NoSpace if the pool does not fit, NameTaken if a volume has its name.

    The pool zeroes each chunk at its allocation, and passes discards down to its disks. While the
    pool is full, writes wait for room; after a minute, the kernel's limit, they fail. (That is
    lvm.conf(5)'s default; lvm2 2.03.16 refuses --errorwhenfull here.) lvm2 puts the metadata in
    one contiguous range on one disk.
    """
    lvm(
        "lvcreate",
        *("--yes", "--type", "thin-pool", "--zero", "y", "--discards", "passdown"),
        *("--setactivationskip", "y", "--activate", "y", "--ignoreactivationskip"),
        *("--chunksize", f"{chunk_size_bytes}b"),
        *("--poolmetadatasize", f"{metadata_extents * extent_size_bytes}b"),
        *("--size", f"{data_extents * extent_size_bytes}b"),
        *tags.words("--addtag", own_tags),
        *("--name", name, "--", group, *disks),
    )


def create(lvm: Lvm, group: str, pool: str, volume: New) -> None:
    """Make, tag and activate a thin volume in a pool (lvcreate(8)).

    Raises NameTaken if a volume has its name.

    The volume takes chunks of the pool only as it is written.
    """
    lvm(
        "lvcreate",
        *("--yes", "--type", "thin", "--virtualsize", f"{volume.size_bytes}b", "--thinpool", pool),
        *volume.words(),
        *("--", group),
    )


def snapshot(
    lvm: Lvm,
    group: str,
    name: str,
    *,
    origin: str,
    own_tags: Mapping[str, str],
    read_only: bool,
    tuning: Tuning = AS_IT_IS,
) -> None:
    """Make and tag a snapshot of a thin volume, in the origin's pool (lvcreate(8)).

    Raises NameTaken if a volume has the snapshot's name.

    Snapshot and origin share blocks, and either may be removed without the other. A writable
    snapshot is activated, a read-only one is not.
    """
    lvm(
        "lvcreate",
        *("--yes", "--snapshot", "--permission", "r" if read_only else "rw"),
        *("--setactivationskip", "y"),
        *(() if read_only else ("--activate", "y", "--ignoreactivationskip")),
        *tuning.words(),
        *tags.words("--addtag", own_tags),
        *("--name", name, "--", f"{group}/{origin}"),
    )


def extend_metadata(
    lvm: Lvm, group: str, pool: str, *, added_bytes: int, disks: Sequence[str] = ()
) -> None:
    """Grow a thin pool's metadata, and the volume group's spare to the same size.

    Raises NoSpace if there are too few free extents.
    """
    lvm("lvextend", "--poolmetadatasize", f"+{added_bytes}b", "--", f"{group}/{pool}", *disks)


_SECTOR_BYTES = 512
_PIECE_BYTES = 1 << 16

# XML elements of thin_dump(8) and thin_delta(8) that stand for blocks, each with the attributes of
# its first block and its number of blocks; an element for a single block has no such number.
_MAPPED = {
    "single_mapping": ("origin_block", ""),
    "range_mapping": ("origin_begin", "length"),
}
_DIFFERENT = dict.fromkeys(("different", "left_only", "right_only"), ("begin", "length"))


@dataclass(frozen=True)
class Run:
    """A contiguous range of a thin volume, in whole chunks of its pool."""

    offset_bytes: int
    length_bytes: int


def mapped_words(metadata: str, device_id: int) -> tuple[str, ...]:
    """The thin_dump(8) command that prints the mapped ranges of a thin volume."""
    return ("thin_dump", "--metadata-snap", "--dev-id", str(device_id), "--", metadata)


def differing_words(metadata: str, base_id: int, target_id: int) -> tuple[str, ...]:
    """The thin_delta(8) command that prints the ranges in which two thin volumes differ."""
    snapshots = ("--snap1", str(base_id), "--snap2", str(target_id))
    return ("thin_delta", "--metadata-snap", *snapshots, "--", metadata)


def mapped(printed: BinaryIO) -> Iterator[Run]:
    """Parse the mapped ranges of one volume, as thin_dump(8) prints them. Raises BadReport."""
    return _runs(printed, "device", _MAPPED)


def differing(printed: BinaryIO) -> Iterator[Run]:
    """Parse the differing ranges, in order, as thin_delta(8) prints them. Raises BadReport."""
    return _runs(printed, "diff", _DIFFERENT)


def _runs(printed: BinaryIO, holder: str, elements: Mapping[str, tuple[str, str]]) -> Iterator[Run]:
    """Parse the ranges in the XML of a program while the program prints it. Raises BadReport.

    A tree of the whole XML would take gigabytes for a large thin pool. Output without the element
    `holder` is that of a pool without the volume.
    """
    block_bytes = 0
    holders = 0
    runs: list[Run] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal block_bytes, holders
        if name == "superblock":
            block_bytes = int(attributes["data_block_size"]) * _SECTOR_BYTES
        holders += name == holder
        if (keys := elements.get(name)) is not None:
            start_key, length = keys
            blocks = int(attributes[length]) if length else 1
            runs.append(Run(int(attributes[start_key]) * block_bytes, blocks * block_bytes))

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    try:
        while piece := printed.read(_PIECE_BYTES):
            parser.Parse(piece)
            yield from runs
            runs.clear()
        # Raises an error if the end of the XML is missing, as where the program died.
        parser.Parse(b"", True)
    except (expat.ExpatError, KeyError, ValueError) as error:
        raise mount_errors.BadReport(f"{type(error).__name__}: {error}") from error
    if not holders:
        raise mount_errors.BadReport("the pool's metadata do not have the volume")
