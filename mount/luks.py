"""LUKS2: read headers from a device, zero the ends of a device, and run cryptsetup(8).

cryptsetup reads keys from standard input, never from its arguments. Argon2id takes so much memory
for so long that at most two programs derive a key at once.
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

# Size of each of the two copies of a LUKS2 header, in bytes: cryptsetup's default, so Carver's too.
METADATA_BYTES = 16 << 10
# Binary part of a copy of a LUKS2 header (struct luks2_hdr_disk, lib/luks2/luks2.h of cryptsetup):
# magic, version, size, sequence number, label, kind of checksum, salt, UUID, subsystem, offset,
# padding, checksum. The rest of the copy is JSON.
_BINARY = struct.Struct(">6s H Q Q 48s 32s 64s 40s 48s Q 184s 64s")
_BINARY_BYTES = 4096
# Position and length of the checksum in a copy of a LUKS2 header, in bytes.
_CHECKSUM_AT, _CHECKSUM_BYTES = 448, 64
# Magic texts at the beginning of the first and of the second copy of a LUKS2 header.
_MAGICS = (b"LUKS\xba\xbe", b"SKUL\xba\xbe")
_VERSION = 2
# Number of attempts to read a LUKS2 header of which no copy is whole, and the pause between the
# attempts, in seconds.
_LOOKS, _LOOK_SECONDS = 10, 0.02
# Beginning of the requirement in the header of a device that cryptsetup is re-encrypting.
# cryptsetup itself recognizes such a device by this requirement (LUKS2_reencrypt_status() in its
# lib/luks2/luks2_reencrypt.c).
_REENCRYPTION = "online-reencrypt"


@dataclass(frozen=True)
class Header:
    """An undamaged LUKS2 header. Sizes are in bytes.

    `slots` are the numbers of the key slots that have the data's master key. `is_reencrypting` says
    that cryptsetup has begun to re-encrypt the data, and has not finished.
    """

    uuid: str
    slots: tuple[int, ...]
    offset_bytes: int
    cipher: str
    sector_bytes: int
    key_derivation: tuple[str, ...] = ()
    is_reencrypting: bool = False
    # A digest of all in the header that decides how the ciphertext is decrypted: the segments, and
    # the digests of their master key, which cryptsetup makes anew for each master key. The key
    # slots, whose passphrases may change, are not part of the digest.
    decryption_digest: str = ""


def read(kernel: Kernel, device: str) -> Header | None:
    """Read the LUKS2 header from a device, by the newer whole copy; None if neither is whole.

    cryptsetup writes one copy after the other, so a copy may be half written when it is read. If no
    copy is whole, the device is read again up to `_LOOKS` times: a write in progress ends, damage
    stays. Raises OSError.
    """
    for attempt in range(_LOOKS):
        if attempt:
            time.sleep(_LOOK_SECONDS)
        if newest := _newest(partial(kernel.read, device)):
            return newest
        if not has_header_copy(kernel, device):
            break
    return None


def has_header_copy(kernel: Kernel, device: str) -> bool:
    """Whether a device has a copy of a LUKS2 header, be it whole or damaged."""
    starts = (kernel.read(device, number * METADATA_BYTES, 6) for number in range(len(_MAGICS)))
    return any(start in _MAGICS for start in starts)


def _newest(read: Callable[[int, int], bytes]) -> Header | None:
    """The header in the newer one of the undamaged copies; `read` takes an offset and a length."""
    header_copies = (
        _copy(read(number * METADATA_BYTES, METADATA_BYTES), magic)
        for number, magic in enumerate(_MAGICS)
    )
    newest = max((copy for copy in header_copies if copy), key=lambda copy: copy[0], default=None)
    return None if newest is None else newest[1]


def _copy(data: bytes, expected_magic: bytes) -> tuple[int, Header] | None:
    """Parse one copy of a header into sequence number and header; None for a damaged copy."""
    magic, version, size, sequence, _, kind, _, uuid, *_ = _BINARY.unpack_from(data)
    if (magic, version, size) != (expected_magic, _VERSION, METADATA_BYTES):
        return None
    try:
        if digest(data, _text(kind)) != data[_CHECKSUM_AT:][:_CHECKSUM_BYTES]:
            return None
        metadata = json.loads(_text(data[_BINARY_BYTES:]))
        return sequence, _header(_text(uuid), metadata)
    except (ValueError, KeyError, TypeError):
        return None


def digest(data: bytes, kind: str) -> bytes:
    """The checksum of a copy of a header: of all its bytes, with zeroes in the checksum's place."""
    blank = bytearray(data)
    blank[_CHECKSUM_AT : _CHECKSUM_AT + _CHECKSUM_BYTES] = bytes(_CHECKSUM_BYTES)
    return hashlib.new(kind, blank).digest().ljust(_CHECKSUM_BYTES, b"\0")


