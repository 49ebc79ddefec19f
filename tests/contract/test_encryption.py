"""Encrypted volumes: their whole life on each layout, and what must not happen to them."""

from pathlib import Path

import chosen
import configured
import expect
import pytest
from csi_client import Client
from real.any import AnyHost

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import block, mounted, of_snapshot, of_volume
from lvm import report, tags
from lvm.devices import Device
from lvm.layout import Layout
from lvm.thin import Policy
from mount import luks, table
from proto import csi_pb2 as csi

MIB = 1 << 20
BLOCK_BYTES = 4096
END_BYTES = 64 << 10
KEY = {"passphrase": "correct horse battery staple"}
OTHER = {"passphrase": "Tr0ub4dor&3"}
BOTH = {"passphrase": OTHER["passphrase"], "previousPassphrase": KEY["passphrase"]}
MARK = b"not-for-the-disk"
LAYOUTS = {**configured.LAYOUTS, "striped": Layout("striped", stripes=2, stripe_size_bytes=65536)}
SIZES = {"ext4": 48 * MIB, "xfs": 300 * MIB, "btrfs": 256 * MIB}


@pytest.fixture
def group(host: AnyHost) -> str:
    """Five disks."""
    return host.new_group(200, 200, 200, 200, 200)


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
    return Config(**{**vars(config), "classes": tuple(every)})


def create(
    client: Client, name: str = "linear", size: int = 48 * MIB, fs_type: str = "ext4"
) -> csi.Volume:
    capability = mounted(fs_type) if fs_type else block()
    return client.create("pvc-1", size, capability, parameters={"class": name})


def logical(host: AnyHost, group: str, name: str = "vol-pvc-1") -> Device:
    device = host.devices.find(group, name)
    assert device is not None
    return device


def own_tags(host: AnyHost, group: str, name: str = "vol-pvc-1") -> dict[str, str]:
    return dict(tags.decode(report.read(host.lvm).group(group).volume(name).tags))


def opened(host: AnyHost, group: str) -> str:
    """The device by which the open volume is used."""
    found = mapping(host, group)
    assert found is not None
    return found.path


def mapping(host: AnyHost, group: str, name: str = "vol-pvc-1") -> Device | None:
    device = host.devices.find(group, name)
    return None if device is None else host.devices.mapping(device)


def used(host: AnyHost, group: str) -> int:
    found = report.read(host.lvm).group(group)
    return found.extents - found.free_extents


def holds(host: AnyHost, device: str, text: bytes) -> bool:
    size = host.kernel.device_size_bytes(device)
    return any(text in host.read_bytes(device, at, 4 * MIB) for at in range(0, size, 4 * MIB))


@pytest.mark.parametrize("fs_type", chosen.kinds(["ext4", "xfs", "btrfs", "block"], usual=["ext4"]))
@pytest.mark.parametrize("name", chosen.kinds(LAYOUTS, usual=["thin"]))
def test_an_encrypted_volume_of_each_layout_lives_grows_and_is_copied(
    client: Client, host: AnyHost, group: str, name: str, fs_type: str
) -> None:
    staging, target = host.directory / "staging", host.directory / "target"
    before = client.capacity({"class": "plain"}).available_capacity
    fs_type = fs_type.removeprefix("block")
    size = SIZES.get(fs_type, 48 * MIB)
    capability = mounted(fs_type) if fs_type else block()
    volume = create(client, name, size, fs_type)
    assert volume.capacity_bytes >= size
    assert volume.volume_context["carver/encryption"] == "luks2"

    client.stage(volume, staging, capability, KEY)
    client.publish(volume, staging, target, capability)
    device = opened(host, group)
    assert host.kernel.device_size_bytes(device) == volume.capacity_bytes
    header = luks.read(host.kernel, logical(host, group).path)
    assert header is not None
    assert header.offset_bytes % LAYOUTS[name].stripes == 0
    assert header.key_derivation == ("argon2id",)
    if not fs_type:
        host.write_bytes(device, 8 * MIB, MARK.ljust(BLOCK_BYTES, b"\0"))
        assert holds(host, device, MARK)
        assert not holds(host, logical(host, group).path, MARK)

    grown = client.node_expand(volume.volume_id, target, size + 48 * MIB, KEY).capacity_bytes
    assert grown >= size + 48 * MIB
    assert host.kernel.device_size_bytes(device) == grown
    assert client.stats(volume.volume_id, target).usage[0].total > (size + 48 * MIB) * 0.5

    taken = client.snapshot("snap-1", volume.volume_id)
    assert taken.size_bytes == grown
    there = host.directory / "copy"
    for source in (of_snapshot(taken.snapshot_id), of_volume(volume.volume_id)):
        copy = client.create("copy", 0, capability, parameters={"class": name}, source=source)
        assert copy.capacity_bytes == grown
        client.stage(copy, there, capability, KEY)
        if not fs_type:
            copied = mapping(host, group, "vol-copy")
            assert copied is not None
            assert holds(host, copied.path, MARK)
        client.unstage(copy.volume_id, there)
        client.delete(copy.volume_id)
    client.delete_snapshot(taken.snapshot_id)

    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    assert mapping(host, group) is None
    client.delete(volume.volume_id)
    assert client.volumes() == []
    if name != "thin":
        assert client.capacity({"class": "plain"}).available_capacity == before
        assert used(host, group) == 0


