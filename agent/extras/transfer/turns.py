"""Grant I/O slots to commands (TakeTurns, proto/carver.proto).

An I/O slot, called a turn in the code, is the permission to read or write a number of bytes on the
disks of a volume group now. The service's background tasks and the commands that send, receive and
compare volumes take I/O slots from one queue (agent/work/pace.py). paced.py is the command's side
of that queue.
"""

import threading
from collections.abc import Generator, Iterator

import grpc

from agent.core import errors
from agent.volumes import backing
from agent.volumes.context import Context
from agent.work.group_worker import Stopping
from lvm import lvm_errors as lvm_errors
from proto import carver_pb2 as carver

# Maximum number of bytes in one I/O slot of a command, unless the background bandwidth is
# unlimited. A slot is short, because a command can be killed in a slot at any time.
_MOST_BYTES = 512 << 20
# Kinds of work for which a command can ask for I/O slots.
SEND, RECEIVE, CHECKSUM = KINDS = ("send", "receive", "checksum")


class IoSlots:
    """Grants I/O slots to all commands that send, receive or compare volumes.

    A command that is killed loses its slot at once, with its connection. A command that hangs in
    its slot keeps other workers waiting for two seconds only, like any other worker (rule 3 of
    agent/work/pace.py).
    """

    def __init__(self, context: Context) -> None:
        self._devices, self._paces = context.devices, context.paces
        self._guard = threading.Lock()
        self._open = set[grpc.ServicerContext]()
        self._is_stopping = False

    def give(
        self,
        first: carver.TurnRequest,
        requests: Iterator[carver.TurnRequest],
        context: grpc.ServicerContext,
    ) -> Generator[carver.Turn, None, None]:
        """Grant a command an I/O slot for each of its requests, in the order of the queue.

        Yields each slot as a Turn. The command ends the slot by its next request, which has the
        number of bytes that were done. The generator ends when the command sends no more requests.

        Raises NotAllowed if the kind of work is unknown, BadField if a request asks for 0 bytes,
        NoSuchVolume if the id is not that of a volume or snapshot, Inactive if the volume is
        inactive, NotWanted if the command is gone, and Stopping after `stop`.
        """
        if first.kind not in KINDS:
            raise errors.NotAllowed("kind", first.kind, KINDS)
        logical = backing.of_id(first.volume_id)
        if not logical.group:
            raise errors.NoSuchVolume(first.volume_id)
        device = self._devices.find(logical.group, logical.name)
        if device is None:
            raise lvm_errors.Inactive(logical.group, logical.name)

        def check() -> None:
            if not context.is_active():
                raise errors.NotWanted("turns")

        work = self._paces.of(logical.group).task(
            first.kind, device.path, check=check, most_bytes=_MOST_BYTES, may_join=True
        )
        request: carver.TurnRequest | None = first
        self._add(context)
        try:
            while request is not None:
                if not request.most_bytes:
                    raise errors.BadField("most_bytes", "is 0; ask for at least 1")
                with work.piece(request.most_bytes) as piece:
                    granted = carver.Turn(
                        length_bytes=piece.length_bytes, unlimited=work.pace.is_unlimited
                    )
                    piece.length_bytes = 0
                    yield granted
                    if (ended := next(requests, None)) is not None:
                        piece.length_bytes = ended.done_bytes
                request = next(requests, None)
        except grpc.RpcError:
            raise errors.NotWanted("turns") from None
        finally:
            with self._guard:
                self._open.discard(context)

    def stop(self) -> None:
        """End the I/O slots of all commands by cancelling their calls, and grant no more slots."""
        with self._guard:
            self._is_stopping, calls = True, list(self._open)
        for call in calls:
            call.cancel()

    def _add(self, context: grpc.ServicerContext) -> None:
        with self._guard:
            if self._is_stopping:
                raise Stopping("turns")
            self._open.add(context)
