"""Find candidates for orphans: volumes, objects and kubelet's directories without a reference."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agent.core import ids, tag
from agent.core.ids import VolumeId
from agent.extras.orphans import references as cluster
from agent.extras.orphans.references import References
from agent.extras.transfer.move import digest_of
from agent.volumes import backing
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import EveryGroup, Fresh
from agent.volumes.reports import Reports
from lvm import report
from mount.kernel import Kernel
from mount.table import Table


class Kind(StrEnum):
    """Kinds of orphans, by the names that `carver orphans` prints.

    - VOLUME, INLINE: a volume whose claim, or whose pod, is gone.
    - MOVING: such a volume that also moves to another node.
    - MOVED: what is left of a volume that was moved to another node, and whose claim is gone.
    - RECEIVING: what was received of a volume that moves here, and whose claim is gone.
    - HALF_MADE: a volume or a snapshot that is incomplete.
    - WIPING: a deleted volume or snapshot that is not erased yet.
    - STAGING, TARGET: a directory that kubelet made to stage, or to publish, a volume that is gone.
    - CAPACITY, PERSISTENT_VOLUME: a CSIStorageCapacity, or a PersistentVolume, of a node that is
      gone.
    - CLAIM: a claim whose selected node is gone or not ready.
    """

    VOLUME = "volume"
    MOVING = "moving"
    MOVED = "moved"
    RECEIVING = "receiving"
    INLINE = "inline"
    HALF_MADE = "half-made"
    WIPING = "wiping"
    STAGING = "staging"
    TARGET = "target"
    CAPACITY = "capacity"
    PERSISTENT_VOLUME = "persistentvolume"
    CLAIM = "claim"


# Command that deletes an orphan which Carver itself can delete.
_DELETE = "carver orphans --delete {name} --yes"
# Remedy for each kind of orphan: a command, or advice for the operator.
REMEDIES = {
    Kind.VOLUME: _DELETE,
    Kind.MOVING: "carver volume move {name} --undo",
    Kind.MOVED: _DELETE,
    Kind.RECEIVING: _DELETE,
    Kind.INLINE: _DELETE,
    Kind.HALF_MADE: _DELETE,
    Kind.WIPING: "see the log and docs/operations.md: it is removed when it is overwritten",
    Kind.STAGING: _DELETE,
    Kind.TARGET: _DELETE,
    Kind.CAPACITY: "kubectl delete csistoragecapacities --namespace {namespace} {object}",
    Kind.PERSISTENT_VOLUME: "kubectl delete pv {object}, once its data are given up:"
    " docs/operations.md",
    Kind.CLAIM: "start the node, or delete its Node if it will not come back; with sidecars on each"
    " node: kubectl annotate persistentvolumeclaim --namespace {namespace} {object}"
    " volume.kubernetes.io/selected-node-",
}


@dataclass(frozen=True)
class Candidate:
    """An object that may be an orphan: one search found that nothing needs the object.

    - `name` is the id of a volume or a snapshot, a path, or the name of a Kubernetes object.
    - `identity` distinguishes the candidate from an earlier object of the same name: by LVM's UUID
      of a volume, by the device and inode numbers of a directory, or by the API server's UID.
    - `description` describes the candidate for the operator.
    - `handle` is the volume id for the CSI call that deletes the candidate. Empty if no CSI call
      deletes it, or if the id is unknown.
    - `path` is the mount point of the volume, even if nothing is mounted now. Empty if there is
      none.
    - `remedy` replaces the remedy of the candidate's kind, if not empty.
    - `release` is the digest of the word of the move by which the candidate came about; empty if it
      is of no move. What another move has in its place is not deleted.
    """

    kind: Kind
    name: str
    identity: str
    description: str
    handle: str = ""
    path: str = ""
    remedy: str = ""
    release: str = ""

    @property
    def key(self) -> str:
        """Return the candidate's key in the history of searches: its kind, identity and name."""
        return f"{self.kind}:{self.identity}:{self.name}"

    @property
    def full_remedy(self) -> str:
        """Return the remedy for this candidate, with the candidate's name filled in."""
        namespace, _, name = self.name.rpartition("/")
        text = self.remedy or REMEDIES[self.kind]
        fields = {"name": self.name, "namespace": namespace, "object": name}
        return text.format(**{key: shlex.quote(value) for key, value in fields.items()})


