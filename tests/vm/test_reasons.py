"""The rarer reasons of docs/troubleshooting.md: provoked, reported by each call, gone after.

As in test_conditions, on disks that fail on request, and by what lvm2, the kernel or the node's
files are made to say. tests/fast/operations/test_health_reasons.py sees that none is
forgotten.
"""

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from faults.bench import Bench
from faults.process import Trial
from model.operations import MIB
from real.disks import Disk
from real.host import RealHost
from vm.reported import (
    EXTENT_BYTES,
    GROUP,
    INTERVAL_SECONDS,
    SIZE,
    Disks,
    Mounted,
    Raw,
    Reported,
    idle,
    served,
    write,
)

from agent.csi.client import block
from lvm import names, report
from proto import csi_pb2 as csi

RAID1 = 'layout = "raid1"\n'
THIN = 'layout = "thin"\n'
SLOWLY = {"minimumRecoveryRate": "64KiB", "maximumRecoveryRate": "128KiB"}
QUICKLY = {"minimumRecoveryRate": "100MiB", "maximumRecoveryRate": "200MiB"}

pytestmark = pytest.mark.variation


class Watched(Raw):
    """A raw block volume in use, which is healthy."""

    def __init__(self, trial: Trial, host: RealHost) -> None:
        super().__init__(trial)
        self._host = host
        self.reported = Reported(trial.machine, "a", "target-a")
        self.reported.well()

    def begin_anew(self, *pools: str) -> None:
        """Out of use and into use; its dm devices, and those of these pools, are made anew."""
        self.end()
        for name in ("vol-a", *pools):
            self._host.deactivate(GROUP, name)
        self.begin()


def paths(disks: Disks) -> tuple[str, ...]:
    return tuple(one.path for one in disks)


def under(host: RealHost, disks: Disks, logical: str) -> Disk:
    """The disk that a logical volume, perhaps a hidden one, lies on."""
    devices = host.lvm("lvs", "--all", "--noheadings", "--options", "devices", "--", logical)
    [found] = [one for one in disks if any(f"{name}(" in devices for name in (one.path, real(one)))]
    return found


def real(disk: Disk) -> str:
    """The disk's own node: lvm2 may call it by that."""
    return os.path.realpath(disk.path)


def until(is_so: Callable[[], bool], seen: Callable[[], object]) -> None:
    """Wait for it, no longer than the report is old at most."""
    deadline = time.monotonic() + INTERVAL_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, seen()
        time.sleep(1)


# Copies


