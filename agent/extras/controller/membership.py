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

# Before the UID of a VolumeSnapshot: names of its snapshot and of its VolumeSnapshotContent; before
# that of a VolumeGroupSnapshot: the name of its group snapshot (external-snapshotter, pkg/utils,
# GetDynamicSnapshotContentNameForSnapshot, and its flags --snapshot-name-prefix and
# --groupsnapshot-name-prefix by default).
_SNAPSHOT, _CONTENT, _GROUP_SNAPSHOT = "snapshot-", "snapcontent-", "groupsnapshot-"
# The prefixes of what is taken of volumes.
_TAKEN = (ids.SNAPSHOT_PREFIX, ids.GROUP_SNAPSHOT_PREFIX)
# How often the Nodes are listed; how soon for a node that enrolled and is not among them.
_NODES_SECONDS, _SOON_SECONDS = 60.0, 5.0
# How often the Nodes are listed in the time of grace of a deleted one, which may come back.
_GRACE_INTERVAL_SECONDS = 15.0
# How often PersistentVolumes are listed again while they may not agree with the nodes; how soon for
# a claim that counts only then.
_VOLUMES_SECONDS, _CLAIM_SECONDS = 120.0, 20.0
# Age of the lists by which a node is said to be deleted for some seconds, or a volume to have no
# PersistentVolume; of PersistentVolumes since their reading ended, which may itself take longer.
_FRESH_SECONDS = 30.0


class WrongSource(errors.AgentError):
    """A content says that a snapshot was taken of what is no volume."""

    def __init__(self, kind: str, name: str, source: VolumeId) -> None:
        super().__init__(
            f"{kind} {name} names {source} as the source of a snapshot, which is no volume: the"
            " node of that snapshot is not known by it. Its source must be the volume's id"
        )


class Deleted(NamedTuple):
    """The topology segment of a node whose Node object is gone, and the seconds of grace left."""

    segment: str
    seconds: float


class Serving(NamedTuple):
    """Where a member serves, and the UID of its Node, both by one reading.

    The address is empty for one that has not enrolled, the UID without an API server.
    """

    address: str
    uid: str = ""


class Record:
    """What is known of volume groups beside what nodes say. Without an API server: nothing."""

    # Whether what was on a deleted node is forgotten.
    forgets = False

    @property
    def members(self) -> frozenset[str]:
        """The names of all nodes that belong, also of those that were not asked yet."""
        return frozenset()

    @property
    def named(self) -> frozenset[str]:
        """The nodes with a Node object that PersistentVolumes name, for any group."""
        return frozenset()

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        """The nodes with a Node object that PersistentVolumes of a group name."""
        return frozenset()

    def names_deleted(self, group_uuid: str) -> bool:
        """Whether a PersistentVolume of a group names a node that has no Node object."""
        return False

    def names_another(self, identity: VolumeId, node: str) -> bool:
        """Whether the last reading names another node for a volume of a group that several have."""
        return False

    def now(self) -> float:
        """A moment, for `is_newer`."""
        return 0.0

    def is_newer(self, moment: float) -> bool:
        """Whether PersistentVolumes were read since a moment."""
        return True

    def doubt(self) -> None:
        """Have PersistentVolumes read again: they may not agree with the nodes."""

    def doubt_claim(self) -> None:
        """Have PersistentVolumes read soon: a claim counts only after that."""

    # Of these three `begun` is the moment (`now`) at which the call began. What was read since, for
    # whatever call, need not be read again.

    def node_of(self, identity: VolumeId, begun: float) -> str | None:
        """The node that a volume's own PersistentVolume names; None if there is none. Blocks.

        Empty for a node without a Node object. Of a snapshot it is that of its volume, of a group
        snapshot that of its volumes. Raises ClusterRefused, ClusterSilent, WrongSource.
        """
        return None

    def deleted(self, identity: VolumeId, begun: float) -> Deleted | None:
        """Whether an id's node was deleted; None if it is not known to be. Blocks.

        Where no grace is left, the Nodes were read after the call began. Raises ClusterRefused,
        ClusterSilent, WrongSource.
        """
        return None

    def snapshots_of(self, identity: VolumeId, begun: float) -> Sequence[str]:
        """The VolumeSnapshotContents that need a volume's PersistentVolume. Blocks.

        Raises ClusterSilent.
        """
        return ()


class _Enrolled(NamedTuple):
    """Where a node serves, the UID of the Node that it proved to be, and when (of the clock)."""

    address: str
    uid: str
    seen: float


