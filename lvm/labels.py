"""Read LVM's labels and metadata from disks, without lvm2.

Why: lvm2 reads every disk of the node within one process. A single disk that does not answer would
keep each lvm2 command waiting, and with it each call to Carver. So Carver itself finds out which
disks belong to which volume group (agent/groups/disk_search.py), and confines each lvm2 command to
the disks of one group. A hung disk then stops its own group, and no other
(docs/decisions/02-finding-disks.md).

Idea: all that must be known is at fixed places of the disk, and is read by direct I/O, one thread
for each disk (lvm/disk_reader.py). Nothing is ever written here.

    0      512             4096            4608                           1 MiB
    +------+---------------+---------------+------------------------------+------------+
    |      | label         | header of the | texts of the metadata area,  | extents of |
    |      |  PV UUID      | metadata area | in a ring                    | volumes    |
    |      |  size of disk |               | +-----------+-----------+    |            |
    |      |  areas ------>|  committed ------------------>| seqno = 8 |    |            |
    |      |               |  text         | | seqno = 7 |           |    |            |
    +------+---------------+---------------+-+-----------+-----------+----+------------+

1. The label is in one of the first four sectors. It has the UUID of the physical volume, and the
   offsets of the disk's metadata areas.
2. The header of a metadata area has offset, length and checksum of the committed text.
3. The text is the metadata of the group: its name, UUID, seqno and disks, then its volumes. With
   each commit lvm2 writes a new text behind the old one, and then the header. At the end of the
   area the text goes on at the beginning of the ring.
4. Of several areas with different texts the one with the highest seqno counts, as for lvm2.

From 1 and 2 alone follows a fingerprint: while UUID, offset, length and checksum are the same,
nothing was committed. So a read of 8 KiB from each disk proves that a report is still as good as
a new one (agent/groups/metadata_cache.py).

What it would cost to do without: one hung disk would stop all groups of the node, and each call
would pay for a report by lvm2.

All input is untrusted: a disk may be damaged, or written by a guest. What is not as lvm2 writes it
raises `Damage`, and no text takes long to parse.
"""

import enum
import itertools
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lvm import tags
from mount import block_io
from mount.block_io import Reader

# Patterns of lvm2's configuration format (lvm.conf(5)): `name { … }` and `name = value`, where a
# value is a number, a string or a list. All quantifiers are possessive (`++`, `*+`): the patterns
# never backtrack, so that no text takes long.
_BLANK = r"(?:\s|\#[^\n]*+)*+"
_WORD = r"[^\s\#{}=\"\[\],]++"
_STRING = r"\"(?:[^\"\\]|\\.)*+\""
_VALUE = rf"{_STRING}|\[(?:[^\"\]]|{_STRING})*+\]|{_WORD}"
_STATEMENT = re.compile(
    rf"{_BLANK}(?:(?P<end>\}})|(?P<word>{_WORD}){_BLANK}(?:\{{|={_BLANK}(?P<value>{_VALUE})))",
    re.DOTALL,
)
_STRINGS = re.compile(_STRING, re.DOTALL)
_ONLY_BLANK = re.compile(_BLANK)


class Damage(Exception):
    """Raised for a label or metadata that lvm2 would not have written in this form."""


@dataclass(frozen=True)
class Group:
    """A volume group, by the metadata on one of its disks."""

    name: str
    uuid: str
    seqno: int
    # The UUIDs of the volume group's physical volumes.
    disk_uuids: tuple[str, ...]
    # Flags of the volume group, such as RESIZEABLE, READ, WRITE, EXPORTED.
    status: frozenset[str] = frozenset()
    system_id: str = ""
    lock_type: str = ""
    # Whether the volume group, or a disk or volume of the group, has a tag of Carver's.
    has_own_tags: bool = False

    @property
    def is_exported(self) -> bool:
        """Whether vgexport(8) made the volume group ready for another machine."""
        return "EXPORTED" in self.status

    @property
    def is_clustered(self) -> bool:
        """Whether an lvm2 before 2.03 shared the volume group with other nodes (clvmd)."""
        return "CLUSTERED" in self.status


def parse_group(text: str) -> Group:
    """Parse the volume group and its disks from a metadata text.

    Raises Damage for a text that is not in lvm2's format, or lacks the group's UUID or seqno.

    Parsing stops at the logical volumes, which come last and make up nearly all of the text.
    """
    name, values = "", dict[tuple[str, ...], str]()
    for path, value in settings(text):
        name = name or path[0]
        if path[1:2] == ("logical_volumes",):
            break
        if path[0] == name:
            values[path[1:]] = value
    try:
        return Group(
            name,
            _string(values["id",]),
            int(values["seqno",]),
            tuple(
                _string(value)
                for path, value in values.items()
                if path[0] == "physical_volumes" and path[2:] == ("id",)
            ),
            frozenset(strings(values.get(("status",), ""))),
            _string(values.get(("system_id",), "")),
            _string(values.get(("lock_type",), "")),
            f'"{tags.PREFIX}' in text,
        )
    except (KeyError, ValueError):
        raise Damage("the metadata tell of no group") from None


