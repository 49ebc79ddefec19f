"""Differences are reported block by block, before all is compared."""

from typing import cast

from agent.extras.changed_blocks import comparing, service
from agent.extras.changed_blocks.comparing import MAX_RANGE_BYTES
from agent.extras.changed_blocks.extents import Extent
from mount.blocks import Reader

MIB = 1 << 20


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
        cast(Reader, old), size, cast(Reader, new), lambda: None, [Extent(0, size)]
    )
    assert next(found) == Extent(0, MAX_RANGE_BYTES)
    assert new.read_bytes == MAX_RANGE_BYTES
    rest = list(found)
    assert [one.offset_bytes for one in rest] == list(range(MAX_RANGE_BYTES, size, MAX_RANGE_BYTES))
    assert sum(one.length_bytes for one in rest) == size - MAX_RANGE_BYTES


def test_a_long_answer_does_not_wait_for_more_ranges() -> None:
    many = iter([Extent(number * MIB, MIB // 2) for number in range(100)])
    first = service._piece(many, 0)
    assert sum(one.length_bytes for one in first) == MAX_RANGE_BYTES
    assert len(service._piece(many, 3)) == 3
