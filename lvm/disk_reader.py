"""Read all disks of the node at the same time: labels, fingerprints, error counters.

Why: a disk may keep a read waiting for ever, and lvm2 reads all disks in one process, which then
hangs. Without this module one hung disk would stop all volume groups of the node. With it, finding
the disks takes ten seconds at most, and the groups on the other disks stay usable. lvm/labels.py
says what is read of a disk.

Idea: each disk has a thread of its own, in which all its reads happen one after another.

    scan, fingerprint ----+--> thread of sda --> label            A result after 10 s is
                          +--> thread of sdb --> label            Unanswered. Until that read
                          +--> thread of sdc --> (hangs)          ends, sdc is not read again.

1. Sysfs lists the block devices. Devices that cannot be physical volumes, or that stand on logical
   volumes, are excluded unread (lvm/candidate_devices.py).
2. The other devices are read, each in its thread, all with the same time limit.
3. A device that does not answer is reported as `Unanswered`. While its late read goes on, further
   reads of the device are refused at once, so that a hung disk holds one thread and no more.
"""

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

from lvm import candidate_devices, labels
from lvm.candidate_devices import BlockDevices, Excluded
from lvm.labels import Damaged, Mark, PhysicalLabel
from mount.block_devices import attribute
from mount.text import counted

_T = TypeVar("_T")

# Time limit of the reads of all disks, in seconds: longer than a working disk takes to spin up.
PATIENCE_SECONDS = 10.0
# Time without reads after which the thread of a disk ends, in seconds.
_IDLE_SECONDS = 60.0


@dataclass(frozen=True)
class Unreadable:
    """A disk whose read failed."""

    problem: str

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True)
class Unanswered(Unreadable):
    """A disk that did not answer a read within the time limit, and may never answer."""

    problem: str = "it does not answer: see `dmesg`"


# Result of a scan for one block device.
Found = PhysicalLabel | Damaged | Unreadable | Excluded
# State of a volume group's metadata on its disks. Two fingerprints of the same disks are equal only
# if lvm2 committed nothing in between.
Fingerprint = tuple[Mark, ...]


class Disks:
    """Reads labels and fingerprints of disks, each disk in its own thread.

    Tests pass an object of a subclass instead.
    """

    def __init__(
        self,
        sysfs: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        backing: Callable[[str], int] = candidate_devices.backing,
    ) -> None:
        self._sysfs, self._dev, self._backing = sysfs, dev, backing
        self._guard = threading.Lock()
        self._readers: dict[str, _Reader] = {}
        # The reads that have not ended within their time limit, by the paths of the disks.
        self._late: dict[str, Future[Any]] = {}

    def scan(
        self,
        patience_seconds: float = PATIENCE_SECONDS,
        only_paths: Collection[str] = (),
    ) -> Mapping[str, Found]:
        """Read the labels of every block device, or of the paths in `only_paths`.

        The result has an entry for each of these paths, except devices without a label.
        """
        end_monotonic_seconds = time.monotonic() + patience_seconds
        devices = BlockDevices(self._sysfs)
        all_paths = {name: str(self._dev / name.replace("!", "/")) for name in devices.names}
        paths = {
            name: path for name, path in all_paths.items() if not only_paths or path in only_paths
        }
        loops = devices.loops_under(paths)
        results_of_loops = self._read_each(
            self._backing, [all_paths[name] for name in loops], end_monotonic_seconds
        )
        backings = {name: results_of_loops[all_paths[name]] for name in loops}
        backing_numbers = {
            name: number for name, number in backings.items() if not isinstance(number, Unreadable)
        }
        results: dict[str, Found | None] = {
            paths[name]: excluded
            for name, excluded in devices.excluded(backing_numbers).items()
            if name in paths
        }
        results |= self._read_each(
            labels.read, paths.values() - results.keys(), end_monotonic_seconds
        )
        for name, path in paths.items():
            if isinstance(result := results[path], PhysicalLabel):
                results[path] = replace(
                    result,
                    kind=devices.kind(name, backing_numbers),
                    active_groups=devices.active_groups(name),
                    sequence=devices.sequence(name),
                )
        return {path: result for path, result in results.items() if result is not None}

    def fingerprint(
        self, paths: Collection[str], patience_seconds: float = PATIENCE_SECONDS
    ) -> Fingerprint | None:
        """Read the fingerprint of a volume group's metadata from the group's disks.

        None if a disk cannot be read or lacks an undamaged label, or if no disk has metadata.
        """
        marks = self._read_each(labels.mark, sorted(paths), time.monotonic() + patience_seconds)
        proof = tuple(mark for mark in marks.values() if isinstance(mark, Mark))
        is_complete = len(proof) == len(marks) and any(mark.texts for mark in proof)
        return proof if is_complete else None

    def sequences(self, paths: Collection[str]) -> Mapping[str, str]:
        """Look up the kernel's sequence numbers of disks in sysfs; absent disks are left out.

        The kernel gives a disk a new number whenever the disk is attached (`diskseq`, since Linux
        5.15; "unknown" on older kernels). No disk is read.
        """
        devices = BlockDevices(self._sysfs)
        names = {path: path.removeprefix(f"{self._dev}/").replace("/", "!") for path in paths}
        sequences = {path: devices.sequence(name) for path, name in names.items()}
        return {path: sequence for path, sequence in sequences.items() if sequence}

    def _read_each(
        self, read_disk: Callable[[str], _T], paths: Iterable[str], end_monotonic_seconds: float
    ) -> dict[str, _T | Unreadable]:
        """Call `read_disk` for each disk, in the disk's thread, and collect the results by path.

        A disk without a result at `end_monotonic_seconds` is Unanswered.
        """
        futures = {path: self._begin(read_disk, path) for path in paths}
        return {
            path: self._result_of(path, future, end_monotonic_seconds)
            for path, future in futures.items()
        }

    def _begin(self, read_disk: Callable[[str], _T], path: str) -> Future[_T | Unreadable] | None:
        """Start a read in the disk's thread; None while an earlier read of the disk is late."""
        late_result = self._late.get(path)
        if late_result is not None and not late_result.done():
            return None
        self._late.pop(path, None)
        future = Future[_T | Unreadable]()
        with self._guard:
            reader = self._readers.get(path)
            if reader is None:
                reader = self._readers[path] = _Reader(path, self._forget_if_idle)
            reader.tasks.put(partial(_fulfil, future, read_disk, path))
        return future

    def _result_of(
        self, path: str, future: Future[_T | Unreadable] | None, end_monotonic_seconds: float
    ) -> _T | Unreadable:
        if future is None:
            return Unanswered()
        try:
            return future.result(max(0.0, end_monotonic_seconds - time.monotonic()))
        except TimeoutError:
            self._late[path] = future
            return Unanswered()

    def _forget_if_idle(self, reader: "_Reader") -> bool:
        """Forget a thread without tasks, which must then end; False if the thread has tasks."""
        with self._guard:
            if not reader.tasks.empty():
                return False
            del self._readers[reader.path]
            return True


