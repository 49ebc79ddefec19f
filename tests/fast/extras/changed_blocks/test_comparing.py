"""Ranges that differ or were overwritten: in order, early, and in bounded memory."""

import random
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import cast

import pytest

from agent.extras.changed_blocks import changed_blocks_service, comparing
from agent.extras.changed_blocks.comparing import MAX_RANGE_BYTES
from agent.extras.changed_blocks.delta import Reading, UserReading
from agent.extras.changed_blocks.extents import (
    Extent,
    LogicalOffset,
    UserExtent,
    UserOffset,
    clipped,
    merged,
)
from agent.work.pace import IoTask, Pace
from lvm.active_devices import Exceptions
from lvm.layout import NO_RESERVE, Reserve
from mount.block_io import Reader
from mount.kernel import Kernel

MIB, TIB = 1 << 20, 1 << 40
CHUNK = 4096


def work(bandwidth: Reserve = NO_RESERVE) -> IoTask:
    """Turns for comparing."""
    return Pace(lambda: bandwidth, Kernel()).task("compare", check=lambda: None)


@dataclass
class Content:
    """A disk of these bytes."""

    content: bytes

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        return self.content[offset_bytes : offset_bytes + length_bytes]


class Filled:
    """A disk of one byte, which counts what is read of it."""

    def __init__(self, byte: bytes) -> None:
        self._byte = byte
        self.read_bytes = 0

    def read(self, _offset_bytes: int, length_bytes: int) -> bytes:
        self.read_bytes += length_bytes
        return self._byte * length_bytes


def test_a_difference_is_reported_before_the_rest_is_compared() -> None:
    size = 100 * MIB
    old, new = Filled(b"a"), Filled(b"b")
    found = comparing.differing(
        cast(Reader, old), size, cast(Reader, new), work(), [Extent(0, size)]
    )
    assert next(found) == Extent(0, MAX_RANGE_BYTES)
    assert new.read_bytes == MAX_RANGE_BYTES
    rest = list(found)
    assert [one.offset_bytes for one in rest] == list(range(MAX_RANGE_BYTES, size, MAX_RANGE_BYTES))
    assert sum(one.length_bytes for one in rest) == size - MAX_RANGE_BYTES


def test_a_turn_is_over_when_a_difference_is_reported() -> None:
    size = 100 * MIB
    old, new = cast(Reader, Filled(b"a")), cast(Reader, Filled(b"b"))
    one = Pace(lambda: None, Kernel())
    comparing_work = one.task("compare", check=lambda: None)
    found = comparing.differing(old, size, new, comparing_work, [Extent(0, size)])
    for _ in found:
        assert not one._queue
    assert one.done_bytes == {"compare": 2 * size}


