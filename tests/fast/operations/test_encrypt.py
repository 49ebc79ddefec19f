"""Encrypted volumes, opened: what a kill left, kept copies of headers, files with keys."""

import json
from pathlib import Path

import configured
import expect
import pytest
from fakes import cryptsetup
from fakes.devices import FakeDevice
from fakes.host import FakeHost

from agent.core import errors
from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Client, mounted
from agent.operations import encrypt
from mount import luks
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
KEY = {"passphrase": "correct horse"}
NEW = {"passphrase": "battery staple", "previousPassphrase": "correct horse"}


@pytest.fixture
def config(fake: FakeHost, tmp_path: Path) -> Config:
    [group] = fake.lvm2.groups
    only = DeviceClass("plain", group, default=True, encryption="luks2")
    return configured.carver(
        tmp_path, group, classes=(only,), header_backups=tmp_path / "headers" / "here"
    )


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    return client.create("pvc-1", 48 * MIB, mounted("ext4"))


def device(fake: FakeHost) -> FakeDevice:
    [group] = fake.lvm2.groups
    found = fake.devices.find(group, "vol-pvc-1")
    assert found is not None
    return fake.block.get(found.path)


def test_a_header_without_a_slot_that_a_killed_cryptsetup_left_is_made_anew(
    client: Client, fake: FakeHost, volume: csi.Volume, tmp_path: Path
) -> None:
    fake.intercept = lambda words: Result(1, "", "no luck") if "open" in words else None
    with expect.code("INTERNAL", "no luck"):
        client.stage(volume, tmp_path / "staging", mounted("ext4"), KEY)
    fake.intercept = lambda _: None
    told = cryptsetup._told(device(fake))
    assert told is not None
    cryptsetup._put(device(fake), cryptsetup._uuid(device(fake)), {**told, "keyslots": {}})
    client.stage(volume, tmp_path / "staging", mounted("ext4"), KEY)


def test_one_that_was_in_use_is_not(
    client: Client, fake: FakeHost, volume: csi.Volume, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    client.stage(volume, staging, mounted("ext4"), KEY)
    client.unstage(volume.volume_id, staging)
    told = cryptsetup._told(device(fake))
    assert told is not None
    cryptsetup._put(device(fake), cryptsetup._uuid(device(fake)), {**told, "keyslots": {}})
    before = dict(device(fake).media.blocks)
    with expect.code("UNAUTHENTICATED"):
        client.stage(volume, staging, mounted("ext4"), KEY)
    assert device(fake).media.blocks == before


def test_one_copy_of_a_header_is_enough(
    client: Client, fake: FakeHost, volume: csi.Volume, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    client.stage(volume, staging, mounted("ext4"), KEY)
    client.unstage(volume.volume_id, staging)
    for number in range(4):
        del device(fake).media.blocks[number]
    client.stage(volume, staging, mounted("ext4"), KEY)


def test_a_changed_byte_makes_a_copy_of_a_header_none(fake: FakeHost) -> None:
    path = fake.new_device(64 * MIB)
    words = ["cryptsetup", "luksFormat", "--type", "luks2", "--pbkdf", "argon2id"]
    words += ["--key-slot", "0", "--sector-size", "4096", "--offset", "8192", "--cipher", "x"]
    fake.run(*words, "--uuid", "u", "--", path, stdin=bytearray(b"sesame"))
    assert luks.read(fake.kernel, path) is not None
    for start in (0, luks.METADATA_BYTES):
        block = bytearray(fake.read_bytes(path, start + 4096, 4096))
        block[10] ^= 1
        fake.write_bytes(path, start + 4096, bytes(block))
    assert luks.read(fake.kernel, path) is None
    assert luks.bears_any(fake.kernel, path)


def test_a_copy_of_each_header_is_kept_from_its_first_use_to_its_end(
    client: Client, volume: csi.Volume, config: Config, tmp_path: Path
) -> None:
    staging, kept = tmp_path / "staging", config.header_backups
    assert kept is not None
    client.stage(volume, staging, mounted("ext4"), KEY)
    client.unstage(volume.volume_id, staging)
    [file] = kept.iterdir()
    assert (kept.stat().st_mode & 0o777, file.stat().st_mode & 0o077) == (0o700, 0)
    before = file.read_bytes()
    client.stage(volume, staging, mounted("ext4"), KEY)
    client.unstage(volume.volume_id, staging)
    assert file.read_bytes() == before
    client.stage(volume, staging, mounted("ext4"), NEW)
    client.unstage(volume.volume_id, staging)
    slots = json.loads(file.read_bytes()[4096 : luks.METADATA_BYTES].rstrip(b"\0"))["keyslots"]
    assert list(slots) == ["1"]
    client.delete(volume.volume_id)
    assert list(kept.iterdir()) == []


def test_a_copy_that_cannot_be_kept_keeps_no_pod_waiting(
    client: Client, volume: csi.Volume, config: Config, tmp_path: Path
) -> None:
    assert config.header_backups is not None
    config.header_backups.parent.write_text("no directory")
    client.stage(volume, tmp_path / "staging", mounted("ext4"), KEY)


def test_a_killed_change_of_keys_is_brought_to_its_end(
    client: Client, fake: FakeHost, volume: csi.Volume, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    client.stage(volume, staging, mounted("ext4"), KEY)
    client.unstage(volume.volume_id, staging)
    fake.intercept = lambda words: Result(1, "", "no luck") if "luksKillSlot" in words else None
    with expect.code("INTERNAL", "no luck"):
        client.stage(volume, staging, mounted("ext4"), NEW)
    fake.intercept = lambda _: None
    client.stage(volume, staging, mounted("ext4"), NEW)
    client.unstage(volume.volume_id, staging)
    with expect.code("UNAUTHENTICATED"):
        client.stage(volume, staging, mounted("ext4"), KEY)


def test_a_change_of_keys_that_meets_one_that_was_never_ended_leaves_the_newest_alone(
    client: Client, fake: FakeHost, volume: csi.Volume, tmp_path: Path
) -> None:
    how, staging = mounted("ext4"), tmp_path / "staging"
    client.stage(volume, staging, how, KEY)
    client.unstage(volume.volume_id, staging)
    fake.intercept = lambda words: Result(1, "", "no luck") if "luksKillSlot" in words else None
    with expect.code("INTERNAL", "no luck"):
        client.stage(volume, staging, how, NEW)
    fake.intercept = lambda _: None
    third = {"passphrase": "a third one", "previousPassphrase": NEW["passphrase"]}
    client.stage(volume, staging, how, third)
    client.unstage(volume.volume_id, staging)
    for one in (KEY["passphrase"], NEW["passphrase"]):
        with expect.code("UNAUTHENTICATED"):
            client.stage(volume, staging, how, {"passphrase": one})
    client.stage(volume, staging, how, {"passphrase": third["passphrase"]})


@pytest.mark.parametrize("data", [b"", b"x" * 2049])
def test_a_file_without_a_key_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(data)
    file.chmod(0o400)
    with pytest.raises(errors.NotReady, match="1 to 2048 bytes"):
        encrypt.read_key(str(file))


def test_a_file_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"sesame")
    file.chmod(0o440)
    for path in (file, tmp_path):
        with pytest.raises(errors.NotReady, match="only its owner"):
            encrypt.read_key(str(path))
    with pytest.raises(errors.NotReady, match="cannot be read"):
        encrypt.read_key(str(tmp_path / "nowhere"))
    file.chmod(0o400)
    assert encrypt.read_key(str(file)).data == b"sesame"
