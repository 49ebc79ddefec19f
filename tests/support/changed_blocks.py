"""The changed blocks of snapshots, as a CSI caller asks for them, and as `carver` does."""

from collections.abc import Iterator

from histories import Disk

from agent.csi.client import Client
from agent.extras.changed_blocks import changed_blocks_service
from agent.extras.changed_blocks.delta import ChangedRanges
from agent.extras.changed_blocks.extents import USER_START, Extent, UserExtent, UserOffset
from proto import csi_pb2 as csi
from proto.csi_pb2_grpc import SnapshotMetadataStub


def blocks(
    client: Client,
    snapshot_id: str,
    base_snapshot_id: str = "",
    starting_offset: UserOffset = USER_START,
) -> Iterator[UserExtent]:
    """What a snapshot holds, or how it differs from an older one, as the volume's user sees it."""
    metadata = client.stub(SnapshotMetadataStub)
    answers: Iterator[csi.GetMetadataAllocatedResponse | csi.GetMetadataDeltaResponse]
    if base_snapshot_id:
        delta = csi.GetMetadataDeltaRequest(
            base_snapshot_id=base_snapshot_id,
            target_snapshot_id=snapshot_id,
            starting_offset=starting_offset,
        )
        answers = metadata.GetMetadataDelta(delta)
    else:
        allocated = csi.GetMetadataAllocatedRequest(
            snapshot_id=snapshot_id, starting_offset=starting_offset
        )
        answers = metadata.GetMetadataAllocated(allocated)
    return (
        UserExtent(UserOffset(one.byte_offset), one.size_bytes)
        for answer in answers
        for one in answer.block_metadata
    )


def delta_of(disk: Disk) -> ChangedRanges:
    return changed_blocks_service.of(disk.service).delta


def changed_extents(disk: Disk, base: str, target: str) -> list[Extent]:
    with delta_of(disk).changed(base, target) as reading:
        return list(reading.extents())


def allocated_extents(disk: Disk, target: str) -> list[Extent]:
    with delta_of(disk).allocated(target) as reading:
        return list(reading.extents())