def settings(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each setting of a text in lvm2's configuration format, in order.

    Raises Damage for a text that is not in that format, once all settings before the fault are
    yielded.

    A setting is the path of its name, from the outermost section inwards, and its unparsed value:
    `devices { filter = "a" }` gives `("devices", "filter"), '"a"'`.
    """
    sections: list[str] = []
    offset = 0
    while statement := _STATEMENT.match(text, offset):
        offset = statement.end()
        word, value = statement["word"], statement["value"]
        if value is not None:
            yield (*sections, word), value
        elif word is not None:
            sections.append(word)
        elif sections:
            sections.pop()
        else:
            raise Damage("the metadata end what was not begun")
    if sections or not _ONLY_BLANK.fullmatch(text, offset):
        raise Damage("the metadata are not in lvm2's form")


def strings(value: str) -> list[str]:
    """The strings in the value of a setting that is a list, without their quotes."""
    return [_string(string) for string in _STRINGS.findall(value)]


def _string(value: str) -> str:
    """The text of a quoted string in lvm2's configuration format, without quotes and escapes."""
    return re.sub(r"\\(.)", r"\1", value.strip('"'), flags=re.DOTALL)


_SECTOR_BYTES = 512
# Number of sectors at the beginning of a disk in which a label may be.
_LABEL_SECTORS = 4
_PAGE_BYTES = 4096
# Number of bytes of the first read of a disk. They have the label, and the header of the first
# metadata area, as lvm2 puts that header behind the first page.
_HEAD_BYTES = 2 * _PAGE_BYTES
# Highest offset that is read, in bytes, as the kernel's loff_t is a signed number of 64 bits.
_END_OF_DISKS = (1 << 63) - _PAGE_BYTES
# Maximum size of a metadata text that is read, in bytes. lvm2's own areas have a megabyte by
# default, but a damaged or forged disk may claim any size.
_LARGEST_TEXT_BYTES = 64 << 20

# Structures on disk (lib/format_text/layout.h and lib/label/label.h of lvm2).
# Header of a label: magic, number of its sector, checksum, offset of the physical volume's header
# in the sector, type. The checksum is of the sector's bytes from `_LABEL_CHECKED_FROM` on.
_LABEL = struct.Struct("<8sQII8s")
_LABEL_CHECKED_FROM = 20
# Header of a physical volume: UUID without dashes, size of the disk. Two lists of areas follow.
_PV_HEADER = struct.Struct("<32sQ")
# Extension of a physical volume's header: version, flags; and the flag of a disk in a volume group.
_PV_EXTENSION = struct.Struct("<II")
_PV_EXT_USED = 1
# Data or metadata area in a list: offset and size, in bytes.
_AREA = struct.Struct("<QQ")
# Header of a metadata area: checksum of the rest, magic, version, offset and size of the area.
_MDA_HEADER = struct.Struct("<I16sIQQ")
_MDA_HEADER_BYTES = 512
_MDA_MAGIC = b" LVM2 x[5A%r0N*>"
# Position of a text, in the header of a metadata area: offset in the area, length, checksum, flags;
# and the flag of an area that is not in use.
_RAW_LOCN = struct.Struct("<QQII")
_RAW_LOCN_IGNORED = 1

# Initial value of lvm2's checksums.
_INITIAL_CRC = 0xF597A6CF
# Pattern of a UUID in the form in which LVM writes UUIDs to disks, without dashes.
_UUID = re.compile(r"[0-9A-Za-z!#]{32}")
# Positions in a UUID before which lvm2 prints a dash; the first and last are the UUID's ends.
_UUID_CUTS = (0, 6, 10, 14, 18, 22, 26, 32)

# Number of further reads of a disk that looks damaged. lvm2 overwrites the oldest text in the ring
# while Carver may still be reading that text; the next read finds the new text.
_RETRIES = 2


@dataclass(frozen=True)
class Position:
    """The position of the committed text in a metadata area; each commit changes the position."""

    offset_bytes: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True)
class Mark:
    """A disk's part of its volume group's fingerprint; equal until the metadata change."""

    uuid: str
    # The positions of the committed metadata texts; empty where the disk is in no volume group, or
    # has no metadata area in use.
    texts: tuple[Position, ...]


