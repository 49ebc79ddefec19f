"""Find candidates for orphans: volumes, objects and kubelet's directories without a reference."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agent.core import tag
from agent.core.ids import VolumeId
from agent.extras.orphans import references as cluster
from agent.extras.orphans.references import References
from agent.volumes import backing
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import EveryGroup, Fresh
from agent.volumes.reports import Reports
from lvm import report
from mount.kernel import Kernel
from mount.table import Table


class Kind(StrEnum):
    """The kind of an orphan.

    VOLUME, INLINE: a volume of a claim, or of a pod, that is gone. HALF_MADE: a volume or snapshot
    that is incomplete. WIPING: a deleted volume that is not erased yet. STAGING, TARGET: a
    directory of kubelet's whose volume is gone. CAPACITY, PERSISTENT_VOLUME: an object of a node
    that is gone. CLAIM: a claim that waits for a node that is gone or not ready.
    """

    VOLUME = "volume"
    INLINE = "inline"
    HALF_MADE = "half-made"
    WIPING = "wiping"
    STAGING = "staging"
    TARGET = "target"
    CAPACITY = "capacity"
    PERSISTENT_VOLUME = "persistentvolume"
    CLAIM = "claim"


# Remedy for an orphan that Carver can delete itself.
_DELETE = "carver orphans --delete {name} --yes"
# The remedy for each kind of orphan, for the operator.
REMEDIES = {
    Kind.VOLUME: _DELETE,
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
    """A possible orphan: something that nothing refers to now.

    - `name` is a volume's id, a path or the name of an object.
    - `identity` distinguishes the candidate from an earlier object of the same name: by LVM's UUID,
      by the device and inode of a directory, or by the API server's UID.
    - `about` describes the candidate for the operator.
    - `handle` is the volume's id as kubelet knows it, empty for a candidate without a volume.
    - `path` is the directory where the volume is mounted, empty without such a directory.
    - `remedy` replaces the remedy of the candidate's kind, if not empty.
    """

    kind: Kind
    name: str
    identity: str
    about: str
    handle: str = ""
    path: str = ""
    remedy: str = ""

    @property
    def key(self) -> str:
        """Return the candidate's key in the history of earlier looks."""
        return f"{self.kind}:{self.identity}:{self.name}"

    @property
    def full_remedy(self) -> str:
        """Return the remedy for this candidate, with its name filled in."""
        namespace, _, name = self.name.rpartition("/")
        text = self.remedy or REMEDIES[self.kind]
        fields = {"name": self.name, "namespace": namespace, "object": name}
        return text.format(**{key: shlex.quote(value) for key, value in fields.items()})


def find_volumes(
    reports: Reports, fresh_report: Fresh, references: References
) -> Iterator[Candidate]:
    """Find Carver's volumes and snapshots that nothing in the cluster refers to.

    Volumes that are being moved to another node are left to the operator.
    """
    for volume in fresh_report.volumes():
        # A volume without a kind of orphan is in a state that only its own process may end, such
        # as a move to another node.
        if not (kind := volume.orphan):
            continue
        if volume.is_ephemeral:
            if _lacks_its_pod(volume, references):
                yield _inline(volume)
        elif not references.names(
            volume.name, volume.own_tags[tag.NAME], volume.own_tags.get(tag.PV, "")
        ):
            yield Candidate(
                Kind(kind), str(volume.id), _uuid(volume), _about(volume), handle=str(volume.id)
            )
    for volume in fresh_report.doomed():
        why = f"deleted, not overwritten yet, {volume.size_bytes} bytes"
        yield Candidate(Kind.WIPING, str(volume.id), _uuid(volume), why)
    yield from _half_made(reports, reports.every_group(fresh_report))


def find_objects(references: References) -> Iterator[Candidate]:
    """Find the driver's objects of nodes that are gone, and claims that wait for such a node.

    Claims that wait for a node that is not ready are found, too: only the provisioner of the
    selected node makes the volume of a claim.
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
    """Return the UID of the pod in kubelet's path of a volume; empty for any other path."""
    _, pods, inside = target_path.rpartition("/pods/")
    uid, volumes, _ = inside.partition("/volumes/")
    return uid if pods and volumes and "/" not in uid else ""


def _lacks_its_pod(volume: Volume, references: References) -> bool:
    """Return whether an inline volume's pod, which its tags name, is not on this node any more."""
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


def _half_made(reports: Reports, all_groups: EveryGroup) -> Iterator[Candidate]:
    """Find snapshots of copies that are not in progress, and of incomplete group snapshots."""
    copying = {volume.own_tags[tag.NAME] for volume in all_groups.copies()}
    half_made = reports.half_made(all_groups)
    for snapshot in all_groups.snapshots():
        if snapshot.is_bridge:
            # The snapshot counts as in use where its copy may be in a group that does not answer.
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
    state = ", not complete" if volume.orphan == Kind.HALF_MADE else ""
    return f"{volume.size_bytes} bytes{state}{_of_claim(volume.claim)}"


def _of_claim(claim: str) -> str:
    return f", was claimed by {claim}" if claim else ""


def proves_absent(node_report: report.Report, handle: str, groups: tuple[str, ...]) -> bool:
    """Return whether a report proves that no volume of that id, nor a part of one, exists.

    The id of an inline volume does not name its group. So for such an id, all of Carver's groups
    must be in the report.
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


# Name of the file in which kubelet records a volume's driver and handle (pkg/volume/csi).
VOLUME_DATA = "vol_data.json"
# Pattern of the directories of published volumes, relative to kubelet's directory.
_TARGETS = "pods/*/volumes/kubernetes.io~csi/*"
# Name, inside such a directory, of the directory on which the volume is mounted.
_MOUNTED = {Kind.STAGING: "globalmount", Kind.TARGET: "mount"}


@dataclass(frozen=True)
class Place:
    """A directory that kubelet made for a volume of the driver.

    - `directory` is kubelet's directory for the volume; `path` is the directory inside it on which
      the volume is mounted.
    - `identity` has the device and inode numbers of `directory`.
    - `handle` is the volume's id, empty if kubelet has already removed its file with the id.
    """

    kind: Kind
    directory: str
    path: str
    identity: str
    handle: str


def all_of(kernel: Kernel, kubelet_directories: Sequence[str], driver_name: str) -> list[Place]:
    """Find all directories that kubelet made for the driver, without touching mounted volumes.

    Call this before reading the volumes: so the report includes every volume that was made while
    this ran, and no directory of a new volume looks orphaned.
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
    """Find directories whose volume is proved absent, and that the cluster does not refer to."""
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
            # Only the directory's name, a digest of the handle, identifies the volume. The volume
            # may be in a group that is absent from the report: so all groups must be present.
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
        # A staging directory has the driver's name in its path, so it counts also without a file.
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
    """Read kubelet's file about a volume.

    Returns an empty dictionary if there is no file, None if the file cannot be parsed.
    """
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None
    return {str(key): str(value) for key, value in data.items()} if isinstance(data, dict) else None
