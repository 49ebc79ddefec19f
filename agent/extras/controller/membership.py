"""Who belongs to the cluster, and which nodes a volume group is of by the API server's objects.

A node belongs while its Node object exists and Carver was on it once: kubelet gave the Node the
driver's topology label, which it never removes (kubernetes, pkg/volume/csi/nodeinfomanager), a
PersistentVolume names the node, or the node enrolled at this controller. Whether the node answers,
has enrolled here or is ready is a state of a member. Nothing is kept on disk: a controller that
starts reads the same from the API server.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from agent.core import ids
from agent.core.ids import VolumeId
from agent.extras.kubernetes.objects import CONTENTS, NODES, VOLUMES, Lists, Object, Objects
from agent.extras.orphans import references

# How often the Nodes are listed; how soon for a node that enrolled and is not among them.
_NODES_SECONDS, _SOON_SECONDS = 60.0, 5.0
# How often PersistentVolumes are listed again while they may not agree with the nodes.
_VOLUMES_SECONDS = 120.0
# Age of the lists by which a node is said to be deleted.
_FRESH_SECONDS = 30.0


class Deleted(NamedTuple):
    """The topology segment of a node whose Node object is gone, and the seconds of grace left."""

    segment: str
    seconds: float


class Record:
    """What is known of volume groups beside what nodes say. Without an API server: nothing."""

    # Whether what was on a deleted node is forgotten.
    forgets = False

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        """The nodes with a Node object that PersistentVolumes of a group name."""
        return frozenset()

    def now(self) -> float:
        """A moment, for `is_newer`."""
        return 0.0

    def is_newer(self, moment: float) -> bool:
        """Whether PersistentVolumes were read since a moment."""
        return True

    def doubt(self) -> None:
        """Have PersistentVolumes read again: they may not agree with the nodes."""

    def node_of(self, identity: VolumeId) -> str:
        """The node that a volume's own PersistentVolume names; empty if there is none. Blocks.

        Raises ClusterRefused.
        """
        return ""

    def deleted(self, identity: VolumeId) -> Deleted | None:
        """Whether an id's node was deleted; None if it is not known to be. Blocks.

        Raises ClusterRefused, ClusterSilent.
        """
        return None

    def snapshots_of(self, identity: VolumeId) -> Sequence[str]:
        """The VolumeSnapshotContents that need a volume's PersistentVolume. Blocks.

        Raises ClusterSilent.
        """
        return ()


@dataclass(frozen=True)
class _Seen:
    """What the API server said last. Replaced as a whole: another thread reads it."""

    # The name of each Node, by itself and by the topology segment that follows from it.
    nodes: Mapping[str, str] = field(default_factory=dict)
    # All segments that a Node may have, by its labels too: a node can write those of its own Node,
    # so they only keep what is there from being taken for deleted.
    existing: frozenset[str] = frozenset()
    # The names of the Nodes with the driver's label.
    labelled: frozenset[str] = frozenset()
    # The segments that PersistentVolumes name, by the start of the group's UUID as ids have it.
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # Since when (seconds of the clock) there is no Node with a segment.
    missing: Mapping[str, float] = field(default_factory=dict)

    @property
    def belonging(self) -> frozenset[str]:
        """The nodes that belong by the API server's objects alone."""
        every = frozenset[str]().union(*self.named.values())
        return self.labelled | self.names(every)

    def names(self, segments: Collection[str]) -> frozenset[str]:
        """The names of the Nodes with these segments; those without a Node are left out."""
        return frozenset(self.nodes[one] for one in segments if one in self.nodes)