def _header(uuid: str, metadata: Mapping[str, Any]) -> Header:
    data = [segment for segment in metadata["segments"].values() if _is_data(segment)]
    first_segment = min(data, key=lambda segment: int(segment["offset"]))
    areas = {int(number): slot for number, slot in metadata["keyslots"].items()}
    slots = {number: slot for number, slot in areas.items() if slot["type"] == "luks2"}
    digests = [key_digest for key_digest in metadata["digests"].values() if key_digest["segments"]]
    bound = {
        int(number) for key_digest in digests for number in key_digest["keyslots"]
    } & slots.keys()
    required = metadata.get("config", {}).get("requirements", {}).get("mandatory", ())
    return Header(
        uuid,
        tuple(sorted(bound)),
        int(first_segment["offset"]),
        str(first_segment["encryption"]),
        int(first_segment["sector_size"]),
        tuple(sorted({str(slot["kdf"]["type"]) for slot in slots.values()})),
        any(requirement.startswith(_REENCRYPTION) for requirement in required),
        _decryption_digest(data, digests),
    )


def _decryption_digest(
    segments: Sequence[Mapping[str, Any]], digests: Sequence[Mapping[str, Any]]
) -> str:
    """The digest of all that decides how the ciphertext is decrypted (`Header.decryption_digest`).

    The assignment of the master key to key slots is left out.
    """
    digests_without_slots = [
        {name: key_digest[name] for name in key_digest if name != "keyslots"}
        for key_digest in digests
    ]
    return hashlib.sha256(
        json.dumps([segments, digests_without_slots], sort_keys=True).encode()
    ).hexdigest()


def _is_data(segment: Mapping[str, Any]) -> bool:
    # The backup segments of a re-encryption describe all data before and after the re-encryption,
    # and have no place of their own on the device.
    nowhere = any(flag.startswith("backup-") for flag in segment.get("flags", ()))
    return segment["type"] == "crypt" and not nowhere


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode()


# Number of bytes at each end of an encrypted volume that are zeroed. Signatures that have only a
# few bytes are within 64 KiB of either end of a device (libblkid/src/superblocks).
_END_BYTES = 256 << 10
_BLOCK_BYTES = 4096
_ZEROES = bytes(_BLOCK_BYTES)


def zero_ends(kernel: Kernel, device: str, offset_bytes: int) -> None:
    """Zero the ends of the data area of a device that has no LUKS2 header yet.

    The zeroes are durable once a header was made, as cryptsetup flushes the device. Raises
    ProbeFailed.
    """
    with _probing(device):
        size_bytes = kernel.device_size_bytes(device) - offset_bytes
        with kernel.opened(device, to_write=True) as opened_device:
            for start, length_bytes in _runs(opened_device, offset_bytes, size_bytes, blank=False):
                opened_device.zero_out(offset_bytes + start, length_bytes)


def zero_blank_ends(kernel: Kernel, device: str, offset_bytes: int, mapping: str) -> None:
    """Zero the ends of an open dm-crypt device (`mapping`) where its ciphertext is all zeroes.

    Such blocks were never written by the volume's user, and would decrypt to noise. Blocks that
    were written stay. `device` is the device below. Raises ProbeFailed.
    """
    with _probing(mapping):
        size_bytes = kernel.device_size_bytes(mapping)
        with (
            kernel.opened(device) as opened_device,
            kernel.opened(mapping, to_write=True) as opened_mapping,
        ):
            for start, length_bytes in _runs(opened_device, offset_bytes, size_bytes, blank=True):
                opened_mapping.zero_out(start, length_bytes)
            opened_mapping.flush()


