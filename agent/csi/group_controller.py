"""CSI GroupController: parse, hold the volumes, call policy, answer."""

import grpc

from agent import ids
from agent.csi import answers
from agent.locks import VolumeLocks
from agent.requests import snapshots
from agent.volumes.group_snapshots import GroupSnapshot, GroupSnapshotter
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

_Rpc = csi.GroupControllerServiceCapability.RPC


class GroupController(csi_pb2_grpc.GroupControllerServicer):
    """The GroupController service."""

    def __init__(self, snapshotter: GroupSnapshotter, locks: VolumeLocks) -> None:
        self._snapshotter = snapshotter
        self._locks = locks

    def GroupControllerGetCapabilities(  # noqa: N802
        self, request: csi.GroupControllerGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.GroupControllerGetCapabilitiesResponse:
        """What of the GroupController service is implemented: all of it."""
        rpc = _Rpc(type=_Rpc.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT)
        return csi.GroupControllerGetCapabilitiesResponse(
            capabilities=[csi.GroupControllerServiceCapability(rpc=rpc)]
        )

    def CreateVolumeGroupSnapshot(  # noqa: N802
        self, request: csi.CreateVolumeGroupSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.CreateVolumeGroupSnapshotResponse:
        """Take snapshots of several volumes at one moment, or find those of an earlier call."""
        call = snapshots.CreateGroupSnapshot.from_proto(request)
        sources = map(ids.logical_name, call.source_ids)
        with self._locks.hold(self._snapshotter.logical_name(call.name), *sources):
            made = self._snapshotter.create(call)
        return csi.CreateVolumeGroupSnapshotResponse(group_snapshot=_group_snapshot(made))

    def DeleteVolumeGroupSnapshot(  # noqa: N802
        self, request: csi.DeleteVolumeGroupSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.DeleteVolumeGroupSnapshotResponse:
        """Wipe and remove all snapshots of a group."""
        call = snapshots.KnownGroupSnapshot.from_proto(request)
        with self._locks.hold(*map(ids.logical_name, (call.id, *call.snapshot_ids))):
            self._snapshotter.delete(call)
        return csi.DeleteVolumeGroupSnapshotResponse()

    def GetVolumeGroupSnapshot(  # noqa: N802
        self, request: csi.GetVolumeGroupSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.GetVolumeGroupSnapshotResponse:
        """One group snapshot."""
        found = self._snapshotter.get(snapshots.KnownGroupSnapshot.from_proto(request))
        return csi.GetVolumeGroupSnapshotResponse(group_snapshot=_group_snapshot(found))


def _group_snapshot(one: GroupSnapshot) -> csi.VolumeGroupSnapshot:
    return csi.VolumeGroupSnapshot(
        group_snapshot_id=one.id,
        snapshots=map(answers.snapshot, one.snapshots),
        creation_time=answers.time(one.time_nanoseconds),
        ready_to_use=one.is_ready,
    )
