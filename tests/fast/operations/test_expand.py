"""Volumes that cannot grow: the answer, the record, and what later calls make of it."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import expect
import pytest
from fakes import filesystems
from fakes.host import FakeHost

from agent.csi.client import Client, block, mounted, of_volume
from agent.daemon.server import Service
from mount import filesystem
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
SIZE = 32 * MIB
TOO_LARGE = 1 << 42
ENCRYPTED = {"carver/encryption": "luks2"}
KEY = {"passphrase": "sesame"}


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / "staging"


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    return client.create("pvc-1", SIZE, mounted("ext4"))


@pytest.fixture
def staged(client: Client, volume: csi.Volume, staging: Path) -> str:
    """The volume, staged."""
    client.stage(volume, staging)
    return volume.volume_id


def stage_again(client: Client, volume_id: str, staging: Path, **more: Any) -> None:
    client.unstage(volume_id, staging)
    client.stage(csi.Volume(volume_id=volume_id), staging, **more)


def record(fake: FakeHost, name: str = "vol-pvc-1") -> set[str]:
    """The tags of a volume that are about its growth."""
    found = fake.lvm2.groups["data"].volumes[name].tags
    return {one for one in found if one.startswith(("carver.wanted=", "carver.refused="))}


def put(fake: FakeHost, tag: str) -> None:
    """Another process gives the volume a tag."""
    fake.lvm2.groups["data"].volumes["vol-pvc-1"].tags |= {tag}
    fake.lvm2.groups["data"].seqno += 1


def length(fake: FakeHost) -> int:
    return fake.lvm2.groups["data"].volumes["vol-pvc-1"].length * EXTENT


def message(client: Client, service: Service, volume_id: str) -> str:
    """What the volume's health says of its growth."""
    service.reports.fresh()
    every = client.volume_health(volume_id).health_statuses
    [found] = [one.message for one in every if one.reason == "ExpansionPending"]
    return str(found)


def refusing(*words: str) -> Callable[[Sequence[str]], Result | None]:
    """lvm2 refuses the commands that have all of these words."""

    def answer(command: Sequence[str]) -> Result | None:
        line = " ".join(command)
        return Result(5, "", "  It cannot be.\n") if all(one in line for one in words) else None

    return answer


