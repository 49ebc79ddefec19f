"""Run cryptsetup: a method for each command. Keys are read at standard input, never words.

Argon2id takes so much memory for so long that at most two of it run at once.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mount import errors
from mount.command import Result, Runner, Stream

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
_AT_ONCE = threading.BoundedSemaphore(2)
# A disk that hangs under two of them is not to hang all others.
_PATIENCE_SECONDS = 30.0
_SECTOR_BYTES = 512
_LABEL = "carver"
# By the Kubernetes secret, and another that only people have.
SLOTS = USUAL, ROTATED, RECOVERY = (0, 1, 2)
# What a re-encryption works on at a time; after each it reports, and can be ended.
_HOT_ZONE = "64M"
_PROGRESS_SECONDS = 1
# cryptsetup(8), "RETURN CODES".
_NO_PERMISSION, _NO_MEMORY, _IN_USE = 2, 3, 5
_UDEV_CONTROL = Path("/run/udev/control")


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
        except errors.WrongKey:
            return False
        return True

    def close(self, name: str) -> None:
        """Close a dm-crypt device, which forgets its key. Raises CryptBusy, CryptFailed."""
        result = self._run(*self._prefix, "cryptsetup", "close", "--", name)
        if result.exit_code == _IN_USE:
            raise errors.CryptBusy(name, result.stderr.strip())
        if result.exit_code != 0:
            raise errors.CryptFailed("close", name, _said(result))

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

    def reencrypt(
        self,
        stream: Stream,
        device: str,
        key: bytearray,
        slot: int | None,
        check: Callable[[], None],
    ) -> None:
        """Give what a device holds, which is not open, another master key: as long as that takes.

        The key is that of a slot, the only one that is left then; of None, one goes on that was
        ended. `check` is asked each second, and what it raises ends it at a safe point, as SIGTERM
        does (cryptsetup-reencrypt(8)). What a kill left is recovered first. The key is overwritten
        as soon as cryptsetup has it. Raises what `stream` does.
        """
        begin = ("--key-slot", str(slot or 0), *_PBKDF, "--use-random")
        words = (
            *("--disable-external-tokens", "--key-file", "-", "--hotzone-size", _HOT_ZONE),
            # Not --batch-mode, in which it reports nothing; it asks nothing either.
            *("--progress-frequency", str(_PROGRESS_SECONDS)),
            *(("--resume-only",) if slot is None else begin),
        )
        with ExitStack() as until_open:
            until_open.enter_context(_turn(device))
            called = (*self._prefix, "cryptsetup", "reencrypt", *words, "--", device)
            with stream(*called, stdin=key) as lines:
                key[:] = bytes(len(key))
                for _ in lines:
                    until_open.close()
                    check()

    def recover(self, device: str, key: bytearray) -> None:
        """Mend what a re-encryption was at when it was killed. Raises CryptFailed."""
        self._with_key("repair", device, key, "--", device)

    def name(self, device: str, uuid: str) -> None:
        """Have a header bear another UUID."""
        self._plain("luksUUID", device, "--batch-mode", "--uuid", uuid, "--", device)

    def back_up(self, device: str, file: str) -> None:
        """Write the header, key slots and all, to a file that is not there."""
        words = ("--batch-mode", "--header-backup-file", file)
        self._plain("luksHeaderBackup", device, *words, "--", device)

    def restore(self, device: str, file: str) -> None:
        """Have a header of a file in place of the device's."""
        words = ("--batch-mode", "--header-backup-file", file)
        self._plain("luksHeaderRestore", device, *words, "--", device)

    def _plain(self, action: str, device: str, *words: str) -> None:
        result = self._run(*self._prefix, "cryptsetup", action, *words)
        if result.exit_code != 0:
            raise errors.CryptFailed(action, device, _said(result))

    def _with_key(self, action: str, device: str, key: bytearray, *words: str) -> None:
        common = ("--batch-mode", "--disable-external-tokens", "--key-file", "-")
        with _turn(device):
            result = self._run(*self._prefix, "cryptsetup", action, *common, *words, stdin=key)
        if result.exit_code == _NO_PERMISSION:
            raise errors.WrongKey(device)
        if result.exit_code != 0:
            raise errors.CryptFailed(action, device, _said(result))


@contextmanager
def _turn(device: str) -> Iterator[None]:
    """Inside, argon2id has its memory. Raises CryptPending."""
    if not _AT_ONCE.acquire(timeout=_PATIENCE_SECONDS):
        raise errors.CryptPending(device)
    try:
        yield
    finally:
        _AT_ONCE.release()


def has_udev() -> bool:
    """Whether udev answers here."""
    return _UDEV_CONTROL.exists()


def _said(result: Result) -> str:
    said = result.stderr.strip() or result.stdout.strip() or "it says nothing"
    if result.exit_code == _NO_MEMORY:
        said += f" (it takes {PBKDF_MEMORY_KIB >> 10} MiB for a moment)"
    return f"{said} (exit {result.exit_code})"
