"""Streams in memory: what is sent arrives, and nothing else is ever taken for a stream."""

import hashlib
import io
import json
import random
import struct
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agent.core import errors
from agent.extras.changed_blocks.extents import Extent
from agent.extras.streams import form, reading, sending
from agent.extras.streams.form import Header, Packed
from agent.extras.streams.reading import Reader, Target
from agent.extras.streams.sending import Writer
from mount.block_io import Bytes, Opened

MIB = 1 << 20
SIZE = 16 * MIB
CHAIN, OTHER = "a1" * 32, "b2" * 32
WHOLE = Header("volume", "snapshot", SIZE, 17, CHAIN, facts={"fsType": "ext4"})
LATER = replace(WHOLE, base_snapshot_id="earlier", base_chain=OTHER, base_size_bytes=SIZE)


@pytest.fixture(scope="module", autouse=True)
def records_each_frame() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "RECORD_SECONDS", 0.0)
        yield


def ignored(_offset_bytes: int) -> None:
    """Ignore the progress."""


class Memory(Opened):
    """A device of so many bytes, as it is after `flush` too."""

    def __init__(self, content: bytes) -> None:
        super().__init__("memory", -1)
        self.content = bytearray(content)
        self.flushed = bytes(content)

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        place[:] = self.content[offset_bytes : offset_bytes + len(place)]

    def write(self, offset_bytes: int, data: Bytes) -> None:
        self.content[offset_bytes : offset_bytes + len(data)] = data

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        self.write(offset_bytes, bytes(length_bytes))

    def flush(self) -> None:
        self.flushed = bytes(self.content)


def sent(header: Header, content: bytes, *extents: Extent, compress: bool = False) -> bytes:
    out = io.BytesIO()
    device = Memory(content.ljust(header.size_bytes, b"\0"))
    sending.send(out.write, header, device, extents, compress=compress)
    return out.getvalue()


def applied(stream: bytes, before: bytes) -> bytes:
    device = Memory(before)
    reading.apply(Reader(io.BytesIO(stream)), Target(device, len(before), False), record=ignored)
    assert device.flushed == bytes(device.content)
    return device.flushed


def noise(length: int, start: int = 1) -> bytes:
    """What does not become smaller, and has no zeroes."""
    return random.Random(start).randbytes(length).replace(b"\0", b"\1")


