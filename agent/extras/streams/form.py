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

# Number of threads that read, hash, compress and write pieces of a stream in parallel, as all of
# these release Python's global lock. More threads than a disk and a few processors can use would
# only take memory, as each has a piece of up to MOST_BYTES.
WORKERS = min(4, os.cpu_count() or 1) + 1
# The most pieces that are submitted to the threads ahead of the one whose result is due.
_AHEAD = 2 * WORKERS


def with_memory(pieces: Iterable[A], most_bytes: int) -> Iterator[tuple[A, memoryview]]:
    """Pair each piece with a memory area of `most_bytes` that its worker may use.

    An area belongs to its piece until `ordered` has yielded the piece's result, and is then used
    for a later piece. Memory is reused because the kernel zeroes new memory page by page, which
    takes longer than a disk takes to fill it.
    """
    areas = rooms(most_bytes)
    for piece in pieces:
        yield piece, next(areas)


def rooms(most_bytes: int) -> Iterator[memoryview]:
    """Yield memory areas from a ring, without end.

    The ring is so long that `ordered` is done with an area's piece before the area comes again.
    """
    return cycle([memoryview(mmap.mmap(-1, most_bytes)) for _ in range(_AHEAD + 2)])


def ordered(work: Callable[[A], B], pieces: Iterable[A]) -> Iterator[B]:
    """Run `work` on pieces in parallel threads; yield the results in the pieces' order.

    Raises the first error in that order. Where the iterable `pieces` itself fails, the results of
    the pieces before come first, then its error. At most `_AHEAD` pieces are taken in advance. Once
    the generator is closed, no work is running.
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
# Version of the format that this module writes, and the only one that it reads.
VERSION = 1
# The most uncompressed data in a frame, in bytes.
MOST_BYTES = 4 << 20
# Unit of sizes and offsets, in bytes: the sector of block devices.
SECTOR_BYTES = 512
# The largest size of a volume, in bytes: LVM's limit, on a 64-bit kernel.
LARGEST_BYTES = 8 << 60

# First part of a header: MAGIC, version, zero, length of the JSON text that follows.
_PREFIX = struct.Struct("!8sHHI")
# Heading of a frame: kind, encoding, zero, length of the payload, offset and length in the volume,
# digest of the payload. A digest that chains the headings follows.
_FRAME = struct.Struct("!cBHIQQ16s")
# Payload of the end mark: the fields of `Totals`.
_TOTALS = struct.Struct("!QQQ")
# The most bytes of a header's JSON text.
_MOST_HEADER_BYTES = 64 << 10
# Length of the digests that chain header and frames, in bytes: of SHA-256.
_DIGEST_BYTES = 32
# Digest of a frame's payload, which finds damage. SHA-256 would be slower than a fast disk.
digest_of = xxhash.xxh3_128_digest
# Digest in the heading of a frame without a payload.
_NO_DIGEST = bytes(16)
# Pattern of a chain: a SHA-256 in hexadecimal.
_CHAIN = re.compile(r"[0-9a-f]{64}")

# The types of the fields of `Header`. Any other field is a table, as a `dict`.
_KINDS: Mapping[Any, type] = {str: str, int: int}

# Kinds of frames: data, a range of zeroes, the end mark.
DATA, ZEROES, END = b"D", b"Z", b"E"
# Encodings of a payload: as it is, and compressed by zstandard.
RAW, ZSTD = 0, 1
# Compression level: zstandard's default. With a slow disk, compressing is faster than sending the
# data as they are; with a fast disk, little slower.
_LEVEL = 3


@dataclass(frozen=True)
class Header:
    """The first part of a stream. Sizes are in bytes, times in nanoseconds since the epoch.

    A chain is a digest that names exactly what a snapshot holds (`chain_of`).

    - `chain` names what the volume holds after the stream was applied.
    - `base_chain` names what the volume must hold before. It is empty for a stream of a whole
      volume, which needs no base.
    - `offset_bytes` is where this stream begins, if an earlier one, which was cut off, was received
      up to this offset.
    - `release` is the SHA-256 of a word without which the receiving node must not finish the
      volume; empty if no word is needed.
    - `facts` has tags of the volume, such as its file system.
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
        """Return whether this is a stream of a whole volume, which needs no base."""
        return not self.base_chain


class Packed(NamedTuple):
    """The payload of a frame: encoding, encoded bytes, and their digest."""

    encoding: int
    payload: Bytes
    digest: bytes


