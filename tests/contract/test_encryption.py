"""Encrypted volumes: their whole life on each layout, and what must not happen to them."""

from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import pytest
from csi_client import Client
from encrypted import Box
from real.any import AnyHost

from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm.layout import Layout
from lvm.thin import Policy
from mount import table
from mount.filesystem import FILE_SYSTEMS
from proto import csi_pb2 as csi

MIB = 1 << 20
BLOCK_BYTES = 4096
END_BYTES = 64 << 10
KEY = {"passphrase": "correct horse battery staple"}
OTHER = {"passphrase": "Tr0ub4dor&3"}
BOTH = {"passphrase": OTHER["passphrase"], "previousPassphrase": KEY["passphrase"]}
MARK = b"not-for-the-disk"
LAYOUTS = {**configured.LAYOUTS, "striped": Layout("striped", stripes=2, stripe_size_bytes=65536)}
SIZES = {key: max(48 * MIB, one.minimum_bytes) for key, one in FILE_SYSTEMS.items()}
pytestmark = [
    # As many disks as the widest layout takes.
    pytest.mark.groups(data=[200] * configured.MOST_DISKS),
]


@pytest.fixture
def config(config: Config, group: str, tmp_path: Path) -> Config:
    """A class of each layout that encrypts, one that does not, and others."""

    def made(name: str, shape: Layout, **more: object) -> DeviceClass:
        pool = Policy() if shape.is_thin else None
        return DeviceClass(name=name, group=group, layout=shape, pool=pool, **more)  # type: ignore[arg-type]

    file = tmp_path / "key"
    file.write_bytes(b"from a file")
    file.chmod(0o400)
    every = [made(name, shape, encryption="luks2") for name, shape in LAYOUTS.items()]
    every += [
        made("plain", Layout(), default=True),
        made("crypto", Layout(), encryption="luks2", erase="crypto"),
        made("discard", Layout(), encryption="luks2", erase="discard", discard=True),
        made("filed", Layout(), encryption="luks2", key_file=file),
        made("bypassing", Layout(), encryption="luks2", bypass_workqueue="both"),
    ]
    return replace(config, classes=tuple(every))


def create(
    client: Client, name: str = "linear", size: int = 48 * MIB, fs_type: str = "ext4"
) -> csi.Volume:
    capability = mounted(fs_type) if fs_type else block()
    return client.create("pvc-1", size, capability, parameters={"class": name})


@pytest.fixture
def box(client: Client, host: AnyHost, group: str) -> Box:
    return Box(client, host, group)


@pytest.mark.parametrize("fs_type", chosen.kinds([*chosen.GROWING, "block"], usual=["ext4"]))
@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["thin"], fast=["linear", "raid6"]))
def test_an_encrypted_volume_of_each_layout_lives_grows_and_is_copied(
    client: Client, box: Box, name: str, fs_type: str
) -> None:
    before = client.capacity({"class": "plain"}).available_capacity
    fs_type = fs_type.removeprefix("block")
    size = SIZES.get(fs_type, 48 * MIB)
    capability = mounted(fs_type) if fs_type else block()
    volume = create(client, name, size, fs_type)
    assert volume.capacity_bytes >= size
    assert volume.volume_context["carver/encryption"] == "luks2"

    box.stage(volume, KEY, capability)
    client.publish(volume, box.staging, box.target, capability)
    device = box.opened()
    assert box.host.kernel.device_size_bytes(device) == volume.capacity_bytes
    header = box.header()
    assert header.offset_bytes % LAYOUTS[name].stripes == 0
    assert header.key_derivation == ("argon2id",)
    if not fs_type:
        box.host.write_bytes(device, 8 * MIB, MARK.ljust(BLOCK_BYTES, b"\0"))
        assert box.holds(device, MARK)
        assert not box.holds(box.logical(), MARK)

    grown = client.node_expand(volume.volume_id, box.target, size + 48 * MIB, KEY).capacity_bytes
    assert grown >= size + 48 * MIB
    assert box.host.kernel.device_size_bytes(device) == grown
    assert client.stats(volume.volume_id, box.target).usage[0].total > (size + 48 * MIB) * 0.5

    taken = client.snapshot("snap-1", volume.volume_id)
    # What was asked for, where that was rounded up.
    assert taken.size_bytes == size + 48 * MIB
    there = box.host.directory / "copy"
    for source in (of_snapshot(taken.snapshot_id), of_volume(volume.volume_id)):
        copy = client.create("copy", 0, capability, parameters={"class": name}, source=source)
        assert copy.capacity_bytes == grown
        client.stage(copy, there, capability, KEY)
        if not fs_type:
            assert box.holds(box.opened("vol-copy"), MARK)
        client.unstage(copy.volume_id, there)
        client.delete(copy.volume_id)
    client.delete_snapshot(taken.snapshot_id)

    client.unpublish(volume.volume_id, box.target)
    box.unstage(volume)
    assert box.mapping() is None
    client.delete(volume.volume_id)
    assert client.volumes() == []
    if name != "thin":
        assert client.capacity({"class": "plain"}).available_capacity == before
        assert box.used_extents() == 0


