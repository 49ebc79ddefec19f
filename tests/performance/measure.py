#!/usr/bin/env python3
"""One pass over all calls, beside the bare commands, in the guest or on a node. As root.

    measure.py --seconds 500 [--name sessions] [--settings 'wipe = "none"'] OUTPUT
    measure.py --seconds 300 --group EMPTY_GROUP OUTPUT

Prints its table and writes the pass to OUTPUT as JSON. It never fails on time, and measures what it
has time for; what it has none for is not in its table. With --group it measures in a group that
exists, which must be empty, and leaves out what needs hundreds of volumes or a disk of its own.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import grpc
from performance import (
    bare,
    beside,
    document,
    floor,
    group,
    rows,
    service,
    streamed,
    tables,
    throughput,
)
from performance.bare import Bare, Life
from performance.group import Group
from performance.rows import Row, Samples
from performance.service import Served
from rich.console import Console
from vm import pods

from agent.core import errors
from agent.csi.client import Client, block
from lvm import names
from mount.cgroups import Cgroups
from proto import csi_pb2 as csi
from proto.csi_pb2_grpc import SnapshotMetadataStub

_WHERE = Path("/var/tmp")
_CLIENTS = 8
_AT_ONCE = 200
_ROUNDS, _ROUNDS_AMONG_MANY, _LIVES_AT_ONCE = 15, 7, 25
# Of a pass's time: lives, beside one that is counted; among 100, among 400; the rest is for eight
# clients, whose last calls wait for each other.
_LIVES, _AMONG = 0.3, {100: 0.15, 400: 0.25}
_AT_ONCE_SHARE = 0.15
_DELTAS_SHARE, _STREAMS_SHARE, _THROUGHPUT_SHARE = 0.05, 0.1, 0.12
# Its group is written once beforehand, for which a short pass has no time.
_BESIDE_SHARE, _LEAST_BESIDE = 0.08, 30.0
_DELTA_BYTES, _CHANGED_BYTES = 256 << 20, 64 << 20
_EXTENT_BYTES = 4 << 20
_FLOOR_CALLS = 50
_IDLE_SECONDS = 20.0
# The kernel counts in hundredths of a second, and limits are checked each ten seconds.
_IDLE_LIMITED_SECONDS = 60.0

# A name and what it does.
Question = tuple[str, Callable[[], object]]
# The calls that follow CreateVolume in a life.
_REST = (
    *(rows.STAGE, rows.PUBLISH, rows.STATS, rows.EXPAND),
    *(rows.UNPUBLISH, rows.UNSTAGE, rows.DELETE),
)


def allocated(client: Client, snapshot_id: str) -> None:
    request = csi.GetMetadataAllocatedRequest(snapshot_id=snapshot_id)
    assert sum(1 for _ in client.stub(SnapshotMetadataStub).GetMetadataAllocated(request))


def changed(client: Client, base_id: str, target_id: str) -> None:
    request = csi.GetMetadataDeltaRequest(base_snapshot_id=base_id, target_snapshot_id=target_id)
    assert sum(1 for _ in client.stub(SnapshotMetadataStub).GetMetadataDelta(request))


class Time:
    """The time that a run has in all; its parts take shares of it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._ends = clock() + seconds

    def left_seconds(self) -> float:
        """What is left of it, 0 if it is over."""
        return max(0.0, self._ends - self._clock())

    def share(self, part: float) -> "Time":
        """A part of it, and no more than is left."""
        return Time(min(part * self._seconds, self.left_seconds()), self._clock)

    def rounds(self, most: int) -> Iterator[int]:
        """Numbers of rounds: the first always, another where one like the longest still fits."""
        longest = 0.0
        for number in range(most):
            if number and longest >= self.left_seconds():
                return
            started = self._clock()
            yield number
            longest = max(longest, self._clock() - started)


