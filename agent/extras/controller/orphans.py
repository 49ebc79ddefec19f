"""Orphans of the whole cluster: volumes that nothing refers to, and objects of nodes that are gone.

The volumes are those that the controller lists over its own socket. What only a node's kernel or
LVM tells stays with `carver orphans` there: directories, inline volumes, what is half-made.
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
from proto import csi_pb2 as csi
from proto.carver_pb2_grpc import ClusterStub

_DELETE = "carver controller orphans --delete {name} --yes"


class _Listed(NamedTuple):
    """What is kept of a volume in a list: a node may say kilobytes more of each."""

    volume_id: str
    capacity_bytes: int
    where: str

    @classmethod
    def of(cls, volume: csi.Volume) -> Self:
        places = (each.segments.values() for each in volume.accessible_topology)
        where = ", ".join(value for each in places for value in each)
        return cls(volume.volume_id, volume.capacity_bytes, where)


class ClusterFinder:
    """Finds orphans by the controller's socket and the cluster that the configuration names."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._history = History(config.endpoint.parent / "orphans.json")

    def look(self) -> Sequence[Orphan]:
        """Return all candidates, the sure ones first.

        Raises ClusterSilent where a list is not whole or a node does not answer, BadConfig,
        NotReady; nothing is recorded then.
        """
        config = self._config
        # Before the cluster's objects: what refers to a volume is made after it.
        volumes, taken, node_ids = self._listed()
        wanted = references.read(
            Lists(access.find(config.kubeconfig, os.environ)),
            config.driver_name,
            config.topology_key,
            node_ids,
        )
        found = [*_of_volumes(volumes, taken, wanted), *candidates.of_objects(wanted)]
        return judged(found, self._history, wanted, config.orphan_grace_seconds)

    def _listed(self) -> tuple[Iterable[_Listed], Counter[str], Sequence[str]]:
        """All volumes, how many snapshots each has, and all nodes that may have had them."""
        try:
            with Client(self._config.endpoint) as caller:
                # A group that moves from node to node while pages are read is in two of them.
                volumes = {one.volume_id: _Listed.of(one) for one in caller.every_volume()}
                taken = Counter(one.source_volume_id for one in caller.every_snapshot())
                # Afterwards: also a node that joined meanwhile must be of this cluster.
                nodes = [one.name for one in caller.stub(ClusterStub).Nodes(Empty()).nodes]
        except grpc.RpcError as error:
            problem = f"{error.details()} ({error.code().name})"
            raise errors.ClusterSilent("the nodes' volumes", problem) from None
        if not nodes:
            raise errors.ClusterSilent("the nodes' volumes", "the controller knows no node")
        return volumes.values(), taken, nodes


def _of_volumes(
    volumes: Iterable[_Listed], taken: Counter[str], wanted: References
) -> Iterator[Candidate]:
    """Find the volumes that nothing in the cluster refers to.

    A list has no LVM UUIDs: a volume that was made again under its name is taken for the first.
    """
    # Of a long name only the digest is in the id.
    spoken_for = {names.logical_volume(ids.VOLUME_PREFIX, one) for one in wanted.spoken_for}
    for one in volumes:
        parsed = VolumeId.parse(one.volume_id)
        if parsed is None or parsed.name in spoken_for or wanted.names(parsed.name):
            continue
        about = f"{one.capacity_bytes} bytes on {one.where}"
        if count := taken[one.volume_id]:
            about += f", with {count} snapshots, which must be deleted first"
        handle = one.volume_id
        yield Candidate(Kind.VOLUME, handle, "", about, handle, remedy=_DELETE)
