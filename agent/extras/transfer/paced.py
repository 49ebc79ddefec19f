"""A device whose reads and writes wait for I/O slots that the service grants.

The commands that send, receive and compare volumes read and write devices in their own process,
while the service's background I/O on the same disks is in another one. So that neither slows the
node's pods, both take I/O slots from one queue in the service (agent/work/pace.py). This module is
the command's side, turns.py the service's. An I/O slot is called a turn in the code and in
proto/carver.proto: the permission to read or write up to so many bytes now.
"""

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

# Bytes that each request asks for. The service grants as many at once only where the background
# bandwidth is not limited.
_ASKED_BYTES = 1 << 30
# Bytes that are written between two flushes. A flush at the end of each I/O slot would be too many,
# as a slot also ends where the pipe is empty.
_FLUSHED_BYTES = 16 << 20
# Time after which I/O slots are asked for again where the service did not grant any, in seconds.
_AGAIN_SECONDS = 10.0


@contextmanager
def paced(caller: Client, volume_id: str, kind: str, device: Opened) -> Iterator[Opened]:
    """Make the device of a volume or a snapshot wait for I/O slots during the `with`.

    `kind` is one of `turns.KINDS`.
    """
    io_slots = IoSlots(caller.stub(TransferStub), volume_id, kind)
    try:
        yield _Paced(device, io_slots)
    finally:
        io_slots.close()


class _Paced(Opened):
    """An open device that several threads read or write in I/O slots.

    Each read or write is split into pieces as long as the slots allow; the data are the same.
    """

    def __init__(self, device: Opened, io_slots: "IoSlots") -> None:
        super().__init__("paced", -1)
        self._opened, self._turns = device, io_slots
        self._unflushed_bytes = 0
        self._problem: OSError | None = None

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        def read(start: int, end: int) -> None:
            self._opened.read_into(offset_bytes + start, buffer[start:end])

        self._in_turns(len(buffer), read)

    def write(self, offset_bytes: int, data: Bytes) -> None:
        view = memoryview(data)

        def write(start: int, end: int) -> None:
            self._opened.write(offset_bytes + start, view[start:end])

        self._in_turns(len(view), write, self._wrote)

    def zero_out(self, offset_bytes: int, length_bytes: int) -> None:
        def zero(start: int, end: int) -> None:
            self._opened.zero_out(offset_bytes + start, end - start)

        self._in_turns(length_bytes, zero, self._wrote)

    def flush(self) -> None:
        if self._problem is not None:
            # The kernel reports a failed write to one fsync(2) only, which may have been the flush
            # of another thread. So all later flushes raise the same error.
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
        transfer_piece: Callable[[int, int], None],
        end_slot: Callable[[int], None] = lambda _turn_bytes: None,
    ) -> None:
        done_bytes = 0
        while done_bytes < length_bytes:
            with self._turns.piece(length_bytes - done_bytes, end_slot) as piece_bytes:
                transfer_piece(done_bytes, done_bytes + piece_bytes)
            done_bytes += piece_bytes

    def _wrote(self, slot_bytes: int) -> None:
        """Flush at the end of an I/O slot if enough was written since the last flush.

        So what was written is flushed inside a slot: others' next fsync(2) does not wait for it.
        """
        self._unflushed_bytes += slot_bytes
        if self._unflushed_bytes >= _FLUSHED_BYTES:
            self.flush()


class IoSlots:
    """The I/O slots of one command, which all its threads share.

    Where other workers may wait for the disks, a slot ends as soon as no thread is reading or
    writing, even if bytes of it are left. So a command that waits for a full or an empty pipe does
    not keep others waiting.

    Where the service does not answer, stops, or is of a version without I/O slots, the command goes
    on without slots, and asks again after `_AGAIN_SECONDS`: a backup that disturbs is better than
    one that failed.
    """

    def __init__(self, transfer: TransferStub, volume_id: str, kind: str) -> None:
        self._transfer, self._volume_id, self._kind = transfer, volume_id, kind
        self._changed = threading.Condition()
        # State of the present slot: bytes left, bytes done, the number of threads that are reading
        # or writing in it, and the number of threads that wait to begin.
        self._left_bytes = self._done_bytes = self._under_way = self._waiting = 0
        # `_is_unlimited`: no other worker waits for the slot's end. `_is_changing`: a thread ends
        # a slot, or waits for the next one.
        self._is_unlimited = self._is_changing = False
        # The answers of the TakeTurns call in progress; None if there is no call.
        self._answers: Iterator[carver.Turn] | None = None
        self._requests: SimpleQueue[carver.TurnRequest | None] = SimpleQueue()
        self._again_at = 0.0

    @contextmanager
    def piece(self, remaining_bytes: int, end_slot: Callable[[int], None]) -> Iterator[int]:
        """Wait for a slot; yield how many of `remaining_bytes` the caller may do inside the `with`.

        `end_slot` is called before the slot ends, with the bytes that were done in the slot, and
        may raise.
        """
        piece_bytes, done_bytes = self._begin(remaining_bytes), 0
        try:
            yield piece_bytes
            done_bytes = piece_bytes
        finally:
            self._end(done_bytes, end_slot)

    def close(self) -> None:
        """Report what was done, and end the call for I/O slots."""
        if self._done_bytes:
            self._report(self._done_bytes)
        self._requests.put(None)
        # Read the answers to their end, so that the service has received the report.
        with suppress(grpc.RpcError):
            for _ in self._answers or ():
                pass
        self._answers = None

    def _begin(self, wanted_bytes: int) -> int:
        """Wait for a slot; return how many of the wanted bytes may be done in it.

        The result is a multiple of LEAST_BYTES, as direct I/O takes whole blocks, but for the end
        of what is wanted.
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
        """Whether a thread may begin: in the present slot, or by asking for a new one."""
        return bool(self._left_bytes) or not self._under_way

    def _end(self, done_bytes: int, end_slot: Callable[[int], None]) -> None:
        with self._changed:
            self._done_bytes += done_bytes
            self._under_way -= 1
            goes_on = self._left_bytes and (self._waiting or self._is_unlimited)
            if self._under_way or goes_on:
                return
            self._is_changing, slot_bytes = True, self._done_bytes
        try:
            end_slot(slot_bytes)
        finally:
            self._report(slot_bytes)
            self._change(0)

    def _report(self, slot_bytes: int) -> None:
        if self._answers is not None:
            self._requests.put(carver.TurnRequest(done_bytes=slot_bytes))

    def _change(self, left_bytes: int) -> None:
        with self._changed:
            self._left_bytes, self._done_bytes, self._is_changing = left_bytes, 0, False
            self._changed.notify_all()

    def _ask(self) -> int:
        """Ask the service for a slot, and wait for it; return its length in bytes.

        Without the service's answer, return MOST_BYTES.
        """
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
