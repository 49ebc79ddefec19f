"""What the kernel shows of a volume, in few words: devices, mounts, sizes. It starts no program."""

import hashlib
import os
from pathlib import Path

from agent.cli.terminal import human
from agent.core.ids import VolumeId
from lvm import names
from mount import table

_SECTOR_BYTES = 512  # of everything in /sys/block, whatever the disk's own are


class Surprise(Exception):
    """Something was not as it must be."""

    def __init__(self, expected: object, seen: object) -> None:
        super().__init__(f"expected {expected}; saw {seen}")
        self.expected = str(expected)
        self.seen = str(seen)


def expect(what: str, wanted: object, seen: object) -> None:
    """Raise Surprise unless what is seen is what was wanted."""
    if seen != wanted:
        raise Surprise(f"{what}: {wanted}", seen)


def node(volume_id: str) -> Path:
    """Where udev puts the device of a volume."""
    volume = VolumeId.parse(volume_id)
    if volume is None:
        raise Surprise("a volume id such as group@uuid/name", volume_id)
    return Path("/dev/mapper") / names.device(volume.group, volume.name)


def block_device(path: Path) -> str:
    """The kernel's name, such as dm-3, of the block device that a node is."""
    if not path.is_block_device():
        raise Surprise(f"a block device at {path}", "none" if not path.exists() else "another file")
    number = path.stat().st_rdev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve().name


def size_bytes(name: str) -> int:
    """The size of the block device with that kernel's name."""
    return int(Path("/sys/class/block", name, "size").read_text()) * _SECTOR_BYTES


def is_read_only(name: str) -> bool:
    """Whether the kernel refuses all writes to the block device."""
    return Path("/sys/class/block", name, "ro").read_text().strip() == "1"


def loops_over(name: str) -> list[str]:
    """The loop devices attached to the block device."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            attached = backing.read_text().strip()
        except OSError:
            continue  # detached while we looked
        # The path inside devtmpfs or from the root, by who attached it; a link is never shown.
        if attached in {f"/{name}", f"/dev/{name}"}:
            found.append(backing.parts[3])
    return found


def mounts() -> table.Table:
    """The mount table now."""
    return table.Table(Path("/proc/self/mountinfo").read_text())


def mounts_of(name: str) -> list[str]:
    """Where the block device with that kernel's name is mounted, or bound as a node."""
    major, _, minor = Path("/sys/class/block", name, "dev").read_text().strip().partition(":")
    found = mounts()
    nodes = [one.path for one in found.mounts if one.root == f"/{name}"]
    return nodes + [one.path for one in found.of_device((int(major), int(minor)))]


def mounted(path: Path, *, read_only: bool = False) -> table.Mount:
    """The one mount at a path, with the access that is wanted."""
    stack = mounts().at(str(path))
    expect(f"mounts at {path}", 1, len(stack))
    expect(f"read-only at {path}", read_only, stack[0].read_only)
    return stack[0]


def file_system(path: Path, device: str, *, read_only: bool = False) -> str:
    """The mountinfo line of a volume's file system, without what is long and says little."""
    found = mounted(path, read_only=read_only)
    expect(f"the device mounted at {path}", device, block_device(Path(found.source)))
    major, minor = found.device
    return f"{major}:{minor} {found.root} {path.name} {','.join(found.options)} - {found.fs_type}"


def raw_block(path: Path) -> str:
    """What a published raw block volume is, and how large."""
    name = block_device(path)
    # The bind protects the node, the device's own flag the data: the one without the other is none.
    mounted(path, read_only=is_read_only(name))
    access = "ro" if is_read_only(name) else "rw"
    return f"{path.name}: {name} {access}, {human(size_bytes(name))}"


def absent(path: Path) -> str:
    """Prove that nothing is mounted at a path, and that the path is gone."""
    expect(f"mounts at {path}", 0, len(mounts().at(str(path))))
    expect(f"{path} exists", False, os.path.lexists(path))
    return f"no mount, no {path.name}"


def df(path: Path) -> tuple[int, int, int]:
    """Bytes in all, used and available, by df's arithmetic."""
    found = os.statvfs(path)
    blocks = (found.f_blocks, found.f_blocks - found.f_bfree, found.f_bavail)
    total, used, available = (count * found.f_frsize for count in blocks)
    return total, used, available


def checksum(path: Path) -> str:
    """The sha256 of a file as the disk has it, not as the page cache has it."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()
