"""Orphans of the whole cluster: volumes that nothing refers to, and objects of deleted nodes.

The volumes are those that the controller lists over its own socket. Directories, inline volumes and
unfinished volumes are known only to a node's kernel or LVM. `carver orphans` on the node finds
orphans among these.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import grpc
from google.protobuf.empty_pb2 import Empty

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.csi.client import Client
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import Lists
from agent.extras.orphans import candidates, references
from agent.extras.orphans.candidates import Candidate, Kind
from agent.extras.orphans.look import History, Orphan, judged
from agent.extras.orphans.references import References
from agent.settings.settings import Config
from lvm import names
from mount.text import counted
from proto import csi_pb2 as csi
from proto.carver_pb2_grpc import ClusterStub

# Command, as shown to users, that deletes an orphaned volume.
_DELETE = "carver controller orphans --delete {name} --yes"


class _Listed(NamedTuple):
    """The fields that are kept of each listed volume, as a node may send kilobytes more."""

    volume_id: str
    capacity_bytes: int
    # The topology segments of the volume's node.
    where: str

    @classmethod
    def of(cls, volume: csi.Volume) -> Self:
        places = (topology.segments.values() for topology in volume.accessible_topology)
        where = ", ".join(value for segments in places for value in segments)
        return cls(volume.volume_id, volume.capacity_bytes, where)


class ClusterFinder:
    """Searches for orphans in the lists of the controller's socket and of the API server."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._history = History(config.endpoint.parent / "orphans.json")

    def search(self) -> Sequence[Orphan]:
        """Search the cluster for orphans once, write them to a history file, and return them.

        Orphans that every search has found for the grace period come first.

        Raises ClusterSilent if a list is incomplete or a node does not answer, BadConfig if the
        settings lead to no API server, NotReady if the file cannot be used. After an error nothing
        is recorded.
        """
        config = self._config
        # List the volumes before the cluster's objects: an object that refers to a volume is made
        # after the volume, so it is in the later list.
        volumes, snapshot_counts, node_ids = self._listed()
        cluster_references = references.read(
            Lists(access.find(config.kubeconfig, os.environ)),
            config.driver_name,
            config.topology_key,
            node_ids,
        )
        orphans = [
            *_of_volumes(volumes, snapshot_counts, cluster_references),
            *candidates.find_objects(cluster_references),
        ]
        return judged(orphans, self._history, cluster_references, config.orphan_grace_seconds)

    def _listed(self) -> tuple[Iterable[_Listed], Counter[str], Sequence[str]]:
        """Return all volumes, the number of each volume's snapshots by its id, and all node names.

        Raises ClusterSilent if the controller does not answer or knows no node.
        """
        try:
            with Client(self._config.endpoint) as client:
                # Collect the volumes by their ids: if a volume group moves to another node between
                # two pages of the list, its volumes are in both pages.
                volumes = {volume.volume_id: _Listed.of(volume) for volume in client.every_volume()}
                snapshot_counts = Counter(
                    snapshot.source_volume_id for snapshot in client.every_snapshot()
                )
                # List the nodes after the volumes, so that a node that joined meanwhile is checked,
                # too: each node must be of the cluster whose objects are read.
                nodes = [node.name for node in client.stub(ClusterStub).Nodes(Empty()).nodes]
        except grpc.RpcError as error:
            problem = f"{error.details()} ({error.code().name})"
            raise errors.ClusterSilent("the nodes' volumes", problem) from None
        if not nodes:
            raise errors.ClusterSilent("the nodes' volumes", "the controller knows no node")
        return volumes.values(), snapshot_counts, nodes


def _of_volumes(
    volumes: Iterable[_Listed], snapshot_counts: Counter[str], cluster_references: References
) -> Iterator[Candidate]:
    """Yield the volumes that no object in the cluster refers to.

    The controller's list has no LVM UUIDs. So a volume that was deleted and made again under the
    same name counts as the same volume.
    """
    # Compare the names of logical volumes: an id has only the digest of a long name.
    names_in_use = {
        names.logical_volume(ids.VOLUME_PREFIX, name) for name in cluster_references.names_in_use
    }
    for volume in volumes:
        parsed = VolumeId.parse(volume.volume_id)
        if parsed is None or parsed.name in names_in_use or cluster_references.names(parsed.name):
            continue
        description = f"{volume.capacity_bytes} bytes on {volume.where}"
        if count := snapshot_counts[volume.volume_id]:
            description += f", with {counted(count, 'snapshot')} to be deleted first"
        handle = volume.volume_id
        yield Candidate(Kind.VOLUME, handle, "", description, handle, remedy=_DELETE)
