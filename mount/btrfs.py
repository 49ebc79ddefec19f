"""An id of its own for a copied btrfs.

The kernel takes two devices with the same id for one file system; there is nothing like xfs's
nouuid. The id is in the superblocks only, as long as the blocks of the trees are told which one
they were made with (the feature METADATA_UUID, Linux 5.0). btrfstune -m writes just that, but ends
a transaction on the way: a log that was left then belongs to no transaction, and the kernel refuses
to mount the copy (seen with btrfs-progs 6.2 and Linux 6.1). A snapshot of a btrfs in use nearly
always has a log, so the superblocks are written here, and nothing else of them is touched.
"""

import struct
import uuid
from collections.abc import Iterator

from mount import errors
from mount.syscalls import Kernel

# struct btrfs_super_block, <linux/btrfs_tree.h>, and where its copies are (btrfs_sb_offset).
_SIZE = 4096
_OFFSETS = (64 << 10, 64 << 20, 256 << 30)
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_BYTES = 32
_ID = slice(0x20, 0x30)
_OFFSET = slice(0x30, 0x38)
_MAGIC_AT, _MAGIC = slice(0x40, 0x48), b"_BHRfS_M"
_INCOMPATIBLE = struct.Struct("<Q")
_INCOMPATIBLE_AT = 0xBC
_CHECKSUM_TYPE = slice(0xC4, 0xC6)
_CRC32C = bytes(2)
_METADATA_ID = slice(0x23B, 0x24B)
_HAS_METADATA_ID = 1 << 10

_POLYNOMIAL = 0x82F63B78


def is_on(kernel: Kernel, device: str) -> bool:
    """Whether a device bears a btrfs, be it whole or not."""
    size_bytes, at = kernel.device_size_bytes(device), _OFFSETS[0]
    return at + _SIZE <= size_bytes and kernel.read(device, at, _SIZE)[_MAGIC_AT] == _MAGIC


def renew(kernel: Kernel, device: str) -> None:
    """Give the btrfs on a device that is not mounted a new random id. Raises RenewFailed."""
    identity = uuid.uuid4().bytes
    found = list(_superblocks(kernel, device))
    if not found:
        raise errors.RenewFailed(device, "no superblock with a good checksum of type crc32c")
    # The first is the one that is mounted by; written last, it is what counts.
    for offset, block in reversed(found):
        kernel.write(device, offset, _renewed(block, identity))


def _superblocks(kernel: Kernel, device: str) -> Iterator[tuple[int, bytes]]:
    size_bytes = kernel.device_size_bytes(device)
    for offset in _OFFSETS:
        if offset + _SIZE > size_bytes:
            return
        block = kernel.read(device, offset, _SIZE)
        is_one = block[_MAGIC_AT] == _MAGIC and block[_OFFSET] == offset.to_bytes(8, "little")
        if is_one and block[_CHECKSUM_TYPE] == _CRC32C and _signed(block) == block:
            yield offset, block


def _renewed(block: bytes, identity: bytes) -> bytes:
    changed = bytearray(block)
    (features,) = _INCOMPATIBLE.unpack_from(block, _INCOMPATIBLE_AT)
    if not features & _HAS_METADATA_ID:
        changed[_METADATA_ID] = block[_ID]
        _INCOMPATIBLE.pack_into(changed, _INCOMPATIBLE_AT, features | _HAS_METADATA_ID)
    changed[_ID] = identity
    return _signed(changed)


def _signed(block: bytes | bytearray) -> bytes:
    """A superblock with the checksum of its contents (crc32c, RFC 3720, section B.4)."""
    value = 0xFFFFFFFF
    for byte in block[_CHECKSUM_BYTES:]:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    checksum = _CHECKSUM.pack(value ^ 0xFFFFFFFF).ljust(_CHECKSUM_BYTES, bytes(1))
    return checksum + bytes(block[_CHECKSUM_BYTES:])
