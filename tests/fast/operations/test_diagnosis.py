"""What device-mapper says against a volume, in sentences that say what to do."""

import pytest

from agent.operations import diagnosis as conditions
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
def test_a_healthy_device_has_no_condition(status: Status) -> None:
    assert list(conditions.conditions_by_device_mapper("vol-a", [status])) == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(Cache(MIB, "ro"), "cache"), (WriteCache(MIB, 5, 10, 10, 0), "write cache")],
)
def test_a_failed_cache_under_a_pool_is_the_pools(status: Status, kind: str) -> None:
    [found] = conditions.conditions_by_device_mapper("vol-a", [pool(), status])
    assert f"the {kind} of the thin pool under logical volume vol-a" in found.message


POOL = "of the thin pool under the volume are"
VOLUME, REPAIR = "logical volume vol-a", "carver volume repair"
DAMAGED = "see `A thin pool's metadata are damaged` in docs/operations.md"


@pytest.mark.parametrize(
    ("status", "reason", "wrong", "remedy"),
    [
        (raid("AD"), "RaidDegraded", "1 of the 2 images of its raid1 failed", REPAIR),
        (raid("-A"), "RaidDegraded", "1 of the 2 images", "lvchange --refresh vol-a"),
        (raid("DD"), "RaidFailed", "2 of the 2 images", REPAIR),
        (raid("Aa", "recover", 84), "RaidResyncing", "resyncing (recover, 42 % done)", "wait"),
        (raid("AA", mismatches=8), "RaidMismatches", "differ in 8 sectors", "--syncaction repair"),
        (pool(data=93), "PoolNearlyFull", f"data {POOL} 93 %", "vgextend"),
        (pool(metadata=99), "PoolNearlyFull", f"metadata {POOL} 99 %", "lvextend"),
        (pool("out_of_data_space"), "PoolFull", "no more writes (out_of_data_space)", "make room"),
        (pool("ro"), "PoolReadOnly", "takes no more writes (ro)", "make room"),
        (pool("fail"), "PoolDataLost", "the thin pool under the volume", DAMAGED),
        (pool(check=True), "PoolDataLost", "the thin pool under the volume", DAMAGED),
        (Snapshot(MIB, "Invalid"), "SnapshotOverflowed", "any more (Invalid)", "its data are lost"),
        (Cache(MIB, "ro"), "CacheFailing", f"cache of {VOLUME} failed (ro)", "--uncache vol-a"),
        (Cache(MIB, "rw", needs_check=True), "CacheFailing", "failed (rw)", "--uncache"),
        (WriteCache(MIB, 5, 10, 10, 0), "WriteCacheErrors", "met error 5", "back the data up"),
    ],
    ids=str,
)
def test_each_problem_is_reported_with_a_remedy(
    status: Status, reason: str, wrong: str, remedy: str
) -> None:
    [found] = conditions.conditions_by_device_mapper("vol-a", [status])
    assert found.reason.word == reason
    assert wrong in found.message
    assert remedy in found.message


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
def test_a_raid_is_degraded_while_no_data_are_lost_and_failed_then(
    kind: str, survived: str, lost: str
) -> None:
    for health, reason in ((survived, "RaidDegraded"), (lost, "RaidFailed")):
        [found] = conditions.conditions_by_device_mapper("vol-a", [raid(health, kind=kind)])
        assert found.reason.word == reason