@pytest.mark.long_on_lvm
def test_all_of_the_capacity_can_be_claimed(client: Client) -> None:
    free = client.capacity({"class": "linear"}).available_capacity
    assert free == client.capacity({"class": "plain"}).available_capacity - 4 * MIB
    volume = create(client, size=free)
    assert volume.capacity_bytes == free
    assert client.capacity({"class": "linear"}).available_capacity == 0
    assert create(client, size=free) == volume
    with expect.code("ALREADY_EXISTS"):
        create(client, size=4 * MIB + free)


@pytest.mark.variation
def test_without_a_key_nothing_is_written(client: Client, box: Box) -> None:
    volume = create(client)
    device = box.logical()
    before = box.host.read_bytes(device, 0, 4 * MIB)
    for capability in (mounted("ext4"), block()):
        with expect.code("INVALID_ARGUMENT", "passphrase", "node-stage-secret"):
            box.stage(volume, None, capability)
    assert not box.staging.exists()
    assert box.host.read_bytes(device, 0, 4 * MIB) == before
    box.stage(volume, KEY)
    # A staged volume needs no key.
    box.stage(volume)


@pytest.fixture
def sealed(client: Client, box: Box) -> csi.Volume:
    """A volume that was staged by a key, and is closed."""
    volume = create(client)
    box.stage(volume, KEY)
    box.unstage(volume)
    return volume


WRONG = [
    OTHER,
    pytest.param({**OTHER, "previousPassphrase": "a third"}, marks=pytest.mark.variation),
]


@pytest.mark.variation
@pytest.mark.parametrize("secrets", WRONG, ids=["one", "two"])
def test_a_wrong_key_changes_nothing(box: Box, sealed: csi.Volume, secrets: dict[str, str]) -> None:
    device = box.logical()
    before = box.host.read_bytes(device, 0, 4 * MIB)
    with expect.code("UNAUTHENTICATED", "the key does not open"):
        box.stage(sealed, secrets)
    assert box.mapping() is None
    assert box.host.read_bytes(device, 0, 4 * MIB) == before
    box.stage(sealed, KEY)


@pytest.mark.variation
@pytest.mark.parametrize("secrets", [{"passphrase": ""}, {"passphrase": "x" * 3000}])
def test_a_key_that_is_empty_or_too_long_is_refused(box: Box, secrets: dict[str, str]) -> None:
    volume = create(box.client)
    with expect.code("INVALID_ARGUMENT", "secrets[passphrase]", "1 to 2048 bytes"):
        box.stage(volume, secrets)


@pytest.mark.long_on_lvm
def test_a_volume_that_is_not_encrypted_is_never_opened_as_one(client: Client, box: Box) -> None:
    volume = create(client, "plain")
    before = box.host.read_bytes(box.logical(), 0, 4 * MIB)
    for capability in (mounted("ext4"), block()):
        with expect.code("INVALID_ARGUMENT", "is not encrypted"):
            box.stage(volume, KEY, capability)
    assert box.host.read_bytes(box.logical(), 0, 4 * MIB) == before
    box.stage(volume, {"user": "alice"})


@pytest.mark.variation
def test_the_device_of_a_closed_encrypted_volume_is_not_published(client: Client, box: Box) -> None:
    volume = create(client, fs_type="")
    # As with a PersistentVolume made by hand, without attributes.
    bare = csi.Volume(volume_id=volume.volume_id)
    with expect.code("INVALID_ARGUMENT", "is encrypted"):
        box.stage(bare, None, block())
    with expect.code("FAILED_PRECONDITION", "is encrypted", "no key"):
        client.publish(bare, box.staging, box.target, block())
    assert not box.target.exists()
    box.stage(bare, KEY, block())
    client.publish(bare, box.staging, box.target, block())


def test_a_lost_header_is_never_made_anew(client: Client, box: Box, sealed: csi.Volume) -> None:
    box.host.erase(box.logical())
    for zero in range(0, 4 * MIB, MIB):
        box.host.write_bytes(box.logical(), zero, bytes(MIB))
    with expect.code("FAILED_PRECONDITION", "header", "header restore"):
        box.stage(sealed, KEY)
    assert box.host.read_bytes(box.logical(), 0, 4 * MIB) == bytes(4 * MIB)
    client.delete(sealed.volume_id)


