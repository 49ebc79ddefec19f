"""The members of the cluster, and the nodes of each volume group, by the API server's objects.

A node is a member of the cluster while its Node object exists, if Carver was ever on the node. Any
of these facts proves that Carver was on the node:

- Kubelet gave the Node the driver's topology label, which kubelet never removes (kubernetes,
  pkg/volume/csi/nodeinfomanager).
- The node affinity of a PersistentVolume of the driver names the node.
- The node enrolled at this controller.

A node that does not answer, has not enrolled at this controller, or is not ready stays a member.
Nothing is kept on disk: a controller that starts reads the same objects from the API server.

A *segment* is the value of the driver's topology label, which follows from a node's name
(`ids.node_segment`). A PersistentVolume *names* a node if its node affinity has the node's segment.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.extras.controller.questions import SharedReading
from agent.extras.kubernetes.objects import (
    CONTENTS,
    GROUP_CONTENTS,
    VOLUMES,
    Keep,
    Lists,
    Object,
    Objects,
    find_named,
)
from agent.extras.orphans import references
from lvm import names

# Prefixes of names that external-snapshotter makes. The name of a snapshot in CSI, and that of a
# VolumeSnapshotContent, end with the UID of the VolumeSnapshot; the name of a group snapshot in CSI
# ends with the UID of the VolumeGroupSnapshot. Source: external-snapshotter, pkg/utils,
# GetDynamicSnapshotContentNameForSnapshot, and the defaults of its flags --snapshot-name-prefix and
# --groupsnapshot-name-prefix.
_SNAPSHOT, _CONTENT, _GROUP_SNAPSHOT = "snapshot-", "snapcontent-", "groupsnapshot-"
# Prefixes, in ids, of the names of snapshots and of group snapshots.
_TAKEN = (ids.SNAPSHOT_PREFIX, ids.GROUP_SNAPSHOT_PREFIX)
# Seconds between two lists of the Nodes: usually; and while a node has enrolled whose Node object
# is not in the last list.
_NODES_SECONDS, _SOON_SECONDS = 60.0, 5.0
# Seconds between two lists of the Nodes while the grace period of a deleted Node lasts. In this
# time the Node may come back.
_GRACE_INTERVAL_SECONDS = 15.0
# Seconds between two lists of PersistentVolumes: while the last list may not agree with the nodes'
# reports; and while a node's claim to a volume group waits for the next list. In no other case are
# PersistentVolumes listed periodically.
_VOLUMES_SECONDS, _CLAIM_SECONDS = 120.0, 20.0
# Maximum age, in seconds, of the list of Nodes that proves that a node was deleted, while its grace
# period lasts; and of the list of PersistentVolumes that proves that a volume has none. The age of
# the list of PersistentVolumes counts from the end of the read, as the read may take longer than
# this.
_FRESH_SECONDS = 30.0


class WrongSource(errors.AgentError):
    """Error: a VolumeSnapshotContent, or that of a group, names a source that is no volume."""

    def __init__(self, kind: str, name: str, source: VolumeId) -> None:
        super().__init__(
            f"{kind} {name} names {source} as the source of a snapshot, which is no volume: the"
            " node of that snapshot is not known by it. Its source must be the volume's id"
        )


class Deleted(NamedTuple):
    """A node whose Node object was deleted.

    `segment` is the node's topology segment. `seconds` is the rest of the grace period after which
    the node's volumes count as deleted; 0 if the grace period is over.
    """

    segment: str
    seconds: float


class Serving(NamedTuple):
    """The address of a member of the cluster, and the UID of its Node object.

    The address is empty for a member that has not enrolled with that Node object. The UID is empty
    without an API server.
    """

    address: str
    uid: str = ""


class Record:
    """What the API server says about members and volume groups.

    This class is for a controller without an API server, and knows nothing. Its subclass
    ClusterRecord is for a controller in a cluster.
    """

    # Whether the volumes of a node that was deleted count as deleted, too.
    forgets = False

    @property
    def members(self) -> frozenset[str]:
        """The names of all members of the cluster, also of those that have not answered yet."""
        return frozenset()

    @property
    def named(self) -> frozenset[str]:
        """The names of the Nodes in the node affinity of any PersistentVolume of the driver."""
        return frozenset()

    @property
    def segments(self) -> frozenset[str]:
        """All names and topology segments that the Nodes have, as last read.

        A Node's labels count, too. Empty if the Nodes were never read.
        """
        return frozenset()

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        """The names of the Nodes in the node affinity of a volume group's PersistentVolumes."""
        return frozenset()

    def names_deleted(self, group_uuid: str) -> bool:
        """Return whether a PersistentVolume of a volume group names a node with no Node object."""
        return False

    def names_another(self, identity: VolumeId, node: str) -> bool:
        """Return whether a volume's PersistentVolume, as last read, named another node than `node`.

        The result is always False for a volume group for which PersistentVolumes name a single
        node, unless the PersistentVolume was renamed; and if the other node has no Node object.
        """
        return False

    def now(self) -> float:
        """The present time on this Record's clock, for `is_newer`."""
        return 0.0

    def is_newer(self, moment: float) -> bool:
        """Return whether the last read of PersistentVolumes began at `moment` or later."""
        return True

    def doubt(self) -> None:
        """Request another read of PersistentVolumes: they may not agree with the nodes' reports."""

    def request_early_refresh(self) -> None:
        """Request an early read of PersistentVolumes, for which a claim to a volume group waits."""

    # In the next three methods, `call_start` is the time (`now`) at which the CSI call began. What
    # was read since that time for another call is used again.

    def node_of(self, identity: VolumeId, call_start: float) -> str | None:
        """The name of the node that the PersistentVolume of a volume names.

        For the id of a snapshot or group snapshot, the PersistentVolumes of its source volumes
        count. None if there is no such PersistentVolume, or if those of a group snapshot name
        several nodes. The name is empty if the node has no Node object.

        Waits for the API server. Raises ClusterRefused, ClusterSilent if the API server refuses or
        does not answer; WrongSource if the source of the snapshot is no volume.
        """
        return None

    def deleted(self, identity: VolumeId, call_start: float) -> Deleted | None:
        """The node of a volume or snapshot, if that node was deleted; otherwise None.

        If the grace period is over in the result, the Nodes were read after the call began. Waits
        for the API server. Raises what `node_of` raises.
        """
        return None

    def snapshots_of(self, identity: VolumeId, call_start: float) -> Sequence[str]:
        """The names of the VolumeSnapshotContents that need a volume's PersistentVolume.

        Waits for the API server. Raises ClusterSilent if the API server refuses or does not answer.
        """
        return ()


