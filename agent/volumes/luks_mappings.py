"""Close dm-crypt devices, erase LUKS2 headers, and back headers up."""

import logging
import math
import os
import uuid
from pathlib import Path

from agent.core import errors
from agent.volumes import users
from agent.volumes.backing import Backing
from agent.volumes.context import Context
from agent.volumes.erase_policy import LONGEST_HEADER_BYTES
from agent.volumes.records import Volume
from lvm import thin
from lvm.active_devices import Device
from mount import luks, table
from mount.block_io import By
from mount.kernel import Kernel
from mount.luks import Cryptsetup, Header
from mount.mount_errors import CryptBusy, CryptFailed

_log = logging.getLogger(__name__)


class HeaderCopies:
    """Backups of LUKS2 headers in a directory; without a directory, no backups are kept."""

    def __init__(self, directory: Path | None, program: Cryptsetup) -> None:
        self._directory = directory
        self._cryptsetup = program

    def keep(self, device: Device, *, overwrite: bool = False) -> None:
        """Back up a volume's LUKS2 header; run one command at most. Failures are only logged.

        An existing backup is kept, unless `overwrite` is true. Callers set `overwrite` after a
        change of keys, because the earlier backup opens by the old key.
        """
        if self._directory is None:
            return
        file = self._directory / f"{device.logical.uuid}.luks"
        if file.exists() and not overwrite:
            return
        unfinished = file.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.unlink(missing_ok=True)
            self._cryptsetup.back_up(device.logical.path, str(unfinished))
            # Flush the file before it is renamed. So a backup with its final name is complete, even
            # after a power loss.
            _flush(unfinished)
            unfinished.replace(file)
            _flush(self._directory)
        except (OSError, CryptFailed) as error:
            _log.error("no copy of the header of %s is kept: %s", device.logical.path, error)

    def forget(self, uuid: str) -> None:
        """Remove the backup of the LUKS2 header of a logical volume, if there is one.

        `uuid` is the logical volume's UUID, with or without dashes.
        """
        if self._directory is not None:
            (self._directory / f"{uuid.replace('-', '')}.luks").unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Flush a file or a directory to the disk (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Namespace of the UUIDs of LUKS2 headers (RFC 4122, version 5), chosen at random.
_NAMESPACE = uuid.UUID("5b9f7f0a-6b0e-4d5c-9d27-0f0f8c1f6c3e")
# Percentage of a thin pool's data from which the LUKS2 headers of its volumes are not overwritten.
# Such a pool may have no chunk left for an overwritten header.
_FULL_PERCENT = 99.0


class Mappings:
    """Closes encrypted volumes and erases their headers; agent/operations/encrypt.py opens them."""

    def __init__(self, context: Context) -> None:
        self._kernel = context.kernel
        self._activator = context.activator
        self._devices = context.devices
        self._configuration = context.configuration
        waits_for_udev = context.config.lvm != "host" and luks.has_udev()
        self.cryptsetup = Cryptsetup(context.run, waits_for_udev=waits_for_udev)

    @property
    def copies(self) -> HeaderCopies:
        """The backups of LUKS2 headers, in the directory that the configuration names now."""
        return HeaderCopies(self._configuration.now.header_backups, self.cryptsetup)

    def is_used(self, mapping: Device) -> bool:
        """Whether a dm-crypt device is mounted or published. Runs no command."""
        mounts = table.read(self._kernel)
        parts = mounts.of_device(mapping.number)
        return bool(parts or users.mounts_of_volume(self._kernel, mounts, mapping))

    def close_unused(self, volume: Backing) -> None:
        """Close the dm-crypt device of a volume, unless it is mounted or published.

        Also removes dm-crypt devices that a killed cryptsetup left on the volume. Does nothing for
        an inactive volume, and runs one command at most. Raises CryptBusy if a program has the
        dm-crypt device open; the error names the program.
        """
        device = self._activator.device(volume)
        if device is None:
            return
        self._devices.close_leftovers(device.logical)
        if device.below is not None and not self.is_used(device):
            try:
                self.cryptsetup.close(device.name)
            except CryptBusy as error:
                raise CryptBusy(device.name, users.holders(self._kernel, device)) from error

    def ensure_closed(self, volume: Volume) -> None:
        """Close the dm-crypt device of a volume, if there is one.

        Raises VolumeInUse if the device is mounted or published.
        """
        mapping = self._activator.mapping(volume)
        if mapping is None:
            return
        if self.is_used(mapping):
            raise errors.VolumeInUse(str(volume.id), f"{mapping.path} is mounted or published")
        self.cryptsetup.close(mapping.name)

    def erase(self, volume: Volume) -> None:
        """Overwrite a volume's LUKS2 header with its key slots, so that it cannot be opened again.

        1. Activate the volume, by one command if it is inactive.
        2. Remove the backup of the header.
        3. If the volume is in a thin pool that is full or read-only, log that and return: the
           header cannot be overwritten, and is discarded with its chunk.
        4. Zero the header and read all of it back. If it is not zero, overwrite it by writes:
           otherwise the header would open what is left of the volume's data.
        5. Flush the device.
        """
        active = self._activator.activate(volume)
        self.copies.forget(active.logical.uuid)
        pool = thin.status_of(self._activator.status(volume.group.name, volume.name))
        if pool is not None and (pool.mode != "rw" or pool.data_percent >= _FULL_PERCENT):
            _log.warning("the header of %s is not overwritten: its pool is full", volume.id)
            return
        device = active.path
        length = volume.header_bytes or self._found_bytes(device)
        length = min(length, self._kernel.device_size_bytes(device))
        self._kernel.zero_out(device, 0, length)
        step = math.gcd(length, 1 << 20)
        if not self._kernel.are_zero(device, range(0, length, step), step):
            self._kernel.zero_out(device, 0, length, method=By.WRITES)
        self._kernel.flush(device)

    def _found_bytes(self, path: str) -> int:
        """Return the length of the LUKS2 header on a device, as the header says, in bytes.

        Used if the tag with the length is lost. If the device has no whole header, the result is
        LONGEST_HEADER_BYTES.
        """
        luks_header = luks.read(self._kernel, path)
        return LONGEST_HEADER_BYTES if luks_header is None else luks_header.offset_bytes


def own_uuid(device: Device) -> str:
    """Return the UUID that Carver gives to a LUKS2 header that it makes on this volume.

    It is derived from the UUID of the logical volume. A header that was copied from another volume
    has the UUID of that volume's header instead.
    """
    return str(uuid.uuid5(_NAMESPACE, device.logical.uuid))


def header(kernel: Kernel, path: str, volume_id: str) -> Header:
    """Read the LUKS2 header of a volume from its device; raise HeaderDamaged if it is not whole."""
    luks_header = luks.read(kernel, path)
    if luks_header is None:
        raise errors.HeaderDamaged(volume_id, "its header is not whole")
    return luks_header
