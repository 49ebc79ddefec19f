"""The chunks of a thin pool, as a volume takes them that is as large as the pool."""

import errno
import os
from dataclasses import dataclass, field

from fakes.devices import Media


@dataclass
class Chunks:
    """A volume that is written from its start to its end is given one after the other.

    But for those that leaked, which here are the first: they were being given out when the disk
    failed, and are no volume's then and not free either (dm-thin.c).
    """

    media: Media = field(default_factory=Media)
    chunk_bytes: int = 0
    size_bytes: int = 0
    leaked: int = 0
    # All are given out, and somebody asked for another.
    is_full: bool = False

    def begin(self, media: Media, chunk_bytes: int, size_bytes: int) -> None:
        """A volume as large as a pool is there now; what is given out to it is of this medium."""
        self.media, self.chunk_bytes, self.size_bytes = media, chunk_bytes, size_bytes

    def erase(self, offset_bytes: int, length_bytes: int) -> None:
        """Zeroes in that volume; ENOSPC once all chunks are given out."""
        begins = offset_bytes + self.leaked * self.chunk_bytes
        ends = min(begins + length_bytes, self.size_bytes)
        self.media.erase(begins, max(0, ends - begins))
        if begins + length_bytes > self.size_bytes:
            self.is_full = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """What was written is on the disk."""
        self.media.flush()
