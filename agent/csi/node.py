"""The CSI Node service: parse each request, lock its volume, call an operation, answer."""
# ruff: noqa: N802

import grpc

from agent.core import ids
from agent.csi import messages
from agent.operations.expand import Expander
from agent.operations.inline import InlineVolumes
from agent.operations.node_volumes import NodeVolumes, Statistics
from agent.operations.publish import Publisher
from agent.operations.stage import Stager
from agent.operations.storage_health import StorageHealth
from agent.operations.volume_health import VolumesHealth
from agent.requests import requests
from agent.volumes.context import Context
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

_Rpc = csi.NodeServiceCapability.RPC


class Node(csi_pb2_grpc.NodeServicer):
    """The CSI Node service of this node."""

    def __init__(
        self,
        context: Context,
        expander: Expander,
        stager: Stager,
        publisher: Publisher,
        node_volumes: NodeVolumes,
        inline_volumes: InlineVolumes,
        health: VolumesHealth,
        storage: StorageHealth,
    ) -> None:
        self._configuration = context.configuration
        self._expander = expander
        self._stager, self._publisher = stager, publisher
        self._volumes = node_volumes
        self._inline_volumes = inline_volumes
        self._health = health
        self._storage = storage
        self._locks = context.locks

    def NodeStageVolume(
        self, request: csi.NodeStageVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeStageVolumeResponse:
        """Activate, format and mount a volume at its staging path; skip what is done already."""
        call = requests.StageVolume.from_proto(request)
        locks = self._locks.hold(ids.logical_name(call.volume_id), call.staging_path)
        with call.keys.used(), locks:
            self._stager.stage(call)
        return csi.NodeStageVolumeResponse()

    def NodeUnstageVolume(
        self, request: csi.NodeUnstageVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeUnstageVolumeResponse:
        """Unmount a volume from its staging path."""
        call = requests.VolumePath.from_proto(request, "staging_target_path")
        with self._locks.hold(ids.logical_name(call.volume_id)):
            self._stager.unstage(call)
        return csi.NodeUnstageVolumeResponse()

    def NodePublishVolume(
        self, request: csi.NodePublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodePublishVolumeResponse:
        """Publish a staged volume, or create and publish an inline volume, at a pod's path."""
        if requests.PublishInline.is_inline(request):
            inline = requests.PublishInline.from_proto(request)
            locks = self._locks.hold(ids.logical_name(inline.volume_id), inline.target_path)
            with inline.keys.used(), locks:
                self._inline_volumes.publish(inline)
            return csi.NodePublishVolumeResponse()
        call = requests.PublishVolume.from_proto(request)
        # Lock the staging path, too: a volume that is no longer staged is staged again at that
        # path.
        name = ids.logical_name(call.volume_id)
        locks = self._locks.hold(name, call.staging_path, call.target_path)
        with call.keys.used(), locks:
            self._publisher.publish(call)
        return csi.NodePublishVolumeResponse()

    def NodeUnpublishVolume(
        self, request: csi.NodeUnpublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeUnpublishVolumeResponse:
        """Unpublish a volume from a pod's path; delete the volume if it is inline."""
        call = requests.VolumePath.from_proto(request, "target_path")
        with self._locks.hold(ids.logical_name(call.volume_id)):
            self._publisher.unpublish(call)
            if ids.is_inline(call.volume_id):
                self._inline_volumes.ensure_absent(call.volume_id)
        return csi.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(
        self, request: csi.NodeGetVolumeStatsRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetVolumeStatsResponse:
        """Return the size of a volume, and how much of its file system is used."""
        call = requests.VolumePath.from_proto(request, "volume_path")
        return csi.NodeGetVolumeStatsResponse(usage=_usage(self._volumes.statistics(call)))

    def NodeGetVolumeHealth(
        self, request: csi.NodeGetVolumeHealthRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetVolumeHealthResponse:
        """Return the health of a volume of this node, whether or not the volume is in use."""
        health = self._health.on_node(requests.GetVolumeHealth.from_proto(request))
        return csi.NodeGetVolumeHealthResponse(volume_health=messages.volume_health(health))

    def NodeGetStorageHealth(
        self, request: csi.NodeGetStorageHealthRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetStorageHealthResponse:
        """Return the health conditions of this node's volume groups, lvm2 and programs."""
        conditions = self._storage.conditions()
        return csi.NodeGetStorageHealthResponse(
            backend_health=map(messages.storage_health, conditions)
        )

    def NodeExpandVolume(
        self, request: csi.NodeExpandVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeExpandVolumeResponse:
        """Grow a logical volume if it is too small, and the file system on the volume, if any."""
        call = requests.ExpandVolume.from_proto(request)
        place = requests.VolumePath.from_proto(request, "volume_path")
        keys = requests.keys_of(request.secrets)
        with keys.used(), self._locks.hold(ids.logical_name(call.volume_id)):
            size_bytes = self._expander.expand_in_use(call, place, keys)
        return csi.NodeExpandVolumeResponse(capacity_bytes=size_bytes)

    def NodeGetCapabilities(
        self, request: csi.NodeGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetCapabilitiesResponse:
        """Return the optional RPCs that the Node service implements."""
        types = (
            _Rpc.STAGE_UNSTAGE_VOLUME,
            _Rpc.GET_VOLUME_STATS,
            _Rpc.GET_VOLUME_HEALTH,
            _Rpc.GET_STORAGE_HEALTH,
            _Rpc.EXPAND_VOLUME,
            _Rpc.SINGLE_NODE_MULTI_WRITER,
        )
        capabilities = [csi.NodeServiceCapability(rpc=_Rpc(type=rpc)) for rpc in types]
        return csi.NodeGetCapabilitiesResponse(capabilities=capabilities)

    def NodeGetInfo(
        self, request: csi.NodeGetInfoRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetInfoResponse:
        """Return the node's id, topology and maximum number of volumes."""
        return csi.NodeGetInfoResponse(
            node_id=self._configuration.now.node_id,
            max_volumes_per_node=self._configuration.now.max_volumes_per_node,
            accessible_topology=csi.Topology(segments=self._configuration.now.here),
        )


def _usage(statistics: Statistics) -> list[csi.VolumeUsage]:
    unit = csi.VolumeUsage.Unit
    if statistics.usage is None:
        return [csi.VolumeUsage(unit=unit.BYTES, total=statistics.total_bytes)]
    usages = [
        csi.VolumeUsage(
            unit=unit.BYTES,
            total=statistics.usage.total_bytes,
            used=statistics.usage.used_bytes,
            available=statistics.usage.available_bytes,
        )
    ]
    if (inodes := statistics.usage.inodes) is not None:
        usages.append(
            csi.VolumeUsage(
                unit=unit.INODES,
                total=inodes.total,
                used=inodes.used,
                available=inodes.available,
            )
        )
    return usages
