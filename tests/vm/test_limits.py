"""Limits of I/O as the kernel keeps them: pods under load, by the service as it is installed."""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from csi_client import Asking, Client
from vm import pods, privileges
from vm.conftest import Restart
from vm.pods import CGROUPFS, SYSTEMD, Pod, Rates

from agent.csi.client import block, mounted
from agent.settings.settings import DEFAULT_SOCKET
from mount import table
from mount.cgroups import ROOT, Cgroups, IoMax
from mount.filesystem import FILE_SYSTEMS
from mount.kernel import Kernel
from mount.table import DeviceNumber
from proto import csi_pb2 as csi

pytestmark = [pytest.mark.variation, pytest.mark.timeout(300)]

MIB = 1 << 20
# Far below what the lab's disk does, and far above the least. Of each pair one is bounded by
# operations, one by bandwidth.
READS, WRITES, READ_MIB, WRITE_MIB = 40, 30, 5, 4
IOPS = {
    "readIOPS": str(READS),
    "writeIOPS": str(WRITES),
    "readBandwidth": "0",
    "writeBandwidth": "0",
}
BANDWIDTH = {
    "readIOPS": "0",
    "writeIOPS": "0",
    "readBandwidth": f"{READ_MIB}MiB",
    "writeBandwidth": f"{WRITE_MIB}MiB",
}
NONE = dict.fromkeys(IOPS, "0")
# By how much what is measured may differ from a limit.
TOLERANCE = 0.1
# A change holds from so long after the call began.
CHANGED_SECONDS = 1.0
# The first writes go to memory alone.
WARM_SECONDS, WINDOW_SECONDS = 1.0, 3.0
# Limits that others took away are back with the next check, which comes each ten seconds. After it
# the kernel finds out whose is what it writes from memory.
BACK_SECONDS, KEPT_SECONDS = 30.0, 15.0
# What waits for no limit ends in this time, where with the limit it would take ten times as long.
AT_ONCE_SECONDS, HELD_MIB = 25, 16
# Each process has a part of its own.
PART_BYTES = 32 * MIB
KEY = {"passphrase": "correct horse battery staple"}
# Bytes and stride of what is held by operations, and by bandwidth.
SMALL, LARGE = (4096, 8192), (64 << 10, 64 << 10)
_THIN = """
[[groups]]
name = "carver"
file = "/var/lib/carver/carver.img"

[[classes]]
name = "default"
group = "carver"
default = true

[[classes]]
name = "thin"
group = "carver"
layout = "thin"
pool_size = "1GiB"
"""
_CONFIGURED = (
    f"ExecStart=\nExecStart=/opt/carver/venv/bin/carver serve --config {privileges.CONFIGURATION}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of volume; without a file system it is raw."""

    fs_type: str = ""
    device_class: str = "default"
    is_encrypted: bool = False

    @property
    def capability(self) -> csi.VolumeCapability:
        return mounted(self.fs_type) if self.fs_type else block()

    @property
    def name(self) -> str:
        of = [self.fs_type or "raw", self.device_class]
        return "-".join([*of, "encrypted"] if self.is_encrypted else of)


# All six kinds, three at a time.
KINDS = {
    SYSTEMD: [Kind("ext4"), Kind(is_encrypted=True), Kind("ext4", "thin")],
    CGROUPFS: [Kind(), Kind("ext4", is_encrypted=True), Kind(device_class="thin")],
}


@dataclass(frozen=True)
class Used:
    """A volume in use; `path` is its device, or a file that fills most of it."""

    client: Client
    kind: Kind
    volume: csi.Volume
    directory: Path

    @property
    def id(self) -> str:
        return self.volume.volume_id

    @property
    def target(self) -> Path:
        return self.directory / f"target-{self.kind.name}"

    @property
    def staging(self) -> Path:
        return self.directory / f"staging-{self.kind.name}"

    @property
    def path(self) -> Path:
        return self.target / "data" if self.kind.fs_type else self.target

    @property
    def number(self) -> DeviceNumber:
        """Of the device that pods use; stat(2) of a btrfs says another."""
        if not self.kind.fs_type:
            return pods.number_of(self.target)
        [mount] = table.read(Kernel()).at(str(self.target))
        return pods.number_of(Path(mount.source))

    def modify(self, mutable: Mapping[str, str]) -> None:
        self.client.modify(self.id, mutable)

    def stop_using(self) -> None:
        self.client.unpublish(self.id, self.target)
        self.client.unstage(self.id, self.staging)


@contextmanager
def using(
    client: Client, directory: Path, kind: Kind, size_bytes: int = 6 * PART_BYTES
) -> Iterator[Used]:
    parameters = {"class": kind.device_class} if kind.device_class != "default" else {}
    if kind.is_encrypted:
        parameters["encryption"] = "luks2"
    name = f"test-limits-{kind.name}"
    volume = client.create(name, size_bytes, kind.capability, parameters=parameters)
    used = Used(client, kind, volume, directory)
    client.stage(volume, used.staging, kind.capability, KEY if kind.is_encrypted else {})
    client.publish(volume, used.staging, used.target, kind.capability)
    try:
        yield used
    finally:
        used.stop_using()
        client.delete(used.id)


def fill(pod: Pod, *used: Used) -> None:
    """Have pods write all that is read and overwritten later, past the page cache."""
    writers = []
    for one in used:
        words = ("dd", "if=/dev/zero", f"of={one.path}", "bs=1M", "oflag=direct", "status=none")
        writers.append(pod.run(*words, f"count={4 * PART_BYTES // MIB}"))
    assert [one.wait(timeout=100) for one in writers] == [0] * len(writers)
    pod.stop()


def begin(pod: Pod, how: str, size: tuple[int, int], *used: Used) -> None:
    """Have two processes read each volume, and two write to it."""
    for one in used:
        for number in range(4):
            deed = ("read", "write")[number % 2]
            pod.load(one.path, deed, how, *size, number * PART_BYTES, PART_BYTES)
    pod.wait_until_ready()
    time.sleep(WARM_SECONDS)


def measured(pod: Pod, used: Used, seconds: float = WINDOW_SECONDS) -> Rates:
    return pods.rates(pod, [used.number], seconds)[used.number]


def in_mib(rates: Rates) -> tuple[float, float]:
    return rates["read_bytes"] / MIB, rates["write_bytes"] / MIB


def about(limit: float) -> object:
    return pytest.approx(limit, rel=TOLERANCE)


def differing(pod: Pod, how: str, used: Sequence[Used]) -> Iterator[str]:
    """What is not as each of the four limits says."""
    for mutable, size in ((IOPS, SMALL), (BANDWIDTH, LARGE)):
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one, mutable=mutable: one.modify(mutable), used))
        begin(pod, how, size, *used)
        before, began = pod.counted(), time.monotonic()
        found = pods.rates(pod, [one.number for one in used], WINDOW_SECONDS)
        seconds, after = time.monotonic() - began, pod.counted()
        for one in used:
            rates = found[one.number]
            if mutable is IOPS:
                wanted, had = (READS, WRITES), (rates["reads"], rates["writes"])
            else:
                wanted, had = (READ_MIB, WRITE_MIB), in_mib(rates)
            text = f"{pod.layout}, {one.kind.name}, {how}: {wanted}, measured {had}"
            print(text)
            if had != (about(wanted[0]), about(wanted[1])):
                yield text
        if how == "direct":
            each = 1 if mutable is IOPS else MIB // size[0]
            own = [
                (last - first) / each / seconds / len(used)
                for first, last in zip(before, after, strict=True)
            ]
            print(f"by their own count: {own}")
            if own != [about(one) for one in wanted]:
                yield f"{pod.layout}, {how}: {wanted}, by their own count {own}"
        # The rest of what is in memory is written without a limit.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: one.modify(NONE), used))
        pod.stop()


