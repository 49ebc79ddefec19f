"""The gRPC service Transfer, by which commands send, receive and move volumes.

The service is on the same socket as CSI, which only root can open. A call checks its request, locks
the volume, runs one operation, and answers. The command itself reads and writes the devices.
proto/carver.proto describes the calls. Ranges are in offsets of the logical volume: an encrypted
volume is sent as ciphertext, with its LUKS header.
"""
# ruff: noqa: D102, N802

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from agent.core import ids
from agent.csi import operator
from agent.daemon.extra import Extra
from agent.daemon.server import Service
from agent.extras.changed_blocks import changed_blocks_service as changed_blocks
from agent.extras.changed_blocks.extents import LogicalOffset
from agent.extras.streams import form
from agent.extras.transfer import move_list
from agent.extras.transfer.moving import Mover
from agent.extras.transfer.node_streams import NodeStreams
from agent.extras.transfer.receiving import Receiver
from agent.extras.transfer.stream_descriptions import Sender
from agent.extras.transfer.turns import IoSlots
from lvm import names
from proto import carver_pb2 as carver
from proto import carver_pb2_grpc

# Maximum length of a string in a request, in characters. A stream's header is such a string.
_MAX_CHARACTERS = 64 << 10
# RPCs that controllers may call over TLS, and those that other nodes may call, where the setting
# `evacuation` is true. All others are served on the unix socket only.
OF_CONTROLLER = frozenset(
    {
        *("BeginMove", "MoveStatus", "HoldMove", "ReleaseMove", "CommitMove"),
        *("UndoMove", "FinishMove", "Moves", "SnapshotChain", "Checksum"),
        *("ReceiveStatus", "FinishReceive", "WithdrawReceive", "AbortReceive", "Pull"),
    }
)
OF_NODES = frozenset({"Send", "SendDiffering"})
_Context = grpc.ServicerContext
_Ranges = Generator[carver.RangesResponse, None, None]


def add(service: Service) -> "Transfer":
    """Make the extra `transfer` of a service."""
    return Transfer(service)


