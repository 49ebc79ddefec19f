"""The arithmetic of two tiers: what is reported can be made with its cache, and no more."""

import random
from dataclasses import replace

import configured
import pytest
from fakes.known import activator, machine, reports
from fakes.lvm import FakeLvm

from agent.operations import diagnosis
from agent.operations.diagnosis import Reason
from agent.settings.classes import DeviceClass
from agent.volumes.allocation import Allocators
from lvm import caches, lvm_errors, report, volumes
from lvm.caches import Cache
from lvm.layout import Layout, Reserve
from lvm.lvm2 import Lvm
from lvm.room import Room
from lvm.thin import Policy
from lvm.volumes import New

EXTENT = 4 << 20
SIZES = ((0, 16), (0, 40), (5, 0), (33.3, 0), (100, 0))


def state(chance: random.Random, most: int, *tags: tuple[str, ...]) -> tuple[Lvm, FakeLvm, Reserve]:
    """A group in a random state, and the size of its caches."""
    lvm, fake = machine(*(chance.randint(0, 60) for _ in range(chance.randint(1, most))))
    for disk in fake.groups["data"].disks:
        disk.tags = set(chance.choice(tags))
        disk.allocatable = chance.random() < 0.9
    percent, size = chance.choice(SIZES)
    return lvm, fake, Reserve(size << 20, percent)


def test_the_maximum_can_be_made_and_one_extent_more_cannot_in_a_thousand_states() -> None:
    chance = random.Random(3)
    room = 0
    for _ in range(1000):
        lvm, _, size = state(chance, 6, (), (report.FAST,))
        cache = Cache(size=size)
        group = report.read(lvm).group("data")
        maximum = caches.maximum_bytes(Room(group), cache)
        with pytest.raises(lvm_errors.NoSpace):
            caches.create(lvm, group, New("v", maximum + EXTENT, {}), cache)
        if maximum:
            room += 1
            caches.create(lvm, group, New("v", maximum, {}), cache)
            assert report.read(lvm).group("data").volume("v").size_bytes == maximum
    assert room > 300


def test_a_cached_pool_can_hold_its_promises_in_a_thousand_states() -> None:
    chance = random.Random(5)
    rooms = {True: 0, False: 0}
    for _ in range(1_000):
        lvm, fake, size = state(chance, 5, (), (), (report.FAST,))
        one = DeviceClass(
            "thin",
            "data",
            layout=Layout("thin"),
            reserve=Reserve(percent=chance.choice((0, 0, 10))),
            pool=Policy(chance.choice((1.0, 1.5)), Reserve(percent=chance.choice((10, 50, 100)))),
            cache=Cache(chance.choice(caches.KINDS), "writeback", size),
        )
        known = reports(fake, "data")
        allocator = Allocators(configured.of_classes(one), activator(fake, "data")).of(one)
        group = known.fresh().group("data")
        maximum = allocator.maximum_bytes(group)
        rooms[maximum > 0] += 1
        if not maximum:
            if Room(group).free_extents > 20:
                assert one.cache
                assert one.cache.of_pool(group) > Room(group).fast_extents
            continue
        allocator.create(lvm, group, New("all", maximum, {}))
        group = known.fresh().group("data")
        made = group.volume("pool-thin")
        assert caches.is_cached(made)
        fast = {disk.uuid for disk in group.disks if disk.fast}
        assert made.disks & fast
        # What is given out is held, at the class's ratio, by what the pool can grow to.
        [thin] = Allocators(configured.of_classes(one), activator(fake, "data")).thin_allocators(
            group
        )
        reserve = one.reserve.extents(group)
        assert thin.outstanding_extents(group) <= Room(group).free_extents - reserve
        assert allocator.maximum_bytes(group) == 0
    assert min(rooms.values()) > 200, rooms


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        # Which of the two it is now lvm2's report has not.
        (Cache(), "no data are lost if its cache is writethrough"),
        (Cache(mode="writeback"), "no data are lost if its cache is writethrough"),
        (Cache("writecache", "writeback"), "from a backup"),
    ],
)
@pytest.mark.parametrize("is_pool", [False, True], ids=["a volume's", "a pool's"])
def test_the_loss_of_a_fast_disk_is_reported_by_what_only_it_had(
    cache: Cache, words: str, is_pool: bool
) -> None:
    lvm, fake = machine(40, 40)
    slow, fast = fake.groups["data"].disks
    fast.tags = {report.FAST}
    known = reports(fake, "data")
    group = known.fresh().group("data")
    if is_pool:
        one = DeviceClass("thin", "data", layout=Layout("thin"), pool=Policy(), cache=cache)
        new = New("vol-pvc-1", 40 << 20, {"name": "pvc-1"})
        Allocators(configured.of_classes(one), activator(fake, "data")).of(one).create(
            lvm, group, new
        )
    else:
        own_tags = {"name": "pvc-1", "cache": cache.tag_value(40 << 20, EXTENT)}
        caches.create(lvm, group, New("vol-pvc-1", 40 << 20, own_tags), cache)
    # lvm2 reports it of the pool, not of the volumes in it.
    fake.groups["data"].volumes["pool-thin" if is_pool else "vol-pvc-1"].health = "partial"
    for disk, what in ((fast, words), (slow, "from a backup")):
        fast.missing = slow.missing = False
        disk.missing = True
        [volume] = known.fresh().volumes()
        [problem] = diagnosis.conditions_by_report(volume)
        assert problem.reason is Reason.DISK_MISSING
        assert disk.uuid in problem.message
        assert what in problem.message