def _runs(
    opened_device: Opened, offset_bytes: int, size_bytes: int, *, blank: bool
) -> Iterator[tuple[int, int]]:
    """The runs of zero blocks (`blank`), or else of other blocks, at both ends of a device.

    Each run is its start and its length in bytes, from `offset_bytes` on.
    """
    whole_bytes = size_bytes // _BLOCK_BYTES * _BLOCK_BYTES
    head_bytes = min(_END_BYTES, whole_bytes)
    tail_offset = max(head_bytes, whole_bytes - _END_BYTES)
    for begin, length_bytes in ((0, head_bytes), (tail_offset, whole_bytes - tail_offset)):
        start = begin
        # This read bypasses the page cache, which may have older contents.
        data = opened_device.read(offset_bytes + begin, length_bytes) if length_bytes else b""
        blocks = [
            data[block_offset : block_offset + _BLOCK_BYTES]
            for block_offset in range(0, length_bytes, _BLOCK_BYTES)
        ]
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


# Cipher and length of the key: AES-256 in XTS mode, whose key has two parts of 256 bits.
CIPHER, KEY_BITS = "aes-xts-plain64", 512
# Parameters of Argon2id: the second choice of RFC 9106, section 4, for little memory; but
# cryptsetup demands four passes. The parameters are fixed and not measured. So a header that was
# made on an idle node can be opened on a busy node, and making a header takes no seconds.
PBKDF_MEMORY_KIB, PBKDF_PASSES, PBKDF_THREADS = 64 << 10, 4, 4
_PBKDF = (
    *("--pbkdf", "argon2id", "--pbkdf-memory", str(PBKDF_MEMORY_KIB)),
    *("--pbkdf-parallel", str(PBKDF_THREADS), "--pbkdf-force-iterations", str(PBKDF_PASSES)),
)
# Limit of the number of programs that derive a key at once, as each takes PBKDF_MEMORY_KIB.
_AT_ONCE = threading.BoundedSemaphore(2)
# Time limit of the wait until fewer programs derive a key, in seconds: if a disk hangs under two
# such programs, other volumes' programs must not wait for ever.
_PATIENCE_SECONDS = 30.0
_SECTOR_BYTES = 512
# Label of Carver's LUKS2 headers.
_LABEL = "carver"
# Numbers of key slots. Two are for the key of the Kubernetes secret: a rotation adds the new key in
# one of these slots before it removes the old key from the other. The third is for a key that only
# people have.
SLOTS = USUAL, ROTATED, RECOVERY = (0, 1, 2)
# Exit codes of cryptsetup(8), "RETURN CODES".
_NO_PERMISSION, _NO_MEMORY, _IN_USE = 2, 3, 5


