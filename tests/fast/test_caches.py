"""The arithmetic of two tiers: what is reported can be made with its cache, and no more."""

import random

import pytest
from fakes.devices import FakeDevices
from fakes.lvm import FakeLvm

from agent import diagnosis
from agent.inventory import Inventory
from lvm import caches, errors, report
from lvm.caches import Cache
from lvm.layout import Reserve
from lvm.lvm2 import Lvm

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
                caches.create(lvm, group, "v", cache, size_bytes=maximum + EXTENT, facts={})
        if maximum:
            room += 1
            caches.create(lvm, group, "v", cache, size_bytes=maximum, facts={})
            assert report.read(lvm).group("data").volume("v").size_bytes == maximum
    assert room > 300


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
    facts = {"name": "pvc-1", "cache": cache.fact(40 << 20, EXTENT)}
    group = report.read(lvm).group("data")
    caches.create(lvm, group, "vol-pvc-1", cache, size_bytes=40 << 20, facts=facts)
    fake.groups["data"].volumes["vol-pvc-1"].health = "partial"
    known = Inventory(lvm, fake, ["data"])
    for disk, told in ((fast, words), (slow, "from a backup")):
        fast.missing = slow.missing = False
        disk.missing = True
        [volume] = known.all(known.read())
        [problem] = diagnosis.by_report(volume)
        assert disk.uuid in problem
        assert told in problem


def test_a_cache_is_at_least_so_large_and_whole_extents() -> None:
    assert Cache().extents(1, EXTENT) == 4
    assert Cache().extents(1000, EXTENT) == 100
    assert Cache(size=Reserve(size_bytes=(20 << 20) + 1)).extents(1, EXTENT) == 6
    assert Cache().fact(4000 << 20, EXTENT) == "cache:writethrough:419430400"
