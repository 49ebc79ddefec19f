"""What users need of the service, deed by deed: each fails where the unit lacks one privilege.

`CASES` has a row for each privilege of systemd/carver.service. docs/security.md has the same rows,
and the fast tier compares them with the unit.
"""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pyudev
from csi_client import Client

from agent.csi.client import block, mounted
from mount import loop, table
from mount.kernel import Kernel
from proto import csi_pb2 as csi

MIB = 1 << 20
# Who is neither root nor anybody that root's groups are of.
NOBODY = 65534
PORT = 9898
LOW_PORT = 998
# What a case that needs a group of disks has the service read, and the group.
CONFIGURATION = Path("/run/test-privileges.toml")
GROUP = "carver_privileges"
# A disk that came is noticed by the clock after a minute, with udev's events at once.
NOTICED_SECONDS = 25
# By then udev has had all events of a new volume.
SETTLED_SECONDS = 2

Deed = Callable[[Client, Path], None]
# Of a deed, or of the service's own start.
FAILURES = (AssertionError, grpc.RpcError, OSError, subprocess.CalledProcessError)


@dataclass(frozen=True)
class Case:
    """A privilege of the unit, what in a drop-in takes it away, and what then fails.

    `setting` is what the unit needs besides for the deed to be tried at all, `configuration` what
    the file CONFIGURATION must hold then.
    """

    privilege: str
    without: str
    deed: Deed
    setting: str = ""
    configuration: str = ""


@contextmanager
def staged(
    client: Client, directory: Path, size_bytes: int, key: Mapping[str, str] | None = None
) -> Iterator[tuple[csi.Volume, Path]]:
    """A volume with an ext4, which is in use; with a key an encrypted one."""
    staging = directory / "staging"
    parameters = {"carver/encryption": "luks2"} if key else {}
    volume = client.create("test-privilege", size_bytes, mounted("ext4"), parameters=parameters)
    client.stage(volume, staging, mounted("ext4"), key)
    yield volume, staging
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


def serve(client: Client, directory: Path) -> None:
    """Answer at all."""
    client.capacity()


def mount_a_volume(client: Client, directory: Path) -> None:
    """Format a volume, and mount it where kubelet sees it."""
    with staged(client, directory, 64 * MIB) as (_, staging):
        assert table.read(Kernel()).at(str(staging)), "nobody else sees the mount"


def grow_a_mounted_volume(client: Client, directory: Path) -> None:
    """Have a mounted ext4 fill its volume, which has grown."""
    with staged(client, directory, 64 * MIB) as (volume, staging):
        client.node_expand(volume.volume_id, staging, 96 * MIB)
        assert client.stats(volume.volume_id, staging).usage[0].total > 64 * MIB


def grow_a_volume_that_is_another_s(client: Client, directory: Path) -> None:
    """The same, where a pod has closed its volume to all but its own user."""
    with staged(client, directory, 64 * MIB) as (volume, staging):
        os.chown(staging, NOBODY, NOBODY)
        staging.chmod(0o700)
        client.node_expand(volume.volume_id, staging, 96 * MIB)
        assert client.stats(volume.volume_id, staging).usage[0].total > 64 * MIB


def use_an_encrypted_volume(client: Client, directory: Path) -> None:
    """Make a header, open it, grow, close and delete; its master key is in the kernel's keyring."""
    key = {"passphrase": "for a trial"}
    with staged(client, directory, 64 * MIB, key) as (volume, staging):
        words = ["dmsetup", "table", "--target", "crypt"]
        shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        tables = shown.splitlines()
        assert tables, "it is not encrypted"
        assert all(":logon:" in one for one in tables), "a master key is in a device's table"
        client.node_expand(volume.volume_id, staging, 96 * MIB, key)
        assert client.stats(volume.volume_id, staging).usage[0].total > 64 * MIB


