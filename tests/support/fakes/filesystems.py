"""libblkid, mkfs and fsck for the fake runner: they act on the devices in memory.

Each takes all words of a command, the program first. Words that the real programs are not given by
Carver fail the test: what is not faked was not meant.
"""

import errno
import json
import struct
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise

from fakes.devices import BLOCK_BYTES, BTRFS_SUPERBLOCK_AT, FakeDevice, FakeDevices, Media

from mount import filesystem, table
from mount.command import Result
from mount.filesystem import FILE_SYSTEMS, Signature
from mount.kernel import Kernel


def tags(device: FakeDevice) -> dict[str, str]:
    found = device.contents or device.media.looks_like
    if found is None:
        return {}
    if found.usage == "partition table":
        return {"PTUUID": found.uuid, "PTTYPE": found.fs_type}
    label = {"LABEL": found.label} if found.label else {}
    blocks = {"BLOCK_SIZE": str(found.block_bytes)} if found.block_bytes else {}
    return {"UUID": found.uuid, "TYPE": found.fs_type, "USAGE": found.usage, **label, **blocks}


def signatures(device: FakeDevice, length_bytes: int = 0) -> dict[str, str]:
    """What libblkid finds on a device, or its first bytes; a RAID's signature comes first there."""
    last = (length_bytes or device.size_bytes) - BLOCK_BYTES
    if device.media.read(last, BLOCK_BYTES).startswith(DRBD[:_DRBD_BYTES]):
        return {"TYPE": "drbd", "USAGE": "raid", "UUID": "1"}
    return tags(device)


# The metadata of a network mirror (struct md_on_disk_08 of drbd), in a device's last block.
_DRBD_BYTES = 64
DRBD = struct.pack(">Q4QQQII", *range(1, 8), 0, 0x83740267 + 4).ljust(BLOCK_BYTES, b"\0")
_SUPERBLOCK = b"a file system, as a fake has it: "
_REAL_BYTES = 512
# The damage of what a killed mkfs left: libblkid finds it, and the kernel does not mount it.
UNFINISHED = "unfinished"


def superblock(media: Media) -> bytes:
    """The first block of a device with a file system, for who copies it by reading."""
    assert media.contents is not None
    fields = [asdict(media.contents), media.fs_size_bytes, media.damage]
    real = bytearray(_REAL_BYTES)
    if media.contents.fs_type == "xfs":
        # As much of it as is looked at: struct xfs_dsb, fs/xfs/libxfs/xfs_format.h.
        real[:4], real[126] = b"XFSB", media.damage == UNFINISHED
        with suppress(ValueError):
            real[32:48] = uuid.UUID(media.contents.uuid).bytes
    return bytes(real + _SUPERBLOCK + json.dumps(fields).encode()).ljust(BLOCK_BYTES, b"\0")


def restore(media: Media, block: bytes) -> bytes:
    """What such a block says, put on another medium; the block as that has it."""
    own = block[_REAL_BYTES:]
    if not own.startswith(_SUPERBLOCK):
        media.contents = None
        return block
    signature, media.fs_size_bytes, media.damage = json.loads(
        own.removeprefix(_SUPERBLOCK).rstrip(b"\0")
    )
    media.contents = Signature(**signature)
    return block


def mkfs(words: Sequence[str], devices: FakeDevices) -> Result:
    """mkfs.ext4 overwrites what it finds, since it has no terminal; the others refuse."""
    program, quiet, *options, separator, path = words
    fs_type = program.removeprefix("mkfs.")
    assert fs_type in FILE_SYSTEMS, words
    assert (quiet, separator) == ("-q", "--"), words
    assert not {"-f", "-F", "--force"} & set(options), words
    if not devices.knows(path):
        return Result(1, "", f"{program}: No such file or directory while opening {path}\n")
    device = devices.get(path)
    if device.mounted or device.held:
        return Result(1, "", f"{path} is apparently in use by the system\n")
    if device.read_only:
        return Result(1, "", f"{path}: Read-only file system\n")
    if device.contents is not None and fs_type != "ext4":
        found = f"{path} appears to contain an existing filesystem ({device.contents.fs_type})."
        return Result(1, "", f"{program}: {found}\n")
    if device.size_bytes < FILE_SYSTEMS[fs_type].minimum_bytes and fs_type != "ext4":
        return Result(1, "", f"{program}: {path} is too small\n")
    _write(device, fs_type, options)
    return Result(0, "", "")


