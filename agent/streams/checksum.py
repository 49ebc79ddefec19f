"""The checksum of what a device holds, which is the same wherever and however it lies there."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from agent.delta.extents import Extent, clipped, merged
from agent.streams import pipeline, sending
from agent.streams.form import Header
from agent.streams.sending import PIECE_BYTES, READ_BYTES
from mount.blocks import Opened


def of(
    device: Opened, size_bytes: int, tell: Callable[[int], None] = lambda _offset_bytes: None
) -> str:
    """SHA-256 over offset and SHA-256 of each piece of 1 MiB that is not all zeroes.

    All of it is read, side by side. Raises OSError.
    """
    whole = hashlib.sha256(size_bytes.to_bytes(8, "big"))
    for read, found in _digests(device, sending.pieces(0, size_bytes, READ_BYTES)):
        whole.update(found)
        tell(read.end_bytes)
    return whole.hexdigest()


def of_parts(device: Opened, header: Header, parts: Iterable[Extent]) -> str:
    """The same of the parts that a stream names, in their order, and of all behind its base's end.

    Two volumes that held the same before it, and of which nothing else was changed, hold the same
    after it where these are equal. Raises OSError.
    """
    base_bytes, size_bytes = header.base_size_bytes, header.size_bytes
    behind = Extent(base_bytes, size_bytes - base_bytes)
    every = chain(clipped(merged(parts), 0, base_bytes), [behind])
    pieces = (sending.pieces(one.offset_bytes, one.end_bytes, READ_BYTES) for one in every)
    whole = hashlib.sha256(f"{header.base_chain} {header.chain} {size_bytes}".encode())
    for read, found in _digests(device, chain.from_iterable(pieces)):
        # Also of what holds zeroes: that it is one of the parts.
        whole.update(read.offset_bytes.to_bytes(8, "big") + read.length_bytes.to_bytes(8, "big"))
        whole.update(found)
    return whole.hexdigest()


def _digests(device: Opened, reads: Iterable[Extent]) -> Iterator[tuple[Extent, bytes]]:
    """What was read, and offset and digest of each piece of it that is not all zeroes."""

    def digests(given: tuple[Extent, memoryview]) -> tuple[Extent, bytes]:
        extent, place = given
        begun, found = extent.offset_bytes, b""
        device.read_into(begun, place[: extent.length_bytes])
        for one in sending.pieces(begun, extent.end_bytes, PIECE_BYTES):
            data = place[one.offset_bytes - begun : one.end_bytes - begun]
            if not sending.is_zeroes(data):
                found += one.offset_bytes.to_bytes(8, "big") + hashlib.sha256(data).digest()
        return extent, found

    return pipeline.ordered(digests, pipeline.lent(reads, READ_BYTES))