def name_who_keeps_a_mount_busy(client: Client, directory: Path) -> None:
    """Tell who has a file of a volume open, where that is another user."""
    with staged(client, directory, 64 * MIB) as (volume, staging):
        with (staging / "file").open("w") as file:
            words = ["sleep", "600"]
            holder = subprocess.Popen(words, user=NOBODY, group=NOBODY, extra_groups=[], stdin=file)
        try:
            with pytest.raises(grpc.RpcError) as refused:
                client.unstage(volume.volume_id, staging)
            assert f"sleep ({holder.pid})" in str(refused.value)
        finally:
            holder.kill()
            holder.wait()


def delete_unseen_by_udev(client: Client, directory: Path) -> None:
    """Overwrite a volume without udev having a look, which lvremove would meet and wait for."""
    volume = client.create("test-privilege", 64 * MIB, block())
    time.sleep(SETTLED_SECONDS)
    subprocess.run(["udevadm", "settle"], check=True)
    monitor = pyudev.Monitor.from_netlink(pyudev.Context())
    monitor.filter_by("block")
    monitor.start()
    client.delete(volume.volume_id)
    looks = []
    while (event := monitor.poll(timeout=NOTICED_SECONDS)) is not None:
        if "test--privilege" in event.properties.get("DM_NAME", ""):
            if event.action == "remove":
                break
            # What udev asked for itself, since somebody closed a node that it watches.
            looks += [event] if "SYNTH_UUID" in event.properties else []
    assert event is not None, "it was not removed"
    assert not looks, f"udev had a look at {looks}"


def serve_metrics_over_ipv4(client: Client, directory: Path) -> None:
    """Answer Prometheus."""
    assert "carver_build_info" in _page("127.0.0.1", PORT)


def serve_metrics_over_ipv6(client: Client, directory: Path) -> None:
    """The same, by the other protocol."""
    assert "carver_build_info" in _page("[::1]", PORT)


def serve_metrics_on_a_low_port(client: Client, directory: Path) -> None:
    """The same, on a port below 1024."""
    assert "carver_build_info" in _page("127.0.0.1", LOW_PORT)


def tell_of_a_disk_that_came(client: Client, directory: Path) -> None:
    """Tell of a copy of a group's disk, soon after it is there."""
    kernel = Kernel()
    files = directory / "disk", directory / "twin"
    devices = []
    try:
        for file in files:
            file.touch()
            os.truncate(file, 64 * MIB)
        devices.append(loop.attach(kernel, str(files[0])))
        words = ["vgcreate", "--devices", devices[0], "--yes", GROUP, devices[0]]
        subprocess.run(words, check=True, capture_output=True)
        within(NOTICED_SECONDS, lambda: _has_room(client), "the group was not found")
        # Its metadata.
        with files[1].open("r+b") as twin:
            twin.write(kernel.read(devices[0], 0, 2 * MIB))
        devices.append(loop.attach(kernel, str(files[1])))
        within(NOTICED_SECONDS, lambda: _tells(client, devices[1]), "the copy was not noticed")
        assert _has_room(client)
    finally:
        for device in reversed(devices):
            if device == devices[0]:
                words = ["vgremove", "--devices", device, "--yes", GROUP]
                subprocess.run(words, check=False, capture_output=True)
            loop.detach(kernel, device)


def _has_room(client: Client) -> bool:
    """Whether something can be made in the group."""
    return bool(client.capacity().available_capacity)


def _tells(client: Client, disk: str) -> bool:
    """Whether the storage's health names a disk, after a look."""
    client.capacity()
    return any(disk in one.message for one in client.storage_health())