def unfinish(device: FakeDevice) -> None:
    """As mkfs.xfs leaves it that is killed before its last write: a byte says that it is not whole.

    From its fourth write on libblkid knows it; each of the 65 of xfsprogs 6.1.0 was tried. A killed
    mkfs.ext4 leaves a blank device, and mkfs.btrfs writes what it is known by nearly last.
    """
    assert device.contents is not None
    assert device.contents.fs_type == "xfs"
    device.media.damage = UNFINISHED
    device.media.write(0, superblock(device.media))


def fsck(words: Sequence[str], devices: FakeDevices) -> Result:
    """A file system's check: mends little damage; looks at nothing that is mounted."""
    *program, separator, path = words
    assert separator == "--", words
    if (device := _unmounted("check", program, devices.get(path))) is None:
        return Result(8, "", f"{words[0]}: cannot open {path}\n")
    if device.media.damage == "much":
        return Result(4, f"{path}: UNEXPECTED INCONSISTENCY; RUN fsck MANUALLY.\n", "")
    mended, device.media.damage = bool(device.media.damage), ""
    device.media.errors = 0
    return Result(int(mended), f"{path}: {'mended' if mended else 'clean'}\n", "")


def resize(words: Sequence[str], devices: FakeDevices) -> Result:
    """A file system's resize: fills the device; looks at nothing that is mounted."""
    *program, separator, path = words
    assert separator == "--", words
    if (device := _unmounted("resize", program, devices.get(path))) is None:
        return Result(8, "", f"{words[0]}: cannot open {path}\n")
    device.media.fs_size_bytes = device.size_bytes
    device.media.write(0, superblock(device.media))
    return Result(0, "", "")


def grow_at_the_next_stage(kernel: Kernel, mount: table.Mount, size_bytes: int) -> None:
    """The `grow` of a file system that grows only unmounted and leaves less than 1 MiB unused."""
    stat = kernel.statvfs(mount.path)
    if stat.f_blocks * stat.f_frsize < size_bytes - (1 << 20):
        raise OSError(errno.EOPNOTSUPP, "it grows when it is staged next")


def _unmounted(field: str, program: Sequence[str], device: FakeDevice) -> FakeDevice | None:
    """The device, if this program of a file system's record may work on it."""
    found = device.contents
    if device.mounted or device.held or not found or found.fs_type not in FILE_SYSTEMS:
        return None
    return device if getattr(FILE_SYSTEMS[found.fs_type], field) == tuple(program) else None


def label_option(fs_type: str) -> str:
    """mkfs.f2fs has -l in place of -L, which for mkfs.xfs is about the log."""
    return "-L" if "-L" in FILE_SYSTEMS[fs_type].allowed.split() else "-l"


PROGRAMS: dict[str, Callable[[Sequence[str], FakeDevices], Result]] = {
    **{one.program: mkfs for one in FILE_SYSTEMS.values()},
    **{one.check[0]: fsck for one in FILE_SYSTEMS.values() if one.check},
    **{one.resize[0]: resize for one in FILE_SYSTEMS.values() if one.resize},
}


def _write(device: FakeDevice, fs_type: str, options: Sequence[str]) -> None:
    option = label_option(fs_type)
    label = options[options.index(option) + 1] if option in options else ""
    identity = _uuid(options) or uuid.uuid4()
    given = [word for pair in pairwise(options) for word in pair if pair[0] in ("-b", "-s")]
    blocks = filesystem.block_bytes(fs_type, given[:2]) or device.block_bytes
    device.contents = Signature(fs_type, "filesystem", str(identity), label, blocks)
    if fs_type == "btrfs":
        device.media.write(BTRFS_SUPERBLOCK_AT, _superblock(identity))
    device.media.fs_size_bytes, device.media.damage = device.size_bytes, ""
    device.media.write(0, superblock(device.media))


def _uuid(options: Sequence[str]) -> uuid.UUID | None:
    """What `-U`, or `-m uuid=` for xfs, gives it."""
    given = dict(pairwise(options))
    lists = [one for one in given.get("-m", "").split(",") if one.startswith("uuid=")]
    found = given.get("-U") or "".join(lists).removeprefix("uuid=")
    return uuid.UUID(found) if found else None


def _superblock(identity: uuid.UUID) -> bytes:
    """As much of a btrfs superblock as is looked at."""
    block = bytearray(4096)
    block[0x20:0x30] = identity.bytes
    block[0x30:0x38] = BTRFS_SUPERBLOCK_AT.to_bytes(8, "little")
    block[0x40:0x48] = b"_BHRfS_M"
    return filesystem._signed(block)