def test_a_mirror_that_is_brought_in_sync_and_one_whose_copies_differ(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    with served(bench, host, paths(disks), RAID1) as trial:
        client = trial.machine.client
        volume = client.create("a", SIZE, block(), mutable=SLOWLY)
        reported = Reported(trial.machine, "a")
        reported.soon("RaidResyncing", "vol-a", "% done")
        client.modify(volume.volume_id, QUICKLY)
        reported.well()

        image = f"/dev/mapper/{names.device(GROUP, 'vol-a_rimage_1')}"
        host.write_bytes(image, SIZE // 2, os.urandom(64 * 1024))
        host.lvm("lvchange", "--syncaction", "check", "--", f"{GROUP}/vol-a")
        reported.soon("RaidMismatches", "vol-a", "--syncaction repair")
        host.lvm("lvchange", "--syncaction", "repair", "--", f"{GROUP}/vol-a")
        reported.well()
        client.delete(volume.volume_id)


def test_a_mirror_that_lost_all_its_disks(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks), RAID1) as trial, idle(trial) as reported:
        of_group = report.read(host.lvm).group(GROUP).disks
        used = {one.name for one in of_group if one.allocated_extents}
        host.deactivate(GROUP, "vol-a")
        lost = [one for one in disks if {one.path, real(one)} & used]
        assert len(lost) == 2
        for disk in lost:
            disk.flake()
        reported.soon("RaidFailed", "vol-a", "partial", storage="DiskMissing")
        for disk in lost:
            disk.mend()


# Caches


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [("cache", "CacheFailing", "lvconvert --uncache"), ("writecache", "WriteCacheErrors", "dmesg")],
)
def test_a_cache_whose_disk_fails(
    bench: Bench, host: RealHost, disks: Disks, kind: str, reason: str, words: str
) -> None:
    slow, fast, _ = disks
    classes = f'[[classes]]\nname = "plain"\ngroup = "{GROUP}"\ndefault = true\ncache = "{kind}"\n'
    with host.own_group(GROUP, [slow.path, fast.path]) as extents:
        host.lvm("pvchange", "--addtag", report.FAST, "--", fast.path)
        with bench.served(host, GROUP, extents // 2, classes) as trial:
            raw = Watched(trial, host)
            fast.fail()
            # A flush is what has the cache write its own metadata.
            raw.reported.meanwhile = lambda: write(raw.target)
            raw.reported.soon(reason, words)
            raw.reported.meanwhile = lambda: None
            fast.mend()
            if kind == "cache":
                # What it had not written of its metadata yet is lost, and it is read no more.
                host.lvm("lvconvert", "--yes", "--uncache", "--", f"{GROUP}/vol-a")
            else:
                raw.begin_anew()
            raw.reported.well()
            write(raw.target)
            raw.delete()


# Thin pools


def test_a_pool_that_takes_no_writes(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks), THIN) as trial:
        raw = Watched(trial, host)
        pool = f"{names.device(GROUP, 'pool-plain')}-tpool"
        with read_only(pool):
            raw.reported.soon("PoolReadOnly", "no more writes", storage="PoolReadOnly")
        raw.reported.well()
        write(raw.target)
        raw.delete()


@contextmanager
def read_only(pool: str) -> Iterator[None]:
    """Inside, the kernel changes nothing of a thin pool's metadata (thin-provisioning.rst)."""

    def load(table: str) -> None:
        dmsetup("load", pool, "--table", table)
        dmsetup("resume", pool)

    table = dmsetup("table", pool)
    words = table.split()
    # Behind the sixth field: how many options there are, and these.
    options = [*words[8:], "read_only"]
    load(" ".join([*words[:7], str(len(options)), *options]))
    try:
        yield
    finally:
        load(table)


