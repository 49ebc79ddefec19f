"""Keys of encrypted volumes in memory: few copies, each overwritten after use.

A key is kept in one bytearray. The request's bytes and text that it came in are immutable, so they
are overwritten in place by ctypes. Memory that C libraries free is overwritten by glibc:
MALLOC_PERTURB_ and GLIBC_TUNABLES in systemd/carver.service and the image (mallopt(3), M_PERTURB).
pymalloc does not do that: without ctypes, tests/fast/failures/test_memory.py finds two copies after
the volume is closed (keys of 8 and of 320 bytes); PYTHONMALLOC=malloc leaves none, but doubles the
time of code that allocates much. docs/encryption.md has the guarantees.
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
# The most that CSI and cryptsetup accept, in bytes.
MOST_BYTES = 2048
_PR_SET_DUMPABLE = 4
# Never on a disk: without it a digest of a key says nothing.
_SALT = os.urandom(32)
# Of a text with other than ASCII characters: here two, and an end, of two bytes each.
_WIDE_HEADER_BYTES = sys.getsizeof(chr(0x100) * 2) - 3 * 2


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
    """Make a key of a text without other references, and overwrite the text. Raises BadField."""
    data = text.encode()
    try:
        if not 0 < len(data) <= MOST_BYTES:
            raise errors.BadField(field, f"must have 1 to {MOST_BYTES} bytes")
        return Key(data)
    finally:
        wipe(data)
        wipe(text)


def wipe(text: str | bytes) -> None:
    """Overwrite a text or bytes without other references in place.

    Not if shorter than 2: CPython shares these (Objects/unicodeobject.c, bytesobject.c).
    """
    if len(text) < 2:
        return
    if isinstance(text, bytes):
        # Behind the header: PyBytesObject.ob_sval, and a zero at its end.
        start, size = bytes.__basicsize__ - 1, len(text)
    elif text.isascii():
        # Behind the header: PyASCIIObject, and a zero at its end.
        start, size = sys.getsizeof("") - 1, len(text)
    else:
        # Behind the header: PyCompactUnicodeObject, as many bytes for each character as the
        # largest takes (PEP 393).
        width = next(one for one in (1, 2, 4) if ord(max(text)) < 1 << 8 * one)
        start, size = _WIDE_HEADER_BYTES, len(text) * width
    ctypes.memset(id(text) + start, 0, size)


@contextlib.contextmanager
def in_file(content: bytes) -> Iterator[str]:
    """Make a file in memory, by its path: ssl takes a certificate's key from files only."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def forbid_dumps() -> None:
    """Disable core dumps of this process (prctl(2), PR_SET_DUMPABLE)."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
