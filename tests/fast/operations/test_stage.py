"""Which volumes may be staged and published."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import configured
import expect
import grpc
import pytest
from fakes.host import FakeHost

from agent.core import tag
from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from lvm.active_devices import Device
from lvm.thin import Policy
from mount import filesystem, table
from mount.command import Result
from proto import csi_pb2 as csi

EXTENT = 4 << 20
pytestmark = pytest.mark.settings(
    classes=(configured.PLAIN, replace(configured.THIN, pool=Policy(over_provisioning=4)))
)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (tag.RECEIVING, "FAILED_PRECONDITION"),
        (tag.MOVED, "FAILED_PRECONDITION"),
        (tag.WIPING, "NOT_FOUND"),
        (tag.COPYING, "ABORTED"),
    ],
)
def test_an_active_device_without_a_usable_volume_is_not_published(
    fake: FakeHost, client: Client, tmp_path: Path, state: str, code: str
) -> None:
    """By its tags, though nothing in the process remembers it."""
    volume = client.create("db", EXTENT, block())
    logical = fake.lvm2.groups["data"].volumes["vol-db"]
    client.stage(volume, tmp_path / "staging", block())
    logical.tags = {one.replace(tag.READY, state) for one in logical.tags} | {"carver.zero=fully"}
    fake.lvm2.groups["data"].seqno += 1
    client.volumes()

    with expect.code(code):
        client.stage(volume, tmp_path / "staging", block())
    with expect.code(code):
        client.publish(volume, tmp_path / "staging", tmp_path / "target", block())
    assert not (tmp_path / "target").exists()


def test_a_file_system_that_another_mount_namespace_has_mounted_is_staged_as_it_is(
    fake: FakeHost, client: Client, tmp_path: Path
) -> None:
    """e2fsck does not look at a device in use; the kernel mounts the same file system once more."""
    volume = client.create("db", 64 << 20, mounted("ext4"))
    client.stage(volume, tmp_path / "staging")
    client.unstage(volume.volume_id, tmp_path / "staging")
    device = fake.devices.find("data", "vol-db")
    assert device is not None
    # A container that was made with the volume in its own mount table, and keeps it there.
    fake.block.get(device.path).mounted = 1
    client.stage(volume, tmp_path / "staging")
    assert table.read(fake.kernel).at(str(tmp_path / "staging"))


XFS = mounted("xfs")


@pytest.fixture
def unfinished(fake: FakeHost, client: Client, tmp_path: Path) -> tuple[csi.Volume, str]:
    """A volume over whose mkfs.xfs the node was lost, and its device."""
    volume = client.create("db", 320 << 20, XFS)
    kill_mkfs(fake, client, volume, tmp_path / "staging")
    return volume, device_of(fake, "db").path


def device_of(fake: FakeHost, name: str) -> Device:
    device = fake.devices.find("data", f"vol-{name}")
    assert device is not None
    return device


def kill_mkfs(fake: FakeHost, client: Client, volume: csi.Volume, staging: Path) -> None:
    """Stage a volume, and end its mkfs.xfs before its last write."""

    def killed(words: Sequence[str]) -> Result | None:
        if words[0] != "mkfs.xfs":
            return None
        fake.intercept = lambda _words: None
        assert fake.run(*words).exit_code == 0
        fake.unfinish(words[-1])
        return Result(-9, "", "Killed")

    fake.intercept = killed
    with expect.code("INTERNAL"):
        client.stage(volume, staging, XFS)


def no_longer_marked(fake: FakeHost, path: str) -> None:
    fake.block.get(path).media.damage = "much"
    fake.block.get(path).media.blocks.pop(0)


def copied_from_others(fake: FakeHost, path: str) -> None:
    of_others(fake, path)
    tagged("carver.from=data/vol-other")(fake, path)


def of_others(fake: FakeHost, path: str) -> None:
    made = filesystem.probe(fake.kernel, path)
    assert made is not None
    fake.block.get(path).contents = None
    filesystem.make(fake.run, path, "xfs")
    fake.unfinish(path)


def tagged(*own: str) -> Callable[[FakeHost, str], None]:
    def add(fake: FakeHost, _path: str) -> None:
        fake.lvm(
            "lvchange", *(word for one in own for word in ("--addtag", one)), "--", "data/vol-db"
        )

    return add


def in_use(fake: FakeHost, path: str) -> None:
    fake.block.get(path).held += 1


@pytest.mark.parametrize(
    "but",
    [
        no_longer_marked,
        of_others,
        copied_from_others,
        in_use,
        tagged("carver.formatted=xfs"),
        tagged("carver.formatted=xfs", "carver.from=data/vol-other"),
        tagged("carver.adopted=by-hand"),
    ],
)
def test_what_a_killed_mkfs_left_is_not_zeroed_where_anything_speaks_against_it(
    fake: FakeHost,
    client: Client,
    tmp_path: Path,
    unfinished: tuple[csi.Volume, str],
    but: Callable[[FakeHost, str], None],
) -> None:
    volume, path = unfinished
    but(fake, path)
    fake.block.get(path).media.zeroed.clear()
    before = filesystem.probe(fake.kernel, path)
    with pytest.raises(grpc.RpcError):
        client.stage(volume, tmp_path / "staging", XFS)
    assert filesystem.probe(fake.kernel, path) == before
    assert fake.block.get(path).media.zeroed == []


@pytest.mark.parametrize("device_class", ["plain", "thin"])
@pytest.mark.parametrize("by", ["snapshot", "clone"])
def test_a_copy_of_what_a_killed_mkfs_left_is_formatted_when_it_is_staged(
    fake: FakeHost, client: Client, tmp_path: Path, by: str, device_class: str
) -> None:
    parameters = {"class": device_class}
    volume = client.create("db", 320 << 20, XFS, parameters=parameters)
    kill_mkfs(fake, client, volume, tmp_path / "staging")
    source = of_volume(volume.volume_id)
    if by == "snapshot":
        source = of_snapshot(client.snapshot("s", volume.volume_id).snapshot_id)
    copy = client.create("copy", 320 << 20, XFS, source=source, parameters=parameters)
    client.stage(copy, tmp_path / "copy", XFS)
    [mount] = table.read(fake.kernel).of_device(device_of(fake, "copy").number)
    assert (mount.path, mount.fs_type) == (str(tmp_path / "copy"), "xfs")
    # The source is made anew by itself, with the UUID that the copy no longer has.
    client.stage(volume, tmp_path / "staging", XFS)
    found = {
        one: filesystem.probe(fake.kernel, device_of(fake, one).path) for one in ("db", "copy")
    }
    assert len({one.uuid for one in found.values() if one is not None}) == 2


def test_a_copy_over_whose_own_mkfs_the_node_was_lost_is_formatted_anew(
    fake: FakeHost, client: Client, tmp_path: Path
) -> None:
    blank = client.create("db", 320 << 20, XFS)
    source = of_snapshot(client.snapshot("s", blank.volume_id).snapshot_id)
    copy = client.create("copy", 320 << 20, XFS, source=source)
    kill_mkfs(fake, client, copy, tmp_path / "copy")
    client.stage(copy, tmp_path / "copy", XFS)
    assert table.read(fake.kernel).at(str(tmp_path / "copy"))
