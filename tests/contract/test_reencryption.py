"""Copies of encrypted volumes get a master key of their own, whatever interrupts that."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import chosen
import configured
import expect
import grpc
import pytest
import serving
from csi_client import Client
from encrypted import Box
from fakes.host import FakeHost
from real.any import AnyHost

from agent.cli import status
from agent.core.classes import DeviceClass
from agent.core.pace import Pace
from agent.core.settings import Config
from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.daemon.server import Service
from lvm.layout import Reserve
from proto import csi_pb2 as csi

MIB = 1 << 20
BLOCK_BYTES = 4096
SIZE = 48 * MIB
KEY = {"passphrase": "correct horse battery staple"}
OTHER = {"passphrase": "Tr0ub4dor&3"}
BOTH = {"passphrase": OTHER["passphrase"], "previousPassphrase": KEY["passphrase"]}
MARK, AT = b"not-for-the-disk".ljust(BLOCK_BYTES, b"\1"), 8 * MIB
_PATIENCE_SECONDS = 300
pytestmark = [
    # All but `shared` and `plain` give copies a master key of their own.
    pytest.mark.settings(
        classes=(
            replace(configured.SEALED, name="own", default=True, reencrypt=True),
            replace(configured.SEALED, name="shared"),
            DeviceClass("plain", "data"),
            replace(configured.THIN, encryption="luks2", reencrypt=True),
        )
    ),
]


@pytest.fixture
def service(service: Service) -> Service:
    """A stage call waits until all is done."""
    service.reencrypter.grace_seconds = 600
    return service


@pytest.fixture
def box(client: Client, host: AnyHost, group: str) -> Box:
    return Box(client, host, group)


def inside(box: Box, name: str) -> bytes:
    """What an open volume holds where the mark was written."""
    return box.host.read_bytes(box.opened(f"vol-{name}"), AT, BLOCK_BYTES)


def outside(box: Box, name: str) -> bytes:
    """The same place on the disk."""
    at = box.header(f"vol-{name}").offset_bytes + AT
    return box.host.read_bytes(box.logical(f"vol-{name}"), at, BLOCK_BYTES)


@pytest.fixture
def source(client: Client, box: Box, name: str) -> csi.Volume:
    """A raw volume with a mark, in no use."""
    made = client.create("source", SIZE, block(), parameters={"class": name})
    box.stage(made, KEY, block())
    box.host.write_bytes(box.opened("vol-source"), AT, MARK)
    box.unstage(made)
    return made


@pytest.fixture
def name() -> str:
    """The class of the source."""
    return "own"


def overview(host: AnyHost, config: Config) -> dict[str, tuple[str, str]]:
    """How volumes are encrypted, by `carver status`."""
    machine = serving.machine(host)
    return {one.name: (one.encryption, one.renewal) for one in status.read(config, machine).volumes}


def validated(
    client: Client, volume: csi.Volume, parameters: Mapping[str, str]
) -> csi.ValidateVolumeCapabilitiesResponse:
    """The answer about a volume, with its context."""
    return client.controller.ValidateVolumeCapabilities(
        csi.ValidateVolumeCapabilitiesRequest(
            volume_id=volume.volume_id,
            volume_context=volume.volume_context,
            volume_capabilities=[block()],
            parameters=parameters,
        )
    )


def copy(client: Client, source: csi.Volume, of: str = "own") -> csi.Volume:
    return client.create(
        "copy", 0, block(), parameters={"class": of}, source=of_volume(source.volume_id)
    )


def begin(client: Client, box: Box, service: Service, source: csi.Volume) -> csi.Volume:
    """A copy whose re-encryption is under way, for which no call waits."""
    service.reencrypter.grace_seconds = 0
    made = copy(client, source)
    with expect.code("ABORTED"):
        box.stage(made, KEY, block())
    return made


@pytest.fixture
def killed(client: Client, box: Box, source: csi.Volume) -> csi.Volume:
    """A copy whose re-encryption was killed in its midst."""
    made = copy(client, source)
    path = box.logical("vol-copy")
    with box.host.killed_reencryption(path), expect.code("INTERNAL"):
        box.stage(made, KEY, block())
    return made


def at_last(call: Callable[[], object]) -> set[str]:
    """Call again while the answer is ABORTED, as kubelet does; the messages of these."""
    said: set[str] = set()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            call()
            return said
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.ABORTED or time.monotonic() >= deadline:
                raise
            said.add(error.details() or "")
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "of"), [("shared", "own"), pytest.param("thin", "thin", marks=pytest.mark.variation)]
)
@pytest.mark.parametrize("kind", chosen.kinds(["snapshot", "volume"], usual=["snapshot"]))
@pytest.mark.long_on_lvm
def test_a_copy_has_the_sources_data_by_a_master_key_of_its_own(
    client: Client, box: Box, source: csi.Volume, of: str, kind: str
) -> None:
    what = of_volume(source.volume_id)
    if kind == "snapshot":
        what = of_snapshot(client.snapshot("snap", source.volume_id).snapshot_id)
    made = client.create("copy", 0, block(), parameters={"class": of}, source=what)
    assert made.capacity_bytes == source.capacity_bytes
    assert outside(box, "copy") == outside(box, "source")
    box.stage(made, KEY, block())
    assert inside(box, "copy") == MARK
    assert outside(box, "copy") != outside(box, "source")
    own = box.header("vol-copy")
    assert not own.is_reencrypting
    assert len(own.slots) == 1
    assert own.uuid != box.header("vol-source").uuid
    assert own.offset_bytes == box.header("vol-source").offset_bytes
    assert "sharedKey" not in box.tags("vol-copy")
    assert box.tags("vol-copy")["sealed"] == own.uuid
    # It is done once.
    box.unstage(made)
    before = outside(box, "copy")
    box.stage(made, KEY, block())
    assert outside(box, "copy") == before
    box.unstage(made)
    client.delete(made.volume_id)
    box.stage(source, KEY, block())
    assert inside(box, "source") == MARK


@pytest.mark.variation
@pytest.mark.parametrize("name", ["shared"])
def test_without_the_option_a_copy_keeps_the_sources_master_key(
    client: Client, box: Box, source: csi.Volume
) -> None:
    made = copy(client, source, "shared")
    box.stage(made, KEY, block())
    assert inside(box, "copy") == MARK
    assert outside(box, "copy") == outside(box, "source")


@pytest.mark.variation
@pytest.mark.parametrize("name", ["shared"])
def test_a_storage_class_may_re_encrypt_though_its_class_does_not(
    client: Client, box: Box, source: csi.Volume
) -> None:
    parameters = {"class": "plain", "carver/encryption": "luks2", "carver/reencrypt": "true"}

    def create(parameters: Mapping[str, str]) -> csi.Volume:
        what = of_volume(source.volume_id)
        return client.create("copy", 0, block(), parameters=parameters, source=what)

    made = create(parameters)
    assert made.volume_context["carver/reencrypt"] == "true"
    assert create(parameters) == made
    without = {key: parameters[key] for key in ("class", "carver/encryption")}
    # A missing parameter is not compared, here as below.
    assert create(without) == made
    assert validated(client, made, parameters).confirmed.parameters == parameters
    assert validated(client, made, without).HasField("confirmed")
    box.stage(made, KEY, block())
    assert inside(box, "copy") == MARK
    assert outside(box, "copy") != outside(box, "source")
    refused = validated(client, source, {"carver/reencrypt": "true"})
    assert not refused.HasField("confirmed")
    assert "reencrypt" in refused.message


@pytest.mark.variation
def test_a_storage_class_cannot_turn_off_the_re_encryption_of_its_class(
    client: Client, box: Box, source: csi.Volume
) -> None:
    made = copy(client, source)
    assert made.volume_context["carver/reencrypt"] == "true"
    assert box.tags("vol-copy")["sharedKey"] == "yes"
    with expect.code("INVALID_ARGUMENT", "parameters[reencrypt]", "true"):
        client.create("third", 0, block(), parameters={"carver/reencrypt": "false"})


@pytest.mark.variation
@pytest.mark.parametrize("key", ["reencrypt", "carver/reencrypt"])
def test_what_is_not_encrypted_cannot_be_re_encrypted(client: Client, key: str) -> None:
    parameters, words = {"class": "plain", key: "true"}, ("parameters[reencrypt]", "encryption")
    with expect.code("INVALID_ARGUMENT", *words):
        client.create("source", SIZE, block(), parameters=parameters)
    assert client.volumes() == []
    with expect.code("INVALID_ARGUMENT", *words):
        client.capacity(parameters)


@pytest.mark.variation
def test_a_new_volume_and_a_copy_of_an_unused_one_have_their_own_key_anyway(box: Box) -> None:
    new = box.client.create("source", SIZE, mounted("ext4"))
    assert "sharedKey" not in box.tags("vol-source")
    made = box.client.create("copy", 0, mounted("ext4"), source=of_volume(new.volume_id))
    assert box.tags("vol-copy")["sharedKey"] == "yes"
    box.stage(made, KEY)
    assert "sharedKey" not in box.tags("vol-copy")
    box.client.snapshot("snap", made.volume_id)


@pytest.mark.variation
def test_a_file_system_on_a_copy_is_usable(client: Client, box: Box) -> None:
    volume = client.create("source", SIZE, mounted("ext4"))
    box.stage(volume, KEY)
    made = client.create("copy", 0, mounted("ext4"), source=of_volume(volume.volume_id))
    there = box.host.directory / "copy"
    client.stage(made, there, mounted("ext4"), KEY)
    assert client.stats(made.volume_id, there).usage[0].total > SIZE // 2
    # A staged copy is not re-encrypted again, and needs no key.
    client.stage(made, there, mounted("ext4"))


@pytest.mark.variation
def test_a_call_that_does_not_wait_gets_the_progress(
    client: Client, box: Box, service: Service, config: Config, source: csi.Volume
) -> None:
    service.reencrypter.grace_seconds = 0
    made = copy(client, source)
    assert overview(box.host, config)["copy"] == ("luks2", "not begun")
    said = at_last(lambda: box.stage(made, KEY, block()))
    assert all("master key of its own" in one for one in said)
    assert overview(box.host, config) == {"copy": ("luks2", ""), "source": ("luks2", "")}
    assert inside(box, "copy") == MARK


@pytest.mark.variation
def test_a_wrong_key_begins_nothing(client: Client, box: Box, source: csi.Volume) -> None:
    made = copy(client, source)
    where = box.logical("vol-copy")
    before = box.host.read_bytes(where, 0, 16 * MIB)
    with expect.code("UNAUTHENTICATED"):
        box.stage(made, OTHER, block())
    assert box.host.read_bytes(where, 0, 16 * MIB) == before
    box.stage(made, KEY, block())


@pytest.mark.variation
def test_the_sources_old_key_does_not_open_the_copy(box: Box, source: csi.Volume) -> None:
    made = copy(box.client, source)
    # The secret has a new key when the copy is first used.
    box.stage(made, BOTH, block())
    box.unstage(made)
    with expect.code("UNAUTHENTICATED"):
        box.stage(made, KEY, block())
    box.stage(made, OTHER, block())
    assert inside(box, "copy") == MARK
    box.unstage(made)
    box.stage(source, KEY, block())


@pytest.mark.variation
def test_a_copy_without_its_own_key_is_not_copied(box: Box, source: csi.Volume) -> None:
    made = copy(box.client, source)
    with expect.code("FAILED_PRECONDITION", "master key of its own"):
        box.client.snapshot("snap", made.volume_id)
    with expect.code("FAILED_PRECONDITION", "master key of its own"):
        box.client.create("third", 0, block(), source=of_volume(made.volume_id))
    box.stage(made, KEY, block())
    box.client.snapshot("snap", made.volume_id)


@pytest.mark.variation
def test_a_re_encryption_stopped_by_unstage_continues_at_the_next_stage(
    client: Client, box: Box, service: Service, source: csi.Volume
) -> None:
    with box.host.slow_reencryption():
        made = begin(client, box, service, source)
        with expect.code("ABORTED"):
            box.stage(made, KEY, block())
        assert service.reencrypter.jobs.counts()["running"] == 1, "both calls wait for the same"
        # On a slow machine cryptsetup may take a while before it can be stopped.
        at_last(lambda: box.unstage(made))
        assert service.reencrypter.jobs.counts()["running"] == 0
    assert box.mapping("vol-copy") is None
    at_last(lambda: box.stage(made, KEY, block()))
    assert inside(box, "copy") == MARK


@contextmanager
def limited(service: Service, box: Box, rate: int) -> Iterator[Pace]:
    """Inside, the group's background I/O may take so many bytes a second; 0 for any number."""
    paces, pace = service.context.paces._paces, Pace(Reserve(size_bytes=rate), box.host.kernel)
    before, paces[box.group] = service.context.paces.of(box.group), pace
    yield pace
    paces[box.group] = before


