"""Keys of encrypted volumes: never shown, and each in one buffer that is overwritten after use.

What gRPC, protobuf and Python make of a request that has a key is freed and not overwritten.
docs/security.md says what that means.
"""

import contextlib
import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass

from agent.core import errors

# Keys of a secret: the passphrase, the one before it, and a name for the first, which is kept in
# the clear.
PASSPHRASE, PREVIOUS_PASSPHRASE = "passphrase", "previousPassphrase"
GENERATION = "passphraseGeneration"
# The most that CSI and cryptsetup accept, in bytes.
MOST_BYTES = 2048
# Never on a disk: without it a digest of a key says nothing.
_SALT = os.urandom(32)


class Key:
    """A key's bytes, until `wipe`. It is never printed, compared or copied."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | bytearray) -> None:
        """A bytearray is not copied: it belongs to the key from now on."""
        self.data = data if isinstance(data, bytearray) else bytearray(data)

    def __repr__(self) -> str:
        return "Key(***)"

    def __bool__(self) -> bool:
        return bool(self.data)

    def wipe(self) -> None:
        """Overwrite the key in place; a program past its deadline may still be reading it."""
        self.data[:] = bytes(len(self.data))


@dataclass(frozen=True)
class Keys:
    """A volume's key and the one before it; None for one that the caller did not send."""

    present: Key | None = None
    previous: Key | None = None
    # The present key's name, kept in the clear.
    generation: str = ""

    def digests(self) -> tuple[object, ...]:
        """Salted digests to compare keys by; of no use outside this process."""
        both = (self.present, self.previous)
        digests = (one and hmac.digest(_SALT, one.data, "sha256") for one in both)
        return (*digests, self.generation)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Overwrite the keys when the block ends, also by an exception."""
        try:
            yield
        finally:
            for key in (self.present, self.previous):
                if key is not None:
                    key.wipe()


NONE = Keys()


def of_text(field: str, text: str) -> Key:
    """Make a key of a text. Raises BadField."""
    data = text.encode()
    if not 0 < len(data) <= MOST_BYTES:
        raise errors.BadField(field, f"must have 1 to {MOST_BYTES} bytes")
    return Key(data)


@contextlib.contextmanager
def in_file(content: bytes) -> Iterator[str]:
    """Make a file in memory, by its path: ssl takes a certificate's key from files only."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