class ClusterRecord(Record):
    """The record of one controller, from Nodes, PersistentVolumes and enrolment."""

    def __init__(
        self,
        objects: Objects,
        lists: Lists,
        driver_name: str,
        *,
        grace_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A node is deleted for `grace_seconds` before what was on it is forgotten; None: never."""
        self._objects, self._lists, self._clock = objects, lists, clock
        self._driver_name, self._topology_key = driver_name, ids.topology_key(driver_name)
        self._grace_seconds = grace_seconds
        self.forgets = grace_seconds is not None
        # Where the nodes that enrolled serve, and when each did last (seconds of the clock).
        self._enrolled: dict[str, tuple[str, float]] = {}
        self._seen, self._belonging = _Seen(), frozenset[str]()
        self._nodes_read = self._volumes_read = float("-inf")
        self._is_doubted = self._has_stranger = False
        self._reading = threading.RLock()

    # Who belongs

    @property
    def addresses(self) -> Mapping[str, str]:
        """The members, and where each serves; an empty address for one that has not enrolled."""
        exist, enrolled = self._seen.nodes, self._enrolled
        names = self._belonging | {one for one in enrolled if exist.get(one) == one}
        return {one: enrolled[one][0] if one in enrolled else "" for one in names}

    def enrol(self, name: str, address: str) -> bool:
        """Keep where a node serves; return whether that is new. A node without a Node must wait."""
        is_new = name not in self._enrolled or self._enrolled[name][0] != address
        self._enrolled[name] = address, self._clock()
        self._has_stranger |= name not in self._seen.nodes
        return is_new

    @property
    def is_due(self) -> bool:
        """Whether something is to be read."""
        return self._nodes_are_due or self._volumes_are_due

    @property
    def _nodes_are_due(self) -> bool:
        seconds = _SOON_SECONDS if self._has_stranger else _NODES_SECONDS
        return self._clock() - self._nodes_read >= seconds

    @property
    def _volumes_are_due(self) -> bool:
        never = self._volumes_read == float("-inf")
        return never or (
            self._is_doubted and self._clock() - self._volumes_read >= _VOLUMES_SECONDS
        )

    def look(self) -> None:
        """Read what is due. Raises ClusterSilent; what was known stays."""
        with self._reading:
            if self._volumes_are_due:
                self._read_volumes()
            if self._nodes_are_due:
                self._read_nodes()

    def _read_nodes(self) -> None:
        begun = self._clock()
        self._has_stranger = False
        found = self._lists.metadata(NODES).items
        names = [str(one["metadata"]["name"]) for one in found]
        nodes = {key: one for one in names for key in (one, ids.node_segment(one))}
        existing = frozenset(references.names_of_nodes(found, self._topology_key))
        labelled = frozenset(
            str(one["metadata"]["name"])
            for one in found
            if self._topology_key in (one["metadata"].get("labels") or {})
        )
        self._take(replace(self._seen, nodes=nodes, existing=existing, labelled=labelled))
        self._nodes_read = begun
        for name, (_, seen) in list(self._enrolled.items()):
            if name not in nodes and seen < begun:
                del self._enrolled[name]

    def _read_volumes(self) -> None:
        begun = self._clock()
        self._is_doubted = False
        named: dict[str, frozenset[str]] = {}
        found = self._lists.whole(VOLUMES, "PersistentVolumeList", keep=self._place)
        for one in found.items:
            if uuid := one.get("group"):
                named[uuid] = named.get(uuid, frozenset()) | {one["segment"]}
        self._take(replace(self._seen, named=named))
        self._volumes_read = begun

    def _place(self, volume: Object) -> Mapping[str, Any]:
        """The group and the topology segment of a PersistentVolume; empty where it names none."""
        handle, segment = self._parsed(volume)
        return {} if handle is None else {"group": handle.group_uuid, "segment": segment}

    def _parsed(self, volume: Object) -> tuple[VolumeId | None, str]:
        """The id in a PersistentVolume and its topology segment; None unless it has one of each."""
        spec = volume.get("spec") or {}
        source = spec.get("csi") or {}
        handle = VolumeId.parse(str(source.get("volumeHandle")))
        segments = set(references.nodes_of(spec, self._topology_key))
        if source.get("driver") != self._driver_name or handle is None or len(segments) != 1:
            return None, ""
        return handle, segments.pop()

    def _take(self, seen: _Seen) -> None:
        """Keep what was read, and note since when segments have no Node.

        A segment that has a Node again begins anew when that is deleted, too.
        """
        wanted = frozenset(self._seen.missing).union(*seen.named.values())
        now = self._clock()
        missing = {
            one: self._seen.missing.get(one, now) for one in wanted if one not in seen.existing
        }
        self._seen = replace(seen, missing=missing)
        self._belonging = self._seen.belonging

    # Whose a group is

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        """The nodes with a Node object that PersistentVolumes of a group name."""
        return self._seen.names(self._seen.named.get(group_uuid, frozenset()))

    def now(self) -> float:
        """A moment, for `is_newer`."""
        return self._clock()

    def is_newer(self, moment: float) -> bool:
        """Whether PersistentVolumes were read since a moment."""
        return self._volumes_read >= moment

    def doubt(self) -> None:
        """Have PersistentVolumes read again with the next look that is due."""
        self._is_doubted = True

    def node_of(self, identity: VolumeId) -> str:
        """The node that a volume's own PersistentVolume names; empty if there is none. Blocks."""
        segment = self._segment_of(identity)
        return self._seen.nodes.get(segment, "")

    def _segment_of(self, identity: VolumeId) -> str:
        """The segment in a volume's own PersistentVolume, which has the volume's name; or empty."""
        name = ids.readable_name(str(identity))
        found = self._objects.find(f"{VOLUMES}/{name}", "PersistentVolume")
        handle, segment = (None, "") if found is None else self._parsed(found)
        return segment if handle == identity else ""

    # What was deleted

    def deleted(self, identity: VolumeId) -> Deleted | None:
        """Whether an id's node was deleted, by its PersistentVolume or those of its group."""
        if self._grace_seconds is None:
            return None
        own = self._segment_of(identity)
        with self._reading:
            since = self._clock() - _FRESH_SECONDS
            if not own and self._volumes_read <= since:
                self._read_volumes()
            if self._nodes_read <= since:
                self._read_nodes()
            segments = {own} if own else self._seen.named.get(identity.group_uuid, frozenset())
            if not segments or not self._seen.existing.isdisjoint(segments):
                return None
            now = self._clock()
            begun = {one: self._seen.missing.get(one, now) for one in segments}
            self._seen = replace(self._seen, missing={**self._seen.missing, **begun})
        last = max(begun, key=lambda one: (begun[one], one))
        return Deleted(last, max(0.0, begun[last] + self._grace_seconds - now))

    def snapshots_of(self, identity: VolumeId) -> Sequence[str]:
        """The names of the VolumeSnapshotContents of a volume.

        Also those that were not made by a VolumeSnapshot, if they are in the volume's group: which
        volume they are of is not known.
        """
        found = self._lists.whole(CONTENTS, "VolumeSnapshotContentList", if_served=True)
        return sorted(
            str(one["metadata"]["name"]) for one in found.items if self._needs(one, identity)
        )

    def _needs(self, content: Object, identity: VolumeId) -> bool:
        spec = content.get("spec") or {}
        if spec.get("driver") != self._driver_name:
            return False
        source = spec.get("source") or {}
        if of_volume := source.get("volumeHandle"):
            return bool(of_volume == str(identity))
        snapshot = VolumeId.parse(str(source.get("snapshotHandle")))
        return snapshot is not None and snapshot.group_uuid == identity.group_uuid