class _Enrolled(NamedTuple):
    """The last enrolment of a node: the node's address, the UID of the Node object, and the time.

    The node's token proved the UID. The time, `seen`, is on the Record's clock.
    """

    address: str
    uid: str
    seen: float


class _Change:
    """A marker of a change of the enrolments. Each marker is equal to itself only."""


@dataclass(frozen=True, eq=False)
class _Reading:
    """The Nodes and PersistentVolumes as last read, with what follows from them.

    Objects of this class are replaced and never changed, so all threads may read them. Each object
    is equal to itself only.
    """

    # The UID of each Node, by the Node's name.
    uids: Mapping[str, str] = field(default_factory=dict)
    # The name of each Node, by the topology segment that follows from the name.
    nodes: Mapping[str, str] = field(default_factory=dict)
    # All topology segments that a Node may have, by its name or by its labels. A node can write the
    # labels of its own Node, so labels only keep a node from counting as deleted.
    existing: frozenset[str] = frozenset()
    # The names of the Nodes that have the driver's topology label.
    labelled: frozenset[str] = frozenset()
    # The topology segments in the PersistentVolumes of each volume group, by the start of the
    # group's UUID as in volume ids.
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # The name of the PersistentVolume of a volume, and the topology segment in it, by the volume's
    # id. Kept only for volume groups whose PersistentVolumes have several segments, and for
    # PersistentVolumes whose name does not follow from the volume's.
    placed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # When each topology segment that PersistentVolumes name was first seen without a Node, by the
    # segment: seconds on the clock of ClusterRecord (monotonic).
    missing: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def every_named(self) -> frozenset[str]:
        """The names of the Nodes in the node affinity of any PersistentVolume of the driver."""
        return self.names(frozenset[str]().union(*self.named.values()))

    def names(self, segments: Collection[str]) -> frozenset[str]:
        """The names of the Nodes with these topology segments; fewer if a segment has no Node."""
        return frozenset(self.nodes[segment] for segment in segments if segment in self.nodes)

    def has(self, enrolled: _Enrolled, name: str) -> bool:
        """Return whether a node enrolled with the Node object that now has this name.

        False if the node enrolled with an earlier Node object of the same name.
        """
        uid = self.uids.get(name, "")
        return bool(uid) and enrolled.uid == uid


