"""external-provisioner, -snapshotter and -resizer, of a node (`--node-deployment`) or the cluster.

Those of the cluster have an empty name in place of a node's.
"""

import itertools
from typing import TYPE_CHECKING

from callers import rules
from callers.objects import (
    NAMESPACE,
    SIDECAR_PREFIX,
    Claim,
    PersistentVolume,
    Resize,
    Snapshot,
)
from callers.plugin import Plugin
from callers.rules import Reaction

from agent.csi.client import of_snapshot, of_volume
from agent.settings.settings import TOPOLOGY_KEY
from proto import csi_pb2 as csi

if TYPE_CHECKING:
    from callers.cluster import Cluster

# --capacity-poll-interval of the manifests.
_POLL_SECONDS = 300
# After an infeasible error: --retry-interval-max.
_SLOWLY_SECONDS = 300
_AT_START = ("Probe", "GetPluginInfo", "GetPluginCapabilities", "ControllerGetCapabilities")


class Sidecar:
    """One that ends where the driver cannot be asked, or is lost, and is started again."""

    def __init__(self, cluster: "Cluster", node: str, plugin: Plugin) -> None:
        self._cluster = cluster
        self._backoff = cluster.backoff
        self._node = node
        self._plugin = plugin
        self.is_up = False

    def _is_mine(self, node: str) -> bool:
        """Whether what is on a node is this sidecar's to do."""
        return self._node in ("", node)

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
        # In memory only, by the claim's UID: what CreateVolume was asked for first (`cache.go`).
        self._topologies: dict[Claim, csi.TopologyRequirement] = {}
        self._polled = self._backoff.now
        self._sync_capacities()

    def _work(self) -> None:
        for claim in self._cluster.claims:
            is_placed = (
                bool(claim.selected_node) or self._cluster.classes[claim.storage_class].is_immediate
            )
            mine = is_placed and self._is_mine(claim.selected_node) and claim.volume is None
            if mine and (claim.is_under_way or not claim.is_deleted):
                self._provision(claim)
        for volume in [one for one in self._cluster.released if self._is_mine(one.node)]:
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
        if self._has_lost_its_node(claim):
            claim.selected_node, claim.is_under_way = "", False
            return
        storage_class = self._cluster.classes[claim.storage_class]
        own = {k: v for k, v in storage_class.parameters.items() if SIDECAR_PREFIX not in k}
        request = csi.CreateVolumeRequest(
            name=f"pvc-{claim.name}",
            capacity_range=csi.CapacityRange(required_bytes=claim.size_bytes),
            volume_capabilities=[claim.capability],
            parameters={
                **own,
                f"{SIDECAR_PREFIX}pvc/name": claim.name,
                f"{SIDECAR_PREFIX}pvc/namespace": NAMESPACE,
                f"{SIDECAR_PREFIX}pv/name": f"pvc-{claim.name}",
            },
            volume_content_source=source,
            accessibility_requirements=self._requirement(claim),
            mutable_parameters=self._cluster.attributes_classes[claim.attributes_class],
        )
        answer = self._plugin.ask("CreateVolume", request)
        claim.is_under_way = answer.reaction is Reaction.REPEATS
        if not claim.is_under_way:
            # Only then: after UNAVAILABLE the same node is asked, whatever becomes of it.
            self._topologies.pop(claim, None)
        if answer.reaction is Reaction.RESCHEDULES:
            # Where no node was selected it has ended, and is repeated (checkError, mayReschedule).
            claim.selected_node = ""
        if answer.reaction is Reaction.RETRIES_SLOWLY:
            self._backoff.failed(self, claim, seconds=_SLOWLY_SECONDS)
            return
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
        claim.current_attributes_class = claim.attributes_class
        self._sync_capacities()

    def _has_lost_its_node(self, claim: Claim) -> bool:
        """Whether the selected node's CSINode is not found, of which nothing is cached yet.

        Then the claim is scheduled anew (prepareProvision, ProvisioningReschedule).
        """
        is_known = claim in self._topologies or claim.selected_node in self._cluster.nodes
        return bool(claim.selected_node) and not is_known

    def _requirement(self, claim: Claim) -> csi.TopologyRequirement | None:
        """GenerateAccessibilityRequirements of `topology.go`.

        With `--node-deployment` the node alone. Else, without `--strict-topology`, each node's
        segments in order, or those of the class's allowedTopologies, and once more from the
        selected one on. For what binds immediately (`--immediate-topology=false`) nothing, or what
        is allowed, and once more from one on that a hash of the claim's name chooses. Of a selected
        node all is cached by the claim's UID, also if another one is selected later.
        """
        selected = claim.selected_node
        allowed = self._cluster.classes[claim.storage_class].allowed
        if not selected and not allowed:
            return None
        if claim in self._topologies:
            return self._topologies[claim]
        every = [self._node] if self._node else sorted(allowed or self._cluster.nodes)
        shift = sum(claim.name.encode()) % len(every)
        at = every.index(selected) if selected else shift
        terms = [csi.Topology(segments={TOPOLOGY_KEY: one}) for one in every]
        made = csi.TopologyRequirement(requisite=terms, preferred=terms[at:] + terms[:at])
        if selected:
            self._topologies[claim] = made
        return made

    def _delete(self, volume: PersistentVolume) -> None:
        if not self._backoff.is_due(self, volume.name):
            return
        if any(one.volume is volume for one in self._cluster.attachments):
            return  # "is still attached to node" (shouldDelete)
        answer = self._plugin.ask("DeleteVolume", csi.DeleteVolumeRequest(volume_id=volume.id))
        if answer.reaction is not Reaction.GOES_ON:
            self._backoff.failed(self, volume.name)
            return
        self._backoff.succeeded(self, volume.name)
        self._cluster.released.remove(volume)
        self._sync_capacities()

    def _sync_capacities(self) -> None:
        """Ask for every StorageClass, with all of its parameters; an error leaves what there is."""
        nodes = [self._node] if self._node else list(self._cluster.nodes)
        for node, one in itertools.product(nodes, self._cluster.classes.values()):
            request = csi.GetCapacityRequest(
                parameters=one.parameters,
                accessible_topology=csi.Topology(segments={TOPOLOGY_KEY: node}),
            )
            answer = self._plugin.ask("GetCapacity", request)
            if answer.reaction is Reaction.GOES_ON:
                # What kube-scheduler compares with: the largest volume, where that is given.
                found = answer.response
                largest = found.maximum_volume_size.value
                if not found.HasField("maximum_volume_size"):
                    largest = found.available_capacity
                self._cluster.capacities[node, one.name] = largest


