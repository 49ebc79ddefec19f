"""Clients that lead volumes through their lives, and record each answer on disk.

What was acknowledged must hold, whatever ends the service or the machine in between: a volume with
its data, a deletion. The journal is written, and flushed, before a call and after its answer.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
from csi_client import Client
from faults import leftovers
from faults.bench import Bench
from faults.process import GONE, Fault, await_begun, until

from agent.core.ids import VolumeId
from agent.csi.client import Mode, block, mounted
from agent.settings.settings import DEFAULT_SOCKET, KUBELET_DIRECTORY
from lvm.active_devices import Devices
from mount import table
from mount.kernel import Kernel
from proto import csi_pb2 as csi

T = TypeVar("T")

MIB = 1 << 20
PLACE = KUBELET_DIRECTORY / "plugins" / "carver-load"
JOURNALS = Path("/var/lib/carver-load")
_DATA_BYTES = 256 << 10
_SIZE_BYTES = 16 * MIB
_PATIENCE_SECONDS = 180
# What each client keeps at most.
_OWN = 3


@dataclass(frozen=True)
class Life:
    """A volume of the load, and the calls of its life."""

    name: str

    @property
    def raw(self) -> bool:
        return self.name.endswith("raw")

    @property
    def capability(self) -> csi.VolumeCapability:
        mode = Mode.SINGLE_NODE_SINGLE_WRITER
        return block(mode) if self.raw else mounted("ext4", mode=mode)

    @property
    def staging(self) -> Path:
        return PLACE / f"{self.name}-staging"

    @property
    def target(self) -> Path:
        return PLACE / f"{self.name}-target"

    @property
    def file(self) -> Path:
        return self.target if self.raw else self.target / "data"

    def write(self, data: bytes) -> None:
        """Have the data on the disk, and their name too."""
        descriptor = os.open(self.file, os.O_WRONLY | (0 if self.raw else os.O_CREAT))
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(data)
            os.fsync(descriptor)
        if not self.raw:
            directory = os.open(self.target, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

    def digest(self) -> str:
        """What the data are now."""
        with self.file.open("rb") as file:
            return hashlib.sha256(file.read(_DATA_BYTES)).hexdigest()


@dataclass
class Journal:
    """What one client did, and the answers."""

    path: Path

    def note(self, name: str, event: str, more: str = "") -> None:
        """One line, on the disk when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps([name, event, more]) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Worker:
    """One client: it keeps a few volumes in use, and lets go of others."""

    def __init__(
        self, number: int, seed: int, over: threading.Event, deleted: Callable[[str], object]
    ) -> None:
        self.random = random.Random(f"{seed}-{number}")
        self.number = number
        self.over = over
        # Told of each deletion that was acknowledged, at once.
        self.deleted = deleted
        self.calls = 0
        self.journal = Journal(JOURNALS / f"{number}.journal")
        self._own: list[tuple[Life, csi.Volume]] = []

    def work(self) -> None:
        """Until it is over, or the machine is."""
        with Client(DEFAULT_SOCKET, timeout_seconds=_PATIENCE_SECONDS) as self._client:
            for serial in range(1_000_000):
                if self.over.is_set():
                    return
                raw = self.random.random() < 0.7
                self._begin(Life(f"load-{self.number}-{serial}-{'raw' if raw else 'ext4'}"))
                while len(self._own) > self.random.randrange(_OWN + 1):
                    self._end(*self._own.pop(self.random.randrange(len(self._own))))

    def _begin(self, life: Life) -> None:
        note, capability = self.journal.note, life.capability
        note(life.name, "create")
        volume = self._patiently(lambda: self._client.create(life.name, _SIZE_BYTES, capability))
        note(life.name, "created")
        self._patiently(lambda: self._client.stage(volume, life.staging, capability))
        self._patiently(lambda: self._client.publish(volume, life.staging, life.target, capability))
        data = leftovers.marker(life.name) + self.random.randbytes(_DATA_BYTES)
        data = data[:_DATA_BYTES]
        life.write(data)
        note(life.name, "written", hashlib.sha256(data).hexdigest())
        self._own.append((life, volume))
        if self.random.random() < 0.3:
            self._patiently(lambda: self._client.expand(volume.volume_id, 2 * _SIZE_BYTES))
            self._patiently(lambda: self._client.node_expand(volume.volume_id, life.target))

    def _end(self, life: Life, volume: csi.Volume) -> None:
        self._patiently(lambda: self._client.unpublish(volume.volume_id, life.target))
        self._patiently(lambda: self._client.unstage(volume.volume_id, life.staging))
        self.journal.note(life.name, "delete")
        self._patiently(lambda: self._client.delete(volume.volume_id))
        self.deleted(life.name)
        self.journal.note(life.name, "deleted")
        if not life.raw:
            life.staging.rmdir()

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat a call without an answer, as kubelet does."""
        answer = patiently(call)
        self.calls += 1
        return answer


def patiently(call: Callable[[], T]) -> T:
    """Repeat a call without an answer, and while an earlier one is still at work."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code().name not in {*GONE, "ABORTED"} or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def start(seed: int) -> None:
    """Nothing of an earlier load is there, even of one that was cut off."""
    with Client(DEFAULT_SOCKET) as client:
        for name, volume in _there(client).items():
            _undo(client, Life(name), volume)
        for place in (PLACE, JOURNALS):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
        before = client.capacity().available_capacity
    (JOURNALS / "before").write_text(json.dumps([seed, before]))
    os.sync()


