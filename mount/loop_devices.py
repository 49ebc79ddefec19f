"""The kernel's operations on loop devices, one method each.

Numbers are from <linux/loop.h>.
"""

import fcntl
import os
import re
import struct
from dataclasses import dataclass

from mount import blocks, calls

_LOOP_CLR_FD, _LOOP_GET_STATUS64, _LOOP_SET_CAPACITY = 0x4C01, 0x4C05, 0x4C07
_LOOP_CONFIGURE, _LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
_LO_FLAGS_READ_ONLY, _LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 1, 4, 16
# struct loop_info64, and struct loop_config around it.
_LOOP_INFO = struct.Struct("=5Q4I64s64s32s2Q")
_LOOP_CONFIG = struct.Struct(f"=2I{_LOOP_INFO.size}s64x")


@dataclass(frozen=True)
class LoopStatus:
    """What a loop device is attached to: st_dev, st_ino and st_rdev of the backing file.

    `backing_device` is not zero where the backing file is a block device itself. `leaving` says
    that it is detached as soon as its last user closes it. `name` is whatever whoever attached it
    called it, up to 63 bytes.
    """

    device: int
    inode: int
    backing_device: int
    read_only: bool
    direct_io: bool
    leaving: bool = False
    name: str = ""


class LoopDevices:
    """The loop devices of `mount.syscalls.Kernel`."""

    def loop_devices(self) -> list[str]:
        """Paths of the loop devices that are attached, by number."""
        # Each unpublishing asks, and pathlib takes longer than the kernel.
        loops = [name for name in os.listdir("/sys/block") if name.startswith("loop")]  # noqa: PTH208
        attached = [one for one in loops if os.access(f"/sys/block/{one}/loop", os.F_OK)]
        return [f"/dev/{name}" for name in sorted(attached, key=_number)]

    def loop_free(self) -> str:
        """LOOP_CTL_GET_FREE: the path of a loop device that nobody has attached just now."""
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        with blocks.closing(control):
            return f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"

    def loop_configure(
        self, device: str, file: str, *, read_only: bool, direct_io: bool, name: str
    ) -> None:
        """LOOP_CONFIGURE: attach `file` to the loop device. EBUSY if another was faster."""
        mode = os.O_RDONLY if read_only else os.O_RDWR
        flags = read_only * _LO_FLAGS_READ_ONLY | direct_io * _LO_FLAGS_DIRECT_IO
        called = os.fsencode(name)[:63]
        info = _LOOP_INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, called, b"", b"", 0, 0)
        backing = os.open(file, mode | os.O_CLOEXEC)
        with blocks.closing(backing):
            calls.ioctl(device, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(backing, 0, info), mode)

    def loop_status(self, device: str) -> LoopStatus:
        """LOOP_GET_STATUS64. ENXIO if nothing is attached."""
        fields = _LOOP_INFO.unpack(calls.ioctl(device, _LOOP_GET_STATUS64, bytes(_LOOP_INFO.size)))
        return LoopStatus(
            device=fields[0],
            inode=fields[1],
            backing_device=fields[2],
            read_only=bool(fields[8] & _LO_FLAGS_READ_ONLY),
            direct_io=bool(fields[8] & _LO_FLAGS_DIRECT_IO),
            leaving=bool(fields[8] & _LO_FLAGS_AUTOCLEAR),
            name=os.fsdecode(fields[9].rstrip(b"\0")),
        )

    def loop_clear(self, device: str) -> None:
        """LOOP_CLR_FD. The kernel answers 0 while others have it open, and detaches later."""
        calls.ioctl(device, _LOOP_CLR_FD)

    def loop_set_capacity(self, device: str) -> None:
        """LOOP_SET_CAPACITY: take over the backing file's present size."""
        calls.ioctl(device, _LOOP_SET_CAPACITY)


def _number(name: str) -> int:
    digits = re.search(r"\d+$", name)
    return int(digits.group()) if digits else -1
