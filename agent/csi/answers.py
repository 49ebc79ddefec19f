"""Conditions and snapshots, as CSI tells of them."""

from collections.abc import Sequence

from google.protobuf import timestamp_pb2

from agent.engine.records import Snapshot
from proto import csi_pb2 as csi


def condition(problems: Sequence[str]) -> csi.VolumeCondition:
    """The condition that these problems make."""
    return csi.VolumeCondition(
        abnormal=bool(problems), message="; ".join(problems) or "no problem is known"
    )


def snapshot(one: Snapshot) -> csi.Snapshot:
    """What the Controller and the GroupController answer of a snapshot."""
    return csi.Snapshot(
        size_bytes=one.size_bytes,
        snapshot_id=str(one.id),
        source_volume_id=str(one.source_id),
        creation_time=time(one.time_nanoseconds),
        ready_to_use=one.is_ready,
        group_snapshot_id=one.group_snapshot_id,
    )


def time(nanoseconds: int) -> timestamp_pb2.Timestamp:
    """A moment, from the nanoseconds of the epoch."""
    moment = timestamp_pb2.Timestamp()
    moment.FromNanoseconds(nanoseconds)
    return moment