class _Reader:
    """The thread that reads one disk, kept for further reads.

    Nearly each RPC reads a fingerprint, and starting a thread takes as long as the read itself: a
    fingerprint of two disks takes 740 us with new threads (`mount.command.begin`), 380 us with kept
    ones. A hanging disk occupies only this one thread.
    """

    def __init__(self, path: str, forget_if_idle: "Callable[[_Reader], bool]") -> None:
        self.path = path
        self.tasks = queue.SimpleQueue[Callable[[], None]]()
        self._forget_if_idle = forget_if_idle
        # A daemon thread, so that the process can end while the disk hangs. ThreadPoolExecutor has
        # no daemon threads.
        threading.Thread(target=self._run, name=f"disk {path}", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                task = self.tasks.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                if self._forget_if_idle(self):
                    return
            else:
                task()


def _fulfil(future: Future[_T | Unreadable], read: Callable[[str], _T], path: str) -> None:
    try:
        future.set_result(read(path))
    except OSError as error:
        future.set_result(Unreadable(error.strerror or str(error)))
    except BaseException as error:
        future.set_exception(error)


# Time for which a disk's failed commands are reported after the last failure, in seconds.
_LASTS_SECONDS = 3600.0


@dataclass(frozen=True)
class _Count:
    """Two values of a disk's counter of failed commands, read at different times.

    The growth that is reported is `last_count` less `first_count`.
    """

    first_count: int
    last_count: int
    # When the counter grew last (monotonic); None if it has not grown since `first_count`.
    grew_monotonic_seconds: float | None = None


class DiskErrors:
    """Reports disks that have bad sectors or failed commands.

    A disk's error counter is not 0 at first, as the kernel tries commands at attachment that the
    disk does not support, and that count as failed. So this object remembers the counters, and
    reports only their growth. `sysfs` is for tests.
    """

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._sysfs = sysfs
        self._counts: dict[str, _Count] = {}

    def of(self, path: str, now_monotonic_seconds: float | None = None) -> tuple[str, ...]:
        """Describe the problems of the disks that a block device stands on, one phrase for each.

        Problems are bad sectors that the kernel has recorded (sysfs `badblocks`), and failed
        commands to a SCSI or ATA disk (`ioerr_cnt`, drivers/scsi/scsi_sysfs.c; NVMe disks have no
        such counter). Failed commands are reported until an hour has passed without a further one;
        their number counts from the first call for that disk, or from the last such hour.
        """
        now_seconds = time.monotonic() if now_monotonic_seconds is None else now_monotonic_seconds
        name = os.path.realpath(path).rpartition("/")[2]
        return tuple(
            problem
            for disk in sorted(self._below(name))
            for problem in self._found(disk, now_seconds)
        )

    def _below(self, name: str) -> set[str]:
        """The names of the whole disks that a block device stands on, or is itself.

        Partitions, MD, crypt and other devices in between are followed down to their disks.
        """
        directory = (self._sysfs / "class/block" / name).resolve()
        if (directory / "partition").exists():
            return self._below(directory.parent.name)
        slaves = [slave.name for slave in directory.glob("slaves/*")]
        return set().union(*map(self._below, slaves)) if slaves else {name}

    def _found(self, disk: str, now_monotonic_seconds: float) -> list[str]:
        directory, problems = self._sysfs / "class/block" / disk, []
        if bad_ranges := len(attribute(f"{directory}/badblocks").splitlines()):
            ranges_text = counted(bad_ranges, "range")
            problems.append(f"{disk} has {ranges_text} of sectors that cannot be read")
        if counter_text := attribute(f"{directory}/device/ioerr_cnt"):
            number = int(counter_text, 16)
            previous_count = self._counts.get(disk, _Count(number, number))
            grew_monotonic_seconds = (
                now_monotonic_seconds
                if number > previous_count.last_count
                else previous_count.grew_monotonic_seconds
            )
            # Errors older than an hour are left out of the growth that is counted from now on.
            is_old = (
                grew_monotonic_seconds is not None
                and now_monotonic_seconds - grew_monotonic_seconds >= _LASTS_SECONDS
            )
            first_count = (
                number
                if is_old or number < previous_count.last_count
                else previous_count.first_count
            )
            self._counts[disk] = _Count(
                first_count, number, None if is_old else grew_monotonic_seconds
            )
            if number > first_count:
                failures_text = counted(number - first_count, "command")
                problems.append(f"{failures_text} to {disk} failed within the last hour")
        return problems
