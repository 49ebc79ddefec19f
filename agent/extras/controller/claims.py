"""Look-ups at the API server about the claim of a new volume: its node, its pods' other claims.

The scheduler chooses a node for a pod, and all the pod's claims are provisioned at once, each for
that node. A restored or cloned volume is made on its source's node, even if the scheduler chose
another node. Then the pod has volumes on two nodes, can run on neither, and its volumes are never
moved. So the nodes of the pod's other volumes are looked up before a volume is made.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import quote

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.extras.controller import questions
from agent.extras.controller.nodes import unavailable
from agent.extras.controller.questions import NotInTime, Questions, SharedReading
from agent.extras.kubernetes.objects import (
    CONTENTS,
    NODES,
    VOLUMES,
    Lists,
    Object,
    Objects,
    claims_of,
)
from agent.extras.orphans import references
from proto import csi_pb2 as csi

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SNAPSHOTS = "snapshot.storage.k8s.io"
_CONTENT = "VolumeSnapshotContent"
# Fields in the source of a VolumeSnapshotContent: the id of an existing snapshot, or the id of the
# volume that a snapshot is taken of.
_HANDLES = ("snapshotHandle", "volumeHandle")
# Maximum number of other claims that are looked up for one claim: a pod may use thousands.
_MOST_CLAIMS = 64
# Parameters that external-provisioner adds to CreateVolume with --extra-create-metadata.
_NAME, _NAMESPACE = "csi.storage.k8s.io/pvc/name", "csi.storage.k8s.io/pvc/namespace"


@dataclass(frozen=True)
class ClaimName:
    """The namespace and the name of a PersistentVolumeClaim."""

    namespace: str
    name: str

    @classmethod
    def of(cls, request: csi.CreateVolumeRequest) -> Self | None:
        """Return the claim for which a volume is created; None if the request does not name it."""
        names = request.parameters.get(_NAMESPACE, ""), request.parameters.get(_NAME, "")
        return cls(*names) if all(names) else None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class OtherVolume:
    """Where the volume of another claim of the same pod is, or will be.

    `segments` are the topology segments in the node affinity of the claim's PersistentVolume. For a
    claim without a PersistentVolume, `source` is the id of the volume or snapshot from which the
    claim's volume is to be made.
    """

    pod: str
    claim: str
    segments: frozenset[str] = frozenset()
    source: VolumeId | None = None


class Claims:
    """Reads claims, their sources, and unscheduled pods from the API server, without a cache.

    All methods wait for the API server. They raise ClusterRefused or ClusterSilent if it refuses or
    does not answer. No call of a method uses an object that was read before the call began.
    """

    def __init__(self, objects: Objects, lists: Lists, driver_name: str, topology_key: str) -> None:
        self._objects, self._lists = objects, lists
        self._driver_name, self.topology_key = driver_name, topology_key
        self._segments = SharedReading(self._read_segments, time.monotonic)

    def has_node(self, segment: str, since_seconds: float) -> bool:
        """Return whether the cluster has a Node, ready or not, whose name gives a topology segment.

        The labels of a Node do not count: root on a node can write the labels of its own Node.
        Usually the Node exists, and one request for a few bytes finds it. Only the list of all
        Nodes proves that a Node does not exist, or has the name that was shortened to the segment.
        Concurrent calls share a list that was read after `since_seconds` (monotonic), the time at
        which this call began.
        """
        if not ids.looks_shortened(segment):
            listing = self._lists.metadata(NODES, fieldSelector=f"metadata.name={segment}")
            if listing.items:
                return True
        return segment in self._segments.since(since_seconds)

    def _read_segments(self) -> frozenset[str]:
        """Return the topology segments that follow from the names of all Nodes."""
        nodes = self._lists.nodes().items
        return frozenset(ids.node_segment(node["metadata"]["name"]) for node in nodes)

    def is_scheduled(self, claim: ClaimName) -> bool:
        """Return whether the scheduler chose a node for a claim, or the claim does not exist.

        The scheduler chooses a node for a class with volumeBindingMode WaitForFirstConsumer. A
        claim that was deleted counts as scheduled: nothing proves that its volume may be on any
        node.
        """
        named_claim = self._claim(claim.namespace, claim.name)
        return named_claim is None or references.selected_node(named_claim) != ""

    def others(self, claim: ClaimName) -> Sequence[OtherVolume]:
        """Return where the other volumes are of each unscheduled pod that uses a claim.

        Pods that are being deleted are left out. The method sends one request for the list of the
        namespace's pods without a node, one for each other claim, and one or two for the volume to
        which that claim is bound or from which it is made.

        A claim is left out if it has neither a PersistentVolume nor a source of this driver, if its
        source does not exist yet, or if 64 other claims come before it.
        """
        other_claims = []
        for pod in self._waiting(claim.namespace):
            names = dict.fromkeys(claims_of(pod))
            if claim.name in names and not pod["metadata"].get("deletionTimestamp"):
                pod_name = pod["metadata"]["name"]
                other_claims += [(pod_name, name) for name in names if name != claim.name]
        return [
            place
            for pod_name, name in other_claims[:_MOST_CLAIMS]
            for place in self._places(pod_name, claim.namespace, name)
        ]

    def _waiting(self, namespace: str) -> Sequence[Object]:
        """Return the pods of a namespace that the scheduler has assigned to no node yet."""
        path = _path("/api/v1", namespace, "pods")
        return self._lists.whole(path, "PodList", fieldSelector="spec.nodeName=").items

    def _places(self, pod: str, namespace: str, name: str) -> Iterator[OtherVolume]:
        """Yield where the volume of one claim is or will be; nothing if that is not known."""
        claim = self._claim(namespace, name)
        if claim is None:
            return
        spec = claim.get("spec") or {}
        if spec.get("volumeName"):
            volume_spec = self._volume_of(claim)
            segments = frozenset(references.nodes_of(volume_spec, self.topology_key))
            if segments:
                yield OtherVolume(pod, name, segments=segments)
        elif source := self._source(namespace, spec):
            yield OtherVolume(pod, name, source=source)

    def _source(self, namespace: str, spec: Object) -> VolumeId | None:
        """Return the id of the volume or snapshot from which a claim's volume is to be made.

        None without such a source, and for a source of another driver or in another namespace.
        """
        reference = spec.get("dataSourceRef") or spec.get("dataSource") or {}
        group, kind, name = (str(reference.get(key) or "") for key in ("apiGroup", "kind", "name"))
        if reference.get("namespace") not in (None, "", namespace):
            # The claim's source is in another namespace. Ignore the source: the author of the claim
            # may have no right to read that namespace.
            return None
        if (group, kind) == (_SNAPSHOTS, "VolumeSnapshot"):
            return self._snapshot_id(namespace, name)
        if (group, kind) == ("", "PersistentVolumeClaim"):
            return self._volume_id(namespace, name)
        return None

    def _snapshot_id(self, namespace: str, name: str) -> VolumeId | None:
        """Return the id of a snapshot; until the snapshot is taken, the id of its source volume.

        None if neither is known, or if the snapshot is of another driver.
        """
        path = _path(f"/apis/{_SNAPSHOTS}/v1", namespace, "volumesnapshots", name)
        snapshot = self._objects.find(path, "VolumeSnapshot") or {}
        content_name = (snapshot.get("status") or {}).get("boundVolumeSnapshotContentName")
        snapshot_source = (snapshot.get("spec") or {}).get("source") or {}
        if content := content_name or snapshot_source.get("volumeSnapshotContentName"):
            content_object = self._objects.find(f"{CONTENTS}/{_quoted(content)}", _CONTENT) or {}
            spec, status = content_object.get("spec") or {}, content_object.get("status") or {}
            if not _is_for(spec.get("volumeSnapshotRef"), namespace, name):
                return None
            source = spec.get("source") or {}
            handles = (status.get("snapshotHandle"), *map(source.get, _HANDLES))
            return self._own_id(spec, next(filter(None, handles), ""))
        if claim := snapshot_source.get("persistentVolumeClaimName"):
            return self._volume_id(namespace, str(claim))
        return None

    def _volume_id(self, namespace: str, claim: str) -> VolumeId | None:
        """Return the id of this driver's volume to which a claim is bound; None without one."""
        bound_claim = self._claim(namespace, claim)
        source = (self._volume_of(bound_claim).get("csi") if bound_claim else None) or {}
        return self._own_id(source, source.get("volumeHandle"))

    def _own_id(self, source: Object, handle: Any) -> VolumeId | None:
        is_own = source.get("driver") == self._driver_name
        return VolumeId.parse(str(handle)) if is_own else None

    def _volume_of(self, claim: Object) -> Object:
        """Return the spec of a claim's PersistentVolume; empty if none of this driver is bound.

        The PersistentVolume must refer to the claim, too.
        """
        name = (claim.get("spec") or {}).get("volumeName")
        if not name:
            return {}
        volume = self._objects.find(f"{VOLUMES}/{_quoted(name)}", "PersistentVolume") or {}
        spec: Object = volume.get("spec") or {}
        metadata = claim["metadata"]
        is_bound = _is_for(spec.get("claimRef"), metadata["namespace"], metadata["name"])
        is_own = (spec.get("csi") or {}).get("driver") == self._driver_name
        return spec if is_own and is_bound else {}

    def _claim(self, namespace: str, name: str) -> Object | None:
        path = _path("/api/v1", namespace, "persistentvolumeclaims", name)
        return self._objects.find(path, "PersistentVolumeClaim")