def find_volumes(
    reports: Reports, fresh_report: Fresh, references: References
) -> Iterator[Candidate]:
    """Yield the volumes and snapshots of this node that nothing in the cluster needs.

    - A volume, complete or not, if the cluster has no claim or PersistentVolume with one of its
      names. So are what a move has left here, and what a move has brought here.
    - An inline volume whose pod is not on this node.
    - A deleted volume or snapshot that is not erased yet.
    - A temporary snapshot of a copy that is not in progress, and a snapshot of an incomplete group
      snapshot.

    A volume that is received as a stream outside a move is left to the operator: it may be a copy
    that is kept up to date for long, which no object has to name.
    """
    for volume in fresh_report.volumes():
        # Skip a volume whose removal is on record: it is among `doomed`, below.
        if not (kind := volume.orphan):
            continue
        if volume.is_ephemeral:
            if _lacks_its_pod(volume, references):
                yield _inline(volume)
        elif not references.names(*_names_of(volume)):
            candidate = Candidate(
                Kind(kind),
                str(volume.id),
                _uuid(volume),
                _about(volume),
                handle=str(volume.id),
                release=_release(volume),
            )
            if candidate.kind is not Kind.RECEIVING or candidate.release:
                yield candidate
    for volume in fresh_report.doomed():
        why = f"deleted, not overwritten yet, {volume.size_bytes} bytes"
        yield Candidate(Kind.WIPING, str(volume.id), _uuid(volume), why)
    yield from _unneeded_snapshots(reports, reports.every_group(fresh_report))


def find_objects(references: References) -> Iterator[Candidate]:
    """Yield the driver's objects of nodes that are gone, and the claims that wait for lost nodes.

    The objects are CSIStorageCapacities and PersistentVolumes. A claim waits for a lost node if the
    scheduler selected a node that is gone or not ready: only the provisioner on the selected node
    makes the volume of the claim.
    """
    for capacity in references.capacities:
        if capacity.node not in references.nodes:
            yield Candidate(
                Kind.CAPACITY, capacity.name, capacity.uid, f"of {capacity.node}, which is gone"
            )
    for volume in references.volumes:
        if volume.nodes and references.nodes.isdisjoint(volume.nodes):
            where = ", ".join(sorted(volume.nodes))
            description = f"of {where}, which is gone{_of_claim(volume.claim)}"
            yield Candidate(Kind.PERSISTENT_VOLUME, volume.name, volume.uid, description)
    for claim in references.waiting_claims:
        is_gone = claim.node not in references.nodes
        if is_gone or claim.node in references.unready:
            description = f"waits for {claim.node}, which is {'gone' if is_gone else 'not ready'}"
            yield Candidate(Kind.CLAIM, claim.name, f"{claim.uid}@{claim.node}", description)


def pod_of(target_path: str) -> str:
    """Return the pod's UID in kubelet's path of a published volume; empty for any other path."""
    _, pods, inside = target_path.rpartition("/pods/")
    uid, volumes, _ = inside.partition("/volumes/")
    return uid if pods and volumes and "/" not in uid else ""


def _names_of(volume: Volume) -> Iterator[str]:
    """Yield the names by which an object of the cluster may refer to a volume.

    A volume that came by a move may have had another name on the other node, by which its
    PersistentVolume knows it until the claim is rebound.
    """
    own_tags = volume.own_tags
    yield from (volume.name, own_tags[tag.NAME], own_tags.get(tag.PV, ""))
    if tag.RECEIVED in own_tags and {tag.RELEASE, tag.RELEASED} & own_tags.keys():
        yield ids.logical_name(own_tags[tag.RECEIVED])


