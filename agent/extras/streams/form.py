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

# Number of threads that read, hash, compress and write the pieces of a stream in parallel. All of
# these release Python's global lock. More threads than a disk and a few processors can use would
# only take memory, because each thread has a piece of up to MOST_BYTES.
WORKERS = min(4, os.cpu_count() or 1) + 1
# Maximum number of pieces of a stream that are submitted to the threads before the result of the
# first one has been yielded.
_AHEAD = 2 * WORKERS


def with_memory(pieces: Iterable[A], most_bytes: int) -> Iterator[tuple[A, memoryview]]:
    """Pair each piece with a memory area of `most_bytes`, for the thread that works on the piece.

    An area belongs to its piece until `ordered` has yielded the piece's result. The area is then
    used again for a later piece. Memory is reused because the kernel zeroes new memory page by
    page, which takes longer than a disk takes to fill the memory.
    """
    areas = rooms(most_bytes)
    for piece in pieces:
        yield piece, next(areas)


def rooms(most_bytes: int) -> Iterator[memoryview]:
    """Yield memory areas of `most_bytes` without end, from a ring of areas.

    The ring is so long that `ordered` has yielded the result of an area's piece before the area is
    yielded again.
    """
    return cycle([memoryview(mmap.mmap(-1, most_bytes)) for _ in range(_AHEAD + 2)])


def ordered(work: Callable[[A], B], pieces: Iterable[A]) -> Iterator[B]:
    """Run `work` on pieces in parallel threads; yield the results in the order of the pieces.

    If `work` fails for several pieces, the error of the first of these pieces is raised. If the
    iterable `pieces` itself raises an error, the results of the earlier pieces are yielded before
    that error is raised. At most `_AHEAD` pieces are taken in advance. Once the generator is
    closed, no thread runs `work` any more.
    """
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="stream") as pool:
        futures: deque[Future[B]] = deque()
        try:
            remaining, problem = iter(pieces), None
            while problem is None:
                try:
                    piece = next(remaining)
                except StopIteration:
                    break
                except Exception as error:
                    problem = error
                else:
                    futures.append(pool.submit(work, piece))
                    if len(futures) >= _AHEAD:
                        yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
            if problem is not None:
                raise problem
        finally:
            for future in futures:
                future.cancel()


# First bytes of each stream.
MAGIC = b"\x89CARVER\n"
# Version of the stream format that this module writes, and the only one that it reads.
VERSION = 1
# Maximum length of the uncompressed data in a frame of a stream, in bytes.
MOST_BYTES = 4 << 20
# Unit of the sizes and offsets in a stream, in bytes: the sector of block devices.
SECTOR_BYTES = 512
# Maximum size of a volume in a stream, in bytes: LVM's limit on a 64-bit kernel.
LARGEST_BYTES = 8 << 60

# Encoding of the first part of a stream's header: MAGIC, version, zero, and the length of the JSON
# text that follows.
_PREFIX = struct.Struct("!8sHHI")
# Encoding of a frame's heading: kind, encoding, zero, length of the payload, offset and length in
# the volume, and digest of the payload. A digest that chains the headings follows.
_FRAME = struct.Struct("!cBHIQQ16s")
# Encoding of the payload of a stream's end mark: the fields of `Totals`.
_TOTALS = struct.Struct("!QQQ")
# Maximum length of the JSON text in a stream's header, in bytes.
_MOST_HEADER_BYTES = 64 << 10
# Length of the digests that chain the header and the frames of a stream, in bytes: the length of a
# SHA-256.
_DIGEST_BYTES = 32
# Function that computes the digest of a frame's payload, by which damage is found. SHA-256 would be
# slower than a fast disk.
digest_of = xxhash.xxh3_128_digest
# Digest in the heading of a frame without a payload.
_NO_DIGEST = bytes(16)
# Pattern of a chain digest: a SHA-256 in hexadecimal.
_CHAIN = re.compile(r"[0-9a-f]{64}")

# Python types of the JSON values of a stream's header, by the types of the fields of `Header`. The
# value of a field of any other type is a `dict`.
_KINDS: Mapping[Any, type] = {str: str, int: int}

# Kinds of frames in a stream: data, a range of zeroes, the end mark.
DATA, ZEROES, END = b"D", b"Z", b"E"
# Encodings of a frame's payload: uncompressed, and compressed by zstandard.
RAW, ZSTD = 0, 1
# Compression level of payloads: zstandard's default. A stream from a slow disk is sent faster if it
# is compressed. A stream from a fast disk is sent only a little slower than without compression.
_LEVEL = 3


