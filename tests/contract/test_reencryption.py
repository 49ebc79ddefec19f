"""Copies that versions up to 0.2.0 were to re-encrypt: used as they are, or refused.

An operator finishes with cryptsetup what was begun. Carver begins no re-encryption any more.
"""

from collections.abc import Mapping
from dataclasses import replace

import configured
import expect
import pytest
from csi_client import Client
from encrypted import Box
from real.any import AnyHost

from agent.csi.client import block, of_snapshot, of_volume
from agent.volumes.luks_mappings import own_uuid
from lvm import volumes
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
BLOCK_BYTES = 4096
SIZE = 48 * MIB
KEY = {"passphrase": "correct horse battery staple"}
MARK, AT = b"not-for-the-disk".ljust(BLOCK_BYTES, b"\1"), 8 * MIB
COPY = "vol-copy"
pytestmark = pytest.mark.settings(classes=(replace(configured.SEALED, default=True),))


@pytest.fixture
def box(client: Client, host: AnyHost, group: str) -> Box:
    return Box(client, host, group)


@pytest.fixture
def source(client: Client, box: Box) -> csi.Volume:
    """A raw volume with a mark, in no use."""
    made = client.create("source", SIZE, block())
    box.stage(made, KEY, block())
    box.host.write_bytes(box.opened("vol-source"), AT, MARK)
    box.unstage(made)
    return made


@pytest.fixture
def copy(client: Client, box: Box, source: csi.Volume) -> csi.Volume:
    """A copy as 0.2.0 made it, and never used."""
    made = client.create("copy", 0, block(), source=of_volume(source.volume_id))
    tags = {"reencrypt": "true", "sharedKey": "yes"}
    volumes.mark(box.host.lvm, box.group, COPY, old_tags={}, new_tags=tags)
    return made


def cryptsetup(box: Box, *words: str) -> Result:
    """What an operator says, with the key at standard input; it must succeed."""
    key = bytearray(KEY["passphrase"].encode())
    ended = box.host.run("cryptsetup", *words, stdin=key)
    assert ended.exit_code == 0, ended
    return ended


def begin(box: Box) -> None:
    """Begin to re-encrypt the copy, as 0.2.0 did."""
    cheap = ("--pbkdf", "argon2id", "--pbkdf-memory", "65536", "--pbkdf-force-iterations", "4")
    words = ("--batch-mode", "--init-only", "--key-file", "-", "--key-slot", "0", *cheap)
    cryptsetup(box, "reencrypt", *words, "--", box.logical(COPY))


def inside(box: Box) -> bytes:
    """What the open copy holds where the mark was written."""
    return box.host.read_bytes(box.opened(COPY), AT, BLOCK_BYTES)


def outside(box: Box, name: str) -> bytes:
    """What is on the disk where a volume has the mark."""
    return box.host.read_bytes(box.logical(name), box.header(name).offset_bytes + AT, BLOCK_BYTES)


def restored(client: Client, box: Box, copy: csi.Volume) -> bytes:
    """What a restore of a snapshot of the copy holds where the mark was written."""
    taken = client.snapshot("snap", copy.volume_id)
    made = client.create("third", 0, block(), source=of_snapshot(taken.snapshot_id))
    client.stage(made, box.host.directory / "third", block(), KEY)
    return box.host.read_bytes(box.opened("vol-third"), AT, BLOCK_BYTES)


def test_a_copy_that_awaited_it_keeps_the_sources_master_key(
    client: Client, box: Box, copy: csi.Volume
) -> None:
    client.snapshot("before", copy.volume_id)
    box.stage(copy, KEY, block())
    assert inside(box) == MARK
    assert outside(box, COPY) == outside(box, "vol-source")
    assert box.header(COPY).uuid == box.header("vol-source").uuid
    assert "sharedKey" not in box.tags(COPY)
    assert restored(client, box, copy) == MARK


@pytest.mark.variation
def test_a_copy_of_an_unused_volume_has_a_header_of_its_own(client: Client, box: Box) -> None:
    source = client.create("source", SIZE, block())
    made = client.create("copy", 0, block(), source=of_volume(source.volume_id))
    volumes.mark(box.host.lvm, box.group, COPY, old_tags={}, new_tags={"sharedKey": "yes"})
    box.stage(made, KEY, block())
    assert box.header(COPY).uuid == own_uuid(box.device(COPY))
    assert "sharedKey" not in box.tags(COPY)


def test_a_copy_in_the_midst_of_it_is_left_to_cryptsetup(
    client: Client, box: Box, copy: csi.Volume
) -> None:
    begin(box)
    path = box.logical(COPY)
    before = box.host.read_bytes(path, 0, 16 * MIB)
    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", f"`cryptsetup reencrypt --resume-only {path}`"):
            box.stage(copy, KEY, block())
    assert box.mapping(COPY) is None
    assert box.host.read_bytes(path, 0, 16 * MIB) == before
    assert box.tags(COPY)["sharedKey"] == "yes"

    cryptsetup(box, "reencrypt", "--resume-only", "--key-file", "-", "--", path)
    box.stage(copy, KEY, block())
    assert inside(box) == MARK
    assert outside(box, COPY) != outside(box, "vol-source")
    assert "sharedKey" not in box.tags(COPY)
    assert restored(client, box, copy) == MARK


@pytest.mark.variation
def test_a_copy_in_the_midst_of_it_can_be_deleted(
    client: Client, box: Box, source: csi.Volume, copy: csi.Volume
) -> None:
    begin(box)
    client.delete(copy.volume_id)
    assert [one.volume_id for one in client.volumes()] == [source.volume_id]


@pytest.mark.variation
def test_a_copy_whose_tags_were_not_written_at_its_end_is_used(
    client: Client, box: Box, copy: csi.Volume
) -> None:
    begin(box)
    path, own = box.logical(COPY), own_uuid(box.device(COPY))
    cryptsetup(box, "reencrypt", "--resume-only", "--key-file", "-", "--", path)
    cryptsetup(box, "luksUUID", "--batch-mode", "--uuid", own, "--", path)
    assert box.tags(COPY)["sealed"] != own
    box.stage(copy, KEY, block())
    assert inside(box) == MARK
    assert (box.tags(COPY)["sealed"], "sharedKey" in box.tags(COPY)) == (own, False)
    assert restored(client, box, copy) == MARK


@pytest.mark.variation
@pytest.mark.parametrize("key", ["reencrypt", "carver/reencrypt"])
@pytest.mark.parametrize("value", ["true", "false", ""])
def test_a_storage_class_that_asks_for_it_is_refused(client: Client, key: str, value: str) -> None:
    parameters: Mapping[str, str] = {"carver/encryption": "luks2", key: value}
    words = (f"parameters[{key}]: was removed after version 0.2.0", "leave it out", "new volume")
    with expect.code("INVALID_ARGUMENT", *words):
        client.create("source", SIZE, block(), parameters=parameters)
    assert client.volumes() == []
    with expect.code("INVALID_ARGUMENT", *words):
        client.capacity(parameters)
