"""A device that a killed lvm2 left suspended, for whose user to wait for ever, or half made."""

from collections.abc import Callable
from pathlib import Path

import chosen
import in_background
import pytest
from real.any import AnyHost

from agent.csi.client import Client, block, mounted
from agent.daemon.server import Service
from proto import csi_pb2 as csi

MIB = 1 << 20
NAME = "vol-pvc-1"


@pytest.fixture
def volume(host: AnyHost, group: str, client: Client) -> csi.Volume:
    """A raw volume whose device is suspended."""
    made = client.create("pvc-1", 8 * MIB, block())
    host.suspend(group, NAME)
    assert host.is_suspended(group, NAME)
    return made


def create(client: Client, _volume: csi.Volume) -> None:
    client.create("pvc-1", 8 * MIB, block())


def expand(client: Client, volume: csi.Volume) -> None:
    # lvm2 has nothing to do: an earlier call was killed after it had written the new size.
    assert client.expand(volume.volume_id, 8 * MIB).capacity_bytes == 8 * MIB


def modify(client: Client, volume: csi.Volume) -> None:
    # It has that already, as it would have what a killed call had written.
    client.modify(volume.volume_id, {"readAhead": "auto"})


def snapshot(client: Client, volume: csi.Volume) -> None:
    client.delete_snapshot(client.snapshot("snap", volume.volume_id).snapshot_id)


def get(client: Client, volume: csi.Volume) -> None:
    client.volume(volume.volume_id)


@pytest.mark.parametrize(
    "call",
    [
        create,
        snapshot,
        *(pytest.param(one, marks=pytest.mark.variation) for one in (expand, modify, get)),
    ],
)
def test_the_next_call_resumes_it(
    host: AnyHost,
    group: str,
    client: Client,
    volume: csi.Volume,
    call: Callable[[Client, csi.Volume], None],
) -> None:
    call(client, volume)
    assert not host.is_suspended(group, NAME)


def test_delete_resumes_and_erases_it(host: AnyHost, client: Client, volume: csi.Volume) -> None:
    before = client.capacity().available_capacity
    client.delete(volume.volume_id)
    assert client.capacity().available_capacity == before + 8 * MIB


def test_start_resumes_it(host: AnyHost, group: str, service: Service, volume: csi.Volume) -> None:
    in_background.look(service, service.eraser.jobs)
    assert not host.is_suspended(group, NAME)


def test_nothing_suspended_costs_no_command(host: AnyHost, client: Client) -> None:
    client.create("pvc-1", 8 * MIB, block())
    assert not [words for words in host.commands if "--refresh" in words]


@pytest.mark.parametrize(
    "is_used", chosen.kinds([True, False], usual=[True]), ids=["used", "deleted"]
)
@pytest.mark.parametrize("loaded", [True, False], ids=["table does not count", "no table"])
def test_half_made_device_is_replaced(
    host: AnyHost, group: str, client: Client, staging: Path, loaded: bool, is_used: bool
) -> None:
    before = client.capacity().available_capacity
    made = client.create("pvc-1", 8 * MIB, mounted("ext4"))
    host.half_make(group, NAME, loaded=loaded)
    assert client.create("pvc-1", 8 * MIB, mounted("ext4")) == made
    if is_used:
        staging.mkdir()
        client.stage(made, staging)
        client.unstage(made.volume_id, staging)
    client.delete(made.volume_id)
    assert client.capacity().available_capacity == before
