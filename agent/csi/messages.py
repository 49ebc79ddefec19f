"""Volumes, snapshots and health as CSI messages."""

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


def volume_health(one: VolumeHealth) -> csi.VolumeHealth:
    """A volume's conditions."""
    now = time.time()
    return csi.VolumeHealth(
        volume_id=one.volume_id,
        health_statuses=[
            csi.VolumeHealth.VolumeHealthEntry(
                status=csi.VolumeHealthErrorType.Value(condition.reason.of_volume),
                reason=condition.reason.word,
                message=condition.text(now),
            )
            for condition in one.conditions
        ],
    )


def storage_health(one: Condition) -> _Backend:
    """A condition of the node's storage."""
    return _Backend(
        status=csi.StorageHealthErrorType.Value(one.reason.of_storage),
        reason=one.reason.word,
        message=one.text(time.time()),
        volume_capability=_CAPABILITIES.get(one.reason.access),
    )


_CAPABILITIES = {
    "block": csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume()),
    "mount": csi.VolumeCapability(mount=csi.VolumeCapability.MountVolume()),
}


def volume(one: Volume, here: Mapping[str, str]) -> csi.Volume:
    """A volume, whose topology is this node's, `here`."""
    message = csi.Volume()
    put_volume(message, one, csi.Topology(segments=here))
    return message


def put_volume(message: csi.Volume, one: Volume, here: csi.Topology) -> None:
    """Fill in a list's own message: a message made apart would be copied into the list."""
    message.volume_id = str(one.id)
    message.capacity_bytes = one.capacity_bytes
    # One by one: `update` asks of each mapping first what it is.
    for key, value in context_of(one.own_tags).items():
        message.volume_context[key] = value
    message.accessible_topology.append(here)
    source = clone.source_of(one.own_tags)
    if source is not None and source.kind == requests.SNAPSHOT:
        message.content_source.snapshot.snapshot_id = source.id
    elif source is not None:
        message.content_source.volume.volume_id = source.id


def snapshot(one: Snapshot, here: Mapping[str, str]) -> csi.Snapshot:
    """A snapshot. Volumes of it can be made only on its node, so its topology is `here`.

    Its size is what its volume's claim asked for, not what that was rounded up to: of a claim for
    less than this size the external-provisioner makes no volume (RestoreSize in its
    pkg/controller/controller.go), and CreateVolume rounds up again.
    """
    return csi.Snapshot(
        size_bytes=one.requested_bytes,
        snapshot_id=str(one.id),
        source_volume_id=str(one.source_id),
        creation_time=time_of(one.time_nanoseconds),
        ready_to_use=one.is_ready,
        group_snapshot_id=one.group_snapshot_id,
        accessible_topology=[csi.Topology(segments=here)],
    )


def time_of(nanoseconds: int) -> timestamp_pb2.Timestamp:
    """A timestamp, from nanoseconds of the epoch."""
    moment = timestamp_pb2.Timestamp()
    moment.FromNanoseconds(nanoseconds)
    return moment
