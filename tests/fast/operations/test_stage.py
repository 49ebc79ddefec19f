"""Which volumes may be staged and published."""

from pathlib import Path

import expect
import pytest
from fakes.host import FakeHost

from agent.core import tag
from agent.csi.client import Client, block, mounted
from mount import table

EXTENT = 4 << 20


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
