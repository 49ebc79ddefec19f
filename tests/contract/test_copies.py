"""Volumes made of snapshots and of volumes: what they hold, what they cost, what is refused."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chosen
import configured
import expect
import pytest
from real.any import AnyHost, device, logical, lvm2_commands, names
from real.host import RealHost

from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from mount import filesystem
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
BEFORE, AFTER = b"before  " * 512, b"after   " * 512
pytestmark = [
    pytest.mark.groups(data=[300, 150], other=[40]),
    pytest.mark.settings(
        classes=(configured.PLAIN, configured.STRIPED, DeviceClass("other", "other"))
    ),
]


@pytest.fixture(autouse=True)
def free(host: AnyHost, group: str, other: str) -> Iterator[None]:
    yield
    assert not {
        name for one in (group, other) for name in names(host, one) if name.startswith("copy")
    }


@pytest.fixture
def volume(client: Client, host: AnyHost, group: str) -> csi.Volume:
    """A raw block volume of 32 MiB with a block of data at 8 MiB."""
    made = client.create("pvc-1", 32 * MIB, block())
    host.write_bytes(device(host, group, "vol-pvc-1"), 8 * MIB, BEFORE)
    return made


@pytest.fixture
def snapshot(client: Client, volume: csi.Volume, host: AnyHost, group: str) -> csi.Snapshot:
    """A snapshot of it, which has since been written to."""
    taken = client.snapshot("1", volume.volume_id)
    host.write_bytes(device(host, group, "vol-pvc-1"), 8 * MIB, AFTER)
    return taken


def staged_origin(
    client: Client, host: AnyHost, size: int, capability: csi.VolumeCapability
) -> csi.Volume:
    made = client.create("pvc-1", size, capability)
    client.stage(made, host.directory / "origin", capability)
    return made


# What is copied


def test_restore_has_the_snapshot_s_data(
    client: Client, snapshot: csi.Snapshot, host: AnyHost, group: str
) -> None:
    source = of_snapshot(snapshot.snapshot_id)
    made = client.create("pvc-2", 64 * MIB, block(), source=source)
    assert made.content_source == source
    assert made.capacity_bytes == 64 * MIB
    copied = device(host, group, "vol-pvc-2")
    assert host.read_bytes(copied, 8 * MIB, 4096) == BEFORE
    assert host.read_bytes(copied, 12 * MIB, 4096) == bytes(4096)
    assert logical(host, group, "vol-pvc-2").own_tags["state"] == "ready"
    assert client.create("pvc-2", 64 * MIB, block(), source=source) == made
    assert made in client.volumes()


@pytest.mark.variation
def test_clone_has_the_source_s_data(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    source = of_volume(volume.volume_id)
    made = client.create("pvc-2", 0, block(), source=source)
    assert made.content_source == source
    assert made.capacity_bytes == 32 * MIB
    assert host.read_bytes(device(host, group, "vol-pvc-2"), 8 * MIB, 4096) == BEFORE
    assert names(host, group) == {"vol-pvc-1", "vol-pvc-2"}
    assert client.snapshots() == []
    client.delete(volume.volume_id)


@pytest.mark.parametrize("name", chosen.kinds(["striped", "other"], usual=["other"]))
@pytest.mark.long_on_lvm
def test_copy_to_another_class_and_group(
    client: Client,
    snapshot: csi.Snapshot,
    volume: csi.Volume,
    host: AnyHost,
    group: str,
    other: str,
    name: str,
) -> None:
    for number, source in enumerate(
        (of_snapshot(snapshot.snapshot_id), of_volume(volume.volume_id))
    ):
        client.create(f"copy-{number}", 0, block(), parameters={"class": name}, source=source)
    where = other if name == "other" else group
    assert host.read_bytes(device(host, where, "vol-copy-0"), 8 * MIB, 4096) == BEFORE
    assert host.read_bytes(device(host, where, "vol-copy-1"), 8 * MIB, 4096) == AFTER


@pytest.mark.variation
def test_zeroes_of_the_source_are_copied(
    client: Client, snapshot: csi.Snapshot, host: AnyHost, group: str
) -> None:
    source = of_snapshot(snapshot.snapshot_id)
    first = client.create("pvc-2", 0, block(), source=source)
    host.write_bytes(device(host, group, "vol-pvc-2"), 4 * MIB, AFTER)
    host.lvm("lvremove", "--yes", "--", f"{group}/vol-pvc-2")
    assert client.create("pvc-2", 0, block(), source=source).volume_id == first.volume_id
    assert host.read_bytes(device(host, group, "vol-pvc-2"), 4 * MIB, 4096) == bytes(4096)


@pytest.mark.parametrize("fs_type", chosen.kinds(filesystem.FILE_SYSTEMS, usual=["btrfs"]))
@pytest.mark.long_on_lvm
def test_source_and_copies_are_mounted_together(
    client: Client, host: AnyHost, group: str, fs_type: str
) -> None:
    size, use = filesystem.FILE_SYSTEMS[fs_type].minimum_bytes + 8 * MIB, mounted(fs_type)
    origin = staged_origin(client, host, size, use)
    (host.directory / "origin" / "data").write_bytes(b"data" * MIB)
    snapshot = client.snapshot("1", origin.volume_id)
    copies = [
        client.create("pvc-2", size + 64 * MIB, use, source=of_snapshot(snapshot.snapshot_id)),
        client.create("pvc-3", 0, mounted(), source=of_volume(origin.volume_id)),
    ]
    for copy in copies:
        staging = host.directory / copy.volume_id.rpartition("/")[2]
        client.stage(copy, staging, use)
        if isinstance(host, RealHost):
            assert (staging / "data").read_bytes() == b"data" * MIB
    total = client.stats(copies[0].volume_id, host.directory / "vol-pvc-2").usage[0].total
    # Less than the volume by what the file system keeps for itself, as its origin's is.
    assert total > client.stats(origin.volume_id, host.directory / "origin").usage[0].total
    assert copies[1].volume_context["carver/fsType"] == fs_type
    for copy in copies:
        client.unstage(copy.volume_id, host.directory / copy.volume_id.rpartition("/")[2])
    client.unstage(origin.volume_id, host.directory / "origin")


@pytest.mark.variation
def test_copy_of_an_untagged_btrfs_has_its_own_id(
    client: Client, host: AnyHost, group: str
) -> None:
    # The node died between the answer of a first staging and the tag that is written behind it.
    use = mounted("btrfs")
    origin = staged_origin(client, host, filesystem.FILE_SYSTEMS["btrfs"].minimum_bytes, use)
    host.lvm("lvchange", "--deltag", "carver.formatted=btrfs", "--", f"{group}/vol-pvc-1")
    snapshot = client.snapshot("1", origin.volume_id)
    copy = client.create("pvc-2", 0, use, source=of_snapshot(snapshot.snapshot_id))
    client.stage(copy, host.directory / "copy", use)
    client.unstage(copy.volume_id, host.directory / "copy")
    client.unstage(origin.volume_id, host.directory / "origin")


@pytest.mark.variation
def test_copies_cost_no_more_commands_than_promised(
    client: Client, snapshot: csi.Snapshot, volume: csi.Volume, host: AnyHost
) -> None:
    host.commands.clear()
    client.create("pvc-2", 0, block(), source=of_snapshot(snapshot.snapshot_id))
    assert lvm2_commands(host) == ["fullreport", "lvcreate", "lvchange"]
    host.commands.clear()
    client.create("pvc-3", 0, block(), source=of_volume(volume.volume_id))
    copied = ["fullreport", "lvcreate", "lvcreate", "lvchange"]
    assert lvm2_commands(host) == [*copied, "lvconvert", "lvchange", "lvremove"]


@pytest.mark.variation
def test_inactive_source_and_missing_source(
    client: Client, snapshot: csi.Snapshot, host: AnyHost, group: str
) -> None:
    source = of_snapshot(snapshot.snapshot_id)
    host.deactivate(group, "vol-pvc-1")
    made = client.create("pvc-2", 0, block(), source=source)
    assert host.read_bytes(device(host, group, "vol-pvc-2"), 8 * MIB, 4096) == BEFORE
    # A repeated call no longer needs the source.
    client.delete_snapshot(snapshot.snapshot_id)
    assert client.create("pvc-2", 0, block(), source=source) == made
    assert client.create("pvc-2", 32 * MIB, block(), source=source) == made


# What is refused


@pytest.mark.variation
def test_invalid_requests_are_refused(
    client: Client, snapshot: csi.Snapshot, volume: csi.Volume
) -> None:
    for source in (
        of_snapshot("no id"),
        of_snapshot(snapshot.snapshot_id + "x"),
        of_snapshot(volume.volume_id),
        of_volume("no id"),
        of_volume(volume.volume_id + "x"),
        of_volume(snapshot.snapshot_id),
    ):
        with expect.code("NOT_FOUND"):
            client.create("pvc-2", 0, block(), source=source)
    for source, word in (
        (csi.VolumeContentSource(), "type"),
        (of_snapshot(""), "snapshot_id"),
        (of_volume(""), "volume_id"),
    ):
        with expect.code("INVALID_ARGUMENT", "volume_content_source", word):
            client.create("pvc-2", 0, block(), source=source)
    source = of_snapshot(snapshot.snapshot_id)
    for required, limit in ((0, 28 * MIB), (4, 30 * MIB)):
        with expect.code("OUT_OF_RANGE", str(32 * MIB)):
            client.create("pvc-2", required, block(), limit_bytes=limit, source=source)
    with expect.code("INVALID_ARGUMENT", "raw block"):
        client.create("pvc-2", 0, mounted("ext4"), source=source)
    assert len(client.volumes()) == 1


@pytest.mark.variation
def test_repeated_create_of_another_source_is_refused(
    client: Client, snapshot: csi.Snapshot, volume: csi.Volume
) -> None:
    source = of_snapshot(snapshot.snapshot_id)
    client.create("pvc-2", 0, block(), source=source)
    with expect.code("ALREADY_EXISTS", snapshot.snapshot_id):
        client.create("pvc-2", 0, block(), source=of_volume(volume.volume_id))
    with expect.code("ALREADY_EXISTS", "nothing"):
        client.create("pvc-2", 32 * MIB, block())
    with expect.code("ALREADY_EXISTS", "size"):
        client.create("pvc-2", 40 * MIB, block(), source=source)


@pytest.mark.variation
def test_another_file_system_is_refused(client: Client, host: AnyHost) -> None:
    origin = staged_origin(client, host, 16 * MIB, mounted("ext4"))
    with expect.code("INVALID_ARGUMENT", "ext4", "xfs"):
        client.create("pvc-2", 400 * MIB, mounted("xfs"), source=of_volume(origin.volume_id))
    copy = client.create("pvc-3", 0, block(), source=of_volume(origin.volume_id))
    assert copy.capacity_bytes == 16 * MIB
    client.unstage(origin.volume_id, host.directory / "origin")


@pytest.mark.variation
def test_overflowed_snapshot_is_refused(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    taken = client.snapshot("1", volume.volume_id, {"size": "4MiB"})
    host.write_bytes(device(host, group, "vol-pvc-1"), 0, b"x" * (8 * MIB))
    with expect.code("FAILED_PRECONDITION", taken.snapshot_id, "overflowed"):
        client.create("pvc-2", 0, block(), source=of_snapshot(taken.snapshot_id))
    assert len(client.volumes()) == 1


@pytest.mark.variation
def test_no_room_leaves_nothing(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    room = client.capacity().maximum_volume_size.value
    client.create("pvc-2", room - 36 * MIB, block())
    for size in (0, 40 * MIB):
        with expect.code("RESOURCE_EXHAUSTED"):
            client.create("pvc-3", size, block(), source=of_volume(volume.volume_id))
    assert names(host, group) == {"vol-pvc-1", "vol-pvc-2"}


@pytest.mark.variation
def test_staging_a_copy_costs_what_staging_again_costs(
    client: Client, host: AnyHost, staging: Path
) -> None:
    origin = staged_origin(client, host, 16 * MIB, mounted("ext4"))
    client.unstage(origin.volume_id, host.directory / "origin")
    copy = client.create("pvc-2", 64 * MIB, mounted("ext4"), source=of_volume(origin.volume_id))
    host.commands.clear()
    client.stage(copy, staging, mounted("ext4"))
    assert lvm2_commands(host) == ["fullreport"]
    assert client.stats(copy.volume_id, staging).usage[0].total > 32 * MIB
    client.stage(copy, staging, mounted("ext4"))
    client.unstage(copy.volume_id, staging)


@pytest.mark.variation
def test_source_can_be_used_while_clones_are_filled(
    client: Client,
    volume: csi.Volume,
    host: AnyHost,
    service: Service,
    staging: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source's lock is held while a clone is made, and not while it is filled."""
    goes_on, copy = threading.Event(), host.kernel.copy

    def waits(*words: Any, **more: Any) -> None:
        assert goes_on.wait(300)
        copy(*words, **more)

    client.stage(volume, staging, block())
    monkeypatch.setattr(host.kernel, "copy", waits)
    source = of_volume(volume.volume_id)
    service.context.locks.grace_seconds = 300
    with ThreadPoolExecutor(8) as callers:
        clones = [
            callers.submit(client.create, f"clone-{one}", 0, block(), source=source)
            for one in range(8)
        ]
        try:
            while sum(service.copier.jobs.counts().values()) < 8:
                time.sleep(0.1)
            # Longer than a call needs that has begun a copy, and still has the lock; much less than
            # the copies take.
            service.context.locks.grace_seconds = 20
            client.publish(volume, staging, target, block())
            client.unpublish(volume.volume_id, target)
            client.unstage(volume.volume_id, staging)
            # The tags keep it from being deleted, not a lock.
            with expect.code("FAILED_PRECONDITION", "is copied from it"):
                client.delete(volume.volume_id)
            client.stage(volume, staging, block())
            assert not any(one.done() for one in clones)
        finally:
            goes_on.set()
        # None failed with ABORTED.
        made = [one.result() for one in clones]
    for one in made:
        assert not client.volume_health(one.volume_id).health_statuses
        client.delete(one.volume_id)
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


