"""What sends, receives and moves volumes asks of the service: parse, hold the volume, call policy.

On the same socket as CSI, which only root can open; beside it the command reads and writes the
devices itself. Numbers are texts in the requests and answers (agent/csi/own.py): a Struct's are
floating-point, and a size may be larger than these are exact. What was written between two
snapshots, or differs, is asked for and told in CSI's messages for GetMetadataDelta, but in offsets
of the logical volume: a stream has an encrypted volume as it lies, with its header.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

from agent.core import errors, ids
from agent.core.locks import VolumeLocks
from agent.csi import own
from agent.daemon.extra import Extra
from agent.daemon.server import Service
from agent.extras.changed_blocks import service as changed_blocks
from agent.extras.changed_blocks.service import SnapshotMetadata
from agent.extras.streams import form
from agent.extras.transfer.moving import Mover
from agent.extras.transfer.receiving import Arrival, Receiver
from agent.extras.transfer.sending import Sender
from lvm import names

# PATH_MAX of linux/limits.h; and a header's.
_LONGEST = 64 << 10
Told = Mapping[str, str]


def add(service: Service) -> "Transfer":
    """Make the extra of a service."""
    readings = changed_blocks.of(service)
    context, deleter, holds = service.context, service.deleter, service.holds
    return Transfer(
        Sender(context, readings.delta.activations),
        Receiver(context, deleter, service.pool_remover, holds),
        Mover(context, deleter, holds),
        readings.metadata,
        service.locks,
    )


class Transfer(Extra):
    """The calls, by their names."""

    def __init__(
        self,
        sender: Sender,
        receiver: Receiver,
        mover: Mover,
        metadata: SnapshotMetadata,
        locks: VolumeLocks,
    ) -> None:
        self._sender, self._receiver, self._mover = sender, receiver, mover
        self._metadata = metadata
        self._locks = locks

    def add_services(self, server: grpc.Server) -> None:
        """Register Carver's own service of transfers."""
        server.add_generic_rpc_handlers((self._handler(),))

    def _handler(self) -> grpc.GenericRpcHandler:
        calls: Mapping[str, Callable[[Told], object]] = {
            "OpenSnapshot": self._open,
            "CloseSnapshot": self._close,
            "SnapshotChain": self._chain,
            "ReceiveStatus": self._receive_status,
            "BeginReceive": self._begin_receive,
            "RecordReceive": self._record_receive,
            "EndReceive": self._end_receive,
            "OpenReceived": self._open_received,
            "FinishReceive": self._finish_receive,
            "AbortReceive": self._abort_receive,
            "WithdrawReceive": self._withdraw_receive,
            "MoveStatus": lambda told: self._mover.named(_of(told, "name")),
            "BeginMove": self._begin_move,
            "HoldMove": self._hold_move,
            "ReleaseMove": self._release_move,
            "CommitMove": self._commit_move,
            "UndoMove": self._undo_move,
            "FinishMove": self._finish_move,
        }
        once = {name: _call(act) for name, act in calls.items()}
        streams = {own.WRITTEN: self._metadata.written, own.DIFFERING: self._metadata.differing}
        return own.handler(own.TRANSFER, once, streams)

    def _open(self, told: Told) -> object:
        snapshot_id = _of(told, "snapshot_id")
        header, word = self._sender.open(snapshot_id, told.get("base_snapshot_id", ""))
        return {"header": form.text_of(header).decode(), "word": word}

    def _close(self, told: Told) -> None:
        self._sender.close(_of(told, "snapshot_id"), _of(told, "word"))

    def _chain(self, told: Told) -> object:
        return {"chain": self._sender.chain(_of(told, "snapshot_id"))}

    def _receive_status(self, told: Told) -> object:
        found = self._receiver.status(_of(told, "name"))
        return found or Arrival("", "absent")

    def _begin_receive(self, told: Told) -> object:
        name, header = _of(told, "name"), form.header_of(_of(told, "header"))
        with self._locks.hold(names.logical_volume(ids.VOLUME_PREFIX, name)):
            return self._receiver.begin(name, told.get("class", ""), header)

    def _record_receive(self, told: Told) -> None:
        volume_id, into = _of(told, "volume_id"), _of(told, "into")
        offset = _of(told, "offset_bytes")
        if not (offset.isascii() and offset.isdigit()):
            raise errors.BadField("offset_bytes", "is no number")
        with self._held(volume_id):
            self._receiver.record(volume_id, into, int(offset))

    def _end_receive(self, told: Told) -> None:
        volume_id, header = _of(told, "volume_id"), form.header_of(_of(told, "header"))
        with self._held(volume_id):
            self._receiver.end(volume_id, header)

    def _open_received(self, told: Told) -> None:
        volume_id = _of(told, "volume_id")
        with self._held(volume_id):
            self._receiver.open(volume_id)

    def _finish_receive(self, told: Told) -> None:
        volume_id = _of(told, "volume_id")
        with self._held(volume_id):
            self._receiver.finish(volume_id, told.get("release", ""))

    def _abort_receive(self, told: Told) -> None:
        volume_id = _of(told, "volume_id")
        with self._held(volume_id):
            self._receiver.abort(volume_id)

    def _withdraw_receive(self, told: Told) -> None:
        volume_id = _of(told, "volume_id")
        with self._held(volume_id):
            self._receiver.withdraw(volume_id, _of(told, "release"))

    def _begin_move(self, told: Told) -> object:
        volume_id, node = _of(told, "volume_id"), _of(told, "node")
        with self._held(volume_id):
            return self._mover.begin(volume_id, node)

    def _hold_move(self, told: Told) -> object:
        volume_id = _of(told, "volume_id")
        # Held: no call is about to use it that looked before.
        with self._held(volume_id):
            return {"word": self._mover.hold(volume_id, told.get("word", ""))}

    def _release_move(self, told: Told) -> None:
        self._mover.release(_of(told, "volume_id"), _of(told, "word"))

    def _commit_move(self, told: Told) -> object:
        volume_id, snapshot_id = _of(told, "volume_id"), _of(told, "snapshot_id")
        with self._held(volume_id):
            return self._mover.commit(volume_id, snapshot_id, _of(told, "word"))

    def _undo_move(self, told: Told) -> None:
        volume_id = _of(told, "volume_id")
        with self._held(volume_id):
            self._mover.undo(volume_id)

    def _finish_move(self, told: Told) -> None:
        volume_id = _of(told, "volume_id")
        with self._held(volume_id):
            self._mover.finish(volume_id)

    def _held(self, volume_id: str) -> Any:
        return self._locks.hold(ids.logical_name(volume_id))


def _call(act: Callable[[Told], object]) -> own.Call:
    def call(request: Struct, _context: grpc.ServicerContext) -> Struct:
        told: dict[str, str] = {}
        for key, value in request.items():
            if not isinstance(value, str) or len(value) > _LONGEST:
                raise errors.BadField(key, "is no text")
            told[key] = value
        return _answer(act(told))

    return call


def _of(told: Told, field: str) -> str:
    """A field that must be there; raises Missing, BadField."""
    if not (value := told.get(field, "")):
        raise errors.Missing(field)
    if not value.isprintable():
        raise errors.BadField(field, "is no name: a text of one line")
    return value


def _answer(found: Any) -> Struct:
    made = Struct()
    if found is not None:
        values = found if isinstance(found, dict) else asdict(found)
        made.update({key: str(one) for key, one in values.items()})
    return made
