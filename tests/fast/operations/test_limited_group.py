"""A volume group that may have only so many logical volumes (vgchange(8), --logicalvolume)."""

from collections.abc import Sequence
from dataclasses import replace

import configured
import expect
import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.csi.client import block, of_volume
from agent.settings.classes import DeviceClass
from lvm import report
from lvm.caches import Cache

MIB = 1 << 20
THICK, THIN = {"class": "thick"}, {"class": "thin"}
CACHED = {"class": "cached"}
pytestmark = pytest.mark.settings(
    classes=(
        replace(configured.PLAIN, name="thick"),
        configured.THIN,
        DeviceClass("cached", "data", cache=Cache()),
    )
)


def limit(fake: FakeHost, most: int) -> None:
    fake.lvm("vgchange", "--logicalvolume", str(most), "--", "data")


def has_room(client: Client) -> list[bool]:
    return [bool(client.capacity(one).available_capacity) for one in (THICK, THIN)]


def test_a_thin_volume_without_a_pool_needs_two(fake: FakeHost, client: Client) -> None:
    client.create("1", 8 * MIB, block(), parameters=THICK)
    limit(fake, 2)
    assert has_room(client) == [True, False]
    with expect.code("RESOURCE_EXHAUSTED", "1 logical volume, of 2", "--logicalvolume 0 data"):
        client.create("2", 8 * MIB, block(), parameters=THIN)
    limit(fake, 3)
    assert has_room(client) == [True, True]
    client.create("2", 8 * MIB, block(), parameters=THIN)


def test_a_volume_with_a_cache_needs_two_until_they_are_one(fake: FakeHost, client: Client) -> None:
    fake.lvm("vgextend", "--", "data", fake.new_device(200 * MIB))
    fake.lvm2.groups["data"].disks[-1].tags = {report.FAST}
    limit(fake, 1)
    assert not client.capacity(CACHED).available_capacity
    with expect.code("RESOURCE_EXHAUSTED", "0 logical volumes, of 1", "--logicalvolume 0 data"):
        client.create("1", 8 * MIB, block(), parameters=CACHED)
    limit(fake, 2)
    assert client.capacity(CACHED).available_capacity
    client.create("1", 8 * MIB, block(), parameters=CACHED)
    assert client.capacity(THICK).available_capacity


def test_what_is_full_of_volumes_has_no_room_for_another_and_the_others_grow(
    fake: FakeHost, client: Client
) -> None:
    made = [(client.create("1", 8 * MIB, block(), parameters=THICK), THICK)]
    made += [(client.create("2", 8 * MIB, block(), parameters=THIN), THIN)]
    limit(fake, 3)
    assert has_room(client) == [False, False]
    for source, parameters in made:
        with expect.code("RESOURCE_EXHAUSTED", "of 3 that it may have"):
            client.create("3", 8 * MIB, block(), parameters=parameters)
        with expect.code("RESOURCE_EXHAUSTED", "of 3 that it may have"):
            client.snapshot("1", source.volume_id)
        client.expand(source.volume_id, 12 * MIB)
    limit(fake, 0)
    assert has_room(client) == [True, True]


@pytest.mark.parametrize("parameters", [THICK, THIN], ids=["thick", "thin"])
def test_a_clone_needs_one_more_for_its_bridge(
    fake: FakeHost, client: Client, parameters: dict[str, str]
) -> None:
    """Which is in the same group: two for a thick volume, and for a thin one of it with no pool."""
    source = client.create("1", 8 * MIB, block(), parameters=THICK)
    client.create("2", 8 * MIB, block(), parameters=THIN)
    before = set(fake.lvm2.groups["data"].volumes)
    limit(fake, len(before) + 1)
    # One that is new and empty has room.
    assert has_room(client) == [True, True]
    fake.commands.clear()
    of = of_volume(source.volume_id)
    with expect.code("RESOURCE_EXHAUSTED", "max_lv", "takes 2 more", "--logicalvolume 0 data"):
        client.create("3", 8 * MIB, block(), parameters=parameters, source=of)
    assert not any("lvcreate" in words for words in fake.commands)
    assert set(fake.lvm2.groups["data"].volumes) == before
    limit(fake, len(before) + 2)
    client.create("3", 8 * MIB, block(), parameters=parameters, source=of)
    limit(fake, len(before) + 1)
    assert has_room(client) == [False, False]


def test_a_clone_that_meets_the_limit_late_leaves_nothing(fake: FakeHost, client: Client) -> None:
    """By hand a volume is made between the bridge and the clone."""
    source = client.create("1", 8 * MIB, block(), parameters=THICK)

    def between(words: Sequence[str]) -> None:
        if words[1] == "lvcreate" and "vol-2" in words:
            fake.lvm2.groups["data"].max_lv = 2

    fake.intercept = between
    with expect.code("RESOURCE_EXHAUSTED", "max_lv"):
        client.create("2", 8 * MIB, block(), source=of_volume(source.volume_id))
    expect.soon(lambda: set(fake.lvm2.groups["data"].volumes) == {"vol-1"})


def test_a_clone_of_a_thin_volume_in_its_pool_needs_one(fake: FakeHost, client: Client) -> None:
    source = client.create("1", 8 * MIB, block(), parameters=THIN)
    limit(fake, 3)
    of = of_volume(source.volume_id)
    client.create("2", 8 * MIB, block(), parameters=THIN, source=of)
    with expect.code("RESOURCE_EXHAUSTED", "max_lv", "takes 1 more"):
        client.create("3", 8 * MIB, block(), parameters=THIN, source=of)


@pytest.mark.parametrize("parameters", [THICK, THIN], ids=["thick", "thin"])
def test_a_group_snapshot_needs_one_for_each_volume(
    fake: FakeHost, client: Client, parameters: dict[str, str]
) -> None:
    every = [client.create(one, 8 * MIB, block(), parameters=parameters).volume_id for one in "12"]
    before = set(fake.lvm2.groups["data"].volumes)
    limit(fake, len(before) + 1)
    fake.commands.clear()
    with expect.code("RESOURCE_EXHAUSTED", "max_lv", "takes 2 more"):
        client.group_snapshot("both", every)
    assert not any("lvcreate" in words for words in fake.commands)
    assert set(fake.lvm2.groups["data"].volumes) == before
    limit(fake, len(before) + 2)
    client.group_snapshot("both", every)
