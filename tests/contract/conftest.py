"""The host that contract tests act on: in memory, or (CARVER_REAL=1, as root) the real one.

Temporary, until the lead's takes its place.
"""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fakes import filesystems
from fakes.devices import FakeDevices
from fakes.kernel import FakeKernel

from mount import loop
from mount.filesystem import Result
from mount.syscalls import Kernel


@dataclass
class FakeHost:
    """Everything in memory but the target paths."""

    directory: Path
    devices: FakeDevices = field(default_factory=FakeDevices)

    def __post_init__(self) -> None:
        self.kernel = FakeKernel(self.devices)

    def run(self, *words: str) -> Result:
        return filesystems.PROGRAMS[words[0]](words, self.devices)

    def new_device(self, size_bytes: int) -> str:
        number = sum(1 for _ in self.devices)
        return self.devices.add(f"/dev/carver-test/{number}", size_bytes).path


@dataclass
class RealHost:
    """This machine's kernel and programs, with loop devices of its own."""

    directory: Path
    kernel: Kernel = field(default_factory=Kernel)
    attached: list[str] = field(default_factory=list)

    def run(self, *words: str) -> Result:
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return filesystems.Result(done.returncode, done.stdout, done.stderr)

    def new_device(self, size_bytes: int) -> str:
        file = self.directory.parent / f"disk{len(self.attached)}"
        with file.open("wb") as disk:
            disk.truncate(size_bytes)
        self.attached.append(loop.attach(self.kernel, str(file)))
        return self.attached[-1]


@pytest.fixture(params=["fake", "real"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeHost | RealHost]:
    directory = tmp_path / "mounts"
    directory.mkdir()
    if request.param == "fake":
        yield FakeHost(directory)
        return
    if not os.environ.get("CARVER_REAL"):
        pytest.skip("the real host is asked for with CARVER_REAL=1")
    real = RealHost(directory)
    try:
        yield real
    finally:
        for mount in sorted(directory.iterdir()):
            while subprocess.run(["umount", "-R", mount], capture_output=True).returncode == 0:
                pass
        for device in real.attached:
            loop.detach(real.kernel, device)
