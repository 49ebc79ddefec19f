"""CSI SnapshotMetadata: which ranges of a snapshot are allocated, or changed since another."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TypeVar, cast

import grpc

from agent.core import errors, ids
from agent.daemon.extra import Extra
from agent.daemon.server import Service
from agent.extras.changed_blocks.comparing import MAX_RANGE_BYTES
from agent.extras.changed_blocks.delta import Delta, Reading
from agent.extras.changed_blocks.extents import Extent, UserExtent, UserOffset
from agent.requests.requests import GetMetadata
from agent.volumes.context import Context
from lvm import names
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

T = TypeVar("T")
Range = Extent | UserExtent

# The most ranges in one answer: some 30 KiB.
_RESULTS = 1024


class ChangedBlocks(Extra, csi_pb2_grpc.SnapshotMetadataServicer):
    """The extra, and its service: readings of snapshots.

    A volume is not held meanwhile: its devices are open, and so neither is removed.
    """

    offered = (csi.PluginCapability.Service.SNAPSHOT_METADATA_SERVICE,)

    def __init__(self, context: Context) -> None:
        self.delta = Delta(context)

    def add_services(self, server: grpc.Server) -> None:
        """Register SnapshotMetadata."""
        csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(self, server)

    def recoveries(self) -> Mapping[str, Callable[..., int]]:
        """Release what readings that were killed have left."""
        return {
            "metadata snapshots": self.delta.reservations.resume,
            "snapshots that were read": self.delta.activations.resume,
        }

    def stop(self) -> None:
        """End readings at their next piece: a stream may last for hours."""
        self.delta.stop()

    def GetMetadataAllocated(  # noqa: N802
        self, request: csi.GetMetadataAllocatedRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataAllocatedResponse, None, None]:
        """The ranges of a snapshot that may hold anything but zeroes."""
        call = GetMetadata.from_proto(request)
        require_snapshots(call.snapshot_id)
        reading = self.delta.allocated(call.snapshot_id, context.is_active)
        return _answers(reading, call, csi.GetMetadataAllocatedResponse)

    def GetMetadataDelta(  # noqa: N802
        self, request: csi.GetMetadataDeltaRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataDeltaResponse, None, None]:
        """The ranges in which a snapshot differs from an earlier one of the same volume."""
        call = GetMetadata.from_proto(request)
        require_snapshots(call.base_id, call.snapshot_id)
        reading = self.delta.changed(call.base_id, call.snapshot_id, context.is_active)
        return _answers(reading, call, csi.GetMetadataDeltaResponse)


def add(service: Service) -> ChangedBlocks:
    """Make the extra of a service."""
    return ChangedBlocks(service.context)


def of(service: Service) -> ChangedBlocks:
    """The extra of a service, which has it."""
    return cast(ChangedBlocks, service.extras["changed_blocks"])


def require_snapshots(*identities: str) -> None:
    """Raise NoSuchSnapshot for the id of a volume, which `Delta` would take."""
    for one in identities:
        if not names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(one)):
            raise errors.NoSuchSnapshot(one)


def _answers(
    held: AbstractContextManager[Reading], call: GetMetadata, answer: Callable[..., T]
) -> Generator[T, None, None]:
    """CSI's answers, in the offsets of the device that the volume's user reads."""

    def view(reading: Reading) -> tuple[int, Iterator[Range]]:
        seen = reading.for_user()
        return seen.size_bytes, seen.extents(UserOffset(call.starting_offset))

    def make(size_bytes: int, piece: Sequence[Range]) -> T:
        return answer(
            # Ranges are merged, so they are as long as they happen to be.
            block_metadata_type=csi.BlockMetadataType.VARIABLE_LENGTH,
            volume_capacity_bytes=size_bytes,
            block_metadata=[
                csi.BlockMetadata(byte_offset=one.offset_bytes, size_bytes=one.length_bytes)
                for one in piece
            ],
        )

    return in_pieces(held, view, make, call.maximum_results)


def in_pieces(
    held: AbstractContextManager[Reading],
    view: Callable[[Reading], tuple[int, Iterator[Range]]],
    make: Callable[[int, Sequence[Range]], T],
    max_results: int = 0,
) -> Generator[T, None, None]:
    """Make answers of a reading's size and ranges; one without ranges where there are none.

    An answer has at most `max_results` ranges, if set, and fewer where they are long: the caller
    reads those before it asks for the next answer.
    """
    with held as reading:
        size_bytes, extents = view(reading)
        piece = _piece(extents, max_results)
        while True:
            yield make(size_bytes, piece)
            piece = _piece(extents, max_results)
            if not piece:
                return


def _piece(extents: Iterator[Range], max_results: int) -> list[Range]:
    piece, piece_bytes = [], 0
    for one in islice(extents, min(max_results or _RESULTS, _RESULTS)):
        piece.append(one)
        piece_bytes += one.length_bytes
        if piece_bytes >= MAX_RANGE_BYTES:
            break
    return piece
