"""The CSI Controller service: parse each request, lock its volume, call an operation, answer."""
# ruff: noqa: N802

from collections.abc import Sequence

import grpc
from google.protobuf import wrappers_pb2

from agent.core import ids
from agent.csi import messages
from agent.operations import modify, validate
from agent.operations.attach import Attacher
from agent.operations.create import VolumeCreator
from agent.operations.delete import VolumeDeleter
from agent.operations.expand import Expander
from agent.operations.leftovers import Leftovers
from agent.operations.listing import Listing
from agent.operations.snapshot import Snapshotter
from agent.operations.volume_health import VolumesHealth
from agent.requests import requests
from agent.requests.parameters import context_of
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.volume_states import Call
from lvm import names
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

_Rpc = csi.ControllerServiceCapability.RPC


def capabilities(*, expand: bool, attach: bool = False) -> csi.ControllerGetCapabilitiesResponse:
    """The response of ControllerGetCapabilities.

    `expand` adds the capability to expand volumes, `attach` those to attach and to detach volumes.
    """
    types = [
        _Rpc.CREATE_DELETE_VOLUME,
        _Rpc.LIST_VOLUMES,
        _Rpc.GET_CAPACITY,
        _Rpc.GET_VOLUME,
        _Rpc.GET_VOLUME_HEALTH,
        _Rpc.LIST_VOLUME_HEALTH,
        _Rpc.SINGLE_NODE_MULTI_WRITER,
        _Rpc.CREATE_DELETE_SNAPSHOT,
        _Rpc.LIST_SNAPSHOTS,
        _Rpc.GET_SNAPSHOT,
        _Rpc.CLONE_VOLUME,
        _Rpc.MODIFY_VOLUME,
    ]
    if expand:
        types.append(_Rpc.EXPAND_VOLUME)
    if attach:
        types += (
            _Rpc.PUBLISH_UNPUBLISH_VOLUME,
            _Rpc.PUBLISH_READONLY,
            _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
        )
    supported = [csi.ControllerServiceCapability(rpc=_Rpc(type=rpc)) for rpc in types]
    return csi.ControllerGetCapabilitiesResponse(capabilities=supported)