def test_all_of_the_capacity_can_be_claimed(client: Client) -> None:
    free = client.capacity({"class": "linear"}).available_capacity
    assert free == client.capacity({"class": "plain"}).available_capacity - 4 * MIB
    volume = create(client, size=free)
    assert volume.capacity_bytes == free
    assert client.capacity({"class": "linear"}).available_capacity == 0
    assert create(client, size=free) == volume
    with expect.code("ALREADY_EXISTS"):
        create(client, size=4 * MIB + free)


def test_without_a_key_nothing_is_written(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    volume = create(client)
    device = logical(host, group).path
    before = host.read_bytes(device, 0, 4 * MIB)
    for capability in (mounted("ext4"), block()):
        with expect.code("INVALID_ARGUMENT", "passphrase", "node-stage-secret"):
            client.stage(volume, staging, capability)
    assert not staging.exists()
    assert host.read_bytes(device, 0, 4 * MIB) == before
    client.stage(volume, staging, mounted("ext4"), KEY)
    # A staged volume needs no key.
    client.stage(volume, staging, mounted("ext4"))


@pytest.fixture
def sealed(client: Client, staging: Path) -> csi.Volume:
    """A volume that was staged by a key, and is closed."""
    volume = create(client)
    client.stage(volume, staging, mounted("ext4"), KEY)
    client.unstage(volume.volume_id, staging)
    return volume


def test_a_wrong_key_changes_nothing(
    client: Client, host: AnyHost, group: str, staging: Path, sealed: csi.Volume
) -> None:
    device = logical(host, group).path
    before = host.read_bytes(device, 0, 4 * MIB)
    with expect.code("UNAUTHENTICATED", "the key does not open"):
        client.stage(sealed, staging, mounted("ext4"), OTHER)
    assert mapping(host, group) is None
    assert host.read_bytes(device, 0, 4 * MIB) == before
    client.stage(sealed, staging, mounted("ext4"), KEY)


@pytest.mark.variation
@pytest.mark.parametrize("secrets", [{"passphrase": ""}, {"passphrase": "x" * 3000}])
def test_a_key_that_is_empty_or_too_long_is_refused(
    client: Client, staging: Path, secrets: dict[str, str]
) -> None:
    volume = create(client)
    with expect.code("INVALID_ARGUMENT", "secrets[passphrase]", "1 to 2048 bytes"):
        client.stage(volume, staging, mounted("ext4"), secrets)


def test_a_volume_that_is_not_encrypted_is_never_opened_as_one(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    volume = create(client, "plain")
    before = host.read_bytes(logical(host, group).path, 0, 4 * MIB)
    for capability in (mounted("ext4"), block()):
        with expect.code("INVALID_ARGUMENT", "is not encrypted"):
            client.stage(volume, staging, capability, KEY)
    assert host.read_bytes(logical(host, group).path, 0, 4 * MIB) == before
    client.stage(volume, staging, mounted("ext4"), {"user": "alice"})


@pytest.mark.variation
def test_the_device_of_a_closed_encrypted_volume_is_not_published(
    client: Client, staging: Path, target: Path
) -> None:
    volume = create(client, fs_type="")
    # As with a PersistentVolume made by hand, whose attributes say nothing.
    bare = csi.Volume(volume_id=volume.volume_id)
    with expect.code("INVALID_ARGUMENT", "is encrypted"):
        client.stage(bare, staging, block())
    with expect.code("FAILED_PRECONDITION", "is encrypted, and not open"):
        client.publish(bare, staging, target, block())
    assert not target.exists()
    client.stage(bare, staging, block(), KEY)
    client.publish(bare, staging, target, block())


def test_a_lost_header_is_never_made_anew(
    client: Client, host: AnyHost, group: str, staging: Path, sealed: csi.Volume
) -> None:
    host.erase(logical(host, group).path)
    for zero in range(0, 4 * MIB, MIB):
        host.write_bytes(logical(host, group).path, zero, bytes(MIB))
    with expect.code("FAILED_PRECONDITION", "header", "header restore"):
        client.stage(sealed, staging, mounted("ext4"), KEY)
    assert host.read_bytes(logical(host, group).path, 0, 4 * MIB) == bytes(4 * MIB)
    client.delete(sealed.volume_id)


@pytest.mark.variation
def test_the_ends_of_a_new_volume_are_blank_and_keep_what_is_written(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    """Noise may read as a file system, and a volume with one is never formatted."""
    volume = create(client, fs_type="")
    below = logical(host, group).path
    ends = (0, volume.capacity_bytes - END_BYTES)
    leftover = bytes(range(256)) * (BLOCK_BYTES // 256)
    for at in ends:
        # Where the header is, there is nothing yet.
        begin = host.kernel.device_size_bytes(below) - volume.capacity_bytes
        host.write_bytes(below, begin + at, leftover)
    client.stage(volume, staging, block(), KEY)
    within = opened(host, group)
    for at in ends:
        assert host.read_bytes(within, at, END_BYTES) == bytes(END_BYTES)
        host.write_bytes(within, at, MARK.ljust(BLOCK_BYTES, b"\0"))
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, block(), KEY)
    for at in ends:
        assert host.read_bytes(within, at, END_BYTES).startswith(MARK)
    client.unstage(volume.volume_id, staging)


@pytest.mark.variation
def test_a_header_of_another_volume_is_not_opened(
    client: Client, host: AnyHost, group: str, staging: Path, sealed: csi.Volume
) -> None:
    other = client.create("other", 48 * MIB, mounted("ext4"), parameters={"class": "linear"})
    client.stage(other, staging, mounted("ext4"), KEY)
    client.unstage(other.volume_id, staging)
    header = host.read_bytes(logical(host, group, "vol-other").path, 0, 4 * MIB)
    host.write_bytes(logical(host, group).path, 0, header)
    with expect.code("FAILED_PRECONDITION", "there is another header"):
        client.stage(sealed, staging, mounted("ext4"), KEY)


def test_other_contents_than_a_header_are_left_alone(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    volume = create(client)
    host.write(logical(host, group).path, "ext4")
    with expect.code("FAILED_PRECONDITION", "ext4"):
        client.stage(volume, staging, mounted("ext4"), KEY)


def test_a_new_key_replaces_the_previous_one(
    client: Client, host: AnyHost, group: str, staging: Path, sealed: csi.Volume
) -> None:
    for _ in range(2):  # until kubelet has the secret without the old one
        client.stage(sealed, staging, mounted("ext4"), BOTH)
        client.unstage(sealed.volume_id, staging)
    with expect.code("UNAUTHENTICATED"):
        client.stage(sealed, staging, mounted("ext4"), KEY)
    client.stage(sealed, staging, mounted("ext4"), OTHER)
    header = luks.read(host.kernel, logical(host, group).path)
    assert header is not None
    assert len(header.slots) == 1


@pytest.mark.variation
def test_a_volume_that_neither_of_two_keys_opens_stays_closed(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    volume = create(client)
    client.stage(volume, staging, mounted("ext4"), {"passphrase": "a third"})
    client.unstage(volume.volume_id, staging)
    with expect.code("UNAUTHENTICATED"):
        client.stage(volume, staging, mounted("ext4"), BOTH)
    assert mapping(host, group) is None


@pytest.mark.variation
def test_a_key_file_opens_a_volume_without_a_secret(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path, config: Config
) -> None:
    volume = create(client, "filed")
    client.stage(volume, staging, mounted("ext4"))
    assert client.node_expand(volume.volume_id, staging, 64 * MIB).capacity_bytes == 64 * MIB
    assert host.kernel.device_size_bytes(opened(host, group)) == 64 * MIB
    client.unstage(volume.volume_id, staging)
    [file] = [one.key_file for one in config.classes if one.key_file]
    file.chmod(0o444)
    with expect.code("FAILED_PRECONDITION", "key_file", "chmod 0400"):
        client.stage(volume, staging, mounted("ext4"))


@pytest.mark.variation
def test_growth_without_a_key_is_completed_by_the_next_stage(
    client: Client, group: str, staging: Path
) -> None:
    volume = create(client)
    client.stage(volume, staging, mounted("ext4"), KEY)
    with expect.code("FAILED_PRECONDITION", "node-expand-secret"):
        client.node_expand(volume.volume_id, staging, 96 * MIB)
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, mounted("ext4"), KEY)
    assert client.node_expand(volume.volume_id, staging, 96 * MIB).capacity_bytes == 96 * MIB
    assert client.stats(volume.volume_id, staging).usage[0].total > 60 * MIB


@pytest.mark.variation
def test_an_unused_mapping_is_reopened_by_its_key_only_and_deleted(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    volume = create(client, fs_type="")
    client.stage(volume, staging, block(), KEY)
    assert mapping(host, group) is not None
    with expect.code("UNAUTHENTICATED"):
        client.stage(volume, staging, block(), OTHER)
    client.stage(volume, staging, block(), KEY)
    client.delete(volume.volume_id)
    assert used(host, group) == 0


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "deleted"])
def test_a_half_open_volume_counts_as_closed(
    client: Client, host: AnyHost, group: str, staging: Path, is_used: bool
) -> None:
    volume = create(client)
    host.half_open(logical(host, group))
    assert mapping(host, group) is None
    if is_used:
        client.stage(volume, staging, mounted("ext4"), KEY)
        client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)
    assert used(host, group) == 0


def test_a_volume_in_use_is_neither_deleted_nor_closed(
    client: Client, host: AnyHost, group: str, staging: Path, target: Path
) -> None:
    volume = create(client)
    client.stage(volume, staging, mounted("ext4"), KEY)
    client.publish(volume, staging, target, mounted("ext4"))
    with expect.code("FAILED_PRECONDITION", "mounted"):
        client.delete(volume.volume_id)
    client.unstage(volume.volume_id, staging)
    assert mapping(host, group) is not None
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    assert mapping(host, group) is None


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
def test_a_storage_class_may_encrypt_though_its_class_does_not(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    parameters = {"class": "plain", "carver/encryption": "luks2"}
    volume = client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters=parameters)
    assert own_tags(host, group)["encryption"] == "luks2"
    assert client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters=parameters) == volume
    with expect.code("ALREADY_EXISTS", "encryption"):
        client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters={"class": "plain"})
    with expect.code("INVALID_ARGUMENT", "luks2"):
        client.create("pvc-2", 1, mounted("ext4"), parameters={"encryption": "rot13"})
    client.stage(volume, staging, mounted("ext4"), KEY)


