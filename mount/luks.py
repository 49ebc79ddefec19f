"""LUKS2: headers as they are on a device, the zeroed ends of a device, and cryptsetup.

Keys are read by cryptsetup at standard input, never as words. Argon2id takes so much memory for
so long that at most two of it run at once.
"""

import hashlib
import json
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from mount import mount_errors
from mount.block_io import Opened
from mount.command import Result, Runner
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
# The beginning of the requirement in the header of a device that cryptsetup is re-encrypting. By it
# cryptsetup itself knows such a device (LUKS2_reencrypt_status(), its lib/luks2/luks2_reencrypt.c).
_REENCRYPTION = "online-reencrypt"


@dataclass(frozen=True)
class Header:
    """A whole header. Sizes are in bytes.

    `slots` are the key slots whose master key is the data's. `is_reencrypting` says that cryptsetup
    has begun to re-encrypt the data, and has not finished that.
    """

    uuid: str
    slots: tuple[int, ...]
    offset_bytes: int
    cipher: str
    sector_bytes: int
    key_derivation: tuple[str, ...] = ()
    is_reencrypting: bool = False
    # A digest of how ciphertext and plaintext belong together: the segments, and the digests of
    # their master key, which cryptsetup makes anew for each key. Keys that open it are no part.
    reading: str = ""


def read(kernel: Kernel, device: str) -> Header | None:
    """The header on a device, by either of its copies; None where neither is whole.

    cryptsetup writes one copy after the other, so a reader may find a copy half written. It reads
    again: damage stays, and a write ends. Raises OSError.
    """
    for look in range(_LOOKS):
        if look:
            time.sleep(_LOOK_SECONDS)
        if newest := _newest(partial(kernel.read, device)):
            return newest
        if not bears_any(kernel, device):
            break
    return None


def bears_any(kernel: Kernel, device: str) -> bool:
    """Whether a copy of a header is there, be it whole or not."""
    starts = (kernel.read(device, at * METADATA_BYTES, 6) for at in range(len(_MAGICS)))
    return any(start in _MAGICS for start in starts)


def _newest(read: Callable[[int, int], bytes]) -> Header | None:
    """The header by the newer one of the copies that are whole; `read` takes offset and length."""
    every = (
        _copy(read(number * METADATA_BYTES, METADATA_BYTES), magic)
        for number, magic in enumerate(_MAGICS)
    )
    newest = max((one for one in every if one), key=lambda one: one[0], default=None)
    return None if newest is None else newest[1]


def _copy(data: bytes, expected: bytes) -> tuple[int, Header] | None:
    """The sequence number of one copy and the header that it holds; None where it is not whole."""
    magic, version, size, sequence, _, kind, _, uuid, *_ = _BINARY.unpack_from(data)
    if (magic, version, size) != (expected, _VERSION, METADATA_BYTES):
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
    data = [one for one in metadata["segments"].values() if _is_data(one)]
    first = min(data, key=lambda one: int(one["offset"]))
    areas = {int(number): one for number, one in metadata["keyslots"].items()}
    slots = {number: one for number, one in areas.items() if one["type"] == "luks2"}
    digests = [one for one in metadata["digests"].values() if one["segments"]]
    bound = {int(number) for one in digests for number in one["keyslots"]} & slots.keys()
    required = metadata.get("config", {}).get("requirements", {}).get("mandatory", ())
    return Header(
        uuid,
        tuple(sorted(bound)),
        int(first["offset"]),
        str(first["encryption"]),
        int(first["sector_size"]),
        tuple(sorted({str(one["kdf"]["type"]) for one in slots.values()})),
        any(one.startswith(_REENCRYPTION) for one in required),
        _reading(data, digests),
    )


def _reading(segments: Sequence[Mapping[str, Any]], digests: Sequence[Mapping[str, Any]]) -> str:
    """The digest of what a reader goes by; which slots have the master key is none of it."""
    keys = [{name: one[name] for name in one if name != "keyslots"} for one in digests]
    return hashlib.sha256(json.dumps([segments, keys], sort_keys=True).encode()).hexdigest()


def _is_data(segment: Mapping[str, Any]) -> bool:
    # The backup segments of a re-encryption lie nowhere: they say how all of the data was before
    # the re-encryption, and will be after it.
    nowhere = any(one.startswith("backup-") for one in segment.get("flags", ()))
    return segment["type"] == "crypt" and not nowhere


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
        raise mount_errors.ProbeFailed(device, str(error.strerror)) from error


# AES-256 in XTS mode, whose key has two parts.
CIPHER, KEY_BITS = "aes-xts-plain64", 512
# The second choice of RFC 9106, section 4, for where memory is scarce; cryptsetup demands four
# passes. Fixed, and not measured: a header that was made on an idle node opens on a busy one, and
# making it takes no seconds.
PBKDF_MEMORY_KIB, PBKDF_PASSES, PBKDF_THREADS = 64 << 10, 4, 4
_PBKDF = (
    *("--pbkdf", "argon2id", "--pbkdf-memory", str(PBKDF_MEMORY_KIB)),
    *("--pbkdf-parallel", str(PBKDF_THREADS), "--pbkdf-force-iterations", str(PBKDF_PASSES)),
)
# Number of programs at once that derive a key, as each takes that memory.
_AT_ONCE = threading.BoundedSemaphore(2)
# A disk that hangs under two of them is not to hang all others.
_PATIENCE_SECONDS = 30.0
_SECTOR_BYTES = 512
_LABEL = "carver"
# By the Kubernetes secret, and another that only people have.
SLOTS = USUAL, ROTATED, RECOVERY = (0, 1, 2)
# cryptsetup(8), "RETURN CODES".
_NO_PERMISSION, _NO_MEMORY, _IN_USE = 2, 3, 5


