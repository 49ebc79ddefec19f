"""The checksum of all that a device holds, which is the same wherever and however it lies there."""

import hashlib
from collections.abc import Callable

from agent.streams import pipeline, sending
from agent.streams.sending import PIECE_BYTES
from mount.blocks import Opened


def of(
    device: Opened, size_bytes: int, tell: Callable[[int], None] = lambda _offset_bytes: None
) -> str:
    """SHA-256 over offset and SHA-256 of each piece of 1 MiB that is not all zeroes.

    All of it is read, side by side. Raises OSError.
    """

    def digest(piece: tuple[int, memoryview]) -> tuple[int, bytes | None]:
        at, place = piece
        data = place[: min(PIECE_BYTES, size_bytes - at)]
        device.read_into(at, data)
        return at, None if sending.is_zeroes(data) else hashlib.sha256(data).digest()

    whole = hashlib.sha256(size_bytes.to_bytes(8, "big"))
    starts = range(0, size_bytes, PIECE_BYTES)
    for at, found in pipeline.ordered(digest, pipeline.lent(starts, PIECE_BYTES)):
        if found is not None:
            whole.update(at.to_bytes(8, "big") + found)
        tell(min(at + PIECE_BYTES, size_bytes))
    return whole.hexdigest()
