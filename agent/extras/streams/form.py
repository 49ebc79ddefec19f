"""The stream format (docs/backup.md): header, frames, and the digests that chain them."""

import hashlib
import json
import mmap
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import cycle
from typing import Any, NamedTuple, TypeVar

import xxhash
import zstandard

from agent.core import errors
from mount.blocks import Bytes

A = TypeVar("A")
B = TypeVar("B")

# Reading, hashing, compressing and writing all leave Python's lock to others. More than a disk and
# a few processors can use would only take memory: a piece is up to form.MOST_BYTES.
WORKERS = min(4, os.cpu_count() or 1) + 1
_AHEAD = 2 * WORKERS


def lent(pieces: Iterable[A], most_bytes: int) -> Iterator[tuple[A, memoryview]]:
    """Pieces, each with memory for so many bytes that is its own until `ordered` gave its result.

    What is asked of the kernel anew for each piece is filled with zeroes a page at a time first,
    which takes longer than a disk.
    """
    places = rooms(most_bytes)
    for piece in pieces:
        yield piece, next(places)


def rooms(most_bytes: int) -> Iterator[memoryview]:
    """Places in memory, one after the other, and again when `ordered` is done with them."""
    return cycle([memoryview(mmap.mmap(-1, most_bytes)) for _ in range(_AHEAD + 2)])


def ordered(work: Callable[[A], B], pieces: Iterable[A]) -> Iterator[B]:
    """What `work` makes of each piece, in the order of the pieces; raises what fails first.

    Where there are no further pieces because of an error, what was begun before is given first. No
    more than a few pieces are taken ahead. When it is closed, nothing is under way any more.
    """
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="stream") as pool:
        begun: deque[Future[B]] = deque()
        try:
            taken, problem = iter(pieces), None
            while problem is None:
                try:
                    piece = next(taken)
                except StopIteration:
                    break
                except Exception as error:
                    problem = error
                else:
                    begun.append(pool.submit(work, piece))
                    if len(begun) >= _AHEAD:
                        yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
            if problem is not None:
                raise problem
        finally:
            for one in begun:
                one.cancel()


MAGIC = b"\x89CARVER\n"
VERSION = 1
# What a frame of data holds at most, as it was on the device.
MOST_BYTES = 4 << 20
# What sizes and offsets are multiples of: the sectors that every block device has.
SECTOR_BYTES = 512
# A volume is smaller (LVM's limit, on a 64-bit kernel).
LARGEST_BYTES = 8 << 60

_PREFIX = struct.Struct("!8sHHI")
_FRAME = struct.Struct("!cBHIQQ16s")
_TOTALS = struct.Struct("!QQQ")
_MOST_HEADER_BYTES = 64 << 10
_DIGEST_BYTES = 32
# Of data: it is to find damage, and SHA-256 would be slower than a good disk.
digest_of = xxhash.xxh3_128_digest
_NO_DIGEST = bytes(16)
_CHAIN = re.compile(r"[0-9a-f]{64}")

# The fields of a header that are of other kinds than a table of facts.
_KINDS: Mapping[Any, type] = {str: str, int: int}

DATA, ZEROES, END = b"D", b"Z", b"E"
RAW, ZSTD = 0, 1
# Level 3 is zstd's own choice: a slow disk is faster with it, a fast one is not held up much.
_LEVEL = 3