class Cryptsetup:
    """The program on this node. Without `waits_for_udev` it makes device nodes by itself."""

    def __init__(self, run: Runner, *, waits_for_udev: bool) -> None:
        self._run = run
        # libdevmapper(3) waits on a semaphore for udev, which in another IPC namespace, or where
        # no udev runs, never comes.
        self._prefix = () if waits_for_udev else ("env", "DM_DISABLE_UDEV=1")

    def make(
        self, device: str, key: bytearray, *, uuid: str, offset_bytes: int, sector_bytes: int
    ) -> None:
        """Make a header on a device that was just found blank; its data begin at the offset.

        Call it on the line below that check: nothing is asked. Raises CryptFailed.
        """
        words = (
            *("--type", "luks2", "--cipher", CIPHER, "--key-size", str(KEY_BITS)),
            *("--hash", "sha256", *_PBKDF, "--use-random", "--key-slot", str(USUAL)),
            *("--sector-size", str(sector_bytes), "--offset", str(offset_bytes // _SECTOR_BYTES)),
            *("--uuid", uuid, "--label", _LABEL),
        )
        self._with_key("luksFormat", device, key, *words, "--", device)

    def open(
        self,
        device: str,
        key: bytearray,
        name: str,
        *,
        discard: bool,
        read_only: bool = False,
        bypass: Collection[str] = (),
    ) -> None:
        """Open a device as a dm-crypt device of that name. Raises WrongKey, CryptFailed.

        What is read, or written, passes the kernel's work queues by where `bypass` has it.
        """
        flags = (
            *("--allow-discards",) * discard,
            *("--readonly",) * read_only,
            *(f"--perf-no_{one}_workqueue" for one in sorted(bypass)),
        )
        self._with_key("open", device, key, "--type", "luks2", *flags, "--", device, name)

    def check(self, device: str, key: bytearray, slot: int | None = None) -> bool:
        """Whether a key opens a device, by any slot or by one; nothing is opened."""
        of_slot = () if slot is None else ("--key-slot", str(slot))
        words = ("--type", "luks2", "--test-passphrase", *of_slot)
        try:
            self._with_key("open", device, key, *words, "--", device)
        except mount_errors.WrongKey:
            return False
        return True

    def close(self, name: str) -> None:
        """Close a dm-crypt device, which forgets its key. Raises CryptBusy, CryptFailed."""
        result = self._run(*self._prefix, "cryptsetup", "close", "--", name)
        if result.exit_code == _IN_USE:
            raise mount_errors.CryptBusy(name, result.stderr.strip())
        if result.exit_code != 0:
            raise mount_errors.CryptFailed("close", name, _said(result))

    def grow(self, device: str, key: bytearray, name: str) -> None:
        """Grow an open dm-crypt device to the size of the device below it. Raises WrongKey."""
        self._with_key("resize", device, key, "--", name)

    def add(self, device: str, key: bytearray, new: bytearray, slot: int) -> None:
        """Add a key in a slot of its own. Raises WrongKey, CryptFailed."""
        words = (
            *("--keyfile-size", str(len(key)), "--new-keyfile", "-"),
            *("--new-keyfile-size", str(len(new)), "--new-key-slot", str(slot), *_PBKDF),
        )
        # One after the other, and each no longer than is said.
        both = key + new
        try:
            self._with_key("luksAddKey", device, both, *words, "--", device)
        finally:
            both[:] = bytes(len(both))

    def kill(self, device: str, key: bytearray, slot: int) -> None:
        """Remove the key of a slot; `key` must open another. Raises WrongKey."""
        self._with_key("luksKillSlot", device, key, "--", device, str(slot))

    def back_up(self, device: str, file: str) -> None:
        """Write the header, key slots and all, to a file that is not there."""
        self._plain("luksHeaderBackup", device, "--header-backup-file", file)

    def restore(self, device: str, file: str) -> None:
        """Have a header of a file in place of the device's."""
        self._plain("luksHeaderRestore", device, "--header-backup-file", file)

    def _plain(self, action: str, device: str, *words: str) -> None:
        called = ("cryptsetup", action, "--batch-mode", *words, "--", device)
        result = self._run(*self._prefix, *called)
        if result.exit_code != 0:
            raise mount_errors.CryptFailed(action, device, _said(result))

    def _with_key(self, action: str, device: str, key: bytearray, *words: str) -> None:
        common = ("--batch-mode", "--disable-external-tokens", "--key-file", "-")
        with _turn(device):
            result = self._run(*self._prefix, "cryptsetup", action, *common, *words, stdin=key)
        if result.exit_code == _NO_PERMISSION:
            raise mount_errors.WrongKey(device)
        if result.exit_code != 0:
            raise mount_errors.CryptFailed(action, device, _said(result))


@contextmanager
def _turn(device: str) -> Iterator[None]:
    """Inside, argon2id has its memory. Raises CryptPending."""
    if not _AT_ONCE.acquire(timeout=_PATIENCE_SECONDS):
        raise mount_errors.CryptPending(device)
    try:
        yield
    finally:
        _AT_ONCE.release()


def has_udev() -> bool:
    """Whether udev answers here."""
    return Path("/run/udev/control").exists()


def _said(result: Result) -> str:
    said = result.stderr.strip() or result.stdout.strip() or "it says nothing"
    if result.exit_code == _NO_MEMORY:
        said += f" (it takes {PBKDF_MEMORY_KIB >> 10} MiB for a moment)"
    return f"{said} (exit {result.exit_code})"