@pytest.mark.parametrize("layout", [SYSTEMD, CGROUPFS])
def test_each_limit_holds_for_all_processes_of_a_volume_together(
    layout: str, directory: Path, restart: Restart
) -> None:
    privileges.CONFIGURATION.write_text(_THIN)
    restart(_CONFIGURED)
    with Asking(DEFAULT_SOCKET) as client, ExitStack() as stack:
        used = [stack.enter_context(using(client, directory, one)) for one in KINDS[layout]]
        pod = stack.enter_context(pods.pod(layout))
        fill(pod, *used)
        found = [*differing(pod, "direct", used), *differing(pod, "buffered", used)]
        assert found == []


@pytest.mark.parametrize(
    ("fs_type", "how"), [("", "direct"), *((one, "buffered") for one in FILE_SYSTEMS)]
)
def test_a_change_under_load_holds_within_a_second(
    fs_type: str, how: str, client: Client, directory: Path
) -> None:
    size_bytes = 10 * PART_BYTES
    with using(client, directory, Kind(fs_type), size_bytes) as used, pods.pod(SYSTEMD) as pod:
        fill(pod, used)
        used.modify({"readBandwidth": "8MiB", "writeBandwidth": "8MiB"})
        begin(pod, how, LARGE, used)
        for read_mib, write_mib in ((3, 6), (6, 3)):
            began = time.monotonic()
            used.modify({"readBandwidth": f"{read_mib}MiB", "writeBandwidth": f"{write_mib}MiB"})
            time.sleep(max(0, began + CHANGED_SECONDS - time.monotonic()))
            rates = measured(pod, used)
            had = in_mib(rates)
            print(f"{fs_type} {how}: {(read_mib, write_mib)}, measured {had}")
            assert had == (about(read_mib), about(write_mib))
        used.modify(NONE)
        pod.stop()