class ClaimQuestions:
    """Runs look-ups of claims for the event loop, one at a time for each namespace.

    A look-up is a method of `Claims`, which waits for the API server. So claims and pods that take
    long to look up delay only the claims of the same namespace.

    If the API server does not answer in time, CreateVolume fails, and the provisioner repeats the
    call. A failed call is better than a guess: a volume on the wrong node stays there, and its pod
    never starts. The provisioner could not go on without the API server either.
    """

    def __init__(self, claims: Claims) -> None:
        self.claims = claims
        self._questions = Questions("claims", questions.PATIENCE_SECONDS)

    async def ask(
        self, namespace: str, question: Callable[..., _T], *arguments: object
    ) -> _T | None:
        """Run `question`, a method of `claims`, for a claim of a namespace, and return its result.

        Return None, and log a warning, if the API server refuses for good, for instance because
        this account has no right to read pods, or if an object cannot be parsed. Raises Refused
        (UNAVAILABLE) if the API server does not answer, or if earlier look-ups of the namespace
        take too long.
        """
        try:
            return await self._questions.ask(f"namespace {namespace!r}", question, *arguments)
        except NotInTime as error:
            problem, is_refusal = str(error), False
        except (errors.ClusterRefused, errors.ClusterSilent) as error:
            problem, is_refusal = str(error), error.is_refusal
        except (AttributeError, KeyError, TypeError) as error:
            problem = f"an object cannot be parsed: {type(error).__name__}: {error}"
            is_refusal = True
        subjects = ", ".join(map(str, arguments))
        problem = f"cannot look up {subjects}, for which a volume is to be made: {problem}"
        if not is_refusal:
            raise unavailable(f"{problem}; ask again")
        _log.warning("%s", problem)
        return None

    def stop(self) -> None:
        """Cancel the look-ups that have not begun, and accept no more."""
        self._questions.stop()


def _is_for(reference: Object | None, namespace: str, name: str) -> bool:
    """Return whether `reference` names the object with this namespace and name.

    `reference` stands in a cluster-wide object, a PersistentVolume or a content. A reference in the
    other direction proves nothing: any user of a namespace may make an object that names the
    PersistentVolume or content of another user.
    """
    target = reference or {}
    return (target.get("namespace"), target.get("name")) == (namespace, name)


def _path(version: str, namespace: str, *more: str) -> str:
    return "/".join((version, "namespaces", *map(_quoted, (namespace, *more))))


def _quoted(name: object) -> str:
    """Return a name, quoted as one part of a URL's path: the name may have any characters."""
    return quote(str(name), safe="")