ERRORS = {"medium": errno.EIO, "full pool": errno.ENOSPC, "no answer": errno.ETIMEDOUT}


@pytest.mark.parametrize("kind", chosen.kinds(ERRORS, usual=["medium"]))
@pytest.mark.parametrize("is_clone", chosen.kinds([False, True], usual=[False]))
@pytest.mark.long_on_lvm
def test_a_copy_that_meets_an_error_is_completed_by_the_repeated_call(
    client: Client,
    host: AnyHost,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    is_clone: bool,
) -> None:
    """To the external-provisioner a final code says that there is no volume to delete."""
    volume = client.create("source", 24 * MIB, block())
    taken = client.snapshot("s", volume.volume_id)
    source = of_volume(volume.volume_id) if is_clone else of_snapshot(taken.snapshot_id)

    def broken(*_where: object, **_more: object) -> None:
        raise OSError(ERRORS[kind], os.strerror(ERRORS[kind]))

    with monkeypatch.context() as patched:
        patched.setattr(host.kernel, "copy", broken)
        for _ in range(2):
            with expect.code("ABORTED", "cannot complete volume 'restored'"):
                client.create("restored", 24 * MIB, block(), source=source)
    assert "vol-restored" in names(host, group)
    restored = client.create("restored", 24 * MIB, block(), source=source)
    client.delete(restored.volume_id)
    client.delete_snapshot(taken.snapshot_id)
    client.delete(volume.volume_id)
    expect.soon(lambda: names(host, group) == set())