@dataclass(frozen=True)
class Header:
    """The header of a stream. Sizes are in bytes, times in nanoseconds since the epoch.

    A chain is a digest that names exactly what a snapshot holds (`chain_of`).

    - `chain` names what the volume holds after the stream was applied.
    - `base_chain` names what the volume must hold before the stream is applied. It is empty for a
      stream of a whole volume, which needs no base.
    - `offset_bytes` is the offset in the volume where this stream begins. It is not 0 if this
      stream continues an earlier one, which was cut off and was received up to this offset.
    - `release` is the SHA-256 of a secret word. The receiving node must not finish the volume
      without that word. Empty if no word is needed.
    - `facts` has tags of the volume, such as its file system, and the largest logical block size
      that the contents can lie on.
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
        """Return whether this is the header of a stream of a whole volume, which needs no base."""
        return not self.base_chain


class Packed(NamedTuple):
    """The payload of a frame: its encoding, the encoded bytes, and the digest of these bytes."""

    encoding: int
    payload: Bytes
    digest: bytes


@dataclass(frozen=True)
class Frame:
    """A part of a volume in a stream: data, or a range of zeroes; also the end mark of a stream.

    Offset and length have been verified by the digest in the frame's heading. The payload is
    verified only by `data`. `room` is the memory area that has the payload, if the area is also
    large enough for the decompressed data; None otherwise.
    """

    offset_bytes: int
    length_bytes: int
    encoding: int = RAW
    payload: Bytes = b""
    digest: bytes = _NO_DIGEST
    room: memoryview | None = None

    @property
    def end_bytes(self) -> int:
        """The offset in the volume of the first byte behind this frame, in bytes."""
        return self.offset_bytes + self.length_bytes

    @property
    def is_zeroes(self) -> bool:
        """Return whether the frame is a range of zeroes."""
        return not self.payload

    def data(self) -> Bytes:
        """Verify the payload of this frame, decompress it if need be, and return the data.

        The data are in the memory area `room`, if that is not None. Raises BadStream if the data
        are not those that were sent.
        """
        if digest_of(self.payload) != self.digest:
            raise errors.BadStream(f"the data for byte {self.offset_bytes} were altered")
        if self.encoding == RAW:
            return self.payload
        # Compare the size that the compressed payload states with the frame's length first, because
        # the decompressor would allocate any size that is stated.
        try:
            stated_bytes = zstandard.frame_content_size(self.payload)
            data = (
                zstandard.ZstdDecompressor().decompress(self.payload, allow_extra_data=False)
                if stated_bytes == self.length_bytes
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
    """The counts in the end mark of a stream: frames, bytes of data, bytes of zeroes."""

    frames: int = 0
    data_bytes: int = 0
    zero_bytes: int = 0

    def add(self, length_bytes: int, *, is_zeroes: bool) -> None:
        """Count one frame with `length_bytes` bytes of data, or of zeroes."""
        self.frames += 1
        if is_zeroes:
            self.zero_bytes += length_bytes
        else:
            self.data_bytes += length_bytes

    def pack(self) -> bytes:
        """Encode the counts as the payload of a stream's end mark."""
        return _TOTALS.pack(self.frames, self.data_bytes, self.zero_bytes)


def chain_of(volume_id: str, snapshot_uuid: str, taken_nanoseconds: int, size_bytes: int) -> str:
    """Return the chain of a snapshot: a digest that names exactly what the snapshot holds.

    The digest is made from LVM's UUID of the snapshot, among others. LVM never uses a UUID again.
    """
    parts = ("carver snapshot 1", volume_id, snapshot_uuid, taken_nanoseconds, size_bytes)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def pack(data: Bytes, *, compress: bool) -> Packed:
    """Encode data as a frame's payload; with `compress`, compress the data if that is smaller."""
    if compress:
        compressed = zstandard.ZstdCompressor(_LEVEL).compress(data)
        if len(compressed) < len(data):
            return Packed(ZSTD, compressed, digest_of(compressed))
    return Packed(RAW, data, digest_of(data))


def text_of(header: Header) -> bytes:
    """Encode the header of a stream as JSON."""
    return json.dumps(asdict(header), sort_keys=True, separators=(",", ":")).encode()


