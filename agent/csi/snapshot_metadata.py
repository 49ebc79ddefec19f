"""CSI SnapshotMetadata: which ranges of a snapshot are allocated, or changed since another."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import TypeVar

import grpc

from agent import errors, ids
from agent.delta.comparing import TOLD_BYTES
from agent.delta.delta import Delta
from agent.delta.extents import Extent, Reading
from agent.requests.snapshots import GetMetadata
from lvm import names
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

T = TypeVar("T")

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
        return _answers(reading, call, csi.GetMetadataAllocatedResponse)

    def GetMetadataDelta(  # noqa: N802
        self, request: csi.GetMetadataDeltaRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataDeltaResponse, None, None]:
        """The ranges in which a snapshot differs from an earlier one of the same volume."""
        call = GetMetadata.from_proto(request)
        _require_snapshots(call.base_id, call.snapshot_id)
        reading = self._delta.changed(call.base_id, call.snapshot_id, context.is_active)
        return _answers(reading, call, csi.GetMetadataDeltaResponse)

    def written(
        self, request: csi.GetMetadataDeltaRequest, context: grpc.ServicerContext
    ) -> Generator[csi.GetMetadataDeltaResponse, None, None]:
        """The ranges that were written between the two, or at all: no device is read for it.

        None of CSI's, whose base must be named: agent/csi/transfer.py has a name for it.
        """
        delta, wanted, answer = self._delta, context.is_active, csi.GetMetadataDeltaResponse
        if not request.base_snapshot_id:
            whole = csi.GetMetadataAllocatedRequest(
                snapshot_id=request.target_snapshot_id, starting_offset=request.starting_offset
            )
            call = GetMetadata.from_proto(whole)
            _require_snapshots(call.snapshot_id)
            held = delta.allocated(call.snapshot_id, wanted, is_compared=False)
            return _answers(held, call, answer)
        call = GetMetadata.from_proto(request)
        _require_snapshots(call.base_id, call.snapshot_id)
        changed = delta.changed(call.base_id, call.snapshot_id, wanted, is_compared=False)
        return _answers(changed, call, answer)


def _require_snapshots(*identities: str) -> None:
    """Raise NoSuchSnapshot for the id of a volume, which the engine would take."""
    for one in identities:
        if not names.is_of(ids.SNAPSHOT_PREFIX, ids.logical_name(one)):
            raise errors.NoSuchSnapshot(one)


def _answers(
    reading: AbstractContextManager[Reading], call: GetMetadata, answer: Callable[..., T]
) -> Generator[T, None, None]:
    """The ranges, so many at a time; one answer without any where there is none."""
    with reading as opened:
        extents = opened.extents(call.starting_offset)
        piece = _piece(extents, call)
        while True:
            yield answer(
                block_metadata_type=_STYLE,
                volume_capacity_bytes=opened.size_bytes,
                block_metadata=piece,
            )
            piece = _piece(extents, call)
            if not piece:
                return


def _piece(extents: Iterator[Extent], call: GetMetadata) -> list[csi.BlockMetadata]:
    """So many ranges as one answer may have; fewer, where they tell of much to be fetched."""
    piece, told_bytes = [], 0
    for one in islice(extents, min(call.maximum_results or _RESULTS, _RESULTS)):
        told = csi.BlockMetadata(byte_offset=one.offset_bytes, size_bytes=one.length_bytes)
        piece.append(told)
        told_bytes += one.length_bytes
        if told_bytes >= TOLD_BYTES:
            break
    return piece