@pytest.mark.parametrize("size", [100 * MIB, 3 * MIB - CHUNK, CHUNK // 8])
def test_small_turns_find_what_large_ones_find(size: int) -> None:
    chance = random.Random(size)
    old = chance.randbytes(size)
    changed = bytearray(old)
    for at in (0, size // 3, size - 1):
        changed[at] ^= 1
    extents = [Extent(0, size // 2), Extent(size // 2, size - size // 2)]
    readers = cast(Reader, Content(old)), size, cast(Reader, Content(bytes(changed)))
    # A tenth of a second is less than the least piece.
    slow = Pace(lambda: Reserve(size_bytes=MIB), Kernel(), clock=count(0.0, 1000.0).__next__)
    found = list(comparing.differing(*readers, slow.task("compare", check=lambda: None), extents))
    assert found == list(comparing.differing(*readers, work(), extents))
    assert sum(one.length_bytes for one in found) >= min(size, CHUNK)


def test_a_long_answer_does_not_wait_for_more_ranges() -> None:
    many = iter([Extent(number * MIB, MIB // 2) for number in range(100)])
    first = changed_blocks_service._piece(many, 0)
    assert sum(one.length_bytes for one in first) == MAX_RANGE_BYTES
    assert len(changed_blocks_service._piece(many, 3)) == 3


@dataclass
class Table(Exceptions):
    """Chunks of an origin in the order in which they were overwritten; counts who reads it."""

    numbers: Sequence[int]
    chunk_bytes: int = CHUNK
    readings: list[int] = field(default_factory=list)

    def chunks(self) -> Iterator["array[int]"]:
        self.readings.append(len(self.numbers))
        for at in range(0, len(self.numbers), 256):
            yield array("Q", self.numbers[at : at + 256])


def ranges(tables: list[Table], start: int, end: int, part_chunks: int = 64) -> list[Extent]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(comparing, "_PART_CHUNKS", part_chunks)
        return list(comparing.ranges(tables, start, end, lambda: None))


@pytest.mark.parametrize("part_chunks", [8, 16, 64, 1 << 20])
@pytest.mark.parametrize("seed", range(20))
def test_random_tables_are_read_in_order(seed: int, part_chunks: int) -> None:
    chance = random.Random(seed)
    numbers = chance.sample(range(500), chance.randint(0, 300))
    start = chance.randrange(0, 400 * CHUNK, 512)
    end = chance.randrange(start, 500 * CHUNK, 512)
    found: set[int] = set()
    last = -1
    for one in ranges([Table(numbers)], start, end, part_chunks):
        assert last < one.offset_bytes < one.end_bytes
        found |= set(range(one.offset_bytes, one.end_bytes, 512))
        last = one.end_bytes
    wanted = {
        at
        for number in numbers
        for at in range(number * CHUNK, (number + 1) * CHUNK, 512)
        if start <= at < end
    }
    assert found == wanted


def test_parts_without_chunks_are_skipped() -> None:
    table = Table([3, 100_000, 5_000_000])
    assert ranges([table], 0, 16 * TIB) == [
        Extent(3 * CHUNK, CHUNK),
        Extent(100_000 * CHUNK, CHUNK),
        Extent(5_000_000 * CHUNK, CHUNK),
    ]
    assert len(table.readings) == 3


def test_one_part_is_enough_for_a_terabyte() -> None:
    table = Table([TIB // CHUNK - 1, 0])
    assert len(list(comparing.ranges([table], 0, TIB, lambda: None))) == 2
    assert len(table.readings) == 1


@pytest.mark.parametrize("parts", [3, pytest.param(16, marks=pytest.mark.long)])
def test_many_terabytes_take_as_much_memory_as_one(parts: int) -> None:
    numbers = range(0, parts * TIB // CHUNK, 1 << 17)
    table = Table(numbers)
    tracemalloc.start()
    try:
        count = sum(1 for _ in comparing.ranges([table], 0, parts * TIB, lambda: None))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == len(numbers) == parts * 2_048
    assert peak < 48 << 20, f"{peak >> 20} MiB"
    assert len(table.readings) == parts


def test_a_check_that_raises_ends_the_reading() -> None:
    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    with pytest.raises(Gone):
        list(comparing.ranges([Table([1])], 0, TIB, check))


@pytest.mark.parametrize("seed", range(40))
def test_runs_of_writes_are_merged(seed: int) -> None:
    """Also where the kernel ended its copies in another order, and where stretches touch."""
    chance = random.Random(seed)
    numbers: list[int] = []
    at = 0
    while at < 20_000:
        length = chance.choice([1, 7, 8, 9, 256, 300, 4_000])
        stretch = list(range(at, at + length))
        if chance.randrange(2):
            for first in range(0, length, 16):
                few = stretch[first : first + 16]
                chance.shuffle(few)
                stretch[first : first + 16] = few
        numbers += stretch
        at += length + chance.choice([0, 1, 8, 500])
    # The order of stretches is that of the writes.
    cut = chance.randrange(len(numbers))
    found = ranges([Table(numbers[cut:] + numbers[:cut])], 0, 30_000 * CHUNK, 1 << 12)
    numbered = [
        number
        for one in found
        for number in range(one.offset_bytes // CHUNK, one.end_bytes // CHUNK)
    ]
    assert numbered == sorted(numbers)
    assert all(one.end_bytes < other.offset_bytes for one, other in pairwise(found))


def test_two_tables_are_united() -> None:
    found = ranges([Table([9, 2, 3]), Table([3, 4, 200])], 0, 1000 * CHUNK)
    assert found == [
        Extent(2 * CHUNK, 3 * CHUNK),
        Extent(9 * CHUNK, CHUNK),
        Extent(200 * CHUNK, CHUNK),
    ]


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


def test_a_spool_is_read_again_in_bounded_memory_by_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "_ON_DISK", tmp_path / "none")
    count = 300_000
    with comparing.opened(tmp_path) as spool:
        tracemalloc.start()
        try:
            spool.fill(Extent(2 * number, 1) for number in range(count))
            assert sum(1 for _ in spool) == count
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 << 20, f"{peak >> 20} MiB"
        assert list(tmp_path.iterdir()) == []
        both = zip(spool, spool, strict=True)
        assert [next(both) for _ in range(3)] == [(Extent(2 * n, 1),) * 2 for n in range(3)]


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