@dataclass(frozen=True)
class Header:
    """What a stream is of. Sizes and offsets are in bytes, the time in nanoseconds of the epoch.

    `chain` names exactly the contents that a volume has when the whole stream is applied to one
    that had those of `base_chain`; empty for a whole volume. A base is `base_size_bytes` large.
    `offset_bytes` is where this stream begins, if a part of it was sent before. `release` is the
    SHA-256 of the word without which the volume is not to be finished, or empty.
    """

    volume_id: str
    snapshot_id: str
    size_bytes: int
    taken_nanoseconds: int
    chain: str
    base_snapshot_id: str = ""
    base_chain: str = ""
    base_size_bytes: int = 0
    offset_bytes: int = 0
    release: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether it needs no base."""
        return not self.base_chain


class Packed(NamedTuple):
    """Data as a frame has them."""

    encoding: int
    payload: Bytes
    digest: bytes


@dataclass(frozen=True)
class Frame:
    """A part of a volume: data, or zeroes. Its place is proved, its payload is not yet.

    `room` is the memory that the payload lies in, where that has room for all that it unpacks to.
    """

    offset_bytes: int
    length_bytes: int
    encoding: int = RAW
    payload: Bytes = b""
    digest: bytes = _NO_DIGEST
    room: memoryview | None = None

    @property
    def end_bytes(self) -> int:
        """Where it ends in the volume."""
        return self.offset_bytes + self.length_bytes

    @property
    def is_zeroes(self) -> bool:
        """Whether all of it is to read as zeroes."""
        return not self.payload

    def data(self) -> Bytes:
        """What is to be written, proved to be what was sent; raises BadStream.

        It lies where the payload did, where there is room.
        """
        if digest_of(self.payload) != self.digest:
            raise errors.BadStream(f"the data for byte {self.offset_bytes} were altered")
        if self.encoding == RAW:
            return self.payload
        # Asked first: the decompressor would make room for whatever the data say.
        try:
            told = zstandard.frame_content_size(self.payload)
            data = (
                zstandard.ZstdDecompressor().decompress(self.payload, allow_extra_data=False)
                if told == self.length_bytes
                else b""
            )
        except zstandard.ZstdError as error:
            raise errors.BadStream(f"the data for byte {self.offset_bytes}: {error}") from None
        if len(data) != self.length_bytes:
            raise errors.BadStream(
                f"the data for byte {self.offset_bytes} are not of {self.length_bytes} bytes"
            )
        if self.room is None:
            return data
        self.room[: len(data)] = data
        return self.room[: len(data)]


@dataclass
class Totals:
    """What a stream had, by its end mark."""

    frames: int = 0
    data_bytes: int = 0
    zero_bytes: int = 0

    def add(self, length_bytes: int, *, is_zeroes: bool) -> None:
        """One frame more."""
        self.frames += 1
        if is_zeroes:
            self.zero_bytes += length_bytes
        else:
            self.data_bytes += length_bytes

    def pack(self) -> bytes:
        """As the end mark has them."""
        return _TOTALS.pack(self.frames, self.data_bytes, self.zero_bytes)


def chain_of(volume_id: str, snapshot_uuid: str, taken_nanoseconds: int, size_bytes: int) -> str:
    """The name of exactly what a snapshot holds: its LVM UUID is no other's, nor used again."""
    told = ("carver snapshot 1", volume_id, snapshot_uuid, taken_nanoseconds, size_bytes)
    return hashlib.sha256("\n".join(map(str, told)).encode()).hexdigest()


def pack(data: Bytes, *, compress: bool) -> Packed:
    """Data for a frame; whether they are smaller compressed is seen by doing it."""
    if compress:
        smaller = zstandard.ZstdCompressor(_LEVEL).compress(data)
        if len(smaller) < len(data):
            return Packed(ZSTD, smaller, digest_of(smaller))
    return Packed(RAW, data, digest_of(data))


def text_of(header: Header) -> bytes:
    """A header as JSON."""
    return json.dumps(asdict(header), sort_keys=True, separators=(",", ":")).encode()


