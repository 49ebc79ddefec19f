"""What is on disk is a promise: a group that an earlier version made is served to its end.

tests/data has, for each format that there ever was, the lvm2 commands by which that version made a
volume of every kind, and left some half-made. They are never made anew: a new format has a file of
its own beside them. Commands, not a copy of the metadata for vgcfgrestore(8): that would bring back
neither what is in a thin pool nor in a snapshot's area, and the disks of one machine only.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import configured
import expect
import in_background
import left_behind
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, names

from agent.csi.client import block, mounted
from agent.daemon.server import Service
from agent.settings.settings import Config
from lvm import report
from lvm.room import Room

DATA = Path(__file__).parents[1] / "data"
FORMATS = sorted(DATA.glob("group-format-*.json"))
MIB = 1 << 20
# What was whole when the earlier version ended, or had begun and is completed now.
VOLUMES = ("plain", "striped", "mirrored", "thin", "raw", "copy", "small")


@pytest.fixture(params=FORMATS, ids=lambda path: path.stem)
def group(request: pytest.FixtureRequest, host: AnyHost) -> str:
    """The group as that version left it."""
    return left_behind.group_of(json.loads(request.param.read_text()), host)


pytestmark = [
    # The commands are what they are on any lvm2; `make contract` has them on the real one.
    pytest.mark.variation,
    pytest.mark.settings(
        classes=(
            configured.PLAIN,
            configured.STRIPED,
            replace(configured.RAID, name="mirrored"),
            configured.THIN,
        )
    ),
]


@pytest.fixture
def client(host: AnyHost, config: Config) -> Iterator[Client]:
    """Today's version, that went on with what was left."""
    running = Service(config, serving.machine(host), host.lvm)
    running.eraser.grace_seconds = running.copier.grace_seconds = 600
    in_background.resume(running)
    running.start(config.endpoint)
    with Client(config.endpoint) as caller:
        yield caller
    running.stop()


def wait_until_gone(host: AnyHost, group: str, *prefixes: str) -> None:
    """For what is done behind the answers."""
    until = time.monotonic() + expect.PATIENCE_SECONDS
    while left := [one for one in names(host, group) if one.startswith(prefixes)]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_there_is_a_group_of_each_format() -> None:
    assert [json.loads(one.read_text())["format"] for one in FORMATS] == [1]


def test_unfinished_work_is_completed_or_undone(host: AnyHost, group: str, client: Client) -> None:
    # The wipe, the copy's bridge, the group snapshot that never was.
    wait_until_gone(host, group, "vol-pvc-gone", "copy-", "snap.69f8e16c")
    found = {one.volume_id.partition("/")[2] for one in client.volumes()}
    assert found == {f"vol-pvc-{one}" for one in VOLUMES}
    copy = report.read(host.lvm).group(group).volume("vol-pvc-copy")
    assert {one for one in copy.tags if one.startswith("carver.state=")} == {"carver.state=ready"}
    # Two alone, and two of the group snapshot that was whole.
    assert len(client.snapshots()) == 4


def test_each_volume_is_what_it_was(host: AnyHost, group: str, client: Client) -> None:
    wait_until_gone(host, group, "copy-")
    found = {one.volume_id.partition("/vol-pvc-")[2]: one for one in client.volumes()}
    for name in ("plain", "striped", "mirrored", "thin"):
        # The provisioner's call once more, after an upgrade: the same volume.
        again = client.create(f"pvc-{name}", 16 * MIB, mounted("ext4"), parameters={"class": name})
        assert again.volume_id == found[name].volume_id
        assert again.capacity_bytes == 16 * MIB
        assert dict(again.volume_context) == dict(found[name].volume_context)
    assert client.create("pvc-raw", 8 * MIB, block()).volume_id == found["raw"].volume_id


def test_each_volume_can_be_used_and_deleted(host: AnyHost, group: str, client: Client) -> None:
    wait_until_gone(host, group, "copy-", "vol-pvc-gone", "snap.69f8e16c")
    place = host.directory / "pods" / "17" / "volumes" / "kubernetes.io~csi" / "tmp" / "mount"
    client.unpublish(f"csi-{'ab' * 32}", place)
    for snapshot in client.snapshots():
        if not snapshot.group_snapshot_id:
            client.delete_snapshot(snapshot.snapshot_id)
    members = client.snapshots()
    [identity] = {one.group_snapshot_id for one in members}
    client.delete_group_snapshot(identity, [one.snapshot_id for one in members])
    for volume in client.volumes():
        logical = volume.volume_id.partition("/")[2]
        kind = block() if logical == "vol-pvc-raw" else mounted("ext4")
        staging, target = (host.directory / part / logical for part in ("staging", "target"))
        staging.mkdir(parents=True)
        target.parent.mkdir(exist_ok=True)
        client.stage(volume, staging, kind)
        client.publish(volume, staging, target, kind)
        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        if logical == "vol-pvc-small":
            # What it was promised by the earlier version it got when it was staged.
            grown = client.volume(volume.volume_id).volume
            assert grown.capacity_bytes == 16 * MIB
        client.delete(volume.volume_id)
    wait_until_gone(host, group, "")
    assert Room(report.read(host.lvm).group(group)).free_extents == 200
