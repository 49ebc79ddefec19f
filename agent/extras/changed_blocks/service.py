"""CSI SnapshotMetadata: which ranges of a snapshot are allocated, or changed since another."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import TypeVar, cast

import grpc

from agent.core import errors, ids
from agent.core.context import Context
from agent.core.extents import Extent, LogicalOffset, Reading, UserExtent, UserOffset
from agent.core.requests import GetMetadata
from agent.daemon.extra import Extra
from agent.daemon.server import Service
from agent.extras.changed_blocks.comparing import TOLD_BYTES
from agent.extras.changed_blocks.delta import Delta
from lvm import names
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

T = TypeVar("T")
# How large it is, and its ranges.
_Told = tuple[int, Iterator[Extent | UserExtent]]

# Where the caller sets no bound: some 30 KiB in an answer.
_RESULTS = 1024
# Ranges are merged, so they are as long as they happen to be.
_STYLE = csi.BlockMetadataType.VARIABLE_LENGTH


class SnapshotMetadata(csi_pb2_grpc.SnapshotMetadataServicer):
    """The SnapshotMetadata service.

    A volume is not held meanwhile: its devices are open, and so neither is removed.
    """

    def __init__(self, delta: Delta) -> None:
        self._delta = delta

    def GetMetadataAllocated(  # noqa: N802
        self, request: csi.GetMetadataAllocatedRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataAllocatedResponse, None, None]:
        """The ranges of a snapshot that may hold anything but zeroes."""
        call = GetMetadata.from_proto(request)
        _require_snapshots(call.snapshot_id)
        reading = self._delta.allocated(call.snapshot_id, context.is_active)
        return _answers(_to_user(reading, call), call, csi.GetMetadataAllocatedResponse)

    def GetMetadataDelta(  # noqa: N802
        self, request: csi.GetMetadataDeltaRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataDeltaResponse, None, None]:
        """The ranges in which a snapshot differs from an earlier one of the same volume."""
        call = GetMetadata.from_proto(request)
        _require_snapshots(call.base_id, call.snapshot_id)
        reading = self._delta.changed(call.base_id, call.snapshot_id, context.is_active)
        return _answers(_to_user(reading, call), call, csi.GetMetadataDeltaResponse)

    def written(
        self, request: csi.GetMetadataDeltaRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataDeltaResponse, None, None]:
        """The ranges of a logical volume that were written between the two, or at all.

        No device is read for it. None of CSI's, whose base must be named, and which names what the
        volume's user sees: agent/extras/transfer/service.py has names for this and the next.
        """
        if request.base_snapshot_id:
            return self._of_logical(request, context, is_compared=False)
        whole = csi.GetMetadataAllocatedRequest(
            snapshot_id=request.target_snapshot_id, starting_offset=request.starting_offset
        )
        call = GetMetadata.from_proto(whole)
        _require_snapshots(call.snapshot_id)
        reading = self._delta.allocated(call.snapshot_id, context.is_active, is_compared=False)
        return _answers(_to_logical(reading, call), call, csi.GetMetadataDeltaResponse)

    def differing(
        self, request: csi.GetMetadataDeltaRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataDeltaResponse, None, None]:
        """The ranges of a logical volume in which the two differ."""
        return self._of_logical(request, context, is_compared=True)

    def _of_logical(
        self,
        request: csi.GetMetadataDeltaRequest,
        context: grpc.ServicerContext,
        *,
        is_compared: bool,
    ) -> Generator[csi.GetMetadataDeltaResponse, None, None]:
        call = GetMetadata.from_proto(request)
        _require_snapshots(call.base_id, call.snapshot_id)
        reading = self._delta.changed(
            call.base_id, call.snapshot_id, context.is_active, is_compared=is_compared
        )
        return _answers(_to_logical(reading, call), call, csi.GetMetadataDeltaResponse)


class ChangedBlocks(Extra):
    """The extra: readings of snapshots, and the service that answers with them."""

    offered = (csi.PluginCapability.Service.SNAPSHOT_METADATA_SERVICE,)

    def __init__(self, context: Context) -> None:
        self.delta = Delta(context)
        self.metadata = SnapshotMetadata(self.delta)

    def add_services(self, server: grpc.Server) -> None:
        """Register SnapshotMetadata."""
        csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(self.metadata, server)

    def recoveries(self) -> Mapping[str, Callable[..., int]]:
        """Release what readings that were killed have left."""
        return {
            "metadata snapshots": self.delta.reservations.resume,
            "snapshots that were read": self.delta.activations.resume,
        }

    def stop(self) -> None:
        """End readings at their next piece: a stream may last for hours."""
        self.delta.stop()


def add(service: Service) -> ChangedBlocks:
    """Make the extra of a service."""
    return ChangedBlocks(service.context)


def of(service: Service) -> ChangedBlocks:
    """The extra of a service, which has it."""
    return cast(ChangedBlocks, service.extras["changed_blocks"])


def _require_snapshots(*identities: str) -> None:
    """Raise NoSuchSnapshot for the id of a volume, which the engine would take."""
    for one in identities:
        if not names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(one)):
            raise errors.NoSuchSnapshot(one)


@contextmanager
def _to_user(held: AbstractContextManager[Reading], call: GetMetadata) -> Iterator[_Told]:
    """A reading from the call's offset on, as CSI has it: of the device that the user reads."""
    with held as reading:
        seen = reading.for_user()
        yield seen.size_bytes, seen.extents(UserOffset(call.starting_offset))


@contextmanager
def _to_logical(held: AbstractContextManager[Reading], call: GetMetadata) -> Iterator[_Told]:
    """The same as streams have it: of the logical volume, whose header is sent, too."""
    with held as reading:
        yield reading.size_bytes, reading.extents(LogicalOffset(call.starting_offset))


def _answers(
    told: AbstractContextManager[_Told], call: GetMetadata, answer: Callable[..., T]
) -> Generator[T, None, None]:
    """The ranges, so many at a time; one answer without any where there is none."""
    with told as (size_bytes, extents):
        piece = _piece(extents, call)
        while True:
            yield answer(
                block_metadata_type=_STYLE,
                volume_capacity_bytes=size_bytes,
                block_metadata=piece,
            )
            piece = _piece(extents, call)
            if not piece:
                return


def _piece(extents: Iterator[Extent | UserExtent], call: GetMetadata) -> list[csi.BlockMetadata]:
    """So many ranges as one answer may have; fewer, where they tell of much to be fetched."""
    piece, told_bytes = [], 0
    for one in islice(extents, min(call.maximum_results or _RESULTS, _RESULTS)):
        told = csi.BlockMetadata(byte_offset=one.offset_bytes, size_bytes=one.length_bytes)
        piece.append(told)
        told_bytes += one.length_bytes
        if told_bytes >= TOLD_BYTES:
            break
    return piece
