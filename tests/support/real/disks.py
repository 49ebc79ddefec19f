"""Disks that fail on demand: a device-mapper device over another. In the lab VM."""

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mount import loop
from mount.kernel import Kernel

_SECTOR_BYTES = 512
_PREFIX = "carver-disk"
_serial = itertools.count()


def let_go_of_left_behind() -> None:
    """Have no disk hang that a run left suspended when it was ended: lvm2 would wait for it."""
    for node in Path("/dev/mapper").glob(f"{_PREFIX}-*"):
        maker = node.name.split("-")[2]
        if not Path("/proc", maker).exists():
            # Another run may have done so; an error stands in for what somebody has open yet.
            for words in (("resume",), ("remove", "--force")):
                subprocess.run(["dmsetup", *words, node.name], check=False, capture_output=True)


@dataclass(frozen=True)
class Disk:
    """A block device whose device-mapper table can be changed while it is in use."""

    name: str
    under: str
    sectors: int

    @property
    def path(self) -> str:
        return f"/dev/mapper/{self.name}"

    @classmethod
    @contextmanager
    def on(cls, under: str) -> Iterator["Disk"]:
        """A disk that works, over a loop device, which goes with it."""
        sectors = Kernel().device_size_bytes(under) // _SECTOR_BYTES
        disk = cls(f"{_PREFIX}-{os.getpid()}-{next(_serial)}", under, sectors)
        _dmsetup("create", disk.name, "--table", disk._table("linear"))
        try:
            yield disk
        finally:
            disk.mend()
            _dmsetup("remove", "--retry", disk.name)
            loop.detach(Kernel(), under)

    def fail(self) -> None:
        """Every read and write is an I/O error from now on (dm-error)."""
        self._swap(f"0 {self.sectors} error")

    def flake(self) -> None:
        """The same by dm-flakey: a disk that is down for as long as anybody looks."""
        self._swap(f"{self._table('flakey')} 0 3600")

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Inside, reads and writes wait."""
        _dmsetup("suspend", "--noflush", "--nolockfs", self.name)
        try:
            yield
        finally:
            _dmsetup("resume", self.name)

    def mend(self) -> None:
        self._swap(self._table("linear"))

    def _table(self, target: str) -> str:
        return f"0 {self.sectors} {target} {self.under} 0"

    def _swap(self, table: str) -> None:
        # Without a flush and a freeze: a disk that fails does not wait for either.
        _dmsetup("suspend", "--noflush", "--nolockfs", self.name)
        _dmsetup("load", self.name, "--table", table)
        _dmsetup("resume", self.name)


def _dmsetup(*words: str) -> None:
    subprocess.run(["dmsetup", *words], check=True, capture_output=True)
