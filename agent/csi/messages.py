"""Conversion of volumes, snapshots and health to CSI messages."""

import time
from collections.abc import Mapping

from google.protobuf import timestamp_pb2

from agent.operations import clone
from agent.operations.diagnosis import Condition
from agent.operations.volume_health import VolumeHealth
from agent.requests import requests
from agent.requests.parameters import context_of
from agent.volumes.records import Snapshot, Volume
from proto import csi_pb2 as csi

_Backend = csi.NodeGetStorageHealthResponse.StorageBackendHealth


def volume_health(health: VolumeHealth) -> csi.VolumeHealth:
    """The CSI message of a volume's health, with an entry for each health condition."""
    now_seconds = time.time()
    return csi.VolumeHealth(
        volume_id=health.volume_id,
        health_statuses=[
            csi.VolumeHealth.VolumeHealthEntry(
                status=csi.VolumeHealthErrorType.Value(condition.reason.volume_status),
                reason=condition.reason.word,
                message=condition.text(now_seconds),
            )
            for condition in health.conditions
        ],
    )


def storage_health(condition: Condition) -> _Backend:
    """The CSI message of a health condition of the node's storage."""
    return _Backend(
        status=csi.StorageHealthErrorType.Value(condition.reason.storage_status),
        reason=condition.reason.word,
        message=condition.text(time.time()),
        volume_capability=_CAPABILITIES.get(condition.reason.access),
    )


_CAPABILITIES = {
    "block": csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume()),
    "mount": csi.VolumeCapability(mount=csi.VolumeCapability.MountVolume()),
}


def capability(requested: requests.Capability) -> csi.VolumeCapability:
    """The CSI message of a volume capability."""
    mode = csi.VolumeCapability.AccessMode.Mode.Value(requested.mode)
    message = csi.VolumeCapability(access_mode=csi.VolumeCapability.AccessMode(mode=mode))
    if requested.is_block:
        message.block.SetInParent()
    else:
        message.mount.fs_type = requested.fs_type
        message.mount.mount_flags.extend(requested.mount_flags)
    return message


def volume(record: Volume, segments: Mapping[str, str]) -> csi.Volume:
    """The CSI message of a volume, with this node's topology `segments`."""
    message = csi.Volume()
    fill_volume(message, record, csi.Topology(segments=segments))
    return message


def fill_volume(message: csi.Volume, record: Volume, topology: csi.Topology) -> None:
    """Fill in the CSI message of a volume.

    The message may be an entry of a list in a response. So no message is made here: protobuf would
    copy a separate message into the list.
    """
    message.volume_id = str(record.id)
    message.capacity_bytes = record.capacity_bytes
    # Set each key by itself: `update` would first check the type of the mapping, for each volume.
    for key, value in context_of(record.own_tags).items():
        message.volume_context[key] = value
    message.accessible_topology.append(topology)
    source = clone.source_of(record.own_tags)
    if source is not None and source.kind == requests.SNAPSHOT:
        message.content_source.snapshot.snapshot_id = source.id
    elif source is not None:
        message.content_source.volume.volume_id = source.id


def snapshot(record: Snapshot, segments: Mapping[str, str]) -> csi.Snapshot:
    """The CSI message of a snapshot, with this node's topology `segments`.

    A snapshot can be restored only on its own node, so the topology is that node's. The size is the
    size that the source volume's claim requested, not the size that the request was rounded up to:
    the external-provisioner refuses to restore a snapshot for a claim that requests less than the
    snapshot's size (RestoreSize in its pkg/controller/controller.go), and CreateVolume rounds up
    the size of the restored volume again.
    """
    return csi.Snapshot(
        size_bytes=record.requested_bytes,
        snapshot_id=str(record.id),
        source_volume_id=str(record.source_id),
        creation_time=timestamp(record.time_nanoseconds),
        ready_to_use=record.is_ready,
        group_snapshot_id=record.group_snapshot_id,
        accessible_topology=[csi.Topology(segments=segments)],
    )


def timestamp(nanoseconds: int) -> timestamp_pb2.Timestamp:
    """The protobuf timestamp of a time that is given in nanoseconds since the epoch."""
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromNanoseconds(nanoseconds)
    return timestamp