class Kind(enum.IntEnum):
    """Who may have written a disk, from most to least trusted; decides between copies of a disk."""

    # A disk that only the node writes: its own disk, or a disk that the operator named.
    LOCAL = 0
    # A disk written also by the owner of the file or network disk, perhaps a tenant: loop devices,
    # iSCSI.
    ATTACHED = 1
    # A disk written by a guest or another storage driver: rbd, nbd, drbd, zvols.
    FOREIGN = 2


@dataclass(frozen=True)
class PhysicalLabel:
    """A disk that is a physical volume, by its label and metadata.

    `group` is None for two reasons. The disk is in no volume group; or the metadata are on the
    group's other disks alone (pvcreate(8), --metadatacopies 0). In the second case `is_used` is
    true, unless the label is by an lvm2 older than 2.02.167.
    """

    uuid: str
    size_bytes: int
    is_used: bool
    group: Group | None
    # Problems of the disk's metadata areas; another area may have undamaged metadata.
    damage: tuple[str, ...] = ()
    # Who may have written the disk, by sysfs.
    kind: Kind = Kind.LOCAL
    # The kernel's sequence number of the disk (Disks.sequences).
    sequence: str = ""
    # The UUIDs of the volume groups that have active volumes on the disk, by sysfs.
    active_groups: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Damaged:
    """A disk whose label is damaged."""

    problem: str

    def __str__(self) -> str:
        return self.problem


def read(path: str) -> PhysicalLabel | Damaged | None:
    """Read the label and metadata of a disk; None for a disk without a label. Raises OSError."""
    for _ in range(_RETRIES):
        result = _read(path)
        if result is None or (isinstance(result, PhysicalLabel) and not result.damage):
            return result
    return _read(path)


def mark(path: str) -> Mark | None:
    """Read the mark of a disk, which stays equal until lvm2 commits metadata. Raises OSError.

    None for a disk without a label, or with damage in the label or in the header of a metadata
    area. A single read of 8 KiB is enough where the disk has one metadata area, at its beginning.
    """
    with block_io.opened(path) as reader:
        disk = _Disk(reader)
        try:
            label = _label(disk)
            texts = [_header(disk, area) for area in label.areas] if label else []
        except Damage:
            return None
    return Mark(label.uuid, tuple(text.position for text in texts if text)) if label else None


def _read(path: str) -> PhysicalLabel | Damaged | None:
    with block_io.opened(path) as reader:
        disk = _Disk(reader)
        try:
            label = _label(disk)
        except Damage as problem:
            return Damaged(str(problem))
        if label is None:
            return None
        groups, damage = [], []
        for area in label.areas:
            try:
                if text := _header(disk, area):
                    groups.append(parse_group(text.read(disk)))
            except Damage as problem:
                damage.append(str(problem))
    # The highest seqno counts, as for lvm2: an area that a commit did not reach has an older text.
    newest = max(groups, key=lambda group: group.seqno, default=None)
    return PhysicalLabel(label.uuid, label.size_bytes, label.is_used, newest, tuple(damage))


class _Disk:
    """A disk that is open for reading, with its first bytes in memory."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.head = reader.read_to_end(0, _HEAD_BYTES)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range of the disk that the label or a metadata area's header refers to.

        Raises Damage for a range beyond the end of the disk, OSError for a failed read.
        """
        end = offset_bytes + length_bytes
        if end > _END_OF_DISKS:
            raise Damage(f"it tells of something at {offset_bytes} bytes, where no disk is")
        if end <= len(self.head):
            return self.head[offset_bytes:end]
        data = self._reader.read_to_end(offset_bytes, length_bytes)
        if len(data) < length_bytes:
            raise Damage(f"it tells of something at {offset_bytes} bytes, past the disk's end")
        return data


@dataclass(frozen=True)
class _Area:
    """A data or metadata area of a disk."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class _Label:
    uuid: str
    size_bytes: int
    is_used: bool
    # The metadata areas.
    areas: tuple[_Area, ...]


@dataclass(frozen=True)
class _Text:
    """The committed text in a metadata area, not read yet."""

    area: _Area
    position: Position

    def read(self, disk: _Disk) -> str:
        """Read the text from the disk. Raises Damage if the text's checksum is wrong, OSError."""
        area, offset, size = self.area, self.position.offset_bytes, self.position.size_bytes
        # A text that reaches the end of the area goes on at the area's start, behind the header.
        straight = min(size, area.size_bytes - offset)
        text = disk.read(area.offset_bytes + offset, straight)
        text += disk.read(area.offset_bytes + _MDA_HEADER_BYTES, size - straight)
        if _checksum(text) != self.position.checksum:
            raise Damage(f"the metadata at {area.offset_bytes + offset} bytes: wrong checksum")
        return text.rstrip(b"\0").decode(errors="backslashreplace")