@pytest.mark.parametrize("compress", [False, True])
def test_a_whole_volume_overwrites_all_of_a_used_device(compress: bool) -> None:
    content = noise(MIB + 4096) + bytes(5 * MIB) + noise(8192)
    extents = [Extent(0, 4 * MIB), Extent(6 * MIB, 2 * MIB)]
    stream = sent(WHOLE, content, *extents, compress=compress)
    before = b"old" * (18 * MIB // 3)
    assert applied(stream, before) == content.ljust(len(before), b"\0")
    assert len(stream) < 4 * MIB


def test_zeroes_are_short_and_not_written_to_a_blank_device() -> None:
    stream = sent(WHOLE, b"", Extent(0, SIZE))
    assert len(stream) < 2048
    before = bytes(SIZE)
    device = Memory(before)
    device.zero_out = None  # type: ignore[assignment, method-assign]
    reader = Reader(io.BytesIO(stream))
    reading.apply(reader, Target(device, SIZE, blank=True), record=ignored)
    assert reader.totals.zero_bytes == SIZE


def test_data_are_compressed_only_if_that_is_smaller() -> None:
    data = b"the same words again and again. " * (SIZE // 32)
    assert len(sent(WHOLE, data, Extent(0, SIZE), compress=True)) < SIZE // 50
    packed = form.pack(noise(4096), compress=True)
    assert len(packed.payload) <= 4096


def test_the_growth_of_a_volume_arrives_too() -> None:
    header = replace(LATER, base_size_bytes=8 * MIB)
    content = noise(8 * MIB) + bytes(4 * MIB) + b"y" * 4096
    stream = sent(header, content, Extent(12 * MIB, 4096))
    # What was there before, of someone else.
    before = noise(8 * MIB) + b"z" * (8 * MIB)
    assert applied(stream, before) == content.ljust(SIZE, b"\0")


def _digests(content: bytes, start: int, end: int) -> sending.Digests:
    """What gives the digests of a device's pieces, any number at a time."""
    every = b"".join(sending.digests_of(Memory(content), start, end))
    left = io.BytesIO(every)
    return lambda count: left.read(count * sending.DIGEST_BYTES)


@given(
    st.randoms(use_true_random=False),
    st.integers(1, 9 * MIB // 512).map(lambda sectors: 512 * sectors),
    st.booleans(),
)
def test_of_two_contents_only_the_pieces_that_differ_are_sent(
    chance: random.Random, size: int, is_sparse: bool
) -> None:
    here, there, written = bytearray(size), bytearray(size), []
    for extent in sending.pieces_of(0, size, sending.PIECE_BYTES):
        at, end = extent.offset_bytes, extent.end_bytes
        kinds = [chance.choice((b"\0", b"x", b"x", b"y")) for _ in range(2)]
        for content, kind in zip((here, there), kinds, strict=True):
            content[at:end] = kind * (end - at)
        if any(here[at:end]) or not is_sparse:
            written.append(extent)
    offset = chance.choice((0, chance.randrange(0, size, 512)))
    there[:offset] = here[:offset]
    header = replace(WHOLE, size_bytes=size, offset_bytes=offset)
    out = io.BytesIO()
    sending.send(
        out.write,
        header,
        Memory(bytes(here)),
        written,
        digests=_digests(bytes(there), offset, size),
    )
    frames = list(Reader(io.BytesIO(out.getvalue())).frames())
    for extent in sending.pieces_of(offset, size, sending.PIECE_BYTES):
        span = slice(extent.offset_bytes, extent.end_bytes)
        is_named = any(
            one.offset_bytes < extent.end_bytes and extent.offset_bytes < one.end_bytes
            for one in frames
        )
        assert is_named == (here[span] != there[span])
    # The other device is larger, and has something behind the end.
    device = Memory(bytes(there) + b"old" * 1024)
    target = Target(device, len(device.content), blank=False)
    reader = Reader(io.BytesIO(out.getvalue()))
    reading.apply(reader, target, record=ignored, is_compared=True)
    assert device.flushed == bytes(here) + bytes(3 * 1024)


def test_a_recorded_offset_is_on_the_disk() -> None:
    content = noise(SIZE)
    device = Memory(bytes(SIZE))
    flushed: list[bool] = []

    def record(offset_bytes: int) -> None:
        flushed.append(device.flushed[:offset_bytes] == content[:offset_bytes])

    reader = Reader(io.BytesIO(sent(WHOLE, content, Extent(0, SIZE))))
    reading.apply(reader, Target(device, SIZE, True), record=record)
    assert flushed
    assert all(flushed)


def test_an_unproved_stream_has_no_end_mark() -> None:
    out = io.BytesIO()

    def overflowed() -> None:
        raise errors.SourceLost("snapshot", "it was lost")

    with pytest.raises(errors.SourceLost):
        sending.send(out.write, WHOLE, Memory(bytes(SIZE)), [Extent(0, SIZE)], prove=overflowed)
    with pytest.raises(errors.StreamEnded):
        applied(out.getvalue(), bytes(SIZE))


# Malformed streams

STREAM = sent(
    replace(WHOLE, size_bytes=MIB),
    noise(8192) + bytes(4096) + noise(4096),
    Extent(0, 8192),
    Extent(8192, 4096),
    Extent(12288, 4096),
)


def frames_of(stream: bytes) -> list[bytes]:
    """The header, and each frame with what is in it."""
    at = form.PREFIX_BYTES + form.header_bytes(stream[: form.PREFIX_BYTES])
    parts = [stream[:at]]
    while at < len(stream):
        [stored] = struct.unpack("!I", stream[at + 4 : at + 8])
        end = at + form.HEADING_BYTES + stored
        parts.append(stream[at:end])
        at = end
    return parts


@given(st.integers(0, len(STREAM) - 1), st.integers(1, 255))
def test_an_altered_byte_is_refused(at: int, change: int) -> None:
    altered = bytearray(STREAM)
    altered[at] ^= change
    with pytest.raises(errors.BadStream):
        applied(bytes(altered), bytes(MIB))


@given(st.integers(0, len(STREAM) - 1))
def test_a_truncated_stream_is_refused(length: int) -> None:
    with pytest.raises(errors.StreamEnded):
        applied(STREAM[:length], bytes(MIB))


@given(st.permutations(range(1, 5)), st.sets(st.integers(1, 4)))
def test_frames_reordered_omitted_or_doubled_are_refused(
    order: list[int], without: set[int]
) -> None:
    parts = frames_of(STREAM)
    assert len(parts) == 5
    chosen = [one for one in order if one not in without]
    if chosen != [1, 2, 3, 4]:
        with pytest.raises(errors.BadStream):
            applied(parts[0] + b"".join(parts[one] for one in chosen), bytes(MIB))


@given(st.binary(max_size=4096))
def test_noise_is_refused(data: bytes) -> None:
    asked: list[int] = []

    class Asked(io.BytesIO):
        def read(self, length: int | None = -1, /) -> bytes:
            asked.append(length or 0)
            return super().read(length)

    with pytest.raises(errors.BadStream):
        list(Reader(Asked(data)).frames())
    assert max(asked, default=0) <= form.MOST_BYTES


@given(st.binary(max_size=300), st.integers(0, 70000))
def test_a_random_header_is_refused(found: bytes, length: int) -> None:
    prefix = struct.pack("!8sHHI", form.MAGIC, form.VERSION, 0, length)
    with pytest.raises(errors.BadStream):
        Reader(io.BytesIO(prefix + found))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size_bytes": -512}, "size"),
        ({"size_bytes": 1000}, "size"),
        ({"size_bytes": "16"}, "size_bytes"),
        ({"size_bytes": True}, "size_bytes"),
        ({"size_bytes": 1 << 70}, "size"),
        ({"offset_bytes": 2 * SIZE}, "sizes"),
        ({"chain": "a1"}, "chain"),
        ({"base_chain": OTHER}, "base"),
        ({"base_snapshot_id": "x"}, "base"),
        ({"base_size_bytes": 512}, "base"),
        ({"release": "word"}, "chain"),
        ({"facts": {"a": 1}}, "facts"),
        ({"facts": []}, "facts"),
        ({"later": "words"}, "later"),
        ({"volume_id": None}, "volume_id"),
    ],
)
def test_a_header_is_checked_field_by_field(changes: dict[str, object], said: str) -> None:
    found = json.dumps({**asdict(WHOLE), **changes}).encode()
    prefix = struct.pack("!8sHHI", form.MAGIC, form.VERSION, 0, len(found))
    proof = hashlib.sha256(prefix + found).digest()
    with pytest.raises(errors.BadStream, match=said):
        Reader(io.BytesIO(prefix + found + proof))


def test_another_version_is_refused_by_its_number() -> None:
    later = bytearray(STREAM)
    later[len(form.MAGIC) : len(form.MAGIC) + 2] = struct.pack("!H", 2)
    with pytest.raises(errors.BadStream, match="version 2"):
        Reader(io.BytesIO(later))


@pytest.mark.parametrize(
    ("first", "second"),
    [((8192, 4096), (0, 4096)), ((0, 8192), (4096, 4096)), ((MIB - 4096, 8192), (0, 0))],
)
def test_parts_that_overlap_or_go_back_or_beyond_the_end_are_refused(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    out = io.BytesIO()
    writer = Writer(out.write, replace(WHOLE, size_bytes=MIB))
    for offset, length in filter(any, (first, second)):
        writer.data(offset, length, form.pack(bytes(length), compress=False))
    writer.end()
    with pytest.raises(errors.BadStream):
        applied(out.getvalue(), bytes(2 * MIB))


def compressed(length: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(length))


@pytest.mark.parametrize(
    ("payload", "word"),
    [
        *((compressed(length), "not of 4096") for length in (4095, 4097, 1 << 26)),
        (b"no zstd", "byte 0"),
        (b"\x28\xb5\x2f\xfd\x00", "byte 0"),
    ],
)
def test_compressed_data_are_checked(payload: bytes, word: str) -> None:
    out = io.BytesIO()
    writer = Writer(out.write, WHOLE)
    writer.data(0, 4096, Packed(form.ZSTD, payload, form.digest_of(payload)))
    writer.end()
    with pytest.raises(errors.BadStream, match=word):
        applied(out.getvalue(), bytes(SIZE))


@given(st.lists(st.tuples(st.integers(0, 250), st.integers(1, 40)), max_size=12))
def test_equal_contents_have_equal_checksums(parts: list[tuple[int, int]]) -> None:
    content = bytearray(4 * MIB)
    for at, length in parts:
        content[at * 16384 : at * 16384 + length * 512] = bytes([at + 1]) * (length * 512)
    header = replace(WHOLE, size_bytes=4 * MIB)
    there = applied(sent(header, bytes(content), Extent(0, 4 * MIB)), b"q" * (5 * MIB))
    here = sending.of(Memory(bytes(content)), 4 * MIB)
    assert sending.of(Memory(there), 4 * MIB) == here
    content[-1] ^= 1
    assert sending.of(Memory(bytes(content)), 4 * MIB) != here


@given(
    st.lists(st.integers(0, 63), unique=True, max_size=12).map(sorted),
    st.integers(0, MIB // 512),
    st.integers(0, 2 * MIB // 512 - 1),
)
def test_the_checksum_of_parts_covers_exactly_the_parts(
    blocks: list[int], grown: int, altered: int
) -> None:
    """Of sixty-four blocks some changed, and it grew; then a sector there is another."""
    size = MIB + grown * 512
    header = replace(LATER, size_bytes=size, base_size_bytes=MIB)
    before, now = b"a" * MIB, bytearray(b"a" * size)
    for one in blocks:
        now[one * 16384 : (one + 1) * 16384] = bytes([one]) * 16384
    extents = [Extent(one * 16384, 16384) for one in blocks]
    if grown:
        extents.append(Extent(MIB, grown * 512))
    notes: list[Extent] = []
    out, parts = io.BytesIO(), list[Extent]()
    sending.send(out.write, header, Memory(bytes(now)), extents, note=notes.append)
    device = Memory(before + bytes(size - MIB))
    reader = Reader(io.BytesIO(out.getvalue()))
    reading.apply(reader, Target(device, size, False), record=ignored, note=parts.append)
    here = sending.checksum_of_parts(Memory(bytes(now)), header, notes)
    assert sending.checksum_of_parts(device, header, parts) == here
    at = min(altered * 512, size - 512)
    device.content[at] ^= 1
    is_part = at >= MIB or at // 16384 in blocks
    assert (sending.checksum_of_parts(device, header, parts) != here) == is_part


# What is read at once is not what is looked at for zeroes

# Of each mebibyte of a volume, whether it holds zeroes.
_ZEROES = st.lists(st.booleans(), min_size=1, max_size=14)


def holding(zeroes: list[bool]) -> Memory:
    return Memory(b"".join(MIB * bytes([0 if one else at]) for at, one in enumerate(zeroes, 1)))


def frames(zeroes: list[bool], begun: int = 0) -> list[tuple[int, int, bool]]:
    """The frames of such a volume from a mebibyte on: where, how long, and whether of zeroes."""
    device, out = holding(zeroes), io.BytesIO()
    header = replace(WHOLE, size_bytes=len(device.content), offset_bytes=begun * MIB)
    sending.send(out.write, header, device, [Extent(0, header.size_bytes)])
    read = Reader(io.BytesIO(out.getvalue())).frames()
    return [(one.offset_bytes // MIB, one.length_bytes // MIB, one.is_zeroes) for one in read]


def test_zeroes_and_data_have_frames_of_their_own() -> None:
    zeroes = [False, True, *[False] * 5, True, True, True]
    assert frames(zeroes) == [
        *((0, 1, False), (1, 1, True), (2, 2, False)),
        *((4, 3, False), (7, 3, True)),
    ]


@given(_ZEROES, st.integers(0, 14))
def test_each_mebibyte_is_in_one_frame_of_its_kind(zeroes: list[bool], begun: int) -> None:
    begun = min(begun, len(zeroes))
    found: list[bool] = []
    for at, length, are_zeroes in frames(zeroes, begun):
        assert at == begun + len(found)
        assert are_zeroes or length * MIB <= form.MOST_BYTES
        found += length * [are_zeroes]
    assert found == zeroes[begun:]


@given(_ZEROES)
def test_the_checksum_is_of_each_mebibyte_that_is_not_all_zeroes(zeroes: list[bool]) -> None:
    device, tells = holding(zeroes), list[int]()
    whole = hashlib.sha256(len(device.content).to_bytes(8, "big"))
    for at, zero in enumerate(zeroes):
        if not zero:
            data = device.content[at * MIB : (at + 1) * MIB]
            whole.update((at * MIB).to_bytes(8, "big") + hashlib.sha256(data).digest())
    assert sending.of(device, len(device.content), tells.append) == whole.hexdigest()
    assert tells[-1] == len(device.content)