def cannot_grow(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("used", [True, False], ids=["in use", "not in use"])
def test_size_without_room_is_infeasible(
    client: Client, service: Service, fake: FakeHost, volume: csi.Volume, staging: Path, used: bool
) -> None:
    if used:
        client.stage(volume, staging)
    fake.commands.clear()
    for _ in range(2):
        with expect.code("OUT_OF_RANGE", "cannot grow", "vgextend"):
            client.expand(volume.volume_id, TOO_LARGE)
    assert len([words for words in fake.commands if "lvchange" in words]) == 1
    assert record(fake) == {f"carver.refused={TOO_LARGE}"}
    assert "had no room" in message(client, service, volume.volume_id)
    # Also one that the volume has.
    assert client.expand(volume.volume_id, SIZE).capacity_bytes == SIZE
    assert record(fake) == set()


def test_refused_node_expansion_is_recorded_once(
    client: Client, fake: FakeHost, volume: csi.Volume, staging: Path
) -> None:
    """The kubelet repeats it at each mount."""
    client.stage(volume, staging)
    fake.commands.clear()
    for _ in range(3):
        with expect.code("FAILED_PRECONDITION", "Make room"):
            client.node_expand(volume.volume_id, staging, TOO_LARGE)
    assert len([words for words in fake.commands if "lvchange" in words]) == 1


@pytest.mark.parametrize("key", ["refused", "wanted"])
def test_stage_grows_only_a_volume_with_snapshots(
    client: Client, fake: FakeHost, staged: str, staging: Path, key: str
) -> None:
    """In use it does not grow at any call.

    The claim of any other may have been made smaller since, and a volume never shrinks.
    """
    if key == "wanted":
        client.snapshot("1", staged)
    other = client.create("pvc-2", client.capacity().available_capacity, block())
    with expect.code("FAILED_PRECONDITION", "Make room"):
        client.node_expand(staged, staging, 64 * MIB)
    assert record(fake) == {f"carver.{key}={64 * MIB}"}
    client.delete(other.volume_id)
    stage_again(client, staged, staging)
    assert length(fake) == (64 * MIB if key == "wanted" else SIZE)
    size = 64 * MIB if key == "wanted" else 48 * MIB
    assert client.node_expand(staged, staging, size).capacity_bytes == size
    assert not any("refused" in one for one in record(fake))


def test_stage_grows_to_the_size_of_an_earlier_version(
    client: Client, service: Service, fake: FakeHost, staged: str, staging: Path
) -> None:
    put(fake, f"carver.wanted={64 * MIB}")
    shown = message(client, service, staged)
    assert "had no room" in shown
    assert "while it has copy-on-write snapshots" not in shown
    stage_again(client, staged, staging)
    assert length(fake) == 64 * MIB
    assert client.stats(staged, staging).usage[0].total > 50 * MIB


def test_next_call_replaces_the_size_of_an_earlier_version(
    client: Client, fake: FakeHost, staged: str, staging: Path
) -> None:
    put(fake, f"carver.wanted={TOO_LARGE}")
    client.volumes()
    assert client.node_expand(staged, staging, SIZE).capacity_bytes == SIZE
    assert record(fake) == set()
    put(fake, f"carver.wanted={TOO_LARGE}")
    client.volumes()
    with expect.code("FAILED_PRECONDITION", "Make room"):
        client.node_expand(staged, staging, TOO_LARGE)
    assert record(fake) == {f"carver.refused={TOO_LARGE}"}


@pytest.mark.parametrize("words", [("lvextend",), ("lvextend", "lvchange")], ids=["", "tags too"])
def test_pod_starts_if_lvm2_refuses(
    client: Client, fake: FakeHost, staged: str, staging: Path, words: tuple[str, ...]
) -> None:
    """As for a pool that is full, or a group that lacks a disk, which takes no tags either."""
    answers = [refusing(one) for one in words]
    fake.intercept = lambda command: next(filter(None, (one(command) for one in answers)), None)
    with expect.code("FAILED_PRECONDITION", "It cannot be"):
        client.node_expand(staged, staging, 64 * MIB)
    with expect.code("INTERNAL", "It cannot be"):
        client.expand(staged, 64 * MIB)
    assert record(fake) == (set() if "lvchange" in words else {f"carver.refused={64 * MIB}"})
    fake.intercept = refusing("nothing at all")
    assert client.node_expand(staged, staging, 64 * MIB).capacity_bytes == 64 * MIB
    assert record(fake) == set()


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "no tag can be written"])
def test_pod_starts_if_the_file_system_cannot_grow(
    client: Client,
    service: Service,
    fake: FakeHost,
    staged: str,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_recorded: bool,
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(fake.kernel, "grow_ext4", cannot_grow)
        fake.intercept = refusing(*(["nothing at all"] if is_recorded else ["lvchange"]))
        with expect.code("FAILED_PRECONDITION", "No space left on device"):
            client.node_expand(staged, staging, 64 * MIB)
        assert length(fake) == 64 * MIB
        if not is_recorded:
            assert record(fake) == set()
            return
        shown = message(client, service, staged)
        assert "its file system could not grow" in shown
        # Nor is its successor kept from starting.
        stage_again(client, staged, staging)
    stage_again(client, staged, staging)
    assert client.stats(staged, staging).usage[0].total > 50 * MIB
    assert record(fake) == set()


def test_calls_succeed_if_the_tag_cannot_be_removed(
    client: Client, fake: FakeHost, staged: str, staging: Path
) -> None:
    client.unstage(staged, staging)
    put(fake, f"carver.refused={SIZE}")
    fake.intercept = refusing("lvchange", "--deltag")
    client.stage(csi.Volume(volume_id=staged), staging)
    assert client.node_expand(staged, staging, SIZE).capacity_bytes == SIZE
    fake.intercept = refusing("nothing at all")
    client.node_expand(staged, staging, SIZE)
    assert record(fake) == set()
    put(fake, f"carver.refused={TOO_LARGE}")
    client.volumes()
    fake.intercept = refusing("lvchange", "--deltag")
    assert client.node_expand(staged, staging, SIZE).capacity_bytes == SIZE


def test_stage_removes_the_tag_of_a_raw_volume(
    client: Client, fake: FakeHost, staging: Path
) -> None:
    """Killed between the growth and the removal of the tag; nobody expands it on the node."""
    volume = client.create("pvc-1", SIZE, block())
    put(fake, f"carver.refused={SIZE}")
    client.volumes()
    client.stage(volume, staging, block())
    assert record(fake) == set()


@pytest.mark.parametrize("capability", [mounted("ext4"), block()], ids=["ext4", "raw"])
def test_encrypted_volume_without_key_grows_at_the_next_stage(
    client: Client,
    service: Service,
    fake: FakeHost,
    staging: Path,
    capability: csi.VolumeCapability,
) -> None:
    volume = client.create("pvc-1", 48 * MIB, capability, parameters=ENCRYPTED)
    target = staging.parent / "target"
    client.stage(volume, staging, capability, KEY)
    client.publish(volume, staging, target, capability)
    with expect.code("FAILED_PRECONDITION", "node-expand-secret"):
        client.node_expand(volume.volume_id, target, 64 * MIB)
    with expect.code("FAILED_PRECONDITION"):
        client.node_expand(volume.volume_id, target, 64 * MIB, {"passphrase": "another"})
    assert len(record(fake)) == 1
    assert "LUKS mapping" in message(client, service, volume.volume_id)
    if capability == block():
        # For a second pod; what is open of it is smaller still.
        client.stage(volume, staging, capability, KEY)
        assert len(record(fake)) == 1
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, capability, KEY)
    assert record(fake) == set()
    client.publish(volume, staging, target, capability)
    assert client.node_expand(volume.volume_id, target, 64 * MIB).capacity_bytes == 64 * MIB


