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
from mount.block_io import Bytes

A = TypeVar("A")
B = TypeVar("B")

# Reading, hashing, compressing and writing all release Python's lock. More workers than a disk and
# a few processors can use would only take memory: a piece is up to MOST_BYTES.
WORKERS = min(4, os.cpu_count() or 1) + 1
_AHEAD = 2 * WORKERS


def lent(pieces: Iterable[A], most_bytes: int) -> Iterator[tuple[A, memoryview]]:
    """Pieces, each with memory of `most_bytes` that is its own until `ordered` gave its result.

    Memory is reused: the kernel zeroes new memory page by page, which takes longer than a disk.
    """
    places = rooms(most_bytes)
    for piece in pieces:
        yield piece, next(places)


def rooms(most_bytes: int) -> Iterator[memoryview]:
    """A ring of memory areas, each reused when `ordered` is done with it."""
    return cycle([memoryview(mmap.mmap(-1, most_bytes)) for _ in range(_AHEAD + 2)])


def ordered(work: Callable[[A], B], pieces: Iterable[A]) -> Iterator[B]:
    """Run `work` on pieces in parallel and give the results in order; raise what fails first.

    Where `pieces` fails, results of what was begun come before its error. Only a few pieces are
    taken ahead. Once closed, no work is running.
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
# The most uncompressed data in a frame.
MOST_BYTES = 4 << 20
# Sizes and offsets are multiples of the sector of block devices.
SECTOR_BYTES = 512
# A volume is smaller (LVM's limit, on a 64-bit kernel).
LARGEST_BYTES = 8 << 60

_PREFIX = struct.Struct("!8sHHI")
_FRAME = struct.Struct("!cBHIQQ16s")
_TOTALS = struct.Struct("!QQQ")
_MOST_HEADER_BYTES = 64 << 10
_DIGEST_BYTES = 32
# Of data: it finds damage; SHA-256 would be slower than a good disk.
digest_of = xxhash.xxh3_128_digest
_NO_DIGEST = bytes(16)
_CHAIN = re.compile(r"[0-9a-f]{64}")

# The types of a header's fields; all others are tables.
_KINDS: Mapping[Any, type] = {str: str, int: int}

DATA, ZEROES, END = b"D", b"Z", b"E"
RAW, ZSTD = 0, 1
# zstd's default: faster with a slow disk, little slower with a fast one.
_LEVEL = 3


@dataclass(frozen=True)
class Header:
    """A stream's first part. Sizes and offsets are in bytes, times in nanoseconds of the epoch.

    `chain` names exactly the contents of a volume after the stream was applied to one that had
    those of `base_chain`, which is empty for a whole volume. `offset_bytes` is where this stream
    begins, if a part was sent before. `release` is the SHA-256 of the word without which the volume
    must not be finished, or empty.
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
    """Data as in a frame."""

    encoding: int
    payload: Bytes
    digest: bytes


@dataclass(frozen=True)
class Frame:
    """A part of a volume: data, or zeroes. Its place is proved, its payload is not yet.

    `room` is the memory that the payload lies in, if it has room for the unpacked data.
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
        """The data to write, proved to be what was sent; raises BadStream. In `room`, if there."""
        if digest_of(self.payload) != self.digest:
            raise errors.BadStream(f"the data for byte {self.offset_bytes} were altered")
        if self.encoding == RAW:
            return self.payload
        # First, as the decompressor would allocate whatever size the data say.
        try:
            stated = zstandard.frame_content_size(self.payload)
            data = (
                zstandard.ZstdDecompressor().decompress(self.payload, allow_extra_data=False)
                if stated == self.length_bytes
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
    """The counts of a stream that its end mark has."""

    frames: int = 0
    data_bytes: int = 0
    zero_bytes: int = 0

    def add(self, length_bytes: int, *, is_zeroes: bool) -> None:
        """Count a frame."""
        self.frames += 1
        if is_zeroes:
            self.zero_bytes += length_bytes
        else:
            self.data_bytes += length_bytes

    def pack(self) -> bytes:
        """Encode for the end mark."""
        return _TOTALS.pack(self.frames, self.data_bytes, self.zero_bytes)


def chain_of(volume_id: str, snapshot_uuid: str, taken_nanoseconds: int, size_bytes: int) -> str:
    """Name exactly what a snapshot holds: LVM never uses a UUID again."""
    parts = ("carver snapshot 1", volume_id, snapshot_uuid, taken_nanoseconds, size_bytes)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def pack(data: Bytes, *, compress: bool) -> Packed:
    """Encode data for a frame, compressed where that is smaller."""
    if compress:
        smaller = zstandard.ZstdCompressor(_LEVEL).compress(data)
        if len(smaller) < len(data):
            return Packed(ZSTD, smaller, digest_of(smaller))
    return Packed(RAW, data, digest_of(data))


def text_of(header: Header) -> bytes:
    """Encode a header as JSON."""
    return json.dumps(asdict(header), sort_keys=True, separators=(",", ":")).encode()


def header_of(text: bytes | str) -> Header:
    """Decode a header, checked field by field; raises BadStream."""
    try:
        return _header(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise errors.BadStream(f"its header: {error}") from None


def opening(header: Header) -> tuple[bytes, bytes]:
    """A stream's first bytes, and the digest that its first frame continues."""
    body = text_of(header)
    if len(body) > _MOST_HEADER_BYTES:
        raise errors.BadStream(f"a header of {len(body)} bytes is too long")
    text = _PREFIX.pack(MAGIC, VERSION, 0, len(body)) + body
    proof = hashlib.sha256(text).digest()
    return text + proof, proof


