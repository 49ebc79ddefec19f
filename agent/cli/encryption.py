"""Show, back up, restore and re-key the headers of encrypted volumes, by hand.

This works on the volume's device, not through the service, so no key goes through a socket.
"""

import getpass
import sys
from collections.abc import Callable
from pathlib import Path

from agent.cli import terminal
from agent.core import errors
from agent.operations import encrypt
from agent.requests.secret import MOST_BYTES, Key, Keys, of_text
from agent.volumes.luks_mappings import HeaderCopies, own_uuid
from lvm.active_devices import Device
from mount import luks
from mount.kernel import Kernel
from mount.luks import Cryptsetup, Header

_STANDARD_INPUT = "-"


class Headers:
    """The verbs on one active volume; `device` is its logical volume's."""

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        device: Device,
        program: Cryptsetup,
        copies: HeaderCopies,
        forget_key: Callable[[], None],
    ) -> None:
        self._name, self._kernel, self._device = name, kernel, device
        self._program, self._copies = program, copies
        # Removes the name of its key from the volume's tags, before it gets another key.
        self._forget_key = forget_key

    def show(self) -> None:
        """Print what the header says."""
        header = self._header()
        made = terminal.table("", "")
        made.add_row("uuid", header.uuid)
        made.add_row("slots", ", ".join(map(str, header.slots)) or "none: no key can open it")
        made.add_row("data", f"from byte {header.offset_bytes}")
        made.add_row("cipher", f"{header.cipher}, sectors of {header.sector_bytes} bytes")
        made.add_row("key derivation", ", ".join(header.key_derivation))
        if header.is_reencrypting:
            made.add_row("re-encryption", "begun, and not ended: cryptsetup must end it")
        terminal.console().print(made)

    def back_up(self, file: str) -> None:
        """Write the header, key slots included, to a new file."""
        self._require_settled(self._header())
        if Path(file).exists():
            raise errors.BadField("FILE", f"{file} exists already")
        self._program.back_up(self._device.path, file)
        print(f"the header of {self._name} is in {file}; keep it as you keep keys")

    def restore(self, file: str, *, is_open: Callable[[], bool], confirmed: bool) -> None:
        """Put a header back, if it is the volume's. Raises BadField, VolumeInUse, NotConfirmed."""
        doubt = self._doubt_of(file, is_open)
        asked = f"Overwrite the header of {self._name} with that of {file}?{doubt}"
        if not confirmed:
            if not terminal.confirmed(asked):
                raise errors.NotConfirmed(self._name, "changed")
            # Meanwhile it may have been staged, or be re-encrypted.
            if self._doubt_of(file, is_open) != doubt:
                raise errors.NotConfirmed(self._name, "changed")
        self._forget_key()
        self._program.restore(self._device.path, file)
        print(f"{self._name} has the header of {file}")

    def _doubt_of(self, file: str, is_open: Callable[[], bool]) -> str:
        """Check that the header may be restored; return what else to warn of."""
        if is_open():
            raise errors.VolumeInUse(self._name, "it is open; unstage it first")
        try:
            kept = luks.read(Kernel(), file)
        except OSError:
            kept = None
        if kept is None:
            raise errors.BadField("FILE", f"{file} is not a backup of a LUKS2 header")
        present = luks.read(self._kernel, self._device.path)
        own = own_uuid(self._device) if present is None else present.uuid
        if present is not None:
            self._require_settled(present)
        if present is not None and kept.uuid != own:
            raise errors.BadField("FILE", f"it is of the header {kept.uuid}, not of {own}")
        # A copy that 0.2.0 had re-encrypted may have the UUID of its source's header.
        if present is not None and kept.reading != present.reading:
            raise errors.BadField("FILE", "it is of another master key, or of data elsewhere")
        return "" if kept.uuid == own else " This volume was made with another header."

    def rekey(self, key_file: str, new_key_file: str, *, recovery: bool) -> None:
        """Change the volume's key, or add a recovery key."""
        header = self._header()
        self._require_settled(header)
        slots, device = header.slots, self._device.path
        if key_file == new_key_file == _STANDARD_INPUT:
            raise errors.BadField(
                "--new-key-file", "only one of the two keys can be at standard input"
            )
        old = _key("key", key_file)
        new = _key("new key", new_key_file)
        with Keys(new, old).used():
            if new.data == old.data:
                raise errors.BadField("new key", "is the key that it has")
            if not self._program.check(device, old.data):
                raise errors.BadField("key", f"it does not open {self._name}")
            if recovery:
                if luks.RECOVERY in slots:
                    self._program.kill(device, old.data, luks.RECOVERY)
                self._program.add(device, old.data, new.data, luks.RECOVERY)
            else:
                self._forget_key()
                encrypt.change(self._program, slots, device, old, new)
        self._copies.keep(self._device, anew=True)
        print(f"{self._name} has {'a recovery' if recovery else 'a new'} key")

    def _require_settled(self, header: Header) -> None:
        """Raise Reencrypting: a header kept during re-encryption is soon outdated."""
        if header.is_reencrypting:
            raise errors.Reencrypting(self._name, self._device.path)

    def _header(self) -> Header:
        header = luks.read(self._kernel, self._device.path)
        if header is None:
            raise errors.HeaderDamaged(self._name, "its header is not there, or not whole")
        return header


def _key(what: str, file: str) -> Key:
    """Read a key from a file, standard input or the terminal."""
    if file:
        return key_in(file, what)
    return of_text(what, getpass.getpass(f"{what[0].upper()}{what[1:]}: "))


def key_in(file: str, what: str = "key") -> Key:
    """Read all bytes of a file or standard input as a key. Raises BadField, NotReady."""
    if file == _STANDARD_INPUT:
        data = bytearray(sys.stdin.buffer.read(MOST_BYTES + 1))
        if not 0 < len(data) <= MOST_BYTES:
            data[:] = bytes(len(data))
            raise errors.BadField(what, f"must have 1 to {MOST_BYTES} bytes, at standard input")
        return Key(data)
    return encrypt.read_key(file)
