"""The product's client, and the calls that only tests make."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from agent.csi import client
from agent.csi.client import mounted
from proto import csi_pb2 as csi


class Client(client.Client):
    """Calls of kubelet and the sidecars, beside those of the command line."""

    def attach(
        self,
        volume_id: str,
        node_id: str = "here",
        capability: csi.VolumeCapability | None = None,
        *,
        read_only: bool = False,
    ) -> dict[str, str]:
        """Attach a volume to a node (ControllerPublishVolume); the publish context."""
        request = csi.ControllerPublishVolumeRequest(
            volume_id=volume_id,
            node_id=node_id,
            volume_capability=capability or mounted(),
            readonly=read_only,
        )
        return dict(self.controller.ControllerPublishVolume(request).publish_context)

    def detach(self, volume_id: str, node_id: str = "here") -> None:
        """Undo `attach` (ControllerUnpublishVolume)."""
        request = csi.ControllerUnpublishVolumeRequest(volume_id=volume_id, node_id=node_id)
        self.controller.ControllerUnpublishVolume(request)

    def attached_to(self, volume_id: str) -> list[str]:
        """The ids of the nodes that a volume is attached to, by ControllerGetVolume."""
        return list(self.volume(volume_id).status.published_node_ids)

    def node_health(
        self, volume_id: str, publish_path: Path | str = "", staging_path: Path | str = ""
    ) -> csi.VolumeHealth:
        """A volume's health by the Node, in use or not."""
        request = csi.NodeGetVolumeHealthRequest(
            volume_id=volume_id,
            volume_publish_path=str(publish_path),
            staging_target_path=str(staging_path),
        )
        return self.node.NodeGetVolumeHealth(request).volume_health

    def storage_health(self) -> list[csi.NodeGetStorageHealthResponse.StorageBackendHealth]:
        """The health of the node's storage."""
        answer = self.node.NodeGetStorageHealth(csi.NodeGetStorageHealthRequest())
        return list(answer.backend_health)

    def group_snapshot(
        self, name: str, volume_ids: Sequence[str], parameters: Mapping[str, str] | None = None
    ) -> csi.VolumeGroupSnapshot:
        """Take snapshots of several volumes at one moment."""
        request = csi.CreateVolumeGroupSnapshotRequest(
            name=name, source_volume_ids=volume_ids, parameters=parameters or {}
        )
        answer = self.group_controller.CreateVolumeGroupSnapshot(request)
        return answer.group_snapshot

    def find_group_snapshot(
        self, group_snapshot_id: str, snapshot_ids: Sequence[str] = ()
    ) -> csi.VolumeGroupSnapshot:
        """One group snapshot."""
        request = csi.GetVolumeGroupSnapshotRequest(
            group_snapshot_id=group_snapshot_id, snapshot_ids=snapshot_ids
        )
        answer = self.group_controller.GetVolumeGroupSnapshot(request)
        return answer.group_snapshot

    def delete_group_snapshot(
        self, group_snapshot_id: str, snapshot_ids: Sequence[str] = ()
    ) -> None:
        """Delete all snapshots of a group."""
        request = csi.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=group_snapshot_id, snapshot_ids=snapshot_ids
        )
        self.group_controller.DeleteVolumeGroupSnapshot(request)

    def publish_inline(
        self,
        volume_id: str,
        target_path: Path | str,
        attributes: Mapping[str, str] | None = None,
        capability: csi.VolumeCapability | None = None,
        *,
        read_only: bool = False,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Publish an inline volume, as kubelet does for a pod."""
        pod = {"ephemeral": "true", "pod.name": "web-0", "pod.namespace": "shop", "pod.uid": "17"}
        context = {f"csi.storage.k8s.io/{key}": value for key, value in pod.items()}
        request = csi.NodePublishVolumeRequest(
            volume_id=volume_id,
            target_path=str(target_path),
            volume_capability=capability or mounted(),
            volume_context={**(attributes or {}), **context},
            readonly=read_only,
            secrets=secrets or {},
        )
        self.node.NodePublishVolume(request)


def wait_until_served(socket: Path, timeout_seconds: float = 600) -> None:
    """Wait until a service takes connections at its socket; raises grpc.FutureTimeoutError.

    With the client's own pauses between tries: those of gRPC grow to two minutes, so that a service
    that took one minute to start would look as if it took three.
    """
    with grpc.insecure_channel(f"unix://{socket}", options=Client.options) as channel:
        grpc.channel_ready_future(channel).result(timeout=timeout_seconds)


# Kubelet and the sidecars ask again for as long as it takes; five tries are the most that gRPC
# makes. See https://grpc.io/docs/guides/retry/.
_ASKS_AGAIN = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "1s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


class Asking(Client):
    """A client that, as real callers do, asks again what is UNAVAILABLE at the moment.

    For tests of a service whose patience is not theirs to set: a machine that is slow enough makes
    any call UNAVAILABLE once.
    """

    options = (*Client.options, ("grpc.service_config", json.dumps(_ASKS_AGAIN)))