@contextmanager
def clients(
    count: int, seed: int, deleted: Callable[[str], object] = lambda _name: None
) -> Iterator[list[Worker]]:
    """So many clients at work. What fails in one of them is raised in the end."""
    over = threading.Event()
    workers = [Worker(number, seed, over, deleted) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(one.work) for one in workers]
        try:
            yield workers
        finally:
            over.set()
    for one in running:
        one.result()


@dataclass
class Verdict:
    """What was found after a load."""

    volumes: int = 0
    deleted: int = 0
    lost: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)


def judge() -> Verdict:
    """Compare what is there with what was acknowledged, look at the data, and clean up."""
    events_of, verdict = _journals(), Verdict()
    _, before_bytes = json.loads((JOURNALS / "before").read_text())
    verdict.deleted = sum("deleted" in one for one in events_of.values())
    with Client(DEFAULT_SOCKET, timeout_seconds=_PATIENCE_SECONDS) as client:
        there = _there(client)
        for name, events in events_of.items():
            if "created" in events and "delete" not in events and name not in there:
                verdict.lost.append(f"{name}: gone")
        for name in there:
            if name not in events_of or "deleted" in events_of[name]:
                verdict.leaked.append(f"{name}: there")
        verdict.volumes = len(there)
        # Before anything else is deleted.
        verdict.leaked += [f"{one}: its data in free extents" for one in leftovers.shown()]
        groups = {one.group for one in map(VolumeId.parse, _ids(there)) if one is not None}
        for group in groups:
            ended = subprocess.run(["vgck", group], capture_output=True, text=True)
            if ended.returncode:
                verdict.lost.append(f"vgck {group}: {ended.stderr}")
        with ThreadPoolExecutor(4) as pool:
            for problems in pool.map(
                lambda name: list(_look_over(client, name, events_of.get(name, {}))), there
            ):
                verdict.lost += problems
        verdict.leaked += _left(client, before_bytes)
    return verdict


def _there(client: Client) -> dict[str, csi.Volume]:
    """The volumes of a load, by their names."""
    found = {volume.volume_id.rpartition("/vol-")[2]: volume for volume in client.volumes()}
    return {name: one for name, one in found.items() if name.startswith("load-")}


def _undo(client: Client, life: Life, volume: csi.Volume) -> None:
    """Delete a volume and its snapshots as a CO does."""
    for one in client.snapshots(volume_id=volume.volume_id):
        patiently(partial(client.delete_snapshot, one.snapshot_id))
    patiently(lambda: client.unpublish(volume.volume_id, life.target))
    patiently(lambda: client.unstage(volume.volume_id, life.staging))
    patiently(lambda: client.delete(volume.volume_id))


