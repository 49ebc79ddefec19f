"""A gRPC client of a CSI plugin, which calls the plugin over a Unix socket as kubelet does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import grpc
from google.protobuf.empty_pb2 import Empty

from proto import carver_pb2 as carver
from proto import carver_pb2_grpc, csi_pb2_grpc
from proto import csi_pb2 as csi

Mode = csi.VolumeCapability.AccessMode.Mode
S = TypeVar("S")

# Channel options of gRPC. The backoff between reconnects, in milliseconds, stays below a second:
# connecting to a local socket costs nothing, so the pauses need not grow to minutes, as they do by
# default for a remote server.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Removes the limit of a received message: a list may have any number of volumes.
    ("grpc.max_receive_message_length", -1),
)


def mounted(
    fs_type: str = "",
    flags: Sequence[str] = (),
    mode: "Mode.ValueType" = Mode.SINGLE_NODE_WRITER,
) -> csi.VolumeCapability:
    """The capability of a volume that is used through a mounted file system."""
    return csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=flags),
        access_mode=csi.VolumeCapability.AccessMode(mode=mode),
    )


def block(mode: "Mode.ValueType" = Mode.SINGLE_NODE_WRITER) -> csi.VolumeCapability:
    """The capability of a volume that is used as a raw block device."""
    return csi.VolumeCapability(
        block=csi.VolumeCapability.BlockVolume(),
        access_mode=csi.VolumeCapability.AccessMode(mode=mode),
    )


def of_snapshot(snapshot_id: str) -> csi.VolumeContentSource:
    """The content source of a new volume that is restored from a snapshot."""
    source = csi.VolumeContentSource.SnapshotSource(snapshot_id=snapshot_id)
    return csi.VolumeContentSource(snapshot=source)


def of_volume(volume_id: str) -> csi.VolumeContentSource:
    """The content source of a new volume that is cloned from another volume."""
    source = csi.VolumeContentSource.VolumeSource(volume_id=volume_id)
    return csi.VolumeContentSource(volume=source)


class _Channel:
    """A gRPC channel with a default deadline for unary calls; a timeout of a call overrides it."""

    def __init__(self, channel: grpc.Channel, timeout_seconds: float) -> None:
        self._channel = channel
        self.timeout_seconds = timeout_seconds
        self.unary_stream = channel.unary_stream
        self.stream_stream = channel.stream_stream
        self.close = channel.close

    def unary_unary(self, *method: Any, **codecs: Any) -> Callable[..., Any]:
        # Make the stub of a method when the method is first called: a client uses few methods.
        call = cache(lambda: self._channel.unary_unary(*method, **codecs))
        return lambda request, timeout=None: call()(
            request, timeout=timeout or self.timeout_seconds
        )


class Client:
    """A client of a CSI plugin: stubs of the plugin's services, and methods for common calls.

    Each method raises grpc.RpcError with the plugin's code. Sizes are in bytes.
    """

    options: tuple[tuple[str, object], ...] = _OPTIONS

    def __init__(self, socket: Path, timeout_seconds: float = 120) -> None:
        channel = grpc.insecure_channel(f"unix://{socket}", options=self.options)
        self.channel = _Channel(channel, timeout_seconds)
        self._stubs: dict[object, Any] = {}
        self.identity = self.stub(csi_pb2_grpc.IdentityStub)
        self.controller = self.stub(csi_pb2_grpc.ControllerStub)
        self.group_controller = self.stub(csi_pb2_grpc.GroupControllerStub)
        self.node = self.stub(csi_pb2_grpc.NodeStub)
        self.operator = self.stub(carver_pb2_grpc.OperatorStub)

    def stub(self, kind: Callable[[grpc.Channel], S]) -> S:
        """Return the generated stub of a service, such as TransferStub, on the client's channel."""
        if kind not in self._stubs:
            self._stubs[kind] = kind(cast(grpc.Channel, self.channel))
        return cast(S, self._stubs[kind])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.channel.close()

    def info(self) -> csi.GetPluginInfoResponse:
        """Return the plugin's name and version (GetPluginInfo)."""
        return self.identity.GetPluginInfo(csi.GetPluginInfoRequest())

    def probe(self) -> csi.ProbeResponse:
        """Return the plugin's readiness (Probe)."""
        return self.identity.Probe(csi.ProbeRequest())

    def capacity(
        self, parameters: Mapping[str, str] | None = None, *capabilities: csi.VolumeCapability
    ) -> csi.GetCapacityResponse:
        """Return the capacity for new volumes with these parameters and capabilities."""
        request = csi.GetCapacityRequest(
            parameters=parameters or {}, volume_capabilities=capabilities
        )
        return self.controller.GetCapacity(request)

    def create(
        self,
        name: str,
        required_bytes: int = 0,
        *capabilities: csi.VolumeCapability,
        limit_bytes: int = 0,
        parameters: Mapping[str, str] | None = None,
        source: csi.VolumeContentSource | None = None,
        mutable: Mapping[str, str] | None = None,
    ) -> csi.Volume:
        """Create a volume; the default capability is a mounted file system with a single writer."""
        request = csi.CreateVolumeRequest(
            name=name,
            capacity_range=csi.CapacityRange(
                required_bytes=required_bytes, limit_bytes=limit_bytes
            ),
            volume_capabilities=capabilities or [mounted()],
            parameters=parameters or {},
            volume_content_source=source,
            mutable_parameters=mutable or {},
        )
        return self.controller.CreateVolume(request).volume

    def delete(self, volume_id: str) -> None:
        """Delete a volume by its id."""
        request = csi.DeleteVolumeRequest(volume_id=volume_id)
        self.controller.DeleteVolume(request)

    def volumes(self) -> list[csi.Volume]:
        """Return all volumes of the plugin (ListVolumes)."""
        return list(self.every_volume())

    def every_volume(self) -> Iterator[csi.Volume]:
        """Iterate over all volumes of the plugin; request pages as they are needed."""
        request, call = csi.ListVolumesRequest(), self.controller.ListVolumes
        return (entry.volume for entry in self._all_entries(call, request))

    def volume(self, volume_id: str) -> csi.ControllerGetVolumeResponse:
        """Return a volume and its status, by the volume's id."""
        request = csi.ControllerGetVolumeRequest(volume_id=volume_id)
        return self.controller.ControllerGetVolume(request)

    def volume_health(self, volume_id: str) -> csi.VolumeHealth:
        """Return the health of a volume as the Controller service reports it."""
        request = csi.ControllerGetVolumeHealthRequest(volume_id=volume_id)
        answer = self.controller.ControllerGetVolumeHealth(request)
        return answer.volume_health

    def unhealthy(self) -> list[csi.VolumeHealth]:
        """Return the health of each volume that has a health condition."""
        request = csi.ControllerListVolumeHealthRequest()
        return list(self._all_entries(self.controller.ControllerListVolumeHealth, request))

    def confirms(self, volume_id: str, capability: csi.VolumeCapability) -> bool:
        """Return whether the plugin confirms a capability of a volume."""
        request = csi.ValidateVolumeCapabilitiesRequest(
            volume_id=volume_id, volume_capabilities=[capability]
        )
        answer = self.controller.ValidateVolumeCapabilities(request)
        return answer.HasField("confirmed")

    def can_expand(self) -> bool:
        """Return whether the Controller service offers EXPAND_VOLUME."""
        answer = self.controller.ControllerGetCapabilities(csi.ControllerGetCapabilitiesRequest())
        rpc_type = csi.ControllerServiceCapability.RPC.EXPAND_VOLUME
        return any(offer.rpc.type == rpc_type for offer in answer.capabilities)

    def snapshot(
        self, name: str, volume_id: str, parameters: Mapping[str, str] | None = None
    ) -> csi.Snapshot:
        """Take a snapshot of a volume (CreateSnapshot)."""
        request = csi.CreateSnapshotRequest(
            name=name, source_volume_id=volume_id, parameters=parameters or {}
        )
        return self.controller.CreateSnapshot(request).snapshot

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot by its id."""
        request = csi.DeleteSnapshotRequest(snapshot_id=snapshot_id)
        self.controller.DeleteSnapshot(request)

    def snapshots(self, *, volume_id: str = "", snapshot_id: str = "") -> list[csi.Snapshot]:
        """Return all snapshots, the snapshots of one volume, or the snapshot with an id."""
        return list(self.every_snapshot(volume_id=volume_id, snapshot_id=snapshot_id))

    def every_snapshot(
        self, *, volume_id: str = "", snapshot_id: str = ""
    ) -> Iterator[csi.Snapshot]:
        """Iterate over all snapshots, those of one volume, or one; request pages as needed."""
        request = csi.ListSnapshotsRequest(source_volume_id=volume_id, snapshot_id=snapshot_id)
        entries = self._all_entries(self.controller.ListSnapshots, request)
        return (entry.snapshot for entry in entries)

    def _all_entries(self, call: Callable[..., Any], request: Any) -> Iterator[Any]:
        """Iterate over the entries of a paged list; `call` requests pages as they are needed."""
        while True:
            answer = call(request)
            yield from answer.entries
            if not answer.next_token:
                return
            request.starting_token = answer.next_token

    def stage(
        self,
        volume: csi.Volume,
        staging_path: Path | str,
        capability: csi.VolumeCapability | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Stage a volume at a path (NodeStageVolume), by default with a mounted file system."""
        request = csi.NodeStageVolumeRequest(
            volume_id=volume.volume_id,
            staging_target_path=str(staging_path),
            volume_capability=capability or mounted(),
            volume_context=volume.volume_context,
            secrets=secrets or {},
        )
        self.node.NodeStageVolume(request)

    def unstage(self, volume_id: str, staging_path: Path | str) -> None:
        """Unstage a volume from its staging path (NodeUnstageVolume)."""
        request = csi.NodeUnstageVolumeRequest(
            volume_id=volume_id, staging_target_path=str(staging_path)
        )
        self.node.NodeUnstageVolume(request)

    def publish(
        self,
        volume: csi.Volume,
        staging_path: Path | str,
        target_path: Path | str,
        capability: csi.VolumeCapability | None = None,
        secrets: Mapping[str, str] | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        """Publish a staged volume at a target path (NodePublishVolume)."""
        request = csi.NodePublishVolumeRequest(
            volume_id=volume.volume_id,
            staging_target_path=str(staging_path),
            target_path=str(target_path),
            volume_capability=capability or mounted(),
            volume_context=volume.volume_context,
            readonly=read_only,
            secrets=secrets or {},
        )
        self.node.NodePublishVolume(request)

    def unpublish(self, volume_id: str, target_path: Path | str) -> None:
        """Unpublish a volume from a target path (NodeUnpublishVolume)."""
        request = csi.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=str(target_path))
        self.node.NodeUnpublishVolume(request)

    def stats(self, volume_id: str, volume_path: Path | str) -> csi.NodeGetVolumeStatsResponse:
        """Return the usage of a volume that is staged or published at a path."""
        request = csi.NodeGetVolumeStatsRequest(volume_id=volume_id, volume_path=str(volume_path))
        return self.node.NodeGetVolumeStats(request)

    def expand(self, volume_id: str, required_bytes: int) -> csi.ControllerExpandVolumeResponse:
        """Grow a volume's logical volume (ControllerExpandVolume)."""
        request = csi.ControllerExpandVolumeRequest(
            volume_id=volume_id, capacity_range=csi.CapacityRange(required_bytes=required_bytes)
        )
        return self.controller.ControllerExpandVolume(request)

    def modify(self, volume_id: str, parameters: Mapping[str, str]) -> None:
        """Change mutable parameters of a volume (ControllerModifyVolume)."""
        request = csi.ControllerModifyVolumeRequest(
            volume_id=volume_id, mutable_parameters=parameters
        )
        self.controller.ControllerModifyVolume(request)

    def volumes_here(self) -> carver.VolumesHereResponse:
        """Return the volumes of the volume groups that are present on this node."""
        return self.operator.VolumesHere(Empty())

    def background_work(self) -> Mapping[str, str]:
        """Return the progress of background erasing, zeroing and copying, by volume id."""
        return self.operator.BackgroundWork(Empty()).progress

    def slowest_calls(self, maximum_calls: int) -> carver.SlowestCallsResponse:
        """Return the traces of the slowest RPCs among those that ended last.

        The response has at most `maximum_calls` traces.
        """
        return self.operator.SlowestCalls(carver.SlowestCallsRequest(most=maximum_calls))

    def snapshots_here(self) -> carver.SnapshotsHereResponse:
        """Return the snapshots of the volume groups that are present on this node."""
        return self.operator.SnapshotsHere(Empty())

    def adopt(self, request: carver.AdoptVolumeRequest) -> carver.AdoptVolumeResponse:
        """Turn a logical volume that Carver did not create into a volume of Carver's."""
        return self.operator.AdoptVolume(request)

    def undo_adopt(self, request: carver.AdoptVolumeRequest) -> carver.AdoptVolumeResponse:
        """Undo the adoption of a logical volume (UndoAdoptVolume)."""
        return self.operator.UndoAdoptVolume(request)

    def repair(
        self, volume_id: str, *, pool_metadata: bool = False, differing_images: bool = False
    ) -> tuple[bool, str]:
        """Start or continue the repair of a volume.

        With `pool_metadata`, damaged metadata of its thin pool may be rewritten; with
        `differing_images`, images of a RAID that differ may be overwritten.

        Return whether the repair is done, and a sentence about what was done or is waited for. A
        service that would overwrite images unasked, as that of 0.2.0, refuses the call.
        """
        request = carver.RepairVolumeRequest(
            volume_id=volume_id, pool_metadata=pool_metadata, differing_images=differing_images
        )
        answer = self.operator.RepairAsConfirmed(request)
        return answer.done, answer.message

    def replace_disk(self, old_disk: str, new_disk: str) -> tuple[bool, str]:
        """Start or continue the replacement of a disk by another disk.

        Return whether the replacement is done, and a sentence about what was done or is waited for.
        """
        request = carver.ReplaceDiskRequest(old_disk=old_disk, new_disk=new_disk)
        answer = self.operator.ReplaceDisk(request)
        return answer.done, answer.message

    def node_expand(
        self,
        volume_id: str,
        volume_path: Path | str,
        required_bytes: int = 0,
        secrets: Mapping[str, str] | None = None,
        capability: csi.VolumeCapability | None = None,
    ) -> csi.NodeExpandVolumeResponse:
        """Grow a volume's logical volume, if too small, and file system (NodeExpandVolume)."""
        request = csi.NodeExpandVolumeRequest(
            volume_id=volume_id,
            volume_path=str(volume_path),
            capacity_range=csi.CapacityRange(required_bytes=required_bytes),
            secrets=secrets or {},
            volume_capability=capability,
        )
        return self.node.NodeExpandVolume(request)
