"""The checksum of all that a device holds, which is the same wherever and however it lies there."""

import hashlib
from collections.abc import Callable, Iterator

from agent.streams import pipeline
from agent.streams.sending import PIECE_BYTES
from mount.blocks import Opened

_ZEROES = bytes(PIECE_BYTES)


def of(
    device: Opened, size_bytes: int, tell: Callable[[int], None] = lambda _offset_bytes: None
) -> str:
    """SHA-256 over offset and SHA-256 of each piece of 1 MiB that is not all zeroes.

    All of it is read, side by side. Raises OSError.
    """

    def digest(at: int) -> tuple[int, bytes | None]:
        length = min(PIECE_BYTES, size_bytes - at)
        data = device.read(at, length)
        device.forget(at, length)
        if data == _ZEROES[:length]:
            return at, None
        return at, hashlib.sha256(data).digest()

    whole = hashlib.sha256(size_bytes.to_bytes(8, "big"))
    for at, found in pipeline.ordered(digest, _starts(size_bytes)):
        if found is not None:
            whole.update(at.to_bytes(8, "big") + found)
        tell(min(at + PIECE_BYTES, size_bytes))
    return whole.hexdigest()


def _starts(size_bytes: int) -> Iterator[int]:
    yield from range(0, size_bytes, PIECE_BYTES)