def header_of(text: bytes | str) -> Header:
    """What `text_of` gave, checked field by field; raises BadStream."""
    try:
        return _header(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise errors.BadStream(f"its header: {error}") from None


def opening(header: Header) -> tuple[bytes, bytes]:
    """How a stream begins, and the digest that its first frame goes on from."""
    told = text_of(header)
    if len(told) > _MOST_HEADER_BYTES:
        raise errors.BadStream(f"a header of {len(told)} bytes is too long")
    text = _PREFIX.pack(MAGIC, VERSION, 0, len(told)) + told
    proof = hashlib.sha256(text).digest()
    return text + proof, proof


def heading(
    proof: bytes, kind: bytes, offset_bytes: int, length_bytes: int, packed: Packed | None = None
) -> tuple[bytes, bytes]:
    """What stands before a frame's payload, and the digest that the next one goes on from."""
    encoding, payload, digest = packed or (RAW, b"", _NO_DIGEST)
    head = _FRAME.pack(kind, encoding, 0, len(payload), offset_bytes, length_bytes, digest)
    proof = hashlib.sha256(proof + head).digest()
    return head + proof, proof


PREFIX_BYTES = _PREFIX.size
HEADING_BYTES = _FRAME.size + _DIGEST_BYTES


def header_bytes(prefix: bytes) -> int:
    """How long the rest of a header is, its digest with it; raises BadStream."""
    magic, version, reserved, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise errors.BadStream("it is none: it does not begin as one (docs/backup.md)")
    if version != VERSION:
        raise errors.BadStream(
            f"it is of version {version}; this Carver reads version {VERSION} only"
        )
    if reserved or not 0 < length <= _MOST_HEADER_BYTES:
        raise errors.BadStream("its header was altered")
    return int(length) + _DIGEST_BYTES


def header(prefix: bytes, rest: bytes) -> tuple[Header, bytes]:
    """The header that begins so, and the digest that frames go on from; raises BadStream."""
    told, proof = rest[:-_DIGEST_BYTES], rest[-_DIGEST_BYTES:]
    if hashlib.sha256(prefix + told).digest() != proof:
        raise errors.BadStream("its header was altered")
    return header_of(told), proof


def parsed(proof: bytes, heading: bytes) -> tuple[bytes, Frame, int, bytes]:
    """Kind, frame without its payload, the payload's length, and the next digest.

    Proved to be what was written after what has this digest: none is left out, doubled or moved.
    Raises BadStream.
    """
    head, told = heading[: _FRAME.size], heading[_FRAME.size :]
    proof = hashlib.sha256(proof + head).digest()
    if told != proof:
        raise errors.BadStream("a part of it was altered, moved or left out")
    kind, encoding, reserved, stored, offset, length, digest = _FRAME.unpack(head)
    frame = Frame(offset, length, encoding, b"", digest)
    is_sound = {
        DATA: 0 < stored <= MOST_BYTES
        and 0 < length <= MOST_BYTES
        and (stored == length if encoding == RAW else encoding == ZSTD and stored < length),
        ZEROES: not stored and length > 0 and encoding == RAW and digest == _NO_DIGEST,
        END: stored == _TOTALS.size and not length and encoding == RAW,
    }
    if reserved or (offset | length) % SECTOR_BYTES or not is_sound.get(kind, False):
        raise errors.BadStream("it has a part of which nothing is known here")
    return kind, frame, stored, proof


def _header(told: Any) -> Header:
    if not isinstance(told, dict):
        raise ValueError("is no table")
    known = {one.name: one.type for one in fields(Header)}
    if told.keys() != known.keys():
        odd = ", ".join(sorted(map(str, told.keys() ^ known.keys())))
        raise ValueError(f"has other fields than it should have: {odd}")
    for name, value in told.items():
        if type(value) is not _KINDS.get(known[name], dict):
            raise ValueError(f"{name} is not of its kind")
    facts = told["facts"]
    if not all(isinstance(value, str) for value in facts.values()):
        raise ValueError("facts are not texts")
    made = Header(**told)
    sizes = (made.size_bytes, made.base_size_bytes, made.offset_bytes)
    if any(not 0 <= one <= LARGEST_BYTES or one % SECTOR_BYTES for one in sizes):
        raise ValueError("a size is not one")
    if not made.size_bytes or max(sizes) > made.size_bytes or made.taken_nanoseconds < 0:
        raise ValueError("its sizes do not fit each other")
    chains = filter(None, (made.base_chain, made.release))
    if not all(map(_CHAIN.fullmatch, (made.chain, *chains))) or made.chain == made.base_chain:
        raise ValueError("a chain is not one")
    if bool(made.base_chain) is not bool(made.base_snapshot_id) or (
        made.is_whole and made.base_size_bytes
    ):
        raise ValueError("it has half a base")
    return made
