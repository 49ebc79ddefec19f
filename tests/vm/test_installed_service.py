"""What only the real thing can show: no processes, no old data, an orderly end, a sudden one."""

import hashlib
import json
import os
import re
import signal
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import chosen
import pytest
from csi_client import Asking
from vm.tracing import traced

from agent.csi.client import Client, Mode, block, mounted
from agent.settings.settings import DEFAULT_SOCKET, KUBELET_DIRECTORY
from mount import table
from mount.kernel import Kernel

MIB = 1 << 20


def test_publishing_unpublishing_and_statistics_start_no_process(
    client: Client, directory: Path, tmp_path: Path, main_pid: Callable[[], int]
) -> None:
    staging, target, node = directory / "staging", directory / "target", directory / "node"
    capability = mounted("ext4", mode=Mode.SINGLE_NODE_MULTI_WRITER)
    volume = client.create("test-trace", 64 * MIB, capability)
    raw = client.create("test-trace-raw", 16 * MIB, block())
    client.stage(raw, staging, block())

    with traced(main_pid(), tmp_path / "stage") as started:
        client.stage(volume, staging, capability)
    assert any("execve(" in line for line in started), "the trace sees nothing at all"

    with traced(main_pid(), tmp_path / "publish") as started:
        for read_only in (False, True):
            client.publish(volume, staging, target, capability, read_only=read_only)
            client.publish(volume, staging, target, capability, read_only=read_only)
            client.stats(volume.volume_id, target)
            client.unpublish(volume.volume_id, target)
            client.publish(raw, staging, node, block(), read_only=read_only)
            client.stats(raw.volume_id, node)
            client.unpublish(raw.volume_id, node)
        client.stage(volume, staging, capability)
        client.unstage(volume.volume_id, staging)
    assert started == []
    client.unstage(raw.volume_id, staging)


def test_the_socket_is_root_s_alone() -> None:
    assert stat.S_IMODE(DEFAULT_SOCKET.stat().st_mode) == 0o600


def test_a_stopped_service_starts_again_with_its_volumes(
    client: Client, answering: Callable[[], None]
) -> None:
    volume = client.create("test-restart", 16 * MIB, block())
    subprocess.run(["systemctl", "stop", "carver"], check=True)
    words = ["systemctl", "show", "--property=Result,ExecMainStatus,ExecMainCode", "carver"]
    ended = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "Result=success" in ended
    assert "ExecMainStatus=0" in ended
    assert not DEFAULT_SOCKET.exists()
    subprocess.run(["systemctl", "start", "carver"], check=True)
    answering()
    with Asking(DEFAULT_SOCKET) as again:
        assert volume in again.volumes()
        again.delete(volume.volume_id)


def test_a_killed_service_is_restarted_and_calls_are_repeated(
    client: Client, directory: Path, main_pid: Callable[[], int], answering: Callable[[], None]
) -> None:
    staging, target = directory / "staging", directory / "target"
    volume = client.create("test-kill", 64 * MIB)
    client.stage(volume, staging)
    client.publish(volume, staging, target)
    data = os.urandom(MIB)
    (target / "file").write_bytes(data)

    killed = main_pid()
    os.kill(killed, signal.SIGKILL)
    for _ in range(600):
        if main_pid() not in (0, killed):
            break
        time.sleep(0.1)
    answering()

    with Asking(DEFAULT_SOCKET) as again:
        assert again.create("test-kill", 64 * MIB) == volume
        again.stage(volume, staging)
        again.publish(volume, staging, target)
        assert len(table.read(Kernel()).at(str(target))) == 1
        found = (target / "file").read_bytes()
        assert hashlib.sha256(found).digest() == hashlib.sha256(data).digest()
        again.unpublish(volume.volume_id, target)
        again.unstage(volume.volume_id, staging)
        again.delete(volume.volume_id)


@contextmanager
def container(place: Path) -> Iterator[Path]:
    """Where a container that has kubelet's directory, as HostToContainer gives it, sees it."""
    # All mounts become slaves (rslave) of the host's, and so does the bind of one.
    script = f"mount --rbind {KUBELET_DIRECTORY} {place}; echo ready; cat"
    words = ["unshare", "--mount", "--propagation", "slave", "sh", "-e", "-c", script]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Path(f"/proc/{process.pid}/root{place}")
        process.communicate()