@dataclass(frozen=True)
class Frame:
    """A part of a volume in a stream: data, or a range of zeroes.

    Offset and length have been verified by the digest in the heading; the payload is verified only
    by `data`. `room` is the memory area that the payload is in, if the area is also large enough
    for the decompressed data.
    """

    offset_bytes: int
    length_bytes: int
    encoding: int = RAW
    payload: Bytes = b""
    digest: bytes = _NO_DIGEST
    room: memoryview | None = None

    @property
    def end_bytes(self) -> int:
        """The offset in the volume of the first byte behind this frame."""
        return self.offset_bytes + self.length_bytes

    @property
    def is_zeroes(self) -> bool:
        """Return whether the frame is a range of zeroes."""
        return not self.payload

    def data(self) -> Bytes:
        """Verify and decompress the data of this frame; return them.

        The data are in `room`, if that is set. Raises BadStream where they are not what was sent.
        """
        if digest_of(self.payload) != self.digest:
            raise errors.BadStream(f"the data for byte {self.offset_bytes} were altered")
        if self.encoding == RAW:
            return self.payload
        # The stated size is checked first: the decompressor would allocate any size stated.
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
    """The counts in a stream's end mark: frames, bytes of data, bytes of zeroes."""

    frames: int = 0
    data_bytes: int = 0
    zero_bytes: int = 0

    def add(self, length_bytes: int, *, is_zeroes: bool) -> None:
        """Count one frame."""
        self.frames += 1
        if is_zeroes:
            self.zero_bytes += length_bytes
        else:
            self.data_bytes += length_bytes

    def pack(self) -> bytes:
        """Encode the counts as the end mark's payload."""
        return _TOTALS.pack(self.frames, self.data_bytes, self.zero_bytes)


def chain_of(volume_id: str, snapshot_uuid: str, taken_nanoseconds: int, size_bytes: int) -> str:
    """Return the chain of a snapshot: a digest that names exactly what the snapshot holds.

    The chain is made from LVM's UUID of the snapshot, which LVM never uses again.
    """
    parts = ("carver snapshot 1", volume_id, snapshot_uuid, taken_nanoseconds, size_bytes)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def pack(data: Bytes, *, compress: bool) -> Packed:
    """Encode data as a frame's payload, compressed if asked for and if that is smaller."""
    if compress:
        compressed = zstandard.ZstdCompressor(_LEVEL).compress(data)
        if len(compressed) < len(data):
            return Packed(ZSTD, compressed, digest_of(compressed))
    return Packed(RAW, data, digest_of(data))


def text_of(header: Header) -> bytes:
    """Encode a header as JSON."""
    return json.dumps(asdict(header), sort_keys=True, separators=(",", ":")).encode()


def header_of(text: bytes | str) -> Header:
    """Decode a header from JSON, and check each field; raises BadStream."""
    try:
        return _header(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise errors.BadStream(f"its header: {error}") from None


def opening(header: Header) -> tuple[bytes, bytes]:
    """Encode a header; return a stream's first bytes, and the digest to chain the first frame to.

    Raises BadStream if the header is too long.
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
    """Encode a frame's heading; return the heading and the digest the next frame chains to.

    `proof` is the digest that the frame before returned. The payload follows the heading.
    """
    encoding, payload, digest = packed or (RAW, b"", _NO_DIGEST)
    head = _FRAME.pack(kind, encoding, 0, len(payload), offset_bytes, length_bytes, digest)
    proof = hashlib.sha256(proof + head).digest()
    return head + proof, proof


# Length of the first part of a header, in bytes.
PREFIX_BYTES = _PREFIX.size
# Length of a frame's heading with its digest, in bytes.
HEADING_BYTES = _FRAME.size + _DIGEST_BYTES


def header_bytes(prefix: bytes) -> int:
    """Return the length of the rest of a header, digest included, in bytes; raises BadStream.

    `prefix` has the stream's first PREFIX_BYTES.
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
    """Decode a header; return the header and the digest that the first frame chains to.

    Raises BadStream.
    """
    body, proof = rest[:-_DIGEST_BYTES], rest[-_DIGEST_BYTES:]
    if hashlib.sha256(prefix + body).digest() != proof:
        raise errors.BadStream("its header was altered")
    return header_of(body), proof


def parsed(proof: bytes, heading: bytes) -> tuple[bytes, Frame, int, bytes]:
    """Decode a frame's heading.

    Returns the frame's kind, the frame without its payload, the length of the payload in bytes, and
    the digest that the next frame chains to. The heading is verified to follow the digest `proof`,
    so no frame before it was left out, doubled or moved. Raises BadStream.
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
