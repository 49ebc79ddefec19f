"""The CSI GroupController service: parse requests, lock volumes, call operations, answer."""
# ruff: noqa: N802

import grpc

from agent.core import ids
from agent.csi import messages
from agent.operations.group_snapshot import GroupSnapshot, GroupSnapshotter
from agent.operations.leftovers import Leftovers
from agent.requests import requests
from agent.volumes.context import Context
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

_Rpc = csi.GroupControllerServiceCapability.RPC


def capabilities() -> csi.GroupControllerGetCapabilitiesResponse:
    """The response of GroupControllerGetCapabilities: all RPCs of group snapshots."""
    rpc = _Rpc(type=_Rpc.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT)
    return csi.GroupControllerGetCapabilitiesResponse(
        capabilities=[csi.GroupControllerServiceCapability(rpc=rpc)]
    )


class GroupController(csi_pb2_grpc.GroupControllerServicer):
    """The CSI GroupController service of this node."""

    def __init__(self, context: Context, snapshotter: GroupSnapshotter) -> None:
        self._configuration = context.configuration
        self._snapshotter = snapshotter
        self._locks = context.locks
        self._leftovers = Leftovers(context)

    def GroupControllerGetCapabilities(
        self, request: csi.GroupControllerGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.GroupControllerGetCapabilitiesResponse:
        """Return the optional RPCs that the GroupController service implements: all of them."""
        return capabilities()

    def CreateVolumeGroupSnapshot(
        self, request: csi.CreateVolumeGroupSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.CreateVolumeGroupSnapshotResponse:
        """Take snapshots of several volumes at one moment.

        Return the group snapshot of an earlier call with the same name, if there is one.
        """
        call = requests.CreateGroupSnapshot.from_proto(request)
        sources = map(ids.logical_name, call.source_ids)
        with (
            self._leftovers.of_group_snapshot(call),
            self._locks.hold(self._snapshotter.logical_name(call.name), *sources),
        ):
            snapshot = self._snapshotter.create(call)
        return csi.CreateVolumeGroupSnapshotResponse(group_snapshot=self._group_snapshot(snapshot))

    def DeleteVolumeGroupSnapshot(
        self, request: csi.DeleteVolumeGroupSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.DeleteVolumeGroupSnapshotResponse:
        """Erase and remove all snapshots of a group snapshot."""
        call = requests.KnownGroupSnapshot.from_proto(request)
        with self._locks.hold(*map(ids.logical_name, (call.id, *call.snapshot_ids))):
            self._snapshotter.delete(call)
        return csi.DeleteVolumeGroupSnapshotResponse()

    def GetVolumeGroupSnapshot(
        self, request: csi.GetVolumeGroupSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.GetVolumeGroupSnapshotResponse:
        """Return one group snapshot by its id."""
        snapshot = self._snapshotter.get(requests.KnownGroupSnapshot.from_proto(request))
        return csi.GetVolumeGroupSnapshotResponse(group_snapshot=self._group_snapshot(snapshot))

    def _group_snapshot(self, group_snapshot: GroupSnapshot) -> csi.VolumeGroupSnapshot:
        segments = self._configuration.now.here
        return csi.VolumeGroupSnapshot(
            group_snapshot_id=group_snapshot.id,
            snapshots=[
                messages.snapshot(snapshot, segments) for snapshot in group_snapshot.snapshots
            ],
            creation_time=messages.timestamp(group_snapshot.time_nanoseconds),
            ready_to_use=group_snapshot.is_ready,
        )
