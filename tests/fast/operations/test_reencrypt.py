"""Copies that get a master key of their own: across restarts, and what is left of their source."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import configured
import expect
import pytest
import serving
from fakes import cryptsetup
from fakes.devices import LEFTOVER, FakeDevice
from fakes.host import FakeHost

from agent.core.classes import DeviceClass
from agent.core.settings import Config
from agent.csi.client import Client, block, of_volume
from mount import luks
from mount.luks import Header
from proto import csi_pb2 as csi

MIB = 1 << 20
KEY = {"passphrase": "correct horse"}
_PATIENCE_SECONDS = 20


@pytest.fixture
def config(host: FakeHost, tmp_path: Path) -> Config:
    group = host.new_group(100)
    only = DeviceClass("plain", group, default=True, encryption="luks2", reencrypt=True)
    return configured.carver(tmp_path, group, classes=(only,))


@pytest.fixture
def copy(host: FakeHost, config: Config) -> Iterator[csi.Volume]:
    """A copy of a volume that was in use, whose re-encryption was ended by the service's end."""
    service = serving.start(config, host, eraser=60, copier=60, reencrypter=0.2)
    with Client(config.endpoint) as client:
        source = client.create("source", 48 * MIB, block())
        client.stage(source, host.directory / "staging", block(), KEY)
        client.unstage(source.volume_id, host.directory / "staging")
        made = client.create("copy", 0, block(), source=of_volume(source.volume_id))
        with host.slow_reencryption():
            with expect.code("ABORTED", "master key of its own: 75 % of 50331648 bytes"):
                client.stage(made, host.directory / "staging", block(), KEY)
            service.stop()
    yield made
    assert leftovers(host) == []


def leftovers(host: FakeHost) -> list[str]:
    return [one.path for one in host.block if one.path.startswith(LEFTOVER)]


def device(host: FakeHost) -> FakeDevice:
    [group] = host.lvm2.groups
    found = host.devices.find(group, "vol-copy")
    assert found is not None
    return host.block.get(found.path)


def header(host: FakeHost) -> Header:
    found = luks.read(host.kernel, device(host).path)
    assert found is not None
    return found


def ran(host: FakeHost) -> list[str]:
    """The actions of cryptsetup since the last look."""
    found = [
        words[words.index("cryptsetup") + 1] for words in host.commands if "cryptsetup" in words
    ]
    host.commands.clear()
    return found


def test_a_restart_goes_on_where_it_was(
    host: FakeHost, config: Config, copy: csi.Volume, caplog: pytest.LogCaptureFixture
) -> None:
    assert leftovers(host) == []
    before = header(host)
    assert before.is_reencrypting
    assert before.renewed_bytes == 36 * MIB
    ran(host)
    service = serving.start(config, host, reencrypter=60)
    # Nobody has its key: the start leaves it alone.
    assert ran(host) == []
    with caplog.at_level(logging.INFO), Client(config.endpoint) as client:
        client.stage(copy, host.directory / "staging", block(), KEY)
    assert ran(host) == ["open", "reencrypt", "luksUUID", "open"]
    assert "has a master key of its own" in caplog.text
    assert len(header(host).slots) == 1
    service.stop()


def test_one_that_is_under_way_can_be_ended_at_any_time(
    host: FakeHost, config: Config, copy: csi.Volume
) -> None:
    service = serving.start(config, host, reencrypter=0)
    with host.slow_reencryption(), Client(config.endpoint) as client:
        with expect.code("ABORTED"):
            client.stage(copy, host.directory / "staging", block(), KEY)
        # It is the same one that a second call waits for.
        with expect.code("ABORTED"):
            client.stage(copy, host.directory / "staging", block(), KEY)
        assert service.reencrypter.jobs.counts()["running"] == 1
        client.unstage(copy.volume_id, host.directory / "staging")
        assert sum(service.reencrypter.jobs.counts().values()) == 0
    assert header(host).is_reencrypting
    service.stop()


