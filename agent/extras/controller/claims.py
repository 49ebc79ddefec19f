"""What the API server says about the claim of a new volume: its node, and its pods' other claims.

The scheduler chooses a node for a pod, and has all its claims provisioned at once, each on that
node. A restored or cloned one is made on its source's node all the same, and then no node has both
volumes: neither is ever moved. So the places of a pod's other volumes are looked up first.
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
# Where a VolumeSnapshotContent has the id of a snapshot that was there before, or of the volume.
_HANDLES = ("snapshotHandle", "volumeHandle")
# How many other claims are looked up for one: a pod may name thousands.
_MOST_CLAIMS = 64
# What external-provisioner adds to the parameters with --extra-create-metadata.
_NAME, _NAMESPACE = "csi.storage.k8s.io/pvc/name", "csi.storage.k8s.io/pvc/namespace"


@dataclass(frozen=True)
class ClaimName:
    """A claim's namespace and name."""

    namespace: str
    name: str

    @classmethod
    def of(cls, request: csi.CreateVolumeRequest) -> Self | None:
        """The claim that a volume is for; None where the provisioner does not name it."""
        names = request.parameters.get(_NAMESPACE, ""), request.parameters.get(_NAME, "")
        return cls(*names) if all(names) else None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class OtherVolume:
    """Where another claim of the same pod has its volume, or will have it.

    `segments` are the topology segments of the nodes in the affinity of its PersistentVolume. Of a
    claim without one `source` is the id of the volume or snapshot that its volume is to be made of.
    """

    pod: str
    claim: str
    segments: frozenset[str] = frozenset()
    source: VolumeId | None = None


class Claims:
    """Reads claims, waiting pods, and sources of claims; no call goes by what was read before it.

    All methods wait for the API server and raise ClusterRefused, ClusterSilent.
    """

    def __init__(self, objects: Objects, lists: Lists, driver_name: str, topology_key: str) -> None:
        self._objects, self._lists = objects, lists
        self._driver_name, self.topology_key = driver_name, topology_key
        self._segments = SharedReading(self._read_segments, time.monotonic)

    def has_node(self, segment: str, begun: float) -> bool:
        """Whether the cluster has a Node whose name leads to this topology segment, ready or not.

        Labels do not count: root on a node can write those of its Node. One request for a few
        bytes where the Node is there. That it is not is proved by the list of all Nodes, as is
        whether there is one of a shortened name. Claims at once share a list that was read after
        they were asked for, at `begun` (monotonic).
        """
        if not ids.looks_shortened(segment):
            found = self._lists.metadata(NODES, fieldSelector=f"metadata.name={segment}")
            if found.items:
                return True
        return segment in self._segments.since(begun)

    def _read_segments(self) -> frozenset[str]:
        """The topology segments of all Nodes, by their names."""
        every = self._lists.nodes().items
        return frozenset(ids.node_segment(one["metadata"]["name"]) for one in every)

    def is_scheduled(self, claim: ClaimName) -> bool:
        """Whether the scheduler chose a node for a claim, as it does for a class that waits.

        Also True for a claim that is gone: then nothing says that the volume may be anywhere.
        """
        found = self._claim(claim.namespace, claim.name)
        return found is None or references.selected_node(found) != ""

    def others(self, claim: ClaimName) -> Sequence[OtherVolume]:
        """The places of all other volumes of the waiting pods that use a claim, as far as known.

        One list, of the namespace's pods without a node; a request for each other claim, and one or
        two for what that is bound to or made of. A claim that has neither a PersistentVolume nor a
        source of this driver, or whose source is not there yet, has no place; nor has one beyond
        the first 64.
        """
        named = []
        for pod in self._waiting(claim.namespace):
            names = dict.fromkeys(claims_of(pod))
            if claim.name in names and not pod["metadata"].get("deletionTimestamp"):
                pod_name = pod["metadata"]["name"]
                named += [(pod_name, one) for one in names if one != claim.name]
        return [
            place
            for pod_name, name in named[:_MOST_CLAIMS]
            for place in self._places(pod_name, claim.namespace, name)
        ]

    def _waiting(self, namespace: str) -> Sequence[Object]:
        """The pods of a namespace that the scheduler has put on no node yet."""
        path = _path("/api/v1", namespace, "pods")
        return self._lists.whole(path, "PodList", fieldSelector="spec.nodeName=").items

    def _places(self, pod: str, namespace: str, name: str) -> Iterator[OtherVolume]:
        """The place of one claim's volume; none where that is not known."""
        found = self._claim(namespace, name)
        if found is None:
            return
        spec = found.get("spec") or {}
        if spec.get("volumeName"):
            bound = self._volume_of(found)
            segments = frozenset(references.nodes_of(bound, self.topology_key))
            if segments:
                yield OtherVolume(pod, name, segments=segments)
        elif source := self._source(namespace, spec):
            yield OtherVolume(pod, name, source=source)

    def _source(self, namespace: str, spec: Object) -> VolumeId | None:
        """The id of the volume or snapshot of this driver that a claim is to be made of."""
        named = spec.get("dataSourceRef") or spec.get("dataSource") or {}
        group, kind, name = (str(named.get(one) or "") for one in ("apiGroup", "kind", "name"))
        if named.get("namespace") not in (None, "", namespace):
            return None  # who made the claim may have no right to know of it
        if (group, kind) == (_SNAPSHOTS, "VolumeSnapshot"):
            return self._snapshot_id(namespace, name)
        if (group, kind) == ("", "PersistentVolumeClaim"):
            return self._volume_id(namespace, name)
        return None

    def _snapshot_id(self, namespace: str, name: str) -> VolumeId | None:
        """The id of a snapshot; that of its volume until it is taken."""
        path = _path(f"/apis/{_SNAPSHOTS}/v1", namespace, "volumesnapshots", name)
        snapshot = self._objects.find(path, "VolumeSnapshot") or {}
        bound = (snapshot.get("status") or {}).get("boundVolumeSnapshotContentName")
        asked = (snapshot.get("spec") or {}).get("source") or {}
        if content := bound or asked.get("volumeSnapshotContentName"):
            found = self._objects.find(f"{CONTENTS}/{_quoted(content)}", _CONTENT) or {}
            spec, status = found.get("spec") or {}, found.get("status") or {}
            if not _is_for(spec.get("volumeSnapshotRef"), namespace, name):
                return None
            source = spec.get("source") or {}
            handles = (status.get("snapshotHandle"), *map(source.get, _HANDLES))
            return self._own_id(spec, next(filter(None, handles), ""))
        if claim := asked.get("persistentVolumeClaimName"):
            return self._volume_id(namespace, str(claim))
        return None

    def _volume_id(self, namespace: str, claim: str) -> VolumeId | None:
        """The id of the volume that a claim is bound to."""
        found = self._claim(namespace, claim)
        source = (self._volume_of(found).get("csi") if found else None) or {}
        return self._own_id(source, source.get("volumeHandle"))

    def _own_id(self, of: Object, handle: Any) -> VolumeId | None:
        is_own = of.get("driver") == self._driver_name
        return VolumeId.parse(str(handle)) if is_own else None

    def _volume_of(self, claim: Object) -> Object:
        """The specification of a claim's PersistentVolume; empty for none of this driver's."""
        name = (claim.get("spec") or {}).get("volumeName")
        if not name:
            return {}
        found = self._objects.find(f"{VOLUMES}/{_quoted(name)}", "PersistentVolume") or {}
        spec: Object = found.get("spec") or {}
        about = claim["metadata"]
        is_bound = _is_for(spec.get("claimRef"), about["namespace"], about["name"])
        is_own = (spec.get("csi") or {}).get("driver") == self._driver_name
        return spec if is_own and is_bound else {}

    def _claim(self, namespace: str, name: str) -> Object | None:
        path = _path("/api/v1", namespace, "persistentvolumeclaims", name)
        return self._objects.find(path, "PersistentVolumeClaim")


