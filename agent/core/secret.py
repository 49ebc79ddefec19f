"""Keys of encrypted volumes in this process's memory: few copies, which are overwritten.

Python copies what it is told, and leaves what it frees as it was. So a key is kept in one buffer
that its owner overwrites, and what it came in, the text and the request's bytes, is overwritten
where it lies. What the libraries under Python free the C library overwrites: MALLOC_PERTURB_ and
GLIBC_TUNABLES in systemd/carver.service and in the image (mallopt(3), M_PERTURB).
docs/encryption.md tells what holds.
"""

import contextlib
import ctypes
import hmac
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from agent.core import errors

# Keys of a secret: the passphrase, the one before it, and a name for the first, which is kept in
# the clear.
PASSPHRASE, PREVIOUS_PASSPHRASE = "passphrase", "previousPassphrase"
GENERATION = "passphraseGeneration"
# What CSI and cryptsetup have room for.
MOST_BYTES = 2048
_PR_SET_DUMPABLE = 4
# Never on a disk: without it a digest of a key says nothing.
_SALT = os.urandom(32)
# Of a text with other than ASCII characters: here two, and an end, of two bytes each.
_WIDE_HEADER_BYTES = sys.getsizeof(chr(0x100) * 2) - 3 * 2


class Key:
    """A key's bytes, to be overwritten by `wipe`. It is never shown, compared or copied."""

    __slots__ = ("data",)

    def __init__(self, told: bytes | bytearray) -> None:
        """A bytearray is taken as it is, and is the key's from then on."""
        self.data = told if isinstance(told, bytearray) else bytearray(told)

    def __repr__(self) -> str:
        return "Key(***)"

    def __bool__(self) -> bool:
        return bool(self.data)

    def wipe(self) -> None:
        """Overwrite it where it lies; a program that did not end may read it still."""
        self.data[:] = bytes(len(self.data))


@dataclass(frozen=True)
class Keys:
    """The key that a caller has for a volume, and the one that it had before; either may lack."""

    present: Key | None = None
    previous: Key | None = None
    # What the secret calls the present one; no key, and kept in the clear.
    generation: str = ""

    def digests(self) -> tuple[object, ...]:
        """By which this process, and nobody else, tells the same keys again."""
        both = (self.present, self.previous)
        told = (one and hmac.digest(_SALT, one.data, "sha256") for one in both)
        return (*told, self.generation)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Overwrite them at the end, whatever happened."""
        try:
            yield
        finally:
            for key in (self.present, self.previous):
                if key is not None:
                    key.wipe()


NONE = Keys()


def of_text(field: str, told: str) -> Key:
    """The key in a text that nobody else has, which is overwritten. Raises BadField."""
    data = told.encode()
    try:
        if not 0 < len(data) <= MOST_BYTES:
            raise errors.BadField(field, f"must have 1 to {MOST_BYTES} bytes")
        return Key(data)
    finally:
        wipe(data)
        wipe(told)


def wipe(told: str | bytes) -> None:
    """Overwrite a text or bytes where they lie; the caller is the only one who has them.

    Of one character there is one object for all (Objects/unicodeobject.c, bytesobject.c): it stays.
    """
    if len(told) < 2:
        return
    if isinstance(told, bytes):
        # Behind the header: PyBytesObject.ob_sval, and a zero at its end.
        start, size = bytes.__basicsize__ - 1, len(told)
    elif told.isascii():
        # Behind the header: PyASCIIObject, and a zero at its end.
        start, size = sys.getsizeof("") - 1, len(told)
    else:
        # Behind the header: PyCompactUnicodeObject, as many bytes for each character as the
        # largest takes (PEP 393).
        width = next(one for one in (1, 2, 4) if ord(max(told)) < 1 << 8 * one)
        start, size = _WIDE_HEADER_BYTES, len(told) * width
    ctypes.memset(id(told) + start, 0, size)


def forbid_dumps() -> None:
    """Have the kernel write no image of this process when it crashes (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
