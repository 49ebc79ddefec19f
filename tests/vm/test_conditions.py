"""What is told of a volume's and the storage's health when disks fail, and after they were mended.

Carver is a process of its own here, on disks that fail when they are told to. Each reason must come
within the interval at which LVM is looked at, in every call that has to tell of it, with the cause,
and be gone after the repair. docs/health.md has the reasons; that a pool runs full is tried by
tests/vm/test_full_pool.py.
"""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from faults.bench import Bench
from faults.process import Process, Trial
from model import operations as do
from model.operations import MIB, Use
from real.disks import Disk
from real.host import RealHost, lab

from agent.csi.client import block, mounted
from mount import loop
from proto import csi_pb2 as csi

T = TypeVar("T")
EXTENT_BYTES = 4 * MIB
# What LVM said is at most a minute old while somebody asks (agent/engine/refresh.py), and a look at
# disks that do not answer takes twenty seconds.
INTERVAL_SECONDS = 100
# An answer that waits for no disk: for the kernel it may wait two seconds.
PROMPT_SECONDS = 6
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
    bench: Bench, host: RealHost, disks: tuple[str, ...], layout: str = ""
) -> Iterator[Trial]:
    classes = '[[classes]]\nname = "plain"\ngroup = "carver_conditions"\ndefault = true\n' + layout
    with (
        host.own_group("carver_conditions", disks) as extents,
        bench.served(host, "carver_conditions", extents, classes) as trial,
    ):
        yield trial


class Told:
    """A volume's health, as each of the calls tells it, and the storage's.

    The groups are looked at each second, by lists; without `look` as seldom as health itself asks.
    """

    def __init__(self, machine: Process, volume: str, path: str = "", *, look: bool = True) -> None:
        self._client = machine.client
        self._look = look
        self._id = machine.id_of(volume)
        self._path = path and machine.place(path)
        # What the workload does meanwhile: the kernel finds out by that.
        self.meanwhile: Callable[[], object] = lambda: None

    def now(self) -> dict[str, csi.VolumeHealth]:
        """By the call. None may wait for a disk."""
        listed = {one.volume_id: one for one in self._promptly(self._client.unhealthy)}
        node = self._client.node_health
        told = {
            "ControllerGetVolumeHealth": self._promptly(
                lambda: self._client.volume_health(self._id)
            ),
            "ControllerListVolumeHealth": listed.get(self._id, csi.VolumeHealth()),
            "NodeGetVolumeHealth": self._promptly(lambda: node(self._id)),
        }
        if self._path:
            told["with its path"] = self._promptly(lambda: node(self._id, self._path))
        for health in told.values():
            seen = [(one.status, one.reason) for one in health.health_statuses]
            assert len(set(seen)) == len(seen), health
        return told

    def storage(self) -> dict[str, str]:
        """The messages by their reasons."""
        found = self._promptly(self._client.storage_health)
        assert len({(one.status, one.reason, str(one.volume_capability)) for one in found}) == len(
            found
        )
        return {one.reason: one.message for one in found}

    def soon(self, reason: str, *words: str, storage: str = "") -> None:
        """Every call tells of one of these reasons (A|B), with all the words, within the interval.

        So does NodeGetStorageHealth of `storage`, if that is named.
        """

        def tells(health: csi.VolumeHealth) -> bool:
            found = [one for one in health.health_statuses if one.reason in reason.split("|")]
            return any(all(word in one.message for word in words) for one in found)

        self._until(
            lambda told, of_storage: (
                all(map(tells, told.values())) and (not storage or storage in of_storage)
            )
        )

    def well(self) -> None:
        """Nothing is wrong any more, within the interval, says every call."""
        self._until(
            lambda told, of_storage: (
                not of_storage and not any(one.health_statuses for one in told.values())
            )
        )

    def _until(self, is_so: Callable[[dict[str, csi.VolumeHealth], dict[str, str]], bool]) -> None:
        deadline = time.monotonic() + INTERVAL_SECONDS
        while not is_so(told := self.now(), of_storage := self.storage()):
            assert time.monotonic() < deadline, (told, of_storage)
            time.sleep(1)
            with suppress(OSError):
                self.meanwhile()
            if self._look:
                with suppress(grpc.RpcError):
                    self._client.volumes()

    def _promptly(self, ask: Callable[[], T]) -> T:
        began = time.monotonic()
        answer = ask()
        assert time.monotonic() - began < PROMPT_SECONDS
        return answer


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
        told.well()
        disks[0].fail()
        # A commit of the journal that fails is told of by what is written after it.
        told.meanwhile = lambda: write(target / "file")
        told.soon("FileSystemErrors|FileSystemReadOnly", "ext4", "kernel log")
        told.meanwhile = lambda: None
        disks[0].mend()
        for call in (
            do.Unpublish("a", "target"),
            do.Unstage("a", "staging"),
            do.Stage("a", "staging", EXT4),
            do.Publish("a", "staging", "target", EXT4),
        ):
            trial.make(call)
        told.well()
        write(target / "file")


