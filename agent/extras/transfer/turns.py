"""Give commands turns in their group's background I/O (TakeTurns, proto/carver.proto)."""

import threading
from collections.abc import Generator, Iterator

import grpc

from agent.core import errors
from agent.volumes import backing
from agent.volumes.context import Context
from agent.work.group_worker import Stopping
from lvm import lvm_errors as lvm_errors
from proto import carver_pb2 as carver

# A command can be killed at any time.
_MOST_BYTES = 512 << 20
SEND, RECEIVE, CHECKSUM = KINDS = ("send", "receive", "checksum")


class Turns:
    """The turns of all commands.

    A command that is killed loses its turn at once, with its connection. One that hangs in its turn
    is passed by, as any worker (agent/work/pace.py).
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
        """Answer each request for a turn when it is the command's, until it wants no more.

        The device must be active. Raises NotAllowed, BadField, NoSuchVolume, Inactive,
        NotWanted, Stopping.
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
        asked: carver.TurnRequest | None = first
        self._add(context)
        try:
            while asked is not None:
                if not asked.most_bytes:
                    raise errors.BadField("most_bytes", "is 0; ask for at least 1")
                with work.piece(asked.most_bytes) as piece:
                    granted = carver.Turn(
                        length_bytes=piece.length_bytes, unlimited=work.pace.is_unlimited
                    )
                    piece.length_bytes = 0
                    yield granted
                    if (ended := next(requests, None)) is not None:
                        piece.length_bytes = ended.done_bytes
                asked = next(requests, None)
        except grpc.RpcError:
            raise errors.NotWanted("turns") from None
        finally:
            with self._guard:
                self._open.discard(context)

    def stop(self) -> None:
        """End all of them, and give no more."""
        with self._guard:
            self._is_stopping, those = True, list(self._open)
        for one in those:
            one.cancel()

    def _add(self, context: grpc.ServicerContext) -> None:
        with self._guard:
            if self._is_stopping:
                raise Stopping("turns")
            self._open.add(context)
