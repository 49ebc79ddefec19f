"""Keys of encrypted volumes: never printed, and each in one buffer that is overwritten after use.

Copies of a key that gRPC, protobuf and Python make while they read a request are freed, but not
overwritten. docs/security.md describes the consequences.
"""

import contextlib
import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass

from agent.core import errors

# Names of entries in a CSI call's secrets: the passphrase, and the previous passphrase.
PASSPHRASE, PREVIOUS_PASSPHRASE = "passphrase", "previousPassphrase"
# Name of the entry in a CSI call's secrets that gives the passphrase a name. That name is stored
# unencrypted.
GENERATION = "passphraseGeneration"
# Maximum size of a passphrase, in bytes, that CSI and cryptsetup accept.
MOST_BYTES = 2048
# Random salt for digests of keys. The salt is never written to a disk, and without the salt nothing
# can be learned from a digest.
_SALT = os.urandom(32)


class Key:
    """The bytes of a key, which `wipe` overwrites; a key is never printed, compared or copied."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | bytearray) -> None:
        """Keep `data`; a bytearray is not copied, and belongs to the key from now on."""
        self.data = data if isinstance(data, bytearray) else bytearray(data)

    def __repr__(self) -> str:
        return "Key(***)"

    def __bool__(self) -> bool:
        return bool(self.data)

    def wipe(self) -> None:
        """Overwrite the key in place; a program past its deadline may still be reading the key."""
        self.data[:] = bytes(len(self.data))


@dataclass(frozen=True)
class Keys:
    """The present and the previous key of a volume; None for a key that the caller did not send."""

    present: Key | None = None
    previous: Key | None = None
    # Name of the volume's present key; the name is stored unencrypted.
    generation: str = ""

    def digests(self) -> tuple[object, ...]:
        """Salted digests of the keys and the present key's name, for comparison in this process."""
        keys = (self.present, self.previous)
        digests = (key and hmac.digest(_SALT, key.data, "sha256") for key in keys)
        return (*digests, self.generation)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Overwrite the keys at the end of the `with`, also after an exception."""
        try:
            yield
        finally:
            for key in (self.present, self.previous):
                if key is not None:
                    key.wipe()


# Record of the keys of a call that has no keys.
NONE = Keys()


def of_text(field: str, text: str) -> Key:
    """Return the key for a text, encoded as UTF-8; raises BadField for a bad length."""
    data = text.encode()
    if not 0 < len(data) <= MOST_BYTES:
        raise errors.BadField(field, f"must have 1 to {MOST_BYTES} bytes")
    return Key(data)


@contextlib.contextmanager
def in_file(content: bytes) -> Iterator[str]:
    """Write `content` to a file in memory, and yield the file's path.

    Python's ssl reads a certificate and its key only from files.
    """
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