@pytest.mark.variation
def test_a_re_encryption_keeps_to_the_groups_bandwidth(
    client: Client, box: Box, service: Service, source: csi.Volume
) -> None:
    made = copy(client, source)
    # The emulated VM re-encrypts 4 MiB a second.
    rate = 40 * MIB if isinstance(box.host, FakeHost) else 2 * MIB
    begun = time.monotonic()
    with limited(service, box, rate) as pace:
        box.stage(made, KEY, block())
    seconds = time.monotonic() - begun
    # cryptsetup also overwrites the old key slots' area: dozens of times, on a disk that rotates.
    done_bytes = pace.done_bytes["reencrypt"]
    assert done_bytes > 0.9 * (SIZE - box.header("vol-copy").offset_bytes)
    # Of the last piece nothing is waited for, and the fake has few and large ones.
    assert 0.7 * done_bytes / rate < seconds < 3 * done_bytes / rate
    assert inside(box, "copy") == MARK


@pytest.mark.variation
def test_a_re_encryption_that_is_stopped_ends_at_once_when_it_is_called_off(
    client: Client, box: Box, service: Service, source: csi.Volume
) -> None:
    service.reencrypter.grace_seconds = 0
    made = copy(client, source)
    with limited(service, box, MIB) as pace:
        with expect.code("ABORTED"):
            box.stage(made, KEY, block())
        # Once so much is done it is stopped most of the time.
        expect.soon(lambda: pace.done_bytes.get("reencrypt", 0) > 4 * MIB)
        begun = time.monotonic()
        at_last(lambda: box.unstage(made))
        # cryptsetup ends after its hot zone, for which the emulated VM takes some 15 s.
        assert time.monotonic() - begun < (8 if isinstance(box.host, FakeHost) else 60)
    assert service.reencrypter.jobs.counts()["running"] == 0
    assert box.mapping("vol-copy") is None
    client.delete(made.volume_id)


