"""What device-mapper says against a volume, in sentences that say what to do."""

import pytest

from agent.health import conditions
from lvm.devicemapper import Cache, Raid, Snapshot, Status, ThinPool, WriteCache

MIB = 1 << 20


def raid(health: str, action: str = "idle", synced: int = 200) -> Raid:
    return Raid(100 * MIB, "raid1", health, synced, 200, action)


def pool(mode: str = "rw", data: int = 10, metadata: int = 10, *, check: bool = False) -> ThinPool:
    return ThinPool(100 * MIB, mode, check, data, 100, metadata, 100)


@pytest.mark.parametrize(
    "status",
    [
        raid("AA"),
        raid("AA", "check", 100),
        pool(data=89),
        Snapshot(MIB, "", 1, 2, 1),
        Cache(MIB, "rw"),
        WriteCache(MIB, 0, 10, 10, 0),
    ],
    ids=str,
)
def test_what_is_well_is_passed_over(status: Status) -> None:
    assert list(conditions.by_device_mapper("vol-a", [status])) == []


def test_a_cache_that_failed_under_a_pool_is_told_as_the_pool_s() -> None:
    for status, wrong in (
        (Cache(MIB, "ro"), "the cache of the thin pool under logical volume vol-a failed"),
        (WriteCache(MIB, 5, 10, 10, 0), "the write cache of the thin pool under logical volume"),
    ):
        [told] = conditions.by_device_mapper("vol-a", [pool(), status])
        assert wrong in told


@pytest.mark.parametrize(
    ("status", "wrong", "remedy"),
    [
        (raid("AD"), "1 of the 2 images of its raid1 failed", "lvconvert --repair vol-a"),
        (raid("-A"), "1 of the 2 images", "lvchange --refresh vol-a"),
        (raid("Aa", "recover", 84), "resyncing (recover, 42 % done)", "wait"),
        (pool(data=93), "data of the thin pool under the volume are 93 % full", "vgextend"),
        (pool(metadata=99), "metadata of the thin pool under the volume are 99 %", "lvextend"),
        (pool("out_of_data_space"), "takes no more writes (out_of_data_space)", "make room"),
        (pool("fail"), "the thin pool under the volume failed", "lvconvert --repair"),
        (pool(check=True), "the thin pool under the volume failed", "out of use"),
        (Snapshot(MIB, "Invalid"), "cannot be read any more (Invalid)", "delete it"),
        (Cache(MIB, "ro"), "the cache of logical volume vol-a failed (ro)", "--uncache vol-a"),
        (Cache(MIB, "rw", needs_check=True), "failed (rw)", "--uncache"),
        (WriteCache(MIB, 5, 10, 10, 0), "met error 5", "back the data up"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_with_what_to_do(status: Status, wrong: str, remedy: str) -> None:
    [told] = conditions.by_device_mapper("vol-a", [status])
    assert wrong in told
    assert remedy in told
