"""What free extents still hold of volumes that were deleted, by marks that were written there."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_MARK = re.compile(rb"carver-load-mark (\S+) ")
_COLUMNS = "pv_name,pe_start,vg_extent_size,pvseg_start,pvseg_size,lv_name"
_PIECE_BYTES = 8 << 20
# A mark begins a block, and so lies in one piece.
_BLOCK_BYTES = 4096


def marker(name: str) -> bytes:
    """A block with the name of its volume."""
    return f"carver-load-mark {name} ".encode().ljust(_BLOCK_BYTES, b"\0")


def shown() -> list[str]:
    """The volumes of which free extents of any group, read from the disk, show a mark."""
    found: set[str] = set()
    for disk, offset, length in _free():
        for begin, end in _written(disk, offset, offset + length):
            found |= set(on(disk, begin, end))
    return sorted(found)


def on(disk: str, begin: int, end: int) -> list[str]:
    """The volumes of which a part of a disk shows a mark."""
    return sorted({match.decode() for match in _marks(disk, begin, end)})


def _free() -> Iterator[tuple[str, int, int]]:
    """Disk, offset and length of each run of free extents, in bytes."""
    words = ["pvs", "--segments", "--noheadings", "--separator", "|", "--units", "b", "--nosuffix"]
    output = subprocess.run(
        [*words, "--options", _COLUMNS], check=True, capture_output=True, text=True
    ).stdout
    for line in output.splitlines():
        disk, begins, extent, first, count, logical = line.strip().split("|")
        if not logical:
            start = int(begins) + int(first) * int(extent)
            yield disk, start, int(count) * int(extent)


def _written(disk: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """What of it is on the disk at all: the rest of a sparse file below it reads as zeroes."""
    backing = Path("/sys/block", Path(disk).name, "loop/backing_file")
    if not backing.exists():
        yield begin, end
        return
    file = os.open(backing.read_text().strip(), os.O_RDONLY)
    try:
        while begin < end:
            try:
                data = os.lseek(file, begin, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return
            begin = min(end, os.lseek(file, data, os.SEEK_HOLE))
            if data < end:
                yield data // _BLOCK_BYTES * _BLOCK_BYTES, begin
    finally:
        os.close(file)


def _marks(disk: str, begin: int, end: int) -> Iterator[bytes]:
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
        for offset in range(begin, end, _PIECE_BYTES):
            piece = os.pread(descriptor, min(_PIECE_BYTES, end - offset), offset)
            yield from _MARK.findall(piece)
    finally:
        os.close(descriptor)
