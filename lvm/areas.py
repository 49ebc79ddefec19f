"""What the area of a copy-on-write snapshot says, on its disk, of a snapshot that is not active.

The kernel writes there that a snapshot overflowed, and lvm2 only asks the kernel: of one that is
not active it tells nothing.
"""

import mmap
import os
import struct

# struct disk_header, drivers/md/dm-snap-persistent.c: magic, valid, version, size of a chunk.
_HEADER = struct.Struct("<4I")
_MAGIC = 0x70416E53
# What direct I/O is in whole numbers of.
_BLOCK_BYTES = 4096


def overflowed(disk: str, offset_bytes: int) -> bool | None:
    """Whether the snapshot whose area begins there is lost; None where the disk cannot be read.

    Past the page cache: that may hold what was there before the kernel's own write.
    """
    try:
        descriptor = os.open(disk, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, _BLOCK_BYTES) as block:
                length = os.preadv(descriptor, [block], offset_bytes)
                return is_lost(block[:length])
        finally:
            os.close(descriptor)
    except OSError:
        return None


def is_lost(header: bytes) -> bool:
    """Whether the area's first bytes are not those of a snapshot that can be read."""
    if len(header) < _HEADER.size:
        return True
    magic, valid, _, _ = _HEADER.unpack_from(header)
    # Zeroes, by lvm2, are a snapshot that was never active.
    return bool(magic) and (magic, valid) != (_MAGIC, 1)