@pytest.mark.variation
def test_the_ends_of_a_new_volume_are_blank_and_keep_what_is_written(box: Box) -> None:
    """Noise may read as a file system, and a volume with one is never formatted."""
    volume = create(box.client, fs_type="")
    below = box.logical()
    ends = (0, volume.capacity_bytes - END_BYTES)
    leftover = bytes(range(256)) * (BLOCK_BYTES // 256)
    for at in ends:
        # Where the header is, there is nothing yet.
        begin = box.host.kernel.device_size_bytes(below) - volume.capacity_bytes
        box.host.write_bytes(below, begin + at, leftover)
    box.stage(volume, KEY, block())
    within = box.opened()
    for at in ends:
        assert box.host.read_bytes(within, at, END_BYTES) == bytes(END_BYTES)
        box.host.write_bytes(within, at, MARK.ljust(BLOCK_BYTES, b"\0"))
    box.unstage(volume)
    box.stage(volume, KEY, block())
    for at in ends:
        assert box.host.read_bytes(within, at, END_BYTES).startswith(MARK)
    box.unstage(volume)


@pytest.mark.variation
def test_a_header_of_another_volume_is_not_opened(box: Box, sealed: csi.Volume) -> None:
    other = box.client.create("other", 48 * MIB, mounted("ext4"), parameters={"class": "linear"})
    box.stage(other, KEY)
    box.unstage(other)
    header = box.host.read_bytes(box.logical("vol-other"), 0, 4 * MIB)
    box.host.write_bytes(box.logical(), 0, header)
    with expect.code("FAILED_PRECONDITION", "there is another header"):
        box.stage(sealed, KEY)


def test_other_contents_than_a_header_are_left_alone(client: Client, box: Box) -> None:
    volume = create(client)
    box.host.write(box.logical(), "ext4")
    with expect.code("FAILED_PRECONDITION", "ext4"):
        box.stage(volume, KEY)


def test_a_new_key_replaces_the_previous_one(box: Box, sealed: csi.Volume) -> None:
    for _ in range(2):  # until kubelet has the secret without the old one
        box.stage(sealed, BOTH)
        box.unstage(sealed)
    with expect.code("UNAUTHENTICATED"):
        box.stage(sealed, KEY)
    box.stage(sealed, OTHER)
    header = box.header()
    assert len(header.slots) == 1


@pytest.mark.variation
def test_a_key_file_opens_a_volume_without_a_secret(
    client: Client, box: Box, config: Config
) -> None:
    volume = create(client, "filed")
    box.stage(volume)
    assert client.node_expand(volume.volume_id, box.staging, 64 * MIB).capacity_bytes == 64 * MIB
    assert box.host.kernel.device_size_bytes(box.opened()) == 64 * MIB
    box.unstage(volume)
    [file] = [one.key_file for one in config.classes if one.key_file]
    file.chmod(0o444)
    with expect.code("FAILED_PRECONDITION", "key_file", "chmod 0400"):
        box.stage(volume)


@pytest.mark.variation
def test_growth_without_a_key_is_completed_by_the_next_stage(client: Client, box: Box) -> None:
    volume = create(client)
    box.stage(volume, KEY)
    with expect.code("FAILED_PRECONDITION", "node-expand-secret"):
        client.node_expand(volume.volume_id, box.staging, 96 * MIB)
    box.unstage(volume)
    box.stage(volume, KEY)
    assert client.node_expand(volume.volume_id, box.staging, 96 * MIB).capacity_bytes == 96 * MIB
    assert client.stats(volume.volume_id, box.staging).usage[0].total > 60 * MIB


@pytest.mark.variation
@pytest.mark.parametrize("is_staged", [True, False])
@pytest.mark.parametrize("fs_type", chosen.kinds(["ext4", ""], usual=[""]))
def test_the_node_is_asked_to_grow_what_is_on_an_encrypted_volume(
    client: Client, box: Box, fs_type: str, is_staged: bool
) -> None:
    capability = mounted(fs_type) if fs_type else block()
    volume = create(client, "linear", 48 * MIB, fs_type)
    if is_staged:
        box.stage(volume, KEY, capability)
    for _ in range(2):
        answer = client.expand(volume.volume_id, 64 * MIB)
        assert answer.node_expansion_required


def test_an_unused_mapping_is_reopened_by_its_key_only_and_deleted(box: Box) -> None:
    volume = create(box.client, fs_type="")
    box.stage(volume, KEY, block())
    assert box.mapping() is not None
    with expect.code("UNAUTHENTICATED"):
        box.stage(volume, OTHER, block())
    box.stage(volume, KEY, block())
    box.client.delete(volume.volume_id)
    assert box.used_extents() == 0


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "deleted"])
def test_a_half_open_volume_counts_as_closed(client: Client, box: Box, is_used: bool) -> None:
    volume = create(client)
    box.host.half_open(box.device())
    assert box.mapping() is None
    if is_used:
        box.stage(volume, KEY)
        box.unstage(volume)
    client.delete(volume.volume_id)
    assert box.used_extents() == 0