def within(seconds: float, is_so: Callable[[], bool], otherwise: str) -> None:
    """Wait until it is so; fail where it is not in time, for a reason."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.5)


def _hold_a_volume(client: Client, directory: Path, call: str) -> None:
    """Snapshot a volume; while it is suspended lvm2 has all that it asks the kernel for."""
    volume = client.create("test-privilege", 64 * MIB, block())
    words = ["systemctl", "show", "--value", "--property=MainPID", "carver"]
    pid = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    words = ["pgrep", "--exact", "lvm", "--parent", pid]
    shells = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    trace = directory / "trace"
    words = ["strace", f"--trace={call}", f"--output={trace}", "--attach", ",".join(shells)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        assert "attached" in tracer.stderr.readline()
        client.snapshot("test-privilege", volume.volume_id)
        tracer.send_signal(signal.SIGINT)
        tracer.communicate()
    made = [one for one in trace.read_text().splitlines() if f"{call}(" in one]
    assert made, "lvm2 did not ask for it at all"
    assert [one for one in made if not one.endswith("= 0")] == []


def hold_a_volume_in_locked_memory(client: Client, directory: Path) -> None:
    """Suspend and resume a volume without a page that must be read meanwhile."""
    _hold_a_volume(client, directory, "mlock")


def hold_a_volume_before_all_others(client: Client, directory: Path) -> None:
    """Suspend and resume a volume on a busy node in no more time than it takes."""
    _hold_a_volume(client, directory, "setpriority")


def _page(host: str, port: int) -> str:
    address = f"http://{host}:{port}/metrics"
    with urllib.request.urlopen(address, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def _metrics_at(address: str) -> str:
    """The unit's variables come from a file, which outweighs what the unit says itself."""
    return f"EnvironmentFile=\nEnvironment=CARVER_METRICS_ADDRESS={address}"


def _capability(name: str, deed: Deed, setting: str = "") -> Case:
    return Case(name, f"CapabilityBoundingSet=~{name}", deed, setting)


def _family(name: str, deed: Deed, setting: str = "") -> Case:
    return Case(name, f"RestrictAddressFamilies=~{name}", deed, setting)


def _calls(name: str, deed: Deed) -> Case:
    return Case(name, f"SystemCallFilter=~{name}", deed)


CASES = (
    _capability("CAP_SYS_ADMIN", mount_a_volume),
    _capability("CAP_SYS_RESOURCE", grow_a_mounted_volume),
    _capability("CAP_DAC_READ_SEARCH", grow_a_volume_that_is_another_s),
    _capability("CAP_SYS_PTRACE", name_who_keeps_a_mount_busy),
    _capability("CAP_MKNOD", delete_unseen_by_udev),
    _capability(
        "CAP_NET_BIND_SERVICE", serve_metrics_on_a_low_port, _metrics_at(f"127.0.0.1:{LOW_PORT}")
    ),
    _family("AF_UNIX", serve),
    # Of a group on a file of its own Carver looks at no other disk.
    Case(
        "AF_NETLINK",
        "RestrictAddressFamilies=~AF_NETLINK",
        tell_of_a_disk_that_came,
        f"ExecStart=\nExecStart=/opt/carver/venv/bin/carver serve --config {CONFIGURATION}",
        f'[[classes]]\nname = "default"\ngroup = "{GROUP}"\ndefault = true\n',
    ),
    _family("AF_INET", serve_metrics_over_ipv4),
    _family("AF_INET6", serve_metrics_over_ipv6, _metrics_at(f"[::1]:{PORT}")),
    _calls("@system-service", serve),
    _calls("@mount", mount_a_volume),
    _calls("@keyring", use_an_encrypted_volume),
    Case("LimitMEMLOCK=", "LimitMEMLOCK=8M", hold_a_volume_in_locked_memory),
    Case("LimitNICE=", "LimitNICE=0", hold_a_volume_before_all_others),
    # What a unit has that does not say otherwise.
    Case("User=", "User=nobody", serve),
    Case("PrivateMounts=", "PrivateMounts=yes", mount_a_volume),
    Case("DevicePolicy=", "DevicePolicy=closed", mount_a_volume),
    Case("PrivateNetwork=", "PrivateNetwork=yes", serve_metrics_over_ipv4),
)
