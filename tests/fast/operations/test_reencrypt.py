"""Re-encryption of copies: across restarts, after failures, and what is left of the source."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
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
from agent.daemon.server import Service
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
    """A copy of a volume in use, whose re-encryption was stopped with the service."""
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
    """The actions of cryptsetup since the last call of this."""
    found = [
        words[words.index("cryptsetup") + 1] for words in host.commands if "cryptsetup" in words
    ]
    host.commands.clear()
    return found


@contextmanager
def serving_copy(
    host: FakeHost, config: Config, made: csi.Volume, seconds: float, timeout_seconds: float = 120
) -> Iterator[tuple[Service, Client, Callable[[], None]]]:
    """A service that waits so long for a re-encryption, its client, and how the copy is staged."""
    service = serving.start(config, host, eraser=60, copier=60, reencrypter=seconds)
    with Client(config.endpoint, timeout_seconds=timeout_seconds) as client:
        yield service, client, partial(client.stage, made, host.directory / "staging", block(), KEY)
    service.stop()


def test_a_restart_continues_where_it_was(
    host: FakeHost, config: Config, copy: csi.Volume, caplog: pytest.LogCaptureFixture
) -> None:
    assert leftovers(host) == []
    before = header(host)
    assert before.is_reencrypting
    assert before.renewed_bytes == 36 * MIB
    ran(host)
    with serving_copy(host, config, copy, 60) as (_, _, stage), caplog.at_level(logging.INFO):
        # A start leaves it alone: only a caller has the key.
        assert ran(host) == []
        stage()
    assert ran(host) == ["open", "reencrypt", "luksUUID", "open"]
    assert "has a master key of its own" in caplog.text
    assert len(header(host).slots) == 1


def test_the_key_of_one_cancelled_before_its_turn_is_overwritten(
    host: FakeHost, config: Config, copy: csi.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.operations.reencrypt._WORKERS", 1)
    staging, other_staging = host.directory / "staging", host.directory / "other"
    with serving_copy(host, config, copy, 0) as (service, client, _):
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


def test_the_first_call_after_a_power_cut_recovers_it(
    host: FakeHost, config: Config, copy: csi.Volume
) -> None:
    with (
        serving_copy(host, config, copy, 60) as (_, _, stage),
        host.killed_reencryption(""),
        expect.code("INTERNAL"),
    ):
        stage()
    before = header(host)
    assert before.is_torn
    # No dm device survives the power cut: neither cryptsetup's nor the volumes'.
    [group] = host.lvm2.groups
    logical = host.devices.find(group, "vol-copy")
    assert logical is not None
    host.devices.close_leftovers(logical)
    for name in ("vol-source", "vol-copy"):
        host.deactivate(group, name)

    with serving_copy(host, config, copy, 60) as (_, _, stage):
        ran(host)
        stage()
    assert ran(host) == ["open", "repair", "reencrypt", "luksUUID", "open"]
    assert not header(host).is_reencrypting
    assert header(host).uuid != before.uuid


def test_a_call_waits_no_longer_than_its_deadline(
    host: FakeHost, config: Config, copy: csi.Volume
) -> None:
    with serving_copy(host, config, copy, 600, timeout_seconds=1) as (_, _, stage):
        began = time.monotonic()
        with host.slow_reencryption(), expect.code("ABORTED", "75 %"):
            stage()
        assert time.monotonic() - began < _PATIENCE_SECONDS


def test_other_key_slots_are_killed_first(host: FakeHost, config: Config) -> None:
    service = serving.start(config, host, eraser=60, copier=60, reencrypter=60)
    staging = host.directory / "staging"
    with Client(config.endpoint) as client:
        source = client.create("source", 48 * MIB, block())
        client.stage(source, staging, block(), KEY)
        client.unstage(source.volume_id, staging)
        made = client.create("copy", 0, block(), source=of_volume(source.volume_id))
        metadata = cryptsetup._read(device(host))
        assert metadata is not None
        # Another key, that for recovery, and one of a re-encryption that never began.
        metadata["keyslots"] |= {one: cryptsetup._slot(one.encode()) for one in ("1", "2", "3")}
        metadata["unbound"] = ["3"]
        cryptsetup._put(device(host), cryptsetup._uuid(device(host)), metadata)
        assert header(host).unbound == (3,)
        client.stage(made, staging, block(), KEY)
    assert (header(host).slots, header(host).unbound) == ((1,), ())
    service.stop()