def heading(
    proof: bytes, kind: bytes, offset_bytes: int, length_bytes: int, packed: Packed | None = None
) -> tuple[bytes, bytes]:
    """The bytes before a frame's payload, and the digest that the next frame continues."""
    encoding, payload, digest = packed or (RAW, b"", _NO_DIGEST)
    head = _FRAME.pack(kind, encoding, 0, len(payload), offset_bytes, length_bytes, digest)
    proof = hashlib.sha256(proof + head).digest()
    return head + proof, proof


PREFIX_BYTES = _PREFIX.size
HEADING_BYTES = _FRAME.size + _DIGEST_BYTES


def header_bytes(prefix: bytes) -> int:
    """The length of the rest of a header, digest included; raises BadStream."""
    magic, version, reserved, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise errors.BadStream("it does not begin as a stream of Carver's (docs/backup.md)")
    if version != VERSION:
        raise errors.BadStream(
            f"it is of version {version}; this Carver reads version {VERSION} only"
        )
    if reserved or not 0 < length <= _MOST_HEADER_BYTES:
        raise errors.BadStream("its header was altered")
    return int(length) + _DIGEST_BYTES


def header(prefix: bytes, rest: bytes) -> tuple[Header, bytes]:
    """Decode a header, and return the digest that frames continue; raises BadStream."""
    body, proof = rest[:-_DIGEST_BYTES], rest[-_DIGEST_BYTES:]
    if hashlib.sha256(prefix + body).digest() != proof:
        raise errors.BadStream("its header was altered")
    return header_of(body), proof


def parsed(proof: bytes, heading: bytes) -> tuple[bytes, Frame, int, bytes]:
    """Kind, frame without its payload, the payload's length, and the next digest.

    Proved to continue `proof`: no frame is left out, doubled or moved. Raises BadStream.
    """
    head, proved = heading[: _FRAME.size], heading[_FRAME.size :]
    proof = hashlib.sha256(proof + head).digest()
    if proved != proof:
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
        raise errors.BadStream("it has a frame of an unknown kind")
    return kind, frame, stored, proof


def _header(table: Any) -> Header:
    if not isinstance(table, dict):
        raise ValueError("is no JSON object")
    known = {one.name: one.type for one in fields(Header)}
    if table.keys() != known.keys():
        odd = ", ".join(sorted(map(str, table.keys() ^ known.keys())))
        raise ValueError(f"has unknown or missing fields: {odd}")
    for name, value in table.items():
        if type(value) is not _KINDS.get(known[name], dict):
            raise ValueError(f"{name} has the wrong type")
    facts = table["facts"]
    if not all(isinstance(value, str) for value in facts.values()):
        raise ValueError("facts must be strings")
    made = Header(**table)
    sizes = (made.size_bytes, made.base_size_bytes, made.offset_bytes)
    if any(not 0 <= one <= LARGEST_BYTES or one % SECTOR_BYTES for one in sizes):
        raise ValueError(f"sizes must be multiples of {SECTOR_BYTES} up to {LARGEST_BYTES}")
    if not made.size_bytes or max(sizes) > made.size_bytes or made.taken_nanoseconds < 0:
        raise ValueError("its sizes contradict each other")
    chains = filter(None, (made.base_chain, made.release))
    if not all(map(_CHAIN.fullmatch, (made.chain, *chains))) or made.chain == made.base_chain:
        raise ValueError("a chain must be a SHA-256 in hexadecimal, and not its base's")
    if bool(made.base_chain) is not bool(made.base_snapshot_id) or (
        made.is_whole and made.base_size_bytes
    ):
        raise ValueError("it has only a part of a base")
    return made
