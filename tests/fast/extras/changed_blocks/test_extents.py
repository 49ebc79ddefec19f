"""Ranges: merged, clipped, kept for a while; and whose offsets they have."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from agent.extras.changed_blocks import comparing as spools
from agent.extras.changed_blocks.delta import Reading, UserReading
from agent.extras.changed_blocks.extents import (
    Extent,
    LogicalOffset,
    UserExtent,
    UserOffset,
    clipped,
    merged,
)


def test_ranges_that_touch_or_overlap_are_one() -> None:
    those = [Extent(0, 10), Extent(10, 5), Extent(12, 1), Extent(20, 5), Extent(22, 10)]
    assert list(merged(those)) == [Extent(0, 15), Extent(20, 12)]
    assert list(merged([])) == []


def test_long_ranges_are_split() -> None:
    those = [Extent(0, 10), Extent(10, 5), Extent(20, 30)]
    assert list(merged(those, 12)) == [
        Extent(0, 12),
        Extent(12, 3),
        Extent(20, 12),
        Extent(32, 12),
        Extent(44, 6),
    ]
    assert list(merged([Extent(0, 8), Extent(8, 8)], 8)) == [Extent(0, 8), Extent(8, 8)]


def test_ranges_are_clipped() -> None:
    those = [Extent(0, 10), Extent(20, 10), Extent(40, 10)]
    assert list(clipped(those, 5, 25)) == [Extent(5, 5), Extent(20, 5)]
    assert list(clipped(those, 10, 20)) == []


def test_a_spool_is_read_again_in_bounded_memory(tmp_path: Path) -> None:
    count = 300_000
    with spools.opened(tmp_path) as spool:
        tracemalloc.start()
        try:
            spool.fill(Extent(2 * number, 1) for number in range(count))
            assert sum(1 for _ in spool) == count
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 << 20, f"{peak >> 20} MiB"
        both = zip(spool, spool, strict=True)
        assert [next(both) for _ in range(3)] == [(Extent(2 * n, 1),) * 2 for n in range(3)]


def test_a_large_spool_is_in_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spools, "_ON_DISK", tmp_path / "none")
    with spools.opened(tmp_path) as spool:
        spool.fill(Extent(2 * number, 1) for number in range(300_000))
        assert list(tmp_path.iterdir()) == []
        assert sum(one.length_bytes for one in spool) == 300_000


class Logical:
    """What a logical volume with a header of 4 MiB was written at."""

    size_bytes = 16 << 20

    def extents(self, starting_offset: LogicalOffset) -> Iterator[Extent]:
        return clipped(
            [Extent(0, 6 << 20), Extent(8 << 20, 4096)], starting_offset, self.size_bytes
        )


def test_logical_and_user_offsets_are_distinct_types() -> None:
    """An ignored error that mypy does not find is one: so it goes on refusing each of these."""
    logical = cast(Reading, Logical())
    user = UserReading(logical, LogicalOffset(4 << 20))
    assert user.size_bytes == 12 << 20
    found = list(user.extents())
    assert found == [UserExtent(UserOffset(0), 2 << 20), UserExtent(UserOffset(4 << 20), 4096)]
    assert list(user.extents(UserOffset(4 << 20))) == found[1:]

    user.extents(LogicalOffset(0))  # type: ignore[arg-type]
    logical.extents(UserOffset(0))  # type: ignore[arg-type]
    UserExtent(LogicalOffset(0), 1)  # type: ignore[arg-type]
    merged(found)  # type: ignore[arg-type]
    clipped(user.extents(), 0, 1)  # type: ignore[arg-type]
