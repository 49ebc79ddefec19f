"""A device whose reads and writes wait for I/O slots that the service grants.

The commands that send, receive and compare volumes read and write devices in their own process,
while the service does background I/O on the same disks. So that neither slows the node's pods,
commands and service take I/O slots from one queue in the service (agent/work/pace.py). This module
is the command's side of that queue, turns.py is the service's side.

An I/O slot is the permission to read or write a number of bytes now. The code and
proto/carver.proto also call it a turn.
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

# Number of bytes that a command asks for in each request for an I/O slot. The service grants so
# many bytes at once only if the background bandwidth is not limited.
_ASKED_BYTES = 1 << 30
# Number of bytes that a command writes between two flushes. A flush at the end of each I/O slot
# would be too many, because a slot also ends when the pipe is empty.
_FLUSHED_BYTES = 16 << 20
# Time after which a command asks for I/O slots again if the service did not grant any, in seconds.
_AGAIN_SECONDS = 10.0


@contextmanager
def paced(caller: Client, volume_id: str, kind: str, device: Opened) -> Iterator[Opened]:
    """Wrap the device of a volume or snapshot for the `with`: reads and writes wait for I/O slots.

    `kind` is the kind of work, one of `turns.KINDS`.
    """
    io_slots = IoSlots(caller.stub(TransferStub), volume_id, kind)
    try:
        yield _Paced(device, io_slots)
    finally:
        io_slots.close()


class _Paced(Opened):
    """An open device that several threads read or write, as far as I/O slots allow.

    Each read or write is split into pieces that fit into the slots. The data are the same.
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
            # of another thread. So raise that error again at each later flush.
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
        """Flush at the end of an I/O slot if `_FLUSHED_BYTES` were written since the last flush.

        The flush is inside the slot, so that the next fsync(2) of another program does not wait for
        the data of this command.
        """
        self._unflushed_bytes += slot_bytes
        if self._unflushed_bytes >= _FLUSHED_BYTES:
            self.flush()


class IoSlots:
    """The I/O slots of one command, which all threads of the command share.

    If other workers may wait for the disks, an I/O slot ends as soon as no thread uses it or waits
    for it, even if bytes of the slot are left. So a command that waits for a full or an empty pipe
    does not keep other workers waiting.

    If the service does not answer, stops, or is of a version without I/O slots, the command goes on
    without slots, and asks again after `_AGAIN_SECONDS`: a backup that slows other programs is
    better than a backup that failed.
    """

    def __init__(self, transfer: TransferStub, volume_id: str, kind: str) -> None:
        self._transfer, self._volume_id, self._kind = transfer, volume_id, kind
        self._changed = threading.Condition()
        # State of the present I/O slot: the number of bytes left, the number of bytes done, the
        # number of threads that read or write in the slot, and the number of threads that wait to
        # begin.
        self._left_bytes = self._done_bytes = self._under_way = self._waiting = 0
        # `_is_unlimited` is true if no other worker waits for the end of the I/O slot.
        # `_is_changing` is true while a thread ends the slot, or waits for the next one.
        self._is_unlimited = self._is_changing = False
        # The responses of the TakeTurns call in progress; None if there is no call.
        self._answers: Iterator[carver.Turn] | None = None
        self._requests: SimpleQueue[carver.TurnRequest | None] = SimpleQueue()
        self._again_at = 0.0

    @contextmanager
    def piece(self, remaining_bytes: int, end_slot: Callable[[int], None]) -> Iterator[int]:
        """Wait for an I/O slot; yield how many bytes the caller may read or write in the `with`.

        These are at most `remaining_bytes`. `end_slot` is called before the slot ends, with the
        number of bytes that all threads did in the slot, and may raise an error.
        """
        piece_bytes, done_bytes = self._begin(remaining_bytes), 0
        try:
            yield piece_bytes
            done_bytes = piece_bytes
        finally:
            self._end(done_bytes, end_slot)

    def close(self) -> None:
        """Report the bytes that were done in the last I/O slot, and end the TakeTurns call."""
        if self._done_bytes:
            self._report(self._done_bytes)
        self._requests.put(None)
        # Read the responses to their end, so that the service has received the report.
        with suppress(grpc.RpcError):
            for _ in self._answers or ():
                pass
        self._answers = None

    def _begin(self, wanted_bytes: int) -> int:
        """Wait for an I/O slot; return how many of `wanted_bytes` may be done in the slot.

        The result is a multiple of LEAST_BYTES, because direct I/O takes whole blocks, or it is all
        of `wanted_bytes`.
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
        """Whether a waiting thread may go on: use the present I/O slot, or ask for a new one."""
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
        """Ask the service for an I/O slot, and wait for it; return the slot's length in bytes.

        Returns MOST_BYTES if the service does not answer. The service is then not asked again for
        `_AGAIN_SECONDS`.
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