class ClusterRecord(Record):
    """The Record of a controller in a cluster, from Nodes, PersistentVolumes and enrolments."""

    def __init__(
        self,
        objects: Objects,
        lists: Lists,
        driver_name: str,
        *,
        grace_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the API server's clients, and the grace period, in seconds, of deleted nodes.

        When a node's Node object has been deleted for the grace period, its volumes count as
        deleted, too. Without a grace period (None), they never do.
        """
        self._objects, self._lists, self._clock = objects, lists, clock
        self._driver_name, self._topology_key = driver_name, ids.topology_key(driver_name)
        self._grace_seconds = grace_seconds
        self.forgets = grace_seconds is not None
        self._enrolled: dict[str, _Enrolled] = {}
        # A marker of the present enrolments, replaced when they change; and a cache of the members'
        # names, with the objects read and the marker from which the names follow.
        self._change = _Change()
        self._members: tuple[tuple[_Reading, _Change] | None, frozenset[str]] = None, frozenset()
        self._last_reading = _Reading()
        # When the last read of the Nodes began, when that of the PersistentVolumes began, and when
        # it ended.
        self._nodes_read = self._volumes_read = self._volumes_ended = float("-inf")
        # When each reason to read Nodes or PersistentVolumes again was last found. The reasons are:
        # PersistentVolumes may not agree with the nodes' reports; a claim to a volume group waits
        # for a read of PersistentVolumes; a node enrolled whose Node object was not read yet. A
        # read that began later and succeeded removes the reason.
        self._doubted = self._claimed = self._strange = float("-inf")
        self._read_lock = threading.RLock()
        self._contents = SharedReading(self._read_contents, self.now)
        self._group_contents = SharedReading(self._read_group_contents, self.now)

    # Methods about the members of the cluster

    @property
    def serving(self) -> Mapping[str, Serving]:
        """The members of the cluster by name, each with its address and the UID of its Node.

        The address of a node that enrolled with an earlier Node object is never returned with the
        UID of the present one, also if another thread reads the Nodes meanwhile.
        """
        reading, addresses = self._read_members()
        return {
            name: Serving(addresses.get(name, ""), reading.uids.get(name, ""))
            for name in reading.labelled.union(reading.every_named, addresses)
        }

    @property
    def members(self) -> frozenset[str]:
        """The names of all members of the cluster.

        The same object is returned until Nodes or PersistentVolumes are read again, or the
        enrolments change: the class `Nodes` notices a change by the object's identity.
        """
        cache_key = self._last_reading, self._change
        if (cached := self._members)[0] != cache_key:
            reading, addresses = self._read_members()
            self._members = cached = (
                cache_key,
                reading.labelled.union(reading.every_named, addresses),
            )
        return cached[1]

    def _read_members(self) -> tuple[_Reading, Mapping[str, str]]:
        """Return the Nodes and PersistentVolumes as last read, and the addresses of enrolled nodes.

        The addresses are by the Nodes' names. Only nodes that enrolled with their present Node
        object have one.
        """
        reading, enrolments = self._last_reading, dict(self._enrolled)
        return reading, {
            name: enrolment.address
            for name, enrolment in enrolments.items()
            if reading.has(enrolment, name)
        }

    @property
    def named(self) -> frozenset[str]:
        """The names of the Nodes in the node affinity of any PersistentVolume of the driver."""
        return self._last_reading.every_named

    @property
    def segments(self) -> frozenset[str]:
        """All names and topology segments that the Nodes have, as last read."""
        return self._last_reading.existing

    def uid_of(self, name: str) -> str:
        """The UID of the Node of that name, as last read; empty if there was none."""
        return self._last_reading.uids.get(name, "")

    def enrol(self, name: str, address: str, uid: str) -> None:
        """Keep the address of a node whose token proved the UID of its Node object.

        The address counts once a Node of that name and UID was read. If the Nodes as last read do
        not have that Node, another read of the Nodes is requested.
        """
        old_enrolment, now = self._enrolled.get(name), self._clock()
        self._enrolled[name] = _Enrolled(address, uid, now)
        if old_enrolment is None or old_enrolment.uid != uid:
            self._change = _Change()
        if self.uid_of(name) != uid:
            self._strange = now

    @property
    def is_due(self) -> bool:
        """Whether it is time to read Nodes or PersistentVolumes again."""
        return self._nodes_are_due or self._volumes_are_due

    @property
    def _nodes_are_due(self) -> bool:
        now, seconds = self._clock(), _NODES_SECONDS
        if self._strange >= self._nodes_read:
            seconds = _SOON_SECONDS
        elif any(
            now - since < (self._grace_seconds or 0)
            for since in self._last_reading.missing.values()
        ):
            seconds = _GRACE_INTERVAL_SECONDS
        return now - self._nodes_read >= seconds

    @property
    def _volumes_are_due(self) -> bool:
        last_read = self._volumes_read
        seconds = min(
            _VOLUMES_SECONDS if self._doubted >= last_read else float("inf"),
            _CLAIM_SECONDS if self._claimed >= last_read else float("inf"),
        )
        return self._clock() - last_read >= seconds

    def look(self) -> None:
        """Read Nodes and PersistentVolumes, each if it is due.

        Waits for the API server. Raises ClusterSilent if the API server refuses or does not answer;
        what was last read then stays in use, and so do the reasons for another read.
        """
        with self._read_lock:
            try:
                if self._volumes_are_due:
                    self._read_volumes()
            finally:
                if self._nodes_are_due:
                    self._read_nodes()

    def _read_nodes(self) -> None:
        read_start = self._clock()
        items = self._lists.nodes().items
        every_metadata = [metadata["metadata"] for metadata in items]
        uids = {
            str(metadata["name"]): str(metadata.get("uid") or "") for metadata in every_metadata
        }
        nodes = {ids.node_segment(name): name for name in uids}
        existing = frozenset(references.names_of_nodes(items, self._topology_key))
        labelled = frozenset(
            str(node["metadata"]["name"])
            for node in items
            if self._topology_key in (node["metadata"].get("labels") or {})
        )
        self._nodes_read = read_start
        self._take(
            replace(
                self._last_reading, uids=uids, nodes=nodes, existing=existing, labelled=labelled
            )
        )
        for name, enrolment in list(self._enrolled.items()):
            # Drop the enrolment of a Node that was deleted, also if a Node of that name was made
            # again: that one is another machine, which enrols itself.
            if uids.get(name) != enrolment.uid and enrolment.seen < read_start:
                del self._enrolled[name]
                self._change = _Change()

    def _read_volumes(self) -> None:
        read_start = self._clock()
        named_segments: dict[str, frozenset[str]] = {}
        listing = self._lists.whole(VOLUMES, "PersistentVolumeList", keep=self._place)
        volumes = [volume for volume in listing.items if volume]
        for volume in volumes:
            uuid = volume["id"].group_uuid
            named_segments[uuid] = named_segments.get(uuid, frozenset()) | {volume["segment"]}
        placed = {
            str(volume["id"]): (volume["name"], volume["segment"])
            for volume in volumes
            if volume["is_renamed"] or len(named_segments[volume["id"].group_uuid]) > 1
        }
        # Forget since when a topology segment has no Node, if no PersistentVolume has that segment
        # any more.
        all_named = frozenset[str]().union(*named_segments.values())
        missing = {
            segment: since
            for segment, since in self._last_reading.missing.items()
            if segment in all_named
        }
        self._take(
            replace(self._last_reading, named=named_segments, placed=placed, missing=missing)
        )
        self._volumes_read, self._volumes_ended = read_start, self._clock()

    def _place(self, volume: Object) -> Mapping[str, Any]:
        """Return what is kept in memory of a PersistentVolume: volume id, segment and name.

        The result also has whether the PersistentVolume was renamed, so that `_segment_of_volume`
        cannot find it by the name that follows from the volume's. The result is empty if the
        PersistentVolume is of another driver, or has not exactly one topology segment.
        """
        handle, segment = self._parsed(volume)
        if handle is None:
            return {}
        name = str((volume.get("metadata") or {}).get("name"))
        is_renamed = name != ids.readable_name(str(handle))
        return {"id": handle, "segment": segment, "name": name, "is_renamed": is_renamed}

    def _parsed(self, volume: Object) -> tuple[VolumeId | None, str]:
        """Return the volume id and the topology segment in a PersistentVolume.

        The id is None if the PersistentVolume is of another driver, has no valid volume id, or has
        not exactly one topology segment.
        """
        spec = volume.get("spec") or {}
        source = spec.get("csi") or {}
        handle = VolumeId.parse(str(source.get("volumeHandle")))
        segments = set(references.nodes_of(spec, self._topology_key))
        if source.get("driver") != self._driver_name or handle is None or len(segments) != 1:
            return None, ""
        return handle, segments.pop()

    def _take(self, reading: _Reading) -> None:
        """Keep the objects that were read, and since when each topology segment has had no Node.

        If a segment has a Node again, the time without a Node begins anew when that Node is
        deleted.
        """
        missing: Mapping[str, float] = {}
        if self._nodes_read > float("-inf"):
            # Look for topology segments without a Node only if the Nodes were read before:
            # otherwise each segment would seem to be without one.
            segments, now = frozenset(reading.missing).union(*reading.named.values()), self._clock()
            missing = {
                segment: reading.missing.get(segment, now)
                for segment in segments
                if segment not in reading.existing
            }
        self._last_reading = replace(reading, missing=missing)

    # Methods about the nodes of a volume group

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        """The names of the Nodes in the node affinity of a volume group's PersistentVolumes."""
        return self._last_reading.names(self._last_reading.named.get(group_uuid, frozenset()))

    def names_deleted(self, group_uuid: str) -> bool:
        """Return whether a PersistentVolume of a volume group names a node with no Node object."""
        return not self._last_reading.nodes.keys() >= self._last_reading.named.get(
            group_uuid, frozenset()
        )

    def names_another(self, identity: VolumeId, node: str) -> bool:
        """Return whether a volume's PersistentVolume, as last read, named another node than `node`.

        The result is always False for a volume group for which PersistentVolumes name a single
        node, unless the PersistentVolume was renamed; and if the other node has no Node object.
        """
        _, segment = self._last_reading.placed.get(str(identity), ("", ""))
        return self._last_reading.nodes.get(segment, node) != node

    def now(self) -> float:
        """The present time on this Record's clock, for `is_newer`."""
        return self._clock()

    def is_newer(self, moment: float) -> bool:
        """Return whether the last read of PersistentVolumes began at `moment` or later."""
        return self._volumes_read >= moment

    def doubt(self) -> None:
        """Request another read of PersistentVolumes, two minutes after the last read or later."""
        self._doubted = self._clock()

    def request_early_refresh(self) -> None:
        """Request another read of PersistentVolumes, 20 seconds after the last read or later."""
        self._claimed = self._clock()

    def node_of(self, identity: VolumeId, call_start: float) -> str | None:
        """The name of the node that the PersistentVolume of a volume names.

        None without such a PersistentVolume; empty if that node has no Node object.
        """
        segment = self._segment_of(identity, call_start)
        return self._last_reading.nodes.get(segment, "") if segment else None

    def _segment_of(self, identity: VolumeId, call_start: float) -> str:
        """The topology segment in the PersistentVolume of a volume, or of a snapshot's source.

        Empty without a PersistentVolume, or if the PersistentVolumes of a group snapshot's source
        volumes have several segments.
        """
        if not any(names.is_of(prefix, identity.name) for prefix in _TAKEN):
            return self._segment_of_volume(identity)
        sources = dict.fromkeys(self._sources_of(identity, call_start))
        segments = {self._segment_of_volume(source) for source in sources} - {""}
        return segments.pop() if len(segments) == 1 else ""

    def _segment_of_volume(self, identity: VolumeId) -> str:
        """The topology segment in the PersistentVolume of a volume; empty if the volume has none.

        1. Read the PersistentVolume whose name follows from the volume's name.
        2. If there is none, or it is of another volume, search the list of PersistentVolumes, as a
           PersistentVolume may have any name. The list is read again if it is older than 30 s.
        3. Read the PersistentVolume that was found in the list. If it has another segment than in
           the list, read the list again.
        """
        if segment := self._segment_by(ids.readable_name(str(identity)), identity):
            return segment
        with self._read_lock:
            if self._volumes_ended <= self._clock() - _FRESH_SECONDS:
                self._read_volumes()
            name, segment = self._last_reading.placed.get(str(identity), ("", ""))
        # Read the PersistentVolume that was found in the list: it may have been replaced since the
        # list was read. Read it without the lock, for which calls about other volume groups and the
        # read of the Nodes wait.
        if name and self._segment_by(name, identity) != segment:
            differed_at = self._clock()
            with self._read_lock:
                if self._volumes_read <= differed_at:
                    self._read_volumes()
                _, segment = self._last_reading.placed.get(str(identity), ("", ""))
        return segment

    def _segment_by(self, name: str, identity: VolumeId) -> str:
        """The topology segment in the PersistentVolume of that name.

        Empty if there is no PersistentVolume of that name, or if it is of another volume.
        """
        volume = find_named(self._objects, VOLUMES, name, "PersistentVolume")
        handle, segment = (None, "") if volume is None else self._parsed(volume)
        return segment if handle == identity else ""

    def _sources_of(self, identity: VolumeId, call_start: float) -> Sequence[VolumeId]:
        """The source volumes of a snapshot or group snapshot; empty if it was imported.

        Only volumes in the volume group of the snapshot's id count. Raises WrongSource if the
        content of the snapshot names a source that is no volume, such as another snapshot.
        """
        if source := self._source_of(identity):
            return [source]
        return self._sources_in_group(identity, call_start)

    def _sources_in_group(self, identity: VolumeId, call_start: float) -> Sequence[VolumeId]:
        """The source volumes of a group snapshot, or the source volume of one of its snapshots.

        The volumes are found in the driver's VolumeGroupSnapshotContents; empty if none has them.
        The id of each snapshot in a group snapshot follows from the group snapshot's name and the
        volume's id. So a content is believed only about snapshots of the group snapshot that it
        stands for.
        """
        for content in self._group_contents.since(call_start):
            if sources := self._sources_by(content, identity):
                return sources
        return []

    def _read_group_contents(self) -> Sequence[Object]:
        """Read the driver's VolumeGroupSnapshotContents; keep of each what `_own_content` returns.

        Empty without the right to list them. Raises ClusterSilent if the API server does not
        answer.
        """
        kind = "VolumeGroupSnapshotContentList"
        contents = self._listed(GROUP_CONTENTS, kind, keep=self._own_content)
        return [content for content in contents if content]

    def _read_contents(self) -> Sequence[Object]:
        """Read the driver's VolumeSnapshotContents; keep of each what `_own_content` returns.

        Empty if the cluster does not serve them. Raises ClusterSilent if the API server does not
        answer, or if this account has no right to list them.
        """
        kind = "VolumeSnapshotContentList"
        listing = self._lists.whole(CONTENTS, kind, if_served=True, keep=self._own_content)
        return [content for content in listing.items if content]

    def _own_content(self, content: Object) -> Object:
        """Return what is kept in memory of a VolumeSnapshotContent or VolumeGroupSnapshotContent.

        The result is empty for another driver's content. Otherwise it has the content's name, its
        source, and the UID of the VolumeGroupSnapshot, if any.
        """
        spec = content.get("spec") or {}
        if spec.get("driver") != self._driver_name:
            return {}
        uid = (spec.get("volumeGroupSnapshotRef") or {}).get("uid")
        name = (content.get("metadata") or {}).get("name")
        return {"name": str(name), "source": spec.get("source") or {}, "uid": uid}

    def _listed(
        self, path: str, kind: str, *, keep: Keep = lambda item: item, **query: str
    ) -> Sequence[Object]:
        """Read a list of VolumeSnapshotContents or VolumeGroupSnapshotContents.

        The list is empty if this account has no right to list them, or if the cluster does not
        serve them: the chart grants that right only with snapshots, or group snapshots. Raises
        ClusterSilent if the API server does not answer.
        """
        try:
            return self._lists.whole(path, kind, if_served=True, keep=keep, **query).items
        except errors.ClusterSilent as error:
            if not error.is_refusal:
                raise
            return []

    def _sources_by(self, content: Object, identity: VolumeId) -> Sequence[VolumeId]:
        """The source volumes of a group snapshot, or of one of its snapshots, by one content.

        `content` is a VolumeGroupSnapshotContent, reduced by `_own_content`. The result is empty if
        it is the content of another group snapshot.
        """
        if not content["uid"]:
            return []
        handles = content["source"].get("volumeHandles") or ()
        parsed = (VolumeId.parse(str(text)) for text in handles)
        sources = [
            source for source in parsed if source and source.group_uuid == identity.group_uuid
        ]
        name = f"{_GROUP_SNAPSHOT}{content['uid']}"
        if identity.name != names.logical_volume(ids.GROUP_SNAPSHOT_PREFIX, name):
            sources = [
                source for source in sources if identity.name == ids.group_member(name, str(source))
            ]
        return _volumes(sources, "VolumeGroupSnapshotContent", content["name"])

    def _source_of(self, identity: VolumeId) -> VolumeId | None:
        """The source volume of a snapshot, by the content that external-snapshotter made for it.

        None for an imported snapshot, for a group snapshot, and for a snapshot in a group snapshot.
        None also if the VolumeSnapshotContent names no volume, or one in another volume group.
        """
        if not names.is_of(ids.SNAPSHOT_PREFIX, identity.name):
            return None
        uid = names.readable(ids.SNAPSHOT_PREFIX, identity.name).removeprefix(_SNAPSHOT)
        # Read a list with the one object, not the object: only the answer to a list distinguishes a
        # cluster without snapshots from an API server that fails.
        selector, kind = f"metadata.name={_CONTENT}{uid}", "VolumeSnapshotContentList"
        contents = self._listed(CONTENTS, kind, keep=self._own_content, fieldSelector=selector)
        if not (content := next(iter(contents), {})):
            return None
        source = VolumeId.parse(str(content["source"].get("volumeHandle")))
        if source is None or source.group_uuid != identity.group_uuid:
            return None
        [volume] = _volumes([source], "VolumeSnapshotContent", content["name"])
        return volume

    # Methods about deleted nodes

    def deleted(self, identity: VolumeId, call_start: float) -> Deleted | None:
        """The node of a volume or snapshot, if that node was deleted; otherwise None.

        The node is the one that the PersistentVolume of the id names. Without such a
        PersistentVolume, all nodes that PersistentVolumes of the volume group name must have been
        deleted. None also without a grace period. Nodes and PersistentVolumes are read again if the
        last reads are too old.
        """
        if self._grace_seconds is None:
            return None
        now = self._clock()
        segment = self._segment_of(identity, call_start)
        with self._read_lock:
            if not segment and self._volumes_ended <= now - _FRESH_SECONDS:
                self._read_volumes()
            if self._nodes_read <= now - _FRESH_SECONDS:
                self._read_nodes()
            deleted = self._deleted(identity, segment, self._grace_seconds)
            if deleted is not None and not deleted.seconds and self._nodes_read < call_start:
                # The grace period is over. Read the Nodes again: a node that joined since may have
                # the deleted node's disks, and the deleted node may have come back.
                self._read_nodes()
                deleted = self._deleted(identity, segment, self._grace_seconds)
        return deleted

    def _deleted(
        self, identity: VolumeId, own_segment: str, grace_seconds: float
    ) -> Deleted | None:
        """The node of an id, if that node was deleted by the last reads; else None.

        `own_segment` is the topology segment in the PersistentVolume of the id. If it is empty, the
        segments in all PersistentVolumes of the volume group count, and none may have a Node. Of
        several segments, the one without a Node for the shortest time is returned.

        The time since which each segment has had no Node is noted.
        """
        segments = (
            {own_segment}
            if own_segment
            else self._last_reading.named.get(identity.group_uuid, frozenset())
        )
        if not segments or not self._last_reading.existing.isdisjoint(segments):
            return None
        now = self._clock()
        missing_since = {
            segment: self._last_reading.missing.get(segment, now) for segment in segments
        }
        self._last_reading = replace(
            self._last_reading, missing={**self._last_reading.missing, **missing_since}
        )
        last_segment = max(missing_since, key=lambda segment: (missing_since[segment], segment))
        return Deleted(last_segment, max(0.0, missing_since[last_segment] + grace_seconds - now))

    def snapshots_of(self, identity: VolumeId, call_start: float) -> Sequence[str]:
        """The names of the VolumeSnapshotContents that need a volume's PersistentVolume.

        A content that names a snapshot, and not its source volume, counts if the snapshot is in the
        volume's volume group: its source volume is not known.
        """
        contents = self._contents.since(call_start)
        return sorted(
            content["name"] for content in contents if _needs(content["source"], identity)
        )


def _volumes(sources: Sequence[VolumeId], kind: str, content: str) -> Sequence[VolumeId]:
    """Return `sources`, those in a snapshot's content; raise WrongSource if one is no volume."""
    for source in sources:
        if not names.is_of(ids.VOLUME_PREFIX, source.name):
            raise WrongSource(kind, content, source)
    return sources


def _needs(source: Object, identity: VolumeId) -> bool:
    """Return whether the volume `identity` is, or may be, the source of a VolumeSnapshotContent.

    `source` is the content's field of that name. If it names a snapshot, any volume in the
    snapshot's volume group may be the source.
    """
    if of_volume := source.get("volumeHandle"):
        return bool(of_volume == str(identity))
    snapshot = VolumeId.parse(str(source.get("snapshotHandle")))
    return snapshot is not None and snapshot.group_uuid == identity.group_uuid
