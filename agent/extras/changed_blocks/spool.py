"""Ranges that wait to be asked for: in memory while they are few, else in a file without a name."""

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
# On a disk, where /tmp is often none (file-hierarchy(7)).
_ON_DISK = Path("/var/tmp")  # noqa: S108 - the file has no name there


class Spool:
    """Sorted ranges in a file that is its caller's; 16 bytes each."""

    def __init__(self, file: "SpooledTemporaryFile[bytes]") -> None:
        self._file = file

    def fill(self, extents: Iterable[Extent]) -> None:
        """Put ranges behind those that are there."""
        piece = bytearray()
        for one in extents:
            piece += _RECORD.pack(one.offset_bytes, one.length_bytes)
            if len(piece) >= _PIECE_BYTES:
                self._file.write(piece)
                piece.clear()
        self._file.write(piece)

    def add(self, extent: Extent) -> None:
        """Put one range behind those that are there."""
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
    """One that is gone with the `with`.

    `otherwise` is where the file is that has them if /var/tmp cannot be written to, as in a pod.
    """
    directory = _ON_DISK if os.access(_ON_DISK, os.W_OK) else otherwise
    with SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(directory)) as file:
        yield Spool(file)
