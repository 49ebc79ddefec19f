"""What a snapshot has copies of, in order and in bounded memory, however its table has it."""

import random
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from agent.extras.changed_blocks import comparing
from agent.extras.changed_blocks.extents import Extent
from lvm.devices import Exceptions

CHUNK = 4096
TIB = 1 << 40


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


def test_sixteen_terabytes_take_as_much_memory_as_one_part() -> None:
    numbers = range(0, 16 * TIB // CHUNK, 1 << 17)
    table = Table(numbers)
    tracemalloc.start()
    try:
        count = sum(1 for _ in comparing.ranges([table], 0, 16 * TIB, lambda: None))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == len(numbers) == 32_768
    assert peak < 48 << 20, f"{peak >> 20} MiB"
    assert len(table.readings) == 16


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
