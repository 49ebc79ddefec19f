"""Read disks side by side: labels, whether a group's metadata changed, errors that were counted."""

import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lvm import blockdevices, labels
from lvm.blockdevices import BlockDevices, Excluded
from lvm.labels import Damaged, Mark, PhysicalLabel
from mount.block_devices import attribute

_T = TypeVar("_T")

# What a disk that works does not need, also one that has to spin up first.
PATIENCE_SECONDS = 10.0
# How long a disk's thread is kept for the next read.
_IDLE_SECONDS = 60.0


@dataclass(frozen=True)
class Unreadable:
    """A disk that does not let itself be read."""

    problem: str

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True)
class Unanswered(Unreadable):
    """A disk that did not answer in time, and may never."""

    problem: str = "it does not answer: see `dmesg`"


Found = PhysicalLabel | Damaged | Unreadable | Excluded
# Equal to an earlier one only if no metadata were committed in between, on the same disks.
Fingerprint = tuple[Mark, ...]


class Disks:
    """Read the labels of disks, in a thread for each; tests put a subclass in its place."""

    def __init__(
        self,
        sysfs: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        backing: Callable[[str], int] = blockdevices.backing,
    ) -> None:
        self._sysfs, self._dev, self._backing = sysfs, dev, backing
        self._guard = threading.Lock()
        self._readers: dict[str, _Reader] = {}
        # The reads that did not end in time, by the path.
        self._late: dict[str, Future[Any]] = {}

    def scan(
        self,
        patience_seconds: float = PATIENCE_SECONDS,
        only: Collection[str] = (),
    ) -> Mapping[str, Found]:
        """Read every block device, or `only` those paths; blank ones are left out."""
        end = time.monotonic() + patience_seconds
        devices = BlockDevices(self._sysfs)
        every = {name: str(self._dev / name.replace("!", "/")) for name in devices.names}
        paths = {name: path for name, path in every.items() if not only or path in only}
        loops = devices.loops_under(paths)
        under = self._each(self._backing, [every[name] for name in loops], end)
        backings = {name: under[every[name]] for name in loops}
        known = {name: one for name, one in backings.items() if not isinstance(one, Unreadable)}
        found: dict[str, Found | None] = {
            paths[name]: one for name, one in devices.excluded(known).items() if name in paths
        }
        found |= self._each(labels.read, paths.values() - found.keys(), end)
        for name, path in paths.items():
            if isinstance(one := found[path], PhysicalLabel):
                found[path] = replace(
                    one,
                    kind=devices.kind(name, known),
                    active_groups=devices.active_groups(name),
                    sequence=devices.sequence(name),
                )
        return {path: one for path, one in found.items() if one is not None}

    def fingerprint(
        self, paths: Collection[str], patience_seconds: float = PATIENCE_SECONDS
    ) -> Fingerprint | None:
        """Identify the state of a group's metadata on these disks.

        None where one of the disks cannot be read or has no whole label, or if none has metadata.
        """
        marks = self._each(labels.mark, sorted(paths), time.monotonic() + patience_seconds)
        proof = tuple(one for one in marks.values() if isinstance(one, Mark))
        whole = len(proof) == len(marks) and any(one.texts for one in proof)
        return proof if whole else None

    def sequences(self, paths: Collection[str]) -> Mapping[str, str]:
        """The sequence numbers of those of these disks that are attached; reads no disk.

        Each attachment has another (sysfs `diskseq`, Linux 5.15; "unknown" before).
        """
        devices = BlockDevices(self._sysfs)
        names = {path: path.removeprefix(f"{self._dev}/").replace("/", "!") for path in paths}
        found = {path: devices.sequence(name) for path, name in names.items()}
        return {path: sequence for path, sequence in found.items() if sequence}

    def _each(
        self, look: Callable[[str], _T], paths: Iterable[str], end: float
    ) -> dict[str, _T | Unreadable]:
        """Read each disk; the result, or why there is none at that time (monotonic)."""
        begun = {path: self._begin(look, path) for path in paths}
        return {path: self._ended(path, future, end) for path, future in begun.items()}

    def _begin(self, look: Callable[[str], _T], path: str) -> Future[_T | Unreadable] | None:
        """Read a disk in its thread; None while an earlier read of it is waited for."""
        late = self._late.get(path)
        if late is not None and not late.done():
            return None
        self._late.pop(path, None)
        future = Future[_T | Unreadable]()
        with self._guard:
            reader = self._readers.get(path)
            if reader is None:
                reader = self._readers[path] = _Reader(path, self._is_idle)
            reader.tasks.put(partial(_fulfil, future, look, path))
        return future

    def _ended(
        self, path: str, future: Future[_T | Unreadable] | None, end: float
    ) -> _T | Unreadable:
        if future is None:
            return Unanswered()
        try:
            return future.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            self._late[path] = future
            return Unanswered()

    def _is_idle(self, reader: "_Reader") -> bool:
        """Whether a disk's thread has nothing to do; then it is forgotten, and has to end."""
        with self._guard:
            if not reader.tasks.empty():
                return False
            del self._readers[reader.path]
            return True


class _Reader:
    """A disk's thread, kept for further reads: each call reads, and a new thread costs as much.

    With a thread for each read (`mount.command.begin`) a fingerprint takes twice as long: 740 us in
    place of 380 for two disks. Reads of a disk that hangs wait in one thread.
    """

    def __init__(self, path: str, is_idle: "Callable[[_Reader], bool]") -> None:
        self.path = path
        self.tasks = queue.SimpleQueue[Callable[[], None]]()
        self._is_idle = is_idle
        # A daemon, as no pool's threads are: the process ends without the disk.
        threading.Thread(target=self._run, name=f"disk {path}", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                task = self.tasks.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                if self._is_idle(self):
                    return
            else:
                task()


def _fulfil(future: Future[_T | Unreadable], look: Callable[[str], _T], path: str) -> None:
    try:
        future.set_result(look(path))
    except OSError as error:
        future.set_result(Unreadable(error.strerror or str(error)))
    except BaseException as error:
        future.set_exception(error)


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
        if bad := len(attribute(f"{place}/badblocks").splitlines()):
            found.append(f"{disk} has {bad} range(s) of sectors that cannot be read")
        if counted := attribute(f"{place}/device/ioerr_cnt"):
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
