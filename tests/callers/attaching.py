"""kube-controller-manager's attach/detach controller and pod garbage collector; external-attacher.

Those of a cluster whose CSIDriver has `attachRequired: true`.
"""

from typing import TYPE_CHECKING

from callers import rules
from callers.objects import VolumeAttachment
from callers.rules import Reaction
from callers.sidecars import Sidecar

from proto import csi_pb2 as csi

if TYPE_CHECKING:
    from callers.cluster import Cluster

# ReconcilerMaxWaitForUnmountDuration of its defaults.
_FORCE_SECONDS = 360
# --reconcile-sync of the chart.
_RECONCILE_SECONDS = 600


class PodCollector:
    """Removes pods that are deleted from nodes that are out of service (`gc_controller.go`)."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster

    def step(self) -> None:
        for pod in [one for one in self._cluster.pods if one.is_deleted and one.node]:
            if self._cluster.nodes[pod.node].is_off and pod.node in self._cluster.out_of_service:
                self._cluster.pods.remove(pod)


class AttachDetachController:
    """Has a VolumeAttachment for each volume of each pod on its node (`reconciler.go`)."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster

    def step(self) -> None:
        wanted = {
            (volume.name, pod.node): volume
            for pod in self._cluster.pods
            if pod.node
            for volume in pod.volumes
        }
        there = {(one.volume.name, one.node): one for one in self._cluster.attachments}
        for key, one in there.items():
            if key in wanted:
                one.asked_at = -1
            elif not one.is_deleted and self._may_detach(one):
                one.is_deleted = True
        for key, volume in wanted.items():
            if key not in there:
                self._cluster.attachments.append(VolumeAttachment(volume, key[1]))

    def _may_detach(self, one: VolumeAttachment) -> bool:
        """Unmounted as kubelet said last, out of service, or unhealthy for six minutes since."""
        now, node = self._cluster.backoff.now, self._cluster.nodes[one.node]
        one.asked_at = now if one.asked_at < 0 else one.asked_at
        is_forced = node.is_off and now - one.asked_at > _FORCE_SECONDS
        is_mounted = node.kubelet.has(one.volume)
        return not is_mounted or is_forced or one.node in self._cluster.out_of_service


class Attacher(Sidecar):
    """external-attacher (`csi_handler.go`)."""

    def _begin(self) -> None:
        self._reconciled = self._backoff.now

    def _work(self) -> None:
        for one in list(self._cluster.attachments):
            if not self._backoff.is_due(self, one):
                continue
            if one.is_deleted:
                self._detach(one)
            elif not one.is_attached or one.is_doubted:
                self._attach(one)
        if self._backoff.now - self._reconciled >= _RECONCILE_SECONDS:
            self._reconciled = self._backoff.now
            self._reconcile()

    def _attach(self, one: VolumeAttachment) -> None:
        one.is_doubted = False
        request = csi.ControllerPublishVolumeRequest(
            volume_id=one.volume.id,
            node_id=one.node,
            volume_capability=one.volume.capability,
            readonly=one.volume.read_only,
            volume_context=one.volume.context,
        )
        answer = self._plugin.ask("ControllerPublishVolume", request)
        if answer.reaction is not Reaction.GOES_ON:
            self._backoff.failed(self, one)
            return
        self._backoff.succeeded(self, one)
        one.is_attached, one.context = True, dict(answer.response.publish_context)

    def _detach(self, one: VolumeAttachment) -> None:
        request = csi.ControllerUnpublishVolumeRequest(volume_id=one.volume.id, node_id=one.node)
        answer = self._plugin.ask("ControllerUnpublishVolume", request)
        if answer.reaction is Reaction.GOES_ON:
            self._backoff.succeeded(self, one)
            self._cluster.attachments.remove(one)
        else:
            self._backoff.failed(self, one)

    def _reconcile(self) -> None:
        """Doubt each VolumeAttachment that differs from what the driver lists (ReconcileVA)."""
        attacher = rules.of("ControllerPublishVolume").caller
        found, request = dict[str, list[str]](), csi.ListVolumesRequest()
        while True:
            answer = self._plugin.ask("ListVolumes", request, attacher)
            if answer.reaction is not Reaction.GOES_ON:
                return
            for entry in answer.response.entries:
                if entry.HasField("status"):
                    found[entry.volume.volume_id] = list(entry.status.published_node_ids)
            if not answer.response.next_token:
                break
            request = csi.ListVolumesRequest(starting_token=answer.response.next_token)
        for one in self._cluster.attachments:
            if one.is_attached != (one.node in found.get(one.volume.id, [])):
                one.is_doubted = True
