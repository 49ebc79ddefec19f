"""CSI SnapshotMetadata: ranges of a snapshot that are allocated, or changed since another one."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TypeVar, cast

import grpc

from agent.core import errors, ids
from agent.daemon.extra import Extra
from agent.daemon.server import Service
from agent.extras.changed_blocks.comparing import MAX_RANGE_BYTES
from agent.extras.changed_blocks.delta import ChangedRanges, Reading
from agent.extras.changed_blocks.extents import Extent, UserExtent, UserOffset
from agent.requests.requests import GetMetadata
from agent.volumes.context import Context
from lvm import names
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

T = TypeVar("T")
Range = Extent | UserExtent

# Maximum number of ranges in one response message. A message with so many ranges is about 30 KiB
# long.
_RESULTS = 1024


class ChangedBlocks(Extra, csi_pb2_grpc.SnapshotMetadataServicer):
    """The extra `changed_blocks`, and its gRPC service, CSI's SnapshotMetadata.

    A call does not hold the volume's lock while it streams its responses. The devices that the call
    reads are open meanwhile, so lvm2 can remove neither the snapshot nor its base.
    """

    offered = (csi.PluginCapability.Service.SNAPSHOT_METADATA_SERVICE,)

    def __init__(self, context: Context) -> None:
        self.delta = ChangedRanges(context)

    def add_services(self, server: grpc.Server) -> None:
        """Register the gRPC service SnapshotMetadata with the server."""
        csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(self, server)

    def recoveries(self) -> Mapping[str, Callable[..., int]]:
        """Return functions that clean up after killed processes, by names for the log.

        The functions release metadata snapshots of thin pools, and deactivate snapshots that were
        activated to be read.
        """
        return {
            "metadata snapshots": self.delta.reservations.resume,
            "snapshots that were read": self.delta.activations.resume,
        }

    def stop(self) -> None:
        """End all calls that read snapshots, because their response streams may last for hours."""
        self.delta.stop()

    def GetMetadataAllocated(  # noqa: N802
        self, request: csi.GetMetadataAllocatedRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataAllocatedResponse, None, None]:
        """Stream the ranges of a snapshot that may hold anything but zeroes."""
        call = GetMetadata.from_proto(request)
        require_snapshots(call.snapshot_id)
        reading = self.delta.allocated(call.snapshot_id, context.is_active)
        return _answers(reading, call, csi.GetMetadataAllocatedResponse)

    def GetMetadataDelta(  # noqa: N802
        self, request: csi.GetMetadataDeltaRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataDeltaResponse, None, None]:
        """Stream the ranges in which a snapshot differs from an earlier snapshot of its volume."""
        call = GetMetadata.from_proto(request)
        require_snapshots(call.base_id, call.snapshot_id)
        reading = self.delta.changed(call.base_id, call.snapshot_id, context.is_active)
        return _answers(reading, call, csi.GetMetadataDeltaResponse)


def add(service: Service) -> ChangedBlocks:
    """Make the extra `changed_blocks` of a service."""
    return ChangedBlocks(service.context)


def of(service: Service) -> ChangedBlocks:
    """Return a service's extra `changed_blocks`; the service must have been made with the extra."""
    return cast(ChangedBlocks, service.extras["changed_blocks"])


def require_snapshots(*identities: str) -> None:
    """Raise NoSuchSnapshot if one of these ids is not the id of a snapshot.

    `ChangedRanges` also reads volumes by their ids, which CSI does not allow.
    """
    for snapshot_id in identities:
        if not names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(snapshot_id)):
            raise errors.NoSuchSnapshot(snapshot_id)


def _answers(
    open_reading: AbstractContextManager[Reading],
    call: GetMetadata,
    response_class: Callable[..., T],
) -> Generator[T, None, None]:
    """Open a snapshot; yield CSI's responses with its ranges, from the requested offset on.

    `open_reading` opens the snapshot when it is entered. Offsets and sizes are those of the device
    that the volume's user reads, which does not contain the LUKS header of an encrypted volume.
    """

    def view(reading: Reading) -> tuple[int, Iterator[Range]]:
        user_reading = reading.for_user()
        return user_reading.size_bytes, user_reading.extents(UserOffset(call.starting_offset))

    def make(size_bytes: int, piece: Sequence[Range]) -> T:
        return response_class(
            # Adjacent ranges are merged, so their lengths vary.
            block_metadata_type=csi.BlockMetadataType.VARIABLE_LENGTH,
            volume_capacity_bytes=size_bytes,
            block_metadata=[
                csi.BlockMetadata(byte_offset=extent.offset_bytes, size_bytes=extent.length_bytes)
                for extent in piece
            ],
        )

    return in_pieces(open_reading, view, make, call.maximum_results)


def in_pieces(
    open_reading: AbstractContextManager[Reading],
    view: Callable[[Reading], tuple[int, Iterator[Range]]],
    make_response: Callable[[int, Sequence[Range]], T],
    max_results: int = 0,
) -> Generator[T, None, None]:
    """Open a snapshot; yield response messages with its allocated or changed ranges.

    `open_reading` opens the snapshot when it is entered. `view` returns the snapshot's size and its
    ranges. `make_response` makes a response from the size and the next ranges.

    A response has at most `_RESULTS` ranges, and at most `max_results` if that is not 0. A response
    ends early once its ranges have MAX_RANGE_BYTES in total, because the caller reads so many bytes
    before it asks for the next response. A snapshot without ranges gets one response without
    ranges.
    """
    with open_reading as reading:
        size_bytes, extents = view(reading)
        piece = _piece(extents, max_results)
        while True:
            yield make_response(size_bytes, piece)
            piece = _piece(extents, max_results)
            if not piece:
                return


def _piece(extents: Iterator[Range], max_results: int) -> list[Range]:
    piece, piece_bytes = [], 0
    for extent in islice(extents, min(max_results or _RESULTS, _RESULTS)):
        piece.append(extent)
        piece_bytes += extent.length_bytes
        if piece_bytes >= MAX_RANGE_BYTES:
            break
    return piece
