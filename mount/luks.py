"""LUKS2 headers as they are on a device; and the zeroed ends of an encrypted device."""

import hashlib
import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mount import errors
from mount.blocks import Opened
from mount.kernel import Kernel

# The size that cryptsetup gives a header by default, and so with Carver: 16 KiB each.
METADATA_BYTES = 16 << 10
_BINARY = struct.Struct(">6s H Q Q 48s 32s 64s 40s 48s Q 184s 64s")
_BINARY_BYTES = 4096
_CHECKSUM_AT, _CHECKSUM_BYTES = 448, 64
_MAGICS = (b"LUKS\xba\xbe", b"SKUL\xba\xbe")
_VERSION = 2
# How often to read again, and after how long, where there are copies and none is whole.
_LOOKS, _LOOK_SECONDS = 10, 0.02
# The kind of area by which a re-encryption that is not done protects what it is at; and the flag
# of the segment that it is at, which is there afterwards only if it was killed.
_REENCRYPTION, _TORN = "reencrypt", "in-reencryption"
# The flags of segments that lie nowhere: as all of it was before, and as it will be.
_NOWHERE = "backup-"


@dataclass(frozen=True)
class Header:
    """A whole header. Sizes are in bytes.

    `slots` are the key slots of the data, `unbound` those of a master key without data: a new one's
    when cryptsetup was killed.
    """

    uuid: str
    slots: tuple[int, ...]
    unbound: tuple[int, ...]
    offset_bytes: int
    cipher: str
    sector_bytes: int
    key_derivation: tuple[str, ...] = ()
    # Of one that is being re-encrypted: that it is; how much of the data has the new master key;
    # that cryptsetup was killed in the midst of a piece, which is to be recovered first.
    is_reencrypting: bool = False
    renewed_bytes: int = 0
    is_torn: bool = False
    # A digest of how ciphertext and plaintext belong together: the segments, and the digests of
    # their master key, which cryptsetup makes anew for each key. Keys that open it are no part.
    reading: str = ""


def read(kernel: Kernel, device: str) -> Header | None:
    """The header on a device, by either of its copies; None where neither is whole.

    cryptsetup writes one copy after the other, often during a re-encryption, so a reader may find
    each half written. It reads again: damage stays, and a write ends. Raises OSError.
    """
    for look in range(_LOOKS):
        if look:
            time.sleep(_LOOK_SECONDS)
        found = (_copy(kernel, device, number) for number in range(len(_MAGICS)))
        every = [one for one in found if one is not None]
        if every:
            return max(every, key=lambda one: one[0])[1]
        if not bears_any(kernel, device):
            break
    return None


def bears_any(kernel: Kernel, device: str) -> bool:
    """Whether a copy of a header is there, be it whole or not."""
    starts = (kernel.read(device, at * METADATA_BYTES, 6) for at in range(len(_MAGICS)))
    return any(start in _MAGICS for start in starts)


def _copy(kernel: Kernel, device: str, number: int) -> tuple[int, Header] | None:
    data = kernel.read(device, number * METADATA_BYTES, METADATA_BYTES)
    magic, version, size, sequence, _, kind, _, uuid, *_ = _BINARY.unpack_from(data)
    if (magic, version, size) != (_MAGICS[number], _VERSION, METADATA_BYTES):
        return None
    try:
        if digest(data, _text(kind)) != data[_CHECKSUM_AT:][:_CHECKSUM_BYTES]:
            return None
        metadata = json.loads(_text(data[_BINARY_BYTES:]))
        return sequence, _header(_text(uuid), metadata)
    except (ValueError, KeyError, TypeError):
        return None


def digest(data: bytes, kind: str) -> bytes:
    """The checksum of a copy: of all of it, with zeroes where the checksum stands."""
    blank = bytearray(data)
    blank[_CHECKSUM_AT : _CHECKSUM_AT + _CHECKSUM_BYTES] = bytes(_CHECKSUM_BYTES)
    return hashlib.new(kind, blank).digest().ljust(_CHECKSUM_BYTES, b"\0")


