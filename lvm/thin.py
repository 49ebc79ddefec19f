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
from lvm.tuning import AS_IT_IS, Tuning
from lvm.volumes import New
from mount import errors as mount_errors

_MIB, _GIB = 1 << 20, 1 << 30
# lvmthin(7): chunks of 64 KiB to 1 GiB, metadata of 2 MiB to some 16 GiB, of which a chunk takes 64
# bytes at most. A quarter more is headroom.
LEAST_CHUNK_BYTES = 64 << 10
MOST_CHUNK_BYTES = _GIB
_METADATA_BYTES_OF_CHUNK = 80
_LEAST_METADATA_BYTES = 2 * _MIB
_MOST_METADATA_BYTES = 15 * _GIB
_METADATA_BLOCK_BYTES = 4096
_TENTH = Reserve(percent=10)
# lvm2's own repair of a pool may lose what could still be read before it.
DAMAGED = "see `A thin pool's metadata are damaged` in docs/operations.md"


@dataclass(frozen=True)
class Policy:
    """How a class's pool is made, promised and grown; a chunk size of 0 suits the group."""

    over_provisioning: float = 1.0
    size: Reserve = _TENTH
    autoextend_threshold: float = 70.0
    autoextend_percent: float = 20.0
    refuse_above: float = 90.0
    chunk_size_bytes: int = 0

    @property
    def ratio(self) -> Fraction:
        """The over-provisioning, exactly: 1.15 times 100 is 115."""
        return Fraction(str(self.over_provisioning))


@dataclass(frozen=True)
class Pool:
    """A pool as a report has it; all its extents are 0 where it is not made yet.

    `promised_bytes` are the sizes of its volumes and their snapshots.
    """

    name: str
    chunk_size_bytes: int
    data_extents: int = 0
    metadata_extents: int = 0
    promised_bytes: int = 0


def find(group: Group, name: str, chunk_size_bytes: int, ignored: str = "") -> Pool:
    """The pool of that name; the member called `ignored` is no promise to anyone."""
    found = group.volumes.get(name)
    if found is None:
        return Pool(name, chunk_size_bytes)
    promised, apart = group.bytes_in_pool(name), group.volumes.get(ignored)
    if apart is not None and apart.pool == name:
        promised -= apart.size_bytes
    extent = group.extent_size_bytes
    data, metadata = found.size_bytes // extent, found.metadata_size_bytes // extent
    return Pool(name, chunk_size_bytes, data, metadata, promised)


def chunk_size_bytes(group: Group, policy: Policy) -> int:
    """The least chunk that is a power of two and keeps the metadata of the whole group handy."""
    if policy.chunk_size_bytes:
        return policy.chunk_size_bytes
    chunk = LEAST_CHUNK_BYTES
    # Metadata of 1 GiB are looked through in seconds when the pool is activated after a crash.
    while chunk < MOST_CHUNK_BYTES and _metadata_bytes(group, chunk) > _GIB:
        chunk *= 2
    return chunk


def suitable_metadata_extents(group: Group, chunk_bytes: int) -> int:
    """What the metadata take of a pool that has all of the group."""
    size_bytes = max(_LEAST_METADATA_BYTES, _metadata_bytes(group, chunk_bytes))
    return _ceil(min(size_bytes, _MOST_METADATA_BYTES), group.extent_size_bytes)


def missing_metadata_extents(group: Group, pool: Pool) -> int:
    """What the pool's metadata, and the spare beside them, lack to suit the group.

    lvm2 keeps one spare in the group, as large as the largest of its pools' metadata.
    """
    wanted = suitable_metadata_extents(group, pool.chunk_size_bytes)
    spare = max(wanted, pool.metadata_extents) - group.spare_extents
    return max(0, wanted - pool.metadata_extents) + max(0, spare)


