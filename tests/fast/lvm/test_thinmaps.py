"""What thin_dump(8) and thin_delta(8) print is read as it comes, however much it is."""

import io
import tracemalloc
from collections.abc import Callable, Iterator
from typing import BinaryIO

import chosen
import pytest

from lvm import thin
from lvm.thin import Run
from mount import mount_errors as mount_errors

CHUNK = 64 << 10
# Both as thin-provisioning-tools 0.9.0 print them.
DUMP = b"""\
<superblock uuid="" time="3" transaction="4" flags="0" version="2" data_block_size="128" \
nr_data_blocks="1000">
  <device dev_id="1" mapped_blocks="20" transaction="0" creation_time="0" snap_time="2">
    <range_mapping origin_begin="0" data_begin="100" length="10" time="0"/>
    <single_mapping origin_block="20" data_block="5" time="1"/>
    <range_mapping origin_begin="30" data_begin="200" length="9" time="2"/>
  </device>
</superblock>
"""
DELTA = b"""\
<superblock uuid="" time="3" transaction="4" data_block_size="128" nr_data_blocks="1000">
  <diff left="2" right="1">
    <same begin="0" length="8"/>
    <right_only begin="8" length="2"/>
    <different begin="20" length="1"/>
    <left_only begin="30" length="5"/>
    <same begin="35" length="4"/>
  </diff>
</superblock>
"""
EMPTY = b'<superblock uuid="" data_block_size="128">\n</superblock>\n'


NO_BLOCKS = EMPTY.replace(b"\n<", b'\n<device dev_id="1"></device><', 1)


@pytest.mark.parametrize(
    ("read", "printed", "runs"),
    [
        (thin.mapped, DUMP, [(0, 10), (20, 1), (30, 9)]),
        (thin.differing, DELTA, [(8, 2), (20, 1), (30, 5)]),
        (thin.mapped, NO_BLOCKS, []),
    ],
    ids=["blocks of a volume", "differences", "no blocks"],
)
def test_the_runs_are_read(
    read: Callable[[BinaryIO], Iterator[Run]], printed: bytes, runs: list[tuple[int, int]]
) -> None:
    expected = [Run(start * CHUNK, length * CHUNK) for start, length in runs]
    assert list(read(io.BytesIO(printed))) == expected


@pytest.mark.parametrize(
    "printed",
    [
        b"",
        DUMP[: len(DUMP) // 2],
        DUMP.replace(b'length="9"', b'length="nine"'),
        DUMP.replace(b"data_block_size", b"block_size"),
        DUMP + b"<",
    ],
)
def test_an_output_that_is_not_understood_is_refused(printed: bytes) -> None:
    with pytest.raises(mount_errors.BadReport):
        list(thin.mapped(io.BytesIO(printed)))


@pytest.mark.parametrize("read", [thin.mapped, thin.differing])
def test_a_missing_volume_is_not_an_empty_one(
    read: Callable[[BinaryIO], Iterator[Run]],
) -> None:
    """thin_dump ends with 0 all the same."""
    with pytest.raises(mount_errors.BadReport, match="do not have"):
        list(read(io.BytesIO(EMPTY)))


class Printing(io.BytesIO):
    """A program that prints lines for as long as there are any."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        super().__init__()
        self._lines = lines

    def read(self, size: int | None = -1) -> bytes:
        return next(self._lines, b"")


def of_a_full_pool(pieces: int, each: int) -> Iterator[bytes]:
    """Every other block of a volume, each a line."""
    yield DUMP.partition(b"<range")[0]
    for piece in range(pieces):
        yield b"".join(
            b'<single_mapping origin_block="%d" data_block="%d" time="0"/>\n' % (number, number)
            for number in range(2 * piece * each, 2 * (piece + 1) * each, 2)
        )
    yield b"</device></superblock>"


def test_many_mappings_take_no_more_memory_than_a_few() -> None:
    """CARVER_MAPPINGS=thousands=4000 for as many as a volume of 16 TiB has in blocks of 4 MiB."""
    pieces, each = chosen.numbers("CARVER_MAPPINGS", thousands=50)["thousands"], 1000
    printed = Printing(of_a_full_pool(pieces, each))
    tracemalloc.start()
    try:
        count = sum(1 for _ in thin.mapped(printed))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == pieces * each
    assert peak < 4 << 20, f"{peak >> 20} MiB"