def test_what_is_in_memory_delays_neither_a_snapshot_nor_the_end(
    client: Client, directory: Path
) -> None:
    with using(client, directory, Kind("ext4")) as used, pods.pod(SYSTEMD) as pod:
        limit = IoMax(write_bytes=64 << 10)

        def write() -> None:
            """Have the pod write what is in memory alone."""
            words = ("dd", "if=/dev/zero", f"of={used.path}", "bs=1M", f"count={HELD_MIB}")
            assert pod.run(*words, "status=none").wait(timeout=100) == 0
            assert Cgroups(pod.top).counts()[used.number].write_bytes - written < MIB

        written = 0
        used.modify({"writeBandwidth": "64KiB"})
        write()
        began = time.monotonic()
        snapshot = client.snapshot("test-limits", used.id)
        seconds = [time.monotonic() - began]
        assert Cgroups(pod.top).limits()[used.number] == limit
        written = Cgroups(pod.top).counts()[used.number].write_bytes
        write()
        pod.stop()
        began = time.monotonic()
        used.stop_using()
        seconds.append(time.monotonic() - began)
        print(f"a snapshot took {seconds[0]:.1f} s, the end {seconds[1]:.1f} s")
        assert max(seconds) < AT_ONCE_SECONDS
        client.delete_snapshot(snapshot.snapshot_id)


def reload() -> None:
    subprocess.run(["systemctl", "daemon-reload"], check=True)


def end_a_pod() -> None:
    unit = ("--slice=kubepods-besteffort-podc0.slice", "--property=IOWeight=50")
    subprocess.run(["systemd-run", "--quiet", "--wait", *unit, "true"], check=True)


def take_the_controller_away() -> None:
    (ROOT / "cgroup.subtree_control").write_text("-io")


def kept_again(pod: Pod, used: Used, limit: IoMax, after: str) -> float:
    """Wait until a limit is there to stay; return after how long that began.

    systemd takes the controller away some time after a unit ended.
    """
    began = back = time.monotonic()
    while time.monotonic() < back + KEPT_SECONDS:
        if Cgroups(pod.top).limits().get(used.number) != limit:
            back = time.monotonic()
            assert back < began + BACK_SECONDS, after
        time.sleep(0.02)
    return back - began


@pytest.mark.parametrize("how", ["direct", "buffered"])
def test_limits_that_were_taken_away_are_back_in_seconds(
    how: str, client: Client, directory: Path, answering: Callable[[], None]
) -> None:
    def restart() -> None:
        subprocess.run(["systemctl", "stop", "carver"], check=True)
        take_the_controller_away()
        subprocess.run(["systemctl", "start", "carver"], check=True)
        answering()

    with using(client, directory, Kind("ext4")) as used, pods.pod(SYSTEMD) as pod:
        fill(pod, used)
        used.modify(BANDWIDTH)
        limit = Cgroups(pod.top).limits()[used.number]
        begin(pod, how, LARGE, used)
        for event in (reload, end_a_pod, take_the_controller_away, restart):
            event()
            back_seconds = kept_again(pod, used, limit, event.__name__)
            rates = measured(pod, used)
            had = in_mib(rates)
            print(f"{how}: {event.__name__}: back after {back_seconds:.1f} s, measured {had}")
            assert had == (about(READ_MIB), about(WRITE_MIB)), event.__name__
        with Asking(DEFAULT_SOCKET) as again:
            again.modify(used.id, NONE)
        pod.stop()


def test_services_outside_kubelet_s_pods_are_limited_in_the_cgroup_of_a_setting(
    directory: Path, restart: Restart
) -> None:
    top = "carvertest.slice"
    restart(f"Environment=CARVER_PODS_CGROUP=/{top}")
    with (
        Asking(DEFAULT_SOCKET) as client,
        using(client, directory, Kind()) as used,
        pods.pod(SYSTEMD, top) as pod,
    ):
        used.modify(IOPS)
        begin(pod, "direct", SMALL, used)
        rates = measured(pod, used)
        assert (rates["reads"], rates["writes"]) == (about(READS), about(WRITES))
        pod.stop()
