"""Commands read and write in turns of their group's background I/O."""

import io
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import expect
import grpc
import in_turn
import nodes
import pytest
from fakes.host import FakeHost
from nodes import MIB, SIZE, Node, volume_of

from agent.extras.transfer import paced, streams_command, turns
from agent.work import pace
from agent.work.pace import IoTask, Pace
from lvm.layout import NO_RESERVE, Reserve
from mount.block_io import Opened
from mount.disk_load import DiskLoad
from proto import carver_pb2 as carver

SLOW = Reserve(size_bytes=2 * MIB)
DATA = b"contents" * (MIB // 8)


class Clock:
    """Time goes on by pauses only."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def snapshot(here: Node, fake: FakeHost) -> str:
    """One of a thick volume, all of which is read to send it."""
    volume = volume_of(here)
    fake.write_bytes(here.device("vol-db"), 3 * MIB, DATA)
    return here.client.snapshot("1", volume.volume_id, {"size": str(SIZE)}).snapshot_id


def paced_by(node: Node, bandwidth: Reserve | None, clock: Clock) -> Pace:
    """Have a node's group keep to a rate."""
    made = Pace(lambda: bandwidth, node.host.kernel, clock, clock.sleep)
    node.service.context.paces._paces[node.group] = made
    return made


def erase(one: Pace) -> IoTask:
    return one.task("erase", check=lambda: None)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


class Watched(nodes.Wrapped):
    """An open device that says what is done with it."""

    def __init__(self, device: Opened, tell: Callable[[str, int], None]) -> None:
        super().__init__(device)
        self._tell = tell

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        super().read_into(offset_bytes, place)
        self._tell("read", len(place))

    def write(self, offset_bytes: int, data: Any) -> None:
        super().write(offset_bytes, data)
        self._tell("write", len(data))

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        super().zero_out(offset_bytes, length_bytes)
        self._tell("zero", length_bytes)

    def flush(self) -> None:
        super().flush()
        self._tell("flush", 0)


def watch(node: Node, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str, int], None]) -> None:
    """Have what a node's commands do with devices told."""
    opened = node.at.host.kernel.opened

    @contextmanager
    def watched(device: str, *, to_write: bool = False) -> Iterator[Opened]:
        with opened(device, to_write=to_write) as found:
            yield Watched(found, tell)

    monkeypatch.setattr(node.at.host.kernel, "opened", watched)


@contextmanager
def asked(
    node: Node, volume_id: str, kind: str = turns.SEND, most_bytes: int = MIB
) -> Iterator[Any]:
    """A call that asks for its first turn, as a command makes it."""
    requests: SimpleQueue[carver.TurnRequest | None] = SimpleQueue()
    first = carver.TurnRequest(volume_id=volume_id, kind=kind, most_bytes=most_bytes)
    requests.put(first)
    call: Any = node.transfer.TakeTurns(iter(requests.get, None))
    try:
        yield call
    finally:
        call.cancel()
        requests.put(None)