def test_the_key_of_one_that_is_called_off_before_its_turn_is_overwritten(
    host: FakeHost, config: Config, copy: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.operations.reencrypt._WORKERS", 1)
    service = serving.start(config, host, eraser=60, copier=60, reencrypter=0)
    staging, other_staging = host.directory / "staging", host.directory / "other"
    with Client(config.endpoint) as client:
        [source] = [one for one in client.volumes() if one.volume_id != copy.volume_id]
        other = client.create("other", 0, block(), source=of_volume(source.volume_id))
        with host.slow_reencryption():
            for made, place in ((copy, staging), (other, other_staging)):
                with expect.code("ABORTED"):
                    client.stage(made, place, block(), KEY)
            waiting = service.reencrypter.jobs.of(other.volume_id)
            assert waiting is not None
            assert bytes(waiting.secret.data) == KEY["passphrase"].encode()
            client.unstage(other.volume_id, other_staging)
            client.unstage(copy.volume_id, staging)
        wait([waiting.ended], _PATIENCE_SECONDS)
    assert not any(waiting.secret.data)
    service.stop()


def test_one_that_fails_is_told_and_begun_again_by_the_next_call(
    host: FakeHost, config: Config, copy: csi.Volume
) -> None:
    service = serving.start(config, host, reencrypter=60)
    with Client(config.endpoint) as client:
        with host.killed_reencryption(""), expect.code("INTERNAL", "reencrypt"):
            client.stage(copy, host.directory / "staging", block(), KEY)
        assert service.reencrypter.jobs.counts()["failed"] == 1
        assert header(host).is_torn
        assert leftovers(host)
        client.stage(copy, host.directory / "staging", block(), KEY)
        assert sum(service.reencrypter.jobs.counts().values()) == 0
    service.stop()


def test_a_power_cut_within_it_is_made_good_by_the_first_call_afterwards(
    host: FakeHost, config: Config, copy: csi.Volume
) -> None:
    service = serving.start(config, host, reencrypter=60)
    with Client(config.endpoint) as client, host.killed_reencryption(""), expect.code("INTERNAL"):
        client.stage(copy, host.directory / "staging", block(), KEY)
    service.stop()
    before = header(host)
    assert before.is_torn
    # Nothing of device-mapper's outlives the kernel: neither what cryptsetup had, nor the volume's.
    [group] = host.lvm2.groups
    logical = host.devices.find(group, "vol-copy")
    assert logical is not None
    host.devices.close_leftovers(logical)
    for name in ("vol-source", "vol-copy"):
        host.deactivate(group, name)

    service = serving.start(config, host, reencrypter=60)
    ran(host)
    with Client(config.endpoint) as client:
        client.stage(copy, host.directory / "staging", block(), KEY)
    assert ran(host) == ["open", "repair", "reencrypt", "luksUUID", "open"]
    assert not header(host).is_reencrypting
    assert header(host).uuid != before.uuid
    service.stop()


def test_whoever_waits_for_it_has_no_time_for_ever(
    host: FakeHost, config: Config, copy: csi.Volume
) -> None:
    service = serving.start(config, host, reencrypter=600)
    with host.slow_reencryption(), Client(config.endpoint, timeout_seconds=1) as client:
        began = time.monotonic()
        with expect.code("ABORTED", "75 %"):
            client.stage(copy, host.directory / "staging", block(), KEY)
        assert time.monotonic() - began < _PATIENCE_SECONDS
    service.stop()


def test_slots_of_others_and_of_a_killed_cryptsetup_are_taken_away_first(
    host: FakeHost, config: Config
) -> None:
    service = serving.start(config, host, eraser=60, copier=60, reencrypter=60)
    staging = host.directory / "staging"
    with Client(config.endpoint) as client:
        source = client.create("source", 48 * MIB, block())
        client.stage(source, staging, block(), KEY)
        client.unstage(source.volume_id, staging)
        made = client.create("copy", 0, block(), source=of_volume(source.volume_id))
        told = cryptsetup._told(device(host))
        assert told is not None
        # Another key, that for recovery, and one of a re-encryption that never began.
        told["keyslots"] |= {one: cryptsetup._slot(one.encode()) for one in ("1", "2", "3")}
        told["unbound"] = ["3"]
        cryptsetup._put(device(host), cryptsetup._uuid(device(host)), told)
        assert header(host).unbound == (3,)
        client.stage(made, staging, block(), KEY)
    assert (header(host).slots, header(host).unbound) == ((1,), ())
    service.stop()
