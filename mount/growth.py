"""The kernel's operations that make a mounted file system larger, or flush it, one method each.

Numbers are from <linux/btrfs.h>, fs/ext4/ext4.h and fs/xfs/libxfs/xfs_fs.h.
"""

import os
import struct
from dataclasses import dataclass

from mount import blocks, calls

_EXT4_RESIZE_FS = calls.ioctl_number(1, ord("f"), 16, 8)
# struct xfs_fsop_geom_v1: eight u32, four u64, a uuid, seven 32-bit fields, padded to 112.
_XFS_GEOMETRY = struct.Struct("=8I4Q16s7I4x")
_XFS_FSGEOMETRY_V1 = calls.ioctl_number(2, ord("X"), 100, _XFS_GEOMETRY.size)
# struct xfs_growfs_data: u64 newblocks, u32 imaxpct, padded to 16.
_XFS_GROWFS = struct.Struct("=QI4x")
_XFS_FSGROWFSDATA = calls.ioctl_number(1, ord("X"), 110, _XFS_GROWFS.size)
# struct btrfs_ioctl_vol_args: s64 fd, char name[4088].
_BTRFS_VOL_ARGS = struct.Struct("=q4088s")
_BTRFS_SYNC = calls.ioctl_number(0, 0x94, 8, 0)
_BTRFS_RESIZE = calls.ioctl_number(1, 0x94, 3, _BTRFS_VOL_ARGS.size)


@dataclass(frozen=True)
class XfsGeometry:
    """The part of an xfs's geometry that growing it needs."""

    block_size_bytes: int
    blocks: int
    max_inode_percent: int


class Growth:
    """The file systems of `mount.syscalls.Kernel`, by the path of a mount."""

    def grow_ext4(self, path: str, blocks: int) -> None:
        """EXT4_IOC_RESIZE_FS to so many of the file system's own blocks."""
        calls.ioctl(path, _EXT4_RESIZE_FS, struct.pack("=Q", blocks))

    def xfs_geometry(self, path: str) -> XfsGeometry:
        """XFS_IOC_FSGEOMETRY_V1."""
        told = calls.ioctl(path, _XFS_FSGEOMETRY_V1, bytes(_XFS_GEOMETRY.size))
        fields = _XFS_GEOMETRY.unpack(told)
        return XfsGeometry(
            block_size_bytes=fields[0], blocks=fields[8], max_inode_percent=fields[7]
        )

    def grow_xfs(self, path: str, blocks: int, max_inode_percent: int) -> None:
        """XFS_IOC_FSGROWFSDATA to so many blocks."""
        calls.ioctl(path, _XFS_FSGROWFSDATA, _XFS_GROWFS.pack(blocks, max_inode_percent))

    def grow_btrfs(self, path: str) -> None:
        """BTRFS_IOC_RESIZE of device 1 to the size of the device."""
        calls.ioctl(path, _BTRFS_RESIZE, _BTRFS_VOL_ARGS.pack(0, b"max"))

    def sync_btrfs(self, path: str) -> None:
        """BTRFS_IOC_SYNC: what was written is on disk, and the log is empty."""
        calls.ioctl(path, _BTRFS_SYNC)

    def sync(self, path: str) -> None:
        """syncfs(2): what was written to the file system at a path is on its device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with blocks.closing(descriptor):
            calls.syncfs(descriptor, path)
