"""Open encrypted volumes: after a kill, backups of headers, key files."""

import json
from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
from fakes import cryptsetup
from fakes.devices import FakeDevice
from fakes.host import FakeHost

from agent.core import errors
from agent.csi.client import Client, mounted
from agent.operations import encrypt
from agent.settings.settings import Config
from mount import luks
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
KEY = {"passphrase": "correct horse"}
NEW = {"passphrase": "battery staple", "previousPassphrase": "correct horse"}
pytestmark = pytest.mark.settings(
    classes=(replace(configured.PLAIN, encryption="luks2"),), header_backups=Path("headers/here")
)


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    return client.create("pvc-1", 48 * MIB, mounted("ext4"))


def device(fake: FakeHost) -> FakeDevice:
    [group] = fake.lvm2.groups
    found = fake.devices.find(group, "vol-pvc-1")
    assert found is not None
    return fake.block.get(found.path)


class Use:
    """A volume, as kubelet stages it by a secret."""

    def __init__(self, client: Client, volume: csi.Volume, staging: Path) -> None:
        self._client, self.volume, self._staging = client, volume, staging

    def begin(self, secret: dict[str, str]) -> None:
        self._client.stage(self.volume, self._staging, mounted("ext4"), secret)

    def end(self) -> None:
        self._client.unstage(self.volume.volume_id, self._staging)

    def once(self, *secrets: dict[str, str]) -> None:
        """Stage and unstage it by each of these."""
        for one in secrets:
            self.begin(one)
            self.end()

    def begin_failing(self, fake: FakeHost, word: str, secret: dict[str, str]) -> None:
        """Stage it while cryptsetup with this word among its arguments fails."""
        fake.intercept = lambda words: Result(1, "", "no luck") if word in words else None
        with expect.code("INTERNAL", "no luck"):
            self.begin(secret)
        fake.intercept = lambda _: None

    def begin_refused(self, *keys: str) -> None:
        for one in keys:
            with expect.code("UNAUTHENTICATED"):
                self.begin({"passphrase": one})


@pytest.fixture
def use(client: Client, volume: csi.Volume, tmp_path: Path) -> Use:
    return Use(client, volume, tmp_path / "staging")


def remove_slots(fake: FakeHost) -> None:
    """Have the header of the volume without a key slot, as a killed cryptsetup leaves it."""
    header = cryptsetup._read(device(fake))
    assert header is not None
    cryptsetup._put(device(fake), cryptsetup._uuid(device(fake)), {**header, "keyslots": {}})


def test_a_header_without_a_slot_is_made_anew_only_before_the_first_use(
    fake: FakeHost, use: Use
) -> None:
    use.begin_failing(fake, "open", KEY)
    remove_slots(fake)
    use.once(KEY)
    remove_slots(fake)
    before = dict(device(fake).media.blocks)
    use.begin_refused(KEY["passphrase"])
    assert device(fake).media.blocks == before


def test_one_copy_of_a_header_is_enough(fake: FakeHost, use: Use) -> None:
    use.once(KEY)
    for number in range(4):
        del device(fake).media.blocks[number]
    use.begin(KEY)


def test_a_changed_byte_invalidates_a_copy_of_a_header(fake: FakeHost) -> None:
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
    assert luks.has_header_copy(fake.kernel, path)


def test_a_backup_of_each_header_is_kept_from_first_use_until_deletion(
    client: Client, use: Use, config: Config
) -> None:
    kept = config.header_backups
    assert kept is not None
    use.once(KEY)
    [file] = kept.iterdir()
    assert (kept.stat().st_mode & 0o777, file.stat().st_mode & 0o077) == (0o700, 0)
    before = file.read_bytes()
    use.once(KEY)
    assert file.read_bytes() == before
    use.once(NEW)
    slots = json.loads(file.read_bytes()[4096 : luks.METADATA_BYTES].rstrip(b"\0"))["keyslots"]
    assert list(slots) == ["1"]
    client.delete(use.volume.volume_id)
    assert list(kept.iterdir()) == []


def test_a_failed_backup_of_a_header_fails_no_call(use: Use, config: Config) -> None:
    assert config.header_backups is not None
    config.header_backups.parent.write_text("no directory")
    use.begin(KEY)


def test_a_change_of_keys_after_an_unfinished_one_keeps_only_the_newest(
    fake: FakeHost, use: Use
) -> None:
    use.once(KEY)
    use.begin_failing(fake, "luksKillSlot", NEW)
    use.once({"passphrase": "a third one", "previousPassphrase": NEW["passphrase"]})
    use.begin_refused(KEY["passphrase"], NEW["passphrase"])
    use.begin({"passphrase": "a third one"})


@pytest.mark.parametrize("data", [b"", b"x" * 2049])
def test_a_key_file_that_is_empty_or_too_long_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(data)
    file.chmod(0o400)
    with pytest.raises(errors.NotReady, match="1 to 2048 bytes"):
        encrypt.read_key(str(file))


def test_a_key_file_that_others_can_read_or_that_is_no_file_is_refused(tmp_path: Path) -> None:
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


def lose_header_tag(fake: FakeHost) -> str:
    """Take away the tag that says how long the volume's header is."""
    [group] = fake.lvm2.groups.values()
    logical = group.volumes["vol-pvc-1"]
    [lost] = [one for one in logical.tags if one.startswith("carver.header=")]
    logical.tags.remove(lost)
    return lost


def test_a_volume_that_lost_the_length_of_its_header_gets_it_again_when_it_is_staged(
    fake: FakeHost, client: Client, use: Use
) -> None:
    use.once(KEY)
    lost = lose_header_tag(fake)
    # How much of a new size the header takes is not known.
    with expect.code("FAILED_PRECONDITION", "no `header`"):
        client.expand(use.volume.volume_id, 60 * MIB)
    use.once(KEY)
    [group] = fake.lvm2.groups.values()
    expect.soon(lambda: lost in group.volumes["vol-pvc-1"].tags)
    client.expand(use.volume.volume_id, 60 * MIB)


def test_a_header_is_not_made_anew_with_another_length(fake: FakeHost, use: Use) -> None:
    use.begin_failing(fake, "open", KEY)
    remove_slots(fake)
    lost = lose_header_tag(fake)
    before = dict(device(fake).media.blocks)
    with expect.code("FAILED_PRECONDITION", "no `header`"):
        use.begin(KEY)
    assert device(fake).media.blocks == before
    [group] = fake.lvm2.groups.values()
    group.volumes["vol-pvc-1"].tags.add(lost)
    use.once(KEY)