class ClaimQuestions:
    """Asks `Claims` from the event loop, for each namespace one question at a time.

    So claims and pods that take long to look up hold up claims of their namespace only.

    What the API server does not say in time is asked again, by the provisioner: a volume that was
    made on a wrong node stays there, and its pod never starts. The provisioner could not go on
    without the API server either.
    """

    def __init__(self, claims: Claims) -> None:
        self.claims = claims
        self._questions = Questions("claims", questions.PATIENCE_SECONDS)

    async def ask(self, namespace: str, question: Callable[..., _T], *about: object) -> _T | None:
        """The answer to a method of `claims`, for a claim of that namespace.

        None, and a warning, where the API server refuses it for good, as without the right to read
        pods, or an object cannot be parsed. Raises Refused (UNAVAILABLE) where it does not answer.
        """
        try:
            return await self._questions.ask(f"namespace {namespace!r}", question, *about)
        except NotInTime as error:
            problem, is_refusal = str(error), False
        except (errors.ClusterRefused, errors.ClusterSilent) as error:
            problem, is_refusal = str(error), error.is_refusal
        except (AttributeError, KeyError, TypeError) as error:
            problem = f"an object cannot be parsed: {type(error).__name__}: {error}"
            is_refusal = True
        named = ", ".join(map(str, about))
        problem = f"cannot look up {named}, for which a volume is to be made: {problem}"
        if not is_refusal:
            raise unavailable(f"{problem}; ask again")
        _log.warning("%s", problem)
        return None

    def stop(self) -> None:
        """Ask no more."""
        self._questions.stop()


def _is_for(reference: Object | None, namespace: str, name: str) -> bool:
    """Whether an object of the whole cluster names that one of a namespace as its own.

    In the namespace anybody may name an object that is another's.
    """
    named = reference or {}
    return (named.get("namespace"), named.get("name")) == (namespace, name)


def _path(version: str, namespace: str, *more: str) -> str:
    return "/".join((version, "namespaces", *map(_quoted, (namespace, *more))))


def _quoted(name: object) -> str:
    """A name as one part of a path: the name of a source may have any characters."""
    return quote(str(name), safe="")
