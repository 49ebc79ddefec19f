"""Labels of physical volumes and the text of a group's metadata, read from the disk."""

import enum
import itertools
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lvm import tags
from mount import blocks
from mount.blocks import Reader

# lvm2's form of configuration (lvm.conf(5)): `name { … }` and `name = value`, where a value is a
# number, a string or a list. Nothing here goes back to try again, so that no text takes long.
_BLANK = r"(?:\s|\#[^\n]*+)*+"
_WORD = r"[^\s\#{}=\"\[\],]++"
_STRING = r"\"(?:[^\"\\]|\\.)*+\""
_VALUE = rf"{_STRING}|\[(?:[^\"\]]|{_STRING})*+\]|{_WORD}"
_STATEMENT = re.compile(
    rf"{_BLANK}(?:(?P<end>\}})|(?P<word>{_WORD}){_BLANK}(?:\{{|={_BLANK}(?P<value>{_VALUE})))",
    re.DOTALL,
)
_STRINGS = re.compile(_STRING, re.DOTALL)
_NOTHING_MORE = re.compile(_BLANK)


class Damage(Exception):
    """What was read is not what lvm2 writes."""


@dataclass(frozen=True)
class Group:
    """A group, as the metadata on one of its disks tell."""

    name: str
    uuid: str
    seqno: int
    # Of its physical volumes.
    disk_uuids: tuple[str, ...]
    # Such as RESIZEABLE, READ, WRITE, EXPORTED.
    status: frozenset[str] = frozenset()
    system_id: str = ""
    lock_type: str = ""
    # Whether it, or something in it, bears a tag of Carver's.
    has_own_tags: bool = False

    @property
    def is_exported(self) -> bool:
        """Whether it was made ready for another machine: vgexport(8)."""
        return "EXPORTED" in self.status

    @property
    def is_clustered(self) -> bool:
        """Whether an lvm2 before 2.03 shared it with other nodes (clvmd)."""
        return "CLUSTERED" in self.status


def parse_group(text: str) -> Group:
    """What the beginning of the metadata says, which is of the group and its disks; or Damage."""
    name, found = "", dict[tuple[str, ...], str]()
    for place, value in settings(text):
        name = name or place[0]
        if place[1:2] == ("logical_volumes",):
            break
        if place[0] == name:
            found[place[1:]] = value
    try:
        return Group(
            name,
            _string(found["id",]),
            int(found["seqno",]),
            tuple(
                _string(value)
                for place, value in found.items()
                if place[0] == "physical_volumes" and place[2:] == ("id",)
            ),
            frozenset(strings(found.get(("status",), ""))),
            _string(found.get(("system_id",), "")),
            _string(found.get(("lock_type",), "")),
            f'"{tags.PREFIX}' in text,
        )
    except (KeyError, ValueError):
        raise Damage("the metadata tell of no group") from None