def _release(volume: Volume) -> str:
    """Return the digest of the word of a volume's move; empty if the volume is in none."""
    own_tags = volume.own_tags
    return own_tags.get(tag.RELEASE, "") or digest_of(own_tags.get(tag.MOVE_WORD, ""))


def _lacks_its_pod(volume: Volume, references: References) -> bool:
    """Return whether the pod of an inline volume is not on this node any more.

    The volume's tags name the pod. False if no tag names a pod.
    """
    pod_uid = pod_of(volume.own_tags.get(tag.TARGET, ""))
    uids = {volume.own_tags.get(tag.POD_UID, ""), pod_uid} - {""}
    return bool(uids) and references.pods.isdisjoint(uids)


def _inline(volume: Volume) -> Candidate:
    own_tags, path = volume.own_tags, volume.own_tags.get(tag.TARGET, "")
    pod = "/".join(filter(None, (own_tags.get(tag.NAMESPACE), own_tags.get(tag.POD))))
    description = f"{volume.size_bytes} bytes, of pod {pod or 'without a name'}, which is gone"
    remedy = "" if path else "restart Carver and see its log: its path is not known"
    return Candidate(
        Kind.INLINE, str(volume.id), _uuid(volume), description, own_tags[tag.NAME], path, remedy
    )


def _unneeded_snapshots(reports: Reports, all_groups: EveryGroup) -> Iterator[Candidate]:
    """Yield temporary snapshots that no copy uses, and snapshots of incomplete group snapshots.

    A temporary snapshot is the source from which a volume is copied.
    """
    copying = {volume.own_tags[tag.NAME] for volume in all_groups.copies()}
    half_made = reports.half_made(all_groups)
    for snapshot in all_groups.snapshots():
        if snapshot.is_bridge:
            # The snapshot counts as in use if its copy may be in a volume group that does not
            # answer.
            if snapshot.own_tags[tag.NAME] in copying or not all_groups.is_known_unused(snapshot):
                continue
            yield _snapshot(snapshot, "was made for a copy that is not in progress")
        elif snapshot.group_snapshot_id in half_made:
            yield _snapshot(
                snapshot, f"of group snapshot {snapshot.group_snapshot_id}, which is incomplete"
            )


def _snapshot(snapshot: Snapshot, description: str) -> Candidate:
    uuid = snapshot.group.volume(snapshot.name).uuid
    remedy = "restart Carver, which undoes it, and see its log"
    return Candidate(
        Kind.HALF_MADE, str(snapshot.id), uuid, f"snapshot, {description}", remedy=remedy
    )


def _uuid(volume: Volume) -> str:
    return volume.group.volume(volume.name).uuid


def _about(volume: Volume) -> str:
    node = volume.own_tags.get(tag.MOVE_TO, "another node")
    state = {
        Kind.HALF_MADE: ", not complete",
        Kind.MOVING: f", moves to {node}",
        Kind.MOVED: f", was moved to {node}, and is what is left here",
        Kind.RECEIVING: ", received by a move that has not ended",
    }.get(Kind(volume.orphan), "")
    return f"{volume.size_bytes} bytes{state}{_of_claim(volume.claim)}"


def _of_claim(claim: str) -> str:
    return f", was claimed by {claim}" if claim else ""


def proves_absent(node_report: report.Report, handle: str, groups: tuple[str, ...]) -> bool:
    """Return whether a report of this node proves that no volume with an id exists.

    The id of an inline volume does not name the volume group. For such an id, all volume groups in
    `groups` must be in the report.
    """
    backing_volume = backing.of_id(handle)
    volume_groups = [
        node_report.groups.get(name)
        for name in ([backing_volume.group] if backing_volume.group else groups)
    ]
    return all(
        group is not None
        and backing_volume.may_be_in(group)
        and backing_volume.name not in group.volumes
        for group in volume_groups
    )


# Name of kubelet's file with the driver and the id of a volume (pkg/volume/csi in Kubernetes).
VOLUME_DATA = "vol_data.json"
# Pattern of kubelet's directories for published volumes, relative to kubelet's root directory.
_TARGETS = "pods/*/volumes/kubernetes.io~csi/*"
# Name of a volume's mount point inside kubelet's directory for the volume.
_MOUNTED = {Kind.STAGING: "globalmount", Kind.TARGET: "mount"}


