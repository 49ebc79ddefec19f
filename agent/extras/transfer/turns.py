"""Grant I/O slots to commands (TakeTurns, proto/carver.proto).

An I/O slot, called a turn in the code, is the permission to read or write up to so many bytes of a
volume group's disks now. The service's background tasks and the commands that send, receive and
compare volumes take slots from one queue (agent/work/pace.py). paced.py is the command's side.
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

# The most bytes of one slot. A slot is short, as a command can be killed in a slot at any time.
_MOST_BYTES = 512 << 20
# The kinds of work for which a command can ask for slots.
SEND, RECEIVE, CHECKSUM = KINDS = ("send", "receive", "checksum")


class IoSlots:
    """Grants I/O slots to all commands.

    A command that is killed loses its slot at once, with its connection. A command that hangs in
    its slot does not keep other workers waiting for long, as any worker (agent/work/pace.py).
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
        """Grant a slot for each request, when the command's position in the queue comes.

        Ends when the command asks for no more. The volume's device must be active. Raises
        NotAllowed, BadField, NoSuchVolume, Inactive, NotWanted, Stopping.
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

        work = self._paces.of(logical.group).work(
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
        """End the slots of all commands, and grant no more."""
        with self._guard:
            self._is_stopping, calls = True, list(self._open)
        for call in calls:
            call.cancel()

    def _add(self, context: grpc.ServicerContext) -> None:
        with self._guard:
            if self._is_stopping:
                raise Stopping("turns")
            self._open.add(context)