def test_an_inline_volume_is_encrypted_by_the_secret_of_its_pod(
    client: Client, host: AnyHost, group: str, target: Path
) -> None:
    attributes = {"carver/class": "linear", "carver/size": "48MiB"}
    with expect.code("INVALID_ARGUMENT", "there is no key"):
        client.publish_inline("csi-1", target, attributes, mounted("ext4"))
    assert used(host, group) == 0
    client.publish_inline("csi-1", target, attributes, mounted("ext4"), secrets=KEY)
    assert mapping(host, group, "eph-csi-1") is not None
    client.publish_inline("csi-1", target, attributes, mounted("ext4"), secrets=KEY)
    client.unpublish("csi-1", target)
    assert used(host, group) == 0
    assert table.read(host.kernel).under(str(host.directory)) == ()


@pytest.mark.variation
def test_a_class_says_which_work_queues_are_bypassed(
    client: Client, host: AnyHost, group: str, staging: Path
) -> None:
    flags = {"--perf-no_read_workqueue", "--perf-no_write_workqueue"}
    for name, expected in (("bypassing", flags), ("linear", set())):
        volume = client.create("pvc-1", 48 * MIB, mounted("ext4"), parameters={"class": name})
        host.commands.clear()
        client.stage(volume, staging, mounted("ext4"), KEY)
        assert mapping(host, group) is not None
        assert flags & {word for words in host.commands for word in words} == expected
        # It grows with the flags that it has.
        client.node_expand(volume.volume_id, staging, 64 * MIB, KEY)
        client.unstage(volume.volume_id, staging)
        client.delete(volume.volume_id)


@pytest.mark.variation
def test_the_commands_of_opening_and_closing(
    client: Client, host: AnyHost, staging: Path, target: Path
) -> None:
    def cost() -> list[str]:
        run = [words[2:] if words[0] == "env" else words for words in host.commands]
        host.commands.clear()
        return [" ".join(one[: 1 + (one[0] in ("lvm", "cryptsetup"))]) for one in run]

    volume = create(client)
    cost()
    client.stage(volume, staging, mounted("ext4"), KEY)
    first = cost()
    assert first == [
        *("lvm fullreport", "cryptsetup luksFormat", "cryptsetup open", "mkfs.ext4"),
        "lvm lvchange",
    ]
    client.stage(volume, staging, mounted("ext4"), KEY)
    client.publish(volume, staging, target, mounted("ext4"))
    client.unpublish(volume.volume_id, target)
    assert cost() == []
    client.unstage(volume.volume_id, staging)
    assert cost() == ["cryptsetup close"]
    client.unstage(volume.volume_id, staging)
    assert cost() == []
