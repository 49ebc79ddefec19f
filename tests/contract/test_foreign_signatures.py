"""Signatures of other formats on a volume that Carver formatted are its users' data.

And what an earlier volume left in the extents that a volume grows by is no reason to refuse it.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
from csi_client import Client
from encrypted import Box
from fakes.filesystems import DRBD
from real.any import AnyHost, device

from agent.csi.client import block, mounted, of_volume
from mount import filesystem
from proto import csi_pb2 as csi

MIB = 1 << 20
KEY = {"passphrase": "correct horse battery staple"}


def end_as_a_mirror(host: AnyHost, path: str) -> None:
    """Put what libblkid takes for a member of a network mirror into a device's last block."""
    host.write_bytes(path, host.kernel.device_size_bytes(path) - len(DRBD), DRBD)
    found = filesystem.probe(host.kernel, path)
    assert found is not None
    assert found.fs_type == "drbd"


def test_a_formatted_volume_is_staged_whatever_its_last_block_holds(
    client: Client, host: AnyHost, group: str, staged: csi.Volume, staging: Path
) -> None:
    client.unstage(staged.volume_id, staging)
    path = device(host, group, "vol-pvc-1")
    end_as_a_mirror(host, path)
    client.stage(staged, staging)
    client.unstage(staged.volume_id, staging)
    last = host.kernel.device_size_bytes(path) - len(DRBD)
    assert host.read_bytes(path, last, len(DRBD)) == DRBD, "it is the pod's"


def test_a_pod_that_fills_its_file_system_has_it_again(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path, real: bool
) -> None:
    """On real LVM by an ordinary file, one of whose blocks is the device's last."""
    volume = client.create("pvc-1", 16 * MIB, mounted("ext4"))
    client.stage(volume, staging)
    client.publish(volume, staging, target)
    if real:
        with suppress(OSError), (target / "file").open("wb") as file:  # until it is full
            for _ in range(8192):
                file.write(DRBD)
    else:
        path = device(host, group, "vol-pvc-1")
        host.write_bytes(path, volume.capacity_bytes - len(DRBD), DRBD)
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging)
    client.unstage(volume.volume_id, staging)


def test_a_volume_whose_tag_was_lost_is_recognized_whatever_its_last_block_holds(
    client: Client, host: AnyHost, group: str, staged: csi.Volume, staging: Path
) -> None:
    client.unstage(staged.volume_id, staging)
    host.lvm("lvchange", "--deltag", "carver.formatted=ext4", "--", f"{group}/vol-pvc-1")
    end_as_a_mirror(host, device(host, group, "vol-pvc-1"))
    client.stage(staged, staging)


@pytest.mark.parametrize("fs_type", filesystem.FILE_SYSTEMS)
def test_growth_before_the_first_mount_brings_no_signature_back(
    client: Client, host: AnyHost, group: str, staging: Path, fs_type: str
) -> None:
    minimum_bytes = filesystem.FILE_SYSTEMS[fs_type].minimum_bytes
    volume = client.create("pvc-g", minimum_bytes, mounted(fs_type))
    client.expand(volume.volume_id, minimum_bytes + 8 * MIB)
    end_as_a_mirror(host, device(host, group, "vol-pvc-g"))
    client.stage(volume, staging, mounted(fs_type))
    assert client.stats(volume.volume_id, staging).usage[0].total > minimum_bytes // 2


def test_growth_while_mounted_brings_no_signature_back(
    client: Client, host: AnyHost, group: str, staged: csi.Volume, staging: Path
) -> None:
    client.unstage(staged.volume_id, staging)
    client.expand(staged.volume_id, 128 * MIB)
    end_as_a_mirror(host, device(host, group, "vol-pvc-1"))
    client.stage(staged, staging)
    assert client.stats(staged.volume_id, staging).usage[0].total > 100 * MIB


def test_what_is_on_a_new_volume_that_did_not_grow_is_left_alone(
    client: Client, host: AnyHost, group: str, staging: Path, volume: csi.Volume
) -> None:
    path = device(host, group, "vol-pvc-1")
    end_as_a_mirror(host, path)
    with expect.code("FAILED_PRECONDITION", "drbd", "left untouched"):
        client.stage(volume, staging)
    last = host.kernel.device_size_bytes(path) - len(DRBD)
    assert host.read_bytes(path, last, len(DRBD)) == DRBD


def test_what_was_written_before_the_growth_is_left_alone(
    client: Client, host: AnyHost, group: str, staging: Path, volume: csi.Volume
) -> None:
    path = device(host, group, "vol-pvc-1")
    host.write(path, "xfs" if volume.capacity_bytes >= 300 * MIB else "ext4")
    client.expand(volume.volume_id, 128 * MIB)
    end_as_a_mirror(host, path)
    with expect.code("FAILED_PRECONDITION", "drbd", "left untouched"):
        client.stage(volume, staging)
    last = host.kernel.device_size_bytes(path) - len(DRBD)
    assert host.read_bytes(path, last, len(DRBD)) == DRBD


def test_another_file_system_than_the_tags_name_is_refused_by_the_tags(
    client: Client, staged: csi.Volume, staging: Path
) -> None:
    client.unstage(staged.volume_id, staging)
    with expect.code("FAILED_PRECONDITION", "holds ext4, not xfs"):
        client.stage(staged, staging, mounted("xfs"))


@pytest.mark.parametrize("left", ["nothing", "a mirror"])
def test_a_formatted_volume_without_its_file_system_is_never_formatted_again(
    client: Client, host: AnyHost, group: str, staged: csi.Volume, staging: Path, left: str
) -> None:
    client.unstage(staged.volume_id, staging)
    path = device(host, group, "vol-pvc-1")
    host.erase(path)
    if left == "a mirror":
        end_as_a_mirror(host, path)
    with expect.code("FAILED_PRECONDITION", "left"):
        client.stage(staged, staging)
    assert filesystem.find(host.kernel, path, "ext4") is None


class TestEncrypted:
    """The same of volumes under LUKS."""

    pytestmark = pytest.mark.settings(classes=(replace(configured.SEALED, default=True),))

    def test_growth_before_the_first_use_brings_no_signature_back(
        self, client: Client, host: AnyHost, group: str, staging: Path
    ) -> None:
        volume = client.create("pvc-e", 32 * MIB, mounted("ext4"))
        client.expand(volume.volume_id, 64 * MIB)
        end_as_a_mirror(host, device(host, group, "vol-pvc-e"))
        client.stage(volume, staging, mounted("ext4"), secrets=KEY)

    def test_the_copy_of_a_raw_volume_keeps_the_id_of_its_users_btrfs(
        self, client: Client, host: AnyHost, group: str, staging: Path
    ) -> None:
        size_bytes = filesystem.FILE_SYSTEMS["btrfs"].minimum_bytes
        origin = client.create("pvc-1", size_bytes, block())
        client.stage(origin, staging, block(), secrets=KEY)
        box = Box(client, host, group)
        host.write(box.opened(), "btrfs")
        written = filesystem.probe(host.kernel, box.opened())
        client.unstage(origin.volume_id, staging)
        copy = client.create("pvc-2", size_bytes, block(), source=of_volume(origin.volume_id))
        client.stage(copy, staging, block(), secrets=KEY)
        assert filesystem.probe(host.kernel, box.opened("vol-pvc-2")) == written