def settings(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each setting with the sections that it is in, in the order of the text; or Damage."""
    sections: list[str] = []
    at = 0
    while statement := _STATEMENT.match(text, at):
        at = statement.end()
        word, value = statement["word"], statement["value"]
        if value is not None:
            yield (*sections, word), value
        elif word is not None:
            sections.append(word)
        elif sections:
            sections.pop()
        else:
            raise Damage("the metadata end what was not begun")
    if sections or not _NOTHING_MORE.fullmatch(text, at):
        raise Damage("the metadata are not in lvm2's form")


def strings(value: str) -> list[str]:
    """The strings in a list."""
    return [_string(one) for one in _STRINGS.findall(value)]


def _string(value: str) -> str:
    """A string without its quotes."""
    return re.sub(r"\\(.)", r"\1", value.strip('"'), flags=re.DOTALL)


_SECTOR_BYTES = 512
_LABEL_SECTORS = 4
_PAGE_BYTES = 4096
# The label, and the header of the first metadata area where lvm2 puts it: behind the first page.
_HEAD_BYTES = 2 * _PAGE_BYTES
# loff_t is signed.
_END_OF_DISKS = (1 << 63) - _PAGE_BYTES
# lvm2's own areas have a megabyte; a disk may claim anything.
_LARGEST_TEXT_BYTES = 64 << 20

_LABEL = struct.Struct("<8sQII8s")
_LABEL_CHECKED_FROM = 20
_PV_HEADER = struct.Struct("<32sQ")
_PV_EXTENSION = struct.Struct("<II")
_PV_EXT_USED = 1
_AREA = struct.Struct("<QQ")
_MDA_HEADER = struct.Struct("<I16sIQQ")
_MDA_HEADER_BYTES = 512
_MDA_MAGIC = b" LVM2 x[5A%r0N*>"
_RAW_LOCN = struct.Struct("<QQII")
_RAW_LOCN_IGNORED = 1

_INITIAL_CRC = 0xF597A6CF
_UUID = re.compile(r"[0-9A-Za-z!#]{32}")
_UUID_CUTS = (0, 6, 10, 14, 18, 22, 26, 32)

# A reader may meet the one write that damages what it sees: lvm2 coming round in the ring of text.
_RETRIES = 2


@dataclass(frozen=True)
class Position:
    """Where in a metadata area committed text is: with each commit elsewhere, and another."""

    offset_bytes: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True)
class Mark:
    """A physical volume and its committed texts: while it is the same, so are the metadata.

    There is none where the disk has no metadata area in use, or is in no group.
    """

    uuid: str
    texts: tuple[Position, ...]


class Kind(enum.IntEnum):
    """The kind of writer a disk may have had, the most trusted first; it decides between copies."""

    # The node's own, or one that the operator named.
    LOCAL = 0
    # Of a file or a network, perhaps for a tenant: loop devices, iSCSI.
    ATTACHED = 1
    # A volume of another driver or a guest: rbd, nbd, drbd, zvols.
    FOREIGN = 2


@dataclass(frozen=True)
class PhysicalLabel:
    """A disk that is a physical volume.

    `group` is None where the disk does not say, which has two reasons: it is in no group, or the
    metadata are on the group's other disks (pvcreate(8), --metadatacopies 0). Of the second
    `is_used` is true, unless lvm2 was older than 2.02.167.
    """

    uuid: str
    size_bytes: int
    is_used: bool
    group: Group | None
    # What is wrong with it, though lvm2 may have another copy.
    damage: tuple[str, ...] = ()
    # From the kernel: its kind, by which number it was attached (Disks.sequences), and the UUIDs of
    # the groups that have active volumes on it.
    kind: Kind = Kind.LOCAL
    sequence: str = ""
    active_groups: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Damaged:
    """A disk with a label that cannot be believed."""

    problem: str

    def __str__(self) -> str:
        return self.problem


def read(path: str) -> PhysicalLabel | Damaged | None:
    """What a disk says of itself; None where it has no label. Raises OSError."""
    for _ in range(_RETRIES):
        found = _read(path)
        if found is None or (isinstance(found, PhysicalLabel) and not found.damage):
            return found
    return _read(path)


def mark(path: str) -> Mark | None:
    """The cheapest proof of what the metadata are: two, or all, are equal if nothing was committed.

    One read, where the disk has one metadata area at its beginning. None where nothing is proved:
    without a label, or with damage. Raises OSError.
    """
    with blocks.opened(path) as reader:
        disk = _Disk(reader)
        try:
            label = _label(disk)
            texts = [_header(disk, area) for area in label.areas] if label else []
        except Damage:
            return None
    return Mark(label.uuid, tuple(one.position for one in texts if one)) if label else None


def _read(path: str) -> PhysicalLabel | Damaged | None:
    with blocks.opened(path) as reader:
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
    # As lvm2 decides: an area that was not written has an older text.
    newest = max(groups, key=lambda group: group.seqno, default=None)
    return PhysicalLabel(label.uuid, label.size_bytes, label.is_used, newest, tuple(damage))


class _Disk:
    """The beginning of a disk, and what its label refers to."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.head = reader.read_to_end(0, _HEAD_BYTES)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read what the label refers to; Damage where that is not on the disk. Raises OSError."""
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
    """A part of a disk that the label tells of."""

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
    """The committed text in a metadata area."""

    area: _Area
    position: Position

    def read(self, disk: _Disk) -> str:
        """Raises Damage, also where it is not the text that was committed."""
        area, offset, size = self.area, self.position.offset_bytes, self.position.size_bytes
        # Past the end it goes on at the beginning, behind the header.
        straight = min(size, area.size_bytes - offset)
        text = disk.read(area.offset_bytes + offset, straight)
        text += disk.read(area.offset_bytes + _MDA_HEADER_BYTES, size - straight)
        if _checksum(text) != self.position.checksum:
            raise Damage(f"the metadata at {area.offset_bytes + offset} bytes: wrong checksum")
        return text.rstrip(b"\0").decode(errors="backslashreplace")


def _label(disk: _Disk) -> _Label | None:
    """What the first label says that is whole; None where there is none at all."""
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


def _physical_volume(sector: bytes, at: int) -> _Label:
    uuid, size_bytes = _unpack(_PV_HEADER, sector, at)
    at += _PV_HEADER.size
    data = tuple(_areas(sector, at))
    at += (len(data) + 1) * _AREA.size
    metadata_areas = tuple(_areas(sector, at))
    at += (len(metadata_areas) + 1) * _AREA.size
    version, flags = 0, 0
    if at + _PV_EXTENSION.size <= len(sector):
        version, flags = _PV_EXTENSION.unpack_from(sector, at)
    # The flag is the second version's.
    is_used = version > 1 and bool(flags & _PV_EXT_USED)
    text = uuid.decode("ascii", "replace")
    if not _UUID.fullmatch(text):
        raise Damage("the label has no UUID")
    return _Label(dashed(text), size_bytes, is_used, metadata_areas)


def _areas(sector: bytes, at: int) -> Iterator[_Area]:
    """A list of areas, which ends with an offset of 0."""
    while (area := _Area(*_unpack(_AREA, sector, at))).offset_bytes:
        yield area
        at += _AREA.size


def _header(disk: _Disk, area: _Area) -> _Text | None:
    """Where the area has committed text; None where it has none, or is not in use.

    The second location holds text that is not committed yet; it is ignored.
    """
    header = disk.read(area.offset_bytes, _MDA_HEADER_BYTES)
    checksum, magic, version, start, size = _MDA_HEADER.unpack_from(header)
    where = f"the metadata area at {area.offset_bytes} bytes"
    if _checksum(header[4:]) != checksum:
        raise Damage(f"{where}: wrong checksum of its header")
    if (magic, version, start) != (_MDA_MAGIC, 1, area.offset_bytes):
        raise Damage(f"{where}: not the header of this area")
    offset, length, text_checksum, flags = _RAW_LOCN.unpack_from(header, _MDA_HEADER.size)
    # pvchange(8), --metadataignore: what is there is old.
    if flags & _RAW_LOCN_IGNORED or not offset:
        return None
    if not (_MDA_HEADER_BYTES <= offset < size and length <= size - _MDA_HEADER_BYTES):
        raise Damage(f"{where}: its text would be outside of it")
    if length > _LARGEST_TEXT_BYTES:
        raise Damage(f"{where}: its text would have {length} bytes")
    return _Text(_Area(start, size), Position(offset, length, text_checksum))


def _unpack(form: struct.Struct, sector: bytes, at: int) -> tuple[Any, ...]:
    if at + form.size > len(sector):
        raise Damage("the label goes on past its sector")
    return form.unpack_from(sector, at)


def dashed(uuid: str) -> str:
    """A UUID of 32 characters as lvm2 writes it everywhere but in labels and in the kernel."""
    return "-".join(uuid[start:end] for start, end in itertools.pairwise(_UUID_CUTS))


def _checksum(data: bytes) -> int:
    """lvm2's calc_crc(): the usual CRC-32 with another beginning, and not inverted at the end."""
    return zlib.crc32(data, ~_INITIAL_CRC & 0xFFFFFFFF) ^ 0xFFFFFFFF
