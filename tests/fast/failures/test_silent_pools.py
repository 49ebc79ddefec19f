"""A thin pool without status: device-mapper waits while its metadata are written."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import expect
import pytest
from fakes.host import FakeHost
from fast.failures.test_isolation import SICK, SOUND, scraped, succeeds

from agent.csi.client import Client, block
from agent.daemon.server import Service
from agent.operations import diagnosis
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes import activator
from agent.work import background, locks
from lvm.devicemapper import Status
from lvm.layout import Layout, Reserve
from lvm.thin import Policy
from proto import csi_pb2 as csi

EXTENT = 4 << 20
THICK = {"class": "thick"}
VOLUMES = 12
POOL = Policy(over_provisioning=4, size=Reserve(size_bytes=10 * EXTENT))
pytestmark = [
    pytest.mark.groups(a=[600], b=[600]),
    pytest.mark.settings(
        classes=(
            DeviceClass("sick", "a", default=True, layout=Layout("thin"), pool=POOL),
            DeviceClass("thick", "a"),
            DeviceClass("sound", "b", layout=Layout("thin"), pool=POOL),
        )
    ),
]


@pytest.fixture
def volumes(client: Client) -> list[csi.Volume]:
    """One in the pool that will be well, then those in the other, then one beside it."""
    client.create("of-b", EXTENT, block(), parameters=SOUND)
    names = [f"of-a-{number}" for number in range(VOLUMES)]
    made = [client.create(one, EXTENT, block(), parameters=SICK) for one in names]
    return [*made, client.create("thick", EXTENT, block(), parameters=THICK)]


@pytest.fixture
def silent(
    fake: FakeHost, volumes: list[csi.Volume], monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Event]:
    """The first pool, and what is in it, has no status until this is set."""
    over, real = threading.Event(), fake.lvm2.status

    def status(group: str, name: str) -> tuple[Status, ...]:
        assert name in ("vol-thick", "pool-sound", "vol-of-b") or over.wait(60)
        return real(group, name)

    monkeypatch.setattr(fake.lvm2, "status", status)
    monkeypatch.setattr(activator, "_POOL_SECONDS", 0.05)
    monkeypatch.setattr(diagnosis, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(background, "_PATIENCE_SECONDS", 0.1)
    yield over
    over.set()


def test_a_silent_pool_is_unavailable_at_once_and_others_are_used(
    client: Client, service: Service, silent: threading.Event
) -> None:
    began = time.monotonic()
    for _ in range(3):
        with expect.code("UNAVAILABLE", "a/pool-sick", "dmesg"):
            client.capacity(SICK)
    assert time.monotonic() - began < 20
    assert client.capacity(SOUND).available_capacity
    assert client.capacity(THICK).available_capacity
    assert service.context.admission.slots.free_slots == locks.ADMISSION_SLOTS
    with expect.code("UNAVAILABLE", "a/pool-sick"):
        client.create("new", EXTENT, block(), parameters=SICK)
    assert client.create("new-beside", EXTENT, block(), parameters=THICK).volume_id
    silent.set()
    expect.soon(lambda: succeeds(lambda: client.capacity(SICK)))
    assert client.create("new", EXTENT, block(), parameters=SICK).volume_id


def test_metrics_leave_out_the_values_of_a_silent_pool(
    service: Service, config: Config, silent: threading.Event, tmp_path: Path
) -> None:
    for number in range(3):
        found = scraped(service, config, tmp_path / f"{number}")
        assert found["carver_lvm_up",] == 1
        assert ("carver_pool_data_percent", "sound", "b") in found
        assert ("carver_pool_data_percent", "sick", "a") not in found
        assert found["carver_pool_promised_bytes", "sick", "a"] == VOLUMES * EXTENT
        assert ("carver_class_available_bytes", "sick", "a") not in found
        assert found["carver_class_available_bytes", "sound", "b"]


def test_the_volumes_of_a_silent_pool_and_no_others_do_not_respond(
    client: Client,
    volumes: list[csi.Volume],
    silent: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosis, "_DEAD_SECONDS", 0.1)
    sick = sorted(one.volume_id for one in volumes[:-1])
    expect.soon(lambda: sorted(one.volume_id for one in client.unhealthy()) == sick)
    found = {status.reason for one in client.unhealthy() for status in one.health_statuses}
    assert found == {"DeviceNotResponding"}
    at_work = [one for one in threading.enumerate() if one.name == "probe"]
    assert len(at_work) <= background._MOST_AT_ONCE
    silent.set()
    expect.soon(lambda: client.unhealthy() == [])
