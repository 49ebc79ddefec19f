"""Mistakes found in other drivers for local volumes. Each test has the mistake's name.

More of them are shown elsewhere:

- test_access_modes.py: a block publish stacks a mount at each retry
- test_controller.py: a repeated create of another size is accepted; capacity is computed otherwise
  than create allocates
- test_lifecycle.py: read-only is ignored; an expansion fails because the size matches; a file
  system is not grown because the volume was large enough already
- below, by the inactive volume: volumes are not active after a reboot
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import chosen
import expect
import grpc
import pytest
from real.any import AnyHost
from serving import served

from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.settings import Config
from lvm import report
from mount import table
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
pytestmark = [
    # Room for two file systems of each kind.
    pytest.mark.groups(data=[250, 60]),
]


def names_in(host: AnyHost, group: str) -> set[str]:
    return set(report.read(host.lvm).group(group).volumes)


@contextmanager
def held_at(host: AnyHost, program: str) -> Iterator[threading.Event]:
    """The next run of a program waits at its start until the block ends; the event says it does."""
    reached, let_go = threading.Event(), threading.Event()

    def intercept(words: Sequence[str]) -> Result | None:
        if words[0] == program and not reached.is_set():
            reached.set()
            assert let_go.wait(expect.PATIENCE_SECONDS)
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
        assert formatting.wait(expect.PATIENCE_SECONDS)
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
        assert formatting.wait(expect.PATIENCE_SECONDS)
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


# Found later, in the drivers named, in kubelet and in the programs below.


@pytest.mark.variation
def test_unpublish_answered_ok_though_the_place_could_not_be_removed(
    client: Client,
    host: AnyHost,
    staged: csi.Volume,
    staging: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LocalPV-LVM: the next pod then found the device mounted already."""
    client.publish(staged, staging, target)

    def busy(_path: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patched:
        patched.setattr(host.kernel, "remove_directory", busy)
        with pytest.raises(grpc.RpcError):
            client.unpublish(staged.volume_id, target)
    client.unpublish(staged.volume_id, target)
    assert not target.exists()
    client.publish(staged, staging, target)
    client.unpublish(staged.volume_id, target)


@pytest.mark.parametrize("fs_type", chosen.kinds(["xfs", "btrfs", "ext4"], usual=["xfs"]))
def test_a_clone_is_refused_beside_its_source_for_the_same_uuid(
    client: Client, host: AnyHost, fs_type: str
) -> None:
    """TopoLVM, ceph-csi, Longhorn and others: "Filesystem has duplicate UUID - can't mount"."""
    how = mounted(fs_type)
    source = client.create("pvc-1", 320 * MIB, how)
    client.stage(source, host.directory / "source", how)
    clone = client.create("pvc-2", 320 * MIB, how, source=of_volume(source.volume_id))
    client.stage(clone, host.directory / "clone", how)
    for one, place in ((clone, "clone"), (source, "source")):
        client.unstage(one.volume_id, host.directory / place)


@pytest.mark.variation
@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
def test_a_restore_that_is_larger_keeps_the_old_size(
    client: Client, host: AnyHost, target: Path, fs_type: str
) -> None:
    """LINSTOR: the volume had the snapshot's size, and the file system never grew."""
    how, staging = mounted(fs_type), host.directory / "restored"
    volume = client.create("pvc-1", 320 * MIB, how)
    client.stage(volume, host.directory / "first", how)
    client.unstage(volume.volume_id, host.directory / "first")
    taken = client.snapshot("monday", volume.volume_id)
    larger = client.create("pvc-2", 480 * MIB, how, source=of_snapshot(taken.snapshot_id))
    assert larger.capacity_bytes == 480 * MIB
    client.stage(larger, staging, how)
    client.publish(larger, staging, target, how)
    assert client.stats(larger.volume_id, target).usage[0].total > 400 * MIB


@pytest.mark.variation
def test_a_snapshot_has_no_size_or_that_of_its_volume_now(client: Client) -> None:
    """LocalPV-LVM, open-local: a claim of a restore size of 0, or of a later one, is refused."""
    volume = client.create("pvc-1", 64 * MIB, block())
    first = client.snapshot("monday", volume.volume_id)
    assert first.size_bytes == 64 * MIB
    client.delete_snapshot(first.snapshot_id)
    second = client.snapshot("tuesday", volume.volume_id)
    client.expand(volume.volume_id, 96 * MIB)
    third = client.snapshot("wednesday", volume.volume_id)
    sizes = {one.snapshot_id: one.size_bytes for one in client.snapshots()}
    assert sizes == {second.snapshot_id: 64 * MIB, third.snapshot_id: 96 * MIB}
    client.create("pvc-2", 64 * MIB, block(), source=of_snapshot(second.snapshot_id))


@pytest.mark.variation
def test_a_restore_smaller_than_its_snapshot_is_made_and_cut_off(client: Client) -> None:
    """LocalPV-LVM, ceph-csi: refused with INTERNAL, or made without the end of the data."""
    volume = client.create("pvc-1", 64 * MIB, block())
    taken = client.snapshot("monday", volume.volume_id)
    # What is required is a least: the copy has all of the snapshot.
    copy = client.create("pvc-2", 32 * MIB, block(), source=of_snapshot(taken.snapshot_id))
    assert copy.capacity_bytes == 64 * MIB


@pytest.mark.variation
def test_a_volume_in_use_cannot_grow_once_the_driver_has_started_again(
    host: AnyHost, config: Config, staging: Path, target: Path
) -> None:
    """TopoLVM: the device nodes that an earlier process had made were gone."""
    with served(host, config) as (_, client):
        volume = client.create("pvc-1", 64 * MIB, mounted("ext4"))
        client.stage(volume, staging)
        client.publish(volume, staging, target)
    with served(host, config) as (_, client):
        assert client.node_expand(volume.volume_id, target, 96 * MIB).capacity_bytes == 96 * MIB
        assert client.stats(volume.volume_id, target).usage[0].total > 64 * MIB
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)