def test_a_container_sees_what_the_service_mounts_and_unmounts(
    client: Client, directory: Path, tmp_path: Path
) -> None:
    staging, target, node = directory / "staging", directory / "target", directory / "node"
    volume = client.create("test-propagation", 16 * MIB, mounted("ext4"))
    raw = client.create("test-propagation-raw", 16 * MIB, block())
    with container(tmp_path) as kubelet:
        inside = {
            one: kubelet / one.relative_to(KUBELET_DIRECTORY) for one in (staging, target, node)
        }
        client.stage(volume, staging)
        (staging / "file").write_text("data")
        assert (inside[staging] / "file").read_text() == "data"
        client.publish(volume, staging, target, read_only=True)
        assert (inside[target] / "file").read_text() == "data"
        with pytest.raises(OSError, match="Read-only"):
            (inside[target] / "file").write_text("other")
        client.stage(raw, staging, block())
        client.publish(raw, staging, node, block())
        assert inside[node].is_block_device()

        client.unpublish(raw.volume_id, node)
        assert not inside[node].exists()
        client.unpublish(volume.volume_id, target)
        assert not inside[target].exists()
        client.unstage(volume.volume_id, staging)
        assert list(inside[staging].iterdir()) == []


@pytest.mark.parametrize("fs_type", chosen.GROWING)
def test_a_file_system_grows_under_a_writer(client: Client, directory: Path, fs_type: str) -> None:
    staging, capability = directory / "staging", mounted(fs_type)
    volume = client.create(f"test-grow-{fs_type}", 320 * MIB, capability)
    client.stage(volume, staging, capability)
    words = ["sha256sum", str(staging / "data")]
    (staging / "data").write_bytes(os.urandom(4 * MIB))
    before = subprocess.run(words, check=True, capture_output=True).stdout
    with (staging / "log").open("wb") as log:
        log.write(b"x" * MIB)
        total = client.stats(volume.volume_id, staging).usage[0].total
        client.node_expand(volume.volume_id, staging, 448 * MIB)
        log.write(b"y" * MIB)
    assert client.stats(volume.volume_id, staging).usage[0].total > total + 64 * MIB
    assert subprocess.run(words, check=True, capture_output=True).stdout == before
    client.unstage(volume.volume_id, staging)


def test_the_unit_is_hardened_and_metrics_are_served_under_it(
    client: Client, main_pid: Callable[[], int]
) -> None:
    # docs/security.md tells the figure; tenths, as systemd-analyze counts them for a threshold.
    words = ["systemd-analyze", "security", "--no-pager", "--threshold=51", "carver.service"]
    rated = subprocess.run(words, capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout.splitlines()[-1:]
    status = Path(f"/proc/{main_pid()}/status").read_text()
    assert re.search(r"^NoNewPrivs:\t1$", status, re.M)
    assert re.search(r"^Seccomp:\t2$", status, re.M)

    # Which waits for lvm2's first answer, if the service was just started.
    client.capacity()
    assert client.probe().ready.value
    pages = {
        page: urllib.request.urlopen(f"http://127.0.0.1:9898/{page}", timeout=30).read().decode()
        for page in ("metrics", "healthz")
    }
    assert 'method="Probe"' in pages["metrics"]
    assert 'carver_group_free_bytes{group="carver"}' in pages["metrics"]
    assert pages["healthz"] == "ok\n"
    # Only the registration fails: there is no kubelet here.
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen("http://127.0.0.1:9898/readyz", timeout=30)
    assert b"kubelet has not registered" in refused.value.read()


def test_the_doctor_finds_no_problem_where_the_service_runs() -> None:
    ended = subprocess.run(
        ["/opt/carver/venv/bin/carver", "doctor", "--json"], capture_output=True, text=True
    )
    printed = json.loads(ended.stdout)
    # The lab's own group is on a loop device, so its lvm2 must look at loop devices.
    others = [one for one in printed["checks"] if one["check"] != "guests' groups"]
    assert [one for one in others if one["verdict"] != "pass"] == []
    assert ended.returncode == 0
