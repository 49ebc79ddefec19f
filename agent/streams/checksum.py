"""The checksum of all that a device holds, which is the same wherever and however it lies there."""

import hashlib
from collections.abc import Callable

from agent.delta.extents import Extent
from agent.streams import pipeline, sending
from agent.streams.sending import PIECE_BYTES, READ_BYTES
from mount.blocks import Opened


def of(
    device: Opened, size_bytes: int, tell: Callable[[int], None] = lambda _offset_bytes: None
) -> str:
    """SHA-256 over offset and SHA-256 of each piece of 1 MiB that is not all zeroes.

    All of it is read, side by side. Raises OSError.
    """

    def digests(read: tuple[Extent, memoryview]) -> tuple[int, bytes]:
        extent, place = read
        begun, found = extent.offset_bytes, b""
        device.read_into(begun, place[: extent.length_bytes])
        for one in sending.pieces(begun, extent.end_bytes, PIECE_BYTES):
            data = place[one.offset_bytes - begun : one.end_bytes - begun]
            if not sending.is_zeroes(data):
                found += one.offset_bytes.to_bytes(8, "big") + hashlib.sha256(data).digest()
        return extent.end_bytes, found

    whole = hashlib.sha256(size_bytes.to_bytes(8, "big"))
    reads = sending.pieces(0, size_bytes, READ_BYTES)
    for end, found in pipeline.ordered(digests, pipeline.lent(reads, READ_BYTES)):
        whole.update(found)
        tell(end)
    return whole.hexdigest()