@pytest.mark.variation
def test_a_capacity_is_told_that_the_device_has_not(
    client: Client, host: AnyHost, group: str
) -> None:
    """LocalPV-LVM: what was asked was told, and lvm2 had rounded it up."""
    for number, size in enumerate((1, 100_000_000, 64 * MIB + 1)):
        volume = client.create(f"pvc-{number}", size, block())
        device = host.devices.find(group, f"vol-pvc-{number}")
        assert device is not None
        assert host.kernel.device_size_bytes(device.path) == volume.capacity_bytes >= size


@pytest.mark.parametrize("access", chosen.kinds(["mount", "block"], usual=["block"]))
def test_files_are_left_in_kubelet_s_directories(
    client: Client, host: AnyHost, access: str
) -> None:
    """kubelet: "orphaned pod found, but volume paths are still present on disk"."""
    how = block() if access == "block" else mounted("ext4")
    volume = client.create("pvc-1", 64 * MIB, how)
    pods = host.directory / "pods"
    place = pods / "a" / "volumes" / "pvc-1"
    place.mkdir(parents=True)
    staging = host.directory / "staging"
    for read_only in (False, True):
        client.stage(volume, staging, how)
        client.publish(volume, staging, place / "mount", how, read_only=read_only)
        client.unpublish(volume.volume_id, place / "mount")
        client.unstage(volume.volume_id, staging)
        assert list(place.iterdir()) == []
        assert table.read(host.kernel).under(str(host.directory)) == ()


@pytest.mark.variation
def test_a_stale_directory_of_before_a_reboot_blocks_unpublish_or_publish(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path, target: Path
) -> None:
    """LocalPV-ZFS, directpv: the directory is there still, and nothing is mounted on it."""
    target.mkdir()
    client.unpublish(staged.volume_id, target)
    assert not target.exists()
    target.mkdir()
    client.publish(staged, staging, target)
    client.unpublish(staged.volume_id, target)
    staging_of_another = host.directory / "empty"
    staging_of_another.mkdir()
    client.unstage(staged.volume_id, staging_of_another)
    assert table.read(host.kernel).at(str(staging))


