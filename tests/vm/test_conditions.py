"""What a volume's condition says when its disks fail, and after they were mended.

Carver is a process of its own here, on disks that fail when they are told to. Each finding must
come within the interval at which LVM is looked at, in every call that tells a condition, and must
name the cause.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from faults.bench import Bench
from faults.process import Process, Trial
from model import operations as do
from model.operations import MIB, Use
from real.disks import Disk
from real.host import RealHost, lab

from mount import loop
from proto import csi_pb2 as csi

EXTENT_BYTES = 4 * MIB
# A report is at most a minute old (agent/engine/inventory.py), and is read in moments.
INTERVAL_SECONDS = 75
EXT4 = Use("mount", do.WRITER, "ext4")
BLOCK = Use("block", do.WRITER)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with lab(tmp_path_factory.mktemp("conditions")) as shared:
        yield Bench(shared, random.Random(1), cut=True)


@pytest.fixture
def host(bench: Bench) -> Iterator[RealHost]:
    with bench.host() as made:
        yield made


@pytest.fixture
def disks(bench: Bench) -> Iterator[tuple[Disk, Disk]]:
    """Two disks; volumes lie on the first, as long as there is room."""
    with (
        Disk.on(bench.shared.new_device(41 * EXTENT_BYTES)) as first,
        Disk.on(bench.shared.new_device(41 * EXTENT_BYTES)) as second,
    ):
        yield first, second


@contextmanager
def served(
    bench: Bench, host: RealHost, disks: tuple[str, str], layout: str = ""
) -> Iterator[Trial]:
    classes = '[[classes]]\nname = "plain"\ngroup = "carver_conditions"\ndefault = true\n' + layout
    with (
        host.own_group("carver_conditions", disks) as extents,
        bench.served(host, "carver_conditions", extents, classes) as trial,
    ):
        yield trial


class Told:
    """A volume's condition, as each of the calls tells it."""

    def __init__(self, machine: Process, volume: str, path: str = "") -> None:
        self._machine = machine
        self._id = machine.id_of(volume)
        self._path = path and machine.place(path)

    def now(self) -> dict[str, csi.VolumeCondition]:
        client = self._machine.client
        got = client.controller.ControllerGetVolume(
            csi.ControllerGetVolumeRequest(volume_id=self._id)
        )
        listed = client.controller.ListVolumes(csi.ListVolumesRequest())
        told = {
            "ControllerGetVolume": got.status.volume_condition,
            "ListVolumes": next(
                one.status.volume_condition
                for one in listed.entries
                if one.volume.volume_id == self._id
            ),
        }
        if self._path:
            stats = client.stats(self._id, self._path)
            told["NodeGetVolumeStats"] = stats.volume_condition
        return told

    def soon(self, *words: str) -> None:
        """Every call tells of it within the interval; without words, that nothing is wrong."""
        deadline = time.monotonic() + INTERVAL_SECONDS
        while True:
            told = self.now()
            if all(
                one.abnormal == bool(words) and all(word in one.message for word in words)
                for one in told.values()
            ):
                return
            assert time.monotonic() < deadline, told
            time.sleep(1)


def in_use(trial: Trial, use: Use) -> Path:
    trial.make(do.Create("a", 32 * MIB, 0, use))
    trial.make(do.Stage("a", "staging", use))
    trial.make(do.Publish("a", "staging", "target", use))
    return Path(trial.machine.place("target"))


def write(path: Path) -> None:
    with path.open("r+b" if path.is_block_device() else "wb", buffering=0) as file:
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())


def test_a_file_system_whose_disk_has_errors(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        target = in_use(trial, EXT4)
        told = Told(trial.machine, "a", "target")
        told.soon()
        disks[0].fail()
        with suppress(OSError):
            write(target / "file")
        told.soon("ext4", "kernel log")
        disks[0].mend()
        for call in (
            do.Unpublish("a", "target"),
            do.Unstage("a", "staging"),
            do.Stage("a", "staging", EXT4),
            do.Publish("a", "staging", "target", EXT4),
        ):
            trial.make(call)
        told.soon()
        write(target / "file")


def test_a_raw_volume_whose_disk_is_down(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        target = in_use(trial, BLOCK)
        told = Told(trial.machine, "a", "target")
        told.soon()
        disks[0].flake()
        told.soon("vol-a", "partial", "is missing")
        disks[0].mend()
        told.soon()
        write(target)


def test_a_disk_that_is_detached_and_attached_again(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    loose = host.new_device(41 * EXTENT_BYTES)
    file = Path("/sys/block", Path(loose).name, "loop/backing_file").read_text().strip()
    with served(bench, host, (loose, disks[1].path)) as trial:
        trial.make(do.Create("a", 32 * MIB, 0, BLOCK))
        trial.machine.deactivate("a")
        trial.model.deactivate("a")
        told = Told(trial.machine, "a")
        told.soon()
        loop.detach(host.kernel, loose)
        told.soon("vol-a", "partial", "is missing", "attach it again")
        host.kernel.loop_configure(loose, file, read_only=False, direct_io=False, name=file)
        told.soon()
        trial.make(do.Stage("a", "staging", BLOCK))


def test_a_mirror_that_lost_a_disk(bench: Bench, host: RealHost, disks: tuple[Disk, Disk]) -> None:
    with served(bench, host, (disks[0].path, disks[1].path), 'layout = "raid1"\n') as trial:
        machine = trial.machine
        volume = machine.client.create("a", 16 * MIB)
        staging = machine.place("staging")
        machine.client.stage(volume, staging)
        told = Told(machine, "a", "staging")
        told.soon()
        disks[1].fail()
        write(Path(staging, "file"))
        told.soon("vol-a", "degraded")
        disks[1].mend()
        host.lvm("lvchange", "--refresh", "--", "carver_conditions/vol-a")
        told.soon()
        machine.client.unstage(volume.volume_id, staging)
        Path(staging).rmdir()
        machine.client.delete(volume.volume_id)
