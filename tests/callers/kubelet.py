"""kubelet on one node: stages, publishes, grows, measures; unpublishes and unstages in the end.

What it knows of a volume decides what it calls later: after a final error it takes a step for not
done, and after one that may still be in progress for perhaps done (`csi_client.go`, isFinalError).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from callers.directories import Directories
from callers.objects import Claim, PersistentVolume, Pod
from callers.plugin import Answer, Plugin
from callers.rules import NOT_FINAL, Reaction

from agent.csi.client import Mode, mounted
from agent.settings.settings import DRIVER_NAME
from proto import csi_pb2 as csi

if TYPE_CHECKING:
    from callers.cluster import Cluster

_POD = "csi.storage.k8s.io/"


class Kubelet:
    """One run of it after another: what it knows is in memory, and read from its directory anew."""

    def __init__(
        self, cluster: "Cluster", node: str, plugin: Plugin, directories: Directories
    ) -> None:
        self._cluster = cluster
        self._backoff = cluster.backoff
        self._node = node
        self._plugin = plugin
        self._directories = directories
        # What was done, or may have been: volumes and the pods that they are published to.
        self._staged: dict[str, PersistentVolume] = {}
        self._published: dict[tuple[Pod, str], PersistentVolume] = {}
        # Volumes that pods have, by the pod and the volume's name: not mounted again.
        self._mounted: set[tuple[Pod, str]] = set()
        # Where the pod that came last has each raw block volume.
        self._mapped: dict[str, str] = {}
        # The names of volumes whose growth is not tried before they are unmounted, and of those of
        # which it failed for good (actual_state_of_world.go).
        self._in_use: set[str] = set()
        self._failed: set[str] = set()

    def step(self) -> None:
        """Do what is due for the pods of this node, and let go of volumes that none of them has."""
        mine = [pod for pod in self._cluster.pods if pod.node == self._node]
        # What it finds in its directory of pods that are gone from the API.
        for pod in {pod for pod, _ in self._published} - set(mine):
            self._end(pod)
        for pod in mine:
            if pod.is_deleted:
                self._end(pod)
            elif not pod.is_running:
                self._start(pod)
            else:
                self._grow(pod)
        wanted = {volume.name for one in mine if not one.is_deleted for volume in one.volumes}
        published = {one.name for one in self._published.values()}
        for name in set(self._staged) - wanted - published:
            self._unstage(self._staged[name])

    def has(self, volume: PersistentVolume) -> bool:
        """Whether a volume is in use, as the node's status says (volumesInUse)."""
        return volume.name in self._staged

    def restart(self) -> None:
        """Find in the directory what was published, and mount what pods have once more."""
        self._in_use.clear()
        self._failed.clear()
        self._mounted.clear()
        for pod, _ in self._published:
            pod.is_running = False

    def reboot(self) -> None:
        """The same on a node that was off: its own binds and loop devices are gone as well."""
        self._directories.forget()
        self.restart()

    def publish_inline(self, volume_id: str, pod: str, attributes: Mapping[str, str]) -> Answer:
        """A pod has a volume of its own in its specification: one call, and no staging."""
        path = self._inline_target(volume_id, pod)
        self._directories.prepare(path.parent)
        request = csi.NodePublishVolumeRequest(
            volume_id=volume_id,
            target_path=str(path),
            volume_capability=mounted(mode=Mode.SINGLE_NODE_WRITER),
            volume_context={**attributes, **_about(pod), f"{_POD}ephemeral": "true"},
        )
        answer = self._plugin.ask("NodePublishVolume", request)
        if answer.reaction is Reaction.FORGETS:
            self._directories.remove(path)
            self._directories.remove(path.parent)
        return answer

    def unpublish_inline(self, volume_id: str, pod: str) -> Answer:
        path = self._inline_target(volume_id, pod)
        request = csi.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=str(path))
        answer = self._plugin.ask("NodeUnpublishVolume", request)
        self._directories.remove(path.parent)
        return answer

    def knows_nothing(self) -> bool:
        """Whether there is nothing that it would still undo."""
        return not self._staged and not self._published

    def target(self, pod: Pod, volume: PersistentVolume) -> str:
        root = self._directories.kubelet
        if _is_block(volume):
            devices = root / "plugins/kubernetes.io/csi/volumeDevices"
            return str(devices / "publish" / volume.name / pod.name)
        return str(root / "pods" / pod.name / "volumes/kubernetes.io~csi" / volume.name / "mount")

    def _start(self, pod: Pod) -> None:
        """Mount each volume by itself; the pod runs once it has all (WaitForAttachAndMount)."""
        if not self._backoff.is_due(self, pod):
            return
        for claim in pod.claims:
            volume = claim.volume
            assert volume is not None
            if (pod, volume.name) not in self._mounted and not self._mount(pod, claim, volume):
                continue
            self._mounted.add((pod, volume.name))
        pod.is_running = all((pod, one.name) in self._mounted for one in pod.volumes)
        (self._backoff.succeeded if pod.is_running else self._backoff.failed)(self, pod)

    def _mount(self, pod: Pod, claim: Claim, volume: PersistentVolume) -> bool:
        attachment = self._cluster.attachment(volume, self._node)
        if self._cluster.attaches and attachment is None:
            return False  # "timed out waiting for the condition"
        context = {} if attachment is None else attachment.context
        is_mounted = (
            self._stage(volume, context)
            and self._publish(pod, volume, context)
            and self._expand(pod, claim)
        )
        path = self.target(pod, volume)
        if is_mounted:
            request = csi.NodeGetVolumeStatsRequest(volume_id=volume.id, volume_path=path)
            self._plugin.ask("NodeGetVolumeStats", request)
        self._ask_for_health(volume, path)
        return is_mounted

    def _ask_for_health(self, volume: PersistentVolume, path: str) -> None:
        """As often as for statistics, and of what could not be staged, too (Kubernetes 1.37)."""
        request = csi.NodeGetVolumeHealthRequest(
            volume_id=volume.id,
            volume_publish_path=path,
            staging_target_path=self._staging(volume),
        )
        answer = self._plugin.ask("NodeGetVolumeHealth", request)
        if answer.response is not None:
            health = answer.response.volume_health
            assert health.volume_id == volume.id
            # Twice the same, and the status of the whole pod is refused.
            statuses = [(one.status, one.reason) for one in health.health_statuses]
            assert len(set(statuses)) == len(statuses)
        self._plugin.ask("NodeGetStorageHealth")

    def _stage(self, volume: PersistentVolume, context: Mapping[str, str]) -> bool:
        path = self._staging(volume)
        self._directories.prepare(path)
        request = csi.NodeStageVolumeRequest(
            volume_id=volume.id,
            staging_target_path=path,
            volume_capability=volume.capability,
            volume_context=volume.context,
            publish_context=context,
        )
        answer = self._plugin.ask("NodeStageVolume", request)
        if answer.reaction is Reaction.FORGETS:
            if volume.name not in self._staged:
                self._directories.remove(path)
            return False
        self._staged[volume.name] = volume
        return answer.reaction is Reaction.GOES_ON

    def _publish(self, pod: Pod, volume: PersistentVolume, context: Mapping[str, str]) -> bool:
        path = self.target(pod, volume)
        self._directories.prepare(path.rpartition("/")[0])
        request = csi.NodePublishVolumeRequest(
            volume_id=volume.id,
            staging_target_path=self._staging(volume),
            target_path=path,
            volume_capability=volume.capability,
            volume_context={**volume.context, **_about(pod.name), f"{_POD}ephemeral": "false"},
            readonly=pod.read_only,
            publish_context=context,
        )
        answer = self._plugin.ask("NodePublishVolume", request)
        if answer.reaction is Reaction.FORGETS:
            return False
        self._published[pod, volume.name] = volume
        if answer.reaction is not Reaction.GOES_ON:
            return False
        if _is_block(volume):
            self._directories.take(path)
            self._mapped[volume.name] = path
        return True

    def _grow(self, pod: Pod) -> None:
        """Expand what a pod uses (`actual_state_of_world.go`, volumeNeedsExpansion)."""
        for claim in pod.claims:
            assert claim.volume is not None
            if claim.volume.name not in self._in_use and self._backoff.is_due(self, claim):
                self._expand(pod, claim)

    def _expand(self, pod: Pod, claim: Claim) -> bool:
        """Expand what is smaller than its PersistentVolume; whether it can be mounted.

        Each mount asks, whatever was answered before (`operation_generator.go`,
        expandVolumeDuringMount). After an infeasible error, too, the mount fails: only a later try
        lets the pod pass, if the claim is marked still (`node_expander.go`, expandOnPlugin).
        """
        volume = claim.volume
        assert volume is not None
        if claim.is_infeasible or claim.capacity_bytes >= volume.size_bytes or pod.read_only:
            return True
        has_changed = claim.size_bytes != volume.size_bytes and volume.name in self._failed
        request = csi.NodeExpandVolumeRequest(
            volume_id=volume.id,
            # Of a device it knows one path, also after that pod ended (DevicePath in its actual
            # state of the world).
            volume_path=self._mapped.get(volume.name, self.target(pod, volume)),
            capacity_range=csi.CapacityRange(required_bytes=volume.size_bytes),
            staging_target_path=self._staging(volume),
            volume_capability=volume.capability,
        )
        answer = self._plugin.ask("NodeExpandVolume", request)
        if answer.reaction is Reaction.GOES_ON:
            claim.capacity_bytes = volume.size_bytes
            self._failed.discard(volume.name)
            self._backoff.succeeded(self, claim)
            return True
        if answer.code not in NOT_FINAL:
            self._failed.add(volume.name)
            claim.is_infeasible = answer.reaction is Reaction.MARKS or has_changed
        self._backoff.failed(self, claim)
        if answer.reaction is Reaction.STAYS:
            self._in_use.add(volume.name)
        return answer.reaction is Reaction.STAYS

    def _end(self, pod: Pod) -> None:
        """Unmount each volume by itself; the pod is gone once it has none."""
        pod.is_running = False
        for key, volume in [one for one in self._published.items() if one[0][0] is pod]:
            self._unpublish(pod, volume)
            if key not in self._published:
                self._mounted.discard(key)
        is_gone = not any(of is pod for of, _ in self._published)
        if is_gone and pod in self._cluster.pods:
            self._cluster.pods.remove(pod)

    def _unpublish(self, pod: Pod, volume: PersistentVolume) -> None:
        if not self._backoff.is_due(self, pod, volume.name):
            return
        path = self.target(pod, volume)
        if _is_block(volume) and not self._directories.release(path):
            self._backoff.failed(self, pod, volume.name)
            return
        request = csi.NodeUnpublishVolumeRequest(volume_id=volume.id, target_path=path)
        if self._plugin.ask("NodeUnpublishVolume", request).reaction is not Reaction.GOES_ON:
            self._backoff.failed(self, pod, volume.name)
            return
        self._directories.remove(path.rpartition("/")[0])
        del self._published[pod, volume.name]

    def _unstage(self, volume: PersistentVolume) -> None:
        if not self._backoff.is_due(self, volume.name):
            return
        path = self._staging(volume)
        request = csi.NodeUnstageVolumeRequest(volume_id=volume.id, staging_target_path=path)
        if self._plugin.ask("NodeUnstageVolume", request).reaction is Reaction.GOES_ON:
            self._backoff.succeeded(self, volume.name)
            self._directories.remove(path)
            del self._staged[volume.name]
            self._in_use.discard(volume.name)
        else:
            self._backoff.failed(self, volume.name)

    def _staging(self, volume: PersistentVolume) -> str:
        csi_plugin = self._directories.kubelet / "plugins/kubernetes.io/csi"
        if _is_block(volume):
            return str(csi_plugin / "volumeDevices/staging" / volume.name)
        digest = hashlib.sha256(volume.id.encode()).hexdigest()
        return str(csi_plugin / DRIVER_NAME / digest / "globalmount")

    def _inline_target(self, volume_id: str, pod: str) -> Path:
        pods = self._directories.kubelet / "pods"
        return pods / pod / "volumes/kubernetes.io~csi" / volume_id / "mount"


def _about(pod: str) -> dict[str, str]:
    """What a CSIDriver with podInfoOnMount gets about a pod (`csi_mounter.go`)."""
    info = {"pod.name": pod, "pod.namespace": "shop", "pod.uid": pod}
    info["serviceAccount.name"] = "default"
    return {_POD + key: value for key, value in info.items()}


def _is_block(volume: PersistentVolume) -> bool:
    return volume.capability.WhichOneof("access_type") == "block"
