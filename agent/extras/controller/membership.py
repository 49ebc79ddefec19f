"""The members of the cluster, and the nodes of each volume group, by the API server's objects.

A node is a member while its Node object exists, and Carver was on the node once. Any of these facts
proves that Carver was on the node:

- Kubelet gave the Node the driver's topology label, which kubelet never removes (kubernetes,
  pkg/volume/csi/nodeinfomanager).
- A PersistentVolume names the node.
- The node enrolled at this controller.

A member stays a member while it does not answer, has not enrolled here, or is not ready. Nothing is
kept on disk: a controller that starts reads the same objects from the API server.

A *segment* is the value of the driver's topology label, which follows from a node's name
(`ids.node_segment`).
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

# Prefixes of names that end with an object's UID: of a snapshot and of a VolumeSnapshotContent,
# with the UID of the VolumeSnapshot; of a group snapshot, with the UID of the VolumeGroupSnapshot.
# Source: external-snapshotter, pkg/utils, GetDynamicSnapshotContentNameForSnapshot, and the
# defaults of its flags --snapshot-name-prefix and --groupsnapshot-name-prefix.
_SNAPSHOT, _CONTENT, _GROUP_SNAPSHOT = "snapshot-", "snapcontent-", "groupsnapshot-"
# Prefixes of the names of snapshots and of group snapshots.
_TAKEN = (ids.SNAPSHOT_PREFIX, ids.GROUP_SNAPSHOT_PREFIX)
# Seconds between two lists of the Nodes: usually; and while a node has enrolled that is not in the
# last list.
_NODES_SECONDS, _SOON_SECONDS = 60.0, 5.0
# Seconds between two lists of the Nodes while a deleted Node is in its grace period, in which it
# may come back.
_GRACE_INTERVAL_SECONDS = 15.0
# Seconds between two lists of PersistentVolumes: while the last list may not agree with the nodes'
# reports; and while a node's claim to a volume group waits for the next list.
_VOLUMES_SECONDS, _CLAIM_SECONDS = 120.0, 20.0
# Largest age, in seconds, of the lists by which a node counts as deleted while grace is left, or a
# volume as having no PersistentVolume. For PersistentVolumes the age counts from the end of the
# read, as the read itself may take longer.
_FRESH_SECONDS = 30.0


class WrongSource(errors.AgentError):
    """An error: the content of a snapshot names a source that is no volume."""

    def __init__(self, kind: str, name: str, source: VolumeId) -> None:
        super().__init__(
            f"{kind} {name} names {source} as the source of a snapshot, which is no volume: the"
            " node of that snapshot is not known by it. Its source must be the volume's id"
        )


class Deleted(NamedTuple):
    """A node whose Node object is gone: its topology segment, and the seconds of grace left."""

    segment: str
    seconds: float


class Serving(NamedTuple):
    """The address at which a member serves, and the UID of its Node, both from one reading.

    The address is empty for a member that has not enrolled, the UID if there is no API server.
    """

    address: str
    uid: str = ""


class Record:
    """What the API server says about members and volume groups; nothing, without an API server.

    This class serves a controller without an API server. ClusterRecord, its subclass, serves
    others.
    """

    # Whether a volume on a node that was deleted counts as deleted, too.
    forgets = False

    @property
    def members(self) -> frozenset[str]:
        """The names of all members, also of those that were not asked yet."""
        return frozenset()

    @property
    def named(self) -> frozenset[str]:
        """The names of the Nodes in the node affinity of any PersistentVolume of the driver."""
        return frozenset()

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        """The names of the Nodes in the node affinity of a volume group's PersistentVolumes."""
        return frozenset()

    def names_deleted(self, group_uuid: str) -> bool:
        """Return whether a PersistentVolume of a volume group names a node with no Node object."""
        return False

    def names_another(self, identity: VolumeId, node: str) -> bool:
        """Return whether a volume's PersistentVolume, as last read, named another node than `node`.

        Known only for volumes in volume groups that are named for several nodes, and for renamed
        PersistentVolumes.
        """
        return False

    def now(self) -> float:
        """The time on this Record's clock, to compare by `is_newer`."""
        return 0.0

    def is_newer(self, moment: float) -> bool:
        """Return whether the last read of PersistentVolumes began at `moment` or later."""
        return True

    def doubt(self) -> None:
        """Have PersistentVolumes read again: they may not agree with the nodes' reports."""

    def request_early_refresh(self) -> None:
        """Have PersistentVolumes read again: a node's claim to a volume group waits for that."""

    # In the next three methods `call_start` is the time (`now`) at which the CSI call began. A
    # result that was read since, for any call, is used again.

    def node_of(self, identity: VolumeId, call_start: float) -> str | None:
        """The node that a volume's own PersistentVolume names; None if the volume has none.

        The result is empty if that node has no Node object. A snapshot has the node of its volume,
        a group snapshot that of its volumes. Waits for the API server. Raises ClusterRefused,
        ClusterSilent, WrongSource.
        """
        return None

    def deleted(self, identity: VolumeId, call_start: float) -> Deleted | None:
        """The node of an id, if it is known to be deleted; else None.

        If no grace is left in the result, the Nodes were read after the call began. Waits for the
        API server. Raises ClusterRefused, ClusterSilent, WrongSource.
        """
        return None

    def snapshots_of(self, identity: VolumeId, call_start: float) -> Sequence[str]:
        """The names of the VolumeSnapshotContents that need a volume's PersistentVolume.

        Waits for the API server. Raises ClusterSilent.
        """
        return ()


