"""What is reported of the health of volumes and storage when disks fail, and after they are mended.

Carver is a process of its own here, on disks that fail on request. Each reason must come within the
interval at which LVM is read, in every call that has to report it, with the cause, and be gone
after the repair. docs/troubleshooting.md has the reasons; test_reasons.py tries the rarer ones, and
test_full_pool.py a pool that runs full.
"""

import subprocess
import time
from contextlib import suppress

import pytest
from faults.bench import Bench
from model import operations as do
from model.operations import MIB
from real.host import RealHost
from vm.reported import (
    BLOCK,
    EXT4,
    EXTENT_BYTES,
    GROUP,
    INTERVAL_SECONDS,
    SIZE,
    Disks,
    Mounted,
    Reported,
    detached,
    in_use,
    served,
    write,
)


def test_a_file_system_whose_disk_has_errors(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        target, reported = in_use(trial, EXT4)
        disks[0].fail()
        # A failed commit of the journal is noticed by the next write.
        reported.meanwhile = lambda: write(target / "file")
        reported.soon("FileSystemErrors|FileSystemReadOnly", "ext4", "kernel log")
        reported.meanwhile = lambda: None
        disks[0].mend()
        # Kubelet does not stage again for a pod that follows soon; it finds a checked file system.
        for call in (do.Unpublish("a", "target"), do.Publish("a", "staging", "target", EXT4)):
            trial.make(call)
        reported.well()
        write(target / "file")


@pytest.mark.variation
def test_a_raw_volume_whose_disk_is_down(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        target, reported = in_use(trial, BLOCK)
        disks[0].flake()
        reported.soon("DiskMissing", "vol-a", "partial", "is missing", storage="DiskMissing")
        disks[0].mend()
        reported.well()
        write(target)


@pytest.mark.variation
def test_a_mirror_that_lost_a_disk(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, (disks[0].path, disks[1].path), 'layout = "raid1"\n') as trial:
        volume = Mounted(trial, 16 * MIB, "ext4")
        disks[1].fail()
        write(volume.staging / "file")
        volume.reported.soon("RaidDegraded", "vol-a", "degraded", storage="DiskMissing")
        disks[1].mend()
        host.lvm("lvchange", "--refresh", "--", f"{GROUP}/vol-a")
        volume.reported.well()
        volume.delete()


@pytest.mark.variation
def test_a_btrfs_whose_disk_failed(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        volume = Mounted(trial, 128 * MIB, "btrfs")
        disks[0].fail()
        with suppress(OSError):
            write(volume.staging / "file")
        volume.reported.soon("MediumErrors", "errs", "btrfs device stats --reset")
        disks[0].mend()
        volume.end()
        volume.begin()
        subprocess.run(["btrfs", "device", "stats", "--reset", volume.staging], check=True)
        volume.reported.well()
        volume.delete()


def test_a_file_system_that_was_remounted_read_only(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        target, reported = in_use(trial, EXT4)
        remount = ["mount", trial.machine.place("staging"), "-o"]
        subprocess.run([*remount, "remount,ro"], check=True)
        reported.soon("FileSystemReadOnly", "turned read-only")
        subprocess.run([*remount, "remount,rw"], check=True)
        reported.well()
        write(target / "file")


def test_a_group_that_is_gone_and_comes_back(bench: Bench, host: RealHost) -> None:
    loose = host.new_device(41 * EXTENT_BYTES)
    with served(bench, host, (loose,)) as trial:
        trial.make(do.Create("a", SIZE, 0, BLOCK))
        trial.machine.deactivate("a")
        trial.model.deactivate("a")
        reported = Reported(trial.machine, "a")
        reported.well()
        with detached(host, loose):
            reported.soon("GroupMissing", GROUP, storage="GroupMissing")
        reported.well()
        trial.make(do.Stage("a", "staging", BLOCK))


@pytest.mark.variation
def test_a_disk_that_hangs_is_reported_and_delays_no_call(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    with served(bench, host, (disks[0].path, disks[1].path)) as trial:
        in_use(trial, BLOCK)
        reported = Reported(trial.machine, "a", "target", look=False)
        reported.well()
        with disks[0].hanging():
            # `now` and `storage` see that each answer comes at once.
            deadline = time.monotonic() + INTERVAL_SECONDS
            while "DiskNotResponding" not in reported.storage():
                reported.now()
                assert time.monotonic() < deadline, reported.storage()
                time.sleep(1)
        reported.well()