def _ids(volumes: dict[str, csi.Volume]) -> list[str]:
    return [one.volume_id for one in volumes.values()]


def _journals() -> dict[str, dict[str, str]]:
    """Of each volume the events that the journals have, the last line perhaps in part."""
    events_of: dict[str, dict[str, str]] = defaultdict(dict)
    for journal in JOURNALS.glob("*.journal"):
        for line in journal.read_text().splitlines():
            try:
                name, event, more = json.loads(line)
            except ValueError:
                continue
            events_of[name][event] = more
    return events_of


def _look_over(client: Client, name: str, events: dict[str, str]) -> Iterator[str]:
    """Bring a volume into use in kubelet's order, read it, check it, and delete it."""
    life = Life(name)
    volume = patiently(lambda: client.create(name, _SIZE_BYTES, life.capability))
    # One whose deletion was begun may be wiped in part already: only whole is it looked at.
    if "delete" not in events:
        patiently(lambda: client.stage(volume, life.staging, life.capability))
        patiently(lambda: client.publish(volume, life.staging, life.target, life.capability))
        if "written" in events and life.digest() != events["written"]:
            yield f"{name}: other data"
        client.unpublish(volume.volume_id, life.target)
        client.unstage(volume.volume_id, life.staging)
        if not life.raw:
            parsed = VolumeId.parse(volume.volume_id)
            assert parsed is not None
            device = Devices().find(parsed.group, parsed.name)
            assert device is not None
            ended = subprocess.run(
                ["fsck.ext4", "-fn", device.path], capture_output=True, text=True
            )
            if ended.returncode:
                yield f"{name}: fsck: {ended.stdout}"
    _undo(client, life, volume)


def _left(client: Client, before_bytes: int) -> Iterator[str]:
    """What is still there though every volume is deleted."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (free := client.capacity().available_capacity) != before_bytes:
        # A wipe may go on behind the answer.
        if time.monotonic() > deadline:
            yield f"{before_bytes - free} bytes of the group"
            break
        time.sleep(1)
    kernel = Kernel()
    yield from (f"{one.path}: mounted" for one in table.read(kernel).under(str(PLACE)))
    for device in kernel.loop_devices():
        with contextlib.suppress(OSError):
            status = kernel.loop_status(device)
            if status.read_only:
                yield f"{device}: a loop device"
    for path in PLACE.iterdir():
        if path.name.endswith("-staging"):
            path.rmdir()
        else:
            yield str(path)


def killed_at_random(bench: Bench) -> tuple[int, str]:
    """Kill -9 of the service at random moments."""
    times, seed = bench.times(12, 3), bench.random.randrange(1 << 30)
    start(seed)
    with clients(4, seed) as workers:
        for _ in range(times):
            _await_answers(workers, bench.random.randrange(1, 10))
            time.sleep(bench.random.uniform(0, 1))
            pid = main_pid()
            os.kill(pid, signal.SIGKILL)
            until(partial(_is_restarted, pid), "systemd does not start the service again")
            with Client(DEFAULT_SOCKET) as client:
                await_begun(client)
    judged(bench)
    calls = sum(one.calls for one in workers)
    return times, f"4 clients, {calls} calls: each succeeded at last, data as written"


def _is_restarted(killed: int) -> bool:
    return main_pid() not in (0, killed)


def judged(bench: Bench) -> None:
    """What was found after a load, as a row's."""
    verdict = judge()
    bench.lost += len(verdict.lost)
    bench.leaked += len(verdict.leaked)
    if verdict.lost or verdict.leaked:
        raise Fault(f"{verdict}")


def _await_answers(workers: list[Worker], count: int) -> None:
    """Wait for so many answers: a service that is killed before any would make no progress."""
    wanted = sum(one.calls for one in workers) + count
    with contextlib.suppress(Fault):
        until(lambda: sum(one.calls for one in workers) >= wanted, "", _PATIENCE_SECONDS)


def main_pid() -> int:
    """The service's process."""
    words = ["systemctl", "show", "--value", "--property=MainPID", "carver"]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
