"""A volume that its caller believes staged, and that is not: publish, growth, statistics.

As after an unmount, a deactivation or a closed mapping by hand, or where the mount namespace of an
earlier Carver ended. Kubelet, while it runs, repeats the publish and never the stage.
"""

from collections.abc import Callable
from pathlib import Path

import chosen
import configured
import expect
import pytest
from csi_client import Client
from encrypted import Box
from real.any import AnyHost, lvm2_commands

from agent.csi.client import block, mounted
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from mount import table
from proto import csi_pb2 as csi

MIB = 1 << 20
KEY = {"passphrase": "correct horse battery staple"}
Mode = csi.VolumeCapability.AccessMode


@pytest.fixture
def config(group: str, tmp_path: Path) -> Config:
    """A class that is not encrypted, one that is, and one whose key is in a file."""
    file = tmp_path / "key"
    file.write_bytes(b"from a file")
    file.chmod(0o400)
    classes = (
        DeviceClass("plain", group, default=True),
        DeviceClass("sealed", group, encryption="luks2"),
        DeviceClass("filed", group, encryption="luks2", key_file=file),
    )
    return configured.carver(tmp_path, group, classes=classes)


KINDS = {"block": block(), "ext4": mounted("ext4"), "xfs": mounted("xfs")}
SIZES = {"block": 64 * MIB, "ext4": 64 * MIB, "xfs": 304 * MIB}


def unmount(host: AnyHost, _group: str, staging: Path) -> None:
    """By hand, behind Carver's back."""
    if table.read(host.kernel).at(str(staging)):
        host.kernel.unmount(str(staging))


def deactivate(host: AnyHost, group: str, staging: Path) -> None:
    unmount(host, group, staging)
    close(host, group, staging)
    host.deactivate(group, "vol-pvc-1")


def close(host: AnyHost, group: str, staging: Path) -> None:
    unmount(host, group, staging)
    logical = host.devices.find(group, "vol-pvc-1")
    mapping = None if logical is None else host.devices.mapping(logical)
    if mapping is not None:
        ended = host.run("cryptsetup", "close", "--", mapping.name)
        assert ended.exit_code == 0, ended.stderr


Lost = Callable[[AnyHost, str, Path], None]
LOST = pytest.mark.parametrize("lose", [unmount, deactivate, close])


@LOST
@pytest.mark.parametrize("kind", chosen.kinds(KINDS, usual=["block", "ext4"]))
def test_a_publish_stages_what_was_staged_before(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path, kind: str, lose: Lost
) -> None:
    volume = client.create("pvc-1", SIZES[kind], KINDS[kind])
    client.stage(volume, staging, KINDS[kind])
    lose(host, group, staging)

    client.publish(volume, staging, target, KINDS[kind])
    client.publish(volume, staging, target, KINDS[kind])

    assert client.stats(volume.volume_id, target).usage[0].total > 32 * MIB
    assert len(table.read(host.kernel).at(str(target))) == 1
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    assert not table.read(host.kernel).at(str(staging))
    client.delete(volume.volume_id)


def test_a_publish_writes_the_tag_of_the_file_system_that_an_ended_process_did_not(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path
) -> None:
    """The process ended after it had mounted the file system; kubelet repeats the publish alone."""
    volume = client.create("pvc-1", SIZES["ext4"], KINDS["ext4"])
    client.stage(volume, staging, KINDS["ext4"])
    formatted = "carver.formatted=ext4"

    def has_tag() -> bool:
        return formatted in report.read(host.lvm).group(group).volume("vol-pvc-1").tags

    expect.soon(has_tag)
    host.lvm("lvchange", "--deltag", formatted, "--", f"{group}/vol-pvc-1")
    # The cached state, which a publish goes by, lacks the tag once it is read anew.
    client.volume_health(volume.volume_id)
    client.capacity()
    client.publish(volume, staging, target, KINDS["ext4"])
    expect.soon(has_tag)


@LOST
@pytest.mark.parametrize("name", chosen.kinds(["sealed", "filed"], usual=["sealed"]))
@pytest.mark.parametrize("kind", chosen.kinds(["block", "ext4"], usual=["ext4"]))
def test_a_publish_opens_an_encrypted_volume_by_the_key_that_it_has(
    client: Client,
    host: AnyHost,
    group: str,
    staging: Path,
    target: Path,
    kind: str,
    name: str,
    lose: Lost,
) -> None:
    volume = client.create("pvc-1", SIZES[kind], KINDS[kind], parameters={"class": name})
    key = KEY if name == "sealed" else None
    client.stage(volume, staging, KINDS[kind], key)
    lose(host, group, staging)

    client.publish(volume, staging, target, KINDS[kind], key)

    assert Box(client, host, group).opened()
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    assert Box(client, host, group).mapping() is None


