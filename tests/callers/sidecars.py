"""external-provisioner and external-snapshotter beside one driver: `--node-deployment`."""

from typing import TYPE_CHECKING

from callers import rules
from callers.objects import SIDECAR_PREFIX, Claim, PersistentVolume, Snapshot
from callers.plugin import Plugin
from callers.rules import Reaction

from agent.core.settings import TOPOLOGY_KEY
from agent.csi.client import of_snapshot, of_volume
from proto import csi_pb2 as csi

if TYPE_CHECKING:
    from callers.cluster import Cluster

# --capacity-poll-interval of the manifests.
_POLL_SECONDS = 300
_AT_START = ("Probe", "GetPluginInfo", "GetPluginCapabilities", "ControllerGetCapabilities")


class Sidecar:
    """One that ends where the driver cannot be asked, or is lost, and is started again."""

    def __init__(self, cluster: "Cluster", node: str, plugin: Plugin) -> None:
        self._cluster = cluster
        self._backoff = cluster.backoff
        self._node = node
        self._plugin = plugin
        self.is_up = False

    def lose(self) -> None:
        """The connection to the driver is lost: the process ends (csi-lib-utils `connection`)."""
        self.is_up = False

    def step(self) -> None:
        if not self.is_up:
            self._start()
        if self.is_up:
            self._work()

    def _start(self) -> None:
        """ProbeForever, then what it must know of the driver."""
        if not self._backoff.is_due(self):
            return
        for method in _AT_START:
            if self._plugin.ask(method, caller=rules.SIDECARS).reaction is not Reaction.GOES_ON:
                self._backoff.failed(self)
                return
        self._backoff.succeeded(self)
        self.is_up = True
        self._begin()

    def _begin(self) -> None:
        """What comes first after a start."""

    def _work(self) -> None:
        raise NotImplementedError


class Provisioner(Sidecar):
    """Makes the volumes of claims whose node is this one, and removes those that are on it."""

    def _begin(self) -> None:
        self._polled = self._backoff.now
        self._sync_capacities()

    def _work(self) -> None:
        for claim in self._cluster.claims:
            mine = claim.selected_node == self._node and claim.volume is None
            if mine and (claim.is_under_way or not claim.is_deleted):
                self._provision(claim)
        for volume in [one for one in self._cluster.released if one.node == self._node]:
            self._delete(volume)
        if self._backoff.now - self._polled >= _POLL_SECONDS:
            self._polled = self._backoff.now
            self._sync_capacities()

    def _provision(self, claim: Claim) -> None:
        """ProvisionExt, and what the library makes of its state (provisionVolumeErrorHandling)."""
        if not self._backoff.is_due(self, claim):
            return
        if (source := _content_source(claim)) is None and claim.source is not None:
            return  # it is not there yet
        storage_class = self._cluster.classes[claim.storage_class]
        own = {k: v for k, v in storage_class.parameters.items() if SIDECAR_PREFIX not in k}
        here = csi.Topology(segments={TOPOLOGY_KEY: self._node})
        request = csi.CreateVolumeRequest(
            name=f"pvc-{claim.name}",
            capacity_range=csi.CapacityRange(required_bytes=claim.size_bytes),
            volume_capabilities=[claim.capability],
            parameters={
                **own,
                f"{SIDECAR_PREFIX}pvc/name": claim.name,
                f"{SIDECAR_PREFIX}pvc/namespace": "shop",
                f"{SIDECAR_PREFIX}pv/name": f"pvc-{claim.name}",
            },
            volume_content_source=source,
            accessibility_requirements=csi.TopologyRequirement(requisite=[here], preferred=[here]),
        )
        answer = self._plugin.ask("CreateVolume", request)
        claim.is_under_way = answer.reaction is Reaction.REPEATS
        if answer.reaction is Reaction.RESCHEDULES:
            claim.selected_node = ""
        if answer.reaction is not Reaction.GOES_ON:
            self._backoff.failed(self, claim)
            return
        self._backoff.succeeded(self, claim)
        made = answer.response.volume
        assert made.capacity_bytes >= claim.size_bytes
        assert made.content_source == (source or csi.VolumeContentSource())
        [place] = made.accessible_topology
        claim.volume = PersistentVolume(
            name=request.name,
            id=made.volume_id,
            node=place.segments[TOPOLOGY_KEY],
            size_bytes=made.capacity_bytes,
            storage_class=claim.storage_class,
            capability=claim.capability,
            context=dict(made.volume_context),
        )
        claim.capacity_bytes = made.capacity_bytes
        self._sync_capacities()

    def _delete(self, volume: PersistentVolume) -> None:
        if not self._backoff.is_due(self, volume.name):
            return
        answer = self._plugin.ask("DeleteVolume", csi.DeleteVolumeRequest(volume_id=volume.id))
        if answer.reaction is not Reaction.GOES_ON:
            self._backoff.failed(self, volume.name)
            return
        self._backoff.succeeded(self, volume.name)
        self._cluster.released.remove(volume)
        self._sync_capacities()

    def _sync_capacities(self) -> None:
        """Ask for every StorageClass, with all of its parameters; an error leaves what there is."""
        for one in self._cluster.classes.values():
            request = csi.GetCapacityRequest(
                parameters=one.parameters,
                accessible_topology=csi.Topology(segments={TOPOLOGY_KEY: self._node}),
            )
            answer = self._plugin.ask("GetCapacity", request)
            if answer.reaction is Reaction.GOES_ON:
                # What kube-scheduler compares with: the largest volume, where that is given.
                found = answer.response
                largest = found.maximum_volume_size.value
                if not found.HasField("maximum_volume_size"):
                    largest = found.available_capacity
                self._cluster.capacities[self._node, one.name] = largest


class Snapshotter(Sidecar):
    """Takes and removes the snapshots of volumes on this node."""

    def _work(self) -> None:
        for snapshot in list(self._cluster.snapshots):
            volume = snapshot.claim.volume
            if (snapshot.node or (volume.node if volume else "")) != self._node:
                continue
            if not self._backoff.is_due(self, snapshot):
                continue
            if snapshot.is_deleted and snapshot.id and not self._cluster.is_source(snapshot):
                self._delete(snapshot)
            elif not snapshot.is_deleted and not snapshot.is_ready and volume is not None:
                self._create(snapshot, volume)

    def _create(self, snapshot: Snapshot, volume: PersistentVolume) -> None:
        request = csi.CreateSnapshotRequest(
            name=f"snapshot-{snapshot.name}", source_volume_id=volume.id
        )
        answer = self._plugin.ask("CreateSnapshot", request)
        if answer.reaction is not Reaction.GOES_ON:
            self._backoff.failed(self, snapshot)
            return
        self._backoff.succeeded(self, snapshot)
        snapshot.id, snapshot.node = answer.response.snapshot.snapshot_id, self._node
        snapshot.is_ready = answer.response.snapshot.ready_to_use

    def _delete(self, snapshot: Snapshot) -> None:
        request = csi.DeleteSnapshotRequest(snapshot_id=snapshot.id)
        if self._plugin.ask("DeleteSnapshot", request).reaction is Reaction.GOES_ON:
            self._backoff.succeeded(self, snapshot)
            self._cluster.snapshots.remove(snapshot)
        else:
            self._backoff.failed(self, snapshot)


def _content_source(claim: Claim) -> csi.VolumeContentSource | None:
    if isinstance(claim.source, Snapshot) and claim.source.is_ready:
        return of_snapshot(claim.source.id)
    if isinstance(claim.source, Claim) and claim.source.volume is not None:
        return of_volume(claim.source.volume.id)
    return None
