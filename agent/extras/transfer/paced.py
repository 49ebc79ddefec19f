"""A device whose reads and writes wait for the service's turns (turns.py), in the command."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import grpc

from agent.csi.client import Client
from agent.work.pace import LEAST_BYTES, MOST_BYTES
from mount.block_io import Bytes, Opened
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import TransferStub

# What is asked for: so much is granted at once only where there is no limit.
_ASKED_BYTES = 1 << 30
# So much is written before it is flushed: a turn also ends where a pipe is empty.
_FLUSHED_BYTES = 16 << 20
# How soon turns are asked for again where there are none.
_AGAIN_SECONDS = 10.0


@contextmanager
def paced(caller: Client, volume_id: str, kind: str, device: Opened) -> Iterator[Opened]:
    """Inside, the device of a volume or a snapshot waits for turns; `kind` is of turns.KINDS."""
    turns = _Turns(caller.stub(TransferStub), volume_id, kind)
    try:
        yield _Paced(device, turns)
    finally:
        turns.close()


class _Paced(Opened):
    """An open device that is used in turns, by several threads at once.

    Pieces are as long as a turn lasts: what is read or written is the same without.
    """

    def __init__(self, device: Opened, turns: "_Turns") -> None:
        super().__init__("paced", -1)
        self._opened, self._turns = device, turns
        self._unflushed_bytes = 0
        self._problem: OSError | None = None

    def read_into(self, offset_bytes: int, place: memoryview) -> None:
        def read(at: int, end: int) -> None:
            self._opened.read_into(offset_bytes + at, place[at:end])

        self._in_turns(len(place), read)

    def write(self, offset_bytes: int, data: Bytes) -> None:
        view = memoryview(data)

        def write(at: int, end: int) -> None:
            self._opened.write(offset_bytes + at, view[at:end])

        self._in_turns(len(view), write, self._wrote)

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        def zero(at: int, end: int) -> None:
            self._opened.zero_out(offset_bytes + at, end - at)

        self._in_turns(length_bytes, zero, self._wrote)

    def flush(self) -> None:
        if self._problem is not None:
            # The kernel reports it once (fsync(2)), and this flush is perhaps another thread's.
            raise self._problem
        try:
            self._opened.flush()
        except OSError as error:
            self._problem = error
            raise
        self._unflushed_bytes = 0

    def _in_turns(
        self,
        length_bytes: int,
        act: Callable[[int, int], None],
        ending: Callable[[int], None] = lambda _turn_bytes: None,
    ) -> None:
        at = 0
        while at < length_bytes:
            with self._turns.piece(length_bytes - at, ending) as piece_bytes:
                act(at, at + piece_bytes)
            at += piece_bytes

    def _wrote(self, turn_bytes: int) -> None:
        """A turn ends in which so much was written: others' next flush is not to pay for it."""
        self._unflushed_bytes += turn_bytes
        if self._unflushed_bytes >= _FLUSHED_BYTES:
            self.flush()


class _Turns:
    """The turns of one command, which its threads share.

    Where others may wait, a turn ends once nothing is under way, even if less was done than it was
    for: a command whose pipe is full or empty keeps no other waiting.

    Where the service does not answer, ends, or is of a version without turns, the command goes on
    without, and asks again after ten seconds: a backup that is late is better than one that failed.
    """

    def __init__(self, transfer: TransferStub, volume_id: str, kind: str) -> None:
        self._transfer, self._volume_id, self._kind = transfer, volume_id, kind
        self._changed = threading.Condition()
        # Of the turn: what is left, and what was done; how many threads are in it, and how many are
        # to begin. `_is_changing` while one ends or is waited for.
        self._left_bytes = self._done_bytes = self._under_way = self._waiting = 0
        self._is_unlimited = self._is_changing = False
        # The call; None where there is none.
        self._answers: Iterator[carver.Turn] | None = None
        self._requests: SimpleQueue[carver.TurnRequest | None] = SimpleQueue()
        self._again_at = 0.0

    @contextmanager
    def piece(self, left_bytes: int, ending: Callable[[int], None]) -> Iterator[int]:
        """Wait for a turn; yield how many bytes of what is left may be done inside.

        `ending` is called before the turn ends, with what was done in it; it may raise.
        """
        piece_bytes, done_bytes = self._begin(left_bytes), 0
        try:
            yield piece_bytes
            done_bytes = piece_bytes
        finally:
            self._end(done_bytes, ending)

    def close(self) -> None:
        """Want no more turns."""
        if self._done_bytes:
            self._report(self._done_bytes)
        self._requests.put(None)
        # Until the service has heard of it.
        with suppress(grpc.RpcError):
            for _ in self._answers or ():
                pass
        self._answers = None

    def _begin(self, wanted_bytes: int) -> int:
        """Wait for a turn; return how much of what is wanted may be done in it.

        In whole pieces of LEAST_BYTES but for the end: direct I/O takes whole blocks.
        """
        while True:
            with self._changed:
                self._waiting += 1
                self._changed.wait_for(lambda: not self._is_changing and self._is_open)
                self._waiting -= 1
                if self._left_bytes:
                    most_bytes = max(self._left_bytes // LEAST_BYTES, 1) * LEAST_BYTES
                    piece_bytes = min(most_bytes, wanted_bytes)
                    self._left_bytes = max(self._left_bytes - piece_bytes, 0)
                    self._under_way += 1
                    return piece_bytes
                self._is_changing = True
            granted_bytes = 0
            try:
                granted_bytes = self._ask()
            finally:
                self._change(granted_bytes)

    @property
    def _is_open(self) -> bool:
        """Whether a thread may begin: in the turn, or by asking for one."""
        return bool(self._left_bytes) or not self._under_way

    def _end(self, done_bytes: int, ending: Callable[[int], None]) -> None:
        with self._changed:
            self._done_bytes += done_bytes
            self._under_way -= 1
            goes_on = self._left_bytes and (self._waiting or self._is_unlimited)
            if self._under_way or goes_on:
                return
            self._is_changing, turn_bytes = True, self._done_bytes
        try:
            ending(turn_bytes)
        finally:
            self._report(turn_bytes)
            self._change(0)

    def _report(self, turn_bytes: int) -> None:
        if self._answers is not None:
            self._requests.put(carver.TurnRequest(done_bytes=turn_bytes))

    def _change(self, left_bytes: int) -> None:
        with self._changed:
            self._left_bytes, self._done_bytes, self._is_changing = left_bytes, 0, False
            self._changed.notify_all()

    def _ask(self) -> int:
        """Ask for a turn, and wait for it; return for how much it is."""
        request = carver.TurnRequest(most_bytes=_ASKED_BYTES)
        try:
            if self._answers is None:
                if time.monotonic() < self._again_at:
                    return MOST_BYTES
                self._requests = SimpleQueue()
                request.volume_id, request.kind = self._volume_id, self._kind
                self._answers = self._transfer.TakeTurns(iter(self._requests.get, None))
            self._requests.put(request)
            if (granted := next(self._answers, None)) is not None:
                self._is_unlimited = granted.unlimited
                return granted.length_bytes
        except grpc.RpcError:
            pass
        self._requests.put(None)
        self._answers, self._is_unlimited = None, True
        self._again_at = time.monotonic() + _AGAIN_SECONDS
        return MOST_BYTES