class Transfer(Extra, carver_pb2_grpc.TransferServicer):
    """The extra `transfer`, and its gRPC service."""

    def __init__(self, service: Service) -> None:
        context, self._locks = service.context, service.context.locks
        self._reports, self._configuration = context.reports, context.configuration
        self._delta = changed_blocks.of(service).delta
        self._sender = Sender(context, self._delta.activations)
        self._receiver = Receiver(context, service.deleter, service.pool_remover)
        self._mover = Mover(context, service.deleter)
        self._turns = IoSlots(context)
        self._node_streams = NodeStreams(service, self._mover)

    def add_services(self, server: grpc.Server) -> None:
        """Register the gRPC service Transfer with the server."""
        carver_pb2_grpc.add_TransferServicer_to_server(self, server)

    def add_between_nodes(self, server: grpc.Server, certificates: Callable[[], Any]) -> None:
        """Register the RPCs of OF_CONTROLLER and OF_NODES with the server for the controller.

        `certificates` returns this node's certificate and the authorities that it trusts. The
        server has to check who calls.
        """
        self._node_streams.serve(certificates)
        allowed: Any = _Allowed(server, OF_CONTROLLER | OF_NODES)
        carver_pb2_grpc.add_TransferServicer_to_server(self, allowed)

    # RPCs by which a command sends a snapshot.

    def OpenSnapshot(
        self, request: carver.OpenSnapshotRequest, context: _Context
    ) -> carver.OpenSnapshotResponse:
        _require(request, "snapshot_id")
        header, lease = self._sender.open(request.snapshot_id, request.base_snapshot_id)
        return carver.OpenSnapshotResponse(header=form.text_of(header).decode(), lease=lease)

    def CloseSnapshot(self, request: carver.CloseSnapshotRequest, context: _Context) -> Empty:
        _require(request, "snapshot_id", "lease")
        group = ids.group_of(request.snapshot_id)
        self._delta.activations.end_lease(group, request.lease)
        return Empty()

    def SnapshotChain(
        self, request: carver.SnapshotChainRequest, context: _Context
    ) -> carver.SnapshotChainResponse:
        _require(request, "snapshot_id")
        return carver.SnapshotChainResponse(chain=self._sender.chain(request.snapshot_id))

    def GetWritten(self, request: carver.RangesRequest, context: _Context) -> _Ranges:
        _require(request, "snapshot_id")
        return self._read(request, context, is_compared=False)

    def GetDiffering(self, request: carver.RangesRequest, context: _Context) -> _Ranges:
        _require(request, "snapshot_id", "base_snapshot_id")
        return self._read(request, context, is_compared=True)

    def _read(
        self, request: carver.RangesRequest, context: _Context, *, is_compared: bool
    ) -> _Ranges:
        target, base = request.snapshot_id, request.base_snapshot_id
        changed_blocks.require_snapshots(*filter(None, (base, target)))
        is_wanted = context.is_active
        open_reading = (
            self._delta.changed(base, target, is_wanted, is_compared=is_compared)
            if base
            else self._delta.allocated(target, is_wanted, is_compared=False)
        )
        return changed_blocks.in_pieces(
            open_reading,
            lambda reading: (
                reading.size_bytes,
                reading.extents(LogicalOffset(request.starting_offset)),
            ),
            _ranges,
        )

    # RPCs by which a command that sends or receives gets I/O slots.

    def TakeTurns(
        self, requests: Iterator[carver.TurnRequest], context: _Context
    ) -> Generator[carver.Turn, None, None]:
        first = next(requests)
        _require(first, "volume_id", "kind")
        return self._turns.give(first, requests, context)

    def stop(self) -> None:
        """End the streams of other nodes, and the I/O slots of all commands: both may take hours.

        The commands go on without slots.
        """
        self._node_streams.stop()
        self._turns.stop()

    # RPCs by which a command receives a volume.

    def ReceiveStatus(self, request: carver.NameRequest, context: _Context) -> carver.ReceiveState:
        _require(request, "name")
        return self._receiver.status(request.name)

    def BeginReceive(
        self, request: carver.BeginReceiveRequest, context: _Context
    ) -> carver.ReceiveState:
        _require(request, "name", "header")
        header = form.header_of(request.header)
        with self._locks.hold(names.logical_volume(ids.VOLUME_PREFIX, request.name)):
            return self._receiver.begin(
                request.name, request.device_class, header, request.replaces
            )

    def RecordReceive(self, request: carver.RecordReceiveRequest, context: _Context) -> Empty:
        with self._held(request, "into"):
            self._receiver.record(request.volume_id, request.into, request.offset_bytes)
        return Empty()

    def EndReceive(self, request: carver.EndReceiveRequest, context: _Context) -> Empty:
        with self._held(request, "header"):
            self._receiver.end(request.volume_id, form.header_of(request.header))
        return Empty()

    def OpenReceived(self, request: carver.VolumeRequest, context: _Context) -> Empty:
        with self._held(request):
            self._receiver.open(request.volume_id)
        return Empty()

    def FinishReceive(self, request: carver.ReleaseRequest, context: _Context) -> Empty:
        with self._held(request):
            self._receiver.finish(request.volume_id, request.release)
        return Empty()

    def KeepReceived(self, request: carver.VolumeRequest, context: _Context) -> Empty:
        with self._held(request):
            self._receiver.keep(request.volume_id)
        return Empty()

    def AbortReceive(self, request: carver.MoveRequest, context: _Context) -> Empty:
        with self._held(request):
            self._receiver.abort(request.volume_id, request.release)
        return Empty()

    def WithdrawReceive(self, request: carver.ReleaseRequest, context: _Context) -> Empty:
        with self._held(request, "release"):
            self._receiver.withdraw(request.volume_id, request.release)
        return Empty()

    # RPCs by which a command moves a volume.

    def MoveStatus(self, request: carver.NameRequest, context: _Context) -> carver.MoveState:
        _require(request, "name")
        return self._mover.status(request.name)

    def BeginMove(self, request: carver.BeginMoveRequest, context: _Context) -> carver.MoveState:
        with self._held(request, "node"):
            return self._mover.begin(request.volume_id, request.node, request.replaces)

    def HoldMove(
        self, request: carver.HoldMoveRequest, context: _Context
    ) -> carver.HoldMoveResponse:
        # Take the volume's lock, so that no other call that checked the volume before is about to
        # use it.
        with self._held(request):
            token = self._mover.hold(request.volume_id, request.token)
            return carver.HoldMoveResponse(token=token)

    def ReleaseMove(self, request: carver.HoldMoveRequest, context: _Context) -> Empty:
        _require(request, "volume_id", "token")
        self._mover.release(request.volume_id, request.token)
        return Empty()

    def CommitMove(self, request: carver.CommitMoveRequest, context: _Context) -> carver.MoveState:
        with self._held(request, "snapshot_id", "token"):
            return self._mover.commit(request.volume_id, request.snapshot_id, request.token)

    def UndoMove(self, request: carver.MoveRequest, context: _Context) -> Empty:
        with self._held(request):
            self._mover.undo(request.volume_id, request.release, only_begun=request.only_begun)
        return Empty()

    def FinishMove(self, request: carver.MoveRequest, context: _Context) -> Empty:
        with self._held(request):
            self._mover.finish(request.volume_id, request.release)
        return Empty()

    def Moves(self, request: Empty, context: _Context) -> carver.MovesResponse:
        return move_list.moves(self._reports.fresh(), self._configuration.now)

    # RPCs by which the cluster's controller has a volume moved from node to node.

    def Pull(
        self, request: carver.PullRequest, context: _Context
    ) -> Generator[carver.PullProgress, None, None]:
        _require(request, "name", "release")
        _require(request.source, "node", "address", "volume_id", "snapshot_id")
        return self._node_streams.pull(request, context)

    def Send(
        self, request: carver.SendRequest, context: _Context
    ) -> Generator[carver.SendPart, None, None]:
        return self._node_streams.send(request, context)

    def SendDiffering(
        self, requests: Iterator[carver.SendRequest], context: _Context
    ) -> Generator[carver.SendPart, None, None]:
        return self._node_streams.send_differing(requests, context)

    def Checksum(
        self, request: carver.ChecksumRequest, context: _Context
    ) -> Generator[carver.ChecksumProgress, None, None]:
        if not request.snapshot_id:
            _require(request, "name")
        return self._node_streams.checksum(request, context)

    def _held(self, request: Any, *required: str) -> AbstractContextManager[None]:
        """Require fields of a request to be set, and lock the request's volume for the `with`.

        The field `volume_id` is always required. Raises Missing if a required field is empty, and
        BadField if a string is too long or not printable.
        """
        _require(request, "volume_id", *required)
        return self._locks.hold(ids.logical_name(request.volume_id))


class _Allowed:
    """A server for the function that registers a service: it takes on some of the RPCs only."""

    def __init__(self, server: grpc.Server, names: frozenset[str]) -> None:
        self._server, self._names = server, names

    def add_generic_rpc_handlers(self, _handlers: Sequence[Any]) -> None:
        """Do nothing: `add_registered_method_handlers` gets the same handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register those RPCs of a service that have the names."""
        allowed = {name: handlers[name] for name in self._names}
        generic = grpc.method_handlers_generic_handler(service, allowed)
        self._server.add_generic_rpc_handlers((generic,))


def _ranges(_size_bytes: int, extents: Sequence[changed_blocks.Range]) -> carver.RangesResponse:
    answer = carver.RangesResponse()
    for extent in extents:
        answer.ranges.add(offset_bytes=extent.offset_bytes, length_bytes=extent.length_bytes)
    return answer


def _require(request: Message, *required: str) -> None:
    operator.require(request, *required, max_characters=_MAX_CHARACTERS)