def growth_extents(group: Group, pool: Pool, kept_extents: int) -> int:
    """By how much the pool's data can grow for certain; all of them, where it is not made yet.

    In a group whose policy wants them together, on one disk or in one piece, what is free need not
    be where the pool is: nothing is promised of it, though lvm2 may give it.
    """
    is_fixed = group.keeps_to_one_disk and pool.data_extents
    return 0 if is_fixed else room_extents(group, pool, kept_extents)


def room_extents(group: Group, pool: Pool, kept_extents: int) -> int:
    """By how much the pool's data may grow if lvm2 finds that where the pool can have it."""
    free = group.free_extents - kept_extents - missing_metadata_extents(group, pool)
    free = max(0, min(free, group.linear_extents))
    enough = pool.data_extents or free * group.extent_size_bytes >= pool.chunk_size_bytes
    return free if enough else 0


def metadata_growth_extents(group: Group, pool: Pool, kept_extents: int) -> int:
    """By how much the pool's metadata can grow, and the group's spare with them."""
    free = max(0, group.free_extents - kept_extents)
    # Until the spare is as large as they are, an extent costs one; from then on, two.
    alone = max(0, group.spare_extents - pool.metadata_extents)
    behind = max(0, pool.metadata_extents - group.spare_extents)
    room = free if free <= alone else (free - behind + alone) // 2
    most = _MOST_METADATA_BYTES // group.extent_size_bytes - pool.metadata_extents
    return max(0, min(room, most))


def wanted_extents(extents: int, percent: float, policy: Policy) -> int:
    """What is added to what is so full: its share, or all that brings it below the threshold."""
    share = _ceil(int(extents * policy.autoextend_percent), 100)
    enough = int(extents * percent / policy.autoextend_threshold) + 1 - extents
    return max(1, share, enough)


def first_extents(group: Group, pool: Pool, policy: Policy, kept_extents: int) -> int:
    """The data that a new pool is made with."""
    one_chunk = _ceil(pool.chunk_size_bytes, group.extent_size_bytes)
    asked = max(policy.size.extents(group), one_chunk)
    return min(asked, growth_extents(group, pool, kept_extents))


def maximum_bytes(group: Group, pool: Pool, policy: Policy, kept_extents: int) -> int:
    """What may still be promised, in whole extents: one volume, or growth of one."""
    largest = pool.data_extents + growth_extents(group, pool, kept_extents)
    promises = int(largest * policy.ratio) * group.extent_size_bytes
    return max(0, promises - pool.promised_bytes)


