"""Contents whose blocks are smaller than a disk's logical blocks are not copied, moved or received.

The kernel mounts no such file system (xfs: sectors, ext4: blocks), and a partition table counts in
the blocks of the disk that it was made on.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import pytest
from csi_client import Client
from real.any import AnyHost, names

from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.settings.classes import DeviceClass
from mount import filesystem, table

MIB = 1 << 20
DISK = 801 * MIB
KEY = {"passphrase": "correct horse battery staple"}
SIZE = 304 * MIB


@pytest.fixture
def group(host: AnyHost) -> Iterator[str]:
    # Others of these tests run beside this one on the same machine.
    name = f"zz512_{os.getpid()}"
    with host.own_group(name, [host.new_device(DISK)]):
        yield name


@pytest.fixture
def four(host: AnyHost) -> Iterator[str]:
    name = f"zz4096_{os.getpid()}"
    with host.disk("4 KiB", DISK) as disk, host.own_group(name, [disk]):
        yield name


pytestmark = pytest.mark.settings(
    classes=(
        replace(configured.PLAIN, name="usual"),
        DeviceClass("four", "four"),
        configured.SEALED,
        DeviceClass("sealed-four", "four", encryption="luks2"),
    )
)


# What mkfs is given, and whether the file system can lie on blocks of 4 KiB.
KINDS = [
    ("ext4", "", True),
    pytest.param("ext4", "-b 1024", False, marks=pytest.mark.variation),
    ("ext4", "-b 2048", False),
    ("xfs", "-s size=512", False),
    pytest.param("xfs", "-s size=4096", True, marks=pytest.mark.variation),
    pytest.param("btrfs", "", True, marks=pytest.mark.variation),
]


@pytest.mark.parametrize(("fs_type", "options", "fits"), KINDS)
@pytest.mark.parametrize("by", chosen.kinds(["volume", "snapshot"], usual=["snapshot"]))
def test_a_copy_that_is_made_can_be_mounted(
    client: Client,
    host: AnyHost,
    four: str,
    staging: Path,
    fs_type: str,
    options: str,
    fits: bool,
    by: str,
) -> None:
    capability = mounted(fs_type)
    parameters = {"mkfsOptions": options} if options else {}
    origin = client.create("pvc-1", SIZE, capability, parameters=parameters)
    client.stage(origin, staging, capability)
    client.unstage(origin.volume_id, staging)
    if by == "volume":
        source = of_volume(origin.volume_id)
    else:
        source = of_snapshot(client.snapshot("snap-1", origin.volume_id).snapshot_id)
    copying = {**parameters, "class": "four"}
    if not fits:
        for _ in range(2):
            with expect.code("INVALID_ARGUMENT", "blocks of", "4096 bytes", four, "use a class"):
                client.create("pvc-2", SIZE, capability, parameters=copying, source=source)
        assert names(host, four) == set()
        return
    copy = client.create("pvc-2", SIZE, capability, parameters=copying, source=source)
    client.stage(copy, staging, capability)
    assert table.read(host.kernel).at(str(staging))


@pytest.mark.long_on_lvm
def test_a_raw_volume_keeps_to_the_blocks_that_its_user_counts_in(
    client: Client, host: AnyHost, four: str
) -> None:
    origin = client.create("pvc-1", 32 * MIB, block())
    source = of_volume(origin.volume_id)
    with expect.code("INVALID_ARGUMENT", "blocks of 512 bytes", "4096 bytes"):
        client.create("pvc-2", 32 * MIB, block(), parameters={"class": "four"}, source=source)
    assert names(host, four) == set()


@pytest.mark.variation
def test_a_copy_to_smaller_blocks_is_made(client: Client, staging: Path) -> None:
    how = {"class": "four"}
    for kind, size in ((mounted("xfs"), SIZE), (block(), 32 * MIB)):
        origin = client.create("pvc-1", size, kind, parameters=how)
        client.stage(origin, staging, kind)
        client.unstage(origin.volume_id, staging)
        copy = client.create("pvc-2", size, kind, source=of_volume(origin.volume_id))
        client.stage(copy, staging, kind)
        client.unstage(copy.volume_id, staging)
        client.delete(copy.volume_id)
        client.delete(origin.volume_id)


@pytest.mark.variation
def test_a_volume_that_was_never_formatted_may_go_anywhere(client: Client, staging: Path) -> None:
    origin = client.create("pvc-1", SIZE, mounted("xfs"))
    source = of_volume(origin.volume_id)
    copy = client.create("pvc-2", SIZE, mounted("xfs"), parameters={"class": "four"}, source=source)
    client.stage(copy, staging, mounted("xfs"))


@pytest.mark.parametrize(("fs_type", "options"), [("ext4", ""), ("btrfs", "")])
def test_an_encrypted_copy_that_is_made_can_be_mounted(
    client: Client, staging: Path, fs_type: str, options: str
) -> None:
    capability = mounted(fs_type)
    origin = client.create("pvc-1", SIZE, capability, parameters={"class": "sealed"})
    client.stage(origin, staging, capability, KEY)
    client.unstage(origin.volume_id, staging)
    source, how = of_volume(origin.volume_id), {"class": "sealed-four"}
    copy = client.create("pvc-2", SIZE, capability, parameters=how, source=source)
    client.stage(copy, staging, capability, KEY)
    client.unstage(copy.volume_id, staging)


@pytest.mark.variation
@pytest.mark.parametrize(
    ("fs_type", "options"),
    [
        ("ext4", "-b 65536"),
        ("ext4", "-b 64k"),
        ("xfs", "-b size=65536"),
        ("xfs", "-b log=16"),
        ("xfs", "-s size=64k"),
        ("btrfs", "-s 65536"),
    ],
)
def test_blocks_larger_than_the_nodes_pages_are_refused_at_once(
    client: Client, fs_type: str, options: str
) -> None:
    with expect.code("INVALID_ARGUMENT", "blocks of 65536 bytes", "pages"):
        client.create("pvc-1", SIZE, mounted(fs_type), parameters={"mkfsOptions": options})
    assert not client.volumes()


@pytest.mark.long_on_lvm
def test_project_quotas_need_a_file_system_with_projects(client: Client, staging: Path) -> None:
    for parameters, flags in (
        ({"mountOptions": "prjquota"}, []),
        ({}, ["prjquota"]),
        ({"mkfsOptions": "-O quota"}, ["prjquota"]),
    ):
        with expect.code("INVALID_ARGUMENT", "prjquota", "-O project"):
            client.create("pvc-1", 64 * MIB, mounted("ext4", flags), parameters=parameters)
    assert not client.volumes()
    given = {"mkfsOptions": "-O quota,project"}
    volume = client.create("pvc-1", 64 * MIB, mounted("ext4", ["prjquota"]), parameters=given)
    client.stage(volume, staging, mounted("ext4", ["prjquota"]))
    client.create("pvc-2", SIZE, mounted("xfs", ["prjquota"]))


def test_a_file_system_with_blocks_of_4_kib_lies_on_such_a_disk(host: AnyHost) -> None:
    place = host.directory / "place"
    place.mkdir()
    with host.disk("4 KiB", 64 * MIB) as disk:
        filesystem.make(host.run, disk, "ext4", ["-b", "4096"])
        found = filesystem.find(host.kernel, disk, "ext4")
        assert found is not None
        assert found.block_bytes == 4096
        host.kernel.mount(disk, str(place), "ext4", set(), [])
        host.kernel.unmount(str(place))
