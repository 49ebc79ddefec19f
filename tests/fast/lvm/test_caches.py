"""The arithmetic of two tiers: what is reported can be made with its cache, and no more."""

import random

import pytest
from fakes.devices import FakeDevices
from fakes.known import inventory
from fakes.lvm import FakeDisk, FakeLvm

from agent.core.allocation import Allocators
from agent.core.classes import DeviceClass
from agent.core.inventory import Inventory
from agent.operations import health
from agent.operations.health import Reason
from lvm import caches, errors, report
from lvm.caches import Cache
from lvm.layout import Layout, Reserve
from lvm.lvm2 import Lvm
from lvm.thin import Policy
from lvm.volumes import New

EXTENT = 4 << 20


def test_the_maximum_can_be_made_and_one_extent_more_cannot_for_a_thousand_states() -> None:
    chance = random.Random(3)
    room = 0
    for _ in range(1000):
        fake = FakeLvm(FakeDevices())
        disks = [chance.randint(0, 60) for _ in range(chance.randint(1, 6))]
        for disk in fake.add_group("data", disks).disks:
            disk.tags = set(chance.choice(((), (report.FAST,))))
            disk.allocatable = chance.random() < 0.9
        percent, size = chance.choice(((0, 16), (0, 40), (5, 0), (33.3, 0), (100, 0)))
        cache = Cache(size=Reserve(size << 20, percent))
        lvm = Lvm(lambda *words, fake=fake: fake(words), settings=())
        group = report.read(lvm).group("data")
        maximum = caches.maximum_bytes(group, cache)
        if group.fast_free_extents and any(not disk.fast for disk in group.disks):
            with pytest.raises(errors.NoSpace):
                caches.create(lvm, group, New("v", maximum + EXTENT, {}), cache)
        if maximum:
            room += 1
            caches.create(lvm, group, New("v", maximum, {}), cache)
            assert report.read(lvm).group("data").volume("v").size_bytes == maximum
    assert room > 300


def test_what_a_pool_with_a_cache_may_promise_can_be_held_for_a_thousand_states() -> None:
    chance = random.Random(5)
    rooms = {True: 0, False: 0}
    for _ in range(1_000):
        fake = FakeLvm(FakeDevices())
        disks = [chance.randint(0, 60) for _ in range(chance.randint(1, 5))]
        for disk in fake.add_group("data", disks).disks:
            disk.tags = set(chance.choice(((), (), (report.FAST,))))
            disk.allocatable = chance.random() < 0.9
        percent, size = chance.choice(((0, 16), (0, 40), (5, 0), (33.3, 0), (100, 0)))
        one = DeviceClass(
            "thin",
            "data",
            layout=Layout("thin"),
            reserve=Reserve(percent=chance.choice((0, 0, 10))),
            pool=Policy(chance.choice((1.0, 1.5)), Reserve(percent=chance.choice((10, 50, 100)))),
            cache=Cache(chance.choice(caches.KINDS), "writeback", Reserve(size << 20, percent)),
        )
        lvm = Lvm(lambda *words, fake=fake: fake(words), settings=())
        known = inventory(fake, "data")
        allocator = Allocators([one], known).of(one)
        group = known.state().group("data")
        maximum = allocator.maximum_bytes(group)
        rooms[maximum > 0] += 1
        if not maximum:
            if group.free_extents > 20:
                assert one.cache
                assert one.cache.of_pool(group) > group.fast_free_extents
            continue
        allocator.create(lvm, group, New("all", maximum, {}))
        group = known.state().group("data")
        made = group.volume("pool-thin")
        assert caches.is_cached(made)
        fast = {disk.uuid for disk in group.disks if disk.fast}
        assert made.disks & fast
        # What is given out is held, at the class's ratio, by what the pool can grow to.
        [thin] = Allocators([one], known).thin()
        reserve = one.reserve.extents(group)
        assert thin.outstanding_extents(group) <= group.free_extents - reserve
        assert allocator.maximum_bytes(group) == 0
    assert min(rooms.values()) > 200, rooms


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (Cache(), "no data are lost"),
        (Cache(mode="writeback"), "from a backup"),
        (Cache("writecache", "writeback"), "from a backup"),
    ],
)
def test_the_loss_of_a_fast_disk_is_told_by_what_was_on_it_alone(cache: Cache, words: str) -> None:
    fake = FakeLvm(FakeDevices())
    slow, fast = fake.add_group("data", [40, 40]).disks
    fast.tags = {report.FAST}
    lvm = Lvm(lambda *words: fake(words), settings=())
    own_tags = {"name": "pvc-1", "cache": cache.tag_value(40 << 20, EXTENT)}
    group = report.read(lvm).group("data")
    caches.create(lvm, group, New("vol-pvc-1", 40 << 20, own_tags), cache)
    fake.groups["data"].volumes["vol-pvc-1"].health = "partial"
    _check_each_loss(inventory(fake, "data"), slow, fast, words)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (Cache(), "no data are lost"),
        (Cache(mode="writeback"), "from a backup"),
        (Cache("writecache", "writeback"), "from a backup"),
    ],
)
def test_the_loss_of_a_pool_s_fast_disk_is_told_of_each_of_its_volumes(
    cache: Cache, words: str
) -> None:
    fake = FakeLvm(FakeDevices())
    slow, fast = fake.add_group("data", [40, 40]).disks
    fast.tags = {report.FAST}
    lvm = Lvm(lambda *words: fake(words), settings=())
    one = DeviceClass("thin", "data", layout=Layout("thin"), pool=Policy(), cache=cache)
    known = inventory(fake, "data")
    group = known.state().group("data")
    own_tags = {"name": "pvc-1"}
    Allocators([one], known).of(one).create(lvm, group, New("vol-pvc-1", 40 << 20, own_tags))
    # What lvm2 says of the pool alone holds for what is in it.
    fake.groups["data"].volumes["pool-thin"].health = "partial"
    _check_each_loss(known, slow, fast, words)


def _check_each_loss(known: Inventory, slow: FakeDisk, fast: FakeDisk, words: str) -> None:
    for disk, told in ((fast, words), (slow, "from a backup")):
        fast.missing = slow.missing = False
        disk.missing = True
        [volume] = known.all(known.state())
        [problem] = health.by_report(volume)
        assert problem.reason is Reason.DISK_MISSING
        assert disk.uuid in problem.message
        assert told in problem.message


def test_a_pool_that_is_given_a_cache_has_it_on_record() -> None:
    fake = FakeLvm(FakeDevices())
    fake.add_group("data", [40, 40]).disks[1].tags = {report.FAST}
    lvm = Lvm(lambda *words: fake(words), settings=())
    known = inventory(fake, "data")
    for cache, kept in ((None, set()), (Cache(), {"carver.cache=cache:writethrough:16777216"})):
        one = DeviceClass("thin", "data", layout=Layout("thin"), pool=Policy(), cache=cache)
        name, group = f"vol-{cache}", known.state().group("data")
        Allocators([one], known).of(one).create(lvm, group, New(name[:8], 4 << 20, {}))
        tags = known.state().group("data").volume("pool-thin").tags
        assert {one for one in tags if one.startswith("carver.cache")} == kept


def test_a_cache_is_at_least_so_large_and_whole_extents() -> None:
    assert Cache().extents(1, EXTENT) == 4
    assert Cache().extents(1000, EXTENT) == 100
    assert Cache(size=Reserve(size_bytes=(20 << 20) + 1)).extents(1, EXTENT) == 6
    assert Cache().tag_value(4000 << 20, EXTENT) == "cache:writethrough:419430400"
