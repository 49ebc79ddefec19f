"""Copies of encrypted volumes' headers, as files on the node: made, made anew, removed."""

import logging
import os
from pathlib import Path

from lvm.devices import Device
from mount.cryptsetup import Cryptsetup
from mount.errors import CryptFailed

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
