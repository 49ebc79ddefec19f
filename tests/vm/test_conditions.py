"""What is told of a volume's and the storage's health when disks fail, and after they were mended.

Carver is a process of its own here, on disks that fail when they are told to. Each reason must come
within the interval at which LVM is looked at, in every call that has to tell of it, with the cause,
and be gone after the repair. docs/troubleshooting.md has the reasons; the rarer ones are tried by
test_reasons.py, that a pool runs full by test_full_pool.py.
"""

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from faults.bench import Bench
from model import operations as do
from model.operations import MIB
from real.disks import Disk
from real.host import RealHost
from vm.told import BLOCK, EXT4, EXTENT_BYTES, GROUP, INTERVAL_SECONDS, Told, in_use, served, write

from agent.csi.client import mounted
from mount import loop

Disks = tuple[Disk, Disk, Disk]


def test_a_file_system_whose_disk_has_errors(bench: Bench, host: RealHost, disks: Disks) -> None:
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
        # Kubelet stages nothing anew where the next pod comes soon; it has one that was checked.
        for call in (do.Unpublish("a", "target"), do.Publish("a", "staging", "target", EXT4)):
            trial.make(call)
        told.well()
        write(target / "file")


def test_a_raw_volume_whose_disk_is_down(bench: Bench, host: RealHost, disks: Disks) -> None:
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
    bench: Bench, host: RealHost, disks: Disks
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


def test_a_mirror_that_lost_a_disk(bench: Bench, host: RealHost, disks: Disks) -> None:
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
        host.lvm("lvchange", "--refresh", "--", f"{GROUP}/vol-a")
        told.well()
        machine.client.unstage(volume.volume_id, staging)
        Path(staging).rmdir()
        machine.client.delete(volume.volume_id)


def test_a_btrfs_whose_disk_failed_it(bench: Bench, host: RealHost, disks: Disks) -> None:
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
    bench: Bench, host: RealHost, disks: Disks
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


def test_a_group_that_is_gone_and_comes_back(bench: Bench, host: RealHost, disks: Disks) -> None:
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
            told.soon("GroupMissing", GROUP, storage="GroupMissing")
        finally:
            host.kernel.loop_configure(loose, file, read_only=False, direct_io=False, name=file)
        told.well()
        trial.make(do.Stage("a", "staging", BLOCK))


@pytest.mark.variation
def test_a_disk_that_hangs_is_told_of_and_nobody_waits_for_it(
    bench: Bench, host: RealHost, disks: Disks
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
