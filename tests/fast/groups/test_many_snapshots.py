"""The cost of a call and of an idle node does not grow with copy-on-write snapshots."""

from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.host import FakeHost
from fakes.lvm import FakeVolume

from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm.active_devices import Devices
from proto import csi_pb2 as csi

EXTENT = 4 << 20
MANY = 500
# What asks the kernel for one device; each costs some ten system calls.
SINGLE = {"find", "status", "own_status", "is_open", "is_suspended"}


class Counting:
    """The kernel's side, and how often each question was asked."""

    def __init__(self, devices: Devices) -> None:
        self.asked: Counter[str] = Counter()
        self._devices = devices

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._devices, name)

        def ask(*words: object) -> object:
            self.asked[name] += 1
            return found(*words)

        return ask

    def singles(self) -> int:
        """Questions for single devices since it was asked last."""
        found = sum(self.asked[one] for one in SINGLE)
        self.asked.clear()
        return found


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [10_000]).disks[0].metadata_bytes = (8 << 20) - 4096
    host.devices = cast(Devices, Counting(host.lvm2))
    return host


@pytest.fixture
def counting(fake: FakeHost) -> Counting:
    return cast(Counting, fake.devices)


@pytest.fixture
def volume(client: Client, fake: FakeHost, service: Service, counting: Counting) -> csi.Volume:
    """A volume with many snapshots; all of which was looked at."""
    made = client.create("pvc-1", 2 * EXTENT, block())
    client.snapshot("0", made.volume_id)
    group = fake.lvm2.groups["data"]
    first = group.volumes["snap-0"]
    for number in range(1, MANY):
        tags = {one.replace("carver.name=0", f"carver.name={number}") for one in first.tags}
        one = FakeVolume(f"snap-{number}", fake.lvm2._uuid(), dict(first.extents), tags)
        one.read_only, one.origin, one.media = True, first.origin, first.media.copy()
        group.volumes[one.name] = one
        fake.lvm2._activate_one(group, one)
    group.seqno += 1
    service.autoextender.step(0)
    assert len(client.snapshots()) == MANY
    counting.asked.clear()
    return made


def test_a_call_asks_for_the_status_of_all_snapshots_at_once(
    client: Client, volume: csi.Volume, counting: Counting
) -> None:
    for _ in range(3):
        client.capacity()
        client.volume(volume.volume_id)
        assert len(client.snapshots()) == MANY
    assert counting.singles() < 30


def test_only_a_lost_snapshot_is_asked_and_once(
    client: Client, volume: csi.Volume, fake: FakeHost, counting: Counting
) -> None:
    fake.lvm2.groups["data"].volumes["snap-7"].overflowed = True
    for _ in range(3):
        lost = [one.snapshot_id for one in client.snapshots() if not one.ready_to_use]
        assert [one.rpartition("/")[2] for one in lost] == ["snap-7"]
    assert counting.asked["own_status"] == 1


@pytest.mark.usefixtures("volume")
def test_a_new_report_asks_no_snapshot(client: Client, fake: FakeHost, counting: Counting) -> None:
    for number in range(3):
        client.create(f"pvc-more-{number}", EXTENT, block())
        assert len(client.snapshots()) == MANY
    assert counting.asked["own_status"] == 0


@pytest.mark.usefixtures("volume")
def test_an_idle_node_asks_only_snapshots_that_were_written_to(
    service: Service, fake: FakeHost, counting: Counting
) -> None:
    for now in range(1, 30):
        assert not service.autoextender.step(now)
    assert counting.singles() == 0
    area = fake.lvm2.groups["data"].volumes["snap-7"]
    area.data_percent = 50
    service.autoextender.step(31)
    service.autoextender.step(32)
    assert counting.singles() == 1
    before, area.data_percent = area.length, 80
    assert service.autoextender.step(33)
    assert area.length > before


@pytest.mark.usefixtures("volume")
def test_all_are_asked_each_minute_in_case_the_kernel_counts_nothing(
    service: Service, counting: Counting
) -> None:
    service.autoextender.step(59)
    assert counting.singles() == 0
    service.autoextender.step(61)
    assert counting.singles() == MANY


def test_the_health_of_a_volume_asks_each_of_its_snapshots_once(
    client: Client, volume: csi.Volume, counting: Counting
) -> None:
    client.volume_health(volume.volume_id)
    assert counting.asked["own_status"] == MANY
    assert counting.singles() < MANY + 10
