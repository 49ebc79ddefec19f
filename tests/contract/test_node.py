"""The Node's answers to right and wrong requests, and after changes that others make."""

import contextlib
import errno
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chosen
import expect
import pytest
from csi_client import Client
from fakes import kubelet
from real.any import AnyHost, device

from agent.csi.client import Mode, block, mounted
from agent.settings.settings import TOPOLOGY_KEY, Config
from lvm import report
from mount import filesystem, loop, table
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
MULTI_WRITER, READER_ONLY = Mode.SINGLE_NODE_MULTI_WRITER, Mode.SINGLE_NODE_READER_ONLY


@pytest.fixture
def formatted(client: Client, staged: csi.Volume, staging: Path) -> csi.Volume:
    """The volume, which was staged and unstaged once."""
    client.unstage(staged.volume_id, staging)
    return staged


@pytest.fixture
def raw(client: Client, staging: Path) -> csi.Volume:
    """A raw block volume of 16 MiB, staged."""
    volume = client.create("raw", 16 * MIB, block())
    client.stage(volume, staging, block())
    return volume


@pytest.fixture
def other(client: Client, host: AnyHost) -> csi.Volume:
    """Another volume, staged at `other`."""
    volume = client.create("pvc-2", 64 * MIB)
    client.stage(volume, host.directory / "other")
    return volume


def formats(host: AnyHost) -> int:
    return sum(1 for words in host.commands if words[0].startswith("mkfs"))


def mounts(host: AnyHost, path: Path) -> Sequence[table.Mount]:
    return table.read(host.kernel).at(str(path))


def loops(host: AnyHost, group: str) -> Sequence[str]:
    """The loop devices over the raw block volume."""
    return loop.loop_devices_over(
        host.kernel, host.kernel.device_number(device(host, group, "vol-raw"))
    )


@pytest.mark.variation
def test_node_get_info_has_the_node_and_its_topology(client: Client) -> None:
    info = client.node.NodeGetInfo(csi.NodeGetInfoRequest())
    assert info.node_id == "here"
    assert dict(info.accessible_topology.segments) == {TOPOLOGY_KEY: "here"}


def test_staging_activates_an_inactive_raw_block_volume(
    client: Client, host: AnyHost, raw: csi.Volume, staging: Path, target: Path, group: str
) -> None:
    client.unstage(raw.volume_id, staging)
    host.deactivate(group, "vol-raw")
    client.stage(raw, staging, block())
    client.publish(raw, staging, target, block())
    assert host.kernel.device_size_bytes(str(target)) == 16 * MIB


def test_a_crash_between_mkfs_and_its_tag_is_finished_by_the_next_call(
    client: Client, host: AnyHost, formatted: csi.Volume, staging: Path, group: str
) -> None:
    tag = "carver.formatted=ext4"
    host.lvm("lvchange", "--deltag", tag, "--", f"{group}/vol-pvc-1")
    client.stage(formatted, staging)
    assert tag in report.read(host.lvm).group(group).volume("vol-pvc-1").tags
    assert formats(host) == 1


@pytest.mark.parametrize("fs_type", chosen.kinds(filesystem.FILE_SYSTEMS, usual=["ext4"]))
def test_a_file_system_that_a_killed_lvcreate_did_not_wipe_is_not_adopted(
    client: Client, host: AnyHost, staging: Path, group: str, fs_type: str
) -> None:
    """lvm2 writes its metadata, tags and all, before it wipes the first sectors."""
    volume = client.create("pvc-2", 304 * MIB, mounted(fs_type))
    path = device(host, group, "vol-pvc-2")
    host.write(path, fs_type)
    with expect.code("FAILED_PRECONDITION", f"{path}: it holds {fs_type}", "carver.formatted"):
        client.stage(volume, staging, mounted(fs_type))
    assert mounts(host, staging) == ()
    # An operator who made it there may say so.
    host.lvm("lvchange", "--addtag", f"carver.formatted={fs_type}", "--", f"{group}/vol-pvc-2")
    client.stage(volume, staging, mounted(fs_type))
    assert formats(host) == 0


def test_a_file_system_with_the_uuid_of_its_class_is_known_without_its_tag(
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
    client: Client, host: AnyHost, formatted: csi.Volume, staging: Path, group: str
) -> None:
    host.erase(device(host, group, "vol-pvc-1"))
    with expect.code("FAILED_PRECONDITION", "was formatted with ext4", "backup"):
        client.stage(formatted, staging)
    assert formats(host) == 1


