"""Requests for snapshots and group snapshots, read from the wire and checked once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from agent import errors, fact
from agent.requests import checks
from agent.requests.pages import Page
from agent.requests.parameters import snapshot_parameters
from agent.requests.volumes import Topology
from lvm.layout import Reserve
from proto import csi_pb2 as csi

# What the external-snapshotter adds, also with --extra-create-metadata.
_ABOUT_SNAPSHOT = {
    "csi.storage.k8s.io/volumesnapshot/name": "snapshot",
    "csi.storage.k8s.io/volumesnapshot/namespace": fact.NAMESPACE,
    "csi.storage.k8s.io/volumesnapshotcontent/name": "content",
}
_ABOUT_GROUP_SNAPSHOT = {
    "csi.storage.k8s.io/volumegroupsnapshot/name": "groupSnapshotName",
    "csi.storage.k8s.io/volumegroupsnapshot/namespace": fact.NAMESPACE,
    "csi.storage.k8s.io/volumegroupsnapshotcontent/name": "content",
}


@dataclass(frozen=True)
class CreateSnapshot:
    """CreateSnapshot. `size` is what its area for old data gets, None: as its class says."""

    name: str
    source_id: str
    size: Reserve | None
    about: Mapping[str, str]
    topology: Topology

    @classmethod
    def from_proto(cls, wire: csi.CreateSnapshotRequest) -> Self:
        """Read and check the request."""
        checks.name("name", wire.name)
        if not wire.source_volume_id:
            raise errors.Missing("source_volume_id")
        size, about = snapshot_parameters(wire.parameters, _ABOUT_SNAPSHOT)
        topology = Topology.from_proto(wire.accessibility_requirements)
        return cls(wire.name, wire.source_volume_id, size, about, topology)


@dataclass(frozen=True)
class CreateGroupSnapshot:
    """CreateVolumeGroupSnapshot. The sources are in the order of their ids."""

    name: str
    source_ids: tuple[str, ...]
    size: Reserve | None
    about: Mapping[str, str]

    @classmethod
    def from_proto(cls, wire: csi.CreateVolumeGroupSnapshotRequest) -> Self:
        """Read and check the request."""
        checks.name("name", wire.name)
        field = "source_volume_ids"
        if not wire.source_volume_ids:
            raise errors.Missing(field)
        for index, one in enumerate(wire.source_volume_ids):
            if not one:
                raise errors.Missing(f"{field}[{index}]")
            if one in wire.source_volume_ids[:index]:
                raise errors.BadField(f"{field}[{index}]", f"{one!r} is named twice")
        size, about = snapshot_parameters(wire.parameters, _ABOUT_GROUP_SNAPSHOT)
        return cls(wire.name, tuple(sorted(wire.source_volume_ids)), size, about)


@dataclass(frozen=True)
class KnownGroupSnapshot:
    """GetVolumeGroupSnapshot and DeleteVolumeGroupSnapshot: which, and what the caller has of it.

    Which snapshots are its own is compared where there is one of that id.
    """

    id: str
    snapshot_ids: tuple[str, ...]

    @classmethod
    def from_proto(
        cls, wire: csi.GetVolumeGroupSnapshotRequest | csi.DeleteVolumeGroupSnapshotRequest
    ) -> Self:
        """Read and check the request."""
        if not wire.group_snapshot_id:
            raise errors.Missing("group_snapshot_id")
        return cls(wire.group_snapshot_id, tuple(wire.snapshot_ids))


@dataclass(frozen=True)
class GetMetadata:
    """GetMetadataAllocated, GetMetadataDelta: of what, from where on, how many ranges at once.

    `base_id` is empty where nothing is compared. An offset is compared with the snapshot's size
    where there is one of that id.
    """

    base_id: str
    snapshot_id: str
    starting_offset: int
    maximum_results: int

    @classmethod
    def from_proto(
        cls, wire: csi.GetMetadataAllocatedRequest | csi.GetMetadataDeltaRequest
    ) -> Self:
        """Read and check the request."""
        if isinstance(wire, csi.GetMetadataDeltaRequest):
            base, of = "base_snapshot_id", "target_snapshot_id"
        else:
            base, of = "", "snapshot_id"
        for field in filter(None, (base, of)):
            if not getattr(wire, field):
                raise errors.Missing(field)
        if wire.starting_offset < 0:
            raise errors.NotBeyond(wire.starting_offset)
        if wire.max_results < 0:
            raise errors.BadField("max_results", "must not be negative")
        base_id = getattr(wire, base) if base else ""
        return cls(base_id, getattr(wire, of), wire.starting_offset, wire.max_results)


@dataclass(frozen=True)
class ListSnapshots:
    """ListSnapshots: which part, and of which source or with which id, where one is named."""

    page: Page
    source_id: str
    snapshot_id: str

    @classmethod
    def from_proto(cls, wire: csi.ListSnapshotsRequest) -> Self:
        """Read and check the request."""
        return cls(Page.from_proto(wire), wire.source_volume_id, wire.snapshot_id)
