"""Find candidates: volumes, cluster objects and kubelet's directories that nothing refers to."""

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
from agent.volumes.report_age import Every, Fresh
from agent.volumes.reports import Reports
from lvm import report
from mount.kernel import Kernel
from mount.table import Table


class Kind(StrEnum):
    """The kind of an orphan; `REMEDIES` has a remedy for each."""

    VOLUME = "volume"
    INLINE = "inline"
    HALF_MADE = "half-made"
    WIPING = "wiping"
    STAGING = "staging"
    TARGET = "target"
    CAPACITY = "capacity"
    PERSISTENT_VOLUME = "persistentvolume"
    CLAIM = "claim"


_DELETE = "carver orphans --delete {name} --yes"
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
    """A possible orphan.

    `name` is a volume's id, a path or an object's name. `identity` distinguishes it from another of
    that name: it is LVM's, the file system's or the API server's. `handle` is the volume's id as
    kubelet knows it, and `path` its place, if it has these. `remedy` replaces that of its kind.
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
        """Return its key in the history."""
        return f"{self.kind}:{self.identity}:{self.name}"

    @property
    def full_remedy(self) -> str:
        """Return what to do about it."""
        namespace, _, name = self.name.rpartition("/")
        text = self.remedy or REMEDIES[self.kind]
        fields = {"name": self.name, "namespace": namespace, "object": name}
        return text.format(**{key: shlex.quote(one) for key, one in fields.items()})


def of_volumes(reports: Reports, known: Fresh, references: References) -> Iterator[Candidate]:
    """Find Carver's volumes that nothing in the cluster refers to."""
    for one in known.volumes():
        # Volumes that move between nodes are left to the operator.
        if not (kind := one.orphan):
            continue
        if one.is_ephemeral:
            if _lacks_its_pod(one, references):
                yield _inline(one)
        elif not references.names(one.name, one.own_tags[tag.NAME], one.own_tags.get(tag.PV, "")):
            yield Candidate(Kind(kind), str(one.id), _uuid(one), _about(one), handle=str(one.id))
    for one in known.doomed():
        why = f"deleted, not overwritten yet, {one.size_bytes} bytes"
        yield Candidate(Kind.WIPING, str(one.id), _uuid(one), why)
    yield from _half_made(reports, reports.everywhere(known))


def of_objects(references: References) -> Iterator[Candidate]:
    """Find the driver's objects of nodes that are gone, and claims also of unready ones.

    Only the selected node's provisioner makes the volume of a claim.
    """
    for one in references.capacities:
        if one.node not in references.nodes:
            yield Candidate(Kind.CAPACITY, one.name, one.uid, f"of {one.node}, which is gone")
    for volume in references.volumes:
        if volume.nodes and references.nodes.isdisjoint(volume.nodes):
            where = ", ".join(sorted(volume.nodes))
            about = f"of {where}, which is gone{_of_claim(volume.claim)}"
            yield Candidate(Kind.PERSISTENT_VOLUME, volume.name, volume.uid, about)
    for claim in references.waiting_claims:
        is_gone = claim.node not in references.nodes
        if is_gone or claim.node in references.unready:
            about = f"waits for {claim.node}, which is {'gone' if is_gone else 'not ready'}"
            yield Candidate(Kind.CLAIM, claim.name, f"{claim.uid}@{claim.node}", about)


def pod_of(target_path: str) -> str:
    """Return the pod's UID in kubelet's path of a volume; empty for another path."""
    _, pods, inside = target_path.rpartition("/pods/")
    uid, volumes, _ = inside.partition("/volumes/")
    return uid if pods and volumes and "/" not in uid else ""


def _lacks_its_pod(volume: Volume, references: References) -> bool:
    """Whether its tags name a pod that the cluster does not have on this node."""
    of_target = pod_of(volume.own_tags.get(tag.TARGET, ""))
    uids = {volume.own_tags.get(tag.POD_UID, ""), of_target} - {""}
    return bool(uids) and references.pods.isdisjoint(uids)


def _inline(volume: Volume) -> Candidate:
    own_tags, path = volume.own_tags, volume.own_tags.get(tag.TARGET, "")
    pod = "/".join(filter(None, (own_tags.get(tag.NAMESPACE), own_tags.get(tag.POD))))
    about = f"{volume.size_bytes} bytes, of pod {pod or 'without a name'}, which is gone"
    remedy = "" if path else "restart Carver and see its log: its path is not known"
    return Candidate(
        Kind.INLINE, str(volume.id), _uuid(volume), about, own_tags[tag.NAME], path, remedy
    )