def _label(disk: _Disk) -> _Label | None:
    """Parse the first undamaged label of a disk; None if the disk has no label.

    Raises Damage if the disk has damaged labels alone.
    """
    problem = ""
    for number in range(_LABEL_SECTORS):
        sector = disk.head[number * _SECTOR_BYTES :][:_SECTOR_BYTES]
        if len(sector) < _SECTOR_BYTES or not sector.startswith(b"LABELONE"):
            continue
        _, own_number, checksum, offset, kind = _LABEL.unpack_from(sector)
        if _checksum(sector[_LABEL_CHECKED_FROM:]) != checksum:
            problem = problem or f"the label in sector {number}: wrong checksum"
        elif own_number != number:
            problem = problem or f"the label in sector {number} is one of sector {own_number}"
        elif kind != b"LVM2 001":
            problem = problem or f"the label in sector {number} is not LVM2's"
        else:
            return _physical_volume(sector, offset)
    if problem:
        raise Damage(problem)
    return None


def _physical_volume(sector: bytes, offset: int) -> _Label:
    uuid, size_bytes = _unpack(_PV_HEADER, sector, offset)
    offset += _PV_HEADER.size
    data = tuple(_areas(sector, offset))
    offset += (len(data) + 1) * _AREA.size
    metadata_areas = tuple(_areas(sector, offset))
    offset += (len(metadata_areas) + 1) * _AREA.size
    version, flags = 0, 0
    if offset + _PV_EXTENSION.size <= len(sector):
        version, flags = _PV_EXTENSION.unpack_from(sector, offset)
    # The flag of a disk in a volume group exists since version 2 of the header's extension.
    is_used = version > 1 and bool(flags & _PV_EXT_USED)
    text = uuid.decode("ascii", "replace")
    if not _UUID.fullmatch(text):
        raise Damage("the label has no UUID")
    return _Label(dashed(text), size_bytes, is_used, metadata_areas)


def _areas(sector: bytes, offset: int) -> Iterator[_Area]:
    """Parse a list of areas in a label; the list ends with an offset of 0."""
    while (area := _Area(*_unpack(_AREA, sector, offset))).offset_bytes:
        yield area
        offset += _AREA.size


def _header(disk: _Disk, area: _Area) -> _Text | None:
    """Parse a metadata area's header; None for an area without committed text, or not in use.

    Raises Damage for a header that lvm2 would not have written.

    The header's second location is that of a text not yet committed, and is ignored.
    """
    header = disk.read(area.offset_bytes, _MDA_HEADER_BYTES)
    checksum, magic, version, start, size = _MDA_HEADER.unpack_from(header)
    area_title = f"the metadata area at {area.offset_bytes} bytes"
    if _checksum(header[4:]) != checksum:
        raise Damage(f"{area_title}: wrong checksum of its header")
    if (magic, version, start) != (_MDA_MAGIC, 1, area.offset_bytes):
        raise Damage(f"{area_title}: not the header of this area")
    offset, length, text_checksum, flags = _RAW_LOCN.unpack_from(header, _MDA_HEADER.size)
    # An area that is not in use (pvchange(8), --metadataignore) has an old text.
    if flags & _RAW_LOCN_IGNORED or not offset:
        return None
    if not (_MDA_HEADER_BYTES <= offset < size and length <= size - _MDA_HEADER_BYTES):
        raise Damage(f"{area_title}: its text would be outside of it")
    if length > _LARGEST_TEXT_BYTES:
        raise Damage(f"{area_title}: its text would have {length} bytes")
    return _Text(_Area(start, size), Position(offset, length, text_checksum))


def _unpack(form: struct.Struct, sector: bytes, offset: int) -> tuple[Any, ...]:
    if offset + form.size > len(sector):
        raise Damage("the label goes on past its sector")
    return form.unpack_from(sector, offset)


def dashed(uuid: str) -> str:
    """Insert the dashes with which lvm2 prints a UUID; labels and the kernel have none."""
    return "-".join(uuid[start:end] for start, end in itertools.pairwise(_UUID_CUTS))


def _checksum(data: bytes) -> int:
    """lvm2's calc_crc(): a CRC-32 with a particular initial value, not inverted at the end."""
    return zlib.crc32(data, ~_INITIAL_CRC & 0xFFFFFFFF) ^ 0xFFFFFFFF