@pytest.mark.variation
def test_a_copy_can_be_deleted_during_its_re_encryption(
    client: Client, box: Box, service: Service, source: csi.Volume
) -> None:
    with box.host.slow_reencryption():
        made = begin(client, box, service, source)
        at_last(lambda: client.delete(made.volume_id))
    assert [one.volume_id for one in client.volumes()] == [source.volume_id]


@pytest.mark.variation
def test_a_copy_may_grow_during_its_re_encryption(
    client: Client, box: Box, service: Service, source: csi.Volume
) -> None:
    with box.host.slow_reencryption():
        made = begin(client, box, service, source)
    client.expand(made.volume_id, 2 * SIZE)
    at_last(lambda: box.stage(made, KEY, block()))
    assert inside(box, "copy") == MARK
    assert box.host.kernel.device_size_bytes(box.opened("vol-copy")) == 2 * SIZE


@pytest.mark.variation
def test_a_killed_re_encryption_is_recovered_and_continues(
    box: Box, service: Service, killed: csi.Volume
) -> None:
    assert service.reencrypter.jobs.counts()["failed"] == 1
    assert box.header("vol-copy").is_reencrypting
    assert box.tags("vol-copy")["sharedKey"] == "yes"
    with expect.code("UNAUTHENTICATED"):
        box.stage(killed, OTHER, block())
    box.stage(killed, KEY, block())
    assert inside(box, "copy") == MARK
    assert not box.header("vol-copy").is_reencrypting


