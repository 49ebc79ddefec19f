"""In the guest: many volumes by eight clients at once, and what that costs the service.

    run.py [--volumes 200] [--seed 1]

Prints how long each call took. Fails where a call was not OK, something is left over, or the
service has more threads, descriptors or, with its sessions, memory at the end than before.
"""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import argparse
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import grpc
import psutil
from faults import load
from faults.load import MIB, Life
from resident import Resident
from rich import box
from rich.console import Console
from rich.table import Table

from agent.csi.client import Client
from agent.settings.settings import DEFAULT_SOCKET
from proto import csi_pb2 as csi

_CLIENTS = 8
_AT_ONCE = 50
_SIZE_BYTES = 8 * MIB
# Less than one for each volume.
_SLACK = 8
_MEMORY_SLACK_BYTES = 8 * MIB
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """Have memory count as it is used (transhuge.rst).

    With huge pages 2 MiB are resident where a page was used, and more of them as time goes by, also
    where nothing is asked for. A kernel without them, as user mode's, has nothing to switch off.
    """
    if not _HUGE_PAGES.exists():
        yield
        return
    before = _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    _HUGE_PAGES.write_text("never")
    try:
        yield
    finally:
        _HUGE_PAGES.write_text(before)


@dataclass(frozen=True)
class Usage:
    """What the service has; and what its sessions with lvm2 have in memory beside it."""

    threads: int
    descriptors: int
    memory: Resident

    @classmethod
    def of(cls, pid: int) -> "Usage":
        service = psutil.Process(pid)
        return cls(service.num_threads(), service.num_fds(), Resident.of(service))

    def __str__(self) -> str:
        service, sessions = self.memory.service_bytes / MIB, self.memory.sessions_bytes / MIB
        memory = f"{service:.1f} MiB, its sessions {sessions:.1f} MiB"
        return f"{self.threads} threads, {self.descriptors} descriptors, {memory}"

    def growth_since(self, before: "Usage") -> list[str]:
        """What is more than Python and gRPC may keep for reuse after a peak of work."""
        memory_bytes = self.memory.all_bytes - before.memory.all_bytes
        more = [
            ("threads", self.threads - before.threads, _SLACK),
            ("descriptors", self.descriptors - before.descriptors, _SLACK),
            ("MiB of memory", memory_bytes / MIB, _MEMORY_SLACK_BYTES / MIB),
        ]
        return [
            f"{grown:.3g} {what} more than after the first volumes; {slack:g} are allowed"
            for what, grown, slack in more
            if grown > slack
        ]


class Calls:
    """Times of calls, and those that were not OK."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.refused: list[str] = []
        self._guard = threading.Lock()

    def make(self, name: str, call: Callable[[], object]) -> object:
        started, answer, refused = time.monotonic(), None, []
        try:
            answer = call()
        except grpc.RpcError as error:
            refused.append(f"{name}: {error.code().name}: {error.details()}")
        with self._guard:
            self.seconds[name].append(time.monotonic() - started)
            self.refused += refused
        return answer

    def count(self) -> int:
        return sum(len(one) for one in self.seconds.values())

    def table(self) -> Table:
        drawn = Table(box=box.SIMPLE_HEAD)
        for title in ("call", "times", "median ms", "p90", "p99", "most"):
            drawn.add_column(title, justify="left" if title == "call" else "right")
        for name, seconds in self.seconds.items():
            cuts = quantiles(seconds, n=100, method="inclusive")
            cells = [f"{one * 1000:.0f}" for one in (cuts[49], cuts[89], cuts[98], max(seconds))]
            drawn.add_row(name, str(len(seconds)), *cells)
        return drawn


@dataclass(frozen=True)
class Used:
    """A volume in use, and a snapshot of it."""

    volume: csi.Volume
    snapshot: csi.Snapshot | None


def bring_up(client: Client, calls: Calls, life: Life, data: bytes) -> Used | None:
    capability = life.capability
    make = calls.make
    volume = make("CreateVolume", lambda: client.create(life.name, _SIZE_BYTES, capability))
    if not isinstance(volume, csi.Volume):
        return None
    make("NodeStageVolume", lambda: client.stage(volume, life.staging, capability))
    make(
        "NodePublishVolume",
        lambda: client.publish(volume, life.staging, life.target, capability),
    )
    life.write(data)
    make("NodeGetVolumeStats", lambda: client.stats(volume.volume_id, life.target))
    make("ControllerExpandVolume", lambda: client.expand(volume.volume_id, 2 * _SIZE_BYTES))
    make("NodeExpandVolume", lambda: client.node_expand(volume.volume_id, life.target))
    snapshot = make("CreateSnapshot", lambda: client.snapshot(life.name, volume.volume_id))
    return Used(volume, snapshot if isinstance(snapshot, csi.Snapshot) else None)


def take_down(client: Client, calls: Calls, life: Life, used: Used) -> None:
    make, volume, snapshot = calls.make, used.volume, used.snapshot
    if snapshot is not None:
        make("DeleteSnapshot", lambda: client.delete_snapshot(snapshot.snapshot_id))
    make("NodeGetVolumeStats", lambda: client.stats(volume.volume_id, life.target))
    make("NodeUnpublishVolume", lambda: client.unpublish(volume.volume_id, life.target))
    make("NodeUnstageVolume", lambda: client.unstage(volume.volume_id, life.staging))
    make("DeleteVolume", lambda: client.delete(volume.volume_id))
    if not life.raw:
        life.staging.rmdir()


def _life(number: int) -> Life:
    """One in ten has a file system, which costs most of the time."""
    return Life(f"load-{number}-{'ext4' if number % 10 == 0 else 'raw'}")


def _waves(volumes: int) -> Iterator[range]:
    """Volumes that are in use at once.

    The first are not counted: what is made once, such as threads, and what a peak of work takes, is
    there after them.
    """
    for start in range(0, _AT_ONCE + volumes, _AT_ONCE):
        yield range(start, min(start + _AT_ONCE, _AT_ONCE + volumes))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--volumes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    console, calls, chance = Console(width=100), Calls(), random.Random(chosen.seed)
    load.start(chosen.seed)
    clients = [Client(DEFAULT_SOCKET, timeout_seconds=300) for _ in range(_CLIENTS)]
    pid, in_use, usages = load.main_pid(), dict[Life, Used | None](), list[tuple[int, Usage]]()

    def up(number: int) -> None:
        data = random.Random(number).randbytes(256 << 10)
        in_use[_life(number)] = bring_up(clients[number % _CLIENTS], calls, _life(number), data)

    def down(number: int) -> None:
        if (used := in_use.pop(_life(number))) is not None:
            take_down(clients[number % _CLIENTS], calls, _life(number), used)

    with without_huge_pages(), ThreadPoolExecutor(_CLIENTS) as pool:
        for wave in _waves(chosen.volumes):
            list(pool.map(up, wave))
            list(pool.map(down, chance.sample(wave, len(wave))))
            usages.append((calls.count(), Usage.of(pid)))
    verdict = load.judge()
    console.print(calls.table())
    for count, usage in usages:
        console.print(f"after {count} calls: {usage}", highlight=False)
    console.print(f"{chosen.volumes} volumes, {calls.count()} calls, {len(calls.refused)} not OK")
    wrong = [*calls.refused[:10], *verdict.lost, *verdict.leaked]
    wrong += usages[-1][1].growth_since(usages[0][1])
    for line in wrong:
        console.print(line, style="bold red", highlight=False)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
