"""Mistakes found in other drivers for local volumes. Each test has the mistake's name.

More of them are shown elsewhere:

- test_access_modes.py: a block publish stacks a mount at each retry
- test_controller.py: a repeated create of another size is accepted; capacity is computed otherwise
  than create allocates
- test_lifecycle.py: read-only is ignored; an expansion fails because the size matches; a file
  system is not grown because the volume was large enough already
- below, by the inactive volume: volumes are not active after a reboot
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import expect
import pytest
from real.any import AnyHost

from agent.csi.client import Client, block, mounted
from agent.daemon.server import Service
from lvm import report
from mount import table
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20


def names_in(host: AnyHost, group: str) -> set[str]:
    return set(report.read(host.lvm).group(group).volumes)


@contextmanager
def held_at(host: AnyHost, program: str) -> Iterator[threading.Event]:
    """The next run of a program waits at its start until the block ends; the event says it does."""
    reached, let_go = threading.Event(), threading.Event()

    def intercept(words: Sequence[str]) -> Result | None:
        if words[0] == program and not reached.is_set():
            reached.set()
            assert let_go.wait(60)
        return None

    host.intercept = intercept
    try:
        yield reached
    finally:
        let_go.set()


def lvm_fails_with(stderr: str) -> Callable[[Sequence[str]], Result | None]:
    return lambda words: Result(5, "", stderr) if words[0] == "lvm" else None


@pytest.mark.parametrize("stderr", ["", '  Volume group "x" not found\n', "  Failed to find it\n"])
@pytest.mark.variation
def test_any_lvs_error_taken_as_volume_gone(
    client: Client, host: AnyHost, volume: csi.Volume, group: str, stderr: str
) -> None:
    host.intercept = lvm_fails_with(stderr)
    with expect.code("INTERNAL"):
        client.delete(volume.volume_id)
    # Nothing is proved, so the caller must come again.
    with expect.code("ABORTED", "fullreport"):
        client.create("pvc-1", 64 * MIB, mounted("ext4"))
    host.intercept = lambda words: None
    assert names_in(host, group) == {"vol-pvc-1"}


@pytest.mark.variation
def test_a_missing_dev_node_taken_as_volume_gone(
    client: Client, host: AnyHost, volume: csi.Volume, group: str
) -> None:
    host.deactivate(group, "vol-pvc-1")
    assert client.create("pvc-1", 64 * MIB, mounted("ext4")) == volume
    client.delete(volume.volume_id)
    assert names_in(host, group) == set()


def test_an_inactive_volume_removed_and_made_anew_empty(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path, group: str
) -> None:
    client.unstage(staged.volume_id, staging)
    uuid = report.read(host.lvm).group(group).volume("vol-pvc-1").uuid
    host.deactivate(group, "vol-pvc-1")
    client.stage(staged, staging)
    assert table.read(host.kernel).at(str(staging))
    assert report.read(host.lvm).group(group).volume("vol-pvc-1").uuid == uuid


def test_data_formatted_away_because_a_stale_database_was_asked(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, group: str
) -> None:
    device = host.devices.find(group, "vol-pvc-1")
    assert device is not None
    host.write(device.path, "ext4")
    for wanted in ("ext4", "xfs"):
        with expect.code("FAILED_PRECONDITION", "holds ext4"):
            client.stage(volume, staging, mounted(wanted))
    assert not any(words[0].startswith("mkfs") for words in host.commands)


@pytest.mark.variation
def test_mount_options_ignored(client: Client, host: AnyHost, staging: Path, target: Path) -> None:
    capability = mounted("ext4", ["noatime", "nosuid", "commit=30"])
    volume = client.create("pvc-1", 64 * MIB, capability)
    client.stage(volume, staging, capability)
    client.publish(volume, staging, target, capability)
    mount = table.read(host.kernel).at(str(target))[-1]
    assert {"noatime", "nosuid"} <= set(mount.options)
    assert "commit=30" in mount.super_options


def test_unmount_errors_swallowed_and_unpublish_answered_ok_with_the_mount_still_there(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path, target: Path
) -> None:
    client.publish(staged, staging, target)
    with (target / "open").open("w") as file:
        file.write("data")
        with expect.code("FAILED_PRECONDITION", str(target), "in use"):
            client.unpublish(staged.volume_id, target)
        assert table.read(host.kernel).at(str(target))
    (target / "open").unlink()
    client.unpublish(staged.volume_id, target)


@pytest.mark.variation
def test_unpublish_that_needs_an_object_which_is_gone_already(
    client: Client, host: AnyHost, volume: csi.Volume, target: Path
) -> None:
    client.delete(volume.volume_id)
    target.mkdir()
    client.unpublish(volume.volume_id, target)
    assert not target.exists()


@pytest.mark.variation
def test_one_global_lock_held_over_mkfs(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    with ThreadPoolExecutor() as pool, held_at(host, "mkfs.ext4") as formatting:
        staged = pool.submit(client.stage, volume, staging)
        assert formatting.wait(60)
        other = client.create("pvc-2", 16 * MIB, block())
        client.delete(other.volume_id)
        assert not staged.done()
    staged.result()


@pytest.mark.variation
def test_no_lock_per_volume(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, target: Path
) -> None:
    with ThreadPoolExecutor() as pool, held_at(host, "mkfs.ext4") as formatting:
        staged = pool.submit(client.stage, volume, staging)
        assert formatting.wait(60)
        for call in (
            partial(client.stage, volume, staging),
            partial(client.delete, volume.volume_id),
            partial(client.create, "pvc-1", 64 * MIB, mounted("ext4")),
            partial(client.expand, volume.volume_id, 80 * MIB),
            partial(client.unpublish, volume.volume_id, target),
        ):
            with expect.code("ABORTED", "in progress"):
                call()
    staged.result()
    client.stage(volume, staging)


@pytest.mark.variation
def test_the_driver_changes_the_mode_of_the_volume_s_root(
    client: Client, staged: csi.Volume, staging: Path, target: Path
) -> None:
    staging.chmod(0o2750)
    client.publish(staged, staging, target)
    client.unpublish(staged.volume_id, target)
    client.stage(staged, staging)
    assert staging.stat().st_mode & 0o7777 == 0o2750


@pytest.mark.variation
def test_mkfs_defaults_newer_than_the_node_s_kernel(host: AnyHost, staged: csi.Volume) -> None:
    made = next(words for words in host.commands if words[0] == "mkfs.ext4")
    features = made[made.index("-O") + 1].split(",")
    assert features[0] == "none"
    assert not {"orphan_file", "metadata_csum_seed", "casefold"} & set(features)


def test_lvm_commands_on_an_idle_node(host: AnyHost, service: Service) -> None:
    idle = threading.Event()
    host.intercept = lambda words: idle.set()
    assert not idle.wait(1)
