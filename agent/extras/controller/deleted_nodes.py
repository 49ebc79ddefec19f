"""Volumes of nodes that the administrator deleted: their disks are gone, and so are they.

With `forget_deleted_nodes` DeleteVolume and DeleteSnapshot of such a volume are OK, after a grace,
so that the cluster can forget it. The proof: a PersistentVolume of the same volume group names the
node, and the API server says that there is no such Node. Should the node come back, what is on it
are orphans: reported, never served, and erased on request.
"""

import time
from collections.abc import Mapping
from typing import Any

from agent.core import ids
from agent.core.ids import VolumeId
from agent.extras.kubernetes.objects import Lists, Objects
from agent.extras.orphans import references

_VOLUMES = "/api/v1/persistentvolumes"
_NODES = "/api/v1/nodes"
# A list of nodes that is younger is not asked for again.
_LIST_SECONDS = 30.0


class DeletedNodes:
    """Says of which node a volume group was, if that node was deleted."""

    def __init__(
        self, objects: Objects, lists: Lists, driver_name: str, grace_seconds: float
    ) -> None:
        self._objects, self._lists = objects, lists
        self._driver_name, self._topology_key = driver_name, f"topology.{driver_name}/node"
        self._grace_seconds = grace_seconds
        # The topology segment of the node that has or had a group, by the group's UUID in ids.
        self._segments: dict[str, str] = {}
        # Since when a node is known to be deleted (monotonic, seconds), by its segment.
        self._since: dict[str, float] = {}
        self._nodes: frozenset[str] = frozenset()
        self._listed = float("-inf")

    def of(self, identity: VolumeId) -> tuple[str, float] | None:
        """The deleted node that had an id's group, and the seconds of its grace that are left.

        None if its node is not known to be deleted. Raises ClusterRefused, ClusterSilent.
        """
        segment = self._segment_of(identity)
        if segment is None:
            return None
        now = time.monotonic()
        if now - self._listed >= _LIST_SECONDS:
            found = self._lists.whole(_NODES, "NodeList").items
            self._nodes = frozenset(references.names_of_nodes(found, self._topology_key))
            self._listed = now
        if segment in self._nodes:
            self._since.pop(segment, None)
            return None
        since = self._since.setdefault(segment, now)
        return segment, max(0.0, since + self._grace_seconds - now)

    def _segment_of(self, identity: VolumeId) -> str | None:
        """The segment of the node that has a group, by a PersistentVolume in it."""
        if identity.group_uuid not in self._segments:
            # The provisioner names a PersistentVolume as its volume.
            name = ids.readable_name(str(identity))
            one = self._objects.find(f"{_VOLUMES}/{name}", "PersistentVolume")
            if one is None or not self._learn(one, identity.group_uuid):
                for one in self._lists.whole(_VOLUMES, "PersistentVolumeList").items:
                    self._learn(one, identity.group_uuid)
        return self._segments.get(identity.group_uuid)

    def _learn(self, volume: Mapping[str, Any], group_uuid: str) -> bool:
        """Learn from a PersistentVolume where the group is, if it is in that group."""
        source = volume.get("spec", {}).get("csi") or {}
        handle = VolumeId.parse(str(source.get("volumeHandle")))
        if source.get("driver") != self._driver_name or handle is None:
            return False
        if handle.group_uuid != group_uuid:
            return False
        nodes = set(references.nodes_of(volume["spec"], self._topology_key))
        if len(nodes) != 1:
            return False
        [self._segments[group_uuid]] = nodes
        return True
