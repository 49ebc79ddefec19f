"""A neighbour's fsync'ed writes beside Carver's background I/O, on one disk.

The group is on dm-delay over a file: as a disk without an offload for zeroes, which is written. The
file has all its blocks, or its file system would make each write of a new one wait for the others.
"""

import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from performance import rows, service, throughput
from performance.bare import run
from performance.rows import Samples

from agent.csi.client import Client, block, of_volume
from lvm import names
from mount import block_devices

NAME = "carver_beside"
_GIB, _MIB = 1 << 30, 1 << 20
_FILE_BYTES, _ERASED_BYTES = 12 * _GIB, 8 * _GIB
_COPIED_BYTES, _NEIGHBOUR_BYTES = 512 * _MIB, 128 * _MIB
_WRITE_BYTES, _SECTOR_BYTES, _BEGINS_SECTORS = 4096, 512, 2048
# Parts of the time: the neighbour alone; an erase alone, twice; both; the neighbour beside a copy.
_ALONE, _ERASING, _BOTH, _COPYING = 0.2, 0.1, 0.35, 0.25
_LOOK_SECONDS = 0.02
_SETTLED_SECONDS = 1.0


@contextmanager
def made(directory: Path) -> Iterator[None]:
    """An empty group; afterwards nothing is left of it."""
    file = directory / "beside"
    blocks = ("bs=4M", f"count={_FILE_BYTES // (4 * _MIB)}", "oflag=direct", "conv=fsync")
    run("dd", "if=/dev/zero", f"of={file}", *blocks)
    try:
        disk = run("losetup", "--find", "--show", "--direct-io=on", str(file)).strip()
        try:
            # Not from the beginning, or lvm2 would see the disk twice.
            sectors = _FILE_BYTES // _SECTOR_BYTES - _BEGINS_SECTORS
            table = f"0 {sectors} delay {disk} {_BEGINS_SECTORS} 0"
            run("dmsetup", "create", NAME, "--table", table)
            try:
                run("vgcreate", "--yes", "--", NAME, f"/dev/mapper/{NAME}")
                try:
                    yield
                finally:
                    run("vgremove", "--force", "--force", "--yes", "--", NAME)
            finally:
                run("dmsetup", "remove", "--retry", NAME)
        finally:
            run("losetup", "--detach", disk)
    finally:
        file.unlink()


def measure(place: Path, settings: str, seconds: float, samples: Samples) -> None:
    """Latencies of a neighbour's writes, and what a GiB takes, by the names of the rows."""
    with made(place):
        _measure(place, settings, seconds, samples)
        unpaced = f'{settings}\nbackground_bandwidth = "0"'
        with service.served(place, NAME, unpaced) as carver:
            _erase(carver.client, seconds * _ERASING, samples, rows.ERASED_UNPACED)


def _measure(place: Path, settings: str, seconds: float, samples: Samples) -> None:
    with service.served(place, NAME, settings) as carver:
        client = carver.client
        client.create("neighbour", _NEIGHBOUR_BYTES, block())
        throughput.write(_path("neighbour"), _NEIGHBOUR_BYTES)
        samples.seconds[rows.WRITES_ALONE] += _writes(seconds * _ALONE / 2)
        _erase(client, seconds * _ERASING, samples, rows.ERASED_ALONE)
        _erase(client, seconds * _BOTH, samples, rows.ERASED_BESIDE, rows.WRITES_ERASING)
        source = client.create("source", _COPIED_BYTES, block())
        throughput.write(_path("source"), _COPIED_BYTES)
        with ThreadPoolExecutor(1) as pool:
            words = ("copy", _COPIED_BYTES, block())
            copying = pool.submit(client.create, *words, source=of_volume(source.volume_id))
            while not Path(_path("copy")).exists() and not copying.done():
                time.sleep(0.05)
            found = _writes(seconds * _COPYING, copying.done)
            samples.seconds[rows.WRITES_COPYING] += found
            copied = copying.result()
        for one in (copied, source):
            client.delete(one.volume_id)
        _await_idle(client)
        samples.seconds[rows.WRITES_ALONE] += _writes(seconds * _ALONE / 2)


def _erase(
    client: Client, seconds: float, samples: Samples, name: str, writes: str | None = None
) -> None:
    """Delete a volume, and look for so long at how it is erased; beside a neighbour, or not."""
    doomed = client.create("doomed", _ERASED_BYTES, block())
    time.sleep(_SETTLED_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        erased = Written(_path("doomed"))
        deleting = pool.submit(client.delete, doomed.volume_id)
        until = time.monotonic() + seconds
        while not erased.has_begun() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        if writes is not None:
            samples.seconds[writes] += _writes(seconds, erased.look)
        while writes is None and not erased.look() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        samples.seconds[name] += erased.seconds_for_gib()
        deleting.result()
    _await_idle(client)


def _await_idle(client: Client) -> None:
    """Wait until the group has its room again."""
    while client.capacity().available_capacity < _FILE_BYTES - _COPIED_BYTES:
        # Each look reads the disk, as others do.
        time.sleep(_SETTLED_SECONDS)


def _writes(seconds: float, ends: Callable[[], bool] = lambda: False) -> list[float]:
    """How long each write of 4 KiB and its fsync(2) takes, one after the other, for so long."""
    found, chance = list[float](), random.Random(4096)
    data = mmap.mmap(-1, _WRITE_BYTES)
    data.write(os.urandom(_WRITE_BYTES))
    descriptor = os.open(_path("neighbour"), os.O_WRONLY | os.O_DIRECT)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not ends():
            at = chance.randrange(_NEIGHBOUR_BYTES // _WRITE_BYTES) * _WRITE_BYTES
            begun = time.monotonic()
            os.pwritev(descriptor, [data], at)
            os.fsync(descriptor)
            found.append(time.monotonic() - begun)
    finally:
        os.close(descriptor)
    return found


class Written:
    """How fast a device is written, as long as it is there."""

    def __init__(self, path: str) -> None:
        number = os.stat(path).st_rdev  # noqa: PTH116
        self._key = os.major(number), os.minor(number)
        self._begun = self._last = time.monotonic(), self._sectors() or 0

    def has_begun(self) -> bool:
        """Count from now on; return whether anything was written before."""
        before, now = self._begun[1], self._sectors()
        self._begun = self._last = time.monotonic(), now or before
        return now is None or now > before

    def look(self) -> bool:
        """Look how much was written; return whether the device is gone."""
        sectors = self._sectors()
        if sectors is not None:
            self._last = time.monotonic(), sectors
        return sectors is None

    def seconds_for_gib(self) -> list[float]:
        """What a GiB took from the beginning to the last look; empty where nothing was written."""
        (begun, before), (last, after) = self._begun, self._last
        done = (after - before) * _SECTOR_BYTES / _GIB
        return [(last - begun) / done] if done > 0 else []

    def _sectors(self) -> int | None:
        return block_devices.written_sectors().get(self._key)


def _path(name: str) -> str:
    return f"/dev/mapper/{names.device(NAME, f'vol-{name}')}"