@pytest.mark.variation
def test_one_killed_between_its_last_writes_is_ended_without_cryptsetup(
    client: Client, box: Box, service: Service, source: csi.Volume
) -> None:
    # By then the old master key is gone, and cryptsetup opens what needs both no more.
    made = copy(client, source)
    path = box.logical("vol-copy")
    # Without a limit it runs on unless this test stops it.
    with (
        limited(service, box, 0),
        box.host.killed_reencryption(path, at_end=True),
        expect.code("INTERNAL"),
    ):
        box.stage(made, KEY, block())
    before = box.header("vol-copy")
    assert before.is_renewed
    assert len(before.slots) == 1
    below = outside(box, "copy")
    with expect.code("UNAUTHENTICATED"):
        box.stage(made, OTHER, block())
    box.stage(made, KEY, block())
    after = box.header("vol-copy")
    assert not after.is_reencrypting
    assert after.uuid != before.uuid
    assert after.slots == before.slots
    assert inside(box, "copy") == MARK
    assert outside(box, "copy") == below, "it was re-encrypted once more"
    assert "sharedKey" not in box.tags("vol-copy")


@pytest.mark.variation
def test_a_copy_can_be_deleted_after_a_killed_re_encryption(
    client: Client, source: csi.Volume, killed: csi.Volume
) -> None:
    client.delete(killed.volume_id)
    assert [one.volume_id for one in client.volumes()] == [source.volume_id]