def outstanding_extents(group: Group, pool: Pool, policy: Policy) -> int:
    """What must stay free in the group for the pool to keep its promises, at the class's ratio."""
    if not pool.promised_bytes:
        return 0
    promised = _ceil(pool.promised_bytes, group.extent_size_bytes)
    data = max(0, -int(-promised // policy.ratio) - pool.data_extents)
    return data + missing_metadata_extents(group, pool)


def refusal(
    group: Group, pool: Pool, policy: Policy, kept_extents: int, status: ThinPool | None
) -> str:
    """Why nothing more may be promised, whatever the sizes add up to; empty where something may.

    Fullness is measured by the size that the pool can grow to. A pool that is not over-provisioned
    has room for all that it promised, however full. One without a status is not active.
    """
    if status is None:
        return ""
    if status.mode not in ("rw", "out_of_data_space") or status.needs_check:
        return f"pool {pool.name} needs a repair; {DAMAGED}"
    extent = group.extent_size_bytes
    largest = (pool.data_extents + growth_extents(group, pool, kept_extents)) * extent
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
    total = sum(disk.extents for disk in group.disks) * group.extent_size_bytes
    return _ceil(total, chunk_bytes) * _METADATA_BYTES_OF_CHUNK


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def status_of(found: Sequence[object]) -> ThinPool | None:
    """The pool among what device-mapper says of a volume."""
    return next((one for one in found if isinstance(one, ThinPool)), None)


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
    """Make a pool that zeroes each chunk before it gives it out, and passes discards down.

    Where it is full, writes wait for room before they fail: a minute, by the kernel's own limit.
    (That is lvm.conf(5)'s default; lvm2 2.03.16 refuses --errorwhenfull here.) The metadata lie in
    one piece on one disk. Raises NoSpace, NameTaken.
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


def create(lvm: Lvm, group: str, pool: str, new: New) -> None:
    """Make, tag and activate a volume in a pool (lvcreate(8)); it takes no room until it is used.

    Raises NameTaken.
    """
    lvm(
        "lvcreate",
        *("--yes", "--type", "thin", "--virtualsize", f"{new.size_bytes}b", "--thinpool", pool),
        *new.words(),
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
    """Make and tag a volume that shares all its blocks with another of its pool (lvcreate(8)).

    Both are whole without the other. It is made active only where it may be written to. Raises
    NameTaken.
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
    lvm: Lvm, group: str, pool: str, *, by_bytes: int, disks: Sequence[str] = ()
) -> None:
    """Grow a pool's metadata, and the group's spare where it is smaller; raises NoSpace."""
    lvm("lvextend", "--poolmetadatasize", f"+{by_bytes}b", "--", f"{group}/{pool}", *disks)


_SECTOR_BYTES = 512
_PIECE_BYTES = 1 << 16

# The elements that tell of blocks, and the attributes that tell where they are and how many. Of a
# single one there is no number.
_MAPPED = {
    "single_mapping": ("origin_block", ""),
    "range_mapping": ("origin_begin", "length"),
}
_DIFFERENT = dict.fromkeys(("different", "left_only", "right_only"), ("begin", "length"))


@dataclass(frozen=True)
class Run:
    """So many bytes of a thin volume, in whole blocks of its pool."""

    offset_bytes: int
    length_bytes: int


def mapped_words(metadata: str, device_id: int) -> tuple[str, ...]:
    """The program that tells what of a thin volume has blocks."""
    return ("thin_dump", "--metadata-snap", "--dev-id", str(device_id), "--", metadata)


def differing_words(metadata: str, base_id: int, target_id: int) -> tuple[str, ...]:
    """The program that tells where two thin volumes of a pool have not the same blocks."""
    those = ("--snap1", str(base_id), "--snap2", str(target_id))
    return ("thin_delta", "--metadata-snap", *those, "--", metadata)


def mapped(printed: BinaryIO) -> Iterator[Run]:
    """The mappings of one volume as thin_dump printed them; BadReport, also where it has none."""
    return _runs(printed, "device", _MAPPED)


def differing(printed: BinaryIO) -> Iterator[Run]:
    """The differences that thin_delta printed, in order; raises BadReport."""
    return _runs(printed, "diff", _DIFFERENT)


def _runs(printed: BinaryIO, holder: str, elements: Mapping[str, tuple[str, str]]) -> Iterator[Run]:
    """The runs that stand within a holder. A tree of a large pool's would take gigabytes."""
    block_bytes = 0
    holders = 0
    found: list[Run] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal block_bytes, holders
        if name == "superblock":
            block_bytes = int(attributes["data_block_size"]) * _SECTOR_BYTES
        holders += name == holder
        if (keys := elements.get(name)) is not None:
            where, length = keys
            blocks = int(attributes[length]) if length else 1
            found.append(Run(int(attributes[where]) * block_bytes, blocks * block_bytes))

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    try:
        while piece := printed.read(_PIECE_BYTES):
            parser.Parse(piece)
            yield from found
            found.clear()
        # Raises where the end is missing, as of a program that died.
        parser.Parse(b"", True)
    except (expat.ExpatError, KeyError, ValueError) as error:
        raise mount_errors.BadReport(f"{type(error).__name__}: {error}") from error
    if not holders:
        raise mount_errors.BadReport("the pool's metadata do not have the volume")