def _half_made(reports: Reports, known: Every) -> Iterator[Candidate]:
    """Find snapshots of copies that are not in progress, and of incomplete group snapshots."""
    copying = {one.own_tags[tag.NAME] for one in known.copies()}
    half_made = reports.half_made(known)
    for one in known.snapshots():
        if one.is_bridge:
            # One whose copy may be in a group that does not answer is in use, for what is known.
            if one.own_tags[tag.NAME] in copying or not known.is_known_unused(one):
                continue
            yield _snapshot(one, "was made for a copy that is not in progress")
        elif one.group_snapshot_id in half_made:
            yield _snapshot(one, f"of group snapshot {one.group_snapshot_id}, which is incomplete")


def _snapshot(one: Snapshot, about: str) -> Candidate:
    uuid = one.group.volume(one.name).uuid
    remedy = "restart Carver, which undoes it, and see its log"
    return Candidate(Kind.HALF_MADE, str(one.id), uuid, f"snapshot, {about}", remedy=remedy)


def _uuid(volume: Volume) -> str:
    return volume.group.volume(volume.name).uuid


def _about(volume: Volume) -> str:
    state = ", not complete" if volume.orphan == Kind.HALF_MADE else ""
    return f"{volume.size_bytes} bytes{state}{_of_claim(volume.claim)}"


def _of_claim(claim: str) -> str:
    return f", was claimed by {claim}" if claim else ""


def proves_absent(known: report.Report, handle: str, groups: tuple[str, ...]) -> bool:
    """Whether the report proves that there is no volume of that id, nor a remainder of one.

    An inline volume's id does not name its group: then all of Carver's groups must be present.
    """
    logical = backing.of_id(handle)
    every = [known.groups.get(one) for one in ([logical.group] if logical.group else groups)]
    return all(
        group is not None and logical.may_be_in(group) and logical.name not in group.volumes
        for group in every
    )


# Of pkg/volume/csi in kubelet.
VOLUME_DATA = "vol_data.json"
_TARGETS = "pods/*/volumes/kubernetes.io~csi/*"
_MOUNTED = {Kind.STAGING: "globalmount", Kind.TARGET: "mount"}


@dataclass(frozen=True)
class Place:
    """A directory of kubelet's; `handle` is empty if kubelet has removed its file there."""

    kind: Kind
    directory: str
    path: str
    identity: str
    handle: str


def all_of(kernel: Kernel, kubelet_dir: Sequence[str], driver_name: str) -> list[Place]:
    """Find every place of the driver's by kubelet's files, without touching what is mounted.

    Read this before the volumes: the report then includes volumes made meanwhile.
    """
    places: list[Place] = []
    for one in map(Path, kubelet_dir):
        staging = one / "plugins/kubernetes.io/csi" / driver_name
        places += _places(kernel, Kind.STAGING, staging, "*", driver_name)
        places += _places(kernel, Kind.TARGET, one, _TARGETS, driver_name)
    return places


def candidates(
    places: Sequence[Place],
    mounts: Table,
    known: report.Report,
    groups: tuple[str, ...],
    references: References,
) -> Iterator[Candidate]:
    """Find places whose volumes are proved absent, and that the cluster does not refer to."""
    whole = all(one in known.groups for one in groups)
    digests = {
        cluster.digest(str(VolumeId.of(group, name)))
        for group in known.groups.values()
        for name in group.volumes
    }
    for one in places:
        if one.handle:
            lost = proves_absent(known, one.handle, groups)
        else:
            # Only its name identifies its volume, which an absent group may have.
            lost = whole and Path(one.directory).name not in digests
        wanted = (
            pod_of(one.path) in references.pods
            if one.kind is Kind.TARGET
            else Path(one.directory).name in references.handle_digests
        )
        if lost and not wanted:
            seen = mounts.top(one.path)
            what = f"has {seen}" if seen else "has nothing mounted"
            about = f"of {one.handle or 'a volume'}, which is not there; {what}"
            yield Candidate(one.kind, one.directory, one.identity, about, one.handle, one.path)


def _places(
    kernel: Kernel, kind: Kind, directory: Path, pattern: str, driver_name: str
) -> Iterator[Place]:
    for one in _inside(directory, pattern):
        data = _volume_data(one / VOLUME_DATA)
        # A staging directory is the driver's by its place, also if its file is gone.
        if data is None or (kind is Kind.TARGET and not data.get("volumeHandle")):
            continue
        if data.get("driverName", driver_name if kind is Kind.STAGING else "") != driver_name:
            continue
        with suppress(OSError):  # gone meanwhile
            seen = kernel.lstat(str(one))
            path, identity = str(one / _MOUNTED[kind]), f"{seen.st_dev}.{seen.st_ino}"
            yield Place(kind, str(one), path, identity, data.get("volumeHandle", ""))


def _inside(directory: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return sorted(one for one in directory.glob(pattern) if not one.is_symlink())
    return []


def _volume_data(file: Path) -> dict[str, str] | None:
    """Read kubelet's file; empty if there is none, None if it cannot be parsed."""
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None
    return {str(key): str(value) for key, value in data.items()} if isinstance(data, dict) else None
