"""The machine itself: real programs, real LVM on loop devices, real mounts. As root, in the lab VM."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lvm import groups, names
from lvm.command import Programs, Result
from lvm.devices import Devices, KernelDevices
from lvm.lvm2 import Lvm
from mount import loop, table
from mount.syscalls import Kernel

_EXTENT_BYTES = 4 << 20
# lvm2 keeps its metadata in the first megabyte of a disk.
_METADATA_BYTES = 1 << 20
_serial = itertools.count()


class RealHost:
    """What `agent.server.Host` is, with disks and groups of its own; the machine's are not seen."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.commands: list[tuple[str, ...]] = []
        # Asked before each command: may answer in its place, wait, or raise as a kill does.
        self.intercept: Callable[[Sequence[str]], Result | None] = lambda _words: None
        self._programs = Programs()
        self.kernel = Kernel()
        self.devices: Devices = KernelDevices()
        self._attached: list[str] = []
        self._groups: list[str] = []

    @property
    def lvm(self) -> Lvm:
        """lvm2, confined to the disks of this host's groups."""
        # A device that is not there keeps lvm2 from looking at all others while there is none yet.
        return Lvm(self.run, tuple(self._attached) or ("/dev/null",))

    def run(self, *words: str) -> Result:
        """The seam `lvm.command.Run`."""
        if (answer := self.intercept(words)) is not None:
            return answer
        self.commands.append(words)
        return self._programs(*words)

    def new_device(self, size_bytes: int) -> str:
        """A blank loop device."""
        file = self.directory.parent / f"disk{len(self._attached)}"
        with file.open("wb") as disk:
            disk.truncate(size_bytes)
        self._attached.append(loop.attach(self.kernel, str(file)))
        return self._attached[-1]

    def new_group(self, *disk_extents: int) -> str:
        """A group with so many extents of 4 MiB on each of its disks."""
        name = f"carver_test_{os.getpid()}_{next(_serial)}"
        disks = [self.new_device(_METADATA_BYTES + one * _EXTENT_BYTES) for one in disk_extents]
        groups.create(self.lvm, name, disks, {})
        self._groups.append(name)
        self.commands.clear()
        return name

    def deactivate(self, group: str, name: str) -> None:
        """Take a volume's device away, as a reboot or an operator does."""
        self.lvm("lvchange", "--activate", "n", "--", f"{group}/{name}")

    def write(self, device: str, fs_type: str) -> None:
        """Put a file system on a device, behind Carver's back."""
        ended = self._programs(f"mkfs.{fs_type}", "-q", "--", device)
        assert ended.exit_code == 0, ended.stderr

    def erase(self, device: str) -> None:
        """Overwrite what a device holds, behind Carver's back."""
        self.kernel.zero_out(device, 0, self.kernel.device_size_bytes(device))

    def clean_up(self) -> None:
        """Leave the machine as it was: no mount, group or loop device of this host's stays."""
        own = str(self.directory.parent)
        for mount in reversed(table.read(self.kernel).mounts):
            if mount.path.startswith(own):
                self.kernel.unmount(mount.path)
        for group in self._groups:
            for node in Path("/dev/mapper").glob(f"{names.escaped(group)}-*"):
                number = self.kernel.device_number(str(node))
                for device in loop.over(self.kernel, number):
                    loop.detach(self.kernel, device)
            self.lvm("vgremove", "--force", "--force", "--yes", "--", group)
        for device in self._attached:
            with contextlib.suppress(OSError):
                loop.detach(self.kernel, device)


@contextmanager
def real_host(directory: Path) -> Iterator[RealHost]:
    """A host that is cleaned up afterwards, whatever happened."""
    assert os.geteuid() == 0, "the real tier needs root"
    host = RealHost(directory)
    try:
        yield host
    finally:
        host.clean_up()