@dataclass(frozen=True)
class Place:
    """A directory that kubelet made to stage or to publish a volume of the driver.

    - `directory` is the path of this directory; `path` is the mount point of the volume inside it.
    - `identity` has the device and inode numbers of `directory`.
    - `handle` is the volume's id; empty if kubelet has already removed its file with the id.
    """

    kind: Kind
    directory: str
    path: str
    identity: str
    handle: str


def all_of(kernel: Kernel, kubelet_directories: Sequence[str], driver_name: str) -> list[Place]:
    """Return all directories that kubelet made for the driver's volumes; touch no mounted volume.

    The caller has to call this function before it reads the volumes. Then the report also has the
    volumes that are created while this function runs, and the directory of a new volume does not
    look orphaned.
    """
    places: list[Place] = []
    for kubelet in map(Path, kubelet_directories):
        staging = kubelet / "plugins/kubernetes.io/csi" / driver_name
        places += _places(kernel, Kind.STAGING, staging, "*", driver_name)
        places += _places(kernel, Kind.TARGET, kubelet, _TARGETS, driver_name)
    return places


def candidates(
    places: Sequence[Place],
    mounts: Table,
    node_report: report.Report,
    groups: tuple[str, ...],
    references: References,
) -> Iterator[Candidate]:
    """Yield kubelet's directories that the cluster does not need and whose volume is absent.

    The report must prove that the volume is absent.

    The cluster needs a target directory as long as its pod exists, and a staging directory as long
    as a PersistentVolume has the volume's id.
    """
    has_all_groups = all(name in node_report.groups for name in groups)
    digests = {
        cluster.digest(str(VolumeId.of(group, name)))
        for group in node_report.groups.values()
        for name in group.volumes
    }
    for place in places:
        if place.handle:
            is_absent = proves_absent(node_report, place.handle, groups)
        else:
            # The volume's id is unknown. Only the directory's name, a digest of the id, identifies
            # the volume. The volume may be in a volume group that is absent from the report, so all
            # volume groups must be in the report.
            is_absent = has_all_groups and Path(place.directory).name not in digests
        is_referenced = (
            pod_of(place.path) in references.pods
            if place.kind is Kind.TARGET
            else Path(place.directory).name in references.handle_digests
        )
        if is_absent and not is_referenced:
            mount = mounts.top(place.path)
            mount_text = f"has {mount}" if mount else "has nothing mounted"
            description = f"of {place.handle or 'a volume'}, which is not there; {mount_text}"
            yield Candidate(
                place.kind, place.directory, place.identity, description, place.handle, place.path
            )


def _places(
    kernel: Kernel, kind: Kind, directory: Path, pattern: str, driver_name: str
) -> Iterator[Place]:
    for entry in _inside(directory, pattern):
        data = _volume_data(entry / VOLUME_DATA)
        # Skip a target directory without kubelet's file, because only that file names the driver. A
        # staging directory has the driver's name in its path, so it counts even without the file.
        if data is None or (kind is Kind.TARGET and not data.get("volumeHandle")):
            continue
        if data.get("driverName", driver_name if kind is Kind.STAGING else "") != driver_name:
            continue
        with suppress(OSError):  # gone meanwhile
            status = kernel.lstat(str(entry))
            path, identity = str(entry / _MOUNTED[kind]), f"{status.st_dev}.{status.st_ino}"
            yield Place(kind, str(entry), path, identity, data.get("volumeHandle", ""))


def _inside(directory: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return sorted(entry for entry in directory.glob(pattern) if not entry.is_symlink())
    return []


def _volume_data(file: Path) -> dict[str, str] | None:
    """Read kubelet's file with the driver and the id of a volume.

    Returns an empty dictionary if the file does not exist, and None if the file cannot be read or
    parsed.
    """
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None
    return {str(key): str(value) for key, value in data.items()} if isinstance(data, dict) else None
