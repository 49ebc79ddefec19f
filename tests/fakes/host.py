"""A whole machine in memory: lvm2, programs, devices, kernel, all on one state."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fakes import filesystems
from fakes.devices import BLOCK_BYTES, FakeDevices
from fakes.kernel import FakeKernel
from fakes.lvm import FakeLvm, FakePool

from lvm.command import Result
from lvm.devices import Devices
from lvm.lvm2 import Lvm
from mount.filesystem import Signature
from mount.syscalls import Kernel

_DISK_MAJOR = 8


class FakeHost:
    """What `agent.host.Host` is on a real machine, and the state behind it for tests to see."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.block = FakeDevices()
        self.lvm2 = FakeLvm(self.block)
        self.lvm2_program: Callable[[Sequence[str]], Result] = self.lvm2
        self.kernel: Kernel = FakeKernel(self.block)
        self.devices: Devices = self.lvm2
        self.commands: list[tuple[str, ...]] = []
        self.lvm = Lvm(self.run, settings=())
        # Asked before each command: may answer in its place, wait, or raise as a kill does.
        self.intercept: Callable[[Sequence[str]], Result | None] = lambda _words: None

    def run(self, *words: str) -> Result:
        """The seam `lvm.command.Run`."""
        if (answer := self.intercept(words)) is not None:
            return answer
        self.commands.append(words)
        if words[0] == "lvm":
            return self.lvm2_program(words)
        program = filesystems.PROGRAMS.get(words[0])
        assert program is not None, f"an unfaked command: {' '.join(words)}"
        ended = program(words, self.block)
        return Result(ended.exit_code, ended.stdout, ended.stderr)

    def new_device(self, size_bytes: int) -> str:
        """A blank block device."""
        number = sum(1 for _ in self.block)
        return self.block.add(f"/dev/fake{number}", size_bytes, major=_DISK_MAJOR).path

    def new_group(self, *disk_extents: int) -> str:
        """A group with so many extents of 4 MiB on each of its disks."""
        name = f"group{len(self.lvm2.groups)}"
        self.lvm2.add_group(name, disk_extents)
        return name

    def deactivate(self, group: str, name: str) -> None:
        """Take a volume's device away, as a reboot or an operator does."""
        self.lvm2.deactivate(group, name)

    def suspend(self, group: str, name: str) -> None:
        """Have whoever uses a volume wait, as lvm2 does while it changes the volume."""
        self.lvm2.suspend(group, name)

    def is_suspended(self, group: str, name: str) -> bool:
        """Whether whoever uses a volume waits."""
        return self.lvm2.is_suspended(group, name)

    def write(self, device: str, fs_type: str) -> None:
        """Put a file system on a device, behind Carver's back."""
        ended = filesystems.mkfs((f"mkfs.{fs_type}", "-q", "--", device), self.block)
        assert ended.exit_code == 0, ended.stderr

    def write_bytes(self, device: str, offset_bytes: int, data: bytes) -> None:
        """Write whole blocks of data on a device, as the program does that has it."""
        self.block.get(device).write(offset_bytes, data)
        self.lvm2.wrote(device, len(data))

    def read_bytes(self, device: str, offset_bytes: int, length_bytes: int) -> bytes:
        """Read whole blocks of data from a device."""
        return self.block.get(device).media.read(offset_bytes, length_bytes)

    def written_bytes(self, device: str) -> int:
        """How much of a device was ever written."""
        return len(self.block.get(device).media.blocks) * BLOCK_BYTES

    def fill_metadata(self, group: str, pool: str, blocks: int) -> None:
        """Have so many more blocks of an active pool's metadata used."""
        found = self.lvm2.groups[group].volumes[pool]
        assert isinstance(found, FakePool)
        found.used_metadata_blocks += blocks

    def label(self, device: str) -> None:
        """Make a device lvm2's, in no group: what vgcreate leaves when it is killed half-way."""
        self.block.get(device).contents = Signature("LVM2_member", "raid", "label")

    def partition(self, device: str) -> None:
        """Put a partition table on a device; the kernel has not read it."""
        self.block.get(device).contents = Signature("dos", "partition table", "12345678")

    def damage(self, device: str) -> None:
        """Break the ext4 on a device so that no program mends it unasked."""
        self.block.get(device).media.damage = "much"

    def erase(self, device: str) -> None:
        """Overwrite what a device holds, behind Carver's back."""
        self.block.get(device).contents = None