def test_a_raw_volume_whose_disk_is_down(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        target = in_use(trial, BLOCK)
        told = Told(trial.machine, "a", "target")
        told.well()
        disks[0].flake()
        told.soon("DiskMissing", "vol-a", "partial", "is missing", storage="DiskMissing")
        disks[0].mend()
        told.well()
        write(target)


@pytest.mark.variation
def test_a_disk_that_is_detached_and_attached_again(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    loose = host.new_device(41 * EXTENT_BYTES)
    file = Path("/sys/block", Path(loose).name, "loop/backing_file").read_text().strip()
    with served(bench, host, (loose, disks[1].path)) as trial:
        trial.make(do.Create("a", 32 * MIB, 0, BLOCK))
        trial.machine.deactivate("a")
        trial.model.deactivate("a")
        told = Told(trial.machine, "a", look=False)
        told.well()
        loop.detach(host.kernel, loose)
        told.soon("DiskMissing", "vol-a", "is missing", "attach it again", storage="DiskMissing")
        host.kernel.loop_configure(loose, file, read_only=False, direct_io=False, name=file)
        told.well()
        trial.make(do.Stage("a", "staging", BLOCK))


def test_a_mirror_that_lost_a_disk(bench: Bench, host: RealHost, disks: tuple[Disk, Disk]) -> None:
    with served(bench, host, (disks[0].path, disks[1].path), 'layout = "raid1"\n') as trial:
        machine = trial.machine
        volume = machine.client.create("a", 16 * MIB)
        staging = machine.place("staging")
        machine.client.stage(volume, staging)
        told = Told(machine, "a", "staging")
        told.well()
        disks[1].fail()
        write(Path(staging, "file"))
        told.soon("RaidDegraded", "vol-a", "degraded", storage="DiskMissing")
        disks[1].mend()
        host.lvm("lvchange", "--refresh", "--", "carver_conditions/vol-a")
        told.well()
        machine.client.unstage(volume.volume_id, staging)
        Path(staging).rmdir()
        machine.client.delete(volume.volume_id)


def test_a_btrfs_whose_disk_failed_it(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        machine, capability = trial.machine, mounted("btrfs")
        volume = machine.client.create("a", 128 * MIB, capability)
        staging = machine.place("staging")
        machine.client.stage(volume, staging, capability)
        told = Told(machine, "a", "staging")
        told.well()
        disks[0].fail()
        with suppress(OSError):
            write(Path(staging, "file"))
        told.soon("MediumErrors", "errs", "btrfs device stats --reset")
        disks[0].mend()
        machine.client.unstage(volume.volume_id, staging)
        machine.client.stage(volume, staging, capability)
        subprocess.run(["btrfs", "device", "stats", "--reset", staging], check=True)
        told.well()
        machine.client.unstage(volume.volume_id, staging)
        Path(staging).rmdir()
        machine.client.delete(volume.volume_id)


def test_a_file_system_that_was_remounted_read_only(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        target, staging = in_use(trial, EXT4), trial.machine.place("staging")
        told = Told(trial.machine, "a", "target")
        told.well()
        subprocess.run(["mount", "-o", "remount,ro", staging], check=True)
        told.soon("FileSystemReadOnly", "turned read-only")
        subprocess.run(["mount", "-o", "remount,rw", staging], check=True)
        told.well()
        write(target / "file")


def test_a_device_that_was_left_suspended(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        target = in_use(trial, BLOCK)
        told = Told(trial.machine, "a", "target")
        told.well()
        host.suspend("carver_conditions", "vol-a")
        try:
            told.soon("DeviceSuspended", "vol-a", "dmsetup resume")
        finally:
            host.devices.resume("carver_conditions", "vol-a")
        told.well()
        write(target)


def test_a_snapshot_that_overflowed(bench: Bench, host: RealHost, disks: tuple[Disk, Disk]) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        client = trial.machine.client
        volume = client.create("a", 32 * MIB, block())
        snapshot = client.snapshot("s", volume.volume_id, {"size": "4Mi"})
        # Nothing is left by which its area could be extended.
        rest = client.create("rest", client.capacity().maximum_volume_size.value, block())
        told = Told(trial.machine, "a")
        told.well()
        device = host.devices.find("carver_conditions", "vol-a")
        assert device is not None
        with Path(device.path).open("r+b", buffering=0) as file:
            for _ in range(16):
                file.write(os.urandom(MIB))
            os.fsync(file.fileno())
        told.soon("SnapshotOverflowed", snapshot.snapshot_id, "delete it")
        client.delete_snapshot(snapshot.snapshot_id)
        told.well()
        for one in (volume, rest):
            client.delete(one.volume_id)


def test_a_group_that_is_gone_and_comes_back(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    loose = host.new_device(41 * EXTENT_BYTES)
    file = Path("/sys/block", Path(loose).name, "loop/backing_file").read_text().strip()
    with served(bench, host, (loose,)) as trial:
        trial.make(do.Create("a", 32 * MIB, 0, BLOCK))
        trial.machine.deactivate("a")
        trial.model.deactivate("a")
        told = Told(trial.machine, "a")
        told.well()
        loop.detach(host.kernel, loose)
        try:
            told.soon("GroupMissing", "carver_conditions", storage="GroupMissing")
        finally:
            host.kernel.loop_configure(loose, file, read_only=False, direct_io=False, name=file)
        told.well()
        trial.make(do.Stage("a", "staging", BLOCK))


@pytest.mark.variation
def test_a_disk_that_hangs_is_told_of_and_nobody_waits_for_it(
    bench: Bench, host: RealHost, disks: tuple[Disk, Disk]
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        in_use(trial, BLOCK)
        told = Told(trial.machine, "a", "target", look=False)
        told.well()
        with disks[0].hanging():
            # `now` and `storage` see that each answer comes at once.
            deadline = time.monotonic() + INTERVAL_SECONDS
            while "DiskNotResponding" not in told.storage():
                told.now()
                assert time.monotonic() < deadline, told.storage()
                time.sleep(1)
        told.well()
