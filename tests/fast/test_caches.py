"""The arithmetic of two tiers: what is reported can be made with its cache, and no more."""

import random

import pytest
from fakes.devices import FakeDevices
from fakes.lvm import FakeLvm

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


def test_a_cache_is_at_least_so_large_and_whole_extents() -> None:
    assert Cache().extents(1, EXTENT) == 4
    assert Cache().extents(1000, EXTENT) == 100
    assert Cache(size=Reserve(size_bytes=(20 << 20) + 1)).extents(1, EXTENT) == 6
    assert Cache().fact(4000 << 20, EXTENT) == "cache:writethrough:419430400"
