"""dm-crypt devices of encrypted volumes: closed, their headers erased, copies of headers kept."""

import logging
import os
import uuid
from pathlib import Path

from agent.core import errors, users
from agent.core.context import Context
from agent.core.records import Volume
from lvm import thin
from lvm.devices import Device
from mount import cryptsetup, luks, table
from mount.cryptsetup import Cryptsetup
from mount.errors import CryptFailed
from mount.kernel import Kernel

_log = logging.getLogger(__name__)


class HeaderCopies:
    """Those in a directory; none are kept where there is no directory."""

    def __init__(self, directory: Path | None, program: Cryptsetup) -> None:
        self._directory = directory
        self._cryptsetup = program

    def keep(self, device: Device, *, anew: bool = False) -> None:
        """Keep a copy of a volume's header; a command at the first time.

        Of one whose keys changed it is made `anew`: the old one opens by the old key. One that
        cannot be kept is told in the log, and keeps no pod waiting.
        """
        if self._directory is None:
            return
        file = self._directory / f"{device.logical.uuid}.luks"
        if file.exists() and not anew:
            return
        unfinished = file.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.unlink(missing_ok=True)
            self._cryptsetup.back_up(device.logical.path, str(unfinished))
            # A copy that counts is whole, also when the power fails.
            _flush(unfinished)
            unfinished.replace(file)
            _flush(self._directory)
        except (OSError, CryptFailed) as error:
            _log.error("no copy of the header of %s is kept: %s", device.logical.path, error)

    def forget(self, uuid: str) -> None:
        """Remove the copy of a logical volume, by its UUID, with dashes or without."""
        if self._directory is not None:
            (self._directory / f"{uuid.replace('-', '')}.luks").unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Any other UUID would do as well.
_NAMESPACE = uuid.UUID("5b9f7f0a-6b0e-4d5c-9d27-0f0f8c1f6c3e")
# A thin pool that is fuller than this has perhaps no chunk for what is overwritten.
_FULL_PERCENT = 99.0


class Mappings:
    """Closes and erases; the key is asked for elsewhere (agent/operations/encrypt.py)."""

    def __init__(self, context: Context) -> None:
        self._kernel, self._inventory = context.kernel, context.inventory
        self._devices = context.devices
        waits = context.config.lvm != "host" and cryptsetup.has_udev()
        self.cryptsetup = Cryptsetup(context.run, waits_for_udev=waits)
        self.copies = HeaderCopies(context.config.header_backups, self.cryptsetup)

    def is_used(self, mapping: Device) -> bool:
        """Whether a dm-crypt device is mounted or published somewhere; no command."""
        known = table.read(self._kernel)
        parts = known.of_device(mapping.number)
        return bool(parts or users.places(self._kernel, known, mapping))

    def close_unused(self, volume_id: str) -> None:
        """Close the volume where it is open and nowhere used; a command, none where it is closed.

        Raises CryptBusy for one that a process has open.
        """
        device = self._inventory.device(volume_id)
        if device is None:
            return
        self._devices.close_leftovers(device.logical)
        if device.below is not None and not self.is_used(device):
            self.cryptsetup.close(device.name)

    def ensure_closed(self, volume: Volume) -> None:
        """Close a volume that was just found unused; raises VolumeInUse where it is not."""
        mapping = self._inventory.mapping(volume)
        if mapping is None:
            return
        if self.is_used(mapping):
            raise errors.VolumeInUse(str(volume.id), f"{mapping.path} is mounted or published")
        self.cryptsetup.close(mapping.name)

    def erase(self, volume: Volume) -> None:
        """Overwrite an encrypted volume's header and key slots: nobody can read it from then on.

        The copy that Carver kept goes first. A command where it is not active. Of a thin volume it
        takes no chunk that its pool has not: where that is full, what is left of the header goes
        with the chunk that it is in.
        """
        active = self._inventory.activate(volume)
        self.copies.forget(active.logical.uuid)
        pool = thin.status_of(self._inventory.status(volume.group.name, volume.name))
        if pool is not None and (pool.mode != "rw" or pool.data_percent >= _FULL_PERCENT):
            _log.warning("the header of %s is not overwritten: its pool is full", volume.id)
            return
        device = active.path
        length = volume.header_bytes or 2 * luks.METADATA_BYTES
        self._kernel.zero_out(device, 0, min(length, self._kernel.device_size_bytes(device)))
        self._kernel.flush(device)


def own_uuid(device: Device) -> str:
    """The UUID of a volume's header that has a master key of its own: no copy's has it."""
    return str(uuid.uuid5(_NAMESPACE, device.logical.uuid))


def progress(kernel: Kernel, device: Device) -> str:
    """How much of a volume has a new master key, by the header on its own device; no command."""
    header = luks.read(kernel, device.path)
    if header is None or not header.is_reencrypting:
        return "not begun"
    size_bytes = kernel.device_size_bytes(device.path) - header.offset_bytes
    return f"{100 * header.renewed_bytes // max(1, size_bytes)} % of {size_bytes} bytes"
