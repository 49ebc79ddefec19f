"""The group that Carver makes for itself where none is configured: a sparse file, looped.

Every step is one that is looked for first, so a start after a crash or a reboot takes up where
the last one ended: file, loop device, group.
"""

import logging
import os

from agent import errors
from agent.config import BackingFile
from lvm import groups, report
from lvm.command import Run
from lvm.lvm2 import Lvm
from mount import filesystem, loop
from mount.syscalls import Kernel

_log = logging.getLogger(__name__)

_MINIMUM_BYTES = 64 << 20
_DISK_LABEL = "LVM2_member"

# How a group that Carver made is told from one that an operator made.
FACTS = {"embedded": "file"}


def ensure_device(kernel: Kernel, backing: BackingFile) -> str:
    """The loop device on the backing file, which is made where it is not there; raises NotReady."""
    path = backing.path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Never truncated: an existing file holds volumes, whatever size is configured now.
        with open(path, "ab", opener=_private) as file:
            if file.seek(0, os.SEEK_END) == 0:
                size_bytes = _planned_bytes(backing)
                file.truncate(size_bytes)
                _log.info("made %s, %d bytes, sparse", path, size_bytes)
    except OSError as error:
        raise errors.NotReady(f"{path}: {error.strerror}") from None
    return loop.attach(kernel, str(path))


def ensure_group(run: Run, lvm: Lvm, name: str, device: str) -> None:
    """The group on the loop device, made where the device is proved blank; raises NotReady."""
    known = report.read(lvm)
    if name in known.groups:
        return
    found = filesystem.probe(run, device)
    # The label of a disk that no group has is what vgcreate leaves when it is killed half-way.
    orphan = found is not None and found.fs_type == _DISK_LABEL and not known.groups
    if found is not None and not orphan:
        raise errors.NotReady(f"{device} holds {found}, not the group {name}; it is left untouched")
    groups.create(lvm, name, [device], FACTS)
    _log.info("made volume group %s on %s", name, device)


def _planned_bytes(backing: BackingFile) -> int:
    """The size for a new file. More than is free would fail its volumes' writes later."""
    status = os.statvfs(backing.path.parent)
    free = status.f_bavail * status.f_frsize
    planned = backing.size_bytes or free // 2 // _MINIMUM_BYTES * _MINIMUM_BYTES
    if not _MINIMUM_BYTES <= planned <= free:
        raise errors.NotReady(
            f"{backing.path.parent} has {free} bytes free; the group's file, of {planned} bytes,"
            f" must fit there and be {_MINIMUM_BYTES} at least: see --file and --file-size"
        )
    return planned


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