class Cryptsetup:
    """Runs cryptsetup(8) on this node.

    Without `waits_for_udev`, cryptsetup makes device nodes by itself.
    """

    def __init__(self, run: Runner, *, waits_for_udev: bool) -> None:
        self._run = run
        # libdevmapper(3) waits on a semaphore until udev has made the node. In another IPC
        # namespace, or where no udev runs, that wait would never end.
        self._prefix = () if waits_for_udev else ("env", "DM_DISABLE_UDEV=1")

    def make(
        self, device: str, key: bytearray, *, uuid: str, offset_bytes: int, sector_bytes: int
    ) -> None:
        """Make a LUKS2 header on a device that was just found blank.

        The data begin at `offset_bytes`. Call this directly after the check that the device is
        blank, as cryptsetup does not ask before it overwrites. Raises CryptFailed.
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
        """Open a device as a dm-crypt device of that name.

        Raises WrongKey if the key opens no key slot, CryptFailed.

        `bypass` may contain "read" and "write": these requests are then processed without the
        kernel's work queues (cryptsetup(8), --perf-no_read_workqueue).
        """
        flags = (
            *("--allow-discards",) * discard,
            *("--readonly",) * read_only,
            *(f"--perf-no_{kind}_workqueue" for kind in sorted(bypass)),
        )
        self._with_key("open", device, key, "--type", "luks2", *flags, "--", device, name)

    def check(self, device: str, key: bytearray, slot: int | None = None) -> bool:
        """Whether a key opens a device, by any key slot or by `slot`; the device is not opened."""
        of_slot = () if slot is None else ("--key-slot", str(slot))
        words = ("--type", "luks2", "--test-passphrase", *of_slot)
        try:
            self._with_key("open", device, key, *words, "--", device)
        except mount_errors.WrongKey:
            return False
        return True

    def close(self, name: str) -> None:
        """Close a dm-crypt device, so that the kernel forgets its key.

        Raises CryptBusy while the dm-crypt device is open, CryptFailed.
        """
        result = self._run(*self._prefix, "cryptsetup", "close", "--", name)
        if result.exit_code == _IN_USE:
            raise mount_errors.CryptBusy(name, result.stderr.strip())
        if result.exit_code != 0:
            raise mount_errors.CryptFailed("close", name, _said(result))

    def grow(self, device: str, key: bytearray, name: str) -> None:
        """Grow an open dm-crypt device to the size of the device below.

        Raises WrongKey if the key opens no key slot, CryptFailed.
        """
        self._with_key("resize", device, key, "--", name)

    def add(self, device: str, key: bytearray, new_key: bytearray, slot: int) -> None:
        """Add the key `new_key` in a key slot, which must be free; `key` must open the device.

        Raises WrongKey if `key` opens no key slot, CryptFailed.
        """
        words = (
            *("--keyfile-size", str(len(key)), "--new-keyfile", "-"),
            *("--new-keyfile-size", str(len(new_key)), "--new-key-slot", str(slot), *_PBKDF),
        )
        # cryptsetup reads both keys from standard input, one after the other, each of the length
        # that its option gives.
        both_keys = key + new_key
        try:
            self._with_key("luksAddKey", device, both_keys, *words, "--", device)
        finally:
            both_keys[:] = bytes(len(both_keys))

    def remove_key(self, device: str, key: bytearray, slot: int) -> None:
        """Remove the key of a key slot; `key` must open another slot.

        Raises WrongKey if `key` opens no key slot, CryptFailed.
        """
        self._with_key("luksKillSlot", device, key, "--", device, str(slot))

    def back_up(self, device: str, file: str) -> None:
        """Write a device's header, with its key slots, to a file that does not exist yet."""
        self._plain("luksHeaderBackup", device, "--header-backup-file", file)

    def restore(self, device: str, file: str) -> None:
        """Replace a device's header by the header in a file."""
        self._plain("luksHeaderRestore", device, "--header-backup-file", file)

    def _plain(self, action: str, device: str, *words: str) -> None:
        words_of_command = ("cryptsetup", action, "--batch-mode", *words, "--", device)
        result = self._run(*self._prefix, *words_of_command)
        if result.exit_code != 0:
            raise mount_errors.CryptFailed(action, device, _said(result))

    def _with_key(self, action: str, device: str, key: bytearray, *words: str) -> None:
        common = ("--batch-mode", "--disable-external-tokens", "--key-file", "-")
        with _reserve_memory(device):
            result = self._run(*self._prefix, "cryptsetup", action, *common, *words, stdin=key)
        if result.exit_code == _NO_PERMISSION:
            raise mount_errors.WrongKey(device)
        if result.exit_code != 0:
            raise mount_errors.CryptFailed(action, device, _said(result))


@contextmanager
def _reserve_memory(device: str) -> Iterator[None]:
    """Reserve the memory for one derivation of a key within the `with`.

    Raises CryptPending if other derivations have the memory for too long (_PATIENCE_SECONDS).
    """
    if not _AT_ONCE.acquire(timeout=_PATIENCE_SECONDS):
        raise mount_errors.CryptPending(device)
    try:
        yield
    finally:
        _AT_ONCE.release()


def has_udev() -> bool:
    """Whether udev runs on this node, or in this container."""
    return Path("/run/udev/control").exists()


def _said(result: Result) -> str:
    message = result.stderr.strip() or result.stdout.strip() or "it says nothing"
    if result.exit_code == _NO_MEMORY:
        message += f" (it takes {PBKDF_MEMORY_KIB >> 10} MiB for a moment)"
    return f"{message} (exit {result.exit_code})"