def test_a_command_that_sends_waits_for_its_turn(
    here: Node, snapshot: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = nodes.stream(here, "1")
    one, done = paced_by(here, None, clock), list[str]()
    watch(here, monkeypatch, lambda what, _length: done.append(what))
    with ThreadPoolExecutor(1) as pool:
        with erase(one).piece(MIB):
            sent = pool.submit(nodes.stream, here, "1")
            until(lambda: len(one._queue) == 2)
            assert done == []
        assert sent.result() == expected
    assert done
    assert one.done_bytes == {"erase": MIB, "send": SIZE}


def test_a_command_and_another_worker_alternate(
    here: Node, snapshot: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, order = paced_by(here, SLOW, clock), list[str]()
    watch(here, monkeypatch, lambda what, _length: order.append(what))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(nodes.stream, here, "1")
        for _ in in_turn.each(erase(one).chunks(16 * MIB)):
            until(lambda: len(one._queue) == 2)
            order.append("erase")
        sent.result()
    shared = order[order.index("erase") : len(order) - order[::-1].index("erase")]
    assert len(shared) == 2 * 16 - 1
    assert all(this != after for this, after in pairwise(shared))


def test_a_rate_holds_what_is_sent_compared_and_received(
    here: Node, there: Node, snapshot: str, clock: Clock
) -> None:
    expected = nodes.stream(here, "1"), streams_command.checksum_of(here.at, "1")
    own = paced_by(here, SLOW, clock)
    begun = clock.now
    assert nodes.stream(here, "1") == expected[0]
    assert clock.now - begun == pytest.approx(SIZE / SLOW.size_bytes, rel=0.1)
    begun = clock.now
    assert streams_command.checksum_of(here.at, "1") == expected[1]
    assert clock.now - begun == pytest.approx(SIZE / SLOW.size_bytes, rel=0.1)
    assert own.done_bytes == {"send": SIZE, "checksum": SIZE}

    other = paced_by(there, SLOW, clock)
    begun = clock.now
    # Nearly all of it is zeroes.
    streams_command.receive(there.at, "copy", io.BytesIO(expected[0]), verify=True)
    seconds = (other.done_bytes["receive"] + other.done_bytes["checksum"]) / SLOW.size_bytes
    assert clock.now - begun == pytest.approx(seconds, rel=0.1)
    assert other.done_bytes["receive"] >= SIZE
    assert streams_command.received_checksum(there.at, "copy") == expected[1]


def test_a_rate_holds_what_is_compared_in_the_service(
    here: Node, snapshot: str, clock: Clock
) -> None:
    [taken] = here.client.snapshots(snapshot_id=snapshot)
    here.client.snapshot("2", taken.source_volume_id, {"size": str(SIZE)})
    expected = nodes.stream(here, "2", since="1", compare=True)
    one, begun = paced_by(here, SLOW, clock), clock.now
    here.host.write_bytes(here.device("vol-db"), 0, DATA * 20)
    clock.now = begun
    assert nodes.stream(here, "2", since="1", compare=True) == expected
    read_bytes = one.done_bytes["compare"]
    assert read_bytes >= 20 * MIB
    assert clock.now - begun == pytest.approx(read_bytes / SLOW.size_bytes, rel=0.1)


def test_what_is_compared_has_its_turn_with_what_sends_it(
    here: Node, snapshot: str, clock: Clock
) -> None:
    [taken] = here.client.snapshots(snapshot_id=snapshot)
    here.host.write_bytes(here.device("vol-db"), 0, DATA * 20)
    second = here.client.snapshot("2", taken.source_volume_id, {"size": str(SIZE)})
    one = paced_by(here, None, clock)
    request = carver.RangesRequest(snapshot_id=second.snapshot_id, base_snapshot_id=snapshot)
    with asked(here, snapshot) as call:
        assert next(call).length_bytes == MIB
        assert list(here.transfer.GetDiffering(request, timeout=30))
        assert one.done_bytes["compare"] >= 20 * MIB
        assert len(one._queue) == 1


def test_what_the_service_changed_by_lvm2_is_no_others_io(
    here: Node, snapshot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed, kernel = [0], here.host.kernel
    monkeypatch.setattr(kernel, "disks_below", lambda _device: frozenset({"sda"}))
    monkeypatch.setattr(kernel, "disk_load", lambda _disk: DiskLoad(completed[0], 0, 0))
    one = here.service.context.paces.of(here.group)
    work = one.task("erase", here.device("vol-db"), check=lambda: None)
    with work.piece(MIB):
        pass
    [taken] = here.client.snapshots(snapshot_id=snapshot)
    here.client.snapshot("2", taken.source_volume_id, {"size": str(SIZE)})
    completed[0] += 10
    with work.piece(MIB):
        pass
    assert one.paused_seconds == 0
    completed[0] += 10
    with work.piece(MIB):
        pass
    assert one.paused_seconds > 0


def test_without_a_limit_a_command_asks_once(
    here: Node, snapshot: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, requests = paced_by(here, NO_RESERVE, clock), list[carver.TurnRequest]()
    take = here.transfer.TakeTurns

    def counted(given: Iterator[carver.TurnRequest]) -> object:
        def noted() -> Iterator[carver.TurnRequest]:
            for each in given:
                requests.append(each)
                yield each

        return take(noted())

    monkeypatch.setattr(here.transfer, "TakeTurns", counted)
    nodes.stream(here, "1")
    assert len([each for each in requests if each.most_bytes]) == 1
    assert one.done_bytes == {"send": SIZE}


def test_a_call_that_is_cancelled_loses_its_turn(
    here: Node, snapshot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_HANGING_SECONDS", 1000.0)
    one = here.service.context.paces.of(here.group)
    with asked(here, snapshot) as call:
        assert next(call).length_bytes == MIB
        assert len(one._queue) == 1
    with erase(one).piece(MIB):
        pass
    assert one.done_bytes == {"erase": MIB}


def test_a_call_that_is_cancelled_waits_for_no_turn(here: Node, snapshot: str) -> None:
    one = here.service.context.paces.of(here.group)
    with erase(one).piece(MIB):
        with asked(here, snapshot):
            until(lambda: len(one._queue) == 2)
        until(lambda: len(one._queue) == 1)


_COMMAND = """
import sys, queue
from pathlib import Path
from agent.csi.client import Client
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import TransferStub

client = Client(Path(sys.argv[1]))
requests = queue.SimpleQueue()
requests.put(carver.TurnRequest(volume_id=sys.argv[2], kind="send", most_bytes=1 << 20))
call = client.stub(TransferStub).TakeTurns(iter(requests.get, None))
print(next(call).length_bytes, flush=True)
sys.stdin.read()
"""


@pytest.mark.starts_programs
@pytest.mark.parametrize(
    ("sent", "hanging_seconds"), [(signal.SIGKILL, 1000.0), (signal.SIGSTOP, 0.5)]
)
def test_a_command_that_is_killed_or_stopped_in_its_turn_bars_no_other(
    here: Node,
    snapshot: str,
    monkeypatch: pytest.MonkeyPatch,
    sent: signal.Signals,
    hanging_seconds: float,
) -> None:
    monkeypatch.setattr(pace, "_HANGING_SECONDS", hanging_seconds)
    words = [sys.executable, "-c", _COMMAND, str(here.at.settings.endpoint), snapshot]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as command:
        try:
            assert command.stdout is not None
            assert command.stdout.readline() == f"{MIB}\n"
            command.send_signal(sent)
            one = here.service.context.paces.of(here.group)
            with erase(one).piece(MIB):
                pass
        finally:
            command.kill()


def test_a_service_that_ends_keeps_no_command_and_is_kept_by_none(
    here: Node, snapshot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def tell(_what: str, _length: int) -> None:
        begun.set()
        assert go_on.wait(20)

    expected = nodes.stream(here, "1")
    watch(here, monkeypatch, tell)
    one = paced_by(here, SLOW, Clock())
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(nodes.stream, here, "1")
        assert begun.wait(20)
        here.service.extras["transfer"].stop()
        until(lambda: not one._queue)
        go_on.set()
        assert sent.result() == expected
    assert "send" not in one.done_bytes
    with asked(here, snapshot) as call, expect.code("ABORTED"):
        next(call)


def test_an_older_service_has_no_turns(
    here: Node, snapshot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = nodes.stream(here, "1")
    older = here.client.channel.stream_stream(
        "/carver.v2.Transfer/OfAnotherVersion",
        carver.TurnRequest.SerializeToString,
        carver.Turn.FromString,
    )
    monkeypatch.setattr(here.transfer, "TakeTurns", older)
    with erase(here.service.context.paces.of(here.group)).piece(MIB):
        assert nodes.stream(here, "1") == expected


class Lost(grpc.RpcError):
    """The connection is lost."""


@pytest.mark.parametrize(("again_seconds", "paced_bytes"), [(0.0, SIZE - 4 * MIB), (60.0, 0)])
def test_turns_are_asked_for_again_a_while_after_the_connection_is_lost(
    here: Node,
    snapshot: str,
    monkeypatch: pytest.MonkeyPatch,
    again_seconds: float,
    paced_bytes: int,
) -> None:
    monkeypatch.setattr(paced, "_AGAIN_SECONDS", again_seconds)
    monkeypatch.setattr(paced, "MOST_BYTES", 4 * MIB)
    take, calls = here.transfer.TakeTurns, list[object]()

    def lost(requests: Iterator[carver.TurnRequest]) -> object:
        calls.append(requests)
        if len(calls) == 1:
            raise Lost
        return take(requests)

    expected = nodes.stream(here, "1")
    monkeypatch.setattr(here.transfer, "TakeTurns", lost)
    before = here.service.context.paces.of(here.group).done_bytes["send"]
    assert nodes.stream(here, "1") == expected
    after = here.service.context.paces.of(here.group).done_bytes["send"]
    assert after - before == paced_bytes


def test_what_is_received_is_flushed_in_its_turn(
    here: Node, there: Node, snapshot: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = nodes.stream(here, "1")
    one, written, flushed = paced_by(there, SLOW, clock), [0], list[tuple[int, int]]()

    def tell(what: str, length: int) -> None:
        written[0] += length
        if what == "flush":
            flushed.append((written[0], len(one._queue)))

    watch(there, monkeypatch, tell)
    nodes.receive(there, "copy", stream)
    assert flushed[0] == (16 * MIB, 1)
    assert flushed[-1][0] == written[0] >= SIZE


def test_a_flush_that_failed_in_a_turn_fails_again(
    here: Node, snapshot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [OSError(5, "lost")]

    def tell(what: str, _length: int) -> None:
        # The kernel says so once.
        if what == "flush" and problems:
            raise problems.pop()

    with here.host.kernel.opened(here.device("vol-db"), to_write=True) as device:
        watched = Watched(device, tell)
        with paced.paced(here.client, snapshot, turns.RECEIVE, watched) as writing:
            for _ in range(15):
                writing.write(0, DATA)
            with pytest.raises(OSError, match="lost"):
                writing.write(0, DATA * 2)
            with pytest.raises(OSError, match="lost"):
                writing.flush()


def test_a_read_that_failed_ends_its_turn(here: Node, snapshot: str) -> None:
    def tell(_what: str, _length: int) -> None:
        raise OSError(5, "unreadable")

    one = here.service.context.paces.of(here.group)
    with (
        here.host.kernel.opened(here.device("snap-1")) as device,
        paced.paced(here.client, snapshot, turns.SEND, Watched(device, tell)) as reading,
    ):
        with pytest.raises(OSError, match="unreadable") as kept:
            reading.read(0, MIB)
        until(lambda: not one._queue)
    assert kept.value.errno == 5
    assert one.done_bytes == {}


@pytest.mark.parametrize(
    ("volume_id", "kind", "most_bytes", "code", "said"),
    [
        ("", "send", MIB, "INVALID_ARGUMENT", "volume_id"),
        (None, "", MIB, "INVALID_ARGUMENT", "kind"),
        (None, "erase", MIB, "INVALID_ARGUMENT", "send, receive, checksum"),
        (None, "send", 0, "INVALID_ARGUMENT", "most_bytes"),
        ("nonsense", "send", MIB, "NOT_FOUND", "nonsense"),
        ("gone@30000000/vol-db", "send", MIB, "INTERNAL", "gone/vol-db"),
    ],
)
def test_a_call_for_no_turn_is_refused(
    here: Node,
    snapshot: str,
    volume_id: str | None,
    kind: str,
    most_bytes: int,
    code: str,
    said: str,
) -> None:
    volume_id = snapshot if volume_id is None else volume_id
    with asked(here, volume_id, kind, most_bytes) as call, expect.code(code, said):
        next(call)
    assert set(here.service.context.paces.every()) <= {here.group}
