"""What pools promise and how far they can grow: the arithmetic."""

from dataclasses import replace
from typing import Any

import pytest
from fakes.known import machine
from hypothesis import given, settings
from hypothesis import strategies as st

from lvm import layout, report, thin, volumes
from lvm.devicemapper import ThinPool
from lvm.layout import Reserve
from lvm.lvm2 import Lvm
from lvm.room import Room
from lvm.thin import Policy, Pool
from lvm.volumes import New

EXTENT = 4 << 20
KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def group_of(lvm: Lvm) -> report.Group:
    return report.read(lvm).group("data")


def found(group: report.Group, policy: Policy) -> Pool:
    return thin.find(group, "pool-p", thin.chunk_size_bytes(group, policy))


def make(lvm: Lvm, policy: Policy, kept: int = 0) -> None:
    group = group_of(lvm)
    pool = found(group, policy)
    thin.create_pool(
        lvm,
        "data",
        "pool-p",
        data_extents=thin.first_extents(Room(group, kept), pool, policy),
        metadata_extents=thin.suitable_metadata_extents(group, pool.chunk_size_bytes),
        extent_size_bytes=EXTENT,
        chunk_size_bytes=pool.chunk_size_bytes,
        own_tags={},
    )


policies = st.builds(
    Policy,
    over_provisioning=st.sampled_from([1.0, 1.15, 1.5, 2.0, 10.0]),
    size=st.builds(Reserve, percent=st.integers(1, 100).map(float)),
    chunk_size_bytes=st.sampled_from([0, 64 * KIB, MIB, 16 * MIB]),
)


@settings(max_examples=600, deadline=None)
@given(
    disks=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    policy=policies,
    kept=st.integers(0, 40),
)
def test_a_pool_can_hold_its_promises_beside_the_extents_that_are_kept(
    disks: list[int], policy: Policy, kept: int
) -> None:
    lvm, _ = machine(*disks)
    group = group_of(lvm)
    maximum = thin.maximum_bytes(Room(group, kept), found(group, policy), policy)
    assert maximum % EXTENT == 0
    if not maximum:
        return
    make(lvm, policy, kept)
    made = group_of(lvm)
    # Making the pool changes nothing of what it may become.
    assert thin.maximum_bytes(Room(made, kept), found(made, policy), policy) == maximum
    thin.create(lvm, "data", "pool-p", New("all", maximum, {}))
    group = group_of(lvm)
    pool = found(group, policy)
    assert thin.maximum_bytes(Room(group, kept), pool, policy) == 0
    assert thin.outstanding_extents(group, pool, policy) <= Room(group).free_extents - kept
    # And it can become that.
    more = thin.growth_extents(Room(group, kept), pool)
    if more:
        size = (pool.data_extents + more) * EXTENT
        volumes.extend(lvm, "data", "pool-p", size_bytes=size)
    group = group_of(lvm)
    grown = found(group, policy)
    assert Room(group).free_extents >= kept
    assert maximum <= grown.data_extents * EXTENT * policy.ratio
    assert thin.growth_extents(Room(group, kept), grown) == 0


@settings(max_examples=300, deadline=None)
@given(
    disks=st.lists(st.integers(10, 60), min_size=1, max_size=5),
    policy=policies,
    parts=st.lists(st.integers(1, 100), max_size=5),
    thick=st.integers(0, 100),
)
def test_no_order_of_volumes_breaks_what_a_pool_promised(
    disks: list[int], policy: Policy, parts: list[int], thick: int
) -> None:
    lvm, _ = machine(*disks)
    if not thin.maximum_bytes(Room(group_of(lvm)), found(group_of(lvm), policy), policy):
        return
    make(lvm, policy)
    for number, part in enumerate(parts):
        group = group_of(lvm)
        most = thin.maximum_bytes(Room(group), found(group, policy), policy)
        size = most * part // 100 // EXTENT * EXTENT
        if size:
            thin.create(lvm, "data", "pool-p", New(f"t{number}", size, {}))
        group = group_of(lvm)
        outstanding = thin.outstanding_extents(group, found(group, policy), policy)
        most = layout.maximum_bytes(Room(group, outstanding))
        size = most * thick // 100 // EXTENT * EXTENT
        if size:
            volumes.create(lvm, "data", New(f"v{number}", size, {}))
    group = group_of(lvm)
    pool = found(group, policy)
    largest = pool.data_extents + thin.growth_extents(Room(group), pool)
    assert pool.promised_bytes <= largest * EXTENT * policy.ratio