@pytest.mark.parametrize("expanded", [True, False], ids=["was expanded", "as it was made"])
def test_copy_with_a_small_file_system(
    client: Client,
    fake: FakeHost,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    expanded: bool,
) -> None:
    source = client.create("source", SIZE, mounted("ext4"))
    client.stage(source, staging)
    client.unstage(source.volume_id, staging)
    clone = client.create("pvc-1", 48 * MIB, mounted("ext4"), source=of_volume(source.volume_id))
    if expanded:
        client.stage(clone, staging)
        monkeypatch.setattr(fake.kernel, "grow_ext4", cannot_grow)
        with expect.code("FAILED_PRECONDITION"):
            client.node_expand(clone.volume_id, staging, 64 * MIB)
        client.unstage(clone.volume_id, staging)
        client.stage(clone, staging)
        return
    monkeypatch.setattr(fake.kernel, "grow_ext4", cannot_grow)
    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", "No space left on device"):
            client.stage(clone, staging)


@pytest.mark.parametrize("tag", ["wanted", "refused"])
def test_larger_size_stays_on_record(
    client: Client,
    fake: FakeHost,
    staged: str,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    tag: str,
) -> None:
    put(fake, f"carver.{tag}={TOO_LARGE}")
    client.volumes()
    monkeypatch.setattr(fake.kernel, "grow_ext4", cannot_grow)
    with expect.code("FAILED_PRECONDITION"):
        client.node_expand(staged, staging)
    assert record(fake) == {f"carver.{tag}={TOO_LARGE}"}


def test_a_file_system_that_cannot_grow_mounted_grows_at_the_next_staging(
    client: Client,
    fake: FakeHost,
    volume: csi.Volume,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ext4 = replace(
        filesystem.FILE_SYSTEMS["ext4"],
        grow=filesystems.grow_at_the_next_stage,
        resize=("resize.new",),
    )
    monkeypatch.setitem(filesystem.FILE_SYSTEMS, "ext4", ext4)
    monkeypatch.setitem(filesystems.PROGRAMS, "resize.new", filesystems.resize)
    client.stage(volume, staging)
    client.expand(volume.volume_id, 2 * SIZE)
    with expect.code("FAILED_PRECONDITION", "grows when it is staged next"):
        client.node_expand(volume.volume_id, staging, 2 * SIZE)
    before = client.stats(volume.volume_id, staging).usage[0].total

    stage_again(client, volume.volume_id, staging)

    assert client.stats(volume.volume_id, staging).usage[0].total == before + SIZE
    assert record(fake) == set()
    client.node_expand(volume.volume_id, staging, 2 * SIZE)