class _Enrolled(NamedTuple):
    """The enrolment of a node: the node's address, the UID of the Node object, and the time.

    The node proved the UID. The time is on the Record's clock.
    """

    address: str
    uid: str
    seen: float


class _Change:
    """A marker that stands for the enrolments at one time; equal to itself only."""


@dataclass(frozen=True, eq=False)
class _Reading:
    """What the API server said when it was last read; other threads may use it.

    An object of this class is replaced as a whole, and is equal to itself only.
    """

    # The UID of each Node by the Node's name; and the Node's name by the topology segment that
    # follows from the name.
    uids: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)
    # All topology segments that a Node may have, by its labels, too. A node can write the labels of
    # its own Node, so labels only keep an existing node from counting as deleted.
    existing: frozenset[str] = frozenset()
    # The names of the Nodes that have the driver's topology label.
    labelled: frozenset[str] = frozenset()
    # The topology segments that PersistentVolumes name for a volume group, by the start of the
    # group's UUID as in volume ids.
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # The name of a PersistentVolume, and the topology segment in it, by the volume's id. Kept only
    # for volume groups with several segments, and for PersistentVolumes whose name does not follow
    # from the volume's.
    placed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # When a topology segment was first seen without a Node, on the Record's clock, by the segment.
    missing: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def every_named(self) -> frozenset[str]:
        """The names of the Nodes in the node affinity of any PersistentVolume of the driver."""
        return self.names(frozenset[str]().union(*self.named.values()))

    def names(self, segments: Collection[str]) -> frozenset[str]:
        """The names of the Nodes with these topology segments.

        Segments without a Node are left out.
        """
        return frozenset(self.nodes[segment] for segment in segments if segment in self.nodes)

    def has(self, enrolled: _Enrolled, name: str) -> bool:
        """Return whether an enrolment is of the present Node of that name, not an earlier Node."""
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
        """Set the grace period, in seconds, of deleted nodes.

        The volumes of a node that was deleted for that long count as deleted, too.

        With None such volumes never count as deleted.
        """
        self._objects, self._lists, self._clock = objects, lists, clock
        self._driver_name, self._topology_key = driver_name, ids.topology_key(driver_name)
        self._grace_seconds = grace_seconds
        self.forgets = grace_seconds is not None
        self._enrolled: dict[str, _Enrolled] = {}
        # A marker of the present enrolments, replaced when they change; and a cache of the members'
        # names, with the read and the marker that the names follow from.
        self._change = _Change()
        self._members: tuple[tuple[_Reading, _Change] | None, frozenset[str]] = None, frozenset()
        self._last_reading = _Reading()
        # When the Nodes and PersistentVolumes were last read: the times at which the reads began,
        # and for PersistentVolumes also the end.
        self._nodes_read = self._volumes_read = self._volumes_ended = float("-inf")
        # When a reason for another read was last found, by the reason: PersistentVolumes may not
        # agree with the nodes' reports; a claim to a volume group waits for a read; a node enrolled
        # that is not among the Nodes. A read that began later and succeeded removes the reason.
        self._doubted = self._claimed = self._strange = float("-inf")
        self._read_lock = threading.RLock()
        self._contents = SharedReading(self._read_contents, self.now)
        self._group_contents = SharedReading(self._read_group_contents, self.now)

    # Members

    @property
    def serving(self) -> Mapping[str, Serving]:
        """The members by name, each with its address and the UID of its Node.

        Another thread may read the Nodes meanwhile. An address with which an earlier Node of that
        name enrolled is never returned with the UID of the present Node.
        """
        reading, addresses = self._read_members()
        return {
            name: Serving(addresses.get(name, ""), reading.uids.get(name, ""))
            for name in reading.labelled.union(reading.every_named, addresses)
        }

    @property
    def members(self) -> frozenset[str]:
        """The names of all members.

        The same object is returned until the members change: `Nodes` finds a change by identity.
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
        """Return what was last read, and the addresses of the Nodes in it that enrolled."""
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

    def uid_of(self, name: str) -> str:
        """The UID of the Node of that name when the Nodes were last read; empty without one."""
        return self._last_reading.uids.get(name, "")

    def enrol(self, name: str, address: str, uid: str) -> None:
        """Keep the address of a node that proved to be the Node with this UID.

        The address counts once a Node with this UID was read.
        """
        old_enrolment, now = self._enrolled.get(name), self._clock()
        self._enrolled[name] = _Enrolled(address, uid, now)
        if old_enrolment is None or old_enrolment.uid != uid:
            self._change = _Change()
        if self.uid_of(name) != uid:
            self._strange = now

    @property
    def is_due(self) -> bool:
        """Whether Nodes or PersistentVolumes are to be read again now."""
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
        """Read Nodes and PersistentVolumes, each if its time has come. Raises ClusterSilent.

        After an error, what was last read stays in use, and the reasons for another read stay.
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
            # A Node that was deleted and made again is another machine, which enrols itself.
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
        # A topology segment that no PersistentVolume names has no volumes any more: forget since
        # when it has no Node.
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
        """Return what is kept of a PersistentVolume: its id, its topology segment and its name.

        The result also has whether the name differs from the one by which `_segment_of_volume`
        finds the PersistentVolume. The result is empty if the PersistentVolume names no node, or is
        another driver's.
        """
        handle, segment = self._parsed(volume)
        if handle is None:
            return {}
        name = str((volume.get("metadata") or {}).get("name"))
        is_renamed = name != ids.readable_name(str(handle))
        return {"id": handle, "segment": segment, "name": name, "is_renamed": is_renamed}

    def _parsed(self, volume: Object) -> tuple[VolumeId | None, str]:
        """Return the volume id and the topology segment in a PersistentVolume.

        The id is None for another driver's PersistentVolume, and for one without exactly one
        segment.
        """
        spec = volume.get("spec") or {}
        source = spec.get("csi") or {}
        handle = VolumeId.parse(str(source.get("volumeHandle")))
        segments = set(references.nodes_of(spec, self._topology_key))
        if source.get("driver") != self._driver_name or handle is None or len(segments) != 1:
            return None, ""
        return handle, segments.pop()

    def _take(self, reading: _Reading) -> None:
        """Keep what was read, and since when each topology segment has no Node.

        If a segment has a Node again, its time begins anew when that Node is deleted.
        """
        missing: Mapping[str, float] = {}
        if self._nodes_read > float("-inf"):
            # Before the Nodes were first read, no topology segment is known to be without a Node.
            segments, now = frozenset(reading.missing).union(*reading.named.values()), self._clock()
            missing = {
                segment: reading.missing.get(segment, now)
                for segment in segments
                if segment not in reading.existing
            }
        self._last_reading = replace(reading, missing=missing)

    # The nodes of a volume group

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

        Known only for volumes in volume groups that are named for several nodes, and for renamed
        PersistentVolumes.
        """
        _, segment = self._last_reading.placed.get(str(identity), ("", ""))
        return self._last_reading.nodes.get(segment, node) != node

    def now(self) -> float:
        """The time on this Record's clock, to compare by `is_newer`."""
        return self._clock()

    def is_newer(self, moment: float) -> bool:
        """Return whether the last read of PersistentVolumes began at `moment` or later."""
        return self._volumes_read >= moment

    def doubt(self) -> None:
        """Have PersistentVolumes read again, but no sooner than two minutes after the last read."""
        self._doubted = self._clock()

    def request_early_refresh(self) -> None:
        """Have PersistentVolumes read again, but no sooner than 20 seconds after the last read."""
        self._claimed = self._clock()

    def node_of(self, identity: VolumeId, call_start: float) -> str | None:
        """The node that a volume's own PersistentVolume names; None if the volume has none."""
        segment = self._segment_of(identity, call_start)
        return self._last_reading.nodes.get(segment, "") if segment else None

    def _segment_of(self, identity: VolumeId, call_start: float) -> str:
        """The topology segment in the PersistentVolume of a volume, or of a snapshot's volumes.

        Empty if there is no PersistentVolume, or if a group snapshot's volumes have several
        segments.
        """
        if not any(names.is_of(prefix, identity.name) for prefix in _TAKEN):
            return self._segment_of_volume(identity)
        sources = dict.fromkeys(self._sources_of(identity, call_start))
        segments = {self._segment_of_volume(source) for source in sources} - {""}
        return segments.pop() if len(segments) == 1 else ""

    def _segment_of_volume(self, identity: VolumeId) -> str:
        """The topology segment in the PersistentVolume of a volume; empty if the volume has none.

        1. Read the PersistentVolume that has the name that follows from the volume's.
        2. If there is none, or it is another volume's, search the list of PersistentVolumes, as a
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
        # The list gives the PersistentVolume's name. The PersistentVolume itself is read, too,
        # since it may have been replaced since the list was read. This read is without the lock,
        # for which calls about other volume groups and the list of Nodes wait.
        if name and self._segment_by(name, identity) != segment:
            differed_at = self._clock()
            with self._read_lock:
                if self._volumes_read <= differed_at:
                    self._read_volumes()
                _, segment = self._last_reading.placed.get(str(identity), ("", ""))
        return segment

    def _segment_by(self, name: str, identity: VolumeId) -> str:
        """The topology segment in the PersistentVolume of that name.

        Empty if the PersistentVolume is of another volume.
        """
        volume = find_named(self._objects, VOLUMES, name, "PersistentVolume")
        handle, segment = (None, "") if volume is None else self._parsed(volume)
        return segment if handle == identity else ""

    def _sources_of(self, identity: VolumeId, call_start: float) -> Sequence[VolumeId]:
        """The volumes that a snapshot or group snapshot was taken of; empty for an imported one.

        Only volumes in the id's own volume group count. Raises WrongSource where the content names
        something else than a volume, such as another snapshot or itself.
        """
        if source := self._source_of(identity):
            return [source]
        return self._sources_in_group(identity, call_start)

    def _sources_in_group(self, identity: VolumeId, call_start: float) -> Sequence[VolumeId]:
        """The source volumes of a group snapshot, or of one of its snapshots.

        The volumes are found in the driver's VolumeGroupSnapshotContents. The id of each snapshot
        in a group snapshot follows from the group snapshot's name and the volume's id. So a content
        is believed only about its own snapshots.
        """
        for content in self._group_contents.since(call_start):
            if sources := self._sources_by(content, identity):
                return sources
        return []

    def _read_group_contents(self) -> Sequence[Object]:
        """The driver's VolumeGroupSnapshotContents, reduced by `_own_content`.

        Raises ClusterSilent.
        """
        kind = "VolumeGroupSnapshotContentList"
        contents = self._listed(GROUP_CONTENTS, kind, keep=self._own_content)
        return [content for content in contents if content]

    def _read_contents(self) -> Sequence[Object]:
        """The driver's VolumeSnapshotContents, reduced by `_own_content`.

        Raises ClusterSilent, also without the right to list the contents.
        """
        kind = "VolumeSnapshotContentList"
        listing = self._lists.whole(CONTENTS, kind, if_served=True, keep=self._own_content)
        return [content for content in listing.items if content]

    def _own_content(self, content: Object) -> Object:
        """Return what is kept of a snapshot's or group snapshot's content; or empty.

        Contents of other drivers are empty.
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
        """A list of VolumeSnapshotContents or VolumeGroupSnapshotContents. Raises ClusterSilent.

        The list is empty without the right to list them, and if the cluster does not serve them:
        the chart grants that right only with snapshots, or group snapshots.
        """
        try:
            return self._lists.whole(path, kind, if_served=True, keep=keep, **query).items
        except errors.ClusterSilent as error:
            if not error.is_refusal:
                raise
            return []

    def _sources_by(self, content: Object, identity: VolumeId) -> Sequence[VolumeId]:
        """The source volumes of a group snapshot, or of one of its snapshots, by one content.

        The result is empty if the VolumeGroupSnapshotContent is that of another group snapshot.
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
        """The volume of a snapshot, by the VolumeSnapshotContent that the snapshotter made for it.

        None for an imported snapshot, for a group snapshot, and for a snapshot in a group snapshot.
        """
        if not names.is_of(ids.SNAPSHOT_PREFIX, identity.name):
            return None
        uid = names.readable(ids.SNAPSHOT_PREFIX, identity.name).removeprefix(_SNAPSHOT)
        # A list is read, not the object: only a list distinguishes a cluster without snapshots from
        # an API server that fails.
        selector, kind = f"metadata.name={_CONTENT}{uid}", "VolumeSnapshotContentList"
        contents = self._listed(CONTENTS, kind, keep=self._own_content, fieldSelector=selector)
        if not (content := next(iter(contents), {})):
            return None
        source = VolumeId.parse(str(content["source"].get("volumeHandle")))
        if source is None or source.group_uuid != identity.group_uuid:
            return None
        [volume] = _volumes([source], "VolumeSnapshotContent", content["name"])
        return volume

    # Deleted nodes

    def deleted(self, identity: VolumeId, call_start: float) -> Deleted | None:
        """The node of an id, if it was deleted; else None.

        The node is that of the id's PersistentVolume, or else that of all PersistentVolumes in the
        volume group.
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
                # Read the Nodes again: a node that joined since may have the deleted node's disks,
                # and the deleted node may have come back.
                self._read_nodes()
                deleted = self._deleted(identity, segment, self._grace_seconds)
        return deleted

    def _deleted(
        self, identity: VolumeId, own_segment: str, grace_seconds: float
    ) -> Deleted | None:
        """The node of an id, if it was deleted according to what was last read; else None.

        `own_segment` is the topology segment of the id's volume, or empty. Of several segments,
        return the one that was without a Node the shortest time.
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

        Contents that no VolumeSnapshot was made for count if they are in the volume's volume group,
        since their volume is not known.
        """
        contents = self._contents.since(call_start)
        return sorted(
            content["name"] for content in contents if _needs(content["source"], identity)
        )


def _volumes(sources: Sequence[VolumeId], kind: str, content: str) -> Sequence[VolumeId]:
    """Return the source volumes in a snapshot's content. Raises WrongSource for other sources."""
    for source in sources:
        if not names.is_of(ids.VOLUME_PREFIX, source.name):
            raise WrongSource(kind, content, source)
    return sources


def _needs(source: Object, identity: VolumeId) -> bool:
    """Return whether the source in a VolumeSnapshotContent is, or may be, the volume of that id."""
    if of_volume := source.get("volumeHandle"):
        return bool(of_volume == str(identity))
    snapshot = VolumeId.parse(str(source.get("snapshotHandle")))
    return snapshot is not None and snapshot.group_uuid == identity.group_uuid
