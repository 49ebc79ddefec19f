"""What device-mapper says against a volume, in sentences that say what to do."""

import pytest

from agent.operations import health as conditions
from lvm.devicemapper import Cache, Raid, Snapshot, Status, ThinPool, WriteCache

MIB = 1 << 20


def raid(
    health: str, action: str = "idle", synced: int = 200, kind: str = "raid1", mismatches: int = 0
) -> Raid:
    return Raid(100 * MIB, kind, health, synced, 200, action, mismatches)


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
        assert wrong in told.message


@pytest.mark.parametrize(
    ("status", "reason", "wrong", "remedy"),
    [
        (
            raid("AD"),
            "RaidDegraded",
            "1 of the 2 images of its raid1 failed",
            "lvconvert --repair vol-a",
        ),
        (raid("-A"), "RaidDegraded", "1 of the 2 images", "lvchange --refresh vol-a"),
        (raid("Aa", "recover", 84), "RaidResyncing", "resyncing (recover, 42 % done)", "wait"),
        (
            pool(data=93),
            "PoolNearlyFull",
            "data of the thin pool under the volume are 93 %",
            "vgextend",
        ),
        (
            pool(metadata=99),
            "PoolNearlyFull",
            "metadata of the thin pool under the volume are 99 %",
            "lvextend",
        ),
        (pool("out_of_data_space"), "PoolFull", "no more writes (out_of_data_space)", "make room"),
        (pool("fail"), "PoolDataLost", "the thin pool under the volume", "lvconvert --repair"),
        (pool(check=True), "PoolDataLost", "the thin pool under the volume", "out of use"),
        (pool("ro"), "PoolReadOnly", "takes no more writes (ro)", "make room"),
        (raid("DD"), "RaidFailed", "2 of the 2 images", "lvconvert --repair"),
        (raid("AA", mismatches=8), "RaidMismatches", "differ in 8 sectors", "--syncaction repair"),
        (Snapshot(MIB, "Invalid"), "SnapshotOverflowed", "any more (Invalid)", "delete it"),
        (
            Cache(MIB, "ro"),
            "CacheFailing",
            "the cache of logical volume vol-a failed (ro)",
            "--uncache vol-a",
        ),
        (Cache(MIB, "rw", needs_check=True), "CacheFailing", "failed (rw)", "--uncache"),
        (WriteCache(MIB, 5, 10, 10, 0), "WriteCacheErrors", "met error 5", "back the data up"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_with_what_to_do(
    status: Status, reason: str, wrong: str, remedy: str
) -> None:
    [told] = conditions.by_device_mapper("vol-a", [status])
    assert told.reason.word == reason
    assert wrong in told.message
    assert remedy in told.message


@pytest.mark.parametrize(
    ("kind", "survived", "lost"),
    [
        ("raid1", "DDA", "DDD"),
        ("raid5_ls", "ADA", "DDA"),
        ("raid6_zr", "DADAA", "DDDAA"),
        ("raid10", "DAAD", "DDAA"),
        ("raid10", "DADA", "AADD"),
        ("raid10_near", "ADAD", "DDDA"),
    ],
)
def test_a_raid_is_degraded_as_long_as_nothing_is_lost_with_its_disks(
    kind: str, survived: str, lost: str
) -> None:
    for health, reason in ((survived, "RaidDegraded"), (lost, "RaidFailed")):
        [told] = conditions.by_device_mapper("vol-a", [raid(health, kind=kind)])
        assert told.reason.word == reason
