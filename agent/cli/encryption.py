"""Show, back up, restore and re-key the headers of encrypted volumes, by hand.

The functions work on the device of a volume and not through the service, so that no key goes
through a socket.
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
    """The commands on the LUKS2 header of one active volume, such as `carver volume rekey`.

    `device` is the device of the volume's logical volume, on which the header is.
    """

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
        # Function that removes the key's name from the volume's tags; called before the volume gets
        # another key.
        self._forget_key = forget_key

    def show(self) -> None:
        """Print the header's UUID, key slots, cipher, key derivation and pending re-encryption."""
        header = self._header()
        grid = terminal.table("", "")
        grid.add_row("uuid", header.uuid)
        grid.add_row("slots", ", ".join(map(str, header.slots)) or "none: no key can open it")
        grid.add_row("data", f"from byte {header.offset_bytes}")
        grid.add_row("cipher", f"{header.cipher}, sectors of {header.sector_bytes} bytes")
        grid.add_row("key derivation", ", ".join(header.key_derivation))
        if header.is_reencrypting:
            grid.add_row("re-encryption", "begun, and not ended: cryptsetup must end it")
        terminal.console().print(grid)

    def back_up(self, file: str) -> None:
        """Back up the header, with its key slots, to a new file.

        Raises BadField if the file exists, Reencrypting while a re-encryption has not ended.
        """
        self._require_settled(self._header())
        if Path(file).exists():
            raise errors.BadField("FILE", f"{file} exists already")
        self._program.back_up(self._device.path, file)
        print(f"the header of {self._name} is in {file}; keep it as you keep keys")

    def restore(self, file: str, *, is_open: Callable[[], bool], confirmed: bool) -> None:
        """Restore the header from a backup, if the backup is of this volume's header.

        Also removes the key's name from the volume's tags. If the present header is damaged, any
        backup is accepted; the question to the user warns of a backup with another UUID than this
        volume's. Raises BadField for a file that is no backup of this header, VolumeInUse for an
        open volume, NotConfirmed if the user refuses, and Reencrypting while a re-encryption has
        not ended.
        """
        warning = self._check_backup(file, is_open)
        question = f"Overwrite the header of {self._name} with that of {file}?{warning}"
        if not confirmed:
            if not terminal.confirmed(question):
                raise errors.NotConfirmed(self._name, "changed")
            # Check again: while the user decided, the volume may have been staged or re-encrypted.
            if self._check_backup(file, is_open) != warning:
                raise errors.NotConfirmed(self._name, "changed")
        self._forget_key()
        self._program.restore(self._device.path, file)
        print(f"{self._name} has the header of {file}")

    def _check_backup(self, file: str, is_open: Callable[[], bool]) -> str:
        """Check that a backup of the header may be restored; return a warning to show, if any.

        Raises VolumeInUse for an open volume, BadField for a file that is no backup of this header,
        and Reencrypting while a re-encryption has not ended.
        """
        if is_open():
            raise errors.VolumeInUse(self._name, "it is open; unstage it first")
        try:
            backup = luks.read(Kernel(), file)
        except OSError:
            backup = None
        if backup is None:
            raise errors.BadField("FILE", f"{file} is not a backup of a LUKS2 header")
        header = luks.read(self._kernel, self._device.path)
        expected_uuid = own_uuid(self._device) if header is None else header.uuid
        if header is not None:
            self._require_settled(header)
        if header is not None and backup.uuid != expected_uuid:
            raise errors.BadField(
                "FILE", f"it is of the header {backup.uuid}, not of {expected_uuid}"
            )
        # Compare more than the UUIDs: a copy that Carver 0.2.0 re-encrypted may have a header with
        # the UUID of its source's header.
        if header is not None and backup.decryption_digest != header.decryption_digest:
            raise errors.BadField("FILE", "it is of another master key, or of data elsewhere")
        return "" if backup.uuid == expected_uuid else " This volume was made with another header."

    def rekey(self, key_file: str, new_key_file: str, *, recovery: bool) -> None:
        """Replace the volume's key by a new key, or set a recovery key beside the volume's key.

        Also renews the backup of the header, if backups are kept, and for a new key removes the
        old key's name from the volume's tags. Raises BadField for a bad key, HeaderDamaged, and
        Reencrypting while a re-encryption has not ended.
        """
        header = self._header()
        self._require_settled(header)
        slots, device = header.slots, self._device.path
        if key_file == new_key_file == _STANDARD_INPUT:
            raise errors.BadField(
                "--new-key-file", "only one of the two keys can be at standard input"
            )
        old_key = _key("key", key_file)
        new_key = _key("new key", new_key_file)
        with Keys(new_key, old_key).used():
            if new_key.data == old_key.data:
                raise errors.BadField("new key", "is the key that it has")
            if not self._program.check(device, old_key.data):
                raise errors.BadField("key", f"it does not open {self._name}")
            if recovery:
                if luks.RECOVERY in slots:
                    self._program.remove_key(device, old_key.data, luks.RECOVERY)
                self._program.add(device, old_key.data, new_key.data, luks.RECOVERY)
            else:
                self._forget_key()
                encrypt.change(self._program, slots, device, old_key, new_key)
        self._copies.keep(self._device, overwrite=True)
        print(f"{self._name} has {'a recovery' if recovery else 'a new'} key")

    def _require_settled(self, header: Header) -> None:
        """Raise Reencrypting for a header with a re-encryption that has not ended.

        A backup of such a header is soon outdated.
        """
        if header.is_reencrypting:
            raise errors.Reencrypting(self._name, self._device.path)

    def _header(self) -> Header:
        header = luks.read(self._kernel, self._device.path)
        if header is None:
            raise errors.HeaderDamaged(self._name, "its header is not there, or not whole")
        return header


def _key(key_name: str, file: str) -> Key:
    """Read a key from a file, from standard input for `-`, or from the terminal if no file."""
    if file:
        return key_in(file, key_name)
    return of_text(key_name, getpass.getpass(f"{key_name[0].upper()}{key_name[1:]}: "))


def key_in(file: str, key_name: str = "key") -> Key:
    """Read a key: all bytes of a file, or of standard input if the file is `-`.

    Raises BadField for standard input without a key, or with too much. Raises NotReady for a file
    that cannot be read, has a wrong length, or can be read by another user.
    """
    if file == _STANDARD_INPUT:
        data = bytearray(sys.stdin.buffer.read(MOST_BYTES + 1))
        if not 0 < len(data) <= MOST_BYTES:
            data[:] = bytes(len(data))
            raise errors.BadField(key_name, f"must have 1 to {MOST_BYTES} bytes, at standard input")
        return Key(data)
    return encrypt.read_key(file)