class _Change:
    """That other nodes have enrolled than before: equal to itself only."""


@dataclass(frozen=True, eq=False)
class _Seen:
    """What the API server said last. Replaced as a whole: another thread reads it.

    Equal to itself only.
    """

    # The UID of each Node by its name, and its name by the topology segment that follows from it.
    uids: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)
    # All segments that a Node may have, by its labels too: a node can write those of its own Node,
    # so they only keep what is there from being taken for deleted.
    existing: frozenset[str] = frozenset()
    # The names of the Nodes with the driver's label.
    labelled: frozenset[str] = frozenset()
    # The segments that PersistentVolumes name, by the start of the group's UUID as ids have it.
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # Of groups for which they name several, and of those that do not have the name that follows
    # from the volume's: the PersistentVolume's name and segment by the volume's id.
    placed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Since when (seconds of the clock) there is no Node with a segment.
    missing: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def every_named(self) -> frozenset[str]:
        """The nodes with a Node object that PersistentVolumes name, for any group."""
        return self.names(frozenset[str]().union(*self.named.values()))

    def names(self, segments: Collection[str]) -> frozenset[str]:
        """The names of the Nodes with these segments; those without a Node are left out."""
        return frozenset(self.nodes[one] for one in segments if one in self.nodes)

    def has(self, enrolled: _Enrolled, name: str) -> bool:
        """Whether who enrolled is the Node of that name: not an earlier one."""
        uid = self.uids.get(name, "")
        return bool(uid) and enrolled.uid == uid


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
        self._enrolled: dict[str, _Enrolled] = {}
        # When other nodes enrolled last, and the members by what was seen and enrolled then.
        self._change = _Change()
        self._members: tuple[tuple[_Seen, _Change] | None, frozenset[str]] = None, frozenset()
        self._seen = _Seen()
        # When they were last read: the beginning of that, and of PersistentVolumes the end, too.
        self._nodes_read = self._volumes_read = self._volumes_ended = float("-inf")
        # When something was last found that only another reading can settle: in PersistentVolumes,
        # for a claim, and for a node that enrolled and is not among the Nodes. It is settled by a
        # reading that began later and succeeded.
        self._doubted = self._claimed = self._strange = float("-inf")
        self._reading = threading.RLock()
        self._contents = SharedReading(self._read_contents, self.now)
        self._group_contents = SharedReading(self._read_group_contents, self.now)

    # Who belongs

    @property
    def serving(self) -> Mapping[str, Serving]:
        """The members, and where each serves.

        The Nodes may be read by another thread meanwhile: an address that the earlier Node of a
        name enrolled with is never beside the UID of the one that is there now.
        """
        seen, addresses = self._read_members()
        return {
            one: Serving(addresses.get(one, ""), seen.uids.get(one, ""))
            for one in seen.labelled.union(seen.every_named, addresses)
        }

    @property
    def members(self) -> frozenset[str]:
        """The names of all members; the same object until they change, as each call asks."""
        by = self._seen, self._change
        if (known := self._members)[0] != by:
            seen, addresses = self._read_members()
            self._members = known = by, seen.labelled.union(seen.every_named, addresses)
        return known[1]

    def _read_members(self) -> tuple[_Seen, Mapping[str, str]]:
        """What the API server said last, and the addresses of the Nodes in it that enrolled."""
        seen, enrolled = self._seen, dict(self._enrolled)
        return seen, {name: one.address for name, one in enrolled.items() if seen.has(one, name)}

    @property
    def named(self) -> frozenset[str]:
        """The nodes with a Node object that PersistentVolumes name, for any group."""
        return self._seen.every_named

    def uid_of(self, name: str) -> str:
        """The UID of a Node by the last reading; empty for one that was not there."""
        return self._seen.uids.get(name, "")

    def enrol(self, name: str, address: str, uid: str) -> None:
        """Keep where a node serves that proved to be the Node with this UID.

        It counts once that Node was seen.
        """
        before, now = self._enrolled.get(name), self._clock()
        self._enrolled[name] = _Enrolled(address, uid, now)
        if before is None or before.uid != uid:
            self._change = _Change()
        if self.uid_of(name) != uid:
            self._strange = now

    @property
    def is_due(self) -> bool:
        """Whether something is to be read."""
        return self._nodes_are_due or self._volumes_are_due

    @property
    def _nodes_are_due(self) -> bool:
        now, seconds = self._clock(), _NODES_SECONDS
        if self._strange >= self._nodes_read:
            seconds = _SOON_SECONDS
        elif any(now - one < (self._grace_seconds or 0) for one in self._seen.missing.values()):
            seconds = _GRACE_INTERVAL_SECONDS
        return now - self._nodes_read >= seconds

    @property
    def _volumes_are_due(self) -> bool:
        read = self._volumes_read
        seconds = min(
            _VOLUMES_SECONDS if self._doubted >= read else float("inf"),
            _CLAIM_SECONDS if self._claimed >= read else float("inf"),
        )
        return self._clock() - read >= seconds

    def look(self) -> None:
        """Read what is due. Raises ClusterSilent; what was known stays, and what was doubted."""
        with self._reading:
            try:
                if self._volumes_are_due:
                    self._read_volumes()
            finally:
                if self._nodes_are_due:
                    self._read_nodes()

    def _read_nodes(self) -> None:
        begun = self._clock()
        found = self._lists.nodes().items
        abouts = [one["metadata"] for one in found]
        uids = {str(one["name"]): str(one.get("uid") or "") for one in abouts}
        nodes = {ids.node_segment(one): one for one in uids}
        existing = frozenset(references.names_of_nodes(found, self._topology_key))
        labelled = frozenset(
            str(one["metadata"]["name"])
            for one in found
            if self._topology_key in (one["metadata"].get("labels") or {})
        )
        self._nodes_read = begun
        self._take(
            replace(self._seen, uids=uids, nodes=nodes, existing=existing, labelled=labelled)
        )
        for name, one in list(self._enrolled.items()):
            # One that was deleted and made again is another machine, which enrols itself.
            if uids.get(name) != one.uid and one.seen < begun:
                del self._enrolled[name]
                self._change = _Change()

    def _read_volumes(self) -> None:
        begun = self._clock()
        named: dict[str, frozenset[str]] = {}
        found = self._lists.whole(VOLUMES, "PersistentVolumeList", keep=self._place)
        places = [one for one in found.items if one]
        for one in places:
            uuid = one["id"].group_uuid
            named[uuid] = named.get(uuid, frozenset()) | {one["segment"]}
        placed = {
            str(one["id"]): (one["name"], one["segment"])
            for one in places
            if one["is_renamed"] or len(named[one["id"].group_uuid]) > 1
        }
        # What no PersistentVolume names any more was on no node: the missing ones have an end.
        every = frozenset[str]().union(*named.values())
        missing = {one: since for one, since in self._seen.missing.items() if one in every}
        self._take(replace(self._seen, named=named, placed=placed, missing=missing))
        self._volumes_read, self._volumes_ended = begun, self._clock()

    def _place(self, volume: Object) -> Mapping[str, Any]:
        """The id, the segment and the name of a PersistentVolume; empty where it names no node.

        And whether its name is another than that by which `_segment_of` finds it.
        """
        handle, segment = self._parsed(volume)
        if handle is None:
            return {}
        name = str((volume.get("metadata") or {}).get("name"))
        is_renamed = name != ids.readable_name(str(handle))
        return {"id": handle, "segment": segment, "name": name, "is_renamed": is_renamed}

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
        missing: Mapping[str, float] = {}
        if self._nodes_read > float("-inf"):
            # Before that no Node is known to be there.
            wanted, now = frozenset(seen.missing).union(*seen.named.values()), self._clock()
            missing = {
                one: seen.missing.get(one, now) for one in wanted if one not in seen.existing
            }
        self._seen = replace(seen, missing=missing)

    # Whose a group is

    def nodes_of(self, group_uuid: str) -> frozenset[str]:
        """The nodes with a Node object that PersistentVolumes of a group name."""
        return self._seen.names(self._seen.named.get(group_uuid, frozenset()))

    def names_deleted(self, group_uuid: str) -> bool:
        """Whether a PersistentVolume of a group names a node that has no Node object."""
        return not self._seen.nodes.keys() >= self._seen.named.get(group_uuid, frozenset())

    def names_another(self, identity: VolumeId, node: str) -> bool:
        """Whether the last reading names another node for a volume of a group that several have."""
        _, segment = self._seen.placed.get(str(identity), ("", ""))
        return self._seen.nodes.get(segment, node) != node

    def now(self) -> float:
        """A moment, for `is_newer`."""
        return self._clock()

    def is_newer(self, moment: float) -> bool:
        """Whether PersistentVolumes were read since a moment."""
        return self._volumes_read >= moment

    def doubt(self) -> None:
        """Have PersistentVolumes read again with the next look that is due."""
        self._doubted = self._clock()

    def doubt_claim(self) -> None:
        """Have PersistentVolumes read soon: a claim counts only after that."""
        self._claimed = self._clock()

    def node_of(self, identity: VolumeId, begun: float) -> str | None:
        """The node that a volume's own PersistentVolume names; None if there is none. Blocks."""
        segment = self._segment_of(identity, begun)
        return self._seen.nodes.get(segment, "") if segment else None

    def _segment_of(self, identity: VolumeId, begun: float) -> str:
        """The segment in the PersistentVolume of a volume, or of a snapshot's volumes; or empty."""
        if not any(names.is_of(one, identity.name) for one in _TAKEN):
            return self._segment_of_volume(identity)
        sources = dict.fromkeys(self._sources_of(identity, begun))
        segments = {self._segment_of_volume(one) for one in sources} - {""}
        return segments.pop() if len(segments) == 1 else ""

    def _segment_of_volume(self, identity: VolumeId) -> str:
        """The segment in the PersistentVolume of a volume; or empty.

        It may have any name, which only the list tells.
        """
        if segment := self._segment_by(ids.readable_name(str(identity)), identity):
            return segment
        with self._reading:
            if self._volumes_ended <= self._clock() - _FRESH_SECONDS:
                self._read_volumes()
            name, segment = self._seen.placed.get(str(identity), ("", ""))
        # The list says which one it is, and that one which node, as it may be new by now. It is
        # read without the lock, for which calls about other groups and the list of Nodes wait.
        if name and self._segment_by(name, identity) != segment:
            differed = self._clock()
            with self._reading:
                if self._volumes_read <= differed:
                    self._read_volumes()
                _, segment = self._seen.placed.get(str(identity), ("", ""))
        return segment

    def _segment_by(self, name: str, identity: VolumeId) -> str:
        """The segment in the PersistentVolume of that name; empty if it is not the volume's."""
        found = find_named(self._objects, VOLUMES, name, "PersistentVolume")
        handle, segment = (None, "") if found is None else self._parsed(found)
        return segment if handle == identity else ""

    def _sources_of(self, identity: VolumeId, begun: float) -> Sequence[VolumeId]:
        """The volumes of a snapshot or group snapshot in its volume group; none if imported.

        Raises WrongSource where its content names what is no volume, as another snapshot or itself.
        """
        if source := self._source_of(identity):
            return [source]
        return self._sources_in_group(identity, begun)

    def _sources_in_group(self, identity: VolumeId, begun: float) -> Sequence[VolumeId]:
        """The volumes of a group snapshot or of its member, by the group snapshots' contents.

        The ids follow from the group snapshot's name and the volume's id, so that a content is
        believed about no others.
        """
        for one in self._group_contents.since(begun):
            if sources := self._sources_by(one, identity):
                return sources
        return []

    def _read_group_contents(self) -> Sequence[Object]:
        """The driver's VolumeGroupSnapshotContents."""
        kind = "VolumeGroupSnapshotContentList"
        found = self._listed(GROUP_CONTENTS, kind, keep=self._own_content)
        return [one for one in found if one]

    def _read_contents(self) -> Sequence[Object]:
        """The driver's VolumeSnapshotContents. Raises ClusterSilent also without the right."""
        kind = "VolumeSnapshotContentList"
        found = self._lists.whole(CONTENTS, kind, if_served=True, keep=self._own_content)
        return [one for one in found.items if one]

    def _own_content(self, content: Object) -> Object:
        """What is kept of a content of this driver's; empty for another's."""
        spec = content.get("spec") or {}
        if spec.get("driver") != self._driver_name:
            return {}
        uid = (spec.get("volumeGroupSnapshotRef") or {}).get("uid")
        name = (content.get("metadata") or {}).get("name")
        return {"name": str(name), "source": spec.get("source") or {}, "uid": uid}

    def _listed(
        self, path: str, kind: str, *, keep: Keep = lambda one: one, **query: str
    ) -> Sequence[Object]:
        """The contents of snapshots or group snapshots. Raises ClusterSilent.

        None without the right to list them, and where the cluster does not know them: the chart
        grants that right only with snapshots, or group snapshots.
        """
        try:
            return self._lists.whole(path, kind, if_served=True, keep=keep, **query).items
        except errors.ClusterSilent as error:
            if not error.is_refusal:
                raise
            return []

    def _sources_by(self, content: Object, identity: VolumeId) -> Sequence[VolumeId]:
        """The volumes of a group snapshot or of its member; none if the content is of another."""
        if not content["uid"]:
            return []
        handles = content["source"].get("volumeHandles") or ()
        parsed = (VolumeId.parse(str(one)) for one in handles)
        sources = [one for one in parsed if one and one.group_uuid == identity.group_uuid]
        name = f"{_GROUP_SNAPSHOT}{content['uid']}"
        if identity.name != names.logical_volume(ids.GROUP_SNAPSHOT_PREFIX, name):
            sources = [one for one in sources if identity.name == ids.group_member(name, str(one))]
        return _volumes(sources, "VolumeGroupSnapshotContent", content["name"])

    def _source_of(self, identity: VolumeId) -> VolumeId | None:
        """The volume of a snapshot, by the content that the snapshotter made for it.

        None for one that was imported, for a group snapshot and for its member.
        """
        if not names.is_of(ids.SNAPSHOT_PREFIX, identity.name):
            return None
        uid = names.readable(ids.SNAPSHOT_PREFIX, identity.name).removeprefix(_SNAPSHOT)
        # A list, as only that tells a cluster without snapshots from an API server that fails.
        named, kind = f"metadata.name={_CONTENT}{uid}", "VolumeSnapshotContentList"
        found = self._listed(CONTENTS, kind, keep=self._own_content, fieldSelector=named)
        if not (content := next(iter(found), {})):
            return None
        source = VolumeId.parse(str(content["source"].get("volumeHandle")))
        if source is None or source.group_uuid != identity.group_uuid:
            return None
        [volume] = _volumes([source], "VolumeSnapshotContent", content["name"])
        return volume

    # What was deleted

    def deleted(self, identity: VolumeId, begun: float) -> Deleted | None:
        """Whether an id's node was deleted, by its PersistentVolume or those of its group."""
        if self._grace_seconds is None:
            return None
        asked = self._clock()
        own = self._segment_of(identity, begun)
        with self._reading:
            if not own and self._volumes_ended <= asked - _FRESH_SECONDS:
                self._read_volumes()
            if self._nodes_read <= asked - _FRESH_SECONDS:
                self._read_nodes()
            found = self._deleted(identity, own, self._grace_seconds)
            if found is not None and not found.seconds and self._nodes_read < begun:
                # A node that joined since may have its disks; one that came back is one, too.
                self._read_nodes()
                found = self._deleted(identity, own, self._grace_seconds)
        return found

    def _deleted(self, identity: VolumeId, own: str, grace_seconds: float) -> Deleted | None:
        """Whether an id's node was deleted, by what was read; `own` is its volume's segment."""
        segments = {own} if own else self._seen.named.get(identity.group_uuid, frozenset())
        if not segments or not self._seen.existing.isdisjoint(segments):
            return None
        now = self._clock()
        begun = {one: self._seen.missing.get(one, now) for one in segments}
        self._seen = replace(self._seen, missing={**self._seen.missing, **begun})
        last = max(begun, key=lambda one: (begun[one], one))
        return Deleted(last, max(0.0, begun[last] + grace_seconds - now))

    def snapshots_of(self, identity: VolumeId, begun: float) -> Sequence[str]:
        """The names of the VolumeSnapshotContents of a volume.

        Also those that were not made by a VolumeSnapshot, if they are in the volume's group: which
        volume they are of is not known.
        """
        found = self._contents.since(begun)
        return sorted(one["name"] for one in found if _needs(one["source"], identity))


def _volumes(sources: Sequence[VolumeId], kind: str, content: str) -> Sequence[VolumeId]:
    """The sources that a content names, which are volumes. Raises WrongSource."""
    for one in sources:
        if not names.is_of(ids.VOLUME_PREFIX, one.name):
            raise WrongSource(kind, content, one)
    return sources


def _needs(source: Object, identity: VolumeId) -> bool:
    """Whether the source in a VolumeSnapshotContent is, or may be, a volume."""
    if of_volume := source.get("volumeHandle"):
        return bool(of_volume == str(identity))
    snapshot = VolumeId.parse(str(source.get("snapshotHandle")))
    return snapshot is not None and snapshot.group_uuid == identity.group_uuid
