"""The benchmark's volume group: its own, on a sparse file, or one that exists and is empty.

Its own group may have as many volumes as are wanted. Hundreds of lvcreate would take minutes: one
volume that Carver made is written into the group's metadata many times over (vgcfgrestore(8)). All
but the first are inactive.
"""

import random
import re
import string
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from performance.bare import run

NAME = "carver_bench"
_FILE_SIZE = "8G"
# Of four hundred volumes; lvm2 keeps the old text beside the new.
_METADATA_SIZE = "8m"
# The digits that become a volume's number, in its name and in its tags.
FIRST = "many-0000"
# A volume's section of the metadata; how long a piece is, and where on the disk it begins.
_SECTION = re.compile(r"^\t\t\S+ \{\n.*?^\t\t\}\n", re.M | re.S)
_PIECE = re.compile(r'extent_count = (\d+).*?"pv\d+", (\d+)', re.S)
# The same of a snapshot's name.
SNAPSHOT = "shot-0000"
# Behind the metadata area, and before the first extent.
_DATA_BYTES = 16 << 20
_LETTERS = string.digits + string.ascii_letters


@dataclass(frozen=True)
class Group:
    """The group, and the directory with its file and its metadata."""

    directory: Path
    disk: str

    def keep(self) -> None:
        run("vgcfgbackup", "--file", str(self._text), "--", NAME)

    def fill(self, volumes: int) -> None:
        """Have so many volumes. Nobody else may use it meanwhile, and all others are gone."""
        run("vgchange", "--activate", "n", "--", NAME)
        many = self.directory / f"{volumes}.vg"
        many.write_text(multiplied(self._text.read_text(), volumes))
        run("vgcfgrestore", "--yes", "--file", str(many), "--", NAME)

    def multiply_snapshot(self, snapshots: int, origin: str) -> None:
        """Have the one snapshot of a volume so many times, all of them active and empty.

        Nobody else may use the group meanwhile.
        """
        run("vgchange", "--activate", "n", "--", NAME)
        one, many = self.directory / "snapshot.vg", self.directory / "snapshots.vg"
        run("vgcfgbackup", "--file", str(one), "--", NAME)
        many.write_text(multiplied_snapshot(one.read_text(), snapshots))
        run("vgcfgrestore", "--yes", "--force", "--file", str(many), "--", NAME)
        # A store that begins with zeroes is a new one's (drivers/md/dm-snap-persistent.c).
        run("blkdiscard", "--force", "--offset", str(_DATA_BYTES), self.disk)
        run("lvchange", "--activate", "y", "--ignoreactivationskip", "--", f"{NAME}/{origin}")

    @property
    def _text(self) -> Path:
        return self.directory / "one.vg"


@contextmanager
def made(directory: Path) -> Iterator[Group]:
    """An empty group; afterwards nothing is left of it."""
    file = directory / "disk"
    run("truncate", "--size", _FILE_SIZE, str(file))
    disk = run("losetup", "--find", "--show", str(file)).strip()
    try:
        run("vgcreate", "--yes", "--metadatasize", _METADATA_SIZE, "--", NAME, disk)
        try:
            yield Group(directory, disk)
        finally:
            run("vgremove", "--force", "--force", "--yes", "--", NAME)
    finally:
        run("losetup", "--detach", disk)
        file.unlink()


class NotEmpty(Exception):
    """The group cannot be measured: it is not there, or has logical volumes."""


def require_empty(name: str) -> None:
    """Raise NotEmpty for a group that is not there, or that has logical volumes.

    What is measured in a group that was given is deleted again, and nothing else may be there.
    """
    words = ("vgs", "--noheadings", "--options", "lv_count", "--", name)
    try:
        count = run(*words).strip()
    except subprocess.CalledProcessError as error:
        raise NotEmpty(f"cannot measure group {name}: {error.stderr.strip()}") from error
    if count != "0":
        raise NotEmpty(
            f"cannot measure group {name}: it has {count} logical volumes; give an empty group"
        )


def left_in(name: str) -> list[str]:
    """Return the logical volumes of a group."""
    return run("lvs", "--noheadings", "--options", "lv_name", "--", name).split()


def multiplied(text: str, volumes: int) -> str:
    """A group's metadata with its one volume so many times; raises ValueError without one.

    Each has a name, a UUID and extents of its own, the ones behind the other's.
    """
    found = re.search(r"^\tlogical_volumes \{\n\n?(\t\t\S+ \{\n.*?^\t\t\}\n)", text, re.M | re.S)
    if found is None or FIRST not in found[1]:
        raise ValueError(f"the metadata have no volume {FIRST}")
    chance = random.Random(volumes)
    copies = [_copy(found[1], number, chance) for number in range(1, volumes)]
    return text[: found.end(1)] + "".join(f"\n{one}" for one in copies) + text[found.end(1) :]


def multiplied_snapshot(text: str, snapshots: int) -> str:
    """A group's metadata with its one snapshot so many times; raises ValueError without one.

    A snapshot is two sections: its area, and what ties that to the origin.
    """
    sections = [one for one in _SECTION.findall(text) if SNAPSHOT in one]
    if len(sections) != 2:
        raise ValueError(f"the metadata have no snapshot {SNAPSHOT}")
    chance = random.Random(snapshots)
    free = max(int(start) + int(length) for length, start in _PIECE.findall(text))
    copies = [
        _copy(one, number, chance, SNAPSHOT, free).replace(
            "\t\tsnapshot0 {", f"\t\tsnapshot{number} {{"
        )
        for number in range(1, snapshots)
        for one in sections
    ]
    end = text.index(sections[-1]) + len(sections[-1])
    return text[:end] + "".join(f"\n{one}" for one in copies) + text[end:]


def _copy(
    section: str, number: int, chance: random.Random, name: str = FIRST, free: int | None = None
) -> str:
    """A section for another volume; its extents are that many times its own behind, or `free`."""
    extents = int(re.findall(r"extent_count = (\d+)", section)[0])
    section = section.replace(name, name.replace("0000", f"{number:04}"))
    section = re.sub(r'(\tid = )"[^"]+"', rf'\1"{_uuid(chance)}"', section, count=1)
    return re.sub(
        r'("pv\d+", )(\d+)',
        lambda place: f"{place[1]}{(int(place[2]) if free is None else free) + number * extents}",
        section,
    )


def _uuid(chance: random.Random) -> str:
    parts = (6, 4, 4, 4, 4, 4, 6)
    return "-".join("".join(chance.choices(_LETTERS, k=length)) for length in parts)