class Snapshotter(Sidecar):
    """Takes and removes the snapshots of volumes on this node."""

    def _work(self) -> None:
        for snapshot in list(self._cluster.snapshots):
            volume = snapshot.claim.volume
            if not self._is_mine(snapshot.node or (volume.node if volume else "")):
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
        snapshot.id, snapshot.node = answer.response.snapshot.snapshot_id, volume.node
        snapshot.is_ready = answer.response.snapshot.ready_to_use

    def _delete(self, snapshot: Snapshot) -> None:
        request = csi.DeleteSnapshotRequest(snapshot_id=snapshot.id)
        if self._plugin.ask("DeleteSnapshot", request).reaction is Reaction.GOES_ON:
            self._backoff.succeeded(self, snapshot)
            self._cluster.snapshots.remove(snapshot)
        else:
            self._backoff.failed(self, snapshot)


class ClusterResizer(Sidecar):
    """external-resizer where the driver has ControllerExpandVolume and ControllerModifyVolume."""

    def _begin(self) -> None:
        # In its memory: claims whose error was final, and classes that volumes may be getting.
        self._failed: set[Claim] = set()
        self._uncertain: dict[Claim, str] = {}

    def _work(self) -> None:
        for claim in self._cluster.claims:
            if claim.volume is not None and not claim.is_deleted:
                self._resize(claim, claim.volume)
                self._modify(claim, claim.volume)

    def _resize(self, claim: Claim, volume: PersistentVolume) -> None:
        """Expand the volume, and then its PersistentVolume (`expand_and_recover.go`)."""
        if claim.resize is Resize.ON_NODE and claim.capacity_bytes >= volume.size_bytes:
            claim.resize = Resize.NONE
        size_bytes = self._wanted_bytes(claim, volume)
        if claim.size_bytes <= claim.capacity_bytes or not size_bytes:
            return
        has_changed = size_bytes != claim.allocated_bytes
        if not has_changed and not self._backoff.is_due(self, claim, "resize"):
            return
        claim.allocated_bytes, claim.resize = size_bytes, Resize.IN_PROGRESS
        claim.is_infeasible = False
        request = csi.ControllerExpandVolumeRequest(
            volume_id=volume.id,
            capacity_range=csi.CapacityRange(required_bytes=size_bytes),
            volume_capability=volume.capability,
        )
        answer = self._plugin.ask("ControllerExpandVolume", request)
        is_final = answer.reaction not in (Reaction.GOES_ON, Reaction.INSISTS)
        (self._failed.add if is_final else self._failed.discard)(claim)
        if answer.reaction is not Reaction.GOES_ON:
            is_infeasible = answer.reaction is Reaction.INFEASIBLE
            if is_infeasible:
                claim.resize = Resize.INFEASIBLE
            self._backoff.failed(self, claim, "resize", seconds=_SLOWLY_SECONDS * is_infeasible)
            return
        self._backoff.succeeded(self, claim, "resize")
        volume.size_bytes = answer.response.capacity_bytes
        claim.resize = Resize.ON_NODE
        if not answer.response.node_expansion_required:
            claim.capacity_bytes, claim.resize = volume.size_bytes, Resize.NONE

    def _wanted_bytes(self, claim: Claim, volume: PersistentVolume) -> int:
        """The size to ask for; 0 while kubelet has to do its part first."""
        if claim.is_infeasible:  # by kubelet: NodeResizeInfeasible
            return claim.allocated_bytes
        if claim.resize is Resize.ON_NODE:
            return 0 if volume.size_bytes >= claim.allocated_bytes else claim.allocated_bytes
        is_under_way = claim.resize is Resize.IN_PROGRESS and claim not in self._failed
        if is_under_way or (claim.resize and volume.size_bytes >= claim.size_bytes):
            return claim.allocated_bytes
        return claim.size_bytes

    def _modify(self, claim: Claim, volume: PersistentVolume) -> None:
        """Give a volume the parameters of its VolumeAttributesClass (`modify_volume.go`).

        What may be on its way is finished first, whatever the claim asks for by then.
        """
        wanted = self._uncertain.get(claim, claim.attributes_class)
        if wanted == claim.current_attributes_class and claim not in self._uncertain:
            return
        if not self._backoff.is_due(self, claim, "modify", wanted):
            return
        request = csi.ControllerModifyVolumeRequest(
            volume_id=volume.id, mutable_parameters=self._cluster.attributes_classes[wanted]
        )
        reaction = self._plugin.ask("ControllerModifyVolume", request).reaction
        self._uncertain.pop(claim, None)
        if reaction is Reaction.GOES_ON:
            self._backoff.succeeded(self, claim, "modify", wanted)
            claim.current_attributes_class = wanted
            return
        if reaction is Reaction.PERSISTS:
            self._uncertain[claim] = wanted
        seconds = _SLOWLY_SECONDS * (reaction is Reaction.INFEASIBLE)
        self._backoff.failed(self, claim, "modify", wanted, seconds=seconds)


def _content_source(claim: Claim) -> csi.VolumeContentSource | None:
    if isinstance(claim.source, Snapshot) and claim.source.is_ready:
        return of_snapshot(claim.source.id)
    if isinstance(claim.source, Claim) and claim.source.volume is not None:
        return of_volume(claim.source.volume.id)
    return None