@pytest.mark.variation
@pytest.mark.parametrize("exit_code", [1, 2])
def test_errors_that_fsck_mended_keep_a_volume_from_being_mounted(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path, exit_code: int
) -> None:
    """e2fsck(8): 1 says that errors were corrected, and 2 that a root should reboot."""
    client.unstage(staged.volume_id, staging)

    def mended(words: Sequence[str]) -> Result | None:
        return Result(exit_code, "", "FIXED.") if words[0] == "fsck.ext4" else None

    host.intercept = mended
    client.stage(staged, staging)
    client.unstage(staged.volume_id, staging)


@pytest.mark.variation
def test_a_damaged_file_system_is_formatted_or_repaired_with_loss(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path
) -> None:
    """Longhorn: "UNEXPECTED INCONSISTENCY", a mount that failed, and then mkfs."""
    client.unstage(staged.volume_id, staging)
    host.commands.clear()

    def damaged(words: Sequence[str]) -> Result | None:
        if words[0] != "fsck.ext4":
            return None
        return Result(4, "", "UNEXPECTED INCONSISTENCY; RUN fsck MANUALLY.")

    host.intercept = damaged
    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", "damaged", "e2fsck"):
            client.stage(staged, staging)
    assert not any(words[0].startswith(("mkfs", "e2fsck")) for words in host.commands)
    assert not table.read(host.kernel).at(str(staging))


@pytest.mark.variation
def test_a_pool_that_fails_its_check_is_an_internal_error(
    client: Client, host: AnyHost, volume: csi.Volume, group: str, staging: Path
) -> None:
    """thin-provisioning-tools: status 64 since 1.0, for what older versions passed."""
    host.deactivate(group, "vol-pvc-1")

    def failed(words: Sequence[str]) -> Result | None:
        if words[:2] != ("lvm", "lvchange"):
            return None
        return Result(5, "", "  Check of pool d/p failed (status:64). Manual repair required!")

    host.intercept = failed
    with expect.code("FAILED_PRECONDITION", "metadata are damaged", "status:64"):
        client.stage(volume, staging)


def test_two_volumes_at_once_get_the_same_room(client: Client, host: AnyHost, group: str) -> None:
    """TopoLVM, LocalPV-LVM: both were scheduled on room for one, and one was left half made."""
    size = client.capacity().available_capacity * 6 // 10

    def create(name: str) -> str:
        try:
            client.create(name, size, block())
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    with ThreadPoolExecutor(2) as callers:
        codes = list(callers.map(create, ("pvc-1", "pvc-2")))
    assert "OK" in codes
    assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED", "ABORTED"}
    while "ABORTED" in codes:
        codes = [create("pvc-1"), create("pvc-2")]
    assert sorted(codes) == ["OK", "RESOURCE_EXHAUSTED"]
    assert len(names_in(host, group)) == 1


@pytest.mark.variation
def test_a_deleted_volume_takes_its_snapshots_along(
    client: Client, host: AnyHost, volume: csi.Volume, group: str
) -> None:
    """LocalPV-LVM, LINSTOR: lvremove took the copy-on-write snapshots with their origin."""
    taken = client.snapshot("monday", volume.volume_id)
    with expect.code("FAILED_PRECONDITION", taken.snapshot_id):
        client.delete(volume.volume_id)
    assert names_in(host, group) == {"vol-pvc-1", "snap-monday"}
    client.delete_snapshot(taken.snapshot_id)
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_the_parent_of_a_place_is_missing(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path
) -> None:
    """Longhorn: "no such file or directory", answered OK, with the data on the node's own disk."""
    place = host.directory / "pods" / "a" / "mount"
    try:
        client.publish(staged, staging, place)
    except grpc.RpcError:
        assert not place.exists()
    else:
        assert table.read(host.kernel).at(str(place))
        client.unpublish(staged.volume_id, place)


def test_lvm_commands_on_an_idle_node(host: AnyHost, service: Service) -> None:
    idle = threading.Event()
    host.intercept = lambda words: idle.set()
    assert not idle.wait(1)