@pytest.mark.variation
@pytest.mark.parametrize(("kind", "lose"), [("block", close), ("ext4", unmount), ("ext4", close)])
def test_without_a_key_the_error_says_how_it_gets_one(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path, kind: str, lose: Lost
) -> None:
    volume = client.create("pvc-1", 64 * MIB, KINDS[kind], parameters={"class": "sealed"})
    client.stage(volume, staging, KINDS[kind], KEY)
    lose(host, group, staging)

    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", "no key", "scale what uses it to 0", "staged with"):
            client.publish(volume, staging, target, KINDS[kind])
    assert not target.exists()
    # Its pods ended, and the next one has it staged.
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, KINDS[kind], KEY)
    client.publish(volume, staging, target, KINDS[kind])


def test_the_staging_path_of_another_mount_is_not_covered(
    client: Client, host: AnyHost, staging: Path, target: Path, staged: csi.Volume
) -> None:
    other = client.create("pvc-2", 64 * MIB, mounted("ext4"))
    with expect.code("FAILED_PRECONDITION", str(staging), "not this volume"):
        client.publish(other, staging, target)
    assert not target.exists()
    assert len(table.read(host.kernel).at(str(staging))) == 1


def test_a_volume_that_another_target_has_is_not_published_to_a_second_one(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    alone = mounted("ext4", mode=Mode.SINGLE_NODE_SINGLE_WRITER)
    volume = client.create("pvc-1", 64 * MIB, alone)
    client.stage(volume, staging, alone)
    client.publish(volume, staging, target, alone)
    host.kernel.unmount(str(staging))
    with expect.code("FAILED_PRECONDITION", str(target)):
        client.publish(volume, staging, target.parent / "second", alone)


def test_a_volume_that_is_staged_is_published_without_a_command(
    client: Client, host: AnyHost, staged: csi.Volume, staging: Path, target: Path
) -> None:
    host.commands.clear()
    client.publish(staged, staging, target)
    assert not lvm2_commands(host)


def test_a_publish_of_no_volume_makes_nothing(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    client.delete(volume.volume_id)
    with expect.code("NOT_FOUND"):
        client.publish(volume, staging, target)
    assert not target.exists()
    assert not staging.exists()


@pytest.mark.variation
@LOST
@pytest.mark.parametrize("kind", ["block", "ext4"])
def test_growth_waits_for_the_next_stage(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path, kind: str, lose: Lost
) -> None:
    """NOT_FOUND would mark the claim as one that cannot grow (node_expander.go of kubelet)."""
    volume = client.create("pvc-1", 64 * MIB, KINDS[kind])
    client.stage(volume, staging, KINDS[kind])
    lose(host, group, staging)
    client.expand(volume.volume_id, 128 * MIB)
    if kind == "ext4" or lose is deactivate:
        with expect.code("FAILED_PRECONDITION", "grows when it is staged"):
            client.node_expand(volume.volume_id, staging, 128 * MIB)
    with expect.code("NOT_FOUND"):
        client.stats(volume.volume_id, target)

    client.publish(volume, staging, target, KINDS[kind])
    client.node_expand(volume.volume_id, target, 128 * MIB)
    assert client.stats(volume.volume_id, target).usage[0].total > 100 * MIB


def test_a_target_that_shows_a_device_that_went_away_is_published_anew(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path
) -> None:
    volume = client.create("pvc-1", 64 * MIB, block())
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    # The bound node is not open, so an operator can deactivate the volume.
    host.deactivate(group, "vol-pvc-1")
    client.publish(volume, staging, target, block())
    assert host.kernel.device_size_bytes(str(target)) == 64 * MIB
    assert len(table.read(host.kernel).at(str(target))) == 1


def test_growth_of_no_volume_is_not_found(
    client: Client, volume: csi.Volume, staging: Path
) -> None:
    client.delete(volume.volume_id)
    with expect.code("NOT_FOUND"):
        client.node_expand(volume.volume_id, staging, 128 * MIB)
