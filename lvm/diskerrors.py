"""What the kernel counted against a disk, from sysfs: no disk is touched."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

# Commands that failed so long ago are history.
_LASTS_SECONDS = 3600.0


@dataclass(frozen=True)
class _Count:
    first: int
    last: int
    grew_seconds: float | None = None


class DiskErrors:
    """Remembers what it saw: a disk's count of errors begins with what it cannot do, and asks for.

    `sysfs` is for tests.
    """

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._sysfs = sysfs
        self._counts: dict[str, _Count] = {}

    def of(self, path: str, now_seconds: float | None = None) -> tuple[str, ...]:
        """What is known against the disks that a block device stands on, a phrase for each.

        Sectors that the kernel knows to be bad (its badblocks); commands to a SCSI or ATA disk that
        failed within the last hour since this process first looked (ioerr_cnt,
        drivers/scsi/scsi_sysfs.c). NVMe disks count nothing here. `now_seconds` is monotonic.
        """
        now = time.monotonic() if now_seconds is None else now_seconds
        name = os.path.realpath(path).rpartition("/")[2]
        return tuple(word for disk in sorted(self._below(name)) for word in self._found(disk, now))

    def _below(self, name: str) -> set[str]:
        """The disks that a device stands on: itself, without partitions, MD, crypt and so on."""
        place = (self._sysfs / "class/block" / name).resolve()
        if (place / "partition").exists():
            return self._below(place.parent.name)
        slaves = [one.name for one in place.glob("slaves/*")]
        return set().union(*map(self._below, slaves)) if slaves else {name}

    def _found(self, disk: str, now: float) -> list[str]:
        place, found = self._sysfs / "class/block" / disk, []
        if bad := len(_text(place / "badblocks").splitlines()):
            found.append(f"{disk} has {bad} range(s) of sectors that cannot be read")
        if counted := _text(place / "device/ioerr_cnt"):
            number = int(counted, 16)
            before = self._counts.get(disk, _Count(number, number))
            grew = now if number > before.last else before.grew_seconds
            # Whatever was counted and is over is not counted again with what comes later.
            over = grew is not None and now - grew >= _LASTS_SECONDS
            first = number if over or number < before.last else before.first
            self._counts[disk] = _Count(first, number, None if over else grew)
            if number > first:
                found.append(f"{number - first} command(s) to {disk} failed within the last hour")
        return found


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""  # this disk has no such counter, or went away