def dmsetup(*words: str) -> str:
    done = subprocess.run(["dmsetup", *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_pool_whose_disk_failed(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks), THIN) as trial:
        raw = Watched(trial, host)
        disk = under(host, disks, f"{GROUP}/pool-plain_tmeta")
        disk.fail()
        raw.reported.meanwhile = lambda: write(raw.target)
        raw.reported.soon("PoolDataLost", "failed", storage="PoolDataLost")
        raw.reported.meanwhile = lambda: None
        disk.mend()
        raw.begin_anew("pool-plain")
        raw.reported.well()
        write(raw.target)
        raw.delete()


def test_a_volume_of_which_the_kernel_does_not_answer(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    with served(bench, host, paths(disks), THIN) as trial:
        raw = Watched(trial, host)
        disk = under(host, disks, f"{GROUP}/pool-plain_tmeta")
        # No list is asked for, which a dead disk delays; only health.
        reported = Reported(trial.machine, "a", "target-a", look=False)
        # While it commits its metadata the pool answers no status.
        writer = threading.Thread(target=write, args=[raw.target])
        with disk.hanging():
            writer.start()
            reason = "DeviceNotResponding"
            reported.soon(reason, "vol-a", "dmesg", storage=reason)
        writer.join()
        reported.well()
        raw.delete()


# What is in use


def test_a_published_device_that_went_away(bench: Bench, host: RealHost, disks: Disks) -> None:
    def reasons() -> dict[str, set[str]]:
        answers = raw.reported.now().items()
        return {call: {one.reason for one in health.health_statuses} for call, health in answers}

    with served(bench, host, paths(disks)) as trial:
        raw = Watched(trial, host)
        host.deactivate(GROUP, "vol-a")
        # The volume itself is healthy; only a call with the path reports that.
        until(lambda: reasons().pop("with its path") == {"DeviceGone"}, reasons)
        assert not any(found for call, found in reasons().items() if call != "with its path")
        raw.end()
        raw.begin()
        raw.reported.well()
        write(raw.target)
        raw.delete()


def test_a_file_system_that_was_shut_down(bench: Bench, host: RealHost) -> None:
    with (
        Disk.on(bench.shared.new_device(100 * EXTENT_BYTES)) as disk,
        served(bench, host, (disk.path,)) as trial,
    ):
        volume = Mounted(trial, 300 * MIB, "xfs")
        subprocess.run(["xfs_io", "-x", "-c", "shutdown", volume.staging], check=True)
        volume.reported.soon("FileSystemNotResponding", "xfs", "kernel log")
        volume.end()
        volume.begin()
        volume.reported.well()
        volume.delete()


# Groups, lvm2, the node


def test_a_copy_of_a_group_s_disk(bench: Bench, host: RealHost) -> None:
    disk, twin = (host.new_device(41 * EXTENT_BYTES) for _ in range(2))
    with served(bench, host, (disk,)) as trial, idle(trial) as reported:
        # lvm2's label, and its metadata.
        host.write_bytes(twin, 0, host.read_bytes(disk, 0, MIB))
        try:
            until(lambda: twin in reported.storage().get("DiskIgnored", ""), reported.storage)
            # The volume itself is as it was.
            assert not any(one.health_statuses for one in reported.now().values())
        finally:
            host.write_bytes(twin, 0, bytes(MIB))


def test_a_group_that_is_exported(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks)) as trial, idle(trial) as reported:
        host.deactivate(GROUP, "vol-a")
        host.lvm("vgexport", "--", GROUP)
        try:
            reported.soon("GroupRefused", GROUP, storage="GroupRefused")
        finally:
            host.lvm("vgimport", "--", GROUP)


def test_an_lvm2_that_gives_no_report(bench: Bench, host: RealHost, disks: Disks) -> None:
    def is_silent() -> bool:
        # A list reads the group, and waits for a few seconds only.
        with suppress(grpc.RpcError):
            trial.machine.client.volumes()
        return "LvmNotAnswering" in reported.storage()

    with (
        served(bench, host, paths(disks)) as trial,
        idle(trial) as reported,
        Path("/run/lock/lvm", f"V_{GROUP}").open("a") as lock,
    ):
        # As lvm2 locks it while it changes a group, whose metadata differ then.
        fcntl.flock(lock, fcntl.LOCK_EX)
        host.lvm("vgchange", "--nolocking", "--addtag", "test", "--", GROUP)
        until(is_silent, reported.storage)
        # The volume itself is as it was.
        assert not any(one.health_statuses for one in reported.now().values())


def test_what_the_node_lacks(bench: Bench, host: RealHost, disks: Disks) -> None:
    def of_use(kind: str) -> dict[str, str]:
        """The reasons, and messages, that concern one kind of use alone."""
        found: list[csi.NodeGetStorageHealthResponse.StorageBackendHealth]
        found = trial.machine.client.storage_health()
        only = [one for one in found if one.volume_capability.WhichOneof("access_type") == kind]
        return {one.reason: one.message for one in only}

    with served(bench, host, paths(disks)) as trial:
        assert of_use("mount") == of_use("block") == {}
        with covered(os.path.realpath("/usr/sbin/mkfs.ext4")):
            assert "e2fsprogs" in of_use("mount")["FileSystemToolsMissing"]
        control = Path("/dev/loop-control")
        away = control.rename("/dev/loop-control.away")
        try:
            assert "modprobe loop" in of_use("block")["LoopDevicesMissing"]
        finally:
            away.rename(control)
        assert of_use("mount") == of_use("block") == {}


@contextmanager
def covered(program: str) -> Iterator[None]:
    """Inside, the file is not a program."""
    subprocess.run(["mount", "--bind", "/dev/null", program], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", program], check=True)
