"""The rarer reasons of docs/troubleshooting.md: provoked, told by each call that must, gone after.

As in test_conditions, on disks that fail when they are told to, and by what lvm2, the kernel or the
node's files are made to say. tests/fast/operations/test_health_reasons.py sees that none is
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
from model import operations as do
from model.operations import MIB
from real.disks import Disk
from real.host import RealHost
from vm.told import EXT4, EXTENT_BYTES, GROUP, INTERVAL_SECONDS, Told, in_use, served, write

from agent.csi.client import block, mounted
from lvm import names, report
from proto import csi_pb2 as csi

Disks = tuple[Disk, Disk, Disk]
RAID1 = 'layout = "raid1"\n'
THIN = 'layout = "thin"\n'
SLOWLY = {"minimumRecoveryRate": "64KiB", "maximumRecoveryRate": "128KiB"}
QUICKLY = {"minimumRecoveryRate": "100MiB", "maximumRecoveryRate": "200MiB"}
SIZE = 32 * MIB

pytestmark = pytest.mark.variation


class Raw:
    """A raw block volume in use, and what is told of it."""

    def __init__(self, trial: Trial, host: RealHost) -> None:
        self._client, self._host = trial.machine.client, host
        self._staging, self._target = (trial.machine.place(one) for one in ("staging", "target"))
        self._volume = self._client.create("a", SIZE, block())
        self.target = Path(self._target)
        self.begin()
        self.told = Told(trial.machine, "a", "target")
        self.told.well()

    def begin(self) -> None:
        """Into use, as by the start of a pod."""
        self._client.stage(self._volume, self._staging, block())
        self._client.publish(self._volume, self._staging, self._target, block())

    def end(self) -> None:
        """Out of use, as by the end of a pod."""
        self._client.unpublish(self._volume.volume_id, self._target)
        self._client.unstage(self._volume.volume_id, self._staging)

    def begin_anew(self, *pools: str) -> None:
        """The same, and what device-mapper had of it, and of these, is gone meanwhile."""
        self.end()
        for name in ("vol-a", *pools):
            self._host.deactivate(GROUP, name)
        self.begin()

    def delete(self) -> None:
        self.end()
        self._client.delete(self._volume.volume_id)


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


def until(is_so: Callable[[], bool], told: Callable[[], object]) -> None:
    """Wait for it, no longer than LVM is old at most."""
    deadline = time.monotonic() + INTERVAL_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, told()
        time.sleep(1)


# Copies


def test_a_mirror_that_is_brought_in_sync_and_one_whose_copies_differ(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    with served(bench, host, paths(disks), RAID1) as trial:
        client = trial.machine.client
        volume = client.create("a", SIZE, block(), mutable=SLOWLY)
        told = Told(trial.machine, "a")
        told.soon("RaidResyncing", "vol-a", "% done")
        client.modify(volume.volume_id, QUICKLY)
        told.well()

        image = f"/dev/mapper/{names.device(GROUP, 'vol-a_rimage_1')}"
        host.write_bytes(image, SIZE // 2, os.urandom(64 * 1024))
        host.lvm("lvchange", "--syncaction", "check", "--", f"{GROUP}/vol-a")
        told.soon("RaidMismatches", "vol-a", "--syncaction repair")
        host.lvm("lvchange", "--syncaction", "repair", "--", f"{GROUP}/vol-a")
        told.well()
        client.delete(volume.volume_id)


def test_a_mirror_that_lost_all_its_disks(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks), RAID1) as trial:
        client = trial.machine.client
        volume = client.create("a", SIZE, block())
        told = Told(trial.machine, "a")
        told.well()
        of_group = report.read(host.lvm).group(GROUP).disks
        used = {one.name for one in of_group if one.allocated_extents}
        host.deactivate(GROUP, "vol-a")
        lost = [one for one in disks if {one.path, real(one)} & used]
        assert len(lost) == 2
        for disk in lost:
            disk.flake()
        told.soon("RaidFailed", "vol-a", "partial", storage="DiskMissing")
        for disk in lost:
            disk.mend()
        told.well()
        client.delete(volume.volume_id)


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
            raw = Raw(trial, host)
            fast.fail()
            # A flush is what has the cache write its own metadata.
            raw.told.meanwhile = lambda: write(raw.target)
            raw.told.soon(reason, words)
            raw.told.meanwhile = lambda: None
            fast.mend()
            if kind == "cache":
                # What it had not written of its metadata yet is lost, and it is read no more.
                host.lvm("lvconvert", "--yes", "--uncache", "--", f"{GROUP}/vol-a")
            else:
                raw.begin_anew()
            raw.told.well()
            write(raw.target)
            raw.delete()


# Thin pools


def test_a_pool_that_takes_no_writes(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks), THIN) as trial:
        raw = Raw(trial, host)
        pool = f"{names.device(GROUP, 'pool-plain')}-tpool"
        with read_only(pool):
            raw.told.soon("PoolReadOnly", "no more writes", storage="PoolReadOnly")
        raw.told.well()
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


def test_a_pool_whose_disk_failed_it(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks), THIN) as trial:
        raw = Raw(trial, host)
        disk = under(host, disks, f"{GROUP}/pool-plain_tmeta")
        disk.fail()
        raw.told.meanwhile = lambda: write(raw.target)
        raw.told.soon("PoolDataLost", "failed", storage="PoolDataLost")
        raw.told.meanwhile = lambda: None
        disk.mend()
        raw.begin_anew("pool-plain")
        raw.told.well()
        write(raw.target)
        raw.delete()


def test_a_volume_of_which_the_kernel_does_not_tell(
    bench: Bench, host: RealHost, disks: Disks
) -> None:
    with served(bench, host, paths(disks), THIN) as trial:
        raw = Raw(trial, host)
        disk = under(host, disks, f"{GROUP}/pool-plain_tmeta")
        # Nothing is asked for that a dead disk keeps waiting, but by health itself.
        told = Told(trial.machine, "a", "target", look=False)
        # While it commits its metadata the pool tells nobody of itself.
        writer = threading.Thread(target=write, args=[raw.target])
        with disk.hanging():
            writer.start()
            reason = "DeviceNotResponding"
            told.soon(reason, "vol-a", "dmesg", storage=reason)
        writer.join()
        told.well()
        raw.delete()


# What is in use


def test_a_published_device_that_went_away(bench: Bench, host: RealHost, disks: Disks) -> None:
    def reasons() -> dict[str, set[str]]:
        told = raw.told.now().items()
        return {call: {one.reason for one in health.health_statuses} for call, health in told}

    with served(bench, host, paths(disks)) as trial:
        raw = Raw(trial, host)
        host.deactivate(GROUP, "vol-a")
        # Of the volume nothing is wrong, and only who names the path asks about that.
        until(lambda: reasons().pop("with its path") == {"DeviceGone"}, reasons)
        assert not any(found for call, found in reasons().items() if call != "with its path")
        raw.end()
        raw.begin()
        raw.told.well()
        write(raw.target)
        raw.delete()


def test_a_file_system_that_was_shut_down(bench: Bench, host: RealHost) -> None:
    with (
        Disk.on(bench.shared.new_device(100 * EXTENT_BYTES)) as disk,
        served(bench, host, (disk.path,)) as trial,
    ):
        machine, capability = trial.machine, mounted("xfs")
        volume = machine.client.create("a", 300 * MIB, capability)
        staging = machine.place("staging")
        machine.client.stage(volume, staging, capability)
        told = Told(machine, "a", "staging")
        told.well()
        subprocess.run(["xfs_io", "-x", "-c", "shutdown", staging], check=True)
        told.soon("FileSystemNotResponding", "xfs", "kernel log")
        machine.client.unstage(volume.volume_id, staging)
        machine.client.stage(volume, staging, capability)
        told.well()
        machine.client.unstage(volume.volume_id, staging)
        Path(staging).rmdir()
        machine.client.delete(volume.volume_id)


def test_a_file_system_that_found_errors(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks)) as trial:
        in_use(trial, EXT4)
        told = Told(trial.machine, "a", "target")
        told.well()
        device = host.devices.find(GROUP, "vol-a")
        assert device is not None
        attributes = Path("/sys/fs/ext4", Path(os.path.realpath(device.path)).name)
        (attributes / "trigger_fs_error").write_text("of a test")
        told.soon("FileSystemErrors", "ext4", "kernel log")
        for call in (
            do.Unpublish("a", "target"),
            do.Unstage("a", "staging"),
            do.Stage("a", "staging", EXT4),
        ):
            trial.make(call)
        Told(trial.machine, "a", "staging").well()


# Groups, lvm2, the node


def test_a_copy_of_a_group_s_disk(bench: Bench, host: RealHost) -> None:
    disk, twin = (host.new_device(41 * EXTENT_BYTES) for _ in range(2))
    with served(bench, host, (disk,)) as trial:
        client = trial.machine.client
        volume = client.create("a", SIZE, block())
        told = Told(trial.machine, "a")
        told.well()
        # lvm2's label, and its metadata.
        host.write_bytes(twin, 0, host.read_bytes(disk, 0, MIB))
        try:
            until(lambda: twin in told.storage().get("DiskIgnored", ""), told.storage)
            # The volume itself is as it was.
            assert not any(one.health_statuses for one in told.now().values())
        finally:
            host.write_bytes(twin, 0, bytes(MIB))
        told.well()
        client.delete(volume.volume_id)


def test_a_group_that_is_exported(bench: Bench, host: RealHost, disks: Disks) -> None:
    with served(bench, host, paths(disks)) as trial:
        client = trial.machine.client
        volume = client.create("a", SIZE, block())
        told = Told(trial.machine, "a")
        told.well()
        host.deactivate(GROUP, "vol-a")
        host.lvm("vgexport", "--", GROUP)
        try:
            told.soon("GroupRefused", GROUP, storage="GroupRefused")
        finally:
            host.lvm("vgimport", "--", GROUP)
        told.well()
        client.delete(volume.volume_id)


def test_an_lvm2_that_gives_no_report(bench: Bench, host: RealHost, disks: Disks) -> None:
    def is_silent() -> bool:
        # A list has the group looked at, and waits for a few seconds only.
        with suppress(grpc.RpcError):
            client.volumes()
        return "LvmNotAnswering" in told.storage()

    with served(bench, host, paths(disks)) as trial:
        client = trial.machine.client
        volume = client.create("a", SIZE, block())
        told = Told(trial.machine, "a")
        told.well()
        with Path("/run/lock/lvm", f"V_{GROUP}").open("a") as lock:
            # As lvm2 does it while it changes a group, and something of the group is other then.
            fcntl.flock(lock, fcntl.LOCK_EX)
            host.lvm("vgchange", "--nolocking", "--addtag", "test", "--", GROUP)
            until(is_silent, told.storage)
            # The volume itself is as it was.
            assert not any(one.health_statuses for one in told.now().values())
        told.well()
        client.delete(volume.volume_id)


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
    """Inside, the program is none."""
    subprocess.run(["mount", "--bind", "/dev/null", program], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", program], check=True)
