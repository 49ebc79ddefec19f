"""What a disk is at, by the fields of its `stat` on old kernels and new ones."""

import pytest

from mount import disk_load
from mount.disk_load import DiskLoad
from mount.kernel import Kernel

# Documentation/block/stat.rst: reads, merges, sectors, ms; writes alike; in flight; two sums.
OLD = "10 1 80 100   20 2 160 200   3 250 300"
DISCARDS = f"{OLD}   30 3 240 400"
FLUSHES = f"{DISCARDS}   40 500"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OLD, DiskLoad(30, 300, 3)),
        (DISCARDS, DiskLoad(60, 700, 3)),
        (FLUSHES, DiskLoad(100, 1200, 3)),
        ("", DiskLoad()),
    ],
    ids=["Linux 4.17", "Linux 4.18", "Linux 5.5", "a disk that is gone"],
)
def test_all_kinds_of_requests_count(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: DiskLoad
) -> None:
    files = {"/sys/block/sda/stat": text}
    monkeypatch.setattr(disk_load, "attribute", files.__getitem__)
    assert Kernel().disk_load("sda") == expected
