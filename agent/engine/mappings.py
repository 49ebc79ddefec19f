"""The dm-crypt devices of encrypted volumes: closed when nobody uses them; headers, erased."""

import logging
import uuid

from agent import errors
from agent.engine import users
from agent.engine.header_copies import HeaderCopies
from agent.engine.means import Means
from agent.engine.records import Volume
from lvm import pools
from lvm.devices import Device
from mount import cryptsetup, luks, table
from mount.cryptsetup import Cryptsetup
from mount.syscalls import Kernel

_log = logging.getLogger(__name__)

# Any other UUID would do as well.
_NAMESPACE = uuid.UUID("5b9f7f0a-6b0e-4d5c-9d27-0f0f8c1f6c3e")
# A thin pool that is fuller than this has perhaps no chunk for what is overwritten.
_FULL_PERCENT = 99.0


class Mappings:
    """Closes and erases; the key is asked for elsewhere (agent/publish/opening.py)."""

    def __init__(self, means: Means) -> None:
        self._kernel, self._inventory = means.kernel, means.inventory
        self._devices = means.devices
        waits = means.config.lvm != "host" and cryptsetup.has_udev()
        self.cryptsetup = Cryptsetup(means.run, waits_for_udev=waits)
        self.copies = HeaderCopies(means.config.header_backups, self.cryptsetup)

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
        pool = pools.status_of(self._inventory.status(volume.group.name, volume.name))
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