class Controller(csi_pb2_grpc.ControllerServicer):
    """The CSI Controller service of this node."""

    def __init__(
        self,
        context: Context,
        creator: VolumeCreator,
        deleter: VolumeDeleter,
        listing: Listing,
        expander: Expander,
        snapshotter: Snapshotter,
        health: VolumesHealth,
        attacher: Attacher,
    ) -> None:
        self._context, self._configuration = context, context.configuration
        self._creator, self._deleter, self._listing = creator, deleter, listing
        self._expander = expander
        self._snapshotter = snapshotter
        self._health = health
        self._attacher = attacher
        self._locks = context.locks
        self._leftovers = Leftovers(context)

    def CreateVolume(
        self, request: csi.CreateVolumeRequest, context: grpc.ServicerContext
    ) -> csi.CreateVolumeResponse:
        """Create a volume, or return the volume that an earlier call with the same name created."""
        call = requests.CreateVolume.from_proto(request)
        sources = [] if call.source is None else [ids.logical_name(call.source.id)]
        with self._leftovers.of_volume(call):
            with self._locks.hold(call.own_name, *sources):
                creation = self._creator.create(call)
            # Wait for the copy of the contents without the locks: other calls may use the source
            # meanwhile, and its tags keep it from being deleted.
            volume = self._creator.complete(creation, lambda: self._locks.hold(call.own_name))
        return csi.CreateVolumeResponse(volume=self._volume(volume))

    def DeleteVolume(
        self, request: csi.DeleteVolumeRequest, context: grpc.ServicerContext
    ) -> csi.DeleteVolumeResponse:
        """Erase and remove a volume; succeed if there is no such volume."""
        volume_id = requests.required(request, "volume_id")
        # Wait up to five seconds, without the lock, for a mounted volume to be unmounted: a claim
        # may be deleted a moment before kubelet unmounts the claim's volume.
        self._locks.wait_until(lambda: not self._deleter.is_mounted(volume_id))
        with self._locks.hold(ids.logical_name(volume_id)):
            self._deleter.delete(volume_id)
        return csi.DeleteVolumeResponse()

    def ControllerPublishVolume(
        self, request: csi.ControllerPublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.ControllerPublishVolumeResponse:
        """Record that a volume is attached to this node, which has the volume's disks."""
        self._require_attach("ControllerPublishVolume")
        call = requests.AttachVolume.from_proto(request)
        with self._locks.hold(ids.logical_name(call.volume_id)):
            self._attacher.attach(call)
        return csi.ControllerPublishVolumeResponse(
            publish_context=requests.publish_context(read_only=call.read_only)
        )

    def ControllerUnpublishVolume(
        self, request: csi.ControllerUnpublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.ControllerUnpublishVolumeResponse:
        """Remove the record that a volume is attached to this node."""
        self._require_attach("ControllerUnpublishVolume")
        call = requests.DetachVolume.from_proto(request)
        with self._locks.hold(ids.logical_name(call.volume_id)):
            self._attacher.detach(call)
        return csi.ControllerUnpublishVolumeResponse()

    def _require_attach(self, call: str) -> None:
        """Raise NotImplementedError if the setting `attach` is off; `call` is the RPC's name."""
        if not self._configuration.now.attach:
            raise NotImplementedError(f"{call} is switched off on this node (setting `attach`)")

    def ValidateVolumeCapabilities(
        self, request: csi.ValidateVolumeCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.ValidateVolumeCapabilitiesResponse:
        """Confirm that a volume has the requested capabilities, or return why it lacks one."""
        call = requests.ValidateVolume.from_proto(request)
        volume = self._context.mender.mended_volume(call.volume_id, Call.MANAGE)
        if refusal := call.unsupported or validate.refusal(volume, call):
            return csi.ValidateVolumeCapabilitiesResponse(message=refusal)
        confirmed = csi.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=context_of(volume.own_tags),
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
            mutable_parameters=request.mutable_parameters,
        )
        return csi.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    def ListVolumes(
        self, request: csi.ListVolumesRequest, context: grpc.ServicerContext
    ) -> csi.ListVolumesResponse:
        """List a page of this node's volumes."""
        part = self._listing.page(requests.Page.from_proto(request))
        answer = csi.ListVolumesResponse(next_token=part.next_token)
        topology = csi.Topology(segments=self._configuration.now.here)
        for volume in part.entries:
            entry = answer.entries.add()
            messages.fill_volume(entry.volume, volume, topology)
            if self._configuration.now.attach:
                # Set the status, even if it is empty: with LIST_VOLUMES_PUBLISHED_NODES the CSI
                # spec requires it.
                entry.status.SetInParent()
                entry.status.published_node_ids.extend(self._attached_to(volume))
        return answer

    def ControllerListVolumeHealth(
        self, request: csi.ControllerListVolumeHealthRequest, context: grpc.ServicerContext
    ) -> csi.ControllerListVolumeHealthResponse:
        """List a page of the volumes that have a health condition, with their conditions."""
        part = self._health.list(requests.Page.from_proto(request))
        return csi.ControllerListVolumeHealthResponse(
            entries=map(messages.volume_health, part.entries), next_token=part.next_token
        )

    def ControllerGetVolumeHealth(
        self, request: csi.ControllerGetVolumeHealthRequest, context: grpc.ServicerContext
    ) -> csi.ControllerGetVolumeHealthResponse:
        """Return the health of one volume."""
        health = self._health.get(requests.required(request, "volume_id"))
        return csi.ControllerGetVolumeHealthResponse(volume_health=messages.volume_health(health))

    def GetCapacity(
        self, request: csi.GetCapacityRequest, context: grpc.ServicerContext
    ) -> csi.GetCapacityResponse:
        """Return how much space CreateVolume has for volumes with the same parameters."""
        capacity = self._creator.capacity(requests.GetCapacity.from_proto(request))
        return csi.GetCapacityResponse(
            available_capacity=capacity.available_bytes,
            maximum_volume_size=wrappers_pb2.Int64Value(value=capacity.maximum_volume_bytes),
            minimum_volume_size=wrappers_pb2.Int64Value(value=capacity.minimum_volume_bytes),
        )

    def ControllerGetVolume(
        self, request: csi.ControllerGetVolumeRequest, context: grpc.ServicerContext
    ) -> csi.ControllerGetVolumeResponse:
        """Return one volume and the nodes to which it is attached."""
        volume = self._context.mender.mended_volume(
            requests.required(request, "volume_id"), Call.MANAGE
        )
        # Set the status, even if it is empty: the CSI spec requires it.
        attached = self._attached_to(volume) if self._configuration.now.attach else ()
        status = csi.ControllerGetVolumeResponse.VolumeStatus(published_node_ids=attached)
        return csi.ControllerGetVolumeResponse(volume=self._volume(volume), status=status)

    def ControllerExpandVolume(
        self, request: csi.ControllerExpandVolumeRequest, context: grpc.ServicerContext
    ) -> csi.ControllerExpandVolumeResponse:
        """Grow a logical volume; NodeExpandVolume grows the file system on the volume, if any."""
        if not self._configuration.now.controller_expand:
            raise NotImplementedError("ControllerExpandVolume is switched off on this node")
        call = requests.ExpandVolume.from_proto(request)
        with self._locks.hold(ids.logical_name(call.volume_id)):
            volume = self._expander.expand(call)
        return csi.ControllerExpandVolumeResponse(
            capacity_bytes=volume.capacity_bytes,
            node_expansion_required=self._expander.needs_node(volume),
        )

    def ControllerModifyVolume(
        self, request: csi.ControllerModifyVolumeRequest, context: grpc.ServicerContext
    ) -> csi.ControllerModifyVolumeResponse:
        """Change mutable parameters of a volume: either all that are given, or none."""
        call = requests.ModifyVolume.from_proto(request)
        with self._locks.hold(ids.logical_name(call.volume_id)):
            modify.modify(self._context, call)
        return csi.ControllerModifyVolumeResponse()

    def CreateSnapshot(
        self, request: csi.CreateSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.CreateSnapshotResponse:
        """Take a snapshot, or return the one that an earlier call with the same name took."""
        call = requests.CreateSnapshot.from_proto(request)
        name = names.logical_volume(ids.SNAPSHOT_PREFIX, call.name)
        with (
            self._leftovers.of_snapshot(call),
            self._locks.hold(name, ids.logical_name(call.source_id)),
        ):
            snapshot = self._snapshotter.create(call)
        return csi.CreateSnapshotResponse(snapshot=self._snapshot(snapshot))

    def DeleteSnapshot(
        self, request: csi.DeleteSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.DeleteSnapshotResponse:
        """Erase and remove a snapshot; succeed if there is no such snapshot."""
        snapshot_id = requests.required(request, "snapshot_id")
        with self._locks.hold(ids.logical_name(snapshot_id)):
            self._snapshotter.delete(snapshot_id)
        return csi.DeleteSnapshotResponse()

    def ListSnapshots(
        self, request: csi.ListSnapshotsRequest, context: grpc.ServicerContext
    ) -> csi.ListSnapshotsResponse:
        """List all snapshots, the snapshots of a volume, or one snapshot; in pages if requested."""
        part = self._snapshotter.list(requests.ListSnapshots.from_proto(request))
        entries = [
            csi.ListSnapshotsResponse.Entry(snapshot=self._snapshot(snapshot))
            for snapshot in part.entries
        ]
        return csi.ListSnapshotsResponse(entries=entries, next_token=part.next_token)

    def GetSnapshot(
        self, request: csi.GetSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.GetSnapshotResponse:
        """Return one snapshot by its id."""
        snapshot = self._snapshotter.get(requests.required(request, "snapshot_id"))
        return csi.GetSnapshotResponse(snapshot=self._snapshot(snapshot))

    def ControllerGetCapabilities(
        self, request: csi.ControllerGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.ControllerGetCapabilitiesResponse:
        """Return the optional RPCs that the Controller service implements on this node."""
        config = self._configuration.now
        return capabilities(expand=config.controller_expand, attach=config.attach)

    def _attached_to(self, volume: Volume) -> Sequence[str]:
        """The ids of the nodes to which a volume is attached: this node's id, or none."""
        node_id = self._configuration.now.node_id
        return () if volume.attachment_to(node_id) is None else (node_id,)

    def _snapshot(self, snapshot: Snapshot) -> csi.Snapshot:
        return messages.snapshot(snapshot, self._configuration.now.here)

    def _volume(self, volume: Volume) -> csi.Volume:
        return messages.volume(volume, self._configuration.now.here)