class Pass:
    """One configuration, measured."""

    def __init__(
        self, place: Path, settings: str, limit: Time, console: Console, given: str = ""
    ) -> None:
        self._place = place
        # The group that was given; empty if the pass makes its own.
        self._given = given
        self._group = given or group.NAME
        self._settings = settings
        self._limit = limit
        self._console = console
        self._serial = 0
        self._starts: list[float] = []

    def rows(self) -> Iterator[Row]:
        """All figures, in the order in which they are measured: what matters most comes first."""
        if self._given:
            counts = self._counted()
            with self._served() as carver:
                [first] = carver.client.volumes()
                carver.client.delete(first.volume_id)
            _, found = self._of_an_empty_group(counts)
            yield from found
        else:
            yield from self._of_own_group()
        yield from rows.of_value(rows.START, self._starts)

    def _of_an_empty_group(self, counts: Samples) -> tuple[Samples, Iterator[Row]]:
        """The figures for which no other volumes are needed, and the samples of the calls."""
        empty, trivial = self._alone(counts)

        def found() -> Iterator[Row]:
            yield from rows.of_pairs(empty)
            yield from rows.of_life(empty)
            yield from trivial
            for more, share in (
                (self._deltas, _DELTAS_SHARE),
                (self._streams, _STREAMS_SHARE),
                (self._throughput, _THROUGHPUT_SHARE),
            ):
                if self._limit.left_seconds():
                    yield from rows.of_pairs(more(self._limit.share(share)))

        return empty, found()

    def _of_own_group(self) -> Iterator[Row]:
        """All figures, in a group that is made for them."""
        with group.made(self._place) as own:
            counts = self._counted()
            own.keep()
            empty, found = self._of_an_empty_group(counts)
            yield from found
            if (beside_seconds := self._limit.share(_BESIDE_SHARE).left_seconds()) > _LEAST_BESIDE:
                yield from rows.of_neighbour(self._beside_work(beside_seconds))
            for volumes, share in _AMONG.items():
                if self._limit.left_seconds():
                    full = self._among(own, volumes, self._limit.share(share))
                    yield from (one for one in rows.of_pairs(full) if one.name == rows.LIST)
                    yield from rows.of_growth(volumes, empty, full)
            if self._limit.left_seconds():
                yield from self._at_once(own)
            if self._limit.left_seconds():
                full, idle_percent = self._beside_snapshots(own)
                yield from rows.of_snapshots(empty, full, idle_percent)
            if self._limit.left_seconds():
                yield from self._beside_limited(own)

    def _counted(self) -> Samples:
        """The commands of each call, and the one volume that is multiplied later."""
        samples = Samples()
        self._say("the commands of each call")
        with self._served(counting=True) as carver:
            carver.client.create(group.FIRST, _EXTENT_BYTES, block())

            def count(name: str, call: Callable[[], object]) -> None:
                carver.settle()
                mark = carver.mark()
                call()
                samples.commands[name] = carver.commands(mark)

            with self._lives(carver) as (life, _):
                count(rows.CREATE, partial(life.do, rows.CREATE))
                for name, call in self._questions(carver, life):
                    count(name, call)
                for name in _REST:
                    count(name, partial(life.do, name))
            count(rows.LIST, carver.client.volumes)
        return samples

    def _alone(self, counts: Samples) -> tuple[Samples, list[Row]]:
        """Lives in an otherwise empty group, and what stands beside nothing."""
        samples = Samples(commands=counts.commands)
        with self._served() as carver:
            idle = carver.resident_mib()
            for number in self._limit.share(_LIVES).rounds(_ROUNDS):
                self._say(f"a volume's life, round {number + 1}")
                with self._lives(carver) as lives:
                    self._side_by_side(carver, samples, lives, [rows.CREATE], number)
                    self._ask(carver, samples, self._questions(carver, lives[0]))
                    self._side_by_side(carver, samples, lives, _REST, number)
            self._say("a call without Carver")
            floor.measure(self._place, _FLOOR_CALLS, samples)
        probe = counts.commands[rows.PROBE]
        return samples, [
            *rows.of_value(rows.PROBE, _ms(samples, rows.PROBE), probe),
            *rows.of_value(rows.PROBE_COMMANDS, [float(probe.processes + probe.session)]),
            *rows.of_value(rows.TRIVIAL, _ms(samples, rows.TRIVIAL)),
            *rows.of_value(rows.FLOOR, _ms(samples, rows.FLOOR)),
            *rows.of_value(rows.RESIDENT, [idle]),
        ]

    def _deltas(self, limit: Time) -> Samples:
        """Changed blocks of a thick volume, beside reading what has to be read for them."""
        self._say("changed blocks")
        samples = Samples()
        with self._served() as carver:
            client = carver.client
            volume = client.create("bench-delta", _DELTA_BYTES, block())
            path = f"/dev/mapper/{names.device(self._group, 'vol-bench-delta')}"
            bare.fill(path, _DELTA_BYTES)
            half = {"size": str(_DELTA_BYTES // 2)}
            taken = [client.snapshot("bench-old", volume.volume_id, half).snapshot_id]
            bare.fill(path, _CHANGED_BYTES)
            taken.append(client.snapshot("bench-new", volume.volume_id, half).snapshot_id)
            old, new = (
                f"/dev/mapper/{names.device(self._group, f'snap-bench-{one}')}"
                for one in ("old", "new")
            )
            asked: list[Question] = [
                (rows.ALLOCATED, lambda: allocated(client, taken[1])),
                (rows.READ, lambda: bare.read(_DELTA_BYTES, new)),
                (rows.CHANGED, lambda: changed(client, *taken)),
                (rows.READ_BOTH, lambda: bare.read(_CHANGED_BYTES, old, new)),
            ]
            for _ in limit.rounds(_ROUNDS):
                for name, question in asked:
                    carver.settle()
                    samples.time(name, question, time.monotonic)
            for one in taken:
                client.delete_snapshot(one)
            client.delete(volume.volume_id)
        return samples

    def _streams(self, limit: Time) -> Samples:
        """Changed blocks of a thick volume brought to another, beside dd of them."""
        self._say("what changed, as a stream")
        samples = Samples()
        with self._served() as carver:
            at = streamed.person(carver.client, self._place / "csi.sock")
            streamed.measure(at, limit.rounds(_ROUNDS_AMONG_MANY), samples, carver.settle)
        return samples

    def _throughput(self, limit: Time) -> Samples:
        """Encrypted volumes, beside one that cryptsetup made by hand."""
        self._say("encrypted volumes, written and read")
        samples = Samples()
        with self._served() as carver:
            rounds = limit.rounds(_ROUNDS)
            throughput.measure(carver.client, self._place, self._group, rounds, samples)
        return samples

    def _beside_work(self, seconds: float) -> Samples:
        """A neighbour's writes beside an erase and a copy, on a disk of their own."""
        self._say("a neighbour of background work")
        samples = Samples()
        beside.measure(self._place, self._settings, seconds, samples)
        return samples

    def _among(self, own: Group, volumes: int, limit: Time) -> Samples:
        """The calls that may grow, in a group with so many volumes."""
        self._say(f"among {volumes} volumes")
        own.fill(volumes)
        samples = Samples()
        with self._served() as carver:
            for number in limit.rounds(_ROUNDS_AMONG_MANY):
                with self._lives(carver) as lives:
                    self._side_by_side(carver, samples, lives, [rows.CREATE, rows.STAGE], number)
                    asked: list[Question] = [(rows.CAPACITY, carver.client.capacity)]
                    if volumes == rows.EXISTING[0]:
                        asked.append((rows.LIST, carver.client.volumes))
                    self._ask(carver, samples, asked)
        return samples

    def _at_once(self, own: Group) -> Iterator[Row]:
        """Eight clients; times of the calls of theirs that start lvm2."""
        self._say(f"{_CLIENTS} clients beside {_AT_ONCE} volumes")
        own.fill(_AT_ONCE)
        samples, guard = Samples(), threading.Lock()
        share = self._limit.share(_AT_ONCE_SHARE)
        with self._served() as carver:

            def work(number: int) -> None:
                with Client(self._place / "csi.sock", timeout_seconds=300) as client:
                    for serial in share.rounds(_LIVES_AT_ONCE):
                        self._live(client, f"load-{number}-{serial}", samples, guard)

            with ThreadPoolExecutor(_CLIENTS) as pool:
                list(pool.map(work, range(_CLIENTS)))
            carver.settle()
            after = carver.resident_mib()
        times = [one for seconds in samples.seconds.values() for one in seconds]
        yield from rows.of_value(rows.MEDIAN_AT_ONCE, times)
        yield from rows.of_value(rows.WORST_AT_ONCE, [max(times)])
        yield from rows.of_value(rows.RESIDENT_AFTER, [after])

    def _beside_snapshots(self, own: Group) -> tuple[Samples, float]:
        """A call in a group with many active snapshots, and how busy a service is by itself."""
        self._say(f"among {rows.SNAPSHOTS} snapshots")
        own.fill(1)
        with self._served() as carver:
            volume = carver.client.create("bench-origin", _EXTENT_BYTES, block())
            carver.client.snapshot(group.SNAPSHOT, volume.volume_id)
        own.multiply_snapshot(rows.SNAPSHOTS, "vol-bench-origin")
        samples = Samples()
        with self._served() as carver:
            for _ in range(_ROUNDS):
                carver.settle()
                samples.time(rows.CAPACITY, carver.client.capacity, time.monotonic)
            return samples, carver.busy_percent(_IDLE_SECONDS)

    def _beside_limited(self, own: Group) -> Iterator[Row]:
        """How busy a service is by itself with many volumes in use; and once they are limited."""
        self._say(f"{rows.LIMITED} volumes in use, without limits and with")
        own.fill(rows.LIMITED)
        with pods.pod(pods.SYSTEMD), self._served() as carver, contextlib.ExitStack() as in_use:
            volumes = carver.client.volumes()
            for volume in volumes:
                place = self._place / volume.volume_id.rpartition("/")[2]
                staging, target = f"{place}-staging", f"{place}-target"
                carver.client.stage(volume, staging, block())
                in_use.callback(carver.client.unstage, volume.volume_id, staging)
                carver.client.publish(volume, staging, target, block())
                in_use.callback(carver.client.unpublish, volume.volume_id, target)
            carver.settle()
            before = carver.busy_percent(_IDLE_LIMITED_SECONDS)
            for volume in volumes:
                carver.client.modify(volume.volume_id, {"carver/readIOPS": "1000"})
            assert len(Cgroups().limits()) == rows.LIMITED
            carver.settle()
            limited = carver.busy_percent(_IDLE_LIMITED_SECONDS)
        yield from rows.of_value(rows.IDLE_IN_USE, [before])
        yield from rows.of_value(rows.IDLE_LIMITED, [limited - before])

    def _live(self, client: Client, name: str, samples: Samples, guard: threading.Lock) -> None:
        life = Life(client, name, self._place)
        mine = Samples()
        with _undone(life):
            mine.time(rows.CREATE, partial(life.do, rows.CREATE), time.monotonic)
            mine.time(rows.STAGE, partial(life.do, rows.STAGE), time.monotonic)
            for call in (rows.PUBLISH, rows.UNPUBLISH, rows.UNSTAGE):
                life.do(call)
            mine.time(rows.DELETE, partial(life.do, rows.DELETE), time.monotonic)
        with guard:
            for call, seconds in mine.seconds.items():
                samples.seconds[call] += seconds

    def _side_by_side(
        self,
        carver: Served,
        samples: Samples,
        lives: tuple[Life, Bare],
        calls: Sequence[str],
        number: int,
    ) -> None:
        """Each call and its bare commands; which is first changes from round to round."""
        life, by_hand = lives
        for call in calls:
            pair = [(call, life.do), (rows.BESIDE[call], by_hand.do)]
            for name, do in reversed(pair) if number % 2 else pair:
                carver.settle()
                samples.time(name, partial(do, name), time.monotonic)

    def _ask(self, carver: Served, samples: Samples, questions: list[Question]) -> None:
        for name, question in [*questions, (rows.VGS, lambda: bare.report(self._group))]:
            carver.settle()
            samples.time(name, question, time.monotonic)

    def _questions(self, carver: Served, life: Life) -> list[Question]:
        return [
            (rows.REPEATED, partial(life.do, rows.REPEATED)),
            (rows.CAPACITY, carver.client.capacity),
            (rows.GET_VOLUME, partial(life.do, rows.GET_VOLUME)),
            (rows.PROBE, carver.client.probe),
            (rows.TRIVIAL, carver.client.info),
        ]

    @contextlib.contextmanager
    def _served(self, *, counting: bool = False) -> Iterator[Served]:
        with service.served(self._place, self._group, self._settings, counting=counting) as carver:
            if not counting:
                self._starts.append(carver.start_seconds)
            yield carver
            carver.settle()

    @contextlib.contextmanager
    def _lives(self, carver: Served) -> Iterator[tuple[Life, Bare]]:
        """Two volumes that are there for one round."""
        self._serial += 1
        life = Life(carver.client, f"bench-{self._serial}", self._place)
        by_hand = Bare(self._group, f"bare-{self._serial}", self._place)
        with _undone(life), _undone(by_hand):
            yield life, by_hand

    def _say(self, text: str) -> None:
        self._console.print(f"{self._limit.left_seconds():4.0f} s left: {text}", style="dim")


@contextlib.contextmanager
def _undone(life: Life | Bare) -> Iterator[None]:
    """Inside, a volume may be led through its life; afterwards nothing of it is there."""
    life.prepare()
    try:
        yield
    finally:
        life.undo()


def _ms(samples: Samples, name: str) -> list[float]:
    return [one * 1000 for one in samples.seconds.get(name, [])]


@contextlib.contextmanager
def _alone_in_guest() -> Iterator[None]:
    """The installed service rests meanwhile: it would look at the groups too."""
    active = subprocess.run(["systemctl", "is-active", "--quiet", "carver"], check=False)
    if active.returncode == 0:
        subprocess.run(["systemctl", "stop", "carver"], check=True)
    try:
        yield
    finally:
        if active.returncode == 0:
            subprocess.run(["systemctl", "start", "carver"], check=True)


def main() -> int:
    """Measure, print, and write down; only what does not work at all is a failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--name", default="sessions")
    parser.add_argument("--settings", default="", help="lines for the configuration's head")
    parser.add_argument("--group", default="", help="an empty volume group to measure in")
    parser.add_argument("output", type=Path)
    chosen = parser.parse_args()
    console = Console(width=140, highlight=False)
    if chosen.group:
        try:
            group.require_empty(chosen.group)
        except group.NotEmpty as error:
            parser.error(str(error))
    place = Path(tempfile.mkdtemp(prefix="carver-bench-", dir=_WHERE))
    found: list[Row] = []
    failed = True
    try:
        with _alone_in_guest():
            # One by one: what was measured before a failure is kept.
            limit = Time(chosen.seconds)
            for row in Pass(place, chosen.settings, limit, console, chosen.group).rows():
                found.append(row)
        failed = False
    except grpc.RpcError as error:
        console.print(f"{error.code().name}: {error.details()}", style="bold red", markup=False)
    except subprocess.CalledProcessError as error:
        console.print(f"{error}: {error.stderr}", style="bold red", markup=False)
    except errors.AgentError as error:
        console.print(str(error), style="bold red", markup=False)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        # Also after an interrupt.
        if chosen.group and (left := group.left_in(chosen.group)):
            console.print(f"left in {chosen.group}: {', '.join(left)}", style="bold red")
    order = [promise.name for promise in rows.PROMISES]
    found.sort(key=lambda row: order.index(row.name))
    done = document.Run(chosen.name, chosen.settings, document.machine(), found)
    console.print(tables.on_terminal(done))
    chosen.output.write_text(json.dumps(done.as_json()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