def test_a_volume_in_use_is_neither_deleted_nor_closed(client: Client, box: Box) -> None:
    volume = create(client)
    box.stage(volume, KEY)
    client.publish(volume, box.staging, box.target, mounted("ext4"))
    with expect.code("FAILED_PRECONDITION", "mounted"):
        client.delete(volume.volume_id)
    box.unstage(volume)
    assert box.mapping() is not None
    client.unpublish(volume.volume_id, box.target)
    box.unstage(volume)
    assert box.mapping() is None


def test_a_copy_is_encrypted_exactly_if_its_source_is(client: Client) -> None:
    volume = create(client)
    source = of_volume(volume.volume_id)
    with expect.code("INVALID_ARGUMENT", "is encrypted", "carver/encryption"):
        client.create("copy", 0, mounted("ext4"), parameters={"class": "plain"}, source=source)
    plain = client.create("other", 48 * MIB, mounted("ext4"), parameters={"class": "plain"})
    source = of_volume(plain.volume_id)
    with expect.code("INVALID_ARGUMENT", "is not encrypted"):
        client.create("copy", 0, mounted("ext4"), parameters={"class": "linear"}, source=source)


@pytest.mark.variation
def test_a_storage_class_may_encrypt_though_its_class_does_not(client: Client, box: Box) -> None:
    parameters = {"class": "plain", "carver/encryption": "luks2"}
    volume = client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters=parameters)
    assert box.tags()["encryption"] == "luks2"
    assert client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters=parameters) == volume
    # What a call does not say is not compared.
    plain = {"class": "plain"}
    assert client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters=plain) == volume
    client.create("pvc-3", 48 * MIB, mounted("ext4"), parameters=plain)
    with expect.code("ALREADY_EXISTS", "encryption"):
        client.create("pvc-3", 48 * MIB, mounted("ext4"), parameters=parameters)
    with expect.code("INVALID_ARGUMENT", "luks2"):
        client.create("pvc-2", 1, mounted("ext4"), parameters={"encryption": "rot13"})
    box.stage(volume, KEY)


@pytest.mark.variation
def test_an_inline_volume_is_encrypted_by_the_secret_of_its_pod(client: Client, box: Box) -> None:
    attributes = {"carver/class": "linear", "carver/size": "48MiB"}
    with expect.code("INVALID_ARGUMENT", "there is no key"):
        client.publish_inline("csi-1", box.target, attributes, mounted("ext4"))
    assert box.used_extents() == 0
    client.publish_inline("csi-1", box.target, attributes, mounted("ext4"), secrets=KEY)
    assert box.mapping("eph-csi-1") is not None
    client.publish_inline("csi-1", box.target, attributes, mounted("ext4"), secrets=KEY)
    client.unpublish("csi-1", box.target)
    assert box.used_extents() == 0
    assert table.read(box.host.kernel).under(str(box.host.directory)) == ()


@pytest.mark.variation
def test_a_class_says_which_work_queues_are_bypassed(client: Client, box: Box) -> None:
    flags = {"--perf-no_read_workqueue", "--perf-no_write_workqueue"}
    for name, expected in (("bypassing", flags), ("linear", set())):
        volume = client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters={"class": name})
        box.host.commands.clear()
        box.stage(volume, KEY)
        assert box.mapping() is not None
        assert flags & {word for words in box.host.commands for word in words} == expected
        # It grows with the flags that it has.
        client.node_expand(volume.volume_id, box.staging, 64 * MIB, KEY)
        box.unstage(volume)
        client.delete(volume.volume_id)


@pytest.mark.variation
def test_the_commands_of_opening_and_closing(client: Client, box: Box) -> None:
    def cost() -> list[str]:
        run = [words[2:] if words[0] == "env" else words for words in box.host.commands]
        box.host.commands.clear()
        return [" ".join(one[: 1 + (one[0] in ("lvm", "cryptsetup"))]) for one in run]

    volume = create(client)
    cost()
    box.stage(volume, KEY)
    first = cost()
    assert first == [
        *("lvm fullreport", "cryptsetup luksFormat", "cryptsetup open", "mkfs.ext4"),
        "lvm lvchange",
    ]
    box.stage(volume, KEY)
    client.publish(volume, box.staging, box.target, mounted("ext4"))
    client.unpublish(volume.volume_id, box.target)
    assert cost() == []
    box.unstage(volume)
    assert cost() == ["cryptsetup close"]
    box.unstage(volume)
    assert cost() == []
