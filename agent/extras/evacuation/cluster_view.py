"""Reads what the plan of an evacuation is made of, from the API server and from the nodes.

The API server is asked for four lists: Nodes, PersistentVolumes, claims and pods. node_inventory.py
asks the nodes. No request is about a single volume.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agent.core import errors, ids
from agent.extras.controller.nodes import Nodes
from agent.extras.evacuation import evacuation_request, move_notes
from agent.extras.evacuation.evacuated_nodes import is_ready
from agent.extras.evacuation.evacuation_request import BadRequest, Kind, Request
from agent.extras.evacuation.node_inventory import Inventory, NodeInventory
from agent.extras.evacuation.plan import Claim, Node, PersistentVolume, Plan, Pod, View, plan
from agent.extras.evacuation.scheduling import (
    NodeAffinity,
    NodeTerm,
    PodTerm,
    Requirement,
    Taint,
    Toleration,
)
from agent.extras.kubernetes.objects import NODES, VOLUMES, Lists, Object, claims_of
from agent.extras.kubernetes.rebinding import is_for_one_node

T = TypeVar("T")

_CLAIMS, _PODS = "/api/v1/persistentvolumeclaims", "/api/v1/pods"
# Annotation of a mirror pod, which shows a static pod (api/core/v1, MirrorPodAnnotationKey).
_MIRROR = "kubernetes.io/config.mirror"
# Value of whenUnsatisfiable of a topology spread constraint that the scheduler must satisfy.
_MUST_SPREAD = "DoNotSchedule"
# Name in an item of a list, as it is kept in memory, of the record that was made of the object.
_RECORD = "record"


@dataclass(frozen=True)
class NodeRequest:
    """A Node with a request to evacuate it, or with an annotation that is none."""

    node: str
    uid: str
    is_schedulable: bool
    request: Request | BadRequest


class ClusterView:
    """Reads views for plans. Its methods wait for the API server and for nodes.

    `loop` is the event loop that uses the nodes; no method may be called in it.
    """

    def __init__(
        self,
        driver_name: str,
        nodes: Nodes,
        lists: Lists,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._driver_name, self._lists, self._loop = driver_name, lists, loop
        self._topology_key = ids.topology_key(driver_name)
        self._inventory = NodeInventory(nodes)

    def requests(self) -> Sequence[NodeRequest]:
        """Return the requests to evacuate nodes, by one list of the Nodes.

        Raises ClusterSilent if the API server refuses or does not answer.
        """
        nodes = self._read(NODES, "NodeList", self._node_and_request)
        return sorted(
            (
                NodeRequest(node.name, uid, node.is_schedulable, request)
                for node, uid, request in nodes
                if request is not None
            ),
            key=lambda found: found.node,
        )

    def plan(self, node: str, request: Request | None = None) -> Plan:
        """Read the cluster, and plan the evacuation of a node. Raises what `view` raises."""
        asked = request or Request()
        return plan(self.view(node, asked.to), asked.to, force=asked.force)

    def view(self, node: str, to: Sequence[str] = ()) -> View:
        """Read what is known of the cluster for the evacuation of a node.

        `to` bounds the nodes that are asked for their space. Raises ClusterSilent if the API server
        refuses or does not answer; Refused if the node is unknown, or if it does not answer or its
        answer is refused.
        """
        found = self._read(NODES, "NodeList", self._node_and_request)
        nodes = [
            replace(known, is_evacuated=isinstance(asked, Request) and asked.kind is Kind.EVACUATE)
            for known, _, asked in found
        ]
        candidates = [
            known.name
            for known in nodes
            if known.is_ready
            and known.is_schedulable
            and not known.is_evacuated
            and (not to or known.name in to)
        ]
        volumes = self._read(VOLUMES, "PersistentVolumeList", self._volume)
        claims = self._read(_CLAIMS, "PersistentVolumeClaimList", _claim)
        pods = self._read(_PODS, "PodList", _pod)
        inventory = self._ask_nodes(node, candidates)
        return View(
            node,
            [
                replace(
                    known,
                    problem=inventory.problems.get(known.name, ""),
                    rooms=inventory.rooms.get(known.name, {}),
                    left=inventory.left.get(known.name, ()),
                )
                for known in nodes
            ],
            inventory.volumes,
            volumes,
            claims,
            pods,
            inventory.snapshots,
            inventory.moves,
        )

    def _ask_nodes(self, node: str, candidates: Sequence[str]) -> Inventory:
        """Ask the evacuated node for what it has, and candidates for their space."""
        work = self._inventory.read(node, candidates)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _read(self, path: str, kind: str, parse: Callable[[Object], T | None]) -> Sequence[T]:
        """Read a whole list; return what `parse` makes of its objects, without None.

        Only that is kept in memory, page by page. Raises ClusterSilent, also for an object that
        cannot be parsed: a volume could be moved away from a pod that was not seen.
        """

        def keep(item: Object) -> Object:
            try:
                return {_RECORD: parse(item)}
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                name = str(item["metadata"]["name"])
                problem = f"{name} cannot be parsed: {type(error).__name__}: {error}"
                raise errors.ClusterSilent(path, problem) from None

        listing = self._lists.whole(path, kind, keep=keep)
        return [item[_RECORD] for item in listing.items if item[_RECORD] is not None]

    def _node_and_request(self, item: Object) -> tuple[Node, str, Request | BadRequest | None]:
        metadata, spec = item["metadata"], item.get("spec") or {}
        node = Node(
            metadata["name"],
            str(metadata.get("creationTimestamp") or ""),
            _texts(metadata.get("labels")),
            tuple(
                Taint(str(taint["key"]), str(taint["effect"]), str(taint.get("value") or ""))
                for taint in spec.get("taints") or ()
            ),
            is_ready=is_ready(item),
            is_schedulable=not spec.get("unschedulable"),
            has_label=(metadata.get("labels") or {}).get(self._topology_key)
            == ids.node_segment(str(metadata["name"])),
        )
        annotations = metadata.get("annotations") or {}
        return node, metadata["uid"], evacuation_request.of(annotations, self._driver_name)

    def _volume(self, item: Object) -> PersistentVolume | None:
        """Return the record of a PersistentVolume; None for one that no plan needs.

        That is one of another driver that each node can have.
        """
        metadata, spec = item["metadata"], item["spec"]
        source, reference = spec.get("csi") or {}, spec.get("claimRef") or {}
        is_own = source.get("driver") == self._driver_name
        affinity = _affinity((spec.get("nodeAffinity") or {}).get("required"))
        if affinity is None and not is_own:
            return None
        handle = str(source["volumeHandle"]) if is_own else ""
        annotations = metadata.get("annotations") or {}
        return PersistentVolume(
            metadata["name"],
            metadata["uid"],
            handle,
            str((item.get("status") or {}).get("phase") or ""),
            bool(metadata.get("deletionTimestamp")),
            # The API server sets the policy, Retain by default (api/core/v1, defaults.go).
            str(spec.get("persistentVolumeReclaimPolicy") or "Retain"),
            str(reference.get("namespace") or ""),
            str(reference.get("name") or ""),
            str(reference.get("uid") or ""),
            affinity,
            is_for_one_node=is_for_one_node(spec, self._topology_key),
            moves_to=move_notes.target_of(annotations, self._driver_name, handle) if is_own else "",
        )


def _claim(item: Object) -> Claim:
    metadata = item["metadata"]
    owners = metadata.get("ownerReferences") or ()
    return Claim(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        str((item.get("spec") or {}).get("volumeName") or ""),
        is_being_deleted=bool(metadata.get("deletionTimestamp")),
        is_of_pod=any(owner.get("kind") == "Pod" for owner in owners),
        labels=_texts(metadata.get("labels")),
    )


def _pod(item: Object) -> Pod | None:
    """Return the record of a pod; None for a pod that has ended, which uses nothing."""
    metadata, spec, status = item["metadata"], item["spec"], item.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    affinity = spec.get("affinity") or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    anti_affinity = affinity.get("podAntiAffinity") or {}
    pod_affinity = affinity.get("podAffinity") or {}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    namespace = metadata["namespace"]
    return Pod(
        namespace,
        metadata["name"],
        metadata["uid"],
        str(spec.get("nodeName") or ""),
        _texts(metadata.get("labels")),
        tuple(claims_of(item)),
        next(
            (
                str(owner.get("kind"))
                for owner in metadata.get("ownerReferences") or ()
                if owner.get("controller")
            ),
            "",
        ),
        is_static=_MIRROR in (metadata.get("annotations") or {}),
        is_being_deleted=bool(metadata.get("deletionTimestamp")),
        node_selector=_texts(spec.get("nodeSelector")),
        node_affinity=_affinity(node_affinity.get(required)),
        tolerations=tuple(
            Toleration(
                *(str(entry.get(key) or "") for key in ("key", "operator", "value", "effect"))
            )
            for entry in spec.get("tolerations") or ()
        ),
        anti_affinity=tuple(
            _pod_term(term, namespace) for term in anti_affinity.get(required) or ()
        ),
        spread_keys=tuple(
            str(constraint.get("topologyKey"))
            for constraint in spec.get("topologySpreadConstraints") or ()
            if constraint.get("whenUnsatisfiable") == _MUST_SPREAD
        ),
        needs_neighbours=bool(pod_affinity.get(required)),
    )


def _texts(table: Any) -> Mapping[str, str]:
    return {str(key): str(value) for key, value in (table or {}).items()}


def _affinity(required: Any) -> NodeAffinity:
    """Return the terms of a required node affinity; None without one."""
    if required is None:
        return None
    return tuple(
        NodeTerm(
            tuple(_requirements(term.get("matchExpressions"))),
            tuple(_requirements(term.get("matchFields"))),
        )
        for term in required.get("nodeSelectorTerms") or ()
    )


def _requirements(expressions: Any) -> Iterator[Requirement]:
    for expression in expressions or ():
        yield Requirement(
            str(expression["key"]),
            str(expression["operator"]),
            tuple(map(str, expression.get("values") or ())),
        )


def _pod_term(term: Mapping[str, Any], namespace: str) -> PodTerm:
    """Return a term of a required anti-affinity of a pod in a namespace.

    The pod's own namespace counts if the term has neither namespaces nor a namespaceSelector
    (kube-scheduler, getNamespacesFromPodAffinityTerm). `matchLabelKeys` need no care: the API
    server adds them to the labelSelector when the pod is created.
    """
    selector = term.get("labelSelector")
    requirements: tuple[Requirement, ...] | None = None
    if selector is not None:
        labels = _texts(selector.get("matchLabels"))
        requirements = (
            *(Requirement(key, "In", (value,)) for key, value in sorted(labels.items())),
            *_requirements(selector.get("matchExpressions")),
        )
    names, namespaces = term.get("namespaces") or (), frozenset({namespace})
    if term.get("namespaceSelector") is not None:
        return PodTerm(str(term["topologyKey"]), requirements, None)
    return PodTerm(str(term["topologyKey"]), requirements, frozenset(map(str, names)) or namespaces)