def header_of(text: bytes | str) -> Header:
    """Decode the header of a stream from JSON, and check each field.

    Raises BadStream if the text is not JSON, or if a field is missing, unknown or wrong.
    """
    try:
        return _header(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise errors.BadStream(f"its header: {error}") from None


def opening(header: Header) -> tuple[bytes, bytes]:
    """Encode a stream's header; return the stream's first bytes, and the digest of the header.

    The heading of the first frame is chained to that digest. Raises BadStream if the header is too
    long.
    """
    body = text_of(header)
    if len(body) > _MOST_HEADER_BYTES:
        raise errors.BadStream(f"a header of {len(body)} bytes is too long")
    text = _PREFIX.pack(MAGIC, VERSION, 0, len(body)) + body
    proof = hashlib.sha256(text).digest()
    return text + proof, proof


def heading(
    proof: bytes, kind: bytes, offset_bytes: int, length_bytes: int, packed: Packed | None = None
) -> tuple[bytes, bytes]:
    """Encode a frame's heading; return the heading, and the digest at its end.

    `proof` is the digest that was returned for the frame before, or for the header. The next frame
    is chained to the digest that is returned. The caller writes the payload of `packed` after the
    heading; a frame of zeroes has none.
    """
    encoding, payload, digest = packed or (RAW, b"", _NO_DIGEST)
    head = _FRAME.pack(kind, encoding, 0, len(payload), offset_bytes, length_bytes, digest)
    proof = hashlib.sha256(proof + head).digest()
    return head + proof, proof


# Length of the first part of a stream's header, in bytes.
PREFIX_BYTES = _PREFIX.size
# Length of a frame's heading with its digest, in bytes.
HEADING_BYTES = _FRAME.size + _DIGEST_BYTES


def header_bytes(prefix: bytes) -> int:
    """Return the length of the rest of a stream's header, digest included, in bytes.

    `prefix` has the first PREFIX_BYTES of the stream. Raises BadStream if these are not the first
    bytes of a stream of the version that this module reads.
    """
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
    """Decode a stream's header; return the header, and the digest that is stored behind it.

    The heading of the first frame is chained to that digest. Raises BadStream if the header was
    altered, or if a field of the header is wrong.
    """
    body, proof = rest[:-_DIGEST_BYTES], rest[-_DIGEST_BYTES:]
    if hashlib.sha256(prefix + body).digest() != proof:
        raise errors.BadStream("its header was altered")
    return header_of(body), proof


def parsed(proof: bytes, heading: bytes) -> tuple[bytes, Frame, int, bytes]:
    """Decode and verify a frame's heading.

    Returns the frame's kind, the frame without its payload, the length of the payload in bytes, and
    the digest that the next frame is chained to. The heading must be chained to the digest `proof`
    of the frame before. So no earlier frame was left out, doubled or moved. Raises BadStream if the
    heading is not chained to `proof`, or if a field of the heading is wrong.
    """
    head, stated_proof = heading[: _FRAME.size], heading[_FRAME.size :]
    proof = hashlib.sha256(proof + head).digest()
    if stated_proof != proof:
        raise errors.BadStream("a part of it was altered, moved or left out")
    kind, encoding, reserved, payload_bytes, offset, length, digest = _FRAME.unpack(head)
    frame = Frame(offset, length, encoding, b"", digest)
    is_sound = {
        DATA: 0 < payload_bytes <= MOST_BYTES
        and 0 < length <= MOST_BYTES
        and (
            payload_bytes == length
            if encoding == RAW
            else encoding == ZSTD and payload_bytes < length
        ),
        ZEROES: not payload_bytes and length > 0 and encoding == RAW and digest == _NO_DIGEST,
        END: payload_bytes == _TOTALS.size and not length and encoding == RAW,
    }
    if reserved or (offset | length) % SECTOR_BYTES or not is_sound.get(kind, False):
        raise errors.BadStream("it has a frame of an unknown kind")
    return kind, frame, payload_bytes, proof


def _header(table: Any) -> Header:
    if not isinstance(table, dict):
        raise ValueError("is no JSON object")
    types = {field.name: field.type for field in fields(Header)}
    if table.keys() != types.keys():
        odd_names = ", ".join(sorted(map(str, table.keys() ^ types.keys())))
        raise ValueError(f"has unknown or missing fields: {odd_names}")
    for name, value in table.items():
        if type(value) is not _KINDS.get(types[name], dict):
            raise ValueError(f"{name} has the wrong type")
    facts = table["facts"]
    if not all(isinstance(value, str) for value in facts.values()):
        raise ValueError("facts must be strings")
    header = Header(**table)
    sizes = (header.size_bytes, header.base_size_bytes, header.offset_bytes)
    if any(not 0 <= size <= LARGEST_BYTES or size % SECTOR_BYTES for size in sizes):
        raise ValueError(f"sizes must be multiples of {SECTOR_BYTES} up to {LARGEST_BYTES}")
    if not header.size_bytes or max(sizes) > header.size_bytes or header.taken_nanoseconds < 0:
        raise ValueError("its sizes contradict each other")
    chains = filter(None, (header.base_chain, header.release))
    if not all(map(_CHAIN.fullmatch, (header.chain, *chains))) or header.chain == header.base_chain:
        raise ValueError("a chain must be a SHA-256 in hexadecimal, and not its base's")
    if bool(header.base_chain) is not bool(header.base_snapshot_id) or (
        header.is_whole and header.base_size_bytes
    ):
        raise ValueError("it has only a part of a base")
    return header
