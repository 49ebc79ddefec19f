"""Pools and snapshots are extended in time, within their group's room; a look costs no command."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import configured
import expect
import pytest
from fakes.host import FakeHost
from fakes.lvm import FakePool
from hypothesis import given
from hypothesis import strategies as st

from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm import thin
from lvm.layout import Reserve
from lvm.report import Group, PhysicalVolume
from lvm.room import Room
from lvm.thin import Policy, Pool
from mount.command import Result
from proto import csi_pb2 as csi

MIB = 1 << 20
EXTENT = 4 * MIB
THIN = {"class": "thin"}
POOL = Policy(over_provisioning=4, size=Reserve(size_bytes=10 * EXTENT))
pytestmark = [
    pytest.mark.usefixtures("waiting_eraser"),
    pytest.mark.groups(data=[60]),
    pytest.mark.settings(
        classes=(
            configured.PLAIN,
            replace(configured.THIN, pool=POOL, reserve=Reserve(10 * EXTENT)),
            replace(configured.THIN, name="lost", group="gone"),
        )
    ),
]


@pytest.fixture
def pool(client: Client, fake: FakeHost) -> FakePool:
    """A pool of ten extents with one volume of a hundred."""
    client.create("pvc-1", 100 * EXTENT, block(), parameters=THIN)
    made = fake.lvm2.groups["data"].volumes["pool-thin"]
    assert isinstance(made, FakePool)
    fake.commands.clear()
    return made


def fill(pool: FakePool, percent: float) -> None:
    blocks = pool.length * EXTENT // pool.chunk_size_bytes
    pool.used_data_blocks = int(blocks * percent / 100)


def started(fake: FakeHost) -> list[str]:
    words = [one[1] for one in fake.commands]
    fake.commands.clear()
    return words


def test_data_above_the_threshold_are_extended_by_their_share(
    service: Service, fake: FakeHost, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    fill(pool, 70)
    assert not service.autoextender.step(0)
    assert started(fake) == [], "an idle look runs no command"
    fill(pool, 71)
    with caplog.at_level(logging.INFO):
        assert service.autoextender.step(0)
    assert pool.length == 12
    assert started(fake) == ["fullreport", "lvextend"]
    assert "the data of data/pool-thin: 71 % full, extended by 8388608 bytes" in caplog.text
    assert service.autoextender.counts()["data", "extended"] == 1
    assert not service.autoextender.step(0)


def test_a_pool_filled_at_once_is_extended_by_all_that_it_takes(
    service: Service, pool: FakePool
) -> None:
    fill(pool, 100)
    pool.mode = "out_of_data_space"
    assert service.autoextender.step(0)
    assert pool.length == 15
    assert pool.status(EXTENT).data_percent < 70


def test_a_pool_grows_up_to_the_reserve_then_warns_once_and_is_retried(
    service: Service, fake: FakeHost, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    for now in range(20):
        fill(pool, 90)
        if not service.autoextender.step(now):
            break
    # All but the reserve of ten, the metadata and their spare.
    assert pool.length == 48
    assert sum(fake.lvm2.groups["data"].free(one) for one in fake.lvm2.groups["data"].disks) == 10
    assert caplog.text.count("cannot grow: group data has no room for it") == 1
    started(fake)
    for later in (9, 10, 60):
        assert not service.autoextender.step(now + later)
        assert started(fake) == [], "there is no more room"
    assert caplog.text.count("cannot grow") == 1
    assert service.autoextender.counts()["data", "no room"] == 1

    fake.lvm2.groups["data"].disks[0].extents += 40
    assert not service.autoextender.step(now + 69)
    assert service.autoextender.step(now + 70)
    assert pool.length > 48


def test_a_pool_that_is_full_again_is_warned_of_again(
    service: Service, fake: FakeHost, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    fake.lvm2.groups["data"].disks[0].extents = 22
    for now, percent in enumerate((80, 60, 80)):
        fill(pool, percent)
        service.autoextender.step(now)
    assert caplog.text.count("cannot grow") == 2


def test_a_failure_is_logged_and_retried_while_the_kernel_delays_writers(
    service: Service, fake: FakeHost, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(words: Sequence[str]) -> Result | None:
        return Result(5, "", "no") if words[1] == "lvextend" else None

    fill(pool, 90)
    fake.intercept = broken
    assert not service.autoextender.step(0)
    assert "90 % full, and cannot grow: lvm lvextend failed" in caplog.text
    assert service.autoextender.counts()["data", "failed"] == 1
    fake.intercept = lambda _words: None
    assert not service.autoextender.step(9)
    assert service.autoextender.step(10)


@pytest.mark.parametrize(
    "change", [{"mode": "ro"}, {"mode": "fail"}, {"needs_check": True}, {"active": False}]
)
def test_a_pool_that_is_inactive_or_needs_a_repair_is_left_alone(
    service: Service, fake: FakeHost, pool: FakePool, change: dict[str, object]
) -> None:
    fill(pool, 90)
    for key, value in change.items():
        setattr(pool, key, value)
    assert not service.autoextender.step(0)
    assert started(fake) == []


def test_a_pool_that_is_being_erased_is_not_extended(
    service: Service, fake: FakeHost, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    fake.lvm("lvremove", "--yes", "--", "data/vol-pvc-1")
    fill(pool, 100)
    fake.commands.clear()
    assert not service.autoextender.step(0)
    assert started(fake) == ["fullreport"]
    assert not service.autoextender.step(1)
    assert started(fake) == []
    assert "cannot grow" not in caplog.text


def test_a_deleted_snapshot_does_not_count_for_another_of_its_name(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", 20 * EXTENT, block())
    client.create("pvc-2", 36 * EXTENT, block())
    for now in range(2):
        snapshot = client.snapshot("snap-1", volume.volume_id)
        fake.lvm2.groups["data"].volumes["snap-snap-1"].data_percent = 80
        assert not service.autoextender.step(3 * now)
        assert service.autoextender.counts()["snapshot", "no room"] == now + 1
        client.delete_snapshot(snapshot.snapshot_id)
        service.autoextender.step(3 * now + 1)


def test_an_overflowed_or_a_foreign_snapshot_is_left_alone(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", 20 * EXTENT, block())
    client.snapshot("snap-1", volume.volume_id)
    area = fake.lvm2.groups["data"].volumes["snap-snap-1"]
    area.data_percent, area.overflowed = 100, True
    assert not service.autoextender.step(0)
    area.data_percent, area.overflowed = 80, False
    area.tags.clear()
    fake.commands.clear()
    assert not service.autoextender.step(1)
    assert started(fake) == ["fullreport"]


def damages(own: set[str]) -> dict[str, set[str]]:
    """What can become of tags: each of them lost, each there twice, and one of a newer version."""
    found = {"needs": own | {"carver.needs=something"}}
    for one in own:
        found[f"no {one}"] = own - {one}
        found[f"{one} twice"] = own | {f"{one}-other"}
    return found


@pytest.mark.parametrize("name", ["vol-pvc-1", "snap-snap-1"])
def test_the_store_of_a_snapshot_grows_whatever_became_of_a_tag(
    client: Client, service: Service, fake: FakeHost, name: str
) -> None:
    """Its own, or its origin's: what is full is lost."""
    client.snapshot("snap-1", client.create("pvc-1", 20 * EXTENT, block()).volume_id)
    group = fake.lvm2.groups["data"]
    store, before = group.volumes["snap-snap-1"], set(group.volumes[name].tags)
    assert len(damages(before)) > 12
    for now, (damage, own) in enumerate(damages(before).items()):
        group.volumes[name].tags, group.seqno = set(own), group.seqno + 1
        length, known, store.data_percent = store.length, dict(store.extents), 80
        assert service.autoextender.step(100 * now), damage
        assert store.length > length
        store.data_percent, store.extents, group.seqno = 0, known, group.seqno + 1
    group.volumes[name].tags, group.seqno = before, group.seqno + 1


