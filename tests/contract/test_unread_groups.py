"""A start at which one group has not answered yet: what a copy into it reads is kept."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import configured
import expect
import grpc
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, device

from agent.core import errors
from agent.csi.client import block, of_snapshot, of_volume
from agent.daemon import server
from agent.daemon.server import Service
from agent.groups import volume_group
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from proto import csi_pb2 as csi

MIB = 1 << 20
SIZE = 16 * MIB
DATA = b"a tenant's data.".ljust(4096, b"#")
SOURCES = ("volume", "snapshot", "group snapshot")
INTO = {"class": "into"}
pytestmark = [
    # Carver's record decides here; lvm2 is asked for nothing that other tests do not ask it for.
    pytest.mark.variation,
    pytest.mark.groups(data=[100, 60], other=[60]),
    pytest.mark.settings(classes=(configured.PLAIN, configured.THIN, DeviceClass("into", "other"))),
]


@dataclass(frozen=True)
class Source:
    """What a copy reads, and the call that deletes it."""

    content: csi.VolumeContentSource
    delete: Callable[[Client], object]


def made(client: Client, volume: csi.Volume, of: str) -> Source:
    if of == "volume":
        return Source(of_volume(volume.volume_id), lambda caller: caller.delete(volume.volume_id))
    if of == "snapshot":
        one = client.snapshot("s", volume.volume_id).snapshot_id
        return Source(of_snapshot(one), lambda caller: caller.delete_snapshot(one))
    both = client.group_snapshot("both", [volume.volume_id])
    one = both.snapshots[0].snapshot_id
    own = both.group_snapshot_id
    return Source(of_snapshot(one), lambda caller: caller.delete_group_snapshot(own, [one]))


@pytest.fixture(params=[(kind, of) for kind in ("plain", "thin") for of in SOURCES], ids=str)
def source(
    request: pytest.FixtureRequest,
    host: AnyHost,
    config: Config,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Source:
    """What a volume of the other group is being copied from by a process that ended."""
    device_class, of = request.param
    service = serving.start(config, host)
    with Client(config.endpoint) as client, monkeypatch.context() as dying:
        volume = client.create("pvc-1", SIZE, block(), parameters={"class": device_class})
        host.write_bytes(device(host, group, "vol-pvc-1"), 0, DATA)
        found = made(client, volume, of)

        def dies(*_words: object, **_more: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        dying.setattr(host.kernel, "copy", dies)
        with expect.code("ABORTED"):
            client.create("copy", SIZE, block(), parameters=INTO, source=found.content)
        service.stop()
    return found


def complete(client: Client, host: AnyHost, other: str, source: Source) -> None:
    client.create("copy", SIZE, block(), parameters=INTO, source=source.content)
    assert host.read_bytes(device(host, other, "vol-copy"), 0, len(DATA)) == DATA


def test_a_start_completes_a_copy_whichever_group_answers_first(
    source: Source, config: Config, host: AnyHost, other: str
) -> None:
    service = serving.start(config, host)
    with Client(config.endpoint) as client:
        complete(client, host, other, source)
    service.stop()


def test_a_group_that_was_never_read_keeps_what_is_copied_to_it(
    source: Source,
    config: Config,
    host: AnyHost,
    group: str,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    running = Service(config, serving.machine(host), host.lvm)
    silent = running.volume_groups.of(other)
    assert silent is not None
    with monkeypatch.context() as hanging:

        def hang() -> None:
            raise errors.GroupSilent(other, ("/dev/sdz",))

        hanging.setattr(silent, "_report", hang)
        server.resume(running, group)
        running.start(config.endpoint)
        with Client(config.endpoint) as client:
            if source.content.HasField("snapshot"):
                with expect.code("UNAVAILABLE", other):
                    source.delete(client)
            else:
                # A thin one is no part of its bridge.
                with suppress(grpc.RpcError):
                    source.delete(client)
            # Other calls do not wait for that group.
            client.delete(client.create("pvc-2", SIZE, block()).volume_id)
    assert server.resume(running, other)
    with Client(config.endpoint) as client:
        complete(client, host, other, source)
    running.stop()