def _header(uuid: str, metadata: Mapping[str, Any]) -> Header:
    data = [one for _, one in _numbered(metadata["segments"]) if _is_data(one)]
    first = min(data, key=lambda one: int(one["offset"]))
    areas = dict(_numbered(metadata["keyslots"]))
    slots = {number: one for number, one in areas.items() if one["type"] == "luks2"}
    of_data = [one["keyslots"] for one in metadata["digests"].values() if one["segments"]]
    bound = {int(number) for every in of_data for number in every} & slots.keys()
    is_reencrypting = any(one["type"] == _REENCRYPTION for one in areas.values())
    # From the first byte on; before it begins, one segment reaches to the end.
    is_begun = is_reencrypting and first["size"] != "dynamic" and not _flags(first)
    return Header(
        uuid,
        tuple(sorted(bound)),
        tuple(sorted(slots.keys() - bound)),
        int(first["offset"]),
        str(first["encryption"]),
        int(first["sector_size"]),
        tuple(sorted({str(one["kdf"]["type"]) for one in slots.values()})),
        is_reencrypting,
        int(first["size"]) if is_begun else 0,
        any(_TORN in _flags(one) for one in data),
        _reading(data, [one for one in metadata["digests"].values() if one["segments"]]),
    )


def _reading(segments: Sequence[Mapping[str, Any]], digests: Sequence[Mapping[str, Any]]) -> str:
    """The digest of what a reader goes by; which slots have the master key is none of it."""
    keys = [{name: one[name] for name in one if name != "keyslots"} for one in digests]
    return hashlib.sha256(json.dumps([segments, keys], sort_keys=True).encode()).hexdigest()


def _is_data(segment: Mapping[str, Any]) -> bool:
    nowhere = any(one.startswith(_NOWHERE) for one in _flags(segment))
    return segment["type"] == "crypt" and not nowhere


def _flags(segment: Mapping[str, Any]) -> Sequence[str]:
    return list(segment.get("flags", ()))


def _numbered(metadata: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    return ((int(number), one) for number, one in metadata.items())


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode()


# Signatures of few bytes stand within 64 KiB of either end (libblkid/src/superblocks).
_END_BYTES = 256 << 10
_BLOCK_BYTES = 4096
_ZEROES = bytes(_BLOCK_BYTES)


def erase(kernel: Kernel, device: str, offset_bytes: int) -> None:
    """Zero the ends of the data area of a device that has no header yet.

    Making the header flushes them. Raises ProbeFailed.
    """
    with _probing(device):
        size_bytes = kernel.device_size_bytes(device) - offset_bytes
        with kernel.opened(device, to_write=True) as below:
            for start, length_bytes in _runs(below, offset_bytes, size_bytes, blank=False):
                below.zero_out(offset_bytes + start, length_bytes)


def blank(kernel: Kernel, device: str, offset_bytes: int, mapping: str) -> None:
    """Zero the ends of an encrypted device (`mapping`) where its ciphertext is all zeroes.

    What was written stays. Raises ProbeFailed.
    """
    with _probing(mapping):
        size_bytes = kernel.device_size_bytes(mapping)
        with kernel.opened(device) as below, kernel.opened(mapping, to_write=True) as inside:
            for start, length_bytes in _runs(below, offset_bytes, size_bytes, blank=True):
                inside.zero_out(start, length_bytes)
            inside.flush()


def _runs(
    below: Opened, offset_bytes: int, size_bytes: int, *, blank: bool
) -> Iterator[tuple[int, int]]:
    """The blocks at both ends that are all zeroes, or that are not: starts and lengths."""
    whole = size_bytes // _BLOCK_BYTES * _BLOCK_BYTES
    first = min(_END_BYTES, whole)
    last = max(first, whole - _END_BYTES)
    for begin, length_bytes in ((0, first), (last, whole - last)):
        start = begin
        # Past the page cache, which may have what was there before.
        data = below.read(offset_bytes + begin, length_bytes) if length_bytes else b""
        blocks = [data[at : at + _BLOCK_BYTES] for at in range(0, length_bytes, _BLOCK_BYTES)]
        for is_blank, run in groupby(blocks, _ZEROES.__eq__):
            run_bytes = len(list(run)) * _BLOCK_BYTES
            if is_blank == blank:
                yield start, run_bytes
            start += run_bytes


@contextmanager
def _probing(device: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise errors.ProbeFailed(device, str(error.strerror)) from error