def test_the_store_of_a_snapshot_grows_while_its_origin_has_another_name(
    client: Client, service: Service, fake: FakeHost
) -> None:
    client.snapshot("snap-1", client.create("pvc-1", 20 * EXTENT, block()).volume_id)
    fake.lvm("lvrename", "--", "data", "vol-pvc-1", "by-hand")
    fake.lvm2.groups["data"].volumes["snap-snap-1"].data_percent = 80
    assert service.autoextender.step(0)


def test_a_pool_grows_and_keeps_its_promise_whatever_became_of_a_tag(
    client: Client, service: Service, fake: FakeHost, pool: FakePool
) -> None:
    group, before, room = fake.lvm2.groups["data"], set(pool.tags), client.capacity()
    assert len(damages(before)) == 7
    for now, (damage, own) in enumerate(damages(before).items()):
        pool.tags, group.seqno = set(own), group.seqno + 1
        assert client.capacity() == room, damage
        length, known = pool.length, dict(pool.extents)
        fill(pool, 75)
        assert service.autoextender.step(100 * now), damage
        assert pool.length > length
        fill(pool, 0)
        pool.extents, group.seqno = known, group.seqno + 1
    pool.tags, group.seqno = before, group.seqno + 1


@given(extents=st.integers(1, 10**6), percent=st.floats(0, 100), threshold=st.integers(1, 99))
def test_an_extension_brings_a_part_below_the_threshold(
    extents: int, percent: float, threshold: int
) -> None:
    policy = Policy(autoextend_threshold=threshold, autoextend_percent=20)
    more = thin.wanted_extents(extents, percent, policy)
    assert more >= max(1, extents // 5)
    assert extents * percent / (extents + more) <= threshold


@given(st.integers(0, 100), st.integers(1, 30), st.integers(0, 30))
def test_metadata_growth_leaves_room_for_the_spare(free: int, metadata: int, spare: int) -> None:
    disk = PhysicalVolume("/dev/a", "a", 10_000, 10_000 - free, missing=False, allocatable=True)
    group = Group("data", "u", EXTENT, frozenset(), 0, (disk,), spare_extents=spare)

    def cost(more: int) -> int:
        return more + max(0, metadata + more - spare)

    more = thin.metadata_growth_extents(Room(group), Pool("p", 65536, 1, metadata))
    assert cost(more) <= free or more == 0
    assert cost(more + 1) > free


# What callers see


def test_a_pool_that_cannot_grow_is_reported_before_it_is_full(
    client: Client, service: Service, fake: FakeHost, pool: FakePool
) -> None:
    volume = client.create("pvc-1", 100 * EXTENT, block(), parameters=THIN)
    fake.lvm2.groups["data"].disks[0].extents = 22
    fill(pool, 91)
    assert not service.autoextender.step(0)
    service.reports.fresh()
    [found] = client.volume_health(volume.volume_id).health_statuses
    assert (found.status, found.reason) == (csi.DEGRADED, "PoolNearlyFull")
    assert "91 % full" in found.message
    assert "vgextend" in found.message
    with expect.code("RESOURCE_EXHAUSTED", "pool-thin is 91 % full of what it can grow to"):
        client.create("pvc-2", EXTENT, block(), parameters=THIN)
    with expect.code("OUT_OF_RANGE", "91 % full"):
        client.expand(volume.volume_id, 101 * EXTENT)


def test_a_full_pool_with_all_its_promised_room_is_healthy(
    client: Client, service: Service, fake: FakeHost
) -> None:
    volume = client.create("pvc-1", 10 * EXTENT, block(), parameters=THIN)
    pool = fake.lvm2.groups["data"].volumes["pool-thin"]
    assert isinstance(pool, FakePool)
    fill(pool, 99)
    assert not client.volume_health(volume.volume_id).health_statuses
    service.reports.fresh()
    assert not client.volume_health(volume.volume_id).health_statuses
    client.create("pvc-2", EXTENT, block(), parameters=THIN)
    service.reports.fresh()
    assert client.volume_health(volume.volume_id).health_statuses
