"""What of a thin volume its pool has given out, told by the pool's own metadata.

thin_dump(8) and thin_delta(8) read them, in a metadata snapshot that the pool keeps for that
(thin-provisioning.rst); both print XML, a line for each run of blocks, which is read as it comes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO
from xml.parsers import expat

from lvm import errors

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
    """What thin_dump told of one volume, in order; raises BadReport, also where it has none."""
    return _runs(printed, "device", _MAPPED)


def differing(printed: BinaryIO) -> Iterator[Run]:
    """What thin_delta told, in order; raises BadReport."""
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
        raise errors.BadReport(f"{type(error).__name__}: {error}") from error
    if not holders:
        raise errors.BadReport("the pool's metadata do not have the volume")
