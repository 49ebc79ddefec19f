"""The Node's answers, right and wrong requests alike, and after what happens behind its back."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chosen
import expect
import pytest
from csi_client import Client
from fakes import kubelet
from real.any import AnyHost, device

from agent.core.settings import TOPOLOGY_KEY, Config
from agent.csi.client import Mode, block, mounted
from lvm import report
from mount import filesystem, loop, table
from proto import csi_pb2 as csi

MIB = 1 << 20


def formats(host: AnyHost) -> int:
    return sum(1 for words in host.commands if words[0].startswith("mkfs"))


@pytest.mark.variation
def test_the_node_tells_who_and_where_it_is(client: Client) -> None:
    info = client.node.NodeGetInfo(csi.NodeGetInfoRequest())
    assert info.node_id == "here"
    assert dict(info.accessible_topology.segments) == {TOPOLOGY_KEY: "here"}


def test_a_volume_is_formatted_once_in_its_life(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    for _ in range(3):
        client.stage(volume, staging)
        client.unstage(volume.volume_id, staging)
    assert formats(host) == 1


def test_a_volume_that_is_not_active_is_activated_by_staging(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, group: str
) -> None:
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)
    host.deactivate(group, "vol-pvc-1")

    client.stage(volume, staging)

    assert table.read(host.kernel).at(str(staging))
    assert formats(host) == 1


def test_a_raw_block_volume_that_is_not_active_is_activated_by_staging(
    client: Client, host: AnyHost, staging: Path, target: Path, group: str
) -> None:
    volume = client.create("pvc-1", 16 * MIB, block())
    host.deactivate(group, "vol-pvc-1")
    with expect.code("FAILED_PRECONDITION", "stage"):
        client.publish(volume, staging, target, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    assert host.kernel.device_size_bytes(str(target)) == 16 * MIB


def test_a_file_system_that_carver_did_not_make_is_left_alone(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, group: str
) -> None:
    host.write(device(host, group, "vol-pvc-1"), "ext4")
    other = mounted("xfs")
    with expect.code("FAILED_PRECONDITION", "holds ext4", "xfs"):
        client.stage(volume, staging, other)
    assert formats(host) == 0
    assert table.read(host.kernel).at(str(staging)) == ()


def test_a_crash_between_mkfs_and_its_tag_is_finished_by_the_next_call(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, group: str
) -> None:
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)
    tag = "carver.formatted=ext4"
    host.lvm("lvchange", "--deltag", tag, "--", f"{group}/vol-pvc-1")
    client.stage(volume, staging)
    assert tag in report.read(host.lvm).group(group).volume("vol-pvc-1").tags
    assert formats(host) == 1


@pytest.mark.parametrize("fs_type", chosen.kinds(["ext4", "xfs", "btrfs"], usual=["ext4"]))
def test_what_an_lvcreate_that_was_killed_did_not_wipe_is_not_taken_for_its_own(
    client: Client, host: AnyHost, staging: Path, group: str, fs_type: str
) -> None:
    """lvm2 writes its metadata, tags and all, before it wipes the first sectors."""
    volume = client.create("pvc-2", 304 * MIB, mounted(fs_type))
    path = device(host, group, "vol-pvc-2")
    host.write(path, fs_type)
    with expect.code("FAILED_PRECONDITION", f"{path} holds {fs_type}", "carver.formatted"):
        client.stage(volume, staging, mounted(fs_type))
    assert formats(host) == 0
    assert table.read(host.kernel).at(str(staging)) == ()
    # Whoever made it there by hand may say so.
    host.lvm("lvchange", "--addtag", f"carver.formatted={fs_type}", "--", f"{group}/vol-pvc-2")
    client.stage(volume, staging, mounted(fs_type))
    assert formats(host) == 0


def test_a_file_system_whose_uuid_the_class_gives_is_known_without_its_tag(
    client: Client, host: AnyHost, staging: Path, group: str
) -> None:
    uuid = "7f1c2a1e-52f5-4f0e-9a55-0f3f5d3f0c11"
    options = {"mkfsOptions": f"-U {uuid}"}
    volume = client.create("pvc-2", 64 * MIB, mounted("ext4"), parameters=options)
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)
    found = filesystem.probe(host.kernel, device(host, group, "vol-pvc-2"))
    assert found is not None
    assert found.uuid == uuid
    host.lvm("lvchange", "--deltag", "carver.formatted=ext4", "--", f"{group}/vol-pvc-2")
    client.stage(volume, staging)


def test_a_formatted_volume_that_is_blank_now_is_not_formatted_again(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, group: str
) -> None:
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)
    host.erase(device(host, group, "vol-pvc-1"))
    with expect.code("FAILED_PRECONDITION", "was formatted with ext4", "backup"):
        client.stage(volume, staging)
    assert formats(host) == 1


def test_an_existing_ext4_is_checked_before_it_is_mounted_and_a_new_one_is_not(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    programs = [[words[0] for words in host.commands if words[0] != "lvm"]]
    for _ in range(2):
        host.commands.clear()
        client.stage(volume, staging)
        programs.append([words[0] for words in host.commands])
        client.unstage(volume.volume_id, staging)
    assert programs == [[], ["lvm", "mkfs.ext4", "lvm"], ["lvm", "fsck.ext4"]]


def test_a_damaged_file_system_is_not_mounted(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, group: str
) -> None:
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)
    host.damage(device(host, group, "vol-pvc-1"))
    with expect.code("FAILED_PRECONDITION", "is damaged", "e2fsck -f"):
        client.stage(volume, staging)
    assert table.read(host.kernel).at(str(staging)) == ()


@pytest.mark.variation
def test_staging_again_with_another_file_system_is_refused(
    client: Client, volume: csi.Volume, staging: Path
) -> None:
    client.stage(volume, staging)
    with expect.code("ALREADY_EXISTS", "ext4", "xfs"):
        client.stage(volume, staging, mounted("xfs"))
    with expect.code("ALREADY_EXISTS", "noatime"):
        client.stage(volume, staging, mounted("ext4", ["noatime"]))


def test_staging_never_covers_another_mount(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    other = client.create("pvc-2", 64 * MIB)
    client.stage(volume, staging)
    with expect.code("FAILED_PRECONDITION", str(staging), "not this volume"):
        client.stage(other, staging)
    assert len(table.read(host.kernel).at(str(staging))) == 1


@pytest.mark.variation
def test_a_volume_that_is_not_there_is_not_found(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    gone = csi.Volume(volume_id=volume.volume_id + "x")
    for capability in (mounted(), block()):
        with expect.code("NOT_FOUND"):
            client.stage(gone, staging, capability)
        with expect.code("NOT_FOUND"):
            client.publish(gone, staging, target, capability)
    with expect.code("NOT_FOUND"):
        client.stats(gone.volume_id, target)
    with expect.code("NOT_FOUND"):
        client.node_expand(gone.volume_id, target)
    assert not staging.exists()
    assert not target.exists()


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a//b", "/a\n", "/", "/" + "x" * 300])
@pytest.mark.variation
def test_a_path_that_no_mount_may_have_is_refused(
    client: Client, volume: csi.Volume, staging: Path, path: str
) -> None:
    with expect.code("INVALID_ARGUMENT", "staging_target_path"):
        client.stage(volume, path)
    with expect.code("INVALID_ARGUMENT", "target_path"):
        client.publish(volume, staging, path)
    with expect.code("INVALID_ARGUMENT", "target_path"):
        client.unpublish(volume.volume_id, path)
    with expect.code("NOT_FOUND"):
        client.stats(volume.volume_id, path)


@pytest.mark.parametrize("through_a_link", [False, True])
@pytest.mark.variation
def test_a_path_outside_kubelet_s_directory_is_refused(
    client: Client,
    host: AnyHost,
    volume: csi.Volume,
    staging: Path,
    tmp_path_factory: pytest.TempPathFactory,
    through_a_link: bool,
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    link = host.directory / "link"
    link.symlink_to(outside)
    path = str((link if through_a_link else outside) / "target")
    client.stage(volume, staging)
    for access in (mounted(), block()):
        with expect.code("INVALID_ARGUMENT", path, "kubelet_dir"):
            client.stage(volume, path, access)
        with expect.code("INVALID_ARGUMENT", path, "kubelet_dir"):
            client.publish(volume, staging, path, access)
    with expect.code("INVALID_ARGUMENT", path, "kubelet_dir"):
        client.unstage(volume.volume_id, path)
    with expect.code("INVALID_ARGUMENT", path, "kubelet_dir"):
        client.unpublish(volume.volume_id, path)
    with expect.code("NOT_FOUND", path):
        client.stats(volume.volume_id, path)
    assert list(outside.iterdir()) == []


@pytest.mark.variation
def test_required_fields_are_named_when_they_are_missing(client: Client) -> None:
    node = client.node
    nothing = [
        (node.NodeStageVolume, csi.NodeStageVolumeRequest(), "volume_id"),
        (node.NodeStageVolume, csi.NodeStageVolumeRequest(volume_id="v"), "staging_target_path"),
        (
            node.NodeStageVolume,
            csi.NodeStageVolumeRequest(volume_id="v", staging_target_path="/s"),
            "volume_capability",
        ),
        (
            node.NodeUnstageVolume,
            csi.NodeUnstageVolumeRequest(staging_target_path="/s"),
            "volume_id",
        ),
        (
            node.NodeUnstageVolume,
            csi.NodeUnstageVolumeRequest(volume_id="v"),
            "staging_target_path",
        ),
        (node.NodePublishVolume, csi.NodePublishVolumeRequest(), "volume_id"),
        (node.NodePublishVolume, csi.NodePublishVolumeRequest(volume_id="v"), "target_path"),
        (
            node.NodePublishVolume,
            csi.NodePublishVolumeRequest(volume_id="v", target_path="/t"),
            "volume_capability",
        ),
        (
            node.NodePublishVolume,
            csi.NodePublishVolumeRequest(
                volume_id="v", target_path="/t", volume_capability=mounted()
            ),
            "staging_target_path",
        ),
        (node.NodeUnpublishVolume, csi.NodeUnpublishVolumeRequest(target_path="/t"), "volume_id"),
        (node.NodeUnpublishVolume, csi.NodeUnpublishVolumeRequest(volume_id="v"), "target_path"),
        (node.NodeGetVolumeStats, csi.NodeGetVolumeStatsRequest(volume_path="/t"), "volume_id"),
        (node.NodeGetVolumeStats, csi.NodeGetVolumeStatsRequest(volume_id="v"), "volume_path"),
        (node.NodeExpandVolume, csi.NodeExpandVolumeRequest(volume_path="/t"), "volume_id"),
        (node.NodeExpandVolume, csi.NodeExpandVolumeRequest(volume_id="v"), "volume_path"),
    ]
    for method, request, field in nothing:
        with expect.code("INVALID_ARGUMENT", field):
            method(request)  # type: ignore[operator]


@pytest.mark.variation
def test_publishing_before_staging_says_so(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    with expect.code("FAILED_PRECONDITION", "not staged"):
        client.publish(volume, staging, target)
    assert not target.exists()


@pytest.mark.variation
def test_publishing_never_covers_another_mount(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, target: Path
) -> None:
    other, other_staging = client.create("pvc-2", 64 * MIB), host.directory / "other"
    client.stage(volume, staging)
    client.stage(other, other_staging)
    client.publish(volume, staging, target)
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.publish(other, other_staging, target)
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.unpublish(other.volume_id, target)
    assert len(table.read(host.kernel).at(str(target))) == 1


def test_unpublishing_never_unmounts_what_is_not_the_volume(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    client.stage(volume, staging)
    with expect.code("FAILED_PRECONDITION", str(staging)):
        client.unpublish("made-up", staging)
    assert table.read(host.kernel).at(str(staging))


@pytest.mark.variation
def test_unpublishing_and_unstaging_what_is_not_there_succeeds(
    client: Client, staging: Path, target: Path
) -> None:
    client.unpublish("made-up", target)
    client.unstage("made-up", staging)


@pytest.mark.variation
def test_unpublishing_leaves_a_directory_with_data_alone(
    client: Client, volume: csi.Volume, target: Path
) -> None:
    target.mkdir()
    (target / "precious").write_text("data")
    with expect.code("FAILED_PRECONDITION", str(target), "not empty"):
        client.unpublish(volume.volume_id, target)
    assert (target / "precious").read_text() == "data"


@pytest.mark.variation
def test_publishing_where_something_else_lies_is_refused(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    client.stage(volume, staging)
    target.write_text("data")
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.publish(volume, staging, target)
    assert target.read_text() == "data"


@pytest.mark.parametrize("kind", ["raw", "ext4"])
def test_a_volume_in_use_grows_whatever_path_the_caller_has_for_it(
    client: Client, host: AnyHost, staging: Path, target: Path, kind: str
) -> None:
    shared = Mode.SINGLE_NODE_MULTI_WRITER
    how = block(mode=shared) if kind == "raw" else mounted(kind, mode=shared)
    volume, other = client.create("pvc-1", 64 * MIB, how), client.create("pvc-2", 64 * MIB)
    elsewhere = host.directory / "elsewhere"
    client.stage(other, elsewhere)
    client.stage(volume, staging, how)
    gone = host.directory / "gone"
    for path in (target, gone):
        client.publish(volume, staging, path, how)
    client.unpublish(volume.volume_id, gone)
    size = 64 * MIB
    # Of the pod that ended, of none, of another volume, and what can be no path of a volume.
    for any_path in (gone, "/never", elsewhere, "relative"):
        size += 4 * MIB
        assert client.node_expand(volume.volume_id, any_path, size).capacity_bytes == size
    assert client.stats(volume.volume_id, target).usage[0].total > 70 * MIB
    assert client.stats(other.volume_id, elsewhere).usage[0].total <= 64 * MIB
    with expect.code("NOT_FOUND"):
        client.stats(volume.volume_id, gone)
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    with expect.code("NOT_FOUND", str(target)):
        client.node_expand(volume.volume_id, target, size + 4 * MIB)


@pytest.mark.variation
def test_statistics_are_of_the_volume_at_that_path_only(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    client.stage(volume, staging)
    other = client.create("pvc-2", 64 * MIB)
    units = [one.unit for one in client.stats(volume.volume_id, staging).usage]
    assert units == [csi.VolumeUsage.BYTES, csi.VolumeUsage.INODES]
    with expect.code("NOT_FOUND", str(staging)):
        client.stats(other.volume_id, staging)
    with expect.code("NOT_FOUND"):
        client.stats(volume.volume_id, host.directory)


def test_node_expansion_grows_the_volume_too_where_no_controller_call_came_first(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    client.stage(volume, staging)
    client.publish(volume, staging, target)
    before = client.stats(volume.volume_id, target).usage[0].total
    assert client.node_expand(volume.volume_id, target, 130 * MIB).capacity_bytes == 132 * MIB
    assert client.stats(volume.volume_id, target).usage[0].total > before + 32 * MIB


def test_node_expansion_works_through_a_read_only_target(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    client.stage(volume, staging)
    client.publish(volume, staging, target, read_only=True)
    before = client.stats(volume.volume_id, target).usage[0].total
    client.node_expand(volume.volume_id, target, 128 * MIB)
    assert client.stats(volume.volume_id, target).usage[0].total > before


@pytest.mark.variation
def test_node_expansion_below_the_present_size_keeps_it(
    client: Client, volume: csi.Volume, staging: Path
) -> None:
    client.stage(volume, staging)
    assert client.node_expand(volume.volume_id, staging, 1).capacity_bytes == 64 * MIB
    request = csi.NodeExpandVolumeRequest(
        volume_id=volume.volume_id,
        volume_path=str(staging),
        capacity_range=csi.CapacityRange(required_bytes=1, limit_bytes=4 * MIB),
    )
    with expect.code("OUT_OF_RANGE", "limit_bytes"):
        client.node.NodeExpandVolume(request)


@pytest.mark.variation
def test_node_expansion_without_room_is_on_record_and_a_smaller_one_succeeds(
    client: Client, volume: csi.Volume, staging: Path
) -> None:
    client.stage(volume, staging)
    room = client.capacity().available_capacity
    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", str(room), "Make room"):
            client.node_expand(volume.volume_id, staging, 68 * MIB + room)
    [told] = client.node_health(volume.volume_id).health_statuses
    assert told.reason == "ExpansionPending"
    assert "had no room" in told.message
    # A smaller claim withdraws it, also one that the volume's size meets already.
    client.node_expand(volume.volume_id, staging, 64 * MIB)
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    assert not client.node_health(volume.volume_id).health_statuses
    with expect.code("FAILED_PRECONDITION"):
        client.node_expand(volume.volume_id, staging, 68 * MIB + room)
    assert client.node_expand(volume.volume_id, staging, 72 * MIB).capacity_bytes == 72 * MIB
    # RecoverVolumeExpansionFailure: a claim that is lowered is less than the volume has by then.
    assert client.node_expand(volume.volume_id, staging, 68 * MIB).capacity_bytes == 72 * MIB
    assert client.expand(volume.volume_id, 68 * MIB).capacity_bytes == 72 * MIB


@pytest.mark.variation
def test_a_reader_only_volume_is_staged_and_published_read_only(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    client.stage(client.create("pvc-1", 64 * MIB, mounted()), staging)
    volume = client.volumes()[0]
    client.unstage(volume.volume_id, staging)
    capability = mounted(mode=Mode.SINGLE_NODE_READER_ONLY)
    client.stage(volume, staging, capability)
    client.publish(volume, staging, target, capability)
    mounts = table.read(host.kernel)
    assert mounts.at(str(staging))[-1].read_only
    assert mounts.at(str(target))[-1].read_only


@pytest.mark.variation
def test_staging_otherwise_while_a_target_holds_the_volume_is_a_state_and_no_failure(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    client.stage(volume, staging)
    client.publish(volume, staging, target)
    client.unstage(volume.volume_id, staging)
    with expect.code("FAILED_PRECONDITION", "in use"):
        client.stage(volume, staging, mounted(mode=Mode.SINGLE_NODE_READER_ONLY))
    client.unpublish(volume.volume_id, target)
    client.stage(volume, staging, mounted(mode=Mode.SINGLE_NODE_READER_ONLY))


@pytest.mark.parametrize("access", [mounted, block], ids=["mount", "block"])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.variation
def test_only_a_multi_writer_has_a_second_target(
    client: Client,
    host: AnyHost,
    staging: Path,
    target: Path,
    access: Callable[..., csi.VolumeCapability],
    read_only: bool,
) -> None:
    second = host.directory / "second"
    volume = client.create("pvc-2", 64 * MIB, access())
    client.stage(volume, staging, access())
    client.publish(volume, staging, target, access(), read_only=read_only)
    for mode in (Mode.SINGLE_NODE_WRITER, Mode.SINGLE_NODE_SINGLE_WRITER):
        with expect.code("FAILED_PRECONDITION", str(target), "one target"):
            client.publish(volume, staging, second, access(mode=mode))
    assert not second.exists()
    multi = access(mode=Mode.SINGLE_NODE_MULTI_WRITER)
    client.publish(volume, staging, second, multi)
    client.unpublish(volume.volume_id, target)
    assert table.read(host.kernel).at(str(second))


def test_a_deleted_volume_can_be_made_anew_and_is_blank(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    again = client.create("pvc-1", 64 * MIB, mounted("ext4"))
    client.stage(again, staging)
    assert formats(host) == 2


def test_a_raw_block_volume_is_never_formatted(
    client: Client, host: AnyHost, staging: Path
) -> None:
    volume = client.create("pvc-2", 64 * MIB, block())
    with expect.code("INVALID_ARGUMENT", "volume_capability", "raw block"):
        client.stage(volume, staging, mounted("ext4"))
    assert formats(host) == 0


@pytest.mark.variation
def test_a_volume_staged_without_a_wish_keeps_its_file_system(
    client: Client, host: AnyHost, staging: Path
) -> None:
    volume = client.create("pvc-2", 300 * MIB, mounted("xfs"))
    static = csi.Volume(volume_id=volume.volume_id)
    client.stage(volume, staging, mounted("xfs"))
    client.stage(static, staging, mounted())
    client.unstage(volume.volume_id, staging)
    client.stage(static, staging, mounted())
    assert table.read(host.kernel).at(str(staging))[-1].fs_type == "xfs"


@pytest.mark.parametrize("first", [False, True], ids=["read-write", "read-only"])
@pytest.mark.variation
def test_a_device_published_otherwise_at_the_same_target_is_a_conflict(
    client: Client, host: AnyHost, staging: Path, target: Path, first: bool
) -> None:
    volume = client.create("pvc-2", 16 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block(), read_only=first)
    with expect.code("ALREADY_EXISTS", str(target)):
        client.publish(volume, staging, target, block(), read_only=not first)
    assert host.kernel.device_is_read_only(str(target)) == first


def test_a_publish_that_fails_leaves_no_loop_device(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    volume = client.create("pvc-2", 16 * MIB, block())
    client.stage(volume, staging, block())
    target.mkdir()
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.publish(volume, staging, target, block(), read_only=True)
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_a_writer_is_not_published_on_a_read_only_staging_path(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, mounted(mode=Mode.SINGLE_NODE_READER_ONLY))
    with expect.code("FAILED_PRECONDITION", "read-only"):
        client.publish(volume, staging, target)
    client.publish(volume, staging, target, mounted(flags=["ro"]))


@pytest.mark.variation
def test_a_part_of_the_volume_bound_elsewhere_is_no_second_target(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path, target: Path
) -> None:
    part = host.directory / "part"
    part.mkdir()
    client.stage(volume, staging)
    client.publish(volume, staging, target)
    (staging / "sub").mkdir()
    host.kernel.bind(str(staging / "sub"), str(part), set())
    client.publish(volume, staging, target)
    client.unpublish(volume.volume_id, target)
    client.publish(volume, staging, target)
    host.kernel.unmount(str(part))


@pytest.mark.variation
def test_a_loop_device_that_somebody_else_made_is_left_alone(
    client: Client, host: AnyHost, staging: Path, target: Path, group: str
) -> None:
    volume = client.create("pvc-2", 16 * MIB, block())
    client.stage(volume, staging, block())
    other = loop.attach(host.kernel, device(host, group, "vol-pvc-2"))
    client.publish(volume, staging, target, block())
    client.unpublish(volume.volume_id, target)
    assert other in host.kernel.loop_devices()
    with expect.code("FAILED_PRECONDITION", "open"):
        client.delete(volume.volume_id)
    loop.detach(host.kernel, other)
    client.delete(volume.volume_id)


@pytest.mark.parametrize("first", chosen.kinds(["the writer", "the reader"], usual=["the writer"]))
def test_a_pod_that_reads_a_raw_block_volume_is_served_beside_one_that_writes(
    client: Client, host: AnyHost, staging: Path, group: str, first: str
) -> None:
    volume = client.create("pvc-2", 16 * MIB, block())
    client.stage(volume, staging, block())
    multi = block(Mode.SINGLE_NODE_MULTI_WRITER)
    order = ["the writer", "the reader"] if first == "the writer" else ["the reader", "the writer"]
    with contextlib.ExitStack() as pods:
        for pod in order:
            target, reads = host.directory / pod, pod == "the reader"
            for _ in range(2):
                client.publish(volume, staging, target, multi, read_only=reads)
            own = host.directory / f"{pod}, as kubelet has it"
            pods.enter_context(kubelet.Mapped(host.kernel, target, own))
            for one in order[: order.index(pod) + 1]:
                again = host.directory / one
                client.publish(volume, staging, again, multi, read_only=one == "the reader")
                assert host.kernel.device_is_read_only(str(again)) == (one == "the reader")
            client.node.NodeExpandVolume(
                csi.NodeExpandVolumeRequest(
                    volume_id=volume.volume_id,
                    volume_path=str(target),
                    capacity_range=csi.CapacityRange(required_bytes=32 * MIB),
                )
            )
            assert host.kernel.device_size_bytes(str(target)) == 32 * MIB
        number = host.kernel.device_number(device(host, group, "vol-pvc-2"))
        assert len(loop.over(host.kernel, number)) == 1
        # Kubelet has two: one on the device, one on what Carver has over it.
        others = set(host.kernel.loop_devices()) - set(loop.over(host.kernel, number))
        assert len(others) >= 2
    for pod in order:
        client.unpublish(volume.volume_id, host.directory / pod)
        assert not (host.directory / pod).exists()
    assert loop.over(host.kernel, number) == ()
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_a_reader_goes_while_kubelet_holds_the_writers_device(
    client: Client, host: AnyHost, staging: Path, target: Path, group: str
) -> None:
    volume = client.create("pvc-2", 16 * MIB, block())
    client.stage(volume, staging, block())
    multi, writer = block(Mode.SINGLE_NODE_MULTI_WRITER), host.directory / "writer"
    client.publish(volume, staging, writer, multi)
    with kubelet.Mapped(host.kernel, writer, host.directory / "own") as held:
        client.publish(volume, staging, target, multi, read_only=True)
        client.unpublish(volume.volume_id, target)
        number = host.kernel.device_number(device(host, group, "vol-pvc-2"))
        assert loop.over(host.kernel, number) == ()
        assert host.kernel.loop_status(held).backing_device
    client.unpublish(volume.volume_id, writer)


@pytest.mark.variation
def test_what_kubelet_still_reads_by_stays_until_the_volume_is_unstaged(
    client: Client, host: AnyHost, staging: Path, target: Path, group: str
) -> None:
    volume = client.create("pvc-2", 16 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block(), read_only=True)
    number = host.kernel.device_number(device(host, group, "vol-pvc-2"))
    with kubelet.Mapped(host.kernel, target, host.directory / "own"):
        client.unpublish(volume.volume_id, target)
        assert len(loop.over(host.kernel, number)) == 1
    client.unstage(volume.volume_id, staging)
    assert loop.over(host.kernel, number) == ()
    client.delete(volume.volume_id)


@pytest.mark.variation
def test_a_context_on_a_node_without_selinux_is_refused(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    """Kubelet asks for none there; the kernel would say EINVAL, and no more."""
    if host.kernel.has_selinux():
        pytest.skip("this machine has SELinux")
    context = 'context="system_u:object_r:container_file_t:s0:c1,c2"'
    with expect.code("INVALID_ARGUMENT", "context=", "SELinux, which is off"):
        client.stage(volume, staging, mounted("ext4", flags=[context]))
    assert not table.read(host.kernel).at(str(staging))
    client.stage(volume, staging, mounted("ext4"))


def test_two_volumes_at_once_never_cover_each_other_at_one_target(
    client: Client,
    host: AnyHost,
    volume: csi.Volume,
    staging: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, other_staging = client.create("pvc-2", 64 * MIB), host.directory / "other"
    client.stage(volume, staging)
    client.stage(other, other_staging)
    binding, let_go, bind = threading.Event(), threading.Event(), host.kernel.bind

    def slow(source: str, path: str, attributes: set[str]) -> None:
        binding.set()
        assert let_go.wait(60)
        bind(source, path, attributes)

    monkeypatch.setattr(host.kernel, "bind", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(client.publish, volume, staging, target)
        assert binding.wait(60)
        with expect.code("ABORTED", str(target)):
            client.publish(other, other_staging, target)
        let_go.set()
        first.result()
    assert len(table.read(host.kernel).at(str(target))) == 1


def test_a_raw_block_volume_whose_device_went_away_is_told_and_can_be_let_go(
    client: Client, host: AnyHost, staging: Path, target: Path, group: str
) -> None:
    volume = client.create("pvc-1", 16 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    # Nobody has the bound node open, so nothing keeps an operator from it.
    host.deactivate(group, "vol-pvc-1")

    with expect.code("FAILED_PRECONDITION", "went away"):
        client.stats(volume.volume_id, target)
    client.stage(volume, staging, block())
    client.unpublish(volume.volume_id, target)
    assert not target.exists()
    client.publish(volume, staging, target, block())
    assert host.kernel.device_size_bytes(str(target)) == 16 * MIB


def test_the_node_of_a_device_that_went_away_is_let_go_while_there_is_none(
    client: Client, host: AnyHost, staging: Path, target: Path, group: str
) -> None:
    volume = client.create("pvc-1", 16 * MIB, block())
    client.publish(volume, staging, target, block())
    host.deactivate(group, "vol-pvc-1")
    client.unpublish(volume.volume_id, target)
    assert not target.exists()
    assert table.read(host.kernel).at(str(target)) == ()


@pytest.mark.parametrize("program", ["mkfs.ext4", "fsck.ext4"])
@pytest.mark.variation
def test_what_outlasts_its_call_goes_on_and_the_next_call_waits_for_it(
    client: Client, config: Config, host: AnyHost, volume: csi.Volume, staging: Path, program: str
) -> None:
    if program == "fsck.ext4":
        client.stage(volume, staging)
        client.unstage(volume.volume_id, staging)
    begun, go_on = threading.Event(), threading.Event()

    def slow(words: Sequence[str]) -> None:
        if words[0] == program:
            begun.set()
            assert go_on.wait(60)

    host.intercept = slow
    with Client(config.endpoint, timeout_seconds=5) as impatient:
        for _ in range(2):
            with expect.code("ABORTED", "goes on", "has run for"):
                impatient.stage(volume, staging)
    assert begun.is_set()
    assert not table.read(host.kernel).at(str(staging))

    go_on.set()
    client.stage(volume, staging)
    assert table.read(host.kernel).at(str(staging))
    assert formats(host) == 1


@pytest.mark.variation
def test_what_went_wrong_behind_a_call_is_told_to_the_next(
    client: Client,
    config: Config,
    host: AnyHost,
    volume: csi.Volume,
    staging: Path,
    mkfs_fails: threading.Event,
) -> None:
    with (
        Client(config.endpoint, timeout_seconds=5) as impatient,
        expect.code("ABORTED", "mkfs of volume"),
    ):
        impatient.stage(volume, staging)
    mkfs_fails.set()
    with expect.code("INTERNAL", "no luck"):
        client.stage(volume, staging)
    client.stage(volume, staging)
    assert table.read(host.kernel).at(str(staging))
