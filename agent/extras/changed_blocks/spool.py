"""Ranges kept for later: in memory while they are few, else in an unnamed file."""

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile

from agent.core.extents import Extent

_RECORD = struct.Struct("=2Q")
_PIECE_BYTES = 4096 * _RECORD.size
_IN_MEMORY_BYTES = 4 << 20
# On a disk; /tmp often is not (file-hierarchy(7)).
_ON_DISK = Path("/var/tmp")  # noqa: S108 - the file has no name there


class Spool:
    """Sorted ranges in a file, 16 bytes each."""

    def __init__(self, file: "SpooledTemporaryFile[bytes]") -> None:
        self._file = file

    def fill(self, extents: Iterable[Extent]) -> None:
        """Append ranges."""
        piece = bytearray()
        for one in extents:
            piece += _RECORD.pack(one.offset_bytes, one.length_bytes)
            if len(piece) >= _PIECE_BYTES:
                self._file.write(piece)
                piece.clear()
        self._file.write(piece)

    def add(self, extent: Extent) -> None:
        """Append one range."""
        self._file.write(_RECORD.pack(extent.offset_bytes, extent.length_bytes))

    def __iter__(self) -> Iterator[Extent]:
        at = 0
        while True:
            self._file.seek(at)
            piece = self._file.read(_PIECE_BYTES)
            if not piece:
                return
            at += len(piece)
            yield from (Extent(*one) for one in _RECORD.iter_unpack(piece))


@contextmanager
def opened(otherwise: Path) -> Iterator[Spool]:
    """A spool that is deleted on exit; in `otherwise` where /var/tmp is read-only, as in a pod."""
    directory = _ON_DISK if os.access(_ON_DISK, os.W_OK) else otherwise
    with SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(directory)) as file:
        yield Spool(file)