@pytest.mark.parametrize(
    ("group_bytes", "chunk", "metadata_extents"),
    [
        (GIB, 64 * KIB, 1),
        (100 * GIB, 64 * KIB, 32),
        (TIB, 128 * KIB, 160),
        (100 * TIB, 8 * MIB, 250),
    ],
)
def test_chunks_are_as_large_as_keeps_the_metadata_handy(
    group_bytes: int, chunk: int, metadata_extents: int
) -> None:
    lvm, _ = machine(group_bytes // EXTENT)
    group = group_of(lvm)
    assert thin.chunk_size_bytes(group, Policy()) == chunk
    assert thin.suitable_metadata_extents(group, chunk) == metadata_extents


def test_metadata_have_bounds_whatever_the_chunks() -> None:
    lvm, _ = machine(2)
    assert thin.suitable_metadata_extents(group_of(lvm), GIB) == 1
    lvm, _ = machine(100 * TIB // EXTENT)
    assert thin.suitable_metadata_extents(group_of(lvm), 64 * KIB) == 15 * GIB // EXTENT
    assert thin.chunk_size_bytes(group_of(lvm), Policy(chunk_size_bytes=64 * KIB)) == 64 * KIB


def test_a_group_that_grew_keeps_room_for_larger_metadata() -> None:
    lvm, fake = machine(100)
    make(lvm, Policy())
    assert thin.missing_metadata_extents(group_of(lvm), found(group_of(lvm), Policy())) == 0
    fake.groups["data"].disks[0].extents = 2000
    # Two extents of metadata more, and two of the spare.
    assert thin.missing_metadata_extents(group_of(lvm), found(group_of(lvm), Policy())) == 4


def test_the_volume_that_wipes_a_pool_is_no_promise() -> None:
    lvm, _ = machine(100)
    make(lvm, Policy())
    thin.create(lvm, "data", "pool-p", New("wipe-p", 10 * EXTENT, {}))
    group = group_of(lvm)
    pool = found(group, Policy())
    assert pool.promised_bytes == 10 * EXTENT
    assert thin.find(group, "pool-p", 64 * KIB, ignored="wipe-p").promised_bytes == 0
    assert thin.outstanding_extents(group, pool, Policy()) == 10 - pool.data_extents


@pytest.mark.parametrize(
    ("over_provisioning", "status", "words"),
    [
        (1.0, {}, ""),
        (1.0, {"used_data_blocks": 100 * 64}, ""),
        (2.0, {"used_data_blocks": 88 * 64}, ""),
        (2.0, {"used_data_blocks": 89 * 64}, "91 % full"),
        (1.0, {"used_metadata_blocks": 920}, ""),
        (1.0, {"used_metadata_blocks": 930}, "metadata of pool pool-p are 91 % full"),
        (1.0, {"needs_check": True}, "A thin pool's metadata are damaged"),
        (1.0, {"mode": "ro"}, "repair"),
        (1.0, {"mode": "fail"}, "repair"),
        (1.0, {"mode": "out_of_data_space"}, ""),
    ],
)
def test_nothing_more_is_promised_of_a_pool_that_is_nearly_full_or_broken(
    over_provisioning: float, status: dict[str, Any], words: str
) -> None:
    lvm, _ = machine(100)
    policy = Policy(over_provisioning=over_provisioning)
    make(lvm, policy)
    group = group_of(lvm)
    why = thin.refusal(
        Room(group), found(group, policy), policy, replace(ThinPool(40 * MIB, "rw"), **status)
    )
    assert words in why
    assert bool(words) == bool(why)
    assert thin.refusal(Room(group), found(group, policy), policy, None) == ""


def test_the_promises_of_a_pool_are_added_up_once_a_report() -> None:
    class Counted(dict[str, report.LogicalVolume]):
        passes = 0

        def values(self) -> Any:
            self.passes += 1
            return super().values()

    lvm, _ = machine(100)
    make(lvm, Policy())
    for name in ("vol-a", "vol-b", "vol-c"):
        thin.create(lvm, "data", "pool-p", New(name, 2 * EXTENT, {}))
    every = Counted(group_of(lvm).volumes)
    group = replace(group_of(lvm), volumes=every)
    for _ in range(50):
        assert thin.find(group, "pool-p", 0).promised_bytes == 6 * EXTENT
        assert thin.find(group, "pool-p", 0, "vol-b").promised_bytes == 4 * EXTENT
        assert thin.find(group, "pool-p", 0, "vol-z").promised_bytes == 6 * EXTENT
        assert len(group.in_pool("pool-p")) == 3
    assert every.passes == 1