def test_a_cache_pool_is_no_cache_that_can_be_overwritten() -> None:
    lvm, fake = machine(40, 40)
    fake.groups["data"].disks[1].tags = {report.FAST}
    group = reports(fake, "data").fresh().group("data")
    caches.create(lvm, group, New("vol-pvc-1", 40 << 20, {}), Cache())
    made = report.read(lvm).group("data").volume("vol-pvc-1")
    assert caches.attached(made) == "vol-pvc-1_cache"
    assert caches.attached(replace(made, cachevol="by-hand_cpool")) == ""


def test_a_cache_is_attached_to_no_disk_where_no_fast_one_is_open() -> None:
    """As where lvm2 was killed after it had made the volume, and the fast disk was closed then."""
    lvm, fake = machine(40, 40)
    fake.groups["data"].disks[1].tags = {report.FAST}
    volumes.create(lvm, "data", New("v", 40 << 20, {}), disks=["/dev/fake-data-0"])
    fake.groups["data"].disks[1].allocatable = False
    with pytest.raises(lvm_errors.NoDiskServes):
        caches.attach(lvm, report.read(lvm).group("data"), "v", Cache(), 4)
    fake.groups["data"].disks[1].allocatable = True
    caches.attach(lvm, report.read(lvm).group("data"), "v", Cache(), 4)
    assert caches.is_cached(report.read(lvm).group("data").volume("v"))


def test_a_pool_that_is_given_a_cache_has_it_on_record() -> None:
    lvm, fake = machine(40, 40)
    fake.groups["data"].disks[1].tags = {report.FAST}
    known = reports(fake, "data")
    for cache, kept in ((None, set()), (Cache(), {"carver.cache=cache:writethrough:16777216"})):
        one = DeviceClass("thin", "data", layout=Layout("thin"), pool=Policy(), cache=cache)
        name, group = f"vol-{cache}", known.fresh().group("data")
        Allocators(configured.of_classes(one), activator(fake, "data")).of(one).create(
            lvm, group, New(name[:8], 4 << 20, {})
        )
        tags = known.fresh().group("data").volume("pool-thin").tags
        assert {one for one in tags if one.startswith("carver.cache")} == kept


def test_a_cache_is_at_least_so_large_and_whole_extents() -> None:
    assert Cache().extents(1, EXTENT) == 4
    assert Cache().extents(1000, EXTENT) == 100
    assert Cache(size=Reserve(size_bytes=(20 << 20) + 1)).extents(1, EXTENT) == 6
    assert Cache().tag_value(4000 << 20, EXTENT) == "cache:writethrough:419430400"