def test_ext4_is_formatted_once_and_checked_at_each_later_stage(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    programs = [[words[0] for words in host.commands if words[0] != "lvm"]]
    for _ in range(3):
        host.commands.clear()
        client.stage(volume, staging)
        programs.append([words[0] for words in host.commands])
        client.unstage(volume.volume_id, staging)
    assert programs[:3] == [[], ["lvm", "mkfs.ext4", "lvm"], ["lvm", "fsck.ext4"]]
    assert set(programs[3]) <= {"lvm", "fsck.ext4"}


def test_a_damaged_file_system_is_not_mounted(
    client: Client, host: AnyHost, formatted: csi.Volume, staging: Path, group: str
) -> None:
    host.damage(device(host, group, "vol-pvc-1"))
    with expect.code("FAILED_PRECONDITION", "is damaged", "e2fsck -f"):
        client.stage(formatted, staging)
    assert mounts(host, staging) == ()


@pytest.mark.long_on_lvm
def test_xfs_is_made_anew_where_its_mkfs_was_killed(
    client: Client, host: AnyHost, staging: Path
) -> None:
    """What that left has the volume's own UUID, by libblkid; the kernel never mounts it."""
    volume = client.create("pvc-1", 320 * MIB, mounted("xfs"))

    def killed(words: Sequence[str]) -> Result | None:
        if words[0] != "mkfs.xfs":
            return None
        host.intercept = lambda _words: None
        assert host.run(*words).exit_code == 0
        host.unfinish(words[-1])
        with pytest.raises(OSError, match=os.strerror(errno.EUCLEAN)):
            host.kernel.mount(words[-1], str(host.directory), "xfs", frozenset(), ())
        return Result(-9, "", "Killed")

    host.intercept = killed
    with expect.code("INTERNAL", "Killed"):
        client.stage(volume, staging, mounted("xfs"))
    client.stage(volume, staging, mounted("xfs"))
    assert mounts(host, staging) != ()


@pytest.mark.variation
def test_staging_again_with_other_options_or_another_file_system_is_refused(
    client: Client, staged: csi.Volume, staging: Path
) -> None:
    with expect.code("ALREADY_EXISTS", "ext4", "xfs"):
        client.stage(staged, staging, mounted("xfs"))
    with expect.code("ALREADY_EXISTS", "noatime"):
        client.stage(staged, staging, mounted("ext4", ["noatime"]))


def test_staging_never_covers_another_mount(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path
) -> None:
    with expect.code("FAILED_PRECONDITION", str(staging), "not this volume"):
        client.stage(client.create("pvc-2", 64 * MIB), staging)
    assert len(mounts(host, staging)) == 1


@pytest.mark.variation
def test_a_volume_that_does_not_exist_is_not_found(
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


def refuse_path(
    client: Client, volume: csi.Volume, staging: Path, path: str, words: Mapping[str, Sequence[str]]
) -> None:
    """Each call refuses the path; `words` are of its message, by the path's field."""
    staged, published = words["staging_target_path"], words["target_path"]
    for access in (mounted(), block()):
        with expect.code("INVALID_ARGUMENT", *staged):
            client.stage(volume, path, access)
        with expect.code("INVALID_ARGUMENT", *published):
            client.publish(volume, staging, path, access)
    with expect.code("INVALID_ARGUMENT", *staged):
        client.unstage(volume.volume_id, path)
    with expect.code("INVALID_ARGUMENT", *published):
        client.unpublish(volume.volume_id, path)
    with expect.code("NOT_FOUND"):
        client.stats(volume.volume_id, path)


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a//b", "/a\n", "/", "/" + "x" * 300])
@pytest.mark.variation
def test_an_invalid_path_is_refused(
    client: Client, volume: csi.Volume, staging: Path, path: str
) -> None:
    words = {field: [field] for field in ("staging_target_path", "target_path")}
    refuse_path(client, volume, staging, path, words)


@pytest.mark.parametrize("through_a_link", [False, True])
@pytest.mark.variation
def test_a_path_outside_kubelet_s_directory_is_refused(
    client: Client,
    host: AnyHost,
    staged: csi.Volume,
    staging: Path,
    tmp_path_factory: pytest.TempPathFactory,
    through_a_link: bool,
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    link = host.directory / "link"
    link.symlink_to(outside)
    path = str((link if through_a_link else outside) / "target")
    words = [path, "kubelet_dir"]
    refuse_path(client, staged, staging, path, dict.fromkeys(FIELDS, words))
    assert list(outside.iterdir()) == []


FIELDS = {
    "volume_id": "v",
    "staging_target_path": "/s",
    "target_path": "/t",
    "volume_path": "/t",
    "volume_capability": mounted(),
}


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("StageVolume", ("volume_id", "staging_target_path", "volume_capability")),
        ("UnstageVolume", ("volume_id", "staging_target_path")),
        (
            "PublishVolume",
            ("volume_id", "target_path", "volume_capability", "staging_target_path"),
        ),
        ("UnpublishVolume", ("volume_id", "target_path")),
        ("GetVolumeStats", ("volume_id", "volume_path")),
        ("ExpandVolume", ("volume_id", "volume_path")),
    ],
)
@pytest.mark.variation
def test_required_fields_are_named_when_they_are_missing(
    client: Client, method: str, fields: Sequence[str]
) -> None:
    for missing in fields:
        given = {one: FIELDS[one] for one in fields if one != missing}
        request = getattr(csi, f"Node{method}Request")(**given)
        with expect.code("INVALID_ARGUMENT", missing):
            getattr(client.node, f"Node{method}")(request)


@pytest.mark.variation
def test_publishing_never_covers_another_mount(
    client: Client,
    host: AnyHost,
    staged: csi.Volume,
    other: csi.Volume,
    staging: Path,
    target: Path,
) -> None:
    client.publish(staged, staging, target)
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.publish(other, host.directory / "other", target)
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.unpublish(other.volume_id, target)
    assert len(mounts(host, target)) == 1


def test_unpublishing_never_unmounts_another_volume(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path
) -> None:
    with expect.code("FAILED_PRECONDITION", str(staging)):
        client.unpublish("made-up", staging)
    assert mounts(host, staging)


@pytest.mark.variation
def test_unpublishing_and_unstaging_an_unknown_volume_succeeds(
    client: Client, staging: Path, target: Path
) -> None:
    client.unpublish("made-up", target)
    client.unstage("made-up", staging)


@pytest.mark.variation
def test_data_at_the_target_are_left_alone(
    client: Client, staged: csi.Volume, staging: Path, target: Path
) -> None:
    target.write_text("data")
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.publish(staged, staging, target)
    assert target.read_text() == "data"
    target.unlink()
    target.mkdir()
    (target / "precious").write_text("data")
    with expect.code("FAILED_PRECONDITION", str(target), "not empty"):
        client.unpublish(staged.volume_id, target)
    assert (target / "precious").read_text() == "data"


@pytest.mark.parametrize("kind", chosen.kinds(["raw", "ext4"], usual=["ext4"]))
def test_a_volume_in_use_grows_at_any_path_that_the_caller_gives(
    client: Client, host: AnyHost, other: csi.Volume, staging: Path, target: Path, kind: str
) -> None:
    how = block(MULTI_WRITER) if kind == "raw" else mounted(kind, mode=MULTI_WRITER)
    volume = client.create("pvc-1", 64 * MIB, how)
    elsewhere, gone = host.directory / "other", host.directory / "gone"
    client.stage(volume, staging, how)
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
    with expect.code("FAILED_PRECONDITION", "grows when it is staged"):
        client.node_expand(volume.volume_id, target, size + 4 * MIB)


@pytest.mark.variation
def test_statistics_are_of_the_volume_at_that_path_only(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path
) -> None:
    other = client.create("pvc-2", 64 * MIB)
    units = [one.unit for one in client.stats(staged.volume_id, staging).usage]
    assert units == [csi.VolumeUsage.BYTES, csi.VolumeUsage.INODES]
    with expect.code("NOT_FOUND", str(staging)):
        client.stats(other.volume_id, staging)
    with expect.code("NOT_FOUND"):
        client.stats(staged.volume_id, host.directory)


def test_node_expansion_grows_a_file_system_through_a_read_only_target(
    client: Client, staged: csi.Volume, staging: Path, target: Path
) -> None:
    client.publish(staged, staging, target, read_only=True)
    before = client.stats(staged.volume_id, target).usage[0].total
    assert client.node_expand(staged.volume_id, target, 130 * MIB).capacity_bytes == 132 * MIB
    assert client.stats(staged.volume_id, target).usage[0].total > before + 32 * MIB


@pytest.mark.variation
def test_node_expansion_below_the_present_size_keeps_it(
    client: Client, staged: csi.Volume, staging: Path
) -> None:
    assert client.node_expand(staged.volume_id, staging, 1).capacity_bytes == 64 * MIB
    request = csi.NodeExpandVolumeRequest(
        volume_id=staged.volume_id,
        volume_path=str(staging),
        capacity_range=csi.CapacityRange(required_bytes=1, limit_bytes=4 * MIB),
    )
    with expect.code("OUT_OF_RANGE", "limit_bytes"):
        client.node.NodeExpandVolume(request)


@pytest.mark.variation
def test_node_expansion_without_room_is_recorded_and_a_smaller_one_succeeds(
    client: Client, staged: csi.Volume, staging: Path
) -> None:
    volume_id, room = staged.volume_id, client.capacity().available_capacity
    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", str(room), "Make room"):
            client.node_expand(volume_id, staging, 68 * MIB + room)
    [status] = client.node_health(volume_id).health_statuses
    assert status.reason == "ExpansionPending"
    assert "had no room" in status.message
    # A smaller claim withdraws it, also one that the volume's size meets already.
    client.node_expand(volume_id, staging, 64 * MIB)
    assert [one.volume_id for one in client.volumes()] == [volume_id]
    assert not client.node_health(volume_id).health_statuses
    with expect.code("FAILED_PRECONDITION"):
        client.node_expand(volume_id, staging, 68 * MIB + room)
    assert client.node_expand(volume_id, staging, 72 * MIB).capacity_bytes == 72 * MIB
    # RecoverVolumeExpansionFailure: a claim that is lowered is less than the volume has by then.
    assert client.node_expand(volume_id, staging, 68 * MIB).capacity_bytes == 72 * MIB
    assert client.expand(volume_id, 68 * MIB).capacity_bytes == 72 * MIB


@pytest.mark.variation
def test_reader_only_is_read_only_at_both_paths_and_takes_no_writer(
    client: Client, host: AnyHost, formatted: csi.Volume, staging: Path, target: Path
) -> None:
    reader = mounted(mode=READER_ONLY)
    client.stage(formatted, staging, reader)
    assert mounts(host, staging)[-1].read_only
    with expect.code("FAILED_PRECONDITION", "read-only"):
        client.publish(formatted, staging, target)
    client.publish(formatted, staging, target, mounted(flags=["ro"]))
    client.unpublish(formatted.volume_id, target)
    client.publish(formatted, staging, target, reader)
    assert mounts(host, target)[-1].read_only


@pytest.mark.variation
def test_staging_with_another_access_mode_waits_for_the_last_target(
    client: Client, staged: csi.Volume, staging: Path, target: Path
) -> None:
    client.publish(staged, staging, target)
    client.unstage(staged.volume_id, staging)
    with expect.code("FAILED_PRECONDITION", "in use"):
        client.stage(staged, staging, mounted(mode=READER_ONLY))
    client.unpublish(staged.volume_id, target)
    client.stage(staged, staging, mounted(mode=READER_ONLY))


def test_a_deleted_volume_can_be_created_again_and_is_blank(
    client: Client, host: AnyHost, formatted: csi.Volume, staging: Path
) -> None:
    client.delete(formatted.volume_id)
    client.stage(client.create("pvc-1", 64 * MIB, mounted("ext4")), staging)
    assert formats(host) == 2


def test_a_raw_block_volume_is_never_formatted(
    client: Client, host: AnyHost, raw: csi.Volume, staging: Path
) -> None:
    with expect.code("INVALID_ARGUMENT", "volume_capability", "raw block"):
        client.stage(raw, staging, mounted("ext4"))
    assert formats(host) == 0


@pytest.mark.variation
def test_a_volume_staged_without_a_file_system_keeps_its_own(
    client: Client, host: AnyHost, staging: Path
) -> None:
    volume = client.create("pvc-2", 300 * MIB, mounted("xfs"))
    static = csi.Volume(volume_id=volume.volume_id)
    client.stage(volume, staging, mounted("xfs"))
    client.stage(static, staging, mounted())
    client.unstage(volume.volume_id, staging)
    client.stage(static, staging, mounted())
    assert mounts(host, staging)[-1].fs_type == "xfs"


def test_a_publish_that_fails_leaves_no_loop_device(
    client: Client, raw: csi.Volume, staging: Path, target: Path
) -> None:
    target.mkdir()
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.publish(raw, staging, target, block(), read_only=True)
    client.delete(raw.volume_id)


@pytest.mark.variation
def test_a_directory_of_the_volume_bound_elsewhere_is_no_second_target(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path, target: Path
) -> None:
    part = host.directory / "part"
    part.mkdir()
    client.publish(staged, staging, target)
    (staging / "sub").mkdir()
    host.kernel.bind(str(staging / "sub"), str(part), set())
    client.publish(staged, staging, target)
    client.unpublish(staged.volume_id, target)
    client.publish(staged, staging, target)
    host.kernel.unmount(str(part))


@pytest.mark.variation
def test_a_loop_device_of_another_program_is_left_alone(
    client: Client, host: AnyHost, raw: csi.Volume, staging: Path, target: Path, group: str
) -> None:
    foreign = loop.attach(host.kernel, device(host, group, "vol-raw"))
    client.publish(raw, staging, target, block())
    client.unpublish(raw.volume_id, target)
    assert foreign in host.kernel.loop_devices()
    with expect.code("FAILED_PRECONDITION", f"{foreign} stand on its device"):
        client.delete(raw.volume_id)
    loop.detach(host.kernel, foreign)
    client.delete(raw.volume_id)


@pytest.mark.parametrize("first", chosen.kinds(["writer", "reader"], usual=["writer"]))
def test_a_raw_block_volume_has_a_reader_and_a_writer_at_once(
    client: Client, host: AnyHost, raw: csi.Volume, staging: Path, group: str, first: str
) -> None:
    order = ["writer", "reader"] if first == "writer" else ["reader", "writer"]

    def publish(pod: str) -> Path:
        target, reads = host.directory / pod, pod == "reader"
        client.publish(raw, staging, target, block(MULTI_WRITER), read_only=reads)
        assert host.kernel.device_is_read_only(str(target)) == reads
        return target

    with contextlib.ExitStack() as pods:
        for number, pod in enumerate(order, start=1):
            publish(pod)
            target = publish(pod)
            pods.enter_context(kubelet.Mapped(host.kernel, target, host.directory / f"own {pod}"))
            for published in order[:number]:
                publish(published)
            client.node_expand(raw.volume_id, target, 32 * MIB)
            assert host.kernel.device_size_bytes(str(target)) == 32 * MIB
        own = loops(host, group)
        assert len(own) == 1
        # Kubelet has two: one on the device, one on what Carver has over it.
        assert len(set(host.kernel.loop_devices()) - set(own)) >= 2
    for pod in order:
        client.unpublish(raw.volume_id, host.directory / pod)
        assert not (host.directory / pod).exists()
    assert loops(host, group) == ()
    client.unstage(raw.volume_id, staging)
    client.delete(raw.volume_id)


@pytest.mark.variation
def test_a_reader_is_unpublished_while_kubelet_holds_the_writer_s_device(
    client: Client, host: AnyHost, raw: csi.Volume, staging: Path, target: Path, group: str
) -> None:
    multi, writer = block(MULTI_WRITER), host.directory / "writer"
    client.publish(raw, staging, writer, multi)
    with kubelet.Mapped(host.kernel, writer, host.directory / "own") as held:
        client.publish(raw, staging, target, multi, read_only=True)
        client.unpublish(raw.volume_id, target)
        assert loops(host, group) == ()
        assert host.kernel.loop_status(held).backing_device
    client.unpublish(raw.volume_id, writer)


@pytest.mark.variation
def test_a_loop_device_that_kubelet_reads_stays_until_the_volume_is_unstaged(
    client: Client, host: AnyHost, raw: csi.Volume, staging: Path, target: Path, group: str
) -> None:
    client.publish(raw, staging, target, block(), read_only=True)
    with kubelet.Mapped(host.kernel, target, host.directory / "own"):
        client.unpublish(raw.volume_id, target)
        assert len(loops(host, group)) == 1
    client.unstage(raw.volume_id, staging)
    assert loops(host, group) == ()
    client.delete(raw.volume_id)


@pytest.mark.variation
def test_an_selinux_context_on_a_node_without_selinux_is_refused(
    client: Client, host: AnyHost, volume: csi.Volume, staging: Path
) -> None:
    """Kubelet asks for none there; the kernel would say EINVAL, and no more."""
    if host.kernel.has_selinux():
        pytest.skip("this machine has SELinux")
    context = 'context="system_u:object_r:container_file_t:s0:c1,c2"'
    with expect.code("INVALID_ARGUMENT", "context=", "SELinux, which is off"):
        client.stage(volume, staging, mounted("ext4", flags=[context]))
    assert not mounts(host, staging)
    client.stage(volume, staging, mounted("ext4"))


def test_two_volumes_published_at_once_never_share_a_target(
    client: Client,
    host: AnyHost,
    staged: csi.Volume,
    other: csi.Volume,
    staging: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    binding, go_on, bind = threading.Event(), threading.Event(), host.kernel.bind

    def slow(source: str, path: str, attributes: set[str]) -> None:
        binding.set()
        assert go_on.wait(expect.PATIENCE_SECONDS)
        bind(source, path, attributes)

    monkeypatch.setattr(host.kernel, "bind", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(client.publish, staged, staging, target)
        assert binding.wait(expect.PATIENCE_SECONDS)
        with expect.code("ABORTED", str(target)):
            client.publish(other, host.directory / "other", target)
        go_on.set()
        first.result()
    assert len(mounts(host, target)) == 1


def test_a_raw_block_volume_whose_device_went_away_is_reported_and_can_be_unpublished(
    client: Client, host: AnyHost, raw: csi.Volume, staging: Path, target: Path, group: str
) -> None:
    client.publish(raw, staging, target, block())
    # The bound node is not open, so an operator can deactivate the volume.
    host.deactivate(group, "vol-raw")

    with expect.code("FAILED_PRECONDITION", "went away"):
        client.stats(raw.volume_id, target)
    client.stage(raw, staging, block())
    client.unpublish(raw.volume_id, target)
    assert not target.exists()
    client.publish(raw, staging, target, block())
    assert host.kernel.device_size_bytes(str(target)) == 16 * MIB

    host.deactivate(group, "vol-raw")
    client.unpublish(raw.volume_id, target)
    assert not target.exists()
    assert mounts(host, target) == ()


@pytest.mark.parametrize("program", ["mkfs.ext4", "fsck.ext4"])
@pytest.mark.variation
def test_a_program_that_outlasts_its_call_goes_on_and_the_next_call_waits_for_it(
    client: Client,
    config: Config,
    host: AnyHost,
    volume: csi.Volume,
    staging: Path,
    program: str,
    real: bool,
) -> None:
    if program == "fsck.ext4":
        client.stage(volume, staging)
        client.unstage(volume.volume_id, staging)
    begun, go_on = threading.Event(), threading.Event()

    def slow(words: Sequence[str]) -> None:
        if words[0] == program:
            begun.set()
            assert go_on.wait(expect.PATIENCE_SECONDS)

    host.intercept = slow
    with Client(config.endpoint, timeout_seconds=5 if real else 2) as impatient:
        for _ in range(2):
            with expect.code("ABORTED", "goes on", "has run for"):
                impatient.stage(volume, staging)
    assert begun.is_set()
    assert not mounts(host, staging)

    go_on.set()
    client.stage(volume, staging)
    assert mounts(host, staging)
    assert formats(host) == 1


@pytest.mark.variation
def test_the_next_call_gets_the_error_of_a_program_that_outlasted_its_call(
    client: Client,
    config: Config,
    host: AnyHost,
    volume: csi.Volume,
    staging: Path,
    mkfs_fails: threading.Event,
    real: bool,
) -> None:
    with (
        Client(config.endpoint, timeout_seconds=5 if real else 2) as impatient,
        expect.code("ABORTED", "mkfs of volume"),
    ):
        impatient.stage(volume, staging)
    mkfs_fails.set()
    with expect.code("INTERNAL", "no luck"):
        client.stage(volume, staging)
    client.stage(volume, staging)
    assert mounts(host, staging)
